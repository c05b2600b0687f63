import jax
import pytest

from .small import Workshop

CACHE = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="session", autouse=True)
def cache_programs(tmp_path_factory):
    """Caches compiled programs on disk: the tests train the same few models repeatedly, also in other processes."""
    settings = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs"))} | CACHE
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)

import jax
import pytest

from .small import Workshop


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """The same small programs come again and again: each is compiled once."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)

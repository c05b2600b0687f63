"""The platforms, the compilation cache and the measurement of bfloat16 matmuls."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from flax import nnx
from jax._src import compiler

from dantinox import platform


def test_auto_is_the_machine_that_runs_the_process():
    assert platform.get_platform() is platform.PLATFORMS["cpu"]
    assert (
        platform.get_platform("tpu").compute_dtype
        == platform.get_platform("gpu").compute_dtype
        == "bfloat16"
    )


def test_compiler_options_depend_on_size():
    cpu, limit = platform.PLATFORMS["cpu"], platform.LARGE_MODEL_BYTES
    assert cpu.compiler_options(limit) == {}
    assert cpu.compiler_options(limit + 1) == dict([platform.MEMORY_SCHEDULER])
    assert platform.PLATFORMS["gpu"].compiler_options(limit + 1) == {}


def squared_norms(x_RI):
    """With the default options, jaxlib 0.10.2 computes a wrong last row of 32,769 rows of three
    numbers.
    """
    return jax.vmap(lambda x_I: jnp.sum((jnp.eye(3) @ x_I) ** 2))(x_RI)


@pytest.mark.parametrize("compiled", [
    jax.jit(squared_norms),
    nnx.jit(squared_norms),
    lambda x_RI: jax.jit(squared_norms).lower(x_RI).compile()(x_RI),
    lambda x_RI: jax.jit(squared_norms, compiler_options=dict([platform.MEMORY_SCHEDULER]))(x_RI),
], ids=["jax.jit", "nnx.jit", "lowered", "with options"])  # fmt: skip
def test_sums_of_matmul_results_are_exact(compiled):
    x_RI = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0, 0])
    assert compiled(x_RI)[-1] == 2.0**30


@pytest.mark.parametrize(("version", "flags", "backend", "expected"), [
    (platform.MISCOMPILING_JAXLIB, "", "cpu", {"other": 1} | dict([platform.INDIVIDUAL_MATMULS])),
    (platform.MISCOMPILING_JAXLIB, "", "gpu", {"other": 1}),
    (platform.MISCOMPILING_JAXLIB, "--xla_cpu_experimental_ynn_fusion_type=X", "cpu", {"other": 1}),
    ("0.11.0", "", "cpu", {"other": 1}),
])  # fmt: skip
def test_the_safe_option_is_set_for_the_cpu(monkeypatch, version, flags, backend, expected):
    monkeypatch.setattr(
        compiler, "get_compile_options", lambda **keywords: keywords["env_options_overrides"]
    )
    monkeypatch.setattr(jaxlib, "__version__", version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    platform._prevent_miscompilation()
    options = compiler.get_compile_options(
        backend=SimpleNamespace(platform=backend), env_options_overrides={"other": 1}
    )
    assert options == expected
    own = {platform.INDIVIDUAL_MATMULS[0]: "own"}
    assert (
        compiler.get_compile_options(
            backend=SimpleNamespace(platform=backend), env_options_overrides=own
        )
        == own
    )


SQUARED_NORM = """
import jax, jax.numpy as jnp
from jax._src import compiler
{first}
import dantinox.platform
x_RI = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0, 0])
print(float(jax.jit(jax.vmap(lambda x_I: jnp.sum((jnp.eye(3) @ x_I) ** 2)))(x_RI)[-1]))
print(hasattr(compiler.get_compile_options, "__wrapped__"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "flags", "option_is_set"), [
    ("", "", True),
    ("jnp.ones(3).block_until_ready()", "", True),
    ("", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT", False),
], ids=["backend starts after the import", "backend starts before the import",
        "value in XLA_FLAGS"])  # fmt: skip
def test_the_safe_option_is_set_in_a_new_process(first, flags, option_is_set):
    code, environment = SQUARED_NORM.format(first=first), os.environ | {"XLA_FLAGS": flags}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    found, is_set = out.split()
    assert is_set == str(option_is_set and jaxlib.__version__ == platform.MISCOMPILING_JAXLIB)
    if option_is_set:  # otherwise, it depends on the CPU whether the result is wrong
        assert float(found) == 2.0**30


def test_bfloat16_gain_is_measured_once_per_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(platform, "_measure_gain", lambda: measured.append(1) or 1.234)
    for _ in range(2):
        platform.bfloat16_gain.cache_clear()
        assert platform.bfloat16_gain() == 1.23
    platform.bfloat16_gain.cache_clear()
    (file,) = (tmp_path / "dantinox").iterdir()
    assert measured == [1] and list(json.loads(file.read_text()).values()) == [1.23]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, 1.0, 0), ("own/jax", 0, -1)),
        (("/elsewhere", 1.0, 0), ("/elsewhere", 0, -1)),
        ((None, 3.0, 5), ("own/jax", 3.0, 5)),
    ],
)
def test_the_compilation_cache_respects_the_settings_of_jax(tmp_path, monkeypatch, before, after):
    names = (
        "compilation_cache_dir",
        "persistent_cache_min_compile_time_secs",
        "persistent_cache_min_entry_size_bytes",
    )
    values = dict(zip((f"jax_{name}" for name in names), before, strict=True))
    monkeypatch.setattr(
        platform,
        "jax",
        SimpleNamespace(config=SimpleNamespace(values=values, update=values.__setitem__)),
    )
    monkeypatch.setattr(platform, "cache_folder", lambda: tmp_path / "own")
    resets = []
    monkeypatch.setattr(platform.compilation_cache, "reset_cache", lambda: resets.append(1))
    monkeypatch.setenv("DANTINOX_COMPILATION_CACHE", "off")
    platform.use_compilation_cache()
    assert tuple(values.values()) == before
    monkeypatch.delenv("DANTINOX_COMPILATION_CACHE")
    platform.use_compilation_cache()
    folder, *thresholds = after
    assert tuple(values.values()) == (folder.replace("own", str(tmp_path / "own")), *thresholds)
    assert resets == [1] * (before[0] is None)


CACHE = """
import jax
from dantinox.platform import use_compilation_cache
use_compilation_cache()
values = jax.config.values
print(values["jax_compilation_cache_dir"], values["jax_persistent_cache_min_compile_time_secs"])
"""


@pytest.mark.slow
def test_the_compilation_cache_of_the_python_api(tmp_path):
    def found(**environment):
        names = (
            "JAX_COMPILATION_CACHE_DIR",
            "DANTINOX_COMPILATION_CACHE",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        )
        clean = {name: value for name, value in os.environ.items() if name not in names}
        clean |= {"XDG_CACHE_HOME": str(tmp_path)} | environment
        return subprocess.run(
            [sys.executable, "-c", CACHE], env=clean, capture_output=True, text=True, check=True
        ).stdout.split()

    assert found() == [str(tmp_path / "dantinox" / "jax"), "0"]
    assert found(JAX_COMPILATION_CACHE_DIR="/elsewhere") == ["/elsewhere", "0"]
    assert found(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="3") == [
        str(tmp_path / "dantinox" / "jax"),
        "3.0",
    ]
    assert found(DANTINOX_COMPILATION_CACHE="off") == ["None", "1.0"]

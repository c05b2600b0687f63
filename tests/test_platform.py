"""The platforms, the compilation cache and the measurement of bfloat16 matmuls."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from flax import nnx

from dantinox import platform


def test_auto_is_the_machine_that_runs_the_process():
    assert platform.get_platform() is platform.PLATFORMS["cpu"]
    assert platform.get_platform("tpu").compute_dtype == platform.get_platform("gpu").compute_dtype == "bfloat16"


def test_compiler_options_depend_on_size():
    cpu, limit = platform.PLATFORMS["cpu"], platform.LARGE_MODEL_BYTES
    assert cpu.compiler_options(limit) == {}
    assert cpu.compiler_options(limit + 1) == dict([platform.MEMORY_SCHEDULER])
    assert platform.PLATFORMS["gpu"].compiler_options(limit + 1) == {}


def squared_norms(x_RI):
    """With the default options, jaxlib 0.10.2 computes a wrong last row of 32,769 rows of three numbers."""
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


SQUARED_NORM = """
import jax, jax.numpy as jnp
{first}
import dantinox.platform
x_RI = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0, 0])
print(float(jax.jit(jax.vmap(lambda x_I: jnp.sum((jnp.eye(3) @ x_I) ** 2)))(x_RI)[-1]))
"""


@pytest.mark.parametrize(("first", "flags", "option_is_set"), [
    ("", "", True),
    ("jnp.ones(3).block_until_ready()", "", True),
    ("", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT", False),
], ids=["backend starts after the import", "backend starts before the import", "value in XLA_FLAGS"])  # fmt: skip
def test_the_safe_option_is_set_in_a_new_process(first, flags, option_is_set):
    code, environment = SQUARED_NORM.format(first=first), os.environ | {"XLA_FLAGS": flags}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert (float(out) == 2.0**30) == (option_is_set or jaxlib.__version__ != "0.10.2")


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


CACHE = """
import jax
from dantinox.platform import use_compilation_cache
use_compilation_cache()
values = jax.config.values
print(values["jax_compilation_cache_dir"], values["jax_persistent_cache_min_compile_time_secs"])
"""


def test_the_compilation_cache_of_the_python_api(tmp_path):
    def found(**environment):
        names = ("JAX_COMPILATION_CACHE_DIR", "DANTINOX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
        clean = {name: value for name, value in os.environ.items() if name not in names}
        clean |= {"XDG_CACHE_HOME": str(tmp_path)} | environment
        return subprocess.run(
            [sys.executable, "-c", CACHE], env=clean, capture_output=True, text=True, check=True
        ).stdout.split()

    assert found() == [str(tmp_path / "dantinox" / "jax"), "0"]
    assert found(JAX_COMPILATION_CACHE_DIR="/elsewhere") == ["/elsewhere", "0"]
    assert found(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="3") == [str(tmp_path / "dantinox" / "jax"), "3.0"]
    assert found(DANTINOX_COMPILATION_CACHE="off") == ["None", "1.0"]

"""The platforms, the compilation cache and the measurement of bfloat16 matmuls."""

import json
import os
import subprocess
import sys

import pytest

from dantinox import platform


def test_auto_is_the_machine_that_runs_the_process():
    assert platform.get_platform() is platform.PLATFORMS["cpu"]
    assert platform.get_platform("tpu").compute_dtype == platform.get_platform("gpu").compute_dtype == "bfloat16"


@pytest.mark.parametrize(("float32", "large"), [(False, False), (False, True), (True, False), (True, True)])
def test_compiler_options_depend_on_dtype_and_size(float32, large):
    cpu, limit = platform.PLATFORMS["cpu"], platform.LARGE_MODEL_BYTES
    options = cpu.compiler_options(float32, limit + large)
    expected = dict([platform.YNNPACK_MATMULS] * float32 + [platform.MEMORY_SCHEDULER] * large)
    assert options == expected
    assert platform.PLATFORMS["gpu"].compiler_options(float32, limit + large) == {}


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

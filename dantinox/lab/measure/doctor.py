"""`dantinox doctor`: versions, devices and speed of this machine."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp

from dantinox import __version__
from dantinox.kernels import load_kernels
from dantinox.machine import cache_folder
from dantinox.platform import INDIVIDUAL_MATMULS, bfloat16_gain, get_platform, use_compilation_cache
from dantinox.report import human_bytes

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tokenizers",
    "numpy",
    "matplotlib",
)
REPEATS = 5


def doctor_lines() -> Iterator[str]:
    """Yields lines about versions, devices, their speed, and the compilation cache."""
    yield (
        f"python {platform.python_version()} on {platform.system()} {platform.machine()},"
        f" {os.cpu_count()} cores"
    )
    yield f"dantinox {__version__}"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"
    for device in jax.devices():
        stats = device.memory_stats() or {}
        memory = f", {human_bytes(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        yield f"device {device.id}: {device.platform} {device.device_kind}{memory}"
    yield _compiler_check()
    flops, dtype = matmul_speed()
    yield f"matrix multiplications: {flops / 1e9:.0f} GFLOP/s in {dtype}"
    if get_platform().name == "cpu":
        speed = f"{bfloat16_gain():.2g} × the speed of float32"
        yield (
            f"matrix multiplications of eight rows with bfloat16 weights: {speed} (saved in"
            f" {cache_folder()})"
        )
        yield load_kernels().note
    # XLA sums the rows of an array in parallel, a single row in one thread.
    large = jnp.ones((1 << 6, 1 << 20), jnp.float32)
    yield f"memory: {human_bytes(large.nbytes / _seconds(lambda x: jnp.sum(x, axis=1), large))}/s"
    use_compilation_cache()  # set last: the benchmarks above should not fill the cache
    yield (
        "compiled programs are cached in"
        f" {jax.config.values['jax_compilation_cache_dir'] or 'memory only'}"
    )


def matmul_speed() -> tuple[float, str]:
    """Measures the FLOP/s of large matrix multiplications, and returns them with the dtype. It
    takes a fraction of a second.
    """
    size, dtype = (1024, "float32") if get_platform().name == "cpu" else (8192, "bfloat16")
    square = jnp.ones((size, size), dtype)
    return 2 * size**3 / _seconds(jnp.matmul, square, square), dtype


def _compiler_check() -> str:
    """Runs a program that jaxlib 0.10.2 compiles wrongly by default; see
    `dantinox.platform.INDIVIDUAL_MATMULS`.
    """
    x_RI = jnp.arange(32_769.0)[:, None] * jnp.array([1.0, 0, 0])
    found = int(jax.jit(jax.vmap(lambda x_I: jnp.sum((jnp.eye(3) @ x_I) ** 2)))(x_RI)[-1])
    expected = 2**30
    if found == expected:
        return "compiler check: sums of matrix multiplication results are correct"
    name, value = INDIVIDUAL_MATMULS
    return (
        f"compiler check: wrong results, {found} instead of {expected} for a sum of matrix"
        f" multiplication results; set XLA_FLAGS=--{name}={value}"
    )


def _seconds(function: Callable[..., jax.Array], *inputs: jax.Array) -> float:
    """Returns the shortest time of several runs, after one run that compiles."""
    compiled = jax.jit(function)
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        compiled(*inputs).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])

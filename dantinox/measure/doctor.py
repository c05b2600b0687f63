"""What `dantinox doctor` tells about a machine."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp

from dantinox.report import human_bytes

PACKAGES = ("dantinox", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers", "numpy", "matplotlib")


def examine() -> Iterator[str]:
    """Lines about versions, devices, their speed, and the compilation cache."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"
    for device in jax.devices():
        stats = device.memory_stats() or {}
        memory = f", {human_bytes(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
        yield f"device {device.id}: {device.platform} {device.device_kind}{memory}"
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    yield f"matrix products: {_products(dtype) / 1e9:.0f} GFLOP/s in {jnp.dtype(dtype).name}"
    yield f"memory: {human_bytes(_bandwidth())}/s"
    yield f"compiled programs are kept in {jax.config.values['jax_compilation_cache_dir'] or 'memory only'}"


def _products(dtype) -> float:
    """Floating-point operations per second of a large matrix product."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / _seconds(lambda: product(x, x))


def _bandwidth() -> float:
    """Bytes per second of summing a large array."""
    x = jnp.ones(1 << 26, jnp.float32)
    total = jax.jit(jnp.sum)
    return x.nbytes / _seconds(lambda: total(x))


def _seconds(run: Callable[[], jax.Array], repeats: int = 5) -> float:
    """The shortest of several runs, after one to compile."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])

"""Compiled programs: shared traces, target chips, memory analysis; and `exit_now`, the one way to end the process at once."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

_shares_traces = True


def shared_trace(*static_argnames: str) -> Callable[[Callable], Callable]:
    """A decorator: the function is traced once for equal arguments and inlined at every call.

    The program is the same as without it. Its operations carry the source line of the call, not their own: see
    `separate_traces`.
    """

    def decorate(function: Callable) -> Callable:
        shared = jax.jit(function, static_argnames=static_argnames, inline=True)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (shared if _shares_traces else function)(*args, **kwargs)

        return call

    return decorate


@contextmanager
def separate_traces() -> Iterator[None]:
    """Programs traced inside name the source line of every operation, also within functions of `shared_trace`.

    Tracing takes longer. Earlier programs of the process are dropped, and so are those traced inside when the block ends.
    Programs in the persistent compilation cache may name the lines of another version; inside, only those with the same lines
    are used.
    """
    global _shares_traces
    key_has_lines = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[key_has_lines]
    jax.clear_caches()
    jax.config.update(key_has_lines, True)
    _shares_traces = False
    try:
        yield
    finally:
        _shares_traces = True
        jax.config.update(key_has_lines, before)
        jax.clear_caches()


@dataclass(frozen=True)
class Chip:
    """An accelerator by its maker's figures.

    Attributes:
      kind: what its driver calls it.
      flops: of dense bfloat16 products, per second.
      memory: bytes.
      bandwidth: of that memory, bytes per second.
      link: bytes per second that it can send to the chips next to it, by all its links together: half of what its maker counts
        in both directions.
      source: where the figures are published.
    """

    platform: str
    kind: str
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str


# A TPU's memory is published in GB of 2³⁰ bytes: XLA finds 15.75 of them to give to programs on a v5e.
CHIPS = {
    "h100": Chip(
        "gpu", "NVIDIA H100 80GB HBM3", 989.4e12, 80 * 10**9, 3.35e12, 450e9, "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM"
    ),
    "v5e": Chip("tpu", "TPU v5 lite", 197e12, 16 << 30, 819e9, 200e9, "Google Cloud TPU documentation, TPU v5e"),
    "v5p": Chip("tpu", "TPU v5", 459e12, 95 << 30, 2765e9, 600e9, "Google Cloud TPU documentation, TPU v5p"),
    "v6e": Chip("tpu", "TPU v6 lite", 918e12, 32 << 30, 1640e9, 400e9, "Google Cloud TPU documentation, TPU v6e"),
}


def chip_of(device: jax.Device) -> Chip | None:
    """The figures of a device, None where there are none."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)


@dataclass(frozen=True)
class Bytes:
    """What a compiled program takes; `alias` is the part of the output that stands in the place of donated arguments."""

    arguments: int
    temp: int
    output: int
    alias: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temp + self.output - self.alias


def bytes_of(compiled: Any) -> Bytes:
    """Reads a compiled program."""
    found = compiled.memory_analysis()
    return Bytes(*(getattr(found, f"{kind}_size_in_bytes") for kind in ("argument", "temp", "output", "alias")))


def size(tree: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compiles with these options of the compiler, or with none where this jaxlib does not know one of them."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
    return lowered.compile()


def available_bytes(device: jax.Device) -> int | None:
    """Free memory of an accelerator, or of the machine where the device is its CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    free = [limit for limit in (_meminfo_available(), _container_available()) if limit is not None]
    return min(free, default=None) if device.platform == "cpu" else None


def _meminfo_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _container_available() -> int | None:
    """What a cgroup v2 limit leaves, where there is one."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit, open("/sys/fs/cgroup/memory.current") as current:
            return int(limit.read()) - int(current.read())
    except (OSError, ValueError):
        return None


def exit_now(code: int) -> NoReturn:
    """Ends this process without flushing, joining threads or running exit handlers, which a running compilation would block."""
    os._exit(code)

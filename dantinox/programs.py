"""Helpers for compiled programs (shared traces, target chips, memory analysis), and `exit_now`."""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from dantinox.machine import free_memory

_shares_traces = True


def shared_trace(*static_argnames: str) -> Callable[[Callable], Callable]:
    """Returns a decorator that traces and lowers a function once for equal arguments; XLA inlines
    it at every call.

    The compiled program is the same as without the decorator. Its operations have the source line
    of the first call instead of those of the others: see `separate_traces`.
    """

    def decorate(function: Callable) -> Callable:
        shared = jax.jit(function, static_argnames=static_argnames)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (shared if _shares_traces else function)(*args, **kwargs)

        return call

    return decorate


@contextmanager
def separate_traces() -> Iterator[None]:
    """Turns off `shared_trace` inside the block, so that every operation of a traced program keeps
    its own source line.

    Tracing takes longer. The traces of this process are cleared when the block starts and when it
    ends. A program in the persistent compilation cache may have the source lines of another version
    of the code, so inside the block a cached program is used only if its source lines are equal.
    """
    global _shares_traces
    option = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[option]
    jax.clear_caches()
    jax.config.update(option, True)
    _shares_traces = False
    try:
        yield
    finally:
        _shares_traces = True
        jax.config.update(option, before)
        jax.clear_caches()


@dataclass(frozen=True)
class Chip:
    """The published specifications of an accelerator.

    Attributes:
      platform: jax's platform name, `gpu` or `tpu`.
      kind: jax's `device_kind`, the name that the driver reports.
      flops: floating-point operations per second in dense bfloat16 matmuls.
      memory: bytes of memory.
      bandwidth: memory bandwidth in bytes per second.
      link: bytes per second that all links of the chip together can send. Manufacturers publish the
        sum of both directions; this is half of the published number.
      source: the publication that contains the numbers.
    """

    platform: str
    kind: str
    flops: float
    memory: int
    bandwidth: float
    link: float
    source: str


# A TPU's memory is published in units of 2³⁰ bytes. Programs can use a little less: 15.75 of the 16
# units of a v5e.
CHIPS = {
    "h100": Chip(
        platform="gpu",
        kind="NVIDIA H100 80GB HBM3",
        flops=989.4e12,
        memory=80 * 10**9,
        bandwidth=3.35e12,
        link=450e9,
        source="NVIDIA H100 Tensor Core GPU data sheet, H100 SXM",
    ),
    "v5e": Chip(
        platform="tpu",
        kind="TPU v5 lite",
        flops=197e12,
        memory=16 << 30,
        bandwidth=819e9,
        link=200e9,
        source="Google Cloud TPU documentation, TPU v5e",
    ),
    "v5p": Chip(
        platform="tpu",
        kind="TPU v5",
        flops=459e12,
        memory=95 << 30,
        bandwidth=2765e9,
        link=600e9,
        source="Google Cloud TPU documentation, TPU v5p",
    ),
    "v6e": Chip(
        platform="tpu",
        kind="TPU v6 lite",
        flops=918e12,
        memory=32 << 30,
        bandwidth=1640e9,
        link=400e9,
        source="Google Cloud TPU documentation, TPU v6e",
    ),
}


def find_chip(device: jax.Device) -> Chip | None:
    """Returns the specifications of a device, or None if `CHIPS` does not contain it."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)


@dataclass(frozen=True)
class MemoryUsage:
    """The bytes of memory that a compiled program needs; `alias` is the part of the output that
    reuses donated arguments.
    """

    arguments: int
    temp: int
    output: int
    alias: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temp + self.output - self.alias


def memory_usage(compiled: Any) -> MemoryUsage:
    """Returns the memory that a compiled program needs."""
    found = compiled.memory_analysis()
    return MemoryUsage(
        arguments=found.argument_size_in_bytes,
        temp=found.temp_size_in_bytes,
        output=found.output_size_in_bytes,
        alias=found.alias_size_in_bytes,
    )


def tree_bytes(tree: Any) -> int:
    """Returns the total bytes of a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_program(lowered: Any, options: Mapping[str, Any]) -> Any:
    """Compiles a lowered program with these options. If this jaxlib does not support one of them,
    compiles without options.
    """
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
    return lowered.compile()


def available_bytes(device: jax.Device) -> int | None:
    """Returns the free memory of an accelerator, or of the machine if the device is its CPU; None
    if it is unknown.
    """
    if device.platform == "cpu":
        return free_memory()
    stats = device.memory_stats()
    return (
        stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        if stats and "bytes_limit" in stats
        else None
    )


def free_bytes(memory: int | None = None) -> int | None:
    """Returns the free memory of the first device, at most `memory`; None if neither is known."""
    return min(
        (limit for limit in (available_bytes(jax.devices()[0]), memory) if limit is not None),
        default=None,
    )


def exit_now(code: int) -> NoReturn:
    """Ends this process without flushing, joining threads or running exit handlers; a running
    compilation would block them.
    """
    os._exit(code)

"""Helpers for compiled programs: shared traces, compilation, and the memory that programs need and
devices have. `exit_now` ends a process although a program is being compiled.
"""

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

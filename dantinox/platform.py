"""The target hardware: preferred dtypes, matmul implementation and attention kernel.

A `ModelConfig` contains the name of the target platform, so the machine that compiles a program can
differ from its target. `auto` is the machine that runs the process.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from dantinox.machine import cache_folder, cpu_name, measured_once

LARGE_MODEL_BYTES = 1 << 25  # bytes of weights
# If `bfloat16_gain` is at least this, matmuls with bfloat16 and int8 weights run in bfloat16. The
# limit is below 1 because bfloat16 also avoids the conversion of the weights to float32.
MIN_BFLOAT16_GAIN = 0.8


@dataclass(frozen=True)
class Platform:
    """A kind of machine.

    Attributes:
      compute_dtype: the dtype of `model.dtype: auto`. Matmuls in bfloat16 are slow on a CPU and
        fast on an accelerator.
      bfloat16_cache_as_bits: whether a cache stores bfloat16 as 16-bit integers. XLA on CPU would
        convert the whole cache to float32 for every write and every read.
      segmented_cache: whether the cache of a running batch is divided into segments, so that unused
        segments are not read.
      attention_kernel: the fastest attention kernel, used where it is available
        (`dantinox.model.attention_kernels`).
      max_matvec_rows: two numbers, for bfloat16 weights and for int8 weights. A matmul with up to
        this many rows runs as one matrix–vector product per row.
      min_loss_chunk_tokens: the smallest number of tokens in a chunk of the loss. Every chunk reads
        the weights of the output layer and writes their gradient, so many small chunks cost memory
        traffic.
      prefill_rows: the number of prompt chunks that one program processes in about the time of a
        single chunk.
      decoding_options: compiler options of the programs that generate tokens.
      large_model_options: compiler options for training and evaluation of models with more than
        `LARGE_MODEL_BYTES` of weights.
    """

    name: str
    compute_dtype: str
    bfloat16_cache_as_bits: bool = False
    segmented_cache: bool = False
    attention_kernel: str | None = None
    max_matvec_rows: tuple[int, int] = (0, 0)
    min_loss_chunk_tokens: int = 2048
    prefill_rows: int = 4
    decoding_options: tuple[tuple[str, str], ...] = ()
    large_model_options: tuple[tuple[str, str], ...] = ()

    def compiler_options(self, bytes_of_weights: int) -> dict[str, str]:
        """Returns the compiler options for training and evaluating a model with this size of
        weights.
        """
        return dict(self.large_model_options) if bytes_of_weights > LARGE_MODEL_BYTES else {}


# XLA on a CPU passes matmuls, reductions and combinations of both to the library YNNPACK. jaxlib
# 0.10.2 computes some combinations wrongly (jax-ml/jax#39103). With this option, YNNPACK computes
# individual matmuls only.
MISCOMPILING_JAXLIB = "0.10.2"
INDIVIDUAL_MATMULS = ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT")
# XLA's default scheduler starts every operation as early as possible, which keeps the cores busy in
# a small step. In a large step the cores are busy anyway, and early results only occupy memory.
# With the memory scheduler, a step of a model with 124 M parameters needs a third less memory and
# takes the same time.
MEMORY_SCHEDULER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
# Before each iteration of a loop, and before each conditional, a GPU waits until the host has read
# a value and decided. With this option, both are nodes of the CUDA graph that contains them, and
# the host starts all steps of a program at once.
LOOPS_ON_DEVICE = (
    "xla_gpu_enable_command_buffer",
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE",
)
PLATFORMS = {
    "cpu": Platform(
        "cpu",
        "float32",
        bfloat16_cache_as_bits=True,
        segmented_cache=True,
        max_matvec_rows=(2, 8),
        min_loss_chunk_tokens=1,
        prefill_rows=1,
        large_model_options=(MEMORY_SCHEDULER,),
    ),
    "gpu": Platform(
        "gpu", "bfloat16", attention_kernel="cudnn", decoding_options=(LOOPS_ON_DEVICE,)
    ),
    "tpu": Platform("tpu", "bfloat16", attention_kernel="splash"),
}


def _prevent_miscompilation() -> None:
    """Makes jax compile all CPU programs of this process with `INDIVIDUAL_MATMULS`, if this jaxlib
    needs it.

    Another value of the option in `XLA_FLAGS`, or in the compiler options of a program, takes
    precedence.

    The function replaces a private function of jax, and only with the affected version. It does not
    set `XLA_FLAGS`: XLA reads the variable when the first backend starts, which may be before this
    import. Child processes would inherit the variable, and a jaxlib that does not know the option
    aborts the process.
    """
    name, value = INDIVIDUAL_MATMULS
    if jaxlib.__version__ != MISCOMPILING_JAXLIB or name in os.environ.get("XLA_FLAGS", ""):
        return
    from jax._src import compiler

    get_compile_options = compiler.get_compile_options

    @wraps(get_compile_options)
    def with_individual_matmuls(*args: Any, **kwargs: Any) -> Any:
        if getattr(kwargs.get("backend"), "platform", None) == "cpu":
            kwargs["env_options_overrides"] = {name: value} | (
                kwargs.get("env_options_overrides") or {}
            )
        return get_compile_options(*args, **kwargs)

    compiler.get_compile_options = with_individual_matmuls


_prevent_miscompilation()


def get_platform(name: str = "auto") -> Platform:
    """Returns the platform with this name; `auto` is the machine that runs the process."""
    return PLATFORMS[jax.default_backend() if name == "auto" else name]


def release_free_memory() -> None:
    """Gives freed memory that the C library holds back to the operating system (only on Linux with
    glibc).
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_compilation_cache() -> None:
    """Caches compiled programs in the user's cache directory, so that later starts are fast.

    The function does not change a cache directory that is already configured in jax, or thresholds
    that differ from jax's defaults. The environment variable `DANTINOX_COMPILATION_CACHE=off`
    disables the cache.
    """
    if os.environ.get("DANTINOX_COMPILATION_CACHE") == "off":
        return
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
        # Jax decides at its first compilation whether it uses a cache.
        compilation_cache.reset_cache()
    # By default, jax caches only programs whose compilation took over a second. The size −1 caches
    # files of any size.
    for name, default, value in (
        ("min_compile_time_secs", 1.0, 0),
        ("min_entry_size_bytes", 0, -1),
    ):
        if jax.config.values[f"jax_persistent_cache_{name}"] == default:
            jax.config.update(f"jax_persistent_cache_{name}", value)


@lru_cache(maxsize=1)
def bfloat16_gain() -> float:
    """Returns how many times faster this CPU multiplies eight rows with bfloat16 weights than with
    float32 weights.

    The measurement takes under a second. It runs once for each CPU and version of jaxlib, and the
    result is kept in the user's cache. CPUs without bfloat16 units are many times slower in
    bfloat16; CPUs with AVX512-BF16 or AMX are up to three times faster.
    """

    def measure() -> float:
        with jax.ensure_compile_time_eval():  # the caller may be tracing, or inside `eval_shape`
            return _measure_gain()

    return measured_once("products.json", f"{cpu_name()}, jaxlib {jax.lib.__version__}", measure)


def _measure_gain(size: int = 2048, copies: int = 4, repeats: int = 8) -> float:
    """Measures both dtypes alternately. The weights are larger than the CPU's caches.

    The axes are r rows, i inputs and o outputs, in the order in which each dtype is multiplied
    fastest.
    """
    runs = []
    for dtype, axes in (("float32", "ri,io->ro"), ("bfloat16", "ri,oi->ro")):

        def matmuls(x, weights, axes=axes):
            return [jnp.einsum(axes, x, w, preferred_element_type=jnp.float32) for w in weights]

        rows = jax.ShapeDtypeStruct((8, size), dtype)
        weights = [jax.ShapeDtypeStruct((size, size), dtype)] * copies
        shapes = (rows, weights)
        operands = jax.tree.map(lambda shape: np.ones(shape.shape, shape.dtype), shapes)
        runs.append((jax.jit(matmuls).lower(*shapes).compile(), jax.device_put(operands)))
    return speed_ratio(runs, repeats)


def speed_ratio(
    runs: Sequence[tuple[Callable[..., Any], Sequence[Any]]], repeats: int = 8
) -> float:
    """Returns the shortest time of the first program divided by that of the second; the programs
    run alternately.

    Args:
      runs: two programs with their inputs. The first run of each, which may compile it, does not
        count.
    """
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for (program, inputs), seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            seconds.append(time.perf_counter() - start)
    return min(times[0][1:]) / min(times[1][1:])

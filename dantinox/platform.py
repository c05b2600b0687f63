"""The target hardware: preferred dtypes, matrix product form and attention kernel. Only this module asks for the hardware.

A platform is a value that a model carries in its `ModelConfig`, so that a program can be compiled for a machine other than the
one at hand. `auto` is the machine at hand.
"""

import contextlib
import ctypes
import json
import os
import platform as machine
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from dantinox.files import atomic_write

LARGE = 1 << 25  # bytes of weights
WORTHWHILE = 0.8  # the gain from which on narrow weights are multiplied in bfloat16: then they need not be widened, too


@dataclass(frozen=True)
class Platform:
    """A kind of machine.

    Attributes:
      compute: what `model.dtype: auto` computes in. A CPU's bfloat16 products are slow, an accelerator's fast.
      bfloat16_bits: a cache keeps bfloat16 as the integers of its bits. XLA's CPU compiler would widen the whole store to write
        one number into it, and again to read it.
      parted_cache: slots of a running batch lie in parts, and those that no text has got to are not read.
      kernel: of attention, that is fastest there where it can be had (`dantinox.model.kernels`).
      narrow_rows: up to how many rows a product with narrow weights is done row by row: bfloat16, int8.
      loss_tokens: in a chunk of the loss at least: every chunk reads the output layer anew, and writes its gradient.
      options: of the compiler, for training and evaluation in float32.
      options_large: for those of models with more than `LARGE` bytes, in any dtype.
    """

    name: str
    compute: str
    bfloat16_bits: bool = False
    parted_cache: bool = False
    kernel: str | None = None
    narrow_rows: tuple[int, int] = (0, 0)
    loss_tokens: int = 2048
    options: tuple[tuple[str, str], ...] = ()
    options_large: tuple[tuple[str, str], ...] = ()

    def compiler_options(self, float32: bool, bytes_of_weights: int) -> dict[str, str]:
        """The options of the compiler for training and evaluating a model."""
        return dict(self.options * float32 + self.options_large * (bytes_of_weights > LARGE))


# YNNPACK for matrix products alone: its reductions make a small step a tenth slower than XLA's own.
YNNPACK = ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_DOT")
# XLA's usual order begins what it can as soon as it can, which keeps the cores busy in a small step. In a large one the cores
# are busy anyhow, and what is begun early takes memory: a step of 124 M parameters needs a third less without, and no longer.
IN_ORDER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")
PLATFORMS = {
    "cpu": Platform(
        "cpu",
        "float32",
        bfloat16_bits=True,
        parted_cache=True,
        narrow_rows=(2, 8),
        loss_tokens=1,
        options=(YNNPACK,),
        options_large=(IN_ORDER,),
    ),
    "gpu": Platform("gpu", "bfloat16", kernel="cudnn"),
    "tpu": Platform("tpu", "bfloat16", kernel="splash"),
}


def platform_of(name: str = "auto") -> Platform:
    """The platform of that name; `auto`: of the machine at hand."""
    return PLATFORMS[jax.default_backend() if name == "auto" else name]


def cache_folder() -> Path:
    """Where this user's caches are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dantinox"


def release_free_memory() -> None:
    """Returns memory that the C library has freed, but keeps for later, to the operating system; on Linux with glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, so that the second start is fast.

    A directory that was configured through jax stays, as do thresholds other than jax's defaults;
    `DANTINOX_COMPILATION_CACHE=off` in the environment switches it off.
    """
    if os.environ.get("DANTINOX_COMPILATION_CACHE") == "off":
        return
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
        compilation_cache.reset_cache()  # jax decides at its first compilation whether there is one
    # By default jax keeps only programs that took over a second to compile.
    for name, default, ours in (("min_compile_time_secs", 1.0, 0), ("min_entry_size_bytes", 0, -1)):
        if jax.config.values[f"jax_persistent_cache_{name}"] == default:
            jax.config.update(f"jax_persistent_cache_{name}", ours)


@lru_cache(maxsize=1)
def bfloat16_gain() -> float:
    """How many times faster this CPU multiplies eight rows with weights in bfloat16 than in float32.

    Measured once for a CPU and a version of jaxlib, in under a second, and remembered in the user's cache. CPUs without units
    for bfloat16 are many times slower in it; those with AVX512-BF16 or AMX up to three times faster.
    """
    file, key = cache_folder() / "products.json", f"{_cpu()}, jaxlib {jax.lib.__version__}"
    known: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
    if not isinstance(known.get(key), float):
        with jax.ensure_compile_time_eval():  # also where shapes alone are asked for
            known[key] = round(_measured_gain(), 2)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(known))
    return known[key]


def _measured_gain(size: int = 2048, copies: int = 4, repeats: int = 8) -> float:
    """The two forms in turn, over more weights than a cache holds."""
    runs = []
    for dtype, axes in (("float32", "ri,io->ro"), ("bfloat16", "ri,oi->ro")):

        def products(x, weights, axes=axes):
            return [jnp.einsum(axes, x, w, preferred_element_type=jnp.float32) for w in weights]

        shapes = jax.ShapeDtypeStruct((8, size), dtype), [jax.ShapeDtypeStruct((size, size), dtype)] * copies
        operands = jax.tree.map(lambda shape: np.ones(shape.shape, shape.dtype), shapes)
        runs.append((jax.jit(products).lower(*shapes).compile(), jax.device_put(operands)))
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run[0](*run[1]))
            taken.append(time.perf_counter() - start)
    return min(times[0][1:]) / min(times[1][1:])


def _cpu() -> str:
    """The model of the CPU, and those of its units that are for bfloat16."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        units = {"avx512_bf16", "amx_bf16", "bf16"} & {*fields.get("flags", fields.get("Features", "")).split()}
        return ", ".join((fields.get("model name", machine.machine()), *sorted(units)))
    return machine.processor() or machine.machine()

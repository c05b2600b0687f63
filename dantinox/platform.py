"""What is built for: the kind of machine and what its units like. Only here is asked what this machine is.

A platform is a value that a model carries in its `ModelConfig`, so that a program can be compiled for a machine other than the
one at hand. `auto` is the machine at hand.
"""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Platform:
    """A kind of machine.

    Attributes:
      compute: what `model.dtype: auto` computes in. A CPU's bfloat16 products are slow, an accelerator's fast.
      bfloat16_bits: a cache keeps bfloat16 as the integers of its bits. XLA's CPU compiler would widen the whole store to write
        one number into it, and again to read it.
      kernel: of attention, that is fastest there where it can be had (`dantinox.model.kernels`).
      options: of the compiler, for training and evaluation in float32.
    """

    name: str
    compute: str
    bfloat16_bits: bool = False
    kernel: str | None = None
    options: tuple[tuple[str, str], ...] = ()


PLATFORMS = {
    # YNNPACK for matrix products alone: its reductions make a small step a tenth slower than XLA's own.
    "cpu": Platform("cpu", "float32", True, options=(("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_DOT"),)),
    "gpu": Platform("gpu", "bfloat16", kernel="cudnn"),
    "tpu": Platform("tpu", "bfloat16", kernel="splash"),
}


def platform_of(name: str = "auto") -> Platform:
    """The platform of that name; `auto`: of the machine at hand."""
    return PLATFORMS[jax.default_backend() if name == "auto" else name]

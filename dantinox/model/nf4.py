"""Four-bit NormalFloat (nf4) with double quantization (Dettmers et al. 2023, "QLoRA", sections 2
and 3).

A matrix `[*shape_in, *shape_out]` is quantized in blocks of 64 weights of one output. A weight is a
code, the index of one of 16 values, times the largest magnitude of its block. The magnitudes are
int8 numbers in groups of 256, each with a step, plus the mean of all magnitudes. A weight takes 4 +
8/64 + 32/(64 · 256) = 4.127 bits.

Blocks run along the inputs, as in bitsandbytes, whose matrices are `[out, in]` and contiguous. So
the codes and magnitudes equal those of bitsandbytes if 64 divides the number of inputs. The arrays
have these shapes, where n = ⌈inputs / 64⌉ (zeros pad the last block):

* `codes`: uint8 `[n, 32, *shape_out]`. Byte j of a block holds the code of weight j in its low half
  and that of weight j + 32 in its high half. Thus the matrix is computed with shifts and a reshape,
  without interleaving.
* `scale`: int8 `[n, *shape_out]`, the quantized magnitudes.
* `scale_step`: float32 `[⌈n · outputs / 256⌉]`, the step of each group of consecutive elements of
  `scale`.
* `scale_mean`: float32 `[]`, the mean of the magnitudes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # weights of one output with a common magnitude
GROUP = 256  # magnitudes with a common step
# The quantiles of the standard normal distribution, divided by the largest, with an exact 0:
# appendix E of the paper.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
ZERO_PAIR = 0x77  # a byte with two codes of the value 0
ARRAYS = ("codes", "scale", "scale_step", "scale_mean")


def nf4_shapes(inputs: int, shape_out: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays of a quantized matrix, by name."""
    blocks = -(-inputs // BLOCK)
    groups = -(-blocks * math.prod(shape_out) // GROUP)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "codes": ((blocks, BLOCK // 2, *shape_out), jnp.uint8),
        "scale": ((blocks, *shape_out), jnp.int8),
        "scale_step": ((groups,), jnp.float32),
        "scale_mean": ((), jnp.float32),
    }
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def zero_nf4(inputs: int, shape_out: tuple[int, ...]) -> dict[str, jax.Array]:
    """Returns the arrays of a matrix of zeros, by name."""
    values = {"codes": ZERO_PAIR}
    return {
        name: jnp.full(s.shape, values.get(name, 0), s.dtype)
        for name, s in nf4_shapes(inputs, shape_out).items()
    }


def quantize_nf4(kernel: np.ndarray, axes: int) -> dict[str, np.ndarray]:
    """Quantizes a matrix; returns its arrays by name.

    Args:
      kernel: `[*shape_in, *shape_out]`, finite numbers.
      axes: the number of input axes.
    """
    shape_out = kernel.shape[axes:]
    w_IO = np.asarray(kernel, np.float32).reshape(math.prod(kernel.shape[:axes]), -1)
    w_NBO = np.pad(w_IO, ((0, -len(w_IO) % BLOCK), (0, 0))).reshape(-1, BLOCK, w_IO.shape[1])
    magnitudes_NO = np.max(np.abs(w_NBO), axis=1)
    codes_NBO = _nearest_codes(
        w_NBO / np.where(magnitudes_NO > 0, magnitudes_NO, np.float32(1))[:, None]
    )
    low, high = np.split(codes_NBO, 2, axis=1)
    scale, step, mean = _quantize_magnitudes(magnitudes_NO)
    codes = (low | high << np.uint8(4)).reshape(-1, BLOCK // 2, *shape_out)
    return dict(zip(ARRAYS, (codes, scale.reshape(-1, *shape_out), step, mean), strict=True))


def _nearest_codes(normalized: np.ndarray) -> np.ndarray:
    """Returns the index of the value that is nearest to each number in [−1, 1], uint8; a tie gets
    the smaller value.
    """
    values = np.array(NF4_VALUES, np.float32)
    codes = np.zeros(normalized.shape, np.uint8)
    for midpoint in (values[1:] + values[:-1]) / 2:
        codes += normalized > midpoint
    return codes


def _quantize_magnitudes(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantizes the magnitudes of blocks to int8; returns the numbers in their shape, the step of
    each group, and the mean.
    """
    mean = np.mean(magnitudes, dtype=np.float64).astype(np.float32)
    centered = magnitudes.reshape(-1) - mean
    groups = np.pad(centered, (0, -centered.size % GROUP)).reshape(-1, GROUP)
    largest = np.max(np.abs(groups), axis=1)
    step = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
    rounded = np.round(groups / step[:, None]).astype(np.int8)
    return rounded.reshape(-1)[: centered.size].reshape(magnitudes.shape), step, np.asarray(mean)


def dequantize_nf4(
    codes: jax.Array,
    scale: jax.Array,
    scale_step: jax.Array,
    scale_mean: jax.Array,
    shape_in: tuple[int, ...],
) -> jax.Array:
    """Returns the matrix, float32 `[*shape_in, *shape_out]`."""
    step = jnp.repeat(scale_step, GROUP)[: scale.size].reshape(scale.shape)
    magnitudes = scale * step + scale_mean
    shifts = jnp.array([0, 4], jnp.uint8).reshape(1, 2, *[1] * (codes.ndim - 1))
    # The shape is `[n, 2, 32, *shape_out]`.
    halves = jnp.array(NF4_VALUES, jnp.float32)[codes[:, None] >> shifts & 15]
    w = (halves * magnitudes[:, None, None]).reshape(-1, *scale.shape[1:])
    return w[: math.prod(shape_in)].reshape(*shape_in, *scale.shape[1:])

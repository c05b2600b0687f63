"""The quantization of BitNet b1.58: weights −1, 0 and 1 times a scale, and inputs with 8 bits.

The scale γ of a matrix is the mean of its absolute values; a weight is round(clip(W / γ, −1, 1)) ·
γ (Ma et al. 2024, "The Era of 1-bit LLMs", equations 1 to 3). An input is multiplied by 127 / max
|x|, with the maximum over its token, and rounded to an integer in [−128, 127]. Both scales are at
least 1e-5, and halves are rounded to even, as in the code that the authors published ("The Era of
1-bit LLMs: Training Tips, Code and FAQ") and in transformers (`integrations/bitnet.py`).

The sums over integer inputs and weights are exact in float32 for up to 2¹⁷ inputs, in whatever
order they are added, and the operands are exact in bfloat16 too.

Gradients pass through both roundings as if these were the identity (the straight-through estimator
of Bengio et al. 2013), and the scales are constants: d_x = d_y · (γ W_q)ᵀ and d_W = x_qᵀ · d_y,
where W_q are the integers and x_q the rounded inputs.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MIN_SCALE = 1e-5  # lower bound of the mean of absolute weights, and of the largest absolute input


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def round_straight_through(x: jax.Array, low: int, high: int) -> jax.Array:
    """Rounds to integers in [low, high], halves to even; the gradient is that of the identity."""
    return jnp.clip(jnp.round(x), low, high)


@round_straight_through.defjvp
def _round_jvp(
    low: int, high: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_straight_through(primals[0], low, high), tangents[0]


def quantize_inputs(x: jax.Array, axes: int = 1) -> tuple[jax.Array, jax.Array]:
    """Quantizes each token to 8 bits.

    Args:
      x: `[…, *inputs]`.
      axes: the number of axes of the inputs.

    Returns:
      Integers in [−128, 127] as float32, and the factors `[…]` by which the inputs were multiplied
      before rounding.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=tuple(range(-axes, 0)), keepdims=True)
    factor = 127 / jnp.maximum(largest, MIN_SCALE)
    return round_straight_through(x * factor, -128, 127), factor.reshape(x.shape[: x.ndim - axes])


def weight_scales(w: jax.Array, parts: Sequence[int] = (), lead: int = 0) -> jax.Array:
    """Returns the scales of matrices, with an axis of size 1 for each axis of `w` that shares a
    scale.

    Args:
      w: `[*lead, *inputs, *outputs]`.
      parts: the sizes of the slices of the second to last axis that are separate matrices; (): one
        matrix.
      lead: the number of leading axes that count matrices.
    """
    kept = {*range(lead), *([w.ndim - 2] if parts else [])}
    axes = tuple(axis for axis in range(w.ndim) if axis not in kept)
    magnitudes = jnp.abs(lax.stop_gradient(w).astype(jnp.float32))
    # The weights of a packed checkpoint have one magnitude, or are 0. Divided by the largest
    # magnitude, their sum is exact.
    largest = jnp.max(magnitudes, axis=axes, keepdims=True)
    means = largest * jnp.mean(
        magnitudes / jnp.where(largest > 0, largest, 1), axis=axes, keepdims=True
    )
    if parts:
        slices = jnp.split(means, np.cumsum(parts)[:-1], axis=-2)
        whole = [
            jnp.broadcast_to(jnp.mean(part, axis=-2, keepdims=True), part.shape) for part in slices
        ]
        means = jnp.concatenate(whole, axis=-2)
    return jnp.maximum(means, MIN_SCALE)


def quantize_weights(w: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns the weights as −1, 0 or 1 in float32; `scales` are those of `weight_scales`."""
    return round_straight_through(w.astype(jnp.float32) * (1 / scales), -1, 1)


def ternary_matrix(w: np.ndarray) -> np.ndarray:
    """Returns the ternary weights −γ, 0 and γ of one matrix of float weights, as float32, computed
    on the CPU.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        matrix = jnp.asarray(w, jnp.float32)
        scale = weight_scales(matrix)
        return np.asarray(quantize_weights(matrix, scale) * scale)


def magnitude_with_scale(scale: float, nonzero: int, count: int) -> np.float32:
    """Returns the m for which a matrix with `nonzero` weights ±m among `count` weights has this
    scale; 0 if all are 0.

    The scale is the mean of the absolute values, m · nonzero / count. So m is at least the scale,
    and `quantize_weights` returns ±1 for the weights ±m.
    """
    return np.float32(scale * count / nonzero if nonzero else 0)

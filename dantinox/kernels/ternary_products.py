"""Exact products of 8-bit integers with ternary weights: −1, 0 and 1, stored with 2 bits each.

A row of weights consists of blocks of 64 bytes for 256 weights, stored as weight + 1. Weight i of a
half block of 128 is in the bits from 2 · (i / 32) of byte i mod 32, as in ggml's TQ2_0
(`ggml-common.h`), but there are no scales. Zero weights fill the last block.
"""

import math

import jax
import jax.numpy as jnp

from dantinox.kernels.packed_matmul import native_product

BLOCK = 256  # weights
BLOCK_BYTES = 64
NUMBER = 14  # the number of the format in the native kernel
MAX_INPUTS = (1 << 31) // (4 * 128)  # more could overflow the sums in int32


def pack_ternary(weights_OI: jax.Array) -> jax.Array:
    """Packs weights of −1, 0 and 1, in any dtype: `[O, I]` → uint8 `[O, bytes]`."""
    O, I = weights_OI.shape  # noqa: E741
    codes = jnp.pad(weights_OI.astype(jnp.int8), ((0, 0), (0, -I % BLOCK))) + jnp.int8(1)
    fields = codes.astype(jnp.uint8).reshape(O, -1, 4, 32) << _shifts()
    return jnp.bitwise_or.reduce(fields, axis=2).reshape(O, -1)


def unpack_ternary(weights_OB: jax.Array, inputs: int) -> jax.Array:
    """Returns the weights of packed rows with this number of inputs: int8 `[O, I]`."""
    fields = weights_OB.reshape(len(weights_OB), -1, 1, 32) >> _shifts()
    codes = (fields & jnp.uint8(3)).reshape(len(weights_OB), -1)[:, :inputs]
    return codes.astype(jnp.int8) - jnp.int8(1)


def _shifts() -> jax.Array:
    return jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]


def ternary_matmul(rows_RI: jax.Array, weights_OB: jax.Array, *, native: bool = False) -> jax.Array:
    """Returns rows · weightsᵀ in integers, without rounding.

    Args:
      rows_RI: int8 `[R, I]`, at most `MAX_INPUTS` inputs.
      weights_OB: the weights as `pack_ternary` returns them, uint8 `[O, bytes]`.
      native: use the native kernel, which `load_kernels` must have loaded.

    Returns:
      int32 `[R, O]`.

    Raises:
      ValueError: the shapes or dtypes do not fit each other, or there are too many inputs.
    """
    inputs = rows_RI.shape[1]
    row_bytes = weights_OB.shape[1]
    if rows_RI.dtype != jnp.int8 or weights_OB.dtype != jnp.uint8:
        raise ValueError(
            f"expected rows in int8 and weights in uint8, got {rows_RI.dtype} and"
            f" {weights_OB.dtype}"
        )
    if row_bytes != math.ceil(inputs / BLOCK) * BLOCK_BYTES or inputs > MAX_INPUTS:
        raise ValueError(
            f"rows of {inputs} inputs do not fit weights with rows of {row_bytes} bytes"
        )
    if native:
        return native_product(NUMBER)(rows_RI, weights_OB)
    weights_OI = unpack_ternary(weights_OB, inputs)
    return jnp.einsum("RI,OI->RO", rows_RI, weights_OI, preferred_element_type=jnp.int32)

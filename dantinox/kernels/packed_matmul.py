"""Products of rows with packed weights: native kernels on a CPU, XLA elsewhere."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.kernels.block_formats import FORMATS, unpack
from dantinox.kernels.native_library import TARGET, UNPACK_TARGET

# Numbers of the dtypes in the native kernel; the numbers of block formats are in `FORMATS`.
DTYPE_NUMBERS = {"float32": 0, "bfloat16": 1, "int8": 2}
# Up to this many rows, native products are in float32 even if bfloat16 is allowed.
MAX_NATIVE_ROWS = 16
# Up to this many rows, products in bfloat16 are native; XLA multiplies more rows faster.
MAX_NATIVE_BFLOAT16_ROWS = 128


@cache
def native_product(number: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the native product of rows with weights of a format; `vmap` over the rows adds them
    to one call.
    """

    @jax.custom_batching.custom_vmap
    def product(rows_RI: jax.Array, weights_OB: jax.Array) -> jax.Array:
        dtype = jnp.int32 if rows_RI.dtype == jnp.int8 else jnp.float32
        shape = jax.ShapeDtypeStruct((rows_RI.shape[0], weights_OB.shape[0]), dtype)
        return jax.ffi.ffi_call(TARGET, shape)(rows_RI, weights_OB, format=np.int64(number))

    @product.def_vmap
    def over_rows(
        size: int, batched: list[bool], rows: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, bool]:
        if batched[1]:
            rows = rows if batched[0] else jnp.broadcast_to(rows, (size, *rows.shape))
            return jax.lax.map(lambda pair: product(*pair), (rows, weights)), True
        return product(rows.reshape(-1, rows.shape[-1]), weights).reshape(*rows.shape[:2], -1), True

    return product


@cache
def _native_unpack(kind: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    form = FORMATS[kind]

    @jax.custom_batching.custom_vmap
    def convert(raw: jax.Array, after: jax.Array) -> jax.Array:
        values = raw.shape[-1] // form.bytes * form.values
        shape = jax.ShapeDtypeStruct((*raw.shape[:-1], values), jnp.float32)
        return jax.ffi.ffi_call(UNPACK_TARGET, shape)(raw, after, format=np.int64(form.number))

    @convert.def_vmap
    def over_arrays(
        size: int, batched: list[bool], raw: jax.Array, after: jax.Array
    ) -> tuple[jax.Array, bool]:
        # The converted weights do not depend on the value of `after`.
        return convert(raw, after.reshape(-1)[0]), batched[0]

    return convert


def native_unpack(kind: str, raw: jax.Array, after: jax.Array) -> jax.Array:
    """Converts packed rows to float32 with the native kernel, which `load_kernels` must have
    loaded.

    XLA would convert the weights of all layers of a program first, and keep all of them in float32.
    So the conversion waits until `after` has been computed, whose value it does not read.

    Args:
      kind: a key of `FORMATS`.
      raw: rows of whole blocks, uint8 `[..., bytes]`.
      after: a number that is computed shortly before the weights are needed.

    Returns:
      The weights of `unpack`, up to the rounding of one addition, float32 `[..., values]`.
    """
    return _native_unpack(kind)(raw, after)


def matmul(
    rows_RI: jax.Array, weights_OB: jax.Array, kind: str | None = None, *, native: bool = False
) -> jax.Array:
    """Returns rows · weightsᵀ.

    With float32 rows, products and sums are in float32. For ternary weights (TQ1_0 and TQ2_0), the
    native kernels round the inputs to multiples of 2⁻²² of the power of two above the largest of
    256 inputs, and the sums of 256 products are exact. With bfloat16 rows, the weights are rounded
    to bfloat16 and the sums are in float32. In the native kernels, a result does not depend on the
    other rows or on the number of threads.

    Args:
      rows_RI: float32 or bfloat16 `[R, I]`.
      weights_OB: packed rows `[O, bytes]` of uint8, or float32, bfloat16 or int8 `[O, I]`.
      kind: the format of packed rows, a key of `FORMATS`; None for other weights.
      native: use the native kernel. `load_kernels` must have loaded it. It has no gradient. With
        bfloat16 rows, it needs `Kernels.multiplies_bfloat16` and a multiple of 32 inputs.

    Returns:
      float32 `[R, O]`.
    """
    if native:
        number = DTYPE_NUMBERS[weights_OB.dtype.name] if kind is None else FORMATS[kind].number
        return native_product(number)(rows_RI, weights_OB)
    weights_OI = (weights_OB if kind is None else unpack(kind, weights_OB)).astype(rows_RI.dtype)
    return jnp.einsum("RI,OI->RO", rows_RI, weights_OI, preferred_element_type=jnp.float32)

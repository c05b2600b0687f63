"""Layers whose weights have fewer bits than float32: bfloat16, int8, 4 bits, and 2 bits for ternary
weights.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.kernels import (
    FORMATS,
    MAX_NATIVE_BFLOAT16_ROWS,
    MAX_NATIVE_ROWS,
    load_kernels,
    matmul,
    native_unpack,
    pack_ternary,
    ternary_matmul,
    unpack,
    unpack_ternary,
)
from dantinox.model.cache_store import quantize_int8
from dantinox.model.layers import Linear, add_bias, linear_with_kernel
from dantinox.model.moe import ExpertLinear, ExpertRows, experts_with_kernel, grouped_matmul

# The parts of a block's range that quantization may cut off at each end.
INT4_SHRINK = (0.015, 0.03, 0.05)
# If a row has this many inputs (16 KiB) or more, XLA does not fuse the conversion into a matrix
# multiplication, but writes a float32 copy of the weights for each row. `_matvec` then multiplies
# parts with up to `PART_INPUTS` inputs.
LONG_INPUT = 4096
PART_INPUTS = 2048
# Up to this many rows, a matrix-vector loop per row is faster on a CPU than one matrix
# multiplication with float32 weights.
MAX_MATVEC_ROWS = 4


def _matvec(row_I: jax.Array, weights_OI: jax.Array, one: jax.Array) -> jax.Array:
    """Returns weights · row in float32; the weights are converted as they are read.

    XLA must not fuse the sum of the parts into their matrix multiplications, because it would then
    convert all weights first. The division by `one`, a 1 that XLA does not know, and the barrier
    prevent this.
    """
    if len(row_I) < LONG_INPUT:
        return row_I @ weights_OI.astype(jnp.float32).T
    count = math.ceil(len(row_I) / PART_INPUTS)
    parts = zip(_equal_parts(row_I, count), _equal_parts(weights_OI, count), strict=True)
    sums_PO = jax.lax.optimization_barrier(
        [row @ weights.astype(jnp.float32).T / one for row, weights in parts]
    )
    total_O: jax.Array = sum(sums_PO)
    return total_O


def _equal_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits the last axis; the last part is shorter if the parts cannot be equal."""
    size = math.ceil(x.shape[-1] / count)
    return [x[..., start : start + size] for start in range(0, x.shape[-1], size)]


class LowPrecisionLinear(nnx.Module):
    """A `Linear` whose kernel is stored as `[O, I]`: float32, bfloat16, int8 with a scale per
    output, or 4-bit blocks.

    On a CPU, decoding reads all weights for every token, so fewer bytes mean less time. The native
    kernels (`dantinox.kernels`) convert the weights as they read them. Without them, two XLA
    optimizations must be prevented. Without the barrier, XLA would hoist the conversion out of the
    decoding loop and write a float32 copy of all weights. Without the division by the parameter
    `one`, whose value XLA does not know, XLA would fuse the computation of the row into the loop
    and repeat it for every weight (3 times slower).

    With at least `min_bfloat16_rows` rows, all rows are multiplied in one bfloat16 matrix
    multiplication with float32 sums. The value is None where bfloat16 is slow. There, a model must
    be dequantized before it processes inputs with many rows.

    Attributes:
      kind: the block format of the kernel (`dantinox.kernels.FORMATS`), which is then uint8
        `[O, bytes]`; None: a dtype.
      native: whether the native kernels multiply.
    """

    def __init__(
        self, linear: Linear, dtype: str, min_bfloat16_rows: int | None = None, native: bool = False
    ):
        self.min_bfloat16_rows, self.native = min_bfloat16_rows, native
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype, self.out_dtype = linear.dtype, linear.out_dtype
        self.one = nnx.Param(jnp.ones((), jnp.float32))
        self.bias = linear.bias
        weights_OI = linear.kernel[...].reshape(math.prod(self.shape_in), -1).T
        self.kind = int4_format(weights_OI.shape[1]) if dtype == "int4" else None
        scale_O = None
        if self.kind is not None:
            weights_OI = quantize_int4(weights_OI, FORMATS[self.kind].values)
        elif dtype in ("int4", "int8"):
            weights_OI, scale_O = quantize_int8(weights_OI)
        else:
            weights_OI = weights_OI.astype(dtype)
        self.scale = None if scale_O is None else nnx.Param(scale_O)
        self.kernel = nnx.Param(weights_OI)

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        batch_shape = x.shape[: x.ndim - len(self.shape_in)]
        rows_RI = x.reshape(math.prod(batch_shape), -1)
        if self.native:
            y_RO = self._native(rows_RI)
        elif self.min_bfloat16_rows is not None and len(rows_RI) >= self.min_bfloat16_rows:
            y_RO = self._matmul(rows_RI)
        else:
            y_RO = self._matvec_rows(rows_RI)
        if self.scale is not None:
            y_RO = y_RO * self.scale[...]
        return add_bias(
            reduce(y_RO.reshape(*batch_shape, *self.shape_out).astype(self.out_dtype)), self.bias
        )

    def _native(self, rows_RI: jax.Array) -> jax.Array:
        if len(rows_RI) <= MAX_NATIVE_ROWS:
            return matmul(rows_RI.astype(jnp.float32), self.kernel[...], self.kind, native=True)
        if self.min_bfloat16_rows is None and self.kind is not None:
            rows_RI = rows_RI.astype(jnp.float32)
            return matmul(rows_RI, native_unpack(self.kind, self.kernel[...], rows_RI[0, 0]))
        weights_OI = jax.lax.optimization_barrier(self.kernel[...])
        if self.min_bfloat16_rows is None:
            return matmul(rows_RI.astype(jnp.float32), weights_OI)
        native = (
            len(rows_RI) <= MAX_NATIVE_BFLOAT16_ROWS
            and rows_RI.shape[1] % 32 == 0
            and load_kernels().multiplies_bfloat16
        )
        return matmul(rows_RI.astype(jnp.bfloat16), weights_OI, self.kind, native=native)

    def _matvec_rows(self, rows_RI: jax.Array) -> jax.Array:
        rows_RI = jax.lax.optimization_barrier(rows_RI.astype(jnp.float32)) / self.one[...]
        weights_OI, rows_RI = jax.lax.optimization_barrier((self.kernel[...], rows_RI))
        weights_OI = weights_OI if self.kind is None else unpack(self.kind, weights_OI)
        return jnp.stack([_matvec(row_I, weights_OI, self.one[...]) for row_I in rows_RI])

    def _matmul(self, rows_RI: jax.Array) -> jax.Array:
        return matmul(
            rows_RI.astype(jnp.bfloat16), jax.lax.optimization_barrier(self.kernel[...]), self.kind
        )

    def dequantize(self) -> Linear:
        """Returns a `Linear` with the dequantized float32 weights."""
        weights_OI = self.kernel[...]
        weights_OI = (
            weights_OI.astype(jnp.float32) if self.kind is None else unpack(self.kind, weights_OI)
        )
        if self.scale is not None:
            weights_OI = weights_OI * self.scale[...][:, None]
        kernel = jax.lax.optimization_barrier(weights_OI.T).reshape(*self.shape_in, *self.shape_out)
        return linear_with_kernel(self, kernel)

    def permute_heads(self, index_K: jax.Array, by_output: bool) -> "LowPrecisionLinear":
        """Returns the projection with its first output axis (`by_output`) or first input axis, the
        key heads, in this order.
        """
        permuted: LowPrecisionLinear = nnx.clone(self)
        K = len(index_K)
        kernel = self.kernel[...]
        O, I = kernel.shape  # noqa: E741
        heads_first = kernel.reshape(K, -1, I) if by_output else kernel.reshape(O, K, -1)
        kernel = jnp.take(heads_first, index_K, axis=0 if by_output else 1).reshape(O, I)
        permuted.kernel = nnx.Param(kernel)
        if by_output and self.scale is not None:
            permuted.scale = nnx.Param(self.scale[...].reshape(K, -1)[index_K].reshape(-1))
        if by_output and self.bias is not None:
            permuted.bias = nnx.Param(self.bias[...][index_K])
        return permuted


def int4_format(inputs: int) -> str | None:
    """Returns the block format of 4-bit rows with this many inputs; None if no format has blocks
    that fill a row.
    """
    return next((kind for kind in ("INT4", "Q4_1") if inputs % FORMATS[kind].values == 0), None)


def quantize_int4(weights_OI: jax.Array, group: int) -> jax.Array:
    """Quantizes rows to 4-bit blocks: a float16 scale d, a float16 minimum m, and integers q in [0,
    15], w ≈ d · q + m.

    The range of a block is shrunk if this reduces its squared error.

    Args:
      weights_OI: `[O, I]`; I must be a multiple of `group`.
      group: the number of weights in a block.

    Returns:
      uint8 `[O, bytes]` in the layout of ggml's Q4_1, with `group` weights per block.
    """
    blocks = weights_OI.astype(jnp.float32).reshape(len(weights_OI), -1, group)
    low, high = (function(blocks, axis=-1, keepdims=True) for function in (jnp.min, jnp.max))

    def quantize(shrink: jax.Array) -> tuple[jax.Array, ...]:
        minimum = (low + shrink * (high - low)).astype(jnp.float16)
        scale = ((1 - 2 * shrink) * (high - low) / 15).astype(jnp.float16)
        d, m = scale.astype(jnp.float32), minimum.astype(jnp.float32)
        q = jnp.clip(jnp.round((blocks - m) / jnp.where(d == 0, 1, d)), 0, 15)
        return (
            jnp.sum(jnp.square(d * q + m - blocks), -1, keepdims=True),
            scale,
            minimum,
            q.astype(jnp.uint8),
        )

    best = quantize(jnp.float32(0))
    for shrink in INT4_SHRINK:
        other = quantize(jnp.float32(shrink))
        best = tuple(
            jnp.where(other[0] < best[0], new, old) for new, old in zip(other, best, strict=True)
        )
    _, scale, minimum, q = best
    half = group // 2
    packed = [jax.lax.bitcast_convert_type(x[..., 0], jnp.uint8) for x in (scale, minimum)]
    packed.append(q[..., :half] | q[..., half:] << jnp.uint8(4))
    return jnp.concatenate(packed, -1).reshape(len(weights_OI), -1)


class LowPrecisionExperts(nnx.Module):
    """An `ExpertLinear` with bfloat16 or int8 weights `[E, O, I]`, computed as in
    `LowPrecisionLinear`.
    """

    native = False  # the native kernels have no products with a different matrix per row

    def __init__(self, linear: ExpertLinear, dtype: str, min_bfloat16_rows: int | None = None):
        self.min_bfloat16_rows, self.platform = min_bfloat16_rows, linear.platform
        self.shape_out, self.dtype = linear.shape_out, linear.dtype
        self.one = nnx.Param(jnp.ones((), jnp.float32))
        weights_EOI = linear.kernel[...].reshape(*linear.kernel.shape[:2], -1).swapaxes(1, 2)
        weights_EOI, scale_EO = (
            quantize_int8(weights_EOI) if dtype == "int8" else (weights_EOI, None)
        )
        self.scale = None if scale_EO is None else nnx.Param(scale_EO)
        self.kernel = nnx.Param(weights_EOI.astype(dtype))
        self.bias = linear.bias

    def __call__(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        use_matmul = self.min_bfloat16_rows is not None and len(x_MI) >= self.min_bfloat16_rows
        y_MO = (self._matmul if use_matmul else self._matvec_rows)(x_MI, rows)
        y_MO = y_MO if self.scale is None else y_MO * self.scale[...][rows.expert_M]
        return y_MO.astype(self.dtype).reshape(-1, *self.shape_out)

    def _matvec_rows(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        x_MI = jax.lax.optimization_barrier(x_MI.astype(jnp.float32)) / self.one[...]
        weights_EOI, x_MI = jax.lax.optimization_barrier((self.kernel[...], x_MI))
        return jnp.stack(
            [
                _matvec(x_I, weights_EOI[e], self.one[...])
                for x_I, e in zip(x_MI, rows.expert_M, strict=True)
            ]
        )

    def _matmul(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        weights_EIO = (
            jax.lax.optimization_barrier(self.kernel[...]).astype(jnp.bfloat16).swapaxes(1, 2)
        )
        return grouped_matmul(x_MI.astype(jnp.bfloat16), weights_EIO, rows, self.platform)

    def dequantize(self) -> ExpertLinear:
        """Returns an `ExpertLinear` with the dequantized float32 weights."""
        weights_EOI = self.kernel[...].astype(jnp.float32)
        if self.scale is not None:
            weights_EOI = weights_EOI * self.scale[...][:, :, None]
        E, _, I = weights_EOI.shape  # noqa: E741
        kernel = jax.lax.optimization_barrier(weights_EOI.swapaxes(1, 2)).reshape(
            E, I, *self.shape_out
        )
        return experts_with_kernel(self, kernel)


class TernaryIntegers(nnx.Module):
    """The weights −1, 0 and 1 of a `FixedTernaryLinear` with 2 bits each; native kernels multiply
    8-bit integers by them.
    """

    def __init__(self, linear: Linear):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.kernel = nnx.Param(
            pack_ternary(linear.kernel[...].reshape(math.prod(self.shape_in), -1).T)
        )

    def __call__(self, q: jax.Array) -> jax.Array:
        batch_shape = q.shape[: q.ndim - len(self.shape_in)]
        rows_RI = q.reshape(math.prod(batch_shape), -1).astype(jnp.int8)
        sums_RO = ternary_matmul(rows_RI, self.kernel[...], native=True)
        return sums_RO.astype(jnp.float32).reshape(*batch_shape, *self.shape_out)

    def permute_heads(self, index_K: jax.Array, by_output: bool) -> "TernaryIntegers":
        """Returns the weights with their first output axis (`by_output`) or first input axis, the
        key heads, in this order.
        """
        weights_OI = unpack_ternary(self.kernel[...], math.prod(self.shape_in))
        kernel = weights_OI.T.reshape(*self.shape_in, *self.shape_out)
        kernel = jnp.take(kernel, index_K, axis=len(self.shape_in) if by_output else 0)
        permuted: TernaryIntegers = nnx.clone(self)
        permuted.kernel = nnx.Param(pack_ternary(kernel.reshape(math.prod(self.shape_in), -1).T))
        return permuted

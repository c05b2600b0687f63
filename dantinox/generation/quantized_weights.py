"""Weights for decoding: int8 or bfloat16 matrices, a transposed tied embedding, reordered key heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import UserError
from dantinox.model import Transformer
from dantinox.model.attention import Attention
from dantinox.model.cache_store import quantize_int8
from dantinox.model.layers import Linear, add_bias
from dantinox.model.moe import ExpertLinear, ExpertRows, grouped_matmul
from dantinox.model.transformer import make_output_layer
from dantinox.platform import MIN_BFLOAT16_GAIN, bfloat16_gain, get_platform

HeadOrder = tuple[tuple[int, ...], ...]
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8")
MATMUL_DTYPES = ("auto", "float32", "bfloat16")
LONG_ROW = 4096  # inputs: of 16 KiB on XLA fuses no conversion into a product any more, and makes wide weights for each row
MAX_MATVEC_ROWS = 4  # up to here the product row by row is faster on a CPU than one over weights widened to float32


def _matvec(row_I: jax.Array, weights_OI: jax.Array) -> jax.Array:
    """weights · row in float32, of weights that are widened as they are read."""
    wide_OI = weights_OI.astype(jnp.float32)
    return row_I @ wide_OI.T if len(row_I) < LONG_ROW else jnp.sum(row_I * wide_OI, axis=1)


class LowPrecisionLinear(nnx.Module):
    """A `Linear` whose weights are stored narrow, one output per row: `[O, I]` bfloat16, or int8 with a scale per row.

    On a CPU the conversion fuses into the matrix–vector loop, so the bytes saved are time saved. It takes two precautions
    against XLA: a barrier, or the conversion is moved out of the decoding loop and makes a wide copy of all weights; and a
    division by `one`, whose value XLA does not know, or what computes the row is fused into the product as well and done
    again for every weight (3 times slower).

    With `bfloat16_from` rows and more, weights and rows are multiplied in bfloat16, with sums in float32, in one product. That
    is None where such products are slow: the model is then to be widened for many rows.
    """

    def __init__(self, linear: Linear, dtype: str, bfloat16_from: int | None = None):
        self.bfloat16_from = bfloat16_from
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype, self.out_dtype = linear.dtype, linear.out_dtype
        self.one = nnx.Param(jnp.ones((), jnp.float32))
        self.bias = linear.bias
        weights_OI = linear.kernel[...].reshape(math.prod(self.shape_in), -1).T
        weights_OI, scale_O = quantize_int8(weights_OI) if dtype == "int8" else (weights_OI, None)
        self.scale = None if scale_O is None else nnx.Param(scale_O)
        self.kernel = nnx.Param(weights_OI.astype(dtype))

    def __call__(self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        lead = x.shape[: x.ndim - len(self.shape_in)]
        rows_RI = x.reshape(math.prod(lead), -1)
        one_product = self.bfloat16_from is not None and len(rows_RI) >= self.bfloat16_from
        y_RO = (self._matmul if one_product else self._matvec_rows)(rows_RI)
        y_RO = y_RO if self.scale is None else y_RO * self.scale[...]
        return add_bias(reduce(y_RO.reshape(*lead, *self.shape_out).astype(self.out_dtype)), self.bias)

    def _matvec_rows(self, rows_RI: jax.Array) -> jax.Array:
        rows_RI = jax.lax.optimization_barrier(rows_RI.astype(jnp.float32)) / self.one[...]
        weights_OI, rows_RI = jax.lax.optimization_barrier((self.kernel[...], rows_RI))
        return jnp.stack([_matvec(row_I, weights_OI) for row_I in rows_RI])

    def _matmul(self, rows_RI: jax.Array) -> jax.Array:
        weights_OI = jax.lax.optimization_barrier(self.kernel[...]).astype(jnp.bfloat16)
        return jnp.einsum("RI,OI->RO", rows_RI.astype(jnp.bfloat16), weights_OI, preferred_element_type=jnp.float32)

    def dequantize(self) -> Linear:
        """The plain projection with the same numbers in float32."""
        weights_OI = self.kernel[...].astype(jnp.float32)
        if self.scale is not None:
            weights_OI = weights_OI * self.scale[...][:, None]
        kernel = jax.lax.optimization_barrier(weights_OI.T).reshape(*self.shape_in, *self.shape_out)
        plain: Linear = _with_kernel(self, kernel)
        return plain


class LowPrecisionExperts(nnx.Module):
    """An `ExpertLinear` stored narrow, `[E, O, I]`, with the precautions and the products of a `LowPrecisionLinear`."""

    def __init__(self, linear: ExpertLinear, dtype: str, bfloat16_from: int | None = None):
        self.bfloat16_from, self.platform = bfloat16_from, linear.platform
        self.shape_out, self.dtype = linear.shape_out, linear.dtype
        self.one = nnx.Param(jnp.ones((), jnp.float32))
        weights_EOI = linear.kernel[...].reshape(*linear.kernel.shape[:2], -1).swapaxes(1, 2)
        weights_EOI, scale_EO = quantize_int8(weights_EOI) if dtype == "int8" else (weights_EOI, None)
        self.scale = None if scale_EO is None else nnx.Param(scale_EO)
        self.kernel = nnx.Param(weights_EOI.astype(dtype))
        self.bias = linear.bias

    def __call__(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        one_product = self.bfloat16_from is not None and len(x_MI) >= self.bfloat16_from
        y_MO = (self._matmul if one_product else self._matvec_rows)(x_MI, rows)
        y_MO = y_MO if self.scale is None else y_MO * self.scale[...][rows.expert_M]
        return y_MO.astype(self.dtype).reshape(-1, *self.shape_out)

    def _matvec_rows(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        x_MI = jax.lax.optimization_barrier(x_MI.astype(jnp.float32)) / self.one[...]
        weights_EOI, x_MI = jax.lax.optimization_barrier((self.kernel[...], x_MI))
        return jnp.stack([_matvec(x_I, weights_EOI[e]) for x_I, e in zip(x_MI, rows.expert_M, strict=True)])

    def _matmul(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        weights_EIO = jax.lax.optimization_barrier(self.kernel[...]).astype(jnp.bfloat16).swapaxes(1, 2)
        return grouped_matmul(x_MI.astype(jnp.bfloat16), weights_EIO, rows, self.platform)

    def dequantize(self) -> ExpertLinear:
        """The plain experts with the same numbers in float32."""
        weights_EOI = self.kernel[...].astype(jnp.float32)
        if self.scale is not None:
            weights_EOI = weights_EOI * self.scale[...][:, :, None]
        E, _, I = weights_EOI.shape  # noqa: E741
        kernel = jax.lax.optimization_barrier(weights_EOI.swapaxes(1, 2)).reshape(E, I, *self.shape_out)
        plain: ExpertLinear = _with_kernel(self, kernel)
        return plain


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["merge"])
@dataclass(frozen=True)
class SplitModel:
    """A model taken apart: a call passes its arrays on without walking through its modules.

    `merge(leaves)` is the model. Models of the same structure have the same `merge`, and so share their programs.
    """

    leaves: tuple[jax.Array, ...]
    merge: Callable[[tuple[jax.Array, ...]], Transformer]


def split_model(model: Transformer) -> SplitModel:
    """Takes a model apart; the arrays are shared with it."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return SplitModel(tuple(leaves), _merge(graph, structure))


@lru_cache(maxsize=64)
def _merge(graph: Any, structure: Any) -> Callable[[tuple[jax.Array, ...]], Transformer]:
    return lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))


def prepare(model: Transformer, weights: str = "auto", matmul_dtype: str = "auto") -> Transformer:
    """A model for decoding; arrays that need no other form are shared with `model`, which stays as it is.

    Args:
      weights: `float32`, `bfloat16` or `int8` (symmetric, a scale per output row) for the projections and the output
        layer, norms and embeddings kept; `auto` is the precision the model computes in.
      matmul_dtype: of narrow weights: `float32` or `bfloat16`; `auto` is bfloat16 on an accelerator, and on a CPU where it was
        measured to be faster.

    Raises:
      UserError: another name.
    """
    for key, value, allowed in (("weights", weights, WEIGHT_DTYPES), ("matmul_dtype", matmul_dtype, MATMUL_DTYPES)):
        if value not in allowed:
            raise UserError(f"generation.{key} must be one of {', '.join(allowed)}, got {value!r}")
    model = nnx.clone(model)
    if model.head is None:
        V, D = model.embed.shape
        model.head = nnx.eval_shape(lambda: make_output_layer(D, V, dtype=model.dtype, rngs=nnx.Rngs(0)))
        model.head.kernel = nnx.Param(model.embed[...].T)
    if weights == "auto":
        # Of `[I, O]` and a single row a GPU would make sums of products, and transpose the weights for them on every call.
        narrow = "compute" if get_platform(model.config.platform).name == "cpu" else "bfloat16"
        weights = "float32" if model.dtype == jnp.float32 else narrow
    if weights != "float32" and model.config.position in ("rope", "none"):  # else positions are added before it is rounded
        model.embed = nnx.Param(model.embed[...].astype(model.dtype))
    if weights != "float32" and model.per_layer is not None:
        model.per_layer.embed = nnx.Param(model.per_layer.embed[...].astype(model.dtype))
    together = _bfloat16_from(model.config.platform, weights, matmul_dtype)
    change = {
        "float32": lambda linear: _in_dtype(linear, jnp.float32),
        "compute": lambda linear: _in_dtype(linear, linear.dtype),
        "bfloat16": lambda linear: LOW_PRECISION[type(linear)](linear, "bfloat16", together),
        "int8": lambda linear: LOW_PRECISION[type(linear)](_in_dtype(linear, jnp.float32), "int8", together),
    }[weights]
    return _replace(model, (Linear, ExpertLinear), change)


LOW_PRECISION: dict[type, type] = {Linear: LowPrecisionLinear, ExpertLinear: LowPrecisionExperts}


def _bfloat16_from(platform: str, weights: str, matmul_dtype: str) -> int | None:
    """From how many rows on narrow weights are multiplied in bfloat16; None: never."""
    on = get_platform(platform)
    if matmul_dtype == "float32" or weights not in ("bfloat16", "int8"):
        return None
    if matmul_dtype == "auto" and on.name == "cpu" and bfloat16_gain() < MIN_BFLOAT16_GAIN:
        return None
    return 1 + on.max_matvec_rows[weights == "int8"]


def dequantize(model: Transformer) -> Transformer:
    """The model for products over many rows: narrow projections that are multiplied in float32 are plain ones in it."""
    narrow = LowPrecisionLinear, LowPrecisionExperts
    if not any(isinstance(node, narrow) and node.bfloat16_from is None for _, node in nnx.iter_graph(model)):
        return model
    return _replace(nnx.clone(model), narrow, lambda linear: linear.dequantize())


def permute_heads(model: Transformer, order: HeadOrder | None) -> Transformer:
    """The same function with the key heads of each layer, and their query heads, in another order.

    `order[l]` lists the old numbers of layer l's heads; None leaves all where they are.
    """
    if order is None or all(list(layer) == sorted(layer) for layer in order):
        return model
    model = nnx.clone(model)
    for block, layer in zip(model.blocks, order, strict=True):
        attention, index_K = block.attention, jnp.asarray(layer)
        for name, by_output in (("qkv", True), ("gate", True), ("out", False)):
            linear = getattr(attention, name)
            if linear is not None:
                setattr(attention, name, _with_heads(linear, index_K, by_output))
        if attention.sinks is not None:
            attention.sinks = nnx.Param(attention.sinks[...][index_K])
        for norm in (attention.q_norm, attention.k_norm) if isinstance(attention, Attention) else ():
            if norm is not None and norm.scale is not None and norm.scale.ndim > 1:  # of all heads together
                norm.scale = nnx.Param(norm.scale[...][index_K])
    return model


def weight_bytes(model: Transformer) -> int:
    """Bytes of all parameters as they are held."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def _with_heads(linear: Linear | LowPrecisionLinear, index_K: jax.Array, by_output: bool) -> Linear | LowPrecisionLinear:
    """A projection whose outputs or inputs, the key head their first axis, are taken in another order."""
    linear = nnx.clone(linear)
    if by_output and linear.bias is not None:
        linear.bias = nnx.Param(linear.bias[...][index_K])
    K, kernel = len(index_K), linear.kernel[...]
    if isinstance(linear, Linear):
        linear.kernel = nnx.Param(jnp.take(kernel, index_K, axis=1 if by_output else 0))
        return linear
    O, I = kernel.shape  # noqa: E741
    heads_first = kernel.reshape(K, -1, I) if by_output else kernel.reshape(O, K, -1)
    linear.kernel = nnx.Param(jnp.take(heads_first, index_K, axis=0 if by_output else 1).reshape(O, I))
    if by_output and linear.scale is not None:
        linear.scale = nnx.Param(jnp.take(linear.scale[...].reshape(K, -1), index_K, axis=0).reshape(-1))
    return linear


def _in_dtype(linear: Any, dtype: Any) -> Any:
    kernel = linear.kernel[...]
    return linear if kernel.dtype == dtype else _with_kernel(linear, kernel.astype(dtype))


def _with_kernel(like: Any, kernel: jax.Array) -> Any:
    """A plain projection of the same axes and dtypes with another kernel."""

    def shapes() -> Linear | ExpertLinear:
        dtype, rngs = like.dtype, nnx.Rngs(0)
        if isinstance(like, ExpertLinear | LowPrecisionExperts):
            E, I = kernel.shape[:2]  # noqa: E741
            return ExpertLinear(
                E, I, like.shape_out, dtype=dtype, platform=like.platform, rngs=rngs, bias=like.bias is not None
            )
        return Linear(
            like.shape_in, like.shape_out, dtype=dtype, rngs=rngs, out_dtype=like.out_dtype, bias=like.bias is not None
        )

    linear = nnx.eval_shape(shapes)
    linear.kernel = nnx.Param(kernel)
    linear.bias = like.bias
    return linear


def _replace(model: Transformer, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Transformer:
    """Replaces every module of these kinds in place."""
    owners = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module) and not isinstance(node, kinds)]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, kinds):
                setattr(owner, name, change(part))
    return model

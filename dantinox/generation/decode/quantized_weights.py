"""Weights for decoding: bfloat16, int8 or 4-bit matrices, a transposed tied embedding, reordered key heads."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import UserError
from dantinox.kernels import (
    FORMATS,
    MAX_NATIVE_BFLOAT16_ROWS,
    MAX_NATIVE_ROWS,
    load_kernels,
    matmul,
    pack_ternary,
    ternary_matmul,
    unpack,
    unpack_ternary,
)
from dantinox.kernels.native_library import library_name
from dantinox.machine import cpu_name, measured_once
from dantinox.model import Transformer
from dantinox.model.attention import Attention
from dantinox.model.cache_store import quantize_int8
from dantinox.model.layers import FixedTernaryLinear, Linear, TernaryLinear, add_bias, linear_with_kernel
from dantinox.model.moe import (
    ExpertLinear,
    ExpertRows,
    FixedTernaryExperts,
    TernaryExpertLinear,
    experts_with_kernel,
    grouped_matmul,
)
from dantinox.model.packed import PackedLinear, PackedTable, is_packed, unpack_modules, use_native_kernels
from dantinox.model.transformer import make_output_layer
from dantinox.platform import MIN_BFLOAT16_GAIN, bfloat16_gain, get_platform, speed_ratio

HeadOrder = tuple[tuple[int, ...], ...]
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
MATMUL_DTYPES = ("auto", "float32", "bfloat16")
MATMUL_KERNELS = ("auto", "xla", "native")
INT4_SHRINK = (0.015, 0.03, 0.05)  # parts of a block's range that quantization may cut off at each end
MIN_NATIVE_BYTES = 1 << 23  # `auto` uses native kernels for models with more bytes of float32 weights
# If a row has this many inputs (16 KiB) or more, XLA does not fuse the conversion into a matrix multiplication, but writes a
# float32 copy of the weights for each row. `_matvec` then multiplies parts with up to `PART_INPUTS` inputs.
LONG_INPUT = 4096
PART_INPUTS = 2048
# Up to this many rows, a matrix-vector loop per row is faster on a CPU than one matrix multiplication with float32 weights.
MAX_MATVEC_ROWS = 4


def _matvec(row_I: jax.Array, weights_OI: jax.Array, one: jax.Array) -> jax.Array:
    """Returns weights · row in float32; the weights are converted as they are read.

    XLA must not fuse the sum of the parts into their matrix multiplications, because it would then convert all weights first.
    The division by `one`, a 1 that XLA does not know, and the barrier prevent this.
    """
    if len(row_I) < LONG_INPUT:
        return row_I @ weights_OI.astype(jnp.float32).T
    count = math.ceil(len(row_I) / PART_INPUTS)
    parts = zip(_equal_parts(row_I, count), _equal_parts(weights_OI, count), strict=True)
    sums_PO = jax.lax.optimization_barrier([row @ weights.astype(jnp.float32).T / one for row, weights in parts])
    total_O: jax.Array = sum(sums_PO)
    return total_O


def _equal_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """Splits the last axis; the last part is shorter if the parts cannot be equal."""
    size = math.ceil(x.shape[-1] / count)
    return [x[..., start : start + size] for start in range(0, x.shape[-1], size)]


class LowPrecisionLinear(nnx.Module):
    """A `Linear` whose kernel is stored as `[O, I]`: float32, bfloat16, int8 with a scale per output, or 4-bit blocks.

    On a CPU, decoding reads all weights for every token, so fewer bytes mean less time. The native kernels
    (`dantinox.kernels`) convert the weights as they read them. Without them, two XLA optimizations must be prevented. Without
    the barrier, XLA would hoist the conversion out of the decoding loop and write a float32 copy of all weights. Without the
    division by the parameter `one`, whose value XLA does not know, XLA would fuse the computation of the row into the loop and
    repeat it for every weight (3 times slower).

    With at least `min_bfloat16_rows` rows, all rows are multiplied in one bfloat16 matrix multiplication with float32 sums. The
    value is None where bfloat16 is slow. There, a model must be dequantized before it processes inputs with many rows.

    Attributes:
      kind: the block format of the kernel (`dantinox.kernels.FORMATS`), which is then uint8 `[O, bytes]`; None: a dtype.
      native: whether the native kernels multiply.
    """

    def __init__(self, linear: Linear, dtype: str, min_bfloat16_rows: int | None = None, native: bool = False):
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

    def __call__(self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        batch_shape = x.shape[: x.ndim - len(self.shape_in)]
        rows_RI = x.reshape(math.prod(batch_shape), -1)
        use_matmul = self.min_bfloat16_rows is not None and len(rows_RI) >= self.min_bfloat16_rows
        multiply = self._native if self.native else self._matmul if use_matmul else self._matvec_rows
        y_RO = multiply(rows_RI)
        y_RO = y_RO if self.scale is None else y_RO * self.scale[...]
        return add_bias(reduce(y_RO.reshape(*batch_shape, *self.shape_out).astype(self.out_dtype)), self.bias)

    def _native(self, rows_RI: jax.Array) -> jax.Array:
        if len(rows_RI) <= MAX_NATIVE_ROWS:
            return matmul(rows_RI.astype(jnp.float32), self.kernel[...], self.kind, native=True)
        weights_OI = jax.lax.optimization_barrier(self.kernel[...])
        if self.min_bfloat16_rows is None:
            return matmul(rows_RI.astype(jnp.float32), weights_OI, self.kind)
        native = len(rows_RI) <= MAX_NATIVE_BFLOAT16_ROWS and rows_RI.shape[1] % 32 == 0 and load_kernels().multiplies_bfloat16
        return matmul(rows_RI.astype(jnp.bfloat16), weights_OI, self.kind, native=native)

    def _matvec_rows(self, rows_RI: jax.Array) -> jax.Array:
        rows_RI = jax.lax.optimization_barrier(rows_RI.astype(jnp.float32)) / self.one[...]
        weights_OI, rows_RI = jax.lax.optimization_barrier((self.kernel[...], rows_RI))
        weights_OI = weights_OI if self.kind is None else unpack(self.kind, weights_OI)
        return jnp.stack([_matvec(row_I, weights_OI, self.one[...]) for row_I in rows_RI])

    def _matmul(self, rows_RI: jax.Array) -> jax.Array:
        return matmul(rows_RI.astype(jnp.bfloat16), jax.lax.optimization_barrier(self.kernel[...]), self.kind)

    def dequantize(self) -> Linear:
        """Returns a `Linear` with the dequantized float32 weights."""
        weights_OI = self.kernel[...]
        weights_OI = weights_OI.astype(jnp.float32) if self.kind is None else unpack(self.kind, weights_OI)
        if self.scale is not None:
            weights_OI = weights_OI * self.scale[...][:, None]
        kernel = jax.lax.optimization_barrier(weights_OI.T).reshape(*self.shape_in, *self.shape_out)
        return linear_with_kernel(self, kernel)


def int4_format(inputs: int) -> str | None:
    """Returns the block format of 4-bit rows with this many inputs; None if no format has blocks that fill a row."""
    return next((kind for kind in ("INT4", "Q4_1") if inputs % FORMATS[kind].values == 0), None)


def quantize_int4(weights_OI: jax.Array, group: int) -> jax.Array:
    """Quantizes rows to 4-bit blocks: a float16 scale d, a float16 minimum m, and integers q in [0, 15], w ≈ d · q + m.

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
        return jnp.sum(jnp.square(d * q + m - blocks), -1, keepdims=True), scale, minimum, q.astype(jnp.uint8)

    best = quantize(jnp.float32(0))
    for shrink in INT4_SHRINK:
        other = quantize(jnp.float32(shrink))
        best = tuple(jnp.where(other[0] < best[0], new, old) for new, old in zip(other, best, strict=True))
    _, scale, minimum, q = best
    half = group // 2
    packed = [jax.lax.bitcast_convert_type(x[..., 0], jnp.uint8) for x in (scale, minimum)]
    packed.append(q[..., :half] | q[..., half:] << jnp.uint8(4))
    return jnp.concatenate(packed, -1).reshape(len(weights_OI), -1)


class LowPrecisionExperts(nnx.Module):
    """An `ExpertLinear` with bfloat16 or int8 weights `[E, O, I]`, computed as in `LowPrecisionLinear`."""

    native = False  # the native kernels have no products with a different matrix per row

    def __init__(self, linear: ExpertLinear, dtype: str, min_bfloat16_rows: int | None = None):
        self.min_bfloat16_rows, self.platform = min_bfloat16_rows, linear.platform
        self.shape_out, self.dtype = linear.shape_out, linear.dtype
        self.one = nnx.Param(jnp.ones((), jnp.float32))
        weights_EOI = linear.kernel[...].reshape(*linear.kernel.shape[:2], -1).swapaxes(1, 2)
        weights_EOI, scale_EO = quantize_int8(weights_EOI) if dtype == "int8" else (weights_EOI, None)
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
        return jnp.stack([_matvec(x_I, weights_EOI[e], self.one[...]) for x_I, e in zip(x_MI, rows.expert_M, strict=True)])

    def _matmul(self, x_MI: jax.Array, rows: ExpertRows) -> jax.Array:
        weights_EIO = jax.lax.optimization_barrier(self.kernel[...]).astype(jnp.bfloat16).swapaxes(1, 2)
        return grouped_matmul(x_MI.astype(jnp.bfloat16), weights_EIO, rows, self.platform)

    def dequantize(self) -> ExpertLinear:
        """Returns an `ExpertLinear` with the dequantized float32 weights."""
        weights_EOI = self.kernel[...].astype(jnp.float32)
        if self.scale is not None:
            weights_EOI = weights_EOI * self.scale[...][:, :, None]
        E, _, I = weights_EOI.shape  # noqa: E741
        kernel = jax.lax.optimization_barrier(weights_EOI.swapaxes(1, 2)).reshape(E, I, *self.shape_out)
        return experts_with_kernel(self, kernel)


class TernaryIntegers(nnx.Module):
    """The weights −1, 0 and 1 of a `FixedTernaryLinear` with 2 bits each; native kernels multiply 8-bit integers by them."""

    def __init__(self, linear: Linear):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.kernel = nnx.Param(pack_ternary(linear.kernel[...].reshape(math.prod(self.shape_in), -1).T))

    def __call__(self, q: jax.Array) -> jax.Array:
        batch_shape = q.shape[: q.ndim - len(self.shape_in)]
        rows_RI = q.reshape(math.prod(batch_shape), -1).astype(jnp.int8)
        sums_RO = ternary_matmul(rows_RI, self.kernel[...], native=True)
        return sums_RO.astype(jnp.float32).reshape(*batch_shape, *self.shape_out)

    def permute_heads(self, index_K: jax.Array, by_output: bool) -> "TernaryIntegers":
        """Returns the weights with their first output axis (`by_output`) or first input axis, the key heads, in this order."""
        weights_OI = unpack_ternary(self.kernel[...], math.prod(self.shape_in))
        kernel = weights_OI.T.reshape(*self.shape_in, *self.shape_out)
        kernel = jnp.take(kernel, index_K, axis=len(self.shape_in) if by_output else 0)
        permuted: TernaryIntegers = nnx.clone(self)
        permuted.kernel = nnx.Param(pack_ternary(kernel.reshape(math.prod(self.shape_in), -1).T))
        return permuted


def _pack_ternary(linear: TernaryLinear) -> FixedTernaryLinear:
    fixed = FixedTernaryLinear(linear)
    fixed.integers = TernaryIntegers(fixed.integers)
    return fixed


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["merge"])
@dataclass(frozen=True)
class SplitModel:
    """A model split into arrays and structure, so that a jitted call need not traverse the modules.

    `merge(leaves)` returns the model. Models of the same structure have the same `merge`, so they share compiled programs.
    """

    leaves: tuple[jax.Array, ...]
    merge: Callable[[tuple[jax.Array, ...]], Transformer]


def split_model(model: Transformer) -> SplitModel:
    """Splits a model; the result shares the arrays of the model."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return SplitModel(tuple(leaves), _merge(graph, structure))


@lru_cache(maxsize=64)
def _merge(graph: Any, structure: Any) -> Callable[[tuple[jax.Array, ...]], Transformer]:
    return lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))


def prepare(model: Transformer, weights: str = "auto", matmul_dtype: str = "auto", matmul_kernel: str = "auto") -> Transformer:
    """Returns a copy of a model for decoding. `model` is not modified and shares the unchanged arrays with the copy.

    Args:
      model: the model; its layers must be separate (no `scan_layers`).
      weights: dtype of the projections and the output layer: `float32`, `bfloat16`, `int8` (symmetric, one scale per output
        row) or `int4` (a scale and a minimum per 64 or 32 weights; int8 for the output layer, for experts, and for rows that
        are not a multiple of 32). Norms and embeddings keep their dtype. `auto` is the compute dtype of the
        model, and packed weights stay packed. The weights −1, 0 and 1 of `model.projections: ternary` have this dtype, and
        their scales are float32, so that every dtype gives the same products; int4 is not allowed. With
        `auto` and native kernels, they have 2 bits.
      matmul_dtype: dtype of matrix multiplications with bfloat16, int8 or int4 weights: `float32` or `bfloat16`. `auto` is
        bfloat16 on an accelerator, and on a CPU if a measurement shows that it is faster. For the packed weights of an
        imported GGUF file, `auto` is float32.
      matmul_kernel: `native` multiplies up to 16 rows with the native CPU kernels, which are compiled when they are first
        used; `xla` does not. `auto` is native on a CPU if a measurement shows that it is faster and the model is not tiny.

    Raises:
      UserError: an argument is unknown, or there are no native kernels for `matmul_kernel="native"`.

    Example:
      >>> model = dantinox.load("runs/quickstart").model
      >>> quantized = dantinox.prepare(model, weights="int8")
      >>> dantinox.generate(quantized, [[97, 98]], max_new_tokens=4).shape
      (1, 6)
    """
    _check_choices(weights, matmul_dtype, matmul_kernel)
    if weights == "int4" and model.config.projections == "ternary":
        says = "int4 cannot hold the scales of model.projections: ternary exactly: use int8"
        raise UserError(f"generation.weights: {says}", key="generation.weights", value=weights)
    packed_bytes = weight_bytes(model) if weights in ("int8", "int4") and is_packed(model) else None
    model = nnx.clone(model)
    ternary = model.config.projections == "ternary"
    if ternary and weights == "auto" and _uses_native(model, "int4", matmul_kernel):
        _replace(model, (TernaryLinear,), _pack_ternary)
    _replace(model, (TernaryLinear,), FixedTernaryLinear)
    _replace(model, (TernaryExpertLinear,), FixedTernaryExperts)
    if weights != "auto":
        unpack_modules(model)
    elif is_packed(model):
        native = _uses_native(model, "int4", matmul_kernel)
        use_native_kernels(model, native, native and matmul_dtype == "bfloat16" and load_kernels().multiplies_bfloat16)
    if model.head is None and not isinstance(model.embed, PackedTable):
        V, D = model.embed.shape
        model.head = nnx.eval_shape(lambda: make_output_layer(D, V, dtype=model.dtype, rngs=nnx.Rngs(0)))
        model.head.kernel = nnx.Param(model.embed[...].T)
    if weights == "auto":
        # On a GPU, XLA would compute a single row times `[I, O]` as elementwise sums and transpose the weights on every call.
        low_precision = "compute" if get_platform(model.config.platform).name == "cpu" else "bfloat16"
        weights = "float32" if model.dtype == jnp.float32 else low_precision
    if weights != "float32":
        _cast_embeddings(model)
    min_rows = _min_bfloat16_rows(model.config.platform, weights, matmul_dtype)
    native = _uses_native(model, weights, matmul_kernel)
    head = model.head

    def change(linear: Linear | ExpertLinear) -> Any:
        if weights == "compute":
            return _cast_kernel(linear, linear.dtype)
        if weights == "float32" and not (native and isinstance(linear, Linear) and linear.dtype == jnp.float32):
            return _cast_kernel(linear, jnp.float32)
        dtype = "int8" if weights == "int4" and (linear is head or isinstance(linear, ExpertLinear)) else weights
        linear = linear if weights == "bfloat16" else _cast_kernel(linear, jnp.float32)
        if isinstance(linear, ExpertLinear):
            return LowPrecisionExperts(linear, dtype, min_rows)
        return LowPrecisionLinear(linear, dtype, min_rows, native)

    prepared = _replace(model, (Linear, ExpertLinear), change)
    if packed_bytes is not None and (size := weight_bytes(prepared)) > packed_bytes:
        warnings.warn(
            f"generation.weights: {weights} needs {size / 1e6:.1f} MB for weights that are quantized already and take "
            f"{packed_bytes / 1e6:.1f} MB: leave it out to decode with them",
            stacklevel=3,
        )
    return prepared


def _check_choices(weights: str, matmul_dtype: str, matmul_kernel: str) -> None:
    for key, value, allowed in (
        ("weights", weights, WEIGHT_DTYPES),
        ("matmul_dtype", matmul_dtype, MATMUL_DTYPES),
        ("matmul_kernel", matmul_kernel, MATMUL_KERNELS),
    ):
        if value not in allowed:
            raise UserError(f"generation.{key} must be one of {', '.join(allowed)}, got {value!r}")


def _cast_embeddings(model: Transformer) -> None:
    """Converts the embeddings to the compute dtype, unless they are packed."""
    # A model with learned positions adds them to the float32 embedding, so its embedding is not cast.
    if model.config.position in ("rope", "none") and not isinstance(model.embed, PackedTable):
        model.embed = nnx.Param(model.embed[...].astype(model.dtype))
    if model.per_layer is not None and not isinstance(model.per_layer.embed, PackedTable):
        model.per_layer.embed = nnx.Param(model.per_layer.embed[...].astype(model.dtype))


def _uses_native(model: Transformer, weights: str, matmul_kernel: str) -> bool:
    """Returns whether the native kernels multiply.

    Raises:
      UserError: `matmul_kernel` is `native` and the kernels cannot be used.
    """
    on_cpu = get_platform(model.config.platform).name == jax.default_backend() == "cpu"
    if matmul_kernel == "xla" or weights == "compute" or (matmul_kernel == "auto" and not on_cpu):
        return False
    if matmul_kernel == "native" and not on_cpu:
        raise UserError("generation.matmul_kernel: native needs a CPU")
    if matmul_kernel == "native" and load_kernels().instructions is None:
        raise UserError(f"generation.matmul_kernel: {load_kernels().note}")
    if matmul_kernel == "native":
        return True
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    return size >= MIN_NATIVE_BYTES and load_kernels().instructions is not None and native_gain(weights) >= 1


def native_gain(dtype: str) -> float:
    """Returns how many times faster than XLA the native kernels multiply one row with weights of this dtype.

    The measurement takes under a second. It runs once for each CPU, version of jaxlib and version of the kernels.
    """

    def measure() -> float:
        with jax.ensure_compile_time_eval():  # the caller may be tracing, or inside `eval_shape`
            return _measure_native_gain(dtype)

    instructions = load_kernels().instructions
    assert instructions is not None
    return measured_once("products.json", f"{cpu_name()}, {library_name(instructions)}, {dtype}", measure)


def _measure_native_gain(dtype: str, size: int = 2048, copies: int = 4, repeats: int = 8) -> float:
    """Measures both alternately. The weights are larger than the CPU's caches."""
    linear = Linear((size,), (size,), dtype=jnp.float32, rngs=nnx.Rngs(0))
    row = jnp.ones((1, size), jnp.float32)
    runs = []
    for native in (False, True):
        layer = LowPrecisionLinear(linear, dtype, native=native)
        graph, state = nnx.split(layer)
        states = [jax.tree.map(lambda x: x + 0, state) for _ in range(copies)]
        program = jax.jit(lambda states, row, graph=graph: [nnx.merge(graph, part)(row) for part in states])
        runs.append((program, (states, row)))
    return speed_ratio(runs, repeats)


def _min_bfloat16_rows(platform: str, weights: str, matmul_dtype: str) -> int | None:
    """Returns the smallest number of rows for which low-precision weights are multiplied in bfloat16; None: never."""
    target = get_platform(platform)
    if matmul_dtype == "float32" or weights not in ("bfloat16", "int8", "int4"):
        return None
    if matmul_dtype == "auto" and target.name == "cpu" and bfloat16_gain() < MIN_BFLOAT16_GAIN:
        return None
    return 1 + target.max_matvec_rows[weights != "bfloat16"]


def dequantize(model: Transformer) -> Transformer:
    """Returns the model for inputs with many rows.

    Low-precision projections that multiply in float32 are replaced by plain projections.
    """
    low_precision = LowPrecisionLinear, LowPrecisionExperts
    nodes = [node for _, node in nnx.iter_graph(model) if isinstance(node, low_precision)]
    if not any(_needs_dequantization(node) for node in nodes):
        return model
    return _replace(
        nnx.clone(model), low_precision, lambda linear: linear.dequantize() if _needs_dequantization(linear) else linear
    )


def _needs_dequantization(linear: LowPrecisionLinear | LowPrecisionExperts) -> bool:
    """Returns whether a layer multiplies every row separately, however many there are."""
    return linear.min_bfloat16_rows is None and not linear.native


def permute_heads(model: Transformer, order: HeadOrder | None) -> Transformer:
    """Returns an equivalent model in which each layer has its key heads, with their query heads, in another order.

    `order[l]` lists the current indices of the key heads of layer l in the new order; None keeps the order.
    """
    if order is None or all(list(layer) == sorted(layer) for layer in order):
        return model
    model = nnx.clone(model)
    for block, layer in zip(model.blocks, order, strict=True):
        attention = block.attention
        index_K = jnp.asarray(layer)
        for name, by_output in (("qkv", True), ("gate", True), ("out", False)):
            linear = getattr(attention, name)
            if linear is not None:
                setattr(attention, name, _permute_linear(linear, index_K, by_output))
        if attention.sinks is not None:
            attention.sinks = nnx.Param(attention.sinks[...][index_K])
        norms = (attention.q_norm, attention.k_norm, attention.out_norm) if isinstance(attention, Attention) else ()
        for norm in norms:
            if norm is not None and norm.scale is not None and norm.scale.ndim > 1:  # a norm over all heads
                norm.scale = nnx.Param(norm.scale[...][index_K])
    return model


def weight_bytes(model: Transformer) -> int:
    """Returns the size of all parameters in bytes, in their stored dtypes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def _permute_linear(linear: Any, index_K: jax.Array, by_output: bool) -> Any:
    """Permutes the outputs (`by_output`) or the inputs of a projection, whose first output or input axis is the key head."""
    if isinstance(linear, PackedLinear | TernaryIntegers):
        return linear.permute_heads(index_K, by_output)
    linear = nnx.clone(linear)
    if isinstance(linear, FixedTernaryLinear):
        linear.integers = _permute_linear(linear.integers, index_K, by_output)
        if by_output and linear.bias is not None:
            linear.bias = nnx.Param(linear.bias[...][index_K])
        return linear
    if by_output and linear.bias is not None:
        linear.bias = nnx.Param(linear.bias[...][index_K])
    K = len(index_K)
    kernel = linear.kernel[...]
    if isinstance(linear, Linear):
        linear.kernel = nnx.Param(jnp.take(kernel, index_K, axis=1 if by_output else 0))
        return linear
    O, I = kernel.shape  # noqa: E741
    heads_first = kernel.reshape(K, -1, I) if by_output else kernel.reshape(O, K, -1)
    linear.kernel = nnx.Param(jnp.take(heads_first, index_K, axis=0 if by_output else 1).reshape(O, I))
    if by_output and linear.scale is not None:
        linear.scale = nnx.Param(jnp.take(linear.scale[...].reshape(K, -1), index_K, axis=0).reshape(-1))
    return linear


def _cast_kernel(linear: Any, dtype: Any) -> Any:
    kernel = linear.kernel[...]
    if kernel.dtype == dtype:
        return linear
    with_kernel = experts_with_kernel if isinstance(linear, ExpertLinear) else linear_with_kernel
    return with_kernel(linear, kernel.astype(dtype))


def _replace(model: Transformer, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> Transformer:
    """Replaces every module of these types in place."""
    owners = [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module) and not isinstance(node, kinds)]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, kinds):
                setattr(owner, name, change(part))
    return model

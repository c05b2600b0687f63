"""`prepare` copies a model for decoding: low-precision layers, native kernels, a separate output
layer.

`dequantize` and `permute_heads` return other forms of such a model.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import UserError
from dantinox.generation.decode.low_precision_layers import (
    LowPrecisionExperts,
    LowPrecisionLinear,
    TernaryIntegers,
)
from dantinox.kernels import load_kernels
from dantinox.kernels.native_library import library_name
from dantinox.machine import cpu_name, measured_once
from dantinox.model import Transformer
from dantinox.model.attention import Attention
from dantinox.model.layers import FixedTernaryLinear, Linear, TernaryLinear, linear_with_kernel
from dantinox.model.moe import (
    ExpertLinear,
    FixedTernaryExperts,
    TernaryExpertLinear,
    experts_with_kernel,
)
from dantinox.model.packed import PackedTable, is_packed, unpack_modules, use_native_kernels
from dantinox.model.transformer import make_output_layer
from dantinox.platform import MIN_BFLOAT16_GAIN, bfloat16_gain, get_platform, speed_ratio

# For each layer, the indices of its key heads in their new order.
HeadOrder = tuple[tuple[int, ...], ...]
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
MATMUL_DTYPES = ("auto", "float32", "bfloat16")
MATMUL_KERNELS = ("auto", "xla", "native")
# `auto` uses native kernels unless they are clearly slower for one row. Batches and small matrices
# gain more, and a measurement beside other work can be a fifth too low.
MIN_NATIVE_GAIN = 0.8
# `auto` uses native kernels for models with more bytes of float32 weights.
MIN_NATIVE_BYTES = 1 << 23


def prepare(
    model: Transformer,
    weights: str = "auto",
    matmul_dtype: str = "auto",
    matmul_kernel: str = "auto",
) -> Transformer:
    """Returns a copy of a model for decoding. `model` is not modified and shares the unchanged
    arrays with the copy.

    Args:
      model: the model; its layers must be separate (no `scan_layers`).
      weights: dtype of the projections and the output layer: `float32`, `bfloat16`, `int8`
        (symmetric, one scale per output row) or `int4` (a scale and a minimum per 64 or 32 weights;
        int8 for the output layer, for experts, and for rows that are not a multiple of 32). Norms
        and embeddings keep their dtype. `auto` is the compute dtype of the model, and packed
        weights stay packed. The weights −1, 0 and 1 of `model.projections: ternary` have this
        dtype, and their scales are float32, so that every dtype gives the same products; int4 is
        not allowed. With `auto` and native kernels, they have 2 bits.
      matmul_dtype: dtype of matrix multiplications with bfloat16, int8 or int4 weights: `float32`
        or `bfloat16`. `auto` is bfloat16 on an accelerator, and on a CPU if a measurement shows
        that it is faster. For the packed weights of an imported GGUF file, `auto` is float32.
      matmul_kernel: `native` multiplies up to 16 rows with the native CPU kernels, which are
        compiled when they are first used; `xla` does not. `auto` is native on a CPU unless
        a measurement shows that it is clearly slower for one row, or the model is tiny.

    Raises:
      UserError: an argument is unknown, or there are no native kernels for
        `matmul_kernel="native"`.

    Example:
      >>> model = dantinox.load("runs/quickstart").model
      >>> quantized = dantinox.prepare(model, weights="int8")
      >>> dantinox.generate(quantized, [[97, 98]], max_new_tokens=4).shape
      (1, 6)
    """
    _check_choices(weights, matmul_dtype, matmul_kernel)
    ternary = model.config.projections == "ternary"
    if weights == "int4" and ternary:
        says = "int4 cannot hold the scales of model.projections: ternary exactly: use int8"
        raise UserError(f"generation.weights: {says}", key="generation.weights", value=weights)
    quantizes = weights in ("int8", "int4")
    packed_bytes = weight_bytes(model) if quantizes and is_packed(model) else None
    model = nnx.clone(model)
    if ternary:
        two_bits = weights == "auto" and _uses_native(model, "int4", matmul_kernel)
        _fix_ternary_weights(model, two_bits)
    if weights != "auto":
        unpack_modules(model)
    elif is_packed(model):
        native = _uses_native(model, "int4", matmul_kernel)
        bfloat16 = native and matmul_dtype == "bfloat16" and load_kernels().multiplies_bfloat16
        use_native_kernels(model, native, bfloat16)
    if model.head is None and not isinstance(model.embed, PackedTable):
        V, D = model.embed.shape
        model.head = nnx.eval_shape(
            lambda: make_output_layer(D, V, dtype=model.dtype, rngs=nnx.Rngs(0))
        )
        model.head.kernel = nnx.Param(model.embed[...].T)
    _replace_linears(model, _storage(model, weights), matmul_dtype, matmul_kernel)
    if packed_bytes is not None and (size := weight_bytes(model)) > packed_bytes:
        warnings.warn(
            f"generation.weights: {weights} needs {size / 1e6:.1f} MB for weights that are"
            f" quantized already and take {packed_bytes / 1e6:.1f}"
            " MB: leave it out to decode with them",
            stacklevel=3,
        )
    return model


def _check_choices(weights: str, matmul_dtype: str, matmul_kernel: str) -> None:
    for key, value, allowed in (
        ("weights", weights, WEIGHT_DTYPES),
        ("matmul_dtype", matmul_dtype, MATMUL_DTYPES),
        ("matmul_kernel", matmul_kernel, MATMUL_KERNELS),
    ):
        if value not in allowed:
            raise UserError(f"generation.{key} must be one of {', '.join(allowed)}, got {value!r}")


def _fix_ternary_weights(model: Transformer, two_bits: bool) -> None:
    """Computes the ternary weights of a model once, in place; `two_bits`: projections store them
    with 2 bits each.
    """

    def fix(linear: TernaryLinear) -> FixedTernaryLinear:
        fixed = FixedTernaryLinear(linear)
        if two_bits:
            fixed.integers = TernaryIntegers(fixed.integers)
        return fixed

    _replace(model, (TernaryLinear,), fix)
    _replace(model, (TernaryExpertLinear,), FixedTernaryExperts)


def _storage(model: Transformer, weights: str) -> str:
    """Returns how projections are stored: the dtype `weights`, or `compute`, plain layers in the
    compute dtype of the model.
    """
    if weights != "auto":
        return weights
    if model.dtype == jnp.float32:
        return "float32"
    # On a GPU, XLA would compute a single row times `[I, O]` as elementwise sums and transpose the
    # weights on every call.
    return "compute" if get_platform(model.config.platform).name == "cpu" else "bfloat16"


def _replace_linears(
    model: Transformer, storage: str, matmul_dtype: str, matmul_kernel: str
) -> None:
    """Converts the projections, the experts and the embeddings of a model in place; see
    `_storage`.
    """
    if storage != "float32":
        _cast_embeddings(model)
    min_rows = _min_bfloat16_rows(model.config.platform, storage, matmul_dtype)
    native = _uses_native(model, storage, matmul_kernel)
    head = model.head

    def change(linear: Linear | ExpertLinear) -> Any:
        if storage == "compute":
            return _cast_kernel(linear, linear.dtype)
        # The native kernels also multiply float32 weights, in the layout of `LowPrecisionLinear`.
        if storage == "float32" and (
            isinstance(linear, ExpertLinear) or not native or linear.dtype != jnp.float32
        ):
            return _cast_kernel(linear, jnp.float32)
        in_int8 = storage == "int4" and (linear is head or isinstance(linear, ExpertLinear))
        dtype = "int8" if in_int8 else storage
        if storage != "bfloat16":
            linear = _cast_kernel(linear, jnp.float32)
        if isinstance(linear, ExpertLinear):
            return LowPrecisionExperts(linear, dtype, min_rows)
        return LowPrecisionLinear(linear, dtype, min_rows, native)

    _replace(model, (Linear, ExpertLinear), change)


def _cast_embeddings(model: Transformer) -> None:
    """Converts the embeddings to the compute dtype, unless they are packed."""
    # A model with learned positions adds them to the float32 embedding, so its embedding is not
    # cast.
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
    return (
        size >= MIN_NATIVE_BYTES
        and load_kernels().instructions is not None
        and native_gain(weights) >= MIN_NATIVE_GAIN
    )


def native_gain(dtype: str) -> float:
    """Returns how many times faster than XLA the native kernels multiply one row with weights of
    this dtype.

    The measurement takes under a second. It runs once for each CPU, version of jaxlib and version
    of the kernels.
    """

    def measure() -> float:
        with jax.ensure_compile_time_eval():  # the caller may be tracing, or inside `eval_shape`
            return _measure_native_gain(dtype)

    instructions = load_kernels().instructions
    assert instructions is not None
    return measured_once(
        "products.json", f"{cpu_name()}, {library_name(instructions)}, {dtype}", measure
    )


def _measure_native_gain(dtype: str, size: int = 2048, copies: int = 4, repeats: int = 40) -> float:
    """Measures both alternately, with `copies` matrices that together are larger than the CPU's
    caches.
    """
    linear = Linear((size,), (size,), dtype=jnp.float32, rngs=nnx.Rngs(0))
    row = jnp.ones((1, size), jnp.float32)
    runs = []
    for native in (False, True):
        layer = LowPrecisionLinear(linear, dtype, native=native)
        graph, state = nnx.split(layer)
        states = [jax.tree.map(lambda x: x + 0, state) for _ in range(copies)]
        program = jax.jit(
            lambda states, row, graph=graph: [nnx.merge(graph, part)(row) for part in states]
        )
        runs.append((program, (states, row)))
    return speed_ratio(runs, repeats)


def _min_bfloat16_rows(platform: str, weights: str, matmul_dtype: str) -> int | None:
    """Returns the smallest number of rows for which low-precision weights are multiplied in
    bfloat16; None: never.
    """
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
    model = nnx.clone(model)
    _replace(
        model,
        low_precision,
        lambda linear: linear.dequantize() if _needs_dequantization(linear) else linear,
    )
    return model


def _needs_dequantization(linear: LowPrecisionLinear | LowPrecisionExperts) -> bool:
    """Returns whether a layer multiplies every row separately, however many there are."""
    return linear.min_bfloat16_rows is None and not linear.native


def permute_heads(model: Transformer, order: HeadOrder | None) -> Transformer:
    """Returns an equivalent model in which each layer has its key heads, with their query heads, in
    another order.

    `order[l]` lists the current indices of the key heads of layer l in the new order; None keeps
    the order.
    """
    if order is None or all(list(layer) == sorted(layer) for layer in order):
        return model
    model = nnx.clone(model)
    for block, layer in zip(model.blocks, order, strict=True):
        attention = block.attention
        index_K = jnp.asarray(layer)
        # Heads are outputs of the first two projections, and inputs of the last.
        for name, by_output in (("qkv", True), ("gate", True), ("out", False)):
            linear = getattr(attention, name)
            if linear is not None:
                setattr(attention, name, _permute_linear(linear, index_K, by_output))
        if attention.sinks is not None:
            attention.sinks = nnx.Param(attention.sinks[...][index_K])
        norms = (
            (attention.q_norm, attention.k_norm, attention.out_norm)
            if isinstance(attention, Attention)
            else ()
        )
        for norm in norms:
            # The scale of a norm over all heads.
            if norm is not None and norm.scale is not None and norm.scale.ndim > 1:
                norm.scale = nnx.Param(norm.scale[...][index_K])
    return model


def weight_bytes(model: Transformer) -> int:
    """Returns the size of all parameters in bytes, in their stored dtypes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def _permute_linear(linear: Any, index_K: jax.Array, by_output: bool) -> Any:
    """Permutes the outputs (`by_output`) or the inputs of a projection, whose first output or input
    axis is the key head.
    """
    if not isinstance(linear, Linear | FixedTernaryLinear):
        return linear.permute_heads(index_K, by_output)
    permuted: Any = nnx.clone(linear)
    if by_output and linear.bias is not None:
        permuted.bias = nnx.Param(linear.bias[...][index_K])
    if isinstance(linear, FixedTernaryLinear):
        permuted.integers = _permute_linear(linear.integers, index_K, by_output)
    else:
        permuted.kernel = nnx.Param(
            jnp.take(linear.kernel[...], index_K, axis=1 if by_output else 0)
        )
    return permuted


def _cast_kernel(linear: Any, dtype: Any) -> Any:
    kernel = linear.kernel[...]
    if kernel.dtype == dtype:
        return linear
    with_kernel = experts_with_kernel if isinstance(linear, ExpertLinear) else linear_with_kernel
    return with_kernel(linear, kernel.astype(dtype))


def _replace(model: Transformer, kinds: tuple[type, ...], change: Callable[[Any], Any]) -> None:
    """Replaces every module of these types in place."""
    owners = [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module) and not isinstance(node, kinds)
    ]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, kinds):
                setattr(owner, name, change(part))

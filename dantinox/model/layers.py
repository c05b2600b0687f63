"""Linear projections, normalization, dropout and the dense feed-forward layer."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.parallelism import Parallelism
from dantinox.model.ternary import quantize_inputs, quantize_weights, weight_scales

LINEAR_OUTPUT = "product"  # checkpoint name of the output of a `Linear`, for remat policies


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def cast_tensordot(
    x: jax.Array,
    w: jax.Array,
    axes: int,
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    cast_w: jax.Array | None = None,
) -> jax.Array:
    """Contracts the last `axes` axes of x with the first axes of w.

    Both operands are cast to `dtype`, the sums are in float32, and the result has the dtype
    `out_dtype`. The backward pass also casts the incoming gradient to `dtype`. Otherwise a float32
    gradient, such as that of the logits, would turn all later matrix multiplications of the
    backward pass into float32. On CPUs with bfloat16 units, float32 sums are also faster.

    Args:
      cast_w: w already cast to `dtype`, for callers that multiply by w many times; the gradient
        still goes to w.
    """
    w = w.astype(dtype) if cast_w is None else cast_w
    return jnp.tensordot(x.astype(dtype), w, axes, preferred_element_type=jnp.float32).astype(
        out_dtype
    )


def _cast_tensordot_backward(
    axes: int, dtype: DTypeLike, out_dtype: DTypeLike, operands: tuple[Any, ...], d_y: jax.Array
):
    x, w, cast_w = operands
    d_y = d_y.astype(dtype)
    lead = tuple(range(x.ndim - axes))
    outs = w.ndim - axes
    contracted = tuple(range(d_y.ndim - outs, d_y.ndim)), tuple(range(axes, w.ndim))
    cast = w.astype(dtype) if cast_w is None else cast_w
    d_x = jnp.tensordot(d_y, cast, contracted, preferred_element_type=jnp.float32)

    def weight_gradient(x: jax.Array, d_y: jax.Array) -> jax.Array:
        return jnp.tensordot(x, d_y, (lead, lead), preferred_element_type=jnp.float32)

    def weight_gradient_on_cpu(x: jax.Array, d_y: jax.Array) -> jax.Array:
        x_NI = x.reshape(-1, math.prod(w.shape[:axes]))
        d_y_NO = d_y.reshape(-1, math.prod(w.shape[axes:]))
        # With tied weights, XLA would merge the transpose of this result with the multiplication,
        # which CPUs cannot run.
        d_w_IO = jnp.matmul(_transposed_pairs(x_NI), d_y_NO, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(d_w_IO).reshape(w.shape)

    if dtype == jnp.bfloat16 and math.prod(w.shape[:axes]) % 2 == 0:
        d_w = jax.lax.platform_dependent(
            x.astype(dtype), d_y, cpu=weight_gradient_on_cpu, default=weight_gradient
        )
    else:
        d_w = weight_gradient(x.astype(dtype), d_y)
    return d_x.astype(x.dtype), d_w.astype(w.dtype), None


def _transposed_pairs(x_NI: jax.Array) -> jax.Array:
    """Returns the transpose of a bfloat16 matrix with an even number of columns, by way of uint32
    pairs.

    XLA would merge a plain transpose with the matrix multiplication. On CPUs, YNNPACK has no fast
    bfloat16 kernel for a transposed left operand.
    """
    N, I = x_NI.shape  # noqa: E741
    pairs_NJ = jax.lax.bitcast_convert_type(x_NI.reshape(N, I // 2, 2), jnp.uint32)
    pairs_JN2 = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(pairs_NJ.T), jnp.bfloat16)
    return jax.lax.optimization_barrier(pairs_JN2.transpose(0, 2, 1).reshape(I, N))


# The last of the other arguments is `cast_w`.
cast_tensordot.defvjp(
    lambda x, w, *others: (cast_tensordot(x, w, *others), (x, w, others[-1])),
    _cast_tensordot_backward,
)


class Linear(nnx.Module):
    """A linear projection from axes `shape_in` to axes `shape_out`.

    `kernel` has the shape `[*shape_in, *shape_out]`. It is initialized from a normal distribution
    with the standard deviation `gain / sqrt(fan in)`. `bias` has the shape `shape_out` and is
    initialized to zero. The operands are cast to `dtype` and the result to `out_dtype` (default:
    `dtype`).
    """

    def __init__(
        self,
        shape_in: tuple[int, ...],
        shape_out: tuple[int, ...],
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        gain: float = 1.0,
        out_dtype: DTypeLike | None = None,
        bias: bool = False,
    ):
        self.shape_in, self.shape_out = shape_in, shape_out
        self.dtype = dtype
        self.out_dtype = out_dtype or dtype
        std = gain / math.sqrt(math.prod(shape_in))
        self.kernel = nnx.Param(
            std * jax.random.normal(rngs.params(), (*shape_in, *shape_out), jnp.float32)
        )
        self.bias = nnx.Param(jnp.zeros(shape_out, jnp.float32)) if bias else None

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Returns x · kernel + bias. `reduce` adds up the partial results of the devices before the
        bias is added.
        """
        y = cast_tensordot(x, self.kernel[...], len(self.shape_in), self.dtype, self.out_dtype)
        return add_bias(reduce(checkpoint_name(y, LINEAR_OUTPUT)), self.bias)


class TernaryLinear(Linear):
    """A `Linear` with ternary weights and 8-bit inputs, computed from float32 weights in every call
    (`dantinox.model.ternary`).

    `parts` are the sizes of the slices of the second to last output axis that have separate scales;
    (): one scale.
    """

    def __init__(
        self,
        shape_in: tuple[int, ...],
        shape_out: tuple[int, ...],
        *,
        parts: tuple[int, ...] = (),
        **options: Any,
    ):
        super().__init__(shape_in, shape_out, **options)
        self.parts = parts

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        axes = len(self.shape_in)
        scales = weight_scales(self.kernel[...], self.parts)
        product = partial(
            cast_tensordot,
            w=quantize_weights(self.kernel[...], scales),
            axes=axes,
            dtype=self.dtype,
        )
        y = multiply_quantized(
            lambda q: product(q, out_dtype=jnp.float32), x, axes, scales[(0,) * axes]
        )
        return add_bias(reduce(checkpoint_name(y.astype(self.out_dtype), LINEAR_OUTPUT)), self.bias)


def multiply_quantized(
    product: Callable[[jax.Array], jax.Array], x: jax.Array, axes: int, scales: jax.Array
) -> jax.Array:
    """Returns float32 products with ternary weights, given the product with the integers of
    quantized inputs.

    Args:
      x: `[…, *inputs]`; `axes` is the number of axes of the inputs.
      scales: the scales of the weights, broadcast over the outputs.
    """
    q, factor = quantize_inputs(x, axes)
    y = product(q).astype(jnp.float32)
    return y * (scales / factor.reshape(*factor.shape, *(1,) * (y.ndim - factor.ndim)))


class FixedTernaryLinear(nnx.Module):
    """A `TernaryLinear` whose weights no longer change: `integers` multiplies by −1, 0 and 1, in
    any form of a `Linear`.

    `scales` are the scales of the weights, broadcast over the outputs.
    """

    def __init__(self, linear: TernaryLinear):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype = linear.dtype
        self.out_dtype = linear.out_dtype
        self.bias = linear.bias
        scales = weight_scales(linear.kernel[...], linear.parts)
        self.scales = nnx.Param(scales[(0,) * len(self.shape_in)])
        self.integers: Any = linear_with_kernel(
            linear, quantize_weights(linear.kernel[...], scales)
        )
        self.integers.out_dtype = jnp.dtype(jnp.float32)
        self.integers.bias = None

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        y = multiply_quantized(self.integers, x, len(self.shape_in), self.scales[...])
        return add_bias(reduce(y.astype(self.out_dtype)), self.bias)


def make_linear(
    config: ModelConfig, *shapes: tuple[int, ...], parts: tuple[int, ...] = (), **options: Any
) -> Linear:
    """Returns a projection of attention or feed-forward, of the kind `config.projections`; see
    `TernaryLinear` for `parts`.
    """
    return (
        TernaryLinear(*shapes, parts=parts, **options)
        if config.projections == "ternary"
        else Linear(*shapes, **options)
    )


def linear_with_kernel(like: Any, kernel: jax.Array) -> Linear:
    """Returns a `Linear` with this kernel, and with the axes, dtypes and bias of a projection in
    another form.
    """

    def abstract_linear() -> Linear:
        out_dtype = like.out_dtype
        bias = like.bias is not None
        return Linear(
            like.shape_in,
            like.shape_out,
            dtype=like.dtype,
            rngs=nnx.Rngs(0),
            out_dtype=out_dtype,
            bias=bias,
        )

    linear: Linear = nnx.eval_shape(abstract_linear)
    linear.kernel = nnx.Param(kernel)
    linear.bias = like.bias
    return linear


def add_bias(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Returns y + bias in the dtype of y, or y if there is no bias."""
    return y if bias is None else y + bias[...].astype(y.dtype)


class Softmax(NamedTuple):
    """Options of the softmax over scores.

    Attributes:
      cap: the bound of the scores, see `softcap`; None: no bound.
      sinks_KG: float32, one extra logit in the softmax of each query head, without a value (Agarwal
        et al. 2025, gpt-oss).
    """

    cap: float | None = None
    sinks_KG: jax.Array | None = None


PLAIN_SOFTMAX = Softmax()


def softcap(scores: jax.Array, cap: float) -> jax.Array:
    """Returns cap · tanh(scores / cap) (Gemma Team 2024, section 2)."""
    return cap * jnp.tanh(scores / cap)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axes (Zhang & Sennrich 2019, eq. 4), computed in float32.

    `scale` has the shape of these axes; without `scaled` it is None. With `zero_centered` the
    factor is 1 + scale.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        epsilon: float,
        zero_centered: bool = False,
        scaled: bool = True,
    ):
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.scale = (
            nnx.Param((jnp.zeros if zero_centered else jnp.ones)(self.shape, jnp.float32))
            if scaled
            else None
        )

    def __call__(
        self, x: jax.Array, pmean: Callable[[jax.Array], jax.Array] = lambda square: square
    ) -> jax.Array:
        """Normalizes x; `pmean` averages the mean square over the devices that hold parts of x."""
        y = x.astype(jnp.float32)
        axes = tuple(range(-len(self.shape), 0))
        square = pmean(jnp.mean(jnp.square(y), axis=axes, keepdims=True))
        y = y * jax.lax.rsqrt(square + self.epsilon)
        if self.scale is not None:
            y = y * (1 + self.scale[...] if self.zero_centered else self.scale[...])
        return y.astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x − mean) / std · scale + bias over the last axis (Ba et al. 2016, eq. 4), computed in
    float32.

    Without `scaled`, `scale` and `bias` are None; without `with_bias`, `bias` is None.
    """

    def __init__(self, size: int, epsilon: float, scaled: bool = True, with_bias: bool = True):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(size, jnp.float32)) if scaled else None
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32)) if scaled and with_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        y = y if self.scale is None else y * self.scale[...]
        return add_bias(y, self.bias).astype(x.dtype)


def make_rms_norm(config: ModelConfig, shape: int | tuple[int, ...]) -> RMSNorm:
    """Returns an `RMSNorm` over axes of this shape, with the options of the config."""
    return RMSNorm(shape, config.norm_epsilon, config.norm_zero_centered, config.norm_scale)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Returns the normalization layer for the residual stream, of the kind `config.norm`."""
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.dim)
    return LayerNorm(config.dim, config.norm_epsilon, config.norm_scale, config.norm_bias)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 − rate); without a key,
    returns x.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def relu2(x: jax.Array) -> jax.Array:
    """Returns max(x, 0)² (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """Returns (u + 1) · g σ(alpha g), with g = min(gate, limit) and u = clip(up, −limit, limit)
    (OpenAI 2025, gpt-oss).
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


GATED_ACTIVATIONS: dict[str, Callable] = {
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "squared_reglu": relu2,
}
PLAIN_ACTIVATIONS: dict[str, Callable] = {"gelu": jax.nn.gelu, "relu2": relu2}


def gated_activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `config.activation` as a function of gate and up."""
    return _cached_gated_activation(config.activation, config.swiglu_limit, config.swiglu_alpha)


# All layers get the same function object, because only layers with equal attributes share a trace.
@cache
def _cached_gated_activation(
    activation: str, limit: float, alpha: float
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if activation == "clamped_swiglu":
        return partial(clamped_swiglu, limit=limit, alpha=alpha)
    function = GATED_ACTIVATIONS[activation]
    return lambda gate, up: function(gate) * up


class GatedFeedForward(nnx.Module):
    """down(f(gate(x)) · up(x)) (Shazeer 2020, eq. 6); the kernel `gate_up [D, 2, F]` holds gate and
    up.

    With `sub_norms` the input of `down` is normalized (Wang et al. 2022, "Foundation Transformers":
    Sub-LN).
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        D, F = config.dim, config.hidden_dim
        self.function = gated_activation(config)
        linear = partial(make_linear, config, dtype=dtype, rngs=rngs, bias=config.mlp_bias)
        self.gate_up = linear((D,), (2, F), parts=(1, 1))
        self.down_norm = make_rms_norm(config, F) if config.sub_norms else None
        self.down = linear((F,), (D,), gain=out_gain)

    def __call__(self, x_BTD: jax.Array, parallelism: Parallelism) -> jax.Array:
        gate_up = self.gate_up(parallelism.copy_to_tp(x_BTD))
        # The gradient of a split is a concatenation. That of slices is a sum of padded arrays,
        # which is slower.
        gate, up = (half.squeeze(-2).astype(jnp.float32) for half in jnp.split(gate_up, 2, axis=-2))
        gated_BTF = self.function(gate, up).astype(gate_up.dtype)
        gated_BTF = gated_BTF if self.down_norm is None else self.down_norm(gated_BTF)
        return self.down(parallelism.shard_features(gated_BTF), parallelism.reduce_from_tp)


class PlainFeedForward(nnx.Module):
    """down(f(up(x))); with `sub_norms` the input of `down` is normalized."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        D, F = config.dim, config.hidden_dim
        self.function = PLAIN_ACTIVATIONS[config.activation]
        linear = partial(make_linear, config, dtype=dtype, rngs=rngs, bias=config.mlp_bias)
        self.up = linear((D,), (F,))
        self.down_norm = make_rms_norm(config, F) if config.sub_norms else None
        self.down = linear((F,), (D,), gain=out_gain)

    def __call__(self, x_BTD: jax.Array, parallelism: Parallelism) -> jax.Array:
        up_BTF = self.function(self.up(parallelism.copy_to_tp(x_BTD)))
        up_BTF = up_BTF if self.down_norm is None else self.down_norm(up_BTF)
        return self.down(up_BTF, parallelism.reduce_from_tp)


def make_feed_forward(config: ModelConfig, **kwargs) -> GatedFeedForward | PlainFeedForward:
    """Returns the feed-forward layer for `config.activation`."""
    return (PlainFeedForward if config.activation in PLAIN_ACTIVATIONS else GatedFeedForward)(
        config, **kwargs
    )

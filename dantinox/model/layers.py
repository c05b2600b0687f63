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

LINEAR_OUTPUT = "product"  # the name of what a `Linear` gives, for those who keep it for the backward pass


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def cast_tensordot(
    x: jax.Array, w: jax.Array, axes: int, dtype: DTypeLike, out_dtype: DTypeLike, rounded: jax.Array | None = None
) -> jax.Array:
    """x · w over the last `axes` axes of x and the first of w: operands rounded to `dtype`, sums in float32, then `out_dtype`.

    In the backward pass too: the derivative that comes in is rounded to `dtype`, or a float32 one, as that of logits, would
    make all products behind it float32 products. Sums in float32 are also what a CPU with units for bfloat16 wants.

    Args:
      rounded: w in `dtype`, for who multiplies by it many times; the derivative is that of w all the same.
    """
    w = w.astype(dtype) if rounded is None else rounded
    return jnp.tensordot(x.astype(dtype), w, axes, preferred_element_type=jnp.float32).astype(out_dtype)


def _product_backward(axes: int, dtype: DTypeLike, out_dtype: DTypeLike, operands: tuple[Any, ...], d_y: jax.Array):
    x, w, rounded = operands
    d_y, lead, outs = d_y.astype(dtype), tuple(range(x.ndim - axes)), w.ndim - axes
    behind = tuple(range(d_y.ndim - outs, d_y.ndim)), tuple(range(axes, w.ndim))
    narrow = w.astype(dtype) if rounded is None else rounded
    d_x = jnp.tensordot(d_y, narrow, behind, preferred_element_type=jnp.float32)

    def weighed(dtype: DTypeLike, x: jax.Array, d_y: jax.Array) -> jax.Array:
        return jnp.tensordot(x.astype(dtype), d_y.astype(dtype), (lead, lead), preferred_element_type=jnp.float32)

    # The same numbers in float32: for CPUs XLA has no fast bfloat16 product of this form, and none at all if it is transposed.
    ways = {"cpu": partial(weighed, jnp.float32), "default": partial(weighed, dtype)}
    d_w = jax.lax.platform_dependent(x.astype(dtype), d_y, **ways) if dtype != jnp.float32 else weighed(dtype, x, d_y)
    return d_x.astype(x.dtype), d_w.astype(w.dtype), None


cast_tensordot.defvjp(lambda x, w, *others: (cast_tensordot(x, w, *others), (x, w, others[-1])), _product_backward)


class Linear(nnx.Module):
    """A projection from axes `shape_in` to axes `shape_out`.

    `kernel` has the shape `[*shape_in, *shape_out]`; it starts normal with standard deviation `gain / sqrt(fan in)`. A `bias`
    has the shape `shape_out` and starts at zero. Operands are rounded to `dtype`, sums to `out_dtype` (default: the same).
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
        self.dtype, self.out_dtype = dtype, out_dtype or dtype
        std = gain / math.sqrt(math.prod(shape_in))
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (*shape_in, *shape_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape_out, jnp.float32)) if bias else None

    def __call__(self, x: jax.Array, summed: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        """x · kernel + bias. `summed` adds up what devices made of their parts of x, before the bias is added."""
        y = cast_tensordot(x, self.kernel[...], len(self.shape_in), self.dtype, self.out_dtype)
        return add_bias(summed(checkpoint_name(y, LINEAR_OUTPUT)), self.bias)


def add_bias(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """y + bias in the dtype of y, or y where there is none."""
    return y if bias is None else y + bias[...].astype(y.dtype)


class Softmax(NamedTuple):
    """How scores become weights, where that is more than a softmax.

    Attributes:
      cap: scores are first `softcap` at it.
      sinks_KG: float32, a logit per query head that stands among the scores and has no value (Agarwal et al. 2025, gpt-oss).
    """

    cap: float | None = None
    sinks_KG: jax.Array | None = None


PLAIN_SOFTMAX = Softmax()


def softcap(scores: jax.Array, cap: float) -> jax.Array:
    """cap · tanh(scores / cap) (Gemma Team 2024, section 2)."""
    return cap * jnp.tanh(scores / cap)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axes (Zhang & Sennrich 2019, eq. 4), computed in float32.

    `scale` has the shape of these axes, or is None; with `zero_centered` x is multiplied by 1 + scale.
    """

    def __init__(self, shape: int | tuple[int, ...], epsilon: float, zero_centered: bool = False, scaled: bool = True):
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.epsilon, self.zero_centered = epsilon, zero_centered
        self.scale = nnx.Param((jnp.zeros if zero_centered else jnp.ones)(self.shape, jnp.float32)) if scaled else None

    def __call__(self, x: jax.Array, averaged: Callable[[jax.Array], jax.Array] = lambda square: square) -> jax.Array:
        """`averaged` is the mean over devices that have parts of x."""
        y, axes = x.astype(jnp.float32), tuple(range(-len(self.shape), 0))
        square = averaged(jnp.mean(jnp.square(y), axis=axes, keepdims=True))
        y = y * jax.lax.rsqrt(square + self.epsilon)
        if self.scale is not None:
            y = y * (1 + self.scale[...] if self.zero_centered else self.scale[...])
        return y.astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x − mean) / std · scale + bias over the last axis (Ba et al. 2016, eq. 4), computed in float32.

    Without `scaled`, `scale` and `bias` are None; without `with_bias` the bias is.
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
    """The RMS-normalisation of vectors of this shape."""
    return RMSNorm(shape, config.norm_epsilon, config.norm_zero_centered, config.norm_scale)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The normalisation of the residual stream that `config.norm` asks for."""
    if config.norm == "rmsnorm":
        return make_rms_norm(config, config.dim)
    return LayerNorm(config.dim, config.norm_epsilon, config.norm_scale, config.norm_bias)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 − rate); without a key, the identity."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def relu2(x: jax.Array) -> jax.Array:
    """max(x, 0)² (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """(u + 1) · g σ(alpha g), where g is the gate, at most `limit`, and u is `up` within ±`limit` (OpenAI 2025, gpt-oss)."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


GATED: dict[str, Callable] = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
PLAIN: dict[str, Callable] = {"gelu": jax.nn.gelu, "relu2": relu2}


def gated_activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`config.activation` as a function of gate and up."""
    return _gated(config.activation, config.swiglu_limit, config.swiglu_alpha)


@cache  # the same function for all layers: only layers with equal attributes share a trace
def _gated(activation: str, limit: float, alpha: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if activation == "clamped_swiglu":
        return partial(clamped_swiglu, limit=limit, alpha=alpha)
    function = GATED[activation]
    return lambda gate, up: function(gate) * up


class GatedFeedForward(nnx.Module):
    """down(f(gate(x)) · up(x)) (Shazeer 2020, eq. 6); gate and up are one kernel `gate_up [D, 2, F]`, gate first."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        D, F = config.dim, config.hidden_dim
        self.function = gated_activation(config)
        self.gate_up = Linear((D,), (2, F), dtype=dtype, rngs=rngs, bias=config.mlp_bias)
        self.down = Linear((F,), (D,), dtype=dtype, rngs=rngs, gain=out_gain, bias=config.mlp_bias)

    def __call__(self, x_BTD: jax.Array, parallelism: Parallelism) -> jax.Array:
        gate_up = self.gate_up(parallelism.copy_to_tp(x_BTD))
        gated_BTF = self.function(gate_up[..., 0, :], gate_up[..., 1, :])
        return self.down(parallelism.shard_features(gated_BTF), parallelism.reduce_from_tp)


class PlainFeedForward(nnx.Module):
    """down(f(up(x)))."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        D, F = config.dim, config.hidden_dim
        self.function = PLAIN[config.activation]
        self.up = Linear((D,), (F,), dtype=dtype, rngs=rngs, bias=config.mlp_bias)
        self.down = Linear((F,), (D,), dtype=dtype, rngs=rngs, gain=out_gain, bias=config.mlp_bias)

    def __call__(self, x_BTD: jax.Array, parallelism: Parallelism) -> jax.Array:
        return self.down(self.function(self.up(parallelism.copy_to_tp(x_BTD))), parallelism.reduce_from_tp)


def make_feed_forward(config: ModelConfig, **kwargs) -> GatedFeedForward | PlainFeedForward:
    """The feed-forward layer that `config.activation` asks for."""
    return (PlainFeedForward if config.activation in PLAIN else GatedFeedForward)(config, **kwargs)

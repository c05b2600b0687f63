"""Low-rank adapters on the projections of a frozen model (Hu et al. 2021, "LoRA").

A projection with kernel W gives W x + scale · B A dropout(x) (equation 3). Projections that are one kernel here have an adapter
for each of those that others keep apart, under the names by which PEFT (Hugging Face) knows them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from dantinox.config import LoraConfig, ModelConfig
from dantinox.model.layers import LINEAR_OUTPUT, PLAIN, Linear, add_bias, cast_tensordot, dropout
from dantinox.model.moe import ExpertLinear

ADAPTER_SUFFIXES = ("lora_a", "lora_b")  # how the names of all trained parameters end
SEED = 0x10FA  # apart from the model's own dropout


class Projection(NamedTuple):
    """Where a projection lies: the module of its layer, and the part of its outputs, from and to in the last axis but one."""

    module: str
    part: tuple[int | None, int | None] | None = None

    def of(self, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that come out of the projection, of those that come out of the module."""
        if self.part is None:
            return outputs
        return *outputs[:-2], len(range(*slice(*self.part).indices(outputs[-2]))), outputs[-1]


def projections(activation: str, kv_projections: int = 2) -> dict[str, Projection]:
    """Every projection of a dense layer by its name. `qkv` is `[D, K, G+2, H]`, `gate_up` is `[D, 2, F]`.

    `kv_projections`: what stands in the place of that 2, see `ModelConfig.kv_projections`.
    """
    n = kv_projections
    attention = {"q_proj": Projection("attention/qkv", (None, -n or None))}
    if n > 0:
        attention["k_proj"] = Projection("attention/qkv", (-n, 1 - n or None))
    if n > 1:
        attention["v_proj"] = Projection("attention/qkv", (-1, None))
    attention["o_proj"] = Projection("attention/out")
    if activation in PLAIN:
        return attention | {"up_proj": Projection("ffn/up"), "down_proj": Projection("ffn/down")}
    gated = {"gate_proj": Projection("ffn/gate_up", (0, 1)), "up_proj": Projection("ffn/gate_up", (1, 2))}
    return attention | gated | {"down_proj": Projection("ffn/down")}


def layer_projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """The projections of a layer that can have adapters."""
    if model.latent is not None:
        return {}
    known = projections(model.activation, model.kv_projections(layer))
    routes = model.experts is not None  # then dense layers have none either
    return {name: place for name, place in known.items() if not routes or place.module.startswith("attention")}


def projection_sizes(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """How many numbers go into each projection of a layer without experts, and how many come out."""
    model = model.of_layer(layer)
    D, F, Q, K = model.dim, model.hidden_dim, model.n_heads * model.head_size, model.kv_heads * model.head_size
    attention = {"q_proj": (D, Q), "k_proj": (D, K), "v_proj": (D, K), "o_proj": (Q, D)}
    return attention | {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def frozen_tensordot(x: jax.Array, w: jax.Array, scale: jax.Array | None, axes: int, dtype: DTypeLike) -> jax.Array:
    """`cast_tensordot` in float32 with weights that have no derivative: neither it nor x is kept for the backward pass.

    Args:
      w: float32, bfloat16 or int8; widened for the product alone.
      scale: of int8, for each output.
    """
    x, w = _widened(x, w, dtype)
    y = jnp.tensordot(x, w, axes, preferred_element_type=jnp.float32)
    return y if scale is None else y * scale


def _widened(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Both in `dtype`, w not before x is there: else a compiler widens all weights at once, and keeps them so."""
    if w.dtype != dtype:
        x, w = jax.lax.optimization_barrier((x, w))
    return x.astype(dtype), w.astype(dtype)


def _frozen_backward(axes: int, dtype: DTypeLike, kept: tuple[Any, ...], d_y: jax.Array):
    w, scale, like = kept
    d_y, w = _widened(d_y if scale is None else d_y * scale, w, dtype)
    outs = w.ndim - axes
    behind = tuple(range(d_y.ndim - outs, d_y.ndim)), tuple(range(axes, w.ndim))
    return jnp.tensordot(d_y, w, behind, preferred_element_type=jnp.float32).astype(like.dtype), None, None


frozen_tensordot.defvjp(
    lambda x, w, scale, axes, dtype: (frozen_tensordot(x, w, scale, axes, dtype), (w, scale, jnp.zeros((), x.dtype))),
    _frozen_backward,
)


class LowRank(nnx.Module):
    """`lora_a [*shape_in, r]`, uniform in ±1/√(fan in) as PEFT's, and `lora_b [r, *shape_out]`, zero."""

    def __init__(self, shape_in: tuple[int, ...], shape_out: tuple[int, ...], rank: int, *, rngs: nnx.Rngs):
        bound = float(np.prod(shape_in)) ** -0.5
        self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), (*shape_in, rank), jnp.float32, -bound, bound))
        self.lora_b = nnx.Param(jnp.zeros((rank, *shape_out), jnp.float32))


class AdaptedLinear(nnx.Module):
    """A `Linear` whose weights stay as they are, with an adapter for each projection in it that has one.

    `kernel` is held as `lora.held` says, of int8 with a `scale` for each output. With a `key` dropout is on.
    """

    def __init__(self, linear: Linear, targets: Mapping[str, Projection], lora: LoraConfig, *, rngs: nnx.Rngs):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype, self.out_dtype = linear.dtype, linear.out_dtype
        self.factor, self.rate = lora.scale, lora.dropout
        self.kernel = nnx.Param(linear.kernel[...].astype(lora.held))
        self.bias = linear.bias
        self.scale = nnx.Param(jnp.ones(self.shape_out, jnp.float32)) if lora.held == "int8" else None
        self.parts = tuple((name, place.part) for name, place in targets.items())
        for name, place in targets.items():
            setattr(self, name, LowRank(self.shape_in, place.of(self.shape_out), lora.rank, rngs=rngs))
        self.key: Any = nnx.data(None)

    def __call__(self, x: jax.Array, summed: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        """What a `Linear` gives. Of parts of x the adapters' parts are summed with it, as they come before the bias."""
        axes, scale = len(self.shape_in), None if self.scale is None else self.scale[...]
        y = frozen_tensordot(x, self.kernel[...], scale, axes, self.dtype)
        read = dropout(x, self.rate, None if self.key is None else self.key[...])
        for name, part in self.parts:
            adapter = getattr(self, name)
            inner = cast_tensordot(read, adapter.lora_a[...], axes, self.dtype, self.dtype)
            added = self.factor * cast_tensordot(inner, adapter.lora_b[...], 1, self.dtype, jnp.float32)
            y = y + (added if part is None else _among(added, part, y.shape[-2]))
        return add_bias(summed(checkpoint_name(y.astype(self.out_dtype), LINEAR_OUTPUT)), self.bias)


def _among(added: jax.Array, part: tuple[int | None, int | None], size: int) -> jax.Array:
    """What is added to a part of the outputs, with zeros for the others."""
    start, stop, _ = slice(*part).indices(size)
    return jnp.pad(added, [(0, 0)] * (added.ndim - 2) + [(start, size - stop), (0, 0)])


def add_adapters(layer: nnx.Module, number: int, model: ModelConfig, *, rngs: nnx.Rngs) -> None:
    """Puts an `AdaptedLinear` in the place of every `Linear` of a layer; other matrices are held as `lora.held` says.

    `number`: of the layer, from 0.
    """
    lora = model.lora
    assert lora is not None
    targets = {name: place for name, place in layer_projections(model, number).items() if name in lora.targets}
    owners = [(path, node) for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Module)]
    for path, owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, Linear):
                module = "/".join(map(str, (*path, name)))
                own: dict[str, Projection] = {target: place for target, place in targets.items() if place.module == module}
                setattr(owner, name, AdaptedLinear(part, own, lora, rngs=rngs))
            elif isinstance(part, ExpertLinear):
                cast_frozen_table(part.kernel, lora)


def cast_frozen_table(table: Any, lora: LoraConfig | None) -> None:
    """Holds a matrix that is no projection of a layer in bfloat16 where the projections are held narrow."""
    if lora is not None and lora.held != "float32":
        table.set_value(table[...].astype(jnp.bfloat16))


def adapted_linears(model: nnx.Module) -> Iterator[AdaptedLinear]:
    """The adapted projections of a model, always in the same order."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, AdaptedLinear) and node.parts:
            yield node


def enable_dropout(model: Any, key: jax.Array) -> None:
    """Switches the adapters' dropout on, for one reading with this key."""
    if model.config.lora is None or model.config.lora.dropout == 0:
        return
    layers = model.config.num_blocks // model.config.period if model.config.scan_layers else None
    for number, part in enumerate(adapted_linears(model)):
        own = jax.random.fold_in(jax.random.fold_in(key, SEED), number)
        part.key = nnx.Variable(own if layers is None else jax.random.split(own, layers))


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of an adapter's, by its path."""
    return name.endswith(ADAPTER_SUFFIXES)


def trainable_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Those of a model's parameters that are trained: all, or its adapters'."""
    return {name: p for name, p in parameters.items() if model.lora is None or is_adapter(name)}


def frozen_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Those that stay as they are."""
    return {name: p for name, p in parameters.items() if model.lora is not None and not is_adapter(name)}


def to_frozen_dtype(name: str, array: np.ndarray, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A weight of a file as it is held beside adapters, for int8 with the scales of its outputs, symmetric; `shapes`: of the
    parameters of the model with its layers apart."""
    kind, beside = shapes[name].dtype, f"{name.removesuffix('kernel')}scale"
    if kind != jnp.int8:
        return {name: np.array(array, kind)}
    wide = np.asarray(array, np.float32)
    largest = np.max(np.abs(wide), axis=tuple(range(wide.ndim - len(shapes[beside].shape))))
    scale = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
    return {name: np.round(wide / scale).astype(np.int8), beside: scale}

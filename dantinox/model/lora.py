"""Low-rank adapters on the projections of a frozen model (Hu et al. 2021, "LoRA").

A projection with kernel W computes W x + scale · B A dropout(x) (equation 3). If several projections share one kernel, each
projection has its own adapter. The adapters have the names that PEFT (Hugging Face) uses.
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
from dantinox.model.layers import LINEAR_OUTPUT, PLAIN_ACTIVATIONS, Linear, add_bias, cast_tensordot, dropout
from dantinox.model.moe import ExpertLinear

ADAPTER_SUFFIXES = ("lora_a", "lora_b")  # suffixes of the names of adapter parameters
DROPOUT_SEED = 0x10FA  # makes the random keys of adapter dropout differ from those of the model


class Projection(NamedTuple):
    """The location of a projection: a module of the layer, and a slice (start, stop) of its second to last output axis."""

    module: str
    part: tuple[int | None, int | None] | None = None

    def shape_out(self, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the output shape of the projection from the output shape of the module."""
        if self.part is None:
            return outputs
        return *outputs[:-2], len(range(*slice(*self.part).indices(outputs[-2]))), outputs[-1]


def projections(activation: str, kv_projections: int = 2) -> dict[str, Projection]:
    """Returns the location of every projection of a dense layer, by name.

    The kernels are `qkv [D, K, G+n, H]`, where n is `kv_projections` (see `ModelConfig.kv_projections`), and
    `gate_up [D, 2, F]`.
    """
    n = kv_projections
    attention = {"q_proj": Projection("attention/qkv", (None, -n or None))}
    if n > 0:
        attention["k_proj"] = Projection("attention/qkv", (-n, 1 - n or None))
    if n > 1:
        attention["v_proj"] = Projection("attention/qkv", (-1, None))
    attention["o_proj"] = Projection("attention/out")
    if activation in PLAIN_ACTIVATIONS:
        return attention | {"up_proj": Projection("ffn/up"), "down_proj": Projection("ffn/down")}
    gated = {"gate_proj": Projection("ffn/gate_up", (0, 1)), "up_proj": Projection("ffn/gate_up", (1, 2))}
    return attention | gated | {"down_proj": Projection("ffn/down")}


def layer_projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """Returns the projections of a layer that can have adapters."""
    if model.latent is not None:
        return {}
    dense = projections(model.activation, model.kv_projections(layer))
    has_experts = model.experts is not None  # the dense layers of such a model have no feed-forward adapters either
    return {name: p for name, p in dense.items() if not has_experts or p.module.startswith("attention")}


def projection_sizes(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Returns the input and output size of each projection of a layer without experts."""
    model = model.of_layer(layer)
    D, F, Q, K = model.dim, model.hidden_dim, model.n_heads * model.head_size, model.kv_heads * model.head_size
    attention = {"q_proj": (D, Q), "k_proj": (D, K), "v_proj": (D, K), "o_proj": (Q, D)}
    return attention | {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def frozen_tensordot(x: jax.Array, w: jax.Array, scale: jax.Array | None, axes: int, dtype: DTypeLike) -> jax.Array:
    """Computes `cast_tensordot` with float32 results and frozen weights, which have no gradient.

    The backward pass needs neither x nor a copy of the weights in `dtype`.

    Args:
      w: float32, bfloat16 or int8; converted to `dtype` for this operation only.
      scale: the scales of int8 weights, one per output; otherwise None.
    """
    x, w = _cast_operands(x, w, dtype)
    y = jnp.tensordot(x, w, axes, preferred_element_type=jnp.float32)
    return y if scale is None else y * scale


def _cast_operands(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Casts both operands to `dtype`.

    A barrier delays the cast of w until x is available. Otherwise the compiler casts the weights of all layers at the start of
    the program and keeps the copies in memory.
    """
    if w.dtype != dtype:
        x, w = jax.lax.optimization_barrier((x, w))
    return x.astype(dtype), w.astype(dtype)


def _frozen_backward(axes: int, dtype: DTypeLike, residuals: tuple[Any, ...], d_y: jax.Array):
    w, scale, like = residuals
    d_y, w = _cast_operands(d_y if scale is None else d_y * scale, w, dtype)
    outs = w.ndim - axes
    contracted = tuple(range(d_y.ndim - outs, d_y.ndim)), tuple(range(axes, w.ndim))
    return jnp.tensordot(d_y, w, contracted, preferred_element_type=jnp.float32).astype(like.dtype), None, None


frozen_tensordot.defvjp(
    lambda x, w, scale, axes, dtype: (frozen_tensordot(x, w, scale, axes, dtype), (w, scale, jnp.zeros((), x.dtype))),
    _frozen_backward,
)


class LowRank(nnx.Module):
    """The matrices of an adapter: `lora_a [*shape_in, r]` and `lora_b [r, *shape_out]`.

    `lora_a` is initialized uniformly in ±1/√(fan in), as in PEFT, and `lora_b` to zero.
    """

    def __init__(self, shape_in: tuple[int, ...], shape_out: tuple[int, ...], rank: int, *, rngs: nnx.Rngs):
        bound = float(np.prod(shape_in)) ** -0.5
        self.lora_a = nnx.Param(jax.random.uniform(rngs.params(), (*shape_in, rank), jnp.float32, -bound, bound))
        self.lora_b = nnx.Param(jnp.zeros((rank, *shape_out), jnp.float32))


class AdaptedLinear(nnx.Module):
    """A `Linear` with frozen weights, and an adapter for each of its projections in `targets`.

    `kernel` is stored in the dtype `lora.held`; with int8, `scale` holds one scale per output. Dropout is on if `key` is set.
    """

    def __init__(self, linear: Linear, targets: Mapping[str, Projection], lora: LoraConfig, *, rngs: nnx.Rngs):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype, self.out_dtype = linear.dtype, linear.out_dtype
        self.factor, self.rate = lora.scale, lora.dropout
        self.kernel = nnx.Param(linear.kernel[...].astype(lora.held))
        self.bias = linear.bias
        self.scale = nnx.Param(jnp.ones(self.shape_out, jnp.float32)) if lora.held == "int8" else None
        self.parts = tuple((name, projection.part) for name, projection in targets.items())
        for name, projection in targets.items():
            setattr(self, name, LowRank(self.shape_in, projection.shape_out(self.shape_out), lora.rank, rngs=rngs))
        self.key: Any = nnx.data(None)

    def __call__(self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y) -> jax.Array:
        """Returns the output of the `Linear` plus the outputs of the adapters.

        `reduce` adds up the partial results of the devices before the bias is added.
        """
        axes, scale = len(self.shape_in), None if self.scale is None else self.scale[...]
        y = frozen_tensordot(x, self.kernel[...], scale, axes, self.dtype)
        dropped = dropout(x, self.rate, None if self.key is None else self.key[...])
        for name, part in self.parts:
            adapter = getattr(self, name)
            inner = cast_tensordot(dropped, adapter.lora_a[...], axes, self.dtype, self.dtype)
            added = self.factor * cast_tensordot(inner, adapter.lora_b[...], 1, self.dtype, jnp.float32)
            y = y + (added if part is None else _pad_to_outputs(added, part, y.shape[-2]))
        return add_bias(reduce(checkpoint_name(y.astype(self.out_dtype), LINEAR_OUTPUT)), self.bias)


def _pad_to_outputs(added: jax.Array, part: tuple[int | None, int | None], size: int) -> jax.Array:
    """Pads the output of an adapter with zeros to all outputs of its module."""
    start, stop, _ = slice(*part).indices(size)
    return jnp.pad(added, [(0, 0)] * (added.ndim - 2) + [(start, size - stop), (0, 0)])


def add_adapters(layer: nnx.Module, number: int, model: ModelConfig, *, rngs: nnx.Rngs) -> None:
    """Replaces every `Linear` of a layer by an `AdaptedLinear`, and casts the kernels of experts as `cast_frozen_table` does.

    `number` is the index of the layer, from 0.
    """
    lora = model.lora
    assert lora is not None
    targets = [(name, p) for name, p in layer_projections(model, number).items() if name in lora.targets]
    owners = [(path, node) for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Module)]
    for path, owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, Linear):
                module = "/".join(map(str, (*path, name)))
                adapted: dict[str, Projection] = {target: p for target, p in targets if p.module == module}
                setattr(owner, name, AdaptedLinear(part, adapted, lora, rngs=rngs))
            elif isinstance(part, ExpertLinear):
                cast_frozen_table(part.kernel, lora)


def cast_frozen_table(table: Any, lora: LoraConfig | None) -> None:
    """Casts a matrix that has no adapters to bfloat16, if the projections are stored in bfloat16 or int8."""
    if lora is not None and lora.held != "float32":
        table.set_value(table[...].astype(jnp.bfloat16))


def adapted_linears(model: nnx.Module) -> Iterator[AdaptedLinear]:
    """Yields the adapted projections of a model, always in the same order."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, AdaptedLinear) and node.parts:
            yield node


def enable_dropout(model: Any, key: jax.Array) -> None:
    """Enables the dropout of the adapters, with this random key, for one forward pass."""
    if model.config.lora is None or model.config.lora.dropout == 0:
        return
    layers = model.config.num_blocks // model.config.period if model.config.scan_layers else None
    for number, part in enumerate(adapted_linears(model)):
        adapter_key = jax.random.fold_in(jax.random.fold_in(key, DROPOUT_SEED), number)
        part.key = nnx.Variable(adapter_key if layers is None else jax.random.split(adapter_key, layers))


def is_adapter(name: str) -> bool:
    """Returns whether the parameter at this path belongs to an adapter."""
    return name.endswith(ADAPTER_SUFFIXES)


def trainable_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the trained parameters: all parameters, or with LoRA only the adapters."""
    return {name: p for name, p in parameters.items() if model.lora is None or is_adapter(name)}


def frozen_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters that are not trained."""
    return {name: p for name, p in parameters.items() if model.lora is not None and not is_adapter(name)}


def to_frozen_dtype(name: str, array: np.ndarray, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts a weight from a file to the dtype of frozen weights; returns it by name.

    For int8 the quantization is symmetric, and the result includes the scales, one per output.

    Args:
      shapes: the abstract parameters of the model with separate layers, by name.
    """
    dtype, scale_name = shapes[name].dtype, f"{name.removesuffix('kernel')}scale"
    if dtype != jnp.int8:
        return {name: np.array(array, dtype)}
    wide = np.asarray(array, np.float32)
    largest = np.max(np.abs(wide), axis=tuple(range(wide.ndim - len(shapes[scale_name].shape))))
    scale = np.where(largest > 0, largest, np.float32(1)) / np.float32(127)
    return {name: np.round(wide / scale).astype(np.int8), scale_name: scale}

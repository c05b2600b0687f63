"""Low-rank adapters on the projections of a frozen model (Hu et al. 2021, "LoRA").

A projection with kernel W computes W x + scale · B A dropout(x) (equation 3). If several
projections share one kernel, each projection has its own adapter. The adapters have the names that
PEFT (Hugging Face) uses.

The scale is alpha / rank, or alpha / √rank for rank-stabilized adapters (Kalajdzievski 2023,
"rsLoRA", equation 7).

A weight-decomposed adapter also trains a magnitude m per output (Liu et al. 2024, "DoRA", equation
5): the output is multiplied by m / ‖W + scale · B A‖, with the norm of the weights of the output.
The norm is constant in the gradient (section 4.3). Initially m = ‖W‖, so the product is that of W.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from dantinox.config import LoraConfig, ModelConfig
from dantinox.model.frozen_weights import FrozenMatrix, dequantize, frozen_tensordot, initial_matrix
from dantinox.model.layers import (
    LINEAR_OUTPUT,
    PLAIN_ACTIVATIONS,
    Linear,
    TernaryLinear,
    add_bias,
    cast_tensordot,
    dropout,
)
from dantinox.model.moe import ExpertLinear

ADAPTER_SUFFIXES = ("lora_a", "lora_b")  # suffixes of the names of adapter matrices
MAGNITUDE = "lora_magnitude_vector"  # the name of the magnitudes of a weight-decomposed adapter
DROPOUT_SEED = 0x10FA  # makes the random keys of adapter dropout differ from those of the model


class Projection(NamedTuple):
    """The location of a projection: a module of the layer, and a slice (start, stop) of its second
    to last output axis.
    """

    module: str
    part: tuple[int | None, int | None] | None = None

    def shape_out(self, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the output shape of the projection from the output shape of the module."""
        if self.part is None:
            return outputs
        return *outputs[:-2], len(range(*slice(*self.part).indices(outputs[-2]))), outputs[-1]


def projections(activation: str, kv_projections: int = 2) -> dict[str, Projection]:
    """Returns the location of every projection of a dense layer, by name.

    The kernels are `qkv [D, K, G+n, H]`, where n is `kv_projections` (see
    `ModelConfig.kv_projections`), and `gate_up [D, 2, F]`.
    """
    # On the second to last axis of `qkv`, the key is behind the G queries, and the value is last.
    if kv_projections == 2:
        parts = {"q_proj": (None, -2), "k_proj": (-2, -1), "v_proj": (-1, None)}
    elif kv_projections == 1:  # the key is also the value
        parts = {"q_proj": (None, -1), "k_proj": (-1, None)}
    else:
        parts = {"q_proj": (None, None)}
    attention = {name: Projection("attention/qkv", part) for name, part in parts.items()}
    attention["o_proj"] = Projection("attention/out")
    if activation in PLAIN_ACTIVATIONS:
        return attention | {"up_proj": Projection("ffn/up"), "down_proj": Projection("ffn/down")}
    gated = {
        "gate_proj": Projection("ffn/gate_up", (0, 1)),
        "up_proj": Projection("ffn/gate_up", (1, 2)),
    }
    return attention | gated | {"down_proj": Projection("ffn/down")}


def layer_projections(model: ModelConfig, layer: int) -> dict[str, Projection]:
    """Returns the projections of a layer that can have adapters."""
    if model.latent is not None or model.projections == "ternary":
        return {}
    dense = projections(model.activation, model.kv_projections(layer))
    # The dense layers of such a model have no feed-forward adapters either.
    has_experts = model.experts is not None
    return {
        name: p for name, p in dense.items() if not has_experts or p.module.startswith("attention")
    }


def projection_sizes(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Returns the input and output size of each projection of a layer without experts."""
    model = model.of_layer(layer)
    D = model.dim
    F = model.hidden_dim
    Q = model.n_heads * model.head_size
    K = model.kv_heads * model.head_size
    attention = {"q_proj": (D, Q), "k_proj": (D, K), "v_proj": (D, K), "o_proj": (Q, D)}
    return attention | {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


class LowRank(nnx.Module):
    """The matrices of an adapter: `lora_a [*shape_in, r]` and `lora_b [r, *shape_out]`.

    `lora_a` is initialized uniformly in ±1/√(fan in), as in PEFT, and `lora_b` to zero. A
    weight-decomposed adapter also has `lora_magnitude_vector [*shape_out]`, which
    `initial_magnitudes` computes from the weights.
    """

    def __init__(
        self,
        shape_in: tuple[int, ...],
        shape_out: tuple[int, ...],
        rank: int,
        dora: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        bound = float(np.prod(shape_in)) ** -0.5
        self.lora_a = nnx.Param(
            jax.random.uniform(rngs.params(), (*shape_in, rank), jnp.float32, -bound, bound)
        )
        self.lora_b = nnx.Param(jnp.zeros((rank, *shape_out), jnp.float32))
        self.lora_magnitude_vector = nnx.Param(jnp.ones(shape_out, jnp.float32)) if dora else None


class AdaptedLinear(nnx.Module):
    """A `Linear` with frozen weights, and an adapter for each of its projections in `targets`.

    The arrays of the frozen weights have the form of `lora.held`, see
    `dantinox.model.frozen_weights`. Dropout is on if `key` is set.
    """

    def __init__(
        self, linear: Linear, targets: Mapping[str, Projection], lora: LoraConfig, *, rngs: nnx.Rngs
    ):
        self.shape_in, self.shape_out = linear.shape_in, linear.shape_out
        self.dtype, self.out_dtype = linear.dtype, linear.out_dtype
        self.factor = lora.scale
        self.rate = lora.dropout
        self.dora = lora.dora
        arrays = initial_matrix(linear.kernel[...], self.shape_in, self.shape_out, lora.held)
        self.arrays = tuple(arrays)
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))
        self.bias = linear.bias
        self.parts = tuple((name, projection.part) for name, projection in targets.items())
        for name, projection in targets.items():
            shape_out = projection.shape_out(self.shape_out)
            setattr(self, name, LowRank(self.shape_in, shape_out, lora.rank, lora.dora, rngs=rngs))
        self.key: Any = nnx.data(None)

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Returns the output of the `Linear` plus the outputs of the adapters.

        `reduce` adds up the partial results of the devices before the bias is added.
        """
        matrix = self.matrix()
        axes = len(self.shape_in)
        shape_in = x.shape[x.ndim - axes :]  # that of this device's shard of the inputs
        y = frozen_tensordot(x, matrix, shape_in, self.dtype)
        dropped = dropout(x, self.rate, None if self.key is None else self.key[...])
        for name, part in self.parts:
            adapter = getattr(self, name)
            inner = cast_tensordot(dropped, adapter.lora_a[...], axes, self.dtype, self.dtype)
            added = self.factor * cast_tensordot(
                inner, adapter.lora_b[...], 1, self.dtype, jnp.float32
            )
            y = y + (added if part is None else _pad_to_outputs(added, part, y.shape[-2]))
        if self.dora and self.parts:
            y = y * self._output_factors(
                jax.lax.stop_gradient(dequantize(matrix, shape_in)), reduce
            )
        return add_bias(reduce(checkpoint_name(y.astype(self.out_dtype), LINEAR_OUTPUT)), self.bias)

    def matrix(self) -> FrozenMatrix:
        """Returns the arrays of the frozen weights."""
        return {name: getattr(self, name)[...] for name in self.arrays}

    def norms(self, matrix: FrozenMatrix) -> dict[str, jax.Array]:
        """Returns the norm of the frozen weights of every output of the adapted projections, by
        projection.
        """
        w = dequantize(matrix, self.shape_in)
        return {
            name: jnp.sqrt(self._sum_of_squares(w[slice_of_outputs(part)]))
            for name, part in self.parts
        }

    def _sum_of_squares(self, w: jax.Array) -> jax.Array:
        """Returns the sum of the squared weights of every output."""
        return jnp.sum(jnp.square(w), axis=tuple(range(len(self.shape_in))))

    def _output_factors(self, w: jax.Array, reduce: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns m / ‖W + scale · B A‖ for every output of the module, and 1 for those without an
        adapter.

        `reduce` adds up the squares of the devices that hold other inputs of the same outputs.
        """
        factors = jnp.ones(w.shape[len(self.shape_in) :], jnp.float32)
        for name, part in self.parts:
            adapter = getattr(self, name)
            where = slice_of_outputs(part)
            a, b = (
                jax.lax.stop_gradient(matrix[...]) for matrix in (adapter.lora_a, adapter.lora_b)
            )
            changed = w[where] + self.factor * jnp.tensordot(a, b, 1, precision="highest")
            squares = reduce(self._sum_of_squares(changed))
            # The output of zero weights is 0, not NaN.
            norm = jnp.sqrt(jnp.where(squares > 0, squares, 1))
            factors = factors.at[where].set(adapter.lora_magnitude_vector[...] / norm)
        return factors


def slice_of_outputs(part: tuple[int | None, int | None] | None) -> tuple[Any, ...]:
    """Returns the index of a projection's part in a kernel, or in other arrays with the output axes
    of its module.
    """
    return (...,) if part is None else (..., slice(*part), slice(None))


def _pad_to_outputs(added: jax.Array, part: tuple[int | None, int | None], size: int) -> jax.Array:
    """Pads the output of an adapter with zeros to all outputs of its module."""
    start, stop, _ = slice(*part).indices(size)
    return jnp.pad(added, [(0, 0)] * (added.ndim - 2) + [(start, size - stop), (0, 0)])


def add_adapters(layer: nnx.Module, number: int, model: ModelConfig, *, rngs: nnx.Rngs) -> None:
    """Replaces every `Linear` of a layer by an `AdaptedLinear`, except ternary ones.

    Kernels of ternary projections and of experts are cast as `cast_frozen_table` does. `number` is
    the index of the layer, from 0.
    """
    lora = model.lora
    assert lora is not None
    targets = [
        (name, p) for name, p in layer_projections(model, number).items() if name in lora.targets
    ]
    owners = [(path, node) for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Module)]
    for path, owner in owners:
        for name, part in list(vars(owner).items()):
            if isinstance(part, TernaryLinear | ExpertLinear):
                cast_frozen_table(part.kernel, lora)
            elif isinstance(part, Linear):
                module = "/".join(map(str, (*path, name)))
                adapted: dict[str, Projection] = {
                    target: p for target, p in targets if p.module == module
                }
                setattr(owner, name, AdaptedLinear(part, adapted, lora, rngs=rngs))


def cast_frozen_table(table: Any, lora: LoraConfig | None) -> None:
    """Casts a matrix that has no adapters to bfloat16, unless the projections are stored in
    float32.
    """
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
        part.key = nnx.Variable(
            adapter_key if layers is None else jax.random.split(adapter_key, layers)
        )


def is_adapter(name: str) -> bool:
    """Returns whether the parameter at this path belongs to an adapter."""
    return name.endswith((*ADAPTER_SUFFIXES, MAGNITUDE))


def trainable_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the trained parameters: all parameters, or with LoRA only the adapters."""
    return {name: p for name, p in parameters.items() if model.lora is None or is_adapter(name)}


def frozen_parameters(parameters: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns the parameters that are not trained."""
    return {
        name: p for name, p in parameters.items() if model.lora is not None and not is_adapter(name)
    }


def initial_magnitudes(model: Any) -> dict[str, jax.Array]:
    """Returns the initial magnitudes of the weight-decomposed adapters of a model by path: ‖W‖ of
    every output.
    """
    found: dict[str, jax.Array] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, AdaptedLinear) and node.dora and node.parts:
            matrix = node.matrix()  # with stacked layers, one layer at a time exists in float32
            norms = (
                jax.lax.map(node.norms, matrix) if model.config.scan_layers else node.norms(matrix)
            )
            found |= {
                "/".join(map(str, (*path, name, MAGNITUDE))): norm for name, norm in norms.items()
            }
    return found

"""Low-rank adapters that differ from row to row of a batch, added to the products of the weights
that all rows share.

A projection with kernel W computes W x + B_n A_n x (Hu et al. 2021, "LoRA", equation 3; the scale
is part of B), where n is the number of the row's adapter. The matrices of all adapters are in one
stack per projection, and each row gathers its own, as in Punica (Chen et al. 2023). Number 0 is no
adapter: its matrices are zeros. All ranks are padded to the same rank with zeros.

The weights may be of any type: the adapters see only the input and the output of a projection.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.model.lora import Projection, layer_projections, projection_sizes
from dantinox.model.transformer import Transformer


class AdapterStack(NamedTuple):
    """The matrices of all adapters of one module, float32.

    Attributes:
      a: `[N, I, P · R]`, where P is the number of adapted projections of the module, in the order
        of their names.
      b: `[N, R, O]` by the name of the projection; O is the number of its outputs.
    """

    a: Any
    b: Mapping[str, Any]


Stacks = Mapping[str, AdapterStack]  # by the path of the module, such as `blocks/0/attention/qkv`


@partial(jax.tree_util.register_dataclass, data_fields=["stacks", "number_B"], meta_fields=[])
@dataclass(frozen=True)
class RowAdapters:
    """The stacks of all adapters, and the number of each row's adapter, int32 in [0, N); 0:
    none.
    """

    stacks: Stacks
    number_B: jax.Array


def adapted_modules(model: ModelConfig, targets: Sequence[str]) -> dict[str, dict[str, Projection]]:
    """Returns the modules with adapters by path, and their adapted projections by name.

    Args:
      targets: the names of the adapted projections.
    """
    modules: dict[str, dict[str, Projection]] = {}
    for layer in range(model.num_blocks):
        for name, projection in sorted(layer_projections(model, layer).items()):
            if name in targets:
                modules.setdefault(f"blocks/{layer}/{projection.module}", {})[name] = projection
    return modules


def stack_shapes(
    model: ModelConfig, targets: Sequence[str], count: int, rank: int
) -> dict[str, AdapterStack]:
    """Returns the shapes of the stacks of `count` adapters."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    stacks = {}
    for path, names in adapted_modules(model, targets).items():
        sizes = projection_sizes(model, int(path.split("/")[1]))
        inputs = sizes[next(iter(names))][0]
        b = {name: shape(count, rank, sizes[name][1]) for name in names}
        stacks[path] = AdapterStack(shape(count, inputs, len(names) * rank), b)
    return stacks


class RowAdaptedLinear(nnx.Module):
    """A projection of any type, plus the adapter of each row.

    The input must be `[B, T, *shape_in]`. A row without an adapter adds zeros. A `lax.cond` that
    skips the products in a batch without adapters would prevent XLA from gathering the matrices
    once per decoding loop instead of once per token.
    """

    def __init__(
        self, linear: Any, stack: AdapterStack, parts: Mapping[str, Projection], number_B: jax.Array
    ):
        self.linear = linear
        self.shape_in = linear.shape_in
        self.shape_out = linear.shape_out
        self.a = nnx.Variable(stack.a)
        self.b = nnx.Dict({name: nnx.Variable(b) for name, b in stack.b.items()})
        self.number_B = nnx.Variable(number_B)
        self.spans = tuple(
            sorted((*_span(projection, self.shape_out), name) for name, projection in parts.items())
        )

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Returns the output of the projection plus that of the adapters, which is computed in
        float32.
        """
        y: jax.Array = self.linear(x, reduce)
        x_BTI = x.reshape(*x.shape[:2], math.prod(self.shape_in)).astype(jnp.float32)
        return (y + self._adapters(x_BTI)).astype(y.dtype)

    def _adapters(self, x_BTI: jax.Array) -> jax.Array:
        number_B = self.number_B[...]
        lead = x_BTI.shape[:2]
        inner_BTR = jnp.einsum("bti,bir->btr", x_BTI, self.a[...][number_B])
        inner = dict(zip(sorted(self.b), jnp.split(inner_BTR, len(self.b), axis=-1), strict=True))
        outer = {
            name: jnp.einsum("btr,bro->bto", inner[name], b[...][number_B])
            for name, b in self.b.items()
        }
        if len(self.shape_out) == 1:
            return outer[self.spans[0][-1]]
        heads = (*lead, *self.shape_out[:-2])
        count, size = self.shape_out[-2:]
        pieces = []
        end = 0
        # The last item pads to the end.
        for start, stop, name in (*self.spans, (count, count, None)):
            pieces.append(jnp.zeros((*heads, start - end, size), jnp.float32))
            if name is not None:
                pieces.append(outer[name].reshape(*heads, stop - start, size))
            end = stop
        return jnp.concatenate(pieces, axis=-2)


def _span(projection: Projection, shape_out: tuple[int, ...]) -> tuple[int, int]:
    """Returns the first index of a projection on the second to last output axis of its module, and
    the index behind it.
    """
    if projection.part is None:
        return 0, shape_out[-2] if len(shape_out) > 1 else 1
    start, stop, _ = slice(*projection.part).indices(shape_out[-2])
    return start, stop


def attach_adapters(model: Transformer, adapters: RowAdapters | None) -> Transformer:
    """Returns a model that adds the adapter of each row; the weights are shared. Without adapters
    it is the same object.
    """
    if adapters is None:
        return model
    model = nnx.clone(model)
    for path, stack in adapters.stacks.items():
        _, layer, owner, name = path.split("/")
        known = layer_projections(model.config, int(layer))
        parts = {target: known[target] for target in stack.b}
        module = getattr(model.blocks[int(layer)], owner)
        setattr(
            module, name, RowAdaptedLinear(getattr(module, name), stack, parts, adapters.number_B)
        )
    return model

"""The collectives inside the model on a mesh, and their gradients. `layout` has those of the
training step around it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from dantinox.distributed.rules import TOKENS
from dantinox.model.parallelism import Parallelism


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_shards(
    w: jax.Array, dims: tuple[tuple[int, tuple[str, ...]], ...], dtype: DTypeLike, copies: int
) -> jax.Array:
    """Rounds shards to `dtype` and then all-gathers them. Gradients are reduce-scattered in
    float32.

    Args:
      w: the local shard.
      dims: (array axis, mesh axes) to gather.
      dtype: the dtype of the result.
      copies: the number of devices that compute identical gradients; the sum of the gradients is
        divided by this number.
    """
    w = w.astype(dtype)
    for axis, names in dims:
        w = lax.all_gather(w, names, axis=axis, tiled=True)
    return w


def _gather_backward(
    dims: tuple[tuple[int, tuple[str, ...]], ...],
    dtype: DTypeLike,
    copies: int,
    _: None,
    d: jax.Array,
):
    d = d.astype(jnp.float32) / copies
    for axis, names in dims:
        d = lax.psum_scatter(d, names, scatter_dimension=axis, tiled=True)
    # Without the barrier XLA accumulates full gradients and moves the reduce-scatter after the
    # accumulation loop.
    return (lax.optimization_barrier(d),)


gather_shards.defvjp(lambda w, *static: (gather_shards(w, *static), None), _gather_backward)


@jax.custom_vjp
def copy_to_tp(x: jax.Array) -> jax.Array:
    """Returns x; sums its gradient over the axis `tensor`."""
    return x


copy_to_tp.defvjp(lambda x: (x, None), lambda _, d: (lax.psum(d, "tensor"),))


@jax.custom_vjp
def reduce_from_tp(x: jax.Array) -> jax.Array:
    """Sums x over the axis `tensor`; does not change its gradient."""
    return lax.psum(x, "tensor")


reduce_from_tp.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, d: (d,))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_gradient(x: jax.Array, copies: int) -> jax.Array:
    """Returns x; divides its gradient by `copies`."""
    return x


scale_gradient.defvjp(lambda x, copies: (x, None), lambda copies, _, d: (d / copies,))


@dataclass(frozen=True, kw_only=True)
class MeshParallelism(Parallelism):
    """The collectives of a model inside a `shard_map` over a mesh; `layout` is the `Layout` of the
    run.
    """

    layout: Any

    @property
    def tensor(self) -> int:
        """The size of the axis `tensor`."""
        return int(self.layout.sizes["tensor"])

    def gather_weights(self, block: Any) -> Any:
        graph, state = nnx.split(block)
        flat = nnx.to_flat_state(state)
        gathered = [
            (path, leaf.replace(self.layout.gather_parameter("/".join(map(str, path)), leaf[...])))
            for path, leaf in flat
        ]
        return nnx.merge(graph, nnx.from_flat_state(gathered))

    def copy_to_tp(self, x: Any) -> Any:
        return copy_to_tp(x) if self.tensor > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x

    def reduce_from_tp(self, x: jax.Array) -> jax.Array:
        return reduce_from_tp(x) if self.tensor > 1 else x

    def scale_replicated(self, x: jax.Array) -> jax.Array:
        return scale_gradient(x, self.tensor) if self.tensor > 1 else x

    def local_shard(self, x_N: jax.Array) -> jax.Array:
        if self.tensor == 1:
            return x_N
        padded = jnp.pad(
            self.copy_to_tp(x_N), [(0, -len(x_N) % self.tensor)] + [(0, 0)] * (x_N.ndim - 1)
        )
        size = len(padded) // self.tensor
        return lax.dynamic_slice_in_dim(padded, lax.axis_index("tensor") * size, size)

    def pmean_batch(self, x: jax.Array) -> jax.Array:
        return lax.pmean(x, TOKENS)

    def psum_batch(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, TOKENS)

    def pmean_heads(self, x: jax.Array) -> jax.Array:
        return lax.pmean(x, "tensor") if self.tensor > 1 else x

    def all_gather_tokens(self, x_N: jax.Array) -> jax.Array:
        return lax.all_gather(x_N, "expert", axis=0, tiled=True) if self.groups > 1 else x_N

    def reduce_scatter_tokens(self, y_N: jax.Array) -> jax.Array:
        return (
            lax.psum_scatter(y_N, "expert", scatter_dimension=0, tiled=True)
            if self.groups > 1
            else y_N
        )

    def first_expert(self, experts: int) -> Any:
        return lax.axis_index("expert") * experts

    def ring_index(self) -> jax.Array:
        return lax.axis_index("sequence")

    def ring_shift(self, x: Any) -> Any:
        return lax.ppermute(
            x, "sequence", [(device, (device + 1) % self.ring) for device in range(self.ring)]
        )

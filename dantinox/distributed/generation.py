"""Tensor-parallel generation: placement of the weights of a model over several devices.

Unlike in training nothing is gathered: weights stay where they are, and a token's residual stream passes between the devices
twice in a layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dantinox.config import ModelConfig, UserError
from dantinox.distributed.layout import with_shardings
from dantinox.distributed.rules import AXES, RULES, name_in_layer, split_parameter
from dantinox.model import Transformer
from dantinox.model.cache import KVCache
from dantinox.model.parallelism import Parallelism


@dataclass(frozen=True)
class TensorParallelism(Parallelism):
    """What a model is given whose weights stand on the axis `tensor` of a mesh."""

    mesh: Mesh | None = None

    def reduce_from_tp(self, x: jax.Array) -> jax.Array:
        return self.all_gather(x)

    def all_gather(self, x: jax.Array) -> jax.Array:
        assert self.mesh is not None
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None)))

    def shard_features(self, x: jax.Array) -> jax.Array:
        """Else narrow weights, gate above up in one array, leave their parts where `down` is gathered for them."""
        assert self.mesh is not None
        at = PartitionSpec(None, *[None] * (x.ndim - 2), "tensor")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, at))

    def shard_map_heads(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        everywhere, by_head = PartitionSpec(None), PartitionSpec(None, None, "tensor")

        def shared(q_BTKGH: Any, k_BTKH: Any, v_BTKH: Any, segments_BT: Any, window: int | None, softmax: Any) -> jax.Array:
            inputs = by_head, by_head, by_head, everywhere, PartitionSpec("tensor")

            def of_own(q: Any, k: Any, v: Any, segments: Any, sinks_KG: Any) -> jax.Array:
                return kernel(q, k, v, segments, window, softmax._replace(sinks_KG=sinks_KG))

            each = jax.shard_map(of_own, mesh=self.mesh, in_specs=inputs, out_specs=by_head, check_vma=False)
            return each(q_BTKGH, k_BTKH, v_BTKH, segments_BT, softmax.sinks_KG)

        return shared


def max_tensor_parallel(model: ModelConfig, most: int) -> int:
    """The largest number of devices, up to `most`, that a model's heads and features can be divided by."""
    numbers = _divided(model).values()
    return max(count for count in range(1, most + 1) if not any(number % count for number in numbers))


def _divided(model: ModelConfig) -> dict[str, int]:
    """What stands on different devices, in words, and how much of it a layer has."""
    heads = {"key heads": model.kv_heads} if model.latent is None else {"heads": model.n_heads}
    if model.global_kv_heads is not None:
        heads["key heads without a window"] = model.global_kv_heads
    widths = {"features of the feed-forward": model.hidden_dim}
    if model.experts is not None and model.experts.shared_dim:
        widths["features of the shared layer"] = model.experts.shared_dim
    if model.experts is not None and model.experts.dense_layers:
        widths["features of the dense feed-forward"] = model.experts.dense_dim
    return heads | widths


def tensor_mesh(model: ModelConfig, count: int, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `count` devices, or of these.

    Raises:
      UserError: there are fewer, or heads and features cannot be divided by it.
    """
    devices = jax.local_devices() if devices is None else devices
    bounds = [(f"be at most the {len(devices)} devices of this machine", count > len(devices))]
    bounds += [(f"divide the {number} {what} of a layer", number % count > 0) for what, number in _divided(model).items()]
    for bound, broken in bounds:
        if broken:
            key = "generation.tensor_parallel"
            raise UserError(f"{key} must {bound}, got {count}", key=key, value=count)
    kinds = (jax.sharding.AxisType.Auto,)
    return Mesh(np.array(devices[:count]), ("tensor",), axis_types=kinds)


def partition_spec(name: str, shape: tuple[int, ...], narrow: bool, tensor: int) -> PartitionSpec:
    """How a parameter of a prepared model stands, by its path. `narrow`: stored as `[…, outputs, inputs]`, with a scale."""
    inner, _ = name_in_layer(name)
    module, _, leaf = inner.rpartition("/")
    if inner == "embed" or module == "head":  # tables by what a token's row has, the output layer by its tokens
        axis = 0 if narrow else 1
        return _along(axis, len(shape)) if len(shape) and shape[axis] % tensor == 0 else PartitionSpec()
    if inner == "per_layer/embed":
        return _along(2, 3) if len(shape) == 3 and shape[2] % tensor == 0 else PartitionSpec()
    if leaf == "one":
        return PartitionSpec()
    if not narrow or leaf == "bias":
        parts = split_parameter(inner, shape, dict.fromkeys(AXES, 1) | {"tensor": tensor}).compute
        return PartitionSpec(*(names or None for names in parts))
    rule = next(rule for rule in RULES if fnmatch(f"{module}/kernel", rule.path))  # whatever the number of its axes
    letter = next((letter for letter, axis in rule.compute.items() if axis == "tensor"), "")
    stacked = rule.axes.startswith("E")
    inputs = rule.axes[stacked:-1] if module.endswith("attention/out") else rule.axes[stacked : stacked + 1]
    axis = stacked + (1 if letter in inputs else 0)
    fits = letter and axis < len(shape) and shape[axis] % tensor == 0
    return _along(axis, len(shape)) if fits else PartitionSpec()


def _along(axis: int, ndim: int) -> PartitionSpec:
    return PartitionSpec(*("tensor" if number == axis else None for number in range(ndim)))


def model_shardings(model: Transformer, mesh: Mesh) -> Any:
    """Where the parameters of a model, prepared or not, stand: of the structure of its `nnx.state`."""
    flat = dict(nnx.to_flat_state(nnx.state(model)))

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        narrow = (*path[:-1], "one") in flat
        spec = partition_spec("/".join(map(str, path)), leaf.shape, narrow, mesh.shape["tensor"])
        return NamedSharding(mesh, spec)

    return nnx.from_flat_state([(path, leaf.replace(place(path, leaf))) for path, leaf in flat.items()])


def weight_shardings(mesh: Mesh, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """Where the weights of a file stand, by their paths."""
    tensor = mesh.shape["tensor"]
    return {name: NamedSharding(mesh, partition_spec(name, tuple(leaf.shape), False, tensor)) for name, leaf in shapes.items()}


def shard_model(model: Transformer, mesh: Mesh, put: Callable[[Any, Any], Any] = jax.device_put) -> Transformer:
    """The same model with its weights on a mesh, where `put` places them by their shardings."""
    graph, state = nnx.split(model)
    shared = nnx.merge(graph, put(state, model_shardings(model, mesh)))
    shared.parallelism = TensorParallelism(mesh=mesh)
    return shared


def shard_model_shapes(model: Transformer, mesh: Mesh) -> Transformer:
    """`shard_model` of a model of shapes."""
    return shard_model(model, mesh, with_shardings)


def shard_program_arguments(mesh: Mesh, tree: Any) -> Any:
    """The arguments of a program of such a model as shapes: placed ones as they are, caches by heads, all else everywhere."""
    by_heads = isinstance(tree, KVCache)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        split = by_heads and len(leaf.shape) == 4 and leaf.shape[1] % mesh.size == 0  # [B, K, S, H]
        at = NamedSharding(mesh, PartitionSpec(None, "tensor") if split else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return jax.tree.map(place, tree)

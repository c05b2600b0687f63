"""Tensor-parallel generation: shards the weights of a model over several devices.

Unlike in training, weights are never gathered. The residual stream of a token is all-reduced twice
per layer.
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


@dataclass(frozen=True, kw_only=True)
class TensorParallelism(Parallelism):
    """The parallelism of a model whose weights are sharded over the mesh axis `tensor`."""

    mesh: Mesh

    def reduce_from_tp(self, x: jax.Array) -> jax.Array:
        return self.all_gather(x)

    def all_gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None)))

    def shard_features(self, x: jax.Array) -> jax.Array:
        """Keeps features sharded.

        Otherwise XLA would gather the quantized gate and up weights, which share one array, before
        `down`.
        """
        spec = PartitionSpec(None, *[None] * (x.ndim - 2), "tensor")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def shard_map_heads(self, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        replicated = PartitionSpec(None)
        by_head = PartitionSpec(None, None, "tensor")

        def sharded(
            q_BTKGH: Any,
            k_BTKH: Any,
            v_BTKH: Any,
            segments_BT: Any,
            window: int | None,
            softmax: Any,
        ) -> jax.Array:
            sinks = PartitionSpec("tensor")
            inputs = by_head, by_head, by_head, replicated, sinks

            def local(q: Any, k: Any, v: Any, segments: Any, sinks_KG: Any) -> jax.Array:
                return kernel(q, k, v, segments, window, softmax._replace(sinks_KG=sinks_KG))

            sharded_kernel = jax.shard_map(
                local, mesh=self.mesh, in_specs=inputs, out_specs=by_head, check_vma=False
            )
            return sharded_kernel(q_BTKGH, k_BTKH, v_BTKH, segments_BT, softmax.sinks_KG)

        return sharded


def max_tensor_parallel(model: ModelConfig, limit: int) -> int:
    """Returns the largest number of devices, up to `limit`, that divides the heads and features of
    a model.
    """
    numbers = _sharded_sizes(model).values()
    return max(
        count for count in range(1, limit + 1) if not any(number % count for number in numbers)
    )


def _sharded_sizes(model: ModelConfig) -> dict[str, int]:
    """Returns the sizes in a layer (such as numbers of heads) that are sharded over devices; the
    keys describe them.
    """
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
    """Returns a mesh with the axis `tensor` over `count` devices.

    Args:
      model: the architecture.
      count: the number of devices.
      devices: the devices to choose from, in order. None: all local devices.

    Raises:
      UserError: there are fewer devices, or `count` does not divide the heads and features.
    """
    devices = jax.local_devices() if devices is None else devices
    bounds = [(f"be at most the {len(devices)} devices of this machine", count > len(devices))]
    bounds += [
        (f"divide the {number} {what} of a layer", number % count > 0)
        for what, number in _sharded_sizes(model).items()
    ]
    for bound, broken in bounds:
        if broken:
            key = "generation.tensor_parallel"
            raise UserError(f"{key} must {bound}, got {count}", key=key, value=count)
    kinds = (jax.sharding.AxisType.Auto,)
    return Mesh(np.array(devices[:count]), ("tensor",), axis_types=kinds)


def partition_spec(
    name: str, shape: tuple[int, ...], quantized: bool, tensor: int
) -> PartitionSpec:
    """Returns the partition spec of a parameter for generation.

    Args:
      name: the path of the parameter.
      shape: its shape.
      quantized: whether it is stored as `[…, outputs, inputs]` with a scale.
      tensor: the size of the mesh axis `tensor`.
    """
    inner, _ = name_in_layer(name.replace("/integers/", "/"))
    module, _, leaf = inner.rpartition("/")
    # Tables are sharded by embedding dimension, the output layer by tokens.
    if inner == "embed" or module == "head":
        axis = 0 if quantized else 1
        return (
            _along(axis, len(shape))
            if len(shape) > axis and shape[axis] % tensor == 0
            else PartitionSpec()
        )
    if inner == "per_layer/embed":
        return _along(2, 3) if len(shape) == 3 and shape[2] % tensor == 0 else PartitionSpec()
    if leaf in ("one", "scales"):
        return PartitionSpec()
    if not quantized or leaf == "bias":
        parts = split_parameter(inner, shape, dict.fromkeys(AXES, 1) | {"tensor": tensor}).compute
        return PartitionSpec(*(names or None for names in parts))
    # Not `find_rule`: a quantized array may have another number of axes than its matrix.
    rule = next(rule for rule in RULES if fnmatch(f"{module}/kernel", rule.path))
    letter = next((letter for letter, axis in rule.compute.items() if axis == "tensor"), "")
    stacked = rule.axes.startswith("E")  # experts have a leading axis
    inputs = (
        rule.axes[stacked:-1]
        if module.endswith("attention/out")
        else rule.axes[stacked : stacked + 1]
    )
    axis = stacked + (letter in inputs)  # of `[…, outputs, inputs]`
    fits = letter and axis < len(shape) and shape[axis] % tensor == 0
    return _along(axis, len(shape)) if fits else PartitionSpec()


def _along(axis: int, ndim: int) -> PartitionSpec:
    return PartitionSpec(*("tensor" if number == axis else None for number in range(ndim)))


def model_shardings(model: Transformer, mesh: Mesh) -> Any:
    """Returns the shardings of the parameters of a model, quantized or not, in the structure of its
    `nnx.state`.
    """
    flat = dict(nnx.to_flat_state(nnx.state(model)))

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        quantized = (*path[:-1], "one") in flat
        spec = partition_spec("/".join(map(str, path)), leaf.shape, quantized, mesh.shape["tensor"])
        return NamedSharding(mesh, spec)

    return nnx.from_flat_state(
        [(path, leaf.replace(place(path, leaf))) for path, leaf in flat.items()]
    )


def weight_shardings(mesh: Mesh, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """Returns the shardings of the weights in a file, by path."""
    tensor = mesh.shape["tensor"]
    return {
        name: NamedSharding(mesh, partition_spec(name, tuple(leaf.shape), False, tensor))
        for name, leaf in shapes.items()
    }


def shard_model(
    model: Transformer, mesh: Mesh, put: Callable[[Any, Any], Any] = jax.device_put
) -> Transformer:
    """Returns the model with its weights sharded over a mesh; `put(weights, shardings)` places the
    weights on the devices.
    """
    graph, state = nnx.split(model)
    sharded = nnx.merge(graph, put(state, model_shardings(model, mesh)))
    sharded.parallelism = TensorParallelism(mesh=mesh)
    return sharded


def shard_model_shapes(model: Transformer, mesh: Mesh) -> Transformer:
    """Applies `shard_model` to an abstract model, whose weights are shapes with shardings."""
    return shard_model(model, mesh, with_shardings)


def shard_program_arguments(mesh: Mesh, tree: Any) -> Any:
    """Returns the arguments of a program of a sharded model as shapes with shardings.

    Leaves that have a sharding keep it. Caches are sharded by key head, all other leaves are
    replicated.
    """
    by_heads = isinstance(tree, KVCache)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        split = by_heads and len(leaf.shape) == 4 and leaf.shape[1] % mesh.size == 0  # [B, K, S, H]
        sharding = NamedSharding(mesh, PartitionSpec(None, "tensor") if split else PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)

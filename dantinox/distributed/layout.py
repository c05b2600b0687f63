"""Sharded training: the mesh, the shardings of parameters, optimizer state and batches, and the
sums of gradients and losses over devices. `mesh_parallelism` has the collectives inside the model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dantinox import programs
from dantinox.config import Config, ModelConfig, UserError
from dantinox.config.preference_defaults import PREFERENCE_OBJECTIVES
from dantinox.distributed.mesh_parallelism import MeshParallelism, copy_to_tp, gather_shards
from dantinox.distributed.rules import (
    AXES,
    BATCH,
    SUMMED_OVER_TENSOR,
    TOKENS,
    Split,
    name_in_layer,
    split_parameter,
)
from dantinox.model import Transformer, compute_dtype
from dantinox.model.lora import is_adapter
from dantinox.model.parallelism import GATHERED, SINGLE_DEVICE, Parallelism
from dantinox.model.parameters import Parameters, abstract_model
from dantinox.model.positions import zigzag_chunks

ONE_DEVICE = "one device"
# The objectives whose loss is a sum over tokens.
TOKEN_OBJECTIVES = ("next_token", "sft", "distill")


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of shapes with the shardings of a second tree of the same structure."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Formats the axes of a mesh and their sizes, such as `data 2 × fsdp 4`."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items())


@dataclass(frozen=True)
class Layout:
    """The placement of all arrays of a training run.

    Attributes:
      model: the architecture.
      mesh: the mesh of several devices. None: a single device.
      device: the single device, if it is not the default device.
    """

    model: ModelConfig
    mesh: Mesh | None = None
    device: jax.Device | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis; 1 for all axes on a single device."""
        return dict.fromkeys(AXES, 1) if self.mesh is None else dict(self.mesh.shape)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())

    def describe(self) -> str:
        """Describes the devices. Layouts with equal descriptions compute sums in the same order."""
        if self.mesh is None:
            return ONE_DEVICE
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        return format_mesh(self.sizes) + processes

    def label(self) -> str:
        """Describes the mesh briefly, without axes of size 1."""
        return (
            format_mesh({axis: size for axis, size in self.sizes.items() if size > 1}) or ONE_DEVICE
        )

    @property
    def batch_shards(self) -> int:
        """The number of parts into which the rows of a batch are split."""
        return math.prod(self.sizes[axis] for axis in BATCH)

    @property
    def row_shards(self) -> int:
        """The number of parts into which each row is split."""
        return self.sizes["sequence"]

    @cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the model's parameters by path."""
        return abstract_model(self.model)[1]

    @cached_property
    def splits(self) -> dict[str, Split]:
        """The `Split` of each parameter of the model by path."""
        splits = {}
        for name, leaf in self.shapes.items():
            inner, layers = name_in_layer(name)
            split = split_parameter(inner, leaf.shape[layers:], self.sizes)
            splits[name] = Split(((),) * layers + split.compute, ((),) * layers + split.storage)
        return splits

    def check_whole_matrices(self, owner: str = "") -> None:
        """Checks that the `tensor` axis may split the matrices of the model, see
        `check_whole_matrices`.
        """
        check_whole_matrices(self.model, self.sizes["tensor"], owner)

    @cached_property
    def splits_in_layer(self) -> dict[str, Split]:
        """The `Split` of each parameter of one layer, by its name in the layer.

        Raises:
          UserError: the split differs between layers.
        """
        splits: dict[str, Split] = {}
        for name, split in self.splits.items():
            inner, layers = name_in_layer(name)
            in_layer = Split(split.compute[layers:], split.storage[layers:])
            if splits.setdefault(inner, in_layer) != in_layer:
                sizes = ", ".join(
                    f"distributed.{axis} {size}" for axis, size in self.sizes.items() if size > 1
                )
                raise UserError(
                    f"{inner} would be sharded differently in layers with different heads: lower"
                    f" {sizes}"
                )
        return splits

    @property
    def parallelism(self) -> Parallelism:
        """The parallelism of the model inside the training program."""
        if self.mesh is None:
            return SINGLE_DEVICE
        return MeshParallelism(
            gathers=True, groups=self.sizes["expert"], ring=self.row_shards, layout=self
        )

    def build_model(
        self, build: Callable[[Parameters], Transformer], parameters: Parameters
    ) -> Transformer:
        """Builds the model from the local shards of the parameters, inside `shard_map`."""
        if self.mesh is None:
            return build(parameters)

        def gather(name: str, p: jax.Array) -> jax.Array:
            # Those of layers are gathered by `Parallelism.gather_weights`.
            in_layer = "/" in name and name not in SUMMED_OVER_TENSOR
            return p if in_layer else self.gather_parameter(name, p)

        model = build({name: gather(name, p) for name, p in parameters.items()})
        model.parallelism = self.parallelism
        return model

    def gather_parameter(self, name: str, w: jax.Array) -> jax.Array:
        """All-gathers a parameter from its local shard to the form that the matmul uses; `name` is
        its name in the layer.
        """
        if name not in self.splits_in_layer:  # the dropout key, which is not a parameter
            return w
        split = self.splits_in_layer[name]
        tensor = self.sizes["tensor"]
        if not split.gathered:
            is_head_norm = fnmatch(name, "attention/[qk]_norm/scale") and self.model.latent is None
            has_partial_gradient = is_head_norm or is_adapter(name)
            return (
                copy_to_tp(w)
                if has_partial_gradient and not any(split.compute) and tensor > 1
                else w
            )
        # Ternary weights are computed from float32 weights.
        is_rounded = (
            name.endswith("kernel")
            and name != "ffn/router/kernel"
            and self.model.projections == "float"
        )
        has_identical_gradients = name not in SUMMED_OVER_TENSOR and any(
            "tensor" in names for _, names in split.gathered
        )
        dtype = compute_dtype(self.model) if is_rounded and w.dtype == jnp.float32 else w.dtype
        return checkpoint_name(
            gather_shards(w, split.gathered, dtype, tensor if has_identical_gradients else 1),
            GATHERED,
        )

    def reduce_gradients(self, gradients: Parameters) -> Parameters:
        """All-reduces the gradients of local shards over the mesh axes over which they are not
        summed yet.
        """
        if self.mesh is None:
            return gradients

        def total(name: str, g: jax.Array) -> jax.Array:
            summed = (*TOKENS, "tensor") if name in SUMMED_OVER_TENSOR else TOKENS
            missing = [axis for axis in summed if axis not in self.splits[name].axes]
            return lax.psum(g, missing) if missing else g

        return {name: total(name, g) for name, g in gradients.items()}

    def psum(self, tree: Any) -> Any:
        """Sums a tree over all devices."""
        return tree if self.mesh is None else lax.psum(tree, AXES)

    def device_key(self, key: jax.Array) -> jax.Array:
        """Returns the random key of this device; devices with the same tokens get the same key."""
        return key if self.mesh is None else jax.random.fold_in(key, lax.axis_index(TOKENS))

    def shard_map(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """Wraps a function so that every device runs it on its shards.

        Args:
          function: the function of local shards.
          inputs, outputs: partition specs of the arguments and of the results.
        """
        if self.mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The partition specs of the parameters, for `shard_map`; empty on a single device."""
        return (
            {} if self.mesh is None else {name: split.spec for name, split in self.splits.items()}
        )

    def shardings(self, tree: Any) -> Any:
        """Returns the shardings of a tree such as the training state.

        Leaves with the name and shape of a parameter are sharded like the parameter, all others are
        replicated. The result is None if everything is on the default device.
        """
        if self.mesh is None:
            return (
                None
                if self.device is None
                else jax.tree.map(lambda _: SingleDeviceSharding(self.device), tree)
            )
        shapes = self.shapes

        def place(path: Any, leaf: Any) -> NamedSharding:
            names = [
                part.key
                for part in path
                if isinstance(part, jax.tree_util.DictKey) and part.key in shapes
            ]
            is_parameter = names and tuple(leaf.shape) == shapes[names[-1]].shape
            spec = self.specs[names[-1]] if is_parameter else PartitionSpec()
            return NamedSharding(self.mesh, spec)  # type: ignore[arg-type]

        return jax.tree_util.tree_map_with_path(place, tree)

    def bytes_per_device(self, tree: Any) -> int:
        """Returns the bytes that one device holds of a tree of shapes."""
        return (
            programs.tree_bytes(tree)
            if self.mesh is None
            else bytes_per_device(self.place_shapes(tree))
        )

    def place_shapes(self, tree: Any) -> Any:
        """Returns a tree of shapes with its shardings."""
        places = self.shardings(tree)
        return tree if places is None else with_shardings(tree, places)

    def put_parameters(self, weights: Mapping[str, np.ndarray]) -> Parameters:
        """Copies weights from host memory to the devices. No device ever holds more than its
        shards.
        """
        if self.mesh is None:
            return {name: jnp.array(array) for name, array in weights.items()}

        def put(name: str, array: np.ndarray) -> jax.Array:
            where = NamedSharding(self.mesh, self.specs[name])  # type: ignore[arg-type]
            return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

        return {name: put(name, array) for name, array in weights.items()}

    @property
    def batch_spec(self) -> PartitionSpec:
        """The partition spec of the arrays of a batch, `[rows, …]`, or `[rows, positions]` if the
        positions are split.
        """
        return PartitionSpec(BATCH) if self.row_shards == 1 else PartitionSpec(BATCH, "sequence")

    @property
    def batch_sharding(self) -> Any:
        """The sharding of a batch, or None for the default device."""
        if self.mesh is None:
            return None if self.device is None else SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, self.batch_spec)

    def place_batch(self, batch: Any) -> Any:
        """Returns the shapes of a batch with their sharding."""
        if self.batch_sharding is None:
            return batch
        return with_shardings(batch, jax.tree.map(lambda _: self.batch_sharding, batch))

    def put_batch(self, read: Callable[..., Any], count: int, accumulated: int = 1) -> Any:
        """Puts a batch on the devices.

        Each process reads only the rows of its devices. The batch has `accumulated` parts, and each
        part holds the same rows as it would on a single device. The rows of a part are split over
        all devices in order. If the positions of a row are split too, each device gets its two
        chunks of the row (`zigzag_chunks`).

        Args:
          read: `read()` returns all rows, `read(numbers)` the rows with these ascending numbers.
          count: the number of rows.
          accumulated: the number of parts for gradient accumulation.
        """
        if self.mesh is None:
            return jax.device_put(read(), self.batch_sharding)
        order = (
            np.arange(count).reshape(accumulated, self.batch_shards, -1).swapaxes(0, 1).reshape(-1)
        )
        by_rows: Any = NamedSharding(self.mesh, PartitionSpec(BATCH))
        local_rows = [
            order[place[0]] for place in by_rows.addressable_devices_indices_map((count,)).values()
        ]
        local_numbers = np.unique(np.concatenate(local_rows))
        part = read(local_numbers)

        def put(array: np.ndarray) -> jax.Array:
            if self.row_shards > 1:
                array = array[:, _zigzag_order(array.shape[1], self.row_shards)]

            def read_shard(index: Any) -> np.ndarray:
                rows = array[np.searchsorted(local_numbers, order[index[0]])]
                return rows if self.row_shards == 1 else rows[:, index[1]]

            return jax.make_array_from_callback(
                (count, *array.shape[1:]), self.batch_sharding, read_shard
            )

        return jax.tree.map(put, part)

    @property
    def replicated(self) -> Any:
        """The sharding of replicated arrays."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, array: np.ndarray) -> jax.Array:
        """Copies an array to every device."""
        if self.mesh is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(
            array.shape, self.replicated, lambda index: array[index]
        )


def _zigzag_order(length: int, devices: int) -> np.ndarray:
    """Returns the positions of a row in the order of the devices that hold them."""
    return np.arange(length).reshape(2 * devices, -1)[zigzag_chunks(devices)].reshape(-1)


def mesh_sizes(config: Config, model: ModelConfig, devices: int) -> dict[str, int]:
    """Returns the size of each mesh axis for a number of devices.

    Raises:
      UserError: the product of the sizes differs from the number of devices, the sizes do not
        divide the batch, or an axis is not supported by the model or objective.
    """
    t = config.training
    sizes: dict[str, int] = {axis: getattr(config.distributed, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = max(1, devices // fixed)
    mesh = format_mesh(sizes)
    if math.prod(sizes.values()) != devices:
        raise UserError(
            f"distributed: {mesh} is a mesh of {math.prod(sizes.values())} devices, but there are"
            f" {devices}"
        )
    rows = t.batch_size // t.grad_accum
    parts = math.prod(sizes[axis] for axis in BATCH)
    if rows % parts:
        accumulated = f" / training.grad_accum {t.grad_accum}" if t.grad_accum > 1 else ""
        raise UserError(
            f"training.batch_size {t.batch_size}{accumulated} is {rows} rows, which {parts} devices"
            f" ({mesh}) cannot share equally: make it a multiple of {parts * t.grad_accum}, or set"
            " the axes of distributed"
        )
    if sizes["tensor"] > 1 and t.objective in PREFERENCE_OBJECTIVES:
        raise UserError(
            f"distributed.tensor must be 1 with training.objective: {t.objective}, got"
            f" {sizes['tensor']}"
        )
    if sizes["tensor"] > 1 and model.lora is not None and model.lora.held == "nf4":
        blocks = "its blocks of 64 inputs cannot be split between devices"
        raise UserError(
            f"distributed.tensor must be 1 with lora.base_weights: nf4, got {sizes['tensor']}:"
            f" {blocks}"
        )
    check_whole_matrices(model, sizes["tensor"])
    if sizes["expert"] > 1 and model.experts is None:
        raise UserError(
            f"distributed.expert must be 1 for a model without experts, got {sizes['expert']}"
        )
    if sizes["sequence"] > 1:
        _check_sequence(sizes["sequence"], config, model)
    return sizes


def check_whole_matrices(model: ModelConfig, devices: int, owner: str = "") -> None:
    """Checks that the matrices of a model can be split over the `tensor` axis.

    Args:
      owner: `of the teacher`, for the error message; the default is the trained model.

    Raises:
      UserError: the model has ternary projections or sub-norms, and the axis has several devices.
    """
    if devices == 1 or (model.projections != "ternary" and not model.sub_norms):
        return
    key = "model.projections: ternary" if model.projections == "ternary" else "model.sub_norms"
    one = "scales and norms are those of whole matrices and rows"
    raise UserError(
        f"distributed.tensor must be 1 with {key}{owner}, got {devices}: {one}",
        key="distributed.tensor",
    )


def _check_sequence(devices: int, config: Config, model: ModelConfig) -> None:
    """Raises a UserError if a row cannot be split over this many devices."""
    if config.training.objective not in TOKEN_OBJECTIVES:
        raise UserError(
            f"distributed.sequence must be 1 with training.objective: {config.training.objective},"
            f" got {devices}: it needs {' or '.join(TOKEN_OBJECTIVES)}"
        )
    if model.kernel not in ("auto", "chunked"):
        raise UserError(
            f"attention.kernel must be auto or chunked with distributed.sequence {devices}, got"
            f" {model.kernel}"
        )
    if config.model.max_context % (2 * devices):
        raise UserError(
            f"model.max_context must be a multiple of {2 * devices} (two chunks for each of the"
            f" {devices} devices of distributed.sequence), got {config.model.max_context}"
        )


def make_layout(
    config: Config, model: ModelConfig, devices: list[jax.Device] | None = None
) -> Layout:
    """Returns the layout of a training run.

    Args:
      config: the settings, including `distributed`.
      model: the architecture.
      devices: the devices to use. None: all.

    Raises:
      UserError: the mesh does not fit the devices, the batch or the model.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, model, len(devices))
    if len(devices) == 1:
        return Layout(model, device=None if devices[0] == jax.devices()[0] else devices[0])
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh([sizes[axis] for axis in AXES], AXES, axis_types=kinds, devices=devices)
    layout = Layout(model, mesh)
    _ = layout.splits  # raises if a parameter cannot be split
    return layout

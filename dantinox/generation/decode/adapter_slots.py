"""`AdapterSlots`: the adapters that the rows of a batch may use, in stacks of a fixed size on the
device.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import ModelConfig, UserError
from dantinox.files import quote
from dantinox.generation.decode.features import Constants, Feature
from dantinox.generation.decode.prepared_model import HeadOrder
from dantinox.model import Transformer
from dantinox.model.lora import layer_projections
from dantinox.model.row_adapters import (
    AdapterStack,
    RowAdapters,
    Stacks,
    attach_adapters,
    stack_shapes,
)
from dantinox.programs import available_bytes, tree_bytes
from dantinox.run.adapters import AdapterDelta
from dantinox.run.peft_folder import LoraAdapter

# The default rank of stacks in which adapters can be loaded later, unless a given adapter has a
# larger one.
DEFAULT_RANK = 16
MEMORY_SHARE = 4  # the stacks take at most a quarter, 1 / MEMORY_SHARE, of the free memory
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class AdapterSlot(NamedTuple):
    """An adapter on the device: its number in the stacks, and a digest of its weights, which is
    empty for the base model.
    """

    number: int
    digest: bytes


NO_ADAPTER = AdapterSlot(0, b"")


@partial(jax.tree_util.register_dataclass, data_fields=["number_B"], meta_fields=[])
@dataclass(frozen=True)
class AdapterRows(Feature):
    """The numbers of the adapters of the rows, int32. Their matrices are `constants["adapters"]`,
    an argument of the compiled program.
    """

    number_B: Any

    def attach(self, model: Transformer, constants: Constants) -> Transformer:
        return attach_adapters(model, RowAdapters(constants["adapters"], self.number_B))


def check_name(name: str) -> None:
    """Raises a UserError for a name that an adapter cannot have."""
    if not NAME.fullmatch(name):
        raise UserError(
            "the name of an adapter must be 1 to 64 letters, digits, dots, hyphens and"
            f" underscores, the first a letter or digit, got {quote(name)}"
        )


def unknown_adapter(name: str, known: Collection[str]) -> UserError:
    """Returns the error for a name that no adapter has."""
    loaded = f"loaded are {', '.join(known)}" if known else "none is loaded"
    return UserError(f"no adapter has the name {quote(name)}: {loaded}")


class AdapterSlots:
    """The adapters of a batch. Only the thread of the batch may call `insert`, which replaces
    `stacks` and invalidates the old arrays.

    Attributes:
      names: the place of each loaded adapter, by name.
      capacity: the most adapters that can be loaded at the same time.
      rank: the largest rank.
      stacks: the matrices on the device.
    """

    def __init__(
        self,
        model: ModelConfig,
        adapters: Mapping[str, LoraAdapter],
        order: HeadOrder | None = None,
        capacity: int | None = None,
        rank: int | None = None,
        rows: int = 1,
    ):
        """Allocates the stacks and loads the adapters.

        Args:
          order: for each layer, the indices of its key heads in the order of the prepared model;
            None: unchanged.
          capacity: the most adapters; None: the number of `adapters`. If it is given, other
            adapters can be loaded later, so the stacks have all projections of the model that can
            have adapters; otherwise, only those that `adapters` change.
          rank: the largest rank; None: the largest of `adapters`, but at least `DEFAULT_RANK` if
            `capacity` is given.
          rows: the rows of the batch. A decode program copies the matrices of each row once per
            chunk of tokens, because XLA moves the copies out of the loop over the tokens.

        Raises:
          UserError: the model supports no adapters, `adapters` exceed `capacity` or `rank`, or the
            stacks do not fit into memory.
        """
        self.capacity = len(adapters) if capacity is None else capacity
        if rank is None:
            smallest = 1 if capacity is None else DEFAULT_RANK
            rank = max([smallest, *(adapter.rank for adapter in adapters.values())])
        self.rank = rank
        self.names: dict[str, AdapterSlot] = {}
        self._model = model
        self._order = order
        known = {
            name for layer in range(model.num_blocks) for name in layer_projections(model, layer)
        }
        if not known:
            reason = (
                "ternary projections" if model.latent is None else "multi-head latent attention"
            )
            raise UserError(f"this model supports no adapters: {reason} cannot have them")
        if len(adapters) > self.capacity:
            raise UserError(
                f"{_are(len(adapters))} given, but at most {self.capacity} can be loaded at the"
                " same time"
            )
        used = {name for adapter in adapters.values() for _, name, _ in self._changes(adapter)}
        self._targets = sorted(used if capacity is None else known)
        # Place 0 holds zeros, for rows without an adapter.
        shapes = stack_shapes(model, self._targets, self.capacity + 1, self.rank)
        # The bytes of one place, times all places and the copies of the rows.
        needed = tree_bytes(shapes) // (self.capacity + 1) * (self.capacity + 1 + rows)
        number = "1 adapter" if self.capacity == 1 else f"{self.capacity} adapters"
        _check_memory(needed, f"{number} of rank {self.rank} in a batch of {rows}")
        self.stacks: Stacks = jax.tree.map(
            lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes
        )
        # Compiled now, so that an insert during a request does not wait for the compiler.
        self._write = _write_adapter.lower(
            shapes, self._empty_arrays(), np.asarray(0, np.int32)
        ).compile()
        for name, adapter in adapters.items():
            self.insert(name, self.free_number(name), adapter.digest, self.arrays(name, adapter))

    def _changes(self, adapter: LoraAdapter) -> Iterator[tuple[str, str, AdapterDelta]]:
        """Yields the changes of an adapter with the path of the module and the name of the
        projection.
        """
        for kernel, changes in adapter.deltas.items():
            # A kernel such as "blocks/3/attention/qkv/kernel", and names such as
            # Projection("attention/qkv", (-2, -1)) → "k_proj".
            layer = int(kernel.split("/")[1])
            names = {
                projection: name
                for name, projection in layer_projections(self._model, layer).items()
            }
            for change in changes:
                yield kernel.removesuffix("/kernel"), names[change.projection], change

    def arrays(self, name: str, adapter: LoraAdapter) -> Stacks:
        """Returns the matrices of an adapter on the device, in the form of `stacks` with one place;
        any thread may call it.

        Raises:
          UserError: the rank is too large.
        """
        if adapter.rank > self.rank:
            raise UserError(
                f"the adapter {name} has rank {adapter.rank}, but the largest rank allowed is"
                f" {self.rank}"
            )
        stacks = self._empty_arrays()
        for path, target, change in self._changes(adapter):
            a_IR, b_RO = self._permuted(path, change.a_IR, change.b_RO * np.float32(change.scale))
            a_1IR = stacks[path].a  # all projections side by side, in the order of their names
            first = sorted(stacks[path].b).index(target) * self.rank
            a_1IR[0, :, first : first + a_IR.shape[1]] = a_IR
            stacks[path].b[target][0, : len(b_RO)] = b_RO
        on_device: Stacks = jax.device_put(stacks)
        return on_device

    def _empty_arrays(self) -> dict[str, AdapterStack]:
        shapes = stack_shapes(self._model, self._targets, 1, self.rank)
        empty: dict[str, AdapterStack] = jax.tree.map(
            lambda shape: np.zeros(shape.shape, shape.dtype), shapes
        )
        return empty

    def _permuted(
        self, path: str, a_IR: np.ndarray, b_RO: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the matrices for a layer whose key heads are in the order of the prepared
        model.
        """
        if self._order is None or "/attention/" not in path:
            return a_IR, b_RO
        order = list(self._order[int(path.split("/")[1])])
        K = len(order)
        # The key head is the first axis of the inputs of "out" and of the outputs of the others.
        if path.endswith("/out"):
            return a_IR.reshape(K, -1, a_IR.shape[1])[order].reshape(a_IR.shape), b_RO
        return a_IR, b_RO.reshape(len(b_RO), K, -1)[:, order].reshape(b_RO.shape)

    def get(self, name: str | None) -> AdapterSlot:
        """Returns the adapter with a name; None: no adapter.

        Raises:
          UserError: no adapter has this name.
        """
        if name is None:
            return NO_ADAPTER
        if name not in self.names:
            raise unknown_adapter(name, self.names)
        return self.names[name]

    def free_number(self, name: str, busy: Collection[int] = ()) -> int:
        """Returns a free place of the stacks for a new adapter.

        Args:
          busy: the numbers of adapters that running requests use; they may have been removed.

        Raises:
          UserError: the name is invalid or in use, or no place is free.
        """
        check_name(name)
        if name in self.names:
            raise UserError(
                f"the adapter {name} is already loaded: unload it first, or use another name"
            )
        used = {slot.number for slot in self.names.values()} | {*busy}
        free = [number for number in range(1, self.capacity + 1) if number not in used]
        # Adapters that were unloaded may still have places, because requests use them.
        if not free and len(self.names) < self.capacity:
            raise UserError(
                "running requests use adapters that were unloaded: load"
                " this one again when they have ended"
            )
        if not free:
            raise UserError(
                f"{_are(self.capacity)} loaded, the most that this server allows: unload one first"
            )
        return free[0]

    def insert(self, name: str, number: int, digest: bytes, arrays: Stacks) -> None:
        """Copies the result of `arrays` to the place `number` of the stacks, and enters the adapter
        in `names`.
        """
        self.stacks = self._write(self.stacks, arrays, np.asarray(number, np.int32))
        self.names[name] = AdapterSlot(number, digest)

    def remove(self, name: str) -> None:
        """Removes an adapter; any thread may call it. Its matrices stay until `insert` writes other
        ones to its place.

        Raises:
          UserError: no adapter has this name.
        """
        self.get(name)
        del self.names[name]


@partial(jax.jit, donate_argnames="stacks")
def _write_adapter(stacks: Stacks, arrays: Stacks, number: jax.Array) -> Stacks:
    """Writes the matrices of one adapter to its place in the stacks."""
    result: Stacks = jax.tree.map(
        lambda stack, array: jax.lax.dynamic_update_slice_in_dim(stack, array, number, 0),
        stacks,
        arrays,
    )
    return result


def _check_memory(needed: int, what: str) -> None:
    free = available_bytes(jax.devices()[0])
    if free is not None and needed > free // MEMORY_SHARE:
        raise UserError(
            f"the stacks for {what} take {needed / 1e9:.1f} GB, over a quarter of the"
            f" {free / 1e9:.1f} GB of free memory: load fewer, or allow a smaller rank or fewer"
            " rows"
        )


def _are(number: int) -> str:
    return "1 adapter is" if number == 1 else f"{number} adapters are"

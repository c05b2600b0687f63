"""`KVCache` and `NoCache`: the keys and values that attention reads.

Every kind answers one call, `attend(q, k, v, positions, window, probe, softmax) -> (out, next kind, probed)`: take in the new
keys and values, let the queries see what they may, hand back the updated self. Attention has no branch per kind. A kind is a
tree of arrays whose first axis is the batch, and `attend` keeps its shapes: it is repeated for samples and carried in loops.

A position of −1 marks padding: it writes nothing and nobody attends to it. The valid positions of a row are consecutive
and stand before its padding.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.attention import attend, attention, causal_mask, run_probe, run_probe_on_store
from dantinox.model.cache_store import BITS, PACKED, AnyStore, LatentStore, SegmentedStore, Store, group_size
from dantinox.model.compressed_cache import CompressedLayer, Compression
from dantinox.model.kernels import kernel_for
from dantinox.model.layers import PLAIN_SOFTMAX
from dantinox.model.parallelism import SINGLE_DEVICE, Parallelism
from dantinox.platform import get_platform


class CacheReport(TypedDict):
    """Bytes of a cache, see `KVCache.report`."""

    bytes: int
    payload_bytes: int
    metadata_bytes: int
    full_bytes: int
    full_bytes_bfloat16: int
    requested_ratio: float | None
    ratio: float
    dtype: str
    slots: list[list[list[int]]]


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class FullLayer:
    """One slot per position: slot s holds position s."""

    store: AnyStore
    is_prefill: ClassVar[bool] = False  # whether what it sees is all of this call

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX, row=None):
        """`row`: the row of the cache that the only text is written to and read from."""
        after = self.append(k_BTKH, v_BTKH, positions_BT, row)
        store, held_11S = after.store if row is None else after.store.of_row(row), jnp.arange(self.store.slots)[None, None]
        out_BTKGH, _, measured = attend(q_BTKGH, store, positions_BT, held_11S, window, probe, softmax=softmax)
        return out_BTKGH, after, measured

    def held(self, last_B: jax.Array) -> tuple[Store, jax.Array]:
        """All slots in one store, and the position in each `[B, 1, S]` once `last_B` is the newest written, negative: none."""
        store = reduce(Store.join, self.store.parts) if isinstance(self.store, SegmentedStore) else self.store
        held_S = jnp.arange(store.slots)
        return store, jnp.where(held_S <= last_B[:, None], held_S, -1)[:, None]

    def append(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array, row: jax.Array | None = None
    ) -> "FullLayer":
        """The same with new keys and values in it, or in one `row` of it."""
        slots_BT = jnp.where(positions_BT < 0, self.store.slots, positions_BT)
        return FullLayer(self.store.write(k_BTKH, v_BTKH, slots_BT[:, :, None], row))


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class RingLayer:
    """The last W positions of a sliding-window layer: slot p mod W holds the newest position p written there."""

    store: Store
    is_prefill: ClassVar[bool] = False

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        """Several queries see the old ring and the new keys side by side: writing first would lose keys the early ones need."""
        after = self.append(k_BTKH, v_BTKH, positions_BT)
        if positions_BT.shape[1] == 1:
            store, held_B1S = after.store, self._held(positions_BT[:, 0])
        else:
            store = self.store.join(type(self.store).of(k_BTKH, v_BTKH, self.store.dtype))
            held_B1S = jnp.concatenate([self._held(positions_BT[:, 0] - 1), positions_BT[:, None]], axis=2)
        out_BTKGH, _, measured = attend(q_BTKGH, store, positions_BT, held_B1S, window, probe, softmax=softmax)
        return out_BTKGH, after, measured

    def held(self, last_B: jax.Array) -> tuple[Store, jax.Array]:
        """As of `FullLayer`."""
        return self.store, self._held(last_B)

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "RingLayer":
        """The same with the newest of these keys and values in it."""
        if positions_BT.shape[1] == 1:
            slots_B1 = jnp.where(positions_BT < 0, self.store.slots, positions_BT % self.store.slots)
            return RingLayer(self.store.write(k_BTKH, v_BTKH, slots_B1[:, :, None]))
        wanted_B1S, first_B11 = self._held(jnp.max(positions_BT, axis=1)), positions_BT[:, :1, None]
        new = type(self.store).of(k_BTKH, v_BTKH, self.store.dtype).take(jnp.clip(wanted_B1S - first_B11, 0))
        return RingLayer(new.where((wanted_B1S >= first_B11) & (wanted_B1S >= 0), self.store))

    def _held(self, last_B: jax.Array) -> jax.Array:
        """The position in each slot `[B, 1, W]` once `last_B` is the newest written; negative where none is."""
        W = self.store.slots
        return (last_B[:, None] - (last_B[:, None] - jnp.arange(W)) % W)[:, None]


@partial(
    jax.tree_util.register_dataclass, data_fields=["segments_BT", "kept"], meta_fields=["kernel", "platform", "parallelism"]
)
@dataclass(frozen=True)
class NoCache:
    """Nothing before this call: the keys are those of this call. With `segments_BT`, attention stays inside a document.

    Attributes:
      kernel, platform: the `ModelConfig`'s.
      parallelism: the model's.
      kept: the empty memory that is to keep the keys and values, which are seen as it rounds them; None: nothing keeps them.
    """

    segments_BT: jax.Array | None = None
    kernel: str = "xla"
    platform: str = "auto"
    kept: FullLayer | RingLayer | None = None
    parallelism: Parallelism = SINGLE_DEVICE
    is_prefill: ClassVar[bool] = True

    def as_kept(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values as they will be read again."""
        if self.kept is None:
            return k_BTKH, v_BTKH
        store = self.kept.store
        kind = LatentStore if isinstance(store, LatentStore) else Store
        return kind.of(k_BTKH, v_BTKH, store.dtype).wide(k_BTKH.dtype)

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX, instead=None):
        """`instead`: the keys and values to be kept, where they are others than those seen, which are made of them."""
        dtype = k_BTKH.dtype if self.kept is None or instead is not None else self.kept.store.dtype
        store, held_B1T = Store.of(k_BTKH, v_BTKH, dtype), positions_BT[:, None]
        kept_k, kept_v = instead or (k_BTKH, v_BTKH)
        after = self if self.kept is None else self.kept.append(kept_k, kept_v, positions_BT)
        kernel = kernel_for(self.kernel, self.platform, q_BTKGH.shape, q_BTKGH.dtype, softmax, v_BTKH.shape[-1])
        if kernel is not None and (probe is None or self.segments_BT is None):
            k_BTKH, v_BTKH = store.wide(k_BTKH.dtype)
            out_BTKGH = self.parallelism.shard_map_heads(kernel)(q_BTKGH, k_BTKH, v_BTKH, self.segments_BT, window, softmax)
            return out_BTKGH, after, run_probe_on_store(probe, q_BTKGH, store, positions_BT, held_B1T, window, softmax)
        valid_BKTS = causal_mask(positions_BT, held_B1T, window)
        if self.segments_BT is not None:
            valid_BKTS &= (self.segments_BT[:, :, None] == self.segments_BT[:, None, :])[:, None]
        seen = attention(q_BTKGH, store, valid_BKTS, softmax)
        return seen.out_BTKGH, after, run_probe(probe, seen, valid_BKTS, positions_BT)


@partial(jax.tree_util.register_dataclass, data_fields=["layer"], meta_fields=[])
@dataclass(frozen=True)
class TwoPassLayer:
    """A layer of a cache for one call, in which the second half of the tokens repeats the first half at later positions.

    The layer keeps the first half only; a compressed one chooses what it keeps by what the second half attends to.
    """

    layer: FullLayer | RingLayer | CompressedLayer
    is_prefill: ClassVar[bool] = False

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        if isinstance(self.layer, CompressedLayer):
            return self.layer.attend_twice(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax)
        (q, q_again), (k, k_again), (v, v_again), (once_BT, again_BT) = (
            jnp.split(x, 2, axis=1) for x in (q_BTKGH, k_BTKH, v_BTKH, positions_BT)
        )
        out_BTKGH, after, measured = self.layer.attend(q, k, v, once_BT, window, probe, softmax)
        store, held_B1S = after.held(jnp.max(once_BT, axis=1))
        store = store.join(type(store).of(k_again, v_again, store.dtype))
        held_B1S = jnp.concatenate([held_B1S, again_BT[:, None]], axis=2)
        repeated, _, _ = attend(q_again, store, again_BT, held_B1S, window, None, softmax=softmax)
        return jnp.concatenate([out_BTKGH, repeated], axis=1), after, measured


@partial(jax.tree_util.register_dataclass, data_fields=["layer", "slot"], meta_fields=[])
@dataclass(frozen=True)
class SlotLayer:
    """A layer of a cache for one call with a single text, whose keys and values are in row `slot` of the layer."""

    layer: FullLayer | RingLayer | CompressedLayer
    slot: jax.Array
    is_prefill: ClassVar[bool] = False

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        seen = q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax
        if isinstance(self.layer, FullLayer):  # large: only what is new is written, only what is in use is copied
            out_BTKGH, layer, measured = self.layer.attend(*seen, row=self.slot)
            return out_BTKGH, replace(self, layer=layer), measured
        row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, self.slot, 1), self.layer)
        out_BTKGH, row, measured = row.attend(*seen)
        layer = jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, self.slot, 0), self.layer, row)
        return out_BTKGH, replace(self, layer=layer), measured


@partial(jax.tree_util.register_dataclass, data_fields=["layer"], meta_fields=[])
@dataclass(frozen=True)
class RecordingLayer:
    """A layer of a cache, or `NoCache`, for one call whose keys and values other layers read too.

    Its `attend` gives the updated layer together with the `SharedKeys` of this call.
    """

    layer: Any

    @property
    def is_prefill(self) -> bool:
        return bool(self.layer.is_prefill)

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        out_BTKGH, after, measured = self.layer.attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax)
        return out_BTKGH, (after, SharedKeys(self.layer, k_BTKH, v_BTKH)), measured


@partial(jax.tree_util.register_dataclass, data_fields=["layer", "k_BTKH", "v_BTKH"], meta_fields=[])
@dataclass(frozen=True)
class SharedKeys:
    """What a layer without keys and values of its own attends to: those of another layer.

    It reads as that layer did, from the same state and the same new keys; the update is the other layer's, so this one keeps
    nothing. A compiler makes the update, the same expression in both, once.

    Attributes:
      layer: the other layer's state before this call.
      k_BTKH, v_BTKH: the other layer's keys and values of this call.
    """

    layer: Any
    k_BTKH: jax.Array
    v_BTKH: jax.Array

    @property
    def is_prefill(self) -> bool:
        return bool(self.layer.is_prefill)

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        """`k_BTKH` and `v_BTKH` are None."""
        out_BTKGH, _, measured = self.layer.attend(q_BTKGH, self.k_BTKH, self.v_BTKH, positions_BT, window, probe, softmax)
        return out_BTKGH, None, measured


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=["uncompressed_slots", "requested"])
@dataclass(frozen=True)
class KVCache:
    """What every layer remembers, a pytree to be donated from step to step.

    Attributes:
      layers: None for a layer that reads the keys and values of another.
      uncompressed_slots: the slots that each layer has without compression.
      requested: the share of them that was asked for.
    """

    layers: tuple[FullLayer | RingLayer | CompressedLayer | None, ...]
    uncompressed_slots: tuple[int, ...]
    requested: float = 1.0

    def for_prefill(self, config: ModelConfig, parallelism: Parallelism = SINGLE_DEVICE) -> "KVCache":
        """This empty cache for one call, which reads texts from their beginning with the model's attention kernel."""
        fresh = partial(NoCache, None, config.kernel, config.platform, parallelism=parallelism)
        layers = tuple(layer if isinstance(layer, CompressedLayer) else fresh(kept=layer) for layer in self.layers)
        return replace(self, layers=layers)  # type: ignore[arg-type]

    @property
    def reconstructs(self) -> bool:
        """Whether any layer chooses what it keeps of a prompt by a second reading of it."""
        return any(isinstance(layer, CompressedLayer) and layer.reconstructs for layer in self.layers)

    def read_twice(self) -> "KVCache":
        """This cache for one call with tokens and their repetition, see `TwoPassLayer`."""
        return replace(self, layers=tuple(map(TwoPassLayer, self.layers)))  # type: ignore[arg-type]

    def one_slot(self, slot: jax.Array) -> "KVCache":
        """This cache for one call with the row `slot` alone, see `SlotLayer`."""
        return replace(self, layers=tuple(None if layer is None else SlotLayer(layer, slot) for layer in self.layers))  # type: ignore[misc]

    def all_slots(self) -> "KVCache":
        """The cache after a call with `one_slot`."""
        return replace(self, layers=tuple(None if layer is None else layer.layer for layer in self.layers))  # type: ignore[union-attr]

    @property
    def compressed(self) -> bool:
        """Whether any layer may drop what it has seen."""
        return any(isinstance(layer, CompressedLayer) for layer in self.layers)

    def report(self) -> CacheReport:
        """What is allocated: the sum of `nbytes` over every leaf, and what it is beside the cache without compression.

        `payload_bytes` are keys and values, `metadata_bytes` scales, positions and importances. `full_bytes` is the whole of an
        uncompressed cache of the same dtype, `full_bytes_bfloat16` of one in bfloat16. `slots` lists for each layer
        `[key heads, slots]` of each group of heads.
        """
        groups = [_stores(layer) for layer in self.layers]
        stores = [store for layer in groups for store in layer]
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        payload = sum(store.payload_bytes for store in stores)
        B, dtype = jax.tree.leaves(stores)[0].shape[0], stores[0].dtype
        places = [
            (B * span * store.heads, store.sizes)
            for span, layer in zip(self.uncompressed_slots, groups, strict=True)
            for store in layer
        ]
        full = sum(count * _slot_bytes(sizes, dtype) for count, sizes in places)
        return {
            "bytes": total,
            "payload_bytes": payload,
            "metadata_bytes": total - payload,
            "full_bytes": full,
            "full_bytes_bfloat16": sum(count * 2 * sum(sizes) for count, sizes in places),
            "requested_ratio": self.requested,
            "ratio": total / full,
            "dtype": {BITS: "bfloat16", PACKED: "int4"}.get(dtype, dtype.name),
            "slots": [[[store.heads, store.slots] for store in layer] for layer in groups],
        }


def _slot_bytes(sizes: tuple[int, int], dtype: jnp.dtype) -> int:
    """Bytes of a slot with two vectors of these sizes, scales included."""
    if dtype == PACKED:
        return sum(size // 2 + 2 * size // group_size(size) * BITS.itemsize for size in sizes)
    return sum(sizes) * dtype.itemsize + (2 * 4 if dtype == jnp.int8 else 0)


def _stores(layer: FullLayer | RingLayer | CompressedLayer | None) -> list[Any]:
    if layer is None:
        return []
    return [group.store for group in layer.groups] if isinstance(layer, CompressedLayer) else [layer.store]


def uncompressed_slots(config: ModelConfig, slots: int) -> tuple[int, ...]:
    """The slots each layer needs for texts of `slots` positions: a windowed layer no more than its window."""
    return tuple(slots if window is None else min(window, slots) for window in config.windows)


def make_cache(
    config: ModelConfig,
    batch: int,
    slots: int,
    dtype: DTypeLike,
    compression: Compression | None = None,
    parted: bool = False,
) -> KVCache:
    """An empty cache for `batch` rows of up to `slots` positions; a windowed layer shorter than that gets a ring.

    Args:
      dtype: of keys and values, or latents: float32, bfloat16, int8 or int4.
      compression: the slots of every head, and what stays in them; None: all of every text.
      parted: where all of a text stays, its slots are `SegmentedStore`.
    """
    B = batch
    all_spans = uncompressed_slots(config, slots)
    kept = jnp.dtype(dtype)
    if kept == jnp.bfloat16 and get_platform(config.platform).bfloat16_cache_as_bits:
        kept = BITS
    elif kept == jnp.int4:
        kept = PACKED

    def empty(index: int, span: int) -> Store:
        if config.latent is not None:
            return LatentStore.empty(B, 1, (config.latent.rotated_size, config.latent.rank), span, kept)
        own = config.of_layer(index)
        return Store.empty(B, own.kv_heads, (own.head_size, own.head_size), span, kept)

    def layer(index: int) -> FullLayer | RingLayer | CompressedLayer | None:
        span = all_spans[index]
        if config.kv_source(index) is not None:
            return None
        if compression is not None and any(held < span for _, held in compression.groups[index]):
            return CompressedLayer.empty(B, config.head_size, compression, index, kept)
        if span < slots:
            return RingLayer(empty(index, span))
        return FullLayer(SegmentedStore.empty(B, span, partial(empty, index)) if parted else empty(index, span))

    return KVCache(
        tuple(layer(index) for index in range(config.num_blocks)), all_spans, 1.0 if compression is None else compression.ratio
    )

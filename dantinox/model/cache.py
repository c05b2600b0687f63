"""`KVCache` and `NoCache`: the keys and values that attention reads.

Every kind of layer cache has the method `attend(q, k, v, positions, window, probe, softmax) ->
(out, updated layer, probed)`. It writes the new keys and values, computes attention for the
queries, and returns the updated layer, so the attention module needs no separate code for each
kind. A layer cache is a pytree of arrays whose first axis is the batch. `attend` keeps the shapes
of these arrays, because the cache is repeated for samples and carried through loops.

Position −1 marks padding: a padding token is not written to the cache, and no query attends to it.
The valid positions of a row are consecutive and precede its padding.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.attention import attend, attention, causal_mask, run_probe, run_probe_on_store
from dantinox.model.attention_kernels import kernel_for
from dantinox.model.cache_store import (
    BFLOAT16_BITS,
    PACKED_BITS,
    PACKED_DTYPES,
    AnyStore,
    LatentStore,
    SegmentedStore,
    Store,
    group_size,
    is_packed,
)
from dantinox.model.compressed_cache import QKV, CompressedLayer, Compression
from dantinox.model.layers import PLAIN_SOFTMAX
from dantinox.model.parallelism import SINGLE_DEVICE, Parallelism
from dantinox.model.prompt_attention import attend_in_blocks
from dantinox.model.ring_attention import ring_attention
from dantinox.platform import get_platform


class CacheReport(TypedDict):
    """Byte counts of a cache, see `KVCache.report`.

    Generation adds `evicted` to that of a compressed cache: the keys that the sample has lost,
    summed over all key heads.
    """

    bytes: int
    payload_bytes: int
    metadata_bytes: int
    full_bytes: int
    full_bytes_bfloat16: int
    requested_ratio: float | None
    ratio: float
    dtype: str
    slots: list[list[list[int]]]
    evicted: NotRequired[int]


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class FullLayer:
    """A layer cache with one slot per position: slot s holds position s."""

    store: AnyStore
    is_prefill: ClassVar[bool] = False  # whether `attend` reads only the tokens of this call

    def attend(
        self,
        q_BTKGH,
        k_BTKH,
        v_BTKH,
        positions_BT,
        window,
        probe=None,
        softmax=PLAIN_SOFTMAX,
        row=None,
    ):
        """Writes the new keys and values and attends. With `row`, the inputs are one sequence,
        which belongs to this row.
        """
        updated = self.append(k_BTKH, v_BTKH, positions_BT, row)
        store = updated.store if row is None else updated.store.select_row(row)
        if isinstance(store, SegmentedStore) and positions_BT.shape[1] > 1 and probe is None:
            return attend_in_blocks(q_BTKGH, store, positions_BT, window, softmax), updated, None
        positions_11S = jnp.arange(self.store.slots)[None, None]
        out_BTKGH, _, probed = attend(
            q_BTKGH, store, positions_BT, positions_11S, window, probe, softmax=softmax
        )
        return out_BTKGH, updated, probed

    def contents(self, last_B: jax.Array) -> tuple[Store, jax.Array]:
        """Returns all slots as one store, and the position in each slot `[B, 1, S]`, negative for
        an empty slot.

        `last_B` is the newest position that was written to each row.
        """
        store = (
            reduce(Store.join, self.store.segments)
            if isinstance(self.store, SegmentedStore)
            else self.store
        )
        positions_S = jnp.arange(store.slots)
        return store, jnp.where(positions_S <= last_B[:, None], positions_S, -1)[:, None]

    def append(
        self,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        positions_BT: jax.Array,
        row: jax.Array | None = None,
    ) -> "FullLayer":
        """Returns the layer with new keys and values; with `row`, they are written to this row
        only.
        """
        slots_BT = jnp.where(positions_BT < 0, self.store.slots, positions_BT)
        return FullLayer(self.store.write(k_BTKH, v_BTKH, slots_BT[:, :, None], row))


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class RingLayer:
    """The last W positions of a sliding-window layer, in a ring buffer: position p is in slot p mod
    W.

    If W exceeds the window by n, up to n later positions may be written and dropped again, because
    they overwrite only positions that are outside of the window. Reading masks these.
    """

    store: Store
    is_prefill: ClassVar[bool] = False

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        """Writes the new keys and values and attends.

        With several queries, attention reads the old ring and the new keys side by side, because
        writing first would overwrite keys that the first queries need.
        """
        updated = self.append(k_BTKH, v_BTKH, positions_BT)
        if positions_BT.shape[1] == 1:
            store = updated.store
            positions_B1S = self._slot_positions(positions_BT[:, 0])
        else:
            store = self.store.join(type(self.store).from_kv(k_BTKH, v_BTKH, self.store.dtype))
            positions_B1S = jnp.concatenate(
                [self._slot_positions(positions_BT[:, 0] - 1), positions_BT[:, None]], axis=2
            )
        out_BTKGH, _, probed = attend(
            q_BTKGH, store, positions_BT, positions_B1S, window, probe, softmax=softmax
        )
        return out_BTKGH, updated, probed

    def contents(self, last_B: jax.Array) -> tuple[Store, jax.Array]:
        """Returns the store and the position in each slot, as `FullLayer.contents` does."""
        return self.store, self._slot_positions(last_B)

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "RingLayer":
        """Returns the layer with these keys and values; if there are more than W, only the newest W
        are written.
        """
        if positions_BT.shape[1] == 1:
            slots_B1 = jnp.where(
                positions_BT < 0, self.store.slots, positions_BT % self.store.slots
            )
            return RingLayer(self.store.write(k_BTKH, v_BTKH, slots_B1[:, :, None]))
        newest_B1S = self._slot_positions(jnp.max(positions_BT, axis=1))
        first_B11 = positions_BT[:, :1, None]  # token t has the position first + t
        new = (
            type(self.store)
            .from_kv(k_BTKH, v_BTKH, self.store.dtype)
            .gather_slots(jnp.clip(newest_B1S - first_B11, 0))
        )
        # Slots whose newest position is older than this call keep their contents.
        return RingLayer(
            new.select_slots((newest_B1S >= first_B11) & (newest_B1S >= 0), self.store)
        )

    def read_block(self, row: jax.Array, start: jax.Array, size: int) -> Store:
        """Returns the `size` positions of a row from `start` on, as a store with a batch of one.

        Positions that have been overwritten are replaced by those in their slots. `write_block`
        then writes these too, so that the ring is the same after all blocks of a sequence have been
        written in order.
        """
        return self.store.select_row(row).gather_slots(
            ((start + jnp.arange(size)) % self.store.slots)[None, None]
        )

    def write_block(self, row: jax.Array, start: jax.Array, block: Store) -> "RingLayer":
        """Returns the ring with a block, which holds the positions of a row from `start` on."""
        W = self.store.slots
        offset_11W = ((jnp.arange(W) - start) % W)[None, None]
        new = block.gather_slots(jnp.minimum(offset_11W, block.slots - 1))
        new = new.select_slots(offset_11W < block.slots, self.store.select_row(row))
        return RingLayer(self.store.copy_slots(row, 0, new, 0, 0, W))

    def _slot_positions(self, last_B: jax.Array) -> jax.Array:
        """Returns the position in each slot `[B, 1, W]`, negative for an empty slot.

        Slot s holds the newest position p ≤ `last_B` with p mod W = s.
        """
        W = self.store.slots
        return (last_B[:, None] - (last_B[:, None] - jnp.arange(W)) % W)[:, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["segments_BT", "destination"],
    meta_fields=["kernel", "platform", "parallelism"],
)
@dataclass(frozen=True)
class NoCache:
    """A layer cache without earlier tokens: attention reads only the keys and values of this call.

    Attributes:
      segments_BT: document numbers; attention never crosses documents. None: one document per row.
      kernel, platform: from the `ModelConfig`.
      parallelism: the parallelism of the model.
      destination: the empty layer to which the keys and values are written. Attention then reads
        them as rounded to the dtype of this layer. None: they are not stored.
    """

    segments_BT: jax.Array | None = None
    kernel: str = "xla"
    platform: str = "auto"
    destination: FullLayer | RingLayer | None = None
    parallelism: Parallelism = SINGLE_DEVICE
    is_prefill: ClassVar[bool] = True

    def round_trip(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values after rounding to the dtype of the destination."""
        if self.destination is None:
            return k_BTKH, v_BTKH
        store = self.destination.store
        kind = LatentStore if isinstance(store, LatentStore) else Store
        return kind.from_kv(k_BTKH, v_BTKH, store.dtype).dequantize(k_BTKH.dtype)

    def attend(
        self,
        q_BTKGH,
        k_BTKH,
        v_BTKH,
        positions_BT,
        window,
        probe=None,
        softmax=PLAIN_SOFTMAX,
        stored_kv=None,
    ):
        """Attends to the tokens of this call; `stored_kv` are the keys and values to store, if they
        differ from `k` and `v`.
        """
        is_rounded = stored_kv is not None  # by `round_trip`, before `k` and `v` were computed
        dtype = (
            k_BTKH.dtype if self.destination is None or is_rounded else self.destination.store.dtype
        )
        store = Store.from_kv(k_BTKH, v_BTKH, dtype)
        positions_B1T = positions_BT[:, None]
        updated: Any = self
        if self.destination is not None:
            new_k, new_v = stored_kv or (k_BTKH, v_BTKH)
            updated = self.destination.append(new_k, new_v, positions_BT)
        kernel: Any = partial(ring_attention, self.parallelism)
        if self.parallelism.ring == 1:
            kernel = kernel_for(
                self.kernel, self.platform, q_BTKGH.shape, q_BTKGH.dtype, softmax, v_BTKH.shape[-1]
            )
        if kernel is not None and (probe is None or self.segments_BT is None):
            k_BTKH, v_BTKH = store.dequantize(k_BTKH.dtype)
            out_BTKGH = self.parallelism.shard_map_heads(kernel)(
                q_BTKGH, k_BTKH, v_BTKH, self.segments_BT, window, softmax
            )
            return (
                out_BTKGH,
                updated,
                run_probe_on_store(
                    probe, q_BTKGH, store, positions_BT, positions_B1T, window, softmax
                ),
            )
        valid_BKTS = causal_mask(positions_BT, positions_B1T, window)
        if self.segments_BT is not None:
            valid_BKTS &= (self.segments_BT[:, :, None] == self.segments_BT[:, None, :])[:, None]
        output = attention(q_BTKGH, store, valid_BKTS, softmax)
        return output.out_BTKGH, updated, run_probe(probe, output, valid_BKTS, positions_BT)


@partial(jax.tree_util.register_dataclass, data_fields=["layer"], meta_fields=[])
@dataclass(frozen=True)
class TwoPassLayer:
    """Wraps a layer cache for a call in which the second half of the tokens repeats the first half
    at later positions.

    The layer stores only the first half. A compressed layer ranks its tokens by the attention from
    the second half.
    """

    layer: FullLayer | RingLayer | CompressedLayer
    is_prefill: ClassVar[bool] = False

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        if isinstance(self.layer, CompressedLayer):
            return self.layer.attend_two_pass(
                q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax
            )
        first, again = QKV(q_BTKGH, k_BTKH, v_BTKH, positions_BT).halves()
        out_BTKGH, updated, probed = self.layer.attend(*first, window, probe, softmax)
        store, positions_B1S = updated.contents(jnp.max(first.positions_BT, axis=1))
        store = store.join(type(store).from_kv(again.k_BTKH, again.v_BTKH, store.dtype))
        positions_B1S = jnp.concatenate([positions_B1S, again.positions_BT[:, None]], axis=2)
        repeated, _, _ = attend(
            again.q_BTKGH, store, again.positions_BT, positions_B1S, window, None, softmax=softmax
        )
        return jnp.concatenate([out_BTKGH, repeated], axis=1), updated, probed


@partial(jax.tree_util.register_dataclass, data_fields=["layer", "slot"], meta_fields=[])
@dataclass(frozen=True)
class SlotLayer:
    """Wraps a layer cache for a call with a single sequence, whose keys and values are in row
    `slot` of the layer.
    """

    layer: FullLayer | RingLayer | CompressedLayer
    slot: jax.Array
    is_prefill: ClassVar[bool] = False

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        inputs = q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax
        if isinstance(self.layer, FullLayer):  # the layer is large, so do not copy the whole row
            out_BTKGH, layer, probed = self.layer.attend(*inputs, row=self.slot)
            return out_BTKGH, replace(self, layer=layer), probed
        row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, self.slot, 1), self.layer)
        out_BTKGH, row, probed = row.attend(*inputs)
        layer = jax.tree.map(
            lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, self.slot, 0),
            self.layer,
            row,
        )
        return out_BTKGH, replace(self, layer=layer), probed


@partial(jax.tree_util.register_dataclass, data_fields=["layer", "slot_R"], meta_fields=[])
@dataclass(frozen=True)
class SlotRowsLayer:
    """Wraps a layer cache for a call with several rows, which are sequences or consecutive parts of
    one sequence.

    The keys and values of row r are in row `slot_R[r]` of the layer. The rows are written and read
    one after the other with the operations of `SlotLayer`, so a row also attends to the keys of the
    rows before it that have the same slot.
    """

    layer: FullLayer | RingLayer | CompressedLayer
    slot_R: jax.Array
    is_prefill: ClassVar[bool] = False

    def attend(
        self, q_RTKGH, k_RTKH, v_RTKH, positions_RT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        def attend_row(layer: Any, row: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            slot, *inputs = row
            q, k, v, positions = (x[None] for x in inputs)
            out_1TKGH, updated, _ = SlotLayer(layer, slot).attend(
                q, k, v, positions, window, None, softmax
            )
            return updated.layer, out_1TKGH[0]

        rows = self.slot_R, q_RTKGH, k_RTKH, v_RTKH, positions_RT
        layer, out_RTKGH = jax.lax.scan(attend_row, self.layer, rows)
        return out_RTKGH, replace(self, layer=layer), None


@partial(jax.tree_util.register_dataclass, data_fields=["layer"], meta_fields=[])
@dataclass(frozen=True)
class VerificationLayer:
    """Wraps a layer cache for a call with a few tokens per row, whose results must equal those of
    one call per token.

    The keys of one token at a time are written and read, with the operations of a decode step. So
    attention gives the same bits, and the probe reports on every token: its result has a leading
    axis of tokens.
    """

    layer: FullLayer | RingLayer
    is_prefill: ClassVar[bool] = False

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        def token(
            layer: FullLayer | RingLayer, inputs: Any
        ) -> tuple[FullLayer | RingLayer, tuple[jax.Array, Any]]:
            q, k, v, position = (x[:, None] for x in inputs)
            out_B1KGH, layer, probed = layer.attend(q, k, v, position, window, probe, softmax)
            return layer, (out_B1KGH[:, 0], probed)

        inputs = tuple(x.swapaxes(0, 1) for x in (q_BTKGH, k_BTKH, v_BTKH, positions_BT))
        layer, (out_TBKGH, probed) = jax.lax.scan(token, self.layer, inputs)
        return out_TBKGH.swapaxes(0, 1), replace(self, layer=layer), probed


@partial(jax.tree_util.register_dataclass, data_fields=["layer"], meta_fields=[])
@dataclass(frozen=True)
class RecordingLayer:
    """Wraps a layer cache or `NoCache` whose keys and values other layers read too.

    Its `attend` returns `(updated layer, SharedKeys of this call)` in place of the updated layer.
    """

    layer: Any

    @property
    def is_prefill(self) -> bool:
        return bool(self.layer.is_prefill)

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        out_BTKGH, updated, probed = self.layer.attend(
            q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax
        )
        return out_BTKGH, (updated, SharedKeys(self.layer, k_BTKH, v_BTKH)), probed


@partial(
    jax.tree_util.register_dataclass, data_fields=["layer", "k_BTKH", "v_BTKH"], meta_fields=[]
)
@dataclass(frozen=True)
class SharedKeys:
    """The layer cache of a layer without keys and values of its own. It reads those of an earlier
    layer, its source layer.

    It stores nothing: `attend` repeats the update of the source layer, from the same state and the
    same new keys. The compiler recognizes the common expression and computes it only once.

    Attributes:
      layer: the cache of the source layer before this call.
      k_BTKH, v_BTKH: the keys and values of the source layer in this call.
    """

    layer: Any
    k_BTKH: jax.Array
    v_BTKH: jax.Array

    @property
    def is_prefill(self) -> bool:
        return bool(self.layer.is_prefill)

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        """Attends to the keys and values of the source layer; the arguments `k_BTKH` and `v_BTKH`
        are None.
        """
        out_BTKGH, _, probed = self.layer.attend(
            q_BTKGH, self.k_BTKH, self.v_BTKH, positions_BT, window, probe, softmax
        )
        return out_BTKGH, None, probed


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers"],
    meta_fields=["uncompressed_slots", "requested"],
)
@dataclass(frozen=True)
class KVCache:
    """The caches of all layers, a pytree that each decode step donates to the next.

    Attributes:
      layers: the cache of each layer; None for a layer that reads the keys and values of another
        layer.
      uncompressed_slots: the slots that each layer would have without compression.
      requested: the requested fraction of these slots.
    """

    layers: tuple[FullLayer | RingLayer | CompressedLayer | None, ...]
    uncompressed_slots: tuple[int, ...]
    requested: float = 1.0

    def for_prefill(
        self, config: ModelConfig, parallelism: Parallelism = SINGLE_DEVICE
    ) -> "KVCache":
        """Wraps this empty cache for one call with sequences from their beginning, which may use
        the kernel of the config.
        """
        no_cache = partial(NoCache, None, config.kernel, config.platform, parallelism=parallelism)
        layers = tuple(
            layer if isinstance(layer, CompressedLayer) else no_cache(destination=layer)
            for layer in self.layers
        )
        return replace(self, layers=layers)  # type: ignore[arg-type]

    @property
    def needs_two_passes(self) -> bool:
        """Whether any layer needs a second pass over the prompt to choose which prompt tokens to
        keep.
        """
        return any(
            isinstance(layer, CompressedLayer) and layer.needs_two_passes for layer in self.layers
        )

    def for_two_passes(self) -> "KVCache":
        """Wraps this cache for one call with tokens and their repetition, see `TwoPassLayer`."""
        return replace(self, layers=tuple(map(TwoPassLayer, self.layers)))  # type: ignore[arg-type]

    def at_slots(self, slot_R: jax.Array) -> "KVCache":
        """Wraps this cache for one call with R rows, which belong to the rows `slot_R`; see
        `SlotLayer`, `SlotRowsLayer`.
        """
        wrap: Any = partial(SlotRowsLayer, slot_R=slot_R)
        if len(slot_R) == 1:
            wrap = partial(SlotLayer, slot=slot_R[0])
        layers = tuple(None if layer is None else wrap(layer) for layer in self.layers)
        return replace(self, layers=layers)

    def for_verification(self) -> "KVCache":
        """Wraps this cache for one call with a few tokens per row, see `VerificationLayer`."""
        layers = tuple(None if layer is None else VerificationLayer(layer) for layer in self.layers)  # type: ignore[arg-type]
        return replace(self, layers=layers)  # type: ignore[arg-type]

    def without_wrappers(self) -> "KVCache":
        """Undoes `at_slots` or `for_verification` after the call."""
        wrapped: Any = self.layers
        layers = tuple(None if layer is None else layer.layer for layer in wrapped)
        return replace(self, layers=layers)

    @property
    def compressed(self) -> bool:
        """Whether any layer may drop tokens."""
        return any(isinstance(layer, CompressedLayer) for layer in self.layers)

    def report(self) -> CacheReport:
        """Returns the size of the cache in comparison with an uncompressed cache.

        `bytes` is the sum of `nbytes` over all leaves. `payload_bytes` counts keys and values;
        `metadata_bytes` counts scales, positions and importances. `full_bytes` is the size of an
        uncompressed cache of the same dtype, and `full_bytes_bfloat16` is the size of an
        uncompressed cache in bfloat16. `slots` lists, for each layer, one pair `[key heads, slots]`
        per group of heads.
        """
        stores_by_layer = [_stores(layer) for layer in self.layers]
        stores = [store for layer in stores_by_layer for store in layer]
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        payload = sum(store.payload_bytes for store in stores)
        B = jax.tree.leaves(stores)[0].shape[0]
        dtype = stores[0].dtype
        # The counts and sizes of the slots of all heads, without compression.
        counts_and_sizes = [
            (B * slots * store.heads, store.sizes)
            for slots, layer in zip(self.uncompressed_slots, stores_by_layer, strict=True)
            for store in layer
        ]
        names = {BFLOAT16_BITS: "bfloat16"} | {
            stored: name for name, stored in PACKED_DTYPES.items()
        }
        full = sum(count * _slot_bytes(sizes, dtype) for count, sizes in counts_and_sizes)
        return {
            "bytes": total,
            "payload_bytes": payload,
            "metadata_bytes": total - payload,
            "full_bytes": full,
            "full_bytes_bfloat16": sum(count * 2 * sum(sizes) for count, sizes in counts_and_sizes),
            "requested_ratio": self.requested,
            "ratio": total / full,
            "dtype": names.get(dtype, dtype.name),
            "slots": [[[store.heads, store.slots] for store in layer] for layer in stores_by_layer],
        }


def _slot_bytes(sizes: tuple[int, int], dtype: jnp.dtype) -> int:
    """Returns the bytes of a slot with a key and a value of these sizes, scales included."""
    if is_packed(dtype):
        bits = PACKED_BITS[dtype]
        return sum(
            size * bits // 8 + 2 * size // group_size(size) * BFLOAT16_BITS.itemsize
            for size in sizes
        )
    return sum(sizes) * dtype.itemsize + (2 * 4 if dtype == jnp.int8 else 0)


def _stores(layer: FullLayer | RingLayer | CompressedLayer | None) -> list[Any]:
    if layer is None:
        return []
    return (
        [group.store for group in layer.groups]
        if isinstance(layer, CompressedLayer)
        else [layer.store]
    )


def uncompressed_slots(config: ModelConfig, slots: int, extra: int = 0) -> tuple[int, ...]:
    """Returns the slots per layer for sequences of `slots` positions: `slots`, or the window plus
    `extra` if it is shorter.
    """
    return tuple(
        slots if window is None else min(window + extra, slots) for window in config.windows
    )


def make_cache(
    config: ModelConfig,
    batch: int,
    slots: int,
    dtype: DTypeLike,
    compression: Compression | None = None,
    extra: int = 0,
    segmented: bool = False,
) -> KVCache:
    """Returns an empty cache for `batch` rows of up to `slots` positions; a layer with a shorter
    window gets a `RingLayer`.

    Args:
      dtype: the dtype of keys and values, or of latents: float32, bfloat16, int8, int4 or int2.
      compression: the slots of every head and the eviction policy; None: keep all tokens.
      extra: slots of each `RingLayer` in addition to its window, for draft tokens that may be
        rejected.
      segmented: use a `SegmentedStore` for layers that keep all tokens.
    """
    B = batch
    all_slots = uncompressed_slots(config, slots, extra)
    stored_dtype = jnp.dtype(dtype)
    if stored_dtype == jnp.bfloat16 and get_platform(config.platform).bfloat16_cache_as_bits:
        stored_dtype = BFLOAT16_BITS
    stored_dtype = PACKED_DTYPES.get(stored_dtype.name, stored_dtype)

    def empty_store(index: int, slots: int) -> Store:
        if config.latent is not None:
            return LatentStore.empty(
                B, 1, (config.latent.rotated_size, config.latent.rank), slots, stored_dtype
            )
        layer_config = config.of_layer(index)
        return Store.empty(
            B,
            layer_config.kv_heads,
            (layer_config.head_size, layer_config.head_size),
            slots,
            stored_dtype,
        )

    def empty_layer(index: int) -> FullLayer | RingLayer | CompressedLayer | None:
        layer_slots = all_slots[index]
        if config.kv_source(index) is not None:
            return None
        if compression is not None and any(
            head_slots < layer_slots for _, head_slots in compression.groups[index]
        ):
            return CompressedLayer.empty(B, config.head_size, compression, index, stored_dtype)
        if layer_slots < slots:
            return RingLayer(empty_store(index, layer_slots))
        if segmented:
            return FullLayer(SegmentedStore.empty(B, layer_slots, partial(empty_store, index)))
        return FullLayer(empty_store(index, layer_slots))

    layers = tuple(empty_layer(index) for index in range(config.num_blocks))
    return KVCache(layers, all_slots, 1.0 if compression is None else compression.ratio)

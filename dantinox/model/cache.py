"""What attention reads: the keys and values of a sequence, fresh or remembered.

Every kind answers one call, `attend(q, k, v, positions, window, probe) -> (out, next kind, probed)`: take in the new keys and
values, let the queries see what they may, hand back the updated self. Attention has no branch per kind. A kind is a tree of
arrays whose first axis is the batch, and `attend` keeps its shapes: it is repeated for samples and carried in loops.

A position of −1 marks padding: it writes nothing and nobody attends to it. The valid positions of a row are consecutive
and stand before its padding.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.attention import attention, probed, visible
from dantinox.model.compressed import Compressed, Compression
from dantinox.model.kernels import kernel_for
from dantinox.model.store import BITS, Store
from dantinox.platform import platform_of


@partial(jax.tree_util.register_dataclass, data_fields=["segments_BT"], meta_fields=["kernel", "platform"])
@dataclass(frozen=True)
class Fresh:
    """No memory: the keys are those of this call. With `segments_BT`, attention stays inside a document.

    `kernel` and `platform` are the `ModelConfig`'s; a probe needs all scores, whatever they say.
    """

    segments_BT: jax.Array | None = None
    kernel: str = "xla"
    platform: str = "auto"

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        kernel = None if probe else kernel_for(self.kernel, self.platform, q_BTKGH.shape, q_BTKGH.dtype)
        if kernel is not None:
            return kernel(q_BTKGH, k_BTKH, v_BTKH, self.segments_BT, window), self, None
        valid_BKTS = visible(positions_BT, positions_BT[:, None], window)
        if self.segments_BT is not None:
            valid_BKTS &= (self.segments_BT[:, :, None] == self.segments_BT[:, None, :])[:, None]
        store = Store(k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3))
        seen = attention(q_BTKGH, store, valid_BKTS)
        return seen.out_BTKGH, self, probed(probe, seen, valid_BKTS, positions_BT)


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class Full:
    """One slot per position: slot s holds position s."""

    store: Store

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        S = self.store.slots
        slots_BT = jnp.where(positions_BT < 0, S, positions_BT)
        store = self.store.write(k_BTKH, v_BTKH, slots_BT[:, :, None])
        valid_BKTS = visible(positions_BT, jnp.arange(S)[None, None], window)
        seen = attention(q_BTKGH, store, valid_BKTS)
        return seen.out_BTKGH, Full(store), probed(probe, seen, valid_BKTS, positions_BT)


@partial(jax.tree_util.register_dataclass, data_fields=["store"], meta_fields=[])
@dataclass(frozen=True)
class Ring:
    """The last W positions of a sliding-window layer: slot p mod W holds the newest position p written there."""

    store: Store

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        step = self._attend_one if positions_BT.shape[1] == 1 else self._attend_many
        return step(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe)

    def _held(self, last_B: jax.Array) -> jax.Array:
        """The position in each slot `[B, 1, W]` once `last_B` is the newest written; negative where none is."""
        W = self.store.slots
        return (last_B[:, None] - (last_B[:, None] - jnp.arange(W)) % W)[:, None]

    def _attend_one(self, q_B1KGH, k_B1KH, v_B1KH, positions_B1, window, probe):
        W = self.store.slots
        slots_B1 = jnp.where(positions_B1 < 0, W, positions_B1 % W)
        store = self.store.write(k_B1KH, v_B1KH, slots_B1[:, :, None])
        valid_BKTS = visible(positions_B1, self._held(positions_B1[:, 0]), window)
        seen = attention(q_B1KGH, store, valid_BKTS)
        return seen.out_BTKGH, Ring(store), probed(probe, seen, valid_BKTS, positions_B1)

    def _attend_many(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe):
        """Queries see the old ring and the new keys side by side: writing first would lose keys the early ones need."""
        first_B = positions_BT[:, 0]
        new = Store.of(k_BTKH, v_BTKH, self.store.dtype)
        held_B1S = jnp.concatenate([self._held(first_B - 1), positions_BT[:, None]], axis=2)
        valid_BKTS = visible(positions_BT, held_B1S, window)
        seen = attention(q_BTKGH, self.store.join(new), valid_BKTS)
        wanted_B1S = self._held(jnp.max(positions_BT, axis=1))
        first_B11 = first_B[:, None, None]
        fresh_B1S = (wanted_B1S >= first_B11) & (wanted_B1S >= 0)
        store = new.take(jnp.clip(wanted_B1S - first_B11, 0)).where(fresh_B1S, self.store)
        return seen.out_BTKGH, Ring(store), probed(probe, seen, valid_BKTS, positions_BT)


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=["spans", "requested"])
@dataclass(frozen=True)
class KVCache:
    """What every layer remembers, a pytree to be donated from step to step.

    Attributes:
      spans: the slots each layer would have uncompressed.
      requested: the share of them that was asked for.
    """

    layers: tuple[Full | Ring | Compressed, ...]
    spans: tuple[int, ...]
    requested: float = 1.0

    def report(self) -> dict[str, Any]:
        """What is allocated: the sum of `nbytes` over every leaf, and what it is beside the cache without compression.

        `payload_bytes` are keys and values, `metadata_bytes` scales, positions and importances. `full_bytes` is the whole of an
        uncompressed cache of the same dtype, `full_bytes_bfloat16` of one in bfloat16. `slots` lists for each layer
        `[key heads, slots]` of each group of heads.
        """
        stores = [store for layer in self.layers for store in _stores(layer)]
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self))
        payload = sum(store.k_BKHS.nbytes + store.v_BKSH.nbytes for store in stores)
        B, _, _, H = stores[0].v_BKSH.shape
        slots = [[list(store.v_BKSH.shape[1:3]) for store in _stores(layer)] for layer in self.layers]
        places = B * sum(span * sum(heads for heads, _ in groups) for span, groups in zip(self.spans, slots, strict=True))
        dtype = jnp.dtype(jnp.bfloat16) if stores[0].dtype == BITS else stores[0].dtype
        full = places * 2 * (H * dtype.itemsize + (4 if dtype == jnp.int8 else 0))
        return {
            "bytes": total,
            "payload_bytes": payload,
            "metadata_bytes": total - payload,
            "full_bytes": full,
            "full_bytes_bfloat16": places * 4 * H,
            "requested_ratio": self.requested,
            "ratio": total / full,
            "dtype": dtype.name,
            "slots": slots,
        }


def _stores(layer: Full | Ring | Compressed) -> list[Store]:
    return [group.store for group in layer.groups] if isinstance(layer, Compressed) else [layer.store]


def spans(config: ModelConfig, slots: int) -> tuple[int, ...]:
    """The slots each layer needs for texts of `slots` positions: a windowed layer no more than its window."""
    return tuple(slots if window is None else min(window, slots) for window in config.windows)


def make_cache(
    config: ModelConfig, batch: int, slots: int, dtype: DTypeLike, compression: Compression | None = None
) -> KVCache:
    """An empty cache for `batch` rows of up to `slots` positions; a windowed layer shorter than that gets a ring.

    Args:
      dtype: of keys and values: float32, bfloat16 or int8.
      compression: the slots of every head, and what stays in them; None: all of every text.
    """
    B, K, H = batch, config.kv_heads, config.head_size
    all_spans = spans(config, slots)
    kept = BITS if jnp.dtype(dtype) == jnp.bfloat16 and platform_of(config.platform).bfloat16_bits else jnp.dtype(dtype)

    def layer(index: int) -> Full | Ring | Compressed:
        span = all_spans[index]
        if compression is not None and any(held < span for _, held in compression.groups[index]):
            return Compressed.empty(B, H, compression, index, kept)
        return (Ring if span < slots else Full)(Store.empty(B, K, H, span, kept))

    return KVCache(
        tuple(layer(index) for index in range(config.num_blocks)), all_spans, 1.0 if compression is None else compression.ratio
    )

"""What attention reads: the keys and values of a sequence, fresh or remembered.

Every kind answers one call, `attend(q, k, v, positions, window, probe) -> (out, next kind, probed)`: take in the new keys and
values, let the queries see what they may, hand back the updated self. Attention has no branch per kind.

Keys lie with their slots side by side, `[B, K, H, S]`: scores are then a plain product q · k, which a CPU does in less than two
thirds of the time of q · kᵀ.

A position of −1 marks padding: it writes nothing and nobody attends to it. The valid positions of a row are consecutive
and stand before its padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dantinox.config import ModelConfig

Probe = Callable[[jax.Array, jax.Array], Any]


def attention(
    q_BTKGH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, valid_BTS: jax.Array, newest_B: jax.Array, probe: Probe | None
) -> tuple[jax.Array, Any]:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32, grouped queries.

    Args:
      valid_BTS: which keys each query may see. A query that may see none gets an average of all, to be ignored.
      newest_B: the index in T of each row's newest query, whose scores `probe(scores_BNS, valid_BS)` is given.

    Returns:
      The output `[B, T, K, G, H]` and what the probe returned, or None.
    """
    B, T, K, G, H = q_BTKGH.shape
    # One plain matrix product per key head: with T and G apart, XLA would transpose the whole cache first.
    q_BKMH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores_BKMS = jnp.einsum("BKMH,BKHS->BKMS", q_BKMH, k_BKHS, preferred_element_type=jnp.float32) * H**-0.5
    scores = scores_BKMS.reshape(B, K, G, T, -1)
    masked = jnp.where(valid_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights_BKMS = jax.nn.softmax(masked, axis=-1).astype(v_BKSH.dtype).reshape(scores_BKMS.shape)
    out_BKMH = jnp.einsum("BKMS,BKSH->BKMH", weights_BKMS, v_BKSH)
    out_BTKGH = out_BKMH.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4)
    if probe is None:
        return out_BTKGH, None
    rows = jnp.arange(B)
    newest_BNS = scores[rows, :, :, newest_B].reshape(B, K * G, -1)
    return out_BTKGH, probe(newest_BNS, valid_BTS[rows, newest_B])


def visible(query_BT: jax.Array, key_BS: jax.Array, window: int | None) -> jax.Array:
    """`[B, T, S]`: a query sees keys at its own position and before, at most `window` of them, and no padding."""
    query, key = query_BT[:, :, None], key_BS[:, None, :]
    seen = (key <= query) & (key >= 0)
    return seen if window is None else seen & (query - key < window)


def newest(positions_BT: jax.Array) -> jax.Array:
    """The index of each row's last token that is not padding (0 in a row of padding)."""
    return jnp.argmax(positions_BT, axis=1)


@partial(jax.tree_util.register_dataclass, data_fields=["segments_BT"], meta_fields=[])
@dataclass(frozen=True)
class Fresh:
    """No memory: the keys are those of this call. With `segments_BT`, attention stays inside a document."""

    segments_BT: jax.Array | None = None

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        valid_BTS = visible(positions_BT, positions_BT, window)
        if self.segments_BT is not None:
            valid_BTS &= self.segments_BT[:, :, None] == self.segments_BT[:, None, :]
        k_BKHT, v_BKTH = k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)
        out, probed = attention(q_BTKGH, k_BKHT, v_BKTH, valid_BTS, newest(positions_BT), probe)
        return out, self, probed


def _write(
    k_BKHS: jax.Array, v_BKSH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes each new key and value to its row's slot; a slot outside the store is dropped."""
    B, K = v_BKSH.shape[:2]
    rows, heads, slots = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None, :], slots_BT[:, :, None]
    return (
        k_BKHS.at[rows, heads, :, slots].set(k_BTKH.astype(k_BKHS.dtype), mode="drop"),
        v_BKSH.at[rows, heads, slots].set(v_BTKH.astype(v_BKSH.dtype), mode="drop"),
    )


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH"], meta_fields=[])
@dataclass(frozen=True)
class Full:
    """One slot per position: slot s holds position s."""

    k_BKHS: jax.Array
    v_BKSH: jax.Array

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        B, _, S, _ = self.v_BKSH.shape
        slots_BT = jnp.where(positions_BT < 0, S, positions_BT)
        cache = Full(*_write(self.k_BKHS, self.v_BKSH, k_BTKH, v_BTKH, slots_BT))
        valid_BTS = visible(positions_BT, jnp.broadcast_to(jnp.arange(S), (B, S)), window)
        dtype = q_BTKGH.dtype
        k, v = cache.k_BKHS.astype(dtype), cache.v_BKSH.astype(dtype)
        out, probed = attention(q_BTKGH, k, v, valid_BTS, newest(positions_BT), probe)
        return out, cache, probed


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH"], meta_fields=[])
@dataclass(frozen=True)
class Ring:
    """The last W positions of a sliding-window layer: slot p mod W holds the newest position p written there."""

    k_BKHS: jax.Array
    v_BKSH: jax.Array

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        step = self._attend_one if positions_BT.shape[1] == 1 else self._attend_many
        return step(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe)

    def _held(self, last_B: jax.Array) -> jax.Array:
        """The position in each slot `[B, W]` once `last_B` is the newest written; negative where none is."""
        W = self.v_BKSH.shape[2]
        return last_B[:, None] - (last_B[:, None] - jnp.arange(W)) % W

    def _attend_one(self, q, k_B1KH, v_B1KH, positions_B1, window, probe):
        W = self.v_BKSH.shape[2]
        slots_B1 = jnp.where(positions_B1 < 0, W, positions_B1 % W)
        ring = Ring(*_write(self.k_BKHS, self.v_BKSH, k_B1KH, v_B1KH, slots_B1))
        valid_BTS = visible(positions_B1, self._held(positions_B1[:, 0]), window)
        out, probed = attention(
            q, ring.k_BKHS.astype(q.dtype), ring.v_BKSH.astype(q.dtype), valid_BTS, newest(positions_B1), probe
        )
        return out, ring, probed

    def _attend_many(self, q, k_BTKH, v_BTKH, positions_BT, window, probe):
        """Queries see the old ring and the new keys side by side: writing first would lose keys the early ones need."""
        first_B = positions_BT[:, 0]
        k_BKHT, v_BKTH = k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)
        old_BS = self._held(first_B - 1)
        keys = jnp.concatenate([self.k_BKHS.astype(q.dtype), k_BKHT], axis=3)
        values = jnp.concatenate([self.v_BKSH.astype(q.dtype), v_BKTH], axis=2)
        valid_BTS = visible(positions_BT, jnp.concatenate([old_BS, positions_BT], axis=1), window)
        out, probed = attention(q, keys, values, valid_BTS, newest(positions_BT), probe)
        wanted_BS = self._held(jnp.max(positions_BT, axis=1))
        index_BS = jnp.clip(wanted_BS - first_B[:, None], 0)
        fresh_BS = (wanted_BS >= first_B[:, None]) & (wanted_BS >= 0)

        def renewed(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
            """`old` with its fresh slots, counted along `axis`, taken from `new`."""
            others = tuple(a for a in (1, 2, 3) if a != axis)
            taken = jnp.take_along_axis(new, jnp.expand_dims(index_BS, others), axis=axis).astype(old.dtype)
            return jnp.where(jnp.expand_dims(fresh_BS, others), taken, old)

        ring = Ring(renewed(self.k_BKHS, k_BKHT, 3), renewed(self.v_BKSH, v_BKTH, 2))
        return out, ring, probed


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclass(frozen=True)
class KVCache:
    """What every layer remembers, a pytree to be donated from step to step."""

    layers: tuple[Full | Ring, ...]

    def report(self) -> dict[str, Any]:
        """Allocated bytes (every leaf's `nbytes`) and slots per layer."""
        return {
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self)),
            "dtype": str(self.layers[0].v_BKSH.dtype),
            "slots": [layer.v_BKSH.shape[2] for layer in self.layers],
        }


def make_cache(config: ModelConfig, batch: int, slots: int, dtype: DTypeLike) -> KVCache:
    """An empty cache for `batch` rows of up to `slots` positions; a windowed layer shorter than that gets a ring."""

    def layer(window: int | None) -> Full | Ring:
        kind, size = (Ring, window) if window is not None and window < slots else (Full, slots)
        B, K, H = batch, config.kv_heads, config.head_size
        return kind(jnp.zeros((B, K, H, size), dtype), jnp.zeros((B, K, size, H), dtype))

    return KVCache(tuple(layer(window) for window in config.windows))

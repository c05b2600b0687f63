"""The compressed KV cache: a fixed number of slots per key head, and the eviction policies that
choose which tokens to keep.

The slot counts are known before compilation, so smaller buffers are allocated: the heads of a layer
form at most two groups, and each group has buffers of its own size. Each slot stores the position
of its token. Keys are rotated before they are stored, so eviction does not change the positions of
other tokens.

The policies rank tokens by:

* `snapkv+ema`: in a prompt, the attention from its last queries, pooled over neighboring tokens
  (SnapKV, Li et al. 2024); during decoding, a moving average of the attention that each token
  receives.
* `expected_attention`: in a prompt, the attention expected from later queries (Devoto et al. 2025);
  during decoding, the same moving average.
* `kvzip`: in a prompt, the largest attention during a second pass over the prompt (Kim et al.
  2025); during decoding, the same moving average.
* `tova`: the attention from the newest query (Oren et al. 2024).
* `h2o`: the sum of the attention from all queries (Zhang et al. 2023).
* `streaming`: the position, so that the newest tokens are kept (Xiao et al. 2024).
* `random`: a hash of the position.

All policies keep the first and the most recent tokens.

Shapes: B rows, T tokens of a call, K key heads of a group, G query heads per key head, C slots of a
head, U = C + T cached and new tokens.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dantinox.config import RopeScaling
from dantinox.model.attention import StoreReadout, attend
from dantinox.model.cache_store import Store
from dantinox.model.layers import PLAIN_SOFTMAX
from dantinox.model.positions import rotary_angles, rotate

MAX_DECAY = 0.999
# The number of positions after a prompt over which `expected_attention` averages the rotation.
FUTURE = 512
# The rotation of a layer, as returned by `ModelConfig.rotation`.
Rotation = tuple[float, RopeScaling | None] | None


@dataclass(frozen=True)
class Compression:
    """The settings of a compressed cache; hashable, because they are a static argument of compiled
    programs.

    Attributes:
      groups: for each layer, the groups of key heads, `((heads, slots), …)`, in the order of the
        heads in the model.
      decays: for each layer and key head, the factor by which an importance is multiplied at every
        new token.
      window: the number of last queries of a prompt whose attention ranks the prompt tokens; None:
        all queries.
      pool: the width of the max pooling over the importances of a prompt, an odd number of tokens.
      fixed: `position` or `hash` if the importance does not depend on attention, else None.
      prompt: the importance of prompt tokens: `attention` (from the queries of the prompt),
        `expected` (attention expected from the queries after the prompt), or `reconstruction` (the
        largest attention during a second pass).
      rotations, rotated: for `expected`, the rotation of each layer and the number of rotated
        elements of a head.
      recency: rank tokens as if each query had also given attention 1 / age to every token. Prompt
        tokens are ranked this way only if `prompt` is `attention`. Reason: in a head that attends
        to few tokens, the attention to all other tokens is noise, and the newer ones among these
        other tokens are more likely to be needed.
      sinks, recent: how many of the first tokens and of the newest tokens are never evicted.
      ratio: the requested fraction of the slots of an uncompressed cache.
    """

    groups: tuple[tuple[tuple[int, int], ...], ...]
    decays: tuple[tuple[float, ...], ...]
    window: int | None = 32
    pool: int = 7
    fixed: str | None = None
    prompt: str = "attention"
    rotations: tuple[Rotation, ...] = ()
    rotated: int = 0
    recency: bool = False
    sinks: int = 4
    recent: int = 16
    ratio: float = 1.0


class QKV(NamedTuple):
    """The queries, keys, values and positions of the tokens of one call."""

    q_BTKGH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    positions_BT: jax.Array

    def halves(self) -> tuple["QKV", "QKV"]:
        """Returns the first and the second half of the tokens."""
        halves = [jnp.split(x, 2, axis=1) for x in self]
        return QKV(*(first for first, _ in halves)), QKV(*(second for _, second in halves))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["store", "position_BKS", "importance_BKS"],
    meta_fields=["compression", "first_head", "decays", "rotation"],
)
@dataclass(frozen=True)
class HeadGroup:
    """The cache of key heads with the same number of slots; position −1 marks an empty slot.

    Attributes:
      importance_BKS: the importance of each token; None if it is a function of the position.
      first_head: the index of the first head of the group in its layer.
      rotation: the rotation of the layer, if the policy uses it.
    """

    store: Store
    position_BKS: jax.Array
    importance_BKS: jax.Array | None
    compression: Compression
    first_head: int
    decays: tuple[float, ...]
    rotation: Rotation = None

    @property
    def _num_recent(self) -> int:
        return min(self.compression.recent, self.store.slots // 2)

    @property
    def _decay_K1(self) -> jax.Array:
        return jnp.asarray(self.decays, jnp.float32)[:, None]

    @property
    def _effective_queries_K1(self) -> jax.Array:
        """The effective number of queries that an importance sums over: 1 / (1 − decay)."""
        return 1 / (1 - jnp.minimum(self._decay_K1, MAX_DECAY))

    def _priority(
        self, position_BKS: jax.Array, importance_BKS: jax.Array | None, last_B11: jax.Array
    ) -> jax.Array:
        """Returns the priority of each token; tokens with the lowest priority are evicted first."""
        if self.compression.fixed == "position":
            return position_BKS.astype(jnp.float32)
        if importance_BKS is None:
            return position_hash(
                position_BKS, self.first_head + jnp.arange(position_BKS.shape[1])[:, None]
            )
        if not self.compression.recency:
            return importance_BKS
        return importance_BKS + self._effective_queries_K1 / (1 + last_B11 - position_BKS)

    def _protected(self, position_BKS: jax.Array, last_B11: jax.Array) -> jax.Array:
        return (position_BKS < self.compression.sinks) | (
            position_BKS > last_B11 - self._num_recent
        )

    def attend_token(
        self, q_B1KGH, k_B1KH, v_B1KH, positions_B1, window, probe, softmax
    ) -> tuple["HeadGroup", StoreReadout]:
        """Writes the new token, evicting a cached token if all slots are full, and attends to all
        cached tokens.
        """
        B, K, C = self.position_BKS.shape
        t_B11 = positions_B1[:, :, None]
        valid = self.position_BKS >= 0
        if window is not None:
            valid &= self.position_BKS > t_B11 - window
        priority = jnp.where(
            self._protected(self.position_BKS, t_B11),
            jnp.inf,
            self._priority(self.position_BKS, self.importance_BKS, t_B11),
        )
        slot_BK = jnp.argmin(jnp.where(valid, priority, -jnp.inf), axis=2)
        slot_BK = jnp.where(positions_B1 < 0, C, slot_BK)  # a finished row writes nothing
        rows = jnp.arange(B)[:, None]
        heads = jnp.arange(K)
        position_BKS = self.position_BKS.at[rows, heads, slot_BK].set(positions_B1, mode="drop")
        store = self.store.write(k_B1KH, v_B1KH, slot_BK[:, None])
        importance_BKS = self.importance_BKS
        counted_B1 = None if importance_BKS is None else positions_B1 >= 0
        readout = attend(
            q_B1KGH, store, positions_B1, position_BKS, window, probe, counted_B1, softmax
        )
        if importance_BKS is not None:
            previous = importance_BKS.at[rows, heads, slot_BK].set(0, mode="drop")
            importance_BKS = jnp.where(
                t_B11 >= 0, self._decay_K1 * previous + readout.received_BKS, previous
            )
        return (
            replace(self, store=store, position_BKS=position_BKS, importance_BKS=importance_BKS),
            readout,
        )

    def attend_prompt(
        self,
        q_BTKGH,
        k_BTKH,
        v_BTKH,
        positions_BT,
        window,
        probe,
        softmax,
        again: QKV | None = None,
    ) -> tuple["HeadGroup", StoreReadout]:
        """Processes a part of a prompt: attends to the cache and to the part, and then chooses the
        tokens to keep.

        Args:
          again: the same tokens in the second pass, for `reconstruction`; their output is appended
            to that of the first pass.
        """
        B, K, C = self.position_BKS.shape
        sorted_group = self._in_order()
        new_BKT = jnp.broadcast_to(positions_BT[:, None], (B, K, positions_BT.shape[1]))
        position_BKU = jnp.concatenate([sorted_group.position_BKS, new_BKT], axis=2)
        cached_and_new = sorted_group.store.join(Store.from_kv(k_BTKH, v_BTKH, self.store.dtype))
        last_B11 = jnp.max(positions_BT, axis=1)[:, None, None]
        counted_BT = self._counted(positions_BT, last_B11)
        readout = attend(
            q_BTKGH, cached_and_new, positions_BT, position_BKU, window, probe, counted_BT, softmax
        )
        importance_BKU = pooled_BKU = None
        if self.compression.prompt == "expected":
            keys_BUKH, values_BUKH = cached_and_new.dequantize(jnp.float32)
            sizes = self.compression.rotated, self.compression.sinks
            importance_BKU = pooled_BKU = self._effective_queries_K1 * expected_attention(
                q_BTKGH, positions_BT, keys_BUKH, values_BUKH, position_BKU, self.rotation, *sizes
            )
        elif again is not None and sorted_group.importance_BKS is not None:
            second = self._second_pass(cached_and_new, position_BKU, again, window, softmax)
            readout = readout._replace(
                out_BTKGH=jnp.concatenate([readout.out_BTKGH, second.out_BTKGH], axis=1)
            )
            previous_BKU = jnp.pad(
                sorted_group.importance_BKS, ((0, 0), (0, 0), (0, positions_BT.shape[1]))
            )
            importance_BKU = pooled_BKU = jnp.maximum(
                previous_BKU, second.received_BKS[..., : position_BKU.shape[2]]
            )
        elif sorted_group.importance_BKS is not None:
            decayed_BKU = self._decayed(sorted_group.importance_BKS, positions_BT)
            importance_BKU = jnp.where(position_BKU >= 0, decayed_BKU + readout.received_BKS, 0)
            pooled_BKU = self._max_pool(importance_BKU)
        candidates = position_BKU >= 0
        if window is not None:
            candidates &= position_BKU > last_B11 + 1 - window
        if pooled_BKU is not None and self.compression.prompt != "attention":
            ranked = pooled_BKU  # without the term of `Compression.recency`
        else:
            ranked = self._priority(position_BKU, pooled_BKU, last_B11)
        priority = jnp.where(self._protected(position_BKU, last_B11), jnp.inf, ranked)
        best, index_BKC = jax.lax.top_k(jnp.where(candidates, priority, -jnp.inf), C)
        # Sorted by position, like the candidates.
        order_BKC = jnp.sort(jnp.where(best > -jnp.inf, index_BKC, -1), axis=2)
        indices_BKC = jnp.maximum(order_BKC, 0)
        position_BKS = jnp.where(
            order_BKC >= 0, jnp.take_along_axis(position_BKU, indices_BKC, axis=2), -1
        )
        active_B11 = last_B11 >= 0
        store = cached_and_new.gather_slots(indices_BKC).select_slots(
            jnp.broadcast_to(active_B11, (B, 1, C)), self.store
        )
        importance_BKS = self.importance_BKS
        if importance_BKS is not None and importance_BKU is not None:
            chosen = jnp.take_along_axis(importance_BKU, indices_BKC, axis=2)
            importance_BKS = jnp.where(active_B11, chosen, importance_BKS)
        position_BKS = jnp.where(active_B11, position_BKS, self.position_BKS)
        return (
            replace(self, store=store, position_BKS=position_BKS, importance_BKS=importance_BKS),
            readout,
        )

    def _decayed(self, importance_BKS: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Returns the decayed importances of cached tokens, and 0 for new ones: `[B, K, U]`."""
        num_read_B11 = jnp.sum(positions_BT >= 0, axis=1)[:, None, None]
        decayed_BKS = importance_BKS * self._decay_K1**num_read_B11
        return jnp.pad(decayed_BKS, ((0, 0), (0, 0), (0, positions_BT.shape[1])))

    def _max_pool(self, importance_BKU: jax.Array) -> jax.Array:
        """Returns the maximum over each token and its neighbors."""
        width = (1, 1, self.compression.pool)
        sides = ((0, 0), (0, 0), (self.compression.pool // 2,) * 2)
        return jax.lax.reduce_window(importance_BKU, -jnp.inf, jax.lax.max, width, (1, 1, 1), sides)

    def _second_pass(
        self, cached_and_new: Store, position_BKU, again: QKV, window, softmax
    ) -> StoreReadout:
        """Computes the attention of the repeated tokens to the cached tokens, to the new tokens,
        and to each other.

        `received_BKS` holds the largest weight that each key receives.
        """
        B, K, _ = position_BKU.shape
        store = cached_and_new.join(Store.from_kv(again.k_BTKH, again.v_BTKH, self.store.dtype))
        new_BKT = jnp.broadcast_to(again.positions_BT[:, None], (B, K, again.positions_BT.shape[1]))
        position = jnp.concatenate([position_BKU, new_BKT], axis=2)
        counted_BT = again.positions_BT >= 0
        return attend(
            again.q_BTKGH,
            store,
            again.positions_BT,
            position,
            window,
            None,
            counted_BT,
            softmax,
            use_max=True,
        )

    def _in_order(self) -> "HeadGroup":
        """Returns the group sorted by position, with empty slots first, so that no gap precedes new
        tokens.
        """
        index_BKS = jnp.argsort(self.position_BKS, axis=2)
        position_BKS = jnp.take_along_axis(self.position_BKS, index_BKS, axis=2)
        importance_BKS = self.importance_BKS
        if importance_BKS is not None:
            importance_BKS = jnp.take_along_axis(importance_BKS, index_BKS, axis=2)
        return replace(
            self,
            store=self.store.gather_slots(index_BKS),
            position_BKS=position_BKS,
            importance_BKS=importance_BKS,
        )

    def _counted(self, positions_BT: jax.Array, last_B11: jax.Array) -> jax.Array | None:
        """Returns a mask of the prompt queries whose attention determines the importance; None if
        no attention does.
        """
        if self.importance_BKS is None or self.compression.prompt != "attention":
            return None
        counted_BT = positions_BT >= 0
        window = self.compression.window
        return (
            counted_BT if window is None else counted_BT & (positions_BT > last_B11[:, 0] - window)
        )


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=[])
@dataclass(frozen=True)
class CompressedLayer:
    """The cache of one layer: groups of key heads, in the order of the heads in the model."""

    groups: tuple[HeadGroup, ...]

    @classmethod
    def empty(
        cls, batch: int, head_size: int, compression: Compression, layer: int, dtype: DTypeLike
    ) -> "CompressedLayer":
        groups = []
        first = 0
        for heads, slots in compression.groups[layer]:
            store = Store.empty(batch, heads, (head_size, head_size), slots, dtype)
            position_BKS = jnp.full((batch, heads, slots), -1, jnp.int32)
            importance_BKS = (
                None if compression.fixed else jnp.zeros((batch, heads, slots), jnp.float32)
            )
            decays = compression.decays[layer][first : first + heads]
            rotation = compression.rotations[layer] if compression.rotations else None
            groups.append(
                HeadGroup(store, position_BKS, importance_BKS, compression, first, decays, rotation)
            )
            first += heads
        return cls(tuple(groups))

    @property
    def needs_two_passes(self) -> bool:
        """Whether a prompt must be read twice, with `attend_two_pass`."""
        return self.groups[0].compression.prompt == "reconstruction"

    def attend_two_pass(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        """Runs `attend` for tokens whose second half repeats the first half at later positions."""
        return self._attend(
            q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, twice=True
        )

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        if self.needs_two_passes and positions_BT.shape[1] > 1:
            raise ValueError(
                "this cache needs two passes over a prompt: call generation.decode.prefill_hidden"
            )
        return self._attend(
            q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, twice=False
        )

    def _attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, *, twice: bool
    ):
        groups, readouts = [], []
        for group in self.groups:
            heads = slice(group.first_head, group.first_head + group.position_BKS.shape[1])
            new = QKV(q_BTKGH[:, :, heads], k_BTKH[:, :, heads], v_BTKH[:, :, heads], positions_BT)
            group_probe = None if probe is None else _return_scores
            group_softmax = (
                softmax
                if softmax.sinks_KG is None
                else softmax._replace(sinks_KG=softmax.sinks_KG[heads])
            )
            if twice:
                first, again = new.halves()
                updated, readout = group.attend_prompt(
                    *first, window, group_probe, group_softmax, again
                )
            else:
                step = group.attend_token if positions_BT.shape[1] == 1 else group.attend_prompt
                updated, readout = step(*new, window, group_probe, group_softmax)
            groups.append(updated)
            readouts.append(readout)
        outs = [readout.out_BTKGH for readout in readouts]
        out_BTKGH = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)
        if probe is None:
            return out_BTKGH, CompressedLayer(tuple(groups)), None
        # Groups have different numbers of slots.
        S = max(readout.probed[0].shape[2] for readout in readouts)
        padded = [
            [jnp.pad(x, ((0, 0), (0, 0), (0, S - x.shape[2]))) for x in readout.probed]
            for readout in readouts
        ]
        scores_BNS, valid_BNS = (
            jnp.concatenate(column, axis=1) for column in zip(*padded, strict=True)
        )
        return out_BTKGH, CompressedLayer(tuple(groups)), probe(scores_BNS, valid_BNS)


def _return_scores(scores_BNS: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A probe that returns its arguments, both expanded to `[B, N, S]`."""
    return scores_BNS, jnp.broadcast_to(
        valid if valid.ndim == 3 else valid[:, None], scores_BNS.shape
    )


def position_hash(position: jax.Array, head: jax.Array) -> jax.Array:
    """Returns a pseudorandom number in [0, 1) from position and head (the finalizer of
    MurmurHash3).
    """
    x = position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + head.astype(jnp.uint32) * jnp.uint32(
        0x85EBCA77
    )
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return ((x ^ (x >> 16)) >> 8).astype(jnp.float32) / 2**24


def expected_attention(
    q_BTKGH: jax.Array,
    positions_BT: jax.Array,
    k_BUKH: jax.Array,
    v_BUKH: jax.Array,
    position_BKU: jax.Array,
    rotation: Rotation,
    rotated: int,
    sinks: int,
) -> jax.Array:
    """Returns the attention `[B, K, U]` that each key is expected to receive from later queries.

    This follows Devoto et al. 2025, section 3. Queries before their rotation are modeled as
    Gaussian, with the mean μ and the covariance Σ of the prompt queries. Let R be the mean rotation
    over the `FUTURE` positions after the prompt. Then E exp(qᵀk / √H) = exp(μᵀRᵀk / √H + kᵀRΣRᵀk /
    2H). A softmax over the keys normalizes this expectation. The mean of the softmax over the query
    heads is multiplied by the norm of the value, relative to the mean norm of all values. The first
    `sinks` tokens are excluded from the statistics, and their result is zero.

    Args:
      q_BTKGH, k_BUKH: queries and keys after rotation.
      positions_BT: −1 marks padding.
      position_BKU: the positions of the keys, −1 for an empty slot.
      rotation: the rotation of the layer; None: no rotation.
      rotated: the number of rotated elements of a head.
    """
    H = q_BTKGH.shape[-1]
    q, k_BUKH = q_BTKGH.astype(jnp.float32), k_BUKH.astype(jnp.float32)
    if rotation is not None:
        cos, sin = rotary_angles(positions_BT, rotated, *rotation)
        gain = cos**2 + sin**2  # scaled rotations also change the norm
        q = rotate(q, (cos / gain, -sin / gain))
        future_BF = jnp.max(positions_BT, axis=1)[:, None] + 1 + jnp.arange(FUTURE)
        cos, sin = (
            jnp.mean(part, axis=1, keepdims=True)
            for part in rotary_angles(future_BF, rotated, *rotation)
        )
        k_BUKH = rotate(k_BUKH, (cos, -sin))  # Rᵀk
    counted_BT = (positions_BT >= sinks)[:, :, None, None, None]
    count = jnp.maximum(jnp.sum(counted_BT, axis=1), 1)
    mean_BKGH = jnp.sum(jnp.where(counted_BT, q, 0), axis=1) / count
    centered = jnp.where(counted_BT, q - mean_BKGH[:, None], 0)
    covariance_BKGHI = jnp.einsum("btkgh,btkgi->bkghi", centered, centered) / count[..., None]
    scores_BKGU = jnp.einsum("bkgh,bukh->bkgu", mean_BKGH, k_BUKH) / H**0.5
    scores_BKGU += jnp.einsum("bukh,bkghi,buki->bkgu", k_BUKH, covariance_BKGHI, k_BUKH) / (2 * H)
    valid_BKU = position_BKU >= sinks
    weights_BKGU = jax.nn.softmax(
        jnp.where(valid_BKU[:, :, None], scores_BKGU, jnp.finfo(jnp.float32).min), axis=-1
    )
    norm_BKU = jnp.linalg.norm(v_BUKH.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    mean_norm = jnp.mean(norm_BKU, axis=2, keepdims=True, where=valid_BKU)
    return jnp.where(
        valid_BKU, weights_BKGU.mean(axis=2) * norm_BKU / jnp.where(mean_norm > 0, mean_norm, 1), 0
    )

"""The compressed KV cache: a number of slots per key head, and the eviction policies that decide what stays.

The numbers are known before compilation, so the memory is really saved: the heads of a layer lie in at most two groups, each
with buffers of its own size. Positions are kept with the keys (which are rotated before they are stored) and stay true.

What stays: `snapkv+ema` chooses a prompt's tokens by the attention of its last queries, smoothed over neighbours (SnapKV, Li et
al. 2024), and goes on with a moving average of the attention each token gets. `expected_attention` chooses them by the
attention that later queries are expected to pay (Devoto et al. 2025), and `kvzip` by the largest attention while the prompt is
read a second time (Kim et al. 2025); both go on with the same average. `tova` looks at the newest query alone (Oren et al.
2024), `h2o` at the sum over all (Zhang et al. 2023), `streaming` keeps the newest (Xiao et al. 2024), `random` goes by a hash.
All of them keep the first tokens and the most recent ones.
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
FUTURE = 512  # positions behind a prompt that `expected_attention` averages the rotation over
Rotation = tuple[float, RopeScaling | None] | None  # of a layer, as `ModelConfig.rotation` gives it


@dataclass(frozen=True)
class Compression:
    """What a compressed cache is made by, hashable: a compiled program is made for it.

    Attributes:
      groups: for each layer the key heads in groups, `((heads, slots), …)`, in the order of the model's heads.
      decays: for each layer and key head the factor g by which an importance shrinks with every token.
      window: the last queries of a prompt whose attention chooses what stays of it; None: all.
      pool: tokens that a large importance in a prompt is spread over, an odd number.
      fixed: importance is no attention but `position` or `hash`.
      prompt: how the tokens of a prompt get their importance: `attention` of its own queries, `expected` attention of the
        queries after it, or `reconstruction`, the largest attention while it is read a second time.
      rotations, rotated: for `expected` the rotation of each layer, and how many numbers of a head are rotated.
      recency: tokens are ranked as if every query had paid 1 / age to each, besides what it did pay; the tokens of a prompt
        only where `prompt` is `attention`. Where a head attends to a few tokens, the attention of all others is noise, and the
        newer ones are likelier to be wanted.
      sinks, recent: the first and the newest tokens, which are never given up.
      ratio: the share of all slots that was asked for.
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


class Tokens(NamedTuple):
    """Queries, keys, values and positions of tokens that are read together."""

    q_BTKGH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    positions_BT: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["store", "position_BKS", "importance_BKS"],
    meta_fields=["rule", "first", "decays", "rotation"],
)
@dataclass(frozen=True)
class HeadGroup:
    """Key heads with the same number of slots; position −1 marks an empty slot.

    Attributes:
      importance_BKS: None where it is a function of the position.
      first: the number of the first head in its layer.
      rotation: of its layer, where the rule reads it.
    """

    store: Store
    position_BKS: jax.Array
    importance_BKS: jax.Array | None
    rule: Compression
    first: int
    decays: tuple[float, ...]
    rotation: Rotation = None

    @property
    def _recent(self) -> int:
        return min(self.rule.recent, self.store.slots // 2)

    @property
    def _decay_K1(self) -> jax.Array:
        return jnp.asarray(self.decays, jnp.float32)[:, None]

    @property
    def _queries_K1(self) -> jax.Array:
        """How many queries an importance is the sum over."""
        return 1 / (1 - jnp.minimum(self._decay_K1, MAX_DECAY))

    def _worth(self, position_BKS: jax.Array, importance_BKS: jax.Array | None, last_B11: jax.Array) -> jax.Array:
        """What tokens are ranked by."""
        if self.rule.fixed == "position":
            return position_BKS.astype(jnp.float32)
        if importance_BKS is None:
            return position_hash(position_BKS, self.first + jnp.arange(position_BKS.shape[1])[:, None])
        if not self.rule.recency:
            return importance_BKS
        return importance_BKS + self._queries_K1 / (1 + last_B11 - position_BKS)

    def _protected(self, position_BKS: jax.Array, last_B11: jax.Array) -> jax.Array:
        return (position_BKS < self.rule.sinks) | (position_BKS > last_B11 - self._recent)

    def attend_one(self, q_B1KGH, k_B1KH, v_B1KH, positions_B1, window, probe, softmax) -> tuple["HeadGroup", StoreReadout]:
        """Takes the new token in, in place of another if there is no room; then everything held is attended to."""
        B, K, C = self.position_BKS.shape
        t_B11 = positions_B1[:, :, None]
        held = self.position_BKS >= 0
        if window is not None:
            held &= self.position_BKS > t_B11 - window
        worth = jnp.where(
            self._protected(self.position_BKS, t_B11), jnp.inf, self._worth(self.position_BKS, self.importance_BKS, t_B11)
        )
        slot_BK = jnp.argmin(jnp.where(held, worth, -jnp.inf), axis=2)
        slot_BK = jnp.where(positions_B1 < 0, C, slot_BK)  # a finished row writes nothing
        rows, heads = jnp.arange(B)[:, None], jnp.arange(K)
        position_BKS = self.position_BKS.at[rows, heads, slot_BK].set(positions_B1, mode="drop")
        store = self.store.write(k_B1KH, v_B1KH, slot_BK[:, None])
        importance_BKS = self.importance_BKS
        counted_B1 = None if importance_BKS is None else positions_B1 >= 0
        found = attend(q_B1KGH, store, positions_B1, position_BKS, window, probe, counted_B1, softmax)
        if importance_BKS is not None:
            before = importance_BKS.at[rows, heads, slot_BK].set(0, mode="drop")
            importance_BKS = jnp.where(t_B11 >= 0, self._decay_K1 * before + found.got_BKS, before)
        return replace(self, store=store, position_BKS=position_BKS, importance_BKS=importance_BKS), found

    def attend_many(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, again: Tokens | None = None
    ) -> tuple["HeadGroup", StoreReadout]:
        """Reads part of a prompt: its queries see what is held and each other, then the tokens that stay are chosen.

        Args:
          again: the same tokens read a second time, for `reconstruction`; what they find is appended to the output.
        """
        B, K, C = self.position_BKS.shape
        held = self._in_order()
        new_BKT = jnp.broadcast_to(positions_BT[:, None], (B, K, positions_BT.shape[1]))
        position_BKU = jnp.concatenate([held.position_BKS, new_BKT], axis=2)
        union = held.store.join(Store.of(k_BTKH, v_BTKH, self.store.dtype))
        last_B11 = jnp.max(positions_BT, axis=1)[:, None, None]
        counted_BT = self._counted(positions_BT, last_B11)
        found = attend(q_BTKGH, union, positions_BT, position_BKU, window, probe, counted_BT, softmax)
        importance_BKU = pooled_BKU = None
        if self.rule.prompt == "expected":
            keys_BUKH, values_BUKH = union.wide(jnp.float32)
            importance_BKU = pooled_BKU = self._queries_K1 * expected_attention(
                q_BTKGH, positions_BT, keys_BUKH, values_BUKH, position_BKU, self.rotation, self.rule.rotated, self.rule.sinks
            )
        elif again is not None and held.importance_BKS is not None:
            reading = self._read_again(union, position_BKU, again, window, softmax)
            found = found._replace(out_BTKGH=jnp.concatenate([found.out_BTKGH, reading.out_BTKGH], axis=1))
            before_BKU = jnp.pad(held.importance_BKS, ((0, 0), (0, 0), (0, positions_BT.shape[1])))
            importance_BKU = pooled_BKU = jnp.maximum(before_BKU, reading.got_BKS[..., : position_BKU.shape[2]])
        elif held.importance_BKS is not None:  # what the held tokens had, shrunk, and what they got now
            read_B11 = jnp.sum(positions_BT >= 0, axis=1)[:, None, None]
            shrunk_BKS = held.importance_BKS * held._decay_K1**read_B11
            before_BKU = jnp.pad(shrunk_BKS, ((0, 0), (0, 0), (0, positions_BT.shape[1])))
            importance_BKU = jnp.where(position_BKU >= 0, before_BKU + found.got_BKS, 0)
            # The largest among a token and its neighbours.
            width, sides = (1, 1, self.rule.pool), ((0, 0), (0, 0), (self.rule.pool // 2,) * 2)
            pooled_BKU = jax.lax.reduce_window(importance_BKU, -jnp.inf, jax.lax.max, width, (1, 1, 1), sides)
        kept = position_BKU >= 0
        if window is not None:
            kept &= position_BKU > last_B11 + 1 - window
        if pooled_BKU is not None and self.rule.prompt != "attention":
            ranked = pooled_BKU
        else:
            ranked = self._worth(position_BKU, pooled_BKU, last_B11)
        worth = jnp.where(self._protected(position_BKU, last_B11), jnp.inf, ranked)
        best, index_BKC = jax.lax.top_k(jnp.where(kept, worth, -jnp.inf), C)
        order_BKC = jnp.sort(jnp.where(best > -jnp.inf, index_BKC, -1), axis=2)  # by position, as the candidates are
        taken_BKC = jnp.maximum(order_BKC, 0)
        position_BKS = jnp.where(order_BKC >= 0, jnp.take_along_axis(position_BKU, taken_BKC, axis=2), -1)
        busy_B11 = last_B11 >= 0
        store = union.take(taken_BKC).where(jnp.broadcast_to(busy_B11, (B, 1, C)), self.store)
        importance_BKS = self.importance_BKS
        if importance_BKS is not None and importance_BKU is not None:
            chosen = jnp.take_along_axis(importance_BKU, taken_BKC, axis=2)
            importance_BKS = jnp.where(busy_B11, chosen, importance_BKS)
        position_BKS = jnp.where(busy_B11, position_BKS, self.position_BKS)
        return replace(self, store=store, position_BKS=position_BKS, importance_BKS=importance_BKS), found

    def _read_again(self, union: Store, position_BKU, again: Tokens, window, softmax) -> StoreReadout:
        """What the repeated tokens find in the union and each other, with the largest weight that each key gets from them."""
        B, K, _ = position_BKU.shape
        store = union.join(Store.of(again.k_BTKH, again.v_BTKH, self.store.dtype))
        new_BKT = jnp.broadcast_to(again.positions_BT[:, None], (B, K, again.positions_BT.shape[1]))
        position = jnp.concatenate([position_BKU, new_BKT], axis=2)
        counted_BT = again.positions_BT >= 0
        return attend(again.q_BTKGH, store, again.positions_BT, position, window, None, counted_BT, softmax, largest=True)

    def _in_order(self) -> "HeadGroup":
        """The same by position, empty slots first: what is new then follows without a gap."""
        index_BKS = jnp.argsort(self.position_BKS, axis=2)
        position_BKS = jnp.take_along_axis(self.position_BKS, index_BKS, axis=2)
        importance_BKS = self.importance_BKS
        if importance_BKS is not None:
            importance_BKS = jnp.take_along_axis(importance_BKS, index_BKS, axis=2)
        return replace(self, store=self.store.take(index_BKS), position_BKS=position_BKS, importance_BKS=importance_BKS)

    def _counted(self, positions_BT: jax.Array, last_B11: jax.Array) -> jax.Array | None:
        """The queries of a prompt whose attention counts."""
        if self.importance_BKS is None or self.rule.prompt != "attention":
            return None
        counted_BT = positions_BT >= 0
        return counted_BT if self.rule.window is None else counted_BT & (positions_BT > last_B11[:, 0] - self.rule.window)


@partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=[])
@dataclass(frozen=True)
class CompressedLayer:
    """A layer whose key heads lie in groups, the order that of the model's heads."""

    groups: tuple[HeadGroup, ...]

    @classmethod
    def empty(cls, batch: int, head_size: int, rule: Compression, layer: int, dtype: DTypeLike) -> "CompressedLayer":
        groups, first = [], 0
        for heads, slots in rule.groups[layer]:
            store = Store.empty(batch, heads, (head_size, head_size), slots, dtype)
            position_BKS = jnp.full((batch, heads, slots), -1, jnp.int32)
            importance_BKS = None if rule.fixed else jnp.zeros((batch, heads, slots), jnp.float32)
            decays = rule.decays[layer][first : first + heads]
            rotation = rule.rotations[layer] if rule.rotations else None
            groups.append(HeadGroup(store, position_BKS, importance_BKS, rule, first, decays, rotation))
            first += heads
        return cls(tuple(groups))

    @property
    def reconstructs(self) -> bool:
        """Whether a prompt must be read twice: `attend_twice`."""
        return self.groups[0].rule.prompt == "reconstruction"

    def attend_twice(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        """`attend` of the first half of T tokens, which the second half repeats at later positions."""
        return self._attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, twice=True)

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        if self.reconstructs and positions_BT.shape[1] > 1:
            raise ValueError("this cache reads prompts twice: use generation.decode.prefill_hidden")
        return self._attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, twice=False)

    def _attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe, softmax, *, twice: bool):
        groups, found = [], []
        for group in self.groups:
            heads = slice(group.first, group.first + group.position_BKS.shape[1])
            new = Tokens(q_BTKGH[:, :, heads], k_BTKH[:, :, heads], v_BTKH[:, :, heads], positions_BT)
            tell = None if probe is None else _scores_and_validity
            own = softmax if softmax.sinks_KG is None else softmax._replace(sinks_KG=softmax.sinks_KG[heads])
            if twice:
                halves = [jnp.split(x, 2, axis=1) for x in new]
                once, again = (Tokens._make(half) for half in zip(*halves, strict=True))
                after, reading = group.attend_many(*once, window, tell, own, again)
            else:
                step = group.attend_one if positions_BT.shape[1] == 1 else group.attend_many
                after, reading = step(*new, window, tell, own)
            groups.append(after)
            found.append(reading)
        outs = [reading.out_BTKGH for reading in found]
        out_BTKGH = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)
        if probe is None:
            return out_BTKGH, CompressedLayer(tuple(groups)), None
        S = max(reading.probed[0].shape[2] for reading in found)
        wide = [[jnp.pad(x, ((0, 0), (0, 0), (0, S - x.shape[2]))) for x in reading.probed] for reading in found]
        scores_BNS, valid_BNS = (jnp.concatenate(column, axis=1) for column in zip(*wide, strict=True))
        return out_BTKGH, CompressedLayer(tuple(groups)), probe(scores_BNS, valid_BNS)


def _scores_and_validity(scores_BNS: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A probe that tells all: `[B, N, S]` both, also of a single key head."""
    return scores_BNS, jnp.broadcast_to(valid if valid.ndim == 3 else valid[:, None], scores_BNS.shape)


def position_hash(position: jax.Array, head: jax.Array) -> jax.Array:
    """A number in [0, 1) that depends on position and head and on nothing else (the finaliser of MurmurHash3)."""
    x = position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + head.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
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
    """The attention `[B, K, U]` that each key is expected to get from a query behind a prompt (Devoto et al. 2025, section 3).

    Queries before their rotation are taken to be Gaussian, with the mean μ and the covariance Σ of the prompt's queries. Let R
    be the mean of the rotations to the `FUTURE` positions behind it. Then E exp(qᵀk / √H) = exp(μᵀRᵀk / √H + kᵀRΣRᵀk / 2H),
    which a softmax over the keys normalizes. The mean over query heads is multiplied by the norm of the value, relative to the
    mean norm. The first `sinks` tokens are left out of the statistics, and get nothing.

    Args:
      q_BTKGH, k_BUKH: after their rotation.
      positions_BT: −1 marks padding.
      position_BKU: of the keys, −1 where there is none.
      rotation: of the layer; None: nothing is rotated.
      rotated: how many numbers of a head are.
    """
    H = q_BTKGH.shape[-1]
    q, k_BUKH = q_BTKGH.astype(jnp.float32), k_BUKH.astype(jnp.float32)
    if rotation is not None:
        cos, sin = rotary_angles(positions_BT, rotated, *rotation)
        gain = cos**2 + sin**2  # scaled rotations are no pure rotations
        q = rotate(q, (cos / gain, -sin / gain))
        future_BF = jnp.max(positions_BT, axis=1)[:, None] + 1 + jnp.arange(FUTURE)
        cos, sin = (jnp.mean(part, axis=1, keepdims=True) for part in rotary_angles(future_BF, rotated, *rotation))
        k_BUKH = rotate(k_BUKH, (cos, -sin))  # Rᵀk
    counted_BT = (positions_BT >= sinks)[:, :, None, None, None]
    count = jnp.maximum(jnp.sum(counted_BT, axis=1), 1)
    mean_BKGH = jnp.sum(jnp.where(counted_BT, q, 0), axis=1) / count
    centred = jnp.where(counted_BT, q - mean_BKGH[:, None], 0)
    covariance_BKGHI = jnp.einsum("btkgh,btkgi->bkghi", centred, centred) / count[..., None]
    scores_BKGU = jnp.einsum("bkgh,bukh->bkgu", mean_BKGH, k_BUKH) / H**0.5
    scores_BKGU += jnp.einsum("bukh,bkghi,buki->bkgu", k_BUKH, covariance_BKGHI, k_BUKH) / (2 * H)
    valid_BKU = position_BKU >= sinks
    weights_BKGU = jax.nn.softmax(jnp.where(valid_BKU[:, :, None], scores_BKGU, jnp.finfo(jnp.float32).min), axis=-1)
    norm_BKU = jnp.linalg.norm(v_BUKH.astype(jnp.float32), axis=-1).transpose(0, 2, 1)
    mean_norm = jnp.mean(norm_BKU, axis=2, keepdims=True, where=valid_BKU)
    return jnp.where(valid_BKU, weights_BKGU.mean(axis=2) * norm_BKU / jnp.where(mean_norm > 0, mean_norm, 1), 0)

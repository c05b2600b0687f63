"""Multi-head attention: the layer, and scaled dot-product attention over a cache.

Shapes: B batch, T query time, S key time, D model, K key/value heads, G query heads per key head, H head size.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.cache_store import AnyStore, OneStore, SegmentedStore, StorePrefix
from dantinox.model.chunked_attention import BLOCK
from dantinox.model.layers import PLAIN_SOFTMAX, Linear, RMSNorm, Softmax, make_rms_norm, softcap
from dantinox.model.parallelism import Parallelism
from dantinox.model.positions import query_scaling, rotate

Angles = tuple[jax.Array, jax.Array] | None
Probe = Callable[[jax.Array, jax.Array], Any]


class Attention(nnx.Module):
    """Causal attention with grouped queries.

    `qkv [D, K, G+2, H]` holds for each key head its G query heads, then key, then value; `out [K, G, H, D]`. With `k_eq_v` the
    key is the value too and `qkv` is `[D, K, G+1, H]`; in a layer that reads the keys and values of another it is
    `[D, K, G, H]`. Scores are divided by √H; where they are to be divided by something else, queries are multiplied by the
    rest. `layer` is its number from 0.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        self.window, keys_and_values = config.windows[layer], config.kv_projections(layer)
        config = config.of_layer(layer)
        D, K, H = config.dim, config.kv_heads, config.head_size
        G = config.n_heads // K
        self.groups, self.shares = G, keys_and_values == 0
        self.qkv = Linear((D,), (K, G + keys_and_values, H), dtype=dtype, rngs=rngs, bias=config.qkv_bias)
        self.out = Linear((K, G, H), (D,), dtype=dtype, rngs=rngs, gain=out_gain, bias=config.out_bias)
        self.over_heads = config.qk_norm_scope == "layer"
        self.q_norm = make_rms_norm(config, (K, G, H) if self.over_heads else H) if config.qk_norm else None
        keys_normed = config.qk_norm and not self.shares
        self.k_norm = make_rms_norm(config, (K, H) if self.over_heads else H) if keys_normed else None
        self.v_norm = RMSNorm(H, config.norm_epsilon, scaled=False) if config.v_norm and not self.shares else None
        self.norms_rotated = config.qk_norm_after_rope
        self.query_gain = 1.0 if config.query_pre_attn_scalar is None else math.sqrt(H / config.query_pre_attn_scalar)
        self.gate = Linear((D,), (K, G, H), dtype=dtype, rngs=rngs, bias=config.gate_bias) if config.no_sink else None
        self.beta, scaling = config.query_scaling_beta, config.rope_scaling
        self.context = 1 if scaling is None else scaling.original_context
        self.cap, self.sinks = config.softcap, nnx.Param(jnp.zeros((K, G), jnp.float32)) if config.sink_logits else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        angles: Angles,
        memory: Any,
        probe: Probe | None,
        parallelism: Parallelism,
    ):
        x_BTD = parallelism.copy_to_tp(x_BTD)
        qkv = self.qkv(x_BTD)
        q_BTKGH = self._positioned(qkv[..., : self.groups, :], self.q_norm, angles, parallelism)
        k_BTKH = v_BTKH = None
        if not self.shares:
            k_BTKH, v_BTKH = qkv[..., self.groups, :], qkv[..., -1, :]
            k_BTKH = self._positioned(k_BTKH, self.k_norm, angles, parallelism)
            v_BTKH = v_BTKH if self.v_norm is None else self.v_norm(v_BTKH)
        if self.query_gain != 1:
            q_BTKGH = (q_BTKGH * self.query_gain).astype(q_BTKGH.dtype)
        if self.beta is not None:
            gain_BT = query_scaling(positions_BT, self.beta, self.context)
            q_BTKGH = (q_BTKGH * gain_BT[..., None, None, None]).astype(q_BTKGH.dtype)
        softmax = Softmax(self.cap, None if self.sinks is None else self.sinks[...])
        a_BTKGH, memory, probed = memory.attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, self.window, probe, softmax)
        if self.gate is not None:
            a_BTKGH = a_BTKGH * jax.nn.sigmoid(self.gate(x_BTD))
        return self.out(a_BTKGH, parallelism.reduce_from_tp), memory, probed

    def _positioned(self, x: jax.Array, norm: RMSNorm | None, angles: Angles, parallelism: Parallelism) -> jax.Array:
        """Queries or keys, normalised and rotated."""
        averaged = (parallelism.pmean_heads,) if self.over_heads else ()
        x = x if norm is None or self.norms_rotated else norm(x, *averaged)
        x = x if angles is None else rotate(x, angles)
        return norm(x, *averaged) if norm is not None and self.norms_rotated else x


class AttentionOutput(NamedTuple):
    """What attention found: its output, the scores that the softmax gets, and the float32 weights it gives."""

    out_BTKGH: jax.Array
    scores_BKGTS: jax.Array
    weights_BKGTS: jax.Array


def attention(q_BTKGH: jax.Array, store: AnyStore, valid_BKTS: jax.Array, softmax: Softmax = PLAIN_SOFTMAX) -> AttentionOutput:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), softmax in float32, grouped queries.

    Args:
      valid_BKTS: which keys each query may see (the K axis may be 1). A query that may see none gets an average of all, to be
        ignored, or with sinks nothing.
    """
    if not isinstance(store, SegmentedStore):
        return _attention(q_BTKGH, store, valid_BKTS, softmax)

    def front(used: StorePrefix) -> AttentionOutput:
        seen, slots = _attention(q_BTKGH, used, valid_BKTS[..., : used.ends[-1]], softmax), used.ends[-1]
        rest = [(0, 0)] * 4 + [(0, store.slots - slots)]
        return AttentionOutput(seen.out_BTKGH, jnp.pad(seen.scores_BKGTS, rest), jnp.pad(seen.weights_BKGTS, rest))

    return store.in_use(front)


def _attention(q_BTKGH: jax.Array, store: OneStore, valid_BKTS: jax.Array, softmax: Softmax) -> AttentionOutput:
    B, T, K, G, H = q_BTKGH.shape
    # One plain matrix product per key head: with T and G apart, XLA would transpose the whole cache first.
    q_BKMH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores_BKMS = store.scores(q_BKMH)
    scores = scores_BKMS.reshape(B, K, G, T, -1)
    scores = scores if softmax.cap is None else softcap(scores, softmax.cap)
    masked = jnp.where(valid_BKTS[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = _weights(masked, softmax.sinks_KG, store.ends if isinstance(store, StorePrefix) else None)
    weights_BKMS = weights.reshape(scores_BKMS.shape)
    out_BKMV = store.average(weights_BKMS, q_BTKGH.dtype)
    return AttentionOutput(out_BKMV.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4), scores, weights)


def _weights(scores_BKGTS: jax.Array, sinks_KG: jax.Array | None, ends: list[int] | None) -> jax.Array:
    """The softmax, where there are sinks among scores and a sink, without the sink's weight; with `ends` summed up to each."""
    if sinks_KG is None and ends is None:
        return jax.nn.softmax(scores_BKGTS, axis=-1)
    sinks_KG11 = jnp.float32(-jnp.inf) if sinks_KG is None else sinks_KG[:, :, None, None]
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores_BKGTS, axis=-1, keepdims=True), sinks_KG11))
    weights = jnp.exp(scores_BKGTS - largest)
    parts = jnp.split(weights, (ends or [])[:-1], axis=-1)
    sums: jax.Array = sum(jnp.sum(part, axis=-1, keepdims=True) for part in parts)  # type: ignore[assignment]
    return weights / (sums + jnp.exp(sinks_KG11 - largest))


def causal_mask(query_BT: jax.Array, key_BKS: jax.Array, window: int | None) -> jax.Array:
    """`[B, K, T, S]`: a query sees keys at its own position and before, at most `window` of them, and no padding."""
    query, key = query_BT[:, None, :, None], key_BKS[:, :, None, :]
    seen = (key <= query) & (key >= 0)
    return seen if window is None else seen & (query - key < window)


class StoreReadout(NamedTuple):
    """What queries found in a store.

    Attributes:
      got_BKS: the weights that each key got from the counted queries, summed up, the mean over query heads (or the largest of
        all); None where none are counted.
      probed: what the probe told of each row's newest query.
    """

    out_BTKGH: jax.Array
    got_BKS: Any
    probed: Any


def attend(
    q_BTKGH: jax.Array,
    store: AnyStore,
    positions_BT: jax.Array,
    held_BKS: jax.Array,
    window: int | None,
    probe: Probe | None,
    counted_BT: jax.Array | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
    largest: bool = False,
) -> StoreReadout:
    """Attention over a store, of many queries block by block: the scores of all of them never exist.

    Args:
      held_BKS: the position in each slot (the B and K axes may be 1), negative where there is none.
      counted_BT: the queries that count for `got_BKS`.
      largest: `got_BKS` is the largest weight from any query and query head, in the place of the sum.
    """
    B, T, K, G, H = q_BTKGH.shape

    def block(
        sum_BKS: jax.Array | None, part: Any, probe: Probe | None = None
    ) -> tuple[jax.Array | None, tuple[jax.Array, Any]]:
        q_BRKGH, positions_BR, counted_BR = part
        valid_BKRS = causal_mask(positions_BR, held_BKS, window)
        seen = attention(q_BRKGH, store, valid_BKRS, softmax)
        if sum_BKS is not None and largest:
            counted = jnp.where(counted_BR[:, None, None, :, None], seen.weights_BKGTS, 0)
            sum_BKS = jnp.maximum(sum_BKS, jnp.max(counted, axis=(2, 3)))
        elif sum_BKS is not None:
            sum_BKS += jnp.sum(seen.weights_BKGTS * (counted_BR / G)[:, None, None, :, None], axis=(2, 3))
        return sum_BKS, (seen.out_BTKGH, run_probe(probe, seen, valid_BKRS, positions_BR))

    zero_BKS = None if counted_BT is None else jnp.zeros((B, K, store.slots), jnp.float32)
    whole = q_BTKGH, positions_BT, counted_BT
    if T <= BLOCK:
        got_BKS, (out_BTKGH, told) = block(zero_BKS, whole, probe)
        return StoreReadout(out_BTKGH, got_BKS, told)
    got_BKS, (out_nBRKGH, _) = jax.lax.scan(block, zero_BKS, jax.tree.map(_in_blocks, whole))
    out_BTKGH = jnp.moveaxis(out_nBRKGH, 0, 1).reshape(B, -1, K, G, out_nBRKGH.shape[-1])[:, :T]
    return StoreReadout(out_BTKGH, got_BKS, run_probe_on_store(probe, q_BTKGH, store, positions_BT, held_BKS, window, softmax))


def _in_blocks(x_BT: jax.Array) -> jax.Array:
    """[B, T, …] -> [n, B, BLOCK, …]; the last one is filled up with queries whose outcome nobody reads."""
    B, T = x_BT.shape[:2]
    padded = jnp.pad(x_BT, [(0, 0), (0, -T % BLOCK)] + [(0, 0)] * (x_BT.ndim - 2))
    return jnp.moveaxis(padded.reshape(B, -1, BLOCK, *x_BT.shape[2:]), 1, 0)


def run_probe(probe: Probe | None, seen: AttentionOutput, valid_BKTS: jax.Array, positions_BT: jax.Array) -> Any:
    """What `probe(scores_BNS, valid_BS)` tells of each row's newest query; `valid_BNS` where heads hold different keys.

    The newest is the last token that is not padding, the first in a row of padding.
    """
    if probe is None:
        return None
    B, K, G, _, S = seen.scores_BKGTS.shape
    rows, newest_B = jnp.arange(B), jnp.argmax(positions_BT, axis=1)
    scores_BNS = seen.scores_BKGTS[rows, :, :, newest_B].reshape(B, K * G, S)
    valid_BKS = valid_BKTS[rows, :, newest_B]
    return probe(scores_BNS, valid_BKS[:, 0] if valid_BKS.shape[1] == 1 else jnp.repeat(valid_BKS, G, axis=1))


def run_probe_on_store(
    probe: Probe | None,
    q_BTKGH: jax.Array,
    store: AnyStore,
    positions_BT: jax.Array,
    held_BKS: jax.Array,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Any:
    """`run_probe` where there are no scores: those of the newest queries are made for it."""
    if probe is None:
        return None
    rows, newest_B = jnp.arange(q_BTKGH.shape[0]), jnp.argmax(positions_BT, axis=1)
    q_B1KGH, positions_B1 = (x[rows, newest_B][:, None] for x in (q_BTKGH, positions_BT))
    valid_BK1S = causal_mask(positions_B1, held_BKS, window)
    return run_probe(probe, attention(q_B1KGH, store, valid_BK1S, softmax), valid_BK1S, positions_B1)

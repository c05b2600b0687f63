"""The attention layer, and scaled dot-product attention over a `Store` of keys and values.

Shapes: B batch, T query time, S key time, D model, K key/value heads, G query heads per key head, H
head size, V size of a value, N = K·G query heads, M = G·T queries of a key head, R queries of a
block, n blocks. A 1 stands for an axis of size 1.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.cache_store import AnyStore, ContiguousStore, SegmentedStore, StorePrefix
from dantinox.model.chunked_attention import QUERY_BLOCK
from dantinox.model.layers import (
    PLAIN_SOFTMAX,
    RMSNorm,
    Softmax,
    make_linear,
    make_rms_norm,
    softcap,
)
from dantinox.model.parallelism import Parallelism
from dantinox.model.positions import query_scaling, rotate

# The cosines and sines of a rotary embedding, `[B, T, H/2]` each; None: no rotation.
Angles = tuple[jax.Array, jax.Array] | None
# A function of (scores_BNS, valid_BS), see `run_probe`.
Probe = Callable[[jax.Array, jax.Array], Any]


class Attention(nnx.Module):
    """Causal grouped-query attention.

    `qkv` projects to the queries, keys and values. Its kernel `[D, K, G+2, H]` holds, for each key
    head, the G query heads, the key and the value. With `k_eq_v` the key is also the value, and the
    kernel is `[D, K, G+1, H]`. In a layer that reuses the keys and values of another layer the
    kernel is `[D, K, G, H]`. The kernel of `out` is `[K, G, H, D]`.

    Scores are divided by √H. With `query_pre_attn_scalar` = s the divisor is √s instead; for this,
    the queries are multiplied by √(H / s) first. With `sub_norms` the input of `out` is normalized
    over all heads (Wang et al. 2022, "Foundation Transformers": Sub-LN). `layer` is the index of
    the layer, from 0.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float
    ):
        self.window = config.windows[layer]
        kv_parts = config.kv_projections(layer)  # 0, 1 or 2
        config = config.of_layer(layer)  # the heads of this layer
        D, K, H = config.dim, config.kv_heads, config.head_size
        G = config.n_heads // K
        self.groups = G
        self.reuses_kv = kv_parts == 0
        linear = partial(make_linear, config, dtype=dtype, rngs=rngs)
        # Of the axis of size G + kv_parts: the queries, the key and the value.
        parts = (G,) + (1,) * kv_parts
        self.qkv = linear((D,), (K, sum(parts), H), parts=parts, bias=config.qkv_bias)
        self.out_norm = make_rms_norm(config, (K, G, H)) if config.sub_norms else None
        self.out = linear((K, G, H), (D,), gain=out_gain, bias=config.out_bias)
        self.norm_over_heads = config.qk_norm_scope == "layer"
        q_norm = k_norm = v_norm = None
        if config.qk_norm:
            q_norm = make_rms_norm(config, (K, G, H) if self.norm_over_heads else H)
        if config.qk_norm and not self.reuses_kv:
            k_norm = make_rms_norm(config, (K, H) if self.norm_over_heads else H)
        if config.v_norm and not self.reuses_kv:
            v_norm = RMSNorm(H, config.norm_epsilon, scaled=False)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.v_norm = v_norm
        self.norm_after_rope = config.qk_norm_after_rope
        scalar = config.query_pre_attn_scalar
        self.query_gain = 1.0 if scalar is None else math.sqrt(H / scalar)
        # A gate of the output: with it, heads need no attention sink to have no effect.
        self.gate = linear((D,), (K, G, H), bias=config.gate_bias) if config.no_sink else None
        self.query_scaling_beta = config.query_scaling_beta
        scaling = config.rope_scaling
        self.original_context = 1 if scaling is None else scaling.original_context
        self.cap = config.softcap
        sinks = nnx.Param(jnp.zeros((K, G), jnp.float32)) if config.sink_logits else None
        self.sinks = sinks

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        angles: Angles,
        layer_cache: Any,
        probe: Probe | None,
        parallelism: Parallelism,
    ) -> tuple[jax.Array, Any, Any]:
        """Returns the output `[B, T, D]`, the updated cache of the layer, and the result of the
        probe.
        """
        x_BTD = parallelism.copy_to_tp(x_BTD)
        qkv = self.qkv(x_BTD)
        # The gradient of a split is a concatenation. That of slices is a sum of padded arrays,
        # which is slower.
        starts = range(self.groups, qkv.shape[-2])  # of the key and the value, behind G queries
        q_BTKGH, *kv = jnp.split(qkv, [*starts], axis=-2)
        q_BTKGH = self._norm_and_rotate(q_BTKGH, self.q_norm, angles, parallelism)
        k_BTKH = v_BTKH = None
        if not self.reuses_kv:
            k_BTKH = kv[0].squeeze(-2)
            v_BTKH = kv[-1].squeeze(-2)  # with `k_eq_v`, the same projection
            k_BTKH = self._norm_and_rotate(k_BTKH, self.k_norm, angles, parallelism)
            v_BTKH = v_BTKH if self.v_norm is None else self.v_norm(v_BTKH)
        if self.query_gain != 1:
            q_BTKGH = q_BTKGH * self.query_gain
        if self.query_scaling_beta is not None:
            gain_BT = query_scaling(positions_BT, self.query_scaling_beta, self.original_context)
            # The gains are float32.
            q_BTKGH = (q_BTKGH * gain_BT[..., None, None, None]).astype(q_BTKGH.dtype)
        sinks_KG = None if self.sinks is None else self.sinks[...]
        softmax = Softmax(cap=self.cap, sinks_KG=sinks_KG)
        a_BTKGH, layer_cache, probed = layer_cache.attend(
            q_BTKGH, k_BTKH, v_BTKH, positions_BT, self.window, probe=probe, softmax=softmax
        )
        if self.gate is not None:
            a_BTKGH = a_BTKGH * jax.nn.sigmoid(self.gate(x_BTD))
        if self.out_norm is not None:
            a_BTKGH = self.out_norm(a_BTKGH)
        return self.out(a_BTKGH, reduce=parallelism.reduce_from_tp), layer_cache, probed

    def _norm_and_rotate(
        self,
        x: jax.Array,
        norm: Callable[..., jax.Array] | None,
        angles: Angles,
        parallelism: Parallelism,
    ) -> jax.Array:
        """Normalizes queries or keys and applies the rotary embedding, in the order of the
        config.
        """
        if norm is not None and self.norm_over_heads:
            norm = partial(norm, pmean=parallelism.pmean_heads)
        if norm is not None and not self.norm_after_rope:
            x = norm(x)
        if angles is not None:
            x = rotate(x, angles)
        if norm is not None and self.norm_after_rope:
            x = norm(x)
        return x


class AttentionOutput(NamedTuple):
    """The output of attention, the scores before mask and softmax, and the float32 softmax
    weights.
    """

    out_BTKGH: jax.Array
    scores_BKGTS: jax.Array
    weights_BKGTS: jax.Array


def attention(
    q_BTKGH: jax.Array, store: AnyStore, valid_BKTS: jax.Array, softmax: Softmax = PLAIN_SOFTMAX
) -> AttentionOutput:
    """Computes scaled dot-product attention (Vaswani et al. 2017, eq. 1) of grouped queries, with a
    float32 softmax.

    Args:
      valid_BKTS: the mask of the keys that each query attends to (the K axis may be 1). A query
        without valid keys gets the average of all values, or zeros if there are sinks; callers
        ignore the outputs of these queries.
    """
    if not isinstance(store, SegmentedStore):
        return _attention(q_BTKGH, store, valid_BKTS, softmax)

    # Only the segments that some row has reached are read; their scores are padded to all slots.
    def attend_prefix(prefix: StorePrefix) -> AttentionOutput:
        slots = prefix.ends[-1]
        output = _attention(q_BTKGH, prefix, valid_BKTS[..., :slots], softmax)
        padding = [(0, 0)] * 4 + [(0, store.slots - slots)]
        return AttentionOutput(
            output.out_BTKGH,
            jnp.pad(output.scores_BKGTS, padding),
            jnp.pad(output.weights_BKGTS, padding),
        )

    return store.apply_to_used(attend_prefix)


def _attention(
    q_BTKGH: jax.Array, store: ContiguousStore, valid_BKTS: jax.Array, softmax: Softmax
) -> AttentionOutput:
    """Computes `attention` over one store, or over the first segments of a `SegmentedStore`."""
    B, T, K, G, H = q_BTKGH.shape
    # One matrix multiplication per key head: with separate T and G axes, XLA would first transpose
    # the whole cache.
    q_BKMH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores_BKMS = store.scores(q_BKMH)
    scores_BKGTS = scores_BKMS.reshape(B, K, G, T, -1)
    if softmax.cap is not None:
        scores_BKGTS = softcap(scores_BKGTS, softmax.cap)
    lowest = jnp.finfo(jnp.float32).min
    masked_BKGTS = jnp.where(valid_BKTS[:, :, None], scores_BKGTS, lowest)
    ends = store.ends if isinstance(store, StorePrefix) else None
    weights_BKGTS = _softmax_weights(masked_BKGTS, softmax.sinks_KG, ends)
    out_BKMV = store.weighted_values(weights_BKGTS.reshape(scores_BKMS.shape), q_BTKGH.dtype)
    # [B, K, G, T, V] → [B, T, K, G, V]
    out_BTKGV = out_BKMV.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4)
    return AttentionOutput(out_BTKGV, scores_BKGTS, weights_BKGTS)


def _softmax_weights(
    scores_BKGTS: jax.Array, sinks_KG: jax.Array | None, ends: list[int] | None
) -> jax.Array:
    """Computes the softmax over the scores and the sink logits, and returns the weights without
    those of the sinks.

    With `ends`, the end of each segment, the exponentials are summed segment by segment. Segments
    after the last key of a row add zeros, so its result is bitwise the same without them.
    """
    if sinks_KG is None and ends is None:
        return jax.nn.softmax(scores_BKGTS, axis=-1)
    # −∞ stands for no sinks.
    sinks_KG11 = jnp.float32(-jnp.inf) if sinks_KG is None else sinks_KG[:, :, None, None]
    largest = jax.lax.stop_gradient(
        jnp.maximum(jnp.max(scores_BKGTS, axis=-1, keepdims=True), sinks_KG11)
    )
    weights = jnp.exp(scores_BKGTS - largest)
    splits = [] if ends is None else ends[:-1]
    parts = jnp.split(weights, splits, axis=-1)
    sums: jax.Array = sum(jnp.sum(part, axis=-1, keepdims=True) for part in parts)  # type: ignore[assignment]
    return weights / (sums + jnp.exp(sinks_KG11 - largest))


def causal_mask(query_BT: jax.Array, key_BKS: jax.Array, window: int | None) -> jax.Array:
    """Returns the mask `[B, K, T, S]`: causal, limited to the window (which includes the query),
    without padding keys.
    """
    query, key = query_BT[:, None, :, None], key_BKS[:, :, None, :]
    mask = (key <= query) & (key >= 0)
    return mask if window is None else mask & (query - key < window)


class StoreReadout(NamedTuple):
    """The result of attention over a store.

    Attributes:
      received_BKS: the attention that each key received: the sum of its weights over the counted
        queries, averaged over the query heads of the key head. With `use_max`, the largest of its
        weights. None if no queries are counted.
      probed: the result of the probe for the newest query of each row.
    """

    out_BTKGH: jax.Array
    received_BKS: Any
    probed: Any


def attend(
    q_BTKGH: jax.Array,
    store: AnyStore,
    positions_BT: jax.Array,
    key_positions_BKS: jax.Array,
    window: int | None,
    probe: Probe | None,
    counted_BT: jax.Array | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
    use_max: bool = False,
) -> StoreReadout:
    """Computes attention over a store. Many queries are processed in blocks, which bounds the
    memory for scores.

    Args:
      key_positions_BKS: the position in each slot (the B and K axes may be 1), negative for an
        empty slot.
      counted_BT: marks the queries that count for `received_BKS`.
      use_max: compute `received_BKS` as the maximum over queries and query heads.
    """
    B, T, K, G, H = q_BTKGH.shape

    def attend_block(
        received_BKS: jax.Array | None, block: Any, block_probe: Probe | None = None
    ) -> tuple[jax.Array | None, tuple[jax.Array, Any]]:
        """Adds a block of queries to what the keys have received; the body of a scan."""
        q_BRKGH, positions_BR, counted_BR = block
        valid_BKRS = causal_mask(positions_BR, key_positions_BKS, window)
        output = attention(q_BRKGH, store, valid_BKRS, softmax)
        if received_BKS is not None and use_max:
            counted = jnp.where(counted_BR[:, None, None, :, None], output.weights_BKGTS, 0)
            received_BKS = jnp.maximum(received_BKS, jnp.max(counted, axis=(2, 3)))
        elif received_BKS is not None:
            received_BKS += jnp.sum(
                output.weights_BKGTS * (counted_BR / G)[:, None, None, :, None], axis=(2, 3)
            )
        probed = run_probe(block_probe, output, valid_BKRS, positions_BR)
        return received_BKS, (output.out_BTKGH, probed)

    zero_BKS = None if counted_BT is None else jnp.zeros((B, K, store.slots), jnp.float32)
    queries = q_BTKGH, positions_BT, counted_BT
    if T <= QUERY_BLOCK:
        received_BKS, (out_BTKGH, probed) = attend_block(zero_BKS, queries, probe)
        return StoreReadout(out_BTKGH, received_BKS, probed)
    # Without the probe: the newest query of a row may be in any block.
    received_BKS, (out_nBRKGH, _) = jax.lax.scan(
        attend_block, zero_BKS, jax.tree.map(_split_into_blocks, queries)
    )
    # [n, B, R, …] → [B, n·R, …], without the queries that pad the last block.
    out_BnRKGH = jnp.moveaxis(out_nBRKGH, 0, 1)
    out_BTKGH = out_BnRKGH.reshape(B, -1, K, G, out_nBRKGH.shape[-1])[:, :T]
    probed = run_probe_on_store(
        probe, q_BTKGH, store, positions_BT, key_positions_BKS, window, softmax
    )
    return StoreReadout(out_BTKGH, received_BKS, probed)


def _split_into_blocks(x_BT: jax.Array) -> jax.Array:
    """[B, T, …] -> [n, B, QUERY_BLOCK, …]; the caller drops the results of the zeros at the end."""
    B, T = x_BT.shape[:2]
    missing = -T % QUERY_BLOCK  # to the next multiple
    padded = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    return jnp.moveaxis(padded.reshape(B, -1, QUERY_BLOCK, *x_BT.shape[2:]), 1, 0)


def run_probe(
    probe: Probe | None, output: AttentionOutput, valid_BKTS: jax.Array, positions_BT: jax.Array
) -> Any:
    """Calls the probe for the newest query of each row: `probe(scores_BNS, valid_BS)`, N being the
    number of query heads.

    If the heads have different masks, the second argument is `valid_BNS`. The newest query of a row
    is its last token that is not padding, or its first token if all tokens are padding.
    """
    if probe is None:
        return None
    B, K, G, _, S = output.scores_BKGTS.shape
    rows = jnp.arange(B)
    newest_B = jnp.argmax(positions_BT, axis=1)
    # [B, K, G, S]: NumPy puts the axis of separated indices first.
    scores_BNS = output.scores_BKGTS[rows, :, :, newest_B].reshape(B, K * G, S)
    valid_BKS = valid_BKTS[rows, :, newest_B]
    if valid_BKS.shape[1] == 1:
        return probe(scores_BNS, valid_BKS[:, 0])
    return probe(scores_BNS, jnp.repeat(valid_BKS, G, axis=1))


def run_probe_on_store(
    probe: Probe | None,
    q_BTKGH: jax.Array,
    store: AnyStore,
    positions_BT: jax.Array,
    key_positions_BKS: jax.Array,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Any:
    """Recomputes the scores of the newest queries and calls `run_probe`; for kernels that do not
    return scores.
    """
    if probe is None:
        return None
    rows = jnp.arange(q_BTKGH.shape[0])
    newest_B = jnp.argmax(positions_BT, axis=1)
    q_B1KGH = q_BTKGH[rows, newest_B][:, None]
    positions_B1 = positions_BT[rows, newest_B][:, None]
    valid_BK1S = causal_mask(positions_B1, key_positions_BKS, window)
    output = attention(q_B1KGH, store, valid_BK1S, softmax)
    return run_probe(probe, output, valid_BK1S, positions_B1)

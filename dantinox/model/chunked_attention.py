"""Causal attention in blocks of queries and keys, so that memory grows linearly with the length.

Only the scores of a few blocks are in memory at a time. The backward pass recomputes them from the log-normalizers (Rabe &
Staats 2021; Dao et al. 2022, algorithm 4). A block skips the keys after it, which saves almost half of the matrix
multiplications.

Shapes: N rows times key heads, G query heads per key head, T time, R queries of a block, S keys of a group, H head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.model.layers import PLAIN_SOFTMAX, Softmax

QUERY_BLOCK = 128  # queries per block
NUM_GROUPS = 8  # groups of blocks; the blocks of a group share one slice of the keys
MAX_SCORES = 1 << 23  # the most scores held at a time (32 MiB), which limits how many heads run together


def chunked_attention(
    q_BTKGH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Array:
    """Computes causal attention `[B, T, K, G, H]` of tokens at consecutive positions.

    The head size of the values may differ from H.

    Args:
      segments_BT: document numbers; attention never crosses documents. None: one document per row.
      window: the number of keys that a query attends to, including the key of its own token; None: no limit.
    """
    B, T, K, G, _ = q_BTKGH.shape
    blocks = -(-T // QUERY_BLOCK)
    span = min(T, QUERY_BLOCK) * -(-blocks // NUM_GROUPS)  # queries per group
    padding = -T % span
    segments_BT = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT

    def flatten_heads(x: Array) -> Array:  # [B, T, K, …] -> [B · K, T, …]
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded, 1, 2).reshape(B * K, T + padding, *x.shape[3:])

    q_NGTH = flatten_heads(q_BTKGH).swapaxes(1, 2)
    segments_NT = flatten_heads(jnp.broadcast_to(segments_BT[:, :, None], (B, T, K)))
    sinks_NG = None if softmax.sinks_KG is None else jnp.tile(softmax.sinks_KG, (B, 1))
    out_NGTH = _attend(window, span, softmax.cap, q_NGTH, flatten_heads(k_BTKH), flatten_heads(v_BTKH), segments_NT, sinks_NG)
    return out_NGTH[:, :, :T].reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(window: int | None, span: int, cap: float | None, *inputs: Array | None) -> Array:
    """Computes attention; `inputs` are `q_NGTH`, `k_NTH`, `v_NTH`, `segments_NT`, and `sinks_NG` or None."""
    return _forward(window, span, cap, *inputs)[0]


def _forward(window: int | None, span: int, cap: float | None, *inputs: Array | None) -> tuple[Array, tuple[Array | None, ...]]:
    # Without the barrier, masks would not depend on the layer. JAX would then compute those of all blocks before a loop over
    # layers, and keep them in memory.
    inputs = lax.optimization_barrier(inputs)

    def head(q_GTH: Array, k_TH: Array, v_TH: Array, segments_T: Array, sinks_G: Array | None) -> tuple[Array, Array]:
        outs, normalizers = [], []
        for first, low, high in _groups(k_TH.shape[0], span, window):

            def block(_: None, start: Array, first: int = first, low: int = low, high: int = high) -> tuple[None, Any]:
                q_GRH = _block_rows(q_GTH, start)
                scores_GRS = _scores(q_GRH, k_TH[low:high], segments_T, start, low, window, cap)[0]
                largest_GR1 = jnp.max(scores_GRS, axis=-1, keepdims=True)
                if sinks_G is not None:
                    largest_GR1 = jnp.maximum(largest_GR1, sinks_G[:, None, None])
                weights_GRS = jnp.exp(scores_GRS - largest_GR1)
                mass_GR1 = jnp.sum(weights_GRS, axis=-1, keepdims=True)
                if sinks_G is not None:
                    mass_GR1 += jnp.exp(sinks_G[:, None, None] - largest_GR1)
                out_GRH = einsum_float32("GRS,SH->GRH", weights_GRS.astype(q_GRH.dtype), v_TH[low:high]) / mass_GR1
                return None, (out_GRH.astype(q_GRH.dtype), (largest_GR1 + jnp.log(mass_GR1))[..., 0])

            out_nGRH, normalizer_nGR = lax.scan(block, None, _starts(first, span))[1]
            outs.append(_join_blocks(out_nGRH))
            normalizers.append(_join_blocks(normalizer_nGR))
        return jnp.concatenate(outs, axis=1), jnp.concatenate(normalizers, axis=1)

    out_NGTH, normalizer_NGT = over_heads(head, _block_scores(inputs), *inputs)
    return out_NGTH, (*inputs, out_NGTH, normalizer_NGT)


def _backward(
    window: int | None, span: int, cap: float | None, residuals: tuple[Array | None, ...], d_out_NGTH: Array
) -> tuple[Array | None, ...]:
    def head(
        q_GTH: Array,
        k_TH: Array,
        v_TH: Array,
        segments_T: Array,
        sinks_G: Array | None,
        out_GTH: Array,
        normalizer_GT: Array,
        d_out_GTH: Array,
    ) -> tuple[Array, Array, Array, Array | None]:
        size = q_GTH.shape[-1]
        # The derivative of the softmax subtracts Σ over keys of weight · d_weight, which equals out · d_out.
        mean_GT = jnp.sum(out_GTH.astype(jnp.float32) * d_out_GTH.astype(jnp.float32), axis=-1)
        d_q = []
        d_k_TH = jnp.zeros(k_TH.shape, jnp.float32)
        d_v_TH = jnp.zeros(v_TH.shape, jnp.float32)
        for first, low, high in _groups(k_TH.shape[0], span, window):
            k_SH, v_SH = k_TH[low:high], v_TH[low:high]

            def block(
                sums: tuple[Array, Array], start: Array, k_SH: Array = k_SH, v_SH: Array = v_SH, low: int = low
            ) -> tuple[tuple[Array, Array], Array]:
                q_GRH, d_out_GRH = _block_rows(q_GTH, start), _block_rows(d_out_GTH, start)
                scores_GRS, slope_GRS = _scores(q_GRH, k_SH, segments_T, start, low, window, cap)
                weights_GRS = jnp.exp(scores_GRS - _block_rows(normalizer_GT, start)[..., None])
                d_weights_GRS = einsum_float32("GRH,SH->GRS", d_out_GRH, v_SH)
                d_scores_GRS = weights_GRS * (d_weights_GRS - _block_rows(mean_GT, start)[..., None]) * size**-0.5
                d_scores_GRS = d_scores_GRS if slope_GRS is None else d_scores_GRS * slope_GRS
                weights_GRS, d_scores_GRS = weights_GRS.astype(v_SH.dtype), d_scores_GRS.astype(q_GRH.dtype)
                d_k_SH = einsum_float32("GRS,GRH->SH", d_scores_GRS, q_GRH)
                d_v_SH = einsum_float32("GRS,GRH->SH", weights_GRS, d_out_GRH)
                return (sums[0] + d_k_SH, sums[1] + d_v_SH), einsum_float32("GRS,SH->GRH", d_scores_GRS, k_SH)

            zero = jnp.zeros(k_SH.shape, jnp.float32), jnp.zeros(v_SH.shape, jnp.float32)
            (d_k_SH, d_v_SH), d_q_nGRH = lax.scan(block, zero, _starts(first, span))
            d_k_TH, d_v_TH = d_k_TH.at[low:high].add(d_k_SH), d_v_TH.at[low:high].add(d_v_SH)
            d_q.append(_join_blocks(d_q_nGRH))
        d_sinks_G = None if sinks_G is None else -jnp.sum(jnp.exp(sinks_G[:, None] - normalizer_GT) * mean_GT, axis=-1)
        d_q_GTH = jnp.concatenate(d_q, axis=1).astype(q_GTH.dtype)
        return d_q_GTH, d_k_TH.astype(k_TH.dtype), d_v_TH.astype(v_TH.dtype), d_sinks_G

    *d_qkv, d_sinks_NG = over_heads(head, _block_scores(residuals), *residuals, d_out_NGTH)
    return (*d_qkv, None, d_sinks_NG)


_attend.defvjp(_forward, _backward)


def _groups(length: int, span: int, window: int | None) -> list[tuple[int, int, int]]:
    """Returns `(first query, first key, end)` of each group; queries and keys have the same end."""
    return [(first, 0 if window is None else max(0, first - window + 1), first + span) for first in range(0, length, span)]


def _starts(first: int, span: int) -> Array:
    return first + jnp.arange(0, span, min(span, QUERY_BLOCK))


def _scores(
    q_GRH: Array, k_SH: Array, segments_T: Array, start: Array, low: int, window: int | None, cap: float | None
) -> tuple[Array, Array | None]:
    """Returns the scaled scores `[G, R, S]` in float32 and the derivative of the cap; None without a cap.

    Masked scores are the float32 minimum.
    """
    R, H, S = *q_GRH.shape[1:], k_SH.shape[0]
    query_R1 = (start + jnp.arange(R))[:, None]
    key_S = low + jnp.arange(S)
    mask_RS = key_S <= query_R1
    if window is not None:
        mask_RS &= query_R1 - key_S < window
    mask_RS &= lax.dynamic_slice_in_dim(segments_T, start, R)[:, None] == segments_T[low : low + S]
    return cap_and_mask(einsum_float32("GRH,SH->GRS", q_GRH, k_SH) * H**-0.5, mask_RS, cap)


def cap_and_mask(scores: Array, mask: Array, cap: float | None) -> tuple[Array, Array | None]:
    """Returns the capped scores, and the derivative of the cap; None without a cap. Masked scores are the float32 minimum."""
    least = jnp.finfo(jnp.float32).min
    if cap is None:
        return jnp.where(mask, scores, least), None
    tanh = jnp.tanh(scores / cap)
    return jnp.where(mask, cap * tanh, least), 1 - jnp.square(tanh)


def einsum_float32(axes: str, x: Array, y: Array) -> Array:
    """Multiplies arrays and sums the products in float32."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _block_rows(x_GT: Array, start: Array) -> Array:
    """Slices the queries of the block that begins at `start` from an array [G, T, …]."""
    return lax.dynamic_slice_in_dim(x_GT, start, min(QUERY_BLOCK, x_GT.shape[1]), axis=1)


def _join_blocks(x_nGR: Array) -> Array:
    """[n, G, R, …] -> [G, n · R, …]."""
    return jnp.moveaxis(x_nGR, 0, 1).reshape(x_nGR.shape[1], -1, *x_nGR.shape[3:])


def _block_scores(inputs: tuple[Any, ...]) -> int:
    """Returns the number of scores of a block of queries of one head; the first input is `q_NGTH`."""
    _, G, T, _ = inputs[0].shape
    return G * min(T, QUERY_BLOCK) * T


def over_heads(head: Callable, scores: int, *arrays: Any) -> Any:
    """Maps `head` over the first axis of arrays: over rows and key heads, in batches whose scores fit into `MAX_SCORES`.

    Args:
      scores: the number of scores that a call of `head` holds at a time.
    """
    N = len(jax.tree.leaves(arrays)[0])
    batch_size = max(1, MAX_SCORES // scores)
    return jax.vmap(head)(*arrays) if batch_size >= N else lax.map(lambda x: head(*x), arrays, batch_size=batch_size)

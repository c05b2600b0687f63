"""Causal attention in blocks of queries and keys, so that memory grows linearly with the length.

Only the scores of one pair of blocks per head are in memory at a time. One loop visits the pairs
that the mask does not exclude, and accumulates the softmax of each query (algorithm 3 of Milakov &
Gimelshein 2018). The backward pass recomputes the scores from the log-normalizers (Rabe & Staats
2021; Dao et al. 2022, algorithm 4). A longer sequence needs more iterations, but the program has
the same size. For a few short sequences there is no loop, because it would take longer.

Shapes: N rows times key heads, G query heads per key head, T time, R queries of a block, S keys of
a block, H head size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.model.layers import PLAIN_SOFTMAX, Softmax

QUERY_BLOCK = 128  # the fewest queries per block
MAX_QUERY_BLOCK, MAX_KEY_BLOCK = 256, 512
# The blocks of keys of a sequence, at most, unless they would have more than `MAX_KEY_BLOCK` keys.
KEY_BLOCKS = 8
# The most scores held at a time (32 MiB), which limits how many heads run together.
MAX_SCORES = 1 << 23
UNROLLED_SCORES = 1 << 24  # sequences with fewer scores have no loop
# Half of the score of a masked key: as the largest score so far, it gives masked keys the weight 0.
LEAST = float(np.finfo(np.float32).min) / 2


class Blocks(NamedTuple):
    """The static arguments of attention.

    Attributes:
      window: the number of keys that a query attends to, including the key of its own token; None:
        no limit.
      cap: the cap of the scores; None: no cap.
      queries, keys: the sizes of the blocks.
    """

    window: int | None
    cap: float | None
    queries: int
    keys: int


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
      window: the number of keys that a query attends to, including the key of its own token; None:
        no limit.
    """
    B, T, K, G, _ = q_BTKGH.shape
    smallest = max(QUERY_BLOCK, -(-T // KEY_BLOCKS))
    keys = min(1 << (smallest - 1).bit_length(), MAX_KEY_BLOCK)  # the next power of two
    queries = min(keys, MAX_QUERY_BLOCK)
    segments_BT = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT

    def flatten_heads(x: Array, block: int) -> Array:  # [B, T, K, …] -> [B · K, T, …]
        padded = jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded, 1, 2).reshape(B * K, -1, *x.shape[3:])

    q_NGTH = flatten_heads(q_BTKGH, queries).swapaxes(1, 2)
    k_NTH, v_NTH = flatten_heads(k_BTKH, keys), flatten_heads(v_BTKH, keys)
    segments_NT = flatten_heads(jnp.broadcast_to(segments_BT[:, :, None], (B, T, K)), keys)
    sinks_NG = None if softmax.sinks_KG is None else jnp.tile(softmax.sinks_KG, (B, 1))
    out_NGTH = _attend(
        Blocks(window, softmax.cap, queries, keys), q_NGTH, k_NTH, v_NTH, segments_NT, sinks_NG
    )
    return out_NGTH[:, :, :T].reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4)


def add_keys(
    sums: tuple[Array, Array, Array], scores: Array, weigh_values: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Adds keys to the softmax of queries (algorithm 3 of Milakov & Gimelshein 2018).

    Args:
      sums: for each query `[…]` the largest score so far, and the sum of the exponentials relative
        to it; and the sum `[…, V]` of the values with these weights.
      scores: those of the added keys, `[…, S]`.
      weigh_values: returns the sum `[…, V]` of the values of the added keys with weights `[…, S]`.
    """
    largest, mass, total = sums
    new = jnp.maximum(largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new[..., None])
    factor = jnp.exp(largest - new)
    return (
        new,
        mass * factor + jnp.sum(weights, axis=-1),
        total * factor[..., None] + weigh_values(weights),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, *inputs: Array | None) -> Array:
    """Computes attention; `inputs` are `q_NGTH`, `k_NTH`, `v_NTH`, `segments_NT`, and `sinks_NG` or
    None.
    """
    return _forward(blocks, *inputs)[0]


def _forward(blocks: Blocks, *inputs: Array | None) -> tuple[Array, tuple[Array | None, ...]]:
    # Without the barrier, masks would not depend on the layer. JAX would then compute those of all
    # blocks before a loop over layers, and keep them in memory.
    inputs = lax.optimization_barrier(inputs)

    def attend_heads(
        q_NGTH: Array, k_NTH: Array, v_NTH: Array, segments_NT: Array, sinks_NG: Array | None
    ) -> tuple[Array, Array]:
        def add_pair(sums: tuple[Array, ...], query: Any, key: Any, keys: int) -> tuple[Array, ...]:
            q_NGRH = _rows(q_NGTH, query, blocks)
            v_NSH = _keys(v_NTH, key, keys)
            largest_NGR, mass_NGR, total_NGRH = (_rows(x, query, blocks) for x in sums)
            scores_NGRS = _scores(q_NGRH, _keys(k_NTH, key, keys), segments_NT, query, key, blocks)[
                0
            ]
            updated = add_keys(
                (largest_NGR, mass_NGR, total_NGRH),
                scores_NGRS,
                lambda weights_NGRS: einsum_float32(
                    "NGRS,NSH->NGRH", weights_NGRS.astype(v_NSH.dtype), v_NSH
                ),
            )
            return tuple(_set_rows(x, rows, query) for x, rows in zip(sums, updated, strict=True))

        # The largest score, the sum of the exponentials and the weighted sum of the values. A sink
        # counts as a key without a value.
        shape = q_NGTH.shape[:-1]
        zeros_NGT = _zeros_after(q_NGTH, shape)
        least_NGT = zeros_NGT + (LEAST if sinks_NG is None else sinks_NG[..., None])
        total_NGTH = _zeros_after(q_NGTH, (*shape, v_NTH.shape[-1]))
        sums = least_NGT, zeros_NGT + float(sinks_NG is not None), total_NGTH
        largest_NGT, mass_NGT, total_NGTH = _over_pairs(add_pair, sums, shape, blocks)
        return (total_NGTH / mass_NGT[..., None]).astype(q_NGTH.dtype), largest_NGT + jnp.log(
            mass_NGT
        )

    out_NGTH, normalizer_NGT = _over_heads(attend_heads, blocks, *inputs)
    return out_NGTH, (*inputs, out_NGTH, normalizer_NGT)


def _backward(
    blocks: Blocks, residuals: tuple[Array | None, ...], d_out_NGTH: Array
) -> tuple[Array | None, ...]:
    def differentiate_heads(
        q_NGTH: Array,
        k_NTH: Array,
        v_NTH: Array,
        segments_NT: Array,
        sinks_NG: Array | None,
        out_NGTH: Array,
        normalizer_NGT: Array,
        d_out_NGTH: Array,
    ) -> tuple[Array, Array, Array, Array | None]:
        # The derivative of the softmax subtracts Σ over keys of weight · d_weight, which equals out
        # · d_out.
        mean_NGT = jnp.sum(out_NGTH.astype(jnp.float32) * d_out_NGTH.astype(jnp.float32), axis=-1)

        def add_pair(
            gradients: tuple[Array, ...], query: Any, key: Any, keys: int
        ) -> tuple[Array, ...]:
            q_NGRH, d_out_NGRH = _rows(q_NGTH, query, blocks), _rows(d_out_NGTH, query, blocks)
            k_NSH, v_NSH = _keys(k_NTH, key, keys), _keys(v_NTH, key, keys)
            scores_NGRS, slope_NGRS = _scores(q_NGRH, k_NSH, segments_NT, query, key, blocks)
            weights_NGRS = jnp.exp(scores_NGRS - _rows(normalizer_NGT, query, blocks)[..., None])
            d_weights_NGRS = einsum_float32("NGRH,NSH->NGRS", d_out_NGRH, v_NSH)
            d_scores_NGRS = weights_NGRS * (
                d_weights_NGRS - _rows(mean_NGT, query, blocks)[..., None]
            )
            d_scores_NGRS = d_scores_NGRS * q_NGTH.shape[-1] ** -0.5
            d_scores_NGRS = d_scores_NGRS if slope_NGRS is None else d_scores_NGRS * slope_NGRS
            weights_NGRS = weights_NGRS.astype(v_NSH.dtype)
            d_scores_NGRS = d_scores_NGRS.astype(q_NGRH.dtype)
            d_q_NGRH = einsum_float32("NGRS,NSH->NGRH", d_scores_NGRS, k_NSH)
            d_k_NSH = einsum_float32("NGRS,NGRH->NSH", d_scores_NGRS, q_NGRH)
            d_v_NSH = einsum_float32("NGRS,NGRH->NSH", weights_NGRS, d_out_NGRH)
            d_q_NGTH, d_k_NTH, d_v_NTH = gradients
            return (
                _set_rows(d_q_NGTH, _rows(d_q_NGTH, query, blocks) + d_q_NGRH, query),
                lax.dynamic_update_slice_in_dim(
                    d_k_NTH, _keys(d_k_NTH, key, keys) + d_k_NSH, key, 1
                ),
                lax.dynamic_update_slice_in_dim(
                    d_v_NTH, _keys(d_v_NTH, key, keys) + d_v_NSH, key, 1
                ),
            )

        zeros = tuple(_zeros_after(d_out_NGTH, x.shape) for x in (q_NGTH, k_NTH, v_NTH))
        gradients = _over_pairs(add_pair, zeros, q_NGTH.shape[:-1], blocks)
        d_q_NGTH, d_k_NTH, d_v_NTH = (
            gradient.astype(x.dtype)
            for gradient, x in zip(gradients, (q_NGTH, k_NTH, v_NTH), strict=True)
        )
        d_sinks_NG = (
            None
            if sinks_NG is None
            else -jnp.sum(jnp.exp(sinks_NG[..., None] - normalizer_NGT) * mean_NGT, axis=-1)
        )
        return d_q_NGTH, d_k_NTH, d_v_NTH, d_sinks_NG

    *d_qkv, d_sinks_NG = _over_heads(differentiate_heads, blocks, *residuals, d_out_NGTH)
    return (*d_qkv, None, d_sinks_NG)


_attend.defvjp(_forward, _backward)


def _over_pairs(
    pair: Callable, carry: tuple[Array, ...], shape: tuple[int, ...], blocks: Blocks
) -> tuple[Array, ...]:
    """Updates `carry` with `pair(carry, first query, first key, number of keys)` for all pairs of
    blocks.

    Args:
      shape: `[N, G, T]`. With few scores there is no loop, and each block of queries is paired with
        all its keys at once.
    """
    if math.prod(shape) * shape[-1] < UNROLLED_SCORES:
        for query, first in _first_keys(shape[-1], blocks):
            carry = pair(carry, query, first, query + blocks.queries - first)
        return carry
    pairs = np.array(_pairs(shape[-1], blocks), np.int32)
    return lax.scan(lambda carry, starts: (pair(carry, *starts, blocks.keys), None), carry, pairs)[
        0
    ]


def _zeros_after(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns float32 zeros that XLA can compute only after `x`.

    XLA would allocate constant zeros of all layers at the beginning of a program.
    """
    return jnp.broadcast_to((x.flatten()[0] > jnp.inf).astype(jnp.float32), shape)


def _first_keys(length: int, blocks: Blocks) -> list[tuple[int, int]]:
    """Returns the first query of each block of queries, and the first key that it attends to."""
    window = length if blocks.window is None else blocks.window
    return [(query, max(0, query - window + 1)) for query in range(0, length, blocks.queries)]


def _pairs(length: int, blocks: Blocks) -> list[tuple[int, int]]:
    """Returns the first query and the first key of each pair of blocks that the mask does not
    exclude.
    """
    return [
        (query, key)
        for query, first in _first_keys(length, blocks)
        for key in range(first // blocks.keys * blocks.keys, query + blocks.queries, blocks.keys)
    ]


def _scores(
    q_NGRH: Array, k_NSH: Array, segments_NT: Array, query: Any, key: Any, blocks: Blocks
) -> tuple[Array, Array | None]:
    """Returns the scaled scores `[N, G, R, S]` in float32 and the derivative of the cap; None
    without a cap.

    The queries begin at `query`, and the keys at `key`. Masked scores are the float32 minimum.
    """
    R, S = q_NGRH.shape[2], k_NSH.shape[1]
    query_R1 = query + jnp.arange(R)[:, None]
    key_S = key + jnp.arange(S)
    mask_RS = key_S <= query_R1
    if blocks.window is not None:
        mask_RS &= query_R1 - key_S < blocks.window
    segments_NR1 = _keys(segments_NT, query, R)[:, :, None]
    segments_N1S = _keys(segments_NT, key, S)[:, None]
    mask_NRS = mask_RS & (segments_NR1 == segments_N1S)
    scores_NGRS = einsum_float32("NGRH,NSH->NGRS", q_NGRH, k_NSH) * q_NGRH.shape[-1] ** -0.5
    return cap_and_mask(scores_NGRS, mask_NRS[:, None], blocks.cap)


def cap_and_mask(scores: Array, mask: Array, cap: float | None) -> tuple[Array, Array | None]:
    """Returns the capped scores, and the derivative of the cap; None without a cap. Masked scores
    are the float32 minimum.
    """
    least = jnp.finfo(jnp.float32).min
    if cap is None:
        return jnp.where(mask, scores, least), None
    tanh = jnp.tanh(scores / cap)
    return jnp.where(mask, cap * tanh, least), 1 - jnp.square(tanh)


def einsum_float32(axes: str, x: Array, y: Array) -> Array:
    """Multiplies arrays and sums the products in float32."""
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _rows(x_NGT: Array, query: Any, blocks: Blocks) -> Array:
    """Slices the queries of the block that begins at `query` from an array `[N, G, T, …]`."""
    return lax.dynamic_slice_in_dim(x_NGT, query, blocks.queries, axis=2)


def _set_rows(x_NGT: Array, rows_NGR: Array, query: Any) -> Array:
    """Replaces the queries of the block that begins at `query`."""
    return lax.dynamic_update_slice_in_dim(x_NGT, rows_NGR, query, axis=2)


def _keys(x_NT: Array, first: Any, count: int) -> Array:
    """Slices positions from an array `[N, T, …]`."""
    return lax.dynamic_slice_in_dim(x_NT, first, count, axis=1)


def _over_heads(heads: Callable, blocks: Blocks, *arrays: Any) -> Any:
    """Maps `heads` over rows and key heads, in equal parts whose scores fit into `MAX_SCORES`;
    `arrays` begin with `q_NGTH`.

    `heads` computes several heads itself: under `jax.vmap`, JAX would replace the slices by
    gathers, which copy whole arrays.
    """
    N, G, *_ = arrays[0].shape
    most = max(1, MAX_SCORES // (G * blocks.queries * blocks.keys))
    size = max(size for size in range(1, N + 1) if N % size == 0 and size <= most)
    if size == N:
        return heads(*arrays)
    parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), arrays)
    results = lax.map(lambda part: heads(*part), parts)
    return jax.tree.map(lambda x: x.reshape(N, *x.shape[2:]), results)

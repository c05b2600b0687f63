"""Ring attention: causal attention over sequences whose positions are split over devices.

Every device keeps its queries. The keys and values travel around the ring of devices, and each
device adds the contribution of the keys that it receives to a softmax, which it accumulates in
float32 (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context";
the accumulation is algorithm 3 of Milakov & Gimelshein 2018). The backward pass starts from the
queries, keys, values, outputs and log-normalizers of the device's own positions. It sends the keys
and values around again, together with their gradients.

With contiguous parts of a sequence, a causal mask would leave the first device almost without work.
Therefore n devices split a sequence into 2 n chunks, and device d holds the chunks d and 2 n - 1 -
d (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2). The keys of another device
are two chunks too. Of the four products of chunks, exactly two are not completely masked: that of
the later queries with the earlier keys, and that of one chunk of queries with the chunk of keys
that has the same index. A device computes only these two, and three products with its own keys: 2 n
+ 1 products instead of 4 n.

Shapes: N rows times key heads, C tokens of a chunk, G query heads per key head, R queries of a
block, S keys, H head size. The letter P stands for the two chunks of a device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.model.chunked_attention import (
    LEAST,
    MAX_SCORES,
    QUERY_BLOCK,
    add_keys,
    cap_and_mask,
    einsum_float32,
)
from dantinox.model.layers import PLAIN_SOFTMAX, Softmax
from dantinox.model.parallelism import Parallelism
from dantinox.model.positions import zigzag_positions

OWN_PRODUCTS = (0, 0), (1, 0), (1, 1)  # pairs (chunk of queries, chunk of keys)


def ring_attention(
    parallelism: Parallelism,
    q_BTKGH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None,
    window: int | None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Array:
    """Computes causal attention `[B, T, K, G, H]` of the tokens on this device to the tokens on all
    devices of the ring.

    The T tokens are at the positions `parallelism.local_positions(T)`. The head size of the values
    may differ from H.

    Args:
      parallelism: a parallelism with a ring of at least two devices; T must be even.
      segments_BT: document numbers; attention never crosses documents. None: one document per row.
      window: the number of keys that a query attends to, including the key of its own token; None:
        no limit.
    """
    B, T, K, G, _ = q_BTKGH.shape

    def split_chunks(x_BTK: Array) -> Array:  # [B, T, K, …] -> [2, B · K, C, …]
        x_BPCK = x_BTK.reshape(B, 2, T // 2, *x_BTK.shape[2:])
        return jnp.moveaxis(x_BPCK, (1, 3), (0, 2)).reshape(2, B * K, T // 2, *x_BTK.shape[3:])

    segments_BT = jnp.zeros((B, T), jnp.int32) if segments_BT is None else segments_BT
    segments_BTK = jnp.broadcast_to(segments_BT[:, :, None], (B, T, K))
    sinks_NG = None if softmax.sinks_KG is None else jnp.tile(softmax.sinks_KG, (B, 1))
    inputs = (*map(split_chunks, (q_BTKGH, k_BTKH, v_BTKH, segments_BTK)), sinks_NG)
    out_PNCGH = _attend(parallelism, window, softmax.cap, *inputs)
    out_PBKCGH = out_PNCGH.reshape(2, B, K, T // 2, G, -1)
    return jnp.moveaxis(out_PBKCGH, (0, 2), (1, 3)).reshape(B, T, K, G, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(parallelism: Parallelism, window: int | None, cap: float | None, *inputs: Any) -> Array:
    """Computes attention; `inputs` are `q_PNCGH`, `k_PNCH`, `v_PNCH`, `segments_PNC`, and
    `sinks_NG` or None.
    """
    return _forward(parallelism, window, cap, *inputs)[0]


def _forward(
    parallelism: Parallelism,
    window: int | None,
    cap: float | None,
    q_PNCGH: Array,
    k_PNCH: Array,
    v_PNCH: Array,
    segments_PNC: Array,
    sinks_NG: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    def block(mask_RS: Array, q_RGH: Array, keys: Any, sums: Any, _: Any) -> tuple[Any, Any]:
        k_SH, v_SH = keys

        def weigh_values(weights_RGS: Array) -> Array:
            return einsum_float32("RGS,SH->RGH", weights_RGS.astype(v_SH.dtype), v_SH)

        scores_RGS, _ = _scores(q_RGH, k_SH, mask_RS, cap)
        return add_keys(sums, scores_RGS, weigh_values), ()

    # The largest score, the sum of the exponentials and the weighted sum of the values. A sink
    # counts as a key without a value.
    least = jnp.float32(LEAST) if sinks_NG is None else sinks_NG[None, :, None]
    shape = q_PNCGH.shape[:-1]
    empty = (
        jnp.full(shape, least),
        jnp.full(shape, float(sinks_NG is not None)),
        jnp.zeros((*shape, v_PNCH.shape[-1])),
    )
    keys = k_PNCH, v_PNCH
    sums, _ = _around_ring(parallelism, window, block, segments_PNC, q_PNCGH, keys, empty, ())
    largest_PNCG, mass_PNCG, total_PNCGH = sums
    out_PNCGH = (total_PNCGH / mass_PNCG[..., None]).astype(q_PNCGH.dtype)
    normalizer_PNCG = largest_PNCG + jnp.log(mass_PNCG)
    return out_PNCGH, (q_PNCGH, k_PNCH, v_PNCH, segments_PNC, sinks_NG, out_PNCGH, normalizer_PNCG)


def _backward(
    parallelism: Parallelism,
    window: int | None,
    cap: float | None,
    residuals: tuple[Any, ...],
    d_out_PNCGH: Array,
) -> tuple[Array | None, ...]:
    q_PNCGH, k_PNCH, v_PNCH, segments_PNC, sinks_NG, out_PNCGH, normalizer_PNCG = residuals
    # The derivative of the softmax subtracts Σ over keys of weight · d_weight, which equals out ·
    # d_out.
    mean_PNCG = jnp.sum(out_PNCGH.astype(jnp.float32) * d_out_PNCGH.astype(jnp.float32), axis=-1)

    def block(
        mask_RS: Array, queries: Any, keys: Any, d_q_RGH: Array, d_keys: Any
    ) -> tuple[Array, Any]:
        q_RGH, d_out_RGH, normalizer_RG, mean_RG = queries
        k_SH, v_SH = keys
        d_k_SH, d_v_SH = d_keys
        scores_RGS, slope_RGS = _scores(q_RGH, k_SH, mask_RS, cap)
        weights_RGS = jnp.exp(scores_RGS - normalizer_RG[..., None])
        d_weights_RGS = einsum_float32("RGH,SH->RGS", d_out_RGH, v_SH)
        d_scores_RGS = weights_RGS * (d_weights_RGS - mean_RG[..., None]) * q_RGH.shape[-1] ** -0.5
        d_scores_RGS = d_scores_RGS if slope_RGS is None else d_scores_RGS * slope_RGS
        weights_RGS = weights_RGS.astype(v_SH.dtype)
        d_scores_RGS = d_scores_RGS.astype(q_RGH.dtype)
        d_k_SH = d_k_SH + einsum_float32("RGS,RGH->SH", d_scores_RGS, q_RGH)
        d_v_SH = d_v_SH + einsum_float32("RGS,RGH->SH", weights_RGS, d_out_RGH)
        return d_q_RGH + einsum_float32("RGS,SH->RGH", d_scores_RGS, k_SH), (d_k_SH, d_v_SH)

    inputs = q_PNCGH, k_PNCH, v_PNCH
    zero_q, *zero_kv = (jnp.zeros(x.shape, jnp.float32) for x in inputs)
    queries = q_PNCGH, d_out_PNCGH, normalizer_PNCG, mean_PNCG
    keys = k_PNCH, v_PNCH
    d_q, d_kv = _around_ring(
        parallelism, window, block, segments_PNC, queries, keys, zero_q, tuple(zero_kv)
    )
    d_q, d_k, d_v = (
        gradient.astype(x.dtype) for gradient, x in zip((d_q, *d_kv), inputs, strict=True)
    )
    if sinks_NG is None:
        return d_q, d_k, d_v, None, None
    sink_weights_PNCG = jnp.exp(sinks_NG[None, :, None] - normalizer_PNCG)
    return d_q, d_k, d_v, None, -jnp.sum(sink_weights_PNCG * mean_PNCG, axis=(0, 2))


_attend.defvjp(_forward, _backward)


def _scores(
    q_RGH: Array, k_SH: Array, mask_RS: Array, cap: float | None
) -> tuple[Array, Array | None]:
    """Returns the scaled scores `[R, G, S]` in float32 and the derivative of the cap; see
    `cap_and_mask`.
    """
    scores_RGS = einsum_float32("RGH,SH->RGS", q_RGH, k_SH) * q_RGH.shape[-1] ** -0.5
    return cap_and_mask(scores_RGS, mask_RS[:, None], cap)


class Chunks(NamedTuple):
    """Queries or keys: their positions `[…, C]`, the numbers of their documents `[…, N, C]`, and
    arrays `[…, N, C, …]`.
    """

    positions: Array
    segments: Array
    arrays: Any


# (mask_RS, arrays of queries, arrays of keys, result of the queries, result of the keys) -> the new
# results
Block = Callable[[Array, Any, Any, Any, Any], tuple[Any, Any]]


def _around_ring(
    parallelism: Parallelism,
    window: int | None,
    block: Block,
    segments_PNC: Array,
    queries: Any,
    keys: Any,
    query_result: Any,
    key_result: Any,
) -> tuple[Any, Any]:
    """Updates results with all products of the queries of this device with the keys of all devices.

    The keys and their result travel together. After a whole turn the result of the keys is back on
    their own device.

    Args:
      block: updates both results with a product of a block of queries with a chunk of keys.
      queries, keys, query_result, key_result: trees of arrays `[2, N, C, …]`.
    """
    n = parallelism.ring
    C = segments_PNC.shape[-1]
    # Without the barrier, the masks would not depend on the layer. JAX would then compute the masks
    # of all blocks before a loop over layers, and keep them in memory.
    places = parallelism.ring_index(), segments_PNC
    (index, segments_PNC), queries, keys = lax.optimization_barrier((places, queries, keys))

    def chunks(device: Any, segments_PNC: Array, arrays: Any) -> Chunks:
        return Chunks(zigzag_positions(device, n, 2 * C).reshape(2, C), segments_PNC, arrays)

    own = chunks(index, segments_PNC, queries)

    def visit(results: Any, travelling: Any, distance: Array | int) -> Any:
        """Adds the products with the keys of the device at this distance, which are here now."""
        device = (index - distance) % n
        # The later queries with the earlier keys; and the later chunks of both if the device is
        # later, else the earlier ones.
        pairs = jnp.stack([jnp.array([1, 0]), jnp.full(2, device > index, jnp.int32)])
        # The result of the keys arrives while the products are computed.
        arriving = parallelism.ring_shift(results[1])
        zero = jax.tree.map(jnp.zeros_like, results[1])
        query_result, added = _add_products(
            block, window, pairs, own, chunks(device, *travelling), (results[0], zero)
        )
        return query_result, jax.tree.map(jnp.add, arriving, added)

    def step(carry: Any, distance: Array) -> tuple[Any, None]:
        results, travelling = carry
        following = parallelism.ring_shift(travelling)  # sent while the products are computed
        return (visit(results, travelling, distance), following), None

    travelling = parallelism.ring_shift((segments_PNC, keys))
    own_keys = own._replace(arrays=keys)
    results = _add_products(
        block, window, jnp.array(OWN_PRODUCTS), own, own_keys, (query_result, key_result)
    )
    if n > 2:
        (results, travelling), _ = lax.scan(step, (results, travelling), jnp.arange(1, n - 1))
    query_result, key_result = visit(results, travelling, n - 1)
    return query_result, parallelism.ring_shift(key_result)


def _add_products(
    block: Block,
    window: int | None,
    pairs_X2: Array,
    queries: Chunks,
    keys: Chunks,
    results: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Updates the results with the products of pairs (chunk of queries, chunk of keys)."""

    def add(results: tuple[Any, Any], pair_2: Array) -> tuple[tuple[Any, Any], None]:
        sides = _take(queries, pair_2[0]), _take(keys, pair_2[1])
        old = _take(results[0], pair_2[0]), _take(results[1], pair_2[1])
        product = partial(_product, block, window, *sides)
        new = lax.cond(_overlap(window, *sides), product, lambda *unchanged: unchanged, *old)
        return (_put(results[0], pair_2[0], new[0]), _put(results[1], pair_2[1], new[1])), None

    return lax.scan(add, results, pairs_X2)[0]


def _overlap(window: int | None, queries: Chunks, keys: Chunks) -> Array:
    """Returns whether a query may attend to a key: whether windows and the numbers of documents of
    a row overlap.
    """
    first_N, last_N = (edge(queries.segments, axis=-1) for edge in (jnp.min, jnp.max))
    overlap = jnp.any(
        (jnp.max(keys.segments, axis=-1) >= first_N) & (jnp.min(keys.segments, axis=-1) <= last_N)
    )
    return (
        overlap
        if window is None
        else overlap & (queries.positions[0] - keys.positions[-1] < window)
    )


def _product(
    block: Block,
    window: int | None,
    queries: Chunks,
    keys: Chunks,
    query_result: Any,
    key_result: Any,
) -> tuple[Any, Any]:
    """Updates the results with the product of a chunk of queries with a chunk of keys, one block of
    queries at a time.
    """
    C = queries.positions.shape[0]
    G = jax.tree.leaves(queries.arrays)[0].shape[2]
    R = max(size for size in range(1, min(C, QUERY_BLOCK) + 1) if C % size == 0)

    def split(x_C: Array) -> Array:
        return x_C.reshape(-1, R, *x_C.shape[1:])

    def head(
        q_segments_C: Array, k_segments_S: Array, q: Any, k: Any, query_result: Any, key_result: Any
    ) -> tuple[Any, Any]:
        def step(key_result: Any, part: Any) -> tuple[Any, Any]:
            positions_R, segments_R, q, query_result = part
            distance_RS = positions_R[:, None] - keys.positions
            mask_RS = (distance_RS >= 0) & (segments_R[:, None] == k_segments_S)
            mask_RS = mask_RS if window is None else mask_RS & (distance_RS < window)
            query_result, key_result = block(mask_RS, q, k, query_result, key_result)
            return key_result, query_result

        blocks = jax.tree.map(split, (queries.positions, q_segments_C, q, query_result))
        key_result, found = lax.scan(step, key_result, blocks)
        return jax.tree.map(lambda x_nR: x_nR.reshape(C, *x_nR.shape[2:]), found), key_result

    arrays = queries.segments, keys.segments, queries.arrays, keys.arrays, query_result, key_result
    found: tuple[Any, Any] = _over_heads(head, R * G * C, *arrays)
    return found


def _take(tree: Any, chunk: Any) -> Any:
    return jax.tree.map(lambda x_P: lax.dynamic_index_in_dim(x_P, chunk, keepdims=False), tree)


def _put(tree: Any, chunk: Any, parts: Any) -> Any:
    return jax.tree.map(
        lambda x_P, part: lax.dynamic_update_index_in_dim(x_P, part, chunk, 0), tree, parts
    )


def _over_heads(head: Callable, scores: int, *arrays: Any) -> Any:
    """Maps `head` over the first axis of arrays: over rows and key heads, in batches whose scores
    fit into `MAX_SCORES`.

    Args:
      scores: the number of scores that a call of `head` holds at a time.
    """
    N = len(jax.tree.leaves(arrays)[0])
    batch_size = max(1, MAX_SCORES // scores)
    return (
        jax.vmap(head)(*arrays)
        if batch_size >= N
        else lax.map(lambda x: head(*x), arrays, batch_size=batch_size)
    )

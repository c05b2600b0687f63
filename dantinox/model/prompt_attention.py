"""Attention of the tokens of a prompt over a `SegmentedStore`, in blocks of slots up to the newest
token.

A loop over the blocks of each segment accumulates the softmax of every query (algorithm 3 of
Milakov & Gimelshein 2018), so the time grows with the tokens in the cache and not with its
capacity, and the program has few operations.

Shapes: B rows, T queries per row, K key heads, G query heads per key head, M = G · T, S slots of a
block, H head size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.model.attention import causal_mask
from dantinox.model.cache_store import SegmentedStore, Store
from dantinox.model.chunked_attention import LEAST, add_keys, cap_and_mask
from dantinox.model.layers import Softmax

MAX_BLOCK = 256  # slots
Sums = tuple[Array, Array, Array]  # see `chunked_attention.add_keys`


def attend_in_blocks(
    q_BTKGH: Array, store: SegmentedStore, positions_BT: Array, window: int | None, softmax: Softmax
) -> Array:
    """Computes attention `[B, T, K, G, V]` over a store whose slot s holds position s.

    The blocks depend only on the capacity of the store. A block after the end of a row adds zeros,
    so the length of other rows does not change a single bit. A query without keys gets zeros.

    Args:
      positions_BT: the positions of the queries, whose keys are in the store already; −1 marks
        padding.
      window: the number of keys that a query attends to, including the key of its own token; None:
        no limit.
    """
    B, T, K, G, H = q_BTKGH.shape
    q_BKMH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    positions_BM = jnp.tile(positions_BT, (1, G))
    largest_BKM = jnp.full((B, K, G * T), LEAST, jnp.float32)
    mass_BKM = jnp.zeros_like(largest_BKM)
    if softmax.sinks_KG is not None:  # a sink counts as a key without a value
        largest_BKM = jnp.broadcast_to(jnp.repeat(softmax.sinks_KG, T, axis=1), largest_BKM.shape)
        mass_BKM += 1

    def add_segment(sums: Sums, first: int, segment: Store) -> Sums:
        """Adds the used blocks of the segment whose slot 0 is slot `first` of the store."""
        size = min(MAX_BLOCK, segment.slots)

        def add_block(number: Array, sums: Sums) -> Sums:
            # The last block of a segment may overlap the one before it.
            start = jnp.minimum(number * size, segment.slots - size)
            block = segment.read_block(store.row, start, size)
            slot_S = first + start + jnp.arange(size)
            valid_B1MS = causal_mask(positions_BM, slot_S[None, None], window) & (
                slot_S >= first + number * size
            )
            scores_BKMS, _ = cap_and_mask(block.scores(q_BKMH), valid_B1MS, softmax.cap)
            return add_keys(sums, scores_BKMS, partial(block.weighted_values, dtype=jnp.float32))

        blocks = jnp.clip(-(-(store.used - first) // size), 0, -(-segment.slots // size))
        return jax.lax.fori_loop(0, blocks, add_block, sums)

    sums = largest_BKM, mass_BKM, jnp.zeros((B, K, G * T, store.sizes[1]), jnp.float32)
    for first, segment in store.segments_by_start:
        sums = add_segment(sums, first, segment)
    _, mass_BKM, total_BKMV = sums
    out_BKMV = total_BKMV / jnp.where(mass_BKM > 0, mass_BKM, 1)[..., None]
    return out_BKMV.astype(q_BTKGH.dtype).reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4)

"""Attention over segments in blocks, against a softmax in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.model.cache_store import SegmentedStore, Store
from dantinox.model.layers import Softmax
from dantinox.model.prompt_attention import MAX_BLOCK, attend_in_blocks

B, T, K, G, H, SLOTS = 2, 5, 2, 3, 8, 2500  # segments of 128, 192, 896 and 1284 slots


def filled_store(random, used, dtype=jnp.float32):
    """Returns a store with random keys and values in all slots, whose rows have used so many of
    them.
    """
    store = SegmentedStore.empty(B, SLOTS, lambda slots: Store.empty(B, K, (H, H), slots, dtype))
    k, v = random.normal(size=(2, B, SLOTS, K, H)).astype(np.float32)
    store = store.write(
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.broadcast_to(jnp.arange(SLOTS)[None, :, None], (B, SLOTS, 1)),
    )
    return SegmentedStore(store.segments, jnp.asarray(used, jnp.int32)), k, v


def expected(q, k, v, positions, window, cap, sinks):
    out = np.zeros_like(q, np.float64)
    for b, t, h, g in np.ndindex(*q.shape[:4]):
        seen = slice(max(0, positions[b, t] + 1 - (window or SLOTS)), positions[b, t] + 1)
        scores = k[b, seen, h].astype(np.float64) @ q[b, t, h, g] / np.sqrt(H)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h, g]))
        out[b, t, h, g] = weights @ v[b, seen, h] / total if len(weights) else 0
    return out


@pytest.mark.parametrize(
    ("window", "cap", "sinks"),
    [(None, None, False), (300, None, True), (None, 5.0, False)],
    ids=["plain", "window", "cap"],
)
def test_blocks_give_the_softmax_over_all_keys(window, cap, sinks):
    """The rows end in different segments; a query is padding. The error grows with the number of
    blocks, at most ten here.
    """
    random = np.random.default_rng(0)
    used = [70, 2400]
    store, k, v = filled_store(random, used)
    q = random.normal(size=(B, T, K, G, H)).astype(np.float32)
    positions = np.array(used)[:, None] - T + np.arange(T)
    positions[0, 4] = -1
    sinks_KG = random.normal(size=(K, G)).astype(np.float32) if sinks else None
    found = jax.jit(partial(attend_in_blocks, window=window, softmax=Softmax(cap, sinks_KG)))(
        q, store, positions
    )
    np.testing.assert_allclose(
        found, expected(q, k, v, positions, window, cap, sinks_KG), rtol=0, atol=1e-5
    )


def test_the_length_of_other_rows_changes_no_bit():
    random = np.random.default_rng(1)
    q = random.normal(size=(B, T, K, G, H)).astype(np.float32)
    positions = np.array([[95], [3]]) + np.arange(T)
    attend = jax.jit(partial(attend_in_blocks, window=None, softmax=Softmax()))
    (short, _, _), segments = filled_store(np.random.default_rng(2), [100, 8]), {}
    for used in (8, MAX_BLOCK, SLOTS):
        segments[used] = np.asarray(
            attend(q, SegmentedStore(short.segments, jnp.asarray([100, used])), positions)
        )[0]
    np.testing.assert_array_equal(segments[8], segments[MAX_BLOCK])
    np.testing.assert_array_equal(segments[8], segments[SLOTS])
    alone = attend(
        q[:1], SegmentedStore(short.segments, short.used_B, row=jnp.int32(0)), positions[:1]
    )
    np.testing.assert_allclose(alone[0], segments[8], rtol=0, atol=1e-6)

"""Selection without a sort in the form for accelerators, which other tests on a CPU do not run."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.sampling.selection import (
    _bit_by_bit,
    _by_ranks,
    _by_top_k,
    _digit_by_digit,
    _key_by_key,
    _nth_by_bisection,
    _nth_by_ranks,
    ordered_keys,
)

V = 1100  # three blocks, the last one not full
VALUES = np.float32([-np.inf, -1.0, 0.0, 1e-30, 0.5, 0.50000006, 3.0])
BYTES = st.binary(min_size=V, max_size=V).map(lambda text: np.frombuffer(text, np.uint8))
ROWS = BYTES.map(lambda numbers: VALUES[numbers % len(VALUES)])


@cache
def compiled(way, count):
    return jax.jit(partial(way, count))


@cache
def nth(way):
    return jax.jit(way)


@given(ROWS, st.sampled_from([1, 256, V]))
@settings(max_examples=25, deadline=None)
def test_top_k_by_id_matches_a_stable_sort(x, count):
    expected = np.sort(np.argsort(-x.astype(np.float64), kind="stable")[:count])
    for way in (_by_ranks, _by_top_k):
        found, ids = compiled(way, count)(x)
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(found, x[expected])


def test_ranks_treat_both_zeros_as_equal():
    x = np.asarray([-0.0, 1.0, 0.0, -2.0], np.float32)
    assert compiled(_by_ranks, 2)(x)[1].tolist() == [0, 1]


@given(BYTES.map(lambda numbers: numbers % 3 == 1), st.integers(-1, V + 1))
@settings(max_examples=25, deadline=None)
def test_the_nth_true_entry(hits, n):
    ids = np.flatnonzero(hits)
    expected = -1 if n < 1 or not len(ids) else ids[min(n, len(ids)) - 1]
    for way in (_nth_by_bisection, _nth_by_ranks):
        assert int(nth(way)(hits, np.float32(n))) == expected


KEYS = jax.jit(ordered_keys)
SEARCHES = _bit_by_bit, _digit_by_digit, _key_by_key


@jax.jit
def first_sum(least, keys_V, weights_V):
    return [way(lambda sums: sums >= least, keys_V, weights_V) for way in SEARCHES]


@jax.jit
def both_sums(bound, keys_V, weights_2V):
    return [way(lambda sums: sums[0] + 2 * sums[1] > bound, keys_V, weights_2V) for way in SEARCHES]


@pytest.mark.parametrize("least", [0.0, 0.3, 40.0, 1e9])
def test_all_searches_find_the_same_threshold(least):
    rng = np.random.default_rng(3)
    x, weights = rng.normal(size=V).astype(np.float32), rng.random(V).astype(np.float32)
    keys = np.asarray(KEYS(x))
    found = {int(key) for key in first_sum(np.float32(least), keys, weights)}
    descending = np.argsort(-x)
    enough = np.cumsum(weights[descending].astype(np.float64)) >= least
    none, all_of_them = least > weights.sum(), least == 0
    expected = 0 if none else 2**32 - 1 if all_of_them else int(keys[descending[np.argmax(enough)]])
    assert found == {expected}


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_of_several_weights_per_key(seed):
    """The largest key at which a condition on two sums holds, compared with a loop over all
    keys.
    """
    rng = np.random.default_rng(seed)
    x_V = np.float32(rng.integers(-9, 9, 300) / 4)
    weights_2V = np.float32(rng.integers(0, 5, (2, 300)))
    keys_V = np.asarray(KEYS(x_V))
    for bound in (0, 40, 350, 5000):
        sums = [(key, weights_2V[:, keys_V >= key].sum(axis=1)) for key in keys_V]
        expected = max(
            (key for key, (first, second) in sums if first + 2 * second > bound), default=0
        )
        found = [int(key) for key in both_sums(np.float32(bound), keys_V, weights_2V)]
        assert found == [expected] * 3

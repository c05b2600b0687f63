"""The draw: removed tokens, the ends of the unit interval, its keys, and the search that it
uses.
"""

import jax
import numpy as np
import pytest

from dantinox.sampling.draw import inverse_cdf_token, row_key
from dantinox.sampling.selection import blocks, first_crossing, nth_true

PICK, NTH_TRUE, BLOCKS = jax.jit(inverse_cdf_token), jax.jit(nth_true), jax.jit(blocks)


@pytest.mark.parametrize("V", [1, 7, 512, 513])
def test_the_ends_of_the_unit_interval_never_draw_removed_tokens(V):
    nearly_one = np.float32(1 - 2**-24)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x_V = np.full(V, -np.inf, np.float32)
        alive = np.unique(rng.integers(0, V, rng.integers(1, min(V, 6) + 1)))
        x_V[alive] = rng.choice(
            [0.0, -20.0, -30.0, 5.0], len(alive)
        )  # includes masses far below 1e-7
        for u in np.float32([0, 1e-8, 0.3, nearly_one, 1.0]):
            for v in np.float32([0, 1e-8, 0.7, nearly_one, 1.0]):
                assert int(PICK(x_V, np.array([u, v]))) in alive


def test_tokens_of_tiny_mass_can_be_drawn():
    # The second has the last 8e-7 of the interval.
    x_V = np.float32([0, -14, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf])
    assert int(PICK(x_V, np.float32([0, 1 - 2**-23]))) == 1
    assert int(PICK(x_V, np.float32([0, 0.5]))) == 0


def test_an_empty_row_returns_token_0():
    assert int(PICK(np.full(513, -np.inf, np.float32), np.float32([0.7, 0.2]))) == 0


def test_the_key_depends_only_on_seed_sample_and_position():
    numbers_N3 = np.uint32([*np.ndindex(3, 3, 3), (2**32 - 1, 5, 9)])

    @jax.jit
    @jax.vmap
    def keys(numbers):
        seed, sample, position = numbers
        expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
        return jax.random.key_data(row_key(*numbers)), jax.random.key_data(expected)

    found, expected = map(np.asarray, keys(numbers_N3))
    assert len({tuple(data) for data in found.tolist()}) == 28
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("V", [3, 512, 1300])
def test_nth_true_matches_a_loop(V):
    hit_V = np.random.default_rng(V).random(V) < 0.3
    hit_V[1] = True
    ids = np.flatnonzero(hit_V)
    for n in {1, 2, len(ids) // 2, len(ids)} & set(range(1, len(ids) + 1)):
        assert int(NTH_TRUE(hit_V, np.int32(n))) == ids[n - 1]
    assert int(NTH_TRUE(hit_V, np.int32(0))) == -1
    assert int(NTH_TRUE(hit_V, np.int32(V + 1))) == ids[-1]
    assert np.asarray(BLOCKS(np.ones(V, np.float32))).sum() == V


def test_first_crossing_has_positive_weight():
    index, before = jax.jit(lambda x: first_crossing(x, lambda total: 0.75 * total))(
        np.float32([0, 2, 0, 1, 0])
    )
    assert (int(index), float(before)) == (3, 2.0)

"""Compares a million draws with the exact distribution (Pearson's χ²), for a small and a large
vocabulary.
"""

import math
from functools import partial

import jax
import numpy as np
import pytest

from dantinox.sampling.draw import draw, row_key

DRAWS = 1_000_000
CHUNK = 10_000
MIN_EXPECTED = 10  # draws per cell
SIGNIFICANCE = 0.001


@partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3}
)  # running takes longer than compiling
def million(logits_V, numbers_N3):
    """Draws with the keys of (seed, sample_index, n_generated). Only the uniform numbers differ, so
    weights are summed once.
    """
    return jax.lax.map(
        lambda numbers: draw(logits_V, row_key(*numbers)), numbers_N3, batch_size=CHUNK
    )


def numbers(place, fixed=(7, 3, 5)):
    """Returns `fixed` with 0 … DRAWS − 1 at index `place`."""
    numbers_N3 = np.tile(np.uint32(fixed), (DRAWS, 1))
    numbers_N3[:, place] = np.arange(DRAWS)
    return numbers_N3


def small_row():
    """50 tokens, five of them removed; the rarest remaining one has probability 1.5e-5."""
    x_V = np.full(50, -np.inf, np.float32)
    rng = np.random.default_rng(0)
    x_V[rng.permutation(50)[:45]] = np.linspace(0, -9.5, 45)
    return x_V


def large_row():
    """128,000 tokens: some have a few percent, most less than 1e-6, and one in five is removed,
    including whole blocks.
    """
    rng = np.random.default_rng(1)
    x_V = rng.normal(0, 2.5, 128_000).astype(np.float32)
    x_V[rng.random(128_000) < 0.2] = -np.inf
    x_V[5000:7000] = -np.inf
    x_V[rng.permutation(128_000)[:6]] = np.float32([14, 13.5, 13, 12, 11.5, 11])
    return x_V


def expected_draws(x_V):
    weights_V = np.exp(np.float64(x_V) - np.max(x_V))
    return DRAWS * weights_V / weights_V.sum()


def p_value(counts_C, expected_C):
    """P(χ² at least as large), by the cube root approximation of Wilson and Hilferty (1931)."""
    assert round(counts_C.sum()) == DRAWS and expected_C.min() >= MIN_EXPECTED
    statistic = np.sum((counts_C - expected_C) ** 2 / expected_C)
    freedom = len(counts_C) - 1
    width = math.sqrt(2 / (9 * freedom))
    return math.erfc(((statistic / freedom) ** (1 / 3) - 1 + width**2) / width / math.sqrt(2)) / 2


def grouped(counts_V, expected_V, order_V=None):
    """Groups adjacent tokens of `order_V` to cells with enough expected draws; the last cell gets
    the rest.
    """
    order_V = np.argsort(-expected_V, kind="stable") if order_V is None else order_V
    cell, room, cell_V = 0, 0.0, np.empty(len(expected_V), int)
    for token in order_V:
        cell_V[token] = cell
        room += expected_V[token]
        if room >= MIN_EXPECTED:
            cell, room = cell + 1, 0.0
    cell_V[cell_V == cell] = max(cell - 1, 0)
    return np.bincount(cell_V, counts_V), np.bincount(cell_V, expected_V)


def counted(x_V, place):
    tokens_N = np.asarray(million(x_V, numbers(place)))
    counts_V = np.bincount(tokens_N, minlength=len(x_V))
    assert len(counts_V) == len(x_V) and counts_V[x_V == -np.inf].sum() == 0
    return tokens_N, counts_V


@pytest.mark.parametrize(
    "place",
    [*(pytest.param(i, marks=pytest.mark.slow) for i in range(2)), 2],
    ids=["seed", "sample_index", "n_generated"],
)
def test_a_million_draws_of_fifty_tokens(place):
    x_V = small_row()
    tokens_N, counts_V = counted(x_V, place)
    alive_V = x_V > -np.inf
    expected_V = expected_draws(x_V)
    assert p_value(counts_V[alive_V], expected_V[alive_V]) > SIGNIFICANCE
    # The test would detect a temperature of 0.99 instead of 1.
    assert p_value(counts_V[alive_V], expected_draws(x_V / 0.99)[alive_V]) < 1e-6

    # Consecutive tokens are independent: pairs of the six most likely tokens and all others.
    top = np.argsort(-expected_V)[:6]
    name_V = np.full(50, 6)
    name_V[top] = np.arange(6)
    share = np.append(expected_V[top], DRAWS - expected_V[top].sum()) / DRAWS
    pairs = np.bincount(name_V[tokens_N] * 7 + name_V[np.roll(tokens_N, 1)], minlength=49)
    assert p_value(pairs, DRAWS * np.outer(share, share).ravel()) > SIGNIFICANCE


@pytest.mark.slow
def test_a_million_draws_of_128_thousand_tokens():
    x_V = large_row()
    tokens_N, counts_V = counted(x_V, 2)
    expected_V = expected_draws(x_V)
    own = expected_V >= MIN_EXPECTED
    assert (
        own.sum() > 500 and (expected_V[x_V > -np.inf] < 1).sum() > 50_000
    )  # there are many cells of both kinds
    assert p_value(*grouped(counts_V, expected_V)) > SIGNIFICANCE
    # The draw chooses a block of ids and an index in it, so cells are adjacent ids, and equal
    # indices of all blocks.
    ids = np.arange(len(x_V))
    for order_V in (ids, np.lexsort((ids // 512, ids % 512))):
        assert p_value(*grouped(counts_V, expected_V, order_V)) > SIGNIFICANCE
    assert p_value(*grouped(counts_V, expected_draws(x_V / 0.99))) < 1e-6


def test_draws_with_shared_weights_equal_draws_of_a_batch():
    x_V, numbers_N3 = large_row()[4000:14_000], numbers(2)[:24]
    batch = jax.jit(jax.vmap(lambda logits_V, three: draw(logits_V, row_key(*three))))
    shared = jax.jit(
        lambda x_V, numbers_N3: jax.vmap(lambda three: draw(x_V, row_key(*three)))(numbers_N3)
    )
    np.testing.assert_array_equal(batch(np.tile(x_V, (24, 1)), numbers_N3), shared(x_V, numbers_N3))


@pytest.mark.parametrize(("cells", "statistic"), [(45, 30.0), (45, 44.0), (45, 80.0), (49, 60.0)])
def test_p_value_matches_its_closed_form(cells, statistic):
    """For an even number of degrees of freedom 2m: e^(−χ²/2) Σ_{i<m} (χ²/2)^i / i!."""
    expected_C = np.full(cells, DRAWS / cells)
    off = math.sqrt(
        statistic * DRAWS / cells / (cells - 1)
    )  # higher in half of the cells, lower in as many, exact in the last one
    counts_C = expected_C + np.append(np.tile([off, -off], cells // 2), 0)
    closed = math.exp(-statistic / 2) * sum(
        (statistic / 2) ** i / math.factorial(i) for i in range(cells // 2)
    )
    assert abs(p_value(counts_C, expected_C) - closed) < 0.03 * closed

"""A million draws against the exact distribution (Pearson's χ²), for a small vocabulary and for a large one."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.sampling.draw import draw, row_key

pytestmark = pytest.mark.slow

DRAWS = 1_000_000
CHUNK = 10_000
LEAST = 10  # draws that a cell must expect
SIGNIFICANCE = 0.001


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})  # it runs for longer than it is compiled
def million(logits_V, numbers_N3):
    """Draws with the keys of (seed, sample_index, n_generated); only the uniforms differ, so weights are summed once."""
    return jax.lax.map(lambda numbers: draw(logits_V, row_key(*numbers)), numbers_N3, batch_size=CHUNK)


def numbers(place, fixed=(7, 3, 5)):
    """`fixed`, but with 0 … DRAWS − 1 at `place`."""
    numbers_N3 = np.tile(np.uint32(fixed), (DRAWS, 1))
    numbers_N3[:, place] = np.arange(DRAWS)
    return numbers_N3


def small_row():
    """50 tokens, five of them removed; the rarest living one has a chance of 1.5e-5."""
    x_V = np.full(50, -np.inf, np.float32)
    rng = np.random.default_rng(0)
    x_V[rng.permutation(50)[:45]] = np.linspace(0, -9.5, 45)
    return x_V


def large_row():
    """128,000 tokens: some of a few percent, most below 1e-6, one in five removed, whole blocks among them."""
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
    """The chance of a χ² at least as large, by Wilson and Hilferty's cube root (1931)."""
    assert round(counts_C.sum()) == DRAWS and expected_C.min() >= LEAST
    statistic = np.sum((counts_C - expected_C) ** 2 / expected_C)
    freedom = len(counts_C) - 1
    width = math.sqrt(2 / (9 * freedom))
    return math.erfc(((statistic / freedom) ** (1 / 3) - 1 + width**2) / width / math.sqrt(2)) / 2


def grouped(counts_V, expected_V, order_V=None):
    """Cells of neighbours in `order_V`, each closed as soon as it expects enough draws; the last one takes what is left."""
    order_V = np.argsort(-expected_V, kind="stable") if order_V is None else order_V
    cell, room, cell_V = 0, 0.0, np.empty(len(expected_V), int)
    for token in order_V:
        cell_V[token] = cell
        room += expected_V[token]
        if room >= LEAST:
            cell, room = cell + 1, 0.0
    cell_V[cell_V == cell] = max(cell - 1, 0)
    return np.bincount(cell_V, counts_V), np.bincount(cell_V, expected_V)


def counted(x_V, place):
    tokens_N = np.asarray(million(jnp.asarray(x_V), numbers(place)))
    counts_V = np.bincount(tokens_N, minlength=len(x_V))
    assert len(counts_V) == len(x_V) and counts_V[x_V == -np.inf].sum() == 0
    return tokens_N, counts_V


@pytest.mark.parametrize("place", [0, 1, 2], ids=["seed", "sample_index", "n_generated"])
def test_a_million_draws_of_fifty_tokens(place):
    x_V = small_row()
    tokens_N, counts_V = counted(x_V, place)
    alive_V = x_V > -np.inf
    expected_V = expected_draws(x_V)
    assert p_value(counts_V[alive_V], expected_V[alive_V]) > SIGNIFICANCE
    # A temperature of 0.99 instead of 1 would be seen.
    assert p_value(counts_V[alive_V], expected_draws(x_V / 0.99)[alive_V]) < 1e-6

    # A token says nothing about the next one: pairs of the six most likely tokens and all others.
    top = np.argsort(-expected_V)[:6]
    name_V = np.full(50, 6)
    name_V[top] = np.arange(6)
    share = np.append(expected_V[top], DRAWS - expected_V[top].sum()) / DRAWS
    pairs = np.bincount(name_V[tokens_N] * 7 + name_V[np.roll(tokens_N, 1)], minlength=49)
    assert p_value(pairs, DRAWS * np.outer(share, share).ravel()) > SIGNIFICANCE


@pytest.mark.exhaustive
def test_a_million_draws_of_128_thousand_tokens():
    x_V = large_row()
    tokens_N, counts_V = counted(x_V, 2)
    expected_V = expected_draws(x_V)
    own = expected_V >= LEAST
    assert own.sum() > 500 and (expected_V[x_V > -np.inf] < 1).sum() > 50_000  # both kinds of cells are many
    assert p_value(*grouped(counts_V, expected_V)) > SIGNIFICANCE
    # The draw goes by blocks of ids and places in a block: neighbours by id, and equal places of all blocks, as cells.
    ids = np.arange(len(x_V))
    for order_V in (ids, np.lexsort((ids // 512, ids % 512))):
        assert p_value(*grouped(counts_V, expected_V, order_V)) > SIGNIFICANCE
    assert p_value(*grouped(counts_V, expected_draws(x_V / 0.99))) < 1e-6


def test_draws_that_share_their_weights_are_the_draws_of_a_batch():
    x_V, numbers_N3 = large_row(), numbers(2)[:24]
    batch = jax.jit(jax.vmap(lambda logits_V, three: draw(logits_V, row_key(*three))))
    np.testing.assert_array_equal(batch(np.tile(x_V, (24, 1)), numbers_N3), million(jnp.asarray(x_V), numbers_N3))


@pytest.mark.parametrize(("cells", "statistic"), [(45, 30.0), (45, 44.0), (45, 80.0), (49, 60.0)])
def test_the_p_value_agrees_with_its_closed_form(cells, statistic):
    """For an even number of degrees of freedom 2m: e^(−χ²/2) Σ_{i<m} (χ²/2)^i / i!."""
    expected_C = np.full(cells, DRAWS / cells)
    off = math.sqrt(statistic * DRAWS / cells / (cells - 1))  # up in half of the cells, down in as many, the last one exact
    counts_C = expected_C + np.append(np.tile([off, -off], cells // 2), 0)
    closed = math.exp(-statistic / 2) * sum((statistic / 2) ** i / math.factorial(i) for i in range(cells // 2))
    assert abs(p_value(counts_C, expected_C) - closed) < 0.03 * closed

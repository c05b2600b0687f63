"""Compares 500 random rows with the logits processors of Hugging Face Transformers (see
`make_peers.py`).

A row is skipped only if float32 cannot decide it: `margin` computes in float64 how close the row is
to another result.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.sampling import history, process_logits, steps

PEERS = dict(
    np.load(Path(__file__).with_name("peers.npz"))
)  # each access decompresses a whole array
SIZES = (12, 100, 128, 500)
ROWS = [(V, i) for V in SIZES for i in range(len(PEERS[f"logits_{V}"]))]
MAX_SKIPPED = 5  # rows; this file needs none


def inputs(name, V, i):
    """The row, the number of the step, and the token history."""
    x_V, said_S = PEERS[f"logits_{V}"][i].astype(np.float32), PEERS[f"text_{V}"][i]
    return x_V, PEERS[f"{name}_{V}"][i], said_S[said_S >= 0].tolist()


def theirs(name, V, i):
    return np.unpackbits(PEERS[f"kept_{name}_{V}"][i], count=V).astype(bool)


def no_repeat_ngram(x_V, n, said_S, length):
    return history.no_repeat_ngram(x_V, said_S, length, history.repeat_lengths(said_S, length), n)


def repetition_penalty(x_V, penalty, said_S, length):
    ids_S = jnp.where(jnp.arange(len(said_S)) < length, said_S, PADDED)
    return history.repetition_penalty(
        x_V, jnp.full(PADDED, -1).at[ids_S].set(0, mode="drop"), penalty
    )


PADDED = 512  # all rows are padded with removed tokens, so that each step is one program
STEPS = {
    "top_k all": lambda x_V, k, *_: steps.top_k(x_V, k, "all"),
    "top_k": lambda x_V, k, *_: steps.top_k(x_V, k),
    "top_p": lambda x_V, p, *_: steps.top_p(x_V, p),
    "min_p": lambda x_V, p, *_: steps.min_p(x_V, p),
    "typical all": lambda x_V, p, *_: steps.typical(x_V, p, "all"),
    "epsilon_cutoff": lambda x_V, eps, *_: steps.epsilon_cutoff(x_V, eps),
    "eta_cutoff": lambda x_V, eps, *_: steps.eta_cutoff(x_V, eps),
    "temperature": lambda x_V, t, *_: steps.temperature(x_V, t),
    "no_repeat_ngram": no_repeat_ngram,
    "repetition_penalty": repetition_penalty,
}


@cache
def ours(name, words=""):
    """Returns all rows after a step."""
    parts = [inputs(name, V, i) for V, i in ROWS]
    x_NV = np.stack(
        [np.pad(x_V, (0, PADDED - len(x_V)), constant_values=-np.inf) for x_V, _, _ in parts]
    )
    numbers_N = np.array([number for _, number, _ in parts])
    numbers_N = numbers_N.astype(np.float32 if numbers_N.dtype.kind == "f" else np.int32)
    said_NS = np.stack([np.resize(np.int32([*said, -1]), 64) for _, _, said in parts])
    lengths_N = np.array([len(said) for _, _, said in parts])
    y_NV = jax.jit(jax.vmap(STEPS[f"{name} {words}".strip()]))(x_NV, numbers_N, said_NS, lengths_N)
    return [y_V[:V] for y_V, (V, _) in zip(np.asarray(y_NV), ROWS, strict=True)]


def canonical(x_V):
    """Ids in canonical order, and ln P of all tokens in float64."""
    d_V = np.float64(x_V) - x_V.max()
    return np.lexsort((np.arange(len(x_V)), -d_V)), d_V - np.log(np.exp(d_V).sum())


def entropy(lnP_V):
    P_V = np.exp(lnP_V)
    return -np.sum(P_V * np.where(P_V > 0, lnP_V, 0))


def mass_before(lnP_V, order_V):
    P_V = np.exp(lnP_V[order_V])
    return np.cumsum(P_V) - P_V


def distance(lnP_V, threshold):
    return np.abs(lnP_V - threshold).min()


def margin(name, x_V, number):
    """Distance of the row to a different result, in mass or logits; two float32 calculations differ
    by about 1e-7.
    """
    order_V, lnP_V = canonical(x_V)
    number = float(number)
    match name:
        case "top_p":
            return np.abs(mass_before(lnP_V, order_V)[1:] - number).min()
        case "min_p":
            return distance(lnP_V, lnP_V.max() + np.log(number))
        case "epsilon_cutoff":
            return distance(lnP_V, np.log(number))
        case "eta_cutoff":
            return distance(lnP_V, min(np.log(number), np.log(number) / 2 - entropy(lnP_V)))
        case "typical":
            score_V = np.abs(-lnP_V - entropy(lnP_V))
            order_V = np.argsort(score_V, kind="stable")
            before_V = mass_before(lnP_V, order_V)
            last = order_V[before_V < number][-1]
            rivals = np.abs(score_V[x_V != x_V[last]] - score_V[last]).min(initial=np.inf)
            return min(
                np.abs(before_V[1:] - number).min(), rivals / 10
            )  # scores include an entropy, which is less exact
    return np.inf


def compare(name, check, words=""):
    """Runs `check(x_V, y_V, kept_V, number)` for every row that float32 can decide; y_V is our
    result, kept_V their mask.
    """
    left_out = 0
    for (V, i), y_V in zip(ROWS, ours(name, words), strict=True):
        x_V, number, _ = inputs(name, V, i)
        if margin(name, x_V, number) < 1e-6:
            left_out += 1
            continue
        kept_V = theirs(name, V, i)
        np.testing.assert_array_equal(y_V[y_V > -np.inf], x_V[y_V > -np.inf])
        check(x_V, y_V > -np.inf, kept_V, number)
    assert left_out <= MAX_SKIPPED


def same(x_V, mine_V, kept_V, number):
    np.testing.assert_array_equal(mine_V, kept_V)


def test_the_file_names_its_versions_and_contains_all_kinds_of_rows():
    assert "torch" in str(PEERS["versions"]) and "transformers" in str(PEERS["versions"])
    assert len(ROWS) == 500
    rows = [inputs("top_p", V, i)[0] for V, i in ROWS]
    assert sum((x_V == -np.inf).any() for x_V in rows) > 100
    assert sum(np.unique(x_V).size < x_V.size / 2 for x_V in rows) > 50  # ties
    chances = [np.exp(canonical(x_V)[1].max()) for x_V in rows]
    assert (
        sum(chance > 0.9 for chance in chances) > 30
        and sum(chance < 0.02 for chance in chances) > 50
    )


def test_top_k():
    """Transformers keeps every token equal to the k-th, like our `ties="all"`."""
    compare("top_k", same, "all")


def test_top_k_without_ties():
    def check(x_V, mine_V, kept_V, k):
        order_V = canonical(x_V)[0]
        alive = np.sum(x_V > -np.inf)
        assert (mine_V <= kept_V).all() and set(np.flatnonzero(mine_V)) == set(
            order_V[: min(int(k), alive)].tolist()
        )

    compare("top_k", check)


def test_top_p():
    """Transformers starts from the least likely token and does not define which equal tokens go; we
    remove the last by id.
    """
    split = 0

    def check(x_V, mine_V, kept_V, p):
        nonlocal split
        np.testing.assert_array_equal(np.sort(x_V[mine_V]), np.sort(x_V[kept_V]))
        edge = x_V == x_V[mine_V].min()
        np.testing.assert_array_equal(mine_V[~edge], kept_V[~edge])
        split += (mine_V != kept_V).any()
        assert (
            np.flatnonzero(mine_V & edge).tolist()
            == np.flatnonzero(edge)[: np.sum(mine_V & edge)].tolist()
        )

    compare("top_p", check)
    assert 0 < split < 150


def test_min_p():
    compare("min_p", same)


def test_typical():
    """Transformers keeps all tokens as close to the entropy as the last one, like our
    `ties="all"`.
    """
    compare("typical", same, "all")


@pytest.mark.parametrize("name", ["epsilon_cutoff", "eta_cutoff"])
def test_cutoffs(name):
    """If no token reaches the threshold, Transformers keeps all tokens as likely as the first, we
    keep only the first.
    """

    def check(x_V, mine_V, kept_V, eps):
        order_V, lnP_V = canonical(x_V)
        least = (
            np.log(eps)
            if name == "epsilon_cutoff"
            else min(np.log(eps), np.log(eps) / 2 - entropy(lnP_V))
        )
        if lnP_V.max() < least:
            assert np.flatnonzero(mine_V).tolist() == [order_V[0]]
            np.testing.assert_array_equal(kept_V, x_V == x_V.max())
        else:
            np.testing.assert_array_equal(mine_V, kept_V)

    compare(name, check)


def test_no_repeat_ngram():
    """Transformers may ban every token; we keep the first in canonical order."""
    banning, emptied = 0, 0

    def check(x_V, mine_V, kept_V, n):
        nonlocal banning, emptied
        banning += (kept_V != (x_V > -np.inf)).any()
        emptied += not kept_V.any()
        np.testing.assert_array_equal(
            mine_V, kept_V if kept_V.any() else np.arange(len(x_V)) == canonical(x_V)[0][0]
        )

    compare("no_repeat_ngram", check)
    assert banning > 200 and emptied >= 1


@pytest.mark.parametrize(("name", "key"), [("temperature", "t"), ("repetition_penalty", "penalty")])
def test_changed_logits(name, key):
    moved = 0
    for place, ((V, i), y_V) in enumerate(zip(ROWS, ours(name), strict=True)):
        (x_V, number, said), ids = inputs(name, V, i), PEERS[f"ids_{V}"][i]
        if place % 25 == 0:  # named steps compute the same bits
            step = {"name": name, key: float(number)}
            np.testing.assert_array_equal(
                y_V, np.asarray(process_logits(x_V[None], [step], [said]))[0]
            )
        np.testing.assert_allclose(y_V[ids], PEERS[f"{name}_values_{V}"][i], rtol=3e-7)
        untouched = np.setdiff1d(
            np.arange(V), said if name == "repetition_penalty" else np.arange(V)
        )
        np.testing.assert_array_equal(y_V[untouched], x_V[untouched])
        moved += (y_V[ids] != x_V[ids]).any()
    assert moved > 400

"""Compares the filters with sorting float64 references, and tests their properties."""

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from dantinox.sampling import history, steps

V = 40
TOP_K = {ties: jax.jit(partial(steps.top_k, ties=ties)) for ties in ("first", "all")}
TOP_P = {
    (rule, ties): jax.jit(partial(steps.top_p, rule=rule, ties=ties))
    for rule in ("inclusive", "exclusive")
    for ties in ("first", "all")
}
MIN_P, TYPICAL, SIGMA, XTC = map(
    jax.jit, (steps.min_p, steps.typical, steps.top_n_sigma, steps.xtc)
)
PENALTY, MIN_TOKENS, BAN = map(
    jax.jit, (history.repetition_penalty, history.min_tokens, history.ban)
)
SANITIZE = jax.jit(steps.sanitize)


def padded(*logits):
    """A row of V logits whose last ones are removed, for which the programs of V logits exist."""
    return np.float32([*logits, *[-np.inf] * (V - len(logits))])


def kept(x_V):
    return set(np.flatnonzero(np.asarray(x_V) > -np.inf).tolist())


def canonical(x_V):
    """Remaining tokens by descending logit, ties by ascending id, with their probabilities."""
    x_V = np.asarray(x_V, np.float64)
    order = [i for i in np.lexsort((np.arange(len(x_V)), -x_V)) if x_V[i] > -np.inf]
    weights = np.exp(x_V[order] - x_V[order[0]])
    return order, weights / weights.sum()


def with_ties(x_V, order, n, ties):
    return {i for i in order if x_V[i] >= x_V[order[n - 1]]} if ties == "all" else set(order[:n])


def reference_top_k(x_V, k, ties="first"):
    order, _ = canonical(x_V)
    return set(order) if k <= 0 else with_ties(x_V, order, min(k, len(order)), ties)


def reference_top_p(x_V, p, rule="inclusive", ties="first"):
    order, P = canonical(x_V)
    if p >= 1:
        return set(order)
    up_to = np.cumsum(P)
    n = int(np.sum(up_to - P < p)) if rule == "inclusive" else int(np.sum(up_to <= p))
    return with_ties(x_V, order, max(n, 1), ties)


def rows(seed, n, kind):
    rng = np.random.default_rng(seed)
    x_NV = rng.normal(size=(n, V)) * rng.uniform(0.1, 5, size=(n, 1))
    if kind == "ties":
        x_NV = np.round(x_NV)
    if kind == "masked":
        x_NV[rng.random((n, V)) < 0.6] = -np.inf
        x_NV[:, 7] = 1.0
    return x_NV.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("ties", ["first", "all"])
def test_top_k_matches_the_sorted_reference(kind, ties):
    for x_V, k in zip(
        rows(1, 30, kind), np.random.default_rng(2).integers(0, V + 5, 30), strict=True
    ):
        assert kept(TOP_K[ties](x_V, int(k))) == reference_top_k(x_V, k, ties)


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("rule", ["inclusive", "exclusive"])
@pytest.mark.parametrize("ties", ["first", "all"])
def test_top_p_matches_the_sorted_reference(kind, rule, ties):
    for x_V, p in zip(
        rows(3, 40, kind),
        np.random.default_rng(4).uniform(0, 1, 40).astype(np.float32),
        strict=True,
    ):
        order, P = canonical(x_V)
        if np.abs(np.cumsum(P) - p).min() > 1e-6:  # float32 cannot decide closer cases
            assert kept(TOP_P[rule, ties](x_V, p)) == reference_top_p(x_V, float(p), rule, ties)


@pytest.mark.parametrize("n", [32, 1024])
def test_exact_boundaries_of_equal_masses(n):
    x_V = padded(*[0] * n)
    for count in {1, 3, n // 2, n - 1}:
        p = np.float32(count / n)  # exact in binary
        assert kept(TOP_P["inclusive", "first"](x_V, p)) == set(range(count))
        assert kept(TOP_P["exclusive", "first"](x_V, p)) == set(range(count))
        assert kept(TOP_P["inclusive", "first"](x_V, np.nextafter(p, np.float32(2)))) == set(
            range(count + 1)
        )


def test_the_sign_of_zero_does_not_separate_equal_logits():
    x_V = padded(-0.0, 0.0, -0.0, 0.0, -1.0)
    assert kept(TOP_K["first"](x_V, 2)) == {0, 1}
    assert kept(TOP_K["all"](x_V, 2)) == {0, 1, 2, 3}


def test_large_rows_with_many_ties():
    """20k bfloat16 logits: groups of equal values at every threshold, and rows longer than a
    block.
    """
    x_V = (
        np.random.default_rng(3)
        .standard_normal(20_001)
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
    )
    assert kept(TOP_K["first"](x_V, 1000)) == reference_top_k(x_V, 1000)
    for p in (0.123, 0.9, 0.9995):
        got, expected = kept(TOP_P["inclusive", "first"](x_V, p)), reference_top_p(x_V, p)
        assert len(got ^ expected) <= 1  # 1e-7 of the mass is less than one token
        assert got == set(canonical(x_V)[0][: len(got)])


def test_min_p_compares_with_the_most_likely_token():
    for x_V in rows(5, 20, "plain"):
        P = np.exp(np.float64(x_V) - x_V.max())
        assert kept(MIN_P(x_V, 0.1)) == set(np.flatnonzero(P >= 0.1).tolist())
    assert kept(MIN_P(padded(1, 3, 3, 2), 1.0)) == {1, 2}


def test_repetition_penalty_with_window_and_slope():
    x_V, distance_V = np.float32([2.0, -2.0, 0.0, 3.0, -3.0]), np.int32([0, 1, 2, 3, -1])
    flat = PENALTY(x_V, distance_V, 2.0)
    np.testing.assert_array_equal(flat, [1.0, -4.0, 0.0, 1.5, -3.0])
    np.testing.assert_array_equal(
        PENALTY(x_V, distance_V, 2.0, 3, 0.0), [1.0, -4.0, 0.0, 3.0, -3.0]
    )
    u = 1 - 2 * np.array([0, 1, 2]) / 2
    P = 1 + (1.5 - 1) * (2.0 * u / (1 + np.abs(u) * 1.0) + 1) / 2
    np.testing.assert_allclose(
        PENALTY(x_V, distance_V, 1.5, 3, 2.0), [2 / P[0], -2 * P[1], 0, 3, -3], rtol=1e-6
    )


def test_minimum_tokens_ban_the_stop_ids_until_enough_are_generated():
    x_V = np.arange(5, dtype=np.float32)
    assert kept(MIN_TOKENS(x_V, 3, np.int32([4, 1, 2**31 - 1, -1]), 2)) == {0, 2, 3}
    assert kept(MIN_TOKENS(x_V, 3, np.int32([4, 1, -1, -1]), 3)) == {0, 1, 2, 3, 4}
    assert kept(BAN(x_V, np.arange(5, dtype=np.int32))) == {4}


def test_typical_keeps_tokens_closest_to_the_entropy():
    for x_V, p in zip(
        rows(8, 20, "plain"), np.random.default_rng(9).uniform(0.05, 0.95, 20), strict=True
    ):
        P = np.exp(np.float64(x_V) - x_V.max())
        P /= P.sum()
        order = np.argsort(np.abs(-np.log(P) + np.sum(P * np.log(P))), kind="stable")
        before = np.cumsum(P[order]) - P[order]
        if np.abs(before - p).min() > 1e-6:
            assert kept(TYPICAL(x_V, p)) == set(order[before < p].tolist())


def test_xtc_does_nothing_if_it_would_remove_a_protected_token():
    x_V = np.log(np.float32([0.3, 0.25, 0.25, 0.2]))
    assert kept(XTC(x_V, 0.22, 1.0, 0.0)) == {2, 3}
    assert kept(XTC(x_V, 0.22, 1.0, 0.0, np.array([False, False, True, True]))) == {2, 3}
    assert kept(XTC(x_V, 0.22, 1.0, 0.0, np.array([False, True, False, True]))) == {0, 1, 2, 3}


def test_sanitize_repairs_nan_and_inf():
    y_V, repaired = SANITIZE(np.float32([1, np.nan, -np.inf]))
    assert kept(y_V) == {0} and repaired
    y_V, repaired = SANITIZE(np.float32([1, np.inf, np.nan, np.inf]).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(y_V, [-np.inf, 0, -np.inf, 0])
    assert repaired and y_V.dtype == np.float32
    assert not SANITIZE(np.float32([1, 2, -np.inf]))[1]


def test_one_very_low_logit_does_not_distort_sigma():
    for depth in (-1e18, -1e30, -3.4e38):
        x_V = np.full(V, 1.0, np.float32)
        x_V[7] = depth
        assert kept(SIGMA(x_V, 1.0)) == set(range(V)) - {7}

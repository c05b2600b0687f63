"""The filters against float64 references that sort, and their laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.sampling import history, steps

V = 40
quick = settings(max_examples=25, deadline=None)
TOP_K = {ties: jax.jit(partial(steps.top_k, ties=ties)) for ties in ("first", "all")}
TOP_P = {
    (rule, ties): jax.jit(partial(steps.top_p, rule=rule, ties=ties))
    for rule in ("inclusive", "exclusive")
    for ties in ("first", "all")
}
MIN_P, TEMPERATURE, PENALTY = jax.jit(steps.min_p), jax.jit(steps.temperature), jax.jit(history.repetition_penalty)

DYNAMIC, SMOOTHING, TOP_A, TAIL_FREE, TYPICAL, EPSILON, ETA, SIGMA, XTC, MIROSTAT_1, MIROSTAT_2 = map(
    jax.jit,
    (
        steps.dynamic_temperature,
        steps.smoothing,
        steps.top_a,
        steps.tail_free,
        steps.typical,
        steps.epsilon_cutoff,
        steps.eta_cutoff,
        steps.top_n_sigma,
        steps.xtc,
        steps.mirostat_v1,
        steps.mirostat_v2,
    ),
)


def kept(x_V):
    return set(np.flatnonzero(np.asarray(x_V) > -np.inf).tolist())


def canonical(x_V):
    """Survivors by logit descending, ties by ascending id, with their probabilities."""
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
def test_top_k_is_the_head_of_the_sorted_row(kind, ties):
    for x_V, k in zip(rows(1, 30, kind), np.random.default_rng(2).integers(0, V + 5, 30), strict=True):
        assert kept(TOP_K[ties](x_V, int(k))) == reference_top_k(x_V, k, ties)


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("rule", ["inclusive", "exclusive"])
@pytest.mark.parametrize("ties", ["first", "all"])
def test_top_p_is_the_head_with_its_mass(kind, rule, ties):
    for x_V, p in zip(rows(3, 40, kind), np.random.default_rng(4).uniform(0, 1, 40).astype(np.float32), strict=True):
        order, P = canonical(x_V)
        if np.abs(np.cumsum(P) - p).min() > 1e-6:  # float32 cannot decide closer cases
            assert kept(TOP_P[rule, ties](x_V, p)) == reference_top_p(x_V, float(p), rule, ties)


@pytest.mark.parametrize("n", [32, 1024])
def test_exact_boundaries_of_equal_masses(n):
    x_V = jnp.zeros(n)
    for count in {1, 3, n // 2, n - 1}:
        p = np.float32(count / n)  # exact in binary
        assert kept(TOP_P["inclusive", "first"](x_V, p)) == set(range(count))
        assert kept(TOP_P["exclusive", "first"](x_V, p)) == set(range(count))
        assert kept(TOP_P["inclusive", "first"](x_V, np.nextafter(p, np.float32(2)))) == set(range(count + 1))


def test_the_sign_of_zero_does_not_separate_equal_logits():
    x_V = jnp.array([-0.0, 0.0, -0.0, 0.0, -1.0])
    assert kept(TOP_K["first"](x_V, 2)) == {0, 1}
    assert kept(TOP_K["all"](x_V, 2)) == {0, 1, 2, 3}


def test_large_rows_with_many_ties():
    """128k bfloat16 logits: whole groups of equal values at every edge, and rows longer than a block."""
    x_V = np.asarray(jax.random.normal(jax.random.key(3), (128_001,), jnp.bfloat16).astype(jnp.float32))
    assert kept(TOP_K["first"](x_V, 1000)) == reference_top_k(x_V, 1000)
    for p in (0.123, 0.9, 0.9995):
        got, expected = kept(TOP_P["inclusive", "first"](x_V, p)), reference_top_p(x_V, p)
        assert len(got ^ expected) <= 1  # 1e-7 of the mass is less than one token here
        assert got == set(canonical(x_V)[0][: len(got)])


def test_min_p_compares_with_the_most_likely_token():
    for x_V in rows(5, 20, "plain"):
        P = np.exp(np.float64(x_V) - x_V.max())
        assert kept(MIN_P(x_V, 0.1)) == set(np.flatnonzero(P >= 0.1).tolist())
    assert kept(steps.min_p(jnp.array([1.0, 3.0, 3.0, 2.0]), 1.0)) == {1, 2}


def test_repetition_penalty_with_window_and_slope():
    x_V, distance_V = np.float32([2.0, -2.0, 0.0, 3.0, -3.0]), np.int32([0, 1, 2, 3, -1])
    flat = PENALTY(x_V, distance_V, 2.0)
    np.testing.assert_array_equal(flat, [1.0, -4.0, 0.0, 1.5, -3.0])
    np.testing.assert_array_equal(PENALTY(x_V, distance_V, 2.0, 3, 0.0), [1.0, -4.0, 0.0, 3.0, -3.0])
    u = 1 - 2 * np.array([0, 1, 2]) / 2
    P = 1 + (1.5 - 1) * (2.0 * u / (1 + np.abs(u) * 1.0) + 1) / 2
    np.testing.assert_allclose(PENALTY(x_V, distance_V, 1.5, 3, 2.0), [2 / P[0], -2 * P[1], 0, 3, -3], rtol=1e-6)


def test_minimum_tokens_ban_the_stop_ids_until_enough_are_generated():
    x_V = jnp.arange(5.0)
    assert kept(history.min_tokens(x_V, 3, jnp.array([4, 1, 2**31 - 1, -1]), 2)) == {0, 2, 3}
    assert kept(history.min_tokens(x_V, 3, jnp.array([4, 1]), 3)) == {0, 1, 2, 3, 4}
    assert kept(history.ban(x_V, jnp.arange(5))) == {4}


OFF = {
    "top_k 0": lambda x: TOP_K["first"](x, 0),
    "top_k V": lambda x: TOP_K["first"](x, V),
    "top_p": lambda x: TOP_P["inclusive", "first"](x, 1.0),
    "top_p exclusive": lambda x: TOP_P["exclusive", "all"](x, 1.0),
    "min_p": lambda x: MIN_P(x, 0.0),
    "temperature": lambda x: TEMPERATURE(x, 1.0),
    "repetition_penalty": lambda x: PENALTY(x, jnp.zeros(V, jnp.int32), 1.0, 3, 2.0),
    "dynamic_temperature": lambda x: DYNAMIC(x, 1.0, 1.0, 2.0),
    "smoothing": lambda x: SMOOTHING(x, 0.0, 2.0),
    "top_a": lambda x: TOP_A(x, 0.0),
    "tail_free": lambda x: TAIL_FREE(x, 1.0),
    "typical": lambda x: TYPICAL(x, 1.0),
    "epsilon_cutoff": lambda x: EPSILON(x, 0.0),
    "eta_cutoff": lambda x: ETA(x, 0.0),
    "top_n_sigma": lambda x: SIGMA(x, 0.0),
    "xtc": lambda x: XTC(x, 0.1, 0.0, 0.0),
    "presence_frequency_penalty": lambda x: history.presence_frequency_penalty(x, jnp.ones(V), 0.0, 0.0),
    "logit_bias": lambda x: history.logit_bias(x, jnp.zeros(V)),
    "no_repeat_ngram": lambda x: history.no_repeat_ngram(x, jnp.zeros(8, jnp.int32), 8, 0),
    "dry": lambda x: history.dry(x, jnp.zeros(8, jnp.int32), 8, 0.0, 2.0, 1),
    "min_tokens": lambda x: history.min_tokens(x, 0, jnp.array([1]), 0),
}
STRANGE = np.float32([3.4e38, -3.4e38, -np.inf, -0.0, 0.0, 1e-40, -1e-40, 1.0] * (V // 8))


@pytest.mark.parametrize("name", OFF)
def test_a_disabled_step_returns_the_row_bit_for_bit(name):
    for x_V in [*rows(6, 3, "masked"), STRANGE, np.full(V, -np.inf, np.float32)]:
        np.testing.assert_array_equal(np.asarray(OFF[name](x_V)).view(np.uint32), x_V.view(np.uint32))


CUTS = {
    "top_k": lambda x, a: TOP_K["first"](x, int(a * V)),
    "top_p": lambda x, a: TOP_P["inclusive", "first"](x, a),
    "top_p exclusive": lambda x, a: TOP_P["exclusive", "first"](x, a),
    "top_p all": lambda x, a: TOP_P["exclusive", "all"](x, a),
    "min_p": lambda x, a: MIN_P(x, 1 - a),
}
logit = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 2.0, -3.4e38, 3.4e38]))
row = st.lists(logit, min_size=V, max_size=V).map(np.float32)
share = st.floats(0, 1, width=32)


@pytest.mark.parametrize("name", CUTS)
@quick
@given(x_V=row, a=share, b=share)
def test_cuts_grow_keep_bits_and_never_empty_a_row(name, x_V, a, b):
    small, large = (np.asarray(CUTS[name](x_V, value)) for value in sorted((a, b)))
    assert kept(small) <= kept(large) or (name == "top_k" and int(min(a, b) * V) == 0)
    alive = kept(x_V)
    assert bool(kept(small)) == bool(alive)
    if alive:
        assert int(np.argmax(x_V)) in kept(small)
    for y_V in (small, large):
        ids = sorted(kept(y_V))
        np.testing.assert_array_equal(y_V[ids].view(np.uint32), x_V[ids].view(np.uint32))
        assert not np.isnan(y_V).any()


@pytest.mark.parametrize("name", CUTS)
@quick
@given(halves=st.lists(st.integers(-40, 40), min_size=V, max_size=V), shift=st.integers(-60, 60), a=share)
def test_cuts_do_not_depend_on_a_common_shift(name, halves, shift, a):
    x_V = np.float32(halves) / 2  # sums are exact
    assert kept(CUTS[name](x_V, a)) == kept(CUTS[name](x_V + np.float32(shift), a))


@quick
@given(x_V=row, k=st.integers(1, V), p=st.integers(1, 16), seed=st.integers(0, 99))
def test_with_all_ties_a_permutation_permutes_the_result(x_V, k, p, seed):
    order = np.random.default_rng(seed).permutation(V)
    np.testing.assert_array_equal(TOP_K["all"](x_V[order], k), np.asarray(TOP_K["all"](x_V, k))[order])
    x_V = np.round(x_V / 4) * 1e-30  # equal masses: sums are exact in any order
    np.testing.assert_array_equal(
        TOP_P["inclusive", "all"](x_V[order], p / 17), np.asarray(TOP_P["inclusive", "all"](x_V, p / 17))[order]
    )


def test_extreme_numbers_never_make_nan_or_empty_a_row():
    for t in (0.0, 9e-6, 1e-5, 1e-3, 3.4e38):
        y_V = np.asarray(TEMPERATURE(STRANGE, t))
        assert not np.isnan(y_V).any() and not (y_V == np.inf).any() and kept(y_V)
    for penalty in (1.2e-38, 1e-3, 3.4e38):
        y_V = np.asarray(PENALTY(STRANGE, jnp.zeros(V, jnp.int32), penalty))
        assert not np.isnan(y_V).any() and kept(y_V) == kept(STRANGE)


def test_typical_keeps_what_is_least_surprising_first():
    for x_V, p in zip(rows(8, 20, "plain"), np.random.default_rng(9).uniform(0.05, 0.95, 20), strict=True):
        P = np.exp(np.float64(x_V) - x_V.max())
        P /= P.sum()
        order = np.argsort(np.abs(-np.log(P) + np.sum(P * np.log(P))), kind="stable")
        before = np.cumsum(P[order]) - P[order]
        if np.abs(before - p).min() > 1e-6:
            assert kept(TYPICAL(x_V, p)) == set(order[before < p].tolist())


EVERY_CUT = {
    "top_a": lambda x, a: TOP_A(x, 3 * a),
    "tail_free": TAIL_FREE,
    "typical": TYPICAL,
    "epsilon_cutoff": lambda x, a: EPSILON(x, a * 0.99),
    "eta_cutoff": lambda x, a: ETA(x, a * 0.99),
    "top_n_sigma": lambda x, a: SIGMA(x, 2 * a),
    "xtc": lambda x, a: XTC(x, a / 2, 1.0, 0.5),
    "mirostat_v1": lambda x, a: MIROSTAT_1(x, 10 * a),
    "mirostat_v2": lambda x, a: MIROSTAT_2(x, 10 * a - 1),
}


@pytest.mark.parametrize("name", EVERY_CUT)
@quick
@given(x_V=row, a=share)
def test_every_cut_keeps_bits_and_never_empties_a_row(name, x_V, a):
    y_V = np.asarray(EVERY_CUT[name](x_V, np.float32(a)))
    ids = sorted(kept(y_V))
    assert bool(ids) == bool(kept(x_V)) and not np.isnan(y_V).any()
    np.testing.assert_array_equal(y_V[ids].view(np.uint32), x_V[ids].view(np.uint32))


def test_changed_temperatures_stay_finite():
    for x_V in (*rows(11, 3, "masked"), STRANGE):
        for y_V in (DYNAMIC(x_V, 0.0, 2.0, 1.5), SMOOTHING(x_V, 3.0, 1.0), SMOOTHING(x_V, 0.3, 3.0)):
            assert kept(y_V) and not np.isnan(y_V).any() and not (np.asarray(y_V) == np.inf).any()


def test_xtc_spares_a_row_that_would_lose_a_protected_token():
    x_V = jnp.log(jnp.array([0.3, 0.25, 0.25, 0.2]))
    assert kept(steps.xtc(x_V, 0.22, 1.0, 0.0)) == {2, 3}
    assert kept(steps.xtc(x_V, 0.22, 1.0, 0.0, jnp.array([2, 3]))) == {2, 3}
    assert kept(steps.xtc(x_V, 0.22, 1.0, 0.0, jnp.array([1, 3]))) == {0, 1, 2, 3}


def test_entry_repairs_what_is_not_a_number():
    y_V, repaired = steps.sanitise(jnp.array([1.0, jnp.nan, -jnp.inf]))
    assert kept(y_V) == {0} and repaired
    y_V, repaired = steps.sanitise(jnp.array([1.0, jnp.inf, jnp.nan, jnp.inf], jnp.bfloat16))
    np.testing.assert_array_equal(y_V, [-np.inf, 0, -np.inf, 0])
    assert repaired and y_V.dtype == jnp.float32
    assert not steps.sanitise(jnp.array([1.0, -jnp.inf]))[1]

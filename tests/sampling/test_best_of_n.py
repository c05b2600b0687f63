"""Best of n: compares the closed form with the golden file, a sorting float64 reference, and
hundreds of thousands of draws.
"""

import json
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.sampling import best_of_n as module
from dantinox.sampling import steps
from dantinox.sampling.entropy_router import AttentionMetrics, Metrics, RouterConfig
from tests.error_texts import ERRORS

GOLDEN = json.loads(Path(__file__).with_name("entropy_router.json").read_text())
BEST = jax.jit(module.best_of_n)
EXPLICIT = jax.jit(module.best_candidate, static_argnames=("score_fn", "draws"))
CONFIDENCE, SCORE = jax.jit(module.confidence), jax.jit(module.guide_score)
METRICS = Metrics(1.0, 2.0)
DRAWS = 200_000
TUPLES = 20_000
MOST = 12  # candidates drawn; the first n of them count


@partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 3}
)  # running takes longer than compiling
def explicit(logits_V, raw_V, n):
    """Draws tokens with different keys, each the best of n candidates."""

    def one(number):
        return module.best_candidate(
            logits_V, raw_V, jax.random.fold_in(jax.random.key(11), number), METRICS, n, draws=MOST
        )

    return jax.lax.map(lambda number: one(number).token, jnp.arange(DRAWS), batch_size=20_000)


def reference(x_V, raw_V, n):
    """P(token) in float64 from a sort by model logit; tokens with equal logits share a rank."""
    w_V = np.exp(np.float64(x_V) - np.max(x_V))
    w_V /= w_V.sum()
    p_V = np.zeros(len(w_V))
    behind = 0.0
    for raw in sorted(set(raw_V[w_V > 0].tolist())):
        rank_V = raw_V == raw
        mass = w_V[rank_V].sum()
        if mass > 0:
            p_V[rank_V] = ((behind + mass) ** n - behind**n) * w_V[rank_V] / mass
        behind += mass
    return p_V


def rows(V=40, seed=0):
    """Model logits with ties, and the logits to draw from: other temperature, penalties that change
    the order, a filter.
    """
    rng = np.random.default_rng(seed)
    raw_V = np.round(rng.normal(0, 2, V) * 2).astype(np.float32) / 2
    x_V = raw_V / np.float32(1.7)
    x_V[rng.permutation(V)[: V // 4]] -= np.float32(1.3)
    x_V[np.argsort(-x_V)[24:]] = -np.inf
    return x_V, raw_V


def probabilities(x_V):
    weights_V = np.exp(np.float64(x_V) - np.max(x_V))
    return weights_V / weights_V.sum()


def p_value(counts_C, expected_C):
    """P(χ² at least as large), by the cube root approximation of Wilson and Hilferty (1931)."""
    statistic = np.sum((counts_C - expected_C) ** 2 / expected_C)
    freedom = len(counts_C) - 1
    width = math.sqrt(2 / (9 * freedom))
    return math.erfc(((statistic / freedom) ** (1 / 3) - 1 + width**2) / width / math.sqrt(2)) / 2


def cells(counts_V, chances_V):
    """Groups tokens by decreasing probability, rare ones together, so that every cell expects ten
    draws.
    """
    expected_V = DRAWS * chances_V
    rare_V = expected_V < 10
    assert counts_V[chances_V == 0].sum() == 0 and counts_V.sum() == DRAWS
    counts_C, expected_C = counts_V[~rare_V], expected_V[~rare_V]
    smallest = np.argmin(expected_C)
    counts_C[smallest] += counts_V[rare_V].sum()
    expected_C[smallest] += expected_V[rare_V].sum()
    return counts_C, expected_C


def test_golden_best_of_n():
    p_V = np.array(GOLDEN["best_of_n"]["1"])
    for n, expected in GOLDEN["best_of_n"].items():
        log_V = np.log(p_V).astype(np.float32)
        got = probabilities(BEST(log_V, log_V, int(n)))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=0)


def test_golden_confidence():
    for case in GOLDEN["cases"]:
        expected, ref = case["expect"], case["expect"]["ref"]
        seen = AttentionMetrics(
            ref["attn_entropy"],
            0.5,
            ref["attn_varentropy"],
            0.5,
            ref["agreement"],
            ref["interaction_strength"][0],
        )
        metrics = Metrics(expected["logits_entropy"], expected["logits_varentropy"], seen)
        got = np.float32(CONFIDENCE(metrics))
        np.testing.assert_allclose(
            got, expected["params_ref"]["adaptive"]["confidence"], rtol=1e-5, atol=1e-5
        )
        logprobs_N = np.float32(expected["candidate_logprobs_nats"])
        scores_64 = np.asarray(SCORE(np.zeros(64, np.int32), np.resize(logprobs_N, 64), metrics))
        # A sum of numbers up to 10, with an epsilon of 1.2e-7.
        np.testing.assert_allclose(
            scores_64[: len(logprobs_N)], logprobs_N[:64] + got, rtol=1e-6, atol=1.2e-6
        )
    # 1 − 0.5 and 1 − 2 are exact; the products and their sum round, by an epsilon (1.2e-7) of 0.3
    # at most.
    np.testing.assert_allclose(
        CONFIDENCE(METRICS._replace(entropy=0.5)), 0.5 * 0.1 - 0.3, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["peaked", "adaptive_staircase", "neg_inf_vocab_mask"])
def test_golden_candidate_logprobs(name):
    """The log-probabilities of the first tokens, as reported by explicit draws."""
    case = next(case for case in GOLDEN["cases"] if case["name"] == name)
    raw_V = np.float32([float(x) for x in case["logits"]])  # "-inf" is a string
    candidates = EXPLICIT(np.zeros_like(raw_V), raw_V, jax.random.key(0), METRICS, 64, draws=64)
    expected_V = np.array([float(x) for x in case["expect"]["candidate_logprobs_nats"]])[
        : len(raw_V)
    ]
    ids_N = np.asarray(candidates.ids)
    assert set(ids_N) == set(range(len(raw_V)))
    np.testing.assert_allclose(candidates.logprobs, expected_V[ids_N], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", [40, 1000])
def test_closed_form_matches_the_sorted_reference(V):
    for seed in range(20):
        x_V, raw_V = rows(V, seed)
        for n in (2, 5, 12, 4096):
            expected_V = reference(x_V, raw_V, n)
            got_V = np.exp(np.float64(BEST(x_V, raw_V, n)))
            np.testing.assert_allclose(got_V.sum(), 1, rtol=2e-5 + 3e-7 * n)
            known_V = expected_V > 1e-30
            np.testing.assert_allclose(got_V[known_V], expected_V[known_V], rtol=1e-4 + 1e-6 * n)
            assert got_V[~known_V].max() < 1e-29 and set(np.flatnonzero(got_V)) <= set(
                np.flatnonzero(x_V > -np.inf)
            )


def test_the_sign_of_the_weight_decides_between_most_and_least_likely():
    """A negative weight chooses the least likely candidate, 0 the first one; other weights shift
    all scores equally.
    """
    x_V, raw_V = rows(1000)
    explained = jax.jit(
        lambda x_V, raw_V, key, config: module.best_candidate(
            x_V, raw_V, key, METRICS, MOST, partial(module.guide_score, config=config), draws=MOST
        )
    )
    for weight, ranked_V in ((0.3, raw_V), (-2.0, -raw_V), (0.0, np.zeros_like(raw_V))):
        got_V = np.exp(np.float64(BEST(x_V, raw_V, 12, weight)))
        np.testing.assert_allclose(got_V, reference(x_V, ranked_V, 12), rtol=1e-4, atol=1e-9)
        config = RouterConfig(score_logprob=weight, score_entropy=5.0, score_varentropy=-3.0)
        found = explained(x_V, raw_V, jax.random.key(1), config)
        lifted_N = np.asarray(found.scores) - weight * np.asarray(found.logprobs)
        np.testing.assert_allclose(lifted_N, (1 - 1.0) * 5 + (1 - 2.0) * -3, rtol=1e-5)
        best = np.argmax(weight * np.asarray(found.logprobs)) if weight else 0
        assert found.token == found.ids[best]


@pytest.mark.parametrize("V", [40, 1000])
def test_one_candidate_does_not_change_the_row(V):
    x_V, raw_V = rows(V)
    np.testing.assert_array_equal(BEST(x_V, raw_V, 1), x_V)


def test_edge_cases_of_rows():
    nothing_V = np.full(40, -np.inf, np.float32)
    np.testing.assert_array_equal(BEST(nothing_V, nothing_V, 12), nothing_V)
    only_V = np.where(np.arange(40) == 7, np.float32(3), -np.inf)
    np.testing.assert_array_equal(
        BEST(only_V, np.zeros(40, np.float32), 12), np.where(np.arange(40) == 7, 0, -np.inf)
    )
    # All model logits are equal: there is one rank, so the distribution does not change.
    x_V = rows()[0]
    expected_V = np.where(x_V > -np.inf, np.log(np.maximum(probabilities(x_V), 1e-30)), -np.inf)
    np.testing.assert_allclose(
        BEST(x_V, np.zeros(40, np.float32), 12), expected_V, rtol=1e-6, atol=2e-6
    )
    # Probabilities down to e^-80 stay accurate.
    steep_V = np.float32(np.arange(40) * -2.0)
    chance = math.exp(-78) / np.exp(np.float64(steep_V)).sum()
    np.testing.assert_allclose(
        BEST(steep_V, -steep_V, 12)[39], math.log(-math.expm1(12 * math.log1p(-chance))), rtol=1e-6
    )


def test_full_windows():
    """256 tokens of a large vocabulary, the maximum of the router's top_k."""
    rng = np.random.default_rng(5)
    raw_V = rng.normal(0, 2, 1000).astype(np.float32)
    x_V = np.asarray(jax.jit(steps.top_k)(raw_V / np.float32(1.4), 256))
    got_V = np.exp(np.float64(BEST(x_V, raw_V, 12)))
    np.testing.assert_allclose(got_V, reference(x_V, raw_V, 12), rtol=1e-4, atol=1e-12)


def test_changing_the_number_of_candidates_does_not_recompile():
    best = jax.jit(jax.vmap(module.best_of_n))
    x_V, raw_V = rows(1000)
    together = best(np.stack([x_V] * 3), np.stack([raw_V] * 3), np.float32([1, 5, 12]))
    best(np.stack([raw_V] * 3), np.stack([raw_V] * 3), np.float32([7, 7, 1]))
    assert best._cache_size() == 1
    for row_V, n in zip(together, (1, 5, 12), strict=True):
        np.testing.assert_allclose(row_V, BEST(x_V, raw_V, n), rtol=1e-6)


def test_a_large_row_is_not_sorted(optimized):
    rows_BV, n_B = (
        jax.ShapeDtypeStruct((2, 50_000), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    )
    program = optimized(jax.jit(jax.vmap(module.best_of_n)).lower(rows_BV, rows_BV, n_B))
    assert not re.search(r"50000\]\S* sort\(", program.as_text())


@pytest.mark.parametrize("n", [1, 5, 12])
def test_explicit_draws_follow_the_closed_form(n):
    x_V, raw_V = rows()
    chances_V = probabilities(BEST(x_V, raw_V, n))
    counts_V = np.bincount(explicit(x_V, raw_V, n), minlength=len(x_V))
    assert p_value(*cells(counts_V, chances_V)) > 0.001
    assert p_value(*cells(counts_V, reference(x_V, raw_V, n))) > 0.001
    # The test would detect one more candidate, or ties that always go to the first token.
    assert p_value(*cells(counts_V, reference(x_V, raw_V, n + 1))) < 1e-6
    untied_V = raw_V - np.float32(1e-3) * np.arange(len(raw_V), dtype=np.float32)
    assert n == 1 or p_value(*cells(counts_V, reference(x_V, untied_V, n))) < 1e-6


def test_a_custom_score_function():
    x_V, raw_V = rows()

    def lowest_odd(ids_N, logprobs_N, metrics):
        return jnp.where(ids_N % 2 == 0, jnp.nan, metrics.varentropy - ids_N)

    for n in (4, MOST):
        token, ids_N, logprobs_N, scores_N = map(
            np.asarray,
            EXPLICIT(x_V, raw_V, jax.random.key(5), METRICS, n, score_fn=lowest_odd, draws=MOST),
        )
        counted_N = (np.arange(MOST) < n) & (ids_N % 2 == 1)
        assert token == ids_N[counted_N].min() and (ids_N[:n] % 2 == 0).any()
        np.testing.assert_array_equal(scores_N, np.where(counted_N, 2.0 - ids_N, -np.inf))
        np.testing.assert_allclose(logprobs_N, np.log(probabilities(raw_V))[ids_N], rtol=1e-5)
    assert (x_V[ids_N] > -np.inf).all() and len(set(ids_N.tolist())) > 3


@pytest.mark.parametrize(
    "score", [lambda ids, logprobs, metrics: logprobs[0], lambda *_: None, lambda ids, *_: ids[:2]]
)
def test_a_score_function_must_return_one_score_per_candidate(score):
    with pytest.raises(UserError, match=ERRORS["score_fn_must_return_one_score"]):
        EXPLICIT(
            np.zeros(5, np.float32),
            np.zeros(5, np.float32),
            jax.random.key(0),
            METRICS,
            3,
            score_fn=score,
            draws=3,
        )


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_candidates_given_a_token_are_distributed_like_n_draws(n):
    """Tuples of draws have the same distribution as independent draws, and the token is always the
    best, including ties.
    """
    raw_V = np.float32([1.0, 0.5, 0.5, -1.0, 2.0])
    x_V = np.float32([0.3, 0.9, 0.1, 0.4, -np.inf])

    def one(number, raw_V, x_V):
        key, own = jax.random.split(jax.random.fold_in(jax.random.key(5), number))
        token = jax.random.categorical(key, module.best_of_n(x_V, raw_V, n))
        return module.candidates_given_token(
            token, x_V, raw_V, own, METRICS, RouterConfig(candidates=n), draws=4
        )

    found = jax.jit(jax.vmap(one, (0, None, None)))(np.arange(TUPLES), raw_V, x_V)
    ids, scores = np.asarray(found.ids)[:, :n], np.asarray(found.scores)
    assert (scores[:, n:] == -np.inf).all() and np.isfinite(scores[:, :n]).all()
    raw = np.asarray(raw_V)
    assert (raw[ids].max(axis=1) == raw[np.asarray(found.token)]).all()
    first = ids[np.arange(TUPLES), raw[ids].argmax(axis=1)]
    assert (first == np.asarray(found.token)).all(), "of equal ones the first is taken"
    p_V = np.exp(np.float64(x_V))
    p_V /= p_V.sum()
    expected = np.ones(1)
    for _ in range(n):
        expected = np.multiply.outer(expected, p_V)
    counts = np.bincount(np.ravel_multi_index(tuple(ids.T), (5,) * n), minlength=5**n)
    deviation = np.sqrt(TUPLES * expected.ravel() * (1 - expected.ravel()))
    assert (np.abs(counts - TUPLES * expected.ravel()) <= 5 * deviation + 1e-9).all()

"""Compares the entropy router with the golden file and float64 references, and tests its
settings.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dantinox.config.router_settings import CALIBRATED_THRESHOLDS, RouterSection
from dantinox.sampling import entropy_router as router
from dantinox.sampling import steps
from dantinox.sampling.entropy_router import (
    ADAPTIVE,
    CLARIFY,
    EXPLORE,
    GREEDY,
    RESAMPLE,
    RULES,
    STRATEGIES,
    AttentionMetrics,
    Metrics,
    RouterConfig,
)

GOLDEN = json.loads(Path(__file__).with_name("entropy_router.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}


def attention_metrics(scores_LHT, valid_T):
    """The metrics of one row, from scores of the newest query over T keys; the mask is `valid_T` or
    `valid_LT`.
    """
    L, _, T = scores_LHT.shape
    return router.combine_layers(
        jax.vmap(router.layer_attention)(scores_LHT, jnp.broadcast_to(valid_T, (L, T)))
    )


LOGITS, ATTENTION, GUIDE_METRICS, ROUTE, ROUTES, LAYER = map(
    jax.jit,
    (
        router.logit_metrics,
        attention_metrics,
        router.guide_metrics,
        router.route,
        jax.vmap(router.route, (0, None)),
        router.layer_attention,
    ),
)
GUIDE = RouterConfig()
FILTERS = jax.jit(
    lambda x_V, t, k, p, m: steps.min_p(
        steps.top_p(steps.top_k(steps.temperature(x_V, t), k), p), m
    )
)
MEDIAN = {name: 0.5 + number / 4 for number, name in enumerate(CALIBRATED_THRESHOLDS)}
CALIBRATED = RouterConfig.build(RouterSection(router_preset="calibrated"), MEDIAN)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Thresholds with which every row uses one strategy.
SCORE = {field.name for field in fields(RouterConfig) if field.name.startswith("score_")}
FORCED = {
    "clarify_followup": {"low_entropy": -1, "clarify_entropy": -1, "low_varentropy": math.inf},
    "explore": {
        "low_entropy": -1,
        "clarify_entropy": math.inf,
        "high_entropy": math.inf,
        "high_varentropy": -1,
    },
    "resample": {
        "low_entropy": -1,
        "clarify_entropy": math.inf,
        "high_entropy": -1,
        "high_varentropy": -1,
    },
    "adaptive": {"low_entropy": -1, "clarify_entropy": math.inf, "high_varentropy": math.inf},
}


def logits_of(case):
    return np.float32([float(x) for x in case["logits"]])  # "-inf" is a string


def scores_of(case):
    return np.float32(case["attn_scores"]).reshape(case["attn_shape_LHT"])


def assert_clean(metrics, expected):
    names = {"attn_disagreement": "disagreement_tv", "attn_agreement": "agreement"}
    for name, value in metrics._asdict().items():
        np.testing.assert_allclose(value, expected[names.get(name, name)], **CLOSE, err_msg=name)


def assert_literal(metrics, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, **CLOSE, err_msg=name)


def reference_logits(x_V):
    p_V = np.exp(np.float64(x_V) - np.max(x_V))
    p_V /= p_V.sum()
    bits_V = np.log2(p_V, where=p_V > 0, out=np.zeros_like(p_V))
    H = -np.sum(p_V * bits_V)
    return H, np.sum(p_V * (bits_V + H) ** 2)


def reference_attention(scores_LHT, valid_LT):
    """The definitions, with valid keys selected from the cache instead of masked."""
    layers = []
    for scores_HT, valid_T in zip(np.float64(scores_LHT), valid_LT, strict=True):
        scores_HS = scores_HT[:, valid_T]
        e_H = np.array([reference_logits(s)[0] for s in scores_HS])
        a_HS = np.exp(scores_HS - scores_HS.max(1, keepdims=True))
        a_HS /= a_HS.sum(1, keepdims=True)
        apart = np.mean([0.5 * np.abs(a - a_HS.mean(0)).sum() for a in a_HS])
        norm = e_H.mean() / math.log2(valid_T.sum()) if valid_T.sum() > 1 else 0
        layers.append((e_H.mean(), norm, e_H.var(), apart, 1 - apart, np.abs(scores_HS).mean()))
    return np.mean(layers, axis=0)


@pytest.mark.parametrize("name", CASES)
def test_golden_metrics(name):
    case = CASES[name]
    expected, logits_V, scores_LHT = case["expect"], logits_of(case), scores_of(case)
    entropy, varentropy = LOGITS(logits_V)
    for ln2, suffixes in (
        (1, ("entropy", "varentropy")),
        (math.log(2), ("entropy_nats", "varentropy_nats2")),
    ):
        np.testing.assert_allclose(entropy * ln2, expected[f"logits_{suffixes[0]}"], **CLOSE)
        np.testing.assert_allclose(varentropy * ln2**2, expected[f"logits_{suffixes[1]}"], **CLOSE)
    assert_clean(ATTENTION(scores_LHT, np.array(case["valid"])), expected["clean"])
    literal = GUIDE_METRICS(logits_V[None], scores_LHT[-1][None, :, None])
    assert_literal(literal, expected["ref"])
    np.testing.assert_allclose(
        [literal["logits_entropy"], literal["logits_varentropy"]], [entropy, varentropy], **CLOSE
    )


@pytest.mark.parametrize("name", CASES)
def test_golden_strategies_and_parameters(name):
    case = CASES[name]
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
    assert STRATEGIES[ROUTE(metrics, GUIDE).strategy] == expected["strategy"]
    for strategy, thresholds in FORCED.items():
        got = ROUTE(metrics, replace(GUIDE, **thresholds))
        assert STRATEGIES[got.strategy] == strategy.removesuffix("_followup")
        for parameter in ("temperature", "top_p", "top_k", "min_p"):
            np.testing.assert_allclose(
                getattr(got, parameter), expected["params_ref"][strategy][parameter], **CLOSE
            )


def test_golden_mask_effects():
    expected, case = GOLDEN["mask_effects"], CASES["padded_cache"]
    x_V, scores_LHT, valid_T = logits_of(case), scores_of(case), np.array(case["valid"])
    finite_mask = np.where(valid_T, scores_LHT, np.float32(-0.7 * np.finfo(np.float32).max))
    for name, masked_LHT in (("raw_zero_slots", scores_LHT), ("big_negative_mask", finite_mask)):
        assert_literal(GUIDE_METRICS(x_V[None], masked_LHT[-1][None, :, None]), expected[name])
        assert_clean(ATTENTION(masked_LHT, valid_T), expected["truth_valid_only"])
    for length, entropy in expected["zero_slots_T4096"].items():
        scores_BHQT = np.zeros((1, 1, 1, 4096), np.float32)
        scores_BHQT[..., : int(length)] = 1.0
        np.testing.assert_allclose(
            GUIDE_METRICS(x_V[None], scores_BHQT)["attn_entropy"], entropy, **CLOSE
        )


def test_golden_batch_coupling():
    expected = GOLDEN["batch_coupling"]
    rows = np.float32(expected["rows"])
    H_B, V_B = jax.jit(jax.vmap(router.logit_metrics))(rows)
    np.testing.assert_allclose(H_B, expected["H"], **CLOSE)
    np.testing.assert_allclose(V_B, expected["V"], **CLOSE)
    together = ROUTES(Metrics(H_B, V_B), GUIDE)
    assert [STRATEGIES[s] for s in np.asarray(together.strategy)] == expected["per_sequence"]
    mean = GUIDE_METRICS(rows, np.zeros((2, 1, 1, 4), np.float32))
    mean_route = ROUTE(Metrics(mean["logits_entropy"], mean["logits_varentropy"]), GUIDE)
    assert STRATEGIES[mean_route.strategy] == expected["reference_batch_mean"]
    assert mean["interaction_strength"].shape == (2,)


@pytest.mark.parametrize("name", ["clean", "clean_flat"])
def test_golden_filters(name):
    """Temperature, top_k, top_p and min_p with the numbers of a row."""
    case = GOLDEN["filters"][name]
    numbers = [case[name] for name in ("temperature", "top_k", "top_p", "min_p")]
    x_V = np.float64(FILTERS(np.float32(case["logits"]), *numbers))
    weights_V = np.exp(x_V - x_V.max())
    np.testing.assert_allclose(weights_V / weights_V.sum(), case["probs"], **CLOSE)
    # The reference removes the most likely tokens of a flat row at the wrong end; the steps do not.
    assert np.argmax(x_V) == np.argmax(case["logits"])


def test_logit_metrics_of_random_rows():
    rng = np.random.default_rng(0)
    x_NV = (
        rng.normal(size=(40, 300)) * rng.uniform(0.01, 12, size=(40, 1))
        + rng.normal(size=(40, 1)) * 30
    ).astype(np.float32)
    x_NV[20:][rng.random((20, 300)) < 0.7] = -np.inf
    x_NV[20:, 7] = 1.0
    x_NV[39] = np.where(np.arange(300) == 3, 2.0, -np.inf)
    x_NV[38, :150] = -3e38  # finite, but far below all other logits
    got = jax.jit(jax.vmap(router.logit_metrics))(x_NV)
    expected = np.array([reference_logits(x_V) for x_V in x_NV]).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected[:, 39]).max() == 0 and expected[0].max() > 8 and expected[1].max() > 5


def test_logit_metrics_of_edge_cases():
    for x_V in ([3.0], [-np.inf], [-np.inf] * 300):
        np.testing.assert_array_equal(LOGITS(np.float32(x_V)), [0, 0])
    uniform = LOGITS(np.zeros(4096, ml_dtypes.bfloat16))
    np.testing.assert_allclose(uniform, [12, 0], atol=1e-5)  # ten units in the last place of 12
    large_V = np.float32(np.arange(128_000) * np.float32(1e-4))
    np.testing.assert_allclose(LOGITS(large_V), reference_logits(large_V), rtol=1e-5)


def test_attention_metrics_do_not_depend_on_unused_slots():
    rng = np.random.default_rng(1)
    L, H, S = 3, 4, 40
    scores_LHS = rng.normal(size=(L, H, S)) * rng.uniform(0.2, 6, size=(L, H, 1))
    expected = reference_attention(np.float32(scores_LHS), np.ones((L, S), bool))
    results = []
    for slots, first in ((64, 0), (64, 24), (4096, 0), (4096, 4056), (4096, 1000)):
        scores_LHT = rng.choice(
            [0, 7.0, 1e30, -1e30, np.inf, -np.inf, np.nan], size=(L, H, slots)
        ).astype(np.float32)
        scores_LHT[..., first : first + S] = scores_LHS
        valid_T = (np.arange(slots) >= first) & (np.arange(slots) < first + S)
        results.append(np.array(ATTENTION(scores_LHT, valid_T)))
    np.testing.assert_allclose(results, np.tile(expected, (5, 1)), **CLOSE)


def test_attention_metrics_of_layers_with_different_keys():
    rng = np.random.default_rng(2)
    scores_LHT = (rng.normal(size=(3, 4, 64)) * 3).astype(np.float32)
    valid_LT = np.arange(64) >= np.array([[60], [0], [63]])  # the last layer attends to one key
    got = ATTENTION(scores_LHT, valid_LT)
    np.testing.assert_allclose(got, reference_attention(scores_LHT, valid_LT), **CLOSE)
    layers = [LAYER(*layer) for layer in zip(scores_LHT, valid_LT, strict=True)]
    stacked = router.LayerAttention(*(np.stack(part) for part in zip(*layers, strict=True)))
    combined, combined_stack = jax.jit(
        lambda *forms: [router.combine_layers(form) for form in forms]
    )(layers, stacked)
    np.testing.assert_allclose(combined, got, rtol=5e-6)
    np.testing.assert_array_equal(combined, combined_stack)
    assert layers[0].entropy_H.shape == (4,) and layers[0].disagreement.shape == ()


def test_one_key_and_no_key():
    alone = ATTENTION(np.full((2, 3, 64), -5, np.float32), np.arange(64) == 9)
    np.testing.assert_allclose(alone, [0, 0, 0, 0, 1, 5])
    np.testing.assert_allclose(
        ATTENTION(np.full((2, 3, 64), 5, np.float32), np.zeros(64, bool)), [0, 0, 0, 0, 1, 0]
    )


def test_heads_with_different_keys():
    scores_HS = np.float32([[1, 2, 9, 9], [9, -1, 0.5, -2]])
    got = LAYER(scores_HS, np.array([[1, 1, 0, 0], [0, 1, 1, 1]], bool))
    e_H = np.array([reference_logits([1, 2])[0], reference_logits([-1, 0.5, -2])[0]])
    # Exponentials and logarithms have errors of a few epsilons (1.2e-7) each.
    np.testing.assert_allclose(got.entropy_H, e_H, rtol=5e-6)
    np.testing.assert_allclose(got.entropy_norm_H, e_H / np.log2([2, 3]), rtol=5e-6)
    np.testing.assert_allclose(got.interaction, np.mean([1.5, 3.5 / 3]), rtol=1e-6)


def random_metrics(n, seed=3):
    """Metrics around every threshold of both presets, in float32."""
    rng = np.random.default_rng(seed)
    H, V = 6.5 * rng.random(n) ** 2, 8 * rng.random(n) ** 2
    a = [5, 1, 2, 1, 1, 3] * rng.random((n, 6))
    a[:, 4] = 1 - a[:, 3]
    H[::5], V[1::5] = H[::5] / 100, V[1::5] / 100
    V[::10] /= 100
    return Metrics(np.float32(H), np.float32(V), AttentionMetrics(*np.float32(a).T))


def reference_route(
    h, v, seen, low_h, low_v, mid_h, high_h, high_v, h_scale, v_scale, t_range, resample_least, base
):
    """The table of strategies in float64, with top_k before rounding. Without attention its terms
    are omitted.
    """
    T0, p0, k0, m0 = base
    e, s, agree, force = (0.0, 0.0, None, 0.0) if seen is None else seen
    u = h / h_scale + v / v_scale
    apart, agreement = (0.0, 0.0) if agree is None else (1 - agree, agree)

    def clamped(T):
        return min(max(T, t_range[0]), t_range[1])

    if h < low_h and v < low_v:
        return GREEDY, 0, p0, k0, 0
    if h > mid_h and v < low_v:
        return CLARIFY, clamped(min(1.5, T0 * (1.3 + 0.2 * e))), p0, k0, 0
    if h < high_h and v > high_v:
        return (
            EXPLORE,
            clamped(min(1.5, T0 * (1.2 + 0.3 * force))),
            p0,
            max(5, k0 * (1 + 0.5 * apart)),
            0,
        )
    if h > high_h and v > high_v:
        return (
            RESAMPLE,
            clamped(max(resample_least, T0 * (2.0 + 0.5 * s))),
            max(0.5, p0 - 0.2 * e),
            k0,
            0,
        )
    T = T0 * (1 + 0.3 * u + 0.2 * (e + s) - 0.2 * agreement)
    k = min(max(k0 * (1 + 0.3 * force - 0.2 * agreement), 1), 100)
    return (
        ADAPTIVE,
        clamped(T),
        min(max(p0 * (1 + 0.1 * s), 0.1), 1),
        k,
        min(max(m0 * (1 - 0.5 * u), 0.01), 0.5),
    )


@pytest.mark.parametrize("preset", ["guide", "calibrated"])
@pytest.mark.parametrize("attention", [True, False], ids=["attention", "logits"])
def test_route_matches_the_reference_table(preset, attention):
    metrics, base = random_metrics(600), (0.9, 0.8, 40, 0.05)
    section = RouterSection(router_preset=preset)
    config = RouterConfig.build(section, MEDIAN, temperature=0.9, top_p=0.8, top_k=40, min_p=0.05)
    rest = [(0.1, 2.0), 1.2 * 0.9] if preset == "calibrated" else [(0, math.inf), 2.0]
    thresholds = [*MEDIAN.values()] if preset == "calibrated" else [0.1, 0.1, 3, 5, 5, 1, 1]
    got = ROUTES(metrics if attention else metrics._replace(attention=None), config)
    strategies = np.array(got.strategy)
    a = metrics.attention
    seen = zip(
        a.attn_entropy, a.attn_varentropy, a.attn_agreement, a.interaction_strength, strict=True
    )
    expected = np.array(
        [
            reference_route(
                float(h), float(v), four if attention else None, *thresholds, *rest, base
            )
            for h, v, four in zip(metrics.entropy, metrics.varentropy, seen, strict=True)
        ]
    ).T
    np.testing.assert_array_equal(strategies, expected[0])
    np.testing.assert_allclose(
        [got.temperature, got.top_p, got.min_p], expected[[1, 2, 4]], **CLOSE
    )
    down = strategies == EXPLORE
    off = expected[3] - np.asarray(got.top_k)
    assert (off[down] > -1e-4).all() and (off[down] < 1).all()
    assert (np.abs(off[~down]) < 0.5001).all()
    assert set(strategies) == set(range(5)) and got.top_k.dtype == jnp.int32


# Situation of the guide's section "Example Generations" → metrics, strategy, and its formulas
# evaluated by hand.
GUIDE_EXAMPLES = {
    "low uncertainty": (Metrics(0.05, 0.02, AttentionMetrics(0, 0, 0, 0, 1, 0)), GREEDY, 0, 0.9, 27,
                        0),
    "high entropy, low varentropy": (Metrics(3.5, 0.08, AttentionMetrics(0, 0, 0, 0, 1, 0)),
                                     CLARIFY, 0.8658, 0.9, 27, 0),
    "exploration": (Metrics(2.1, 5.5, AttentionMetrics(0, 0, 0, 0, 1, 0.8)), EXPLORE, 0.95904, 0.9,
                    27, 0),
    "high uncertainty": (Metrics(5.5, 5.2, AttentionMetrics(0, 0, 0.9, 0, 1, 0)), RESAMPLE, 2.0,
                         0.9, 27, 0),
    "adaptive": (Metrics(2.8, 1.5, AttentionMetrics(1.9, 0, 0.7, 0.4, 0.6, 0.75)), ADAPTIVE,
                 1.79154, 0.963, 30, 0.01),
}  # fmt: skip


@pytest.mark.parametrize("situation", GUIDE_EXAMPLES)
def test_the_examples_of_the_guide(situation):
    metrics, *expected = GUIDE_EXAMPLES[situation]
    got = ROUTE(jax.tree.map(np.float32, metrics), GUIDE)
    np.testing.assert_allclose([float(number) for number in got], expected, rtol=1e-6)


def test_a_row_without_attention_ignores_attention_metrics():
    """As in a batch where other rows use attention: the metrics exist, but the terms of this row
    are 0.
    """
    metrics = random_metrics(200)
    blind = RouterConfig.build(RouterSection(use_attention=False))
    without = metrics._replace(attention=None)
    for config in (blind, GUIDE):
        jax.tree.map(np.testing.assert_array_equal, ROUTES(metrics, blind), ROUTES(without, config))
    temperatures = [np.asarray(ROUTES(given, GUIDE).temperature) for given in (metrics, without)]
    assert (temperatures[0] != temperatures[1]).mean() > 0.5


def test_rows_are_routed_equally_alone_and_in_a_batch():
    metrics = random_metrics(8)
    configs = [RouterConfig.build(None, temperature=0.5 + i, top_k=10 + i) for i in range(8)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *configs)
    batch = jax.tree.map(np.asarray, jax.jit(jax.vmap(router.route))(metrics, stacked))
    for i, config in enumerate(configs):
        alone = ROUTE(jax.tree.map(lambda x, i=i: x[i], metrics), config)
        np.testing.assert_allclose(jax.tree.map(lambda x, i=i: x[i], batch), alone, rtol=1e-6)


def test_the_first_strategy_whose_conditions_hold_is_chosen():
    metrics = random_metrics(200)
    taken = [STRATEGIES[s] for s in np.asarray(ROUTES(metrics, GUIDE).strategy)]
    for H, V, strategy in zip(metrics.entropy, metrics.varentropy, taken, strict=True):
        given = Metrics(H, V)
        holding = [
            name
            for name, conditions in RULES.items()
            if all(
                (
                    getattr(given, metric) < getattr(GUIDE, bound)
                    if relation == "<"
                    else getattr(given, metric) > getattr(GUIDE, bound)
                )
                for metric, relation, bound in conditions
            )
        ]
        assert (holding or ["adaptive"])[0] == strategy


def test_a_metric_equal_to_its_threshold_meets_no_condition():
    for H, V in ((5.0, 6.0), (6.0, 5.0), (0.1, 0.05), (3.0, 0.05), (4.0, 0.1)):
        assert ROUTE(Metrics(H, V), GUIDE).strategy == ADAPTIVE


def test_changing_router_numbers_does_not_recompile():
    route = jax.jit(
        lambda metrics, config: router.route(metrics, config)
    )  # with a separate compilation cache
    metrics = Metrics(
        np.float32(1), np.float32(2), AttentionMetrics(*np.float32([1, 0.5, 0.1, 0.2, 0.8, 1]))
    )
    for field in fields(RouterConfig):
        for value in (0.25, 3, np.float64(0.5), np.int64(2), math.inf):
            if value != math.inf or field.name not in router.INTEGERS:
                route(metrics, replace(GUIDE, **{field.name: value}))
    route(metrics, CALIBRATED)
    assert route._cache_size() == 1


@pytest.mark.parametrize(
    "name",
    sorted({f.name for f in fields(RouterConfig)} - {"candidates", *router.INTEGERS, *SCORE}),
)
def test_every_router_number_has_an_effect(name):
    """Each threshold and coefficient changes the sampling numbers of some row."""
    metrics = random_metrics(600)
    bases = [
        replace(GUIDE, temperature_max=2.0, base_min_p=0.6),
        replace(GUIDE, resample_temperature_min_factor=3.5, base_top_k=7, base_top_p=1.0),
        replace(
            GUIDE,
            base_top_k=200,
            base_temperature=0.2,
            resample_temperature_min=0.0,
            adaptive_top_p_attn_varentropy=-4.0,
        ),
        replace(GUIDE, base_top_k=1, adaptive_top_k_interaction=-2.0),
    ]
    changed = [
        not np.array_equal(before, after)
        for base in bases
        for value in (float(getattr(base, name)) * 1.5 + 0.3, float(getattr(base, name)) / 2)
        for before, after in zip(
            ROUTES(metrics, base), ROUTES(metrics, replace(base, **{name: value})), strict=True
        )
    ]
    assert any(changed)


def test_the_clarify_token_is_emitted_only_when_allowed():
    x_V, never = np.zeros(8, np.float32), -1
    asks = jax.jit(router.should_clarify)
    config = replace(GUIDE, clarify_token=3, clarify_cooldown=5)
    assert asks(CLARIFY, x_V, never, config)
    assert not asks(ADAPTIVE, x_V, never, config)
    assert not asks(CLARIFY, x_V, never, GUIDE)  # no token is configured
    assert not asks(
        CLARIFY, np.where(np.arange(8) == 3, -np.inf, x_V).astype(np.float32), never, config
    )
    since = [bool(asks(CLARIFY, x_V, distance, config)) for distance in range(7)]
    assert (
        since == [False] * 5 + [True] * 2
    )  # with 0 … 4 tokens after it, it is one of the last five


ROWS = jax.jit(jax.vmap(router.logit_metrics))


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
def test_a_long_row_is_as_exact_alone_as_in_a_batch(scale):
    """In a batch of one, plain sums over 128k tokens are off by 2e-4 on CPUs that add them one by
    one.
    """
    logits_V = (np.random.default_rng(0).standard_normal(128_000) * scale).astype(np.float32)
    p_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    p_V /= p_V.sum()
    entropy = -(p_V * np.log2(p_V)).sum()
    varentropy = (p_V * (np.log2(p_V) + entropy) ** 2).sum()
    for rows in (1, 2):
        found = ROWS(np.stack([logits_V] * rows))
        np.testing.assert_allclose(
            found, [[entropy] * rows, [varentropy] * rows], rtol=2e-6, atol=2e-6
        )

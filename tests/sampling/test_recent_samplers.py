"""The samplers of 2025 and 2026: cases computed in float64 from the papers, and results of other
programs.
"""

import json
from pathlib import Path
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recent_references as references

from dantinox.sampling import SamplingParams, detect, init_state, process_logits, sample, watermark

PEERS = dict(np.load(Path(__file__).with_name("recent_peers.npz")))
KEYS = PEERS["keys"].tolist()
# Of probabilities up to 1: each key of a watermark, and each power, multiplies them by a factor
# with an error of a few epsilons (6e-8).
CLOSE = 5e-6
CASES = json.loads(Path(__file__).with_name("recent_samplers.json").read_text(encoding="utf-8"))
NAMES = sorted({case["step"]["name"] for case in CASES})


def probabilities(x_V):
    weights_V = np.exp(np.float64(x_V) - np.max(x_V))
    return weights_V / weights_V.sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_of_a_sampler(name):
    """Filters keep the expected ids with their bits; the probabilities after other steps agree to
    5e-6.
    """
    cases = [case for case in CASES if case["step"]["name"] == name]
    assert len(cases) > 45
    for case in cases:
        x_V = np.float32([-np.inf if x is None else x for x in case["logits"]])
        y_V = np.asarray(process_logits(x_V[None], [case["step"]], [case.get("prompt", [])]))[0]
        if "kept" in case:
            assert np.flatnonzero(y_V > -np.inf).tolist() == case["kept"], case
            np.testing.assert_array_equal(
                y_V[case["kept"]].view(np.uint32), x_V[case["kept"]].view(np.uint32)
            )
        else:
            np.testing.assert_array_equal(y_V > -np.inf, x_V > -np.inf)
            np.testing.assert_allclose(
                probabilities(y_V), case["probabilities"], atol=CLOSE, err_msg=str(case)
            )


@pytest.mark.parametrize(
    "step",
    [
        {"name": "skew", "skew": 1.5},
        {"name": "skew", "skew": -3},
        {"name": "adaptive_p", "target": 0.3, "average": 0.6},
        {"name": "encoder_repetition_penalty", "penalty": 1.4},
        {"name": "min_k", "tau": 3},
        {"name": "p_less"},
        {"name": "p_less_norm"},
        {"name": "top_h", "alpha": 0.5},
    ],
    ids=str,
)
def test_a_permutation_of_the_vocabulary_permutes_the_result(step):
    """Also with removed tokens; the probabilities add up to 1."""
    rng = np.random.default_rng(9)
    for scale in (0.3, 3, 12):
        x_V = rng.normal(0, scale, 50).astype(np.float32)
        x_V[rng.random(50) < 0.2] = -np.inf
        order_V = rng.permutation(50)
        prompt = rng.integers(0, 50, 6)
        renamed = [[int(np.flatnonzero(order_V == token)[0]) for token in prompt]]
        plain_V = np.asarray(process_logits(x_V[None], [step], [prompt.tolist()]))[0]
        permuted_V = np.asarray(process_logits(x_V[order_V][None], [step], renamed))[0]
        np.testing.assert_allclose(
            probabilities(permuted_V), probabilities(plain_V)[order_V], atol=1e-6
        )
        np.testing.assert_array_equal(permuted_V > -np.inf, plain_V[order_V] > -np.inf)
        if step["name"] == "skew":
            np.testing.assert_allclose(np.exp(np.float64(plain_V)).sum(), 1, atol=1e-5)


def test_top_h_of_transformers():
    """The cumulative rule. Rows that float32 cannot decide are skipped; of equal logits
    Transformers may keep any.
    """
    skipped = 0
    for x_V, alpha, theirs_V in zip(
        np.float32(PEERS["logits"]), PEERS["alpha"], PEERS["kept"], strict=True
    ):
        P_N = np.sort(probabilities(x_V))[::-1]
        terms_N = -P_N * np.log(np.where(P_N > 0, P_N, 1))
        if np.abs(np.cumsum(terms_N) - alpha * terms_N.sum())[P_N > 0].min() < 1e-6 * max(
            terms_N.sum(), 1
        ):
            skipped += 1
            continue
        step = {"name": "top_h", "alpha": float(alpha), "rule": "cumulative"}
        mine_V = np.asarray(process_logits(x_V[None], [step]))[0] > -np.inf
        theirs_V &= x_V > -np.inf
        np.testing.assert_array_equal(np.sort(x_V[mine_V]), np.sort(x_V[theirs_V]))
        edge_V = x_V == x_V[mine_V].min()
        np.testing.assert_array_equal(mine_V[~edge_V], theirs_V[~edge_V])
        assert (
            np.flatnonzero(mine_V & edge_V).tolist()
            == np.flatnonzero(edge_V)[: np.sum(mine_V & edge_V)].tolist()
        )
    assert skipped < 25 and 20 < np.sum(PEERS["kept"].sum(1) > 5) < 190


def test_encoder_repetition_penalty_of_transformers():
    for x_V, prompt, penalty, scored_V in zip(
        *(PEERS[name] for name in ("logits", "prompt", "penalty", "scored")), strict=True
    ):
        step = {"name": "encoder_repetition_penalty", "penalty": float(penalty)}
        y_V = np.asarray(
            process_logits(np.float32(x_V)[None], [step], [prompt.tolist()], [[0, 1, 2]])
        )[0]
        np.testing.assert_allclose(y_V, scored_V, rtol=1e-6)


TEXTS = range(len(PEERS["output"]))


@pytest.mark.parametrize("text", TEXTS)
def test_the_watermark_of_transformers(text):
    """Probabilities at every position of a text with repeated contexts, and the g-values that a
    detector computes.
    """
    output, ngram, unmarked = PEERS["output"][text].tolist(), int(PEERS["ngram"][text]), 0
    for t, marked_V in enumerate(PEERS["marked"][text]):
        x_V = np.float32(PEERS["steps"][t])
        step = {"name": "synthid", "layer_keys": KEYS, "ngram": ngram}
        y_V = np.asarray(process_logits(x_V[None], [step], [[7, 7]], [output[:t]]))[0]
        np.testing.assert_allclose(probabilities(y_V), marked_V, atol=CLOSE)
        unmarked += np.array_equal(y_V, x_V)
    assert unmarked > 0 or text == TEXTS[-1]
    count = int(PEERS["numbers"][text])
    g_NK, counts_N = watermark.g_values(output, KEYS, ngram)
    np.testing.assert_array_equal(g_NK, PEERS["g_values"][text][:count])
    np.testing.assert_array_equal(counts_N, PEERS["counted"][text][:count])


def test_the_watermark_is_a_tournament():
    """Compared with the win probabilities of two candidates per key, with hashes in exact integers;
    mass stays 1.
    """
    rng = np.random.default_rng(3)
    table = (
        np.random.RandomState(0).randint(0, 2**32, 2**16, np.uint32) & 1
    )  # PyTorch's generator with seed 0
    for ngram in (2, 5, 16):
        output = rng.integers(0, 40, 12).tolist()
        x_V = rng.normal(0, 3, 40).astype(np.float32)
        x_V[rng.random(40) < 0.3] = -np.inf
        keys = rng.integers(0, 2**31, 6).tolist()
        step = {"name": "synthid", "layer_keys": keys, "ngram": ngram}
        for length in (0, 1, 5, 12):
            y_V = np.asarray(process_logits(x_V[None], [step], [[1]], [output[:length]]))[0]
            expected_V = references.synthid(x_V, keys, table, ngram, output[:length])
            np.testing.assert_allclose(probabilities(y_V), expected_V, atol=CLOSE)
            if not np.array_equal(y_V, x_V):  # the context is new
                np.testing.assert_allclose(np.exp(np.float64(y_V)).sum(), 1, atol=1e-5)


def test_the_watermark_of_few_tokens_equals_that_of_whole_rows():
    """A vocabulary of 1000 with 256 and with 257 remaining tokens, compared with the reference."""
    rng = np.random.default_rng(4)
    table = np.random.RandomState(0).randint(0, 2**32, 2**16, np.uint32) & 1
    for left in (1, 256, 257):
        x_V = np.full(1000, -np.inf, np.float32)
        x_V[rng.permutation(1000)[:left]] = rng.normal(0, 2, left)
        y_V = np.asarray(
            process_logits(
                x_V[None], [{"name": "synthid", "layer_keys": [8, 9], "ngram": 3}], None, [[4, 5]]
            )
        )[0]
        ids = np.flatnonzero(x_V > -np.inf)
        np.testing.assert_array_equal(np.flatnonzero(y_V > -np.inf), ids)
        g_2N = np.array(
            [
                [table[references.hashed([4, 5, token, key]) % 2**16] for token in ids]
                for key in (8, 9)
            ]
        )
        P_N = references.softmax(x_V)[ids]
        for g_N in g_2N:
            P_N = P_N * (1 + g_N - np.sum(g_N * P_N))
        np.testing.assert_allclose(probabilities(y_V)[ids], P_N, atol=CLOSE)


def test_a_context_is_marked_again_after_1024_others():
    tokens = np.random.default_rng(0).permutation(3000)
    is_repeated = jax.jit(watermark.is_repeated)
    for distance, repeats in ((1024, True), (1025, False)):
        output = [5000, 5001, *tokens[: distance - 2].tolist(), 5000, 5001]
        counts_N = watermark.g_values([*output, 1], [3], 3)[1]
        assert counts_N[-1] != repeats and counts_N[:-1].all()
        history_S = np.int32(np.resize([*output, 0, 0], 1030))
        length = len(output)
        assert bool(is_repeated(history_S, length, length, 3)) == repeats
        assert not bool(is_repeated(history_S, length, 1, 3)), (
            "tokens of the prompt are not contexts"
        )


def decode(rows, steps, count, **options):
    """Draws tokens from random logits; returns tokens, the logits of every step, and the states
    before every step.
    """
    params, B = SamplingParams.build(rows, **options), len(rows)
    start = jax.jit(
        lambda params: init_state(
            params, jnp.zeros((B, 2), int), jnp.ones((B, 2), bool), steps.shape[-1], 202
        )
    )
    state, tokens, states = start(params), [], []
    for i in range(count):
        states.append(state)
        token_B, state, _ = step(steps[i], params, state)
        tokens.append(np.asarray(token_B))
    return np.stack(tokens), states


step = jax.jit(sample)


@pytest.mark.parametrize("dynamic_order", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adaptive_p_remembers_the_probabilities_before_its_change(dynamic_order):
    """The state of every row over 40 tokens equals that of llama.cpp; other rows do not change."""
    rng, V, count = np.random.default_rng(5), 30, 40
    steps_TBV = rng.normal(0, 1.5, (count, 3, V)).astype(np.float32)
    rows = [
        {
            "adaptive_target": 0.3,
            "adaptive_decay": 0.9,
            "min_p": 0.05,
            "temperature": 0.8,
            "seed": 1,
        },
        {"adaptive_target": 0.6, "adaptive_decay": 0.5, "top_k": 12, "seed": 2},
        {"temperature": 0.9, "seed": 3},
    ]
    tokens, states = decode(rows, steps_TBV, count, dynamic_order=dynamic_order)
    chains = [
        [{"name": "temperature", "t": 0.8}, {"name": "min_p", "p": 0.05}],
        [{"name": "top_k", "k": 12}],
    ]
    for b, chain in enumerate(chains):
        expected = references.AdaptiveState(rows[b]["adaptive_target"], rows[b]["adaptive_decay"])
        for t in range(count):
            found = np.asarray(states[t].adaptive_sum)[b] / np.asarray(states[t].adaptive_weight)[b]
            np.testing.assert_allclose(found, expected.average, atol=1e-6)
            cut_V = np.asarray(process_logits(steps_TBV[t, b][None], chain))[0]
            expected.accept(references.softmax(cut_V)[tokens[t, b]])
    off, _ = decode(
        [row | {"adaptive_target": -1.0, "adaptive_decay": 0.9} for row in rows], steps_TBV, count
    )
    np.testing.assert_array_equal(tokens[:, 2], off[:, 2])
    assert (tokens[:, 0] != off[:, 0]).any()


def test_adaptive_p_reaches_its_target_on_average():
    rng, targets, count = np.random.default_rng(6), (0.2, 0.35, 0.5), 200
    steps_TBV = np.repeat(rng.normal(0, 2.5, (count, 1, 30)), 4, axis=1).astype(np.float32)
    rows = [{"adaptive_target": target, "min_p": 0.1, "seed": 4} for target in targets]
    tokens, _ = decode(rows, steps_TBV[:, :3], count)
    cut_TV = np.asarray(process_logits(steps_TBV[:, 0], [{"name": "min_p", "p": 0.1}]))
    means = [
        np.mean([references.softmax(cut_TV[t])[tokens[t, b]] for t in range(count)])
        for b in range(3)
    ]
    assert np.abs(np.array(means) - targets).max() < 0.06, means


@pytest.mark.slow
def test_marked_texts_are_detected():
    """200 tokens each: z of marked texts is above 4, of other texts and with other keys it is a
    standard normal number.
    """
    rng, V, count, keys = np.random.default_rng(8), 200, 200, [11, 22, 33, 44, 55, 66, 77, 88]
    steps_TBV = np.repeat(rng.normal(0, 1.2, (count, 1, V)), 12, axis=1).astype(np.float32)
    rows = [{"seed": b} | ({"watermark_keys": keys} if b < 6 else {}) for b in range(12)]
    tokens, _ = decode(rows, steps_TBV, count)
    found = [detect(tokens[:, b].tolist(), keys, 5) for b in range(12)]
    others = [detect(tokens[:, b].tolist(), [key + 1 for key in keys], 5).z for b in range(6)] + [
        one.z for one in found[6:]
    ]
    assert min(one.z for one in found[:6]) > 4 and max(one.p for one in found[:6]) < 1e-4
    assert max(map(abs, others)) < 3.5 and abs(np.mean(others)) < 1
    assert all(one.mean > 0.53 for one in found[:6]) and found[0].tokens <= count - 4
    # The tokens are drawn from the same probabilities on average: frequent tokens stay frequent.
    likely = np.argsort(steps_TBV[:, 0], axis=1)[:, -20:]
    share = [np.mean([(likely[t] == tokens[t, b]).any() for t in range(count)]) for b in range(12)]
    assert abs(np.mean(share[:6]) - np.mean(share[6:])) < 0.06


def test_the_p_value_of_a_detection():
    """z and p of a text with known g-values, from the normal distribution."""
    tokens = list(range(1, 60))
    g_NK, _ = watermark.g_values(tokens, [9], 4)
    found = detect(tokens, [9], 4)
    base = watermark.g_table().mean()
    z = (g_NK.mean() - base) / np.sqrt(base * (1 - base) / len(g_NK))
    np.testing.assert_allclose(
        [found.z, found.p, found.weighted_mean],
        [z, 1 - NormalDist().cdf(z), g_NK.mean()],
        rtol=1e-9,
    )
    for tokens, keys in (([1, 2, 3], [9]), ([1, 2, 3, 4], [])):
        with pytest.raises(ValueError, match="a watermark needs"):
            detect(tokens, keys, 4)

"""Whole batches: parameters, plans, state, greedy rows, independence of rows, and what
recompiles.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import Config, GenerationSection, UserError
from dantinox.sampling import SamplingParams, init_state, sample, update

V, B = 700, 6
ALL = {
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "seed": 6,
}
LOGITS = np.float32(np.random.default_rng(1).normal(0, 2, (B, V)))
MIXED = [
    {"temperature": 0.7, "top_k": 20, "seed": 3},
    {"temperature": 0, "top_p": 0.5},
    {"top_p": 0.8, "seed": 5, "repetition_penalty": 1.3},
    {"greedy": True, "repetition_penalty": 5.0, "min_tokens": 2},
    {"min_p": 0.05, "seed": 2**32 - 1, "min_tokens": 4},
    {"seed": 9},
]


@partial(jax.jit, static_argnames="report")
def jitted(logits_BV, params, state, active_B=None, report=0):
    return sample(logits_BV, replace(params, report=report), state, active_B=active_B)


def build(rows, **more):
    """Parameters of a full batch with the plan of MIXED, so that all tests share one compiled
    program.
    """
    return SamplingParams.build(
        [*rows, *MIXED[: B - 1 - len(rows)], ALL][-B:], stop_ids=[4], **more
    )


@partial(jax.jit, static_argnames="prompt")
def start(params, prompt=((1, 2, 3),)):
    tokens = jnp.broadcast_to(jnp.asarray(prompt), (params.batch, len(prompt[0])))
    return init_state(params, tokens, jnp.ones(tokens.shape, bool), V)


def decode(logits_BV, params, n):
    state, tokens = start(params), []
    for _ in range(n):
        token_B, state, _ = jitted(logits_BV, params, state)
        tokens.append(np.asarray(token_B))
    return np.stack(tokens, 1)


def test_the_plan_contains_the_steps_that_some_row_enables():
    assert SamplingParams.build(MIXED, stop_ids=[0]).plan == (
        "min_tokens",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    )
    greedy = SamplingParams.build({"greedy": True, "top_k": 5, "temperature": 0.3}, batch=3)
    assert (greedy.plan, greedy.stochastic, greedy.batch) == ((), False, 3)
    assert SamplingParams.build({"temperature": 9e-6}).stochastic is False
    off = SamplingParams.build(
        {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 5, "seed": 0}
    )
    assert (off.plan, off.stochastic) == (("temperature",), True)
    assert not off.enabled["temperature"].any(), "there so that no temperature compiles anything"
    section = GenerationSection(top_k=4, seed=1, max_new_tokens=7)
    assert SamplingParams.build(Config(generation=section), batch=2).plan == (
        "temperature",
        "top_k",
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            {"top_p": 1.7, "seed": 1},
            "generation.top_p must be a number in [0, 1], or null, got 1.7",
        ),
        ({"temperature": float("nan"), "seed": 1}, "generation.temperature must be"),
        ({"top_kk": 3}, "did you mean generation.top_k"),
        ({"max_new_tokens": 3}, "generation.max_new_tokens is not a sampling parameter"),
        ({"top_k": 5}, "generation.seed must be an integer"),
        ({"seed": -1}, "generation.seed must be"),
        ([{"greedy": True}] * 2, "2 sets for 3 rows"),
    ],
)
def test_invalid_settings_are_refused(rows, words):
    with pytest.raises(UserError, match=words.replace("[", r"\[").replace("]", r"\]")):
        SamplingParams.build(rows, batch=3)


def test_numbers_beyond_float32_stay_finite():
    params = build(
        [{"temperature": 1e300, "top_k": 10**12, "repetition_penalty": 1e-60, "seed": np.uint32(4)}]
    )
    assert np.isfinite(params.temperature).all() and int(params.numbers["top_k"][0]) == 2**31 - 1
    assert params.numbers["repetition_penalty"][0] > 0
    _, _, info = jitted(LOGITS, params, start(params))
    assert np.isfinite(info.token.logprob_sampled).all()


def test_greedy_rows_apply_only_edits_and_penalties():
    logits = np.zeros((B, V), np.float32)
    logits[:, [3, 4, 5]] = 4, 6, 4
    rows = [
        {"greedy": True, "repetition_penalty": 2.0, "temperature": 0.5, "top_k": 1, "seed": 1},
        {"temperature": 0.0, "min_tokens": 1, "repetition_penalty": 1.0},
        {"temperature": 2.0, "seed": 4},
    ]
    params = build(rows)
    token_B, _, info = jitted(logits, params, start(params, ((2, 3, 4),)))
    assert token_B[:2].tolist() == [5, 3]  # the prompt contains 3 and 4; the second row bans 4
    assert info.token.logprob_sampled[:2].tolist() == [0, 0]
    again = build([rows[0] | {"seed": 8, "top_k": 3}, *rows[1:]])
    assert jitted(logits, again, start(again, ((2, 3, 4),)))[0].tolist() == token_B.tolist()


def test_an_all_greedy_batch_compiles_no_draw():
    greedy, drawn = (SamplingParams.build(row, batch=B) for row in ({"greedy": True}, {"seed": 1}))
    text = [
        str(jax.make_jaxpr(sample)(LOGITS, params, start(params))) for params in (greedy, drawn)
    ]
    assert "threefry" not in text[0] and "random" not in text[0] and "random" in text[1]


def test_a_row_does_not_depend_on_its_index_or_other_rows():
    params = SamplingParams.build(MIXED, stop_ids=[4])
    expected = decode(LOGITS, params, 12)
    order = np.array([3, 5, 0, 4, 2, 1])
    shuffled = SamplingParams.build([MIXED[i] for i in order], stop_ids=[4])
    np.testing.assert_array_equal(decode(LOGITS[order], shuffled, 12), expected[order])
    for alone in range(B):
        others = [
            {
                "temperature": 1.9,
                "top_k": 2,
                "top_p": 0.1,
                "min_p": 0.3,
                "seed": 77 + i,
                "min_tokens": 9,
                "repetition_penalty": 2,
            }
            for i in range(B)
        ]
        strangers = np.float32(np.random.default_rng(alone + 10).standard_normal((B, V)))
        strangers[alone] = LOGITS[alone]
        others[alone] = MIXED[alone]
        padded = SamplingParams.build(others, stop_ids=[4])
        np.testing.assert_array_equal(decode(strangers, padded, 12)[alone], expected[alone])
        if alone == 4:
            solo = SamplingParams.build(MIXED[alone], stop_ids=[4])
            np.testing.assert_array_equal(
                decode(LOGITS[alone : alone + 1], solo, 12)[0], expected[alone]
            )


def test_samples_of_a_request_differ_only_by_sample_index():
    params = SamplingParams.build({"seed": 5}, batch=4, sample_index=[0, 1, 0, 1])
    tokens = decode(np.tile(LOGITS[:1], (4, 1)), params, 8)
    np.testing.assert_array_equal(tokens[:2], tokens[2:])
    assert (tokens[0] != tokens[1]).any()


def test_changing_numbers_does_not_recompile():
    jitted(LOGITS, build([]), start(build([])))
    compiled = jitted._cache_size()
    for shift in range(3):
        params = build(
            [
                {"seed": shift, "temperature": 0.5 + shift, "top_k": shift},
                {"greedy": True},
                {"top_p": shift / 3, "seed": 1},
            ]
        )
        jitted(LOGITS, params, start(params))
    assert jitted._cache_size() == compiled
    without = SamplingParams.build([{"seed": 1}] * B, stop_ids=[4])
    assert jax.tree.structure(without) != jax.tree.structure(build([]))


def test_the_state_holds_the_last_position_of_every_token():
    params = SamplingParams.build({"repetition_penalty": 1.5, "seed": 1}, batch=2)
    prompt, valid = (
        np.int32([[9, 9, 3, 4, 3], [3, 5, 5, 8, 8]]),
        np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], bool),
    )
    state = jax.jit(partial(init_state, vocab_size=10))(params, prompt, valid)
    np.testing.assert_array_equal(
        state.last_seen, [[-1, -1, -1, 2, 1] + [-1] * 5, [-1, -1, -1, 0, -1, 2] + [-1] * 4]
    )
    assert state.length.tolist() == [3, 3]
    state = jax.jit(update)(params, state, np.int32([7, 7]), np.array([True, False]))
    assert state.length.tolist() == [4, 3] and state.n_generated.tolist() == [1, 0]
    assert np.asarray(state.last_seen)[:, 7].tolist() == [3, -1]
    plain = SamplingParams.build({"seed": 1}, batch=2)
    assert (
        jax.eval_shape(partial(init_state, vocab_size=10), plain, prompt, valid).last_seen is None
    )


def test_the_penalty_follows_generated_tokens():
    """Each generated token halves its logit, so a greedy row generates tokens in order of their
    logits.
    """
    logits = np.full((1, V), -5, np.float32)
    logits[0, :4] = 10, 9, 8, 7
    params = SamplingParams.build({"greedy": True, "repetition_penalty": 2.0})
    state = jax.jit(
        lambda params: init_state(params, jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), bool), V)
    )(params)
    tokens = []
    for _ in range(5):
        token_B, state, _ = jitted(logits, params, state)
        tokens.append(int(token_B[0]))
    assert tokens == [0, 1, 2, 3, 0]


def test_reported_log_probabilities_match_a_reference():
    params = build([{"temperature": 0.5, "top_k": 3, "seed": 2 + i} for i in range(B - 1)])
    token_B, _, info = jitted(LOGITS, params, start(params))
    x = np.asarray(LOGITS, np.float64)
    raw = x - np.log(np.exp(x).sum(1, keepdims=True))
    cut = np.where(x >= np.sort(x, 1)[:, -3:-2], x / 0.5, -np.inf)
    drawn = cut - np.log(np.exp(cut).sum(1, keepdims=True))
    index = np.arange(B - 1), np.asarray(token_B)[:-1]
    np.testing.assert_allclose(info.token.logprob[:-1], raw[index], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(info.token.logprob_sampled[:-1], drawn[index], rtol=1e-5, atol=1e-5)
    assert jax.eval_shape(sample, LOGITS, params, start(params))[2].token is None


def test_invalid_logits_are_flagged_and_still_return_tokens():
    rows = np.zeros((B, V), np.float32)
    rows[:5] = -np.inf
    rows[0, [9, 5]], rows[1, 8], rows[3, 2] = (np.nan, 1), np.inf, np.nan
    params = build([ALL, {"greedy": True}, ALL, {"greedy": True}, {"seed": 1}])
    token_B, _, info = jitted(rows, params, start(params))
    assert token_B[:5].tolist() == [5, 8, 0, 0, 0]
    assert info.repaired.tolist() == [True, True, False, True, False, False]
    assert info.empty.tolist() == [False, False, True, True, True, False]
    assert not np.isnan(info.token.logprob).any() and not np.isnan(info.token.logprob_sampled).any()


def test_state_and_parameters_work_inside_a_loop():
    params = SamplingParams.build(MIXED, stop_ids=[4])

    @jax.jit
    def loop(params, state):
        def body(_, carry):
            state, last = carry
            token_B, state, _ = sample(LOGITS, params, state, active_B=last >= 0)
            return state, token_B

        return jax.lax.fori_loop(0, 5, body, (state, jnp.zeros(B, jnp.int32)))

    state, token_B = loop(params, start(params))
    np.testing.assert_array_equal(token_B, decode(LOGITS, params, 5)[:, -1])
    assert state.n_generated.tolist() == [5] * B

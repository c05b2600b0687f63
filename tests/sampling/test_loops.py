"""Tests loop detection against a search over all periods, one token at a time and from whole
texts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced import traced

from dantinox.config import GenerationSection, UserError, build_config
from dantinox.sampling import SamplingParams, init_state, update
from dantinox.sampling.loops import LoopRules, ends_in_loop, in_loop, loop_runs

S = 64
RUNS = jax.jit(loop_runs)
IN_LOOP = jax.jit(in_loop)
PARAMS = SamplingParams.build({"loop_stop": True, "seed": 1})
START = jax.jit(lambda tokens, valid: init_state(PARAMS, tokens, valid, 8, S))
STEP = jax.jit(lambda state, token: update(PARAMS, state, token))
# Texts with loops: a random beginning, a unit that is repeated, and a part of the unit.
texts = st.builds(
    lambda start, unit, times, part: (start + unit * times + unit[:part])[: S - 8],
    st.lists(st.integers(0, 2), max_size=10),
    st.lists(st.integers(0, 2), min_size=1, max_size=7),
    st.integers(0, 12),
    st.integers(0, 7),
)
rules = st.fixed_dictionaries(
    {
        "loop_max_period": st.integers(1, 8),
        "loop_min_repeats": st.integers(2, 5),
        "loop_min_tokens": st.integers(1, 20),
    }
)


def has_loop(tokens, loop_max_period, loop_min_repeats, loop_min_tokens):
    """Whether some end of the text consists of enough repetitions of one sequence, the first of
    which may be incomplete.
    """
    for period in range(1, loop_max_period + 1):
        for size in range(max(loop_min_repeats * period, loop_min_tokens), len(tokens) + 1):
            end = tokens[len(tokens) - size :]
            if all(end[i] == end[i - period] for i in range(period, size)):
                return True
    return False


@settings(max_examples=100, deadline=None)
@given(text=texts, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6), rule=rules)
def test_loops_are_those_of_a_search_over_all_periods(text, prompt, rule):
    section = GenerationSection(loop_stop=True, **rule)
    expected = has_loop(text, **rule)
    assert ends_in_loop(text, section) == expected
    tokens_S = np.int32([*prompt, *text, *[7] * (S - len(prompt) - len(text))])
    run_P = RUNS(tokens_S, len(prompt) + len(text), len(text))
    assert bool(IN_LOOP(run_P[None], LoopRules.build([section], always=False))[0]) == expected


@settings(max_examples=40, deadline=None)
@given(text=texts, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_run_lengths_of_a_growing_text_equal_those_of_the_whole_text(text, prompt):
    state = START(
        np.int32([[*prompt, *[0] * (8 - len(prompt))]]), (np.arange(8) < len(prompt))[None]
    )
    for token in text:
        state = STEP(state, np.int32([token]))
    whole_P = RUNS(state.text[0], len(prompt) + len(text), len(text))
    assert np.asarray(state.loop_runs[0]).tolist() == np.asarray(whole_P).tolist()


def test_a_loop_multiplies_the_temperature():
    looping = {
        "loop_temperature_factor": 3.0,
        "loop_max_period": 1,
        "loop_min_repeats": 4,
        "loop_min_tokens": 1,
    }
    logits_BV = np.float32(np.random.default_rng(0).standard_normal((2, 8)))
    params = SamplingParams.build({"temperature": 0.7, "seed": 1} | looping, batch=2)
    start = jax.jit(
        lambda params: init_state(
            params, jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), bool), 8, 16
        )
    )
    state = start(params)
    append = jax.jit(lambda state, token_B: update(params, state, token_B))
    temperatures = []
    for token_B in [[5, 5], [5, 6], [5, 6], [5, 6], [5, 6], [1, 1]]:
        state = append(state, np.int32(token_B))
        scaled_BV = traced(logits_BV, params, state)["temperature"]
        temperatures.append((np.float64(logits_BV) / np.float64(scaled_BV))[:, 0].tolist())
    np.testing.assert_allclose(
        temperatures, [[0.7, 0.7]] * 3 + [[2.1, 0.7], [2.1, 2.1], [0.7, 0.7]], rtol=1e-6
    )


def test_programs_without_loop_detection_do_not_contain_it():
    params = SamplingParams.build({"seed": 1})
    assert params.loops is None
    state = jax.eval_shape(
        lambda: init_state(params, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1), bool), 8)
    )
    assert state.loop_runs is None
    assert SamplingParams.build({"loop_stop": True, "seed": 1}).loops.factor is None


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"loop_temperature_factor": 2, "greedy": True},
            "loop_temperature_factor has no effect while generation.greedy",
        ),
        (
            {"loop_temperature_factor": 2, "loop_stop": True},
            "loop_temperature_factor has no effect while generation.loop_stop",
        ),
        (
            {"loop_temperature_factor": 2, "sampler_order": ["top_k"]},
            "loop_temperature_factor needs the step temperature",
        ),
        (
            {"loop_min_repeats": 3},
            "loop_min_repeats has no effect while generation.loop_stop is false and",
        ),
        (
            {"loop_stop": True, "loop_min_repeats": 1},
            r"loop_min_repeats must be an integer in \[2, 1024\]",
        ),
        (
            {"loop_stop": True, "loop_max_period": 257},
            r"loop_max_period must be an integer in \[1, 256\]",
        ),
        (
            {"loop_temperature_factor": 0.5},
            r"loop_temperature_factor must be a number in \[1, 100\]",
        ),
    ],
)
def test_errors(given, message):
    with pytest.raises(UserError, match=message):
        build_config({}, {f"generation.{name}": value for name, value in given.items()}, origin="")

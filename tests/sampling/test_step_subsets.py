"""Programs for a subset of the sampling steps draw the same tokens as the program for all steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import GenerationSection
from dantinox.sampling import SamplingParams, init_state, sample
from dantinox.sampling.step_subsets import (
    ALL_STEPS,
    reduce_params,
    reduce_state,
    restore,
    smallest_subset,
)

GREEDY, TEMPERATURE, PLAIN = range(3)


@pytest.mark.parametrize(
    ("settings", "subset"),
    [
        ({"greedy": True}, GREEDY),
        (
            {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "top_p": 0.5},
            GREEDY,
        ),
        ({}, TEMPERATURE),
        ({"temperature": 0.7, "presence_penalty": 0.1, "seed": 1}, TEMPERATURE),
        ({"preset": "llamacpp", "temperature": 0.7, "frequency_penalty": 0.1}, TEMPERATURE),
        (
            {
                "temperature": 0.7,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.05,
                "frequency_penalty": 0.1,
                "seed": 1,
            },
            PLAIN,
        ),
        ({"preset": "hf", "top_k": 5, "top_p": 0.9, "temperature": 0.5}, PLAIN),
        ({"preset": "llamacpp", "top_k": 5}, PLAIN),  # the order of the other steps does not matter
        (
            {"preset": "llamacpp", "top_k": 5, "temperature": 0.5},
            ALL_STEPS,
        ),  # the temperature comes last
        ({"preset": "vllm", "min_p": 0.1, "top_k": 5}, ALL_STEPS),
        (
            {"sampler_order": ["top_k"], "top_p": 0.5},
            ALL_STEPS,
        ),  # top_p is on, but the order leaves it out
        ({"top_p": 0.5, "top_p_rule": "exclusive"}, ALL_STEPS),
        ({"top_k": 5, "ties": "all"}, ALL_STEPS),
        ({"min_tokens": 3}, ALL_STEPS),
        ({"logit_bias": {"5": 1.0}}, ALL_STEPS),
        ({"greedy": True, "dry_multiplier": 0.8}, ALL_STEPS),
        ({"typical": 0.9}, ALL_STEPS),
        ({"watermark_keys": [1, 2]}, ALL_STEPS),
        ({"greedy": True, "loop_stop": True}, ALL_STEPS),
        ({"loop_temperature_factor": 2.0}, ALL_STEPS),
        ({"strategy": "entropy"}, ALL_STEPS),
    ],
)
def test_settings_choose_the_smallest_subset(settings, subset):
    assert smallest_subset(GenerationSection(**settings)) == subset


ROWS = {
    GREEDY: [
        {"greedy": True},
        {"greedy": True, "repetition_penalty": 1.5},
        {"temperature": 0.0, "frequency_penalty": 0.7},
    ],
    TEMPERATURE: [
        {"seed": 1},
        {"seed": 2, "temperature": 0.3, "repetition_penalty": 1.3},
        {"greedy": True},
    ],
    PLAIN: [
        {"seed": 1},
        {"seed": 2, "temperature": 0.6, "top_k": 9},
        {"seed": 3, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
        {"seed": 4, "temperature": 1.4, "presence_penalty": 0.5, "min_p": 0.1},
        {"greedy": True, "frequency_penalty": 0.2},
        {"seed": 5, "temperature": 2.0, "top_p": 0.9999},
    ],
}


@pytest.mark.parametrize(
    "vocab_size", [97, pytest.param(5000, marks=pytest.mark.slow)]
)  # without windows, and with windows
@pytest.mark.parametrize("subset", ROWS)
def test_a_subset_draws_the_same_tokens(subset, vocab_size):
    rows, random = ROWS[subset], np.random.default_rng(0)
    assert max(smallest_subset(GenerationSection(**row)) for row in rows) == subset
    params = SamplingParams.build(rows, dynamic_order=True, vocab_size=vocab_size)
    prompts = jnp.asarray(random.integers(0, vocab_size, (len(rows), 7)))
    state = init_state(params, prompts, jnp.ones(prompts.shape, bool), vocab_size, 32)
    step = jax.jit(lambda logits_BV, params, state: sample(logits_BV, params, state)[:2])
    full = state
    for _ in range(8):
        logits_BV = jnp.asarray(random.standard_normal((len(rows), vocab_size)) * 3, jnp.float32)
        token_B, reduced = step(
            logits_BV, reduce_params(subset, params), reduce_state(subset, state)
        )
        expected_B, full = step(logits_BV, params, full)
        assert token_B.tolist() == expected_B.tolist()
        state = restore(state, reduced)
        for name in ("n_generated", "length", "last_seen", "count"):
            np.testing.assert_array_equal(getattr(state, name), getattr(full, name), name)

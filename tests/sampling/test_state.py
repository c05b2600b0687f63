"""Compares the incrementally updated sampler state with a state computed from the whole history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.sampling import SamplingParams, init_state, update
from dantinox.sampling.history import (
    bad_words,
    extend_repeat_lengths,
    longest_repeats,
    repeat_lengths,
    sequence_arrays,
)
from tests.error_texts import ERRORS

V, S = 7, 24
EVERYTHING = {
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "no_repeat_ngram": 3, "dry_multiplier": 1.0,
    "dry_breakers": [2], "mirostat": 2, "bad_words": [[1, 2]], "seed": 1,
}  # fmt: skip
PARAMS = SamplingParams.build(
    [EVERYTHING, EVERYTHING | {"repetition_scope": "output", "presence_scope": "all"}]
)
START = jax.jit(lambda tokens, valid: init_state(PARAMS, tokens, valid, V, S))
STEP = jax.jit(
    lambda state, token, active, surprise: update(PARAMS, state, token, active, surprise)
)
REPEATS, LENGTHENED = jax.jit(repeat_lengths), jax.jit(extend_repeat_lengths)
LONGEST = jax.jit(longest_repeats, static_argnames="vocab_size")
BAD_WORDS = jax.jit(bad_words)
texts = st.lists(st.integers(0, V - 1), max_size=S - 1)


def common_suffix(text, j):
    """Number of tokens before position j that equal the last tokens of the history."""
    n = 0
    while n < j and text[j - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n


def padded(text):
    return np.int32([*text, *[0] * (S - len(text))])


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_repeat_lengths_match_their_definition(text):
    run_S = np.asarray(REPEATS(padded(text), len(text)))
    assert run_S[: len(text)].tolist() == [common_suffix(text, j) for j in range(len(text))]


@settings(max_examples=100, deadline=None)
@given(text=texts, token=st.integers(0, V - 1))
def test_incremental_repeat_lengths_equal_recomputed_ones(text, token):
    before, longer = padded(text), [*text, token]
    got = np.asarray(LENGTHENED(np.asarray(REPEATS(before, len(text))), before, len(text), token))
    assert (
        got[: len(longer)].tolist()
        == np.asarray(REPEATS(padded(longer), len(longer)))[: len(longer)].tolist()
    )


@settings(max_examples=100, deadline=None)
@given(text=texts, breakers=st.sets(st.integers(0, V - 1), max_size=2), window=st.integers(0, S))
def test_longest_repeats_match_their_definition(text, breakers, window):
    """DRY's L of every token: the longest suffix before an earlier occurrence, inside the window,
    without a breaker.
    """
    part = text[-window:] if window else text
    expected = [0] * V
    for j, token in enumerate(part):
        n = 0
        while (
            n < j and part[j - 1 - n] == part[len(part) - 1 - n] and part[j - 1 - n] not in breakers
        ):
            n += 1
        if token not in breakers:
            expected[token] = max(expected[token], n)
    padded_S = padded(text)
    breaker_S = np.isin(padded_S, [*breakers])
    got = LONGEST(
        padded_S,
        len(text),
        np.asarray(REPEATS(padded_S, len(text))),
        breaker_S,
        window,
        vocab_size=V,
    )
    assert np.asarray(got).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(
    text=texts, words=st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), max_size=3)
)
def test_bad_words_match_their_definition(text, words):
    banned = {
        word[-1]
        for word in words
        if len(word) == 1 or text[len(text) - len(word) + 1 :] == word[:-1]
    }
    got = np.asarray(
        BAD_WORDS(np.zeros(V, np.float32), padded(text), len(text), *sequence_arrays(words, 3, 3))
    )
    assert set(np.flatnonzero(got == -np.inf)) == (banned if len(banned) < V else set(range(1, V)))


def expected_state(prompt, output, scope_seen, scope_count):
    text = prompt + output
    seen, counted = (
        text if scope_seen == "all" else output,
        (text if scope_count == "all" else output),
    )
    last_seen = [
        max((len(text) - len(seen) + i for i, t in enumerate(seen) if t == v), default=-1)
        for v in range(V)
    ]
    return {
        "n_generated": len(output), "length": len(text), "last_seen": last_seen,
        "count": [counted.count(v) for v in range(V)], "text": text,
        "repeats": [common_suffix(text, j) for j in range(len(text))],
        "breaker": [t == 2 for t in text],
    }  # fmt: skip


def test_an_updated_state_equals_a_recomputed_state():
    """Two rows with different scopes, prompts padded on both sides, one row idle for some steps."""
    rng = np.random.default_rng(0)
    prompts, outputs = [[3, 1, 2, 3, 1], [5]], [[], []]
    tokens, valid = np.int32([[3, 1, 2, 3, 1, 6], [6, 6, 5, 6, 6, 6]]), np.zeros((2, 6), bool)
    valid[0, :5], valid[1, 2] = True, True
    state = START(tokens, valid)
    mu = [10.0, 10.0]
    for i in range(15):
        active = np.array([True, i % 3 != 1])
        token, surprise = rng.integers(0, 4, 2), np.float32(rng.uniform(0, 9, 2))
        state = STEP(state, token, active, surprise)
        for b in np.flatnonzero(active):
            outputs[b].append(int(token[b]))
            mu[b] -= 0.1 * (float(surprise[b]) - 5.0)
        for b, scopes in enumerate((("all", "output"), ("output", "all"))):
            for name, value in expected_state(prompts[b], outputs[b], *scopes).items():
                got = np.asarray(getattr(state, name))[b].tolist()
                assert (got[: len(value)] if isinstance(value, list) else got) == value, (
                    i,
                    b,
                    name,
                )
    np.testing.assert_allclose(state.mu, mu, rtol=1e-5)


def test_a_state_contains_only_fields_that_the_plan_reads():
    plain = START(np.int32([[1], [1]]), np.ones((2, 1), bool))
    assert all(
        getattr(plain, name) is not None
        for name in ("last_seen", "count", "text", "repeats", "breaker", "mu")
    )
    for row, fields in (
        ({"top_k": 5}, set()),
        ({"repetition_penalty": 2.0}, {"last_seen"}),
        ({"frequency_penalty": 2.0}, {"count"}),
        ({"no_repeat_ngram": 2}, {"text", "repeats"}),
        ({"bad_words": [[1, 2]]}, {"text"}),
        ({"dry_multiplier": 1.0, "dry_breakers": []}, {"text", "repeats", "breaker"}),
        ({"mirostat": 1}, {"mu"}),
    ):
        params = SamplingParams.build(row | {"seed": 1})
        state = jax.eval_shape(
            lambda params=params: init_state(params, jnp.int32([[1]]), jnp.ones((1, 1), bool), V, S)
        )
        optional = {"last_seen", "count", "text", "repeats", "breaker", "mu"}
        assert {name for name in optional if getattr(state, name) is not None} == fields
    with pytest.raises(ValueError, match=ERRORS["capacity_must_be_set_bad_words"]):
        init_state(
            SamplingParams.build({"bad_words": [[1, 2]], "greedy": True}),
            np.int32([[1]]),
            np.ones((1, 1), bool),
            V,
        )

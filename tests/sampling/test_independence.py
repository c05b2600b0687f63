"""Eight different requests share a batch: each result is bit for bit that of a solo run, and no
number recompiles.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.sampling import SamplingParams, init_state, sample

V, B, STEPS, CAPACITY = 5000, 9, 3, 32
ROWS = [
    {"greedy": True, "frequency_penalty": 0.4},
    {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "repetition_range": 5,
        "repetition_slope": 1.5,
    },
    {"top_p": 0.999, "dry_multiplier": 1.0, "dry_breakers": [7]},
    {"min_p": 0.05, "xtc_probability": 0.5, "xtc_threshold": 0.1, "presence_penalty": 1.0},
    {
        "typical": 0.4,
        "tail_free": 0.9,
        "no_repeat_ngram": 2,
        "dynatemp_low": 0.5,
        "dynatemp_high": 1.5,
    },
    {"mirostat": 2, "mirostat_tau": 3.0, "logit_bias": {"3": 2.0, "11": -float("inf")}},
    {
        "top_a": 0.1,
        "epsilon_cutoff": 0.001,
        "smoothing_factor": 0.2,
        "smoothing_curve": 1.3,
        "banned_tokens": [1, 2],
    },
    {
        "adaptive_target": 0.2,
        "p_less": "plain",
        "watermark_keys": [3, 4],
        "watermark_ngram": 2,
        "encoder_repetition_penalty": 2.0,
    },
    {
        "top_n_sigma": 2.0,
        "eta_cutoff": 0.002,
        "bad_words": [[4, 5], [6]],
        "min_tokens": 2,
        "top_k": 400,
        "mirostat": 1,
    },
]
ROWS = [row | {"seed": 2**32 - 1 - b} for b, row in enumerate(ROWS)]
STRANGER = {
    "temperature": 1.9, "top_k": 700, "top_p": 0.3, "typical": 0.99, "tail_free": 0.2, "min_p": 0.3,
    "top_a": 2.0, "seed": 5, "repetition_penalty": 3.0, "presence_penalty": -1.0,
    "dry_multiplier": 3.0, "dry_breakers": [1], "no_repeat_ngram": 1, "xtc_probability": 1.0,
    "mirostat": 2, "smoothing_factor": 1.0, "banned_tokens": [9, 8], "bad_words": [[3, 3], [1]],
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_n_sigma": 0.5,
    "logit_bias": {"0": 5.0, "1": 1.0}, "min_tokens": 30, "min_k": 4.0, "p_less": "norm",
    "top_h": 0.3, "skew": 2.0, "watermark_keys": [1, 2], "encoder_repetition_penalty": 0.5,
}  # fmt: skip
# Three more rows enable all steps, so that every batch has the same plan: one program.
FULL = STRANGER | {
    "temperature": 1.0, "dynatemp_low": 0.5, "dynatemp_high": 2.0, "mirostat": 0,
    "adaptive_target": 0.4, "p_less": "plain",
}  # fmt: skip
EXTRA = [STRANGER, FULL, {"mirostat": 1, "seed": 6}]


@jax.jit
def step(logits_BV, params, state, active_B):
    return sample(logits_BV, replace(params, report=0), state, active_B=active_B)


def build(rows):
    return SamplingParams.build([*rows, *EXTRA], stop_ids=[4], protected_ids=[4], vocab_size=V)


def language(seed):
    rng = np.random.default_rng(seed)
    return np.float32(rng.permutation(-1.8 * np.log(np.arange(V) + 2.0)) + rng.normal(0, 0.4, V))


LOGITS = {b: np.stack([language(100 * b + i) for i in range(STEPS)]) for b in range(B)}


def decode(rows, logits, prompts, active):
    """Returns the tokens of every row and the bits of their log-probabilities; the rows `EXTRA` are
    idle.
    """
    params = build(rows)
    lengths = np.array([*map(len, prompts), *[1] * len(EXTRA)])
    tokens = np.zeros((B + len(EXTRA), 6), np.int32)
    for row, prompt in zip(tokens, prompts, strict=False):
        row[: len(prompt)] = prompt
    state = init_state(params, jnp.asarray(tokens), jnp.arange(6) < lengths[:, None], V, CAPACITY)
    columns = []
    for i in range(STEPS):
        step_BV = jnp.asarray(np.stack([row[i] for row in (*logits, *logits[:1] * len(EXTRA))]))
        token_B, state, info = step(
            step_BV, params, state, jnp.asarray([*active, *[False] * len(EXTRA)])
        )
        columns.append(
            np.stack([token_B, np.asarray(info.token.logprob_sampled).view(np.int32)], axis=1)
        )
    return np.stack(columns, axis=1)


PROMPTS = [[b, 3, 3 + b % 2, 3][: 1 + b % 4] for b in range(B)]


@pytest.fixture(scope="module")
def alone():
    """Decodes each row as the first row of a batch whose other rows are idle."""
    found = []
    for b in range(B):
        rows = [ROWS[b], *[STRANGER] * (B - 1)]
        logits = [LOGITS[b], *[LOGITS[(b + 1) % B]] * (B - 1)]
        found.append(decode(rows, logits, [PROMPTS[b]] * B, [True, *[False] * (B - 1)])[0])
    return np.stack(found)


@pytest.mark.slow
def test_rows_of_a_batch_equal_their_solo_runs(alone):
    compiled = step._cache_size()
    np.testing.assert_array_equal(
        decode(ROWS, list(LOGITS.values()), PROMPTS, [True] * B)[:B], alone
    )
    assert step._cache_size() == compiled
    assert len({tuple(row[:, 0]) for row in alone}) == B


@pytest.mark.slow
def test_rows_do_not_depend_on_index_or_other_rows(alone):
    rng = np.random.default_rng(0)
    compiled = step._cache_size()
    for _ in range(100):
        order = rng.permutation(B)
        stays = rng.random(B) < 0.6
        rows, logits = [], []
        for b in order:
            other = STRANGER | {
                "seed": int(rng.integers(99)),
                "top_k": int(rng.integers(9)),
                "top_p": rng.random(),
            }
            rows.append(ROWS[b] if stays[b] else other)
            logits.append(LOGITS[b if stays[b] else int(rng.integers(B))])
        active = stays[order] | (rng.random(B) < 0.7)
        got = decode(rows, logits, [PROMPTS[b] for b in order], active)
        for place, b in enumerate(order):
            if stays[b]:
                np.testing.assert_array_equal(got[place], alone[b])
    assert step._cache_size() == compiled, (
        "batches of other numbers, tokens and words are one program"
    )


@pytest.mark.slow
def test_one_more_step_compiles_one_more_program():
    size = step._cache_size

    def once(row):
        params = SamplingParams.build([row] * 2, stop_ids=[4])
        state = init_state(params, np.zeros((2, 1), np.int32), np.ones((2, 1), bool), 50, 8)
        step(np.zeros((2, 50), np.float32), params, state, np.ones(2, bool))

    once({"top_k": 3, "seed": 1})
    before = size()
    for changed in ({"top_k": 7, "seed": 2}, {"top_k": 1, "seed": 2}):
        once(changed)
    assert size() == before
    once({"top_k": 3, "min_p": 0.1, "seed": 1})
    assert size() == before + 1
    once({"top_k": 3, "min_p": 0.4, "seed": 9})
    assert size() == before + 1

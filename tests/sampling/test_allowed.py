"""Token masks: drawn tokens are always allowed, and rows without a mask do not change."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import traced

from dantinox.sampling import SamplingParams, init_state, sample
from dantinox.sampling.chain import unpack_bits

V, B = 100, 6
LOGITS = np.float32(np.random.default_rng(4).normal(0, 3, (B, V)))
UNPACK = jax.jit(unpack_bits, static_argnums=1)
EVERYTHING = np.full((B, -(-V // 32)), 0xFFFFFFFF, np.uint32)
ROWS = [
    {"temperature": 3.0, "seed": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "typical": 0.99},
    {"greedy": True, "logit_bias": {"7": 50.0}},
    {"seed": 2, "banned_tokens": [3, 4, 5], "repetition_penalty": 1.5, "frequency_penalty": -1.0},
    {"seed": 3, "min_tokens": 5, "xtc_probability": 1.0, "xtc_threshold": 0.001},
    {
        "seed": 4,
        "dry_multiplier": 1.0,
        "dry_breakers": [13],
        "sequence_bias": [[[9], 20.0]],
        "allowed_tokens": [9, 10, 11],
    },
    {"seed": 5},
]


# Rows with steps of every kind: an edit, a penalty, a filter, and a greedy row.
FEW = [
    {"temperature": 3.0, "seed": 1, "top_k": 40},
    {"greedy": True, "logit_bias": {"7": 50.0}},
    {"seed": 2, "repetition_penalty": 1.5, "top_k": 3},
    {"seed": 3, "logit_bias": {"8": -2.0}},
    {"seed": 4, "top_k": 10},
    {"seed": 5},
]


def packed(allowed_BV):
    """Packs masks to uint32 words with NumPy, lowest bit first."""
    padded = np.pad(allowed_BV, [(0, 0), (0, -allowed_BV.shape[1] % 32)])
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


@partial(jax.jit, static_argnames="report")
def draw(logits_BV, params, state, report=3):
    return sample(logits_BV, replace(params, report=report), state)


@jax.jit
def start(params):
    tokens = jnp.broadcast_to(jnp.asarray([1, 2, 3]), (params.batch, 3))
    return init_state(params, tokens, jnp.ones(tokens.shape, bool), V, 64)


def some(seed, share=0.1):
    allowed_BV = np.random.default_rng(seed).random((B, V)) < share
    allowed_BV[:, seed % V] = True
    return allowed_BV


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100, 259])
def test_unpack_bits_matches_numpy(size):
    bits_W = np.random.default_rng(size).integers(0, 2**32, -(-size // 32), dtype=np.uint32)
    expected = np.unpackbits(bits_W.view(np.uint8), bitorder="little")[:size].astype(bool)
    np.testing.assert_array_equal(UNPACK(bits_W, size), expected)


@pytest.mark.parametrize(
    "rows", [FEW, pytest.param(ROWS, marks=pytest.mark.slow)], ids=["few steps", "many steps"]
)
def test_drawn_tokens_are_always_allowed(rows):
    params = SamplingParams.build(rows, stop_ids=[0])
    state = start(params)
    for seed in range(40):
        allowed_BV = some(seed, 0.02 if seed % 2 else 0.3)
        token_B, state, info = draw(LOGITS, replace(params, allowed_bits=packed(allowed_BV)), state)
        assert allowed_BV[np.arange(B), np.asarray(token_B)].all()
        assert not np.asarray(info.empty).any()


def test_a_mask_changes_only_its_own_row():
    params = SamplingParams.build(FEW)
    bits = EVERYTHING.copy()
    bits[1] = packed(some(1))[1]
    free, one = replace(params, allowed_bits=EVERYTHING), replace(params, allowed_bits=bits)
    plain, all_free, constrained = (
        traced(LOGITS, each, start(params)) for each in (params, free, one)
    )
    plain = {name: np.asarray(x_BV) for name, x_BV in plain.items()}
    for others, rows in ((all_free, [*range(B)]), (constrained, [0, 2, 3, 4, 5])):
        for name, x_BV in others.items():
            np.testing.assert_array_equal(
                np.asarray(x_BV)[rows], plain.get(name, plain["model"])[rows], name
            )
    tokens = [np.asarray(draw(LOGITS, each, start(params))[0]) for each in (params, free, one)]
    np.testing.assert_array_equal(tokens[0], tokens[1])
    np.testing.assert_array_equal(np.delete(tokens[0], 1), np.delete(tokens[2], 1))


def test_the_mask_overrides_settings_that_remove_all_allowed_tokens():
    params = SamplingParams.build(
        [
            {"greedy": True, "banned_tokens": [20, 21]},
            {"seed": 1, "logit_bias": {"20": -float("inf"), "21": -float("inf")}},
            {"seed": 2, "allowed_tokens": [50]},
            {"seed": 3, "min_tokens": 9},
        ],
        stop_ids=[20, 21],
    )
    allowed = np.zeros((4, V), bool)
    allowed[:, [20, 21]] = True
    token_B, _, info = draw(
        LOGITS[:4], replace(params, allowed_bits=packed(allowed)), start(params)
    )
    assert set(np.asarray(token_B).tolist()) <= {20, 21}
    assert not np.asarray(info.empty).any()


def test_the_mask_overrides_a_model_without_allowed_tokens():
    logits = np.array(LOGITS[:3])
    logits[0] = np.nan
    logits[1, 5] = np.inf  # removes all other tokens
    logits[2, [20, 21]] = -np.inf
    allowed = np.zeros((3, V), bool)
    allowed[:, [20, 21]] = True
    params = SamplingParams.build([{"seed": 1}, {"greedy": True}, {"seed": 3}])
    token_B, _, info = draw(logits, replace(params, allowed_bits=packed(allowed)), start(params))
    assert set(np.asarray(token_B).tolist()) <= {20, 21}
    assert not np.asarray(info.empty).any()


def test_reports_about_the_model_ignore_the_mask():
    params = SamplingParams.build(FEW)
    _, _, free = draw(LOGITS, params, start(params))
    bits = packed(some(3))
    token_B, _, held = draw(LOGITS, replace(params, allowed_bits=bits), start(params))
    for name in ("entropy", "varentropy", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(held.token, name), getattr(free.token, name), name)
    x_BV = np.float64(LOGITS)
    logprobs_BV = x_BV - np.log(np.exp(x_BV).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        held.token.logprob, logprobs_BV[np.arange(B), np.asarray(token_B)], atol=1e-5
    )
    assert (np.asarray(held.token.survivors) <= some(3).sum(1)).all()


@pytest.mark.slow
def test_the_entropy_router_chooses_allowed_tokens():
    rows = [
        {"strategy": "entropy", "seed": seed, "clarify_token": 30, "use_attention": False}
        for seed in range(B)
    ]
    params, spread = SamplingParams.build(rows), np.linspace(0.01, 4, B, dtype=np.float32)[:, None]
    state = start(params)
    for seed in range(20):
        allowed_BV = some(seed, 0.05)
        allowed_BV[:, 30] = False
        token_B, state, _ = draw(
            LOGITS * spread, replace(params, allowed_bits=packed(allowed_BV)), state
        )
        assert allowed_BV[np.arange(B), np.asarray(token_B)].all()


def test_no_mask_is_compiled_without_constraints():
    params = SamplingParams.build([{"seed": 1}] * B)
    text = draw.lower(LOGITS, params, start(params)).as_text()
    held = draw.lower(LOGITS, replace(params, allowed_bits=EVERYTHING), start(params)).as_text()
    assert f"tensor<{B}x{EVERYTHING.shape[1]}xui32>" not in text
    assert f"tensor<{B}x{EVERYTHING.shape[1]}xui32>" in held

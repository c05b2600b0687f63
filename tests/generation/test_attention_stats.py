"""Compares the attention statistics of generated texts with NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError

from . import builder

PROMPT = "abcde"


def reference(model, ids):
    """The statistics `[4, L, H]` of the newest of `ids`, from the scores of a pass without a
    cache.
    """
    tokens_1T, positions_1T = jnp.asarray(ids)[None], jnp.arange(len(ids))[None]
    *_, aux = model.hidden(
        tokens_1T, positions_1T, probe=lambda scores_BHS, valid_BS: (scores_BHS[0], valid_BS[0])
    )
    layers = []
    for scores_HS, valid_S in aux["probe"]:
        valid_HS = np.broadcast_to(valid_S, scores_HS.shape)
        scores_HS = np.float64(scores_HS)
        weights_HS = np.where(valid_HS, np.exp(scores_HS - scores_HS.max()), 0)
        a_HS = weights_HS / weights_HS.sum(1, keepdims=True)
        bits_HS = np.where(a_HS > 0, -np.log2(np.where(a_HS > 0, a_HS, 1)), 0)
        entropy_H = (a_HS * bits_HS).sum(1)
        varentropy_H = (a_HS * (bits_HS - entropy_H[:, None]) ** 2).sum(1)
        agreement_H = 1 - np.abs(a_HS - a_HS.mean(0)).sum(1) / 2
        strength_H = (np.abs(scores_HS) * valid_HS).sum(1) / valid_HS.sum(1)
        layers.append([entropy_H, varentropy_H, agreement_H, strength_H])
    return np.array(layers).swapaxes(0, 1)


@pytest.mark.parametrize("changes", [{}, {"windows": (4, None)}])
def test_the_statistics_equal_those_of_passes_without_a_cache(changes):
    run = builder.byte_model(64, **changes)
    first, second = run.generate(
        PROMPT, n=2, max_new_tokens=35, seed=1, ignore_eos=True, attention_stats=True
    )
    for result in (first, second):
        ids = [*run.prompt_ids(PROMPT), *result.tokens]
        shape = len(result.tokens), run.model.config.num_blocks, run.model.config.n_heads
        assert all(array.shape == shape and array.dtype == np.float32 for array in result.attention)
        for step in (0, 1, 31, len(result.tokens) - 1):
            seen = ids[: len(ids) - len(result.tokens) + step]
            got = np.array([array[step] for array in result.attention])
            np.testing.assert_allclose(got, reference(run.model, seen), rtol=1e-5, atol=1e-5)
    assert (
        run.generate(PROMPT, n=2, max_new_tokens=35, seed=1, ignore_eos=True)[1].tokens
        == second.tokens
    )
    assert run.generate(PROMPT, max_new_tokens=2, seed=1).attention is None


def test_they_are_what_the_router_reads():
    run = builder.byte_model(64)
    result = run.generate(
        PROMPT, max_new_tokens=9, seed=1, strategy="entropy", logprobs=0, attention_stats=True
    )
    read, found = result.steps.routed.attention, result.attention
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(found.entropy.mean((1, 2)), read.attn_entropy, **close)
    np.testing.assert_allclose(found.entropy.var(2).mean(1), read.attn_varentropy, **close)
    np.testing.assert_allclose(found.agreement.mean((1, 2)), read.attn_agreement, **close)
    np.testing.assert_allclose(found.strength.mean((1, 2)), read.interaction_strength, **close)


def test_a_text_without_tokens_and_settings_that_exclude_it():
    run = builder.byte_model(64)
    assert run.generate("", max_new_tokens=0, attention_stats=True).attention.entropy.shape[0] == 0
    assert (
        run.generate(
            "", max_new_tokens=1, greedy=True, attention_stats=True
        ).attention.entropy.shape[0]
        == 1
    )
    with pytest.raises(UserError, match="attention_stats reads all keys"):
        run.generate(PROMPT, attention_stats=True, kv_budget=0.5)

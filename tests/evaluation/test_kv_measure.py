"""What is measured of a head by leaving keys out: attention over some keys in NumPy, and who gets slots for what it costs."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation import builder
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.evaluation.kv_measure import LEAST_KEPT, SINKS, Limited, divided, loss_signal, losses, read_limited

B, T, K, G, H = 2, 14, 2, 2, 4


def seen_by(t, start, kept, weights_GS, window, best):
    """The keys that a query at t sees through a head that keeps so many."""
    keys = [s for s in range(t + 1) if window is None or t - s < window]
    if t < start:
        return keys
    if not best:
        return [s for s in keys if s < SINKS or s > t - (kept - SINKS)]
    mean = np.mean([w / w.sum() for w in weights_GS[:, keys]], axis=0)
    return sorted(keys[i] for i in np.argsort(-mean)[:kept])


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_later_queries_see_the_best_or_the_newest_keys(best, window):
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((B, T, K, *shape)) for shape in ((G, H), (H,), (H,)))
    kept, starts, lengths = np.array([6, 9]), np.array([5, 10]), np.array([T, 12])
    positions = np.where(np.arange(T) < lengths[:, None], np.arange(T), -1)
    limited = Limited(jnp.asarray(kept), jnp.asarray(starts), best)
    out, _, _ = limited.attend(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(positions), window)
    left_out = 0
    for b, t, head in np.ndindex(B, T, K):
        if t >= lengths[b]:
            continue
        weights_GS = np.exp(q[b, t, head] @ k[b, :, head].T / np.sqrt(H))
        keys = seen_by(t, starts[b], kept[head], weights_GS, window, best)
        left_out += len(keys) < min(t + 1, window or T)
        chosen = weights_GS[:, keys] / weights_GS[:, keys].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[b, t, head], chosen @ v[b, keys, head], atol=1e-5)
    assert left_out >= 10


def test_a_text_read_through_few_keys_is_that_of_these_keys():
    """In one layer keys and values are those of the tokens alone: what a query may see is a text of its own."""
    model = builder.model(builder.config(windows=(None,), kv_heads=1))
    tokens = np.random.default_rng(4).integers(0, builder.V, (1, 24))
    found = read_limited(model, jnp.asarray(tokens), jnp.array([24]), jnp.array([[9]]), jnp.array([15]), start=10, best=False)
    assert found.shape == (1, 24 - 10 + 1, builder.V)
    for t in (9, 14, 15, 23):
        at = np.array([s for s in range(t + 1) if t < 15 or s < SINKS or s > t - (9 - SINKS)])
        logits = np.asarray(model(jnp.asarray(tokens[:, at]), jnp.asarray(at[None]))[0], np.float64)[0, -1]
        np.testing.assert_allclose(found[0, t - 9], logits - np.log(np.exp(logits).sum()), atol=1e-4)


def test_losses_are_means_over_the_tokens_behind_the_prompt():
    random = np.random.default_rng(5)
    tokens, lengths, start = random.integers(0, 7, (3, 12)), np.array([12, 9, 6]), 5
    logprobs = -random.random((3, 12 - start + 1, 7))
    expected = [-np.mean([logprobs[b, t - start, tokens[b, t]] for t in range(start, end)]) for b, end in enumerate(lengths)]
    np.testing.assert_allclose(losses(jnp.asarray(logprobs), tokens, lengths, start), expected, rtol=1e-5)


# --- who gets the slots


def test_slots_go_where_they_help_most():
    sizes = [32, 64, 128, 256]
    needs = np.array([[0.9, 0.9, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0], [0.0] * 4, [0.0, -0.1, 0.01, 0.0]])
    # 1,024 slots, a quarter of which are 256: the first head's step to 128 costs 96, the second's to 64 costs 32.
    assert divided(needs, sizes, 0.25).tolist() == [128, 64, 32, 32]  # nothing is left
    # No step of the first head can be paid for; the second's leaves 16, of which all get as many.
    assert divided(needs, sizes, 176 / 1024).tolist() == [36, 68, 36, 36]
    flat = divided(np.zeros((3, 4)), sizes, 0.5)
    assert flat.tolist() == [128] * 3


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.floats(0.02, 1), st.integers(0, 2**32 - 1))
def test_the_slots_are_those_there_are(heads, steps, share, seed):
    sizes = [LEAST_KEPT << step for step in range(steps)]
    rises = np.random.default_rng(seed).normal(size=(heads, steps))
    rises[:, -1] = 0
    slots = divided(rises, sizes, share)
    assert slots.min() >= sizes[0]
    assert slots.sum() == pytest.approx(max(share * heads * sizes[-1], heads * sizes[0]))


@pytest.mark.slow
def test_a_head_that_looks_far_back_gets_the_slots():
    """Of four heads with random weights three are made to say nothing: their slots are worth nothing."""
    T, start = 320, 160
    model = nnx.clone(builder.model(builder.config(windows=(None, None), max_context=T)))
    for number, block in enumerate(model.blocks):
        kernel = np.array(block.attention.out.kernel[...])
        for head in range(2):
            kernel[head] *= 30 if (number, head) == (1, 0) else 0
        block.attention.out.kernel[...] = jnp.asarray(kernel)
    texts = np.random.default_rng(6).integers(0, builder.V, (3, T))
    likeliest = np.asarray(model(jnp.asarray(texts), jnp.broadcast_to(jnp.arange(T), (3, T)))[0]).argmax(-1)
    texts[:, start:] = likeliest[:, start - 1 : -1]
    said = []
    slots = loss_signal(model, texts, np.array([T, 250, 90]), said.append)  # the last ends within the prompt
    assert slots.sum() == pytest.approx(0.2 * 4 * T) and slots.min() >= T // 16
    assert slots[1, 0] > 64 and slots[0, 0] == slots[0, 1] == slots[1, 1] < 48
    assert said == [f"measuring what eviction costs, layer {layer} of 2" for layer in (1, 2)]

"""Attention over limited keys against NumPy, and the estimated rise of the loss."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation import builder

from dantinox.lab.measure import head_loss as eviction
from dantinox.lab.measure.head_loss import SINKS, LimitedKeys, estimate_loss_rises, limited_logprobs
from dantinox.model import KVCache
from dantinox.model.cache import uncompressed_slots

B, T, K, G, H = 2, 14, 2, 2, 4


def seen_by(t, start, kept, weights_GS, window, best):
    """Returns the keys that a query at t sees through a head that keeps `kept` keys."""
    keys = [s for s in range(t + 1) if window is None or t - s < window]
    if t < start:
        return keys
    if not best:
        return [s for s in keys if s < SINKS or s > t - (kept - SINKS)]
    mean = np.mean([w / w.sum() for w in weights_GS[:, keys]], axis=0)
    return sorted(keys[i] for i in np.argsort(-mean)[:kept])


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_limited_queries_see_the_best_or_the_newest_keys(best, window):
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((B, T, K, *shape)) for shape in ((G, H), (H,), (H,)))
    kept, starts, lengths = np.array([6, 9]), np.array([5, 10]), np.array([T, 12])
    positions = np.where(np.arange(T) < lengths[:, None], np.arange(T), -1)
    limited = LimitedKeys(jnp.asarray(kept), jnp.asarray(starts), best)
    out = jax.jit(lambda *x: limited.attend(*x, window)[0])(
        *(np.float32(x) for x in (q, k, v)), positions
    )
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


def test_limited_text_equals_the_text_of_the_visible_tokens():
    """In a single layer, keys and values depend only on their own token, so the visible tokens form
    a text of their own.
    """
    model = builder.model(builder.config(windows=(None,), kv_heads=1))
    tokens = np.random.default_rng(4).integers(0, builder.V, (1, 24))
    found = limited_logprobs(
        model,
        jnp.asarray(tokens),
        jnp.array([24]),
        jnp.array([[9]]),
        jnp.array([15]),
        start=10,
        best=False,
    )
    assert found.shape == (1, 24 - 10 + 1, builder.V)
    read = jax.jit(lambda model, *x: model(*x)[0])
    for t in (9, 14, 15, 23):
        at = [s for s in range(t + 1) if t < 15 or s < SINKS or s > t - (9 - SINKS)]
        places = np.pad(at, (0, 24 - len(at)), constant_values=-1)
        logits = np.asarray(read(model, tokens[:, places], places[None]), np.float64)[
            0, len(at) - 1
        ]
        np.testing.assert_allclose(
            found[0, t - 9], logits - np.log(np.exp(logits).sum()), atol=1e-4
        )


@partial(jax.tree_util.register_dataclass, data_fields=["limited", "scale_K"], meta_fields=[])
@dataclass(frozen=True)
class Scaled:
    """Attention over all keys, plus the change of its output under limited keys multiplied by the
    scale of each head.
    """

    limited: LimitedKeys
    scale_K: jax.Array

    def attend(self, *args):
        whole = LimitedKeys(jnp.full(K, T), self.limited.from_B, False).attend(*args)[0]
        return (
            whole + (self.limited.attend(*args)[0] - whole) * self.scale_K[:, None, None],
            self,
            None,
        )


@pytest.mark.slow
def test_estimate_is_the_quadratic_term_of_the_divergence(monkeypatch):
    """Compares the estimate for every head with KL(whole ‖ whole + ε δ) / ε², from float64 logits
    and with a small ε.
    """
    model = builder.model(builder.config(windows=(None, None), kv_heads=K))
    lengths, scale = np.array([T, 12]), 0.03
    tokens = np.random.default_rng(8).integers(0, builder.V, (2, T))
    monkeypatch.setattr(eviction, "CONTINUATIONS", 4000)
    rises, sizes = estimate_loss_rises(model, tokens, lengths)
    assert sizes == [8, T] and rises.shape == (2, K, 2) and not rises[..., -1].any()
    positions = np.where(np.arange(T) < lengths[:, None], np.arange(T), -1)
    counted = (np.arange(T) >= (lengths // 2)[:, None]) & (positions >= 0)
    limited = LimitedKeys(jnp.full(K, 8), jnp.asarray(lengths // 2), False)

    @nnx.jit(graph_updates=False)
    def logits_of(model, scale_LK):
        layers = tuple(Scaled(limited, scale_K) for scale_K in scale_LK)
        return model(tokens, positions, cache=KVCache(layers, uncompressed_slots(model.config, T)))[
            0
        ]

    def log_p(scale_LK):
        logits = np.asarray(logits_of(model, jnp.asarray(scale_LK)), np.float64)
        return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)

    full = log_p(np.zeros((2, K)))
    for layer, head in np.ndindex(2, K):
        alone = np.zeros((2, K))
        alone[layer, head] = scale
        near = log_p(alone)
        kl = (np.exp(full) * (full - near)).sum(axis=-1)[counted].mean() / scale**2
        assert rises[layer, head, 0] == pytest.approx(kl, rel=0.12), (layer, head)


@pytest.mark.slow
def test_loss_rises_for_a_head_with_distant_attention(monkeypatch):
    """Of four heads with random weights, three have no effect on the output."""
    T, start = 320, 160
    model = nnx.clone(builder.model(builder.config(windows=(None, None), max_context=T)))
    for number, block in enumerate(model.blocks):
        kernel = np.array(block.attention.out.kernel[...])
        for head in range(2):
            kernel[head] *= 30 if (number, head) == (1, 0) else 0
        block.attention.out.kernel[...] = jnp.asarray(kernel)
    texts = np.random.default_rng(6).integers(0, builder.V, (3, T))
    likeliest = np.asarray(
        model(jnp.asarray(texts), jnp.broadcast_to(jnp.arange(T), (3, T)))[0]
    ).argmax(-1)
    texts[:, start:] = likeliest[:, start - 1 : -1]
    messages, lengths = [], np.array([T, 250, 90])
    monkeypatch.setattr(eviction, "ROWS", 2)
    rises, sizes = estimate_loss_rises(model, texts, lengths, messages.append)
    assert sizes == [24, 48, 96, 192, T] and rises.shape == (2, 2, 5)
    assert (
        np.abs(rises[[0, 0, 1], [0, 1, 1]]).max() < 1e-6
        and rises[1, 0, 0] > 0.1
        and rises[1, 0, -1] == 0
    )
    assert messages[0] == "measuring what eviction costs each head: 3 sequences"
    # The divergence computed directly, over the tokens of the second halves.
    inputs = jnp.asarray(texts), jnp.asarray(lengths)
    kept = [jnp.array([[T, T], [count, T]]) for count in (T, 48)]
    whole, limited = (
        np.asarray(
            limited_logprobs(model, *inputs, x, inputs[1] // 2, start=45, best=False), np.float64
        )
        for x in kept
    )
    parts = [
        (np.exp(whole[b, t - 45]) * (whole[b, t - 45] - limited[b, t - 45])).sum()
        for b, end in enumerate(lengths)
        for t in range(end // 2, end)
    ]
    assert rises[1, 0, 1] == pytest.approx(np.mean(parts), rel=0.4), (
        "at 2.3 nats the second-order estimate is imprecise"
    )

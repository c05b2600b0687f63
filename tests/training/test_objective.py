from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.model.parameters import abstract_model
from dantinox.platform import PLATFORMS
from dantinox.text import PADDING, Batch
from dantinox.training.token_losses import next_token_losses

from .small import VOCABULARY, largest_array, random_weights, small_config, temporary_bytes


@pytest.fixture(scope="module")
def model():
    return model_of(small_config().architecture(VOCABULARY))


def model_of(config):
    return abstract_model(config)[0](random_weights(config))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, 3, 8)).astype(np.int32)
    segments = np.cumsum(rng.random((3, 8)) < 0.2, axis=1).astype(np.int32)
    return Batch(tokens, targets, segments, (rng.random((3, 8)) < 0.7).astype(np.float32))


@partial(jax.jit, static_argnames="chunk_logits")
def summed(model, batch, key=None, chunk_logits=1 << 24):
    return next_token_losses(
        model, batch, rngs=None if key is None else nnx.Rngs(dropout=key), chunk_logits=chunk_logits
    )


@jax.jit
def logits_of(model, batch):
    return model(
        batch.tokens_BT, np.broadcast_to(np.arange(8), (3, 8)), segments_BT=batch.segments_BT
    )[0]


def reference(model, batch):
    """Returns the sums in float64 from the logits of the model."""
    logits = np.asarray(logits_of(model, batch), np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    nats = normalizer - np.take_along_axis(logits, batch.targets_BT[..., None], -1)[..., 0]
    return (nats * batch.mask_BT).sum(), (normalizer**2 * batch.mask_BT).sum(), batch.mask_BT.sum()


@pytest.mark.parametrize("chunk_logits", [1 << 24, 7 * VOCABULARY, 8 * VOCABULARY, 1])
def test_sums_equal_float64_with_and_without_chunks(model, batch, chunk_logits):
    got = summed(model, batch, chunk_logits=chunk_logits)
    found = [float(x) for x in (got.nats, got.penalty, got.num_targets)]
    np.testing.assert_allclose(found, reference(model, batch), rtol=2e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_have_the_same_gradient(batch, tied, monkeypatch):
    """Also covers the code path of accelerators, which rounds the output layer once for all
    chunks.
    """
    monkeypatch.setitem(PLATFORMS, "gpu", replace(PLATFORMS["gpu"], min_loss_chunk_tokens=1))

    def gradient(platform, chunk_logits):
        config = small_config(
            **{"model.dtype": "float32", "model.weight_tying": tied}
        ).architecture(VOCABULARY, platform)
        graph, state = nnx.split(model_of(config))

        def loss(state):
            total = next_token_losses(nnx.merge(graph, state), batch, chunk_logits=chunk_logits)
            return total.nats + 0.1 * total.penalty

        return jax.tree.leaves(jax.jit(jax.grad(loss))(state))

    whole = gradient("cpu", 1 << 24)
    for platform in ("cpu", "gpu") if tied else ("gpu",):
        for expected, got in zip(whole, gradient(platform, 5 * VOCABULARY), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-5, err_msg=platform)


def traced_loss(rows, length):
    """Returns a function that maps `chunk_logits` to the gradient of a loss and its arguments, with
    a vocabulary of 4096.
    """
    graph, state = nnx.split(model_of(small_config(**{"model.hidden_dim": 16}).architecture(4096)))
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((rows, length), jnp.float32))

    def with_chunks(chunk_logits):
        def loss(state, batch):
            return next_token_losses(nnx.merge(graph, state), batch, chunk_logits=chunk_logits).nats

        return jax.grad(loss), state, batch

    return with_chunks


def test_chunks_do_not_compute_all_logits_at_once():
    with_chunks = traced_loss(128, 16)
    assert largest_array(*with_chunks(1 << 24)) == 128 * 16 * 4096
    assert largest_array(*with_chunks(32 * 4096)) == 32 * 4096


@pytest.mark.slow
def test_chunks_do_not_allocate_all_logits(optimized):
    with_chunks, all_logits = traced_loss(4, 64), 4 * 64 * 4096 * 4

    def temporary(chunk_logits):
        return temporary_bytes(optimized, *with_chunks(chunk_logits))

    assert temporary(1 << 24) >= all_logits > temporary(8 * 4096)


def test_masked_targets_are_not_counted(model, batch):
    other = np.where(batch.mask_BT == 0, (batch.targets_BT + 1) % VOCABULARY, batch.targets_BT)
    assert float(summed(model, batch).nats) == float(
        summed(model, batch._replace(targets_BT=other)).nats
    )


def test_documents_do_not_see_each_other(model, batch):
    segments = np.repeat([[0] * 4 + [1] * 4], 3, axis=0).astype(np.int32)
    mask = segments.astype(np.float32)
    batch = batch._replace(segments_BT=segments, mask_BT=mask)
    changed = batch.tokens_BT.copy()
    changed[:, :4] = (changed[:, :4] + 1) % VOCABULARY
    assert float(summed(model, batch).nats) == float(
        summed(model, batch._replace(tokens_BT=changed)).nats
    )


def test_dropout_needs_a_key(model, batch):
    plain = float(summed(model, batch).nats)
    assert plain == float(summed(model, batch).nats)
    first, again, other = (
        float(summed(model, batch, jax.random.key(seed)).nats) for seed in (1, 1, 2)
    )
    assert first == again
    assert len({plain, first, other}) == 3


def packed_and_apart(length):
    """Returns two documents of 3 and 4 tokens in one row, and in a row each; the rest of a row is
    padding.
    """
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 8).astype(np.int32)

    def rows(*parts):
        tokens, targets, segments, mask = (
            np.full((len(parts), length), fill) for fill in (0, 0, PADDING, 0)
        )
        for row, part in enumerate(parts):
            for segment, (start, end) in enumerate(part):
                place = slice(start - part[0][0], end - part[0][0])
                tokens[row, place], targets[row, place] = ids[start:end], ids[start + 1 : end + 1]
                segments[row, place], mask[row, place] = segment, 1
        return Batch(
            *(array.astype(np.int32) for array in (tokens, targets, segments)),
            mask.astype(np.float32),
        )

    return rows([(0, 3), (3, 7)]), rows([(0, 3)], [(3, 7)])


LEARNED = {"attention.use_rotary_pos": False, "attention.trainable_pos": True}
POSITIONS = {
    "rotary": {},
    "learned": LEARNED,
    "sinusoidal": {"attention.use_rotary_pos": False, "attention.absolute_pos": True},
    "scaled queries": {
        "attention.rope_scaling": "yarn", "attention.rope_factor": 4,
        "attention.rope_original_context": 2,
        "attention.query_scaling_beta": 0.5,
    },
    "learned, with experts": LEARNED | {"moe.use_moe": True, "moe.n_experts": 4,
                                        "moe.top_k_mlp": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", POSITIONS)
def test_packed_documents_have_the_loss_of_separate_ones(name):
    """Positions start at 0 in each segment; sums of 7 losses differ by some float32 roundings."""
    model = model_of(
        small_config(**POSITIONS[name], **{"model.dropout_rate": 0}).architecture(VOCABULARY)
    )
    packed, apart = (summed(model, batch) for batch in packed_and_apart(8))
    np.testing.assert_allclose(packed.nats, apart.nats, rtol=2e-6)


def test_padding_does_not_count_in_the_routing_of_experts():
    changes = {
        "moe.use_moe": True,
        "moe.n_experts": 4,
        "moe.top_k_mlp": 2,
        "model.dropout_rate": 0,
        "model.max_context": 24,
    }
    model = model_of(small_config(**changes).architecture(VOCABULARY))
    without = [np.array(x)[:, :7] for x in packed_and_apart(8)[0]]
    expected = summed(model, Batch(*without)).routing
    assert np.asarray(expected.counts_E).sum() == 2 * 7 and expected.balance > 0 and expected.z > 0
    for batch in (packed_and_apart(8)[0], packed_and_apart(24)[0], packed_and_apart(8)[1]):
        routing = summed(model, batch).routing
        np.testing.assert_array_equal(routing.counts_E, expected.counts_E)
        np.testing.assert_allclose(routing.balance, expected.balance, rtol=2e-6)
        np.testing.assert_allclose(routing.z, expected.z, rtol=2e-6)

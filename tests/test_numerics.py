"""The programs of training and decoding in many shapes, compared with float64.

They contain sums over the results of matrix multiplications, which jaxlib 0.10.2 may compute
wrongly without `dantinox.platform.INDIVIDUAL_MATMULS`.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import build_config
from dantinox.generation import generate
from dantinox.model.parameters import abstract_model
from dantinox.text import Batch
from dantinox.training.step import TrainStep
from tests.model import reference

SHAPES = 100  # each is trained and decoded
DISTINCT_ROWS = 4  # the reference computes these; a batch repeats them
WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}

pytestmark = pytest.mark.slow


def random_shape(seed):
    """Returns the settings of a model, and a number of batch rows. Every fourth shape has few
    features and many rows.
    """
    random = np.random.default_rng(seed)
    many_rows = seed % 4 == 0
    kv_heads = int(random.integers(1, 3))
    model = {
        "dim": int(random.integers(3, 6 if many_rows else 70)),
        "kv_heads": kv_heads,
        "n_heads": kv_heads * int(random.integers(1, 4)),
        "head_size": 2 * int(random.integers(1, 9)),
        "hidden_dim": int(random.integers(3, 6 if many_rows else 90)),
        "num_blocks": 1,
        "max_context": 8,
        "activation": str(random.choice(["swiglu", "gelu"])),
        "weight_tying": bool(random.integers(2)),
        "dtype": "float32",
    }
    rows = DISTINCT_ROWS * (
        int(random.integers(1025, 1100)) if many_rows else int(random.integers(1, 20))
    )
    return model, int(random.integers(3, 6 if many_rows else 300)), rows


def log_softmax(logits_TV):
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    return shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, SHAPES))]
)
def test_train_and_decode_programs_against_float64(seed):
    """Compares the loss and the log-probabilities with float64, and the gradients with a program
    without YNNPACK.

    The sums over 35,000 tokens are in float32, and both programs add in different orders.
    """
    settings, vocab_size, rows = random_shape(seed)
    random = np.random.default_rng(1000 + seed)
    config = build_config(
        {"model": settings, "training": {"batch_size": rows, "lr": 1e-3, "warmup_steps": 0}}
    )
    architecture = config.architecture(vocab_size)
    build, shapes = abstract_model(architecture)
    weights = {
        name: (
            (
                random.standard_normal(x.shape) / np.sqrt(max(1, x.shape[0] if x.ndim > 1 else 1))
            ).astype(np.float32)
        )
        for name, x in shapes.items()
    }
    model = build(weights)
    nested = reference.float64(nnx.to_pure_dict(nnx.state(model)))
    T = config.model.max_context

    ids = random.integers(0, vocab_size, (DISTINCT_ROWS, T + 1)).astype(np.int32)
    logprobs_RTV = np.array(
        [log_softmax(reference.forward(architecture, nested, row)[0]) for row in ids[:, :-1]]
    )
    loss = -np.take_along_axis(logprobs_RTV, ids[:, 1:, None], axis=2).mean()
    tokens = np.tile(ids, (rows // DISTINCT_ROWS, 1))
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        np.zeros_like(tokens[:, 1:]),
        np.ones(tokens[:, 1:].shape, np.float32),
    )
    step = TrainStep(config, architecture, 10)
    lowered = step.traced()["train"].program.lower()
    (after, found), (expected_after, expected) = (
        lowered.compile(compiler_options=options)(step.initial_state(weights), batch, {}, {})
        for options in ({}, WITHOUT_YNNPACK)
    )
    np.testing.assert_allclose(found.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=2e-5)
    for moment, expected_moment in zip(
        *map(jax.tree.leaves, (after.optimizer, expected_after.optimizer)), strict=True
    ):
        np.testing.assert_allclose(
            moment, expected_moment, rtol=0, atol=1e-3 * np.abs(expected_moment).max() + 1e-12
        )

    out, details = generate(model, ids[:, :3], T - 3, greedy=True, logprobs=1, return_info=True)
    logprobs_RTV = np.array(
        [log_softmax(reference.forward(architecture, nested, row)[0]) for row in out]
    )
    chosen_RT = np.take_along_axis(logprobs_RTV[:, 2:-1], out[:, 3:, None], axis=2)[..., 0]
    np.testing.assert_allclose(details["info"].top_logprobs[..., 0], chosen_RT, atol=1e-4)
    np.testing.assert_allclose(chosen_RT, logprobs_RTV[:, 2:-1].max(axis=-1), atol=1e-4)

"""Other architectures generate like the basic one: with and without a cache, in any batch, and with
low-precision weights.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import ExpertsConfig, LatentConfig
from dantinox.generation import generate, prepare
from dantinox.generation.decode.prepared_model import dequantize, weight_bytes

from . import builder

PROMPTS, STEPS = builder.prompts(5, 9, 2), 8
MODELS = {
    "experts": builder.config(
        windows=(None, 4), experts=ExpertsConfig(4, 2, shared_dim=16), softcap=3.0, sink_logits=True
    ),
    "experts with biases after a dense layer": builder.config(
        windows=(None, 4),
        experts=ExpertsConfig(
            4, 2, 16, shared_gate=True, logit_bias=True, dense_layers=(0,), dense_dim=24
        ),
        mlp_bias=True,
        activation="clamped_swiglu",
    ),
    "biases and norms": builder.config(
        windows=(None, 4),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        norm_placement="both",
        norm_zero_centered=True,
        qk_norm=True,
        qk_norm_scope="layer",
        scale_embeddings=True,
        query_pre_attn_scalar=5.0,
        partial_rotary_factor=0.5,
        rope_local_theta=100.0,
        unrotated=(0,),
    ),
    "shared keys and per-layer inputs": builder.config(
        windows=(4, None, 4, None),
        kv_shared_layers=2,
        global_head_size=12,
        global_kv_heads=1,
        k_eq_v=True,
        v_norm=True,
        qk_norm=True,
        norm_placement="both",
        per_layer_dim=6,
        layer_scalar=True,
        double_wide_mlp=True,
    ),
    "experts and a shared layer with norms of their own": builder.config(
        windows=(4, None),
        experts=ExpertsConfig(4, 2, shared_dim=16, branch_norms=True),
        norm_placement="both",
        qk_norm=True,
    ),
    "latents": builder.config(
        windows=(None, 4), kv_heads=4, latent=LatentConfig(12, 4, 6, query_rank=10)
    ),
}


def architectures(*quick):
    """Returns all architectures as parameters; those without a name in `quick` are slow."""
    return [
        pytest.param(MODELS[name], id=name, marks=[] if name in quick else pytest.mark.slow)
        for name in MODELS
    ]


@pytest.mark.parametrize("config", architectures("latents"))
def test_a_batch_equals_each_prompt_alone(config):
    model = builder.model(config)
    tokens, lengths = builder.padded(PROMPTS)
    out = generate(model, tokens, STEPS, prompt_lengths=lengths, greedy=True)
    for row, prompt in zip(out, PROMPTS, strict=True):
        text = row[: len(prompt) + STEPS].tolist()
        assert (
            text
            == prompt
            + builder.all_logits(model, text)[len(prompt) - 1 : -1].argmax(axis=1).tolist()
        )


@pytest.mark.parametrize("config", architectures("experts with biases after a dense layer"))
def test_logits_with_low_precision_weights_equal_those_of_their_dequantized_form(config):
    """Three rows of one token, as in a decode step: the low-precision weights are multiplied
    without dequantization.
    """
    graph, state = nnx.split(builder.model(config))
    tokens_B1, places_B1 = np.array([[3], [9], [4]]), np.zeros((3, 1), np.int32)

    @jax.jit
    def compute(state):
        low_precision = prepare(nnx.merge(graph, state), "int8")
        models = nnx.merge(graph, state), low_precision, dequantize(low_precision)
        return [model(tokens_B1, places_B1)[0] for model in models]

    plain, found, expected = map(np.asarray, compute(state))
    np.testing.assert_allclose(found, expected, rtol=0, atol=builder.LOGPROB_TOLERANCE)
    assert 0.01 < np.abs(found - plain).max() < 0.3 * np.abs(plain).max(), (
        "rounding to int8 is expected to show"
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_low_precision_weights_equal_their_dequantized_form(config):
    low_precision = prepare(builder.model(config), "int8")
    assert weight_bytes(low_precision) < 0.6 * weight_bytes(builder.model(config))
    tokens, lengths = builder.padded(PROMPTS)
    results = [
        generate(m, tokens, STEPS, prompt_lengths=lengths, greedy=True)
        for m in (low_precision, dequantize(low_precision))
    ]
    np.testing.assert_array_equal(*results)

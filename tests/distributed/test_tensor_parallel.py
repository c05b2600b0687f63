"""Generation on several devices returns the same tokens as on one device."""

import jax
import numpy as np
import pytest
from flax import nnx
from training.small import random_weights

from dantinox.config import UserError, build_config
from dantinox.distributed import max_tensor_parallel, shard_model, tensor_mesh, weight_shardings
from dantinox.distributed.tensor_parallel import partition_spec
from dantinox.generation.decode.cache_plan import plan_cache
from dantinox.generation.decode.prepared_model import prepare
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.model.parameters import abstract_model
from dantinox.sampling import SamplingParams
from tests.error_texts import ERRORS

DEVICES, V, TENSOR = 8, 62, 4  # the vocabulary size is not divisible by 4
SMALL = {
    "model.dim": 32, "model.n_heads": 8, "model.kv_heads": 4, "model.num_blocks": 1,
    "model.max_context": 256, "model.dtype": "float32", "generation.seed": 1,
    "generation.greedy": True,
}  # fmt: skip
LATENT = {"model.kv_heads": 8, "attention.kv_lora_rank": 16, "attention.qk_rope_head_dim": 8}
BIASES = {
    "attention.qkv_bias": True, "attention.out_bias": True, "model.mlp_bias": True,
    "model.qk_norm": True, "model.qk_norm_scope": "layer", "model.norm_placement": "after",
}  # fmt: skip
SINKS = {
    "attention.sink_logits": True,
    "attention.sliding_window": True,
    "attention.context_window": 64,
}

UNEVEN = {
    "model.num_blocks": 4, "attention.sliding_window": True, "attention.context_window": 64,
    "attention.kv_shared_layers": 2, "attention.layer_types": ["sliding", "full"],
    "attention.global_head_size": 8, "attention.k_eq_v": True, "model.v_norm": True,
    "model.qk_norm": True, "model.per_layer_dim": 8, "model.double_wide_mlp": True,
}  # fmt: skip


def settings(**changes):
    return build_config(
        {}, SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    )


def texts(config, model, length):
    """Generates tokens after two prompts."""
    prompts_PT = np.random.default_rng(0).integers(3, V, (2, length)).astype(np.int32)
    lengths_P, rows = np.array([length, length - 7], np.int32), {"batch": 2, "sample_index": [0, 0]}
    session = StaticBatch(
        model,
        prompts_PT,
        lengths_P,
        SamplingParams.build(config, stop_ids=[0], vocab_size=V, **rows),
        limits_B=np.array([24, 24]),
        eos_ids=[[0]] * 2,
        options=StaticOptions(plan=plan_cache(model.config, config.kv, 256)),
    )
    return np.concatenate([chunk.tokens for chunk in session.run()], axis=1)


@pytest.mark.parametrize(
    ("changes", "weights", "length"),
    [
        ({}, "auto", 150),  # long enough for an attention kernel
        *(
            pytest.param(changes, weights, length, marks=pytest.mark.slow)
            for changes, weights, length in (
                (LATENT, "int8", 20),
                ({}, "int8", 20),
                (BIASES, "auto", 150),
                (BIASES, "int8", 20),
                (LATENT, "auto", 150),
                (SINKS, "auto", 150),
                (UNEVEN, "auto", 150),
                (UNEVEN, "int8", 20),
                ({"moe.use_moe": True}, "int8", 20),
                ({"moe.use_moe": True}, "auto", 150),
                ({"kv.budget": 0.5, "kv.signal": "uniform"}, "auto", 150),
            )
        ),
    ],
)
def test_tokens_equal_those_of_one_device(changes, weights, length):
    config = settings(**changes)
    architecture = config.architecture(V)
    whole = prepare(abstract_model(architecture)[0](random_weights(architecture)), weights)
    shared = shard_model(whole, tensor_mesh(whole.config, TENSOR))
    np.testing.assert_array_equal(texts(config, shared, length), texts(config, whole, length))
    of_all, of_one = 0, 0
    for leaf in jax.tree.leaves(nnx.state(shared)):
        of_all, of_one = of_all + leaf.nbytes, of_one + leaf.addressable_shards[0].data.nbytes
    # Norms, routers, the projections to latents and an output layer of 62 tokens are replicated.
    assert of_one < 1.5 * of_all / TENSOR


def test_weights_are_loaded_onto_their_devices():
    model = settings().architecture(V)
    _, shapes = abstract_model(model)
    places = weight_shardings(tensor_mesh(model, TENSOR), shapes)
    assert (
        places["blocks/0/attention/qkv/kernel"].spec[1]
        == places["blocks/0/ffn/down/kernel"].spec[0]
        == "tensor"
    )
    assert places["blocks/0/norm1/scale"].is_fully_replicated


@pytest.mark.parametrize(
    ("name", "shape", "quantized", "expected"),
    [
        ("blocks/0/attention/out/kernel", (32, 32), True, (None, "tensor")),
        ("blocks/0/attention/qkv/kernel", (64, 32), True, ("tensor",)),
        ("blocks/0/ffn/gate_up/kernel", (128, 32), True, ("tensor",)),
        ("blocks/0/ffn/down/kernel", (32, 64), True, (None, "tensor")),
        ("blocks/0/ffn/down/scale", (32,), True, ()),
        ("blocks/0/ffn/down/one", (32,), True, ()),
        ("blocks/0/ffn/gate_up/scale", (128,), True, ("tensor",)),
        ("blocks/0/ffn/gate_up/scale", (126,), True, ()),
        ("blocks/0/ffn/experts/down/kernel", (4, 32, 64), True, (None, None, "tensor")),
        ("blocks/0/ffn/experts/gate_up/kernel", (4, 128, 32), True, (None, "tensor")),
        ("embed", (62, 32), False, (None, "tensor")),
        ("embed", (62, 30), False, ()),
        ("embed", (64, 32), True, ("tensor",)),
        ("head/kernel", (32, 62), False, ()),
        ("head/kernel", (32, 64), False, (None, "tensor")),
        ("head/kernel", (62, 32), True, ()),
        ("per_layer/embed", (62, 2, 8), False, (None, None, "tensor")),
        ("per_layer/embed", (62, 2, 6), False, ()),
        ("blocks/0/attention/out/kernel", (8, 1, 4, 32), False, ("tensor", None, None, None)),
    ],
)
def test_partition_specs_of_float_and_quantized_weights(name, shape, quantized, expected):
    """A quantized matrix is stored as [outputs, inputs]."""
    found = tuple(partition_spec(name, shape, quantized, TENSOR))
    assert found == tuple(expected) + (None,) * (len(found) - len(expected)) and len(found) <= len(
        shape
    )


def test_indivisible_sizes_are_refused():
    model = settings().architecture(V)
    assert [max_tensor_parallel(model, most) for most in (1, 3, 4, 8)] == [1, 2, 4, 4]
    with pytest.raises(UserError, match=ERRORS["generation_tensor_parallel_must_divide_the"]):
        tensor_mesh(model, 8)
    with pytest.raises(UserError, match=ERRORS["generation_tensor_parallel_must_be_at"]):
        tensor_mesh(model, 16)

"""Imported checkpoints give the logits and tokens of transformers (`make_checkpoints.py` has
written both).
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.interop.hf.hf_config import hf_config_to_settings, settings_to_hf_config
from dantinox.interop.hf.hf_folder import open_tensors
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.interop.source import LazyArrays
from dantinox.model.parameters import abstract_model
from tests.error_texts import ERRORS

from .families import FAMILIES

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SYMBOLS = 67
PROMPT = 8
# All other families differ from these only in features that tests/model compares with NumPy.
QUICK = (
    "llama",
    "qwen2",
    "phi3",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "glm4",
    "cohere2",
    "nanochat",
)
# Families whose example is exported as another family, because export tries that family first.
SAME = {"helium": "llama", "ernie4_5": "llama", "seed_oss": "qwen2"}
each = pytest.mark.parametrize("family", FAMILIES)
most = pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)


def read(family):
    """Returns the `config.json`, the settings and the tensors of a small checkpoint."""
    config = json.loads((CHECKPOINTS / family / "config.json").read_text())
    settings = hf_config_to_settings(config, max_context=64)
    settings["model"]["dtype"] = "float32"
    return config, build_config(settings), open_tensors(CHECKPOINTS / family)


def imported(family):
    config, settings, files = read(family)
    return settings, from_hf(config, settings.architecture(SYMBOLS, "cpu"), files)


@most
def test_logits_and_greedy_tokens_equal_those_of_transformers(family):
    settings, arrays = imported(family)
    model = abstract_model(settings.architecture(SYMBOLS, "cpu"))[0](
        {name: jnp.asarray(arrays[name]) for name in arrays}
    )
    expected = np.load(CHECKPOINTS / family / "expected.npz")
    tokens_BT = expected["tokens"]
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    logits_BTV = np.asarray(
        jax.jit(lambda model, *x: model(*x)[0])(model, jnp.asarray(tokens_BT), positions_BT)
    )
    assert np.abs(logits_BTV - expected["logits"]).max() < 2e-4
    np.testing.assert_array_equal(logits_BTV[:, PROMPT - 1 : -1].argmax(-1), tokens_BT[:, PROMPT:])


@each
def test_every_tensor_and_every_key_roundtrips(family):
    config, _, files = read(family)
    settings, arrays = imported(family)
    written, tensors = to_hf(settings, SYMBOLS, arrays, config)
    assert written == config
    assert tensors.keys() == files.tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == files.tensors[name].shape
        assert tensor.tobytes() == files[name].tobytes(), name


@each
def test_exported_model_without_origin_has_its_family(family):
    _, settings, _ = read(family)
    written = settings_to_hf_config(settings, SYMBOLS)
    assert written["model_type"] == SAME.get(family, family)
    again = build_config(hf_config_to_settings(written, 64)).architecture(SYMBOLS)
    assert again == replace(settings.architecture(SYMBOLS), dtype=again.dtype)


def test_too_many_layers_or_experts_are_rejected_early():
    for family, key, says in (
        ("gpt2", "n_layer", "28 tensors, .* has 4000"),
        ("mixtral", "num_local_experts", "200000000"),
    ):
        config, _, files = read(family)
        settings = build_config(
            hf_config_to_settings(
                config | {key: 4000 if key == "n_layer" else 100_000_000}, max_context=64
            )
        )
        with pytest.raises(UserError, match=says):
            from_hf(config, settings.architecture(SYMBOLS, "cpu"), files)


def test_huge_parameter_is_an_error():
    config, _, files = read("llama")
    huge = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**30)
    settings = build_config(hf_config_to_settings(config | huge, max_context=64))
    with pytest.raises(UserError, match="the model must have at most 100,000,000,000,000 weights"):
        from_hf(config, settings.architecture(SYMBOLS, "cpu"), files)


def test_multi_token_prediction_layers_are_not_imported():
    config, settings, files = read("deepseek_v3")
    more = LazyArrays(
        files.tensors | {"model.layers.2.eh_proj.weight": files.tensors["lm_head.weight"]},
        lambda name: files[name],
    )
    model = settings.architecture(SYMBOLS, "cpu")
    with pytest.raises(UserError, match=ERRORS["model_layers_2_eh_proj_weight"]):
        from_hf(config, model, more)
    predicting = config | {"num_nextn_predict_layers": 1}
    arrays = from_hf(predicting, model, more)
    assert to_hf(settings, SYMBOLS, arrays, predicting)[0] == config


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_nan_and_inf_are_rejected(number):
    config, settings, files = read("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    broken = np.array(files[name])
    broken[-1, 5] = number
    tensors = LazyArrays(files.tensors, lambda asked: broken if asked == name else files[asked])
    arrays = from_hf(config, settings.architecture(SYMBOLS, "cpu"), tensors)
    with pytest.raises(UserError, match=f"has NaN or Inf in {name}"):
        arrays["blocks/1/ffn/down/kernel"]

"""Ternary checkpoints in the formats of transformers and of 1bitLLM, against a NumPy model of the
tensors.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import dantinox
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.interop.hf.hf_config import hf_config_to_settings, settings_to_hf_config
from dantinox.interop.hf.hf_family import BITNET
from dantinox.interop.hf.hf_quantized import dequantize_checkpoint
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.interop.source import LazyArrays
from dantinox.model.parameters import abstract_model
from dantinox.model.ternary import quantize_weights, weight_scales
from dantinox.run.safetensors_file import Tensor
from dantinox.text import train_tokenizer
from tests.error_texts import ERRORS
from tests.model.builder import quick

D, F, N, K, H, V, L = 16, 20, 4, 2, 4, 23, 2
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L,
    "num_attention_heads": N, "num_key_value_heads": K, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True,
}  # fmt: skip
PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
FORMS = {
    "packed": (
        SIZES
        | {
            "model_type": "bitnet",
            "architectures": ["BitNetForCausalLM"],
            "hidden_act": "relu2",
            "quantization_config": PACKED,
        }
    ),
    # With the keys of the published files.
    "1bitLLM": json.loads(
        (Path(__file__).parent / "checkpoints" / "bitnet_b1_58" / "config.json").read_text()
    ),
}
NORMS = {"packed": ("attn_sub_norm", "ffn_sub_norm"), "1bitLLM": ("inner_attn_ln", "ffn_layernorm")}
MATRICES = {
    "self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D),
    "self_attn.o_proj": (D, N * H), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}  # fmt: skip


def pack(codes):
    """Packs −1, 0 and 1 as `pack_weights` of transformers: row i + n · rows / 4 is in bits 2n of
    row i.
    """
    quarters = np.split((codes + 1).astype(np.uint8), 4)
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def random_tensors(form, seed=0):
    """Returns the tensors of a checkpoint, and the float64 weights that its projections multiply
    by.
    """
    random = np.random.default_rng(seed)
    tensors = {
        "model.embed_tokens.weight": random.standard_normal((V, D)),
        "model.norm.weight": 1 + random.random(D),
    }
    matrices = {}
    for layer in range(L):
        prefix = f"model.layers.{layer}."
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            f"self_attn.{NORMS[form][0]}",
            f"mlp.{NORMS[form][1]}",
        )
        tensors |= {
            f"{prefix}{name}.weight": 1 + random.random(F if "mlp" in name else D) for name in names
        }
        for name, shape in MATRICES.items():
            w, scale = (
                np.float32(random.standard_normal(shape)),
                np.float32(random.uniform(0.1, 0.4)),
            )
            key = f"{prefix}{name}.weight"
            if form == "packed":
                codes = random.choice([-1, 0, 1], shape)
                tensors |= {key: pack(codes), f"{key}_scale": np.array([scale])}
                matrices[key] = codes * np.float64(scale)
            else:
                tensors[key] = w
                scale = np.abs(np.float64(w)).mean()
                matrices[key] = np.clip(np.rint(w / scale), -1, 1) * scale
    return {
        name: a if a.dtype == np.uint8 else np.float32(a) for name, a in tensors.items()
    }, matrices


def lazy(arrays):
    kinds = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    return LazyArrays(kinds, lambda name: arrays[name])


def numpy_logits(form, tensors, matrices, tokens, nearest=1e-4):
    """Computes the logits of one sequence with the formulas of the published classes, in float64.

    Every input of a projection must be `nearest` or farther from the middle between two 8-bit
    integers, else float32 may round it differently.
    """
    weights = {name: np.float64(array) for name, array in tensors.items()} | matrices

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]

    def project(x, name):
        step = np.abs(x).max(-1, keepdims=True) / 127
        assert np.abs(x / step - np.floor(x / step) - 0.5).min() >= nearest, "choose another seed"
        return np.rint(x / step) * step @ weights[f"{name}.weight"].T

    def rotate(x_TNH):
        half = H // 2
        angles = np.arange(len(x_TNH))[:, None] * 1e4 ** (-2 * np.arange(half) / H)
        z = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    x, T = weights["model.embed_tokens.weight"][tokens], len(tokens)
    for layer in range(L):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        y = norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (project(y, f"{attention}.{name}_proj").reshape(T, -1, H) for name in "qkv")
        q, k, v = rotate(q), np.repeat(rotate(k), N // K, 1), np.repeat(v, N // K, 1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H)
        scores = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
        a = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v).reshape(T, -1)
        x = x + project(norm(a, f"{attention}.{NORMS[form][0]}"), f"{attention}.o_proj")
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm")
        gate, up = project(y, f"{mlp}.gate_proj"), project(y, f"{mlp}.up_proj")
        gated = (np.maximum(gate, 0) ** 2 if form == "packed" else gate / (1 + np.exp(-gate))) * up
        x = x + project(norm(gated, f"{mlp}.{NORMS[form][1]}"), f"{mlp}.down_proj")
    return norm(x, "model.norm") @ weights["model.embed_tokens.weight"].T


def imported(form, tensors):
    """Returns the dequantized `config.json`, the settings, the dequantized tensors and the
    parameters of a checkpoint.
    """
    config, files = dequantize_checkpoint(FORMS[form], lazy(tensors))
    tree = hf_config_to_settings(config)
    tree["model"]["dtype"] = "float32"
    settings = build_config(tree)
    return config, settings, files, from_hf(config, settings.architecture(V, "cpu"), files)


@pytest.mark.parametrize(("form", "seed"), [("packed", 1), ("1bitLLM", 0)])
def test_logits_equal_those_of_numpy(form, seed):
    tensors, matrices = random_tensors(form, seed)
    tokens = np.random.default_rng(seed).integers(0, V, 7)
    _, settings, _, arrays = imported(form, tensors)
    model = settings.architecture(V, "cpu")
    assert (model.projections, model.sub_norms) == ("ternary", True)
    built = abstract_model(model)[0]({name: jnp.asarray(arrays[name]) for name in arrays})
    logits = quick(lambda model, *inputs: model(*inputs)[0])(
        built, tokens[None], np.arange(7)[None]
    )
    expected = numpy_logits(form, tensors, matrices, tokens)
    np.testing.assert_allclose(logits[0], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear", None])
def test_packed_weights_keep_their_codes_and_scales(linear_class):
    codes = np.random.default_rng(0).choice([-1, 0, 1], (12, 50))
    codes[:, 3] = 0
    scale = np.float32(0.0371)
    stored = scale if linear_class == "autobitlinear" else 1 / scale
    for number_type in (np.float32, ml_dtypes.bfloat16):
        tensors = {
            "x_proj.weight": pack(codes),
            "x_proj.weight_scale": np.array([stored], number_type),
        }
        options = {"quant_method": "bitnet"} | (
            {"linear_class": linear_class} if linear_class else {}
        )
        config, files = dequantize_checkpoint({"quantization_config": options}, lazy(tensors))
        assert config == {"quantization_config": BITNET}
        assert files.tensors == {"x_proj.weight": ((12, 50), "float32")}
        found = weight_scales(files["x_proj.weight"])
        np.testing.assert_array_equal(quantize_weights(files["x_proj.weight"], found), codes)
        expected = np.float64(np.array(stored, number_type))
        np.testing.assert_allclose(
            np.float64(found),
            expected if linear_class == "autobitlinear" else 1 / expected,
            rtol=3e-7,
        )


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_and_every_key_roundtrips(form):
    config, settings, files, arrays = imported(form, random_tensors(form)[0])
    written, tensors = to_hf(settings, V, arrays, config)
    assert written == config
    assert tensors.keys() == files.tensors.keys()
    assert all(tensors[name].tobytes() == files[name].tobytes() for name in tensors)
    fresh, _ = to_hf(settings, V, arrays)
    assert json.loads(json.dumps(fresh)) == fresh
    assert fresh["architectures"] == [
        "BitNetForCausalLM"
    ]  # both forms, because transformers has this class
    assert fresh["quantization_config"] == BITNET
    again = build_config(hf_config_to_settings(fresh)).architecture(V)
    assert again.projections == "ternary"
    if form == "1bitLLM":
        written = settings_to_hf_config(settings, V, "bitnet_b1_58")
        assert {
            key: written[key]
            for key in ("model_type", "architectures", "weight_bits", "input_bits")
        } == {
            key: FORMS[form][key]
            for key in ("model_type", "architectures", "weight_bits", "input_bits")
        }


@pytest.mark.parametrize("form", FORMS)
def test_import_as_a_run(form, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FORMS[form]))
    (folder / "tokenizer.json").write_text(
        train_tokenizer(
            TokenizerSection(tokenizer_type="char"), lambda: iter(["abcdefghijklmnop"])
        ).to_json()
    )
    tensors, matrices = random_tensors(form, 1)
    save_file(tensors, folder / "model.safetensors")
    imported = dantinox.import_checkpoint(folder, tmp_path / "run")
    assert imported.tensors == len(tensors) - (len(matrices) if form == "packed" else 0)
    run = dantinox.load(tmp_path / "run")
    assert run.config.model.projections == "ternary"
    tokens = dantinox.generate(run.model, [[5, 9, 7]], max_new_tokens=3, temperature=0.0)[0]
    logits = numpy_logits(form, tensors, matrices, tokens, nearest=0)
    np.testing.assert_array_equal(logits[2:-1].argmax(-1), tokens[3:])


def test_ternary_llama_has_no_sub_norms():
    config = FORMS["1bitLLM"] | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": BITNET,
    }
    settings = build_config(
        hf_config_to_settings({key: config[key] for key in config if not key.endswith("_bits")})
    )
    assert (settings.model.projections, settings.model.sub_norms) == ("ternary", False)
    written = settings_to_hf_config(settings, V)
    assert (written["model_type"], written["quantization_config"]) == ("llama", BITNET)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x_proj.weight": np.full((3, 50), 0xFF, np.uint8)}, "ternary_bits"),
        ({"x_proj.weight_scale": np.array([1e-7], np.float32)}, "ternary_scale"),
        ({"x_proj.weight_scale": np.array([np.nan], np.float32)}, "ternary_scale"),
        ({"x_proj.weight_scale": np.ones(2, np.float32)}, "ternary_scale_shape"),
        ({"x_proj.weight": np.ones((3, 50), np.float32)}, "ternary_dtype"),
        (
            {
                "head.weight": np.full((3, 50), 0x55, np.uint8),
                "head.weight_scale": np.ones(1, np.float32),
            },
            "ternary_head",
        ),
    ],
)
def test_damaged_matrices_are_errors(changes, says):
    tensors = {
        "x_proj.weight": np.full((3, 50), 0x55, np.uint8),
        "x_proj.weight_scale": np.ones(1, np.float32),
    } | changes
    with pytest.raises(UserError, match=ERRORS[says]):
        dequantize_checkpoint({"quantization_config": PACKED}, lazy(tensors))[1]["x_proj.weight"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": PACKED | {"use_rms_norm": True}}, "ternary_rms_norm"),
        (
            {"quantization_config": PACKED | {"modules_to_not_convert": ["model.layers.0"]}},
            "ternary_modules",
        ),
        ({"quantization_config": PACKED}, "ternary_no_tensor"),
        ({"weight_bits": 2}, "ternary_weight_bits"),
    ],
)
def test_unsupported_options_are_errors(changes, says):
    with pytest.raises(UserError, match=ERRORS[says]):
        hf_config_to_settings(dequantize_checkpoint(FORMS["1bitLLM"] | changes, lazy({}))[0])

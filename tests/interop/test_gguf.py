"""Export to GGUF and import: every family, compared with llama.cpp's tensor names and metadata."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.interop.gguf.gguf_checkpoint import export_gguf, source_from_gguf
from dantinox.interop.gguf.gguf_families import FAMILIES
from dantinox.interop.gguf.gguf_file import open_gguf, read_tensor, write_gguf
from dantinox.interop.gguf.gguf_rope import llama3_factors
from dantinox.interop.gguf.quantization_recipes import FILE_TYPES, SMALL_BLOCK_TYPES
from dantinox.interop.hf import hf_families as families
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_weights import from_hf, parameter_shapes, to_hf
from dantinox.run import RunDirectory, load_weights, save_config, save_tokenizer, save_weights
from dantinox.text.tokenizer_training import train_tokenizer
from tests.error_texts import ERRORS

gguf = pytest.importorskip("gguf")
CHECKPOINTS = Path(__file__).parent / "checkpoints"
SYMBOLS = 67
TOKENIZER = train_tokenizer(
    TokenizerSection(tokenizer_type="char"), lambda: iter(["".join(map(chr, range(161, 225)))])
)
# Settings of the small checkpoints that llama.cpp does not support, replaced by similar ones.
SAID = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2},
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        }
    },
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "starcoder2": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3_text": {"query_pre_attn_scalar": 12},
    "qwen2_moe": {"mlp_only_layers": []},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v2": {"q_lora_rank": 20, "topk_method": "greedy"},
    "deepseek_v3": {
        "rope_parameters": {
            **{
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            **{"mscale": 0.8, "mscale_all_dim": 0.8},
        }
    },
    "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
    "smollm3": {
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": None,
    },
}
SAID |= {
    "ministral": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "glm": {"head_dim": 8},
    "granitemoehybrid:granitemoe": {"num_local_experts": 4, "position_embedding_type": "rope"},
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
PADDED = {"padded_vocab_size": 70, "max_context": 64}
# A family that llama.cpp represents by two architectures has two entries.
NAMED = {}
for entry in FAMILIES:
    if entry.arch == "bitnet":  # see `test_gguf_matrices.py`
        continue
    NAMED[f"{entry.model_type}:{entry.arch}" if entry.model_type in NAMED else entry.model_type] = (
        entry
    )
each = pytest.mark.parametrize("family", NAMED)


def config_of(name, **changes):
    config = (
        json.loads((CHECKPOINTS / name.partition(":")[0] / "config.json").read_text())
        | SAID.get(name, {})
        | changes
    )
    return {
        key: value for key, value in config.items() if key != "layer_types" or value is not None
    }


def model_of(config, std=1.0):
    """Returns the settings and random weights, matrices with this deviation, of a model with this
    `config.json`.
    """
    settings = build_config(hf_config_to_settings(config, max_context=64))
    rng = np.random.default_rng(3)
    shapes = parameter_shapes(settings.architecture(SYMBOLS))
    weights = {
        name: (std if len(shape) > 1 else 1) * rng.normal(size=shape)
        for name, shape in shapes.items()
    }
    return settings, {name: array.astype(np.float32) for name, array in weights.items()}


def export(path, name, kind="f32", std=1.0, **changes):
    config = config_of(name, **changes)
    settings, weights = model_of(config, std)
    export_gguf(path, settings, *to_hf(settings, SYMBOLS, weights, config), TOKENIZER, kind=kind)
    return weights


def imported(path):
    """Returns the architecture and the parameters that are imported from a file."""
    source = source_from_gguf(open_gguf(path))
    model = build_config(hf_config_to_settings(source.config, max_context=64)).architecture(SYMBOLS)
    return model, from_hf(source.config, model, source.tensors, "float32")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns the file of a family, opened, and the weights in it. Tests must not
    change the file.
    """
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def export_once(family):
        weights = export(folder / f"{family}.gguf", family)
        return open_gguf(folder / f"{family}.gguf"), weights

    return export_once


@each
def test_tensor_names_match_the_library_and_cover_the_family(family):
    ours = NAMED[family]
    archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(archs[ours.arch], 3)
    for stored, theirs in ours.names.items():
        name = re.sub(r"experts\.\{e\}", "experts", theirs).replace("{}", "2")
        if (
            family == "granitemoehybrid"
        ):  # llama.cpp's converter names the only feed-forward layer itself
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        assert known.get_name(name) == stored.replace("{}", "2")
    rows = families.FAMILIES[ours.model_type].tensors
    if family == "granitemoehybrid":
        rows = [row for row in rows if ".block_sparse_moe." not in row.tensor]
    theirs = {row.tensor.replace("{i}", "{}") for row in rows} - ours.merged.keys()
    theirs = {tensor.rpartition(".")[0] for tensor in theirs}
    absent = {
        f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up", "down")
    }  # llama.cpp has no dense layers in these families
    heads = {name: {"lm_head"} for name in ("gemma", "gemma2", "cohere", "cohere2")}
    unused = {
        "olmo": {"model.norm"},
        "phi": {"model.layers.{}.post_attention_layernorm"},
    }  # these models do not have the norms
    theirs -= {**heads, **unused, "qwen3_moe": absent, "qwen2_moe": absent}.get(family, set())
    modules = {
        gguf.TENSOR_NAMES[kind].replace("{bid}", "{}")
        for kind in gguf.MODEL_TENSORS[archs[ours.arch]]
    }
    assert {
        stored.rpartition(".")[0] for how in ours.merged.values() for stored in how.stored
    } <= modules
    assert set(ours.names.values()) == theirs


@each
def test_exported_model_is_imported_with_the_same_architecture_and_weights(
    family, exported, tmp_path
):
    first, weights = exported(family)
    model, arrays = imported(first.path)
    settings, _ = model_of(config_of(family))
    assert replace(model, rope_theta=1.0) == replace(settings.architecture(SYMBOLS), rope_theta=1.0)
    assert arrays.keys() == weights.keys()
    for name, array in weights.items():
        if "gemma" in family and name.endswith(
            "scale"
        ):  # these files store 1 + w, which loses the last bits of w
            np.testing.assert_allclose(arrays[name], array, atol=1.2e-7)
        else:
            np.testing.assert_array_equal(arrays[name], array, name)
    again = tmp_path / "y.gguf"
    source = source_from_gguf(first)
    settings = build_config(hf_config_to_settings(source.config, max_context=64))
    export_gguf(again, settings, *to_hf(settings, SYMBOLS, arrays, source.config), TOKENIZER)
    second = open_gguf(again)
    assert second.tensors.keys() == first.tensors.keys()
    for (
        name
    ) in first.tensors:  # tensors from GGUF are exported bitwise equal, including Gemma's norms
        if not name.endswith("norm.weight") or "gemma" not in family:
            np.testing.assert_array_equal(read_tensor(second, name), read_tensor(first, name), name)
    _, arrays_again = imported(again)
    assert all(np.array_equal(arrays_again[name], arrays[name]) for name in arrays)


def test_llama_heads_are_stored_for_interleaved_rotary_pairs(tmp_path):
    """Half-split rotation of transformers' weights and interleaved rotation of GGUF's weights give
    equal attention scores.
    """
    config = config_of("llama")
    settings, weights = model_of(config)
    _, tensors = to_hf(settings, SYMBOLS, weights, config)
    export_gguf(tmp_path / "x.gguf", settings, config, tensors, TOKENIZER)
    file = open_gguf(tmp_path / "x.gguf")
    rng = np.random.default_rng(1)
    x, angles = rng.normal(size=(2, 32)), np.array([3.0, 1.0, 0.4, 0.1])
    cos, sin = np.cos(angles), np.sin(angles)

    def halves(y):
        a, b = y[..., :4], y[..., 4:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def pairs(y):
        a, b = y[..., 0::2], y[..., 1::2]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(y.shape)

    theirs = {part: tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qk"}
    stored = {part: read_tensor(file, f"blk.1.attn_{part}.weight") for part in "qk"}
    split = [halves((x[i] @ theirs[part].T).reshape(-1, 8)) for i, part in enumerate("qk")]
    paired = [pairs((x[i] @ stored[part].T).reshape(-1, 8)) for i, part in enumerate("qk")]
    np.testing.assert_allclose(paired[0] @ paired[1].T, split[0] @ split[1].T, rtol=1e-6)


def test_gemma_norms_are_stored_plus_one_and_gpt2_matrices_transposed(tmp_path):
    weights = export(tmp_path / "x.gguf", "gemma2")
    file = open_gguf(tmp_path / "x.gguf")
    np.testing.assert_array_equal(
        read_tensor(file, "blk.1.post_ffw_norm.weight"), weights["blocks/1/post_norm2/scale"] + 1
    )
    assert file.metadata["gemma2.attention.sliding_window_pattern"] == [True, False]
    weights = export(tmp_path / "y.gguf", "gpt2")
    file = open_gguf(tmp_path / "y.gguf")
    assert file.tensors["blk.0.attn_qkv.weight"].shape == (96, 32)
    np.testing.assert_array_equal(
        read_tensor(file, "blk.0.ffn_up.weight"), weights["blocks/0/ffn/up/kernel"].T
    )
    np.testing.assert_array_equal(read_tensor(file, "token_embd.weight"), weights["embed"])


def test_experts_are_stacked_in_order(tmp_path):
    weights = export(tmp_path / "x.gguf", "mixtral")
    stacked = read_tensor(open_gguf(tmp_path / "x.gguf"), "blk.1.ffn_up_exps.weight")
    np.testing.assert_array_equal(
        stacked, weights["blocks/1/ffn/experts/gate_up/kernel"][:, :, 1].transpose(0, 2, 1)
    )


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_matrices_have_the_requested_type_and_vectors_stay_float32(kind, tmp_path):
    export(tmp_path / "x.gguf", "qwen3_moe", kind)
    file = open_gguf(tmp_path / "x.gguf")
    kinds = {name: stored.kind for name, stored in file.tensors.items()}
    assert {kinds[name] for name in kinds if "norm" in name or "ffn_gate_inp" in name} == {"F32"}
    base, number = FILE_TYPES[kind]
    # Rows of 32 elements are not a multiple of the block of 256.
    assert kinds["blk.0.ffn_up_exps.weight"] == SMALL_BLOCK_TYPES.get(base, base)
    assert kinds["token_embd.weight"] == (
        "Q5_0" if base.startswith("TQ") else SMALL_BLOCK_TYPES.get(base, base)
    )
    # Rows of 24 elements are not a multiple of the block of 32.
    assert kinds["blk.0.ffn_down_exps.weight"] == ("F16" if kind.startswith(("q", "tq")) else base)
    assert file.metadata["general.file_type"] == number
    weights, arrays = model_of(config_of("qwen3_moe"))[1], imported(tmp_path / "x.gguf")[1]
    allowed = {"f32": 0, "f16": 5e-4, "bf16": 4e-3, "q8_0": 5e-3, "q6_k": 5e-3}.get(kind, 0.13)
    for name, array in weights.items():
        assert np.abs(arrays[name] - array).max() <= allowed * np.abs(array).max(), name


def test_llama3_factors_are_recovered_and_other_factors_rejected(tmp_path):
    factors = llama3_factors(64, 500000.0, 8.0, 8192)
    # As in the file of Llama 3.1: high frequencies are unchanged, low ones are divided by 8.
    assert factors[0] == 1 and factors[-1] == 8 and 1 < factors[32] < 8
    export(tmp_path / "x.gguf", "llama")
    source = source_from_gguf(open_gguf(tmp_path / "x.gguf"))
    rope = config_of("llama")["rope_parameters"]
    assert source.config["rope_parameters"] == rope
    file = open_gguf(tmp_path / "x.gguf")
    rewrite(
        file, tmp_path / "y.gguf", arrays={"rope_freqs.weight": np.array([1, 7, 2, 3], np.float32)}
    )
    with pytest.raises(UserError, match=ERRORS["does_not_follow_llama_3"]):
        source_from_gguf(open_gguf(tmp_path / "y.gguf"))


def rewrite(file, path, metadata=None, arrays=None, drop=()):
    """Writes a copy of a file with changed metadata (None removes an entry) and tensors."""
    entries = {
        key: value for key, value in (file.metadata | (metadata or {})).items() if value is not None
    }
    tensors = {
        name: np.array(read_tensor(file, name)) for name in file.tensors if name not in drop
    } | (arrays or {})
    write_gguf(
        path,
        entries,
        {name: (array.shape, "F32") for name, array in tensors.items()},
        tensors.values(),
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "mistral",
            {"sliding_window": 6},
            (
                "GGUF's llama cannot represent attention.sliding_window: windows (6, 6) would"
                " become (None, None)"
            ),
        ),
        (
            "gemma2",
            {"query_pre_attn_scalar": 20},
            (
                "GGUF's gemma2 cannot represent attention.query_pre_attn_scalar:"
                " query_pre_attn_scalar 20"
            ),
        ),
        (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "GGUF's qwen3moe cannot represent moe.use_moe: experts",
        ),
        (
            "smollm3",
            {"no_rope_layers": [0, 1, 1, 1]},
            "GGUF's smollm3 cannot represent attention.rope_layers: unrotated (0,)",
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    kind: {"rope_type": "default", "rope_theta": base}
                    for kind, base in (("sliding_attention", 1e3), ("full_attention", 1e4))
                }
            },
            "GGUF's olmo2 cannot represent attention.rope_local_theta",
        ),
        (
            "exaone4",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
            "exaone4 cannot represent",
        ),
        (
            "cohere2",
            {"layer_types": ["full_attention"] * 2},
            "llama.cpp's cohere2 does not support attention.sliding_window: false",
        ),
        (
            "glm",
            {"head_dim": 12},
            (
                "llama.cpp's chatglm does not support model.head_size:"
                " other than model.dim / model.n_heads"
            ),
        ),
        (
            "phi",
            {"hidden_act": "relu2"},
            "GGUF's phi2 cannot represent model.activation: activation 'relu2' would become 'gelu'",
        ),
        ("olmo", {"attention_bias": True}, "GGUF's olmo cannot represent attention."),
        ("helium", {"attention_bias": True}, "GGUF's llama cannot represent attention.out_bias"),
        (
            "ministral",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
            "GGUF's llama cannot represent attention.",
        ),
        (
            "ministral3",
            {"sliding_window": 6},
            "GGUF's mistral3 cannot represent attention.sliding_window",
        ),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 0.5,
                }
            },
            "llama.cpp's mistral3 does not support attention.rope_mscale: other than 1",
        ),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 16,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            (
                "mistral3 does not support attention.query_scaling_beta without"
                " attention.rope_scaling: yarn"
            ),
        ),
        (
            "granitemoehybrid:granitemoe",
            {"position_embedding_type": None},
            "position 'none' would become 'rope'",
        ),
        ("nanochat", {}, "the family nanochat cannot be exported to GGUF"),
        ("glm4_moe_lite", {}, "the family glm4_moe_lite cannot be exported to GGUF"),
        ("phi3", {"sliding_window": 6}, "GGUF's phi3 cannot represent attention.sliding_window"),
        (
            "gemma2",
            {"tie_word_embeddings": False},
            "llama.cpp's gemma2 does not support model.weight_tying: false",
        ),
        (
            "qwen2_moe",
            {"mlp_only_layers": [0]},
            "GGUF has no name for the tensor model.layers.0.mlp.gate_proj.weight",
        ),
        (
            "gpt_oss",
            {"swiglu_limit": 5.0},
            "GGUF's gpt-oss cannot represent model.swiglu_limit: swiglu_limit 5.0 would become 7.0",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy"},
            "llama.cpp's deepseek2 does not support moe.group_score: max",
        ),
        (
            "deepseek_v2",
            {"q_lora_rank": None},
            "deepseek2 does not support attention.q_lora_rank: null with other than 26 or 27",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8}},
            (
                "deepseek2 does not support attention.rope_mscale: other than"
                " attention.rope_mscale_all_dim"
            ),
        ),
        (
            "deepseek_v3",
            {"rope_interleave": False},
            "llama.cpp's deepseek2 does not support rope_interleave: false",
        ),
        (
            "deepseek_v3",
            {"rms_norm_eps": 1e-5},
            "deepseek2 does not support attention.latent_norm_epsilon: other than model.norm_eps",
        ),
        (
            "gemma4_text",
            {"hidden_activation": "silu"},
            "GGUF's gemma4 cannot represent model.activation",
        ),
        (
            "gemma4_text",
            {"attention_k_eq_v": False, "attention_bias": True},
            "GGUF's gemma4 cannot represent attention.qkv_bias",
        ),
        (
            "gemma4_text",
            {"rope_parameters": LINEAR},
            "llama.cpp's gemma4 does not support attention.rope_scaling: linear",
        ),
        (
            "gemma4_text",
            {
                "layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 3],
                "per_layer_config": {
                    str(i): {"head_dim": 16, "num_key_value_heads": 1} for i in (0, 2, 3, 4)
                },
            },
            (
                "llama.cpp's gemma4 does not support"
                " attention.kv_shared_layers, unless the two layers before"
            ),
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
            "llama.cpp's llama does not support attention.rope_scaling: proportional",
        ),
    ],
)
def test_export_of_a_model_that_llama_cpp_would_change_is_an_error(
    family, changes, message, tmp_path
):
    with pytest.raises(UserError, match=re.escape(message)):
        export(tmp_path / "x.gguf", family, **changes)
    assert list(tmp_path.iterdir()) == []


def test_padding_rows_have_unused_token_names(tmp_path):
    config = config_of("qwen3", vocab_size=70)
    settings = build_config(
        hf_config_to_settings(config, max_context=64)
        | {"model": hf_config_to_settings(config)["model"] | PADDED}
    )
    shapes = parameter_shapes(settings.architecture(SYMBOLS))
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    export_gguf(
        tmp_path / "x.gguf", settings, *to_hf(settings, SYMBOLS, weights, config), TOKENIZER
    )
    metadata = open_gguf(tmp_path / "x.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"][67:] == ["[PAD67]", "[PAD68]", "[PAD69]"]
    assert metadata["tokenizer.ggml.token_type"][67:] == [5, 5, 5]
    source = source_from_gguf(open_gguf(tmp_path / "x.gguf"))
    assert source.config["vocab_size"] == metadata["qwen3.vocab_size"] == 70
    assert source.tokenizer == TOKENIZER.to_json()


def test_window_as_long_as_the_context_is_dropped(tmp_path):
    export(tmp_path / "x.gguf", "mistral", sliding_window=64, max_position_embeddings=4096)
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata["llama.context_length"] == 64
    assert (
        hf_config_to_settings(source_from_gguf(open_gguf(tmp_path / "x.gguf")).config)["model"][
            "max_context"
        ]
        == 64
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    export(path, "llama", tie_word_embeddings=False)
    return open_gguf(path)


ODD = np.zeros((3, 3), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"metadata": {"general.architecture": "mamba"}},
            "a model of the architecture 'mamba', expected one of llama",
        ),
        ({"metadata": {"general.architecture": None}}, "of the architecture null"),
        (
            {"metadata": {"general.type": "adapter"}},
            "has general.type: 'adapter', expected 'model'",
        ),
        (
            {"metadata": {"llama.attention.scale": 0.5}},
            "llama.attention.scale: 0.5, which is not supported",
        ),
        (
            {"metadata": {"llama.block_count": None}},
            "must have llama.block_count as a positive integer, got nothing",
        ),
        (
            {"metadata": {"llama.embedding_length": "big"}},
            "llama.embedding_length as a positive integer, got 'big'",
        ),
        (
            {"metadata": {"llama.attention.head_count": [4, 2]}},
            "llama.attention.head_count as a positive integer",
        ),
        ({"metadata": {"llama.attention.value_length": 4}}, "keys and values of different lengths"),
        (
            {"metadata": {"llama.rope.dimension_count": 4}},
            "rotates 4 of 8 elements of a head; llama supports only all",
        ),
        (
            {"metadata": {"llama.block_count": 1 << 31}},
            "llama.block_count: 2147483648, but its tensors allow at most",
        ),
        (
            {"metadata": {"llama.embedding_length": 68}},
            "llama.embedding_length: 68, but its tensors allow at most",
        ),
        ({"metadata": {"llama.attention.causal": False}}, "a model without causal attention"),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, "a tokenizer of the kind 'rwkv'"),
        (
            {"arrays": {"blk.0.attn_sinks.weight": ODD}},
            "the tensor blk.0.attn_sinks.weight, which is unknown for llama",
        ),
        ({"drop": ["token_embd.weight"]}, "no embeddings: token_embd.weight is missing"),
        (
            {"arrays": {"token_embd.weight": np.zeros((66, 32), np.float32)}},
            "66 rows of embeddings for 67 tokens",
        ),
        ({"drop": ["blk.1.ffn_up.weight"]}, "lacks model.layers.1.mlp.up_proj.weight"),
        (
            {"arrays": {"blk.1.ffn_up.weight": ODD}},
            "model.layers.1.mlp.up_proj.weight of shape [3, 3]",
        ),
        (
            {"arrays": {"blk.2.attn_norm.weight": ODD[0]}},
            "has model.layers.2.input_layernorm.weight",
        ),
    ],
)
def test_file_with_unknown_or_missing_entries_is_rejected(llama, change, message, tmp_path):
    rewrite(llama, tmp_path / "x.gguf", **change)
    with pytest.raises(UserError, match=re.escape(message)):
        imported(tmp_path / "x.gguf")


def changed_value(value):
    """Returns another value of the same type."""
    if isinstance(value, list):
        return [*value[:-1], changed_value(value[-1])]
    if isinstance(value, (bool, str)):
        return not value if isinstance(value, bool) else value + "?"
    return value * 2 + 1


@each
def test_every_changed_entry_is_rejected_or_changes_the_settings(family, exported):
    file, _ = exported(family)
    arch = file.metadata["general.architecture"]
    before = hf_config_to_settings(source_from_gguf(file).config)
    ignored = {"vocab_size"} | (
        {"feed_forward_length"} if family in ("qwen3_moe", "qwen2_moe") else set()
    )
    ignored |= (
        {"rope.freq_base"} if family == "granitemoehybrid" else set()
    )  # this model has no rotary positions
    for key, value in file.metadata.items():
        if not key.startswith(f"{arch}.") or key.removeprefix(f"{arch}.") in ignored:
            continue
        for changed in (changed_value(value), {"x": 1} if isinstance(value, str) else "x", None):
            metadata = {k: v for k, v in (file.metadata | {key: changed}).items() if v is not None}
            try:
                config = source_from_gguf(file._replace(metadata=metadata)).config
                has_effect = hf_config_to_settings(config) != before
            except UserError as error:
                assert "\n" not in str(error)
                continue
            # A removed entry may have had llama.cpp's default value.
            assert has_effect or changed is None, (key, changed)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt2"])
def test_whatever_an_entry_holds_is_read_or_one_sentence(family, exported):
    file, _ = exported(family)
    for key in [*file.metadata, "split.count", "tokenizer.ggml.scores", "general.alignment"]:
        for value in (
            "x",
            "",
            0,
            3,
            -1,
            1 << 40,
            1.5,
            float("nan"),
            1e300,
            True,
            [],
            ["x"],
            [7],
            [[1]],
            [True] * 99,
        ):
            try:
                source = source_from_gguf(file._replace(metadata=file.metadata | {key: value}))
                build_config(hf_config_to_settings(source.config))
            except UserError as error:
                assert "\n" not in str(error)


# The other families have tensors of the same kinds.
KINDS = ("llama", "phi3", "gpt2", "gemma4_text", "mixtral", "qwen2_moe", "deepseek_v3", "glm4")


@pytest.mark.parametrize(
    "family",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in NAMED],
)
def test_every_missing_or_extra_tensor_is_rejected(family, exported):
    """One tensor of each name is changed: in the last layer that has it."""
    file, _ = exported(family)
    source = source_from_gguf(file)
    model = build_config(hf_config_to_settings(source.config, max_context=64)).architecture(SYMBOLS)
    extra = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    last = {re.sub(r"blk\.\d+", "blk", name): name for name in file.tensors}
    for name in last.values():
        stored = file.tensors[name]
        rest = {other: entry for other, entry in file.tensors.items() if other != name}
        for tensors in (
            rest,
            rest | {f"x{name}": stored},
            rest | {name: stored._replace(shape=(*stored.shape[:-1], stored.shape[-1] // 2))},
            file.tensors
            | {re.sub(r"blk\.\d+", "blk.9", name) if "blk" in name else f"blk.9.{name}": stored},
        ):
            try:
                source = source_from_gguf(file._replace(tensors=tensors))
                settings = hf_config_to_settings(source.config, max_context=64)
            except (UserError, ValueError):
                continue
            another = build_config(settings).architecture(SYMBOLS) != model
            if another and (
                name in extra or name == "output.weight"
            ):  # without this tensor the file is a different valid model
                continue
            with pytest.raises(UserError):
                from_hf(source.config, model, source.tensors)


def test_mistral3_without_query_scaling_is_a_mistral(tmp_path):
    export(tmp_path / "x.gguf", "ministral3")
    file = open_gguf(tmp_path / "x.gguf")
    scaled = ("mistral3.attention.temperature_scale", "mistral3.rope.scaling.yarn_log_multiplier")
    assert [file.metadata[key] for key in scaled] == pytest.approx([0.3, 1.0])
    metadata = {key: value for key, value in file.metadata.items() if key not in scaled}
    source = source_from_gguf(file._replace(metadata=metadata))
    assert source.config["model_type"] == "mistral"
    model = build_config(hf_config_to_settings(source.config, max_context=64)).architecture(SYMBOLS)
    assert replace(model, query_scaling_beta=0.3) == replace(
        imported(file.path)[0],
        rope_scaling=replace(model.rope_scaling, mscale=None, mscale_all_dim=None),
    )


@pytest.mark.parametrize("family", ["phi", "glm", "llama", "stablelm"])
def test_fused_qkv_is_split_into_three_tensors(family, tmp_path):
    weights = export(tmp_path / "x.gguf", family)
    file = open_gguf(tmp_path / "x.gguf")
    fused, separate = {}, []
    for layer in range(2):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in file.tensors:
                fused[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(
                    [read_tensor(file, name) for name in names]
                )
                separate += names
    rewrite(file, tmp_path / "y.gguf", arrays=fused, drop=separate)
    arrays = imported(tmp_path / "y.gguf")[1]
    assert all(np.array_equal(arrays[name], array) for name, array in weights.items())
    rewrite(file, tmp_path / "z.gguf", arrays=fused, drop=separate[:1])
    with pytest.raises(UserError, match=ERRORS["has_both_blk_0_attn_qkv"]):
        imported(tmp_path / "z.gguf")
    rewrite(file, tmp_path / "w.gguf", arrays={"blk.0.attn_qkv.weight": ODD}, drop=separate)
    with pytest.raises(UserError, match=ERRORS["has_the_tensor_blk_0"]):
        imported(tmp_path / "w.gguf")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_text_model_of_qwen_vl_is_a_qwen(family, tmp_path):
    export(tmp_path / "x.gguf", family)
    file, arch = open_gguf(tmp_path / "x.gguf"), f"{family}vl"
    entries = {key.replace(f"{family}.", f"{arch}."): value for key, value in file.metadata.items()}
    sections = {f"{arch}.rope.dimension_sections": [1, 1, 2, 0], f"{arch}.n_deepstack_layers": 3}
    vision = file._replace(metadata=entries | sections | {"general.architecture": arch})
    assert source_from_gguf(vision).config == source_from_gguf(file).config
    with pytest.raises(UserError, match=ERRORS["dimension_sections_1_1_1_1"]):
        source_from_gguf(
            vision._replace(
                metadata=vision.metadata | {f"{arch}.rope.dimension_sections": [1, 1, 1, 1]}
            )
        )


def test_olmo_with_another_epsilon_is_rejected(tmp_path):
    export(tmp_path / "x.gguf", "olmo")
    rewrite(
        open_gguf(tmp_path / "x.gguf"),
        tmp_path / "y.gguf",
        {"olmo.attention.layer_norm_epsilon": 1e-6},
    )
    with pytest.raises(UserError, match=ERRORS["has_olmo_attention_layer_norm_epsilon_1e"]):
        imported(tmp_path / "y.gguf")


def test_granite_4_with_rotary_positions_is_a_granite(tmp_path):
    export(tmp_path / "x.gguf", "granitemoehybrid")
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata["granite.rope.scaling.finetuned"] is False
    assert source_from_gguf(file).config["model_type"] == "granitemoehybrid"
    export(tmp_path / "y.gguf", "granitemoehybrid", position_embedding_type="rope")
    assert source_from_gguf(open_gguf(tmp_path / "y.gguf")).config["model_type"] == "granite"
    export(tmp_path / "z.gguf", "granitemoehybrid:granitemoe")
    file = open_gguf(tmp_path / "z.gguf")
    assert source_from_gguf(file).config["model_type"] == "granitemoeshared"
    # llama.cpp's converter writes the sizes of Mamba layers even if there are none.
    source_from_gguf(file._replace(metadata=file.metadata | {"granitemoe.ssm.conv_kernel": 4}))
    with pytest.raises(UserError, match=ERRORS["granitemoe_rope_scaling_finetuned_false"]):
        source_from_gguf(
            file._replace(metadata=file.metadata | {"granitemoe.rope.scaling.finetuned": False})
        )


def test_glm_flash_without_a_score_function_has_sigmoid_scores(tmp_path):
    export(tmp_path / "x.gguf", "deepseek_v3", num_hidden_layers=47)
    file = open_gguf(tmp_path / "x.gguf")
    metadata = {
        key: value for key, value in file.metadata.items() if key != "deepseek2.expert_gating_func"
    }
    with pytest.raises(UserError, match=ERRORS["exp_probs_b_bias_which_is_unknown"]):
        source_from_gguf(file._replace(metadata=metadata))
    flash = source_from_gguf(file._replace(metadata=metadata | {"deepseek2.vocab_size": 154880}))
    assert flash.config["model_type"] == "deepseek_v3"


def test_multi_token_prediction_layers_are_not_imported(tmp_path):
    weights = export(tmp_path / "x.gguf", "glm4_moe")
    more = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    of_it = {
        "blk.2.attn_norm.weight": np.ones(32, np.float32),
        "blk.2.nextn.enorm.weight": np.ones(32, np.float32),
    }
    rewrite(open_gguf(tmp_path / "x.gguf"), tmp_path / "y.gguf", more, of_it)
    model, arrays = imported(tmp_path / "y.gguf")
    assert model == imported(tmp_path / "x.gguf")[0] and arrays.keys() == weights.keys()
    rewrite(
        open_gguf(tmp_path / "y.gguf"), tmp_path / "z.gguf", {"glm4moe.nextn_predict_layers": 3}
    )
    with pytest.raises(UserError, match=ERRORS["has_3_layers_of_which"]):
        imported(tmp_path / "z.gguf")


def test_equal_output_and_embeddings_are_tied(llama, tmp_path):
    table = np.array(read_tensor(llama, "token_embd.weight"))
    rewrite(llama, tmp_path / "x.gguf", arrays={"output.weight": table})
    assert source_from_gguf(open_gguf(tmp_path / "x.gguf")).config["tie_word_embeddings"] is True
    assert source_from_gguf(open_gguf(llama.path)).config["tie_word_embeddings"] is False
    export(tmp_path / "y.gguf", "olmo2", tie_word_embeddings=True)
    assert "output.weight" in open_gguf(tmp_path / "y.gguf").tensors
    assert source_from_gguf(open_gguf(tmp_path / "y.gguf")).config["tie_word_embeddings"] is True


def test_run_is_exported_and_imported_unchanged(tmp_path, capsys):
    settings, weights = model_of(config_of("qwen3"))
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    save_weights(run.weights, weights)
    save_tokenizer(run, TOKENIZER.to_json())
    save_config(run, settings)
    file, back = tmp_path / "x.gguf", RunDirectory(tmp_path / "back")
    assert main(["export", str(run.path), str(file), "--format", "gguf"]) == 0
    assert main(["import", str(file), "--run_dir", str(back.path)]) == 0
    exported, *summary = capsys.readouterr().out.splitlines()
    assert (
        exported.startswith(f"{file}: qwen3, ")
        and exported.endswith("kB")
        and f"  dantinox serve {back.path}" in summary
    )
    assert any(line.startswith("weights ") and "24 tensors, " in line for line in summary)
    assert back.tokenizer.read_text() == run.tokenizer.read_text()
    assert open_gguf(file).metadata["general.name"] == "run"
    loaded = load_weights(back.weights, weights)
    assert all(np.array_equal(loaded[name], array) for name, array in weights.items())
    assert back.weights.read_bytes() == run.weights.read_bytes()
    again = tmp_path / "y.gguf"
    assert main(["export", str(back.path), str(again), "--format", "gguf"]) == 0
    assert open_gguf(again).tensors == open_gguf(file).tensors


def test_damaged_file_leaves_no_run(llama, tmp_path, capsys):
    path = tmp_path / "x.gguf"
    path.write_bytes(llama.path.read_bytes()[:-100])
    assert main(["import", str(path), "--run_dir", str(tmp_path / "run")]) == 2
    assert re.fullmatch(r"error: .* is damaged: .*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [path]

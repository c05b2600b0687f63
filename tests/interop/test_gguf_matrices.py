"""GGUF files of llama.cpp's architecture `bitnet`: the ternary weights in a file are those of the
model.
"""

import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.interop.gguf.gguf_checkpoint import export_gguf, source_from_gguf
from dantinox.interop.gguf.gguf_file import open_gguf, read_tensor
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_family import BITNET
from dantinox.interop.hf.hf_weights import from_hf, to_hf
from dantinox.interop.packed_import import pack_parameters
from tests.error_texts import ERRORS

from .test_gguf import SYMBOLS, TOKENIZER, model_of, rewrite

SIZES = {
    "vocab_size": SYMBOLS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
FORMS = {
    "transformers": (
        SIZES
        | {
            "model_type": "bitnet",
            "architectures": ["BitNetForCausalLM"],
            "quantization_config": dict(BITNET),
        }
    ),
    "1bitLLM": (
        SIZES
        | {
            "model_type": "llama",
            "architectures": ["BitnetForCausalLM"],
            "weight_bits": 1,
            "input_bits": 8,
        }
    ),
}
QUERY = "blk.1.attn_q.weight"


def export(path, form="transformers", kind="f32", **changes):
    """Returns the random weights of a model that this function exports."""
    config = FORMS[form] | changes
    settings, weights = model_of(config)
    export_gguf(path, settings, *to_hf(settings, SYMBOLS, weights, config), TOKENIZER, kind=kind)
    return weights


def imported(path):
    """Returns the source, the architecture and the parameters of a file."""
    source = source_from_gguf(open_gguf(path))
    model = build_config(hf_config_to_settings(source.config, max_context=64)).architecture(SYMBOLS)
    return source, model, from_hf(source.config, model, source.tensors)


def ternary(w):
    """Returns a matrix as −1, 0 and 1, and its scale, in float64."""
    scale = np.abs(w.astype(np.float64)).mean()
    return np.clip(np.rint(w / scale), -1, 1), scale


def matrices(name, kernel):
    """Returns the matrices of a joint projection, which have separate scales, from
    `[inputs, …]`.
    """
    if name.endswith("qkv/kernel"):  # [D, K, queries + 2, H]
        return np.split(kernel, [kernel.shape[2] - 2, kernel.shape[2] - 1], axis=2)
    return list(np.moveaxis(kernel, 1, 0)) if name.endswith("gate_up/kernel") else [kernel]


@pytest.mark.parametrize("form", FORMS)
# The scale is a float32 mean of up to 64 · 32 absolute values: each sum rounds by at most 2⁻²⁴.
# Q8_0 rounds it to float16.
@pytest.mark.parametrize(("kind", "error"), [("f32", 64 * 32 * 2**-24), ("q8_0", 1e-3)])
def test_ternary_weights_are_kept(form, kind, error, tmp_path):
    weights = export(tmp_path / "x.gguf", form, kind)
    file = open_gguf(tmp_path / "x.gguf")
    assert "output.weight" not in file.tensors and len(np.unique(read_tensor(file, QUERY))) == 3
    _, model, found = imported(tmp_path / "x.gguf")
    assert (
        model.projections == "ternary"
        and model.sub_norms
        and model.activation == "swiglu"
        and model.weight_tying
    )
    assert set(found) == set(weights)
    for name, array in weights.items():
        if not name.endswith("/kernel"):
            np.testing.assert_allclose(
                found[name], array, atol=0 if kind == "f32" else 0.02 * np.abs(array).max()
            )
            continue
        for before, after in zip(*(matrices(name, a) for a in (array, found[name])), strict=True):
            (codes, scale), (same, again) = ternary(before), ternary(after)
            np.testing.assert_array_equal(same, codes, err_msg=name)
            assert abs(again / scale - 1) < error


def test_ternary_projections_are_imported_as_floats_and_embeddings_stay_packed(tmp_path):
    export(tmp_path / "x.gguf", kind="q8_0")
    source, model, found = imported(tmp_path / "x.gguf")
    arrays, widened = pack_parameters(source, model, found)
    assert widened == {} and "embed/parts/0/Q8_0" in arrays
    for name in (name for name in found if name.endswith("/kernel")):
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], found[name])


def test_blocks_of_256_weights_are_stored_as_tq2_0(tmp_path):
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    weights = export(tmp_path / "x.gguf", kind=None, **wide)
    file = open_gguf(tmp_path / "x.gguf")
    assert {stored.kind for name, stored in file.tensors.items() if "_norm" not in name} == {
        "TQ2_0",
        "Q6_K",
    }
    codes, scale = ternary(weights["blocks/0/ffn/down/kernel"])
    expected = codes.T * np.float64(np.float16(np.float32(scale)))
    np.testing.assert_array_equal(read_tensor(file, "blk.0.ffn_down.weight"), expected)


def test_scales_may_be_separate_tensors(tmp_path):
    export(tmp_path / "x.gguf")
    file = open_gguf(tmp_path / "x.gguf")
    whole = read_tensor(file, QUERY)
    arrays = {QUERY: np.sign(whole), "blk.1.attn_q.scale": np.abs(whole).max().reshape(1)}
    rewrite(file, tmp_path / "y.gguf", arrays=arrays)
    before, after = (imported(tmp_path / name)[2] for name in ("x.gguf", "y.gguf"))
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("blk.1.attn_q.scale", [1.0, 1.0], "bitnet_scale_shape"),
        ("blk.7.attn_q.scale", [1.0], "bitnet_scale_shape"),
        ("blk.1.attn_q.scale", [0.0], "bitnet_scale_value"),
        ("blk.1.attn_q.scale", [np.nan], "bitnet_scale_value"),
    ],
)
def test_damaged_scales_are_errors(name, scale, message, tmp_path):
    export(tmp_path / "x.gguf")
    rewrite(
        open_gguf(tmp_path / "x.gguf"),
        tmp_path / "y.gguf",
        arrays={name: np.array(scale, np.float32)},
    )
    with pytest.raises(UserError, match=ERRORS[message]):
        dict(imported(tmp_path / "y.gguf")[2].items())


@pytest.mark.parametrize(("change", "message"), [(0.5, "bitnet_values"), (1e-7, "bitnet_scale")])
def test_matrices_that_are_not_ternary_are_errors(change, message, tmp_path):
    export(tmp_path / "x.gguf")
    file = open_gguf(tmp_path / "x.gguf")
    array = np.array(read_tensor(file, QUERY))
    array[0] *= np.float32(change)
    if message == "bitnet_scale":
        array = np.sign(array) * np.float32(change)
    rewrite(file, tmp_path / "y.gguf", arrays={QUERY: array})
    with pytest.raises(UserError, match=ERRORS[message]):
        dict(imported(tmp_path / "y.gguf")[2].items())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("q4_0", {}, "bitnet_type"),
        ("tq2_0", {}, "bitnet_type"),
        ("f32", {"tie_word_embeddings": False}, "bitnet_untied"),
        ("f32", {"hidden_act": "relu2"}, "bitnet_activation"),
        ("f32", {"quantization_config": None}, "bitnet_float"),
    ],
)
def test_what_llama_cpp_does_not_support_is_refused(kind, changes, message, tmp_path):
    with pytest.raises(UserError, match=ERRORS[message]):
        export(tmp_path / "x.gguf", kind=kind, **changes)
    assert not (tmp_path / "x.gguf").exists()

"""Text models of vision–language checkpoints give the logits of transformers. `make_multimodal.py`
has written both.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.cli import main
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.interop.gguf.gguf_checkpoint import source_from_gguf
from dantinox.interop.gguf.gguf_file import open_gguf, write_gguf
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_folder import open_tensors
from dantinox.interop.hf.hf_multimodal import MULTIMODAL, extract_text_model
from dantinox.interop.hf.hf_weights import from_hf
from dantinox.interop.source import LazyArrays
from dantinox.model.parameters import abstract_model
from dantinox.run import RunDirectory, load_run_config
from dantinox.text import train_tokenizer
from tests.error_texts import ERRORS

MODELS = Path(__file__).parent / "multimodal"
SYMBOLS = 67
LETTERS = "".join(map(chr, range(32, 93)))
TEXT = {"gemma3": "gemma3_text", "mistral3": "ministral3", "qwen2_5_vl": "qwen2"}
SKIPPED = {
    "gemma3": "multi_modal_projector (2), vision_tower (32)",
    "mistral3": "multi_modal_projector (4), vision_tower (11)",
    "qwen2_5_vl": "visual (18)",
}
each = pytest.mark.parametrize("name", TEXT)


def read(name):
    return json.loads((MODELS / name / "config.json").read_text()), open_tensors(MODELS / name)


def renamed(tensors, names):
    """Returns the same tensors with other prefixes of their names."""
    changed = {name: next((old for old in names if name.startswith(old)), None) for name in tensors}
    stored = {
        name if old is None else names[old] + name.removeprefix(old): name
        for name, old in changed.items()
    }
    kinds = {name: tensors.tensors[old] for name, old in stored.items()}
    return LazyArrays(kinds, lambda name: tensors[stored[name]])


def parameters(config, tensors):
    return from_hf(
        config, build_config(hf_config_to_settings(config, 64)).architecture(SYMBOLS), tensors
    )


@each
def test_text_logits_equal_those_of_transformers(name):
    config, tensors, skipped = extract_text_model(*read(name))
    assert config["model_type"] == TEXT[name]
    assert (
        skipped
        == f"{name}: its text model, {TEXT[name]}, is imported; tensors left out: {SKIPPED[name]}"
    )
    settings = hf_config_to_settings(config, max_context=64)
    settings["model"]["dtype"] = "float32"
    architecture = build_config(settings).architecture(SYMBOLS, "cpu")
    arrays = from_hf(config, architecture, tensors)
    model = abstract_model(architecture)[0]({key: jnp.asarray(arrays[key]) for key in arrays})
    expected = np.load(MODELS / name / "expected.npz")
    tokens_BT = jnp.asarray(expected["tokens"])
    positions_BT = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape
    )
    logits_BTV = np.asarray(jax.jit(lambda model, *x: model(*x)[0])(model, tokens_BT, positions_BT))
    assert np.abs(logits_BTV - expected["logits"]).max() < 2e-4
    np.testing.assert_array_equal(logits_BTV.argmax(-1), expected["logits"].argmax(-1))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        (
            "gemma3",
            {
                "language_model.model.": "model.language_model.",
                "vision_tower.": "model.vision_tower.",
            },
        ),
        (
            "gemma3",
            {"language_model.model.": "model.language_model.", "multi_modal": "model.multi_modal"},
        ),
        ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("qwen2_5_vl", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
    ],
)
def test_older_and_newer_tensor_names_are_equivalent(name, names):
    config, tensors = read(name)
    first, second = (
        extract_text_model(config, files) for files in (tensors, renamed(tensors, names))
    )
    assert first[0] == second[0] and first[2] == second[2]
    one, other = parameters(*first[:2]), parameters(*second[:2])
    assert all(np.array_equal(one[key], other[key]) for key in one)


def test_top_level_text_keys_are_read():
    config, tensors = read("qwen2_5_vl")
    expected = extract_text_model(config, tensors)[0]
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text = {
        key: value
        for key, value in config["text_config"].items()
        if key not in ("model_type", "rope_parameters")
    }
    flat = {key: value for key, value in config.items() if key != "text_config"} | text
    found = extract_text_model(
        flat | {"rope_scaling": rope, "rope_theta": 1e4, "vision_token_id": 62}, tensors
    )[0]
    assert found["rope_scaling"] == {"type": "default"}
    one, other = (
        build_config(hf_config_to_settings(keys, 64)).architecture(SYMBOLS)
        for keys in (expected, found)
    )
    assert one == other


def test_absent_sizes_have_transformers_defaults():
    """The config.json of gemma-3-4b-it has only these keys."""
    given = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
             "num_hidden_layers": 34,
             "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
             "sliding_window": 1024}  # fmt: skip
    whole = {
        "model_type": "gemma3",
        "text_config": given,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    config, _, _ = extract_text_model(whole, LazyArrays({}, lambda name: np.zeros(0)))
    assert (config["vocab_size"], config["eos_token_id"], config["torch_dtype"]) == (
        262208,
        [1, 106],
        "bfloat16",
    )
    model = build_config(hf_config_to_settings(config)).architecture(262208)
    assert (model.n_heads, model.kv_heads, model.head_size, model.max_context) == (
        8,
        4,
        256,
        131072,
    )
    assert model.weight_tying and model.windows[:6] == (1024,) * 5 + (None,)


@pytest.mark.parametrize("whole", [True, False, None])
@pytest.mark.parametrize("own", [True, False, None])
def test_conflicting_tie_word_embeddings_are_decided_by_the_tensors(whole, own):
    config, tensors = read("qwen2_5_vl")
    config["text_config"]["tie_word_embeddings"], config["tie_word_embeddings"] = own, whole
    untied, _, _ = extract_text_model(config, tensors)
    bare = LazyArrays(
        {name: kind for name, kind in tensors.tensors.items() if "lm_head" not in name},
        tensors.__getitem__,
    )
    tied, _, _ = extract_text_model(config, bare)
    said = {whole, own} - {None}
    expected = (said == {True}, said == {True}) if len(said) == 1 else (False, True)
    assert (untied["tie_word_embeddings"], tied["tie_word_embeddings"]) == expected


def test_text_model_is_returned_unchanged():
    _, tensors = read("gemma3")
    config = {"model_type": "gemma3_text", "text_config": 3}
    assert extract_text_model(config, tensors) == (config, tensors, None)


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        (
            {},
            {"vision_tower.": "audio_tower."},
            "has audio_tower.embeddings.patch_embedding.bias, which belongs neither to its text",
        ),
        (
            {},
            {"language_model.model.norm.": "extra."},
            "has extra.weight, which belongs neither to its text model nor to vision_tower",
        ),
        (
            {"architectures": ["Gemma3Model"]},
            {},
            "['Gemma3Model']; only Gemma3ForConditionalGeneration of gemma3 generates text",
        ),
        ({"text_config": None}, {}, "config.json has text_config: null, expected an object"),
        (
            {"text_config": {"model_type": "bert"}},
            {},
            "has a text_config of model_type: 'bert', expected one of arcee, ",
        ),
        (
            {"text_config": {"model_type": []}},
            {},
            "has a text_config of model_type: [], expected one of",
        ),
        (
            {"text_config": {"qk_layer_norms": True}},
            {},
            "has qk_layer_norms: true in text_config; only false is supported",
        ),
    ],
)
def test_unsupported_multimodal_config_is_an_error(changes, names, message):
    config, tensors = read("gemma3")
    with pytest.raises(UserError, match=re.escape(message)):
        extract_text_model(config | changes, renamed(tensors, names))


@pytest.mark.parametrize(
    "name", [n if n == "mistral3" else pytest.param(n, marks=pytest.mark.slow) for n in TEXT]
)
def test_whatever_a_key_holds_is_read_or_one_message(name):
    config, tensors = read(name)
    for key in (*config, *config["text_config"]):
        for value in (
            None,
            "x",
            0,
            -1,
            1.5,
            1e300,
            True,
            [],
            ["x"],
            {},
            {"x": {}},
            {"rope_type": []},
        ):
            for changed in ({key: value}, {"text_config": config["text_config"] | {key: value}}):
                try:
                    found, files, _ = extract_text_model(config | changed, tensors)
                    from_hf(
                        found,
                        build_config(hf_config_to_settings(found, 64)).architecture(SYMBOLS),
                        files,
                    )
                except UserError as error:
                    assert "\n" not in str(error)


def test_tensor_with_two_names_is_rejected():
    config, tensors = read("qwen2_5_vl")
    twice = tensors.tensors | {
        "model.language_model.norm.weight": tensors.tensors["model.norm.weight"]
    }
    with pytest.raises(UserError, match=ERRORS["model_language_model_norm_weight_and"]):
        extract_text_model(config, LazyArrays(twice, tensors.__getitem__))


@each
def test_text_model_is_exported_as_its_family(name, tmp_path, capsys):
    folder, run, out = tmp_path / name, RunDirectory(tmp_path / "run"), tmp_path / "out"
    shutil.copytree(MODELS / name, folder)
    tokenizer = train_tokenizer(
        TokenizerSection(tokenizer_type="char"), lambda: iter([LETTERS])
    ).to_json()
    (folder / "tokenizer.json").write_text(tokenizer)
    assert main(["import", str(folder), "--run_dir", str(run.path)]) == 0
    assert f"{name}: its text model, {TEXT[name]}, is imported" in capsys.readouterr().err
    assert load_run_config(run).model.num_blocks == 2
    assert main(["export", str(run.path), str(out), "--format", "hf"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == TEXT[name] and "vision_config" not in config
    expected = extract_text_model(*read(name))
    written = open_tensors(out)
    assert written.tensors.keys() == expected[1].tensors.keys()
    assert all(np.array_equal(written[key], expected[1][key]) for key in written)


def test_gguf_projector_is_an_error(tmp_path):
    metadata = {"general.architecture": "clip", "general.type": "mmproj"}
    write_gguf(tmp_path / "mmproj.gguf", metadata, {"x": ((1,), "F32")}, [np.zeros(1, np.float32)])
    with pytest.raises(UserError, match=ERRORS["its_projector_mmproj_and_no"]):
        source_from_gguf(open_gguf(tmp_path / "mmproj.gguf"))


def test_every_model_has_its_class_and_a_known_text_model():
    for name, whole in MULTIMODAL.items():
        config = {
            "model_type": name,
            "text_config": {"hidden_size": 64},
            "architectures": [whole.architecture],
        }
        found, _, _ = extract_text_model(config, LazyArrays({}, lambda name: np.zeros(0)))
        assert hf_config_to_settings(found)["model"]["dim"] == 64

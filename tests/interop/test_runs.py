"""Import of checkpoints as runs and export of runs, or an error in one sentence that leaves no
file.
"""

import json
import random
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import dantinox
from dantinox.cli import main
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.generation import prepare
from dantinox.interop.checkpoints import export_checkpoint, export_hf, import_run
from dantinox.interop.hf.hf_config import REQUIRED_KEYS, hf_config_to_settings
from dantinox.interop.hf.hf_families import FAMILIES as TABLES
from dantinox.interop.hf.hf_folder import (
    ONE_FILE,
    download_repository,
    open_folder,
    open_tensors,
    write_tensors,
)
from dantinox.interop.hf.hf_unsupported import IGNORED_KEYS
from dantinox.interop.source import LazyArrays, Tensor
from dantinox.run import RunDirectory, load_run_config, save_config, verify_run
from dantinox.text import Tokenizer, train_tokenizer
from tests.error_texts import ERRORS

from .families import FAMILIES

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LETTERS = "".join(map(chr, range(32, 93)))
NEW = 32
QUICK = ("llama", "phi3", "mixtral", "gpt2")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that copies a small checkpoint with a tokenizer to a folder that the test may
    change.
    """
    tokenizer = train_tokenizer(
        TokenizerSection(tokenizer_type="char"), lambda: iter([LETTERS])
    ).to_json()

    def copy(family="llama", **config):
        folder = tmp_path_factory.mktemp("hf") / family
        shutil.copytree(CHECKPOINTS / family, folder)
        (folder / "tokenizer.json").write_text(tokenizer)
        if config:
            edit(folder / "config.json", **config)
        return folder

    return copy


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
    """Rewrites the tensors of a folder after `change` has modified them as a dict of arrays."""
    arrays = {name: np.array(array) for name, array in all_of(open_tensors(folder)).items()}
    change(arrays)
    kinds = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    (folder / ONE_FILE).unlink()
    write_tensors(folder, LazyArrays(kinds, arrays.__getitem__), kinds)


def made(folder):
    folder.mkdir()
    return folder


def all_of(files):
    return {name: files[name] for name in files.tensors}


def import_error(folder, tmp_path, **kwargs) -> str:
    """Runs an import that must fail and leave no file, and returns its error message."""
    with pytest.raises(UserError) as caught:
        import_run(open_folder(folder), tmp_path / "run", **kwargs)
    assert list(tmp_path.iterdir()) == [] and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_reproduce_every_file(folder_of, tmp_path, family):
    folder = folder_of(family)
    run = import_run(open_folder(folder), tmp_path / "run")
    assert verify_run(run).damage == []
    export_hf(run.path, tmp_path / "out")
    assert (tmp_path / "out" / ONE_FILE).read_bytes() == (folder / ONE_FILE).read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
            (folder / name).read_text()
        )
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        folder / "tokenizer.json"
    ).read_text()


def test_dtypes_and_a_stored_tied_head_roundtrip(folder_of, tmp_path):
    folder = folder_of()

    def change_dtypes(arrays):
        for name, array in arrays.items():
            arrays[name] = array.astype(
                np.float16
                if "k_proj" in name
                else np.float32
                if "norm" in name
                else ml_dtypes.bfloat16
            )
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]

    rewrite(folder, change_dtypes)
    run = import_run(open_folder(folder), tmp_path / "run")
    export_hf(run.path, tmp_path / "out")
    assert (tmp_path / "out" / ONE_FILE).read_bytes() == (folder / ONE_FILE).read_bytes()
    export_hf(run.path, tmp_path / "f32", "f32")
    assert {tensor.dtype for tensor in open_tensors(tmp_path / "f32").tensors.values()} == {
        "float32"
    }
    rewrite(
        folder, lambda arrays: arrays.update({"lm_head.weight": arrays["lm_head.weight"][::-1]})
    )
    assert "different numbers in lm_head.weight and model.embed_tokens.weight" in import_error(
        folder, made(tmp_path / "no")
    )


def greedy(path, family, **settings):
    """Returns continuations of both prompts of a checkpoint: those by the imported run, and the
    expected continuations.
    """
    run, expected = dantinox.load(path), np.load(CHECKPOINTS / family / "expected.npz")["tokens"]
    run.prompt_ids = {
        str(row): ids for row, ids in enumerate(expected[:, :-NEW].tolist())
    }.__getitem__
    results = run.generate(
        ["0", "1"], max_new_tokens=NEW, greedy=True, ignore_eos=True, weights="float32", **settings
    )
    return [result.tokens for result in results], expected[:, -NEW:].tolist()


@pytest.mark.parametrize(
    "family",
    [f if f == "gemma3_text" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_greedy_tokens_equal_those_of_transformers(folder_of, tmp_path, family):
    run = import_run(open_folder(folder_of(family)), tmp_path / "run", max_context=64)
    found, expected = greedy(run.path, family)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_the_cache_and_the_batch(folder_of, tmp_path, family):
    run = import_run(open_folder(folder_of(family)), tmp_path / "run", max_context=64)
    found, expected = greedy(run.path, family, use_cache=False)
    assert found == expected
    long = Tokenizer.load(run.tokenizer).decode([20, *range(20, 33)])
    loaded = dantinox.load(run.path)
    alone = loaded.generate(long, max_new_tokens=NEW, greedy=True, ignore_eos=True)
    _, in_batch = loaded.generate(["!#", long], max_new_tokens=NEW, greedy=True, ignore_eos=True)
    assert in_batch.tokens == alone.tokens


CHANGES = {
    "dropped": lambda arrays, name: arrays.pop(name),
    "renamed": lambda arrays, name: arrays.update({name + "x": arrays.pop(name)}),
    "cut": lambda arrays, name: arrays.update({name: arrays[name][..., 1:]}),
    "turned": lambda arrays, name: arrays.update({name: arrays[name][None]}),
    "added": lambda arrays, name: arrays.update({name + ".more": arrays[name]}),
    "integers": lambda arrays, name: arrays.update({name: arrays[name].astype(np.int32)}),
}


@pytest.mark.parametrize(
    ("family", "some"),
    [*((f, 3) for f in QUICK), *(pytest.param(f, None, marks=pytest.mark.slow) for f in FAMILIES)],
)
def test_every_missing_renamed_reshaped_or_extra_tensor_is_rejected(
    folder_of, tmp_path, family, some
):
    """The error message names the tensor that is missing, renamed, reshaped or not expected."""
    folder = folder_of(family)
    content, names = (folder / ONE_FILE).read_bytes(), list(open_tensors(folder).tensors)
    for name in random.Random(0).sample(names, some or len(names)):
        for change in CHANGES.values():
            rewrite(folder, lambda arrays, name=name, change=change: change(arrays, name))
            assert name in import_error(folder, tmp_path)
            (folder / ONE_FILE).write_bytes(content)


def test_gpt2_with_the_names_of_its_first_files(folder_of, tmp_path):
    """In these files, tensor names lack their first part, and the weights include attention
    masks.
    """
    folder = folder_of("gpt2")
    before = all_of(open_tensors(folder))

    def bare(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("transformer.")] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        arrays["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)

    rewrite(folder, bare)
    export_hf(import_run(open_folder(folder), tmp_path / "run").path, tmp_path / "out")
    after = all_of(open_tensors(tmp_path / "out"))
    assert {name: array.tobytes() for name, array in after.items()} == {
        n: array.tobytes() for n, array in before.items()
    }


def test_bfloat16_import_rounds_the_float32_weights(folder_of, tmp_path):
    run = import_run(open_folder(folder_of("llama")), tmp_path / "run", "bfloat16")
    model = dantinox.load(run.path).model
    kernel = model.blocks[0].attention.out.kernel[...]
    assert kernel.dtype == ml_dtypes.bfloat16
    narrow = jax.jit(lambda model: prepare(model, "int8").blocks[0].attention.out)(model)
    rows_OI = np.asarray(kernel, np.float32).reshape(32, 32).T
    np.testing.assert_allclose(
        np.asarray(narrow.scale[...]), np.abs(rows_OI).max(axis=1) / 127, rtol=1e-6
    )


# For each key that affects the model, another value, which is tested with every family that has the
# key.
OTHERS = {
    "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 20, "max_position_embeddings": 32, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": None, "hidden_act": "relu", "hidden_activation": "gelu",
    "activation_function": "relu", "attention_bias": True, "mlp_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "sliding_window": 9,
    "use_sliding_window": None, "layer_types": ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 7, "attn_logit_softcapping": 9.0, "final_logit_softcapping": 9.0,
    "n_embd": 48, "n_layer": 3, "n_head": 8, "n_inner": 48, "n_positions": 32,
    "layer_norm_epsilon": 1e-3, "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "add_cross_attention": True,
    "num_local_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
    "decoder_sparse_step": 2, "mlp_only_layers": [0], "no_rope_layers": [1, 1],
    "original_max_position_embeddings": 12, "use_bidirectional_attention": True, "vocab_size": 60,
    "model_type": "mamba", "is_encoder_decoder": True, "partial_rotary_factor": 0.25,
    "something_new": 1, "norm_topk_prob": False, "position_embedding_type": "learned",
    "architectures": ["LlamaForSequenceClassification"],
}  # fmt: skip
WINDOWS = (
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)  # no effect if layer_types has only full attention
# Keys that have no effect because of other keys in the same config.json.
OVERRIDDEN: dict[str, Sequence[str]] = {
    # Without enable_moe_block there are no experts, and per_layer_config overrides the heads of
    # layers.
    "gemma4_text": ("num_experts", "top_k_experts", "moe_intermediate_size", "global_head_dim"),
    # rope_parameters has it too.
    **dict.fromkeys(("glm", "glm4", "stablelm", "phi", "phi3"), ("partial_rotary_factor",)),
    "qwen2": ["max_window_layers"], "qwen3": WINDOWS, "qwen3_moe": [*WINDOWS, "intermediate_size"],
    "qwen2_moe": WINDOWS, "dots1": [*WINDOWS, "topk_group"],
    "glm4_moe": ["topk_group", "partial_rotary_factor"],
    "glm4_moe_lite": ["topk_group", "rope_interleave"],
    "deepseek_v3": ["rope_interleave"],  # the order in which tensors are stored
    "smollm3": ["sliding_window", "use_sliding_window", "no_rope_layer_interval"],
    "gemma3_text": ["_sliding_window_pattern"], "exaone4": ["sliding_window_pattern"],
    # No experts, no positions.
    "granitemoehybrid": ["intermediate_size", "num_experts_per_tok", "rope_parameters"],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_config_is_rejected_or_has_an_effect(folder_of, tmp_path, family):
    given = json.loads((CHECKPOINTS / family / "config.json").read_text())
    before = build_config(hf_config_to_settings(given)).architecture(60)
    unused = IGNORED_KEYS.union(TABLES[family].ignored) - {
        "vocab_size",
        "model_type",
        "architectures",
    }
    for key in given.keys() | {"something_new", "quantization_config", "partial_rotary_factor"}:
        if key in unused or key == "vocab_size" or key in OVERRIDDEN.get(family, ()):
            continue
        value = (
            OTHERS.get(key) if OTHERS.get(key) not in (None, given.get(key)) else not given.get(key)
        )
        value = given[key][::-1] if key == "layer_types" and len(set(given[key])) > 1 else value
        try:
            after = build_config(hf_config_to_settings(given | {key: value})).architecture(60)
        except UserError as error:
            assert "\n" not in str(error) and re.search(
                r"config\.json (has|lacks)|^(model|moe|attention)\.", str(error)
            )
        else:
            assert after != before, (key, value)


# Keys that these families require, besides those that all families require.
NO_DEFAULT = {
    "deepseek_v2": ("num_experts_per_tok", "n_group", "topk_group"),
    "granitemoehybrid": ("layer_types",),
    "dots1": ("num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_key_has_transformers_default_or_is_required(family):
    given = json.loads((CHECKPOINTS / family / "config.json").read_text())
    needed = set()
    together = (
        ("layer_types", "vocab_size", "vocab_size_per_layer_input")
        if family == "gemma4_text"
        else ()
    )
    for key in given:
        try:
            hf_config_to_settings({name: value for name, value in given.items() if name != key})
        except UserError as error:
            if key == "use_sliding_window" or key in together:
                assert "lacks" not in str(error)  # the value depends on other keys
                continue
            assert f"lacks {key}" in str(error) or "model_type" in str(error)
            needed.add(key)
    without_default = {*REQUIRED_KEYS, *NO_DEFAULT.get(family, ())} - TABLES[family].defaults.keys()
    assert needed - {"model_type"} == given.keys() & without_default


def test_padded_vocabulary_keeps_its_rows_and_a_too_small_one_is_rejected(folder_of, tmp_path):
    run = import_run(open_folder(folder_of()), tmp_path / "run")
    assert dantinox.load(run.path).model.embed.shape == (67, 32)
    assert "vocab_size: 60" in import_error(folder_of(vocab_size=60), made(tmp_path / "b"))


def header_of(path, **changes):
    """Rewrites the header of a safetensors file, including its length."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length]) | changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_damaged_files_are_an_error(folder_of, tmp_path):
    folder = folder_of()
    path = folder / ONE_FILE
    content = path.read_bytes()
    entry = {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}

    def change_header(**changes):
        path.write_bytes(content)
        header_of(path, **changes)

    for damage, message in (
        (lambda: path.write_bytes(b""), "is damaged: "),
        (lambda: path.write_bytes(content[:-5]), "is damaged: "),
        (lambda: path.write_bytes(content[:100]), "is damaged: "),
        (lambda: path.write_bytes(struct.pack("<Q", 10 << 30) + content[8:]), "is damaged: "),
        (lambda: path.write_bytes(content[:8] + b"\xff" * (len(content) - 8)), "is damaged"),
        (
            lambda: change_header(**{"model.norm.weight": entry | {"data_offsets": [0, 1 << 40]}}),
            "is damaged: ",
        ),
        (
            lambda: change_header(**{"model.norm.weight": entry | {"shape": [1 << 40]}}),
            "is damaged: ",
        ),
        (lambda: change_header(**{"model.norm.weight": entry | {"shape": [-32]}}), "is damaged: "),
        (lambda: change_header(**{"model.norm.weight": entry | {"dtype": "F8"}}), "is damaged: "),
        (
            lambda: save_file({"a": np.zeros(2, np.complex64)}, path),
            "has a as C64, expected one of",
        ),
        (lambda: change_header(more=7), "is damaged: "),
        (lambda: path.write_bytes(content + b"more"), "is damaged: "),
    ):
        damage()
        assert message in import_error(folder, tmp_path), message


def test_index_may_list_only_files_next_to_it(folder_of, tmp_path):
    folder = folder_of()
    names = list(open_tensors(folder).tensors)
    (folder / ONE_FILE).rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    for places, message in (
        (dict.fromkeys(names, "../a.safetensors"), "which is not a safetensors file next to it"),
        (dict.fromkeys(names, "/etc/passwd"), "which is not a safetensors file next to it"),
        (dict.fromkeys(names, "b.safetensors"), "cannot read"),
        (dict.fromkeys([*names, "model.more"], "a.safetensors"), "lacks model.more"),
        ([], "must have an object under weight_map, got []"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        assert message in import_error(folder, tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    import_run(open_folder(folder), tmp_path / "run")


def test_missing_file_is_an_error_with_a_remedy(folder_of, tmp_path):
    folder = folder_of()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert (
        "has no tokenizer.json, only tokenizer.model: create one with AutoTokenizer"
        in import_error(folder, tmp_path)
    )
    (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    (folder / ONE_FILE).rename(folder / "pytorch_model.bin")
    assert (
        "pytorch_model.bin, a pickle, which is not read because it can run any code"
        in import_error(folder, tmp_path)
    )
    assert "it has no config.json" in import_error(tmp_path, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    with pytest.raises(UserError, match=ERRORS["already_exists_and_is_not"]):
        import_run(open_folder(folder_of()), tmp_path / "run")


def test_special_tokens_are_read_from_the_checkpoint(folder_of, tmp_path):
    folder = folder_of()
    roles = {
        "bos_token": "A",
        "eos_token": {"content": "B"},
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    ids = [tokenizer.core.token_to_id(token) for token in "CD"]
    edit(
        folder / "generation_config.json",
        eos_token_id=[*ids, 10**30],
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
    )
    run = import_run(open_folder(folder), tmp_path / "run")
    loaded = dantinox.load(run.path)
    assert loaded.tokenizer.stop_ids == tuple(ids)
    assert loaded.tokenizer.template_variables["bos_token"] == "A"
    assert loaded.prompt_ids("XY") == [loaded.tokenizer.bos_id, *loaded.tokenizer.encode("XY")]
    assert (loaded.config.generation.temperature, loaded.config.generation.top_p) == (0.6, 0.9)
    assert run.chat_template.read_text() == "{{ bos_token }}"


def test_chat_template_is_read_from_one_of_three_files(folder_of):
    """`chat_template.jinja` has priority. `chat_template.json` comes last; processors of
    vision–language models write it.
    """
    folder = folder_of()
    for name, content in (
        ("chat_template.json", json.dumps({"chat_template": "of a processor"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "of a tokenizer"})),
        ("chat_template.jinja", "of its own"),
    ):
        (folder / name).write_text(content)
        expected = content if name.endswith("jinja") else json.loads(content)["chat_template"]
        assert open_folder(folder).chat_template == expected


def test_sampling_defaults_come_from_the_checkpoint_or_the_kind_of_model(
    folder_of, tmp_path, capsys
):
    """A base model keeps the defaults. A chat model gets `INSTRUCT_DEFAULTS`, unless its files set
    sampling parameters.
    """
    folder = folder_of()
    edit(folder / "generation_config.json", do_sample=False, temperature=0.3)
    assert main(["import", str(folder), "--run_dir", str(tmp_path / "base")]) == 0
    base = load_run_config(RunDirectory(tmp_path / "base"))
    assert (base.generation.temperature, base.generation.top_p, base.generation.max_new_tokens) == (
        1.0,
        None,
        150,
    )
    summary = capsys.readouterr().out
    assert (
        "none: the model continues text" in summary
        and "temperature 1, no filter" in summary
        and "chat" not in summary[-90:]
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}"})
    )
    assert main(["import", str(folder), "--run_dir", str(tmp_path / "instruct")]) == 0
    generation = load_run_config(RunDirectory(tmp_path / "instruct")).generation
    assert (generation.temperature, generation.top_p, generation.min_p) == (0.7, 0.9, 0.05)
    assert (
        generation.max_new_tokens
        == load_run_config(RunDirectory(tmp_path / "instruct")).model.max_context // 2
    )
    summary = capsys.readouterr().out
    assert (
        "temperature 0.7, top_p 0.9, min_p 0.05" in summary
        and f"  dantinox chat {tmp_path / 'instruct'}\n" in summary
    )


def test_import_and_export_commands(folder_of, tmp_path, capsys):
    folder = folder_of("qwen3")
    assert (
        main(
            [
                "import",
                str(folder),
                "--run_dir",
                str(tmp_path / "run"),
                "--dtype",
                "bfloat16",
                "--max_context",
                "48",
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "run"),
                str(tmp_path / "out"),
                "--format",
                "hf",
                "--type",
                "bf16",
            ]
        )
        == 0
    )
    assert {tensor.dtype for tensor in open_tensors(tmp_path / "out").tensors.values()} == {
        "bfloat16"
    }
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "hf"]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "none"), "--run_dir", str(tmp_path / "x")]) == 2
    assert (
        main(["import", str(folder), "--run_dir", str(tmp_path / "x"), "--max_context", "0"]) == 2
    )
    assert not (tmp_path / "x").exists()


def test_wrong_arguments_of_the_python_api_are_errors(tmp_path):
    for arguments, message in [
        (
            ("x", tmp_path / "r", "float16"),
            "dtype must be one of auto, float32, bfloat16, got float16",
        ),
        (("x", tmp_path / "r", "auto", 0), "max_context must be at least 1, got 0"),
    ]:
        with pytest.raises(UserError, match=message):
            dantinox.import_checkpoint(*arguments)
    with pytest.raises(UserError, match=ERRORS["format_must_be_one_of"]):
        dantinox.export_checkpoint(tmp_path, tmp_path / "d", "onnx")
    with pytest.raises(UserError, match=ERRORS["of_format_hf_must_be"]):
        dantinox.export_checkpoint(tmp_path, tmp_path / "d", "hf", "q8_0")


def test_unreachable_hub_and_missing_repository_have_different_errors(monkeypatch):
    hub, errors = (
        pytest.importorskip(name) for name in ("huggingface_hub", "huggingface_hub.errors")
    )

    def raises(error):
        monkeypatch.setattr(
            hub, "snapshot_download", lambda *args, **kwargs: (_ for _ in ()).throw(error)
        )
        with pytest.raises(UserError) as caught:
            download_repository("owner/model")
        return str(caught.value)

    offline = raises(errors.LocalEntryNotFoundError("Name or service not known"))
    assert (
        "the Hub cannot be reached: Name or service not known. To import without network access,"
        " copy" in offline
    )
    assert "the Hub has no such repository" in raises(errors.HFValidationError("Repo id must"))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_run_with_scanned_layers_is_exported_like_one_without(tmp_path, run_dir, kind):
    scanned = RunDirectory(shutil.copytree(run_dir, tmp_path / run_dir.name))
    config = load_run_config(scanned)
    model = config.model.model_copy(update={"scan_layers": True})
    save_config(scanned, config.model_copy(update={"model": model}))
    files = []
    for source, target in ((run_dir, tmp_path / "a.x"), (scanned.path, tmp_path / "b.x")):
        export_checkpoint(source, target, kind)
        file = target / "model.safetensors" if kind == "hf" else target
        files.append(file.read_bytes())
    assert files[0] == files[1]


def test_export_does_not_replace_a_file(tmp_path, run_dir):
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(UserError, match=ERRORS["mine_gguf_already_exists"]):
        export_checkpoint(run_dir, tmp_path / "mine.gguf", "gguf")
    assert (tmp_path / "mine.gguf").read_text() == "mine"

"""Quantized GGUF files are imported block by block: the packed weights are those of a converted
import, and so is the text.
"""

import math
import re
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dantinox
from dantinox.cli import main
from dantinox.config import TokenizerSection, UserError, build_config
from dantinox.generation import prepare
from dantinox.generation.decode.drafts import max_rows
from dantinox.generation.decode.prepared_model import permute_heads, weight_bytes
from dantinox.interop import packed_import
from dantinox.interop.checkpoints import export_checkpoint, import_checkpoint
from dantinox.interop.gguf.ggml_quantize import quantize
from dantinox.interop.gguf.gguf_checkpoint import _type_of_blocks, source_from_gguf
from dantinox.interop.gguf.gguf_file import open_gguf, read_rows, read_tensor
from dantinox.interop.gguf.quantization_recipes import FILE_TYPES
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_weights import from_hf
from dantinox.interop.packed_import import pack_parameters
from dantinox.kernels import MAX_NATIVE_ROWS, load_kernels
from dantinox.lab.measure.perplexity import measure_perplexity
from dantinox.model.packed import PackedTable, packed_kinds
from dantinox.model.parameters import abstract_model, init_parameters, widen_arrays
from dantinox.model.scoring import token_logprobs
from dantinox.run import (
    RunDirectory,
    create_run,
    load_run_config,
    save_config,
    save_tokenizer,
    verify_run,
)
from dantinox.run.adapters import load_run_weights
from dantinox.run.weights import StoredArray, load_weights, read_arrays, save_weights
from dantinox.text import train_tokenizer
from tests.error_texts import ERRORS

from .test_gguf import NAMED, SYMBOLS, export

pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("float16")
TOKENS = np.random.default_rng(1).integers(0, SYMBOLS, (2, 12))
POSITIONS = np.broadcast_to(np.arange(12), (2, 12))
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def read(path):
    """Returns the architecture, the packed arrays, the matrices that become bfloat16, and the
    converted parameters.
    """
    source = source_from_gguf(open_gguf(path))
    model = build_config(hf_config_to_settings(source.config, max_context=64)).architecture(SYMBOLS)
    converted = from_hf(source.config, model, source.tensors)
    arrays, widened = pack_parameters(source, model, converted)
    return model, arrays, widened, converted


def split(arrays):
    """Returns the packed arrays as they are read from a file, and the other arrays."""
    packed = {name: arrays[name] for name in arrays if arrays.tensors[name].dtype == "uint8"}
    stored = {
        name: StoredArray(array.shape, (array.reshape(-1),)) for name, array in packed.items()
    }
    return stored, {name: arrays[name] for name in arrays if name not in packed}


@partial(jax.jit, static_argnames="settings")
def forward(model, tokens, positions, settings):
    return prepare(model, **dict(settings))(tokens, positions)[0]


def logits_of(model, tokens=TOKENS, positions=POSITIONS, **settings):
    """Returns the logits of a model after `prepare` with these settings."""
    return np.asarray(forward(model, tokens, positions, tuple(settings.items())))


def logits(model, arrays, packed=None):
    build, shapes = abstract_model(model, packed)
    transformer = build({name: jnp.asarray(np.asarray(arrays[name])) for name in shapes})
    return transformer, logits_of(transformer)


QUICK = ("llama", "phi3", "mixtral", "gpt2")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMED]


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("kind", ["q8_0", pytest.param("q4_k_m", marks=pytest.mark.slow)])
def test_packed_weights_equal_converted_weights(family, kind, tmp_path):
    export(tmp_path / "x.gguf", family, kind)
    model, arrays, widened, converted = read(tmp_path / "x.gguf")
    stored, rest = split(arrays)
    unpacked = {name: array.array() for name, array in widen_arrays(model, stored).items()}
    assert unpacked.keys() | rest.keys() == set(converted) and not unpacked.keys() & rest.keys()
    for name in converted:
        array = unpacked.get(name, rest.get(name))
        expected = converted[name] if name in unpacked else converted[name].astype(array.dtype)
        np.testing.assert_array_equal(array, expected, err_msg=name)
    assert "embed" in unpacked and any("attention" in name for name in unpacked)
    # Of the quantized matrices, only the up-projection of latent attention does not consist of rows
    # of the file.
    assert {re.sub(r"\d+", "", name) for name in widened} <= {"blocks//attention/kv_b/kernel"}


LOGITS = ("llama", "qwen3_moe", "gemma4_text", "deepseek_v2", "phi3", "gpt2", "gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name != "qwen3_moe" else ()) for name in LOGITS],
)
def test_logits_of_a_packed_model_equal_those_of_a_converted_model(family, tmp_path):
    export(
        tmp_path / "x.gguf", family, "q8_0", std=32**-0.5
    )  # attention scores of about 1 do not amplify rounding errors
    model, arrays, _, converted = read(tmp_path / "x.gguf")
    transformer, found = logits(model, arrays, split(arrays)[0])
    exact = {name: arrays[name] if name in arrays else converted[name] for name in converted}
    expected = logits(model, exact)[1]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert packed_kinds(transformer).keys() <= {"Q8_0"}
    assert packed_kinds(nnx.eval_shape(lambda model: prepare(model, "float32"), transformer)) == {}
    again = logits_of(transformer, weights="float32")
    assert np.abs(again - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_parts_of_a_projection_may_have_different_formats(tied, tmp_path):
    export(tmp_path / "x.gguf", "llama", "q4_k_m", std=256**-0.5, tie_word_embeddings=tied, **WIDE)
    model, arrays, _, converted = read(tmp_path / "x.gguf")
    names = {name for name in arrays if name.startswith("blocks/1/attention/qkv")}
    assert names == {"blocks/1/attention/qkv/parts/0/Q4_K", "blocks/1/attention/qkv/parts/1/Q6_K"}
    assert arrays.tensors["blocks/1/attention/qkv/parts/0/Q4_K"].shape == (2, 3, 64, 144)
    assert (
        "blocks/1/ffn/gate_up/parts/0/Q4_K" in arrays and "blocks/1/ffn/down/parts/0/Q6_K" in arrays
    )
    transformer, found = logits(model, arrays, split(arrays)[0])
    assert isinstance(transformer.embed, PackedTable) and (transformer.head is None) == tied
    expected = logits(model, converted)[1]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["tq2_0", pytest.param("tq1_0", marks=pytest.mark.slow)])
def test_ternary_blocks_stay_packed(kind, tmp_path):
    export(tmp_path / "x.gguf", "llama", kind, std=256**-0.5, tie_word_embeddings=False, **WIDE)
    model, arrays, widened, converted = read(tmp_path / "x.gguf")
    transformer, found = logits(model, arrays, split(arrays)[0])
    assert widened == {} and packed_kinds(transformer).keys() == {kind.upper(), "Q4_K", "Q6_K"}
    name = f"blocks/1/ffn/gate_up/parts/0/{kind.upper()}"
    assert arrays.tensors[name].shape == (2, 256, {"tq1_0": 54, "tq2_0": 66}[kind])
    expected = logits(model, converted)[1]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    if load_kernels().instructions is not None:
        native = logits_of(transformer, matmul_kernel="native")
        assert np.abs(native - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random model of bytes, its export `x.gguf` of type q4_k_m, and imports of it:
    `packed` and `float`.
    """
    folder = tmp_path_factory.mktemp("packed")
    shape = {
        "dim": 256,
        "n_heads": 4,
        "kv_heads": 2,
        "hidden_dim": 256,
        "num_blocks": 2,
        "max_context": 64,
        "dtype": "float32",
    }
    config = build_config({"model": shape, "tokenizer": {"tokenizer_type": "byte"}})
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
    run = create_run(folder / "trained")
    save_weights(run.weights, init_parameters(config.architecture(tokenizer.vocab_size), 0))
    save_tokenizer(run, tokenizer.to_json())
    save_config(run, config)
    export_checkpoint(run.path, folder / "x.gguf", "gguf", "q4_k_m")
    import_checkpoint(folder / "x.gguf", folder / "packed")
    import_checkpoint(folder / "x.gguf", folder / "float", "float32")
    return folder


@pytest.fixture(scope="module")
def packed_model(folder):
    return dantinox.load(folder / "packed").model


@pytest.mark.slow
def test_a_packed_run_generates_the_text_of_a_converted_run(folder):
    packed, converted = dantinox.load(folder / "packed"), dantinox.load(folder / "float")
    assert packed.parameters == converted.parameters
    settings = {"greedy": True, "max_new_tokens": 20}
    prompts = ["In the beginning", "x", "the quick brown fox jumps over it"]
    for changes in ({}, {"weights": "float32"}, {"use_cache": False}):
        texts = [run.generate(prompts, **settings | changes) for run in (packed, converted)]
        assert [result.text for result in texts[0]] == [result.text for result in texts[1]]
    size, stored = (
        (folder / "packed/model_weights.msgpack").stat().st_size,
        (folder / "x.gguf").stat().st_size,
    )
    assert size < stored
    assert weight_bytes(packed.prepared(packed.config.generation)) < size


def test_log_probabilities_need_one_copy_of_the_packed_output_layer(packed_model):
    """Products at single positions made a copy of the packed weights for each position, which took
    39 GB for a vocabulary of 49,152 tokens.
    """
    x_BTD = jnp.ones((2, 9, packed_model.config.dim))
    program = jax.make_jaxpr(partial(token_logprobs, packed_model))(x_BTD, np.zeros((2, 9), int))
    shapes = re.findall(r"\bu8\[([\d,]+)\]", str(program))
    sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
    # The integers of a block, before their scale, take at most a byte per weight.
    assert sizes and max(sizes) <= packed_model.config.vocab_size * packed_model.config.dim


def test_requantized_weights_that_take_more_memory_cause_a_warning(packed_model):
    with pytest.warns(
        UserWarning, match="generation.weights: int4 needs .* quantized already"
    ) as found:
        prepared = prepare(packed_model, weights="int4")
    needed, taken = map(float, re.findall(r"([\d.]+) MB", str(found[0].message)))
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / 1e6
        for model in (prepared, packed_model)
    ]
    assert (needed, taken) == tuple(round(size, 1) for size in sizes) and needed > taken


def test_a_packed_model_may_have_its_key_heads_reordered(packed_model):
    order = tuple((1, 0) for _ in packed_model.blocks)
    reordered = permute_heads(packed_model, order)
    first, other = logits_of(packed_model), logits_of(reordered)
    assert np.abs(first - other).max() <= 1e-5 * np.abs(first).max()
    assert reordered.blocks[0].attention.out.input_order == (1, 0)
    assert permute_heads(reordered, order).blocks[0].attention.out.input_order == (0, 1)
    unpacked = logits_of(reordered, weights="float32")
    assert np.abs(first - unpacked).max() <= 1e-5 * np.abs(first).max()


@pytest.mark.parametrize("kind", [pytest.param("q4_k_m", marks=pytest.mark.slow), "q8_0", "tq1_0"])
def test_an_export_keeps_the_blocks_of_a_packed_run(kind, folder, tmp_path):
    """The rows of queries and keys, and the parts of joint projections, are in another order in the
    run.
    """
    export_checkpoint(folder / "trained", tmp_path / "x.gguf", "gguf", kind)
    import_checkpoint(tmp_path / "x.gguf", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "again.gguf", "gguf", kind)
    before, after = (open_gguf(tmp_path / f"{name}.gguf") for name in ("x", "again"))
    for name, tensor in before.tensors.items():
        assert after.tensors[name][:2] == tensor[:2]
        np.testing.assert_array_equal(read_rows(after, name), read_rows(before, name), err_msg=name)
    export_checkpoint(tmp_path / "run", tmp_path / "default.gguf", "gguf")
    assert (tmp_path / "default.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes(), (
        "the type of the blocks is kept"
    )
    # Matrices in another format are quantized.
    other = {"q4_k_m": "q6_k", "q8_0": "q4_0", "tq1_0": "tq2_0"}[kind]
    export_checkpoint(tmp_path / "run", tmp_path / "other.gguf", "gguf", other)
    name = "blk.0.ffn_gate.weight"
    raw = quantize(open_gguf(tmp_path / "other.gguf").tensors[name].kind, read_tensor(before, name))
    np.testing.assert_array_equal(
        read_rows(open_gguf(tmp_path / "other.gguf"), name).reshape(-1),
        raw.view(np.uint8).reshape(-1),
    )


def test_blocks_of_no_file_type_need_a_type():
    def shapes(kind):
        return {"a": ((64, 32), FILE_TYPES[kind].base), "b": ((32,), "F32")}

    assert _type_of_blocks({}, shapes) == "f32"
    assert _type_of_blocks({"Q4_1": 64 * 32}, shapes) == "q4_1"
    with pytest.raises(UserError, match=ERRORS["no_type_of_gguf_file"]):
        _type_of_blocks({"Q4_1": 1024, "Q8_0": 1024}, shapes)


def test_a_file_name_that_is_no_export_format_is_refused(run_dir, tmp_path, capsys):
    assert main(["export", str(run_dir), str(tmp_path / "x.bin")]) == 2
    assert (
        "DEST must be a folder for Hugging Face Transformers, or a .gguf file"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.slow
def test_a_packed_run_is_exported_and_evaluated(folder, tmp_path):
    export_checkpoint(folder / "packed", tmp_path / "packed.gguf", "gguf", "f32")
    export_checkpoint(folder / "float", tmp_path / "float.gguf", "gguf", "f32")
    tensors = [open_gguf(tmp_path / f"{name}.gguf") for name in ("packed", "float")]
    for name in tensors[0].tensors:
        np.testing.assert_array_equal(*(read_tensor(file, name) for file in tensors))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 4)
    nats = [
        measure_perplexity(folder / name, str(tmp_path / "text.txt")).nats
        for name in ("packed", "float")
    ]
    assert abs(nats[0] - nats[1]) < 1e-4


@pytest.mark.slow
def test_info_and_verify_report_a_packed_run(folder, capsys):
    assert main(["info", str(folder / "packed")]) == 0
    lines = capsys.readouterr().out
    assert re.search(r"weights +[\d.]+ \wB \(Q4_K [\d.]+ \wB, Q6_K [\d.]+ \wB, float32", lines)
    assert verify_run(RunDirectory(folder / "packed")).damage == []
    assert main(["import", str(folder / "x.gguf"), "--run_dir", str(folder / "again")]) == 0
    assert "Q4_K, Q6_K" in capsys.readouterr().out


def damaged_weights(folder, tmp_path, change):
    """Returns the error of loading a copy of the packed run, after `change` has modified the arrays
    of its weights file.
    """
    shutil.copytree(folder / "packed", tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    arrays = {name: array.array() for name, array in read_arrays(run.weights)[0].items()}
    change(arrays)
    save_weights(run.weights, arrays)
    with pytest.raises(UserError) as caught:
        dantinox.load(run.path)
    assert "\n" not in str(caught.value) and str(run.weights) in str(caught.value)
    return str(caught.value)


QKV = "blocks/1/attention/qkv/parts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(f"{QKV}/0/Q4_K"), "lack a part of blocks/1/attention/qkv"),
        (lambda a: a.pop(f"{QKV}/1/Q6_K"), "do not form the outputs"),
        (lambda a: a.update({f"{QKV}/0/Q4_K": a[f"{QKV}/0/Q4_K"][..., :-1]}), "with shape"),
        (lambda a: a.update({f"{QKV}/0/Q5_K": a.pop(f"{QKV}/0/Q4_K")}), "in Q5_K with shape"),
        (
            lambda a: a.update({f"{QKV}/0/Q2_K": a.pop(f"{QKV}/0/Q4_K")}),
            "not the name of a packed array",
        ),
        (
            lambda a: a.update({"blocks/9/attention/qkv/parts/0/Q4_K": a[f"{QKV}/0/Q4_K"]}),
            "does not have",
        ),
        (lambda a: a.update({"blocks/0/norm1/parts/0/Q4_K": a[f"{QKV}/0/Q4_K"]}), "does not have"),
        (
            lambda a: a.update({"embed/parts/0/Q6_K": a["embed/parts/0/Q6_K"][:-1]}),
            "embed in Q6_K with shape",
        ),
        (
            lambda a: a.update({f"{QKV}/0/Q4_K": a[f"{QKV}/0/Q4_K"].astype(np.float32)}),
            "lack a part of",
        ),
        (
            lambda a: a.update(
                {"blocks/0/norm1/scale": a["blocks/0/norm1/scale"].astype(np.uint8)}
            ),
            "not the name of a packed",
        ),
    ],
)
def test_damaged_packed_arrays_are_an_error(change, message, folder, tmp_path):
    assert message in damaged_weights(folder, tmp_path, change)


def test_scales_that_are_not_finite_are_an_error(tmp_path):
    export(tmp_path / "x.gguf", "llama", "q8_0")
    stored = open_gguf(tmp_path / "x.gguf").tensors["blk.0.attn_k.weight"]
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    content[stored.offset : stored.offset + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "x.gguf").write_bytes(content)
    _, arrays, _, _ = read(tmp_path / "x.gguf")
    with pytest.raises(UserError, match=r"NaN or Inf in blk\.0\.attn_k\.weight"):
        split(arrays)


def test_matrices_of_other_types_become_bfloat16_with_one_note(folder, tmp_path, monkeypatch):
    monkeypatch.delitem(packed_import.FORMATS, "Q6_K")
    notes = []
    run = import_checkpoint(folder / "x.gguf", tmp_path / "run", note=notes.append).run
    arrays = read_arrays(run.weights)[0]
    assert (
        arrays["embed"].dtype.name == "bfloat16" and "blocks/0/attention/out/parts/0/Q4_K" in arrays
    )
    assert len(notes) == 1 and "Q6_K" in notes[0] and "--dtype float32" in notes[0]


def test_training_starts_from_converted_weights(folder):
    run = RunDirectory(folder / "packed")
    config = load_run_config(run)
    model = config.architecture(dantinox.load(folder / "float").tokenizer.vocab_size)
    shapes = abstract_model(model)[1]
    weights = load_run_weights(run, config, shapes, model.vocab_size)
    expected = load_weights(folder / "float/model_weights.msgpack", shapes)
    for name in shapes:
        np.testing.assert_array_equal(weights[name], expected[name])
    with pytest.raises(
        UserError,
        match=r"are quantized .* needs float weights: import the checkpoint again with --dtype",
    ):
        load_weights(run.weights, shapes)


@pytest.mark.parametrize("rows", [1, pytest.param(130, marks=pytest.mark.slow)])
def test_native_kernels_give_the_logits_of_xla(rows, packed_model):
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)
    tokens = np.random.default_rng(2).integers(0, 200, (rows, 3))
    positions = POSITIONS[:1, :3].repeat(rows, 0)
    native, xla = (
        logits_of(packed_model, tokens, positions, matmul_kernel=kernel)
        for kernel in ("native", "xla")
    )
    assert np.abs(native - xla).max() <= 1e-5 * np.abs(xla).max()


@pytest.mark.slow
def test_xla_does_not_convert_the_weights_of_all_layers_at_once(packed_model):
    model = prepare(packed_model, matmul_kernel="xla")
    hidden = jax.jit(lambda model, tokens: model.hidden(tokens, POSITIONS)[0])
    program = hidden.lower(model, TOKENS).compile()
    largest = max(
        4 * math.prod(node.shape_in + node.shape_out)
        for _, node in nnx.iter_graph(model)
        if hasattr(node, "shape_in")
    )
    assert (
        program.memory_analysis().temp_size_in_bytes < 2 * largest
    )  # two layers have six times this size
    table_VD = np.array(model.embed.unpack()[...])
    table_VD[5] = np.nan
    model.embed = nnx.Param(jnp.asarray(table_VD))
    tokens = np.stack([np.full(12, 5), np.full(12, 6)])
    finite = np.isfinite(np.asarray(hidden(model, tokens))).reshape(2, -1)
    assert (
        finite.any(axis=1).tolist() == finite.all(axis=1).tolist() == [False, True]
    )  # NaN does not spread to other rows


@pytest.mark.parametrize(
    "prompts", [1, 7]
)  # 7 · 20 tokens are more than the native kernels multiply
def test_prompts_can_be_multiplied_in_bfloat16(packed_model, prompts):
    if not load_kernels().multiplies_bfloat16:
        pytest.skip("this CPU has no bfloat16 products")
    tokens = positions = np.tile(np.arange(20), (prompts, 1))
    exact, rounded = (
        logits_of(packed_model, tokens, positions, matmul_dtype=dtype, matmul_kernel="native")
        for dtype in ("auto", "bfloat16")
    )
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.05


def test_drafts_are_verified_in_the_precision_of_a_decode_step(packed_model):
    if not load_kernels().multiplies_bfloat16:
        pytest.skip("this CPU has no bfloat16 products")
    rounded = prepare(packed_model, "auto", "bfloat16", "native")
    assert max_rows(rounded, 4) == MAX_NATIVE_ROWS  # 17 rows would be multiplied in bfloat16
    assert max_rows(prepare(packed_model, matmul_kernel="native"), 4) > MAX_NATIVE_ROWS

"""Dequantized tensors equal float64 formulas. The matrices are packed bit by bit in this file.

`quantized_live.py` compares the same formats with compressed-tensors and transformers.
"""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.interop.checkpoints import export_checkpoint, import_checkpoint
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.hf.hf_folder import open_tensors, write_tensors
from dantinox.interop.hf.hf_quantized import dequantize_checkpoint
from dantinox.interop.hf.hf_weights import from_hf, parameter_shapes, to_hf
from dantinox.interop.source import LazyArrays
from dantinox.run.safetensors_file import Tensor
from tests.error_texts import ERRORS

from .test_gguf import TOKENIZER
from .test_hf import CHECKPOINTS

RNG = np.random.default_rng(2)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = np.array(E2M1 + [-value for value in E2M1])
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
}


def scheme(**weights):
    return SCHEME | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def arrays_of(found):
    return LazyArrays(
        {name: Tensor(array.shape, array.dtype.name) for name, array in found.items()},
        found.__getitem__,
    )


def read(options, **tensors):
    """Returns the only tensor, `x.weight`, of a checkpoint with these quantization options and
    stored tensors.
    """
    tensors = {f"x.{name}": np.asarray(array) for name, array in tensors.items()}
    config, found = dequantize_checkpoint(
        {"quantization_config": options, "torch_dtype": "float16"}, arrays_of(tensors)
    )
    assert config == {"torch_dtype": "float32"}
    assert list(found) == ["x.weight"]
    assert found.tensors["x.weight"] == Tensor(found["x.weight"].shape, "float32")
    return found["x.weight"]


def pack_words(fields, bits):
    """Packs the fields of each row consecutively into the bits of a large integer, and returns it
    as int32 words.
    """
    rows = []
    for row in fields:
        number = sum(int(field) << (bits * place) for place, field in enumerate(row))
        size = -(-len(row) * bits // 32) * 4
        rows.append(np.frombuffer(number.to_bytes(size, "little"), np.int32))
    return np.stack(rows)


def scales(*shape):
    return RNG.uniform(-1, 1, shape).astype(np.float16)


def same(found, expected):
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq(bits, form, desc_act):
    inputs, outputs, group = 96, 64, 32
    q, z = RNG.integers(0, 1 << bits, (inputs, outputs)), RNG.integers(0, 1 << bits, (3, outputs))
    s = scales(3, outputs)
    index = RNG.permutation(np.arange(inputs) // group) if desc_act else np.arange(inputs) // group
    stored = z if form == "gptq_v2" else (z - 1) % (1 << bits)
    found = read(
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "checkpoint_format": form,
            "desc_act": desc_act,
        },
        qweight=pack_words(q.T, bits).T,
        qzeros=pack_words(stored, bits),
        scales=s,
        g_idx=index.astype(np.int32),
    )
    same(found, ((q - z[index]) * s[index].astype(float)).T)


def test_gptq_with_one_group_and_without_group_indices():
    q, z, s = RNG.integers(0, 16, (40, 8)), RNG.integers(0, 16, (1, 8)), scales(1, 8)
    options = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}
    found = read(
        options, qweight=pack_words(q.T, 4).T, qzeros=pack_words((z - 1) % 16, 4), scales=s
    )
    same(found, ((q - z) * s.astype(float)).T)


def test_awq():
    """In AutoAWQ's `gemm` format, output 8 j + order[i] is in the four bits of word j that start at
    bit 4 i.
    """
    inputs, outputs, group, order = 64, 48, 32, [0, 2, 4, 6, 1, 3, 5, 7]
    q, z, s = (
        RNG.integers(0, 16, (inputs, outputs)),
        RNG.integers(0, 16, (2, outputs)),
        scales(2, outputs),
    )

    def pack(fields):
        return pack_words(fields.reshape(len(fields), -1, 8)[..., order].reshape(fields.shape), 4)

    options = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    found = read(options, qweight=pack(q), qzeros=pack(z), scales=s)
    index = np.arange(inputs) // group
    same(found, ((q - z[index]) * s[index].astype(float)).T)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed_integers(bits, groups, symmetric):
    rows, columns, half = 20, 96, 1 << (bits - 1)
    q, z = (
        RNG.integers(-half, half, (rows, columns)),
        RNG.integers(-half, half, (rows, groups)) * (not symmetric),
    )
    s = scales(rows, groups)
    zeros = {} if symmetric else {"weight_zero_point": pack_words((z + half).T, bits).T}
    found = read(
        scheme(
            num_bits=bits,
            type="int",
            symmetric=symmetric,
            strategy="group",
            group_size=columns // groups,
        ),
        weight_packed=pack_words(q + half, bits),
        weight_scale=s,
        weight_shape=np.array([rows, columns]),
        **zeros,
    )
    same(found, (q - z.repeat(columns // groups, 1)) * s.astype(float).repeat(columns // groups, 1))


def test_compressed_tensors_packed_integers_with_group_indices():
    q, s, index = RNG.integers(0, 16, (4, 64)), scales(4, 2), RNG.permutation(np.arange(64) // 32)
    found = read(
        scheme(num_bits=4),
        weight_packed=pack_words(q, 4),
        weight_scale=s,
        weight_shape=np.array([4, 64]),
        weight_g_idx=index.astype(np.int32),
    )
    same(found, (q - 8) * s.astype(float)[:, index])


def test_compressed_tensors_int8():
    q, s = RNG.integers(-128, 128, (6, 10)).astype(np.int8), scales(6, 1)
    z = RNG.integers(-128, 128, (6, 1)).astype(np.int8)
    same(read(scheme(num_bits=8), weight=q, weight_scale=s), q * s.astype(float))
    same(
        read(scheme(num_bits=8), weight=q, weight_scale=s, weight_zero_point=z),
        (q - z.astype(float)) * s,
    )
    same(
        read(scheme(num_bits=8), weight=q, weight_scale=s[0], input_scale=s[0]),
        q * s[0].astype(float),
    )


@pytest.mark.parametrize(
    ("grid", "index"),
    [((), None), ((1,), None), ((200, 1), None), ((2, 3), 128), ((200,), None)],
    ids=["tensor", "tensor of one", "rows", "blocks of 128", "vector of rows"],
)
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8(grid, index, name, kind):
    rows, columns = 200, 300
    q = RNG.normal(size=(rows, columns)).astype(getattr(ml_dtypes, kind))
    s = RNG.uniform(0.1, 2, grid).astype(ml_dtypes.bfloat16)
    options = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128] if index else None,
    }
    found = read(options, weight=q, **{name: s})
    wide = np.asarray(s, np.float64)
    if index:
        wide = wide.repeat(128, 0).repeat(128, 1)[:rows, :columns]
    same(found, q.astype(float) * (wide[:, None] if grid == (rows,) else wide))


def test_fp8_stacked_experts():
    q, s = RNG.normal(size=(3, 4, 8)).astype(FP8), RNG.uniform(1, 2, (3, 4, 1)).astype(np.float32)
    same(read({"quant_method": "fp8"}, weight=q, weight_scale_inv=s), q.astype(float) * s)


def test_compressed_tensors_fp4_with_group_scales():
    codes = RNG.integers(0, 16, (6, 64))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    s, whole = RNG.uniform(1, 9, (6, 4)).astype(FP8), np.array([7.0], np.float32)
    found = read(
        scheme(num_bits=4, type="float"),
        weight_packed=packed,
        weight_scale=s,
        weight_global_scale=whole,
    )
    same(found, E2M1[codes] * (s.astype(np.float32) / whole).astype(float).repeat(16, 1))
    exponents = RNG.integers(100, 140, (6, 2)).astype(np.uint8)
    found = read(scheme(num_bits=4, type="float"), weight_packed=packed, weight_scale=exponents)
    same(found, E2M1[codes] * 2.0 ** (exponents.astype(int) - 127).repeat(32, 1))


def test_mxfp4_of_gpt_oss_is_exact_in_bfloat16():
    codes, exponents = (
        RNG.integers(0, 16, (2, 6, 3, 32)),
        RNG.integers(0, 250, (2, 6, 3)).astype(np.uint8),
    )
    tensors = {
        "experts.up_blocks": (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8),
        "experts.up_scales": exponents,
        "norm.weight": np.ones(3, ml_dtypes.bfloat16),
    }
    config = {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "dtype": "bfloat16",
    }
    config, found = dequantize_checkpoint(config, arrays_of(tensors))
    assert config == {"dtype": "bfloat16"}
    assert found.tensors == {
        "norm.weight": Tensor((3,), "bfloat16"),
        "experts.up": Tensor((2, 96, 6), "bfloat16"),
    }
    expected = (
        (E2M1[codes] * 2.0 ** (exponents.astype(int) - 127)[..., None])
        .reshape(2, 6, 96)
        .swapaxes(1, 2)
    )
    np.testing.assert_array_equal(found["experts.up"].astype(np.float64), expected)
    assert found["norm.weight"] is tensors["norm.weight"]


def test_gpt_oss_imports_its_mxfp4_experts():
    """The rows of `gate_up_proj` of each expert interleave gate and up."""
    plain = json.loads((CHECKPOINTS / "gpt_oss" / "config.json").read_text()) | {
        "intermediate_size": 64
    }
    config = plain | {"quantization_config": {"quant_method": "mxfp4"}}
    settings = build_config(hf_config_to_settings(plain, 64))
    model = settings.architecture(67, "cpu")
    _, tensors = to_hf(
        settings,
        67,
        {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(model).items()},
    )
    held = {name: tensors[name] for name in tensors}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            experts, columns, rows = held.pop(f"model.layers.{layer}.mlp.experts.{name}").shape
            shape = (experts, rows, columns // 32)
            held[f"model.layers.{layer}.mlp.experts.{name}_blocks"] = RNG.integers(
                0, 256, (*shape, 16)
            ).astype(np.uint8)
            held[f"model.layers.{layer}.mlp.experts.{name}_scales"] = RNG.integers(
                120, 125, shape
            ).astype(np.uint8)
    config, found = dequantize_checkpoint(config, arrays_of(held))
    assert config == plain
    codes, scales = (
        held[f"model.layers.1.mlp.experts.gate_up_proj_{part}"] for part in ("blocks", "scales")
    )
    values = (
        E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(4, 128, 1, 32)]
        * 2.0 ** (scales.astype(int) - 127)[..., None]
    )
    expected = values.reshape(4, 64, 2, 32).transpose(0, 3, 2, 1)
    kernel = from_hf(config, model, found)["blocks/1/ffn/experts/gate_up/kernel"]
    np.testing.assert_array_equal(kernel.astype(np.float64), expected)


def test_tensors_are_not_read_before_access():
    def fail(name):
        raise AssertionError(name)

    tensors = {
        "x.weight": Tensor((8, 8), "float8_e4m3fn"),
        "x.weight_scale_inv": Tensor((), "float32"),
    }
    _, found = dequantize_checkpoint(
        {"quantization_config": {"quant_method": "fp8"}}, LazyArrays(tensors, fail)
    )
    assert found.tensors == {"x.weight": Tensor((8, 8), "float32")}


INT4 = {
    "qweight": np.zeros((4, 8), np.int32),
    "qzeros": np.zeros((1, 1), np.int32),
    "scales": scales(1, 8),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = {
    "weight_packed": np.zeros((4, 8), np.int32),
    "weight_scale": scales(4, 2),
    "weight_shape": np.array([4, 64]),
}


@pytest.mark.parametrize(
    ("options", "tensors", "message"),
    [
        ("gptq", {}, "quantization_config: 'gptq', expected an object"),
        (
            {"quant_method": "bitsandbytes"},
            {},
            "'bitsandbytes', expected one of fp8, fbgemm_fp8, compressed-tensors, awq, gptq",
        ),
        ({"bits": 4}, {}, "quant_method: null, expected one of"),
        (GPTQ, {"weight": scales(2, 2)}, "quant_method: gptq, but no tensor has this format"),
        (
            GPTQ | {"shiny": 1},
            INT4,
            (
                "has the unknown option shiny in quantization_config of"
                " gptq, expected one of bits, group"
            ),
        ),
        (
            GPTQ | {"bits": 5},
            INT4,
            "has bits: 5 in quantization_config of gptq, expected one of 2, 3, 4, 8",
        ),
        (GPTQ | {"bits": True}, INT4, "has bits: true"),
        (
            GPTQ | {"group_size": "x"},
            INT4,
            "has group_size: 'x' in quantization_config, expected a number of at least -1",
        ),
        (GPTQ | {"group_size": 16}, INT4, "x.qzeros of shape [1, 1], expected [2, 1]"),
        (GPTQ | {"desc_act": True}, INT4, "x.qweight without x.g_idx"),
        (GPTQ, INT4 | {"scales": scales(1, 7)}, "x.scales of shape [1, 7], expected [1, 8]"),
        (GPTQ, INT4 | {"qweight": scales(4, 8)}, "x.qweight as float16, expected int32"),
        (
            GPTQ,
            INT4 | {"weight": scales(8, 32)},
            "has both a quantized and an unquantized x.weight",
        ),
        (GPTQ, {"qweight": INT4["qweight"]}, "x.qweight without x.qzeros"),
        (
            GPTQ | {"quant_method": "awq", "version": "gemv"},
            INT4,
            "has version: 'gemv' in quantization_config of awq",
        ),
        (
            {"quant_method": "fp8"},
            {"weight": np.zeros((4, 4), FP8)},
            "x.weight without x.weight_scale_inv",
        ),
        (
            {"quant_method": "fp8"},
            {"weight": np.zeros((4, 4), FP8), "weight_scale": scales(3, 3)},
            "x.weight of shape [4, 4] with scales of shape [3, 3]",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, {}, "weight_block_size: [0, 1]"),
        (SCHEME, PACKED, "config_groups: null in quantization_config"),
        (
            scheme(num_bits=3),
            PACKED,
            "x.weight_packed of shape [4, 8] for a matrix of shape [4, 64] and 3 bits",
        ),
        (
            scheme(num_bits=4, strategy="token"),
            PACKED,
            "has strategy: 'token' in the weights of the scheme group_0",
        ),
        (
            scheme(num_bits=4) | {"transform_config": {"H": 1}},
            PACKED,
            "has transform_config: {'H': 1}",
        ),
        (
            scheme(num_bits=4),
            PACKED | {"weight_shape": np.array([-4, 64])},
            "for a matrix of shape [-4, 64]",
        ),
        (
            {"quant_method": "mxfp4"},
            {"w_blocks": np.zeros((1, 2, 3, 16), np.uint8)},
            "x.w_blocks without x.w_scales",
        ),
    ],
)
def test_inconsistent_quantized_tensors_are_an_error(options, tensors, message):
    tensors = {f"x.{name}": array for name, array in tensors.items()}
    with pytest.raises(UserError, match=re.escape(message)) as error:
        dequantize_checkpoint({"quantization_config": options}, arrays_of(tensors))
    assert "\n" not in str(error.value)


def test_unknown_group_index_is_an_error():
    tensors = {f"x.{name}": array for name, array in INT4.items()} | {
        "x.g_idx": np.full(32, 9, np.int32)
    }
    _, found = dequantize_checkpoint({"quantization_config": GPTQ}, arrays_of(tensors))
    with pytest.raises(UserError, match=ERRORS["x_g_idx_with_numbers_outside"]):
        found["x.weight"]


def test_quantized_folder_is_exported_without_quantization(tmp_path):
    """One layer has FP8 matrices. The exported folder equals the folder exported from the
    dequantized model.
    """
    source, folder = CHECKPOINTS / "llama", tmp_path / "fp8"
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    options = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    (folder / "tokenizer.json").write_text(TOKENIZER.to_json())
    plain, expected, stored = open_tensors(source), {}, {}
    for name, array in plain.items():
        if ".layers.0." in name and array.ndim == 2:
            grid = [-(-size // 16) for size in array.shape]
            stored[name], stored[f"{name}_scale_inv"] = (
                array.astype(FP8),
                RNG.uniform(0.5, 2, grid).astype(np.float32),
            )
            wide = (
                stored[f"{name}_scale_inv"]
                .repeat(16, 0)
                .repeat(16, 1)[: array.shape[0], : array.shape[1]]
            )
            expected[name] = stored[name].astype(np.float32) * wide
        else:
            stored[name] = expected[name] = array
    write_tensors(
        folder,
        stored,
        {name: Tensor(array.shape, array.dtype.name) for name, array in stored.items()},
    )
    import_checkpoint(folder, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "back", "hf")
    back = open_tensors(tmp_path / "back")
    assert back.keys() == plain.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(back[name], array, name)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config | {
        key: "float32" for key in ("dtype", "torch_dtype") if key in config
    }

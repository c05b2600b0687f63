"""Quantizers: blocks equal those of llama.cpp's reference functions bit for bit; types of tensors
equal `llama-quantize`'s.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from dantinox.cli.runs import EXPORT_TYPES
from dantinox.interop.gguf.ggml_quantize import CHUNK, ENCODERS, has_finite_scales, quantize
from dantinox.interop.gguf.ggml_types import TYPES, dequantize
from dantinox.interop.gguf.quantization_recipes import FILE_TYPES, tensor_types

# The blocks of `samples()`, in hexadecimal digits, as `quantize_row_*_ref` of ggml 0.25 computes
# them.
RECORDED = json.loads((Path(__file__).parent / "ggml_blocks.json").read_text())
quantizers = pytest.mark.parametrize("name", ENCODERS)


def samples():
    """Returns rows of 256 values, the same in all versions of Python and NumPy."""
    source = random.Random(5)

    def row(value):
        return [value(source) for _ in range(256)]

    rows = [
        row(lambda r: r.gauss(0, 0.02)),
        row(lambda r: r.random() + 1),
        row(lambda r: -r.random()),
    ]
    rows += [row(lambda r: r.randint(-8, 8)), row(lambda r: r.gauss(0, 1) * (r.random() < 0.1))]
    rows += [row(lambda r: r.gauss(0, 1) ** 5), [0.0] * 128 + [1e-20] * 64 + [-0.0] * 64]
    rows += [[10.0**r for r in range(-8, 0) for _ in range(32)], [3e4] * 32 + [1e-6] * 224]
    return np.array(rows, np.float64).astype(np.float32)


@quantizers
def test_blocks_equal_those_of_llama_cpp(name):
    assert quantize(name, samples()).tobytes().hex() == RECORDED[name]


@quantizers
def test_values_are_quantized_equally_across_chunks(name):
    values = np.random.default_rng(0).normal(size=3 * CHUNK + 256).astype(np.float32)
    parts = [quantize(name, part) for part in np.split(values, [256, CHUNK, 2 * CHUNK + 512])]
    np.testing.assert_array_equal(quantize(name, values), np.concatenate(parts))
    size = {"Q4": 0.15, "Q5": 0.08, "Q6": 0.05, "Q8": 0.01, "TQ": 0.501}[name[:2]]
    assert (
        np.abs(dequantize(name, quantize(name, values)) - values).max()
        < size * np.abs(values).max()
    )


@quantizers
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e11, 1e35])
def test_values_that_a_type_cannot_represent_give_scales_that_are_not_finite(name, value):
    values = samples()
    assert has_finite_scales(name, quantize(name, values))
    values[1, 40] = value
    assert not has_finite_scales(name, quantize(name, values))


def test_the_command_line_offers_all_file_types():
    assert list(FILE_TYPES) == EXPORT_TYPES


def names(layers, width=512, **others):
    parts = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
    return (
        {f"blk.{i}.{part}.weight": width for i in range(layers) for part in parts}
        | {"token_embd.weight": width}
        | others
    )


def layers_with(types, part, kind):
    return [i for i in range(16) if types[f"blk.{i}.{part}.weight"] == kind]


@pytest.mark.parametrize(("file_type", "base"), [("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")])
def test_some_layers_get_more_bits(file_type, base):
    types = tensor_types(file_type, names(16) | {"output.weight": 512}, 16)
    more = [0, 1, 4, 7, 10, 13, 14, 15]  # the first and last eighth, and every third layer between
    for part in ("attn_v", "ffn_down"):
        assert layers_with(types, part, "Q6_K") == more
    assert {
        types[f"blk.{i}.{part}.weight"] for i in range(16) for part in ("attn_q", "ffn_up")
    } == {base}
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == base
    small = tensor_types("q4_k_s", names(16), 16)
    assert layers_with(small, "attn_v", "Q5_K") == [0, 1, 2, 3] and layers_with(
        small, "ffn_down", "Q5_K"
    ) == [0, 1]


def test_tied_embeddings_have_the_type_of_an_output_layer():
    for file_type in ("q4_0", "q4_1", "q4_k_m", "q5_k_m", "q6_k"):
        assert tensor_types(file_type, names(2), 2)["token_embd.weight"] == "Q6_K"
    assert tensor_types("q8_0", names(2), 2)["token_embd.weight"] == "Q8_0"


def test_rows_that_are_no_multiple_of_the_block_get_a_type_with_smaller_blocks():
    types = tensor_types("q4_k_m", names(16, 96) | {"blk.3.ffn_up.weight": 40}, 16)
    assert (
        types["blk.0.ffn_down.weight"]
        == types["blk.0.attn_v.weight"]
        == types["token_embd.weight"]
        == "Q8_0"
    )
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["blk.3.ffn_up.weight"] == "F16"
    assert tensor_types("q5_k_m", names(16, 96), 16)["blk.0.attn_q.weight"] == "Q5_1"
    assert tensor_types("q4_0", names(16, 96), 16)["token_embd.weight"] == "Q8_0"


def test_eight_experts_have_larger_types_in_attention():
    types = tensor_types("q4_k_m", names(16), 16, experts=8)
    assert types["blk.2.attn_k.weight"] == types["blk.2.attn_v.weight"] == "Q8_0"
    assert types["blk.2.attn_output.weight"] == "Q5_K"


@pytest.mark.parametrize(("kind", "base"), [("tq1_0", "TQ1_0"), ("tq2_0", "TQ2_0")])
def test_embeddings_and_output_of_a_ternary_file_have_more_bits(kind, base):
    types = tensor_types(kind, names(4) | {"output.weight": 512}, 4)
    assert (types.pop("token_embd.weight"), types.pop("output.weight")) == ("Q4_K", "Q6_K")
    assert set(types.values()) == {base}
    assert tensor_types(kind, names(4), 4)["token_embd.weight"] == "Q6_K"
    small = tensor_types(kind, names(4, 96) | {"output.weight": 96}, 4)
    assert (small.pop("token_embd.weight"), small.pop("output.weight")) == ("Q5_0", "Q8_0") and set(
        small.values()
    ) == {"Q4_0"}


def ternary_digits(name, block):
    """Returns the codes of a block in pure Python: two bits each, or digits of fractions in base
    3.
    """
    if name == "TQ2_0":
        return [block[32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3 for i in range(256)]
    codes = [0] * 256
    for first, count, size, digits in ((0, 32, 0, 5), (32, 16, 160, 5), (48, 4, 240, 4)):
        for m in range(count):
            fraction = block[first + m] / 256
            for digit in range(digits):
                fraction *= 3
                codes[size + digit * count + m] = int(fraction)
                fraction -= int(fraction)
    return codes


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_values_are_kept_up_to_the_rounding_of_the_scale(name):
    rng = np.random.default_rng(3)
    signs = rng.integers(-1, 2, (40, 256))
    signs[0], signs[1], signs[2] = 0, 1, -1
    scales = np.float32(2) ** rng.uniform(-9, 3, (40, 1)).astype(np.float32)
    raw = quantize(name, (signs * scales).astype(np.float32))
    rounded = (
        np.where(np.abs(signs).max(1, keepdims=True), scales, 0)
        .astype(np.float16)
        .astype(np.float32)
    )
    np.testing.assert_array_equal(dequantize(name, raw).reshape(signs.shape), signs * rounded)
    assert [ternary_digits(name, bytes(block)) for block in raw.reshape(40, -1)] == (
        signs + 1
    ).tolist()
    np.testing.assert_array_equal(quantize(name, dequantize(name, raw)), raw)


def test_every_encoder_fills_whole_blocks():
    assert all(TYPES[name].values in (32, 256) for name in ENCODERS)

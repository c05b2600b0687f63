"""Quantized tensor types: digests equal those of ggml's results, and on other blocks, values equal
the library `gguf`'s.
"""

import hashlib
import random

import numpy as np
import pytest

from dantinox.interop.gguf.ggml_types import CHUNK, TYPES, dequantize

gguf = pytest.importorskip("gguf")
QUANTIZED = [name for name, kind in TYPES.items() if kind.decode is not None]
NOT_IN_THE_LIBRARY = ("Q1_0", "Q2_0", "Q8_K")
# Zero, minus zero, the smallest and largest subnormal, the smallest and largest normal, in float16.
EXTREMES = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x83FF, 0x400, 0x7BFF, 0xFBFF], np.uint16).view(
    np.float16
)
BLOCKS = 64
# The first 16 digits of the SHA-256 of the float32 values of `random_blocks(name, 7)`, and the last
# value, as llama.cpp's functions `dequantize_row_*` compute them (libggml-base 0.25.3).
RECORDED = {
    "Q4_0": ("fb5c2117caf9b733", -0.125396728515625),
    "Q4_1": ("26f71f2e1382a66c", -0.0034475326538085938),
    "Q5_0": ("44b034213b49dcae", -2.169921875),
    "Q5_1": ("47c415e255bf0512", -0.0926055908203125),
    "Q8_0": ("4fcd8f85d0432fb8", -7.60162353515625),
    "Q1_0": ("e8d0fc94dab08726", -0.017913818359375),
    "Q2_0": ("c93d5e7434ee18e3", -0.03582763671875),
    "Q2_K": ("2ba02f964cf0abcf", 0.0018291473388671875),
    "Q3_K": ("37aa5bd4673a48fe", 0.006613731384277344),
    "Q4_K": ("f449373e73d22ab9", -0.008094310760498047),
    "Q5_K": ("3372502eaad059ea", -0.07543230056762695),
    "Q6_K": ("56608c2385f8fcdc", -0.07141542434692383),
    "Q8_K": ("cb7a60545391ca4a", 65.1015625),
    "TQ1_0": ("ea2c1e19a3716a63", 0.0),
    "TQ2_0": ("88a8a8dcce26f3e9", 0.76953125),
    "MXFP4": ("6823fea3e5222ac5", 1610612736.0),
    "NVFP4": ("f108d641c700eb18", -7.5),
    "IQ4_NL": ("2b15c1a62f7bd161", -2.024261474609375),
    "IQ4_XS": ("849b9909d63af25f", 1307.609375),
    "IQ2_XXS": ("d41aa3d11335e5eb", 7.21435546875),
    "IQ2_XS": ("e97e92a6847e394d", -0.00032508373260498047),
    "IQ2_S": ("b528a643a13609c1", -0.0008717402815818787),
    "IQ3_XXS": ("b2ced67d7961d99a", -0.05895280838012695),
    "IQ3_S": ("e95096bceb398ad2", 0.0022321343421936035),
    "IQ1_S": ("48a2d5fe7a7a106d", -0.0008978843688964844),
    "IQ1_M": ("34ae75d317276d75", 0.10059356689453125),
}


def random_blocks(name, seed):
    """Returns blocks of random bytes, the same in all versions of Python. Float16 scales are
    finite, and some are extreme.
    """
    source, block = random.Random(seed), TYPES[name].block
    blocks = np.frombuffer(bytearray(source.randbytes(BLOCKS * block.itemsize)), block)
    words = np.frombuffer(source.randbytes(2 * BLOCKS), np.uint16) & np.uint16(
        0xBFFF
    )  # no Inf or NaN
    scales = words.view(np.float16)
    scales[: len(EXTREMES)] = EXTREMES
    for field, values in (("d", scales), ("dmin", scales[::-1]), ("m", scales[::-1])):
        if field in block.names and block[field].kind == "f":
            blocks[field] = values
    if name == "MXFP4":  # larger exponents overflow float32
        blocks["e"] %= 251
    if name == "IQ1_M":  # four bits of the scale in each of four words
        quarters = scales.view(np.uint16)[:, None] >> np.arange(
            0, 16, 4, dtype=np.uint16
        ) & np.uint16(15)
        blocks["scales"] = blocks["scales"] & np.uint16(0x0FFF) | quarters << np.uint16(12)
    return blocks.view(np.uint8)


def same_bits(one, other):
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_equal_those_of_ggml_bitwise(name):
    values = dequantize(name, random_blocks(name, 7))
    assert np.isfinite(values).all()
    assert (hashlib.sha256(values.tobytes()).hexdigest()[:16], values[-1]) == RECORDED[name]


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name not in NOT_IN_THE_LIBRARY])
def test_values_equal_those_of_the_library_bitwise(name):
    number = gguf.GGMLQuantizationType[name]
    assert number == TYPES[name].number
    assert gguf.GGML_QUANT_SIZES[number] == (TYPES[name].values, TYPES[name].block.itemsize)
    raw = random_blocks(name, 8)
    expected = gguf.dequantize(raw.reshape(BLOCKS, -1), number).astype(np.float32).reshape(-1)
    assert same_bits(dequantize(name, raw), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "TQ1_0", "MXFP4"])
def test_library_quantized_values_are_dequantized_across_chunks(name):
    array = np.random.default_rng(0).normal(size=(3, CHUNK // 2)).astype(np.float32)
    number = gguf.GGMLQuantizationType[name]
    raw = gguf.quantize(array, number)
    assert same_bits(dequantize(name, raw.reshape(-1)), gguf.dequantize(raw, number).reshape(-1))

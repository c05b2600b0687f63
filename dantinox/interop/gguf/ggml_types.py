"""Tensor types of ggml (the types of a GGUF file): block layouts, and their conversion to float32.

The layouts and formulas are those of ggml (github.com/ggml-org/ggml, `src/ggml-common.h` and
`src/ggml-quants.c`). The functions here multiply, add and round to float32 in the same order as
`ggml-quants.c`, so the values are bitwise equal to llama.cpp's. Weights that stay packed in a run
are converted by `dantinox.kernels`.

Each function with the name of a type converts blocks `b` of this type. In the fields of a block,
`d` is the scale, `m` or `dmin` a minimum, `qs` the values or codes, `qh` their high bits, and
`scales` are those of groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.interop.gguf.ggml_codebooks import codebook

CHUNK = 1 << 16  # values converted at a time, so that intermediate arrays fit the caches of a CPU
F16, F32, U8, I8, U16, U32 = "<f2", "<f4", "u1", "i1", "<u2", "<u4"
# Twice the value of each 4-bit float (E2M1), so that all entries are integers.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# The values of the nonlinear 4-bit types (IQ4_NL and IQ4_XS).
NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
IQ1_DELTA = np.float32(0.125)  # the shift of the values of a group in IQ1_S and IQ1_M


class GGMLType(NamedTuple):
    """A tensor type.

    Attributes:
      number: the number of the type in GGUF.
      values: the number of values in a block. A row consists of whole blocks.
      block: the dtype of a block, with its fields in the order of the file.
      decode: converts `[N]` blocks to float32 values, in any shape whose first axis is N. None: a
        block is a single number.
    """

    number: int
    values: int
    block: np.dtype[Any]
    decode: Callable[[np.ndarray], np.ndarray] | None


def dequantize(name: str, raw: np.ndarray) -> np.ndarray:
    """Returns the float32 values of whole blocks of a quantized type. Scales that are not finite
    give NaN.

    Args:
      name: the name of the type.
      raw: the bytes of the blocks.
    """
    _, values, block, decode = TYPES[name]
    assert decode is not None
    blocks = raw.view(block)
    result = np.empty((len(blocks), values), np.float32)
    step = CHUNK // values
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            result[start : start + step] = decode(part).reshape(len(part), values)
    return result.reshape(-1)


def _unpack(packed: np.ndarray, width: int) -> np.ndarray:
    """Unpacks fields of `width` bits from bytes: `[..., n]` → `[..., 8 / width, n]`.

    Index i of the new axis is field i of every byte; field 0 has the lowest bits.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _bits(packed: np.ndarray) -> np.ndarray:
    """Unpacks bits: `[..., n]` bytes → `[..., 8 n]`, the lowest bit first."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpacks 4-bit fields: `[..., n]` bytes → `[..., 2 n]`, all low halves first, then all high
    halves.
    """
    return _unpack(packed, 4).reshape(*packed.shape[:-1], -1)


def _scale(field: np.ndarray, axes: int = 1) -> np.ndarray:
    """Converts one number per block to float32 and appends `axes` dimensions of length 1."""
    return field.astype(np.float32).reshape(-1, *(1,) * axes)


def _signs(bits: np.ndarray) -> np.ndarray:
    """Returns 1 for a 0 bit and -1 for a 1 bit."""
    return np.int8(1) - np.int8(2) * bits.astype(np.int8)


def _q4_0(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * (_nibbles(b["qs"]).astype(np.int8) - np.int8(8))


def _q4_1(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * _nibbles(b["qs"]) + _scale(b["m"])


def _five_bits(b: np.ndarray) -> np.ndarray:
    return _nibbles(b["qs"]) | _bits(b["qh"]) << np.uint8(4)


def _q5_0(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * (_five_bits(b).astype(np.int8) - np.int8(16))


def _q5_1(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * _five_bits(b) + _scale(b["m"])


def _q8(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * b["qs"]


def _q1_0(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * -_signs(_bits(b["qs"]))


def _q2_0(b: np.ndarray) -> np.ndarray:
    # The four fields of a byte are adjacent.
    fields = _unpack(b["qs"], 2).swapaxes(1, 2).reshape(len(b), -1)
    return _scale(b["d"]) * (fields.astype(np.int8) - np.int8(1))


def _q2_k(b: np.ndarray) -> np.ndarray:
    scales = _scale(b["d"]) * (b["scales"] & np.uint8(15))
    mins = _scale(b["dmin"]) * (b["scales"] >> np.uint8(4))
    values = _unpack(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return scales[..., None] * values - mins[..., None]


def _q3_k(b: np.ndarray) -> np.ndarray:
    low = _nibbles(b["scales"][:, :8])
    high = _unpack(b["scales"][:, 8:], 2).reshape(-1, 16)
    scales = _scale(b["d"]) * ((low | high << np.uint8(4)).astype(np.int8) - np.int8(32))
    values = _unpack(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    values = values | _unpack(b["hmask"], 1).reshape(-1, 16, 16) << np.uint8(2)
    return scales[..., None] * (values.astype(np.int8) - np.int8(4))


def _six_bit_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 6-bit scales and minima of 8 groups, `[N, 8, 1]`. For the last four groups, each
    is split into two fields.
    """
    scale_bytes, min_bytes, rest = b["scales"].reshape(-1, 3, 4).swapaxes(0, 1)
    six_bits = np.uint8(63)
    top_bits = np.uint8(48)
    scales = np.concatenate(
        [scale_bytes & six_bits, rest & np.uint8(15) | scale_bytes >> np.uint8(2) & top_bits], 1
    )
    mins = np.concatenate(
        [min_bytes & six_bits, rest >> np.uint8(4) | min_bytes >> np.uint8(2) & top_bits], 1
    )
    return (_scale(b["d"]) * scales)[..., None], (_scale(b["dmin"]) * mins)[..., None]


def _q4_k(b: np.ndarray) -> np.ndarray:
    scales, mins = _six_bit_scales(b)
    return scales * _unpack(b["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32) - mins


def _q5_k(b: np.ndarray) -> np.ndarray:
    scales, mins = _six_bit_scales(b)
    low = _unpack(b["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return scales * (low | _unpack(b["qh"], 1) << np.uint8(4)) - mins


def _q6_k(b: np.ndarray) -> np.ndarray:
    low = _unpack(b["ql"].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = _unpack(b["qh"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    values = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return (_scale(b["d"]) * b["scales"])[..., None] * values


def _tq1_0(b: np.ndarray) -> np.ndarray:
    """Converts TQ1_0 blocks.

    A byte b stands for the fraction b / 256. Its first five digits in base 3 (four digits for a
    byte of `qh`) are five values. Multiplication by 3 moves the next digit in front of the point.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = ((b["qs"][:, :32], 5), (b["qs"][:, 32:], 5), (b["qh"], 4))
    shifted = [(part[:, None, :] * powers[:digits]).reshape(len(b), -1) for part, digits in parts]
    digits = np.concatenate(shifted, 1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return _scale(b["d"]) * (digits.astype(np.int8) - np.int8(1))


def _tq2_0(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"], 3) * (_unpack(b["qs"].reshape(-1, 2, 32), 2).astype(np.int8) - np.int8(1))


def _mxfp4(b: np.ndarray) -> np.ndarray:
    # Half of 2^(e - 127), because `E2M1` holds doubled values.
    scales = np.ldexp(np.float32(1), b["e"].astype(np.int32) - 128)
    return scales[:, None] * E2M1[_nibbles(b["qs"])]


def _nvfp4(b: np.ndarray) -> np.ndarray:
    """Scales are unsigned E4M3, but 0x7f means zero, not NaN. They are halved here, because `E2M1`
    holds doubled values.
    """
    code = np.arange(256)
    exponent = (code >> 3) & 15
    mantissa = (code & 7).astype(np.float32)
    subnormal = mantissa / 8 * 2.0**-6
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    table = np.where(exponent == 0, subnormal, normal).astype(np.float32) / 2
    table[0x7F] = 0
    return table[b["d"]][..., None] * E2M1[_nibbles(b["qs"].reshape(-1, 4, 8))]


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _scale(b["d"]) * NONLINEAR[_nibbles(b["qs"])]


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    low = _unpack(b["scales_l"], 4).swapaxes(1, 2).reshape(-1, 8)
    high = b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = _scale(b["d"]) * ((low | high << np.uint16(4)).astype(np.int8) - np.int8(32))
    return scales[..., None] * NONLINEAR[_nibbles(b["qs"].reshape(-1, 8, 16))]


def _seven_signs(codes: np.ndarray) -> np.ndarray:
    """Returns the eight signs of a 7-bit code, `[..., 8]`. The eighth sign makes the number of
    minus signs even.
    """
    codes = codes.astype(np.uint8)
    parity = _bits(codes[..., None]).sum(-1, dtype=np.uint8) & np.uint8(1)
    return _signs(_bits((codes | parity << np.uint8(7))[..., None]))


def _sign_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales in the highest 4 bits of uint32 words `[N, 8]`, and the signs in the
    others, `[N, 8, 4, 8]`.
    """
    codes = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32), _seven_signs(codes)


def _half_scales(b: np.ndarray) -> np.ndarray:
    """Returns d · (1/2 + scale) / 4 for 16 groups, `[N, 16, 1, 1]`. The two scales of a byte are
    adjacent.
    """
    fields = _unpack(b["scales"], 4).swapaxes(1, 2).reshape(-1, 16)
    return (_scale(b["d"]) * (np.float32(0.5) + fields) * np.float32(0.25))[..., None, None]


def _iq2_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _sign_words(b["qs"]["signs"])
    scales = _scale(b["d"]) * scales * np.float32(0.25)
    return scales[..., None, None] * codebook("IQ2_XXS")[b["qs"]["grid"]] * signs


def _iq2_xs(b: np.ndarray) -> np.ndarray:
    codes = b["qs"].reshape(-1, 16, 2)
    return (
        _half_scales(b)
        * codebook("IQ2_XS")[codes & np.uint16(511)]
        * _seven_signs(codes >> np.uint16(9))
    )


def _iq2_s(b: np.ndarray) -> np.ndarray:
    high = _unpack(b["qh"], 2).swapaxes(1, 2).reshape(-1, 16, 2).astype(np.uint16)
    codes = b["qs"].reshape(-1, 16, 2) | high << np.uint16(8)
    return (
        _half_scales(b) * codebook("IQ2_S")[codes] * _signs(_bits(b["signs"]).reshape(-1, 16, 2, 8))
    )


def _iq3_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _sign_words(b["signs"])
    scales = _scale(b["d"]) * scales * np.float32(0.5)
    return scales[..., None, None] * codebook("IQ3_XXS")[b["qs"]].reshape(-1, 8, 4, 8) * signs


def _iq3_s(b: np.ndarray) -> np.ndarray:
    codes = b["qs"] | _bits(b["qh"]).astype(np.uint16) << np.uint16(8)
    fields = _unpack(b["scales"], 4).swapaxes(1, 2).reshape(-1, 8)
    scales = _scale(b["d"]) * (np.uint8(1) + np.uint8(2) * fields)
    values = codebook("IQ3_S")[codes].reshape(-1, 8, 4, 8)
    signs = _signs(_bits(b["signs"])).reshape(-1, 8, 4, 8)
    return scales[..., None, None] * values * signs


def _iq1_s(b: np.ndarray) -> np.ndarray:
    high = b["qh"][..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    codes = b["qs"].reshape(-1, 8, 4) | high << np.uint16(8)
    scales = _scale(b["d"]) * (
        (b["qh"] >> np.uint16(12) & np.uint16(7)) * np.uint16(2) + np.uint16(1)
    )
    delta = np.where(b["qh"] & np.uint16(1 << 15), -IQ1_DELTA, IQ1_DELTA)
    return scales[..., None, None] * (codebook("IQ1_S")[codes] + delta[..., None, None])


def _iq1_m(b: np.ndarray) -> np.ndarray:
    """The highest four bits of the four words in `scales` together form the block's float16
    scale.
    """
    quarters = b["scales"] >> np.uint16(12) << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(quarters, -1).view(np.float16)
    fields = (b["scales"][..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(
        -1, 16
    )
    scales = _scale(d) * (fields * np.uint16(2) + np.uint16(1))
    high = _unpack(b["qh"], 4).swapaxes(1, 2).reshape(-1, 16, 2)
    codes = b["qs"].reshape(-1, 16, 2) | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    delta = np.where(high & np.uint8(8), -IQ1_DELTA, IQ1_DELTA)
    return scales[..., None, None] * (codebook("IQ1_S")[codes] + delta[..., None])


def _type(
    number: int, values: int, decode: Callable[[np.ndarray], np.ndarray] | None, **fields: Any
) -> GGMLType:
    """Returns a type whose blocks have these fields, each given as a dtype, or as a dtype and a
    length: `("u1", 16)`.
    """
    layout = [
        (name, *(form if isinstance(form, tuple) else (form,))) for name, form in fields.items()
    ]
    return GGMLType(number, values, np.dtype(layout), decode)


TYPES = {
    "F32": GGMLType(0, 1, np.dtype(np.float32), None),
    "F16": GGMLType(1, 1, np.dtype(np.float16), None),
    "BF16": GGMLType(30, 1, np.dtype(ml_dtypes.bfloat16), None),
    "Q4_0": _type(2, 32, _q4_0, d=F16, qs=(U8, 16)),
    "Q4_1": _type(3, 32, _q4_1, d=F16, m=F16, qs=(U8, 16)),
    "Q5_0": _type(6, 32, _q5_0, d=F16, qh=(U8, 4), qs=(U8, 16)),
    "Q5_1": _type(7, 32, _q5_1, d=F16, m=F16, qh=(U8, 4), qs=(U8, 16)),
    "Q8_0": _type(8, 32, _q8, d=F16, qs=(I8, 32)),
    "Q1_0": _type(41, 128, _q1_0, d=F16, qs=(U8, 16)),
    "Q2_0": _type(42, 64, _q2_0, d=F16, qs=(U8, 16)),
    "Q2_K": _type(10, 256, _q2_k, scales=(U8, 16), qs=(U8, 64), d=F16, dmin=F16),
    "Q3_K": _type(11, 256, _q3_k, hmask=(U8, 32), qs=(U8, 64), scales=(U8, 12), d=F16),
    "Q4_K": _type(12, 256, _q4_k, d=F16, dmin=F16, scales=(U8, 12), qs=(U8, 128)),
    "Q5_K": _type(13, 256, _q5_k, d=F16, dmin=F16, scales=(U8, 12), qh=(U8, 32), qs=(U8, 128)),
    "Q6_K": _type(14, 256, _q6_k, ql=(U8, 128), qh=(U8, 64), scales=(I8, 16), d=F16),
    "Q8_K": _type(15, 256, _q8, d=F32, qs=(I8, 256), sums=("<i2", 16)),
    "TQ1_0": _type(34, 256, _tq1_0, qs=(U8, 48), qh=(U8, 4), d=F16),
    "TQ2_0": _type(35, 256, _tq2_0, qs=(U8, 64), d=F16),
    "MXFP4": _type(39, 32, _mxfp4, e=U8, qs=(U8, 16)),
    "NVFP4": _type(40, 64, _nvfp4, d=(U8, 4), qs=(U8, 32)),
    "IQ4_NL": _type(20, 32, _iq4_nl, d=F16, qs=(U8, 16)),
    "IQ4_XS": _type(23, 256, _iq4_xs, d=F16, scales_h=U16, scales_l=(U8, 4), qs=(U8, 128)),
    "IQ2_XXS": _type(16, 256, _iq2_xxs, d=F16, qs=([("grid", U8, 4), ("signs", U32)], 8)),
    "IQ2_XS": _type(17, 256, _iq2_xs, d=F16, qs=(U16, 32), scales=(U8, 8)),
    "IQ2_S": _type(22, 256, _iq2_s, d=F16, qs=(U8, 32), signs=(U8, 32), qh=(U8, 8), scales=(U8, 8)),
    "IQ3_XXS": _type(18, 256, _iq3_xxs, d=F16, qs=(U8, 64), signs=(U32, 8)),
    "IQ3_S": _type(21, 256, _iq3_s, d=F16, qs=(U8, 64), qh=(U8, 8), signs=(U8, 32), scales=(U8, 4)),
    "IQ1_S": _type(19, 256, _iq1_s, d=F16, qs=(U8, 32), qh=(U16, 8)),
    "IQ1_M": _type(29, 256, _iq1_m, qs=(U8, 32), qh=(U8, 16), scales=(U16, 4)),
}
# GGUF types that are not supported: integers, float64, types that ggml uses only during
# computation, and types that it removed.
UNSUPPORTED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip

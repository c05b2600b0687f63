"""Quantization to ggml's tensor types.

The rules are those of llama.cpp's reference functions `quantize_row_*_ref` (`ggml-quants.c`). The
functions here multiply, add and round to float32 in the same order, so the blocks have equal bytes.
For that, the values of a group are on the first axis, because NumPy adds up a first axis one entry
after another.

Shapes: n values of a group, G groups, B blocks. Each `_q…` function takes blocks `[B, values]` and
returns the fields of their types: d, dmin and m are scales and minima, qs, qh, ql levels in few
bits.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dantinox.interop.gguf.ggml_types import TYPES

# The number of values that a thread converts at a time, so that intermediate arrays fit the caches
# of a CPU.
CHUNK = 1 << 16
HALF_BYTE = np.uint8(15)
SMALLEST = np.float32(1e-15)  # a group whose values are all smaller becomes zero in Q6_K
LARGEST = 1e12  # no type can represent larger values, and their sums of cubes overflow float32
ONE = np.float32(1)


def quantize(name: str, array: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array's blocks. The size must be a multiple of the block size.

    The array is converted in chunks on all cores. A value that the type cannot represent (NaN, Inf,
    or too large for float16 scales) gives a scale that is not finite.
    """
    kind = TYPES[name]
    encode = ENCODERS[name]
    values = np.ascontiguousarray(array).reshape(-1, kind.values)
    blocks = np.empty(len(values), kind.block)
    step = CHUNK // kind.values

    def convert(start: int) -> None:
        part = np.asarray(values[start : start + step], np.float32)
        target = blocks[start : start + step]
        with np.errstate(all="ignore"):
            for field, content in encode(part).items():
                target[field] = content
            invalid = ~(np.abs(part).max(-1) <= LARGEST)
        target["d"][invalid] = np.nan

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(convert, range(0, len(values), step)))
    return blocks.view(np.uint8)


def has_finite_scales(name: str, raw: np.ndarray) -> bool:
    """Returns whether the float16 scales of all blocks are finite."""
    blocks = raw.view(TYPES[name].block)
    names = [field for field in ("d", "dmin", "m") if field in (TYPES[name].block.names or ())]
    return all(bool(np.isfinite(blocks[field]).all()) for field in names)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    """Returns 1 / x, and 0 for 0."""
    return np.where(x == 0, np.float32(0), ONE / x)


def _select(x: np.ndarray, index: np.ndarray, axis: int = -1) -> np.ndarray:
    """Returns one entry along an axis."""
    return np.take_along_axis(x, np.expand_dims(index, axis), axis).squeeze(axis)


def _largest(x: np.ndarray, axis: int) -> np.ndarray:
    """Returns the entry with the largest absolute value along an axis, the first of several, and 0
    instead of −0.
    """
    return _select(x, np.abs(x).argmax(axis), axis) + np.float32(0)


def _q8_0(x: np.ndarray) -> dict[str, np.ndarray]:
    d = np.abs(x).max(-1) / np.float32(127)
    scaled = x * _reciprocal(d)[:, None]
    magnitude = np.abs(scaled)
    floor = np.floor(magnitude)
    rounded = floor + (magnitude - floor >= 0.5)  # halves are rounded away from zero
    return {"d": d, "qs": np.copysign(rounded, scaled)}


def _levels(scaled: np.ndarray, top: int) -> np.ndarray:
    """Truncates to whole levels from 0 to `top`."""
    return np.clip(scaled, 0, top).astype(np.uint8)


def _symmetric(x: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns d and the levels from 0 to 2·half − 1 with x ≈ d · (level − half). The largest value
    is exactly −half · d.
    """
    d = _largest(x, -1) / np.float32(-half)
    return d, _levels(x * _reciprocal(d)[:, None] + np.float32(half + 0.5), 2 * half - 1)


def _affine(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns d, m and the levels from 0 to `top` with x ≈ d · level + m; m is the smallest
    value.
    """
    m = _select(x, x.argmin(-1))  # `min` may return 0 for −0
    d = (_select(x, x.argmax(-1)) - m) / np.float32(top)
    return d, m, _levels((x - m[:, None]) * _reciprocal(d)[:, None] + np.float32(0.5), top)


def _nibbles(levels: np.ndarray) -> np.ndarray:
    """Packs 4-bit levels `[…, 2n]` to bytes `[…, n]`: the first half in the low bits, the second
    half in the high bits.
    """
    low, high = np.split(levels & HALF_BYTE, 2, axis=-1)
    return low | high << np.uint8(4)


def _fifth_bits(levels: np.ndarray) -> np.ndarray:
    """Packs the highest bit of 5-bit levels."""
    return np.packbits(levels >> np.uint8(4), axis=-1, bitorder="little")


def _q4_0(x: np.ndarray) -> dict[str, np.ndarray]:
    d, levels = _symmetric(x, 8)
    return {"d": d, "qs": _nibbles(levels)}


def _q4_1(x: np.ndarray) -> dict[str, np.ndarray]:
    d, m, levels = _affine(x, 15)
    return {"d": d, "m": m, "qs": _nibbles(levels)}


def _q5_0(x: np.ndarray) -> dict[str, np.ndarray]:
    d, levels = _symmetric(x, 16)
    return {"d": d, "qh": _fifth_bits(levels), "qs": _nibbles(levels)}


def _q5_1(x: np.ndarray) -> dict[str, np.ndarray]:
    d, m, levels = _affine(x, 31)
    return {"d": d, "m": m, "qh": _fifth_bits(levels), "qs": _nibbles(levels)}


def _sum(x_nG: np.ndarray) -> np.ndarray:
    """Adds up the values of each group in their order."""
    total: np.ndarray = np.add.reduce(x_nG, axis=0)
    return total


def _groups(x: np.ndarray, size: int) -> np.ndarray:
    """Returns the groups of `size` adjacent values: `[B, 256]` → `[size, B · 256 / size]`."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _search_affine(
    x_nG: np.ndarray, top: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds a scale and a minimum per group, so that the weighted squared error of scale · level −
    minimum is small.

    Each step rounds with a slightly larger inverse scale, and solves for the best scale and minimum
    of these levels.

    Args:
      x_nG: the values.
      top: the highest level.
      first: what the first step adds to `top`, the range of levels; each further step adds 0.1.
      steps: the number of further steps.

    Returns:
      The scales, the minima (≥ 0), and the levels from 0 to `top`.
    """
    weights_nG = np.sqrt(_sum(x_nG * x_nG) / np.float32(32)) + np.abs(x_nG)
    sum_w = _sum(weights_nG)
    sum_x = _sum(weights_nG * x_nG)
    low = np.minimum(x_nG.min(0), np.float32(0))
    high = x_nG.max(0)
    flat = high == low
    inverse = np.float32(top) / (high - low)
    scale = ONE / inverse
    level_nG = np.empty_like(x_nG)
    work_nG = np.empty_like(x_nG)

    def round_levels(inverse: np.ndarray, low: np.ndarray) -> None:
        np.subtract(x_nG, low, out=level_nG)
        np.multiply(level_nG, inverse, out=level_nG)
        np.rint(level_nG, out=level_nG)
        np.clip(level_nG, np.float32(0), np.float32(top), out=level_nG)

    def error(scale: np.ndarray, low: np.ndarray) -> np.ndarray:
        np.multiply(level_nG, scale, out=work_nG)
        np.add(work_nG, low, out=work_nG)
        np.subtract(work_nG, x_nG, out=work_nG)
        np.multiply(work_nG, work_nG, out=work_nG)
        return _sum(np.multiply(work_nG, weights_nG, out=work_nG))

    round_levels(inverse, low)
    best = error(scale, low)
    # The inverse scale and the minimum with which the best step rounded. `scale` and `low` are its
    # solutions.
    best_inverse = inverse
    best_low = low
    for step in range(steps + 1):
        inverse = (np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(top)) / (
            high - low
        )
        round_levels(inverse, low)
        # Weighted sums over a group: w weights, x values, l levels.
        np.multiply(weights_nG, level_nG, out=work_nG)
        sum_l = _sum(work_nG)
        sum_xl = _sum(work_nG * x_nG)
        sum_l2 = _sum(np.multiply(work_nG, level_nG, out=work_nG))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0  # not allowed: the best minimum is then 0
        new_scale = np.where(positive, sum_xl / sum_l2, new_scale)
        new_low = np.where(positive, np.float32(0), new_low)
        new_error = error(new_scale, new_low)
        better = (determinant > 0) & (new_error < best)
        best_inverse = np.where(better, inverse, best_inverse)
        best_low = np.where(better, low, best_low)
        best = np.where(better, new_error, best)
        scale = np.where(better, new_scale, scale)
        low = np.where(better, new_low, low)
    round_levels(best_inverse, best_low)
    return np.where(flat, np.float32(0), scale), -low, np.where(flat, np.float32(0), level_nG)


def _affine_k(
    x: np.ndarray, top: int, first: float, steps: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Quantizes blocks of eight groups with 6-bit scales and minima; returns the fields and the
    levels `[B, 8, 32]`.

    The other arguments are those of `_search_affine`.
    """
    x_nG = _groups(x, 32)
    scales_G, minima_G, level_nG = _search_affine(x_nG, top, first, steps)
    d_B, scales_B8 = _six_bits(scales_G.reshape(-1, 8))
    dmin_B, minima_B8 = _six_bits(minima_G.reshape(-1, 8))
    # The rounded scales and minima, as the decoder computes them.
    d_G = (d_B.astype(np.float32)[:, None] * scales_B8).reshape(-1)
    m_G = (dmin_B.astype(np.float32)[:, None] * minima_B8).reshape(-1)
    rounded_nG = np.clip(np.rint((x_nG + m_G) / d_G), np.float32(0), np.float32(top))
    levels = np.where(d_G == 0, level_nG, rounded_nG).astype(np.uint8).T.reshape(-1, 8, 32)
    # Bytes 0 to 3 and 4 to 7 have the scales and minima of the first four groups, and the high two
    # bits of the last four.
    top_bits = np.uint8(0xC0)
    packed = [
        scales_B8[:, :4] | scales_B8[:, 4:] << np.uint8(2) & top_bits,
        minima_B8[:, :4] | minima_B8[:, 4:] << np.uint8(2) & top_bits,
        scales_B8[:, 4:] & HALF_BYTE | minima_B8[:, 4:] << np.uint8(4),
    ]
    return {"d": d_B, "dmin": dmin_B, "scales": np.concatenate(packed, -1)}, levels


def _six_bits(factors_B8: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes the scales of a block's groups to 6 bits; returns a float16 scale of the block and
    the integers `[B, 8]`.
    """
    largest_B = np.maximum(factors_B8.max(-1), np.float32(0))
    inverse_B = np.where(largest_B > 0, np.float32(63) / largest_B, np.float32(0))
    # The reference casts to an unsigned byte before it limits the value, so a negative scale
    # becomes 63.
    whole_B8 = np.rint(factors_B8 * inverse_B[:, None]).astype(np.int32).astype(np.uint8)
    return (largest_B / np.float32(63)).astype(np.float16), np.minimum(whole_B8, np.uint8(63))


def _pair_nibbles(levels: np.ndarray) -> np.ndarray:
    """Packs the 4-bit levels of groups 2i and 2i + 1 to the same bytes: `[B, 8, 32]` →
    `[B, 128]`.
    """
    return _nibbles(levels.reshape(len(levels), 4, 64)).reshape(len(levels), -1)


def _q4_k(x: np.ndarray) -> dict[str, np.ndarray]:
    fields, levels = _affine_k(x, 15, -1, 20)
    return fields | {"qs": _pair_nibbles(levels)}


def _q5_k(x: np.ndarray) -> dict[str, np.ndarray]:
    fields, levels = _affine_k(x, 31, -0.5, 15)
    # Bit i of byte j belongs to value j of group i.
    high = np.packbits(levels >> np.uint8(4), axis=1, bitorder="little")[:, 0]
    return fields | {"qs": _pair_nibbles(levels), "qh": high}


def _search_symmetric(x_nG: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds a scale per group, so that the error of scale · level, weighted with x², is small.

    Returns:
      The scales, and the levels from −half to half − 1.
    """
    largest = _largest(x_nG, 0)
    zero = np.abs(largest) < SMALLEST
    squares_nG = x_nG * x_nG  # the weights
    cubes_nG = squares_nG * x_nG
    level_nG = np.empty_like(x_nG)
    work_nG = np.empty_like(x_nG)

    def round_levels(inverse: np.ndarray) -> None:
        np.rint(np.multiply(x_nG, inverse, out=level_nG), out=level_nG)
        np.clip(level_nG, np.float32(-half), np.float32(half - 1), out=level_nG)

    def sums() -> tuple[np.ndarray, np.ndarray]:
        """Returns the weighted sums of level · value and of squared levels."""
        sum_lx = _sum(np.multiply(cubes_nG, level_nG, out=work_nG))
        np.multiply(squares_nG, level_nG, out=work_nG)
        return sum_lx, _sum(np.multiply(work_nG, level_nG, out=work_nG))

    best_inverse = np.float32(-half) / largest
    round_levels(best_inverse)
    sum_lx, sum_l2 = sums()
    scale = np.where(sum_l2 == 0, np.float32(0), sum_lx / sum_l2)
    best = scale * sum_lx  # the reduction of the error: sum_lx² / sum_l2
    for step in (*range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(half) + np.float32(0.1) * np.float32(step)) / largest
        round_levels(inverse)
        sum_lx, sum_l2 = sums()
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        new_scale = sum_lx / sum_l2
        best_inverse = np.where(better, inverse, best_inverse)
        scale = np.where(better, new_scale, scale)
        best = np.where(better, new_scale * sum_lx, best)
    round_levels(best_inverse)
    return np.where(zero, np.float32(0), scale), np.where(zero, np.float32(-half), level_nG)


def _q6_k(x: np.ndarray) -> dict[str, np.ndarray]:
    x_nG = _groups(x, 16)
    scales, level_nG = _search_symmetric(x_nG, 32)
    scales = scales.reshape(-1, 16)
    largest = _largest(scales, -1)
    zero = np.abs(largest) < SMALLEST
    inverse = np.float32(-128) / largest
    d = np.where(zero, np.float32(0), ONE / inverse).astype(np.float16)
    whole = np.where(
        zero[:, None],
        np.float32(0),
        np.minimum(np.rint(scales * inverse[:, None]), np.float32(127)),
    )
    step = (d.astype(np.float32)[:, None] * whole).reshape(-1)
    rounded_nG = np.clip(np.rint(x_nG / step), np.float32(-32), np.float32(31))
    levels = (
        (np.where(step == 0, level_nG, rounded_nG) + np.float32(32))
        .astype(np.uint8)
        .T.reshape(-1, 256)
    )
    levels[zero] = 0
    # Each half of a block: four quarters, whose low 4 bits form `ql` and whose high 2 bits form
    # `qh`.
    quarters = levels.reshape(-1, 2, 4, 32)
    low = _nibbles(levels.reshape(-1, 2, 128)).reshape(len(x), -1)
    return {"d": d, "scales": whole, "ql": low, "qh": _pack_pairs(quarters >> np.uint8(4))}


def _pack_pairs(fields: np.ndarray) -> np.ndarray:
    """Packs fields of 2 bits `[B, m, 4, n]`, four to a byte with the first in the lowest bits:
    `[B, m · n]`.
    """
    shifted = fields << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(fields), -1)


def _ternary_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns d and the codes 0, 1 and 2 with x ≈ d · (code − 1); d is the largest absolute
    value.
    """
    d = np.abs(x).max(-1)
    scaled = x * _reciprocal(d)[:, None]
    # Halves are rounded away from zero.
    return d, ((scaled >= 0.5).astype(np.uint8) + np.uint8(1)) - (scaled <= -0.5).astype(np.uint8)


def _base_three(codes: np.ndarray) -> np.ndarray:
    """Packs the digits of numbers in base 3, `[B, digits, n]`, to bytes `[B, n]`: fractions of 243
    in 256ths, rounded up.
    """
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[: codes.shape[1], None]
    number = np.add.reduce(codes * powers, axis=1, dtype=np.uint16)
    return ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)


def _tq1_0(x: np.ndarray) -> dict[str, np.ndarray]:
    d, codes = _ternary_codes(x)
    first = _base_three(codes[:, :160].reshape(-1, 5, 32))
    second = _base_three(codes[:, 160:240].reshape(-1, 5, 16))
    last = _base_three(codes[:, 240:].reshape(-1, 4, 4))
    return {"d": d, "qs": np.concatenate([first, second], -1), "qh": last}


def _tq2_0(x: np.ndarray) -> dict[str, np.ndarray]:
    d, codes = _ternary_codes(x)
    return {"d": d, "qs": _pack_pairs(codes.reshape(-1, 2, 4, 32))}


ENCODERS: dict[str, Callable[[np.ndarray], Mapping[str, np.ndarray]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip

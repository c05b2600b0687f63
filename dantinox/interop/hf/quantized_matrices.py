"""Matrices of quantized checkpoints: their stored tensors, packed integers, scales and zero points.

The product of value and scale is rounded to float32 once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.files import UserError, escape_name
from dantinox.interop.source import LazyArrays, Tensor

CHUNK = 1 << 20  # values dequantized at a time
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FLOATS = ("float32", "bfloat16", "float16")
# The value of each code of a 4-bit float (E2M1).
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Dequantized(NamedTuple):
    """A tensor that is dequantized.

    Attributes:
      tensor: its shape and dtype.
      stored: the names of the tensors that store it.
      make: computes it.
    """

    tensor: Tensor
    stored: tuple[str, ...]
    make: Callable[[], np.ndarray]


def stored_tensor(
    tensors: LazyArrays, name: str, companion: str, dtypes: tuple[str, ...]
) -> Tensor:
    """Returns shape and dtype of a tensor that must be stored with the tensor `companion` and have
    one of these dtypes.
    """
    if name not in tensors.tensors:
        raise UserError(f"the checkpoint has {escape_name(companion)} without {escape_name(name)}")
    tensor = tensors.tensors[name]
    if tensor.dtype not in dtypes:
        raise UserError(
            f"the checkpoint has {escape_name(name)} as {tensor.dtype}, expected"
            f" {' or '.join(dtypes)}"
        )
    return tensor


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise UserError(
            f"the checkpoint has {escape_name(name)} of shape {list(found)}, expected"
            f" {list(expected)}"
        )


def check_stored(
    tensors: LazyArrays,
    name: str,
    companion: str,
    dtypes: tuple[str, ...],
    expected: tuple[int, ...],
) -> None:
    """Raises a `UserError` unless a tensor is stored as in `stored_tensor`, with this shape."""
    check_shape(name, stored_tensor(tensors, name, companion, dtypes).shape, expected)


def check_scalar(tensors: LazyArrays, name: str, companion: str) -> None:
    """Raises a `UserError` unless a tensor is stored as one float, of shape [] or [1]."""
    shape = stored_tensor(tensors, name, companion, FLOATS).shape
    if shape != ():
        check_shape(name, shape, (1,))


def module_names(tensors: LazyArrays, suffix: str) -> list[str]:
    """Returns the names of the modules that have a tensor with this suffix."""
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def float_scale(scale: np.ndarray) -> np.ndarray:
    """Converts scales to float32; bytes are exponents of 2 with the bias 127 (E8M0)."""
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    return scale.astype(np.float32)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpacks 4-bit fields, two per byte with the first in the low half: `[…, n]` → `[…, 2n]`."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return pairs.reshape(*packed.shape[:-1], -1)


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks consecutive fields of 1 to 8 bits from 32-bit words: `[rows, words]` → uint8
    `[rows, count]`.
    """
    words = np.ascontiguousarray(words).view(np.uint32)
    position = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    word = position >> np.uint32(5)
    shift = position & np.uint32(31)
    split = shift > 32 - bits  # fields that continue in the next word
    result = np.empty((len(words), count), np.uint8)
    step = max(1, CHUNK // max(count, 1))
    for start in range(0, len(words), step):
        part = words[start : start + step]
        fields = part[:, word] >> shift
        if split.any():
            fields[:, split] |= part[:, word[split] + 1] << (np.uint32(32) - shift[split])
        result[start : start + step] = fields & np.uint32((1 << bits) - 1)
    return result


def scale_block(
    name: str, shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Returns the rows and columns that share a scale.

    Args:
      name: the name of the matrix, for messages.
      shape: the shape of the matrix.
      grid: the shape of the scales. A scale applies to the whole matrix, a row, a group of columns
        in a row, or a block.
      block: the block shape in the config, or None.
    """
    if block is not None and (-(-shape[0] // block[0]), -(-shape[1] // block[1])) == grid:
        return block
    if len(grid) != 2 or 0 in (*grid, *shape) or grid[0] not in (1, shape[0]) or shape[1] % grid[1]:
        raise UserError(
            f"the checkpoint has {escape_name(name)} of shape {list(shape)} with scales of shape"
            f" {list(grid)}, expected scales per tensor, row, group or block"
        )
    return shape[0] // grid[0], shape[1] // grid[1]


def apply_scales(
    values: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int],
    zero: Any = None,
    groups: np.ndarray | None = None,
    codebook: np.ndarray | None = None,
) -> np.ndarray:
    """Computes `(values - zero) * scale` in float32, in chunks of rows.

    Args:
      values: `[rows, columns]`.
      scale: `[row blocks, column blocks]`.
      block: the rows and columns of a block.
      zero: the zero points: one number, or an array with the shape of `scale`.
      groups: for each column, the index of its column block; None if column blocks are contiguous.
      codebook: the value of each code, if `values` are codes.
    """
    rows, columns = values.shape
    result = np.empty((rows, columns), np.float32)
    block_rows, block_columns = block
    groups = np.arange(columns) // block_columns if groups is None else groups
    step = max(1, CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        row_groups = np.arange(start, stop) // block_rows
        part = (
            values[start:stop].astype(np.float32)
            if codebook is None
            else codebook[values[start:stop]]
        )
        if zero is not None:
            part -= zero if np.ndim(zero) == 0 else zero[row_groups].astype(np.float32)[:, groups]
        np.multiply(part, scale[row_groups][:, groups], out=result[start:stop])
    return result


def group_numbers(tensors: LazyArrays, name: str, groups: int) -> np.ndarray:
    """Returns a tensor that has the index of a group of scales for each column; raises a
    `UserError` for other indices.
    """
    numbers = tensors[name]
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < groups:
        raise UserError(
            f"the checkpoint has {escape_name(name)} with numbers outside of its {groups} groups"
        )
    return numbers


def scaled_matrix(
    tensors: LazyArrays,
    name: str,
    scale: str,
    dtypes: tuple[str, ...],
    block: tuple[int, int] | None,
    zero: str | None = None,
) -> Dequantized:
    """Returns a matrix, or a stack of matrices (one per expert), that is stored unpacked with
    scales and zero points.
    """
    weight = stored_tensor(tensors, name, scale, dtypes)
    scales = stored_tensor(tensors, scale, name, (*FLOATS, "float8_e8m0fnu", "uint8"))
    if len(weight.shape) not in (2, 3):
        raise UserError(
            f"the checkpoint has {escape_name(name)} of shape {list(weight.shape)},"
            " expected two or three axes"
        )
    grid = scales.shape
    if grid in ((), (1,)):
        grid = (1, 1)
    elif len(grid) == 1:
        grid = (*grid, 1)
    if len(weight.shape) == 3 and grid[0] != weight.shape[0]:
        check_shape(scale, scales.shape, (weight.shape[0], *scales.shape[1:]))
    block_shape = scale_block(name, weight.shape[-2:], grid[len(weight.shape) - 2 :], block)
    if zero:
        check_stored(tensors, zero, name, ("int8", "uint8"), scales.shape)

    def make() -> np.ndarray:
        values = tensors[name]
        factors = float_scale(tensors[scale]).reshape(grid)
        zeros = tensors[zero].reshape(grid) if zero else None
        if values.ndim == 2:
            return apply_scales(values, factors, block_shape, zeros)
        experts = range(len(values))
        return np.stack(
            [
                apply_scales(
                    values[e], factors[e], block_shape, None if zeros is None else zeros[e]
                )
                for e in experts
            ]
        )

    return Dequantized(
        Tensor(weight.shape, "float32"), (name, scale, *([zero] if zero else [])), make
    )

"""How the weight matrices of an architecture are stored in a GGUF file: as weights, or as ternary
weights.

In llama.cpp's architecture `bitnet`, a file contains the ternary weights −g, 0 and g of each
matrix, in any tensor type, or −1, 0 and 1 and the scale g as a tensor of one element
(`src/models/bitnet.cpp`, `conversion/bitnet.py`). A run contains float weights, from which
`dantinox.model.ternary` computes ternary ones.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.files import escape_name
from dantinox.interop.gguf.gguf_file import GGUFFile, Shape, read_tensor
from dantinox.model.ternary import MIN_SCALE, magnitude_with_scale, ternary_matrix

ReadTensor = Callable[[str, int | None], np.ndarray]  # (name, index of an expert or None) → tensor


class MatrixFormat(NamedTuple):
    """How the matrices of an architecture are stored.

    Attributes:
      open: takes a file; returns the file without tensors that are only a part of a matrix, and a
        function that reads a tensor, or the slice of one expert.
      is_converted: returns whether a tensor, by its name in the file, is a matrix whose float
        weights differ from the stored values.
      encode: takes the name of a tensor in the file, and its float weights; returns the values to
        store.
      default_type: the type of an exported file, a key of `FILE_TYPES`. None: the type of the run's
        packed weights.
      check_types: takes the type of an exported file, and the shape and the type of each tensor. It
        raises a `UserError` if these types cannot represent the matrices.
    """

    open: Callable[[GGUFFile], tuple[GGUFFile, ReadTensor]]
    is_converted: Callable[[str], bool]
    encode: Callable[[str, np.ndarray], np.ndarray]
    default_type: str | None
    check_types: Callable[[str, Mapping[str, Shape]], None]


# The matrices that are ternary in a `bitnet` file.
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# Types that represent −g, 0 and g for one g, up to the rounding of g.
EXACT_TYPES = ("F32", "F16", "BF16", "Q8_0", "TQ1_0", "TQ2_0")


def _is_projection(name: str) -> bool:
    return name.endswith(tuple(f".{part}.weight" for part in PROJECTIONS))


def _split_scales(file: GGUFFile) -> tuple[GGUFFile, ReadTensor]:
    """Returns the file without the scales, and a function that reads a tensor as float weights.

    The function raises a `UserError` for a matrix that is not ternary, or a scale that is 0 or not
    finite.

    Raises:
      UserError: a scale has several elements, or belongs to no matrix.
    """
    suffixes = tuple(f".{part}.scale" for part in PROJECTIONS)
    scales = {name: stored for name, stored in file.tensors.items() if name.endswith(suffixes)}
    for name, stored in scales.items():
        matrix = name.removesuffix("scale") + "weight"
        if math.prod(stored.shape) != 1 or matrix not in file.tensors:
            raise UserError(
                f"{file.path} has {escape_name(name)} of shape {list(stored.shape)}, expected one"
                " number, the scale of a matrix"
            )
    weights = {name: stored for name, stored in file.tensors.items() if name not in scales}
    return file._replace(tensors=weights), partial(_read_ternary, file)


def _read_ternary(file: GGUFFile, name: str, expert: int | None = None) -> np.ndarray:
    """Reads a tensor. A matrix becomes float weights that the model quantizes to the stored
    ones.
    """
    if not _is_projection(name):
        return read_tensor(file, name, expert)
    where = f"{file.path} has {escape_name(name)}"
    stored = _read_scaled(file, name)
    magnitudes = np.abs(stored)
    scale = float(magnitudes.max(initial=0))
    if not ((stored == 0) | (magnitudes == scale)).all():
        raise UserError(
            f"{where} with more than three different weights, but bitnet has ternary weights"
        )
    nonzero = int(np.count_nonzero(stored))
    if nonzero and not MIN_SCALE <= scale < np.inf:
        raise UserError(f"{where} with weights of ±{scale:g}, expected at least {MIN_SCALE:g}")
    return np.sign(stored) * magnitude_with_scale(scale, nonzero, stored.size)


def _read_scaled(file: GGUFFile, name: str) -> np.ndarray:
    """Returns a matrix multiplied by its scale, if the scale is a separate tensor."""
    array = read_tensor(file, name).astype(np.float32)
    scale_name = name.removesuffix(".weight") + ".scale"
    if scale_name not in file.tensors:
        return array
    scale = float(read_tensor(file, scale_name).reshape(-1)[0])
    if not 0 < abs(scale) < np.inf:
        raise UserError(
            f"{file.path} has the scale {scale:g} in {escape_name(scale_name)},"
            " expected a number other than 0"
        )
    return array * np.float32(scale)


def _encode_ternary(name: str, array: np.ndarray) -> np.ndarray:
    return ternary_matrix(array) if _is_projection(name) else array


def _check_ternary_types(kind: str, shapes: Mapping[str, Shape]) -> None:
    for name, (shape, tensor_type) in shapes.items():
        if _is_projection(name) and tensor_type not in EXACT_TYPES:
            raise UserError(
                f"the type {kind} cannot represent the ternary matrix {name} with rows of"
                f" {shape[-1]} weights: choose f16 or q8_0, or tq2_0 or tq1_0 if the rows of all"
                " matrices are multiples of 256"
            )


PLAIN = MatrixFormat(
    open=lambda file: (file, partial(read_tensor, file)),
    is_converted=lambda name: False,
    encode=lambda name, array: array,
    default_type=None,
    check_types=lambda kind, shapes: None,
)
TERNARY = MatrixFormat(
    open=_split_scales,
    is_converted=_is_projection,
    encode=_encode_ternary,
    default_type="tq2_0",
    check_types=_check_ternary_types,
)

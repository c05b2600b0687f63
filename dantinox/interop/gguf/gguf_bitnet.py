"""The ternary matrices of llama.cpp's architecture `bitnet`.

A file contains the ternary weights −g, 0 and g of each matrix, in any tensor type, or −1, 0 and 1 and
the scale g as a tensor of one element (`src/models/bitnet.cpp`, `conversion/bitnet.py`). A run contains
float weights, from which `dantinox.model.ternary` computes ternary ones: their scale is the mean
absolute value. So if a share s of the weights is not 0, an import makes them ±g / s.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from dantinox.config import UserError
from dantinox.files import escape_name
from dantinox.interop.gguf.gguf_file import GGUFFile, read_tensor
from dantinox.model.ternary import MIN_SCALE

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

# Types that represent −g, 0 and g for one g, up to the rounding of g.
EXACT_TYPES = ("F32", "F16", "BF16", "Q8_0", "TQ1_0", "TQ2_0")


def is_projection(name: str) -> bool:
    """Returns whether a tensor of a `bitnet` file is a ternary matrix."""
    return name.endswith(tuple(f".{part}.weight" for part in PROJECTIONS))


def split_scales(file: GGUFFile) -> tuple[GGUFFile, Callable[[str, int | None], np.ndarray]]:
    """Returns the file without the scales, and a function that reads a tensor as float weights.

    The function raises a `UserError` for a matrix that is not ternary, or a scale that is not a positive number.

    Raises:
      UserError: a scale has several elements, or belongs to no matrix.
    """
    suffixes = tuple(f".{part}.scale" for part in PROJECTIONS)
    scales = {name: stored for name, stored in file.tensors.items() if name.endswith(suffixes)}
    for name, stored in scales.items():
        if math.prod(stored.shape) != 1 or name.removesuffix("scale") + "weight" not in file.tensors:
            found = f"{file.path} has {escape_name(name)} of shape {list(stored.shape)}"
            raise UserError(f"{found}, expected one number, the scale of a matrix")
    weights = {name: stored for name, stored in file.tensors.items() if name not in scales}
    return file._replace(tensors=weights), partial(_read, file)


def _read(file: GGUFFile, name: str, expert: int | None = None) -> np.ndarray:
    if not is_projection(name):
        return read_tensor(file, name, expert)
    array = read_tensor(file, name).astype(np.float32)
    scale = name.removesuffix(".weight") + ".scale"
    if scale in file.tensors:
        factor = float(read_tensor(file, scale).reshape(-1)[0])
        if not 0 < abs(factor) < np.inf:
            raise UserError(f"{file.path} has the scale {factor:g} in {escape_name(scale)}, expected a number other than 0")
        array = array * np.float32(factor)
    level, count = np.abs(array).max(initial=0), np.count_nonzero(array)
    if not ((array == 0) | (np.abs(array) == level)).all():
        raise UserError(
            f"{file.path} has {escape_name(name)} with more than three different weights, but bitnet has ternary weights"
        )
    if count and not MIN_SCALE <= level < np.inf:
        found = f"weights of ±{level:g}, expected at least {MIN_SCALE:g}"
        raise UserError(f"{file.path} has {escape_name(name)} with {found}")
    spread = np.float32(float(level) * array.size / count if count else 0)
    return np.sign(array) * spread


def check_ternary_types(kind: str, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raises a `UserError` if a file of this type would store ternary matrices as other weights.

    Args:
      kind: the type of the file, as in `FILE_TYPES`.
      shapes: the shape and the type of each tensor.
    """
    for name, (shape, tensor_type) in shapes.items():
        if is_projection(name) and tensor_type not in EXACT_TYPES:
            raise UserError(
                f"the type {kind} cannot represent the ternary matrix {name} with rows of {shape[-1]} weights: "
                "choose f16 or q8_0, or tq2_0 or tq1_0 if the rows of all matrices are multiples of 256"
            )


def ternary_values(array: np.ndarray) -> np.ndarray:
    """Returns the ternary weights of a matrix of float weights, as `dantinox.model.ternary` does."""
    array = np.asarray(array, np.float32)
    scale = np.float32(max(np.abs(array).mean(dtype=np.float64), MIN_SCALE))
    return np.clip(np.rint(array * (np.float32(1) / scale)), -1, 1) * scale

"""Reads and writes one safetensors file (huggingface.co/docs/safetensors)."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dantinox.files import UserError, on_one_line

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """The shape of an array and the name of its dtype, NumPy's or `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[CODES[self.dtype]].itemsize


class SafetensorsFile:
    """A safetensors file, mapped into memory.

    Attributes:
      tensors: shape and dtype of each array by its name.
      metadata: the texts in its header.
    """

    def __init__(self, path: Path):
        """Opens a file; the library compares its header with its size to the byte.

        Raises:
          UserError: it cannot be read, is damaged, or holds an array of an unknown dtype.
        """
        try:
            with open(path, "rb"):  # its errors name the reason, the library's do not
                self._file = safe_open(path, framework="numpy")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {on_one_line(str(error))}") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        self.tensors: dict[str, Tensor] = {}
        for name in self._file.keys():  # noqa: SIM118, it cannot be iterated over
            array = self._file.get_slice(name)
            if (code := array.get_dtype()) not in DTYPES:
                raise UserError(f"{path} has {on_one_line(name)} as {code}, which is none of {', '.join(DTYPES)}")
            self.tensors[name] = Tensor(tuple(array.get_shape()), DTYPES[code].name)

    def read(self, name: str) -> np.ndarray:
        """A copy of an array."""
        array: np.ndarray = self._file.get_tensor(name)
        return array


def safetensors_pieces(
    arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in pieces; arrays are requested one after the other.

    The library's own writer needs all arrays of a file in memory, and puts metadata in a random order.

    Args:
      arrays: may hold more than `tensors` names.
      tensors: what the file holds, with shape and dtype of each array.
    """
    # As the library orders them, for alignment: the largest items first, then by name.
    order = sorted(tensors, key=lambda name: (-DTYPES[CODES[tensors[name].dtype]].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": CODES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        array = np.ascontiguousarray(arrays[name])
        yield array.reshape(-1).view(np.uint8).data
        del array  # before the next one is made

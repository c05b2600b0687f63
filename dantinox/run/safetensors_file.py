"""Reads and writes one safetensors file (huggingface.co/docs/safetensors)."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dantinox.files import UserError, escape_name, first_line

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16), "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip
MAX_HEADER_BYTES = 32 << 20
DTYPE_CODES = {dtype.name: code for code, dtype in DTYPES.items()}


class Tensor(NamedTuple):
    """The shape of an array, and the name of its dtype: a NumPy name, or one of ml_dtypes such as
    `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[DTYPE_CODES[self.dtype]].itemsize


class SafetensorsFile:
    """A memory-mapped safetensors file.

    Attributes:
      tensors: shape and dtype of each array by name, in the order of their data.
      metadata: the strings in the header.
    """

    def __init__(self, path: Path):
        """Opens a file. The safetensors library checks that the header describes exactly the bytes
        of the file.

        Raises:
          UserError: the file cannot be read, is damaged, or holds an array of an unknown dtype.
        """
        try:
            # If opening fails, the OSError of `open` says why; the library's error does not.
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if MAX_HEADER_BYTES < length <= os.fstat(file.fileno()).st_size:
                    raise UserError(
                        f"{path} has a header of {length} bytes, the maximum is {MAX_HEADER_BYTES}"
                    )
                with safe_open(path, framework="numpy"):
                    header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (SafetensorError, ValueError) as error:
            what = first_line(error).removeprefix("Error while deserializing header: ")
            raise UserError(f"{path} is damaged: {repr(what)[1:-1]}") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self.path = path
        self._content = np.memmap(path, np.uint8, mode="r")
        for name, array in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            code = array["dtype"]
            if code not in DTYPES:
                raise UserError(
                    f"{path} has {escape_name(name)} as {code}, expected one of {', '.join(DTYPES)}"
                )
            self.tensors[name] = Tensor(tuple(array["shape"]), DTYPES[code].name)
            start, end = array["data_offsets"]
            # The data begin behind the length of the header, in 8 bytes, and the header.
            data = 8 + length
            self._places[name] = (data + start, data + end)

    def read(self, name: str) -> np.ndarray:
        """Returns a copy of an array."""
        start, end = self._places[name]
        shape, dtype = self.tensors[name]
        return np.array(self._content[start:end].view(DTYPES[DTYPE_CODES[dtype]]).reshape(shape))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object and rejects duplicate names, for which the library would use the last
    value.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate entry {next(name for name in names if names.count(name) > 1)}")
    return found


def safetensors_pieces(
    arrays: Mapping[str, np.ndarray],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file in parts, and reads the arrays one at a time.

    The library's own writer needs all arrays of a file in memory, and writes metadata in random
    order.

    Args:
      arrays: arrays by name; arrays that are not in `tensors` are not written.
      tensors: the names, shapes and dtypes of the arrays in the file.
      metadata: strings for the header, added to `format: pt`.
    """
    # The library also writes arrays in this order: largest item size first, then by name. It keeps
    # the data aligned.
    order = sorted(
        tensors, key=lambda name: (-DTYPES[DTYPE_CODES[tensors[name].dtype]].itemsize, name)
    )
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        start = end
        end = start + tensors[name].nbytes
        header[name] = {
            "dtype": DTYPE_CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        array = np.ascontiguousarray(arrays[name])
        yield array.reshape(-1).view(np.uint8).data
        del array  # frees it before the next array is read

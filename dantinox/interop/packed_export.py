"""Export of packed weights to GGUF without quantizing them again."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from dantinox.interop.gguf.ggml_types import dequantize
from dantinox.model.packed import group_parts
from dantinox.run.weights import StoredArray

Key = tuple[str, bytes]  # the format and the hash of the values of a row


class StoredRows:
    """The packed rows of a run, found by their values.

    A row of an exported matrix is a row of a packed parameter, in an order that depends on the
    family. Quantizing its float32 values again would change them. So the blocks of a row are
    searched by the format and the hash of these values.
    """

    def __init__(self, packed: Mapping[str, StoredArray]):
        self._rows: dict[Key, np.ndarray] = {}
        for parts in group_parts({name: array.array() for name, array in packed.items()}).values():
            for kind, raw in parts:
                rows = _flatten_rows(raw)
                values = dequantize(kind, rows.reshape(-1)).reshape(len(rows), -1)
                self._rows |= zip(_keys(kind, values), rows, strict=True)

    def find(self, kind: str, array: np.ndarray) -> np.ndarray | None:
        """Returns the blocks of a matrix, uint8 `[rows, bytes]`; None if the run lacks a row in
        this format.
        """
        if not self._rows or array.dtype != np.float32:
            return None
        rows = []
        for key in _keys(kind, array):
            row = self._rows.get(key)
            if row is None:
                return None
            rows.append(row)
        return np.stack(rows)


def _flatten_rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _keys(kind: str, array: np.ndarray) -> Iterator[Key]:
    """Returns the key of each row of an array."""
    for row in np.ascontiguousarray(_flatten_rows(array)):
        yield kind, hashlib.blake2b(row.data, digest_size=16).digest()

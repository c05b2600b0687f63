"""Export of packed weights to GGUF without quantizing them again."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from dantinox.interop.gguf.ggml_types import dequantize
from dantinox.model.packed import group_parts
from dantinox.run.weights import StoredArray

Key = tuple[str, bytes]


class StoredRows:
    """The packed rows of a run, found by their values.

    A row of an exported matrix is a row of a packed parameter, in an order that depends on the family. Quantizing its float32
    values again would change them. So the blocks of a row are searched by the format and the hash of these values.
    """

    def __init__(self, packed: Mapping[str, StoredArray]):
        self._rows: dict[Key, np.ndarray] = {}
        for parts in group_parts({name: array.array() for name, array in packed.items()}).values():
            for kind, raw in parts:
                raw = _flat(raw)
                values = dequantize(kind, raw.reshape(-1)).reshape(len(raw), -1)
                self._rows |= zip(_keys(kind, values), raw, strict=True)

    def find(self, kind: str, array: np.ndarray) -> np.ndarray | None:
        """Returns the blocks of a matrix, uint8 `[rows, bytes]`; None if the run lacks a row in this format."""
        if not self._rows or array.dtype != np.float32:
            return None
        rows = [self._rows.get(key) for key in _keys(kind, array)]
        return None if any(row is None for row in rows) else np.stack(rows)  # type: ignore[arg-type]


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def _keys(kind: str, array: np.ndarray) -> Iterator[Key]:
    for row in np.ascontiguousarray(_flat(array)):
        yield kind, hashlib.blake2b(row.data, digest_size=16).digest()

"""The weights of a run in Flax's msgpack format, read without running or holding anything that does not belong there."""

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.files import UserError, first_line, on_one_line
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import entry_while_unchanged, put
from dantinox.run.packing import BFLOAT16, Leaf, Reader, packed


def save_weights(path: str | Path, parameters: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
    """Writes arrays in Flax's msgpack format, and their SHA-256 to the manifest beside them.

    Equal weights give equal bytes. Arrays are asked for one after the other, so a mapping that makes them needs memory for one.

    Args:
      parameters: arrays by their paths, "blocks/0/norm1/scale"; the file holds them as nested dicts, those of bfloat16 as they
        are and all others as float32.
      facts: what made them, for the manifest.

    Raises:
      UserError: the file cannot be written.
    """
    path = Path(path)
    put(path.parent, path.name, packed(parameters), facts)


def load_weights(
    path: str | Path, expected: Mapping[str, Any], place: Callable[[str, np.ndarray], Any] = lambda path, array: array
) -> dict[str, Any]:
    """Reads what `save_weights` wrote. Nothing in the file is run, and the file is mapped into memory, not copied.

    Args:
      expected: for every path something that has a `shape`.
      place: called with a path and a read-only array, float32 or bfloat16 as the file has it; what it returns stands in the
        result.

    Raises:
      UserError: the file is missing, damaged, or does not hold exactly the expected names and shapes.
    """
    path = Path(path)
    shapes = {name: tuple(leaf.shape) for name, leaf in expected.items()}
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        found = Reader(content).leaves()
    except OSError as error:
        raise UserError(f"cannot read the weights {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, struct.error) as error:  # what bytes from outside can cause
        raise UserError(f"the weights {path} are damaged or no weights at all: {first_line(error)}") from None
    _compare(path, found, shapes)
    total = sum(leaf.nbytes for leaf in found.values())
    overhead = 1024 + sum(256 + len(name) for name in shapes)
    if size > total + overhead:
        raise UserError(f"the weights {path} are damaged: {size} bytes, expected {total} and at most {overhead} around them")
    return {name: place(name, found.pop(name).array()) for name in shapes}


def weights_digest(run: RunDirectory) -> str:
    """SHA-256 (hex) of the weights, or of the adapters, which name theirs; computed once for as long as the file stays."""
    try:
        return entry_while_unchanged(run.exported).sha256
    except OSError as error:
        raise UserError(f"cannot read the weights {run.exported}: {error.strerror}") from None


def _compare(path: Path, found: Mapping[str, Leaf], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises on the first parameter that is missing, too many, of another shape or neither dtype."""
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"the weights {path} lack {name} of shape {shape}, which this model has")
        array = found[name]
        if array.shape != shape:
            raise UserError(f"the weights {path} hold {name} with shape {array.shape}, this model has {shape}")
        if array.dtype.name not in ("float32", BFLOAT16):
            raise UserError(f"the weights {path} hold {name} as {array.dtype}, expected float32 or bfloat16")
    for name, array in found.items():
        if name not in shapes:
            raise UserError(f"the weights {path} hold {on_one_line(name)} of shape {array.shape}, which this model has not")

"""The weights of a run in Flax's msgpack format, read without running or holding anything that does not belong there."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.files import UserError, first_line, on_one_line
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import entry_while_unchanged, put

# Flax's msgpack format: an array is extension 1, packed (shape, dtype name, bytes); a large one is a map of flat chunks.
ARRAY_EXTENSION = 1
CHUNK_BYTES = 1 << 30
CHUNKED = "__msgpack_chunked_array__"


def save_weights(path: str | Path, parameters: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
    """Writes arrays as float32 in Flax's msgpack format, and their SHA-256 to the manifest beside them.

    Equal weights give equal bytes.

    Args:
      parameters: arrays by their paths, "blocks/0/norm1/scale"; the file holds them as nested dicts.
      facts: what made them, for the manifest.

    Raises:
      UserError: the file cannot be written.
    """
    import msgpack

    path = Path(path)
    content = msgpack.packb(_packable(_nested(parameters)), default=_pack_array, strict_types=True)
    put(path.parent, path.name, content, facts)


def load_weights(
    path: str | Path, expected: Mapping[str, Any], place: Callable[[str, np.ndarray], Any] = lambda path, array: array
) -> dict[str, Any]:
    """Reads what `save_weights` wrote. Nothing in the file is run, and no array of a wrong size is ever held.

    Args:
      expected: for every path something that has a `shape`.
      place: called with a path and a read-only float32 array; what it returns stands in the result.

    Raises:
      UserError: the file is missing, damaged, or does not hold exactly the expected names and shapes.
    """
    path = Path(path)
    shapes = {name: tuple(leaf.shape) for name, leaf in expected.items()}
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    overhead = 1024 + sum(256 + len(name) for name in shapes)
    try:
        size = path.stat().st_size
        fits = total <= size <= total + overhead
        # A file of another size is only listed, to name the parameter that differs.
        found = dict(_flat(_unpack(path, keep=fits)))
    except OSError as error:
        raise UserError(f"cannot read the weights {path}: {error.strerror}") from None
    _compare(path, found, shapes)
    if not fits:
        raise UserError(f"the weights {path} are damaged: {size} bytes, expected {total} and at most {overhead} around them")
    return {name: place(name, found.pop(name)) for name in shapes}


def weights_digest(run: RunDirectory) -> str:
    """SHA-256 (hex) of the weights file, computed once for as long as the file stays as it is."""
    try:
        return entry_while_unchanged(run.weights).sha256
    except OSError as error:
        raise UserError(f"cannot read the weights {run.weights}: {error.strerror}") from None


def _compare(path: Path, found: Mapping[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises on the first parameter that is missing, too many, of another shape or not float32."""
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"the weights {path} lack {name} of shape {shape}, which this model has")
        array = found[name]
        if array.shape != shape:
            raise UserError(f"the weights {path} hold {name} with shape {array.shape}, this model has {shape}")
        if array.dtype != np.float32:
            raise UserError(f"the weights {path} hold {name} as {array.dtype}, expected float32")
    for name, array in found.items():
        if name not in shapes:
            raise UserError(f"the weights {path} hold {on_one_line(name)} of shape {array.shape}, which this model has not")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"blocks/0/norm1/scale": x}` as `{"blocks": {"0": {"norm1": {"scale": x}}}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What `_nested` was made from."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _packable(tree: Any) -> Any:
    """The tree as it goes to the packer: sorted names, float32 arrays, large arrays in chunks."""
    if isinstance(tree, dict):
        return {str(key): _packable(tree[key]) for key in sorted(tree, key=str)}
    array = np.asarray(tree, dtype=np.float32)
    if array.nbytes <= CHUNK_BYTES:
        return array
    step = CHUNK_BYTES // array.itemsize
    flat = array.reshape(-1)
    chunks = {str(i): flat[start : start + step] for i, start in enumerate(range(0, flat.size, step))}
    shape = {str(i): size for i, size in enumerate(array.shape)}
    return {CHUNKED: True, "shape": shape, "chunks": chunks}


def _pack_array(array: np.ndarray) -> Any:
    import msgpack

    packed = msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
    return msgpack.ExtType(ARRAY_EXTENSION, packed)


def _unpack(path: Path, keep: bool) -> dict[str, Any]:
    """The file's tree; without `keep` its arrays have their shape and one shared zero as content."""
    import msgpack

    def array(code: int, data: bytes) -> np.ndarray:
        if code != ARRAY_EXTENSION:
            raise ValueError(f"extension {code}")
        shape, name, content = msgpack.unpackb(data, raw=True, max_array_len=16, max_map_len=0)
        kind = np.dtype(name.decode("ascii"))
        values = np.frombuffer(content, dtype=kind).reshape(shape)
        return values if keep else np.broadcast_to(np.zeros((), kind), values.shape)

    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # The limits keep a forged header from asking for memory.
            tree = msgpack.unpackb(content, ext_hook=array, raw=False, strict_map_key=True, max_array_len=0)
        if not isinstance(tree, dict):
            raise ValueError("no tree of parameters")
        return _joined(tree)
    except OSError:
        raise
    except Exception as error:  # whatever bytes from outside can cause
        raise UserError(f"the weights {path} are damaged or no weights at all: {first_line(error)}") from None


def _joined(tree: Any) -> Any:
    """Puts chunked arrays together again; refuses everything that is neither a dict nor an array."""
    if isinstance(tree, np.ndarray):
        return tree
    if not isinstance(tree, dict):
        raise ValueError(f"found {type(tree).__name__} where a parameter should be")
    if CHUNKED not in tree:
        return {key: _joined(value) for key, value in tree.items()}
    shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
    return np.concatenate([tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]).reshape(shape)

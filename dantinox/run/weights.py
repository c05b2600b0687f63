"""The weights file of a run in Flax's msgpack format, written array by array and read through a
memory map.

An array is msgpack extension 1: the packed triple (shape, dtype name, bytes). A large array is a
map of flat chunks. The reader never executes code from the file, and compares every size with the
remaining bytes before it allocates memory.

Arrays are float32 or bfloat16. Weights that stay in the blocks of a quantized GGUF file are uint8
arrays, see `dantinox.model.packed`.
"""

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from dantinox.files import UserError, escape_name, first_line, wrap_os_errors
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import hash_file_cached, write_file

ARRAY_EXTENSION = 1
CHUNK_BYTES = 1 << 30
CHUNKED_KEY = "__msgpack_chunked_array__"
BFLOAT16 = "bfloat16"
MAX_DEPTH = 16  # maximum nesting of names in a file
# Type bytes (github.com/msgpack/msgpack/blob/master/spec.md). These precede a length of 1, 2 or 4
# bytes:
BINARY = (0xC4, 0xC5, 0xC6)
EXTENSION = (0xC7, 0xC8, 0xC9)
TEXT = (0xD9, 0xDA, 0xDB)
MAP = (0xDE, 0xDF)  # precede a length of 2 or 4 bytes
# These contain the length: the first of a range stands for 0.
SHORT_MAP = range(0x80, 0x90)
SHORT_LIST = range(0x90, 0xA0)
SHORT_TEXT = range(0xA0, 0xC0)
LIST_OF_THREE = SHORT_LIST[3]
TRUE = 0xC3
UNSIGNED = range(0xCC, 0xD0)  # precede an integer of 1, 2, 4 or 8 bytes
# Size of the content → type byte, which no length follows.
FIXED_EXTENSION = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
PACKER = msgpack.Packer()


def save_weights(
    path: str | Path, parameters: Mapping[str, Any], facts: Mapping[str, Any] | None = None
) -> None:
    """Writes arrays in Flax's msgpack format, and adds the SHA-256 of the file to the manifest in
    the same directory.

    Equal weights result in equal bytes. Arrays are read from `parameters` one at a time, so a lazy
    mapping needs memory for only one array.

    Args:
      parameters: arrays by path, such as "blocks/0/norm1/scale". The file holds them as nested
        dicts: bfloat16 and uint8 arrays unchanged, all others as float32.
      facts: the provenance of the weights, for the manifest.

    Raises:
      UserError: the file cannot be written, or the manifest is damaged.
    """
    path = Path(path)
    write_file(path.parent, path.name, msgpack_pieces(parameters), facts)


def load_weights(
    path: str | Path,
    expected_shapes: Mapping[str, Any],
    place: Callable[[str, np.ndarray], Any] = lambda path, array: array,
    widen: "Callable[[Mapping[str, StoredArray]], Mapping[str, Any]] | None" = None,
) -> dict[str, Any]:
    """Reads a file that `save_weights` wrote. The file is memory-mapped. Loading never executes
    code.

    Args:
      expected_shapes: for every path, an object with a `shape`, and the `dtype` uint8 if the array
        is packed.
      place: called with each path and its read-only array, with the dtype in the file. Its results
        are returned.
      widen: converts the packed arrays that `expected_shapes` lacks, by path, to float parameters
        by path. A float parameter has the attributes of a `StoredArray`. None: such arrays are an
        error.

    Returns:
      The results of `place` by path, in the order of `expected_shapes`.

    Raises:
      UserError: the file is missing, damaged, or does not hold exactly the expected names and
        shapes.
    """
    path = Path(path)
    shapes = {name: tuple(leaf.shape) for name, leaf in expected_shapes.items()}
    arrays, size = read_arrays(path)
    total = sum(leaf.nbytes for leaf in arrays.values())
    # The header of an array has less than 256 bytes.
    overhead = 1024 + sum(256 + len(name) for name in arrays)
    quantized = {
        name: array
        for name, array in arrays.items()
        if array.dtype == np.uint8 and name not in shapes
    }
    if quantized:
        if widen is None:
            raise UserError(
                f"the weights {path} are quantized ({escape_name(next(iter(quantized)))}), and this"
                " use needs float weights: import the checkpoint"
                " again with --dtype bfloat16 or float32"
            )
        try:
            arrays = {
                name: array for name, array in arrays.items() if name not in quantized
            } | dict(widen(quantized))
        except ValueError as error:
            raise UserError(f"the weights {path} {error}") from None
    packed = {
        name for name, leaf in expected_shapes.items() if getattr(leaf, "dtype", None) == np.uint8
    }
    _compare(path, arrays, shapes, packed)
    # The file has content that belongs to no array, such as maps without entries, which the reader
    # accepts.
    if size > total + overhead:
        raise UserError(
            f"the weights {path} are damaged: {size} bytes, expected {total} for the arrays and at"
            f" most {overhead} more"
        )
    return {name: place(name, arrays[name].array()) for name in shapes}


def read_arrays(path: Path) -> tuple[dict[str, "StoredArray"], int]:
    """Returns the memory-mapped arrays of a file by path, and the size of the file in bytes.

    Raises:
      UserError: the file cannot be read, or does not hold a tree of arrays.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        return MsgpackReader(content).arrays(), size
    except OSError as error:
        raise UserError(f"cannot read the weights {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, struct.error) as error:
        # Invalid bytes can cause any of these errors.
        raise UserError(
            f"the weights {path} are damaged or not a weights file: {first_line(error)}"
        ) from None


def packed_arrays(path: Path) -> dict[str, "StoredArray"]:
    """Returns the packed arrays of a weights file by name; the errors are those of
    `read_arrays`.
    """
    return {name: array for name, array in read_arrays(path)[0].items() if array.dtype == np.uint8}


def weights_digest(run: RunDirectory) -> str:
    """Returns the SHA-256 (hex) of the weights of a run, or of its adapter file, which contains the
    digest of the base weights.

    The digest is computed again only if the file changes.

    Raises:
      UserError: the file cannot be read.
    """
    with wrap_os_errors(f"cannot read the weights {run.weights_or_adapter}"):
        return hash_file_cached(run.weights_or_adapter).sha256


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turns `{"blocks/0/norm1/scale": x}` into `{"blocks": {"0": {"norm1": {"scale": x}}}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the (path, value) pairs of a nested dict: the inverse of `_nested`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def msgpack_pieces(parameters: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a weights file in parts: the arrays as nested dicts with sorted names.

    Args:
      parameters: arrays by path, such as "blocks/0/norm1/scale", each read just before it is
        written. bfloat16 and uint8 arrays stay unchanged, all others become float32.
    """
    # The leaves are paths, so that each array is read when it is written.
    paths = _nested({name: name for name in parameters})
    return _tree_pieces(paths, parameters)


def _tree_pieces(
    tree: Mapping[str, Any], parameters: Mapping[str, Any]
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a nested dict, whose leaves are paths in `parameters`."""
    yield PACKER.pack_map_header(len(tree))
    for key in sorted(tree):
        yield PACKER.pack(key)
        if isinstance(tree[key], dict):
            yield from _tree_pieces(tree[key], parameters)
            continue
        array = np.asarray(parameters[tree[key]])
        if array.dtype.name not in (BFLOAT16, "uint8"):
            array = np.asarray(array, np.float32)
        yield from _array_pieces(array)
        del array  # frees it before the next array is read


def _array_pieces(array: np.ndarray) -> Iterator[bytes | memoryview]:
    """Yields one array as Flax packs it: an extension, or a map of extensions if the array is
    larger than `CHUNK_BYTES`.
    """
    if array.nbytes <= CHUNK_BYTES:
        yield from _extension_pieces(array)
        return
    step = CHUNK_BYTES // array.itemsize
    flat = array.reshape(-1)
    starts = range(0, flat.size, step)
    shape = {str(axis): size for axis, size in enumerate(array.shape)}
    # {CHUNKED_KEY: true, "shape": shape, "chunks": {"0": part, …}}
    yield PACKER.pack_map_header(3) + b"".join(
        map(PACKER.pack, (CHUNKED_KEY, True, "shape", shape, "chunks"))
    )
    yield PACKER.pack_map_header(len(starts))
    for number, start in enumerate(starts):
        yield PACKER.pack(str(number))
        yield from _extension_pieces(flat[start : start + step])


def _extension_pieces(array: np.ndarray) -> Iterator[bytes | memoryview]:
    """Yields one array as an extension with the triple (shape, dtype name, bytes). The bytes are
    not copied.
    """
    shape_and_dtype = PACKER.pack(array.shape) + PACKER.pack(array.dtype.name)
    before_data = bytes([LIST_OF_THREE]) + shape_and_dtype + _data_header(array.nbytes, BINARY)
    yield (
        _data_header(len(before_data) + array.nbytes, EXTENSION)
        + bytes([ARRAY_EXTENSION])
        + before_data
    )
    yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _data_header(size: int, type_bytes: tuple[int, int, int]) -> bytes:
    """Returns the type and length bytes of binary data or of an extension; the content follows
    separately.
    """
    if type_bytes == EXTENSION and size in FIXED_EXTENSION:
        return bytes([FIXED_EXTENSION[size]])
    for width, type_byte in zip((1, 2, 4), type_bytes, strict=True):
        if size < 256**width:
            return bytes([type_byte]) + size.to_bytes(width, "big")
    raise ValueError(f"{size} bytes are more than msgpack can store in one value")


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: its shape, and its flat parts in order, which are views of the file."""

    shape: tuple[int, ...]
    parts: tuple[np.ndarray, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def array(self) -> np.ndarray:
        """Returns the read-only array; it is a copy only if the file stores the array in several
        parts.
        """
        flat = self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)
        flat.flags.writeable = False
        return flat.reshape(self.shape)


def _compare(
    path: Path,
    arrays: Mapping[str, StoredArray],
    shapes: dict[str, tuple[int, ...]],
    packed: set[str],
) -> None:
    """Raises a UserError for the first parameter that is missing, unexpected, or has a wrong shape
    or dtype.

    The arrays in `packed` must be uint8.
    """
    for name, shape in shapes.items():
        if name not in arrays:
            raise UserError(
                f"the weights {path} lack {name} of shape {shape}, which this model needs"
            )
        array = arrays[name]
        if array.shape != shape:
            raise UserError(
                f"the weights {path} hold {name} with shape {array.shape}, but this model has"
                f" {shape}"
            )
        allowed = ("uint8",) if name in packed else ("float32", BFLOAT16)
        if array.dtype.name not in allowed:
            raise UserError(
                f"the weights {path} hold {name} as {array.dtype}, expected {' or '.join(allowed)}"
            )
    for name, array in arrays.items():
        if name not in shapes:
            raise UserError(
                f"the weights {path} hold {escape_name(name)} of shape {array.shape}, which this"
                " model does not have"
            )


class MsgpackReader:
    """Reads the subset of msgpack that a tree of arrays uses. Arrays are views of the file content.

    Every size is compared with the remaining bytes before anything is allocated. Invalid content
    raises a ValueError, KeyError, TypeError or struct.error.
    """

    def __init__(self, content: Any):
        self.content = content
        self.at = 0  # the position of the next byte
        self.end = len(content)

    def arrays(self) -> dict[str, StoredArray]:
        """Returns the arrays by path."""
        tree = self._map(0)
        if self.at != self.end:
            raise ValueError(f"{self.end - self.at} extra bytes after the parameters")
        return dict(_flat(tree))

    def _peek(self) -> int:
        """Returns the next byte, which stays unread. At the end of the file it is 0, and the
        following read raises an error.
        """
        return self.content[self.at] if self.at < self.end else 0

    def _take(self, form: str) -> int:
        """Reads an integer in a format of `struct`."""
        value: int = struct.unpack_from(form, self.content, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def _read_length(self, short: range, type_bytes: tuple[int, ...], what: str) -> int:
        """Reads a length, from the type byte itself (`short`) or from the 1, 2 or 4 bytes after the
        type byte.
        """
        kind = self._take(">B")
        if kind in short:
            return kind - short.start
        if kind not in type_bytes:
            raise ValueError(f"found byte 0x{kind:02x} instead of {what}")
        if type_bytes == MAP:
            return self._take((">H", ">I")[MAP.index(kind)])
        return self._take((">B", ">H", ">I")[type_bytes.index(kind)])

    def _name(self) -> str:
        """Reads a name; entries of a list have an integer as their name."""
        head = self._peek()
        is_integer = head < 0x80 or head in UNSIGNED
        return str(self._integer()) if is_integer else self._text()

    def _text(self) -> str:
        """Reads a string."""
        size = self._read_length(SHORT_TEXT, TEXT, "a name")
        if size > self.end - self.at:
            raise ValueError("a name that extends past the end of the file")
        self.at += size
        return bytes(self.content[self.at - size : self.at]).decode()

    def _integer(self) -> int:
        """Reads an integer ≥ 0."""
        head = self._take(">B")
        if head < 128:
            return head
        if head not in UNSIGNED:
            raise ValueError("a shape with an entry that is not an integer")
        return self._take((">B", ">H", ">I", ">Q")[UNSIGNED.index(head)])

    def _map(self, depth: int) -> dict[str, Any]:
        """Reads a tree: name → array or tree. `depth` is the number of trees around it."""
        count = self._read_length(SHORT_MAP, MAP, "a tree of parameters")
        if depth > MAX_DEPTH or count > self.end - self.at:
            raise ValueError("a tree of parameters that is larger than the file")
        tree: dict[str, Any] = {}
        for number in range(count):
            name = self._name()
            if name == CHUNKED_KEY and number == 0:
                return {CHUNKED_KEY: self._chunked(depth)}  # `_node` takes the array out
            if name in tree:
                raise ValueError(f"duplicate name {escape_name(name)}")
            tree[name] = self._node(depth)
        return tree

    def _node(self, depth: int) -> Any:
        """Reads an array, a chunked array or a tree."""
        head = self._peek()
        if head in EXTENSION or head in FIXED_EXTENSION.values():
            shape, values = self._array()
            return StoredArray(shape, (values,))
        tree = self._map(depth + 1)
        return tree.get(CHUNKED_KEY, tree)

    def _chunked(self, depth: int) -> StoredArray:
        """Reads the rest of a chunked array after its first name: true, "shape": {"0": n, …},
        "chunks": {"0": array, …}.
        """
        if self._take(">B") != TRUE or self._text() != "shape":
            raise ValueError("a chunked array without a shape")
        dimensions = self._read_length(SHORT_MAP, (), "a shape")
        axes = {self._text(): self._integer() for _ in range(dimensions)}
        shape = tuple(axes[str(axis)] for axis in range(len(axes)))
        if self._text() != "chunks":
            raise ValueError("a chunked array without chunks")
        chunks = self._map(depth + 1)
        parts = tuple(chunks[str(number)].parts[0] for number in range(len(chunks)))
        if (
            not parts
            or sum(part.size for part in parts) != math.prod(shape)
            or len({part.dtype for part in parts}) > 1
        ):
            raise ValueError(f"chunks that do not form an array of shape {shape}")
        return StoredArray(shape, parts)

    def _array(self) -> tuple[tuple[int, ...], np.ndarray]:
        """Reads an array that is not chunked: its shape, and its values as a flat view of the
        file.
        """
        head = self._take(">B")
        fixed = {byte: size for size, byte in FIXED_EXTENSION.items()}
        size = (
            fixed[head] if head in fixed else self._take((">B", ">H", ">I")[EXTENSION.index(head)])
        )
        code = self._take(">B")
        if code != ARRAY_EXTENSION:
            raise ValueError(f"unknown extension type {code}")
        end = self.at + size
        if self._take(">B") != LIST_OF_THREE:
            raise ValueError("an array without shape, dtype and content")
        dimensions = self._read_length(SHORT_LIST, (), "a shape")
        shape = tuple(self._integer() for _ in range(dimensions))
        dtype_name = self._text()
        count = self._read_length(range(0), BINARY, "the content of an array")
        dtype = np.dtype(ml_dtypes.bfloat16 if dtype_name == BFLOAT16 else dtype_name)
        if math.prod(shape) * dtype.itemsize != count or self.at + count != end or end > self.end:
            raise ValueError(f"an array of shape {shape} with content of another size")
        values = (
            np.frombuffer(self.content, dtype, math.prod(shape), self.at)
            if count
            else np.empty(0, dtype)
        )
        self.at = end
        return shape, values

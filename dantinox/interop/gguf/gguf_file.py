"""The GGUF file format: a validating reader of metadata and tensors, and a streaming writer.

The format is specified in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `ggml_types`
defines the tensor types.
"""

import itertools
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError, check_writable, escape_name, staged_write, wrap_os_errors
from dantinox.interop.gguf.ggml_quantize import has_finite_scales, quantize
from dantinox.interop.gguf.ggml_types import TYPES, UNSUPPORTED_TYPES, dequantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# The type codes of metadata values: first numbers, with their NumPy types, then strings and arrays.
NUMBER_TYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
MAX_AXES = 4
# The smallest sizes in a file; they limit the counts that a header can state.
MIN_ENTRY_BYTES, MIN_TENSOR_BYTES = 13, 24
# The limits for a list and for a string in a file of any size.
MAX_ENTRIES = 1 << 22
MAX_STRING_BYTES = 1 << 26
# Arrays of these types are memory-mapped, not copied.
PLAIN_DTYPES = {name: kind.block for name, kind in TYPES.items() if kind.decode is None}
TYPE_NAMES = {kind.number: name for name, kind in TYPES.items()}
Shape = tuple[tuple[int, ...], str]  # the shape in NumPy's axis order, and the type name
FindBlocks = Callable[[str, np.ndarray], np.ndarray | None]  # (type name, matrix) → its blocks


class StoredTensor(NamedTuple):
    """A tensor in a file: its shape in NumPy's axis order, its type name, and its byte range."""

    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


class GGUFFile(NamedTuple):
    """The metadata and tensors of a file; `content` is the memory-mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    content: np.ndarray


def open_gguf(path: str | Path) -> GGUFFile:
    """Reads the metadata of a file and the locations of its tensors.

    Every count, length and offset is compared with the size of the file before it is used.

    Raises:
      UserError: the file cannot be read, is damaged, or contains only a part of a model.
    """
    path = Path(path)
    with wrap_os_errors(f"cannot read {path}"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24 or file.read(4) != MAGIC:
            raise UserError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            metadata, tensors = _read_header(_Reader(content, path))
    if metadata.get("split.count", 1) not in (0, 1):
        raise UserError(
            f"{path} is one part of a split model: join the parts with `llama-gguf-split --merge`"
        )
    return GGUFFile(path, metadata, tensors, np.memmap(path, np.uint8, mode="r"))


def read_tensor(file: GGUFFile, name: str, part: int | None = None) -> np.ndarray:
    """Returns a tensor, or the slice with index `part` along its first axis.

    Tensors of float32, float16 or bfloat16 are memory-mapped and read-only. Quantized tensors are
    converted to float32.
    """
    shape, kind, offset, size = file.tensors[name]
    if part is not None:
        size //= shape[0]
        offset += part * size
        shape = shape[1:]
    raw = np.asarray(file.content[offset : offset + size])
    if kind in PLAIN_DTYPES:
        return raw.view(PLAIN_DTYPES[kind]).reshape(shape)
    return dequantize(kind, raw).reshape(shape)


def read_rows(file: GGUFFile, name: str) -> np.ndarray:
    """Returns the bytes of a tensor without conversion, uint8 `[rows, bytes of a row]`;
    memory-mapped and read-only.
    """
    shape, _, offset, size = file.tensors[name]
    return np.asarray(file.content[offset : offset + size]).reshape(math.prod(shape[:-1]), -1)


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    arrays: Iterable[np.ndarray],
    find_blocks: FindBlocks = lambda kind, array: None,
) -> None:
    """Writes a file tensor by tensor. No file remains after an error.

    Args:
      path: the file to create.
      metadata: the entries. Integers are written as uint32, floats as float32. The elements of a
        list have one type; integers in a list are written as int32.
      shapes: the shape (in NumPy's order) and type (`F32`, `F16`, `BF16` or a key of `ENCODERS`) of
        every tensor.
      arrays: the tensors in the order of `shapes`, with any float dtype.
      find_blocks: returns the known blocks of a matrix in a quantized type; None: the matrix is
        quantized.

    Raises:
      UserError: the file cannot be written.
    """
    check_writable(path)
    with staged_write(path, _file_pieces(metadata, shapes, arrays, find_blocks)):
        pass


def _file_pieces(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    arrays: Iterable[np.ndarray],
    find_blocks: FindBlocks,
) -> Iterator[bytes | memoryview]:
    """Yields the content of a file: the header, and each tensor with its padding."""
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(shapes), len(metadata)))
    for key, value in metadata.items():
        head += _encode_string(key) + _encode_value(value)
    offset = 0
    for name, (shape, kind) in shapes.items():
        head += _encode_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", TYPES[kind].number, offset)
        offset += _align(_tensor_bytes(shape, kind))
    yield bytes(head).ljust(_align(len(head)), b"\0")
    for (_, kind), array in zip(shapes.values(), arrays, strict=True):
        encoded = _encode_tensor(array, kind, find_blocks)
        yield encoded.reshape(-1).view(np.uint8).data
        yield bytes(_align(encoded.nbytes) - encoded.nbytes)


def _align(size: int) -> int:
    """Rounds up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: Any) -> bytes:
    """Encodes a value, preceded by its type code."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _encode_string(value)
    if not isinstance(value, list):
        code = _number_code(value, UINT32)
        return struct.pack("<I", code) + np.array(value, NUMBER_TYPES[code]).tobytes()
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_encode_string, value))
    code = _number_code(value[0], INT32) if value else FLOAT32
    return (
        struct.pack("<IIQ", ARRAY, code, len(value)) + np.array(value, NUMBER_TYPES[code]).tobytes()
    )


def _number_code(value: Any, integer: int) -> int:
    """Returns the type code of a number; `integer` is that of integers."""
    if isinstance(value, bool):
        return BOOL
    return integer if isinstance(value, int) else FLOAT32


def _encode_tensor(array: np.ndarray, kind: str, find_blocks: FindBlocks) -> np.ndarray:
    """Converts an array to the type that the file stores."""
    if kind in PLAIN_DTYPES:
        with np.errstate(over="ignore"):
            plain = np.ascontiguousarray(array, PLAIN_DTYPES[kind])
        if kind == "F16" and not np.isfinite(plain).all() and np.isfinite(array).all():
            raise UserError(
                "the weights have numbers above 65,504, the largest of float16: export bf16 or f32"
            )
        return plain
    if (blocks := find_blocks(kind, array)) is not None:
        return blocks
    encoded = quantize(kind, array)
    if not has_finite_scales(kind, encoded):
        raise UserError(
            f"the weights have numbers that {kind} cannot represent (too"
            " large, or NaN): export bf16 or f32"
        )
    return encoded


def _tensor_bytes(shape: Sequence[int], kind: str) -> int:
    """Returns the number of bytes of a tensor in a file."""
    return math.prod(shape) // TYPES[kind].values * TYPES[kind].block.itemsize


class _Reader:
    """Reads a file sequentially, and checks that every read is inside the file."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content = content
        self.path = path
        self.position = 0

    def skip(self, size: int, what: str) -> int:
        """Skips `size` bytes and returns the position of the first skipped byte."""
        start = self.position
        if size > len(self.content) - start:
            raise self.damaged(f"{what} extends past the end of the file")
        self.position += size
        return start

    def number(self, code: int, what: str) -> Any:
        """Reads a number of the type with this code."""
        kind = np.dtype(NUMBER_TYPES[code])
        return np.frombuffer(self.content, kind, 1, self.skip(kind.itemsize, what))[0].item()

    def count(self, what: str, smallest: int) -> int:
        """Reads a count of items that occupy at least `smallest` bytes each, and checks that the
        file can hold them.
        """
        (count,) = struct.unpack_from("<Q", self.content, self.skip(8, what))
        if count * smallest > len(self.content) - self.position:
            raise self.damaged(f"it claims {count} {what}, more than the file can hold")
        if count > (MAX_STRING_BYTES if what.startswith("bytes of") else MAX_ENTRIES):
            raise self.damaged(f"it claims {count} {what}")
        return int(count)

    def text(self, what: str) -> str:
        size = self.count(f"bytes of {what}", 1)
        start = self.skip(size, what)
        try:
            return self.content[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8 text") from None

    def value(self, code: int, what: str) -> Any:
        if code == STRING:
            return self.text(what)
        if code in NUMBER_TYPES:
            return self.number(code, what)
        if code != ARRAY:
            raise self.damaged(f"{what} has the unknown type {code}")
        inner = self.number(UINT32, what)
        if inner == STRING:
            return [self.text(what) for _ in range(self.count(f"entries of {what}", 8))]
        if inner not in NUMBER_TYPES:
            raise self.damaged(f"{what} is an array of the unknown type {inner}")
        kind = np.dtype(NUMBER_TYPES[inner])
        count = self.count(f"entries of {what}", kind.itemsize)
        return np.frombuffer(
            self.content, kind, count, self.skip(count * kind.itemsize, what)
        ).tolist()

    def damaged(self, why: str) -> UserError:
        # Names in a file may contain any character.
        return UserError(f"{self.path} is damaged: {repr(why)[1:-1][:200]}")


def _read_header(reader: _Reader) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    reader.skip(4, "the magic")
    version = reader.number(UINT32, "the version")
    if version not in VERSIONS:
        swapped = " (big-endian)" if version and version & 0xFFFF == 0 else ""
        raise UserError(
            f"{reader.path} has GGUF version {version}{swapped}, expected version 2 or 3"
        )
    count = reader.count("tensors", MIN_TENSOR_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(reader.count("entries of metadata", MIN_ENTRY_BYTES)):
        key = reader.text("the name of an entry")
        if key in metadata:
            raise reader.damaged(f"it has the entry {key} twice")
        code = reader.number(UINT32, key)
        metadata[key] = reader.value(code, key)
    infos = [_read_tensor_info(reader) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise reader.damaged("general.alignment must be a multiple of 8")
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in infos:
        if min(shape) < 1 or shape[-1] % TYPES[kind].values:
            raise reader.damaged(
                f"the tensor {name} has the shape {shape}, which {kind} does not allow"
            )
        size = _tensor_bytes(shape, kind)
        if name in tensors:
            raise reader.damaged(f"it has the tensor {name} twice")
        if offset % alignment or start + offset + size > len(reader.content):
            raise reader.damaged(f"the tensor {name} extends past the end of the file")
        tensors[name] = StoredTensor(shape, kind, start + offset, size)
    by_offset = sorted(tensors, key=lambda name: tensors[name].offset)
    for name, following in itertools.pairwise(by_offset):
        if tensors[name].offset + tensors[name].size > tensors[following].offset:
            raise reader.damaged(f"the tensors {name} and {following} overlap")
    return metadata, tensors


def _read_tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    """Reads the name, the shape, the type and the offset of a tensor."""
    name = reader.text("the name of a tensor")
    axes = reader.number(UINT32, name)
    if not 1 <= axes <= MAX_AXES:
        raise reader.damaged(f"the tensor {name} has {axes} axes")
    shape = tuple(reader.number(UINT64, name) for _ in range(axes))[::-1]
    code = reader.number(UINT32, name)
    offset = reader.number(UINT64, name)
    if code not in TYPE_NAMES:
        known = (
            f"type {UNSUPPORTED_TYPES[code]}"
            if code in UNSUPPORTED_TYPES
            else f"unknown type {code}"
        )
        raise UserError(
            f"{reader.path}: the tensor {escape_name(name)} has the {known}, expected one of"
            f" {', '.join(TYPES)}"
        )
    return name, shape, TYPE_NAMES[code], offset

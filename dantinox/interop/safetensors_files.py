"""Tensors in safetensors files (huggingface.co/docs/safetensors), mapped into memory, and written one by one.

A file is the length of a header, the header – JSON that names type, shape and place of every tensor – and the numbers.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dantinox.files import UserError, on_one_line, shown, staged
from dantinox.interop.source import Tensor

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # as of the format's own library
MAX_INDEX_BYTES = 64 << 20
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30


class TensorFiles:
    """The tensors of a checkpoint in one or several files.

    Attributes:
      tensors: shape and type of each by its name.
    """

    def __init__(self, folder: Path):
        """Opens `model.safetensors`, or what its index names, in a folder.

        Raises:
          UserError: there is neither, one of them is damaged, or they do not hold what the index says.
        """
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[str, np.ndarray] = {}
        for file, names in _files(folder).items():
            found = read_tensors(folder / file)
            if names is not None and (missing := names - found.keys()):
                raise UserError(f"{folder / file} lacks {on_one_line(min(missing))}, which {INDEX} says it holds")
            for name, array in found.items():
                if name in self.tensors:
                    raise UserError(f"{on_one_line(name)} stands in two files of {folder}")
                self.tensors[name] = Tensor(array.shape, array.dtype.name)
                self._places[name] = array

    def read(self, name: str) -> np.ndarray:
        """A tensor, where it lies in its file."""
        return self._places[name]


def _files(folder: Path) -> dict[str, set[str] | None]:
    """The files of a checkpoint, with the names that its index says they hold."""
    index = folder / INDEX
    if (folder / ONE_FILE).is_file():
        return {ONE_FILE: None}
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        if pickles:
            raise UserError(
                f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code and is not read: convert it to "
                "safetensors where you trust it, in transformers by from_pretrained(…).save_pretrained(…)"
            )
        raise UserError(f"{folder} has no {ONE_FILE} and no {INDEX}")
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        places = json.loads(index.read_bytes())["weight_map"]
        files: dict[str, set[str] | None] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
                raise UserError(f"{index} places {on_one_line(name)} in {shown(file)}, which is no safetensors file beside it")
            names = files.setdefault(file, set())
            assert names is not None
            names.add(name)
        return files
    except OSError as error:
        raise UserError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of safetensors files: {type(error).__name__}") from None


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file as views into it.

    Raises:
      UserError: its header does not describe the file to the byte.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise UserError(f"{path} is damaged: it has {size} bytes")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(f"{path} is damaged: it claims a header of {length} bytes and has {size} in all")
            header = json.loads(file.read(length))
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _arrays(header, content, 8 + length)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = str(error) if type(error) is ValueError else "its header is not that of a safetensors file"
        raise UserError(f"{path} is damaged: {on_one_line(what)}") from None


def _arrays(header: dict[str, Any], content: mmap.mmap, start: int) -> dict[str, np.ndarray]:
    found, at = {}, 0
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (begin, end), code = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
        if code not in DTYPES:
            raise ValueError(f"{name} has the type {shown(code)}, which is none of {', '.join(DTYPES)}")
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"{name} has shape {shown(list(shape))} at {shown([begin, end])}")
        count, dtype = math.prod(shape), DTYPES[code]
        if begin != at or end - begin != count * dtype.itemsize or start + end > len(content):
            raise ValueError(
                f"{name} of shape {shown(list(shape))} is said to lie at {begin} to {end} of {len(content) - start}"
            )
        values = np.frombuffer(content, dtype, count, start + begin) if count else np.empty(0, dtype)
        found[name], at = values.reshape(shape), end
    if start + at != len(content):
        raise ValueError(f"{len(content) - start - at} bytes behind its tensors")
    return found


def write_tensors(folder: Path, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]) -> None:
    """Writes `model.safetensors`, or above `SHARD_BYTES` several files and their index.

    Args:
      arrays: asked for one after the other, in their order.
      tensors: shape and type of each of them.

    Raises:
      UserError: a file cannot be written.
    """
    shards: list[list[str]] = [[]]
    held = 0
    for name in arrays:
        size = _bytes(tensors[name])
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return _write(folder / ONE_FILE, shards[0], arrays, tensors)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file, names, arrays, tensors)
        places |= dict.fromkeys(names, file)
    total = sum(_bytes(tensors[name]) for name in arrays)
    with staged(folder / INDEX, [json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()]):
        pass


def metadata_of(path: Path) -> dict[str, Any]:
    """What a file says of itself beside its arrays; it was read by `read_tensors`."""
    with open(path, "rb") as file:
        found = json.loads(file.read(int.from_bytes(file.read(8), "little"))).get("__metadata__")
    return found if isinstance(found, dict) else {}


def _write(path: Path, names: list[str], arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]) -> None:
    with staged(path, file_of(names, arrays, tensors)):
        pass


def file_of(
    names: list[str], arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The pieces of a file; arrays are asked for one after the other."""
    # Aligned tensors first, as the format's library has it: the largest items, then by name.
    order = sorted(names, key=lambda name: (-DTYPES[CODES[tensors[name].dtype]].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name in order:
        shape, dtype = tensors[name]
        size = _bytes(tensors[name])
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        array = np.ascontiguousarray(arrays[name])
        yield array.reshape(-1).view(np.uint8).data
        del array


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * DTYPES[CODES[tensor.dtype]].itemsize

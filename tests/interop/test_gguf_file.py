"""GGUF files: each library reads files that the other has written (DantinoX and `gguf`), and
damaged files give errors.
"""

import re
import struct

import ml_dtypes
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.interop.gguf.gguf_file import open_gguf, read_tensor, write_gguf
from tests.error_texts import ERRORS

gguf = pytest.importorskip("gguf")
RNG = np.random.default_rng(5)
ARRAYS = {
    "flat": (RNG.normal(size=7).astype(np.float32), "F32"),
    "matrix": (RNG.normal(size=(3, 64)).astype(np.float32), "F32"),
    "half": (RNG.normal(size=(2, 3, 5)).astype(np.float32), "F16"),
    "brain": (RNG.normal(size=(4, 6)).astype(np.float32), "BF16"),
    "blocks": (RNG.normal(size=(5, 96)).astype(np.float32), "Q8_0"),
}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.eps": 1e-6,
    "flag": True,
    "words": ["a", "è", ""],
    "scores": [0.5, -1.0],
    "kinds": [1, 3, -6],
    "none": [],
}


def write(path, arrays=ARRAYS, metadata=METADATA):
    shapes = {name: (array.shape, kind) for name, (array, kind) in arrays.items()}
    write_gguf(path, metadata, shapes, (array for array, _ in arrays.values()))
    return path


def test_library_reads_our_file(tmp_path):
    reader = gguf.GGUFReader(write(tmp_path / "x.gguf"))
    found = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert found.pop("none") in ([], None)
    expected = {key: value for key, value in METADATA.items() if key != "none"}
    assert found == expected | {"llama.eps": float(np.float32(1e-6))}
    for tensor in reader.tensors:
        array, kind = ARRAYS[tensor.name]
        assert tensor.tensor_type.name == kind
        assert tuple(reversed(tensor.shape.tolist())) == array.shape
        again = gguf.quantize(array, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(
            np.asarray(tensor.data).view(np.uint8).ravel(), again.view(np.uint8).ravel()
        )


def test_we_read_the_file_of_the_library(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint64("big", 1 << 40)
    writer.add_int8("small", -3)
    writer.add_float64("double", 0.1)
    writer.add_array("words", ["x", "yy"])
    for name, (array, kind) in ARRAYS.items():
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind, raw_shape=None)
    quantized = RNG.normal(size=(2, 256)).astype(np.float32)
    writer.add_tensor("q6", *_packed(quantized, "Q4_0"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata == {
        "general.architecture": "llama",
        "big": 1 << 40,
        "small": -3,
        "double": 0.1,
        "words": ["x", "yy"],
    }
    np.testing.assert_array_equal(read_tensor(file, "matrix"), ARRAYS["matrix"][0])
    np.testing.assert_array_equal(read_tensor(file, "half"), ARRAYS["half"][0].astype(np.float16))
    np.testing.assert_array_equal(
        read_tensor(file, "half", 1), ARRAYS["half"][0][1].astype(np.float16)
    )
    np.testing.assert_array_equal(
        read_tensor(file, "brain"), ARRAYS["brain"][0].astype(ml_dtypes.bfloat16)
    )
    assert (
        np.abs(read_tensor(file, "blocks") - ARRAYS["blocks"][0]).max()
        < np.abs(ARRAYS["blocks"][0]).max() / 200
    )
    assert np.abs(read_tensor(file, "q6") - quantized).max() < np.abs(quantized).max() / 7
    assert not read_tensor(file, "matrix").flags.writeable


def test_unsupported_tensor_type_is_an_error(tmp_path):
    path = write(tmp_path / "x.gguf", {"numbers": (np.zeros((2, 4), np.float32), "F32")})
    patch(
        path, position_after(path, "numbers", 20), struct.pack("<I", gguf.GGMLQuantizationType.I32)
    )
    with pytest.raises(UserError, match=ERRORS["the_tensor_numbers_has_the"]):
        open_gguf(path)


def _packed(array, kind):
    kind = gguf.GGMLQuantizationType[kind]
    return gguf.quantize(array, kind), None, kind


def test_too_large_numbers_are_rejected_and_leave_no_file(tmp_path):
    with pytest.raises(UserError, match=ERRORS["the_largest_of_float16_export"]):
        write(tmp_path / "x.gguf", {"big": (np.full((2, 2), 1e6, np.float32), "F16")})
    for number in (1e9, np.nan):
        with pytest.raises(UserError, match=ERRORS["q8_0_cannot_represent"]):
            write(tmp_path / "x.gguf", {"big": (np.full((2, 32), number, np.float32), "Q8_0")})
    assert list(tmp_path.iterdir()) == []


def patch(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def position_after(path, name, offset):
    """Returns the position `offset` bytes after the end of a name in a file."""
    return path.read_bytes().index(name.encode()) + len(name) + offset


DAMAGES = {
    "no magic": (lambda path: patch(path, 0, b"GGML"), "is not a GGUF file"),
    "old version": (
        lambda path: patch(path, 4, struct.pack("<I", 1)),
        "GGUF version 1, expected version 2 or 3",
    ),
    "other byte order": (
        lambda path: patch(path, 4, struct.pack(">I", 3)),
        "(big-endian), expected version 2 or 3",
    ),
    "many tensors": (
        lambda path: patch(path, 8, struct.pack("<Q", 1 << 60)),
        "claims 1152921504606846976 tensors",
    ),
    "a few too many": (lambda path: patch(path, 8, struct.pack("<Q", 9)), "is damaged"),
    "much metadata": (
        lambda path: patch(path, 16, struct.pack("<Q", 10**10)),
        "claims 10000000000 entries of metadata",
    ),
    "long name": (
        lambda path: patch(path, 24, struct.pack("<Q", 10**10)),
        "claims 10000000000 bytes of the name",
    ),
    "many words": (
        lambda path: patch(path, position_after(path, "words", 8), struct.pack("<Q", 1 << 61)),
        "entries of words",
    ),
    "many scores": (
        lambda path: patch(path, position_after(path, "scores", 8), struct.pack("<Q", 1 << 33)),
        "entries of scores",
    ),
    "unknown value": (
        lambda path: patch(path, position_after(path, "flag", 0), struct.pack("<I", 77)),
        "flag has the unknown type 77",
    ),
    "axes": (
        lambda path: patch(path, position_after(path, "matrix", 0), struct.pack("<I", 5)),
        "the tensor matrix has 5 axes",
    ),
    "ten gigabytes": (
        lambda path: patch(path, position_after(path, "matrix", 4), struct.pack("<Q", 64 * 10**8)),
        "the tensor matrix extends past the end of the file",
    ),
    "nothing": (
        lambda path: patch(path, position_after(path, "matrix", 4), struct.pack("<Q", 0)),
        "has the shape (3, 0)",
    ),
    "no whole block": (
        lambda path: patch(path, position_after(path, "blocks", 4), struct.pack("<Q", 95)),
        "which Q8_0 does not allow",
    ),
    "unknown type": (
        lambda path: patch(path, position_after(path, "matrix", 20), struct.pack("<I", 99)),
        "the unknown type 99",
    ),
    "far offset": (
        lambda path: patch(path, position_after(path, "matrix", 24), struct.pack("<Q", 1 << 62)),
        "the tensor matrix extends past the end of the file",
    ),
    "crooked offset": (
        lambda path: patch(path, position_after(path, "matrix", 24), struct.pack("<Q", 33)),
        "extends past the end",
    ),
    "overlap": (
        lambda path: patch(path, position_after(path, "matrix", 24), struct.pack("<Q", 0)),
        "flat and matrix overlap",
    ),
    "no text": (
        lambda path: patch(path, position_after(path, "flag", -4), b"\xff"),
        "is not UTF-8 text",
    ),
    "the same twice": (
        lambda path: patch(path, position_after(path, "words", -5), b"kinds"),
        "it has the entry kinds twice",
    ),
    "short": (
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        "the tensor blocks extends past the end of the file",
    ),
    "half a header": (lambda path: path.write_bytes(path.read_bytes()[:150]), "is damaged"),
    "empty": (lambda path: path.write_bytes(b""), "is not a GGUF file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_header_is_an_error_in_one_sentence(damage, tmp_path):
    path = write(tmp_path / "x.gguf")
    DAMAGES[damage][0](path)
    with pytest.raises(UserError, match=re.escape(DAMAGES[damage][1])) as error:
        open_gguf(path)
    assert "\n" not in str(error.value)


def test_truncated_and_corrupted_files_are_read_or_rejected(tmp_path):
    whole = write(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "y.gguf"
    for number in range(400):
        content = bytearray(whole[: RNG.integers(1, len(whole))] if number % 2 else whole)
        for place in RNG.integers(0, min(len(content), 700), 3):
            content[place] = RNG.integers(256)
        path.write_bytes(content)
        try:
            file = open_gguf(path)
        except UserError:
            continue
        assert all(stored.offset + stored.size <= len(content) for stored in file.tensors.values())


def test_split_and_missing_files_are_errors(tmp_path):
    with pytest.raises(UserError, match=ERRORS["join_the_parts_with_llama"]):
        open_gguf(
            write(tmp_path / "x.gguf", {}, {"general.architecture": "llama", "split.count": 3})
        )
    with pytest.raises(UserError, match=ERRORS["cannot_read_none_gguf_no"]):
        open_gguf(tmp_path / "none.gguf")

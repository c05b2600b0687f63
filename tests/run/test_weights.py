"""Weights round-trip bit for bit, or are refused in one sentence."""

import mmap
import weakref
from types import SimpleNamespace

import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.run import load_weights, save_weights, weights

from .small import sentence, some_weights


def shapes_of(tree: dict) -> dict:
    return {name: SimpleNamespace(shape=array.shape) for name, array in tree.items()}


def as_flax_holds_it(tree: dict) -> dict:
    blocks = {str(i): {"qkv": tree[f"blocks/{i}/qkv"]} for i in range(2)}
    return {"embed": tree["embed"], "blocks": blocks, "norm_f": tree["norm_f"]}


def test_weights_round_trip_bit_for_bit(tmp_path):
    tree = some_weights()
    tree["embed"][0, 0] = np.nan
    tree["embed"][0, 1] = -0.0
    save_weights(tmp_path / "w", tree)
    back = load_weights(tmp_path / "w", shapes_of(tree))
    assert back.keys() == tree.keys()
    for name, array in tree.items():
        assert back[name].tobytes() == array.tobytes(), name


def test_the_format_equals_that_of_flax(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "w", tree)
    assert (tmp_path / "w").read_bytes() == flax.serialization.msgpack_serialize(
        as_flax_holds_it(tree)
    )


@pytest.mark.parametrize("chunk", [16, 64])
def test_large_arrays_are_chunked_as_in_flax(tmp_path, monkeypatch, chunk):
    tree = some_weights()
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk)
    save_weights(tmp_path / "w", tree)
    flat = flax.serialization.msgpack_restore((tmp_path / "w").read_bytes())
    np.testing.assert_array_equal(flat["embed"], tree["embed"])
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk)
    (tmp_path / "f").write_bytes(flax.serialization.msgpack_serialize(as_flax_holds_it(tree)))
    assert len((tmp_path / "f").read_bytes()) == len((tmp_path / "w").read_bytes())
    back = load_weights(tmp_path / "f", shapes_of(tree))
    np.testing.assert_array_equal(back["blocks/1/qkv"], tree["blocks/1/qkv"])


def test_equal_weights_result_in_equal_bytes(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "a", tree)
    save_weights(tmp_path / "b", {key: tree[key] for key in reversed(tree)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weights_are_stored_as_float32(tmp_path):
    save_weights(tmp_path / "w", {"a": np.arange(4, dtype=np.float64)})
    back = load_weights(tmp_path / "w", {"a": np.zeros(4)})
    assert back["a"].dtype == np.float32


def test_place_determines_the_result(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "w", tree)
    names = load_weights(
        tmp_path / "w", shapes_of(tree), place=lambda name, array: (name, array.shape)
    )
    assert names["blocks/1/qkv"] == ("blocks/1/qkv", (4, 2, 3, 5))


def test_different_names_and_shapes_are_reported(tmp_path):
    tree = some_weights()
    path = tmp_path / "w"
    save_weights(path, tree)
    wanted = shapes_of(tree)
    wanted["embed"] = SimpleNamespace(shape=(9, 4))
    assert (
        sentence(load_weights, path, wanted)
        == f"the weights {path} hold embed with shape (7, 4), but this model has (9, 4)"
    )
    wanted = shapes_of(tree) | {"head": SimpleNamespace(shape=(4, 7))}
    assert "lack head of shape (4, 7)" in sentence(load_weights, path, wanted)
    wanted = shapes_of(tree)
    del wanted["norm_f"]
    assert "hold norm_f of shape (4,), which this model does not have" in sentence(
        load_weights, path, wanted
    )
    wanted = shapes_of(tree)
    wanted["embed"] = SimpleNamespace(shape=(4, 7))
    assert "(7, 4), but this model has (4, 7)" in sentence(load_weights, path, wanted)


def test_another_dtype_is_refused(tmp_path):
    (tmp_path / "w").write_bytes(flax.serialization.msgpack_serialize({"a": np.zeros(4, np.int32)}))
    assert "as int32, expected float32 or bfloat16" in sentence(
        load_weights, tmp_path / "w", {"a": np.zeros(4)}
    )


def test_a_missing_file_raises_one_sentence(tmp_path):
    assert "No such file or directory" in sentence(load_weights, tmp_path / "w", {})
    assert "Is a directory" in sentence(load_weights, tmp_path, {})


def test_every_truncation_is_refused(tmp_path):
    tree = some_weights()
    path = tmp_path / "w"
    save_weights(path, tree)
    content = path.read_bytes()
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        assert "damaged" in sentence(load_weights, path, shapes_of(tree))
    path.write_bytes(content + b"\x00")
    assert "damaged" in sentence(load_weights, path, shapes_of(tree))


def test_flipped_bytes_never_raise_other_exceptions(tmp_path):
    tree = some_weights()
    path = tmp_path / "w"
    save_weights(path, tree)
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            load_weights(path, shapes_of(tree))
        except UserError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95pickle",
        b"\x93\x01\x02\x03",
        b"\xc7\x00\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\x7f\xff\xff\xff",
        b"\x81" * 5000,
        b"\x81\xa1a" * 5000,
        b"\x81\xa1a\xc0",
        b"text, not weights",
        flax.serialization.msgpack_serialize({"a": 1 + 2j}),
        flax.serialization.msgpack_serialize({"a": np.float32(1)}),
    ],
    ids=range(13),
)
def test_foreign_content_is_refused(tmp_path, content):
    (tmp_path / "w").write_bytes(content)
    assert "damaged or not a weights file" in sentence(
        load_weights, tmp_path / "w", {"a": np.zeros(4)}
    )


def test_arrays_are_memory_mapped(tmp_path):
    save_weights(tmp_path / "w", {"a": np.zeros(1000), "b": np.ones(1000)})
    back = load_weights(tmp_path / "w", {"a": np.zeros(1000), "b": np.zeros(1000)})
    for array in back.values():
        while isinstance(array.base, np.ndarray):
            array = array.base
        assert isinstance(
            array.base.obj if isinstance(array.base, memoryview) else array.base, mmap.mmap
        )
        assert not array.flags.writeable


def test_bfloat16_is_kept_and_written_one_array_at_a_time(tmp_path):
    tree = some_weights()
    tree["embed"] = tree["embed"].astype(ml_dtypes.bfloat16)
    alive = []

    class Made(dict):
        def __getitem__(self, name):
            assert all(made() is None for made in alive)
            array = super().__getitem__(name).copy()
            alive.append(weakref.ref(array))
            return array

    save_weights(tmp_path / "w", Made(tree))
    nested = as_flax_holds_it(tree) | {"embed": jnp.asarray(tree["embed"])}
    assert (tmp_path / "w").read_bytes() == flax.serialization.msgpack_serialize(nested)
    back = load_weights(tmp_path / "w", shapes_of(tree))
    assert back["embed"].dtype == ml_dtypes.bfloat16 and back["norm_f"].dtype == np.float32
    assert back["embed"].tobytes() == tree["embed"].tobytes()

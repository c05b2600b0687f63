"""The run directory: atomic files, locks, and weights that come back bit by bit or are refused in one sentence."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import flax.serialization
import numpy as np
import pytest

import dantinox.run as run_module
from dantinox.config import UserError, build_config
from dantinox.config.router import MEASURED, RouterSection
from dantinox.run import (
    RunDirectory,
    atomic_write,
    create_run,
    load_router_calibration,
    load_run_config,
    load_weights,
    new_run_directory,
    newest_run,
    open_run,
    save_config,
    save_router_calibration,
    save_weights,
    weights_digest,
)


def sentence(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def some_weights(seed: int = 0) -> dict:
    draw = np.random.default_rng(seed).standard_normal
    blocks = {str(i): {"qkv": draw((4, 2, 3, 5)).astype(np.float32)} for i in range(2)}
    return {"embed": draw((7, 4)).astype(np.float32), "blocks": blocks, "norm_f": np.ones(4, np.float32)}


def shapes_of(tree: dict) -> dict:
    return {k: shapes_of(v) if isinstance(v, dict) else SimpleNamespace(shape=v.shape) for k, v in tree.items()}


# --- atomic_write


def test_atomic_write_replaces_text_and_bytes_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.txt"
    atomic_write(path, "perché\n")
    assert path.read_text(encoding="utf-8") == "perché\n"
    atomic_write(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_atomic_write_replaces_no_pipe_and_no_device(tmp_path):
    """Whoever may write in /dev would be left without it."""
    os.mkfifo(tmp_path / "pipe")
    assert sentence(atomic_write, tmp_path / "pipe", b"") == f"cannot write {tmp_path / 'pipe'}: what is there is no file"
    assert (tmp_path / "pipe").is_fifo()


def test_atomic_write_honours_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        atomic_write(tmp_path / "a", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    atomic_write(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_module.os, "fsync", full)
    assert sentence(atomic_write, path, "new") == f"cannot write {path}: No space left on device"
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_vanished_directory_is_a_sentence(tmp_path):
    assert "No such file or directory" in sentence(atomic_write, tmp_path / "gone" / "a", b"")


# --- directories


def test_paths_are_absolute_and_follow_the_logging_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create_run("runs/x")
    config = build_config({"logging": {"log_file": "log.csv"}})
    assert run.path == tmp_path / "runs" / "x"
    assert (run.log(config), run.summary(config)) == (run.path / "log.csv", run.path / "model_summary.json")


def test_two_runs_of_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.time, "strftime", lambda _: "run_20260102_030405")
    first, second = new_run_directory(tmp_path), new_run_directory(tmp_path)
    assert first.path.name == "run_20260102_030405"
    assert second.path.name == "run_20260102_030405_2"


def test_a_used_directory_needs_resume(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    assert "--resume" in sentence(create_run, tmp_path)
    assert create_run(tmp_path, resume=True) == RunDirectory(tmp_path)


def test_a_directory_that_holds_only_a_lock_is_new(tmp_path):
    (tmp_path / ".lock").touch()
    assert create_run(tmp_path).path == tmp_path


def test_a_file_in_the_way_is_a_sentence(tmp_path):
    (tmp_path / "x").touch()
    assert "a file is in its way" in sentence(create_run, tmp_path / "x")
    assert "Not a directory" in sentence(create_run, tmp_path / "x" / "y")


def test_opening_says_what_is_missing_and_names_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_run() is None
    assert sentence(open_run, "runs/x") == "no run directory at runs/x"
    for age, name in ((100, "old"), (10, "new")):
        config = create_run(f"runs/{name}").config
        config.touch()
        os.utime(config, (time.time() - age,) * 2)
    assert newest_run() == Path("runs/new")
    assert sentence(open_run, "runs/x") == "no run directory at runs/x (the newest run is runs/new)"
    assert "has no weights yet: model_weights.msgpack is missing" in sentence(open_run, "runs/old")
    (tmp_path / "runs" / "empty").mkdir()
    assert "it has no config.yaml" in sentence(open_run, "runs/empty")
    Path("runs/old/model_weights.msgpack").touch()
    assert open_run("runs/old").path == tmp_path / "runs" / "old"


def test_the_config_comes_back_equal(tmp_path):
    config = build_config({"training": {"lr": 5e-4}, "generation": {"stop": ["\n\n", "1e5"]}})
    save_config(RunDirectory(tmp_path), config)
    assert load_run_config(RunDirectory(tmp_path)) == config


# --- lock

HOLDER = """
import sys, time
from dantinox.run import RunDirectory
from pathlib import Path
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_refuses_a_second_process_and_dies_with_the_first(tmp_path):
    run = RunDirectory(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is working on"), run.lock():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    (tmp_path / ".a.txt.17.tmp").touch()
    with run.lock():
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    with run.lock():
        pass


def test_a_system_without_file_locks_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.warns(UserWarning, match="no file locks"), RunDirectory(tmp_path).lock():
        pass


# --- weights


def test_weights_come_back_bit_by_bit(tmp_path):
    tree = some_weights()
    tree["embed"][0, 0] = np.nan
    tree["embed"][0, 1] = -0.0
    save_weights(tmp_path / "w", tree)
    back = load_weights(tmp_path / "w", shapes_of(tree))
    for name, array in run_module._flatten(tree):
        assert dict(run_module._flatten(back))[name].tobytes() == array.tobytes(), name


def test_the_format_is_the_one_of_flax(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "w", tree)
    assert (tmp_path / "w").read_bytes() == flax.serialization.msgpack_serialize(tree)


@pytest.mark.parametrize("chunk", [16, 64])
def test_large_arrays_go_in_chunks_as_in_flax(tmp_path, monkeypatch, chunk):
    tree = some_weights()
    monkeypatch.setattr(run_module, "CHUNK_BYTES", chunk)
    save_weights(tmp_path / "w", tree)
    flat = flax.serialization.msgpack_restore((tmp_path / "w").read_bytes())
    np.testing.assert_array_equal(flat["embed"], tree["embed"])
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk)
    (tmp_path / "f").write_bytes(flax.serialization.msgpack_serialize(tree))
    assert len((tmp_path / "f").read_bytes()) == len((tmp_path / "w").read_bytes())
    back = load_weights(tmp_path / "f", shapes_of(tree))
    np.testing.assert_array_equal(back["blocks"]["1"]["qkv"], tree["blocks"]["1"]["qkv"])


def test_equal_weights_give_equal_bytes_whatever_the_order(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "a", tree)
    save_weights(tmp_path / "b", {key: tree[key] for key in reversed(tree)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_weights_are_stored_as_float32(tmp_path):
    save_weights(tmp_path / "w", {"a": np.arange(4, dtype=np.float64)})
    back = load_weights(tmp_path / "w", {"a": np.zeros(4)})
    assert back["a"].dtype == np.float32


def test_place_decides_what_stands_in_the_result(tmp_path):
    tree = some_weights()
    save_weights(tmp_path / "w", tree)
    names = load_weights(tmp_path / "w", shapes_of(tree), place=lambda name, array: (name, array.shape))
    assert names["blocks"]["1"]["qkv"] == ("blocks/1/qkv", (4, 2, 3, 5))


def test_names_and_shapes_that_differ_are_named_with_both_values(tmp_path):
    tree = some_weights()
    path = tmp_path / "w"
    save_weights(path, tree)
    wanted = shapes_of(tree)
    wanted["embed"] = SimpleNamespace(shape=(9, 4))
    assert sentence(load_weights, path, wanted) == (f"the weights {path} hold embed with shape (7, 4), this model has (9, 4)")
    wanted = shapes_of(tree) | {"head": SimpleNamespace(shape=(4, 7))}
    assert "lack head of shape (4, 7)" in sentence(load_weights, path, wanted)
    wanted = shapes_of(tree)
    del wanted["norm_f"]
    assert "hold norm_f of shape (4,), which this model has not" in sentence(load_weights, path, wanted)
    wanted = shapes_of(tree)
    wanted["embed"] = SimpleNamespace(shape=(4, 7))
    assert "(7, 4), this model has (4, 7)" in sentence(load_weights, path, wanted)


def test_another_dtype_is_refused(tmp_path):
    (tmp_path / "w").write_bytes(flax.serialization.msgpack_serialize({"a": np.zeros(4, np.int32)}))
    assert "as int32, expected float32" in sentence(load_weights, tmp_path / "w", {"a": np.zeros(4)})


def test_a_missing_file_is_a_sentence(tmp_path):
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


def test_no_flipped_byte_ends_in_a_traceback(tmp_path):
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
    assert "damaged or no weights at all" in sentence(load_weights, tmp_path / "w", {"a": np.zeros(4)})


def test_a_file_of_the_wrong_size_is_listed_without_being_held(tmp_path, monkeypatch):
    save_weights(tmp_path / "w", {"a": np.zeros(1000), "b": np.zeros(1000)})
    kept = []
    unpack = run_module._unpack
    monkeypatch.setattr(run_module, "_unpack", lambda path, keep: kept.append(keep) or unpack(path, keep))
    sentence(load_weights, tmp_path / "w", {"a": np.zeros(1000)})
    assert kept == [False]


# --- the router's calibration

NUMBERS = dict(zip(MEASURED, (0.25, 0.0, 2, 3.5, 1.75, 1e-6, 4.5), strict=True))


@pytest.fixture
def calibrated(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.weights.write_bytes(b"some weights")
    save_router_calibration(run, {"weights": weights_digest(run), "tokens": 9, "measured": NUMBERS, "shares": {"guide": {}}})
    return run


def test_a_calibration_comes_back(calibrated):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_router_calibration(calibrated) == NUMBERS
    stored = json.loads(calibrated.router.read_text(encoding="utf-8"))
    assert calibrated.router.name == "router.json"
    assert stored["version"] == 1 and stored["tokens"] == 9 and stored["shares"] == {"guide": {}}
    assert stored["weights"] == hashlib.sha256(b"some weights").hexdigest()
    assert RouterSection(router_preset="calibrated").numbers(load_router_calibration(calibrated))["high_entropy"] == 3.5


def test_a_run_that_was_not_calibrated_has_no_numbers(tmp_path):
    assert load_router_calibration(RunDirectory(tmp_path)) is None


def test_other_weights_are_told_of(calibrated):
    save_weights(calibrated.weights, some_weights())
    with pytest.warns(UserWarning, match="was measured on other weights: run `dantinox calibrate --run_dir") as caught:
        assert load_router_calibration(calibrated) == NUMBERS
    assert len(caught) == 1 and str(calibrated.router) in str(caught[0].message)
    calibrated.weights.unlink()
    assert "cannot read" in sentence(load_router_calibration, calibrated)


def test_weights_are_hashed_once_while_they_stay_as_they_are(tmp_path, monkeypatch):
    run, hashed = RunDirectory(tmp_path), []
    hash_file = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(name) or hash_file(file, name))
    for content in (b"first", b"other"):  # of the same size
        atomic_write(run.weights, content)
        assert {weights_digest(RunDirectory(tmp_path)) for _ in range(3)} == {hashlib.sha256(content).hexdigest()}
    assert hashed == ["sha256"] * 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda record: record.pop("version"), "version"),
        (lambda record: record.update(version=2), "version"),
        (lambda record: record.update(weights=None), "weights"),
        (lambda record: record.pop("measured"), "measured"),
        (lambda record: record.update(measured=[1, 2]), "measured"),
        (lambda record: record["measured"].pop("clarify_entropy"), "measured: clarify_entropy"),
        (lambda record: record["measured"].update(temperature_max=2.0), "measured: temperature_max"),
        (lambda record: record["measured"].update({"x\n" * 500: 2.0}), "measured: x"),
        (lambda record: record["measured"].update(low_entropy=-0.1), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy=None), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy="1"), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy=True), "measured: low_entropy"),
        (lambda record: record["measured"].update(high_varentropy=float("nan")), "measured: high_varentropy"),
        (lambda record: record["measured"].update(high_varentropy=float("inf")), "measured: high_varentropy"),
        (lambda record: record["measured"].update(high_varentropy=10**400), "measured: high_varentropy"),
        (lambda record: record["measured"].update(entropy_scale=0), "measured: entropy_scale"),
        (lambda record: record["measured"].update(varentropy_scale=float("nan")), "measured: varentropy_scale"),
    ],
)
def test_wrong_numbers_are_refused_by_name(calibrated, change, part):
    record = json.loads(calibrated.router.read_bytes())
    change(record)
    calibrated.router.write_text(json.dumps(record), encoding="utf-8")
    told = sentence(load_router_calibration, calibrated)
    assert f"({part}" in told and str(calibrated.router) in told and "dantinox calibrate" in told and len(told) < 700


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"version": 1, "weights": "' + b"9" * 9000,
        b'{"version":' + b"9" * 9000,
    ],
    ids=["empty", "bytes", "half", "list", "null", "deep", "cut off", "long number"],
)
def test_what_is_no_calibration_is_one_sentence(calibrated, content):
    calibrated.router.write_bytes(content)
    assert "dantinox calibrate" in sentence(load_router_calibration, calibrated)


def test_a_huge_calibration_is_not_read(calibrated, monkeypatch):
    with open(calibrated.router, "ab") as file:
        file.truncate(1 << 40)  # a sparse file: reading it would fill the memory
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    assert "larger than 1 MiB" in sentence(load_router_calibration, calibrated)


def test_a_calibration_that_cannot_be_read_or_written_is_one_sentence(calibrated):
    calibrated.router.unlink()
    calibrated.router.mkdir()
    assert "cannot read" in sentence(load_router_calibration, calibrated)
    assert "cannot write" in sentence(save_router_calibration, calibrated, {})
    with pytest.raises(ValueError):
        save_router_calibration(calibrated, {"tokens": float("nan")})

"""Tests metric files: numbers read back bitwise, and a truncated and continued log equals that of
an uninterrupted run.
"""

import errno
import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dantinox.report.metric_files as metrics
from dantinox.config import UserError
from dantinox.report import MetricsLog, read_csv, read_jsonl
from dantinox.report.metric_files import COLUMNS, csv_columns, jsonl_columns
from tests.error_texts import ERRORS


@pytest.fixture
def log(tmp_path):
    return MetricsLog(tmp_path / "training_log.csv", tmp_path / "metrics.jsonl")


def fill(log, steps):
    for step in steps:
        log.event("interval", {"step": step, "train_loss": 1 / step})
        if step % 20 == 0:
            log.evaluation({"step": step, "train_loss": 1 / step, "val_loss": 2 / step})


def test_the_first_columns_do_not_change(log):
    log.evaluation({"step": 1, "val_loss": 2.5})
    header, row = log.path_csv.read_text().splitlines()
    assert header.startswith("step,train_loss,val_loss,ms_per_step,lr,")
    assert header == ",".join(COLUMNS)
    assert row == "1,,2.5" + "," * (len(COLUMNS) - 3)


def test_intervals_are_only_in_the_json_lines(log):
    fill(log, (10, 20))
    assert [row["step"] for row in read_csv(log.path_csv)] == [20]
    assert [(row["kind"], row["step"]) for row in read_jsonl(log.path_jsonl)] == [
        ("interval", 10),
        ("interval", 20),
        ("evaluation", 20),
    ]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip(tmp_path_factory, value):
    directory = tmp_path_factory.mktemp("log")
    log = MetricsLog(directory / "a.csv", directory / "a.jsonl")
    log.evaluation({"step": 3, "val_loss": value})
    assert read_csv(log.path_csv) == [{"step": 3, "val_loss": value}]
    assert read_jsonl(log.path_jsonl) == [{"kind": "evaluation", "step": 3, "val_loss": value}]


def test_numpy_scalars_are_numbers(log):
    log.evaluation({"step": np.int64(4), "val_loss": np.float32(0.1)})
    assert read_csv(log.path_csv) == [{"step": 4, "val_loss": float(np.float32(0.1))}]


def test_nan_is_null_in_json_and_nan_in_the_csv(log):
    log.evaluation({"step": 1, "val_loss": float("nan"), "train_loss": float("inf")})
    assert json.loads(log.path_jsonl.read_text(), parse_constant=pytest.fail)["val_loss"] is None
    assert ",nan," in log.path_csv.read_text()


def test_an_unknown_column_raises(log):
    with pytest.raises(ValueError, match=ERRORS["unknown_columns_loss"]):
        log.evaluation({"step": 1, "loss": 2.0})


def test_other_columns_in_the_file_raise_a_user_error(log):
    log.path_csv.write_text("step,loss\n")
    with pytest.raises(UserError, match=ERRORS["has_the_columns_step_loss"]):
        log.evaluation({"step": 1})


def test_a_log_of_an_older_version_keeps_its_columns(log):
    older = metrics.HEADER.removesuffix(",mfu,muon_lr,reward,val_reward")
    log.path_csv.write_text(f"{older}\n")
    log.evaluation({"step": 1, "val_loss": 2.0, "mfu": 0.5})
    assert read_csv(log.path_csv) == [
        {"step": 1, "val_loss": 2.0}
    ] and log.path_csv.read_text().startswith(f"{older}\n1,")


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize("step", [0, 9, 10, 19, 20, 25, 39, 40])
def test_a_truncated_and_continued_log_equals_the_uninterrupted_one(tmp_path, step, name):
    """Whatever suffix `logging.log_file` has."""
    one = MetricsLog(tmp_path / f"one_{name}", tmp_path / "one.jsonl")
    two = MetricsLog(tmp_path / f"two_{name}", tmp_path / "two.jsonl")
    steps = range(10, 61, 10)
    fill(one, steps)
    fill(two, steps[:4])
    two.truncate(step)
    fill(two, [s for s in steps if s > step])
    assert two.path_csv.read_bytes() == one.path_csv.read_bytes()
    assert two.path_jsonl.read_bytes() == one.path_jsonl.read_bytes()


def test_a_log_truncated_at_any_byte_is_repaired(tmp_path, monkeypatch):
    monkeypatch.setattr(
        metrics.os, "fsync", lambda number: None
    )  # called hundreds of times: do not wait for the disk
    whole = MetricsLog(tmp_path / "whole.csv", tmp_path / "whole.jsonl")
    fill(whole, range(10, 41, 10))
    csv_bytes, json_bytes = whole.path_csv.read_bytes(), whole.path_jsonl.read_bytes()
    damaged = MetricsLog(tmp_path / "torn.csv", tmp_path / "torn.jsonl")
    for size in range(len(csv_bytes)):
        damaged.path_csv.write_bytes(csv_bytes[:size])
        damaged.truncate(20)
        rest = damaged.path_csv.read_bytes()
        assert (
            csv_bytes.startswith(rest) and (not rest or rest.endswith(b"\n")) and len(rest) <= size
        )
    for size in range(len(json_bytes)):
        damaged.path_jsonl.write_bytes(json_bytes[:size] + b"\0\0\0")
        damaged.truncate(40)
        rest = damaged.path_jsonl.read_bytes()
        assert json_bytes.startswith(rest) and len(rest) <= size


def test_nothing_to_truncate_rewrites_nothing(log):
    log.truncate(5)
    assert not log.path_csv.exists()
    fill(log, (10, 20))
    before = [path.stat().st_ino for path in (log.path_csv, log.path_jsonl)]
    log.truncate(20)
    assert [path.stat().st_ino for path in (log.path_csv, log.path_jsonl)] == before


def test_a_full_disk_and_a_deleted_directory_raise_a_user_error(log, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics.os, "fsync", full)
    with pytest.raises(UserError, match=ERRORS["cannot_write_metrics_jsonl_no"]):
        log.event("interval", {"step": 1})
    gone = MetricsLog(tmp_path / "gone" / "a.csv", tmp_path / "gone" / "a.jsonl")
    with pytest.raises(UserError, match=ERRORS["cannot_write_a_csv_no"]):
        gone.evaluation({"step": 1})


def test_a_file_that_is_not_a_log_raises_a_user_error(log):
    for content in (b"step,loss\n1,abc\n", b"\xff\xfe", b"a\n1,2,3\n", b'{"a": 1}\n{\n'):
        log.path_csv.write_bytes(content)
        for read in (read_csv, read_jsonl):
            try:
                read(log.path_csv)
            except UserError as error:
                assert len(str(error).splitlines()) == 1
            else:
                assert read is read_csv and b"{" in content, (read, content)


def test_columns_equal_the_rows_of_a_log_of_several_blocks(log, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK_BYTES", 100)
    rows = [
        {"step": i, "train_loss": 1 / i, "tokens": 100 * i} | ({"val_reward": -i} if i % 2 else {})
        for i in range(1, 9)
    ]
    for row in rows:
        log.evaluation(row)
        log.event("interval", row | {"train_loss": float("nan")})
    names = ("tokens", "train_loss", "val_reward", "unknown")
    wanted = {name: [row.get(name, np.nan) for row in rows] for name in names}
    with open(log.path_csv, "a") as csv_file, open(log.path_jsonl, "a") as jsonl_file:
        csv_file.write("9,1")
        jsonl_file.write('{"kind": "inter')
    evaluations = csv_columns(log.path_csv, names)
    intervals = jsonl_columns(log.path_jsonl, "interval", names)
    for name in names:
        np.testing.assert_array_equal(evaluations[name], wanted[name])
        np.testing.assert_array_equal(
            intervals[name], [np.nan] * 8 if name == "train_loss" else wanted[name]
        )
    assert csv_columns(log.path_csv, ("unknown",))["unknown"].shape == (8,)


def test_columns_of_a_missing_log_are_empty(tmp_path):
    for columns in (
        csv_columns(tmp_path / "no.csv", ("step",)),
        jsonl_columns(tmp_path / "no.jsonl", "interval", ("step",)),
    ):
        assert columns["step"].shape == (0,)


def test_a_named_pipe_is_no_log(log):
    """Reading it would never end."""
    os.mkfifo(log.path_csv)
    os.mkfifo(log.path_jsonl)
    readers = [
        lambda: csv_columns(log.path_csv, ("step",)),
        lambda: jsonl_columns(log.path_jsonl, "interval", ("step",)),
    ]
    readers += [
        lambda: read_csv(log.path_csv),
        lambda: read_jsonl(log.path_jsonl),
        lambda: log.truncate(1),
    ]
    for read in readers:
        with pytest.raises(UserError, match=ERRORS["is_not_a_regular_file"]):
            read()


@pytest.mark.parametrize(
    "content",
    [b"step,loss\n1,abc\n", b"step\n1,2,3\n", b"step,loss\n1\n2,3,4\n", b"step\n\xff\xfe\n"],
)
def test_columns_of_a_damaged_log_raise_a_user_error(log, content):
    log.path_csv.write_bytes(content)
    with pytest.raises(UserError, match=ERRORS["is_not_a_training_log"]):
        csv_columns(log.path_csv, ("step", "loss"))


@pytest.mark.parametrize(
    "content",
    [
        b"{\n",
        b"[1]\n",
        b'{"kind": "interval", "step": "x"}\n',
        b"{}, {}]\n",
        b"\xff\n",
        b'{"kind": "interval", "step": 1%s}\n' % (b"0" * 400),
        b"[" * 100_000 + b"\n",
    ],
)
def test_columns_of_damaged_json_lines_raise_a_user_error(log, content):
    log.path_jsonl.write_bytes(content)
    with pytest.raises(UserError, match=ERRORS["is_not_json_lines"]):
        jsonl_columns(log.path_jsonl, "interval", ("step",))

"""The router calibration file: its numbers are read or refused in one sentence; other weights print
a warning.
"""

import hashlib
import json
import warnings
from pathlib import Path

import pytest

from dantinox.config.router_settings import CALIBRATED_THRESHOLDS, RouterSection
from dantinox.files import atomic_write
from dantinox.run import (
    RunDirectory,
    load_router_calibration,
    manifest,
    save_router_calibration,
    save_weights,
    verify_run,
    weights_digest,
)
from dantinox.run.manifest import hash_file
from tests.error_texts import ERRORS

from .small import sentence, some_weights

NUMBERS = dict(zip(CALIBRATED_THRESHOLDS, (0.25, 0.0, 2, 3.5, 1.75, 1e-6, 4.5), strict=True))


@pytest.fixture
def calibrated(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.weights.write_bytes(b"some weights")
    save_router_calibration(
        run,
        {"weights": weights_digest(run), "tokens": 9, "measured": NUMBERS, "shares": {"guide": {}}},
    )
    return run


def test_a_calibration_round_trips(calibrated):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_router_calibration(calibrated) == NUMBERS
    stored = json.loads(calibrated.router.read_text(encoding="utf-8"))
    assert calibrated.router.name == "router.json"
    assert stored["version"] == 1 and stored["tokens"] == 9 and stored["shares"] == {"guide": {}}
    assert stored["weights"] == hashlib.sha256(b"some weights").hexdigest()
    assert (
        RouterSection(router_preset="calibrated").numbers(load_router_calibration(calibrated))[
            "high_entropy"
        ]
        == 3.5
    )


def test_a_run_without_calibration_returns_none(tmp_path):
    assert load_router_calibration(RunDirectory(tmp_path)) is None


def test_other_weights_print_a_warning(calibrated):
    save_weights(calibrated.weights, some_weights())
    with pytest.warns(UserWarning, match=ERRORS["was_measured_on_other_weights"]) as caught:
        assert load_router_calibration(calibrated) == NUMBERS
    assert len(caught) == 1 and str(calibrated.router) in str(caught[0].message)
    calibrated.weights.unlink()
    assert "cannot read" in sentence(load_router_calibration, calibrated)


def test_unchanged_weights_are_hashed_once(tmp_path, monkeypatch):
    run, hashed = RunDirectory(tmp_path), []
    monkeypatch.setattr(manifest, "hash_file", lambda path: hashed.append(path) or hash_file(path))
    for content in (b"first", b"other"):  # equal size
        atomic_write(run.weights, content)
        assert {weights_digest(RunDirectory(tmp_path)) for _ in range(3)} == {
            hashlib.sha256(content).hexdigest()
        }
    assert hashed == [run.weights] * 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda record: record.pop("version"), "version"),
        (lambda record: record.update(version=2), "version"),
        (lambda record: record.update(weights=None), "weights"),
        (lambda record: record.pop("measured"), "measured"),
        (lambda record: record.update(measured=[1, 2]), "measured"),
        (lambda record: record["measured"].pop("clarify_entropy"), "measured: clarify_entropy"),
        (
            lambda record: record["measured"].update(temperature_max=2.0),
            "measured: temperature_max",
        ),
        (lambda record: record["measured"].update({"x\n" * 500: 2.0}), "measured: x"),
        (lambda record: record["measured"].update(low_entropy=-0.1), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy=None), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy="1"), "measured: low_entropy"),
        (lambda record: record["measured"].update(low_entropy=True), "measured: low_entropy"),
        (
            lambda record: record["measured"].update(high_varentropy=float("nan")),
            "measured: high_varentropy",
        ),
        (
            lambda record: record["measured"].update(high_varentropy=float("inf")),
            "measured: high_varentropy",
        ),
        (
            lambda record: record["measured"].update(high_varentropy=10**400),
            "measured: high_varentropy",
        ),
        (lambda record: record["measured"].update(entropy_scale=0), "measured: entropy_scale"),
        (
            lambda record: record["measured"].update(varentropy_scale=float("nan")),
            "measured: varentropy_scale",
        ),
    ],
)
def test_invalid_numbers_are_refused_by_name(calibrated, change, part):
    record = json.loads(calibrated.router.read_bytes())
    change(record)
    calibrated.router.write_text(json.dumps(record), encoding="utf-8")
    message = sentence(load_router_calibration, calibrated)
    assert (
        (f"({part}" in message or f" lacks {part}: " in message)
        and str(calibrated.router) in message
        and "dantinox calibrate" in message
        and len(message) < 700
    )


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
def test_other_files_raise_one_sentence(calibrated, content):
    calibrated.router.write_bytes(content)
    assert "dantinox calibrate" in sentence(load_router_calibration, calibrated)


def test_a_huge_calibration_is_not_read(calibrated, monkeypatch):
    with open(calibrated.router, "ab") as file:
        file.truncate(1 << 40)  # a sparse file: reading it would fill the memory
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    assert "larger than 1 MiB" in sentence(load_router_calibration, calibrated)


def test_an_unreadable_or_unwritable_calibration_raises_one_sentence(calibrated):
    calibrated.router.unlink()
    calibrated.router.mkdir()
    assert "no calibration at" in sentence(load_router_calibration, calibrated)
    assert "cannot write" in sentence(save_router_calibration, calibrated, {})
    with pytest.raises(ValueError):
        save_router_calibration(calibrated, {"tokens": float("nan")})


def test_a_changed_number_is_detected_as_damage(calibrated):
    content = calibrated.router.read_text(encoding="utf-8")
    calibrated.router.write_text(content.replace("3.5", "3.6"), encoding="utf-8")
    message = sentence(load_router_calibration, calibrated)
    assert (
        f"the calibration {calibrated.router} is damaged: its SHA-256" in message
        and "dantinox calibrate" in message
    )
    assert any(str(calibrated.router) in problem for problem in verify_run(calibrated).damage)

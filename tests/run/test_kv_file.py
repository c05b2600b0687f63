"""The file with head statistics: both formats are read; other files and files of other models raise
one sentence.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dantinox.config import ModelConfig
from dantinox.run import (
    RunDirectory,
    head_names,
    load_kv_calibration,
    read_kv_calibration,
    save_kv_calibration,
)

from .small import sentence

SAMPLE = Path(__file__).parent / "kv_entropy_v1.json"
CONFIG = ModelConfig(
    vocab_size=80,
    dim=256,
    n_heads=4,
    kv_heads=2,
    head_size=64,
    num_blocks=2,
    hidden_dim=512,
    max_context=2048,
    windows=(None, None),
)
ENTROPIES = [[0.21, 1.94, 0.77, 3.12], [1.35, 0.46, 2.58, 1.08]]  # of the sample file


def record() -> dict:
    """The record of a calibration in format 2."""
    names = head_names(2, 4, "H")
    return {
        "model": "toy",
        "n_layer": 2,
        "n_head": 4,
        "n_head_kv": 2,
        "n_ctx": 2048,
        "head_entropies": dict(zip(names, np.ravel(ENTROPIES).tolist(), strict=True)),
        "lengths": [16, 32.5],
        "length_entropies": {name: [0.1 * i, 0.2 * i] for i, name in enumerate(names)},
        "coverage": {name: 1 + i / 2 for i, name in enumerate(names)},
        "distance": {name: 10.0 * i for i, name in enumerate(names)},
        "split_half_correlation": 0.975,
        "tokens": 640,
        "sequences": 20,
        "seed": 0,
        "tokenizer": "ab" * 32,
        "weights": "cd" * 32,
    }


@pytest.fixture
def path(tmp_path) -> Path:
    save_kv_calibration(tmp_path / "kv_entropy.json", record())
    return tmp_path / "kv_entropy.json"


def changed(path, change):
    """Writes the file after `change(record)`."""
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_format_2_round_trips(path):
    assert RunDirectory(path.parent).kv == path
    assert json.loads(path.read_bytes()) == {"format_version": 2, **record()}
    for weights in ("cd" * 32, None):
        found = load_kv_calibration(path, CONFIG, weights)
        np.testing.assert_array_equal(found.entropy_LN, ENTROPIES)
        np.testing.assert_array_equal(found.coverage_LN, [[1, 1.5, 2, 2.5], [3, 3.5, 4, 4.5]])
        np.testing.assert_array_equal(found.distance_LN, [[0, 10, 20, 30], [40, 50, 60, 70]])
        np.testing.assert_array_equal(found.signal("entropy"), ENTROPIES)
        assert found.loss_LKC is None and found.path == path
    assert read_kv_calibration(path, CONFIG, None) == {"format_version": 2, **record()}


def test_format_1_is_read():
    found = load_kv_calibration(SAMPLE, CONFIG, "cd" * 32)  # the file names no weights
    np.testing.assert_array_equal(found.entropy_LN, ENTROPIES)
    assert found.coverage_LN is None and found.loss_LKC is None
    message = read_kv_calibration(SAMPLE, CONFIG, None)
    assert (
        message["format_version"] == 1
        and message["calibration"]["n_sequences"] == 20
        and "model_info" not in message
    )


def test_heads_are_sorted(path):
    names = [f"L{layer}_H{head}" for layer in range(2) for head in range(4)]
    changed(path, lambda tree: tree.update(coverage=dict(reversed(tree["coverage"].items()))))
    np.testing.assert_array_equal(
        load_kv_calibration(path, CONFIG, None).coverage_LN.ravel(), np.arange(2, 10) / 2
    )
    assert list(read_kv_calibration(path, CONFIG, None)["coverage"]) == names


def test_loss_is_per_key_head(path):
    rises = {"L0_K0": [1, 0], "L0_K1": [0.5, 0], "L1_K0": [-0.1, 0], "L1_K1": [0.25, 0]}
    changed(path, lambda tree: tree.update(loss=rises, loss_slots=[8, 64]))
    found = load_kv_calibration(path, CONFIG, None)
    np.testing.assert_array_equal(
        found.signal("loss"), [[[1, 0], [0.5, 0]], [[-0.1, 0], [0.25, 0]]]
    )
    assert found.loss_slots == (8, 64)
    for slots, message in (
        ([8], "has 2 numbers for L0_K0 in loss, expected 1"),
        ([64, 8], "has loss_slots that do not increase"),
    ):
        changed(path, lambda tree, slots=slots: tree.update(loss_slots=slots))
        assert message in sentence(load_kv_calibration, path, CONFIG, None)
    changed(path, lambda tree: tree.update(loss_slots=[8, 64]))
    changed(path, lambda tree: tree["loss"].pop("L1_K1"))
    assert "lacks L1_K1 in loss, a head of this model" in sentence(
        load_kv_calibration, path, CONFIG, None
    )


def test_a_missing_signal_names_the_command(path):
    found = load_kv_calibration(SAMPLE, CONFIG, None)
    for name in ("coverage", "loss"):
        message = sentence(found.signal, name)
        again = "run `dantinox calibrate --run_dir RUN --what kv` again, or set another kv.signal"
        assert message == f"the calibration {SAMPLE} holds no {name}: {again}"
    changed(path, lambda tree: tree.pop("coverage"))
    message = sentence(load_kv_calibration(path, CONFIG, None).signal, "coverage")
    assert message.endswith(
        f"holds no coverage: run `dantinox calibrate --run_dir {path.parent} --what kv` again, or"
        " set another kv.signal"
    )


def test_another_model_is_reported_with_both_counts(path):
    for change in ({"num_blocks": 3, "windows": (None,) * 3}, {"n_heads": 8}, {"kv_heads": 4}):
        other = replace(CONFIG, **change)
        counts = (
            f"{other.num_blocks} layers with {other.n_heads} query heads and {other.kv_heads}"
            " key heads"
        )
        for file in (path, SAMPLE):
            assert (
                sentence(load_kv_calibration, file, other, None)
                == f"the calibration {file} is for another model: it has 2 layers with 4 query"
                f" heads and 2 key heads, this model has {counts}"
            )


def test_other_weights_are_refused(path):
    message = sentence(load_kv_calibration, path, CONFIG, "ce" * 32)
    assert message.startswith(
        f"the calibration {path} was measured on other weights: run `dantinox calibrate --run_dir"
        f" {path.parent}"
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "count", ["n_layer", "n_head", "n_head_kv", "head_entropies", "format_version"]
)
def test_a_file_without_counts_is_refused(path, version, count):
    def change(tree):
        tree["format_version"] = version
        del tree[count]

    assert f"the calibration {path} lacks {count}: run" in sentence(
        load_kv_calibration, changed(path, change), CONFIG, None
    )


@pytest.mark.parametrize("key", ["head_entropies", "coverage", "length_entropies"])
def test_missing_and_unexpected_heads_are_named(path, key):
    def change(tree):
        del tree[key]["L0_H2"], tree[key]["L1_H3"]

    assert f"lacks L0_H2 in {key}, a head of this model" in sentence(
        load_kv_calibration, changed(path, change), CONFIG, None
    )

    def surplus(tree):
        tree[key] |= dict.fromkeys(("L0_H2", "L1_H3", "L2\n_H0" * 50), tree[key]["L0_H0"])

    message = sentence(load_kv_calibration, changed(path, surplus), CONFIG, None)
    assert (
        "holds L2\\n_H0" in message
        and f"in {key}, which this model does not have" in message
        and len(message) < 500
    )


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -0.01, 1e10, "1", True, None, [1], 10**400]
)
@pytest.mark.parametrize("key", ["head_entropies", "coverage"])
def test_invalid_values_are_refused_by_name(path, key, value):
    changed(path, lambda tree: tree[key].update(L1_H2=value))
    message = sentence(load_kv_calibration, path, CONFIG, None)
    assert (
        f"is invalid ({key}: L1_H2: " in message
        and "dantinox calibrate" in message
        and len(message) < 700
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tree: tree.update(format_version=3), "(format_version: "),
        (lambda tree: tree.update(n_layer=0), "(n_layer: "),
        (lambda tree: tree.update(n_head=4.5), "(n_head: "),
        (lambda tree: tree.update(head_entropies=[1, 2]), "(head_entropies: "),
        (lambda tree: tree.update(split_half_correlation=1.5), "(split_half_correlation: "),
        (lambda tree: tree.update(weights=7), "(weights: "),
        (lambda tree: tree.update(calibration=[]), "(calibration: "),
        (
            lambda tree: tree["length_entropies"].update(L0_H1=[1.0]),
            "1 numbers for L0_H1 in length_entropies, expected 2",
        ),
        (lambda tree: tree.pop("lengths"), "2 numbers for L0_H0 in length_entropies, expected 0"),
    ],
)
def test_other_invalid_values_are_refused(path, change, part):
    assert part in sentence(load_kv_calibration, changed(path, change), CONFIG, None)


def test_null_means_not_measured(path):
    changed(
        path,
        lambda tree: tree.update(
            coverage=None, split_half_correlation=None, lengths=None, length_entropies=None
        ),
    )
    assert load_kv_calibration(path, CONFIG, None).coverage_LN is None
    assert not {"coverage", "split_half_correlation", "lengths"} & set(
        read_kv_calibration(path, CONFIG, None)
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
        b'{"format_version":' + b"9" * 9000,
        b"\x93NUMPY",
    ],
    ids=["empty", "bytes", "half", "list", "null", "deep", "long number", "binary"],
)
def test_other_files_raise_one_sentence(path, content):
    path.write_bytes(content)
    message = sentence(load_kv_calibration, path, CONFIG, None)
    assert (
        ("is invalid (" in message or "is not UTF-8 text" in message)
        and "--what kv` again" in message
        and len(message) < 700
    )


def test_a_huge_file_is_not_read(path, monkeypatch):
    with open(path, "ab") as file:
        file.truncate(1 << 40)  # a sparse file: reading it would fill the memory
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    assert "larger than 16 MiB" in sentence(load_kv_calibration, path, CONFIG, None)


def test_an_unreadable_or_unwritable_file_raises_one_sentence(tmp_path):
    assert "no calibration at" in sentence(
        load_kv_calibration, tmp_path / "none.json", CONFIG, None
    )
    assert "it is a directory" in sentence(load_kv_calibration, tmp_path, CONFIG, None)
    assert "cannot write" in sentence(save_kv_calibration, tmp_path, record())
    with pytest.raises(ValueError):
        save_kv_calibration(tmp_path / "a.json", record() | {"tokens": float("nan")})
    assert not (tmp_path / "a.json").exists()

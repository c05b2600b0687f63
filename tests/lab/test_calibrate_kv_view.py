"""Lines and plot of a calibration of attention heads, from handwritten records."""

import struct
import sys

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.lab.measure.calibrate_kv import HEAD_TYPES, HeadCalibration
from dantinox.lab.measure.calibrate_kv_view import draw_kv_calibration, kv_calibration_lines
from tests.error_texts import ERRORS


def make(layers, heads, **more):
    entropies = np.linspace(0, 5, layers * heads).reshape(layers, heads)
    names = [f"L{layer}_H{head}" for layer in range(layers) for head in range(heads)]
    counts = np.histogram(entropies, [0, 0.5, 1.5, 3, 4, 99])[0].tolist()
    return HeadCalibration(
        format_version=2,
        model="run",
        n_layer=layers,
        n_head=heads,
        n_head_kv=heads,
        n_ctx=128,
        model_info={},
        head_entropies=dict(zip(names, entropies.ravel().tolist(), strict=True)),
        head_types=dict(zip(HEAD_TYPES, counts, strict=True)),
        entropy_stats={},
        **more,
    )


MORE = {
    "tokens": 2560,
    "sequences": 20,
    "lengths": [32, 64, 96, 128.0],
    "length_entropies": {"L0_H0": [1, 2, 3, 4], "L0_H1": [2, 3, 4, 6]},
    "split_half_correlation": 0.9756,
}


def test_all_heads_if_they_fit_in_a_row():
    record = make(3, 4, **MORE)
    lines = list(kv_calibration_lines(record, 80))
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).startswith(
        "entropy of the attention of 4 heads in each of 3 layers, in bits, on 20 sequences of 2,560"
    )
    rows = [line.split() for line in lines]
    table = rows.index(["layer", "H0", "H1", "H2", "H3"])
    for layer, values in enumerate(record.heads("head_entropies")):
        assert rows[table + 1 + layer] == [str(layer), *(f"{value:.2f}" for value in values)]
    assert ["sink", "<", "0.5", "bits", "2", "16.7%"] in rows and [
        "diffuse",
        "≥",
        "4",
        "bits",
        "3",
        "25.0%",
    ] in rows
    assert (
        "mean entropy by number of tokens up to the query: 1.50 at 32, 2.50 at 64, 3.50 at 96, 5.00"
        " at 128" in " ".join(lines)
    )
    assert "between odd and even sequences: 0.976" in " ".join(lines)
    assert "95 %" not in " ".join(lines)  # coverage was not measured


@pytest.mark.parametrize("width", [30, 80, 200])
def test_spread_if_there_are_many_heads(width):
    record = make(24, 64, coverage=make(24, 64).head_entropies)
    lines = list(kv_calibration_lines(record, width))
    assert max(map(len, lines)) <= max(width, 40)
    rows = [line.split() for line in lines]
    values = record.heads("head_entropies")[23]
    spread = [values.min(), np.median(values), values.mean(), values.max()]
    assert ["layer", "min", "median", "mean", "max"] in rows and [
        "23",
        *(f"{value:.2f}" for value in spread),
    ] in rows
    text = " ".join(lines)
    assert "keys that hold 95 % of a head's attention: 2.5 on average, from 0.0 to 5.0" in text
    assert "correlation" not in text and "sequences" not in text


def test_lines_explain_how_to_use_the_file(tmp_path):
    used = (
        "--kv_budget 0.3 divides the cache slots among the heads, with"
        " --kv_signal entropy by their entropy"
    )
    assert f"saved in the run directory: {used}" in " ".join(kv_calibration_lines(make(1, 2)))
    text = "".join(
        kv_calibration_lines(make(1, 2), 80, tmp_path / "a.json")
    )  # a long path wraps at its hyphens
    assert (
        f"saved in {tmp_path / 'a.json'}".replace(" ", "") in text.replace(" ", "")
        and "--kv_calibration" in text
    )


LOSS = {
    "loss": {"L0_K0": [0.01, 0], "L0_K1": [-0.001, 0], "L1_K0": [0.301, 0], "L1_K1": [0.02, 0]},
    "loss_slots": [32, 512],
}


def test_lines_contain_measured_loss_rises():
    text = " ".join(kv_calibration_lines(make(2, 4, **LOSS)))
    assert "sees at most 32 tokens: +0.0150 for the median head, at most +0.3010, for L1_K0" in text
    used = (
        "with --kv_signal loss by the loss that eviction causes, with"
        " --kv_signal entropy by their entropy"
    )
    assert (
        "saved in the run directory: --kv_budget 0.3 divides the cache slots among the heads,"
        f" {used}" in text
    )


@pytest.mark.parametrize(
    ("size", "more", "width"), [((1, 1), {}, 1350), ((2, 4), LOSS, 1950), ((24, 16), {}, 1350)]
)
def test_plot(size, more, width):
    pytest.importorskip("matplotlib")
    data = draw_kv_calibration(make(*size, **more))
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and struct.unpack(">II", data[16:24]) == (
        width,
        630,
    )


def test_error_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match=ERRORS["pip_install_dantinox_plot"]):
        draw_kv_calibration(make(1, 2))

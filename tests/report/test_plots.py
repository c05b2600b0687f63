"""Tests the plots of losses."""

import sys

import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.report import MetricsLog, plot_loss
from dantinox.report.plots import BY, plot_runs, thinned
from tests.error_texts import ERRORS


@pytest.fixture
def log(tmp_path):
    return MetricsLog(tmp_path / "log.csv", tmp_path / "metrics.jsonl")


def test_a_png_is_drawn_despite_missing_and_infinite_values(log, tmp_path):
    pytest.importorskip("matplotlib")
    for step in range(10, 100, 10):
        log.event("interval", {"step": step, "train_loss": 5 / step, "tokens": step * 768})
    log.event("interval", {"step": 100, "train_loss": float("nan")})
    log.evaluation({"step": 50, "val_loss": 0.2})
    log.evaluation({"step": 100, "val_loss": float("inf")})
    out = tmp_path / "plots" / "loss.png"
    plot_loss(log.path_csv, log.path_jsonl, out)
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_one_of_the_two_files_is_enough(log, tmp_path):
    pytest.importorskip("matplotlib")
    log.evaluation({"step": 50, "val_loss": 0.2, "train_loss": 0.3})
    log.path_jsonl.unlink()
    plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize("by", BY)
def test_several_runs_are_drawn_into_one_plot(log, tmp_path, by, monkeypatch):
    """Checks the points after 10 steps of 60 s and 10 of 120 s with 1,000 tokens per step."""
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    lines = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **_: lines.append((list(x), list(y))))
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    for step, ms in ((10, 60_000), (20, 120_000)):
        log.event(
            "interval",
            {"step": step, "train_loss": 5 / step, "tokens": step * 1000, "ms_per_step": ms},
        )
    log.evaluation({"step": 15, "val_loss": 0.2, "tokens": 15_000})
    plot_runs(dict.fromkeys(["one", "two"], (log.path_csv, log.path_jsonl)), by, tmp_path / "a.png")
    x_values = {
        "step": ([10, 20], [15]),
        "tokens": ([10_000, 20_000], [15_000]),
        "time": ([10, 30], [20]),
    }[by]
    assert lines == [(x_values[0], [0.5, 0.25]), (x_values[1], [0.2])] * 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_of_many_runs_has_the_ten_best(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    labels, colors = [], set()
    original = Axes.plot

    def plot(self, x, y, **options):
        labels.append(options["label"])
        colors.add(options["color"])
        return original(self, x, y, **options)

    monkeypatch.setattr(Axes, "plot", plot)
    logs = {}
    for number in range(30):
        log = MetricsLog(tmp_path / f"{number}.csv", tmp_path / f"{number}.jsonl")
        log.evaluation({"step": 10, "val_loss": 5.0 - number})
        log.evaluation({"step": 20, "val_loss": 50.0 - number})
        log.path_jsonl.unlink()
        logs[f"run {number}"] = log.path_csv, log.path_jsonl
    plot_runs(logs, "step", tmp_path / "a.png")
    assert [label for label in labels if label] == [f"run {number}" for number in range(20, 30)]
    assert labels.count(None) == 20 and len(colors) == 11


def test_a_log_without_losses_raises_a_user_error(log, tmp_path):
    with pytest.raises(UserError, match=ERRORS["nothing_to_plot_yet"]):
        plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")


def test_the_error_without_matplotlib_names_the_extra(log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    log.evaluation({"step": 50, "val_loss": 0.2})
    with pytest.raises(UserError, match=ERRORS["pip_install_dantinox_plot_2"]):
        plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")


def test_the_plot_of_a_run_with_rewards_shows_the_rewards(log, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    lines = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **_: lines.append((list(x), list(y))))
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    for step, reward in ((10, 0.25), (20, 0.5)):
        log.event("interval", {"step": step, "train_loss": 0.0, "reward": reward})
        log.evaluation({"step": step, "train_loss": 0.0, "val_reward": reward / 2})
    plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")
    plot_runs({"one": (log.path_csv, log.path_jsonl)}, "step", tmp_path / "b.png")
    assert lines == [([10, 20], [0.25, 0.5]), ([10, 20], [0.125, 0.25])] * 2


def test_a_long_log_is_thinned_to_its_extremes():
    x = np.arange(100_000.0)
    y = np.sin(x / 977) + np.where(x == 54_321, 5, 0)
    thin_x, thin_y = thinned(x, y, 1000)
    assert len(thin_x) == 1000
    assert (np.diff(thin_x) >= 0).all()
    assert set(zip(thin_x, thin_y, strict=True)) <= set(zip(x, y, strict=True))
    for start in range(0, 100_000, 200):
        part, found = y[start : start + 200], thin_y[(thin_x >= start) & (thin_x < start + 200)]
        assert (found.min(), found.max()) == (part.min(), part.max())
    assert thinned(x[:1000], y[:1000], 1000)[0].tolist() == x[:1000].tolist()

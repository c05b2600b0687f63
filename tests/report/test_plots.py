"""The loss curve."""

import sys

import pytest

from dantinox.config import UserError
from dantinox.report import MetricsLog, plot_loss


@pytest.fixture
def log(tmp_path):
    return MetricsLog(tmp_path / "log.csv", tmp_path / "metrics.jsonl")


def test_draws_a_png_also_with_missing_and_infinite_values(log, tmp_path):
    pytest.importorskip("matplotlib")
    for step in range(10, 100, 10):
        log.interval({"step": step, "train_loss": 5 / step, "tokens": step * 768})
    log.interval({"step": 100, "train_loss": float("nan")})
    log.evaluation({"step": 50, "val_loss": 0.2})
    log.evaluation({"step": 100, "val_loss": float("inf")})
    out = tmp_path / "plots" / "loss.png"
    plot_loss(log.path_csv, log.path_jsonl, out)
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_one_file_is_enough(log, tmp_path):
    pytest.importorskip("matplotlib")
    log.evaluation({"step": 50, "val_loss": 0.2, "train_loss": 0.3})
    log.path_jsonl.unlink()
    plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_nothing_to_draw_is_a_sentence(log, tmp_path):
    with pytest.raises(UserError, match="nothing to plot yet"):
        plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")


def test_without_matplotlib_the_extra_is_named(log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    log.evaluation({"step": 50, "val_loss": 0.2})
    with pytest.raises(UserError, match=r"pip install 'dantinox\[plot\]'"):
        plot_loss(log.path_csv, log.path_jsonl, tmp_path / "a.png")

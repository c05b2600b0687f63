import numpy as np
import pytest

from dantinox import cli
from dantinox.config import UserError
from dantinox.training import find_lr as finding
from dantinox.training.find_lr import (
    MAX_FACTOR,
    MIN_FACTOR,
    analyze_losses,
    find_lr,
    rate_test_lines,
)
from tests.error_texts import ERRORS

from .small import Tokens, small_config, small_store


def test_range_test_uses_rates_at_a_constant_factor_and_records_their_losses(monkeypatch):
    config = small_config()
    monkeypatch.setattr(
        finding, "prepare_data", lambda config, *_, **__: (Tokens(), small_store(config))
    )
    found = find_lr(config, 60)
    ratios = np.diff(np.log(found.rates))
    np.testing.assert_allclose(ratios, np.log(MAX_FACTOR / MIN_FACTOR) / 59, rtol=1e-4)
    assert (
        found.rates[0] == pytest.approx(MIN_FACTOR * config.training.muon_lr)
        and found.key == "training.muon_lr"
    )
    assert (
        found.losses[0] == pytest.approx(np.log(11), abs=0.3)
        and min(found.smoothed) < found.losses[0] - 0.2
    )
    assert found.rates[0] < found.steepest <= found.lowest <= found.rates[-1]
    assert rate_test_lines(found)[0].startswith(f"training.muon_lr: try {found.suggested:.2g} (")


def test_analysis_of_a_curve_of_known_shape():
    """The loss falls fastest at 1e-2, is lowest at 1e-1 and diverges above it."""
    x = np.linspace(-4, 1, 200)
    losses = 3 - 2 / (1 + np.exp(-8 * (x + 2))) + 9 * np.maximum(x + 1, 0) ** 2
    found = analyze_losses("training.lr", (10**x).tolist(), losses.tolist())
    delay = (
        9 * 5 / 199
    )  # the running mean lags by SMOOTHING / (1 - SMOOTHING) = 9 steps; here in decades
    assert np.log10(found.steepest) == pytest.approx(-2 + delay, abs=0.15)
    assert np.log10(found.lowest) == pytest.approx(-1 + delay, abs=0.25)
    assert len(found.losses) < 200 and found.smoothed[-1] <= 1.6 * min(found.smoothed)


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        ([4.0, 3.9, 3.0, 1.0, 0.9, 0.89], "training.lr: try 0.01 (the loss fell fastest there)"),
        (
            [4.0, 3.9, 3.8, 1.0, 9.0, 9.0],
            "training.lr: try 0.033 (a third of 0.1, where the loss was lowest)",
        ),
    ],
)
def test_suggested_rate_and_its_reason(monkeypatch, losses, line):
    monkeypatch.setattr(finding, "SMOOTHING", 0.0)
    found = analyze_losses("training.lr", [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0], losses)
    first, *rest = rate_test_lines(found)
    assert first == line and "try" not in " ".join(rest)


def test_errors_without_a_suggestion():
    with pytest.raises(UserError, match=ERRORS["the_loss_never_fell_from"]):
        analyze_losses("training.lr", [0.1, 0.2, 0.3], [2.0, 9.0, float("nan")])
    with pytest.raises(UserError, match=ERRORS["tries_must_be_at_least"]):
        find_lr(small_config(), 3)


def test_command_writes_the_plot(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    found = analyze_losses("training.lr", [0.1, 0.2, 0.3, 0.4], [4.0, 2.0, 1.0, 1.5])
    monkeypatch.setattr(finding, "find_lr", lambda config, steps, progress: found)
    assert cli.main(["find-lr", "--plot", str(tmp_path / "a.png"), "--lr", "0.1"]) == 0
    assert capsys.readouterr().out.startswith(
        "training.lr: try 0.1 (the loss fell fastest there)\n"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

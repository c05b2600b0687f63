"""Text and plot of a router calibration."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dantinox.config.router_settings import (
    CALIBRATED_THRESHOLDS,
    PRESET_NUMBERS,
    RULES,
    strategy_intervals,
)
from dantinox.lab.measure.calibrate_router import RouterCalibration
from dantinox.report.plots import new_figure, to_png
from dantinox.report.tables import percent, side_by_side, wrap_lines

PRESETS = tuple(PRESET_NUMBERS)
# Okabe and Ito's colors, which color-blind readers can distinguish.
COLORS = {
    "greedy": "#0072b2",
    "clarify": "#cc79a7",
    "explore": "#009e73",
    "resample": "#d55e00",
    "adaptive": "#7a808a",
}


def calibration_lines(calibration: RouterCalibration, width: int = 100) -> Iterator[str]:
    """Yields the percentiles, the thresholds and strategy shares of both presets, a summary, and
    how to use the result.
    """
    yield f"entropy H and varentropy V of the model at {calibration.tokens:,} positions of the text"
    yield (
        f"({calibration.skipped:,} more have too little context, or follow the end of a document,"
        " and are not counted)"
    )
    yield ""
    quantiles = zip(
        *(calibration.quantiles[name] for name in ("percent", "entropy", "varentropy")), strict=True
    )
    yield from side_by_side(
        [["%", "H bits", "V bits²"], *([str(at), f"{H:.3f}", f"{V:.3f}"] for at, H, V in quantiles)]
    )
    numbers = {
        preset: [f"{_numbers(calibration, preset)[name]:.3f}" for name in CALIBRATED_THRESHOLDS]
        for preset in PRESETS
    }
    shares = {
        preset: [percent(share) for share in calibration.shares[preset].values()]
        for preset in PRESETS
    }
    for title, names, columns in (
        ("setting", CALIBRATED_THRESHOLDS, numbers),
        ("strategy", calibration.shares[PRESETS[0]], shares),
    ):
        yield ""
        yield from side_by_side(
            [[title, *names], *([preset, *cells] for preset, cells in columns.items())]
        )
    use = "saved in the run directory: --strategy entropy --router_preset calibrated uses it"
    yield from wrap_lines(
        ["", preset_summary(calibration), *unused_strategies(calibration), "", use],
        max(width, 40),
        "",
    )


def preset_summary(calibration: RouterCalibration) -> str:
    """Returns a sentence on the strategies that the two presets choose for this model."""
    V = calibration.vocab_size
    sentence = f"With {V:,} tokens H is at most log2 {V} = {math.log2(V):.2f} bits"
    for preset, link in zip(
        PRESETS, (": the guide's thresholds", "; the calibrated ones"), strict=True
    ):
        shares = calibration.shares[preset]
        most = max(shares, key=shares.__getitem__)
        never = [name for name, share in shares.items() if share == 0]
        sentence += f"{link} give {most} {percent(shares[most])} of the positions and "
        sentence += f"none to {' and '.join(never)}" if never else "use all five strategies"
    return sentence + "."


def unused_strategies(calibration: RouterCalibration) -> Iterator[str]:
    """Yields a sentence for each strategy whose calibrated thresholds no position of the text
    meets.
    """
    numbers = _numbers(calibration, "calibrated")
    for name in RULES:
        if calibration.shares["calibrated"][name] == 0:
            limits = [
                f"{letter} {relation} {numbers[key]:.3g}"
                for letter, (_, relation, key) in zip("HV", RULES[name], strict=True)
            ]
            yield (
                f"problem: none of the {calibration.tokens:,} positions meets the calibrated"
                f" thresholds of {name} ({' and '.join(limits)}): this model"
                " will hardly ever use that strategy"
            )


def draw_calibration(calibration: RouterCalibration) -> bytes:
    """Plots the density of positions over H and V with the strategy regions of each preset."""
    figure = new_figure(9, 4.6)
    panels = figure.subplots(1, len(PRESETS), sharex=True, sharey=True)
    for axes, preset in zip(panels, PRESETS, strict=True):
        _draw(axes, calibration, preset)
    panels[-1].set_ylabel("")
    return to_png(figure)


def _draw(axes: Any, calibration: RouterCalibration, preset: str) -> None:
    """Draws the positions as a density, the strategies of a preset as areas, and the line of the
    largest possible V.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch, Rectangle

    cells = calibration.density
    counts = np.ma.masked_equal(np.asarray(cells["counts"]).T, 0)
    # The axes show all positions and the thresholds of both presets.
    thresholds = [_numbers(calibration, preset) for preset in PRESETS]
    x_max, y_max = (
        1.12
        * max(cells[f"{metric}_edges"][-1], *(numbers[f"high_{metric}"] for numbers in thresholds))
        for metric in ("entropy", "varentropy")
    )
    axes.pcolormesh(
        cells["entropy_edges"],
        cells["varentropy_edges"],
        counts,
        cmap="Greys",
        norm=LogNorm(0.5, max(counts.max(), 2)),
    )
    shown = list[Any]()
    for name, share in calibration.shares[preset].items():
        color = COLORS[name]
        label = f"{name} {percent(share)}"
        if name not in RULES:
            shown.append(Patch(fill=False, edgecolor=color, linestyle=":", label=f"else {label}"))
            continue
        (x_low, x_high), (y_low, y_high) = strategy_intervals(
            name, _numbers(calibration, preset)
        ).values()
        # An edge of a region at 0 or at infinity is drawn outside the axes.
        x_low = x_low or -x_max
        y_low = y_low or -y_max
        box = (x_low, y_low), min(x_high, 2 * x_max) - x_low, min(y_high, 2 * y_max) - y_low
        axes.add_patch(Rectangle(*box, facecolor=color, alpha=0.13, linewidth=0))
        axes.add_patch(Rectangle(*box, fill=False, edgecolor=color, linewidth=1.3))
        shown.append(Patch(facecolor=color + "22", edgecolor=color, label=label))
    shown += axes.plot(
        *max_varentropy(calibration.vocab_size),
        "--",
        color="#333333",
        linewidth=0.8,
        label="largest V",
    )
    axes.set(
        xlim=(0, x_max), ylim=(0, y_max), xlabel="entropy H (bits)", ylabel="varentropy V (bits²)"
    )
    axes.set_title(preset, loc="left", fontsize=10)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(
        handles=shown,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        fontsize=7.5,
        frameon=False,
        handlelength=1.4,
    )


def max_varentropy(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns H and V of the distributions with the largest varentropy V for their entropy H.

    In these distributions, one token has probability p and all others have equal probabilities. At
    the maximum of V for a given H, log p of every token solves the same quadratic equation
    (Lagrange multipliers). So a maximum has at most two different probabilities. V is largest if a
    single token has the larger of the two.
    """
    others = max(vocab_size - 1, 1)
    odds = np.linspace(-30, 40, 1400)  # ln(p / (1 - p)), dense where the curve is steep
    p = 1 / (1 + np.exp(-odds))
    rest = 1 / (1 + np.exp(odds))  # 1 − p
    surprise = -np.log2(p)
    others_surprise = np.log2(others) - np.log2(rest)
    above = p >= 1 / vocab_size
    H = p * surprise + rest * others_surprise
    V = p * rest * (others_surprise - surprise) ** 2
    return H[above], V[above]


def _numbers(calibration: RouterCalibration, preset: str) -> Mapping[str, float]:
    return calibration.measured if preset == "calibrated" else PRESET_NUMBERS[preset]

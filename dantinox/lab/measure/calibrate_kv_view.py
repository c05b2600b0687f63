"""Text and plot of a KV calibration."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.lab.measure.calibrate_kv import HEAD_TYPES, HeadCalibration
from dantinox.lab.measure.calibrate_router_view import COLORS
from dantinox.report.plots import new_figure, to_png
from dantinox.report.tables import percent, side_by_side, wrap_lines

CELL = 6  # characters of a number in the table
# One color per entry of `HEAD_TYPES`, from the palette of the router's strategies.
TYPE_COLORS = [COLORS[name] for name in ("greedy", "explore", "clarify", "resample", "adaptive")]


def kv_calibration_lines(
    calibration: HeadCalibration, width: int = 80, path: Path | None = None
) -> Iterator[str]:
    """Yields the lines of a calibration: the text, the entropy of every head or layer, head types
    and other measurements.

    Args:
      path: the file of the calibration; None: the calibration is in its run.
    """
    width = max(width, 40)
    heading = (
        f"entropy of the attention of {calibration.n_head} heads in each of {calibration.n_layer}"
        " layers, in bits"
    )
    if calibration.sequences is not None and calibration.tokens is not None:
        heading += (
            f", on {calibration.sequences:,} sequences of {calibration.tokens:,} tokens together"
        )
    yield from wrap_lines([heading, ""], width, "")
    yield from side_by_side(_entropy_columns(calibration, width))
    yield ""
    counts = calibration.head_types
    shares = [
        percent(count / (calibration.n_layer * calibration.n_head)) for count in counts.values()
    ]
    bits = [f"{_bits_range(name)} bits" for name in counts]
    yield from side_by_side([[*counts], bits, [*map(str, counts.values())], shares], front=2)
    use = (
        "saved in the run directory: "
        if path is None
        else f"saved in {path}: --kv_calibration {path} with "
    )
    ways = ["--kv_signal entropy by their entropy"]
    if calibration.loss is not None:
        ways.insert(0, "--kv_signal loss by the loss that eviction causes")
    use += f"--kv_budget 0.3 divides the cache slots among the heads, with {', with '.join(ways)}"
    yield from wrap_lines(["", *_extra_lines(calibration), "", use], width, "")


def _entropy_columns(calibration: HeadCalibration, width: int) -> list[list[str]]:
    """Returns table columns with a row per layer: all heads if they fit in `width`, else min,
    median, mean and max.
    """
    entropy_LN = calibration.heads("head_entropies")
    columns: dict[str, np.ndarray] = {
        f"H{n}": entropy_L for n, entropy_L in enumerate(entropy_LN.T)
    }
    if len("layer") + CELL * len(columns) > width:
        columns = {
            name: getattr(np, name)(entropy_LN, axis=1) for name in ("min", "median", "mean", "max")
        }
    table = [["layer", *map(str, range(len(entropy_LN)))]]
    for name, column in columns.items():
        table.append([name, *(f"{value:.2f}" for value in column)])
    return table


def _extra_lines(calibration: HeadCalibration) -> Iterator[str]:
    """Yields a sentence for each measurement other than the entropies."""
    if calibration.lengths and calibration.length_entropies:
        means = np.mean(list(calibration.length_entropies.values()), axis=0)
        at = ", ".join(
            f"{mean:.2f} at {length:.0f}"
            for mean, length in zip(means, calibration.lengths, strict=True)
        )
        yield f"mean entropy by number of tokens up to the query: {at}"
    if calibration.coverage is not None:
        keys = calibration.heads("coverage")
        yield (
            "keys that hold 95 % of a head's attention: "
            f"{keys.mean():.1f} on average, from {keys.min():.1f} to {keys.max():.1f}"
        )
    if calibration.distance is not None:
        tokens = calibration.heads("distance")
        yield (
            f"mean distance of a head's attention: {tokens.mean():.0f} tokens, from"
            f" {tokens.min():.0f} to {tokens.max():.0f}"
        )
    if calibration.loss is not None and calibration.loss_slots:
        rises = {head: values[0] for head, values in calibration.loss.items()}
        worst = max(rises, key=rises.__getitem__)
        yield (
            "rise of the loss, in nats per token, if one head alone sees at most"
            f" {calibration.loss_slots[0]} tokens: {np.median(list(rises.values())):+.4f} for the"
            f" median head, at most {rises[worst]:+.4f}, for {worst}"
        )
    if calibration.split_half_correlation is not None:
        yield (
            "rank correlation of the heads between odd and even sequences:"
            f" {calibration.split_half_correlation:.3f}"
        )


def draw_kv_calibration(calibration: HeadCalibration) -> bytes:
    """Plots the entropy of every head, the number of heads of each type and, if estimated, the loss
    rise of each head.
    """
    width_ratios = [3, 2.5, 3] if calibration.loss_slots else [3, 2.5]
    figure = new_figure(13 if calibration.loss_slots else 9, 4.2)
    plots = figure.subplots(1, len(width_ratios), width_ratios=width_ratios)
    _draw_heads(
        figure,
        plots[0],
        calibration.heads("head_entropies"),
        "mean entropy of a head's attention",
        "bits",
    )
    _draw_types(plots[1], calibration.head_types)
    if calibration.loss_slots:
        title = f"loss rise if one head alone sees {calibration.loss_slots[0]} tokens"
        _draw_heads(
            figure,
            plots[2],
            np.maximum(calibration.heads("loss")[..., 0], 0),
            title,
            "nats per token",
        )
    return to_png(figure)


def _draw_heads(figure: Any, axes: Any, values_LN: np.ndarray, title: str, unit: str) -> None:
    image = axes.imshow(
        values_LN, cmap="viridis", aspect="auto", vmin=0, vmax=values_LN.max() or 1, origin="lower"
    )
    for axis, name in ((axes.xaxis, "head"), (axes.yaxis, "layer")):
        axis.get_major_locator().set_params(nbins=12, integer=True, min_n_ticks=1)
        axis.set_label_text(name)
    axes.set_title(title, loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, label=unit)


def _draw_types(axes: Any, counts: Mapping[str, int]) -> None:
    labels = [f"{name}\n{_bits_range(name)}" for name in counts]
    bars = axes.bar(labels, counts.values(), color=TYPE_COLORS, width=0.7)
    axes.bar_label(bars, fontsize=9)
    axes.set(xlabel="bits", ylabel="heads")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title("types of heads", loc="left", fontsize=10)
    axes.tick_params(axis="x", labelsize=7.5, length=0)
    axes.spines[["right", "top"]].set_visible(False)
    axes.margins(y=0.12)


def _bits_range(name: str) -> str:
    """Returns the entropy range of a head type in bits: `< 0.5`, `0.5–1.5` … `≥ 4`."""
    below = HEAD_TYPES[name]
    least = max((bound for bound in HEAD_TYPES.values() if bound < below), default=0)
    if least == 0:
        return f"< {below:g}"
    return f"≥ {least:g}" if below == math.inf else f"{least:g}–{below:g}"

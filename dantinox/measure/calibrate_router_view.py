"""A calibration of the router as lines and as a picture, from the record that `calibrate_router` makes."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.config import UserError
from dantinox.config.router import MEASURED, PRESET_NUMBERS, RULES, intervals
from dantinox.report.plots import as_png, new_figure

Record = Mapping[str, Any]
PRESETS = tuple(PRESET_NUMBERS)
# Okabe and Ito's colours, which stay apart for colour-blind eyes.
COLOURS = {"greedy": "#0072b2", "clarify": "#cc79a7", "explore": "#009e73", "resample": "#d55e00", "adaptive": "#7a808a"}
INK = "#333333"


def calibration_lines(record: Record, width: int = 100) -> Iterator[str]:
    """The percentiles, the thresholds and strategies of both presets, what that means, and what it is for."""
    yield f"entropy H and varentropy V of the model at {record['tokens']:,} positions of the text"
    yield f"({record['skipped']:,} more have too little context, or follow the end of a document, and are not counted)"
    yield ""
    quantiles = record["quantiles"]
    for name, values in (("%", quantiles["percent"]), ("H bits", quantiles["entropy"]), ("V bits²", quantiles["varentropy"])):
        yield f"{name:<8}" + "".join(f"{value:>7}" if name == "%" else f"{value:7.3f}" for value in values)
    yield ""
    yield from _columns("setting", {name: [f"{_numbers(record, preset)[name]:.3f}" for preset in PRESETS] for name in MEASURED})
    yield ""
    names = record["shares"][PRESETS[0]]
    yield from _columns("strategy", {name: [percent(record["shares"][preset][name]) for preset in PRESETS] for name in names})
    yield ""
    yield from textwrap.wrap(meaning(record), max(width, 40))
    yield ""
    yield from textwrap.wrap(
        "saved in the run directory: --strategy entropy --router_preset calibrated uses it", max(width, 40)
    )


def meaning(record: Record) -> str:
    """In a sentence, what the two presets make of this model."""
    V = record["vocab_size"]
    told = f"With {V:,} tokens H is at most log2 {V} = {math.log2(V):.2f} bits"
    for preset, link in zip(PRESETS, (": the guide's thresholds", "; the calibrated ones"), strict=True):
        shares = record["shares"][preset]
        most = max(shares, key=shares.__getitem__)
        never = [name for name, share in shares.items() if share == 0]
        told += f"{link} give {most} {percent(shares[most])} of the positions and "
        told += f"none to {' and '.join(never)}" if never else "use all five strategies"
    return told + "."


def percent(share: float) -> str:
    """`12.6%`, and `<0.1%` for a share that would look like none."""
    return f"{100 * share:.1f}%" if share == 0 or share >= 0.001 else "<0.1%"


def plot_calibration(record: Record, out: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> None:
    """Draws where the positions lie by H and V, and where the strategies of each preset do.

    Args:
      write: puts the PNG into place (`run.atomic_write`).

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(9, 4.6)
    panels = figure.subplots(1, len(PRESETS), sharex=True, sharey=True)
    for axes, preset in zip(panels, PRESETS, strict=True):
        draw_density(axes, record, preset)
    panels[-1].set_ylabel("")
    try:
        write(out, as_png(figure))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def draw_density(axes: Any, record: Record, preset: str) -> None:
    """One panel: the positions as a density, the strategies of a preset as areas, and the line above which nothing can lie."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch, Rectangle

    numbers, cells = _numbers(record, preset), record["density"]
    counts = np.ma.masked_equal(np.asarray(cells["counts"]).T, 0)
    right, top = _limits(record)
    axes.pcolormesh(
        cells["entropy_edges"], cells["varentropy_edges"], counts, cmap="Greys", norm=LogNorm(0.5, max(counts.max(), 2))
    )
    shown = list[Any]()
    for name, share in record["shares"][preset].items():
        colour, label = COLOURS[name], f"{name} {percent(share)}"
        if name not in RULES:
            shown.append(Patch(fill=False, edgecolor=colour, linestyle=":", label=f"else {label}"))
            continue
        (left, end), (low, high) = intervals(name, numbers).values()
        left, low = left or -right, low or -top  # no edge along the axes
        box = (left, low), min(end, 2 * right) - left, min(high, 2 * top) - low
        axes.add_patch(Rectangle(*box, facecolor=colour, alpha=0.13, linewidth=0))
        axes.add_patch(Rectangle(*box, fill=False, edgecolor=colour, linewidth=1.3))
        shown.append(Patch(facecolor=colour + "22", edgecolor=colour, label=label))
    shown += axes.plot(*largest_varentropy(record["vocab_size"]), "--", color=INK, linewidth=0.8, label="largest V")
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("entropy H (bits)")
    axes.set_ylabel("varentropy V (bits²)")
    axes.set_title(preset, loc="left", fontsize=10)
    axes.spines[["right", "top"]].set_visible(False)
    axes.legend(
        handles=shown, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=7.5, frameon=False, handlelength=1.4
    )


def largest_varentropy(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """H and V of the distributions with the largest V for their H: one token has p, all others are equal.

    Where H is given and V is largest, log p solves one quadratic equation for all tokens (Lagrange): there are two
    probabilities at most, and of those distributions the one with a single favourite has the largest V.
    """
    others = max(vocab_size - 1, 1)
    odds = np.linspace(-30, 40, 1400)  # ln(p / (1 - p)), fine where the curve is steep
    p, rest = 1 / (1 + np.exp(-odds)), 1 / (1 + np.exp(odds))
    surprise, others_surprise = -np.log2(p), np.log2(others) - np.log2(rest)
    above = p >= 1 / vocab_size
    H, V = p * surprise + rest * others_surprise, p * rest * (others_surprise - surprise) ** 2
    return H[above], V[above]


def _limits(record: Record) -> tuple[float, float]:
    """How far the picture goes: all positions, and the thresholds of both presets."""
    cells = record["density"]
    numbers = [_numbers(record, preset) for preset in PRESETS]
    right = max(cells["entropy_edges"][-1], *(number["high_entropy"] for number in numbers))
    top = max(cells["varentropy_edges"][-1], *(number["high_varentropy"] for number in numbers))
    return 1.12 * right, 1.12 * top


def _numbers(record: Record, preset: str) -> Mapping[str, float]:
    return record["measured"] if preset == "calibrated" else PRESET_NUMBERS[preset]


def _columns(title: str, rows: Mapping[str, list[str]]) -> Iterator[str]:
    for name, cells in [(title, PRESETS), *rows.items()]:
        yield f"{name:<18}" + "".join(f"{cell:>12}" for cell in cells)

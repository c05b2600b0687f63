"""A calibration of attention heads as lines and as a picture, from the record that `calibrate_kv` makes."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.config import UserError
from dantinox.measure.calibrate_router_view import COLOURS, percent
from dantinox.report.plots import as_png, new_figure

Record = Mapping[str, Any]
# What a head is called whose mean entropy is below so many bits.
HEAD_TYPES = {"sink": 0.5, "focused": 1.5, "moderate": 3.0, "mixed": 4.0, "diffuse": math.inf}
_COLOURS = dict(zip(HEAD_TYPES, map(COLOURS.get, ("greedy", "explore", "clarify", "resample", "adaptive")), strict=True))
CELL = 6  # characters of a number in the table


def kv_calibration_lines(record: Record, width: int = 80, path: Path | None = None) -> Iterator[str]:
    """What was read, the entropy of every head or of every layer, the types, what else was measured, and what it is for.

    Args:
      path: where the record is, if not in its run.
    """
    width = max(width, 40)
    yield from textwrap.wrap(_headline(record), width)
    yield ""
    yield from _table(record, width)
    yield ""
    for name, below in HEAD_TYPES.items():
        count = record["head_types"][name]
        share = percent(count / (record["n_layer"] * record["n_head"]))
        yield f"{name:<10}{_bits_of(name, below) + ' bits':<15}{count:>6}{share:>8}"
    yield ""
    for line in _measured(record):
        yield from textwrap.wrap(line, width)
    yield ""
    use = "saved in the run directory: " if path is None else f"saved in {path}: --kv_calibration {path} with "
    ways = {"loss": "by what its eviction costs", "head_entropies": "by its entropy"}
    told = [f"--kv_signal {'loss' if key == 'loss' else 'entropy'} {way}" for key, way in ways.items() if key in record]
    yield from textwrap.wrap(f"{use}--kv_budget 0.3 gives a head slots with {', with '.join(told)}", width)


def _headline(record: Record) -> str:
    told = f"entropy of the attention of {record['n_head']} heads in each of {record['n_layer']} layers, in bits"
    if "tokens" in record and "sequences" in record:
        told += f", on {record['sequences']:,} sequences of {record['tokens']:,} tokens together"
    return told


def _table(record: Record, width: int) -> Iterator[str]:
    """A row per layer: its heads, or their spread where a row does not hold them all."""
    entropy_LN = heads_of(record, "head_entropies")
    names = [f"H{n}" for n in range(entropy_LN.shape[1])]
    rows_LC = entropy_LN
    if 8 + CELL * len(names) > width:
        names = ["min", "median", "mean", "max"]
        rows_LC = np.stack([np.min(entropy_LN, 1), np.median(entropy_LN, 1), np.mean(entropy_LN, 1), np.max(entropy_LN, 1)], 1)
    cell = max(CELL, *(len(name) + 2 for name in names))
    yield f"{'layer':<8}" + "".join(f"{name:>{cell}}" for name in names)
    for layer, row in enumerate(rows_LC):
        yield f"{layer:<8}" + "".join(f"{value:{cell}.2f}" for value in row)


def _measured(record: Record) -> Iterator[str]:
    """What there is besides entropies, a sentence each."""
    if record.get("lengths") and record.get("length_entropies"):
        means = np.mean(list(record["length_entropies"].values()), axis=0)
        told = ", ".join(f"{mean:.2f} at {length:.0f}" for mean, length in zip(means, record["lengths"], strict=True))
        yield f"mean entropy by the tokens up to the query: {told}"
    if "coverage" in record:
        keys = heads_of(record, "coverage")
        told = f"{keys.mean():.1f} on average, from {keys.min():.1f} to {keys.max():.1f}"
        yield f"keys that hold 95 % of a head's attention: {told}"
    if "loss" in record:
        rises = dict(zip(record["loss"], heads_of(record, "loss")[..., 0].ravel(), strict=True))
        worst = max(rises, key=rises.__getitem__)
        told = f"{np.median(list(rises.values())):+.4f} for a median head, the most {rises[worst]:+.4f} for {worst}"
        yield f"nats per token that it costs if a head alone sees no more than {record['loss_slots'][0]} tokens: {told}"
    correlation = record.get("split_half_correlation")
    if correlation is not None:
        yield f"rank correlation of the heads between odd and even sequences: {correlation:.3f}"


def heads_of(record: Record, key: str) -> np.ndarray:
    """The numbers of all query heads `[L, N]`, or of all key heads and sizes `[L, K, C]`."""
    values = np.array(list(record[key].values()), np.float64)
    return values.reshape(record["n_layer"], -1, *values.shape[1:])


def plot_kv_calibration(record: Record, out: Path, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> None:
    """Draws the entropy of every head, layer by layer, how many heads are of each type, and what eviction costs each.

    Args:
      write: puts the PNG into place (`run.atomic_write`).

    Raises:
      UserError: matplotlib is not installed, or the file cannot be written.
    """
    loss = "loss" in record
    figure = new_figure(13 if loss else 9, 4.2)
    heat, bars, *more = figure.subplots(1, 2 + loss, width_ratios=(3, 2.5, 3)[: 2 + loss])
    _draw_heads(figure, heat, heads_of(record, "head_entropies"), "mean entropy of a head's attention", "bits")
    _draw_types(bars, record["head_types"])
    for axes in more:
        rises_LK = np.maximum(heads_of(record, "loss")[..., 0], 0)
        title = f"what it costs if a head alone sees {record['loss_slots'][0]} tokens"
        _draw_heads(figure, axes, rises_LK, title, "nats per token")
    try:
        write(out, as_png(figure))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def _draw_heads(figure: Any, axes: Any, values_LN: np.ndarray, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(values_LN, cmap="viridis", aspect="auto", vmin=0, vmax=values_LN.max() or 1, origin="lower")
    for axis, name in ((axes.xaxis, "head"), (axes.yaxis, "layer")):
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        axis.set_label_text(name)
    axes.set_title(title, loc="left", fontsize=10)
    figure.colorbar(image, ax=axes, label=unit)


def _draw_types(axes: Any, counts: Mapping[str, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    names = list(HEAD_TYPES)
    labels = [f"{name}\n{_bits_of(name, below)}" for name, below in HEAD_TYPES.items()]
    bars = axes.bar(labels, [counts[name] for name in names], color=[_COLOURS[name] for name in names], width=0.7)
    axes.bar_label(bars, fontsize=9)
    axes.set_xlabel("bits")
    axes.set_ylabel("heads")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("types of heads", loc="left", fontsize=10)
    axes.tick_params(axis="x", labelsize=7.5, length=0)
    axes.spines[["right", "top"]].set_visible(False)
    axes.margins(y=0.12)


def _bits_of(name: str, below: float) -> str:
    """`< 0.5`, `0.5–1.5` … `≥ 4`."""
    bounds = [0.0, *HEAD_TYPES.values()]
    least = bounds[list(HEAD_TYPES).index(name)]
    if least == 0:
        return f"< {below:g}"
    return f"{least:g}–{below:g}" if below < math.inf else f"≥ {least:g}"

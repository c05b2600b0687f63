"""Plots with matplotlib, an optional dependency that is imported only to draw a plot."""

import io
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError, atomic_write, require_extra
from dantinox.report.metric_files import Columns, csv_columns, jsonl_columns
from dantinox.report.tables import human_count

TRAIN, VALIDATION, GREY = "#8aa4c8", "#c2410c", "#6b7280"


Line = tuple[np.ndarray, np.ndarray]  # x and y


class Curves(NamedTuple):
    """The columns that a plot of a run shows: of training steps, of validation, and which
    validation value is best.
    """

    train: str
    validation: str
    label: str
    best: Callable[..., Any]


LOSSES = Curves("train_loss", "val_loss", "loss (nats per token)", min)
REWARDS = Curves("reward", "val_reward", "mean reward", max)


MAX_POINTS = 4000  # of a line: more than the pixels of its width
INTERVALS = ("step", "tokens", "ms_per_step", LOSSES.train, REWARDS.train)
EVALUATIONS = (*INTERVALS, LOSSES.validation, REWARDS.validation)


def read_columns(path_csv: Path, path_jsonl: Path) -> tuple[Columns, Columns]:
    """Returns the columns `INTERVALS` of the training intervals and `EVALUATIONS` of the
    evaluations of a run.

    The evaluations stand for the intervals if the log has none.

    Raises:
      UserError: a file cannot be read or is damaged.
    """
    evaluations = csv_columns(path_csv, EVALUATIONS)
    intervals = jsonl_columns(path_jsonl, "interval", INTERVALS)
    return (intervals if intervals["step"].size else evaluations), evaluations


def curves_of(evaluations: Columns) -> Curves:
    """Returns the rewards if the log of a run has them, else the losses."""
    return REWARDS if np.isfinite(evaluations["val_reward"]).any() else LOSSES


def plot_loss(path_csv: Path, path_jsonl: Path, out: Path) -> None:
    """Plots train and validation loss by step into the PNG file `out`. The upper axis shows tokens
    if the log has them.

    The plot of a run with rewards shows these instead of losses.

    Raises:
      UserError: matplotlib is not installed, the logs have no loss yet, or a file cannot be read or
        written.
    """
    intervals, evaluations = read_columns(path_csv, path_jsonl)
    curves = curves_of(evaluations)
    train = _points(intervals, curves.train)
    validation = _points(evaluations, curves.validation)
    if not train[0].size and not validation[0].size:
        raise UserError(f"nothing to plot yet: {path_csv} and {path_jsonl} have no loss")
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    if train[0].size:
        axes.plot(*thinned(*train), color=TRAIN, linewidth=1.2, label="train")
    if validation[0].size:
        axes.plot(
            *thinned(*validation),
            color=VALIDATION,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label="validation",
        )
        best = curves.best(range(len(validation[1])), key=validation[1].__getitem__)
        _mark_best(axes, validation[0][best], validation[1][best])
    _label(
        axes, "optimizer step", curves.label, "lower right" if curves == REWARDS else "upper right"
    )
    if math.isfinite(per_step := _tokens_per_step(intervals, evaluations)):
        _add_tokens(axes, per_step)
    save_files(out.parent, {out.name: partial(to_png, figure)})


# In a plot with many runs, the number of best ones, which have a color and an entry in the legend.
NAMED_RUNS = 10
BY = {"step": "optimizer step", "tokens": "training tokens", "time": "minutes of training"}


def plot_runs(logs: Mapping[str, tuple[Path, Path]], by: str, out: Path) -> None:
    """Plots the losses of several runs into the PNG file `out`: validation as lines with points,
    training as faint lines.

    If the first run has rewards, the plot shows the rewards of all runs. Of more than `NAMED_RUNS`
    runs, only the best have a color and an entry in the legend; the others are grey.

    Args:
      logs: name of a run → paths of its CSV and JSON lines.
      by: the x axis, a key of `BY`. `time` is the time in training steps, without startup,
        compilation, evaluations and checkpoints.

    Raises:
      UserError: matplotlib is not installed, a run has no loss yet, or a file cannot be read or
        written.
    """
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    curves = None
    lines: dict[str, tuple[Line, Line]] = {}
    for name, paths in logs.items():
        intervals, evaluations = read_columns(*paths)
        curves = curves or curves_of(evaluations)
        x_of = _axis_mapping(intervals, evaluations, by)
        train, validation = (
            thinned(x_of(steps), values)
            for steps, values in (
                _points(intervals, curves.train),
                _points(evaluations, curves.validation),
            )
        )
        if not train[0].size and not validation[0].size:
            raise UserError(f"nothing to plot yet: {paths[0]} and {paths[1]} have no loss")
        lines[name] = train, validation
    curves = curves or LOSSES
    for name, color in _run_colors(lines, curves).items():
        train, validation = lines[name]
        label, width = (None, 0.6) if color == GREY else (name, 1.8)
        if train[0].size:
            train_label = None if validation[0].size else label
            axes.plot(*train, color=color, linewidth=width / 2, alpha=0.4, label=train_label)
        if validation[0].size:
            axes.plot(
                *validation,
                color=color,
                linewidth=width,
                marker="o",
                markersize=2 * width,
                label=label,
            )
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    _label(
        axes,
        BY[by],
        f"{curves.label}, points: validation",
        "lower right" if curves == REWARDS else "upper right",
    )
    save_files(out.parent, {out.name: partial(to_png, figure)})


def _run_colors(lines: Mapping[str, tuple[Line, Line]], curves: Curves) -> dict[str, str]:
    """Returns the color of each run in the order of drawing. The best runs come last, on top of
    grey ones.
    """
    best = {
        name: curves.best((validation if validation[1].size else train)[1])
        for name, (train, validation) in lines.items()
    }
    ranked = sorted(best, key=best.__getitem__, reverse=curves.best is max)
    named = [name for name in lines if name in ranked[:NAMED_RUNS]]
    return dict.fromkeys(lines.keys() - set(named), GREY) | {
        name: f"C{number}" for number, name in enumerate(named)
    }


def draw_rates(
    key: str,
    rates: list[float],
    losses: list[float],
    smoothed: list[float],
    marks: Mapping[str, float],
) -> bytes:
    """Returns a PNG of the losses of a learning-rate range test.

    Args:
      key: name of the learning rate.
      rates, losses, smoothed: one number per step.
      marks: label → rate to mark with a vertical line.
    """
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    axes.plot(rates, losses, color=TRAIN, linewidth=0.9, label="loss")
    axes.plot(rates, smoothed, color=VALIDATION, linewidth=1.8, label="smoothed")
    for name, rate in marks.items():
        axes.axvline(rate, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{name} {rate:.2g}",
            (rate, max(smoothed)),
            rotation=90,
            ha="right",
            va="top",
            fontsize=9,
            color=GREY,
        )
    axes.set_xscale("log")
    _label(axes, key, "loss (nats per token)", "lower left")
    return to_png(figure)


def _tokens_per_step(*logs: Columns) -> float:
    """Returns the tokens per step of the last row that has them; NaN if no row has them."""
    for columns in reversed(logs):
        ratio = columns["tokens"][columns["step"] > 0] / columns["step"][columns["step"] > 0]
        if (known := ratio[ratio > 0]).size:
            return float(known[-1])
    return math.nan


def _axis_mapping(
    intervals: Columns, evaluations: Columns, by: str
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from steps to their values on the axis `by`. Minutes are interpolated
    linearly between intervals.
    """
    if by == "step":
        return lambda steps: steps
    if by == "tokens":
        per_step = _tokens_per_step(intervals, evaluations)
        return lambda steps: steps * per_step
    timed = np.isfinite(intervals["ms_per_step"])
    steps = intervals["step"][timed]
    milliseconds = intervals["ms_per_step"][timed]
    newer = (
        steps > np.maximum.accumulate(np.concatenate([[0.0], steps[:-1]]))
        if steps.size
        else np.zeros(0, bool)
    )
    steps = np.concatenate([[0.0], steps[newer]])
    milliseconds = milliseconds[newer]
    minutes = np.concatenate([[0.0], np.cumsum(milliseconds * np.diff(steps)) / 60e3])

    def at(wanted: np.ndarray) -> np.ndarray:
        if len(steps) == 1:
            return np.zeros(len(wanted))
        after = np.clip(np.searchsorted(steps, wanted), 1, len(steps) - 1)
        share = (wanted - steps[after - 1]) / (steps[after] - steps[after - 1])
        found: np.ndarray = minutes[after - 1] + share * (minutes[after] - minutes[after - 1])
        return found

    return at


def _points(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and values of all rows with a finite value of that name."""
    finite = np.isfinite(columns[name]) & np.isfinite(columns["step"])
    return columns["step"][finite], columns[name][finite]


def thinned(x: np.ndarray, y: np.ndarray, most: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` points of a line, which look the same: the smallest and largest value
    of each of equal parts.
    """
    if len(x) <= most:
        return x, y
    edges = np.linspace(0, len(x), most // 2 + 1).astype(int)
    parts = [y[start:stop] for start, stop in itertools.pairwise(edges)]
    chosen = [
        start + index
        for start, part in zip(edges, parts, strict=False)
        for index in sorted((part.argmin(), part.argmax()))
    ]
    return x[chosen], y[chosen]


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches.

    Raises:
      UserError: matplotlib is not installed.
    """
    with require_extra("plot", "plots need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def to_png(figure: Any) -> bytes:
    """Returns a figure as PNG. Characters that the font lacks are drawn as boxes, without a
    warning.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def style_axes(axes: Any) -> None:
    """Adds a faint grid and removes the upper and right edges."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, x: str, y: str, corner: str = "upper right") -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, loc=corner)
    style_axes(axes)


def _mark_best(axes: Any, step: float, loss: float) -> None:
    axes.axhline(loss, color=GREY, linewidth=0.7, linestyle=":")
    label = f"best {loss:.3f} at step {step:.0f}"
    side = "right" if step > sum(axes.get_xlim()) / 2 else "left"  # towards the middle of the plot
    axes.annotate(
        label,
        (step, loss),
        xytext=(0, 22),
        textcoords="offset points",
        ha=side,
        fontsize=9,
        color=GREY,
    )


def _add_tokens(axes: Any, per_step: float) -> None:
    """Adds an upper axis in tokens."""
    axes.spines["top"].set_visible(True)
    top = axes.secondary_xaxis(
        "top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step)
    )
    top.xaxis.set_major_formatter(lambda value, _: human_count(value))
    top.set_xlabel("tokens")


def save_files(folder: Path, files: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Creates and writes files one after the other. The folder is created if it is missing.

    Args:
      files: file name → function that returns its content.

    Raises:
      UserError: a file cannot be written, or matplotlib is missing. Earlier entries of `files` have
        then been written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    for name, make in files.items():
        content = make()
        # The name of a run may contain bytes that are not UTF-8.
        atomic_write(
            folder / name, content.encode(errors="replace") if isinstance(content, str) else content
        )

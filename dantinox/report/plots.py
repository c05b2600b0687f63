"""Plots with matplotlib, an optional dependency that is imported only to draw a plot."""

import io
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.files import UserError, atomic_write, require_extra
from dantinox.report.metric_files import read_csv, read_jsonl
from dantinox.report.tables import human_count

TRAIN, VALIDATION, GREY = "#8aa4c8", "#c2410c", "#6b7280"


class Curves(NamedTuple):
    """The columns that a plot of a run shows: of training steps, of validation, and which validation value is best."""

    train: str
    validation: str
    label: str
    best: Callable[..., Any]


LOSSES = Curves("train_loss", "val_loss", "loss (nats per token)", min)
REWARDS = Curves("reward", "val_reward", "mean reward", max)


def curves_of(evaluations: list[dict[str, Any]]) -> Curves:
    """Returns the rewards if the log of a run has them, else the losses."""
    return REWARDS if any("val_reward" in row for row in evaluations) else LOSSES


def plot_loss(path_csv: Path, path_jsonl: Path, out: Path) -> None:
    """Plots train and validation loss by step into the PNG file `out`. The upper axis shows tokens if the log has them.

    The plot of a run with rewards shows these instead of losses.

    Raises:
      UserError: matplotlib is not installed, the logs have no loss yet, or a file cannot be read or written.
    """
    evaluations = read_csv(path_csv)
    rows = read_jsonl(path_jsonl)
    curves = curves_of(evaluations)
    train = _points([row for row in rows if row.get("kind") == "interval"] or evaluations, curves.train)
    validation = _points(evaluations, curves.validation)
    if not train and not validation:
        raise UserError(f"nothing to plot yet: {path_csv} and {path_jsonl} have no loss")
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=1.2, label="train")
    if validation:
        axes.plot(
            *zip(*validation, strict=True), color=VALIDATION, linewidth=1.8, marker="o", markersize=3.5, label="validation"
        )
        _mark_best(axes, *curves.best(validation, key=lambda point: point[1]))
    _label(axes, "optimizer step", curves.label, "lower right" if curves == REWARDS else "upper right")
    counted = [row["tokens"] / row["step"] for row in [*rows, *evaluations] if row.get("tokens") and row.get("step")]
    if counted:
        _add_tokens(axes, counted[-1])
    save_files(out.parent, {out.name: partial(to_png, figure)})


BY = {"step": "optimizer step", "tokens": "training tokens", "time": "minutes of training"}


def plot_runs(logs: Mapping[str, tuple[Path, Path]], by: str, out: Path) -> None:
    """Plots the losses of several runs into the PNG file `out`: validation as lines with points, training as faint lines.

    If the first run has rewards, the plot shows the rewards of all runs.

    Args:
      logs: name of a run → paths of its CSV and JSON lines.
      by: the x axis, a key of `BY`. `time` is the time in training steps, without startup, compilation,
        evaluations and checkpoints.

    Raises:
      UserError: matplotlib is not installed, a run has no loss yet, or a file cannot be read or written.
    """
    figure = new_figure(8, 4.8)
    axes, curves = figure.add_subplot(), None
    for number, (name, paths) in enumerate(logs.items()):
        evaluations, rows = read_csv(paths[0]), read_jsonl(paths[1])
        curves = curves or curves_of(evaluations)
        intervals = [row for row in rows if row.get("kind") == "interval"] or evaluations
        x_of = _axis_mapping(intervals if by == "time" else [*intervals, *evaluations], by)
        train, validation = (
            [(x_of(step), loss) for step, loss in _points(found, key)]
            for found, key in ((intervals, curves.train), (evaluations, curves.validation))
        )
        if not train and not validation:
            raise UserError(f"nothing to plot yet: {paths[0]} and {paths[1]} have no loss")
        color = f"C{number % 10}"
        if train:
            axes.plot(*zip(*train, strict=True), color=color, linewidth=0.9, alpha=0.4, label=None if validation else name)
        if validation:
            axes.plot(*zip(*validation, strict=True), color=color, linewidth=1.8, marker="o", markersize=3.5, label=name)
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    curves = curves or LOSSES
    _label(axes, BY[by], f"{curves.label}, points: validation", "lower right" if curves == REWARDS else "upper right")
    save_files(out.parent, {out.name: partial(to_png, figure)})


def draw_rates(key: str, rates: list[float], losses: list[float], smoothed: list[float], marks: Mapping[str, float]) -> bytes:
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
        axes.annotate(f"{name} {rate:.2g}", (rate, max(smoothed)), rotation=90, ha="right", va="top", fontsize=9, color=GREY)
    axes.set_xscale("log")
    _label(axes, key, "loss (nats per token)", "lower left")
    return to_png(figure)


def _axis_mapping(rows: list[dict[str, Any]], by: str) -> Callable[[float], float]:
    """Returns the function from a step to its value on the axis `by`. Minutes are interpolated linearly between rows."""
    if by == "step":
        return lambda step: step
    if by == "tokens":
        known = [row["tokens"] / row["step"] for row in rows if row.get("tokens") and row.get("step")]
        return lambda step: step * (known[-1] if known else math.nan)
    steps, minutes = [0.0], [0.0]
    for row in rows:
        if row.get("ms_per_step") is not None and row["step"] > steps[-1]:
            minutes.append(minutes[-1] + row["ms_per_step"] * (row["step"] - steps[-1]) / 60e3)
            steps.append(row["step"])

    def at(step: float) -> float:
        after = min(bisect_left(steps, step), len(steps) - 1)
        if not after:
            return 0.0
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return minutes[after - 1] + share * (minutes[after] - minutes[after - 1])

    return at


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Returns (step, value) of every row with a finite value of that name."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None and "step" in row]
    return [(step, value) for step, value in found if math.isfinite(value)]


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of a size in inches.

    Raises:
      UserError: matplotlib is not installed.
    """
    with require_extra("plot", "plots need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def to_png(figure: Any) -> bytes:
    """Returns a figure as PNG. Characters that the font lacks are drawn as boxes, without a warning."""
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
    axes.annotate(label, (step, loss), xytext=(0, 22), textcoords="offset points", ha=side, fontsize=9, color=GREY)


def _add_tokens(axes: Any, per_step: float) -> None:
    """Adds an upper axis in tokens."""
    axes.spines["top"].set_visible(True)
    top = axes.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
    top.xaxis.set_major_formatter(lambda value, _: human_count(value))
    top.set_xlabel("tokens")


def study_files(
    name: str, study: Any, csv: Callable[[Any], str], markdown: Callable[[Any], str], draw: Callable[[Any], bytes]
) -> dict[str, Callable[[], str | bytes]]:
    """Returns file name → function that creates the content, for each file of a study.

    The plot comes last, because it alone needs matplotlib.
    """

    def as_json(study: Any) -> str:
        return json.dumps(asdict(study), indent=1, allow_nan=False) + "\n"

    makers: dict[str, Callable[[Any], str | bytes]] = {"csv": csv, "md": markdown, "json": as_json, "png": draw}
    return {f"{name}.{kind}": partial(make, study) for kind, make in makers.items()}


def save_files(folder: Path, files: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Creates and writes files one after the other. The folder is created if it is missing.

    Args:
      files: file name → function that returns its content.

    Raises:
      UserError: a file cannot be written, or matplotlib is missing. Earlier entries of `files` have then been written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    for name, make in files.items():
        content = make()
        # The name of a run may contain bytes that are not UTF-8.
        atomic_write(folder / name, content.encode(errors="replace") if isinstance(content, str) else content)

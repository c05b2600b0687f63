"""Plots with matplotlib, an optional dependency that is imported when a plot is drawn."""

import io
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dantinox.files import UserError, atomic_write, require_extra
from dantinox.report.metric_files import read_csv, read_jsonl
from dantinox.report.tables import human_count

TRAIN, VALIDATION, GREY = "#8aa4c8", "#c2410c", "#6b7280"


def plot_loss(path_csv: Path, path_jsonl: Path, out: Path) -> None:
    """Draws train and validation loss over steps, tokens along the upper edge where the log has them.

    Raises:
      UserError: matplotlib is not installed, there is no row to draw yet, or a file cannot be read or written.
    """
    evaluations = read_csv(path_csv)
    rows = read_jsonl(path_jsonl)
    train = _points([row for row in rows if row.get("kind") == "interval"] or evaluations, "train_loss")
    validation = _points(evaluations, "val_loss")
    if not train and not validation:
        raise UserError(f"nothing to plot yet: {path_csv} and {path_jsonl} hold no loss")
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=1.2, label="train")
    if validation:
        axes.plot(
            *zip(*validation, strict=True), color=VALIDATION, linewidth=1.8, marker="o", markersize=3.5, label="validation"
        )
        _mark_best(axes, *min(validation, key=lambda point: point[1]))
    _label(axes, "optimizer step", "loss (nats per token)")
    counted = [row["tokens"] / row["step"] for row in [*rows, *evaluations] if row.get("tokens") and row.get("step")]
    if counted:
        _add_tokens(axes, counted[-1])
    save_files(out.parent, {out.name: partial(as_png, figure)})


BY = {"step": "optimizer step", "tokens": "training tokens", "time": "minutes of training"}


def plot_runs(logs: Mapping[str, tuple[Path, Path]], by: str, out: Path) -> None:
    """Draws the losses of runs over each other: validation as lines with points, training faintly behind them.

    Args:
      logs: name → the CSV and the JSON lines of a run.
      by: a key of `BY`. Time is that of the steps alone, without start, compilation, evaluations and checkpoints.

    Raises:
      UserError: matplotlib is not installed, a run has no loss yet, or a file cannot be read or written.
    """
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    for number, (name, paths) in enumerate(logs.items()):
        evaluations, rows = read_csv(paths[0]), read_jsonl(paths[1])
        intervals = [row for row in rows if row.get("kind") == "interval"] or evaluations
        place = _places(intervals if by == "time" else [*intervals, *evaluations], by)
        train, validation = (
            [(place(step), loss) for step, loss in _points(found, key)]
            for found, key in ((intervals, "train_loss"), (evaluations, "val_loss"))
        )
        if not train and not validation:
            raise UserError(f"nothing to plot yet: {paths[0]} and {paths[1]} hold no loss")
        color = f"C{number % 10}"
        if train:
            axes.plot(*zip(*train, strict=True), color=color, linewidth=0.9, alpha=0.4, label=None if validation else name)
        if validation:
            axes.plot(*zip(*validation, strict=True), color=color, linewidth=1.8, marker="o", markersize=3.5, label=name)
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))
    _label(axes, BY[by], "loss (nats per token), points: validation")
    save_files(out.parent, {out.name: partial(as_png, figure)})


def draw_rates(key: str, rates: list[float], losses: list[float], smoothed: list[float], marks: Mapping[str, float]) -> bytes:
    """Losses over climbing learning rates, as PNG; `marks` are rates by their names."""
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    axes.plot(rates, losses, color=TRAIN, linewidth=0.9, label="loss")
    axes.plot(rates, smoothed, color=VALIDATION, linewidth=1.8, label="smoothed")
    for name, rate in marks.items():
        axes.axvline(rate, color=GREY, linewidth=0.8, linestyle=":")
        axes.annotate(f"{name} {rate:.2g}", (rate, max(smoothed)), rotation=90, ha="right", va="top", fontsize=9, color=GREY)
    axes.set_xscale("log")
    _label(axes, key, "loss (nats per token)", "lower left")
    return as_png(figure)


def _places(rows: list[dict[str, Any]], by: str) -> Callable[[float], float]:
    """Where a step lies on the axis `by`: minutes are summed over the rows, and divided evenly between them."""
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
    """(step, value) for every row that has a finite value of that name."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None and "step" in row]
    return [(step, value) for step, value in found if math.isfinite(value)]


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, or an error where matplotlib is not installed."""
    with require_extra("plot", "plots need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def as_png(figure: Any) -> bytes:
    """The figure as PNG; what the font lacks is drawn as a box, without a word."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def tidy(axes: Any) -> None:
    """A faint grid, and no edges above and on the right."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, x: str, y: str, corner: str = "upper right") -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, loc=corner)
    tidy(axes)


def _mark_best(axes: Any, step: float, loss: float) -> None:
    axes.axhline(loss, color=GREY, linewidth=0.7, linestyle=":")
    label = f"best {loss:.3f} at step {step:.0f}"
    side = "right" if step > sum(axes.get_xlim()) / 2 else "left"  # towards the middle of the picture
    axes.annotate(label, (step, loss), xytext=(0, 22), textcoords="offset points", ha=side, fontsize=9, color=GREY)


def _add_tokens(axes: Any, per_step: float) -> None:
    """A second scale along the upper edge."""
    axes.spines["top"].set_visible(True)
    top = axes.secondary_xaxis("top", functions=(lambda step: step * per_step, lambda tokens: tokens / per_step))
    top.xaxis.set_major_formatter(lambda value, _: human_count(value))
    top.set_xlabel("tokens")


def study_files(
    name: str, study: Any, csv: Callable[[Any], str], markdown: Callable[[Any], str], draw: Callable[[Any], bytes]
) -> dict[str, Callable[[], str | bytes]]:
    """What makes each file of a study; the picture, which needs matplotlib, is the last."""

    def as_json(study: Any) -> str:
        return json.dumps(asdict(study), indent=1, allow_nan=False) + "\n"

    makers: dict[str, Callable[[Any], str | bytes]] = {"csv": csv, "md": markdown, "json": as_json, "png": draw}
    return {f"{name}.{kind}": partial(make, study) for kind, make in makers.items()}


def save_files(folder: Path, files: Mapping[str, Callable[[], str | bytes]]) -> None:
    """Makes and writes files (name → what makes its content) one after the other into a folder, which is made if it is missing.

    Raises:
      UserError: a file cannot be written or, as where matplotlib is not installed, made; those before it are there then.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    for name, make in files.items():
        content = make()
        # The name of a run need not be text.
        atomic_write(folder / name, content.encode(errors="replace") if isinstance(content, str) else content)

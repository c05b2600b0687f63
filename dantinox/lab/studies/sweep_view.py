"""Text, Markdown, CSV and plot of a sweep."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from dantinox.files import quote
from dantinox.lab.studies.sweep import SweepStudy, TrialResult
from dantinox.report.plots import new_figure, study_files, style_axes, to_png
from dantinox.report.tables import Column, csv_table, markdown_table, text_table, wrap_lines

ALL, BEST, WRONG = "#0072b2", "#d55e00", "#888888"
OUTLIER_FACTOR = 8  # the plot clips losses that are further from the best than this multiple of the median distance
LOG_SCALE_RATIO = 20  # an axis is logarithmic if its largest value is at least this multiple of its smallest
LOSSES = [
    Column("val_loss", "val loss", lambda trial: trial.val_loss, ".4f"),
    Column("bits_per_byte", "bits/byte", lambda trial: trial.bits_per_byte),
]
REWARDS = [Column("val_reward", "val reward", lambda trial: trial.val_reward, ".4f")]
MEASURES = [
    Column("best_step", "at step", lambda trial: trial.best_step, "d"),
    Column("steps", "of", lambda trial: trial.steps, "d"),
    Column("ms_per_step", "ms/step", lambda trial: trial.ms_per_step, ".2f"),
]
NAME, PROBLEM = Column("trial", "trial", lambda trial: trial.name), Column("problem", "problem", lambda trial: trial.problem)


def _has_rewards(study: SweepStudy) -> bool:
    return any(trial.val_reward is not None for trial in study.trials)


def _measures(study: SweepStudy) -> list[Column]:
    return [*(REWARDS if _has_rewards(study) else LOSSES), *MEASURES]


def format_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else quote(value)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns the names of the settings, without their section where this is unambiguous."""
    names = [key.partition(".")[2] for key in keys]
    return {key: name if names.count(name) == 1 else key for key, name in zip(keys, names, strict=True)}


def _setting_column(key: str, heading: str, to_cell: Callable[[Any], Any]) -> Column:
    return Column(key, heading, lambda trial: to_cell(trial.chosen[key]))


def sweep_lines(study: SweepStudy, width: int = 100) -> Iterator[str]:
    """Yields the table, best trials first, and the problems of failed trials."""
    columns = [NAME, *(_setting_column(key, name, format_value) for key, name in _short_names(study.keys).items())]
    columns += _measures(study)
    yield from text_table(columns, study.trials, max(width, 60))
    problems = [f"{trial.name}: {trial.problem}" for trial in study.trials if trial.problem]
    yield from wrap_lines(["", *problems] if problems else [], max(width, 60))


def sweep_csv(study: SweepStudy) -> str:
    """Returns a row per trial, best first, with settings by path and values as in YAML."""
    settings = (_setting_column(key, "", _csv_value) for key in study.keys)
    return csv_table([NAME, *settings, *_measures(study), PROBLEM], study.trials)


def _csv_value(value: Any) -> Any:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else quote(value)


def sweep_markdown(study: SweepStudy) -> str:
    settings = (_setting_column(key, f"`{key}`", format_value) for key in study.keys)
    columns = [NAME, *settings, *_measures(study), PROBLEM]
    return f"# {study.runs_dir}\n\n{markdown_table(columns, study.trials)}\n"


def sweep_files(study: SweepStudy) -> dict[str, Callable[[], str | bytes]]:
    return study_files("sweep", study, sweep_csv, sweep_markdown, draw_sweep)


def draw_sweep(study: SweepStudy) -> bytes:
    """Plots the best validation loss of every trial over each setting. Outliers and failed trials are at the upper edge.

    Rewards are plotted in the same way, upside down.
    """
    rewards = _has_rewards(study)
    wide = min(3, len(study.keys))
    high = math.ceil(len(study.keys) / wide)
    figure = new_figure(max(6.0, 3.6 * wide), 0.6 + 3.4 * high)
    panels = figure.subplots(high, wide, sharey=True, squeeze=False).flat
    top = 1.0
    losses = [trial.loss for trial in study.trials if trial.loss is not None]
    if losses:  # an outlier must not compress the scale of the other trials
        best, middle, worst = min(losses), median(losses), max(losses)
        top = min(worst, best + OUTLIER_FACTOR * (middle - best)) + 0.08 * (middle - best or 1.0)
    for axes, key in zip(panels, study.keys, strict=False):
        _draw(axes, study, key, top)
    for axes in list(panels)[len(study.keys) :]:
        axes.set_visible(False)
    if rewards:
        figure.axes[0].invert_yaxis()
        figure.axes[0].yaxis.set_major_formatter(lambda loss, _: f"{-loss:g}")
    outside = "▼ below" if rewards else "▲ above"
    figure.suptitle(f"★ best   {outside} the plot   × failed", fontsize=8, color=WRONG)
    figure.supylabel("best val reward" if rewards else "best val loss (nats per token)", fontsize=10)
    return to_png(figure)


def _draw(axes: Any, study: SweepStudy, key: str, top: float) -> None:
    positions, names = _axis_positions([trial.chosen[key] for trial in study.trials])
    if names:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif min(positions) > 0 and max(positions) / min(positions) >= LOG_SCALE_RATIO:
        axes.set_xscale("log")
    elif all(isinstance(position, int) for position in positions):
        axes.xaxis.get_major_locator().set_params(integer=True)
    points = [
        (position, trial.loss or 0.0)
        for position, trial in zip(positions, study.trials, strict=True)
        if _is_within_axes(trial, top)
    ]
    lowest = {x: min(loss for at, loss in points if at == x) for x, _ in sorted(points)}
    if not names and len(lowest) < len(points):  # several trials per value: connect the best ones
        axes.plot(*zip(*lowest.items(), strict=True), color=ALL, linewidth=1, alpha=0.5)
    if points:
        axes.scatter(*zip(*points, strict=True), color=ALL, s=22, alpha=0.8, linewidths=0)
        axes.scatter(*points[0], color=BEST, s=60, marker="*", zorder=3)
    for position, trial in zip(positions, study.trials, strict=True):
        if not _is_within_axes(trial, top):
            outside = "^" if trial.val_reward is None else "v"
            axes.scatter(position, top, color=WRONG, s=28, marker="x" if trial.problem else outside, clip_on=False)
    axes.set_ylim(top=top)
    axes.set_xlabel(_short_names(study.keys)[key])
    style_axes(axes)


def _axis_positions(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Returns the axis position of each value, and tick labels: numbers are positions, other values get indices and labels."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return list(values), []
    names = list(dict.fromkeys(map(format_value, values)))
    return [names.index(format_value(value)) for value in values], names


def _is_within_axes(trial: TrialResult, top: float) -> bool:
    return trial.problem is None and trial.loss is not None and trial.loss <= top

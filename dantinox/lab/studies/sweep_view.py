"""Report and plot of a sweep."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from dantinox.files import quote
from dantinox.lab.studies.sweep import SweepStudy, TrialResult
from dantinox.report.document import Block, Heading, Items, Table
from dantinox.report.plots import new_figure, style_axes, to_png
from dantinox.report.tables import CSV, MARKDOWN, TEXT, Column

# Colors of trials in the plot.
ALL = "#0072b2"
BEST = "#d55e00"
WRONG = "#888888"
# The plot clips losses that are further from the best than this multiple of the median distance.
OUTLIER_FACTOR = 8
# An axis is logarithmic if its largest value is at least this multiple of its smallest.
LOG_SCALE_RATIO = 20
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
NAME = Column("trial", "trial", lambda trial: trial.name)
PROBLEM = Column("problem", "problem", lambda trial: trial.problem, outputs=(CSV,))


def _has_rewards(study: SweepStudy) -> bool:
    return any(trial.val_reward is not None for trial in study.trials)


def format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else quote(value)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns the names of the settings, without their section where this is unambiguous."""
    names = [key.partition(".")[2] for key in keys]
    return {
        key: name if names.count(name) == 1 else key for key, name in zip(keys, names, strict=True)
    }


def _setting_columns(key: str, heading: str) -> list[Column]:
    """Returns the columns of a setting: for readers, and in CSV with the value as in YAML."""
    return [
        Column(
            key, heading, lambda trial: format_value(trial.chosen[key]), outputs=(TEXT, MARKDOWN)
        ),
        Column(key, "", lambda trial: _csv_value(trial.chosen[key]), outputs=(CSV,)),
    ]


def _csv_value(value: Any) -> Any:
    return (
        value
        if isinstance(value, int | float | str) and not isinstance(value, bool)
        else quote(value)
    )


def sweep_blocks(study: SweepStudy) -> Iterator[Block]:
    """Yields the report: the table, best trials first, and the problems of failed trials."""
    settings = [_setting_columns(key, name) for key, name in _short_names(study.keys).items()]
    columns = [NAME, *(column for pair in settings for column in pair)]
    columns += [*(REWARDS if _has_rewards(study) else LOSSES), *MEASURES, PROBLEM]
    yield Heading(study.runs_dir, 1)
    yield Table(columns, study.trials)
    yield Items([f"{trial.name}: {trial.problem}" for trial in study.trials if trial.problem])


def draw_sweep(study: SweepStudy) -> bytes:
    """Plots the best validation loss of every trial over each setting. Outliers and failed trials
    are at the upper edge.

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
        best = min(losses)
        spread = median(losses) - best
        top = min(max(losses), best + OUTLIER_FACTOR * spread) + 0.08 * (spread or 1.0)
    for axes, key in zip(panels, study.keys, strict=False):
        _draw(axes, study, key, top)
    for axes in list(panels)[len(study.keys) :]:
        axes.set_visible(False)
    if rewards:
        figure.axes[0].invert_yaxis()
        figure.axes[0].yaxis.set_major_formatter(lambda loss, _: f"{-loss:g}")
    outside = "▼ below" if rewards else "▲ above"
    figure.suptitle(f"★ best   {outside} the plot   × failed", fontsize=8, color=WRONG)
    figure.supylabel(
        "best val reward" if rewards else "best val loss (nats per token)", fontsize=10
    )
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
            axes.scatter(
                position,
                top,
                color=WRONG,
                s=28,
                marker="x" if trial.problem else outside,
                clip_on=False,
            )
    axes.set_ylim(top=top)
    axes.set_xlabel(_short_names(study.keys)[key])
    style_axes(axes)


def _axis_positions(values: Sequence[Any]) -> tuple[list[float], list[str]]:
    """Returns the axis position of each value, and tick labels: numbers are positions, other values
    get indices and labels.
    """
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return list(values), []
    names = list(dict.fromkeys(map(format_value, values)))
    return [names.index(format_value(value)) for value in values], names


def _is_within_axes(trial: TrialResult, top: float) -> bool:
    return trial.problem is None and trial.loss is not None and trial.loss <= top

"""`dantinox runs`: the runs below a folder, with their state, losses and the settings that differ
among them.
"""

import fcntl
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dantinox.config import load_config
from dantinox.config.names import flat_name
from dantinox.config.sections import DEFAULTS
from dantinox.config.yaml_files import did_you_mean, nearest_key
from dantinox.config.yaml_text import parse_value
from dantinox.files import UserError, escape_name, first_line, quote, read_json, read_text
from dantinox.report.metric_files import csv_columns, jsonl_columns
from dantinox.report.tables import Column, human_time, text_table, wrap_lines
from dantinox.run.directory import RunDirectory, is_failed_start

MAX_CONFIG_BYTES = 1 << 20
MAX_SUMMARY_BYTES = 1 << 20
MAX_COLUMNS = 8  # of settings in the table; JSON has all
# The loader in C is 6 times faster than that of `load_config`, whose stricter rules do not matter
# for a file that a run wrote.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class RunSummary:
    """A run in a list.

    Attributes:
      name: the path below the folder.
      state: `running`, `finished`, `stopped`, `untrained` (weights without steps, for example an
        import), `failed start`, or `unreadable`.
      step: the last step in the logs.
      last, best: the losses of the last and the best evaluation, or their rewards in training with
        rewards; `last` is the training loss if there is no evaluation.
      seconds: the time in training steps, without startup, compilation and evaluations.
      settings: dotted path → value of all settings; empty if the run has none.
      problem: why the run cannot be read.
    """

    name: str
    state: str
    step: int | None = None
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    rewarded: bool = False
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


COLUMNS = [field.name for field in fields(RunSummary) if field.name != "settings"]


def list_runs(folder: Path) -> list[RunSummary]:
    """Returns the runs below a folder, by name. A run that cannot be read is listed with the
    reason.

    Raises:
      UserError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}")
    return [
        _summary(str(path.relative_to(folder)), RunDirectory(path))
        for path in sorted(_run_paths(folder))
    ]


def differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the settings that differ among trained runs, those with the most values first."""
    trained = [run for run in runs if run.step is not None]
    counts = {key: len({repr(run.settings[key]) for run in trained}) for key in DEFAULTS}
    return sorted(
        (key for key, count in counts.items() if count > 1), key=counts.__getitem__, reverse=True
    )


def _run_paths(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        path = Path(name)
        if "config.yaml" in files or (".lock" in files and is_failed_start(RunDirectory(path))):
            yield path
            folders.clear()


def _summary(name: str, run: RunDirectory) -> RunSummary:
    try:
        if is_failed_start(run):
            return RunSummary(name, "running" if _is_locked(run) else "failed start")
        settings = _read_settings(run.config)
        found = RunSummary(name, "stopped", settings=settings)
        _read_logs(found, run, run.path / str(settings["logging.log_file"]))
        summary = run.path / str(settings["logging.summary_file"])
        if _is_locked(run):
            found.state = "running"
        elif found.step is None and run.weights_or_adapter.is_file():
            found.state = "untrained"
        elif summary.is_file() and _steps(summary) >= (found.step or 0):
            # A resumed run has logged more steps than the summary of its earlier part.
            found.state = "finished"
    except (UserError, OSError) as error:
        return RunSummary(name, "unreadable", problem=first_line(error))
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    """Returns dotted path → value of the settings of a run, without validation.

    Raises:
      UserError: the file cannot be read or is no config.
    """
    try:
        tree = yaml.load(read_text(path, MAX_CONFIG_BYTES), Loader=_Loader)
        return DEFAULTS | {
            f"{section}.{name}": value
            for section, values in tree.items()
            for name, value in values.items()
        }
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
        load_config(path)  # its error names the line
        raise UserError(f"{path} is not a config") from None


def _read_logs(found: RunSummary, run: RunDirectory, log: Path) -> None:
    intervals = _with_steps(
        jsonl_columns(run.metrics, "interval", ("step", "train_loss", "ms_per_step"))
    )
    rows = _with_steps(csv_columns(log, ("step", "val_loss", "val_reward")))
    steps = np.concatenate([intervals["step"], rows["step"]])
    if not steps.size:
        return
    found.step = int(steps.max())
    found.rewarded = bool(np.isfinite(rows["val_reward"]).any())
    values = rows["val_reward" if found.rewarded else "val_loss"]
    finite = np.flatnonzero(np.isfinite(values))
    if finite.size:
        best = finite[(np.argmax if found.rewarded else np.argmin)(values[finite])]
        found.best = float(values[best])
        found.best_step = int(rows["step"][best])
    # The last evaluation, or the last training loss if the evaluation is missing or not finite.
    found.last = next(
        (float(x[-1]) for x in (values, intervals["train_loss"]) if x.size and np.isfinite(x[-1])),
        None,
    )
    # Steps per logged interval; negative where a resumed run has gone back to its checkpoint.
    counts = np.diff(intervals["step"], prepend=0)
    found.seconds = float(np.nansum(intervals["ms_per_step"] * np.maximum(counts, 0))) / 1000


def _with_steps(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows of a log whose step is a number; a damaged log has others."""
    has_step = np.isfinite(columns["step"])
    return {name: column[has_step] for name, column in columns.items()}


def _is_locked(run: RunDirectory) -> bool:
    """Whether a process is training in a run directory."""
    path = run.path / ".lock"
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _steps(summary: Path) -> float:
    try:
        return float(read_json(summary, MAX_SUMMARY_BYTES)["steps"])
    except (ValueError, TypeError, KeyError, OverflowError):
        raise UserError(f"{summary} is not a summary of a run") from None


def select_runs(runs: Sequence[RunSummary], where: Sequence[str], sort: str) -> list[RunSummary]:
    """Returns the runs that meet all conditions `key=value`, in the order of the key `sort`; runs
    without it come last.

    A key is a field of `RunSummary`, or a setting, with or without its section.

    Raises:
      UserError: a key is unknown, or a condition has no `=`.
    """
    chosen = list(runs)
    for condition in where:
        key, equals, text = condition.partition("=")
        if not equals:
            raise UserError(f"--where must be KEY=VALUE, got {quote(condition)}")
        wanted = (text, parse_value(text))
        value_of = _value_function(key, "--where")
        # A failed start has no settings, which is not the value null.
        chosen = [
            run for run in chosen if value_of(run) in wanted and (key in COLUMNS or run.settings)
        ]
    value_of = _value_function(sort, "--sort")
    return sorted(
        chosen, key=lambda run: _sort_key(value_of(run), descending=sort == "best" and run.rewarded)
    )


def _sort_key(value: Any, descending: bool) -> tuple[bool, bool, Any]:
    """Returns a key that sorts numbers before other values, and missing values last."""
    is_number = isinstance(value, int | float)
    number = -value if is_number and descending else value
    return value is None, not is_number, number if is_number else str(value)


def _value_function(key: str, flag: str) -> Callable[[RunSummary], Any]:
    """Returns the function from a run to its value of a column or a setting, which a flag names."""
    if key in COLUMNS:
        return lambda run: getattr(run, key)
    found = [name for name in DEFAULTS if key in (name, flat_name(name))]
    if len(found) == 1:
        return lambda run: run.settings.get(found[0])
    if found:
        raise UserError(f"{flag} {escape_name(key)}: did you mean {' or '.join(found)}?")
    hint = (
        did_you_mean(nearest_key(key))
        or f": the columns are {', '.join(COLUMNS)}, and the settings"
    )
    raise UserError(f"{flag} {escape_name(key)} is not a column{hint}")


def run_lines(runs: Sequence[RunSummary], width: int) -> Iterator[str]:
    """Yields the table of the runs, then the reasons why some of them cannot be read."""
    keys = differing_settings(runs)
    names = [flat_name(key) for key in keys]
    columns = [
        Column("name", "run", lambda run: escape_name(run.name)),
        Column("state", "state", lambda run: run.state),
        Column("step", "step", lambda run: run.step, "d"),
        Column("last", "last", lambda run: run.last, ".4f"),
        Column("best", "best", lambda run: run.best, ".4f"),
        Column("best_step", "at step", lambda run: run.best_step, "d"),
        Column(
            "seconds", "time", lambda run: None if run.seconds is None else human_time(run.seconds)
        ),
    ]
    # `names` is longer than the columns, because a name that two keys share is ambiguous even if
    # only one of them has a column.
    for key, name in zip(keys[:MAX_COLUMNS], names, strict=False):
        heading = name if names.count(name) == 1 else key
        columns.append(Column(key, heading, partial(_setting_cell, key)))
    yield from text_table(columns, runs, max(width, 60))
    if len(keys) > MAX_COLUMNS:
        yield f"{len(keys) - MAX_COLUMNS} more settings differ: --json lists them"
    yield from wrap_lines(
        [f"{escape_name(run.name)}: {run.problem}" for run in runs if run.problem], max(width, 60)
    )


def _setting_cell(key: str, run: RunSummary) -> str | None:
    if not run.settings:
        return None
    value = run.settings[key]
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return escape_name(value) if isinstance(value, str) else quote(value)

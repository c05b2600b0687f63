"""Metric files of a run: `training_log.csv` and `metrics.jsonl`.

Every row is on the disk before `append` returns, floats are written so that they read back bitwise, and `cut` takes a log back
to an earlier step.
"""

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dantinox.files import UserError, atomic_write, wrap_os_errors
from dantinox.report.trackers import Tracker

HEADER = "step,train_loss,val_loss,ms_per_step,lr,grad_norm,bits_per_byte,tokens,tokens_per_s,memory_gb,mfu,muon_lr"
COLUMNS = HEADER.split(",")
LEAST_COLUMNS = COLUMNS.index("memory_gb") + 1  # a log that an older version began is gone on with as it is


@dataclass(frozen=True)
class MetricsLog:
    """The two files; a row may leave cells of the CSV empty, its JSON line leaves them out.

    As a context it ends what it told the trackers.
    """

    path_csv: Path
    path_jsonl: Path
    trackers: tuple[Tracker, ...] = ()

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Adds an evaluation to both files.

        Raises:
          UserError: a file cannot be written, or the CSV was begun with other columns.
          ValueError: `row` has a name that is no column.
        """
        unknown = set(row) - set(COLUMNS)
        if unknown:
            raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
        header = _read(self.path_csv).partition(b"\n")[0].decode(errors="replace")
        columns = header.split(",") if header else COLUMNS
        if columns != COLUMNS[: len(columns)] or len(columns) < LEAST_COLUMNS:
            raise UserError(f"{self.path_csv} has the columns {header[:200]}, this version writes {HEADER}")
        cells = ["" if row.get(column) is None else repr(_plain(row[column])) for column in columns]
        _append(self.path_csv, "" if header else f"{HEADER}\n", ",".join(cells) + "\n")
        self.event("evaluation", row)

    def cut(self, step: int) -> None:
        """Removes all rows past `step`, and whatever a crash tore, from both files; to be called before the first row."""
        told = max((_step_of(line) or 0 for line in _read(self.path_jsonl).splitlines()), default=0) if self.trackers else 0
        for path in (self.path_csv, self.path_jsonl):
            _cut(path, step)
        for tracker in self.trackers:
            tracker.begin(step, told, read_jsonl(self.path_jsonl))

    def sample(self, step: int, text: str) -> None:
        """Shows the trackers a text that the model wrote."""
        for tracker in self.trackers:
            tracker.text(step, text)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for tracker in self.trackers:
            tracker.end(failed=failure is not None)

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """Adds an `interval` of `logging.log_every` steps, or something that happened, to the JSON lines.

        `row` has a `step` no smaller than that of the row before.
        """
        plain = {name: _plain(value) for name, value in row.items() if value is not None}
        # JSON has no NaN: such a value is null here, and `nan` in the CSV.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in plain.items()}
        _append(self.path_jsonl, json.dumps({"kind": kind} | finite, allow_nan=False) + "\n")
        for tracker in self.trackers:
            tracker.row(kind, finite)


def _cut(path: Path, step: int) -> None:
    """Keeps the header and the leading whole rows up to `step` of a CSV or JSON-lines file; a missing file stays missing."""
    content, kept = _read(path), b""
    for line in content.splitlines(keepends=True):
        at = _step_of(line) if kept or path.suffix == ".jsonl" else -1  # a CSV begins with its header
        if not line.endswith(b"\n") or at is None or at > step:
            break
        kept += line
    if len(kept) != len(content):
        atomic_write(path, kept)


def _step_of(line: bytes) -> int | None:
    first = line.split(b",", 1)[0]
    if first.isdigit():
        return int(first)
    try:
        at = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return at if isinstance(at, int) else None


def _read(path: Path) -> bytes:
    """The content of a file, nothing of a missing one."""
    with wrap_os_errors(f"cannot read {path}"):
        return path.read_bytes() if path.exists() else b""


def _whole_lines(path: Path) -> str:
    """The text of a log without a torn last line."""
    return _read(path).decode().rpartition("\n")[0]


def read_csv(path: Path) -> list[dict[str, float]]:
    """The rows of a log; empty cells are left out, and so is a torn last line. A missing file has none.

    Raises:
      UserError: the file cannot be read or is no log.
    """
    try:
        reader = csv.DictReader(io.StringIO(_whole_lines(path)), strict=True)
        return [{name: float(cell) for name, cell in row.items() if cell} for row in reader]
    except (ValueError, TypeError, csv.Error):
        raise UserError(f"{path} is not a training log: a cell is not a number") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a torn last line. A missing file has none.

    Raises:
      UserError: the file cannot be read or holds something else.
    """
    try:
        return [json.loads(line) for line in _whole_lines(path).split("\n") if line]
    except ValueError as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def _append(path: Path, *texts: str) -> None:
    """Adds texts and waits for the disk. Opened each time: a directory that vanished is noticed at once."""
    with wrap_os_errors(f"cannot write {path}"), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(texts)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """A Python number for a NumPy or jax scalar."""
    return value.item() if hasattr(value, "item") else value

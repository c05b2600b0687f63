"""Metric files of a run: `training_log.csv` and `metrics.jsonl`.

Every row is on disk before the method that adds it returns. Floats are written with enough digits
to be read back exactly. `truncate` removes the rows after a step.
"""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dantinox.files import UserError, wrap_os_errors
from dantinox.report.trackers import Tracker

COLUMNS = [
    "step", "train_loss", "val_loss", "ms_per_step", "lr", "grad_norm", "bits_per_byte", "tokens",
    "tokens_per_s", "memory_gb", "mfu", "muon_lr", "reward", "val_reward",
]  # fmt: skip
HEADER = ",".join(COLUMNS)
# An older version wrote fewer columns, but at least these. Its log keeps its columns if a run
# continues it.
MIN_COLUMNS = COLUMNS.index("memory_gb") + 1
BLOCK_BYTES = 1 << 20  # that are parsed together
Columns = dict[str, np.ndarray]  # name → float64 `[rows]`, NaN where a row lacks the value


def evaluation_loss(row: Mapping[str, Any]) -> float:
    """Returns what an evaluation minimizes: its validation loss, or its validation reward times −1.
    NaN if it has neither.
    """
    if row.get("val_reward") is not None:
        return -float(row["val_reward"])
    return math.nan if row.get("val_loss") is None else float(row["val_loss"])


def best_evaluation(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of the best evaluation; empty if no row has a finite loss or reward."""
    return min(
        (row for row in rows if math.isfinite(evaluation_loss(row))),
        key=evaluation_loss,
        default={},
    )


@dataclass(frozen=True)
class MetricsLog:
    """Writes the two metric files and passes their rows to the trackers.

    A row may lack values: their cells are empty in the CSV and absent from the JSON line. On exit,
    the context manager ends the trackers.
    """

    path_csv: Path
    path_jsonl: Path
    trackers: tuple[Tracker, ...] = ()

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Adds an evaluation to both files.

        Raises:
          UserError: a file cannot be written, or the CSV has other columns.
          ValueError: `row` has a name that is not a column.
        """
        unknown = set(row) - set(COLUMNS)
        if unknown:
            raise ValueError(f"unknown columns: {', '.join(sorted(unknown))}")
        header = next(_lines(self.path_csv), b"").rstrip(b"\n").decode(errors="replace")
        columns = header.split(",") if header else COLUMNS
        if columns != COLUMNS[: len(columns)] or len(columns) < MIN_COLUMNS:
            raise UserError(
                f"{self.path_csv} has the columns {header[:200]}, but this version writes {HEADER}"
            )
        cells = ["" if row.get(column) is None else repr(_plain(row[column])) for column in columns]
        _append(self.path_csv, "" if header else f"{HEADER}\n", ",".join(cells) + "\n")
        self.event("evaluation", row)

    def truncate(self, step: int) -> None:
        """Removes rows after `step`, and rows that a crash left incomplete, from both files. Call
        it before adding a row.
        """
        last_step = (
            max((_step_of(line) or 0 for line in _lines(self.path_jsonl)), default=0)
            if self.trackers
            else 0
        )
        for path in (self.path_csv, self.path_jsonl):
            _truncate(path, step)
        for tracker in self.trackers:
            tracker.begin(step, last_step, iter_jsonl(self.path_jsonl))

    def sample(self, step: int, text: str) -> None:
        """Passes a generated text to the trackers."""
        for tracker in self.trackers:
            tracker.text(step, text)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        for tracker in self.trackers:
            tracker.end(failed=failure is not None)

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """Adds a row to the JSON lines. `kind` is `interval` (of `logging.log_every` steps), or the
        kind of another event.

        The `step` of `row` must not be smaller than that of the previous row.
        """
        plain = {name: _plain(value) for name, value in row.items() if value is not None}
        # JSON has no NaN: the value is null here and `nan` in the CSV.
        finite = {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in plain.items()
        }
        _append(self.path_jsonl, json.dumps({"kind": kind} | finite, allow_nan=False) + "\n")
        for tracker in self.trackers:
            tracker.row(kind, finite)


def _truncate(path: Path, step: int) -> None:
    """Shortens a CSV or JSON-lines file to its header and its leading complete rows up to `step`.
    The file may be missing.
    """
    kept = 0
    for line in _lines(path):
        # A CSV begins with its header, which counts as step −1.
        at = _step_of(line) if kept or path.suffix == ".jsonl" else -1
        if not line.endswith(b"\n") or at is None or at > step:
            break
        kept += len(line)
    with wrap_os_errors(f"cannot write {path}"):
        if path.exists() and kept != path.stat().st_size:
            with open(path, "r+b") as file:
                file.truncate(kept)
                os.fsync(file.fileno())


def _step_of(line: bytes) -> int | None:
    first = line.split(b",", 1)[0]
    if first.isdigit():
        return int(first)
    try:
        at = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return at if isinstance(at, int) else None


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[IO[bytes]]:
    """Opens a log to read it; it is empty if the file does not exist.

    Raises:
      UserError: the file cannot be read, or is not a regular file: reading a pipe might never end.
    """
    with wrap_os_errors(f"cannot read {path}"):
        if not path.exists():
            yield io.BytesIO()
            return
        if not path.is_file():
            raise UserError(f"cannot read {path}: it is not a regular file")
        with path.open("rb") as file:
            yield file


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file with their ends; none if the file does not exist."""
    with _open_log(path) as file:
        yield from file


def _whole_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a log without an incomplete last line."""
    return (line for line in map(bytes.decode, _lines(path)) if line.endswith("\n"))


def csv_columns(path: Path, names: Sequence[str]) -> Columns:
    """Returns columns of a training log, without an incomplete last line; no rows if the file does
    not exist.

    The file is read in blocks, because a log may have millions of rows.

    Args:
      names: the columns to return. A column that the log lacks is NaN.

    Raises:
      UserError: the file cannot be read or is not a training log.
    """
    header: list[str] = []

    def read(text: str) -> np.ndarray:
        if not header:
            first, _, text = text.partition("\n")
            header.extend(first.split(","))
        count = text.count("\n")
        if text.count(",") != count * (len(header) - 1):
            raise ValueError
        text = text.replace(",,", ",nan,").replace(",,", ",nan,").replace(",\n", ",nan\n")
        found = np.full((len(names), count), math.nan)
        known = [name in header for name in names]
        places = [header.index(name) for name in names if name in header]
        if places and count:
            found[known] = np.loadtxt(
                text.splitlines(), delimiter=",", usecols=places, ndmin=2, comments=None
            ).T
        return found

    return _columns(path, names, read)


def jsonl_columns(path: Path, kind: str, names: Sequence[str]) -> Columns:
    """Returns columns of the rows of one kind of a metrics file, as `csv_columns` does. A missing
    value or null is NaN.

    Raises:
      UserError: the file cannot be read or is not JSON lines.
    """

    def read(text: str) -> np.ndarray:
        # One call for a block of lines is faster than a call for each line.
        rows = [
            row
            for row in json.loads("[" + text[:-1].replace("\n", ",") + "]")
            if row.get("kind") == kind
        ]
        return np.array([[row.get(name) for row in rows] for name in names], float).reshape(
            len(names), len(rows)
        )

    return _columns(path, names, read)


def _columns(path: Path, names: Sequence[str], read: Callable[[str], np.ndarray]) -> Columns:
    """Returns the columns that `read` finds in blocks of complete lines, as arrays
    `[names, rows]`.
    """
    with _wrap_log_errors(path):
        found = [np.zeros((len(names), 0)), *map(read, _blocks(path))]
    return dict(zip(names, np.concatenate(found, axis=1), strict=True))


def _blocks(path: Path) -> Iterator[str]:
    """Yields the complete lines of a file in texts of about `BLOCK_BYTES`, without empty lines;
    none if it does not exist.
    """
    with _open_log(path) as file:
        incomplete = b""
        while data := file.read(BLOCK_BYTES):
            lines, _, incomplete = (incomplete + data).rpartition(b"\n")
            text = lines.decode().replace("\r\n", "\n").strip("\n")
            while "\n\n" in text:
                text = text.replace("\n\n", "\n")
            if text:
                yield text + "\n"


@contextlib.contextmanager
def _wrap_log_errors(path: Path) -> Iterator[None]:
    """Raises a UserError for the errors of parsers that read the metric file `path`."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, csv.Error):
        what = "JSON lines" if path.suffix == ".jsonl" else "a training log: a cell is not a number"
        raise UserError(f"{path} is not {what}") from None


def read_csv(path: Path) -> list[dict[str, float]]:
    """Returns the rows of a training log, or no rows if the file does not exist.

    Empty cells and an incomplete last line are left out.

    Raises:
      UserError: the file cannot be read or is not a training log.
    """
    with _wrap_log_errors(path):
        rows = csv.reader(_whole_lines(path), strict=True)
        header = next(rows, [])
        return [
            {name: float(cell) for name, cell in zip(header, row, strict=True) if cell}
            for row in rows
            if row
        ]


def iter_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file, or no rows if the file does not exist. An incomplete last
    line is left out.

    Raises:
      UserError: the file cannot be read or is not JSON lines.
    """
    try:
        for line in _whole_lines(path):
            if line != "\n":
                yield json.loads(line)
    except ValueError as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `iter_jsonl`."""
    return list(iter_jsonl(path))


def _append(path: Path, *texts: str) -> None:
    """Appends texts and waits until they are on disk. Each call opens the file, so that a deleted
    directory raises an error.
    """
    with (
        wrap_os_errors(f"cannot write {path}"),
        open(path, "a", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(texts)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """Converts a NumPy or JAX scalar to a Python number."""
    return value.item() if hasattr(value, "item") else value

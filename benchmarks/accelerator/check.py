"""Runs the rows of the check, each in its own process, and writes results and a table.

This process does not import JAX: a row has the memory of the accelerator for itself. Each result is
one line of `results.jsonl`, written at once, and `table.md` is replaced after every row, so both
are complete up to the last row even if this process is killed.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import NOT_GOOD, ROWS, Row

from dantinox.files import atomic_write

RESERVE = 3.0  # seconds to write the table
FOLDER = Path(__file__).parent
DETAILS = 30  # lines of the output of a failed row that are kept


class Results:
    """The results of a folder, by row: the last line of each row counts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "results.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line that a killed process did not finish
                    result = json.loads(line)
                    self.rows[result["row"]] = result

    def add(self, result: dict[str, Any]) -> None:
        """Appends a result and rewrites the table."""
        unfinished = self.path.exists() and not self.path.read_bytes().endswith(
            b"\n"
        )  # by a killed process
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * unfinished + json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[result["row"]] = result
        self.write_table()

    def write_table(self) -> None:
        """Replaces the table."""
        atomic_write(self.folder / "table.md", format_table(self.rows))


def run_rows(
    names: Sequence[str],
    results: Results,
    *,
    smoke: bool,
    minutes: float,
    table: Mapping[str, Row] = ROWS,
) -> None:
    """Runs rows until the time is up; rows without a result stand in the table as not run."""
    end = time.monotonic() + 60 * minutes
    for name in names:
        row, left = table[name], end - time.monotonic() - RESERVE
        if left < (5 if smoke else 0.8 * row.seconds):
            results.add(
                {
                    "row": name,
                    "verdict": "not run",
                    "reason": f"{max(0, left):.0f} seconds were left",
                }
            )
            continue
        print(f"{name}: {row.what} (about {row.seconds} s)", file=sys.stderr, flush=True)
        result = run_row(row, results.folder, min(left, row.limit), smoke)
        results.add(result)
        print(f"  {result['verdict']}: {summary(result)}", file=sys.stderr, flush=True)
        print(
            *(f"    {line}\n" for line in result.get("output", ())),
            sep="",
            end="",
            file=sys.stderr,
            flush=True,
        )


def run_row(row: Row, folder: Path, limit: float, smoke: bool) -> dict[str, Any]:
    """Runs one row in a process of its own, and returns its result."""
    answer, output, began = folder / f"{row.name}.part", folder / "output.txt", time.monotonic()
    answer.unlink(missing_ok=True)
    options = {
        "--row": row.name,
        "--measure": row.measure,
        "--answer": str(answer),
        "--out": str(folder),
    }
    command = [
        sys.executable,
        str(FOLDER),
        *itertools.chain(*options.items()),
        *["--smoke"] * smoke,
    ]
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if smoke:  # the programs run for milliseconds
        environment["XLA_FLAGS"] = (
            f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
        )
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also after an interruption, and for the processes that the row has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"row": row.name, "seconds": round(time.monotonic() - began, 1)}
    with contextlib.suppress(OSError, ValueError):
        found |= json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    if "verdict" not in found:
        said = output.read_text(encoding="utf-8", errors="replace").splitlines()[-DETAILS:]
        ended = (
            f"killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit status {code}"
        )
        reason = f"stopped after {limit:.0f} seconds" if code is None else ended
        found |= {
            "verdict": "time limit" if code is None else "killed",
            "reason": reason,
            "output": said,
        }
    return found


def summary(result: Mapping[str, Any]) -> str:
    """Returns the figures of a result, or its reason."""
    figures = result.get("figures", {})
    text = ", ".join(f"{name} {format_figure(value)}" for name, value in figures.items())
    return "; ".join(filter(None, (text, result.get("reason", ""))))


def format_figure(value: Any) -> str:
    """Formats a number with four significant digits, and thousands with commas."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_table(results: Mapping[str, Mapping[str, Any]], table: Mapping[str, Row] = ROWS) -> str:
    """Formats results as a Markdown table below a line about the machine."""
    machine = next((result["machine"] for result in results.values() if "machine" in result), {})
    lines = [
        ", ".join(f"{name}: {value}" for name, value in machine.items()) or "No row has run.",
        "",
    ]
    lines += ["| row | verdict | figures | good | seconds |", "|---|---|---|---|---|"]
    for name, row in table.items():
        result = results.get(name, {"verdict": "not run"})
        bars = ", ".join(
            f"{bar.figure} {'≥' if bar.good >= bar.broken else '≤'} {format_figure(bar.good)}"
            for bar in row.bars
        )
        cells = [
            name,
            result["verdict"],
            summary(result).replace("|", "\\|"),
            bars or "–",
            result.get("seconds", "–"),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def chosen_rows(names: Sequence[str], results: Results, again: bool) -> list[str]:
    """Returns the rows to run, in the order of the check.

    Args:
      again: only rows whose last verdict is not good, and rows that have not run.
    """
    chosen = [name for name in ROWS if not names or name in names]
    if again:
        chosen = [
            name
            for name in chosen
            if results.rows.get(name, {}).get("verdict", "not run") in (*NOT_GOOD, "not run")
        ]
    return chosen

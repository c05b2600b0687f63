"""Runs all checks of a release, and writes one table: `python -m tests.release_check [CHECK …]`
(`make release-check`).

Each check is a target of the Makefile. Its output goes to `build/release-check/CHECK.log`. The
table is `build/release-check/table.md`; it is written again after each check, so an interrupted run
leaves the rows of the finished checks. A check that has passed at the same commit is not repeated,
unless it is named.
"""

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from dantinox.files import atomic_write
from dantinox.machine import cpu_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "release-check"
CHECKS = (  # targets of the Makefile
    *("lint", "test", "test-isa", "test-all", "docs", "benchmarks", "faults", "aot", "real"),
    *("parity", "tokenizers", "serve-test", "test-browser", "sanitize"),
)
OUTCOME = re.compile(r"\b(\d+) (passed|failed|skipped|errors?)\b")  # of pytest's last lines


class Row(NamedTuple):
    """The result of a check.

    Attributes:
      commit: the commit that was checked; None if files are changed or git is absent.
      passed: whether make exited with 0.
      outcome: the counts of pytest, or the last line of the output.
      seconds, cpu_seconds: on the clock, and of all processes.
    """

    commit: str | None
    passed: bool
    outcome: str
    seconds: float
    cpu_seconds: float


def current_commit() -> str | None:
    """Returns the commit of the checkout; None if files are changed, or if git is absent."""
    try:
        outputs = [
            subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if outputs[1] else outputs[0]


def summarize(output: str) -> str:
    """Returns the counts of all pytest runs in an output, `8 passed, 1 skipped`; without one, the
    last line.
    """
    counts = Counter[str]()
    for count, kind in OUTCOME.findall(output):
        counts[kind.removesuffix("s")] += int(count)
    if counts:
        return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:100] if lines else "no output"


def run_check(name: str, commit: str | None) -> Row:
    """Runs a check to its end."""
    log, before = FOLDER / f"{name}.log", resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with log.open("w") as file:
        # make does not accept a space in a path, but a relative path need not contain that of this
        # folder.
        command = ["make", name, f"VENV={os.path.relpath(sys.prefix, ROOT)}"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Row(
        commit,
        done.returncode == 0,
        summarize(log.read_text(errors="replace")),
        seconds,
        cpu_seconds,
    )


def table(rows: dict[str, Row]) -> str:
    """Formats the rows as Markdown."""
    lines = [
        (
            f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, Python"
            f" {platform.python_version()}"
        ),
        "",
        "| check | result | outcome | minutes | CPU-minutes |",
        "|---|---|---|---|---|",
    ]
    for name in CHECKS:
        if name not in rows:
            lines.append(f"| {name} | not run | | | |")
            continue
        row = rows[name]
        result = "passed" if row.passed else "**failed**"
        lines.append(
            f"| {name} | {result} | {row.outcome} | {row.seconds / 60:.1f} |"
            f" {row.cpu_seconds / 60:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the checks; returns 0 if all have passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"one of {', '.join(CHECKS)}")
    named = parser.parse_args().checks
    if unknown := [name for name in named if name not in CHECKS]:
        parser.error(f"there is no check {unknown[0]}: the checks are {', '.join(CHECKS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    commit, file, rows = current_commit(), FOLDER / "results.json", {}
    if file.exists():
        rows = {
            name: Row(*row) for name, row in json.loads(file.read_text()).items() if name in CHECKS
        }
        rows = {name: row for name, row in rows.items() if commit and row.commit == commit}
    for name in named or [name for name in CHECKS if name not in rows or not rows[name].passed]:
        print(f"{name} (output: {FOLDER / name}.log)", flush=True)
        rows[name] = run_check(name, commit)
        atomic_write(file, json.dumps(rows))
        atomic_write(FOLDER / "table.md", table(rows))
    print(table(rows), end="")
    return 0 if all(name in rows and rows[name].passed for name in CHECKS) else 1


if __name__ == "__main__":
    sys.exit(main())

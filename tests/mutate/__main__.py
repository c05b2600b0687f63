"""Counts the mutants that `make test` and `make test-all` find: `python -m tests.mutate`.

`--map` runs every test and records which lines it executes. Without it, the program draws mutants,
runs the tests of each, and prints a table. Each mutant is a copy of the repository.

The tests of a mutant, in this order: the tests that execute its line; the other tests of their
files, which may use the results of a fixture or of a traced program; and the tests of the package's
folder that start processes, where coverage is not measured. If the line runs on import, they are
the tests that execute a line of the module, and all tests of the folder. `--budget` limits the time
of these tests. Tests that fail without a mutant are left out.

A test file that takes more than four times its usual time and a minute counts as failed.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression  # what pytest evaluates -m with

from tests.mutate.line_map import Tests, find_tests, load_map, map_tests
from tests.mutate.operators import Mutant, draw
from tests.mutate.processes import ROOT, STORE, copy_repository, preload, run_forked, run_pytest

PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
Steps = list[tuple[str, list[str]]]  # test files and the tests to run of each
Stages = list[tuple[str, str, Steps]]  # result if a test fails, marker expression, tests


def all_markers() -> str:
    """Returns the marker expression of `make test-all`, the variable ALL of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^ALL := (.+)$", makefile, re.MULTILINE)
    assert found is not None, "the Makefile has no variable ALL"
    return found[1]


def is_selected(expression: str, markers: list[str]) -> bool:
    """Evaluates a marker expression for a test with these markers."""
    return Expression.compile(expression).evaluate(lambda name, /, **_: name in markers)


def order_tests(mutant: Mutant, covering: set[str], tests: Tests) -> Steps:
    """Returns the tests that may find a mutant: the most likely first, then the cheapest files."""
    path = Path(mutant.file)
    folder, namesake = Path("tests", *path.parts[1:-1]), f"test_{path.stem}.py"
    folder = Path(*folder.parts[:2])
    ranked = []
    for file, known in tests.items():
        mirrors = Path(file).parent == folder
        first = [name for name in known if name in covering]
        others = [name for name in known if name not in covering]
        started = any(known[name]["starts_processes"] for name in others)
        for rank, names in enumerate((first, others)):
            if names and (first or (mirrors and (mutant.on_import or started))):
                seconds = sum(known[name]["seconds"] for name in names)
                likely = mirrors and Path(file).name == namesake
                ranked.append((rank if first else 2, not likely, not mirrors, seconds, file, names))
    return [(file, names) for *_, file, names in sorted(ranked)]


def split_steps(steps: Steps, seconds: dict[str, float], budget: float) -> tuple[Steps, Steps]:
    """Returns the first tests, of at least `budget` seconds together, and the rest."""
    begin: Steps = []
    rest: Steps = []
    for file, names in steps:
        count = 0
        for name in names:
            if budget <= 0:
                break
            budget -= seconds[name]
            count += 1
        begin.append((file, names[:count]))
        rest.append((file, names[count:]))
    return [step for step in begin if step[1]], [step for step in rest if step[1]]


def plan_stages(steps: Steps, tests: Tests, options: argparse.Namespace) -> Stages:
    """Returns quick tests and others within the budget, and the rest of the quick tests.

    The last stage only runs if the second one finds the mutant, so that the budget does not decide
    which of the two commands finds it.
    """

    def select(expression: str, excluded: str = "") -> Steps:
        chosen = []
        for file, names in steps:
            markers = {name: tests[file][name]["markers"] for name in names}
            chosen.append((file, [
                name for name in names
                if is_selected(expression, markers[name])
                and not (excluded and is_selected(excluded, markers[name]))
            ]))  # fmt: skip
        return chosen

    seconds = {name: test["seconds"] for known in tests.values() for name, test in known.items()}
    quick, left = split_steps(select(options.quick), seconds, options.budget)
    stages = [("quick", options.quick, quick)]
    if not options.quick_only:
        others, _ = split_steps(select(options.all, options.quick), seconds, options.budget)
        stages += [("all", options.all, others), ("quick", options.quick, left)]
    return stages


class Judge:
    """A plugin of pytest that runs the tests of a mutant and keeps the first failure."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.failed = set(names), ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Selects the tests, or keeps all tests of the file if the mutant changed their names."""
        chosen = [item for item in items if item.nodeid in self.names]
        if len(chosen) == len(self.names):
            items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed = self.failed or (f"import of {report.nodeid}" if report.failed else "")


def judge(folder: Path, stages: Stages, seconds: dict[str, float]) -> None:
    """Runs the tests of a mutant, and writes the verdict.

    Each step begins with the verdict that holds if the process ends within it.
    """
    verdict = {"result": "survived", "test": ""}

    def write(result: str, test: str) -> dict[str, str]:
        written = {"result": result, "test": test}
        (folder / "verdict.json").write_text(json.dumps(written))
        return written

    for number, (result, expression, steps) in enumerate(stages):
        if verdict["result"] == "quick" or (number == 2 and verdict["result"] == "survived"):
            break
        for file, names in steps:
            write(result, f"{file}: the process ended")
            signal.alarm(60 + 4 * int(sum(seconds[name] for name in names)))
            plugin = Judge(names)
            code = run_pytest(folder, file, expression, plugin, "-x")
            signal.alarm(0)
            if code not in PASSED:
                verdict = {"result": result, "test": plugin.failed or f"import of {file}"}
                break
    write(**verdict)


def judge_mutants(
    mutants: list[Mutant],
    tests: Tests,
    work: Path,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Runs the tests of each mutant, and yields the mutant with the verdict."""
    coverage = find_tests(mutants, tests)
    seconds = {name: test["seconds"] for known in tests.values() for name, test in known.items()}

    def jobs() -> Iterator[tuple[Mutant, Path, Callable[[], None]]]:
        for number, mutant in enumerate(mutants):
            folder = work / str(number)
            shutil.copytree(work / "template", folder / "tree", symlinks=True)
            shutil.copytree(STORE / "cache", folder / "cache")
            path = folder / "tree" / mutant.file
            path.write_bytes(mutant.apply(path.read_bytes()))
            steps = order_tests(mutant, coverage[mutant][1], tests)
            stages = plan_stages(steps, tests, options)
            yield mutant, folder, partial(judge, folder, stages, seconds)

    for mutant, folder, code, took in run_forked(jobs(), options.workers):
        verdict = json.loads((folder / "verdict.json").read_text())
        if code == -signal.SIGALRM:
            verdict["test"] = verdict["test"].replace("the process ended", "time limit")
        if verdict["result"] == "survived" and not coverage[mutant][0]:
            verdict["result"] = "not covered"
        yield asdict(mutant) | verdict | {"seconds": round(took, 1)}


def format_table(judged: list[tuple[Mutant, str]]) -> str:
    """Formats the results of the mutants by group, and lists the mutants that no test found."""
    columns = ("quick", "all", "survived", "not covered")
    lines = [
        "| group | mutants | found by quick | only by all | survived | not covered | quick / all |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, groups in (("core", (True,)), ("rest", (False,)), ("total", (True, False))):
        counts = Counter(result for mutant, result in judged if mutant.core in groups)
        found = counts["quick"] + counts["all"]
        share = f"{counts['quick'] / found:.1%}" if found else "–"
        cells = [name, counts.total(), *(counts[column] for column in columns), share]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    judged = sorted(judged, key=lambda pair: (pair[0].file, pair[0].line))
    missed = [(mutant, result) for mutant, result in judged if result in columns[2:]]
    lines += ["", *(f"* {mutant} ({result})" for mutant, result in missed)]
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--map", action="store_true", help="record which tests execute which lines")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--mutants", type=int, default=400, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--files", nargs="+", default=["dantinox"], help="folders to mutate")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders of tests")
    parser.add_argument("--quick-only", action="store_true", help="run the quick tests only")
    markers = all_markers()
    for name, default in (("quick", f"not slow and {markers}"), ("all", markers)):
        parser.add_argument(f"--{name}", default=default, help=f"markers of the {name} tests")
    parser.add_argument("--budget", type=float, default=45, help="seconds of tests per set")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--output", type=Path, default=STORE / "mutants.jsonl", help="results")
    return parser.parse_args()


def list_files(folders: list[str], pattern: str) -> list[str]:
    paths = {path for folder in folders for path in (ROOT / folder).rglob(pattern)}
    paths |= {ROOT / folder for folder in folders if (ROOT / folder).is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def main() -> None:
    options = parse_options()
    test_files = list_files(options.tests, "test_*.py")
    work = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        copy_repository(work / "template")
        preload()
        if options.map:
            map_tests(test_files, work, options)
            return
        sources = {file: (ROOT / file).read_bytes() for file in list_files(options.files, "*.py")}
        mutants = draw(sources, options.mutants, options.seed)
        results: dict[tuple, str] = {}
        if options.resume and options.output.exists():
            for line in options.output.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                results[row["file"], row["start"], row["end"], row["text"]] = row["result"]
        waiting = [mutant for mutant in mutants if mutant.key not in results]
        began = time.monotonic()
        with options.output.open("a" if options.resume else "w", encoding="utf-8") as output:
            for row in judge_mutants(waiting, load_map(test_files), work, options):
                print(json.dumps(row, ensure_ascii=False), file=output, flush=True)
                results[row["file"], row["start"], row["end"], row["text"]] = row["result"]
                print(row["result"], row["file"], row["line"], row["seconds"], file=sys.stderr)
        minutes = (time.monotonic() - began) / 60
        print(f"{len(waiting)} mutants in {minutes:.1f} minutes", file=sys.stderr)
        print(format_table([(mutant, results[mutant.key]) for mutant in mutants]))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

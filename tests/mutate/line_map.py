"""The map from the lines of the package to the tests that execute them."""

import argparse
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.mutate.operators import Mutant
from tests.mutate.processes import STORE, run_forked, run_pytest

MAP = STORE / "map"
Tests = dict[str, dict[str, dict[str, Any]]]  # test file → test → what `Recorder` records


@dataclass
class Recorder:
    """A plugin of pytest: the time, the markers and the outcome of each test, and its lines."""

    coverage: Any
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts_processes: bool = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            markers = sorted({marker.name for marker in item.iter_markers()})
            self.tests[item.nodeid] = {"seconds": 0.0, "markers": markers, "passed": True}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= not report.failed
        test["ran"] = True

    def audit(self, event: str, arguments: tuple) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"):
            self.starts_processes = True


def map_path(file: str, suffix: str) -> Path:
    return MAP / (file.replace("/", "+") + suffix)


def record(folder: Path, file: str, expression: str) -> None:
    """Runs a test file, and writes the lines and the times of its tests."""
    from coverage import Coverage

    os.environ["COVERAGE_CORE"] = "ctrace"  # the default of newer Pythons has no contexts
    path = str(map_path(file, ".coverage"))
    measured = Coverage(data_file=path, source=["dantinox"], config_file=False, messages=False)
    measured.set_option("run:relative_files", True)
    measured.erase()
    recorder = Recorder(measured)
    measured.start()
    sys.addaudithook(recorder.audit)
    run_pytest(folder, file, expression, recorder)
    measured.stop()
    measured.save()
    tests = {name: test for name, test in recorder.tests.items() if test.pop("ran", False)}
    for test in tests.values():
        test["starts_processes"] = recorder.starts_processes
    map_path(file, ".json").write_text(json.dumps(tests))


def map_tests(files: list[str], work: Path, options: argparse.Namespace) -> None:
    """Maps test files that are not mapped yet."""
    (STORE / "cache").mkdir(parents=True, exist_ok=True)
    MAP.mkdir(exist_ok=True)

    def jobs() -> Iterator[tuple[str, Path, Callable[[], None]]]:
        for number, file in enumerate(files):
            if options.resume and map_path(file, ".json").exists():
                continue
            folder = work / str(number)
            shutil.copytree(work / "template", folder / "tree", symlinks=True)
            (folder / "cache").symlink_to(STORE / "cache")
            map_path(file, ".json").unlink(missing_ok=True)
            yield file, folder, partial(record, folder, file, options.all)

    for file, folder, code, seconds in run_forked(jobs(), options.workers):
        shutil.copy(folder / "output.txt", map_path(file, ".txt"))
        if code:
            print(f"{file}: the process ended with {code}: its tests are left out", flush=True)
            continue
        tests = json.loads(map_path(file, ".json").read_text())
        failed = [name for name, test in tests.items() if not test["passed"]]
        print(f"{file}: {len(tests)} tests, {seconds:.0f} s", *failed, sep="\n  fails: ")
        sys.stdout.flush()


def load_map(files: list[str]) -> Tests:
    """Returns the recorded tests of these files, without the tests that failed."""
    found: Tests = {}
    for file in files:
        if map_path(file, ".json").exists():
            tests = json.loads(map_path(file, ".json").read_text())
            found[file] = {name: test for name, test in tests.items() if test["passed"]}
    return found


def find_tests(mutants: list[Mutant], files: Iterable[str]) -> dict[Mutant, tuple[bool, set[str]]]:
    """Returns, for each mutant, whether anything executes its line, and the tests that do.

    The lines of its whole statement stand for its own lines if no test executes these.
    """
    from coverage import CoverageData

    modules: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        modules[mutant.file].append(mutant)
    near: dict[Mutant, set[str]] = defaultdict(set)
    wide: dict[Mutant, set[str]] = defaultdict(set)
    for file in files:
        data = CoverageData(basename=str(map_path(file, ".coverage")))
        data.read()
        for module in data.measured_files() & modules.keys():
            contexts = data.contexts_by_lineno(module)
            everything = {name for names in contexts.values() for name in names}
            for mutant in modules[module]:
                for found, (first, last) in ((near, mutant.lines), (wide, mutant.statement)):
                    for line in range(first, last + 1):
                        found[mutant].update(contexts.get(line, ()))
                if mutant.on_import and wide[mutant]:
                    near[mutant] |= everything
    tests = {}
    for mutant in mutants:
        names = near[mutant] | wide[mutant] if not near[mutant] - {""} else near[mutant]
        tests[mutant] = bool(names), names - {""}
    return tests

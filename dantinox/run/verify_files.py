"""`dantinox verify`: compares the files of a run with its manifests."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dantinox.files import UserError
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import (
    MANIFEST,
    DamagedFile,
    Entry,
    describe_damage,
    find_log_damage,
    find_step_damage,
    hash_file,
    read_manifest,
    record_files,
    recorded_logs,
)

SAVING_SUFFIX = ".saving"  # checkpoints/12.saving: step 12 is on its way to the disk, or was when the process ended
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"  # what Orbax writes until a step has its name
DAMAGED_PREFIX = "damaged-"  # checkpoints/damaged-12: what a resumed run found damaged and put aside


@dataclass
class VerifyReport:
    """What was found: a sentence for every damage, remarks that are none, and how much was read."""

    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps whose directories lie there, whole or not, newest first."""
    if not checkpoints.is_dir():
        return []
    names = (path.name for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir())
    return sorted((int(name) for name in names if name == str(int(name))), reverse=True)  # not 012


def verify_run(run: RunDirectory) -> VerifyReport:
    """Reads every file that a manifest of the run names. Raises a UserError if there is no run."""
    if not run.config.is_file() and not (run.path / MANIFEST).is_file():
        raise UserError(f"{run.path} is not a run directory: it has neither {run.config.name} nor {MANIFEST}")
    found = VerifyReport()
    found.damage += _check_own_files(run, found)
    found.damage += _errors_as_problems(_check_checkpoints(run, found))
    return found


def find_file_damage(run: RunDirectory, entry: Callable[[Path], Entry] = hash_file) -> Iterator[str]:
    """A sentence for each of the run's own files that is not as it was written; checkpoints and logs are not looked at.

    Raises:
      UserError: something cannot be read, or the manifest is damaged.
    """
    files = read_manifest(run.path / MANIFEST)["files"]
    own = {str(path.relative_to(run.path)) for path in (run.config, run.tokenizer, run.weights, run.adapter) if path.exists()}
    for name in sorted({*files, *own}):
        if problem := describe_damage(run.path, name, files.get(name), entry):
            yield problem


def _check_own_files(run: RunDirectory, found: VerifyReport) -> list[str]:
    def counted(path: Path) -> Entry:
        _count_file(path, found)
        return hash_file(path)

    while True:
        found.files = found.bytes = 0
        before = _file_state(run.manifest)
        problems = list(_errors_as_problems(find_file_damage(run, counted)))
        if not problems or before == _file_state(run.manifest):  # else the run goes on meanwhile
            return problems


def _file_state(path: Path) -> tuple[int, ...]:
    """Another one whenever a file is replaced."""
    with contextlib.suppress(OSError):
        state = path.stat()
        return state.st_ino, state.st_mtime_ns
    return ()


def _check_checkpoints(run: RunDirectory, found: VerifyReport) -> Iterator[str]:
    logs_compared = False
    for number in saved_steps(run.checkpoints):
        step = run.checkpoints / str(number)
        if (run.checkpoints / f"{number}{SAVING_SUFFIX}").exists() and not (step / MANIFEST).exists():
            continue
        for path in step.rglob("*"):
            _count_file(path, found)
        problems = list(_errors_as_problems(find_step_damage(step)))
        if not step.exists():
            continue  # a run that goes on meanwhile had no more use for it
        yield from problems
        if not logs_compared:
            with contextlib.suppress(DamagedFile):  # the manifest of an older step may do
                yield from _check_logs(run, step, found)
                logs_compared = True
    yield from _check_stray_files(run, found)


def _check_logs(run: RunDirectory, step: Path, found: VerifyReport) -> Iterator[str]:
    yield from find_log_damage(run.path, step)
    for name, size, _ in recorded_logs(step):
        log = run.path / name
        if log.is_file() and (more := log.stat().st_size - size) > 0:
            found.remarks.append(f"{log} has {more} bytes more than when step {step.name} was saved")


def _check_stray_files(run: RunDirectory, found: VerifyReport) -> Iterator[str]:
    """What lies among the checkpoints and is none."""
    if not run.checkpoints.is_dir():
        if os.path.lexists(run.checkpoints):
            yield f"{run.checkpoints} is no directory"
        return
    steps, unfinished = {str(step) for step in saved_steps(run.checkpoints)}, set()
    for path in sorted(run.checkpoints.iterdir()):
        if path.name.startswith(DAMAGED_PREFIX):
            found.remarks.append(f"{path} was found damaged and put aside")
        elif path.suffix == TEMPORARY_SUFFIX or (path.suffix == SAVING_SUFFIX and path.is_file()):
            unfinished.add(path.with_suffix(""))
        elif path.name not in steps and not path.name.startswith("."):
            yield f"{path} is named by no manifest"
    for step in sorted(unfinished):
        if not (step / MANIFEST).exists():
            found.remarks.append(f"{step} is unfinished: a run is writing it, or ended while it did")


def _errors_as_problems(problems: Iterator[str]) -> Iterator[str]:
    """What cannot be read is a sentence like the others."""
    try:
        yield from problems
    except UserError as error:
        yield str(error)


def _count_file(path: Path, found: VerifyReport) -> None:
    if path.is_file():
        found.files, found.bytes = found.files + 1, found.bytes + path.stat().st_size


def accept_run(run: RunDirectory) -> list[str]:
    """Makes a manifest of the run's own files as they are now: their owner says that they are right.

    Checkpoints stay as they are.

    Returns:
      The names of the files.

    Raises:
      UserError: another process is working on the run, or it cannot be written.
    """
    with run.lock():
        own = run.config, run.tokenizer, run.tokenizer_config, run.chat_template, run.origin, run.weights, run.router, run.kv
        kept = [*own, *run.adapter.parent.glob("adapter_*"), *run.data.glob("tokens*"), run.data / "reference.json"]
        names = sorted(str(path.relative_to(run.path)) for path in kept if path.is_file())
        record_files(run.path, names, afresh=True)
        return names

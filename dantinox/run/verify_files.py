"""`dantinox verify`: compares the files of a run with its manifests, or accepts them. Also lists
the steps that have checkpoints, and defines the names of unfinished and damaged ones.
"""

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

# Checkpoints/12.saving: step 12 is being saved, or the process ended during the save.
SAVING_SUFFIX = ".saving"
# Orbax saves to a directory with this suffix, then renames it.
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
# checkpoints/damaged-12 is a damaged checkpoint that a resumed run set aside.
DAMAGED_PREFIX = "damaged-"


@dataclass
class VerifyReport:
    """The result of `verify_run`.

    Attributes:
      damage: one sentence for each damaged file.
      remarks: one sentence for each finding that is not damage.
      files, bytes: the number of files read, and their total size.
    """

    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0


def saved_steps(checkpoints: Path) -> list[int]:
    """Returns the steps that have a checkpoint directory, complete or not, newest first."""
    if not checkpoints.is_dir():
        return []
    names = (path.name for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir())
    return sorted((int(name) for name in names if name == str(int(name))), reverse=True)  # not 012


def verify_run(run: RunDirectory) -> VerifyReport:
    """Compares the files of a run with the sizes and hashes in its manifests.

    Raises:
      UserError: the directory is not a run.
    """
    if not run.config.is_file() and not (run.path / MANIFEST).is_file():
        raise UserError(
            f"{run.path} is not a run directory: it has neither {run.config.name} nor {MANIFEST}"
        )
    found = VerifyReport()
    found.damage += _check_own_files(run, found)
    found.damage += _errors_as_problems(_check_checkpoints(run, found))
    return found


def find_file_damage(
    run: RunDirectory, entry: Callable[[Path], Entry] = hash_file
) -> Iterator[str]:
    """Yields one sentence for each damaged, missing or unlisted file of a run, except checkpoints
    and logs.

    Args:
      entry: computes the size and SHA-256 of a file.

    Raises:
      DamagedFile: the manifest is damaged.
      UserError: a file cannot be read.
    """
    files = read_manifest(run.path / MANIFEST)["files"]
    own = {
        str(path.relative_to(run.path))
        for path in (run.config, run.tokenizer, run.weights, run.adapter)
        if path.exists()
    }
    for name in sorted({*files, *own}):
        if problem := describe_damage(run.path, name, files.get(name), entry):
            yield problem


def _check_own_files(run: RunDirectory, found: VerifyReport) -> list[str]:
    """Returns the damage of the files outside of checkpoints, and counts the files in `found`."""

    def counted(path: Path) -> Entry:
        _count_file(path, found)
        return hash_file(path)

    while True:
        found.files = 0
        found.bytes = 0
        before = _file_state(run.manifest)
        problems = list(_errors_as_problems(find_file_damage(run, counted)))
        # If the manifest changed, a training process replaced files in between: check again.
        if not problems or before == _file_state(run.manifest):
            return problems


def _file_state(path: Path) -> tuple[int, ...]:
    """Returns a value that changes whenever the file is replaced."""
    with contextlib.suppress(OSError):
        state = path.stat()
        return state.st_ino, state.st_mtime_ns
    return ()


def _check_checkpoints(run: RunDirectory, found: VerifyReport) -> Iterator[str]:
    """Yields the damage of all checkpoints, and of the logs compared with the newest checkpoint
    that has a valid manifest.
    """
    logs_compared = False
    for number in saved_steps(run.checkpoints):
        step = run.checkpoints / str(number)
        if (run.checkpoints / f"{number}{SAVING_SUFFIX}").exists() and not (
            step / MANIFEST
        ).exists():
            continue  # `_check_stray_files` remarks on the unfinished checkpoint
        for path in step.rglob("*"):
            _count_file(path, found)
        problems = list(_errors_as_problems(find_step_damage(step)))
        if not step.exists():
            continue  # a training process deleted the checkpoint during this check
        yield from problems
        if not logs_compared:
            with contextlib.suppress(DamagedFile):  # try the manifest of an older step
                yield from _check_logs(run, step, found)
                logs_compared = True
    yield from _check_stray_files(run, found)


def _check_logs(run: RunDirectory, step: Path, found: VerifyReport) -> Iterator[str]:
    """Yields the damage of the logs up to a step, and remarks on logs that have grown since."""
    yield from (damage.problem for damage in find_log_damage(run.path, step))
    for name, size, _ in recorded_logs(step):
        log = run.path / name
        more = log.stat().st_size - size if log.is_file() else 0
        if more > 0:
            found.remarks.append(
                f"{log} has {more} bytes more than when step {step.name} was saved"
            )


def _check_stray_files(run: RunDirectory, found: VerifyReport) -> Iterator[str]:
    """Yields one sentence for each unexpected entry in the checkpoint directory."""
    if not run.checkpoints.is_dir():
        if os.path.lexists(run.checkpoints):
            yield f"{run.checkpoints} is not a directory"
        return
    steps = {str(step) for step in saved_steps(run.checkpoints)}
    unfinished = set()
    for path in sorted(run.checkpoints.iterdir()):
        if path.name.startswith(DAMAGED_PREFIX):
            found.remarks.append(f"{path} is damaged and was set aside by a resumed run")
        elif path.suffix == TEMPORARY_SUFFIX or (path.suffix == SAVING_SUFFIX and path.is_file()):
            unfinished.add(path.with_suffix(""))
        elif path.name not in steps and not path.name.startswith("."):
            yield f"{path} is not listed in the manifest"
    for step in sorted(unfinished):
        if not (step / MANIFEST).exists():
            found.remarks.append(
                f"{step} is unfinished: it is being saved, or the run ended during the save"
            )


def _errors_as_problems(problems: Iterator[str]) -> Iterator[str]:
    """Yields the problems, and the message of a `UserError` as one more problem."""
    try:
        yield from problems
    except UserError as error:
        yield str(error)


def _count_file(path: Path, found: VerifyReport) -> None:
    if path.is_file():
        found.files += 1
        found.bytes += path.stat().st_size


def accept_run(run: RunDirectory) -> list[str]:
    """Accepts the current content of a run's own files: writes a new manifest for them.

    Checkpoints and their manifests do not change.

    Returns:
      The names of the recorded files.

    Raises:
      UserError: another process is working on the run, a file cannot be read, or the manifest
        cannot be written.
    """
    with run.lock():
        own = (
            run.config,
            run.tokenizer,
            run.tokenizer_config,
            run.chat_template,
            run.origin,
            run.weights,
            run.router,
            run.kv,
        )
        paths = [
            *own,
            *run.adapter.parent.glob("adapter_*"),
            *run.data.glob("tokens*"),
            run.data / "reference.json",
        ]
        names = sorted(str(path.relative_to(run.path)) for path in paths if path.is_file())
        record_files(run.path, names, reset=True)
        return names

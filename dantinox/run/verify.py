"""Whether a run is what was written: all its files compared with its manifests. Nothing here imports jax."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dantinox.files import UserError
from dantinox.run.directory import RunDirectory
from dantinox.run.manifest import MANIFEST, answer_for, damage, log_damage, read_manifest, step_damage

SAVING = ".saving"  # checkpoints/12.saving: step 12 is on its way to the disk, or was when the process ended
ASIDE = "damaged-"  # checkpoints/damaged-12: what a resumed run found damaged and put aside


@dataclass
class Verified:
    """What was found: a sentence for every damage, remarks that are none, and how much was read."""

    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    files: int = 0
    bytes: int = 0


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps whose directories lie there, whole or not, newest first."""
    if not checkpoints.is_dir():
        return []
    return sorted((int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal() and path.is_dir()), reverse=True)


def verify_run(run: RunDirectory) -> Verified:
    """Reads every file that a manifest of the run names.

    Raises:
      UserError: there is no run.
    """
    if not run.config.is_file() and not (run.path / MANIFEST).is_file():
        raise UserError(f"{run.path} is not a run directory: it has neither {run.config.name} nor {MANIFEST}")
    found = Verified()
    found.damage += _own_files(run, found)
    found.damage += _checkpoints(run, found)
    return found


def _own_files(run: RunDirectory, found: Verified) -> Iterator[str]:
    try:
        files = read_manifest(run.path / MANIFEST)["files"]
    except UserError as error:
        yield str(error)
        return
    own = {str(path.relative_to(run.path)) for path in (run.config, run.tokenizer, run.weights) if path.exists()}
    for name in sorted({*files, *own}):
        _count(run.path / name, found)
        if problem := damage(run.path, name, files.get(name)):
            yield problem


def _checkpoints(run: RunDirectory, found: Verified) -> Iterator[str]:
    logs_compared = False
    for number in saved_steps(run.checkpoints):
        step = run.checkpoints / str(number)
        if (run.checkpoints / f"{number}{SAVING}").exists() and not (step / MANIFEST).exists():
            found.remarks.append(f"{step} is unfinished: the run ended while it was written")
            continue
        for path in step.rglob("*"):
            _count(path, found)
        yield from step_damage(step)
        if not logs_compared:
            with contextlib.suppress(UserError):  # the manifest of an older step may do
                yield from log_damage(run.path, step)
                logs_compared = True
    for path in sorted(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else []:
        if path.name.startswith(ASIDE):
            found.remarks.append(f"{path} was found damaged and put aside")
        elif path.is_file() and path.suffix != SAVING and not path.name.startswith("."):
            yield f"{path} is named by no manifest"


def _count(path: Path, found: Verified) -> None:
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
        kept = [run.config, run.tokenizer, run.weights, run.router, run.kv, *run.data.glob("tokens*")]
        names = sorted(str(path.relative_to(run.path)) for path in kept if path.is_file())
        answer_for(run.path, names, afresh=True)
        return names

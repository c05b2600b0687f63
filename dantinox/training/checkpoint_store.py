"""Checkpoints of a run: the latest few and the best, written by Orbax in the background, each
complete or not at all.
"""

import contextlib
import errno
import itertools
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.distributed import broadcast_from_rank0, is_rank0
from dantinox.files import UserError, first_line
from dantinox.model.parameters import Parameters
from dantinox.run import (
    DAMAGED_PREFIX,
    SAVING_SUFFIX,
    find_log_damage,
    find_step_damage,
    saved_steps,
    write_step_manifest,
)
from dantinox.run.manifest import MANIFEST
from dantinox.training.step import TrainState

# A step is moved here before its deletion, so that a killed process never leaves half a step.
REMOVED_FOLDER = ".removed"
# A path that Orbax reads as it is. It puts paths into globs and URLs without escaping them, and
# takes /gs/… for a bucket.
ORDINARY_PATH = re.compile(r"/(?!(gs|s3|az|hf)/)[\w./-]*", re.ASCII)
# The bytes of a new checkpoint that are read back through Orbax. The manifest covers all bytes.
READ_BACK_BYTES = 1 << 16


@dataclass(frozen=True)
class TrainingProgress:
    """The state of the training loop that `TrainState` does not hold.

    Attributes:
      best_loss: the lowest validation loss; in training with rewards, the highest validation reward
        times −1.
      evaluation_due: the metrics for the log row of an evaluation that an interruption prevented;
        None: no evaluation is due.
      skipped_batches: the number of batches that rewinds have skipped: the data are this far ahead
        of the step.
      rewards_since_eval, rewards_since_log: in training with rewards, a pair: the sum of the mean
        rewards of the steps, and their number. The first pair counts since the last row of the CSV
        log, the second since the last interval row of metrics.jsonl. Lists after a restore.
    """

    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluation_due: dict[str, Any] | None = None
    skipped_batches: int = 0
    rewards_since_eval: Sequence[float] = (0.0, 0)
    rewards_since_log: Sequence[float] = (0.0, 0)

    def after(self, val_loss: float, step: int) -> "TrainingProgress":
        """Returns the progress after an evaluation.

        A loss equal to the best one is not better, and NaN is the worst loss.
        """
        best = self.best_loss
        if best is None or val_loss < best or (math.isnan(best) and not math.isnan(val_loss)):
            return replace(
                self,
                best_loss=val_loss,
                best_step=step,
                evaluations_since_best=0,
                evaluation_due=None,
            )
        return replace(
            self, evaluations_since_best=self.evaluations_since_best + 1, evaluation_due=None
        )

    def add_reward(self, reward: float) -> "TrainingProgress":
        """Returns the progress after a step with this mean reward."""

        def add(sum_and_count: Sequence[float]) -> tuple[float, float]:
            total, count = sum_and_count
            return total + reward, count + 1

        return replace(
            self,
            rewards_since_eval=add(self.rewards_since_eval),
            rewards_since_log=add(self.rewards_since_log),
        )

    def best(self, *, of_rewards: bool = False) -> dict[str, float | int | None]:
        """Returns the best validation loss, or the best validation reward, and its step, as entries
        of the summary. Before the first evaluation, the key is `val_loss`.
        """
        if not of_rewards or self.best_loss is None:
            return {"val_loss": self.best_loss, "best_step": self.best_step}
        return {"val_reward": -self.best_loss, "best_step": self.best_step}


class RestoredCheckpoint(NamedTuple):
    """A checkpoint in memory.

    Attributes:
      facts: the provenance that was given to `save`, such as versions and digests.
      notes: the damaged steps, and why this step was chosen.
    """

    step: int
    state: TrainState
    progress: TrainingProgress
    facts: dict[str, Any]
    notes: tuple[str, ...]


class ChosenStep(NamedTuple):
    """The step that a run resumes from.

    Attributes:
      damaged: the damaged newer steps with their damage. A list, because JSON, in which processes
        exchange it, has no integer keys.
    """

    step: int
    damaged: list[tuple[int, str]]
    notes: list[str]


class Checkpoints:
    """The directory `checkpoints/` of a run, with an Orbax manager that keeps the best step and the
    latest `keep_last` steps.

    At least two of the latest steps are kept. Orbax does not detect a changed byte, so every step
    has a manifest of checksums, which is written when Orbax has finished the step and has restored
    a part of it. Until then, a file `12.saving` marks step 12 as unfinished, and the previous step
    is kept.

    Args:
      path: the directory.
      keep_last: number of latest steps to keep.
      logs: log files that grow during training. Each manifest covers their contents at the time its
        step was saved.

    Raises:
      UserError: every method raises it if the disk is full, read-only or missing, or if a new step
        cannot be read back. Older steps are intact then.
    """

    def __init__(self, path: Path, keep_last: int, logs: Sequence[Path] = ()):
        # Orbax logs every step, and logs errors that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.path = path.absolute()
        self._keep_last = keep_last
        self._logs = tuple(logs)
        self._writer = ThreadPoolExecutor(1, "manifest")
        self._manifest: Future[None] | None = None  # the pending manifest of the last saved step
        self._link = contextlib.ExitStack()  # removes the link of `_orbax_path`

    @cached_property
    def _orbax_path(self) -> Path:
        """The directory under a name that Orbax accepts: a temporary link if the path has unusual
        characters.

        Orbax uses the path in glob patterns and URLs without escaping it, and takes `/gs/…` for a
        bucket.
        """
        if ORDINARY_PATH.fullmatch(str(self.path)):
            return self.path
        link = Path(
            self._link.enter_context(tempfile.TemporaryDirectory(prefix="dantinox-")),
            self.path.name,
        )
        self.path.mkdir(exist_ok=True)  # Orbax cannot create the target of a link
        link.symlink_to(self.path, target_is_directory=True)
        return link

    @cached_property
    def _manager(self) -> Any:
        """The Orbax manager. It is created on first use, because damaged steps would make Orbax
        fail, and `restore` renames them first.
        """
        import orbax.checkpoint as orbax
        from orbax.checkpoint import checkpoint_managers as policies

        # At least two: Orbax removes old steps before the newest has its manifest.
        latest = policies.LatestN(max(self._keep_last, 2))
        # Orbax keeps the last n steps of the sorted list. `reverse` makes the best step the last.
        best = policies.BestN(
            get_metric_fn=_loss_and_step, reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        options = orbax.CheckpointManagerOptions(
            # max_to_keep together with best_fn would delete the latest step.
            preservation_policy=policies.AnyPreservationPolicy([latest, best]),
            # Without best_fn, Orbax would not store the metrics that the policy reads.
            best_fn=_loss_and_step,
            best_mode="min",
            cleanup_tmp_directories=True,
            todelete_subdir=REMOVED_FOLDER,
            enable_async_checkpointing=True,
        )
        names = "state", "facts"
        return self._guard_disk(
            lambda: orbax.CheckpointManager(self._orbax_path, options=options, item_names=names)
        )

    def save(
        self,
        step: int,
        state: TrainState,
        progress: TrainingProgress,
        facts: dict[str, Any],
        val_loss: float | None,
    ) -> None:
        """Copies the state and returns; writing continues in the background. `val_loss` is the loss
        of this step, if known.
        """
        import orbax.checkpoint as orbax

        self.wait()
        saved_facts = facts | {"progress": asdict(progress)}
        save_args = orbax.args.Composite(
            state=orbax.args.StandardSave(_state_dict(state)),
            facts=orbax.args.JsonSave(saved_facts),
        )
        # Read now, because the next training step invalidates the arrays of `state`.
        updates = int(state.step)
        small = _smallest_arrays(state.parameters)
        metrics = None if val_loss is None else {"val_loss": val_loss, "step": step}

        def begin() -> None:
            manager = self._manager
            logs = {path: path.stat().st_size for path in self._logs if path.exists()}
            if is_rank0():
                self._unfinished(step).touch()
            # `force`: also if the step is not due by Orbax's own interval.
            manager.save(step, args=save_args, metrics=metrics, force=True)
            self._manifest = self._writer.submit(self._finish, step, updates, small, facts, logs)

        self._guard_disk(begin)

    def _finish(
        self,
        step: int,
        updates: int,
        small: list[str],
        facts: dict[str, Any],
        logs: dict[Path, int],
    ) -> None:
        self._manager.wait_until_finished()
        if is_rank0():
            self._read_back(step, updates, small)
            write_step_manifest(self.path / str(step), facts, logs)
            self._unfinished(step).unlink()

    def _read_back(self, step: int, updates: int, small: list[str]) -> None:
        """Restores the number of updates and some parameters of a new checkpoint, as a resumed run
        will restore all arrays.

        Args:
          updates: the number of optimizer updates until this step.
          small: the names of the parameters to restore.

        Raises:
          UserError: they cannot be restored, or the checkpoint holds another number of updates.
        """
        import orbax.checkpoint as orbax

        folder = self._orbax_path / str(step)
        item: dict[str, Any] = {"step": 0}  # 0 stands for any array
        if small:
            item["parameters"] = dict.fromkeys(small, 0)
        restore_args = jax.tree.map(lambda _: orbax.RestoreArgs(restore_type=np.ndarray), item)
        arguments = orbax.args.PyTreeRestore(
            item=item, restore_args=restore_args, partial_restore=True
        )
        handler = orbax.PyTreeCheckpointHandler()
        try:
            restored = handler.restore(folder / "state", args=arguments)
            found = restored["step"]  # `TrainState.step` counts updates
            orbax.JsonCheckpointHandler().restore(folder / "facts")
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            message = (
                f"the checkpoint of step {step} in {self.path} cannot be read back:"
                f" {self._disk_problem(error)}"
            )
            raise UserError(message) from error
        if found != updates:
            problem = f"it holds {found} updates instead of {updates}"
            raise UserError(
                f"the checkpoint of step {step} in {self.path} cannot be read back: {problem}"
            )

    def restore(self, abstract: TrainState) -> RestoredCheckpoint | None:
        """Restores the newest intact step with the shardings of `abstract`; returns None if no step
        was completed.

        Damaged newer steps are renamed, to `damaged-12` for example. Nothing is deleted except the
        remains of an interrupted save. A step counts as damaged only if it differs from its
        manifest: other errors, such as lack of memory, are raised unchanged.

        Raises:
          UserError: all steps are damaged, or a log file is damaged.
        """
        chosen = broadcast_from_rank0(self._choose_step)
        if chosen is None:
            return None
        step, damaged, notes = ChosenStep(*chosen)
        state, facts = self._load(step, abstract)
        progress = facts.pop("progress")
        if "passed_over" in progress:  # the name in checkpoints of version 1.0 and earlier
            progress["skipped_batches"] = progress.pop("passed_over")
        notes += broadcast_from_rank0(lambda: self._set_aside_damaged(step, damaged))
        if damaged and self._has_manager():
            self._manager.reload()
        return RestoredCheckpoint(step, state, TrainingProgress(**progress), facts, tuple(notes))

    def _choose_step(self) -> ChosenStep | None:
        """Returns the newest intact step; None if there is no step."""
        damaged: dict[int, str] = {}
        for step in self._finished_steps():
            problem = self._damage(step)
            if problem:
                damaged[step] = problem
                continue
            notes = [f"{message}: going back to step {step}" for message in damaged.values()]
            for log in find_log_damage(self.path.parent, self.path / str(step)):
                if not log.is_missing:
                    raise UserError(
                        f"{log.problem}: restore the original file, or move it"
                        " away to continue without its rows"
                    )
                notes.append(f"{log.problem}: starting a new one")
            return ChosenStep(step, list(damaged.items()), notes)
        if damaged:
            raise UserError(
                f"all checkpoints in {self.path} are damaged: {'; '.join(damaged.values())}"
            )
        self._remove_unfinished()
        return None

    def _damage(self, step: int, quick: bool = False) -> str:
        """Returns one sentence about the first damaged file of a step, or ""."""
        return next(find_step_damage(self.path / str(step), quick=quick), "")

    def _set_aside_damaged(self, step: int, damaged: Sequence[tuple[int, str]]) -> list[str]:
        """Renames the damaged steps, and also those older than the restored step; returns notes
        about them.
        """
        notes = []
        steps = [number for number, _ in damaged]
        for older in (number for number in self._finished_steps() if number < step):
            # Orbax reads the small files of all steps when it starts.
            if problem := self._damage(older, quick=True):
                steps.append(older)
                notes.append(problem)
        for number in steps:
            aside = self._set_aside(number)
            notes.append(f"the damaged step is kept in {aside}")
        self._remove_unfinished()
        return notes

    def read(self, step: int | None, abstract: TrainState) -> TrainState | None:
        """Returns the state of a step, or None if that step is None, missing or damaged."""
        if step is None:
            return None
        intact = broadcast_from_rank0(
            lambda: step in self._finished_steps() and not self._damage(step)
        )
        return self._load(step, abstract)[0] if intact else None

    def newest(self) -> int | None:
        """Returns the newest step that was written completely, or None."""
        return next(iter(self._finished_steps()), None)

    def wait(self) -> None:
        """Waits until everything is on disk."""
        manifest = self._manifest
        self._manifest = None
        if manifest is None:
            return
        self._guard_disk(manifest.result)
        self._delete_removed()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            try:
                if self._has_manager():
                    self._guard_disk(self._manager.close)
            finally:
                self._link.close()

    def _has_manager(self) -> bool:
        return "_manager" in self.__dict__  # the cached property was computed

    def _unfinished(self, step: int) -> Path:
        return self.path / f"{step}{SAVING_SUFFIX}"

    def _finished_steps(self) -> list[int]:
        """Returns the steps that were written completely, newest first."""
        # A process may be killed between the manifest and the removal of the mark.
        return [
            step
            for step in saved_steps(self.path)
            if not self._unfinished(step).exists() or (self.path / str(step) / MANIFEST).exists()
        ]

    def _remove_unfinished(self) -> None:
        """Removes the remains of an interrupted save. The resumed run recomputes them."""
        self._delete_removed()
        finished = self._finished_steps()
        for mark in self.path.glob(f"*{SAVING_SUFFIX}"):
            step = mark.name.removesuffix(SAVING_SUFFIX)
            if not step.isdecimal() or not mark.is_file():
                continue  # not created by this class
            if int(step) not in finished:
                shutil.rmtree(self.path / step, ignore_errors=True)
            mark.unlink()

    def _delete_removed(self) -> None:
        if is_rank0():
            shutil.rmtree(self.path / REMOVED_FOLDER, ignore_errors=True)

    def _set_aside(self, step: int) -> Path:
        """Renames a step and returns its new path. This frees the number, because the run will save
        that step again.
        """
        name = f"{DAMAGED_PREFIX}{step}"
        aside = self.path / name
        number = 1
        while aside.exists():
            number += 1
            aside = self.path / f"{name}-{number}"
        return self._guard_disk(lambda: (self.path / str(step)).rename(aside))

    def _load(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        import orbax.checkpoint as orbax

        args = orbax.args
        expected = _state_dict(abstract)
        self._check_shapes(step, expected)
        arguments = args.Composite(
            state=args.StandardRestore(_with_sharding(expected)), facts=args.JsonRestore()
        )
        with orbax.Checkpointer(orbax.CompositeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(self._orbax_path / str(step), args=arguments)
        # `expected` has the order of the fields of TrainState.
        return TrainState(*(restored.state[name] for name in expected)), dict(restored.facts)

    def _check_shapes(self, step: int, expected: dict[str, Any]) -> None:
        """Raises UserError if a step differs from `expected` in the names or shapes of its
        arrays.
        """
        import orbax.checkpoint as orbax

        metadata = orbax.StandardCheckpointHandler().metadata(
            self._orbax_path / str(step) / "state"
        )
        # Checkpoints of other versions may have further parts.
        saved = {
            name: shape
            for name, shape in _shapes(metadata).items()
            if name.partition("/")[0] in expected
        }
        needed = _shapes(expected)
        for name in sorted(needed.keys() | saved.keys()):
            if saved.get(name) != needed.get(name):
                has = _describe_shape(saved.get(name))
                needs = _describe_shape(needed.get(name))
                raise UserError(
                    f"{name}: checkpoint {step} of {self.path} has {has}, this run has {needs}"
                )

    def _guard_disk(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (OSError, ValueError, RuntimeError) as error:
            if "RESOURCE_EXHAUSTED" in str(error) and not _os_error(error):
                raise  # the error is about memory, not about the disk
            raise UserError(
                f"cannot write checkpoints to {self.path}: {self._disk_problem(error)}"
            ) from error

    def _disk_problem(self, error: Exception) -> str:
        """Returns the disk error in one phrase."""
        return (
            (_os_error(error) or first_line(error))
            if self.path.is_dir()
            else "the directory no longer exists"
        )


def _os_error(error: Exception) -> str:
    """Returns the operating system's error that Orbax reports inside a long message, in one phrase,
    or "".
    """
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    messages = (
        os.strerror(number)
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
    )
    return next((message for message in messages if message in str(error)), "")


def _state_dict(state: TrainState) -> dict[str, Any]:
    """Returns the state as a dictionary with the field names that the files use."""
    # The names of version 1.0, so that old checkpoints can be restored.
    saved_as = {"loss_since_eval": "since_row", "loss_since_log": "since_line"}
    return {saved_as.get(name, name): value for name, value in state._asdict().items()}


def _smallest_arrays(parameters: Parameters) -> list[str]:
    """Returns the names of the smallest parameters, up to `READ_BACK_BYTES` together."""
    names = sorted(parameters, key=lambda name: parameters[name].nbytes)
    sizes = itertools.accumulate(parameters[name].nbytes for name in names)
    return [name for name, size in zip(names, sizes, strict=True) if size <= READ_BACK_BYTES]


def _with_sharding(tree: Any) -> Any:
    """Returns the shapes with shardings. Shapes without a sharding are placed on the first
    device.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device),
        tree,
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of arrays, or of their metadata, by path:
    `optimizer/1/momentum/blocks/0/…`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    return "no such array" if shape is None else f"the shape {shape}"


def _loss_and_step(metrics: Any) -> tuple[float, int]:
    """Returns the sort key of a step: of several steps with the lowest validation loss, the first
    is the best, as in `TrainingProgress.after`. NaN is the worst loss.
    """
    loss = float(metrics["val_loss"])
    # Checkpoints of version 1.0 and earlier do not record the step here.
    return math.inf if math.isnan(loss) else loss, int(metrics.get("step", 0))

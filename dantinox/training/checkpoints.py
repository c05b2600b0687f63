"""Checkpoints of a run, written in the background: the latest few and the best."""

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dantinox.files import UserError, first_line
from dantinox.training.step import State


@dataclass(frozen=True)
class Progress:
    """What the loop knows besides the state of the step.

    `evaluation_due`: the run was interrupted between a step and its evaluation; the part of the row that is known already.
    """

    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluation_due: dict[str, Any] | None = None

    def after(self, val_loss: float, step: int) -> "Progress":
        """The progress after an evaluation; equal losses are not better."""
        if self.best_loss is None or val_loss < self.best_loss:
            return Progress(val_loss, step)
        return Progress(self.best_loss, self.best_step, self.evaluations_since_best + 1)


class Restored(NamedTuple):
    """A checkpoint in memory. `skipped` says for every newer step why it could not be read."""

    step: int
    state: State
    progress: Progress
    facts: dict[str, Any]
    skipped: tuple[str, ...]


class Checkpoints:
    """The directory `checkpoints/` of a run, as an Orbax manager that keeps the latest `keep_last` steps and the best one.

    Raises:
      UserError: from every method, where the disk is full, read-only or gone. Older steps are intact then.
    """

    def __init__(self, path: Path, keep_last: int):
        import orbax.checkpoint as orbax
        from orbax.checkpoint import checkpoint_managers as policies

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step it takes as a warning
        self.path, self._orbax = path.absolute(), orbax
        best = policies.BestN(get_metric_fn=_val_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        options = orbax.CheckpointManagerOptions(
            # max_to_keep together with best_fn would delete the latest step.
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep_last), best]),
            best_fn=_val_loss,
            best_mode="min",
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._manager = self._guarded(
            lambda: orbax.CheckpointManager(self.path, options=options, item_names=("state", "facts"))
        )

    def save(self, step: int, state: State, progress: Progress, facts: dict[str, Any], val_loss: float | None) -> None:
        """Copies the state and returns; the writing goes on in the background. `val_loss` is that of this very step."""
        args, record = self._orbax.args, facts | {"progress": asdict(progress)}
        arguments = args.Composite(state=args.StandardSave(state._asdict()), facts=args.JsonSave(record))
        metrics = None if val_loss is None else {"val_loss": val_loss}
        self._guarded(lambda: self._manager.save(step, args=arguments, metrics=metrics, force=True))

    def restore(self, abstract: State) -> Restored | None:
        """The newest readable step, or None where there is none at all. Steps that are newer and unreadable are removed.

        Raises:
          UserError: there are steps, but none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        skipped: list[str] = []
        for step in steps:
            try:
                state, facts = self._read(step, abstract)
            except Exception as error:  # whatever a damaged file makes of itself inside Orbax
                skipped.append(f"checkpoint {step} cannot be read ({first_line(error)})")
                continue
            for damaged in steps[: len(skipped)]:
                shutil.rmtree(self.path / str(damaged), ignore_errors=True)
            self._manager.reload()
            return Restored(step, state, Progress(**facts.pop("progress")), facts, tuple(skipped))
        if skipped:
            raise UserError(f"no checkpoint in {self.path} can be read: {skipped[0]}")
        return None

    def newest(self) -> int | None:
        """The newest step that was written completely."""
        return self._guarded(self._manager.latest_step)

    def wait(self) -> None:
        """Returns when everything is on the disk."""
        self._guarded(self._manager.wait_until_finished)

    def close(self) -> None:
        self._manager.close()

    def _read(self, step: int, abstract: State) -> tuple[State, dict[str, Any]]:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # where the arrays are restored to
        placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract)
        args = self._orbax.args
        arguments = args.Composite(state=args.StandardRestore(placed._asdict()), facts=args.JsonRestore())
        restored = self._manager.restore(step, args=arguments)
        return State(**restored.state), dict(restored.facts)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"cannot write checkpoints to {self.path}: {first_line(error)}") from error


def _val_loss(metrics: Any) -> float:
    value = float(metrics["val_loss"])
    return value if math.isfinite(value) else math.inf

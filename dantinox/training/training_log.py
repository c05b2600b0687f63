"""Metrics of training steps, passed to the console, the log files and the trackers."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dantinox.chips import find_chip
from dantinox.config import Config, ModelConfig
from dantinox.distributed import Layout, NullOutput, is_rank0
from dantinox.files import UserError
from dantinox.model.flops import forward_flops, training_flops
from dantinox.report import Console, MetricsLog, trackers
from dantinox.report.tables import human_time
from dantinox.run import RunDirectory
from dantinox.training.memory import used_gb
from dantinox.training.objective import OBJECTIVES
from dantinox.training.step import Metrics

TIMED_STEPS = 3  # timed for the estimate of the duration, after one step that is not timed
MAX_SKIPPED = 3  # consecutive steps; after more of them, a row of the log must have a mean loss
MIN_ESTIMATE = 60  # seconds; a shorter estimate is not printed


class NonFiniteLoss(UserError):
    """The loss or the gradient of a step is NaN or infinite."""

    def __init__(self, step: int, metrics: Metrics):
        super().__init__(
            f"the loss or its gradient is not a finite number in step {step} (loss {metrics.loss},"
            f" gradient norm {metrics.grad_norm}): lower training.lr or set training.nan_policy"
        )
        self.step = step


class Clock:
    """Measures seconds per step, without evaluations, samples and checkpoints."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = time.perf_counter()
        self._average = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside the block."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def seconds_per_step(self) -> float:
        """Returns the mean since the last call. Call it when the device has finished the steps."""
        now = time.perf_counter()
        if self.steps:
            self._average = (now - self._since) / self.steps
        self.steps = 0
        self._since = now
        return self._average


class TrainingLog:
    """The console and the log files of a training run, and the metrics of the steps since the last
    row.

    Attributes:
      tokens_per_step: the tokens that a step reads.
      clock: measures the step time in the rows; paused during everything that is not a training
        step.
      recent: metrics of the steps since the last check, still on the device.
    """

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        layout: Layout,
        run: RunDirectory,
        console: Console,
        tokens_per_step: int,
        teacher: ModelConfig | None = None,
    ):
        self.config = config
        self.layout = layout
        self.console = console
        self.tokens_per_step = tokens_per_step
        context = config.model.max_context
        teacher_flops = 0 if teacher is None else forward_flops(teacher, context)
        self.flops = training_flops(model, context) + teacher_flops  # per token
        self.objective = OBJECTIVES[config.training.objective]
        paths = run.log(config), run.metrics
        self.files: Any = (
            MetricsLog(*paths, trackers(config, run.path)) if is_rank0() else NullOutput()
        )
        self.restart(0)

    def restart(self, step: int) -> None:
        """Starts counting from a step, at the start of training and after a rewind."""
        self.clock = Clock()
        self._estimate = Clock()  # of the first steps, for the estimate of the duration
        self.recent: list[Metrics] = []
        self._checked = step  # the last step that `check` has read
        self._skipped = 0  # consecutive skipped steps until `_checked`
        self._first: int | None = None  # the first step that was added

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self.clock.paused(), self._estimate.paused():
            yield

    def add(self, step: int, steps: int, metrics: Metrics) -> None:
        """Adds the metrics of a step. After the first few steps, prints an estimate of the
        remaining time.
        """
        self.recent.append(metrics)
        self.clock.steps += 1
        self._first = self._first or step
        if step - self._first not in (0, TIMED_STEPS):  # before and after the timed steps
            return
        metrics.loss.block_until_ready()
        self._estimate.steps = step - self._first
        seconds = self._estimate.seconds_per_step()
        if step > self._first and (steps - step) * seconds >= MIN_ESTIMATE:
            self.console.note(duration_line(steps - step, seconds))

    def row_metrics(self, step: int) -> dict[str, Any]:
        """Waits for the device and returns the newest values of the metrics that every row has.

        These are times, learning rates, the gradient norm, tokens and memory. Before the first
        step, only the last two exist.
        """
        if not self.recent:
            return {"tokens": step * self.tokens_per_step, "memory_gb": used_gb()}
        metrics = jax.device_get(self.recent[-1])
        seconds = self.clock.seconds_per_step()
        tokens = self.tokens_per_step
        rates = {name: float(rate) for name, rate in metrics.rates.items()}
        row: dict[str, Any] = {
            "ms_per_step": 1e3 * seconds,
            "lr": rates.pop("lr"),
            "grad_norm": float(metrics.grad_norm),
        }
        row |= {
            "tokens": step * tokens,
            "tokens_per_s": tokens / seconds,
            "memory_gb": used_gb(),
        } | rates
        chip = find_chip(jax.devices()[0])
        if chip is not None:  # MFU relative to the published bfloat16 FLOP/s
            row["mfu"] = row["tokens_per_s"] * self.flops / chip.flops / self.layout.devices
        return row

    def interval(
        self, step: int, steps: int, mean_loss: float, metrics: Mapping[str, float] = {}
    ) -> None:
        """Writes a row of `logging.log_every` steps; `mean_loss` is the mean over the steps since
        the previous row.

        Args:
          metrics: further columns.

        Raises:
          NonFiniteLoss: see `check`.
        """
        newest = self.recent[-1]
        named = self.objective.named_metrics(newest.metrics)
        row = {"step": step, "train_loss": mean_loss, **self.row_metrics(step), **named, **metrics}
        self.check(step, mean_loss)
        counts_LE = newest.expert_counts
        counts = {} if counts_LE is None else {"expert_counts": np.asarray(counts_LE).tolist()}
        self.files.event("interval", row | counts)
        self.console.interval(row | {"seconds_left": row["ms_per_step"] / 1e3 * (steps - step)})

    def evaluation(self, row: dict[str, Any], metrics: dict[str, float]) -> None:
        """Writes the row of an evaluation. Its `train_loss` is the mean over the steps since the
        previous evaluation.

        Args:
          metrics: the validation metrics of the objective.
        """
        self.files.evaluation(row)
        if metrics:
            self.files.event(self.objective.event, {"step": row["step"]} | metrics)
        # An interval row of the same step has a `train_loss` that covers other steps, so this one
        # gets another name.
        renamed = {
            "train_loss_since_eval" if name == "train_loss" else name: value
            for name, value in row.items()
        }
        self.console.evaluation(renamed | metrics)

    def check(self, step: int, mean_loss: float) -> None:
        """Checks the steps since the last check, up to `step`. Every checkpoint is preceded by a
        check.

        Args:
          mean_loss: the mean over the steps of a row that were not skipped; NaN if all were
            skipped.

        Raises:
          NonFiniteLoss: a loss or gradient is NaN or infinite. With `training.nan_policy: skip`
            only if `mean_loss` is, and more than `MAX_SKIPPED` steps in a row were skipped.
        """
        newest = self.recent[-1:]
        fails = not math.isfinite(mean_loss)
        if self.config.training.nan_policy == "skip":
            self._report_skipped(step)
            fails = fails and self._skipped > MAX_SKIPPED
        else:
            fails = fails or not all(math.isfinite(float(metrics.grad_norm)) for metrics in newest)
        if not fails:
            self.recent = newest
            return
        recent = jax.device_get(self.recent)
        bad = next((i for i, metrics in enumerate(recent) if not _finite(metrics)), 0)
        raise NonFiniteLoss(step - len(recent) + 1 + bad, recent[bad])

    def _report_skipped(self, step: int) -> None:
        recent = jax.device_get(self.recent)
        for number, metrics in enumerate(recent, step - len(recent) + 1):
            if number <= self._checked:
                continue
            self._skipped = 0 if _finite(metrics) else self._skipped + 1
            if self._skipped:
                self.console.note(
                    f"step {number} was skipped: loss {metrics.loss}, gradient norm"
                    f" {metrics.grad_norm}"
                )
                self.files.event("skip", {"step": number})
        self._checked = step


def duration_line(steps: int, seconds_per_step: float) -> str:
    """Returns `about 35m00s for 500 steps at 4.2 s per step, without evaluations`."""
    each = (
        f"{seconds_per_step:.2g} s"
        if seconds_per_step >= 0.1
        else f"{1e3 * seconds_per_step:.2g} ms"
    )
    return (
        f"about {human_time(steps * seconds_per_step)} for {steps} steps at {each} per step,"
        " without evaluations"
    )


def _finite(metrics: Metrics) -> bool:
    return bool(np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm))

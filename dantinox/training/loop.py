"""The training loop of one run, resumable at any step.

Exact resume relies on three facts:

* Batches and dropout are functions of the step; in training with rewards, batches are functions of
  the step and the weights.
* `TrainState` holds everything else that a step depends on.
* A log row is on disk before the checkpoint of its step. Rows after a restored step are removed.

All threads end when `train` returns:

* The main thread runs the loop. Only this thread calls compiled programs, writes logs, starts
  checkpoints and modifies `Trainer`. Signal handlers also run on it and only set
  `StopRequest.signal`.
* `batches` (one thread, `StoredBatches`) reads a few batches ahead and sends them to the devices.
  It shares two things with the main thread: immutable token arrays, and the store's dictionary of
  epochs, which is replaced and never mutated. In training with rewards there is no such thread: the
  batch of a step depends on the weights, so the main thread samples it.
* `compile` (one thread, `Programs`) compiles the evaluation while the main thread compiles the
  step. No other thread compiles.
* `manifest` (one thread, `Checkpoints`) waits for Orbax's writer threads, then writes the manifest
  of the step.

Threads pass results through `Future`s. The only lock is the lock file of the run directory, held
for the whole training.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import jax
import numpy as np

from dantinox.config import Config
from dantinox.distributed import (
    StopSync,
    all_reduce_max,
    barrier,
    broadcast_from_rank0,
    fetch_to_host,
    is_rank0,
    make_layout,
)
from dantinox.files import UserError, first_line
from dantinox.model.parameters import Parameters
from dantinox.platform import get_platform, release_free_memory
from dantinox.programs import exit_now
from dantinox.report import Console
from dantinox.run import RunDirectory, open_base, weights_digest, write_file
from dantinox.text import Batch, ConversationStore, PromptStore, Tokenizer, TokenStore
from dantinox.training.batch_source import BatchSource, SamplingInterrupted, StoredBatches
from dantinox.training.checkpoint_store import Checkpoints, RestoredCheckpoint, TrainingProgress
from dantinox.training.distillation_batches import DistillationBatches
from dantinox.training.memory import check_memory, limit_kept_memory, out_of_memory
from dantinox.training.reference_logprobs import (
    compute_reference_logprobs,
    load_or_compute_logprobs,
)
from dantinox.training.results import export_weights, write_answers, write_plot, write_summary
from dantinox.training.rollout_batches import RolloutBatches, rollout_length
from dantinox.training.signals import StopRequest, stop_request
from dantinox.training.starting_point import (
    check_facts,
    frozen_weights,
    run_facts,
    starting_weights,
    total_steps,
)
from dantinox.training.step import Programs, TrainState, TrainStep, select_rows, updates_per_step
from dantinox.training.teacher import open_teacher
from dantinox.training.text_samples import Sampler, build_sampling_model
from dantinox.training.training_log import NonFiniteLoss, TrainingLog

MAX_REWINDS = 3  # to the same checkpoint
PEER_LOST = 3  # exit code of a process after another process of its training run has ended


def train(
    config: Config,
    run: RunDirectory,
    tokenizer: Tokenizer,
    store: TokenStore,
    console: Console,
    *,
    resume: bool = False,
    sample: Sampler | None = None,
) -> TrainingProgress:
    """Trains until `training.steps`, until `training.patience` is exhausted, or until a stop signal
    arrives.

    Args:
      run: contains config.yaml and tokenizer.json, and is locked by this process.
      store: the tokens, with the configured batch size and window length.
      resume: continue from the newest checkpoint, if there is one.
      sample: generates a text sample with the current model; called every `training.sample_every`
        steps.

    Raises:
      UserError: memory or disk space is insufficient, a checkpoint is damaged, or the loss is NaN
        or infinite.
      KeyboardInterrupt: after SIGINT, when the checkpoint is on disk.
      SystemExit: after SIGTERM, with code 143, when the checkpoint is on disk.
    """
    with stop_request() as stop:
        trainer = Trainer(config, run, tokenizer, store, console, sample, stop)
        with trainer.log.files, contextlib.closing(trainer.checkpoints):  # waits for pending writes
            try:
                return trainer.train(resume)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if user_error := out_of_memory(error, config):
                    raise user_error from error
                if jax.process_count() > 1:
                    abort_on_peer_loss(error, console)
                raise


def abort_on_peer_loss(error: Exception, console: Console) -> None:
    """Exits after another process of this training run has ended: collectives and barriers would
    never return.
    """
    console.note(
        f"another process of this training run has ended ({first_line(error)}):"
        " continue with --resume"
    )
    console.close()
    exit_now(PEER_LOST)


class Trainer:
    """The training loop and its position: the state after `step` steps, and the progress."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        tokenizer: Tokenizer,
        store: TokenStore,
        console: Console,
        sample: Sampler | None,
        stop: StopRequest,
    ):
        self.config = config
        self.run = run
        self.tokenizer = tokenizer
        self.store = store
        self.console = console
        self.sample = sample
        self.stop = stop
        self.steps = total_steps(config, store.windows_per_epoch)
        self.model = config.trained_architecture(tokenizer.vocab_size)
        self.layout = make_layout(config, self.model)
        self.teacher = open_teacher(config, self.layout, tokenizer.fingerprint, run)
        length = rollout_length(config, store.longest) if isinstance(store, PromptStore) else None
        self.updates = updates_per_step(config)
        self.train_step = TrainStep(
            config, self.model, self.steps, self.layout, length=length, teacher=self.teacher
        )
        self.facts = run_facts(config, tokenizer.fingerprint, self.layout, run)
        teacher_model = None if self.teacher is None else self.teacher.model
        self.log = TrainingLog(
            config, self.model, self.layout, run, console, self.train_step.tokens, teacher_model
        )
        self.checkpoints = Checkpoints(
            run.checkpoints, config.training.keep_last, (run.log(config), run.metrics)
        )
        self.stop_sync = StopSync()
        self.step = 0
        self.progress = TrainingProgress()
        self.state: TrainState
        self.on_cpu = get_platform().name == "cpu"
        self.frozen: Parameters = {}  # the frozen weights under adapters
        self.teacher_weights: Parameters = {}  # the weights of the teacher
        self.rollouts: RolloutBatches | None = None
        self.sampled: DistillationBatches | None = None
        # The validation loss of the current step; in training with rewards, the mean reward times
        # −1.
        self.val_loss: float | None = None
        self.saved_step: int | None = None
        self.rewinds = 0  # since the last checkpoint

    def train(self, resume: bool) -> TrainingProgress:
        restored = self._restore() if resume else False
        if restored and self._is_finished():
            self._export_missing()
            self.console.note(f"this run is finished: step {self.step} of {self.steps}")
            return self.progress
        self.console.start(self.steps, self.step)
        self.programs = Programs(self.train_step, self.store.validation_rows)
        self.console.note(self.programs.memory.line())
        check_memory(self.programs.memory, self.config)
        self.frozen = frozen_weights(
            self.config, self.model, self.facts["tokenizer_sha256"], self.layout, self.run
        )
        if self.teacher is not None:
            self.teacher_weights = self.teacher.load_weights()
        if not restored:
            self._init_state()
        if isinstance(self.store, ConversationStore) and self.train_step.objective.has_reference:
            rows = self.programs.eval_rows
            parameters = self.state.parameters
            compute = partial(
                compute_reference_logprobs,
                self.store,
                self.model,
                self.layout,
                rows,
                parameters,
                self.frozen,
            )
            base = (
                None
                if restored
                else weights_digest(open_base(self.config.training.init_from, self.run))
            )
            self.store.reference = load_or_compute_logprobs(
                self.run, self.store, base, compute, self.console.note
            )
        if isinstance(self.store, PromptStore):
            self._prepare_sampling(self.store)
        if self.on_cpu:
            release_free_memory()
        self.log.files.truncate(self._last_row())
        self.stop.can_save = True
        barrier()
        self.run_until_done()
        self._finish()
        return self.progress

    def _prepare_sampling(self, store: PromptStore) -> None:
        """Prepares the source of batches whose answers the model itself samples."""

        def is_stopped() -> bool:
            return self.stop.signal is not None

        if self.teacher is not None:
            self.sampled = DistillationBatches(
                self.train_step, store, self.tokenizer, self.frozen, is_stopped
            )
            return
        read = partial(starting_weights, self.config, self.model, self.facts["tokenizer_sha256"])
        self.rollouts = RolloutBatches(
            self.train_step, store, self.tokenizer, self.frozen, read, is_stopped
        )

    def run_until_done(self) -> None:
        """Trains to the end, restarting the loop after each rewind."""
        while True:
            self.log.restart(self.step)
            with contextlib.closing(self._open_batches()) as batches:
                try:
                    return self._loop(batches)
                except NonFiniteLoss as error:
                    bad = error
            if self.config.training.nan_policy != "rewind":
                self.checkpoints.wait()
                good = self.checkpoints.newest()
                hint = (
                    "there is no checkpoint yet"
                    if good is None
                    else f"the last good checkpoint is step {good}"
                )
                raise UserError(f"{bad}; {hint}") from bad
            self._rewind(bad)

    def _open_batches(self) -> BatchSource:
        """Returns the source of the batches from the current step on."""
        t = self.config.training
        skipped = self.progress.skipped_batches
        source = self.rollouts or self.sampled
        if source is not None:
            source.skipped_batches = skipped
            return source

        def read(step: int) -> Batch:
            return self.layout.put_batch(
                partial(self.store.batch, step + skipped), t.batch_size, t.grad_accum
            )

        return StoredBatches(read, self.step, self.steps)

    def _rewind(self, bad: NonFiniteLoss) -> None:
        """Restores the newest checkpoint or the initial state, and skips all batches up to and
        including the bad one.
        """
        self.rewinds += 1
        if self.rewinds > MAX_REWINDS:
            raise UserError(f"{bad}; {MAX_REWINDS} rewinds to the same checkpoint did not help")
        before = self.progress
        self.val_loss = None
        del self.state  # memory may not hold two states
        self.checkpoints.wait()
        if restored := self.checkpoints.restore(self.train_step.shapes):
            self._set_position(restored)
        else:
            self._init_state()
        self.progress = replace(
            self.progress, skipped_batches=before.skipped_batches + bad.step - self.step
        )
        self.log.files.truncate(self._last_row())
        self.saved_step = self.step
        if before.best_step not in (None, self.progress.best_step):
            # The rewind discarded the step of the exported weights.
            self._export(self._best_state())
        skipped = f"the batches of steps {self.step + 1} to {bad.step} are skipped"
        self.console.note(f"{str(bad).partition(':')[0]}: back to step {self.step}, {skipped}")
        row = {
            "step": self.step + 1,
            "bad_step": bad.step,
            "passed_over": self.progress.skipped_batches,
        }
        self.log.files.event("rewind", row)

    def _init_state(self) -> None:
        weights = starting_weights(self.config, self.model, self.facts["tokenizer_sha256"])
        self.step = 0
        self.progress = TrainingProgress()
        self.state = self.train_step.initial_state(weights, self.frozen)

    def _restore(self) -> bool:
        """Restores the newest intact checkpoint; returns False if there is none."""
        restored = self.checkpoints.restore(self.train_step.shapes)
        if restored is None:
            self.console.note("no complete checkpoint found: starting at step 0")
            return False
        notes = check_facts(restored.facts, self.facts, self.config.training.deterministic)
        for note in [*restored.notes, *notes, f"resumed from step {restored.step}"]:
            self.console.note(note)
        self._set_position(restored)
        self.saved_step = self.step
        return True

    def _set_position(self, restored: RestoredCheckpoint) -> None:
        self.step = restored.step
        self.state = restored.state
        self.progress = restored.progress

    def _loop(self, batches: BatchSource) -> None:
        if self._evaluates_start() or self.progress.evaluation_due:
            self._evaluate()
            self._stop_if_requested()
        while not self._is_finished():
            try:
                batch = batches.batch(self.step, self.state)
            except SamplingInterrupted:
                self._save_and_stop()
            for _ in range(self.updates):
                self.state, metrics = self.programs.train(
                    self.state, batch, self.frozen, self.teacher_weights
                )
            self.step += 1
            self.val_loss = None
            if self.rollouts is not None:
                self.progress = self.progress.add_reward(self.rollouts.finish_step(metrics.loss))
            self.log.add(self.step, self.steps, metrics)
            if self.on_cpu:  # two steps in flight would need the memory of both
                metrics.loss.block_until_ready()
                limit_kept_memory(self.programs.memory)
            self._after_step()
            self._stop_if_requested()

    def _evaluates_start(self) -> bool:
        """Whether the starting weights are still to be evaluated. Only training with rewards
        evaluates them.
        """
        return self.rollouts is not None and self.step == 0 and self.progress.best_step is None

    def _last_row(self) -> int:
        """Returns the last step whose rows in the logs are kept; −1 if the row of step 0 is written
        again.
        """
        return -1 if self._evaluates_start() else self.step

    def _after_step(self) -> None:
        """Runs the actions that are due after this step: a log row, an evaluation, a sample, a
        checkpoint.
        """
        t = self.config.training
        last = self.step == self.steps
        evaluates = self.step % t.eval_every == 0 or last
        if self.train_step.is_logged(self.step):
            mean_loss = _mean(self.state.loss_since_log)
            self.state = self.state._replace(loss_since_log=self._zeros())
            reward = {"reward": _mean(self.progress.rewards_since_log)}
            metrics = {} if self.rollouts is None else self.rollouts.metrics | reward
            self.progress = replace(self.progress, rewards_since_log=(0.0, 0))
            self.log.interval(self.step, self.steps, mean_loss, metrics)
        if evaluates:
            self._evaluate()
        if t.sample_every and (self.step % t.sample_every == 0 or last):
            with self.log.paused():
                if self.rollouts is not None:
                    write_answers(self.run, self.step, self.rollouts.samples())
                    self._show_sample(self.rollouts.example())
                elif self.sample and not self._all_agree_to_stop():
                    self._write_sample(self.sample)
        if last or self._is_finished():
            return  # `_finish` writes the last checkpoint after everything else
        saves = self.step % t.checkpoint_every == 0 if t.checkpoint_every else evaluates
        if saves:
            self._save()

    def _is_finished(self) -> bool:
        patience = self.config.training.patience
        exhausted = patience is not None and self.progress.evaluations_since_best >= patience
        return (self.step >= self.steps or exhausted) and not self.progress.evaluation_due

    def _evaluate(self) -> None:
        """Evaluates, writes the row and exports the weights if they are the best. A stop signal
        postpones all of this.
        """
        row_metrics = self.progress.evaluation_due or self.log.row_metrics(self.step)
        with self.log.paused():
            loss, metrics = (
                self._validation_loss()
                if self.rollouts is None
                else self.rollouts.evaluate(self.state)
            )
            self.progress = replace(
                self.progress, evaluation_due=row_metrics if loss is None else None
            )
            if loss is None:
                return
            mean = _mean(self.state.loss_since_eval) if self.step else None
            if mean is not None:
                self.log.check(self.step, mean)
            self.state = self.state._replace(loss_since_eval=self._zeros())
            bits = None
            if (
                self.train_step.objective.per_token
                and self.sampled is None
                and self._bytes_per_target
            ):
                nats = metrics.get("val_data_loss", loss)
                bits = nats / math.log(2) / self._bytes_per_target
            row = {
                "step": self.step,
                "train_loss": mean,
                "val_loss": loss,
                "bits_per_byte": bits,
            } | row_metrics
            if self.rollouts is not None:
                reward = _mean(self.progress.rewards_since_eval) if self.step else None
                rewards = {"reward": reward, "val_reward": metrics.pop("val_reward")}
                self.progress = replace(self.progress, rewards_since_eval=(0.0, 0))
                row |= {"val_loss": None} | rewards
            self.log.evaluation(row, metrics)
            self.val_loss = loss
            self.progress = self.progress.after(loss, self.step)
            if self.progress.best_step == self.step:
                self._export(self.state)

    def _validation_loss(self) -> tuple[float | None, dict[str, float]]:
        """Computes the validation loss, accumulated in float64 over batches.

        Returns:
          The loss, and the metrics of the objective with the prefix `val_`. The loss is None if a
          stop signal arrived.
        """
        nats = 0.0
        count = 0.0
        metrics = None
        rows = self.programs.eval_rows
        try:
            for batch in self._validation_batches(rows):
                placed = self.layout.put_batch(partial(select_rows, batch), rows)
                part = jax.device_get(
                    self.programs.evaluate(
                        self.state.weights, placed, self.frozen, self.teacher_weights
                    )
                )
                nats += float(part.nats)
                count += float(part.num_targets)
                if part.metrics is not None:
                    metrics = np.asarray(part.metrics, np.float64) + (
                        0 if metrics is None else metrics
                    )
                if self._all_agree_to_stop():
                    return None, {}
        except SamplingInterrupted:
            return None, {}
        means = None if metrics is None else metrics / count
        return nats / count, self.train_step.objective.named_metrics(means, "val_")

    def _validation_batches(self, rows: int) -> Iterator[Any]:
        """Yields the validation batches of `rows` rows."""
        if self.sampled is not None:
            return self.sampled.validation(self.state, rows)
        return self.store.validation(rows, self.config.training.eval_tokens)

    @cached_property
    def _bytes_per_target(self) -> float:
        """UTF-8 bytes of the evaluated targets, per target."""
        size = count = 0
        for batch in self._validation_batches(self.programs.eval_rows):
            targets_N = batch.targets_BT[batch.mask_BT > 0]
            size += self.tokenizer.count_bytes(targets_N)
            count += len(targets_N)
        return size / max(count, 1)

    def _write_sample(self, sample: Sampler) -> None:
        """Writes a text sample. A failure is only noted on the console, since training does not
        depend on samples.
        """
        weights: Mapping[str, Any] = self.state.weights | self.frozen
        weights = weights if self.layout.mesh is None else fetch_to_host(weights)
        if is_rank0():
            try:
                text = sample(build_sampling_model(self.model, weights))
                self.run.samples.mkdir(exist_ok=True)
                write_file(self.run.path, f"{self.run.samples.name}/step_{self.step}.txt", text)
                self._show_sample(text)
            except Exception as error:
                self.console.note(f"no sample at step {self.step}: {first_line(error)}")
        barrier()

    def _show_sample(self, text: str) -> None:
        self.log.files.sample(self.step, text)
        self.console.sample(text, self.step)

    def _save(self) -> None:
        """Saves this step unless it is already saved. Raises `NonFiniteLoss` rather than save NaN
        weights.
        """
        if self.saved_step == self.step:
            return
        with self.log.paused():
            self.log.check(self.step, float(self.state.loss_since_eval[0]))
            self.checkpoints.save(self.step, self.state, self.progress, self.facts, self.val_loss)
        self.saved_step = self.step
        self.rewinds = 0

    def _all_agree_to_stop(self) -> bool:
        """Returns whether any process has received a stop signal; all processes call it
        together.
        """
        number = all_reduce_max(self.stop.signal or 0)
        if number:  # else a signal that has arrived meanwhile stays in `stop`
            self.stop.signal = number
        return number > 0

    def _stop_if_requested(self) -> None:
        # All processes know the signal that interrupted an evaluation already. They learn of others
        # a few steps later.
        requested = (
            self.stop.signal
            if self.progress.evaluation_due
            else self.stop_sync.poll(self.stop.signal)
        )
        if requested is None:
            return  # a signal that has arrived meanwhile stays in `stop`
        self.stop.signal = requested
        self._save_and_stop()

    def _save_and_stop(self) -> NoReturn:
        self._save()
        self.checkpoints.wait()
        self.console.note(f"stopped by a signal; step {self.step} is saved, continue with --resume")
        self.stop.end()

    def _finish(self) -> None:
        """Writes the files of a finished run. The final checkpoint marks the run as finished, so it
        comes last.
        """
        self._export_missing()
        if is_rank0():
            tokens = self.step * self.train_step.tokens
            write_summary(
                self.config,
                self.run,
                self.model,
                self.state,
                self.step,
                tokens,
                self.progress,
                self.facts,
            )
            if self.config.logging.plot:
                write_plot(self.config, self.run, self.console)
        self._save()
        self.checkpoints.wait()
        best = self.progress.best(of_rewards=self.rollouts is not None)
        name = next(iter(best))
        self.console.note(
            f"finished at step {self.step}: best {name} {best[name]:.4f} at {best['best_step']}"
        )

    def _export_missing(self) -> None:
        """Exports the best weights, or else the last ones, if the exported file is missing."""
        if not broadcast_from_rank0(self.run.weights_or_adapter.exists):
            self._export(self._best_state())

    def _export(self, state: TrainState) -> None:
        export_weights(self.run, self.model, state, self.facts)

    def _best_state(self) -> TrainState:
        """Returns the state of the best evaluation, or the current state if no checkpoint has
        it.
        """
        best = self.progress.best_step
        best_state = (
            None
            if best in (None, self.step)
            else self.checkpoints.read(best, self.train_step.shapes)
        )
        if best_state is None and best != self.step:
            self.console.note(
                f"no intact checkpoint of the best step, {best}: exporting the weights of step"
                f" {self.step}"
            )
        return best_state or self.state

    def _zeros(self) -> jax.Array:
        return self.layout.replicate(np.zeros(2, np.float32))


def _mean(sum_and_count: Any) -> float:
    total, count = np.asarray(sum_and_count).tolist()
    return total / count if count else math.nan

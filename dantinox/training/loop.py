"""The training of one run, from its settings to its weights, resumable at any moment.

What exact resume rests on: batches and dropout are functions of the step; everything else a step depends on is in `State`;
a row of the logs is on the disk before the checkpoint of its step; rows past a restored step are cut off.
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from dantinox.config import Config
from dantinox.distributed import (
    Layout,
    Silent,
    StopTogether,
    agreed,
    from_first,
    is_first,
    make_layout,
    meet,
    on_host,
)
from dantinox.files import UserError, first_line
from dantinox.interop.peft import save_adapter
from dantinox.model.flops import training_flops
from dantinox.model.parameters import Parameters, blueprint, unrolled
from dantinox.platform import platform_of
from dantinox.programs import chip_of
from dantinox.report import Console, MetricsLog, plot_loss, trackers
from dantinox.run import RunDirectory, open_base, put, save_weights, weights_digest
from dantinox.text import Batch, ConversationStore, Tokenizer, TokenStore
from dantinox.training.checkpoints import Checkpoints, Progress
from dantinox.training.memory import check_memory, give_back_freed_memory, keep_freed_memory, out_of_memory, used_gb
from dantinox.training.reference import reference_of, save_reference, saved_reference
from dantinox.training.resume import check_facts, frozen_weights, run_facts, starting_weights, total_steps
from dantinox.training.samples import Sampler, sampled_model
from dantinox.training.signals import StopRequest, stop_request
from dantinox.training.step import Metrics, Programs, State, TrainStep, chosen

AHEAD = 4  # batches
MAX_REWINDS = 3  # to one checkpoint
GONE = 3  # exit code of a process that another one has left alone


class NotFinite(UserError):
    """The loss or the gradient of a step is no finite number."""

    def __init__(self, sentence: str, step: int):
        super().__init__(sentence)
        self.step = step


class Clock:
    """Milliseconds per step, without those of evaluations, samples and checkpoints."""

    def __init__(self) -> None:
        self.steps, self._since, self._average = 0, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside does not count."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def ms_per_step(self) -> float:
        """The mean since this was last asked; to be asked when the device is done with the steps."""
        now = time.perf_counter()
        if self.steps:
            self._average = (now - self._since) / self.steps * 1e3
        self.steps, self._since = 0, now
        return self._average


def batches_ahead(batch: Callable[[int], Batch], first: int, end: int) -> Generator[Batch]:
    """The batches of steps `first` to `end`, exclusive, made and sent to the devices by a thread before they are asked for."""
    pool = ThreadPoolExecutor(1, "batches")
    try:
        made: deque[Future[Batch]] = deque()
        for step in range(first, end):
            while len(made) < AHEAD and step + len(made) < end:
                made.append(pool.submit(batch, step + len(made)))
            yield made.popleft().result()  # what went wrong while it was made is raised here
    finally:
        pool.shutdown(cancel_futures=True)


def train(
    config: Config,
    run: RunDirectory,
    tokenizer: Tokenizer,
    store: TokenStore,
    console: Console,
    *,
    resume: bool = False,
    sample: Sampler | None = None,
) -> Progress:
    """Trains until `training.steps`, patience, or a signal.

    Args:
      run: holds config.yaml and tokenizer.json already, and is locked by this process.
      store: the tokens, with the batch size and window length of the settings.
      resume: go on from the newest checkpoint, if there is one.
      sample: writes a text with the model as it is; called every `training.sample_every` steps.

    Raises:
      UserError: not enough memory or disk, a damaged checkpoint, a loss that is no number.
      SystemExit: after SIGTERM (code 143) or SIGINT (130), when the checkpoint is on the disk.
    """
    if platform_of().name == "cpu":
        keep_freed_memory()
    with stop_request() as stop:
        trainer = _Trainer(config, run, tokenizer, store, console, sample, stop)
        with trainer.logs, contextlib.closing(trainer.checkpoints):  # waits for what is on its way to the disk
            try:
                return trainer.train(resume)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if sentence := out_of_memory(error, config):
                    raise sentence from error
                if jax.process_count() > 1:
                    trainer.abort_on_peer_loss(error)
                raise


@dataclass
class _Trainer:
    """What `train` was given, and where it stands."""

    config: Config
    run: RunDirectory
    tokenizer: Tokenizer
    store: TokenStore
    console: Console
    sample: Sampler | None
    stop: StopRequest
    step: int = 0
    progress: Progress = field(default_factory=Progress)
    val_loss: float | None = None  # of this very step
    val_rewards: np.ndarray | None = None  # of the last evaluation, of preferences
    saved_step: int | None = None
    recent: list[Metrics] = field(default_factory=list)  # of the steps since they were last looked at
    looked_at: int = 0  # the last step whose numbers were looked at one by one
    rewinds: int = 0  # since a checkpoint was written

    def __post_init__(self) -> None:
        self.steps = total_steps(self.config, self.store.windows_per_epoch)
        self.model = self.config.trained_architecture(self.tokenizer.vocab_size)
        self.layout: Layout = make_layout(self.config, self.model)
        self.train_step = TrainStep(self.config, self.model, self.steps, self.layout)
        self.facts = run_facts(self.config, self.tokenizer.fingerprint, self.layout, self.run)
        logs = self.run.log(self.config), self.run.metrics
        self.logs: Any = MetricsLog(*logs, trackers(self.config, self.run.path)) if is_first() else Silent()
        self.checkpoints = Checkpoints(self.run.checkpoints, self.config.training.keep_last, logs)
        self.together = StopTogether()
        self.state: State
        self.frozen: Parameters = {}  # what stays as it is beside adapters

    def train(self, resume: bool) -> Progress:
        restored = self._restore() if resume else None
        if restored and self._finished():
            self._export_what_is_missing()
            self.console.note(f"this run is finished: step {self.step} of {self.steps}")
            return self.progress
        self.programs = Programs(self.train_step)
        self.console.note(self.programs.memory.line())
        check_memory(self.programs.memory, self.config)
        self.frozen = frozen_weights(self.config, self.model, self.tokenizer.fingerprint, self.layout, self.run)
        if not restored:
            self._begin()
        if isinstance(self.store, ConversationStore) and self.store.pairs:
            self.store.reference = self._reference(self.store, restored)
        if platform_of().name == "cpu":
            give_back_freed_memory()
        self.logs.cut(self.step)
        self.console.start(self.steps, self.step)
        self.stop.can_save = True
        meet()
        while not self.run_until_done():
            pass
        self._conclude()
        return self.progress

    def abort_on_peer_loss(self, error: Exception) -> None:
        """Ends this process when another is gone: nothing that waits for all can end any more."""
        self.console.note(f"another process of this training is gone ({first_line(error)}): --resume goes on without it")
        self.console.close()
        exit_now(GONE)

    def run_until_done(self) -> bool:
        """Trains; False where a step was no good and the run went back to a checkpoint."""
        passed, self.looked_at = self.progress.skipped_batches, self.step
        t = self.config.training

        def batch(step: int) -> Batch:
            return self.layout.put_rows(partial(self.store.batch, step + passed), t.batch_size, t.grad_accum)

        with contextlib.closing(batches_ahead(batch, self.step, self.steps)) as batches:
            try:
                self._loop(batches)
            except NotFinite as error:
                if self.config.training.nan_policy != "rewind":
                    raise
                bad = error
            else:
                return True
        self._rewind(bad)
        return False

    def _rewind(self, bad: NotFinite) -> None:
        """Takes the newest checkpoint, or the start, and goes on with the batch behind the one that was no good."""
        self.rewinds += 1
        if self.rewinds > MAX_REWINDS:
            raise UserError(f"{bad}; going back {MAX_REWINDS} times did not help")
        ahead, self.recent, self.val_loss = self.progress, [], None
        del self.state  # two do not fit
        if restored := self.checkpoints.restore(self.train_step.shapes):
            self.step, self.state, self.progress = restored.step, restored.state, restored.progress
        else:
            self._begin()
        self.progress = replace(self.progress, skipped_batches=ahead.skipped_batches + bad.step - self.step)
        self.logs.cut(self.step)
        self.saved_step = self.step
        if ahead.best_step not in (None, self.progress.best_step):
            self._export(self._best())  # those on the disk are of a step that is no more
        passed = f"the batches of steps {self.step + 1} to {bad.step} are passed over"
        self.console.note(f"{str(bad).partition(':')[0]}: back to step {self.step}, {passed}")
        row = {"step": self.step + 1, "bad_step": bad.step, "passed_over": self.progress.skipped_batches}
        self.logs.event("rewind", row)

    def _begin(self) -> None:
        given = starting_weights(self.config, self.model, self.tokenizer.fingerprint)
        self.step, self.progress = 0, Progress()
        self.state = self.train_step.initial_state(given)

    def _reference(self, store: ConversationStore, restored: bool | None) -> np.ndarray:
        """The log-probabilities of all answers by the weights that this training started from."""
        weights = None if restored else weights_digest(open_base(self.config.training.init_from, self.run))
        found = saved_reference(self.run, store, weights)
        if found is not None:
            return found
        if weights is None:
            raise UserError(
                f"{self.run.data} has no log-probabilities of the starting weights for its tokens: put reference.json back"
            )
        self.console.note("computing the log-probabilities of all answers by the starting weights")
        rows = self.programs.eval_rows
        found = reference_of(store, self.model, self.layout, rows, self.state.parameters, self.frozen)
        if is_first():
            save_reference(self.run, store, weights, found)
        meet()
        return found

    def _loop(self, batches: Iterator[Batch]) -> None:
        self.clock = Clock()
        if self.progress.evaluation_due:
            self._evaluate()
            self._stop_if_asked()
        while not self._finished():
            self.state, metrics = self.programs.train(self.state, next(batches), self.frozen)
            self.step += 1
            self.val_loss = None
            self.clock.steps += 1
            self.recent.append(metrics)
            self._after_step()
            self._stop_if_asked()

    def _after_step(self) -> None:
        """Whatever is due after this step: a line, an evaluation, a sample, a checkpoint."""
        t, last = self.config.training, self.step == self.steps
        evaluates = self.step % t.eval_every == 0 or last
        if self.step % self.config.logging.log_every == 0 or last:
            self._log_interval()
        if evaluates:
            self._evaluate()
        if self.sample and t.sample_every and (self.step % t.sample_every == 0 or last) and self.stop.signal is None:
            with self.clock.paused():
                self._write_sample(self.sample)
        if last or self._finished():
            return  # the last checkpoint comes after everything else
        if (self.step % t.checkpoint_every == 0) if t.checkpoint_every else evaluates:
            self._save()

    def _finished(self) -> bool:
        patience = self.config.training.patience
        exhausted = patience is not None and self.progress.evaluations_since_best >= patience
        return (self.step >= self.steps or exhausted) and not self.progress.evaluation_due

    def _log_interval(self) -> None:
        mean = _mean(self.state.loss_since_log)
        self.state = self.state._replace(loss_since_log=self._zeros())
        row = {"step": self.step, "train_loss": mean} | self._vitals() | _named(self.recent[-1].rewards)
        self._check_numbers(row["train_loss"])
        self.logs.interval(row | self._expert_counts())
        self.console.interval(row | {"seconds_left": row["ms_per_step"] / 1e3 * (self.steps - self.step)})

    def _expert_counts(self) -> dict[str, Any]:
        """How many tokens of the last step each expert of each layer got."""
        counts_LE = self.recent[-1].expert_counts
        return {} if counts_LE is None else {"expert_counts": np.asarray(counts_LE).tolist()}

    @property
    def tokens_per_step(self) -> int:
        t = self.config.training
        return t.batch_size * self.config.model.max_context * (2 if t.objective == "dpo" else 1)

    def _vitals(self) -> dict[str, Any]:
        """Waits for the device, then reads what every row ends with."""
        metrics = jax.device_get(self.recent[-1])
        ms = self.clock.ms_per_step()
        tokens = self.tokens_per_step
        rate = tokens / ms * 1e3
        vitals = {
            "ms_per_step": ms,
            **{name: float(rate) for name, rate in metrics.rates.items()},
            "grad_norm": float(metrics.grad_norm),
            "tokens": self.step * tokens,
            "tokens_per_s": rate,
            "memory_gb": used_gb(),
        }
        chip = chip_of(jax.devices()[0])
        if chip is not None:  # a share of the published bfloat16 FLOP/s
            of_a_token = training_flops(self.model, self.config.model.max_context)
            vitals["mfu"] = rate * of_a_token / chip.flops / self.layout.devices
        return vitals

    def _check_numbers(self, mean_loss: float) -> None:
        """Raises on a loss or gradient that is NaN or infinite; the checkpoints on the disk are from before."""
        skips = self.config.training.nan_policy == "skip"
        if skips:
            self._tell_skipped()
        if math.isfinite(mean_loss) and (skips or all(math.isfinite(float(m.grad_norm)) for m in self.recent[-1:])):
            self.recent = self.recent[-1:]
            return
        known = jax.device_get(self.recent)
        first = self.step - len(known) + 1
        bad = next((i for i, m in enumerate(known) if not _finite(m)), 0)
        self.checkpoints.wait()
        good = self.checkpoints.newest()
        kept = f"the last good checkpoint is step {good}" if good else "there is no checkpoint yet"
        raise NotFinite(
            f"the loss or its gradient is not a finite number in step {first + bad} "
            f"(loss {known[bad].loss}, gradient norm {known[bad].grad_norm}): "
            f"lower training.lr or set training.nan_policy; {kept}",
            first + bad,
        )

    def _tell_skipped(self) -> None:
        """Notes the steps whose update was left out since the numbers were last looked at."""
        known = jax.device_get(self.recent)
        for number, metrics in enumerate(known, self.step - len(known) + 1):
            if number > self.looked_at and not _finite(metrics):
                numbers = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"
                self.console.note(f"step {number} was skipped: {numbers}")
                self.logs.event("skip", {"step": number})
        self.looked_at = self.step

    def _evaluate(self) -> None:
        """Measures, writes the row, exports the weights if they are the best; when asked to stop, leaves all that for later."""
        vitals = self.progress.evaluation_due or self._vitals()
        with self.clock.paused():
            loss = self._validation_loss()
            self.progress = replace(self.progress, evaluation_due=vitals if loss is None else None)
            if loss is not None:
                self._log_evaluation(loss, vitals)

    def _log_evaluation(self, loss: float, vitals: dict[str, Any]) -> None:
        mean = _mean(self.state.loss_since_eval)
        self._check_numbers(mean)
        self.state = self.state._replace(loss_since_eval=self._zeros())
        preferences = self.val_rewards is not None  # whose loss is not of bytes
        bits = None if preferences else loss / math.log(2) / self.store.val_bytes_per_token
        row = {"step": self.step, "train_loss": mean, "val_loss": loss, "bits_per_byte": bits} | vitals
        self.logs.evaluation(row)
        if preferences:
            self.logs.event("preferences", {"step": self.step} | _named(self.val_rewards, "val_"))
        self.console.evaluation(row | _named(self.val_rewards, "val_"))
        self.val_loss, self.progress = loss, self.progress.after(loss, self.step)
        if self.progress.best_step == self.step:
            self._export(self.state)

    def _export(self, state: State) -> None:
        weights = on_host(state.weights)
        if is_first():
            if self.model.lora is None:
                save_weights(self.run.weights, unrolled(weights), self.facts)
            else:
                save_adapter(self.run, unrolled(weights), self.model, self.facts)
        meet()

    def _validation_loss(self) -> float | None:
        """Nats per token, or the loss of preferences, summed in float64 over batches; None when a signal came in between."""
        nats, count, rewards = 0.0, 0.0, np.zeros(2)
        for batch in self.store.validation(self.programs.eval_rows, self.config.training.eval_tokens):
            rows = self.layout.put_rows(partial(chosen, batch), self.programs.eval_rows)
            part = jax.device_get(self.programs.evaluate(self.state.weights, rows, self.frozen))
            nats, count = nats + float(part.nats), count + float(part.targets)
            if part.rewards is not None:
                rewards += part.rewards
                self.val_rewards = rewards / count
            self.stop.signal = agreed(self.stop.signal or 0) or None
            if self.stop.signal is not None:
                return None
        return nats / count

    def _write_sample(self, sample: Sampler) -> None:
        """A sample that fails, for whatever reason, is a line on the console: nothing of the training depends on it."""
        weights = self.state.weights | self.frozen
        weights = weights if self.layout.mesh is None else on_host(weights)
        if is_first():
            self._sample_of(weights, sample)
        meet()

    def _sample_of(self, weights: Mapping[str, Any], sample: Sampler) -> None:
        try:
            text = sample(sampled_model(self.model, weights))
            self.run.samples.mkdir(exist_ok=True)
            put(self.run.path, f"{self.run.samples.name}/step_{self.step}.txt", text)
            self.logs.sample(self.step, text)
        except Exception as error:
            self.console.note(f"no sample at step {self.step}: {first_line(error)}")
        else:
            self.console.sample(text, self.step)

    def _save(self) -> None:
        """Sends this step to the disk, if it is not there; never one whose weights are NaN."""
        if self.saved_step == self.step:
            return
        with self.clock.paused():
            self._check_numbers(float(self.state.loss_since_eval[0]))
            self.checkpoints.save(self.step, self.state, self.progress, self.facts, self.val_loss)
        self.saved_step, self.rewinds = self.step, 0

    def _stop_if_asked(self) -> None:
        self.stop.signal = self.together.heard(self.stop.signal)
        if self.stop.signal is None:
            return
        self._save()
        self.checkpoints.wait()
        self.console.note(f"stopped by a signal; step {self.step} is saved, --resume goes on from it")
        raise SystemExit(self.stop.exit_code)

    def _conclude(self) -> None:
        """What a finished run leaves behind. The last checkpoint says that it is finished, so it is written last."""
        self._export_what_is_missing()
        if is_first():
            put(self.run.path, self.run.summary(self.config).name, json.dumps(self._summary(), indent=1) + "\n")
        if self.config.logging.plot and is_first():
            try:
                plot_loss(self.run.log(self.config), self.run.metrics, self.run.plots / "loss.png")
            except UserError as error:
                self.console.note(f"no plot: {error}")
        self._save()
        self.checkpoints.wait()
        best = f"best val_loss {self.progress.best_loss:.4f} at {self.progress.best_step}"
        self.console.note(f"finished at step {self.step}: {best}")

    def _export_what_is_missing(self) -> None:
        """The best weights again, or the last, where their file was moved away."""
        if from_first(self.run.exported.exists):
            return
        self._export(self._best())

    def _best(self) -> State:
        """The state of the best evaluation, or the last one where no checkpoint has it."""
        best = self.progress.best_step
        kept = None if best in (None, self.step) else self.checkpoints.read(best, self.train_step.shapes)
        if kept is None and best != self.step:
            self.console.note(f"no whole checkpoint of the best step, {best}: exporting the weights of step {self.step}")
        return kept or self.state

    def _zeros(self) -> jax.Array:
        return self.layout.everywhere(np.zeros(2, np.float32))

    def _summary(self) -> dict[str, Any]:
        sizes = {name: math.prod(leaf.shape) for name, leaf in blueprint(replace(self.model, lora=None))[1].items()}
        embeddings = sum(size for name, size in sizes.items() if not name.startswith(("blocks/", "rolled/", "norm")))
        return {
            "parameters": sum(sizes.values()),
            "trained_parameters": sum(p.size for p in self.state.parameters.values()),
            "parameters_without_embeddings": sum(sizes.values()) - embeddings,
            "steps": self.step,
            "tokens": self.step * self.tokens_per_step,
            "val_loss": self.progress.best_loss,
            "best_step": self.progress.best_step,
            "model": asdict(self.model),
        } | self.facts

    def _restore(self) -> bool:
        """Takes the newest checkpoint that can be read; False where there is none."""
        restored = self.checkpoints.restore(self.train_step.shapes)
        if restored is None:
            self.console.note("there is no complete checkpoint: starting at step 0")
            return False
        notes = check_facts(restored.facts, self.facts, self.config.training.deterministic)
        for note in [*restored.notes, *notes, f"resumed from step {restored.step}"]:
            self.console.note(note)
        self.state, self.progress = restored.state, restored.progress
        self.step = self.saved_step = restored.step
        return True


def _named(rewards: Any, prefix: str = "") -> dict[str, float]:
    """The rewards of preferences, none of anything else, as a row has them."""
    if rewards is None:
        return {}
    margin, accuracy = np.asarray(rewards, np.float64).tolist()
    return {f"{prefix}reward_margin": margin, f"{prefix}reward_accuracy": accuracy}


def _mean(sum_and_count: jax.Array) -> float:
    total, count = np.asarray(sum_and_count).tolist()
    return total / count if count else math.nan


def _finite(metrics: Metrics) -> bool:
    return bool(np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm))

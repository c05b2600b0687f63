import importlib
import io
import json
import math
import re
import signal
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from dantinox.config import Config, UserError
from dantinox.distributed import Layout, StopSync
from dantinox.model import Transformer
from dantinox.model.parameters import abstract_model
from dantinox.report import Console, read_csv, read_jsonl
from dantinox.run import RunDirectory, load_weights, save_tokenizer
from dantinox.text import TokenStore
from dantinox.training import loop, training_log
from dantinox.training.checkpoint_store import TrainingProgress
from dantinox.training.eval_step import make_eval_step
from dantinox.training.memory import used_gb
from dantinox.training.signals import StopRequest, stop_request
from dantinox.training.starting_point import starting_weights
from dantinox.training.step import Metrics
from dantinox.training.training_log import NonFiniteLoss, TrainingLog
from tests.error_texts import ERRORS

from .small import (
    VOCABULARY,
    Tokens,
    Workshop,
    copy_until,
    interrupted_store,
    small_config,
    small_store,
)

launching = importlib.import_module("dantinox.training.launch")


class Logged(NamedTuple):
    run: RunDirectory
    config: Config
    notes: str

    @property
    def rows(self):
        return read_csv(self.run.log(self.config))

    @property
    def intervals(self):
        return [row for row in read_jsonl(self.run.metrics) if row["kind"] == "interval"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run that nothing interrupts, with a log row for every step. Tests only read its files."""
    config, workshop = small_config(logging__log_every=1), Workshop(tmp_path_factory.mktemp("loop"))
    return Logged(workshop.train("logged", config), config, workshop.notes.getvalue())


def test_run_learns_and_writes_all_files(workshop):
    config = small_config(training__sample_every=10)
    texts = []

    def sample(model):
        assert isinstance(model, Transformer)
        texts.append(f"text {len(texts)}")
        if len(texts) == 1:
            raise RuntimeError("out of memory\nat some address")
        return texts[-1]

    run = workshop.train("run", config, sample=sample)
    rows = read_csv(run.log(config))
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] < 2.5
    assert list(rows[0])[:4] == ["step", "train_loss", "val_loss", "ms_per_step"]
    assert [row["step"] for row in read_jsonl(run.metrics) if row["kind"] == "interval"] == [
        4,
        8,
        12,
        16,
        20,
        24,
    ]
    assert len(texts) == 3 and (run.samples / "step_20.txt").read_text() == "text 1"
    assert "no sample at step 10: out of memory\n" in workshop.notes.getvalue()
    assert sorted(path.name for path in run.samples.iterdir()) == ["step_20.txt", "step_24.txt"]
    summary = json.loads(run.summary(config).read_text())
    assert summary["val_loss"] == min(row["val_loss"] for row in rows)
    assert {int(path.name) for path in run.checkpoints.iterdir() if path.name.isdigit()} >= {18, 24}
    assert "813" not in summary and summary["parameters"] == sum(
        p.size for p in _weights(run, config).values()
    )


class Recorder:
    """A tracker that records its calls."""

    def __init__(self):
        self.calls, self.rows = [], []

    def begin(self, step, last_step, rows):
        self.calls.append(("begin", step, last_step, len(list(rows))))

    def row(self, kind, row):
        self.rows.append({"kind": kind} | row)

    def text(self, step, text):
        self.calls.append(("text", step, text))

    def end(self, failed):
        self.calls.append(("end", failed))


def test_trackers_get_the_rows_of_the_log(workshop, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(training_log, "trackers", lambda config, folder: (recorder,))
    config = small_config(training__sample_every=24)
    run = workshop.train("run", config, sample=lambda model: "text")
    rows = read_jsonl(run.metrics)
    assert recorder.rows == rows and recorder.calls == [
        ("begin", 0, 0, 0),
        ("text", 24, "text"),
        ("end", False),
    ]
    workshop.train("run", config, resume=True)
    assert recorder.calls[3:] == [("end", False)], "resuming a finished run writes nothing"
    copy_until(run, 18, workshop.path / "cut")
    with pytest.raises(KeyError):
        workshop.train("cut", config, resume=True, store=small_store(config, Failing))
    assert recorder.calls[4:] == [
        ("begin", 18, 24, sum(row["step"] <= 18 for row in rows)),
        ("end", True),
    ]


class Failing(TokenStore):
    def batch(self, step):
        raise KeyError(step)


def _weights(run, config):
    return load_weights(run.weights, abstract_model(config.architecture(VOCABULARY))[1])


class Unlearned(TokenStore):
    """From step 8 on, the targets of the batches are wrong, so the validation loss rises some steps
    later.
    """

    def batch(self, step):
        batch = super().batch(step)
        return batch._replace(targets_BT=(batch.targets_BT + 5 * (step >= 8)) % VOCABULARY)


def test_exported_weights_are_those_of_the_best_evaluation(workshop):
    config = small_config()
    run = workshop.train("run", config, store=small_store(config, Unlearned))
    rows = read_csv(run.log(config))
    store, evaluate = small_store(config), make_eval_step(config.architecture(VOCABULARY))
    parts = [
        jax.device_get(evaluate(_weights(run, config), batch)) for batch in store.validation(16)
    ]
    loss = sum(float(p.nats) for p in parts) / sum(float(p.num_targets) for p in parts)
    best = min(rows, key=lambda row: row["val_loss"])
    assert best["step"] < 24
    assert loss == pytest.approx(best["val_loss"], rel=1e-5)
    targets = store.validation_ids[1:]
    assert best["bits_per_byte"] == pytest.approx(
        best["val_loss"] / np.log(2) * 299 / np.sum(1 + targets % 3)
    )


def test_bits_per_byte_count_the_bytes_of_the_evaluated_targets(workshop):
    """The first 40 targets of the validation part; they have more or fewer bytes per target than
    the whole part.
    """
    config = small_config(training__eval_tokens=40)
    run, targets = workshop.train("run", config), small_store(config).validation_ids[1:41]
    for row in read_csv(run.log(config)):
        assert row["bits_per_byte"] == pytest.approx(
            row["val_loss"] / np.log(2) * 40 / np.sum(1 + targets % 3)
        )


def test_moving_average_is_evaluated_sampled_and_exported(workshop, logged):
    """Compares with a run without a moving average. Both have the same steps, but different
    validation losses.
    """
    config, seen = small_config(training__ema=0.9, training__sample_every=24), []
    sample = lambda model: seen.append(nnx.to_flat_state(nnx.state(model))) or "text"  # noqa: E731
    run = workshop.train("run", config, sample=sample)
    rows, others = read_csv(run.log(config)), logged.rows
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in others]
    assert all(
        row["val_loss"] != other["val_loss"] for row, other in zip(rows, others, strict=True)
    )
    assert rows[-1]["val_loss"] == min(row["val_loss"] for row in rows)
    sampled = {"/".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in seen[-1]}
    exported = _weights(run, config)
    assert all(np.array_equal(p, sampled[name]) for name, p in exported.items())


def test_train_loss_is_the_mean_since_the_previous_row(logged):
    losses = [row["train_loss"] for row in logged.intervals]
    means = [np.mean(losses[i : i + 6]) for i in range(0, 24, 6)]
    np.testing.assert_allclose([row["train_loss"] for row in logged.rows], means, rtol=1e-6)


def test_log_has_the_rates_of_both_rules(logged):
    rows, t = logged.intervals + logged.rows, logged.config.training
    ratio = t.muon_lr / t.lr
    assert (
        all(row["muon_lr"] == pytest.approx(ratio * row["lr"]) for row in rows)
        and len(rows) > 1 != ratio
    )
    assert f"muon_lr {rows[0]['muon_lr']:.4g}" in logged.notes


def test_mfu_is_logged_for_chips_with_published_figures(workshop, monkeypatch):
    config = small_config()
    chip = SimpleNamespace(flops=1e9)
    monkeypatch.setattr("dantinox.training.training_log.find_chip", lambda device: chip)
    run = workshop.train("run", config)
    row = read_csv(run.log(config))[-1]
    shapes = {
        name: leaf.shape
        for name, leaf in abstract_model(config.architecture(VOCABULARY))[1].items()
    }
    N = sum(
        np.prod(shape) for name, shape in shapes.items() if len(shape) > 1
    )  # tied: the table is the output layer
    assert row["mfu"] == pytest.approx(row["tokens_per_s"] * 6 * (N + 2 * 16 * 8) / 1e9)
    assert f"mfu {row['mfu']:.4g}" in workshop.notes.getvalue()


def test_patience_stops_a_run_that_does_not_improve(workshop):
    config = small_config(training__patience=1, training__eval_every=4)
    run = workshop.train("run", config, store=small_store(config, Unlearned))
    losses = [row["val_loss"] for row in read_csv(run.log(config))]
    assert 3 <= len(losses) < 6 and losses[-1] >= losses[-2] == min(losses)
    workshop.train("run", config, resume=True)
    assert "this run is finished" in workshop.notes.getvalue()


def test_nan_loss_stops_the_run_and_keeps_the_good_checkpoint(workshop):
    config = small_config()
    store = small_store(config)
    batch = store.batch
    poison = np.float32("nan")
    store.batch = lambda step: batch(step)._replace(
        mask_BT=batch(step).mask_BT * (poison if step == 9 else 1)
    )
    with pytest.raises(UserError, match=ERRORS["not_a_finite_number_in_step"]):
        workshop.train("run", config, store=store)
    run = workshop.path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()] == ["6"]
    assert [row["step"] for row in read_csv(run / "training_log.csv")] == [6]
    fixed = workshop.train("run", config, resume=True)
    assert [row["step"] for row in read_csv(fixed.log(config))] == [6, 12, 18, 24]


class DelayedStopSync:
    """Delivers a signal two calls later, as between processes."""

    def __init__(self):
        self.reported = [None, None]

    def poll(self, signal):
        self.reported.append(signal)
        return self.reported[-3]


@pytest.mark.parametrize(
    ("sync", "call", "step"),
    [(StopSync, 1, 6), (DelayedStopSync, 1, 6), (DelayedStopSync, 5, 24)],
    ids=["one process", "several processes", "last step"],
)
def test_signal_during_an_evaluation_postpones_it(workshop, logged, monkeypatch, sync, call, step):
    """It stops before the next step: all processes know it, and the last step has no next batch."""
    monkeypatch.setattr(loop, "StopSync", sync)
    config = small_config(training__eval_tokens=None)
    store = interrupted_store(config, call)
    with pytest.raises(SystemExit) as stopped:
        workshop.train("run", config, store=store)
    assert stopped.value.code == 143 and f"step {step} is saved" in workshop.notes.getvalue()
    assert (workshop.path / "run" / "training_log.csv").exists() == (step > 6)
    rows = read_csv(workshop.train("run", config, resume=True).log(config))
    keep = ("step", "train_loss", "val_loss", "lr", "grad_norm", "tokens")
    assert [[row[k] for k in keep] for row in rows] == [
        [row[k] for k in keep] for row in logged.rows
    ]


def test_signal_that_arrives_while_processes_agree_is_kept(workshop, monkeypatch):
    """Agreeing on a signal takes time in a run of several processes."""

    class Interrupted(StopSync):
        calls = 0

        def poll(self, received):
            self.calls += 1
            if self.calls == 5:
                signal.raise_signal(signal.SIGTERM)
            return received

    monkeypatch.setattr(loop, "StopSync", Interrupted)
    with pytest.raises(SystemExit):
        workshop.train("run", small_config())
    assert "stopped by a signal; step 6 is saved" in workshop.notes.getvalue()


def test_signal_of_another_process_skips_the_sample_in_all_processes(workshop, monkeypatch):
    """A sample needs all processes, so one of them must not skip it alone."""
    texts = []
    monkeypatch.setattr(loop, "all_reduce_max", lambda number: signal.SIGTERM)
    with pytest.raises(SystemExit):
        workshop.train("run", small_config(training__sample_every=5), sample=texts.append)
    assert texts == [] and "stopped by a signal; step 5 is saved" in workshop.notes.getvalue()


@pytest.mark.usefixtures("interruptible")
def test_signal_handlers_are_restored_and_a_second_signal_exits(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    exits = []
    monkeypatch.setattr("dantinox.training.signals.exit_now", exits.append)
    with stop_request() as stop:
        stop.can_save = True
        assert isinstance(stop, StopRequest) and stop.signal is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT and exits == []
        signal.raise_signal(signal.SIGTERM)
        assert exits == [143]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("interruptible")
def test_ignored_signal_stays_ignored():
    """Ctrl-C in a terminal must not stop a background job of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_request() as stop:
        stop.can_save = True
        signal.raise_signal(signal.SIGINT)
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("interruptible")
def test_closed_terminal_saves_and_stops(monkeypatch):
    """The system and the shell may both send SIGHUP, so a second one does not exit at once."""
    exits = []
    monkeypatch.setattr("dantinox.training.signals.exit_now", exits.append)
    with stop_request() as stop:
        stop.can_save = True
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.signal == signal.SIGHUP and exits == []
        with pytest.raises(SystemExit, match="129"):
            stop.end()
        signal.raise_signal(signal.SIGTERM)
        assert exits == [143]


@pytest.mark.usefixtures("interruptible")
def test_signal_before_anything_can_be_saved_exits_immediately():
    with pytest.raises(SystemExit) as stopped, stop_request():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == 143
    with pytest.raises(KeyboardInterrupt), stop_request():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_raises_keyboard_interrupt_after_the_step_is_saved(workshop):
    """In a notebook cell, SystemExit would be reported as another error."""
    config = small_config()

    class Interrupted(TokenStore):
        def batch(self, step):
            if step == 5:
                signal.raise_signal(signal.SIGINT)
            return super().batch(step)

    with pytest.raises(KeyboardInterrupt):
        workshop.train("run", config, store=small_store(config, Interrupted))
    saved = [
        int(path.name)
        for path in (workshop.path / "run" / "checkpoints").iterdir()
        if path.name.isdigit()
    ]
    assert saved and f"stopped by a signal; step {max(saved)} is saved" in workshop.notes.getvalue()


def test_a_few_skipped_steps_do_not_end_a_run_that_logs_every_step(tmp_path):
    """A row whose steps were all skipped has no mean loss."""
    config = small_config(training__nan_policy="skip", logging__log_every=1)
    model = config.architecture(VOCABULARY)
    log = TrainingLog(
        config, model, Layout(model), RunDirectory(tmp_path), Console(io.StringIO()), 32
    )
    numbers = [1.0, math.nan, 1.0, *[math.nan] * 3, 1.0, *[math.nan] * 4]

    def check(step):
        value = jax.device_put(np.float32(numbers[step - 1]))
        log.add(step, 24, Metrics(value, value, {}))
        log.check(step, float(value))

    for step in range(1, 11):
        check(step)
    with pytest.raises(NonFiniteLoss, match="not a finite number in step 10 "):
        check(11)


class Accelerator(SimpleNamespace):
    platform = "gpu"

    def memory_stats(self):
        if not self.is_local:
            raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return {"bytes_in_use": 1e9, "peak_bytes_in_use": 3e9}


def test_used_memory_is_that_of_a_device_of_this_process(monkeypatch):
    remote, local = Accelerator(is_local=False), Accelerator(is_local=True)
    monkeypatch.setattr(jax, "devices", lambda: [remote, local])
    monkeypatch.setattr(jax, "local_devices", lambda: [local])
    assert used_gb() == 3


def test_nan_validation_loss_is_worse_than_any_number():
    """Otherwise no later loss would be better than a first one that is NaN."""
    progress = TrainingProgress()
    for step, loss in enumerate([math.nan, math.nan, 3.0, math.nan, 2.0, math.nan], start=1):
        progress = progress.after(loss, step)
    assert (progress.best_loss, progress.best_step, progress.evaluations_since_best) == (2.0, 5, 1)


def test_rows_of_one_step_name_both_means_of_the_training_loss(logged):
    lines = [line.split() for line in logged.notes.splitlines() if line.startswith("step 24 ")]
    interval, evaluation = (dict(zip(line[::2], line[1::2], strict=True)) for line in lines)
    assert (
        "train_loss" in interval
        and "train_loss_since_eval" not in interval
        and "train_loss" not in evaluation
    )
    assert float(evaluation["train_loss_since_eval"]) == pytest.approx(
        logged.rows[-1]["train_loss"], abs=1e-4
    )


def test_long_training_prints_an_estimate_after_its_first_steps(workshop, logged, monkeypatch):
    assert "without evaluations" not in logged.notes
    monkeypatch.setattr(training_log, "MIN_ESTIMATE", 0)
    workshop.train("run", small_config())
    estimate = r"about \S+ for 20 steps at \S+ m?s per step, without evaluations\n"
    assert re.search(estimate, workshop.notes.getvalue())
    assert (
        training_log.duration_line(500, 4.2)
        == "about 35m00s for 500 steps at 4.2 s per step, without evaluations"
    )


@pytest.mark.parametrize(("epochs", "warned"), [(1, True), (30, False)])
def test_training_of_few_steps_prints_a_warning(epochs, warned):
    config = small_config().model_copy(deep=True)
    t = config.training.model_copy(
        update={"steps": None, "epochs": epochs, "warmup_steps": 0, "batch_size": 300}
    )
    lines = list(
        launching.plan_lines(
            config.model_copy(update={"training": t}), Tokens(), small_store(config)
        )
    )
    warning = (
        "warning: training.epochs 1 with this corpus (336 rows, 300"
        " per step) gives only 2 steps: raise"
    )
    assert any(line.startswith(warning) for line in lines) == warned


def test_init_from_starts_with_the_weights_of_another_run(workshop, logged):
    first = copy_until(logged.run, 24, workshop.path / "first")
    config = small_config(training__init_from=str(first.path))
    second = workshop.train("second", config)
    (before, *_, after), (again, *_) = (read_csv(run.log(config)) for run in (first, second))
    assert (
        before["val_loss"] > after["val_loss"] + 0.3 and again["val_loss"] < after["val_loss"] + 0.1
    )
    other = small_config(training__init_from=str(first.path), model__dim=32)
    with pytest.raises(UserError, match=ERRORS["hold_with_shape"]):
        starting_weights(other, other.architecture(VOCABULARY), Tokens.fingerprint)
    save_tokenizer(first, "another")
    with pytest.raises(UserError, match=ERRORS["init_from_has_tokenizer"]):
        workshop.train("fourth", config)


def test_other_tokenizer_is_rejected(workshop, logged):
    copy_until(logged.run, 24, workshop.path / "run")
    with pytest.raises(UserError, match=ERRORS["was_trained_with_tokenizer_000000000000"]):
        workshop.train("run", small_config(), resume=True, tokenizer=Tokens(fingerprint="1" * 64))

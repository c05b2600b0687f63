"""What else can go wrong while a run is on: numbers that are none, and a machine that has no more memory or disk."""

import contextlib
import resource
import time

import jax
import numpy as np
import pytest
from training.small import Workshop, small_config, small_store

from dantinox.config import UserError
from dantinox.report import read_csv, read_jsonl
from dantinox.run import verify_run
from dantinox.training.step import Programs, TrainStep

pytestmark = pytest.mark.slow
TIMES = {"ms_per_step", "tokens_per_s", "memory_gb"}


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def poisoned(config, *bad, stops=None):
    """A store whose batches `bad` have no number for a mask; the batch of step `stops` fails."""
    store = small_store(config)
    batch = store.batch

    def one(step):
        if step == stops:
            raise KeyError("stumbled")
        return batch(step)._replace(mask_BT=batch(step).mask_BT * np.float32("nan" if step in bad else 1))

    store.batch = one
    return store


def rows(run, config):
    found = [*read_csv(run.log(config)), *read_jsonl(run.metrics)]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


@pytest.mark.exhaustive
def test_skip_leaves_the_update_out_and_says_so(workshop):
    config = small_config(training__optimizer="adamw", training__nan_policy="skip", training__checkpoint_every=5)
    run = workshop.train("run", config, store=poisoned(config, 9, 13))
    assert "step 10 was skipped: loss nan, gradient norm nan\n" in workshop.notes.getvalue()
    events = [row for row in read_jsonl(run.metrics) if row["kind"] == "skip"]
    assert [row["step"] for row in events] == [10, 14]
    assert all(np.isfinite(row["train_loss"]) for row in read_csv(run.log(config)))
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=poisoned(config, 9, 13, stops=18))
    again = workshop.train("cut", config, store=poisoned(config, 9, 13), resume=True)
    assert again.weights.read_bytes() == run.weights.read_bytes() and rows(again, config) == rows(run, config)
    with pytest.raises(UserError, match="not a finite number in step 21 "):
        workshop.train("all", config, store=poisoned(config, *range(20, 24)))


def test_a_skipped_step_changes_nothing_but_its_number():
    config = small_config(training__optimizer="adamw", training__nan_policy="skip", training__ema=0.9)
    model = config.architecture(11)
    step, store = TrainStep(config, model, 24).program, poisoned(config, 1)
    state, _ = step(TrainStep(config, model, 24).initial_state(), store.batch(0))
    before = jax.device_get(state)
    after = jax.device_get(step(state, store.batch(1))[0])
    assert after.step == before.step + 1
    for one, other in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(after[1:]), strict=True):
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_array_equal(one, other)


def test_rewind_goes_back_and_past_the_batch(workshop):
    config = small_config(training__optimizer="adamw", training__nan_policy="rewind")
    store = poisoned(config, 9)
    run = workshop.train("run", config, store=store)
    said = "back to step 6, the batches of steps 7 to 10 are skipped"
    assert said in workshop.notes.getvalue()
    events = [row for row in read_jsonl(run.metrics) if row["kind"] == "rewind"]
    assert [(row["step"], row["bad_step"], row["passed_over"]) for row in events] == [(7, 10, 4)]
    assert [row["step"] for row in read_csv(run.log(config))] == [6, 12, 18, 24]
    passing = small_store(config)
    batch = passing.batch
    passing.batch = lambda step: batch(step if step < 6 else step + 4)
    stopping = small_config(training__optimizer="adamw")
    same = workshop.train("same", stopping, store=passing)
    assert same.weights.read_bytes() == run.weights.read_bytes()
    for stop in (11, 23):  # before and after the next checkpoint; batches are four ahead
        with pytest.raises(KeyError):
            workshop.train(f"cut{stop}", config, store=poisoned(config, 9, stops=stop))
        again = workshop.train(f"cut{stop}", config, store=store, resume=True)
        assert again.weights.read_bytes() == run.weights.read_bytes() and rows(again, config) == rows(run, config)


@pytest.mark.exhaustive
def test_rewind_without_a_checkpoint_begins_again_and_gives_up_at_last(workshop):
    config = small_config(training__optimizer="adamw", training__nan_policy="rewind", training__steps=6)
    workshop.train("run", config, store=poisoned(config, 1))
    assert "back to step 0, the batches of steps 1 to 2 are skipped" in workshop.notes.getvalue()
    with pytest.raises(UserError, match="3 rewinds to the same checkpoint did not help"):
        workshop.train("lost", config, store=poisoned(config, *range(3, 40)))


def test_memory_that_runs_out_is_a_sentence_with_the_keys_to_lower(workshop, monkeypatch):
    config = small_config()

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes.")

    monkeypatch.setattr(Programs, "evaluate", full)
    says = r"memory ran out \(RESOURCE_EXHAUSTED: .*\): raise training.grad_accum \(1\), lower training.batch_size \(4\), .*"
    with pytest.raises(UserError, match=says):
        workshop.train("run", config)


def when_saved(path):
    """Waits until a checkpoint is complete on the disk; batches are made in a thread of their own."""
    while not (path / "manifest.txt").exists() or path.with_name(path.name + ".saving").exists():
        time.sleep(0.01)


@contextlib.contextmanager
def no_file_over(size):
    """As a full disk: no file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_older_steps_and_the_run_goes_on_later(workshop):
    config = small_config(training__checkpoint_every=6)
    expected = workshop.train("whole", config)
    store = small_store(config)
    batch, limit = store.batch, contextlib.ExitStack()

    def full(step):
        if step == 11:
            when_saved(workshop.path / "run" / "checkpoints" / "6")
            limit.enter_context(no_file_over(1200))
        return batch(step)

    store.batch = full
    with limit, pytest.raises(UserError, match=r"cannot write .*: File too large"):
        workshop.train("run", config, store=store)
    run = workshop.train("run", config, resume=True)
    assert "resumed from step 6" in workshop.notes.getvalue()
    assert run.weights.read_bytes() == expected.weights.read_bytes() and rows(run, config) == rows(expected, config)
    assert verify_run(run).damage == []


@pytest.mark.parametrize("gone", [".", "checkpoints"])
def test_a_directory_that_vanishes_is_a_sentence(workshop, gone):
    config = small_config(training__checkpoint_every=6)
    store = small_store(config)
    batch = store.batch
    run = workshop.path / "run"

    def vanishing(step):
        if step == 11:
            when_saved(run / "checkpoints" / "6")
            (run / gone).resolve().rename(workshop.path / "elsewhere")  # at once, where a deletion takes its time
        return batch(step)

    store.batch = vanishing
    with pytest.raises(
        UserError, match=r"cannot (write|read) .*run.*: (the directory no longer exists|No such file or directory)"
    ):
        workshop.train("run", config, store=store)


def test_a_read_only_disk_is_a_sentence_and_leaves_what_is_there(workshop, monkeypatch):
    config = small_config()
    run = workshop.train("run", small_config(training__steps=12))
    before = {path: path.read_bytes() for path in run.checkpoints.rglob("*") if path.is_file()}

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", read_only)
    with pytest.raises(UserError, match=r"cannot write .*Read-only file system"):
        workshop.train("run", config, resume=True)
    assert before == {path: path.read_bytes() for path in before}

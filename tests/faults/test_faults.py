"""Faults during training: NaN, and a machine without free memory or disk space."""

import contextlib
import resource
import time

import jax
import numpy as np
import pytest
from training.small import VOCABULARY, Workshop, copy_until, small_config, small_store

from dantinox.config import UserError
from dantinox.report import read_csv, read_jsonl
from dantinox.run import verify_run
from dantinox.training import loop
from dantinox.training.step import Programs, TrainStep
from tests.error_texts import ERRORS

TIMES = {"ms_per_step", "tokens_per_s", "memory_gb"}


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def sgd_config(**changes):
    return small_config(training__optimizer="sgd", training__lr=0.05, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without faults, and its settings."""
    config = sgd_config()
    return Workshop(tmp_path_factory.mktemp("faults")).train("whole", config), config


def nan_store(config, *bad, stops=None):
    """Returns a store with NaN masks in the batches `bad`; the batch of step `stops` raises an
    exception.
    """
    store = small_store(config)
    batch = store.batch

    def changed_batch(step):
        if step == stops:
            raise KeyError("stumbled")
        return batch(step)._replace(
            mask_BT=batch(step).mask_BT * np.float32("nan" if step in bad else 1)
        )

    store.batch = changed_batch
    return store


def rows(run, config):
    found = [*read_csv(run.log(config)), *read_jsonl(run.metrics)]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


SKIP = {"training__nan_policy": "skip", "training__ema": 0.9}


def test_skip_omits_the_update_and_reports_it(workshop):
    config = sgd_config(**SKIP)
    run = workshop.train("run", config, store=nan_store(config, 9, 13))
    assert "step 10 was skipped: loss nan, gradient norm nan\n" in workshop.notes.getvalue()
    events = [row for row in read_jsonl(run.metrics) if row["kind"] == "skip"]
    assert [row["step"] for row in events] == [10, 14]
    assert all(np.isfinite(row["train_loss"]) for row in read_csv(run.log(config)))


@pytest.mark.slow
def test_run_with_skipped_steps_resumes_exactly_and_fails_if_all_are_skipped(workshop):
    config = sgd_config(**SKIP, training__checkpoint_every=5)
    run = workshop.train("run", config, store=nan_store(config, 9, 13))
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=nan_store(config, 9, 13, stops=18))
    again = workshop.train("cut", config, store=nan_store(config, 9, 13), resume=True)
    assert again.weights.read_bytes() == run.weights.read_bytes() and rows(again, config) == rows(
        run, config
    )
    with pytest.raises(UserError, match=ERRORS["not_a_finite_number_in"]):
        workshop.train("all", config, store=nan_store(config, *range(20, 24)))


def test_skipped_step_changes_only_the_step_number():
    config, store = sgd_config(**SKIP), nan_store(sgd_config(), 1)
    training = TrainStep(config, config.architecture(VOCABULARY), 24)
    train = loop.Programs(training, store.validation_rows).train
    state, _ = train(training.initial_state(), store.batch(0), {}, {})
    before = jax.device_get(state)
    after = jax.device_get(train(state, store.batch(1), {}, {})[0])
    assert after.step == before.step + 1
    for one, other in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(after[1:]), strict=True):
        if np.issubdtype(one.dtype, np.floating):
            np.testing.assert_array_equal(one, other)


REWIND = {"training__nan_policy": "rewind"}


def test_rewind_restores_a_checkpoint_and_skips_the_batches(workshop):
    config = sgd_config(**REWIND)
    store = nan_store(config, 9)
    run = workshop.train("run", config, store=store)
    assert "back to step 6, the batches of steps 7 to 10 are skipped" in workshop.notes.getvalue()
    events = [row for row in read_jsonl(run.metrics) if row["kind"] == "rewind"]
    assert [(row["step"], row["bad_step"], row["passed_over"]) for row in events] == [(7, 10, 4)]
    assert [row["step"] for row in read_csv(run.log(config))] == [6, 12, 18, 24]
    passing = small_store(config)
    batch = passing.batch
    passing.batch = lambda step: batch(step if step < 6 else step + 4)
    same = workshop.train("same", sgd_config(), store=passing)
    assert same.weights.read_bytes() == run.weights.read_bytes()
    copy_until(run, 18, workshop.path / "cut")
    check_resumed(workshop, "cut", config, run)


def check_resumed(workshop, name, config, run):
    """Resumes a run of which one batch is NaN; the result equals `run`."""
    again = workshop.train(name, config, store=nan_store(config, 9), resume=True)
    assert again.weights.read_bytes() == run.weights.read_bytes() and rows(again, config) == rows(
        run, config
    )


@pytest.mark.slow
@pytest.mark.parametrize("stop", [11, 23])
def test_run_interrupted_after_a_rewind_resumes_exactly(workshop, stop):
    """Before and after the next checkpoint; batches are four ahead."""
    config = sgd_config(**REWIND)
    run = workshop.train("run", config, store=nan_store(config, 9))
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=nan_store(config, 9, stops=stop))
    check_resumed(workshop, "cut", config, run)


def test_rewind_without_a_checkpoint_restarts_and_finally_fails(workshop):
    config = sgd_config(**REWIND)
    workshop.train("run", config, store=nan_store(config, 1))
    assert "back to step 0, the batches of steps 1 to 2 are skipped" in workshop.notes.getvalue()
    with pytest.raises(UserError, match=ERRORS["3_rewinds_to_the_same"]):
        workshop.train("lost", config, store=nan_store(config, *range(3, 80)))


def test_out_of_memory_is_an_error_that_names_the_settings(workshop, monkeypatch):
    config = sgd_config()

    def full(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."
        )

    monkeypatch.setattr(Programs, "evaluate", full)
    message = (
        r"memory ran out \(RESOURCE_EXHAUSTED: .*\): raise training.grad_accum \(1\), lower"
        r" training.batch_size \(4\), .*"
    )
    with pytest.raises(UserError, match=message):
        workshop.train("run", config)


def wait_until_saved(path):
    """Waits until a checkpoint is complete on the disk. Batches are produced in a separate
    thread.
    """
    while not (path / "manifest.txt").exists() or path.with_name(path.name + ".saving").exists():
        time.sleep(0.01)


@contextlib.contextmanager
def limit_file_size(size):
    """Simulates a full disk: no file can exceed `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_keeps_older_steps_and_the_run_can_be_resumed(workshop, whole):
    expected, config = whole
    store = small_store(config)
    batch, limit = store.batch, contextlib.ExitStack()

    def full(step):
        if step == 11:
            wait_until_saved(workshop.path / "run" / "checkpoints" / "6")
            limit.enter_context(limit_file_size(1200))
        return batch(step)

    store.batch = full
    with limit, pytest.raises(UserError, match=ERRORS["cannot_write_file_too_large"]):
        workshop.train("run", config, store=store)
    run = workshop.train("run", config, resume=True)
    assert "resumed from step 6" in workshop.notes.getvalue()
    assert run.weights.read_bytes() == expected.weights.read_bytes() and rows(run, config) == rows(
        expected, config
    )
    assert verify_run(run).damage == []


@pytest.mark.parametrize("gone", [".", "checkpoints"])
def test_removed_directory_is_an_error(workshop, gone):
    config = sgd_config()
    store = small_store(config)
    batch = store.batch
    run = workshop.path / "run"

    def vanishing(step):
        if step == 11:
            wait_until_saved(run / "checkpoints" / "6")
            (run / gone).resolve().rename(
                workshop.path / "elsewhere"
            )  # a rename is atomic, unlike a deletion
        return batch(step)

    store.batch = vanishing
    with pytest.raises(UserError, match=ERRORS["cannot_write_read_run_the"]):
        workshop.train("run", config, store=store)


def test_read_only_disk_is_an_error_and_changes_nothing(workshop, whole, monkeypatch):
    config = whole[1]
    run = copy_until(whole[0], 18, workshop.path / "run")
    before = {path: path.read_bytes() for path in run.checkpoints.rglob("*") if path.is_file()}

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", read_only)
    with pytest.raises(UserError, match=ERRORS["cannot_write_read_only_file"]):
        workshop.train("run", config, resume=True)
    assert before == {path: path.read_bytes() for path in before}

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.distributed import make_layout
from dantinox.platform import get_platform
from dantinox.programs import compile_program
from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory, save_weights
from dantinox.text import TokenStore
from dantinox.training import loop, starting_point
from dantinox.training.checkpoint_store import Checkpoints
from dantinox.training.starting_point import check_facts, resume_config, run_facts, total_steps
from dantinox.training.step import Programs, TrainStep
from tests.error_texts import ERRORS

from .small import VOCABULARY, interrupted_store, small_config, small_store

TIMES = {"ms_per_step", "tokens_per_s", "memory_gb", "mfu"}


class Stumbles(TokenStore):
    """Fails when the batch of one step is requested."""

    at = None

    def batch(self, step, *rows):
        if step == self.at:
            raise KeyError("stumbled")
        return super().batch(step, *rows)


def outcome(run, config):
    """Returns everything that must be equal in a resumed and an uninterrupted run."""
    rows = [read_csv(run.log(config)), read_jsonl(run.metrics)]
    return run.weights.read_bytes(), [
        [{k: v for k, v in row.items() if k not in TIMES} for row in part] for part in rows
    ]


@pytest.mark.parametrize(
    ("kind", "every", "stops"),
    [
        ("muon", None, (3, 13)),
        pytest.param("adamw", 5, (9,), marks=pytest.mark.slow),
        pytest.param("adamw", 5, (23,), marks=pytest.mark.slow),
    ],
)
def test_resumed_runs_equal_the_uninterrupted_one(workshop, monkeypatch, kind, every, stops):
    """The last run compiles its programs again."""
    config = small_config(
        training__optimizer=kind, training__muon_normalize=kind == "muon",
        training__cautious_decay=True, training__checkpoint_every=every, training__ema=0.9,
    )  # fmt: skip
    expected = outcome(workshop.train("whole", config), config)
    assert [row["step"] for row in expected[1][0]] == [6, 12, 18, 24]
    for stop in stops:
        store = small_store(config, Stumbles)
        store.at = stop
        with pytest.raises(KeyError):
            workshop.train(f"cut{stop}", config, store=store)
        if stop == stops[-1]:
            monkeypatch.setattr(loop, "Programs", Programs)
        run = workshop.train(f"cut{stop}", config, resume=True)
        assert outcome(run, config) == expected
    notes = workshop.notes.getvalue()
    assert ("no complete checkpoint found: starting at step 0" in notes) == (kind == "muon")
    assert "resumed from step" in notes


def test_running_means_survive_changed_intervals(workshop):
    """The first row after an interruption includes the losses before it, even if the intervals
    changed.
    """
    config = small_config(
        training__checkpoint_every=5, training__eval_every=24, logging__log_every=1
    )
    store = small_store(config, Stumbles)
    store.at = 12
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=store)
    changed = small_config(training__eval_every=8, logging__log_every=1)
    run = workshop.train("cut", changed, resume=True)
    losses = [row["train_loss"] for row in read_jsonl(run.metrics) if row["kind"] == "interval"]
    rows = read_csv(run.log(config))
    assert [row["step"] for row in rows] == [16, 24] and len(losses) == 24
    np.testing.assert_allclose(
        [row["train_loss"] for row in rows], [np.mean(losses[:16]), np.mean(losses[16:])], rtol=1e-5
    )


def test_resuming_a_finished_run_changes_nothing_unless_it_has_more_steps(workshop):
    config = small_config()
    run = workshop.train("done", config)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    workshop.train("done", config, resume=True)
    assert before == {
        path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()
    }
    assert "this run is finished: step 24 of 24" in workshop.notes.getvalue()
    longer = small_config(training__steps=30)
    run = workshop.train("done", longer, resume=True)
    assert [row["step"] for row in read_csv(run.log(longer))] == [6, 12, 18, 24, 30]


@pytest.mark.parametrize(("call", "killed"), [(3, 14), (5, None)], ids=["step 12", "last step"])
def test_interrupted_evaluation_is_logged_once(workshop, call, killed):
    """The checkpoint of its step still lists it as due when a third process resumes."""
    config = small_config()
    expected = outcome(workshop.train("whole", config), config)
    store = interrupted_store(config, call)
    with pytest.raises(SystemExit):
        workshop.train("cut", config, store=store)
    store = small_store(config, Stumbles)
    store.at = killed
    with contextlib.nullcontext() if killed is None else pytest.raises(KeyError):
        workshop.train("cut", config, resume=True, store=store)
    assert outcome(workshop.train("cut", config, resume=True), config) == expected


def weights_of(run, config, step, path):
    """Returns the content of a weights file with the weights of a checkpoint."""
    shapes = TrainStep(config, config.architecture(VOCABULARY), step).shapes
    state = Checkpoints(run.checkpoints, 2).read(step, shapes)
    path.mkdir()
    save_weights(path / "weights.msgpack", state.weights)
    return (path / "weights.msgpack").read_bytes()


def test_run_resumed_with_fewer_steps_is_evaluated_and_finished(workshop):
    """A process died after it had exported the weights of step 12, which the run no longer has."""
    config = small_config(training__checkpoint_every=5)
    store = small_store(config, Stumbles)
    store.at = 13
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=store)
    shorter = small_config(training__checkpoint_every=5, training__steps=10)
    run = workshop.train("cut", shorter, resume=True)
    rows = read_csv(run.log(config))
    summary = json.loads((run.path / "model_summary.json").read_text())
    assert [row["step"] for row in rows] == [6, 10]
    assert (summary["best_step"], summary["val_loss"]) == (10, rows[1]["val_loss"])
    assert run.weights.read_bytes() == weights_of(run, config, 10, workshop.path / "ten")


def test_exported_weights_of_an_evaluation_that_is_not_repeated_are_replaced(workshop):
    """A process died between the export of step 18 and its checkpoint. Then only step 24 is
    evaluated, with a higher loss than step 12.
    """

    class Wrong(TokenStore):
        def batch(self, step, *rows):
            batch = super().batch(step, *rows)
            return batch._replace(targets_BT=(batch.targets_BT + 5) % VOCABULARY)

    config = small_config()
    store = small_store(config, Stumbles)
    store.at = 18
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=store)
    run = RunDirectory(workshop.path / "cut")
    shutil.rmtree(run.checkpoints / "18")
    expected = weights_of(run, config, 12, workshop.path / "twelve")
    assert run.weights.read_bytes() != expected
    other = small_config(training__eval_every=24)
    workshop.train("cut", other, resume=True, store=small_store(config, Wrong))
    assert json.loads((run.path / "model_summary.json").read_text())["best_step"] == 12
    assert run.weights.read_bytes() == expected


def test_run_without_its_checkpoints_does_not_start_again(workshop):
    """A new start would replace its logs and its weights. Before a second checkpoint it may."""
    config = small_config()
    run = workshop.train("run", config)
    shutil.rmtree(run.checkpoints)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=ERRORS["has_no_complete_checkpoint_but"]):
        workshop.train("run", small_config(training__steps=30), resume=True)
    after = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert after == before
    workshop.train("run", small_config(training__eval_every=12), resume=True)
    assert "starting at step 0" in workshop.notes.getvalue()


def test_resume_skips_a_damaged_newest_step(workshop):
    config = small_config()
    run = workshop.train("whole", config)
    expected = outcome(run, config)
    damaged = run.checkpoints / "24" / "state" / "manifest.ocdbt"
    damaged.write_bytes(b"")
    assert outcome(workshop.train("whole", config, resume=True), config) == expected
    assert (
        f"{damaged} is damaged: it has 0 bytes, expected 115: going back to step 18"
        in workshop.notes.getvalue()
    )
    assert "resumed from step 18" in workshop.notes.getvalue()
    assert (run.checkpoints / "damaged-24" / "state" / "manifest.ocdbt").read_bytes() == b""
    for step in run.checkpoints.glob("[0-9]*/state/manifest.ocdbt"):
        step.write_bytes(b"")
    before = sorted(run.path.rglob("*"))
    with pytest.raises(UserError, match=ERRORS["all_checkpoints_in_are_damaged"]):
        workshop.train("whole", config, resume=True)
    assert sorted(run.path.rglob("*")) == before


def test_only_steps_intervals_and_logging_may_differ():
    saved = small_config()
    given = small_config(
        training__steps=50, training__eval_every=3, logging__log_every=1, training__patience=2
    )
    assert resume_config(saved, given) == given
    for change, old, new in (
        ("training__lr", 0.01, 0.02),
        ("model__dim", 16, 32),
        ("training__seed", 42, 1),
    ):
        with pytest.raises(
            UserError, match=rf"{change.replace('__', '.')} .*the run has {old}, got {new}"
        ):
            resume_config(saved, small_config(**{change: new}))


def test_other_versions_and_gpus_are_noted(monkeypatch):
    """A run may continue with another version or on a GPU. It notes that results may not be
    bit-exact.
    """
    config = small_config()
    now = run_facts(
        config, "0" * 64, make_layout(config, config.architecture(VOCABULARY), jax.devices()[:1])
    )
    assert check_facts(now, now, deterministic=False) == []
    saved = now | {"versions": now["versions"] | {"jax": "0.1"}}
    version = (
        f"jax was 0.1 when the checkpoint was written and is {jax.__version__}"
        " now: results may not be bit-exact"
    )
    assert check_facts(saved, now, deterministic=False) == [version]
    monkeypatch.setattr(starting_point, "get_platform", lambda: get_platform("gpu"))
    (note,) = check_facts(now, now, deterministic=False)
    assert "results may not be bit-exact (set training.deterministic: true)" in note
    assert check_facts(now, now, deterministic=True) == []


def test_deterministic_sets_the_compiler_option_of_a_gpu():
    double = jax.jit(lambda x: 2 * x)
    for name, deterministic in (("gpu", True), ("gpu", False), ("cpu", True)):
        config = small_config(training__deterministic=deterministic, training__optimizer="sgd")
        model = replace(config.architecture(VOCABULARY), platform=name, kernel="xla")
        for traced in TrainStep(config, model, 24).traced().values():
            wanted = "True" if deterministic and name == "gpu" else None
            assert traced.options.get("xla_gpu_deterministic_ops") == wanted
            # The compiler of every platform checks the options of all of them.
            assert compile_program(double.lower(2.0), traced.options)(2.0) == 4


def test_steps_override_epochs():
    assert total_steps(small_config(training__steps=7), 100) == 7
    base = {"training.batch_size": 8, "training.warmup_steps": 0}
    assert total_steps(build_config({}, base | {"training.epochs": 2}), 100) == 25
    config = build_config({}, base | {"training.epochs": 1.1, "training.batch_size": 10})
    assert total_steps(config, 100) == 11  # 1.1 · 100 / 10 is 11.000000000000002 in floats
    assert total_steps(build_config({}, base | {"training.epochs": 0.5}), 100) == 7


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from training.small import Deadly, Workshop, small_config, small_store
    config = small_config(training__checkpoint_every=4, training__eval_every=8)
    store = small_store(config, Deadly)
    Workshop(Path({path!r}), sys.stderr).train("run", config, store=store, resume="resume" in sys.argv)
"""


def process(path, *arguments, **environment):
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parents[1]), path=str(path))
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGTERM, signal.SIGINT],
)
@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_killed_processes_resume_to_the_same_result(tmp_path, workshop, number):
    config = small_config(training__checkpoint_every=4, training__eval_every=8)
    expected = outcome(workshop.train("whole", config), config)
    first = process(tmp_path, DIE_AT="14", DIE_WITH=str(int(number)))
    assert first.returncode == (128 + number if number == signal.SIGTERM else -number), first.stderr
    second = process(tmp_path, "resume")
    assert second.returncode == 0, second.stderr
    if number != signal.SIGKILL:
        assert "stopped by a signal" in first.stderr and ("KeyboardInterrupt" in first.stderr) == (
            number == signal.SIGINT
        )
    assert "resumed from step" in second.stderr
    run = workshop.train("run", config, resume=True)
    weights, logs = outcome(run, config)
    assert logs == expected[1]
    assert weights == expected[0]
    assert json.loads(run.summary(config).read_text())["steps"] == 24

"""Limiting the number of steps by time: the chosen number, the settings of the run, and resume."""

import sys
from types import SimpleNamespace

import pytest

from dantinox.config import UserError, build_config
from dantinox.report import read_csv
from dantinox.run import load_run_config
from dantinox.training import dry_run, launch, step_time
from dantinox.training.starting_point import resume_config
from dantinox.training.step_time import limited_steps, seconds_per_step, set_steps
from tests.error_texts import ERRORS

from .small import SETTINGS, small_config


@pytest.mark.parametrize(
    ("minutes", "seconds", "steps"),
    [(None, 9.0, 24), (0.5, 1.25, 24), (0.5, 1.26, 23), (0.5, 7.0, 4), (0.5, 60.0, 1)],
)
def test_as_many_steps_as_the_minutes_allow(minutes, seconds, steps):
    assert limited_steps(small_config(training__max_minutes=minutes), 24, seconds) == steps


def test_fewer_steps_than_the_warmup_shorten_it():
    config = small_config(training__warmup_steps=4, training__steps=None, training__epochs=2)
    assert set_steps(config, 4) == small_config(training__steps=4, training__warmup_steps=4)
    assert set_steps(config, 3) == small_config(training__steps=3, training__warmup_steps=None)


def test_the_first_step_is_not_measured(monkeypatch):
    now, durations = 0.0, iter([50.0, 0.375, 0.25, 0.5, 0.125])

    def step():
        nonlocal now
        now += next(durations)
        return SimpleNamespace(loss=SimpleNamespace(block_until_ready=lambda: None))

    monkeypatch.setattr(step_time.time, "perf_counter", lambda: now)
    assert seconds_per_step(step) == 0.375  # (0.375 + 0.25 + 0.5) / 3, which is more than a second


def test_a_resumed_run_keeps_its_steps():
    limited, requested = small_config(training__steps=9), small_config(training__max_minutes=1)
    assert resume_config(limited, requested) == limited
    assert resume_config(limited, small_config(training__steps=30)).training.steps == 30
    stopped_before = small_config(training__max_minutes=1)
    assert resume_config(stopped_before, requested) == requested


def test_sampling_is_not_measured():
    for sampling in (
        {"training.objective": "grpo"},
        {"training.objective": "distill", "distill.data": "samples"},
    ):
        with pytest.raises(UserError, match=ERRORS["max_minutes_has_no_effect"]):
            build_config({}, sampling | {"distill.teacher": "x", "training.max_minutes": 1})


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text("Nel mezzo del cammin di nostra vita\n" * 200)
    return SETTINGS | {"data.path": str(tmp_path / "text.txt"), "tokenizer.tokenizer_type": "byte"}


@pytest.mark.slow
def test_a_slow_machine_trains_fewer_steps_on_a_schedule_that_fits(
    settings, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(step_time, "seconds_per_step", lambda step: float(step().loss > 0) / 2)
    limited = build_config({}, settings | {"training.max_minutes": 0.1})
    run, exact = (
        launch(limited, run_dir=tmp_path / "run"),
        build_config({}, settings | {"training.steps": 12}),
    )
    assert load_run_config(run) == load_run_config(launch(exact, run_dir=tmp_path / "exact"))
    assert run.weights.read_bytes() == (tmp_path / "exact" / run.weights.name).read_bytes()
    assert [row["step"] for row in read_csv(run.log(limited))] == [6, 12]
    assert (
        "training.max_minutes 0.1 allows 12 of 24 steps on this machine, at 0.5 s per step"
        in capsys.readouterr().err
    )
    launch(limited, run_dir=run.path, resume=True)
    shown = capsys.readouterr().err
    assert (
        "this run is finished: step 12 of 12" in shown
        and "training.max_minutes has no effect" in shown
    )


@pytest.mark.slow
def test_a_fast_machine_trains_all_steps(settings, tmp_path):
    run = launch(
        build_config({}, settings | {"training.max_minutes": 60}), run_dir=tmp_path / "run"
    )
    assert load_run_config(run).training == build_config({}, settings).training


@pytest.mark.slow
def test_a_dry_run_estimates_the_steps_that_fit(settings, monkeypatch):
    monkeypatch.setattr(sys.modules[dry_run.__module__], "seconds_per_step", lambda step: 0.5)
    lines = []
    dry_run(build_config({}, settings | {"training.max_minutes": 0.1}), lines.append)
    assert lines[-1] == "about 6s for 12 steps at 0.5 s per step, without evaluations"

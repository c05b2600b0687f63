"""A sweep continues after an interruption, records problems, and ranks its trials."""

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dantinox import cli
from dantinox.config import UserError
from dantinox.config.sweep_file import load_sweep
from dantinox.lab.studies.sweep import run_sweep, train_in_subprocess
from dantinox.lab.studies.sweep_view import draw_sweep, sweep_blocks
from dantinox.report import MetricsLog
from dantinox.report.document import to_csv, to_lines, to_markdown
from dantinox.run import RunDirectory, save_config
from tests.error_texts import ERRORS

ROOT = Path(__file__).parents[2]
SPEC = """base: {model: {dim: 16, n_heads: 2, num_blocks: 1, max_context: 16}}
grid: {training.lr: [1e-3, 1e-2, 1e-1], training.optimizer: [adamw, lion]}
"""
LOSSES = [2.5, 2.25, 1.5, 1.75, 9.0, 2.0, 3.0, 3.0]


def spec(folder, text=SPEC):
    path = folder / "s.yaml"
    path.write_text(f"{text}runs_dir: {folder / 'runs'}\n")
    return load_sweep(path)


class Trainer:
    """Writes the logs of a training; `problems` maps trial names to problems."""

    def __init__(self, measure="val_loss", **problems):
        self.problems, self.trained, self.measure = problems, [], measure

    def __call__(self, trial, run):
        self.trained.append(trial.name)
        problem = self.problems.get(trial.name)
        if problem == "stop":
            raise SystemExit(143)
        run.path.mkdir(exist_ok=True)
        if problem == "no corpus":
            return problem
        save_config(run, trial.config)
        log, loss = MetricsLog(run.log(trial.config), run.metrics), LOSSES[int(trial.name[-3:]) - 1]
        log.truncate(0)
        for step, more in ((10, 0.5), (20, 0.0), (30, 0.125)):
            row = {"step": step, self.measure: loss + more, "ms_per_step": float(step)}
            log.evaluation(row | ({"bits_per_byte": loss} if self.measure == "val_loss" else {}))
            if problem:
                return problem
        return None


def test_every_trial_is_trained_once_over_several_starts(tmp_path):
    sweep, notes = spec(tmp_path), []
    results = []
    with pytest.raises(SystemExit):
        run_sweep(
            sweep, Trainer(trial_004="stop", trial_002="the loss is NaN"), on_result=results.append
        )
    assert [[trial.name[-1] for trial in study.trials] for study in results] == [
        ["1"],
        ["1", "2"],
        ["3", "1", "2"],
    ]
    second = Trainer()
    study = run_sweep(spec(tmp_path), second, notes.append)
    assert second.trained == ["trial_004", "trial_005", "trial_006"]
    assert notes[:2] == [
        "trial 4 of 6: training.lr 0.01, training.optimizer 'lion'",
        "trial_004: val_loss 1.7500 at 20",
    ]
    assert [trial.name[-1] for trial in study.trials] == [
        "3",
        "4",
        "6",
        "1",
        "5",
        "2",
    ], "best first, problems last"
    best, worst = study.trials[0], study.trials[-1]
    assert (best.val_loss, best.best_step, best.steps, best.ms_per_step, best.problem) == (
        1.5,
        20,
        30,
        20.0,
        None,
    )
    assert (worst.problem, worst.val_loss, worst.steps) == ("the loss is NaN", 2.75, 10)
    third = Trainer()
    assert run_sweep(sweep, third) == study and third.trained == []
    assert run_sweep(sweep, third, retry=True).trials[4].problem is None and third.trained == [
        "trial_002"
    ]


def test_table_and_plot(tmp_path):
    study = run_sweep(spec(tmp_path), Trainer(trial_002="the loss is NaN"))
    rows = list(csv.DictReader(to_csv(sweep_blocks(study)).splitlines()))
    assert [float(row["val_loss"]) for row in rows] == [1.5, 1.75, 2.0, 2.5, 9.0, 2.75]
    assert (
        rows[0]["training.lr"] == "0.01"
        and rows[0]["training.optimizer"] == "adamw"
        and rows[-1]["problem"]
    )
    lines = list(to_lines(sweep_blocks(study), 80))
    assert lines[0].split() == [
        "trial",
        "lr",
        "optimizer",
        "val",
        "loss",
        "bits/byte",
        "at",
        "step",
        "of",
        "ms/step",
    ]
    assert lines[1].split()[:4] == ["trial_003", "0.01", "adamw", "1.5000"]
    assert lines[-1] == "trial_002: the loss is NaN" and max(map(len, lines)) <= 80
    assert "| trial_003 | 0.01 | adamw | 1.5000 |" in to_markdown(sweep_blocks(study))
    pytest.importorskip("matplotlib")
    assert draw_sweep(study).startswith(b"\x89PNG")


def test_trials_with_rewards_are_ranked_by_reward(tmp_path):
    notes = []
    study = run_sweep(
        spec(tmp_path), Trainer("val_reward", trial_002="the loss is NaN"), notes.append
    )
    rows = list(csv.DictReader(to_csv(sweep_blocks(study)).splitlines()))
    assert [float(row["val_reward"]) for row in rows] == [
        9.5,
        3.0,
        2.5,
        2.25,
        2.0,
        2.75,
    ] and "val_loss" not in rows[0]
    assert [row["best_step"] for row in rows] == ["10"] * 6 and rows[-1]["problem"], (
        "the best is the highest"
    )
    assert notes[1] == "trial_001: val_reward 3.0000 at 10"
    assert next(to_lines(sweep_blocks(study), 80)).split()[3:5] == ["val", "reward"]
    pytest.importorskip("matplotlib")
    assert draw_sweep(study).startswith(b"\x89PNG")


def test_other_sweep_is_rejected(tmp_path):
    run_sweep(spec(tmp_path), Trainer())
    for before, after, message in (
        ("1e-2", "2e-2", "trial_003 has training.lr 0.01 there, got 0.02"),
        ("dim: 16", "dim: 32", "trial_001 has model.dim 16 there, got 32"),
        ("1e-3, 1e-2, 1e-1", "1e-3, 1e-2", "has 6 trials, but .* has 4"),
    ):
        with pytest.raises(UserError, match=message):
            run_sweep(spec(tmp_path, SPEC.replace(before, after)), Trainer())
    more = Trainer()
    run_sweep(spec(tmp_path, SPEC.replace("1e-1]", "1e-1, 1]")), more)
    assert more.trained == ["trial_007", "trial_008"], "additional trials at the end are allowed"
    for content in (
        "",
        "[]",
        '{"trials": [], "ended": {}}',
        '{"trials": {"a": 5}, "ended": {}}',
        "[" * 100_000,
    ):
        (tmp_path / "runs" / "plan.json").write_text(content)
        with pytest.raises(UserError, match=r"plan\.json cannot be read: choose another runs_dir"):
            run_sweep(spec(tmp_path), Trainer())
    (tmp_path / "runs" / "plan.json").unlink()
    with pytest.raises(UserError, match=ERRORS["is_not_empty_and_not"]):
        run_sweep(spec(tmp_path), Trainer())


def test_error_before_a_trial_starts_ends_the_sweep(tmp_path):
    with pytest.raises(UserError, match=ERRORS["trial_002_could_not_start_no"]):
        run_sweep(spec(tmp_path), Trainer(trial_002="no corpus"))
    assert json.loads((tmp_path / "runs" / "plan.json").read_text())["ended"] == {"trial_001": None}


class Context:
    """A context of multiprocessing whose process sends a message and ends with a code.

    The signals `before` and `after` arrive in the parent process before and after the process
    starts.
    """

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self, code, message="", before=None, after=None):
        self.code, self.message, self.before, self.after = code, message, before, after
        self.pid, self.exitcode, self.terminated = None, None, False

    def Process(self, target, args):
        self.sender = args[-1]
        return self

    def start(self):
        if self.before is not None:
            signal.raise_signal(self.before)
        if self.message:
            self.sender.send_bytes(self.message.encode())
        self.pid = 12345

    def terminate(self):
        self.terminated = True

    def join(self):
        if self.after is not None:
            signal.raise_signal(self.after)
        self.exitcode = self.code


@pytest.mark.parametrize(
    ("code", "message", "problem"),
    [
        (0, "", None),
        (2, "no corpus", "no corpus"),
        (1, "", "the process ended with code 1"),
        (-signal.SIGKILL, "", "the process was killed, perhaps because memory ran out"),
        (-signal.SIGSEGV, "", "the process was ended by SIGSEGV"),
    ],
)
def test_the_end_of_a_process_is_a_sentence(tmp_path, monkeypatch, code, message, problem):
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: Context(code, message))
    trial, *_ = spec(tmp_path).trials
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / "rest").touch()  # of a process that was killed before it saved a config
    assert train_in_subprocess(lambda: None)(trial, run) == problem
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("context", "code"),
    [
        (Context(130), 130),
        (Context(143), 143),
        (Context(0, before=signal.SIGTERM), 143),
        (Context(0, after=signal.SIGINT), 130),
        (Context(143, after=signal.SIGINT), 143),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_a_signal_is_passed_to_the_process_and_ends_the_sweep(tmp_path, monkeypatch, context, code):
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    trial, *_ = spec(tmp_path).trials
    with pytest.raises(SystemExit) as ended:
        train_in_subprocess(lambda: None)(trial, RunDirectory(tmp_path / "run"))
    assert ended.value.code == code
    assert sent == ([] if context.after is None else [(12345, context.after)])
    assert context.terminated == (context.before is not None)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def real(folder, steps):
    """Returns a sweep of two small trainings, the second of which diverges."""
    (folder / "text.txt").write_text("Nel mezzo del cammin di nostra vita\n" * 60)
    base = {
        "model": {"dim": 16, "n_heads": 2, "num_blocks": 1, "max_context": 8},
        "tokenizer": {"tokenizer_type": "byte"},
        "data": {"path": str(folder / "text.txt")},
        "training": {"batch_size": 4, "steps": steps, "warmup_steps": 4, "eval_every": 20},
        "logging": {"log_every": 4, "plot": False},
    }
    path = folder / "s.yaml"
    grid = {"training.lr": [0.01, 1e30]}
    path.write_text(json.dumps({"base": base, "grid": grid, "runs_dir": str(folder / "runs")}))
    return path


@pytest.mark.slow
def test_sweep_on_the_command_line(tmp_path, capsys):
    """Trials run in separate processes, and divergence is recorded."""
    pytest.importorskip("matplotlib")
    path = real(tmp_path, 20)
    assert cli.main(["sweep", str(path), "--dry_run"]) == 0
    assert (
        capsys.readouterr().out == "trial_001 training.lr 0.01\ntrial_002 training.lr 1e+30\n"
        and not (tmp_path / "runs").exists()
    )
    assert cli.main(["sweep", str(path)]) == 0
    out = capsys.readouterr().out
    assert "trial_002: the loss or its gradient is not a finite number in step" in out
    first = RunDirectory(tmp_path / "runs" / "trial_001")
    assert (
        first.weights.is_file()
        and json.loads((first.path / "model_summary.json").read_text())["steps"] == 20
    )
    assert (tmp_path / "runs" / "sweep.png").is_file() and len(
        (tmp_path / "runs" / "sweep.csv").read_text().splitlines()
    ) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
@pytest.mark.usefixtures("interruptible")
def test_sweep_stopped_by_a_signal_saves_its_trial_and_continues(tmp_path, number, code):
    path, metrics = real(tmp_path, 1500), tmp_path / "runs" / "trial_001" / "metrics.jsonl"
    command = [sys.executable, "-m", "dantinox", "sweep", str(path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 50:
            time.sleep(0.05)
        process.send_signal(number)
    assert process.returncode == code
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert (
        done.returncode == 0
        and "resumed from step" in done.stderr
        and "stopped by" not in done.stderr.replace(str(tmp_path), "")
    )
    steps = [
        json.loads(line)["step"]
        for line in metrics.read_text().splitlines()
        if '"interval"' in line
    ]
    assert steps == [*range(4, 1501, 4)], "no row twice, none missing"

"""After SIGKILL at any moment, a resumed run ends with bitwise equal results."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from training.grpo_runs import grpo_config, make_base
from training.grpo_runs import outcome as grpo_outcome
from training.small import VOCABULARY, Workshop, small_config

from dantinox.report import read_csv, read_jsonl
from dantinox.run import SAVING_SUFFIX, RunDirectory, find_step_damage, saved_steps, verify_run
from dantinox.training.checkpoint_store import Checkpoints
from dantinox.training.step import TrainStep

from .train_until_killed import WATCHED

TIMES = {"ms_per_step", "tokens_per_s", "memory_gb"}


def start_run_process(path, *arguments):
    command = [
        sys.executable,
        str(Path(__file__).with_name("train_until_killed.py")),
        str(path),
        *map(str, arguments),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_process(path, *arguments):
    running = start_run_process(path, *arguments)
    output, errors = running.communicate(timeout=600)
    return subprocess.CompletedProcess(running.args, running.returncode, output, errors)


def outcome(path):
    """Returns what must not depend on the kill: the exported weights, the last state, and the logs
    without times.
    """
    config, run = small_config(), RunDirectory(path / "run")
    rows = [*read_csv(run.log(config)), *read_jsonl(run.metrics)]
    steps = config.training.steps
    state = Checkpoints(run.checkpoints, 2).read(
        steps, TrainStep(config, config.architecture(VOCABULARY), steps).shapes
    )
    return (
        run.weights.read_bytes(),
        [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)],
        [{name: value for name, value in row.items() if name not in TIMES} for row in rows],
    )


def test_incomplete_checkpoints_are_always_marked(tmp_path):
    """Checks the run before every file operation in any thread: the files that a kill at that
    moment would leave.
    """
    checkpoints, problems, checking = (
        RunDirectory(tmp_path / "run").checkpoints,
        [],
        threading.local(),
    )
    moments = 0

    def check_files(event, arguments):
        nonlocal moments
        if (
            event not in WATCHED
            or not str(arguments[0]).startswith(str(checkpoints))
            or getattr(checking, "now", False)
        ):
            return
        checking.now, moments = True, moments + 1
        for step in saved_steps(checkpoints):
            folder = checkpoints / str(step)
            if (
                not (checkpoints / f"{step}{SAVING_SUFFIX}").exists()
                or (folder / "manifest.txt").exists()
            ):
                problems.extend(
                    problem for problem in list(find_step_damage(folder)) if folder.exists()
                )
        checking.now = False

    watching = True
    sys.addaudithook(lambda *event: watching and checkpoints.exists() and check_files(*event))
    config = small_config(
        training__checkpoint_every=4, training__eval_every=8, training__optimizer="sgd"
    )
    Workshop(tmp_path).train("run", config)
    watching = False  # a hook cannot be removed
    assert problems == [] and moments > 100


@pytest.mark.faults
def test_run_killed_at_25_moments_resumes_with_equal_results(tmp_path):
    events = int(run_process(tmp_path / "whole").stdout)
    expected = outcome(tmp_path / "whole")
    assert (
        len(expected[1]) > 20 and len(expected[2]) == 3 + 3 + 24
    )  # evaluations in both logs, and intervals
    begun = time.monotonic()
    run_process(tmp_path / "again")  # its programs are in the cache, as for the runs below
    seconds = time.monotonic() - begun
    assert outcome(tmp_path / "again") == expected
    draw = random.Random(int(os.environ.get("SEED", "14")))
    moments = [("after", draw.randrange(2, events)) for _ in range(20)] + [
        ("at", draw.uniform(0, seconds)) for _ in range(5)
    ]
    killed = inside = resumed = 0
    for number, moment in enumerate(moments):
        path = tmp_path / str(number)
        killed += run_process(path, *moment).returncode == -9
        inside += any((path / "run" / "checkpoints").glob("*.saving"))
        second = run_process(path, "resume")
        assert second.returncode == 0, (moment, second.stderr)
        assert "damaged" not in second.stderr, (moment, second.stderr)
        resumed += "resumed from step" in second.stderr
        assert outcome(path) == expected, moment
        assert verify_run(RunDirectory(path / "run")).damage == [], moment
    of = f"of {len(moments)}, {events} events in {seconds:.1f} s"
    print(
        f"{killed} killed, {inside} of them inside a save, {resumed} resumed from a checkpoint,"
        f" {len(moments)} equal, {of}"
    )
    assert killed >= 20 and inside >= 5


@pytest.mark.faults
def test_training_with_rewards_killed_in_every_phase_resumes_with_equal_results(tmp_path):
    """A kill while answers are sampled, scored or learned from, or while files are written."""
    make_base(tmp_path)
    config = grpo_config(tmp_path)
    events = int(run_process(tmp_path / "whole", "grpo").stdout)
    expected = grpo_outcome(RunDirectory(tmp_path / "whole" / "run"), config)
    draw = random.Random(int(os.environ.get("SEED", "14")))
    calls = {
        "sampling": 11,
        "scoring": 56,
        "updating": 8,
    }  # 8 steps of 4 prompts, and 3 evaluations of 8 prompts
    moments = [
        (phase, draw.randrange(1, most + 1)) for phase, most in calls.items() for _ in range(3)
    ]
    moments += [("after", draw.randrange(2, events)) for _ in range(6)]
    killed = resumed = 0
    for number, moment in enumerate(moments):
        path = tmp_path / str(number)
        killed += run_process(path, "grpo", *moment).returncode == -9
        second = run_process(path, "grpo", "resume")
        assert second.returncode == 0, (moment, second.stderr)
        resumed += "resumed from step" in second.stderr
        assert grpo_outcome(RunDirectory(path / "run"), config) == expected, moment
        assert verify_run(RunDirectory(path / "run")).damage == [], moment
    print(f"{killed} killed, {resumed} resumed from a checkpoint, {len(moments)} equal")
    assert killed >= 13 and resumed >= 5


@pytest.mark.faults
@pytest.mark.usefixtures("interruptible")
def test_signal_saves_and_exits_and_a_second_one_exits_immediately(tmp_path):
    run_process(tmp_path / "whole")
    expected, seconds = outcome(tmp_path / "whole"), {}
    cases = [(step, (number,)) for step in (1, 6, 14) for number in (signal.SIGTERM, signal.SIGINT)]
    for step, numbers in [*cases, (14, (signal.SIGTERM, signal.SIGTERM))]:
        path = tmp_path / "-".join(map(str, (step, *numbers)))
        running = start_run_process(path, "slow", step)
        for line in running.stderr:
            if line.startswith(f"step {step} "):
                break
        begun = time.monotonic()
        for number in numbers:
            running.send_signal(number)
            time.sleep(0.1)
        _, errors = running.communicate(timeout=60)
        seconds[path.name] = round(time.monotonic() - begun, 1)
        assert running.returncode == 128 + numbers[-1], errors
        assert seconds[path.name] < (10 if len(numbers) == 1 else 0.4)
        assert "Traceback" not in errors and ("is saved, continue with --resume" in errors) == (
            len(numbers) == 1
        )
        assert run_process(path, "resume").returncode == 0
        assert outcome(path) == expected, path
    print("seconds from a signal to the exit:", seconds)

"""Training in two processes: a signal to one stops both, and a resume after a kill gives bitwise
equal results.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory, saved_steps, verify_run

STEPS = 60
SETTINGS = f"""
model: {{dim: 16, n_heads: 2, num_blocks: 1, max_context: 16}}
tokenizer: {{tokenizer_type: char}}
data: {{path: corpus.txt}}
training: {{steps: {STEPS}, batch_size: 8, warmup_steps: 2, eval_every: 20, checkpoint_every: 4, eval_tokens: 256}}
logging: {{log_every: 1, plot: false}}
"""
TIMES = {"ms_per_step", "tokens_per_s", "memory_gb", "mfu"}
DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}  # of each process


def command(*more):
    return [
        sys.executable,
        "-m",
        "dantinox",
        "train",
        "--config",
        "c.yaml",
        "--run_dir",
        "run",
        *more,
    ]


def pair(folder, *more):
    """Starts two processes in a folder. The first one writes the files of the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = []
    for number in (0, 1):
        flags = ("--coordinator", address, "--processes", "2", "--process", str(number))
        with open(folder / f"{number}.txt", "w") as log:
            both.append(
                subprocess.Popen(
                    command(*flags, *more), cwd=folder, env=os.environ | DEVICES, stderr=log
                )
            )
    return both


def exit_codes(both, seconds):
    """Waits for the processes and returns their exit codes."""
    end = time.monotonic() + seconds
    return [process.wait(max(0.1, end - time.monotonic())) for process in both]


def make_folder(path):
    path.mkdir()
    (path / "corpus.txt").write_text(
        "".join(f"nel mezzo del cammin {i} di nostra vita {i * i % 97}\n" for i in range(400))
    )
    (path / "c.yaml").write_text(SETTINGS)
    return path


def wait_for_step(folder, step, seconds=120):
    """Waits for a step to be logged."""
    run, end = RunDirectory(folder / "run"), time.monotonic() + seconds
    while not any(row["step"] >= step for row in read_jsonl(run.metrics)):
        assert time.monotonic() < end, (folder / "0.txt").read_text() + (
            folder / "1.txt"
        ).read_text()
        time.sleep(0.05)


def outcome(folder):
    run = RunDirectory(folder / "run")
    rows = [*read_csv(run.path / "training_log.csv"), *read_jsonl(run.metrics)]
    return run.weights.read_bytes(), [
        {name: value for name, value in row.items() if name not in TIMES} for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of two processes that are not interrupted."""
    folder = make_folder(tmp_path_factory.mktemp("pair") / "whole")
    assert exit_codes(pair(folder), 300) == [0, 0], (folder / "0.txt").read_text()
    return outcome(folder)


@pytest.mark.faults
def test_signal_to_one_process_stops_both_and_fewer_devices_can_resume(tmp_path, whole):
    folder = make_folder(tmp_path / "run")
    both = pair(folder)
    wait_for_step(folder, 6)
    both[1].send_signal(signal.SIGTERM)
    assert exit_codes(both, 10) == [143, 143]
    (stopped,) = re.findall(r"step (\d+) is saved", (folder / "0.txt").read_text())
    assert (
        saved_steps(folder / "run" / "checkpoints")[0] == int(stopped)
        and "is saved" not in (folder / "1.txt").read_text()
    )
    alone = command("--resume", "--steps", str(int(stopped) + 4))
    one = subprocess.run(
        alone,
        cwd=folder,
        env=os.environ | DEVICES,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert f"resumed from step {stopped}" in one.stderr
    assert (
        "fsdp 4 × expert 1 × sequence 1 × tensor 1 in 2 processes and continues on data 1 × fsdp 2"
        in one.stderr
    )
    assert exit_codes(pair(folder, "--resume", "--steps", str(STEPS)), 300) == [0, 0]
    weights, rows = outcome(folder)
    losses = [
        [row["train_loss"] for row in part if row.get("kind") == "interval"]
        for part in (rows, whole[1])
    ]
    assert len(losses[0]) == STEPS and max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.05
    assert verify_run(RunDirectory(folder / "run")).damage == []


@pytest.mark.faults
def test_run_resumed_after_a_killed_process_is_bitwise_equal(tmp_path, whole):
    draw = random.Random(int(os.environ.get("SEED", "14")))
    for number in range(int(os.environ.get("KILLS", "5"))):
        folder = make_folder(tmp_path / str(number))
        both = pair(folder)
        wait_for_step(folder, draw.randrange(1, STEPS - 8))
        time.sleep(draw.uniform(0, 0.1))
        both[draw.randrange(2)].kill()
        assert 0 not in exit_codes(both, 30)
        assert exit_codes(pair(folder, "--resume"), 300) == [0, 0], (folder / "0.txt").read_text()
        assert outcome(folder) == whole
        assert verify_run(RunDirectory(folder / "run")).damage == []

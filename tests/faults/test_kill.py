"""SIGKILL at any moment: the run goes on and ends with the same bits."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from training.small import small_config

from dantinox.report import read_csv, read_jsonl
from dantinox.run import RunDirectory, verify_run

CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
TIMES = {"ms_per_step", "tokens_per_s", "memory_gb"}


def process(path, *arguments):
    caching = {f"{name.upper()}": str(getattr(jax.config, name)) for name in CACHE}
    command = [sys.executable, str(Path(__file__).with_name("dies.py")), str(path), *map(str, arguments)]
    return subprocess.run(command, env=os.environ | caching, capture_output=True, text=True, timeout=600, check=False)


def outcome(path):
    run = RunDirectory(path / "run")
    rows = [*read_csv(run.log(small_config())), *read_jsonl(run.metrics)]
    return run.weights.read_bytes(), [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@pytest.mark.faults
def test_25_moments_inside_and_outside_of_saves(tmp_path):
    begun = time.monotonic()
    whole = process(tmp_path / "whole")
    seconds, events = time.monotonic() - begun, int(whole.stdout)
    expected = outcome(tmp_path / "whole")
    draw = random.Random(int(os.environ.get("SEED", "14")))
    moments = [("after", draw.randrange(2, events)) for _ in range(20)] + [("at", draw.uniform(0, seconds)) for _ in range(5)]
    killed = 0
    for number, moment in enumerate(moments):
        path = tmp_path / str(number)
        first = process(path, *moment)
        killed += first.returncode == -9
        second = process(path, "resume")
        assert second.returncode == 0, (moment, second.stderr)
        assert "damaged" not in second.stderr, (moment, second.stderr)
        assert outcome(path) == expected, moment
        assert verify_run(RunDirectory(path / "run")).damage == [], moment
    print(f"{killed} of {len(moments)} were killed before they ended, {events} events in {seconds:.1f} s")
    assert killed >= 20

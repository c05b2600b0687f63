"""Rows of the accelerator check that fail in every way, and one that works."""

import os
import signal
import time
from types import SimpleNamespace


def measured(**figures):
    return SimpleNamespace(figures=figures, machine={"device": "none"}, work=None)


def works(options):
    return measured(answer=42, smoke=options.smoke)


def fails(options):
    raise ValueError("the shapes differ\nin the second line")


def hangs(options):
    if os.fork() == 0:  # a process that outlives its parent
        time.sleep(600)
    time.sleep(600)


def fills_memory(options):
    raise RuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 80000000000 bytes"
    )


def lacks_torch(options):
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


def is_killed(options):
    os.kill(os.getpid(), signal.SIGKILL)


def kills_the_check(options):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

"""Forked processes, each with its own copy of the repository and the dependencies imported."""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STORE = ROOT / ".pytest_cache" / "mutants"
PRELOADED = (
    *("jax", "flax.nnx", "optax", "orbax.checkpoint", "numpy", "pydantic", "tokenizers"),
    *("safetensors.numpy", "hypothesis", "jinja2", "rich", "prompt_toolkit", "starlette"),
    *("uvicorn", "httpx", "prometheus_client", "llguidance", "regex", "coverage"),
)
PROFILE = "mutants"  # of hypothesis: the same examples in every run, so that no kill is by chance
BROKEN = 70  # exit status of a forked process in which this program failed


def preload() -> None:
    """Imports the dependencies. JAX reads these variables on import, and XLA_FLAGS later."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(STORE / "programs")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    for name in PRELOADED:
        importlib.import_module(name)
    from hypothesis import HealthCheck, settings

    rules: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
    settings.register_profile(PROFILE, **rules, suppress_health_check=list(HealthCheck))
    gc.freeze()


def copy_repository(target: Path) -> None:
    """Copies the tracked files, and compiles the package."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, but not in the index
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "dantinox"], cwd=target, check=True)


def enter(folder: Path) -> None:
    """Makes `folder/tree` the repository that a forked process imports and tests."""
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tree, temporary = str(folder / "tree"), folder / "tmp"
    os.chdir(tree)
    sys.path[:] = [tree, *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "dantinox")]:
        del sys.modules[name]
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(temporary)}
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    sys.dont_write_bytecode = True


def run_child(folder: Path, call: Callable[[], None]) -> None:
    """Calls a function in a forked process, and ends it."""
    status = BROKEN
    try:
        enter(folder)
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_forked(
    jobs: Iterable[tuple[Any, Path, Callable[[], None]]],
    workers: int,
) -> Iterator[tuple[Any, Path, int, float]]:
    """Runs functions in forked processes: yields the job, its folder, exit status and seconds."""
    running: dict[int, tuple[Any, Path, float]] = {}
    waiting = iter(jobs)
    try:
        while True:
            while len(running) < workers and (entry := next(waiting, None)) is not None:
                job, folder, call = entry
                if (pid := os.fork()) == 0:
                    run_child(folder, call)
                running[pid] = job, folder, time.monotonic()
            if not running:
                return
            pid, status = os.wait()
            kill_group(pid)  # processes that the tests started
            job, folder, began = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code == BROKEN:
                raise RuntimeError((folder / "output.txt").read_text(errors="replace"))
            yield job, folder, code, time.monotonic() - began
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for pid in running:
            kill_group(pid)


def run_pytest(folder: Path, file: str, expression: str, plugin: object, *options: str) -> int:
    options += ("-m", expression, "-p", "no:cacheprovider", f"--basetemp={folder / 'pytest'}")
    options += (f"--hypothesis-profile={PROFILE}",)  # instead of the profile of tests/conftest.py
    return pytest.main([file, *options], plugins=[plugin])

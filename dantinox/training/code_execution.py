"""The reward of `rewards` for code: runs tests on the code of an answer in a separate process. The
limits contain accidents; they are not a sandbox.
"""

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dantinox.files import UserError

RUNNER = Path(__file__).with_name("code_runner.py")
MAX_REPORT_BYTES = 1 << 20
# Libraries must not start threads when they are imported.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def check_platform() -> None:
    """Raises a UserError on a platform without the resource limits of `code_runner`."""
    if sys.platform != "linux":
        raise UserError(
            "the reward python_tests needs Linux, whose resource limits it uses, got"
            f" {sys.platform}"
        )


def count_passed_tests(code: str, tests: Sequence[str], seconds: float, memory_mib: int) -> int:
    """Runs Python code and then each test, and returns the number of tests that raise no exception.

    The tests run in order in one process and see the names that the code defines. The process has a
    temporary working directory and no inherited environment variables. It cannot start processes or
    threads; only root can start threads. When it ends or the time is over, its process group is
    killed.

    Args:
      seconds: limit on the wall-clock time of code and tests together, and, rounded up, on their
        CPU time.
      memory_mib: limit on the address space of the process.
    """
    token = secrets.token_hex(16)  # so that text that the code prints is not a report
    request = {
        "tests": len(tests),
        "token": token,
        "cpu_seconds": math.ceil(seconds),
        "memory_bytes": memory_mib << 20,
    }
    with (
        tempfile.TemporaryDirectory(prefix="dantinox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
    ):
        sources = {"answer": code} | {f"test_{number}": test for number, test in enumerate(tests)}
        for name, source in sources.items():
            Path(folder, f"{name}.py").write_bytes(source.encode("utf-8", "replace"))
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        command = [sys.executable, "-I", "-B", str(RUNNER)]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=ENVIRONMENT,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        lines = {*stdout.read(MAX_REPORT_BYTES).decode("utf-8", "replace").splitlines()}
    return sum(f"{token} {number}" in lines for number in range(len(tests)))

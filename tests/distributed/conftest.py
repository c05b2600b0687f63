"""Runs the tests of modules that define `DEVICES` in one other process with this number of
simulated devices.
"""

import faulthandler
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

import jax
import pytest
from training.small import shared_programs as shared_programs  # a fixture

TESTS = Path(__file__).parents[1]
DEVICES = 8
FOLDER = pytest.StashKey[Path]()


@pytest.fixture(scope="session", autouse=True)
def shared_folder(pytestconfig, tmp_path_factory):
    """The folder of the outcomes, which all workers of a parallel run share."""
    own = tmp_path_factory.getbasetemp()
    pytestconfig.stash[FOLDER] = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Reports the outcome that the test had in the other process."""
    if not _needs_devices(pyfuncitem) or jax.device_count() == DEVICES:
        return None
    outcomes = pyfuncitem.config.stash[FOLDER] / "outcomes.json"
    # The limit of time holds for each test in the other process instead.
    faulthandler.cancel_dump_traceback_later()
    with open(outcomes.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker runs all tests, the others wait for it
        if not outcomes.exists():
            chosen = [item.nodeid for item in pyfuncitem.session.items if _needs_devices(item)]
            outcomes.write_text(json.dumps(run_elsewhere(chosen)))
    said = json.loads(outcomes.read_text()).get(
        pyfuncitem.nodeid, "the process that ran it ended before it was done"
    )
    if said:
        pytest.fail(said, pytrace=False)
    return True


def _needs_devices(item) -> bool:
    return getattr(item.module, "DEVICES", 1) == DEVICES


def run_elsewhere(tests: list[str]) -> dict[str, str]:
    """Runs tests in a process with simulated devices, and returns the failure of each, or ""."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        limit = ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]
        options = ["-m", "", "-p", "no:cacheprovider", f"--junit-xml={report}", *limit]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(
            command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False
        )
        if not report.exists():
            return dict.fromkeys(tests, done.stdout + done.stderr)
        cases = list(xml.parse(report).iter("testcase"))
    return {
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": "\n".join(
            part.text or "" for part in case if part.tag in ("failure", "error")
        )
        for case in cases
    }

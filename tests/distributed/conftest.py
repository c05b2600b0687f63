"""Runs test modules that define `DEVICES` in a process with this number of devices: one process per module."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Reports the outcome that the test had in the other process."""
    devices = getattr(pyfuncitem.module, "DEVICES", 1)
    if devices == jax.device_count():
        return None
    outcomes = pyfuncitem.session.stash.setdefault(OUTCOMES, {})
    if pyfuncitem.path not in outcomes:
        chosen = [item.nodeid for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
        outcomes[pyfuncitem.path] = run_elsewhere(devices, chosen)
    said = outcomes[pyfuncitem.path].get(pyfuncitem.name, "the process that ran it ended before it was done")
    if said:
        pytest.fail(said, pytrace=False)
    return True


OUTCOMES = pytest.StashKey[dict[Path, dict[str, str]]]()


def run_elsewhere(devices: int, tests: list[str]) -> dict[str, str]:
    """Runs tests in a process with simulated devices, and returns the failure of each, or ""."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", f"--junit-xml={report}", *tests]
        done = subprocess.run(command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        if not report.exists():
            return dict.fromkeys((test.split("::", 1)[1] for test in tests), done.stdout + done.stderr)
        cases = list(xml.parse(report).iter("testcase"))
    return {
        case.attrib["name"]: "\n".join(part.text or "" for part in case if part.tag in ("failure", "error")) for case in cases
    }

"""Fixtures that run commands."""

import os
import shutil
from pathlib import Path

import pytest

from dantinox import cli


@pytest.fixture
def dantinox(capfd, tmp_path, monkeypatch):
    """Returns a function that runs a command in this process and returns (exit code, stdout, stderr).

    The current directory is empty, because commands look for runs in `runs/`.
    """
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def generate(dantinox, run_dir):
    return lambda *argv: dantinox("generate", "--run_dir", run_dir, *argv)


@pytest.fixture
def copy(run_dir, tmp_path):
    """A copy of the run directory, to be modified."""
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The environment of processes: all share the user's folder for compiled programs."""
    unset = ("PYTHONUNBUFFERED", "JAX_COMPILATION_CACHE_DIR")
    return {
        **{name: value for name, value in os.environ.items() if name not in unset},
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }

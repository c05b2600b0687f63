"""Atomic file writes, bounded reads, checks of output paths, and `UserError` with quoted values."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_QUOTED = 60  # characters of a value in a sentence


class UserError(Exception):
    """A mistake of the user, as one sentence: what is wrong, where, what is allowed.

    Attributes:
      key: the dotted path of the setting that is wrong, as `generation.top_p`; None where it is no setting.
      value: what it was set to.
    """

    def __init__(self, sentence: str, *, key: str | None = None, value: object = None):
        super().__init__(sentence)
        self.key, self.value = key, value


@contextlib.contextmanager
def wrap_os_errors(what: str) -> Iterator[None]:
    """Turns an `OSError` inside into one sentence: `cannot read x.txt: No such file or directory`, `what` before the colon."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None


@contextlib.contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Turns an `ImportError` inside into a sentence, `what` and the command that installs an extra of this package."""
    try:
        yield
    except ImportError:
        raise UserError(f"{what}: pip install 'dantinox[{extra}]'") from None


def quote(value: Any) -> str:
    """A value as an error shows it: on one line, not too long, `null`, `true` and `false` as YAML and JSON spell them."""
    return _truncate("null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value))


def escape_name(name: str) -> str:
    """A name from outside, without quotes, line breaks or control characters, not too long."""
    return _truncate(repr(name)[1:-1])


def first_line(error: BaseException) -> str:
    """What went wrong in somebody else's words, as part of a sentence."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def read_text(path: str | Path, limit: int, what: str = "") -> str:
    """The UTF-8 text of a file, without a byte-order mark.

    Args:
      limit: bytes that the file may have; no more than that is read.
      what: the kind of file, for messages ("the chat template").

    Raises:
      UserError: it is not there, cannot be read, is larger, or is not UTF-8.
    """
    name, path = f"{what} {path}".lstrip(), Path(path)
    try:
        if not path.is_file():  # a pipe would never end
            hint = ": it is a directory" if path.is_dir() else ""
            raise UserError(f"no {what.removeprefix('the ') or 'file'} at {path}{hint}")
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise UserError(f"{name} is larger than {f'{limit >> 20} MiB' if limit >= 1 << 20 else f'{limit} bytes'}")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name} is not UTF-8 text: the byte 0x{byte:02x} in line {line}") from None


def read_json(path: str | Path, limit: int, what: str = "") -> dict[str, Any]:
    """The JSON object in a file; arguments and errors are those of `read_text`.

    Raises:
      UserError: it is not JSON, or not an object.
    """
    name, text = f"{what} {path}".lstrip(), read_text(path, limit, what)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{name} must hold a JSON object, got {quote(found)}")
    return found


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Replaces `path` by `data` (text as UTF-8): whoever reads it, after whatever crash, finds the old file or the new one.

    Raises:
      UserError: the disk is full, read-only or gone, and the old file intact; or `path` is a device, a pipe or a directory.
    """
    with staged_write(path, [data.encode() if isinstance(data, str) else data]):
        pass


@contextlib.contextmanager
def staged_write(path: str | Path, pieces: Iterable[bytes | memoryview]) -> Iterator[None]:
    """`atomic_write` of a file in pieces: within it they lie on the disk beside `path`, which is replaced at its end.

    Nothing is replaced where a piece cannot be made, or what is within raises.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: what is there is no file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with wrap_os_errors(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            yield
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)


def check_writable(path: str | Path, flag: str = "") -> None:
    """Checks that a file can be put at a path, before the work that it is to hold.

    Args:
      flag: that named the path, for the message.

    Raises:
      UserError: there is no such directory, it is read-only, or there is something else than a file.
    """
    path = Path(path)
    cannot, parent = f"{flag} cannot write {path}".lstrip(), path.absolute().parent
    if not parent.is_dir():
        raise UserError(f"{cannot}: there is no directory {path.parent}")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{cannot}: what is there is no file")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{cannot}: the directory {path.parent} is read-only")


def check_writable_folder(path: str | Path, flag: str = "") -> None:
    """Checks that files can be put into a folder, which may have to be made: what `check_writable` is for a file.

    Raises:
      UserError: there is something else, or no writable directory to make it in.
    """
    path = Path(path)
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists() or place.is_symlink())
    if not there.is_dir():
        raise UserError(f"{flag} cannot write into {path}: {there} is no directory".lstrip())
    if not os.access(there, os.W_OK):
        raise UserError(f"{flag} cannot write into {path}: the directory {there} is read-only".lstrip())


def _sync_directory(path: Path) -> None:
    """Makes a rename inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

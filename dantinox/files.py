"""Atomic file writes, bounded reads, checks of output paths, and `UserError` with quoted values."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_QUOTED = 60  # characters of a quoted value in an error message


class UserError(Exception):
    """An error that the user can correct. Its one-sentence message says what is wrong, where, and
    what is allowed.

    Attributes:
      key: the dotted path of the wrong setting, such as `generation.top_p`; None if the error is
        not about a setting.
      value: the value of that setting.

    Example:
      >>> try:
      ...     dantinox.load_config("quickstart", {"training.lr": -1})
      ... except dantinox.UserError as error:
      ...     print(f"{error.key}: {error}")
      training.lr: training.lr must be a number > 0, got -1 (command line)
    """

    def __init__(self, sentence: str, *, key: str | None = None, value: object = None):
        super().__init__(sentence)
        self.key = key
        self.value = value


@contextlib.contextmanager
def wrap_os_errors(what: str) -> Iterator[None]:
    """Converts an `OSError` in the block to a `UserError` such as
    `cannot read x.txt: No such file or directory`.

    Args:
      what: the part of the message before the colon.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None


@contextlib.contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Converts an `ImportError` in the block to a `UserError` that says `what` and the command that
    installs the extra.
    """
    try:
        yield
    except ImportError:
        raise UserError(f"{what}: {install_command(extra)}") from None


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. The package index has another program named
    dantinox.
    """
    return f"in a checkout of DantinoX, pip install -e '.[{extra}]'"


def quote(value: Any) -> str:
    """Formats a value for an error message: on one line, truncated, and with `null`, `true` and
    `false` as in YAML and JSON.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return _truncate(repr(value))


def escape_name(name: str) -> str:
    """Formats a name from a file or a request for an error message: no quotes, escaped control
    characters, truncated.
    """
    return _truncate(repr(name)[1:-1])


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, at most 200 characters, or the name of its
    class.
    """
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def read_text(path: str | Path, limit: int, what: str = "") -> str:
    """Returns the UTF-8 text of a file, without a byte-order mark.

    Args:
      limit: the largest size in bytes. A larger file is not read completely.
      what: the kind of file, for messages ("the chat template").

    Raises:
      UserError: the file is missing, cannot be read, is too large, or is not UTF-8.
    """
    name = f"{what} {path}".lstrip()
    path = Path(path)
    try:
        if not path.is_file():  # reading a pipe might never end
            hint = ": it is a directory" if path.is_dir() else ""
            raise UserError(f"no {what.removeprefix('the ') or 'file'} at {path}{hint}")
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
            raise UserError(f"{name} is larger than {size}")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name} is not UTF-8 text: the byte 0x{byte:02x} in line {line}") from None


def read_json(path: str | Path, limit: int, what: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file; the arguments are those of `read_text`.

    Raises:
      UserError: `read_text` fails, the text is not valid JSON, or the JSON value is not an object.
    """
    name = f"{what} {path}".lstrip()
    text = read_text(path, limit, what)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} must hold a JSON object, got {quote(content)}")
    return content


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Replaces the file `path` with `data` (a string is encoded as UTF-8).

    A reader finds either the complete old file or the complete new one, even after a crash.

    Raises:
      UserError: the file cannot be written, for example on a full or read-only disk, or `path` is a
        device, a pipe or a directory. The old file is then unchanged.
    """
    with staged_write(path, [data.encode() if isinstance(data, str) else data]):
        pass


@contextlib.contextmanager
def staged_write(path: str | Path, chunks: Iterable[bytes | memoryview]) -> Iterator[None]:
    """Writes chunks to a temporary file next to `path`, and replaces `path` with it when the block
    ends.

    `path` is unchanged if producing a chunk fails or the block raises.

    Raises:
      UserError: the file cannot be written (see `atomic_write`).
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it is not a regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with wrap_os_errors(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)


def check_writable(path: str | Path, flag: str = "") -> None:
    """Checks that a file can be written at a path, before a long computation produces its content.

    Args:
      flag: the command-line flag that set the path; the error message names it.

    Raises:
      UserError: the directory does not exist or is read-only, or the path exists and is not a
        regular file.
    """
    path = Path(path)
    cannot = f"{flag} cannot write {path}".lstrip()
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UserError(f"{cannot}: there is no directory {path.parent}")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{cannot}: it is not a regular file")
    if not os.access(parent, os.W_OK):
        raise UserError(f"{cannot}: the directory {path.parent} is read-only")


def check_writable_folder(path: str | Path, flag: str = "") -> None:
    """Checks that files can be written into a folder, which may not exist yet; the arguments are
    those of `check_writable`.

    Raises:
      UserError: the path is not a directory, or the folder cannot be created.
    """
    path = Path(path)
    cannot = f"{flag} cannot write into {path}".lstrip()
    places = (path.absolute(), *path.absolute().parents)
    # The nearest folder that exists: all folders below it are missing.
    nearest = next(place for place in places if place.exists() or place.is_symlink())
    if not nearest.is_dir():
        raise UserError(f"{cannot}: {nearest} is not a directory")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{cannot}: the directory {nearest} is read-only")


def _sync_directory(path: Path) -> None:
    """Makes a rename inside the directory `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Manifests: SHA-256 and size of every file that was written, so that damage is detected.

A manifest is a JSON object with SHA-256 and size of every file it records, and with what they were made by: settings,
tokenizer, versions. Its last line is the SHA-256 of the lines above. There are two kinds: one of the run's own files, beside
them, and one in every checkpoint. A file that was changed, cut, emptied, lost or exchanged is told by it; a manifest that was,
by its last line.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.files import UserError, atomic_write, quote, staged_write, wrap_os_errors

MANIFEST = "manifest.txt"
FORMAT = 1
LAST_LINE = 65  # bytes: a SHA-256 in hexadecimal digits and the end of the line
SMALL = 1 << 20  # bytes of a file that a quick look reads too
READ_BYTES = 8 << 20  # bytes read at once


class DamagedFile(UserError):
    """A file is not what was written."""


class Entry(NamedTuple):
    """The SHA-256 (hex) of a file, or of its first `size` bytes."""

    sha256: str
    size: int


def hash_file(path: Path, size: int | None = None) -> Entry:
    """Reads a file, or its first `size` bytes, a piece at a time. Raises an OSError if it cannot be read.

    Pieces are large because another thread may hold the interpreter between two of them.
    """
    digest, count = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while read := file.readinto(buffer if size is None else buffer[: size - count]):
            digest.update(buffer[:read])
            count += read
    return Entry(digest.hexdigest(), count)


def hash_file_cached(path: Path) -> Entry:
    """`hash_file`, computed once for as long as the file is unchanged."""
    try:
        return hash_file_in_background(path).result()
    except OSError:
        _entry.cache_clear()  # the next call reads the file again
        raise


def hash_file_in_background(path: Path) -> "Future[Entry]":
    """The result of `hash_file_cached`, computed in a thread that does not delay the end of the process."""
    now = path.stat()
    return _entry(path, now.st_ino, now.st_size, now.st_mtime_ns)


@lru_cache(maxsize=16)
def _entry(path: Path, *state: int) -> "Future[Entry]":
    future: Future[Entry] = Future()

    def compute() -> None:
        try:
            future.set_result(hash_file(path))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=compute, daemon=True).start()
    return future


def write_manifest(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a manifest and waits for the disk.

    Args:
      record: `files`, by their names the entries that each may have (null: it may be absent), and whatever they were made by.

    Raises:
      UserError: the disk is full, read-only or gone.
    """
    files = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries)}" for name, entries in record["files"].items())
    facts = {"format": FORMAT} | {name: value for name, value in record.items() if name != "files"}
    text = json.dumps(facts, indent=1, allow_nan=False).removesuffix("\n}") + f',\n "files": {{\n{files}\n }}\n}}\n'
    atomic_write(path, text + hashlib.sha256(text.encode()).hexdigest() + "\n")


def read_manifest(path: Path, step: int | None = None) -> dict[str, Any]:
    """What `write_manifest` wrote, its last line checked.

    Args:
      step: the checkpoint that it is to be of; None: it is to be that of a run.

    Raises:
      Damage: it is missing, damaged, or belongs elsewhere.
      UserError: it cannot be read, or was written by another version.
    """
    with wrap_os_errors(f"cannot read {path}"):
        if not path.is_file():  # a pipe would never end
            nowhere = f"{path} is missing: nothing says whether the files beside it are whole"
            raise DamagedFile(f"{path} is no file" if os.path.lexists(path) else nowhere)
        content = path.read_bytes()
    text, last = content[:-LAST_LINE], content[-LAST_LINE:]
    if last.decode(errors="replace") != hashlib.sha256(text).hexdigest() + "\n":
        raise DamagedFile(f"{path} is damaged: its last line is not the SHA-256 of the lines above")
    return _record_of(path, text, step)


def _record_of(path: Path, text: bytes, step: int | None) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if isinstance(record, dict) and record.get("format", FORMAT) != FORMAT:
        raise UserError(f"{path} has format {quote(record['format'])}, this version reads {FORMAT}")
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise DamagedFile(f"{path} is damaged: it names no files")
    if (found := record.get("step")) != step:
        raise DamagedFile(f"{path} is that of {'a run' if found is None else f'step {quote(found)}'}")
    return record


def write_file(
    folder: Path, name: str, data: bytes | str | Iterable[bytes | memoryview], facts: Mapping[str, Any] | None = None
) -> None:
    """Replaces a file of a run and its entry in the manifest, both or neither: after whatever crash they agree.

    Args:
      data: its content, or pieces of it one after the other.
      facts: what the file was made by, recorded beside the files.

    Raises:
      UserError: the disk is full, read-only or gone, and the old file intact; or the manifest is damaged.
    """
    data = data.encode() if isinstance(data, str) else data
    digest, size = hashlib.sha256(), 0

    def read() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in [data] if isinstance(data, bytes) else data:
            digest.update(piece)
            size += memoryview(piece).nbytes
            yield piece

    with _lock_manifest(folder):
        record = _record(folder)
        before = record["files"].get(name, [None])[0]
        with staged_write(folder / name, read()):
            new = Entry(digest.hexdigest(), size)
            # Two files cannot be replaced at once: in between the old one is as good as the new one.
            _replace(folder, record | {"files": record["files"] | {name: [new, before]}})
        _replace(folder, {**record, **(facts or {}), "files": record["files"] | {name: [new]}})


def record_files(folder: Path, names: Iterable[str], afresh: bool = False) -> None:
    """Records files of a run, as they are now, in its manifest.

    Args:
      afresh: forget what the manifest said before.

    Raises:
      UserError: one of them cannot be read, or the manifest cannot be written.
    """
    try:
        entries = {name: [hash_file(folder / name)] for name in names}
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    with _lock_manifest(folder):
        record: dict[str, Any] = {"files": {}} if afresh else _record(folder)
        _replace(folder, record | {"files": record["files"] | entries})


@contextlib.contextmanager
def _lock_manifest(folder: Path) -> Iterator[None]:
    """Keeps other processes from the manifest: a run may be calibrated while it is trained."""
    with wrap_os_errors(f"cannot write {folder / MANIFEST}"):
        directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield
    finally:
        os.close(directory)


def _record(folder: Path) -> dict[str, Any]:
    return read_manifest(folder / MANIFEST) if (folder / MANIFEST).exists() else {"files": {}}


def _replace(folder: Path, record: Mapping[str, Any]) -> None:
    write_manifest(folder / MANIFEST, {**record, "files": dict(sorted(record["files"].items()))})


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Compares files of a run with its manifest.

    Raises:
      Damage: one of them is not what was written, or nothing says what was; the sentence names it.
    """
    files = read_manifest(folder / MANIFEST)["files"]
    for name in names:
        if problem := describe_damage(folder, name, files.get(name), hash_file_cached):
            raise DamagedFile(problem)


def recorded_file_damage(path: Path) -> str:
    """`describe_damage` of a file that somebody else may have written: nothing where there is no manifest that names it."""
    manifest = path.parent / MANIFEST
    expected = read_manifest(manifest)["files"].get(path.name) if manifest.exists() else None
    return describe_damage(path.parent, path.name, expected) if expected else ""


def describe_damage(
    folder: Path, name: str, expected: Iterable[Any] | None, entry: Callable[[Path], Entry] = hash_file, quick: bool = False
) -> str:
    """What is wrong with a file, as a sentence; nothing where it is what was written.

    Args:
      expected: the entries that it may have; None: no manifest names it.
      quick: of a large file only the size is looked at.

    Raises:
      UserError: it cannot be read, for want of a permission or of memory: then nobody knows whether it is damaged.
    """
    path = folder / name
    if expected is None:
        return f"{path} is named by no manifest" if os.path.lexists(path) else ""
    allowed = [tuple(one) if one else None for one in expected]
    try:
        if not path.is_file():
            missing = "" if None in allowed else f"{path} is missing"
            return f"{path} is no file" if os.path.lexists(path) else missing
        size = path.stat().st_size
        if quick and size > SMALL:
            return "" if any(one and one[1] == size for one in allowed) else _size_differs(path, size, allowed)
        found = entry(path)
    except OSError as error:
        if error.errno == errno.EIO:
            return f"{path} cannot be read: {error.strerror}"
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if found in allowed:
        return ""
    if not any(one and one[1] == found.size for one in allowed):
        return _size_differs(path, found.size, allowed)
    sha256 = next(one[0] for one in allowed if one)
    return f"{path} is damaged: its SHA-256 is {found.sha256[:12]}…, {sha256[:12]}… was written"


def _size_differs(path: Path, size: int, allowed: list[Any]) -> str:
    return f"{path} is damaged: it has {size} bytes, {next(one[1] for one in allowed if one)} were written"


def write_step_manifest(step: Path, facts: Mapping[str, Any], logs: Mapping[Path, int]) -> None:
    """Records all files of a complete checkpoint, and the first bytes of the logs beside it.

    Args:
      step: the directory, whose name is the number of the step.
      logs: for each log how many bytes it had when the step was saved.
    """
    files = {name: [hash_file(step / name)] for name in _files(step)}
    beside = {path.name: [hash_file(path, size)] for path, size in logs.items()}
    write_manifest(step / MANIFEST, {"step": int(step.name), "files": files, "logs": beside} | dict(facts))


def find_step_damage(step: Path, quick: bool = False) -> Iterator[str]:
    """A sentence for everything in a checkpoint that is not as it was written; with `quick` large files by their size alone.

    Raises:
      UserError: something cannot be read.
    """
    try:
        files = read_manifest(step / MANIFEST, int(step.name))["files"]
    except DamagedFile as error:
        yield str(error)
        return
    for name in sorted({*files, *_files(step)}):
        if problem := describe_damage(step, name, files.get(name), quick=quick):
            yield problem


def find_log_damage(folder: Path, step: Path) -> Iterator[str]:
    """A sentence for every log that does not begin with what it held when a checkpoint was saved."""
    for name, size, entries in recorded_logs(step):
        problem = describe_damage(folder, name, entries, lambda path, size=size: hash_file(path, size))  # type: ignore[misc]
        if problem:
            yield f"{problem} up to step {step.name}"


def recorded_logs(step: Path) -> Iterator[tuple[str, int, Any]]:
    """(name, bytes when the checkpoint was saved, entries) of the logs that a checkpoint records."""
    for name, entries in read_manifest(step / MANIFEST, int(step.name))["logs"].items():
        yield name, entries[0][1], entries


def _files(step: Path) -> list[str]:
    """All but directories; a link to one has nothing to say about what is behind it."""
    found = (path for path in step.rglob("*") if path.name != MANIFEST or path.parent != step)
    return sorted(str(path.relative_to(step)) for path in found if path.is_symlink() or not path.is_dir())

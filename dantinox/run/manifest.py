"""Manifests record the SHA-256 and the size of every file that a run writes, so that damage can be
detected.

A manifest is a JSON object, followed by one line with the SHA-256 of the lines before it. The
object holds the SHA-256 and the size of each file, and the provenance of the files: settings,
tokenizer, versions. The run directory has a manifest for the files outside of checkpoints, and
every checkpoint has its own manifest. A manifest reveals files that are changed, truncated, empty,
missing or swapped. Its last line reveals damage to the manifest itself.
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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from dantinox.files import UserError, atomic_write, quote, staged_write, wrap_os_errors

MANIFEST = "manifest.txt"
MANIFEST_FORMAT = 1
CHECKSUM_LINE_BYTES = 65  # bytes: 64 hexadecimal digits and a line break
MAX_MANIFEST_BYTES = 256 << 20  # bytes, enough for two million files
# A quick check hashes files of up to this many bytes, and compares only the size of a larger file.
SMALL_FILE_BYTES = 1 << 20
READ_BYTES = 8 << 20  # bytes per read


class DamagedFile(UserError):
    """A file differs from its recorded content."""


class Entry(NamedTuple):
    """The SHA-256 (hex) of a file or of its beginning, and the number of bytes that were hashed."""

    sha256: str
    size: int


def hash_file(path: Path, size: int | None = None) -> Entry:
    """Returns the SHA-256 and the size of a file, or of its first `size` bytes.

    The file is read in large blocks because another thread may hold the interpreter lock between
    two reads.

    Raises:
      OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    count = 0
    with open(path, "rb", buffering=0) as file:
        # At least one byte, because a file that is empty here may grow before it is read.
        buffer = memoryview(bytearray(min(READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        # The loop ends at the end of the file, or when no byte of `size` is left.
        while read := file.readinto(buffer if size is None else buffer[: size - count]):
            digest.update(buffer[:read])
            count += read
    return Entry(digest.hexdigest(), count)


def hash_file_cached(path: Path) -> Entry:
    """Returns `hash_file(path)`, computed once as long as inode, size and modification time stay
    the same.
    """
    try:
        return hash_file_in_background(path).result()
    except OSError:
        _hash_future.cache_clear()  # the next call reads the file again
        raise


def hash_file_in_background(path: Path) -> "Future[Entry]":
    """Starts to compute `hash_file_cached(path)` in a daemon thread and returns its future."""
    now = path.stat()
    return _hash_future(path, now.st_ino, now.st_size, now.st_mtime_ns)


@lru_cache(maxsize=16)
def _hash_future(path: Path, *state: int) -> "Future[Entry]":
    """Starts to hash a file; `state` is part of the key of the cache, so that a changed file is
    hashed again.
    """
    future: Future[Entry] = Future()

    def compute() -> None:
        try:
            future.set_result(hash_file(path))
        except BaseException as error:  # raised again by `Future.result`
            future.set_exception(error)

    threading.Thread(target=compute, daemon=True).start()
    return future


def write_manifest(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces a manifest and flushes it to disk.

    Args:
      record: `files` maps each name to the list of entries that are valid for it; a null entry
        means that the file may be absent. The other keys record the provenance of the files.

    Raises:
      UserError: the manifest cannot be written, for example to a full or read-only disk.
    """
    files = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(entries)}" for name, entries in record["files"].items()
    )
    facts = {"format": MANIFEST_FORMAT} | {
        name: value for name, value in record.items() if name != "files"
    }
    # One line per file: `json.dumps` would put every number of `files` on a line of its own.
    # Therefore `files` is written by hand, before the brace that closes the object.
    text = (
        json.dumps(facts, indent=1, allow_nan=False).removesuffix("\n}")
        + f',\n "files": {{\n{files}\n }}\n}}\n'
    )
    atomic_write(path, text + hashlib.sha256(text.encode()).hexdigest() + "\n")


def read_manifest(path: Path, step: int | None = None) -> dict[str, Any]:
    """Reads the record that `write_manifest` wrote and checks its last line.

    Args:
      step: the step of the checkpoint that the manifest must belong to. None: it must belong to a
        run.

    Raises:
      DamagedFile: the manifest is missing, damaged, or belongs to another step.
      UserError: it cannot be read, or has another format version.
    """
    with wrap_os_errors(f"cannot read {path}"):
        if not path.is_file():  # reading a pipe would never end
            missing = f"{path} is missing, so the files next to it cannot be checked"
            raise DamagedFile(f"{path} is not a regular file" if os.path.lexists(path) else missing)
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise DamagedFile(f"{path} is damaged: it is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    text, last = content[:-CHECKSUM_LINE_BYTES], content[-CHECKSUM_LINE_BYTES:]
    if last.decode(errors="replace") != hashlib.sha256(text).hexdigest() + "\n":
        raise DamagedFile(f"{path} is damaged: its last line is not the SHA-256 of the lines above")
    return _parse_record(path, text, step)


def _parse_record(path: Path, text: bytes, step: int | None) -> dict[str, Any]:
    """Returns the record of a manifest without its last line; the errors are those of
    `read_manifest`.
    """
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if isinstance(record, dict) and record.get("format", MANIFEST_FORMAT) != MANIFEST_FORMAT:
        raise UserError(
            f"{path} has format {quote(record['format'])}, but this version reads format"
            f" {MANIFEST_FORMAT}"
        )
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise DamagedFile(f"{path} is damaged: it lists no files")
    found = record.get("step")
    if found != step:
        owner = "a run" if found is None else f"step {quote(found)}"
        raise DamagedFile(f"{path} belongs to {owner}")
    return record


def write_file(
    folder: Path,
    name: str,
    data: bytes | str | Iterable[bytes | memoryview],
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Replaces a file of a run and its entry in the manifest atomically: after a crash, file and
    manifest agree.

    Args:
      folder: the run directory.
      name: the path of the file relative to `folder`.
      data: the content, or an iterable of its parts.
      facts: the provenance of the file; added to the manifest.

    Raises:
      UserError: the file cannot be written, in which case the old file is intact; or the manifest
        is damaged.
    """
    data = data.encode() if isinstance(data, str) else data
    digest = hashlib.sha256()
    size = 0

    def hashed_pieces() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in [data] if isinstance(data, bytes) else data:
            digest.update(piece)
            size += memoryview(piece).nbytes
            yield piece

    with _lock_manifest(folder):
        record = _read_or_empty(folder)
        # The newest entry of the file; None if there is none, so that the file may be absent.
        before = record["files"].get(name, [None])[0]
        with staged_write(folder / name, hashed_pieces()):
            new = Entry(digest.hexdigest(), size)
            # File and manifest cannot be replaced in one operation. In between, the manifest
            # accepts both the old and the new content of the file.
            _write_sorted_manifest(
                folder, record | {"files": record["files"] | {name: [new, before]}}
            )
        _write_sorted_manifest(
            folder, {**record, **(facts or {}), "files": record["files"] | {name: [new]}}
        )


def record_files(folder: Path, names: Iterable[str], reset: bool = False) -> None:
    """Adds the current state of files of a run to its manifest.

    Args:
      reset: discard the old entries.

    Raises:
      UserError: a file cannot be read, or the manifest cannot be written.
    """
    try:
        entries = {name: [hash_file(folder / name)] for name in names}
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    with _lock_manifest(folder):
        record: dict[str, Any] = {"files": {}} if reset else _read_or_empty(folder)
        _write_sorted_manifest(folder, record | {"files": record["files"] | entries})


@contextlib.contextmanager
def _lock_manifest(folder: Path) -> Iterator[None]:
    """Locks the manifest, because two processes may write it: a run can be calibrated while it is
    trained.
    """
    with wrap_os_errors(f"cannot write {folder / MANIFEST}"):
        directory = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # the kernel releases it when the process ends
        yield
    finally:
        os.close(directory)


def _read_or_empty(folder: Path) -> dict[str, Any]:
    return read_manifest(folder / MANIFEST) if (folder / MANIFEST).exists() else {"files": {}}


def _write_sorted_manifest(folder: Path, record: Mapping[str, Any]) -> None:
    write_manifest(folder / MANIFEST, {**record, "files": dict(sorted(record["files"].items()))})


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Compares files of a run with its manifest.

    Raises:
      DamagedFile: a file differs from its entry or has no entry (the message names the file), or
        the manifest is damaged.
    """
    files = read_manifest(folder / MANIFEST)["files"]
    for name in names:
        if problem := describe_damage(folder, name, files.get(name), hash_file_cached):
            raise DamagedFile(problem)


def recorded_file_damage(path: Path) -> str:
    """Returns `describe_damage` for a file, or "" if no manifest lists the file, for example
    because the user added it.
    """
    manifest = path.parent / MANIFEST
    expected = read_manifest(manifest)["files"].get(path.name) if manifest.exists() else None
    return describe_damage(path.parent, path.name, expected) if expected else ""


def describe_damage(
    folder: Path,
    name: str,
    expected: Iterable[Any] | None,
    hash_entry: Callable[[Path], Entry] = hash_file,
    quick: bool = False,
) -> str:
    """Returns a sentence that says how a file differs from its recorded content, or "" if the file
    is unchanged.

    Args:
      expected: the entries that are valid for the file; a null entry means that the file may be
        absent. None: no manifest lists the file.
      hash_entry: computes the actual entry of the file.
      quick: compare only the size of files of more than 1 MiB.

    Raises:
      UserError: the file cannot be read, for example for lack of permission, so its state is
        unknown.
    """
    path = folder / name
    if expected is None:
        return f"{path} is not listed in the manifest" if os.path.lexists(path) else ""
    allowed = [Entry._make(entry) if entry else None for entry in expected]
    try:
        if not path.is_file():
            # Not a regular file, missing, or rightly absent.
            missing = "" if None in allowed else f"{path} is missing"
            return f"{path} is not a regular file" if os.path.lexists(path) else missing
        size = path.stat().st_size
        if quick and size > SMALL_FILE_BYTES:
            return (
                ""
                if any(entry and entry.size == size for entry in allowed)
                else _size_message(path, size, allowed)
            )
        found = hash_entry(path)
    except OSError as error:
        if error.errno == errno.EIO:  # a bad block of the disk: the content is lost
            return f"{path} cannot be read: {error.strerror}"
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if found in allowed:
        return ""
    if not any(entry and entry.size == found.size for entry in allowed):
        return _size_message(path, found.size, allowed)
    # The message names only the first valid entry, which is the newest.
    sha256 = next(entry.sha256 for entry in allowed if entry)
    return f"{path} is damaged: its SHA-256 is {found.sha256[:12]}…, expected {sha256[:12]}…"


def _size_message(path: Path, size: int, allowed: list[Entry | None]) -> str:
    expected = next(entry.size for entry in allowed if entry)
    return f"{path} is damaged: it has {size} bytes, expected {expected}"


def write_step_manifest(step: Path, facts: Mapping[str, Any], logs: Mapping[Path, int]) -> None:
    """Writes the manifest of a complete checkpoint: all of its files, and the logs of the run up to
    this step.

    Args:
      step: the directory of the checkpoint; its name is the step number.
      facts: the provenance of the checkpoint.
      logs: the size in bytes of each log when the step was saved.

    Raises:
      OSError: a file cannot be read.
      UserError: the manifest cannot be written.
    """
    files = {name: [hash_file(step / name)] for name in _files(step)}
    log_entries = {path.name: [hash_file(path, size)] for path, size in logs.items()}
    write_manifest(
        step / MANIFEST, {"step": int(step.name), "files": files, "logs": log_entries} | dict(facts)
    )


def find_step_damage(step: Path, quick: bool = False) -> Iterator[str]:
    """Yields one sentence for each damaged, missing or unlisted file of a checkpoint.

    Args:
      step: the directory of the checkpoint.
      quick: compare only the size of files of more than 1 MiB.

    Raises:
      UserError: a file cannot be read.
    """
    try:
        files = read_manifest(step / MANIFEST, int(step.name))["files"]
    except DamagedFile as error:
        yield str(error)
        return
    for name in sorted({*files, *_files(step)}):
        if problem := describe_damage(step, name, files.get(name), quick=quick):
            yield problem


class LogDamage(NamedTuple):
    """A log that is missing, or whose beginning has changed; `problem` is one sentence about it."""

    problem: str
    is_missing: bool


def find_log_damage(folder: Path, step: Path) -> Iterator[LogDamage]:
    """Yields each log whose beginning is no longer what it was when the checkpoint was saved.

    Raises:
      DamagedFile: the manifest of the checkpoint is damaged.
      UserError: a file cannot be read.
    """
    for name, size, entries in recorded_logs(step):
        problem = describe_damage(folder, name, entries, partial(hash_file, size=size))
        if problem:
            is_missing = not os.path.lexists(folder / name)
            yield LogDamage(f"{problem} (compared up to step {step.name})", is_missing)


def recorded_logs(step: Path) -> Iterator[tuple[str, int, Any]]:
    """Yields (name, size in bytes when the checkpoint was saved, valid entries) of each log that a
    checkpoint records.
    """
    for name, entries in read_manifest(step / MANIFEST, int(step.name))["logs"].items():
        yield name, entries[0][1], entries  # an entry is (SHA-256, size)


def _files(step: Path) -> list[str]:
    """Returns the relative paths of all files; a symbolic link to a directory counts as a file."""
    found = (path for path in step.rglob("*") if path.name != MANIFEST or path.parent != step)
    return sorted(
        str(path.relative_to(step)) for path in found if path.is_symlink() or not path.is_dir()
    )

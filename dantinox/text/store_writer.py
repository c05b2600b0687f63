"""Writes the tokens of a store. An interrupted build leaves a partial store, which the next one
with equal inputs continues.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dantinox.files import atomic_write
from dantinox.text.conversations import FIRST_TOKEN, Encoded
from dantinox.text.token_store import Counts

TOKENS = ".tokens.partial"
MARKS = ".tokens.partial.marks"
RECORDS = ".tokens.partial.records"
STATE = ".tokens.partial.json"
TOKENIZER = ".tokens.tokenizer.json"  # the tokenizer that was trained for a partial store
SAVE_SECONDS = 10  # seconds between two writes of the state
BLOCK_BYTES = 4 << 20

Inputs = dict[str, Any]  # all that determines the tokens, as JSON


class Written(NamedTuple):
    """The content of a partial store.

    Attributes:
      items: the number of `Encoded` in it.
      sizes: the bytes of the tokens, the marks and the records.
      counts: the `Counts` of the training and the validation part.
      sources: the training tokens of each source.
    """

    items: int
    sizes: Sequence[int]
    counts: Sequence[Sequence[int]]
    sources: Sequence[int]

    def add(self, item: Encoded, data: Sequence[bytes]) -> "Written":
        """Returns the content after an item is written as `data`."""
        counts = [list(numbers) for numbers in self.counts]
        sources = list(self.sources)
        counts[item.part] = [
            number + more for number, more in zip(counts[item.part], item.added, strict=True)
        ]
        sources[item.source] += len(item.ids) if item.part == 0 else 0
        sizes = [size + len(part) for size, part in zip(self.sizes, data, strict=True)]
        return Written(self.items + 1, sizes, counts, sources)


def write_partial(
    encode: Callable[[int], Iterator[Encoded]],
    dtype: str,
    directory: Path,
    inputs: Inputs,
    sources: int,
) -> Written:
    """Writes all tokens, marks and records to a partial store, after those that an interrupted
    build with equal inputs wrote.

    SIGINT and SIGTERM keep the partial store, as does the end of the process. Any other error
    removes it.

    Args:
      encode: maps the number of items to skip to an iterator over the other ones. Equal inputs give
        equal items.
      dtype: the type of the token ids on disk.
      directory: an existing directory.
      inputs: what determines the tokens.
      sources: the number of sources.
    """
    written = _read_state(directory, inputs)
    if written is None:
        remove_partial(directory)
        written = Written(0, (0, 0, 0), ((0,) * len(Counts._fields),) * 2, (0,) * sources)
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(open(directory / name, "ab")) for name in (TOKENS, MARKS, RECORDS)
        ]
        for file, size in zip(files, written.sizes, strict=True):
            file.truncate(size)
        saved = time.monotonic()
        try:
            for item in encode(written.items):
                record = b"" if item.record is None else item.record + b"\n"
                data = (
                    item.ids.astype(dtype).tobytes(),
                    b"" if item.marks is None else item.marks.tobytes(),
                    record,
                )
                for file, part in zip(files, data, strict=True):
                    file.write(part)
                written = written.add(item, data)
                if time.monotonic() - saved >= SAVE_SECONDS:
                    _save_state(directory, files, inputs, written)
                    saved = time.monotonic()
            _save_state(directory, files, inputs, written)
        except (KeyboardInterrupt, SystemExit):
            _save_state(directory, files, inputs, written)
            raise
        except BaseException:
            remove_partial(directory)
            raise
    return written


def remove_partial(directory: Path) -> None:
    """Removes the partial store of a directory, but not the tokenizer trained for it."""
    for path in directory.glob(".tokens*"):
        if path.name != TOKENIZER:
            path.unlink(missing_ok=True)


def has_partial(directory: Path) -> bool:
    """Whether a directory contains something that the next build may continue."""
    return any((directory / name).exists() for name in (STATE, TOKENIZER))


def content_digest(directory: Path, item_size: int) -> str:
    """Returns the SHA-256 (hex) of a complete partial store. The tokens, marks and record of each
    conversation are adjacent.
    """
    digest = hashlib.sha256()
    with open(directory / TOKENS, "rb") as tokens, open(directory / RECORDS, "rb") as records:
        if (directory / MARKS).stat().st_size:  # plain text has no marks
            marks = np.memmap(directory / MARKS, np.uint8, mode="r")
            for start, end in pairwise([*np.flatnonzero(marks & FIRST_TOKEN).tolist(), len(marks)]):
                digest.update(tokens.read((end - start) * item_size))
                digest.update(marks[start:end].tobytes())
                digest.update(records.readline().removesuffix(b"\n"))
        while block := tokens.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _save_state(
    directory: Path, files: Sequence[BinaryIO], inputs: Inputs, written: Written
) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    atomic_write(directory / STATE, json.dumps({"inputs": inputs, "written": written._asdict()}))


def _read_state(directory: Path, inputs: Inputs) -> Written | None:
    """Returns the content of the partial store in a directory if it has these inputs, else None."""
    try:
        state = json.loads((directory / STATE).read_bytes())
        written = Written(**state["written"])
        sizes = [(directory / name).stat().st_size for name in (TOKENS, MARKS, RECORDS)]
        complete = all(size >= wanted for size, wanted in zip(sizes, written.sizes, strict=True))
        return written if complete and state["inputs"] == inputs else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

"""A corpus: documents read in pieces, with errors that name file and line."""

import codecs
import hashlib
import io
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError, quote
from dantinox.text.builtin_recall import FIELD
from dantinox.text.compressed_files import open_decompressed
from dantinox.text.sources import Source, find_sources

BLOCK_BYTES = 4 << 20
RECORD_BYTES = 1 << 28  # a record is held in memory as a whole
# Byte-level BPE (the GPT-2 pattern) begins a new word at a character after a lone line end, and at a lone space: cutting there
# changes no token. A line end that follows or precedes white space would be merged with it.
_SAFE = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_NEAR = 2048


class TextPiece(NamedTuple):
    """A part of document number `document` (counted from 0, documents in order)."""

    document: int
    text: str


class Extent(NamedTuple):
    """What a corpus holds: its SHA-256, and where each document ends, in characters from the start."""

    digest: str
    ends: np.ndarray

    @property
    def characters(self) -> int:
        return int(self.ends[-1])


@dataclass(frozen=True)
class Corpus:
    """Files of documents: a text file is one document, a line of JSON Lines is one."""

    name: str
    sources: tuple[Source, ...]
    text_field: str = "text"

    @classmethod
    def open(cls, paths: str | tuple[str, ...], text_field: str = "text") -> "Corpus":
        """Finds the files; see `find_sources`."""
        return cls(paths if isinstance(paths, str) else ", ".join(paths), find_sources(paths), text_field)

    def digest(self) -> str:
        """SHA-256 over the SHA-256 of each file's (unpacked) content, without looking at the text."""
        total = hashlib.sha256()
        for source, content in self._contents(total):
            for _ in _blocks(source, content):
                pass
        return total.hexdigest()

    def _contents(self, total: Any, expected: str | None = None) -> Iterator[tuple[Source, Any]]:
        """Every file with the SHA-256 that is to be fed its content; `total` gets that of all, which must be as `expected`.

        Whether a file is text or records counts: the same bytes make other documents.
        """
        for source in self.sources:
            content = hashlib.sha256(b"records" if source.records else b"text")
            yield source, content
            total.update(content.digest())
        if expected is not None and total.hexdigest() != expected:
            raise UserError(f"the corpus {self.name} changed while it was read: start again when it is complete")

    def read_text(self, expected: str | None = None) -> Iterator[TextPiece]:
        """All the text, in order; documents without text are left out.

        Raises:
          UserError: something that is not text, or content that no longer has the digest `expected`.
        """
        document = -1
        for source, content in self._contents(hashlib.sha256(), expected):
            empty, field = True, self.text_field if source.content is None else FIELD
            for starts, text in _records(source, field, content) if source.records else _text(source, content):
                empty = False
                document += starts
                yield TextPiece(document, text)
            if empty and source.named:
                raise UserError(f"{source.path} holds no text" if source.records else f"{source.path} is empty")

    def records(self, expected: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every record with the place that it stands at, for messages.

        Raises:
          UserError: a file of text, a line that is no JSON object, or content that no longer has the digest `expected`.
        """
        for source, content in self._contents(hashlib.sha256(), expected):
            if not source.records:
                raise UserError(f"{source.path} is text: conversations are records of JSON Lines (.jsonl)")
            yield from _objects(source, content)

    def scan(self) -> Extent:
        """Reads everything once. Raises a UserError for something that is not text, or no text but white space."""
        digest, sizes, blank = self.digest(), array("q"), True
        for document, text in self.read_text(digest):
            blank = blank and text.isspace()
            if document == len(sizes):
                sizes.append(0)
            sizes[document] += len(text)
        if blank:
            raise UserError(f"the corpus {self.name} holds " + ("nothing but white space" if sizes else "no text"))
        return Extent(digest, np.cumsum(np.asarray(sizes)))


def _blocks(source: Source, content: Any, lines: bool = False) -> Iterator[bytes]:
    """A file by blocks or by lines, which `content` hashes."""
    with open_decompressed(source.path) if source.content is None else io.BytesIO(source.content) as stream:
        while data := stream.readline(RECORD_BYTES + 1) if lines else stream.read(BLOCK_BYTES):
            content.update(data)
            yield data


def _text(source: Source, content: Any) -> Iterator[tuple[bool, str]]:
    """(does a document start here, text) of a text file, in pieces of three blocks at most."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    starts, text, position = True, "", 0
    for block in chain(_blocks(source, content), [b""]):
        if position == 0 and block.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError(f"{source.path} is UTF-16 from byte 0 on, a corpus must be UTF-8: convert it")
        if b"\0" in block:
            raise UserError(f"{source.path} is not text: byte {position + block.index(0)} is NUL")
        begun = len(decoder.getstate()[0])  # bytes of a character that the block before did not complete
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(f"{source.path} is not UTF-8 text: byte {position - begun + error.start} is wrong") from None
        position += len(block)
        if block and len(text) < max(2, BLOCK_BYTES):  # so short a text may hold no good place to cut
            continue
        cut = find_split(text, 0, len(text) - 1) if block else len(text)
        if cut:
            yield starts, text[:cut]
        starts, text = False, text[cut:]


def _objects(source: Source, content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON Lines file and where they stand; blank lines hold none."""
    for number, line in enumerate(_blocks(source, content, lines=True), 1):
        where = f"{source.path}, line {number}"
        if len(line) > RECORD_BYTES:
            raise UserError(f"a record longer than {RECORD_BYTES} bytes ({where})")
        if line.isspace():
            continue
        record = _parse(line, where)
        if not isinstance(record, dict):
            raise UserError(f"a record must be a JSON object, got {quote(record)} ({where})")
        yield where, record


def _records(source: Source, field: str, content: Any) -> Iterator[tuple[bool, str]]:
    """The texts of a JSON Lines file."""
    for where, record in _objects(source, content):
        if field not in record:
            names = quote(", ".join(record)) if record else "no field"
            raise UserError(f"a record without the field {field!r} (data.text_field); it has {names} ({where})")
        text = record[field]
        if not isinstance(text, str):
            raise UserError(f"the field {field!r} must hold text, got {quote(text)} ({where})")
        try:
            text.encode()
            bad = text.find("\0")
        except UnicodeEncodeError as error:  # half of a character
            bad = error.start
        if bad >= 0:
            raise UserError(f"the field {field!r} holds U+{ord(text[bad]):04X} at character {bad}, not text ({where})")
        if text:
            yield True, text


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: byte {error.start} of the line is wrong ({where})") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg} at character {error.colno} ({where})") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"not JSON that can be read: {error} ({where})") from None


def split_text(text: str, size: int) -> Iterator[str]:
    """Parts of at most `size` characters that join to `text`."""
    start = 0
    while len(text) - start > size:
        end = find_split(text, start, start + size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def find_split(text: str, start: int, end: int) -> int:
    """The best place in (start, end] to cut: before a line or a word near the end, else after a line end, else `end`."""
    near = max(start + 1, end - _NEAR)
    lines = words = 0
    for match in _SAFE.finditer(text, near - 1, min(end + 2, len(text))):
        if near <= match.start() <= end:
            words = match.start()
            lines = words if text[words - 1] == "\n" else lines
    return lines or words or text.rfind("\n", start, end) + 1 or end

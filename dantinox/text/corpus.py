"""A corpus: documents read in pieces, exactly as they are written, with one sentence for whatever is wrong in them."""

import codecs
import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dantinox.files import UserError, shown
from dantinox.text.recall import FIELD
from dantinox.text.sources import Source, find_sources

BLOCK_BYTES = 4 << 20
RECORD_BYTES = 1 << 28  # a record is held in memory as a whole
# Byte-level BPE (the GPT-2 pattern) begins a new word at a character after a lone line end, and at a lone space: cutting there
# changes no token. A line end that follows or precedes white space would be merged with it.
_SAFE = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_NEAR = 2048


class Piece(NamedTuple):
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
        for source in self.sources:
            one = _Digest(source)
            for _ in _blocks(source, one):
                pass
            total.update(one.digest())
        return total.hexdigest()

    def pieces(self, expected: str | None = None) -> Iterator[Piece]:
        """All the text, in order; documents without text are left out.

        Raises:
          UserError: something that is not text, or content that no longer has the digest `expected`.
        """
        total = hashlib.sha256()
        document = -1
        for source in self.sources:
            one = _Digest(source)
            empty = True
            field = self.text_field if source.content is None else FIELD
            texts = _records(source, field, one) if source.records else _text(source, one)
            for starts, text in texts:
                empty = False
                document += starts
                yield Piece(document, text)
            if empty and source.named:
                raise UserError(f"{source.path} holds no text" if source.records else f"{source.path} is empty")
            total.update(one.digest())
        if expected is not None and total.hexdigest() != expected:
            raise UserError(f"the corpus {self.name} changed while it was read: start again when it is complete")

    def scan(self) -> Extent:
        """Reads everything once.

        Raises:
          UserError: something that is not text, or no text but white space.
        """
        digest = self.digest()
        sizes = array("q")
        blank = True
        for document, text in self.pieces(digest):
            blank = blank and text.isspace()
            if document == len(sizes):
                sizes.append(0)
            sizes[document] += len(text)
        if blank:
            raise UserError(f"the corpus {self.name} holds " + ("nothing but white space" if sizes else "no text"))
        return Extent(digest, np.cumsum(np.asarray(sizes)))


class _Digest:
    """SHA-256 of a file's content, and whether it is text or records: the same bytes make different documents."""

    def __init__(self, source: Source) -> None:
        self._hash = hashlib.sha256(b"records" if source.records else b"text")
        self.size = 0

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def _open(source: Source) -> BinaryIO:
    if source.content is not None:
        return io.BytesIO(source.content)
    packed = source.path.suffix == ".gz"
    return gzip.open(source.path, "rb") if packed else open(source.path, "rb")  # type: ignore[return-value]


def _blocks(source: Source, digest: _Digest, lines: bool = False) -> Iterator[bytes]:
    """The content of a file by blocks or by lines; what the system or gzip has against it becomes a sentence."""
    try:
        with _open(source) as stream:
            while data := stream.readline(RECORD_BYTES + 1) if lines else stream.read(BLOCK_BYTES):
                digest.add(data)
                yield data
    except EOFError:
        raise UserError(f"{source.path} ends too early: the gzip file is truncated") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{source.path} is not a sound gzip file: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror or error}") from None


def _text(source: Source, digest: _Digest) -> Iterator[tuple[bool, str]]:
    """(does a document start here, text) of a text file, in pieces of less than two blocks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    starts, rest = True, ""
    for block in _blocks(source, digest):
        before = digest.size - len(block)
        _refuse_binary(source, block, before)
        text = rest + _decode(source, decoder, block, before)
        if len(text) < max(2, BLOCK_BYTES):  # a short rest may hold no good place to cut
            rest = text
            continue
        cut = last_cut(text, 0, len(text) - 1)
        yield starts, text[:cut]
        starts, rest = False, text[cut:]
    rest += _decode(source, decoder, b"", digest.size, final=True)
    if rest:
        yield starts, rest


def _decode(source: Source, decoder: codecs.IncrementalDecoder, block: bytes, before: int, final: bool = False) -> str:
    held = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise UserError(f"{source.path} is not UTF-8 text: byte {before - held + error.start} is wrong") from None


def _refuse_binary(source: Source, block: bytes, before: int) -> None:
    if before == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{source.path} is UTF-16 from byte 0 on, a corpus must be UTF-8: convert it")
    zero = block.find(b"\0")
    if zero >= 0:
        raise UserError(f"{source.path} is not text: byte {before + zero} is NUL")


def _records(source: Source, field: str, digest: _Digest) -> Iterator[tuple[bool, str]]:
    """The texts of a JSON Lines file; blank lines hold no record."""
    for number, line in enumerate(_blocks(source, digest, lines=True), 1):
        where = f"{source.path}, line {number}"
        if len(line) > RECORD_BYTES:
            raise UserError(f"a record longer than {RECORD_BYTES} bytes ({where})")
        if line.isspace():
            continue
        record = _parse(line, where)
        if not isinstance(record, dict):
            raise UserError(f"a record must be a JSON object, got {shown(record)} ({where})")
        if field not in record:
            raise UserError(f"a record without the field {field!r} (data.text_field); it has {_fields(record)} ({where})")
        text = record[field]
        if not isinstance(text, str):
            raise UserError(f"the field {field!r} must hold text, got {shown(text)} ({where})")
        bad = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None) if _suspect(text) else None
        if bad is not None:
            raise UserError(f"the field {field!r} holds U+{ord(bad):04X} at character {text.index(bad)}, not text ({where})")
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


def _suspect(text: str) -> bool:
    """Is there a NUL or half a character? Cheap, for every record."""
    try:
        return b"\0" in text.encode()
    except UnicodeEncodeError:
        return True


def _fields(record: dict[str, Any]) -> str:
    names = [repr(name) for name in record]
    return ", ".join(names[:8]) + ("" if len(names) <= 8 else ", …") if names else "no field"


def cut_up(text: str, size: int) -> Iterator[str]:
    """Parts of at most `size` characters that join to `text`."""
    start = 0
    while len(text) - start > size:
        end = last_cut(text, start, start + size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def last_cut(text: str, start: int, end: int) -> int:
    """The best place in (start, end] to cut: before a line or a word near the end, else after a line end, else `end`."""
    near = max(start + 1, end - _NEAR)
    lines = words = 0
    for match in _SAFE.finditer(text, near - 1, min(end + 2, len(text))):
        if near <= match.start() <= end:
            words = match.start()
            lines = words if text[words - 1] == "\n" else lines
    return lines or words or text.rfind("\n", start, end) + 1 or end

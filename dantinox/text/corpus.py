"""A corpus: documents that are read in parts. Error messages name the file and the line or byte."""

import codecs
import hashlib
import io
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError, quote
from dantinox.text.builtin_recall import FIELD
from dantinox.text.compressed_files import open_decompressed
from dantinox.text.corpus_files import CorpusFile, find_corpus_files, warn_skipped

BLOCK_BYTES = 4 << 20
RECORD_BYTES = 1 << 28  # a record is read into memory as a whole
# Byte-level BPE with the GPT-2 pattern starts a new word after a single line break and at a single
# space, so a split at these points changes no token. If a line break is next to other white space,
# the pattern merges them, so a split is not safe.
_SAFE_SPLIT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
_SPLIT_RANGE = 2048
_JSON = json.JSONDecoder()
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class TextPiece(NamedTuple):
    """A part of a document; `document` is the index of the document, from 0."""

    document: int
    text: str


class Extent(NamedTuple):
    """The SHA-256 of a corpus, and the end of each document in characters from the start of the
    corpus.
    """

    digest: str
    ends: np.ndarray

    @property
    def characters(self) -> int:
        return int(self.ends[-1])


@dataclass(frozen=True)
class Corpus:
    """Files of documents: a text file is one document, and so is each record of JSON Lines.

    Attributes:
      name: its name in error messages.
      files: the files.
      text_field: the field of a record that holds the text.
    """

    name: str
    files: tuple[CorpusFile, ...]
    text_field: str = "text"

    @classmethod
    def open(
        cls, paths: str | tuple[str, ...], text_field: str = "text", skip_bad: bool = False
    ) -> "Corpus":
        """Finds the files of a corpus; see `find_corpus_files`."""
        return cls(
            paths if isinstance(paths, str) else ", ".join(paths),
            find_corpus_files(paths, skip_bad),
            text_field,
        )

    def without_bad_files(self, as_records: bool) -> "Corpus":
        """Returns the corpus without the files that cannot be read. A warning names each of them,
        with the reason.

        Args:
          as_records: whether the corpus is read by `records` instead of `read_text`.

        Raises:
          UserError: no file can be read.
        """
        good = []
        first = None
        for file in self.files:
            alone = replace(self, files=(file,))
            try:
                for _ in alone.records() if as_records else alone.read_text():
                    pass
                good.append(file)
            except UserError as error:
                warn_skipped(error)
                first = first or error
        if not good:
            raise UserError(f"no file of the corpus {self.name} can be read: {first}")
        return replace(self, files=tuple(good))

    def digest(self) -> str:
        """Returns the SHA-256 (hex) over the SHA-256 digests of all files, decompressed but not
        decoded.
        """
        total = hashlib.sha256()
        for file, content in self._contents(total):
            for _ in _blocks(file, content):
                pass
        return total.hexdigest()

    def count_records(self) -> tuple[str, int]:
        """Returns the digest and the number of records; see `records`."""
        total = hashlib.sha256()
        count = sum(1 for _ in self._read_records(total))
        return total.hexdigest(), count

    def _contents(
        self, total: Any, expected: str | None = None
    ) -> Iterator[tuple[CorpusFile, Any]]:
        """Yields every file with a hash object. The caller updates the hash object with the content
        of the file.

        The file type is hashed too, because the same bytes form different documents as text and as
        records.

        Args:
          total: a hash object (SHA-256) that is updated with the digest of each file.
          expected: the hex digest that `total` must have at the end.
        """
        for file in self.files:
            content = hashlib.sha256(b"records" if file.records else b"text")
            yield file, content
            total.update(content.digest())
        if expected is not None and total.hexdigest() != expected:
            raise UserError(
                f"the corpus {self.name} changed while it was read: start again once it is complete"
            )

    def read_text(self, expected: str | None = None, total: Any = None) -> Iterator[TextPiece]:
        """Yields all text in order; documents without text are omitted.

        Args:
          expected: the digest that the corpus must have.
          total: a hash object that is updated as in `digest`.

        Raises:
          UserError: a file is not text, a record is invalid, or the digest of the content is not
            `expected`.
        """
        document = -1
        for file, content in self._contents(total or hashlib.sha256(), expected):
            empty = True
            field = self.text_field if file.content is None else FIELD
            parts = _records(file, field, content) if file.records else _text(file, content)
            for starts, text in parts:
                empty = False
                document += starts
                yield TextPiece(document, text)
            if empty and file.named:
                raise UserError(
                    f"{file.path} holds no text" if file.records else f"{file.path} is empty"
                )

    def records(self, expected: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (file and line, record) of every record of JSON Lines.

        Raises:
          UserError: a file is plain text, a line is not a JSON object, or the digest of the content
            is not `expected`.
        """
        return self._read_records(hashlib.sha256(), expected)

    def _read_records(
        self, total: Any, expected: str | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the result of `records`; the arguments are those of `read_text`."""
        for file, content in self._contents(total, expected):
            if not file.records:
                raise UserError(
                    f"{file.path} is plain text: conversations must"
                    " be records of JSON Lines (.jsonl)"
                )
            for number, record in _objects(file, content):
                yield _where(file, number), record

    def scan(self) -> Extent:
        """Reads the whole corpus and returns its digest and document ends.

        Raises:
          UserError: a file is not text, a record is invalid, or the corpus has no text other than
            white space.
        """
        total = hashlib.sha256()
        sizes = array("q")
        blank = True
        for document, text in self.read_text(total=total):
            blank = blank and text.isspace()
            if document == len(sizes):
                sizes.append(0)
            sizes[document] += len(text)
        if blank:
            raise UserError(
                f"the corpus {self.name} holds " + ("only white space" if sizes else "no text")
            )
        return Extent(total.hexdigest(), np.cumsum(np.asarray(sizes)))


def _blocks(file: CorpusFile, content: Any, lines: bool = False) -> Iterator[bytes]:
    """Yields a file in blocks or lines, and updates the hash `content` with them."""
    first = True
    with (
        open_decompressed(file.path) if file.content is None else io.BytesIO(file.content)
    ) as stream:
        while data := stream.readline(RECORD_BYTES + 1) if lines else stream.read(BLOCK_BYTES):
            if first:
                _check_encoding(file, data)
                first = False
            content.update(data)
            yield data


def _check_encoding(file: CorpusFile, data: bytes) -> None:
    """Raises UserError if the first bytes of a file are the byte order mark of another encoding
    than UTF-8.
    """
    found = next(
        (encoding for mark, encoding in BYTE_ORDER_MARKS.items() if data.startswith(mark)), None
    )
    if found is not None:
        raise UserError(
            f"{file.path} is {found} (byte order mark at byte 0), but"
            " a corpus must be UTF-8: convert it"
        )


def _text(file: CorpusFile, content: Any) -> Iterator[tuple[bool, str]]:
    """Yields the parts of a text file, at most three blocks each, as pairs (whether the part starts
    a document, text).

    A byte order mark at the start of the file is not a part of the text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    starts = True  # whether the next part starts the document
    text = ""
    position = 0  # bytes before the current block
    may_have_mark = True
    for block in chain(_blocks(file, content), [b""]):
        if b"\0" in block:
            raise UserError(f"{file.path} is not text: byte {position + block.index(0)} is NUL")
        # The bytes of an incomplete character at the end of the previous block.
        pending = len(decoder.getstate()[0])
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file.path} is not UTF-8 text: byte {position - pending + error.start} is invalid"
            ) from None
        position += len(block)
        if may_have_mark and text:
            text = text.removeprefix("\ufeff")
            may_have_mark = False
        # Read on, because a short text may have no good split point.
        if block and len(text) < max(2, BLOCK_BYTES):
            continue
        end = find_split(text, 0, len(text) - 1) if block else len(text)
        if end:
            yield starts, text[:end]
        starts = False
        text = text[end:]


def _where(file: CorpusFile, number: int) -> str:
    return f"{file.path}, line {number}"


def _objects(file: CorpusFile, content: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) of a JSON Lines file; blank lines are skipped."""
    for number, line in enumerate(_blocks(file, content, lines=True), 1):
        if len(line) > RECORD_BYTES:
            raise UserError(
                f"a record is longer than {RECORD_BYTES} bytes ({_where(file, number)})"
            )
        if line.isspace():
            continue
        try:
            record = _parse(line)
            if not isinstance(record, dict):
                raise UserError(f"a record must be a JSON object, got {quote(record)}")
        except UserError as error:
            raise UserError(f"{error} ({_where(file, number)})") from None
        yield number, record


def _records(file: CorpusFile, field: str, content: Any) -> Iterator[tuple[bool, str]]:
    """Yields (True, text) for every record of a JSON Lines file that is not empty."""
    for number, record in _objects(file, content):
        text = record.get(field)
        if isinstance(text, str) and text.isascii() and "\0" not in text:
            if text:
                yield True, text
            continue
        where = _where(file, number)
        if field not in record:
            names = quote(", ".join(record)) if record else "no field"
            raise UserError(
                f"a record lacks the field {field!r} (data.text_field); it has {names} ({where})"
            )
        if not isinstance(text, str):
            raise UserError(f"the field {field!r} must be text, got {quote(text)} ({where})")
        try:
            text.encode()
            bad = text.find("\0")
        except UnicodeEncodeError as error:  # a lone surrogate
            bad = error.start
        if bad >= 0:
            raise UserError(
                f"the field {field!r} holds U+{ord(text[bad]):04X} at character {bad}, not text"
                f" ({where})"
            )
        yield True, text


def _parse(line: bytes) -> Any:
    """Returns the JSON value of a line; a UserError says what is wrong with it."""
    try:
        text = line.decode("utf-8-sig" if line.startswith(codecs.BOM_UTF8) else "utf-8")
        if text[:1] == "{":  # faster than `loads`
            value, end = _JSON.raw_decode(text)
            if text[end:] in ("\n", "", "\r\n"):
                return value
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: byte {error.start} of the line is invalid") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg} at character {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"not JSON: {error}") from None


def split_text(text: str, size: int) -> Iterator[str]:
    """Splits a text into parts of at most `size` characters, preferably at line or word
    boundaries.
    """
    start = 0
    while len(text) - start > size:
        end = find_split(text, start, start + size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def find_split(text: str, start: int, end: int) -> int:
    """Returns the best split point in (start, end]: before a line or word near the end, else after
    a line break, else `end`.
    """
    near = max(start + 1, end - _SPLIT_RANGE)
    lines = words = 0
    for match in _SAFE_SPLIT.finditer(text, near - 1, min(end + 2, len(text))):
        if near <= match.start() <= end:
            words = match.start()
            lines = words if text[words - 1] == "\n" else lines
    return lines or words or text.rfind("\n", start, end) + 1 or end

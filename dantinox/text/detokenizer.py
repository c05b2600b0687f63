"""Streaming detokenization: tokens in, text out as soon as it is certain."""

import codecs
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer as Core

from dantinox.text.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer(Protocol):
    """Turns token ids into text as they come.

    Made by `Tokenizer.detokenizer`. Everything pushed and flushed is exactly `Tokenizer.decode` of all the ids. A character is
    emitted when its last byte has come, never in halves; the cost of a token does not depend on how many came before. Special
    tokens spell nothing.
    """

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain once `ids` (a list or a 1-D array) have come; ids outside the vocabulary spell nothing."""

    def flush(self) -> str:
        """The rest, at the end of the text; a torn character becomes U+FFFD. The next push starts a new text."""


class TableDetokenizer:
    """For vocabularies whose every token spells fixed bytes."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._first, self._inner = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = self._first is self._inner

    def push(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < len(self._inner)]
        start: list[bytes] = []
        while known and not self._started:
            head = known.pop(0)
            start.append(self._first[head])
            self._started = self._inner[head] != b""  # special tokens leave the text unbegun
        return self._utf8.decode(b"".join(start) + b"".join([self._inner[i] for i in known]))

    def flush(self) -> str:
        self._started = self._first is self._inner
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders that look at neighbours: decodes a short window twice, with and without the newest token.

    Source: the two-offset scheme of text-generation-inference and vLLM (`detokenize_incrementally`).
    """

    def __init__(self, core: Core, special_ids: frozenset[int]) -> None:
        self._core, self._specials = core, special_ids
        self._window: list[int] = []
        self._kept = 0  # leading ids of the window whose text is out
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._next(i) for i in ids if i not in self._specials and self._core.id_to_token(i) is not None])

    def _next(self, token: int) -> str:
        self._window.append(token)
        text = self._core.decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._kept < LONGEST_CHARACTER:
            return ""
        piece = text[len(self._shown) :]
        self._window = self._window[self._kept :]
        self._kept, self._shown = len(self._window), self._core.decode(self._window)
        return piece

    def flush(self) -> str:
        piece = self._core.decode(self._window)[len(self._shown) :]
        self._window, self._kept, self._shown = [], 0, ""
        return piece

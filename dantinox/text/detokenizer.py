"""Streaming detokenization: returns text as soon as later tokens cannot change it."""

import codecs
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer as Core

from dantinox.text.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer(Protocol):
    """Decodes a stream of token ids incrementally; created by `Tokenizer.detokenizer`.

    The concatenation of all pushed and flushed text equals `Tokenizer.decode` of all ids. A character is returned once all of
    its bytes are known. The cost of a token does not depend on the number of earlier tokens. Special tokens have no text.
    """

    def push(self, ids: Iterable[int]) -> str:
        """Appends `ids` (a list or a 1-D array) and returns the new text that is final.

        Ids outside the vocabulary have no text.
        """

    def flush(self) -> str:
        """Returns the remaining text; an incomplete UTF-8 sequence becomes U+FFFD. The next push starts a new text."""


class TableDetokenizer:
    """For vocabularies in which every token stands for fixed bytes."""

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
            self._started = self._inner[head] != b""  # a special token does not start the text
        return self._utf8.decode(b"".join(start) + b"".join([self._inner[i] for i in known]))

    def flush(self) -> str:
        self._started = self._first is self._inner
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders that depend on adjacent tokens: decodes a short window with and without the newest token.

    Source: the two-offset scheme of text-generation-inference and vLLM (`detokenize_incrementally`).
    """

    def __init__(self, core: Core, special_ids: frozenset[int]) -> None:
        self._core, self._specials = core, special_ids
        self._window: list[int] = []
        self._emitted = 0  # leading ids of the window whose text was returned
        self._emitted_text = ""

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._next(i) for i in ids if i not in self._specials and self._core.id_to_token(i) is not None])

    def _next(self, token: int) -> str:
        self._window.append(token)
        text = self._core.decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._emitted < LONGEST_CHARACTER:
            return ""
        piece = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted, self._emitted_text = len(self._window), self._core.decode(self._window)
        return piece

    def flush(self) -> str:
        piece = self._core.decode(self._window)[len(self._emitted_text) :]
        self._window, self._emitted, self._emitted_text = [], 0, ""
        return piece

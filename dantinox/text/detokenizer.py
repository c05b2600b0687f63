"""Streaming detokenization: returns text as soon as later tokens cannot change it."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Protocol

from tokenizers import Tokenizer as Core

from dantinox.text.token_pieces import TokenPieces

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer(Protocol):
    """Decodes a stream of token ids incrementally; created by `Tokenizer.detokenizer`.

    The concatenated results of `push` and `flush` equal `Tokenizer.decode` of all ids. A character
    is returned once all of its bytes are known. The cost of a token does not depend on the number
    of earlier tokens. Special tokens have no text.
    """

    def push(self, ids: Iterable[int]) -> str:
        """Appends `ids` (a list or a 1-D array) and returns the new text that later ids cannot
        change.

        Ids outside the vocabulary have no text.
        """

    def flush(self) -> str:
        """Returns the remaining text; an incomplete UTF-8 sequence becomes U+FFFD. The next push
        starts a new text.
        """


class TableDetokenizer:
    """A detokenizer for vocabularies in which every token stands for fixed bytes."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._first, self._inner = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = self._first is self._inner

    def push(self, ids: Iterable[int]) -> str:
        valid_ids = [i for i in ids if 0 <= i < len(self._inner)]
        start: list[bytes] = []
        while valid_ids and not self._started:
            first_id = valid_ids.pop(0)
            start.append(self._first[first_id])
            # A token without bytes, such as a special token, does not start the text.
            self._started = self._inner[first_id] != b""
        return self._utf8.decode(b"".join(start) + b"".join([self._inner[i] for i in valid_ids]))

    def flush(self) -> str:
        self._started = self._first is self._inner
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for decoders that depend on adjacent tokens.

    It decodes a short window of tokens with and without the newest token. The difference is the new
    text.

    Source: the two-offset scheme of text-generation-inference and vLLM
    (`detokenize_incrementally`).
    """

    def __init__(self, core: Core, special_ids: frozenset[int], names: Mapping[int, str]) -> None:
        """`names` has the visible special tokens."""
        self._core = core
        self._specials = special_ids
        self._names = names
        self._window: list[int] = []
        # The number of ids at the start of the window; their text was already returned.
        self._emitted = 0
        self._emitted_text = ""

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._next(i) for i in ids if self._core.id_to_token(i) is not None])

    def _next(self, token: int) -> str:
        if token in self._specials:
            return self.flush() + self._names[token] if token in self._names else ""
        self._window.append(token)
        text = self._core.decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._emitted < LONGEST_CHARACTER:
            return ""
        piece = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._core.decode(self._window)
        return piece

    def flush(self) -> str:
        piece = self._core.decode(self._window)[len(self._emitted_text) :]
        self._window = []
        self._emitted = 0
        self._emitted_text = ""
        return piece

"""Bans of strings and of regular expressions, with backtracking.

A ban holds for the text, whatever its tokens. When a banned text is complete, generation returns to the token in which it
begins, excludes this token there, and continues with the same random numbers. The method is that of the phrase bans of
KoboldCpp and of the AntiSlop sampler (github.com/sam-paech/antislop-sampler).
"""

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.files import quote, require_extra
from dantinox.generation.guides import Verdict, exclude_tokens

if TYPE_CHECKING:
    from regex import Pattern

MAX_HELD_TOKENS = 128  # a banned text of more tokens is not found
MAX_HELD_CHARACTERS = 2048  # likewise for characters
CONTEXT_CHARACTERS = 64  # text before the held text that a regular expression may look back at
REGEX_SECONDS = 0.1  # limit of one search
RESTARTS_PER_TOKEN = 8  # the sample ends after this multiple of its tokens in restarts


class BannedStrings:
    """The strings that must not occur in a text, in lower case, with all of their beginnings."""

    def __init__(self, strings: Sequence[str]):
        self.strings = frozenset(map(lower, strings))
        self.beginnings = frozenset(text[:end] for text in self.strings for end in range(1, len(text)))


def lower(text: str) -> str:
    """Returns a text in lower case, of the same length: a character with a longer lower case stays."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


def compile_regexes(sources: Sequence[str]) -> list["Pattern[str]"]:
    """Compiles banned regular expressions.

    Raises:
      UserError: an expression is invalid or matches the empty text, or the library `regex` is not installed.
    """
    if not sources:
        return []
    with require_extra("serve", "banned_regexes need a library that is not installed"):
        import regex
    patterns = []
    for source in sources:
        key = "generation.banned_regexes"
        try:
            pattern = regex.compile(source)
            matches_nothing = pattern.search("", timeout=REGEX_SECONDS) is not None
        except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
            raise UserError(f"{key} has the invalid expression {quote(source)}: {error}", key=key) from None
        if matches_nothing:
            raise UserError(f"{key} has the expression {quote(source)}, which matches the empty text", key=key)
        patterns.append(pattern)
    return patterns


class _Held(NamedTuple):
    """A held token: its text, and the state before it.

    Attributes:
      starts: where the strings that might become banned begin in the held text.
      first: the first position at which a string or a match of an expression might begin.
    """

    token: int
    text: str
    starts: list[int]
    first: int

    def moved(self, size: int) -> "_Held":
        """Returns the token after the first `size` characters of the held text were released."""
        return self._replace(starts=[start - size for start in self.starts], first=self.first - size)


class TextBan:
    """Discards the tokens of banned texts. Tokens that may be the beginning of one are held back.

    Attributes:
      held: how many of the last tokens may still be discarded.
      done: whether the sample ends because almost every token that may come next completes a banned text.
    """

    def __init__(self, strings: BannedStrings, regexes: Sequence["Pattern[str]"], vocab_size: int, limit: int):
        """`limit` is the most tokens of the sample."""
        self._strings, self._regexes, self._vocab_size = strings, regexes, vocab_size
        self._context = ""  # text before the held text
        self._tokens: list[_Held] = []
        self._starts: list[int] = []  # as in `_Held`, after the held text
        self._first = 0
        self._position = 0  # of the next token
        self._excluded: dict[int, set[int]] = {}  # position → tokens that must not come there
        self._restarts, self._max_restarts = 0, RESTARTS_PER_TOKEN * (limit + 16)
        self.done = False

    @property
    def held(self) -> int:
        return len(self._tokens)

    def copy(self) -> "TextBan":
        copied = copy.copy(self)
        copied._tokens, copied._starts = [*self._tokens], [*self._starts]
        copied._excluded = {position: set(tokens) for position, tokens in self._excluded.items()}
        return copied

    def mask(self) -> np.ndarray | None:
        excluded = self._excluded.get(self._position)
        return exclude_tokens(excluded, self._vocab_size) if excluded else None

    def push(self, token: int, text: str) -> Verdict:
        before = "".join(held.text for held in self._tokens)
        self._tokens.append(_Held(token, text, self._starts, self._first))
        self._position += 1
        window = before + text
        start = self._match_strings(lower(window), len(before))
        if self._regexes and text:
            start = min((at for at in (start, self._match_regexes(window)) if at is not None), default=None)
        if start is not None:
            return self._discard(start)
        self._first = min(self._starts, default=len(window))
        if self._regexes:
            self._first = min(self._first, self._partial_start(window))
        self._release(window)
        return None

    def _match_strings(self, window: str, before: int) -> int | None:
        """Advances over the held text from `before` on; returns where a banned string begins in it, or None."""
        for end in range(before + 1, len(window) + 1):
            starts = []
            for start in (*self._starts, end - 1):
                part = window[start:end]
                if part in self._strings.strings:
                    return start
                if part in self._strings.beginnings:
                    starts.append(start)
            self._starts = starts
        return None

    def _match_regexes(self, window: str) -> int | None:
        """Returns where the first match begins in the held text, or None."""
        text, offset = self._context + window, len(self._context)
        starts = []
        for pattern in self._regexes:
            try:
                found = pattern.search(text, pos=offset, timeout=REGEX_SECONDS)
            except TimeoutError:
                raise UserError(f"the banned expression {quote(pattern.pattern)} takes too long to evaluate") from None
            if found is not None and found.end() > found.start():
                starts.append(found.start() - offset)
        return min(starts, default=None)

    def _partial_start(self, window: str) -> int:
        """Returns the first position of the held text at which a regular expression may still match."""
        text, offset, first = self._context + window, len(self._context), len(window)
        for pattern in self._regexes:
            try:
                found = pattern.search(text, pos=offset, partial=True, timeout=REGEX_SECONDS)
            except TimeoutError:
                raise UserError(f"the banned expression {quote(pattern.pattern)} takes too long to evaluate") from None
            if found is not None:
                first = min(first, found.start() - offset)
        return first

    def _discard(self, start: int) -> int:
        """Discards the tokens from the one that contains a position of the held text on, and excludes the first of them."""
        ends = [*itertools.accumulate(len(held.text) for held in self._tokens)]
        place = next(place for place, end in enumerate(ends) if end > start)
        while place and not self._tokens[place - 1].text:  # a token without text may be a part of the next character
            place -= 1
        count, first = len(self._tokens) - place, self._tokens[place]
        self._starts, self._first = first.starts, first.first
        self._tokens = self._tokens[:place]
        self._position -= count
        self._excluded = {at: tokens for at, tokens in self._excluded.items() if at <= self._position}
        self._excluded.setdefault(self._position, set()).add(first.token)
        self._restarts += 1
        self.done = self._restarts > self._max_restarts
        return count

    def _release(self, window: str) -> None:
        """Releases the tokens that no longer can be discarded.

        A token is held if a banned text might begin in it, now or after the tokens behind it were discarded.
        """
        first, start, held = max(self._first, len(window) - MAX_HELD_CHARACTERS), len(window), 0
        for token in reversed(self._tokens):
            if (start <= first and token.text) or held == MAX_HELD_TOKENS:
                break
            start -= len(token.text)
            first, held = min(first, start, token.first), held + 1
        self._context = (self._context + window[:start])[-CONTEXT_CHARACTERS:]
        self._tokens = [token.moved(start) for token in self._tokens[len(self._tokens) - held :]]
        self._starts = [at - start for at in self._starts if at >= start]
        self._first = max(0, self._first - start)
        self._excluded = {at: tokens for at, tokens in self._excluded.items() if at >= self._position - held}

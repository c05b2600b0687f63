"""Bans of strings and of regular expressions, with backtracking.

A ban holds for the text, whatever its tokens. When a banned text is complete, generation returns to
the token in which it begins, excludes this token there, and continues with the same random numbers.
The method is that of the phrase bans of KoboldCpp and of the AntiSlop sampler
(github.com/sam-paech/antislop-sampler).
"""

import copy
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.files import quote, require_extra
from dantinox.generation.guides.guide import Verdict
from dantinox.generation.guides.token_masks import mask_without

if TYPE_CHECKING:
    from regex import Pattern

MAX_HELD_TOKENS = 128  # a banned text of more tokens is not found
MAX_HELD_CHARACTERS = 2048  # likewise for characters
CONTEXT_CHARACTERS = 64  # text before the held text that a regular expression may look back at
REGEX_SECONDS = 0.1  # limit of one search
MAX_TRANSITIONS = 1 << 14  # the most transitions of an automaton that are kept
RESTARTS_PER_TOKEN = 8  # the sample ends after this multiple of its tokens in restarts


class BannedStrings:
    """The strings that must not occur in a text, in lower case.

    The search is an Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest suffix
    of the text that is a proper prefix of a banned string. The transitions are computed when a text
    needs them, so that a long list costs nothing in advance.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = frozenset(map(lower, strings))
        self._sorted = sorted(self._strings)
        self._transitions: dict[tuple[str, str], tuple[str, int]] = {}

    def advance(self, partial: str, character: str) -> tuple[str, int]:
        """Returns the state after a character in lower case, and the length of the longest banned
        string that ends with it.

        The length is 0 if no string ends there.
        """
        found = self._transitions.get((partial, character))
        if found is None:
            if len(self._transitions) >= MAX_TRANSITIONS:
                self._transitions.clear()
            text = partial + character
            matched = next(
                (len(text) - at for at in range(len(text)) if text[at:] in self._strings), 0
            )
            found = self._transitions[partial, character] = self.longest_prefix(text), matched
        return found

    def longest_prefix(self, text: str) -> str:
        """Returns the longest suffix of a text that is a proper prefix of a banned string."""
        return next((text[at:] for at in range(len(text)) if self._is_proper_prefix(text[at:])), "")

    def _is_proper_prefix(self, part: str) -> bool:
        # The strings that begin with `part` and are longer follow it directly.
        after = bisect_right(self._sorted, part)
        return after < len(self._sorted) and self._sorted[after].startswith(part)


@lru_cache(maxsize=8)
def find_banned_strings(strings: tuple[str, ...]) -> BannedStrings:
    """Returns the automaton for a list of strings; requests with equal lists share one."""
    return BannedStrings(strings)


def lower(text: str) -> str:
    """Returns a text in lower case, of the same length: a character with a longer lower case stays.

    The lower case of a character does not depend on its neighbors: the Greek letter sigma has one
    form.
    """
    lowered = text.lower()
    if len(lowered) != len(text):
        lowered = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    return lowered.replace("\u03c2", "\u03c3")


def compile_regexes(sources: Sequence[str]) -> list["Pattern[str]"]:
    """Compiles banned regular expressions.

    Raises:
      UserError: an expression is invalid or matches the empty text, or the library `regex` is not
        installed.
    """
    with require_extra("serve", "banned_regexes need a library that is not installed"):
        import regex
    patterns = []
    for source in sources:
        key = "generation.banned_regexes"
        try:
            pattern = regex.compile(source)
            matches_nothing = pattern.search("", timeout=REGEX_SECONDS) is not None
        except (regex.error, RecursionError, OverflowError, TimeoutError) as error:
            raise UserError(
                f"{key} has the invalid expression {quote(source)}: {error}", key=key
            ) from None
        if matches_nothing:
            raise UserError(
                f"{key} has the expression {quote(source)}, which matches the empty text", key=key
            )
        patterns.append(pattern)
    return patterns


class _Held(NamedTuple):
    """A held token: its text, and the state before it.

    Attributes:
      partial: the longest suffix of the held text that is a proper prefix of a banned string.
      first: the first position, from the beginning of the text, at which a string or a match of an
        expression might begin.
    """

    token: int
    text: str
    partial: str
    first: int


class TextBan:
    """Discards the tokens of banned texts. Tokens that may be the beginning of one are held back.

    Attributes:
      held: how many of the last tokens may still be discarded.
      done: whether the sample ends because almost every token that may come next completes a banned
        text.
    """

    def __init__(
        self, strings: BannedStrings, regexes: Sequence["Pattern[str]"], vocab_size: int, limit: int
    ):
        """`limit` is the most tokens of the sample."""
        self._strings = strings
        self._regexes = regexes
        self._vocab_size = vocab_size
        self._context = ""  # text before the held text
        self._tokens: list[_Held] = []
        self._window = ""  # the held text
        self._offset = 0  # its position from the beginning of the text
        self._partial = ""  # as in `_Held`, after the held text
        self._first = 0
        self._position = 0  # of the next token
        self._excluded: dict[int, set[int]] = {}  # position → tokens that must not come there
        self._restarts = 0
        self._max_restarts = RESTARTS_PER_TOKEN * (limit + 16)
        self.done = False

    @property
    def held(self) -> int:
        return len(self._tokens)

    def copy(self) -> "TextBan":
        copied = copy.copy(self)
        copied._tokens = [*self._tokens]
        copied._excluded = {position: set(tokens) for position, tokens in self._excluded.items()}
        return copied

    def mask(self) -> np.ndarray | None:
        excluded = self._excluded.get(self._position)
        return mask_without(excluded, self._vocab_size) if excluded else None

    def push(self, token: int, text: str) -> Verdict:
        self._tokens.append(_Held(token, text, self._partial, self._first))
        self._position += 1
        window = self._window + text
        starts = [self._match_strings(text)]
        if self._regexes and text:
            starts.append(self._match_regexes(window))
        found = [start for start in starts if start is not None]
        if found:
            return self._discard(min(found))
        self._first = self._offset + len(window) - len(self._partial)
        if self._regexes:
            self._first = min(self._first, self._offset + self._partial_start(window))
        self._release(window)
        return None

    def _match_strings(self, text: str) -> int | None:
        """Advances over new text; returns where the first banned string to end begins in the held
        text, or None.
        """
        partial = self._partial
        for end, character in enumerate(lower(text), len(self._window) + 1):
            partial, matched = self._strings.advance(partial, character)
            if matched:
                return end - matched
        self._partial = partial
        return None

    def _match_regexes(self, window: str) -> int | None:
        """Returns where the first match begins in the held text, or None."""
        spans = self._search(window, partial=False)
        return min((start for start, end in spans if end > start), default=None)

    def _partial_start(self, window: str) -> int:
        """Returns the first position of the held text at which a regular expression may still
        match.
        """
        return min((start for start, _ in self._search(window, partial=True)), default=len(window))

    def _search(self, window: str, partial: bool) -> list[tuple[int, int]]:
        """Returns begin and end of the first match of each expression in the held text.

        Args:
          partial: whether a match may also begin at the end of the text and continue after it.
        """
        offset = len(self._context)
        spans = []
        for pattern in self._regexes:
            try:
                found = pattern.search(
                    self._context + window, pos=offset, partial=partial, timeout=REGEX_SECONDS
                )
            except TimeoutError:
                raise UserError(
                    f"the banned expression {quote(pattern.pattern)} takes too long to evaluate"
                ) from None
            if found is not None:
                spans.append((found.start() - offset, found.end() - offset))
        return spans

    def _discard(self, start: int) -> int:
        """Discards the tokens from the one that contains a position of the held text on, and
        excludes the first of them.
        """
        ends = [*itertools.accumulate(len(held.text) for held in self._tokens)]
        place = next(place for place, end in enumerate(ends) if end > start)
        # A token without text may be a part of the next character.
        while place and not self._tokens[place - 1].text:
            place -= 1
        count = len(self._tokens) - place
        first = self._tokens[place]
        self._tokens = self._tokens[:place]
        self._window = "".join(held.text for held in self._tokens)
        self._partial = self._fitting(first.partial)
        self._first = first.first
        self._position -= count
        self._excluded = {
            at: tokens for at, tokens in self._excluded.items() if at <= self._position
        }
        self._excluded.setdefault(self._position, set()).add(first.token)
        self._restarts += 1
        self.done = self._restarts > self._max_restarts
        return count

    def _fitting(self, partial: str) -> str:
        """Returns the longest suffix of `partial` that fits in the held text and begins a banned
        string.
        """
        size = len(self._window)
        if len(partial) <= size:
            return partial
        return self._strings.longest_prefix(partial[len(partial) - size :])

    def _release(self, window: str) -> None:
        """Releases the tokens that no longer can be discarded.

        A token is held if a banned text might begin in it, now or after the tokens behind it were
        discarded.
        """
        start = self._offset + len(window)
        held = 0
        first = max(self._first, start - MAX_HELD_CHARACTERS)
        for token in reversed(self._tokens):
            if (start <= first and token.text) or held == MAX_HELD_TOKENS:
                break
            start -= len(token.text)
            first = min(first, start, token.first)
            held += 1
        if start > self._offset:
            self._context = (self._context + window[: start - self._offset])[-CONTEXT_CHARACTERS:]
        self._window = window[start - self._offset :]
        self._offset = start
        del self._tokens[: len(self._tokens) - held]
        self._partial = self._fitting(self._partial)
        self._first = max(start, self._first)
        self._excluded = {
            at: tokens for at, tokens in self._excluded.items() if at >= self._position - held
        }

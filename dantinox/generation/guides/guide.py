"""Guides: objects that restrict the tokens of one sample on the host while it is generated, and the
limits of its reasoning.

A guide sees each token with its text. It may restrict the next token, and it may discard tokens:
decoding runs in chunks, so a guide often learns in the middle of a chunk that the tokens after a
point should have been restricted. The engine then restarts the sample from the last kept token
(`RunningBatch.restart`), with the same random numbers for each position.
"""

import copy
from typing import NamedTuple, Protocol

import numpy as np

from dantinox.generation.guides.constraints import Constraint, Matcher
from dantinox.generation.guides.token_masks import mask_of, mask_without
from dantinox.text.partial_markers import overlap


class Reasoning(NamedTuple):
    """The reasoning in the texts of a request.

    Attributes:
      begin, end: the texts around it.
      is_open: whether the text begins inside the reasoning.
      budget: the most tokens of it; None: no limit.
      closing: the tokens that end it when the budget is used up.
    """

    begin: str
    end: str
    is_open: bool
    budget: int | None = None
    closing: tuple[int, ...] = ()


class Gap(NamedTuple):
    """Text that may stand between the end of the reasoning and a constrained answer: the end of
    `Reasoning.closing`.

    Attributes:
      text: the text that is left of it.
      ids: the tokens of it, with their texts.
    """

    text: str
    ids: tuple[tuple[int, str], ...]

    @property
    def next_ids(self) -> list[int]:
        """The tokens that may come next."""
        return [token for token, text in self.ids if self.text and self.text.startswith(text)]

    def after(self, text: str) -> "Gap":
        """Returns what is left of the gap after a text."""
        return self._replace(text=self.text.removeprefix(text))

    def split(self, text: str) -> "tuple[str, Gap]":
        """Returns the part of a text that comes after the gap, and what is left of the gap."""
        if self.text.startswith(text):
            return "", self.after(text)
        return text.removeprefix(self.text), NO_GAP


NO_GAP = Gap("", ())

# What happens after a token: `None`, decoding goes on; a number n, the last n tokens are discarded
# and decoding restarts.
Verdict = int | None
KEEP = None
RESTART_AFTER = 0
RESTART_BEFORE = 1


class Guide(Protocol):
    """Restricts the tokens of one sample.

    Attributes:
      done: whether the sample is complete and no token may follow.
      held: how many of the last tokens may still be discarded.
    """

    @property
    def done(self) -> bool: ...

    @property
    def held(self) -> int: ...

    def copy(self) -> "Guide":
        """Returns an independent guide in the same state."""

    def mask(self) -> np.ndarray | None:
        """Returns the tokens that may come next, as in `token_masks`; None: all.

        Raises:
          UserError: no token may come next, or the computation takes too long.
        """

    def push(self, token: int, text: str) -> Verdict:
        """Processes a token and the text that it adds.

        If tokens are discarded, the guide is afterwards in the state before them, and `mask`
        excludes the first of them.
        """


class WholeText:
    """Applies a constraint to the whole text."""

    held = 0

    def __init__(self, matcher: Matcher):
        self._matcher = matcher

    def copy(self) -> "WholeText":
        return WholeText(self._matcher.copy())

    def mask(self) -> np.ndarray | None:
        return self._matcher.mask()

    def push(self, token: int, text: str) -> Verdict:
        self._matcher.consume(token)
        return KEEP

    @property
    def done(self) -> bool:
        return self._matcher.done


class AfterTrigger:
    """Applies a constraint to the text after a trigger (`Constraint.after`). Triggers inside the
    reasoning do not count.
    """

    held = 0

    def __init__(
        self,
        matcher: Matcher,
        constraint: Constraint,
        vocab_size: int,
        reasoning: "Reasoning | None" = None,
        gap: "Gap | None" = None,
    ):
        """`matcher` is at the start of the constraint; it is copied for each trigger."""
        self._start = matcher
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._gap = gap or NO_GAP
        self._reasoning = reasoning
        self._in_reasoning = reasoning is not None and reasoning.is_open
        self._matcher: Matcher | None = None  # None: the text is free
        self._tail = ""  # the end of the text that may be the beginning of a marker
        self._at_start = True  # whether there is no text yet besides reasoning
        self._excluded: set[int] = set()  # tokens that must not come next
        self.done = False

    def copy(self) -> "AfterTrigger":
        copied = copy.copy(self)
        copied._matcher = None if self._matcher is None else self._matcher.copy()
        copied._excluded = set(self._excluded)
        return copied

    def mask(self) -> np.ndarray | None:
        if self._matcher is not None:
            bits: np.ndarray = self._matcher.mask() | mask_of(self._gap.next_ids, self._vocab_size)
            return bits
        return mask_without(self._excluded, self._vocab_size) if self._excluded else None

    def push(self, token: int, text: str) -> Verdict:
        if self._matcher is not None:
            if token in self._gap.next_ids:
                self._gap = self._gap.after(text)
                return KEEP
            self._gap = NO_GAP
            self._matcher.consume(token)
            if not self._matcher.done:
                return KEEP
            self._leave_constraint(self._matcher)
            return RESTART_AFTER
        before = self._tail, self._at_start, self._in_reasoning
        rest = self._find_trigger(self._tail + text)
        if rest is None:
            verdict = RESTART_AFTER if self._excluded else KEEP  # the mask changes
            self._excluded = set()
            return verdict
        matcher = self._start.copy()
        gap = self._gap
        if rest:
            rest, gap = gap.split(rest)
        # The constraint forbids the part of the token after the trigger.
        if rest and not matcher.skip(rest):
            self._tail, self._at_start, self._in_reasoning = before
            self._excluded.add(token)
            return RESTART_BEFORE
        self._excluded = set()
        self._matcher = matcher
        self._tail = ""
        self._gap = gap
        if matcher.done:
            self._leave_constraint(matcher)
        return RESTART_AFTER

    def _find_trigger(self, text: str) -> str | None:
        """Returns the text after the first trigger, or None; follows the reasoning on the way."""
        after = self._constraint.after
        reasoning = self._reasoning
        while True:
            if self._in_reasoning and reasoning is not None:
                markers: tuple[str, ...] = (reasoning.end,)
            else:
                opening = self._constraint.opening
                stripped = text.lstrip()
                if opening and self._at_start and stripped.startswith(opening):
                    return stripped
                markers = after if reasoning is None else (*after, reasoning.begin)
            found = [(text.find(marker), marker) for marker in markers if marker in text]
            at, marker = min(found, default=(-1, ""))
            free = text if at < 0 else text[:at]
            self._at_start = self._at_start and (self._in_reasoning or not free.strip())
            if at < 0:
                self._tail = text[len(text) - overlap(text, markers) :]
                return None
            text = text[at + len(marker) :]
            if marker in after:
                self._in_reasoning = False
                return text
            self._in_reasoning = not self._in_reasoning

    def _leave_constraint(self, matcher: Matcher) -> None:
        """Makes the text free again, or ends it, after the text of the constraint is complete."""
        self.done = not self._constraint.repeats or matcher.ended
        self._matcher = None
        self._gap = NO_GAP


class ReasoningTracker:
    """Follows the reasoning of a sample.

    Attributes:
      is_open: whether the text is inside the reasoning.
      count: the number of tokens of the reasoning, without the token that completes its end marker.
      pending: whether the end of the text is the beginning of the end marker.
    """

    def __init__(self, reasoning: Reasoning):
        self._reasoning = reasoning
        self._tail = ""
        self.is_open = reasoning.is_open
        self.count = 0

    def push(self, text: str) -> None:
        """Processes the text of one token."""
        marker = self._reasoning.end if self.is_open else self._reasoning.begin
        tail = self._tail + text
        if marker in tail:
            self.is_open = not self.is_open
            self._tail = ""
            return
        self.count += self.is_open
        self._tail = tail[len(tail) - overlap(tail, (marker,)) :]

    @property
    def pending(self) -> bool:
        return self.is_open and self._tail != ""


class ReasoningBudget:
    """Ends the reasoning of a sample after `Reasoning.budget` tokens, by forcing the tokens of the
    text that ends it.
    """

    done = False
    held = 0

    def __init__(self, reasoning: Reasoning, budget: int, vocab_size: int):
        self._tracker = ReasoningTracker(reasoning)
        self._closing = reasoning.closing
        self._budget = budget
        self._vocab_size = vocab_size
        # How many tokens of `closing` were forced; None: they are not forced yet.
        self._forced = 0 if reasoning.is_open and budget == 0 else None

    def copy(self) -> "ReasoningBudget":
        copied = copy.copy(self)
        copied._tracker = copy.copy(self._tracker)
        return copied

    def mask(self) -> np.ndarray | None:
        return (
            None
            if self._forced is None
            else mask_of([self._closing[self._forced]], self._vocab_size)
        )

    def push(self, token: int, text: str) -> Verdict:
        self._tracker.push(text)
        if self._forced is not None:
            self._forced += 1
            if self._forced < len(self._closing):
                return KEEP
            self._forced = None
            self._tracker.is_open = False
            return RESTART_AFTER
        # A model that has begun to write the end marker may complete it.
        if (
            self._tracker.is_open
            and self._tracker.count >= self._budget
            and not self._tracker.pending
        ):
            self._forced = 0
            return RESTART_AFTER
        return KEEP

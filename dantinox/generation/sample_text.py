"""`SampleText`: detokenization, stop strings, guides and finish reason of one sample, on the
host.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from dantinox.config import GenerationSection, UserError
from dantinox.generation.guides.bans import TextBan
from dantinox.generation.guides.guide import Guide, Reasoning, ReasoningTracker
from dantinox.generation.guides.stop_strings import StopFinder
from dantinox.generation.guides.token_healing import HealedPrefix, response_detokenizer
from dantinox.generation.guides.token_masks import combine_masks
from dantinox.generation.token_settings import stop_token_ids
from dantinox.sampling import StepInfo
from dantinox.sampling.loops import ends_in_loop
from dantinox.text import Tokenizer


class TextPart(NamedTuple):
    """New text, and the largest entropy of its tokens in bits; None if the tokens have no
    reports.
    """

    text: str
    entropy: float | None = None


class _Queued(NamedTuple):
    """A token that may still be discarded: its text, its report, and copies of the guides before
    it, if they are needed.
    """

    token: int
    text: str
    entropy: float
    step: StepInfo | None
    before: list[Guide]


class SampleText:
    """Converts the tokens of one continuation to text and decides where it ends.

    Attributes:
      tokens: the tokens of the continuation, including the EOS token, without those that a guide
        may still discard.
      finish_reason: `eos`, `stop`, `loop` or `length` once it has ended.
      guides: the guides of the sample.
      mask: the tokens that the guides allow next; None: all.
      released_steps: the reports of the tokens that the last call of `add_tokens` has added to
        `tokens`; None without reports.
      must_restart: whether the last call of `add_tokens` discarded tokens or changed the mask. The
        tokens that the device has computed since are then invalid.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        section: GenerationSection,
        prompt: Sequence[int],
        guides: Sequence[Guide] = (),
        visible_ids: frozenset[int] = frozenset(),
        reasoning: Reasoning | None = None,
        limit: int = 1 << 62,
        healed: Sequence[int] = (),
    ):
        """
        Args:
          prompt: the tokens before the continuation.
          guides, visible_ids, reasoning, healed: as in `GenerationRequest`.
          limit: the most tokens of the continuation.
        """
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.guides = [*guides]
        self.must_restart = False
        # Whether tokens wait in the queue.
        self._holds = any(isinstance(guide, TextBan) for guide in guides)
        # The other guides must return to an earlier state.
        self._keeps_copies = self._holds and len(guides) > 1
        self._queue: list[_Queued] = []
        # These three belong to the current call of `add_tokens`: its results, the reports of the
        # tokens that it releases, and whether its tokens have reports.
        self._parts: list[TextPart] = []
        self._released: list[StepInfo] = []
        self._reports = False
        # Every token is released at once.
        self._is_plain = not guides and reasoning is None and not section.stop
        self.released_steps: StepInfo | None = None
        self._limit = limit
        self.mask = self._next_mask() if guides else None
        self._reasoning = None if reasoning is None else ReasoningTracker(reasoning)
        self._eos = () if section.ignore_eos else tokenizer.stop_ids
        self._stop_ids = stop_token_ids(tokenizer, section)
        self._keep_stop = section.keep_stop
        self._min_tokens = section.min_tokens
        self._loop_settings = section if section.loop_stop else None
        # Decode the new tokens as a continuation of the prompt, because some tokenizers drop a
        # space at the start of a text.
        self._new_detokenizer = partial(
            response_detokenizer, tokenizer, prompt, healed, visible_ids
        )
        self._detokenizer = self._new_detokenizer()
        self._stops = StopFinder(section.stop, section.keep_stop)
        self._entropy = 0.0  # the largest entropy since the last part

    @property
    def all_tokens(self) -> list[int]:
        """The tokens so far, including those that a guide may still discard."""
        return [*self.tokens, *(queued.token for queued in self._queue)]

    @property
    def restricted(self) -> bool:
        """Whether the guides restrict the next token."""
        return self.mask is not None

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched_stop

    @property
    def complete(self) -> bool:
        """Whether a guide allows no further token."""
        return any(guide.done for guide in self.guides)

    def add_tokens(
        self, ids: Sequence[int], done: bool, steps: StepInfo | None = None
    ) -> list[TextPart]:
        """Adds new tokens, ignoring tokens after the end of the text, and returns the text that has
        become final.

        With `steps`, the text is returned in parts, each with its entropy.

        Args:
          done: whether these are the last tokens.

        Raises:
          UserError: the constraint takes too long to evaluate, or no token can satisfy it.
        """
        self.must_restart = False
        self._parts = []
        self._released = []
        self._reports = steps is not None
        if self._is_plain and steps is None:
            return [TextPart(self._add_plain_tokens(ids, done))]
        before = len(self.tokens)
        entropies = [0.0] * len(ids) if steps is None else steps.entropy.tolist()
        for place, (token, entropy) in enumerate(zip(ids, entropies, strict=True)):
            if self.finish_reason is not None or self.must_restart:
                break
            self._push(token, entropy, steps, place)
        # There is nothing left to decode.
        if self.must_restart and len(self.all_tokens) >= self._limit:
            self.must_restart = False
            done = True
        done = done and not self.must_restart
        self._release(
            0 if done or self.complete else max((guide.held for guide in self.guides), default=0)
        )
        self._finish(done)
        if self.guides and self.finish_reason is None:
            self.mask = self._next_mask()
        self.released_steps = self._steps_of(steps, len(self.tokens) - before)
        return (
            self._parts
            if steps is not None
            else [TextPart("".join(part.text for part in self._parts))]
        )

    def _add_plain_tokens(self, ids: Sequence[int], done: bool) -> str:
        """Adds tokens without reports to a sample without guides, reasoning and stop strings, and
        returns the new text.
        """
        self.released_steps = None
        if self.finish_reason is None:
            self.tokens += ids
            shown = ids
            if self._stop_ids and not self._keep_stop:
                shown = [token for token in ids if token not in self._stop_ids]
            self._add_part(self._detokenizer.push(shown))
            self._finish(done)
        return "".join(part.text for part in self._parts)

    def _next_mask(self) -> np.ndarray | None:
        mask = combine_masks([guide.mask() for guide in self.guides])
        if mask is not None and not mask.any():
            raise UserError(
                "no token satisfies the bans and the constraint of the request together"
            )
        return mask

    def _steps_of(self, steps: StepInfo | None, count: int) -> StepInfo | None:
        """Returns the reports of the `count` tokens that were added to `tokens`."""
        if not self._holds:  # they are the first new tokens
            first: StepInfo | None = jax.tree.map(lambda x: x[:count], steps)
            return first
        return (
            jax.tree.map(lambda *parts: np.stack(parts), *self._released)
            if self._released
            else None
        )

    def _push(self, token: int, entropy: float, steps: StepInfo | None, place: int) -> None:
        """Adds a token to the queue, unless a guide discards it, perhaps with tokens before it."""
        hidden = token in self._stop_ids and not self._keep_stop
        text = "" if hidden else self._detokenizer.push([token])
        step = jax.tree.map(lambda x: x[place], steps) if self._holds else None
        before = [guide.copy() for guide in self.guides] if self._keeps_copies else []
        self._queue.append(_Queued(token, text, entropy, step, before))
        for number, guide in enumerate(self.guides):
            discarded = guide.push(token, text)
            if discarded is not None:
                self.must_restart = True
                if discarded:
                    self._discard(discarded, number)
                    return
            if isinstance(guide, HealedPrefix) and guide.in_prompt:
                break  # the other guides see only the response
        if token in self._eos or token in self._stop_ids:
            self.must_restart = False  # the sample has ended
        if not self._holds:
            self._release(0)

    def _discard(self, count: int, place: int) -> None:
        """Removes the last tokens of the queue; `place` is the index of the guide that has
        discarded them.
        """
        before = self._queue[-count].before  # the guides before the first of these tokens
        del self._queue[-count:]
        if before:
            self.guides = [*before[:place], self.guides[place], *before[place + 1 :]]
        self._detokenizer = self._new_detokenizer()
        self._detokenizer.push(self.all_tokens)

    def _release(self, held: int) -> None:
        """Moves tokens from the queue to `tokens`, except the last `held`, and their text to the
        parts.
        """
        count = max(0, len(self._queue) - held)
        released = self._queue[:count]
        self._queue = self._queue[count:]
        for token, new, entropy, step, _ in released:
            if self.finish_reason is not None:
                break
            self.tokens.append(token)
            if self._reasoning is not None:
                self._reasoning.push(new)
            text = self._stops.push(new, active=len(self.tokens) >= self._min_tokens)
            if self._stops.matched_stop is not None:
                self.finish_reason = "stop"
                self._queue = []
            self._entropy = max(self._entropy, entropy)
            if step is not None:
                self._released.append(step)
            self._add_part(text)

    def _add_part(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text, self._entropy if self._reports else None))
            self._entropy = 0.0

    def _finish(self, done: bool) -> None:
        """If the continuation has ended, sets the finish reason and adds the remaining text to the
        parts.
        """
        if self.finish_reason is not None or not (done or self.complete):
            return
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        last = self.tokens[-1] if self.tokens else None
        stopped = self._stops.matched_stop is not None or last in self._stop_ids
        if stopped:
            self.finish_reason = "stop"
        elif self.complete or last in self._eos:
            self.finish_reason = "eos"
        else:
            looped = self._loop_settings is not None and ends_in_loop(
                self.tokens, self._loop_settings
            )
            self.finish_reason = "loop" if looped else "length"
        self._add_part(text)

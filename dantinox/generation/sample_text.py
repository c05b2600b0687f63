"""`SampleText`: detokenization, stop strings, guides and finish reason of one sample, on the host."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from dantinox.config import GenerationSection
from dantinox.generation.guides import Guide, Reasoning, ReasoningTracker, Verdict, combine_masks
from dantinox.generation.stop_strings import StopFinder
from dantinox.generation.token_settings import stop_token_ids
from dantinox.sampling import StepInfo
from dantinox.text import Tokenizer


class TextPart(NamedTuple):
    """New text, and the largest entropy of its tokens in bits; None if the tokens have no reports."""

    text: str
    entropy: float | None = None


class SampleText:
    """Converts the tokens of one continuation to text and decides where it ends.

    Attributes:
      tokens: the tokens of the continuation, including the EOS token.
      finish_reason: `eos`, `stop` or `length` once it has ended.
      guides: the guides of the sample.
      mask: the tokens that the guides allow next; None: all.
      must_restart: whether the last call of `add_tokens` discarded tokens or changed the mask. The tokens that the device has
        computed since are then invalid.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        section: GenerationSection,
        prompt: Sequence[int],
        guides: Sequence[Guide] = (),
        visible_ids: frozenset[int] = frozenset(),
        reasoning: Reasoning | None = None,
    ):
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.guides, self.must_restart = guides, False
        self.mask = combine_masks([guide.mask() for guide in guides])
        self._reasoning = None if reasoning is None else ReasoningTracker(reasoning)
        self._eos = () if section.ignore_eos else tokenizer.stop_ids
        self._stop_ids, self._keep_stop = stop_token_ids(tokenizer, section), section.keep_stop
        self._min_tokens = section.min_tokens
        # Decode the new tokens as a continuation of the prompt, because some tokenizers drop a space at the start of a text.
        self._new_detokenizer = partial(tokenizer.detokenizer, visible_ids)
        self._prompt = prompt
        self._detokenizer = self._new_detokenizer()
        self._detokenizer.push(prompt)
        self._stops = StopFinder(section.stop, section.keep_stop)
        self._entropy = 0.0  # the largest entropy since the last part

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

    def add_tokens(self, ids: Sequence[int], done: bool, steps: StepInfo | None = None) -> list[TextPart]:
        """Adds new tokens, ignoring tokens after the end of the text, and returns the text that has become final.

        With `steps`, the text is returned in parts, each with its entropy.

        Args:
          done: whether these are the last tokens.

        Raises:
          UserError: the constraint takes too long to evaluate, or no token can satisfy it.
        """
        self.must_restart = False
        entropies = [None] * len(ids) if steps is None else steps.entropy.tolist()
        parts = []
        for token, entropy in zip(ids, entropies, strict=True):
            if self.finish_reason is not None or self.must_restart:
                break
            text = self._push(token)
            if entropy is not None:
                self._entropy = max(self._entropy, entropy)
            if text:
                parts.append(self._part(text, entropy is not None))
        if self.must_restart and self.finish_reason is None:
            done = False
        if text := self._finish(done):
            parts.append(self._part(text, steps is not None))
        if self.guides and self.finish_reason is None:
            self.mask = combine_masks([guide.mask() for guide in self.guides])
        return parts if steps is not None else [TextPart("".join(part.text for part in parts))]

    def _part(self, text: str, has_entropy: bool) -> TextPart:
        entropy, self._entropy = self._entropy, 0.0
        return TextPart(text, entropy if has_entropy else None)

    def _push(self, token: int) -> str:
        """Adds a token, unless a guide discards it, and returns the text that has become final."""
        hidden = token in self._stop_ids and not self._keep_stop
        new = "" if hidden else self._detokenizer.push([token])
        for guide in self.guides:
            verdict = guide.push(token, new)
            self.must_restart |= verdict is not Verdict.KEEP
            if verdict is Verdict.RESTART_BEFORE:
                self._detokenizer = self._new_detokenizer()
                self._detokenizer.push([*self._prompt, *self.tokens])
                return ""
        self.tokens.append(token)
        if self._reasoning is not None:
            self._reasoning.push(new)
        if token in self._eos or token in self._stop_ids:
            self.must_restart = False  # the sample has ended
        text = self._stops.push(new, active=len(self.tokens) >= self._min_tokens)
        if self._stops.matched_stop is not None:
            self.finish_reason = "stop"
        return text

    def _finish(self, done: bool) -> str:
        """If the continuation has ended, sets the finish reason and returns the remaining text; otherwise returns ""."""
        if self.finish_reason is not None or not (done or self.complete):
            return ""
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        last = self.tokens[-1] if self.tokens else None
        stopped = self._stops.matched_stop is not None or last in self._stop_ids
        self.finish_reason = "stop" if stopped else "eos" if self.complete or last in self._eos else "length"
        return text

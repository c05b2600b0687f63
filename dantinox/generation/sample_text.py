"""`SampleText`: detokenization, stop strings, constraint and finish reason of one sample, on the host."""

from collections.abc import Sequence
from typing import NamedTuple

from dantinox.config import GenerationSection
from dantinox.generation.constraints import Matcher
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
      matcher: the matcher of its constraint; None without a constraint.
    """

    def __init__(self, tokenizer: Tokenizer, section: GenerationSection, prompt: Sequence[int], matcher: Matcher | None = None):
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.matcher = matcher
        self._eos = () if section.ignore_eos else tokenizer.stop_ids
        self._stop_ids, self._keep_stop = stop_token_ids(tokenizer, section), section.keep_stop
        self._min_tokens = section.min_tokens
        self._detokenizer = tokenizer.detokenizer()
        # Decode the new tokens as a continuation of the prompt, because some tokenizers drop a space at the start of a text.
        self._detokenizer.push(prompt)
        self._stops = StopFinder(section.stop, section.keep_stop)
        self._entropy = 0.0  # the largest entropy since the last part

    @property
    def complete(self) -> bool:
        """Whether the constraint allows no further token."""
        return self.matcher is not None and self.matcher.done

    def add_tokens(self, ids: Sequence[int], done: bool, steps: StepInfo | None = None) -> list[TextPart]:
        """Adds new tokens, ignoring tokens after the end of the text, and returns the text that has become final.

        With `steps`, the text is returned in parts, each with its entropy.

        Args:
          done: whether these are the last tokens.

        Raises:
          UserError: the constraint takes too long to evaluate, or no token can satisfy it.
        """
        if self.matcher is not None:
            for token in ids:
                self.matcher.consume(token)
        if steps is None:
            return [TextPart("".join([*map(self._push, ids), self._finish(done)]))]
        parts = []
        for token, entropy in zip(ids, steps.entropy.tolist(), strict=True):
            self._entropy = max(self._entropy, entropy)
            if text := self._push(token):
                parts.append(TextPart(text, self._entropy))
                self._entropy = 0.0
        if text := self._finish(done):
            parts.append(TextPart(text, self._entropy))
        return parts

    def _push(self, token: int) -> str:
        if self.finish_reason is not None:
            return ""
        self.tokens.append(token)
        hidden = token in self._stop_ids and not self._keep_stop
        text = self._stops.push("" if hidden else self._detokenizer.push([token]), active=len(self.tokens) >= self._min_tokens)
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

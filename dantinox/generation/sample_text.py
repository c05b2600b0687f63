"""One continuation on the host: detokenization, stop strings, constraint and finish reason."""

from collections.abc import Sequence
from typing import NamedTuple

from dantinox.config import GenerationSection
from dantinox.generation.constraints import Matcher
from dantinox.generation.stop_strings import StopFinder
from dantinox.generation.token_settings import stop_token_ids
from dantinox.sampling import StepInfo
from dantinox.text import Tokenizer


class TextPart(NamedTuple):
    """Text that became certain, with the largest entropy, in bits, of the tokens that spell it; None without a report."""

    text: str
    entropy: float | None = None


class SampleText:
    """Turns the tokens of one continuation into text and decides where it ends.

    Attributes:
      tokens: those that belong to it, end token included.
      finish_reason: `eos`, `stop` or `length` once it has ended.
      matcher: follows its constraint; None where the text is free.
    """

    def __init__(self, tokenizer: Tokenizer, section: GenerationSection, prompt: Sequence[int], matcher: Matcher | None = None):
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.matcher = matcher
        self._eos = () if section.ignore_eos else tokenizer.stop_ids
        self._stop_ids, self._keep_stop = stop_token_ids(tokenizer, section), section.keep_stop
        self._min_tokens = section.min_tokens
        self._detokenizer = tokenizer.detokenizer()
        self._detokenizer.push(prompt)  # the first new token does not begin a text, where some vocabularies drop a space
        self._stops = StopFinder(section.stop, section.keep_stop)
        self._entropy = 0.0  # the largest since text became certain

    @property
    def complete(self) -> bool:
        """The constraint allows no further token."""
        return self.matcher is not None and self.matcher.done

    def take(self, ids: Sequence[int], done: bool, steps: StepInfo | None = None) -> list[TextPart]:
        """Takes new tokens up to the end of the text; returns the text that became certain, per token where there are `steps`.

        Args:
          done: no more tokens will come.

        Raises:
          UserError: the constraint takes too long to follow, or no token can satisfy it.
        """
        if self.matcher is not None:
            for token in ids:
                self.matcher.take(token)
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
        text = self._stops.push("" if hidden else self._detokenizer.push([token]), armed=len(self.tokens) >= self._min_tokens)
        if self._stops.found is not None:
            self.finish_reason = "stop"
        return text

    def _finish(self, done: bool) -> str:
        """What is left of the text if it ends here."""
        if self.finish_reason is not None or not (done or self.complete):
            return ""
        text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        last = self.tokens[-1] if self.tokens else None
        stopped = self._stops.found is not None or last in self._stop_ids
        self.finish_reason = "stop" if stopped else "eos" if self.complete or last in self._eos else "length"
        return text

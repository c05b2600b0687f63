"""`Result`: the text of one sample of offline generation, its tokens, finish reason, log-probabilities and statistics."""

from dataclasses import dataclass, field
from typing import Any

from dantinox.sampling import StepInfo

REPORTED = (
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "new_tokens", "seed", "seconds", "compile_seconds",
    "decode_tok_per_s", "cache",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One sample.

    Attributes:
      prompt, text: what was given, and its continuation alone.
      tokens: ids of the continuation, the end token included.
      finish_reason: `eos`, `stop` or `length`.
      seed: of the draws; the same seed gives the same text.
      info: with `logprobs`: `tokens` (text of each), `logprobs` (of the model), `sampled_logprobs` (of the distribution
        drawn from), `ranks`, `survivors`, `entropy`, `varentropy`, what the router did, `top` (alternatives: ids and
        log-probabilities) and, with `echo`, the same of the prompt's tokens.
      stats: `prompt_tokens`, `new_tokens`, `seconds`, `first_token_seconds`, `compile_seconds`, `decode_tok_per_s` (of the
        whole batch) and `cache`, the cache's report.
      steps: with `logprobs`: what was reported about each token, arrays `[steps, …]`.
      settings: those that are not the default, by name.
      router: the numbers the entropy router went by, None without it.
    """

    prompt: str
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    info: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    steps: StepInfo | None = field(default=None, repr=False, compare=False)
    settings: dict[str, Any] = field(default_factory=dict)
    router: dict[str, float | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON-ready dict of the `REPORTED` names, and `logprobs` where they were asked for."""
        known = vars(self) | self.stats
        return {name: known[name] for name in REPORTED} | ({"logprobs": self.info} if self.info else {})

"""`Result`: the text of one sample of offline generation, its tokens, finish reason, log-probabilities and statistics."""

from dataclasses import dataclass, field
from typing import TypedDict

from dantinox.model import CacheReport
from dantinox.sampling import StepInfo

REPORTED = (
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "new_tokens", "seed", "seconds", "compile_seconds",
    "decode_tok_per_s", "cache",
)  # fmt: skip


class TokenColumns(TypedDict, total=False):
    """What is reported about the tokens of a sample, a list per quantity with an entry per token.

    Attributes:
      tokens: the text of each.
      logprobs, ranks, entropy, varentropy: by the model's distribution, in nats, from 0, in bits and bits².
      sampled_logprobs: by the distribution drawn from; null where it gives the token no chance.
      survivors: tokens that this distribution holds.
      top: the likeliest alternatives: `ids`, `tokens` and `logprobs`.
      candidates: with the router, where they were asked for: `ids`, `tokens`, `logprobs` and `scores`.
      strategy, forced, temperature, top_p, top_k, min_p: what the router did.
      attn_entropy, attn_entropy_norm, attn_varentropy, attn_disagreement, attn_agreement, interaction_strength: its attention
        metrics, where it reads them.
      prompt_tokens, prompt_logprobs: with `echo`, those of the prompt; the first token has no log-probability.
    """

    tokens: list[str]
    logprobs: list[float]
    sampled_logprobs: list[float | None]
    ranks: list[int]
    survivors: list[int]
    entropy: list[float]
    varentropy: list[float]
    top: list[dict[str, list[int] | list[str] | list[float]]]
    candidates: list[dict[str, list[int] | list[str] | list[float] | list[float | None]]]
    strategy: list[str]
    forced: list[bool]
    temperature: list[float]
    top_p: list[float]
    top_k: list[int]
    min_p: list[float]
    attn_entropy: list[float]
    attn_entropy_norm: list[float]
    attn_varentropy: list[float]
    attn_disagreement: list[float]
    attn_agreement: list[float]
    interaction_strength: list[float]
    prompt_tokens: list[str]
    prompt_logprobs: list[float | None]


class GenerationStats(TypedDict):
    """Counts and times of a sample; the seconds are those of its whole batch."""

    prompt_tokens: int
    new_tokens: int
    seconds: float
    first_token_seconds: float
    compile_seconds: float
    decode_tok_per_s: float
    cache: CacheReport | None


@dataclass(frozen=True)
class Result:
    """One sample.

    Attributes:
      prompt, text: what was given, and its continuation alone.
      tokens: ids of the continuation, the end token included.
      finish_reason: `eos`, `stop` or `length`.
      seed: of the draws; the same seed gives the same text.
      info: with `logprobs`, else empty.
      steps: with `logprobs`: what was reported about each token, arrays `[steps, …]`.
      settings: those that are not the default, by name.
      router: the numbers the entropy router went by, None without it.
    """

    prompt: str
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    info: TokenColumns
    stats: GenerationStats
    steps: StepInfo | None = field(default=None, repr=False, compare=False)
    settings: dict[str, object] = field(default_factory=dict)
    router: dict[str, float | None] | None = None

    def to_dict(self) -> dict[str, object]:
        """One flat JSON-ready dict of the `REPORTED` names, and `logprobs` where they were asked for."""
        known = {**vars(self), **self.stats}
        return {name: known[name] for name in REPORTED} | ({"logprobs": self.info} if self.info else {})

"""`Result`: the text of one sample of offline generation, its tokens, finish reason,
log-probabilities and statistics.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypedDict

from dantinox.generation.api.attention_stats import AttentionStats
from dantinox.generation.run_timer import Times
from dantinox.html_repr import html_text
from dantinox.model import CacheReport
from dantinox.sampling import StepInfo

RESULT_FIELDS = (
    "prompt", "text", "tokens", "finish_reason", "prompt_tokens", "new_tokens", "draft_tokens",
    "accepted_draft_tokens", "seed", "seconds", "compile_seconds", "decode_tok_per_s", "cache",
)  # fmt: skip


class TokenColumns(TypedDict, total=False):
    """Reports of the tokens of a sample: one list per quantity, one entry per token.

    Attributes:
      tokens: the text of each token.
      logprobs, ranks, entropy, varentropy: under the distribution of the model: log-probability in
        nats, rank from 0, entropy in bits, varentropy in bits².
      sampled_logprobs: the log-probability under the distribution after all sampling steps, from
        which the token was drawn; null if the token has probability 0 there.
      survivors: the number of tokens with nonzero probability in that distribution.
      top: the most likely alternatives: `ids`, `tokens` and `logprobs`.
      candidates: the candidates of the router, if requested: `ids`, `tokens`, `logprobs` and
        `scores`.
      strategy, forced, temperature, top_p, top_k, min_p: the decisions of the router.
      attn_entropy, attn_entropy_norm, attn_varentropy, attn_disagreement, attn_agreement,
        interaction_strength: the attention metrics of the router, if it uses attention.
      prompt_tokens, prompt_logprobs: with `echo`, the tokens of the prompt and their
        log-probabilities; the first token has no log-probability.
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
    """Token counts of a sample, and times of the whole batch in seconds.

    `draft_tokens` counts the verified draft tokens of speculative decoding.
    """

    prompt_tokens: int
    new_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    seconds: float
    first_token_seconds: float
    compile_seconds: float
    decode_tok_per_s: float
    cache: CacheReport | None


def sample_stats(
    times: Times,
    *,
    decode_tok_per_s: float,
    prompt_tokens: int,
    new_tokens: int,
    cache: CacheReport | None,
    counts: Mapping[str, int] = {},
) -> GenerationStats:
    """Returns the statistics of a sample of a batch with these times; `counts` are the numbers of
    draft tokens, if any.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "draft_tokens": counts.get("draft_tokens", 0),
        "accepted_draft_tokens": counts.get("accepted_draft_tokens", 0),
        "seconds": times.total,
        "first_token_seconds": times.first,
        "compile_seconds": times.compiling,
        "decode_tok_per_s": decode_tok_per_s,
        "cache": cache,
    }


@dataclass(frozen=True)
class Result:
    """One generated sample.

    Attributes:
      prompt, text: the prompt, and the continuation without the prompt.
      tokens: the ids of the continuation, including the EOS token.
      finish_reason: `eos`, `stop`, `loop` (`loop_stop` ended it) or `length`.
      seed: seed of the sampler; the same seed reproduces the text.
      stats: token counts, and seconds and tokens per second of the batch, see `GenerationStats`.
      steps: with `logprobs`: the reports of `info`, as a `StepInfo` of arrays `[steps, …]`;
        otherwise None.
      settings: the settings that differ from the defaults, by name.
      router: the settings of the entropy router; None if the router is off.
      attention: with `attention_stats`: the statistics of the attention of every head for every
        token; otherwise None.
      score: with beam search: the sum of the log-probabilities in nats, divided by
        length^length_penalty; otherwise None.

    Example:
      >>> model = dantinox.load("runs/quickstart")
      >>> result = model.generate("def ", max_new_tokens=4, greedy=True, logprobs=2)
      >>> result.stats["new_tokens"], result.finish_reason
      (4, 'length')
      >>> len(result.info["logprobs"]), len(result.info["top"][0]["ids"])
      (4, 2)
    """

    prompt: str
    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    stats: GenerationStats = field(repr=False)
    steps: StepInfo | None = field(default=None, repr=False, compare=False)
    settings: dict[str, object] = field(default_factory=dict)
    router: dict[str, float | None] | None = None
    score: float | None = None
    attention: AttentionStats | None = field(default=None, repr=False, compare=False)
    # Computes `info` when it is first read, because converting all tokens takes time. The default
    # returns an empty dict.
    make_info: Callable[[], TokenColumns] = field(default=TokenColumns, repr=False, compare=False)

    @cached_property
    def info(self) -> TokenColumns:
        """With `logprobs`: one list per quantity with one entry per token, see `TokenColumns`;
        otherwise empty.
        """
        return self.make_info()

    def _repr_html_(self) -> str:
        speed = f"{self.stats['new_tokens']} tokens, {self.stats['decode_tok_per_s']:.1f} tok/s"
        return html_text(self.prompt, self.text, f"{speed}, seed {self.seed}, {self.finish_reason}")

    def to_dict(self) -> dict[str, object]:
        """Returns a flat dict of the `RESULT_FIELDS`, ready for JSON, with `logprobs` and `score`
        if the result has them.
        """
        values = {**vars(self), **self.stats}
        optional = {"logprobs": self.info or None, "score": self.score}
        return {name: values[name] for name in RESULT_FIELDS} | {
            key: value for key, value in optional.items() if value is not None
        }

"""`GenerationRequest`, `Delta` and `RequestStats`: the input and output of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dantinox.config import Config
from dantinox.generation.constraints import Constraint
from dantinox.sampling.params import ScoreFn

TokenRecord = dict[str, Any]  # JSON record of a token: `id`, `text` and what was reported (`generation.trace`)


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue, with validated settings.

    Attributes:
      ids: the tokens of the prompt, at least one.
      config: all settings: `generation.n` samples of at most `max_new_tokens` each.
      logprobs: None, or the number of alternatives to report with each token; 0 reports the token alone.
      echo: report the prompt tokens too; needs `logprobs`.
      constraint: the constraint on the output, None if it is free.
      prompt: the text of the ids, if the caller has it; part of a `Result`.
      score_fn, show_candidates: settings of the entropy router, as in `LoadedModel.generate`; not supported in a server.
    """

    ids: tuple[int, ...]
    config: Config
    logprobs: int | None = None
    echo: bool = False
    constraint: Constraint | None = None
    prompt: str = ""
    score_fn: ScoreFn | None = None
    show_candidates: bool = False


class Delta(NamedTuple):
    """New output of one sample.

    Attributes:
      sample: the index of the sample, from 0.
      text: new text of the response; "" if the new tokens do not complete any text yet.
      tokens: one record per new token, with more than `id` and `text` only if log-probabilities were requested.
      finish_reason: `eos`, `stop`, `length` or `cancelled` in the last delta of the sample, else None.
    """

    sample: int
    text: str
    tokens: Sequence[TokenRecord]
    finish_reason: str | None = None


@dataclass
class RequestStats:
    """Statistics of a request; complete once it has ended.

    Attributes:
      prompt_tokens, reused_tokens: the prompt tokens, and how many of them came from the prefix cache.
      new_tokens: tokens of all samples.
      queued_seconds, first_token_seconds, seconds: from the request until it got a slot, until its first token, and until its
        end.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    new_tokens: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

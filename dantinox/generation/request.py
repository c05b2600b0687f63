"""`GenerationRequest`, `Delta` and `RequestStats`: what a caller asks of the engine and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dantinox.config import Config
from dantinox.generation.constraints import Constraint
from dantinox.sampling.params import ScoreFn

TokenRecord = dict[str, Any]  # of one token, ready for JSON: `id` and `text`, and what was reported (`generation.trace`)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue, with settings that have been validated.

    Attributes:
      ids: the prompt's tokens, at least one.
      config: all settings: `generation.n` samples, each of `max_new_tokens` at most.
      logprobs: None, or how many alternatives are reported with each token; 0 reports the token alone.
      echo: report the prompt's own tokens too; needs `logprobs`.
      constraint: what the text must follow, None where it is free.
      prompt: the text that the ids spell, where the caller has it; part of a `Result`.
      score_fn, show_candidates: of the entropy router, as of `LoadedModel.generate`; not in a server.
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
    """What one sample has just gained.

    Attributes:
      sample: its number, from 0.
      text: certain to belong to the answer; "" where tokens came that spell nothing yet.
      tokens: a record for each new token, with more than `id` and `text` only where log-probabilities were requested.
      finish_reason: `eos`, `stop`, `length` or `cancelled` with the last delta of the sample, else None.
    """

    sample: int
    text: str
    tokens: Sequence[TokenRecord]
    finish_reason: str | None = None


@dataclass
class RequestStats:
    """What a request took; complete once it has ended.

    Attributes:
      prompt_tokens, reused_tokens: of the prompt, and of it those that were not read again.
      new_tokens: of all samples.
      queued_seconds, first_token_seconds, seconds: from the request until a slot was free, the first token came, all ended.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    new_tokens: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

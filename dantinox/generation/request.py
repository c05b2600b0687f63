"""`GenerationRequest`, `Delta` and `RequestStats`: the input and output of the engine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dantinox.config import Config
from dantinox.generation.decode.guidance import has_guidance
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.guides.guide import Reasoning
from dantinox.sampling.logit_processor import LogitProcessor
from dantinox.sampling.params import ScoreFn

# The JSON record of a token: `id`, and perhaps `text` and reports (see `generation.api.trace`).
TokenRecord = dict[str, Any]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue, with validated settings.

    Attributes:
      ids: the tokens of the prompt, at least one.
      config: all settings. The engine generates `generation.n` samples of at most `max_new_tokens`
        each.
      logprobs: the number of alternatives to report per token; 0 reports only the generated token,
        None nothing.
      echo: also report the prompt tokens; needs `logprobs`.
      constraint: the constraint on the output; None: no constraint.
      healed: the tokens that token healing has removed from the end of the prompt, see
        `ModelBundle.heal`; None: it has not looked at the prompt.
      reasoning: the reasoning in the output, for its budget and for a constraint that must not
        apply inside it.
      visible_ids: special tokens whose names appear in the text.
      begun: the number of tokens at the end of `ids` that are the beginning of the output. The
        constraint and the budget of the reasoning include them.
      prompt: the text of the prompt, if known; it is copied to the `Result`.
      score_fn, show_candidates: settings of the entropy router, as in `LoadedModel.generate`; not
        supported in a server.
      logit_processor: edits the logits, as in `LoadedModel.generate`; None: the processor of the
        batch, if it has one.
      lora: the name of the adapter; None: the base model.
      negative_ids: with guidance, the tokens of the negative prompt; None: those of
        `generation.negative_prompt`.
      salt: only requests with an equal salt share keys in the prefix cache of a server, so that the
        time of a response reveals nothing about the prompts of others.
    """

    ids: tuple[int, ...]
    config: Config
    logprobs: int | None = None
    echo: bool = False
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    visible_ids: frozenset[int] = frozenset()
    begun: int = 0
    prompt: str = ""
    score_fn: ScoreFn | None = None
    show_candidates: bool = False
    logit_processor: LogitProcessor | None = None
    healed: tuple[int, ...] | None = None
    lora: str | None = None
    salt: str = ""
    negative_ids: tuple[int, ...] | None = None

    @property
    def scope(self) -> PromptScope:
        """What the keys of the prompt depend on besides its tokens, see `PromptScopes.resolve`."""
        return PromptScope(self.salt, self.lora)

    @property
    def rows_per_sample(self) -> int:
        """The rows of each sample in a batch: with guidance two, of which the second one reads the
        negative prompt.
        """
        return 2 if has_guidance(self.config) else 1

    @property
    def guided(self) -> bool:
        """Whether guides may restrict tokens of the output."""
        section = self.config.generation
        has_budget = self.reasoning is not None and self.reasoning.budget is not None
        banned = section.banned_strings or section.banned_regexes
        return self.constraint is not None or has_budget or bool(banned or self.healed)


class Delta(NamedTuple):
    """New output of one sample.

    Attributes:
      sample: the index of the sample, from 0.
      text: new text of the response; "" if the new tokens do not complete any text yet.
      tokens: one record per new token: its `id`, and its `text` and the reports if
        log-probabilities were requested.
      finish_reason: `eos`, `stop`, `loop`, `length` or `cancelled` in the last delta of the sample,
        else None.
      stop_string: in the last delta, the stop string that ended the sample, or None.
    """

    sample: int
    text: str
    tokens: Sequence[TokenRecord]
    finish_reason: str | None = None
    stop_string: str | None = None


@dataclass
class RequestStats:
    """Statistics of a request; complete once it has ended.

    Attributes:
      prompt_tokens, reused_tokens: the number of prompt tokens, and of those the number that came
        from the prefix cache.
      new_tokens, reasoning_tokens: the number of generated tokens of all samples, and of those the
        tokens of the reasoning.
      counts: what the features of the rows have counted, by name.
      queued_seconds, first_token_seconds, seconds: the time from the arrival of the request to its
        slot, to its first token, and to its end.
    """

    prompt_tokens: int
    reused_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    def as_numbers(self) -> dict[str, float]:
        """Returns all statistics by name."""
        numbers = {**vars(self)}
        return numbers | numbers.pop("counts")  # type: ignore[no-any-return]

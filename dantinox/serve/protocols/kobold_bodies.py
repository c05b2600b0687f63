"""Request bodies of KoboldAI and KoboldCpp, and their conversion to settings.

Source: KoboldCpp's API documentation, and requests of Kobold Lite and SillyTavern.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import MAX_BAN_LENGTH
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.config.token_lists import is_digits
from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.operations.limits import MAX_SAMPLES
from dantinox.serve.protocols.bodies import StrictBody
from dantinox.serve.protocols.sampling_options import (
    AtLeastZero,
    Integer,
    Number,
    Option,
    Range,
    SamplingOptions,
    Seed,
    Texts,
)

MAX_ALTERNATIVES = 5  # maximum number of alternatives reported with a token
MAX_BANS = 1024  # number of banned strings
MAX_KEY_LENGTH = 256
DEFAULT_LENGTH = 80  # new tokens, as in KoboldAI
ALIASES = {"stop", "seed", "max_new_tokens"}  # SillyTavern's duplicates of fields below
# Sampling steps that KoboldCpp does not have.
STEPS_OFF: dict[str, object] = {
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "min_k": -1.0,
    "p_less": "off",
    "top_h": 1.0,
    "skew": 0.0,
    "encoder_repetition_penalty": 1.0,
}


def _to_ids(value: Any) -> Any:
    """Converts a list of token ids, or a string with commas between them, to a tuple."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if any(not is_digits(part) or len(part) > 9 for part in parts):
            raise ValueError("must be token ids separated by commas")
        return tuple(map(int, parts))
    return tuple(value) if isinstance(value, list) else value


def _check_bans(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > MAX_BANS or any(len(text) > MAX_BAN_LENGTH for text in texts):
        raise ValueError(
            f"must have at most {MAX_BANS} strings of at most {MAX_BAN_LENGTH} characters"
        )
    return texts


Size = Annotated[int, Integer, Field(ge=1, lt=2**31)]
Bans = Annotated[Texts, AfterValidator(_check_bans)]
Key = Annotated[str, Field(max_length=MAX_KEY_LENGTH)]


def default_length(base: GenerationSection) -> int:
    """Returns the number of new tokens of a request without `max_length`: KoboldAI's, unless the
    settings have another.
    """
    changed = base.max_new_tokens != GenerationSection.model_fields["max_new_tokens"].default
    return base.max_new_tokens if changed else DEFAULT_LENGTH


class KeyBody(StrictBody):
    """The body of `/check`, `/abort` and `/last_logprobs`.

    Attributes:
      genkey: the key of the generation.
    """

    genkey: Key | None = None


class CountBody(StrictBody):
    """The body of `/tokencount`.

    Attributes:
      prompt: text to encode.
      special: false leaves out the BOS token.
    """

    prompt: str | None = None
    special: bool | None = None


class IdsBody(StrictBody):
    """The body of `/detokenize`.

    Attributes:
      ids: token ids to decode.
    """

    ids: list[int]


class SchemaBody(StrictBody):
    """The body of `/json_to_grammar`.

    Attributes:
      source: a JSON schema, in the field `schema`.
    """

    source: dict[str, Any] = Field(default_factory=dict, alias="schema")


class GenerateBody(SamplingOptions):
    """The body of `/generate` and `/generate/stream`. Every key of `generation` and `router` is an
    additional field.

    Attributes:
      prompt: text to continue.
      memory: text before the prompt that is never truncated.
      n: number of results.
      max_context_length: maximum length of prompt and answer together, in tokens.
      max_length: maximum number of new tokens.
      genkey: a key by which other requests identify this generation.
      sampler_seed: seed of the sampler; 0 or a negative value chooses a random seed.
      stop_sequence: strings that end the answer.
      trim_stop: remove the stop string from the answer.
      singleline: end the answer before its first line break.
      bypass_eos: continue after the EOS token.
      ban_eos_token: never sample the EOS token.
      replace_instruct_placeholders: false keeps the placeholders in prompt, memory and stop
        strings.
      logprobs: report log-probabilities.
      grammar: GBNF grammar or JSON schema of the answer.
      model: `MODEL:NAME` selects an adapter; every other name has no effect, as clients send any.
      lora: name of the adapter; null uses the model without one.
      rep_pen: repetition penalty; the largest of the fields for it applies.
      rep_pen_range: number of last tokens that the repetition penalty covers; 0 disables the
        penalties.
      rep_pen_slope: slope of the repetition penalty over its range.
      tfs: mass of tail-free sampling; 1 disables it.
      nsigma: standard deviations below the largest logit that are kept; 0 disables it.
      sampler_order: order of the sampling steps, by KoboldAI's codes.
      banned_tokens: strings that are never generated.
      custom_token_bans: token ids that are never generated.
      logit_bias: numbers added to the logits of tokens, named by id.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: ([], {}, "", False, 0) for name in ("images", "audio", "adapter")
    }
    ignored: ClassVar[tuple[str, ...]] = (
        "grammar_retain_state",
        "render_special",
        "quiet",
        "reasoning_effort",
        "using_openai_tools",
    )

    options: ClassVar[Mapping[str, Option]] = {
        **SamplingOptions.options,
        "n": Option("n"),
        "max_length": Option("max_new_tokens"),
        "bypass_eos": Option("ignore_eos"),
        "rep_pen": Option("repetition_penalty", off=1.0),
        "rep_pen_range": Option("repetition_range", 0),
        "rep_pen_slope": Option("repetition_slope"),
        "tfs": Option("tail_free", high=1.0),
        "nsigma": Option("top_n_sigma", 0.0),
    }

    prompt: str | None = None
    memory: str | None = None
    n: Annotated[int, Integer, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_context_length: Size | None = None
    max_length: Size | None = Field(
        None, validation_alias=AliasChoices("max_length", "max_new_tokens")
    )
    genkey: Key | None = None
    sampler_seed: Seed | None = Field(None, validation_alias=AliasChoices("sampler_seed", "seed"))
    stop_sequence: Texts | None = Field(
        None, validation_alias=AliasChoices("stop_sequence", "stop")
    )
    trim_stop: bool | None = None
    singleline: bool | None = None
    bypass_eos: bool | None = None
    ban_eos_token: bool | None = Field(
        None, validation_alias=AliasChoices("ban_eos_token", "use_default_badwordsids")
    )
    replace_instruct_placeholders: bool | None = None
    logprobs: bool | None = None
    grammar: str | None = None
    model: Any = None
    lora: str | None = None

    rep_pen: AtLeastZero | None = None
    rep_pen_range: Range | None = None
    rep_pen_slope: AtLeastZero | None = None
    tfs: AtLeastZero | None = None
    nsigma: Number | None = None
    sampler_order: Annotated[list[Annotated[int, Integer]], Field(max_length=7)] | None = None

    banned_tokens: Bans | None = Field(
        None, validation_alias=AliasChoices("banned_tokens", "banned_strings")
    )
    custom_token_bans: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_to_ids)] | None
    ) = None
    logit_bias: (
        Annotated[dict[str, Number | None], BeforeValidator(lambda biases: biases or {})] | None
    ) = None

    def constraint(self) -> Constraint | None:
        """Returns the grammar of the answer, or None."""
        grammar = (self.grammar or "").strip()
        if not grammar:
            return None
        return Constraint("json_schema" if grammar.startswith("{") else "gbnf", grammar)

    def settings(self, base: GenerationSection) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`.

        Values that disable a step in KoboldCpp disable it here, and parameters of a disabled step
        are omitted. Settings without a KoboldCpp name keep their names. With the entropy router,
        the KoboldCpp fields for temperature and truncation are ignored, but those for penalties
        apply.

        Args:
          base: the generation settings of the server.
        """
        extra = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if name in REQUEST_KEYS.keys() - ALIASES
        }
        strategy = extra.get("strategy", base.strategy)
        found = self.sampling_settings(base, strategy)
        if found.get("repetition_slope") == 1:
            found["repetition_slope"] = 0.0  # all tokens of the range equally
        found.setdefault("max_new_tokens", default_length(base))
        if self.sampler_seed is not None:
            found["seed"] = self.sampler_seed % 2**32 if self.sampler_seed > 0 else None
        if self.sampler_order and strategy != "entropy":
            found |= {"preset": "koboldcpp", "sampler_order": list(self.sampler_order)}
            found = STEPS_OFF | found
        return found | extra

    @property
    def disables_penalties(self) -> bool:
        return self.rep_pen_range == 0

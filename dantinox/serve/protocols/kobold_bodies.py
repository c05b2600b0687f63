"""Request bodies of KoboldAI and KoboldCpp, and their conversion to settings.

Source: KoboldCpp's API documentation, and requests of Kobold Lite and SillyTavern.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import MAX_BAN_LENGTH
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.config.sampling_steps import is_digits
from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.errors import RequestError
from dantinox.serve.operations.limits import MAX_SAMPLES
from dantinox.serve.protocols.bodies import StrictBody, parse_json, to_integer

MAX_ALTERNATIVES = 5  # maximum number of alternatives reported with a token
MAX_BANS = 1024  # number of banned strings
MAX_KEY_LENGTH = 256
FILTERS_OFF: dict[str, object] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_a": 0.0,
    "tail_free": 1.0,
    "typical": 1.0,
    "top_n_sigma": 0.0,
    "min_k": -1.0,
    "p_less": "off",
    "top_h": 1.0,
    "xtc_probability": 0.0,
    "skew": 0.0,
    "adaptive_target": -1.0,
}
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


def _to_texts(value: Any) -> Any:
    """Converts a string or list to a tuple of strings. Drops empty strings, which come from unfilled forms."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(text for text in value if text not in ("", None)) if isinstance(value, list) else value


def to_breakers(value: Any) -> Any:
    """Converts as `_to_texts` does; a string may also contain a JSON list, as SillyTavern sends it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value.encode())
        except RequestError:  # its message is about a body
            raise ValueError("must be a string, a list of strings, or a string with a JSON list") from None
    return _to_texts(value)


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
        raise ValueError(f"must have at most {MAX_BANS} strings of at most {MAX_BAN_LENGTH} characters")
    return texts


Integer = BeforeValidator(to_integer)
Size = Annotated[int, Integer, Field(ge=1, lt=2**31)]
Range = Annotated[int, Integer, Field(ge=-1, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-(2.0**32), le=2.0**32)]
AtLeastZero = Annotated[float, Field(allow_inf_nan=False, ge=0, le=2.0**32)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_to_texts)]
Bans = Annotated[tuple[str, ...], BeforeValidator(_to_texts), AfterValidator(_check_bans)]
Key = Annotated[str, Field(max_length=MAX_KEY_LENGTH)]


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


class GenerateBody(StrictBody):
    """The body of `/generate` and `/generate/stream`. Every key of `generation` and `router` is an additional field.

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
      bypass_eos: continue after the EOS token.
      ban_eos_token: never sample the EOS token.
      replace_instruct_placeholders: false keeps the placeholders in prompt, memory and stop strings.
      logprobs: report log-probabilities.
      grammar: GBNF grammar or JSON schema of the answer.
      model: `MODEL:NAME` selects an adapter; every other name has no effect, as clients send any.
      lora: name of the adapter; null uses the model without one.
      rep_pen, repeat_penalty, repetition_penalty: repetition penalty; the largest of the three applies.
      rep_pen_range: number of last tokens that the repetition penalty covers; 0 disables the penalties.
      rep_pen_slope: slope of the repetition penalty over its range.
      presence_penalty: subtracted from the logit of every token in prompt and answer.
      temperature: temperature; 0 is greedy.
      dynatemp_range: the temperature varies by this much around its value.
      dynatemp_exponent: exponent of the dynamic temperature.
      smoothing_factor: quadratic smoothing of the logits; 0 disables it.
      smoothing_curve: curve of the smoothing.
      top_k: number of most likely tokens kept; 0 disables it.
      top_p: probability mass kept; 1 disables it.
      top_a: threshold relative to the square of the largest probability; 0 disables it.
      min_p: threshold relative to the largest probability; 0 disables it.
      typical: mass of locally typical sampling; 1 disables it.
      tfs: mass of tail-free sampling; 1 disables it.
      nsigma: standard deviations below the largest logit that are kept; 0 disables it.
      mirostat: version of mirostat; 0 disables it.
      mirostat_tau: target surprise of mirostat.
      mirostat_eta: learning rate of mirostat.
      dry_multiplier: strength of DRY; 0 disables it.
      dry_base: base of the DRY penalty.
      dry_allowed_length: longest repeated sequence without a DRY penalty.
      dry_penalty_last_n: number of last tokens that DRY reads; 0 or -1 reads all.
      dry_sequence_breakers: strings that interrupt a repeated sequence.
      xtc_probability: probability of excluding top choices; 0 disables it.
      xtc_threshold: probability above which XTC excludes tokens.
      adaptive_target: probability that adaptive-p favors; 0 or a negative value disables it.
      adaptive_decay: weight of the earlier tokens in the average of adaptive-p.
      sampler_order: order of the sampling steps, by KoboldAI's codes.
      guidance_scale: scale of classifier-free guidance; 1 disables it.
      negative_prompt: text that stands for the whole prompt in the guidance; empty: the last token of the prompt.
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

    prompt: str | None = None
    memory: str | None = None
    n: Annotated[int, Integer, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_context_length: Size | None = None
    max_length: Size | None = Field(None, validation_alias=AliasChoices("max_length", "max_new_tokens"))
    genkey: Key | None = None
    sampler_seed: Annotated[int, Integer, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, validation_alias=AliasChoices("sampler_seed", "seed")
    )
    stop_sequence: Texts | None = Field(None, validation_alias=AliasChoices("stop_sequence", "stop"))
    trim_stop: bool | None = None
    bypass_eos: bool | None = None
    ban_eos_token: bool | None = Field(None, validation_alias=AliasChoices("ban_eos_token", "use_default_badwordsids"))
    replace_instruct_placeholders: bool | None = None
    logprobs: bool | None = None
    grammar: str | None = None
    model: Any = None
    lora: str | None = None

    rep_pen: AtLeastZero | None = None
    repeat_penalty: AtLeastZero | None = None
    repetition_penalty: AtLeastZero | None = None
    rep_pen_range: Range | None = None
    rep_pen_slope: AtLeastZero | None = None
    presence_penalty: Number | None = None
    temperature: AtLeastZero | None = None
    dynatemp_range: Number | None = None
    dynatemp_exponent: AtLeastZero | None = None
    smoothing_factor: Number | None = None
    smoothing_curve: Number | None = None
    top_k: Annotated[int, Integer, Field(ge=-(2**31), lt=2**31)] | None = None
    top_p: AtLeastZero | None = None
    top_a: AtLeastZero | None = None
    min_p: AtLeastZero | None = None
    typical: AtLeastZero | None = Field(None, validation_alias=AliasChoices("typical", "typical_p"))
    tfs: AtLeastZero | None = None
    nsigma: Number | None = None
    mirostat: Annotated[int, Integer, Field(ge=-1, le=2)] | None = None
    mirostat_tau: AtLeastZero | None = None
    mirostat_eta: AtLeastZero | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Annotated[int, Integer, Field(ge=0, lt=2**31)] | None = None
    dry_penalty_last_n: Range | None = None
    dry_sequence_breakers: Annotated[tuple[str, ...], BeforeValidator(to_breakers)] | None = None
    xtc_probability: AtLeastZero | None = None
    xtc_threshold: AtLeastZero | None = None
    adaptive_target: Number | None = None
    adaptive_decay: Number | None = None
    sampler_order: Annotated[list[Annotated[int, Integer]], Field(max_length=7)] | None = None

    guidance_scale: AtLeastZero | None = None
    negative_prompt: str | None = None

    banned_tokens: Bans | None = Field(None, validation_alias=AliasChoices("banned_tokens", "banned_strings"))
    custom_token_bans: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_to_ids)] | None = None
    logit_bias: Annotated[dict[str, Number | None], BeforeValidator(lambda biases: biases or {})] | None = None

    def constraint(self) -> Constraint | None:
        """Returns the grammar of the answer, or None."""
        grammar = (self.grammar or "").strip()
        if not grammar:
            return None
        return Constraint("json_schema" if grammar.startswith("{") else "gbnf", grammar)

    def settings(self, base: GenerationSection) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`.

        Values that disable a step in KoboldCpp disable it here, and parameters of a disabled step are omitted. Settings without
        a KoboldCpp name keep their names. With the entropy router, the KoboldCpp fields for temperature and truncation are
        ignored, but those for penalties apply.

        Args:
          base: the generation settings of the server.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if name in REQUEST_KEYS.keys() - ALIASES}
        found = self._limits() | self._penalties(base) | self._dry(base) | self._guidance(base)
        if extra.get("strategy", base.strategy) != "entropy":
            found |= self._temperature_settings(base) | self._filters(base)
        return found | extra

    def _limits(self) -> dict[str, object]:
        found: dict[str, object] = {"n": self.n, "max_new_tokens": self.max_length, "ignore_eos": self.bypass_eos}
        found = {name: value for name, value in found.items() if value is not None}
        if self.sampler_seed is not None:
            found["seed"] = self.sampler_seed % 2**32 if self.sampler_seed > 0 else None
        return found

    def _penalties(self, base: GenerationSection) -> dict[str, object]:
        found: dict[str, Any] = {}
        penalties = [p for p in (self.rep_pen, self.repeat_penalty, self.repetition_penalty) if p is not None]
        if penalties:
            found["repetition_penalty"] = max(penalties) or 1.0
        if self.presence_penalty is not None:
            found["presence_penalty"] = self.presence_penalty
        if self.rep_pen_range == 0:  # this disables the penalties in KoboldCpp, but means all tokens in DantinoX
            return {"repetition_penalty": 1.0, "presence_penalty": 0.0}
        if found.get("presence_penalty"):
            found["presence_scope"] = "all"
        if found.get("repetition_penalty", base.repetition_penalty) == 1:
            return found
        if self.rep_pen_range is not None:
            found["repetition_range"] = max(self.rep_pen_range, 0)
        if self.rep_pen_slope is not None and found.get("repetition_range", base.repetition_range) > 1:
            found["repetition_slope"] = 0.0 if self.rep_pen_slope == 1 else self.rep_pen_slope
        return found

    def _guidance(self, base: GenerationSection) -> dict[str, object]:
        found: dict[str, object] = {} if self.guidance_scale is None else {"guidance_scale": self.guidance_scale}
        if self.negative_prompt is not None and found.get("guidance_scale", base.guidance_scale) != 1:
            found["negative_prompt"] = self.negative_prompt
        return found

    def _dry(self, base: GenerationSection) -> dict[str, object]:
        multiplier = base.dry_multiplier if self.dry_multiplier is None else self.dry_multiplier
        if multiplier <= 0 or (self.dry_base is not None and self.dry_base <= 0):
            return {} if self.dry_multiplier is self.dry_base is None else {"dry_multiplier": 0.0}
        details = {
            "dry_multiplier": self.dry_multiplier,
            "dry_base": self.dry_base,
            "dry_allowed_length": None if self.dry_allowed_length is None else max(self.dry_allowed_length, 1),
            "dry_range": None if self.dry_penalty_last_n is None else max(self.dry_penalty_last_n, 0),
            "dry_breakers": None if self.dry_sequence_breakers is None else list(self.dry_sequence_breakers),
        }
        return {name: value for name, value in details.items() if value is not None}

    def _temperature_settings(self, base: GenerationSection) -> dict[str, object]:
        """Returns the settings of the temperature, fixed or dynamic, and of smoothing."""
        found: dict[str, Any] = {}
        mirostat = self._mirostat_version(base)
        if self.dynatemp_range and not mirostat:
            middle, width = base.temperature if self.temperature is None else self.temperature, abs(self.dynatemp_range)
            found |= {"temperature": 1.0, "dynatemp_low": max(middle - width, 0.0), "dynatemp_high": middle + width}
            found |= {} if self.dynatemp_exponent is None else {"dynatemp_exponent": self.dynatemp_exponent}
        elif self.temperature is not None or self.dynatemp_range is not None or mirostat:
            found |= {"dynatemp_low": 1.0, "dynatemp_high": 1.0}
            found |= {} if self.temperature is None else {"temperature": self.temperature}
        if found.get("temperature"):
            found["greedy"] = False  # a temperature overrides greedy decoding of the server's settings
        smoothing = base.smoothing_factor if self.smoothing_factor is None else max(self.smoothing_factor, 0.0)
        if self.smoothing_factor is not None:
            found["smoothing_factor"] = smoothing
        if self.smoothing_curve is not None and smoothing > 0:
            found["smoothing_curve"] = min(max(self.smoothing_curve, 1.0), 3.0)
        return found

    def _mirostat_version(self, base: GenerationSection) -> int:
        """Returns the version of mirostat, 0 if it is off."""
        return int(base.mirostat if self.mirostat is None else max(self.mirostat, 0))

    def _filters(self, base: GenerationSection) -> dict[str, object]:
        """Returns the settings of the truncation steps and their order. Mirostat disables the other steps, as in KoboldCpp."""
        found: dict[str, Any] = {}
        if self.sampler_order:
            found |= {"preset": "koboldcpp", "sampler_order": list(self.sampler_order), **STEPS_OFF}
        if self.mirostat is not None:
            found["mirostat"] = self._mirostat_version(base)
        if self._mirostat_version(base):
            details = {"mirostat_tau": self.mirostat_tau, "mirostat_eta": self.mirostat_eta}
            return found | FILTERS_OFF | {name: value for name, value in details.items() if value is not None}
        shares = {"top_p": self.top_p, "min_p": self.min_p, "typical": self.typical, "tail_free": self.tfs}
        shares |= {"xtc_probability": self.xtc_probability}
        found |= {name: min(value, 1.0) for name, value in shares.items() if value is not None}
        if self.top_k is not None:
            found["top_k"] = max(self.top_k, 0)
        if self.top_a is not None:
            found["top_a"] = self.top_a
        if self.nsigma is not None:
            found["top_n_sigma"] = max(self.nsigma, 0.0)
        if self.xtc_threshold is not None and found.get("xtc_probability", base.xtc_probability) > 0:
            found["xtc_threshold"] = min(self.xtc_threshold, 1.0)
        if self.adaptive_target is not None:
            found["adaptive_target"] = min(self.adaptive_target, 1.0) if self.adaptive_target > 0 else -1.0
        if self.adaptive_decay is not None and found.get("adaptive_target", base.adaptive_target) >= 0:
            found["adaptive_decay"] = min(max(self.adaptive_decay, 0.0), 0.99)
        return found

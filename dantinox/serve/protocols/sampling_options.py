"""Sampling options that KoboldCpp, llama.cpp and Ollama share, and their conversion to settings.

A body has a table `options`: its field → the setting, with the limits of its value. Clients of
these projects send every option with each request, also those of steps that are off, and values
outside of the ranges of the settings. So a value becomes the nearest one within its limits, and an
option of a step that is off is left out.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.sampling_steps import PENALTY_STEPS, SETTINGS, STEPS
from dantinox.config.sections import NEEDS
from dantinox.serve.errors import RequestError
from dantinox.serve.protocols.bodies import StrictBody, parse_json, to_integer, to_tuple

# The settings that mirostat disables, as in KoboldCpp, with the values that disable them.
FILTERS_OFF = {"top_k": 0, "top_p": 1.0} | {
    name: SETTINGS[name].default
    for name in (
        "min_p", "top_a", "tail_free", "typical", "top_n_sigma", "min_k", "p_less", "top_h",
        "xtc_probability", "skew",
        "adaptive_target",
    )
}  # fmt: skip
# Settings without effect with the entropy router, which chooses temperature and truncation itself.
ROUTED = {"greedy"} | {
    key
    for name, step in STEPS.items()
    if name not in PENALTY_STEPS
    for key in (*step.on, *step.settings)
}


class Option(NamedTuple):
    """The setting of an option, and the limits of its value.

    Attributes:
      off: the value of the setting that stands for values of the option ≤ 0; None: there is none.
    """

    setting: str
    low: float = -math.inf
    high: float = math.inf
    off: float | None = None

    def value(self, given: Any) -> Any:
        """Returns the value of the setting for a value of the option."""
        if not isinstance(given, int | float):
            return [*given] if isinstance(given, tuple) else given
        if self.off is not None and given <= 0:
            return self.off
        return min(max(given, self.low), self.high)


def _to_texts(value: Any) -> Any:
    """Converts a string or list to a tuple of strings. Drops empty strings, which come from
    unfilled forms.
    """
    texts = to_tuple(value)
    return (
        tuple(text for text in texts if text not in ("", None))
        if isinstance(texts, tuple)
        else texts
    )


def to_breakers(value: Any) -> Any:
    """Converts as `Texts` does; a string may also contain a JSON list, as SillyTavern sends it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value.encode())
        except RequestError:  # its message is about a body
            raise ValueError(
                "must be a string, a list of strings, or a string with a JSON list"
            ) from None
    return _to_texts(value)


Integer = BeforeValidator(to_integer)
Range = Annotated[int, Integer, Field(ge=-1, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-(2.0**32), le=2.0**32)]
AtLeastZero = Annotated[float, Field(allow_inf_nan=False, ge=0, le=2.0**32)]
Seed = Annotated[int, Integer, Field(ge=-(2**63), lt=2**63)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_to_texts)]


class SamplingOptions(StrictBody):
    """Sampling options that KoboldCpp and llama.cpp have under the same names.

    Attributes:
      repeat_penalty, repetition_penalty: repetition penalty; the largest of the fields for it
        applies, and 0 disables it.
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
      mirostat: version of mirostat; 0 disables it.
      mirostat_tau: target surprise of mirostat.
      mirostat_eta: learning rate of mirostat.
      dry_multiplier: strength of DRY; 0 disables it.
      dry_base: base of the DRY penalty.
      dry_allowed_length: longest repeated sequence without a DRY penalty.
      dry_penalty_last_n: number of last tokens that DRY reads; -1 reads all.
      dry_sequence_breakers: strings that interrupt a repeated sequence.
      xtc_probability: probability of excluding top choices; 0 disables it.
      xtc_threshold: probability above which XTC excludes tokens.
      adaptive_target: probability that adaptive-p favors; 0 or a negative value disables it.
      adaptive_decay: weight of the earlier tokens in the average of adaptive-p.
      guidance_scale: scale of classifier-free guidance; 1 disables it.
      negative_prompt: text that stands for the whole prompt in the guidance; empty: the last token
        of the prompt.
    """

    options: ClassVar[Mapping[str, Option]] = {
        "repeat_penalty": Option("repetition_penalty", off=1.0),
        "repetition_penalty": Option("repetition_penalty", off=1.0),
        "presence_penalty": Option("presence_penalty"),
        "dynatemp_exponent": Option("dynatemp_exponent"),
        "smoothing_factor": Option("smoothing_factor", 0.0),
        "smoothing_curve": Option("smoothing_curve", 1.0, 3.0),
        "top_k": Option("top_k", 0),
        "top_p": Option("top_p", high=1.0),
        "top_a": Option("top_a"),
        "min_p": Option("min_p", high=1.0),
        "typical": Option("typical", high=1.0),
        "mirostat": Option("mirostat", 0),
        "mirostat_tau": Option("mirostat_tau"),
        "mirostat_eta": Option("mirostat_eta"),
        "dry_multiplier": Option("dry_multiplier", 0.0),
        "dry_base": Option("dry_base"),
        "dry_allowed_length": Option("dry_allowed_length", 1),
        "dry_penalty_last_n": Option("dry_range", 0),
        "dry_sequence_breakers": Option("dry_breakers"),
        "xtc_probability": Option("xtc_probability", high=1.0),
        "xtc_threshold": Option("xtc_threshold", high=1.0),
        "adaptive_target": Option("adaptive_target", high=1.0, off=-1.0),
        "adaptive_decay": Option("adaptive_decay", 0.0, 0.99),
        "guidance_scale": Option("guidance_scale"),
        "negative_prompt": Option("negative_prompt"),
    }

    repeat_penalty: AtLeastZero | None = None
    repetition_penalty: AtLeastZero | None = None
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
    guidance_scale: AtLeastZero | None = None
    negative_prompt: str | None = None

    def sampling_settings(self, base: GenerationSection, strategy: object) -> dict[str, Any]:
        """Returns the settings of the options.

        With the entropy router, the options of temperature and truncation have no effect.

        Args:
          base: the generation settings of the server.
          strategy: the strategy of the request.
        """
        found = self._given()
        if self.disables_penalties:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        elif found.get("presence_penalty") or found.get("frequency_penalty"):
            found["presence_scope"] = "all"
        if self.disables_dry:
            found["dry_multiplier"] = 0.0
        found |= self._temperature(base, found)
        if found.get("mirostat", base.mirostat):
            found |= FILTERS_OFF
        if strategy == "entropy":
            found = {name: value for name, value in found.items() if name not in ROUTED}
        return without_inactive(found, base)

    @property
    def disables_penalties(self) -> bool:
        """Whether the option for the range is 0, which disables the penalties; the setting would
        then cover all tokens.
        """
        return False

    @property
    def disables_dry(self) -> bool:
        """Whether options other than its multiplier disable DRY."""
        return self.dry_base is not None and self.dry_base <= 0

    def _given(self) -> dict[str, Any]:
        """Returns the settings of the fields in the request. Of several fields with one setting,
        the largest value applies.
        """
        found: dict[str, Any] = {}
        for field, option in self.options.items():
            given = getattr(self, field)
            if given is not None:
                value = option.value(given)
                if option.setting in found:
                    value = max(value, found[option.setting])
                found[option.setting] = value
        return found

    def _temperature(self, base: GenerationSection, found: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of the temperature, which is fixed with mirostat."""
        mirostat = found.get("mirostat", base.mirostat)
        given = {} if self.temperature is None else {"temperature": self.temperature}
        if self.dynatemp_range and not mirostat:
            middle = given.get("temperature", base.temperature)
            width = abs(self.dynatemp_range)
            given = {
                "temperature": 1.0,
                "dynatemp_low": max(middle - width, 0.0),
                "dynatemp_high": middle + width,
            }
        elif given or self.dynatemp_range is not None or mirostat:
            given |= {"dynatemp_low": 1.0, "dynatemp_high": 1.0}
        if given.get("temperature"):
            # A temperature overrides greedy decoding of the server's settings.
            given["greedy"] = False
        return given


def given_settings(**given: Any) -> dict[str, object]:
    """Returns the settings that a request has. A temperature overrides greedy decoding of the
    server's settings.
    """
    found: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if found.get("temperature"):
        found["greedy"] = False
    return found


def without_inactive(found: Mapping[str, Any], base: GenerationSection) -> dict[str, Any]:
    """Returns settings of a request without those whose prerequisites are not met."""

    def value_of(key: str) -> Any:
        name = key.removeprefix("generation.")
        return found[name] if name in found else getattr(base, name)

    return {
        name: value
        for name, value in found.items()
        if all(need.met(value_of) for need in NEEDS[f"generation.{name}"])
    }

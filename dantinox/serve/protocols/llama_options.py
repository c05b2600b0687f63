"""Sampling options of llama.cpp, which Ollama shares, and their conversion to settings."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import order_names, section_order
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.files import escape_name, quote
from dantinox.serve.errors import RequestError
from dantinox.serve.protocols import kobold_bodies
from dantinox.serve.protocols.bodies import StrictBody, to_integer, validate_body

log = logging.getLogger("dantinox.serve")

# Options that KoboldCpp has under the same names and with the same values that disable a step.
SHARED = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "dynatemp_range",
    "dynatemp_exponent", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_target", "adaptive_decay",
)  # fmt: skip
KNOWN_OPTIONS = (*SHARED, *REQUEST_KEYS)
LAST_STEP = "adaptive_p"  # it needs the token that is drawn directly after it
# Sampler of llama.cpp → its steps, and the settings that disable it.
SAMPLERS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "penalties": (
        ("repetition_penalty", "presence_frequency_penalty"),
        {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ),
    "dry": (("dry",), {"dry_multiplier": 0.0}),
    "top_n_sigma": (("top_n_sigma",), {"top_n_sigma": 0.0}),
    "top_k": (("top_k",), {"top_k": 0}),
    "typ_p": (("typical",), {"typical": 1.0}),
    "tfs_z": (("tail_free",), {"tail_free": 1.0}),
    "top_p": (("top_p",), {"top_p": 1.0}),
    "min_p": (("min_p",), {"min_p": 0.0}),
    "xtc": (("xtc",), {"xtc_probability": 0.0}),
    "temperature": (("dynamic_temperature", "temperature"), {"temperature": 1.0, "dynatemp_low": 1.0, "dynatemp_high": 1.0}),
    "adaptive_p": (("adaptive_p",), {"adaptive_target": -1.0}),
}
# Name or alias of a sampler, in lower case → the sampler.
SAMPLER_NAMES = {
    **{variant: name for name in SAMPLERS for variant in (name, name.replace("_", "-"), name.replace("_", ""))},
    "typical_p": "typ_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
    "temp": "temperature",
}
# The character of each sampler in llama.cpp's string form of the list.
SAMPLER_CHARACTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p", "x": "xtc",
    "t": "temperature", "a": "adaptive_p",
}  # fmt: skip

# Option → the setting whose value it has in a response, for options that need no conversion.
REPORTED_OPTIONS = {
    "n_predict": "max_new_tokens", "dynatemp_exponent": "dynatemp_exponent", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "typical_p": "typical", "tfs_z": "tail_free", "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability", "xtc_threshold": "xtc_threshold", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty", "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base", "dry_allowed_length": "dry_allowed_length", "mirostat": "mirostat", "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta", "adaptive_target": "adaptive_target", "adaptive_decay": "adaptive_decay",
    "ignore_eos": "ignore_eos",
}  # fmt: skip
RANDOM_SEED = 2**32 - 1  # llama.cpp reports this number for a random seed

Integer = BeforeValidator(to_integer)
Number = Annotated[float, Field(allow_inf_nan=False)]


def _to_texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class LlamaOptions(StrictBody):
    """Sampling options. The options of `SHARED` and every key of `generation` and `router` are additional options.

    Attributes:
      num_predict: maximum number of new tokens; -1 and -2: as many as fit into the context.
      tfs_z: mass of tail-free sampling; 1 disables it.
      top_n_sigma: standard deviations below the largest logit that are kept; 0 and below disable it.
      repeat_last_n: number of last tokens that the penalties cover; 0 disables them, -1 covers all.
      frequency_penalty: number to subtract for each time that a token occurs in prompt and answer.
      seed: seed of the sampler; a negative value chooses a random seed.
      stop: strings that end the answer.
    """

    num_predict: Annotated[int, Integer, Field(ge=-2, lt=2**31)] | None = Field(
        None, validation_alias=AliasChoices("num_predict", "n_predict")
    )
    tfs_z: Annotated[Number, Field(ge=0)] | None = None
    top_n_sigma: Number | None = None
    repeat_last_n: Annotated[int, Integer, Field(ge=-1, lt=2**31)] | None = None
    frequency_penalty: Number | None = None
    seed: Annotated[int, Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_to_texts)] | None = None

    def settings(self, base: GenerationSection, context: int) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`. Parameters of a disabled step are omitted.

        Args:
          base: the generation settings of the server.
          context: the context of the server, the limit for `num_predict: -1`.

        Raises:
          RequestError: 400, an option has a wrong type or value.
        """
        extra = self.model_extra or {}
        if extra.get("n", 1) != 1:
            raise RequestError(400, f"n must be 1 in this API, got {quote(extra['n'])}", param="n")
        sampling: dict[str, Any] = {name: extra[name] for name in KNOWN_OPTIONS if name in extra}
        if "typical_p" in sampling:
            sampling.pop("typical", None)
        sampling |= {"tfs": self.tfs_z, "nsigma": self.top_n_sigma, "rep_pen_range": self.repeat_last_n}
        shared = validate_body(kobold_bodies.GenerateBody, sampling)
        found = shared.settings(base)
        if shared.dry_penalty_last_n == 0 or (shared.dry_base is not None and shared.dry_base < 1):  # unlike in KoboldCpp
            found = {name: value for name, value in found.items() if not name.startswith("dry_")} | {"dry_multiplier": 0.0}
        if self.frequency_penalty is not None:
            disabled = self.repeat_last_n == 0
            found["frequency_penalty"] = 0.0 if disabled else self.frequency_penalty
            found |= {"presence_scope": "all"} if self.frequency_penalty and not disabled else {}
        limits: dict[str, Any] = {
            "max_new_tokens": context if self.num_predict is not None and self.num_predict < 0 else self.num_predict,
            "stop": None if self.stop is None else [text for text in self.stop if text],
        }
        found |= {name: value for name, value in limits.items() if value is not None}
        if self.seed is not None:
            found["seed"] = self.seed % 2**32 if self.seed >= 0 else None
        return found


def sampler_settings(names: Sequence[str] | str) -> dict[str, object]:
    """Returns the settings for a list of llama.cpp's samplers: their order, with the samplers that are not listed disabled.

    Unknown names have no effect, and neither has the repetition of a sampler; both are logged. Steps that llama.cpp does not
    have follow in their usual order, and `adaptive_p` is always the last.

    Args:
      names: the names of the samplers, or a string with a character of `SAMPLER_CHARACTERS` for each.
    """
    listed: list[str] = []
    for name in names:
        found = SAMPLER_CHARACTERS.get(name) if isinstance(names, str) else SAMPLER_NAMES.get(name.lower())
        if found is None or found in listed:
            reason = "unknown" if found is None else "listed twice"
            log.warning("a request has the sampler %s in samplers, which is %s and has no effect", escape_name(name), reason)
        else:
            listed.append(found)
    order = [step for name in listed for step in SAMPLERS[name][0] if step != LAST_STEP]
    order += [name for name in order_names() if name not in (*order, "mirostat", LAST_STEP)]
    disabled = {key: value for name, (_, off) in SAMPLERS.items() if name not in listed for key, value in off.items()}
    return {"sampler_order": [*order, LAST_STEP], **disabled}


def reported_options(section: GenerationSection) -> dict[str, Any]:
    """Returns the options that apply to a request, by llama.cpp's names and with its values, from the settings."""
    low, high = section.dynatemp_low, section.dynatemp_high
    order = section_order(section)
    placed = {name: order.index(steps[0]) for name, (steps, _) in SAMPLERS.items() if steps[0] in order}
    return {
        **{name: getattr(section, setting) for name, setting in REPORTED_OPTIONS.items()},
        "seed": RANDOM_SEED if section.seed is None else section.seed,
        "temperature": 0.0 if section.greedy else section.temperature * (low + high) / 2,
        "dynatemp_range": (high - low) / 2,
        "repeat_last_n": section.repetition_range or -1,
        "dry_penalty_last_n": section.dry_range or -1,
        "dry_sequence_breakers": [*section.dry_breakers],
        "stop": [*section.stop],
        "samplers": sorted(placed, key=lambda name: placed[name]),
    }

"""Sampling options of llama.cpp, which Ollama shares, and their conversion to settings."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import order_names, section_order
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.files import escape_name, quote
from dantinox.serve.errors import RequestError
from dantinox.serve.protocols.bodies import to_tuple
from dantinox.serve.protocols.sampling_options import (
    AtLeastZero,
    Integer,
    Number,
    Option,
    Range,
    SamplingOptions,
    Seed,
)

log = logging.getLogger("dantinox.serve")

KNOWN_OPTIONS = tuple(REQUEST_KEYS)
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
    "temperature": (
        ("dynamic_temperature", "temperature"),
        {"temperature": 1.0, "dynatemp_low": 1.0, "dynatemp_high": 1.0},
    ),
    "adaptive_p": (("adaptive_p",), {"adaptive_target": -1.0}),
}
# Name or alias of a sampler, in lower case → the sampler.
SAMPLER_NAMES = {
    **{
        variant: name
        for name in SAMPLERS
        for variant in (name, name.replace("_", "-"), name.replace("_", ""))
    },
    "typical_p": "typ_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
    "temp": "temperature",
}
# The character of each sampler in llama.cpp's string form of the list.
SAMPLER_CHARACTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature", "a": "adaptive_p",
}  # fmt: skip

# Option → the setting whose value it has in a response, for options that need no conversion.
REPORTED_OPTIONS = {
    "n_predict": "max_new_tokens", "dynatemp_exponent": "dynatemp_exponent", "top_k": "top_k",
    "top_p": "top_p", "min_p": "min_p", "typical_p": "typical", "tfs_z": "tail_free",
    "top_n_sigma": "top_n_sigma", "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier", "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length", "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
    "adaptive_target": "adaptive_target", "adaptive_decay": "adaptive_decay",
    "ignore_eos": "ignore_eos",
}  # fmt: skip
RANDOM_SEED = 2**32 - 1  # llama.cpp reports this number for a random seed


class LlamaOptions(SamplingOptions):
    """Sampling options. Every key of `generation` and `router` is an additional option.

    Attributes:
      num_predict: maximum number of new tokens; -1 and -2: as many as fit into the context.
      tfs_z: mass of tail-free sampling; 1 disables it.
      top_n_sigma: standard deviations below the largest logit that are kept; 0 and below disable
        it.
      repeat_last_n: number of last tokens that the penalties cover; 0 disables them, -1 covers all.
      frequency_penalty: number to subtract for each time that a token occurs in prompt and answer.
      seed: seed of the sampler; a negative value chooses a random seed.
      stop: strings that end the answer.
    """

    options: ClassVar[Mapping[str, Option]] = {
        **SamplingOptions.options,
        "tfs_z": Option("tail_free", high=1.0),
        "top_n_sigma": Option("top_n_sigma", 0.0),
        "repeat_last_n": Option("repetition_range", 0),
        "frequency_penalty": Option("frequency_penalty"),
    }

    num_predict: Annotated[int, Integer, Field(ge=-2, lt=2**31)] | None = Field(
        None, validation_alias=AliasChoices("num_predict", "n_predict")
    )
    typical: AtLeastZero | None = Field(None, validation_alias=AliasChoices("typical_p", "typical"))
    tfs_z: AtLeastZero | None = None
    top_n_sigma: Number | None = None
    repeat_last_n: Range | None = None
    frequency_penalty: Number | None = None
    seed: Seed | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] | None = None

    def settings(self, base: GenerationSection, context: int) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`. Parameters of a
        disabled step are omitted.

        Args:
          base: the generation settings of the server.
          context: the context of the server, the limit for `num_predict: -1`.

        Raises:
          RequestError: 400, `n` is not 1.
        """
        extra = self.model_extra or {}
        if extra.get("n", 1) != 1:
            raise RequestError(400, f"n must be 1 in this API, got {quote(extra['n'])}", param="n")
        names = REQUEST_KEYS.keys() - type(self).model_fields.keys()
        known = {
            name: value for name, value in extra.items() if name in names and value is not None
        }
        found = self.sampling_settings(base, known.get("strategy", base.strategy)) | known
        if self.num_predict is not None:
            found["max_new_tokens"] = context if self.num_predict < 0 else self.num_predict
        if self.stop is not None:
            found["stop"] = [text for text in self.stop if text]
        if self.seed is not None:
            found["seed"] = self.seed % 2**32 if self.seed >= 0 else None
        return found

    @property
    def disables_penalties(self) -> bool:
        return self.repeat_last_n == 0

    @property
    def disables_dry(self) -> bool:
        return self.dry_penalty_last_n == 0 or (self.dry_base is not None and self.dry_base < 1)


def sampler_settings(names: Sequence[str] | str) -> dict[str, object]:
    """Returns the settings for a list of llama.cpp's samplers: their order, with the samplers that
    are not listed disabled.

    Unknown names have no effect, and neither has the repetition of a sampler; both are logged.
    Steps that llama.cpp does not have follow in their usual order, and `adaptive_p` is always the
    last.

    Args:
      names: the names of the samplers, or a string with a character of `SAMPLER_CHARACTERS` for
        each.
    """
    listed: list[str] = []
    for name in names:
        found = (
            SAMPLER_CHARACTERS.get(name)
            if isinstance(names, str)
            else SAMPLER_NAMES.get(name.lower())
        )
        if found is None or found in listed:
            reason = "unknown" if found is None else "listed twice"
            log.warning(
                "a request has the sampler %s in samplers, which is %s and has no effect",
                escape_name(name),
                reason,
            )
        else:
            listed.append(found)
    order = [step for name in listed for step in SAMPLERS[name][0] if step != LAST_STEP]
    order += [name for name in order_names() if name not in (*order, "mirostat", LAST_STEP)]
    disabled = {
        key: value
        for name, (_, off) in SAMPLERS.items()
        if name not in listed
        for key, value in off.items()
    }
    return {"sampler_order": [*order, LAST_STEP], **disabled}


def reported_options(section: GenerationSection) -> dict[str, Any]:
    """Returns the options that apply to a request, by llama.cpp's names and with its values, from
    the settings.
    """
    low = section.dynatemp_low
    high = section.dynatemp_high
    order = section_order(section)
    placed = {
        name: order.index(steps[0]) for name, (steps, _) in SAMPLERS.items() if steps[0] in order
    }
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

"""The table of sampling steps: the settings of each step, the condition that switches it on, and
its inputs. The presets of their order are in `config.generation_settings`.

Everything else about the steps is derived from `STEPS`: flags and help of the `generation` section,
prerequisites of settings, the default order, the compiled chain and its window, the parameters of
`process_logits`, and the table in docs/sampling_steps.md. To add a step, write a function in
`dantinox.sampling.steps` or `.history`, add its row and settings to this module, and add a section
to docs/sampling_steps.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter

from dantinox.config.base import (
    Count,
    CountOrZero,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    Section,
    as_tuple,
    field,
)
from dantinox.config.prerequisites import Condition, Needs, differs, equals, nonempty, nonzero

MIN_NORMAL_FLOAT = 1.1754943508222875e-38  # the smallest normal float32


def is_digits(text: str) -> bool:
    """Whether a string consists of ASCII digits, like a token id or a step code."""
    return text.isascii() and text.isdecimal()


def _as_biases(value: object) -> Any:
    """Converts `token=value` strings or a mapping to a mapping. Null becomes -inf, because JSON has
    no infinity.
    """
    pairs = _pairs(value)
    if pairs is None or not all(isinstance(token, str | int) for token, _ in pairs):
        return value
    return {str(token): bias for token, bias in pairs}


def _as_sequence_biases(value: object) -> Any:
    """Converts strings, pairs or a mapping to pairs of a sequence (string or token ids) and its
    bias.
    """
    pairs = _pairs(value)
    return (
        tuple((_as_sequence(words), bias) for words, bias in pairs) if pairs is not None else value
    )


def _pairs(value: object) -> list[tuple[Any, Any]] | None:
    """Converts a mapping, `name=bias` strings or pairs to (name, bias) pairs, with -inf for null;
    other types to None.
    """
    if isinstance(value, list | tuple):
        parts = [
            _split_at_last_equals_sign(item) if isinstance(item, str) else item for item in value
        ]
        if any(
            not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] == "" for pair in parts
        ):
            return None
        pairs = [(name, _number(bias)) for name, bias in parts]
    elif isinstance(value, Mapping):
        pairs = [*value.items()]
    else:
        return None
    return [(name, -math.inf if bias is None else bias) for name, bias in pairs]


def _split_at_last_equals_sign(text: str) -> tuple[str, str]:
    """Returns the parts of `name=bias`; the name is empty if there is no equals sign, and may
    itself contain one.
    """
    name, _, bias = text.rpartition("=")
    return name, bias


def _number(bias: Any) -> Any:
    """Converts a string to a number if it is one; the validation of the type reports other
    strings.
    """
    try:
        return float(bias) if isinstance(bias, str) else bias
    except ValueError:
        return bias


def _as_sequences(value: object) -> Any:
    """Converts a list of strings and token-id lists to a tuple."""
    items = as_tuple(value)
    return tuple(map(_as_sequence, items)) if isinstance(items, tuple) else items


def _as_sequence(item: Any) -> Any:
    """Converts a list of token ids to a tuple. A string stays a string."""
    return tuple(item) if isinstance(item, list) else item


Text = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(lt=math.inf)]
Sequence = Text | Annotated[tuple[CountOrZero, ...], Field(min_length=1)]
# Types of settings that are lists.
Tokens = Annotated[tuple[CountOrZero | Text, ...], BeforeValidator(as_tuple)]
Breakers = Annotated[tuple[str | CountOrZero, ...], BeforeValidator(as_tuple)]
Biases = Annotated[dict[str, Bias], BeforeValidator(_as_biases)]
Sequences = Annotated[tuple[Sequence, ...], BeforeValidator(_as_sequences)]
SequenceBiases = Annotated[tuple[tuple[Sequence, Bias], ...], BeforeValidator(_as_sequence_biases)]
WatermarkKeys = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    Field(max_length=32),
    BeforeValidator(as_tuple),
]
Scope = Literal["all", "output"]


@dataclass(frozen=True, eq=False)
class Step:
    """A sampling step, which is one row of the table.

    Attributes:
      on: the settings that switch the step on, each with a condition on its value.
      arguments: parameter of the step's function → the setting that provides it.
      reads: other parameters of the function, computed by `dantinox.sampling.chain.STEP_INPUTS`.
      indirect: settings that affect the step through `reads`.
      parameters: additional parameters in `process_logits`, for values that the decoder computes;
        name → type and default (None: required).
      group: `edit` and `penalty` steps also apply to greedy decoding. Edits run first and are not
        part of an order. The `last` steps run after all others, over whole rows, in the order of
        the table.
      keeps: `likeliest` if the step keeps the most likely tokens, `typical` if it keeps tokens by
        their surprise; empty for a step that is not such a filter.
      by_row: whether the step runs only for the rows of a batch that switch it on, because it is
        slow.
      function: the name of the step's function, if it differs from the step's name.
    """

    on: dict[str, Condition]
    arguments: dict[str, str] = dataclass_field(default_factory=dict)
    reads: tuple[str, ...] = ()
    indirect: tuple[str, ...] = ()
    parameters: dict[str, tuple[Any, Any]] = dataclass_field(default_factory=dict)
    group: Literal["edit", "penalty", "other", "last"] = "other"
    keeps: Literal["", "likeliest", "typical"] = ""
    by_row: bool = False
    function: str = ""

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that change what the step computes, which may include those that switch it
        on.
        """
        return (*self.arguments.values(), *self.indirect)


positive = Condition("is above 0", lambda value: value is not None and value > 0)
not_negative = Condition("is at least 0", lambda value: value >= 0)
below_one = Condition("is below 1", lambda value: value is not None and value < 1)
not_one = differs(1)


NEEDS_CHAIN = (Needs(("generation.strategy", "chain")),)
NEEDS_RANGE = (
    Needs(("generation.repetition_range", Condition("is above 1", lambda tokens: tokens > 1))),
)


class StepSettings(Section):
    """The settings of all sampling steps, in the order of the help pages."""

    no_repeat_ngram: int = field(
        0, "never repeat a sequence of this many tokens (0: off)", group="edits"
    )
    logit_bias: Biases = field(
        {},
        "numbers to add to the logits of tokens, by id or string of one"
        " token (null or -inf: ban the token)",
        group="edits",
    )
    sequence_bias: SequenceBiases = field(
        (),
        "strings or lists of ids, each with a number to add to the logit of its last token when its"
        " other tokens come before",
        group="edits",
    )
    allowed_tokens: Tokens = field(
        (), "the only tokens to generate: ids, or strings of one token (empty: all)", group="edits"
    )
    banned_tokens: Tokens = field(
        (), "tokens never to generate: ids, or strings of one token", group="edits"
    )
    bad_words: Sequences = field(
        (),
        "strings never to generate: ban the last token of each when its other tokens come before",
        group="edits",
    )
    min_tokens: int = field(
        0,
        "minimum number of tokens before the EOS token, a stop token"
        " or a stop string can end the text",
        group="request",
    )
    encoder_repetition_penalty: Positive = field(
        1.0,
        "multiply positive and divide negative logits of tokens of"
        " the prompt by this number (1: off)",
        group="penalties",
    )
    repetition_penalty: Positive = field(
        1.0,
        "divide positive and multiply negative logits of earlier tokens by this number (1: off)",
        group="penalties",
    )
    repetition_range: CountOrZero = field(
        0, "penalize tokens among the last N only (0: all)", group="penalties"
    )
    repetition_slope: Annotated[NonNegative, *NEEDS_RANGE] = field(
        0.0,
        "how much more the newest of the last repetition_range"
        " tokens are penalized (0: all equally)",
        group="penalties",
    )
    repetition_scope: Scope = field(
        "all",
        "apply the repetition penalty to tokens of prompt and output (all), or only of the output",
        group="penalties",
    )
    presence_penalty: Finite = field(
        0.0, "number to subtract once from the logits of generated tokens", group="penalties"
    )
    frequency_penalty: Finite = field(
        0.0, "number to subtract for each time that a token was generated", group="penalties"
    )
    presence_scope: Scope = field(
        "output",
        "apply presence and frequency penalties to tokens of prompt and"
        " output (all), or only of the output",
        group="penalties",
    )
    dry_multiplier: NonNegative = field(
        0.0, "DRY: penalty for continuing a repeated sequence (0: off)", group="penalties"
    )
    dry_base: Annotated[float, Field(ge=1, allow_inf_nan=False)] = field(
        1.75, "DRY: growth of the penalty per repeated token", group="penalties"
    )
    dry_allowed_length: Count = field(
        2,
        "DRY: length of a repetition with penalty dry_multiplier; shorter ones have none",
        group="penalties",
    )
    dry_range: CountOrZero = field(
        0, "DRY: search the last N tokens only (0: all)", group="penalties"
    )
    dry_breakers: Breakers = field(
        ("\n", ":", '"', "*"),
        "DRY: tokens that contain one of these strings end a repetition",
        group="penalties",
    )
    dynatemp_low: NonNegative = field(
        1.0, "dynamic temperature: value at zero entropy", group="temperatures"
    )
    dynatemp_high: NonNegative = field(
        1.0, "dynamic temperature: value at maximum entropy", group="temperatures"
    )
    dynatemp_exponent: NonNegative = field(
        1.0,
        "dynamic temperature: exponent of the normalized entropy in between",
        group="temperatures",
    )
    temperature: NonNegative = field(1.0, "divisor of the logits (0: greedy)", group="temperatures")
    smoothing_factor: NonNegative = field(
        0.0, "quadratic smoothing of the logits around the largest (0: off)", group="temperatures"
    )
    smoothing_curve: Annotated[float, Field(ge=1, le=3)] = field(
        1.0, "shape of the smoothing, from quadratic (1) to cubic (3)", group="temperatures"
    )
    top_k: int | None = field(
        None, "keep the k most likely tokens (null, 0 or less: off)", group="truncation"
    )
    top_p: Fraction | None = field(
        None,
        "keep the smallest set of tokens with this total probability (null or 1: off)",
        group="truncation",
    )
    top_p_rule: Annotated[Literal["inclusive", "exclusive"], *NEEDS_CHAIN] = field(
        "inclusive",
        "keep the token that crosses top_p (inclusive), or drop it (exclusive, as KoboldAI on TPU)",
        group="truncation",
    )
    min_p: Fraction = field(
        0.0,
        "keep tokens with at least this fraction of the largest probability (0: off)",
        group="truncation",
    )
    top_a: NonNegative = field(
        0.0, "keep tokens with P ≥ top_a · (largest P)² (0: off)", group="truncation"
    )
    tail_free: Fraction = field(
        1.0,
        "drop the tail where the curve of sorted probabilities flattens (1: off)",
        group="truncation",
    )
    typical: Fraction = field(
        1.0,
        "keep the tokens whose surprise is closest to the entropy, up"
        " to this total probability (1: off)",
        group="truncation",
    )
    epsilon_cutoff: Fraction = field(
        0.0, "keep tokens with at least this probability (0: off)", group="truncation"
    )
    eta_cutoff: Fraction = field(
        0.0,
        "keep tokens with at least this probability; the bound is lower at high entropy (0: off)",
        group="truncation",
    )
    top_n_sigma: Finite = field(
        0.0,
        "keep logits within this many standard deviations of the largest (0: off)",
        group="truncation",
    )
    min_k: Finite = field(
        -1.0,
        "min-k: keep the tokens before the steepest fall of the sorted logits, more in flat rows; 3"
        " is usual (negative: off)",
        group="truncation",
    )
    p_less: Literal["off", "plain", "norm"] = field(
        "off",
        "p-less: keep tokens with P ≥ Σ P² (plain), or with a lower, normalized bound (norm)",
        group="truncation",
    )
    top_h: Fraction = field(
        1.0,
        "keep the largest set of most likely tokens with at most"
        " this fraction of the entropy (1: off)",
        group="truncation",
    )
    top_h_rule: Annotated[Literal["renormalized", "cumulative"], *NEEDS_CHAIN] = field(
        "renormalized",
        "entropy of the kept tokens for top_h: of their own distribution (renormalized), or the sum"
        " of −P ln P (cumulative, as Hugging Face Transformers)",
        group="truncation",
    )
    xtc_probability: Fraction = field(
        0.0, "XTC: probability of excluding the top choices (0: off)", group="truncation"
    )
    xtc_threshold: Fraction = field(
        0.1,
        "XTC: tokens with at least this probability are top choices; all but the least likely are"
        " removed (above 0.5: off)",
        group="truncation",
    )
    ties: Annotated[Literal["first", "all"], *NEEDS_CHAIN] = field(
        "first",
        "top_k, top_p, typical: of tokens equal to the last kept one, keep"
        " those with lower ids (first), or all",
        group="steps",
    )
    mirostat: Literal[0, 1, 2] = field(
        0,
        "version of mirostat, which keeps the surprise of the text constant (0: off)",
        group="surprise",
    )
    mirostat_tau: Positive = field(5.0, "mirostat: target surprise in bits", group="surprise")
    mirostat_eta: Positive = field(
        0.1, "mirostat: learning rate of the correction", group="surprise"
    )
    skew: Annotated[float, Field(ge=-10, le=10)] = field(
        0.0,
        "raise the cumulative probability to the power e^skew: above 0, unlikely"
        " tokens become more likely (0: off)",
        group="surprise",
    )
    adaptive_target: Annotated[float, Field(le=1, allow_inf_nan=False)] = field(
        -1.0,
        "adaptive-p: favor tokens with a probability near this value, on"
        " average over the text (negative: off)",
        group="surprise",
    )
    adaptive_decay: Annotated[float, Field(ge=0, le=0.99)] = field(
        0.9,
        "adaptive-p: weight of the average of earlier tokens relative to the newest token",
        group="surprise",
    )
    watermark_keys: WatermarkKeys = field(
        (),
        "SynthID watermark: secret numbers, one for each layer of the tournament (empty: off)",
        group="watermark",
    )
    watermark_ngram: Annotated[int, Field(ge=2, le=16)] = field(
        5,
        "SynthID watermark: length of the token sequences that"
        " are hashed, including the next token",
        group="watermark",
    )


class Setting(NamedTuple):
    """The type (with its range) and the default of a step's setting."""

    kind: Any
    default: Any


_STEP_TYPES = get_type_hints(StepSettings, include_extras=True)
SETTINGS = {
    name: Setting(_STEP_TYPES[name], info.default)
    for name, info in StepSettings.model_fields.items()
}

# Values of `reads`, `parameters` and `indirect` that several rows share.
HISTORY_INPUTS = ("history_S", "length")
SEQUENCE_INPUTS = ("prefix_WM", "last_W")
IDS = {"ids": (Tokens, None)}
BIASES = {"values": (Biases, None)}
SEQUENCE_ARGUMENTS = {"sequences": (Sequences, None)}
MIROSTAT_SETTINGS = ("mirostat", "mirostat_tau", "mirostat_eta")
# The order of the rows is the order in which edits and the steps of the preset `default` run.
STEPS: dict[str, Step] = {
    "no_repeat_ngram": Step(
        {"no_repeat_ngram": positive},
        {"n": "no_repeat_ngram"},
        reads=(*HISTORY_INPUTS, "run_S"),
        group="edit",
    ),
    "logit_bias": Step(
        {"logit_bias": nonempty},
        reads=("bias_V",),
        indirect=("logit_bias",),
        parameters=IDS | BIASES,
        group="edit",
    ),
    "sequence_bias": Step(
        {"sequence_bias": nonempty},
        reads=(*HISTORY_INPUTS, *SEQUENCE_INPUTS, "bias_W"),
        indirect=("sequence_bias",),
        parameters=SEQUENCE_ARGUMENTS | BIASES,
        group="edit",
    ),
    "allowed_tokens": Step(
        {"allowed_tokens": nonempty},
        reads=("ids_S",),
        indirect=("allowed_tokens",),
        parameters=IDS,
        group="edit",
    ),
    "banned_tokens": Step(
        {"banned_tokens": nonempty},
        reads=("ids_S",),
        indirect=("banned_tokens",),
        parameters=IDS,
        group="edit",
        function="ban",
    ),
    "bad_words": Step(
        {"bad_words": nonempty},
        reads=(*HISTORY_INPUTS, *SEQUENCE_INPUTS),
        indirect=("bad_words",),
        parameters=SEQUENCE_ARGUMENTS,
        group="edit",
    ),
    "min_tokens": Step(
        {"min_tokens": positive},
        {"n": "min_tokens"},
        reads=("stop_ids_S", "n_generated"),
        parameters={"stop_ids": (Tokens, None)},
        group="edit",
    ),
    "encoder_repetition_penalty": Step(
        {"encoder_repetition_penalty": not_one},
        {"penalty": "encoder_repetition_penalty"},
        reads=("prompt_V",),
        group="penalty",
    ),
    "repetition_penalty": Step(
        {"repetition_penalty": not_one},
        {"penalty": "repetition_penalty", "range": "repetition_range", "slope": "repetition_slope"},
        reads=("distance_V",),
        indirect=("repetition_scope",),
        group="penalty",
    ),
    "presence_frequency_penalty": Step(
        {"presence_penalty": nonzero, "frequency_penalty": nonzero},
        {"presence": "presence_penalty", "frequency": "frequency_penalty"},
        reads=("count_V",),
        indirect=("presence_scope",),
        group="penalty",
    ),
    "dry": Step(
        {"dry_multiplier": positive},
        {
            "multiplier": "dry_multiplier",
            "base": "dry_base",
            "allowed_length": "dry_allowed_length",
        },
        reads=("repeated_V",),
        indirect=("dry_range", "dry_breakers"),
        parameters={"range": (CountOrZero, 0), "breakers": (Tokens, ())},
        group="penalty",
    ),
    "dynamic_temperature": Step(
        {"dynatemp_low": not_one, "dynatemp_high": not_one},
        {"low": "dynatemp_low", "high": "dynatemp_high", "exponent": "dynatemp_exponent"},
    ),
    "temperature": Step({"temperature": not_one}, {"t": "temperature"}),
    "smoothing": Step(
        {"smoothing_factor": positive}, {"factor": "smoothing_factor", "curve": "smoothing_curve"}
    ),
    "top_k": Step({"top_k": positive}, {"k": "top_k", "ties": "ties"}, keeps="likeliest"),
    "top_p": Step(
        {"top_p": below_one},
        {"p": "top_p", "rule": "top_p_rule", "ties": "ties"},
        reads=("rest",),
        keeps="likeliest",
    ),
    "min_p": Step({"min_p": positive}, {"p": "min_p"}, keeps="likeliest"),
    "top_a": Step({"top_a": positive}, {"a": "top_a"}, reads=("rest",), keeps="likeliest"),
    "tail_free": Step({"tail_free": below_one}, {"z": "tail_free"}, reads=("size",), by_row=True),
    "typical": Step(
        {"typical": below_one}, {"p": "typical", "ties": "ties"}, reads=("rest",), keeps="typical"
    ),
    "epsilon_cutoff": Step(
        {"epsilon_cutoff": positive}, {"eps": "epsilon_cutoff"}, reads=("rest",), keeps="likeliest"
    ),
    "eta_cutoff": Step(
        {"eta_cutoff": positive}, {"eps": "eta_cutoff"}, reads=("rest",), keeps="likeliest"
    ),
    "top_n_sigma": Step(
        {"top_n_sigma": positive}, {"n": "top_n_sigma"}, reads=("rest",), keeps="likeliest"
    ),
    "min_k": Step(
        {"min_k": not_negative}, {"tau": "min_k"}, reads=("rest",), keeps="likeliest", by_row=True
    ),
    "p_less": Step(
        {"p_less": equals("plain")}, reads=("rest",), indirect=("p_less",), keeps="likeliest"
    ),
    "p_less_norm": Step(
        {"p_less": equals("norm")}, reads=("size", "rest"), indirect=("p_less",), keeps="likeliest"
    ),
    "top_h": Step(
        {"top_h": below_one},
        {"alpha": "top_h", "rule": "top_h_rule"},
        reads=("rest",),
        keeps="likeliest",
    ),
    "xtc": Step(
        {"xtc_probability": positive},
        {"threshold": "xtc_threshold", "probability": "xtc_probability"},
        reads=("u", "protected_V"),
        parameters={"u": (Fraction, None), "protected_ids": (Tokens, ())},
    ),
    "skew": Step({"skew": nonzero}, {"skew": "skew"}, by_row=True),
    "mirostat_v1": Step(
        {"mirostat": equals(1)},
        reads=("mu", "size"),
        indirect=MIROSTAT_SETTINGS,
        parameters={"mu": (Finite, None), "m": (Count, 100)},
        keeps="likeliest",
    ),
    "mirostat_v2": Step(
        {"mirostat": equals(2)},
        reads=("mu", "rest"),
        indirect=MIROSTAT_SETTINGS,
        parameters={"mu": (Finite, None)},
        keeps="likeliest",
    ),
    "adaptive_p": Step(
        {"adaptive_target": not_negative},
        {"target": "adaptive_target"},
        reads=("average",),
        indirect=("adaptive_decay",),
        parameters={"average": (Fraction, None)},
        group="last",
    ),
    "synthid": Step(
        {"watermark_keys": nonempty},
        {"ngram": "watermark_ngram"},
        reads=(*HISTORY_INPUTS, "n_generated", "keys_K"),
        indirect=("watermark_keys",),
        parameters={"layer_keys": (WatermarkKeys, None)},
        group="last",
        by_row=True,
    ),
}
EDIT_STEPS = tuple(name for name, step in STEPS.items() if step.group == "edit")
PENALTY_STEPS = tuple(name for name, step in STEPS.items() if step.group == "penalty")
LAST_STEPS = tuple(name for name, step in STEPS.items() if step.group == "last")
# Steps that depend on the surprise of the drawn token.
MIROSTAT_STEPS = tuple(name for name, step in STEPS.items() if "mu" in step.reads)


def step_prerequisites(key: str) -> tuple[Needs, ...]:
    """Returns the prerequisite of a step's setting: at least one of the steps that use the setting
    is on.

    The tuple is empty for a setting that itself switches a step on.
    """
    owners = [step for step in STEPS.values() if key in step.settings]
    if not owners or any(key in step.on for step in owners):
        return ()
    return (
        Needs(*((f"generation.{switch}", on) for step in owners for switch, on in step.on.items())),
    )


class Bounds(NamedTuple):
    """The range of a numeric type, both ends included. The range of a number > 0 begins at the
    smallest normal float32.
    """

    low: float
    high: float
    integer: bool


def number_bounds(kind: object) -> Bounds | None:
    """Returns the range of a numeric type, or None for other types."""
    annotation: Any = kind
    schema = TypeAdapter(annotation).json_schema()
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null":
            schema = option
            break
    if schema.get("type") not in ("integer", "number") or "enum" in schema:
        return None
    low = schema.get("minimum", MIN_NORMAL_FLOAT if "exclusiveMinimum" in schema else -math.inf)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    if high >= 2**31 - 1:  # the limit of `Count`, which only says that the number fits into 32 bits
        high = math.inf
    return Bounds(low, high, schema["type"] == "integer")


NUMBER_BOUNDS: dict[str, Bounds] = {
    key: bounds
    for key, setting in SETTINGS.items()
    if (bounds := number_bounds(setting.kind)) is not None
}

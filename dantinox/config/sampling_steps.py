"""The table of sampling steps: the settings of each, when it is active, and what it reads.

Everything that knows the steps follows from `STEPS`: the keys of the `generation` section with their flags and help, what is
refused while a step is off, the default order, the compiled chain and its window, the parameters of `process_logits`, and the
table in docs/sampling.md. A new step is a function in `dantinox.sampling.steps` or `.history`, its row and settings here, and a
section there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as factory
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter

from dantinox.config.base import Count, CountOrZero, Finite, Fraction, NonNegative, Positive, Section, as_tuple, field
from dantinox.config.prerequisites import Condition, Needs, differs, equals, nonempty, nonzero

TINY = 1.1754943508222875e-38  # the smallest normal float32


def is_digits(text: str) -> bool:
    """Whether a text is an id or a code: the digits of other scripts are not."""
    return text.isascii() and text.isdecimal()


def _as_biases(value: object) -> Any:
    """A mapping, or `token=value` texts; null stands for -inf, as JSON has no other way to write it."""
    pairs = _pairs(value)
    if pairs is None or not all(isinstance(token, str | int) for token, _ in pairs):
        return value
    return {str(token): bias for token, bias in pairs}


def _as_sequence_biases(value: object) -> Any:
    """The same for texts of any length, and pairs of a text or a list of token ids and its bias."""
    pairs = _pairs(value)
    return tuple((_as_sequence(words), bias) for words, bias in pairs) if pairs is not None else value


def _pairs(value: object) -> list[tuple[Any, Any]] | None:
    """(name, bias) of a mapping, of `name=bias` texts, or of pairs; -inf for null. None of anything else."""
    if isinstance(value, list | tuple):
        parts = [text.rpartition("=")[::2] if isinstance(text, str) else text for text in value]
        if any(not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] == "" for pair in parts):
            return None
        pairs = [(name, _number(bias)) for name, bias in parts]
    elif isinstance(value, Mapping):
        pairs = [*value.items()]
    else:
        return None
    return [(name, -math.inf if bias is None else bias) for name, bias in pairs]


def _number(bias: Any) -> Any:
    try:
        return float(bias) if isinstance(bias, str) else bias
    except ValueError:
        return bias


def _as_sequences(value: object) -> Any:
    """Texts or lists of token ids."""
    items = as_tuple(value)
    return tuple(map(_as_sequence, items)) if isinstance(items, tuple) else items


def _as_sequence(item: Any) -> Any:
    return tuple(item) if isinstance(item, list) else item


Text = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(lt=math.inf)]
Sequence = Text | Annotated[tuple[CountOrZero, ...], Field(min_length=1)]
# The kinds of lists that steps read.
Tokens = Annotated[tuple[CountOrZero | Text, ...], BeforeValidator(as_tuple)]
Breakers = Annotated[tuple[str | CountOrZero, ...], BeforeValidator(as_tuple)]
Biases = Annotated[dict[str, Bias], BeforeValidator(_as_biases)]
Sequences = Annotated[tuple[Sequence, ...], BeforeValidator(_as_sequences)]
SequenceBiases = Annotated[tuple[tuple[Sequence, Bias], ...], BeforeValidator(_as_sequence_biases)]
Scope = Literal["all", "output"]


@dataclass(frozen=True, eq=False)
class Step:
    """One row of the table.

    Attributes:
      on: the settings that switch it on, each with a test for the values that do.
      arguments: parameter of its function → the setting that it is.
      reads: its other parameters, which `dantinox.sampling.chain.STEP_INPUTS` computes.
      beside: settings that come to it through what it reads.
      given: parameters in `process_logits`, with their types and defaults (None: needed), for what decoding knows by itself.
      group: `edit` and `penalty` act on greedy text too; edits have no place in an order and run first.
      cuts: what it keeps is the `likeliest` tokens, or those of a `typical` surprise; "": nothing, or something else.
      by_row: so slow that only the rows of a batch that have it on may pay.
      function: where its name is not that of the step.
    """

    on: dict[str, Condition]
    arguments: dict[str, str] = factory(default_factory=dict)
    reads: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    given: dict[str, tuple[Any, Any]] = factory(default_factory=dict)
    group: Literal["edit", "penalty", "other"] = "other"
    cuts: Literal["", "likeliest", "typical"] = ""
    by_row: bool = False
    function: str = ""

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.arguments.values(), *self.beside)


positive = Condition("is above 0", lambda value: value is not None and value > 0)
below_one = Condition("is below 1", lambda value: value is not None and value < 1)
not_one = differs(1)


CHAIN = (Needs(("generation.strategy", "chain")),)
RANGED = (Needs(("generation.repetition_range", Condition("is above 1", lambda tokens: tokens > 1))),)


class StepSettings(Section):
    """The settings of all steps, in the order of the help."""

    no_repeat_ngram: int = field(0, "no sequence of this many tokens occurs twice (0: off)")
    logit_bias: Biases = field({}, "added to the logits of tokens, by id or text of one token (null or -inf: banned)")
    sequence_bias: SequenceBiases = field(
        (), "texts, or lists of ids, and what is added to the last token of each behind the others"
    )
    allowed_tokens: Tokens = field((), "no other tokens are generated: ids, or texts of one token")
    banned_tokens: Tokens = field((), "tokens never generated: ids, or texts of one token")
    bad_words: Sequences = field((), "texts never generated: the last token of each is banned behind the others")
    min_tokens: int = field(0, "tokens before the end token, a stop id or a stop string may end the text")
    repetition_penalty: Positive = field(1.0, "divides positive and multiplies negative logits of seen tokens (1: off)")
    repetition_range: CountOrZero = field(0, "only this many last tokens are penalised (0: all)")
    repetition_slope: Annotated[NonNegative, *RANGED] = field(0.0, "how much more the newest are penalised (0: all alike)")
    repetition_scope: Scope = field("all", "repetition penalty: of prompt and output, or of output")
    presence_penalty: Finite = field(0.0, "subtracted once from the logits of generated tokens")
    frequency_penalty: Finite = field(0.0, "subtracted for each time a token was generated")
    presence_scope: Scope = field("output", "presence and frequency penalty: prompt and output, or output alone")
    dry_multiplier: NonNegative = field(0.0, "DRY: penalty for going on with a repeated sequence (0: off)")
    dry_base: Annotated[float, Field(ge=1, allow_inf_nan=False)] = field(1.75, "DRY: growth per repeated token")
    dry_allowed_length: Count = field(2, "DRY: repeated tokens that cost the multiplier alone; fewer are free")
    dry_range: CountOrZero = field(0, "DRY: only this many last tokens are searched (0: all)")
    dry_breakers: Breakers = field(("\n", ":", '"', "*"), "DRY: tokens with one of these texts in them end a repetition")
    dynatemp_low: NonNegative = field(1.0, "dynamic temperature: its value where the model is certain")
    dynatemp_high: NonNegative = field(1.0, "dynamic temperature: its value where all tokens are equally likely")
    dynatemp_exponent: NonNegative = field(1.0, "dynamic temperature: power of the normalised entropy between them")
    temperature: NonNegative = field(1.0, "divides the logits; 0 is greedy")
    smoothing_factor: NonNegative = field(0.0, "quadratic smoothing of the logits around the largest (0: off)")
    smoothing_curve: Annotated[float, Field(ge=1, le=3)] = field(1.0, "share of a cubic term in the smoothing")
    top_k: int | None = field(None, "keep the k most likely tokens (null, 0 or less: off)")
    top_p: Fraction | None = field(None, "keep the smallest set of tokens with this mass (null or 1: off)")
    top_p_rule: Annotated[Literal["inclusive", "exclusive"], *CHAIN] = field(
        "inclusive", "whether the token that crosses the mass is kept (exclusive: KoboldAI on TPU)"
    )
    min_p: Fraction = field(0.0, "keep tokens at least this likely, relative to the most likely (0: off)")
    top_a: NonNegative = field(0.0, "keep tokens with P ≥ top_a · (largest P)² (0: off)")
    tail_free: Fraction = field(1.0, "cut where the curve of sorted probabilities has flattened (1: off)")
    typical: Fraction = field(1.0, "keep the mass of tokens whose surprise is nearest to the entropy (1: off)")
    epsilon_cutoff: Fraction = field(0.0, "keep tokens with at least this probability (0: off)")
    eta_cutoff: Fraction = field(0.0, "the same bound, lowered where the entropy is high (0: off)")
    top_n_sigma: Finite = field(0.0, "keep logits within this many standard deviations of the largest (0: off)")
    xtc_probability: Fraction = field(0.0, "how often the top choices are excluded (0: off)")
    xtc_threshold: Fraction = field(0.1, "tokens this likely are top choices; all but the last go (above 0.5: off)")
    ties: Annotated[Literal["first", "all"], *CHAIN] = field(
        "first", "top_k, top_p, typical: of tokens equal to the last kept one, those with lower ids, or all"
    )
    mirostat: Literal[0, 1, 2] = field(0, "hold the surprise of the text constant: version 1 or 2 (0: off)")
    mirostat_tau: Positive = field(5.0, "mirostat: the surprise aimed at, in bits")
    mirostat_eta: Positive = field(0.1, "mirostat: how fast it is corrected")


class Setting(NamedTuple):
    """The type of a step's setting with its range, and its default."""

    kind: Any
    default: Any


SETTINGS = {
    name: Setting(kind, StepSettings.model_fields[name].default)
    for name, kind in get_type_hints(StepSettings, include_extras=True).items()
    if name in StepSettings.model_fields
}

TEXT, WORDS = ("history_S", "length"), ("prefix_WM", "last_W")
IDS, BIASES = {"ids": (Tokens, None)}, {"values": (Biases, None)}
SPOKEN = {"sequences": (Sequences, None)}
STEERING = ("mirostat", "mirostat_tau", "mirostat_eta")
# In the order of the edits and of the preset `default`.
STEPS: dict[str, Step] = {
    "no_repeat_ngram": Step({"no_repeat_ngram": positive}, {"n": "no_repeat_ngram"}, (*TEXT, "run_S"), group="edit"),
    "logit_bias": Step({"logit_bias": nonempty}, {}, ("bias_V",), ("logit_bias",), IDS | BIASES, "edit"),
    "sequence_bias": Step(
        {"sequence_bias": nonempty}, {}, (*TEXT, *WORDS, "bias_W"), ("sequence_bias",), SPOKEN | BIASES, "edit"
    ),
    "allowed_tokens": Step({"allowed_tokens": nonempty}, {}, ("ids_S",), ("allowed_tokens",), IDS, "edit"),
    "banned_tokens": Step({"banned_tokens": nonempty}, {}, ("ids_S",), ("banned_tokens",), IDS, "edit", function="ban"),
    "bad_words": Step({"bad_words": nonempty}, {}, (*TEXT, *WORDS), ("bad_words",), SPOKEN, "edit"),
    "min_tokens": Step(
        {"min_tokens": positive},
        {"n": "min_tokens"},
        ("stop_ids_S", "n_generated"),
        given={"stop_ids": (Tokens, None)},
        group="edit",
    ),
    "repetition_penalty": Step(
        {"repetition_penalty": not_one},
        {"penalty": "repetition_penalty", "range": "repetition_range", "slope": "repetition_slope"},
        ("distance_V",),
        ("repetition_scope",),
        group="penalty",
    ),
    "presence_frequency_penalty": Step(
        {"presence_penalty": nonzero, "frequency_penalty": nonzero},
        {"presence": "presence_penalty", "frequency": "frequency_penalty"},
        ("count_V",),
        ("presence_scope",),
        group="penalty",
    ),
    "dry": Step(
        {"dry_multiplier": positive},
        {"multiplier": "dry_multiplier", "base": "dry_base", "allowed_length": "dry_allowed_length"},
        ("repeated_V",),
        ("dry_range", "dry_breakers"),
        {"range": (CountOrZero, 0), "breakers": (Tokens, ())},
        "penalty",
    ),
    "dynamic_temperature": Step(
        {"dynatemp_low": not_one, "dynatemp_high": not_one},
        {"low": "dynatemp_low", "high": "dynatemp_high", "exponent": "dynatemp_exponent"},
    ),
    "temperature": Step({"temperature": not_one}, {"t": "temperature"}),
    "smoothing": Step({"smoothing_factor": positive}, {"factor": "smoothing_factor", "curve": "smoothing_curve"}),
    "top_k": Step({"top_k": positive}, {"k": "top_k", "ties": "ties"}, cuts="likeliest"),
    "top_p": Step({"top_p": below_one}, {"p": "top_p", "rule": "top_p_rule", "ties": "ties"}, ("rest",), cuts="likeliest"),
    "min_p": Step({"min_p": positive}, {"p": "min_p"}, cuts="likeliest"),
    "top_a": Step({"top_a": positive}, {"a": "top_a"}, ("rest",), cuts="likeliest"),
    "tail_free": Step({"tail_free": below_one}, {"z": "tail_free"}, ("size",), by_row=True),
    "typical": Step({"typical": below_one}, {"p": "typical", "ties": "ties"}, ("rest",), cuts="typical"),
    "epsilon_cutoff": Step({"epsilon_cutoff": positive}, {"eps": "epsilon_cutoff"}, ("rest",), cuts="likeliest"),
    "eta_cutoff": Step({"eta_cutoff": positive}, {"eps": "eta_cutoff"}, ("rest",), cuts="likeliest"),
    "top_n_sigma": Step({"top_n_sigma": positive}, {"n": "top_n_sigma"}, ("rest",), cuts="likeliest"),
    "xtc": Step(
        {"xtc_probability": positive},
        {"threshold": "xtc_threshold", "probability": "xtc_probability"},
        ("u", "protected_V"),
        given={"u": (Fraction, None), "protected_ids": (Tokens, ())},
    ),
    "mirostat_v1": Step(
        {"mirostat": equals(1)},
        reads=("mu", "size"),
        beside=STEERING,
        given={"mu": (Finite, None), "m": (Count, 100)},
        cuts="likeliest",
    ),
    "mirostat_v2": Step({"mirostat": equals(2)}, {}, ("mu", "rest"), STEERING, {"mu": (Finite, None)}, cuts="likeliest"),
}
EDITS = tuple(name for name, step in STEPS.items() if step.group == "edit")
PENALTIES = tuple(name for name, step in STEPS.items() if step.group == "penalty")
STEERED = tuple(name for name, step in STEPS.items() if "mu" in step.reads)  # by the surprise of what was drawn


def needs_of(key: str) -> tuple[Needs, ...]:
    """A setting that switches no step on refines some, and needs one of them on."""
    owners = [step for step in STEPS.values() if key in step.settings]
    if not owners or any(key in step.on for step in owners):
        return ()
    return (Needs(*((f"generation.{switch}", on) for step in owners for switch, on in step.on.items())),)


class Bounds(NamedTuple):
    """The numbers that a kind allows, ends included; a number > 0 begins at the smallest of float32."""

    low: float
    high: float
    integer: bool


def bounds(kind: object) -> Bounds | None:
    """The range of a kind of number; None for anything else."""
    wanted: Any = kind
    schema = TypeAdapter(wanted).json_schema()
    schema = next((option for option in schema.get("anyOf", ()) if option.get("type") != "null"), schema)
    if schema.get("type") not in ("integer", "number") or "enum" in schema:
        return None
    low = schema.get("minimum", TINY if "exclusiveMinimum" in schema else -math.inf)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    return Bounds(low, math.inf if high >= 2**31 - 1 else high, schema["type"] == "integer")


NUMBERS: dict[str, Bounds] = {key: found for key, setting in SETTINGS.items() if (found := bounds(setting.kind)) is not None}

"""The `generation` section: decoding settings, presets of step orders, and checks of
combinations.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Conflict, Count, CountOrZero, Section, Seed, Strings, field
from dantinox.config.prerequisites import (
    Condition,
    Needs,
    differs,
    equals,
    format_value,
    nonempty,
    one_of,
)
from dantinox.config.sampling_steps import (
    EDIT_STEPS,
    MIROSTAT_STEPS,
    NEEDS_CHAIN,
    PENALTY_STEPS,
    STEPS,
    StepSettings,
    Tokens,
    is_digits,
)

MAX_LOOP_PERIOD = 256  # tokens
MAX_BAN_LENGTH = 256  # characters of a banned string or expression
GREEDY_BELOW = 1e-5  # a lower temperature means greedy decoding


def _as_order(value: Any) -> Any:
    """Splits a list, or a string with commas, into step codes (integers) and step names."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    order: list[Any] = []
    for part in parts:
        words = [word.strip() for word in part.split(",")] if isinstance(part, str) else [part]
        order += [
            int(word) if isinstance(word, str) and is_digits(word) else word for word in words
        ]
    return tuple(order)


Preset = Literal["default", "hf", "vllm", "llamacpp", "kobold", "koboldcpp"]
# Speculative decoding and bans need a cache that keeps all tokens, because discarded tokens must
# not evict others.
NEEDS_FULL_CACHE = (
    Needs(("generation.use_cache", True)),
    Needs(("kv.budget", equals(None))),
    Needs(("kv.budget_tokens", equals(None))),
)

NEEDS_BEAMS = (Needs(("generation.num_beams", Condition("is above 1", lambda beams: beams > 1))),)
# Settings that beam search does not support → their only value.
WITHOUT_BEAMS: dict[str, object] = {
    "greedy": False,
    "strategy": "chain",
    "stop": (),
    "banned_strings": (),
    "banned_regexes": (),
    "speculation": "off",
    "use_cache": True,
    "loop_stop": False,
    "loop_temperature_factor": 1.0,
    "token_healing": False,
}
# The settings of the steps that beam search does not run, except the watermark. A request with
# beams does not use those of the run.
DRAWING_SETTINGS = frozenset(
    key for step in STEPS.values() if step.group == "other" for key in (*step.on, *step.settings)
)
NOT_GREEDY = (
    Needs(("generation.greedy", False)),
    Needs(
        (
            "generation.temperature",
            Condition(
                f"is at least {GREEDY_BELOW:g}", lambda temperature: temperature >= GREEDY_BELOW
            ),
        )
    ),
)
NEEDS_LOOPS = Needs(
    ("generation.loop_stop", True), ("generation.loop_temperature_factor", differs(1))
)


class _Request(Section):
    """Length, stop conditions, cache and precision of a request, and the order of the sampling
    steps.
    """

    max_new_tokens: CountOrZero = field(150, "maximum number of new tokens", group="request")
    n: Annotated[int, Field(ge=1, le=4096)] = field(1, "samples per prompt", group="request")
    seed: Seed | None = field(
        None, "seed of the sampler (null: a new one per call, which is reported)", group="request"
    )
    stop: Strings = field((), "strings that end the text", group="request")
    keep_stop: Annotated[
        bool, Needs(("generation.stop", nonempty), ("generation.stop_token_ids", nonempty))
    ] = field(
        False,
        "keep the stop string or token in the text",
        group="request",
    )
    stop_token_ids: Tokens = field(
        (),
        "tokens that end the text like the EOS token: ids, or strings of one token",
        group="request",
    )
    ignore_eos: bool = field(False, "continue after the EOS token", group="request")
    banned_strings: Annotated[Strings, *NEEDS_FULL_CACHE] = field(
        (),
        "texts that are never generated, in any case and tokenization; generation goes back to"
        " their first token",
        group="request",
    )
    banned_regexes: Annotated[Strings, *NEEDS_FULL_CACHE] = field(
        (),
        "regular expressions that no part of the text matches; generation goes"
        " back to the first token of a match",
        group="request",
    )
    loop_stop: bool = field(
        False,
        "end the text when its end repeats one sequence of tokens again and again",
        group="loops",
    )
    loop_temperature_factor: Annotated[
        float,
        Field(ge=1, le=100, allow_inf_nan=False),
        Needs(("generation.loop_stop", False)),
        *NOT_GREEDY,
    ] = field(
        1.0,
        "multiply the temperature by this number while the end of the text"
        " repeats one sequence of tokens (1: off)",
        group="loops",
    )
    loop_max_period: Annotated[int, Field(ge=1, le=MAX_LOOP_PERIOD), NEEDS_LOOPS] = field(
        64,
        "most tokens of a repeated sequence",
        group="loops",
    )
    loop_min_repeats: Annotated[int, Field(ge=2, le=1024), NEEDS_LOOPS] = field(
        4,
        "number of times that the sequence must occur in a row, with the first time",
        group="loops",
    )
    loop_min_tokens: Annotated[Count, NEEDS_LOOPS] = field(
        64, "least tokens of all repetitions together", group="loops"
    )
    token_healing: bool = field(
        False,
        "generate the last tokens of the prompt again, with the same text, so"
        " that a prompt may end inside a token",
        group="request",
    )
    json_whitespace: Literal["compact", "flexible"] = field(
        "compact",
        "whitespace in constrained JSON (compact: at most a space after a comma or colon; flexible:"
        " also line breaks with indentation)",
        group="request",
    )
    use_cache: bool = field(
        True,
        "cache keys and values; false recomputes the whole sequence for each token",
        group="decoding",
    )
    weights: Literal["auto", "float32", "bfloat16", "int8", "int4"] = field(
        "auto",
        "dtype of the weights while decoding (auto: the compute dtype of the run)",
        group="decoding",
    )
    matmul_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Needs(("generation.weights", one_of("auto", "bfloat16", "int8", "int4"))),
    ] = field(
        "auto",
        "dtype of matrix multiplications with quantized (int8, int4) or bfloat16 weights (auto:"
        " bfloat16 if it is faster, measured once)",
        group="decoding",
    )
    matmul_kernel: Literal["auto", "xla", "native"] = field(
        "auto",
        "native multiplies a few rows with compiled CPU kernels (auto:"
        " if they are faster, measured once)",
        group="decoding",
    )
    tensor_parallel: Count = field(
        1, "devices that hold different heads and features of each layer", group="decoding"
    )
    speculation: Annotated[Literal["off", "ngram", "draft"], *NEEDS_FULL_CACHE] = field(
        "off",
        "verify draft tokens several at a time, with the same text (ngram: drafts from the text so"
        " far; draft: from the model of draft_run)",
        group="speculation",
    )
    draft_run: Annotated[str | None, Needs(("generation.speculation", "draft"))] = field(
        None,
        "run directory of a smaller model with the same"
        " tokenizer, which generates the draft tokens",
        group="speculation",
    )
    draft_tokens: Annotated[
        int, Field(ge=1, le=15), Needs(("generation.speculation", differs("off")))
    ] = field(
        5,
        "most draft tokens that one step verifies",
        group="speculation",
    )
    ngram_size: Annotated[int, Field(ge=1, le=8), Needs(("generation.speculation", "ngram"))] = (
        field(
            3,
            "number of newest tokens that are searched in the text so far",
            group="speculation",
        )
    )
    greedy: bool = field(False, "always choose the most likely token", group="steps")
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = field(
        1.0,
        "classifier-free guidance: weight of the prompt against the negative prompt (1: off)",
        group="guidance",
    )
    negative_prompt: Annotated[str, Needs(("generation.guidance_scale", differs(1)))] = field(
        "",
        "classifier-free guidance: text that stands for the whole prompt"
        " (empty: the last token of the prompt)",
        group="guidance",
    )
    num_beams: Annotated[int, Field(ge=1, le=256)] = field(
        1,
        "beam search: number of continuations that are kept at each step"
        " (1: off); the best n are returned",
        group="beams",
    )
    length_penalty: Annotated[float, Field(ge=-100, le=100), *NEEDS_BEAMS] = field(
        1.0,
        "beam search: power of the length that divides the log-probability of a continuation;"
        " higher favors long ones",
        group="beams",
    )
    early_stopping: Annotated[bool | Literal["never"], *NEEDS_BEAMS] = field(
        False,
        "beam search: stop after num_beams complete continuations (true), or when no better one of"
        " the present length (false) or of any length (never) is possible",
        group="beams",
    )
    strategy: Annotated[
        Literal["chain", "entropy"],
        *NOT_GREEDY,
    ] = field(
        "chain",
        "chain: this section sets temperature, top_k, top_p and min_p; entropy: the entropy router"
        " sets them per token",
        group="steps",
    )
    preset: Annotated[Preset, *NEEDS_CHAIN] = field(
        "default",
        "apply the sampling steps in the order of this program; no other setting changes",
        group="steps",
    )
    sampler_order: Annotated[
        tuple[int | str, ...] | None, BeforeValidator(_as_order), *NEEDS_CHAIN
    ] = field(
        None,
        "Kobold's step codes in another order (preset kobold or koboldcpp), or names of steps"
        " (null: the preset's order)",
        group="steps",
    )


class GenerationSection(StepSettings, _Request):
    """Settings of a request, and of all sampling steps."""


WATERMARK = "synthid"  # the step that runs last with every preset and every order
# The sampling steps of each preset, in order; `EDIT_STEPS` run before them, and the watermark after
# them. A preset has only the steps that exist in the program of the same name.
PRESETS: dict[str, tuple[str, ...]] = {
    "default": tuple(name for name in STEPS if name not in (*EDIT_STEPS, WATERMARK)),
    "hf": (
        "encoder_repetition_penalty", "repetition_penalty", "temperature", "top_h", "top_k",
        "top_p", "min_p", "typical", "epsilon_cutoff", "eta_cutoff",
    ),
    "vllm": ("repetition_penalty", "presence_frequency_penalty", "temperature", "min_p", "top_k",
             "top_p"),
    "llamacpp": (
        "repetition_penalty", "presence_frequency_penalty", "dry", "top_n_sigma", "top_k",
        "typical", "top_p", "min_p", "xtc", "temperature", "dynamic_temperature", *MIROSTAT_STEPS,
        "adaptive_p",
    ),
}  # fmt: skip
# Name in an order → the steps it stands for.
SHARED_NAMES = {"p_less": ("p_less", "p_less_norm"), "mirostat": MIROSTAT_STEPS}
# The steps whose values the entropy router sets.
ROUTED_STEPS = ("temperature", "top_k", "top_p", "min_p")
KOBOLD_CODES = (
    "top_k",
    "top_a",
    "top_p",
    "tail_free",
    "typical",
    "temperature",
    "repetition_penalty",
)
KOBOLD_ORDERS = {"kobold": (6, 0, 1, 2, 3, 4, 5), "koboldcpp": (6, 0, 1, 3, 4, 2, 5)}
# Step of KoboldAI → the steps that KoboldCpp runs in its place.
KOBOLDCPP_STEPS = {
    "top_p": ("top_p", "min_p"),
    "temperature": ("dynamic_temperature", "temperature", "smoothing", "top_n_sigma"),
    "repetition_penalty": ("repetition_penalty", "presence_frequency_penalty"),
}


def active_steps(g: GenerationSection) -> frozenset[str]:
    """Returns the steps that a section's values switch on, as a set. Greedy rows do not run the
    temperature step.
    """
    return frozenset(name for name in STEPS if _switches(g, name))


def _switches(g: GenerationSection, step: str) -> list[str]:
    """Returns the settings whose values in a section switch a step on; empty if the step is off."""
    return [key for key, switches_on in STEPS[step].on.items() if switches_on(getattr(g, key))]


def _beam_conflicts(g: GenerationSection) -> Iterator[Conflict]:
    """Yields an error for each setting that contradicts beam search, which considers all tokens and
    draws none.
    """
    for key, only in WITHOUT_BEAMS.items():
        value = getattr(g, key)
        if value != only:
            must = "empty" if only == () else f"{format_value(only)}, got {format_value(value)},"
            yield f"generation.{key}", f"must be {must} with generation.num_beams"
    supported = {*EDIT_STEPS, *PENALTY_STEPS}
    for name in STEPS:
        if name in active_steps(g) - supported:
            yield (
                f"generation.{_switches(g, name)[0]}",
                (
                    "cannot be used with generation.num_beams, because beam"
                    " search draws no tokens: leave it out"
                ),
            )
    if g.guidance_scale != 1:
        yield (
            "generation.guidance_scale",
            f"must be 1 with generation.num_beams, got {g.guidance_scale:g}",
        )
    if g.n > g.num_beams:
        yield "generation.n", f"must be at most generation.num_beams, {g.num_beams}, got {g.n}"
    if g.max_new_tokens == 0:
        yield "generation.max_new_tokens", "must be at least 1 with generation.num_beams, got 0"


def kobold_order(codes: Sequence[int]) -> tuple[str, ...]:
    """Returns the step names of a KoboldAI `sampler_order`.

    An order in the older format has only the codes 0…5. The repetition penalty (code 6) then runs
    first.

    Raises:
      ValueError: the codes are not a permutation of 0…5 or 0…6.
    """
    codes = list(codes) if isinstance(codes, Sequence) else [codes]
    are_integers = all(isinstance(code, int) and not isinstance(code, bool) for code in codes)
    if are_integers and sorted(codes) == list(range(6)):
        codes = [6, *codes]
    if not are_integers or sorted(codes) != list(range(7)):
        raise ValueError(f"a Kobold sampler order must be a permutation of 0…5 or 0…6, got {codes}")
    return tuple(KOBOLD_CODES[code] for code in codes)


def step_order(preset: str, sampler_order: Sequence[int | str] | None) -> tuple[str, ...]:
    """Returns the steps that run after the edits and before the watermark, in order.

    Raises:
      ValueError: the order is invalid or cannot be combined with the preset. The message follows
        the name of the setting, as in `generation.sampler_order must …`.
    """
    if sampler_order is None:
        return (
            _steps_of_codes(preset, KOBOLD_ORDERS[preset])
            if preset in KOBOLD_ORDERS
            else PRESETS[preset]
        )
    codes = tuple(code for code in sampler_order if isinstance(code, int))
    if len(codes) < len(sampler_order):
        return _named_order(preset, tuple(sampler_order))
    if preset not in KOBOLD_ORDERS:
        raise ValueError(
            f"may hold codes only with generation.preset kobold or koboldcpp, got {preset}:"
            " use names"
        )
    return _steps_of_codes(preset, codes)


def _steps_of_codes(preset: str, codes: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the steps of an order of step codes, with the preset `kobold` or `koboldcpp`."""
    try:
        names = kobold_order(codes)
    except ValueError as error:
        raise ValueError(f"is invalid: {error}") from None
    if preset == "kobold":
        return names
    coded_steps = [step for name in names for step in KOBOLDCPP_STEPS.get(name, (name,))]
    return ("dry", *coded_steps, "xtc", *MIROSTAT_STEPS, "adaptive_p")


def section_order(g: GenerationSection) -> tuple[str, ...]:
    """Returns the steps that run after the edits, in the order that a section sets, with the
    watermark at the end.

    Raises the errors of `step_order`.
    """
    if g.strategy == "entropy":
        return (*PENALTY_STEPS, *ROUTED_STEPS, WATERMARK)
    return (*step_order(g.preset, g.sampler_order), WATERMARK)


def order_names() -> tuple[str, ...]:
    """Returns the names that `sampler_order` may hold, in the default order."""
    shared = {step: name for name, steps in SHARED_NAMES.items() for step in steps}
    return tuple(dict.fromkeys(shared.get(name, name) for name in PRESETS["default"]))


def _named_order(preset: str, names: Sequence[int | str]) -> tuple[str, ...]:
    """Returns the steps of an order of step names; the errors are those of `step_order`."""
    known = order_names()
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ValueError(
            f"must hold Kobold's codes or names among {', '.join(known)}, got {unknown!r}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"must name each step once, got {', '.join(map(str, names))}")
    if preset != "default":
        raise ValueError(
            f"with step names excludes generation.preset {preset}:"
            " leave one of the two settings out"
        )
    for name, may_follow in (("mirostat", {"adaptive_p"}), ("adaptive_p", set())):
        if name in names and {*names[names.index(name) + 1 :]} - may_follow:
            raise ValueError(
                f"must have {name} last, because it needs the token that is drawn directly after it"
            )
    return tuple(step for name in names for step in SHARED_NAMES.get(str(name), (str(name),)))


def generation_conflicts(g: GenerationSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of the section."""
    active = active_steps(g)
    greedy = g.greedy or g.temperature < GREEDY_BELOW
    if g.num_beams > 1:
        yield from _beam_conflicts(g)
    if g.guidance_scale != 1 and g.speculation != "off":
        yield (
            "generation.speculation",
            f"must be off with generation.guidance_scale, got {g.speculation}",
        )
    if g.speculation == "draft" and g.draft_run is None:
        yield (
            "generation.speculation",
            "draft needs generation.draft_run, the run directory of the draft model",
        )
    for key in ("stop", "dry_breakers", "banned_strings", "banned_regexes"):
        if "" in getattr(g, key):
            yield f"generation.{key}", "must not hold an empty string"
    for key in ("banned_strings", "banned_regexes"):
        longest = max(map(len, getattr(g, key)), default=0)
        if longest > MAX_BAN_LENGTH:
            yield (
                f"generation.{key}",
                f"must hold strings of at most {MAX_BAN_LENGTH} characters, got {longest}",
            )
    try:
        order = section_order(g)
    except ValueError as error:
        yield "generation.sampler_order", str(error)
        return
    missing_steps = active - {*EDIT_STEPS, *order}
    if greedy:  # greedy decoding needs no temperature
        missing_steps -= {"temperature"}
    # The settings that switch these steps on. A step may have several.
    unsupported = sorted(
        {f"generation.{key}" for name in missing_steps for key in _switches(g, name)}
    )
    if unsupported:
        if g.strategy == "entropy":
            order_setting = "generation.strategy entropy"
        elif g.sampler_order is None:
            order_setting = f"generation.preset {g.preset}"
        else:
            order_setting = "generation.sampler_order"
        pronoun = "it" if len(unsupported) == 1 else "them"
        further = "".join(f"and {key} " for key in unsupported[1:])
        remedy = f"leave {pronoun} out or switch {pronoun} off"
        yield (
            unsupported[0],
            f"{further}cannot be used with {order_setting}, which has no such step: {remedy}",
        )
    if g.loop_temperature_factor != 1 and "temperature" not in order:
        yield (
            "generation.loop_temperature_factor",
            "needs the step temperature, which generation.sampler_order leaves out",
        )
    if {*MIROSTAT_STEPS} & active and "adaptive_p" in active:
        yield (
            "generation.adaptive_target",
            f"must be negative with generation.mirostat, got {g.adaptive_target:g}",
        )
    if g.dynatemp_low > g.dynatemp_high:
        got = f"got {g.dynatemp_low:g} and {g.dynatemp_high:g}"
        yield "generation.dynatemp_low", f"must be at most generation.dynatemp_high, {got}"
    if {"temperature", "dynamic_temperature"} <= active and not greedy:
        yield (
            "generation.temperature",
            f"must be 1 with generation.dynatemp_low and dynatemp_high, got {g.temperature:g}",
        )

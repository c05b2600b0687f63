"""How a token is chosen: the keys of the `generation` section, what they switch on, and the orders steps may run in."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Count, CountOrZero, Finite, Fraction, NonNegative, Positive, Section, Seed, Strings, as_tuple


def _as_order(value: Any) -> Any:
    """Codes or names from a list or from text with commas; digits become codes."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    words = [word for part in parts for word in (part.split(",") if isinstance(part, str) else [part])]
    return tuple(int(word) if isinstance(word, str) and is_digits(word.strip()) else _stripped(word) for word in words)


def is_digits(text: str) -> bool:
    """Whether a text is an id or a code: the digits of other scripts are not."""
    return text.isascii() and text.isdecimal()


def _stripped(word: Any) -> Any:
    return word.strip() if isinstance(word, str) else word


def _as_biases(value: Any) -> Any:
    """A mapping, or `token=value` texts; null stands for -inf, as JSON has no other way to write it."""
    if isinstance(value, list | tuple):
        pairs = [text.rpartition("=") if isinstance(text, str) else ("", "", "") for text in value]
        if any(not token for token, _, _ in pairs):
            return value
        value = {token: _number(text) for token, _, text in pairs}
    if not isinstance(value, Mapping):
        return value
    return {str(token): -float("inf") if bias is None else bias for token, bias in value.items()}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _as_sequences(value: Any) -> Any:
    """Texts or lists of token ids."""
    items = as_tuple(value)
    return tuple(tuple(item) if isinstance(item, list) else item for item in items) if isinstance(items, tuple) else items


Token = CountOrZero | Annotated[str, Field(min_length=1)]
Tokens = Annotated[tuple[Token, ...], BeforeValidator(as_tuple)]
Sequences = Annotated[
    tuple[Annotated[str, Field(min_length=1)] | Annotated[tuple[CountOrZero, ...], Field(min_length=1)], ...],
    BeforeValidator(_as_sequences),
]
Cutoff = Annotated[float, Field(ge=0, lt=1)]
Preset = Literal["default", "hf", "vllm", "llamacpp", "kobold", "koboldcpp"]


class GenerationSection(Section):
    """Defaults of generate.py for this run, and how a token is chosen."""

    max_new_tokens: CountOrZero = Field(150, description="tokens to generate")
    strategy: Literal["chain", "entropy"] = Field(
        "chain", description="who sets temperature, top_k, top_p and min_p: this section, or the entropy router token by token"
    )
    greedy: bool = Field(False, description="always the most likely token")
    temperature: NonNegative = Field(1.0, description="divides the logits; 0 is greedy")
    dynatemp_low: NonNegative = Field(1.0, description="dynamic temperature: its value where the model is certain")
    dynatemp_high: NonNegative = Field(1.0, description="dynamic temperature: its value where all tokens are equally likely")
    dynatemp_exponent: NonNegative = Field(1.0, description="dynamic temperature: power of the normalised entropy between them")
    smoothing_factor: NonNegative = Field(0.0, description="quadratic smoothing of the logits around the largest (0: off)")
    smoothing_curve: Annotated[float, Field(ge=1, le=3)] = Field(1.0, description="share of a cubic term in the smoothing")
    top_k: int | None = Field(None, description="keep the k most likely tokens (null, 0 or less: off)")
    top_p: Fraction | None = Field(None, description="keep the smallest set of tokens with this mass (null or 1: off)")
    top_p_rule: Literal["inclusive", "exclusive"] = Field(
        "inclusive", description="whether the token that crosses the mass is kept (exclusive: KoboldAI on TPU)"
    )
    min_p: Fraction = Field(0.0, description="keep tokens at least this likely, relative to the most likely (0: off)")
    top_a: NonNegative = Field(0.0, description="keep tokens with P ≥ top_a · (largest P)² (0: off)")
    tail_free: Fraction = Field(1.0, description="cut where the curve of sorted probabilities has flattened (1: off)")
    typical: Fraction = Field(1.0, description="keep the mass of tokens whose surprise is nearest to the entropy (1: off)")
    epsilon_cutoff: Cutoff = Field(0.0, description="keep tokens with at least this probability (0: off)")
    eta_cutoff: Cutoff = Field(0.0, description="the same bound, lowered where the entropy is high (0: off)")
    top_n_sigma: Finite = Field(0.0, description="keep logits within this many standard deviations of the largest (0: off)")
    xtc_probability: Fraction = Field(0.0, description="how often the top choices are excluded (0: off)")
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.1, description="tokens this likely are top choices; all but the last of them go"
    )
    mirostat: Literal[0, 1, 2] = Field(0, description="hold the surprise of the text constant: version 1 or 2 (0: off)")
    mirostat_tau: Positive = Field(5.0, description="mirostat: the surprise aimed at, in bits")
    mirostat_eta: Positive = Field(0.1, description="mirostat: how fast it is corrected")
    ties: Literal["first", "all"] = Field(
        "first", description="top_k, top_p and typical: of tokens equal to the last kept one, those with lower ids, or all"
    )
    repetition_penalty: Positive = Field(1.0, description="divides positive and multiplies negative logits of seen tokens")
    repetition_range: CountOrZero = Field(0, description="only this many last tokens are penalised (0: all)")
    repetition_slope: NonNegative = Field(0.0, description="how much more the newest of them are penalised (0: all alike)")
    repetition_scope: Literal["all", "output"] = Field(
        "all", description="repetition penalty: of prompt and output, or of output"
    )
    presence_penalty: Finite = Field(0.0, description="subtracted once from the logits of generated tokens")
    frequency_penalty: Finite = Field(0.0, description="subtracted for each time a token was generated")
    presence_scope: Literal["output", "all"] = Field(
        "output", description="presence and frequency penalty: output alone, or prompt and output"
    )
    no_repeat_ngram: CountOrZero = Field(0, description="no sequence of this many tokens occurs twice (0: off)")
    dry_multiplier: NonNegative = Field(0.0, description="DRY: penalty for going on with a repeated sequence (0: off)")
    dry_base: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(1.75, description="DRY: growth per repeated token")
    dry_allowed_length: Count = Field(2, description="DRY: repeated tokens that cost the multiplier alone; fewer are free")
    dry_range: CountOrZero = Field(0, description="DRY: only this many last tokens are searched (0: all)")
    dry_breakers: Annotated[tuple[str | CountOrZero, ...], BeforeValidator(as_tuple)] = Field(
        ("\n", ":", '"', "*"), description="DRY: tokens with one of these texts in them end a repetition"
    )
    logit_bias: Annotated[dict[str, Annotated[float, Field(lt=float("inf"))]], BeforeValidator(_as_biases)] = Field(
        {}, description="added to the logits of tokens, named by id or text (null or -inf: banned)"
    )
    allowed_tokens: Tokens = Field((), description="no other tokens are generated: ids, or texts of one token")
    banned_tokens: Tokens = Field((), description="tokens never generated: ids, or texts of one token")
    bad_words: Sequences = Field((), description="texts never generated: the last token of each is banned behind the others")
    min_tokens: CountOrZero = Field(0, description="tokens before the end token or a stop string may end the text")
    preset: Preset = Field("default", description="whose order the steps run in; it sets no values")
    sampler_order: Annotated[tuple[int | str, ...] | None, BeforeValidator(_as_order)] = Field(
        None, description="Kobold's codes in another order (with preset kobold or koboldcpp), or names of steps"
    )
    stop: Strings = Field((), description="strings that end the text")
    keep_stop: bool = Field(False, description="keep the stop string in the text")
    ignore_eos: bool = Field(False, description="go on after the end-of-text token")
    n: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="samples per prompt")
    seed: Seed | None = Field(None, description="seed of the draws (null: a fresh one per call, reported)")
    use_cache: bool = Field(True, description="keep keys and values between tokens; off recomputes the whole text")
    weights: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto", description="precision of the weights while decoding (auto: as the run computes)"
    )


EDITS = ("no_repeat_ngram", "logit_bias", "allowed_tokens", "banned_tokens", "bad_words", "min_tokens")
PENALTIES = ("repetition_penalty", "presence_frequency_penalty", "dry")
MIROSTAT = ("mirostat_v1", "mirostat_v2")
# The steps behind the edits, in the order they run in. A preset lacks what its namesake does not know.
PRESETS: dict[str, tuple[str, ...]] = {
    "default": (
        *PENALTIES, "dynamic_temperature", "temperature", "smoothing", "top_k", "top_p", "min_p", "top_a", "tail_free",
        "typical", "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "xtc", *MIROSTAT,
    ),
    "hf": (
        "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "typical", "epsilon_cutoff", "eta_cutoff",
    ),
    "vllm": ("repetition_penalty", "presence_frequency_penalty", "temperature", "min_p", "top_k", "top_p"),
    "llamacpp": (
        *PENALTIES, "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc", "temperature", "dynamic_temperature", *MIROSTAT,
    ),
}  # fmt: skip
ROUTED = ("temperature", "top_k", "top_p", "min_p")  # the steps whose numbers the entropy router sets
CHAIN_KEYS = ("greedy", "preset", "sampler_order", "ties", "top_p_rule")  # what the router has no use for
KOBOLD_CODES = ("top_k", "top_a", "top_p", "tail_free", "typical", "temperature", "repetition_penalty")
KOBOLD_ORDERS = {"kobold": (6, 0, 1, 2, 3, 4, 5), "koboldcpp": (6, 0, 1, 3, 4, 2, 5)}
KOBOLDCPP_SLOTS = {"top_p": ("top_p", "min_p"), "temperature": ("dynamic_temperature", "temperature", "smoothing")}
# A setting that refines a step → the steps it refines; it is refused while all of them are off.
REFINES = {
    "dynatemp_exponent": ("dynamic_temperature",),
    "smoothing_curve": ("smoothing",),
    "top_p_rule": ("top_p",),
    "ties": ("top_k", "top_p", "typical"),
    "xtc_threshold": ("xtc",),
    "mirostat_tau": MIROSTAT,
    "mirostat_eta": MIROSTAT,
    **dict.fromkeys(("repetition_range", "repetition_slope", "repetition_scope"), ("repetition_penalty",)),
    "presence_scope": ("presence_frequency_penalty",),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_range", "dry_breakers"), ("dry",)),
}
SWITCHES = {
    "dynamic_temperature": "dynatemp_high",
    "smoothing": "smoothing_factor",
    "xtc": "xtc_probability",
    "mirostat_v1": "mirostat",
    "mirostat_v2": "mirostat",
    "presence_frequency_penalty": "presence_penalty",
    "dry": "dry_multiplier",
}


def steps_on(g: GenerationSection) -> frozenset[str]:
    """The steps that the values of a section switch on, whatever its order; the temperature of a greedy row is none."""
    on = {
        "no_repeat_ngram": g.no_repeat_ngram > 0,
        "logit_bias": bool(g.logit_bias),
        "allowed_tokens": bool(g.allowed_tokens),
        "banned_tokens": bool(g.banned_tokens),
        "bad_words": bool(g.bad_words),
        "min_tokens": g.min_tokens > 0,
        "repetition_penalty": g.repetition_penalty != 1,
        "presence_frequency_penalty": (g.presence_penalty, g.frequency_penalty) != (0, 0),
        "dry": g.dry_multiplier > 0,
        "dynamic_temperature": (g.dynatemp_low, g.dynatemp_high) != (1, 1),
        "temperature": g.temperature != 1,
        "smoothing": g.smoothing_factor > 0,
        "top_k": g.top_k is not None and g.top_k > 0,
        "top_p": g.top_p is not None and g.top_p < 1,
        "min_p": g.min_p > 0,
        "top_a": g.top_a > 0,
        "tail_free": g.tail_free < 1,
        "typical": g.typical < 1,
        "epsilon_cutoff": g.epsilon_cutoff > 0,
        "eta_cutoff": g.eta_cutoff > 0,
        "top_n_sigma": g.top_n_sigma > 0,
        "xtc": g.xtc_probability > 0,
        "mirostat_v1": g.mirostat == 1,
        "mirostat_v2": g.mirostat == 2,
    }
    return frozenset(name for name, is_on in on.items() if is_on)


def kobold_order(codes: Sequence[int]) -> tuple[str, ...]:
    """The step names of a KoboldAI `sampler_order`; a list of the six older codes gets the repetition penalty put first.

    Raises:
      ValueError: the codes are no permutation of 0…5 or 0…6.
    """
    codes = list(codes) if isinstance(codes, Sequence) else [codes]
    plain = all(isinstance(code, int) and not isinstance(code, bool) for code in codes)
    if plain and sorted(codes) == list(range(6)):
        codes = [6, *codes]
    if not plain or sorted(codes) != list(range(7)):
        raise ValueError(f"a Kobold sampler order must be a permutation of 0…5 or 0…6, got {codes}")
    return tuple(KOBOLD_CODES[code] for code in codes)


def step_order(preset: str, sampler_order: Sequence[int | str] | None) -> tuple[str, ...]:
    """The steps behind the edits, in order.

    Raises:
      ValueError: the order is none, or does not go with the preset; the sentence begins with the key.
    """
    given = () if sampler_order is None else tuple(sampler_order)
    if sampler_order is None or all(isinstance(code, int) for code in given):
        if preset not in KOBOLD_ORDERS:
            if sampler_order is not None:
                raise ValueError(
                    f"generation.sampler_order as codes needs generation.preset kobold or koboldcpp, got {preset}: "
                    "any other order is a list of step names"
                )
            return PRESETS[preset]
        try:
            names = kobold_order(KOBOLD_ORDERS[preset] if sampler_order is None else given)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"generation.sampler_order: {error}") from None
        if preset == "kobold":
            return names
        return "dry", *(step for name in names for step in KOBOLDCPP_SLOTS.get(name, (name,))), "xtc", *MIROSTAT
    return _named_order(preset, given)


def order_of(g: GenerationSection) -> tuple[str, ...]:
    """The steps behind the edits, in the order that a section asks for.

    Raises:
      ValueError: as `step_order`.
    """
    return (*PENALTIES, *ROUTED) if g.strategy == "entropy" else step_order(g.preset, g.sampler_order)


def _named_order(preset: str, names: Sequence[int | str]) -> tuple[str, ...]:
    known = tuple(dict.fromkeys("mirostat" if name in MIROSTAT else name for name in PRESETS["default"]))
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise ValueError(f"generation.sampler_order must hold Kobold's codes or names among {', '.join(known)}, got {wrong!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"generation.sampler_order must name a step once, got {', '.join(map(str, names))}")
    if preset != "default":
        raise ValueError(f"generation.sampler_order as names is an order of its own: leave generation.preset {preset} out")
    if "mirostat" in names[:-1]:
        raise ValueError("generation.sampler_order must have mirostat last: it steers by the token drawn behind it")
    return tuple(step for name in names for step in (MIROSTAT if name == "mirostat" else (str(name),)))


def generation_conflicts(g: GenerationSection) -> list[tuple[bool, str]]:
    """Every rule that spans keys of the section: (is it broken, the sentence that says so)."""
    on = steps_on(g)
    try:
        order, wrong_order = order_of(g), ""
    except ValueError as error:
        order, wrong_order = PRESETS["default"], str(error)
    greedy = g.greedy or g.temperature == 0
    lacking = sorted(on - {*EDITS, *order} - ({"temperature"} if greedy else set()))
    routed = g.strategy == "entropy"
    whose = f"generation.preset {g.preset}" if g.sampler_order is None else "generation.sampler_order"
    whose = "generation.strategy entropy" if routed else whose
    idle = [
        (f"generation.{key}", " or ".join(dict.fromkeys(f"generation.{SWITCHES.get(step, step)}" for step in steps)))
        for key, steps in REFINES.items()
        if getattr(g, key) != GenerationSection.model_fields[key].default and not on & set(steps)
    ]
    them = "it" if len(lacking) == 1 else "them"
    both = {"temperature", "dynamic_temperature"} <= on and not greedy
    return [
        ("" in g.stop, "generation.stop must not hold an empty string"),
        ("" in g.dry_breakers, "generation.dry_breakers must not hold an empty string"),
        (bool(wrong_order), wrong_order),
        (
            bool(lacking),
            f"{_keys_of(lacking)} cannot be used with {whose}, which has no such step: leave {them} out or switch {them} off",
        ),
        *((True, f"{key} has no effect while {switch} is off: set that too") for key, switch in idle),
        (
            g.dynatemp_low > g.dynatemp_high,
            f"generation.dynatemp_low must be at most generation.dynatemp_high, got {g.dynatemp_low:g} and {g.dynatemp_high:g}",
        ),
        (
            g.repetition_slope > 0 and g.repetition_range < 2,
            "generation.repetition_slope has no effect while generation.repetition_range is below 2: set that too",
        ),
        *(
            (
                routed and getattr(g, key) != GenerationSection.model_fields[key].default,
                f"generation.{key} cannot be used with generation.strategy entropy, which has an order and rules of its own: "
                "leave it out",
            )
            for key in CHAIN_KEYS[1:]
        ),
        (
            routed and greedy,
            f"generation.{'greedy' if g.greedy else 'temperature 0'} leaves generation.strategy entropy nothing to choose: "
            "use one of them, or generation.strategy chain",
        ),
        (
            both,
            "generation.temperature and generation.dynatemp_high both set the temperature: leave temperature at 1, "
            f"got {g.temperature:g}",
        ),
    ]


def _keys_of(steps: Sequence[str]) -> str:
    return " and ".join(f"generation.{SWITCHES.get(step, step)}" for step in steps)

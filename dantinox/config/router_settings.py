"""The `router` section: thresholds and coefficients of the entropy router, and its presets.

H and V are the entropy (bits) and varentropy (bits²) of the model's distribution. T₀, p₀, k₀ and m₀
are the base temperature, top_p, top_k and min_p. The formulas are in
`dantinox.sampling.entropy_router`. The default numbers come from the entropix guide.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import inf
from typing import Annotated, Literal, TypedDict, Unpack

from pydantic import Field

from dantinox.config.base import Conflict, Count, CountOrZero, Fraction, NonNegative, Section, field
from dantinox.config.prerequisites import Needs, is_set
from dantinox.files import UserError

Threshold = NonNegative | None
Coefficient = Annotated[float, Field(ge=-1000, le=1000)]
NEEDS_ATTENTION = Needs(("router.use_attention", True))
# A coefficient of attention metrics.
AttentionTerm = Annotated[float, Field(ge=-1000, le=1000), NEEDS_ATTENTION]
Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
# A number of candidates, which come from the window of most likely tokens.
WindowCount = Annotated[int, Field(ge=1, le=256)]
KEEP_ALL = 2**30  # a top_k that keeps every token

# Strategies in the order of their ids. A condition is (metric, relation, threshold). The router
# uses the first strategy whose conditions all hold, or `adaptive` if there is none.
RULES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "greedy": (("entropy", "<", "low_entropy"), ("varentropy", "<", "low_varentropy")),
    "clarify": (("entropy", ">", "clarify_entropy"), ("varentropy", "<", "low_varentropy")),
    "explore": (("entropy", "<", "high_entropy"), ("varentropy", ">", "high_varentropy")),
    "resample": (("entropy", ">", "high_entropy"), ("varentropy", ">", "high_varentropy")),
}
STRATEGIES = (*RULES, "adaptive")
THRESHOLDS = tuple(
    dict.fromkeys(threshold for conditions in RULES.values() for *_, threshold in conditions)
)
CALIBRATED_THRESHOLDS = (
    "low_entropy", "low_varentropy", "clarify_entropy", "high_entropy", "high_varentropy",
    "entropy_scale", "varentropy_scale",
)  # fmt: skip
# Values of each preset. `calibrated` reads the values of `CALIBRATED_THRESHOLDS` from a file in the
# run directory.
PRESET_NUMBERS: dict[str, dict[str, float]] = {
    "guide": {
        **dict(zip(CALIBRATED_THRESHOLDS, (0.1, 0.1, 3.0, 5.0, 5.0, 1.0, 1.0), strict=True)),
        "temperature_min": 0.0,
        "temperature_max": inf,
        "resample_temperature_min": 2.0,
        "resample_temperature_min_factor": 0.0,
    },
    "calibrated": {
        "temperature_min": 0.1,
        "temperature_max": 2.0,
        "resample_temperature_min": 0.0,
        "resample_temperature_min_factor": 1.2,
    },
}


class RouterSection(Section):
    """The entropy router, which chooses a strategy and sampling parameters for each token."""

    needs = (Needs(("generation.strategy", "entropy")),)

    router_preset: Literal["guide", "calibrated"] = field(
        "guide",
        "source of the keys that are null: the entropix guide, or measurements of this model",
        group="thresholds",
    )
    use_attention: bool = field(
        True, "adjust the numbers by attention metrics; false drops their terms", group="thresholds"
    )
    low_entropy: Threshold = field(
        None, "greedy: H below this (null: the preset's; guide 0.1 bits)", group="thresholds"
    )
    low_varentropy: Threshold = field(
        None,
        "greedy and clarify: V below this (null: the preset's; guide 0.1 bits²)",
        group="thresholds",
    )
    clarify_entropy: Threshold = field(
        None, "clarify: H above this (null: the preset's; guide 3.0 bits)", group="thresholds"
    )
    high_entropy: Threshold = field(
        None,
        "explore: H below this; resample: H above it (null: the preset's; guide 5.0 bits)",
        group="thresholds",
    )
    high_varentropy: Threshold = field(
        None,
        "explore and resample: V above this (null: the preset's; guide 5.0 bits²)",
        group="thresholds",
    )
    entropy_scale: Scale | None = field(
        None, "divisor of H in the formulas (null: the preset's; guide 1)", group="thresholds"
    )
    varentropy_scale: Scale | None = field(
        None, "divisor of V in the formulas (null: the preset's; guide 1)", group="thresholds"
    )
    temperature_min: NonNegative | None = field(
        None,
        "minimum temperature, except for greedy (null: the preset's; guide 0, calibrated 0.1)",
        group="thresholds",
    )
    temperature_max: NonNegative | None = field(
        None,
        "maximum temperature (null: the preset's; guide none, calibrated 2.0)",
        group="thresholds",
    )
    base_temperature: Annotated[NonNegative, Needs(("generation.temperature", 1.0))] = field(
        0.666,
        "T₀ if no temperature is set",
        group="thresholds",
    )
    base_top_p: Annotated[Fraction, Needs(("generation.top_p", None))] = field(
        0.9, "p₀ if no top_p is set", group="thresholds"
    )
    base_top_k: Annotated[Count, Needs(("generation.top_k", None))] = field(
        27, "k₀ if no top_k is set", group="thresholds"
    )
    base_min_p: Annotated[Fraction, Needs(("generation.min_p", 0.0))] = field(
        0.03, "m₀ if no min_p is set", group="thresholds"
    )
    candidates: Annotated[int, Field(ge=1, le=4096)] = field(
        12,
        "adaptive: number of draws, of which the most likely under"
        " the model is kept (1: a plain draw)",
        group="adaptive",
    )
    clarify_token: CountOrZero | Annotated[str, Field(min_length=1)] | None = field(
        None,
        "clarify: token to emit, as id or string of one token"
        " (null: sample at a higher temperature)",
        group="strategies",
    )
    clarify_text: Annotated[str, Field(min_length=1)] | None = field(
        None,
        "clarify: text to insert instead of a token, at most 256 tokens (null: none)",
        group="strategies",
    )
    clarify_cooldown: Annotated[
        CountOrZero, Needs(("router.clarify_token", is_set), ("router.clarify_text", is_set))
    ] = field(
        32,
        "clarify: minimum number of tokens between two clarify tokens or texts",
        group="strategies",
    )
    clarify_temperature_factor: Coefficient = field(
        1.3, "clarify: factor on T₀", group="strategies"
    )
    clarify_temperature_attn_entropy: AttentionTerm = field(
        0.2, "clarify: weight of attn_entropy, added to the factor on T₀", group="strategies"
    )
    clarify_temperature_max: NonNegative = field(
        1.5, "clarify: maximum temperature", group="strategies"
    )
    explore_temperature_factor: Coefficient = field(
        1.2, "explore: factor on T₀", group="strategies"
    )
    explore_temperature_interaction: AttentionTerm = field(
        0.3,
        "explore: weight of interaction_strength, added to the factor on T₀",
        group="strategies",
    )
    explore_temperature_max: NonNegative = field(
        1.5, "explore: maximum temperature", group="strategies"
    )
    explore_top_k_disagreement: AttentionTerm = field(
        0.5, "explore: weight of 1 − attn_agreement, added to the factor on k₀", group="strategies"
    )
    explore_top_k_min: Count = field(5, "explore: minimum top_k", group="strategies")
    resample_temperature_factor: Coefficient = field(
        2.0, "resample: factor on T₀", group="strategies"
    )
    resample_temperature_attn_varentropy: AttentionTerm = field(
        0.5,
        "resample: weight of attn_varentropy, added to the factor on T₀",
        group="strategies",
    )
    resample_temperature_min: NonNegative | None = field(
        None,
        "resample: minimum temperature (null: the preset's; guide 2.0, calibrated 0)",
        group="strategies",
    )
    resample_temperature_min_factor: NonNegative | None = field(
        None,
        "resample: minimum temperature as a factor on T₀ (null: the"
        " preset's; guide 0, calibrated 1.2)",
        group="strategies",
    )
    resample_top_p_attn_entropy: AttentionTerm = field(
        0.2, "resample: weight of attn_entropy, subtracted from p₀", group="strategies"
    )
    resample_top_p_min: Fraction = field(0.5, "resample: minimum top_p", group="strategies")
    adaptive_temperature_uncertainty: Coefficient = field(
        0.3, "adaptive: weight of H + V, added to the factor on T₀", group="adaptive"
    )
    adaptive_temperature_attn_uncertainty: AttentionTerm = field(
        0.2,
        "adaptive: weight of attn_entropy + attn_varentropy, added to the factor on T₀",
        group="adaptive",
    )
    adaptive_temperature_agreement: AttentionTerm = field(
        0.2,
        "adaptive: weight of attn_agreement, subtracted from the factor on T₀",
        group="adaptive",
    )
    adaptive_top_p_attn_varentropy: AttentionTerm = field(
        0.1, "adaptive: weight of attn_varentropy, added to the factor on p₀", group="adaptive"
    )
    adaptive_top_p_min: Fraction = field(0.1, "adaptive: minimum top_p", group="adaptive")
    adaptive_top_p_max: Fraction = field(1.0, "adaptive: maximum top_p", group="adaptive")
    adaptive_top_k_interaction: AttentionTerm = field(
        0.3,
        "adaptive: weight of interaction_strength, added to the factor on k₀",
        group="adaptive",
    )
    adaptive_top_k_agreement: AttentionTerm = field(
        0.2,
        "adaptive: weight of attn_agreement, subtracted from the factor on k₀",
        group="adaptive",
    )
    adaptive_top_k_min: WindowCount = field(1, "adaptive: minimum top_k", group="adaptive")
    adaptive_top_k_max: WindowCount = field(100, "adaptive: maximum top_k", group="adaptive")
    adaptive_min_p_uncertainty: Coefficient = field(
        0.5, "adaptive: weight of H + V, subtracted from the factor on m₀", group="adaptive"
    )
    adaptive_min_p_min: Fraction = field(0.01, "adaptive: minimum min_p", group="adaptive")
    adaptive_min_p_max: Fraction = field(0.5, "adaptive: maximum min_p", group="adaptive")
    score_logprob: Coefficient = field(
        1.0,
        "candidate score: weight of ln p (0: the first candidate"
        " wins; below 0: the least likely one)",
        group="adaptive",
    )
    score_entropy: Coefficient = field(
        0.1,
        "candidate score: weight of 1 − H; like the next five, it shifts"
        " all candidates of a token equally",
        group="adaptive",
    )
    score_attn_entropy: AttentionTerm = field(
        0.2, "candidate score: weight of 1 − attn_entropy", group="adaptive"
    )
    score_varentropy: Coefficient = field(0.3, "candidate score: weight of 1 − V", group="adaptive")
    score_attn_varentropy: AttentionTerm = field(
        0.4, "candidate score: weight of 1 − attn_varentropy", group="adaptive"
    )
    score_agreement: AttentionTerm = field(
        0.5, "candidate score: weight of attn_agreement", group="adaptive"
    )
    score_interaction: AttentionTerm = field(
        0.6, "candidate score: weight of interaction_strength", group="adaptive"
    )

    def numbers(self, measured: Mapping[str, float] | None = None) -> dict[str, float]:
        """Returns setting name → value for every number of the router. The preset supplies the
        values that are null.

        Args:
          measured: values of `CALIBRATED_THRESHOLDS` from a calibration of the model; only the
            preset `calibrated` uses them.

        Raises:
          UserError: the preset is `calibrated`, and a value is neither measured nor set.
        """
        preset = PRESET_NUMBERS[self.router_preset]
        if self.router_preset == "calibrated" and measured is not None:
            preset = preset | {
                name: measured[name] for name in CALIBRATED_THRESHOLDS if name in measured
            }
        set_values = self.model_dump(
            exclude={"router_preset", "use_attention", "clarify_token", "clarify_text"},
            exclude_none=True,
        )
        missing = [
            f"router.{name}" for name in CALIBRATED_THRESHOLDS if name not in preset | set_values
        ]
        if missing:
            raise UserError(
                "router.router_preset calibrated needs thresholds measured on this model: run"
                f" `dantinox calibrate --run_dir … --what router`, or set {', '.join(missing)}",
                key="router.router_preset",
                value=self.router_preset,
            )
        return {name: float(value) for name, value in (preset | set_values).items()}


ATTENTION_TERMS = tuple(
    name for name, field in RouterSection.model_fields.items() if NEEDS_ATTENTION in field.metadata
)


class Bases(TypedDict, total=False):
    """The arguments of `router_bases`."""

    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float


def with_request_bases(numbers: Mapping[str, float], **request: Unpack[Bases]) -> dict[str, float]:
    """Returns the router's numbers with the T₀, p₀, k₀ and m₀ of a request (see `router_bases`)."""
    return {**numbers, **router_bases(**request)}


def router_bases(
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float = 0.0,
) -> dict[str, float]:
    """Returns setting name → value of the router's base values that a request sets.

    A value that equals the default of the `generation` section (temperature 1, top_p and top_k
    null, min_p 0) does not change the router's base value. A top_k of 0 or less keeps every token.
    """
    bases = dict[str, float]()
    if temperature != 1:
        bases["base_temperature"] = temperature
    if top_p is not None:
        bases["base_top_p"] = top_p
    if top_k is not None:
        bases["base_top_k"] = min(top_k, KEEP_ALL) if top_k > 0 else KEEP_ALL
    if min_p > 0:
        bases["base_min_p"] = min_p
    return bases


def strategy_intervals(
    strategy: str, numbers: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Returns metric → open interval in which the conditions of a strategy of `RULES` hold (a lower
    end of 0 is no bound).
    """
    intervals = dict.fromkeys(("entropy", "varentropy"), (0.0, inf))
    for metric, relation, threshold in RULES[strategy]:
        low, high = intervals[metric]
        if relation == "<":
            high = numbers[threshold]
        else:
            low = numbers[threshold]
        intervals[metric] = (low, high)
    return intervals


def forcing_thresholds(strategy: str) -> dict[str, float]:
    """Returns values of `THRESHOLDS` with which the router always selects a given strategy.

    Every metric is above −1 and below ∞, so a threshold of −1 or ∞ decides each condition. The
    function tries all combinations.
    """
    for values in product((-1.0, inf), repeat=len(THRESHOLDS)):
        numbers = dict(zip(THRESHOLDS, values, strict=True))
        if _forced_strategy(numbers) == strategy:
            return numbers
    raise ValueError(f"unknown strategy {strategy}: the strategies are {', '.join(STRATEGIES)}")


def _forced_strategy(numbers: Mapping[str, float]) -> str:
    """Returns the strategy that the router always selects, if every threshold is −1 or ∞."""
    for name, conditions in RULES.items():
        # `metric < ∞` and `metric > −1` always hold; `metric < −1` and `metric > ∞` never do.
        if all(
            (numbers[threshold] == inf) == (relation == "<")
            for _, relation, threshold in conditions
        ):
            return name
    return STRATEGIES[-1]


def router_conflicts(r: RouterSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of the section."""
    if r.clarify_token is not None and r.clarify_text is not None:
        yield "router.clarify_text", "must be null if router.clarify_token is set: set one of them"
    numbers = PRESET_NUMBERS[r.router_preset] | r.model_dump(exclude_none=True)
    for name in ("temperature", "adaptive_top_p", "adaptive_top_k", "adaptive_min_p"):
        low, high = numbers[f"{name}_min"], numbers[f"{name}_max"]
        if low > high:
            yield (
                f"router.{name}_min",
                f"must be at most router.{name}_max, got {low:g} and {high:g}",
            )

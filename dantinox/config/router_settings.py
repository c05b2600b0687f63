"""The `router` section: thresholds and coefficients of the entropy router, and its presets.

H and V are the entropy (bits) and varentropy (bits²) of the model's distribution; T₀, p₀, k₀ and m₀ are the temperature, top_p,
top_k and min_p that the router starts from. The formulas are in `dantinox.sampling.entropy_router`; the numbers are those of
the entropix guide.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import inf
from typing import Annotated, Literal, TypedDict, Unpack

from pydantic import Field

from dantinox.config.base import Conflict, Count, CountOrZero, Fraction, NonNegative, Section, field
from dantinox.config.prerequisites import Needs, given
from dantinox.files import UserError

Threshold = NonNegative | None
Coefficient = Annotated[float, Field(ge=-1000, le=1000)]
ATTENTION = Needs(("router.use_attention", True))
AttentionTerm = Annotated[float, Field(ge=-1000, le=1000), ATTENTION]  # a coefficient of attention metrics
Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
WindowCount = Annotated[int, Field(ge=1, le=256)]  # more tokens than the window holds cannot be candidates
EVERY = 2**30  # a top_k that cuts nothing

# Strategies in the order of their ids, each with its conditions on metrics (metric, relation, threshold); the first whose
# conditions hold is taken, else `adaptive`.
RULES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "greedy": (("entropy", "<", "low_entropy"), ("varentropy", "<", "low_varentropy")),
    "clarify": (("entropy", ">", "clarify_entropy"), ("varentropy", "<", "low_varentropy")),
    "explore": (("entropy", "<", "high_entropy"), ("varentropy", ">", "high_varentropy")),
    "resample": (("entropy", ">", "high_entropy"), ("varentropy", ">", "high_varentropy")),
}
STRATEGIES = (*RULES, "adaptive")
THRESHOLDS = tuple(dict.fromkeys(threshold for conditions in RULES.values() for *_, threshold in conditions))
MEASURED = (
    "low_entropy", "low_varentropy", "clarify_entropy", "high_entropy", "high_varentropy", "entropy_scale", "varentropy_scale",
)  # fmt: skip
# What a preset sets; `calibrated` takes the measured numbers from a file of the run.
PRESET_NUMBERS: dict[str, dict[str, float]] = {
    "guide": {
        **dict(zip(MEASURED, (0.1, 0.1, 3.0, 5.0, 5.0, 1.0, 1.0), strict=True)),
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
    """The entropy router: when it takes which strategy, and how it sets the sampling numbers of each token."""

    needs = (Needs(("generation.strategy", "entropy")),)

    router_preset: Literal["guide", "calibrated"] = field(
        "guide", "source of the keys that are null: the entropix guide, or measurements of this model"
    )
    use_attention: bool = field(True, "let attention metrics adjust the numbers; off drops their terms")
    low_entropy: Threshold = field(None, "greedy: H below this (null: the preset's, guide 0.1 bits)")
    low_varentropy: Threshold = field(None, "greedy and clarify: V below this (null: the preset's, guide 0.1 bits²)")
    clarify_entropy: Threshold = field(None, "clarify: H above this (null: the preset's, guide 3.0 bits)")
    high_entropy: Threshold = field(None, "explore: H below this, resample: H above it (null: the preset's, guide 5.0 bits)")
    high_varentropy: Threshold = field(None, "explore and resample: V above this (null: the preset's, guide 5.0 bits²)")
    entropy_scale: Scale | None = field(None, "divides H in the formulas (null: the preset's, guide 1)")
    varentropy_scale: Scale | None = field(None, "divides V in the formulas (null: the preset's, guide 1)")
    temperature_min: NonNegative | None = field(
        None, "smallest temperature, greedy excepted (null: the preset's, guide 0, calibrated 0.1)"
    )
    temperature_max: NonNegative | None = field(None, "largest temperature (null: the preset's, guide none, calibrated 2.0)")
    base_temperature: Annotated[NonNegative, Needs(("generation.temperature", 1.0))] = field(
        0.666, "T₀ where no temperature is set"
    )
    base_top_p: Annotated[Fraction, Needs(("generation.top_p", None))] = field(0.9, "p₀ of requests that set no top_p")
    base_top_k: Annotated[Count, Needs(("generation.top_k", None))] = field(27, "k₀ of requests that set no top_k")
    base_min_p: Annotated[Fraction, Needs(("generation.min_p", 0.0))] = field(0.03, "m₀ of requests that set no min_p")
    candidates: Annotated[int, Field(ge=1, le=4096)] = field(
        12, "adaptive: draws of which the one likeliest under the model is kept (1: a plain draw)"
    )
    clarify_token: CountOrZero | Annotated[str, Field(min_length=1)] | None = field(
        None, "clarify: the token to emit, its id or a text of one token (null: sample at a higher temperature)"
    )
    clarify_cooldown: Annotated[CountOrZero, Needs(("router.clarify_token", given))] = field(
        32, "clarify: least number of tokens between two clarify tokens"
    )
    clarify_temperature_factor: Coefficient = field(1.3, "clarify: factor of T₀")
    clarify_temperature_attn_entropy: AttentionTerm = field(0.2, "clarify: what attn_entropy adds to the factor")
    clarify_temperature_max: NonNegative = field(1.5, "clarify: largest temperature")
    explore_temperature_factor: Coefficient = field(1.2, "explore: factor of T₀")
    explore_temperature_interaction: AttentionTerm = field(0.3, "explore: what interaction_strength adds to the factor")
    explore_temperature_max: NonNegative = field(1.5, "explore: largest temperature")
    explore_top_k_disagreement: AttentionTerm = field(0.5, "explore: what 1 − attn_agreement adds to the factor of k₀")
    explore_top_k_min: Count = field(5, "explore: smallest top_k")
    resample_temperature_factor: Coefficient = field(2.0, "resample: factor of T₀")
    resample_temperature_attn_varentropy: AttentionTerm = field(0.5, "resample: what attn_varentropy adds to the factor")
    resample_temperature_min: NonNegative | None = field(
        None, "resample: smallest temperature (null: the preset's, guide 2.0, calibrated 0)"
    )
    resample_temperature_min_factor: NonNegative | None = field(
        None, "resample: smallest temperature, as a factor of T₀ (null: the preset's, guide 0, calibrated 1.2)"
    )
    resample_top_p_attn_entropy: AttentionTerm = field(0.2, "resample: what attn_entropy takes from p₀")
    resample_top_p_min: Fraction = field(0.5, "resample: smallest top_p")
    adaptive_temperature_uncertainty: Coefficient = field(0.3, "adaptive: what H + V adds to the factor of T₀")
    adaptive_temperature_attn_uncertainty: AttentionTerm = field(
        0.2, "adaptive: what attn_entropy + attn_varentropy adds to the factor of T₀"
    )
    adaptive_temperature_agreement: AttentionTerm = field(0.2, "adaptive: what attn_agreement takes from it")
    adaptive_top_p_attn_varentropy: AttentionTerm = field(0.1, "adaptive: what attn_varentropy adds to the factor of p₀")
    adaptive_top_p_min: Fraction = field(0.1, "adaptive: smallest top_p")
    adaptive_top_p_max: Fraction = field(1.0, "adaptive: largest top_p")
    adaptive_top_k_interaction: AttentionTerm = field(0.3, "adaptive: what interaction_strength adds to the factor of k₀")
    adaptive_top_k_agreement: AttentionTerm = field(0.2, "adaptive: what attn_agreement takes from it")
    adaptive_top_k_min: WindowCount = field(1, "adaptive: smallest top_k")
    adaptive_top_k_max: WindowCount = field(100, "adaptive: largest top_k")
    adaptive_min_p_uncertainty: Coefficient = field(0.5, "adaptive: what H + V takes from the factor of m₀")
    adaptive_min_p_min: Fraction = field(0.01, "adaptive: smallest min_p")
    adaptive_min_p_max: Fraction = field(0.5, "adaptive: largest min_p")
    score_logprob: Coefficient = field(
        1.0, "a candidate's score: weight of its ln p (0: the first candidate is taken, below 0: the least likely)"
    )
    score_entropy: Coefficient = field(
        0.1, "a candidate's score: weight of 1 − H; like the five below, it moves all candidates of a token alike"
    )
    score_attn_entropy: AttentionTerm = field(0.2, "a candidate's score: weight of 1 − attn_entropy")
    score_varentropy: Coefficient = field(0.3, "a candidate's score: weight of 1 − V")
    score_attn_varentropy: AttentionTerm = field(0.4, "a candidate's score: weight of 1 − attn_varentropy")
    score_agreement: AttentionTerm = field(0.5, "a candidate's score: weight of attn_agreement")
    score_interaction: AttentionTerm = field(0.6, "a candidate's score: weight of interaction_strength")

    def numbers(self, measured: Mapping[str, float] | None = None) -> dict[str, float]:
        """Every number of the router by the name of its key, what is null put in from the preset.

        Args:
          measured: the numbers of `MEASURED`, from a calibration of the model; only the preset `calibrated` reads them.

        Raises:
          UserError: the preset is `calibrated` and a number was neither measured nor set.
        """
        preset = PRESET_NUMBERS[self.router_preset]
        if self.router_preset == "calibrated":
            preset = preset | {name: (measured or {})[name] for name in MEASURED if name in (measured or {})}
        own = self.model_dump(exclude={"router_preset", "use_attention", "clarify_token"}, exclude_none=True)
        missing = [f"router.{name}" for name in MEASURED if name not in preset | own]
        if missing:
            raise UserError(
                "router.router_preset calibrated needs thresholds measured on this model: run `dantinox calibrate "
                f"--run_dir … --what router`, or set {', '.join(missing)}",
                key="router.router_preset",
                value=self.router_preset,
            )
        return {name: float(value) for name, value in (preset | own).items()}


ATTENTION_TERMS = tuple(name for name, field in RouterSection.model_fields.items() if ATTENTION in field.metadata)


class Bases(TypedDict, total=False):
    """The arguments of `bases_of`."""

    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float


def with_request(numbers: Mapping[str, float], **request: Unpack[Bases]) -> dict[str, float]:
    """The router's numbers with T₀, p₀, k₀ and m₀ of a request, see `bases_of`."""
    return {**numbers, **bases_of(**request)}


def bases_of(
    temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None, min_p: float = 0.0
) -> dict[str, float]:
    """The base values that a request sets, by the keys whose place they take.

    A value that the `generation` section has by default (temperature 1, top_p and top_k null, min_p 0) asks for nothing: the
    router's own base stands. A top_k of 0 or less is no cut.
    """
    own = dict[str, float]()
    if temperature != 1:
        own["base_temperature"] = temperature
    if top_p is not None:
        own["base_top_p"] = top_p
    if top_k is not None:
        own["base_top_k"] = min(top_k, EVERY) if top_k > 0 else EVERY
    if min_p > 0:
        own["base_min_p"] = min_p
    return own


def intervals(strategy: str, numbers: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Where the conditions of a strategy of `RULES` hold: metric → (from, to), edges left out; 0: no lower edge."""
    found = dict.fromkeys(("entropy", "varentropy"), (0.0, inf))
    for metric, relation, threshold in RULES[strategy]:
        low, high = found[metric]
        found[metric] = (low, numbers[threshold]) if relation == "<" else (numbers[threshold], high)
    return found


def forcing(strategy: str) -> dict[str, float]:
    """Values of `THRESHOLDS` with which a strategy is taken whatever is measured: −1 is below every metric, ∞ above."""
    for values in product((-1.0, inf), repeat=len(THRESHOLDS)):
        numbers = dict(zip(THRESHOLDS, values, strict=True))
        always = {
            name: all((numbers[threshold] > 0) == (relation == "<") for _, relation, threshold in conditions)
            for name, conditions in RULES.items()
        }
        if next((name for name, holds in always.items() if holds), STRATEGIES[-1]) == strategy:
            return numbers
    raise ValueError(f"no strategy is called {strategy}: they are {', '.join(STRATEGIES)}")


def router_conflicts(r: RouterSection) -> Iterator[Conflict]:
    """Yields the rules across keys of the section that are broken."""
    numbers = PRESET_NUMBERS[r.router_preset] | r.model_dump(exclude_none=True)
    for name in ("temperature", "adaptive_top_p", "adaptive_top_k", "adaptive_min_p"):
        low, high = numbers[f"{name}_min"], numbers[f"{name}_max"]
        if low > high:
            yield f"router.{name}_min", f"must be at most router.{name}_max, got {low:g} and {high:g}"

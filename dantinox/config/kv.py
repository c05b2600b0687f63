"""The keys of the `kv` section: how many keys and values of a text decoding keeps, which of them, and how they are stored.

As flags and as keyword arguments the keys are called `kv_budget`, `kv_policy` and so on.
"""

from typing import Annotated, Literal

from pydantic import Field

from dantinox.config.base import Count, CountOrZero, Fraction, Section

Policy = Literal["snapkv+ema", "streaming", "tova", "h2o", "random"]
Signal = Literal["uniform", "entropy", "coverage", "loss"]

BUDGETS = ("budget", "budget_tokens")
POLICY_KEYS = ("window", "pool", "decay")  # what only snapkv+ema reads
PLAIN = {"signal": "uniform"}  # asks for nothing, and stands in runs that were trained when it was the default
SCALE_KEYS = ("scale_min", "scale_max")  # of shares by a signal of query heads


class KVSection(Section):
    """Compressed caches: how many keys and values each head keeps while decoding, and which."""

    budget: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the full cache's slots that is kept (null: all)"
    )
    budget_tokens: Count | None = Field(None, description="the same as slots per head (null: see kv.budget)")
    policy: Policy = Field(
        "snapkv+ema",
        description="which tokens stay: by their attention (snapkv+ema, tova, h2o), the last ones (streaming), or any (random)",
    )
    signal: Signal = Field(
        "loss",
        description="what a head's share of the slots goes by, as measured by `calibrate --what kv` (uniform: all alike)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto", description="precision of the cached keys and values (auto: the compute dtype)"
    )
    sinks: CountOrZero = Field(4, description="first tokens of the text that always stay")
    recent: Count = Field(16, description="last tokens that always stay, at most half of a head's slots")
    window: Count = Field(32, description="snapkv+ema: last tokens of a prompt whose attention says what stays")
    pool: Count = Field(7, description="snapkv+ema: tokens around one whose largest importance is its own; odd (1: itself)")
    decay: Fraction | Literal["entropy"] = Field(
        0.98, description="snapkv+ema: factor of an importance per token (entropy: from the measured entropy of the head)"
    )
    scale_min: Annotated[float, Field(gt=0, le=1)] = Field(
        0.3, description="smallest share of a head by entropy or coverage, as a multiple of the mean"
    )
    scale_max: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        2.5, description="largest share of a head by entropy or coverage, as a multiple of the mean"
    )
    grouping: Literal["max", "mean", "min"] = Field(
        "max", description="how a key head's entropy or coverage comes from those of its query heads"
    )
    calibration: str | None = Field(None, description="the file of the measured signals (null: the run's kv_entropy.json)")

    @property
    def has_budget(self) -> bool:
        """Whether a budget is given, be it of everything."""
        return self.budget is not None or self.budget_tokens is not None

    @property
    def compresses(self) -> bool:
        """Whether tokens may be dropped at all."""
        return self.has_budget and self.budget != 1

    @property
    def decays_by_entropy(self) -> bool:
        """Whether importances fade as the entropy of their head says."""
        return self.policy == "snapkv+ema" and self.decay == "entropy"

    @property
    def reads_calibration(self) -> bool:
        """Whether something measured on the model is asked for."""
        return self.has_budget and (self.signal != "uniform" or self.decays_by_entropy)


def idle_keys(kv: KVSection, use_cache: bool = True) -> dict[str, str]:
    """The keys that change nothing beside the others, and when that is so."""
    if not use_cache:
        return dict.fromkeys(KVSection.model_fields, "while generation.use_cache is false")
    if not kv.has_budget:
        others = [key for key in KVSection.model_fields if key not in (*BUDGETS, "dtype")]
        return dict.fromkeys(others, "without kv.budget or kv.budget_tokens")
    idle = dict[str, str]()
    if kv.policy != "snapkv+ema":
        idle |= dict.fromkeys(POLICY_KEYS, f"while kv.policy is {kv.policy}: it refines snapkv+ema")
    if kv.signal in ("uniform", "loss"):
        own = ("grouping",) if not kv.decays_by_entropy else ()
        idle |= dict.fromkeys((*SCALE_KEYS, *own), f"while kv.signal is {kv.signal}: it refines entropy and coverage")
    if not kv.reads_calibration:
        idle["calibration"] = "while neither kv.signal nor kv.decay asks for what was measured"
    return idle


def kv_conflicts(kv: KVSection, use_cache: bool) -> list[tuple[bool, str]]:
    """Every rule that spans keys of the section: (is it broken, the sentence that says so)."""
    return [
        (
            kv.budget is not None and kv.budget_tokens is not None,
            "kv.budget and kv.budget_tokens both say how many slots are kept: give one of them, "
            f"got {kv.budget} and {kv.budget_tokens}",
        ),
        (kv.pool % 2 == 0, f"kv.pool must be odd, got {kv.pool}"),
        *(
            (getattr(kv, key) not in (KVSection.model_fields[key].default, PLAIN.get(key)), f"kv.{key} has no effect {reason}")
            for key, reason in idle_keys(kv, use_cache).items()
        ),
    ]

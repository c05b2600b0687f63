"""The `kv` section: budget, eviction policy and dtype of the KV cache.

As flags and as keyword arguments the keys are called `kv_budget`, `kv_policy` and so on.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dantinox.config.base import Conflict, Count, CountOrZero, Fraction, Section, field
from dantinox.config.prerequisites import Needs, differs, given

Policy = Literal["snapkv+ema", "expected_attention", "kvzip", "streaming", "tova", "h2o", "random"]
AVERAGES = ("snapkv+ema", "expected_attention", "kvzip")  # policies with a moving average of attention while decoding
Signal = Literal["uniform", "entropy", "coverage", "distance", "loss"]

BUDGET = Needs(("kv.budget", given), ("kv.budget_tokens", given))
SNAPKV = BUDGET, Needs(("kv.policy", "snapkv+ema"))
AVERAGE = BUDGET, Needs(*(("kv.policy", policy) for policy in AVERAGES))
BY_HEAD = tuple(("kv.signal", signal) for signal in ("entropy", "coverage", "distance"))  # what query heads are measured for


class KVSection(Section):
    """Compressed caches: how many keys and values each head keeps while decoding, and which."""

    needs = (Needs(("generation.use_cache", True)),)

    budget: Annotated[float, Field(gt=0, le=1)] | None = field(None, "share of the full cache's slots that is kept (null: all)")
    budget_tokens: Count | None = field(None, "the same as slots per head (null: see kv.budget)")
    policy: Annotated[Policy, BUDGET] = field(
        "snapkv+ema",
        "which tokens stay: by their attention (snapkv+ema, tova, h2o), by the attention expected of later tokens "
        "(expected_attention), by that of a second reading (kvzip), the last ones (streaming), or any (random)",
    )
    signal: Annotated[Signal, BUDGET] = field(
        "loss", "signal that sets each head's share of the slots, measured by `calibrate --what kv` (uniform: equal shares)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = field(
        "auto", "precision of the cached keys and values (auto: the compute dtype)"
    )
    sinks: Annotated[CountOrZero, BUDGET] = field(4, "first tokens of the text that always stay")
    recent: Annotated[Count, BUDGET] = field(16, "last tokens that always stay, at most half of a head's slots")
    window: Annotated[Count, *SNAPKV] = field(32, "snapkv+ema: last tokens of a prompt whose attention says what stays")
    pool: Annotated[Count, *SNAPKV] = field(7, "snapkv+ema: window of max pooling over token importances; odd (1: no pooling)")
    decay: Annotated[Fraction | Literal["entropy"], *AVERAGE] = field(
        0.98, "factor of an importance per token where it is an average (entropy: from the measured entropy of the head)"
    )
    scale_min: Annotated[float, Field(gt=0, le=1), BUDGET, Needs(*BY_HEAD)] = field(
        0.3, "smallest share of a head by entropy, coverage or distance, as a multiple of the mean"
    )
    scale_max: Annotated[float, Field(ge=1, allow_inf_nan=False), BUDGET, Needs(*BY_HEAD)] = field(
        2.5, "largest share of a head by entropy, coverage or distance, as a multiple of the mean"
    )
    grouping: Annotated[Literal["max", "mean", "min"], BUDGET, Needs(*BY_HEAD, ("kv.decay", "entropy"))] = field(
        "max", "how a key head's entropy, coverage or distance comes from those of its query heads"
    )
    calibration: Annotated[str | None, BUDGET, Needs(("kv.signal", differs("uniform")), ("kv.decay", "entropy"))] = field(
        None, "the file of the measured signals (null: the run's kv_entropy.json)"
    )

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
        return self.policy in AVERAGES and self.decay == "entropy"

    @property
    def reads_calibration(self) -> bool:
        """Whether something measured on the model is asked for."""
        return self.has_budget and (self.signal != "uniform" or self.decays_by_entropy)


def kv_conflicts(kv: KVSection) -> Iterator[Conflict]:
    """Yields the rules across keys of the section that are broken."""
    if kv.budget is not None and kv.budget_tokens is not None:
        yield "kv.budget", f"and kv.budget_tokens exclude each other: give one, got {kv.budget} and {kv.budget_tokens}"
    if kv.pool % 2 == 0:
        yield "kv.pool", f"must be odd, got {kv.pool}"

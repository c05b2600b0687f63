"""The `kv` section: budget, eviction policy and dtype of the KV cache.

The flags and keyword arguments of these settings are called `kv_budget`, `kv_policy` and so on.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.base import Conflict, Count, CountOrZero, Fraction, Section, as_tuple, field
from dantinox.config.prerequisites import Needs, differs, is_set

Policy = Literal["snapkv+ema", "expected_attention", "kvzip", "streaming", "tova", "h2o", "random"]
# The policies that average attention while decoding.
AVERAGE_POLICIES = ("snapkv+ema", "expected_attention", "kvzip")
# The range is far wider than any useful one, and narrow enough for exact arithmetic with the
# shares.
LayerRatio = Annotated[float, Field(ge=1e-6, le=1e6)]
Signal = Literal["uniform", "entropy", "coverage", "distance", "loss"]

NEEDS_BUDGET = Needs(("kv.budget", is_set), ("kv.budget_tokens", is_set))
# Pairs of prerequisites, which must both be met.
NEEDS_SNAPKV = (NEEDS_BUDGET, Needs(("kv.policy", "snapkv+ema")))
NEEDS_AVERAGE = (NEEDS_BUDGET, Needs(*(("kv.policy", policy) for policy in AVERAGE_POLICIES)))
# Alternatives of one prerequisite: the signals that are measured per query head.
HEAD_SIGNALS = tuple(("kv.signal", signal) for signal in ("entropy", "coverage", "distance"))


class KVSection(Section):
    """Compressed KV caches: budget, eviction policy and dtype."""

    needs = (Needs(("generation.use_cache", True)),)

    budget: Annotated[float, Field(gt=0, le=1)] | None = field(
        None, "fraction of the slots of the full cache to keep (null: all)"
    )
    budget_tokens: Count | None = field(
        None, "number of slots per head to keep (null: see kv.budget)"
    )
    policy: Annotated[Policy, NEEDS_BUDGET] = field(
        "snapkv+ema",
        "tokens to keep: by attention (snapkv+ema, tova, h2o), by the expected attention of later"
        " tokens (expected_attention), by attention in a second pass over the prompt (kvzip), the"
        " last ones (streaming), or random ones",
    )
    signal: Annotated[Signal, NEEDS_BUDGET] = field(
        "loss",
        "signal that sets each head's share of the slots, measured by `calibrate --what kv`"
        " (uniform: equal shares)",
    )
    layer_ratios: Annotated[
        tuple[LayerRatio, ...] | None, BeforeValidator(as_tuple), NEEDS_BUDGET
    ] = field(
        None,
        "share of each layer, relative to their mean and multiplied with the"
        " share of a head (null: equal shares)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8", "int4", "int2"] = field(
        "auto", "dtype of cached keys and values (auto: the compute dtype)"
    )
    sinks: Annotated[CountOrZero, NEEDS_BUDGET] = field(
        4, "number of first tokens that are always kept"
    )
    recent: Annotated[Count, NEEDS_BUDGET] = field(
        16, "number of last tokens that are always kept, at most half of a head's slots"
    )
    window: Annotated[Count, *NEEDS_SNAPKV] = field(
        32, "snapkv+ema: number of last prompt tokens whose attention ranks the other tokens"
    )
    pool: Annotated[Count, *NEEDS_SNAPKV] = field(
        7, "snapkv+ema: width of max pooling over token importance; odd (1: no pooling)"
    )
    decay: Annotated[Fraction | Literal["entropy"], *NEEDS_AVERAGE] = field(
        0.98,
        "decay per token of the averaged importance (entropy: from"
        " the measured entropy of the head)",
    )
    scale_min: Annotated[float, Field(gt=0, le=1), NEEDS_BUDGET, Needs(*HEAD_SIGNALS)] = field(
        0.3, "entropy, coverage, distance: lower limit of a head's share, as a multiple of the mean"
    )
    scale_max: Annotated[
        float, Field(ge=1, allow_inf_nan=False), NEEDS_BUDGET, Needs(*HEAD_SIGNALS)
    ] = field(
        2.5, "entropy, coverage, distance: upper limit of a head's share, as a multiple of the mean"
    )
    grouping: Annotated[
        Literal["max", "mean", "min"], NEEDS_BUDGET, Needs(*HEAD_SIGNALS, ("kv.decay", "entropy"))
    ] = field(
        "max",
        "how the entropy, coverage or distance of a key head is"
        " computed from those of its query heads",
    )
    calibration: Annotated[
        str | None, NEEDS_BUDGET, Needs(("kv.signal", differs("uniform")), ("kv.decay", "entropy"))
    ] = field(None, "file of the measured signals (null: kv_entropy.json of the run)")

    @property
    def has_budget(self) -> bool:
        """Whether a budget is set, even a budget that keeps every token."""
        return self.budget is not None or self.budget_tokens is not None

    @property
    def compresses(self) -> bool:
        """Whether tokens may be evicted."""
        return self.has_budget and self.budget != 1

    @property
    def decays_by_entropy(self) -> bool:
        """Whether the decay of importances depends on the entropy of their head."""
        return self.policy in AVERAGE_POLICIES and self.decay == "entropy"

    @property
    def reads_calibration(self) -> bool:
        """Whether the settings need a calibration of the model."""
        return self.has_budget and (self.signal != "uniform" or self.decays_by_entropy)


def kv_conflicts(kv: KVSection) -> Iterator[Conflict]:
    """Yields an error for each contradiction among the settings of the section."""
    if kv.budget is not None and kv.budget_tokens is not None:
        yield (
            "kv.budget",
            (
                f"and kv.budget_tokens exclude each other: give one, got {kv.budget} and"
                f" {kv.budget_tokens}"
            ),
        )
    if kv.layer_ratios == ():
        yield "kv.layer_ratios", "must have one number for each layer, got []"
    if kv.pool % 2 == 0:
        yield "kv.pool", f"must be odd, got {kv.pool}"

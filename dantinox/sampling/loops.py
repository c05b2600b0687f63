"""Loops: generated text whose end repeats one sequence of tokens again and again.

For every period p, the state holds the run length r_p: how many tokens in a row, up to the newest
one, equal the token p places before them. The last r_p + p tokens then have the period p. Only
generated tokens count. The text ends in a loop if, for a period p of at most `loop_max_period`,

    r_p + p ≥ max(loop_min_repeats · p, loop_min_tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import MAX_LOOP_PERIOD
from dantinox.sampling.steps import LARGEST, Number

PERIODS_P = np.arange(1, MAX_LOOP_PERIOD + 1, dtype=np.int32)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("max_period", "min_repeats", "min_tokens", "stops", "factor"),
    meta_fields=(),
)
@dataclass(frozen=True)
class LoopRules:
    """The settings of loop detection, [B] each.

    Attributes:
      max_period, min_repeats, min_tokens: int32, the settings of these names; a `max_period` of 0
        turns the row off.
      stops: bool, whether a loop ends the row.
      factor: float32, the factor of the temperature in a loop; None: no row has one.
    """

    max_period: Array
    min_repeats: Array
    min_tokens: Array
    stops: Array
    factor: Array | None

    @classmethod
    def build(cls, sections: Sequence[GenerationSection], always: bool) -> "LoopRules | None":
        """Returns the rules of all rows; None if no row detects loops, unless `always`."""
        on = [g.loop_stop or g.loop_temperature_factor != 1 for g in sections]
        if not always and not any(on):
            return None
        periods = [g.loop_max_period if is_on else 0 for g, is_on in zip(sections, on, strict=True)]
        factors = np.asarray([g.loop_temperature_factor for g in sections], np.float32)
        arrays: dict[str, Any] = {
            "max_period": np.asarray(periods, np.int32),
            "min_repeats": np.asarray([g.loop_min_repeats for g in sections], np.int32),
            "min_tokens": np.asarray([min(g.loop_min_tokens, 2**30) for g in sections], np.int32),
            "stops": np.asarray([g.loop_stop for g in sections]),
            "factor": factors if always or (factors != 1).any() else None,
        }
        return cls(**arrays)


def loop_runs(text_S: Array, length: Number, n_generated: Number) -> Array:
    """Returns the run lengths r_p of a text, int32 [P].

    Args:
      text_S: prompt and output; the first `length` tokens are valid, and the last `n_generated` of
        them are generated.
    """
    position_S = jnp.arange(text_S.shape[0])
    length = jnp.asarray(length)
    first = length - n_generated

    def run_length(period: Array) -> Array:
        before_S = position_S - period
        same_S = (before_S >= first) & (text_S == text_S[jnp.maximum(before_S, 0)])
        return length - 1 - jnp.max(jnp.where(same_S | (position_S >= length), -1, position_S))

    return jnp.where(length > 0, jax.vmap(run_length)(jnp.asarray(PERIODS_P)), 0)


def extend_loop_runs(
    run_P: Array, text_S: Array, length: Number, n_generated: Number, token: Number
) -> Array:
    """Updates `loop_runs` after `token` is appended to the first `length` tokens, of which
    `n_generated` are generated.
    """
    before_P = text_S[jnp.maximum(jnp.asarray(length) - PERIODS_P, 0)]
    return jnp.where((before_P == token) & (jnp.asarray(n_generated) >= PERIODS_P), run_P + 1, 0)


def in_loop(run_BP: Array, rules: LoopRules) -> Array:
    """Returns the rows [B] whose text ends in a loop."""
    needed_BP = jnp.maximum(rules.min_repeats[:, None] * PERIODS_P, rules.min_tokens[:, None])
    return ((run_BP + PERIODS_P >= needed_BP) & (rules.max_period[:, None] >= PERIODS_P)).any(
        axis=1
    )


def loop_temperature(temperature_B: Array, run_BP: Array, rules: LoopRules) -> tuple[Array, Array]:
    """Returns the temperatures [B], multiplied by the factors of the rows in a loop, and the mask
    of the changed rows.
    """
    assert rules.factor is not None
    changed_B = in_loop(run_BP, rules) & (rules.factor != 1)
    return (
        jnp.where(changed_B, jnp.minimum(temperature_B * rules.factor, LARGEST), temperature_B),
        changed_B,
    )


def ends_in_loop(tokens: Sequence[int], section: GenerationSection) -> bool:
    """Returns whether generated tokens end in a loop under the settings of a section."""
    text = np.asarray(tokens)
    for period in range(1, section.loop_max_period + 1):
        size = max(section.loop_min_repeats * period, section.loop_min_tokens)
        if size <= len(text):
            end = text[len(text) - size :]
            if (end[period:] == end[:-period]).all():
                return True
    return False

"""Subsets of the sampling steps that have programs of their own, for batches whose rows use no
other steps.

The program for all steps decides for every token which of them it runs (`sampling.order`). Such
decisions are cheap on a CPU, but on an accelerator each of them takes longer than a step. The
program for a subset runs its steps without a decision.
"""

from dataclasses import fields, replace
from typing import Any, NamedTuple

from dantinox.config import GenerationSection
from dantinox.config.generation_settings import section_order
from dantinox.config.sampling_steps import STEPS
from dantinox.sampling.params import (
    CHOICE_SETTINGS,
    NUMBER_BOUNDS,
    SamplingParams,
    enabled_steps,
    is_greedy,
)
from dantinox.sampling.state import SamplerState, fields_read

# Read once, because the program of every request is chosen with them.
DEFAULT_CHOICES = tuple(
    (key, GenerationSection.model_fields[key].default) for key in CHOICE_SETTINGS
)


class Subset(NamedTuple):
    """Steps in their order, and whether the program draws at random."""

    name: str
    steps: tuple[str, ...]
    draws: bool

    def serves(self, section: GenerationSection) -> bool:
        """Returns whether a row with these settings runs only these steps, in this order."""
        on = enabled_steps(section, has_stop_ids=True)
        order = [name for name in section_order(section) if name in on]
        return (
            section.strategy == "chain"
            and order == [name for name in self.steps if name in on]
            and len(order) == len(on)
            and (self.draws or is_greedy(section))
            and not section.loop_stop
            and section.loop_temperature_factor == 1
            and all(getattr(section, key) == default for key, default in DEFAULT_CHOICES)
        )

    def reduce_params(self, params: SamplingParams) -> SamplingParams:
        """Returns what the program for these steps reads of the parameters of the program for all
        steps.
        """
        numbers = {
            "temperature",
            *(key for name in self.steps for key in STEPS[name].settings),
        } & NUMBER_BOUNDS.keys()
        tables = {key for name in self.steps for key in STEPS[name].indirect}
        return replace(
            params,
            numbers={key: params.numbers[key] for key in sorted(numbers)},
            enabled={name: params.enabled[name] for name in self.steps},
            tables={key: table for key, table in params.tables.items() if key in tables},
            plan=self.steps,
            choices=DEFAULT_CHOICES,
            order=None,
            loops=None,
            report=None,
            report_rows=None,
            allowed_bits=None,
            skip_inactive_steps=False,
            stochastic=self.draws,
        )

    def reduce_state(self, state: SamplerState) -> SamplerState:
        """Returns what the program for these steps reads of the state of the program for all
        steps.
        """
        read = {"n_generated", "length", *fields_read(self.steps)}
        unread: dict[str, Any] = {
            field.name: None for field in fields(state) if field.name not in read
        }
        return replace(state, **unread)


_PENALTIES = ("repetition_penalty", "presence_frequency_penalty")
SUBSETS = (
    Subset("greedy", _PENALTIES, False),
    Subset("temperature", (*_PENALTIES, "temperature"), True),
    Subset("plain", (*_PENALTIES, "temperature", "top_k", "top_p", "min_p"), True),
)
# A later subset contains the earlier ones, so the program with the largest index that the rows need
# serves all of them.
ALL_STEPS = len(SUBSETS)  # the index of the program for all steps
LARGEST_SUBSET = ALL_STEPS - 1


def smallest_subset(section: GenerationSection) -> int:
    """Returns the index of the first subset that serves a row with these settings; `ALL_STEPS` if
    none does.
    """
    return next(
        (index for index, subset in enumerate(SUBSETS) if subset.serves(section)), ALL_STEPS
    )


def reduce_params(subset: int, params: SamplingParams) -> SamplingParams:
    """Returns the parameters that the program for a subset reads."""
    return params if subset == ALL_STEPS else SUBSETS[subset].reduce_params(params)


def reduce_state(subset: int, state: SamplerState) -> SamplerState:
    """Returns the state that the program for a subset reads and updates."""
    return state if subset == ALL_STEPS else SUBSETS[subset].reduce_state(state)


def restore(state: SamplerState, reduced: SamplerState) -> SamplerState:
    """Returns the state of the program for all steps after the program for a subset.

    The fields that the subset does not read keep their values. No row that the subset serves reads
    them.
    """
    changed = {field.name: getattr(reduced, field.name) for field in fields(reduced)}
    return replace(state, **{name: value for name, value in changed.items() if value is not None})

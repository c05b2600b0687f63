"""The `grpo` section: group-relative policy optimization, its losses and its rewards.

A loss is a row of options in `LOSSES`. A setting of the section replaces one option of the row.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from dantinox.config.base import Conflict, Count, NonNegative, Section, field
from dantinox.config.generation_settings import GREEDY_BELOW, GenerationSection
from dantinox.config.prerequisites import Condition, Needs, differs, format_value
from dantinox.config.reward_settings import reward_conflicts

Advantage = Literal["mean", "std"]
Normalization = Literal["sequence", "token", "constant"]
Ratio = Literal["token", "sequence"]
ClipLow = Annotated[float, Field(ge=0, lt=1)]
ClipHigh = NonNegative


class PolicyLoss(NamedTuple):
    """The options of a policy loss; `dantinox.training.policy_loss` defines their meaning.

    Attributes:
      advantage: mean: reward minus the mean of its group; std: that difference divided by the
        group's standard deviation.
      normalization: how the losses of the tokens of a batch are averaged.
      clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high]; a side that is 0
        is not clipped.
      ratio: token: one probability ratio per token; sequence: their geometric mean over the answer.
      dynamic_sampling: whether groups of equal rewards are replaced by groups of other prompts.
    """

    advantage: Advantage
    normalization: Normalization
    clip_low: float
    clip_high: float
    ratio: Ratio
    dynamic_sampling: bool


LOSSES: dict[str, PolicyLoss] = {
    # The fields: advantage, normalization, clip_low, clip_high, ratio, dynamic_sampling.
    # Williams 1992, with the group's mean as baseline:
    "reinforce": PolicyLoss("mean", "token", 0.0, 0.0, "token", False),
    # Shao et al. 2024, DeepSeekMath, equation 21:
    "grpo": PolicyLoss("std", "sequence", 0.2, 0.2, "token", False),
    # Liu et al. 2025, Dr. GRPO:
    "dr_grpo": PolicyLoss("mean", "constant", 0.2, 0.2, "token", False),
    # Yu et al. 2025, DAPO, equation 8:
    "dapo": PolicyLoss("std", "token", 0.2, 0.28, "token", True),
    # Zheng et al. 2025, GSPO, equations 5 and 7:
    "gspo": PolicyLoss("std", "sequence", 3e-4, 4e-4, "sequence", False),
}


def _as_entry(value: object) -> object:
    """Converts the name of a reward to an entry without options."""
    return {"name": value} if isinstance(value, str) else value


def _as_entries(value: object) -> object:
    """Converts a list to a tuple, and a single entry to a tuple of one entry."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str | dict) else value


ENTRY_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": True}]}
Entry = Annotated[dict[str, Any], BeforeValidator(_as_entry), WithJsonSchema(ENTRY_SCHEMA)]
Rewards = Annotated[tuple[Entry, ...], BeforeValidator(_as_entries)]
uses_code = Condition(
    "contains python_tests",
    lambda rewards: any(entry.get("name") == "python_tests" for entry in rewards),
)
# `dynamic_sampling` is true, or it is null and the loss is the one whose row has it. Both
# prerequisites must be met.
NEEDS_SAMPLING_ROUNDS = (
    Needs(("grpo.dynamic_sampling", True), ("grpo.loss", "dapo")),
    Needs(("grpo.dynamic_sampling", differs(False))),
)


class GRPOSection(Section):
    """Reinforcement learning from rewards of sampled answers."""

    needs = (Needs(("training.objective", "grpo")),)

    samples: Annotated[int, Field(ge=2, le=1024)] = field(
        8, "answers sampled per prompt, which form a group"
    )
    loss: Literal["reinforce", "grpo", "dr_grpo", "dapo", "gspo"] = field(
        "reinforce", "policy loss, a row of the next six options (docs/reinforcement.md)"
    )
    advantage: Advantage | None = field(
        None,
        "reward minus the mean of its group (mean), or that divided by the standard deviation (std)"
        " (null: that of loss)",
    )
    normalization: Normalization | None = field(
        None,
        "average over tokens: of each answer, then over answers (sequence); of the batch (token); "
        "sum per answer divided by generation.max_new_tokens (constant) (null: that of loss)",
    )
    clip_low: ClipLow | None = field(
        None,
        "clip the probability ratio at 1 − clip_low if the advantage is negative (0: no clipping;"
        " null: that of loss)",
    )
    clip_high: ClipHigh | None = field(
        None,
        "clip the probability ratio at 1 + clip_high if the advantage is positive (0: no clipping;"
        " null: that of loss)",
    )
    ratio: Ratio | None = field(
        None,
        "probability ratio of each token, or its geometric mean over the"
        " answer (sequence) (null: that of loss)",
    )
    dynamic_sampling: bool | None = field(
        None,
        "replace groups whose rewards are all equal by groups of"
        " further prompts (null: that of loss)",
    )
    max_sampling_rounds: Annotated[Count, *NEEDS_SAMPLING_ROUNDS] = field(
        4, "dynamic_sampling: maximum rounds of further prompts per step"
    )
    kl_weight: NonNegative = field(
        0.0, "weight of the KL divergence from the starting weights (0: none)"
    )
    updates: Annotated[int, Field(ge=1, le=1024)] = field(
        1, "optimizer updates per step, all on the same answers"
    )
    rewards: Rewards = field(
        (), "reward functions, each a name or a mapping with name, weight and options"
    )
    allow_code_execution: Annotated[bool, Needs(("grpo.rewards", uses_code))] = field(
        False, "let the reward python_tests run code that the model wrote"
    )

    @property
    def options(self) -> PolicyLoss:
        """The options of `loss`, with the settings that replace some of them."""
        given = {name: getattr(self, name) for name in PolicyLoss._fields}
        return LOSSES[self.loss]._replace(
            **{name: value for name, value in given.items() if value is not None}
        )


# Settings of `generation` that a training run with rewards does not support: name → the only value,
# and the reason.
WITHOUT_REWARDS: dict[str, tuple[object, str]] = {
    "n": (1, "grpo.samples is the number of answers per prompt"),
    "num_beams": (1, "answers are sampled"),
    "guidance_scale": (1.0, "the probabilities of the answers must be those of the model"),
    "token_healing": (False, "the chat template ends the prompt"),
    "use_cache": (True, "answers are decoded with a cache"),
    "tensor_parallel": (1, "training with rewards runs on one device"),
    "speculation": ("off", "the draft model would not be trained"),
}


def grpo_conflicts(
    grpo: GRPOSection, objective: str, generation: GenerationSection
) -> Iterator[Conflict]:
    """Yields an error for each contradiction among these settings."""
    if objective != "grpo":
        return
    if generation.greedy:
        yield (
            "generation.greedy",
            "must be false with training.objective: grpo: all answers to a prompt would be equal",
        )
    elif generation.strategy == "chain" and generation.temperature < GREEDY_BELOW:
        yield (
            "generation.temperature",
            (
                f"must be at least {GREEDY_BELOW:g} with training.objective: grpo: all answers to a"
                " prompt would be equal"
            ),
        )
    for name, (only, reason) in WITHOUT_REWARDS.items():
        value = getattr(generation, name)
        if value != only:
            must = (
                f"must be {format_value(only)} with training.objective: grpo, got"
                f" {format_value(value)}"
            )
            yield f"generation.{name}", f"{must}: {reason}"
    if not grpo.rewards:
        yield "grpo.rewards", "must name at least one reward with training.objective: grpo, got []"
    yield from reward_conflicts(grpo.rewards)
    if uses_code(grpo.rewards) and not grpo.allow_code_execution:
        yield (
            "grpo.rewards",
            (
                "contain python_tests, which runs code that the model wrote: set"
                " grpo.allow_code_execution: true to allow this"
            ),
        )

"""The `lora` section: rank, scale, form and target projections of low-rank adapters, and
`LoraConfig`, its resolved form.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from dantinox.config.attention_settings import AttentionSection
from dantinox.config.base import (
    Conflict,
    Count,
    Positive,
    Section,
    as_tuple,
    field,
    setting_defaults,
)
from dantinox.config.model_settings import GATED_ACTIVATIONS, ModelSection
from dantinox.config.moe_settings import MoESection
from dantinox.config.prerequisites import Needs, is_set

# The dtypes of the frozen weights under adapters.
BaseWeights = Literal["float32", "bfloat16", "int8", "nf4"]
# The names that PEFT uses.
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION_TARGETS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
NEEDS_LORA = Needs(("lora.rank", is_set))


class LoraSection(Section):
    """Low-rank adapters (LoRA), trained instead of all weights."""

    rank: Count | None = field(
        None,
        "rank of adapters on the frozen weights of training.init_from (null: train all weights)",
    )
    alpha: Annotated[Positive | None, NEEDS_LORA] = field(
        None, "multiply the output of adapters by alpha / rank (null: 2 · rank)"
    )
    rank_stabilized: Annotated[bool, NEEDS_LORA] = field(
        False,
        "multiply the output of adapters by alpha / √rank instead"
        " (rsLoRA), which suits large ranks",
    )
    dora: Annotated[bool, NEEDS_LORA] = field(
        False,
        "also train the norm of the weights of every output (weight-decomposed adapters, DoRA)",
    )
    dropout: Annotated[float, Field(ge=0, lt=1), NEEDS_LORA] = field(
        0.0, "dropout rate of the input of adapters, in training"
    )
    targets: Annotated[tuple[Projection, ...] | None, BeforeValidator(as_tuple), NEEDS_LORA] = (
        field(
            None,
            "projections with adapters (null: all projections of"
            " the layers, except those of experts)",
        )
    )
    base_weights: Annotated[BaseWeights, NEEDS_LORA] = field(
        "float32",
        "dtype of the frozen weights while adapters train; int8: projections only, one scale per"
        " output row; nf4: projections in 4 bits (QLoRA)",
    )


DEFAULT = setting_defaults(LoraSection)


@dataclass(frozen=True)
class LoraConfig:
    """The resolved adapter settings. `dora` adds a trained magnitude per output; `held` is the
    dtype of the frozen weights.
    """

    rank: int
    alpha: float
    targets: tuple[Projection, ...]
    dropout: float = DEFAULT.dropout
    held: BaseWeights = DEFAULT.base_weights
    rank_stabilized: bool = DEFAULT.rank_stabilized
    dora: bool = DEFAULT.dora

    @property
    def scale(self) -> float:
        """The factor on the outputs of adapters: alpha / √rank if `rank_stabilized`, else alpha /
        rank.
        """
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def projections(m: ModelSection, moe: MoESection) -> tuple[Projection, ...]:
    """Returns the projections of a layer that can have adapters."""
    gate: tuple[Projection, ...] = ("gate_proj",) if m.activation in GATED_ACTIVATIONS else ()
    return ATTENTION_TARGETS if moe.use_moe else (*ATTENTION_TARGETS, *gate, "up_proj", "down_proj")


def lora_config(lora: LoraSection, m: ModelSection, moe: MoESection) -> LoraConfig | None:
    """Returns the resolved adapter settings, or None if the model has no adapters."""
    if lora.rank is None:
        return None
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    available = projections(m, moe)
    targets = (
        available
        if lora.targets is None
        else tuple(name for name in available if name in lora.targets)
    )
    return LoraConfig(
        lora.rank, alpha, targets, lora.dropout, lora.base_weights, lora.rank_stabilized, lora.dora
    )


def lora_conflicts(
    lora: LoraSection, init_from: str | None, m: ModelSection, moe: MoESection, a: AttentionSection
) -> Iterator[Conflict]:
    """Yields an error for each contradiction among these settings."""
    if lora.rank is None:
        return
    available = projections(m, moe)
    if init_from is None:
        yield "lora.rank", "needs training.init_from, the run with the base weights"
    if a.kv_lora_rank is not None:
        yield (
            "lora.rank",
            "must be null with attention.kv_lora_rank: latent projections cannot have adapters",
        )
    if m.projections == "ternary":
        yield (
            "lora.rank",
            (
                "must be null with model.projections: ternary: float adapters could not be merged"
                " into ternary weights"
            ),
        )
    if moe.use_moe and lora.base_weights in ("int8", "nf4"):
        why = f"experts cannot be stored in {lora.base_weights}"
        yield "lora.base_weights", f"must be float32 or bfloat16 with moe.use_moe: {why}"
    if lora.targets == ():
        yield "lora.targets", "must name at least one projection, got []"
    for name in lora.targets or ():
        if name not in available:
            why = (
                "experts cannot have adapters"
                if moe.use_moe
                else f"model.activation {m.activation} has no such projection"
            )
            yield "lora.targets", f"cannot contain {name}: {why} (allowed: {', '.join(available)})"

"""The `distill` section: the teacher of a distillation and its loss."""

from collections.abc import Iterator
from typing import Annotated, Literal

from dantinox.config.base import Conflict, Count, Fraction, Positive, Section, field
from dantinox.config.prerequisites import Needs, differs


class DistillSection(Section):
    """Distillation of a frozen teacher run into the model."""

    needs = (Needs(("training.objective", "distill")),)

    teacher: str | None = field(
        None, "run directory of the teacher, with the same tokenizer; its architecture may differ"
    )
    data: Literal["text", "conversations", "samples"] = field(
        "text",
        "text: every token of plain text; conversations: only assistant turns, as with the"
        " objective sft; samples: answers to prompts, sampled from"
        " the model in training (on-policy)",
    )
    divergence: Literal["forward_kl", "reverse_kl"] = field(
        "forward_kl", "forward_kl: KL(teacher ‖ student); reverse_kl: KL(student ‖ teacher)"
    )
    temperature: Positive = field(
        1.0,
        "divide the logits of teacher and student by this number, and"
        " multiply the divergence by its square",
    )
    top_k: Count | None = field(
        None,
        "compare the teacher's most probable tokens, and the total of all others (null: every token"
        " of the vocabulary)",
    )
    data_weight: Annotated[Fraction, Needs(("distill.data", differs("samples")))] = field(
        0.0, "weight of the next-token loss; the divergence has the weight 1 - data_weight"
    )
    teacher_weights: Literal["float32", "bfloat16"] = field(
        "float32", "dtype of the teacher's matrices in memory"
    )
    init_from_teacher: Annotated[bool, Needs(("training.init_from", None))] = field(
        False,
        "start from evenly spaced layers of the teacher; all sizes except num_blocks must be equal",
    )


def distill_conflicts(distill: DistillSection, objective: str) -> Iterator[Conflict]:
    """Yields an error for each contradiction among these settings."""
    if objective == "distill" and distill.teacher is None:
        yield "distill.teacher", "must be set with training.objective: distill"

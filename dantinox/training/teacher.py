"""The teacher of a distillation: its run, its architecture, its placement on the devices and its
frozen weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from dantinox.config import Config, LoraConfig, ModelConfig
from dantinox.distributed import Layout
from dantinox.files import UserError
from dantinox.model import Transformer
from dantinox.model.parameters import Parameters, abstract_model
from dantinox.run import RunDirectory, load_run_config, open_base
from dantinox.text import Tokenizer
from dantinox.training.distillation import BatchWithTeacher
from dantinox.training.starting_point import check_tokenizer, load_frozen_weights


@dataclass(frozen=True)
class Teacher:
    """A frozen model that teaches another one on the same devices.

    Attributes:
      run: the run with its weights.
      layout: its architecture, and the placement of its weights.
    """

    run: RunDirectory
    layout: Layout

    @property
    def model(self) -> ModelConfig:
        return self.layout.model

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of its weights by path, with shardings on a mesh."""
        return self.layout.place_shapes(self.layout.shapes)

    def load_weights(self) -> Parameters:
        """Returns its weights on the devices."""
        return load_frozen_weights(self.run, self.layout)

    @cached_property
    def _build(self) -> Any:
        return abstract_model(self.model)[0]

    def attach(self, batch: Any, parameters: Mapping[str, jax.Array]) -> BatchWithTeacher:
        """Returns a batch with the teacher, inside `shard_map`; `parameters` are the local shards
        of its weights.
        """
        teacher: Transformer = self.layout.build_model(self._build, dict(parameters))
        return BatchWithTeacher(batch, teacher)


def open_teacher(
    config: Config, layout: Layout, fingerprint: str | None = None, run: RunDirectory | None = None
) -> Teacher | None:
    """Returns the teacher that the settings name; None unless the objective is distill. Reads no
    weights.

    The teacher runs without gradients, so it needs no rematerialization. For
    `distill.teacher_weights: bfloat16` it is a model with frozen weights and no adapters.

    Args:
      layout: the layout of the trained model.
      fingerprint: the fingerprint of its tokenizer; None: only the architectures are compared.
      run: the run that is trained. The teacher is also searched next to it, as in `open_base`.

    Raises:
      UserError: the run is missing or has another tokenizer, its context is shorter than that of
        the trained model, or the mesh does not fit it.
    """
    if config.training.objective != "distill":
        return None
    source = open_base(config.distill.teacher, run, "teacher")
    if fingerprint is not None:
        check_tokenizer("distill.teacher", source, fingerprint)
    saved = load_run_config(source)
    vocab_size = Tokenizer.load(source.tokenizer).vocab_size
    held = config.distill.teacher_weights
    frozen = None if held == "float32" else LoraConfig(1, 1.0, (), held=held)
    model = replace(
        saved.architecture(vocab_size, layout.model.platform),
        lora=frozen,
        remat="none",
        kernel="auto",
    )
    if model.max_context < layout.model.max_context:
        raise UserError(
            f"model.max_context {layout.model.max_context} is longer than the context of the"
            f" teacher {source.path}, {model.max_context}: lower it"
        )
    placed = replace(layout, model=model)
    placed.check_whole_matrices(" of the teacher")
    _ = placed.splits_in_layer  # raises if a weight cannot be split
    return Teacher(source, placed)

"""The compiled programs that evaluate a batch without a gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dantinox.config import Config, ModelConfig
from dantinox.distributed import BATCH, Layout
from dantinox.model import Transformer
from dantinox.model.lora import frozen_parameters, trainable_parameters
from dantinox.model.parameters import Parameters, abstract_model
from dantinox.text import Batch
from dantinox.training.objective import OBJECTIVES, Objective
from dantinox.training.preference_objectives import pair_logprobs
from dantinox.training.teacher import Teacher
from dantinox.training.token_losses import LossSums


def add_kl(
    objective: Objective,
    build: Callable[[], Transformer],
    batch: Any,
    layout: Layout,
    parts: int = 1,
) -> Any:
    """Returns the batch with the KL divergence that `objective` needs, estimated over the rows of
    all devices; see `kl_P`.

    Args:
      build: returns the model.
      parts: the number of equal parts of the device's rows that are read one after the other, to
        save memory.
    """
    sums = objective.kl_sums
    if sums is None:
        return batch
    split = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
    total, count = layout.parallelism.psum_batch(
        jnp.sum(jax.lax.map(lambda part: sums(build(), part), split), axis=0)
    )
    kl = jnp.maximum(total / jnp.maximum(count, 1.0), 0.0)
    return batch._replace(kl_P=jnp.full_like(batch.kl_P, kl))


def teacher_specs(teacher: Teacher | None) -> dict[str, PartitionSpec]:
    """Returns the partition specs of the teacher's weights."""
    return {} if teacher is None else teacher.layout.specs


def make_eval_step(
    model: ModelConfig,
    layout: Layout | None = None,
    config: Config = Config(),  # noqa: B008 (frozen)
    teacher: Teacher | None = None,
) -> Any:
    """Returns a jitted function that evaluates one batch without dropout.

    The function maps (parameters, batch, frozen weights, teacher's weights) to `LossSums` without
    routing.

    Args:
      config: the settings of the objective.
      teacher: the teacher, if the objective is distill.
    """
    layout = layout or Layout(model)
    build, _ = abstract_model(model)
    objective = OBJECTIVES[config.training.objective]

    def evaluate(
        parameters: Parameters, batch: Batch, base: Parameters, teacher_weights: Parameters
    ) -> LossSums:
        def built() -> Transformer:
            return layout.build_model(build, parameters | base)

        inputs = batch if teacher is None else teacher.attach(batch, teacher_weights)
        total = objective.losses(built(), add_kl(objective, built, inputs, layout), config, None)
        return layout.psum(total._replace(routing=None))

    trained = trainable_parameters(layout.specs, model)
    frozen = frozen_parameters(layout.specs, model)
    sharded = layout.shard_map(
        evaluate, (trained, layout.batch_spec, frozen, teacher_specs(teacher)), PartitionSpec()
    )
    return jax.jit(
        lambda parameters, batch, base={}, teacher_weights={}: sharded(
            parameters, batch, base, teacher_weights
        )
    )


def make_reference_step(
    model: ModelConfig,
    layout: Layout | None = None,
    logprobs: Callable[[Transformer, Any], jax.Array] = pair_logprobs,
) -> Any:
    """Returns a jitted function of log-probabilities: (parameters, batch, frozen weights) → an
    array, sharded like the batch.

    Args:
      logprobs: (model, batch) → an array with one row per row or pair of the batch.
    """
    layout = layout or Layout(model)
    build, _ = abstract_model(model)

    def reference(parameters: Parameters, batch: Any, base: Parameters) -> jax.Array:
        return logprobs(layout.build_model(build, parameters | base), batch)

    specs = (
        trainable_parameters(layout.specs, model),
        PartitionSpec(BATCH),
        frozen_parameters(layout.specs, model),
    )
    return jax.jit(layout.shard_map(reference, specs, PartitionSpec(BATCH)))

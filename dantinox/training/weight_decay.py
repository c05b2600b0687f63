"""Decoupled weight decay (Loshchilov & Hutter 2019), of all weights or only of those that the
update moves toward zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dantinox.config.training_settings import TrainingSection
from dantinox.model.lora import ADAPTER_SUFFIXES
from dantinox.model.parameters import Parameters


def decayed(direction: jax.Array, parameter: jax.Array, training: TrainingSection) -> jax.Array:
    """Returns the direction plus `weight_decay` times the parameter. The optimizer subtracts the
    sum times the learning rate.

    With `cautious_decay`, a weight decays only if the direction has its sign or is 0, so that both
    move it toward zero (Chen et al. 2025, "Cautious Weight Decay", algorithm 1).
    """
    decay = training.weight_decay * parameter
    return direction + (
        jnp.where(direction * parameter >= 0, decay, 0) if training.cautious_decay else decay
    )


def add_weight_decay(training: TrainingSection) -> optax.GradientTransformation:
    """Adds weight decay to the directions of matrices and tables, but not to scales, biases and
    attention sinks.
    """

    def update(directions: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda d, p: decayed(d, p, training), directions, parameters), state

    return optax.masked(
        optax.GradientTransformation(lambda _: optax.EmptyState(), update), _decay_mask
    )


def _decay_mask(parameters: Parameters) -> dict[str, bool]:
    return {name: name.endswith(("kernel", "embed", *ADAPTER_SUFFIXES)) for name in parameters}

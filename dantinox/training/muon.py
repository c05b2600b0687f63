"""The optimizer Muon, with an optional normalization of its updates (NorMuon)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dantinox.config.training_settings import TrainingSection
from dantinox.distributed import Layout
from dantinox.model.parameters import Parameters
from dantinox.training.orthogonalize import fan_axes, orthogonalize
from dantinox.training.weight_decay import decayed

MOMENTUM = 0.95
SQUARES_DECAY = 0.95  # of the second moments of NorMuon


class MuonState(NamedTuple):
    """The number of steps, and the momentum of every matrix."""

    steps: jax.Array
    momentum: Parameters


class NorMuonState(NamedTuple):
    """The state of Muon, and the second moments of NorMuon.

    Attributes:
      steps, momentum: as in `MuonState`.
      squares: one second moment for each index of the longer side of each matrix. The axes of the
        shorter side are kept, with size 1.
    """

    steps: jax.Array
    momentum: Parameters
    squares: Parameters


def muon(
    training: TrainingSection,
    learning_rate: Callable[[Any], jax.Array],
    layout: Layout | None = None,
) -> optax.GradientTransformation:
    """Returns the optimizer Muon (Jordan et al. 2024), with decoupled weight decay.

    The updates are orthogonalized Nesterov momentum; `orthogonalize` also multiplies them by
    √max(1, fan out / fan in).

    With `muon_normalize` the state is a `NorMuonState`, else a `MuonState`.
    """

    def init(parameters: Parameters) -> MuonState | NorMuonState:
        steps = jnp.zeros((), jnp.int32)
        momentum = jax.tree.map(jnp.zeros_like, parameters)
        if not training.muon_normalize:
            return MuonState(steps, momentum)
        return NorMuonState(
            steps,
            momentum,
            # The means are computed only for their shapes.
            {name: jnp.zeros_like(_mean_squares(name, p)) for name, p in parameters.items()},
        )

    def update(
        gradients: Parameters, state: Any, parameters: Any
    ) -> tuple[Parameters, MuonState | NorMuonState]:
        rate = learning_rate(state.steps)
        steps = state.steps + 1
        momentum = jax.tree.map(_interpolate, state.momentum, gradients)
        # Nesterov momentum: the new average moves once more towards the gradients.
        directions = orthogonalize(
            jax.tree.map(_interpolate, momentum, gradients), training.muon_steps, layout
        )
        next_state: MuonState | NorMuonState = MuonState(steps, momentum)
        if training.muon_normalize:
            directions, squares = normalize_sizes(directions, state.squares)
            next_state = NorMuonState(steps, momentum, squares)
        updates = jax.tree.map(lambda d, p: -rate * decayed(d, p, training), directions, parameters)
        return updates, next_state

    return optax.GradientTransformation(init, update)


def _interpolate(m: jax.Array, g: jax.Array) -> jax.Array:
    return MOMENTUM * m + (1 - MOMENTUM) * g


def normalize_sizes(directions: Parameters, squares: Parameters) -> tuple[Parameters, Parameters]:
    """Divides each vector of a matrix by its root mean square over the steps (Li et al. 2025,
    "NorMuon", algorithm 1).

    There is one vector for each index of the longer side of the matrix: the weights of one neuron
    if fan out is at least fan in. The vectors of the shorter side of an orthogonalized matrix
    already have equal norms. The second moment of a vector is a moving average of its mean square.
    Each matrix is then multiplied by a factor that restores its Frobenius norm.

    Args:
      directions: the orthogonalized momentum, path → array.
      squares: the second moments of the previous step, as in `NorMuonState`.

    Returns:
      The normalized directions, and the new second moments.
    """
    means = {name: _mean_squares(name, d) for name, d in directions.items()}
    squares = jax.tree.map(
        lambda v, mean: SQUARES_DECAY * v + (1 - SQUARES_DECAY) * mean, squares, means
    )

    def normalized(name: str, d: jax.Array) -> jax.Array:
        # The first input axis; a parameter that is no hidden matrix has the axes [in, out].
        first, _ = fan_axes(name, d.ndim) or (0, 1)
        x = d / (jnp.sqrt(squares[name]) + 1e-10)
        # The axes of one matrix, without those of a stack.
        axes = tuple(range(first, d.ndim))
        norm, new_norm = (
            jnp.sqrt(jnp.sum(jnp.square(y), axis=axes, keepdims=True)) for y in (d, x)
        )
        return x * (norm / (new_norm + 1e-20))

    return {name: normalized(name, d) for name, d in directions.items()}, squares


def _mean_squares(name: str, d: jax.Array) -> jax.Array:
    """Returns the mean square over the shorter side of a hidden matrix or of each matrix of a
    stack. The axes of that side are kept, with size 1.
    """
    # The first input axis and the first output axis, as in `normalize_sizes`.
    first, second = fan_axes(name, d.ndim) or (0, 1)
    fan_in, fan_out = math.prod(d.shape[first:second]), math.prod(d.shape[second:])
    shorter = range(first, second) if fan_in <= fan_out else range(second, d.ndim)
    return jnp.mean(jnp.square(d), axis=tuple(shorter), keepdims=True)

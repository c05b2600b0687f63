"""Learning-rate schedules, optimizers, and the moving average of the weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dantinox.config.training_settings import TrainingSection
from dantinox.distributed import Layout
from dantinox.model.parameters import Parameters
from dantinox.training.muon import MuonState, NorMuonState, muon
from dantinox.training.orthogonalize import matrix_shape
from dantinox.training.weight_decay import add_weight_decay

Schedule = Callable[[Any], jax.Array]


def schedule(training: TrainingSection, steps: int) -> Schedule:
    """Returns a function that maps the optimizer step (0 is the first) to a factor in [0, 1].

    A learning rate is its peak value times this factor. With w `warmup_steps` the factor of step n
    is the product of min(1, (n + 1) / (w + 1)) and the decay, which falls from 1 in step w to
    `min_lr_ratio` in step `steps` − 1 (`wsd`: over the last `decay_fraction` of the steps). So the
    peak is reached in step w, after w smaller steps. If w is `steps` − 1 or more, `cosine` and
    `linear` have no decay; if w is `steps`, the peak is not reached.
    """
    warmup = training.warmup_steps
    low = training.min_lr_ratio
    if warmup is None or warmup > steps:
        warmup = min(100, steps // 10)
    last = max(steps - 1, warmup + 1)
    start = (
        last - max(1, round(training.decay_fraction * steps))
        if training.schedule == "wsd"
        else warmup
    )

    def factor(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - start) / max(1, last - start), 0, 1)
        rise = jnp.minimum(1.0, (step + 1) / (warmup + 1))
        return rise * (low + (1 - low) * DECAY_CURVES[training.schedule](done))

    return factor


DECAY_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda done: 0.5 * (1 + jnp.cos(jnp.pi * done)),
    "linear": lambda done: 1 - done,
    "wsd": lambda done: 1 - done,
    "constant": jnp.ones_like,
}


def _row_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape for parameters that are not hidden matrices: two axes for per-layer
    embeddings, else unchanged.
    """
    return (
        (shape[0], math.prod(shape[1:]))
        if name.startswith("per_layer/") and len(shape) > 1
        else shape
    )


class Optimizer(NamedTuple):
    """An optax transformation and its learning rates.

    Attributes:
      init, update: as in `optax.GradientTransformation`. With `training.ema` the state is an
        `EMAState`.
      rates: maps a step (0 is the first) to a dictionary of the learning rates that `update`
        applies. The keys are the names of the settings: `lr`, and with Muon also `muon_lr`, the
        rate of its matrices.
    """

    init: Callable[[Parameters], Any]
    update: Callable[[Parameters, Any, Parameters], tuple[Parameters, Any]]
    rates: Callable[[Any], dict[str, jax.Array]]


def optimizer(
    training: TrainingSection,
    steps: int,
    factor: Schedule | None = None,
    layout: Layout | None = None,
) -> Optimizer:
    """Builds the optimizer: gradient clipping, the update rule of `training.optimizer`, and the
    moving average of `training.ema`.

    Args:
      factor: maps the step to a factor on the peak learning rates; None: `training.schedule`.
      layout: the layout of the devices that share the step.
    """
    scheduled = factor or schedule(training, steps)

    def rates(step: Any) -> dict[str, jax.Array]:
        muon_only = (
            {"muon_lr": training.muon_lr * scheduled(step)} if training.optimizer == "muon" else {}
        )
        return {"lr": training.lr * scheduled(step)} | muon_only

    descend = optax.scale_by_learning_rate(lambda step: rates(step)["lr"])
    rule = optax.chain(RULES[training.optimizer](training), add_weight_decay(training), descend)
    if training.optimizer == "muon":
        rule = _partition(muon(training, lambda step: rates(step)["muon_lr"], layout), rule)
    if training.grad_clip:
        rule = optax.chain(optax.clip_by_global_norm(training.grad_clip), rule)
    if training.ema:
        rule = with_ema(rule, training.ema)
    return Optimizer(rule.init, rule.update, rates)


def _adamw(training: TrainingSection) -> optax.GradientTransformation:
    """Loshchilov & Hutter 2019, algorithm 2."""
    return optax.scale_by_adam(training.beta1, training.beta2)


def _lion(training: TrainingSection) -> optax.GradientTransformation:
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2). Use a third to a tenth
    of AdamW's rates.
    """
    return optax.scale_by_lion(training.beta1, training.beta2)


def _sgd(training: TrainingSection) -> optax.GradientTransformation:
    """Nesterov momentum (Sutskever et al. 2013, equation 3)."""
    return optax.trace(training.beta1, nesterov=True)


def _adafactor(training: TrainingSection) -> optax.GradientTransformation:
    """Second moments factored into row and column means, which need little memory (Shazeer & Stern
    2018, algorithm 4).

    It has no momentum, clips updates to a root mean square of 1, and uses absolute learning rates,
    as AdamW does.
    """
    return _with_matrix_shapes(
        optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    )


RULES: dict[str, Callable[[TrainingSection], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _adamw,  # for parameters that are not hidden matrices
    "lion": _lion,
    "adafactor": _adafactor,
    "sgd": _sgd,
}


def _with_matrix_shapes(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a rule so that it receives each hidden matrix with two axes (fan in, fan out). Stacks
    are split.
    """

    def flat(tree: Parameters) -> Parameters:
        matrices = {
            name: p.reshape(matrix_shape(name, p.shape) or _row_shape(name, p.shape))
            for name, p in tree.items()
        }
        stacks = {
            name: p for name, p in matrices.items() if p.ndim == 3 or name.startswith("rolled/")
        }
        single = {name: p for name, p in matrices.items() if name not in stacks}
        return single | {f"{name}/{i}": x for name, p in stacks.items() for i, x in enumerate(p)}

    def update(gradients: Parameters, state: Any, parameters: Any = None) -> tuple[Parameters, Any]:
        updates, state = rule.update(
            flat(gradients), state, None if parameters is None else flat(parameters)
        )

        def joined(name: str, shape: tuple[int, ...]) -> jax.Array:
            count = (matrix_shape(name, shape) or shape)[0]
            matrix = (
                updates[name]
                if name in updates
                else jnp.stack([updates[f"{name}/{i}"] for i in range(count)])
            )
            return matrix.reshape(shape)

        return {name: joined(name, g.shape) for name, g in gradients.items()}, state

    return optax.GradientTransformation(lambda parameters: rule.init(flat(parameters)), update)


# The states that hold the step of the schedule, and the name of that field. Other counts belong to
# moments and averages.
SCHEDULE_STEPS: dict[type, str] = {
    optax.ScaleByScheduleState: "count",
    MuonState: "steps",
    NorMuonState: "steps",
}


def update_if(taken: jax.Array, after: Any, before: Any) -> Any:
    """Returns the optimizer state after a step if the step is taken, else the state before it with
    an advanced schedule.
    """

    def choose(new: Any, old: Any) -> Any:
        chosen = jax.tree.map(partial(jnp.where, taken), new, old)
        field = SCHEDULE_STEPS.get(type(new))
        return chosen if field is None else chosen._replace(**{field: getattr(new, field)})

    return jax.tree.map(choose, after, before, is_leaf=lambda node: type(node) in SCHEDULE_STEPS)


class EMAState(NamedTuple):
    """The state of a rule, the moving average of the weights, and the number of steps in the
    average.
    """

    rule: Any
    average: Parameters
    steps: jax.Array


def with_ema(rule: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Adds a moving average of the updated weights to a rule (Polyak & Juditsky 1992). The updates
    do not change.

    After step t, counted from 0, the average moves by the fraction 1 − min(decay, (1 + t) / (10 +
    t)) toward the weights. So the number of steps that it effectively averages over grows to 1 / (1
    − decay), and the initial weights soon lose their influence.
    """

    def init(parameters: Parameters) -> EMAState:
        return EMAState(
            rule.init(parameters), jax.tree.map(jnp.array, parameters), jnp.zeros((), jnp.int32)
        )

    def update(gradients: Parameters, state: Any, parameters: Any) -> tuple[Parameters, EMAState]:
        updates, inner = rule.update(gradients, state.rule, parameters)
        t = state.steps.astype(jnp.float32)
        share = 1 - jnp.minimum(decay, (1 + t) / (10 + t))
        average = jax.tree.map(
            lambda a, p, u: a + share * (p + u - a), state.average, parameters, updates
        )
        return updates, EMAState(inner, average, state.steps + 1)

    return optax.GradientTransformation(init, update)


def _partition(
    matrices: optax.GradientTransformation, others: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Applies `matrices` to the parameters that Muon trains, and `others` to the rest."""

    def parts(tree: Parameters) -> tuple[Parameters, Parameters]:
        inside = {name: p for name, p in tree.items() if matrix_shape(name, p.shape)}
        return inside, {name: p for name, p in tree.items() if name not in inside}

    def init(parameters: Parameters) -> dict[str, Any]:
        inside, outside = parts(parameters)
        return {"matrices": matrices.init(inside), "others": others.init(outside)}

    def update(
        gradients: Parameters, state: Any, parameters: Any
    ) -> tuple[Parameters, dict[str, Any]]:
        (g_in, g_out), (p_in, p_out) = parts(gradients), parts(parameters)
        inside, inner = matrices.update(g_in, state["matrices"], p_in)
        outside, outer = others.update(g_out, state["others"], p_out)
        return inside | outside, {"matrices": inner, "others": outer}

    return optax.GradientTransformation(init, update)

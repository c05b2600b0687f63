"""`dantinox find-lr`: a learning-rate range test (Smith 2017, section 3.3)."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import Config, UserError
from dantinox.distributed import make_layout
from dantinox.text import ConversationStore, prepare_data
from dantinox.training.launch import base_template
from dantinox.training.reference_logprobs import compute_reference_logprobs
from dantinox.training.starting_point import frozen_weights, starting_tokenizer, starting_weights
from dantinox.training.step import TrainStep
from dantinox.training.teacher import open_teacher

SMOOTHING = 0.9  # decay of the running mean of the losses, which is bias-corrected
DIVERGENCE_RATIO = 1.5  # training has diverged above this multiple of the lowest smoothed loss
MAX_FACTOR, MIN_FACTOR = 1e2, 1e-3  # multiples of the configured rates


@dataclass(frozen=True)
class RateTest:
    """Losses of steps whose learning rate rises by a constant factor, up to the step where the loss
    diverged.

    Attributes:
      key: the setting whose values are `rates`. With Muon, `training.lr` rises in proportion.
      rates: the rate of each step.
      losses: nats per token before the update of each step.
      smoothed: the running mean of `losses`.
      lowest: the rate at the lowest smoothed loss; training diverges at slightly higher rates.
      steepest: the rate at which the smoothed loss falls fastest.
      suggested: the peak rate to train with: `steepest`, but at most a third of `lowest`.
    """

    key: str
    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    lowest: float
    steepest: float
    suggested: float


def find_lr(
    config: Config, steps: int, progress: Callable[[str], None] = lambda line: None
) -> RateTest:
    """Runs a learning-rate range test of at most `steps` steps from the starting weights of
    `config`.

    The rates rise from `MIN_FACTOR` to `MAX_FACTOR` times the configured ones. Warm-up and schedule
    are not applied, and nothing is saved.

    Raises:
      UserError: no corpus, fewer than 10 steps, or a loss that diverged before it fell.
    """
    if steps < 10:
        raise UserError(f"--tries must be at least 10, got {steps}")
    if config.training.objective == "grpo":
        raise UserError(
            "find-lr compares losses, so it does not support training.objective: grpo, which"
            " maximizes rewards"
        )
    if config.data_objective == "grpo":
        raise UserError(
            "find-lr compares losses of the same data, so it does not support distill.data: samples"
        )
    with tempfile.TemporaryDirectory(prefix="dantinox-") as directory:
        tokenizer, store = prepare_data(
            config, directory, starting_tokenizer(config), chat_template=base_template(config)
        )
        model = config.trained_architecture(tokenizer.vocab_size)
        t = config.training
        progress(
            f"compiling, then at most {steps} steps of {t.batch_size} × {config.model.max_context}"
            " tokens"
        )

        def factor(step: Any) -> jax.Array:
            return jnp.exp(
                math.log(MIN_FACTOR)
                + jnp.asarray(step, jnp.float32) / (steps - 1) * math.log(MAX_FACTOR / MIN_FACTOR)
            )

        layout = make_layout(config, model)
        teacher = open_teacher(config, layout, tokenizer.fingerprint)
        train = TrainStep(config, model, steps, layout, factor, teacher=teacher)
        weights = starting_weights(config, model, tokenizer.fingerprint)
        base = frozen_weights(config, model, tokenizer.fingerprint, layout)
        teacher_weights = {} if teacher is None else teacher.load_weights()
        state = train.initial_state(weights, base)
        if isinstance(store, ConversationStore) and train.objective.has_reference:
            store.reference = compute_reference_logprobs(
                store, model, layout, t.batch_size, state.parameters, base
            )
        key = "muon_lr" if t.optimizer == "muon" else "lr"
        losses, rates = [], []
        for step in range(steps):
            batch = layout.put_batch(partial(store.batch, step), t.batch_size, t.grad_accum)
            state, metrics = train.program(state, batch, base, teacher_weights)
            losses.append(float(metrics.loss))
            rates.append(float(metrics.rates[key]))
            if not math.isfinite(losses[-1]) or (
                len(losses) > 10 and losses[-1] > 2 * DIVERGENCE_RATIO * min(losses)
            ):
                break
    return analyze_losses(f"training.{key}", rates, losses)


def analyze_losses(key: str, rates: list[float], losses: list[float]) -> RateTest:
    """Analyzes the losses up to the step where they diverged.

    Raises:
      UserError: the loss did not fall.
    """
    smoothed = []
    mean = 0.0
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**number))
        if not smoothed[-1] <= DIVERGENCE_RATIO * min(smoothed):  # also NaN
            break
    kept = sum(math.isfinite(loss) for loss in smoothed)  # only the last one may be NaN or infinite
    rates, losses, smoothed = rates[:kept], losses[:kept], smoothed[:kept]
    if not rates:
        raise UserError(f"the loss is NaN: lower {key}")
    low = int(np.argmin(smoothed))
    if low < 2:
        raise UserError(f"the loss never fell, starting at {key} {rates[0]:.1g}: lower it")
    steep = int(np.argmin(np.gradient(smoothed[: low + 1])))
    return RateTest(
        key, rates, losses, smoothed, rates[low], rates[steep], min(rates[steep], rates[low] / 3)
    )


def rate_test_lines(test: RateTest) -> list[str]:
    """Returns lines with the suggested rate, how it was chosen, and the losses that it is based
    on.
    """
    steepest = test.suggested == test.steepest
    why = (
        "the loss fell fastest there"
        if steepest
        else f"a third of {test.lowest:.2g}, where the loss was lowest"
    )
    fell = f"{test.smoothed[0]:.3f} → {min(test.smoothed):.3f} in {len(test.losses)} steps"
    return [
        f"{test.key}: try {test.suggested:.2g} ({why})",
        (
            f"smoothed loss {fell}, falling fastest at {test.steepest:.2g}, lowest at"
            f" {test.lowest:.2g}"
        ),
    ]

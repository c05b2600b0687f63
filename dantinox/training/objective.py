"""The table of training objectives."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import Config
from dantinox.model import Transformer
from dantinox.text import Batch, LabeledCompletions, Preferences
from dantinox.training.distillation import distill_losses
from dantinox.training.policy_objective import POLICY_METRICS, grpo_losses
from dantinox.training.preference_objectives import (
    KTO_METRIC_WEIGHTS,
    KTO_METRICS,
    PAIR_METRICS,
    PairLoss,
    dpo,
    example_mask,
    ipo,
    kl_sums,
    kto_losses,
    orpo,
    pair_losses,
    pair_mask,
    simpo,
)
from dantinox.training.rollout import abstract_rollout, count_answers
from dantinox.training.token_losses import LossSums, next_token_losses


class Objective(NamedTuple):
    """What a training run minimizes. The loss of a batch is the sum of its losses divided by
    `divisor`.

    Attributes:
      losses: maps a model, a batch or a device's part of it, the settings, and the random streams
        of dropout (None: no dropout) to sums. The sums of the parts of a batch add up.
      divisor: returns the divisor of the sums of a batch; the divisors of its parts add up.
      abstract_batch: returns the shapes of a batch of `rows` examples of `length` tokens, a
        NamedTuple.
      conversations: number of conversations in an example, each with its own row of tokens.
      per_token: whether the loss is a mean over target tokens, for which bits per byte are defined.
      has_validation_loss: whether the loss of validation batches is computed. If not, rewards are
        evaluated.
      metrics: names of the sums in `LossSums.metrics`. The means are columns of the logs. The mean
        −ln p of target tokens is called `data_loss`, if it is not the loss.
      metric_weights: metric → the metric whose mean divides its mean, for a mean over some examples
        of the batch.
      has_reference: whether batches contain log-probabilities under the model that training starts
        from.
      kl_sums: returns the sum and the number of the terms of a KL divergence. It is estimated over
        the whole batch before the losses, without a gradient, and added to the batch as `kl_P`.
        None: the losses need none.
      event: the kind of the rows with validation metrics in metrics.jsonl.
    """

    losses: Callable[[Transformer, Any, Config, nnx.Rngs | None], LossSums]
    divisor: Callable[[Any], jax.Array]
    abstract_batch: Callable[[int, int], Any]
    conversations: int = 1
    per_token: bool = True
    has_validation_loss: bool = True
    metrics: tuple[str, ...] = ()
    metric_weights: Mapping[str, str] = MappingProxyType({})
    has_reference: bool = False
    kl_sums: Callable[[Transformer, Any], jax.Array] | None = None
    event: str = "preferences"

    def named_metrics(self, means: Any, prefix: str = "") -> dict[str, float]:
        """Returns the means of the metrics by column name, without those of which the batch has no
        example.
        """
        if means is None:
            return {}
        values = dict(zip(self.metrics, np.asarray(means, np.float64).tolist(), strict=True))
        named = {}
        for name, value in values.items():
            weight = values[self.metric_weights[name]] if name in self.metric_weights else 1.0
            if weight:
                named[f"{prefix}{name}"] = value / weight
        return named


def random_batch(shapes: Any, vocab_size: int) -> Any:
    """Returns a batch of these shapes with random tokens, all of which are targets. Its other
    arrays are zeros.
    """
    rng = np.random.default_rng(0)

    def fill(name: str, shape: jax.ShapeDtypeStruct | None) -> np.ndarray | None:
        if shape is None:
            return None
        if name.startswith(("tokens", "targets")):
            return rng.integers(0, vocab_size, shape.shape).astype(shape.dtype)
        return np.full(shape.shape, name.startswith("mask"), shape.dtype)

    return type(shapes)(*(fill(*item) for item in zip(shapes._fields, shapes, strict=True)))


def abstract_windows(rows: int, length: int) -> Any:
    """Returns the shapes of a `Batch`."""
    int32, float32 = (
        jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    return Batch(int32, int32, int32, float32)  # type: ignore[arg-type]


def abstract_pairs(rows: int, length: int) -> Any:
    """Returns the shapes of `Preferences`."""
    int32, float32 = (
        jax.ShapeDtypeStruct((rows, 2, length), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    return Preferences(int32, int32, int32, float32, jax.ShapeDtypeStruct((rows, 2), jnp.float32))  # type: ignore[arg-type]


def abstract_labeled(rows: int, length: int) -> Any:
    """Returns the shapes of `LabeledCompletions`."""
    flags, floats = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.bool_, jnp.float32))
    return LabeledCompletions(*(*abstract_pairs(rows, length), flags, floats))


def on_pairs(loss: PairLoss, has_reference: bool) -> Objective:
    """Returns the objective of a loss of preference pairs."""
    return Objective(
        partial(pair_losses, loss),
        lambda pairs: jnp.sum(pair_mask(pairs)),
        abstract_pairs,
        conversations=2,
        per_token=False,
        metrics=PAIR_METRICS,
        has_reference=has_reference,
    )


TOKENS = Objective(
    lambda model, batch, config, rngs: next_token_losses(model, batch, rngs=rngs),
    lambda batch: jnp.sum(batch.mask_BT),
    abstract_windows,
)
OBJECTIVES: dict[str, Objective] = {
    "next_token": TOKENS,
    "sft": TOKENS,
    "dpo": on_pairs(dpo, has_reference=True),
    "ipo": on_pairs(ipo, has_reference=True),
    "kto": Objective(
        kto_losses,
        lambda examples: jnp.sum(example_mask(examples)),
        abstract_labeled,
        conversations=2,
        per_token=False,
        metrics=KTO_METRICS,
        metric_weights=KTO_METRIC_WEIGHTS,
        has_reference=True,
        kl_sums=kl_sums,
    ),
    "orpo": on_pairs(orpo, has_reference=False),
    "simpo": on_pairs(simpo, has_reference=False),
    "distill": TOKENS._replace(
        losses=lambda model, batch, config, rngs: distill_losses(
            model, batch, config.distill, rngs=rngs
        ),
        metrics=("kl", "data_loss"),
        event="distillation",
    ),
    "grpo": Objective(
        lambda model, rollout, config, rngs: grpo_losses(model, rollout, config, rngs=rngs),
        count_answers,
        abstract_rollout,
        per_token=False,
        has_validation_loss=False,
        metrics=POLICY_METRICS,
        event="rewards",
    ),
}

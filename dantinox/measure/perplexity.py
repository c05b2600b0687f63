"""How well a model predicts a text, and what narrow weights change about it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.generation.prepare import widen
from dantinox.model import Transformer
from dantinox.text import Batch


class Comparison(NamedTuple):
    """Two models on the same text.

    Attributes:
      nats, other_nats: mean −ln p per target of the first and of the second model.
      logit_error: root mean square of the difference of their logits, both with mean zero per position.
      targets: how many targets were counted.
    """

    nats: float
    other_nats: float
    logit_error: float
    targets: int

    @property
    def perplexity_change(self) -> float:
        """Perplexity of the second over that of the first, minus 1."""
        return float(np.expm1(self.other_nats - self.nats))


def compare(model: Transformer, other: Transformer, batches: Iterator[Batch]) -> Comparison:
    """Runs both models over validation batches. Narrow weights are widened first: the numbers are the same."""

    @nnx.jit(graph_updates=False)
    def measure(model: Transformer, other: Transformer, batch: Any) -> jax.Array:
        positions_BT = jnp.broadcast_to(jnp.arange(batch.tokens_BT.shape[1]), batch.tokens_BT.shape)
        a, b = (m(batch.tokens_BT, positions_BT, segments_BT=batch.segments_BT)[0] for m in (widen(model), widen(other)))
        nats = [
            -jnp.sum(batch.mask_BT * jnp.take_along_axis(jax.nn.log_softmax(x), batch.targets_BT[..., None], 2)[..., 0])
            for x in (a, b)
        ]
        gap = (b - b.mean(-1, keepdims=True)) - (a - a.mean(-1, keepdims=True))
        return jnp.stack([*nats, jnp.sum(batch.mask_BT * jnp.mean(jnp.square(gap), -1)), batch.mask_BT.sum()])

    total = np.zeros(4)
    for batch in batches:
        total += np.asarray(measure(model, other, jax.tree.map(jnp.asarray, batch)), np.float64)
    nats, other_nats, gap, targets = total
    return Comparison(nats / targets, other_nats / targets, float(np.sqrt(gap / targets)), int(targets))

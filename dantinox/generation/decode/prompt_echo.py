"""`PromptEcho`: the reports on the tokens of a prompt that a server prefills for a request with
`echo`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.model import Transformer
from dantinox.model.scoring import map_logits
from dantinox.sampling import StepInfo
from dantinox.sampling.step_info import step_info


def echo_steps(count: int, model: Transformer, x_RTD: jax.Array, next_RT: jax.Array) -> StepInfo:
    """Returns reports `[T, …]` on the tokens `next_RT` that follow the hidden states of the first
    row; inside a program.

    Args:
      count: the number of alternatives per token.
    """

    def report(logits_V: jax.Array, token: jax.Array) -> StepInfo:
        return step_info(count, logits_V, logits_V, token, jnp.asarray(False))

    info = map_logits(report, model, x_RTD[:1], next_RT[:1])
    first: StepInfo = jax.tree.map(lambda x_1T: x_1T[0], info)
    return first


class PromptEcho:
    """The reports on a prompt on the host, chunk by chunk."""

    def __init__(self) -> None:
        self._chunks: list[StepInfo] = []

    def add(self, steps: StepInfo | None, size: int) -> None:
        """Adds the first `size` reports of a chunk, which are on the device."""
        self._chunks.append(jax.tree.map(lambda x: np.asarray(x)[:size], steps))

    @property
    def steps(self) -> StepInfo | None:
        """The reports so far; None for a prompt of one token, which has none."""
        if not self._chunks:
            return None
        joined: StepInfo = jax.tree.map(lambda *parts: np.concatenate(parts), *self._chunks)
        return joined

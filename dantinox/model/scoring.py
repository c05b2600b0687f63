"""Log-probabilities of given tokens, computed for a few positions at a time to bound memory."""

from collections.abc import Callable
from typing import Any

import jax

from dantinox.model.transformer import Transformer

MAX_LOGITS = 1 << 22  # 16 MiB in float32


def map_positions(
    function: Callable[..., Any], vocab_size: int, *values_BT: Any, max_logits: int = MAX_LOGITS
) -> Any:
    """Applies `function` to the values at each position, in batches with at most `max_logits`
    logits.

    Args:
      values_BT: arrays `[B, T, …]`. The function receives the slice `[…]` of each array and returns
        arrays of any shape.

    Returns:
      The results of the function, with leading axes `[B, T]`.
    """
    B, T = values_BT[0].shape[:2]
    rows = tuple(x.reshape(B * T, *x.shape[2:]) for x in values_BT)
    outputs = jax.lax.map(
        lambda row: function(*row), rows, batch_size=min(B * T, max(1, max_logits // vocab_size))
    )
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), outputs)


def token_logprobs(model: Transformer, x_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns ln p `[B, T]` of each token, given the hidden state of the position before it. Call
    it inside `jax.jit`.

    Args:
      x_BTD: the final hidden states, as `model.hidden` returns them.
      tokens_BT: the token that follows each position.
    """
    return map_positions(
        lambda x_D, token: jax.nn.log_softmax(model.logits(x_D))[token],
        model.config.vocab_size,
        x_BTD,
        tokens_BT,
    )

"""Functions of the logits at each position of a sequence, such as the log-probabilities of given
tokens, computed for a few positions at a time to bound memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dantinox.model.transformer import Transformer

MAX_LOGITS = 1 << 22  # 16 MiB in float32


def map_logits(
    function: Callable[..., Any],
    model: Transformer,
    x_BTD: jax.Array,
    *values_BT: Any,
    max_logits: int = MAX_LOGITS,
) -> Any:
    """Applies `function` to the logits at each position, in chunks of at most `max_logits` logits.

    The output layer multiplies all positions of a chunk together. If it multiplied them one by one,
    packed weights would be converted for every position.

    Args:
      function: receives the logits `[V]` and the slices `[…]` of `values_BT` at one position, and
        returns arrays of any shape.
      x_BTD: the final hidden states, as `model.hidden` returns them.
      values_BT: arrays `[B, T, …]`.

    Returns:
      The results of the function, with leading axes `[B, T]`.
    """

    def apply(rows: tuple[jax.Array, ...]) -> Any:
        return jax.vmap(function)(model.logits(rows[0]), *rows[1:])

    B, T = x_BTD.shape[:2]
    N = B * T
    size = min(N, max(1, max_logits // model.config.vocab_size))
    rows = tuple(x.reshape(N, *x.shape[2:]) for x in (x_BTD, *values_BT))
    chunks, rest = divmod(N, size)
    whole = tuple(x[: chunks * size].reshape(chunks, size, *x.shape[1:]) for x in rows)
    outputs = jax.lax.map(apply, whole)
    outputs = jax.tree.map(lambda x: x.reshape(chunks * size, *x.shape[2:]), outputs)
    if rest:
        last = apply(tuple(x[chunks * size :] for x in rows))
        outputs = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), outputs, last)
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), outputs)


def token_logprobs(model: Transformer, x_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns ln p `[B, T]` of each token, given the hidden state of the position before it. Call
    it inside `jax.jit`.

    Args:
      x_BTD: the final hidden states, as `model.hidden` returns them.
      tokens_BT: the token that follows each position.
    """
    return map_logits(
        lambda logits_V, token: jax.nn.log_softmax(logits_V)[token], model, x_BTD, tokens_BT
    )

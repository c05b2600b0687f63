"""Logit processors: a user's function that edits the logits of every token, as a part of the
compiled program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.files import UserError, first_line, quote
from dantinox.sampling.steps import sanitize


class TokenHistory(NamedTuple):
    """The tokens of one row before the token that is chosen next.

    Attributes:
      tokens_S: int32 [S], the tokens of prompt and output. The first `length` are valid; S is the
        capacity of the program.
      length: int32, the number of tokens in prompt and output.
      n_generated: int32, the number of tokens in the output, which is the index of the next token.
    """

    tokens_S: Array
    length: Array
    n_generated: Array


# (logits [V] float32, tokens of the row) -> logits [V]
LogitProcessor = Callable[[Array, TokenHistory], Array]


def check_logit_processor(function: Any) -> None:
    """Checks everything about a logit processor that can be checked without its arguments.

    Raises:
      UserError: it is not a function, or it cannot be hashed, so that its program could not be
        found again.
    """
    if not callable(function):
        raise UserError(
            "logit_processor must be a function (logits_V, history) -> logits_V, got"
            f" {quote(function)}"
        )
    try:
        hash(function)
    except TypeError:
        raise UserError(
            "logit_processor must be hashable: pass a function, or an object without __eq__"
        ) from None


def apply_logit_processor(
    function: LogitProcessor, logits_BV: Array, histories: TokenHistory
) -> Array:
    """Returns the logits [B, V] after a processor has edited each row.

    NaN and +inf are repaired as in the logits of the model. A row of which no token would remain
    does not change.

    Args:
      histories: the history of every row, [B, …] each.

    Raises:
      UserError: JAX cannot trace the function, or the function does not return real numbers [V].
    """
    V = logits_BV.shape[1]
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (logits_BV, histories))
    try:
        shape = jax.eval_shape(function, *row)
    except UserError:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"JAX cannot trace logit_processor for logits [{V}]: {message}") from error
    found = shape if isinstance(shape, jax.ShapeDtypeStruct) else None
    if found is None or found.shape != (V,) or not jnp.issubdtype(found.dtype, jnp.floating):
        got = type(shape).__name__ if found is None else f"{found.dtype} {list(found.shape)}"
        raise UserError(f"logit_processor must return floating-point logits [{V}], got {got}")

    def apply(logits_V: Array, history: TokenHistory) -> Array:
        changed_V, _ = sanitize(function(logits_V, history))
        return jnp.where((changed_V == -jnp.inf).all(), logits_V, changed_V)

    return jax.vmap(apply)(logits_BV, histories)

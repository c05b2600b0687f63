"""The clarify text: tokens that the router inserts where it chooses `clarify`, one per step.

Each token of the text is an ordinary position of the sequence: the model reads it, and the sampling
steps see it as a generated token. A row needs one number as its state: how many tokens it has
emitted since the beginning of the newest text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import UserError

MAX_CLARIFY_TOKENS = 256
# The count of a row without a text so far. It is exact in float32, the type of `RECURRENT_FIELDS`.
NEVER = 2**24


class Insertion(NamedTuple):
    """The result of `ClarifyText.insert`, [B] each.

    Attributes:
      forced: whether the row emits a token of its text instead of a drawn one.
      token: int32, this token.
      since: int32, the new count of tokens since the beginning of the newest text.
    """

    forced: Array
    token: Array
    since: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClarifyText:
    """The texts of a batch.

    Attributes:
      tokens_BK: int32, padded with −1 to `MAX_CLARIFY_TOKENS`, so that all texts share a program.
      length_B: int32, the tokens of each text; 0: the row has no text.
    """

    tokens_BK: Array
    length_B: Array

    @classmethod
    def build(cls, texts: Sequence[Sequence[int]]) -> "ClarifyText | None":
        """Returns the texts of all rows as arrays; None if no row has one.

        Raises:
          UserError: a text is longer than `MAX_CLARIFY_TOKENS`.
        """
        lengths = [len(ids) for ids in texts]
        if max(lengths, default=0) == 0:
            return None
        if max(lengths) > MAX_CLARIFY_TOKENS:
            message = (
                f"router.clarify_text must be at most {MAX_CLARIFY_TOKENS} tokens, got"
                f" {max(lengths)}"
            )
            raise UserError(message, key="router.clarify_text")
        tokens_BK = np.full((len(texts), MAX_CLARIFY_TOKENS), -1, np.int32)
        for tokens_K, ids in zip(tokens_BK, texts, strict=True):
            tokens_K[: len(ids)] = ids
        return cls(tokens_BK, np.asarray(lengths, np.int32))  # type: ignore[arg-type]

    def insert(
        self, since_B: Array, clarifies_B: Array, edited_BV: Array, cooldown_B: Array
    ) -> Insertion:
        """Returns which rows emit a token of their text.

        A text begins where the strategy is `clarify`, if it is the first one of the row, or if
        `cooldown_B` tokens have followed the end of the last one. It continues in the next steps
        whatever their strategies are. A token that the edits forbid is not emitted: the text does
        not begin, or it ends before this token.

        Args:
          since_B: the tokens since the beginning of the newest text, with its own; `NEVER`: there
            was none.
          clarifies_B: whether the strategy of the row is `clarify`.
          edited_BV: logits after edits and penalties; -inf forbids a token.
          cooldown_B: `clarify_cooldown`.
        """
        rows_B = jnp.arange(since_B.shape[0])
        continues_B = since_B < self.length_B
        cooled_down_B = (since_B >= NEVER) | (since_B - self.length_B >= cooldown_B)
        begins_B = clarifies_B & (self.length_B > 0) & ~continues_B & cooled_down_B
        index_B = jnp.where(continues_B, since_B, 0)
        token_B = self.tokens_BK[rows_B, index_B]
        allowed_B = edited_BV[rows_B, jnp.maximum(token_B, 0)] > -jnp.inf
        forced_B = (continues_B | begins_B) & allowed_B
        drawn_B = jnp.where(continues_B, self.length_B + 1, jnp.minimum(since_B + 1, NEVER))
        return Insertion(forced_B, token_B, jnp.where(forced_B, index_B + 1, drawn_B))

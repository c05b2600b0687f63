"""Masks of tokens: uint32 `[⌈V/32⌉]`, where bit i mod 32 of word ⌊i/32⌋ is set if token i may come
next.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from dantinox.config import UserError


def mask_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns the mask that allows only these tokens."""
    bits_W = np.zeros(-(-vocab_size // 32), np.uint32)
    ids = np.fromiter(tokens, np.int64)
    np.bitwise_or.at(bits_W, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits_W


def mask_without(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns the mask that allows all tokens but these."""
    return ~mask_of(tokens, vocab_size)


def allows(bits_W: np.ndarray, token: int) -> bool:
    """Returns whether a mask allows a token."""
    return bool(bits_W[token // 32] >> np.uint32(token % 32) & 1)


def combine_masks(masks: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the tokens that all masks allow; None: all tokens.

    Raises:
      UserError: several masks together allow no token.
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    combined = given[0]
    for mask in given[1:]:
        combined = combined & mask
    if len(given) > 1 and not combined.any():
        raise UserError(
            "the constraint, banned texts and reasoning budget of this"
            " request together allow no token here"
        )
    return combined

"""The prefix cache: slots keep the keys of earlier prompts, and a new prompt reuses its longest prefix."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PrefixMatch(NamedTuple):
    """The beginning of a prompt that a slot holds: `length` tokens, a multiple of a part; None and 0 for nothing."""

    slot: int | None
    length: int


NO_PREFIX = PrefixMatch(None, 0)


def longest_prefix(ids: Sequence[int], held: Iterable[tuple[int, Sequence[int], int]], part: int) -> PrefixMatch:
    """The longest beginning of `ids` that is held in whole parts; its last token is never part of it.

    Args:
      held: (slot, its token ids, how many of them were read in whole parts).
      part: tokens of a part. A part that was read for an earlier request is bit for bit what would be read again.
    """
    best = NO_PREFIX
    for slot, tokens, exact in held:
        most, length = min(exact, len(ids) - 1), 0
        while (end := length + part) <= most and tokens[length:end] == tuple(ids[length:end]):
            length = end
        if length > best.length:
            best = PrefixMatch(slot, length)
    return best

"""The prefix cache: slots keep the keys of earlier prompts, and a new prompt reuses its longest prefix."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PrefixMatch(NamedTuple):
    """A slot that holds a prefix of a prompt, and the length of this prefix in tokens, a multiple of the chunk size.

    Without a match the slot is None and the length is 0.
    """

    slot: int | None
    length: int


NO_PREFIX = PrefixMatch(None, 0)


def longest_prefix(ids: Sequence[int], cached: Iterable[tuple[int, Sequence[int], int]], chunk: int) -> PrefixMatch:
    """Returns the longest cached prefix of `ids` in whole chunks. The prefix never includes the last token.

    Args:
      cached: for each slot `(slot, token ids, length)`, where `length` tokens were prefilled in whole chunks.
      chunk: tokens per prefill chunk. Only whole chunks are reused, because they are bitwise equal to a new prefill.
    """
    best = NO_PREFIX
    for slot, tokens, prefilled_in_chunks in cached:
        limit, length = min(prefilled_in_chunks, len(ids) - 1), 0
        while (end := length + chunk) <= limit and tokens[length:end] == tuple(ids[length:end]):
            length = end
        if length > best.length:
            best = PrefixMatch(slot, length)
    return best

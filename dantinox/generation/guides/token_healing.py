"""Token healing: a prompt may end inside a token.

A tokenizer encodes the prompt "http:" with a token for ":". A model that has always seen the token
"://" there then avoids the continuation "//". Token healing removes such tokens from the end of the
prompt, and the model generates any tokens whose text begins with theirs. The method is that of the
library guidance (github.com/guidance-ai/guidance).
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from dantinox.config import UserError
from dantinox.generation.guides.guide import KEEP, RESTART_BEFORE, Guide, Verdict, WholeText
from dantinox.generation.guides.token_masks import mask_of
from dantinox.text import Tokenizer
from dantinox.text.detokenizer import Detokenizer

MAX_HEALED_TOKENS = 4  # the most tokens that are removed from a prompt


class PieceIndex:
    """The tokens of a vocabulary in the order of their bytes. Tokens without bytes, such as special
    tokens, are not in it.
    """

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.token_pieces is None:
            raise UserError(
                "token_healing needs a tokenizer whose tokens have the same text next to any"
                " others; this tokenizer does not",
                key="generation.token_healing",
            )
        self.pieces = tokenizer.token_pieces.inner
        order = sorted((piece, token) for token, piece in enumerate(self.pieces) if piece)
        self._sorted = [piece for piece, _ in order]
        self._ids = np.asarray([token for _, token in order], np.int32)

    def is_extended(self, data: bytes) -> bool:
        """Whether the bytes of some token begin with `data` and are longer."""
        after = bisect_right(self._sorted, data)
        return after < len(self._sorted) and self._sorted[after].startswith(data)

    def healed_count(self, ids: Sequence[int]) -> int:
        """Returns how many tokens to remove from the end of a prompt.

        A token is removed while some token of the vocabulary extends the bytes of the removed ones.
        At least one token remains, and a special token is never removed.
        """
        data = b""
        count = 0
        for token in ids[:0:-1][:MAX_HEALED_TOKENS]:
            piece = self.pieces[token] if token < len(self.pieces) else b""
            if not piece or not self.is_extended(piece + data):
                break
            data = piece + data
            count += 1
        return count

    def matches(self, data: bytes) -> np.ndarray:
        """Returns the tokens whose bytes are the beginning of `data`, or begin with `data`."""
        ranges = []
        for size in range(1, len(data)):
            first = bisect_left(self._sorted, data[:size])
            ranges.append((first, bisect_right(self._sorted, data[:size], first)))
        first = bisect_left(self._sorted, data)
        # The first piece after those that begin with `data`, which follow each other in the order
        # of the bytes.
        end = bisect_left(self._sorted, True, first, key=lambda piece: not piece.startswith(data))
        ranges.append((first, end))
        return np.concatenate([self._ids[start:end] for start, end in ranges])


class HealedPrefix:
    """Generates the bytes that were removed from a prompt; then the constraint of the request
    begins.

    The constraint applies to the response, so also to the bytes by which a token exceeds the
    removed ones.

    Attributes:
      in_prompt: whether the newest token added no bytes to the response.
    """

    held = 0

    def __init__(
        self,
        index: PieceIndex,
        healed: Sequence[int],
        vocab_size: int,
        constraint: Guide | None = None,
    ):
        """Creates a guide at the end of the shortened prompt.

        Args:
          healed: the removed tokens, at least one.
          constraint: the guide of the constraint of the request, at its start.
        """
        self._index = index
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._rest = b"".join(index.pieces[token] for token in healed)
        self._excluded: set[int] = set()  # tokens that must not come next
        self.in_prompt = True

    @property
    def done(self) -> bool:
        return not self._rest and self._constraint is not None and self._constraint.done

    def copy(self) -> "HealedPrefix":
        copied = copy.copy(self)
        copied._constraint = None if self._constraint is None else self._constraint.copy()
        copied._excluded = set(self._excluded)
        return copied

    def mask(self) -> np.ndarray | None:
        if not self._rest:
            return None if self._constraint is None else self._constraint.mask()
        allowed = self._index.matches(self._rest)
        if isinstance(self._constraint, WholeText):
            starts = self._constraint_starts()
            allowed = np.asarray(
                [token for token in allowed.tolist() if self._excess(token) in starts], np.int32
            )
        if self._excluded:
            allowed = np.setdiff1d(allowed, [*self._excluded])
        return mask_of(allowed, self._vocab_size)

    def push(self, token: int, text: str) -> Verdict:
        """`text` is the text that the token adds to the response."""
        if not self._rest:
            self.in_prompt = False
            return KEEP if self._constraint is None else self._constraint.push(token, text)
        excess = self._excess(token)
        if not excess:
            self._rest = self._rest[len(self._index.pieces[token]) :]
            self._excluded = set()
            return KEEP
        verdict = KEEP
        if isinstance(self._constraint, WholeText):
            verdict = self._constraint.push(self._constraint_starts()[excess], text)
        elif self._constraint is not None:
            verdict = self._constraint.push(token, text)
        if verdict == RESTART_BEFORE:
            self._excluded.add(token)
        else:
            self._rest = b""
            self.in_prompt = False
        return verdict

    def _excess(self, token: int) -> bytes:
        """Returns the bytes by which a token exceeds the rest of the prompt."""
        return self._index.pieces[token][len(self._rest) :]

    def _constraint_starts(self) -> dict[bytes, int]:
        """Returns the bytes of the tokens with which the constraint allows a text to begin; no
        bytes stand for no token.
        """
        assert self._constraint is not None
        bits = self._constraint.mask()
        assert bits is not None
        pieces = self._index.pieces
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(pieces)]
        return {b"": -1} | {
            pieces[token]: token for token in np.flatnonzero(flags).tolist() if pieces[token]
        }


class _ResponseDetokenizer:
    """A detokenizer that drops the text of the prompt."""

    def __init__(self, detokenizer: Detokenizer, prompt_characters: int):
        self._detokenizer = detokenizer
        self._left = prompt_characters  # characters of the prompt that are still to be dropped

    def push(self, ids: Sequence[int]) -> str:
        return self._drop(self._detokenizer.push(ids))

    def flush(self) -> str:
        return self._drop(self._detokenizer.flush())

    def _drop(self, text: str) -> str:
        dropped = min(self._left, len(text))
        self._left -= dropped
        return text[dropped:]


def response_detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    healed: Sequence[int] = (),
    visible_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Returns a detokenizer that has read a prompt, and returns the text that the next tokens add
    to the response.

    Args:
      healed: the tokens that were removed from the end of the prompt, whose text is not a part of
        the response.
    """
    detokenizer = tokenizer.detokenizer(visible_ids)
    if not healed:
        detokenizer.push(prompt)
        return detokenizer
    response = _ResponseDetokenizer(
        detokenizer, len(tokenizer.detokenizer(visible_ids).push([*prompt, *healed]))
    )
    response.push(prompt)
    return response  # type: ignore[return-value]


def healed_characters(tokenizer: Tokenizer, prompt: Sequence[int], healed: Sequence[int]) -> int:
    """Returns the number of characters of the tokens that were removed from a prompt."""
    return len(tokenizer.detokenizer().push([*prompt, *healed])) - len(
        tokenizer.detokenizer().push(prompt)
    )

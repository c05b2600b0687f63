"""Rows of training batches: which spans of the token store they hold, and their order.

Row number n of a training is a function of (seed, n) alone, so that the position in the data is one integer.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dantinox.files import UserError

CACHED_EPOCHS = 4
SCAN_TOKENS = 1 << 22  # tokens, which may be more than the memory holds
NO_TOKEN = -1  # in a row, behind its last document
MIXTURE_CYCLE = 1000  # rows of a mixture in which every source has exactly its share


class Rows(Protocol):
    """The rows of an epoch.

    Attributes:
      count: how many there are.
    """

    count: int

    def read(self, chosen_N: np.ndarray, word: int) -> np.ndarray:
        """The places of the tokens of some rows, int64 [N, T + 1], in the epoch of this random word; of pairs [N, 2, T + 1]."""


class WindowRows:
    """Windows of T + 1 tokens that share their edge tokens, from an offset on that each epoch draws anew.

    There are as many as fit whatever the offset below T, so that at most 2 T - 2 targets at the edges sit an epoch out.
    """

    def __init__(self, start: int, end: int, length: int):
        self._start, self._length = start, length
        self.count = max(1, (end - start - length) // length)
        self._slack = end - start - 1 - self.count * length
        self._offsets_T1 = np.arange(length + 1)

    def read(self, chosen_N: np.ndarray, word: int) -> np.ndarray:
        starts_N = self._start + chosen_N * self._length + word % (self._slack + 1)
        return starts_N[:, None] + self._offsets_T1


def pack_documents(ids: np.ndarray, start: int, length: int, eos_id: int) -> "PackedRows":
    """Rows of whole documents, of which none is cut that fits into a row (Ding et al. 2024, "Fewer Truncations Improve
    Language Modeling", section 3): longest first, each into the row that it fills best.

    A longer document is cut into rows of T targets, and what is left of it is packed. `start` is the place of the first token.
    """
    starts_P, sizes_P = split_documents(document_ends(ids, eos_id), length)
    if not len(sizes_P):
        raise UserError("data.packing: best_fit found no document of two tokens: give other text in data.path")
    room_P = sizes_P.copy()
    if ids[-1] != eos_id:  # cut for validation: nothing may follow what has no end
        room_P[starts_P + sizes_P == len(ids)] = length + 1
    return PackedRows(start + starts_P, sizes_P, room_P, length)


class PackedRows:
    """The places of tokens in rows of T + 1 of them, into which pieces were packed by best fit; `NO_TOKEN` where none is."""

    def __init__(self, starts_P: np.ndarray, sizes_P: np.ndarray, room_P: np.ndarray, length: int):
        """`room_P`: what each piece takes of a row, at least its size."""
        row_P = best_fit(room_P, length + 1)
        order_P = np.argsort(row_P, kind="stable")
        self._length, self._starts_P, self._sizes_P = length, starts_P[order_P], sizes_P[order_P]
        self.count = int(row_P.max()) + 1
        self._first_R = np.searchsorted(row_P[order_P], np.arange(self.count + 1))  # the pieces of a row

    def read(self, chosen_N: np.ndarray, word: int) -> np.ndarray:
        places_NT = np.full((len(chosen_N), self._length + 1), NO_TOKEN, np.int64)
        for places_T, chosen in zip(places_NT, chosen_N, strict=True):
            end = 0
            for piece in range(self._first_R[chosen], self._first_R[chosen + 1]):
                start, size = self._starts_P[piece], self._sizes_P[piece]
                places_T[end : end + size] = np.arange(start, start + size)
                end += size
        return places_NT


class PairRows:
    """The places of the tokens of pieces that come in twos, [N, 2, T + 1], `NO_TOKEN` behind their ends."""

    def __init__(self, starts_P: np.ndarray, sizes_P: np.ndarray, length: int):
        self._starts_N2, self._sizes_N2 = starts_P.reshape(-1, 2, 1), sizes_P.reshape(-1, 2, 1)
        self._offsets_T1, self.count = np.arange(length + 1), len(starts_P) // 2

    def read(self, chosen_N: np.ndarray, word: int) -> np.ndarray:
        places_N2T = self._starts_N2[chosen_N] + self._offsets_T1
        return np.where(self._offsets_T1 < self._sizes_N2[chosen_N], places_N2T, NO_TOKEN)


def document_ends(ids: np.ndarray, eos_id: int) -> np.ndarray:
    """Where each document ends, its end token included; the last one ends with the tokens."""
    starts = range(0, len(ids), SCAN_TOKENS)
    ends = np.concatenate([np.flatnonzero(ids[start : start + SCAN_TOKENS] == eos_id) + start + 1 for start in starts])
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))


def split_documents(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, size) of the pieces of documents: of `length` targets each, which share their edge tokens, and the rest."""
    starts = np.concatenate([[0], ends[:-1]])
    targets = ends - starts - 1
    counts = np.maximum(1, -(-targets // length))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    first = np.repeat(starts, counts) + number * length
    sizes = np.minimum(np.repeat(ends, counts) - first, length + 1)
    held = sizes > 1  # a token alone predicts nothing
    return first[held], sizes[held]


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, best-fit decreasing: longest first, each into the fullest row with room for it."""
    row_of = np.empty(len(sizes), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by their free room
    rooms = rows = 0  # bit r of `rooms`: there is a row with r free
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size << size
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row, rows = capacity, rows, rows + 1
        row_of[piece] = row
        open_rows[room - size].append(row)
        rooms |= 1 << (room - size)
    return row_of


class ShuffledRows:
    """Rows epoch after epoch, each epoch in an order of its own that depends on (seed, stream, epoch) alone."""

    def __init__(self, rows: Rows, seed: int, stream: int = 0):
        self.rows, self._key = rows, seed + (stream << 32)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """The rows of these numbers, counted from the first of the training: their places [N, T + 1]."""
        epochs_N, places_N = np.divmod(numbers_N, self.rows.count)
        parts = []
        for epoch in np.unique(epochs_N).tolist():  # numbers ascend
            word, order = self._order(epoch)
            parts.append(self.rows.read(order[places_N[epochs_N == epoch]], word))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """A random word, and the rows of an epoch in the order in which they are taken."""
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        word, order = philox_permutation(self.rows.count, self._key, epoch)
        # A new dict each time: another thread may be reading the old one.
        recent = dict(list(self._epochs.items())[1 - CACHED_EPOCHS :])
        self._epochs = recent | {epoch: (word, order)}
        return word, order


class MixtureRows:
    """Rows of several sources: in every cycle of `MIXTURE_CYCLE` rows each source has its share, in a random order.

    Each source goes through its own epochs, however long the others are.
    """

    def __init__(self, sources: Sequence[ShuffledRows], weights: Sequence[float], seed: int):
        self._sources, self._key = sources, seed + ((1 << 32) - 1 << 32)
        exact = MIXTURE_CYCLE * np.asarray(weights, float) / np.sum(weights)
        shares = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: MIXTURE_CYCLE - shares.sum()]] += 1  # largest remainders
        self._shares_S = shares
        self._pattern = np.repeat(np.arange(len(sources)), shares)

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """The rows of these numbers, counted from the first of the training: their places [N, T + 1]."""
        cycles_N, places_N = np.divmod(numbers_N, MIXTURE_CYCLE)
        source_N, within_N = np.empty_like(numbers_N), np.empty_like(numbers_N)
        for cycle in np.unique(cycles_N).tolist():
            _, order = philox_permutation(MIXTURE_CYCLE, self._key, cycle)
            source_C = self._pattern[order]
            within_C = np.empty(MIXTURE_CYCLE, np.int64)  # how many rows of its source came before in the cycle
            by_source = np.argsort(source_C, kind="stable")
            within_C[by_source] = np.arange(MIXTURE_CYCLE) - np.repeat(
                np.cumsum(self._shares_S) - self._shares_S, self._shares_S
            )
            here = cycles_N == cycle
            source_N[here] = source_C[places_N[here]]
            within_N[here] = cycle * self._shares_S[source_N[here]] + within_C[places_N[here]]
        parts = {s: self._sources[s].read(within_N[source_N == s]) for s in np.unique(source_N).tolist()}
        some = next(iter(parts.values()))
        rows_NT = np.empty((len(numbers_N), *some.shape[1:]), some.dtype)
        for s, part in parts.items():
            rows_NT[source_N == s] = part
        return rows_NT


def philox_permutation(count: int, key: int, counter: int) -> tuple[int, np.ndarray]:
    """A random word and an order of `count` things.

    Raw Philox words, and no np.random.Generator on top: only the words are promised to be the same in every NumPy.
    """
    words = np.random.Philox(key=np.array([key, counter], np.uint64)).random_raw(count + 1)
    return int(words[0]), np.argsort(words[1:], kind="stable")

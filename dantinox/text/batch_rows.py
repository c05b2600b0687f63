"""Rows of training batches: which tokens of the store each row holds, and the order of the rows.

Row n of a training run is a pure function of (seed, n), so the position in the data is one integer.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dantinox.files import UserError

CACHED_EPOCHS = 4  # number of epochs whose row order stays in memory
SCAN_TOKENS = 1 << 22  # tokens per block of a scan; a whole store may be larger than the memory
NO_TOKEN = -1  # padding in a row of token indices
MIXTURE_CYCLE = 1000  # in each cycle of this many consecutive rows of a mixture, every source has its exact share


class Rows(Protocol):
    """The rows of an epoch.

    Attributes:
      count: the number of rows.
    """

    count: int

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        """Returns the token indices of some rows, int64 [N, T + 1], or [N, 2, T + 1] for pairs.

        Args:
          chosen_N: row numbers in [0, `count`).
          epoch_random: the random integer of the epoch.
        """


class WindowRows:
    """Windows of T + 1 tokens that overlap by one token. The first window starts at a random offset that differs by epoch.

    All windows fit at every offset that can be drawn. An epoch omits at most 2 T - 2 targets at the edges.
    """

    def __init__(self, start: int, end: int, length: int):
        self._start, self._length = start, length
        self.count = max(1, (end - start - length) // length)
        self._slack = end - start - 1 - self.count * length
        self._offsets_T1 = np.arange(length + 1)

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        starts_N = self._start + chosen_N * self._length + epoch_random % (self._slack + 1)
        return starts_N[:, None] + self._offsets_T1


def pack_documents(ids: np.ndarray, start: int, length: int, eos_id: int) -> "PackedRows":
    """Packs documents into rows by best fit. Only documents longer than a row are split.

    A split document fills rows with chunks of T targets, and its shorter last chunk is packed like a document. Source: Ding et
    al. 2024, "Fewer Truncations Improve Language Modeling", section 3.

    Args:
      ids: the tokens of a source.
      start: the index of its first token in the store.
      length: targets per row, T.
      eos_id: the EOS token of documents.

    Raises:
      UserError: no document has two tokens.
    """
    starts_P, sizes_P = split_documents(document_ends(ids, eos_id), length)
    if not len(sizes_P):
        raise UserError("data.packing: best_fit found no document with at least two tokens: set data.path to other text")
    occupied_P = sizes_P.copy()
    # If the validation split cut the last document, no EOS token ends it, so no document may follow it in its row.
    if ids[-1] != eos_id:
        occupied_P[starts_P + sizes_P == len(ids)] = length + 1
    return PackedRows(start + starts_P, sizes_P, occupied_P, length)


class PackedRows:
    """Rows of T + 1 tokens into which chunks are packed by best fit, padded with `NO_TOKEN`."""

    def __init__(self, starts_P: np.ndarray, sizes_P: np.ndarray, occupied_P: np.ndarray, length: int):
        """Packs the chunks.

        Args:
          starts_P, sizes_P: first token and number of tokens of each chunk.
          occupied_P: the number of tokens that each chunk occupies in its row; not less than the size of the chunk.
          length: T.
        """
        row_P = best_fit(occupied_P, length + 1)
        order_P = np.argsort(row_P, kind="stable")
        self._length, self._starts_P, self._sizes_P = length, starts_P[order_P], sizes_P[order_P]
        self.count = int(row_P.max()) + 1
        self._first_R = np.searchsorted(row_P[order_P], np.arange(self.count + 1))  # the index of the first chunk of each row

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        indices_NT = np.full((len(chosen_N), self._length + 1), NO_TOKEN, np.int64)
        for indices_T, chosen in zip(indices_NT, chosen_N, strict=True):
            end = 0
            for chunk in range(self._first_R[chosen], self._first_R[chosen + 1]):
                start, size = self._starts_P[chunk], self._sizes_P[chunk]
                indices_T[end : end + size] = np.arange(start, start + size)
                end += size
        return indices_NT


class PairRows:
    """Rows of two chunks each, [N, 2, T + 1], padded with `NO_TOKEN` after the end of each chunk."""

    def __init__(self, starts_P: np.ndarray, sizes_P: np.ndarray, length: int):
        self._starts_N2, self._sizes_N2 = starts_P.reshape(-1, 2, 1), sizes_P.reshape(-1, 2, 1)
        self._offsets_T1, self.count = np.arange(length + 1), len(starts_P) // 2

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        indices_N2T = self._starts_N2[chosen_N] + self._offsets_T1
        return np.where(self._offsets_T1 < self._sizes_N2[chosen_N], indices_N2T, NO_TOKEN)


def document_ends(ids: np.ndarray, eos_id: int) -> np.ndarray:
    """Returns the index after the EOS token of each document; the last document ends at the end of `ids`."""
    starts = range(0, len(ids), SCAN_TOKENS)
    ends = np.concatenate([np.flatnonzero(ids[start : start + SCAN_TOKENS] == eos_id) + start + 1 for start in starts])
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))


def split_documents(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits each document into chunks of `length` targets that overlap by one token; the last chunk may be shorter.

    Returns:
      The starts and the sizes of all chunks with at least two tokens.
    """
    starts = np.concatenate([[0], ends[:-1]])
    targets = ends - starts - 1
    counts = np.maximum(1, -(-targets // length))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # index of each chunk in its document
    first = np.repeat(starts, counts) + number * length
    sizes = np.minimum(np.repeat(ends, counts) - first, length + 1)
    has_target = sizes > 1
    return first[has_target], sizes[has_target]


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each chunk by best-fit decreasing.

    Chunks are placed longest first, each into the fullest row in which it fits.
    """
    row_of = np.empty(len(sizes), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free space
    free_sizes = rows = 0  # bit r of `free_sizes`: some row has r tokens free
    for chunk in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[chunk])
        fitting = free_sizes >> size << size
        if fitting:
            free = (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes ^= 1 << free
        else:
            free, row, rows = capacity, rows, rows + 1
        row_of[chunk] = row
        open_rows[free - size].append(row)
        free_sizes |= 1 << (free - size)
    return row_of


class ShuffledRows:
    """Rows in a shuffled order that depends only on (seed, stream, epoch) and differs between epochs."""

    def __init__(self, rows: Rows, seed: int, stream: int = 0):
        self.rows, self._key = rows, seed + (stream << 32)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the token indices [N, T + 1] of the rows `numbers_N`, ascending; row 0 is the first of the training run."""
        epochs_N, offsets_N = np.divmod(numbers_N, self.rows.count)
        parts = []
        for epoch in np.unique(epochs_N).tolist():  # in the order of the ascending `numbers_N`
            epoch_random, order = self._order(epoch)
            parts.append(self.rows.read(order[offsets_N[epochs_N == epoch]], epoch_random))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Returns the random integer of an epoch, and its row numbers in order."""
        cached = self._epochs.get(epoch)
        if cached is not None:
            return cached
        epoch_random, order = philox_permutation(self.rows.count, self._key, epoch)
        # Replaced, not mutated: another thread may be reading the old dict.
        recent = dict(list(self._epochs.items())[1 - CACHED_EPOCHS :])
        self._epochs = recent | {epoch: (epoch_random, order)}
        return epoch_random, order


class MixtureRows:
    """Rows of several sources. Each source has its share of every cycle of `MIXTURE_CYCLE` rows, in a random order.

    Each source has its own epochs, whose length does not depend on the other sources.
    """

    def __init__(self, sources: Sequence[ShuffledRows], weights: Sequence[float], seed: int):
        self._sources, self._key = sources, seed + ((1 << 32) - 1 << 32)
        exact = MIXTURE_CYCLE * np.asarray(weights, float) / np.sum(weights)
        shares = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: MIXTURE_CYCLE - shares.sum()]] += 1  # largest remainders
        self._shares_S = shares
        self._pattern = np.repeat(np.arange(len(sources)), shares)

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the token indices [N, T + 1] of the rows `numbers_N`, ascending; row 0 is the first of the training run."""
        cycles_N, offsets_N = np.divmod(numbers_N, MIXTURE_CYCLE)
        source_N, within_N = np.empty_like(numbers_N), np.empty_like(numbers_N)
        for cycle in np.unique(cycles_N).tolist():
            _, order = philox_permutation(MIXTURE_CYCLE, self._key, cycle)
            source_C = self._pattern[order]
            within_C = np.empty(MIXTURE_CYCLE, np.int64)  # number of earlier rows of the same source in the cycle
            by_source = np.argsort(source_C, kind="stable")
            within_C[by_source] = np.arange(MIXTURE_CYCLE) - np.repeat(
                np.cumsum(self._shares_S) - self._shares_S, self._shares_S
            )
            in_cycle = cycles_N == cycle
            source_N[in_cycle] = source_C[offsets_N[in_cycle]]
            within_N[in_cycle] = cycle * self._shares_S[source_N[in_cycle]] + within_C[offsets_N[in_cycle]]
        parts = {s: self._sources[s].read(within_N[source_N == s]) for s in np.unique(source_N).tolist()}
        template = next(iter(parts.values()))
        rows_NT = np.empty((len(numbers_N), *template.shape[1:]), template.dtype)
        for s, part in parts.items():
            rows_NT[source_N == s] = part
        return rows_NT


def philox_permutation(count: int, key: int, counter: int) -> tuple[int, np.ndarray]:
    """Returns a random 64-bit integer and a random permutation of `count` indices.

    It uses raw Philox words instead of `np.random.Generator`, because NumPy guarantees only that the raw words stay the same
    across versions.
    """
    words = np.random.Philox(key=np.array([key, counter], np.uint64)).random_raw(count + 1)
    return int(words[0]), np.argsort(words[1:], kind="stable")

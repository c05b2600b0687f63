"""Rows of training batches: which tokens of the store each row holds, and the order of the rows.

Row n of a training run is a pure function of (seed, n), so the position in the data is one integer.
"""

import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from dantinox.files import UserError

CACHED_EPOCHS = 4  # number of epochs whose row order stays in memory
SCAN_TOKENS = 1 << 22  # tokens per block of a scan; a whole store may be larger than the memory
NO_TOKEN = -1  # padding in a row of token indices
MIXTURE_BLOCK = 4096  # rows of a mixture whose sources are assigned at once


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
    """Windows of T + 1 tokens that overlap by one token. The first window starts at a random offset
    that differs by epoch.

    All windows fit at every offset that can be drawn. An epoch omits at most 2 T - 2 targets at the
    edges.
    """

    def __init__(self, start: int, end: int, length: int):
        self._start = start
        self._length = length
        self.count = max(1, (end - start - length) // length)
        self._slack = end - start - 1 - self.count * length
        self._offsets_T1 = np.arange(length + 1)

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        starts_N = self._start + chosen_N * self._length + epoch_random % (self._slack + 1)
        return starts_N[:, None] + self._offsets_T1


def pack_documents(
    ids: np.ndarray, start: int, length: int, eos_id: int, bos_id: int | None = None
) -> "PackedRows":
    """Packs documents into rows by best fit. Only documents longer than a row are split.

    A split document fills rows with chunks of T targets, and its shorter last chunk is packed like
    a document. Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3.

    Args:
      ids: the tokens of a source.
      start: the index of its first token in the store.
      length: targets per row, T.
      eos_id, bos_id: the EOS token of documents, and the BOS token if they have one.

    Raises:
      UserError: no document has two tokens.
    """
    starts_P, sizes_P = split_documents(document_ends(ids, eos_id, bos_id), length)
    if not len(sizes_P):
        raise UserError(
            "data.packing: best_fit found no document with at least two"
            " tokens: set data.path to other text"
        )
    occupied_P = sizes_P.copy()
    # If the validation split cut the last document, no EOS token ends it, so no document may follow
    # it in its row.
    if ids[-1] != eos_id:
        occupied_P[starts_P + sizes_P == len(ids)] = length + 1
    return PackedRows(start + starts_P, sizes_P, occupied_P, length)


class PackedRows:
    """Rows of T + 1 tokens into which chunks are packed by best fit, padded with `NO_TOKEN`."""

    def __init__(
        self, starts_P: np.ndarray, sizes_P: np.ndarray, occupied_P: np.ndarray, length: int
    ):
        """Packs the chunks.

        Args:
          starts_P, sizes_P: first token and number of tokens of each chunk.
          occupied_P: the number of tokens that each chunk occupies in its row; not less than the
            size of the chunk.
          length: T.
        """
        row_P = best_fit(occupied_P, length + 1)
        order_P = np.argsort(row_P, kind="stable")
        self._length = length
        self._starts_P = starts_P[order_P]
        self._sizes_P = sizes_P[order_P]
        self.count = int(row_P.max()) + 1
        # The index of the first chunk of each row.
        self._first_R = np.searchsorted(row_P[order_P], np.arange(self.count + 1))

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        indices_NT = np.full((len(chosen_N), self._length + 1), NO_TOKEN, np.int64)
        for indices_T, chosen in zip(indices_NT, chosen_N, strict=True):
            end = 0
            for chunk in range(self._first_R[chosen], self._first_R[chosen + 1]):
                start = self._starts_P[chunk]
                size = self._sizes_P[chunk]
                indices_T[end : end + size] = np.arange(start, start + size)
                end += size
        return indices_NT


class PairRows:
    """Rows of two chunks each, [N, 2, T + 1], padded with `NO_TOKEN` after the end of each
    chunk.
    """

    def __init__(self, starts_P: np.ndarray, sizes_P: np.ndarray, length: int):
        self._starts_N2 = starts_P.reshape(-1, 2, 1)
        self._sizes_N2 = sizes_P.reshape(-1, 2, 1)
        self._offsets_T1 = np.arange(length + 1)
        self.count = len(starts_P) // 2

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        indices_N2T = self._starts_N2[chosen_N] + self._offsets_T1
        return np.where(self._offsets_T1 < self._sizes_N2[chosen_N], indices_N2T, NO_TOKEN)


def ends_document(
    ids: np.ndarray, next_ids: np.ndarray, eos_id: int | None, bos_id: int | None = None
) -> np.ndarray:
    """Returns whether each token is the EOS token of a document.

    If the BOS token of documents is the same token, the first of two in a row is the EOS token, and
    any other one is the BOS token, because a document has at least one other token.

    Args:
      ids: token ids of any shape.
      next_ids: the token after each of them, in an array of the same shape.
      eos_id: the EOS token; None: no token ends a document.
      bos_id: the BOS token with which documents begin; None: they begin with none.
    """
    if eos_id is None:
        return np.zeros(ids.shape, bool)
    return (ids == eos_id) & (next_ids == eos_id) if eos_id == bos_id else ids == eos_id


def document_ends(ids: np.ndarray, eos_id: int, bos_id: int | None = None) -> np.ndarray:
    """Returns the index after the EOS token of each document; the last document ends at the end of
    `ids`.
    """
    found = []
    for start in range(0, len(ids), SCAN_TOKENS):
        part = np.append(ids[start : start + SCAN_TOKENS + 1], eos_id)[: SCAN_TOKENS + 1]
        found.append(np.flatnonzero(ends_document(part[:-1], part[1:], eos_id, bos_id)) + start + 1)
    ends = np.concatenate(found)
    return ends if len(ends) and ends[-1] == len(ids) else np.append(ends, len(ids))


def split_documents(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits each document into chunks of `length` targets that overlap by one token; the last
    chunk may be shorter.

    Returns:
      The starts and the sizes of all chunks with at least two tokens.
    """
    starts = np.concatenate([[0], ends[:-1]])
    targets = ends - starts - 1
    counts = np.maximum(1, -(-targets // length))
    # The index of each chunk in its document.
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
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
        fitting = free_sizes >> size << size  # the bits from `size` on
        if fitting:
            free = (fitting & -fitting).bit_length() - 1  # its lowest bit: the fullest row
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes ^= 1 << free
        else:
            free = capacity
            row = rows
            rows = rows + 1
        row_of[chunk] = row
        open_rows[free - size].append(row)
        free_sizes |= 1 << (free - size)
    return row_of


class ShuffledRows:
    """Rows in a shuffled order that depends only on (seed, stream, epoch) and differs between
    epochs.
    """

    def __init__(self, rows: Rows, seed: int, stream: int = 0):
        self.rows = rows
        self._key = seed + (stream << 32)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the token indices [N, T + 1] of the rows `numbers_N`, ascending; row 0 is the
        first of the training run.
        """
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
    """Rows of several sources. Of the first n rows, each source has n times its share, rounded up
    or down, for every n.

    Each source has its own epochs, whose length does not depend on the other sources.
    """

    def __init__(self, sources: Sequence[ShuffledRows], weights: Sequence[float]):
        self._sources = sources
        exact = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * denominator) for weight in exact]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        # The order of the sources repeats after each cycle. No training run reaches the end of a
        # cycle beyond 2⁶² rows.
        self._cycle = min(sum(self._weights), 1 << 62)
        self._rows_per_cycle = np.array([min(weight, 1 << 62) for weight in self._weights])
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._counts = [[0] * len(sources)]  # rows of each source before each block
        self._lock = threading.Lock()

    def read(self, numbers_N: np.ndarray) -> np.ndarray:
        """Returns the token indices [N, T + 1] of the rows `numbers_N`, ascending; row 0 is the
        first of the training run.
        """
        cycles_N, places_N = np.divmod(numbers_N, self._cycle)
        source_N = np.empty_like(numbers_N)
        within_N = np.empty_like(numbers_N)  # the number of the row within its source
        for block in np.unique(places_N // MIXTURE_BLOCK).tolist():
            in_block = places_N // MIXTURE_BLOCK == block
            source_B, within_B = self._block(block)
            source_N[in_block] = source_B[places_N[in_block] % MIXTURE_BLOCK]
            within_N[in_block] = within_B[places_N[in_block] % MIXTURE_BLOCK]
        within_N += cycles_N * self._rows_per_cycle[source_N]
        parts = {
            s: self._sources[s].read(within_N[source_N == s]) for s in np.unique(source_N).tolist()
        }
        template = next(iter(parts.values()))
        rows_NT = np.empty((len(numbers_N), *template.shape[1:]), template.dtype)
        for s, part in parts.items():
            rows_NT[source_N == s] = part
        return rows_NT

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row of a block, and the number of earlier rows of the same
        source in the cycle.
        """
        with self._lock:
            if number in self._blocks:
                return self._blocks[number]
            for block in range(min(number, len(self._counts) - 1), number + 1):
                counts = list(self._counts[block])
                order = np.array(assign_sources(self._weights, counts, MIXTURE_BLOCK))
                self._counts[block + 1 :] = self._counts[block + 1 :] or [counts]
            within = np.empty_like(order)
            for source, before in enumerate(self._counts[number]):
                chosen = order == source
                within[chosen] = before + np.arange(np.count_nonzero(chosen))
            self._blocks = dict(list(self._blocks.items())[1 - CACHED_EPOCHS :]) | {
                number: (order, within)
            }
            return order, within


def assign_sources(weights: Sequence[int], counts: list[int], rows: int) -> list[int]:
    """Returns the sources of the next rows of a mixture, and adds these rows to `counts`.

    The j-th row of a source, from 0, comes after row ⌊j W / w⌋ and not after row ⌈(j + 1) W / w⌉,
    where w is the weight of the source and W the sum of all weights. The source with the earliest
    deadline has the next row. This always meets all deadlines. Source: Baruah et al. 1996,
    "Proportionate progress", for one processor.

    Args:
      counts: the rows that each source has so far.
    """
    total = sum(weights)
    order = []
    first = sum(counts)
    deadlines = [
        -(-(count + 1) * total // weight) for count, weight in zip(counts, weights, strict=True)
    ]
    for number in range(first + 1, first + rows + 1):
        released = (
            (deadlines[source], source)
            for source, weight in enumerate(weights)
            if counts[source] * total < number * weight
        )
        source = min(released)[1]
        counts[source] += 1
        deadlines[source] = -(-(counts[source] + 1) * total // weights[source])
        order.append(source)
    return order


def philox_permutation(count: int, key: int, counter: int) -> tuple[int, np.ndarray]:
    """Returns a random 64-bit integer and a random permutation of `count` indices.

    It uses raw Philox words instead of `np.random.Generator`, because NumPy guarantees only that
    the raw words stay the same across versions.
    """
    words = np.random.Philox(key=np.array([key, counter], np.uint64)).random_raw(count + 1)
    return int(words[0]), np.argsort(words[1:], kind="stable")

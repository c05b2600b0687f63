"""The tokens of a corpus in memory-mapped arrays, and the batches made of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dantinox.config import UserError

KEPT_EPOCHS = 4


class Batch(NamedTuple):
    """Windows of text to train on or to measure with; B sequences of T tokens.

    `segments_BT` numbers the documents inside a window from 0: attention never crosses from one to another, and the
    end-of-text token belongs to the document it ends. `mask_BT` is 1 where the target counts: not where it would be the first
    token of the next document, nor on padding.
    """

    tokens_BT: np.ndarray  # int32, inputs
    targets_BT: np.ndarray  # int32, the token after each input
    segments_BT: np.ndarray  # int32
    mask_BT: np.ndarray  # float32, 0 or 1


class Counts(NamedTuple):
    """The size of one part of a corpus; `tokens` include the begin and end tokens, all else is of the text alone."""

    tokens: int
    documents: int
    characters: int
    bytes: int


class TokenStore:
    """Training and validation tokens.

    A training batch is a pure function of (seed, step): the position in the data is one integer, and threads may ask at once.
    Epoch e cuts the training tokens into windows of T + 1 that share their edge tokens, from a random offset on, and takes each
    once, shuffled; offset and order depend on (seed, e) alone. Every epoch has `windows_per_epoch` windows, as many as fit
    whatever the offset below T, so that at most 2 T - 2 targets at the edges sit an epoch out, others in each. Batches run on
    across the end of an epoch.

    Attributes:
      train, val: `Counts` of the two parts.
      training_ids, validation_ids: their tokens in order, mapped from the disk.
      windows_per_epoch: distinct windows in one pass; one step takes `batch_size` of them.
    """

    def __init__(
        self,
        train: np.ndarray,
        val: np.ndarray,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        eos_id: int | None = None,
        pad_id: int | None = None,
        counts: tuple[Counts, Counts] | None = None,
    ) -> None:
        """Wraps token arrays (integers of any width; memory maps are read as batches ask for them).

        Raises:
          UserError: fewer training tokens than one batch, or no validation target.
        """
        needed = batch_size * sequence_length + 1
        if len(train) < needed:
            raise UserError(
                f"the training text has {len(train)} tokens, fewer than the {needed} of one batch (training.batch_size "
                f"{batch_size} × model.max_context {sequence_length} + 1): lower one of them, or give more text in data.path"
            )
        if len(val) < 2:
            short = f"the validation text has {len(val)} tokens, fewer than 2"
            raise UserError(f"{short}: raise data.val_fraction or give more text in data.path")
        self.training_ids, self.validation_ids = train.view(np.ndarray), val.view(np.ndarray)
        self._eos, self._pad = eos_id, 0 if pad_id is None else pad_id
        self.batch_size, self.sequence_length, self.seed = batch_size, sequence_length, seed
        self.train, self.val = counts or (Counts(len(train), 0, 0, 0), Counts(len(val), 0, 0, 0))
        self.windows_per_epoch = max(1, (len(train) - sequence_length) // sequence_length)
        self._offsets_T1 = np.arange(sequence_length + 1)
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of validation text per counted target; bits per byte are a loss in nats / ln 2 / this number."""
        crossings = 0 if self._eos is None else np.count_nonzero(self.validation_ids[:-1] == self._eos)
        return float(self.val.bytes / (len(self.validation_ids) - 1 - crossings))

    def batch(self, step: int) -> Batch:
        """The training batch of a step, counted from 0: arrays of shape [batch_size, sequence_length]."""
        first = step * self.batch_size
        epoch, start = divmod(first, self.windows_per_epoch)
        starts = self._starts(epoch)[start : start + self.batch_size]
        while len(starts) < self.batch_size:
            epoch += 1
            starts = np.concatenate([starts, self._starts(epoch)[: self.batch_size - len(starts)]])
        windows = self.training_ids[starts[:, None] + self._offsets_T1].astype(np.int32)
        return self._batch(np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:]))

    def validation(self, batch_size: int, tokens: int | None = None) -> Iterator[Batch]:
        """Every validation target once, in order, in windows without overlap; all batches [batch_size, sequence_length].

        Args:
          tokens: take only the first so many targets.
        """
        length = self.sequence_length
        targets = min(len(self.validation_ids) - 1, len(self.validation_ids) if tokens is None else tokens)
        size = batch_size * length
        for start in range(0, targets, size):
            count = min(size, targets - start)
            ids = np.full(size + 1, self._pad, np.int32)
            ids[: count + 1] = self.validation_ids[start : start + count + 1]
            inputs, outputs = ids[:-1].copy(), ids[1:].copy()
            inputs[count:] = self._pad
            valid = np.arange(size) < count
            batch = self._batch(inputs.reshape(batch_size, length), outputs.reshape(batch_size, length))
            yield batch._replace(mask_BT=batch.mask_BT * valid.reshape(batch_size, length))

    def _batch(self, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Batch:
        if self._eos is None:
            return Batch(tokens_BT, targets_BT, np.zeros_like(tokens_BT), np.ones(tokens_BT.shape, np.float32))
        ends = tokens_BT == self._eos
        segments = np.cumsum(ends, axis=1, dtype=np.int32)
        segments -= ends
        return Batch(tokens_BT, targets_BT, segments, (~ends).astype(np.float32))

    def _starts(self, epoch: int) -> np.ndarray:
        """Where the windows of an epoch begin, in the order they are taken."""
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        # Raw Philox words, and no np.random.Generator on top: only the words are promised to be the same in every NumPy.
        words = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(self.windows_per_epoch + 1)
        slack = len(self.training_ids) - 1 - self.windows_per_epoch * self.sequence_length
        starts = np.argsort(words[1:], kind="stable") * self.sequence_length + int(words[0]) % (slack + 1)
        # A new dict each time: another thread may be reading the old one.
        recent = dict(list(self._epochs.items())[1 - KEPT_EPOCHS :])
        self._epochs = recent | {epoch: starts}
        return starts

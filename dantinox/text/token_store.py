"""The token store of a corpus: memory-mapped token arrays and the batches made from them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import UserError
from dantinox.text.batch_rows import (
    NO_TOKEN,
    MixtureRows,
    Rows,
    ShuffledRows,
    WindowRows,
    ends_document,
    pack_documents,
)

PADDING = -1  # segment of the padding of a row


class Batch(NamedTuple):
    """B sequences of T tokens for training or evaluation.

    Attributes:
      tokens_BT: int32, the inputs.
      targets_BT: int32, the token after each input.
      segments_BT: int32, the index of the document within the row, from 0; `PADDING` for padding.
        Attention does not cross segments. An EOS token belongs to the document that it ends.
      mask_BT: float32, 1 where the target is in the loss; 0 for the first token of the next
        document and for padding.
    """

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    segments_BT: np.ndarray
    mask_BT: np.ndarray


class Counts(NamedTuple):
    """The size of one part of a corpus. `tokens` includes BOS and EOS tokens; `characters` and
    `bytes` count only the text.
    """

    tokens: int
    documents: int
    characters: int
    bytes: int


class BatchOptions(NamedTuple):
    """How the rows of a store are put into training batches.

    Attributes:
      batch_size: rows (or examples) per batch, B.
      sequence_length: targets per row, T; in a store of prompts, the most tokens of a prompt and
        its answer.
      seed: determines the order of the rows.
      mixture: (number of training tokens, weight) of each source, in the order of the sources in
        the store; empty: one source.
    """

    batch_size: int
    sequence_length: int
    seed: int
    mixture: Sequence[tuple[int, float]] = ()


class SpecialIds(NamedTuple):
    """Special tokens of a store.

    Attributes:
      eos: the EOS token, which separates documents. None: all tokens are one document.
      bos: the BOS token with which each document begins; None: they begin with none. It may be the
        EOS token.
      pad: the padding token.
    """

    eos: int | None = None
    bos: int | None = None
    pad: int = 0


NO_SPECIAL_IDS = SpecialIds()


class TokenStore:
    """Training and validation tokens.

    A training batch is a pure function of (seed, step), so the position in the data is one integer,
    and several threads may call `batch` concurrently. An epoch contains each of `windows_per_epoch`
    rows once, in an order that depends only on (seed, epoch); see `dantinox.text.batch_rows`. A
    batch may contain rows of several epochs. Each source of a mixture has its own epochs.

    Attributes:
      train, val: `Counts` of the two parts.
      training_ids, validation_ids: their tokens in order, memory-mapped.
      batch_size, sequence_length: B and T.
      bos_id: the BOS token with which each document begins; None: they begin with none.
      packing: whether rows are packed with whole documents.
      windows_per_epoch: distinct rows in one pass over all sources; one step uses `batch_size` of
        them.
    """

    bos_id: int | None = None

    def __init__(
        self,
        train: np.ndarray,
        val: np.ndarray,
        batches: BatchOptions,
        special: SpecialIds = NO_SPECIAL_IDS,
        *,
        counts: tuple[Counts, Counts] | None = None,
        packing: bool = False,
    ) -> None:
        """Wraps arrays of token ids of any integer type. Memory maps are read when a batch needs
        them.

        Args:
          train, val: token ids of the two parts.
          batches: sizes and order of the training batches.
          special: the special tokens.
          counts: the sizes of the two parts. None: only the numbers of tokens are known.
          packing: pack rows with whole documents instead of using windows of consecutive tokens.

        Raises:
          UserError: there are fewer training tokens than one batch needs, or no validation target.
        """
        needed = batches.batch_size * batches.sequence_length + 1
        if len(train) < needed:
            raise UserError(
                f"the training text has {len(train)} tokens, fewer than the {needed} of one batch"
                f" (training.batch_size {batches.batch_size} × model.max_context"
                f" {batches.sequence_length} + 1): lower one of them, or add text to data.path"
            )
        if len(val) < 2:
            short = f"the validation text has {len(val)} tokens, fewer than 2"
            raise UserError(f"{short}: raise data.val_fraction, or add text to data.path")
        self.training_ids = train.view(np.ndarray)
        self.validation_ids = val.view(np.ndarray)
        self._eos = special.eos
        self.bos_id = special.bos
        self._pad = special.pad
        self.packing = packing
        self.batch_size = batches.batch_size
        self.sequence_length = batches.sequence_length
        self.train, self.val = counts or (Counts(len(train), 0, 0, 0), Counts(len(val), 0, 0, 0))
        self._order_rows(batches)

    def _order_rows(self, batches: BatchOptions) -> list[Rows]:
        """Builds the rows of all sources and sets the order of the training rows."""
        mixture = batches.mixture
        edges = [0, *np.cumsum([size for size, _ in mixture] or [len(self.training_ids)]).tolist()]
        sources = [
            ShuffledRows(self._make_rows(*part), batches.seed, number)
            for number, part in enumerate(pairwise(edges))
        ]
        self.windows_per_epoch = sum(source.rows.count for source in sources)
        self._rows: Any = (
            MixtureRows(sources, [weight for _, weight in mixture]) if mixture else sources[0]
        )
        return [source.rows for source in sources]

    @property
    def validation_rows(self) -> int:
        """The number of rows of the validation part, without padding."""
        return -(-(len(self.validation_ids) - 1) // self.sequence_length)

    def batch(self, step: int, chosen: np.ndarray | None = None) -> Any:
        """Returns the training batch of a step: a `Batch` of [batch_size, sequence_length].

        Args:
          step: the number of the step, from 0.
          chosen: the row numbers to return, ascending. None: all rows.
        """
        numbers = np.arange(self.batch_size) if chosen is None else chosen
        return self._gather_batch(self._rows.read(step * self.batch_size + numbers))

    def _gather_batch(self, indices: np.ndarray) -> Any:
        """Returns the batch for rows of indices into the training tokens."""
        filled = indices != NO_TOKEN
        ids = np.where(filled, self.training_ids[np.where(filled, indices, 0)], self._pad).astype(
            np.int32
        )
        tokens = np.ascontiguousarray(ids[:, :-1])
        targets = np.ascontiguousarray(ids[:, 1:])
        # Where the tokens of another document follow in a packed row, an EOS token that is also the
        # BOS token is the EOS token.
        following = targets
        if self.packing:
            ends_chunk = np.diff(indices, axis=1) != 1
            following = np.where(ends_chunk, self._eos or 0, targets)
        batch = self._make_batch(tokens, targets, following)
        segments_BT = np.where(filled[:, :-1], batch.segments_BT, np.int32(PADDING))
        return batch._replace(segments_BT=segments_BT, mask_BT=batch.mask_BT * filled[:, 1:])

    def validation(self, batch_size: int, tokens: int | None = None) -> Iterator[Any]:
        """Yields every validation target once, in order, in a `Batch` of [batch_size,
        sequence_length].

        Args:
          batch_size: rows per batch; the last batch is padded.
          tokens: use only this number of targets from the start. None: all.
        """
        length = self.sequence_length
        targets = min(
            len(self.validation_ids) - 1, len(self.validation_ids) if tokens is None else tokens
        )
        size = batch_size * length
        for start in range(0, targets, size):
            count = min(size, targets - start)
            ids = np.full(size + 1, self._pad, np.int32)
            ids[: count + 1] = self.validation_ids[start : start + count + 1]
            inputs = ids[:-1].copy()
            outputs = ids[1:].copy()
            inputs[count:] = self._pad
            valid_BT = (np.arange(size) < count).reshape(batch_size, length)
            tokens_BT = inputs.reshape(batch_size, length)
            targets_BT = outputs.reshape(batch_size, length)
            batch = self._make_batch(tokens_BT, targets_BT, targets_BT)
            segments_BT = np.where(valid_BT, batch.segments_BT, np.int32(PADDING))
            yield batch._replace(segments_BT=segments_BT, mask_BT=batch.mask_BT * valid_BT)

    def _make_rows(self, start: int, end: int) -> Rows:
        """Builds the rows of a source from its range of tokens."""
        if end - start <= self.sequence_length:
            raise UserError(
                f"a source of the mixture has {end - start} training tokens, fewer than the"
                f" {self.sequence_length + 1} of a window"
                " (model.max_context + 1): add text to data.path"
            )
        if not self.packing:
            return WindowRows(start, end, self.sequence_length)
        if self._eos is None:
            raise UserError(
                "data.packing: best_fit requires a tokenizer with"
                " an EOS token, which this one lacks"
            )
        return pack_documents(
            self.training_ids[start:end], start, self.sequence_length, self._eos, self.bos_id
        )

    def _make_batch(
        self, tokens_BT: np.ndarray, targets_BT: np.ndarray, following_BT: np.ndarray
    ) -> Batch:
        ends = ends_document(tokens_BT, following_BT, self._eos, self.bos_id)
        segments = np.cumsum(ends, axis=1, dtype=np.int32)
        segments -= ends
        return Batch(tokens_BT, targets_BT, segments, (~ends).astype(np.float32))

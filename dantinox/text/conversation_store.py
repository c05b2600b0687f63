"""The token store of conversations: memory-mapped arrays and their batches."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError
from dantinox.text.batch_rows import NO_TOKEN, PackedRows, PairRows, Rows
from dantinox.text.conversations import DESIRABLE, FIRST_TOKEN, IN_LOSS, RecordForm
from dantinox.text.token_store import PADDING, Batch, BatchOptions, Counts, TokenStore


class Preferences(NamedTuple):
    """P pairs of conversations, the preferred one first. Each conversation has its own row.

    The first four fields are those of `Batch`.

    Attributes:
      reference_P2: float32, the log-probability of each conversation under the reference model,
        summed over the targets in the loss. The reference model is the model from which training
        starts. 0 for objectives without a reference model.
    """

    tokens_P2T: np.ndarray
    targets_P2T: np.ndarray
    segments_P2T: np.ndarray
    mask_P2T: np.ndarray
    reference_P2: np.ndarray

    def rows(self) -> Batch:
        """Returns the conversations as a batch of 2 P rows."""
        return Batch(*(array.reshape(-1, array.shape[-1]) for array in self[:4]))


class LabeledCompletions(NamedTuple):
    """P completions with a label (KTO). The second conversation of an example has its prompt and
    another prompt's completion.

    The first five fields are those of `Preferences`.

    Attributes:
      desirable_P: bool, whether the completion is desirable.
      kl_P: float32, the KL divergence of the model from the reference model, estimated from the
        second conversations of the batch. 0 in the batches of a store: the programs of training and
        evaluation compute it.
    """

    tokens_P2T: np.ndarray
    targets_P2T: np.ndarray
    segments_P2T: np.ndarray
    mask_P2T: np.ndarray
    reference_P2: np.ndarray
    desirable_P: np.ndarray
    kl_P: np.ndarray

    def rows(self) -> Batch:
        """Returns the conversations as a batch of 2 P rows."""
        return Batch(*(array.reshape(-1, array.shape[-1]) for array in self[:4]))


class ConversationStore(TokenStore):
    """Training and validation conversations. A batch is a pure function of (seed, step), as in
    `TokenStore`.

    A row holds whole conversations, packed by best fit, each in a separate segment. In batches of
    pairs, a row holds only one conversation. Only the answers are targets in the loss.
    Conversations longer than T + 1 tokens are skipped, and so are pairs that contain such a
    conversation. A completion of another prompt (see `LabeledCompletions`) is cut to T + 1 tokens
    instead.

    Attributes:
      form: the form of the records: batches are `Batch`, `Preferences` ("pair") or
        `LabeledCompletions` ("label").
      pairs: whether an example has two conversations. Then `batch_size` and `windows_per_epoch`
        count examples.
      conversations, left_out: number of conversations (or examples), and how many of them are too
        long.
      name: the name of the token file, which depends on its content.
      reference: float32 [pairs, 2], `reference_P2` of all pairs, training pairs first. Its initial
        values are 0.
    """

    def __init__(
        self,
        ids: np.ndarray,
        marks: np.ndarray,
        counts: tuple[Counts, Counts],
        batches: BatchOptions,
        *,
        pad_id: int = 0,
        name: str = "",
        form: RecordForm = "conversation",
    ) -> None:
        """Wraps an array of token ids and an array with one mark per token. The training part comes
        first in both.

        Args:
          ids: token ids of any integer type.
          marks: uint8, combinations of `IN_LOSS`, `FIRST_TOKEN` and `DESIRABLE`.
          counts: the sizes of the training and the validation part.
          batches: sizes and order of the training batches.
          pad_id: the padding token.
          name: the name of the token file.
          form: the form of the records.

        Raises:
          UserError: all conversations are too long.
        """
        self._ids = ids.view(np.ndarray)
        self._marks = marks.view(np.ndarray)
        self._pad = pad_id
        self.name = name
        self.train, self.val = counts
        self.training_ids = self._ids[: self.train.tokens]
        self.validation_ids = self._ids[self.train.tokens :]
        self.batch_size = batches.batch_size
        self.sequence_length = batches.sequence_length
        self.form = form
        self.pairs = form != "conversation"
        self.left_out = 0
        self.conversations = sum(part.documents for part in counts) // (2 if self.pairs else 1)
        # The index of the first token of each pair.
        self._pair_starts = np.flatnonzero(self._marks & FIRST_TOKEN)[::2]
        self.reference = np.zeros((len(self._pair_starts) if self.pairs else 0, 2), np.float32)
        training = self._order_rows(batches)
        self._validation_rows = self._make_rows(self.train.tokens, len(ids))
        self._all_rows = [*training, self._validation_rows]

    @property
    def validation_rows(self) -> int:
        """The number of rows of the validation part; for preferences, the number of all pairs,
        whose reference is computed.
        """
        return (
            sum(rows.count for rows in self._all_rows)
            if self.pairs
            else self._validation_rows.count
        )

    def validation(self, batch_size: int, tokens: int | None = None) -> Iterator[Any]:
        """Yields every validation conversation once, in batches of `batch_size` rows or pairs.

        Args:
          batch_size: rows or pairs per batch; the last batch is padded.
          tokens: stop after the batch that reaches this number of targets in the loss. None: all.
        """
        targets = 0
        for indices in _in_order(self._validation_rows, batch_size):
            batch = self._gather_batch(indices)
            yield batch
            targets += int(batch[3].sum())
            if tokens is not None and targets >= tokens:
                return

    def all_pairs(self, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yields tuples (indices in `reference`, batch) that contain every pair once.

        The last batch of each part is padded; its indices cover only the real pairs.
        """
        for rows in self._all_rows:
            for indices in _in_order(rows, batch_size):
                is_pair = indices[:, 0, 0] != NO_TOKEN
                yield (
                    np.searchsorted(self._pair_starts, indices[is_pair, 0, 0]),
                    self._gather_batch(indices),
                )

    def _make_rows(self, start: int, end: int) -> Rows:
        """Builds the rows of the conversations in a range of tokens. Conversations that are too
        long are skipped.
        """
        starts = start + np.flatnonzero(self._marks[start:end] & FIRST_TOKEN)
        sizes = np.diff(np.append(starts, end))
        if self.form == "label":
            sizes[1::2] = np.minimum(sizes[1::2], self.sequence_length + 1)
        short = sizes <= self.sequence_length + 1
        if self.pairs:
            short = np.repeat(short.reshape(-1, 2).all(1), 2)
        noun = "pairs of conversations" if self.form == "pair" else "conversations"
        if not short.any():
            raise UserError(
                f"all {noun} are longer than model.max_context {self.sequence_length}:"
                " raise it, or use shorter ones"
            )
        self.left_out += int(np.count_nonzero(~short)) // (2 if self.pairs else 1)
        starts = starts[short]
        sizes = sizes[short]
        if self.pairs:
            return PairRows(starts, sizes, self.sequence_length)
        return PackedRows(starts, sizes, sizes, self.sequence_length)

    def _gather_batch(self, indices: np.ndarray) -> Any:
        """Returns the batch for rows of token indices."""
        filled = indices != NO_TOKEN
        safe_indices = np.where(filled, indices, 0)
        ids = np.where(filled, self._ids[safe_indices], self._pad).astype(np.int32)
        marks = np.where(filled, self._marks[safe_indices], 0)
        segments = np.maximum(
            np.cumsum(marks[..., :-1] & FIRST_TOKEN > 0, axis=-1, dtype=np.int32) - 1, 0
        )
        segments = np.where(filled[..., :-1], segments, np.int32(PADDING))
        mask = (marks[..., 1:] == IN_LOSS).astype(np.float32)
        parts = (
            np.ascontiguousarray(ids[..., :-1]),
            np.ascontiguousarray(ids[..., 1:]),
            segments,
            mask,
        )
        if not self.pairs:
            return Batch(*parts)
        reference_P2 = self.reference[np.searchsorted(self._pair_starts, indices[:, 0, 0])]
        if self.form == "pair":
            return Preferences(*parts, reference_P2)
        return LabeledCompletions(
            *parts, reference_P2, marks[:, 0, 0] & DESIRABLE > 0, np.zeros(len(marks), np.float32)
        )


def _in_order(rows: Rows, batch_size: int) -> Iterator[np.ndarray]:
    """Yields the token indices of all rows, `batch_size` rows at a time, the last batch padded with
    `NO_TOKEN`.
    """
    for start in range(0, rows.count, batch_size):
        indices = rows.read(np.arange(start, min(start + batch_size, rows.count)), 0)
        empty = np.full((batch_size - len(indices), *indices.shape[1:]), NO_TOKEN)
        yield np.concatenate([indices, empty])

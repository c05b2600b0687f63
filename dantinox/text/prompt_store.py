"""The store of prompts for training with rewards: their tokens, and the records that the reward
functions read.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.files import UserError
from dantinox.text.batch_rows import MixtureRows, ShuffledRows
from dantinox.text.chat_template import ChatTemplate, MaskedConversation
from dantinox.text.conversations import (
    FIRST_TOKEN,
    EncodedConversation,
    Example,
    prompt_messages,
    template_fields,
)
from dantinox.text.token_store import BatchOptions, Counts, TokenStore
from dantinox.text.tool_prompts import encode_prompts


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
      number: its number in the store; training prompts come first.
      ids: its tokens, up to the beginning of the answer.
      record: the record of the corpus, with the fields that the reward functions read.
    """

    number: int
    ids: tuple[int, ...]
    record: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The text of the last message of the prompt."""
        return str(prompt_messages(self.record)[-1]["content"])


class PromptStore(TokenStore):
    """Training and validation prompts. The prompts of a step are a pure function of (seed, step),
    as in `TokenStore`.

    An epoch contains each training prompt once. Prompts that leave fewer than `answer_tokens`
    tokens of the context for an answer are left out.

    Attributes:
      conversations, left_out: number of prompts, and how many of them are too long.
      answer_tokens: the most tokens of an answer.
      longest: the number of tokens of the longest prompt that is not left out.
      windows_per_epoch: the number of training prompts that are not left out.
    """

    def __init__(
        self,
        ids: np.ndarray,
        marks: np.ndarray,
        records: Sequence[bytes],
        counts: tuple[Counts, Counts],
        batches: BatchOptions,
        *,
        answer_tokens: int,
    ) -> None:
        """Wraps the tokens of all prompts, training prompts first.

        Args:
          ids: token ids of any integer type.
          marks: uint8; `FIRST_TOKEN` marks the first token of each prompt.
          records: the record of each prompt, in JSON.
          counts: the sizes of the training and the validation part.
          batches: prompts per step, their most tokens with the answer, and their order.
          answer_tokens: the most tokens of an answer.

        Raises:
          UserError: all training prompts of a source, or all validation prompts, are too long.
        """
        self._ids = ids.view(np.ndarray)
        self._records = records
        self.train, self.val = counts
        self.batch_size = batches.batch_size
        self.sequence_length = context = batches.sequence_length
        self.answer_tokens = answer_tokens
        mixture = batches.mixture
        self._starts = np.append(np.flatnonzero(marks.view(np.ndarray) & FIRST_TOKEN), len(ids))
        sizes = np.diff(self._starts)
        fits = sizes + answer_tokens <= context
        self.conversations = len(sizes)
        self.left_out = int(np.count_nonzero(~fits))
        ends = np.cumsum([tokens for tokens, _ in mixture or [(self.train.tokens, 1.0)]])
        parts = np.split(np.arange(len(sizes)), np.searchsorted(self._starts, ends))
        *sources, self._val = (part[fits[part]] for part in parts)
        for part, name in (
            *((source, "training") for source in sources),
            (self._val, "validation"),
        ):
            if not len(part):
                raise UserError(
                    f"all {name} prompts leave fewer than generation.max_new_tokens {answer_tokens}"
                    f" tokens of model.max_context {context}: lower generation.max_new_tokens, or"
                    " use shorter prompts"
                )
        self.longest = int(sizes[fits].max())
        self.windows_per_epoch = sum(map(len, sources))

        def make_order(stream: int) -> ShuffledRows | MixtureRows:
            numbers = range(stream * len(sources), (stream + 1) * len(sources))
            orders = [
                ShuffledRows(_Indices(source), batches.seed, n)
                for source, n in zip(sources, numbers, strict=True)
            ]
            return MixtureRows(orders, [weight for _, weight in mixture]) if mixture else orders[0]

        self._order = make_order
        self._orders = {0: make_order(0)}

    @property
    def validation_rows(self) -> int:
        """The number of validation prompts."""
        return len(self._val)

    def batch(
        self, step: int, chosen: np.ndarray | None = None, *, stream: int = 0
    ) -> list[Prompt]:
        """Returns the prompts of a step.

        Args:
          step: the number of the step, from 0.
          chosen: the positions in the batch to return, ascending. None: all `batch_size`.
          stream: other streams contain the same prompts in other orders.
        """
        numbers = np.arange(self.batch_size) if chosen is None else chosen
        order = self._orders.setdefault(stream, self._order(stream))
        return [self._prompt(index) for index in order.read(step * self.batch_size + numbers)[:, 0]]

    def validation(self, batch_size: int, tokens: int | None = None) -> Iterator[list[Prompt]]:
        """Yields the validation prompts in order, at most `batch_size` at a time.

        Args:
          tokens: stop after the batch that reaches this number of tokens of prompts and their
            longest possible answers. None: all.
        """
        seen = 0
        for start in range(0, len(self._val), batch_size):
            prompts = [self._prompt(index) for index in self._val[start : start + batch_size]]
            yield prompts
            seen += sum(len(prompt.ids) + self.answer_tokens for prompt in prompts)
            if tokens is not None and seen >= tokens:
                return

    def _prompt(self, index: int) -> Prompt:
        ids = self._ids[self._starts[index] : self._starts[index + 1]]
        return Prompt(int(index), tuple(ids.tolist()), json.loads(self._records[index]))


class _Indices:
    """The rows of an epoch of prompts: one index per row."""

    def __init__(self, indices: np.ndarray):
        self._indices = indices
        self.count = len(indices)

    def read(self, chosen_N: np.ndarray, epoch_random: int) -> np.ndarray:
        return self._indices[chosen_N][:, None]


def prompt_examples(records: Iterable[tuple[str, dict]], corpus: str) -> Iterator[Example]:
    """Yields an example for each record: its file and line, and the record."""
    return (Example(None, [found]) for found in records)


def encode_prompt_records(
    records: Sequence[tuple[str, dict]], template: ChatTemplate
) -> list[EncodedConversation]:
    """Returns the prompts of records, each with its file and line, with the beginning of the
    answer.

    Raises:
      UserError: a record is invalid; the message ends with its file and line.
    """
    inputs = []
    for where, record in records:
        try:
            inputs.append(
                MaskedConversation(prompt_messages(record), None, *template_fields(record))
            )
        except UserError as error:
            raise UserError(f"{error} ({where})") from None
    encoded = []
    for (where, record), prompt, ids in zip(
        records, inputs, encode_prompts(template, inputs), strict=True
    ):
        if isinstance(ids, UserError):
            raise UserError(f"{ids} ({where})")
        if not len(ids):
            raise UserError(f"a prompt has no tokens ({where})")
        marks = np.zeros(len(ids), np.uint8)
        marks[0] = FIRST_TOKEN
        texts = [message["content"] or "" for message in prompt.messages]
        encoded.append(EncodedConversation(ids, marks, texts, json.dumps(record).encode()))
    return encoded


def read_records(path: Path) -> list[bytes]:
    """Reads the records of a store, one per line."""
    with open(path, "rb") as file:
        return file.read().splitlines()

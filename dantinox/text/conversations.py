"""Encodes records of conversations (JSON Lines) to tokens with a loss mask."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dantinox.config import DataSection
from dantinox.files import UserError, quote
from dantinox.text.chat_template import ChatTemplate, Message
from dantinox.text.corpus import Corpus
from dantinox.text.token_store import Counts

IN_LOSS, FIRST_TOKEN = 1, 2  # flags of a token: a target in the loss; the first token of a conversation

Objective = Literal["sft", "dpo", "grpo"]
# The messages of a conversation, and the index of a message: assistant messages from this index on are in the loss.
TrainingConversation = tuple[Sequence[Message], int]


class Encoded(NamedTuple):
    """Encoded tokens of one conversation or chunk of text.

    Attributes:
      part: 0 for training, 1 for validation.
      source: the index of the corpus.
      ids: token ids, int32.
      added: the counts of these tokens and their text. Summed over a part of the corpus, they give its size.
      marks: uint8, combinations of `IN_LOSS` and `FIRST_TOKEN`; None for plain text.
      record: the record of a prompt in JSON, without line breaks; None if the store needs none.
    """

    part: int
    source: int
    ids: np.ndarray
    added: Counts
    marks: np.ndarray | None = None
    record: bytes | None = None


Encode = Callable[[int, int, Mapping[str, Any]], Iterable[Encoded]]  # (part, source, record)


class Conversations(NamedTuple):
    """Corpora of conversations.

    Attributes:
      corpora: the corpora.
      digests: the SHA-256 of each corpus.
      records: the number of records in each corpus.
      val_starts: the index of each corpus's first validation record.
    """

    corpora: tuple[Corpus, ...]
    digests: tuple[str, ...]
    records: tuple[int, ...]
    val_starts: tuple[int, ...]

    @classmethod
    def scan(cls, corpora: tuple[Corpus, ...], data: DataSection) -> "Conversations":
        """Counts the records and splits them into training and validation.

        If `data.val_path` is set, the last corpus is for validation. Otherwise validation uses the last records of each corpus.

        Raises:
          UserError: a corpus has too few records, or is plain text.
        """
        digests = tuple(corpus.digest() for corpus in corpora)
        records = tuple(sum(1 for _ in corpus.records(digest)) for corpus, digest in zip(corpora, digests, strict=True))
        minimum = 2 if data.val_path is None else 1
        for corpus, count in zip(corpora, records, strict=True):
            if count < minimum:
                raise UserError(f"the corpus {corpus.name} has too few conversations: {count}, the minimum is {minimum}")
        if data.val_path is not None:
            return cls(corpora, digests, records, (*records[:-1], 0))
        val_sizes = (max(1, round(count * data.val_fraction)) for count in records)
        return cls(corpora, digests, records, tuple(max(1, c - v) for c, v in zip(records, val_sizes, strict=True)))

    def encode(self, encode: Encode, progress: Callable[..., None] | None) -> Iterator[Encoded]:
        """Yields the encoded conversations of all records, training before validation.

        Args:
          encode: returns the encoded conversations of a record.

        Raises:
          UserError: a record is not a conversation; the message names its file and line.
        """
        done = 0
        for part in (0, 1):
            for source, (corpus, val_start) in enumerate(zip(self.corpora, self.val_starts, strict=True)):
                for index, (where, record) in enumerate(corpus.records(self.digests[source])):
                    if (index >= val_start) != part:
                        continue
                    try:
                        yield from encode(part, source, record)
                    except UserError as error:
                        raise UserError(f"{error} ({where})") from None
                    done += 1
                    if progress and done % 100 == 0:
                        progress("encoding", done, sum(self.records), "conversations")


def store_options(template: ChatTemplate, objective: Objective, data: DataSection) -> dict[str, Any]:
    """Returns the options that determine the tokens of conversations, in addition to the corpus and the tokenizer."""
    digest = hashlib.sha256(template.source.encode()).hexdigest()
    return {"objective": objective, "template": digest, "val_fraction": data.val_fraction}


def conversations_of_record(record: Mapping[str, Any], objective: Objective) -> list[TrainingConversation]:
    """Returns the conversations of a record: one for `sft`, or the preferred and the rejected one for `dpo`.

    Raises:
      UserError: a field of the record is missing or invalid.
    """
    if objective == "dpo":
        prompt = prompt_messages(record)
        return [([*prompt, *_messages(record, key, "assistant")], len(prompt)) for key in ("chosen", "rejected")]
    if "messages" in record:
        return [(_messages(record, "messages", ""), 0)]
    if "prompt" in record:
        prompt = prompt_messages(record)
        return [([*prompt, *_messages(record, "completion", "assistant")], len(prompt))]
    names = quote(", ".join(record)) if record else "no field"
    raise UserError(f"a record must have the field messages, or the fields prompt and completion; it has {names}")


def encode_conversations(
    part: int, source: int, record: Mapping[str, Any], template: ChatTemplate, objective: Objective
) -> list[Encoded]:
    """Returns the encoded conversations of a record; see `conversations_of_record`."""
    conversations = conversations_of_record(record, objective)
    return [_encode_conversation(part, source, conversation, template) for conversation in conversations]


def prompt_messages(record: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of the field `prompt`, which is a list of messages or the text of a user message.

    Raises:
      UserError: the field is missing or invalid.
    """
    return _messages(record, "prompt", "user")


def _messages(record: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """Returns the messages of a field. If the field is a string, it is one message with the given role."""
    if key not in record:
        raise UserError(f"a record lacks the field {key!r}; it has {quote(', '.join(record)) if record else 'no field'}")
    value = record[key]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value:
        return value
    text = "a string or " if role else ""
    raise UserError(f"the field {key!r} must be {text}a list of messages, got {quote(value)}")


def _encode_conversation(part: int, source: int, conversation: TrainingConversation, template: ChatTemplate) -> Encoded:
    messages, loss_start = conversation
    ids, mask = template.encode_with_loss_mask(messages, loss_start)
    if not mask.any():
        raise UserError("a conversation has no assistant message to train on")
    marks = np.where(mask, IN_LOSS, 0).astype(np.uint8)
    marks[0] |= FIRST_TOKEN
    answers = [message["content"] for message in messages[loss_start:] if message["role"] == "assistant"]
    characters, encoded_bytes = sum(map(len, answers)), sum(len(text.encode()) for text in answers)
    return Encoded(part, source, ids, Counts(len(ids), 1, characters, encoded_bytes), marks)

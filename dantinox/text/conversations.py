"""Records of conversations (JSON Lines) as tokens with a loss mask."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dantinox.config import DataSection
from dantinox.files import UserError, quote
from dantinox.text.chat_template import ChatTemplate, Message
from dantinox.text.corpus import Corpus
from dantinox.text.token_store import Counts

IN_LOSS, FIRST_TOKEN = 1, 2  # bits of a token's mark: its loss counts; the first token of a conversation

Objective = Literal["sft", "dpo"]
# A conversation, and the index of the first message whose assistant turns count in the loss.
TrainingConversation = tuple[Sequence[Message], int]


class Encoded(NamedTuple):
    """The next tokens of part 0 (training) or 1 (validation), from one of the corpora, and what they add to its counts."""

    part: int
    source: int
    ids: np.ndarray
    added: Counts
    marks: np.ndarray | None = None  # uint8, of conversations


class Conversations(NamedTuple):
    """Corpora of conversations; of each its SHA-256, how many records it has, and at which of them validation begins."""

    corpora: tuple[Corpus, ...]
    digests: tuple[str, ...]
    records: tuple[int, ...]
    val_starts: tuple[int, ...]

    @classmethod
    def scan(cls, corpora: tuple[Corpus, ...], data: DataSection) -> "Conversations":
        """Counts the records. Validation is the last corpus where `data.val_path` is one, else the end of each.

        Raises:
          UserError: a file without records, or one of text.
        """
        digests = tuple(corpus.digest() for corpus in corpora)
        records = tuple(sum(1 for _ in corpus.records(digest)) for corpus, digest in zip(corpora, digests, strict=True))
        for corpus, count in zip(corpora, records, strict=True):
            if count < (2 if data.val_path is None else 1):
                raise UserError(f"the corpus {corpus.name} holds {count or 'no'} conversation{'s' * (count != 1)}, too few")
        if data.val_path is not None:
            return cls(corpora, digests, records, (*records[:-1], 0))
        kept = (max(1, round(count * data.val_fraction)) for count in records)
        return cls(corpora, digests, records, tuple(max(1, c - v) for c, v in zip(records, kept, strict=True)))

    def encode(self, template: ChatTemplate, objective: Objective, progress: Callable[..., None] | None) -> Iterator[Encoded]:
        """All conversations: those of part 0 before those of part 1.

        Raises:
          UserError: a record that is no conversation, with its place.
        """
        done = 0
        for part in (0, 1):
            for number, (corpus, cut) in enumerate(zip(self.corpora, self.val_starts, strict=True)):
                for place, (where, record) in enumerate(corpus.records(self.digests[number])):
                    if (place >= cut) != part:
                        continue
                    try:
                        yield from (
                            _encode_conversation(part, number, asked, template)
                            for asked in conversations_of_record(record, objective)
                        )
                    except UserError as error:
                        raise UserError(f"{error} ({where})") from None
                    done += 1
                    if progress and done % 100 == 0:
                        progress("encoding", done, sum(self.records), "conversations")


def store_options(template: ChatTemplate, objective: Objective, data: DataSection) -> dict[str, Any]:
    """What else the tokens of conversations depend on."""
    digest = hashlib.sha256(template.source.encode()).hexdigest()
    return {"objective": objective, "template": digest, "val_fraction": data.val_fraction}


def conversations_of_record(record: Mapping[str, Any], objective: Objective) -> list[TrainingConversation]:
    """The conversations of a record: one to learn, or one that is preferred and one that is not.

    Raises:
      UserError: the record lacks a field, or one holds something else.
    """
    if objective == "dpo":
        prompt = _messages(record, "prompt", "user")
        return [([*prompt, *_messages(record, key, "assistant")], len(prompt)) for key in ("chosen", "rejected")]
    if "messages" in record:
        return [(_messages(record, "messages", ""), 0)]
    if "prompt" in record:
        prompt = _messages(record, "prompt", "user")
        return [([*prompt, *_messages(record, "completion", "assistant")], len(prompt))]
    names = quote(", ".join(record)) if record else "no field"
    raise UserError(f"a conversation is a record with messages, or with prompt and completion; this one has {names}")


def _messages(record: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """The messages of a field; a text is one message of this role."""
    if key not in record:
        raise UserError(f"a record without the field {key!r}; it has {quote(', '.join(record)) if record else 'no field'}")
    value = record[key]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value:
        return value
    text = "a text or " if role else ""
    raise UserError(f"the field {key!r} must be {text}a list of messages, got {quote(value)}")


def _encode_conversation(part: int, source: int, asked: TrainingConversation, template: ChatTemplate) -> Encoded:
    messages, since = asked
    ids, mask = template.encode_with_loss_mask(messages, since)
    if not mask.any():
        raise UserError("a conversation without a turn of the assistant")
    marks = np.where(mask, IN_LOSS, 0).astype(np.uint8)
    marks[0] |= FIRST_TOKEN
    answers = [message["content"] for message in messages[since:] if message["role"] == "assistant"]
    size = sum(len(text) for text in answers), sum(len(text.encode()) for text in answers)
    return Encoded(part, source, ids, Counts(len(ids), 1, *size), marks)

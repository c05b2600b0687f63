"""Encodes records of conversations (JSON Lines) to tokens with a loss mask."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dantinox.config import DataSection
from dantinox.files import UserError, quote
from dantinox.text.chat_template import ChatTemplate, MaskedConversation, Message, Tools
from dantinox.text.corpus import Corpus
from dantinox.text.token_store import Counts
from dantinox.text.tool_prompts import encode_with_loss_masks

# Flags of a token: a target in the loss; the first token of a conversation; the first token if the
# label is true.
IN_LOSS = 1
FIRST_TOKEN = 2
DESIRABLE = 4

BATCH_EXAMPLES = 256  # encoded together

# The form of the records of an objective: one conversation; a preferred and a rejected completion;
# a completion with a label.
RecordForm = Literal["conversation", "pair", "label"]
RECORD_FORMS: dict[str, RecordForm] = {
    "sft": "conversation", "dpo": "pair", "ipo": "pair", "kto": "label", "orpo": "pair",
    "simpo": "pair",
}  # fmt: skip


# Fields of a record that would change its meaning, each with what to do instead.
UNSUPPORTED_FIELDS = {
    "system": "put it into a message with the role system",
    "history": "put it into the messages",
    "documents": "put them into a message",
    "functions": "use tools and tool_calls",
    "function_call": "use tools and tool_calls",
    "images": "training reads only text",
    "image": "training reads only text",
    "audio": "training reads only text",
    "videos": "training reads only text",
    "weight": "every record has the same weight; data.mixture weights files",
}  # fmt: skip


class TrainingConversation(NamedTuple):
    """A conversation to train on.

    Attributes:
      where: the file and line of its completion, for error messages.
      messages: the conversation.
      loss_start: the index of a message: assistant messages from this one on are in the loss,
        unless their `weight` is 0.
      tools, variables: the fields `tools` and `chat_template_kwargs` of the record, for the
        template.
      label: whether the completion is desirable, in records with a label.
    """

    where: str
    messages: Sequence[Message]
    loss_start: int
    tools: Tools
    variables: Mapping[str, Any]
    label: bool = False


class Encoded(NamedTuple):
    """Encoded tokens of consecutive conversations or documents of one source.

    Attributes:
      part: 0 for training, 1 for validation.
      source: the index of the corpus.
      ids: token ids, int32.
      added: the counts of these tokens and their text. Summed over a part of the corpus, they give
        its size.
      marks: uint8, combinations of `IN_LOSS`, `FIRST_TOKEN` and `DESIRABLE`; None for plain text.
      record: the record of each prompt in JSON, one per line; None if the store needs none.
    """

    part: int
    source: int
    ids: np.ndarray
    added: Counts
    marks: np.ndarray | None = None
    record: bytes | None = None


class EncodedConversation(NamedTuple):
    """The tokens of one conversation or prompt: `ids`, `marks` and `record` as in `Encoded`, and
    the text in the loss.
    """

    ids: np.ndarray
    marks: np.ndarray
    texts: Sequence[str]
    record: bytes | None = None


class Example(NamedTuple):
    """One record: its label, if it has one, and its conversations."""

    label: bool | None
    conversations: Sequence[Any]


# Maps the records of a corpus, each with its file and line, and the name of the corpus to examples.
ReadExamples = Callable[[Iterable[tuple[str, dict]], str], Iterator[Example]]
# Encodes conversations of examples.
EncodeAll = Callable[[Sequence[Any]], Sequence[EncodedConversation]]


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

        If `data.val_path` is set, the last corpus is for validation. Otherwise validation uses the
        last records of each corpus.

        Raises:
          UserError: a corpus has too few records, or is plain text.
        """
        digests, records = zip(*(corpus.count_records() for corpus in corpora), strict=True)
        minimum = 2 if data.val_path is None else 1
        for corpus, count in zip(corpora, records, strict=True):
            if count < minimum:
                raise UserError(
                    f"the corpus {corpus.name} has too few conversations: {count}, the minimum is"
                    f" {minimum}"
                )
        if data.val_path is not None:
            return cls(corpora, digests, records, (*records[:-1], 0))
        val_sizes = (max(1, round(count * data.val_fraction)) for count in records)
        return cls(
            corpora,
            digests,
            records,
            tuple(max(1, c - v) for c, v in zip(records, val_sizes, strict=True)),
        )

    def encode(
        self,
        read_examples: ReadExamples,
        encode_all: EncodeAll,
        progress: Callable[..., None] | None,
        skip: int = 0,
    ) -> Iterator[Encoded]:
        """Yields the encoded conversations of all records in groups, training before validation.

        Args:
          skip: the number of groups at the start that are not encoded.

        Raises:
          UserError: a record is not a conversation; the message names its file and line. Or all
            training records have the same label.
        """
        number = done = 0
        for (part, source), group in itertools.groupby(
            self._examples(read_examples), key=lambda found: found[:2]
        ):
            while examples := [example for *_, example in itertools.islice(group, BATCH_EXAMPLES)]:
                done += len(examples)
                if number >= skip:
                    yield _join(
                        part,
                        source,
                        encode_all([one for example in examples for one in example.conversations]),
                    )
                    if progress:
                        progress("encoding", done, sum(self.records), "conversations")
                number += 1

    def _examples(self, read_examples: ReadExamples) -> Iterator[tuple[int, int, Example]]:
        """Yields (part, source, example), training before validation. If several corpora are split,
        they are read twice.
        """
        split_corpora = sum(
            0 < start < count for start, count in zip(self.val_starts, self.records, strict=True)
        )
        labels: set[bool | None] = set()
        for parts in [(0,), (1,)] if split_corpora > 1 else [(0, 1)]:
            for source, (corpus, val_start) in enumerate(
                zip(self.corpora, self.val_starts, strict=True)
            ):
                for index, example in enumerate(
                    read_examples(corpus.records(self.digests[source]), corpus.name)
                ):
                    part = int(index >= val_start)
                    if part in parts:
                        labels |= {example.label} if part == 0 else set()
                        yield part, source, example
        if labels in ({True}, {False}):
            label = str(labels.pop()).lower()
            raise UserError(
                f"the field 'label' is {label} in all training"
                " records: kto needs both true and false"
            )


def _join(part: int, source: int, encoded: Sequence[EncodedConversation]) -> Encoded:
    """Joins the tokens of several conversations."""
    ids, marks = (
        np.concatenate(arrays) for arrays in zip(*(one[:2] for one in encoded), strict=True)
    )
    texts = [text for one in encoded for text in one.texts]
    counts = Counts(
        len(ids), len(encoded), sum(map(len, texts)), sum(len(text.encode()) for text in texts)
    )
    records = [one.record for one in encoded if one.record is not None]
    return Encoded(part, source, ids, counts, marks, b"\n".join(records) if records else None)


def store_options(template: ChatTemplate, objective: str, data: DataSection) -> dict[str, Any]:
    """Returns the options that determine the tokens of conversations, in addition to the corpus and
    the tokenizer.
    """
    digest = hashlib.sha256(template.source.encode()).hexdigest()
    return {"objective": objective, "template": digest, "val_fraction": data.val_fraction}


def conversation_examples(
    records: Iterable[tuple[str, dict]], corpus: str, *, objective: str
) -> Iterator[Example]:
    """Yields the examples of an objective; see `conversations_of_record` and
    `with_mismatched_completions`.
    """
    form = RECORD_FORMS[objective]
    conversations: Iterator[Sequence[TrainingConversation]]
    conversations = (conversations_of_record(record, form, where) for where, record in records)
    if form == "label":
        conversations = with_mismatched_completions(
            (example[0] for example in conversations), corpus
        )
    for example in conversations:
        yield Example(example[0].label if form == "label" else None, example)


def conversations_of_record(
    record: Mapping[str, Any], form: RecordForm, where: str
) -> list[TrainingConversation]:
    """Returns the conversations of a record: the preferred and the rejected one if `form` is
    "pair", else one.

    A completion that is a list of messages may contain the prompt too. In a pair of such lists, the
    prompt is what both have in common, as in TRL, and the field `prompt` may be absent.

    Args:
      where: the file and line of the record.

    Raises:
      UserError: a field of the record is missing or invalid; the message ends with `where`.
    """
    try:
        _refuse_fields(record, form)
        template_inputs = template_fields(record)
        if form == "conversation" and "messages" in record:
            return [
                TrainingConversation(where, _messages(record, "messages", ""), 0, *template_inputs)
            ]
        if form == "conversation" and "prompt" not in record:
            names = quote(", ".join(record)) if record else "no field"
            raise UserError(
                "a record must have the field messages, or the fields prompt and completion; it"
                f" has {names}"
            )
        found = _with_prompt(record, ("chosen", "rejected") if form == "pair" else ("completion",))
        label = _label(record) if form == "label" else False
    except UserError as error:
        raise UserError(f"{error} ({where})") from None
    return [
        TrainingConversation(where, messages, loss_start, *template_inputs, label)
        for messages, loss_start in found
    ]


def _refuse_fields(record: Mapping[str, Any], form: RecordForm) -> None:
    """Raises UserError if a record has a field that would change its meaning and that training does
    not use.
    """
    for name, remedy in UNSUPPORTED_FIELDS.items():
        if record.get(name) and not (name == "weight" and record[name] == 1):
            raise UserError(f"the field {name!r} of a record is not supported: {remedy}")
    if form == "conversation" and record.get("label") is False:
        raise UserError(
            "the field 'label' is false, but sft trains on every"
            " answer: remove the record, or use kto"
        )
    if form == "conversation" and "messages" in record and "completion" in record:
        raise UserError(
            "a record must have the field messages or the fields prompt and completion, not both"
        )


def template_fields(record: Mapping[str, Any]) -> tuple[Tools, Mapping[str, Any]]:
    """Returns the fields of a record that the template reads: `tools`, and the variables in
    `chat_template_kwargs`.

    Raises:
      UserError: a field is invalid.
    """
    tools = record.get("tools") or []
    variables = record.get("chat_template_kwargs") or {}
    if isinstance(tools, str):  # datasets store lists of unlike objects as JSON
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"the field 'tools' must be a list of objects, got {quote(record['tools'])}"
        )
    if not isinstance(variables, Mapping):
        raise UserError(
            f"the field 'chat_template_kwargs' must be an object, got {quote(variables)}"
        )
    return tools, variables


def _with_prompt(record: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[list[Message], int]]:
    """Returns the messages of the prompt and a completion for each key, and the index of the first
    message after the prompt.
    """
    implicit = (
        "prompt" not in record
        and len(keys) == 2
        and all(isinstance(record.get(key), list) for key in keys)
    )
    prompt = [] if implicit else prompt_messages(record)
    completions = [_messages(record, key, "assistant") for key in keys]
    if implicit:
        return [(completion, _common_messages(*completions)) for completion in completions]
    found = [
        _join_completion(record["prompt"], prompt, completion, key)
        for key, completion in zip(keys, completions, strict=True)
    ]
    if len(found) == 2 and found[0][0][: found[0][1]] != found[1][0][: found[1][1]]:
        raise UserError(f"the fields {keys[0]!r} and {keys[1]!r} begin with different prompts")
    if len(found) == 2 and all(
        messages is completion for (messages, _), completion in zip(found, completions, strict=True)
    ):
        return [(completion, _common_messages(*completions)) for completion in completions]
    return found


def _join_completion(
    given: Any, prompt: list[Message], completion: list[Message], key: str
) -> tuple[list[Message], int]:
    """Returns a prompt and its completion, or only the completion if it contains the prompt."""
    if completion[: len(prompt)] == prompt:
        return completion, len(prompt)
    first = completion[0].get("role") if isinstance(completion[0], Mapping) else None
    if not isinstance(given, str) or first not in ("system", "developer", "user"):
        return [*prompt, *completion], len(prompt)
    for index, message in enumerate(completion, 1):
        text = (
            message.get("content")
            if isinstance(message, Mapping) and message.get("role") == "user"
            else None
        )
        if isinstance(text, str) and text.strip() == given.strip():
            return completion, index
    raise UserError(f"the conversation in the field {key!r} does not contain the prompt")


def _common_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Returns the number of messages with which both conversations begin."""
    different = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


def with_mismatched_completions(
    conversations: Iterable[TrainingConversation], corpus: str
) -> Iterator[tuple[TrainingConversation, TrainingConversation]]:
    """Yields every conversation, and its prompt with a completion of another prompt.

    The completion is that of the next conversation with another prompt. At the end of the corpus it
    is that of the last earlier conversation with another prompt.

    Raises:
      UserError: all prompts of the corpus are equal.
    """
    same: list[TrainingConversation] = []  # consecutive conversations with one prompt
    earlier = None

    def mismatched(
        other: TrainingConversation,
    ) -> Iterator[tuple[TrainingConversation, TrainingConversation]]:
        for own in same:
            messages = [*_prompt(own), *other.messages[other.loss_start :]]
            yield own, own._replace(where=other.where, messages=messages, label=False)

    for conversation in conversations:
        if same and _prompt(conversation) != _prompt(same[0]):
            yield from mismatched(conversation)
            earlier = same[-1]
            same = []
        same.append(conversation)
    if earlier is None:
        raise UserError(
            f"all records of {corpus} have the same prompt: kto needs"
            " completions of at least two prompts"
        )
    yield from mismatched(earlier)


def _prompt(conversation: TrainingConversation) -> Sequence[Message]:
    """Returns the messages before the completion."""
    return conversation.messages[: conversation.loss_start]


def _label(record: Mapping[str, Any]) -> bool:
    """Returns the field `label` of a record."""
    if "label" not in record:
        raise UserError(f"a record lacks the field 'label'; it has {quote(', '.join(record))}")
    if not isinstance(record["label"], bool):
        raise UserError(f"the field 'label' must be true or false, got {quote(record['label'])}")
    return record["label"]


def prompt_messages(record: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of the field `prompt`, which is a list of messages or the text of a user
    message.

    Raises:
      UserError: the field is missing or invalid.
    """
    return _messages(record, "prompt", "user")


def _messages(record: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """Returns the messages of a field. If the field is a string, it is one message with the given
    role.
    """
    if key not in record:
        raise UserError(
            f"a record lacks the field {key!r}; it has"
            f" {quote(', '.join(record)) if record else 'no field'}"
        )
    value = record[key]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value:
        return value
    text = "a string or " if role else ""
    raise UserError(f"the field {key!r} must be {text}a list of messages, got {quote(value)}")


def encode_conversations(
    conversations: Sequence[TrainingConversation], template: ChatTemplate
) -> list[EncodedConversation]:
    """Returns the tokens of conversations.

    Raises:
      UserError: a conversation is invalid; the message ends with its file and line.
    """
    encoded = []
    inputs = [_template_inputs(conversation) for conversation in conversations]
    results = encode_with_loss_masks(template, inputs)
    for (where, messages, *_, label), (_, in_loss, *_), result in zip(
        conversations, inputs, results, strict=True
    ):
        if isinstance(result, UserError):
            raise UserError(f"{result} ({where})")
        ids, mask = result
        if not mask.any():
            raise UserError(f"a conversation has no assistant message to train on ({where})")
        marks = np.where(mask, IN_LOSS, 0).astype(np.uint8)
        marks[0] |= FIRST_TOKEN | (DESIRABLE if label else 0)
        answers = [
            message["content"] or "" for message in itertools.compress(messages, in_loss or ())
        ]
        encoded.append(EncodedConversation(ids, marks, answers))
    return encoded


def _template_inputs(conversation: TrainingConversation) -> MaskedConversation:
    """Returns what the template encodes: messages without their weights, and which of them are in
    the loss.
    """
    where, messages, loss_start, tools, variables, _ = conversation
    try:
        weights = [_weight(number, message) for number, message in enumerate(messages)]
    except UserError as error:
        raise UserError(f"{error} ({where})") from None
    in_loss = [bool(weight) and number >= loss_start for number, weight in enumerate(weights)]
    plain = [
        {name: value for name, value in message.items() if name != "weight"} for message in messages
    ]
    return MaskedConversation(plain, in_loss, tools, variables)


def _weight(number: int, message: Message) -> int:
    """Returns the `weight` of a message, 0 or 1, and checks that the message has a content or tool
    calls.
    """
    if not isinstance(message, Mapping):
        raise UserError(
            f"message {number} must be an object with role and content, got {quote(message)}"
        )
    content = message.get("content")
    weight = message.get("weight")
    is_answer = message.get("role") == "assistant"
    if not isinstance(content, str) and not (
        content is None and is_answer and message.get("tool_calls")
    ):
        raise UserError(f"the content of message {number} must be text, got {quote(content)}")
    weight = int(is_answer) if weight is None else weight
    if weight not in (0, 1) or weight > is_answer:
        allowed = (
            "0 or 1" if is_answer else "0, because only answers of the assistant are in the loss"
        )
        raise UserError(f"the weight of message {number} must be {allowed}, got {quote(weight)}")
    return int(weight)

"""Chat sessions: messages, settings, streamed responses, and the file that stores a conversation.

The whole conversation is read anew for each answer. Prompts and caches are padded to powers of two, so that one that grows
needs a new program each time its length doubles and not with each turn.
"""

import json
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dantinox.config import Config, UserError, overlay, settings_of, with_generation
from dantinox.files import atomic_write, check_writable, first_line, quote
from dantinox.generation.loaded_model import LoadedModel
from dantinox.generation.offline_run import BatchRun
from dantinox.generation.sample_text import TextPart
from dantinox.generation.static_batch import padded_length

Message = dict[str, str]  # role and content
LEAST_LENGTH = 256  # tokens that a prompt and a cache are padded to at least
MAX_FILE_BYTES = 64 << 20


class Template(Protocol):
    """What makes token ids of messages, as `dantinox.text.ChatTemplate` does."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def encode(self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False) -> list[int]:
        """The conversation; with a generation prompt up to where the assistant is to begin."""


class PlainText:
    """The template of a model that has none: messages are one text, which the model continues.

    What a person says begins a new line, unless the text is empty or ends with one.
    """

    end_ids: frozenset[int] = frozenset()

    def __init__(self, run: LoadedModel):
        self._run = run

    def encode(self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False) -> list[int]:
        text = ""
        for message in messages:
            text += "\n" * (message["role"] == "user" and text != "" and not text.endswith("\n")) + str(message["content"])
        return self._run.prompt_ids(text)


class Chat:
    """A conversation.

    Attributes:
      messages: user and assistant in turn, all that was said.
      system: what stands before them, or "".
      config: the settings; `given` are those that are not the run's, by their name alone.
      entropy: whether pieces come token by token, each with its entropy.
      ended: why the last answer ended: `eos`, `stop`, `length` (max_new_tokens), `context` (its end), or `interrupted`.
      completes: whether the model has no template, and continues a plain text.
    """

    def __init__(self, run: LoadedModel, template: Template | None = None, given: Mapping[str, object] | None = None):
        """Begins a conversation.

        Args:
          template: None: the messages are one plain text.
          given: settings over those of the run, as of `LoadedModel.generate`.
        """
        self.run, self.completes = run, template is None
        self.template: Template = PlainText(run) if template is None else template
        self._base = with_generation(run.config, n=1)
        self.messages: list[Message] = []
        self.system, self.entropy, self.ended = "", False, ""
        self._forgotten = 0  # messages, the oldest, that the context has no room for
        self._answers = 0
        self._file: Path | None = None
        self._adopt(overlay(self._base, given or {}))

    # --- settings

    def set(self, name: str, value: object) -> None:
        """Changes a setting of `generation`, `router` or `kv`.

        One that was changed before and is now without effect is left out, which a warning says.

        Raises:
          UserError: there is no such setting, or not with this value beside the others.
        """
        self._adopt(overlay(self._base, {name: value}, under=self.given))

    def reset(self, name: str) -> None:
        """Gives a setting the run's own value again."""
        overlay(self._base, {name: settings_of(self._base).get(name)}, under=self.given)  # refuses unknown names
        self._adopt(overlay(self._base, {}, under={key: value for key, value in self.given.items() if key != name}))

    def _adopt(self, config: Config) -> None:
        if config.generation.n != 1:
            raise UserError(f"a conversation has one answer to a turn: leave n at 1, got {config.generation.n}")
        own, new = settings_of(self._base), settings_of(config)
        self.config = config
        self.given: dict[str, Any] = {name: value for name, value in new.items() if value != own[name]}

    # --- turns

    def answer(self, text: str) -> Generator[TextPart]:
        """Says `text` and yields the answer as it comes. What has come when the iterator is closed is kept as the answer.

        Raises:
          UserError: the template refuses the messages, or this one alone does not fit the context; nothing is added then.
        """
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids, room = self._prompt(turn)
        generation = self.config.generation
        # With a given seed a conversation can be repeated, and each answer, also one to the same turn, has draws of its own.
        seed = None if generation.seed is None else (generation.seed + self._answers) % 2**32
        config = with_generation(self.config, max_new_tokens=min(generation.max_new_tokens, room), seed=seed)
        config = self.run.with_stop_ids(config, self.template.end_ids)
        request = self.run.request(ids, config, logprobs=0 if self.entropy else None)
        (run,) = self.run.start([request], stream=True, pad=self._pad)
        return self._answered(turn, run, "length" if generation.max_new_tokens <= room else "context")

    def _answered(self, turn: list[Message], run: BatchRun, full: str) -> Generator[TextPart]:
        said: list[str] = []
        self.ended = "interrupted"
        self._answers += 1
        try:
            for _, part in run.parts():
                said.append(part.text)
                yield part
            reason = run.results[0].finish_reason
            self.ended = full if reason == "length" else reason
        finally:
            self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]

    def retry(self) -> Generator[TextPart]:
        """Answers the last turn anew, in the place of the answer that there is."""
        before = self.messages
        text = self.undo()
        try:
            return self.answer(text)
        except UserError:
            self.messages = before
            raise

    def undo(self) -> str:
        """Takes back the last turn and its answer; what the person had said.

        Raises:
          UserError: nothing has been said.
        """
        if not self.messages:
            raise UserError("nothing has been said yet")
        *self.messages, user, _ = self.messages
        self._forgotten = 0
        return user["content"]

    def clear(self) -> None:
        """Begins anew with the same settings and the same system message."""
        self.messages, self._forgotten = [], 0

    def set_system(self, text: str) -> None:
        """Puts a message before the conversation; an empty one is none.

        Raises:
          UserError: the model has no template for one.
        """
        if self.completes and text:
            raise UserError("this model has no chat template, and so no system message: begin the text with it")
        self.system, self._forgotten = text, 0

    def _prompt(self, turn: Sequence[Message]) -> tuple[list[int], int]:
        """The tokens before an answer, of as many of the newest turns as leave room for it, and that room.

        Raises:
          UserError: there is none behind the newest turn alone.
        """
        context = self.run.model.config.max_context
        wanted = min(self.config.generation.max_new_tokens, context // 2)
        before: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        first = self._forgotten
        while True:
            ids = self.template.encode([*before, *turn[first:]], generation_prompt=True)
            if len(ids) + wanted <= context or first + 2 >= len(turn):
                break
            first += 2
        if len(ids) >= context:
            raise UserError(f"what you said makes {len(ids)} tokens and the model's context is {context}: say less")
        if first > self._forgotten:
            turns = "turn is" if first == 2 else f"{first // 2} turns are"
            warnings.warn(f"the context of {context} tokens is full: the oldest {turns} left out from here on", stacklevel=4)
        self._forgotten = first
        return ids, context - len(ids)

    def _pad(self, length: int) -> int:
        return min(max(LEAST_LENGTH, 1 << (length - 1).bit_length()), padded_length(self.run.model.config.max_context))

    # --- its file

    def save(self, path: str | Path) -> None:
        """Writes the conversation as one line of JSON, `{"messages": […]}`, which is also a line to train on.

        Raises:
          UserError: it cannot be written, or there is a file already that this conversation was not saved to or loaded from.
        """
        path = Path(path)
        check_writable(path)
        if path.exists() and path.absolute() != self._file:
            raise UserError(f"{path} is there already: choose another name")
        before = [{"role": "system", "content": self.system}] if self.system else []
        atomic_write(path, json.dumps({"messages": [*before, *self.messages]}, ensure_ascii=False) + "\n")
        self._file = path.absolute()

    def load(self, path: str | Path) -> None:
        """Goes on with a conversation that was saved.

        Raises:
          UserError: the file cannot be read, or holds no conversation of finished turns.
        """
        path = Path(path)
        messages = _read_messages(path)
        before = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        turns = messages[1:] if before else messages
        roles = [message["role"] for message in turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise UserError(
                f"{path} must hold turns of user and assistant, perhaps behind a system message, got {quote(roles)}"
            )
        self.set_system(before)
        self.messages, self._file = turns, path.absolute()


def _read_messages(path: Path) -> list[Message]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: not a conversation")
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a conversation in JSON: {first_line(error)}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise UserError(f"{path} is not a conversation: it has no list under messages")
    for number, message in enumerate(messages):
        fields = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else []
        if len(fields) != 2 or not all(isinstance(field, str) for field in fields):
            raise UserError(f"message {number} of {path} must have the texts role and content, got {quote(message)}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]

"""Chat sessions: messages, settings, streamed responses, and the file that stores a conversation.

Each answer prefills the whole conversation again. Prompts and caches are padded to powers of two,
so a growing conversation needs a new program only when its length doubles.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dantinox.config import Config, UserError, overlay, settings_of, with_generation
from dantinox.files import atomic_write, check_writable, first_line, quote
from dantinox.generation.api.loaded_model import LoadedModel
from dantinox.generation.request import GenerationRequest
from dantinox.generation.sample_text import TextPart
from dantinox.generation.static_batch import padded_length
from dantinox.sampling.params import next_power_of_two

Message = dict[str, str]  # with the keys role and content
Parts = Generator[TextPart | str]  # the parts of an answer, then its finish_reason
MIN_PADDED_LENGTH = 256  # shortest padded length of a prompt and a cache
MAX_FILE_BYTES = 64 << 20


class Template(Protocol):
    """Converts messages to token ids, as `dantinox.text.ChatTemplate` does."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def encode(
        self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False
    ) -> list[int]:
        """Encodes the conversation; with a generation prompt, up to the start of the assistant
        message.
        """


class PlainTextTemplate:
    """The template for a model without a chat template: it joins the messages into one text, which
    the model continues.

    Each user message starts on a new line.
    """

    end_ids: frozenset[int] = frozenset()

    def __init__(self, run: LoadedModel):
        self._run = run

    def encode(
        self, messages: Sequence[Mapping[str, object]], *, generation_prompt: bool = False
    ) -> list[int]:
        text = ""
        for message in messages:
            if message["role"] == "user" and text and not text.endswith("\n"):
                text += "\n"
            text += str(message["content"])
        return self._run.prompt_ids(text)


class Chat:
    """A conversation.

    Attributes:
      messages: all messages, alternately from the user and the assistant.
      system: the system message, or "".
      config: the settings; `overrides` holds the settings that differ from the run, by name.
      entropy: whether answers are streamed token by token, each token with its entropy.
      finish_reason: why the last answer ended: `eos`, `stop`, `loop`, `length` (max_new_tokens),
        `context` (the context is full), or `interrupted`.
      is_completion: whether the model continues plain text, because it has no chat template.
      iterate: calls a function and yields the items of its result. A terminal replaces it, to
        generate in another thread.
    """

    def __init__(
        self,
        run: LoadedModel,
        template: Template | None = None,
        overrides: Mapping[str, object] | None = None,
        lora: str | None = None,
    ):
        """Starts a conversation.

        Args:
          template: converts messages to tokens; None: `PlainTextTemplate`.
          overrides: settings that override the settings of the run, as in `LoadedModel.generate`.
          lora: the name of an adapter of the model; None: the base model.
        """
        self.model = run
        self.is_completion = template is None
        self._lora = lora
        self.iterate: Callable[[Callable[[], Parts]], Parts] = lambda start: start()
        self.template: Template = PlainTextTemplate(run) if template is None else template
        self._base = with_generation(run.config, n=1, token_healing=False)
        self.messages: list[Message] = []
        self.system = ""
        self.entropy = False
        self.finish_reason = ""
        # How many of the oldest messages are left out, because the context is full.
        self._num_dropped = 0
        self._answers = 0
        self._file: Path | None = None
        self._apply(overlay(self._base, overrides or {}))

    # --- settings

    def set(self, name: str, value: object) -> None:
        """Changes a setting of `generation`, `router` or `kv`.

        Earlier overrides that no longer have an effect are dropped with a warning.

        Raises:
          UserError: the setting does not exist, or its value is not allowed with the other
            settings.
        """
        self._apply(overlay(self._base, {name: value}, under=self.overrides))

    def reset(self, name: str) -> None:
        """Sets a setting back to the value of the run."""
        # Only for its errors: it raises one for an unknown name.
        overlay(self._base, {name: settings_of(self._base).get(name)}, under=self.overrides)
        self._apply(
            overlay(
                self._base,
                {},
                under={key: value for key, value in self.overrides.items() if key != name},
            )
        )

    def _apply(self, config: Config) -> None:
        if config.generation.n != 1:
            raise UserError(f"generation.n must be 1 in a conversation, got {config.generation.n}")
        if config.generation.num_beams != 1:
            raise UserError(
                "generation.num_beams must be 1 in a conversation, got"
                f" {config.generation.num_beams}"
            )
        if config.generation.token_healing:
            raise UserError(
                "generation.token_healing must be false in a"
                " conversation, whose template ends the prompt"
            )
        base = settings_of(self._base)
        self.config = config
        self.overrides: dict[str, Any] = {
            name: value for name, value in settings_of(config).items() if value != base[name]
        }

    # --- turns

    def answer(self, text: str) -> Generator[TextPart]:
        """Adds a user message and yields the answer as it is generated.

        If the iterator is closed early, the conversation contains the partial answer.

        Raises:
          UserError: the template rejects the messages, or this message alone does not fit the
            context. The conversation is then unchanged.
        """
        return self._stream_answer(*self._request(text))

    def warm_up(self) -> None:
        """Compiles the programs of a short answer. The conversation does not change."""
        _, request, _ = self._request("Hi")
        with contextlib.closing(self._parts(request)) as parts:
            next(parts)

    def _request(self, text: str) -> tuple[list[Message], GenerationRequest, str]:
        """Returns the messages with a new one, the request of its answer, and the `finish_reason`
        at its limit of tokens.
        """
        turn: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids, room = self._build_prompt(turn)
        generation = self.config.generation
        # A seed makes the conversation reproducible. Each answer, even a retry for the same
        # message, gets a seed of its own.
        seed = None if generation.seed is None else (generation.seed + self._answers) % 2**32
        config = with_generation(
            self.config, max_new_tokens=min(generation.max_new_tokens, room), seed=seed
        )
        config = self.model.with_stop_ids(config, self.template.end_ids)
        request = self.model.request(
            ids, config, logprobs=0 if self.entropy else None, lora=self._lora
        )
        return turn, request, "length" if generation.max_new_tokens <= room else "context"

    def _stream_answer(
        self, turn: list[Message], request: GenerationRequest, limit_reason: str
    ) -> Generator[TextPart]:
        texts: list[str] = []
        has_failed = False
        self.finish_reason = "interrupted"
        self._answers += 1
        parts = self.iterate(lambda: self._parts(request))
        try:
            for part in parts:
                if isinstance(part, str):
                    self.finish_reason = limit_reason if part == "length" else part
                    break
                texts.append(part.text)
                yield part
        except UserError:
            has_failed = True
            raise
        finally:  # also if the caller has closed the iterator
            parts.close()
            if not has_failed:
                self.messages = [*turn, {"role": "assistant", "content": "".join(texts)}]

    def _parts(self, request: GenerationRequest) -> Parts:
        """Yields the parts of an answer, then the reason why it ended."""
        (run,) = self.model.start([request], stream=True, pad=self._pad)
        for _, part in run.parts():
            yield part
        yield run.results[0].finish_reason

    def retry(self) -> Generator[TextPart]:
        """Generates a new answer to the last message, in place of its current answer."""
        previous = self.messages
        text = self.undo()
        try:
            return self.answer(text)
        except UserError:
            self.messages = previous
            raise

    def undo(self) -> str:
        """Removes the last user message and its answer, and returns the message.

        Raises:
          UserError: the conversation has no messages.
        """
        if not self.messages:
            raise UserError("the conversation has no messages yet")
        *self.messages, user, _ = self.messages
        self._num_dropped = 0
        return user["content"]

    def clear(self) -> None:
        """Starts a new conversation with the same settings and the same system message."""
        self.messages = []
        self._num_dropped = 0

    def set_system(self, text: str) -> None:
        """Sets the system message; an empty text removes it.

        Raises:
          UserError: the model has no chat template.
        """
        if self.is_completion and text:
            raise UserError(
                "this model has no chat template, so it has no"
                " system message: start the text with it"
            )
        self.system = text
        self._num_dropped = 0

    def _build_prompt(self, turn: Sequence[Message]) -> tuple[list[int], int]:
        """Returns the prompt tokens and the number of tokens left for the answer.

        The prompt contains as many of the newest turns as fit next to the answer.

        Raises:
          UserError: the newest message alone fills the context.
        """
        context = self.model.model.config.max_context
        answer_tokens = min(self.config.generation.max_new_tokens, context // 2)
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        first = self._num_dropped
        while True:
            ids = self.template.encode([*system, *turn[first:]], generation_prompt=True)
            if len(ids) + answer_tokens <= context or first + 2 >= len(turn):
                break
            first += 2
        if len(ids) >= context:
            raise UserError(
                f"the message has {len(ids)} tokens, but the model's context is {context}:"
                " shorten it"
            )
        if first > self._num_dropped:
            turns = "turn is" if first == 2 else f"{first // 2} turns are"
            warnings.warn(
                f"the context of {context} tokens is full: the oldest {turns} dropped from now on",
                stacklevel=4,
            )
        self._num_dropped = first
        return ids, context - len(ids)

    def _pad(self, length: int) -> int:
        return min(
            next_power_of_two(length, MIN_PADDED_LENGTH),
            padded_length(self.model.model.config.max_context),
        )

    # --- the file of the conversation

    def save(self, path: str | Path) -> None:
        """Writes the conversation as one line of JSON, `{"messages": […]}`, which can also be used
        as a training example.

        Raises:
          UserError: the file cannot be written, or it exists and this conversation was not saved to
            it or loaded from it.
        """
        path = Path(path)
        check_writable(path)
        if path.exists() and path.absolute() != self._file:
            raise UserError(f"{path} exists already: choose another name")
        system = [{"role": "system", "content": self.system}] if self.system else []
        atomic_write(
            path, json.dumps({"messages": [*system, *self.messages]}, ensure_ascii=False) + "\n"
        )
        self._file = path.absolute()

    def load(self, path: str | Path) -> None:
        """Loads a saved conversation to continue it.

        Raises:
          UserError: the file cannot be read, or does not hold a conversation in which every user
            message has an answer.
        """
        path = Path(path)
        messages = _read_messages(path)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        turns = messages[1:] if system else messages
        roles = [message["role"] for message in turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise UserError(
                f"{path} must alternate user and assistant messages, after an optional system"
                f" message, got {quote(roles)}"
            )
        self.set_system(system)
        self.messages = turns
        self._file = path.absolute()


def _read_messages(path: Path) -> list[Message]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(
                f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB,"
                " which is too large for a conversation"
            )
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {first_line(error)}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise UserError(f"{path} must hold a JSON object with a list under the key messages")
    for number, message in enumerate(messages):
        fields = (
            [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else []
        )
        if len(fields) != 2 or not all(isinstance(field, str) for field in fields):
            raise UserError(
                f"message {number} of {path} must have the strings role and content, got"
                f" {quote(message)}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]

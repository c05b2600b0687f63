"""Request bodies of Ollama's API. Source: Ollama's API documentation."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from dantinox.files import quote
from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.errors import RequestError
from dantinox.serve.operations.limits import MAX_EMBEDDINGS
from dantinox.serve.protocols.bodies import Alternatives, Message, StrictBody
from dantinox.serve.protocols.llama_options import LlamaOptions
from dantinox.serve.protocols.sampling_options import Integer

# Options of Ollama that describe its machine or its cache and change no text.
RUNNER_OPTIONS = (
    "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
    "use_mlock", "vocab_only", "penalize_newline", "draft_num_predict",
)  # fmt: skip
KEPT = 4  # the default of `num_keep`
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "images": ([],),
    "template": ("",),
    "_debug_render_only": (False,),
}


def _check_format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON schema')


def _to_inputs(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class OllamaOptions(LlamaOptions):
    """The object `options`: the options of `LlamaOptions` and those below; those of
    `RUNNER_OPTIONS` have no effect.

    Attributes:
      num_ctx: maximum length of prompt and answer together, in tokens; at most the context of the
        server applies.
      num_keep: number of tokens at the beginning that a prompt which is too long keeps; -1 keeps
        all; null: 4.
    """

    ignored: ClassVar[tuple[str, ...]] = RUNNER_OPTIONS

    num_ctx: Annotated[int, Integer, Field(ge=2, lt=2**31)] | None = None
    num_keep: Annotated[int, Integer, Field(ge=-1, lt=2**31)] | None = None


class ModelBody(StrictBody):
    """The body of `/api/show`.

    Attributes:
      model: name of the served model, with or without `:latest`; another name is an error.
      name: a former name of `model`.
    """

    model: str | None = None
    name: str | None = None


class OllamaBody(StrictBody):
    """Fields of `/api/generate` and `/api/chat`.

    Attributes:
      model: name of the served model, with or without `:latest`; another name is an error.
      stream: send the answer as one JSON object per line while it is generated (default: true).
      format: "json" requires a JSON object, a JSON schema requires an object that matches it.
      options: settings of the answer.
      logprobs: report log-probabilities.
      top_logprobs: number of alternatives reported with each token; needs logprobs.
      keep_alive: how long the model stays loaded afterwards, as for `keep_seconds`; a server with
        one model always keeps it.
      truncate: false: a prompt or conversation that is too long is an error, instead of losing its
        middle or oldest messages.
      shift: has no effect: an answer ends when the context is full.
      think: false turns the reasoning off; true or `low`, `medium` or `high` sets its effort.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED_FIELDS

    model: str | None = None
    stream: bool | None = None
    format: Annotated[Any, BeforeValidator(_check_format)] = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None
    think: bool | str | None = None

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None."""
        if not self.format and self.format != {}:
            return None
        if self.format == "json":
            return Constraint("json_object", "")
        return Constraint("json_schema", json.dumps(self.format))

    @property
    def effort(self) -> str | None:
        """The effort of the reasoning, as in `Conversation`.

        Raises:
          RequestError: 400, `think` is wrong.
        """
        if self.think is None:
            return None
        if isinstance(self.think, bool):
            return "high" if self.think else "none"
        if self.think not in ("low", "medium", "high"):
            raise RequestError(
                400,
                f"think must be true, false, low, medium or high, got {quote(self.think)}",
                param="think",
            )
        return self.think

    def alternatives(self, vocab_size: int) -> int | None:
        """Returns the number of alternatives to report with each token, or None.

        Raises:
          RequestError: 400, `top_logprobs` without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return min(self.top_logprobs or 0, vocab_size) if self.logprobs else None


class GenerateBody(OllamaBody):
    """The body of `/api/generate`.

    Attributes:
      prompt: the message of the user or, with raw or without a chat template, the text to continue.
      system: a system message before the prompt; needs a chat template.
      suffix: text after the answer; needs a model with fill-in-the-middle tokens.
      raw: continue the prompt as it is, without the chat template.
      context: the tokens of earlier turns, from the last object of an earlier answer.
    """

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


class OllamaMessage(Message):
    """A message of a conversation. `thinking` has the reasoning of the assistant."""

    images: list[Any] | None = None
    thinking: str | None = None

    def fields(self) -> dict[str, Any]:
        found = self.model_dump(exclude_none=True, exclude={"images", "thinking"})
        if self.thinking:
            found["reasoning_content"] = self.thinking
        return found


class ChatBody(OllamaBody):
    """The body of `/api/chat`.

    Attributes:
      messages: the conversation, each message with `role` and `content`.
      tools: the tools that the model may call.
    """

    tools: list[dict[str, Any]] | None = None
    messages: list[OllamaMessage] = Field(default_factory=list)

    def check_messages(self) -> None:
        """Raises RequestError for a message with images."""
        for number, message in enumerate(self.messages):
            if message.images:
                param = f"messages.{number}.images"
                raise RequestError(
                    400,
                    f"{param} is not supported by this server: remove it",
                    param=param,
                    code="unsupported",
                )


class EmbedBody(StrictBody):
    """The body of `/api/embed`.

    Attributes:
      model: name of the served model, with or without `:latest`; another name is an error.
      input: a text, or a list of texts.
      truncate: drop the end of a text that is longer than the context (default: true).
      dimensions: keep only the first numbers of each embedding, and normalize them again.
      options: have no effect.
      keep_alive: how long the model stays loaded afterwards, as for `keep_seconds`; a server with
        one model always keeps it.
    """

    model: str | None = None
    input: Annotated[list[str], BeforeValidator(_to_inputs), Field(max_length=MAX_EMBEDDINGS)]
    truncate: bool | None = None
    dimensions: Annotated[int, Integer, Field(ge=0)] | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class EmbeddingsBody(StrictBody):
    """The body of `/api/embeddings`.

    Attributes:
      model: name of the served model, with or without `:latest`; another name is an error.
      prompt: a text.
      options: have no effect.
      keep_alive: how long the model stays loaded afterwards, as for `keep_seconds`; a server with
        one model always keeps it.
    """

    model: str | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


def check_generate(body: GenerateBody) -> None:
    """Raises RequestError for fields of `/api/generate` that contradict each other."""
    for name in ("system", "context", "suffix"):
        if body.raw and getattr(body, name):
            raise RequestError(
                400, f"raw and {name} exclude each other: remove one of them", param=name
            )
    for name in ("system", "context"):
        if body.suffix and getattr(body, name):
            raise RequestError(
                400, f"suffix and {name} exclude each other: remove one of them", param=name
            )
    if body.suffix and body.format:
        raise RequestError(
            400, f"suffix and format exclude each other, got {quote(body.format)}", param="format"
        )

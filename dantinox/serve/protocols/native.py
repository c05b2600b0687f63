"""The native protocol: `/api/dantinox/about`, and `/api/dantinox/generate` with an event per
token.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.config import UserError
from dantinox.config.generation_settings import (
    KOBOLD_ORDERS,
    PRESETS,
    GenerationSection,
    step_order,
)
from dantinox.config.request_overlay import settings_of
from dantinox.config.router_settings import RouterSection
from dantinox.config.sampling_steps import STEPS
from dantinox.config.sections import Config
from dantinox.generation.api.trace import changed_settings, router_values
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.report.trace_file import replace_nonfinite
from dantinox.serve.errors import RequestError
from dantinox.serve.operations.background import run_in_thread, run_sized
from dantinox.serve.protocols.bodies import MAX_ALTERNATIVES, Alternatives, Message, parse_body
from dantinox.serve.protocols.openai_bodies import ConstraintBody, chosen_tool
from dantinox.serve.protocols.server_sent_events import named_event
from dantinox.serve.protocols.token_text import check_ids, healed
from dantinox.serve.protocols.tool_chat import (
    Conversation,
    PreparedChat,
    ReplyFields,
    check_effort,
    heals_by_default,
    prepare_chat,
    reasoning_markers,
    without_healing,
)
from dantinox.serve.service import Reply, Service

# Fixed when the server starts, or secret.
SERVER_SETTINGS = (
    "n",
    "use_cache",
    "weights",
    "matmul_dtype",
    "matmul_kernel",
    "tensor_parallel",
    "watermark_keys",
)


def _check_prompt(value: Any) -> Any:
    parts = value if isinstance(value, list) else [value]
    if any(type(part) not in (str, int) for part in parts) or type(value) is int:
        raise ValueError("must be a string, or a list of strings and token ids")
    return value


class GenerateBody(ConstraintBody):
    """The body of `/api/dantinox/generate`, with the fields of `ConstraintBody`.

    Attributes:
      prompt: a string, or a list of strings and token ids in any order; with messages, the
        beginning of the answer.
      messages: a conversation for the chat template.
      answer_at: the index in a prompt list where the answer begins: a constraint includes what
        follows. Null: all of the prompt with messages, and nothing of it without.
      settings: keys of the sections `generation` and `router` with their values.
      alternatives: number of alternatives reported with each token.
      fit: truncate the beginning of a prompt that is too long for the context.
      model: name of the served model, or `MODEL:NAME` to select an adapter.
      lora: name of the adapter; null uses the model without one.
      tools: the tools that the model may call; needs messages.
      tool_choice: `auto`, `none`, `required`, or the tool that must be called.
      reasoning_effort: `none`, `minimal`, `low`, `medium` or `high`.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str | list[str | int], BeforeValidator(_check_prompt)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    answer_at: Annotated[int, Field(ge=0)] | None = None
    settings: dict[str, Any] = Field({})
    alternatives: Alternatives = 10
    fit: bool = False
    model: str | None = None
    lora: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def conversation(self) -> Conversation | None:
        """Returns the conversation to answer, or None for a body without messages.

        Raises:
          RequestError: 400, a field is wrong, or it needs messages.
        """
        if self.messages is not None:
            messages = [message.fields() for message in self.messages]
            effort = check_effort(self.reasoning_effort)
            choice = chosen_tool(self.tool_choice)
            names = {"response_format": self.constraint_field()}
            return Conversation(
                messages,
                self.tools or (),
                choice,
                effort=effort,
                constraint=self.constraint(),
                field_names=names,
            )
        for name in ("tools", "tool_choice", "reasoning_effort"):
            if getattr(self, name) is not None:
                raise RequestError(400, f"{name} needs messages", param=name)
        return None


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    settings = _setting_list(service.engine.settings({}))

    async def about(request: Request) -> Response:
        """Describes the server, its model, sampling steps and settings."""
        return JSONResponse(
            _about(service) | {"settings": settings, "loras": [*service.engine.loras]}
        )

    async def generate(request: Request) -> Reply:
        """Streams a continuation as server-sent events, one per token."""
        return await parse(service, await parse_body(request, GenerateBody))

    async def save_prefix_cache(request: Request) -> Response:
        """Writes the prefix cache to the folder of `--cache_dir`."""
        return JSONResponse({"blocks": await service.engine.save_prefixes()})

    return [
        Route("/api/dantinox/about", about),
        Route("/api/dantinox/save_prefix_cache", save_prefix_cache, methods=["POST"]),
        Route("/api/dantinox/generate", service.endpoint(generate), methods=["POST"]),
    ]


async def parse(service: Service, body: GenerateBody) -> Reply:
    """Converts a body to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    if body.prompt is None and body.messages is None:
        raise RequestError(400, "the body must have prompt, messages or both", param="prompt")
    lora = service.check_model(body.model, body.lora)
    config = service.settings(body.settings)
    if config.generation.seed is None:
        config = service.settings(body.settings | {"seed": secrets.randbelow(2**32)})
    ids, texts = await _encode(service, body)
    conversation = body.conversation()
    prepared = None
    if conversation is not None:
        prepared = await prepare_chat(service, conversation)
        config = service.model.with_stop_ids(config, prepared.end_ids)
    context = service.context
    size = service.tokenizer.vocab_size
    # With `fit`, a long prompt loses its beginning. This reserves space for the requested length of
    # the answer, but never more than half of the context.
    reserved = min(config.generation.max_new_tokens, context // 2)
    chat_ids = [] if prepared is None else prepared.ids
    left_out = max(0, len(chat_ids) + len(ids) - (context - reserved)) if body.fit else 0
    begun = min(_answer_tokens(body, texts), len(chat_ids) + len(ids) - left_out)
    if prepared is not None or begun:
        config = without_healing(config, heals_by_default(service))
    request = GenerationRequest(
        tuple([*chat_ids, *ids][left_out:]),
        config,
        min(body.alternatives, size),
        constraint=body.constraint() if prepared is None else prepared.constraint,
        reasoning=None if prepared is None else prepared.reasoning,
        visible_ids=frozenset() if prepared is None else prepared.visible_ids,
        begun=begun,
        lora=lora,
    )
    (request,) = await healed(service.model, [request])
    begin = {
        "prompt_tokens": len(request.ids),
        "left_out": left_out,
        "texts": texts,
        "seed": config.generation.seed,
        "settings": replace_nonfinite(changed_settings(config)),
        "router": await _router_values(service, config),
        "vocab_size": size,
        "context": context,
        "reasoning_is_open": prepared is not None and prepared.reasoning_is_open,
    }
    return NativeReply(service, request, begin, prepared)


def _answer_tokens(body: GenerateBody, texts: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens at the end of the prompt that belong to the answer; `texts` has
    those of each string.
    """
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    start = body.answer_at
    if start is None:
        start = 0 if body.messages is not None else len(prompt)
    lengths = iter(map(len, texts))
    tokens_of_parts = [next(lengths) if isinstance(part, str) else 1 for part in prompt]
    return sum(tokens_of_parts[start:])


# --- description of the server


def _about(service: Service) -> dict[str, Any]:
    orders = {name: step_order(name, None) for name in (*PRESETS, *KOBOLD_ORDERS)}
    return {
        "model": service.engine.name,
        "context": service.context,
        "vocab_size": service.tokenizer.vocab_size,
        "chat": service.options.template is not None,
        "markers": _markers(service),
        "alternatives": MAX_ALTERNATIVES,
        "changed": replace_nonfinite(changed_settings(service.engine.settings({}))),
        "steps": [
            {"name": name, "group": step.group, "on": [*step.on]} for name, step in STEPS.items()
        ],
        "orders": orders,
    }


def _markers(service: Service) -> dict[str, Any]:
    """Returns the texts around the reasoning (null: the model does not reason), and those that
    begin and end tool calls.
    """
    form = service.reply_format
    reasoning = reasoning_markers(form)
    calls = {"begin": form.tools.begin_markers, "end": form.tools.end}
    return {
        "reasoning": reasoning and {"begin": reasoning.begin, "end": reasoning.end},
        "calls": calls,
    }


def _setting_list(config: Config) -> list[dict[str, Any]]:
    """Returns every setting of a request: section, sampling steps, type and range, default, current
    value, and help.
    """
    values = settings_of(config)
    return [
        {
            "name": name,
            "section": section,
            "steps": [step for step, row in STEPS.items() if name in (*row.on, *row.settings)],
            **_type_info(schema),
            "default": replace_nonfinite(schema.get("default")),
            "value": replace_nonfinite(values[name]),
            "help": schema["description"],
        }
        for section, name, schema in _setting_schemas()
    ]


@cache
def _setting_schemas() -> list[tuple[str, str, dict[str, Any]]]:
    """Returns section, name and JSON schema of every setting of a request."""
    return [
        (section, name, schema)
        for section, kind in (("generation", GenerationSection), ("router", RouterSection))
        for name, schema in kind.model_json_schema()["properties"].items()
        if name not in SERVER_SETTINGS
    ]


def _type_info(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns type and range of a JSON schema; types are `number`, `integer`, `boolean`, `choice`,
    `text`, `list` and `map`.
    """
    options = [option for option in schema.get("anyOf", (schema,)) if option.get("type") != "null"]
    one = options[0]
    kind = {"string": "text", "array": "list", "object": "map"}.get(one["type"], one["type"])
    if "enum" in one:
        return {"type": "choice", "choices": one["enum"]}
    if len(options) > 1:  # a token: its id or its text
        return {"type": "text"}
    names = {
        "minimum": "low",
        "exclusiveMinimum": "above",
        "maximum": "high",
        "exclusiveMaximum": "below",
    }
    return {"type": kind} | {names[bound]: one[bound] for bound in names if bound in one}


# --- the prompt


async def _encode(service: Service, body: GenerateBody) -> tuple[list[int], list[list[int]]]:
    """Returns the token ids of the prompt, and those of each string in it.

    Raises:
      RequestError: 400, an id is not in the vocabulary, or a string cannot be encoded.
    """
    prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    model = service.model
    tokenizer = service.tokenizer
    is_whole = body.messages is None  # not the beginning of the answer of a conversation

    def encode() -> tuple[list[int], list[list[int]]]:
        check_ids(tokenizer, [part for part in prompt if isinstance(part, int)], "prompt")
        ids: list[int] = []
        texts: list[list[int]] = []
        for number, part in enumerate(prompt):
            if isinstance(part, int):
                ids.append(part)
            else:
                # Only the first text gets a BOS token.
                encode_part = model.prompt_ids if number == 0 and is_whole else tokenizer.encode
                texts.append(encode_part(part))
                ids += texts[-1]
        if not ids and is_whole:
            ids = model.prompt_ids("")
        return ids, texts

    try:
        return await run_sized(
            sum(len(part) if isinstance(part, str) else 1 for part in prompt), encode
        )
    except UserError as error:
        raise RequestError(400, str(error), param="prompt") from None


async def _router_values(service: Service, config: Config) -> dict[str, float | None] | None:
    if config.generation.strategy != "entropy":
        return None
    return await run_in_thread(lambda: router_values(service.model.params([config]), 0))


# --- events


class NativeReply(Reply):
    """Formats events: `begin` before the first `token`, and `end` or `error`."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        begin: Mapping[str, object],
        prepared: PreparedChat | None,
    ):
        """Initializes the reply; `prepared` is the conversation, or None for a text."""
        super().__init__([request], True)
        self._begin: Mapping[str, object] | None = begin
        self._reasons: dict[int, str] = {}
        self._prepared = prepared
        self._replies = dict[int, ReplyFields]()
        self._beginning = ""
        if request.begun:
            stream = service.tokenizer.detokenizer(request.visible_ids)
            stream.push(request.ids[: -request.begun])
            self._beginning = stream.push(request.ids[-request.begun :])
        special = service.tokenizer.special_tokens.items()
        self._visible = {token: name for name, token in special if token in request.visible_ids}

    def format_delta(self, number: int, delta: Delta) -> bytes:
        begin = b"" if self._begin is None else _event("begin", self._begin)
        self._begin = None
        tokens = delta.tokens
        if self._visible:
            tokens = [
                record | {"text": self._visible.get(record["id"], record["text"])}
                for record in tokens
            ]
        content = {"sample": delta.sample, "text": delta.text, "tokens": tokens}
        if delta.finish_reason is not None:
            content["finish_reason"] = delta.finish_reason
            self._reasons[delta.sample] = delta.finish_reason
        if self._prepared is not None:
            self._fields_of(self._prepared, delta.sample).push(delta.text, delta.finish_reason)
        return begin + _event("token", content)

    def _fields_of(self, prepared: PreparedChat, sample: int) -> ReplyFields:
        """Returns the fields of a sample's reply, which include the given beginning."""
        if sample not in self._replies:
            self._replies[sample] = prepared.fields()
            self._replies[sample].push(self._beginning, None)
        return self._replies[sample]

    def format_end(self) -> bytes:
        stats = self.streams[0].stats
        later = stats.new_tokens - 1
        seconds = stats.seconds - stats.first_token_seconds
        known = {"draft_tokens": 0, "accepted_draft_tokens": 0, **stats.as_numbers()}
        numbers: dict[str, float | None] = {
            name: value for name, value in known.items() if math.isfinite(value)
        }
        numbers["decode_tok_per_s"] = later / seconds if later > 0 and seconds > 0 else None
        content: dict[str, Any] = {
            "finish_reasons": [reason for _, reason in sorted(self._reasons.items())],
            "stats": numbers,
        }
        if self._prepared is not None:
            content["messages"] = [reply.message() for _, reply in sorted(self._replies.items())]
        return _event("end", content)

    def format_stream_error(self, error: RequestError) -> bytes:
        return _event("error", {"message": error.message, "param": error.param})


def _event(name: str, content: Mapping[str, object]) -> bytes:
    return named_event(name, replace_nonfinite(content))

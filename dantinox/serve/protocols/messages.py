"""Anthropic's protocol: `/v1/messages` with tools, thinking and streamed events, and
`/v1/messages/count_tokens`.

The fields are those of Anthropic's API reference.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.files import quote
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.errors import JSON, RequestError
from dantinox.serve.protocols.bodies import StrictBody, content_text, parse_body, warn_unknown
from dantinox.serve.protocols.sampling_options import given_settings
from dantinox.serve.protocols.server_sent_events import named_event
from dantinox.serve.protocols.tool_chat import (
    Conversation,
    PreparedChat,
    check_budget,
    check_effort,
    prepare_chat,
)
from dantinox.serve.service import Reply, Service
from dantinox.text.tool_calls import Part

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {
    "eos": "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "loop": "max_tokens",
    "cancelled": "end_turn",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FIELD_NAMES = {
    "response_format": "output_config.format",
    "function.name": "name",
    "function.parameters": "input_schema",
}


class CountBody(StrictBody):
    """The body of `/v1/messages/count_tokens`, and the conversation in the body of `/v1/messages`.

    Attributes:
      model: name of the served model; another name is an error.
      system: the system message, as text or as text blocks.
      messages: the conversation: roles `user` and `assistant`, content as text or as blocks of the
        types `text`, `tool_use`, `tool_result` and `thinking`.
      tools: the tools that the model may call, with `name`, `description` and `input_schema`.
      tool_choice: `{"type": "auto" | "any" | "none"}` or `{"type": "tool", "name": …}`, with
        `disable_parallel_tool_use`.
      thinking: `{"type": "enabled", "budget_tokens": n}`, `{"type": "adaptive"}` or
        `{"type": "disabled"}`.
      output_config: `effort` of the thinking, and `format` with a JSON schema of the answer.
      output_format: another name of `output_config.format`.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}
    ignored: ClassVar[tuple[str, ...]] = (
        "metadata",
        "service_tier",
        "cache_control",
        "context_management",
        "inference_geo",
        "speed",
    )

    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """Returns the conversation to answer.

        Raises:
          RequestError: 400, a field is wrong.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text_of(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages.{number}")
        choice, parallel = self._choice()
        effort, budget = self._thinking()
        tools = [_tool(tool, f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        return Conversation(
            messages,
            tools=tools,
            choice=choice,
            parallel=parallel,
            effort=effort,
            budget=budget,
            constraint=self._constraint(),
            field_names=FIELD_NAMES,
        )

    def _choice(self) -> tuple[str, bool]:
        """Returns which tool must be called, as in `Conversation`, and whether several calls are
        allowed.
        """
        given = self.tool_choice or {"type": "auto"}
        kind = given.get("type")
        name = given.get("name")
        parallel = given.get("disable_parallel_tool_use") is not True
        if kind == "tool" and isinstance(name, str):
            return name, parallel
        if not isinstance(kind, str) or kind not in CHOICES:
            message = (
                f"tool_choice.type must be auto, any, none, or tool with a name, got {quote(kind)}"
            )
            raise RequestError(400, message, param="tool_choice")
        return CHOICES[kind], parallel

    def _thinking(self) -> tuple[str | None, int | None]:
        """Returns the effort and the budget of the thinking."""
        given = self.thinking or {}
        kind = given.get("type")
        effort = check_effort((self.output_config or {}).get("effort"), "output_config.effort")
        if kind not in (None, "enabled", "adaptive", "disabled"):
            message = f"thinking.type must be enabled, adaptive or disabled, got {quote(kind)}"
            raise RequestError(400, message, param="thinking.type")
        budget = check_budget(given.get("budget_tokens"), "thinking.budget_tokens")
        if kind == "disabled":
            return "none", None
        return effort or ("high" if kind else None), budget

    def _constraint(self) -> Constraint | None:
        form = (self.output_config or {}).get("format") or self.output_format
        if form is None:
            return None
        if (
            not isinstance(form, Mapping)
            or form.get("type") != "json_schema"
            or not isinstance(form.get("schema"), dict)
        ):
            message = (
                f"output_config.format must be of type json_schema with a schema, got {quote(form)}"
            )
            raise RequestError(400, message, param="output_config.format")
        return Constraint("json_schema", json.dumps(form["schema"]))


class MessagesBody(CountBody):
    """The body of `/v1/messages`.

    Attributes:
      max_tokens: maximum number of new tokens, thinking included.
      stop_sequences: strings that end the answer.
      temperature, top_p, top_k: settings of the sampler.
      stream: send the answer as server-sent events while it is generated.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def settings(self) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`."""
        return given_settings(
            max_new_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""

    async def messages(request: Request) -> Reply:
        """Answers a conversation in Anthropic's format."""
        body = await parse_body(request, MessagesBody)
        warn_unknown(body)
        lora = service.check_model(body.model)
        config = service.settings(body.settings())
        prepared = await prepare_chat(service, body.conversation())
        service.check_lengths([prepared.ids], "messages")
        generation = prepared.request(
            service.model.with_stop_ids(config, prepared.end_ids), lora=lora
        )
        return MessagesReply(service, generation, body, prepared)

    async def count_tokens(request: Request) -> Response:
        """Counts the prompt tokens of a conversation in Anthropic's format."""
        body = await parse_body(request, CountBody)
        service.check_model(body.model)
        prepared = await prepare_chat(service, body.conversation())
        return JSONResponse({"input_tokens": len(prepared.ids)})

    return [
        Route("/v1/messages", service.endpoint(messages), methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


def format_error(error: RequestError) -> dict[str, JSON]:
    """Returns an error in Anthropic's format."""
    kind = ERROR_TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": error.message}}


# --- the conversation


def _text_of(content: Any, where: str) -> str:
    """Returns the text of content that is a string, a block of type text, or a list of such
    blocks.
    """
    content = [content] if isinstance(content, Mapping) else content
    return content_text(content, where, ("text",), separator="\n\n", parts="blocks")


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns a message as messages in OpenAI's format: the results of tools become messages of
    their own.
    """
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            400, f"{where}.role must be user or assistant, got {quote(role)}", param=f"{where}.role"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(
            400, f"{where}.content must be a string or a list of blocks", param=f"{where}.content"
        )
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(content):
        place = f"{where}.content.{number}"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text_of(block, place))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_use" and role == "assistant":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text_of(block.get("content") or "", f"{place}.content")
            results.append(
                {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}
            )
        else:
            message_text = (
                f"{place}.type must be text, tool_use, tool_result or thinking in its role, got"
                f" {quote(kind)}"
            )
            raise RequestError(400, message_text, param=place)
    plain: dict[str, Any] = {"role": role, "content": "\n\n".join(texts)}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "\n\n".join(thoughts)
    is_only_results = results and not (texts or calls or thoughts)
    return results if is_only_results else [*results, plain]


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool in OpenAI's format."""
    if tool.get("type") not in (None, "custom") or not isinstance(
        tool.get("input_schema"), Mapping
    ):
        raise RequestError(
            400,
            f"{where} must be a tool with name and input_schema; server tools are not supported",
            param=where,
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


# --- replies

# Part → type of its block, field of the block, type of its deltas.
BLOCKS = {
    "content": ("text", "text", "text_delta"),
    "reasoning": ("thinking", "thinking", "thinking_delta"),
}


class MessagesReply(Reply):
    """A message of the assistant: its blocks, or their events."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        body: MessagesBody,
        prepared: PreparedChat,
    ):
        super().__init__([request], bool(body.stream))
        self._frame: dict[str, JSON] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": service.model_name(request.lora),
        }
        self._fields = prepared.fields()
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # JSON of the current tool call
        self._started = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def add(self, number: int, delta: Delta) -> None:
        self._advance(delta)

    def body(self) -> JSON:
        return {**self._frame, "content": [*self._blocks], **self._stop(), "usage": self._usage()}

    def format_delta(self, number: int, delta: Delta) -> bytes:
        events = self._advance(delta)
        if not self._started:
            self._started = True
            usage = {**self._usage(), "output_tokens": 0}
            # The first event has these values also if the first delta is the last one.
            no_stop = {"stop_reason": None, "stop_sequence": None}
            message = {**self._frame, "content": [], **no_stop, "usage": usage}
            events = [{"type": "message_start", "message": message}, *events]
        return b"".join(map(_event, events))

    def format_end(self) -> bytes:
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return _event(end) + _event({"type": "message_stop"})

    def format_stream_error(self, error: RequestError) -> bytes:
        return _event(format_error(error))

    def _stop(self) -> dict[str, JSON]:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def _advance(self, delta: Delta) -> list[dict[str, Any]]:
        """Adds a delta to the blocks and returns its events."""
        events = [
            event
            for part in self._fields.parts(delta.text, delta.finish_reason)
            for event in self._add(part)
        ]
        if delta.finish_reason is not None:
            events += self._end_block()
            reason = STOP_REASONS[delta.finish_reason]
            if delta.stop_string is not None:
                reason = "stop_sequence"
            elif reason == "end_turn" and any(
                block["type"] == "tool_use" for block in self._blocks
            ):
                reason = "tool_use"
            self._stop_reason = reason
            self._stop_sequence = delta.stop_string
        return events

    def _add(self, part: Part) -> list[dict[str, Any]]:
        if part.kind == "arguments":
            self._arguments += part.text
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})]
        if part.kind == "call":
            ended = self._end_block()
            self._arguments = ""
            block = {
                "type": "tool_use",
                "id": f"toolu_{secrets.token_hex(12)}",
                "name": part.text,
                "input": {},
            }
            return [*ended, self._begin_block(block)]
        kind, name, delta = BLOCKS[part.kind]
        events = []
        if not self._blocks or self._blocks[-1]["type"] != kind:
            empty = {"type": kind, name: ""}
            if kind == "thinking":
                empty["signature"] = ""
            events = [*self._end_block(), self._begin_block(empty)]
        self._blocks[-1][name] += part.text
        return [*events, self._delta({"type": delta, name: part.text})]

    def _begin_block(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        return {
            "type": "content_block_start",
            "index": len(self._blocks) - 1,
            "content_block": dict(block),
        }

    def _end_block(self) -> list[dict[str, Any]]:
        if not self._blocks:
            return []
        block = self._blocks[-1]
        if block["type"] == "tool_use" and self._arguments:
            try:
                block["input"] = json.loads(self._arguments)
            except ValueError:  # max_tokens has ended the call
                block["input"] = {}
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _usage(self) -> dict[str, JSON]:
        stats = self.streams[0].stats
        cached = stats.reused_tokens
        return {
            "input_tokens": stats.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.new_tokens,
        }


def _event(content: Mapping[str, Any]) -> bytes:
    return named_event(content["type"], content)

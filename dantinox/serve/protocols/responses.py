"""OpenAI's protocol `/v1/responses`: output items with reasoning and tool calls, and their events.

The fields are those of OpenAI's API reference. A response is kept for `previous_response_id` only
if the server keeps responses (`Options.stored_responses`).
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.files import quote
from dantinox.generation.guides.constraints import Constraint
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.errors import JSON, RequestError
from dantinox.serve.protocols.bodies import (
    Alternatives,
    StrictBody,
    content_text,
    parse_body,
    warn_unknown,
)
from dantinox.serve.protocols.logprobs import ChatLogprobs
from dantinox.serve.protocols.openai_bodies import IGNORED, chosen_tool
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

MAX_ITEMS = 4096  # of the input
FIELD_NAMES = {
    "response_format": "text.format",
    "function.name": "name",
    "function.parameters": "parameters",
}


class Stored(NamedTuple):
    """A response that is kept: its body, and the conversation with it in OpenAI's chat format."""

    body: dict[str, JSON]
    messages: list[Mapping[str, Any]]


class ResponsesBody(StrictBody):
    """The body of `/v1/responses`.

    Attributes:
      model: name of the served model; another name is an error.
      input: the text of the user, or a list of items: messages, function calls, their outputs, and
        reasoning.
      instructions: the system message.
      previous_response_id: continue the conversation of a response that the server has kept.
      store: keep the response; the server must have been started with `--store_responses`.
      tools, tool_choice, parallel_tool_calls: the functions that the model may call, as in chat
        completions.
      reasoning: `effort`, and `max_tokens` of the reasoning.
      text: `format` of the answer: `text`, `json_object` or `json_schema`.
      max_output_tokens: maximum number of new tokens, reasoning included.
      temperature, top_p: settings of the sampler.
      top_logprobs: number of alternatives reported with each token.
      include: `message.output_text.logprobs` reports log-probabilities.
      stream: send the response as server-sent events while it is generated.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
    }
    ignored: ClassVar[tuple[str, ...]] = (
        *(name for name in IGNORED if name != "store"),
        "context_management",
        "max_tool_calls",
        "stream_options",
        "truncation",
    )

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Alternatives | None = None
    include: list[str] | None = None
    stream: bool | None = None

    def settings(self) -> dict[str, object]:
        """Returns the settings of the request, for `EngineProtocol.settings`."""
        return given_settings(
            max_new_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p
        )

    def conversation(self, earlier: Sequence[Mapping[str, Any]]) -> Conversation:
        """Returns the conversation to answer; `earlier` has the messages of the previous response.

        Raises:
          RequestError: 400, a field is wrong.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        reasoning = self.reasoning or {}
        budget = check_budget(reasoning.get("max_tokens"), "reasoning.max_tokens")
        return Conversation(
            [*system, *earlier, *input_messages(self.input)],
            tools=[
                _chat_tool(tool, f"tools.{number}") for number, tool in enumerate(self.tools or ())
            ],
            choice=chosen_tool(self.tool_choice),
            parallel=self.parallel_tool_calls is not False,
            effort=check_effort(reasoning.get("effort"), "reasoning.effort"),
            budget=budget,
            constraint=self._constraint(),
            field_names=FIELD_NAMES,
        )

    def _constraint(self) -> Constraint | None:
        form = (self.text or {}).get("format") or {"type": "text"}
        kind = form.get("type") if isinstance(form, Mapping) else None
        if kind == "json_schema" and isinstance(form.get("schema"), dict):
            return Constraint("json_schema", json.dumps(form["schema"]))
        if kind not in ("text", "json_object"):
            message = (
                "text.format must be text, json_object, or json_schema with a schema, got"
                f" {quote(form)}"
            )
            raise RequestError(400, message, param="text.format")
        return Constraint("json_object", "") if kind == "json_object" else None


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    stored: OrderedDict[str, Stored] = service.options.responses
    most = service.options.stored_responses

    def find(name: str) -> Stored:
        if name not in stored:
            sentence = f"this server has no response {quote(name)}"
            if most == 0:
                sentence += (
                    ": it keeps no responses; start it with"
                    " --store_responses, or send the whole conversation"
                )
            raise RequestError(
                404, sentence, param="previous_response_id", code="response_not_found"
            )
        return stored[name]

    def keep(body: dict[str, JSON], messages: list[Mapping[str, Any]]) -> None:
        stored[str(body["id"])] = Stored(body, messages)
        while len(stored) > most:
            stored.popitem(last=False)

    async def create(request: Request) -> Reply:
        """Answers a conversation with a list of output items."""
        body = await parse_body(request, ResponsesBody)
        warn_unknown(body)
        lora = service.check_model(body.model)
        config = service.settings(body.settings())
        earlier = find(body.previous_response_id).messages if body.previous_response_id else []
        chat = body.conversation(earlier)
        prepared = await prepare_chat(service, chat)
        service.check_lengths([prepared.ids], "input")
        with_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (
            body.include or ()
        )
        logprobs = (
            min(body.top_logprobs or 0, service.tokenizer.vocab_size) if with_logprobs else None
        )
        generation = prepared.request(
            service.model.with_stop_ids(config, prepared.end_ids), logprobs, lora
        )
        stores = most > 0 and body.store is not False
        return ResponsesReply(service, generation, body, prepared, chat, keep if stores else None)

    async def retrieve(request: Request) -> Response:
        """Returns a response that the server has kept, or deletes it."""
        response = find(request.path_params["id"])
        if request.method == "DELETE":
            del stored[request.path_params["id"]]
            return JSONResponse({"id": response.body["id"], "object": "response", "deleted": True})
        return JSONResponse(response.body)

    return [
        Route("/v1/responses", service.endpoint(create), methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET", "DELETE"]),
    ]


# --- the input


def input_messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the input as messages in OpenAI's chat format. Successive items of the assistant
    become one message.

    Raises:
      RequestError: 400, an item is wrong.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: list[dict[str, Any]] = []
    # Whether the last message has reasoning and no text: a message of the assistant then continues
    # it.
    awaits_text = False
    for number, item in enumerate(given):
        kind = item.get("type", "message")
        where = f"input.{number}"
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or not role:
                message = (
                    f"{where}.role must be user, assistant, system or developer, got {quote(role)}"
                )
                raise RequestError(400, message, param=f"{where}.role")
            text = content_text(item.get("content"), f"{where}.content")
            if awaits_text and role == "assistant":
                messages[-1]["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": item.get("arguments") or "{}"}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = content_text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
            )
        elif kind == "reasoning":
            text = _reasoning_text(item.get("content"), f"{where}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            message = (
                f"{where}.type must be message, function_call, function_call_output or reasoning,"
                f" got {quote(kind)}"
            )
            raise RequestError(400, message, param=f"{where}.type")
        awaits_text = kind == "reasoning" or (awaits_text and kind == "function_call")
    return messages


def _reasoning_text(content: Any, where: str) -> str:
    """Returns the text of a reasoning item, whose content may be null."""
    if content is not None and not isinstance(content, list):
        message = f"{where} must be a list of parts of type reasoning_text, got {quote(content)}"
        raise RequestError(400, message, param=where)
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last message if it is of the assistant, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool in the format of chat completions."""
    if tool.get("type") != "function":
        raise RequestError(
            400,
            f"{where}.type must be function, got {quote(tool.get('type'))}",
            param=f"{where}.type",
        )
    return {
        "type": "function",
        "function": {
            name: value for name, value in tool.items() if name != "type" and value is not None
        },
    }


# --- the response

# A function that stores a response and its conversation.
KeepResponse = Callable[[dict[str, JSON], list[Mapping[str, Any]]], None]


class ResponsesReply(Reply):
    """A response: its output items, or their events."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        body: ResponsesBody,
        prepared: PreparedChat,
        chat: Conversation,
        keep: KeepResponse | None,
    ):
        """Initializes the reply; `keep` stores the response."""
        super().__init__([request], bool(body.stream))
        self._fields = prepared.fields()
        self._chat = chat
        self._keep = keep
        self._continues = prepared.continues
        self._logprobs = (
            None if request.logprobs is None else ChatLogprobs(service.tokenizer, request, "")
        )
        self._new_logprobs: list[Any] = []
        self._items: list[dict[str, Any]] = []
        self._sequence = -1  # the number of the last event
        self._status = "in_progress"
        self._frame: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "model": service.model_name(request.lora),
            "parallel_tool_calls": chat.parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": chat.effort, "summary": None},
            "store": keep is not None,
            "temperature": request.config.generation.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": request.config.generation.top_p or 1.0,
            "truncation": "disabled",
        }

    def add(self, number: int, delta: Delta) -> None:
        self._advance(delta)

    def body(self) -> JSON:
        return self._finish()

    def format_delta(self, number: int, delta: Delta) -> bytes:
        opening = b""
        if self._sequence < 0:
            opening = b"".join(
                self._event({"type": f"response.{name}", "response": self._response()})
                for name in ("created", "in_progress")
            )
        return opening + b"".join(map(self._event, self._advance(delta)))

    def format_end(self) -> bytes:
        response = self._finish()
        return self._event({"type": f"response.{self._status}", "response": response})

    def format_stream_error(self, error: RequestError) -> bytes:
        return self._event(
            {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        )

    def _event(self, content: dict[str, Any]) -> bytes:
        self._sequence += 1
        return named_event(content["type"], {**content, "sequence_number": self._sequence})

    def _response(self) -> dict[str, Any]:
        usage = None if self._status == "in_progress" else self._usage()
        return {**self._frame, "status": self._status, "output": [*self._items], "usage": usage}

    def _finish(self) -> dict[str, Any]:
        response = self._response()
        if self._keep is not None:
            message: dict[str, Any] = {"role": "assistant", "content": self._fields.content}
            if self._fields.calls:
                message["tool_calls"] = self._fields.calls
            # The instructions are not part of the conversation that is continued; empty ones are no
            # message.
            earlier = [*self._chat.messages]
            if self._frame["instructions"]:
                del earlier[0]
            if self._continues:
                message["content"] = earlier.pop()["content"] + message["content"]
            self._keep(response, [*earlier, message])
        return response

    def _usage(self) -> dict[str, JSON]:
        stats = self.streams[0].stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.new_tokens,
            "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.new_tokens,
        }

    def _advance(self, delta: Delta) -> list[dict[str, Any]]:
        """Adds a delta to the items and returns its events."""
        if self._logprobs is not None:
            self._new_logprobs += self._logprobs(delta.tokens)["content"]
        events: list[dict[str, Any]] = []
        for part in self._fields.parts(delta.text, delta.finish_reason):
            self._fields.add(part)
            events += self._add(part)
        if delta.finish_reason is not None:
            if delta.finish_reason in ("length", "loop"):
                self._status = "incomplete"
                self._frame["incomplete_details"] = {"reason": "max_output_tokens"}
            else:
                self._status = "completed"
            events += self._end_item(self._status)
        return events

    def _add(self, part: Part) -> list[dict[str, Any]]:
        if part.kind == "arguments":
            self._items[-1]["arguments"] += part.text
            return [
                self._at({"type": "response.function_call_arguments.delta", "delta": part.text})
            ]
        if part.kind == "call":
            call = {
                "type": "function_call",
                "call_id": self._fields.calls[-1]["id"],
                "name": part.text,
                "arguments": "",
            }
            return [*self._end_item(), *self._begin_item("fc", call)]
        kind, text_type, prefix = ITEMS[part.kind]
        events: list[dict[str, Any]] = []
        if not self._items or self._items[-1]["type"] != kind:
            content: dict[str, Any] = {"type": text_type, "text": ""}
            events = self._end_item()
            if kind == "message":
                events += self._begin_item(
                    "msg", {"type": kind, "role": "assistant", "content": []}
                )
                content |= {"annotations": [], "logprobs": []}
            else:
                events += self._begin_item("rs", {"type": kind, "summary": [], "content": []})
            self._items[-1]["content"].append(content)
            added = {
                "type": "response.content_part.added",
                "content_index": 0,
                "part": dict(content),
            }
            events.append(self._at(added))
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        event: dict[str, Any] = {"type": f"{prefix}.delta", "content_index": 0, "delta": part.text}
        if kind == "message":
            content["logprobs"] += self._new_logprobs
            event["logprobs"] = self._new_logprobs
            self._new_logprobs = []
        return [*events, self._at(event)]

    def _begin_item(self, prefix: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._items.append(
            {"id": f"{prefix}_{secrets.token_hex(12)}", "status": "in_progress", **item}
        )
        added = {**self._items[-1]}
        if "content" in item:
            added["content"] = []  # a list of its own, which the parts of the item do not fill
        return [
            {
                "type": "response.output_item.added",
                "output_index": len(self._items) - 1,
                "item": added,
            }
        ]

    def _end_item(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._items:
            return []
        item = self._items[-1]
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            done = {
                "type": "response.function_call_arguments.done",
                "name": item["name"],
                "arguments": item["arguments"],
            }
            events = [self._at(done)]
        else:
            content = item["content"][0]
            prefix = (
                "response.output_text" if item["type"] == "message" else "response.reasoning_text"
            )
            done = {"type": f"{prefix}.done", "content_index": 0, "text": content["text"]}
            done |= {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
            part = {"type": "response.content_part.done", "content_index": 0, "part": dict(content)}
            events = [self._at(done), self._at(part)]
        return [
            *events,
            {
                "type": "response.output_item.done",
                "output_index": len(self._items) - 1,
                "item": dict(item),
            },
        ]

    def _at(self, event: dict[str, Any]) -> dict[str, Any]:
        """Returns an event with the place of the current item."""
        return {**event, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


# Part → type of its item, type of its content, prefix of its events.
ITEMS = {
    "content": ("message", "output_text", "response.output_text"),
    "reasoning": ("reasoning", "reasoning_text", "response.reasoning_text"),
}

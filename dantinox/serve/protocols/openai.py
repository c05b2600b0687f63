"""The OpenAI protocol: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

The fields are those of OpenAI's API reference and the additional fields that clients of vLLM send.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.serve.errors import JSON, RequestError, error_object, http_error
from dantinox.serve.protocols.bodies import parse_body
from dantinox.serve.protocols.logprobs import ChatLogprobs, CompletionLogprobs, Logprobs, LogprobsFormatter
from dantinox.serve.protocols.openai_bodies import Body, ChatBody, CompletionBody, check_combination
from dantinox.serve.protocols.token_text import prompt_ids
from dantinox.serve.service import Reply, Service

DONE = b"data: [DONE]\n\n"


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    created = int(time.time())

    def model() -> dict[str, JSON]:
        known: dict[str, JSON] = {"id": service.engine.name, "object": "model", "created": created, "owned_by": "dantinox"}
        return known | {"max_model_len": service.context}

    async def models(request: Request) -> Response:
        """Lists the served model."""
        return JSONResponse({"object": "list", "data": [model()]})

    async def one_model(request: Request) -> Response:
        """Describes the served model; 404 for another name."""
        service.check_model(request.path_params["id"])
        return JSONResponse(model())

    async def completions(request: Request) -> Reply:
        """Continues prompts."""
        return await parse_completion(service, await parse_body(request, CompletionBody))

    async def chat(request: Request) -> Reply:
        """Answers a conversation."""
        return await parse_chat(service, await parse_body(request, ChatBody))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", one_model),
        Route("/v1/completions", service.endpoint(completions), methods=["POST"]),
        Route("/v1/chat/completions", service.endpoint(chat), methods=["POST"]),
    ]


async def parse_completion(service: Service, body: CompletionBody) -> Reply:
    """Converts a body of `/v1/completions` to generation requests, one for each prompt.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    check_combination(body)
    service.check_model(body.model)
    config = service.settings(body.settings(body.max_tokens))
    tokenizer = service.tokenizer
    # Refuse a prompt that is too long for the context before `prompt_ids` checks each of its token ids.
    _check_lengths(service, (prompt for prompt in body.prompt if isinstance(prompt, list)), "prompt")
    prompts = await prompt_ids(service.model, body.prompt)
    logprobs = None if body.logprobs is None else min(body.logprobs, tokenizer.vocab_size)
    echo, constraint = bool(body.echo), body.constraint()
    reports, salt = echo and logprobs is not None, body.cache_salt or ""
    requests = [GenerationRequest(tuple(ids), config, logprobs, reports, constraint, salt=salt) for ids in prompts]
    _check_lengths(service, prompts, "prompt")
    echoed = [""] * len(requests)
    if echo:
        echoed = [tokenizer.decode(prompt) if isinstance(prompt, list) else prompt for prompt in body.prompt]
    return OpenAIReply(service, requests, COMPLETION, body, echoed)


async def parse_chat(service: Service, body: ChatBody) -> Reply:
    """Converts a body of `/v1/chat/completions` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    check_combination(body)
    service.check_model(body.model)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    config = service.settings(body.settings(limit))
    ids, ends = await service.render([message.model_dump() for message in body.messages])
    config = service.model.with_stop_ids(config, ends)
    logprobs = min(body.top_logprobs or 0, service.tokenizer.vocab_size) if body.logprobs else None
    request = GenerationRequest(tuple(ids), config, logprobs, False, body.constraint(), salt=body.cache_salt or "")
    _check_lengths(service, [ids], "messages")
    return OpenAIReply(service, [request], CHAT, body, [""])


def _check_lengths(service: Service, prompts: Any, param: str) -> None:
    """Raises RequestError for a prompt that fills the context."""
    longest, context = max(map(len, prompts), default=0), service.context
    if longest >= context:
        raise http_error("context", context, longest, param=param)


# --- responses


class ReplyFormat(NamedTuple):
    """The format of a response.

    Attributes:
      id: prefix of the response's id.
      object, chunk_object: value of the field `object` in a complete response, and in a chunk of a streamed response.
      logprobs: formats the log-probabilities of a choice.
      message: function from the complete text of a choice to the fields of the choice.
      delta: function from a delta of the text to the fields of the choice in a chunk.
      opening: fields of the first chunk of each choice, which is sent before any text; None: no such chunk.
    """

    id: str
    object: str
    chunk_object: str
    logprobs: LogprobsFormatter
    message: Callable[[str], dict[str, JSON]]
    delta: Callable[[str], dict[str, JSON]]
    opening: dict[str, JSON] | None


COMPLETION = ReplyFormat(
    "cmpl",
    "text_completion",
    "text_completion",
    CompletionLogprobs,
    lambda text: {"text": text},
    lambda text: {"text": text},
    None,
)
CHAT = ReplyFormat(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    ChatLogprobs,
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)


class ChoiceDelta(NamedTuple):
    """A delta of one choice: its index, new text, log-probabilities if requested, and finish reason if it has ended."""

    choice: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class OpenAIReply(Reply):
    """A completion or a chat completion."""

    def __init__(
        self, service: Service, requests: Sequence[GenerationRequest], form: ReplyFormat, body: Body, echoed: Sequence[str]
    ):
        """Initializes the reply; `echoed` has the prompt of each request if `echo` is set, otherwise empty strings."""
        super().__init__(requests, bool(body.stream))
        self._tokenizer, self._form, self._echoed = service.tokenizer, form, echoed
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._frame: dict[str, JSON] = {
            "id": f"{form.id}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.engine.name,
        }
        samples = [request.config.generation.n for request in requests]
        self._first_index = [sum(samples[:number]) for number in range(len(samples))]
        self._choices, self._opened = sum(samples), form.opening is None
        self._logprobs: dict[int, Callable[[Sequence[TokenRecord]], Logprobs]] = {}
        self._parts: dict[int, list[ChoiceDelta]] = {}

    def _choice_delta(self, number: int, delta: Delta) -> ChoiceDelta:
        request, index = self.requests[number], self._first_index[number] + delta.sample
        text, records = delta.text, delta.tokens
        if index not in self._logprobs:
            self._logprobs[index] = self._form.logprobs(self._tokenizer, request, self._echoed[number])
            text, records = self._echoed[number] + text, [*self.streams[number].prompt, *records]
        reason = "stop" if delta.finish_reason == "eos" else delta.finish_reason
        return ChoiceDelta(index, text, None if request.logprobs is None else self._logprobs[index](records), reason)

    def add(self, number: int, delta: Delta) -> None:
        choice = self._choice_delta(number, delta)
        self._parts.setdefault(choice.choice, []).append(choice)

    def body(self) -> JSON:
        choices: list[JSON] = []
        for index, parts in sorted(self._parts.items()):
            logprobs = parts[0].logprobs
            for part in parts[1:]:
                for name, values in (part.logprobs or {}).items():
                    if logprobs is not None:
                        logprobs[name] += values
            message = self._form.message("".join(part.text for part in parts))
            choices.append({"index": index, **message, "logprobs": logprobs, "finish_reason": parts[-1].finish_reason})
        return {**self._frame, "object": self._form.object, "choices": choices, "usage": self._usage()}

    def format_delta(self, number: int, delta: Delta) -> bytes:
        choice, data = self._choice_delta(number, delta), b""
        if not self._opened and self._form.opening is not None:
            data = b"".join(
                self._chunk(ChoiceDelta(index, "", None, None), self._form.opening) for index in range(self._choices)
            )
            self._opened = True
        if choice.text or choice.finish_reason or any((choice.logprobs or {}).values()):
            data += self._chunk(choice, self._form.delta(choice.text))
        return data

    def _chunk(self, choice: ChoiceDelta, fields: Mapping[str, JSON]) -> bytes:
        content: dict[str, JSON] = {
            "index": choice.choice,
            **fields,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        usage: dict[str, JSON] = {"usage": None} if self._with_usage else {}
        return _event({**self._frame, "object": self._form.chunk_object, "choices": [content], **usage})

    def format_end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return _event({**self._frame, "object": self._form.chunk_object, "choices": [], "usage": self._usage()}) + DONE

    def format_stream_error(self, error: RequestError) -> bytes:
        return _event(error_object(error)) + DONE

    def _usage(self) -> dict[str, JSON]:
        stats = [stream.stats for stream in self.streams.values()]
        prompt, new = sum(len(request.ids) for request in self.requests), sum(one.new_tokens for one in stats)
        cached, accepted = sum(one.reused_tokens for one in stats), sum(one.accepted_draft_tokens for one in stats)
        rejected = sum(one.draft_tokens for one in stats) - accepted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
        }


def _event(content: JSON) -> bytes:
    return b"data: " + json.dumps(content, allow_nan=False).encode() + b"\n\n"

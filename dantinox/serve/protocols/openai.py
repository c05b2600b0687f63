"""The OpenAI protocol: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

The fields are those of OpenAI's API reference and the additional fields that clients of vLLM send.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.generation import LoadedModel
from dantinox.generation.request import Delta, GenerationRequest, TokenRecord
from dantinox.serve.errors import JSON, RequestError, error_object
from dantinox.serve.protocols.bodies import parse_body
from dantinox.serve.protocols.capabilities import capabilities
from dantinox.serve.protocols.fim_prompts import fill_in_middle, with_fim_ends
from dantinox.serve.protocols.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Logprobs,
    LogprobsFormatter,
)
from dantinox.serve.protocols.openai_bodies import Body, ChatBody, CompletionBody, check_combination
from dantinox.serve.protocols.server_sent_events import data_event
from dantinox.serve.protocols.token_text import healed, prompt_ids
from dantinox.serve.protocols.tool_chat import PreparedChat, prepare_chat
from dantinox.serve.service import Reply, Service

DONE = b"data: [DONE]\n\n"
# The finish reasons with another name in this protocol.
FINISH_REASONS = {"eos": "stop", "loop": "length"}


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""
    created = int(time.time())

    def model(name: str) -> dict[str, JSON]:
        return model_entry(
            name, service.resolve_model(name), service.engine.name, created
        ) | about_model(service)

    async def models(request: Request) -> Response:
        """Lists the served model and its aliases."""
        return JSONResponse(
            {"object": "list", "data": [model(name) for name in service.model_names()]}
        )

    async def one_model(request: Request) -> Response:
        """Describes the served model or one of its aliases; 404 for another name."""
        return JSONResponse(model(request.path_params["id"]))

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


def model_entry(name: str, root: str, base: str, created: int) -> dict[str, JSON]:
    """Returns an entry of `/v1/models`.

    Args:
      name: the name or alias of the entry.
      root: the model that it means, alone or with an adapter.
      base: the name of the model alone.
      created: the time of the start of the server, in seconds since the epoch.
    """
    known: dict[str, JSON] = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "dantinox",
        "root": root,
    }
    return known if root == base else known | {"parent": base}


def about_model(service: Service) -> dict[str, JSON]:
    """Returns the fields of an entry of `/v1/models` that a loaded model knows."""
    lengths: dict[str, JSON] = {"max_model_len": service.context, "context_length": service.context}
    return {"capabilities": {**capabilities(service)}, **lengths}


async def parse_completion(service: Service, body: CompletionBody) -> Reply:
    """Converts a body of `/v1/completions` to generation requests, one for each prompt.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    check_combination(body)
    lora = service.check_model(body.model, body.lora)
    config = service.settings(body.settings(body.max_tokens, service.model.config.generation))
    tokenizer = service.tokenizer
    # Refuse a prompt that is too long for the context before `prompt_ids` checks each of its token
    # ids.
    service.check_lengths((prompt for prompt in body.prompt if isinstance(prompt, list)), "prompt")
    if body.suffix:
        config = with_fim_ends(service, config, "suffix")
        if body.echo:
            raise RequestError(
                400, "echo and suffix exclude each other: remove one of them", param="echo"
            )
        prompts = await fill_in_middle(service.model, body.prompt, body.suffix)
    else:
        prompts = await prompt_ids(
            service.model,
            body.prompt,
            encode_text=partial(LoadedModel.prompt_ids, parse_special=True),
        )
    logprobs = None if body.logprobs is None else min(body.logprobs, tokenizer.vocab_size)
    constraint = body.constraint()
    requests = [
        GenerationRequest(
            tuple(ids),
            config,
            logprobs=logprobs,
            # The engine reports the tokens of the prompt; its text is in `echoed`.
            echo=bool(body.echo) and logprobs is not None,
            constraint=constraint,
            lora=lora,
            salt=body.cache_salt or "",
        )
        for ids in prompts
    ]
    service.check_lengths(prompts, "prompt")
    echoed = [""] * len(requests)
    if body.echo:
        echoed = [
            tokenizer.decode(prompt) if isinstance(prompt, list) else prompt
            for prompt in body.prompt
        ]
    return OpenAIReply(service, await healed(service.model, requests), body, echoed)


async def parse_chat(service: Service, body: ChatBody) -> Reply:
    """Converts a body of `/v1/chat/completions` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    check_combination(body)
    lora = service.check_model(body.model, body.lora)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    config = service.settings(body.settings(limit, service.model.config.generation))
    prepared = await prepare_chat(service, body.conversation())
    config = service.model.with_stop_ids(config, prepared.end_ids)
    logprobs = min(body.top_logprobs or 0, service.tokenizer.vocab_size) if body.logprobs else None
    request = prepared.request(config, logprobs, lora, body.cache_salt or "")
    service.check_lengths([prepared.ids], "messages")
    return ChatReply(service, request, body, prepared)


# --- responses


class Names(NamedTuple):
    """The names in a response: the prefix of its id, and `object` of a whole response and of a
    streamed chunk.
    """

    id: str
    object: str
    chunk_object: str


class ChoiceDelta(NamedTuple):
    """A delta of one choice: its index, new text, log-probabilities if requested, and finish reason
    if it has ended.
    """

    choice: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class OpenAIReply(Reply):
    """A completion, and the base of a chat completion."""

    names = Names("cmpl", "text_completion", "text_completion")
    logprobs_format: LogprobsFormatter = CompletionLogprobs
    _empty_fields: ClassVar[dict[str, JSON]] = {"text": ""}  # of a chunk without text

    def __init__(
        self,
        service: Service,
        requests: Sequence[GenerationRequest],
        body: Body,
        echoed: Sequence[str],
    ):
        """Initializes the reply; `echoed` has the prompt of each request if `echo` is set,
        otherwise empty strings.
        """
        super().__init__(requests, bool(body.stream))
        self._tokenizer = service.tokenizer
        self._echoed = echoed
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._frame: dict[str, JSON] = {
            "id": f"{self.names.id}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.model_name(requests[0].lora),
        }
        samples = [request.config.generation.n for request in requests]
        self._first_index = [sum(samples[:number]) for number in range(len(samples))]
        self._choices = sum(samples)
        self._logprobs: dict[int, Callable[[Sequence[TokenRecord]], Logprobs]] = {}
        self._parts: dict[int, list[ChoiceDelta]] = {}  # by the index of the choice

    def _choice_delta(self, number: int, delta: Delta) -> ChoiceDelta:
        request = self.requests[number]
        index = self._first_index[number] + delta.sample
        text = delta.text
        records = delta.tokens
        if index not in self._logprobs:
            self._logprobs[index] = type(self).logprobs_format(
                self._tokenizer, request, self._echoed[number]
            )
            text = self._echoed[number] + text
            records = [*self.streams[number].prompt, *records]
        logprobs = None if request.logprobs is None else self._logprobs[index](records)
        reason = delta.finish_reason
        if reason is not None:
            reason = FINISH_REASONS.get(reason, reason)
        return ChoiceDelta(index, text, logprobs, reason)

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
            fields, reason = self._whole_choice(
                index, "".join(part.text for part in parts), parts[-1].finish_reason
            )
            choices.append(
                {"index": index, **fields, "logprobs": logprobs, "finish_reason": reason}
            )
        return {
            **self._frame,
            "object": self.names.object,
            "choices": choices,
            "usage": self._usage(),
        }

    def _whole_choice(
        self, index: int, text: str, reason: str | None
    ) -> tuple[dict[str, JSON], str | None]:
        """Returns the fields of a choice that is not streamed, and its finish reason."""
        return {"text": text}, reason

    def _chunk_fields(self, choice: ChoiceDelta) -> tuple[list[dict[str, JSON]], str | None]:
        """Returns the fields of each chunk of a streamed delta, and the finish reason."""
        return [{"text": choice.text}] if choice.text else [], choice.finish_reason

    def format_delta(self, number: int, delta: Delta) -> bytes:
        choice = self._choice_delta(number, delta)
        chunks, reason = self._chunk_fields(choice)
        if not chunks and (reason or any((choice.logprobs or {}).values())):
            chunks = [self._empty_fields]
        data = b""
        for place, fields in enumerate(chunks):
            last = place == len(chunks) - 1
            data += self._chunk(
                choice.choice,
                fields,
                choice.logprobs if place == 0 else None,
                reason if last else None,
            )
        return data

    def _chunk(
        self, index: int, fields: Mapping[str, JSON], logprobs: Logprobs | None, reason: str | None
    ) -> bytes:
        content: dict[str, JSON] = {
            "index": index,
            **fields,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        usage: dict[str, JSON] = {"usage": None} if self._with_usage else {}
        return data_event(
            {**self._frame, "object": self.names.chunk_object, "choices": [content], **usage}
        )

    def format_end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return (
            data_event(
                {
                    **self._frame,
                    "object": self.names.chunk_object,
                    "choices": [],
                    "usage": self._usage(),
                }
            )
            + DONE
        )

    def format_stream_error(self, error: RequestError) -> bytes:
        return data_event(error_object(error)) + DONE

    def _usage(self) -> dict[str, JSON]:
        stats = [stream.stats for stream in self.streams.values()]
        prompt = sum(len(request.ids) for request in self.requests)
        new = sum(one.new_tokens for one in stats)
        counts = sum((one.counts for one in stats), Counter[str]())
        accepted = counts["accepted_draft_tokens"]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in stats)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": counts["draft_tokens"] - accepted,
                "reasoning_tokens": sum(one.reasoning_tokens for one in stats),
            },
        }


class ChatReply(OpenAIReply):
    """A chat completion."""

    names = Names("chatcmpl", "chat.completion", "chat.completion.chunk")
    logprobs_format = ChatLogprobs
    _empty_fields: ClassVar[dict[str, JSON]] = {"delta": {}}

    def __init__(
        self, service: Service, request: GenerationRequest, body: ChatBody, prepared: PreparedChat
    ):
        super().__init__(service, [request], body, [""])
        # For each choice, what splits its text into content, reasoning and calls.
        self._replies = [prepared.fields() for _ in range(self._choices)]
        # Whether the first chunk of each choice, which has the role, is written.
        self._opened = False

    def _whole_choice(
        self, index: int, text: str, reason: str | None
    ) -> tuple[dict[str, JSON], str | None]:
        reply = self._replies[index]
        reply.push(text, reason)
        message: dict[str, JSON] = {
            "role": "assistant",
            "content": reply.content or (None if reply.calls else ""),
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [*reply.calls]
        return {"message": message}, reply.reason(reason)

    def _chunk_fields(self, choice: ChoiceDelta) -> tuple[list[dict[str, JSON]], str | None]:
        reply = self._replies[choice.choice]
        fields: list[dict[str, JSON]] = [
            {"delta": delta} for delta in reply.push(choice.text, choice.finish_reason)
        ]
        return fields, reply.reason(choice.finish_reason)

    def format_delta(self, number: int, delta: Delta) -> bytes:
        data = b""
        if not self._opened:
            self._opened = True
            opening: dict[str, JSON] = {"delta": {"role": "assistant", "content": ""}}
            data = b"".join(
                self._chunk(index, opening, None, None) for index in range(self._choices)
            )
        return data + super().format_delta(number, delta)

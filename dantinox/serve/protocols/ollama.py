"""Ollama's API: `/api/generate`, `/api/chat`, `/api/embed`, `/api/embeddings`, and the routes that
describe the model.

Source: Ollama's API documentation. Streams are one JSON object per line. Durations are in
nanoseconds.
"""

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar

import jax
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dantinox.config import Config, with_generation
from dantinox.generation import LoadedModel
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.report.tables import human_count
from dantinox.serve.errors import JSON, RequestError, http_error
from dantinox.serve.operations.background import run_in_thread
from dantinox.serve.protocols.bodies import parse_body, warn_unknown
from dantinox.serve.protocols.capabilities import capabilities
from dantinox.serve.protocols.embeddings import embed, encode_vectors, response_with_rows
from dantinox.serve.protocols.fim_prompts import fill_in_middle, with_fim_ends
from dantinox.serve.protocols.llama_options import KNOWN_OPTIONS
from dantinox.serve.protocols.logprobs import ChatLogprobs
from dantinox.serve.protocols.ollama_bodies import (
    KEPT,
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ModelBody,
    OllamaBody,
    check_generate,
)
from dantinox.serve.protocols.token_text import check_ids, healed, prompt_ids
from dantinox.serve.protocols.tool_chat import Conversation, PreparedChat, ReplyFields, prepare_chat
from dantinox.serve.service import Reply, Service

OLLAMA_VERSION = "0.12.11"  # supported version of Ollama's API: the first with log-probabilities
TAG = ":latest"
NEVER = "9999-12-31T23:59:59Z"
# Paths of Ollama's API. Those that manage models do not exist here, but their errors have Ollama's
# format.
PATHS = (
    "/api/generate", "/api/chat", "/api/embed", "/api/tags", "/api/show", "/api/version", "/api/ps",
    "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs",
)  # fmt: skip
FINISH_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "loop": "length",
    "cancelled": "stop",
}
FAMILY: dict[str, JSON] = {
    "parent_model": "",
    "format": "dantinox",
    "family": "dantinox",
    "families": ["dantinox"],
}


def format_error(error: RequestError) -> JSON:
    """Returns an error in Ollama's format."""
    return {"error": error.message}


def model_of(body: Mapping[str, JSON]) -> JSON:
    """Returns the name of the model in a body."""
    return body.get("model") or body.get("name")


def routes(service: Service) -> list[Route]:
    """Returns the routes of this protocol."""

    # As in Ollama, the media type does not matter: litellm sends none, and curl declares a form.

    async def generate(request: Request) -> Reply:
        """Answers a prompt; without a chat template or with raw, continues it."""
        return await parse_generate(
            service, await parse_body(request, GenerateBody, any_media_type=True)
        )

    async def chat(request: Request) -> Reply:
        """Answers a conversation."""
        return await parse_chat(service, await parse_body(request, ChatBody, any_media_type=True))

    return [
        Route("/api/generate", service.endpoint(generate), methods=["POST"]),
        Route("/api/chat", service.endpoint(chat), methods=["POST"]),
        *_embedding_routes(service),
        *_model_routes(service),
    ]


def check_model(service: Service, name: str | None) -> str | None:
    """Returns the adapter that a name of a model selects; the tag `:latest` may be missing.

    Raises:
      RequestError: 404, the server has no such model.
    """
    return service.check_model(None if name is None else known_name(name, service.known_names()))


def known_name(name: str, known: Collection[str]) -> str:
    """Returns the name of a server's model that a client means: the same name, or else the one that
    has no tag `:latest`, or has it in addition.

    Args:
      known: the names of the models, alone and with adapters, and their aliases.
    """
    plain = name.removesuffix(TAG)
    return next((one for one in (name, plain, plain + TAG) if one in known), plain)


# --- generation


async def parse_generate(service: Service, body: GenerateBody) -> Reply:
    """Converts a body of `/api/generate` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    warn_unknown(body)
    lora = check_model(service, body.model)
    check_generate(body)
    config = _settings(service, body)
    prompt = body.prompt or ""
    if not prompt and not body.suffix:
        return OllamaReply(service, None, body)
    prepared = None
    if body.suffix:
        config = with_fim_ends(service, config, "suffix")
        (ids,) = await fill_in_middle(service.model, [prompt], body.suffix)
    elif body.raw or service.options.template is None:
        if body.system:
            raise http_error("template", param="system")
        # A raw prompt has the form of the template already, with the names of its special tokens.
        encode = partial(LoadedModel.prompt_ids, parse_special=bool(body.raw))
        (ids,) = await prompt_ids(service.model, [prompt], encode_text=encode)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": prompt}]
        prepared = await prepare_chat(
            service, Conversation(messages, effort=body.effort, constraint=body.constraint())
        )
        config = service.model.with_stop_ids(config, prepared.end_ids)
        ids = prepared.ids
    if body.context:
        check_ids(service.tokenizer, body.context, "context")
        if ids[:1] == [service.tokenizer.bos_id]:
            ids = ids[1:]
        ids = [*body.context, *ids]
    if body.truncate is not False:
        kept = KEPT if body.options.num_keep is None else body.options.num_keep
        ids = shortened(ids, _context(service, body), config.generation.max_new_tokens, kept)
    return await _reply(service, body, config, ids, "prompt", prepared, lora)


async def parse_chat(service: Service, body: ChatBody) -> Reply:
    """Converts a body of `/api/chat` to a generation request.

    Raises:
      RequestError, UserError: the body cannot be served.
    """
    warn_unknown(body)
    lora = check_model(service, body.model)
    body.check_messages()
    config = _settings(service, body)
    messages = [message.fields() for message in body.messages]
    if not messages:
        return OllamaReply(service, None, body)
    chat = Conversation(
        messages, body.tools or (), effort=body.effort, constraint=body.constraint()
    )
    prepared = await prepare_chat(service, chat)
    if body.truncate is not False:
        prepared = await _fit(service, chat, prepared, _context(service, body))
    config = service.model.with_stop_ids(config, prepared.end_ids)
    return await _reply(service, body, config, prepared.ids, "messages", prepared, lora)


async def _fit(
    service: Service, chat: Conversation, whole: PreparedChat, context: int
) -> PreparedChat:
    """Returns a conversation without its oldest turns, as few as possible, so that it fits the
    context.

    System messages are kept, and the first other message that is kept is one of the user. If the
    conversation does not fit with its last turn alone, the whole conversation is returned.
    """
    messages = chat.messages
    others = [number for number, message in enumerate(messages) if message["role"] != "system"]
    # How many of the other messages can be left out, so that the next one is of the user.
    cuts = [count for count in range(1, len(others)) if messages[others[count]]["role"] == "user"]

    async def prepare(cut: int) -> PreparedChat:
        dropped = {*others[:cut]}
        remaining = [message for number, message in enumerate(messages) if number not in dropped]
        return await prepare_chat(service, replace(chat, messages=remaining))

    if len(whole.ids) < context or not cuts:
        return whole
    best = await prepare(cuts[-1])
    if len(best.ids) >= context:
        return whole
    low = -1
    high = len(cuts) - 1  # with cut `low` the conversation is too long, with cut `high` it fits
    while high - low > 1:
        middle = (low + high) // 2
        found = await prepare(cuts[middle])
        if len(found.ids) < context:
            best = found
            high = middle
        else:
            low = middle
    return best


def shortened(ids: list[int], context: int, new: int, kept: int) -> list[int]:
    """Returns a prompt that fits the context: the first tokens of a prompt that is too long, and
    its end.

    Args:
      context: the maximum length of a prompt and its continuation.
      new: the largest number of new tokens, for which space is left, at most half of the context.
      kept: the number of first tokens that are kept, at most half of the prompt; -1 leaves the
        prompt as it is.
    """
    if len(ids) < context or kept < 0:
        return ids
    size = context - min(new, context // 2)
    kept = min(kept, size // 2)
    return [*ids[:kept], *ids[len(ids) - (size - kept) :]]


def _context(service: Service, body: OllamaBody) -> int:
    return min(body.options.num_ctx or service.context, service.context)


def _settings(service: Service, body: OllamaBody) -> Config:
    warn_unknown(body.options, *KNOWN_OPTIONS)
    base = service.engine.settings({}).generation
    config = service.settings(body.options.settings(base, service.context))
    return with_generation(config, n=1)


async def _reply(
    service: Service,
    body: OllamaBody,
    config: Config,
    ids: Sequence[int],
    param: str,
    prepared: PreparedChat | None,
    lora: str | None,
) -> Reply:
    """Returns the reply of a request; raises RequestError for a prompt that fills the context."""
    context = _context(service, body)
    if len(ids) >= context:
        raise http_error("context", context, len(ids), param=param)
    config = with_generation(
        config, max_new_tokens=min(config.generation.max_new_tokens, context - len(ids))
    )
    logprobs = body.alternatives(service.tokenizer.vocab_size)
    if prepared is not None:
        request = replace(prepared.request(config, logprobs, lora), ids=tuple(ids))
    else:
        request = GenerationRequest(
            tuple(ids), config, logprobs=logprobs, constraint=body.constraint(), lora=lora
        )
        (request,) = await healed(service.model, [request])
    return OllamaReply(service, request, body, prepared)


# --- responses


def _response(text: str, thinking: str, calls: Sequence[JSON]) -> dict[str, JSON]:
    """The fields of an answer to `/api/generate`, which has no tools."""
    found: dict[str, JSON] = {"response": text}
    if thinking:
        found["thinking"] = thinking
    return found


def _message(text: str, thinking: str, calls: Sequence[JSON]) -> dict[str, JSON]:
    """The fields of an answer to `/api/chat`."""
    message: dict[str, JSON] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [*calls]
    return {"message": message}


def _tool_calls(calls: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Returns tool calls in Ollama's format, in which the arguments are an object."""
    found: list[JSON] = []
    for index, call in enumerate(calls):
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:  # num_predict has ended the call
            arguments = {}
        function = {"index": index, "name": call["function"]["name"], "arguments": arguments}
        found.append({"id": call["id"], "function": function})
    return found


class OllamaReply(Reply):
    """The answer to a prompt or a conversation. Without a request it reports that the model is
    loaded.
    """

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(
        self,
        service: Service,
        request: GenerationRequest | None,
        body: OllamaBody,
        prepared: PreparedChat | None = None,
    ):
        super().__init__([] if request is None else [request], body.stream is not False)
        self._content = _message if isinstance(body, ChatBody) else _response
        self._returns_context = isinstance(body, GenerateBody) and not (body.raw or body.suffix)
        self._model = body.model or service.engine.name
        self._fields = ReplyFields(None) if prepared is None else prepared.fields()
        self._tokenizer = service.tokenizer
        self._ids: list[int] = []  # of the answer
        self._reason = "load"
        self._records: list[Any] = []  # records of tokens whose log-probabilities are not sent yet

    def add(self, number: int, delta: Delta) -> None:
        self._add(number, delta)

    def _add(self, number: int, delta: Delta) -> tuple[str, str]:
        """Adds a delta; returns its text of the answer and of the reasoning."""
        self._ids += [record["id"] for record in delta.tokens]
        self._reason = FINISH_REASONS[delta.finish_reason] if delta.finish_reason else self._reason
        if self.requests[number].logprobs is not None:
            self._records += delta.tokens
        parts = self._fields.parts(delta.text, delta.finish_reason)
        for part in parts:
            self._fields.add(part)
        text = "".join(part.text for part in parts if part.kind == "content")
        thinking = "".join(part.text for part in parts if part.kind == "reasoning")
        return text, thinking

    def body(self) -> JSON:
        fields = self._fields
        return (
            self._last(fields.content, fields.reasoning, _tool_calls(fields.calls))
            | self._logprobs()
        )

    def format_delta(self, number: int, delta: Delta) -> bytes:
        text, thinking = self._add(number, delta)
        logprobs = self._logprobs()
        self._records = []
        calls = _tool_calls(self._fields.calls) if delta.finish_reason is not None else []
        if not (text or thinking or calls or logprobs):
            return b""
        return _line(self._frame(text, thinking, calls, False) | logprobs)

    def format_end(self) -> bytes:
        return _line(self._last("", "", ()))

    def format_stream_error(self, error: RequestError) -> bytes:
        return _line(format_error(error))

    def _logprobs(self) -> dict[str, JSON]:
        if not self._records:
            return {}
        return {
            "logprobs": ChatLogprobs(self._tokenizer, self.requests[0], "")(self._records)[
                "content"
            ]
        }

    def _frame(
        self, text: str, thinking: str, calls: Sequence[JSON], done: bool
    ) -> dict[str, JSON]:
        return {
            "model": self._model,
            "created_at": now(),
            **self._content(text, thinking, calls),
            "done": done,
        }

    def _last(self, text: str, thinking: str, calls: Sequence[JSON]) -> dict[str, JSON]:
        """Returns the complete answer, or the last object of a stream, with its statistics."""
        known = self._frame(text, thinking, calls, True) | {"done_reason": self._reason}
        if not self.requests:
            return known
        stats = self.streams[0].stats
        request = self.requests[0]
        if self._returns_context:
            known["context"] = [*request.ids, *self._ids]
        first = stats.first_token_seconds if stats.new_tokens else stats.seconds
        return known | {
            "total_duration": _nanoseconds(stats.seconds),
            "load_duration": _nanoseconds(stats.queued_seconds),
            "prompt_eval_count": len(request.ids),
            "prompt_eval_duration": _nanoseconds(first - stats.queued_seconds),
            "eval_count": stats.new_tokens,
            "eval_duration": _nanoseconds(stats.seconds - first),
        }


def _line(content: JSON) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def now(later: float = 0.0) -> str:
    """Returns the current time, or that after `later` seconds, in the format of Ollama."""
    return (datetime.now(UTC) + timedelta(seconds=later)).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e9))


# --- routes without generation


def _embedding_routes(service: Service) -> list[Route]:
    """Returns the routes of embeddings."""

    async def embed_inputs(request: Request) -> Response:
        """Returns the embeddings of texts."""
        body = await parse_body(request, EmbedBody, any_media_type=True)
        start = time.monotonic()
        warn_unknown(body)
        check_model(service, body.model)
        rows = list[bytes]()
        tokens = 0
        if body.input:
            vectors_ND, tokens = await embed(
                service, body.input, "input", body.dimensions or None, body.truncate is not False
            )
            rows = await run_in_thread(encode_vectors, vectors_ND)
        known: dict[str, JSON] = {
            "model": body.model or service.engine.name,
            "prompt_eval_count": tokens,
        }
        known |= {"total_duration": _nanoseconds(time.monotonic() - start), "load_duration": 0}
        return response_with_rows(known, "embeddings", rows)

    async def embed_prompt(request: Request) -> Response:
        """Returns the embedding of one text."""
        body = await parse_body(request, EmbeddingsBody, any_media_type=True)
        warn_unknown(body)
        check_model(service, body.model)
        if not body.prompt:
            return JSONResponse({"embedding": []})
        vectors_1D, _ = await embed(service, [body.prompt], "prompt", truncate=True)
        return JSONResponse({"embedding": vectors_1D[0].tolist()})

    return [
        Route("/api/embed", embed_inputs, methods=["POST"]),
        Route("/api/embeddings", embed_prompt, methods=["POST"]),
    ]


def _model_routes(service: Service) -> list[Route]:
    """Returns the routes that describe the model and the server."""
    started = now()

    async def tags(request: Request) -> Response:
        """Lists the served model."""
        return JSONResponse(
            {"models": [await run_in_thread(describe, service) | {"modified_at": started}]}
        )

    async def running(request: Request) -> Response:
        """Lists the served model, which is always loaded."""
        known = await run_in_thread(describe, service)
        known |= {"size_vram": 0 if jax.default_backend() == "cpu" else known["size"]}
        return JSONResponse(
            {"models": [known | {"expires_at": NEVER, "context_length": service.context}]}
        )

    async def show(request: Request) -> Response:
        """Describes the served model."""
        body = await parse_body(request, ModelBody, any_media_type=True)
        check_model(service, body.model or body.name)
        config = service.model.model.config
        template = service.options.template
        details = await run_in_thread(_details, service)
        info: dict[str, JSON] = {
            "general.architecture": "dantinox",
            "general.parameter_count": service.model.parameters,
            "dantinox.context_length": service.context,
            "dantinox.embedding_length": config.dim,
            "dantinox.vocab_size": config.vocab_size,
        }
        content: dict[str, JSON] = {
            "modelfile": "",
            "parameters": "",
            "template": "" if template is None else template.source,
            "details": details,
            "model_info": info,
            "modified_at": started,
            "capabilities": _capability_names(service),
        }
        return JSONResponse(content)

    async def version(request: Request) -> Response:
        """Returns the supported version of Ollama's API."""
        return JSONResponse({"version": OLLAMA_VERSION})

    return [
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/version", version),
    ]


def tagged(name: str) -> str:
    """Returns a name of a model with a tag."""
    return name if ":" in name else name + TAG


def describe(service: Service) -> dict[str, JSON]:
    """Describes the model. The digest identifies its name, its vocabulary and its size, not its
    weights.
    """
    name = tagged(service.engine.name)
    identity = f"{name} {service.tokenizer.fingerprint} {service.model.parameters}"
    known: dict[str, JSON] = {"name": name, "model": name, "size": service.model.weight_bytes}
    known |= {"digest": hashlib.sha256(identity.encode()).hexdigest(), "details": _details(service)}
    return known


def unknown_model(name: str, size: int) -> dict[str, JSON]:
    """Describes a model that has not been loaded yet; `size` is that of its file in bytes."""
    known: dict[str, JSON] = {"name": tagged(name), "model": tagged(name), "size": size}
    return known | {
        "digest": hashlib.sha256(tagged(name).encode()).hexdigest(),
        "details": {**FAMILY},
    }


def _details(service: Service) -> dict[str, JSON]:
    weights = service.engine.settings({}).generation.weights
    level = service.model.weight_format if weights == "auto" else weights
    return {
        **FAMILY,
        "parameter_size": human_count(service.model.parameters),
        "quantization_level": level,
    }


def _capability_names(service: Service) -> list[JSON]:
    """Returns the names that Ollama gives to the capabilities of the model."""
    names = {
        "completion": "completion",
        "fim": "insert",
        "embeddings": "embedding",
        "vision": "vision",
    }
    names |= {"tools": "tools", "reasoning": "thinking"}
    return [names[name] for name, has in capabilities(service).items() if has and name in names]

"""Processing of a request from its parsed body to the bytes of its response, for all protocols."""

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dantinox.config import Config, UserError
from dantinox.files import quote
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.errors import JSON, Busy, RequestError, http_error, to_request_error
from dantinox.serve.operations.limits import (
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_ENTRIES_OF,
    MAX_NUMBER,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)
from dantinox.serve.operations.metrics import Metrics
from dantinox.serve.operations.request_record import Generation, RequestRecord, current_record
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol, ResponseStream
from dantinox.text.chat_template import ChatPrompt
from dantinox.text.reply_formats import ReplyFormat, reply_format
from dantinox.text.tool_prompts import chat_prompt

MAX_NAMES_SHOWN = 5  # names of models in an error message


class Reply:
    """The generation requests of one HTTP request, and the format of its response. Each protocol
    has a subclass.

    Attributes:
      requests: the generation requests of the body, at least one.
      stream: whether the response is streamed.
      streams: streams of the requests that the engine has accepted, by request number.
      aborted: whether the reply itself or another HTTP request has ended it early, so that
        `cancelled` is not an error.
      failed: whether the stream has ended with an error.
      truncate_on_error: whether a streamed response with an error lacks its final chunk.
      media_type: media type of a streamed response.
    """

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    truncate_on_error: ClassVar[bool] = False

    def __init__(self, requests: Sequence[GenerationRequest], stream: bool):
        self.requests = requests
        self.stream = stream
        self.streams: dict[int, ResponseStream] = {}
        self.aborted = False
        self.failed = False

    def on_accepted(self) -> None:
        """Called after the engine has accepted a request."""

    def add(self, number: int, delta: Delta) -> None:
        """Adds a delta to a response that is not streamed."""

    def body(self) -> JSON:
        """Returns the body of a response that is not streamed, after all deltas have been added."""

    def format_delta(self, number: int, delta: Delta) -> bytes:
        """Returns the bytes of a delta in a stream; may be empty."""
        raise NotImplementedError

    def format_end(self) -> bytes:
        """Returns the bytes at the end of a stream."""
        return b""

    def format_stream_error(self, error: RequestError) -> bytes:
        """Returns the bytes at the end of a stream that fails after its first bytes."""
        raise NotImplementedError

    def close(self) -> None:
        """Called after the response has ended or failed."""


Parse = Callable[[Request], Awaitable[Reply]]


class Service:
    """The engine, the options and the helpers that the routes of all protocols share.

    Attributes:
      engine: the engine.
      options: options of the server.
      model: the loaded model.
      tokenizer: the model's tokenizer.
      context: maximum length of a prompt and its continuation, in tokens.
    """

    def __init__(self, engine: EngineProtocol, options: Options, metrics: Metrics):
        self.engine = engine
        self.options = options
        self._metrics = metrics
        self.model = engine.run
        self.context = engine.context
        self.tokenizer = engine.run.tokenizer
        # One thread, because the process that renders templates handles one conversation at a time.
        self._template_thread = ThreadPoolExecutor(1, "chat template")
        if options.aliases:
            check_aliases(options.aliases, self._own_names())

    def _own_names(self) -> list[str]:
        """Returns the names of the model, alone and with each adapter."""
        return [self.model_name(), *map(self.model_name, self.engine.loras)]

    def known_names(self) -> list[str]:
        """Returns the names of the model, alone and with each adapter, and the aliases."""
        return [*self._own_names(), *self.options.aliases]

    def model_name(self, lora: str | None = None) -> str:
        """Returns the name of the model, or of the model with an adapter, such as `base:poems`."""
        return self.engine.name if lora is None else f"{self.engine.name}:{lora}"

    def resolve_model(self, name: str | None) -> str:
        """Returns the model that a name in a request means: aliases are replaced, and None is the
        served model.

        Raises:
          RequestError: 404, this server has no model of that name, or the key may not use it.
        """
        resolved = self.engine.name if name is None else self.options.aliases.get(name, name)
        if resolved not in self._own_names():
            raise http_error(
                "model",
                resolved[:60],
                shown_names(self.known_names()),
                param="model",
            )
        if not self.is_allowed(resolved):
            raise forbidden_model(resolved)
        current_record().model = resolved
        return resolved

    def check_model(
        self, name: str | None, lora: str | None = None, *, param: str = "lora"
    ) -> str | None:
        """Returns the adapter that a request selects, by the name of a model such as `base:poems`
        or by the field `param`.

        Raises:
          RequestError: 404, the server has no such model or adapter, or the key may not use it;
            400, the names contradict each other.
        """
        loras = self.engine.loras
        if lora is not None and lora not in loras:
            raise http_error("lora", lora[:60], shown_names(loras), param=param)
        if name is None and lora is not None:
            name = self.model_name(lora)
        resolved = self.options.aliases.get(name, name) if name is not None else None
        if lora is not None and resolved == self.engine.name:
            resolved = self.model_name(lora)
        resolved = self.resolve_model(resolved)
        named = next((other for other in loras if resolved == self.model_name(other)), None)
        if lora not in (None, named):
            raise RequestError(
                400,
                f"model selects the adapter {named}, and lora {lora}: use one of them",
                param="lora",
            )
        return named

    def is_allowed(self, model: str) -> bool:
        """Returns whether the key of this request may use a model, given by its own name."""
        return key_allows(model, self.options.aliases)

    def model_names(self) -> list[str]:
        """Returns the names and aliases of the models that the key of this request may use."""
        names = {**{name: name for name in self._own_names()}, **self.options.aliases}
        return [name for name, model in names.items() if self.is_allowed(model)]

    def settings(self, overrides: Mapping[str, object]) -> Config:
        """Returns the configuration of a request. The sizes of its settings are checked first.

        Raises:
          RequestError: 400, a setting names a file, or a number, list or string is too large.
          UserError: as `EngineProtocol.settings`.
        """
        if "kv_calibration" in overrides:
            message = "kv.calibration can only be set when the server starts"
            raise RequestError(400, message, param="kv_calibration")
        for name, value in overrides.items():
            _check_size(name, value)
        config = self.engine.settings(overrides)
        generation = config.generation
        if "n" in overrides and generation.n > MAX_SAMPLES:
            raise RequestError(
                400, f"n must be at most {MAX_SAMPLES}, got {generation.n}", param="n"
            )
        stops = generation.stop
        if "stop" in overrides and (
            len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops)
        ):
            message = (
                f"stop must have at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH}"
                " characters"
            )
            raise RequestError(400, message, param="stop")
        return config

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """The notation of reasoning and tool calls in the replies of the model."""
        return reply_format(self.options.template, self.tokenizer, self.options.tool_format)

    def check_lengths(self, prompts: Iterable[Sequence[int]], param: str) -> None:
        """Raises RequestError (400) for a prompt that fills the context; `param` is the field of
        the prompts.
        """
        longest = max(map(len, prompts), default=0)
        context = self.context
        if longest >= context:
            raise http_error("context", context, longest, param=param)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> tuple[ChatPrompt, frozenset[int]]:
        """Returns the prompt of a conversation up to the assistant's turn, and the token ids that
        end that turn.

        Args:
          messages, tools, variables, continues: as in `chat_prompt`.

        Raises:
          RequestError: 400, the model has no chat template.
          UserError: the template rejects the messages.
        """
        template = self.options.template
        if template is None:
            raise http_error("template", param="messages")

        current_record().operation = "chat"

        def encode() -> tuple[ChatPrompt, frozenset[int]]:
            return (
                chat_prompt(template, messages, tools, variables, continues=continues),
                template.end_ids,
            )

        return await asyncio.get_running_loop().run_in_executor(self._template_thread, encode)

    # --- responses

    def endpoint(self, parse: Parse) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Returns a route's endpoint: it parses an HTTP request with `parse` and generates the
        response.
        """

        @functools.wraps(parse)
        async def respond(request: Request) -> ASGIApp:
            reply = await parse(request)
            if reply.stream:
                return _EventStream(self._events(reply), reply)
            try:
                async with contextlib.aclosing(self._deltas(reply)) as deltas:
                    async for number, delta in deltas:
                        reply.add(number, delta)
            finally:
                reply.close()
            return JSONResponse(reply.body())

        return respond

    async def _events(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a streamed response. An exception after the first bytes becomes an
        error event.
        """
        started = False
        try:
            async with contextlib.aclosing(self._deltas(reply)) as deltas:
                async for number, delta in deltas:
                    if data := reply.format_delta(number, delta):
                        started = True
                        yield data
            if data := reply.format_end():
                yield data
        except Exception as error:
            if not started:
                raise
            reply.failed = True
            yield reply.format_stream_error(to_request_error(error))
        finally:
            reply.close()

    async def _deltas(self, reply: Reply) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields the deltas of all requests of a reply as they arrive, each with its request's
        number.

        If the queue is full, the remaining requests wait until another request of this reply is
        complete. Closing the generator cancels the incomplete requests.

        Raises:
          UserError, Unavailable: as `EngineProtocol.submit` and `ResponseStream`.
          Busy: the queue is full and no request of this reply is running.
          RequestError: the API key may not use the model.
          RateLimited, RequestError: the API key has too few tokens left, see
            `KeyUsage.reserve_tokens`.
        """
        record = current_record()
        if record.model is None:  # not all protocols name a model
            self.resolve_model(None)
        with record.tokens(sum(self._max_tokens(request) for request in reply.requests)):
            async with contextlib.aclosing(self._generate(reply, record)) as deltas:
                async for item in deltas:
                    yield item

    def _max_tokens(self, request: GenerationRequest) -> int:
        """Returns the largest number of tokens that a prompt and its continuations can have."""
        generation = request.config.generation
        prompt = len(request.ids)
        return prompt + generation.n * max(0, min(generation.max_new_tokens, self.context - prompt))

    async def _generate(
        self, reply: Reply, record: RequestRecord
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        waiting = deque(enumerate(reply.requests))
        live = dict[int, ResponseStream]()  # the streams that have not ended, by request number
        tasks: dict[
            int, asyncio.Task[Delta | None]
        ] = {}  # that read the next delta of a live stream
        queue_has_room = True  # False after a request is refused
        try:
            while waiting or live:
                while waiting and queue_has_room:
                    number, request = waiting[0]
                    try:
                        stream = self.engine.submit(request)
                    except Busy:
                        if not live:
                            raise
                        queue_has_room = False
                    else:
                        live[number] = reply.streams[number] = stream
                        record.generations.append(Generation(request, stream.stats, time.time_ns()))
                        waiting.popleft()
                        reply.on_accepted()
                readable = [*live]
                # One stream is read directly, which needs no task for each of its deltas.
                if len(live) > 1:
                    for number, stream in live.items():
                        if number not in tasks:
                            tasks[number] = asyncio.ensure_future(_next(stream))
                    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
                    readable = [number for number in live if tasks[number].done()]
                for number in readable:
                    reading = tasks.pop(number, None)
                    try:
                        delta = await (_next(live[number]) if reading is None else reading)
                    except Exception:
                        del live[number]
                        raise
                    if delta is None:
                        samples = reply.requests[number].config.generation.n
                        self._metrics.observe(live.pop(number).stats, samples, self.engine.name)
                        queue_has_room = True
                        continue
                    if delta.finish_reason is not None:
                        record.generations[number].finish_reasons[delta.sample] = (
                            delta.finish_reason
                        )
                    if delta.finish_reason == "cancelled" and not reply.aborted:
                        raise http_error("cancelled")
                    yield number, delta
        finally:
            for stream in live.values():
                stream.cancel()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)


def key_allows(model: str, aliases: Mapping[str, str]) -> bool:
    """Returns whether the key of this request may use a model, given by its own name."""
    key = current_record().key
    return (
        key is None
        or key.models is None
        or model in {aliases.get(name, name) for name in key.models}
    )


def forbidden_model(name: str) -> RequestError:
    """Returns the error of a request for a model that its key may not use."""
    key = current_record().key
    return http_error("model_of_key", None if key is None else key.name, name[:60], param="model")


def check_aliases(aliases: Mapping[str, str], own_names: Collection[str]) -> None:
    """Raises a UserError for an alias that does not stand for a model, or that is the name of
    one.
    """
    for alias, name in aliases.items():
        if name in aliases or name not in own_names:
            raise UserError(
                f"the alias {quote(alias)} stands for {quote(name)},"
                " which is not a model of this server"
            )
        if alias in own_names:
            raise UserError(
                f"the alias {quote(alias)} is already the name of a model of this server"
            )


def shown_names(names: Collection[str]) -> str:
    """Returns at most `MAX_NAMES_SHOWN` names for an error message."""
    more = [f"{len(names) - MAX_NAMES_SHOWN} more"] if len(names) > MAX_NAMES_SHOWN else []
    return ", ".join([*map(repr, [*names][:MAX_NAMES_SHOWN]), *more]) or "the base model"


async def _next(stream: ResponseStream) -> Delta | None:
    return await anext(stream, None)


class _EventStream:
    """A response of events, each sent as soon as it is available. The generator is always
    closed.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], reply: Reply):
        self._events = events
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._reply.media_type.encode()),
            (b"x-accel-buffering", b"no"),
        ]
        async with contextlib.aclosing(self._events) as events:
            data = await anext(events, None)  # an exception here becomes an error response
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(events, None)
        if not (self._reply.failed and self._reply.truncate_on_error):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_size(name: str, value: object) -> None:
    """Raises RequestError for a number, list or string that is too large."""
    max_entries = MAX_ENTRIES_OF.get(name, MAX_ENTRIES)
    characters = 0
    parts = [value]  # that are still to be checked
    while parts:
        part = parts.pop()
        if isinstance(part, int | float) and abs(part) > MAX_NUMBER:
            raise RequestError(
                400,
                f"{name} must have numbers between -2^32 and 2^32, got {quote(part)}",
                param=name,
            )
        if isinstance(part, dict | list | tuple):
            if len(part) > max_entries:
                raise RequestError(
                    400,
                    f"{name} must have at most {max_entries:,} entries, got {len(part):,}",
                    param=name,
                )
            parts += part
            if isinstance(part, dict):  # `part` alone has its keys
                parts += part.values()
        if isinstance(part, str):
            characters += len(part)
            if characters > MAX_CHARACTERS:
                raise RequestError(
                    400, f"{name} must have at most {MAX_CHARACTERS:,} characters", param=name
                )

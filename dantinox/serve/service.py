"""One request from its parsed body to the bytes of its response, for every protocol."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dantinox.config import Config
from dantinox.files import quote
from dantinox.generation.request import Delta, GenerationRequest
from dantinox.serve.errors import JSON, Busy, RequestError, refuse, to_request_error
from dantinox.serve.limits import CHARACTERS, ENTRIES, ENTRIES_OF, LARGEST, SAMPLES, STOP_LENGTH, STOPS
from dantinox.serve.metrics import Metrics
from dantinox.serve.options import Options
from dantinox.serve.response_stream import EngineProtocol, ResponseStream


class Reply:
    """What one HTTP request asks for, and how the response is written: a protocol has a subclass.

    Attributes:
      requests: of the body, at least one.
      stream: whether the response is written as its deltas arrive.
      streams: of the requests that the engine has taken, by their number.
      aborted: whether another request has ended it, so that `cancelled` is its proper end.
      failed: whether a stream has ended with an error.
      ends_broken: a stream with an error in it is left without the end of its response.
    """

    ends_broken: ClassVar[bool] = False

    def __init__(self, requests: Sequence[GenerationRequest], stream: bool):
        self.requests, self.stream = requests, stream
        self.streams: dict[int, ResponseStream] = {}
        self.aborted = self.failed = False

    def accepted(self) -> None:
        """The engine has taken a request."""

    def add(self, number: int, delta: Delta) -> None:
        """Takes a delta of a response that is not streamed."""

    def body(self) -> JSON:
        """The response that is not streamed, once all deltas were added."""

    def format_delta(self, number: int, delta: Delta) -> bytes:
        """What a delta adds to a stream; nothing may."""
        raise NotImplementedError

    def format_end(self) -> bytes:
        """The end of a stream."""
        return b""

    def format_error(self, error: RequestError) -> bytes:
        """The end of a stream that has begun and fails."""
        raise NotImplementedError

    def close(self) -> None:
        """The response has ended, in whatever way."""


Parse = Callable[[Request], Awaitable[Reply]]


class Service:
    """What the routes of all protocols share.

    Attributes:
      tokenizer: of the model.
      context: tokens that a prompt and its continuation may have together.
    """

    def __init__(self, engine: EngineProtocol, options: Options, metrics: Metrics):
        self.engine, self.options, self._metrics = engine, options, metrics
        self.model = engine.run
        self.tokenizer = engine.run.tokenizer
        self._template_thread = ThreadPoolExecutor(
            1, "chat template"
        )  # the template's process takes one conversation at a time

    @property
    def context(self) -> int:
        return self.engine.status().context

    def check_model(self, name: str | None) -> None:
        """Raises RequestError, 404, for the name of another model."""
        if name is not None and name != self.engine.name:
            raise refuse("model", name[:60], self.engine.name, param="model")

    def settings(self, given: Mapping[str, object]) -> Config:
        """The settings of a request, whose sizes are checked before any work.

        Raises:
          RequestError: 400, a file is named, or a number, a list or a text is larger than anybody needs.
          UserError: as `EngineProtocol.settings`.
        """
        if "kv_calibration" in given:
            message = "kv.calibration names a file: it is set when the server starts"
            raise RequestError(400, message, param="kv_calibration")
        for name, value in given.items():
            _check_size(name, value)
        config = self.engine.settings(given)
        generation = config.generation
        if "n" in given and generation.n > SAMPLES:
            raise RequestError(400, f"n must be at most {SAMPLES}, got {generation.n}", param="n")
        stops = generation.stop
        if "stop" in given and (len(stops) > STOPS or any(len(stop) > STOP_LENGTH for stop in stops)):
            message = f"stop must be at most {STOPS} texts of at most {STOP_LENGTH} characters"
            raise RequestError(400, message, param="stop")
        return config

    async def render(self, messages: Sequence[Mapping[str, object]]) -> tuple[list[int], frozenset[int]]:
        """Token ids of a conversation up to where the assistant's turn begins, and those that end that turn.

        Raises:
          RequestError: 400, there is no template.
          UserError: the template refuses the messages.
        """
        template = self.options.template
        if template is None:
            raise refuse("template", param="messages")

        def encode() -> tuple[list[int], frozenset[int]]:
            return template.encode(messages, generation_prompt=True), template.end_ids

        return await asyncio.get_running_loop().run_in_executor(self._template_thread, encode)

    # --- responses

    def endpoint(self, parse: Parse) -> Callable[[Request], Awaitable[ASGIApp]]:
        """A route's function that generates what `parse` makes of its request."""

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
        """The bytes of a streamed response; an exception before the first of them is raised, a later one is formatted."""
        begun = False
        try:
            async with contextlib.aclosing(self._deltas(reply)) as deltas:
                async for number, delta in deltas:
                    if data := reply.format_delta(number, delta):
                        begun = True
                        yield data
            if data := reply.format_end():
                yield data
        except Exception as error:
            if not begun:
                raise
            reply.failed = True
            yield reply.format_error(to_request_error(error))
        finally:
            reply.close()

    async def _deltas(self, reply: Reply) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all requests of a reply as they arrive, each with its request's number.

        Requests for which the queue has no place wait here until another one has ended. What has not ended is cancelled when
        the generator is closed.

        Raises:
          UserError, Unavailable: as of `EngineProtocol.submit` and `ResponseStream`.
          Busy: no request was taken.
        """
        waiting, live = deque(enumerate(reply.requests)), dict[int, ResponseStream]()
        tasks: dict[int, asyncio.Task[Delta | None]] = {}
        is_room = True  # as far as is known
        try:
            while waiting or live:
                while waiting and is_room:
                    number, request = waiting[0]
                    try:
                        reply.streams[number] = live[number] = self.engine.submit(request)
                    except Busy:
                        if not live:
                            raise
                        is_room = False
                    else:
                        waiting.popleft()
                        reply.accepted()
                if len(live) > 1:
                    for number, stream in live.items():
                        if number not in tasks:
                            tasks[number] = asyncio.ensure_future(_next(stream))
                    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
                for number in [number for number in live if len(live) == 1 or tasks[number].done()]:
                    task = tasks.pop(number, None)
                    try:
                        delta = await (_next(live[number]) if task is None else task)
                    except Exception:
                        del live[number]
                        raise
                    if delta is None:
                        self._metrics.observe(live.pop(number).stats, reply.requests[number].config.generation.n)
                        is_room = True
                    elif delta.finish_reason == "cancelled" and not reply.aborted:
                        raise refuse("cancelled")
                    else:
                        yield number, delta
        finally:
            for stream in live.values():
                stream.cancel()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _next(stream: ResponseStream) -> Delta | None:
    return await anext(stream, None)


class _EventStream:
    """A response of server-sent events, each sent as soon as it is there; the generator is closed whatever happens."""

    def __init__(self, events: AsyncGenerator[bytes, None], reply: Reply):
        self._events, self._reply = events, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        async with contextlib.aclosing(self._events) as events:
            data = await anext(events, None)  # an exception here becomes a response of its own
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await anext(events, None)
        if not (self._reply.failed and self._reply.ends_broken):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_size(name: str, value: object) -> None:
    """Raises RequestError for a number, a list or a text that is too large."""
    most, characters, parts = ENTRIES_OF.get(name, ENTRIES), 0, [value]
    while parts:
        part = parts.pop()
        if isinstance(part, int | float) and abs(part) > LARGEST:
            raise RequestError(400, f"{name} must hold numbers between ±2^32, got {quote(part)}", param=name)
        if isinstance(part, dict | list | tuple):
            if len(part) > most:
                raise RequestError(400, f"{name} must have at most {most:,} entries, got {len(part):,}", param=name)
            parts += [*part, *part.values()] if isinstance(part, dict) else part
        if isinstance(part, str):
            characters += len(part)
            if characters > CHARACTERS:
                raise RequestError(400, f"{name} must have at most {CHARACTERS:,} characters", param=name)

"""What stands before the routes: who may ask, how much a request may be, and what happens when its reader leaves.

`guarded` puts these around an application, from the outside: headers for browsers, the host and origin that were asked for, the
key, then size and time of the body. What an application is handed has been read whole; when the connection is lost while it
works, its task is cancelled, so that a `finally` that cancels an answer is all that a route needs.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import math
import re
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dantinox.config import Config, UserError
from dantinox.config.files import flat_name
from dantinox.files import on_one_line, shown
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.options import Limits, Options
from dantinox.serve.response_stream import EngineProtocol

SAMPLES, STOPS, STOP_LENGTH = 16, 32, 512  # of one prompt; texts that end it, and characters of one
LARGEST = 2**32  # number of a setting: products of two are finite in float32
DEPTH = 32  # of lists and objects inside each other
DIGITS = 20  # of an integer, its sign included
DRAINED = 16  # times the limit: what is read of a body that is too long, so that its sender hears why it is refused
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{1,5})?")


class Refused(Exception):
    """A request that is not met.

    Attributes:
      status: of HTTP.
      message: one sentence.
      param: the field of the body that is wrong.
      code: a word for programs.
      headers: that go with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


Refuse = Callable[[str, Refused], ASGIApp]  # (path, what is wrong) → the answer, in the words of the path's dialect


def refused(error: Exception) -> Refused:
    """What an exception of an engine or of reading a request means to a client.

    Raises:
      Exception: `error` itself, where it is none of these.
    """
    match error:
        case Refused():
            return error
        case UserError():
            named = re.search(r"\b(?:generation|router|kv)\.[a-z_0-9]+", str(error))
            return Refused(400, str(error), param=flat_name(named[0]) if named else None)
        case Busy():
            seconds = max(1, math.ceil(error.retry_after))
            return Refused(429, str(error), code="rate_limit_exceeded", headers={"retry-after": str(seconds)})
        case Unavailable():
            return Refused(503, str(error), code="unavailable", headers={"retry-after": "5"})
    raise error


# --- bodies


async def json_body(request: Request, *, empty: bool = False) -> dict[str, Any]:
    """The JSON object that a request holds.

    Args:
      empty: a request without a body is an empty object.

    Raises:
      Refused: 415, it does not say that it is JSON in UTF-8; 400, it is none, or no object.
    """
    data = await request.body()
    if not data and empty:
        return {}
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters)
    if not re.fullmatch(r"application/([\w.-]+\+)?json", kind.strip()) or (charset and charset[1] not in ("utf-8", "utf8")):
        raise Refused(415, "the header Content-Type must be application/json, in UTF-8", code="unsupported_media_type")
    found = parse_json(data)
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {shown(found)}")
    return found


def parse_json(data: bytes) -> Any:
    """The value of a JSON text, read strictly: finite numbers, no key twice in an object, nothing deeper than `DEPTH`.

    Raises:
      Refused: 400, what is wrong.
    """
    try:
        found = json.loads(
            data.decode(), parse_constant=_no_number, parse_float=_finite, parse_int=_whole, object_pairs_hook=_once
        )
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 text: byte {error.start} is wrong") from None
    except json.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error.msg.lower()} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise Refused(400, f"the body has more than {DEPTH} lists and objects inside each other") from None
    _check_tree(found)
    return found


def _no_number(word: str) -> Any:
    raise Refused(400, f"the body holds {word}, which is no number of JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise Refused(400, f"the body holds the number {on_one_line(digits)}, which is too large")
    return number


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise Refused(400, f"the body holds the number {on_one_line(digits)}, which is too large")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Refused(400, f"the body has {shown(name)} twice in one object")
        found[name] = value
    return found


def _check_tree(found: Any) -> None:
    """Raises Refused for values nested too deep and for texts that are no Unicode."""
    level = [found]
    for _ in range(DEPTH + 1):
        for value in level:
            if isinstance(value, str):
                _check_text(value)
        inside = [value for value in level if isinstance(value, dict | list)]
        if not inside:
            return
        level = [part for value in inside for part in ([*value, *value.values()] if isinstance(value, dict) else value)]
    raise Refused(400, f"the body has more than {DEPTH} lists and objects inside each other")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"the body holds a text with half a character, \\u{ord(text[error.start]):04x}") from None


# --- settings


def client_settings(engine: EngineProtocol, given: Mapping[str, Any]) -> Config:
    """The settings of a request, of which a client may give less than the person who starts the server.

    Raises:
      Refused: 400, a file is named, or a number, a count or a text is larger than anybody needs.
      UserError: as `EngineProtocol.settings`.
    """
    if "kv_calibration" in given:
        raise Refused(400, "kv.calibration names a file: it is set when the server starts", param="kv_calibration")
    for name, value in given.items():
        _check_numbers(name, value)
    config = engine.settings(given)
    if "n" in given and config.generation.n > SAMPLES:
        raise Refused(400, f"n must be at most {SAMPLES}, got {config.generation.n}", param="n")
    if "stop" in given:
        stops = config.generation.stop
        if len(stops) > STOPS or any(len(stop) > STOP_LENGTH for stop in stops):
            raise Refused(400, f"stop must be at most {STOPS} texts of at most {STOP_LENGTH} characters", param="stop")
    return config


def _check_numbers(name: str, value: Any) -> None:
    inside = [value]
    while inside:
        part = inside.pop()
        if isinstance(part, int | float) and abs(part) > LARGEST:
            raise Refused(400, f"{name} must hold numbers between ±2^32, got {shown(part)}", param=name)
        inside += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else []


# --- answers that come piece by piece


def events(pieces: AsyncGenerator[bytes, None]) -> ASGIApp:
    """A response of server-sent events, each piece as soon as it is there; the generator is closed whatever happens.

    An exception before the first piece is raised before anything is sent, and so becomes a response of its own.
    """

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        async with contextlib.aclosing(pieces):
            piece = await anext(pieces, None)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(pieces, None)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return respond


# --- middleware


def guarded(app: ASGIApp, options: Options, public: Callable[[str], bool], refuse: Refuse) -> ASGIApp:
    """The application behind all guards.

    Args:
      public: whether a path needs no key.
      refuse: words a refusal for a path.
    """
    app = whole_requests(app, options.limits, refuse)
    if options.key is not None:
        app = only_with_key(app, options.key, public, refuse)
    if options.origins:
        headers = ["authorization", "content-type"]
        app = CORSMiddleware(app, allow_origins=options.origins, allow_methods=["GET", "POST"], allow_headers=headers)
    return with_headers(only_hosts(app, options.hosts, options.origins, refuse))


def with_headers(app: ASGIApp) -> ASGIApp:
    """Adds the headers that keep browsers from doing what nobody wants, where a route has not set its own."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in there]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await app(scope, receive, add)

    return run


def only_hosts(app: ASGIApp, hosts: frozenset[str], origins: tuple[str, ...], refuse: Refuse) -> ASGIApp:
    """Refuses requests to names that are not the server's, and those that pages of others make a browser send.

    A page of somebody else reaches a server at home by letting its own name point there (DNS rebinding), or by a request whose
    answer it cannot read and whose effect is enough; browsers name the page in the header Origin.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        problem = None
        if scope["type"] == "http":
            asked = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
            found = HOST.fullmatch(asked[0]) if len(asked) == 1 else None
            if found is None or not _is_allowed(found[1].removesuffix("."), hosts):
                host = on_one_line(asked[0]) if asked else ""
                problem = Refused(
                    400, f"the host {host} is none of this server's names: start it with --allow_host", code="host"
                )
            elif scope["method"] not in ("GET", "HEAD", "OPTIONS") and not _same_origin(scope, asked[0], origins):
                problem = Refused(403, "pages of other servers may not ask this one: start it with --cors", code="origin")
        await (app if problem is None else _closing(refuse, problem))(scope, receive, send)

    return run


def _is_allowed(host: str, hosts: frozenset[str]) -> bool:
    if host in hosts or "*" in hosts:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return "ip" in hosts
    return False


def _same_origin(scope: Scope, host: str, origins: tuple[str, ...]) -> bool:
    found = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"origin"]
    return all(origin in origins or "*" in origins or urlsplit(origin).netloc == host for origin in found)


def only_with_key(app: ASGIApp, key: str, public: Callable[[str], bool], refuse: Refuse) -> ASGIApp:
    """Asks for `Authorization: Bearer KEY` on all but public paths; the time that takes says nothing about the key."""
    wanted = hashlib.sha256(b"Bearer " + key.encode()).digest()
    problem = Refused(
        401,
        "this server wants its API key, as the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["type"] != "http" or public(scope["path"])
        if not allowed:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            scheme, _, secret = (given[0] if len(given) == 1 else b"").partition(b" ")
            brought = hashlib.sha256(scheme.title() + b" " + secret.strip()).digest()
            allowed = hmac.compare_digest(brought, wanted)
        await (app if allowed else _closing(refuse, problem))(scope, receive, send)

    return run


def whole_requests(app: ASGIApp, limits: Limits, refuse: Refuse) -> ASGIApp:
    """Reads the body, bounded in size and time, before the application is asked, and cancels it when the connection is lost."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive, limits)
        except Refused as problem:
            await _closing(refuse, problem)(scope, receive, send)
            return
        if body is not None:
            await _while_connected(app, scope, body, receive, send)

    return run


async def _read(scope: Scope, receive: Receive, limits: Limits) -> bytes | None:
    """The body; None where the connection was lost.

    Raises:
      Refused: 408, 413.
    """
    too_large = Refused(413, f"the body is larger than {limits.body:,} bytes", code="body_too_large")
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    size = int(declared) if declared.isdigit() and len(declared) < 20 else 0
    if size > (limits.body if b"expect" in headers else limits.body * DRAINED):
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                size += len(message.get("body", b""))
                if size <= limits.body:
                    body += message.get("body", b"")
                if not message.get("more_body", False):
                    break
                if size > limits.body * DRAINED:
                    raise too_large
    except TimeoutError:
        raise Refused(408, f"the body did not come within {limits.seconds:g} seconds", code="timeout") from None
    if size > limits.body:
        raise too_large
    return bytes(body)


async def _while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    left, read, complete = asyncio.Event(), False, False

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def replay() -> Message:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def pass_on(message: Message) -> None:
        nonlocal complete
        complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)

    work, watching = asyncio.ensure_future(app(scope, replay, pass_on)), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        if complete or work.done():  # a server reports an answer that has been sent as a lost connection too
            await work
    finally:
        for task in (work, watching):
            task.cancel()
        await asyncio.wait({work, watching})


def _closing(refuse: Refuse, problem: Refused) -> ASGIApp:
    """A refusal behind which nothing more is read from the connection."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        closed = Refused(
            problem.status,
            problem.message,
            param=problem.param,
            code=problem.code,
            headers=problem.headers | {"connection": "close"},
        )
        await refuse(scope["path"], closed)(scope, receive, send)

    return run


# --- the connection


def patient_protocol(limits: Limits) -> type[H11Protocol]:
    """The protocol of uvicorn with clocks: for the head of a request, and for a reader that takes nothing of an answer.

    uvicorn itself waits for ever for the first request of a connection, for the rest of a head that has begun, and for room to
    write. Its limit of what a head may have is `h11_max_incomplete_event_size`.
    """

    class Patient(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # What is written is sent: else a small piece waits for the reader to confirm the one before, 40 ms and more.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_head()

        def _await_head(self) -> None:
            """Runs the clock while a head is to come; what trickles in does not set it back."""
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._head = self._head or self.loop.call_later(limits.seconds, self.timeout_keep_alive_handler)
            elif self._head is not None:
                self._head.cancel()
                self._head = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader = self.loop.call_later(limits.stalled, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reader is not None:
                self._reader.cancel()
                self._reader = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for clock in (self._head, self._reader):
                if clock is not None:
                    clock.cancel()

    return Patient

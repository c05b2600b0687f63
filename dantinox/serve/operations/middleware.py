"""Middleware: hosts, origins, API keys, limits of bodies, request ids, logs, and cancellation when
the client disconnects.

A route receives a complete body. If the connection is lost, the task of the route is cancelled, so
a route only needs a `finally` that cancels its response stream.
"""

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dantinox.files import escape_name
from dantinox.serve.errors import RequestError, http_error
from dantinox.serve.operations.limits import DRAIN_FACTOR
from dantinox.serve.operations.metrics import Metrics
from dantinox.serve.operations.rate_limits import ApiKey
from dantinox.serve.operations.request_log import log_request
from dantinox.serve.operations.request_record import RequestRecord, new_record
from dantinox.serve.options import Options

log = logging.getLogger("dantinox.serve")

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
# The absolute form of a request target, without its query.
ABSOLUTE_FORM = re.compile(r"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
HOST_HEADER = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{1,5})?")


class Guard:
    """ASGI middleware that checks requests, counts and logs them, and adds headers to their
    responses.

    Args:
      app: the application.
      options: key, hosts, origins and limits.
      metrics: counts the responses.
      paths: paths with their own counter; all others are counted as `other`.
      public: paths that need no API key.
      unlimited: paths whose POST requests do not count as requests of a key. GET requests never
        count.
      format_error: returns the error response for a path.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: Options,
        metrics: Metrics,
        paths: Collection[str],
        public: Collection[str],
        unlimited: Collection[str],
        format_error: Callable[[str, RequestError], ASGIApp],
    ):
        self._app = app
        self._options = options
        self._metrics = metrics
        self._paths = paths
        self._public = public
        self._unlimited = unlimited
        self._format_error = format_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        scope = _origin_form(scope)
        began = time.monotonic()
        named = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        record = new_record(scope["method"], scope["path"], named)
        record.route = record.path if record.path in self._paths else None

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._metrics.responses.labels(
                    record.route or "other", str(message["status"])
                ).inc()
                message = _with_headers(message, record)
            await send(message)

        try:
            await self._respond(scope, receive, send_counted, record)
        finally:
            record.seconds = time.monotonic() - began
            self._report(record)

    def _report(self, record: RequestRecord) -> None:
        """Exports the trace of a complete request, and logs its line. An error in this does not
        affect the response.
        """
        trace_id = None
        try:
            trace_id = self._options.export_trace(record)
        except Exception:
            log.exception("the trace of a request could not be exported")
        log_request(record, trace_id)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        try:
            record.key = self._check_head(scope)
            body = await self._read_body(scope, receive)
        except RequestError as error:
            error.headers["connection"] = "close"  # the rest of the request is not read
            await self._format_error(scope["path"], error)(scope, receive, send)
            return
        if body is None:
            return
        if record.key is None or scope["method"] != "POST" or scope["path"] in self._unlimited:
            await self._run_while_connected(scope, body, receive, send)
            return
        usage = self._options.keys.usage_of(record.key)
        record.usage = usage
        try:
            usage.begin()
        except RequestError as error:
            await self._format_error(scope["path"], error)(scope, receive, send)
            return
        try:
            await self._run_while_connected(scope, body, receive, send)
        finally:
            usage.end()

    def _check_head(self, scope: Scope) -> ApiKey | None:
        """Returns the client's key, or None if the request needs none.

        Raises:
          RequestError: the head is invalid, or the key is wrong.
        """
        head = scope["headers"]
        if scope.get("state", {}).get("overloaded"):
            raise http_error("overloaded")
        target_size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        fields_size = sum(len(name) + len(value) + len(": \r\n") for name, value in head)
        if target_size + fields_size > self._options.limits.max_head:
            raise http_error("head_too_large")
        self._check_host_and_origin(scope)
        key = None
        if self._options.keys and scope["path"] not in self._public:
            key = self._options.keys.find(_secrets(head))
            if key is None:
                raise http_error("key")
        if _header_values(head, b"content-length") and _header_values(head, b"transfer-encoding"):
            raise http_error("two_lengths")
        encoding = ", ".join(_header_values(head, b"content-encoding"))
        if encoding.lower() not in ("", "identity"):
            raise http_error("encoding", escape_name(encoding))
        return key

    def _check_host_and_origin(self, scope: Scope) -> None:
        """Raises RequestError for a request that a web page of another site may have sent.

        Such a page can send requests through DNS rebinding, or as cross-origin requests, which have
        an effect although the page cannot read the responses. Browsers send the page's origin in
        the header Origin.
        """
        hosts = _header_values(scope["headers"], b"host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        found = HOST_HEADER.fullmatch(host)
        if found is None or not _is_allowed(found[1].removesuffix("."), self._options.hosts):
            raise http_error("host", escape_name(host))
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        allowed = self._options.origins
        for origin in map(str.lower, _header_values(scope["headers"], b"origin")):
            if origin not in allowed and "*" not in allowed and _host_of(origin) != host:
                raise http_error("origin")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Returns the body, or None if the connection was lost.

        Raises:
          RequestError: 408 if the body arrives too slowly; 413 if it is too large.
        """
        limits = self._options.limits
        headers = dict(scope["headers"])
        too_large = http_error("body_too_large", limits.max_body)
        declared = int(headers.get(b"content-length", 0))  # h11 has checked the digits
        # A sender that expects `100 Continue` has sent nothing yet. Others get the error only when
        # their body has been read.
        most = limits.max_body if b"expect" in headers else limits.max_body * DRAIN_FACTOR
        if declared > most:
            raise too_large
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(limits.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= limits.max_body:
                        body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
                    if size > limits.max_body * DRAIN_FACTOR:
                        raise too_large
        except TimeoutError:
            raise http_error("body_too_slow", limits.receive_seconds) from None
        if size > limits.max_body:
            raise too_large
        return bytes(body)

    async def _run_while_connected(
        self, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        """Runs the application and cancels it if the connection is lost before the response is
        complete.
        """
        disconnected = asyncio.Event()
        messages = [body]
        complete = False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        async def replay() -> Message:
            if messages:
                return {"type": "http.request", "body": messages.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def forward(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )
            await send(message)

        work = asyncio.ensure_future(self._app(scope, replay, forward))
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            # uvicorn also reports a disconnect after a complete response.
            if complete or work.done():
                await work
        finally:
            for task in (work, watching):
                task.cancel()
            await asyncio.wait({work, watching})


def _with_headers(message: Message, record: RequestRecord) -> Message:
    """Returns the start of a response with the headers of every response that it does not have
    yet.
    """
    headers = HEADERS | {"x-request-id": record.id}
    if record.usage is not None:
        headers |= record.usage.headers()
    present = {name.lower() for name, _ in message["headers"]}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {
        **message,
        "headers": [*message["headers"], *(field for field in encoded if field[0] not in present)],
    }


def _origin_form(scope: Scope) -> Scope:
    """Returns a scope whose target is a path. A target with scheme and host replaces the Host
    header (RFC 9112, 3.2.2).
    """
    found = ABSOLUTE_FORM.fullmatch(scope["path"])
    if found is None:
        return scope
    head = [
        (b"host", found[1].encode()),
        *(field for field in scope["headers"] if field[0] != b"host"),
    ]
    raw_path = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
    return {**scope, "path": found[2] or "/", "raw_path": raw_path, "headers": head}


def _header_values(head: Sequence[tuple[bytes, bytes]], wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in head if name == wanted]


def _secrets(head: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Returns the keys in the headers `Authorization: Bearer KEY` and `x-api-key: KEY`; a repeated
    header counts as absent.
    """
    found: list[bytes] = []
    authorization = [value for name, value in head if name == b"authorization"]
    if len(authorization) == 1:
        scheme, _, secret = authorization[0].partition(b" ")
        if scheme.lower() == b"bearer":
            found.append(secret.strip())
    keys = [value for name, value in head if name == b"x-api-key"]
    if len(keys) == 1:
        found += keys
    return found


def _host_of(origin: str) -> str:
    """Returns the host and port of an origin; "" if it is malformed, such as `http://[`."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_allowed(host: str, hosts: frozenset[str]) -> bool:
    if host in hosts or "*" in hosts:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return "ip" in hosts
    return False

"""Middleware: allowed hosts and origins, API key, size and time limits of bodies, cancellation on disconnect.

The route is given a body that was read whole. When the connection is lost while it works, its task is cancelled, so that a
`finally` that cancels a response stream is all it needs.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dantinox.files import escape_name
from dantinox.serve.errors import RequestError, refuse
from dantinox.serve.limits import DRAINED
from dantinox.serve.metrics import Metrics
from dantinox.serve.options import Options

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{1,5})?")


class Guard:
    """The application behind its checks; it counts the responses, and adds the headers that keep browsers from surprises.

    Args:
      paths: that are counted one by one, and all others as `other`.
      public: paths that need no key.
      format_error: the response to a path that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: Options,
        metrics: Metrics,
        paths: Collection[str],
        public: Collection[str],
        format_error: Callable[[str, RequestError], ASGIApp],
    ):
        self._app, self._options, self._metrics, self._paths, self._public = app, options, metrics, paths, public
        self._format_error = format_error
        self._key = None if options.key is None else hashlib.sha256(b"Bearer " + options.key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.responses.labels(path, str(message["status"])).inc()
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            self._check_head(scope)
            body = await self._read_body(scope, receive)
        except RequestError as error:
            error.headers["connection"] = "close"  # nothing more is read from it
            await self._format_error(scope["path"], error)(scope, receive, send_counted)
        else:
            if body is not None:
                await self._run_while_connected(scope, body, receive, send_counted)

    def _check_head(self, scope: Scope) -> None:
        """Raises RequestError for a head that is refused whatever the body is."""
        head = scope["headers"]

        def values(wanted: bytes) -> list[str]:
            return [value.decode("latin-1") for name, value in head if name == wanted]

        if scope.get("state", {}).get("overloaded"):
            raise refuse("overloaded")
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in head)
        if size > self._options.limits.head:
            raise refuse("head_too_large")
        hosts, hosts_allowed = values(b"host"), self._options.hosts
        host = hosts[0].lower() if len(hosts) == 1 else ""
        found = HOST.fullmatch(host)
        if found is None or not _is_allowed(found[1].removesuffix("."), hosts_allowed):
            raise refuse("host", escape_name(host))
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            # A page of another server reaches this one by letting its own name point here (DNS rebinding), or by a request
            # whose effect is enough; browsers name the page in the header Origin.
            allowed = self._options.origins
            for origin in map(str.lower, values(b"origin")):
                if origin not in allowed and "*" not in allowed and urlsplit(origin).netloc != host:
                    raise refuse("origin")
        if self._key is not None and scope["path"] not in self._public:
            given = [value for name, value in head if name == b"authorization"]
            scheme, _, secret = (given[0] if len(given) == 1 else b"").partition(b" ")
            digest = hashlib.sha256(scheme.title() + b" " + secret.strip()).digest()
            if not hmac.compare_digest(digest, self._key):  # the time it takes says nothing about the key
                raise refuse("key")
        if values(b"content-length") and values(b"transfer-encoding"):
            raise refuse("two_lengths")
        encoding = ", ".join(values(b"content-encoding"))
        if encoding.lower() not in ("", "identity"):
            raise refuse("encoding", escape_name(encoding))

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the connection was lost.

        Raises:
          RequestError: 408, 413.
        """
        limits, headers = self._options.limits, dict(scope["headers"])
        too_large = refuse("body_too_large", limits.body)
        declared = int(headers.get(b"content-length", 0))  # the digits were checked
        if declared > (limits.body if b"expect" in headers else limits.body * DRAINED):
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
            raise refuse("body_too_slow", limits.seconds) from None
        if size > limits.body:
            raise too_large
        return bytes(body)

    async def _run_while_connected(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Runs the application; it is cancelled when the connection is lost before the response is complete."""
        left, messages, complete = asyncio.Event(), [body], False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        async def replay() -> Message:
            if messages:
                return {"type": "http.request", "body": messages.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def pass_on(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        work, watching = asyncio.ensure_future(self._app(scope, replay, pass_on)), asyncio.ensure_future(watch())
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
            if complete or work.done():  # a server reports a response that has been sent as a lost connection too
                await work
        finally:
            for task in (work, watching):
                task.cancel()
            await asyncio.wait({work, watching})


def _is_allowed(host: str, hosts: frozenset[str]) -> bool:
    if host in hosts or "*" in hosts:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return "ip" in hosts
    return False

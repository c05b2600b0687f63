"""HTTP/1.1 connections: uvicorn's protocol with timeouts and JSON errors."""

import asyncio
import json
import socket
import sys
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from dantinox.serve.errors import error_object, refuse
from dantinox.serve.limits import CONNECTIONS, Limits


def connection_protocol(limits: Limits) -> type[H11Protocol]:
    """The protocol class for `uvicorn.Config(http=…)`.

    uvicorn itself waits for ever for the first request of a connection, for the rest of a head that has begun, and for a client
    that does not read. Its `limit_concurrency` and its answer to malformed requests are plain text. An incomplete head is
    limited by its `h11_max_incomplete_event_size`; one that arrives at once, by `middleware.Guard`.
    """

    class Connection(H11Protocol):
        _head: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            # Without it a small write waits for the client to confirm the one before, 40 ms and more (Nagle's algorithm).
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_head()

        def handle_events(self) -> None:
            self.app_state["overloaded"] = max(len(self.connections), len(self.tasks)) >= CONNECTIONS
            super().handle_events()

        def send_400_response(self, msg: str) -> None:
            """Answers what h11 could not read, with the status that it suggests."""
            hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
            error = refuse("head_too_large" if hint == 431 else "malformed")
            data = json.dumps(error_object(error)).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(data))), ("connection", "close")]
            events = (
                h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]),
                h11.Data(data=data),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_head()

        def _await_head(self) -> None:
            """Runs the clock while a head is awaited; what trickles in does not set it back."""
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

    return Connection

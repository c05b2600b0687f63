"""HTTP/1.1 connections: uvicorn's protocol with timeouts and JSON errors."""

import asyncio
import json
import socket
import sys
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from dantinox.serve.errors import error_object, http_error
from dantinox.serve.limits import MAX_CONNECTIONS, Limits


def connection_protocol(limits: Limits) -> type[H11Protocol]:
    """Returns the protocol class for `uvicorn.Config(http=…)`.

    It adds timeouts that uvicorn lacks: for the first request of a connection, for an incomplete request head, and for a client
    that stops reading. It also sends a JSON response if there are too many connections, or if a request is malformed. uvicorn's
    option `h11_max_incomplete_event_size` limits the size of an incomplete head; `middleware.Guard` limits the size of a
    complete head.
    """

    class Connection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            # Nagle's algorithm delays a small write until the client acknowledges the previous one, which can take over 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._time_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_head()

        def handle_events(self) -> None:
            self.app_state["overloaded"] = max(len(self.connections), len(self.tasks)) >= MAX_CONNECTIONS
            super().handle_events()

        def send_400_response(self, msg: str) -> None:
            """Responds to a request that h11 could not parse, with the status that h11 suggests."""
            hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
            error = http_error("head_too_large" if hint == 431 else "malformed")
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
            self._time_head()

        def _time_head(self) -> None:
            """Runs a timer while a request head is expected. Bytes of an incomplete head do not reset it."""
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._head_timer = self._head_timer or self.loop.call_later(
                    limits.receive_seconds, self.timeout_keep_alive_handler
                )
            elif self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall_timer = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for timer in (self._head_timer, self._stall_timer):
                if timer is not None:
                    timer.cancel()

    return Connection

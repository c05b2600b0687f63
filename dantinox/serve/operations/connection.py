"""HTTP/1.1 connections: uvicorn's protocol with timeouts and JSON errors."""

import asyncio
import json
import socket
import sys
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from dantinox.serve.errors import error_object, http_error
from dantinox.serve.operations.limits import IDLE_SECONDS, MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ADDRESS, MAX_REFUSED, Limits


def connection_protocol(limits: Limits) -> type[H11Protocol]:
    """Returns the protocol class for `uvicorn.Config(http=…)`.

    It adds timeouts that uvicorn lacks: for the first request of a connection, for an incomplete request head, and for a client
    that stops reading. It also sends a JSON response if a request is malformed. uvicorn's option
    `h11_max_incomplete_event_size` limits the size of an incomplete head; `middleware.Guard` limits that of a complete head.

    It limits the number of connections, in total and from one address. At a limit, a new connection replaces the one that has
    waited longest for a complete request. If there is none, the new connection is refused: its first request gets an error.
    """
    admitted: dict[H11Protocol, str] = {}  # connection → address
    refused: set[H11Protocol] = set()
    waiting: dict[H11Protocol, float] = {}  # connections without a complete head or body → since when, the oldest first

    def release(connection: H11Protocol) -> None:
        admitted.pop(connection, None)
        waiting.pop(connection, None)
        refused.discard(connection)

    class Connection(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _waits_for: object = None  # the state of h11 in which this connection waits for its client
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(cast(asyncio.Transport, transport))
            if not self._admit() and len(refused) > MAX_REFUSED:
                self.transport.abort()
                return
            # Nagle's algorithm delays a small write until the client acknowledges the previous one, which can take over 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._time_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._time_head()

        def _admit(self) -> bool:
            """Admits this connection, in place of a waiting one if necessary, or refuses it."""
            address = self.client[0] if self.client else ""
            of_address = [*admitted.values()].count(address) >= MAX_CONNECTIONS_OF_ADDRESS
            if of_address or len(admitted) >= MAX_CONNECTIONS:
                latest = self.loop.time() - IDLE_SECONDS
                closable = (
                    other
                    for other, since in waiting.items()
                    if since <= latest and (not of_address or admitted[other] == address)
                )
                oldest = next(closable, None)
                if oldest is None:
                    refused.add(self)
                    self.app_state = {**self.app_state, "overloaded": True}  # a copy: other connections share the original
                    return False
                oldest.transport.close()
                release(oldest)
            admitted[self] = address
            return True

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
            state = self.conn.their_state
            if state is not self._waits_for and self in admitted:
                self._waits_for = state
                waiting.pop(self, None)
                if state in (h11.IDLE, h11.SEND_BODY):
                    waiting[self] = self.loop.time()
            if state is h11.IDLE and not self.transport.is_closing():
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
            release(self)
            for timer in (self._head_timer, self._stall_timer):
                if timer is not None:
                    timer.cancel()

    return Connection

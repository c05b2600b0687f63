"""HTTP/1.1 connections: uvicorn's protocol with timeouts and JSON errors."""

import asyncio
import json
import socket
import sys

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from dantinox.serve.errors import error_object, http_error
from dantinox.serve.operations.limits import (
    IDLE_SECONDS,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_OF_ADDRESS,
    MAX_REFUSED,
    Limits,
)


class ConnectionTable:
    """The open connections of a server, and the limits of their number, in total and from one
    address.

    At a limit, a new connection replaces the one that has waited longest for a complete request. If
    there is none, the new connection is refused: its first request gets an error.
    """

    def __init__(self) -> None:
        self.admitted: dict[H11Protocol, str] = {}  # connection → address
        self.refused: set[H11Protocol] = set()
        # Connections without a complete head or body → since when, the oldest first.
        self.waiting: dict[H11Protocol, float] = {}

    def admit(self, connection: H11Protocol, address: str, now: float) -> bool:
        """Admits a connection, in place of a waiting one if necessary, or refuses it; returns
        whether it is admitted.
        """
        of_address = [*self.admitted.values()].count(address) >= MAX_CONNECTIONS_OF_ADDRESS
        if of_address or len(self.admitted) >= MAX_CONNECTIONS:
            oldest = self._oldest_idle(now - IDLE_SECONDS, address if of_address else None)
            if oldest is None:
                self.refused.add(connection)
                return False
            oldest.transport.close()
            self.release(oldest)
        self.admitted[connection] = address
        return True

    def _oldest_idle(self, latest: float, address: str | None) -> H11Protocol | None:
        """Returns the connection that waits longest, since `latest` or before; with an address, of
        those from it.
        """
        for connection, since in self.waiting.items():
            if since <= latest and address in (None, self.admitted[connection]):
                return connection
        return None

    def release(self, connection: H11Protocol) -> None:
        self.admitted.pop(connection, None)
        self.waiting.pop(connection, None)
        self.refused.discard(connection)


class Connection(H11Protocol):
    """A connection with timeouts that uvicorn lacks, and JSON responses to malformed requests."""

    table: ConnectionTable
    limits: Limits

    _head_timer: asyncio.TimerHandle | None = None
    _waits_for: object = None  # the state of h11 in which this connection waits for its client
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        super().connection_made(transport)
        # `pause_writing` is then called for every byte that cannot be sent at once, also for the
        # last ones of a response.
        self.transport.set_write_buffer_limits(high=0)
        if not self.table.admit(self, self.client[0] if self.client else "", self.loop.time()):
            # A copy, because other connections share the original.
            self.app_state = {**self.app_state, "overloaded": True}
            if len(self.table.refused) > MAX_REFUSED:
                self.transport.abort()
                return
        # Nagle's algorithm delays a small write until the client acknowledges the previous one,
        # which can take over 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def send_400_response(self, msg: str) -> None:
        """Responds to a request that h11 could not parse, with the status that h11 suggests."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        error = http_error("head_too_large" if hint == 431 else "malformed")
        data = json.dumps(error_object(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(data))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(
                status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
            ),
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
        """Runs a timer while a request head is expected. Bytes of an incomplete head do not reset
        it.
        """
        state = self.conn.their_state
        if state is not self._waits_for and self in self.table.admitted:
            self._waits_for = state
            self.table.waiting.pop(self, None)
            if state in (h11.IDLE, h11.SEND_BODY):
                self.table.waiting[self] = self.loop.time()
        if state is h11.IDLE and not self.transport.is_closing():
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(
                    self.limits.receive_seconds, self.timeout_keep_alive_handler
                )
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.table.release(self)
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()


def connection_protocol(limits: Limits) -> type[H11Protocol]:
    """Returns the protocol class of a server, for `uvicorn.Config(http=…)`.

    Timeouts apply to the first request of a connection, to an incomplete request head, and to a
    client that stops reading. uvicorn's option `h11_max_incomplete_event_size` limits the size of
    an incomplete head; `middleware.Guard` limits that of a complete head.
    """
    return type("Connection", (Connection,), {"table": ConnectionTable(), "limits": limits})

"""A real server on a socket, for tests of connections."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from dantinox.serve.operations.limits import Limits
from dantinox.serve.server import make_server


@contextlib.contextmanager
def serving(app, limits: Limits | None = None, send_buffer: int | None = None) -> Iterator[int]:
    """Serves an application in a thread, as `dantinox serve` does; yields the port.

    `send_buffer` is the size of the buffers of its connections in the kernel.
    """
    server = make_server(app, limits or Limits())
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not server.started and time.monotonic() < until:
        time.sleep(0.005)
    assert server.started
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def exchange(port: int, data: bytes, seconds: float = 5.0, half_close: bool = False) -> bytes:
    """Sends bytes; returns what arrives until the server closes the connection or sends nothing for
    `seconds`.
    """
    with socket.create_connection(("127.0.0.1", port), seconds) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := connection.recv(65536):
                found += part
        return found

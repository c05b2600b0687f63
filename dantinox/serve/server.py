"""The server process: socket, signals and shutdown."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.programs import exit_now
from dantinox.serve.operations.connection import connection_protocol
from dantinox.serve.operations.limits import (
    ABORT_SECONDS,
    ACCEPTED_AT_ONCE,
    BACKLOG,
    DRAIN_SECONDS,
    FAULT_SECONDS,
    MAX_CONNECTIONS,
    MAX_REFUSED,
    OTHER_FILES,
    Limits,
)
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.response_stream import HasStatus

EXIT_FAILED = 1  # exit code


class RunnableEngine(HasStatus, Protocol):
    """An engine or a pool of engines that the server process starts and stops.

    Attributes:
      on_failure: called from any thread after a failure that the engine cannot recover from.
    """

    on_failure: Callable[[], None]

    def start(self) -> None:
        """Starts loading and the warm-up; returns immediately."""

    async def drain(self, seconds: float) -> None:
        """Stops accepting requests, and returns when all accepted ones are complete. After
        `seconds`, cancels the rest.
        """

    def close(self) -> None:
        """Stops the engine immediately; incomplete requests get an error."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
      UserError: the address does not belong to this machine, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        # The rest of the message repeats the address.
        reason, _, _ = (error.strerror or str(error)).partition(" (while")
        raise UserError(f"cannot listen at {host} port {port}: {reason.lower()}") from None


def serve(
    app: ASGIApp,
    engine: RunnableEngine,
    listener: socket.socket,
    limits: Limits,
    ready: Callable[[], None],
    reloader: Reloader | None = None,
) -> int:
    """Serves until a signal or a failure of the engine; returns the exit code.

    After SIGTERM or SIGINT, running responses have `DRAIN_SECONDS` to be completed, and new
    requests get the status 503. The server then ends with the exit code 0. A second signal ends the
    server immediately. After a second signal or an engine failure, the exit code is `EXIT_FAILED`.
    SIGHUP reloads; if the terminal of the process was closed, it has the effect of SIGTERM.

    Args:
      app: the ASGI application.
      engine: the engine or the pool, not yet started.
      listener: the socket that `listen` returned.
      limits: limits of request heads and of idle connections.
      ready: called when the server accepts requests for the first time.
      reloader: called after SIGHUP; None leaves this signal alone.
    """
    allow_open_files(MAX_CONNECTIONS + MAX_REFUSED + OTHER_FILES)
    # This hides the message "socket.send() raised exception" of lost connections.
    logging.getLogger("asyncio").setLevel(logging.ERROR)

    async def run() -> int:
        return await ServerRun(make_server(app, limits), engine, reloader).run(listener, ready)

    return asyncio.run(run())


def allow_open_files(count: int) -> None:
    """Raises the limit on open files of this process to `count`, or as far as the system
    permits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Server(uvicorn.Server):
    """A uvicorn server without its signal handlers, in which accepting connections does not delay
    the accepted ones.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio has set the backlog to the number of connections that it accepts at once.
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    """Returns a server of an application, which is not started and handles no signals."""
    return _Server(
        uvicorn.Config(
            app,
            http=connection_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.max_head,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=int(limits.receive_seconds),
            timeout_graceful_shutdown=int(ABORT_SECONDS) - 1,
        )
    )


def _has_terminal() -> bool:
    """Returns whether the process has a controlling terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class ServerRun:
    """A server that runs until a signal or a failure ends it. The methods are called on its event
    loop.

    Attributes:
      code: the exit code.
    """

    def __init__(self, server: uvicorn.Server, engine: RunnableEngine, reloader: Reloader | None):
        self._server = server
        self._engine = engine
        self._reloader = reloader
        self._loop = asyncio.get_running_loop()
        self._had_terminal = _has_terminal()
        self.code = 0
        self._signals = 0  # number of signals that end the server
        self._timers: list[threading.Timer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> int:
        """Serves, and returns the exit code; `ready` is called when the server accepts requests for
        the first time.
        """
        self._engine.on_failure = lambda: self._loop.call_soon_threadsafe(self._fail)  # type: ignore[assignment]
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        if self._reloader is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup, self._reloader)
        self._engine.start()
        self._tasks.append(self._loop.create_task(self._wait_until_ready(ready)))
        try:
            await self._server.serve(sockets=[listener])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.to_thread(self._engine.close)
            for timer in self._timers:
                timer.cancel()
        return self.code

    async def _wait_until_ready(self, ready: Callable[[], None]) -> None:
        while self._engine.status().state == "loading":
            await asyncio.sleep(0.05)
        if self._engine.status().state == "ready":
            ready()

    def _on_signal(self) -> None:
        """Ends the server after the running responses; the second time, immediately."""
        self._signals += 1
        if self._signals == 1:
            self._force_exit_after(DRAIN_SECONDS + ABORT_SECONDS)
            self._tasks.append(self._loop.create_task(self._drain()))
        elif self._signals == 2:
            self.code = EXIT_FAILED
            self._server.force_exit = True
            self._stop()
            self._force_exit_after(ABORT_SECONDS - 0.5)

    def _on_hangup(self, reloader: Reloader) -> None:
        if self._had_terminal and not _has_terminal():
            self._on_signal()
        else:
            self._tasks.append(self._loop.create_task(reloader.run_after_signal()))

    def _fail(self) -> None:
        self.code = EXIT_FAILED
        self._loop.call_later(FAULT_SECONDS, self._stop)
        self._force_exit_after(FAULT_SECONDS + ABORT_SECONDS)

    async def _drain(self) -> None:
        await self._engine.drain(DRAIN_SECONDS)
        self._stop()

    def _stop(self) -> None:
        self._server.should_exit = True

    def _force_exit_after(self, seconds: float) -> None:
        """Ends the process after `seconds` even if a thread still runs, because a compilation
        cannot be interrupted.
        """
        timer = threading.Timer(seconds, exit_now, (EXIT_FAILED,))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

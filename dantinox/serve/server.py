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
        """Stops accepting requests, and returns when all accepted ones are complete. After `seconds`, cancels the rest."""

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
        reason, _, _ = (error.strerror or str(error)).partition(" (while")  # the rest repeats the address
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

    After SIGTERM or SIGINT, running responses have `DRAIN_SECONDS` to be completed, and new requests get the status 503. The
    server then ends with the exit code 0. A second signal ends the server immediately. After a second signal or an engine
    failure, the exit code is `EXIT_FAILED`. SIGHUP reloads; if the terminal of the process was closed, it has
    the effect of SIGTERM.

    Args:
      app: the ASGI application.
      engine: the engine or the pool, not yet started.
      listener: the socket that `listen` returned.
      limits: limits of request heads and of idle connections.
      ready: called when the server accepts requests for the first time.
      reloader: called after SIGHUP; None leaves this signal alone.
    """
    allow_open_files(MAX_CONNECTIONS + MAX_REFUSED + OTHER_FILES)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # hides "socket.send() raised exception" of lost connections
    return asyncio.run(_serve(app, engine, listener, limits, ready, reloader))


def allow_open_files(count: int) -> None:
    """Raises the limit on open files of this process to `count`, or as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Server(uvicorn.Server):
    """A uvicorn server without its signal handlers, in which accepting connections does not delay the accepted ones."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio has set it to the number of connections that it accepts at once

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


async def _serve(
    app: ASGIApp,
    engine: RunnableEngine,
    listener: socket.socket,
    limits: Limits,
    ready: Callable[[], None],
    reloader: Reloader | None,
) -> int:
    loop, code, signals = asyncio.get_running_loop(), 0, 0
    timers = list[threading.Timer]()
    server = make_server(app, limits)

    def stop() -> None:
        server.should_exit = True

    def force_exit_after(seconds: float) -> None:
        """Ends the process after `seconds` even if a thread still runs, because a compilation cannot be interrupted."""
        timers.append(timer := threading.Timer(seconds, exit_now, (EXIT_FAILED,)))
        timer.daemon = True
        timer.start()

    async def drain() -> None:
        await engine.drain(DRAIN_SECONDS)
        stop()

    def fail() -> None:
        nonlocal code
        code = EXIT_FAILED
        loop.call_later(FAULT_SECONDS, stop)
        force_exit_after(FAULT_SECONDS + ABORT_SECONDS)

    def on_signal() -> None:
        nonlocal code, signals
        signals += 1
        if signals == 1:
            force_exit_after(DRAIN_SECONDS + ABORT_SECONDS)
            tasks.append(loop.create_task(drain()))
        elif signals == 2:
            code = EXIT_FAILED
            server.force_exit = True
            stop()
            force_exit_after(ABORT_SECONDS - 0.5)

    def on_hangup(reloader: Reloader) -> None:
        if had_terminal and not _has_terminal():
            on_signal()
        else:
            tasks.append(loop.create_task(reloader.run_after_signal()))

    async def wait_until_ready() -> None:
        while engine.status().state == "loading":
            await asyncio.sleep(0.05)
        if engine.status().state == "ready":
            ready()

    engine.on_failure = lambda: loop.call_soon_threadsafe(fail)  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    had_terminal = _has_terminal()
    if reloader is not None:
        loop.add_signal_handler(signal.SIGHUP, on_hangup, reloader)
    engine.start()
    tasks = [loop.create_task(wait_until_ready())]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(engine.close)
        for timer in timers:
            timer.cancel()
    return code

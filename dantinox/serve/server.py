"""The server process: socket, signals and shutdown."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dantinox.config import UserError
from dantinox.programs import exit_now
from dantinox.serve.connection import connection_protocol
from dantinox.serve.limits import ABORT_SECONDS, DRAIN_SECONDS, FAULT_SECONDS, Limits
from dantinox.serve.response_stream import EngineProtocol

FAILED = 1


class Running(EngineProtocol, Protocol):
    """An engine that this process begins and ends.

    Attributes:
      on_failure: called, from any thread, when the engine has failed for good.
    """

    on_failure: Callable[[], None]

    def start(self) -> None:
        """Begins to load and warm up; returns at once."""

    async def drain(self, seconds: float) -> None:
        """Takes no more asks, and returns when all have been answered, or cancelled because the time was over."""

    def close(self) -> None:
        """Ends it at once; what was not answered is told so."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can reach.

    Raises:
      UserError: the address is none of this machine's, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason, _, _ = (error.strerror or str(error)).partition(" (while")  # which says again where
        raise UserError(f"cannot listen at {host} port {port}: {reason.lower()}") from None


def serve(app: ASGIApp, engine: Running, listener: socket.socket, limits: Limits, ready: Callable[[], None]) -> int:
    """Serves until a signal or a fault of the engine ends it; the exit code, 0 where all asks were answered.

    SIGTERM and SIGINT drain the engine, for `DRAIN_SECONDS` at most, in which new asks hear 503; the second signal ends it at
    once, with `FAILED`, as a fault does.

    Args:
      ready: called when asks are taken for the first time.
    """
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # who leaves is no news: "socket.send() raised exception"
    return asyncio.run(_serve(app, engine, listener, limits, ready))


class _Server(uvicorn.Server):
    """One that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: ASGIApp, engine: Running, listener: socket.socket, limits: Limits, ready: Callable[[], None]) -> int:
    loop, code, signals = asyncio.get_running_loop(), 0, 0
    timers = list[threading.Timer]()
    server = _Server(
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
            h11_max_incomplete_event_size=limits.head,
            timeout_keep_alive=int(limits.seconds),
            timeout_graceful_shutdown=int(ABORT_SECONDS) - 1,
        )
    )

    def stop() -> None:
        server.should_exit = True

    def force_exit_after(seconds: float) -> None:
        """Ends the process whatever its threads do: one that compiles cannot be stopped."""
        timers.append(last := threading.Timer(seconds, exit_now, (FAILED,)))
        last.daemon = True
        last.start()

    async def drain() -> None:
        await engine.drain(DRAIN_SECONDS)
        stop()

    def fail() -> None:
        nonlocal code
        code = FAILED
        loop.call_later(FAULT_SECONDS, stop)
        force_exit_after(FAULT_SECONDS + ABORT_SECONDS)

    def signalled() -> None:
        nonlocal code, signals
        signals += 1
        if signals == 1:
            force_exit_after(DRAIN_SECONDS + ABORT_SECONDS)
            tasks.append(loop.create_task(drain()))
        elif signals == 2:
            code = FAILED
            server.force_exit = True
            stop()
            force_exit_after(ABORT_SECONDS - 0.5)

    async def wait_until_ready() -> None:
        while engine.status().state == "loading":
            await asyncio.sleep(0.05)
        if engine.status().state == "ready":
            ready()

    engine.on_failure = lambda: loop.call_soon_threadsafe(fail)  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
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

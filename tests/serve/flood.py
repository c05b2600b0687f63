"""Honest clients of a server that is flooded with connections: `python -m tests.serve.flood [IDLE]
[SLOW] [HONEST]`.

IDLE connections send nothing, and SLOW connections send a byte per second, half of them of a head
and half of a body. A connection that the server closes is opened again. HONEST clients stream a
completion at once when the flood begins, and again while it lasts. The flood comes first from other
addresses than those of the honest clients, and then from the same address.

Every honest client must be served, and the time to the first token must be at most twice the time
without a flood.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dantinox.serve.server import allow_open_files

from .seeded_requests import TEXT, make_run, running_server
from .soak import request

ROUNDS, FACTOR = 3, 2.0
REOPEN_SECONDS, SECONDS_PER_BYTE = 10.0, 1.0
LOCAL = "127.0.0.1"
SLOW_BODY = 100  # bytes
SLOW_TEXT = (
    f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SLOW_BODY}\r\n\r\n".encode()
    + b" " * SLOW_BODY
)
HONEST = request(
    TEXT, {"prompt": "once", "max_tokens": 4, "stream": True, "ignore_eos": True, "temperature": 0}
)


async def flood_connection(port: int, address: str, at_once: int, text: bytes) -> None:
    """Sends the first bytes of a text at once and the others slowly; connects again when the server
    closes the connection.
    """
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=(address, 0))
            sending = asyncio.create_task(send_slowly(writer, at_once, text))
            with contextlib.suppress(OSError):
                while await reader.read(4096):
                    pass
            sending.cancel()
            writer.close()
        await asyncio.sleep(REOPEN_SECONDS * random.uniform(0.5, 1.5))


async def send_slowly(writer: asyncio.StreamWriter, at_once: int, text: bytes) -> None:
    writer.write(text[:at_once])
    for place in range(at_once, len(text)):
        await asyncio.sleep(SECONDS_PER_BYTE)
        writer.write(text[place : place + 1])


def flood(port: int, idle: int, slow: int, addresses: list[str], ends: Event) -> None:
    """Floods a server from the given addresses until an event."""

    async def run() -> None:
        sources = itertools.cycle(addresses)
        tasks = [
            asyncio.create_task(flood_connection(port, next(sources), 0, b"")) for _ in range(idle)
        ]
        for number in range(slow):
            at_once = len(SLOW_TEXT) - SLOW_BODY if number % 2 else 0
            tasks.append(
                asyncio.create_task(flood_connection(port, next(sources), at_once, SLOW_TEXT))
            )
        await asyncio.to_thread(ends.wait)
        for task in tasks:
            task.cancel()

    allow_open_files(idle + slow + 100)
    asyncio.run(run())


@contextlib.contextmanager
def flooded(port: int, idle: int, slow: int, addresses: list[str]) -> Iterator[None]:
    """Floods a server from a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ends = spawn.Event()
    process = spawn.Process(target=flood, args=(port, idle, slow, addresses, ends), daemon=True)
    process.start()
    try:
        yield
    finally:
        ends.set()
        process.join(20)


class Answer(NamedTuple):
    """The status of a response, 0 without one, and the seconds to the first token."""

    status: int
    seconds: float


async def honest_client(port: int, address: str) -> Answer:
    begun = time.monotonic()
    found = b""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=(address, 0))
        writer.write(HONEST)
        while b"data: " not in found and (part := await reader.read(4096)):
            found += part
        seconds = time.monotonic() - begun
        while await reader.read(4096):
            pass
        writer.close()
    status = re.match(rb"HTTP/1.1 (\d+)", found)
    return Answer(int(status[1]) if status else 0, seconds if status else time.monotonic() - begun)


async def honest_rounds(port: int, addresses: list[str]) -> list[Answer]:
    """Sends a request from each address at once, several times."""
    answers: list[Answer] = []
    for _ in range(ROUNDS):
        answers += await asyncio.gather(*(honest_client(port, address) for address in addresses))
        await asyncio.sleep(0.5)
    return answers


def summary(name: str, answers: list[Answer]) -> float:
    """Prints the statuses and times of the answers; returns the median time."""
    statuses = dict(Counter(answer.status for answer in answers))
    seconds = [answer.seconds for answer in answers if answer.status == 200] or [0.0]
    median, high, most = np.quantile(seconds, (0.5, 0.95, 1))
    print(
        f"{name}: statuses {statuses}; first token after {median:.2f} s (median), {high:.2f} s (95"
        f" %), {most:.2f} s (most)"
    )
    return float(median)


def main() -> int:
    given = [int(number) for number in sys.argv[1:]]
    idle, slow, honest = given + [5000, 500, 64][len(given) :]
    wrong = []
    own = [f"127.0.1.{number % 250 + 1}" for number in range(honest)]
    others = [f"127.0.2.{number + 1}" for number in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder) / "run")
        with running_server(run_dir, queue=honest) as (port, _):
            asyncio.run(honest_rounds(port, own))  # reaches the final state of the caches
            usual = summary("no flood", asyncio.run(honest_rounds(port, own)))
            for name, sources, clients in (
                ("other addresses", others, own),
                ("one address", [LOCAL], [LOCAL] * honest),
            ):
                with flooded(port, idle, slow, sources):
                    answers = asyncio.run(honest_rounds(port, clients))
                median = summary(f"{idle} idle and {slow} slow connections, {name}", answers)
                wrong += [f"{name}: {answer}" for answer in answers if answer.status != 200]
                if median > FACTOR * usual:
                    wrong.append(
                        f"{name}: the first token takes {median / usual:.1f} times as long"
                    )
    for line in wrong[:20]:
        print("WRONG", line)
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())

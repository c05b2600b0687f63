"""Compares the answers to seeded requests in batches of one and in mixed batches:
`python -m tests.serve.mixed_batch [N]`.

The answers must be equal as printed: text, token ids, log-probabilities, tool calls. The first
server has no prefix cache, the second one has one, and gets the requests concurrently in another
order, with clients that disconnect.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .seeded_requests import SLOTS, comparable, make_run, running_server, seeded_request
from .soak import exchange, request

CLIENTS = 3 * SLOTS


async def alone(port: int, numbers: list[int]) -> dict[int, Any]:
    """Sends one request at a time. Returns the comparable answers by number."""
    found = {}
    for number in numbers:
        path, body = seeded_request(number)
        reply = await exchange(port, request(path, body))
        assert reply.status in (200, 400), (number, path, body, reply)
        found[number] = reply.status, comparable(path, reply.content)
    return found


async def together(port: int, numbers: list[int], expected: dict[int, Any]) -> list[str]:
    """Sends the requests with several clients. Returns a line for each answer that is not as
    expected.
    """
    waiting, different = iter(numbers), list[str]()

    async def client(seed: int) -> None:
        draw = random.Random(seed)
        for number in waiting:
            path, body = seeded_request(number)
            if draw.random() < 0.1:  # a request whose client disconnects
                other = seeded_request(draw.randrange(10**6))
                await exchange(
                    port,
                    request(other.path, other.body | {"stream": True}),
                    most=draw.choice((1, 400)),
                )
            reply = await exchange(port, request(path, body))
            answer = reply.status, comparable(path, reply.content)
            if answer != expected[number]:
                texts = (json.dumps(body), json.dumps(expected[number]), json.dumps(answer))
                different.append("\n  ".join((f"request {number}, {path}: {reply.status}", *texts)))

    await asyncio.gather(*map(client, range(CLIENTS)))
    return different


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    numbers = [*range(count)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder) / "run")
        begun = time.monotonic()
        with running_server(run_dir, prefix_cache=0) as (port, _):
            expected = asyncio.run(alone(port, numbers))
        print(f"{count} requests in batches of one: {time.monotonic() - begun:.0f} s", flush=True)
        shuffled = [*numbers]
        random.Random(0).shuffle(shuffled)
        begun = time.monotonic()
        with running_server(run_dir) as (port, _):
            different = asyncio.run(together(port, shuffled, expected))
        print(f"{len(shuffled)} requests of {CLIENTS} clients: {time.monotonic() - begun:.0f} s")
    for line in different[:10]:
        print("DIFFERENT", line)
    refused = Counter(
        json.dumps(answer)[:200] for status, answer in expected.values() if status == 400
    )
    print(
        f"{refused.total()} requests are refused:",
        *(f"\n  {count} × {what}" for what, count in refused.items()),
    )
    print("endpoints:", dict(Counter(seeded_request(number).path for number in numbers)))
    print(f"{len(shuffled) - len(different)} of {len(shuffled)} answers are equal")
    return min(len(different), 1)


if __name__ == "__main__":
    sys.exit(main())

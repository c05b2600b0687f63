"""Measures a server under load, and compares it with generation from the same model without a
server.

Starts `dantinox serve` with a random model of 10 M parameters (or your run) and sends streamed
`/v1/completions` requests:

* closed loop: 1, 8 and 32 clients; each client sends its next request when it has the response to
  the previous one
* open loop: requests at random times, first at 0.7 of the request rate of the closed loop, then at
  ten times that rate, where most requests are rejected
* `of offline`: the tokens per second of the server, divided by those of `LoadedModel.generate` with
  as many rows as the server has slots, measured before and after
* HTTP minus in-process: the time in which an idle server generates one token over HTTP, minus the
  time of an `AsyncEngine` in this process
* seeded requests: how many give the same response in a batch of one and in a mixed batch
* a story that is sent again with its continuation: the time to its first token, relative to the
  first turn
* abandoned requests: how long the next request takes

A peer is a running server with OpenAI's API and the same weights. `--keep` keeps the run, and
`dantinox export` converts it for `llama_cpp.server` (gguf) or `transformers serve` (hf).

    python benchmarks/serve.py [--quick]
    python benchmarks/serve.py --keep /tmp/r --peer llama.cpp=http://127.0.0.1:8081/v1=model.gguf
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from common import SMALL, Parser, random_run

Row = tuple[str, ...]
SIZE = {
    "dim": 384, "n_heads": 6, "kv_heads": 3, "num_blocks": 6, "hidden_dim": 1024,
    "max_context": 2048, "dtype": "float32",
}  # fmt: skip
HEAD: Row = (
    "",
    "answered",
    "refused",
    "req/s",
    "tok/s",
    "of offline",
    "first token",
    "between tokens",
    "total",
    "refused in",
)


class Timing(NamedTuple):
    """One request: its status; the seconds to the first text, between texts and in total; the
    number of tokens; the text.
    """

    status: int
    first: float
    gaps: list[float]
    total: float
    tokens: int
    text: str


class Target(NamedTuple):
    """A server: its name, its address, the name of its model, and request fields that only this
    server supports.
    """

    name: str
    url: str
    model: str
    extra: dict[str, bool]


def parse() -> argparse.Namespace:
    a = Parser(
        __doc__,
        smoke={"slots": 2, "clients": [1, 4], "prompt": 16, "new": 8, "requests": 8, "story": 150},
    )
    a.add_argument("--run_dir", type=Path, help="a run directory (default: a random model)")
    a.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="create the random run there and keep it, for peers",
    )
    a.add_argument("--peer", action="append", default=[], metavar="NAME=URL=MODEL")
    a.add_argument("--slots", type=int, default=8)
    a.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    a.add_argument("--prompt", type=int, default=64, help="characters per prompt")
    a.add_argument("--new", type=int, default=64)
    a.add_argument("--requests", type=int, default=160, help="requests per row of the table")
    a.add_argument("--story", type=int, default=1500, help="characters (tokens) of a long prompt")
    a.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    o = a.parse_args()
    if o.quick:
        o.requests = 24
        o.new = 24
    return o


def prompt(o: argparse.Namespace, number: int) -> str:
    return "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=o.prompt))


# Without HTTP


def offline(o: argparse.Namespace, run_dir: Path) -> Callable[[], float]:
    """Returns a function that measures tokens per second without a server, with a row per slot, as
    the median of five runs.
    """
    import dantinox

    run = dantinox.load(run_dir)

    def rate() -> float:
        begun = time.perf_counter()
        results = run.generate(
            [prompt(o, n) for n in range(o.slots)],
            max_new_tokens=o.new,
            seed=0,
            temperature=1.0,
            ignore_eos=True,
        )
        return sum(len(result.tokens) for result in results) / (time.perf_counter() - begun)

    rate()  # compiles
    return lambda: float(np.median([rate() for _ in range(5)]))


async def one_token(target: Target, o: argparse.Namespace, run_dir: Path) -> np.ndarray:
    """Returns the seconds `[requests, 2]` to generate one token, alternately over HTTP and with an
    engine in this process.
    """
    import dantinox
    from dantinox.config.engine_options import EngineOptions
    from dantinox.generation.request import GenerationRequest
    from dantinox.serve.async_engine import AsyncEngine

    run = dantinox.load(run_dir)
    engine = AsyncEngine(run, EngineOptions(slots=o.slots))
    engine.start()
    while engine.status().state == "loading":
        await asyncio.sleep(0.05)
    url = httpx.URL(f"{target.url}/completions")
    seconds = []
    reader, writer = await asyncio.open_connection(
        url.host, url.port
    )  # one connection for all requests, as in usual clients
    head = (
        f"POST {url.path} HTTP/1.1\r\nhost: {url.host}:{url.port}\r\ncontent-type:"
        " application/json\r\ncontent-length: "
    )
    for number in range(o.requests):
        body = {
            "model": target.model,
            "prompt": prompt(o, number),
            "max_tokens": 1,
            "seed": number,
            "temperature": 1.0,
        }
        content = json.dumps(body | target.extra).encode()
        begun = time.perf_counter()
        writer.write(f"{head}{len(content)}\r\n\r\n".encode() + content)
        length = re.search(rb"content-length: (\d+)", (await reader.readuntil(b"\r\n\r\n")).lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
        over_http = time.perf_counter() - begun
        begun = time.perf_counter()
        config = engine.settings(
            {"max_new_tokens": 1, "seed": number, "temperature": 1.0, "ignore_eos": True}
        )
        async for _ in engine.submit(
            GenerationRequest(tuple(run.prompt_ids(prompt(o, number))), config)
        ):
            pass
        seconds.append((over_http, time.perf_counter() - begun))
    writer.close()
    engine.close()
    return np.array(seconds)


# Over HTTP


@contextlib.contextmanager
def running_server(o: argparse.Namespace, run_dir: Path, *more: str) -> Iterator[Target]:
    """Runs `dantinox serve` in a separate process and yields it when it is ready. Slots and queue
    suffice for all clients.

    `more` are further arguments of the command.
    """
    command = [
        sys.executable,
        "-m",
        "dantinox",
        "serve",
        "--run_dir",
        run_dir,
        "--port",
        0,
        "--slots",
        o.slots,
        "--name",
        "run",
    ]
    command += ["--queue", max(1, max(o.clients) - o.slots), *more]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "is served at" not in line:
            raise SystemExit(f"the server did not start: {line}")
        yield Target(
            "dantinox",
            line.split("is served at ")[1].split()[0] + "/v1",
            "run",
            {"ignore_eos": True},
        )
    finally:
        process.terminate()
        process.wait(60)


async def send_request(
    target: Target,
    o: argparse.Namespace,
    number: int,
    new: int | None = None,
    text: str | None = None,
) -> Timing:
    """Sends one streaming request on its own connection.

    The response is parsed after its end, because the client shares its cores with the server.
    """
    body = {
        "model": target.model,
        "prompt": text or prompt(o, number),
        "max_tokens": new or o.new,
        "seed": number,
    }
    body |= {
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    content = json.dumps(body).encode()
    url = httpx.URL(f"{target.url}/completions")
    head = (
        f"POST {url.path} HTTP/1.1\r\nhost: {url.host}:{url.port}\r\ncontent-type:"
        " application/json\r\nconnection: close\r\n"
    )
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 20)
    try:
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        lines = [(line, time.perf_counter()) async for line in reader]
    finally:
        writer.close()
    total = time.perf_counter() - begun
    status = int(lines[0][0].split()[1])
    events = [
        (json.loads(line[6:]), at) for line, at in lines if line.startswith(b"data: {")
    ]  # other lines are chunk lengths
    texts = [(event["choices"][0]["text"], at) for event, at in events if event.get("choices")]
    used = [event["usage"]["completion_tokens"] for event, _ in events if event.get("usage")]
    tokens = used[-1] if used else len(texts)  # for peers that do not report usage
    gaps = [after - before for (_, before), (_, after) in itertools.pairwise(texts)]
    return Timing(
        status,
        texts[0][1] - begun if texts else 0.0,
        gaps,
        total,
        tokens,
        "".join(text for text, _ in texts),
    )


async def closed_loop(
    target: Target, o: argparse.Namespace, clients: int
) -> tuple[list[Timing], float]:
    """Runs a closed loop: each client awaits a response before its next request. Returns all
    timings and the total seconds.
    """
    numbers = iter(range(max(o.requests, 2 * clients)))
    found = list[Timing]()
    begun = time.perf_counter()

    async def one() -> None:
        for number in numbers:
            found.append(await send_request(target, o, number))

    await asyncio.gather(*(one() for _ in range(clients)))
    return found, time.perf_counter() - begun


async def open_loop(
    target: Target, o: argparse.Namespace, rate: float
) -> tuple[list[Timing], float]:
    """Runs an open loop: requests at random times, `rate` per second on average. Returns all
    timings and the total seconds.

    There are more requests than slots and queue places together.
    """
    chance = random.Random(0)
    begun = time.perf_counter()
    tasks = list[asyncio.Task[Timing]]()
    for number in range(max(o.requests, 3 * max(o.clients))):
        tasks.append(asyncio.create_task(send_request(target, o, number)))
        await asyncio.sleep(chance.expovariate(rate))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - begun


async def same_in_mixed_batch(target: Target, o: argparse.Namespace) -> str:
    """Counts the seeded requests whose text is the same in a mixed batch and in a batch of one."""
    count = o.requests // 4
    alone = [(await send_request(target, o, number)).text for number in range(count)]
    together = list[Timing]()
    for begin in range(0, count, o.slots - 1):
        numbers = range(begin, min(begin + o.slots - 1, count))
        *some, _ = await asyncio.gather(
            *(send_request(target, o, n) for n in numbers), send_request(target, o, 10_000 + begin)
        )
        together += some
    return f"{sum(a == b.text for a, b in zip(alone, together, strict=True))} of {count}"


async def second_turn(target: Target, o: argparse.Namespace) -> np.ndarray:
    """Returns the seconds `[stories, 2]` to the first token, for a story and for its second turn,
    which has one more line.
    """
    firsts = []
    for number in range(8):
        story = "".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=o.story))
        one = await send_request(target, o, number, new=40, text=story)
        two = await send_request(
            target, o, number, new=40, text=story + one.text + "\n> and then what happened?\n"
        )
        firsts.append((one.first, two.first))
    return np.array(firsts)


async def time_after_abandoned(target: Target, o: argparse.Namespace) -> float:
    """Returns the seconds of a request that is sent directly after the clients of many other
    requests have disconnected.
    """
    tasks = [asyncio.create_task(send_request(target, o, number)) for number in range(o.requests)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    begun = time.perf_counter()
    while (await send_request(target, o, 1)).status != 200:
        await asyncio.sleep(0.01)
    return time.perf_counter() - begun


# Output


def milliseconds(seconds: list[float] | np.ndarray) -> str:
    """Formats the percentiles p50 / p90 / p99 in milliseconds."""
    if not len(seconds):
        return "-"
    return " / ".join(
        f"{1000 * value:.{0 if value >= 0.1 else 1}f}"
        for value in np.percentile(seconds, (50, 90, 99))
    )


def row(name: str, timings: list[Timing], seconds: float, alone: float) -> Row:
    good = [t for t in timings if t.status == 200]
    refused = [t for t in timings if t.status != 200]
    rate = sum(t.tokens for t in good) / seconds
    return (
        name, str(len(good)), str(len(refused)), f"{len(good) / seconds:.1f}", f"{rate:.0f}",
        f"{rate / alone:.0%}", milliseconds([t.first for t in good]),
        milliseconds([gap for t in good for gap in t.gaps]), milliseconds([t.total for t in good]),
        milliseconds([t.total for t in refused]),
    )  # fmt: skip


def show(rows: list[Row]) -> None:
    widths = [max(len(each[column]) for each in rows) for column in range(len(HEAD))]
    for each in [rows[0], tuple("-" * width for width in widths), *rows[1:]]:
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True))
            + " |"
        )


async def measure_server(
    target: Target, o: argparse.Namespace, alone: Callable[[], float]
) -> tuple[list[Row], float]:
    """Runs the closed loops of one server. Before and after each loop, the speed without a server
    is measured.

    Returns:
      The rows of the table, and the requests per second of the last loop.
    """
    rows = list[Row]()
    rate = 0.0
    await send_request(target, o, 0)
    one, two = np.median(await second_turn(target, o), axis=0)
    print(
        f"{target.name}, a story of {o.story} tokens: first token in {one:.3f} s, "
        f"in its second turn in {two:.3f} s, a ratio of {two / one:.2f}"
    )
    before = alone()
    for clients in o.clients:
        found, seconds = await closed_loop(target, o, clients)
        after = alone()
        rows.append(row(f"{target.name}, {clients} clients", found, seconds, (before + after) / 2))
        print(
            f"without a server {before:.0f} tok/s before, {after:.0f} after:",
            *rows[-1],
            sep=" | ",
            flush=True,
        )
        rate = len(found) / seconds
        before = after
    return rows, rate


async def measure_own_server(
    target: Target, o: argparse.Namespace, alone: Callable[[], float], rate: float, run_dir: Path
) -> list[Row]:
    """Runs the measurements that apply only to the server of DantinoX. Returns the rows of the open
    loops.
    """
    best = alone()
    rows = [
        row(
            f"open loop, {share:g} of {rate:.1f} req/s",
            *await open_loop(target, o, share * rate),
            best,
        )
        for share in (0.7, 10)
    ]
    over_http, in_process = (await one_token(target, o, run_dir)).T
    difference = np.percentile(over_http, (50, 99)) - np.percentile(in_process, (50, 99))
    print(
        f"one token, idle: HTTP {milliseconds(over_http)} ms, in-process {milliseconds(in_process)}"
        " ms (p50 / p90 / p99)"
    )
    print(
        f"HTTP minus in-process: p50 {1000 * difference[0]:.2f} ms, p99"
        f" {1000 * difference[1]:.2f} ms"
    )
    print(
        "seeded, equal in a mixed batch and in a batch of one:"
        f" {await same_in_mixed_batch(target, o)}"
    )
    print(f"behind {o.requests} abandoned requests: {await time_after_abandoned(target, o):.2f} s")
    metrics = httpx.get(target.url.removesuffix("/v1") + "/metrics").text
    print(
        *(line for line in metrics.splitlines() if line.startswith("dantinox_compilations_total"))
    )
    return rows


def main() -> None:
    o = parse()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = o.run_dir or random_run(
            o.keep or Path(folder) / "run", SMALL if o.smoke else SIZE
        )
        alone = offline(o, run_dir)
        with running_server(o, run_dir) as target:
            rows, rate = asyncio.run(measure_server(target, o, alone))
            rows += asyncio.run(measure_own_server(target, o, alone, rate, run_dir))
        for peer in o.peer:
            name, url, model = peer.split("=", 2)
            rows += asyncio.run(measure_server(Target(name, url, model, {}), o, alone))[0]
    print("milliseconds: p50 / p90 / p99")
    show([HEAD, *rows])


if __name__ == "__main__":
    main()

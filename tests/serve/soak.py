"""A long run of a server with valid and invalid clients of all protocols:
`python -m tests.serve.soak [MINUTES]`.

In 15 % of the requests the client disconnects: after some bytes of the answer, or at any moment
with a reset connection. 5 % are malformed, 5 % are aborted, 2 % are half-closed, and in 1 % the
client reads slowly. Bursts send three times as many requests as the queue can hold, and in every
second burst all clients disconnect. The answer to a seeded request must equal its answer in a batch
of one.

At the end, all slots must be free; memory, descriptors and threads must be as before; nothing may
have been compiled; and no status may be 5xx, except KoboldAI's 503 for a full queue.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .seeded_requests import comparable, make_run, running_server, seeded_request
from .test_openai import BAD, CHAT, TEXT

QUEUE, CLIENTS, BURST_SECONDS = 8, 6, 20
KOBOLD, KOBOLD_STREAM, OWN = (
    "/api/v1/generate",
    "/api/extra/generate/stream",
    "/api/dantinox/generate",
)
OLLAMA, EMBED = "/api/generate", "/v1/embeddings"
SEEDED = 110  # requests of `seeded_requests`
SHARES = {
    "leave": 0.10,
    "reset": 0.05,
    "malformed": 0.05,
    "abort": 0.05,
    "half_closed": 0.02,
    "slow": 0.01,
}  # the rest are good
PROMPTS = ("a", "once upon a time", "the end. " * 20, "a long story that goes on and on; " * 12)
SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1.5}, {"top_k": 9}, {"top_p": 0.7},
    {"min_p": 0.05, "temperature": 1.3}, {"typical_p": 0.6}, {"tail_free": 0.9}, {"mirostat": 2},
    {"mirostat": 1, "mirostat_tau": 3.0}, {"repetition_penalty": 1.4},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"logit_bias": {"97": 5}}, {"n": 2},
    {"logprobs": 5}, {"guided_regex": "[a-z ]{5,30}x"},
    {"response_format": {"type": "json_object"}}, {"stop": ["e"]}, {"ignore_eos": True},
    {"strategy": "entropy"}, {"dynatemp_low": 0.7, "dynatemp_high": 1.6, "temperature": 1.0},
    {"smoothing_factor": 0.3}, {"top_n_sigma": 1.5},
]  # fmt: skip
KOBOLDS: list[dict[str, Any]] = [
    {}, {"rep_pen": 1.2, "temperature": 0.9}, {"top_k": 5, "min_p": 0.1}, {"mirostat": 2},
    {"memory": "Once. "}, {"sampler_order": [6, 0, 1, 3, 4, 2, 5], "stop_sequence": ["e"]},
    {"dry_multiplier": 0.8, "xtc_probability": 0.4},
    {"dynatemp_range": 0.4},
]  # fmt: skip
RAW = (
    b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: evil\r\n\r\n",
    b"POST /api/v1/generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n{\"a",
)  # fmt: skip


class Question(NamedTuple):
    """A seeded request, and the paths that answer it with a whole response and with a streamed
    response.

    Without a path for streams, all of the answer is compared, not only its texts.
    """

    path: str
    stream_path: str | None
    body: dict[str, Any]


class Reply(NamedTuple):
    """A status (0 without a response) and the content."""

    status: int
    content: bytes


def questions() -> list[Question]:
    found = []
    for number, sampler in enumerate(SAMPLERS):
        given = {"max_tokens": 8 + number % 5 * 12, "seed": number, "temperature": 1.2} | sampler
        found.append(Question(TEXT, TEXT, given | {"prompt": PROMPTS[number % 4]}))
        if "logprobs" not in sampler:
            found.append(
                Question(
                    CHAT,
                    CHAT,
                    given | {"messages": [{"role": "user", "content": PROMPTS[(number + 1) % 4]}]},
                )
            )
    for number, sampler in enumerate(KOBOLDS):
        given = {
            "max_length": 10 + 9 * number,
            "sampler_seed": 1 + number,
            "prompt": PROMPTS[number % 4],
        }
        found.append(Question(KOBOLD, KOBOLD_STREAM, given | sampler))
        settings = {"max_new_tokens": 20, "seed": number, "temperature": 1.1}
        found.append(
            Question(
                OWN,
                OWN,
                {"prompt": PROMPTS[number % 4], "settings": settings, "alternatives": number},
            )
        )
        options = {"num_predict": 6 + 5 * number, "seed": number, "temperature": 0.8 + 0.1 * number}
        found.append(Question(OLLAMA, OLLAMA, {"prompt": PROMPTS[number % 4], "options": options}))
        found.append(
            Question(
                EMBED, EMBED, {"input": [*PROMPTS[: 1 + number % 4]], "encoding_format": "base64"}
            )
        )
    return found + [Question(path, None, body) for path, body in map(seeded_request, range(SEEDED))]


def texts_of(question: Question, streamed: bool, content: bytes) -> Any:
    """Returns the texts of a response, or its embeddings, or what two equal responses have in
    common.
    """
    if question.stream_path is None:
        return comparable(question.path, content)
    if question.path == EMBED:
        return [row["embedding"] for row in json.loads(content)["data"]]
    if question.path == OLLAMA:
        return ["".join(json.loads(line)["response"] for line in content.splitlines())]
    if not streamed and question.path != OWN:
        found = json.loads(content)
        if question.path == KOBOLD:
            return [one["text"] for one in found["results"]]
        return [
            one["text"] if "text" in one else one["message"]["content"] for one in found["choices"]
        ]
    texts: dict[int, str] = {}
    for event in events(content):
        assert "error" not in event, event
        if question.path == KOBOLD:
            texts[0] = texts.get(0, "") + event["token"]
        elif question.path == OWN and "text" in event:
            texts[event["sample"]] = texts.get(event["sample"], "") + event["text"]
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in sorted(texts)]


def events(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def exchange(port: int, data: bytes, most: int | None = None, pause: float = 0.0) -> Reply:
    """Sends bytes and reads the response: completely, or only `most` bytes, or with pauses between
    reads of 64 bytes.
    """
    options = socket.socket()
    if pause:
        options.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    options.setblocking(False)
    await asyncio.get_running_loop().sock_connect(options, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=options, limit=4096 if pause else 65536)
    found, until = b"", time.monotonic() + 30
    try:
        writer.write(data)
        while part := await reader.read(64 if pause else 65536):
            found += part
            if most is not None and len(found) >= most:
                break
            if pause:
                await asyncio.sleep(pause)
                if time.monotonic() > until:
                    break
    except OSError:
        pass
    finally:
        writer.close()
    head, _, content = found.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1.1 (\d+)", head)
    if b"transfer-encoding: chunked" in head.lower() and most is None and not pause:
        content = b"".join(chunks(content))
    return Reply(int(status[1]) if status else 0, content)


def chunks(content: bytes) -> Iterator[bytes]:
    while content:
        size, _, content = content.partition(b"\r\n")
        yield content[: int(size, 16)]
        content = content[int(size, 16) + 2 :]


def request(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type:"
        " application/json\r\n"
    )
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


class Soak:
    """Clients of one server, and the errors that they found."""

    def __init__(self, port: int):
        self.port, self.chance, self.number = port, random.Random(0), 0
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        self.references: list[tuple[Question, Any]] = []

    async def record_references(self) -> None:
        """Sends every question in a batch of one, for a whole and for a streamed response."""
        for question in questions():
            texts = []
            for streamed in (False, True)[: 1 + (question.stream_path is not None)]:
                reply = await self.send(question, streamed)
                if (
                    reply.status == 400 and question.stream_path is None
                ):  # a random combination that no text satisfies
                    continue
                assert reply.status == 200, (question, reply)
                texts.append(texts_of(question, streamed, reply.content))
            assert all(text == texts[0] for text in texts), (question, texts)
            if texts:
                self.references.append((question, texts[0]))

    async def send(self, question: Question, streamed: bool, **how: Any) -> Reply:
        more = (
            {"stream": streamed}
            if question.path in (TEXT, CHAT, OLLAMA) and question.stream_path
            else {}
        )
        path = question.stream_path if streamed and question.stream_path else question.path
        return await exchange(self.port, request(path, question.body | more), **how)

    async def one(self) -> None:
        """Sends a request of a random kind."""
        draw, kind = self.chance.random(), "good"
        for name, share in SHARES.items():
            draw -= share
            if draw < 0:
                kind = name
                break
        self.kinds[kind] += 1
        await getattr(self, kind)()

    async def good(self) -> None:
        question, texts = self.chance.choice(self.references)
        streamed = question.stream_path is not None and self.chance.random() < 0.6
        reply = await self.send(question, streamed)
        self.seen("good", reply, question.path)
        if reply.status == 200:
            self.kinds["compared"] += 1
            if (found := texts_of(question, streamed, reply.content)) != texts:
                self.wrong.append(f"{question}: {found} instead of {texts}")

    async def leave(self) -> None:
        question, _ = self.chance.choice(self.references)
        await self.send(question, True, most=self.chance.choice((1, 300, 900)))

    async def reset(self) -> None:
        """Resets the connection at any moment: in the queue, in the prefill, or while the answer
        arrives.
        """
        question, _ = self.chance.choice(self.references)
        data = request(question.stream_path or question.path, question.body | {"stream": True})
        data = data[: self.chance.choice((len(data), len(data), len(data) - 3, 40))]
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(data)
        await asyncio.sleep(self.chance.choice((0, 0.01, 0.1, 0.5)) * self.chance.random())
        connection.close()

    async def half_closed(self) -> None:
        """Closes only the sending side; the server may answer, or treat the client as gone."""
        question, _ = self.chance.choice(self.references)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request(question.path, question.body))
        writer.write_eof()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(reader.read(), 30)
        writer.close()

    async def malformed(self) -> None:
        if self.chance.random() < 0.3:
            reply = await exchange(self.port, self.chance.choice(RAW), most=1)
            self.statuses["raw bytes", reply.status] += 1
            return
        name = self.chance.choice([*BAD])
        path = self.chance.choice((TEXT, CHAT))
        value = self.chance.choice(BAD[name])
        good = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
        reply = await exchange(self.port, request(path, good | {"max_tokens": 4} | {name: value}))
        self.seen("malformed", reply, path)

    async def abort(self) -> None:
        self.number += 1
        key = {"genkey": f"key{self.number}"}
        question = Question(KOBOLD, KOBOLD_STREAM, {"prompt": "abort me", "max_length": 400} | key)
        asked = asyncio.create_task(self.send(question, True))
        await asyncio.sleep(0.2 * self.chance.random())
        self.seen("abort", await exchange(self.port, request("/api/extra/abort", key)), "abort")
        self.seen("aborted", await asked, KOBOLD)

    async def slow(self) -> None:
        body = {
            "prompt": "slow",
            "max_tokens": 300,
            "logprobs": 20,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        await self.send(Question(TEXT, TEXT, body), True, pause=0.3)

    def seen(self, kind: str, reply: Reply, path: str) -> None:
        self.statuses[kind, reply.status] += 1
        full = 503 if path.startswith("/api/") and path != OWN else 429
        if reply.status not in ({200, full} if kind != "malformed" else {200, 400, 404, 429}):
            self.wrong.append(f"{kind} {path}: {reply.status} {reply.content[:300]!r}")

    async def use(self, seconds: float, process: "Process") -> None:
        """Runs a few clients with bursts for some seconds and records the resources of the
        process.
        """
        until = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self.one()

        async def bursts() -> None:
            while time.monotonic() + BURST_SECONDS < until:
                await asyncio.sleep(BURST_SECONDS)
                self.kinds["bursts"] += 1
                send = self.good if self.kinds["bursts"] % 2 else self.reset
                await asyncio.gather(*(send() for _ in range(3 * QUEUE)))

        async def watch() -> None:
            while time.monotonic() < until:
                process.look()
                await asyncio.sleep(min(5.0, seconds / 20))

        await asyncio.gather(bursts(), watch(), *(client() for _ in range(CLIENTS)))


class Process:
    """The resources of a process over time."""

    def __init__(self, number: int):
        self.path = Path(f"/proc/{number}")
        self.rss, self.descriptors, self.threads = list[float](), list[int](), list[int]()

    def look(self) -> None:
        status = (self.path / "status").read_text()
        self.rss.append(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024)
        self.threads.append(int(re.findall(r"Threads:\s+(\d+)", status)[0]))
        self.descriptors.append(len([*(self.path / "fd").iterdir()]))


def number_of(metrics: bytes, name: str) -> float:
    return float(re.findall(rf"^{name} (\S+)$".encode(), metrics, re.MULTILINE)[0])


async def soak(port: int, process: Process, minutes: float) -> list[str]:
    """Returns the errors."""
    trial, get = (
        Soak(port),
        b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    await trial.record_references()
    before = number_of((await exchange(port, get)).content, "dantinox_compilations_total")
    print(
        f"{len(trial.references)} questions in a batch of one; {before:.0f} compilations",
        flush=True,
    )
    warm, begun = 60 * minutes / 6, time.monotonic()
    await trial.use(warm, process)
    first = len(process.rss)
    await trial.use(60 * minutes - warm, process)
    print(f"{time.monotonic() - begun:.0f} s: {dict(trial.kinds)}")
    print(
        "statuses:"
        f" { {f'{kind} {status}': count for (kind, status), count in sorted(trial.statuses.items())} }"
    )
    for _ in range(100):
        metrics = (await exchange(port, get)).content
        busy, queued = (number_of(metrics, f"dantinox_{name}") for name in ("busy", "queued"))
        if busy == queued == 0:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(2)
    process.look()
    compiled = number_of(metrics, "dantinox_compilations_total") - before
    middle = len(process.rss) - (len(process.rss) - first) // 5
    early, late = (
        float(np.median(part))
        for part in (process.rss[first : first + (middle - first) // 4], process.rss[middle:])
    )
    print(
        f"memory {early:.0f} MB after the first sixth, {late:.0f} MB at the end:"
        f" {late / early - 1:+.2%}"
    )
    held = (
        f"descriptors {process.descriptors[0]} to {process.descriptors[-1]}, most"
        f" {max(process.descriptors)}"
    )
    print(
        f"{held}; threads {process.threads[first]} to {process.threads[-1]}; busy {busy:.0f},"
        f" queued {queued:.0f}"
    )
    print(f"compilations during the run: {compiled:.0f}")
    wrong = trial.wrong
    bounds = {
        "slots are busy or prompts wait": busy + queued == 0,
        "programs were compiled": compiled == 0,
        "descriptors leaked": process.descriptors[-1] <= process.descriptors[0] + 1,
        "threads leaked": process.threads[-1] <= max(process.threads[: first + 1]),
        "memory grew by more than 2 %": minutes < 30 or late <= 1.02 * early,
    }
    return wrong + [what for what, held in bounds.items() if not held]


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with tempfile.TemporaryDirectory() as folder:
        run_dir = make_run(Path(folder) / "run")
        with running_server(run_dir, queue=QUEUE) as (port, server):
            wrong = asyncio.run(soak(port, Process(server.pid), minutes))
    for line in wrong[:20]:
        print("WRONG", line)
    print("no errors" if not wrong else f"{len(wrong)} errors")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())

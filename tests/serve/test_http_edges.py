"""Tests of unusual HTTP messages: each gets one JSON error, and sizes are checked before any
work.
"""

import functools
import json
import logging
import threading
import time
from collections import Counter

import pytest
from starlette.testclient import TestClient

from dantinox.generation import slot_params as slots
from dantinox.generation.token_settings import tokens_containing
from dantinox.serve.app import make_app
from dantinox.serve.operations import connection, limits
from dantinox.serve.operations.background import Throttle
from dantinox.serve.protocols import tokenize_routes

from .fakes import BYTES, FakeEngine, fake_run, fim_tokenizer
from .sockets import exchange, serving

BODY = json.dumps({"prompt": "a", "max_tokens": 2})
HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def port():
    with serving(make_app(FakeEngine())) as found:
        yield found


def send(port, head, body=""):
    """Sends a request; returns status, head and JSON of the only response, and whether the server
    closed the connection.
    """
    before = time.monotonic()
    answer = exchange(port, head.encode() + b"\r\n" + body.encode(), seconds=30)
    top, _, content = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    return int(top[9:12]), top.lower(), json.loads(content), time.monotonic() - before < 25


@pytest.mark.parametrize("line", ["GET x HTTP/1.1", "OPTIONS * HTTP/1.1", "GET ? HTTP/1.1"])
def test_request_targets_without_a_path(port, line):
    status, _, content, _ = send(port, f"{line}\r\nHost: localhost\r\nConnection: close\r\n")
    assert status in (400, 404, 405) and content["error"]["message"]


@pytest.mark.parametrize(
    ("target", "host", "expected"),
    [
        ("http://localhost/health", "localhost", 200),
        ("HTTP://127.0.0.1:8000/health?a=http://x/y", "localhost", 200),
        ("http://localhost/health", "evil.example", 200),  # the Host header has no effect then
        ("http://evil.example/health", "localhost", 400),
        ("http://localhost/nothing%2f", "localhost", 404),
        ("http:///health", "localhost", 400),
        ("http://user@localhost/health", "localhost", 400),
        ("ftp://localhost/health", "localhost", 404),
    ],
)
def test_request_targets_with_scheme_and_host(port, target, host, expected):
    """RFC 9112, section 3.2.2: a server must accept them."""
    status, _, content, _ = send(
        port, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    )
    assert status == expected and (expected == 200 or content["error"]["message"])


def test_http_1_0_needs_no_host(port):
    """Load balancers check the health of servers with such requests."""
    assert send(port, "GET /health HTTP/1.0\r\n")[0] == 200
    assert send(port, "GET /health HTTP/1.0\r\nHost: evil.example\r\n")[0] == 400
    assert send(port, "GET /health HTTP/1.1\r\nConnection: close\r\n")[0] == 400
    head = f"POST /v1/completions HTTP/1.0\r\n{HEAD.partition(chr(10))[2]}"
    head += f"Content-Length: {len(BODY)}\r\n"
    assert send(port, head, BODY)[0] == 200
    assert send(port, f"{head}Origin: null\r\n", BODY)[0] == 403


def test_the_preface_of_http_2(port):
    assert exchange(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", seconds=2).startswith(b"HTTP/1.1 4")


def test_a_request_with_two_lengths_closes_the_connection(port):
    head = (
        f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nTransfer-Encoding:"
        " chunked\r\n"
    )
    status, top, content, closed = send(
        port, head, f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n" + "GET /health HTTP/1.1\r\n" + HEAD
    )
    assert status == 400 and b"connection: close" in top and closed
    assert "Transfer-Encoding" in content["error"]["message"]


@pytest.mark.parametrize("size", [17_000, 60_000, 140_000])
def test_heads_that_are_too_large(port, size):
    head = f"GET /health HTTP/1.1\r\n{HEAD}X: {'a' * size}\r\nConnection: close\r\n"
    status, _, content, closed = send(port, head)
    assert status == 431 and content["error"]["code"] == "head_too_large" and closed


def test_a_length_of_twenty_digits(port):
    status, _, content, closed = send(
        port, f"POST /v1/completions HTTP/1.1\r\n{HEAD}Content-Length: {'9' * 20}\r\n"
    )
    assert status == 413 and content["error"]["code"] == "body_too_large" and closed


def test_compressed_bodies(port):
    head = (
        f"POST /api/v1/generate HTTP/1.1\r\n{HEAD}Content-Encoding: gzip\r\nContent-Length:"
        f" {len(BODY)}\r\n"
    )
    status, _, content, _ = send(port, head, BODY)
    assert status == 415 and "gzip" in content["detail"]["msg"]


def test_malformed_http_gets_json(port):
    status, _, content, _ = send(port, "GET /health HTTP/1.1\r\nHost : x\r\n")
    assert status == 400 and content["error"]["code"] == "malformed"


@pytest.mark.parametrize(
    ("path", "read"), [("/v1/models", ["error", "message"]), ("/api/v1/model", ["detail", "msg"])]
)
def test_too_many_connections(port, path, read, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 0)
    status, _, content, _ = send(port, f"GET {path} HTTP/1.1\r\n{HEAD}")
    assert status == 503 and "too many connections" in content[read[0]][read[1]]


def test_equal_log_lines_are_written_once():
    throttle = Throttle()

    def line(text):
        return throttle.filter(logging.LogRecord("x", logging.WARNING, "", 0, text, None, None))

    assert [line("a"), line("a"), line("b"), line("a")] == [True, False, True, False]
    assert sum(line(str(number)) for number in range(1000)) == limits.LOG_LINES - 2


# --- sizes before work


LARGE_VALUES = {
    "dry_breakers": ["x"] * 60_000,
    "bad_words": ["ab"] * 50_000,
    "sequence_bias": [["ab", 1.0]] * 30_000,
    "logit_bias": {str(number): 1 for number in range(30_000)},
    "banned_tokens": [1] * 100_000,
    "stop": ["a" * 100_000],
}


@pytest.mark.parametrize("name", LARGE_VALUES)
def test_settings_that_are_too_large_are_refused_before_any_work(name):
    engine = FakeEngine()
    app = make_app(engine)
    engine.settings = lambda given: pytest.fail("the settings were processed")
    with TestClient(app, base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json={"prompt": "a", name: LARGE_VALUES[name]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_too_many_dry_breakers():
    with TestClient(make_app(FakeEngine()), base_url="http://localhost") as client:
        body = {"prompt": "a", "dry_multiplier": 1.0, "dry_sequence_breakers": ["x"] * 30_000}
        answer = client.post("/api/v1/generate", json=body)
        assert answer.status_code == 400 and "dry_breakers" in answer.json()["detail"]["msg"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/completions", "maximum context length"),
        ("/api/dantinox/generate", "a list of strings and token ids"),
    ],
)
def test_prompts_with_too_many_ids(path, words):
    with TestClient(make_app(FakeEngine()), base_url="http://localhost") as client:
        answer = client.post(path, json={"prompt": [[1] * 200_000]})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


LONG = "a" * (limits.THREAD_THRESHOLD + 1)
IDS = [1] * (limits.THREAD_THRESHOLD + 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"prompt": LONG}),
        ("/infill", {"input_prefix": "a", "logit_bias": {LONG: 1}}),
        ("/completion", {"logit_bias": [[LONG, 1]], "n_predict": 1}),
        ("/completion", {"logit_bias": {f"t{number}": 1 for number in range(10_000)}}),
        ("/tokenize", {"content": LONG, "with_pieces": True}),
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
        ("/detokenize", {"tokens": IDS}),
        ("/api/extra/detokenize", {"ids": IDS}),
        ("/api/extra/tokencount", {"prompt": LONG}),
    ],
)
def test_large_inputs_are_processed_on_a_thread(path, body, monkeypatch):
    """The event loop, which serves all other clients, must not wait for them."""
    on_the_event_loop = Counter()

    def counted(function):
        @functools.wraps(function)
        def call(*args, **more):
            if not threading.current_thread().name.startswith("requests"):
                sizes = [len(arg) if isinstance(arg, str | list) else 1 for arg in args[1:]]
                on_the_event_loop[function.__name__] += sum(sizes)
            return function(*args, **more)

        return call

    engine = FakeEngine(fake_run(tokenizer=fim_tokenizer()))
    tokenizer = type(engine.run.tokenizer)
    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, counted(getattr(tokenizer, name)))
    for name in ("token_name", "token_bytes"):
        monkeypatch.setattr(tokenize_routes, name, counted(getattr(tokenize_routes, name)))
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        assert client.post(path, json=body).status_code in (200, 400)
    assert on_the_event_loop.total() < limits.THREAD_THRESHOLD, on_the_event_loop


def test_limits_equal_those_of_the_engine():
    assert (
        limits.MAX_ENTRIES == slots.MAX_ENTRIES
        and limits.MAX_ENTRIES_OF["bad_words"] == slots.MAX_SEQUENCES
    )
    assert limits.MAX_ENTRIES_OF["stop_token_ids"] == slots.MAX_END_IDS
    assert limits.MAX_ENTRIES_OF["dry_breakers"] == slots.MAX_ENTRIES_BY_SETTING["dry_breakers"]


def test_tokens_that_contain_a_string():
    texts = ("a", "\n", "zz")
    vocabulary = [BYTES.decode([token]) for token in range(BYTES.vocab_size)]
    expected = [
        token for token, text in enumerate(vocabulary) if any(part in text for part in texts)
    ]
    assert tokens_containing(BYTES, (*texts, 3)) == tuple(sorted({*expected, 3}))

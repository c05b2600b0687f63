"""Tests of hosts, origins, keys, size and time limits, strict JSON, and cancellation on
disconnect.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from starlette.testclient import TestClient

from dantinox.config import UserError
from dantinox.serve.app import make_app
from dantinox.serve.errors import Busy, RequestError, Unavailable, to_request_error
from dantinox.serve.operations.connection import Connection
from dantinox.serve.operations.limits import MAX_DEPTH, Limits
from dantinox.serve.options import Options
from dantinox.serve.protocols.bodies import parse_json
from tests.error_texts import ERRORS

from .fakes import FakeEngine
from .sockets import exchange, serving

ASK = {"prompt": "a", "max_tokens": 5}
HEAD = "Host: localhost\r\nContent-Type: application/json\r\n"


def client(engine=None, **options):
    app = make_app(engine or FakeEngine(), Options(**options))
    return TestClient(app, base_url="http://localhost:8000", raise_server_exceptions=False)


def post(text, headers="", path="/v1/completions", length=None):
    """Returns the bytes of a request."""
    body = text if isinstance(text, bytes) else text.encode()
    length = len(body) if length is None else length
    return (
        f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {length}\r\n{headers}\r\n".encode() + body
    )


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


# --- JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e400}', "too large"),
        ('{"a": -1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ('{"a": 100000000000000000000}', "too large"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"b": {"a": 1, "a": 1}}', "twice"),
        ("[" * 100_000, "nested lists and objects"),
        ('{"a": ' * 200 + "1" + "}" * 200, "nested lists and objects"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested lists and objects"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"\\udfff": 1}', "lone surrogate"),
        ('{"a": 1,}', "line 1"),
        ("{'a': 1}", "line 1"),
        ("", "not JSON"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_invalid_json_is_refused(text, words):
    with pytest.raises(RequestError) as caught:
        parse_json(text.encode())
    assert caught.value.status == 400 and words in caught.value.message
    assert len(caught.value.message) < 200


def test_valid_json_is_parsed():
    text = (
        '{"a": [1, -2.5, true, null, "\\ud83d\\ude00é"], "b": {"a": {}}, "c": 18446744073709551615}'
    )
    assert parse_json(text.encode()) == json.loads(text)
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest.encode()) == json.loads(deepest)


def test_bytes_that_are_not_utf8_are_refused():
    with pytest.raises(RequestError, match=ERRORS["byte_6"]):
        parse_json(b'{"a":"\xff"}')


def test_many_keys_are_checked_in_linear_time():
    """If the search for duplicate keys took quadratic time, this test would take minutes."""
    names = ",".join(f'"{n}":1' for n in range(100_000))
    before = time.process_time()
    with pytest.raises(RequestError, match=ERRORS["twice"]):
        parse_json(f'{{{names},"99999":1}}'.encode())
    assert time.process_time() - before < 5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ('Application/JSON; charset="UTF-8"', 200),
        ("application/vnd.api+json", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
def test_content_type(kind, expected):
    with client() as http:
        answer = http.post(
            "/v1/completions", content=json.dumps(ASK), headers={"content-type": kind}
        )
    assert answer.status_code == expected
    if expected == 415:
        assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["[]", "3", '"a"', "null"])
def test_a_body_must_be_an_object(text):
    with client() as http:
        answer = http.post(
            "/v1/completions", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400 and "object" in answer.json()["error"]["message"]


# --- hosts, origins and keys


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
def test_own_hosts_are_accepted(host):
    with client() as http:
        assert http.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost:80:80",
        "a@localhost",
        "127.0.0.1.evil.example",
        "",
        "10.0.0.1",
        "[::2]",
    ],
)
def test_other_hosts_are_refused(host):
    with client() as http:
        for path in ("/health", "/v1/models", "/nothing"):
            answer = http.get(path, headers={"host": host})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "host"


def test_allowed_hosts():
    with client(hosts=frozenset({"a.example", "ip"})) as http:
        for host, expected in (
            ("a.example:80", 200),
            ("10.1.2.3", 200),
            ("[fe80::1]:80", 200),
            ("b.example", 400),
        ):
            assert http.get("/health", headers={"host": host}).status_code == expected
    with client(hosts=frozenset({"*"})) as http:
        assert http.get("/health", headers={"host": "anything"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8000", 200),
        ("https://a.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost:8001", 403),
        ("http://[", 403),
        ("http://[::1", 403),
    ],
)
def test_pages_of_other_origins_are_refused(origin, expected):
    with client(origins=("https://a.example",)) as http:
        answer = http.post("/v1/completions", json=ASK, headers={"origin": origin})
        assert answer.status_code == expected
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == ("https://a.example" if origin == "https://a.example" else None)
        assert "access-control-allow-credentials" not in answer.headers


def test_cors_is_off_by_default():
    with client() as http:
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        answer = http.options("/v1/completions", headers=asked)
        assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_a_preflight_request_needs_no_key():
    with client(origins=("*",), key="secret") as http:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        answer = http.options("/v1/completions", headers={"origin": "https://a.example", **asked})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        denied = http.post("/v1/completions", json=ASK, headers={"origin": "https://a.example"})
        assert denied.status_code == 401 and denied.headers["access-control-allow-origin"] == "*"


def test_a_public_page_may_use_a_server_in_a_private_network():
    """Chrome asks for it in the preflight request; a status other than 2xx stops the page."""
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    with client(origins=("https://a.example",)) as http:
        for origin, expected in (("https://a.example", 200), ("https://evil.example", 400)):
            answer = http.options("/v1/completions", headers={"origin": origin, **asked})
            assert answer.status_code == expected


# Headers of the browser builds of the SDKs of OpenAI and Anthropic, and of Ollama.
SDK_HEADERS = (
    "authorization,content-type,openai-organization,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count",
    "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-runtime",
    "accept, content-type, user-agent, cache-control",
)


@pytest.mark.parametrize("origins", [("*",), ("https://a.example",)])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_a_preflight_request_of_an_sdk(origins, method):
    with client(origins=origins) as http:
        for headers in SDK_HEADERS:
            asked = {
                "access-control-request-method": method,
                "access-control-request-headers": headers,
            }
            answer = http.options(
                "/v1/responses/x", headers={"origin": "https://a.example", **asked}
            )
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (
                "*",
                "https://a.example",
            )
            allowed = (
                answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
            )
            assert {*headers.replace(" ", "").split(",")} <= {*allowed}
            assert method in answer.headers["access-control-allow-methods"]
    with client(origins=("https://a.example",)) as http:
        asked = {
            "access-control-request-method": method,
            "access-control-request-headers": SDK_HEADERS[0],
        }
        answer = http.options("/v1/responses/x", headers={"origin": "https://b.example", **asked})
        assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Bearer secret-ü", 200),
        ("bearer secret-ü", 200),
        ("Bearer  secret-ü ", 200),
        ("Bearer secret", 401),
        ("Bearer secret-ü2", 401),
        ("Basic secret-ü", 401),
        ("secret-ü", 401),
        ("Bearer", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_the_key(value, expected):
    headers = {} if value is None else {"authorization": value.encode()}
    with client(key="secret-ü") as http:
        for path in ("/v1/models", "/metrics", "/tokenizer_info"):
            assert http.get(path, headers=headers).status_code == expected
        assert http.post("/v1/completions", json=ASK, headers=headers).status_code == expected
        nothing = http.get("/nothing", headers=headers)
        assert nothing.status_code == (404 if expected == 200 else 401)
        assert http.get("/health", headers=headers).status_code == 200
        if expected == 401:
            assert nothing.headers["www-authenticate"] == "Bearer" and "secret" not in nothing.text


def test_headers_for_browsers():
    with client() as http:
        for answer in (
            http.get("/health"),
            http.get("/nothing"),
            http.post("/v1/completions", json=ASK),
        ):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert answer.headers["cache-control"] == "no-store"
            assert "server" not in answer.headers


# --- sizes and times


def test_bodies_that_are_too_large():
    limits = Limits(max_body=1000)
    large = json.dumps({"prompt": "a" * 2000})
    with client(limits=limits) as http:
        answer = http.post(
            "/v1/completions", content=large, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        assert http.post("/v1/completions", json=ASK).status_code == 200
        fitting = json.dumps(ASK).ljust(1000)
        assert (
            http.post(
                "/v1/completions", content=fitting, headers={"content-type": "application/json"}
            ).status_code
            == 200
        )
        answer = http.post(
            "/v1/completions", content=fitting + " ", headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413


def test_a_real_server_counts_received_bytes():
    """The size limit holds whatever the Content-Length header says."""
    limits = Limits(max_body=1000, receive_seconds=0.5)
    with serving(make_app(FakeEngine(), Options(limits=limits)), limits) as port:
        part = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        chunked = (
            f"POST /v1/completions HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        assert status(exchange(port, chunked + part * 3 + b"0\r\n\r\n")) == 413
        assert status(exchange(port, chunked + part * 40)) == 413  # without an end
        assert status(exchange(port, post(b" " * 5000))) == 413
        assert (
            status(exchange(port, post("", length=10**9))) == 413
        )  # the declared length suffices for the refusal
        assert status(exchange(port, post("", length=10**18))) == 413
        assert (
            status(exchange(port, post(json.dumps(ASK), length=900))) == 408
        )  # the body is shorter than declared
        assert (
            status(exchange(port, post(json.dumps(ASK) + "more", length=len(json.dumps(ASK)))))
            == 200
        )
        assert status(exchange(port, post(json.dumps(ASK), length=5))) == 400  # a truncated body
        assert status(exchange(port, post(json.dumps(ASK), "Content-Length: 7\r\n"))) == 400
        assert status(exchange(port, post("", "Expect: 100-continue\r\n", length=2000))) == 413
        assert exchange(port, post("", "Expect: 100-continue\r\n", length=50)).startswith(
            b"HTTP/1.1 100"
        )
        without = f"POST /v1/completions HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n".encode()
        assert status(exchange(port, without)) == 400
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK).status_code == 200


def test_heads_that_are_too_large_or_too_slow():
    limits = Limits(receive_seconds=0.5)
    with serving(make_app(FakeEngine(), Options(limits=limits)), limits) as port:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
        assert (
            status(exchange(port, head + b"a" * 15_000 + b"\r\nConnection: close\r\n\r\n")) == 200
        )
        assert status(exchange(port, head + b"a" * 20_000)) == 431
        for sent in (b"", head):  # nothing, and an incomplete head
            before = time.perf_counter()
            assert exchange(port, sent, seconds=60) == b""
            assert 0.3 < time.perf_counter() - before < 30
        with socket.create_connection(
            ("127.0.0.1", port), 5
        ) as slow:  # single bytes do not extend the time
            before = time.perf_counter()
            with contextlib.suppress(OSError):
                for byte in head + b"a" * 10_000:
                    slow.sendall(bytes([byte]))
                    time.sleep(0.02)
            assert time.perf_counter() - before < 30


def test_a_stalled_reader_is_disconnected():
    limits = Limits(stall_seconds=0.5)
    engine = FakeEngine(says="a" * 100)
    engine.run.model.config.max_context = 10**9
    with (
        serving(make_app(engine, Options(limits=limits)), limits, send_buffer=4096) as port,
        socket.create_connection(("127.0.0.1", port), 5) as reader,
    ):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.sendall(post(json.dumps({"prompt": "a", "max_tokens": 200_000, "stream": True})))
        until = time.monotonic() + 10
        while not engine.cancelled and time.monotonic() < until:
            time.sleep(0.02)
        assert engine.cancelled


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("size", [30_000, 200_000])
def test_a_client_that_does_not_read_the_end_of_a_response_is_disconnected(size, connection):
    """The response is complete for the application. Its last bytes wait in a buffer, whether small
    or large.
    """
    limits = Limits(stall_seconds=0.3, receive_seconds=0.3)
    lost = threading.Event()

    async def app(scope, receive, send):
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"connection", connection.encode())],
            }
        )
        await send({"type": "http.response.body", "body": b"a" * size})

    with (
        serving(app, limits, send_buffer=4096) as port,
        patched_loss(lost),
        socket.socket() as reader,
    ):
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(("127.0.0.1", port))
        reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert lost.wait(10)


@contextlib.contextmanager
def patched_loss(lost):
    """Sets an event when a connection of a server is lost."""
    with pytest.MonkeyPatch.context() as patch:
        known = Connection.connection_lost
        patch.setattr(
            Connection, "connection_lost", lambda self, error: (known(self, error), lost.set())[0]
        )
        yield


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_its_requests(stream):
    engine = FakeEngine(pause=0.05)
    with serving(make_app(engine)) as port:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(
                post(json.dumps({"prompt": ["a", "b"], "max_tokens": 100, "stream": stream}))
            )
            until = time.monotonic() + 30
            while len(engine.asked) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            if stream:
                connection.recv(1000)
            assert not engine.cancelled
        until = time.monotonic() + 30
        while engine.tasks and time.monotonic() < until:
            time.sleep(0.005)
        assert len(engine.cancelled) == 2
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK).status_code == 200
        assert len(engine.cancelled) == 2  # a complete response is not cancelled


def test_the_server_answers_after_two_hundred_disconnects():
    engine = FakeEngine(pause=0.02)
    with serving(make_app(engine)) as port:
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(
                    post(json.dumps({"prompt": "a", "max_tokens": 200, "stream": True}))
                )
        before = time.monotonic()
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK)
        assert answer.status_code == 200
        while engine.tasks and time.monotonic() < before + 30:
            time.sleep(0.02)
        assert not engine.tasks


def test_small_responses_are_sent_immediately():
    """With Nagle's algorithm, the body would wait 40 ms for the acknowledgement of the head."""
    with serving(make_app(FakeEngine())) as port, httpx.Client() as http:
        took = []
        for _ in range(20):
            before = time.perf_counter()
            assert http.get(f"http://127.0.0.1:{port}/health").status_code == 200
            took.append(time.perf_counter() - before)
    assert min(took) < 0.03


def test_one_connection_for_many_requests():
    """A refused request closes the connection; an answered request keeps it open."""
    with serving(make_app(FakeEngine())) as port:
        answer = exchange(port, post(json.dumps(ASK)) * 3 + post("{}", "Host: evil\r\n"), seconds=1)
        assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "data", [b"", b"\x00\xff\xfe", b"GET", b"\r\n" * 50, b"POST / HTTP/9.9\r\n\r\n", b"a" * 100]
)
def test_bytes_that_are_not_http(path, data):
    with serving(make_app(FakeEngine()), Limits(receive_seconds=0.2)) as port:
        answer = exchange(port, data.replace(b" / ", f" {path} ".encode()))
        assert answer == b"" or status(answer) == 400


# --- exceptions


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("generation.top_p must be in [0, 1]", key="generation.top_p"), (400, "top_p")),
        (UserError("kv.budget is null in this server", key="kv.budget"), (400, "kv_budget")),
        (UserError("no"), (400, None)),
        (Unavailable("loading"), (503, None)),
    ],
)
def test_exceptions_of_an_engine(error, expected):
    found = to_request_error(error)
    assert (found.status, found.param) == expected and found.message == str(error)


def test_busy_has_retry_after():
    found = to_request_error(Busy(2.4))
    assert found.status == 429 and found.headers["retry-after"] == "3"
    assert to_request_error(KeyError("x")).status == 500


def test_an_exception_is_a_500_response():
    engine = FakeEngine()
    with client(engine) as http:
        engine.submit = lambda ask: 1 / 0
        answer = http.post("/v1/completions", json=ASK)
        assert answer.status_code == 500 and "ZeroDivision" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
    with serving(make_app(engine)) as port, httpx.Client() as http:
        for _ in range(5):  # on one client
            assert http.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK).status_code == 500


def test_the_middleware_propagates_cancellation():
    """Cancelling the application cancels its generation request."""

    async def check():
        engine = FakeEngine(pause=10)
        body = json.dumps(ASK).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
        }
        scope |= {
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "scheme": "http",
            "server": ("localhost", 80),
            "root_path": "",
        }
        scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(100)

        async def send(message):
            raise AssertionError(message)

        task = asyncio.create_task(make_app(engine)(scope, receive, send))
        while not engine.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(engine.cancelled) == 1

    asyncio.run(check())

"""Tests request ids, the log line of each request, and the format of all messages."""

import datetime
import io
import json
import logging
import re
import warnings

import httpx
import pytest
from starlette.testclient import TestClient

from dantinox.serve.app import make_app
from dantinox.serve.operations.request_log import configure_logging
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import BYTES, FakeEngine
from .sockets import serving

ASK = {"prompt": "very-private-text", "max_tokens": 5}
SECRET = "secret-of-one"


@pytest.fixture
def lines(monkeypatch):
    """Returns a function that configures the format and returns the stream of the log."""
    stream, root, old_warning = io.StringIO(), logging.getLogger(), warnings.showwarning
    handlers, level = root.handlers[:], root.level
    package_level = logging.getLogger("dantinox").level

    def configure(log_format):
        with monkeypatch.context() as patched:
            patched.setattr("sys.stderr", stream)
            configure_logging(log_format)
        return stream

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("dantinox").setLevel(package_level)
    warnings.showwarning = old_warning


def client(engine=None, **options):
    app = make_app(engine or FakeEngine(), Options(**options))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


# --- request ids


@pytest.mark.parametrize("given", ["abc-1", "01:ef/2+3=@4.5_6", "a" * 128])
def test_a_valid_request_id_is_returned(given):
    with client() as http:
        for method, path in (("GET", "/health"), ("GET", "/nothing"), ("POST", "/v1/completions")):
            assert (
                http.request(method, path, headers={"x-request-id": given}).headers["x-request-id"]
                == given
            )


@pytest.mark.parametrize("given", [None, "", "a b", "a\tb", "ü".encode(), "a" * 129, "a{b}"])
def test_an_invalid_request_id_is_replaced(given):
    with client(key=SECRET) as http:
        answers = [
            http.get("/v1/models", headers={} if given is None else {"x-request-id": given})
            for _ in range(2)
        ]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2 and all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert {answer.status_code for answer in answers} == {401}  # error responses have an id too


# --- lines


def test_a_json_line_of_a_request(lines):
    stream, engine = lines("json"), FakeEngine()
    with client(engine, key=SECRET) as http:
        headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "id-1"}
        http.post(
            "/v1/completions?x=private", json=ASK | {"prompt": ["abc", "de"]}, headers=headers
        )
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    moment = datetime.datetime.fromisoformat(found.pop("time"))
    assert abs((datetime.datetime.now(datetime.UTC) - moment).total_seconds()) < 60
    assert 0 <= found.pop("first_token_seconds") <= found.pop("seconds") < 60
    assert found == {
        "level": "info", "logger": "dantinox.serve.requests", "message": "POST /v1/completions 200",
        "request_id": "id-1", "key": "default", "method": "POST", "path": "/v1/completions",
        "status": 200, "model": "fake", "prompt_tokens": 5, "cached_tokens": 0, "new_tokens": 10,
        "queued_seconds": 0.0, "finish_reason": "length",
    }  # fmt: skip


def test_a_text_line_of_a_request(lines):
    stream = lines("text")
    with client() as http:
        http.post("/v1/completions", json=ASK, headers={"x-request-id": "id-1"})
        http.get("/v1/models", headers={"x-request-id": "id-2"})
    first, second = stream.getvalue().splitlines()
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO POST /v1/completions 200 request_id=id-1"
        r" seconds=[\d.e-]+ model=fake "
    )
    assert re.match(
        pattern + "prompt_tokens=17 cached_tokens=0 new_tokens=5 .*finish_reason=length$", first
    )
    assert re.match(r"\S+ INFO GET /v1/models 200 request_id=id-2 seconds=[\d.e-]+$", second)


def test_no_line_has_a_prompt_a_key_or_generated_text(lines):
    stream, engine = lines("json"), FakeEngine()
    with client(engine, key=SECRET, template=ChatTemplate.from_name("plain", BYTES)) as http:
        headers = {"authorization": f"Bearer {SECRET}"}
        for body in (ASK, ASK | {"stream": True}, ASK | {"n": 99}, ASK | {"model": "x"}):
            http.post("/v1/completions", json=body, headers=headers)
        messages = [{"role": "user", "content": "very-private-text"}]
        http.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 20}, headers=headers
        )
        http.post(
            "/v1/completions", json=ASK, headers={"authorization": "Bearer very-private-text"}
        )
    text = stream.getvalue()
    assert [json.loads(line)["status"] for line in text.splitlines()] == [
        200,
        200,
        400,
        404,
        200,
        401,
    ]
    assert not any(word in text for word in ("private", SECRET, "once", "upon"))


def test_a_client_cannot_forge_lines(lines):
    stream = lines("text")
    with client() as http:
        http.get("/x%0aINFO%20forged%1b[31m")
    assert stream.getvalue().count("\n") == 1 and "\x1b" not in stream.getvalue()


def test_probes_are_logged_only_with_errors(lines):
    stream, engine = lines("json"), FakeEngine()
    with client(engine) as http:
        http.get("/health")
        http.get("/metrics")
        engine.state = "draining"
        http.get("/health")
    assert [json.loads(line)["status"] for line in stream.getvalue().splitlines()] == [503]


def test_a_disconnected_client_has_the_status_499(lines):
    stream, engine = lines("json"), FakeEngine(pause=0.05)
    with serving(make_app(engine)) as port:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"http://127.0.0.1:{port}/v1/completions",
                json=ASK | {"max_tokens": 200},
                timeout=0.3,
            )
        for _ in range(100):
            if stream.getvalue():
                break
            httpx.get(f"http://127.0.0.1:{port}/health")
    assert json.loads(stream.getvalue().splitlines()[0])["status"] == 499


def test_messages_of_a_request_have_its_id(lines):
    stream, engine = lines("json"), FakeEngine()
    engine.fails = ValueError("broken")
    with client(engine) as http:
        http.post("/v1/completions", json=ASK | {"stream": True}, headers={"x-request-id": "id-3"})
    error, request = map(json.loads, stream.getvalue().splitlines())
    assert (error["message"], error["request_id"], error["level"]) == (
        "a request failed",
        "id-3",
        "error",
    )
    assert "ValueError: broken" in error["exception"] and request["request_id"] == "id-3"


def test_an_error_of_the_trace_does_not_affect_the_response(lines):
    stream = lines("json")
    with client(export_trace=lambda record: 1 / 0) as http:
        assert http.post("/v1/completions", json=ASK).status_code == 200
    error, request = map(json.loads, stream.getvalue().splitlines())
    assert "ZeroDivisionError" in error["exception"] and request["status"] == 200


def test_all_messages_have_one_format(lines, monkeypatch):
    stream = lines("json")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # as `dantinox serve` does
    monkeypatch.setattr(
        logging.getLogger("uvicorn"), "propagate", True
    )  # `serving` configures uvicorn's logs
    for throttle in logging.getLogger(
        "uvicorn.error"
    ).filters:  # an earlier test may have logged the same message
        monkeypatch.setattr(throttle, "_seen", {})
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("another.library").error("a\nb")
    logging.getLogger("another.library").info("not logged")
    logging.getLogger("dantinox.serve").info("started")
    warnings.warn("old", stacklevel=1)
    for _ in range(3):  # equal messages are logged once a minute
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    found = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert found == ["Invalid HTTP request received.", "a\nb", "started", "old"]


def test_requests_are_not_logged_by_default(caplog):
    with client() as http:
        http.post("/v1/completions", json=ASK)
    assert caplog.messages == []

"""Tests token healing and the finish reason `loop` in the protocols of the server."""

import pytest
from starlette.testclient import TestClient

from dantinox.config import TokenizerSection
from dantinox.generation.request import Delta
from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate, Tokenizer, train_tokenizer

from .fakes import FakeEngine, fake_run

TEXT = "see http://www.example.org/ and https://example.com; " * 30
WORDS = train_tokenizer(
    TokenizerSection(tokenizer_type="bpe", vocab_size=300), lambda: iter([TEXT])
)
WORDS = Tokenizer(WORDS.to_json(), roles={"add_bos_token": False})
PROMPT = "see http:"
IDS = tuple(WORDS.encode(PROMPT))
HELLO = [{"role": "user", "content": "hello"}]
COMPLETIONS = (
    "/v1/completions",
    "/api/v1/generate",
    "/api/generate",
    "/completion",
    "/api/dantinox/generate",
)
CHATS = {
    "/v1/chat/completions": {},
    "/v1/responses": {},
    "/v1/messages": {"max_tokens": 4},
    "/api/chat": {},
}
LOOPS = {
    "/v1/completions": ("length", lambda body: body["choices"][0]["finish_reason"]),
    "/api/v1/generate": ("length", lambda body: body["results"][0]["finish_reason"]),
    "/api/generate": ("length", lambda body: body["done_reason"]),
    "/completion": ("limit", lambda body: body["stop_type"]),
}


def client_of(engine):
    options = Options(template=ChatTemplate.from_name("plain", engine.run.tokenizer))
    return TestClient(
        make_app(engine, options), base_url="http://localhost", raise_server_exceptions=False
    )


def body_of(path):
    return {"prompt": PROMPT} | (
        {"model": "fake", "raw": True, "stream": False} if path == "/api/generate" else {}
    )


@pytest.mark.parametrize("path", COMPLETIONS)
def test_completions_are_healed(path):
    engine = FakeEngine(fake_run(tokenizer=WORDS, token_healing=True, max_new_tokens=4))
    answer = client_of(engine).post(path, json=body_of(path))
    assert answer.status_code == 200, answer.text
    (request,) = engine.asked
    assert request.ids + request.healed == IDS and request.healed


@pytest.mark.parametrize("path", CHATS)
def test_chats_are_not_healed(path):
    body = {"model": "fake", "messages": HELLO, "stream": False, **CHATS[path]}
    if path == "/v1/responses":
        body = {"input": "hello"}
    engine = FakeEngine(fake_run(tokenizer=WORDS, token_healing=True, max_new_tokens=4))
    assert client_of(engine).post(path, json=body).status_code == 200
    (request,) = engine.asked
    assert request.healed is None and not request.config.generation.token_healing
    if path == "/v1/chat/completions":
        answer = client_of(FakeEngine(fake_run(tokenizer=WORDS))).post(
            path, json=body | {"token_healing": True}
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_healing"


def test_text_offsets_of_healed_tokens():
    engine = FakeEngine(fake_run(tokenizer=WORDS))
    healed = engine.run.heal(engine.run.request(PROMPT, {"token_healing": True})).healed
    new = WORDS.encode("://www")
    engine._token_ids = lambda *_: new
    body = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 0, "token_healing": True}
    logprobs = client_of(engine).post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    expected, at = [], -len(WORDS.decode(healed))
    for token in new:
        expected.append(max(0, at))
        at += len(WORDS.decode([token]))
    assert logprobs["text_offset"] == expected


@pytest.mark.parametrize("path", LOOPS)
def test_a_loop_has_the_finish_reason_of_the_limit(path):
    async def loop(request, stream):
        stream.push(Delta(0, "a", [], "loop"))
        stream.end()

    engine = FakeEngine(fake_run(tokenizer=WORDS))
    engine._answer = loop
    expected, read = LOOPS[path]
    assert read(client_of(engine).post(path, json=body_of(path)).json()) == expected

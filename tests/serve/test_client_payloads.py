"""Tests that the default requests of widely used clients are answered."""

import pytest
from starlette.testclient import TestClient

from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .client_payloads import PAYLOADS
from .fakes import FakeEngine, fake_run, fim_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def served():
    tokenizer = fim_tokenizer()
    engine = FakeEngine(fake_run(tokenizer=tokenizer), says="abcd")
    app = make_app(engine, Options(template=ChatTemplate(TEMPLATE, tokenizer)))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield engine, client


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_default_request_is_answered(served, name):
    engine, client = served
    path, body = PAYLOADS[name]
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text
    generation = engine.asked[-1].config.generation
    given = body | body.get("options", {})
    assert generation.max_new_tokens == (0 if given.get("n_predict") == 0 else 8)
    if "top_p" in given:
        assert generation.top_p == given["top_p"]
    if (temperature := given.get("temperature")) is not None and "infill" not in path:
        assert temperature in (generation.temperature, generation.dynatemp_high)

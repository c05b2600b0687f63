"""Tests that the requests of widely used clients are answered and that their settings apply.

`client_variants.json` has, for each client, its options. Each has the setting that the option sets,
or null, and values in the range that the client offers; `{"sent", "is"}` is a value that the
setting has in another form.
"""

import json
from pathlib import Path

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


VARIANTS = [
    pytest.param(client, option, setting, value, id=f"{client}, {option}: {json.dumps(value)}")
    for client, options in json.loads(
        Path(__file__).with_name("client_variants.json").read_text(encoding="utf-8")
    ).items()
    for option, (setting, *values) in options.items()
    for value in values
]


@pytest.mark.parametrize(("client", "option", "setting", "value"), VARIANTS)
def test_an_option_of_a_client_applies(served, client, option, setting, value):
    engine, http = served
    sent, expected = (
        (value["sent"], value["is"])
        if isinstance(value, dict) and "sent" in value
        else (value, value)
    )
    path, body = PAYLOADS[client]
    folder, _, name = option.rpartition(".")
    body = body | ({folder: body[folder] | {name: sent}} if folder else {name: sent})
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    if setting is not None:
        found = getattr(engine.asked[-1].config.generation, setting)
        assert found == (tuple(expected) if isinstance(expected, list) else expected)


def test_there_are_many_options():
    assert len(VARIANTS) >= 200

"""Tests a real model over HTTP: responses equal the results of the model."""

import json
import re
import time

import httpx
import jax
import numpy as np
import pytest

import dantinox
from dantinox.serve.app import make_app
from dantinox.serve.async_engine import AsyncEngine

from .sockets import serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(run_dir):
    return dantinox.load(run_dir)


@pytest.fixture(scope="module")
def engine(run):
    made = AsyncEngine(run, slots=2, name="circle")
    made.start()
    while made.status().state == "loading":
        time.sleep(0.01)
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(engine):
    with serving(make_app(engine)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        yield client


def complete(http, **body):
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_equals_that_of_generate(http, run):
    for prompt, settings in (
        ("a", {"temperature": 0}),
        ("b\n", {"temperature": 1.3, "seed": 5}),
        ("a", {"stop": "b", "seed": 1}),
    ):
        found = complete(http, prompt=prompt, max_tokens=20, **settings)
        expected = run.generate(prompt, max_new_tokens=20, **settings)
        assert found["choices"][0]["text"] == expected.text
        assert found["usage"]["completion_tokens"] == expected.stats["new_tokens"]


def test_a_stream_has_the_same_text(http):
    body = {"prompt": "a", "max_tokens": 30, "seed": 3, "temperature": 2.0}
    events = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == complete(http, **body)["choices"][0]["text"]


def test_log_likelihoods_equal_those_of_the_model(http, run):
    """Sends requests as lm-evaluation-harness does, and compares the results with a softmax in float64."""
    prompts = [run.tokenizer.encode(text) for text in ("aè€", "hello 😀")]
    found = complete(http, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True)
    forward = jax.jit(lambda model, tokens_BT, positions_BT: model(tokens_BT, positions_BT)[0])
    for ids, choice in zip(prompts, found["choices"], strict=True):
        logits_TV = np.asarray(forward(run.model, np.array([ids]), np.arange(len(ids))[None])[0], np.float64)
        logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        expected = [logprobs_TV[at, token] for at, token in enumerate(ids[1:])]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], expected, atol=1e-4)
        pairs = [*zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)][1:]
        greedy = [max(top.values()) == own for own, top in pairs]
        assert greedy == [*(logprobs_TV[:-1].argmax(-1) == ids[1:]).tolist(), True]


def test_a_text_matches_its_regular_expression(http):
    found = complete(http, prompt="a", max_tokens=30, temperature=2.0, n=2, guided_regex="[ab]{3}x")
    for choice in found["choices"]:
        assert re.fullmatch("[ab]{3}x", choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_budget": 0.5}, "kv_budget"),
        ({"weights": "int8"}, "weights"),
        ({"n": 3}, "n"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"router_preset": "calibrated", "strategy": "entropy"}, None),
        ({"guided_regex": "["}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}}, None),
    ],
)
def test_unsupported_requests_are_refused(http, body, param):
    answer = http.post("/v1/completions", json={"prompt": "a"} | body)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param

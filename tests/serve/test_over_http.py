"""Tests a real model over HTTP: responses equal the results of the model."""

import json
import re

import httpx
import numpy as np
import pytest

from dantinox.serve.app import make_app
from tests.generation import builder

from .engines import reference, reference_tokens, small_model, start_engine
from .sockets import serving


@pytest.fixture(scope="module")
def engine():
    made = start_engine()
    yield made
    made.close()


@pytest.fixture(scope="module")
def http(engine):
    with (
        serving(make_app(engine)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        yield client


def complete(http, **body):
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_text_equals_that_of_the_reference(http):
    for prompt, settings in (("a", {"temperature": 0}), ("b\n", {"temperature": 1.3, "seed": 5})):
        found = complete(http, prompt=prompt, max_tokens=20, **settings)
        assert found["choices"][0]["text"] == reference(prompt, max_new_tokens=20, **settings)
        assert found["usage"]["completion_tokens"] == len(
            reference_tokens(prompt, max_new_tokens=20, **settings)
        )
    whole = reference("a", max_new_tokens=20, temperature=1.0, seed=1)
    found = complete(http, prompt="a", max_tokens=20, temperature=1.0, seed=1, stop=whole[5])
    assert found["choices"][0]["text"] == whole[: whole.index(whole[5])]


def test_a_stream_has_the_same_text(http):
    body = {"prompt": "a", "max_tokens": 30, "seed": 3, "temperature": 2.0}
    events = http.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == complete(http, **body)["choices"][0]["text"]


def test_log_likelihoods_equal_those_of_the_model(http):
    """Sends requests as lm-evaluation-harness does, and compares the results with a softmax in
    float64.
    """
    run = small_model()
    prompts = [run.tokenizer.encode(text) for text in ("aè€", "hello 😀")]
    found = complete(http, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True)
    for ids, choice in zip(prompts, found["choices"], strict=True):
        logprobs_TV = np.stack([*map(builder.log_softmax, builder.all_logits(run.model, ids))])
        expected = [logprobs_TV[at, token] for at, token in enumerate(ids[1:])]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        np.testing.assert_allclose(
            logprobs["token_logprobs"][1:-1], expected, rtol=0, atol=builder.LOGPROB_TOLERANCE
        )
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
        ({"n": 4}, "n"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"router_preset": "calibrated", "strategy": "entropy"}, None),
        ({"guided_regex": "["}, None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "no such type"}},
                }
            },
            None,
        ),
    ],
)
def test_unsupported_requests_are_refused(http, body, param):
    answer = http.post("/v1/completions", json={"prompt": "a"} | body)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param

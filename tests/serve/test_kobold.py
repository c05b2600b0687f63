"""Tests the KoboldAI and KoboldCpp protocol: paths, exact bytes of events, fields, and errors."""

import asyncio
import json
import re
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dantinox.config import TokenizerSection, UserError
from dantinox.serve.app import make_app
from dantinox.serve.errors import RequestError, Unavailable
from dantinox.serve.operations.api_keys import ApiKeys, single_key
from dantinox.serve.options import Options
from dantinox.serve.protocols import kobold
from dantinox.serve.protocols.kobold_prompt import MIN_TOKENS, fit_to_context
from dantinox.text import ChatTemplate, Tokenizer, train_tokenizer
from tests.error_texts import ERRORS

from .fakes import BYTES, SAYS, FakeEngine, fake_run
from .sockets import serving

ORDER = [6, 0, 1, 3, 4, 2, 5]
# A story request of Kobold Lite 339 with its defaults.
LITE = {
    "n": 1, "max_context_length": 12288, "max_length": 1536, "rep_pen": 1.05, "temperature": 0.75,
    "top_p": 0.92, "top_k": 100, "top_a": 0, "typical": 1, "tfs": 1, "rep_pen_range": 360,
    "rep_pen_slope": 0.7, "sampler_order": ORDER, "memory": "", "trim_stop": True,
    "genkey": "KCPP1234", "min_p": 0, "dynatemp_range": 0, "dynatemp_exponent": 1,
    "smoothing_factor": 0, "smoothing_curve": 1, "nsigma": 0, "banned_tokens": [],
    "render_special": False, "logprobs": False, "presence_penalty": 0, "logit_bias": {},
    "stop_sequence": [], "use_default_badwordsids": False, "bypass_eos": False, "prompt": "Once",
}  # fmt: skip


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    yield from clients(engine)


def clients(engine, **options):
    app = make_app(engine, Options(**options))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found


def asked(client, engine, **body):
    """Sends a request and returns the generation request that the engine received."""
    response = client.post("/api/v1/generate", json={"prompt": "Once", "max_length": 2} | body)
    assert response.status_code == 200, response.text
    return engine.asked[-1]


def events(text):
    return [json.loads(data) for data in re.findall(r"^event: message\ndata: (.*)\n\n", text, re.M)]


# --- paths


@pytest.mark.parametrize(
    "path, wanted",
    [
        ("/api/v1/model", {"result": "fake"}),
        ("/api/v1/config/max_context_length", {"value": 256}),
        ("/api/v1/config/max_length", {"value": 80}),
        ("/api/v1/config/soft_prompt", {"value": ""}),
        ("/api/v1/config/soft_prompts_list", {"values": []}),
        ("/api/v1/info/version", {"result": "1.2.5"}),
        ("/api/extra/true_max_context_length", {"value": 256}),
        ("/api/extra/preloadstory", {}),
        ("/sdapi/v1/sd-models", []),
        ("/api/extra/generate/check", {"results": [{"text": ""}]}),
        ("/api/extra/last_logprobs", {"logprobs": None}),
    ],
)
def test_the_server_describes_itself(client, path, wanted):
    assert client.get(path).json() == wanted
    if path.startswith("/api/v1/"):
        assert client.get(path.replace("v1", "latest")).json() == wanted


def test_the_version_has_only_supported_features(client):
    found = client.get("/api/extra/version").json()
    assert (found["result"], found["version"]) == ("KoboldCpp", "1.74")
    assert found["server"].startswith("DantinoX ")
    assert [name for name, value in found.items() if value] == [
        "result",
        "version",
        "embeddings",
        "guidance",
        "server",
    ]
    answer = client.post("/api/extra/embeddings", json={"input": "abc"})
    assert answer.json() == client.post("/v1/embeddings", json={"input": "abc"}).json()


def test_a_missing_key_is_an_error_of_the_protocol(engine):
    for client in clients(engine, key="secret"):
        refused = client.get("/api/v1/model")
        assert (refused.status_code, refused.json()["detail"]["type"]) == (401, "unauthorized")
        allowed = client.get("/api/extra/version", headers={"authorization": "Bearer secret"})
        assert allowed.json()["protected"] is True


def test_a_server_with_a_file_of_keys_is_protected(engine):
    """Kobold Lite then asks for a key."""
    keys = ApiKeys([single_key("secret-of-a", "a"), single_key("secret-of-b", "b")])
    for client in clients(engine, keys=keys):
        allowed = client.get("/api/extra/version", headers={"authorization": "Bearer secret-of-b"})
        assert allowed.json()["protected"] is True


def test_texts_are_tokenized_and_tokens_decoded(client):
    text = "héllo"
    found = client.post("/api/extra/tokencount", json={"prompt": text}).json()
    assert found == {"value": 6, "ids": list(text.encode())}
    assert client.post("/api/extra/tokenize", json={"prompt": text}).json() == found
    assert client.post("/api/extra/detokenize", json={"ids": found["ids"]}).json() == {
        "result": text,
        "success": True,
    }
    assert client.post("/api/extra/tokencount", json={}).json() == {"value": 0, "ids": []}


# --- responses


def test_a_response(client, engine):
    found = client.post("/api/v1/generate", json={"prompt": "Once", "max_length": 9}).json()
    result = {
        "text": SAYS[:9],
        "finish_reason": "length",
        "prompt_tokens": 4,
        "completion_tokens": 9,
        "logprobs": None,
    }
    assert found == {"results": [result]}
    assert (
        client.post("/api/latest/generate", json={"prompt": "Once", "max_length": 9}).json()
        == found
    )


def test_n_gives_n_results(client):
    results = client.post("/api/v1/generate", json={"prompt": "a", "max_length": 5, "n": 3}).json()[
        "results"
    ]
    assert [result["text"] for result in results] == [SAYS[i : i + 5] for i in range(3)]
    assert [result["completion_tokens"] for result in results] == [5, 5, 5]


def test_a_stream_has_the_exact_bytes(client):
    for says, tokens in (("ab", 2), ("é \u2028\r\n\U0001f98a", 6)):
        engine = FakeEngine(says=says)
        for streaming in clients(engine):
            response = streaming.post(
                "/api/extra/generate/stream", json={"prompt": "x", "max_length": len(says.encode())}
            )
            assert response.headers["content-type"].startswith("text/event-stream")
            parts = response.content.split(b"\n\n")
            assert (
                parts.pop() == b""
                and b"\r" not in response.content
                and b"[DONE]" not in response.content
            )
            assert (
                len(parts) == tokens
                and "".join(event["token"] for event in events(response.text)) == says
            )
            for number, part in enumerate(parts):
                first, second = part.split(b"\n")
                assert (
                    first == b"event: message" and second.startswith(b"data: ") and second.isascii()
                )
                data = json.loads(second[6:])
                assert list(data) == ["token", "finish_reason"]
                assert data["finish_reason"] == ("length" if number == len(parts) - 1 else None)
    whole = (
        b'event: message\ndata: {"token": "o", "finish_reason": null}\n\n'
        b'event: message\ndata: {"token": "n", "finish_reason": "length"}\n\n'
    )
    assert (
        client.post("/api/extra/generate/stream", json={"prompt": "x", "max_length": 2}).content
        == whole
    )


@pytest.mark.parametrize(
    "trim, text", [(True, "once upon a "), (False, "once upon a time"), (None, "once upon a ")]
)
def test_stop_strings_are_kept_or_removed(client, trim, text):
    body = {"prompt": "x", "max_length": 40, "stop_sequence": ["", "time", "zz"], "trim_stop": trim}
    result = client.post("/api/v1/generate", json=body).json()["results"][0]
    assert (result["text"], result["finish_reason"]) == (text, "stop")
    streamed = events(client.post("/api/extra/generate/stream", json=body).text)
    assert "".join(event["token"] for event in streamed) == text
    assert [event["finish_reason"] for event in streamed][-2:] == [None, "stop"]


def test_log_probabilities_are_in_the_response_and_available_by_key(client):
    body = {"prompt": "x", "max_length": 3, "logprobs": True, "genkey": "k1"}
    with_answer = client.post("/api/v1/generate", json=body).json()["results"][0]["logprobs"]
    content = with_answer["content"]
    assert [token["token"] for token in content] == list(SAYS[:3])
    assert all(token["logprob"] == pytest.approx(-0.6931, abs=1e-4) for token in content)
    assert all(len(token["top_logprobs"]) == 5 for token in content)
    assert (
        client.post("/api/extra/last_logprobs", json={"genkey": "k1"}).json()["logprobs"]
        == with_answer
    )
    for other in ({"genkey": "k2"}, {}):
        assert client.post("/api/extra/last_logprobs", json=other).json() == {"logprobs": None}


def test_perf_reports_the_last_generation(client):
    client.post(
        "/api/v1/generate",
        json={"prompt": "x", "max_length": 7, "sampler_seed": 42, "stop_sequence": ["pon"]},
    )
    found = client.get("/api/extra/perf").json()
    assert (
        found["last_token_count"],
        found["last_seed"],
        found["stop_reason"],
        found["total_gens"],
    ) == (7, 42, 0, 1)
    assert (found["idle"], found["queue"], found["quiet"]) == (1, 0, True)
    assert (found["last_input_count"], found["last_draft_success"], found["last_draft_failed"]) == (
        1,
        0,
        0,
    )
    assert found["last_process_speed"] * found["last_process_time"] == pytest.approx(1)
    assert found["last_eval_speed"] * found["last_eval_time"] == pytest.approx(7)
    assert (
        0 <= found["last_process"] < 5
        and 0 <= found["last_eval"] < 5
        and found["uptime"] >= found["idletime"] >= 0
    )


# --- fields


SETTINGS = [
    ({"temperature": 0.7}, {"temperature": 0.7}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 40.0}, {"top_k": 40}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_p": 1.5}, {"top_p": 1.0}),
    ({"top_a": 0.2}, {"top_a": 0.2}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"min_p": 7}, {"min_p": 1.0}),
    ({"typical": 0.5}, {"typical": 0.5}),
    ({"typical_p": 0.5}, {"typical": 0.5}),
    ({"typical": 2}, {"typical": 1.0}),
    ({"tfs": 0.95}, {"tail_free": 0.95}),
    ({"nsigma": 1.5}, {"top_n_sigma": 1.5}),
    ({"nsigma": -1}, {"top_n_sigma": 0.0}),
    ({"rep_pen": 1.1, "rep_pen_range": 64, "rep_pen_slope": 0.7},
     {"repetition_penalty": 1.1, "repetition_range": 64, "repetition_slope": 0.7}),
    ({"rep_pen": 1.1, "rep_pen_range": 64, "rep_pen_slope": 1}, {"repetition_penalty": 1.1,
        "repetition_slope": 0.0}),
    ({"rep_pen": 1.1, "rep_pen_range": 0}, {"repetition_penalty": 1.0}),
    ({"rep_pen": 1.1, "rep_pen_range": -1, "rep_pen_slope": 0.7}, {"repetition_penalty": 1.1,
        "repetition_range": 0}),
    ({"rep_pen": 0}, {"repetition_penalty": 1.0}),
    ({"rep_pen": 1, "rep_pen_range": 64, "rep_pen_slope": 0.7}, {"repetition_penalty": 1.0,
        "repetition_range": 0}),
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"rep_pen": 1.1, "repeat_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5, "presence_scope": "all"}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"temperature": 1, "dynatemp_range": 0.5, "dynatemp_exponent": 2},
     {"temperature": 1.0, "dynatemp_low": 0.5, "dynatemp_high": 1.5, "dynatemp_exponent": 2.0}),
    ({"temperature": 0.3, "dynatemp_range": 0.5}, {"temperature": 1.0, "dynatemp_low": 0.0,
                                                   "dynatemp_high": 0.8}),
    ({"temperature": 1, "dynatemp_range": -0.5}, {"dynatemp_low": 0.5, "dynatemp_high": 1.5}),
    ({"dynatemp_range": 0, "dynatemp_exponent": 2}, {"dynatemp_high": 1.0,
                                                     "dynatemp_exponent": 1.0}),
    ({"smoothing_factor": 0.3, "smoothing_curve": 2}, {"smoothing_factor": 0.3,
                                                       "smoothing_curve": 2.0}),
    ({"smoothing_factor": 0.3, "smoothing_curve": 0}, {"smoothing_factor": 0.3,
                                                       "smoothing_curve": 1.0}),
    ({"smoothing_factor": 0.3, "smoothing_curve": 9}, {"smoothing_curve": 3.0}),
    ({"smoothing_factor": -1, "smoothing_curve": 2}, {"smoothing_factor": 0.0,
                                                      "smoothing_curve": 1.0}),
    ({"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2, "top_k": 40, "top_p": 0.9, "tfs": 0.9,
      "xtc_probability": 0.5},
     {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "top_k": 0, "top_p": 1.0,
      "tail_free": 1.0,
      "xtc_probability": 0.0}),
    ({"mirostat": 0, "mirostat_tau": 0, "top_k": 40}, {"mirostat": 0, "mirostat_tau": 5.0,
                                                       "top_k": 40}),
    ({"mirostat": 1, "temperature": 0.8, "dynatemp_range": 0.5}, {"mirostat": 1, "temperature": 0.8,
        "dynatemp_high": 1.0}),
    ({"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 100,
      "dry_sequence_breakers": ["\n", ""]},
     {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_range": 100,
      "dry_breakers": ("\n",)}),
    ({"dry_multiplier": 0.8, "dry_allowed_length": 0, "dry_penalty_last_n": -1,
      "dry_sequence_breakers": '["a", "b"]'},
     {"dry_allowed_length": 1, "dry_range": 0, "dry_breakers": ("a", "b")}),
    ({"dry_multiplier": 0, "dry_base": 1.5}, {"dry_multiplier": 0.0, "dry_base": 1.75}),
    ({"dry_multiplier": 0.8, "dry_base": 0}, {"dry_multiplier": 0.0}),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5,
                                                      "xtc_threshold": 0.2}),
    ({"xtc_probability": 0, "xtc_threshold": 0.2}, {"xtc_probability": 0.0, "xtc_threshold": 0.1}),
    ({"xtc_probability": 3, "xtc_threshold": 2}, {"xtc_probability": 1.0, "xtc_threshold": 1.0}),
    ({"adaptive_target": 0.6, "adaptive_decay": 0.8}, {"adaptive_target": 0.6,
                                                       "adaptive_decay": 0.8}),
    ({"adaptive_target": 3, "adaptive_decay": 3}, {"adaptive_target": 1.0, "adaptive_decay": 0.99}),
    ({"guidance_scale": 1.5, "negative_prompt": "x"}, {"guidance_scale": 1.5,
                                                       "negative_prompt": "x"}),
    ({"guidance_scale": 1, "negative_prompt": "x"}, {"guidance_scale": 1.0, "negative_prompt": ""}),
    ({"adaptive_target": -1, "adaptive_decay": 0.5}, {"adaptive_target": -1.0,
                                                      "adaptive_decay": 0.9}),
    ({"adaptive_target": 0, "adaptive_decay": 0.5}, {"adaptive_target": -1.0,
                                                     "adaptive_decay": 0.9}),
    ({"mirostat": 2, "adaptive_target": 0.5, "top_h": 0.4}, {"mirostat": 2, "adaptive_target": -1.0,
        "top_h": 0.4}),
    ({"sampler_order": ORDER, "adaptive_target": 0.5}, {"preset": "koboldcpp",
                                                        "adaptive_target": 0.5}),
    ({"sampler_order": ORDER}, {"preset": "koboldcpp", "sampler_order": tuple(ORDER)}),
    ({"sampler_order": [5, 4, 3, 2, 1, 0, 6]}, {"sampler_order": (5, 4, 3, 2, 1, 0, 6)}),
    ({"sampler_order": [0, 1, 2, 3, 4, 5]}, {"sampler_order": (0, 1, 2, 3, 4, 5)}),
    ({"sampler_order": []}, {"preset": "default", "sampler_order": None}),
    ({"sampler_seed": 7}, {"seed": 7}),
    ({"sampler_seed": 2**32 + 7}, {"seed": 7}),
    ({"sampler_seed": -1}, {"seed": None}),
    ({"sampler_seed": 0}, {"seed": None}),
    ({"bypass_eos": True}, {"ignore_eos": True}),
    ({"stop_sequence": ["a", "", None, "b"]}, {"stop": ("a", "b")}),
    ({"stop": ["a"]}, {"stop": ("a",)}),
    ({"stop_sequence": ["a"], "stop": ["b"]}, {"stop": ("a",)}),
    ({"stop_sequence": ["a"], "trim_stop": False}, {"keep_stop": True}),
    ({"stop_sequence": [], "trim_stop": False}, {"stop": (), "keep_stop": False}),
    ({"custom_token_bans": "65, 66,"}, {"banned_tokens": (65, 66)}),
    ({"custom_token_bans": ""}, {"banned_tokens": ()}),
    ({"banned_tokens": ["q", "two words"]}, {"banned_tokens": (ord("q"),),
                                             "banned_strings": ("two words",)}),
    ({"banned_strings": ["two words"]}, {"banned_strings": ("two words",)}),
    ({"logit_bias": {"65": -5, "66": None}}, {"logit_bias": {"65": -5.0, "66": float("-inf")}}),
    ({"logit_bias": []}, {"logit_bias": {}}),
    ({"min_tokens": 3, "no_repeat_ngram": 4}, {"min_tokens": 3, "no_repeat_ngram": 4}),
    ({"temperature": None, "top_k": None, "sampler_order": None, "stop_sequence": None},
     {"temperature": 1.0, "top_k": None}),
]  # fmt: skip


@pytest.mark.parametrize("body, wanted", SETTINGS, ids=lambda value: "-".join(value)[:40])
def test_fields_are_converted_to_settings(client, engine, body, wanted):
    found = asked(client, engine, **body).config.generation
    assert {name: getattr(found, name) for name in wanted} == wanted


def test_the_defaults_of_lite(client, engine):
    """No field is refused, and samplers that Lite disables are disabled."""
    found = asked(client, engine, **LITE).config.generation
    on = {
        "preset": "koboldcpp", "sampler_order": tuple(ORDER), "temperature": 0.75, "top_k": 100,
        "top_p": 0.92, "repetition_penalty": 1.05, "repetition_range": 360, "repetition_slope": 0.7,
    }  # fmt: skip
    default = (
        fake_run().config.generation.model_copy(update=on | {"max_new_tokens": 252}).model_dump()
    )
    off = {"typical", "tail_free", "min_p"}
    assert {k: v for k, v in found.model_dump().items() if k not in off} == {
        k: v for k, v in default.items() if k not in off
    }


def test_an_answer_has_80_tokens_by_default(client, engine):
    assert asked(client, engine, max_length=None).config.generation.max_new_tokens == 80


@pytest.mark.parametrize("more", [{}, {"stop_sequence": ["zz"], "trim_stop": False}])
def test_a_single_line(more):
    engine = FakeEngine(fake_run(), says="one\ntwo")
    for client in clients(engine):
        body = {"prompt": "x", "max_length": 7, "singleline": True, **more}
        (result,) = client.post("/api/v1/generate", json=body).json()["results"]
        assert (result["text"], result["finish_reason"]) == ("one", "stop")
        assert (
            client.post("/api/v1/generate", json=body | {"singleline": False}).json()["results"][0][
                "text"
            ]
            == "one\ntwo"
        )


def test_missing_fields_have_the_values_of_the_run():
    engine = FakeEngine(
        fake_run(temperature=0.5, top_k=7, stop=("time",), max_new_tokens=3, eta_cutoff=0.1)
    )
    for client in clients(engine):
        client.post("/api/v1/generate", json={"prompt": "a"})
        assert engine.asked[-1].config == engine.run.config
        found = asked(client, engine, sampler_order=ORDER).config.generation
        assert (found.temperature, found.top_k, found.eta_cutoff) == (0.5, 7, 0.0)


@pytest.mark.parametrize("where", ["run", "request"])
def test_only_penalties_apply_with_the_router(where):
    engine = FakeEngine(fake_run(**({"strategy": "entropy"} if where == "run" else {})))
    for client in clients(engine):
        body = (
            LITE | {"dry_multiplier": 0.8} | ({"strategy": "entropy"} if where == "request" else {})
        )
        found = asked(client, engine, **body).config.generation
        assert (found.strategy, found.repetition_penalty, found.dry_multiplier) == (
            "entropy",
            1.05,
            0.8,
        )
        assert (found.preset, found.temperature, found.top_k, found.top_p) == (
            "default",
            1.0,
            None,
            None,
        )


def test_a_temperature_overrides_that_of_the_run():
    for own in ({"greedy": True}, {"dynatemp_high": 2.0}):
        engine = FakeEngine(fake_run(**own))
        for client in clients(engine):
            found = asked(client, engine, temperature=0.7).config.generation
            assert (found.greedy, found.temperature, found.dynatemp_high) == (False, 0.7, 1.0)


def test_the_end_token_can_be_banned():
    engine = FakeEngine(fake_run(tokenizer=SPECIAL))
    for client in clients(engine):
        for name in ("ban_eos_token", "use_default_badwordsids"):
            assert asked(client, engine, **{name: True}).config.generation.banned_tokens == tuple(
                SPECIAL.stop_ids
            )


def test_a_schema_becomes_a_grammar(client, engine):
    """As in KoboldCpp, a client converts a schema and sends the result as `grammar`, which may also
    be the schema itself.
    """
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = client.post("/api/extra/json_to_grammar", json={"schema": schema})
    assert answer.status_code == 200 and answer.json()["success"] is True
    for grammar in (answer.json()["result"], f"\n {json.dumps(schema)}"):
        found = asked(client, engine, grammar=grammar).constraint
        assert found.kind == "json_schema" and json.loads(found.source) == schema
    wrong = client.post("/api/extra/json_to_grammar", json={"schema": {"type": "thing"}})
    assert wrong.status_code == 400 and "JSON schema" in wrong.json()["detail"]["msg"]


def test_a_grammar_is_a_constraint(client, engine):
    found = asked(client, engine, grammar='root ::= "a"').constraint
    assert (found.kind, found.source) == ("gbnf", 'root ::= "a"')
    assert asked(client, engine, grammar="").constraint is None


# --- the context


@given(st.integers(2, 200), st.integers(0, 120), st.integers(0, 300), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_memory_is_kept_and_the_prompt_loses_its_beginning(context, memory, prompt, new):
    memory, prompt = "m" * memory, "".join(chr(97 + i % 26) for i in range(prompt))
    text = (memory + prompt).encode()  # the tokens of this vocabulary are bytes
    if not text:
        assert fit_to_context(fake_run(), memory, prompt, 1, 2) == ([BYTES.bos_id], 1)
        return
    if len(memory) + min(len(prompt), MIN_TOKENS) >= context:
        with pytest.raises(RequestError, match=ERRORS["memory"]):
            fit_to_context(fake_run(), memory, prompt, new, context)
        return
    ids, count = fit_to_context(fake_run(), memory, prompt, new, context)
    kept = len(ids) - len(memory)
    assert bytes(ids) == memory.encode() + prompt.encode()[len(prompt) - kept :]
    assert 1 <= count <= new and len(ids) + count <= context
    if len(text) + new <= context:
        assert (bytes(ids), count) == (text, new)
    else:  # either all requested tokens fit, or the context is full
        assert (
            len(ids) + count == context
            or (count == new and kept == len(prompt))
            or len(ids) == context - new
        )
        assert len(ids) >= min(len(text), context // 2)


def test_the_budget_of_lite_is_limited_to_the_context(client, engine):
    story = "".join(chr(32 + i % 90) for i in range(1000))
    ask = asked(client, engine, **LITE | {"prompt": story, "memory": "MEMORY"})
    assert len(ask.ids) == 128 and ask.config.generation.max_new_tokens == 128
    assert bytes(ask.ids).decode() == "MEMORY" + story[-122:]
    ask = asked(client, engine, **LITE | {"prompt": story, "max_length": 56})
    assert bytes(ask.ids).decode() == story[-200:] and ask.config.generation.max_new_tokens == 56
    ask = asked(
        client, engine, **LITE | {"prompt": story, "max_context_length": 100, "max_length": 20}
    )
    assert bytes(ask.ids).decode() == story[-80:]
    refused = client.post("/api/v1/generate", json={"prompt": "a", "memory": "m" * 300})
    assert (refused.status_code, refused.json()["detail"]["type"]) == (400, "bad_input")
    assert "300" in refused.json()["detail"]["msg"]


# --- instruction placeholders


def special_tokenizer() -> Tokenizer:
    """Returns a byte tokenizer with the special tokens of a chat."""
    tree = json.loads(
        train_tokenizer(
            TokenizerSection(tokenizer_type="bpe", vocab_size=300), lambda: iter(["ab ab"])
        ).to_json()
    )
    names = ("<|im_start|>", "<|im_end|>")
    known = (
        max([*tree["model"]["vocab"].values(), *(token["id"] for token in tree["added_tokens"])])
        + 1
    )
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tree["added_tokens"] += [
        {"id": known + i, "content": name} | flags for i, name in enumerate(names)
    ]
    return Tokenizer(json.dumps(tree), roles={"eos_token": "<|im_end|>", "add_bos_token": False})


SPECIAL = special_tokenizer()
PLACES = "\n{{[INPUT]}}\nHi\n{{[OUTPUT]}}\nHo\n{{[INPUT]}}\nSo?\n{{[OUTPUT]}}\n"


def test_placeholders_become_koboldcpp_tags_without_a_template(client, engine):
    ask = asked(
        client,
        engine,
        prompt=PLACES,
        stop_sequence=["{{[INPUT]}}", "{{[OUTPUT]}}", "{{[INPUT_END]}}"],
    )
    turn = "\n### Instruction:\nHi\n### Response:\nHo\n### Instruction:\nSo?\n### Response:\n"
    assert bytes(ask.ids).decode() == turn
    assert ask.config.generation.stop == ("### Instruction:", "### Response:")
    ask = asked(
        client,
        engine,
        memory="{{[SYSTEM]}}Be kind{{[SYSTEM_END]}}",
        prompt="{{[INPUT]}}Hi{{[OUTPUT]}}",
    )
    assert (
        bytes(ask.ids).decode()
        == "\n### Instruction:\nBe kind\n### Instruction:\nHi\n### Response:\n"
    )
    ask = asked(client, engine, prompt=PLACES, replace_instruct_placeholders=False)
    assert bytes(ask.ids).decode() == PLACES


def test_placeholders_become_tags_of_the_template():
    engine = FakeEngine(fake_run(tokenizer=SPECIAL))
    template = ChatTemplate.from_name("chatml", SPECIAL)
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "So?"},
    ]
    start, end = (SPECIAL.special_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
    for client in clients(engine, template=template):
        ask = asked(client, engine, prompt=PLACES, stop_sequence=["{{[INPUT]}}", "{{[OUTPUT]}}"])
        assert list(ask.ids) == template.encode(said, generation_prompt=True)
        generation = ask.config.generation
        assert generation.stop == () and set(generation.stop_token_ids) | set(SPECIAL.stop_ids) == {
            end
        }
        system = {"role": "system", "content": "Be kind"}
        ask = asked(
            client,
            engine,
            memory="{{[SYSTEM]}}\nBe kind\n{{[SYSTEM_END]}}\n",
            prompt=PLACES.lstrip(),
        )
        assert list(ask.ids) == template.encode([system, *said], generation_prompt=True)
        # Tags that the client itself writes also become special tokens, both in the prompt and as
        # stop strings.
        ask = asked(
            client,
            engine,
            prompt="<|im_start|>user\nHi<|im_end|>\n",
            stop_sequence=["<|im_start|>user", "User:"],
        )
        assert [token for token in ask.ids if token in SPECIAL.special_ids] == [start, end]
        assert (ask.config.generation.stop, ask.config.generation.stop_token_ids) == (
            ("User:",),
            (start,),
        )


# --- generations by their key


def slow(**options):
    return FakeEngine(pause=0.01, **options)


async def eventually(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not (found := await condition()):
        assert time.monotonic() < until
        await asyncio.sleep(0.005)
    return found


def open_client(engine, **options):
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(engine, Options(**options))),
        base_url="http://localhost",
    )


def test_a_generation_is_read_and_aborted_by_its_key():
    engine = slow()

    async def run():
        async with open_client(engine) as client:

            async def text(key):
                found = (
                    await client.post("/api/extra/generate/check", json={"genkey": key})
                ).json()["results"]
                return found[0]["text"]

            bodies = [{"prompt": "x", "max_length": 200, "genkey": key} for key in ("a", "b")]
            a, b = (
                asyncio.create_task(client.post("/api/v1/generate", json=body)) for body in bodies
            )
            await eventually(lambda: text("a"))
            assert await text("c") == "" and (await client.get("/api/extra/generate/check")).json()[
                "results"
            ] == [{"text": ""}]
            nobody = await client.post("/api/extra/abort", json={"genkey": "c"})
            assert nobody.json() == {"success": "false", "done": "false"}
            assert (await client.post("/api/extra/abort")).json()[
                "success"
            ] == "false"  # ambiguous: two are running
            assert not engine.cancelled
            ended = await client.post("/api/extra/abort", json={"genkey": "a"})
            assert ended.json() == {"success": "true", "done": "true"}
            result = (await a).json()["results"][0]
            assert 0 < len(result["text"]) < 200 and result["finish_reason"] == "length"
            assert await text("a") == result["text"]  # still available
            assert not b.done() and len(engine.cancelled) == 1
            await client.post("/api/extra/abort", json={"genkey": "b"})
            await b
            assert (await client.post("/api/extra/abort", json={"genkey": "b"})).json()[
                "success"
            ] == "false"

    asyncio.run(run())


def test_a_request_without_a_key_refers_to_the_only_generation():
    engine = slow()

    async def run():
        async with open_client(engine) as client:
            check = "/api/extra/generate/check"
            work = asyncio.create_task(
                client.post("/api/v1/generate", json={"prompt": "x", "max_length": 200})
            )

            async def seen():
                return (await client.get(check)).json()["results"][0]["text"]

            assert SAYS.startswith((await eventually(seen))[: len(SAYS)])
            assert (await client.post("/api/extra/abort")).json()["success"] == "true"
            result = (await work).json()["results"][0]
            assert (
                result["text"] and (await seen()) == ""
            )  # after the end, its text is no longer available without a key

    asyncio.run(run())


def test_finished_generations_are_bounded_and_expire(client, monkeypatch):
    def text(number):
        return client.post("/api/extra/generate/check", json={"genkey": f"k{number}"}).json()[
            "results"
        ][0]["text"]

    for number in range(kobold.MAX_FINISHED + 3):
        client.post(
            "/api/v1/generate", json={"prompt": "x", "max_length": 1, "genkey": f"k{number}"}
        )
    assert [bool(text(number)) for number in range(5)] == [False, False, False, True, True]
    assert text(kobold.MAX_FINISHED + 2) == "o"
    now = time.monotonic()
    monkeypatch.setattr(kobold.time, "monotonic", lambda: now + kobold.KEEP_SECONDS)
    assert text(kobold.MAX_FINISHED + 2) == ""


@pytest.mark.parametrize("path", ["/api/extra/generate/stream", "/api/v1/generate"])
def test_a_disconnect_frees_the_slots(path):
    engine = slow()

    async def leave(url):
        async with httpx.AsyncClient() as client:
            work = asyncio.create_task(client.post(url, json={"prompt": "x", "max_length": 200}))
            while not engine.asked:
                await asyncio.sleep(0.01)
            work.cancel()

    with serving(make_app(engine)) as port:
        asyncio.run(leave(f"http://127.0.0.1:{port}{path}"))
        until = time.monotonic() + 30
        while engine.tasks and time.monotonic() < until:
            time.sleep(0.01)
        assert len(engine.asked) == len(engine.cancelled) == 1 and not engine.tasks


# --- errors


def test_a_full_queue_and_an_engine_that_is_not_ready(client, engine):
    engine.full = True
    for path in ("/api/v1/generate", "/api/extra/generate/stream"):
        response = client.post(path, json={"prompt": "x"})
        assert (response.status_code, response.json()["detail"]["type"]) == (
            503,
            "service_unavailable",
        )
        assert int(response.headers["retry-after"]) >= 1
    engine.full, engine.state = False, "draining"
    response = client.post("/api/v1/generate", json={"prompt": "x"})
    assert (response.status_code, response.json()["detail"]["type"]) == (503, "service_unavailable")
    assert "draining" in response.json()["detail"]["msg"]


def test_a_failed_stream_has_an_error_event_and_no_final_chunk():
    """Kobold Lite regards every response with a final chunk as complete."""
    engine = FakeEngine()
    engine.fails = Unavailable("the engine failed")
    with serving(make_app(engine)) as port:
        url = f"http://127.0.0.1:{port}/api/extra/generate/stream"
        found = b""
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", url, json={"prompt": "x"}) as response,
        ):
            for part in response.iter_raw():
                found += part
    expected = {"detail": {"msg": "the engine failed", "type": "service_unavailable"}}
    assert found.endswith(f"event: error\ndata: {json.dumps(expected)}\n\n".encode())
    assert [event["token"] for event in events(found.decode())] == ["o", "n"]


NUMBERS = (
    "temperature", "top_p", "top_a", "min_p", "typical", "tfs", "rep_pen", "rep_pen_slope",
    "presence_penalty", "dynatemp_range", "dynatemp_exponent", "smoothing_factor",
    "smoothing_curve", "nsigma", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base",
    "xtc_probability", "xtc_threshold", "adaptive_target", "adaptive_decay",
)  # fmt: skip
COUNTS = (
    "n",
    "max_length",
    "max_context_length",
    "top_k",
    "rep_pen_range",
    "mirostat",
    "dry_allowed_length",
    "sampler_seed",
)
BAD = [
    *({name: value} for name in NUMBERS for value in ("1", True, [], {}, 1e300)),
    *({name: value} for name in COUNTS for value in ("1", True, 1.5, [1], 10**19)),
    *(
        {name: value}
        for name in ("prompt", "memory", "genkey", "grammar")
        for value in (1, True, ["a"], {})
    ),
    *(
        {name: value}
        for name in ("trim_stop", "bypass_eos", "logprobs", "ban_eos_token")
        for value in (1, "true", [])
    ),
    *(
        {name: -1}
        for name in (
            "temperature",
            "top_p",
            "top_a",
            "min_p",
            "typical",
            "tfs",
            "rep_pen",
            "n",
            "max_length",
        )
    ),
    *({"n": n} for n in (0, 17, 4096)),
    *(
        {"sampler_order": order}
        for order in ([0], [0] * 7, [7, 0, 1, 2, 3, 4, 5], ["a"], [6.5], 6, [[6]], list(range(99)))
    ),
    *({"stop_sequence": stop} for stop in (1, [1], {"a": 1}, ["a" * 600], ["ab"] * 40)),
    *({"banned_tokens": bans} for bans in (1, [1], ["a" * 600], ["ab"] * 1100)),
    *({"custom_token_bans": bans} for bans in ("a", "1;2", "-1", "999999999", "9" * 5000, [-1], 5)),
    *(
        {"logit_bias": bias}
        for bias in (
            {"1": "a"},
            {"1": True},
            {"999999": 1},
            {"9" * 5000: 1},
            [1],
            "a",
            {"1": 1e300},
        )
    ),
    *(
        {"dry_multiplier": 1, "dry_sequence_breakers": value}
        for value in ("[", "[1]", "[" * 2000, 1, [1], "[NaN]")
    ),
    {"dry_multiplier": 1, "dry_base": 0.5},
    {"mirostat": 2, "mirostat_tau": 0},
    {"mirostat": 3},
    {"images": ["abc"]},
    {"genkey": "k" * 300},
    {"no_such_limit": 1, "top_p": "x"},
    {"kv_calibration": "/etc/passwd"},
    {"kv_budget": 0.5},
    {"strategy": "best"},
]


def test_the_number_of_invalid_bodies():
    assert len(BAD) >= 150


@pytest.mark.parametrize("path", ["/api/v1/generate", "/api/extra/generate/stream"])
def test_invalid_bodies_get_one_sentence(client, engine, path):
    for body in BAD:
        response = client.post(path, json={"prompt": "x"} | body)
        assert response.status_code == 400, (body, response.text[:300])
        detail = response.json()["detail"]
        assert (
            detail["type"] == "bad_input"
            and 0 < len(detail["msg"]) < 400
            and "\n" not in detail["msg"]
        ), body
    assert not engine.asked
    assert client.post(path, json={"prompt": "x", "max_length": 2}).status_code == 200


@pytest.mark.parametrize(
    "content, status",
    [
        (b"", 415), (b"{", 400), (b"[]", 400), (b'"a"', 400), (b"null", 400),
        (b'{"temperature": NaN}', 400), (b'{"temperature": 1e999}', 400),
        (b'{"prompt": "\xff"}', 400), (b'{"prompt": "\\ud800"}', 400), (b'{"n": 1, "n": 2}', 400),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", 400), (b"x" * (1 << 21), 413),
    ],
)  # fmt: skip
def test_invalid_bytes_get_an_error_of_the_protocol(client, content, status):
    for path in ("/api/v1/generate", "/api/extra/tokencount", "/api/extra/detokenize"):
        response = client.post(
            path, content=content, headers={"content-type": "application/json"} if content else {}
        )
        assert response.status_code == status
        assert set(response.json()["detail"]) == {"msg", "type"}


def test_unknown_paths_and_methods(client):
    for method, path, status in (
        ("GET", "/api/v1/generate", 405),
        ("POST", "/api/v1/model", 405),
        ("GET", "/api/nothing", 404),
    ):
        response = client.request(method, path)
        assert response.status_code == status and set(response.json()["detail"]) == {"msg", "type"}


# --- Lite


def test_only_the_page_of_lite_is_served_from_its_folder(tmp_path, engine):
    (tmp_path / "index.html").write_text("<p>Lite</p>")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "inside").mkdir()
    for path in (tmp_path, tmp_path / "index.html"):
        for client in clients(engine, lite=path, key="secret"):
            page = client.get("/lite")  # without the key, as a browser requests it
            assert (page.status_code, page.text, page.url.query) == (200, "<p>Lite</p>", b"local=1")
            assert "connect-src 'self'" in page.headers["content-security-policy"]
        for client in clients(engine, lite=path):
            for name in ("notes.txt", "index.html", "%2e%2e", "%2e%2e%2fnotes.txt"):
                assert client.get(f"/lite/{name}").status_code == 404, name
    for client in clients(engine):
        assert client.get("/lite").status_code == 404
    for path in (tmp_path / "inside", tmp_path / "nothing.html"):
        with pytest.raises(UserError, match=ERRORS["lite_must_be"]):
            make_app(engine, Options(lite=path))

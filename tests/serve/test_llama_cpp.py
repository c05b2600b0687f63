"""Tests the routes of llama.cpp's server: `/completion`, `/infill`, `/props`, `/slots`, and its
form of `/tokenize`.
"""

import json
import math

import pytest
from starlette.testclient import TestClient

from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import BYTES, SAYS, FakeEngine, fake_run, fim_tokenizer

PATH = "/completion"


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    return client_of(engine)


def client_of(engine, template=None):
    return TestClient(
        make_app(engine, Options(template=template)),
        base_url="http://localhost",
        raise_server_exceptions=False,
    )


def ask(client, body, path=PATH):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client, body, path=PATH):
    answer = client.post(path, json=body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/event-stream"
    ), answer.text
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_completion(client, engine):
    found = ask(client, {"prompt": "abc", "n_predict": 6, "return_tokens": True})
    assert (found["content"], found["stop"], found["stop_type"]) == (SAYS[:6], True, "limit")
    assert (found["tokens"], found["tokens_predicted"], found["tokens_evaluated"]) == (
        [*SAYS[:6].encode()],
        6,
        3,
    )
    timings = found["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (3, 6)
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 6)
    assert timings["predicted_per_second"] == pytest.approx(6e3 / timings["predicted_ms"])
    assert (found["stopping_word"], found["truncated"], found["prompt"]) == ("", False, "abc")
    assert ask(client, {"prompt": "abc", "n_predict": 6})["tokens"] == []
    stopped = ask(client, {"prompt": "abc", "stop": ["upon"]})
    assert (stopped["stop_type"], stopped["stopping_word"], stopped["truncated"]) == (
        "word",
        "upon",
        False,
    )
    full = ask(client, {"prompt": "abc", "n_predict": -1})  # the context of 256 tokens
    assert (full["stop_type"], full["truncated"], full["tokens_predicted"]) == ("limit", True, 253)
    assert engine.asked[0].ids == tuple(b"abc")


def test_a_stream(client):
    *parts, last = stream(client, {"prompt": "abc", "n_predict": 6})
    assert "".join(part["content"] for part in parts) == SAYS[:6]
    assert [token for part in parts for token in part["tokens"]] == [*SAYS[:6].encode()]
    assert not any(part["stop"] for part in parts)
    assert (last["content"], last["stop"], last["tokens_predicted"]) == ("", True, 6)


def test_prompts_of_texts_and_ids(client, engine):
    eos = "<eos>"
    for prompt, ids in (
        (["ab", 99, "d"], [*b"abcd"]),
        ([["ab", 99, "d"]], [*b"abcd"]),
        (["ab"], [*b"ab"]),
        ([97, 98], [*b"ab"]),
        (f"a{eos}", [97, BYTES.eos_id]),  # names of special tokens are these tokens
        ({"prompt_string": "ab"}, [*b"ab"]),
        ([{"prompt_string": "ab", "multimodal_data": []}], [*b"ab"]),
        ("", [BYTES.bos_id]),
        ([], [BYTES.bos_id]),
    ):
        ask(client, {"prompt": prompt, "n_predict": 1})
        assert engine.asked[-1].ids == tuple(ids)


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"n_predict": -1}, {"max_new_tokens": 256}),
        (
            {"temperature": 0.5, "top_k": 0, "typical_p": 0.5},
            {"temperature": 0.5, "top_k": 0, "typical": 0.5},
        ),
        (
            {"repeat_penalty": 1.2, "repeat_last_n": 16},
            {"repetition_penalty": 1.2, "repetition_range": 16},
        ),
        ({"logit_bias": [[97, 2.5], [98, False]]}, {"logit_bias": {"97": 2.5, "98": -math.inf}}),
        ({"logit_bias": [["ab", -0.5], ["b", 2]]}, {"logit_bias": {"97": -0.5, "98": 1.5}}),
        (
            {"logit_bias": {"ab": 1, "99": False}},
            {"logit_bias": {"97": 1.0, "98": 1.0, "99": -math.inf}},
        ),
        (
            {"adaptive_target": 0.3, "adaptive_decay": 0.5},
            {"adaptive_target": 0.3, "adaptive_decay": 0.5},
        ),
        ({"adaptive_target": -0.01, "adaptive_decay": 0.9}, {"adaptive_target": -1.0}),
        (
            {"ignore_eos": True, "xtc_probability": 0.5},
            {"ignore_eos": True, "xtc_probability": 0.5},
        ),
        # Parameters of disabled steps, as SillyTavern sends them.
        (
            {
                "dry_multiplier": 0,
                "dry_base": 1.75,
                "dry_allowed_length": 2,
                "dry_penalty_last_n": -1,
                "xtc_probability": 0,
                "xtc_threshold": 0.1,
                "mirostat": 0,
                "mirostat_tau": 5,
                "mirostat_eta": 0.1,
                "top_n_sigma": -1,
                "dynatemp_range": 0,
                "dynatemp_exponent": 1,
                "typical_p": 1,
                "repeat_penalty": 1,
                "repeat_last_n": 64,
            },
            {
                "dry_multiplier": 0,
                "xtc_probability": 0,
                "mirostat": 0,
                "top_n_sigma": 0,
                "repetition_penalty": 1,
            },
        ),
        (
            {"dry_multiplier": 0.8, "dry_penalty_last_n": 64},
            {"dry_multiplier": 0.8, "dry_range": 64},
        ),
        (
            {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_base": 2},
            {"dry_multiplier": 0.8, "dry_range": 0, "dry_base": 2},
        ),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0, "dry_base": 2}, {"dry_multiplier": 0}),
        ({"dry_multiplier": 0.8, "dry_base": 0.5}, {"dry_multiplier": 0}),
        ({"temperature": 1.0, "dynatemp_range": 0.5}, {"dynatemp_low": 0.5, "dynatemp_high": 1.5}),
        (
            {"mirostat": 2, "mirostat_tau": 4, "top_k": 5},
            {"mirostat": 2, "mirostat_tau": 4, "top_k": 0},
        ),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5, "presence_scope": "all"}),
        (
            {"frequency_penalty": 0.5, "repeat_last_n": 0},
            {"frequency_penalty": 0, "presence_scope": "output"},
        ),
        ({"seed": -1, "cache_prompt": True, "id_slot": 0}, {"seed": None}),
    ],
)
def test_settings(client, engine, body, settings):
    ask(client, {"prompt": "a", "n_predict": 2} | body)
    generation = engine.asked[0].config.generation
    assert {name: getattr(generation, name) for name in settings} == settings


def test_samplers(client, engine):
    """The listed samplers run in their order, and the others are off although the request has
    values for them.
    """
    values = {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "temperature": 0.7,
        "repeat_penalty": 1.3,
        "dry_multiplier": 0.8,
    }
    ask(
        client,
        {"prompt": "a", "n_predict": 2, "samplers": ["temperature", "min_p", "top_k"], **values},
    )
    generation = engine.asked[-1].config.generation
    assert generation.sampler_order[:4] == ("dynamic_temperature", "temperature", "min_p", "top_k")
    assert (generation.top_k, generation.min_p, generation.temperature) == (5, 0.1, 0.7)
    assert (generation.top_p, generation.repetition_penalty, generation.dry_multiplier) == (1, 1, 0)
    ask(
        client,
        {
            "prompt": "a",
            "n_predict": 2,
            "samplers": ["penalties", "dry", "top_p", "typ_p", "xtc", "top_n_sigma"],
            **values,
        },
    )
    generation = engine.asked[-1].config.generation
    assert (
        generation.top_k,
        generation.temperature,
        generation.repetition_penalty,
        generation.top_p,
    ) == (0, 1, 1.3, 0.9)
    ask(client, {"prompt": "a", "n_predict": 2, "samplers": ["top_k"], "mirostat": 2})
    assert engine.asked[-1].config.generation.mirostat == 2


@pytest.mark.parametrize(
    ("samplers", "steps"),
    [
        (["TOP-K", "nucleus", "Temp"], ["top_k", "top_p", "dynamic_temperature", "temperature"]),
        (["topk", "typ", "min-p", "topnsigma"], ["top_k", "typical", "min_p", "top_n_sigma"]),
        (["typical_p"], ["typical"]),
        (["typical"], ["typical"]),
        (
            "edkypmxt",
            [
                "repetition_penalty",
                "presence_frequency_penalty",
                "dry",
                "top_k",
                "typical",
                "top_p",
                "min_p",
                "xtc",
            ],
        ),
        ("sk", ["top_n_sigma", "top_k"]),
        (["top_k", "infill", "top_p"], ["top_k", "top_p"]),  # an unknown name has no effect
        ("k?p", ["top_k", "top_p"]),
        (["top_k", "top_p", "top_k"], ["top_k", "top_p"]),
        (["adaptive_p", "min_p"], ["min_p"]),  # it draws the token, so it is always the last
        ([], []),
    ],
)
def test_names_of_samplers(client, engine, samplers, steps):
    ask(
        client,
        {"prompt": "a", "n_predict": 2, "samplers": samplers, "adaptive_target": 0.5, "top_k": 3},
    )
    generation = engine.asked[-1].config.generation
    assert [*generation.sampler_order[: len(steps)]] == steps and generation.sampler_order[
        -1
    ] == "adaptive_p"
    assert generation.top_k == (3 if "top_k" in steps else 0)
    assert generation.adaptive_target == (0.5 if "adaptive_p" in samplers else -1)


def test_unknown_and_repeated_samplers_are_logged(client, caplog):
    caplog.set_level("WARNING", "dantinox.serve")
    ask(client, {"prompt": "a", "n_predict": 2, "samplers": ["top_q", "top_k", "TOPK"]})
    assert "the sampler top_q in samplers, which is unknown" in caplog.text
    assert "the sampler TOPK in samplers, which is listed twice" in caplog.text


def test_several_answers(client):
    found = ask(client, {"prompt": ["a", "b"], "n_predict": 3, "n_cmpl": 2})
    assert [one["content"] for one in found] == [SAYS[:3], SAYS[1:4]] * 2 and [
        one["index"] for one in found
    ] == [0, 1, 2, 3]
    assert [one["tokens_predicted"] for one in found] == [3] * 4
    events = stream(client, {"prompt": "a", "n_predict": 3, "n": 2})
    texts = [
        "".join(event["content"] for event in events if event["index"] == index) for index in (0, 1)
    ]
    assert texts == [SAYS[:3], SAYS[1:4]]


def test_reported_settings(client, engine):
    given = {
        "temperature": 0.5,
        "dynatemp_range": 0.25,
        "top_k": 5,
        "typical_p": 0.9,
        "repeat_penalty": 1.5,
        "stop": ["zz"],
    }
    given |= {
        "repeat_last_n": 32,
        "dry_multiplier": 0.5,
        "dry_penalty_last_n": 16,
        "seed": 7,
        "n_predict": 4,
    }
    samplers = ["dry", "top_k", "typ_p", "temperature", "penalties"]
    found = ask(client, {"prompt": "a", "samplers": samplers, **given})["generation_settings"]
    assert {name: found[name] for name in given} == given
    assert found["samplers"][: len(samplers)] == samplers
    assert (found["n_ctx"], found["model"], found["stream"]) == (256, "fake", False)
    found = ask(client, {"prompt": "a", "seed": -1, "repeat_last_n": -1, "repeat_penalty": 1.5})[
        "generation_settings"
    ]
    assert (found["seed"], found["repeat_last_n"]) == (2**32 - 1, -1)


def test_response_fields(client):
    fields = [
        "content",
        "timings/predicted_n",
        "generation_settings/n_predict",
        "nothing",
        "content/x",
    ]
    found = ask(client, {"prompt": "a", "n_predict": 3, "response_fields": fields})
    assert found == {
        "content": SAYS[:3],
        "timings/predicted_n": 3,
        "generation_settings/n_predict": 3,
    }
    *_, last = stream(client, {"prompt": "a", "n_predict": 3, "response_fields": ["stop"]})
    assert last == {"stop": True}


@pytest.mark.parametrize(("says", "ends"), [("ab\n", True), ("abc", False)])
def test_the_time_limit_ends_an_answer_after_a_line(says, ends):
    engine = FakeEngine(says=says, pause=0.002)
    body = {"prompt": "a", "n_predict": 60, "t_max_predict_ms": 20}
    found = ask(client_of(engine), body)
    assert (found["tokens_predicted"] < 60) is ends and found["stop_type"] == "limit"
    assert bool(engine.cancelled) is ends


def test_several_prompts(client):
    found = ask(client, {"prompt": ["abc", [97], [120, "b"]], "n_predict": 3})
    assert [one["index"] for one in found] == [0, 1, 2] and [
        one["tokens_evaluated"] for one in found
    ] == [3, 1, 2]
    assert [one["content"] for one in found] == [SAYS[:3]] * 3
    events = stream(client, {"prompt": ["abc", "d"], "n_predict": 3})
    for number in (0, 1):
        own = [event for event in events if event["index"] == number]
        assert (
            "".join(event["content"] for event in own) == SAYS[:3]
            and [event["stop"] for event in own][-1]
        )


def test_constraints_and_log_probabilities(client, engine):
    ask(client, {"prompt": "a", "grammar": 'root ::= "x"'})
    ask(client, {"prompt": "a", "json_schema": {"type": "object"}})
    ask(client, {"prompt": "a", "json_schema": {}})
    assert [asked.constraint for asked in engine.asked] == [
        Constraint("gbnf", 'root ::= "x"'),
        Constraint("json_schema", '{"type": "object"}'),
        Constraint("json_schema", "{}"),
    ]
    first, second = ask(client, {"prompt": "a", "n_predict": 2, "n_probs": 3})[
        "completion_probabilities"
    ]
    assert (first["id"], first["token"], first["logprob"]) == (ord(SAYS[0]), SAYS[0], math.log(0.5))
    assert [other["id"] for other in second["top_logprobs"]] == [
        0,
        1,
        2,
    ]  # the alternatives of the engine


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            PATH,
            {"prompt": 3},
            "prompt must be a string, a list of strings and token ids, or a list of these, got 3",
        ),
        (
            PATH,
            {"prompt": [[1.5]]},
            "prompt must be a string, a list of strings and token ids, or a list of these",
        ),
        (PATH, {"prompt": ["a"] * 65}, "prompt must have at most 64 prompts"),
        (PATH, {"prompt": "a", "n": 17}, "n must be less than or equal to 16, got 17"),
        (
            PATH,
            {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}},
            "prompt must be a string, a list of strings",
        ),
        (PATH, {"prompt": "a", "samplers": 3}, "samplers."),
        (PATH, {"prompt": "a", "dry_base": "x"}, "dry_base must be a valid number, got 'x'"),
        (PATH, {"prompt": [300]}, "prompt must have token ids in [0, 259), got 300"),
        (
            PATH,
            {"prompt": "a" * 256},
            "this model's maximum context length is 256 tokens, and the prompt has 256: shorten it",
        ),
        (
            PATH,
            {"prompt": "a", "grammar": "x", "json_schema": {"a": 1}},
            "grammar and json_schema both constrain the answer",
        ),
        (
            PATH,
            {"prompt": "a", "image_data": [{}]},
            "image_data is not supported by this server: remove it",
        ),
        (
            PATH,
            {"prompt": "a", "logit_bias": [[1]]},
            "logit_bias must be an object, or a list of pairs",
        ),
        (
            PATH,
            {"prompt": "a", "dry_sequence_breakers": "[bad"},
            "dry_sequence_breakers must be a string, a list of strings, or",
        ),
        (
            "/infill",
            {"input_prefix": "a"},
            "input_suffix needs a model that fills in the middle of a text",
        ),
        (
            "/tokenize",
            {"content": "a", "prompt": "b"},
            "the body must have either prompt or messages",
        ),
    ],
)
def test_errors(client, path, body, message):
    answer = client.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message), (
        answer.text
    )


def test_a_stream_that_fails(client, engine):
    engine.fails = Unavailable("the engine has failed")
    *parts, last = stream(client, {"prompt": "a"})
    assert len(parts) == 2 and last["error"]["message"] == "the engine has failed"


def test_infill():
    tokenizer = fim_tokenizer()
    engine = FakeEngine(fake_run(context=32, tokenizer=tokenizer), says="ab")
    client = client_of(engine)
    before, after, middle, pad = (
        tokenizer.special_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle", "pad")
    )
    encode = tokenizer.encode

    def prompt(body):
        assert ask(client, {"n_predict": 4} | body, "/infill")["content"].startswith("ab")
        assert set(engine.asked[-1].config.generation.stop_token_ids) == {
            before,
            after,
            middle,
            pad,
        }
        return engine.asked[-1].ids

    assert prompt({"input_prefix": "a", "input_suffix": "b"}) == (
        before,
        *encode("a"),
        after,
        *encode("b"),
        middle,
    )
    body = {
        "input_prefix": "a",
        "input_suffix": "b",
        "prompt": "cd",
        "input_extra": [{"filename": "x", "text": "dd"}],
    }
    assert prompt(body) == (before, *encode("dd\na"), after, *encode("b"), middle, *encode("cd"))
    # A long prefix keeps its end, and a long suffix a quarter of the space: 32 − 4 new − 4 = 24
    # tokens.
    found = prompt({"input_prefix": "ab" * 50, "input_suffix": "cd" * 50})
    assert (
        found == (before, *encode("ab" * 9), after, *encode("cd" * 3), middle)
        and len(found) + 4 <= 32
    )
    # The space that a short prefix leaves is used by the suffix, and the reverse.
    assert prompt({"input_prefix": "ab", "input_suffix": "cd" * 50}) == (
        before,
        *encode("ab"),
        after,
        *encode("cd" * 11),
        middle,
    )
    assert prompt({"input_prefix": "ab" * 50, "input_suffix": "cd"}) == (
        before,
        *encode("ab" * 11),
        after,
        *encode("cd"),
        middle,
    )


def test_props_and_slots(engine):
    template = ChatTemplate.from_name("plain", BYTES)
    found = client_of(engine, template).get("/props").json()
    assert (
        found["default_generation_settings"]["params"]["temperature"] == 1.0
    )  # the default of `generation.temperature`
    assert found["default_generation_settings"]["n_ctx"] == 256 and found["total_slots"] == 8
    assert (found["chat_template"], found["model_alias"]) == (template.source, "fake")
    assert found["modalities"] == {"vision": False, "audio": False}
    client = client_of(engine)
    assert client.get("/props").json()["chat_template"] == ""
    slots = client.get("/slots").json()
    assert [slot["id"] for slot in slots] == [*range(8)] and not any(
        slot["is_processing"] for slot in slots
    )


def test_tokenize(client):
    assert client.post("/tokenize", json={"content": "ab"}).json()["tokens"] == [97, 98]
    assert client.post("/tokenize", json={"content": ""}).json()["tokens"] == []
    assert (
        client.post("/tokenize", json={"content": "a<eos>", "add_special": True}).json()["tokens"][
            -1
        ]
        == BYTES.eos_id
    )
    plain = client.post("/tokenize", json={"content": "a<eos>", "parse_special": False}).json()[
        "tokens"
    ]
    assert plain == [*b"a<eos>"]
    pieces = client.post("/tokenize", json={"content": "aé<eos>", "with_pieces": True}).json()[
        "tokens"
    ]
    assert pieces == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": BYTES.eos_id, "piece": "<eos>"},
    ]
    assert client.post("/detokenize", json={"tokens": [97, 98]}).json()["content"] == "ab"

"""Tests the OpenAI protocol: whole and streamed responses, and errors."""

import json
import logging
import math

import pytest
from starlette.testclient import TestClient

from dantinox.config import TokenizerSection, UserError, overlay
from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.generation.guides.constraints import Constraint, ConstraintCompiler
from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.options import Options
from dantinox.serve.protocols.openai_bodies import CONSTRAINTS
from dantinox.text import ChatTemplate, train_tokenizer
from tests.error_texts import ERRORS

from .fakes import BYTES, SAYS, FakeEngine, fake_run, fim_tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
END = BYTES.eos_id


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    return client_of(engine)


def client_of(engine, **options):
    if "template" not in options:
        options["template"] = ChatTemplate.from_name("plain", engine.run.tokenizer)
    app = make_app(engine, Options(**options))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def ask(client):
    """Returns a function that sends a body and returns the JSON of its response."""

    def send(body, path=TEXT):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


@pytest.fixture
def stream(client):
    """Returns a function that sends a body to be streamed and returns the JSON of each event."""

    def send(body, path=TEXT):
        answer = client.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = answer.text.split("\n\n")
        assert (
            (done, rest) == ("data: [DONE]", "")
            and "event:" not in answer.text
            and "\r" not in answer.text
        )
        assert all(
            event.startswith("data: ") and "\n" not in event and event.isascii() for event in events
        )
        return [json.loads(event.removeprefix("data: ")) for event in events]

    return send


def refusal(answer, status, param=None):
    """Checks the format of an error and returns its message."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
    assert error["type"] == {
        401: "authentication_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }.get(status, "invalid_request_error" if status < 500 else "server_error")
    if param is not None:
        assert error["param"] == param
    return error["message"]


# --- models


def test_models(client, engine):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 256)
    assert client.get("/v1/models/fake").json() == model
    assert "'fake'" in refusal(client.get("/v1/models/gpt-4"), 404, "model")
    engine.name = "org/name"
    client = client_of(engine)
    assert client.get("/v1/models/org/name").json()["id"] == "org/name"


def test_aliases_of_the_model(engine):
    client = client_of(engine, aliases={"gpt-4o": "fake", "org/other": "fake"})
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in models] == [
        ("fake", "fake"),
        ("gpt-4o", "fake"),
        ("org/other", "fake"),
    ]
    assert client.get("/v1/models/org/other").json() == models[2]
    found = client.post(TEXT, json={"model": "gpt-4o", "prompt": "a", "max_tokens": 1})
    assert found.status_code == 200 and found.json()["model"] == "fake"
    message = refusal(client.post(TEXT, json={"model": "gpt-5", "prompt": "a"}), 404, "model")
    assert message == "this server has no model 'gpt-5', only 'fake', 'gpt-4o', 'org/other'"


@pytest.mark.parametrize(
    "aliases",
    [{"a": "other"}, {"fake": "fake"}, {"a": "b", "b": "fake"}],
    ids=["unknown", "existing", "alias of an alias"],
)
def test_wrong_aliases(engine, aliases):
    with pytest.raises(UserError, match=ERRORS["the_alias"]):
        client_of(engine, aliases=aliases)


def test_another_model_is_not_found(client):
    assert refusal(client.post(TEXT, json={"model": "gpt-4", "prompt": "a"}), 404, "model")
    assert (
        client.post(TEXT, json={"model": "fake", "prompt": "a", "max_tokens": 1}).status_code == 200
    )


# --- completions


def test_a_completion(ask, engine):
    found = ask({"model": "fake", "prompt": "abc", "max_tokens": 9})
    assert (
        found["id"].startswith("cmpl-")
        and found["object"] == "text_completion"
        and found["model"] == "fake"
    )
    assert found["choices"] == [
        {"index": 0, "text": SAYS[:9], "logprobs": None, "finish_reason": "length"}
    ]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 9, 12)
    assert engine.asked[0].ids == tuple(b"abc") and not engine.cancelled


def test_the_salt_of_the_prefix_cache(ask, engine):
    ask({"prompt": ["a", "b"], "cache_salt": "x"})
    ask({"messages": HELLO, "cache_salt": "y"}, CHAT)
    ask({"prompt": "a"})
    assert [asked.salt for asked in engine.asked] == ["x", "x", "y", ""]


def test_every_optional_field_may_be_null(ask, engine):
    names = {
        "model",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "seed",
        "stop",
        "max_tokens",
        "logit_bias",
        "user",
        "suffix",
    }
    names |= {
        "response_format",
        "logprobs",
        "echo",
        "tools",
        "guided_json",
        "guided_regex",
        "grammar",
        *REQUEST_KEYS,
    }
    names |= {"cache_salt"}
    ask({"prompt": "a"} | dict.fromkeys(names))
    chat = names | {"top_logprobs", "max_completion_tokens", "max_tokens", "audio", "modalities"}
    ask({"messages": HELLO} | dict.fromkeys(chat), CHAT)
    for asked in engine.asked:
        stops = asked.config.generation.stop_token_ids
        assert overlay(engine.run.config, {"stop_token_ids": list(stops)}) == asked.config
        assert (asked.logprobs, asked.echo, asked.constraint) == (None, False, None)


def test_missing_fields_have_the_values_of_the_run(client):
    engine = FakeEngine(fake_run(temperature=0.3, top_p=0.5, max_new_tokens=7, stop=["x"]))
    http = client_of(engine)
    assert len(http.post(TEXT, json={"prompt": "a"}).json()["choices"][0]["text"]) == 7
    http.post(TEXT, json={"prompt": "a", "top_p": 1, "stop": []})
    own, changed = (asked.config.generation for asked in engine.asked)
    assert (own.temperature, own.top_p, own.stop) == (0.3, 0.5, ("x",))
    assert (changed.temperature, changed.top_p, changed.stop) == (0.3, 1, ())


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
        (["ab", [99]], [b"ab", b"c"]),
        (None, [[BYTES.bos_id]]),
        ("", [[BYTES.bos_id]]),
    ],
)
def test_prompts(ask, engine, prompt, ids):
    found = ask({"prompt": prompt, "max_tokens": 3})
    assert [asked.ids for asked in engine.asked] == [tuple(one) for one in ids]
    assert [choice["index"] for choice in found["choices"]] == [*range(len(ids))]
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_long_prompt_is_encoded_on_a_thread(client):
    engine = FakeEngine(fake_run(context=10_000))
    assert (
        client_of(engine).post(TEXT, json={"prompt": "é" * 3000, "max_tokens": 1}).status_code
        == 200
    )
    assert engine.asked[0].ids == tuple("é".encode() * 3000)


def test_samples_of_several_prompts(ask, stream):
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 5}
    found = ask(body)
    assert [(c["index"], c["text"]) for c in found["choices"]] == [
        (i, SAYS[i % 2 : i % 2 + 5]) for i in range(6)
    ]
    assert found["usage"]["completion_tokens"] == 30 and found["usage"]["prompt_tokens"] == 3
    texts, reasons = {}, {}
    for event in stream(body):
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert choice["index"] not in reasons
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {i: SAYS[i % 2 : i % 2 + 5] for i in range(6)} and reasons == dict.fromkeys(
        range(6), "length"
    )


def test_a_stream(stream):
    events = stream({"prompt": "a", "max_tokens": 4})
    assert [event["choices"][0]["text"] for event in events] == [*SAYS[:4]]
    assert [event["choices"][0]["finish_reason"] for event in events] == [
        None,
        None,
        None,
        "length",
    ]
    assert (
        len({(event["id"], event["created"], event["object"], event["model"]) for event in events})
        == 1
    )
    assert all("usage" not in event for event in events)


def test_usage_at_the_end_of_a_stream(stream):
    for path, body in ((TEXT, {"prompt": "abc"}), (CHAT, {"messages": HELLO})):
        *events, last = stream(
            body | {"max_tokens": 4, "stream_options": {"include_usage": True}}, path
        )
        assert all(event["usage"] is None and event["choices"] for event in events)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4


@pytest.mark.parametrize(
    ("stop", "text"), [("time", "once upon a "), ([" a", "ce"], "on"), (["zz"], SAYS[:20])]
)
def test_stops(ask, stream, stop, text):
    (choice,) = ask({"prompt": "a", "max_tokens": 20, "stop": stop})["choices"]
    assert (choice["text"], choice["finish_reason"]) == (
        text,
        "length" if stop == ["zz"] else "stop",
    )
    events = stream({"prompt": "a", "max_tokens": 20, "stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_the_end_token_has_the_reason_stop(engine):
    async def wait_for_all(ask, answer):
        from dantinox.generation.request import Delta

        answer.push(Delta(0, "a", [], "eos"))
        answer.end()

    engine._answer = wait_for_all
    (choice,) = client_of(engine).post(TEXT, json={"prompt": "a"}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.7, "top_p": 1}, {"temperature": 0.7, "top_p": 1}),
        (
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
        ),
        ({"typical_p": 0.5}, {"typical": 0.5}),
        ({"typical": 0.5}, {"typical": 0.5}),
        (
            {"presence_penalty": -1, "frequency_penalty": 2},
            {"presence_penalty": -1, "frequency_penalty": 2},
        ),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {"seed": 2**32 - 1}),
        ({"seed": 2**40 + 3}, {"seed": 3}),
        ({"logit_bias": {"97": -100, "98": 2.5}}, {"logit_bias": {"97": -100, "98": 2.5}}),
        ({"ignore_eos": True, "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
        ({"stop_token_ids": [3]}, {"stop_token_ids": [3]}),
        (
            {"dry_multiplier": 0.8, "xtc_probability": 0.5},
            {"dry_multiplier": 0.8, "xtc_probability": 0.5},
        ),
        ({"preset": "llamacpp"}, {"preset": "llamacpp"}),
        ({"mirostat": 2, "mirostat_tau": 3.0}, {"mirostat": 2, "mirostat_tau": 3.0}),
        (
            {"strategy": "entropy", "router_preset": "guide"},
            {"strategy": "entropy", "router_preset": "guide"},
        ),
        (
            {"strategy": "entropy", "clarify_text": "Why?"},
            {"strategy": "entropy", "clarify_text": "Why?"},
        ),
        ({"max_new_tokens": 6}, {"max_new_tokens": 6}),
        ({"max_new_tokens": 6, "max_tokens": 5}, {"max_new_tokens": 5}),
    ],
)
def test_settings(client, engine, given, expected):
    assert client.post(TEXT, json={"prompt": "a"} | given).status_code == 200
    assert engine.asked[0].config == overlay(engine.run.config, expected)


def test_a_temperature_overrides_a_greedy_run():
    engine = FakeEngine(fake_run(greedy=True))
    http = client_of(engine)
    for body in ({}, {"temperature": 0.5}, {"temperature": 0}):
        assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1} | body).status_code == 200
    assert [asked.config.generation.greedy for asked in engine.asked] == [True, False, True]


def test_an_unknown_field_is_one_line_in_the_log(client, caplog):
    caplog.set_level(logging.WARNING, "dantinox.serve")
    for _ in range(3):
        assert (
            client.post(
                TEXT, json={"prompt": "a", "max_tokens": 1, "no\nsuch\x1b[2Jfield": 1}
            ).status_code
            == 200
        )
    (record,) = caplog.records
    assert r"no\nsuch\x1b[2Jfield" in record.getMessage() and record.getMessage().isprintable()


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object", "")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array"}, "strict": True},
                }
            },
            Constraint("json_schema", '{"type": "array"}'),
        ),
        ({"guided_json": {"type": "array"}}, Constraint("json_schema", '{"type": "array"}')),
        ({"guided_json": {}}, Constraint("json_schema", "{}")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}},
                }
            },
            Constraint("json_schema", "{}"),
        ),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_grammar": "start: X"}, Constraint("lark", "start: X")),
        ({"grammar": "root ::= x"}, Constraint("gbnf", "root ::= x")),
        ({"guided_choice": ["a", "b c"]}, Constraint("lark", 'start: "a" | "b c"')),
        ({"guided_json_object": True}, Constraint("json_object", "")),
        ({"guided_json_object": False, "guided_regex": ""}, None),
        ({"json_schema": {"type": "array"}}, Constraint("json_schema", '{"type": "array"}')),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            Constraint("json_schema", '{"type": "array"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "array"}}},
            Constraint("json_schema", '{"type": "array"}'),
        ),
        ({"structured_outputs": {"choice": ["a"]}}, Constraint("lark", 'start: "a"')),
        (
            {"structured_outputs": {"json": {"type": "array"}}},
            Constraint("json_schema", '{"type": "array"}'),
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            Constraint("json_object", ""),
        ),
        (
            {"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}},
            Constraint("regex", "a+"),
        ),
    ],
)
def test_constraints(ask, engine, given, constraint):
    ask({"prompt": "a"} | given)
    ask({"messages": HELLO} | given, CHAT)
    assert [asked.constraint for asked in engine.asked] == [constraint] * 2


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        (
            {"guided_choice": ["a"], "guided_regex": "a"},
            "guided_regex and guided_choice both constrain",
        ),
        (
            {"guided_json": {}, "structured_outputs": {"json": {}}},
            "guided_json and structured_outputs.json both constrain",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern is not supported"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs must not have structural_tag",
        ),
        (
            {"response_format": {"type": "grammar", "grammar": "x"}},
            "response_format.type must be text, json_object or json_schema",
        ),
    ],
)
def test_constraints_that_are_refused(client, path, given, words):
    answer = client.post(
        path, json=({"prompt": "a"} if path == TEXT else {"messages": HELLO}) | given
    )
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_each_choice_is_a_whole_answer():
    """Texts with quotes, escapes and characters beyond ASCII."""
    compiler = ConstraintCompiler(BYTES)
    texts = [
        'a"b',
        "line\nbreak",
        "é ß",
        "back\\slash",
        "/x/i",
        "\t",
        "ab",
        "\u2028",
        "😀",
        "\x01",
        "[a-z]+",
    ]
    constraint = CONSTRAINTS["guided_choice"](texts)
    for text in texts:
        matcher = compiler.matcher(constraint.kind, constraint.source)
        for token in text.encode():
            assert matcher.mask()[token // 32] >> (token % 32) & 1, text
            matcher.consume(token)
        assert matcher.done, text


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_ignore_eos_ignores_the_end_of_a_turn(engine, ignore_eos):
    """Also if that is another token than the EOS token, as `<|im_end|>` often is."""
    template = (
        "{% for m in messages %}{{ m.content }}{{ '<pad>' if m.role == 'assistant' }}{% endfor %}"
    )
    client = client_of(engine, template=ChatTemplate(template, BYTES))
    answer = client.post(CHAT, json={"messages": HELLO, "ignore_eos": ignore_eos, "max_tokens": 2})
    assert answer.status_code == 200
    assert engine.asked[-1].config.generation.stop_token_ids == (
        () if ignore_eos else (BYTES.special_tokens["<pad>"],)
    )


# --- log-probabilities


def test_logprobs_of_a_completion(ask):
    (choice,) = ask({"prompt": "abc", "max_tokens": 5, "logprobs": 2})["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*SAYS[:5]] and logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [math.log(0.5)] * 5
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top == {token: math.log(0.5), "\x00": math.log(0.5), "\x01": math.log(0.5) - 1}


def test_logprobs_0_reports_only_the_token(ask):
    (choice,) = ask({"prompt": "abc", "max_tokens": 2, "logprobs": 0})["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"o": math.log(0.5)}, {"n": math.log(0.5)}]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_work_for_lm_eval(ask, max_tokens):
    """lm-eval sums `token_logprobs[context:-1]`, and compares each of these tokens with the
    likeliest in `top_logprobs`.
    """
    ids = [[*b"ab\xc3\xa9c"], [*b"xy"]]
    found = ask(
        {
            "prompt": ids,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "echo": True,
            "temperature": 0,
            "seed": 1234,
        }
    )
    for prompt, text, choice in zip(ids, ["abéc", "xy"], found["choices"], strict=True):
        assert choice["text"] == text + SAYS[:max_tokens]
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + max_tokens}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(value == math.log(0.5) for value in logprobs["token_logprobs"][1:])
        assert all(max(top.values()) == math.log(0.5) for top in logprobs["top_logprobs"][1:])
    assert found["choices"][0]["logprobs"]["tokens"][:5] == [
        "a",
        "b",
        r"bytes:\xc3",
        r"bytes:\xa9",
        "c",
    ]
    assert found["choices"][0]["logprobs"]["text_offset"][:5] == [0, 1, 2, 2, 3]


def test_echo_without_logprobs(ask, stream):
    assert (
        ask({"prompt": [[97, 98], [99]], "max_tokens": 3, "echo": True})["choices"][0]["text"]
        == "ab" + SAYS[:3]
    )
    events = stream({"prompt": "é", "max_tokens": 3, "echo": True, "n": 2})
    texts = [
        "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i)
        for i in (0, 1)
    ]
    assert texts == ["é" + SAYS[:3], "é" + SAYS[1:4]]


def test_offsets_with_an_echoed_text_and_a_stream(ask, stream):
    body = {"prompt": "é1", "max_tokens": 4, "echo": True, "logprobs": 1}
    (whole,) = ask(body)["choices"]
    parts = [event["choices"][0]["logprobs"] for event in stream(body)]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
    assert whole["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4, 5]


def test_an_impossible_token_has_a_finite_logprob(engine, ask):
    record = engine._record
    engine._record = lambda *args, **kwargs: record(*args, **kwargs) | {"logprob": -math.inf}
    assert ask({"prompt": "a", "max_tokens": 1, "logprobs": 0})["choices"][0]["logprobs"][
        "token_logprobs"
    ] == [-9999.0]


def test_logprobs_of_a_chat(ask, stream):
    body = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    content = ask(body, CHAT)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [*SAYS[:3]]
    assert content[0] == {
        "token": "o",
        "logprob": math.log(0.5),
        "bytes": [111],
        "top_logprobs": [{"token": "\x00", "logprob": math.log(0.5), "bytes": [0]}],
    }
    parts = [event["choices"][0]["logprobs"] for event in stream(body, CHAT)]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert (
        ask({"messages": HELLO, "max_tokens": 3, "logprobs": True}, CHAT)["choices"][0]["logprobs"][
            "content"
        ][0]["top_logprobs"]
        == []
    )


# --- chats


def test_a_chat(ask, engine):
    found = ask({"model": "fake", "messages": HELLO, "max_completion_tokens": 6}, CHAT)
    assert found["id"].startswith("chatcmpl-") and found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAYS[:6], "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    template = ChatTemplate.from_name("plain", BYTES)
    assert engine.asked[0].ids == tuple(template.encode(HELLO, generation_prompt=True))
    assert found["usage"]["prompt_tokens"] == len(engine.asked[0].ids)


def test_a_streamed_chat(stream):
    events = stream({"messages": HELLO, "max_tokens": 3, "n": 2}, CHAT)
    deltas = [
        (e["choices"][0]["index"], e["choices"][0]["delta"], e["choices"][0]["finish_reason"])
        for e in events
    ]
    opening = {"role": "assistant", "content": ""}
    assert deltas[:2] == [(0, opening, None), (1, opening, None)]
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    for sample in (0, 1):
        own = [(delta, reason) for index, delta, reason in deltas[2:] if index == sample]
        assert "".join(delta.get("content", "") for delta, _ in own) == SAYS[sample : sample + 3]
        assert [reason for _, reason in own][-1] == "length" and all(
            "role" not in delta for delta, _ in own
        )


def test_parts_of_messages_and_turns(ask, engine):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    ask({"messages": [{"role": "user", "content": parts, "name": "x"}], "max_tokens": 1}, CHAT)
    ask({"messages": HELLO, "max_tokens": 1}, CHAT)
    assert engine.asked[0].ids == engine.asked[1].ids
    turns = [
        {"role": "system", "content": "s"},
        *HELLO,
        {"role": "assistant", "content": None},
        *HELLO,
    ]
    ask({"messages": turns, "max_tokens": 1}, CHAT)


def test_the_end_token_of_a_turn_ends_the_answer():
    special = {"<|im_start|>": 0, "<|im_end|>": 1}
    tokenizer = _with_specials(special)
    engine = FakeEngine(fake_run(tokenizer=tokenizer), says="ab")
    http = client_of(engine, template=ChatTemplate.from_name("chatml", tokenizer))
    assert http.post(CHAT, json={"messages": HELLO, "stop_token_ids": [5]}).status_code == 200
    end = tokenizer.special_tokens["<|im_end|>"]
    assert set(engine.asked[0].config.generation.stop_token_ids) == {5, end} - set(
        tokenizer.stop_ids
    )


def _with_specials(names):
    """Returns a byte tokenizer with these special tokens at its end."""
    from tokenizers import Tokenizer as Core

    from dantinox.text import Tokenizer

    core = Core.from_str(BYTES.to_json())
    core.add_special_tokens([*names])
    return Tokenizer(core.to_str())


def test_names_of_other_servers(ask, engine):
    body = {"prompt": "a", "max_tokens": 2, "temperature": 0.8}
    other = {
        "repeat_penalty": 1.2,
        "tfs_z": 0.9,
        "allowed_token_ids": [97, 98],
        "include_stop_str_in_output": True,
        "stop": "x",
    }
    ask(
        body
        | other
        | {
            "dynatemp_range": 0.5,
            "dry_multiplier": 0.5,
            "dry_sequence_breakers": '["*"]',
        }
    )
    found = engine.asked[-1].config.generation
    assert (found.repetition_penalty, found.tail_free, found.allowed_tokens, found.keep_stop) == (
        1.2,
        0.9,
        (97, 98),
        True,
    )
    assert (found.temperature, found.dynatemp_low, found.dynatemp_high) == (
        1.0,
        pytest.approx(0.3),
        pytest.approx(1.3),
    )
    assert found.dry_breakers == ("*",)
    ask(
        body
        | {
            "repeat_penalty": 1.2,
            "repetition_penalty": 1.1,
            "dry_breakers": ["-"],
            "dry_multiplier": 1,
        }
    )
    found = engine.asked[-1].config.generation
    assert (found.repetition_penalty, found.dry_breakers) == (1.1, ("-",))


@pytest.mark.parametrize(
    ("switch", "parameters"),
    [
        ({"xtc_probability": 0}, {"xtc_threshold": 0.3}),
        (
            {"dry_multiplier": 0},
            {
                "dry_base": 2,
                "dry_allowed_length": 4,
                "dry_breakers": ["x"],
                "dry_sequence_breakers": ["x"],
            },
        ),
        ({"mirostat_mode": 0}, {"mirostat_tau": 3, "mirostat_eta": 0.2}),
        ({"adaptive_target": -0.01}, {"adaptive_decay": 0.5}),
        ({"repetition_penalty": 1.0}, {"repetition_range": 64, "repetition_slope": 0.5}),
    ],
)
def test_parameters_of_a_step_that_the_request_disables_have_no_effect(
    ask, engine, switch, parameters
):
    ask({"prompt": "a", "max_tokens": 2} | switch | parameters)
    assert engine.asked[-1].config.generation.dry_breakers != ("x",)


def test_prompt_text_may_be_a_special_token(ask, engine):
    name, number = next(iter(BYTES.special_tokens.items()))
    ask({"prompt": f"a{name}b", "max_tokens": 2})
    assert engine.asked[-1].ids == (97, number, 98)


def test_message_text_is_never_a_special_token(ask, engine):
    name = BYTES.core.id_to_token(END)
    ask({"messages": [{"role": "user", "content": name}], "max_tokens": 1}, CHAT)
    assert END not in engine.asked[0].ids


def test_a_base_model_has_no_chat(engine):
    message = refusal(
        client_of(engine, template=None).post(CHAT, json={"messages": HELLO}), 400, "messages"
    )
    assert "--chat_template" in message and "/v1/completions" in message


def test_a_template_that_raises(engine, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    http = client_of(engine, template=ChatTemplate.load(tmp_path / "t.jinja", BYTES))
    message = refusal(http.post(CHAT, json={"messages": HELLO}), 400)
    assert "the chat template refuses these messages: roles must alternate" in message
    assert str(tmp_path) not in message, "clients learn no paths of the server"


# --- tokens


def test_tokenize_and_back(client):
    found = client.post(
        "/tokenize", json={"prompt": "aé", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert found == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [97, 195, 169],
        "token_strs": ["a", r"bytes:\xc3", r"bytes:\xa9"],
    }
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {
        "prompt": "aé",
        "content": "aé",
    }
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "content": ""}
    chat = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert chat == ChatTemplate.from_name("plain", BYTES).encode(HELLO, generation_prompt=True)


def test_lm_eval_finds_the_end_token(client):
    about = client.get("/tokenizer_info").json()
    (token,) = client.post(
        "/tokenize", json={"prompt": about["eos_token"], "add_special_tokens": False}
    ).json()["tokens"]
    assert token == END and about["chat_template"]
    inside = client.post("/tokenize", json={"prompt": "a" + about["eos_token"]}).json()["tokens"]
    assert END not in inside


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": HELLO}, {"tokens": [1]}, {"prompt": 3}]
)
def test_bad_tokenize(client, body):
    refusal(client.post("/tokenize", json=body), 400)
    refusal(client.post("/detokenize", json={"tokens": [-1]}), 400)
    refusal(client.post("/detokenize", json={"tokens": [True]}), 400)
    refusal(client.post("/detokenize", json={"tokens": [10**6]}), 400)


# --- errors


def test_unknown_routes(client):
    refusal(client.get("/v1/nothing"), 404)
    refusal(client.get("/v1/completions/"), 404)
    answer = client.get(TEXT)
    refusal(answer, 405)
    assert answer.headers["allow"] == "POST"
    refusal(client.post("/v1/models", json={}), 405)


def test_a_full_queue(client, engine):
    engine.full = True
    for stream in (False, True):
        answer = client.post(TEXT, json={"prompt": "a", "stream": stream})
        refusal(answer, 429)
        assert answer.headers["retry-after"] == "2"


def test_prompts_wait_for_places_in_the_queue(engine, ask):
    submit, most, tries = engine.submit, 0, 0

    def bounded(asked):
        nonlocal most, tries
        tries += 1
        engine.full = len(engine.tasks) >= 3
        most = max(most, len(engine.tasks))
        return submit(asked)

    engine.submit = bounded
    found = ask({"prompt": [f"{n}" for n in range(64)], "max_tokens": 20})
    assert [choice["text"] for choice in found["choices"]] == [SAYS[:20]] * 64 and most <= 3
    assert tries < 2 * 64 + 3  # one try per freed place, not per token


def test_a_failed_prompt_fails_its_whole_request(engine, client):
    submit = engine.submit

    def failing(asked):
        if asked.ids == (98,):
            raise Unavailable("the engine is draining")
        return submit(asked)

    engine.submit, engine.pause = failing, 0.01
    refusal(client.post(TEXT, json={"prompt": ["a", "b"]}), 503)
    assert len(engine.cancelled) == 1


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_error_during_a_stream(engine, client, path):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    for error, kind in (
        (Unavailable("the engine has failed"), "server_error"),
        (RuntimeError("secret"), "server_error"),
    ):
        engine.fails = error
        answer = client.post(path, json=body | {"stream": True})
        *_, last, done, rest = answer.text.split("\n\n")
        assert (answer.status_code, done, rest) == (200, "data: [DONE]", "")
        found = json.loads(last.removeprefix("data: "))["error"]
        assert found["type"] == kind and "secret" not in answer.text
        whole = client.post(path, json=body)
        refusal(whole, 503 if isinstance(error, Unavailable) else 500)
        assert "secret" not in whole.text


def test_an_incomplete_response_is_an_error(engine, client):
    submit = engine.submit

    def cut(asked):
        answer = submit(asked)
        engine.cancelled.append(answer)
        return answer

    engine.submit = cut
    refusal(client.post(TEXT, json={"prompt": "a"}), 503)
    assert (
        b"the response is incomplete"
        in client.post(TEXT, json={"prompt": "a", "stream": True}).content
    )


def test_a_prompt_that_does_not_fit(client, engine):
    for size in (256, 5000):
        for path, body in (
            (TEXT, {"prompt": ["a", "a" * size]}),
            (CHAT, {"messages": [HELLO[0] | {"content": "a" * size}]}),
        ):
            answer = client.post(path, json=body)
            assert "256" in refusal(answer, 400)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not engine.asked


BAD = {
    "prompt": [True, 1.5, {}, [], [[]], [1.5], [True], [None], ["a", 1], [[1], 2], [-1], [10**6],
               [[True]], 3, ["a"] * 65],
    "n": [0, -1, 17, 1.5, True, "1", [], 2**40],
    "best_of": [2, -1, "1", True],
    "max_tokens": [-1, 1.5, True, "5", [], 2**31, 2**60],
    "temperature": [-0.1, "1", True, [], {}, 1e39, -1],
    "top_p": [-0.1, 1.1, "0.5", True, []],
    "top_k": [1.5, "5", True, [], 2**40],
    "min_p": [-1, 2, "x", True],
    "presence_penalty": ["1", True, [], 1e39],
    "frequency_penalty": ["1", True, {}],
    "repetition_penalty": [0, -1, "x", True],
    "seed": [1.5, "1", True, 2**63, -(2**63) - 1, []],
    "stop": [1, [1], {}, [None], "", ["a", ""], ["a"] * 33, "a" * 513, True, [["a"]]],
    "logprobs": [-1, 21, 1.5, True, "1", []],
    "echo": [1, "true", [], 0],
    "stream": [1, "true", []],
    "stream_options": [[], {}, {"include_usage": True}, {"include_usage": 1}, 1],
    "logit_bias": [[], {"97": 101}, {"97": "1"}, {"97": True}, {"97": None}, 1, {"97": -101}],
    "response_format": [
        [], "json", {}, {"type": 1}, {"type": "xml"}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"schema": 3}}, {"type": None},
    ],
    "guided_json": [1, True, []],
    "guided_regex": [1, [], {}],
    "grammar": [1, [], {}],
    "cache_salt": [1, [], "", "a" * 1025],
    "model": [1, [], "other", {}],
    "tools": [[{}], {"a": 1}, "x", 1],
    "suffix": ["x", 1],
    "min_tokens": [1.5, "x", True],
    "ignore_eos": [1, "x"],
    "preset": ["x", 1, []],
    "sampler_order": ["x", ["nope"], [1, 1], {}, True],
    "strategy": ["x", 1, [], {}],
    "mirostat": [3, "x", 1.5],
    "dry_breakers": [1, [""], {}],
    "bad_words": [1, [""], [[]], {}, [1]],
    "sequence_bias": [1, [1], [[1]], ["a"]],
    "stop_token_ids": [1.5, [1.5], {}, [True], [-1]],
    "kv_budget": [0.5],
    "kv_calibration": ["/etc/passwd", "x", 1],
    "weights": ["x", 1],
    "use_cache": [1, "x"],
    "top_p_rule": ["x", 1],
}  # fmt: skip
BAD_CHAT = {
    "messages": [
        None, [], {}, "a", 1, [1], [{}], [[]], [{"role": "user", "content": 1}],
        [{"role": "user", "content": {}}], [{"role": "nobody", "content": "a"}],
        [{"role": 1, "content": "a"}], [{"content": "a"}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
        [{"role": None}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": "a\0b"}],
    ],
    "logprobs": [1, "true", []],
    "top_logprobs": [1, 21, -1, True, "1"],
    "max_completion_tokens": [-1, 1.5, True, "5"],
    "modalities": [["audio"], "text", 1],
    "functions": [[{}]],
    "audio": [{}],
}  # fmt: skip
CASES = [(TEXT, name, value) for name, values in BAD.items() for value in values]
CASES += [
    (CHAT, name, value)
    for name, values in (BAD | BAD_CHAT).items()
    for value in values
    if name not in ("prompt", "echo")
]


def test_the_number_of_invalid_requests():
    assert len(CASES) >= 300


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_invalid_requests_are_refused(client, engine, path):
    """Each invalid request gets 400 or 404 with a message, and the next valid request is answered
    as before.
    """
    good = (
        {"prompt": "a", "max_tokens": 5} if path == TEXT else {"messages": HELLO, "max_tokens": 5}
    )
    before = client.post(path, json=good).json()["choices"]
    seen = len(engine.asked)
    for where, name, value in CASES:
        if where != path:
            continue
        answer = client.post(path, json=good | {name: value})
        assert answer.status_code in (400, 404), (name, value, answer.status_code, answer.text)
        refusal(answer, answer.status_code)
    assert len(engine.asked) == seen
    assert client.post(path, json=good).json()["choices"] == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": 1}, "stop must be a string or a list, got 1"),
        ({"response_format": "json"}, "response_format must be an object, got 'json'"),
        ({"logit_bias": []}, "logit_bias must be an object, got []"),
        ({"messages": []}, "messages must have at least 1 item, got []"),
        ({"messages": "hi"}, "messages must be a list, got 'hi'"),
        ({"guided_choice": [""]}, "guided_choice.0 must have at least 1 character, got ''"),
    ],
)
def test_errors_of_types_use_the_words_of_json(client, given, message):
    assert refusal(client.post(CHAT, json={"messages": HELLO} | given), 400) == message


def test_other_vocabularies():
    """The log-probabilities contain the names of tokens, for any kind of tokenizer."""
    tokenizer = train_tokenizer(TokenizerSection(tokenizer_type="char"), lambda: iter([SAYS + "é"]))
    engine = FakeEngine(fake_run(tokenizer=tokenizer))
    body = {"prompt": "once é", "max_tokens": 4, "logprobs": 3, "echo": True}
    (choice,) = client_of(engine, template=None).post(TEXT, json=body).json()["choices"]
    assert choice["text"] == "once é" + SAYS[:4]
    assert "".join(choice["logprobs"]["tokens"]).endswith("once é" + SAYS[:4])
    message = refusal(
        client_of(engine, template=None).post(TEXT, json={"prompt": "Ω"}), 400, "prompt"
    )
    assert "U+03A9" in message


# --- fill in the middle


def test_a_suffix_needs_a_vocabulary_with_its_tokens(client, engine):
    message = refusal(client.post(TEXT, json={"prompt": "a", "suffix": "b"}), 400, "suffix")
    assert (
        message
        == "suffix needs a model that fills in the middle of a text: the vocabulary of this model"
        " has no fill-in-the-middle tokens"
    )
    assert client.post(TEXT, json={"prompt": "a", "suffix": ""}).status_code == 200
    assert "suffix" in refusal(
        client.post(CHAT, json={"messages": HELLO, "suffix": "b"}), 400, "suffix"
    )


def test_a_suffix_fills_in_the_middle():
    tokenizer = fim_tokenizer()
    engine = FakeEngine(fake_run(tokenizer=tokenizer, stop_token_ids=[0]), says="ab")
    client = client_of(engine, template=None)
    before, after, middle, pad = (
        tokenizer.special_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle", "pad")
    )
    body = {"prompt": ["ab", "c"], "suffix": "d\n", "max_tokens": 2}
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "ab"]
    suffix = [after, *tokenizer.encode("d\n"), middle]
    assert [asked.ids for asked in engine.asked] == [
        (before, *tokenizer.encode(text), *suffix) for text in ("ab", "c")
    ]
    assert set(engine.asked[0].config.generation.stop_token_ids) == {0, before, after, middle, pad}
    client.post(TEXT, json=body | {"prompt": tokenizer.encode("ab")})
    assert engine.asked[2].ids == engine.asked[0].ids
    message = refusal(client.post(TEXT, json=body | {"echo": True}), 400, "echo")
    assert message == "echo and suffix exclude each other: remove one of them"
    assert "maximum context length" in refusal(
        client.post(TEXT, json=body | {"suffix": "a" * 300}), 400, "prompt"
    )

"""Tests the native protocol: the description of the server, the events of a text, and invalid
bodies.
"""

import json
import time

import httpx
import pytest
from starlette.testclient import TestClient

from dantinox.config.generation_settings import GenerationSection
from dantinox.config.router_settings import RouterSection
from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import BYTES, SAYS, FakeEngine, fake_run
from .sockets import serving
from .varied import VariedEngine, app

ABOUT, GENERATE = "/api/dantinox/about", "/api/dantinox/generate"


def client_of(application):
    return TestClient(application, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    return client_of(app(engine))


def parse_events(text):
    """Parses server-sent events to (name, data)."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    lines = [block.split("\n") for block in blocks]
    assert all(
        len(pair) == 2 and pair[0].startswith("event: ") and pair[1].startswith("data: ")
        for pair in lines
    )
    return [(name[7:], json.loads(data[6:])) for name, data in lines]


def generate(client, body):
    answer = client.post(GENERATE, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(answer.text)


def refused(client, body):
    answer = client.post(GENERATE, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_about_has_every_setting_with_its_range_and_steps(client):
    about = client.get(ABOUT).json()
    assert (about["model"], about["context"], about["vocab_size"], about["chat"]) == (
        "fake",
        256,
        BYTES.vocab_size,
        True,
    )
    found = {setting["name"]: setting for setting in about["settings"]}
    fields = {**GenerationSection.model_fields, **RouterSection.model_fields}
    fixed = {"n", "use_cache", "weights", "matmul_dtype", "matmul_kernel", "tensor_parallel"}
    assert fields.keys() - found.keys() == {*fixed, "watermark_keys"}, "the keys are secret"
    for name, setting in found.items():
        assert setting["help"] == fields[name].description
        assert setting["section"] == (
            "router" if name in RouterSection.model_fields else "generation"
        )
    assert (found["top_p"]["type"], found["top_p"]["low"], found["top_p"]["high"],
            found["top_p"]["default"]) == (
        "number", 0, 1, None,
    )  # fmt: skip
    assert found["top_p"]["steps"] == ["top_p"] and found["mirostat_tau"]["steps"] == [
        "mirostat_v1",
        "mirostat_v2",
    ]
    assert found["mirostat"]["choices"] == [0, 1, 2] and found["eta_cutoff"]["high"] == 1
    assert found["temperature_max"]["type"] == "number" and found["clarify_token"]["type"] == "text"
    assert found["clarify_text"]["type"] == "text"
    assert {found[name]["type"] for name in ("stop", "logit_bias", "greedy", "max_new_tokens",
                                             "strategy")} == {
        "list", "map", "boolean", "integer", "choice",
    }  # fmt: skip
    assert set(about["orders"]) == {"default", "hf", "vllm", "llamacpp", "kobold", "koboldcpp"}
    steps = {step["name"] for step in about["steps"]}
    assert all(set(order) <= steps for order in about["orders"].values())


def test_about_has_the_settings_of_the_server():
    engine = FakeEngine(fake_run(64, temperature=0.7, max_new_tokens=9))
    about = client_of(make_app(engine)).get(ABOUT).json()
    assert about["changed"] == {"temperature": 0.7} and not about["chat"] and about["context"] == 64
    found = {setting["name"]: setting["value"] for setting in about["settings"]}
    assert (found["temperature"], found["max_new_tokens"], found["top_k"]) == (0.7, 9, None)


def test_a_text_is_streamed_token_by_token(client, engine):
    events = generate(
        client, {"prompt": "abc", "settings": {"max_new_tokens": 5, "seed": 7}, "alternatives": 3}
    )
    names = [name for name, _ in events]
    assert names == ["begin", *["token"] * 5, "end"]
    begin, end = events[0][1], events[-1][1]
    assert (begin["prompt_tokens"], begin["seed"], begin["texts"], begin["left_out"]) == (
        3,
        7,
        [[97, 98, 99]],
        0,
    )
    assert (begin["vocab_size"], begin["context"], begin["router"]) == (BYTES.vocab_size, 256, None)
    assert "".join(data["text"] for _, data in events[1:-1]) == SAYS[:5]
    records = [record for _, data in events[1:-1] for record in data["tokens"]]
    assert [record["id"] for record in records] == list(SAYS[:5].encode())
    for record in records:
        assert len(record["alternatives"]) == 3 and record["entropy"] == 1.5
        assert set(record["alternatives"][0]) == {"id", "text", "logprob", "logprob_sampled"}
    assert end["finish_reasons"] == ["length"]
    assert (
        end["stats"]["new_tokens"] == 5
        and end["stats"]["prompt_tokens"] == 3
        and end["stats"]["decode_tok_per_s"] > 0
    )
    assert engine.asked[0].logprobs == 3


def test_a_clarify_text_is_a_setting(client, engine):
    settings = {
        "strategy": "entropy",
        "clarify_text": "Which one?",
        "clarify_cooldown": 5,
        "max_new_tokens": 2,
    }
    begin = generate(client, {"prompt": "a", "settings": settings})[0][1]
    assert (
        begin["settings"]["clarify_text"]
        == engine.asked[0].config.router.clarify_text
        == "Which one?"
    )
    assert (
        "clarify_token"
        in refused(client, {"prompt": "a", "settings": settings | {"clarify_token": 3}})["message"]
    )


def test_a_prompt_mixes_texts_and_ids(client, engine):
    events = generate(client, {"prompt": ["ab", 99, 100, "e"], "settings": {"max_new_tokens": 1}})
    assert engine.asked[0].ids == tuple(b"abcde") and engine.asked[0].logprobs == 10
    assert events[0][1]["texts"] == [[97, 98], [101]]
    generate(client, {"prompt": [1, 2, 3], "settings": {"max_new_tokens": 1}})
    assert engine.asked[1].ids == (1, 2, 3)


def test_an_answer_continues_a_given_beginning(client, engine):
    message = [{"role": "user", "content": "hello"}]
    generate(client, {"messages": message, "settings": {"max_new_tokens": 1}})
    generate(client, {"messages": message, "prompt": [65, 66], "settings": {"max_new_tokens": 1}})
    whole, continued = (ask.ids for ask in engine.asked)
    assert continued == (*whole, 65, 66) and b"hello" in bytes(
        token for token in whole if token < 256
    )


def test_a_missing_seed_is_drawn_and_reported(client, engine):
    seeds = [
        generate(client, {"prompt": "a", "settings": {"max_new_tokens": 1}})[0][1]["seed"]
        for _ in range(2)
    ]
    assert seeds[0] != seeds[1] and [ask.config.generation.seed for ask in engine.asked] == seeds


def test_several_samples(client):
    events = generate(client, {"prompt": "a", "settings": {"max_new_tokens": 3, "n": 2}})
    texts = [
        "".join(data["text"] for name, data in events if name == "token" and data["sample"] == s)
        for s in (0, 1)
    ]
    assert texts == [SAYS[:3], SAYS[1:4]] and events[-1][1]["finish_reasons"] == [
        "length",
        "length",
    ]


def test_fit_truncates_the_beginning_of_a_long_prompt(client, engine):
    long = "x" * 250 + "y" * 50
    assert "256" in refused(client, {"prompt": long})["message"]
    begin = generate(client, {"prompt": long, "fit": True, "settings": {"max_new_tokens": 20}})[0][
        1
    ]
    assert (begin["left_out"], begin["prompt_tokens"]) == (300 - 236, 236)
    assert engine.asked[-1].ids == tuple(long[-236:].encode())
    begin = generate(client, {"prompt": long, "fit": True, "settings": {"max_new_tokens": 1000}})[
        0
    ][1]
    assert begin["prompt_tokens"] == 128
    begin = generate(client, {"prompt": "abc", "fit": True, "settings": {"max_new_tokens": 5}})[0][
        1
    ]
    assert begin["left_out"] == 0


def test_the_numbers_of_the_router_are_reported():
    client = client_of(app(VariedEngine()))
    events = generate(
        client,
        {
            "prompt": "Nel",
            "settings": {"strategy": "entropy", "max_new_tokens": 30, "low_entropy": 0.25},
        },
    )
    router = events[0][1]["router"]
    assert (
        router["low_entropy"] == 0.25
        and router["high_entropy"] == 5.0
        and router["temperature_max"] is None
    )
    records = [record for name, data in events if name == "token" for record in data["tokens"]]
    assert len({record["strategy"] for record in records}) > 2
    assert (
        generate(client, {"prompt": "Nel", "settings": {"max_new_tokens": 1}})[0][1]["router"]
        is None
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "the body must have prompt, messages or both"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "token ids in [0, "),
        ({"prompt": [BYTES.vocab_size]}, "token ids in [0, "),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "alternatives": 21}, "alternatives must be less than or equal to 20"),
        ({"prompt": "a", "alternatives": -1}, "alternatives"),
        ({"prompt": "a", "alternatives": True}, "alternatives"),
        ({"prompt": "a", "alternatives": "3"}, "alternatives"),
        ({"prompt": "a", "fit": 1}, "fit"),
        ({"prompt": "a", "settings": []}, "settings"),
        ({"prompt": "a", "settings": {"temperature": -1}}, "generation.temperature must be"),
        ({"prompt": "a", "settings": {"temperature": True}}, "generation.temperature must be"),
        ({"prompt": "a", "settings": {"temperatur": 1}}, "did you mean generation.temperature"),
        ({"prompt": "a", "settings": {"n": 17}}, "n must be at most 16"),
        ({"prompt": "a", "settings": {"kv_calibration": "/etc/passwd"}}, "kv.calibration"),
        ({"prompt": "a", "settings": {"kv_budget": 0.5}}, "kv.budget"),
        (
            {"prompt": "a", "settings": {"router_preset": "calibrated", "strategy": "entropy"}},
            "calibrat",
        ),
        ({"prompt": "a", "temperature": 1}, "temperature"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ],
)
def test_invalid_bodies_get_one_sentence(client, engine, body, says):
    error = refused(client, body)
    assert says in error["message"] and "\n" not in error["message"]
    assert not engine.asked


def test_nonfinite_numbers_and_bodies_that_are_too_large(client):
    head = {"content-type": "application/json"}
    for text in (
        '{"prompt": "a", "settings": {"temperature": NaN}}',
        '{"prompt": "a", "settings": {"top_p": 1e400}}',
        "[]",
        "{",
    ):
        assert client.post(GENERATE, content=text, headers=head).status_code == 400
    assert (
        client.post(GENERATE, content="{}", headers={"content-type": "text/plain"}).status_code
        == 415
    )
    assert client.post(GENERATE, json={"prompt": "a" * (1 << 20)}).status_code == 413


def test_a_model_without_a_template_has_no_chats(engine):
    error = refused(client_of(make_app(engine)), {"messages": [{"role": "user", "content": "a"}]})
    assert "no chat template" in error["message"]


def test_a_full_queue_and_a_draining_engine(client, engine):
    engine.full = True
    busy = client.post(GENERATE, json={"prompt": "a"})
    assert busy.status_code == 429 and busy.headers["retry-after"] == "2"
    engine.full, engine.state = False, "draining"
    assert client.post(GENERATE, json={"prompt": "a"}).status_code == 503


def test_an_error_during_a_stream_is_an_event(client, engine):
    for failure, says in (
        (Unavailable("the engine has failed"), "the engine has failed"),
        (ValueError("secret"), "its log"),
    ):
        engine.fails = failure
        events = generate(client, {"prompt": "a"})
        assert [name for name, _ in events] == ["begin", "token", "token", "error"]
        assert says in events[-1][1]["message"] and "secret" not in json.dumps(events)


def test_a_disconnect_cancels_the_request():
    engine = FakeEngine(pause=0.02)
    with serving(app(engine)) as port, httpx.Client(base_url=f"http://localhost:{port}") as client:
        with client.stream(
            "POST", GENERATE, json={"prompt": "a", "settings": {"max_new_tokens": 200}}
        ) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("event: token"):
                pass
        until = time.monotonic() + 30
        while not engine.cancelled and time.monotonic() < until:
            time.sleep(0.01)
        assert len(engine.cancelled) == 1 and engine.cancelled[0].stats.new_tokens < 100


def test_all_paths_except_the_page_need_the_key(engine):
    client = client_of(app(engine, key="a long secret"))
    assert client.get(ABOUT).status_code == 401
    assert client.post(GENERATE, json={"prompt": "a"}).status_code == 401
    assert client.get("/").status_code == 200
    assert client.get(ABOUT, headers={"authorization": "Bearer a long secret"}).status_code == 200


def test_tools_and_reasoning_of_a_chat():
    says = (
        '<think>\nI wonder.\n</think>\n\nI look.<tool_call>{"name": "weather", "arguments":'
        ' {"city": "Rome"}}</tool_call>'
    )
    engine = FakeEngine(fake_run(4096, ignore_eos=True, max_new_tokens=len(says)), says)
    template = ChatTemplate(
        ChatTemplate.from_name("plain", BYTES).source + "{# <think></think> #}", BYTES
    )
    client = client_of(make_app(engine, Options(template=template)))
    markers = client.get(ABOUT).json()["markers"]
    assert markers["reasoning"] == {"begin": "<think>", "end": "</think>"} and markers["calls"][
        "begin"
    ] == ["<tool_call>"]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [tool],
        "reasoning_effort": "low",
    }
    (message,) = generate(client, body)[-1][1]["messages"]
    (call,) = message["tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "I wonder.")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "weather",
        {"city": "Rome"},
    )
    request = engine.asked[0]
    assert (
        request.constraint.kind == "tools"
        and request.reasoning.budget == 512
        and request.begun == 0
    )
    start = says[: says.index("ook")]
    engine.says = says[len(start) :]
    rest = {"prompt": start, "settings": {"max_new_tokens": len(engine.says)}}
    again = generate(client, body | rest)[-1][1]["messages"][0]
    assert again["content"] == "I look." and again["tool_calls"][0]["function"] == call["function"]
    assert engine.asked[1].begun == len(start) and engine.asked[1].ids == (
        *request.ids,
        *start.encode(),
    )
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    generate(client, body | {"messages": [*body["messages"], message, result]})
    assert "sunny" in BYTES.decode(engine.asked[2].ids)
    assert refused(client, {"prompt": "a", "tools": [tool]})["param"] == "tools"
    assert refused(client, body | {"tool_choice": "storm"})["param"] == "tool_choice"


def test_constraints_of_a_text(client, engine):
    for fields, kind in (
        ({"guided_regex": "[0-9]+"}, "regex"),
        ({"grammar": 'root ::= "a"'}, "gbnf"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "integer"}},
                }
            },
            "json_schema",
        ),
    ):
        generate(
            client,
            {"prompt": ["ab", 99, "de", 102], "answer_at": 1, "settings": {"max_new_tokens": 1}}
            | fields,
        )
        assert engine.asked[-1].constraint.kind == kind and engine.asked[-1].begun == 4
    assert (
        "both constrain"
        in refused(client, {"prompt": "a", "grammar": "a", "guided_regex": "b"})["message"]
    )

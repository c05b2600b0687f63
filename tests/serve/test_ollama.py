"""Tests Ollama's API: answers, streams, options, errors, and the description of the model."""

import json
import math
from datetime import datetime

import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, processors

from dantinox.generation.guides.constraints import Constraint
from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate, Tokenizer

from .fakes import BYTES, SAYS, FakeEngine, fake_run, fim_tokenizer

GENERATE, CHAT = "/api/generate", "/api/chat"
HELLO = [{"role": "user", "content": "hello"}]
SHORT = {"options": {"num_predict": 6}}
SAMPLING = {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
METRICS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    return client_of(engine)


def client_of(engine, template="plain", **options):
    template = template and ChatTemplate.from_name(template, engine.run.tokenizer)
    app = make_app(engine, Options(template=template, **options))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def whole(client, path, body):
    answer = client.post(path, json=body | {"stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def settings_of(engine):
    return engine.asked[-1].config.generation


# --- answers


def test_a_whole_answer(client, engine):
    found = whole(client, GENERATE, {"model": "fake", "prompt": "abc", "raw": True} | SHORT)
    assert (found["response"], found["done"], found["done_reason"]) == (SAYS[:6], True, "length")
    assert (
        found["model"] == "fake" and datetime.fromisoformat(found["created_at"]).tzinfo is not None
    )
    assert found.keys() >= METRICS and (found["prompt_eval_count"], found["eval_count"]) == (3, 6)
    assert all(type(found[name]) is int and found[name] >= 0 for name in METRICS)
    assert found["total_duration"] == engine_seconds(engine, found)
    assert "context" not in found  # as with raw in Ollama
    assert engine.asked[0].ids == tuple(b"abc")


def engine_seconds(engine, found):
    """The parts of the total duration add up, except for rounding to nanoseconds."""
    total = found["load_duration"] + found["prompt_eval_duration"] + found["eval_duration"]
    assert abs(total - found["total_duration"]) <= 3
    return found["total_duration"]


def test_a_stream_is_the_default(client):
    *parts, last = lines(client, GENERATE, {"prompt": "abc"} | SHORT)
    assert "".join(part["response"] for part in parts) == SAYS[:6] and len(parts) == 6
    assert all(
        part.keys() == {"model", "created_at", "response", "done"} and not part["done"]
        for part in parts
    )
    assert (last["response"], last["done"], last["done_reason"]) == (
        "",
        True,
        "length",
    ) and last.keys() >= METRICS


def test_a_conversation(client, engine):
    found = whole(client, CHAT, {"model": "fake:latest", "messages": HELLO} | SHORT)
    assert (
        found["message"] == {"role": "assistant", "content": SAYS[:6]}
        and found["model"] == "fake:latest"
    )
    *parts, last = lines(client, CHAT, {"messages": HELLO} | SHORT)
    assert "".join(part["message"]["content"] for part in parts) == SAYS[:6]
    assert last["message"] == {"role": "assistant", "content": ""} and last["done"]
    template = ChatTemplate.from_name("plain", BYTES)
    assert engine.asked[0].ids == tuple(template.encode(HELLO, generation_prompt=True))


def test_a_raw_prompt_may_name_special_tokens(client, engine):
    """A raw prompt has the form of the template already, as Ollama documents it."""
    for raw in (True, False):
        whole(client, GENERATE, {"prompt": "a<eos>b", "raw": raw} | SHORT)
        assert (BYTES.eos_id in engine.asked[-1].ids) is raw


def test_a_prompt_is_a_user_message_unless_it_is_raw(client, engine):
    template = ChatTemplate.from_name("plain", BYTES)
    whole(client, GENERATE, {"prompt": "hello", "system": "be brief"} | SHORT)
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    assert engine.asked[-1].ids == tuple(template.encode(messages, generation_prompt=True))
    without = FakeEngine()
    whole(client_of(without, None), GENERATE, {"prompt": "hello"} | SHORT)
    assert without.asked[-1].ids == tuple(b"hello")


def test_the_context_continues_an_answer(client, engine):
    first = whole(client, GENERATE, {"prompt": "a"} | SHORT)
    assert first["context"] == [*engine.asked[0].ids, *SAYS[:6].encode()]
    whole(client, GENERATE, {"prompt": "b", "context": first["context"]} | SHORT)
    template = ChatTemplate.from_name("plain", BYTES)
    turn = template.encode([{"role": "user", "content": "b"}], generation_prompt=True)
    assert turn[0] == BYTES.bos_id and engine.asked[1].ids == (
        *first["context"],
        *turn[1:],
    )  # the BOS token comes once


def test_without_a_prompt_the_model_is_reported_as_loaded(client, engine):
    for path, body in (
        (GENERATE, {}),
        (GENERATE, {"prompt": "", "keep_alive": 0}),
        (CHAT, {"messages": []}),
        (CHAT, {}),
    ):
        found = whole(client, path, body)
        assert (found["done"], found["done_reason"]) == (
            True,
            "load",
        ) and not METRICS & found.keys()
        (line,) = lines(client, path, body)
        assert line["done_reason"] == "load"
    assert not engine.asked


def test_log_probabilities(client):
    body = {"prompt": "a", "logprobs": True, "top_logprobs": 2} | SHORT
    found = whole(client, GENERATE, body)["logprobs"]
    assert [entry["token"] for entry in found] == [*SAYS[:6]]
    assert found[0]["logprob"] == math.log(0.5) and len(found[0]["top_logprobs"]) == 2
    *parts, last = lines(client, GENERATE, body)
    assert [
        entry for part in parts for entry in part["logprobs"]
    ] == found and "logprobs" not in last


# --- options


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"num_predict": 7}, {"max_new_tokens": 7}),
        ({"num_predict": 3.0}, {"max_new_tokens": 3}),
        ({"num_predict": -1}, {"max_new_tokens": 255}),
        ({"num_predict": -2, "num_ctx": 64}, {"max_new_tokens": 63}),
        ({"num_predict": -1, "num_ctx": 100_000}, {"max_new_tokens": 255}),
        (dict(SAMPLING), SAMPLING),
        ({"top_k": -1}, {"top_k": 0}),
        ({"typical_p": 0.7, "tfs_z": 0.9}, {"typical": 0.7, "tail_free": 0.9}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 32}, {"repetition_penalty": 1.2,
                                                        "repetition_range": 32}),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2,
                                                        "repetition_range": 0}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {"presence_penalty": 0.5,
            "frequency_penalty": 0.25}),
        ({"seed": 2**32 + 5}, {"seed": 5}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "", "y"]}, {"stop": ("x", "y")}),
        ({"mirostat": 2, "mirostat_tau": 4.0}, {"mirostat": 2, "mirostat_tau": 4.0}),
        ({"dry_multiplier": 0.8}, {"dry_multiplier": 0.8}),
        ({"logit_bias": {"97": 2.5}, "banned_strings": ["ab"], "banned_tokens": [98]},
         {"logit_bias": {"97": 2.5}, "banned_strings": ("ab",), "banned_tokens": (98,)}),
        ({"sampler_order": ["top_k", "temperature"]}, {"sampler_order": ("top_k", "temperature")}),
        ({"num_gpu": 99, "num_thread": 4, "use_mmap": True}, {}),
    ],
)  # fmt: skip
def test_options(client, engine, options, settings):
    whole(client, GENERATE, {"prompt": "a", "raw": True, "options": options})
    generation = settings_of(engine)
    assert {name: getattr(generation, name) for name in settings} == settings


def test_defaults_come_from_the_run():
    engine = FakeEngine(
        fake_run(temperature=0.3, greedy=True, max_new_tokens=9, repetition_penalty=1.3)
    )
    client = client_of(engine)
    whole(client, GENERATE, {"prompt": "a"})
    assert (settings_of(engine).greedy, settings_of(engine).max_new_tokens) == (True, 9)
    whole(client, GENERATE, {"prompt": "a", "options": {"temperature": 0.7, "repeat_last_n": 8}})
    generation = settings_of(engine)
    assert (generation.greedy, generation.repetition_penalty, generation.repetition_range) == (
        False,
        1.3,
        8,
    )


def test_formats(client, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, constraint in (
        ("json", Constraint("json_object", "")),
        (schema, Constraint("json_schema", json.dumps(schema))),
        ({}, Constraint("json_schema", "{}")),
        ("", None),
        (None, None),
    ):
        whole(client, CHAT, {"messages": HELLO, "format": given} | SHORT)
        assert engine.asked[-1].constraint == constraint


def test_a_long_conversation_loses_its_oldest_turns(client, engine):
    """The fewest turns are dropped; the system message and the last turn stay."""
    template = ChatTemplate.from_name("plain", BYTES)
    turns = [
        {"role": role, "content": f"{n} " + "x" * 20}
        for n in range(12)
        for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "s"}, *turns, {"role": "user", "content": "last"}]
    fitting = [
        tuple(template.encode([messages[0], *messages[1 + 2 * cut :]], generation_prompt=True))
        for cut in range(13)
    ]
    expected = next(ids for ids in fitting if len(ids) < 256)
    whole(client, CHAT, {"messages": messages, "options": {"num_predict": 1}})
    assert engine.asked[-1].ids == expected
    whole(client, CHAT, {"messages": messages, "options": {"num_predict": 1, "num_ctx": 100}})
    assert engine.asked[-1].ids == next(ids for ids in fitting if len(ids) < 100)
    answer = client.post(CHAT, json={"messages": messages, "truncate": False})
    assert (
        answer.status_code == 400
        and "maximum context length is 256 tokens" in answer.json()["error"]
    )
    answer = client.post(CHAT, json={"messages": [*HELLO, {"role": "user", "content": "x" * 300}]})
    assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]


def test_fill_in_the_middle():
    tokenizer = fim_tokenizer()
    engine = FakeEngine(fake_run(tokenizer=tokenizer), says="ab")
    client = client_of(engine, None)
    whole(client, GENERATE, {"prompt": "a", "suffix": "b"} | SHORT)
    prefix, suffix, middle, pad = (
        tokenizer.special_tokens[f"<fim_{name}>"] for name in ("prefix", "suffix", "middle", "pad")
    )
    assert engine.asked[-1].ids == (
        prefix,
        *tokenizer.encode("a"),
        suffix,
        *tokenizer.encode("b"),
        middle,
    )
    assert set(settings_of(engine).stop_token_ids) == {prefix, suffix, middle, pad}
    assert "insert" in client.post("/api/show", json={}).json()["capabilities"]


# --- errors


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (GENERATE, {"model": "llama3", "prompt": "a"}, 404,
         "this server has no model 'llama3', only 'fake'"),
        (CHAT, {"model": "fake:7b", "messages": HELLO}, 404,
         "this server has no model 'fake:7b', only 'fake'"),
        (GENERATE, {"prompt": "a", "template": "x"}, 400,
         "template is not supported by this server: remove it"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, 400,
         "images is not supported by this server: remove it"),
        (CHAT, {"messages": HELLO, "think": "huge"}, 400,
         "think must be true, false, low, medium or high, got 'huge'"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, 400,
         "tools.0 must be of type function with the field function"),
        (
            CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400,
            "messages.0.images is not supported by this server: remove it",
        ),
        (GENERATE, {"prompt": "a", "format": "xml"}, 400,
         "format must be \"json\" or a JSON schema, got 'xml'"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, 400,
         "raw and system exclude each other: remove one of them"),
        (
            GENERATE, {"prompt": "a", "suffix": "b"}, 400,
            "suffix needs a model that fills in the middle of a text: the vocabulary of this model has no fill-in-the-middle "
            "tokens",
        ),
        (GENERATE, {"prompt": "a", "top_logprobs": 3}, 400, "top_logprobs needs logprobs: true"),
        (GENERATE, {"prompt": "a", "context": [259]}, 400,
         "context must have token ids in [0, 259), got 259"),
        (GENERATE, {"prompt": "a", "options": {"num_ctx": 1}}, 400,
         "options.num_ctx must be greater than or equal to 2"),
        (GENERATE, {"prompt": "a", "options": {"num_predict": -3}}, 400,
         "options.num_predict must be greater"),
        (GENERATE, {"prompt": "a", "options": {"temperature": -1.0}}, 400,
         "options.temperature must be greater than"),
        (
            GENERATE, {"prompt": "a" * 300, "raw": True, "truncate": False}, 400,
            "this model's maximum context length is 256 tokens, and the prompt has 300: shorten it",
        ),
        ("/api/pull", {"model": "fake"}, 404, "this path does not exist: not found"),
        ("/api/tags", {}, 405, "this path accepts "),
    ],
)  # fmt: skip
def test_errors(client, path, body, status, message):
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    found = answer.json()["error"]
    assert found.startswith(message), found


def test_errors_of_the_engine(client, engine):
    engine.full = True
    answer = client.post(GENERATE, json={"prompt": "a"})
    assert answer.status_code == 503 and "queue is full" in answer.json()["error"]
    engine.full, engine.fails = False, Unavailable("the engine has failed")
    *parts, last = lines(client, CHAT, {"messages": HELLO})
    assert len(parts) == 2 and last == {"error": "the engine has failed"}
    answer = client.post(CHAT, json={"messages": HELLO, "stream": False})
    assert answer.status_code == 503 and answer.json() == {"error": "the engine has failed"}


def test_the_key(engine):
    client = client_of(engine, key="secret-key")
    answer = client.get("/api/tags")
    assert answer.status_code == 401 and answer.json().keys() == {"error"}
    assert (
        client.get("/api/tags", headers={"authorization": "Bearer secret-key"}).status_code == 200
    )


@pytest.mark.parametrize(
    ("more", "kept", "space"),
    [
        ({}, 4, 6),
        ({"num_keep": 0}, 0, 6),
        ({"num_keep": 10}, 10, 6),
        ({"num_ctx": 100}, 4, 6),
        ({"num_predict": -1}, 4, 128),
    ],
)
def test_a_long_prompt_loses_its_middle(client, engine, more, kept, space):
    """As in Ollama: the first `num_keep` tokens and the end stay. Space is left for the answer, at
    most half of the context.
    """
    prompt = "".join(chr(97 + number % 26) for number in range(300))
    found = whole(
        client, GENERATE, {"prompt": prompt, "raw": True, "options": {"num_predict": 6} | more}
    )
    size = more.get("num_ctx", 256) - space
    assert bytes(engine.asked[-1].ids).decode() == prompt[:kept] + prompt[kept - size :]
    assert found["prompt_eval_count"] == size and found["eval_count"] == space
    fitting = whole(
        client, GENERATE, {"prompt": prompt[:255], "raw": True, "options": {"num_predict": 6}}
    )
    assert (fitting["prompt_eval_count"], fitting["eval_count"]) == (255, 1)


def test_long_prompts_in_other_forms(client, engine):
    with_template = whole(client, GENERATE, {"prompt": "ab" * 200} | SHORT)
    assert with_template["prompt_eval_count"] == 250
    assert BYTES.decode(engine.asked[-1].ids).endswith("abab\n\nAssistant:\n")
    whole(client, GENERATE, {"prompt": "ab", "context": [99] * 400} | SHORT)
    assert len(engine.asked[-1].ids) == 250
    answer = client.post(GENERATE, json={"prompt": "ab" * 200, "options": {"num_keep": -1}})
    assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]


# --- embeddings


def test_embeddings(client, engine):
    found = client.post(
        "/api/embed", json={"model": "fake", "input": ["ab", "c" * 300], "options": {}}
    ).json()
    assert np.array(found["embeddings"]).shape == (2, 8) and found["prompt_eval_count"] == 2 + 256
    assert [len(row) for row in engine.embedded[0][0]] == [2, 256]  # a long text loses its end
    assert found["model"] == "fake" and found["total_duration"] >= 0
    single = client.post("/api/embed", json={"input": "ab"}).json()["embeddings"]
    assert single == found["embeddings"][:1]
    assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    old = client.post("/api/embeddings", json={"model": "fake", "prompt": "ab"}).json()
    assert old == {"embedding": single[0]}
    assert client.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
    shorter = client.post("/api/embed", json={"input": "ab", "dimensions": 2}).json()["embeddings"][
        0
    ]
    assert np.linalg.norm(shorter) == pytest.approx(1) and len(shorter) == 2
    answer = client.post("/api/embed", json={"input": "c" * 300, "truncate": False})
    assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]


@pytest.mark.parametrize("template", ["$A </s>", "<s> $A </s> </s>", "<s> $A"])
def test_a_shortened_text_keeps_its_special_tokens(template):
    """As the truncation of the library tokenizers does it."""
    core = Core(
        models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<unk>": 4}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(
        template, special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    roles = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": template.startswith("<s>")}
    engine = FakeEngine(fake_run(context=16, tokenizer=Tokenizer(core.to_str(), roles=roles)))
    texts = ["a b " * 40, "b " * 14, "a b"]
    http = client_of(engine, template=None)
    assert http.post("/api/embed", json={"input": texts}).status_code == 200
    assert http.post("/api/embeddings", json={"prompt": texts[0]}).status_code == 200
    core.enable_truncation(16)
    expected = [core.encode(text).ids for text in texts]
    assert [rows for rows, _ in engine.embedded] == [expected, expected[:1]]


# --- descriptions


def test_descriptions(client):
    (tag,) = client.get("/api/tags").json()["models"]
    assert (tag["name"], tag["model"], tag["size"]) == ("fake:latest", "fake:latest", 4_800_000)
    assert len(tag["digest"]) == 64 and tag["details"]["parameter_size"] == "1.20M"
    assert tag["details"]["quantization_level"] == "float32" and datetime.fromisoformat(
        tag["modified_at"]
    )
    (running,) = client.get("/api/ps").json()["models"]
    assert (
        running["context_length"] == 256
        and running["size_vram"] == 0
        and datetime.fromisoformat(running["expires_at"])
    )
    for body in ({"model": "fake"}, {"name": "fake:latest"}):
        shown = client.post("/api/show", json=body).json()
        assert (
            shown["model_info"]["dantinox.context_length"] == 256
            and shown["model_info"]["general.parameter_count"] == 1_200_000
        )
        assert (
            shown["capabilities"] == ["completion", "tools", "embedding"]
            and "role" in shown["template"]
        )
    assert client.post("/api/show", json={"model": "other"}).status_code == 404
    assert [int(part) for part in client.get("/api/version").json()["version"].split(".")] >= [
        0,
        6,
        4,
    ]


def test_the_models_of_openai_have_capabilities(client, engine):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["context_length"] == 256
    expected = {
        "completion": True,
        "chat": True,
        "tools": True,
        "reasoning": False,
        "fim": False,
        "embeddings": True,
        "vision": False,
    }
    assert model["capabilities"] == expected
    (model,) = client_of(engine, None).get("/v1/models").json()["data"]
    assert model["capabilities"]["chat"] is model["capabilities"]["tools"] is False
    thinks = ChatTemplate(
        ChatTemplate.from_name("plain", BYTES).source + "{# <think> </think> #}", BYTES
    )
    with TestClient(
        make_app(engine, Options(template=thinks)), base_url="http://localhost"
    ) as http:
        assert {"tools", "thinking"} <= {*http.post("/api/show", json={}).json()["capabilities"]}


def test_tools_and_thinking():
    says = (
        '<think>I wonder.</think>I look.<tool_call>{"name": "weather", "arguments": {"city":'
        ' "Rome"}}</tool_call>'
    )
    engine = FakeEngine(fake_run(context=4096, ignore_eos=True), says)
    template = ChatTemplate(ChatTemplate.from_name("plain", BYTES).source + "{# </think> #}", BYTES)
    client = TestClient(make_app(engine, Options(template=template)), base_url="http://localhost")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    earlier = {
        "role": "assistant",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bari"}}}],
    }
    body = {
        "messages": [*HELLO, earlier, {"role": "tool", "tool_name": "weather", "content": "sunny"}],
        "tools": [tool],
    }
    body |= {"think": "low", "options": {"num_predict": len(says)}}
    message = client.post(CHAT, json=body | {"stream": False}).json()["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
    assert (message["content"], message["thinking"]) == ("I look.", "I wonder.")
    assert '{"name": "weather", "arguments": {"city": "Bari"}}' in BYTES.decode(
        engine.asked[-1].ids
    )
    lines = [json.loads(line)["message"] for line in client.post(CHAT, json=body).text.splitlines()]
    assert "".join(line["content"] for line in lines) == "I look."
    assert "".join(line.get("thinking", "") for line in lines) == "I wonder."
    assert [
        line["tool_calls"][0]["function"]["name"] for line in lines if "tool_calls" in line
    ] == ["weather"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_any_media_type(client, kind):
    """litellm sends no media type, and curl, as in Ollama's documentation, that of a form."""
    bodies = {
        GENERATE: {"prompt": "x", **SHORT},
        CHAT: {"messages": HELLO, **SHORT},
        "/api/embed": {"input": "x"},
        "/api/embeddings": {"prompt": "x"},
        "/api/show": {},
    }
    headers = {} if kind is None else {"content-type": kind}
    for path, body in bodies.items():
        answer = client.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == 200, (path, answer.text)


def test_null_options_are_absent(client, engine):
    """Ollama skips null values of options."""
    options = {"num_keep": None, "num_ctx": None, "seed": None, "stop": None, "num_predict": 3}
    assert whole(client, GENERATE, {"prompt": "x", "options": options})["eval_count"] == 3

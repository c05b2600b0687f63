"""Tests of real clients against a server on a socket. `make serve-test` installs the clients (the
extra `clients`).
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dantinox.serve.app import make_app
from dantinox.serve.errors import Unavailable
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate
from tests.error_texts import ERRORS

from .fakes import BYTES, SAYS, FakeEngine, fake_run
from .sockets import serving

HELLO = [{"role": "user", "content": "hello"}]
KEY = "a-key-of-tests"


@pytest.fixture
def engine():
    return FakeEngine(fake_run(context=512))


@pytest.fixture
def url(engine):
    with serving(
        make_app(engine, Options(template=ChatTemplate.from_name("plain", BYTES), key=KEY))
    ) as port:
        yield f"http://127.0.0.1:{port}"


# --- openai


@pytest.fixture
def openai():
    return pytest.importorskip(
        "openai", reason="the client openai is not installed: make serve-test"
    )


@pytest.fixture
def client(openai, url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_openai_completes(client):
    found = client.completions.create(
        model="fake", prompt=["a", "bc"], n=2, max_tokens=6, logprobs=2, seed=3, stop=["zz"]
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in found.choices] == [
        (number, SAYS[number % 2 : number % 2 + 6], "length") for number in range(4)
    ]
    assert found.choices[0].logprobs.tokens == [*SAYS[:6]] and found.usage.completion_tokens == 24
    events = [
        *client.completions.create(
            model="fake",
            prompt="a",
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    assert "".join(event.choices[0].text for event in events[:-1]) == SAYS[:6]
    assert events[-1].choices == [] and events[-1].usage.total_tokens == 7


def test_openai_chats(client, engine):
    body = {
        "model": "fake",
        "messages": HELLO,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
    }
    found = client.chat.completions.create(**body, extra_body={"top_k": 3, "min_p": 0.1})
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        SAYS[:5],
        "length",
    )
    assert choice.logprobs.content[0].top_logprobs[0].bytes == [0]
    assert engine.asked[0].config.generation.top_k == 3
    events = [*client.chat.completions.create(**body, stream=True)]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == SAYS[:5]
    with client.chat.completions.stream(model="fake", messages=HELLO, stop=["time"]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "once upon a "


def test_openai_raises_the_errors_of_the_server(openai, client, engine, url):
    assert [model.id for model in client.models.list()] == ["fake"] and client.models.retrieve(
        "fake"
    ).id == "fake"
    with pytest.raises(openai.BadRequestError, match=ERRORS["top_p_2"]) as caught:
        client.completions.create(model="fake", prompt="a", top_p=7)
    assert caught.value.param == "top_p" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match=ERRORS["gpt_4"]):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="other").models.list()
    engine.full = True
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="fake", prompt="a")
    engine.full, engine.fails = False, Unavailable("the engine has failed")
    with pytest.raises(openai.InternalServerError, match=ERRORS["the_engine_has_failed"]):
        client.completions.create(model="fake", prompt="a")
    with pytest.raises(openai.APIError, match=ERRORS["the_engine_has_failed"]):
        [*client.chat.completions.create(model="fake", messages=HELLO, stream=True)]


def test_openai_retries(client, engine):
    """The client obeys Retry-After of a 429 response."""
    submit, left = engine.submit, [True]

    def busy_once(ask):
        engine.full = bool(left and left.pop())
        return submit(ask)

    engine.submit = busy_once
    assert (
        client.with_options(max_retries=2)
        .completions.create(model="fake", prompt="a", max_tokens=2)
        .choices[0]
        .text
        == SAYS[:2]
    )


def test_openai_embeds(openai, client):
    """The client requests base64 and decodes it."""
    found = client.embeddings.create(model="fake", input=["abc", "hello"])
    plain = client.embeddings.create(
        model="fake", input=["abc", "hello"], encoding_format="float", dimensions=8
    )
    for row, other in zip(found.data, plain.data, strict=True):
        assert row.embedding == pytest.approx(other.embedding, abs=1e-7) and len(row.embedding) == 8
        assert sum(x * x for x in row.embedding) == pytest.approx(1, abs=1e-6)
    assert found.usage.total_tokens == 8
    with pytest.raises(openai.BadRequestError, match=ERRORS["dimensions_must_be"]):
        client.embeddings.create(model="fake", input="a", dimensions=9)
    with pytest.raises(openai.BadRequestError, match=ERRORS["suffix_needs_a_model"]):
        client.completions.create(model="fake", prompt="a", suffix="b")


# --- tools and reasoning

CALL = 'I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def tool_url():
    """The address of a server whose every answer is a thought, a sentence and a tool call."""
    says = f"<think>Hm.</think>{CALL}"
    template = ChatTemplate(ChatTemplate.from_name("plain", BYTES).source + "{# </think> #}", BYTES)
    with serving(
        make_app(
            FakeEngine(fake_run(context=4096, max_new_tokens=len(says)), says),
            Options(template=template),
        )
    ) as port:
        yield f"http://127.0.0.1:{port}"


def test_openai_calls_tools(openai, tool_url):
    client = openai.OpenAI(base_url=f"{tool_url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    body = {"model": "fake", "messages": HELLO, "tools": tools}
    message = client.chat.completions.create(**body).choices[0].message
    assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Rome"},
    )
    history = [
        *HELLO,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert (
        client.chat.completions.create(**body | {"messages": history}).choices[0].message.content
        == "I look."
    )
    events = [*client.chat.completions.create(**body, stream=True)]
    parts = [part for event in events for part in event.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments or "" for part in parts) == '{"city": "Rome"}'


def test_openai_creates_responses(openai, tool_url):
    client = openai.OpenAI(base_url=f"{tool_url}/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    found = client.responses.create(model="fake", input="hello", tools=tools)
    reasoning, message, call = found.output
    assert (reasoning.content[0].text, found.output_text, call.arguments) == (
        "Hm.",
        "I look.",
        '{"city": "Rome"}',
    )
    events = [*client.responses.create(model="fake", input="hello", tools=tools, stream=True)]
    assert events[-1].response.output_text == "I look." and events[-1].type == "response.incomplete"


def test_anthropic_sends_messages(tool_url):
    anthropic = pytest.importorskip(
        "anthropic", reason="the client anthropic is not installed: make serve-test"
    )
    client = anthropic.Anthropic(base_url=tool_url, api_key="none", max_retries=0)
    body = {"model": "fake", "max_tokens": 200, "messages": HELLO}
    body["tools"] = [{"name": "weather", "description": "Looks.", "input_schema": CITY}]
    thinking, text, call = client.messages.create(**body).content[:3]
    assert (thinking.thinking, text.text, call.name, call.input) == (
        "Hm.",
        "I look.",
        "weather",
        {"city": "Rome"},
    )
    with client.messages.stream(
        **body | {"max_tokens": len(CALL) + len("<think>Hm.</think>")}
    ) as stream:
        final = stream.get_final_message()
    assert final.content[1].text == "I look." and final.content[2].input == {"city": "Rome"}
    assert client.messages.count_tokens(model="fake", messages=HELLO).input_tokens > 5
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type must be"):
        client.messages.create(**body, extra_body={"thinking": {"type": "some"}})


# --- ollama


@pytest.fixture
def ollama(url):
    library = pytest.importorskip(
        "ollama", reason="the client ollama is not installed: make serve-test"
    )
    return library, library.Client(host=url, headers={"Authorization": f"Bearer {KEY}"})


def test_ollama_generates_and_chats(ollama, engine):
    _, client = ollama
    options = {"num_predict": 6, "temperature": 0.5, "top_k": 3, "num_ctx": 4096}
    found = client.generate(model="fake", prompt="hello", options=options)
    assert (found.response, found.done, found.done_reason, found.eval_count) == (
        SAYS[:6],
        True,
        "length",
        6,
    )
    assert found.total_duration >= found.eval_duration and found.context[-6:] == [
        *SAYS[:6].encode()
    ]
    assert engine.asked[0].config.generation.top_k == 3
    parts = [*client.generate(model="fake", prompt="hello", options=options, stream=True)]
    assert "".join(part.response for part in parts) == SAYS[:6] and [
        part.done for part in parts
    ] == [False] * 6 + [True]
    answer = client.chat(
        model="fake:latest", messages=HELLO, options=options, keep_alive="5m", format="json"
    )
    assert (answer.message.role, answer.message.content) == ("assistant", SAYS[:6])
    assert engine.asked[-1].constraint.kind == "json_object"
    stream = client.chat(model="fake", messages=HELLO, options=options, stream=True, think=False)
    assert "".join(part.message.content for part in stream) == SAYS[:6]


def test_ollama_describes_and_embeds(ollama):
    library, client = ollama
    assert [model.model for model in client.list().models] == ["fake:latest"]
    assert [model.context_length for model in client.ps().models] == [512]
    shown = client.show("fake")
    assert shown.modelinfo["dantinox.context_length"] == 512 and "completion" in shown.capabilities
    found = client.embed(model="fake", input=["abc", "hello"], truncate=True)
    assert [len(row) for row in found.embeddings] == [8, 8] and found.prompt_eval_count == 8
    assert client.embeddings(model="fake", prompt="abc").embedding == found.embeddings[0]
    with pytest.raises(library.ResponseError, match=ERRORS["this_server_has_no_model"]) as caught:
        client.generate(model="llama3", prompt="a")
    assert caught.value.status_code == 404


def test_ollama_raises_errors_of_a_stream(ollama, engine):
    library, client = ollama
    engine.fails = Unavailable("the engine has failed")
    with pytest.raises(library.ResponseError, match=ERRORS["the_engine_has_failed"]):
        [*client.chat(model="fake", messages=HELLO, stream=True)]


# --- others


def test_langchain(url):
    langchain = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: make serve-test"
    )
    chat = langchain.ChatOpenAI(model="fake", base_url=f"{url}/v1", api_key=KEY, max_tokens=6)
    assert chat.invoke("hello").content == SAYS[:6]
    assert "".join(chunk.content for chunk in chat.stream("hello")) == SAYS[:6]
    llm = langchain.OpenAI(model="fake", base_url=f"{url}/v1", api_key=KEY, max_tokens=6)
    assert llm.invoke("hello") == SAYS[:6]
    assert "".join(llm.stream("hello")) == SAYS[:6]


def test_litellm(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of prices
    litellm = pytest.importorskip("litellm", reason="litellm is not installed: make serve-test")
    where = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 6}
    assert litellm.completion(messages=HELLO, **where).choices[0].message.content == SAYS[:6]
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(messages=HELLO, stream=True, **where)
    ]
    assert "".join(parts) == SAYS[:6]
    text = litellm.text_completion(prompt="a", **(where | {"model": "text-completion-openai/fake"}))
    assert text.choices[0].text == SAYS[:6]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a" * 600}], **where)


def test_llm(url, tmp_path):
    pytest.importorskip("llm", reason="llm is not installed: make serve-test")
    models = [
        {"model_id": "fake", "model_name": "fake", "api_base": f"{url}/v1", "api_key_name": "fake"}
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    (tmp_path / "keys.json").write_text(json.dumps({"fake": KEY}))
    for more in ([], ["--no-stream"]):
        command = [
            sys.executable,
            "-m",
            "llm",
            "-m",
            "fake",
            "-o",
            "max_tokens",
            "6",
            "hello",
            *more,
        ]
        where = {
            "LLM_USER_PATH": str(tmp_path),
            "PYTHONPATH": ":".join(path for path in sys.path if path),
        }
        done = subprocess.run(command, capture_output=True, text=True, env=where)
        assert done.stdout == SAYS[:6] + "\n", done.stderr


def test_lm_eval(url, monkeypatch):
    """lm-eval gets log-likelihoods of continuations, and generated texts, with the server's
    tokenizer.
    """
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: make serve-test")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    where = {"base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "auth_token": KEY}
    model = LocalCompletionsAPI(model="fake", num_concurrent=1, batch_size=4, **where)
    pairs = [("ab", "cde"), ("a", "b" * 20), ("hello wörld", " é")]
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    found = model.loglikelihood(asked)
    assert [total for total, _ in found] == pytest.approx(
        [len(after.encode()) * math.log(0.5) for _, after in pairs]
    )
    assert all(greedy for _, greedy in found)
    texts = model.generate_until(
        [Instance("generate_until", {}, ("ab", {"until": ["time"], "max_gen_toks": 30}), 0)]
    )
    assert texts == ["once upon a "]


def test_curl(url):
    """The command that the documentation shows works."""
    body = json.dumps({"prompt": "a", "max_tokens": 6})
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
    if not Path("/usr/bin/curl").exists():
        pytest.skip("curl is not installed")
    done = subprocess.run(
        ["/usr/bin/curl", "-s", f"{url}/v1/completions", *headers, "-d", body],
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["choices"][0]["text"] == SAYS[:6]

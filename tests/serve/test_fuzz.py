"""Fuzzed requests. None may cause a server error, and after them a valid request must be answered
as before.

`FUZZ=20000 pytest tests/serve/test_fuzz.py` sends 20,000 requests; the default is 400.
"""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dantinox.config.request_overlay import REQUEST_KEYS
from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.serve.protocols import ollama_bodies
from dantinox.serve.protocols.embeddings import EmbeddingBody, RerankBody
from dantinox.serve.protocols.llama_cpp import InfillBody, LlamaCompletionBody
from dantinox.serve.protocols.messages import CountBody, MessagesBody
from dantinox.serve.protocols.native import GenerateBody
from dantinox.serve.protocols.openai_bodies import ChatBody, CompletionBody
from dantinox.serve.protocols.responses import ResponsesBody
from dantinox.serve.protocols.tokenize_routes import DetokenizeBody, TokenizeBody
from dantinox.text import ChatTemplate

from . import test_kobold as kobold
from .fakes import BYTES, FakeEngine, fake_run
from .test_openai import BAD, BAD_CHAT, CHAT, HELLO, TEXT

FUZZ = int(os.environ.get("FUZZ", 150))
OPENAI = sorted({*BAD, *BAD_CHAT, *REQUEST_KEYS, "top_logprobs", "user", "guided_grammar"})
KOBOLD = sorted({*kobold.LITE, *kobold.NUMBERS, *kobold.COUNTS, "grammar", "genkey", "memory"})
OWN = sorted(GenerateBody.model_fields)
LLAMA = sorted(
    {*LlamaCompletionBody.model_fields, *InfillBody.model_fields, *REQUEST_KEYS, "n_predict"}
)
# The paths of Ollama, and those without generation → the class of the body, and a valid body.
OTHERS = {
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/v1/rerank": (RerankBody, {"query": "a", "documents": ["b"]}),
    "/api/generate": (ollama_bodies.GenerateBody, {"prompt": "a"}),
    "/api/chat": (ollama_bodies.ChatBody, {"messages": HELLO}),
    "/api/embed": (ollama_bodies.EmbedBody, {"input": "a"}),
    "/api/embeddings": (ollama_bodies.EmbeddingsBody, {"prompt": "a"}),
    "/api/show": (ollama_bodies.ModelBody, {}),
    "/v1/responses": (ResponsesBody, {"input": "a"}),
    "/v1/messages": (MessagesBody, {"max_tokens": 5, "messages": HELLO}),
    "/v1/messages/count_tokens": (CountBody, {"messages": HELLO}),
}
# Path → known fields, and the body of a valid request.
PATHS = {
    TEXT: (OPENAI, {"prompt": "a"}),
    CHAT: (OPENAI, {"messages": HELLO}),
    "/tokenize": (sorted(TokenizeBody.model_fields), {"prompt": "a"}),
    "/detokenize": (["tokens", "model"], {"tokens": [97]}),
    "/api/v1/generate": (KOBOLD, {"prompt": "a"}),
    "/api/extra/generate/stream": (KOBOLD, {"prompt": "a"}),
    "/api/extra/generate/check": (["genkey"], {}),
    "/api/extra/abort": (["genkey"], {}),
    "/api/extra/tokencount": (["prompt", "special"], {"prompt": "a"}),
    "/api/dantinox/generate": (OWN, {"prompt": "a"}),
    "/completion": (LLAMA, {"prompt": "a"}),
    "/infill": (LLAMA, {"input_prefix": "a", "input_suffix": "b"}),
    **{path: (sorted(kind.model_fields), body) for path, (kind, body) in OTHERS.items()},
}
SHAPES = {
    TEXT: CompletionBody,
    CHAT: ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
SHAPES |= {path: kind for path, (kind, _) in OTHERS.items()}
EXPECTED = {200, 400, 404, 413, 415}

names = st.text(max_size=8) | st.sampled_from([*REQUEST_KEYS])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.integers(-2, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from([*REQUEST_KEYS]), inner, max_size=4)
    ),
    max_leaves=8,
)
requests = st.sampled_from(sorted(PATHS)).flatmap(
    lambda path: st.tuples(
        st.just(path), st.dictionaries(st.sampled_from(PATHS[path][0]), values, max_size=5)
    )
)


@pytest.fixture
def http():
    """Yields a function that sends a request; at the end, a valid request must be answered as at
    the start.
    """
    engine, seen = FakeEngine(fake_run(context=48)), Counter()
    app = make_app(engine, Options(template=ChatTemplate.from_name("plain", BYTES)))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:

        def post(path, **content):
            answer = client.post(path, **content)
            seen[answer.status_code] += 1
            assert answer.status_code in EXPECTED, (path, content, answer.status_code, answer.text)

        def good():
            return [
                client.post(path, json=PATHS[path][1] | {"max_tokens": 5}).json()["choices"]
                for path in (TEXT, CHAT)
            ]

        before = good()
        yield post
        assert good() == before and not engine.tasks
        assert seen[400] >= 0.05 * seen.total(), seen


def fuzzed(share):
    """Returns hypothesis settings for a share of the requests, without a database."""
    count = max(20, int(share * FUZZ))
    return settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck]
    )


def test_fields_of_the_protocols(http):
    @fuzzed(0.5)
    @given(requests)
    def send(request):
        path, body = request
        http(path, json=PATHS[path][1] | body)

    send()


def objects(**fields):
    """Objects with some of these fields, each with a value of its strategy or with any value."""
    return st.fixed_dictionaries({}, optional={name: one | values for name, one in fields.items()})


function = objects(
    name=st.sampled_from(["a", "b c", "weather"]),
    parameters=values,
    strict=st.booleans(),
    arguments=st.text(max_size=9),
)
chat_tool = objects(type=st.just("function"), function=function)
call = objects(type=st.just("function"), id=st.text(max_size=4), function=function)
role = st.sampled_from(["system", "user", "assistant", "tool"])
chat_message = objects(
    role=role, content=st.text(max_size=9), tool_calls=st.lists(call, max_size=2)
)
block_types = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])
block = objects(
    type=block_types,
    text=st.text(max_size=9),
    name=st.text(max_size=4),
    input=values,
    content=values,
    id=values,
)
message = objects(
    role=st.sampled_from(["user", "assistant"]),
    content=st.lists(block, max_size=3) | st.text(max_size=9),
)
item_types = st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])
item = objects(
    type=item_types,
    role=role,
    content=st.text(max_size=9) | st.lists(block, max_size=2),
    output=values,
    call_id=values,
)
choices = st.sampled_from(["auto", "none", "required"]) | objects(
    type=st.sampled_from(["function", "any", "tool"]), name=values
)
# Path → the fields of a conversation with tools.
CONVERSATIONS = {
    CHAT: objects(
        messages=st.lists(chat_message, max_size=3),
        tools=st.lists(chat_tool, max_size=2),
        tool_choice=choices,
    ),
    "/v1/responses": objects(
        input=st.lists(item, max_size=3), tools=st.lists(function, max_size=2), tool_choice=choices
    ),
    "/v1/messages": objects(
        messages=st.lists(message, max_size=3),
        tools=st.lists(objects(name=st.text(max_size=4), input_schema=values), max_size=2),
        tool_choice=choices,
        thinking=objects(
            type=st.sampled_from(["enabled", "disabled"]), budget_tokens=st.integers(-1, 9)
        ),
    ),
    "/api/chat": objects(
        messages=st.lists(chat_message, max_size=3),
        tools=st.lists(chat_tool, max_size=2),
        think=values,
    ),
}


def test_conversations_with_tools(http):
    @fuzzed(0.4)
    @given(
        st.sampled_from(sorted(CONVERSATIONS)).flatmap(
            lambda path: st.tuples(st.just(path), CONVERSATIONS[path])
        )
    )
    def send(request):
        path, body = request
        http(path, json=PATHS[path][1] | body)

    send()


def test_bodies_that_are_not_json(http):
    headers = {"content-type": "application/json"}

    @fuzzed(0.1)
    @given(
        st.sampled_from(sorted(PATHS)),
        st.binary(max_size=60) | st.text('{}[]",:0e9tfn\\u ', max_size=40).map(str.encode),
    )
    def send(path, content):
        http(path, content=content, headers=headers)

    send()


def test_schemathesis(http):
    """Bodies generated from the schemas of the server."""
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: make serve-test"
    )
    answers = {"200": {"description": "good"}}
    paths = {
        path: {"post": {"requestBody": _body(shape), "responses": answers}}
        for path, shape in SHAPES.items()
    }
    schema = schemathesis.openapi.from_dict(
        {"openapi": "3.1.0", "info": {"title": "x", "version": "1"}, "paths": paths}
    )
    for path in SHAPES:

        @fuzzed(0.4 / len(SHAPES))
        @given(case=schema[path]["POST"].as_strategy())
        def send(case):
            http(case.path, json=case.body if isinstance(case.body, dict) else {})

        send()


def _body(model):
    schema = model.model_json_schema(by_alias=True)
    names = schema.pop("$defs", {})

    def inline(part):
        if isinstance(part, dict):
            if "$ref" in part:
                return inline(names[part["$ref"].rpartition("/")[2]])
            return {name: inline(value) for name, value in part.items()}
        return [inline(value) for value in part] if isinstance(part, list) else part

    return {"required": True, "content": {"application/json": {"schema": inline(schema)}}}

"""Tests that an answer continues the last message if that is of the assistant, in every protocol
with conversations.
"""

import json

import pytest
from starlette.testclient import TestClient

from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import BYTES, FakeEngine, fake_run

TEMPLATE = """\
{%- for message in messages %}{{ '<' + message.role + '>' + message.content + '</>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
THINKING = (
    TEMPLATE + "{# <think> </think> #}"
)  # the notation of reasoning is found in the source of the template
USER = {"role": "user", "content": "Name a color"}
BEGUN = {"role": "assistant", "content": "A primary color is"}
PROMPT = "<user>Name a color</><assistant>A primary color is"
NEW_TURN = PROMPT + "</><assistant>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT, ANTHROPIC, OLLAMA, RESPONSES = (
    "/v1/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/v1/responses",
)
NATIVE = "/api/dantinox/generate"
BODIES = {
    CHAT: {"max_tokens": 6},
    ANTHROPIC: {"max_tokens": 6},
    OLLAMA: {"options": {"num_predict": 6}, "stream": False},
    RESPONSES: {"max_output_tokens": 16},
    NATIVE: {"settings": {"max_new_tokens": 6}},
}


@pytest.fixture
def engine():
    return FakeEngine(fake_run(context=2048), says=" blue.")


def post(engine, path, messages=(USER, BEGUN), template=TEMPLATE, **more):
    app = make_app(engine, Options(template=ChatTemplate(template, BYTES)))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        field = "input" if path == RESPONSES else "messages"
        return client.post(path, json={field: [*messages], **BODIES[path], **more})


def prompt_of(engine):
    return BYTES.decode(engine.asked[-1].ids)


@pytest.mark.parametrize("template", [TEMPLATE, THINKING])
@pytest.mark.parametrize("path", BODIES)
def test_the_answer_continues_the_message(engine, path, template):
    answer = post(engine, path, template=template)
    assert answer.status_code == 200, answer.text
    assert prompt_of(engine) == PROMPT
    assert '" blue.' in answer.text or path == NATIVE  # the space before the first word stays


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_a_reply_with_tools_keeps_its_first_space(engine, path):
    answer = post(engine, path, tools=[TOOL])
    assert answer.status_code == 200 and '" blue.' in answer.text
    assert prompt_of(engine).endswith("<assistant>A primary color is")


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_to_a_user_is_a_new_message(engine, path):
    assert post(engine, path, [USER]).status_code == 200
    assert prompt_of(engine) == "<user>Name a color</><assistant>"


@pytest.mark.parametrize("path", BODIES)
def test_an_empty_last_message_is_the_beginning_of_the_answer(engine, path):
    assert post(engine, path, [USER, {"role": "assistant", "content": ""}]).status_code == 200
    assert prompt_of(engine) == "<user>Name a color</><assistant>"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"continue_final_message": True}, PROMPT),
        ({"continue_final_message": True, "add_generation_prompt": False}, PROMPT),
        ({"add_generation_prompt": False}, PROMPT),
        ({"continue_final_message": False}, NEW_TURN),
        ({"add_generation_prompt": True}, NEW_TURN),
    ],
)
def test_the_fields_of_vllm(engine, fields, prompt):
    assert post(engine, CHAT, **fields).status_code == 200
    assert prompt_of(engine) == prompt


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        (
            CHAT,
            {"continue_final_message": True, "messages": [USER]},
            "needs a last message that is of the assistant",
        ),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "must be the opposite",
        ),
        (CHAT, {"response_format": {"type": "json_object"}}, "continues the last message"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "continues the last message"),
        (
            ANTHROPIC,
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "continues the last message",
        ),
        (OLLAMA, {"format": "json"}, "continues the last message"),
    ],
)
def test_contradictions(engine, path, more, words):
    answer = post(engine, path, **more)
    assert answer.status_code == 400 and words in json.dumps(answer.json())


def test_a_message_with_tool_calls_is_complete(engine):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert post(engine, CHAT, [USER, BEGUN | {"tool_calls": [call]}]).status_code == 200
    assert prompt_of(engine).endswith("</><assistant>")

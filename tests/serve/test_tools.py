"""Tests tools and reasoning in the OpenAI and Anthropic protocols: prompts, constraints, whole and
streamed replies, errors.
"""

import json
import threading
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from dantinox.serve.app import make_app
from dantinox.serve.errors import RequestError
from dantinox.serve.options import Options
from dantinox.serve.protocols import tool_chat
from dantinox.serve.protocols.responses import input_messages
from dantinox.text import ChatTemplate
from dantinox.text.tool_grammars import Tool

from .fakes import BYTES, FakeEngine, fake_run

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Looks.", "parameters": SCHEMA},
}
STOP = {"type": "function", "function": {"name": "stop"}}
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city":'
    ' "Rome"}}\n</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'
)
REPLY = f"<think>\nI wonder.\n</think>\n\nI look. {CALLS}"
TOOLS_TEMPLATE = r"""{% if tools %}{{ tools | tojson + '\n' }}{% endif %}
{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls %}
<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}assistant:{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}
{{ "\n" }}{% endif %}
{% if open %}<think>{% endif %}{# </think> #}"""
HELLO = [{"role": "user", "content": "hello"}]


def serve(says=REPLY, template="plain", **options):
    """Returns a client, and the engine that answers with `says`."""
    engine = FakeEngine(
        fake_run(context=8192, ignore_eos=True, max_new_tokens=len(says.encode())), says
    )
    if template == "plain":
        found = ChatTemplate.from_name("plain", BYTES)
        found = ChatTemplate(found.source + "{# <think></think> #}", BYTES)
    else:
        found = ChatTemplate(template, BYTES)
    app = make_app(engine, Options(template=found, **options))
    return SimpleNamespace(
        client=TestClient(app, base_url="http://localhost", raise_server_exceptions=False),
        engine=engine,
    )


def post(server, path, body, status=200):
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(server, path, body):
    text = server.client.post(path, json=body | {"stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def prompt_of(server):
    return BYTES.decode(server.engine.asked[-1].ids)


def test_schemas_of_tools_are_processed_on_a_thread(monkeypatch):
    """Their grammars can take a second, for which the event loop must not wait."""
    threads = []

    def recorded(function):
        def call(*args, **more):
            threads.append(threading.current_thread().name)
            return function(*args, **more)

        return call

    monkeypatch.setattr(tool_chat, "tool_grammars", recorded(tool_chat.tool_grammars))
    monkeypatch.setattr(Tool, "merged_schema", property(recorded(Tool.merged_schema.fget)))
    post(serve(), CHAT, {"messages": HELLO, "tools": [WEATHER]})
    assert len(threads) >= 2 and all(name.startswith("requests") for name in threads)


# --- chat completions


def test_a_chat_completion_with_reasoning_and_calls():
    server = serve()
    found = post(server, CHAT, {"messages": HELLO, "tools": [WEATHER, STOP]})
    (choice,) = found["choices"]
    message = choice["message"]
    assert message["content"] == "I look." and message["reasoning_content"] == "I wonder."
    functions = [
        (call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in message["tool_calls"]
    ]
    assert functions == [("function", "weather", '{"city": "Rome"}'), ("function", "stop", "{}")]
    assert (
        len({call["id"] for call in message["tool_calls"]}) == 2
        and choice["finish_reason"] == "length"
    )


def test_a_streamed_chat_completion():
    events = events_of(
        serve(), CHAT, {"messages": HELLO, "tools": [WEATHER, STOP], "logprobs": True}
    )
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I wonder."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in starts] == [
        (0, "weather"),
        (1, "stop"),
    ]
    arguments = [
        "".join(call["function"].get("arguments", "") for call in calls if call["index"] == index)
        for index in (0, 1)
    ]
    assert arguments == ['{"city": "Rome"}', "{}"]
    tokens = [
        entry["token"]
        for event in events
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(tokens) == REPLY


def test_without_tools_a_call_is_text_and_reasoning_is_separate():
    message = post(serve(), CHAT, {"messages": HELLO})["choices"][0]["message"]
    assert message["content"] == f"I look. {CALLS}" and "tool_calls" not in message
    message = post(serve(), CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"})[
        "choices"
    ][0]["message"]
    assert message["content"] == f"I look. {CALLS}"


def test_the_default_prompt_describes_the_tools_and_their_results():
    server = serve()
    call = {
        "id": "a1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    results = [
        {"role": "tool", "tool_call_id": "a1", "content": result} for result in ("sunny", "warm")
    ]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, *results]
    post(server, CHAT, {"messages": messages, "tools": [WEATHER]})
    prompt = prompt_of(server)
    assert json.dumps(WEATHER) in prompt and prompt.startswith("System:\nYou can call functions")
    assert (
        'Assistant:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        in prompt
    )
    both = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert f"User:\n{both}" in prompt and "Tool:" not in prompt


def test_a_template_with_tools_gets_them():
    server = serve(template=TOOLS_TEMPLATE)
    call = {
        "id": "a1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "<eos> \\" Rome"}'},
    }
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": 'a <eos> "b"', "parameters": SCHEMA},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    post(server, CHAT, {"messages": messages, "tools": [tool], "reasoning_effort": "none"})
    assert (
        prompt_of(server) == f'{json.dumps([tool])}\nuser: hello\nassistant: <tool_call><eos> "'
        " Rome</tool_call>\ntool: sunny\nassistant: False\n"
    )
    assert BYTES.eos_id not in server.engine.asked[-1].ids


def test_constraints_of_tool_calls():
    server = serve()
    for choice, parallel, after, repeats in (
        ("auto", True, ("<tool_call>",), True),
        ("auto", False, ("<tool_call>",), False),
        ("required", True, (), False),
        ({"type": "function", "function": {"name": "weather"}}, True, (), False),
    ):
        body = {
            "messages": HELLO,
            "tools": [WEATHER, STOP],
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
        }
        post(server, CHAT, body)
        constraint = server.engine.asked[-1].constraint
        assert (
            constraint.kind == "tools"
            and constraint.after == after
            and constraint.repeats is repeats
        )
        assert ("stop" in constraint.source) == isinstance(choice, str)
    opened = serve(template=TOOLS_TEMPLATE)
    shared = {"messages": HELLO, "chat_template_kwargs": {"open": True}}
    post(opened, CHAT, shared | {"tools": [WEATHER], "tool_choice": "required"})
    assert opened.engine.asked[-1].constraint.after == ("</think>",)
    post(opened, CHAT, shared | {"response_format": {"type": "json_object"}, "reasoning_budget": 9})
    request = opened.engine.asked[-1]
    assert (request.constraint.kind, request.constraint.after) == ("json_object", ("</think>",))
    assert request.reasoning.is_open and request.reasoning.budget == 9
    assert BYTES.decode(request.reasoning.closing) == "\n</think>\n\n"


def test_reasoning_effort_is_a_budget_for_templates_without_the_variable():
    for body, budget in (
        ({}, None), ({"reasoning_effort": "low"}, 512), ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "low", "thinking_token_budget": 7}, 7),
    ):  # fmt: skip
        server = serve()
        post(server, CHAT, {"messages": HELLO} | body)
        assert server.engine.asked[-1].reasoning.budget == budget


ERRORS = [
    ({"tools": [{"type": "web_search"}]},
     "tools.0 must be of type function with the field function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools.0.function.name must have 1 to 128 characters"),
    ({"tools": [STOP, STOP]}, "tools.1.function.name 'stop' occurs twice"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
     "must be a JSON schema of"),
    ({"tools": [WEATHER] * 129}, "tools must have at most 128 entries, got 129"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "b"}}},
     "tool_choice names the tool 'b'"),
    ({"tools": [WEATHER], "tool_choice": "some"},
     "tool_choice must be auto, none, required or a function with its name"),
    ({"tool_choice": "required"}, "tool_choice: required needs tools"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}},
     "response_format cannot be combined with tools"),
    ({"reasoning_effort": "huge"},
     "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, got 'huge'"),
    ({"reasoning_budget": -1}, "reasoning_budget must be greater than or equal to 0"),
    ({"chat_template_kwargs": {"messages": []}},
     "a variable of the chat template must not have the name 'messages'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a",
        "arguments": "["}}]}]}, "arguments must be"),
]  # fmt: skip


NAMED = [
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"guided_regex": "a"}, "guided_regex"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (CHAT, {"grammar": 'root ::= "a"'}, "grammar"),
    (
        MESSAGES,
        {"max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format",
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        "text.format",
    ),
]


def tool_for(path, function):
    """Returns the definition of a tool in the format of a protocol."""
    if path == CHAT:
        return {"type": "function", "function": function}
    if path == RESPONSES:
        return {"type": "function", **function}
    return {
        "name": function.get("name"),
        "input_schema": function.get("parameters", {"type": "object"}),
    }


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize(("path", "body", "name"), NAMED)
def test_a_constraint_beside_tools_is_refused_under_the_name_of_the_sender(
    path, body, name, required
):
    choice = ({"type": "any"} if path == MESSAGES else "required") if required else {"type": "auto"}
    body = body | {
        "input" if path == RESPONSES else "messages": HELLO,
        "tools": [tool_for(path, STOP["function"])],
    }
    error = post(serve(), path, body | ({"tool_choice": choice} if required else {}), status=400)[
        "error"
    ]
    assert name in error["message"].split() and error.get("param", name) == name
    assert name == "response_format" or "response_format" not in error["message"]


@pytest.mark.parametrize(
    ("path", "name_field", "schema_field"),
    [
        (CHAT, "tools.0.function.name", "tools.0.function.parameters"),
        (RESPONSES, "tools.0.name", "tools.0.parameters"),
        (MESSAGES, "tools.0.name", "tools.0.input_schema"),
    ],
)
def test_names_and_schemas_of_tools(path, name_field, schema_field):
    def status(function):
        body = {"max_tokens": 5} if path == MESSAGES else {}
        body |= {
            "input" if path == RESPONSES else "messages": HELLO,
            "tools": [tool_for(path, function)],
        }
        answer = serve().client.post(path, json=body)
        return answer.status_code, (
            answer.json().get("error", {}).get("message") if answer.status_code == 400 else None
        )

    for name in ("2d_plot", "a-b", "get.it", "_", "A" * 64, "A" * 128):
        assert status({"name": name}) == (200, None)
    for name in ("a b", "", "A" * 129, "é", "a/b"):
        code, message = status({"name": name})
        assert code == 400 and message.startswith(
            f"{name_field} must have 1 to 128 characters of a-z, A-Z, 0-9, _, - and ."
        )
    code, message = status({"name": "a", "parameters": {"type": "array"}})
    assert code == 400 and message.startswith(
        f"{schema_field} must be a JSON schema of type object"
    )
    assert status({"name": "a", "parameters": {"type": ["object", "null"]}}) == (200, None)


@pytest.mark.parametrize(("body", "says"), ERRORS, ids=range(len(ERRORS)))
def test_wrong_fields_are_named(body, says):
    error = post(serve(), CHAT, {"messages": HELLO} | body, status=400)["error"]
    assert says in error["message"] and "\n" not in error["message"]


# --- /v1/responses


def test_a_response_has_items():
    server = serve()
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    found = post(
        server, RESPONSES, {"input": "hello", "instructions": "Be brief.", "tools": [tool]}
    )
    reasoning, message, *calls = found["output"]
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I wonder."}]
    assert message["content"][0]["text"] == "I look." and message["role"] == "assistant"
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("weather", '{"city": "Rome"}'),
        ("stop", "{}"),
    ]
    assert found["usage"]["output_tokens"] == len(REPLY) and prompt_of(server).startswith(
        "System:\nBe brief.\n\nYou can call"
    )


@pytest.mark.parametrize("says", [REPLY, f"I look. {CALLS} Then é.", "é"])
def test_logprobs_of_a_message_are_those_of_its_text(says):
    """Not those of the reasoning and the calls before it, whole and in a stream."""
    body = {
        "input": HELLO,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "include": ["message.output_text.logprobs"],
    }
    items = post(serve(says), RESPONSES, body)["output"]
    parts = [item["content"][0] for item in items if item["type"] == "message"]
    events = [
        e for e in events_of(serve(says), RESPONSES, body) if "output_text.delta" in e["type"]
    ]
    streamed = [entry for event in events for entry in event["logprobs"]]
    whole = [entry for part in parts for entry in part["logprobs"]]
    for entries in (whole, streamed):
        text = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
        assert text.split() == "".join(part["text"] for part in parts).split()


def test_the_events_of_a_response_build_its_items():
    body = {
        "input": HELLO,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    }
    events = events_of(serve(), RESPONSES, body)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    items, texts = {}, {}
    for event in events:
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            items[index], texts[index] = event["item"]["id"], ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == items[index]
            texts[index] += event["delta"]
        elif event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts[index]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == texts[index]
    assert [*texts.values()] == ["I wonder.", "I look.", '{"city": "Rome"}', "{}"]
    final = events[-1]
    assert final["type"] == "response.incomplete" and [
        item["id"] for item in final["response"]["output"]
    ] == [*items.values()]


def test_items_of_the_input_become_messages():
    server = serve(template=TOOLS_TEMPLATE)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {
            "type": "function_call",
            "call_id": "1",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
        },
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ]
    post(server, RESPONSES, {"input": items})
    assert (
        prompt_of(server)
        == "user: a\nassistant: c<tool_call>Rome</tool_call>\ntool: sunny\nassistant:\n"
    )


def test_every_message_after_a_reasoning_item_is_kept():
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f"}
    first, second = ({"role": "assistant", "content": text} for text in "bc")
    texts = [message["content"] for message in input_messages([reasoning, first, second])]
    assert texts == ["b", "c"]
    (message,) = input_messages([reasoning, call, first])
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == (
        "a",
        "b",
        1,
    )


def test_a_message_of_the_input_needs_a_role():
    with pytest.raises(
        RequestError, match=r"input\.1\.role must be user, assistant, system or developer, got null"
    ):
        input_messages([{"type": "function_call"}, {"content": ""}])


@pytest.mark.parametrize("content", [5, True, "why", {"type": "reasoning_text"}])
def test_the_content_of_a_reasoning_item_is_a_list(content):
    with pytest.raises(
        RequestError, match=r"input\.0\.content must be a list of parts of type reasoning_text, got"
    ):
        input_messages([{"type": "reasoning", "content": content}])
    assert input_messages([{"type": "reasoning", "content": None}])[0]["reasoning_content"] == ""


def test_responses_are_kept_only_if_the_server_keeps_them():
    server = serve()
    first = post(server, RESPONSES, {"input": "hello"})
    assert first["store"] is False
    error = post(
        server, RESPONSES, {"input": "x", "previous_response_id": first["id"]}, status=404
    )["error"]
    assert "start it with --store_responses" in error["message"]
    server = serve("fine", stored_responses=2)
    first = post(server, RESPONSES, {"input": "hello", "instructions": "Be brief."})
    second = post(server, RESPONSES, {"input": "and you?", "previous_response_id": first["id"]})
    assert (
        prompt_of(server) == "User:\nhello\n\nAssistant:\nfine\n\nUser:\nand you?\n\nAssistant:\n"
    )
    assert server.client.get(f"{RESPONSES}/{first['id']}").json() == first
    assert post(server, RESPONSES, {"input": "x", "store": False})["store"] is False
    post(server, RESPONSES, {"input": "y"})
    assert server.client.get(f"{RESPONSES}/{first['id']}").status_code == 404
    assert server.client.delete(f"{RESPONSES}/{second['id']}").json()["deleted"] is True
    assert server.client.get(f"{RESPONSES}/{second['id']}").status_code == 404


@pytest.mark.parametrize("instructions", ["", None])
def test_empty_instructions_are_no_message(instructions):
    server = serve("fine", stored_responses=2)
    first = post(server, RESPONSES, {"input": "hello", "instructions": instructions})
    second = post(
        server,
        RESPONSES,
        {"input": "and you?", "previous_response_id": first["id"], "instructions": instructions},
    )
    post(
        server,
        RESPONSES,
        {"input": "x", "previous_response_id": second["id"], "instructions": "Be brief."},
    )
    turns = (
        "User:\nhello\n\nAssistant:\nfine\n\nUser:\nand"
        " you?\n\nAssistant:\nfine\n\nUser:\nx\n\nAssistant:\n"
    )
    assert prompt_of(server) == "System:\nBe brief.\n\n" + turns


def test_a_continued_message_is_kept_as_one():
    server = serve("fine", stored_responses=2)
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am "}]
    first = post(server, RESPONSES, {"input": begun})
    post(server, RESPONSES, {"input": "x", "previous_response_id": first["id"]})
    assert prompt_of(server) == "User:\nhello\n\nAssistant:\nI am fine\n\nUser:\nx\n\nAssistant:\n"


# --- /v1/messages


def anthropic_tool(strict=None):
    return {"name": "weather", "description": "Looks.", "input_schema": SCHEMA}


def test_a_message_has_blocks():
    server = serve()
    body = {
        "max_tokens": 500,
        "system": "Be brief.",
        "messages": HELLO,
        "tools": [anthropic_tool()],
    }
    found = post(server, MESSAGES, body)
    thinking, text, *calls = found["content"]
    assert (thinking["thinking"], text["text"]) == ("I wonder.", "I look.")
    assert [(call["type"], call["name"], call["input"]) for call in calls[:2]] == [
        ("tool_use", "weather", {"city": "Rome"}), ("tool_use", "stop", {})
    ]  # fmt: skip
    assert (
        found["type"] == "message"
        and found["usage"]["output_tokens"] == 500
        and found["stop_reason"] == "max_tokens"
    )
    assert post(server, f"{MESSAGES}/count_tokens", body | {"max_tokens": None})[
        "input_tokens"
    ] == len(server.engine.asked[-1].ids)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_constrains_the_answer(field):
    server, form = serve(), {"type": "json_schema", "schema": {"type": "array"}}
    post(
        server,
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": HELLO,
            field: {"format": form} if field == "output_config" else form,
        },
    )
    constraint = server.engine.asked[-1].constraint
    assert (constraint.kind, constraint.source) == ("json_schema", '{"type": "array"}')


def test_stop_reasons():
    assert (
        post(
            serve("abc ENDx"),
            MESSAGES,
            {"max_tokens": 9, "messages": HELLO, "stop_sequences": ["END"]},
        )["stop_reason"]
        == "stop_sequence"
    )
    found = post(
        serve("abc ENDx"), MESSAGES, {"max_tokens": 9, "messages": HELLO, "stop_sequences": ["x"]}
    )
    assert (found["stop_sequence"], found["content"]) == (
        "x",
        [{"type": "text", "text": "abc END"}],
    )
    assert (
        post(serve("abc"), MESSAGES, {"max_tokens": 2, "messages": HELLO})["stop_reason"]
        == "max_tokens"
    )


def test_the_events_of_a_message_build_its_blocks():
    events = events_of(
        serve(),
        MESSAGES,
        {"max_tokens": len(REPLY), "messages": HELLO, "tools": [anthropic_tool()]},
    )
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = [event["content_block"]["type"], "", False]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert not blocks[event["index"]][2]
            blocks[event["index"]][1] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            )
        elif event["type"] == "content_block_stop":
            blocks[event["index"]][2] = True
    assert [*blocks.values()] == [
        ["thinking", "I wonder.", True], ["text", "I look.", True],
        ["tool_use", '{"city": "Rome"}', True],
        ["tool_use", "{}", True],
    ]  # fmt: skip


def test_blocks_of_the_input_become_messages():
    server = serve(template=TOOLS_TEMPLATE)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "b", "signature": ""}, {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text",
                "text": "sunny"}]},
            {"type": "text", "text": "d"},
        ]},
    ]  # fmt: skip
    body = {
        "max_tokens": 5,
        "messages": messages,
        "tools": [anthropic_tool()],
        "tool_choice": {"type": "any"},
    }
    post(server, MESSAGES, body | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    prompt = prompt_of(server).split("\n", 1)[1]
    assert (
        prompt
        == "user: a\nassistant: c<tool_call>Rome</tool_call>\ntool: sunny\nuser: d\nassistant:"
        " True\n"
    )
    request = server.engine.asked[-1]
    assert request.reasoning.budget == 1024 and request.constraint.after == ()


def test_errors_have_the_format_of_the_protocol():
    for body, says in (
        ({"messages": HELLO}, "max_tokens is missing"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages.0.content.0.type must"),
        ({"max_tokens": 5, "messages": HELLO, "tools": [{"type": "web_search_20250305",
                                                         "name": "a"}]}, "tools.0 must be a"),
        ({"max_tokens": 5, "messages": HELLO, "tool_choice": {"type": []}},
         "tool_choice.type must be auto, any,"),
        ({"max_tokens": 5, "messages": HELLO, "output_config": {"effort": {}}},
         "output_config.effort must be one of none"),
        ({"max_tokens": 5, "messages": HELLO, "tool_choice": {"type": "x"}},
         "tool_choice.type must be auto, any,"),
        ({"max_tokens": 5, "messages": HELLO, "thinking": {"type": "enabled",
                                                           "budget_tokens": "9"}}, "budget_tokens"),
    ):  # fmt: skip
        found = post(serve(), MESSAGES, body, status=400)
        assert (
            found["type"] == "error"
            and found["error"]["type"] == "invalid_request_error"
            and says in found["error"]["message"]
        )

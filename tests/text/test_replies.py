"""Tests the parsers of replies: each notation of tool calls, reasoning, any split of the text, and
text that is no call.
"""

import itertools
import json
import random

import pytest

from dantinox.config import TokenizerSection
from dantinox.files import UserError
from dantinox.text import ChatTemplate, train_tokenizer
from dantinox.text.reply_formats import REASONING, TOOL_FORMATS, find_tool_format, reply_format
from dantinox.text.reply_parser import is_reasoning_open, make_parser

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "stop": {},
}
WEATHER, STOP = ("weather", {"city": 'Paris "</tool_call>" {', "days": 3}), ("stop", {})
ARGUMENTS = json.dumps(WEATHER[1])
THINK = REASONING[-1]

# Notation → a reply with text before two calls, in which each family writes them.
REPLIES = {
    "hermes": f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "stop"}\n</tool_call>',
    "qwen_xml": "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis \"</tool_call\" {\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "mistral": f'I look.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]',
    "mistral_args": f"I look.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[CALL_ID]123456789[ARGS]{{}}",
    "granite": f'I look.<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]',
    "gemma": 'I look.<|tool_call>call:weather{city:<|"|>Paris "</tool_call>" {<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:stop{}<tool_call|>",
    "functiongemma": "I look.<start_function_call>call:weather{city:<escape>Paris \"</tool_call>\" {<escape>,days:3}"
    "<end_function_call><start_function_call>call:stop{}<end_function_call>",
    "harmony": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|end|>"
    "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}",
    "llama": f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"type": "function", "function": {{"name": "stop"}}}}',
    "pythonic": "[weather(city='Paris \"</tool_call>\" {', days=3), stop()]",
}  # fmt: skip


def form_of(name, reasoning=THINK):
    form = reply_format(None, BYTES, name)
    return form if name == "harmony" else form._replace(reasoning=reasoning)


def parsed(parser, pieces):
    """Returns answer, reasoning and calls (name, arguments as text)."""
    text, calls = {"content": "", "reasoning": ""}, []
    for part in itertools.chain(*(parser.push(piece) for piece in pieces), parser.finish()):
        if part.kind == "call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
        else:
            text[part.kind] += part.text
    return text["content"], text["reasoning"], [(name, arguments) for name, arguments in calls]


def pieces_of(text, draw):
    cuts = sorted(draw.sample(range(len(text) + 1), draw.randint(0, min(len(text), 40))))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_found_in_any_split(name):
    draw, reply = random.Random(1), REPLIES[name]
    splits = [[reply], list(reply), *(pieces_of(reply, draw) for _ in range(30))]
    expected_city = (
        WEATHER[1] if name != "qwen_xml" else WEATHER[1] | {"city": 'Paris "</tool_call" {'}
    )
    for split in splits:
        content, reasoning, calls = parsed(make_parser(form_of(name), SCHEMAS), split)
        assert [(call, json.loads(arguments)) for call, arguments in calls] == [
            ("weather", expected_city),
            STOP,
        ]
        assert content == ("" if name in ("llama", "pythonic") else "I look.") and reasoning == ""


def test_json_arguments_are_passed_on_character_by_character():
    parser = make_parser(form_of("hermes"), SCHEMAS)
    head = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa'
    parts = [part for character in head for part in parser.push(character)]
    assert [part.text for part in parts] == ["weather", *'{"city": "Pa']


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}',
        '{"type":"function","function":{"name":"weather","arguments":{"city":"Rome"}}}',
        '[{"name": "weather", "arguments": {"city": "Rome"}}]',
        '{"arguments": {"city": "Rome"}, "id": "x", "name": "weather"}',
        '{ "name" : "weather" , "parameters" : {"city": "Rome"} }',
    ],
)
def test_variants_of_json_calls(call):
    content, _, calls = parsed(
        make_parser(form_of("hermes"), SCHEMAS), [f"<tool_call>{call}</tool_call>"]
    )
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "Rome"})
    ]


def test_a_name_that_is_nested_too_deeply_is_no_call():
    reply = '<tool_call>{"name": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>"
    content, _, calls = parsed(make_parser(form_of("hermes"), SCHEMAS), [reply])
    assert calls == [] and content == reply


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_text_that_is_no_call_is_the_answer(name):
    form = form_of(name)
    begin, end = form.tools.begin_markers[0], form.tools.end
    for reply in (
        f"Use {begin} nothing {end}",
        f"a {begin}",
        "plain [text] {with} brackets",
        "[1, 2]",
        '{"answer": 1}',
        "<th",
    ):
        if name == "mistral_args" and begin in reply:
            continue  # the text up to [ARGS] is the name of a tool, so the calls end with the reply
        for split in ([reply], list(reply)):
            content, reasoning, calls = parsed(make_parser(form, SCHEMAS), split)
            assert (
                "".join(content.split()) == "".join(reply.split())
                and reasoning == ""
                and calls == []
            )


def test_markers_are_ordinary_text_without_tools():
    for name, reply in REPLIES.items():
        if name != "harmony":
            assert parsed(make_parser(form_of(name, None), None), list(reply)) == (reply, "", [])


@pytest.mark.parametrize("pair", REASONING)
def test_reasoning_is_separated(pair):
    draw = random.Random(2)
    for is_open, reply in (
        (False, f"{pair.begin}\na thought\n{pair.end}\n\nThe answer. "),
        (True, f"\na thought\n{pair.end}The answer. "),
    ):
        for split in ([reply], list(reply), *(pieces_of(reply, draw) for _ in range(20))):
            parser = make_parser(form_of("hermes", pair), None, reasoning_is_open=is_open)
            assert parsed(parser, split) == ("The answer. ", "a thought", [])
    parser = make_parser(form_of("hermes", pair), None, reasoning_is_open=True)
    assert parsed(parser, ["never ", "ends "]) == ("", "never ends", [])


def test_harmony_channels():
    reply = (
        "<|channel|>analysis<|message|>a"
        " thought<|end|><|start|>assistant<|channel|>final<|message|>The answer."
    )
    draw = random.Random(3)
    for split in ([reply], list(reply), *(pieces_of(reply, draw) for _ in range(20))):
        assert parsed(make_parser(form_of("harmony"), None), split) == (
            "The answer.",
            "a thought",
            [],
        )
    assert parsed(make_parser(form_of("harmony"), None), ["<|channel|>final"]) == ("", "", [])


def test_a_template_reveals_its_notation():
    sources = {
        "{{ '<tool_call>' }}": "hermes", "{{ '<tool_call><function=' }}": "qwen_xml",
        "[TOOL_CALLS]": "mistral", "[TOOL_CALLS][ARGS]": "mistral_args", "<|python_tag|>": "llama",
        "<|tool_call>": "gemma", "<|tool_call|>": "granite",
        "<|channel|>final<|message|>": "harmony", "nothing": "hermes",
    }  # fmt: skip
    assert find_tool_format("nothing") is None
    for source, name in sources.items():
        assert find_tool_format(source) in (name, None)
        assert reply_format(ChatTemplate(source, BYTES), BYTES).name == name
    form = reply_format(ChatTemplate("</think>", BYTES), BYTES)
    assert form.reasoning == THINK and is_reasoning_open(form, "<|im_start|>assistant\n<think>\n")
    assert not is_reasoning_open(form, "<think>\n\n</think>\n\n")
    with pytest.raises(
        UserError, match=r"the tool format must be auto or one of harmony, .*, got 'other'"
    ):
        reply_format(None, BYTES, "other")


def test_calls_of_qwen3_coder_without_the_opening_marker():
    bare = REPLIES["qwen_xml"].replace("<tool_call>\n", "", 1)
    for reply in (
        bare,
        bare.replace("\n</tool_call>\n<tool_call>\n", "\n"),
        bare.removesuffix("\n</tool_call>"),
    ):
        for split in ([reply], list(reply)):
            content, _, calls = parsed(make_parser(form_of("qwen_xml"), SCHEMAS), split)
            assert [call for call, _ in calls] == ["weather", "stop"] and content == "I look."
    for text in ("The tag <function=other> is not a tool.", "a <function= b", "<function"):
        assert parsed(make_parser(form_of("qwen_xml"), SCHEMAS), list(text)) == (text, "", [])
    assert parsed(make_parser(form_of("qwen_xml"), None), [bare]) == (
        bare,
        "",
        [],
    ), "a request without tools"


@pytest.mark.parametrize("name", ["2d_plot", "get-it", "a.b", "weather"])
def test_names_of_python_calls(name):
    text = f"[{name}(city='{name}(1)', days=-3), {name}()]"
    _, _, calls = parsed(make_parser(form_of("pythonic"), {name: {}}), [text])
    assert [(call, json.loads(arguments)) for call, arguments in calls] == [
        (name, {"city": f"{name}(1)", "days": -3}),
        (name, {}),
    ]

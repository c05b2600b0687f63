"""Tests the grammars of tool calls: any text that a grammar allows is read back as calls that
satisfy their schemas.
"""

import json
import random
import string

import pytest

from dantinox.config import TokenizerSection, UserError
from dantinox.generation.guides.constraints import ConstraintCompiler
from dantinox.text import tool_grammars as grammars
from dantinox.text import train_tokenizer
from dantinox.text.reply_formats import HARMONY, REASONING, TOOL_FORMATS, reply_format
from dantinox.text.reply_parser import make_parser
from dantinox.text.tool_grammars import Tool, tool_grammars
from tests.text.test_replies import parsed

BYTES = train_tokenizer(TokenizerSection(tokenizer_type="byte"), lambda: iter(()))
CLOSINGS = (
    '"',
    "'",
    "</parameter>\n",
    "\n</parameter>\n",
    '<|"|>',
    "<escape>",
    "</think>",
    "<|end|><|start|>assistant",
)
MAX_TOKENS = 4000


def random_schema(draw, depth=0):
    kinds = ["string", "integer", "number", "boolean", "enum", "null"] + ["object", "array"] * (
        depth < 2
    )
    kind = draw.choice(kinds)
    if kind == "enum":
        return {
            "type": "string",
            "enum": draw.sample(["red", "green", "a b", "dark blue"], draw.randint(1, 3)),
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1)}
    if kind == "object":
        names = draw.sample(["a", "b1", "key_c", "d"], draw.randint(0, 3))
        properties = {name: random_schema(draw, depth + 1) for name in names}
        required = [name for name in names if draw.random() < 0.5]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    return {"type": kind}


def random_tools(draw):
    tools = []
    for name in draw.sample(["search", "get_weather", "stop", "edit_file"], draw.randint(1, 3)):
        schema = random_schema(draw)
        while schema.get("type") != "object":
            schema = random_schema(draw)
        tools.append(Tool(name, schema))
    return tools


def satisfies(value, schema):
    """Whether a value satisfies a schema of `random_schema`."""
    kind = schema["type"]
    if "enum" in schema:
        return value in schema["enum"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= value.keys() <= known.keys()
            and all(satisfies(item, known[name]) for name, item in value.items())
        )
    if kind == "array":
        return isinstance(value, list) and all(satisfies(item, schema["items"]) for item in value)
    types = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    return isinstance(value, types[kind]) and (kind == "boolean" or not isinstance(value, bool))


def random_text(matcher, draw):
    """Returns a random text that the grammar allows. It ends free text soon, because a random text
    would not.
    """
    text, ids = "", 0
    while not matcher.done:
        bits = matcher.mask()
        allowed = [token for token in range(256) if bits[token // 32] >> (token % 32) & 1]
        ended = any(bits[token // 32] >> (token % 32) & 1 for token in BYTES.stop_ids)
        if ended and (draw.random() < 0.7 or not allowed):
            break
        letters = [
            token for token in allowed if chr(token) in string.ascii_letters + string.digits + " "
        ]
        if len(allowed) > 90 and draw.random() < 0.3:  # inside free text
            closings = [
                closing
                for closing in CLOSINGS
                if "<|end|>" not in closing or ("analysis" in text and "<|end|>" not in text)
            ]
            choices = [closing for closing in closings if all_allowed(matcher, closing)]
            pushed = draw.choice(choices) if choices else chr(draw.choice(letters))
        else:
            closers = [token for token in allowed if chr(token) in "]})"] or [
                token for token in allowed if chr(token) in '",\n'
            ]
            pushed = chr(
                draw.choice(closers if closers and draw.random() < 0.5 else letters or allowed)
            )
        for token in pushed.encode():
            matcher.consume(token)
        text += pushed
        ids += len(pushed)
        assert ids < MAX_TOKENS, text[-500:]
    return text


def all_allowed(matcher, text):
    return matcher._matcher.validate_tokens(list(text.encode())) == len(text.encode())


@pytest.fixture(scope="module")
def compiler():
    return ConstraintCompiler(BYTES)


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_allowed_text_is_valid_calls(name, count, compiler):
    draw = random.Random(name)
    form = reply_format(None, BYTES, name)
    if name != HARMONY:
        form = form._replace(reasoning=REASONING[-1])
    several = reasoned = 0
    for _ in range(count):
        tools = random_tools(draw)
        schemas = {tool.name: tool.parameters for tool in tools}
        parallel = draw.random() < 0.7
        grammars = tool_grammars(form, tools, BYTES, parallel=parallel, optional_reasoning=True)
        whole = random_text(compiler.matcher("lark", grammars.whole), draw)
        section = form.tools.begin_markers[0] * (not form.tools.opening) + random_text(
            compiler.matcher("lark", grammars.section), draw
        )
        for text in (whole, section):
            content, reasoning, calls = parsed(make_parser(form, schemas), [text])
            assert content == "" and len(calls) >= 1 and (parallel or len(calls) == 1), text
            assert all(
                satisfies(json.loads(arguments), schemas[called]) for called, arguments in calls
            ), text
            several += len(calls) > 1
            reasoned += bool(reasoning)
    assert reasoned > count // 15
    assert several > 3 or count < 50 or name == HARMONY


def test_a_strict_schema_that_no_grammar_can_express_is_an_error(compiler):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    form = reply_format(None, BYTES)
    compiler.matcher("lark", tool_grammars(form, [Tool("a", schema)], BYTES).whole)
    with pytest.raises(Exception, match="the Lark grammar cannot be used"):
        compiler.matcher("lark", tool_grammars(form, [Tool("a", schema, strict=True)], BYTES).whole)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "kind": {"$ref": "#/$defs/Kind"}},
    "required": ["city"],
}
ZIP = {"type": "object", "properties": {"zip": {"type": "integer"}}, "required": ["zip"]}
DEFS = {"$defs": {"City": CITY, "Kind": {"type": "string", "enum": ["x", "y"]}}}
# Parameters whose root is not a plain object, and which of `ARGUMENTS` satisfy them and list no
# other property.
ARGUMENTS = [
    {},
    {"city": "Rome"},
    {"city": "Rome", "kind": "x"},
    {"city": "Rome", "kind": "z"},
    {"city": "Rome", "zip": 3},
]
ROOTS = {
    "plain": (CITY | DEFS, [1, 2]),
    "reference": ({"$ref": "#/$defs/City"} | DEFS, [1, 2]),
    "reference to a reference": (
        {"$ref": "#/definitions/A", "title": "T", "definitions": {"A": {"$ref": "#/$defs/City"}}}
        | DEFS,
        [1, 2],
    ),
    "all": ({"allOf": [{"$ref": "#/$defs/City"}, ZIP]} | DEFS, [4]),
    "all with properties": (
        {"properties": CITY["properties"], "allOf": [{"required": ["city"]}]} | DEFS,
        [1, 2],
    ),
    "any": ({"anyOf": [{"$ref": "#/$defs/City"}, ZIP]} | DEFS, [1, 2, 4]),
    "null": (CITY | DEFS | {"type": ["object", "null"]}, [1, 2]),
}
CALLS = {
    "hermes": lambda found: f'\n{{"name": "t", "arguments": {json.dumps(found)}}}\n</tool_call>',
    "mistral_args": lambda found: f"t[ARGS]{json.dumps(found)}",
    "qwen_xml": lambda found: (
        "\n<function=t>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in found.items())
        + "</function>\n</tool_call>"
    ),
    "gemma": lambda found: (
        "call:t{"
        + ",".join(
            f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
            for key, value in found.items()
        )
        + "}<tool_call|>"
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", CALLS)
def test_parameters_whose_root_is_no_plain_object(name, root, strict, compiler):
    parameters, expected = ROOTS[root]
    tool = Tool("t", parameters, strict)
    form = reply_format(None, BYTES, name)
    matcher = compiler.matcher("tools", tool_grammars(form, [tool], BYTES).section)
    found = [
        number
        for number, arguments in enumerate(ARGUMENTS)
        if all_allowed(matcher, CALLS[name](arguments))
    ]
    if root == "any" and name in (
        "qwen_xml",
        "gemma",
    ):  # their grammars ignore which properties an option requires
        assert found[0] == 0
        found = found[1:]
    if root == "all with properties" and name in (
        "hermes",
        "mistral_args",
    ):  # the schema does not forbid other properties
        assert found[-1] == 4
        found = found[:-1]
    assert found == expected
    text = CALLS[name](ARGUMENTS[expected[0]])
    _, _, ((_, arguments),) = parsed(
        make_parser(form, {"t": tool.merged_schema}), [form.tools.begin_markers[0] + text]
    )
    assert json.loads(arguments) == ARGUMENTS[expected[0]]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"\bfoo"},
        {"type": "integer", "maximum": 2**63 - 1},
        {"type": "integer", "enum": [2**60 + 1]},
        {"type": "integer", "multipleOf": 2**40},
        {"type": "string", "format": "path"},
        {"type": "array", "uniqueItems": True},
    ],
)
def test_what_a_schema_of_a_tool_cannot_express_is_ignored_unless_it_is_strict(schema, compiler):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = reply_format(None, BYTES)
    matcher = compiler.matcher("tools", tool_grammars(form, [Tool("t", parameters)], BYTES).section)
    value = {"string": "foo", "integer": 7, "array": [1]}[schema["type"]]
    assert all_allowed(matcher, CALLS["hermes"]({"a": value})) and not all_allowed(
        matcher, CALLS["hermes"]({"a": None})
    )
    if schema.get("format") != "path" and "uniqueItems" not in schema:
        with pytest.raises(
            UserError, match=r"the parameters of the tool 't' cannot be used: properties.a.\w+: "
        ):
            tool_grammars(form, [Tool("t", parameters, strict=True)], BYTES)


REFERENCE = {"$ref": "#/$defs/A"}


def referring(count, target):
    """Parameters with as many properties, all of which refer to one target."""
    return {
        "type": "object",
        "$defs": {"A": target},
        "properties": {f"a{i}": REFERENCE for i in range(count)},
    }


def test_schemas_that_refer_to_themselves_are_merged_once():
    """Following every path of ten references to one schema would take 10^16 steps."""
    own = {
        "properties": {"b": {"type": "null"}, "a": {}},
        "required": ["b"],
        "allOf": [REFERENCE] * 10,
    }
    parameters = {
        "properties": {"a": {"type": "integer"}},
        "allOf": [REFERENCE],
        "$defs": {"A": own},
    }
    merged = Tool("t", parameters).merged_schema
    assert [*merged["properties"]] == ["a", "b"] and merged["required"] == ["b"]
    assert merged["properties"]["a"] == {"type": "integer"}


@pytest.mark.parametrize("parts", [2_000, 16_000])
def test_schemas_with_many_parts_are_merged_in_linear_time(parts, monkeypatch):
    """Each part is copied once."""
    monkeypatch.setattr(grammars, "MAX_ENTRIES", parts)
    tool = Tool("t", {"allOf": [{"properties": {f"a{number}": {}}} for number in range(parts)]})
    assert len(tool.merged_schema["properties"]) == parts


@pytest.mark.parametrize("name", ["qwen_xml", "gemma", "functiongemma", "pythonic"])
@pytest.mark.parametrize(
    "parameters",
    [
        referring(
            300,
            {"type": "object", "properties": {f"b{i}": {"type": "string"} for i in range(1000)}},
        ),
        referring(1500, {f"keyword{i}": i for i in range(1500)} | {"type": "object"}),
    ],
)
def test_references_that_multiply_a_schema_are_refused(name, parameters):
    """The grammars would have over 20 million characters, a thousand times as many as the
    schemas.
    """
    with pytest.raises(UserError, match=r"(use fewer or|use) smaller"):
        tool_grammars(reply_format(None, BYTES, name), [Tool("t", parameters)], BYTES)


@pytest.mark.parametrize("name", ["gemma", "pythonic"])
def test_types_that_multiply_a_schema_are_refused(name):
    schema = {"type": "integer"}
    for _ in range(12):
        schema = {"type": ["object"] * 8, "properties": {"a": schema}}
    with pytest.raises(UserError, match="smaller schemas"):
        tool_grammars(
            reply_format(None, BYTES, name), [Tool("t", {"properties": {"a": schema}})], BYTES
        )

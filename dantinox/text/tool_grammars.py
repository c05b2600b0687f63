"""Lark grammars (in the dialect of llguidance) of the tool calls that a request allows, for each
notation of tool calls.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from dantinox.files import UserError, quote
from dantinox.text.json_schemas import rewrite_schema
from dantinox.text.reply_formats import (
    FUNCTION_GEMMA_QUOTE,
    GEMMA_QUOTE,
    HARMONY,
    Delimiters,
    ReplyFormat,
)
from dantinox.text.tokenizer import Tokenizer

# Options of llguidance: the separators that `json.dumps` writes, as in the conversations on which
# models are trained.
JSON_SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# Keywords that can add properties: if a schema has one of them, its own `properties` are not all
# that it allows.
APPLICATORS = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "dependentSchemas")
)
DEFINITIONS = ("$defs", "definitions")
EMPTY_OBJECT = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_SCHEMA_DEPTH = 32
MAX_ENTRIES = 1_000_000  # of the properties that are copied to merge the schemas of one tool
MAX_GRAMMAR = 1 << 22  # characters of the rules for the values of one request
TEXT = r"/(?s:.)*/"


class Tool(NamedTuple):
    """A tool that a model may call.

    Attributes:
      name: its name.
      parameters: the JSON schema of its arguments, an object.
      strict: whether a schema that the grammar cannot express is an error; otherwise such parts of
        the schema are ignored.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments. If it lists properties, only these are allowed, unless the
        parameters say otherwise.

        Raises:
          UserError: the tool is strict, and the grammar cannot express its parameters.
        """
        root = resolve_root(self.parameters)
        defaults = {} if APPLICATORS & root.keys() else EMPTY_OBJECT
        schema: dict[str, Any] = {**defaults, **root, "type": "object"}
        try:
            rewritten = rewrite_schema(schema, lenient=not self.strict)
        except ValueError as error:
            raise UserError(
                f"the parameters of the tool {quote(self.name)} cannot be used: {error}"
            ) from None
        return {
            **rewritten,
            "x-guidance": JSON_SPACING | ({} if self.strict else {"lenient": True}),
        }

    @property
    def merged_schema(self) -> dict[str, Any]:
        """A schema of type object with all `properties` and `required` of the schema and of those
        that it combines.

        Raises:
          UserError: as `schema`, or the references lead to too many properties.
        """
        schema = self.schema
        definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
        merger = _PropertyMerger(self.name, schema)
        properties, required = merger.merge(schema)
        for name, inner in properties.items():
            if "$ref" in json.dumps(inner):  # at any depth: it then needs the definitions beside it
                properties[name] = resolved = resolve_root(inner | definitions)
                merger.count(len(resolved))
        plain = {key: value for key, value in schema.items() if key not in APPLICATORS}
        return plain | {
            "properties": properties,
            "required": [name for name in properties if name in required],
        }


def resolve_root(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces a reference at the root of a schema by its target, also if that is a reference
    again.

    A reference beside properties or other applicators stays: both restrict the value.
    """
    root = dict(schema)
    for _ in range(MAX_SCHEMA_DEPTH):
        if "$ref" not in root or root.keys() & (APPLICATORS | {"properties", "required"}) != {
            "$ref"
        }:
            break
        target = _resolve(root["$ref"], schema)
        if target is None:
            break
        del root["$ref"]
        root = {**root, **target, **{name: schema[name] for name in DEFINITIONS if name in schema}}
    return root


def _resolve(reference: Any, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema at a JSON pointer such as `#/$defs/A`, or None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = document
    for part in unquote(reference[2:]).split("/"):
        found = (
            found.get(part.replace("~1", "/").replace("~0", "~"))
            if isinstance(found, Mapping)
            else None
        )
    return found if isinstance(found, Mapping) else None


class _PropertyMerger:
    """Merges the properties of the schemas that a document combines. References may form cycles."""

    def __init__(self, tool: str, document: Mapping[str, Any]):
        """Initializes the merger for the parameters of a tool."""
        self._tool = tool
        self._document = document
        self._merged: dict[str, tuple[dict[str, Any], set[str]]] = {}  # by reference
        self._entries = 0

    def count(self, entries: int) -> None:
        """Counts copied entries, and raises a UserError if they are too many."""
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            tool = quote(self._tool)
            raise UserError(
                f"the parameters of the tool {tool} refer too often"
                " to large schemas: use smaller ones"
            )

    def merge(self, schema: Any, depth: int = 0) -> tuple[dict[str, Any], set[str]]:
        """Returns the properties of a schema and of those that it combines, and the names that all
        of these require.
        """
        if not isinstance(schema, Mapping) or depth > MAX_SCHEMA_DEPTH:
            return {}, set()
        properties = dict(schema.get("properties", {}))
        required = set(schema.get("required", ()))
        parts = [self._merge_reference(schema.get("$ref"), depth)]
        parts += [self.merge(inner, depth + 1) for inner in schema.get("allOf", ())]
        for more, needed in parts:
            self._add(properties, more)
            required |= needed
        for key in ("anyOf", "oneOf"):
            options = [self.merge(option, depth + 1) for option in schema.get(key, ())]
            for more, _ in options:
                self._add(properties, more)
            # A value may match any one of them, so only what all of them require is required.
            if options:
                required |= set.intersection(*(needed for _, needed in options))
        return properties, required

    def _merge_reference(self, reference: Any, depth: int) -> tuple[dict[str, Any], set[str]]:
        """Returns the result for the target of a reference, which is computed once."""
        if not isinstance(reference, str):
            return {}, set()
        if reference not in self._merged:
            self._merged[reference] = {}, set()  # what the target adds to itself
            self._merged[reference] = self.merge(_resolve(reference, self._document), depth + 1)
        return self._merged[reference]

    def _add(self, properties: dict[str, Any], more: Mapping[str, Any]) -> None:
        """Adds properties; of those with one name, the first schema stays."""
        self.count(len(more))
        for name, schema in more.items():
            properties.setdefault(name, schema)


class Grammars(NamedTuple):
    """The grammars of the calls of one request.

    Attributes:
      section: the text after a marker that begins a section of calls.
      whole: a reply that consists of calls, after optional reasoning if `optional_reasoning` was
        set.
    """

    section: str
    whole: str


def tool_grammars(
    form: ReplyFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    parallel: bool = True,
    optional_reasoning: bool = False,
) -> Grammars:
    """Returns the grammars of calls of these tools.

    Args:
      parallel: whether a reply may have several calls.
      optional_reasoning: whether reasoning may precede the calls in `whole`.

    Raises:
      UserError: a schema cannot be used, or the grammar has more than `MAX_GRAMMAR` characters.
    """
    rules: list[str] = []
    literal = _literals(tokenizer)
    writer = _RuleWriter(rules, literal)
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        rules.append(f"call_{number}: {WRITERS[form.name](writer, tool)}")
    rules.append(f"call: {calls}")
    # In a notation with an `opening`, a reply may begin with the calls themselves, without a
    # marker.
    begin = "" if form.tools.opening else literal(form.tools.begin_markers[0])
    end = literal(form.tools.end) if form.tools.end else ""
    layout = LAYOUTS.get(form.name, Layout())
    more = ""  # further calls of a section
    again = ""  # further sections
    if parallel and layout.repeats == "call":
        more = f"({literal(layout.separator)} call)*"
    elif parallel and layout.repeats == "section":
        again = f"({literal(layout.between)} {begin} section)*"
    rules.append(f"section: {literal(layout.first)} call {more} {literal(layout.last)} {end}")
    reasoning = _reasoning(form, literal, rules) if optional_reasoning and form.reasons else ""
    body = "\n".join(rules)
    return Grammars(
        f"start: section\n{body}\n", f"start: {reasoning} {begin} section {again}\n{body}\n"
    )


class Layout(NamedTuple):
    """The text around the calls of a section.

    Attributes:
      first, last: the texts before the first and after the last call of a section.
      separator: the text between two calls of a section.
      between: the text between two sections.
      repeats: what several calls repeat: `call`, `section`, or `none` if a reply can have only one.
    """

    first: str = ""
    last: str = ""
    separator: str = ""
    between: str = ""
    repeats: str = "section"


LAYOUTS = {
    "hermes": Layout("\n", "\n", between="\n"),
    "qwen_xml": Layout("\n", "\n", between="\n"),
    "llama": Layout(separator="; ", repeats="call"),
    "mistral": Layout("[", "]", ", ", repeats="call"),
    "granite": Layout("[", "]", ", ", repeats="call"),
    "pythonic": Layout("[", "]", ", ", repeats="call"),
    HARMONY: Layout(repeats="none"),
}


def _literals(tokenizer: Tokenizer) -> Callable[[str], str]:
    """Returns a function from a text to Lark; a text that is the name of a special token becomes
    this token.
    """
    special = sorted(tokenizer.special_tokens, key=len, reverse=True)

    def literal(text: str) -> str:
        for name in special:
            if name in text:
                before, _, after = text.partition(name)
                parts = [literal(before), f"<[{tokenizer.special_tokens[name]}]>", literal(after)]
                return " ".join(part for part in parts if part)
        return json.dumps(text) if text else ""

    return literal


def _reasoning(form: ReplyFormat, literal: Callable[[str], str], rules: list[str]) -> str:
    """Adds the rules of optional reasoning before the calls, and returns a reference to them."""
    if form.name == HARMONY:
        delimiters = Delimiters("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    else:
        # `form.reasons` is true, so it is not None.
        delimiters = form.reasoning or Delimiters("", "")
    begin = literal(delimiters.begin)
    end = literal(delimiters.end)
    # Text never contains a special token, so it ends there. Otherwise it ends at the first
    # occurrence of the end marker.
    rules.append(
        f"thought: {TEXT} {end}" if end.startswith("<[") else f"thought[lazy]: {TEXT} {end}"
    )
    space = "" if form.name == HARMONY else r"/\s{0,2}/"
    rules.append(f"reasoning: {begin} thought {space}")
    return "reasoning?"


# --- one call in each notation


def _json_call(arguments: str) -> Callable[["_RuleWriter", Tool], str]:
    def write(writer: "_RuleWriter", tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        return f"{json.dumps(head)} %json {json.dumps(tool.schema)} {json.dumps('}')}"

    return write


def _harmony_call(writer: "_RuleWriter", tool: Tool) -> str:
    head = writer.literal(f"{tool.name} <|constrain|>json<|message|>")
    return f"{head} %json {json.dumps(tool.schema)}"


def _args_call(writer: "_RuleWriter", tool: Tool) -> str:
    return f"{writer.literal(tool.name + '[ARGS]')} %json {json.dumps(tool.schema)}"


def _xml_call(writer: "_RuleWriter", tool: Tool) -> str:
    parameters = tool.merged_schema
    required = set(parameters["required"])
    parts = [json.dumps(f"<function={tool.name}>\n")]
    end = json.dumps("\n</parameter>\n")
    for key, schema in parameters["properties"].items():
        begin = json.dumps(f"<parameter={key}>\n")
        is_text = (
            isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema
        )
        value = (
            writer.rule("text", f"{TEXT} {end}", "[lazy]")
            if is_text
            else f"{writer.xml_value(schema)} {end}"
        )
        parts.append(f"({begin} {value})" + ("" if key in required else "?"))
    return " ".join([*parts, json.dumps("</function>")])


def _gemma_call(string_quote: str) -> Callable[["_RuleWriter", Tool], str]:
    def write(writer: "_RuleWriter", tool: Tool) -> str:
        return (
            f"{json.dumps(f'call:{tool.name}')}"
            f" {writer.value(tool.merged_schema, _gemma_dialect(string_quote))}"
        )

    return write


def _python_call(writer: "_RuleWriter", tool: Tool) -> str:
    pairs = writer.members(tool.merged_schema, PYTHON, "=", bare_keys=True)
    return f"{json.dumps(tool.name + '(')} {pairs} {json.dumps(')')}"


WRITERS: dict[str, Callable[["_RuleWriter", Tool], str]] = {
    "hermes": _json_call("arguments"),
    "llama": _json_call("parameters"),
    "mistral": _json_call("arguments"),
    "granite": _json_call("arguments"),
    "mistral_args": _args_call,
    "qwen_xml": _xml_call,
    "pythonic": _python_call,
    "gemma": _gemma_call(GEMMA_QUOTE),
    "functiongemma": _gemma_call(FUNCTION_GEMMA_QUOTE),
    HARMONY: _harmony_call,
}


# --- values in notations other than JSON


class Dialect(NamedTuple):
    """How values are written.

    Attributes:
      string: the Lark expression of any string; "": any text between the quotes.
      quotes: the texts before and after a constant string.
      words: the texts of true, false and null.
      colon, comma: the separators of an object.
    """

    string: str
    quotes: tuple[str, str]
    words: tuple[str, str, str]
    colon: str
    comma: str


# Strings without backslashes and line breaks, so that every text is a valid literal.
PYTHON = Dialect(r'/"[^"\\\n]*"/', ('"', '"'), ("True", "False", "None"), ": ", ", ")


def _gemma_dialect(string_quote: str) -> Dialect:
    return Dialect("", (string_quote, string_quote), ("true", "false", "null"), ":", ",")


class _RuleWriter:
    """Writes JSON schemas as Lark rules. Types, enums, nested objects and arrays are expressed;
    other keywords are ignored.
    """

    def __init__(self, rules: list[str], literal: Callable[[str], str]):
        self.rules = rules
        self.literal = literal
        self._number = 0
        self._characters = 0

    def _count(self, text: str) -> str:
        """Counts a part of the grammar; references can multiply a schema. Raises UserError if the
        grammar becomes too long.
        """
        self._characters += len(text)
        if self._characters > MAX_GRAMMAR:
            raise UserError(
                f"the grammar of the tools has more than {MAX_GRAMMAR:,}"
                " characters: use fewer or smaller schemas"
            )
        return text

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        self._count(body)
        self._number += 1
        self.rules.append(f"{name}_{self._number}{options}: {body}")
        return f"{name}_{self._number}"

    def xml_value(self, schema: Any) -> str:
        """Returns the Lark expression of a value in Qwen's notation: JSON, but the strings of an
        enum have no quotes.

        A string without an enum is free text, for which the caller has a rule.
        """
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return "(" + " | ".join(json.dumps(str(value)) for value in schema["enum"]) + ")"
        inner = dict(schema) if isinstance(schema, Mapping) else {}
        return self._count(
            f"%json {json.dumps(inner | {'x-guidance': JSON_SPACING | {'lenient': True}})}"
        )

    def value(self, schema: Any, dialect: Dialect, depth: int = 0) -> str:
        """Returns the Lark expression of a value."""
        schema = schema if isinstance(schema, Mapping) else {}
        if depth > MAX_SCHEMA_DEPTH:
            return self.any_value(dialect)
        constants = [schema["const"]] if "const" in schema else schema.get("enum")
        if constants:
            return "(" + " | ".join(self.constant(value, dialect) for value in constants) + ")"
        options = schema.get("anyOf") or schema.get("oneOf")
        type_ = schema.get("type")
        if options:
            return (
                "(" + " | ".join(self.value(option, dialect, depth + 1) for option in options) + ")"
            )
        if isinstance(type_, list):
            return (
                "("
                + " | ".join(
                    self.value({**schema, "type": kind}, dialect, depth + 1) for kind in type_
                )
                + ")"
            )
        if type_ == "object" and (
            schema.get("properties") or schema.get("additionalProperties") is False
        ):
            body = self.members(
                schema, dialect, dialect.colon, bare_keys=dialect is not PYTHON, depth=depth
            )
            return self.rule("object", f"{json.dumps('{')} {body} {json.dumps('}')}")
        if type_ == "array" and "items" in schema:
            item = self.value(schema["items"], dialect, depth + 1)
            return self.rule("array", f'"[" ({item} ({json.dumps(dialect.comma)} {item})*)? "]"')
        simple = {
            "string": self.string(dialect),
            "integer": r"/-?(0|[1-9][0-9]{0,15})/",
            "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/",
            "boolean": f"({json.dumps(dialect.words[0])} | {json.dumps(dialect.words[1])})",
            "null": json.dumps(dialect.words[2]),
        }
        return simple[type_] if type_ in simple else self.any_value(dialect)

    def members(
        self,
        schema: Mapping[str, Any],
        dialect: Dialect,
        colon: str,
        *,
        bare_keys: bool,
        depth: int = 0,
    ) -> str:
        """Returns the rule of the members of an object in the order of the schema: all required
        ones, and any of the others.

        The rules are made from the last property to the first, two for each: `first_…` for the
        members from this property on, and `rest_…` for the same members after another one, so with
        a comma before them.
        """
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        rest = '""'
        first = '""'
        for key, inner in reversed([*properties.items()]):
            # A key in quotes: the text of a JSON string, written as a Lark string.
            name = (
                self.literal(key) if bare_keys else json.dumps(json.dumps(key, ensure_ascii=False))
            )
            member = f"{name} {json.dumps(colon)} {self.value(inner, dialect, depth + 1)}"
            or_rest = "" if key in required else f" | {rest}"  # without the optional member
            or_first = "" if key in required else f" | {first}"
            after = self.rule("rest", f"{json.dumps(dialect.comma)} {member} {rest}{or_rest}")
            first = self.rule("first", f"{member} {rest}{or_first}")
            rest = after
        return first

    def string(self, dialect: Dialect) -> str:
        if dialect.string:
            return dialect.string
        mark = self.literal(dialect.quotes[0])
        if mark.startswith("<["):  # a special token, which text never contains
            return f"({mark} {TEXT} {mark})"
        return self.rule("quoted", f"{mark} {self.rule('text', f'{TEXT} {mark}', '[lazy]')}")

    def constant(self, value: Any, dialect: Dialect) -> str:
        if isinstance(value, str):
            text = value if dialect is not PYTHON else json.dumps(value, ensure_ascii=False)[1:-1]
            return self.literal(dialect.quotes[0] + text + dialect.quotes[1])
        words = {True: dialect.words[0], False: dialect.words[1], None: dialect.words[2]}
        # `in words` would be wrong, because 1 equals True, and 0 equals False.
        has_word = value is None or isinstance(value, bool)
        return json.dumps(words[value] if has_word else json.dumps(value))

    def any_value(self, dialect: Dialect) -> str:
        """Returns the expression of any value."""
        name = next((rule.split(":")[0] for rule in self.rules if rule.startswith("any_")), None)
        if (
            name is None
            # Not made yet; its body refers to its name, so the number is taken before the body is
            # made.
        ):
            self._number += 1
            name = f"any_{self._number}"
            self.rules.append("")  # its place, before the rules of the body
            at = len(self.rules) - 1
            comma = json.dumps(dialect.comma)
            colon = json.dumps(dialect.colon)
            key = self.string(dialect) if dialect is PYTHON else "/[A-Za-z_][A-Za-z0-9_]*/"
            simple = " | ".join(
                self.value({"type": kind}, dialect)
                for kind in ("string", "number", "boolean", "null")
            )
            array = f'"[" ({name} ({comma} {name})*)? "]"'
            members = f"{key} {colon} {name}"
            object_ = f'"{{" ({members} ({comma} {members})*)? "}}"'
            self.rules[at] = f"{name}: {simple} | {array} | {object_}"
        return name

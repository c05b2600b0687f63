"""Readers that find tool calls in generated text, piece by piece, one for each notation that models
use.

A reader gets the text after the marker that begins a tool call. It returns `Part`s: the name of a
call, then the JSON of its arguments as soon as it is known.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from dantinox.text.partial_markers import overlap

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_KEYS = {"name", "id", "type", "function", *ARGUMENT_KEYS}
# The most levels of nested values in a call that is written in Python or in Gemma's notation.
MAX_LITERAL_DEPTH = 32
Schema = Mapping[str, Any]


class Part(NamedTuple):
    """A piece of a reply: text of the answer or of the reasoning, the name of a tool call, or JSON
    of its arguments.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class CallReader(Protocol):
    """Reads the calls of one section of a reply.

    Attributes:
      rest: the text after the section; None until the section has ended.
      recognized: whether a call was found, so that the text is not ordinary content.
      rejected: whether the text is certainly not a call.
    """

    rest: str | None
    recognized: bool
    rejected: bool

    def push(self, text: str) -> list[Part]:
        """Adds text and returns the parts that have become known."""

    def finish(self) -> list[Part]:
        """Returns the remaining parts, after the end of the reply."""


class JSONCalls:
    """Reads calls that are JSON objects `{"name": …, "arguments": …}`, alone, in a list, or one
    after the other.

    The arguments are passed on while they are generated, character for character.
    """

    def __init__(self, end: str):
        """`end` is the marker after the calls; "": the calls extend to the end of the reply."""
        self.rest: str | None = None
        self.recognized = self.rejected = False
        self._end = end
        self._outside = ""  # text since the last object, to find the end marker
        self._reset()

    def _reset(self) -> None:
        """Prepares for the next object."""
        self._depth = 0  # of brackets around the current character
        self._in_string = False
        self._escaped = False  # whether a backslash precedes the current character
        self._reads_key = True  # whether the current string at depth 1 is a key
        self._key = ""  # the current key of the call
        self._token = ""  # the current string
        self._value = ""  # the value of the current key
        self._named = False  # whether the name of the call was returned
        self._arguments = ""
        self._passed = 0  # characters of the arguments that were returned

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for index, character in enumerate(text):
            if self._depth == 0:
                if character == "{":
                    self._depth = 1
                    self._outside = ""
                    continue
                self._outside += character
                if self._end and self._outside.endswith(self._end):
                    self.rest = text[index + 1 :]
                    return parts
            else:
                parts += self._next(character)
        return parts + self._pass_arguments()

    def finish(self) -> list[Part]:
        return self._pass_arguments()

    def _next(self, character: str) -> list[Part]:
        """Processes one character inside an object."""
        if self._in_string:
            self._token += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1 and self._reads_key:
                    self._key = _load_string(self._token)
                    self.rejected |= self._key not in CALL_KEYS and not self.recognized
            self._value += character
            self._extend_arguments(character)
            return []
        if self._depth == 1 and character in ",}":
            parts = self._end_value()
            if character == "}":
                parts += self._end_object()
            return parts
        if self._depth == 1 and character == ":" and self._reads_key:
            self._reads_key = False
            self._value = ""
            return []
        if character == '"':
            self._in_string = True
            self._token = '"'
        if self._depth == 1 and character == "{" and self._key == "function":
            # In {"type": "function", "function": {…}}, the inner object is the call.
            self._reads_key = True
            self._key = ""
            return []
        self._depth += (character in "{[") - (character in "}]")
        self._value += character
        self._extend_arguments(character)
        return []

    def _extend_arguments(self, character: str) -> None:
        """Adds a character to the arguments if it is part of them."""
        if (
            self._key in ARGUMENT_KEYS
            and not self._reads_key
            and (self._arguments or not character.isspace())
        ):
            self._arguments += character

    def _end_value(self) -> list[Part]:
        """Ends the value of a key of the call."""
        parts: list[Part] = []
        if self._key == "name" and not self._reads_key and not self._named:
            name = _load_string(self._value.strip())
            if name:
                self._named = self.recognized = True
                parts = [Part("call", name)]
        # The model has written the object as a string.
        if self._key in ARGUMENT_KEYS and self._arguments.startswith('"'):
            self._arguments = _load_string(self._arguments.strip())
        self._reads_key = True
        self._key = ""
        return parts

    def _end_object(self) -> list[Part]:
        """Ends the call."""
        parts: list[Part] = []
        if self._named:
            self._arguments = self._arguments.rstrip() or "{}"
            parts = self._pass_arguments()
        self._reset()
        return parts

    def _pass_arguments(self) -> list[Part]:
        """Returns the arguments that were not passed on yet, if the name of their call is known."""
        encoded = self._arguments.startswith('"')
        if not self._named or encoded or self._passed == len(self._arguments):
            return []
        new = self._arguments[self._passed :]
        self._passed = len(self._arguments)
        return [Part("arguments", new)]


class WholeCalls:
    """Reads calls in a notation other than JSON: it converts them once the section is complete."""

    def __init__(self, end: str, parse: Callable[[str], list[tuple[str, dict[str, Any]]]]):
        """`parse` returns the calls (name, arguments) of a section, or raises ValueError."""
        self.rest: str | None = None
        self.recognized = self.rejected = False
        self._end = end
        self._parse = parse
        self._text = ""

    def push(self, text: str) -> list[Part]:
        searched = max(0, len(self._text) - len(self._end))
        self._text += text
        at = self._text.find(self._end, searched) if self._end else -1
        if at < 0:
            return []
        self.rest = self._text[at + len(self._end) :]
        self._text = self._text[:at]
        return self._convert()

    def finish(self) -> list[Part]:
        return [] if self.rest is not None else self._convert()

    def _convert(self) -> list[Part]:
        try:
            calls = self._parse(self._text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return []
        self.recognized = bool(calls)
        parts: list[Part] = []
        for name, arguments in calls:
            parts += [
                Part("call", name),
                Part("arguments", json.dumps(arguments, ensure_ascii=False)),
            ]
        return parts


class NamedCalls:
    """Reads `NAME[ARGS]{…}`, Mistral's notation since 2025, up to the next `[TOOL_CALLS]` or the
    end of the reply.
    """

    def __init__(self, separator: str, end: str):
        self.rest: str | None = None
        self.recognized = self.rejected = False
        self._separator = separator
        self._end = end
        self._buffer = ""  # text that was not returned yet
        self._in_arguments = False

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if not self._in_arguments:
            self._buffer += text
            name, found, text = self._buffer.partition(self._separator)
            if not found:
                return []
            self._in_arguments = self.recognized = True
            self._buffer = ""
            parts = [Part("call", name.strip().partition("[CALL_ID]")[0])]
        self._buffer += text
        at = self._buffer.find(self._end)
        # The end of the buffer may be the beginning of the marker.
        size = at if at >= 0 else len(self._buffer) - overlap(self._buffer, (self._end,))
        passed = self._buffer[:size]
        self._buffer = self._buffer[size:]
        if at >= 0:
            self.rest = self._buffer  # begins with the marker of the next call
        if passed:
            parts.append(Part("arguments", passed))
        return parts

    def finish(self) -> list[Part]:
        held = self._buffer
        self._buffer = ""
        return [Part("arguments", held)] if held and self._in_arguments else []


def _load_string(text: str) -> str:
    """Returns the value of a JSON string; "" if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


# --- notations other than JSON


def parse_xml(schemas: Mapping[str, Schema]) -> Callable[[str], list[tuple[str, dict[str, Any]]]]:
    """Returns a parser of `<function=NAME><parameter=KEY>value</parameter>…</function>`, the
    notation of Qwen3-Coder.

    A value is text if the schema of its tool says so, and JSON otherwise.
    """

    def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
        calls = []
        for name, body in re.findall(
            r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL
        ):
            properties = schemas.get(name, {}).get("properties", {})
            pairs = re.findall(
                r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|\Z)", body, re.DOTALL
            )
            calls.append((name, {key: _typed(value, properties.get(key)) for key, value in pairs}))
        return calls

    return parse


def _typed(value: str, schema: Any) -> Any:
    """Returns the value of a parameter that is written as text."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


# A string, or the name before a parenthesis.
CALLED_NAME = re.compile(
    r""" "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | ([A-Za-z0-9_.-]+)(?=\() """, re.VERBOSE | re.DOTALL
)


def parse_python(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parses `[name(key=value, …), …]`: Python calls with literal arguments, the notation of Llama
    4.

    Raises:
      ValueError, SyntaxError: the text is not a list of such calls.
    """
    names: dict[
        str, str
    ] = {}  # placeholder → a name that is no identifier of Python, such as `2d_plot`

    def replace(found: re.Match[str]) -> str:
        if found[1] is None or all(part.isidentifier() for part in found[1].split(".")):
            return found[0]
        placeholder = f"placeholder_{len(names)}"
        names[placeholder] = found[1]
        return placeholder

    tree = ast.parse(CALLED_NAME.sub(replace, text.strip()), mode="eval").body
    elements = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    calls = []
    for element in elements:
        if not isinstance(element, ast.Call) or element.args:
            raise ValueError("not a call with named arguments")
        arguments = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in element.keywords
            if keyword.arg
        }
        # `dumps` raises for values that JSON cannot represent, such as sets.
        json.dumps(arguments, allow_nan=False)
        name = ast.unparse(element.func)
        calls.append((names.get(name, name), arguments))
    return calls


def parse_gemma(quote: str) -> Callable[[str], list[tuple[str, dict[str, Any]]]]:
    """Returns a parser of `call:NAME{key:value,…}`, the notation of Gemma, in which `quote` begins
    and ends a string.
    """

    def parse(text: str) -> list[tuple[str, dict[str, Any]]]:
        found = re.match(r"\s*call:\s*([^{\s]+)\s*(?=\{)", text)
        if found is None:
            raise ValueError("not a call")
        value, _ = _gemma_value(text, found.end(), quote, 0)
        return [(found[1], value)]

    return parse


def _gemma_value(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Returns the value at a position and the position after it."""
    if depth > MAX_LITERAL_DEPTH:
        raise ValueError("nested too deeply")
    at = _skip_space(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        close = {"{": "}", "[": "]"}[text[at]]
        keyed: dict[str, Any] = {}
        items: list[Any] = []
        at = _skip_space(text, at + 1)
        while text[at : at + 1] != close:
            key = ""
            if close == "}":
                key, at = _gemma_key(text, at, quote)
            value, at = _gemma_value(text, at, quote, depth + 1)
            keyed[key] = value
            items.append(value)
            at = _skip_space(text, at)
            if text[at : at + 1] == ",":
                at = _skip_space(text, at + 1)
            if at >= len(text):
                raise ValueError("an unfinished value")
        return (keyed if close == "}" else items), at + 1
    found = re.compile(r"[^,}\]\s]+").match(text, at)
    if found is None:
        raise ValueError("a missing value")
    try:
        return json.loads(found[0]), found.end()
    except ValueError:
        return found[0], found.end()


def _gemma_key(text: str, at: int, quote: str) -> tuple[str, int]:
    """Returns the key at a position and the position after its colon."""
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        key = text[at + len(quote) : end]
        at = end + len(quote)
    else:
        colon = text.index(":", at)
        key = text[at:colon].strip()
        at = colon
    at = _skip_space(text, at)
    if text[at : at + 1] != ":":
        raise ValueError("a key without a value")
    return key, at + 1


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at

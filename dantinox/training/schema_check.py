"""The reward of `rewards` for JSON: validates values against a subset of JSON Schema. A schema with
another keyword is refused.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from dantinox.files import UserError, escape_name, quote
from dantinox.training.linear_regex import compile_linear_regex

Check = Callable[[Any], bool]
MAX_DEPTH = 64  # of nested schemas
# The keywords without effect on validity.
ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$id", "$comment")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Check] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and (isinstance(value, int) or value.is_integer()),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
# Keyword → the values it applies to, and the test of a value's measure against the number in the
# schema.
BOUNDS: dict[str, tuple[Check, Callable[[Any], float], Callable[[float, float], bool]]] = {
    "minimum": (is_number, lambda x: x, lambda x, bound: x >= bound),
    "maximum": (is_number, lambda x: x, lambda x, bound: x <= bound),
    "exclusiveMinimum": (is_number, lambda x: x, lambda x, bound: x > bound),
    "exclusiveMaximum": (is_number, lambda x: x, lambda x, bound: x < bound),
    "minLength": (TYPES["string"], len, lambda x, bound: x >= bound),
    "maxLength": (TYPES["string"], len, lambda x, bound: x <= bound),
    "minItems": (TYPES["array"], len, lambda x, bound: x >= bound),
    "maxItems": (TYPES["array"], len, lambda x, bound: x <= bound),
    "minProperties": (TYPES["object"], len, lambda x, bound: x >= bound),
    "maxProperties": (TYPES["object"], len, lambda x, bound: x <= bound),
}
# Keyword → (number of valid schemas, number of schemas) → valid.
UNIONS: dict[str, Callable[[int, int], bool]] = {
    "anyOf": lambda valid, count: valid > 0,
    "allOf": lambda valid, count: valid == count,
    "oneOf": lambda valid, count: valid == 1,
}
KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "pattern",
    "not", *BOUNDS, *UNIONS,
)  # fmt: skip


def compile_schema(schema: Any, what: str, depth: int = 0) -> Check:
    """Returns a function that tests whether a schema allows a JSON value.

    Args:
      schema: an object, true or false. Its keywords are `KEYWORDS` and `ANNOTATIONS`.
      what: what uses the schema, for messages.

    Raises:
      UserError: the schema is invalid, nested more than `MAX_DEPTH` deep, or has another keyword.
    """
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, dict):
        raise UserError(f"{what} must be an object, true or false, got {quote(schema)}")
    if depth > MAX_DEPTH:
        raise UserError(f"{what} is nested more than {MAX_DEPTH} deep")
    unknown = next((key for key in schema if key not in KEYWORDS and key not in ANNOTATIONS), None)
    if unknown is not None:
        raise UserError(
            f"{what} has the keyword {escape_name(str(unknown))} (allowed: {', '.join(KEYWORDS)})"
        )
    checks = [_keyword(name, schema, what, depth) for name in schema if name in KEYWORDS]
    return lambda value: all(check(value) for check in checks)


def _keyword(name: str, schema: Mapping[str, Any], what: str, depth: int) -> Check:
    """Returns the test of one keyword of a schema."""
    content = schema[name]

    def require(valid: bool, expected: str) -> None:
        if not valid:
            raise UserError(f"{name} of {what} must be {expected}, got {quote(content)}")

    def inner(part: Any) -> Check:
        return compile_schema(part, what, depth + 1)

    if name in BOUNDS:
        applies, measure, holds = BOUNDS[name]
        require(is_number(content) and math.isfinite(content), "a number")
        return lambda value: not applies(value) or holds(measure(value), content)
    if name in UNIONS:
        require(isinstance(content, list) and bool(content), "a list of schemas")
        parts = [inner(part) for part in content]
        combine = UNIONS[name]
        return lambda value: combine(sum(part(value) for part in parts), len(parts))
    if name == "type":
        kinds = content if isinstance(content, list) else [content]
        known = all(isinstance(kind, str) and kind in TYPES for kind in kinds)
        require(bool(kinds) and known, f"one or more of {', '.join(TYPES)}")
        return lambda value: any(TYPES[kind](value) for kind in kinds)
    if name in ("enum", "const"):
        require(name == "const" or isinstance(content, list), "a list")
        allowed = content if name == "enum" else [content]
        return lambda value: any(equal(value, one) for one in allowed)
    if name == "required":
        require(
            isinstance(content, list) and all(isinstance(key, str) for key in content),
            "a list of names",
        )
        return lambda value: not isinstance(value, dict) or all(key in value for key in content)
    if name == "properties":
        require(isinstance(content, dict), "an object")
        fields = {key: inner(part) for key, part in content.items()}
        return lambda value: (
            not isinstance(value, dict)
            or all(check(value[key]) for key, check in fields.items() if key in value)
        )
    if name == "additionalProperties":
        known = schema.get("properties", {})
        other = inner(content)
        return lambda value: (
            not isinstance(value, dict)
            or all(other(x) for key, x in value.items() if key not in known)
        )
    if name == "items":
        item = inner(content)
        return lambda value: not isinstance(value, list) or all(map(item, value))
    if name == "pattern":
        require(isinstance(content, str), "text")
        matches = compile_linear_regex(content, False, f"pattern of {what}")
        return lambda value: not isinstance(value, str) or matches(value)
    excluded = inner(content)  # not
    return lambda value: not excluded(value)


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)

"""Rewrites JSON schemas for llguidance, which reads numbers as 64-bit floats and patterns as those
of Rust's regex crate.
"""

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from dantinox.files import quote
from dantinox.text.ecma_patterns import to_rust_regex

MAX_EXACT = 2**53  # floats hold every integer up to here
MAX_MULTIPLE = 20_000  # a larger one takes seconds to compile
# All formats that are enforced. Others are annotations (JSON Schema 2020-12, section 7.2.1 of the
# validation vocabulary).
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
SIZES = frozenset(
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]
)
BOUNDS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
COMBINING = frozenset(["allOf", "anyOf", "oneOf", "$ref"])
NAMED_SCHEMAS = frozenset(
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"]
)
ANNOTATIONS = frozenset(["default", "example", "examples"])


def rewrite_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """Returns a schema with the same meaning for llguidance as the given one has in JSON Schema
    2020-12.

    Args:
      lenient: whether a keyword that cannot be expressed is left out; otherwise it is an error.

    Raises:
      ValueError: a keyword cannot be expressed. The message begins with the path of the keyword.
      RecursionError: the schema is nested too deeply.
    """
    rewriter = _Rewriter(lenient)
    rewritten: dict[str, Any] = rewriter.schema(schema, "")
    if rewriter.combines and _common_multiple(rewriter.multiples) > MAX_MULTIPLE:
        message = (
            f"the values of multipleOf have a common multiple beyond {MAX_MULTIPLE:,},"
            " which is too large"
        )
        if not lenient:
            raise ValueError(message)
        rewriter.drops_multiples = True
        rewritten = rewriter.schema(schema, "")
    return rewritten


class _Rewriter:
    """Rewrites one document.

    Attributes:
      multiples: the values of `multipleOf`.
      combines: whether the document combines schemas, so that two of the multiples may apply to one
        number.
      drops_multiples: whether `multipleOf` is left out.
    """

    def __init__(self, lenient: bool):
        self._lenient = lenient
        self.multiples: set[Decimal] = set()
        self.combines = self.drops_multiples = False

    def schema(self, value: Any, path: str) -> Any:
        """Returns the rewritten schema, or list of schemas, at a path."""
        if isinstance(value, list):
            return [self.schema(item, f"{path}.{number}") for number, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        kinds = value.get("type", "number")
        integer = kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds)
        rewritten: dict[str, Any] = {}
        for key, inner in value.items():
            where = f"{path}.{key}".removeprefix(".")
            if key == "oneOf" and "anyOf" not in value and _lists_distinct_scalars(inner):
                key = "anyOf"
            self.combines |= key in COMBINING
            try:
                if key == "patternProperties" and isinstance(inner, Mapping):
                    rewritten[key] = self._patterns(inner, where)
                elif key in NAMED_SCHEMAS and isinstance(inner, Mapping):
                    rewritten[key] = {
                        name: self.schema(item, f"{where}.{name}") for name, item in inner.items()
                    }
                elif key in ANNOTATIONS:
                    continue
                elif isinstance(inner, Mapping | list) and key not in ("enum", "const"):
                    rewritten[key] = self.schema(inner, where)
                elif not (key == "format" and isinstance(inner, str) and inner not in FORMATS):
                    rewritten[key] = self._keyword(key, inner, integer)
            except _Inexpressible as problem:
                if not self._lenient:
                    raise ValueError(f"{where}: {problem}") from None
        if self.drops_multiples:
            rewritten.pop("multipleOf", None)
        return rewritten

    def _patterns(self, schemas: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Returns the rewritten `patternProperties`."""
        rewritten: dict[str, Any] = {}
        for pattern, schema in schemas.items():
            key = _pattern(pattern)
            while key in rewritten:  # two patterns can have equal translations
                key = f"(?:{key})"
            rewritten[key] = self.schema(schema, f"{path}.{pattern}")
        return rewritten

    def _keyword(self, key: str, value: Any, integer: bool) -> Any:
        """Returns the rewritten value of a keyword that contains no schemas."""
        if key in ("enum", "const"):
            _check_constants(value)
        elif key == "pattern" and isinstance(value, str):
            return _pattern(value)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            return value
        elif key in SIZES:
            _check_finite(value)
            return int(value) if value == int(value) else value
        elif key in BOUNDS:
            _check_finite(value)
            exact = (
                integer
                and not key.startswith("exclusive")
                and abs(value) < 2**63
                and value == _as_float(value)
            )
            if abs(value) > MAX_EXACT and not exact:
                raise _Inexpressible(f"{value} is beyond ±2^53, which is not supported")
        elif key == "multipleOf":
            _check_finite(value)
            self.multiples.add(_multiple(value))
        return value


def _lists_distinct_scalars(options: Any) -> bool:
    """Whether each option lists its values, none of them twice, so that no value matches two
    options.
    """
    if not isinstance(options, list) or not all(isinstance(option, Mapping) for option in options):
        return False
    found: list[Any] = []
    for option in options:
        values = option.get("enum", [option["const"]] if "const" in option else None)
        if not isinstance(values, list) or any(
            isinstance(value, list | Mapping) for value in values
        ):
            return False
        found += {(isinstance(value, bool), value) for value in values}
    return len({*found}) == len(found)


class _Inexpressible(Exception):
    """A keyword that llguidance would read differently."""


def _pattern(pattern: str) -> str:
    """Returns a pattern in Rust's syntax."""
    try:
        return to_rust_regex(pattern)
    except ValueError as error:
        raise _Inexpressible(f"{error} in the pattern {quote(pattern)}") from None


def is_exact(number: int | float) -> bool:
    """Whether llguidance writes a constant with the digits of this number."""
    if isinstance(number, float):
        return math.isfinite(number)
    if abs(number) <= MAX_EXACT:
        return True
    as_float = _as_float(number)
    if not math.isfinite(as_float) or number == -(2**63):  # llguidance crashes on -2^63
        return False
    return number == (int(as_float) if abs(number) < 2**63 else int(Decimal(repr(as_float))))


def all_numbers(value: Any, check: Callable[[int | float], bool]) -> bool:
    """Whether all numbers in a JSON value pass a check."""
    if isinstance(value, Mapping):
        return all(all_numbers(item, check) for item in value.values())
    if isinstance(value, list):
        return all(all_numbers(item, check) for item in value)
    return isinstance(value, bool) or not isinstance(value, int | float) or check(value)


def _check_constants(values: Any) -> None:
    def check(number: int | float) -> bool:
        if not is_exact(number):
            raise _Inexpressible(
                f"{quote(number)} cannot be written exactly,"
                " because it is beyond ±2^53: use a string"
            )
        return True

    all_numbers(values, check)


def _check_finite(value: int | float) -> None:
    if not math.isfinite(_as_float(value)):
        raise _Inexpressible("the number is too large for a 64-bit float")


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _multiple(value: int | float) -> Decimal:
    """Returns a value of `multipleOf`, or raises if it is too large or not exact in llguidance."""
    scaled = float(value)
    while scaled % 1 and scaled <= MAX_MULTIPLE:  # the arithmetic of llguidance
        scaled *= 10
    exact = Decimal(str(value))
    if not 0 < scaled <= MAX_MULTIPLE or scaled != _common_multiple({exact}):
        raise _Inexpressible(
            f"must be over 0 and at most {MAX_MULTIPLE:,} in units of its last digit, got {value}"
        )
    return exact


def _common_multiple(values: set[Decimal]) -> int:
    """Returns the least common multiple of positive numbers, in units of the last digit of any of
    them.
    """
    places = max((-int(value.normalize().as_tuple().exponent) for value in values), default=0)
    return math.lcm(*(int(value.scaleb(max(0, places))) for value in values))

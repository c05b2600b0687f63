"""Every setting as a record that is read from `configs/schema.json`.

Help pages, searches and the documentation use these records, so they do not need pydantic.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dantinox.config.names import ALIASES, flat_name
from dantinox.config.setting_groups import GROUP

SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"
PREREQUISITES = "x-prerequisites"  # the schema key of a setting's prerequisites
TYPE_NAMES = {"null": "null", "boolean": "true or false", "string": "text"}
NUMBER_TYPES = {"integer": "an", "number": "a"}  # the types with a range → their articles


class SettingRecord(NamedTuple):
    """A setting.

    Attributes:
      section: the YAML section, such as `training`.
      group: the group inside the section, such as `optimizer`; empty in a section without groups.
      name: the key in the YAML file, such as `lr`.
      type: the type with its range or choices, such as `number > 0` or
        `integer in [1, 2^31), or null`.
      range: the range of a number without its type, such as `> 0`; empty for other types.
      choices: the values of an enumeration.
      default: the default as a JSON value (a tuple is a list).
      prerequisites: conditions on other settings; the setting has no effect unless all of them
        hold.
      help: one line that describes the setting.
      aliases: other dotted paths of the same setting.
      arity: number of values of its flag: `one`, `many`, or `switch` for a flag that may be given
        without a value.
    """

    section: str
    group: str
    name: str
    type: str
    range: str
    choices: tuple[str, ...]
    default: Any
    prerequisites: tuple[str, ...]
    help: str
    aliases: tuple[str, ...]
    arity: Literal["one", "many", "switch"]

    @property
    def key(self) -> str:
        """The dotted path, such as `training.lr`."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """The flag, such as `--lr`; `--section.name` if the name occurs in two sections."""
        return f"--{flat_name(self.key)}"

    @property
    def default_text(self) -> str:
        """The default as config files and flags accept it."""
        if isinstance(self.default, str) and self.default and self.default.isprintable():
            return self.default
        return json.dumps(self.default, ensure_ascii=False)


@cache
def setting_records() -> tuple[SettingRecord, ...]:
    """Returns every setting in the order of the YAML sections."""
    schema = _schema()
    aliases: dict[str, list[str]] = {}
    for old, new in ALIASES.items():
        aliases.setdefault(new, []).append(old)
    records = []
    for section, definition in _sections(schema).items():
        for name, content in definition["properties"].items():
            records.append(
                _record(section, name, content, tuple(aliases.get(f"{section}.{name}", ())))
            )
    return tuple(records)


@cache
def section_titles() -> dict[str, str]:
    """Returns a mapping: section → one-sentence description."""
    return {
        section: definition["description"].split("\n")[0]
        for section, definition in _sections(_schema()).items()
    }


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return schema


def _sections(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of each section."""
    return {
        name: schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
        for name, part in schema["properties"].items()
    }


def _record(
    section: str, name: str, content: dict[str, Any], aliases: tuple[str, ...]
) -> SettingRecord:
    """Returns the record of a setting; `content` is its JSON schema."""
    # The alternatives of the type, without null.
    options = [option for option in content.get("anyOf", [content]) if option.get("type") != "null"]
    is_number = (
        len(options) == 1
        and options[0].get("type") in ("integer", "number")
        and "enum" not in options[0]
    )
    arity: Literal["one", "many", "switch"] = "one"
    if any(option.get("type") in ("array", "object") for option in options):
        arity = "many"
    elif content.get("type") == "boolean":
        arity = "switch"  # not if the type also allows null, because a switch cannot give null
    return SettingRecord(
        section=section,
        group=content.get(GROUP, ""),
        name=name,
        type=type_in_words(content, articles=False),
        range=range_text(options[0]) if is_number else "",
        choices=tuple(str(value) for option in options for value in option.get("enum", ())),
        default=content.get("default"),
        prerequisites=tuple(content.get(PREREQUISITES, ())),
        help=content["description"],
        aliases=aliases,
        arity=arity,
    )


def type_in_words(schema: dict[str, Any], *, articles: bool = True) -> str:
    """Returns the values that a JSON schema allows, in words: `a number in [0, 1], or null`.

    Args:
      articles: false leaves out the articles and `one of`, for a table.
    """

    def lead(words: str) -> str:
        return f"{words} " if articles else ""

    def inner(part: dict[str, Any]) -> str:
        return type_in_words(part, articles=articles)

    if "anyOf" in schema:
        return ", or ".join(map(inner, schema["anyOf"]))
    if "enum" in schema:
        return lead("one of") + ", ".join(str(v) for v in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "")
    if "pattern" in schema:  # only file names have a pattern
        return lead("a") + "file name of letters, digits, - and _ and ."
    if kind == "array":
        pair = schema.get("prefixItems")
        if pair:
            return " and ".join(map(inner, pair))
        return lead("a") + f"list (each {inner(schema['items'])})"
    if kind == "object":
        values = schema["additionalProperties"]  # the schema of the values, or true
        return lead("a") + (
            f"mapping (each {inner(values)})" if isinstance(values, dict) else "mapping"
        )
    if kind in NUMBER_TYPES:
        return f"{lead(NUMBER_TYPES[kind])}{kind} {range_text(schema)}".rstrip()
    return TYPE_NAMES[kind]


class _Limit(NamedTuple):
    """A lower or upper limit in words: alone, and as a part of an interval."""

    alone: str
    inside: str


def range_text(schema: dict[str, Any]) -> str:
    """Returns the range of the schema of a number, such as `in [0, 1]` or `> 0`; empty without
    limits.
    """
    high = schema.get("maximum")
    below = schema.get("exclusiveMaximum")
    if high is not None and high >= 2**31 - 1 and _is_power_of_two(high + 1):
        below = high + 1  # `high` is the largest number of an integer type
        high = None
    lower = _limit("≥ {}", "[{}", schema.get("minimum"))
    lower = lower or _limit("> {}", "({}", schema.get("exclusiveMinimum"))
    upper = _limit("≤ {}", "{}]", high) or _limit("< {}", "{})", below)
    if lower and upper:
        return f"in {lower.inside}, {upper.inside}"
    only = lower or upper
    return only.alone if only else ""


def _limit(alone: str, inside: str, number: float | None) -> _Limit | None:
    """Returns a limit from two formats and its number; None without a number."""
    if number is None:
        return None
    text = str(number) if isinstance(number, int) else f"{number:g}"
    if number >= 2**31 and _is_power_of_two(number):
        text = f"2^{int(number).bit_length() - 1}"
    return _Limit(alone.format(text), inside.format(text))


def _is_power_of_two(number: float) -> bool:
    return isinstance(number, int) and number.bit_count() == 1

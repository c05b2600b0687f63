"""Converts the values of command-line flags to values of settings."""

import argparse
import contextlib
import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from dantinox.config.names import ALIASES, SHORT_NAMES, flat_name
from dantinox.config.sections import FIELDS
from dantinox.config.yaml_files import parse_value
from dantinox.files import UserError


def overrides(namespace: argparse.Namespace) -> dict[str, object]:
    """Returns the settings that were given as flags: dotted path → value.

    Raises:
      UserError: a flag without a section name matches settings of two sections.
    """
    settings: dict[str, object] = {}
    for dest, value in vars(namespace).items():
        prefix, colon, name = dest.partition(":")
        if value is None or not colon or prefix not in ("config", "ambiguous"):
            continue
        if prefix == "ambiguous":
            paths = [key for key in FIELDS if flat_name(key) == name]
            paths += [short for short in SHORT_NAMES if short.startswith(f"{name}_")]
            raise UserError(f"--{name} belongs to several settings: write {' or '.join('--' + path for path in paths)}")
        settings[name] = _value(ALIASES.get(name, name), value)
    return settings


def value_of(key: str, words: list[str]) -> object:
    """Returns the value of a setting (dotted path) from the words after its flag.

    Raises:
      UserError: there are several words, but the setting takes one value.
    """
    kinds = _members(FIELDS[key].annotation)
    if any(get_origin(kind) in (tuple, dict) for kind in kinds):
        return _value(key, words)
    if len(words) > 1:
        raise UserError(f"{flat_name(key)} takes one value, got {len(words)}: quote a value that contains spaces")
    return _value(key, words[0])


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a type, without Annotated and None."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for option in get_args(annotation) for m in _members(option))
    return () if annotation is type(None) else (annotation,)


def _value(key: str, value: str | list[str]) -> Any:
    kinds = _members(FIELDS[key].annotation)
    if isinstance(value, list):
        if len(value) == 1 and value[0].lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):  # JSON, as in a request body
                parsed = json.loads(value[0])
                is_string_list = isinstance(parsed, list) and parsed and all(isinstance(item, str) for item in parsed)
                if is_string_list or not any(get_args(kind)[:1] == (str,) for kind in kinds if get_origin(kind) is tuple):
                    return parsed  # otherwise the text is kept: `[1]` is a string in a list of strings
        texts = [_unescape(text) for text in value] if key.startswith("generation.") else value
        if all(get_origin(kind) is tuple and set(_members(get_args(kind)[0])) <= {int, float, bool} for kind in kinds):
            return [parse_value(text) for text in texts]
        if len(texts) > 1 or str not in kinds:
            return texts
        value = texts[0]
    optional = type(None) in get_args(FIELDS[key].annotation)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if str in kinds or (not {float, bool} & {*kinds} and any(isinstance(choice, str) for choice in choices)):
        return None if optional and value == "null" else value
    return parse_value(value)


def _unescape(text: str) -> str:
    """Replaces backslash-n with a line break, and likewise \\t, \\r and \\\\."""
    pieces = [piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r") for piece in text.split("\\\\")]
    return "\\".join(pieces)

"""Converts the values of command-line flags to values of settings."""

import argparse
import contextlib
import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from dantinox.config.names import ALIASES, SHORT_NAMES, flat_name
from dantinox.config.sections import FIELDS
from dantinox.config.yaml_text import parse_value
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
            raise UserError(
                f"--{name} belongs to several settings: write"
                f" {' or '.join('--' + path for path in paths)}"
            )
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
        raise UserError(
            f"{flat_name(key)} takes one value, got {len(words)}:"
            " quote a value that contains spaces"
        )
    return _value(key, words[0])


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a type, without Annotated and None."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for option in get_args(annotation) for m in _members(option))
    return () if annotation is type(None) else (annotation,)


def _value(key: str, value: str | list[str]) -> Any:
    """Returns the value of a setting from the text of its flag, or from the texts if its flag takes
    several words.
    """
    if isinstance(value, list):
        return _value_of_texts(key, value)
    kinds = _members(FIELDS[key].annotation)
    optional = type(None) in get_args(FIELDS[key].annotation)
    has_text_choices = any(
        isinstance(choice, str)
        for kind in kinds
        if get_origin(kind) is Literal
        for choice in get_args(kind)
    )
    other_scalars = {float, bool} & {*kinds}  # with these, the text may be a number or a boolean
    if str in kinds or (has_text_choices and not other_scalars):
        return None if optional and value == "null" else value
    return parse_value(value)


def _value_of_texts(key: str, texts: list[str]) -> Any:
    """Returns a list or a mapping from JSON, else a list of the texts, or one text if the setting
    also accepts a string.
    """
    kinds = _members(FIELDS[key].annotation)
    tuples = [kind for kind in kinds if get_origin(kind) is tuple]
    if len(texts) == 1 and texts[0].lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):  # JSON, as in a request body
            parsed = json.loads(texts[0])
            is_string_list = (
                isinstance(parsed, list)
                and parsed
                and all(isinstance(item, str) for item in parsed)
            )
            takes_strings = any(get_args(kind)[:1] == (str,) for kind in tuples)
            if is_string_list or not takes_strings:
                return parsed  # otherwise the text is kept: `[1]` is a string in a list of strings
    if key.startswith("generation."):
        texts = [_unescape(text) for text in texts]
    holds_numbers = all(set(_members(get_args(kind)[0])) <= {int, float, bool} for kind in tuples)
    if len(tuples) == len(kinds) and holds_numbers:
        return [parse_value(text) for text in texts]
    if len(texts) > 1 or str not in kinds:
        return texts
    return _value(key, texts[0])


def _unescape(text: str) -> str:
    """Replaces backslash-n with a line break, and likewise \\t, \\r and \\\\."""
    # Two backslashes stand for one, so the other escapes are replaced only between such pairs.
    pieces = [
        piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
        for piece in text.split("\\\\")
    ]
    return "\\".join(pieces)

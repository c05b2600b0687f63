"""Command-line flags made from the settings: every key, flat (`--lr`) and by path (`--training.lr`)."""

import argparse
import contextlib
import difflib
import json
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from dantinox.config.sections import FIELDS
from dantinox.config.yaml_files import ALIASES, allowed, did_you_mean, flat_name, nearest_key, parse_value
from dantinox.files import UserError

SHORT_NAMES = {"data_path": "data.path"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are `UserError` sentences and that abbreviates nothing."""

    def __init__(self, **options: object):
        self.flags: list[str] = []  # those added so far, without the groups'
        given: Any = options
        super().__init__(allow_abbrev=False, **given)

    def add_argument(self, *names: str, **options: object) -> argparse.Action:
        self.flags += names
        given: Any = options
        return super().add_argument(*names, **given)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses all of `argv`; an unknown flag is named together with the nearest known one."""
        namespace, unknown = self.parse_known_args(argv)
        # argparse takes an optional positional argument behind the first flag for absent.
        if unknown and not unknown[0].startswith("-") and getattr(namespace, "run_path", "") is None:
            namespace.run_path = Path(unknown.pop(0))
        if unknown:
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                raise UserError(f"unknown argument {flag}")
            raise UserError(f"unknown flag {flag}{_nearest_flag(flag, getattr(namespace, 'flags', []))}")
        return namespace


def add_config_flags(parser: Parser, sections: tuple[str, ...] | None = None) -> None:
    """Adds a flag for every setting of `sections` (default: all); `overrides` reads them back."""
    keys = {key: key for key in FIELDS} | ALIASES
    keys = {name: key for name, key in keys.items() if sections is None or key.partition(".")[0] in sections}
    owners: dict[str, list[str]] = {}
    for name in keys:
        owners.setdefault(flat_name(name), []).append(name)
    taken = set(parser.flags)
    group = parser.add_argument_group("settings (each also as --section.key)")
    for name, key in keys.items():
        flat = flat_name(name)
        names = [f"--{name}"]
        if len(owners[flat]) == 1 and f"--{flat}" not in taken:
            names.insert(0, f"--{flat}")
        names += [f"--{short}" for short, target in SHORT_NAMES.items() if target == name]
        help_text = (f"{FIELDS[key].description}: {allowed(key)}").replace("%", "%%")
        parser.flags += names
        group.add_argument(*names, dest=f"config:{name}", default=None, help=help_text, metavar="V", **_arity(key))
    for flat, paths in owners.items():
        if len(paths) > 1 and f"--{flat}" not in taken:
            group.add_argument(f"--{flat}", dest=f"ambiguous:{flat}", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    parser.set_defaults(flags=sorted(parser.flags))


def _nearest_flag(flag: str, known: list[str]) -> str:
    """`, did you mean --lr?` for a misspelt flag, if the command has one like it."""
    key = nearest_key(flag.lstrip("-"))
    short, long = f"--{flat_name(key)}", f"--{key}"
    likely = [*((long, short) if "." in flag else (short, long)), *difflib.get_close_matches(flag, known, 1, cutoff=0.75)]
    return did_you_mean(next((name for name in likely if name in known), ""))


def overrides(namespace: argparse.Namespace) -> dict[str, object]:
    """The settings given as flags, dotted path → value. Raises a UserError for a flat name that stands in two sections."""
    found: dict[str, object] = {}
    for dest, given in vars(namespace).items():
        kind, colon, name = dest.partition(":")
        if given is None or not colon or kind not in ("config", "ambiguous"):
            continue
        if kind == "ambiguous":
            paths = [key for key in FIELDS if flat_name(key) == name]
            raise UserError(f"--{name} is a key of two sections: write {' or '.join('--' + path for path in paths)}")
        found[name] = _value(ALIASES.get(name, name), given)
    return found


def value_of(key: str, words: list[str]) -> object:
    """The value of a setting (dotted path) that words stand for, read as those behind its flag.

    Raises:
      UserError: there are several, and the setting has one.
    """
    if _arity(key).get("nargs") == "+":
        return _value(key, words)
    if len(words) > 1:
        raise UserError(f"{flat_name(key)} takes one value, got {len(words)}: put what belongs together in quotes")
    return _value(key, words[0])


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, without Annotated and None."""
    while hasattr(annotation, "__metadata__"):
        annotation = annotation.__origin__
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for option in get_args(annotation) for m in _members(option))
    return () if annotation is type(None) else (annotation,)


def _arity(key: str) -> dict[str, Any]:
    kinds = _members(FIELDS[key].annotation)
    if any(get_origin(kind) in (tuple, dict) for kind in kinds):
        return {"nargs": "+"}
    return {"nargs": "?", "const": "true"} if kinds == (bool,) else {}


def _value(key: str, given: str | list[str]) -> Any:
    kinds = _members(FIELDS[key].annotation)
    if isinstance(given, list):
        if len(given) == 1 and given[0].lstrip()[:1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):  # JSON, as in a request's body
                found = json.loads(given[0])
                strings = isinstance(found, list) and found and all(isinstance(item, str) for item in found)
                if strings or not any(get_args(kind)[:1] == (str,) for kind in kinds if get_origin(kind) is tuple):
                    return found  # a list of strings may hold the text `[1]` or `[]` itself
        texts = [_unescape(text) for text in given] if key.startswith("generation.") else given
        if len(texts) > 1 or str not in kinds:
            return texts
        given = texts[0]
    optional = type(None) in get_args(FIELDS[key].annotation)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if str in kinds or (float not in kinds and any(isinstance(word, str) for word in words)):
        return None if optional and given == "null" else given
    return parse_value(given)


def _unescape(text: str) -> str:
    """Turns the two characters backslash-n of a shell argument into a line break, likewise \\t and \\\\."""
    pieces = [piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r") for piece in text.split("\\\\")]
    return "\\".join(pieces)

"""The parser of a command. Every setting has a flat flag (`--lr`) and a flag with its path (`--training.lr`).

This module imports pydantic only where it is needed, so that help pages are fast.
"""

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dantinox.config.help_pages import LayeredParser
from dantinox.config.names import ALIASES, OTHER_FLAGS, SHORT_NAMES, flat_name
from dantinox.config.setting_records import setting_records
from dantinox.files import UserError

ARITY: dict[str, dict[str, Any]] = {"one": {}, "many": {"nargs": "+"}, "switch": {"nargs": "?", "const": "true"}}


class Parser(LayeredParser):
    """A parser that reports errors as `UserError`."""

    def error(self, message: str) -> NoReturn:
        choices = next((action.choices for action in self.own if isinstance(action.choices, dict)), {})
        if choices and message.startswith("the following arguments are required"):
            message += f", one of {', '.join(choices)}"
        raise UserError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses all of `argv`. The error about an unknown flag suggests the most similar known flag."""
        if dashes := next((value for value in argv if re.fullmatch("-{3,}", value)), None):
            raise UserError(f"the value {dashes} must be written as FLAG={dashes}, because it looks like a flag")
        namespace, unknown = self.parse_known_args(argv)
        # argparse treats an optional positional argument as absent if it comes after a flag.
        if unknown and not unknown[0].startswith("-") and getattr(namespace, "run_path", "") is None:
            namespace.run_path = Path(unknown.pop(0))
        if unknown:
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                raise UserError(f"unknown argument {flag}")
            raise UserError(f"unknown flag {flag}{_nearest_flag(flag, namespace.flags)}")
        return namespace


def add_config_flags(parser: Parser, sections: tuple[str, ...] | None = None, most_used: Sequence[str] = ()) -> None:
    """Adds a flag for every setting of `sections` (default: all); `overrides` reads them back.

    Args:
      most_used: names (without dashes) of the flags that the first help page shows: the command's own flags and flags of
        settings.
    """
    records = {record.key: record for record in setting_records()}
    keys = {key: key for key in records} | ALIASES
    keys = {name: key for name, key in keys.items() if sections is None or key.partition(".")[0] in sections}
    owners: dict[str, list[str]] = {}
    for name in keys:
        owners.setdefault(flat_name(name), []).append(name)
    taken = set(parser.flags)
    group = parser.add_argument_group("settings (each also as --section.key)")
    for name, key in keys.items():
        flat = flat_name(name)
        record = records[key]
        names = [f"--{name}"]
        if len(owners[flat]) == 1 and f"--{flat}" not in taken:
            names.insert(0, f"--{flat}")
        names += [f"--{short}" for short, target in SHORT_NAMES.items() if target == name]
        alias = name != key
        help_text = f"alias of --{flat_name(key)}" if alias else f"{record.help}: {record.type}".replace("%", "%%")
        parser.flags += names
        action = group.add_argument(
            *names, dest=f"config:{name}", default=None, help=help_text, metavar="V", **ARITY[record.arity]
        )
        parser.settings[name] = record, action
    for flat, paths in owners.items():
        if len(paths) > 1 and f"--{flat}" not in taken:
            group.add_argument(f"--{flat}", dest=f"ambiguous:{flat}", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    parser.most_used = tuple(most_used)


def _nearest_flag(flag: str, known: list[str]) -> str:
    """Returns the end of the error about an unknown flag, such as `, did you mean --lr?`; empty if no flag is similar."""
    from dantinox.config.yaml_files import did_you_mean, nearest_key

    name = flag.lstrip("-").replace("-", "_")
    if name in OTHER_FLAGS:
        return OTHER_FLAGS[name]
    key = nearest_key(name)
    short = f"--{flat_name(key)}"
    long = f"--{key}"
    candidates = [*((long, short) if "." in flag else (short, long)), *difflib.get_close_matches(flag, known, 1, cutoff=0.75)]
    return did_you_mean(next((name for name in candidates if name in known), ""))

"""The parser of a command. Every setting has a flat flag (`--lr`) and a flag with its path
(`--training.lr`).

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

# Arity of a setting → the options of its flag for argparse.
ARITY: dict[str, dict[str, Any]] = {
    "one": {},
    "many": {"nargs": "+"},
    "switch": {"nargs": "?", "const": "true"},
}


class Parser(LayeredParser):
    """A parser that reports errors as `UserError`."""

    def error(self, message: str) -> NoReturn:
        commands = next(
            (action.choices for action in self.own if isinstance(action.choices, dict)), {}
        )
        if commands and message.startswith("the following arguments are required"):
            message += f", one of {', '.join(commands)}"
        raise UserError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parses all of `argv`. The error about an unknown flag suggests the most similar known
        flag.
        """
        if dashes := next((value for value in argv if re.fullmatch("-{3,}", value)), None):
            raise UserError(
                f"the value {dashes} must be written as FLAG={dashes}, because it looks like a flag"
            )
        namespace, unknown = self.parse_known_args(argv)
        # argparse treats an optional positional argument as absent if it comes after a flag.
        if (
            unknown
            and not unknown[0].startswith("-")
            and getattr(namespace, "run_path", "") is None
        ):
            namespace.run_path = Path(unknown.pop(0))
        if unknown:
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                raise UserError(f"unknown argument {flag}")
            raise UserError(f"unknown flag {flag}{_nearest_flag(flag, namespace.flags)}")
        return namespace


def add_config_flags(
    parser: Parser, sections: tuple[str, ...] | None = None, most_used: Sequence[str] = ()
) -> None:
    """Adds a flag for every setting of `sections` (default: all); `overrides` reads them back.

    Args:
      most_used: names (without dashes) of the flags that the first help page shows: the command's
        own flags and flags of settings.
    """
    records = {record.key: record for record in setting_records()}
    # Dotted path of a setting or of an alias → dotted path of the setting.
    keys = {
        path: key
        for path, key in ({key: key for key in records} | ALIASES).items()
        if sections is None or key.partition(".")[0] in sections
    }
    paths_of_flat: dict[str, list[str]] = {}
    for path in keys:
        paths_of_flat.setdefault(flat_name(path), []).append(path)
    own_flags = set(parser.flags)
    group = parser.add_argument_group("settings (each also as --section.key)")
    for path, key in keys.items():
        flat = flat_name(path)
        record = records[key]
        flags = [f"--{path}"]
        if len(paths_of_flat[flat]) == 1 and f"--{flat}" not in own_flags:
            flags.insert(0, f"--{flat}")
        flags += [f"--{short}" for short, target in SHORT_NAMES.items() if target == path]
        is_alias = path != key
        help_text = (
            f"alias of --{flat_name(key)}"
            if is_alias
            else f"{record.help}: {record.type}".replace("%", "%%")
        )
        parser.flags += flags
        action = group.add_argument(
            *flags,
            dest=f"config:{path}",
            default=None,
            help=help_text,
            metavar="V",
            **ARITY[record.arity],
        )
        parser.settings[path] = record, action
    for flat, paths in paths_of_flat.items():
        # `overrides` reports that the flag is ambiguous.
        if len(paths) > 1 and f"--{flat}" not in own_flags:
            group.add_argument(
                f"--{flat}",
                dest=f"ambiguous:{flat}",
                nargs="?",
                const="",
                default=None,
                help=argparse.SUPPRESS,
            )
    parser.most_used = tuple(most_used)


def _nearest_flag(flag: str, known: list[str]) -> str:
    """Returns the end of the error about an unknown flag, such as `, did you mean --lr?`; empty if
    no flag is similar.
    """
    from dantinox.config.yaml_files import did_you_mean, nearest_key

    name = flag.lstrip("-").replace("-", "_")
    if name in OTHER_FLAGS:
        return OTHER_FLAGS[name]
    key = nearest_key(name)
    candidates = [f"--{flat_name(key)}", f"--{key}"]
    if "." in flag:
        candidates.reverse()
    candidates += difflib.get_close_matches(flag, known, 1, cutoff=0.75)
    return did_you_mean(next((candidate for candidate in candidates if candidate in known), ""))

"""Flags of commands with several kinds, such as `calibrate --what kv` and `eval ppl`: most flags
belong to some of the kinds only.
"""

import argparse
from typing import Any

from dantinox.cli.common import whole_number
from dantinox.config.flags import Parser
from dantinox.files import UserError

COUNT_OPTION: dict[str, Any] = {"type": whole_number, "metavar": "N"}
# Flag → the kinds that it applies to ("": all kinds), and its arguments for `add_argument`. A kind
# is a value of `calibrate --what`, or a subcommand of `eval`.
Flags = dict[str, tuple[str, dict[str, Any]]]


def add_flags(command: Parser, flags: Flags, kind: str = "") -> None:
    """Adds flags to a parser.

    If `kind` is not empty, the flags of the other kinds are parsed but hidden from `--help`, so
    that `given_flags` can name them in its error.
    """
    for name, (kinds, arguments) in flags.items():
        text = arguments["help"]
        if kind and kinds and kind not in kinds.split():
            text = argparse.SUPPRESS
        elif isinstance(text, dict):
            text = text[kind]
        elif not kind and kinds:
            text = f"{kinds}: {text}"
        command.add_argument(f"--{name}", **arguments | {"help": text})


def given_flags(options: argparse.Namespace, flags: Flags, chosen: str) -> dict[str, Any]:
    """Returns the flags that were given.

    Args:
      chosen: the part of the command line that selects the kind: `--what kv` or `eval kv`.

    Raises:
      UserError: a flag belongs to another kind.
    """
    found = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    for name in found:
        kinds = flags[name][0].split()
        if kinds and options.what not in kinds:
            allowed = " and ".join(chosen.replace(options.what, kind) for kind in kinds)
            raise UserError(f"--{name} has no effect with {chosen}: it is a flag of {allowed}")
    return found

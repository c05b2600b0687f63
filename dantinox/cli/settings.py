"""`dantinox settings` and `dantinox completion`: their flags and output."""

import argparse
import fnmatch
import json
from collections.abc import Iterator

from dantinox.cli.common import print_lines
from dantinox.config.flags import Parser
from dantinox.config.help_pages import setting_entry
from dantinox.config.names import OTHER_NAMES
from dantinox.config.setting_groups import GROUPS
from dantinox.config.setting_records import SettingRecord, section_titles, setting_records
from dantinox.files import UserError, escape_name

SHELLS = ("bash", "zsh", "fish")


def add_settings_flags(command: Parser) -> None:
    text = (
        "substring or glob pattern of name, help, type, range,"
        " default or prerequisite; case is ignored"
    )
    command.add_argument(
        "pattern", nargs="?", metavar="PATTERN", help=text + " (default: all settings)"
    )
    command.add_argument(
        "--section",
        metavar="NAME",
        help="show only a section or a group of settings, such as training or optimizer",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object per setting")


def settings(options: argparse.Namespace) -> int:
    found = find_settings(options.pattern or "", options.section)
    if not found:
        raise UserError(
            f"no setting matches {escape_name(options.pattern)}: leave"
            " the pattern out to list all settings"
        )
    return print_lines(lambda _: _json_lines(found) if options.json else _table(found))


def find_settings(pattern: str, section: str | None = None) -> list[SettingRecord]:
    """Returns the settings that match a substring or a glob pattern.

    The pattern is matched against name, aliases, names in other programs, help, type, default and
    prerequisites.

    Raises:
      UserError: there is no such section or group.
    """
    if section is not None and section not in (*section_titles(), *GROUPS):
        names = ", ".join((*section_titles(), *GROUPS))
        raise UserError(f"no section {escape_name(section)}: the sections and groups are {names}")
    wanted = pattern.lower()
    is_glob = any(character in pattern for character in "*?[")
    return [
        record
        for record in setting_records()
        if section in (None, record.section, record.group)
        and any(_matches(text, wanted, is_glob) for text in _searchable_texts(record))
    ]


def _searchable_texts(record: SettingRecord) -> Iterator[str]:
    """Yields the texts of a setting in which a pattern is searched, in lower case."""
    elsewhere = [name for name, key in OTHER_NAMES.items() if key == record.key]
    names = (
        record.key,
        record.name,
        record.flag,
        record.flag.lstrip("-"),
        *record.aliases,
        *elsewhere,
    )
    texts = (*names, record.type, record.default_text, record.help)
    yield from (text.lower() for text in (*texts, *record.prerequisites))


def _matches(text: str, pattern: str, is_glob: bool) -> bool:
    return pattern in text or (is_glob and fnmatch.fnmatchcase(text, pattern))


def _json_lines(found: list[SettingRecord]) -> Iterator[str]:
    for record in found:
        yield json.dumps(
            {"key": record.key, "flag": record.flag} | record._asdict(), ensure_ascii=False
        )


def _table(found: list[SettingRecord]) -> Iterator[str]:
    for section in dict.fromkeys(record.section for record in found):
        records = [record for record in found if record.section == section]
        yield f"{section} ({len(records)}): {section_titles()[section]}"
        for record in records:
            yield from setting_entry(record)


def add_completion_flags(command: Parser) -> None:
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def completion(options: argparse.Namespace) -> int:
    from dantinox.cli.completion import completion_script

    print(completion_script(options.shell), end="")
    return 0

"""Layered help: the first page of a command, a page for each section of flags, and all pages
together.
"""

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from dantinox.config.names import REQUEST_SECTIONS, flat_name
from dantinox.config.setting_groups import GROUPS
from dantinox.config.setting_records import SettingRecord, section_titles
from dantinox.files import UserError, escape_name

COMMAND = "command"  # the section of flags that are in no other section
FLAG_COLUMN = 24  # the column in which descriptions begin
MAX_WIDTH = 110


class FlagSection:
    """Flags of a command that the help shows together under one name."""

    def __init__(self, parser: "LayeredParser", name: str, title: str):
        self.title = title
        self.actions: list[argparse.Action] = []
        self._parser = parser
        self._group = parser.add_argument_group(name, title)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds a flag like `argparse.ArgumentParser.add_argument`."""
        self._parser.flags += names
        self.actions.append(self._group.add_argument(*names, **options))
        return self.actions[-1]


class LayeredParser(argparse.ArgumentParser):
    """An ArgumentParser with layered help. It does not accept abbreviated flags.

    Attributes:
      flags: all flags, with their dashes.
      sections: the command's own flags by section.
      own: the command's own flags that are in no section.
      settings: dotted path (of a setting or an alias) → its record and flag.
      most_used: names (without dashes) of the flags that the first help page shows. If it is empty,
        the page shows every flag that is not a setting.
    """

    def __init__(self, **options: Any):
        self.flags: list[str] = []
        self.sections: dict[str, FlagSection] = {}
        self.own: list[argparse.Action] = []
        self.settings: dict[str, tuple[SettingRecord, argparse.Action]] = {}
        self.most_used: tuple[str, ...] = ()
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.set_defaults(flags=self.flags)  # those of the command, for `Parser.parse`
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="SECTION",
            help="show this help, or one section",
        )
        self.add_argument("--help-all", action=_Help, nargs=0, help=argparse.SUPPRESS)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self.flags += names
        self.own.append(super().add_argument(*names, **options))
        return self.own[-1]

    def add_subparsers(self, **options: Any) -> Any:
        action = super().add_subparsers(**options)
        self.own.append(action)
        return action

    def section(self, name: str, title: str) -> FlagSection:
        """Returns a new section of the command's own flags."""
        self.sections[name] = FlagSection(self, name, title)
        return self.sections[name]

    def section_names(self) -> list[str]:
        """Returns the names that `--help` accepts, which are sections and groups of settings."""
        titles = _titles(self)
        return [*titles, *(key for key, group in GROUPS.items() if group.section in titles)]

    def format_help(self) -> str:
        return first_page(self)


class _Help(argparse.Action):
    """`--help`, `--help SECTION` and `--help-all`: prints a page and exits."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any):
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, **options
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, LayeredParser)
        if option_string == "--help-all":
            text = all_pages(parser)
        else:
            text = section_page(parser, values) if values else first_page(parser)
        print(text, end="")
        parser.exit()


def first_page(parser: LayeredParser) -> str:
    """Returns usage, the most used flags with their defaults, and the list of sections."""
    lines = [*textwrap.wrap(_usage(parser), _width(), subsequent_indent=" " * 9), ""]
    lines += [*textwrap.wrap(parser.description or "", _width()), ""]
    commands = _subcommands(parser)
    positional = [
        action for action in parser.own if not action.option_strings and not _is_commands(action)
    ]
    lines += [line for action in positional for line in _own_entry(action)]
    if positional:
        lines.append("")
    if commands:
        lines += [
            "commands:",
            *(line for name, text in commands.items() for line in _entry(f"  {name}", text)),
            "",
        ]
    titles = _titles(parser)
    layered = bool(titles)
    lines += ["most used flags:" if layered else "flags:"]
    lines += [line for entry in _most_used(parser) for line in entry]
    if layered:
        lines += ["", "sections, with the number of their flags:"]
        lines += [
            line
            for name, title in titles.items()
            for line in _entry(f"  {name} ({_count(parser, name)})", title)
        ]
        text = (
            f"{parser.prog} --help SECTION shows a section or a group, --help-all shows every flag."
        )
        lines += ["", *textwrap.wrap(text, _width())]
    elif commands:
        first = next(iter(commands))
        lines += ["", f"{parser.prog} {first} --help describes a command, here {first}."]
    return _join_lines(lines)


def section_page(parser: LayeredParser, name: str) -> str:
    """Returns the flags of a section or of a group of settings, with type or choices, range,
    default and prerequisites.

    If the parser has subcommands, `name` is a subcommand, and the function returns the first page
    of its help.

    Raises:
      UserError: the command has no section of this name; the error lists its sections.
    """
    commands = next(
        (action.choices for action in parser.own if isinstance(action, argparse._SubParsersAction)),
        {},
    )
    if isinstance(commands.get(name), LayeredParser):
        return first_page(commands[name])
    titles = _titles(parser)
    group = GROUPS.get(name)
    if name in titles or (group is not None and group.section in titles):
        return _join_lines(_section_lines(parser, name))
    if not titles:
        raise UserError(f"{parser.prog} has no help sections: leave {escape_name(name)} out")
    near = difflib.get_close_matches(name, parser.section_names(), 1)
    hint = f", did you mean {near[0]}?" if near else ""
    raise UserError(
        f"no section {escape_name(name)} of {parser.prog}{hint} (the sections are"
        f" {', '.join(titles)})"
    )


def all_pages(parser: LayeredParser) -> str:
    """Returns the first page and the pages of all sections."""
    pages = [_section_lines(parser, name) for name in _titles(parser)]
    return first_page(parser) + "".join("\n" + _join_lines(page) for page in pages)


def setting_entry(record: SettingRecord, flag: str = "") -> list[str]:
    """Returns the lines that describe a setting: its flag (or name) and help, then type, range,
    default and prerequisites.
    """
    needs = "; needs " + " and ".join(record.prerequisites) if record.prerequisites else ""
    detail = f"{record.type}; default: {record.default_text}{needs}"
    return [*_entry(f"  {flag or record.name}", record.help), *_wrapped(detail, FLAG_COLUMN + 2)]


def _section_lines(parser: LayeredParser, name: str) -> list[str]:
    """Returns the page of a section of flags, a section of settings, or a group of settings."""
    group = GROUPS.get(name)
    titles = _titles(parser)
    if name not in titles and group is not None:
        heading = (
            f"{name}: {group.title}; a group of {group.section}; each also as"
            f" --{group.section}.NAME:"
        )
        return [heading, *_setting_lines(parser, group.section, name)]
    heading = f"{name}: {titles[name]}"
    if name in parser.sections or name == COMMAND:
        actions = parser.sections[name].actions if name in parser.sections else _unsectioned(parser)
        return [heading, *(line for action in actions for line in _own_entry(action))]
    lines = [f"{heading}; each also as --{name}.NAME:"]
    of_section = {
        path: record for path, (record, _) in parser.settings.items() if record.section == name
    }
    for key in dict.fromkeys(record.group for record in of_section.values()):
        if key:
            lines += ["", f" {key}: {GROUPS[key].title}"]
        lines += _setting_lines(parser, name, key)
    aliases = {path: record for path, record in of_section.items() if path != record.key}
    if aliases:
        lines += ["", " other names:"]
    for path, record in aliases.items():
        lines += _entry(f"  --{flat_name(path)}", f"alias of --{flat_name(record.key)}")
    return lines


def _setting_lines(parser: LayeredParser, section: str, group: str) -> Iterator[str]:
    """Yields the lines of the settings of a group, or of a section without groups; aliases are left
    out.
    """
    for path, (record, action) in parser.settings.items():
        if path == record.key and (record.section, record.group) == (section, group):
            yield from setting_entry(record, _names(action))


def _most_used(parser: LayeredParser) -> Iterator[list[str]]:
    """Yields the lines of each flag on the first page."""
    flags = [action for action in _command_actions(parser) if action.option_strings]
    command_flags = {action.option_strings[-1].lstrip("-"): action for action in flags}
    settings = {
        flag.lstrip("-"): record
        for record, action in parser.settings.values()
        for flag in action.option_strings
    }
    has_sections = bool(parser.settings or parser.sections)
    visible = [name for name, action in command_flags.items() if action.help != argparse.SUPPRESS]
    for name in parser.most_used or visible:
        if name == "help" and not has_sections:
            yield _entry("  --help", "show this help")
        elif name in command_flags:
            yield _own_entry(command_flags[name])
        else:
            record = settings[name]
            yield _entry(
                f"  --{name} {_metavar(record)}", record.help + _default_note(parser, record)
            )


def _default_note(parser: LayeredParser, record: SettingRecord) -> str:
    """Returns ` (default: …)`, or "" if the help text explains the default, as in
    `number of heads (null: all)`.
    """
    text = record.default_text
    if _has_run(parser) and record.section in REQUEST_SECTIONS:
        return f" (default: run's, else {text})"
    return "" if f"({text}:" in record.help else f" (default: {text})"


def _has_run(parser: LayeredParser) -> bool:
    """Returns whether the command reads its default settings from a run."""
    return any(action.dest == "run_path" for action in parser.own)


def _titles(parser: LayeredParser) -> dict[str, str]:
    """Returns the sections that `--help` accepts: name → title, followed by the groups of the
    section.
    """
    if not parser.settings and not parser.sections:
        return {}
    titles = {name: section.title for name, section in parser.sections.items()}
    if _unsectioned(parser):
        titles[COMMAND] = "Other flags of this command" if titles else "Flags of this command"
    for name, title in section_titles().items():
        if any(record.section == name for record, _ in parser.settings.values()):
            groups = [key for key, group in GROUPS.items() if group.section == name]
            titles[name] = title.rstrip(".")
            if groups:
                titles[name] += f" (groups: {', '.join(groups)})"
    return titles


def _count(parser: LayeredParser, name: str) -> int:
    """Returns the number of flags of a section, without aliases."""
    if name in parser.sections:
        return len(parser.sections[name].actions)
    if name == COMMAND:
        return len(_unsectioned(parser))
    return sum(
        path == record.key and record.section == name
        for path, (record, _) in parser.settings.items()
    )


def _command_actions(parser: LayeredParser) -> list[argparse.Action]:
    """Returns all flags that are not settings, and the positional arguments."""
    return [
        *parser.own,
        *(action for section in parser.sections.values() for action in section.actions),
    ]


def _unsectioned(parser: LayeredParser) -> list[argparse.Action]:
    """Returns the flags that are neither settings nor in a section."""
    return [
        action
        for action in parser.own
        if action.option_strings and action.help != argparse.SUPPRESS
    ]


def _subcommands(parser: LayeredParser) -> dict[str, str]:
    """Returns name → help of each subcommand."""
    for action in parser.own:
        if isinstance(action, argparse._SubParsersAction):
            return {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {}


def _usage(parser: LayeredParser) -> str:
    """Returns the line `usage: …` with positional arguments and required flags."""
    parts = ["usage:", parser.prog]
    for action in parser.own:
        if _is_commands(action):
            parts.append(str(action.metavar or "command").upper())
        elif not action.option_strings:
            repeats = action.nargs in ("+", "*")
            name = f"{action.metavar or action.dest.upper()}{' …' if repeats else ''}"
            parts.append(f"[{name}]" if action.nargs in ("?", "*") else name)
        elif action.required:
            parts.append(_names(action))
    return " ".join([*parts, "[flags]"])


def _is_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _names(action: argparse.Action) -> str:
    """Returns a flag with its value, as the help shows it: the flat flag of a setting, if there is
    one, without its path.
    """
    long = [name for name in action.option_strings if name.startswith("--")]
    flag = next((name for name in long if "." not in name), long[0])
    if action.nargs == 0:
        return flag
    if isinstance(action.metavar, str) and action.metavar:
        value = action.metavar
    elif action.choices:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        value = action.dest.upper()
    if action.nargs in ("+", "*"):
        value += " …"
    return f"{flag} [{value}]" if action.nargs == "?" else f"{flag} {value}"


def _metavar(record: SettingRecord) -> str:
    """Returns the value of a setting's flag, as the help shows it."""
    return {"one": "V", "many": "V …", "switch": "[V]"}[record.arity]


def _own_entry(action: argparse.Action) -> list[str]:
    """Returns the lines of a flag, a positional argument or the list of subcommands."""
    name = _names(action) if action.option_strings else str(action.metavar or action.dest)
    return _entry(f"  {name}", action.help or "")


def _entry(name: str, text: str) -> list[str]:
    """Returns a name with its description in the second column, below the name if the name is too
    long.
    """
    lines = list(_wrapped(text, FLAG_COLUMN))
    if len(name) <= FLAG_COLUMN - 2 and lines:
        return [name.ljust(FLAG_COLUMN) + lines[0].lstrip(), *lines[1:]]
    return [name, *lines]


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, _width(), initial_indent=space, subsequent_indent=space, break_long_words=False
    )


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), MAX_WIDTH)


def _join_lines(lines: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"

"""The YAML of config files: a strict, safe loader that knows the line of every key, and a dumper
whose text it reads back unchanged.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dantinox.config.sections import SECTIONS
from dantinox.files import UserError, escape_name, quote, read_text

MAX_FILE_BYTES = 1 << 20


class _RejectedYAML(yaml.MarkedYAMLError):
    """The error for valid YAML that a config does not allow. It contains the line number."""


class _Loader(yaml.SafeLoader):
    """A SafeLoader that rejects duplicate keys and aliases of collections, and reads 5e-4 as a
    number.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and isinstance(node, yaml.CollectionNode):
            # Nested aliases expand exponentially when they are printed ("billion laughs").
            raise _RejectedYAML(
                problem="an alias (*name) may stand for a single value only", problem_mark=mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node)
            mark = key_node.start_mark
            if not isinstance(key, str):
                raise _RejectedYAML(
                    problem=f"a key must be a name, got {quote(key)}", problem_mark=mark
                )
            if key in seen:
                problem = (
                    f"the key {quote(key)} appears twice, in lines {seen[key]} and {mark.line + 1}"
                )
                raise _RejectedYAML(problem=problem, problem_mark=mark)
            seen[key] = mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        # PyYAML raises many types, for example for 2024-13-45, !!int "" or an integer of 5,000
        # digits.
        except Exception:
            kind = node.tag.rpartition(":")[2]
            value = f"{quote(node.value)} " if isinstance(node, yaml.ScalarNode) else ""
            raise _RejectedYAML(
                problem=f"{value}cannot be read as {escape_name(kind)}",
                problem_mark=node.start_mark,
            ) from None

    def construct_undefined(self, node: yaml.Node) -> Any:
        tag = escape_name(node.tag.replace("tag:yaml.org,2002:", "!!"))
        problem = f"the tag {tag} is not allowed: a config holds plain values only"
        raise _RejectedYAML(problem=problem, problem_mark=node.start_mark)


_Loader.add_constructor(None, _Loader.construct_undefined)  # of every other tag


class _Dumper(yaml.SafeDumper):
    """A SafeDumper whose output `_Loader` reads back unchanged. It quotes "5e-4" and escapes
    Unicode line breaks.
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if any(character in data for character in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
# YAML 1.1 requires a point in a number with an exponent. The last argument lists the first
# characters of such numbers.
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )


def dump_yaml(tree: Mapping[str, object]) -> str:
    """Returns a tree of plain values as YAML text, which `read_yaml` reads back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_value(text: str) -> object:
    """Parses the value of a flag with the rules of the YAML files."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError):
        return text


def read_yaml(
    path: Path, sections: Sequence[str] = tuple(SECTIONS), kind: str = "config file"
) -> tuple[dict[str, object], dict[str, int]]:
    """Returns the tree of a YAML file, and the line number of every section and key.

    Args:
      sections: the sections that the file may contain, for messages.
      kind: the kind of file, for messages.

    Raises:
      UserError: the file cannot be read, is not YAML, or is not a mapping.
    """
    text = read_text(path, MAX_FILE_BYTES, f"the {kind}")
    try:
        tree, lines = _parse(text)
    except yaml.MarkedYAMLError as error:
        raise UserError(_yaml_sentence(error, path)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"not valid YAML: the character U+{int(error.character):04X} ({path}, line {line})"
        ) from None
    except RecursionError:
        raise UserError(f"not a {kind}: nested too deep to read ({path})") from None
    if tree is None:
        raise UserError(
            f"{path} is empty: a config needs at least one section ({', '.join(sections)})"
        )
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold sections ({', '.join(sections)}), got {quote(tree)}")
    return tree, lines


def _parse(text: str) -> tuple[Any, dict[str, int]]:
    """Returns the value of a YAML text, and the line numbers of its sections and their keys."""
    loader = _Loader(text)  # a SafeLoader
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        for section, content in node.value if isinstance(node, yaml.MappingNode) else ():
            lines[str(section.value)] = section.start_mark.line + 1
            if isinstance(content, yaml.MappingNode):
                lines |= {
                    f"{section.value}.{key.value}": key.start_mark.line + 1
                    for key, _ in content.value
                }
        return (None if node is None else loader.construct_document(node)), lines
    finally:
        loader.dispose()


def _yaml_sentence(error: yaml.MarkedYAMLError, path: Path) -> str:
    """Returns an error of the YAML parser as one sentence with file and line."""
    problem = " ".join(str(error.problem).split())
    if problem.startswith(
        "but "
    ):  # PyYAML says `expected …` in the context and `but found …` in the problem
        problem = f"{error.context}, {problem}"
    if not isinstance(error, _RejectedYAML):
        problem = f"not valid YAML: {problem}"
    line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
    return f"{problem} ({path}{line})"

"""Loads and dumps configs: YAML files, overrides, aliases and one-sentence validation errors."""

import difflib
import json
import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from dantinox.config.names import (
    ALIASES,
    FORMER_DEFAULTS,
    FORMER_NAMES,
    OTHER_NAMES,
    REQUEST_SECTIONS,
    SAME_NAMES,
    flat_name,
)
from dantinox.config.packaged import CONFIGS
from dantinox.config.sections import (
    FIELDS,
    NEEDS,
    SECTIONS,
    UNCHECKED,
    Config,
    find_inactive,
    flatten_config,
    reset_settings,
)
from dantinox.config.setting_records import PREREQUISITES, type_in_words
from dantinox.config.yaml_text import dump_yaml, read_yaml
from dantinox.files import UserError, escape_name, quote


def find_config(name: str | Path) -> Path:
    """Returns the path of a config file. If there is no such file, returns the path of the packaged
    config of that name.

    Raises:
      UserError: neither of them exists, and the name has no suffix.
    """
    path = Path(name)
    packaged = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    if not path.is_file() and str(path) in packaged:
        return packaged[str(path)]
    if len(path.parts) == 1 and not path.suffix and not os.path.exists(path):
        similar = difflib.get_close_matches(str(path), packaged, 1)
        advice = ": use a file, or one of the packaged configs "
        if similar:
            advice = f"{did_you_mean(similar[0])} The packaged configs are "
        raise UserError(f"no config file at {escape_name(str(path))}{advice}{', '.join(packaged)}")
    return path


def load_config(path: str | Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Reads a YAML file, or the packaged config of that name, and applies overrides.

    Args:
      path: a YAML file, or a name such as "quickstart".
      overrides: dotted path → value. They replace settings of the file.

    Returns:
      The validated settings. Settings that the file does not contain have their default.

    Raises:
      UserError: the file cannot be read or is not YAML, or a setting has a wrong name, type or
        range.

    Example:
      >>> config = dantinox.load_config("quickstart", {"training.lr": 5e-4, "training.steps": 100})
      >>> config.training.lr, config.data.path
      (0.0005, 'builtin:python')
    """
    tree, where, source = read_config(path)
    return build_config(tree, overrides, where, source)


def read_config(path: str | Path) -> tuple[dict[str, object], dict[str, str], str]:
    """Returns the tree of a YAML file or of a packaged config, the place of every section and key,
    and the path of the file, which messages name.
    """
    path = find_config(path)
    tree, lines = read_yaml(path)
    return tree, {key: f"{path}, line {line}" for key, line in lines.items()}, str(path)


def build_config(
    tree: Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    where: dict[str, str] | None = None,
    source: str = "",
    origin: str = "command line",
) -> Config:
    """Applies overrides to a tree of sections and validates the result.

    An override that has no effect with the other settings is an error. If settings of the tree have
    no effect, the function prints one warning for each reason. A setting that equals its default is
    never reported.

    Args:
      tree: section → name → value.
      overrides: dotted path → value.
      where: dotted path → file and line, for messages.
      source: the source of the tree, for messages.
      origin: the source of the overrides, for messages.

    Raises:
      UserError: a setting has a wrong name, type or range, settings contradict each other, or an
        override has no effect.
    """
    config, unused = validate_settings(tree, overrides or {}, where or {}, source, origin)
    warn_inactive(unused, where or {}, source)
    return config


def validate_settings(
    tree: Mapping[str, object],
    overrides: Mapping[str, object],
    where: dict[str, str],
    source: str,
    origin: str,
) -> tuple[Config, dict[str, str]]:
    """Returns the validated config, and dotted path → reason for each setting without effect.

    The arguments and errors are the same as for `build_config`.
    """
    where = dict(where)
    written = _resolve_aliases(_flatten_tree(tree, where, source, origin), where, source)
    changes = _resolve_aliases(overrides, {}, origin)
    where |= dict.fromkeys(changes, origin)
    nested: dict[str, dict[str, object]] = {}
    for key, value in (written | changes).items():
        check_text(key, value, where, source)
        section, _, name = key.partition(".")
        # YAML 1.1 reads a bare `off` as false.
        is_off = value is False and "off" in choices(key)
        nested.setdefault(section, {})[name] = "off" if is_off else value
    try:
        config = Config.model_validate(nested, context=UNCHECKED)
    except ValidationError as error:
        raise _error_of(error, where, source) from None
    unused = find_inactive(config)
    for key, reason in unused.items():
        if key in changes:
            hint = did_you_mean(SAME_NAMES.get(key, ""))
            sentence = f"{key} has no effect {reason}{hint}{_place(key, where, source)}"
            raise UserError(sentence, key=key, value=changes[key])
    if "training.steps" in changes and "training.warmup_steps" not in changes:
        config = _shorten_warmup(config, _place("training.warmup_steps", where, source))
    for key, problem in reset_settings(config, unused).conflicts():
        place = _conflict_place(key, problem, where, origin if changes else source)
        raise UserError(f"{key} {problem}{place}", key=key, value=flatten_config(config)[key])
    return config, unused


def _flatten_tree(
    tree: Mapping[str, object], where: Mapping[str, str], source: str, origin: str
) -> dict[str, object]:
    """Returns dotted path → value of every setting in a tree of sections; the names are not
    checked.

    Raises:
      UserError: a section does not exist or is not a mapping, or the settings are in no section.
    """
    if len(tree) > 1 and not any(section in SECTIONS for section in tree):
        unsectioned = next(
            (key for key in (*FIELDS, *ALIASES) if key.partition(".")[2] in tree), None
        )
        if unsectioned:
            section, _, name = unsectioned.partition(".")
            raise UserError(
                f"{source or origin} has no sections, like a config of DantinoX 0: write {name}"
                f" under {section}: and so on (`dantinox init FILE` writes an example, `dantinox"
                " import` converts a run of DantinoX 0)"
            )
    written: dict[str, object] = {}
    for section, content in tree.items():
        if section not in SECTIONS:
            nearest = _nearest_section(section)
            place = _place(section, where, source)
            raise UserError(f"no section {escape_name(section)}{nearest}{place}")
        if content is None:
            continue
        if not isinstance(content, dict):
            raise UserError(
                f"{section} must be a section of keys, got"
                f" {quote(content)}{_place(section, where, source)}"
            )
        written |= {f"{section}.{key}": value for key, value in content.items()}
    return written


def _shorten_warmup(config: Config, place: str) -> Config:
    """Resets a warm-up that is longer than the training, with a warning, if an override has
    shortened the training.
    """
    warmup = config.training.warmup_steps or 0
    steps = config.training.steps
    if steps is None or warmup <= steps:
        return config
    conflict = f"training.warmup_steps {warmup}{place} is more than training.steps {steps}"
    warnings.warn(f"{conflict}: the learning rate warms up for a tenth of the steps", stacklevel=4)
    return reset_settings(config, ["training.warmup_steps"])


def warn_inactive(unused: Mapping[str, str], where: Mapping[str, str], source: str) -> None:
    """Prints one warning per reason about settings without effect."""
    for reason in dict.fromkeys(unused.values()):
        keys = [key for key in unused if unused[key] == reason]
        listed = keys[0]
        verb = "has"
        if len(keys) > 1:
            listed = f"{', '.join(keys[:-1])} and {keys[-1]}"
            verb = "have"
        warnings.warn(
            f"{listed} {verb} no effect {reason}{_place(keys[0], where, source)}", stacklevel=3
        )


def check_text(key: str, value: object, where: dict[str, str], source: str) -> None:
    """Raises a UserError for a string with lone surrogates, or for a path that is empty or contains
    NUL.
    """
    is_path = key.endswith("path") or key in (
        "training.init_from",
        "distill.teacher",
        "kv.calibration",
        "data.chat_template",
    )
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str):
            continue
        surrogate = any("\ud800" <= character <= "\udfff" for character in text)
        if surrogate or (is_path and (not text or "\0" in text)):
            expected = "valid Unicode text" if surrogate else "a path"
            sentence = (
                f"{escape_name(key)} must be {expected}, got"
                f" {quote(text)}{_place(key, where, source)}"
            )
            raise UserError(sentence, key=key, value=text)


def dump_config(config: Config, complete: bool = False) -> str:
    """Returns the settings as YAML text, which `load_config` reads back unchanged.

    Args:
      complete: whether to write every setting. If false, defaults of the sections
        `REQUEST_SECTIONS` are left out.
    """
    left_out = () if complete else REQUEST_SECTIONS
    dumped = {
        name: getattr(config, name).model_dump(mode="json", exclude_defaults=name in left_out)
        for name in SECTIONS
    }
    return dump_yaml({name: keys for name, keys in dumped.items() if keys})


def differences(old: Config, new: Config) -> dict[str, tuple[object, object]]:
    """Returns dotted path → (old, new) for every setting in which two configs differ."""
    values = flatten_config(new)
    return {
        key: (value, values[key])
        for key, value in flatten_config(old).items()
        if value != values[key]
    }


def json_schema() -> str:
    """Returns the JSON schema of the YAML files, for editors and for
    `dantinox.config.setting_records`.
    """
    schema = Config.model_json_schema()
    schema["description"] = schema["description"].split("\n")[0]
    for section, kind in SECTIONS.items():
        for name, content in schema["$defs"][kind.__name__]["properties"].items():
            if needs := NEEDS[f"{section}.{name}"]:
                content[PREREQUISITES] = [str(need) for need in needs]
    return json.dumps(schema, indent=1) + "\n"


@cache
def allowed_values(key: str) -> str:
    """Returns the values that a setting allows, in words: `a number in [0, 1], or null`."""
    field = FIELDS[key]
    annotation: Any = field.rebuild_annotation()
    return type_in_words(TypeAdapter(annotation).json_schema())


def choices(key: str) -> tuple[object, ...]:
    """Returns the values of a setting that is an enumeration; () for another key."""
    annotation = FIELDS[key].annotation if key in FIELDS else None
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def nearest_key(name: str) -> str:
    """Returns the dotted path of the setting that is most similar to a misspelled path or key, or
    an empty string.
    """
    by_name = {flat_name(key): key for key in FIELDS}
    section, _, last = name[:100].lower().rpartition(".")
    if last in OTHER_NAMES:
        return OTHER_NAMES[last]
    section_names = [
        key.partition(".")[2] for key in FIELDS if section and key.startswith(section + ".")
    ]
    with_prefix = [name for name in by_name if len(last) > 2 and name.startswith(last)]
    # The first of these that finds a name: similar in the same section, with the same beginning,
    # similar in any section.
    matches = (
        difflib.get_close_matches(last, section_names, 1)
        or with_prefix
        or difflib.get_close_matches(last, by_name, 1)
    )
    if not matches:
        similar = difflib.get_close_matches(last, OTHER_NAMES, 1)
        return OTHER_NAMES[similar[0]] if similar else ""
    key = f"{section}.{matches[0]}"
    return key if key in FIELDS else by_name[matches[0]]


def did_you_mean(key: str) -> str:
    """Returns `, did you mean X?`, or an empty string if `key` is empty."""
    return f", did you mean {key}?" if key else ""


def _nearest_section(name: str) -> str:
    """Returns the end of the error about an unknown section: a suggestion, or all sections."""
    keys = [key for key in FIELDS if flat_name(key) == name]
    if keys or name in OTHER_NAMES:  # a setting written outside of its section
        return f", did you mean {' or '.join(keys or [OTHER_NAMES[name]])}?"
    matches = difflib.get_close_matches(name[:60].lower(), list(SECTIONS), 1)
    return (
        f", did you mean {matches[0]}?" if matches else f": the sections are {', '.join(SECTIONS)}"
    )


def _place(key: str, where: Mapping[str, str], source: str) -> str:
    """Returns the place of a setting as the end of a message, such as ` (a.yaml, line 3)`; the
    default is `source`.
    """
    place = where.get(key, source)
    return f" ({place})" if place else ""


def _conflict_place(key: str, problem: str, where: Mapping[str, str], source: str) -> str:
    """Returns the place of `key`, or the places of all settings that `problem` names if they are
    not in one file.
    """
    named = dict.fromkeys([key, *re.findall(r"[a-z]+\.[a-z_0-9]+", problem)])
    places = {name: where[name] for name in named if name in where}
    if len({place.partition(", line ")[0] for place in places.values()}) > 1:
        return f" ({'; '.join(f'{name}: {place}' for name, place in places.items())})"
    return _place(next(iter(places), key), where, source)


def _resolve_aliases(
    settings: Mapping[str, object], where: dict[str, str], source: str
) -> dict[str, Any]:
    """Returns the settings with their current names, and adds their places to `where`. A former
    name prints one warning.

    Raises:
      UserError: a setting is given under two names.
    """
    values = dict[str, Any](settings)
    for old, new in ALIASES.items():
        if old not in values:
            continue
        if old in FORMER_DEFAULTS and values[old] == FORMER_DEFAULTS[old]:
            del values[old]
            continue
        if old in FORMER_NAMES:
            warnings.warn(f"{old} is now called {new}{_place(old, where, source)}", stacklevel=5)
        value = values.pop(old)
        if value is not None and values.get(new) is not None:
            raise UserError(
                f"{old} is an alias of {new}: give one of them{_place(old, where, source)}",
                key=old,
                value=value,
            )
        if value is not None or new not in values:
            values[new] = value
            if old in where:
                where[new] = where[old]
    return values


def _error_of(error: ValidationError, where: dict[str, str], source: str) -> UserError:
    """Returns the first of pydantic's errors as one sentence."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    place = _place(key, where, source)
    if first["type"] == "extra_forbidden":
        sentence = f"unknown key {escape_name(key)}{did_you_mean(nearest_key(key))}{place}"
    else:
        sentence = f"{key} must be {allowed_values(key)}, got {quote(first['input'])}{place}"
    return UserError(sentence, key=key, value=first["input"])

"""The config of a training run, which inherits settings of the run that it starts from, or of its
teacher.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dantinox.config.model_config import WEIGHT_FIELDS
from dantinox.config.sections import Config, flatten_config, reset_settings
from dantinox.config.yaml_files import (
    build_config,
    load_config,
    read_config,
    validate_settings,
    warn_inactive,
)
from dantinox.files import UserError, quote

# A run inherits these sections from training.init_from, or else the second ones from
# distill.teacher.
INHERITED_SECTIONS: tuple[str, ...] = ("model", "moe", "attention", "tokenizer")
TAUGHT_SECTIONS = ("tokenizer",)


def load_training(path: str | Path, overrides: Mapping[str, object] | None = None) -> Config:
    """Loads the config of a new training run, like `load_config` but with the defaults of
    `build_training`.
    """
    tree, where, source = read_config(path)
    return build_training(tree, overrides, where, source)


def build_training(
    tree: Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    where: dict[str, str] | None = None,
    source: str = "",
    origin: str = "command line",
) -> Config:
    """Validates the settings of a new training run. Model and tokenizer settings default to those
    of `training.init_from`.

    Without `training.init_from`, tokenizer settings default to those of the run `distill.teacher`.

    Raises:
      UserError: as for `build_config`, or a setting contradicts the weights of the run
        `training.init_from`.
    """
    overrides = overrides or {}
    where = where or {}

    def given(section: str, name: str) -> object:
        content = tree.get(section)
        return overrides.get(
            f"{section}.{name}", content.get(name) if isinstance(content, dict) else None
        )

    start = given("training", "init_from")
    sections = INHERITED_SECTIONS
    if not start and given("training", "objective") == "distill":
        start = given("distill", "teacher")
        sections = TAUGHT_SECTIONS
    is_path = isinstance(start, str) and start != "" and "\0" not in start
    file = Path(str(start)) / "config.yaml"
    if not is_path or not file.is_file():  # the code that reads the weights reports the error
        return build_config(tree, overrides, where, source, origin)
    base = load_config(file)
    written = {
        f"{section}.{key}"
        for section, keys in tree.items()
        if isinstance(keys, dict)
        for key in keys
    } | set(overrides)
    inherited = {section: getattr(base, section).model_dump(mode="json") for section in sections}
    filled: dict[str, object] = {**tree, **inherited}
    for section, keys in tree.items():
        if isinstance(keys, dict | None):  # any other content is an error of `validate_settings`
            filled[section] = inherited.get(section, {}) | (keys or {})
    config, unused = validate_settings(filled, overrides, where, source, origin)
    contradictable = sorted(key for key in written if key.partition(".")[0] in sections)
    _check_start(base, config, contradictable, where | dict.fromkeys(overrides, origin), str(start))
    # A setting without effect is reported if it was written. If it is inherited, it is silently
    # reset.
    warn_inactive({key: reason for key, reason in unused.items() if key in written}, where, source)
    return reset_settings(config, [key for key in unused if key not in written])


def inherit_settings(config: Config) -> Config:
    """Returns `config`, completed by settings of the run `training.init_from`, or of the teacher,
    if there is such a run.

    Model and tokenizer settings that `config` does not set are copied from that run; of a teacher,
    only tokenizer settings.

    Raises:
      UserError: as for `build_training`.
    """
    return (
        build_training(config.model_dump(mode="json", exclude_unset=True))
        if config.tokenizer_run
        else config
    )


def _check_start(
    base: Config, config: Config, keys: Iterable[str], where: Mapping[str, str], source: str
) -> None:
    """Raises a UserError if one of the settings `keys` contradicts the weights or the tokenizer of
    the run `source`.

    Args:
      base: the settings of that run.
      keys: settings of the sections that are inherited.
    """
    before, after = flatten_config(base), flatten_config(config)
    for key in keys:
        section, _, name = key.partition(".")
        if before.get(key) == after.get(key):
            continue
        changed = base.model_copy(
            update={section: getattr(base, section).model_copy(update={name: after[key]})}
        )
        if section == "tokenizer":
            contradicts = config.tokenizer.tokenizer_type != "file"
        else:
            contradicts = _weight_fields(changed) != _weight_fields(base)
        if contradicts:
            role = (
                "whose weights the training starts from"
                if config.training.init_from
                else "the teacher"
            )
            conflict = f"{key} is {quote(before[key])} in {source}, {role}"
            place = f" ({where[key]})" if key in where else ""
            raise UserError(
                f"{conflict}, got {quote(after[key])}: leave it out{place}",
                key=key,
                value=after[key],
            )


def _weight_fields(config: Config) -> list[Any]:
    """Returns the values of the architecture fields that the weights determine."""
    # The sections do not contain the size of the vocabulary, which is not compared here.
    model = config.architecture(1)
    return [getattr(model, name) for name in WEIGHT_FIELDS]

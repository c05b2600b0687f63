"""`ModelSpec`: a model that a server can load; and the file of `--models`. This module does not
import jax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dantinox.config import UserError, overlay
from dantinox.config.engine_options import EngineOptions
from dantinox.config.yaml_text import read_yaml
from dantinox.files import escape_name, quote, wrap_os_errors
from dantinox.run import find_chat_template, load_run_config, open_run

MAX_MODELS = 100  # of one server
# Whole numbers in the file of `--models` → their smallest and largest value. They replace the flags
# of the same names.
NUMBERS = {"slots": (1, 1024), "context": (2, 2**31 - 1), "prefix_cache": (0, 2**24)}
FIELDS = ("run_dir", "lora", "chat_template", *NUMBERS, "settings")


@dataclass(frozen=True)
class ModelSpec:
    """A model that a server can load.

    Attributes:
      name: its name for clients.
      run_dir: its run directory.
      loras: paths of adapters by name.
      chat_template: name or path of a chat template; None: that of the run.
      tool_format: notation of tool calls, as in `Options`.
      settings: settings that replace those of the run, by name without section.
      options: the options of its engine.
    """

    name: str
    run_dir: Path
    loras: Mapping[str, Path] = field(default_factory=dict)
    chat_template: str | None = None
    tool_format: str = "auto"
    settings: Mapping[str, object] = field(default_factory=dict)
    options: EngineOptions = field(default_factory=EngineOptions)


def file_bytes(spec: ModelSpec) -> int:
    """Checks the files and settings of a model as far as this is possible without its weights.

    Returns:
      The bytes of the file of its weights; without it, of the file of its adapters.

    Raises:
      UserError: a file is missing or a setting is invalid.
    """
    directory = open_run(spec.run_dir, check=False)  # `open_model` checks it
    overlay(load_run_config(directory), spec.settings, "command line")
    find_chat_template(directory)
    with wrap_os_errors(f"cannot read {directory.weights_or_adapter}"):
        return directory.weights_or_adapter.stat().st_size


def check_model_name(name: str, where: str) -> str:
    """Returns a name of a model if it is allowed, else raises a UserError; `where` names its
    source.
    """
    if not name.strip() or not name.isprintable() or len(name) > 200:
        raise UserError(
            f"{where} must be a printable name of at most 200 characters, got {quote(name)}"
        )
    return name


def check_names(names: list[str]) -> None:
    """Raises a UserError for a name that appears twice, or that could also mean a model with an
    adapter.
    """
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"two models have the name {quote(name)}")
        other = next((other for other in names if name.startswith(f"{other}:")), None)
        if other is not None:
            raise UserError(
                f"the model name {quote(name)} could also mean an adapter of {quote(other)}:"
                " use another name"
            )
    if len(names) > MAX_MODELS:
        raise UserError(f"a server must have at most {MAX_MODELS} models, got {len(names)}")


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a file of models, in YAML or JSON: the object `models` maps each name to an object with
    the fields `FIELDS`.

    Raises:
      UserError: the file cannot be read, or a field is missing or wrong.
    """
    tree, _ = read_yaml(path, ("models",), "models file")
    models = tree.get("models")
    if set(tree) != {"models"} or not isinstance(models, dict) or not models:
        raise UserError(
            f"{path} must have one object, models, that maps names of models to their fields"
        )
    return {
        check_model_name(name, f"a model of {path}"): _read_model(one, f"{name} in {path}")
        for name, one in models.items()
    }


def _read_model(entry: object, where: str) -> dict[str, Any]:
    """Returns the fields of a model; paths are relative to the current directory."""
    if isinstance(entry, str):
        return {"run_dir": Path(entry)}
    if not isinstance(entry, dict) or not isinstance(entry.get("run_dir"), str):
        raise UserError(f"{where} must be the path of a run directory, or an object with run_dir")
    unknown = next((name for name in entry if name not in FIELDS), None)
    if unknown is not None:
        raise UserError(
            f"{where} has the unknown field {escape_name(unknown)}: the fields are"
            f" {', '.join(FIELDS)}"
        )
    found: dict[str, Any] = {name: value for name, value in entry.items() if value is not None}
    for name, (low, high) in NUMBERS.items():
        if name in found and (type(found[name]) is not int or not low <= found[name] <= high):
            raise UserError(
                f"{name} of {where} must be an integer in [{low}, {high}], got {quote(found[name])}"
            )
    for name, example in (
        ("lora", "an object that maps names to paths"),
        ("settings", "an object of settings"),
    ):
        if not isinstance(found.get(name, {}), dict):
            raise UserError(f"{name} of {where} must be {example}, got {quote(found[name])}")
    if not isinstance(found.get("chat_template", ""), str):
        raise UserError(
            f"chat_template of {where} must be a name or a path, got"
            f" {quote(found['chat_template'])}"
        )
    loras = found.get("lora", {})
    if not all(isinstance(one, str) for one in loras.values()):
        raise UserError(f"lora of {where} must map names to paths, got {quote(loras)}")
    return found | {
        "run_dir": Path(found["run_dir"]),
        "lora": {name: Path(one) for name, one in loras.items()},
    }

"""The PEFT adapter format (Hugging Face): reading adapters, and merging them into the weights of a run."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dantinox.config import ModelConfig
from dantinox.config.sections import FIELDS, without
from dantinox.files import UserError, escape_name, quote, read_json
from dantinox.model.parameters import abstract_model
from dantinox.run import (
    RunDirectory,
    copy_inherited_files,
    create_run,
    load_run_config,
    save_config,
    save_tokenizer,
    save_weights,
)
from dantinox.run.adapters import SETTINGS, AdapterDeltas, load_run_weights, merge_on_load, read_adapter
from dantinox.text import Tokenizer

WEIGHTS = "adapter_model.safetensors"
LARGEST = 1 << 20  # bytes of an adapter_config.json
# Keys of adapter_config.json that say nothing about what a trained adapter computes.
NO_MATTER = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
# Those with one value that is read. All others must be what stands for nothing.
FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the weights beside
}


def load_adapter(folder: str | Path, model: ModelConfig) -> AdapterDeltas:
    """What the adapters in a folder of PEFT's add to the kernels of a model.

    Raises:
      UserError: a file is missing or damaged, does something that is not read here, or does not fit the model.
    """
    settings = _settings(Path(folder) / SETTINGS)

    def scaling(module: str) -> tuple[int, float]:
        rank = _by_pattern(settings["rank_pattern"], module, settings["r"])
        alpha = _by_pattern(settings["alpha_pattern"], module, settings["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)

    return read_adapter(Path(folder) / WEIGHTS, model, scaling)[0]


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT takes it, or the default."""
    for pattern, value in patterns.items():
        if f".model.{name}".endswith(f".{pattern}"):
            return value
    return default


def _settings(path: Path) -> dict[str, Any]:
    """An `adapter_config.json` that says nothing that is not read."""
    settings = read_json(path, LARGEST)
    for key, value in settings.items():
        if key in FIXED:
            if not any(value is allowed or value == allowed for allowed in FIXED[key]):
                raise UserError(f"{path} has {key} {quote(value)}: only {', '.join(map(quote, FIXED[key]))} can be read")
        elif key not in NO_MATTER | READ and value not in (None, False, [], {}):
            raise UserError(f"{path} has {escape_name(key)} {quote(value)}, which is not read here")
    if "peft_type" not in settings:
        raise UserError(f"{path} has no peft_type: not the settings of an adapter of PEFT's")
    read = {"r": 8, "lora_alpha": 8, "use_rslora": False} | {key: settings[key] for key in READ if key in settings}
    read["rank_pattern"] = _patterns(path, "rank_pattern", read.get("rank_pattern"))
    read["alpha_pattern"] = _patterns(path, "alpha_pattern", read.get("alpha_pattern"))
    for value in (read["r"], *read["rank_pattern"].values()):
        if type(value) is not int or not 1 <= value < 2**31:
            raise UserError(f"{path} must have a rank that is an integer ≥ 1, got {quote(value)}")
    for value in (read["lora_alpha"], *read["alpha_pattern"].values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{path} must have a lora_alpha that is a number, got {quote(value)}")
    if type(read["use_rslora"]) is not bool:
        raise UserError(f"{path} must have use_rslora true or false, got {quote(read['use_rslora'])}")
    return read


def _patterns(path: Path, key: str, given: Any) -> dict[str, Any]:
    """Names of modules from their ends; PEFT allows any regular expression and writes names, perhaps with ^, $ and escapes."""
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{path} must have a mapping as {key}, got {quote(given)}")
    plain = {}
    for pattern, value in (given or {}).items():
        name = re.sub(r"\\([.\-])", r"\1", pattern.removeprefix("^").removesuffix("$"))
        if not re.fullmatch(r"[\w.\-]+", name):
            raise UserError(f"{path} has the pattern {quote(pattern)} in {key}: names of modules alone are read")
        plain[name] = value
    return plain


def merge_adapter(out: str | Path, source: RunDirectory, adapter: str | Path | None = None) -> RunDirectory:
    """Makes an ordinary run of adapters and the weights that they are for.

    Args:
      source: the run of the adapters, or with `adapter` the run that they are for.
      adapter: a folder of PEFT's.

    Raises:
      UserError: a file is missing or damaged, they do not fit each other, or there is something in `out`.
    """
    config = load_run_config(source)
    tokenizer = Tokenizer.load(source.tokenizer)
    symbols = tokenizer.vocab_size
    if adapter is None and config.lora.rank is None:
        raise UserError(f"{source.path} is no run of adapters: with --adapter and --base it can be what they are for")
    model = replace(config.architecture(symbols), scan_layers=False)
    changes = {} if adapter is None else load_adapter(adapter, model)
    weights = load_run_weights(
        source, config, abstract_model(model)[1], symbols, merge_on_load(changes, lambda path, array: array)
    )
    run = create_run(out)
    with run.lock():
        save_weights(run.weights, weights)
        save_tokenizer(run, tokenizer.to_json(), tokenizer.roles)
        copy_inherited_files(source, run)
        save_config(run, without(config, [key for key in FIELDS if key.startswith("lora.")]))
    return run

"""Reads adapters in Hugging Face's PEFT format, and merges them into the weights of a run."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dantinox.config import ModelConfig
from dantinox.config.sections import FIELDS, reset_settings
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
from dantinox.run.adapters import ADAPTER_CONFIG, AdapterDeltas, load_run_weights, merge_on_load, read_adapter
from dantinox.text import Tokenizer

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20  # of an adapter_config.json
# Keys of adapter_config.json that do not change the output of a trained adapter.
IGNORED_KEYS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
READ_KEYS = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
# Keys and their supported values. Every key that is not listed must be null, false or empty.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # all other methods also change the base weights
}


def load_adapter(folder: str | Path, model: ModelConfig) -> AdapterDeltas:
    """Reads the adapters in a PEFT folder and returns their changes to the kernels of a model.

    Raises:
      UserError: a file is missing or damaged, uses an unsupported feature, or does not fit the model.
    """
    settings = _settings(Path(folder) / ADAPTER_CONFIG)

    def scaling(module: str) -> tuple[int, float]:
        rank = _value_for_module(settings["rank_pattern"], module, settings["r"])
        alpha = _value_for_module(settings["alpha_pattern"], module, settings["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)

    return read_adapter(Path(folder) / WEIGHTS, model, scaling)[0]


def _value_for_module(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that is a suffix of a module name, as PEFT does, or the default."""
    for pattern, value in patterns.items():
        if f".model.{name}".endswith(f".{pattern}"):
            return value
    return default


def _settings(path: Path) -> dict[str, Any]:
    """Reads an `adapter_config.json` and checks that all its keys are supported."""
    settings = read_json(path, MAX_CONFIG_BYTES)
    for key, value in settings.items():
        if key in SUPPORTED_VALUES:
            if not any(value is allowed or value == allowed for allowed in SUPPORTED_VALUES[key]):
                allowed = ", ".join(map(quote, SUPPORTED_VALUES[key]))
                raise UserError(f"{path} has {key}: {quote(value)}, expected one of {allowed}")
        elif key not in IGNORED_KEYS | READ_KEYS and value not in (None, False, [], {}):
            raise UserError(f"{path} has {escape_name(key)}: {quote(value)}, which is not supported")
    if "peft_type" not in settings:
        raise UserError(f"{path} has no peft_type: it is not the configuration of a PEFT adapter")
    read = {"r": 8, "lora_alpha": 8, "use_rslora": False} | {key: settings[key] for key in READ_KEYS if key in settings}
    read["rank_pattern"] = _suffix_values(path, "rank_pattern", read.get("rank_pattern"))
    read["alpha_pattern"] = _suffix_values(path, "alpha_pattern", read.get("alpha_pattern"))
    for value in (read["r"], *read["rank_pattern"].values()):
        if type(value) is not int or not 1 <= value < 2**31:
            raise UserError(f"{path} must have a rank that is an integer ≥ 1, got {quote(value)}")
    for value in (read["lora_alpha"], *read["alpha_pattern"].values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{path} must have a lora_alpha that is a number, got {quote(value)}")
    if type(read["use_rslora"]) is not bool:
        raise UserError(f"{path} must have use_rslora true or false, got {quote(read['use_rslora'])}")
    return read


def _suffix_values(path: Path, key: str, patterns: Any) -> dict[str, Any]:
    """Converts patterns to suffixes of module names.

    PEFT allows any regular expression, but writes plain names, possibly with `^`, `$` and escapes.
    """
    if patterns is not None and not isinstance(patterns, dict):
        raise UserError(f"{path} must have a mapping as {key}, got {quote(patterns)}")
    plain = {}
    for pattern, value in (patterns or {}).items():
        name = re.sub(r"\\([.\-])", r"\1", pattern.removeprefix("^").removesuffix("$"))
        if not re.fullmatch(r"[\w.\-]+", name):
            raise UserError(f"{path} has the pattern {quote(pattern)} in {key}, expected the name of a module")
        plain[name] = value
    return plain


def merge_adapter(out: str | Path, source: RunDirectory, adapter: str | Path | None = None) -> RunDirectory:
    """Merges adapters into the weights of their base model, and writes the result as an ordinary run.

    Args:
      out: the run directory to create.
      source: the run with the adapters, or if `adapter` is given, the run of the base model.
      adapter: a PEFT folder.

    Raises:
      UserError: a file is missing or damaged, the adapters do not fit the base model, or `out` is not empty.
    """
    config = load_run_config(source)
    tokenizer = Tokenizer.load(source.tokenizer)
    vocab_size = tokenizer.vocab_size
    if adapter is None and config.lora.rank is None:
        raise UserError(f"{source.path} is not a run with adapters: give it as --base, together with --adapter")
    model = replace(config.architecture(vocab_size), scan_layers=False)
    deltas = {} if adapter is None else load_adapter(adapter, model)
    weights = load_run_weights(
        source, config, abstract_model(model)[1], vocab_size, merge_on_load(deltas, lambda path, array: array)
    )
    run = create_run(out)
    with run.lock():
        save_weights(run.weights, weights)
        save_tokenizer(run, tokenizer.to_json(), tokenizer.roles)
        copy_inherited_files(source, run)
        save_config(run, reset_settings(config, [key for key in FIELDS if key.startswith("lora.")]))
    return run

"""Reads adapters from a PEFT folder (Hugging Face), or from a run with adapters, which contains
such a folder.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import ModelConfig
from dantinox.files import UserError, escape_name, quote, read_json
from dantinox.run.adapters import (
    ADAPTER_CONFIG,
    BASE_HASH_KEY,
    AdapterDeltas,
    check_base,
    read_adapter,
)
from dantinox.run.directory import RunDirectory, open_run

WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20  # of an adapter_config.json
# Keys of adapter_config.json that do not change the output of a trained adapter.
IGNORED_KEYS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
READ_KEYS = {"r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"}
# Keys and their supported values. Every key that is not listed must be null, false or empty.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # All other methods also change the base weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class LoraAdapter(NamedTuple):
    """An adapter that is added to the products of its base model, not merged into the weights.

    Attributes:
      deltas: the changes of the kernels.
      rank: the largest rank.
      digest: the SHA-256 of all matrices and scales; adapters with equal digests compute the same.
    """

    deltas: AdapterDeltas
    rank: int
    digest: bytes


def load_lora(
    path: str | Path, base: RunDirectory | None, model: ModelConfig, max_rank: int | None = None
) -> LoraAdapter:
    """Reads the adapter of a run with adapters, or a PEFT folder, for use beside the weights of a
    base model.

    Args:
      base: the run of the base model; None: do not compare its weights with those that the adapter
        was trained on. A folder that PEFT wrote does not record them.
      model: the architecture of the base model.
      max_rank: the largest rank allowed; None: any.

    Raises:
      UserError: a file is missing or damaged, uses an unsupported feature, or does not fit the base
        model.
    """
    path = Path(path)
    run = RunDirectory(path)
    if run.config.is_file():
        open_run(path)
        if not run.adapter.is_file():
            raise UserError(
                f"{path} is a run without adapters: give a run that was"
                " trained with lora.rank, or a PEFT folder"
            )
        run.check(run.adapter.parent / ADAPTER_CONFIG)
    folder = run.adapter.parent if run.adapter.is_file() else path
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"no adapter at {path}: it must be a run with adapters or a PEFT folder with"
            f" {ADAPTER_CONFIG}"
        )
    deltas, metadata = _read_folder(folder, model, max_rank)
    if base is not None and (trained_on := metadata.get(BASE_HASH_KEY)) is not None:
        check_base(path, trained_on, base, "use the base that they were trained on")
    if any(delta.magnitude_O is not None for changes in deltas.values() for delta in changes):
        raise UserError(
            f"{path} has DoRA adapters, which must be merged into"
            " their base: use dantinox merge-lora"
        )
    rank = max(delta.a_IR.shape[1] for changes in deltas.values() for delta in changes)
    return LoraAdapter(deltas, rank, _digest(deltas))


def _digest(deltas: AdapterDeltas) -> bytes:
    """Returns the SHA-256 of all matrices, their projections and scales. Adapters with magnitudes
    were rejected before.
    """
    found = hashlib.sha256()
    for path, changes in sorted(deltas.items()):
        for projection, a_IR, b_RO, scale, _ in changes:
            found.update(repr((path, projection, a_IR.shape, b_RO.shape, scale)).encode())
            found.update(np.ascontiguousarray(a_IR).data)
            found.update(np.ascontiguousarray(b_RO).data)
    return found.digest()


def load_adapter(folder: str | Path, model: ModelConfig) -> AdapterDeltas:
    """Reads the adapters in a PEFT folder and returns their changes to the kernels of a model.

    Raises:
      UserError: a file is missing or damaged, uses an unsupported feature, or does not fit the
        model.
    """
    return _read_folder(Path(folder), model, None)[0]


def _read_folder(
    folder: Path, model: ModelConfig, max_rank: int | None
) -> tuple[AdapterDeltas, dict[str, str]]:
    """Returns the changes and the metadata of the adapters in a PEFT folder; for the errors see
    `load_lora`.
    """
    settings = _read_settings(folder / ADAPTER_CONFIG)

    def scaling(module: str) -> tuple[int, float]:
        rank = _value_for_module(settings["rank_pattern"], module, settings["r"])
        if max_rank is not None and rank > max_rank:
            raise UserError(
                f"{folder} has an adapter of rank {rank}, but the largest rank allowed is"
                f" {max_rank}"
            )
        alpha = _value_for_module(settings["alpha_pattern"], module, settings["lora_alpha"])
        divisor = math.sqrt(rank) if settings["use_rslora"] else rank
        return rank, alpha / divisor

    return read_adapter(folder / WEIGHTS, model, scaling, settings["use_dora"])


def _value_for_module(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that is a suffix of a module name, as PEFT does, or
    the default.
    """
    for pattern, value in patterns.items():
        if f".model.{name}".endswith(f".{pattern}"):
            return value
    return default


def _read_settings(path: Path) -> dict[str, Any]:
    """Reads the `READ_KEYS` of an `adapter_config.json`, and checks that no other key changes the
    output.
    """
    settings = read_json(path, MAX_CONFIG_BYTES)
    for key, value in settings.items():
        if key in SUPPORTED_VALUES:
            if value not in SUPPORTED_VALUES[key]:
                allowed = ", ".join(map(quote, SUPPORTED_VALUES[key]))
                raise UserError(f"{path} has {key}: {quote(value)}, expected one of {allowed}")
        elif key not in IGNORED_KEYS | READ_KEYS and value not in (None, False, [], {}):
            raise UserError(
                f"{path} has {escape_name(key)}: {quote(value)}, which is not supported"
            )
    if "peft_type" not in settings:
        raise UserError(f"{path} has no peft_type: it is not the configuration of a PEFT adapter")
    defaults = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}  # those of PEFT
    read = defaults | {key: settings[key] for key in READ_KEYS if key in settings}
    read["rank_pattern"] = _suffix_values(path, "rank_pattern", read.get("rank_pattern"))
    read["alpha_pattern"] = _suffix_values(path, "alpha_pattern", read.get("alpha_pattern"))
    for value in (read["r"], *read["rank_pattern"].values()):
        if type(value) is not int or not 1 <= value < 2**31:
            raise UserError(f"{path} must have a rank that is an integer ≥ 1, got {quote(value)}")
    for value in (read["lora_alpha"], *read["alpha_pattern"].values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{path} must have a lora_alpha that is a number, got {quote(value)}")
    for key in ("use_rslora", "use_dora"):
        if type(read[key]) is not bool:
            raise UserError(f"{path} must have {key} true or false, got {quote(read[key])}")
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
            raise UserError(
                f"{path} has the pattern {quote(pattern)} in {key}, expected the name of a module"
            )
        plain[name] = value
    return plain

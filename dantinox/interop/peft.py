"""Low-rank adapters in the file format of PEFT (Hugging Face), both ways, and the weights that they make of those of a run.

`adapter_model.safetensors` holds A `[r, in]` and B `[out, r]` of every projection, by the names that modules have in a Llama
of transformers; `adapter_config.json` says by what B A is multiplied. A run of adapters holds them so: its weights are those of
its base with the adapters' products added.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config, LoraConfig, ModelConfig
from dantinox.config.sections import FIELDS, without
from dantinox.files import UserError, first_line, on_one_line, shown
from dantinox.interop.safetensors_files import file_of, metadata_of, read_tensors
from dantinox.interop.source import Tensor
from dantinox.model.lora import Place, places, sizes
from dantinox.model.parameters import blueprint
from dantinox.run import (
    RunDirectory,
    create_run,
    load_run_config,
    load_weights,
    open_base,
    put,
    save_config,
    save_tokenizer,
    save_weights,
    take_along,
    weights_digest,
)
from dantinox.text import Tokenizer

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
BASE = "dantinox_base_sha256"  # in the metadata of the weights of a run: of what they are for
LARGEST = 1 << 20  # bytes of an adapter_config.json
MODULES = {"attention": "self_attn", "ffn": "mlp"}
TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)\.lora_(A|B)\.weight")
FLOATS = ("float32", "float16", "bfloat16")
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


class Change(NamedTuple):
    """What an adapter adds to a kernel: scale · A B, with A `[in, r]` and B `[r, out]`, to its outputs `place.part`."""

    place: Place
    a_IR: np.ndarray
    b_RO: np.ndarray
    scale: float


Changes = Mapping[str, list[Change]]  # by the path of the kernel


def merged(array: np.ndarray, changes: list[Change]) -> np.ndarray:
    """A kernel of a file with what adapters add to it, float32."""
    result = np.array(array, np.float32)
    for place, a_IR, b_RO, scale in changes:
        part = result if place.part is None else result[..., slice(*place.part), :]
        part += np.float32(scale) * (a_IR @ b_RO).reshape(part.shape)
    return result


def save_adapter(run: RunDirectory, parameters: Mapping[str, Any], model: ModelConfig, facts: Mapping[str, Any]) -> None:
    """Writes the adapters of a training into its run.

    Args:
      parameters: `lora_a` and `lora_b` of every adapter by their paths, layers apart.
      facts: what made them, with `base_sha256`.

    Raises:
      UserError: they cannot be written.
    """
    lora = model.lora
    assert lora is not None
    tensors = {}
    for name, array in parameters.items():
        _, layer, room, _, target, leaf = name.split("/")
        matrix = np.asarray(array, np.float32)
        matrix = matrix.reshape(-1, lora.rank).T if leaf == "lora_a" else matrix.reshape(lora.rank, -1).T
        tensors[f"base_model.model.model.layers.{layer}.{MODULES[room]}.{target}.{_letter(leaf)}.weight"] = matrix
    kinds = {name: Tensor(array.shape, array.dtype.name) for name, array in tensors.items()}
    try:
        run.adapter.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {run.adapter.parent}: {error.strerror}") from None
    folder = run.adapter.parent.name
    put(run.path, f"{folder}/{SETTINGS}", json.dumps(peft_config(lora), indent=1) + "\n")
    put(run.path, f"{folder}/{WEIGHTS}", file_of(list(tensors), tensors, kinds, {BASE: facts["base_sha256"]}), facts)


def _letter(leaf: str) -> str:
    return {"lora_a": "lora_A", "lora_b": "lora_B"}[leaf]


def peft_config(lora: LoraConfig) -> dict[str, Any]:
    """`adapter_config.json` of these adapters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
    }


def load_adapter(folder: str | Path, model: ModelConfig) -> Changes:
    """What the adapters in a folder of PEFT's add to the kernels of a model.

    Raises:
      UserError: a file is missing or damaged, does something that is not read here, or does not fit the model.
    """
    folder = Path(folder)
    settings, tensors = _settings(folder / SETTINGS), read_tensors(folder / WEIGHTS)
    found: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    there = places(model.activation) if model.latent is None else {}
    if model.experts is not None:
        there = {name: place for name, place in there.items() if place.module.startswith("attention")}
    for name, array in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None or match[2] not in there or int(match[1]) >= model.num_blocks:
            raise UserError(
                f"{folder / WEIGHTS} holds {on_one_line(name)}, which is for nothing in this model of {model.num_blocks} "
                f"layers with {', '.join(there) or 'no projections that have adapters'}"
            )
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = array
    if not found:
        raise UserError(f"{folder / WEIGHTS} holds no adapter")
    changes: dict[str, list[Change]] = {}
    for (layer, target), pair in found.items():
        place = there[target]
        change = _change(folder / WEIGHTS, f"layers.{layer}.{_module(place)}.{target}", pair, settings, place, model)
        changes.setdefault(f"blocks/{layer}/{place.module}/kernel", []).append(change)
    return changes


def _module(place: Place) -> str:
    return MODULES[place.module.partition("/")[0]]


def _change(
    path: Path, name: str, pair: Mapping[str, np.ndarray], settings: Mapping[str, Any], place: Place, model: ModelConfig
) -> Change:
    if missing := [letter for letter in "AB" if letter not in pair]:
        raise UserError(f"{path} lacks lora_{missing[0]} of {name}")
    rank = _by_pattern(settings["rank_pattern"], name, settings["r"])
    alpha = _by_pattern(settings["alpha_pattern"], name, settings["lora_alpha"])
    ins, outs = sizes(model)[name.rpartition(".")[2]]
    for letter, shape in (("A", (rank, ins)), ("B", (outs, rank))):
        if pair[letter].shape != shape:
            raise UserError(f"{path} has lora_{letter} of {name} with shape {pair[letter].shape}, {shape} is wanted")
        if (kind := pair[letter].dtype.name) not in FLOATS:
            raise UserError(f"{path} has lora_{letter} of {name} as {kind}, expected one of {', '.join(FLOATS)}")
    a, b = (np.asarray(pair[letter], np.float32).T for letter in "AB")
    return Change(place, a, b, alpha / (math.sqrt(rank) if settings["use_rslora"] else rank))


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT takes it, or the default."""
    for pattern, value in patterns.items():
        if f".model.{name}".endswith(f".{pattern}"):
            return value
    return default


def _settings(path: Path) -> dict[str, Any]:
    """An `adapter_config.json` that says nothing that is not read."""
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} is larger than {LARGEST} bytes: no settings of an adapter")
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {first_line(error)}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold a JSON object, got {shown(settings)}")
    for key, value in settings.items():
        if key in FIXED:
            if not any(value is allowed or value == allowed for allowed in FIXED[key]):
                raise UserError(f"{path} has {key} {shown(value)}: only {', '.join(map(shown, FIXED[key]))} can be read")
        elif key not in NO_MATTER | READ and value not in (None, False, [], {}):
            raise UserError(f"{path} has {on_one_line(key)} {shown(value)}, which is not read here")
    if "peft_type" not in settings:
        raise UserError(f"{path} has no peft_type: not the settings of an adapter of PEFT's")
    read = {"r": 8, "lora_alpha": 8, "use_rslora": False} | {key: settings[key] for key in READ if key in settings}
    read["rank_pattern"] = _patterns(path, "rank_pattern", read.get("rank_pattern"))
    read["alpha_pattern"] = _patterns(path, "alpha_pattern", read.get("alpha_pattern"))
    for key in ("r", *(("rank_pattern", pattern) for pattern in read["rank_pattern"])):
        value = read[key] if isinstance(key, str) else read[key[0]][key[1]]
        if type(value) is not int or not 1 <= value < 2**31:
            raise UserError(f"{path} must have a rank that is an integer ≥ 1, got {shown(value)}")
    for value in (read["lora_alpha"], *read["alpha_pattern"].values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{path} must have a lora_alpha that is a number, got {shown(value)}")
    if type(read["use_rslora"]) is not bool:
        raise UserError(f"{path} must have use_rslora true or false, got {shown(read['use_rslora'])}")
    return read


def _patterns(path: Path, key: str, given: Any) -> dict[str, Any]:
    """Names of modules from their ends; PEFT allows any regular expression and writes names, perhaps with ^, $ and escapes."""
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{path} must have a mapping as {key}, got {shown(given)}")
    plain = {}
    for pattern, value in (given or {}).items():
        name = re.sub(r"\\([.\-])", r"\1", pattern.removeprefix("^").removesuffix("$"))
        if not re.fullmatch(r"[\w.\-]+", name):
            raise UserError(f"{path} has the pattern {shown(pattern)} in {key}: names of modules alone are read")
        plain[name] = value
    return plain


def run_weights(
    run: RunDirectory,
    config: Config,
    shapes: Mapping[str, Any],
    vocab_size: int,
    place: Callable[[str, np.ndarray], Any] = lambda path, array: array,
) -> dict[str, Any]:
    """The weights of a run: those of its file, or those of its base, with what its adapters add.

    Args:
      config: its settings.
      shapes, place: as of `load_weights`; an array that adapters change is float32.

    Raises:
      UserError: a file is missing or damaged, or the base is gone or another one.
    """
    if config.lora.rank is None:
        return load_weights(run.weights, shapes, place)
    base = open_base(config.training.init_from, run)
    changes = load_adapter(run.adapter.parent, config.architecture(vocab_size))
    wanted, digest = str(metadata_of(run.adapter).get(BASE)), weights_digest(base)
    if digest != wanted:
        raise UserError(
            f"the adapters of {run.path} are for the weights {on_one_line(wanted[:12])}…, and its base {base.path} has "
            f"{digest[:12]}…: put those it was trained on back"
        )
    return run_weights(base, load_run_config(base), shapes, vocab_size, _changed(changes, place))


def _changed(changes: Changes, place: Callable[[str, np.ndarray], Any]) -> Callable[[str, np.ndarray], Any]:
    return lambda path, array: place(path, merged(array, changes[path]) if path in changes else array)


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
    weights = run_weights(source, config, blueprint(model)[1], symbols, _changed(changes, lambda path, array: array))
    run = create_run(out)
    with run.lock():
        save_weights(run.weights, weights)
        save_tokenizer(run, tokenizer.to_json(), tokenizer.roles)
        take_along(source, run)
        save_config(run, without(config, [key for key in FIELDS if key.startswith("lora.")]))
    return run

"""The weights of a run with its low-rank adapters: loaded separately or merged.

The folder `adapter` of a run can be read by PEFT: `adapter_model.safetensors` holds A `[r, in]` and B `[out, r]` of every
projection under the names of transformers' Llama. The weights of such a run are those of its base plus scale · B A.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config, LoraConfig, ModelConfig
from dantinox.files import UserError, escape_name, wrap_os_errors
from dantinox.model.lora import Projection, layer_projections, projection_sizes
from dantinox.run.directory import RunDirectory, load_run_config, open_base
from dantinox.run.manifest import write_file
from dantinox.run.safetensors_file import SafetensorsFile, Tensor, safetensors_pieces
from dantinox.run.weights import load_weights, weights_digest

SETTINGS = "adapter_config.json"
BASE = "dantinox_base_sha256"  # metadata of the weights of a run's adapters: the digest of the weights they were trained on
MODULES = {"attention": "self_attn", "ffn": "mlp"}
TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)\.lora_(A|B)\.weight")
FLOATS = ("float32", "float16", "bfloat16")


class AdapterDelta(NamedTuple):
    """What an adapter adds to a kernel: scale · A B, with A `[in, r]` and B `[r, out]`, to its outputs `place.part`."""

    place: Projection
    a_IR: np.ndarray
    b_RO: np.ndarray
    scale: float


AdapterDeltas = Mapping[str, list[AdapterDelta]]  # by the path of the kernel


def merge_adapters(array: np.ndarray, changes: list[AdapterDelta]) -> np.ndarray:
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
    arrays = {}
    for name, array in parameters.items():
        _, layer, module, _, target, leaf = name.split("/")
        matrix, letter = np.asarray(array, np.float32), {"lora_a": "A", "lora_b": "B"}[leaf]
        matrix = matrix.reshape(-1, lora.rank).T if letter == "A" else matrix.reshape(lora.rank, -1).T
        arrays[f"base_model.model.model.layers.{layer}.{MODULES[module]}.{target}.lora_{letter}.weight"] = matrix
    tensors = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    folder = run.adapter.parent
    with wrap_os_errors(f"cannot write {folder}"):
        folder.mkdir(exist_ok=True)
    write_file(run.path, f"{folder.name}/{SETTINGS}", json.dumps(peft_config(lora), indent=1) + "\n")
    content = safetensors_pieces(arrays, tensors, {BASE: facts["base_sha256"]})
    write_file(run.path, f"{folder.name}/{run.adapter.name}", content, facts)


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


def read_adapter(
    path: Path, model: ModelConfig, scaling: Callable[[str], tuple[int, float]]
) -> tuple[AdapterDeltas, dict[str, str]]:
    """What the adapters in a safetensors file add to the kernels of a model.

    Args:
      scaling: rank and scale of a module by its name in transformers, `layers.0.self_attn.q_proj`.

    Returns:
      The changes, and the metadata of the file.

    Raises:
      UserError: the file cannot be read, is damaged, or does not fit the model.
    """
    file = SafetensorsFile(path)
    known = [layer_projections(model, layer) for layer in range(model.num_blocks)]
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for name in file.tensors:
        match = TENSOR.fullmatch(name)
        if match is None or int(match[1]) >= model.num_blocks or match[2] not in known[int(match[1])]:
            raise UserError(
                f"{path} holds {escape_name(name)}, which is for nothing in this model of {model.num_blocks} layers with "
                f"{', '.join(dict.fromkeys(name for layer in known for name in layer)) or 'no projections that have adapters'}"
            )
        found.setdefault((match[1], match[2]), {})[match[3]] = file.read(name)
    if not found:
        raise UserError(f"{path} holds no adapter")
    changes: dict[str, list[AdapterDelta]] = {}
    for (layer, target), pair in sorted(found.items()):
        place, (ins, outs) = known[int(layer)][target], projection_sizes(model, int(layer))[target]
        module = f"layers.{layer}.{MODULES[place.module.partition('/')[0]]}.{target}"
        rank, scale = scaling(module)
        for letter, shape in (("A", (rank, ins)), ("B", (outs, rank))):
            if letter not in pair:
                raise UserError(f"{path} lacks lora_{letter} of {module}")
            if pair[letter].shape != shape:
                raise UserError(f"{path} has lora_{letter} of {module} with shape {pair[letter].shape}, {shape} is wanted")
            if (kind := pair[letter].dtype.name) not in FLOATS:
                raise UserError(f"{path} has lora_{letter} of {module} as {kind}, expected one of {', '.join(FLOATS)}")
        a, b = (np.asarray(pair[letter], np.float32).T for letter in "AB")
        changes.setdefault(f"blocks/{layer}/{place.module}/kernel", []).append(AdapterDelta(place, a, b, scale))
    return changes, file.metadata


def load_run_weights(
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
    base, lora = open_base(config.training.init_from, run), config.trained_architecture(vocab_size).lora
    assert lora is not None
    changes, metadata = read_adapter(run.adapter, config.architecture(vocab_size), lambda module: (lora.rank, lora.scale))
    wanted, digest = metadata.get(BASE, ""), weights_digest(base)
    if digest != wanted:
        raise UserError(
            f"the adapters of {run.path} are for the weights {escape_name(wanted[:12])}…, and its base {base.path} has "
            f"{digest[:12]}…: put those it was trained on back"
        )
    return load_run_weights(base, load_run_config(base), shapes, vocab_size, merge_on_load(changes, place))


def merge_on_load(changes: AdapterDeltas, place: Callable[[str, np.ndarray], Any]) -> Callable[[str, np.ndarray], Any]:
    """`place` of arrays to which adapters are added."""
    return lambda path, array: place(path, merge_adapters(array, changes[path]) if path in changes else array)

"""Writes and reads the low-rank adapters of a run, and merges them into the weights of the base
run.

PEFT can read the folder `adapter` of a run: `adapter_model.safetensors` holds A `[r, in]` and B
`[out, r]` of every projection, with the module names of Llama in Transformers. The weights of a run
with adapters are the base weights plus scale · B A. With weight-decomposed adapters (DoRA) the file
also holds a magnitude vector `[out]` of every projection, see `dantinox.model.lora`.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config, LoraConfig, ModelConfig
from dantinox.files import UserError, escape_name, wrap_os_errors
from dantinox.model.lora import (
    MAGNITUDE,
    Projection,
    layer_projections,
    projection_sizes,
    slice_of_outputs,
)
from dantinox.model.parameters import widen_arrays
from dantinox.run.directory import RunDirectory, load_run_config, open_base
from dantinox.run.manifest import write_file
from dantinox.run.safetensors_file import SafetensorsFile, Tensor, safetensors_pieces
from dantinox.run.weights import load_weights, weights_digest

ADAPTER_CONFIG = "adapter_config.json"
# The metadata key of the digest of the weights that the adapters were trained on.
BASE_HASH_KEY = "dantinox_base_sha256"
PEFT_MODULES = {"attention": "self_attn", "ffn": "mlp"}
TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)"
)
# The names in PEFT by those of the parameters.
TENSORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
ADAPTER_DTYPES = ("float32", "float16", "bfloat16")


class AdapterDelta(NamedTuple):
    """The change of the part W of a kernel at `projection` by one adapter, with A `[in, r]` and B
    `[r, out]`.

    W becomes W + scale · A B, or with magnitudes m `[out]` (DoRA) m · (W + scale · A B) / ‖W +
    scale · A B‖ by output.
    """

    projection: Projection
    a_IR: np.ndarray
    b_RO: np.ndarray
    scale: float
    magnitude_O: np.ndarray | None = None


AdapterDeltas = Mapping[str, list[AdapterDelta]]  # keyed by kernel path


def merge_adapters(array: np.ndarray, deltas: list[AdapterDelta]) -> np.ndarray:
    """Returns a kernel plus the changes of its adapters, as a float32 copy."""
    result = np.array(array, np.float32)
    for projection, a_IR, b_RO, scale, magnitude_O in deltas:
        part = result[slice_of_outputs(projection.part)]
        changed_IO = part.reshape(len(a_IR), -1) + np.float32(scale) * (a_IR @ b_RO)
        if magnitude_O is not None:
            norm_O = np.sqrt(np.sum(np.square(changed_IO, dtype=np.float64), axis=0))
            changed_IO *= (magnitude_O / np.where(norm_O > 0, norm_O, 1)).astype(np.float32)
        part[...] = changed_IO.reshape(part.shape)
    return result


def save_adapter(
    run: RunDirectory, parameters: Mapping[str, Any], model: ModelConfig, facts: Mapping[str, Any]
) -> None:
    """Writes trained adapters into their run, in the format of PEFT.

    Args:
      parameters: the arrays of every adapter by path, with separate layers.
      model: the architecture with its `lora` settings.
      facts: provenance for the manifest, such as settings and versions; must contain `base_sha256`.

    Raises:
      UserError: the files cannot be written, or the manifest is damaged.
    """
    lora = model.lora
    assert lora is not None
    arrays = {}
    for name, array in parameters.items():
        # A name such as blocks/0/attention/qkv/q_proj/lora_a.
        _, layer, module, _, target, leaf = name.split("/")
        shape = {"lora_a": (-1, lora.rank), "lora_b": (lora.rank, -1), MAGNITUDE: (-1,)}[leaf]
        peft_name = (
            f"base_model.model.model.layers.{layer}.{PEFT_MODULES[module]}.{target}.{TENSORS[leaf]}"
        )
        arrays[peft_name] = np.asarray(array, np.float32).reshape(shape).T
    tensors = {name: Tensor(array.shape, array.dtype.name) for name, array in arrays.items()}
    folder = run.adapter.parent
    with wrap_os_errors(f"cannot write {folder}"):
        folder.mkdir(exist_ok=True)
    write_file(
        run.path, f"{folder.name}/{ADAPTER_CONFIG}", json.dumps(peft_config(lora), indent=1) + "\n"
    )
    content = safetensors_pieces(arrays, tensors, {BASE_HASH_KEY: facts["base_sha256"]})
    write_file(run.path, f"{folder.name}/{run.adapter.name}", content, facts)


def peft_config(lora: LoraConfig) -> dict[str, Any]:
    """Returns the content of `adapter_config.json` for these settings."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
    }


def read_adapter(
    path: Path, model: ModelConfig, scaling: Callable[[str], tuple[int, float]], dora: bool
) -> tuple[AdapterDeltas, dict[str, str]]:
    """Reads the adapters in a safetensors file.

    Args:
      model: the architecture that the adapters are for.
      scaling: returns rank and scale of a module, given its name in Transformers, such as
        `layers.0.self_attn.q_proj`.
      dora: whether the adapters have magnitudes.

    Returns:
      The changes, keyed by kernel path, and the metadata of the file.

    Raises:
      UserError: the file cannot be read, is damaged, or does not fit the model.
    """
    file = SafetensorsFile(path)
    known = [layer_projections(model, layer) for layer in range(model.num_blocks)]
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in file.tensors:
        match = TENSOR_NAME.fullmatch(name)
        if (
            match is None
            or int(match[1]) >= model.num_blocks
            or match[2] not in known[int(match[1])]
        ):
            targets = ", ".join(dict.fromkeys(target for layer in known for target in layer))
            raise UserError(
                f"{path} holds {escape_name(name)}, but this model has {model.num_blocks} layers"
                f" with {targets or 'no projections that support adapters'}"
            )
        groups.setdefault((match[1], match[2]), {})[match[3].removesuffix(".weight")] = name
    if not groups:
        raise UserError(f"{path} holds no adapters")
    deltas: dict[str, list[AdapterDelta]] = {}
    for (layer, target), group in sorted(groups.items()):
        projection = known[int(layer)][target]
        ins, outs = projection_sizes(model, int(layer))[target]
        module = f"layers.{layer}.{PEFT_MODULES[projection.module.partition('/')[0]]}.{target}"
        rank, scale = scaling(module)
        shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, ins), "lora_B": (outs, rank)}
        if dora:
            shapes["lora_magnitude_vector"] = (outs,)
        if not dora and "lora_magnitude_vector" in group:
            raise UserError(
                f"{path} has lora_magnitude_vector of {module}, but use_dora is false in"
                f" {ADAPTER_CONFIG}"
            )
        arrays = {
            name: _read_tensor(file, module, name, group.get(name), shape)
            for name, shape in shapes.items()
        }
        delta = AdapterDelta(
            projection,
            arrays["lora_A"].T,  # PEFT stores A as [r, in] and B as [out, r]
            arrays["lora_B"].T,
            scale,
            arrays.get("lora_magnitude_vector"),
        )
        deltas.setdefault(f"blocks/{layer}/{projection.module}/kernel", []).append(delta)
    return deltas, file.metadata


def _read_tensor(
    file: SafetensorsFile, module: str, name: str, stored: str | None, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the array `name` of an adapter in float32; `stored` is its name in the file, None if
    it is missing.
    """
    if stored is None:
        raise UserError(f"{file.path} lacks {name} of {module}")
    tensor = file.tensors[stored]
    if tensor.shape != shape:
        raise UserError(
            f"{file.path} has {name} of {module} with shape {tensor.shape}, expected {shape}"
        )
    if tensor.dtype not in ADAPTER_DTYPES:
        allowed = ", ".join(ADAPTER_DTYPES)
        raise UserError(
            f"{file.path} has {name} of {module} as {tensor.dtype}, expected one of {allowed}"
        )
    array = np.asarray(file.read(stored), np.float32)
    if not np.isfinite(array).all():
        raise UserError(f"{file.path} has NaN or Inf in the adapter of {module}")
    return array


def load_run_weights(
    run: RunDirectory,
    config: Config,
    shapes: Mapping[str, Any],
    vocab_size: int,
    place: Callable[[str, np.ndarray], Any] = lambda path, array: array,
) -> dict[str, Any]:
    """Loads the weights of a run. For a run with adapters, loads the base weights and merges the
    adapters into them.

    Args:
      config: the settings of the run.
      shapes, place: as in `load_weights`. Arrays that adapters change are float32. Packed weights
        are converted to float32, unless `shapes` contains them.
      vocab_size: the vocabulary size of the model.

    Raises:
      UserError: a file is missing or damaged, or the base run is missing or its weights have
        changed since training.
    """
    if config.lora.rank is None:
        return load_weights(
            run.weights, shapes, place, partial(widen_arrays, config.architecture(vocab_size))
        )
    base = open_base(config.training.init_from, run)
    lora = config.trained_architecture(vocab_size).lora
    assert lora is not None
    deltas, metadata = read_adapter(
        run.adapter,
        config.architecture(vocab_size),
        lambda module: (lora.rank, lora.scale),
        lora.dora,
    )
    check_base(
        run.path, metadata.get(BASE_HASH_KEY, ""), base, "restore the original weights of the base"
    )
    return load_run_weights(
        base, load_run_config(base), shapes, vocab_size, merge_on_load(deltas, place)
    )


def check_base(path: Path, wanted: str, base: RunDirectory, remedy: str) -> None:
    """Raises a UserError unless the weights of `base` have the digest of the weights that the
    adapters were trained on.
    """
    digest = weights_digest(base)
    if digest != wanted:
        raise UserError(
            f"the adapters of {path} were trained on the weights {escape_name(wanted[:12])}…, but"
            f" its base {base.path} has {digest[:12]}…: {remedy}"
        )


def merge_on_load(
    deltas: AdapterDeltas, place: Callable[[str, np.ndarray], Any]
) -> Callable[[str, np.ndarray], Any]:
    """Returns a `place` function for `load_weights` that merges adapters into each array before it
    calls `place`.
    """

    def merge_and_place(path: str, array: np.ndarray) -> Any:
        return place(path, merge_adapters(array, deltas[path]) if path in deltas else array)

    return merge_and_place

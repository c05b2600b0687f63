"""Hugging Face model folders: their files, read and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.files import (
    UserError,
    atomic_write,
    escape_name,
    first_line,
    quote,
    read_json,
    read_text,
    require_extra,
    staged_write,
)
from dantinox.interop.hf_multimodal import extract_text_model
from dantinox.interop.hf_quantized import dequantize_checkpoint
from dantinox.interop.source import ExportBundle, LazyArrays, Source
from dantinox.run.safetensors_file import CODES, DTYPES, SafetensorsFile, Tensor, safetensors_pieces

MAX_JSON_BYTES = 128 << 20
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# What is fetched of a repository.
DOWNLOAD_PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "*.safetensors", "model.safetensors.index.json",
)  # fmt: skip


def open_folder(folder: str | Path) -> Source:
    """A checkpoint in a folder: `config.json`, `tokenizer.json`, safetensors, and what else there is.

    Quantized tensors are dequantized when they are read (`hf_quantized`), and `config` says nothing of them. Of a
    vision–language model the text model is read (`hf_multimodal`).

    Raises:
      UserError: one of these is missing or damaged, or the weights are a pickle.
    """
    folder = Path(folder)

    def text(name: str) -> str | None:
        return read_text(folder / name, MAX_JSON_BYTES) if (folder / name).exists() else None

    def settings(name: str) -> dict[str, Any]:
        return read_json(folder / name, MAX_JSON_BYTES) if (folder / name).exists() else {}

    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is no folder of transformers: it has no config.json")
    config, tensors, left_out = extract_text_model(*dequantize_checkpoint(settings("config.json"), open_tensors(folder)))
    tokenizer = text("tokenizer.json")
    if tokenizer is None:
        slow = next((name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()), None)
        remedy = "save it in transformers by AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        raise UserError(f"{folder} has no tokenizer.json{f', only {slow}' if slow else ''}: {remedy}")
    tokenizer_config = settings("tokenizer_config.json")
    template = text("chat_template.jinja") or tokenizer_config.get("chat_template")
    template = template or settings("chat_template.json").get("chat_template")  # of a processor for images and text
    if isinstance(template, list):  # several by their names
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return Source(
        folder, "hf", config, tensors, tokenizer, tokenizer_config,
        template if isinstance(template, str) else None, settings("generation_config.json"), left_out,
    )  # fmt: skip


def download_repository(name: str) -> Path:
    """The folder of a repository of Hugging Face's hub, by its name `owner/model`; what is needed of it is downloaded.

    Raises:
      UserError: the library is not installed, there is no such repository, or the hub cannot be reached.
    """
    with require_extra("hf", f"there is no folder {name}; a repository of the hub needs the extra `hf`"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    try:
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOAD_PATTERNS)))
    except (HFValidationError, HfHubHTTPError) as error:
        raise UserError(f"there is no folder {name}, and the hub gives none of this name: {first_line(error)}") from None
    except Exception as error:  # of the network, in many classes
        raise UserError(
            f"there is no folder {name}, and the hub cannot be reached: {first_line(error)}. "
            "To import without it, copy the checkpoint's folder to this machine and name the folder"
        ) from None


def write_folder(folder: Path, bundle: ExportBundle) -> None:
    """Writes a checkpoint as transformers reads it.

    Raises:
      UserError: a number is too large for float16, or a file cannot be written.
    """
    dtypes = bundle.dtypes

    def make(name: str) -> np.ndarray:
        array = bundle.tensors[name]
        narrow = array.astype(DTYPES[CODES[dtypes[name]]], copy=False)
        if dtypes[name] == "float16" and not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
            raise UserError(f"{name} has numbers that float16 cannot hold (above 65,504): export it as f32 or bf16")
        return narrow

    kinds = {name: Tensor(tensor.shape, dtypes[name]) for name, tensor in bundle.tensors.tensors.items()}
    with np.errstate(over="ignore"):
        write_tensors(folder, LazyArrays(kinds, make), kinds)
    files = {"config": bundle.hf_config, "tokenizer_config": bundle.tokenizer_config}
    for name, content in (files | {"generation_config": bundle.generation_config}).items():
        atomic_write(folder / f"{name}.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    atomic_write(folder / "tokenizer.json", bundle.tokenizer.to_json())
    if bundle.chat_template is not None:
        atomic_write(folder / "chat_template.jinja", bundle.chat_template)


def open_tensors(folder: Path) -> LazyArrays:
    """The tensors of `model.safetensors` in a folder, or of the files that its index names.

    Raises:
      UserError: there is neither, one of them is damaged, or they do not hold what the index says.
    """
    holders: dict[str, SafetensorsFile] = {}
    for name, expected in _files(folder).items():
        file = SafetensorsFile(folder / name)
        if missing := expected - file.tensors.keys():
            raise UserError(f"{folder / name} lacks {escape_name(min(missing))}, which {INDEX} says it holds")
        if twice := holders.keys() & file.tensors.keys():
            raise UserError(f"{escape_name(min(twice))} stands in two files of {folder}")
        holders |= dict.fromkeys(file.tensors, file)
    return LazyArrays({name: file.tensors[name] for name, file in holders.items()}, lambda name: holders[name].read(name))


def _files(folder: Path) -> dict[str, set[str]]:
    """The files of a checkpoint, with the names that its index says they hold."""
    index = folder / INDEX
    if (folder / ONE_FILE).is_file():
        return {ONE_FILE: set()}
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
        if pickles:
            raise UserError(
                f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code and is not read: convert it to "
                "safetensors where you trust it, in transformers by from_pretrained(…).save_pretrained(…)"
            )
        raise UserError(f"{folder} has no {ONE_FILE} and no {INDEX}")
    places = read_json(index, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index} must have an object under weight_map, got {quote(places)}")
    files: dict[str, set[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise UserError(f"{index} places {escape_name(name)} in {quote(file)}, which is no safetensors file beside it")
        files.setdefault(file, set()).add(name)
    return files


def write_tensors(folder: Path, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]) -> None:
    """Writes `model.safetensors`, or above `SHARD_BYTES` several files and their index.

    Args:
      arrays: asked for one after the other, in their order.
      tensors: shape and type of each of them.

    Raises:
      UserError: a file cannot be written.
    """
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name in arrays:
        if shards[-1] and held + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = tensors[name]
        held += tensors[name].nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else ONE_FILE
        with staged_write(folder / file, safetensors_pieces(arrays, shard)):
            places |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": sum(tensors[name].nbytes for name in arrays)}, "weight_map": places}
        atomic_write(folder / INDEX, json.dumps(index, indent=2))

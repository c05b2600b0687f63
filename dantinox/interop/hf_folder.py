"""A folder as Hugging Face's transformers writes it, read and written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.files import UserError, atomic_write, read_json, read_text
from dantinox.interop.safetensors_files import TensorFiles, write_tensors
from dantinox.interop.source import Arrays, Source, Tensor
from dantinox.run.safetensors_file import CODES, DTYPES

MAX_JSON_BYTES = 128 << 20
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# What is fetched of a repository.
WANTED = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "*.safetensors", "model.safetensors.index.json",
)  # fmt: skip


def open_folder(folder: str | Path) -> Source:
    """A checkpoint in a folder: `config.json`, `tokenizer.json`, safetensors, and what else there is.

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
    config, files, tokenizer = settings("config.json"), TensorFiles(folder), text("tokenizer.json")
    if tokenizer is None:
        slow = next((name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()), None)
        remedy = "save it in transformers by AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        raise UserError(f"{folder} has no tokenizer.json{f', only {slow}' if slow else ''}: {remedy}")
    tokenizer_config = settings("tokenizer_config.json")
    template = text("chat_template.jinja") or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by their names
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return Source(
        folder, "hf", config, files.tensors, files.read, tokenizer, tokenizer_config,
        template if isinstance(template, str) else None, settings("generation_config.json"),
    )  # fmt: skip


def fetch(name: str) -> Path:
    """The folder of a repository of Hugging Face's hub, by its name `owner/model`; what is needed of it is downloaded.

    Raises:
      UserError: the library is not installed, or there is no such repository or no network.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no folder {name}; a repository of the hub needs the extra `hf`: pip install 'dantinox[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED)))
    except Exception as error:  # of the network, of the hub, of the name
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"there is no folder {name}, and the hub gives none of this name: {what[:200]}") from None


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Arrays, tokenizer: str, tokenizer_config: Mapping[str, Any],
    generation_config: Mapping[str, Any], chat_template: str | None, dtypes: Mapping[str, str],
) -> None:  # fmt: skip
    """Writes a checkpoint as transformers reads it.

    Args:
      dtypes: the type that each tensor is written in.

    Raises:
      UserError: a number is too large for float16, or a file cannot be written.
    """

    def make(name: str) -> np.ndarray:
        array = tensors[name]
        narrow = array.astype(DTYPES[CODES[dtypes[name]]], copy=False)
        if dtypes[name] == "float16" and not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
            raise UserError(f"{name} has numbers that float16 cannot hold (above 65,504): export it as f32 or bf16")
        return narrow

    kinds = {name: Tensor(tensor.shape, dtypes[name]) for name, tensor in tensors.tensors.items()}
    with np.errstate(over="ignore"):
        write_tensors(folder, Arrays(kinds, make), kinds)
    for name, content in (
        ("config.json", config), ("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation_config),
    ):  # fmt: skip
        atomic_write(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    atomic_write(folder / "tokenizer.json", tokenizer)
    if chat_template is not None:
        atomic_write(folder / "chat_template.jinja", chat_template)

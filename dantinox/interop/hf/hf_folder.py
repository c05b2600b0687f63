"""Reading, downloading and writing Hugging Face model folders."""

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
from dantinox.interop.hf.hf_multimodal import extract_text_model
from dantinox.interop.hf.hf_quantized import dequantize_checkpoint
from dantinox.interop.source import ExportBundle, LazyArrays, Source
from dantinox.run.safetensors_file import (
    DTYPE_CODES,
    DTYPES,
    SafetensorsFile,
    Tensor,
    safetensors_pieces,
)

MAX_JSON_BYTES = 128 << 20
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
# The files of tokenizers without a `tokenizer.json`.
SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")
TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# The files that are downloaded from a repository.
DOWNLOAD_PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "*.safetensors",
    "model.safetensors.index.json",
)  # fmt: skip


def open_folder(folder: str | Path) -> Source:
    """Opens a checkpoint in a folder: `config.json`, `tokenizer.json`, safetensors files, and
    optional files.

    Quantized tensors are dequantized when they are read (`hf_quantized`), and the returned config
    has no quantization keys. For a vision–language model, the text model is returned
    (`hf_multimodal`).

    Raises:
      UserError: a required file is missing or damaged, or the weights are a pickle.
    """
    folder = Path(folder)

    def optional_text(name: str) -> str | None:
        return read_text(folder / name, MAX_JSON_BYTES) if (folder / name).exists() else None

    def optional_json(name: str) -> dict[str, Any]:
        return read_json(folder / name, MAX_JSON_BYTES) if (folder / name).exists() else {}

    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config, tensors = dequantize_checkpoint(optional_json("config.json"), open_tensors(folder))
    config, tensors, skipped = extract_text_model(config, tensors)
    tokenizer = optional_text("tokenizer.json")
    if tokenizer is None:
        slow = [name for name in SLOW_TOKENIZERS if (folder / name).exists()]
        found = f", only {slow[0]}" if slow else ""
        remedy = (
            "create one with AutoTokenizer.from_pretrained(…).save_pretrained(…) in transformers"
        )
        raise UserError(f"{folder} has no tokenizer.json{found}: {remedy}")
    tokenizer_config = optional_json("tokenizer_config.json")
    template = optional_text("chat_template.jinja") or tokenizer_config.get("chat_template")
    # Multimodal processors write `chat_template.json`.
    template = template or optional_json("chat_template.json").get("chat_template")
    if isinstance(template, list):  # a list of named templates
        by_name = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = by_name.get("default")
    return Source(
        path=folder,
        format="hf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config,
        chat_template=template if isinstance(template, str) else None,
        generation_config=optional_json("generation_config.json"),
        skipped=skipped,
    )


def download_repository(name: str) -> Path:
    """Downloads the required files of a repository on the Hugging Face Hub and returns their
    folder.

    Args:
      name: the repository, as `owner/model`.

    Raises:
      UserError: the library is not installed, the repository does not exist, or the Hub cannot be
        reached.
    """
    with require_extra(
        "hf",
        f"there is no folder {name}; to download it from the"
        " Hugging Face Hub, install the extra `hf`",
    ):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    try:
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOAD_PATTERNS)))
    except (HFValidationError, HfHubHTTPError) as error:
        raise UserError(
            f"there is no folder {name}, and the Hub has no such repository: {first_line(error)}"
        ) from None
    except Exception as error:  # network errors have many exception classes
        raise UserError(
            f"there is no folder {name}, and the Hub cannot be reached: {first_line(error)}. To"
            " import without network access, copy the checkpoint's folder"
            " to this machine and give its path"
        ) from None


def write_folder(folder: Path, bundle: ExportBundle) -> None:
    """Writes a model folder that transformers can read.

    Raises:
      UserError: a number is too large for float16, or a file cannot be written.
    """
    dtypes = bundle.dtypes

    def make(name: str) -> np.ndarray:
        array = bundle.tensors[name]
        dtype = DTYPES[DTYPE_CODES[dtypes[name]]]
        converted = array.astype(dtype, copy=False)
        if dtypes[name] == "float16" and not np.array_equal(
            np.isfinite(converted), np.isfinite(array)
        ):
            raise UserError(
                f"{name} has numbers above 65,504, the largest of float16: export it as f32 or bf16"
            )
        return converted

    kinds = {
        name: Tensor(tensor.shape, dtypes[name]) for name, tensor in bundle.tensors.tensors.items()
    }
    with np.errstate(over="ignore"):
        write_tensors(folder, LazyArrays(kinds, make), kinds)
    files = {
        "config": bundle.hf_config,
        "tokenizer_config": bundle.tokenizer_config,
        "generation_config": bundle.generation_config,
    }
    for name, content in files.items():
        atomic_write(
            folder / f"{name}.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        )
    atomic_write(folder / "tokenizer.json", bundle.tokenizer.to_json())
    if bundle.chat_template is not None:
        atomic_write(folder / "chat_template.jinja", bundle.chat_template)


def open_tensors(folder: Path) -> LazyArrays:
    """Opens the tensors of `model.safetensors` in a folder, or of the shards that the index lists.

    Raises:
      UserError: there is neither `model.safetensors` nor an index, a file is damaged, or the files
        contradict the index.
    """
    file_of: dict[str, SafetensorsFile] = {}
    for name, expected in _list_files(folder).items():
        file = SafetensorsFile(folder / name)
        if missing := expected - file.tensors.keys():
            raise UserError(
                f"{folder / name} lacks {escape_name(min(missing))}, which {INDEX} lists for it"
            )
        if duplicates := file_of.keys() & file.tensors.keys():
            raise UserError(f"{escape_name(min(duplicates))} is in two files of {folder}")
        file_of |= dict.fromkeys(file.tensors, file)
    return LazyArrays(
        {name: file.tensors[name] for name, file in file_of.items()},
        lambda name: file_of[name].read(name),
    )


def _list_files(folder: Path) -> dict[str, set[str]]:
    """Maps each safetensors file of a checkpoint to the tensor names that the index lists for it
    (none for a single file).
    """
    index = folder / INDEX
    if (folder / ONE_FILE).is_file():
        return {ONE_FILE: set()}
    if not index.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        if pickles:
            raise UserError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which is not read because it"
                " can run any code: if you trust it, convert it to safetensors with"
                " from_pretrained(…).save_pretrained(…) in transformers"
            )
        raise UserError(f"{folder} has no {ONE_FILE} and no {INDEX}")
    weight_map = read_json(index, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} must have an object under weight_map, got {quote(weight_map)}")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or Path(file).name != file
        ):
            raise UserError(
                f"{index} lists {escape_name(name)} in {quote(file)}, which is"
                " not a safetensors file next to it"
            )
        files.setdefault(file, set()).add(name)
    return files


def write_tensors(
    folder: Path, arrays: Mapping[str, np.ndarray], tensors: Mapping[str, Tensor]
) -> None:
    """Writes `model.safetensors`, or several shards and an index if the size exceeds `SHARD_BYTES`.

    Args:
      folder: the target folder.
      arrays: the arrays. Each array is accessed once, in order.
      tensors: the shape and dtype of each array.

    Raises:
      UserError: a file cannot be written.
    """
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name in arrays:
        if shards[-1] and shard_bytes + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensors[name]
        shard_bytes += tensors[name].nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else ONE_FILE
        with staged_write(folder / file, safetensors_pieces(arrays, shard)):
            weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensors[name].nbytes for name in arrays)
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        atomic_write(folder / INDEX, json.dumps(index, indent=2))

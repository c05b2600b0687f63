"""GGUF, the files of llama.cpp: a checkpoint of one, and one of a model.

Three things change numbers on the way: heads of the Llama family are stored for rotations of neighbouring numbers, norms of
Gemma as 1 + w, and GPT-2's matrices transposed.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, UserError, build_config
from dantinox.files import on_one_line, shown
from dantinox.interop.gguf_families import (
    FAMILIES,
    LLAMA3,
    LONG,
    SHORT,
    Family,
    config_of,
    frequency_tensors,
    metadata_of,
)
from dantinox.interop.gguf_file import PLAIN, GGUFFile, Stored, open_gguf, read_tensor, write_gguf
from dantinox.interop.gguf_vocabulary import from_metadata, to_metadata
from dantinox.interop.hf import settings_of
from dantinox.interop.source import Source, Tensor
from dantinox.text import Tokenizer

# By the name of the flag `--type`: GGUF's name of the type, and llama.cpp's number for a file of it.
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
ALWAYS_F32 = ("ffn_gate_inp", "position_embd")  # besides what has one axis
BLOCK = 32  # numbers that q8_0 gives one scale; rows of another length are f16


def open_source(path: str | Path) -> Source:
    """A GGUF file as a checkpoint to import. Nothing of its tensors is read yet.

    Raises:
      UserError: the file is damaged, of an unknown architecture, or says something that is not known here.
    """
    file = open_gguf(path)
    if file.metadata.get("general.type", "model") != "model":
        raise UserError(f"{path} is no model but {shown(file.metadata['general.type'])}")
    family, config = config_of(file)
    parts = _parts(file, family)
    config["tie_word_embeddings"] = "lm_head.weight" not in parts
    vocabulary = from_metadata(file.metadata, str(path))
    rows = file.tensors["token_embd.weight"].shape[0]
    if len(file.metadata["tokenizer.ggml.tokens"]) != rows:
        raise UserError(f"{path} has {rows} rows of embeddings for {len(file.metadata['tokenizer.ggml.tokens'])} tokens")
    config["vocab_size"] = rows
    change = partial(_theirs, family, config)
    return Source(
        path=Path(path),
        format="gguf",
        config=config,
        tensors={name: _described(file, part, family) for name, part in parts.items()},
        read=lambda name: change(name, read_tensor(file, *parts[name])),
        tokenizer=vocabulary.tokenizer,
        tokenizer_config=vocabulary.tokenizer_config,
        chat_template=vocabulary.chat_template,
        generation_config=vocabulary.generation_config,
    )


def _parts(file: GGUFFile, family: Family) -> dict[str, tuple[str, int | None]]:
    """For every name of transformers the tensor in the file, and the entry of its first axis where that is one of experts.

    Raises:
      UserError: a tensor is not known, or there are no embeddings.
    """
    parts: dict[str, tuple[str, int | None]] = {}
    for name, stored in file.tensors.items():
        if name in (LLAMA3, LONG, SHORT):
            continue
        module, _, suffix = name.rpartition(".")
        theirs = family.names.get(re.sub(r"^blk\.\d+\.", "blk.{}.", module))
        if theirs is None or suffix not in ("weight", "bias"):
            raise UserError(f"{file.path} has the tensor {on_one_line(name)}, which {family.arch} is not known to have")
        layer = re.match(r"blk\.(\d+)\.", module)
        theirs = f"{theirs}.{suffix}".replace("{}", layer[1] if layer else "")
        if "{e}" in theirs:
            parts |= {theirs.replace("{e}", str(e)): (name, e) for e in range(stored.shape[0])}
        else:
            parts[theirs] = (name, None)
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no embeddings: token_embd.weight is missing")
    embeddings, output = (file.tensors.get(name) for name in ("token_embd.weight", "output.weight"))
    if embeddings and output and _equal(file, embeddings, output):
        del parts["lm_head.weight"]
    return parts


def _equal(file: GGUFFile, one: Any, other: Any) -> bool:
    """Whether two tensors are the same bytes: some programs write a tied table twice."""
    if one[:2] != other[:2]:
        return False
    a, b = (file.content[stored.offset : stored.offset + stored.size] for stored in (one, other))
    step = 1 << 24
    return all(np.array_equal(a[start : start + step], b[start : start + step]) for start in range(0, len(a), step))


def _described(file: GGUFFile, part: tuple[str, int | None], family: Family) -> Tensor:
    stored = file.tensors[part[0]]
    shape = stored.shape if part[1] is None else stored.shape[1:]
    transposed = family.arch == "gpt2" and _is_transposed(part[0])
    return Tensor(shape[::-1] if transposed else shape, PLAIN[stored.kind].name if stored.kind in PLAIN else "float32")


def _is_transposed(name: str) -> bool:
    """Whether GPT-2's tensor has its axes in the other order, which its layers have and its tables have not."""
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def _theirs(family: Family, config: Mapping[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of GGUF as transformers has it."""
    if family.arch == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    if family.shifted and name.endswith("norm.weight"):
        return np.asarray(array, np.float32) - 1
    heads = _rotated_heads(family, config, name)
    if heads:
        pairs = array.reshape(heads, -1, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def _ours(family: Family, config: Mapping[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of transformers as GGUF has it: the opposite of `_theirs`."""
    if family.arch == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    if family.shifted and name.endswith("norm.weight"):
        return np.asarray(array, np.float32) + 1
    heads = _rotated_heads(family, config, name)
    if heads:
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _rotated_heads(family: Family, config: Mapping[str, Any], name: str) -> int:
    """How many heads a tensor has that are stored in another order, 0 for all others."""
    if not family.interleaved or not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        return 0
    key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
    return int(config.get(key) or config["num_attention_heads"])


def export_gguf(
    path: str | Path,
    config: Config,
    hf_config: Mapping[str, Any],
    tensors: Callable[[], Iterable[tuple[str, np.ndarray]]],
    tokenizer: Tokenizer,
    *,
    kind: str = "f32",
    add_bos: bool = False,
    chat_template: str | None = None,
    name: str = "",
) -> None:
    """Writes a model as GGUF.

    Args:
      hf_config: `config.json` of transformers, which names the family.
      tensors: gives transformers' tensors anew at each call; they are asked for twice, for shapes and for content.
      kind: f32, f16, bf16 or q8_0 for matrices; vectors are float32.
      add_bos: whether a prompt begins with the begin token.

    Raises:
      UserError: GGUF cannot say the model or its tokenizer, or the file cannot be written.
    """
    family = next((family for family in FAMILIES if family.model_type == hf_config["model_type"]), None)
    if family is None:
        raise UserError(f"GGUF has no name here for models of the family {hf_config['model_type']}")
    made = partial(_stored, family, hf_config, tensors)
    shapes = {name: (array.shape, _kind(name, array.shape, TYPES[kind][0])) for name, array in made()}
    rows = shapes["token_embd.weight"][0][0]
    model = config.architecture(rows)
    extra = frequency_tensors(config, model)
    shapes |= {name: (array.shape, "F32") for name, array in extra.items()}
    metadata: dict[str, Any] = {"general.architecture": family.arch, "general.type": "model"}
    metadata |= {"general.name": name} if name else {}
    metadata |= {"general.file_type": TYPES[kind][1], "general.quantization_version": 2}
    metadata |= {f"{family.arch}.{key}": value for key, value in metadata_of(config, model, family).items()}
    _check_said(model, family, metadata, shapes, extra)
    metadata |= to_metadata(tokenizer, rows, add_bos=add_bos, chat_template=chat_template)

    def arrays() -> Iterator[np.ndarray]:
        for _, array in made():
            yield array
        yield from extra.values()

    write_gguf(path, metadata, shapes, arrays())


def _stored(
    family: Family, config: Mapping[str, Any], tensors: Callable[[], Iterable[tuple[str, np.ndarray]]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors as GGUF has them; experts wait for the others of their layer."""
    names = {theirs: ours for ours, theirs in family.names.items()}
    count = config.get("num_local_experts") or config.get("num_experts") or 0
    waiting: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors():
        module, _, suffix = name.rpartition(".")
        layer, expert = re.search(r"\.(?:layers|h)\.(\d+)\.", name), re.search(r"\.experts\.(\d+)\.", name)
        general = re.sub(r"\.experts\.\d+\.", ".experts.{e}.", re.sub(r"\.(layers|h)\.\d+\.", r".\1.{}.", module))
        if general not in names:
            raise UserError(f"GGUF has no name for the tensor {name}")
        stored = f"{names[general]}.{suffix}".replace("{}", layer[1] if layer else "")
        array = _ours(family, config, name, array)
        if expert is None:
            yield stored, array
            continue
        group = waiting.setdefault(stored, {})
        group[int(expert[1])] = array
        if len(group) == count:
            yield stored, np.stack([waiting[stored][e] for e in range(count)])
            del waiting[stored]


def _kind(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or any(part in name for part in ALWAYS_F32):
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % BLOCK else kind


# Of a model's settings, those that training or a machine has, and not the model.
NOT_OF_THE_MODEL = {"kernel", "dropout_rate", "remat", "scan_layers", "dtype", "platform", "vocab_size", "weight_tying"}


def _check_said(
    model: ModelConfig, family: Family, metadata: dict[str, Any], shapes: Mapping[str, Any], extra: Mapping[str, np.ndarray]
) -> None:
    """Reads the metadata back as llama.cpp does, and compares the architecture: what GGUF cannot say differs.

    Raises:
      UserError: it does; the sentence names the setting.
    """
    content = np.concatenate([np.zeros(0, np.uint8), *(array.view(np.uint8) for array in extra.values())])
    ends = np.cumsum([array.nbytes for array in extra.values()]).tolist()
    tensors = {name: Stored(shape, kind, 0, 0) for name, (shape, kind) in shapes.items()}
    for (name, array), end in zip(extra.items(), ends, strict=True):
        tensors[name] = Stored(array.shape, "F32", end - array.nbytes, array.nbytes)
    _, said = config_of(GGUFFile(Path("the file"), metadata, tensors, content))
    sections = settings_of(
        said | {"vocab_size": model.vocab_size, "tie_word_embeddings": model.weight_tying}, model.max_context
    )
    back = build_config(sections).architecture(model.vocab_size)
    for name in (field.name for field in fields(ModelConfig) if field.name not in NOT_OF_THE_MODEL):
        ours, theirs = getattr(model, name), getattr(back, name)
        if not _close(ours, theirs):
            raise UserError(f"GGUF's {family.arch} cannot say {name}: {shown(ours)}; readers would take it for {shown(theirs)}")


def _close(one: Any, other: Any) -> bool:
    """Equal, numbers as far as float32 holds them."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if hasattr(one, "__dataclass_fields__") and type(one) is type(other):
        return all(_close(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)

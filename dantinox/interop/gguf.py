"""GGUF checkpoints (llama.cpp): import of settings, weights and tokenizer, and export.

Three things change numbers on the way: heads of the Llama family are stored for rotations of neighbouring numbers, norms of
Gemma as 1 + w, and GPT-2's matrices transposed.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dantinox.config import Config, ModelConfig, UserError, build_config
from dantinox.config.model import ARCHITECTURE, SETTING_OF
from dantinox.files import escape_name, quote
from dantinox.interop.gguf_config import (
    LLAMA3,
    LONG,
    SHORT,
    Metadata,
    frequency_tensors,
    gguf_metadata,
    gguf_to_hf_config,
    predicting_layers,
    select_family,
    unsupported_feature,
)
from dantinox.interop.gguf_families import FAMILIES, Family, MergedTensor
from dantinox.interop.gguf_file import PLAIN, GGUFFile, Shape, Stored, read_tensor, write_gguf
from dantinox.interop.gguf_vocabulary import from_metadata, to_metadata
from dantinox.interop.hf_config import hf_config_to_settings
from dantinox.interop.source import LazyArrays, Source, Tensor
from dantinox.text import Tokenizer

# By the name of the flag `--type`: GGUF's name of the type, and llama.cpp's number for a file of it.
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
# Routers and positions, besides biases and what has one axis.
ALWAYS_F32 = (".mlp.gate.", ".router.", ".block_sparse_moe.gate.", ".wpe.")
# Architectures that llama.cpp wants an output layer of, even where it is the table of embeddings.
NEEDS_OUTPUT_LAYER = ("stablelm", "olmo2", "olmoe", "qwen2moe", "gpt-oss", "dots1", "phi2")
# Architectures of text models with positions of three axes, which for text are another architecture.
MROPE_ARCHITECTURES = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}
Q8_0_BLOCK = 32  # numbers that q8_0 gives one scale; rows of another length are f16


def source_from_gguf(file: GGUFFile) -> Source:
    """A GGUF file as a checkpoint to import. Nothing of its tensors is read yet.

    Raises:
      UserError: the file is of an unknown architecture, or says something that is not known here.
    """
    path = file.path
    if file.metadata.get("general.architecture") == "clip" or file.metadata.get("general.type") == "mmproj":
        raise UserError(
            f"{path} holds an encoder of images or sound and its projector (mmproj), and no text model: "
            "import the file of the language model from the same repository"
        )
    if file.metadata.get("general.type", "model") != "model":
        raise UserError(f"{path} is no model but {quote(file.metadata['general.type'])}")
    file = _split_qkv(_drop_mrope(file))
    family, config = gguf_to_hf_config(file)
    parts = _locate_tensors(file, family)
    config["tie_word_embeddings"] = "lm_head.weight" not in parts
    vocabulary = from_metadata(file.metadata, str(path))
    rows = file.tensors["token_embd.weight"].shape[0]
    if len(file.metadata["tokenizer.ggml.tokens"]) != rows:
        raise UserError(f"{path} has {rows} rows of embeddings for {len(file.metadata['tokenizer.ggml.tokens'])} tokens")
    config["vocab_size"] = rows
    described: dict[str, Tensor] = {}
    for name, (stored_as, expert) in parts.items():
        stored = [file.tensors[part] for part in stored_as]
        kinds = {PLAIN[part.kind].name if part.kind in PLAIN else "float32" for part in stored}
        if joined := family.joined.get(_generalize(name)):
            shape = _merged_shape(joined, config, [part.shape for part in stored], f"{path} has {' and '.join(stored_as)}")
        else:
            shape = stored[0].shape if expert is None else stored[0].shape[1:]
            shape = shape[::-1] if _is_transposed(family, name, len(shape)) else shape
        described[name] = Tensor(shape, kinds.pop() if len(kinds) == 1 else "float32")

    def make(name: str) -> np.ndarray:
        stored_as, expert = parts[name]
        joined = family.joined.get(_generalize(name))
        if joined is None:
            return _convert(family, config, name, read_tensor(file, stored_as[0], expert), back=False)
        arrays = [read_tensor(file, part) for part in stored_as]
        whole = np.empty(described[name].shape, arrays[0].dtype if len({a.dtype for a in arrays}) == 1 else np.float32)
        for piece, array in zip(joined.pieces(whole, config), arrays, strict=True):
            piece[...] = array
        return whole

    return Source(
        path=path,
        format="gguf",
        config=config,
        tensors=LazyArrays(described, make),
        **vocabulary._asdict(),
    )


def _drop_mrope(file: GGUFFile) -> GGUFFile:
    """The text model of a Qwen-VL as its plain family: all axes of a text token's position are equal, but for a fourth."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in MROPE_ARCHITECTURES:
        return file
    sections = file.metadata.get(f"{arch}.rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise UserError(
            f"{file.path} says {arch}.rope.dimension_sections: {quote(sections)}, expected three numbers and a zero"
        )
    unused = {f"{arch}.rope.dimension_sections", f"{arch}.n_deepstack_layers"}
    metadata: dict[str, Any] = {"general.architecture": MROPE_ARCHITECTURES[arch]}
    for key, value in file.metadata.items():
        if key not in unused | metadata.keys():
            owner, _, rest = key.partition(".")
            metadata[f"{MROPE_ARCHITECTURES[arch]}.{rest}" if owner == arch else key] = value
    return file._replace(metadata=metadata)


def _split_qkv(file: GGUFFile) -> GGUFFile:
    """A file whose queries, keys and values are three tensors in place of one, `attn_qkv`, where its family knows three.

    llama.cpp reads either. Their rows follow each other, so that each is a part of the bytes.
    """
    arch = file.metadata.get("general.architecture")
    families = [family for family in FAMILIES if family.arch == arch]
    heads = file.metadata.get(f"{arch}.attention.head_count")
    key_heads = file.metadata.get(f"{arch}.attention.head_count_kv", heads)
    if not families or "blk.{}.attn_k" not in families[0].names or type(heads) is not int or type(key_heads) is not int:
        return file
    tensors: dict[str, Stored] = {}
    for name, stored in file.tensors.items():
        total = heads + 2 * key_heads
        if ".attn_qkv." not in name or not stored.shape or total < 1 or stored.shape[0] % total:
            tensors[name] = stored
            continue
        start, row = stored.offset, stored.size // stored.shape[0]
        for part, count in zip("qkv", (heads, key_heads, key_heads), strict=True):
            rows = count * (stored.shape[0] // total)
            new = name.replace(".attn_qkv.", f".attn_{part}.")
            if new in file.tensors:
                raise UserError(f"{file.path} has both {escape_name(name)} and {escape_name(new)}")
            tensors[new] = Stored((rows, *stored.shape[1:]), stored.kind, start, rows * row)
            start += rows * row
    return file._replace(tensors=tensors)


def _merged_shape(joined: MergedTensor, config: Mapping[str, Any], shapes: list[tuple[int, ...]], what: str) -> tuple[int, ...]:
    """The shape of a tensor of transformers that is made of tensors of these shapes; `what`: the beginning of an error."""
    try:
        shape = joined.shape(config, *shapes)
        pieces = joined.pieces(np.broadcast_to(np.uint8(0), shape), config)
    except (IndexError, ValueError):
        pieces = ()
    if [piece.shape for piece in pieces] != shapes:
        raise UserError(f"{what} of shapes that do not fit the metadata: {' and '.join(map(str, shapes))}")
    return shape


def _generalize(name: str) -> str:
    """A name of transformers with `{}` for the layer."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)


def _locate_tensors(file: GGUFFile, family: Family) -> dict[str, tuple[tuple[str, ...], int | None]]:
    """For every name of transformers the tensors in the file, and the entry of the first axis where that is one of experts."""
    parts: dict[str, tuple[tuple[str, ...], int | None]] = {}
    joined = {stored: theirs for theirs, how in family.joined.items() for stored in how.stored}
    meta = Metadata(file)
    layers = meta("block_count")
    left_out = tuple(f"blk.{layer}." for layer in range(layers - predicting_layers(meta), layers))
    for name, stored in file.tensors.items():
        if name in (LLAMA3, LONG, SHORT) or name.startswith(left_out):
            continue
        if theirs := joined.get(re.sub(r"^blk\.\d+\.", "blk.{}.", name)):
            number = name.split(".")[1]
            of = tuple(part.replace("{}", number) for part in family.joined[theirs].stored)
            if missing := next((part for part in of if part not in file.tensors), None):
                raise UserError(f"{file.path} has {name} and lacks {missing}")
            parts[theirs.replace("{}", number)] = of, None
            continue
        module, _, suffix = name.rpartition(".")
        theirs = family.names.get(re.sub(r"^blk\.\d+\.", "blk.{}.", module))
        if theirs is None or suffix not in ("weight", "bias"):
            raise UserError(f"{file.path} has the tensor {escape_name(name)}, which {family.arch} is not known to have")
        layer = re.match(r"blk\.(\d+)\.", module)
        theirs = f"{theirs}.{suffix}".replace("{}", layer[1] if layer else "")
        if "{e}" in theirs:
            if stored.shape[0] != file.metadata.get(f"{family.arch}.expert_count"):
                raise UserError(f"{file.path} has {stored.shape[0]} experts in {escape_name(name)}, and says otherwise")
            parts |= {theirs.replace("{e}", str(e)): ((name,), e) for e in range(stored.shape[0])}
        else:
            parts[theirs] = (name,), None
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no embeddings: token_embd.weight is missing")
    embeddings, output = (file.tensors.get(name) for name in ("token_embd.weight", "output.weight"))
    if embeddings and output and _same_bytes(file, embeddings, output):
        del parts["lm_head.weight"]
    return parts


def _same_bytes(file: GGUFFile, one: Any, other: Any) -> bool:
    """Whether two tensors are the same bytes: some programs write a tied table twice."""
    if one[:2] != other[:2]:
        return False
    a, b = (file.content[stored.offset : stored.offset + stored.size] for stored in (one, other))
    step = 1 << 24
    return all(np.array_equal(a[start : start + step], b[start : start + step]) for start in range(0, len(a), step))


def _is_transposed(family: Family, name: str, axes: int) -> bool:
    """Whether GGUF has a tensor's axes in the other order: matrices of GPT-2's layers, and not its tables."""
    return family.arch == "gpt2" and axes == 2 and ".h." in name


def _convert(family: Family, config: Mapping[str, Any], name: str, array: np.ndarray, back: bool) -> np.ndarray:
    """A tensor of GGUF as transformers has it, or with `back` a tensor of transformers as GGUF has it."""
    if _is_transposed(family, name, array.ndim):
        return array.T
    if family.shifted and name.endswith("norm.weight"):
        return np.asarray(array, np.float32) + (1 if back else -1)
    if heads := _permuted_heads(family, config, name):
        pairs = array.reshape(heads, *((2, -1) if back else (-1, 2)), *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def _permuted_heads(family: Family, config: Mapping[str, Any], name: str) -> int:
    """How many heads a tensor has that are stored in another order, 0 for all others."""
    if not family.interleaved or not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
        return 0
    key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
    return int(config.get(key) or config["num_attention_heads"])


def export_gguf(
    path: str | Path,
    config: Config,
    hf_config: Mapping[str, Any],
    tensors: LazyArrays,
    tokenizer: Tokenizer,
    *,
    kind: str = "f32",
    chat_template: str | None = None,
    name: str = "",
) -> None:
    """Writes a model as GGUF.

    Args:
      hf_config: `config.json` of transformers, which names the family.
      tensors: by transformers' names.
      kind: f32, f16, bf16 or q8_0 for matrices; vectors are float32.

    Raises:
      UserError: GGUF cannot say the model or its tokenizer, or the file cannot be written.
    """
    family = select_family(hf_config)
    tied = {"lm_head.weight"} if config.model.weight_tying else set()
    made_of = _group_by_stored(family, [name for name in tensors if name not in tied])
    shapes = {stored: _shape(family, tensors, stored, names, TYPES[kind][0], hf_config) for stored, names in made_of.items()}
    rows = shapes["token_embd.weight"][0][0]
    model = config.architecture(tokenizer.vocab_size)
    if what := unsupported_feature(model, family, hf_config):
        raise UserError(f"llama.cpp's {family.arch} cannot have {what}")
    context = hf_config.get("max_position_embeddings", model.max_context)
    if not family.windows and all(window is None or window >= model.max_context for window in model.windows):
        # Windows as long as the context change nothing, and the file says that it is no longer.
        context = context if model.windows.count(None) == model.num_blocks else model.max_context
        model = replace(model, windows=(None,) * model.num_blocks)
    extra = frequency_tensors(config, model, family)
    shapes |= {stored: (array.shape, "F32") for stored, array in extra.items()}
    metadata: dict[str, Any] = {"general.architecture": family.arch, "general.type": "model"}
    metadata |= {"general.name": name} if name else {}
    metadata |= {"general.file_type": TYPES[kind][1], "general.quantization_version": 2}
    said = gguf_metadata(model, family, context)
    metadata |= {f"{family.arch}.{key}": value for key, value in said.items()}
    _check_roundtrip(model, family, metadata, shapes, extra)
    metadata |= to_metadata(tokenizer, rows, chat_template)

    def arrays() -> Iterator[np.ndarray]:
        for stored, names in made_of.items():
            if joined := family.joined.get(_generalize(names[0])):
                number = joined.stored.index(_stored_name(stored))
                yield np.ascontiguousarray(joined.pieces(tensors[names[0]], hf_config)[number])
                continue
            parts = (_convert(family, hf_config, name, tensors[name], back=True) for name in names)
            yield np.stack(list(parts)) if "_exps" in stored else next(parts)
        yield from extra.values()

    write_gguf(path, metadata, shapes, arrays())


def _group_by_stored(family: Family, tensors: Iterable[str]) -> dict[str, list[str]]:
    """For every tensor of GGUF those of transformers that it is made of: one, or one of each expert in their order."""
    names = {theirs: ours for ours, theirs in family.names.items()}
    made_of: dict[str, dict[int, str]] = {}
    for name in tensors:
        if joined := family.joined.get(_generalize(name)):
            number = name.split(".")[2]
            made_of |= {stored.replace("{}", number): {0: name} for stored in joined.stored}
            continue
        module, _, suffix = name.rpartition(".")
        layer, expert = re.search(r"\.(?:layers|h)\.(\d+)\.", name), re.search(r"\.experts\.(\d+)\.", name)
        general = re.sub(r"\.experts\.\d+\.", ".experts.{e}.", re.sub(r"\.(layers|h)\.\d+\.", r".\1.{}.", module))
        if general not in names:
            raise UserError(f"GGUF has no name for the tensor {name}")
        stored = f"{names[general]}.{suffix}".replace("{}", layer[1] if layer else "")
        made_of.setdefault(stored, {})[int(expert[1]) if expert else 0] = name
    if family.arch in NEEDS_OUTPUT_LAYER and "output.weight" not in made_of:
        made_of["output.weight"] = made_of["token_embd.weight"]
    return {stored: [parts[e] for e in sorted(parts)] for stored, parts in made_of.items()}


def _stored_name(stored: str) -> str:
    """A name of GGUF with `{}` for the layer."""
    return re.sub(r"^blk\.\d+\.", "blk.{}.", stored)


def _shape(
    family: Family, tensors: LazyArrays, stored: str, names: list[str], kind: str, hf_config: Mapping[str, Any]
) -> Shape:
    shape = tensors.tensors[names[0]].shape
    if joined := family.joined.get(_generalize(names[0])):
        pieces = joined.pieces(np.broadcast_to(np.uint8(0), shape), hf_config)
        shape = pieces[joined.stored.index(_stored_name(stored))].shape
    if _is_transposed(family, names[0], len(shape)):
        shape = shape[::-1]
    if "_exps" in stored and ".experts.0." in names[0]:
        shape = (len(names), *shape)
    if len(shape) == 1 or stored.endswith(".bias") or any(part in names[0] for part in ALWAYS_F32):
        return shape, "F32"
    return shape, "F16" if kind == "Q8_0" and shape[-1] % Q8_0_BLOCK else kind


def _check_roundtrip(
    model: ModelConfig, family: Family, metadata: dict[str, Any], shapes: Mapping[str, Any], extra: Mapping[str, np.ndarray]
) -> None:
    """Reads the metadata back as llama.cpp does, and raises where the architecture differs: that GGUF cannot say."""
    content = np.concatenate([np.zeros(0, np.uint8), *(array.view(np.uint8) for array in extra.values())])
    ends = np.cumsum([array.nbytes for array in extra.values()]).tolist()
    tensors = {name: Stored(shape, kind, 0, 0) for name, (shape, kind) in shapes.items()}
    for (name, array), end in zip(extra.items(), ends, strict=True):
        tensors[name] = Stored(array.shape, "F32", end - array.nbytes, array.nbytes)
    _, said = gguf_to_hf_config(GGUFFile(Path("the file"), metadata, tensors, content))
    sections = hf_config_to_settings(
        said | {"vocab_size": model.vocab_size, "tie_word_embeddings": model.weight_tying}, model.max_context
    )
    back = build_config(sections).architecture(model.vocab_size)
    for name in ARCHITECTURE:
        ours, theirs = getattr(model, name), getattr(back, name)
        if not _close(ours, theirs):
            raise UserError(
                f"GGUF's {family.arch} cannot say {SETTING_OF[name]}: of {name} {quote(ours)} it makes {quote(theirs)}"
            )


def _close(one: Any, other: Any) -> bool:
    """Equal, numbers as far as float32 holds them."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if hasattr(one, "__dataclass_fields__") and type(one) is type(other):
        return all(_close(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)

"""GGUF checkpoints (llama.cpp): import of settings, weights and tokenizer, and export.

Four conversions change tensors. GGUF orders the query and key rows of the Llama family for the
rotary pairs (x₀, x₁), (x₂, x₃), …. GGUF stores Gemma's norm weights as 1 + w, GPT-2's matrices
transposed, and some tensors split (`MergedTensor`).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dantinox.config import Config, ModelConfig, UserError, build_config
from dantinox.config.model_config import ARCHITECTURE, SETTING_OF
from dantinox.files import escape_name, quote
from dantinox.interop.gguf.gguf_config import (
    count_mtp_layers,
    gguf_metadata,
    gguf_to_hf_config,
    select_family,
    unsupported_feature,
)
from dantinox.interop.gguf.gguf_families import FAMILIES, Family
from dantinox.interop.gguf.gguf_file import (
    PLAIN_DTYPES,
    FindBlocks,
    GGUFFile,
    Shape,
    StoredTensor,
    read_rows,
    write_gguf,
)
from dantinox.interop.gguf.gguf_keys import LLAMA3, LONG, SHORT, Metadata
from dantinox.interop.gguf.gguf_matrices import ReadTensor
from dantinox.interop.gguf.gguf_rope import frequency_tensors
from dantinox.interop.gguf.gguf_tensors import MergedTensor
from dantinox.interop.gguf.gguf_vocabulary import read_vocabulary
from dantinox.interop.gguf.gguf_vocabulary_export import vocabulary_metadata
from dantinox.interop.gguf.quantization_recipes import FILE_TYPES, tensor_types
from dantinox.interop.hf.hf_config import hf_config_to_settings
from dantinox.interop.source import LazyArrays, Source, StoredBlocks, Tensor
from dantinox.text import Tokenizer

# Routers and position embeddings, which are stored as float32. Biases, norms and one-dimensional
# tensors are also float32.
ALWAYS_F32 = (".mlp.gate.", ".router.", ".block_sparse_moe.gate.", ".wpe.")
# Architectures for which llama.cpp requires an output layer, even if it equals the embeddings.
NEEDS_OUTPUT_LAYER = ("stablelm", "olmo2", "olmoe", "qwen2moe", "gpt-oss", "dots1", "phi2")
# Text models with multimodal rotary positions (M-RoPE), and the equivalent architectures without
# M-RoPE.
MROPE_ARCHITECTURES = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}


class Location(NamedTuple):
    """Where a file stores a tensor of transformers.

    Attributes:
      stored: the names of the tensors in the file; several only for a `MergedTensor`.
      expert: the index of the expert in a tensor that stacks all experts, else None.
    """

    stored: tuple[str, ...]
    expert: int | None = None


def source_from_gguf(file: GGUFFile) -> Source:
    """Returns a GGUF file as a checkpoint to import. Tensors are read on access.

    Raises:
      UserError: the architecture or a metadata entry is not supported.
    """
    path = file.path
    _check_type(file)
    file = _split_qkv(_drop_mrope(file))
    family, config = gguf_to_hf_config(file)
    file, read_array = family.matrices.open(file)
    locations = _locate_tensors(file, family)
    config["tie_word_embeddings"] = "lm_head.weight" not in locations
    vocabulary = read_vocabulary(file.metadata, str(path))
    rows = file.tensors["token_embd.weight"].shape[0]
    tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if tokens != rows:
        raise UserError(f"{path} has {rows} rows of embeddings for {tokens} tokens")
    config["vocab_size"] = rows
    tensors = {
        name: _abstract_tensor(file, family, config, name, where)
        for name, where in locations.items()
    }

    def make(read: ReadTensor, name: str) -> np.ndarray:
        stored_names, expert = locations[name]
        merged = family.merged.get(_generalize(name))
        if merged is None:
            return _convert(family, config, name, read(stored_names[0], expert), back=False)
        arrays = [read(stored_name, None) for stored_name in stored_names]
        same_dtype = len({array.dtype for array in arrays}) == 1
        merged_array = np.empty(tensors[name].shape, arrays[0].dtype if same_dtype else np.float32)
        for part, array in zip(merged.parts(merged_array, config), arrays, strict=True):
            part[...] = array
        return merged_array

    kinds = {name: stored.kind for name, stored in file.tensors.items()}
    quantized = any(kind not in PLAIN_DTYPES for kind in kinds.values())
    blocks = StoredBlocks(
        kinds=kinds,
        shapes={name: stored.shape for name, stored in file.tensors.items()},
        raw=partial(read_rows, file),
        convert=lambda read: LazyArrays(tensors, partial(make, read)),
    )
    return Source(
        path=path,
        format="gguf",
        config=config,
        tensors=LazyArrays(tensors, partial(make, read_array)),
        blocks=blocks if quantized else None,
        **vocabulary._asdict(),
    )


def _check_type(file: GGUFFile) -> None:
    """Raises a `UserError` if a file contains no text model."""
    kind = file.metadata.get("general.type", "model")
    if file.metadata.get("general.architecture") == "clip" or kind == "mmproj":
        raise UserError(
            f"{file.path} contains an image or audio encoder with its projector (mmproj), and no"
            " text model: import the file of the language model from the same repository"
        )
    if kind != "model":
        raise UserError(f"{file.path} has general.type: {quote(kind)}, expected 'model'")


def _abstract_tensor(
    file: GGUFFile, family: Family, config: Mapping[str, Any], name: str, location: Location
) -> Tensor:
    """Returns the shape and dtype of a tensor of transformers."""
    stored = [file.tensors[stored_name] for stored_name in location.stored]
    dtypes = {
        PLAIN_DTYPES[tensor.kind].name if tensor.kind in PLAIN_DTYPES else "float32"
        for tensor in stored
    }
    if family.matrices.is_converted(location.stored[0]):
        dtypes = {"float32"}
    if merged := family.merged.get(_generalize(name)):
        where = f"{file.path} has {' and '.join(location.stored)}"
        shape = _merged_shape(merged, config, [tensor.shape for tensor in stored], where)
    else:
        shape = stored[0].shape if location.expert is None else stored[0].shape[1:]
        if _is_transposed(family, name, len(shape)):
            shape = shape[::-1]
    return Tensor(shape, dtypes.pop() if len(dtypes) == 1 else "float32")


def _drop_mrope(file: GGUFFile) -> GGUFFile:
    """Converts the metadata of a Qwen-VL text model to those of the equivalent architecture without
    M-RoPE.

    M-RoPE gives a token one position per axis (time, height, width). The three positions of a text
    token are equal, so plain RoPE gives the same rotations. If the metadata have a fourth section,
    it must be 0.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in MROPE_ARCHITECTURES:
        return file
    sections = file.metadata.get(f"{arch}.rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) not in (3, 4) or any(sections[3:]):
        raise UserError(
            f"{file.path} has {arch}.rope.dimension_sections: {quote(sections)}, expected three"
            " numbers and a zero"
        )
    unused = {f"{arch}.rope.dimension_sections", f"{arch}.n_deepstack_layers"}
    plain_arch = MROPE_ARCHITECTURES[arch]
    metadata: dict[str, Any] = {"general.architecture": plain_arch}
    for key, value in file.metadata.items():
        if key not in unused | metadata.keys():
            prefix, _, rest = key.partition(".")
            metadata[f"{plain_arch}.{rest}" if prefix == arch else key] = value
    return file._replace(metadata=metadata)


def _split_qkv(file: GGUFFile) -> GGUFFile:
    """Splits `attn_qkv` into queries, keys and values if the family has a separate tensor for each.

    llama.cpp reads both layouts. The rows of each tensor are contiguous, so each tensor is one
    range of bytes.
    """
    arch = file.metadata.get("general.architecture")
    family = next((family for family in FAMILIES if family.arch == arch), None)
    heads = file.metadata.get(f"{arch}.attention.head_count")
    key_heads = file.metadata.get(f"{arch}.attention.head_count_kv", heads)
    if (
        family is None
        or "blk.{}.attn_k" not in family.names
        or type(heads) is not int
        or type(key_heads) is not int
    ):
        return file
    all_heads = heads + 2 * key_heads
    tensors: dict[str, StoredTensor] = {}
    for name, stored in file.tensors.items():
        if (
            ".attn_qkv." not in name
            or not stored.shape
            or all_heads < 1
            or stored.shape[0] % all_heads
        ):
            tensors[name] = stored
            continue
        head_size = stored.shape[0] // all_heads
        row_bytes = stored.size // stored.shape[0]
        start = stored.offset
        for part, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
            rows = count * head_size
            part_name = name.replace(".attn_qkv.", f".attn_{part}.")
            if part_name in file.tensors:
                raise UserError(
                    f"{file.path} has both {escape_name(name)} and {escape_name(part_name)}"
                )
            tensors[part_name] = StoredTensor(
                (rows, *stored.shape[1:]), stored.kind, start, rows * row_bytes
            )
            start += rows * row_bytes
    return file._replace(tensors=tensors)


def _merged_shape(
    merged: MergedTensor, config: Mapping[str, Any], shapes: list[tuple[int, ...]], what: str
) -> tuple[int, ...]:
    """Returns the shape of a merged tensor, given the shapes of its parts. Error messages begin
    with `what`.
    """
    try:
        shape = merged.shape(config, *shapes)
        parts = merged.parts(np.broadcast_to(np.uint8(0), shape), config)
    except (IndexError, ValueError):
        parts = ()
    if [part.shape for part in parts] != shapes:
        raise UserError(
            f"{what} with shapes that do not fit the metadata: {' and '.join(map(str, shapes))}"
        )
    return shape


def _generalize(name: str) -> str:
    """Replaces the layer index in a transformers tensor name with `{}`."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)


def _locate_tensors(file: GGUFFile, family: Family) -> dict[str, Location]:
    """Returns the location of each tensor, by its name in transformers."""
    locations: dict[str, Location] = {}
    merged: dict[
        str, str
    ] = {}  # for each part of a merged tensor, the name of the whole in transformers
    for hf_name, tensor in family.merged.items():
        merged |= dict.fromkeys(tensor.stored, hf_name)
    meta = Metadata(file)
    layers = meta("block_count")
    mtp_layers = tuple(f"blk.{layer}." for layer in range(layers - count_mtp_layers(meta), layers))
    for name, stored in file.tensors.items():
        # Divisors of frequencies become settings, and multi-token prediction layers are not
        # imported.
        if name in (LLAMA3, LONG, SHORT) or name.startswith(mtp_layers):
            continue
        if whole := merged.get(_generalize_stored(name)):
            layer = name.split(".")[1]
            parts = tuple(part.replace("{}", layer) for part in family.merged[whole].stored)
            if missing := [part for part in parts if part not in file.tensors]:
                raise UserError(f"{file.path} has {name} and lacks {missing[0]}")
            locations[whole.replace("{}", layer)] = Location(parts)
            continue
        module, _, suffix = name.rpartition(".")
        hf_module = family.names.get(_generalize_stored(module))
        if hf_module is None or suffix not in ("weight", "bias"):
            raise UserError(
                f"{file.path} has the tensor {escape_name(name)}, which is unknown for"
                f" {family.arch}"
            )
        match = re.match(r"blk\.(\d+)\.", module)
        hf_name = f"{hf_module}.{suffix}".replace("{}", match[1] if match else "")
        if "{e}" not in hf_name:
            locations[hf_name] = Location((name,))
            continue
        experts = stored.shape[0]
        count = file.metadata.get(f"{family.arch}.expert_count")
        if experts != count:
            raise UserError(
                f"{file.path} has {experts} experts in {escape_name(name)}, but expert_count:"
                f" {quote(count)}"
            )
        for expert in range(experts):
            locations[hf_name.replace("{e}", str(expert))] = Location((name,), expert)
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no embeddings: token_embd.weight is missing")
    output = file.tensors.get("output.weight")
    if output is not None and _same_bytes(file, file.tensors["token_embd.weight"], output):
        del locations["lm_head.weight"]
    return locations


def _same_bytes(file: GGUFFile, first: StoredTensor, second: StoredTensor) -> bool:
    """Returns whether two tensors are equal, like tied embeddings that some converters write
    twice.
    """
    if (first.shape, first.kind) != (second.shape, second.kind):
        return False
    step = 1 << 24  # bytes compared at a time
    for start in range(0, first.size, step):
        size = min(step, first.size - start)
        left = file.content[first.offset + start : first.offset + start + size]
        right = file.content[second.offset + start : second.offset + start + size]
        if not np.array_equal(left, right):
            return False
    return True


def _is_transposed(family: Family, name: str, axes: int) -> bool:
    """Returns whether GGUF stores a tensor transposed, as it does for GPT-2's matrices other than
    the embeddings.
    """
    return family.arch == "gpt2" and axes == 2 and ".h." in name


def _convert(
    family: Family, config: Mapping[str, Any], name: str, array: np.ndarray, back: bool
) -> np.ndarray:
    """Converts a tensor from GGUF to transformers or, if `back` is true, from transformers to
    GGUF.
    """
    if _is_transposed(family, name, array.ndim):
        return array.T
    if family.norms_plus_one and name.endswith("norm.weight"):
        return np.asarray(array, np.float32) + (1 if back else -1)
    if heads := _permuted_heads(family, config, name):
        # transformers stores the first elements of all pairs of a head, then the second elements;
        # GGUF stores pair by pair.
        pairs = (2, -1) if back else (-1, 2)
        return array.reshape(heads, *pairs, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array


def _permuted_heads(family: Family, config: Mapping[str, Any], name: str) -> int:
    """Returns the number of heads in a tensor if GGUF stores its rows in another order, else 0."""
    if not family.interleaved_rope or not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
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
    kind: str | None = None,
    packed: Mapping[str, int] | None = None,
    chat_template: str | None = None,
    name: str = "",
    find_blocks: FindBlocks = lambda kind, array: None,
) -> None:
    """Writes a model as a GGUF file.

    Args:
      path: the file to create.
      config: the settings of the model.
      hf_config: the content of transformers' `config.json`, which determines the family.
      tensors: the tensors, with transformers' names.
      tokenizer: the tokenizer.
      kind: the type of matrices, a key of `FILE_TYPES`. Vectors are float32. In a quantized file
        some matrices have other types, see `tensor_types`. None: the default type of the family, or
        the type with the formats in `packed`, or f32 if there are none.
      packed: the number of weights of the run in each block format.
      chat_template: the Jinja template, or None.
      name: the name of the model in the metadata.
      find_blocks: see `write_gguf`.

    Raises:
      UserError: GGUF cannot represent the model or its tokenizer, no type has the formats in
        `packed`, or the file cannot be written.
    """
    family = select_family(hf_config)
    if "output" not in family.names and not config.model.weight_tying:
        raise UserError(f"llama.cpp's {family.arch} does not support model.weight_tying: false")
    stored_names = [
        name for name in tensors if name != "lm_head.weight" or not config.model.weight_tying
    ]
    sources = _group_by_stored(family, stored_names)
    model = config.architecture(tokenizer.vocab_size)

    def shapes_of(kind: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shape and the type of each tensor in a file of a type."""
        base = FILE_TYPES[kind].base
        shapes = {
            stored: _shape(family, tensors, stored, names, base, hf_config)
            for stored, names in sources.items()
        }
        if base not in PLAIN_DTYPES:
            row_lengths = {
                stored: shape[-1]
                for stored, (shape, type_name) in shapes.items()
                if type_name == base
            }
            experts = model.experts.count if model.experts else 0
            types = tensor_types(kind, row_lengths, model.num_blocks, experts)
            shapes |= {
                stored: (shapes[stored][0], type_name) for stored, type_name in types.items()
            }
        return shapes

    kind = kind or family.matrices.default_type or _type_of_blocks(packed or {}, shapes_of)
    shapes = shapes_of(kind)
    family.matrices.check_types(kind, shapes)
    rows = shapes["token_embd.weight"][0][0]
    if feature := unsupported_feature(model, family, hf_config):
        raise UserError(f"llama.cpp's {family.arch} does not support {feature}")
    context = hf_config.get("max_position_embeddings", model.max_context)
    if not family.full_every and all(
        window is None or window >= model.max_context for window in model.windows
    ):
        # A window at least as long as the run's context has no effect in the run, but would have
        # one in a longer context. So the file must not state a longer context than the run.
        if model.windows.count(None) < model.num_blocks:
            context = model.max_context
        model = replace(model, windows=(None,) * model.num_blocks)
    extra = frequency_tensors(config, model, family)
    shapes |= {stored: (array.shape, "F32") for stored, array in extra.items()}
    metadata: dict[str, Any] = {"general.architecture": family.arch, "general.type": "model"}
    if name:
        metadata["general.name"] = name
    metadata |= {"general.file_type": FILE_TYPES[kind].number, "general.quantization_version": 2}
    metadata |= {
        f"{family.arch}.{key}": value
        for key, value in gguf_metadata(model, family, context).items()
    }
    _check_roundtrip(model, family, metadata, shapes, extra)
    metadata |= vocabulary_metadata(tokenizer, rows, chat_template)

    def convert(name: str) -> np.ndarray:
        return _convert(family, hf_config, name, tensors[name], back=True)

    def arrays() -> Iterator[np.ndarray]:
        for stored, names in sources.items():
            if merged := family.merged.get(_generalize(names[0])):
                index = merged.stored.index(_generalize_stored(stored))
                yield np.ascontiguousarray(merged.parts(tensors[names[0]], hf_config)[index])
            elif "_exps" in stored:
                yield np.stack([convert(name) for name in names])
            else:
                yield family.matrices.encode(stored, convert(names[0]))
        yield from extra.values()

    write_gguf(path, metadata, shapes, arrays(), find_blocks)


def _type_of_blocks(
    packed: Mapping[str, int], shapes_of: Callable[[str], Mapping[str, tuple[tuple[int, ...], str]]]
) -> str:
    """Returns the type of file whose tensors have the formats of packed weights, or f32 if no
    weights are packed.

    Raises:
      UserError: a file of no type would keep all packed weights.
    """
    if not packed:
        return "f32"
    kept = {}  # for each type of file, the number of packed weights that it stores in their format
    for kind in FILE_TYPES:
        sizes = Counter[str]()
        for shape, type_name in shapes_of(kind).values():
            sizes[type_name] += math.prod(shape)
        kept[kind] = sum(min(count, sizes[type_name]) for type_name, count in packed.items())
    best = max(kept, key=kept.__getitem__)
    if kept[best] < sum(packed.values()):
        formats = ", ".join(sorted(packed))
        raise UserError(
            f"no type of GGUF file keeps all blocks of this run ({formats}): choose a type, such as"
            f" {best}"
        )
    return best


def _group_by_stored(family: Family, tensors: Iterable[str]) -> dict[str, list[str]]:
    """Maps each GGUF tensor to the transformers tensors that it holds: a single tensor, or one per
    expert in order.
    """
    stored_of = {hf_name: stored for stored, hf_name in family.names.items()}
    sources: dict[
        str, dict[int, str]
    ] = {}  # for each GGUF tensor, the transformers tensors by expert
    for name in tensors:
        if merged := family.merged.get(_generalize(name)):
            index = name.split(".")[2]
            sources |= {stored.replace("{}", index): {0: name} for stored in merged.stored}
            continue
        module, _, suffix = name.rpartition(".")
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        general = re.sub(r"\.(layers|h)\.\d+\.", r".\1.{}.", module)
        general = re.sub(r"\.experts\.\d+\.", ".experts.{e}.", general)
        if general not in stored_of:
            raise UserError(f"GGUF has no name for the tensor {name}")
        stored = f"{stored_of[general]}.{suffix}".replace("{}", layer[1] if layer else "")
        sources.setdefault(stored, {})[int(expert[1]) if expert else 0] = name
    if family.arch in NEEDS_OUTPUT_LAYER and "output.weight" not in sources:
        sources["output.weight"] = sources["token_embd.weight"]
    return {stored: [experts[e] for e in sorted(experts)] for stored, experts in sources.items()}


def _generalize_stored(name: str) -> str:
    """Replaces the layer index in a GGUF tensor name with `{}`."""
    return re.sub(r"^blk\.\d+\.", "blk.{}.", name)


def _shape(
    family: Family,
    tensors: LazyArrays,
    stored: str,
    names: list[str],
    kind: str,
    hf_config: Mapping[str, Any],
) -> Shape:
    """Returns the shape and the type of a GGUF tensor in a file whose matrices have the type
    `kind`.
    """
    shape = tensors.tensors[names[0]].shape
    if merged := family.merged.get(_generalize(names[0])):
        parts = merged.parts(np.broadcast_to(np.uint8(0), shape), hf_config)
        shape = parts[merged.stored.index(_generalize_stored(stored))].shape
    if _is_transposed(family, names[0], len(shape)):
        shape = shape[::-1]
    if "_exps" in stored and ".experts.0." in names[0]:
        shape = (len(names), *shape)
    is_vector = len(shape) == 1 or stored.endswith((".bias", "_norm.weight"))
    return shape, "F32" if is_vector or any(part in names[0] for part in ALWAYS_F32) else kind


def _check_roundtrip(
    model: ModelConfig,
    family: Family,
    metadata: dict[str, Any],
    shapes: Mapping[str, Any],
    extra: Mapping[str, np.ndarray],
) -> None:
    """Converts the metadata back as llama.cpp does, and raises a `UserError` if the architecture
    changes.
    """
    # A file with the content of the extra tensors, and no content of the others.
    content = np.concatenate(
        [np.zeros(0, np.uint8), *(array.view(np.uint8) for array in extra.values())]
    )
    tensors = {name: StoredTensor(shape, kind, 0, 0) for name, (shape, kind) in shapes.items()}
    offset = 0
    for name, array in extra.items():
        tensors[name] = StoredTensor(array.shape, "F32", offset, array.nbytes)
        offset += array.nbytes
    _, hf_config = gguf_to_hf_config(GGUFFile(Path("the file"), metadata, tensors, content))
    hf_config |= {"vocab_size": model.vocab_size, "tie_word_embeddings": model.weight_tying}
    back = build_config(hf_config_to_settings(hf_config, model.max_context)).architecture(
        model.vocab_size
    )
    for name in ARCHITECTURE:
        before, after = getattr(model, name), getattr(back, name)
        if not _close(before, after):
            raise UserError(
                f"GGUF's {family.arch} cannot represent {SETTING_OF[name]}: {name} {quote(before)}"
                f" would become {quote(after)}"
            )


def _close(left: Any, right: Any) -> bool:
    """Returns whether two values are equal; floats may differ by float32 rounding."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_close, left, right))
    if hasattr(left, "__dataclass_fields__") and type(left) is type(right):
        return all(
            _close(getattr(left, field.name), getattr(right, field.name)) for field in fields(left)
        )
    return bool(left == right)

"""Conversion between Hugging Face tensors and parameters, according to the tables in
`hf_families`.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.files import escape_name
from dantinox.interop.hf.hf_config import (
    MAX_LAYERS,
    find_family,
    hf_config_to_settings,
    settings_to_hf_config,
)
from dantinox.interop.hf.hf_expert_families import MTP
from dantinox.interop.hf.hf_family import Family
from dantinox.interop.hf.hf_tensors import Axes, Row
from dantinox.interop.source import LazyArrays, Tensor, storage_dtype
from dantinox.model.parameters import abstract_model

__all__ = ["from_hf", "hf_config_to_settings", "to_hf"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "bfloat16", "float16")
MAX_ELEMENTS = 1 << 48  # limit for one parameter
TABLE, HEAD = "embed", "head/kernel"
ROWS = 256  # rows copied at a time
NO_NAME = "\0"  # a suffix that no tensor name has
# The bits of the exponent, which are all ones in NaN and Inf.
EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


class Location(NamedTuple):
    """The location of a tensor in the parameters.

    Attributes:
      parameter: the parameter that contains the tensor.
      parts: the parts of the parameter that the tensor concatenates along its first axis.
      expert: the index of the expert to which the tensor belongs, or None.
    """

    parameter: str
    parts: tuple[Axes, ...]
    expert: int | None

    def views(self, parameter: np.ndarray) -> list[np.ndarray]:
        """Returns a view of each part of the parameter, with its axes in the tensor's order."""
        whole = parameter if self.expert is None else parameter[self.expert]
        return [part.view(whole) for part in self.parts]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the shape of the tensor, given the shapes of all parameters."""
        views = self.views(np.broadcast_to(np.uint8(0), shapes[self.parameter]))
        part_shapes = [part.shape(view) for part, view in zip(self.parts, views, strict=True)]
        return (sum(shape[0] for shape in part_shapes), *part_shapes[0][1:])


def from_hf(
    config: Mapping[str, Any], model: ModelConfig, tensors: LazyArrays, dtype: str = "auto"
) -> LazyArrays:
    """Returns every parameter of a model, converted from a checkpoint's tensors on access.

    Args:
      config: the content of `config.json`, which gives the family.
      model: the architecture.
      tensors: the checkpoint's tensors.
      dtype: the dtype of matrices, `float32` or `bfloat16`. With `auto`, a matrix is bfloat16 if
        the checkpoint stores it in bfloat16, else float32. Scales and biases are always float32.

    Raises:
      UserError: a tensor is missing, is not used, has a wrong shape, or is not floating-point. If a
        tensor contains NaN or Inf, the error is raised when its parameter is accessed.
    """
    family = find_family(config)
    expected = model.num_blocks
    if model.experts is not None and any("{e}" in row.tensor for row in family.tensors):
        expected = (model.num_blocks - len(model.experts.dense_layers)) * model.experts.count
    # This is checked first, because building a model with too many layers could exhaust the memory.
    if expected > len(tensors):
        raise UserError(
            f"the checkpoint has {len(tensors)} tensors, but its config has {expected}"
            " layers or experts"
        )
    shapes = parameter_shapes(model)
    if large := next(
        (name for name, shape in shapes.items() if math.prod(shape) > MAX_ELEMENTS), None
    ):
        raise UserError(
            f"config.json describes a parameter {large} of shape {list(shapes[large])},"
            " which is too large"
        )
    locations = _locate(family, shapes)
    mtp_layers = range(model.num_blocks, model.num_blocks + count_mtp_layers(config))
    stored = _stored_names(tensors, family, locations, mtp_layers)
    _check_tensors(stored, tensors.tensors, locations, shapes)
    if model.weight_tying:
        _check_tied(family, stored, tensors)
    sources: dict[str, list[str]] = {}
    for name, location in locations.items():
        sources.setdefault(location.parameter, []).append(name)
    kinds: dict[str, Tensor] = {}
    for parameter, names in sources.items():
        dtypes = {tensors.tensors[stored[name]].dtype for name in names}
        kinds[parameter] = Tensor(shapes[parameter], storage_dtype(parameter, dtype, dtypes))

    def make(parameter: str) -> np.ndarray:
        shape, kind = kinds[parameter]
        array = np.empty(shape, BFLOAT16 if kind == "bfloat16" else kind)
        for name in sources[parameter]:
            tensor = tensors[stored[name]]
            if not _is_finite(tensor):
                raise UserError(f"the checkpoint has NaN or Inf in {escape_name(stored[name])}")
            order = rope_row_order(family, config, model, name, len(tensor))
            _fill(locations[name].views(array), tensor if order is None else tensor[order])
        return array

    return LazyArrays(kinds, make)


def to_hf(
    config: Config,
    vocab_size: int,
    parameters: Mapping[str, Any],
    like: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], LazyArrays]:
    """Returns a model in the format of transformers.

    Args:
      config: the settings of the run.
      vocab_size: the number of tokens in the tokenizer.
      parameters: float32 or bfloat16 arrays by parameter path.
      like: the `config.json` of the imported checkpoint; None: a new `config.json` is derived from
        the settings.

    Returns:
      The content of `config.json`, and the tensors by name, each in the dtype of its parameter.

    Raises:
      UserError: no family supports the architecture; the message names a setting.
    """
    model = config.architecture(vocab_size)
    hf_config = dict(like) if like is not None else settings_to_hf_config(config, vocab_size)
    # These layers are not imported.
    hf_config |= {key: 0 for key in MTP.split("|") if hf_config.get(key)}
    family = find_family(hf_config)
    shapes = parameter_shapes(model)
    locations = _locate(family, shapes)
    kinds = {
        name: Tensor(location.shape(shapes), np.asarray(parameters[location.parameter]).dtype.name)
        for name, location in locations.items()
    }

    def make(name: str) -> np.ndarray:
        parameter = np.asarray(parameters[locations[name].parameter])
        whole = np.empty(kinds[name].shape, parameter.dtype)
        start = 0
        for view in locations[name].views(parameter):
            _copy(whole.reshape(-1)[start : start + view.size].reshape(view.shape), view)
            start += view.size
        order = rope_row_order(family, hf_config, model, name, len(whole))
        if order is None:
            return whole
        ordered = np.empty_like(whole)
        ordered[order] = whole
        return ordered

    return hf_config, LazyArrays(kinds, make)


def rope_row_order(
    family: Family, config: Mapping[str, Any], model: ModelConfig, name: str, count: int
) -> np.ndarray | None:
    """Returns the order in which a parameter stores the `count` rows of a tensor, or None if the
    order is the tensor's own.

    DantinoX rotates the pairs (x₀, x_{R/2}), (x₁, x_{R/2+1}), … of a head. Some families rotate the
    pairs (x₀, x₁), (x₂, x₃), … instead; reordering the rows of queries and keys gives the same
    attention scores. Some families rotate in the opposite direction; for them, the two halves of a
    head are swapped. The R rotated elements are the last ones of a head in latent attention, and
    the first ones in all other models.
    """
    if name.endswith(family.reversed_rope or NO_NAME):
        halves = np.roll(np.arange(model.head_size), model.head_size // 2)
        return (np.arange(0, count, model.head_size)[:, None] + halves).reshape(-1)
    if (
        not name.endswith(family.interleaved_rope or NO_NAME)
        or config.get("rope_interleave") is False
    ):
        return None
    R = model.rotated_size
    size = model.head_size  # the number of rows of a head
    start = 0  # the first rotated row of a head
    if model.latent is not None:
        # `kv_a` has the rows of the latent vector, then one rotated key.
        start = model.latent.rank if ".kv_a_" in name else model.head_size
        size = start + R
    head = np.arange(size)
    head[start : start + R] = start + np.concatenate([np.arange(0, R, 2), np.arange(1, R, 2)])
    return (np.arange(0, count, size)[:, None] + head).reshape(-1)


def count_mtp_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of multi-token prediction layers, which come after all other layers and
    are not imported.
    """
    count = next((config[key] for key in MTP.split("|") if config.get(key)), 0)
    if type(count) is not int or not 0 <= count < MAX_LAYERS:
        raise UserError(
            f"config.json has num_nextn_predict_layers: {escape_name(str(count))},"
            " expected a number"
        )
    return count


@lru_cache(maxsize=4)
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of a model, by path."""
    return {name: tuple(leaf.shape) for name, leaf in abstract_model(model)[1].items()}


def _locate(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Location]:
    """Returns the location of each tensor of a model with these parameters, in the order of the
    family's table.
    """
    L = 1 + max(
        (int(name.split("/")[1]) for name in shapes if name.startswith("blocks/")), default=-1
    )
    locations: dict[str, Location] = {}
    for row in family.tensors:
        for layer in range(L) if "{i}" in row.tensor else (0,):
            parameter = row.parameter.replace("{i}", str(layer))
            if parameter not in shapes or not _applies(row, shapes, layer):
                continue
            name = row.tensor.replace("{i}", str(layer))
            if "{e}" not in name:
                locations[name] = Location(parameter, row.parts, None)
                continue
            for expert in range(shapes[parameter][0]):
                locations[name.replace("{e}", str(expert))] = Location(parameter, row.parts, expert)
    if rest := shapes.keys() - {location.parameter for location in locations.values()}:
        raise UserError(
            f"{family.architecture} has no tensor for the parameter {min(rest)} of this model"
        )
    return locations


def _applies(row: Row, shapes: Mapping[str, tuple[int, ...]], layer: int) -> bool:
    """Returns whether a row applies to a layer of a model with these parameters, see `Row`."""
    if row.kv_projections is not None and row.kv_projections != _kv_projections(shapes, layer):
        return False
    if not row.condition:
        return True
    expected = not row.condition.startswith("!")
    parameter = row.condition.removeprefix("!").replace("{i}", str(layer))
    return (parameter in shapes) == expected


def _kv_projections(shapes: Mapping[str, tuple[int, ...]], layer: int) -> int:
    """Returns 2 if a layer projects keys and values, 1 if only keys, 0 if neither (see
    `ModelConfig.kv_projections`).
    """
    # The sizes are: query heads per key head, key, value.
    projections = shapes[f"blocks/{layer}/attention/qkv/kernel"][2]
    queries = shapes[f"blocks/{layer}/attention/out/kernel"][1]
    return projections - queries


def _stored_names(
    tensors: LazyArrays, family: Family, locations: Mapping[str, Location], ignored: range
) -> dict[str, str]:
    """Maps the full name of each tensor to its name in the checkpoint, without known buffers and
    ignored layers.
    """
    skipped = tuple(f"model.layers.{layer}." for layer in ignored)
    stored = {
        name: name
        for name in tensors
        if not name.endswith(family.buffers) and not name.startswith(skipped)
    }
    # Checkpoints without an output layer may lack the prefix of the other tensors, `model.` or
    # `transformer.`.
    prefix = next(iter(locations)).partition(".")[0] + "."
    if not any(name.startswith(prefix) for name in stored):
        stored = {name if name in locations else prefix + name: name for name in stored}
    return stored


def _check_tensors(
    stored: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    locations: Mapping[str, Location],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises a `UserError` unless the checkpoint has exactly the expected tensors with the expected
    shapes.
    """
    for name, location in locations.items():
        if name not in stored:
            raise UserError(f"the checkpoint lacks {name}, which its config requires")
        found, dtype = tensors[stored[name]]
        expected = location.shape(shapes)
        if found != expected:
            raise UserError(
                f"the checkpoint has {stored[name]} of shape {list(found)}, its config requires"
                f" {list(expected)}"
            )
        if dtype not in FLOATS:
            raise UserError(
                f"the checkpoint has {stored[name]} as {dtype}, expected one of {', '.join(FLOATS)}"
            )
    tied = {"lm_head.weight"} if HEAD not in shapes else set()
    if rest := stored.keys() - locations.keys() - tied:
        name = escape_name(stored[min(rest)])
        raise UserError(f"the checkpoint has {name}, which the model of its config does not have")


def _check_tied(family: Family, stored: Mapping[str, str], tensors: LazyArrays) -> None:
    """Raises a `UserError` if the checkpoint of a model with tied embeddings has a different output
    layer.
    """
    table = next(row.tensor for row in family.tensors if row.parameter == TABLE)
    if "lm_head.weight" in stored:
        head = tensors[stored["lm_head.weight"]]
        embed = tensors[stored[table]]
        if (
            head.dtype != embed.dtype
            or head.shape != embed.shape
            or not np.array_equal(_bits(head), _bits(embed))
        ):
            raise UserError(
                f"the checkpoint has different numbers in lm_head.weight and {stored[table]}, but"
                " its config has tie_word_embeddings: true"
            )


def _fill(views: list[np.ndarray], tensor: np.ndarray) -> None:
    """Splits a tensor along its first axis and writes the parts into the views."""
    if len(views) == 1:
        _copy(views[0], tensor.reshape(views[0].shape))
        return
    row_size = tensor.size // tensor.shape[0]
    start = 0
    for view in views:
        size = view.size // row_size
        _copy(view, tensor[start : start + size].reshape(view.shape))
        start += size


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array in blocks of rows that fit the caches of a CPU."""
    if target.dtype == source.dtype:
        # NumPy copies integers faster than dtypes of other packages.
        target = _bits(target)
        source = _bits(source)
    if target.ndim < 2 or not target.size:
        target[...] = source
        return
    step = max(1, ROWS * len(target) * target.shape[-1] // target.size)
    for start in range(0, len(target), step):
        target[start : start + step] = source[start : start + step]


def _is_finite(tensor: np.ndarray) -> bool:
    """Returns whether a tensor contains neither NaN nor Inf."""
    mask = EXPONENTS[tensor.dtype.name]
    bits = tensor.view(f"u{tensor.itemsize}")
    step = max(1, ROWS * 1024 * len(bits) // max(bits.size, 1))
    return not any(
        ((bits[start : start + step] & mask) == mask).any() for start in range(0, len(bits), step)
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns a bfloat16 array as integers, any other array unchanged."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array

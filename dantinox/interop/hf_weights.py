"""Weights of Hugging Face checkpoints: tensors to parameters and back, by the tables of the families."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dantinox.config import Config, ModelConfig, UserError
from dantinox.files import escape_name
from dantinox.interop.hf_config import MAX_LAYERS, find_family, hf_config_to_settings, settings_to_hf_config
from dantinox.interop.hf_families import FAMILIES, MTP, Axes, Family
from dantinox.interop.source import LazyArrays, Tensor, storage_dtype
from dantinox.model.parameters import abstract_model

__all__ = ["from_hf", "hf_config_to_settings", "to_hf"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "bfloat16", "float16")
MOST_NUMBERS = 1 << 48
TABLE, HEAD = "embed", "head/kernel"
ROWS = 256  # that are copied at once
EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}  # all ones where a number is NaN or infinite


class Place(NamedTuple):
    """Where a tensor stands among our parameters: in one, or in one expert's part of it, piece by piece."""

    parameter: str
    forms: tuple[Axes, ...]
    expert: int | None

    def views(self, parameter: np.ndarray) -> list[np.ndarray]:
        part = parameter if self.expert is None else parameter[self.expert]
        return [form.view(part) for form in self.forms]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the tensor, from those of all parameters."""
        views = self.views(np.broadcast_to(np.uint8(0), shapes[self.parameter]))
        pieces = [form.shape(view) for form, view in zip(self.forms, views, strict=True)]
        return (sum(piece[0] for piece in pieces), *pieces[0][1:])


def from_hf(config: Mapping[str, Any], model: ModelConfig, tensors: LazyArrays, dtype: str = "auto") -> LazyArrays:
    """Every parameter of a model of this architecture, made of a checkpoint's tensors when it is asked for.

    Args:
      config: the `config.json`, for its family.
      dtype: of matrices, `float32` or `bfloat16`; `auto`: bfloat16 where the checkpoint has bfloat16, else float32. Scales and
        biases are float32.

    Raises:
      UserError: a tensor is missing, is not used, has another shape, or numbers that are no floats; the sentence names it.
        An array that is made raises it where a tensor of it holds NaN or Inf.
    """
    family = find_family(config)
    expected = model.num_blocks
    if model.experts is not None and any("{e}" in row.tensor for row in family.tensors):
        expected = (model.num_blocks - len(model.experts.dense_layers)) * model.experts.count
    if expected > len(tensors):  # before anything is made of so large a number
        raise UserError(f"the checkpoint has {len(tensors)} tensors, its config says {expected} layers or experts")
    shapes = _shapes(model)
    if large := next((name for name, shape in shapes.items() if math.prod(shape) > MOST_NUMBERS), None):
        raise UserError(f"config.json asks for a parameter {large} of shape {list(shapes[large])}, which no file can hold")
    places = _places(family, shapes)
    given = _named(tensors, family, places, range(model.num_blocks, model.num_blocks + predicting_layers(config)))
    _account(given, tensors.tensors, places, shapes)
    if model.weight_tying:
        _check_tied(family, given, tensors)
    sources: dict[str, list[str]] = {}
    for name, place in places.items():
        sources.setdefault(place.parameter, []).append(name)
    kinds = {
        parameter: Tensor(
            shapes[parameter], storage_dtype(parameter, dtype, {tensors.tensors[given[name]].dtype for name in names})
        )
        for parameter, names in sources.items()
    }

    def make(parameter: str) -> np.ndarray:
        shape, kind = kinds[parameter]
        array = np.empty(shape, BFLOAT16 if kind == "bfloat16" else kind)
        for name in sources[parameter]:
            tensor = tensors[given[name]]
            if not _is_finite(tensor):
                raise UserError(f"the checkpoint has {escape_name(given[name])} with numbers that are NaN or infinite")
            order = paired_rows(family, config, model, name, len(tensor))
            _fill(places[name].views(array), tensor if order is None else tensor[order])
        return array

    return LazyArrays(kinds, make)


def to_hf(
    config: Config, vocab_size: int, parameters: Mapping[str, Any], like: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], LazyArrays]:
    """A model as transformers has it.

    Args:
      vocab_size: tokens of the tokenizer.
      parameters: by their paths, float32 or bfloat16.
      like: the `config.json` that it was imported from, which is given back where it says this very model.

    Returns:
      `config.json`, and the tensors by their names, each in the type of its parameter.

    Raises:
      UserError: no family can say the architecture; the sentence names a setting.
    """
    model = config.architecture(vocab_size)
    written = dict(like) if like is not None else settings_to_hf_config(config, vocab_size)
    written |= {key: 0 for key in MTP.split("|") if written.get(key)}  # layers that are not imported
    family = FAMILIES[written["model_type"]]
    shapes = _shapes(model)
    places = _places(family, shapes)
    kinds = {
        name: Tensor(place.shape(shapes), np.asarray(parameters[place.parameter]).dtype.name) for name, place in places.items()
    }

    def make(name: str) -> np.ndarray:
        parameter = np.asarray(parameters[places[name].parameter])
        whole, start = np.empty(kinds[name].shape, parameter.dtype), 0
        for view in places[name].views(parameter):
            _copy(whole.reshape(-1)[start : start + view.size].reshape(view.shape), view)
            start += view.size
        order = paired_rows(family, written, model, name, len(whole))
        if order is None:
            return whole
        paired = np.empty_like(whole)
        paired[order] = whole
        return paired

    return written, LazyArrays(kinds, make)


def paired_rows(family: Family, config: Mapping[str, Any], model: ModelConfig, name: str, count: int) -> np.ndarray | None:
    """Which of the `count` rows of a tensor stands where, or None where all stay.

    Families that rotate neighbouring numbers of a head, (x₀, x₁), (x₂, x₃), …, come to rotate (x₀, x_{R/2}), … as all models
    here: the scores are the same. Of a head of latent attention the last numbers are rotated, of others the first. Families
    that rotate in the other direction have their halves swapped, to the same end.
    """
    if name.endswith(family.swapped or "\0"):
        halves = np.roll(np.arange(model.head_size), model.head_size // 2)
        return (np.arange(0, count, model.head_size)[:, None] + halves).reshape(-1)
    if not name.endswith(family.pairs or "\0") or config.get("rope_interleave") is False:
        return None
    R, size, start = model.rotated_size, model.head_size, 0
    if model.latent is not None:
        start = model.latent.rank if ".kv_a_" in name else model.head_size
        size = start + R
    head = np.arange(size)
    head[start : start + R] = start + np.concatenate([np.arange(0, R, 2), np.arange(1, R, 2)])
    return (np.arange(0, count, size)[:, None] + head).reshape(-1)


def predicting_layers(config: Mapping[str, Any]) -> int:
    """How many layers that predict further tokens stand behind the others; they are left out."""
    count = next((config[key] for key in MTP.split("|") if config.get(key)), 0)
    if type(count) is not int or not 0 <= count < MAX_LAYERS:
        raise UserError(f"config.json has num_nextn_predict_layers: {escape_name(str(count))}, expected a number")
    return count


@lru_cache(maxsize=4)
def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in abstract_model(model)[1].items()}


def _places(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Where each tensor stands that a model with these parameters has, in the order of the table."""
    L = 1 + max((int(name.split("/")[1]) for name in shapes if name.startswith("blocks/")), default=-1)
    places: dict[str, Place] = {}
    for tensor, parameter, forms, beside, projected in family.tensors:
        for layer in range(L) if "{i}" in tensor else (0,):
            name, other = (path.replace("{i}", str(layer)) for path in (parameter, beside))
            if name not in shapes or (beside and (other.lstrip("!") in shapes) == other.startswith("!")):
                continue
            if projected is not None and projected != _projected(shapes, layer):
                continue
            numbers = range(shapes[name][0]) if "{e}" in tensor else (None,)
            places |= {tensor.replace("{i}", str(layer)).replace("{e}", str(e)): Place(name, forms, e) for e in numbers}
    if left := shapes.keys() - {place.parameter for place in places.values()}:
        raise UserError(f"{family.architecture} has no tensor for the parameter {min(left)} of this model")
    return places


def _projected(shapes: Mapping[str, tuple[int, ...]], layer: int) -> int:
    """The keys and values that a layer projects for each key head, see `ModelConfig.kv_projections`."""
    made, groups = shapes[f"blocks/{layer}/attention/qkv/kernel"][2], shapes[f"blocks/{layer}/attention/out/kernel"][1]
    return made - groups


def _named(tensors: LazyArrays, family: Family, places: Mapping[str, Place], ignored: range) -> dict[str, str]:
    """Our name of a tensor → the one that it has in the checkpoint, without known buffers and layers that are left out."""
    left_out = tuple(f"model.layers.{layer}." for layer in ignored)
    given = {name: name for name in tensors if not name.endswith(family.buffers) and not name.startswith(left_out)}
    prefix = next(iter(places)).partition(".")[0] + "."  # absent where only the body of a model was saved
    if not any(name.startswith(prefix) for name in given):
        given = {name if name in places else prefix + name: name for name in given}
    return given


def _account(
    given: Mapping[str, str], tensors: Mapping[str, Tensor], places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises unless every tensor is used once and every parameter filled."""
    for name, place in places.items():
        if name not in given:
            raise UserError(f"the checkpoint lacks {name}, which its config asks for")
        (found, dtype), expected = tensors[given[name]], place.shape(shapes)
        if found != expected:
            raise UserError(f"the checkpoint has {given[name]} of shape {list(found)}, its config says {list(expected)}")
        if dtype not in FLOATS:
            raise UserError(f"the checkpoint has {given[name]} as {dtype}, which is none of {', '.join(FLOATS)}")
    tied = {"lm_head.weight"} if HEAD not in shapes else set()
    if left := given.keys() - places.keys() - tied:
        what = escape_name(given[min(left)])
        raise UserError(f"the checkpoint has {what}, for which the model of its config has no place")


def _check_tied(family: Family, given: Mapping[str, str], tensors: LazyArrays) -> None:
    """Raises where a checkpoint with a tied head has another one as well."""
    table = next(row.tensor for row in family.tensors if row.parameter == TABLE)
    if "lm_head.weight" in given:
        head, embed = tensors[given["lm_head.weight"]], tensors[given[table]]
        if head.dtype != embed.dtype or head.shape != embed.shape or not np.array_equal(_bits(head), _bits(embed)):
            raise UserError(
                f"the checkpoint has lm_head.weight with other numbers than {given[table]}, and its config says "
                "tie_word_embeddings: true"
            )


def _fill(views: list[np.ndarray], tensor: np.ndarray) -> None:
    """Writes a tensor into the views that it is made of."""
    start = 0
    for view in views:
        size = tensor.shape[0] if len(views) == 1 else view.size // (tensor.size // tensor.shape[0])
        piece = tensor[start : start + size].reshape(view.shape)
        _copy(view, piece)
        start += size


def _copy(to: np.ndarray, of: np.ndarray) -> None:
    """Writes an array into another one some rows at a time, which stay in the caches of a CPU."""
    if to.dtype == of.dtype:
        to, of = _bits(to), _bits(of)  # NumPy moves integers faster than what it does not know
    if to.ndim < 2 or not to.size:
        to[...] = of
        return
    step = max(1, ROWS * len(to) * to.shape[-1] // to.size)
    for start in range(0, len(to), step):
        to[start : start + step] = of[start : start + step]


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether a tensor holds neither NaN nor Inf."""
    mask = EXPONENTS[tensor.dtype.name]
    bits = tensor.view(f"u{tensor.itemsize}")
    step = max(1, ROWS * 1024 * len(bits) // max(bits.size, 1))
    return not any(((bits[start : start + step] & mask) == mask).any() for start in range(0, len(bits), step))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array

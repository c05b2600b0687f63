"""Import of quantized GGUF tensors without conversion: the rows of a tensor become the outputs of a
packed parameter.

A parameter joins rows of one or several tensors, in an order that depends on the family. To find
the order, tensors whose values are the numbers of their rows, or of their columns, go through the
same conversion as the weights.
"""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from dantinox.config import ModelConfig, UserError
from dantinox.files import escape_name
from dantinox.interop.gguf.ggml_quantize import has_finite_scales
from dantinox.interop.gguf.gguf_file import PLAIN_DTYPES
from dantinox.interop.hf.hf_weights import from_hf
from dantinox.interop.source import LazyArrays, Source, StoredBlocks, Tensor
from dantinox.kernels import FORMATS
from dantinox.model.packed import Layout, packable_layouts, packed_name
from dantinox.model.transformer import Transformer

MAX_NUMBER = 1 << 24  # float32 represents all smaller integers
LAYER = re.compile(r"^blk\.(\d+)\.")


class RowSources(NamedTuple):
    """The origin of the rows of a parameter.

    Attributes:
      names: the tensors in the file.
      tensor_O, row_O: the index in `names` and the row in that tensor, for every row
        `[*lead, *shape_out]` of the parameter.
    """

    names: tuple[str, ...]
    tensor_O: np.ndarray
    row_O: np.ndarray


class PackedPart(NamedTuple):
    """A part of a packed parameter: its format, its shape `[*lead, *outputs, bytes]`, and the
    origin of its rows.
    """

    kind: str
    shape: tuple[int, ...]
    sources: RowSources


def pack_parameters(
    source: Source, model: ModelConfig, arrays: LazyArrays
) -> tuple[LazyArrays, dict[str, list[str]]]:
    """Replaces parameters by packed arrays where the file has them in a format of `FORMATS`.

    Args:
      source: the checkpoint; it has `blocks`.
      model: the architecture.
      arrays: the parameters that `from_hf` returns.

    Returns:
      The arrays with the names of a weights file, and the quantized parameters that become
      bfloat16, with the ggml types that prevent packing.
    """
    blocks = source.blocks
    assert blocks is not None
    layouts = packable_layouts(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
    find = _RowFinder(source, blocks, model)
    kinds: dict[str, Tensor] = {}
    parts: dict[str, PackedPart] = {}  # by their name in a weights file
    widened: dict[str, list[str]] = {}
    for name, tensor in arrays.tensors.items():
        # The float weights of ternary projections are not those of the file (`gguf_matrices`).
        ternary = model.projections == "ternary" and name.startswith("blocks/")
        if ternary or not (name in ("embed", "per_layer/embed") or name.endswith("/kernel")):
            kinds[name] = tensor
            continue
        read_tensors, sources = find(name, layouts.get(name))
        found = None if sources is None else _split_rows(blocks, sources, layouts[name])
        if found is not None:
            for index, part in enumerate(found):
                part_name = packed_name(name, index, part.kind)
                parts[part_name] = part
                kinds[part_name] = Tensor(part.shape, "uint8")
        elif quantized := sorted(
            {blocks.kinds[stored] for stored in read_tensors} - PLAIN_DTYPES.keys()
        ):
            kinds[name] = tensor._replace(dtype="bfloat16")
            widened[name] = [kind for kind in quantized if kind not in FORMATS] or quantized
        else:
            kinds[name] = tensor
    bfloat16 = PLAIN_DTYPES["BF16"]

    def make(name: str) -> np.ndarray:
        if name in parts:
            return _read_part(source, blocks, parts[name])
        array = arrays[name]
        return array.astype(bfloat16, copy=False) if kinds[name].dtype == "bfloat16" else array

    return LazyArrays(kinds, make), widened


class _RowFinder:
    """Finds the origin of the rows of each parameter. Layers with equal tensors are converted
    once.
    """

    def __init__(self, source: Source, blocks: StoredBlocks, model: ModelConfig):
        self.source = source
        self.blocks = blocks
        self.model = model
        self.known: dict[Any, tuple[tuple[str, ...], RowSources | None]] = {}
        # For each layer, and "" for the rest of the model, the names and shapes of its tensors.
        self.signatures: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in blocks.shapes.items():
            match = LAYER.match(name)
            self.signatures.setdefault(match[1] if match else "", []).append(
                (LAYER.sub("", name), shape)
            )

    def __call__(
        self, parameter: str, layout: Layout | None
    ) -> tuple[tuple[str, ...], RowSources | None]:
        """Returns the tensors that a parameter reads, and the origin of its rows, or None if it
        does not consist of rows.
        """
        match = re.match(r"blocks/(\d+)/", parameter)
        layer = match[1] if match else ""
        signature = tuple(sorted(self.signatures.get(layer, [])))
        key = parameter.replace(f"blocks/{layer}/", "blocks/{}/"), layout, signature
        if key not in self.known:
            self.known[key] = self._trace(parameter, layout)
        names, sources = self.known[key]
        names_here = tuple(LAYER.sub(f"blk.{layer}.", name) for name in names)
        return names_here, None if sources is None else sources._replace(names=names_here)

    def _trace(
        self, parameter: str, layout: Layout | None
    ) -> tuple[tuple[str, ...], RowSources | None]:
        """Converts the numbers of rows and columns instead of weights, see `__call__`."""
        starts: dict[
            str, int
        ] = {}  # the number of the first row of each tensor; rows are numbered across tensors

        def row_numbers(name: str) -> np.ndarray:
            shape = self.blocks.shapes[name]
            start = starts.setdefault(name, sum(map(self._count_rows, starts)))
            numbers = np.arange(start, start + self._count_rows(name), dtype=np.float32)
            return np.broadcast_to(numbers.reshape(*shape[:-1], 1), shape)

        def column_numbers(name: str) -> np.ndarray:
            shape = self.blocks.shapes[name]
            return np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape)

        rows = self._convert(parameter, row_numbers)
        names = tuple(starts)
        if layout is None or sum(map(self._count_rows, names)) >= MAX_NUMBER:
            return names, None
        shape = (math.prod(layout.lead), layout.row, math.prod(layout.shape_out))
        rows = rows.reshape(shape)
        columns = self._convert(parameter, column_numbers).reshape(shape)
        in_order = (columns == np.arange(layout.row, dtype=np.float32)[:, None]).all()
        one_row_per_output = (rows == rows[:, :1]).all()
        if not in_order or not one_row_per_output:
            return names, None
        numbers = rows[:, 0].reshape(*layout.lead, *layout.shape_out).astype(np.int64)
        first_rows = np.array([starts[name] for name in names])
        tensor_O = np.searchsorted(first_rows, numbers, side="right") - 1
        return names, RowSources(names, tensor_O, numbers - first_rows[tensor_O])

    def _count_rows(self, name: str) -> int:
        return math.prod(self.blocks.shapes[name][:-1])

    def _convert(self, parameter: str, numbers: Callable[[str], np.ndarray]) -> np.ndarray:
        def read(name: str, expert: int | None) -> np.ndarray:
            return numbers(name) if expert is None else numbers(name)[expert]

        return from_hf(self.source.config, self.model, self.blocks.convert(read), "float32")[
            parameter
        ]


def _split_rows(
    blocks: StoredBlocks, sources: RowSources, layout: Layout
) -> list[PackedPart] | None:
    """Splits a parameter into parts of one format each, slices along one axis of the outputs; None:
    this is not possible.
    """
    kinds = [blocks.kinds[name] for name in sources.names]
    if any(kind not in FORMATS or layout.row % FORMATS[kind].values for kind in kinds):
        return None
    # For each tensor, the first tensor of the same format.
    kind_O = np.array([kinds.index(kind) for kind in kinds])[sources.tensor_O]

    def part(index: tuple[slice, ...]) -> PackedPart:
        kind = kinds[kind_O[index].flat[0]]
        part_sources = RowSources(sources.names, sources.tensor_O[index], sources.row_O[index])
        return PackedPart(
            kind, (*part_sources.tensor_O.shape, FORMATS[kind].row_bytes(layout.row)), part_sources
        )

    lead = len(layout.lead)
    if kind_O.ndim == lead:  # a table, which has no axes of outputs
        return [part(())] if (kind_O == kind_O.flat[0]).all() else None
    for axis in range(lead, kind_O.ndim):
        slices_SO = np.moveaxis(kind_O, axis, 0).reshape(kind_O.shape[axis], -1)
        if (slices_SO == slices_SO[:, :1]).all():
            kind_S = slices_SO[:, 0]
            edges = [i for i in range(1, len(kind_S)) if kind_S[i] != kind_S[i - 1]]
            before = (slice(None),) * axis
            return [
                part((*before, slice(start, stop)))
                for start, stop in itertools.pairwise([0, *edges, len(kind_S)])
            ]
    return None


def _read_part(source: Source, blocks: StoredBlocks, part: PackedPart) -> np.ndarray:
    """Returns the rows of a part.

    Raises:
      UserError: a scale is NaN or Inf.
    """
    tensor_O = part.sources.tensor_O.reshape(-1)
    row_O = part.sources.row_O.reshape(-1)
    result = np.empty((len(row_O), part.shape[-1]), np.uint8)
    for index, name in enumerate(part.sources.names):
        chosen = np.flatnonzero(tensor_O == index)
        if not len(chosen):
            continue
        result[chosen] = blocks.raw(name)[row_O[chosen]]
        if not has_finite_scales(part.kind, result[chosen]):
            raise UserError(f"{source.path} has NaN or Inf in {escape_name(name)}")
    return result.reshape(part.shape)

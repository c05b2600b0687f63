"""Joins the many small arrays of a batch into one for the transfer to the device.

An array costs tens of microseconds when it is transferred to an accelerator, and a few when it is
an argument or a result of a program, whatever its size. The settings of a row have about a hundred
arrays.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from dantinox.sampling import SamplingParams


class Layout(NamedTuple):
    """The structure of a packed tree, and the dtype and the shape of each of its arrays without the
    batch axis.

    It is a static argument of programs.
    """

    tree: Any
    arrays: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple((np.dtype(leaf.dtype), leaf.shape[1:]) for leaf in leaves))

    @property
    def words(self) -> int:
        """The number of words of a row."""
        return sum(math.prod(shape) for _, shape in self.arrays)


def pack(tree: Any) -> np.ndarray:
    """Returns arrays with a batch axis as one array of words, uint32 `[B, N]`.

    Raises:
      TypeError: the dtype of an array is neither bool nor one of four bytes.
    """
    return np.concatenate([_words(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)], axis=1)


def unpack(words_BN: jax.Array, layout: Layout) -> Any:
    """Returns the tree that was packed; inside a program."""
    leaves = []
    first = 0
    for dtype, shape in layout.arrays:
        part = jax.lax.slice_in_dim(words_BN, first, first + math.prod(shape), axis=1)
        leaves.append(_values(part, dtype).reshape(len(words_BN), *shape))
        first += math.prod(shape)
    return jax.tree.unflatten(layout.tree, leaves)


def _words(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "b" and array.dtype.itemsize != 4:
        raise TypeError(
            f"an array of {array.dtype} cannot be packed: only bool and dtypes of four bytes"
        )
    rows = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:]))
    return rows.astype(np.uint32) if array.dtype.kind == "b" else rows.view(np.uint32)


def _values(words: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    return words.astype(bool) if dtype.kind == "b" else jax.lax.bitcast_convert_type(words, dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["words_BN"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class PackedParams:
    """Sampling parameters as one array."""

    words_BN: Any
    layout: Layout

    @classmethod
    def of(cls, params: SamplingParams) -> "PackedParams":
        """Packs parameters."""
        return cls(pack(params), Layout.of(params))

    def unpack(self) -> SamplingParams:
        """Returns the parameters; inside a program."""
        params: SamplingParams = unpack(self.words_BN, self.layout)
        return params

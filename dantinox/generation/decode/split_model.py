"""A model as arrays, for jitted functions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
from flax import nnx

from dantinox.model import Transformer


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["merge"])
@dataclass(frozen=True)
class SplitModel:
    """A model split into arrays and structure, so that a jitted call need not traverse the modules.

    `merge(leaves)` returns the model. Models of the same structure have the same `merge`, so they
    share compiled programs.
    """

    leaves: tuple[jax.Array, ...]
    merge: Callable[[tuple[jax.Array, ...]], Transformer]


def split_model(model: Transformer) -> SplitModel:
    """Splits a model; the result shares the arrays of the model."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return SplitModel(tuple(leaves), _merge(graph, structure))


@lru_cache(maxsize=64)
def _merge(graph: Any, structure: Any) -> Callable[[tuple[jax.Array, ...]], Transformer]:
    return lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves))

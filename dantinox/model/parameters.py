"""The parameters of a model as a flat dict from path to array, for optimizers and checkpoints.

Paths are `embed`, `norm_f/scale`, `head/kernel`, `blocks/<layer>/<module>/…/<leaf>`; matrices are
called `kernel`. With `scan_layers` the layers are `rolled/<kind>/<module>/…/<leaf>` and have a
leading layer axis.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.files import escape_name
from dantinox.model.packed import (
    Layout,
    Part,
    check_parts,
    group_parts,
    pack_modules,
    packable_layouts,
    widen,
)
from dantinox.model.transformer import Transformer

Parameters = dict[str, jax.Array]
Shapes = dict[str, jax.ShapeDtypeStruct]


def abstract_model(
    config: ModelConfig, packed: Mapping[str, Any] | None = None
) -> tuple[Callable[[Parameters], Transformer], dict[str, jax.ShapeDtypeStruct]]:
    """Returns `build(parameters) -> Transformer`, which also works inside jit, and the shape of
    every parameter.

    No arrays are allocated.

    Args:
      packed: the shapes of packed arrays by their name in a file (see `dantinox.model.packed`).
        They replace the parameters that they represent.

    Raises:
      ValueError: a packed array does not fit the model.
    """
    graph, flat, shapes = _split_abstract(config, packed) if packed else _abstract_state(config)

    def build(parameters: Parameters) -> Transformer:
        leaves = [(path, leaf.replace(parameters[_name(path)])) for path, leaf in flat.items()]
        return nnx.merge(graph, nnx.from_flat_state(leaves))

    return build, dict(shapes)


def _split_abstract(
    config: ModelConfig, packed: Mapping[str, Any]
) -> tuple[Any, dict[Any, Any], Shapes]:
    """Returns the graph of a model, its abstract variables by path, and the shape of every
    parameter by name.
    """
    abstract = _eval_shape(config)
    if packed:  # their arrays in files are bytes
        pack_modules(
            abstract,
            {name: jax.ShapeDtypeStruct(leaf.shape, jnp.uint8) for name, leaf in packed.items()},
        )
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    return (
        graph,
        flat,
        {_name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat.items()},
    )


@lru_cache(maxsize=16)
def _abstract_state(config: ModelConfig) -> tuple[Any, dict[Any, Any], Shapes]:
    """Returns `_split_abstract` without packed arrays. Tracing a constructor takes as long as many
    small programs.
    """
    return _split_abstract(config, {})


def _eval_shape(config: ModelConfig) -> Transformer:
    model: Transformer = nnx.eval_shape(lambda: Transformer(config, rngs=_ConstantKey()))  # type: ignore[arg-type]
    return model


@dataclass(frozen=True)
class WidenedArray:
    """A packed parameter that is converted to float32 on access, with the attributes of a stored
    array.
    """

    parts: list[Part]
    layout: Layout
    axis: int

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def array(self) -> np.ndarray:
        return widen(
            [(kind, stored.array()) for kind, stored in self.parts], self.layout, self.axis
        )


def widen_arrays(config: ModelConfig, packed: Mapping[str, Any]) -> dict[str, WidenedArray]:
    """Returns the parameters that packed arrays represent.

    Args:
      config: the architecture.
      packed: stored arrays by their name in a file.

    Raises:
      ValueError: an array does not fit the model.
    """
    layouts = packable_layouts(_eval_shape(replace(config, lora=None)))
    found = {}
    for module, parts in group_parts(packed).items():
        name = module if module in layouts else f"{module}/kernel"
        if name not in layouts:
            raise ValueError(
                f"hold {escape_name(module)} in packed blocks, which this model does not have"
            )
        found[name] = WidenedArray(parts, layouts[name], check_parts(module, parts, layouts[name]))
    return found


class _ConstantKey:
    """Replaces `nnx.Rngs` where only shapes are computed: deriving a key for every weight takes
    most of the tracing time.
    """

    def __init__(self) -> None:
        self._key = jax.random.key(0)

    def params(self) -> jax.Array:
        return self._key


def stack_layers(parameters: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Stacks the weights of separate layers as in a model with `scan_layers`; the values are the
    same.
    """
    result: dict[str, Any] = {
        name: array for name, array in parameters.items() if not name.startswith("blocks/")
    }
    for name in parameters:
        head, _, rest = name.partition("/")
        layer, _, leaf = rest.partition("/")
        if head == "blocks" and int(layer) < config.period:  # the first layer of its kind
            kind = int(layer)
            layers = [
                parameters[f"blocks/{i}/{leaf}"]
                for i in range(kind, config.num_blocks, config.period)
            ]
            # NumPy arrays stay in host memory.
            stack = np.stack if isinstance(layers[0], np.ndarray) else jnp.stack
            result[f"rolled/{kind}/{leaf}"] = stack(layers)
    return result


def unstack_layers(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Splits stacked weights into separate layers, as in files and for decoding; other weights are
    unchanged.
    """
    result: dict[str, Any] = {}
    period = 1 + max(
        (int(name.split("/")[1]) for name in parameters if name.startswith("rolled/")), default=0
    )
    for name, array in parameters.items():
        head, _, rest = name.partition("/")
        if head != "rolled":
            result[name] = array
            continue
        kind, _, leaf = rest.partition("/")
        result |= {
            f"blocks/{int(kind) + period * turn}/{leaf}": layer for turn, layer in enumerate(array)
        }
    return result


def init_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Returns new random weights; the same seed gives the same weights on the same kind of
    device.
    """
    return get_parameters(Transformer(config, rngs=nnx.Rngs(params=random_key(seed))))


def random_key(seed: int) -> jax.Array:
    """Returns the root key of a run. It uses the random generator of XLA, which compiles and runs
    much faster than Threefry.
    """
    return jax.random.key(seed, impl="rbg")


def get_parameters(model: Transformer) -> Parameters:
    """Returns the weights of a model as a dict from path to array."""
    return {_name(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in path)

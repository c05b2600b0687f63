"""The weights of a model as a flat dict from path to array, which is what optimizers and checkpoints work on."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.model.transformer import Transformer

Parameters = dict[str, jax.Array]


def blueprint(config: ModelConfig) -> tuple[Callable[[Parameters], Transformer], dict[str, jax.ShapeDtypeStruct]]:
    """What a model of this architecture is made of, without allocating it.

    Returns:
      `build(parameters) -> Transformer`, to be called inside or outside of jit, and the shape of every parameter.
    """
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    shapes = {_name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat.items()}

    def build(parameters: Parameters) -> Transformer:
        leaves = [(path, leaf.replace(parameters[_name(path)])) for path, leaf in flat.items()]
        return nnx.merge(graph, nnx.from_flat_state(leaves))

    return build, shapes


def initial_parameters(config: ModelConfig, seed: int) -> Parameters:
    """Fresh random weights; the same for the same seed on the same kind of device."""
    return parameters_of(Transformer(config, rngs=nnx.Rngs(params=random_key(seed))))


def random_key(seed: int) -> jax.Array:
    """The root of a run's randomness. XLA's own generator: a fraction of Threefry's time to compile and to run."""
    return jax.random.key(seed, impl="rbg")


def parameters_of(model: Transformer) -> Parameters:
    """The weights of a model, path to array."""
    return {_name(path): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in path)

"""Small models with random weights, and their compiled programs, cached per configuration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.model import Transformer

from . import reference

BASE = ModelConfig(
    vocab_size=19,
    dim=12,
    n_heads=4,
    kv_heads=2,
    head_size=4,
    num_blocks=2,
    hidden_dim=16,
    max_context=32,
    windows=(None, None),
    dtype="float32",
)


def config(**changes: Any) -> ModelConfig:
    """Returns `BASE` with changes; `windows` sets the depth."""
    windows = changes.get("windows", BASE.windows)
    return replace(BASE, num_blocks=len(windows), **changes)


def shaken(state: Any, seed: int) -> Any:
    """Randomizes every weight, so that no term is hidden by a one, a zero or a tiny embedding."""
    random = np.random.default_rng(seed)

    def draw(path: tuple, leaf: jax.Array) -> jax.Array:
        *_, parent, name = [
            None,
            *(key.key for key in path if isinstance(key, jax.tree_util.DictKey)),
        ]
        noise = random.standard_normal(leaf.shape)
        if name in ("scale", "layer_scalar", "expert_scale"):
            noise = 1 + 0.4 * noise
        elif name == "kernel":
            fan_in = np.prod(leaf.shape[:-1]) if parent == "out" else leaf.shape[0]
            noise = 1.3 * noise / np.sqrt(fan_in)
        # Converted by NumPy, which compiles nothing.
        return jnp.asarray(np.asarray(noise, leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, state)


# Half the compile time, for programs that run once and are compared with a tolerance.
quick = partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


@dataclass(frozen=True, eq=False)
class Built:
    """A split model, and jitted functions of its state."""

    config: ModelConfig
    graph: Any
    state: Any
    run: Any  # (state, tokens_BT, positions_BT, cache=None, segments_BT=None) -> (logits, cache)

    @property
    def weights(self) -> Any:
        """Returns the weights as nested dicts of float64 arrays, for the reference."""
        return reference.float64(nnx.to_pure_dict(self.state))

    def model(self, state: Any = None) -> Transformer:
        return nnx.merge(self.graph, self.state if state is None else state)


@cache
def build(config: ModelConfig, seed: int = 0, compiler: Callable = quick) -> Built:
    """Returns the model of `config` with weights from `seed`."""
    # Shapes only: compiling an initializer per shape would take longer than everything else.
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    @compiler
    def run(state, tokens_BT, positions_BT, cache=None, segments_BT=None):
        logits, cache, _ = nnx.merge(graph, state)(
            tokens_BT, positions_BT, cache=cache, segments_BT=segments_BT
        )
        return logits, cache

    return Built(config, graph, shaken(state, seed), run)


def texts(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Returns random tokens of the small vocabulary."""
    return np.random.default_rng(seed).integers(0, BASE.vocab_size, shape).astype(np.int32)


def places(batch: int, length: int, first: int = 0) -> np.ndarray:
    """Returns positions first, first + 1, … in every row."""
    return np.broadcast_to(np.arange(first, first + length, dtype=np.int32), (batch, length))


TOKENS = texts((2, 9))
PLACES = places(2, 9)


def loss_of(built: Built, dropout_seed: int | None = None):
    """Returns the cross-entropy of TOKENS against themselves shifted, as a function of the
    state.
    """
    tokens_BT = jnp.asarray(TOKENS)

    def loss(state):
        rngs = None if dropout_seed is None else nnx.Rngs(dropout=dropout_seed)
        logits, _, _ = built.model(state)(tokens_BT, PLACES, rngs=rngs)
        targets = jnp.roll(tokens_BT, -1, axis=1)
        return -jnp.mean(
            jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
        )

    return loss

"""Per-layer input embeddings (Gemma 3n and 4): a small vector for each token and layer, which the
layer adds to its output.

Shapes: B batch, T time, D model, L layers, P size of the vector.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.layers import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Linear,
    make_norm,
    make_rms_norm,
)
from dantinox.model.packed import look_up
from dantinox.model.parallelism import Parallelism

# By name. This layer applies the gate itself, so both kinds are plain functions here.
ACTIVATIONS = GATED_ACTIVATIONS | PLAIN_ACTIVATIONS


class PerLayerEmbedding(nnx.Module):
    """Computes the per-layer inputs of all layers:

        (√P · embed[token] + norm(projection(x) / √D)) / √2

    x is the input of the first layer. `embed` is `[V, L, P]`, `projection/kernel` is `[D, L, P]`,
    and the norm is over P. This is `project_per_layer_inputs` of Hugging Face transformers.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        V, D, L, P = config.vocab_size, config.dim, config.num_blocks, config.per_layer_dim
        self.dtype = dtype
        self.dim = D
        self.size = P
        self.embed = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, L, P), jnp.float32))
        self.projection = Linear((D,), (L, P), dtype=dtype, rngs=rngs)
        self.norm = make_rms_norm(config, P)

    def __call__(
        self, tokens_BT: jax.Array, x_BTD: jax.Array, parallelism: Parallelism
    ) -> jax.Array:
        """Returns the per-layer inputs `[L, B, T, P]`; `x_BTD` holds the embeddings that the first
        layer reads.
        """
        # On a mesh, the vectors may be sharded like the table.
        rows_BTLP = parallelism.all_gather(look_up(self.embed, tokens_BT).astype(self.dtype))
        own_BTLP = rows_BTLP * jnp.asarray(math.sqrt(self.size), self.dtype)
        scaled_BTLP = self.projection(x_BTD) * self.dim**-0.5
        projected_BTLP = self.norm(scaled_BTLP.astype(self.dtype))
        inputs_BTLP = ((projected_BTLP + own_BTLP) * 2**-0.5).astype(self.dtype)
        return jnp.moveaxis(inputs_BTLP, 2, 0)


class PerLayerInput(nnx.Module):
    """x + norm(out(f(gate(x)) · input)): adds the per-layer input `[B, T, P]`, with `gate [D, P]`
    and `out [P, D]`. `out_gain` is a factor of the initial values of `out`.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float):
        D, P = config.dim, config.per_layer_dim
        self.function = ACTIVATIONS[config.activation]
        self.gate = Linear((D,), (P,), dtype=dtype, rngs=rngs)
        self.out = Linear((P,), (D,), dtype=dtype, rngs=rngs, gain=out_gain)
        self.norm = make_norm(config)

    def __call__(self, x_BTD: jax.Array, input_BTP: jax.Array) -> jax.Array:
        return x_BTD + self.norm(self.out(self.function(self.gate(x_BTD)) * input_BTP))

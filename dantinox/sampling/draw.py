"""The draw: one token from a row of logits by two-level inverse CDF."""

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.sampling.selection import blocks, first_crossing


def row_key(seed: Array, sample_index: Array, n_generated: Array) -> Array:
    """The key of one draw. The row number is no part of it: a prompt alone and in a batch give the same text."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), n_generated)


def draw(logits_V: Array, key: Array) -> Array:
    """A token id (int32) with probability softmax(logits_V): never a removed one while one is left, 0 in an empty row.

    Two uniforms instead of V: one picks a block of ids by its mass, one picks inside the block.
    """
    return inverse_cdf_token(logits_V, jax.random.uniform(key, (2,)))


def inverse_cdf_token(logits_V: Array, uniforms_2: Array) -> Array:
    """The token at which the running mass over ids crosses the two uniforms in [0, 1)."""
    largest = jnp.max(logits_V)
    weights_V = jnp.where(logits_V == -jnp.inf, 0.0, jnp.exp(logits_V - largest))
    # Denormal weights would be flushed in some sums and not in others.
    weights_V = jnp.where(weights_V < jnp.finfo(jnp.float32).tiny, 0.0, weights_V)
    weights_NC = blocks(weights_V)
    block, _ = first_crossing(weights_NC.sum(-1), lambda total: uniforms_2[0] * total)
    inside, _ = first_crossing(weights_NC[block], lambda total: uniforms_2[1] * total)
    return (block * weights_NC.shape[1] + inside).astype(jnp.int32)

"""Draws one token from a row of logits by a two-level inverse CDF."""

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.sampling.selection import blocks, first_crossing


def row_key(seed: Array, sample_index: Array, n_generated: Array) -> Array:
    """Returns the random key of one draw.

    The key does not depend on the row, so a request gets the same tokens in a batch of one and in a
    mixed batch.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), n_generated)


def draw(logits_V: Array, key: Array) -> Array:
    """Draws a token id (int32) with probability softmax(logits_V).

    A removed token (-inf) is never drawn, but a row without tokens returns 0. The draw needs two
    uniform numbers instead of V: one chooses a block of ids by its mass, the other a token in the
    block.
    """
    return inverse_cdf_token(logits_V, jax.random.uniform(key, (2,)))


def inverse_cdf_token(logits_V: Array, uniforms_2: Array) -> Array:
    """Returns the token id that two uniform numbers select.

    The first number selects a block by the cumulative mass of the blocks, the second a token by the
    cumulative mass in it.
    """
    largest = jnp.max(logits_V)
    weights_V = jnp.where(logits_V == -jnp.inf, 0.0, jnp.exp(logits_V - largest))
    # Denormal weights would be flushed to zero in some sums but not in others.
    weights_V = jnp.where(weights_V < jnp.finfo(jnp.float32).tiny, 0.0, weights_V)
    weights_NC = blocks(weights_V)
    block, _ = first_crossing(weights_NC.sum(-1), lambda total: uniforms_2[0] * total)
    inside, _ = first_crossing(weights_NC[block], lambda total: uniforms_2[1] * total)
    return (block * weights_NC.shape[1] + inside).astype(jnp.int32)

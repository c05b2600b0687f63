"""Exact selection without a sort: bisection over ordered float bits, and the place where a running sum crosses a value.

A full sort of a row of 128k logits takes 25 ms on a CPU; 32 reductions over the bits of its keys take 0.7 ms and find the same
threshold exactly. Functions work on one row; batches are `jax.vmap`.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 512
SIGN_BIT = np.uint32(1 << 31)


def ordered_keys(x_V: Array) -> Array:
    """uint32 keys in the order of the float32 values; equal values, 0 and -0 among them, have equal keys."""
    bits_V = lax.bitcast_convert_type(jnp.where(x_V == 0, 0.0, x_V), jnp.uint32)
    return jnp.where(bits_V >= SIGN_BIT, ~bits_V, bits_V | SIGN_BIT)


def crossing_key(keys_V: Array, weights_V: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest uint32 t for which `enough(sum of the weights with key ≥ t)` holds; 0 when none does.

    `enough` must go from true to false as its argument falls. Weights are not negative, so the rounded sums are monotone too.
    """

    def try_bit(i: Array, t: Array) -> Array:
        candidate = t | (SIGN_BIT >> i.astype(jnp.uint32))
        return jnp.where(enough(jnp.sum(jnp.where(keys_V >= candidate, weights_V, 0))), candidate, t)

    return lax.fori_loop(0, 32, try_bit, jnp.uint32(0))


def first_in_order(x_V: Array) -> Array:
    """The id of the largest value, the lowest id on ties (two vectorised reductions: five times faster than argmax on CPU)."""
    V = x_V.shape[0]
    return jnp.minimum(jnp.min(jnp.where(x_V == jnp.max(x_V), jnp.arange(V), V)), V - 1)


def blocks(weights_V: Array) -> Array:
    """The weights [V] as [N, BLOCK], zeros at the end."""
    V = weights_V.shape[0]
    size = min(BLOCK, V)
    N = -(-V // size)
    return jnp.pad(weights_V, (0, N * size - V)).reshape(N, size)


def first_past(weights_N: Array, target: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The first index with a positive weight whose running sum exceeds `target(total)`, and the sum before that index.

    Without one (the target is not below the total): the last index with a positive weight. A parallel running sum need not be
    monotone in its last bit; asking for a positive weight keeps removed entries out whatever the rounding.
    """
    sums_N = jnp.cumsum(weights_N)
    positive_N = weights_N > 0
    hit_N = (sums_N > target(sums_N[-1])) & positive_N
    last = jnp.max(jnp.where(positive_N, jnp.arange(weights_N.shape[0]), 0))
    index = jnp.where(hit_N.any(), jnp.argmax(hit_N), last)
    return index, sums_N[index] - weights_N[index]


def nth_true(hit_V: Array, n: Array) -> Array:
    """The id of the n-th true entry, counted from 1 in ascending order; -1 for n < 1, the last one when there are no more.

    A bisection over ids that takes no pass where all entries are asked for, as they are wherever no two logits are equal.
    """
    V = hit_V.shape[0]
    ids_V = jnp.arange(V)
    hits_V = hit_V.astype(jnp.float32)  # exact up to 2²⁴; XLA adds integers four times slower on a CPU
    bits = V.bit_length()

    def try_bit(i: Array, t: Array) -> Array:
        candidate = t | (1 << (bits - 1 - i))
        return jnp.where(jnp.sum(jnp.where(ids_V < candidate, hits_V, 0)) < n, candidate, t)

    fewer = (n >= 1) & (n < jnp.sum(hits_V))
    found = lax.fori_loop(0, jnp.where(fewer, bits, 0), try_bit, jnp.int32(0))
    return jnp.where(n < 1, -1, jnp.where(fewer, found, jnp.max(jnp.where(hit_V, ids_V, -1))))

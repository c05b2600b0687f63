"""SynthID-Text: a watermark in the choice of tokens, and its detector.

Source: Dathathri et al. 2024, "Scalable watermarking for identifying large language model outputs".
Hashes, tables and the treatment of repeated contexts are those of
`SynthIDTextWatermarkLogitsProcessor` of Hugging Face Transformers with its default table, so both
programs detect each other's texts.

A keyed hash of the last tokens and a candidate gives every token one bit per key, its g-value. The
tournament raises the probability of tokens with many ones. On average over all keys, the
probabilities do not change. A detector that knows the keys finds more ones than in other texts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.sampling.selection import row_sum, top_k_by_id
from dantinox.sampling.steps import Number, clip_finite, log_mass

TABLE_BITS = 16
TABLE_SEED = 0
# The hash is a linear congruential generator with 64-bit numbers. Only its lowest 16 bits select an
# entry of the table, so 32-bit numbers suffice in programs.
MULTIPLIER = 6364136223846793005
INCREMENT = 1
MAX_CONTEXTS = 1024  # a context that occurred among this many last contexts is not marked again
MAX_NGRAM = 16
FEW = 256  # up to this many remaining tokens, only these are hashed
FIRST_WEIGHT, LAST_WEIGHT = 10.0, 1.0  # of the layers in the mean of the detector, as in the paper


@cache
def g_table() -> np.ndarray:
    """Returns the table of g-values, uint8 [2¹⁶]: the lowest bits of the Mersenne Twister with seed
    0, as in PyTorch.
    """
    numbers = np.random.RandomState(TABLE_SEED).randint(0, 2**32, 1 << TABLE_BITS, np.uint32)
    return (numbers & 1).astype(np.uint8)


def synthid(
    logits_V: Array,
    history_S: Array,
    length: Number,
    n_generated: Number,
    keys_K: Array,
    ngram: Number,
) -> Array:
    """Returns ln P of the tournament: P ← P·(1 + g − Σ g·P) for each key, where g are the g-values.
    Off: no keys.

    If the last `ngram` − 1 tokens of the output occurred before, the row does not change, because
    equal hashes would distort the text. Tokens of the prompt count as 0, as in Transformers.

    Args:
      n_generated: number of tokens of the history that belong to the output.
      keys_K: the keys, padded with -1.
      ngram: length of the hashed sequences, from 2 to 16.
    """
    V = logits_V.shape[0]
    depth = jnp.sum(keys_K >= 0)
    context_M = recent_tokens(history_S, length, n_generated)
    hash_ = jnp.uint32(1)
    for i in range(MAX_NGRAM - 1):  # `ngram` is traced, so all contexts have the largest length
        hash_ = jnp.where(i >= MAX_NGRAM - ngram, _accumulate(hash_, context_M[i]), hash_)

    def whole(logits_V: Array) -> Array:
        return _tournament(logits_V, jnp.arange(V), hash_, keys_K, depth)

    def few(logits_V: Array) -> Array:
        x_K, ids_K = top_k_by_id(logits_V, FEW)
        marked_K = _tournament(x_K, ids_K, hash_, keys_K, depth)
        return jnp.full(V, -jnp.inf).at[ids_K].set(marked_K, unique_indices=True)

    fits = jnp.sum(logits_V > -jnp.inf) <= FEW
    marked_V = lax.cond(fits, few, whole, logits_V) if V > FEW else whole(logits_V)
    unmarked = (depth == 0) | is_repeated(history_S, length, n_generated, ngram)
    return jnp.where(unmarked, logits_V, marked_V)


def _tournament(logits_N: Array, ids_N: Array, hash_: Array, keys_K: Array, depth: Array) -> Array:
    """Returns ln P of the tokens `ids_N` after a layer for each of the first `depth` keys."""
    table = jnp.asarray(g_table(), jnp.float32)
    hash_N = _accumulate(hash_, ids_N)

    # The factor 1 + g − Σ g·P is z for g = 0 and 1 + z for g = 1, where z is the share of the
    # zeros. It is never 0.
    def play(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        P_N, logP_N = carry
        g_N = table[_accumulate(hash_N, keys_K[i]) & ((1 << TABLE_BITS) - 1)]
        z = jnp.maximum(row_sum((1 - g_N) * P_N) / row_sum(P_N), jnp.finfo(jnp.float32).tiny)
        return P_N * (g_N + z), logP_N + jnp.where(g_N > 0, jnp.log1p(z), jnp.log(z))

    logP_N = logits_N - log_mass(logits_N)
    return clip_finite(lax.fori_loop(0, depth, play, (jnp.exp(logP_N), logP_N))[1], logits_N)


def _accumulate(hash_: Array, numbers: Array) -> Array:
    """Adds numbers to a hash: the lowest 32 bits of a step of the linear congruential generator."""
    return (hash_ + numbers.astype(jnp.uint32)) * jnp.uint32(MULTIPLIER % 2**32) + jnp.uint32(
        INCREMENT
    )


def _output_tokens(history_S: Array, length: Number, n_generated: Number, position: Array) -> Array:
    """Returns the tokens at some positions; 0 for positions before the output."""
    first = jnp.asarray(length) - n_generated
    return jnp.where(position >= jnp.maximum(first, 0), history_S[jnp.maximum(position, 0)], 0)


def recent_tokens(history_S: Array, length: Number, n_generated: Number) -> Array:
    """Returns the last 15 tokens of the output; 0 for missing ones."""
    position_M = jnp.asarray(length) - (MAX_NGRAM - 1) + jnp.arange(MAX_NGRAM - 1)
    return _output_tokens(history_S, length, n_generated, position_M)


def is_repeated(history_S: Array, length: Number, n_generated: Number, ngram: Number) -> Array:
    """Whether the last `ngram` − 1 tokens of the output occurred before, among the last 1024
    contexts.
    """
    length = jnp.asarray(length)
    position_S = jnp.arange(history_S.shape[0])
    same_S = (position_S >= jnp.maximum(length - n_generated, length - MAX_CONTEXTS)) & (
        position_S < length
    )
    for i in range(1, MAX_NGRAM):
        earlier_S = _output_tokens(history_S, length, n_generated, position_S - i)
        newest = _output_tokens(history_S, length, n_generated, length - i)
        same_S &= (earlier_S == newest) | (i >= ngram)
    return same_S.any()


@dataclass(frozen=True)
class Detection:
    """The result of `detect`.

    Attributes:
      tokens: number of tokens with g-values: those after the first `ngram` − 1 whose context did
        not occur before.
      mean: mean of the g-values, about 0.5 without the watermark.
      weighted_mean: the same with weights that fall from the first key to the last.
      z: the weighted mean in standard deviations above that of other texts.
      p: probability that a text without the watermark has at least this z.
    """

    tokens: int
    mean: float
    weighted_mean: float
    z: float
    p: float


def g_values(
    tokens: Sequence[int], keys: Sequence[int], ngram: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the g-values [N, K] of the tokens after the first `ngram` − 1, and whether they
    count, bool [N].

    A token does not count if its context occurred among the last 1024 contexts, because it then was
    not marked.
    """
    windows_NG = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.uint64), ngram)
    with np.errstate(over="ignore"):
        hash_N = np.ones(len(windows_NG), np.uint64)
        for token_N in windows_NG.T:
            hash_N = (hash_N + token_N) * np.uint64(MULTIPLIER) + np.uint64(INCREMENT)
        hash_NK = (hash_N[:, None] + np.asarray(keys, np.uint64)) * np.uint64(
            MULTIPLIER
        ) + np.uint64(INCREMENT)
    seen: dict[bytes, int] = {}
    counts_N = np.ones(len(windows_NG), bool)
    for n, context in enumerate(map(bytes, np.ascontiguousarray(windows_NG[:, :-1]))):
        counts_N[n] = n - seen.get(context, -MAX_CONTEXTS - 1) > MAX_CONTEXTS
        seen[context] = n
    return g_table()[hash_NK % np.uint64(1 << TABLE_BITS)], counts_N


def detect(tokens: Sequence[int], keys: Sequence[int], ngram: int) -> Detection:
    """Tests whether a text has the watermark of some keys.

    Args:
      tokens: the ids of the text, at least `ngram`.
      keys: the secret keys, at least one.
      ngram: length of the hashed sequences.

    Raises:
      ValueError: there are no keys, or no token has a context that is long enough.
    """
    if not keys or len(tokens) < ngram:
        raise ValueError(
            f"a watermark needs at least one key and {ngram} tokens, got {len(keys)} keys and"
            f" {len(tokens)} tokens"
        )
    g_NK, counts_N = g_values(tokens, keys, ngram)
    mean_K = g_NK[counts_N].mean(axis=0)
    N = int(counts_N.sum())
    weights_K = np.linspace(FIRST_WEIGHT, LAST_WEIGHT, len(keys))
    weights_K /= weights_K.sum()
    base = float(g_table().mean())
    deviation = math.sqrt(base * (1 - base) * float(np.sum(weights_K**2)) / N)
    weighted_mean = float(weights_K @ mean_K)
    z = (weighted_mean - base) / deviation
    return Detection(N, float(mean_K.mean()), weighted_mean, z, math.erfc(z / math.sqrt(2)) / 2)

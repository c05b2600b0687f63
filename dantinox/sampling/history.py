"""Sampling steps that read earlier tokens: bans, biases of sequences and repetition penalties.

All are pure functions of one row and follow the rules of `dantinox.sampling.steps`: a removed token
is -inf, a kept logit is bitwise unchanged, and a disabled step returns the row itself. A history is
an array `history_S`. Its first `length` entries are valid.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.sampling.steps import Number, clip_finite, keep_only, logit_bias

LONGEST_REPEAT = 50


def ban(logits_V: Array, ids_S: Array, on: Array | bool = True) -> Array:
    """Removes the tokens `ids_S` if `on`. Ids outside the vocabulary are ignored."""
    V = logits_V.shape[0]
    ids_S = jnp.where(ids_S < 0, V, ids_S)  # a negative index would count from the end
    return jnp.where(
        on, keep_only(logits_V, jnp.ones(V, bool).at[ids_S].set(False, mode="drop")), logits_V
    )


def min_tokens(logits_V: Array, n: Number, stop_ids_S: Array, n_generated: Number) -> Array:
    """Bans the stop ids until `n` tokens are generated. Off: n = 0."""
    return ban(logits_V, stop_ids_S, jnp.asarray(n_generated) < n)


def encoder_repetition_penalty(logits_V: Array, prompt_V: Array, penalty: Number) -> Array:
    """Returns x·P if x > 0, else x/P, for tokens of the prompt: the inverse repetition penalty.
    Off: penalty = 1.

    Above 1, tokens of the prompt become more likely ("hallucination penalty" of Hugging Face
    Transformers).

    Args:
      prompt_V: the mask of the tokens that the prompt contains.
      penalty: P.
    """
    return repetition_penalty(
        logits_V, jnp.where(prompt_V, 0, -1), 1 / jnp.asarray(penalty, jnp.float32)
    )


def repetition_penalty(
    logits_V: Array, distance_V: Array, penalty: Number, range: Number = 0, slope: Number = 0.0
) -> Array:
    """Scales the logit x of every token in the history: x·P if x ≤ 0, else x/P. Off: penalty = 1.

    Source: Keskar et al. 2019, equation 2.

    Args:
      distance_V: distance of each token's last occurrence from the end of the history (0: the last
        token); -1: no occurrence.
      penalty: P.
      range: the number of tokens at the end of the history that are penalized. 0: all tokens of the
        history, without slope.
      slope: how steeply the penalty rises towards the end of the range (KoboldAI). 0: flat.
    """
    d_V = distance_V.astype(jnp.float32)
    u_V = 1 - 2 * d_V / jnp.maximum(range - 1, 1)
    y_V = slope * u_V / (1 + jnp.abs(u_V) * (slope - 1))
    flat = (jnp.asarray(range) <= 1) | (jnp.asarray(slope) == 0)
    P_V = jnp.where(flat, penalty, 1 + (penalty - 1) * ((y_V + 1) / 2))
    seen_V = (distance_V >= 0) & ((jnp.asarray(range) <= 0) | (distance_V < range))
    scaled_V = clip_finite(jnp.where(logits_V <= 0, logits_V * P_V, logits_V / P_V), logits_V)
    return jnp.where(seen_V & (jnp.asarray(penalty) != 1), scaled_V, logits_V)


def presence_frequency_penalty(
    logits_V: Array, count_V: Array, presence: Number, frequency: Number
) -> Array:
    """Returns x − presence·[c > 0] − frequency·c, with c the count of the token in the output
    (OpenAI). Off: both are 0.
    """
    count_V = count_V.astype(jnp.float32)
    present_V = clip_finite(logits_V - presence, logits_V)
    lowered_V = present_V - frequency * count_V
    on = (jnp.asarray(presence) != 0) | (jnp.asarray(frequency) != 0)
    return jnp.where(on & (count_V > 0), clip_finite(lowered_V, logits_V), logits_V)


def repeat_lengths(history_S: Array, length: Number) -> Array:
    """Returns, for each position, how many tokens directly before it match the end of the history,
    int32 [S].
    """
    S = history_S.shape[0]
    position_S = jnp.arange(S)

    def extend(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i, run_S, matching_S = carry
        tail = jnp.asarray(length) - 1 - i
        matching_S &= (
            (jnp.roll(history_S, 1 + i) == history_S[tail]) & (position_S > i) & (tail >= 0)
        )
        return i + 1, run_S + matching_S, matching_S

    start = jnp.int32(0), jnp.zeros(S, jnp.int32), position_S < length
    return lax.while_loop(lambda carry: carry[2].any(), extend, start)[1]


def extend_repeat_lengths(run_S: Array, history_S: Array, length: Number, token: Number) -> Array:
    """Updates `repeat_lengths` in one pass after `token` is appended to the first `length`
    tokens.
    """
    position_S = jnp.arange(run_S.shape[0])
    same_S = (jnp.roll(history_S, 1) == token) & (position_S >= 1) & (position_S <= length)
    return jnp.where(same_S, jnp.roll(run_S, 1) + 1, 0)


def no_repeat_ngram(
    logits_V: Array, history_S: Array, length: Number, run_S: Array, n: Number
) -> Array:
    """Bans tokens that would repeat an n-gram of the history (Paulus et al. 2018). Off: n ≤ 0.

    Args:
      run_S: the `repeat_lengths` of the history.
    """
    repeats_S = (run_S >= jnp.asarray(n) - 1) & (jnp.arange(history_S.shape[0]) < length)
    return jnp.where(
        jnp.asarray(n) <= 0, logits_V, ban(logits_V, jnp.where(repeats_S, history_S, -1))
    )


def dry(
    logits_V: Array, repeated_V: Array, multiplier: Number, base: Number, allowed_length: Number
) -> Array:
    """Subtracts m·b^(L−A) from the logit of a token that would extend a repeated suffix of L ≥ A
    tokens. Off: m = 0.

    Source: DRY, p-e-w 2024.

    Args:
      repeated_V: L, from `longest_repeats`.
      multiplier, base, allowed_length: m, b and A.
    """
    penalty_V = multiplier * jnp.asarray(base, jnp.float32) ** (repeated_V - allowed_length)
    hit_V = (repeated_V >= allowed_length) & (repeated_V > 0) & (jnp.asarray(multiplier) != 0)
    return jnp.where(hit_V, clip_finite(logits_V - penalty_V, logits_V), logits_V)


def longest_repeats(
    history_S: Array,
    length: Number,
    run_S: Array,
    breaker_S: Array,
    window: Number,
    vocab_size: int,
) -> Array:
    """Returns for every token the length, at most 50, of the longest repeated suffix that the token
    would extend, int32 [V].

    Args:
      run_S: the `repeat_lengths` of the history.
      breaker_S: the mask of positions whose token ends a repetition. A repetition neither contains
        such a token nor is extended by one.
      window: the number of tokens at the end of the history that are searched. 0: all.
    """
    position_S = jnp.arange(history_S.shape[0])
    length = jnp.asarray(length)
    window = jnp.asarray(window)
    first = jnp.where(window > 0, jnp.maximum(length - window, 0), 0)
    unbroken = length - 1 - jnp.max(jnp.where(breaker_S & (position_S < length), position_S, -1))
    run_S = jnp.minimum(
        jnp.minimum(run_S, unbroken), jnp.minimum(position_S - first, LONGEST_REPEAT)
    )
    ids_S = jnp.where(
        (position_S >= first) & (position_S < length) & ~breaker_S, history_S, vocab_size
    )
    return jnp.zeros(vocab_size, jnp.int32).at[ids_S].max(run_S, mode="drop")


def bad_words(
    logits_V: Array, history_S: Array, length: Number, prefix_WM: Array, last_W: Array
) -> Array:
    """Bans the last token of every sequence of which all other tokens are the end of the history.

    Args:
      prefix_WM: all tokens but the last of each of W sequences, right-aligned and padded with -1.
      last_W: the last token of each sequence; -1 for an unused row.
    """
    return ban(logits_V, jnp.where(_prefix_matches(history_S, length, prefix_WM), last_W, -1))


def sequence_bias(
    logits_V: Array,
    history_S: Array,
    length: Number,
    prefix_WM: Array,
    last_W: Array,
    bias_W: Array,
) -> Array:
    """Adds `bias_W` to the logit of the last token of every sequence whose other tokens end the
    history.

    A bias of -inf bans the token. The other arguments are those of `bad_words`.
    """
    V = logits_V.shape[0]
    next_W = jnp.where(_prefix_matches(history_S, length, prefix_WM) & (last_W >= 0), last_W, V)
    return logit_bias(logits_V, jnp.zeros(V).at[next_W].add(bias_W, mode="drop"))


def _prefix_matches(history_S: Array, length: Number, prefix_WM: Array) -> Array:
    """Returns the mask [W] of the sequences whose tokens except the last are the end of the
    history.
    """
    M = prefix_WM.shape[1]
    position_M = jnp.asarray(length) - M + jnp.arange(M)
    tail_M = jnp.where(position_M >= 0, history_S[jnp.maximum(position_M, 0)], -2)
    return ((prefix_WM == -1) | (prefix_WM == tail_M)).all(axis=1)


def sequence_arrays(
    sequences: Sequence[Sequence[int]], count: int = 1, longest: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `prefix_WM` and `last_W` of `bad_words` for lists of ids.

    Args:
      sequences: lists of token ids, not empty.
      count, longest: minimum number of rows W and of columns M.
    """
    W = max(count, len(sequences))
    M = max(longest, *(len(words) for words in sequences), 1)
    prefix_WM = np.full((W, M), -1, np.int32)
    last_W = np.full(W, -1, np.int32)
    for w, words in enumerate(sequences):
        *before, last_W[w] = words
        prefix_WM[w, M - len(before) :] = before
    return prefix_WM, last_W

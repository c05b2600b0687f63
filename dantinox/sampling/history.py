"""The steps that read the text so far or a list of ids: bans, bias, and penalties on what was said before.

Pure functions of one row, by the rules of `steps`: removed is -inf, kept is bit for bit, off is an explicit branch. A history
is an array `history_S` of which the first `length` places count.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from dantinox.sampling.steps import bounded, keep_only

LONGEST_REPEAT = 50


def ban(logits_V: Array, ids_S: Array, on: Array | bool = True) -> Array:
    """Removes the tokens `ids_S` while `on`; ids outside the vocabulary stand for nothing."""
    V = logits_V.shape[0]
    ids_S = jnp.where(ids_S < 0, V, ids_S)  # a negative index would count from the end
    return jnp.where(on, keep_only(logits_V, jnp.ones(V, bool).at[ids_S].set(False, mode="drop")), logits_V)


def min_tokens(logits_V: Array, n: Array | int, stop_ids_S: Array, n_generated: Array | int) -> Array:
    """Bans the stop ids while fewer than `n` tokens are generated. Off: n = 0."""
    return ban(logits_V, stop_ids_S, jnp.asarray(n_generated) < n)


def repetition_penalty(
    logits_V: Array, distance_V: Array, penalty: Array | float, window: Array | int = 0, slope: Array | float = 0.0
) -> Array:
    """x·P for x ≤ 0, x/P for x > 0, for every token of the history (Keskar et al. 2019, equation 2). Off: penalty = 1.

    Args:
      distance_V: steps from the end of the history back to the token's nearest occurrence (0: the last token), -1 for never.
      window: only this many last tokens count; 0: all of them, with a flat penalty.
      slope: how sharply the penalty rises towards the end of the window (KoboldAI); 0: flat.
    """
    d_V = distance_V.astype(jnp.float32)
    u_V = 1 - 2 * d_V / jnp.maximum(window - 1, 1)
    y_V = slope * u_V / (1 + jnp.abs(u_V) * (slope - 1))
    flat = (jnp.asarray(window) <= 1) | (jnp.asarray(slope) == 0)
    P_V = jnp.where(flat, penalty, 1 + (penalty - 1) * (y_V + 1) / 2)
    seen_V = (distance_V >= 0) & ((jnp.asarray(window) <= 0) | (distance_V < window))
    scaled_V = bounded(jnp.where(logits_V <= 0, logits_V * P_V, logits_V / P_V), logits_V)
    return jnp.where(seen_V & (jnp.asarray(penalty) != 1), scaled_V, logits_V)


def presence_frequency_penalty(logits_V: Array, count_V: Array, presence: Array | float, frequency: Array | float) -> Array:
    """x − presence·[c > 0] − frequency·c, c the token's count in the output (OpenAI). Off: both 0."""
    count_V = count_V.astype(jnp.float32)
    lowered_V = logits_V - jnp.where(count_V > 0, presence, 0.0) - frequency * count_V
    on = (jnp.asarray(presence) != 0) | (jnp.asarray(frequency) != 0)
    return jnp.where(on & (count_V > 0), bounded(lowered_V, logits_V), logits_V)


def logit_bias(logits_V: Array, bias_V: Array) -> Array:
    """x + bias; a bias of -inf bans. Off: 0, token by token."""
    banned_V = bias_V == -jnp.inf
    moved_V = jnp.where((bias_V == 0) | banned_V, logits_V, bounded(logits_V + bias_V, logits_V))
    return keep_only(moved_V, ~banned_V)


def allowed_tokens(logits_V: Array, ids_S: Array) -> Array:
    """Removes all tokens but `ids_S`; ids outside the vocabulary stand for nothing."""
    V = logits_V.shape[0]
    return keep_only(logits_V, jnp.zeros(V, bool).at[jnp.where(ids_S < 0, V, ids_S)].set(True, mode="drop"))


def repeat_lengths(history_S: Array, length: Array | int, longest: Array | int, stop_S: Array | None = None) -> Array:
    """For every place j of the history: how many tokens just before j equal the last tokens of the history, at most `longest`.

    Args:
      stop_S: places that end a match, and are no part of it (breakers).
    """
    S = history_S.shape[0]
    place_S = jnp.arange(S)
    stop_S = jnp.zeros(S, bool) if stop_S is None else stop_S

    def extend(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        run_S, going_S = carry
        tail = jnp.asarray(length) - 1 - i
        same_S = jnp.roll(history_S, 1 + i) == history_S[tail]
        going_S &= same_S & (place_S - 1 - i >= 0) & (tail >= 0) & ~stop_S[tail]
        return run_S + going_S, going_S

    start = jnp.zeros(S, jnp.int32), place_S < length
    return lax.fori_loop(0, longest, extend, start)[0]


def no_repeat_ngram(logits_V: Array, history_S: Array, length: Array | int, n: Array | int) -> Array:
    """Bans every token that would repeat an n-gram of the history (Paulus et al. 2018). Off: n ≤ 0."""
    n = jnp.asarray(n)
    repeats_S = (repeat_lengths(history_S, length, n - 1) >= n - 1) & (jnp.arange(history_S.shape[0]) < length) & (n > 0)
    return jnp.where(n <= 0, logits_V, ban(logits_V, jnp.where(repeats_S, history_S, -1)))


def dry(
    logits_V: Array,
    history_S: Array,
    length: Array | int,
    multiplier: Array | float,
    base: Array | float,
    allowed_length: Array | int,
    window: Array | int = 0,
    breakers_K: Array | None = None,
) -> Array:
    """x − m·b^(L−A) for a token that would lengthen a repeated suffix of length L ≥ A (p-e-w 2024). Off: multiplier = 0.

    Args:
      window: only this many last tokens of the history count; 0: all.
      breakers_K: ids that no match may contain, the token that would lengthen it included.
    """
    S, V = history_S.shape[0], logits_V.shape[0]
    length = jnp.asarray(length)
    used = jnp.where(jnp.asarray(window) > 0, jnp.minimum(window, length), length)
    recent_S = jnp.roll(history_S, used - length)  # the window moves to the front
    stop_S = jnp.zeros(S, bool) if breakers_K is None else (recent_S[:, None] == breakers_K).any(1)
    run_S = repeat_lengths(recent_S, used, LONGEST_REPEAT, stop_S)
    ids_S = jnp.where((jnp.arange(S) < used) & ~stop_S, recent_S, V)
    longest_V = jnp.zeros(V, jnp.int32).at[ids_S].max(run_S, mode="drop")
    penalty_V = multiplier * jnp.asarray(base, jnp.float32) ** (longest_V - allowed_length)
    hit_V = (longest_V >= allowed_length) & (longest_V > 0) & (jnp.asarray(multiplier) != 0)
    return jnp.where(hit_V, bounded(logits_V - penalty_V, logits_V), logits_V)


def bad_word_ids(sequences: Sequence[Sequence[int]], history: Sequence[int]) -> list[int]:
    """The tokens that would complete a banned sequence after `history` (a sequence of one token: always)."""
    past = list(history)
    return [words[-1] for words in map(list, sequences) if words and (len(words) == 1 or past[1 - len(words) :] == words[:-1])]

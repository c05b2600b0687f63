"""The steps that scale a row of logits or cut it down: pure functions `f(logits_V, numbers…) -> logits_V`, float32.

A removed token is -inf, a kept logit comes back bit for bit. A mask never empties a row: the first token in canonical order
(logit descending, ties by ascending id) survives. A disabled number returns the row unchanged by an explicit branch.
Meanings and the choices between implementations: docs/sampling.md.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from dantinox.sampling.search import crossing_key, first_in_order, nth_true, ordered_keys

Ties = Literal["first", "all"]
Rule = Literal["inclusive", "exclusive"]
GREEDY_BELOW = 1e-5
LARGEST = float(jnp.finfo(jnp.float32).max)


def sanitise(logits_V: Array) -> tuple[Array, Array]:
    """float32 logits without NaN or +inf, and whether the row had any.

    NaN counts as removed. Where +inf appears, its tokens become 0 and all others are removed.
    """
    x_V = logits_V.astype(jnp.float32)
    x_V = jnp.where(jnp.isnan(x_V), -jnp.inf, x_V)
    infinite_V = x_V == jnp.inf
    some = infinite_V.any()
    x_V = jnp.where(some, jnp.where(infinite_V, 0.0, -jnp.inf), x_V)
    return x_V, some | jnp.isnan(logits_V).any()


def keep_only(logits_V: Array, keep_V: Array) -> Array:
    """Removes what is not kept; when nothing would be left, the first token in canonical order stays."""
    keep_V = keep_V & (logits_V > -jnp.inf)
    first_V = jnp.arange(logits_V.shape[0]) == first_in_order(logits_V)
    return jnp.where(keep_V | (first_V & ~keep_V.any()), logits_V, -jnp.inf)


def bounded(changed_V: Array, logits_V: Array) -> Array:
    """Changed logits within the finite floats, so that an extreme number neither removes a token nor makes a NaN."""
    return jnp.where(logits_V == -jnp.inf, -jnp.inf, jnp.clip(changed_V, -LARGEST, LARGEST))


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


def temperature(logits_V: Array, t: Array | float) -> Array:
    """x / t. Off: t = 1. Below 1e-5 only the most likely token is left."""
    t = jnp.asarray(t, jnp.float32)
    scaled_V = bounded(logits_V / jnp.maximum(t, GREEDY_BELOW), logits_V)
    changed_V = jnp.where(t < GREEDY_BELOW, keep_only(logits_V, jnp.zeros(logits_V.shape, bool)), scaled_V)
    return jnp.where(t == 1, logits_V, changed_V)


def top_k(logits_V: Array, k: Array | int, ties: Ties = "first") -> Array:
    """Keeps the first k tokens in canonical order (Fan et al. 2018). Off: k ≤ 0 or k ≥ V.

    Args:
      ties: `first` keeps exactly k; `all` keeps every token equal to the last kept one.
    """
    k = jnp.asarray(k, jnp.int32)
    keys_V = ordered_keys(logits_V)
    # Counted in float32, exact up to 2²⁴ tokens: XLA adds integers four times slower on a CPU.
    edge = crossing_key(keys_V, jnp.ones(keys_V.shape, jnp.float32), lambda count: count >= k)
    room = k - jnp.sum(keys_V > edge)
    keep_V = _above_and_at(keys_V, edge, room, ties)
    return jnp.where((k <= 0) | (k >= logits_V.shape[0]), logits_V, keep_only(logits_V, keep_V))


def top_p(logits_V: Array, p: Array | float, rule: Rule = "inclusive", ties: Ties = "first") -> Array:
    """Keeps the smallest head of the canonical order with mass p (Holtzman et al. 2020). Off: p ≥ 1. p = 0 keeps the first.

    Args:
      rule: `inclusive` keeps a token while the mass strictly before it is below p, so the token that crosses p stays;
        `exclusive` keeps it while the mass up to and including it is at most p. The first token always stays.
      ties: `all` keeps every token equal to the last kept one as well.
    """
    p = jnp.asarray(p, jnp.float32)
    keys_V = ordered_keys(logits_V)
    weights_V = jnp.exp(logits_V - finite_max(logits_V))
    keep_V = nucleus(keys_V, weights_V, p, rule, ties)
    return jnp.where(p >= 1, logits_V, keep_only(logits_V, keep_V))


def nucleus(keys_V: Array, weights_V: Array, p: Array, rule: Rule = "inclusive", ties: Ties = "first") -> Array:
    """The mask of the head with mass p when tokens come in descending order of `keys_V` (equal keys have equal weights).

    Among equals at the edge the j-th is kept by the mass `above + j·weight`, compared with p times the total.
    """
    target = p * jnp.sum(weights_V)
    below = jnp.less if rule == "inclusive" else jnp.less_equal
    edge = crossing_key(keys_V, weights_V, lambda mass: ~below(mass, target))
    above = jnp.sum(jnp.where(keys_V > edge, weights_V, 0))
    weight = jnp.max(jnp.where(keys_V == edge, weights_V, 0))
    # The quotient may round across an integer: the products next to it decide.
    guess = jnp.floor((target - above) / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))
    base = jnp.clip(guess, 1, 2.0**30).astype(jnp.int32) - 1
    counted = base + jnp.arange(4) + (rule == "exclusive")
    room = base + jnp.sum(below(above + counted * weight, target))
    return _above_and_at(keys_V, edge, room, ties)


def min_p(logits_V: Array, p: Array | float) -> Array:
    """Keeps x ≥ max x + ln p: tokens at least p times as likely as the first (Nguyen et al. 2024). Off: p = 0."""
    p = jnp.asarray(p, jnp.float32)
    keep_V = logits_V >= finite_max(logits_V) + jnp.log(p)
    return jnp.where(p <= 0, logits_V, keep_only(logits_V, keep_V))


def finite_max(logits_V: Array) -> Array:
    """The largest logit, or 0 in a row without tokens (where -inf - -inf would be NaN)."""
    largest = jnp.max(logits_V)
    return jnp.where(largest == -jnp.inf, 0.0, largest)


def _above_and_at(keys_V: Array, edge: Array, room: Array, ties: Ties) -> Array:
    """Keys above the edge, and of those at the edge the first `room` by id, or all of them when one fits."""
    at_V = keys_V == edge
    if ties == "all":
        # With nothing above or at the edge kept, the first token survives, and with it everything equal to it.
        first_V = (keys_V == jnp.max(keys_V)) & ~((keys_V > edge).any() | (room > 0))
        return (keys_V > edge) | (at_V & (room > 0)) | first_V
    return (keys_V > edge) | (at_V & (jnp.arange(keys_V.shape[0]) <= nth_true(at_V, room)))

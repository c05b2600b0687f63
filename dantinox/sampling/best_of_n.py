"""Best of n: draws n candidates and takes the one with the highest score.

The guide scores a candidate by ln p under the model plus a confidence made of the step's metrics. That confidence is the same
for all candidates of a row, whatever its weights, so what is taken is the likeliest of n draws, and its distribution has a
closed form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dantinox.config import UserError
from dantinox.sampling.draw import inverse_cdf_token
from dantinox.sampling.entropy_router import TINY, Metrics, RouterConfig
from dantinox.sampling.params import ScoreFn
from dantinox.sampling.selection import top_k_by_id
from dantinox.sampling.steps import Number, finite_max, log_mass
from dantinox.sampling.window import WINDOW

GUIDE_CONFIG = RouterConfig()


class Candidates(NamedTuple):
    """The token taken, and the draws it was taken from: ids, ln p under the model, scores (-inf behind the n-th), [N] each."""

    token: Array
    ids: Array
    logprobs: Array
    scores: Array


def best_of_n(logits_V: Array, raw_V: Array, n: Number, weight: Number = 1.0) -> Array:
    """Log-probabilities of the likeliest of n draws, as `guide_score` finds it. Off: n ≤ 1, the row comes back as it is.

    With tokens ranked by their model logit and S_r the drawn mass at rank r or behind, P(rank r) = S_rⁿ − S_{r+1}ⁿ: all draws
    lie there, but not all behind. Tokens of equal logit are one rank and share its probability in proportion to their mass.

    Args:
      logits_V: what is drawn from, at most 256 tokens not removed; of more, those outside of the 256 likeliest are lost.
      raw_V: the model's logits, before any step.
      weight: of ln p in the score; 0: all are alike, below 0: the least likely is taken.
    """
    V = logits_V.shape[0]
    n = jnp.asarray(n, jnp.float32)
    if V <= WINDOW:
        best_V = _rank_logprobs(logits_V, weight * raw_V, n)
    else:
        x_K, ids_K = top_k_by_id(logits_V, WINDOW)
        best_V = jnp.full(V, -jnp.inf).at[ids_K].set(_rank_logprobs(x_K, weight * raw_V[ids_K], n), unique_indices=True)
    return jnp.where(n <= 1, logits_V, best_V)


def _rank_logprobs(x_K: Array, raw_K: Array, n: Array) -> Array:
    """The closed form over few tokens: each is compared with each, so nothing is sorted and ties need no care."""
    w_K = jnp.exp(x_K - finite_max(x_K))
    w_K = jnp.where(w_K < TINY, 0, w_K)
    behind_K = jnp.sum(jnp.where(raw_K < raw_K[:, None], w_K, 0), axis=1)
    equal_K = jnp.sum(jnp.where(raw_K == raw_K[:, None], w_K, 0), axis=1)
    S_K = behind_K + equal_K
    # S_rⁿ − S_{r+1}ⁿ = S_rⁿ (1 − (1 − equal / S_r)ⁿ) loses no digits and no small rank.
    alive_K = w_K > 0
    share_K = jnp.where(alive_K, equal_K / jnp.where(alive_K, S_K, 1), 0.5)
    rank_K = n * jnp.log(S_K / jnp.max(S_K)) + jnp.log(-jnp.expm1(n * jnp.log1p(-share_K)))
    return jnp.where(alive_K, rank_K + jnp.log(w_K / equal_K), -jnp.inf)


def confidence(metrics: Metrics, config: RouterConfig = GUIDE_CONFIG) -> Array:
    """The guide's confidence in a row; without attention its terms are dropped."""
    c, seen = config, metrics.attention
    score = (1 - jnp.asarray(metrics.entropy)) * c.score_entropy + (1 - metrics.varentropy) * c.score_varentropy
    if seen is None:
        return score
    attention = (1 - seen.attn_entropy) * c.score_attn_entropy + (1 - seen.attn_varentropy) * c.score_attn_varentropy
    return score + attention + seen.attn_agreement * c.score_agreement + seen.interaction_strength * c.score_interaction


def guide_score(ids_N: Array, logprobs_N: Array, metrics: Metrics, config: RouterConfig = GUIDE_CONFIG) -> Array:
    """The guide's score: ln p and the row's confidence, weighted. `best_of_n` has the distribution of the tokens it takes."""
    return config.score_logprob * logprobs_N + confidence(metrics, config)


def best_candidate(
    logits_V: Array,
    raw_V: Array,
    key: Array,
    metrics: Metrics,
    n: Number,
    score_fn: ScoreFn = guide_score,
    *,
    draws: int,
) -> Candidates:
    """Draws candidates, scores them and takes the best: the explicit form of `best_of_n`, for any score.

    Args:
      logits_V: what is drawn from.
      raw_V: the model's logits, before any step.
      n: how many of the draws count, 1 … `draws`.
      score_fn: traced into the program; a score that is NaN never wins over one that is a number.
      draws: how many tokens are drawn (static).

    Raises:
      UserError: there is not one score per candidate.
    """
    ids_N = jax.vmap(inverse_cdf_token, (None, 0))(logits_V, jax.random.uniform(key, (draws, 2)))
    logprobs_N = raw_V[ids_N] - log_mass(raw_V)
    scores_N = score_fn(ids_N, logprobs_N, metrics)
    if np.shape(scores_N) != ids_N.shape:
        raise UserError(f"score_fn must give a score per candidate, shape {ids_N.shape}, got shape {np.shape(scores_N)}")
    scores_N = jnp.where((jnp.arange(draws) < n) & ~jnp.isnan(scores_N), scores_N, -jnp.inf)
    return Candidates(ids_N[jnp.argmax(scores_N)], ids_N, logprobs_N, scores_N)


def candidates_given_token(
    token: Array,
    logits_V: Array,
    raw_V: Array,
    key: Array,
    metrics: Metrics,
    config: RouterConfig = GUIDE_CONFIG,
    *,
    draws: int,
) -> Candidates:
    """The draws that a token of `best_of_n` was the best of: together they have the distribution of `best_candidate`.

    With s the share of the token's rank among all that is no better, the first draw of that rank is number j with a chance in
    proportion to (1 − s)^(j−1). Those before it are worse tokens, those behind it any that are no better.

    Args:
      token: drawn from `best_of_n` with the numbers of `config`.
      key: for draws of their own.
      draws: as of `best_candidate`.
    """
    n, worth_V = config.candidates, config.score_logprob * raw_V
    place_key, own_key = jax.random.split(key)
    worse_V, equal_V, no_better_V = (
        jnp.where(chosen_V, logits_V, -jnp.inf)
        for chosen_V in (worth_V < worth_V[token], worth_V == worth_V[token], worth_V <= worth_V[token])
    )
    share = jnp.clip(jnp.exp(log_mass(equal_V) - log_mass(no_better_V)), TINY, 1)
    later_N = jnp.log1p(-share) * jnp.arange(1, draws + 1)  # ln of the chance that it comes later
    reached_N = jnp.expm1(later_N) / jnp.expm1(later_N[0] * n)
    at = jnp.minimum(jnp.sum(reached_N <= jax.random.uniform(place_key)), jnp.asarray(n, jnp.int32) - 1)
    uniforms_2N2 = jax.random.uniform(own_key, (2, draws, 2))
    before_N, behind_N = (
        jax.vmap(inverse_cdf_token, (None, 0))(x_V, u_N2)
        for x_V, u_N2 in zip((worse_V, no_better_V), uniforms_2N2, strict=True)
    )
    places_N = jnp.arange(draws)
    ids_N = jnp.where(places_N < at, before_N, jnp.where(places_N == at, token, behind_N))
    logprobs_N = raw_V[ids_N] - log_mass(raw_V)
    scores_N = guide_score(ids_N, logprobs_N, metrics, config)
    return Candidates(token, ids_N, logprobs_N, jnp.where(places_N < n, scores_N, -jnp.inf))

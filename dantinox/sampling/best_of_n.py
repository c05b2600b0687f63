"""Best of n: draws n candidates and returns the one with the highest score.

The entropix guide scores a candidate by its log-probability under the model plus a confidence that
depends on the metrics of the decoding step. All candidates of a row have the same confidence, so
the result is the most likely of n draws. Its distribution has a closed form.
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
    """The candidates of one row.

    Attributes:
      token: the chosen candidate.
      ids, logprobs, scores: token ids, ln p under the model, and scores of all draws, [N]; scores
        after the n-th are -inf.
    """

    token: Array
    ids: Array
    logprobs: Array
    scores: Array


def best_of_n(logits_V: Array, raw_V: Array, n: Number, weight: Number = 1.0) -> Array:
    """Returns the log-probabilities [V] of the token with the best `guide_score` among n draws.
    Off: n ≤ 1.

    Rank the tokens by score, the best at rank 1, and let S_r be the mass of rank r and all worse
    ranks. Then P(rank r) = S_rⁿ − S_{r+1}ⁿ: all draws have rank r or a worse one, but not all have
    a worse one. Tokens with equal scores share a rank. The probability of the rank is divided among
    them in proportion to their mass.

    Args:
      logits_V: the logits to draw from. If more than 256 tokens remain, only the 256 most likely
        are used.
      raw_V: the model's logits before any step.
      n: the number of draws.
      weight: the weight of ln p in the score. 0: all candidates tie. Negative: the least likely
        candidate wins.
    """
    V = logits_V.shape[0]
    n = jnp.asarray(n, jnp.float32)
    if V <= WINDOW:
        best_V = _rank_logprobs(logits_V, weight * raw_V, n)
    else:
        x_K, ids_K = top_k_by_id(logits_V, WINDOW)
        best_V = (
            jnp.full(V, -jnp.inf)
            .at[ids_K]
            .set(_rank_logprobs(x_K, weight * raw_V[ids_K], n), unique_indices=True)
        )
    return jnp.where(n <= 1, logits_V, best_V)


def _rank_logprobs(x_K: Array, raw_K: Array, n: Array) -> Array:
    """Computes the closed form of `best_of_n` for K tokens. It compares all pairs, so it needs no
    sort and handles ties.
    """
    w_K = jnp.exp(x_K - finite_max(x_K))
    w_K = jnp.where(w_K < TINY, 0, w_K)
    lower_K = jnp.sum(jnp.where(raw_K < raw_K[:, None], w_K, 0), axis=1)
    equal_K = jnp.sum(jnp.where(raw_K == raw_K[:, None], w_K, 0), axis=1)
    S_K = lower_K + equal_K
    # S_rⁿ − S_{r+1}ⁿ = S_rⁿ (1 − (1 − equal / S_r)ⁿ) avoids cancellation, also for ranks of small
    # mass.
    alive_K = w_K > 0
    share_K = jnp.where(alive_K, equal_K / jnp.where(alive_K, S_K, 1), 0.5)
    rank_K = n * jnp.log(S_K / jnp.max(S_K)) + jnp.log(-jnp.expm1(n * jnp.log1p(-share_K)))
    return jnp.where(alive_K, rank_K + jnp.log(w_K / equal_K), -jnp.inf)


def confidence(metrics: Metrics, config: RouterConfig = GUIDE_CONFIG) -> Array:
    """Returns the guide's confidence in a row. Without attention metrics the attention terms are
    omitted.
    """
    c = config
    attn = metrics.attention
    score = (1 - jnp.asarray(metrics.entropy)) * c.score_entropy + (
        1 - metrics.varentropy
    ) * c.score_varentropy
    if attn is None:
        return score
    attention = (1 - attn.attn_entropy) * c.score_attn_entropy + (
        1 - attn.attn_varentropy
    ) * c.score_attn_varentropy
    return (
        score
        + attention
        + attn.attn_agreement * c.score_agreement
        + attn.interaction_strength * c.score_interaction
    )


def guide_score(
    ids_N: Array, logprobs_N: Array, metrics: Metrics, config: RouterConfig = GUIDE_CONFIG
) -> Array:
    """Returns the guide's score [N]: the weighted ln p of each candidate plus the confidence of the
    row.

    `best_of_n` is the distribution of the candidate with the highest score.
    """
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
    """Draws candidates, scores them and chooses the best: the explicit form of `best_of_n`, for any
    score.

    Args:
      logits_V: the logits to draw from.
      raw_V: the model's logits before any step.
      key: the random key of the row.
      metrics: the metrics of the row, passed to `score_fn`.
      n: the number of draws that count, in [1, `draws`].
      score_fn: traced into the program; a NaN score never wins against a number.
      draws: the number of tokens to draw (static).

    Raises:
      UserError: `score_fn` does not return one score per candidate.
    """
    ids_N = jax.vmap(inverse_cdf_token, (None, 0))(logits_V, jax.random.uniform(key, (draws, 2)))
    logprobs_N = raw_V[ids_N] - log_mass(raw_V)
    scores_N = score_fn(ids_N, logprobs_N, metrics)
    if np.shape(scores_N) != ids_N.shape:
        raise UserError(
            f"score_fn must return one score per candidate, shape {ids_N.shape}, got shape"
            f" {np.shape(scores_N)}"
        )
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
    """Draws candidates of which a given token from `best_of_n` is the best.

    The joint distribution of token and candidates is that of `best_candidate`. Ranks are as in
    `best_of_n`. Let s be the mass of the token's rank divided by the mass of this and all worse
    ranks. The probability that the j-th draw is the first of that rank is proportional to (1 −
    s)^(j−1). Earlier draws have a worse rank; later draws have this rank or a worse one.

    Args:
      token: a token drawn from `best_of_n` with n = `config.candidates` and weight =
        `config.score_logprob`.
      logits_V, raw_V, metrics: as in `best_candidate`.
      key: a random key that no other draw of the row uses.
      config: the router numbers of the row.
      draws: the number of tokens to draw (static).
    """
    n = config.candidates
    weighted_V = config.score_logprob * raw_V
    position_key, draws_key = jax.random.split(key)
    is_worse_V = weighted_V < weighted_V[token]
    is_equal_V = weighted_V == weighted_V[token]
    is_no_better_V = weighted_V <= weighted_V[token]
    worse_V = jnp.where(is_worse_V, logits_V, -jnp.inf)
    equal_V = jnp.where(is_equal_V, logits_V, -jnp.inf)
    no_better_V = jnp.where(is_no_better_V, logits_V, -jnp.inf)
    share = jnp.clip(jnp.exp(log_mass(equal_V) - log_mass(no_better_V)), TINY, 1)
    # The logarithm of the probability that the first draw of this rank comes after the j-th.
    later_N = jnp.log1p(-share) * jnp.arange(1, draws + 1)
    reached_N = jnp.expm1(later_N) / jnp.expm1(later_N[0] * n)
    winner_index = jnp.minimum(
        jnp.sum(reached_N <= jax.random.uniform(position_key)), jnp.asarray(n, jnp.int32) - 1
    )
    uniforms_2N2 = jax.random.uniform(draws_key, (2, draws, 2))
    before_N, after_N = (
        jax.vmap(inverse_cdf_token, (None, 0))(x_V, u_N2)
        for x_V, u_N2 in zip((worse_V, no_better_V), uniforms_2N2, strict=True)
    )
    index_N = jnp.arange(draws)
    ids_N = jnp.where(
        index_N < winner_index, before_N, jnp.where(index_N == winner_index, token, after_N)
    )
    logprobs_N = raw_V[ids_N] - log_mass(raw_V)
    scores_N = guide_score(ids_N, logprobs_N, metrics, config)
    return Candidates(token, ids_N, logprobs_N, jnp.where(index_N < n, scores_N, -jnp.inf))

"""`StepInfo`: the report on the token of a step, such as its log-probability, alternatives and
entropy.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from dantinox.sampling.best_of_n import Candidates
from dantinox.sampling.entropy_router import AttentionMetrics, Route, logit_metrics
from dantinox.sampling.selection import row_sum
from dantinox.sampling.steps import finite_max


class RouterReport(NamedTuple):
    """The decision of the entropy router for one token; arrays [B].

    Attributes:
      attention: the attention metrics, or None if the router does not use them.
      route: the strategy, and the temperature, top-p, top-k and min-p to draw with.
      forced: whether the clarify token, or a token of the clarify text, was emitted instead of a
        drawn token.
      candidates: the candidates in rows with the strategy `adaptive`; None if they are neither
        scored nor reported. Token ids, ln p under the model, and scores have shape [B, N]. The id
        −1 marks an unused entry.
    """

    attention: AttentionMetrics | None
    route: Route
    forced: Array
    candidates: Candidates | None = None


class StepInfo(NamedTuple):
    """The report of one decoding step: arrays [B], or [B, steps] for several steps.

    Attributes:
      logprob: ln p of the token under the model, before any sampling step.
      logprob_sampled: ln p under the distribution from which the token was drawn; 0 in a greedy
        row.
      rank: number of tokens that are more likely under the model, or equally likely with a lower
        id.
      survivors: number of tokens that no sampling step removed; 1 in a greedy row.
      entropy, varentropy: of the model's distribution, in bits and bits².
      top_ids, top_logprobs: [B, k] or [B, steps, k], the most likely tokens of the model, best
        first.
      top_logprobs_sampled: ln p of the same tokens under the distribution from which the token was
        drawn; -inf if removed.
      routed: the decision of the router; None without a router.
    """

    logprob: Array
    logprob_sampled: Array
    rank: Array
    survivors: Array
    entropy: Array
    varentropy: Array
    top_ids: Array
    top_logprobs: Array
    top_logprobs_sampled: Array
    routed: RouterReport | None


def step_info(count: int, raw_V: Array, final_V: Array, token: Array, greedy: Array) -> StepInfo:
    """Returns the report of one row, with `routed` set to None.

    Args:
      count: the number of alternatives (static).
      raw_V: logits of the model.
      final_V: logits after all sampling steps.
      token: the chosen token.
      greedy: whether the row is greedy.
    """
    entropy, varentropy = logit_metrics(raw_V)
    ids_V = jnp.arange(raw_V.shape[0])
    likelier_V = (raw_V > raw_V[token]) | ((raw_V == raw_V[token]) & (ids_V < token))
    # Without the barrier XLA fuses the next operations into the selection, which then becomes a
    # full sort.
    top_x, top_ids = lax.optimization_barrier(lax.top_k(raw_V, count))
    sampled = jnp.where(top_ids == token, 0.0, -jnp.inf)
    return StepInfo(
        logprob=_logprobs(raw_V, raw_V[token]),
        logprob_sampled=jnp.where(greedy, 0.0, _logprobs(final_V, final_V[token])),
        rank=jnp.sum(likelier_V, dtype=jnp.int32),
        survivors=jnp.where(greedy, 1, jnp.sum(final_V > -jnp.inf, dtype=jnp.int32)),
        entropy=entropy,
        varentropy=varentropy,
        top_ids=top_ids,
        top_logprobs=_logprobs(raw_V, top_x),
        top_logprobs_sampled=jnp.where(greedy, sampled, _logprobs(final_V, final_V[top_ids])),
        routed=None,
    )


def _logprobs(logits_V: Array, selected_N: Array) -> Array:
    """Returns the log-softmax at the selected logits; -inf if every logit of the row is -inf."""
    largest = finite_max(logits_V)
    mass = row_sum(jnp.exp(logits_V - largest))
    return jnp.where(mass > 0, selected_N - largest - jnp.log(mass), -jnp.inf)

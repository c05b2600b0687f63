"""`StepInfo`: what is reported about each token, such as log-probability, alternatives and entropy."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from dantinox.sampling.best_of_n import Candidates
from dantinox.sampling.entropy_router import AttentionMetrics, Route, logit_metrics
from dantinox.sampling.selection import row_sum
from dantinox.sampling.steps import finite_max


class RouterReport(NamedTuple):
    """What the entropy router made of one token, an array [B] per field.

    Attributes:
      attention: the metrics it read, None where it reads none.
      forced: the clarify token was emitted, and nothing was drawn.
      candidates: where they are drawn for a score function or to be seen, those of an adaptive row: ids, ln p under the model
        and scores, [B, N] each; an id of −1 is none.
    """

    attention: AttentionMetrics | None
    route: Route
    forced: Array
    candidates: Candidates | None = None


class StepInfo(NamedTuple):
    """What one decoding step reports, an array per field: [B], or [B, steps] where several steps stand together.

    Attributes:
      logprob: ln p under the model, before any step.
      logprob_sampled: ln p under the distribution it was drawn from; 0 in a greedy row.
      rank: tokens that the model finds likelier, or as likely with a lower id.
      survivors: tokens left to draw from; 1 in a greedy row.
      entropy, varentropy: of the model's distribution, bits and bits².
      top_ids, top_logprobs: [B, k] and [B, steps, k], the most likely tokens of the model, best first.
      top_logprobs_sampled: like them, ln p of these under the distribution drawn from; -inf for a removed one.
      routed: what the router did, None without one.
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
    """The report of one row, with `count` alternatives (static); the router's part is left to the caller."""
    entropy, varentropy = logit_metrics(raw_V)
    ids_V = jnp.arange(raw_V.shape[0])
    likelier_V = (raw_V > raw_V[token]) | ((raw_V == raw_V[token]) & (ids_V < token))
    # The barrier keeps XLA from merging what follows into the selection, which would become a full sort.
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


def _logprobs(logits_V: Array, some: Array) -> Array:
    """ln softmax of some of the logits; -inf in an empty row."""
    largest = finite_max(logits_V)
    mass = row_sum(jnp.exp(logits_V - largest))
    return jnp.where(mass > 0, some - largest - jnp.log(mass), -jnp.inf)

"""Logits in, a token out: the plan's steps in order, the greedy choice, the draw, and what is reported about it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.sampling import history, steps
from dantinox.sampling.draw import draw, row_key
from dantinox.sampling.params import BEFORE_GREEDY, SamplerState, SamplingParams, update
from dantinox.sampling.search import first_in_order
from dantinox.sampling.steps import GREEDY_BELOW


class SampleInfo(NamedTuple):
    """What one draw reports, an array [B] per field; the log-probabilities are None unless they are asked for.

    Attributes:
      repaired: the logits held NaN or +inf.
      empty: no token was left to choose from; the token is then 0.
      logprob: ln p of the token under the model, before any step.
      logprob_sampled: ln p of the token under the distribution it was drawn from; 0 in a greedy row.
    """

    repaired: Array
    empty: Array
    logprob: Array | None
    logprob_sampled: Array | None


def sample(
    logits_BV: Array, params: SamplingParams, state: SamplerState, active_B: Array | None = None, *, report: bool = False
) -> tuple[Array, SamplerState, SampleInfo]:
    """Chooses the next token of every row; a row's token does not depend on the other rows or on its place.

    Args:
      logits_BV: logits of the last position, any float type; all arithmetic is float32.
      active_B: rows whose state moves on; None: all. The token of another row means nothing.
      report: also compute the log-probabilities (static).

    Returns:
      The token ids [B] int32, the new state and a `SampleInfo`.
    """
    token_B, info = jax.vmap(lambda *row: _sample_row(*row, report=report))(logits_BV, params, state)
    return token_B, update(state, token_B, active_B), info


def _sample_row(logits_V: Array, row: SamplingParams, state: SamplerState, *, report: bool) -> tuple[Array, SampleInfo]:
    """`sample` for one row: the arrays of `row` and `state` come without their batch axis."""
    raw_V, repaired = steps.sanitise(logits_V)
    edited_V = raw_V
    for name in row.plan:
        if name in BEFORE_GREEDY:
            edited_V = _run(name, edited_V, row, state)
    token = first_in_order(edited_V).astype(jnp.int32)
    greedy = row.temperature < GREEDY_BELOW
    final_V = edited_V
    if row.draws:
        for name in row.plan:
            if name not in BEFORE_GREEDY:
                final_V = _run(name, final_V, row, state)
        drawn = draw(final_V, row_key(row.seed, row.sample_index, state.n_generated))
        token = jnp.where(greedy, token, drawn)
    empty = jnp.max(raw_V) == -jnp.inf
    token = jnp.where(empty, 0, token)
    if not report:
        return token, SampleInfo(repaired, empty, None, None)
    sampled = jnp.where(greedy, 0.0, _logprob(final_V, token)) if row.draws else jnp.float32(0)
    return token, SampleInfo(repaired, empty, _logprob(raw_V, token), sampled)


def _run(name: str, logits_V: Array, row: SamplingParams, state: SamplerState) -> Array:
    """One step of the plan with the numbers of its row."""
    match name:
        case "min_tokens":
            return history.min_tokens(logits_V, row.min_tokens, row.stop_ids, state.n_generated)
        case "repetition_penalty":
            assert state.last_seen is not None and state.length is not None  # init_state made them for this plan
            distance_V = jnp.where(state.last_seen < 0, -1, state.length - 1 - state.last_seen)
            return history.repetition_penalty(logits_V, distance_V, row.repetition_penalty)
        case "temperature":
            return steps.temperature(logits_V, row.temperature)
        case "top_k":
            return steps.top_k(logits_V, row.top_k)
        case "top_p":
            return steps.top_p(logits_V, row.top_p)
        case "min_p":
            return steps.min_p(logits_V, row.min_p)
    raise ValueError(f"no sampling step is called {name}")


def _logprob(logits_V: Array, token: Array) -> Array:
    """ln softmax(logits_V)[token]; -inf in an empty row."""
    shifted_V = logits_V - steps.finite_max(logits_V)
    mass = jnp.sum(jnp.exp(shifted_V))
    return jnp.where(mass > 0, shifted_V[token] - jnp.log(mass), -jnp.inf)

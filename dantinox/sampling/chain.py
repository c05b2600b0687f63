"""Logits in, a token out: the plan's steps in order, the greedy choice, the draw, and what is reported about it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.generation import EDITS, MIROSTAT, PENALTIES
from dantinox.sampling import history, steps
from dantinox.sampling.draw import draw, row_key
from dantinox.sampling.params import ARGUMENTS, SamplingParams
from dantinox.sampling.search import first_in_order
from dantinox.sampling.state import SamplerState, update
from dantinox.sampling.steps import GREEDY_BELOW
from dantinox.sampling.window import CLOSING, Context, run_cuts

READING = frozenset((*EDITS, *PENALTIES))
READ_REST = CLOSING - {"top_k", "min_p", "mirostat_v1"}
XTC_KEY = 1  # folded into the row's key for the step's own draw


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
    logits_BV: Array,
    params: SamplingParams,
    state: SamplerState,
    keys_B: Array | None = None,
    *,
    active_B: Array | None = None,
    report: bool = False,
) -> tuple[Array, SamplerState, SampleInfo]:
    """Chooses the next token of every row; a row's token does not depend on the other rows or on its place.

    Args:
      logits_BV: logits of the last position, any float type; all arithmetic is float32.
      keys_B: a random key per row; None: made from seed, sample index and the number of generated tokens.
      active_B: rows whose state moves on; None: all. The token of another row means nothing.
      report: also compute the log-probabilities (static).

    Returns:
      The token ids [B] int32, the new state and a `SampleInfo`.
    """
    rows_B = jnp.arange(params.batch)
    active_B = jnp.ones(params.batch, bool) if active_B is None else active_B
    keys_B = _keys(params, state) if keys_B is None and params.draws else keys_B
    context = Context(params, state, keys_B)
    raw_BV, repaired_B = jax.vmap(steps.sanitise)(logits_BV)
    leading, late, others = _split(params.plan)
    edited_BV, _ = _run(leading, raw_BV, context)
    final_BV, _ = _run(late, edited_BV, context)
    token_B = jax.vmap(first_in_order)(final_BV).astype(jnp.int32)
    greedy_B = params.temperature < GREEDY_BELOW
    log_mass_B = None
    if params.draws and keys_B is not None:
        final_BV, log_mass_B = _chain(others, edited_BV, context, active_B)
        token_B = jnp.where(greedy_B, token_B, jax.vmap(draw)(final_BV, keys_B))
    surprise_B = None if log_mass_B is None else (log_mass_B - final_BV[rows_B, token_B]) / jnp.log(2.0)
    empty_B = jnp.max(raw_BV, axis=1) == -jnp.inf
    token_B = jnp.where(empty_B, 0, token_B)
    logprob_B = sampled_B = None
    if report:
        logprob_B = jax.vmap(_logprob)(raw_BV, token_B)
        sampled_B = jnp.where(greedy_B, 0.0, jax.vmap(_logprob)(final_BV, token_B))
    new_state = update(params, state, token_B, active_B, surprise_B)
    return token_B, new_state, SampleInfo(repaired_B, empty_B, logprob_B, sampled_B)


def trace(logits_BV: Array, params: SamplingParams, state: SamplerState) -> list[tuple[str, Array]]:
    """The logits [B, V] after every step: first `model`, as they came and repaired, then the plan's steps in their order."""
    context = Context(params, state, _keys(params, state))
    told = [("model", jax.vmap(steps.sanitise)(logits_BV)[0])]
    for name in params.plan:
        told.append((name, _run([name], told[-1][1], context)[0]))
    return told


def _keys(params: SamplingParams, state: SamplerState) -> Array:
    return jax.vmap(row_key)(params.seed, params.sample_index, state.n_generated)


def _split(plan: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Edits and penalties that come first; penalties that come later; everything behind the first ones, in order."""
    first = next((i for i, name in enumerate(plan) if name not in READING), len(plan))
    others = list(plan[first:])
    return list(plan[:first]), [name for name in others if name in PENALTIES], others


def _chain(names: Sequence[str], logits_BV: Array, context: Context, active_B: Array) -> tuple[Array, Array | None]:
    """Runs steps over rows, from the first cut on in the rows' windows where that is exact."""
    first = next((i for i, name in enumerate(names) if name in CLOSING), len(names))
    logits_BV, log_mass_B = _run(names[:first], logits_BV, context)
    if first == len(names):
        return logits_BV, log_mass_B
    return run_cuts(_run, names[first:], logits_BV, context, active_B)


def _run(names: Sequence[str], x_BN: Array, context: Context) -> tuple[Array, Array | None]:
    """Runs steps over rows or their windows; also ln Σe^x before the cut of mirostat, where the names hold it."""
    log_mass_B = None
    for name in names:
        if name in MIROSTAT:
            mass_B = jax.vmap(steps.log_mass)(x_BN, *([] if context.window is None else [context.window.rest]))
            log_mass_B = mass_B if log_mass_B is None else jnp.where(context.params.on[name], mass_B, log_mass_B)
        step = partial(_step, name)
        if name == "tail_free" and context.window is None:  # row by row, so that only rows that have it on pay for the sort
            x_BN = lax.map(partial(_if_on, name), (x_BN, context))
        else:
            x_BN = jax.vmap(step)(x_BN, context)
    return x_BN, log_mass_B


def _if_on(name: str, row: tuple[Array, Context]) -> Array:
    return lax.cond(row[1].params.on[name], partial(_step, name), lambda x_N, _: x_N, *row)


def _step(name: str, x_N: Array, row: Context) -> Array:
    """One step of the plan with the numbers of its row."""
    numbers = [row.params.numbers[setting] for setting in ARGUMENTS.get(name, ())]
    changed_N = _reading(name, x_N, numbers, row) if name in READING else _plain(name, x_N, numbers, row)
    return jnp.where(row.params.on[name], changed_N, x_N)


def _plain(name: str, x_N: Array, numbers: list[Any], row: Context) -> Array:
    """A step that reads nothing but logits."""
    window, more = row.window, dict[str, Any]()
    if name in ("top_k", "top_p", "typical"):
        more["ties"] = row.params.ties
    if name == "top_p":
        more["rule"] = row.params.rule
    if name in ("tail_free", "mirostat_v1"):
        more["size"] = x_N.shape[0] if window is None else window.vocab_size
    if name in READ_REST and window is not None:
        more["rest"] = window.rest
    if name in MIROSTAT:
        numbers = [row.state.mu]
    if name == "xtc":
        ids_N = jnp.arange(x_N.shape[0]) if window is None else window.ids
        more["protected_V"] = (ids_N[:, None] == row.params.tables["protected_ids"]).any(axis=1)
        more["u"] = jax.random.uniform(jax.random.fold_in(row.keys, XTC_KEY))
    step: Callable[..., Array] = getattr(steps, name)
    return step(x_N, *numbers, **more)


def _reading(name: str, x_N: Array, numbers: list[Any], row: Context) -> Array:
    """A step that reads the past or a list of tokens. Only the penalties may stand behind a cut, so in a window."""
    window, tables, past = row.window, row.params.tables, cast(Any, row.state)
    V = x_N.shape[0] if window is None else window.vocab_size

    def of_tokens(values_V: Array) -> Array:
        return values_V if window is None else values_V[window.ids]

    match name:
        case "no_repeat_ngram":
            return history.no_repeat_ngram(x_N, past.text, past.length, past.repeats, *numbers)
        case "logit_bias":
            ids_K = jnp.where(tables["logit_bias"] < 0, V, tables["logit_bias"])
            return history.logit_bias(x_N, jnp.zeros(V).at[ids_K].add(tables["bias"], mode="drop"))
        case "allowed_tokens":
            return history.allowed_tokens(x_N, tables["allowed_tokens"])
        case "banned_tokens":
            return history.ban(x_N, tables["banned_tokens"])
        case "bad_words":
            return history.bad_words(x_N, past.text, past.length, tables["prefixes"], tables["last_words"])
        case "min_tokens":
            return history.min_tokens(x_N, numbers[0], tables["stop_ids"], past.n_generated)
        case "repetition_penalty":
            seen_N = of_tokens(past.last_seen)
            return history.repetition_penalty(x_N, jnp.where(seen_N < 0, -1, past.length - 1 - seen_N), *numbers)
        case "presence_frequency_penalty":
            return history.presence_frequency_penalty(x_N, of_tokens(past.count), *numbers)
        case "dry":
            *scale, reach = numbers
            repeated_V = history.longest_repeats(past.text, past.length, past.repeats, past.breaker, reach, V)
            return history.dry(x_N, of_tokens(repeated_V), *scale)
    raise ValueError(f"no sampling step is called {name}")


def _logprob(logits_V: Array, token: Array) -> Array:
    """ln softmax(logits_V)[token]; -inf in an empty row."""
    shifted_V = logits_V - steps.finite_max(logits_V)
    mass = jnp.sum(jnp.exp(shifted_V))
    return jnp.where(mass > 0, shifted_V[token] - jnp.log(mass), -jnp.inf)

"""`SamplerState`: the arrays that sampling carries from token to token."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from dantinox.config.sampling_steps import STEPS
from dantinox.sampling.history import extend_repeat_lengths, repeat_lengths
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.steps import mirostat_update

# What a step reads → the fields that it is read from.
FIELDS_OF_INPUT = {
    "history_S": {"text"}, "run_S": {"text", "repeats"}, "repeated_V": {"text", "repeats", "breaker"},
    "distance_V": {"last_seen"}, "count_V": {"count"}, "mu": {"mu"},
}  # fmt: skip
_REPEAT_LENGTHS = jax.jit(jax.vmap(repeat_lengths))  # outside of a program its loop would be compiled for every text


def fields_read(plan: Iterable[str]) -> set[str]:
    """The fields of the state that these steps read."""
    return set().union(*(FIELDS_OF_INPUT.get(what, ()) for name in plan for what in STEPS[name].reads))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The past of every row, as far as some step of the plan asks for it; what none asks for is None.

    Attributes:
      n_generated: [B] int32, tokens generated so far.
      length: [B] int32, tokens in prompt and output.
      last_seen: [B, V] int32, the newest place of a token within the penalty's scope, −1 for never.
      count: [B, V] int32, how often a token occurs within the scope of presence and frequency penalty.
      text: [B, S] int32, prompt and output, `length` tokens of them.
      repeats: [B, S] int32, the `repeat_lengths` of the text.
      breaker: [B, S] bool, places whose token ends a repetition.
      mu: [B] float32, mirostat's bound in bits.
      clarified: [B] int32, the newest place of the router's clarify token, −1 for never.
    """

    n_generated: Array
    length: Array | None = None
    last_seen: Array | None = None
    count: Array | None = None
    text: Array | None = None
    repeats: Array | None = None
    breaker: Array | None = None
    mu: Array | None = None
    clarified: Array | None = None


def init_state(
    params: SamplingParams,
    prompt_tokens_BT: Array,
    prompt_valid_BT: Array,
    vocab_size: int,
    capacity: int | None = None,
) -> SamplerState:
    """The state after a prompt, of which the places with `prompt_valid_BT` count.

    Args:
      capacity: tokens of prompt and output together, at most; needed by steps that read the text (DRY, n-grams, bad words).
    """
    B, asked = params.batch, fields_read(params.plan)
    valid_BT = jnp.asarray(prompt_valid_BT, bool)
    place_BT = jnp.where(valid_BT, jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32) - 1, -1)
    ids_BT = jnp.where(valid_BT, prompt_tokens_BT, vocab_size)
    length_B, rows_B1 = valid_BT.sum(axis=1, dtype=jnp.int32), jnp.arange(B)[:, None]
    found: dict[str, Array] = {"n_generated": jnp.zeros(B, jnp.int32), "length": length_B}
    if "last_seen" in asked:
        seen_BT = jnp.where(params.tables["repetition_scope"], place_BT, -1)
        found["last_seen"] = jnp.full((B, vocab_size), -1, jnp.int32).at[rows_B1, ids_BT].max(seen_BT, mode="drop")
    if "count" in asked:
        one_BT = jnp.broadcast_to(params.tables["presence_scope"], ids_BT.shape).astype(jnp.int32)
        found["count"] = jnp.zeros((B, vocab_size), jnp.int32).at[rows_B1, ids_BT].add(one_BT, mode="drop")
    if "text" in asked:
        if capacity is None:
            readers = [name for name in params.plan if "text" in fields_read([name])]
            raise ValueError(f"steps that read the text need its capacity: {', '.join(readers)}")
        text = jnp.zeros((B, capacity), jnp.int32)
        found["text"] = text.at[rows_B1, jnp.where(valid_BT, place_BT, capacity)].set(prompt_tokens_BT, mode="drop")
        if "repeats" in asked:
            found["repeats"] = _REPEAT_LENGTHS(found["text"], length_B)
        if "breaker" in asked:
            found["breaker"] = jax.vmap(jnp.isin)(found["text"], params.tables["dry_breakers"])
    if "mu" in asked:
        found["mu"] = 2 * params.numbers["mirostat_tau"]
    if params.router is not None:
        clarifies_BT = ids_BT == jnp.asarray(params.router.clarify_token)[:, None]
        found["clarified"] = jnp.max(jnp.where(clarifies_BT, place_BT, -1), axis=1)
    return SamplerState(**found)


def update(
    params: SamplingParams,
    state: SamplerState,
    token_B: Array,
    active_B: Array | None = None,
    surprise_B: Array | None = None,
) -> SamplerState:
    """The state after each active row has taken its token; the other rows stay as they are.

    Args:
      surprise_B: −log2 P of the tokens before mirostat's cut, where the plan has mirostat.
    """
    active_B = jnp.ones(token_B.shape, bool) if active_B is None else active_B
    assert state.length is not None
    rows_B, place_B = jnp.arange(token_B.shape[0]), state.length
    new: dict[str, Array] = {"n_generated": state.n_generated + active_B, "length": place_B + active_B}
    if state.last_seen is not None:
        ids_B = jnp.where(active_B, token_B, state.last_seen.shape[1])
        new["last_seen"] = state.last_seen.at[rows_B, ids_B].set(place_B, mode="drop")
    if state.count is not None:
        ids_B = jnp.where(active_B, token_B, state.count.shape[1])
        new["count"] = state.count.at[rows_B, ids_B].add(1, mode="drop")
    if state.text is not None:
        end_B = jnp.where(active_B, place_B, state.text.shape[1])
        if state.repeats is not None:
            repeats = jax.vmap(extend_repeat_lengths)(state.repeats, state.text, place_B, token_B)
            new["repeats"] = jnp.where(active_B[:, None], repeats, state.repeats)
        if state.breaker is not None:
            breaks_B = (params.tables["dry_breakers"] == token_B[:, None]).any(axis=1)
            new["breaker"] = state.breaker.at[rows_B, end_B].set(breaks_B, mode="drop")
        new["text"] = state.text.at[rows_B, end_B].set(token_B, mode="drop")
    if state.mu is not None:
        assert surprise_B is not None
        mu = mirostat_update(state.mu, surprise_B, params.numbers["mirostat_tau"], params.numbers["mirostat_eta"])
        new["mu"] = jnp.where(active_B, mu, state.mu)
    if state.clarified is not None:
        assert params.router is not None
        new["clarified"] = jnp.where(active_B & (token_B == params.router.clarify_token), place_B, state.clarified)
    return replace(state, **new)

"""`SamplerState`: the arrays that sampling carries from one token to the next."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.sampling_steps import STEPS
from dantinox.sampling.clarify_text import NEVER
from dantinox.sampling.history import extend_repeat_lengths, repeat_lengths
from dantinox.sampling.logit_processor import TokenHistory
from dantinox.sampling.loops import MAX_LOOP_PERIOD, extend_loop_runs, loop_runs
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.steps import mirostat_update

# Maps an input of a step to the state fields from which it is computed.
FIELDS_OF_INPUT = {
    "history_S": {"text"}, "run_S": {"text", "repeats"},
    "repeated_V": {"text", "repeats", "breaker"}, "distance_V": {"last_seen"}, "count_V": {"count"},
    "prompt_V": {"in_prompt"}, "mu": {"mu"},
    "average": {"adaptive_sum", "adaptive_weight"},
}  # fmt: skip
# Fields that depend on how the earlier tokens were chosen, so that they cannot be computed from the
# tokens.
RECURRENT_FIELDS = ("mu", "adaptive_sum", "adaptive_weight", "since_clarify_text")
# Outside of jit, the loop would be compiled at every call.
_repeat_lengths_of_rows = jax.jit(jax.vmap(repeat_lengths))
_loop_runs_of_rows = jax.jit(jax.vmap(loop_runs))


def fields_read(plan: Iterable[str]) -> set[str]:
    """Returns the state fields that these steps read."""
    inputs = {name for step in plan for name in STEPS[step].reads}
    return {field for name in inputs for field in FIELDS_OF_INPUT.get(name, ())}


def recurrent_fields(params: SamplingParams) -> set[str]:
    """Returns the `RECURRENT_FIELDS` of rows with these parameters."""
    inserts = set() if params.clarify_text is None else {"since_clarify_text"}
    return (set(RECURRENT_FIELDS) & fields_read(params.plan)) | inserts


def token_histories(state: "SamplerState") -> TokenHistory:
    """Returns the tokens of every row, [B, …] each."""
    assert state.text is not None and state.length is not None
    return TokenHistory(state.text, state.length, state.n_generated)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """The history of every row. A field that nothing reads is None.

    Attributes:
      n_generated: [B] int32, number of generated tokens.
      length: [B] int32, number of tokens in prompt and output.
      last_seen: [B, V] int32, last position of each token in the scope of the repetition penalty;
        −1: it does not occur.
      count: [B, V] int32, count of each token in the scope of the presence and frequency penalties.
      in_prompt: [B, V] bool, the tokens that the prompt contains.
      text: [B, S] int32, prompt and output; the first `length` tokens are valid.
      repeats: [B, S] int32, the `repeat_lengths` of `text`.
      breaker: [B, S] bool, positions whose token ends a repetition.
      mu: [B] float32, the bound of mirostat in bits.
      adaptive_sum, adaptive_weight: [B] float32, the sum and the total weight of the probabilities
        of the drawn tokens, for adaptive-p; their quotient is the weighted average.
      loop_runs: [B, P] int32, for each period how many tokens at the end of the output repeat it,
        see `loops.loop_runs`.
      clarified: [B] int32, last position of the router's clarify token; −1: it does not occur.
      since_clarify_text: [B] int32, tokens since the beginning of the newest clarify text, with its
        own; `clarify_text.NEVER`: none was inserted.
    """

    n_generated: Array
    length: Array | None = None
    last_seen: Array | None = None
    count: Array | None = None
    in_prompt: Array | None = None
    text: Array | None = None
    repeats: Array | None = None
    breaker: Array | None = None
    mu: Array | None = None
    adaptive_sum: Array | None = None
    adaptive_weight: Array | None = None
    loop_runs: Array | None = None
    clarified: Array | None = None
    since_clarify_text: Array | None = None

    @property
    def recurrent(self) -> dict[str, Array]:
        """The `RECURRENT_FIELDS` that the plan reads, by name."""
        return {
            name: value for name in RECURRENT_FIELDS if (value := getattr(self, name)) is not None
        }


# Outside of another program, it would be dozens of small ones without `jit`; `inline` leaves no
# call inside of one.
@partial(jax.jit, static_argnames=("vocab_size", "capacity"), inline=True)
def init_state(
    params: SamplingParams,
    prompt_tokens_BT: Array,
    prompt_valid_BT: Array,
    vocab_size: int,
    capacity: int | None = None,
    *,
    generated_B: Array | None = None,
    recurrent: Mapping[str, Array] | None = None,
) -> SamplerState:
    """Returns the state after a prompt, or after a prompt and generated tokens.

    Args:
      params: the sampling parameters of the batch.
      prompt_tokens_BT: token ids of the prompts.
      prompt_valid_BT: bool, True for tokens and False for padding.
      vocab_size: V.
      capacity: maximum number of tokens in prompt and output, S. Steps that read the token history
        need it (DRY, n-grams, bad words, a logit processor).
      generated_B: how many of the last tokens were generated; None: none.
      recurrent: the `SamplerState.recurrent` after the last generated token; NaN, or None, stands
        for the initial value.

    Raises:
      ValueError: a step needs `capacity`.
    """
    B = params.batch
    fields = fields_read(params.plan)
    if params.logit_processor is not None or params.loops is not None:
        fields |= {"text"}
    valid_BT = jnp.asarray(prompt_valid_BT, bool)
    position_BT = jnp.where(valid_BT, jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32) - 1, -1)
    ids_BT = jnp.where(valid_BT, prompt_tokens_BT, vocab_size)
    length_B = valid_BT.sum(axis=1, dtype=jnp.int32)
    rows_B1 = jnp.arange(B)[:, None]
    has_output = generated_B is not None
    generated_B = jnp.zeros(B, jnp.int32) if generated_B is None else generated_B
    is_output_BT = position_BT >= (length_B - generated_B)[:, None]
    arrays: dict[str, Array] = {"n_generated": generated_B, "length": length_B}
    if "last_seen" in fields:
        seen_BT = jnp.where(params.tables["repetition_scope"] | is_output_BT, position_BT, -1)
        arrays["last_seen"] = (
            jnp.full((B, vocab_size), -1, jnp.int32).at[rows_B1, ids_BT].max(seen_BT, mode="drop")
        )
    if "count" in fields:
        one_BT = (params.tables["presence_scope"] | is_output_BT).astype(jnp.int32)
        arrays["count"] = (
            jnp.zeros((B, vocab_size), jnp.int32).at[rows_B1, ids_BT].add(one_BT, mode="drop")
        )
    if "in_prompt" in fields:
        prompt_BT = jnp.where(is_output_BT, vocab_size, ids_BT)
        arrays["in_prompt"] = (
            jnp.zeros((B, vocab_size), bool).at[rows_B1, prompt_BT].set(True, mode="drop")
        )
    if "text" in fields:
        if capacity is None:
            readers = ", ".join(_text_readers(params))
            raise ValueError(
                f"capacity must be set for the steps that read the token history: {readers}"
            )
        text = jnp.zeros((B, capacity), jnp.int32)
        arrays["text"] = text.at[rows_B1, jnp.where(valid_BT, position_BT, capacity)].set(
            prompt_tokens_BT, mode="drop"
        )
        if "repeats" in fields:
            arrays["repeats"] = _repeat_lengths_of_rows(arrays["text"], length_B)
        if "breaker" in fields:
            arrays["breaker"] = jax.vmap(jnp.isin)(arrays["text"], params.tables["dry_breakers"])
    if params.loops is not None:
        none_BP = jnp.zeros((B, MAX_LOOP_PERIOD), jnp.int32)
        arrays["loop_runs"] = none_BP
        if has_output:
            detects = (params.loops.max_period > 0).any()
            inputs = arrays["text"], length_B, generated_B
            arrays["loop_runs"] = lax.cond(detects, _loop_runs_of_rows, lambda *_: none_BP, *inputs)
    arrays |= _recurrent_arrays(params, fields, recurrent or {})
    if params.router is not None:
        clarifies_BT = ids_BT == jnp.asarray(params.router.clarify_token)[:, None]
        arrays["clarified"] = jnp.max(jnp.where(clarifies_BT, position_BT, -1), axis=1)
    return SamplerState(**arrays)


def _recurrent_arrays(
    params: SamplingParams, fields: set[str], recurrent: Mapping[str, Array]
) -> dict[str, Array]:
    """Returns the `RECURRENT_FIELDS` among `fields`: their initial values, or those of `recurrent`
    where these are numbers.
    """
    arrays: dict[str, Array] = {}
    if "mu" in fields:
        arrays["mu"] = 2 * params.numbers["mirostat_tau"]
    if "adaptive_sum" in fields:  # as after many tokens of probability `adaptive_target`
        arrays["adaptive_weight"] = 1 / (1 - params.numbers["adaptive_decay"])
        arrays["adaptive_sum"] = params.numbers["adaptive_target"] * arrays["adaptive_weight"]
    if params.clarify_text is not None:
        arrays["since_clarify_text"] = jnp.full(params.batch, NEVER, jnp.int32)
    for name, value in recurrent.items():
        arrays[name] = jnp.where(jnp.isnan(value), arrays[name], value.astype(arrays[name].dtype))
    return arrays


def _text_readers(params: SamplingParams) -> list[str]:
    """Returns the names of what reads the tokens of the text."""
    readers = [name for name in params.plan if "text" in fields_read([name])]
    readers += ["logit_processor"] if params.logit_processor is not None else []
    readers += ["loop detection"] if params.loops is not None else []
    return readers


def update(
    params: SamplingParams,
    state: SamplerState,
    token_B: Array,
    active_B: Array | None = None,
    surprise_B: Array | None = None,
    probability_B: Array | None = None,
    since_B: Array | None = None,
) -> SamplerState:
    """Returns the state after each active row appends its token. Other rows do not change.

    Args:
      token_B: the chosen tokens, int32.
      active_B: bool, the rows to update. None: all.
      surprise_B: −log2 P of the tokens before mirostat's truncation; required if the plan contains
        mirostat.
      probability_B: P of the tokens before adaptive-p; required if the plan contains adaptive-p.
      since_B: the new `since_clarify_text`; required if the router inserts texts.
    """
    active_B = jnp.ones(token_B.shape, bool) if active_B is None else active_B
    assert state.length is not None
    rows_B = jnp.arange(token_B.shape[0])
    position_B = state.length
    new: dict[str, Array] = {
        "n_generated": state.n_generated + active_B,
        "length": position_B + active_B,
    }
    if state.last_seen is not None:
        ids_B = jnp.where(active_B, token_B, state.last_seen.shape[1])
        new["last_seen"] = state.last_seen.at[rows_B, ids_B].set(position_B, mode="drop")
    if state.count is not None:
        ids_B = jnp.where(active_B, token_B, state.count.shape[1])
        new["count"] = state.count.at[rows_B, ids_B].add(1, mode="drop")
    if state.text is not None:
        end_B = jnp.where(active_B, position_B, state.text.shape[1])
        if state.repeats is not None:
            repeats = jax.vmap(extend_repeat_lengths)(
                state.repeats, state.text, position_B, token_B
            )
            new["repeats"] = jnp.where(active_B[:, None], repeats, state.repeats)
        if state.breaker is not None:
            breaks_B = (params.tables["dry_breakers"] == token_B[:, None]).any(axis=1)
            new["breaker"] = state.breaker.at[rows_B, end_B].set(breaks_B, mode="drop")
        new["text"] = state.text.at[rows_B, end_B].set(token_B, mode="drop")
    if state.loop_runs is not None and params.loops is not None:
        new["loop_runs"] = _next_loop_runs(params, state, token_B, active_B)
    if state.mu is not None:
        assert surprise_B is not None
        mu = mirostat_update(
            state.mu, surprise_B, params.numbers["mirostat_tau"], params.numbers["mirostat_eta"]
        )
        new["mu"] = jnp.where(active_B, mu, state.mu)
    if state.adaptive_sum is not None and state.adaptive_weight is not None:
        assert probability_B is not None
        decay_B = params.numbers["adaptive_decay"]
        new["adaptive_sum"] = jnp.where(
            active_B, probability_B + decay_B * state.adaptive_sum, state.adaptive_sum
        )
        new["adaptive_weight"] = jnp.where(
            active_B, 1 + decay_B * state.adaptive_weight, state.adaptive_weight
        )
    if state.clarified is not None:
        assert params.router is not None
        new["clarified"] = jnp.where(
            active_B & (token_B == params.router.clarify_token), position_B, state.clarified
        )
    if state.since_clarify_text is not None:
        assert since_B is not None
        new["since_clarify_text"] = jnp.where(active_B, since_B, state.since_clarify_text)
    return replace(state, **new)


def _next_loop_runs(
    params: SamplingParams, state: SamplerState, token_B: Array, active_B: Array
) -> Array:
    """Returns the `loop_runs` after each active row appends its token. Rows without loop detection
    may keep old values.
    """
    text_BS = state.text
    length_B = state.length
    assert (
        params.loops is not None
        and state.loop_runs is not None
        and text_BS is not None
        and length_B is not None
    )

    def extend(run_BP: Array) -> Array:
        extended_BP = jax.vmap(extend_loop_runs)(
            run_BP, text_BS, length_B, state.n_generated, token_B
        )
        return jnp.where(active_B[:, None], extended_BP, run_BP)

    if not params.skip_inactive_steps:
        return extend(state.loop_runs)
    runs: Array = lax.cond(
        (params.loops.max_period > 0).any(), extend, lambda run_BP: run_BP, state.loop_runs
    )
    return runs

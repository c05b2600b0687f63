"""`sample`: runs the sampling steps in order, chooses one token per row, and reports on it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import dantinox.sampling.history as history
import dantinox.sampling.steps as steps
import dantinox.sampling.watermark as watermark
from dantinox.config.generation_settings import GREEDY_BELOW, ROUTED_STEPS
from dantinox.config.sampling_steps import EDIT_STEPS, LAST_STEPS, PENALTY_STEPS, STEPS
from dantinox.sampling.best_of_n import (
    Candidates,
    best_candidate,
    best_of_n,
    candidates_given_token,
    guide_score,
)
from dantinox.sampling.draw import draw, row_key
from dantinox.sampling.entropy_router import (
    ADAPTIVE,
    CLARIFY,
    AttentionMetrics,
    Metrics,
    Route,
    RouterConfig,
    logit_metrics,
    route,
    should_clarify,
)
from dantinox.sampling.logit_processor import apply_logit_processor
from dantinox.sampling.loops import loop_temperature
from dantinox.sampling.order import Order, RowOrders, SharedOrder
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.selection import first_argmax
from dantinox.sampling.state import SamplerState, token_histories, update
from dantinox.sampling.step_info import RouterReport, StepInfo, step_info
from dantinox.sampling.window import Context, map_rows, run_chain, run_steps

GREEDY_STEPS = frozenset((*EDIT_STEPS, *PENALTY_STEPS))  # the steps that also apply to greedy rows
XTC_KEY, CANDIDATES_KEY = 1, 2  # folded into the key of the row, for independent draws
ALL_ALLOWED = 0xFFFFFFFF  # the mask word of 32 allowed tokens


def _find_function(name: str) -> Callable[..., Array]:
    """Returns the function with this name from the module that defines it."""
    return next(
        getattr(module, name) for module in (steps, history, watermark) if hasattr(module, name)
    )


FUNCTIONS: dict[str, Callable[..., Array]] = {
    name: _find_function(step.function or name) for name, step in STEPS.items()
}


class SampleInfo(NamedTuple):
    """Information about one call of `sample`; arrays [B].

    Attributes:
      repaired: whether the logits contained NaN or +inf.
      empty: whether the row had no tokens; its token is then 0.
      token: a `StepInfo` if a report was requested, else None.
    """

    repaired: Array
    empty: Array
    token: StepInfo | None


def sample(
    logits_BV: Array,
    params: SamplingParams,
    state: SamplerState,
    keys_B: Array | None = None,
    *,
    attention: AttentionMetrics | None = None,
    active_B: Array | None = None,
) -> tuple[Array, SamplerState, SampleInfo]:
    """Chooses the next token of every row. The token of a row does not depend on other rows or on
    its index.

    Args:
      logits_BV: logits of the last position, of any float type. All arithmetic is float32.
      params: the sampling parameters of the batch.
      state: the history of the batch.
      keys_B: a random key per row. None: derived from seed, sample index and number of generated
        tokens.
      attention: attention metrics of the newest query, [B] each; required if the router uses them.
      active_B: bool, the rows whose state is updated. None: all. The tokens of other rows are
        meaningless.

    Returns:
      The token ids [B] int32, the new state, and a `SampleInfo`.

    Raises:
      ValueError: the router uses attention metrics, and `attention` is None.
    """
    active_B = jnp.ones(params.batch, bool) if active_B is None else active_B
    keys_B = _keys(params, state) if keys_B is None and params.stochastic else keys_B
    raw_BV, repaired_B = jax.vmap(steps.sanitize)(logits_BV)
    allowed_BV = _apply_allowed(_apply_logit_processor(raw_BV, params, state), params)
    routes: Route | None = None
    metrics: Metrics | None = None
    candidates: Candidates | None = None
    if params.router is not None:
        params, metrics, routes = _apply_router(params, raw_BV, attention)
    params = _apply_loop_temperature(params, state)
    context = Context(params, state, keys_B)
    plan = _split_plan(params, active_B)
    edited_BV = run_steps(_apply_step, plan.edits, allowed_BV, context)
    final_BV, log_mass_B = run_chain(_apply_step, plan.others, edited_BV, context, active_B)
    greedy_BV = edited_BV if plan.edits_first else final_BV
    token_B = jax.vmap(first_argmax)(greedy_BV).astype(jnp.int32)
    greedy_B = params.temperature < GREEDY_BELOW
    drawable_BV = final_BV
    if params.stochastic and keys_B is not None:
        drawable_BV, drawn_B, candidates = _draw_tokens(
            final_BV, raw_BV, keys_B, plan.last, context, metrics, routes
        )
        token_B = jnp.where(greedy_B, token_B, drawn_B)
    surprise_B = None
    if state.mu is not None:
        # In bits, before the truncation by mirostat: it does not change a kept logit, and
        # `log_mass_B` is the mass before it.
        surprise_B = (log_mass_B - final_BV[jnp.arange(params.batch), token_B]) / jnp.log(2.0)
    routed: RouterReport | None = None
    since_clarify_text_B: Array | None = None
    if routes is not None:
        token_B, forced_B, since_clarify_text_B = _clarify(
            token_B, routes.strategy, edited_BV, params, state
        )
        routed = RouterReport(
            attention if params.uses_attention else None, routes, forced_B, candidates
        )
    empty_B = jnp.max(allowed_BV, axis=1) == -jnp.inf
    token_B = jnp.where(empty_B, 0, token_B)
    reported = None
    if params.report is not None:
        reported = _report_rows(
            params.report, params.report_rows, (raw_BV, drawable_BV, token_B, greedy_B)
        )
        reported = reported._replace(routed=routed)
    probability_B = (
        None if state.adaptive_sum is None else _probabilities(final_BV, token_B, params)
    )
    new_state = update(
        params, state, token_B, active_B, surprise_B, probability_B, since_clarify_text_B
    )
    return token_B, new_state, SampleInfo(repaired_B, empty_B, reported)


class _Plan(NamedTuple):
    """The three parts of a plan.

    The logits after the edits are kept, for the tokens of greedy rows and for the clarify token,
    which edits may forbid.

    Attributes:
      edits: the edits and penalties before any other step.
      others: the steps after them, without the last ones.
      last: the names of the last steps, which only rows that draw run.
      edits_first: whether all edits and penalties are in `edits`. Greedy rows enable no other
        steps, so their tokens then do not depend on `others`.
    """

    edits: SharedOrder
    others: Order
    last: list[str]
    edits_first: bool


def _split_plan(params: SamplingParams, active_B: Array) -> _Plan:
    last = [name for name in params.plan if name in LAST_STEPS]
    if params.order is not None:
        edits = _shared_order(params, EDIT_STEPS)
        return _Plan(edits, RowOrders.build(params.order, params.enabled, active_B), last, False)
    plan = params.plan[: len(params.plan) - len(last)]
    n_edits = next((i for i, name in enumerate(plan) if name not in GREEDY_STEPS), len(plan))
    edits_first = not any(name in GREEDY_STEPS for name in plan[n_edits:])
    return _Plan(
        _shared_order(params, plan[:n_edits]),
        _shared_order(params, plan[n_edits:]),
        last,
        edits_first,
    )


def _draw_tokens(
    final_BV: Array,
    raw_BV: Array,
    keys_B: Array,
    last: Sequence[str],
    context: Context,
    metrics: Metrics | None,
    routes: Route | None,
) -> tuple[Array, Array, Candidates | None]:
    """Runs the last steps and draws a token for every row.

    Returns:
      The logits from which the tokens are drawn, with the router those of the best of several
      candidates; the tokens; and the candidates, if they are scored or reported.
    """
    params = context.params
    processed_BV = run_steps(_apply_step, _shared_order(params, last), final_BV, context)
    drawable_BV = processed_BV
    if routes is not None and params.score_fn is None:
        drawable_BV = _best_of_n_logits(processed_BV, raw_BV, params, routes)
    drawn_B = jax.vmap(draw)(drawable_BV, keys_B)
    if routes is None or not params.candidates:
        return drawable_BV, drawn_B, None
    candidates = _candidates(drawn_B, processed_BV, raw_BV, keys_B, metrics, params)
    return (
        drawable_BV,
        jnp.where(routes.strategy == ADAPTIVE, candidates.token, drawn_B),
        candidates,
    )


def _clarify(
    token_B: Array, strategy_B: Array, edited_BV: Array, params: SamplingParams, state: SamplerState
) -> tuple[Array, Array, Array | None]:
    """Replaces the drawn tokens by the clarify token, or by tokens of the clarify text, where the
    router asks for it.

    Returns:
      The tokens, the rows whose token was replaced, and the new `since_clarify_text` if the router
      inserts texts.
    """
    assert params.router is not None and state.clarified is not None and state.length is not None
    distance_B = jnp.where(state.clarified < 0, -1, state.length - 1 - state.clarified)
    forced_B = jax.vmap(should_clarify)(strategy_B, edited_BV, distance_B, params.router)
    token_B = jnp.where(forced_B, params.router.clarify_token, token_B)
    if params.clarify_text is None:
        return token_B, forced_B, None
    assert state.since_clarify_text is not None
    cooldown_B = jnp.asarray(params.router.clarify_cooldown)
    clarifies_B = strategy_B == CLARIFY
    inserted = params.clarify_text.insert(
        state.since_clarify_text, clarifies_B, edited_BV, cooldown_B
    )
    forced_B = forced_B | inserted.forced
    return jnp.where(inserted.forced, inserted.token, token_B), forced_B, inserted.since


def _report_rows(
    count: int, report_rows_B: Array | None, inputs: tuple[Array, Array, Array, Array]
) -> StepInfo:
    """Returns the reports of all rows; zeros if `report_rows_B` is given and no row needs a report.

    Args:
      count: the number of alternatives.
      inputs: the other arguments of `step_info`, with a batch axis.
    """
    make_report = jax.vmap(partial(step_info, count))
    if report_rows_B is None:
        return make_report(*inputs)
    shapes = jax.eval_shape(make_report, *inputs)

    def zeros(*_: Array) -> StepInfo:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    reported: StepInfo = lax.cond(report_rows_B.any(), make_report, zeros, *inputs)
    return reported


def edit_logits(logits_BV: Array, params: SamplingParams, state: SamplerState) -> Array:
    """Returns the logits [B, V] after the steps of a plan that has only edits and penalties, for
    decoding without a draw.
    """
    raw_BV, _ = jax.vmap(steps.sanitize)(logits_BV)
    return run_steps(
        _apply_step, _shared_order(params, params.plan), raw_BV, Context(params, state)
    )


def trace(
    logits_BV: Array,
    params: SamplingParams,
    state: SamplerState,
    attention: AttentionMetrics | None = None,
) -> tuple[list[tuple[str, Array]], Route | None]:
    """Returns the logits [B, V] after every step, by name and in order, and the choice of the
    router (or None).

    The first entry is `model`, the repaired logits. Then come `logit_processor` if there is one,
    `constraint` if tokens are masked, the steps of the plan, and `candidates` if the router draws
    several.
    """
    raw_BV, _ = jax.vmap(steps.sanitize)(logits_BV)
    routes = None
    if params.router is not None:
        params, _, routes = _apply_router(params, raw_BV, attention)
    params = _apply_loop_temperature(params, state)
    context = Context(params, state, _keys(params, state))
    x_BV = raw_BV
    entries = [("model", x_BV)]
    if params.logit_processor is not None:
        x_BV = _apply_logit_processor(x_BV, params, state)
        entries.append(("logit_processor", x_BV))
    if params.allowed_bits is not None:
        x_BV = _apply_allowed(x_BV, params)
        entries.append(("constraint", x_BV))
    for name in params.plan:
        x_BV = run_steps(_apply_step, _shared_order(params, [name]), x_BV, context)
        entries.append((name, x_BV))
    if routes is not None and params.score_fn is None:
        entries.append(("candidates", _best_of_n_logits(x_BV, raw_BV, params, routes)))
    return entries, routes


def all_allowed(rows: int, vocab_size: int) -> np.ndarray:
    """Returns the masks `[B, ⌈V/32⌉]` of rows that may produce every token."""
    return np.full((rows, -(-vocab_size // 32)), ALL_ALLOWED, np.uint32)


def unpack_bits(bits_W: Array, vocab_size: int) -> Array:
    """Unpacks a token mask to bool [V]: token i is bit i mod 32 of word ⌊i/32⌋ of `bits_W`
    (uint32).
    """
    bits_W32 = (bits_W[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits_W32.reshape(-1)[:vocab_size].astype(bool)


def _apply_logit_processor(raw_BV: Array, params: SamplingParams, state: SamplerState) -> Array:
    if params.logit_processor is None:
        return raw_BV
    return apply_logit_processor(params.logit_processor, raw_BV, token_histories(state))


def _apply_allowed(raw_BV: Array, params: SamplingParams) -> Array:
    """Removes the tokens that `allowed_bits` masks."""
    if params.allowed_bits is None:
        return raw_BV
    is_constrained = (params.allowed_bits != jnp.uint32(ALL_ALLOWED)).any()
    return lax.cond(
        is_constrained,
        jax.vmap(_mask_disallowed),
        lambda raw_BV, _: raw_BV,
        raw_BV,
        params.allowed_bits,
    )


def _mask_disallowed(raw_V: Array, bits_W: Array) -> Array:
    allowed_V = unpack_bits(bits_W, raw_V.shape[0])
    allowed_logits_V = jnp.where(allowed_V, raw_V, -jnp.inf)
    # If all allowed tokens have the logit -inf, they become equally likely, so that the constraint
    # holds for any logits. An unconstrained row without tokens does not change, so that `sample`
    # reports it as empty.
    all_removed = (allowed_logits_V == -jnp.inf).all() & ~allowed_V.all()
    return jnp.where(all_removed & allowed_V, 0.0, allowed_logits_V)


def _apply_router(
    params: SamplingParams, raw_BV: Array, attention: AttentionMetrics | None
) -> tuple[SamplingParams, Metrics, Route]:
    """Runs the router.

    Returns the parameters, with the numbers that the router chose for this token, the metrics, and
    the choice of the router.
    """
    assert params.router is not None
    if params.uses_attention and attention is None:
        raise ValueError(
            "this router uses attention metrics: pass attention, or"
            " build it with use_attention: false"
        )
    metrics = Metrics(
        *jax.vmap(logit_metrics)(raw_BV), attention if params.uses_attention else None
    )
    routes = jax.vmap(route)(metrics, params.router)
    numbers = {name: getattr(routes, name) for name in ROUTED_STEPS}
    on = {
        "temperature": routes.temperature != 1,
        "top_k": routes.top_k < raw_BV.shape[1],
        "top_p": routes.top_p < 1,
        "min_p": routes.min_p > 0,
    }
    return (
        replace(params, numbers=params.numbers | numbers, enabled=params.enabled | on),
        metrics,
        routes,
    )


def _apply_loop_temperature(params: SamplingParams, state: SamplerState) -> SamplingParams:
    """Returns the parameters with the temperatures of this token: higher in rows whose text ends in
    a loop.
    """
    if params.loops is None or params.loops.factor is None:
        return params
    assert state.loop_runs is not None
    temperature_B, changed_B = loop_temperature(params.temperature, state.loop_runs, params.loops)
    enabled = params.enabled | {"temperature": params.enabled["temperature"] | changed_B}
    return replace(params, numbers=params.numbers | {"temperature": temperature_B}, enabled=enabled)


def _best_of_n_logits(
    final_BV: Array, raw_BV: Array, params: SamplingParams, routes: Route
) -> Array:
    """Returns the distribution of the best of n candidates in adaptive rows; other rows do not
    change.
    """
    assert params.router is not None
    n_B = jnp.where(routes.strategy == ADAPTIVE, params.router.candidates, 1)
    return jax.vmap(best_of_n)(final_BV, raw_BV, n_B, jnp.asarray(params.router.score_logprob))


def _candidates(
    drawn_B: Array,
    processed_BV: Array,
    raw_BV: Array,
    keys_B: Array,
    metrics: Any,
    params: SamplingParams,
) -> Candidates:
    """Draws the candidates of every row. Without a score function, they are drawn so that the drawn
    token is the best.
    """
    assert params.router is not None
    score_fn = params.score_fn
    draws = params.candidates

    def in_row(
        drawn: Array,
        processed_V: Array,
        raw_V: Array,
        key: Array,
        metrics: Metrics,
        config: RouterConfig,
    ) -> Candidates:
        candidates_key = jax.random.fold_in(key, CANDIDATES_KEY)
        if score_fn is None:
            found = candidates_given_token(
                drawn, processed_V, raw_V, candidates_key, metrics, config, draws=draws
            )
        else:
            score = partial(guide_score, config=config) if score_fn is guide_score else score_fn
            found = best_candidate(
                processed_V, raw_V, candidates_key, metrics, config.candidates, score, draws=draws
            )
        return found._replace(ids=jnp.where(jnp.arange(draws) < config.candidates, found.ids, -1))

    return jax.vmap(in_row)(drawn_B, processed_BV, raw_BV, keys_B, metrics, params.router)


def _probabilities(final_BV: Array, token_B: Array, params: SamplingParams) -> Array:
    """Returns the probabilities of the tokens before adaptive-p; 0 for rows without this step."""

    def step(_: str, on_B: Array, probability_B: Array) -> Array:
        logits_B = final_BV[jnp.arange(params.batch), token_B]
        return jnp.where(
            on_B, jnp.exp(logits_B - jax.vmap(steps.log_mass)(final_BV)), probability_B
        )

    # Run in the place of the step `adaptive_p`, so that a program that skips inactive steps also
    # skips this.
    return _shared_order(params, ["adaptive_p"]).run(step, jnp.zeros(params.batch))


def _keys(params: SamplingParams, state: SamplerState) -> Array:
    return jax.vmap(row_key)(params.seed, params.sample_index, state.n_generated)


def _shared_order(params: SamplingParams, names: Sequence[str]) -> SharedOrder:
    """Returns an order of some steps of the plan."""
    return SharedOrder(
        {name: params.enabled[name] for name in names}, tuple(names), params.skip_inactive_steps
    )


def _apply_step(name: str, x_BN: Array, on_B: Array, context: Context) -> Array:
    """Applies one step to the rows, or windows, that enable it."""
    step = partial(run_step, name)
    if STEPS[name].by_row and context.window is None:

        def run_row(operands: tuple[Array, Array, Context]) -> Array:
            x_N, on, row = operands
            return lax.cond(on, step, lambda x_N, _: x_N, x_N, row)

        return map_rows(run_row, (x_BN, on_B, context))
    return jnp.where(on_B[:, None], jax.vmap(step)(x_BN, context), x_BN)


def run_step(name: str, x_N: Array, row: Context, **overrides: Any) -> Array:
    """Applies one step to a row or its window; `overrides` replace arguments that are otherwise
    read from the context.
    """
    step = STEPS[name]
    settings = row.params.numbers | dict(row.params.choices)
    arguments = {parameter: settings[key] for parameter, key in step.arguments.items()}
    read = {
        parameter: STEP_INPUTS[parameter](x_N, row, name)
        for parameter in step.reads
        if parameter not in overrides
    }
    return FUNCTIONS[name](x_N, **arguments, **read, **overrides)


def _token_table(row: Context, name: str, suffix: str = "") -> Array:
    """Returns the table that a step reads: its token ids, their biases (`_by`), or the tokens
    before them (`_before`).
    """
    return row.params.tables[STEPS[name].indirect[0] + suffix]


def _at_window(values_V: Array, row: Context) -> Array:
    return values_V if row.window is None else values_V[row.window.ids]


def _vocab_size(x_N: Array, row: Context) -> int:
    return x_N.shape[0] if row.window is None else row.window.vocab_size


def _distances(x_N: Array, row: Context, name: str) -> Array:
    seen_N = _at_window(row.state.last_seen, row)
    return jnp.where(seen_N < 0, -1, row.state.length - 1 - seen_N)


def _repeated(x_N: Array, row: Context, name: str) -> Array:
    state = row.state
    window = row.params.numbers["dry_range"]
    repeated_V = history.longest_repeats(
        state.text, state.length, state.repeats, state.breaker, window, _vocab_size(x_N, row)
    )
    return _at_window(repeated_V, row)


def _biases(x_N: Array, row: Context, name: str) -> Array:
    V = x_N.shape[0]
    ids_K = _token_table(row, name)
    return (
        jnp.zeros(V)
        .at[jnp.where(ids_K < 0, V, ids_K)]
        .add(_token_table(row, name, "_by"), mode="drop")
    )


def _protected(x_N: Array, row: Context, name: str) -> Array:
    ids_N = jnp.arange(x_N.shape[0]) if row.window is None else row.window.ids
    return (ids_N[:, None] == row.params.tables["protected_ids"]).any(axis=1)


# Functions (row or window, context, step) -> value that compute the inputs of a step besides its
# settings. The key is the name of the parameter in the function of the step.
STEP_INPUTS: dict[str, Callable[[Array, Context, str], Any]] = {
    "history_S": lambda x_N, row, name: row.state.text,
    "length": lambda x_N, row, name: row.state.length,
    "run_S": lambda x_N, row, name: row.state.repeats,
    "n_generated": lambda x_N, row, name: row.state.n_generated,
    "distance_V": _distances,
    "count_V": lambda x_N, row, name: _at_window(row.state.count, row),
    "repeated_V": _repeated,
    "ids_S": lambda x_N, row, name: _token_table(row, name),
    "prefix_WM": lambda x_N, row, name: _token_table(row, name, "_before"),
    "last_W": lambda x_N, row, name: _token_table(row, name),
    "bias_W": lambda x_N, row, name: _token_table(row, name, "_by"),
    "bias_V": _biases,
    "stop_ids_S": lambda x_N, row, name: row.params.tables["stop_ids"],
    "protected_V": _protected,
    "u": lambda x_N, row, name: jax.random.uniform(jax.random.fold_in(row.keys, XTC_KEY)),
    "mu": lambda x_N, row, name: row.state.mu,
    "average": lambda x_N, row, name: row.state.adaptive_sum / row.state.adaptive_weight,
    "prompt_V": lambda x_N, row, name: _at_window(row.state.in_prompt, row),
    "keys_K": lambda x_N, row, name: _token_table(row, name),
    "size": lambda x_N, row, name: _vocab_size(x_N, row),
    "rest": lambda x_N, row, name: steps.EMPTY_REST if row.window is None else row.window.rest,
}

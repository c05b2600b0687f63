"""The window: the largest logits of a row, on which truncated distributions are computed exactly.

Selecting the largest 256 of 128k logits takes 0.3 ms on a CPU, and from there on every step is a matter of microseconds. A row
whose first cut leaves tokens outside of its window is computed over the whole vocabulary instead, for that row alone, so its
result never depends on its neighbours (docs/decisions/004).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.sampling_steps import STEERED, STEPS
from dantinox.sampling.order import Order, SharedOrder
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.selection import top_k_by_id
from dantinox.sampling.steps import MIN_SHIFTED_LOGIT, Rest, entropy, finite_max, log_mass

WINDOW = 256
SMALL_VOCABULARY = 4096  # up to here the whole row is as fast


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "rest"), meta_fields=("vocab_size",))
@dataclass(frozen=True)
class Window:
    """A part of a row: token ids [K], ascending, and the sums over all tokens that are not in it."""

    ids: Array
    rest: Rest
    vocab_size: int


class Context(NamedTuple):
    """What a step may read besides the logits, of a batch or, under `vmap`, of one row."""

    params: SamplingParams
    state: Any  # a SamplerState, of which every field that the plan reads is there
    keys: Any = None
    window: Window | None = None


class LogitRows(NamedTuple):
    """Rows [B, N], and ln Σe^x of each before mirostat's cut, [B]: 0 where it has no such step."""

    logits: Array
    log_mass: Array


class WindowResult(NamedTuple):
    """Rows [B, V] as their windows make them, or the windows [B, K], and for which rows that is not the answer.

    Attributes:
      open: no step has cut the row; it stays as it was.
      failed: more of it than the window would be left, or read.
    """

    rows: LogitRows
    open: Array
    failed: Array


# (name of a step, rows [B, N], the rows [B] that run it, context) -> rows [B, N]
Apply = Callable[[str, Array, Array, Context], Array]


def run_steps(apply: Apply, order: Order, logits_BN: Array, context: Context) -> Array:
    """The rows after steps."""
    return order.run(lambda name, on_B, x_BN: apply(name, x_BN, on_B, context), logits_BN)


def run_rows(apply: Apply, order: Order, rows: LogitRows, context: Context) -> LogitRows:
    """Rows or their windows after steps, with the mass before mirostat's cut."""

    def step(name: str, on_B: Array, rows: LogitRows) -> LogitRows:
        mass_B = rows.log_mass
        if name in STEERED:
            rest = [] if context.window is None else [context.window.rest]
            mass_B = jnp.where(on_B, jax.vmap(log_mass)(rows.logits, *rest), mass_B)
        return LogitRows(apply(name, rows.logits, on_B, context), mass_B)

    return order.run(step, rows)


def run_chain(apply: Apply, order: Order, logits_BV: Array, context: Context, active_B: Array) -> LogitRows:
    """Runs steps over rows, from the first cut on in the window where a row allows it and over the whole row where not."""
    B, V = logits_BV.shape
    before, cuts = order.split()
    rows = LogitRows(logits_BV, jnp.zeros(B))
    if V <= SMALL_VOCABULARY:
        return run_rows(apply, order, rows, context)
    rows = run_rows(apply, before, rows, context)
    needed = cuts.any_enabled()
    if needed is False:
        return rows
    windowed = partial(_run_truncations, apply)
    if needed is True:
        return windowed(cuts, rows, context, active_B)
    return lax.cond(needed, windowed, lambda _, rows, *__: rows, cuts, rows, context, active_B)


def _run_truncations(apply: Apply, order: Order, rows: LogitRows, context: Context, active_B: Array) -> LogitRows:
    """Runs steps of which the first is a cut, in windows and over the whole rows that need it."""
    short = run_in_windows(apply, order, rows.logits, context)

    def with_whole_rows() -> LogitRows:
        # A CPU takes as long for eight rows one by one as together, so only those that need it pay.
        ways = {"cpu": partial(run_failed_rows, apply), "default": partial(run_all_rows, apply)}
        return lax.platform_dependent(order, rows, context, short, **ways)

    needed_B = (short.open | short.failed) & active_B
    return lax.cond(needed_B.any(), with_whole_rows, lambda: short.rows)


def run_all_rows(apply: Apply, order: Order, rows: LogitRows, context: Context, short: WindowResult) -> LogitRows:
    """All rows over the whole vocabulary; those that failed take the outcome."""
    whole = run_rows(apply, order, rows, context)
    failed_B1, open_B1 = short.failed[:, None], short.open[:, None]
    logits_BV = jnp.where(failed_B1, whole.logits, jnp.where(open_B1, rows.logits, short.rows.logits))
    return LogitRows(logits_BV, jnp.where(short.failed, whole.log_mass, short.rows.log_mass))


def run_failed_rows(apply: Apply, order: Order, rows: LogitRows, context: Context, short: WindowResult) -> LogitRows:
    """The same, for the rows that failed alone."""

    def row(operands: tuple[Order, LogitRows, Context, WindowResult]) -> LogitRows:
        order_1, rows_1, context_1, short_1 = jax.tree.map(lambda leaf: leaf[None], operands)
        outcome: LogitRows = lax.cond(
            operands[3].failed,
            lambda: run_rows(apply, order_1, rows_1, context_1),
            lambda: short_1.rows._replace(logits=jnp.where(short_1.open, rows_1.logits, short_1.rows.logits)),
        )
        return jax.tree.map(lambda leaf: leaf[0], outcome)

    return lax.map(row, (order, rows, context, short))


def run_in_windows(apply: Apply, order: Order, logits_BV: Array, context: Context) -> WindowResult:
    """Runs steps over the windows of all rows."""
    B, V = logits_BV.shape
    x_BK, ids_BK, rest = take_window(logits_BV)
    K = x_BK.shape[1]
    least_B1 = jnp.min(x_BK, axis=1, keepdims=True)
    last_B = jnp.max(jnp.where(x_BK == least_B1, jnp.arange(K), 0), axis=1)

    def step(name: str, on_B: Array, carry: tuple[WindowResult, Rest]) -> tuple[WindowResult, Rest]:
        ((x_BK, _), open_B, failed_B), rest = carry
        windowed = context._replace(window=Window(ids_BK, rest, V))
        rows = run_rows(apply, SharedOrder({name: on_B}, (name,), False), carry[0].rows, windowed)
        touched_B = on_B & open_B
        if not STEPS[name].cuts:
            return WindowResult(rows, open_B, failed_B | touched_B), rest
        # A head of the canonical order stays: when the last token of the window goes, so does all behind it.
        # `lax.top_k` tells 0 from -0: a window that ends in zeros may not hold the first of them.
        closed_B = (rows.logits[jnp.arange(B), last_B] == -jnp.inf) & (least_B1[:, 0] != 0)
        if STEPS[name].cuts == "typical":  # this order is the logits' one only where tokens surprise more than the mean
            surprise_B = jax.vmap(log_mass)(x_BK, rest) - x_BK[jnp.arange(B), last_B]
            closed_B &= surprise_B >= jax.vmap(entropy)(x_BK, rest)
        open_B &= ~(touched_B & closed_B)
        rest = Rest(*(jnp.where(open_B, part_B, 0) for part_B in rest))
        return WindowResult(rows, open_B, failed_B | (touched_B & ~closed_B)), rest

    start = WindowResult(LogitRows(x_BK, jnp.zeros(B)), jnp.asarray(rest.tokens) > 0, jnp.zeros(B, bool))
    ((x_BK, mass_B), open_B, failed_B), _ = order.run(step, (start, rest))
    short_BV = jnp.full((B, V), -jnp.inf).at[jnp.arange(B)[:, None], ids_BK].set(x_BK, unique_indices=True)
    return WindowResult(LogitRows(short_BV, mass_B), open_B, failed_B)


def take_window(logits_BV: Array) -> tuple[Array, Array, Rest]:
    """The largest logits [B, K] in the order of their ids, the ids, and the sums over all others."""
    values_BK, ids_BK = jax.vmap(partial(top_k_by_id, count=WINDOW))(logits_BV)
    M_B1 = jax.vmap(finite_max)(logits_BV)[:, None]

    def sums(x_BN: Array) -> Rest:
        alive_BN = x_BN > -jnp.inf
        d_BN = jnp.where(alive_BN, jnp.maximum(x_BN - M_B1, MIN_SHIFTED_LOGIT), 0)
        weights_BN = jnp.where(alive_BN, jnp.exp(d_BN), 0)
        parts = weights_BN, weights_BN * d_BN, alive_BN.astype(jnp.float32), d_BN, d_BN**2
        return Rest(*(jnp.sum(part_BN, axis=1) for part_BN in parts))

    everything, inside = sums(logits_BV), sums(values_BK)
    outside = jax.tree.map(jnp.subtract, everything, inside)
    rest = Rest(
        jnp.maximum(outside.mass, 0), jnp.minimum(outside.moment, 0), outside.tokens,
        jnp.minimum(outside.total, 0), jnp.maximum(outside.squares, 0),
    )  # fmt: skip
    return values_BK, ids_BK, Rest(*(jnp.where(rest.tokens > 0, part_B, 0) for part_B in rest))

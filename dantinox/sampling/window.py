"""The window: the largest logits of a row, on which truncation steps give exact results.

Selecting the largest 256 of 128k logits takes 0.3 ms on a CPU; after that, each step takes
microseconds. If the first truncation step of a row keeps tokens outside its window, that row is
computed over the whole vocabulary. Its result therefore never depends on other rows
(docs/decisions/004).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.sampling_steps import MIROSTAT_STEPS, STEPS
from dantinox.sampling.order import Order, SharedOrder
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.selection import top_k_by_id
from dantinox.sampling.steps import MIN_SHIFTED_LOGIT, Rest, entropy, finite_max, log_mass

WINDOW = 256
SMALL_VOCABULARY = 4096  # up to this size, the whole row is as fast as a window


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "rest"), meta_fields=("vocab_size",))
@dataclass(frozen=True)
class Window:
    """A part of a row.

    Attributes:
      ids: its token ids [K], ascending.
      rest: sums over all tokens outside the window.
      vocab_size: V.
    """

    ids: Array
    rest: Rest
    vocab_size: int


class Context(NamedTuple):
    """The inputs of a step besides the logits, of a batch or, under `vmap`, of one row. `window` is
    None for whole rows.
    """

    params: SamplingParams
    state: Any  # a SamplerState that has every field that the plan reads
    keys: Any = None
    window: Window | None = None


class LogitRows(NamedTuple):
    """Logits [B, N], and ln Σe^x [B] before the truncation by mirostat; 0 for rows without
    mirostat.
    """

    logits: Array
    log_mass: Array


class WindowResult(NamedTuple):
    """The result of steps in windows: rows [B, V], or windows [B, K] while the steps run.

    Attributes:
      rows: the logits.
      open: rows that no step has truncated yet; the result of such a row is its logits before the
        steps.
      failed: rows whose result is invalid, because a step needs or keeps tokens outside the window.
    """

    rows: LogitRows
    open: Array
    failed: Array


# (name of a step, rows [B, N], rows [B] that run it, context) -> rows [B, N]
Apply = Callable[[str, Array, Array, Context], Array]


def run_steps(apply: Apply, order: Order, logits_BN: Array, context: Context) -> Array:
    """Returns the rows after all steps of the order."""
    return order.run(lambda name, on_B, x_BN: apply(name, x_BN, on_B, context), logits_BN)


def run_rows(apply: Apply, order: Order, rows: LogitRows, context: Context) -> LogitRows:
    """Runs steps over rows or windows, and records the mass before the truncation by mirostat."""

    def step(name: str, on_B: Array, rows: LogitRows) -> LogitRows:
        mass_B = rows.log_mass
        if name in MIROSTAT_STEPS:
            rest = [] if context.window is None else [context.window.rest]
            mass_B = jnp.where(on_B, jax.vmap(log_mass)(rows.logits, *rest), mass_B)
        return LogitRows(apply(name, rows.logits, on_B, context), mass_B)

    return order.run(step, rows)


def run_chain(
    apply: Apply, order: Order, logits_BV: Array, context: Context, active_B: Array
) -> LogitRows:
    """Runs steps over rows.

    From the first truncation step on, the steps run in the window, or over the whole row if the
    window is too small.

    Args:
      apply: applies one step.
      order: the order of steps.
      logits_BV: logits after edits.
      context: parameters, state and keys of the batch.
      active_B: bool, rows whose result is needed.
    """
    B, V = logits_BV.shape
    before, truncations = order.split()
    rows = LogitRows(logits_BV, jnp.zeros(B))
    if V <= SMALL_VOCABULARY:
        return run_rows(apply, order, rows, context)
    rows = run_rows(apply, before, rows, context)
    needed = truncations.any_enabled()
    if needed is False:
        return rows
    run_truncations = partial(_run_truncations, apply)
    if needed is True:
        return run_truncations(truncations, rows, context, active_B)
    return lax.cond(
        needed, run_truncations, lambda _, rows, *__: rows, truncations, rows, context, active_B
    )


def _run_truncations(
    apply: Apply, order: Order, rows: LogitRows, context: Context, active_B: Array
) -> LogitRows:
    """Runs steps that begin with a truncation, in windows and over the whole rows where
    necessary.
    """
    windowed = run_in_windows(apply, order, rows.logits, context)

    def with_whole_rows() -> LogitRows:
        # On a CPU, computing rows one by one is as fast as in a batch, so only the rows that need
        # it are computed.
        branches = {"cpu": partial(run_failed_rows, apply), "default": partial(run_all_rows, apply)}
        return lax.platform_dependent(order, rows, context, windowed, **branches)

    needed_B = (windowed.open | windowed.failed) & active_B
    return lax.cond(needed_B.any(), with_whole_rows, lambda: windowed.rows)


def run_all_rows(
    apply: Apply, order: Order, rows: LogitRows, context: Context, windowed: WindowResult
) -> LogitRows:
    """Runs the steps over the whole vocabulary for all rows, and uses the results of the rows that
    failed in the window.
    """
    whole = run_rows(apply, order, rows, context)
    failed_B1, open_B1 = windowed.failed[:, None], windowed.open[:, None]
    logits_BV = jnp.where(
        failed_B1, whole.logits, jnp.where(open_B1, rows.logits, windowed.rows.logits)
    )
    return LogitRows(logits_BV, jnp.where(windowed.failed, whole.log_mass, windowed.rows.log_mass))


def run_failed_rows(
    apply: Apply, order: Order, rows: LogitRows, context: Context, windowed: WindowResult
) -> LogitRows:
    """Runs the steps over the whole vocabulary only for the rows that failed in the window, one by
    one.
    """

    def row(operands: tuple[Order, LogitRows, Context, WindowResult]) -> LogitRows:
        order_1, rows_1, context_1, windowed_1 = jax.tree.map(lambda leaf: leaf[None], operands)
        outcome: LogitRows = lax.cond(
            operands[3].failed,
            lambda: run_rows(apply, order_1, rows_1, context_1),
            lambda: windowed_1.rows._replace(
                logits=jnp.where(windowed_1.open, rows_1.logits, windowed_1.rows.logits)
            ),
        )
        return jax.tree.map(lambda leaf: leaf[0], outcome)

    return map_rows(row, (order, rows, context, windowed))


def map_rows(function: Callable[[Any], Any], batch: Any) -> Any:
    """Applies a function to the rows of a batch one by one. A single row needs no loop, which would
    copy every array.
    """
    if len(jax.tree.leaves(batch)[0]) > 1:
        return lax.map(function, batch)
    result = function(jax.tree.map(lambda leaf: leaf[0], batch))
    return jax.tree.map(lambda leaf: leaf[None], result)


def run_in_windows(apply: Apply, order: Order, logits_BV: Array, context: Context) -> WindowResult:
    """Runs the steps in the windows of all rows."""
    B, V = logits_BV.shape
    x_BK, ids_BK, rest = take_window(logits_BV)
    K = x_BK.shape[1]
    least_B1 = jnp.min(x_BK, axis=1, keepdims=True)
    last_B = jnp.max(jnp.where(x_BK == least_B1, jnp.arange(K), 0), axis=1)

    def step(name: str, on_B: Array, carry: tuple[WindowResult, Rest]) -> tuple[WindowResult, Rest]:
        (before, open_B, failed_B), rest = carry
        window_context = context._replace(window=Window(ids_BK, rest, V))
        rows = run_rows(apply, SharedOrder({name: on_B}, (name,), False), before, window_context)
        touched_B = on_B & open_B
        if not STEPS[name].keeps:  # the step needs the tokens outside
            return WindowResult(rows, open_B, failed_B | touched_B), rest
        # A step keeps the first tokens in canonical order. If it removes the last token of the
        # window, it also removes all tokens outside. `lax.top_k` distinguishes 0 from -0, so if the
        # smallest logit of a window is 0, the window may lack the first of the tokens with this
        # logit.
        closed_B = (rows.logits[jnp.arange(B), last_B] == -jnp.inf) & (least_B1[:, 0] != 0)
        if STEPS[name].keeps == "typical":
            # Typical sampling keeps tokens in the order of their logits only where the surprise
            # exceeds the entropy.
            before_BK = before.logits
            surprise_B = jax.vmap(log_mass)(before_BK, rest) - before_BK[jnp.arange(B), last_B]
            closed_B &= surprise_B >= jax.vmap(entropy)(before_BK, rest)
        open_B &= ~(touched_B & closed_B)
        rest = Rest(*(jnp.where(open_B, part_B, 0) for part_B in rest))
        return WindowResult(rows, open_B, failed_B | (touched_B & ~closed_B)), rest

    start = WindowResult(
        LogitRows(x_BK, jnp.zeros(B)), jnp.asarray(rest.tokens) > 0, jnp.zeros(B, bool)
    )
    result, _ = order.run(step, (start, rest))
    x_BK, mass_B = result.rows
    scattered_BV = (
        jnp.full((B, V), -jnp.inf).at[jnp.arange(B)[:, None], ids_BK].set(x_BK, unique_indices=True)
    )
    return result._replace(rows=LogitRows(scattered_BV, mass_B))


def take_window(logits_BV: Array) -> tuple[Array, Array, Rest]:
    """Returns the largest logits [B, K] in the order of their ids, the ids [B, K], and the sums
    over all other tokens.
    """
    values_BK, ids_BK = jax.vmap(partial(top_k_by_id, count=WINDOW))(logits_BV)
    M_B1 = jax.vmap(finite_max)(logits_BV)[:, None]

    def sums(x_BN: Array) -> Rest:
        alive_BN = x_BN > -jnp.inf
        d_BN = jnp.where(alive_BN, jnp.maximum(x_BN - M_B1, MIN_SHIFTED_LOGIT), 0)
        weights_BN = jnp.where(alive_BN, jnp.exp(d_BN), 0)
        parts = (
            weights_BN,
            weights_BN * d_BN,
            weights_BN**2,
            alive_BN.astype(jnp.float32),
            d_BN,
            d_BN**2,
        )
        return Rest(*(jnp.sum(part_BN, axis=1) for part_BN in parts))._replace(
            least=jnp.min(d_BN, axis=1)
        )

    everything = sums(logits_BV)
    inside = sums(values_BK)
    outside = jax.tree.map(jnp.subtract, everything, inside)
    # The limits remove the wrong signs that rounding may give to a difference.
    rest = Rest(
        mass=jnp.maximum(outside.mass, 0),
        moment=jnp.minimum(outside.moment, 0),
        mass_squares=jnp.maximum(outside.mass_squares, 0),
        tokens=outside.tokens,
        total=jnp.minimum(outside.total, 0),
        squares=jnp.maximum(outside.squares, 0),
        least=everything.least,
    )
    return values_BK, ids_BK, Rest(*(jnp.where(rest.tokens > 0, part_B, 0) for part_B in rest))

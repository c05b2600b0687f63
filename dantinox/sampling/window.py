"""The window: the largest logits of a row, in which most chains end up after their first cut.

Selecting the largest 256 of 128k logits takes 0.3 ms on a CPU, and from there on every step is a matter of microseconds. A row
whose first cut leaves tokens outside of its window is computed over the whole vocabulary instead, for that row alone, so its
result never depends on its neighbours (docs/decisions/004).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dantinox.config.steps import STEPS
from dantinox.sampling.params import SamplingParams
from dantinox.sampling.search import largest
from dantinox.sampling.steps import FARTHEST, Rest, entropy, finite_max, log_mass

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


class Short(NamedTuple):
    """Rows [B, V] as their windows make them, ln Σe^x before mirostat's cut, and for which rows that is not the answer.

    Attributes:
      open: no step has cut the row; it stays as it was.
      failed: more of it than the window would be left, or read.
    """

    logits: Array
    log_mass: Array | None
    open: Array
    failed: Array


# (names of steps, logits [B, N], context) -> (logits, ln Σe^x before mirostat's cut or None)
Outcome = tuple[Array, Array | None]
Runner = Callable[[Sequence[str], Array, Context], Outcome]


def run_cuts(run: Runner, names: Sequence[str], logits_BV: Array, context: Context, active_B: Array) -> Outcome:
    """Runs steps of which the first is a cut, in the window where a row allows it and over the whole row where not."""
    if logits_BV.shape[1] <= SMALL_VOCABULARY:
        return run(names, logits_BV, context)
    short = in_window(run, names, logits_BV, context)

    def with_whole_rows() -> Outcome:
        # A CPU takes as long for eight rows one by one as together, so only those that need it pay.
        ways = {"cpu": partial(one_by_one, run, names), "default": partial(together, run, names)}
        return lax.platform_dependent(logits_BV, context, short, **ways)

    needed_B = (short.open | short.failed) & active_B
    return lax.cond(needed_B.any(), with_whole_rows, lambda: (short.logits, short.log_mass))


def together(run: Runner, names: Sequence[str], logits_BV: Array, context: Context, short: Short) -> Outcome:
    """All rows over the whole vocabulary; those that failed take the outcome."""
    whole_BV, whole_mass_B = run(names, logits_BV, context)
    rows_BV = jnp.where(short.failed[:, None], whole_BV, jnp.where(short.open[:, None], logits_BV, short.logits))
    if short.log_mass is None or whole_mass_B is None:
        return rows_BV, None
    return rows_BV, jnp.where(short.failed, whole_mass_B, short.log_mass)


def one_by_one(run: Runner, names: Sequence[str], logits_BV: Array, context: Context, short: Short) -> Outcome:
    """The same, for the rows that failed alone."""

    def row(operands: tuple[Array, Context, Short]) -> Outcome:
        x_1V, context_1, short_1 = jax.tree.map(lambda leaf: leaf[None], operands)
        outcome: Outcome = lax.cond(
            operands[2].failed,
            lambda: run(names, x_1V, context_1),
            lambda: (jnp.where(short_1.open, x_1V, short_1.logits), short_1.log_mass),
        )
        return jax.tree.map(lambda leaf: leaf[0], outcome)

    return lax.map(row, (logits_BV, context, short))


def in_window(run: Runner, names: Sequence[str], logits_BV: Array, context: Context) -> Short:
    """Runs steps over the windows of all rows."""
    B, V = logits_BV.shape
    x_BK, ids_BK, rest = take_window(logits_BV)
    K = x_BK.shape[1]
    least_B1 = jnp.min(x_BK, axis=1, keepdims=True)
    last_B = jnp.max(jnp.where(x_BK == least_B1, jnp.arange(K), 0), axis=1)
    open_B = jnp.asarray(rest.tokens) > 0
    failed_B = jnp.zeros(B, bool)
    log_mass_B, params = None, context.params
    for name in names:
        y_BK, mass_B = run([name], x_BK, context._replace(window=Window(ids_BK, rest, V)))
        if mass_B is not None:
            log_mass_B = mass_B if log_mass_B is None else jnp.where(params.on[name], mass_B, log_mass_B)
        touched_B = params.on[name] & open_B
        if STEPS[
            name
        ].cuts:  # a head of the canonical order stays: when the last token of the window goes, so does all behind it
            # `lax.top_k` tells 0 from -0: a window that ends in zeros may not hold the first of them.
            closed_B = (y_BK[jnp.arange(B), last_B] == -jnp.inf) & (least_B1[:, 0] != 0)
            if STEPS[name].cuts == "typical":  # this order is the logits' one only where tokens surprise more than the mean
                surprise_B = jax.vmap(log_mass)(x_BK, rest) - x_BK[jnp.arange(B), last_B]
                closed_B &= surprise_B >= jax.vmap(entropy)(x_BK, rest)
            failed_B |= touched_B & ~closed_B
            open_B &= ~(touched_B & closed_B)
            rest = Rest(*(jnp.where(open_B, part_B, 0) for part_B in rest))
        else:
            failed_B |= touched_B
        x_BK = y_BK
    short_BV = jnp.full((B, V), -jnp.inf).at[jnp.arange(B)[:, None], ids_BK].set(x_BK, unique_indices=True)
    return Short(short_BV, log_mass_B, open_B, failed_B)


def take_window(logits_BV: Array) -> tuple[Array, Array, Rest]:
    """The largest logits [B, K] in the order of their ids, the ids, and the sums over all others."""
    values_BK, ids_BK = jax.vmap(partial(largest, count=WINDOW))(logits_BV)
    M_B1 = jax.vmap(finite_max)(logits_BV)[:, None]

    def sums(x_BN: Array) -> Rest:
        alive_BN = x_BN > -jnp.inf
        d_BN = jnp.where(alive_BN, jnp.maximum(x_BN - M_B1, FARTHEST), 0)
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

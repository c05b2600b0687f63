"""Runs the sampling steps in their order: one static order, or an array per row; steps that no row
enables can be skipped. The orders and their presets are defined in `config.generation_settings`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.config.sampling_steps import EDIT_STEPS, LAST_STEPS, STEPS

# The steps that can run in any order. An entry of an order array is an index into this tuple; -1 is
# an unused entry.
ORDERABLE = tuple(name for name in STEPS if name not in (*EDIT_STEPS, *LAST_STEPS))
IS_TRUNCATION = np.asarray([bool(STEPS[name].keeps) for name in ORDERABLE])

T = TypeVar("T")
# (name of a step, rows [B] that run it, carry) -> carry
StepFunction = Callable[[str, Array, T], T]


@partial(jax.tree_util.register_dataclass, data_fields=("on",), meta_fields=("names", "skip"))
@dataclass(frozen=True)
class SharedOrder:
    """One order of steps for all rows.

    Attributes:
      on: maps each step to the rows that enable it, [B] bool.
      names: the steps in order.
      skip: whether the program skips, at run time, a step that no row enables.
    """

    on: dict[str, Array]
    names: tuple[str, ...]
    skip: bool

    def run(self, function: StepFunction[T], carry: T) -> T:
        """Applies `function` to the carry for every step in order, and returns the final carry."""
        for name in self.names:
            carry = self._run_step(partial(function, name), self.on[name], carry)
        return carry

    def _run_step(self, step: Callable[[Array, T], T], on_B: Array, carry: T) -> T:
        if not self.skip:
            return step(on_B, carry)
        result: T = lax.cond(on_B.any(), step, lambda _, carry: carry, on_B, carry)
        return result

    def any_enabled(self) -> Array | bool:
        """Returns whether some row may enable a step; a bool if this is known without running the
        program.
        """
        if not self.names or not self.skip:
            return bool(self.names)
        return jnp.stack([self.on[name] for name in self.names]).any()

    def split(self) -> "tuple[SharedOrder, SharedOrder]":
        """Splits the order before the first truncation step."""
        first = next((i for i, name in enumerate(self.names) if STEPS[name].keeps), len(self.names))
        return replace(self, names=self.names[:first]), replace(self, names=self.names[first:])


@partial(jax.tree_util.register_dataclass, data_fields=("steps", "pending"), meta_fields=("names",))
@dataclass(frozen=True)
class RowOrders:
    """A separate order of steps for every row, in one program.

    The program is a loop: each iteration chooses a step that is next in some row, and runs it for
    all rows in which it is next. If all orders are equal, the loop is one pass over the enabled
    steps. The result of a row does not depend on other rows.

    Attributes:
      steps: [B, N] int32, the steps of every row in order, as indices into `ORDERABLE`.
      pending: [B, N] bool, the entries that still have to run.
      names: the steps that can be pending; only these are compiled.
    """

    steps: Array
    pending: Array
    names: tuple[str, ...]

    @classmethod
    def build(cls, steps_BN: Array, on: dict[str, Array], active_B: Array) -> "RowOrders":
        """Builds the orders [B, N]; the enabled steps of active rows are pending."""
        on_BN = jnp.take_along_axis(
            jnp.stack([on[name] for name in ORDERABLE], axis=1), jnp.maximum(steps_BN, 0), axis=1
        )
        return cls(steps_BN, (steps_BN >= 0) & on_BN & active_B[:, None], ORDERABLE)

    def run(self, function: StepFunction[T], carry: T) -> T:
        """Applies `function` to the carry for every pending step of every row, and returns the
        final carry.
        """
        unused = len(ORDERABLE)
        branches = [partial(function, name) for name in self.names]
        # From an index into `ORDERABLE` to a branch; a step that is not in `names` is never
        # pending.
        branch_of = np.asarray(
            [self.names.index(name) if name in self.names else 0 for name in ORDERABLE], np.int32
        )

        def next_step(loop: tuple[Array, T]) -> tuple[Array, T]:
            pending_BN, carry = loop
            next_BN = pending_BN & (jnp.cumsum(pending_BN, axis=1) == 1)
            next_B = jnp.min(jnp.where(next_BN, self.steps, unused), axis=1)
            step = jnp.min(next_B)
            due_B = next_B == step
            carry = lax.switch(jnp.asarray(branch_of)[step], branches, due_B, carry)
            return pending_BN & ~(next_BN & due_B[:, None]), carry

        return lax.while_loop(lambda loop: loop[0].any(), next_step, (self.pending, carry))[1]

    def any_enabled(self) -> Array | bool:
        """Returns whether some row has a pending step."""
        return self.pending.any()

    def split(self) -> "tuple[RowOrders, RowOrders]":
        """Splits the order of each row before its first truncation step, enabled or not."""
        truncates_BN = (self.steps >= 0) & jnp.asarray(IS_TRUNCATION)[jnp.maximum(self.steps, 0)]
        after_BN = jnp.cumsum(truncates_BN, axis=1) > 0
        before = tuple(name for name in ORDERABLE if not STEPS[name].keeps)
        return (
            replace(self, pending=self.pending & ~after_BN, names=before),
            replace(self, pending=self.pending & after_BN),
        )


Order = SharedOrder | RowOrders


def order_array(names: Sequence[str]) -> np.ndarray:
    """Returns the order array [N] int32 for the names of a `section_order`, which has no edits.

    The last steps are left out, because their order is fixed.
    """
    steps_N = np.full(len(ORDERABLE), -1, np.int32)
    indices = [ORDERABLE.index(name) for name in names if name not in LAST_STEPS]
    steps_N[: len(indices)] = indices
    return steps_N

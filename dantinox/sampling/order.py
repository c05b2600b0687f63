"""The order of sampling steps: static for all rows, or one array per row that a program reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dantinox.config.sampling_steps import EDITS, STEPS

# The steps that may stand in any order; an entry of an order array is an index into them, -1 an unused place.
ORDERABLE = tuple(name for name in STEPS if name not in EDITS)
IS_TRUNCATION = np.asarray([bool(STEPS[name].cuts) for name in ORDERABLE])

T = TypeVar("T")
# (name of a step, the rows [B] that run it, carry) -> carry
StepFunction = Callable[[str, Array, T], T]


@partial(jax.tree_util.register_dataclass, data_fields=("on",), meta_fields=("names", "skip"))
@dataclass(frozen=True)
class SharedOrder:
    """All rows run the same steps in the same order.

    Attributes:
      on: step → [B] bool, the rows that have it on.
      names: the steps in order.
      skip: leave out a step that no row has on when the program runs.
    """

    on: dict[str, Array]
    names: tuple[str, ...]
    skip: bool

    def run(self, function: StepFunction[T], carry: T) -> T:
        """The carry after `function` of every step."""
        for name in self.names:
            step = partial(function, name)
            on_B = self.on[name]
            carry = lax.cond(on_B.any(), step, lambda _, carry: carry, on_B, carry) if self.skip else step(on_B, carry)
        return carry

    def any_enabled(self) -> Array | bool:
        """Whether some row may have a step on, as far as the program asks for it."""
        return jnp.stack([self.on[name] for name in self.names]).any() if self.skip and self.names else bool(self.names)

    def split(self) -> "tuple[SharedOrder, SharedOrder]":
        """The steps before the first cut, and those from it on."""
        first = next((i for i, name in enumerate(self.names) if STEPS[name].cuts), len(self.names))
        return replace(self, names=self.names[:first]), replace(self, names=self.names[first:])


@partial(jax.tree_util.register_dataclass, data_fields=("steps", "pending"), meta_fields=("names",))
@dataclass(frozen=True)
class RowOrders:
    """Every row runs its own steps in its own order, in one program.

    The program repeats: take the step that comes next in some row, run it for all rows in which it comes next. With equal
    orders that is one pass over the steps that are on. A row's result does not depend on the other rows.

    Attributes:
      steps: [B, N] int32, for every row its steps in order as indices into `ORDERABLE`.
      pending: [B, N] bool, the places to be run.
      names: the steps that can be pending; nothing else is compiled.
    """

    steps: Array
    pending: Array
    names: tuple[str, ...]

    @classmethod
    def build(cls, steps_BN: Array, on: dict[str, Array], active_B: Array) -> "RowOrders":
        """The orders [B, N], of active rows and of steps that are on."""
        on_BN = jnp.take_along_axis(jnp.stack([on[name] for name in ORDERABLE], axis=1), jnp.maximum(steps_BN, 0), axis=1)
        return cls(steps_BN, (steps_BN >= 0) & on_BN & active_B[:, None], ORDERABLE)

    def run(self, function: StepFunction[T], carry: T) -> T:
        """The carry after `function` of every step of every row."""
        unused = len(ORDERABLE)
        branches = [partial(function, name) for name in self.names]
        branch_of = np.asarray([self.names.index(name) if name in self.names else 0 for name in ORDERABLE], np.int32)

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
        """Whether some row has a step left."""
        return self.pending.any()

    def split(self) -> "tuple[RowOrders, RowOrders]":
        """The steps before the first cut of each row, whether that is on or not, and those from it on."""
        cut_BN = (self.steps >= 0) & jnp.asarray(IS_TRUNCATION)[jnp.maximum(self.steps, 0)]
        behind_BN = jnp.cumsum(cut_BN, axis=1) > 0
        before = tuple(name for name in ORDERABLE if not STEPS[name].cuts)
        return (
            replace(self, pending=self.pending & ~behind_BN, names=before),
            replace(self, pending=self.pending & behind_BN),
        )


Order = SharedOrder | RowOrders


def order_array(names: Sequence[str]) -> np.ndarray:
    """An order [N] int32 from the names of its steps."""
    steps_N = np.full(len(ORDERABLE), -1, np.int32)
    steps_N[: len(names)] = [ORDERABLE.index(name) for name in names]
    return steps_N

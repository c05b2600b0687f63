"""From the settings of `kv` to the cache of a batch: which head is to keep how many slots, and what stays in them."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig, UserError
from dantinox.config.kv import KVSection
from dantinox.generation.budgets import UNIT, allocate, by_key_head, divided, head_weights, least_total
from dantinox.generation.decode import CachePlan
from dantinox.generation.prepare import NarrowLinear
from dantinox.model import Compression, Transformer, compute_dtype
from dantinox.model.cache import spans
from dantinox.model.layers import Linear
from dantinox.run import KVCalibration

HeadOrder = tuple[tuple[int, ...], ...]
TAU = 16.0  # tokens an importance lasts under `decay: entropy` where a head attends to one key


@dataclass(frozen=True, eq=False)
class KVPlan:
    """How the caches of a model are made; called with the slots of a batch, it gives their plan.

    Attributes:
      calibration: what was measured on the model, where a signal or the decay reads it.
    """

    config: ModelConfig
    kv: KVSection
    calibration: KVCalibration | None = None

    @property
    def compresses(self) -> bool:
        return self.kv.compresses

    @cached_property
    def _weights_LK(self) -> np.ndarray:
        """Each key head's share relative to the others; all alike without a calibration, and where nothing is dropped."""
        c, kv = self.config, self.kv
        if not self.compresses or self.calibration is None or kv.signal == "uniform":
            return np.ones((c.num_blocks, c.kv_heads))
        measured = self.calibration.signal(kv.signal)
        if kv.signal == "loss":
            slots = self.calibration.loss_slots
            share = kv.budget or min(1.0, (kv.budget_tokens or 0) / slots[-1])
            return divided(measured, slots, share, self._floor)
        return head_weights(by_key_head(measured, c.kv_heads, kv.grouping), kv.scale_min, kv.scale_max)

    @property
    def _floor(self) -> int:
        """The fewest slots of a head."""
        return -(-(self.kv.sinks + self.kv.recent) // UNIT) * UNIT

    @cached_property
    def order(self) -> HeadOrder:
        """For each layer its key heads, those with the largest share first: the order the model's weights must have."""
        return tuple(tuple(np.argsort(-weights_K, kind="stable").tolist()) for weights_K in self._weights_LK)

    def __call__(self, slots: int) -> CachePlan:
        """The plan for texts of up to `slots` tokens.

        Raises:
          UserError: the budget is less than every head must have.
        """
        dtype = jnp.dtype(compute_dtype(self.config.dtype)).name if self.kv.dtype == "auto" else self.kv.dtype
        return CachePlan(slots, dtype, self._compression(slots) if self.compresses else None)

    def _compression(self, slots: int) -> Compression:
        kv, K = self.kv, self.config.kv_heads
        caps_L = spans(self.config, slots)
        whole = K * sum(caps_L)
        tokens = kv.budget_tokens
        wanted = int((kv.budget or 1) * whole) if tokens is None else K * sum(min(tokens, cap) for cap in caps_L)
        floor = self._floor
        least = least_total(caps_L, K, floor)
        if least == whole:  # no text of this length has anything to give up
            wanted = whole
        if wanted < least:
            key = f"kv.budget {kv.budget:g}" if tokens is None else f"kv.budget_tokens {tokens}"
            raise UserError(
                f"{key} leaves {wanted // (K * len(caps_L))} slots for a head of a text of {slots} tokens, and each needs "
                f"{floor} (kv.sinks + kv.recent, rounded up to {UNIT}): give at least "
                + (f"{np.ceil(1000 * least / whole) / 1000:g}" if tokens is None else f"{floor}")
            )
        # While something is compressed no buffer is as long as the text, if the budget can be spent without it.
        below_L = [cap - UNIT if cap == slots and cap - UNIT >= floor else cap for cap in caps_L]
        caps = below_L if K * sum(below_L) >= wanted else caps_L
        weights_LK = -np.sort(-self._weights_LK, axis=1)
        groups = allocate(weights_LK, caps, wanted, floor).groups
        window, pool = {"snapkv+ema": (kv.window, kv.pool), "tova": (1, 1)}.get(kv.policy, (None, 1))
        return Compression(
            groups=groups,
            decays=self._decays(),
            window=window,
            pool=pool,
            fixed={"streaming": "position", "random": "hash"}.get(kv.policy),
            recency=kv.policy == "snapkv+ema",
            sinks=kv.sinks,
            recent=kv.recent,
            ratio=(kv.budget or wanted / whole),
        )

    def _decays(self) -> tuple[tuple[float, ...], ...]:
        """The factor g of every head, in the order of `order`."""
        shape = self._weights_LK.shape
        fixed = {"tova": 0.0, "h2o": 1.0, "streaming": 0.0, "random": 0.0}.get(self.kv.policy, self.kv.decay)
        if fixed != "entropy":
            return ((fixed,) * shape[1],) * shape[0]
        if self.calibration is None:
            raise UserError("kv.decay entropy needs the heads' entropies: run `dantinox calibrate --run_dir … --what kv`")
        entropy_LK = by_key_head(self.calibration.signal("entropy"), shape[1], self.kv.grouping)
        decays_LK = 1 - 1 / (TAU * 2**entropy_LK)
        return tuple(tuple(decays[list(order)].tolist()) for decays, order in zip(decays_LK, self.order, strict=True))


def with_head_order(model: Transformer, order: HeadOrder) -> Transformer:
    """The same function with the key heads of each layer, and their query heads, in another order.

    `order[l]` lists the old numbers of layer l's heads.
    """
    if all(list(layer) == sorted(layer) for layer in order):
        return model
    model = nnx.merge(*nnx.split(model))
    for block, layer in zip(model.blocks, order, strict=True):
        attention, index_K = block.attention, jnp.asarray(layer)
        for name, by_output in (("qkv", True), ("gate", True), ("out", False)):
            linear = getattr(attention, name)
            if linear is not None:
                setattr(attention, name, _with_heads(linear, index_K, by_output))
    return model


def _with_heads(linear: Linear | NarrowLinear, index_K: jax.Array, by_output: bool) -> Linear | NarrowLinear:
    """A projection whose outputs or inputs, the key head their first axis, are taken in another order."""
    linear = nnx.merge(*nnx.split(linear))
    K, kernel = len(index_K), linear.kernel[...]
    if isinstance(linear, Linear):
        linear.kernel = nnx.Param(jnp.take(kernel, index_K, axis=1 if by_output else 0))
        return linear
    O, I = kernel.shape  # noqa: E741
    heads_first = kernel.reshape(K, -1, I) if by_output else kernel.reshape(O, K, -1)
    linear.kernel = nnx.Param(jnp.take(heads_first, index_K, axis=0 if by_output else 1).reshape(O, I))
    if by_output and linear.scale is not None:
        linear.scale = nnx.Param(jnp.take(linear.scale[...].reshape(K, -1), index_K, axis=0).reshape(-1))
    return linear

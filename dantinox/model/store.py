"""Keys and values in slots, in float32, bfloat16 or int8."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BITS = jnp.dtype(jnp.uint16)  # of bfloat16, where a platform likes it so


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"], meta_fields=[])
@dataclass(frozen=True)
class Store:
    """Keys and values of S slots.

    Keys lie with their slots side by side, `[B, K, H, S]`: scores are then a plain product q · k, which a CPU does in less than
    two thirds of the time of q · kᵀ. In int8 every key and every value has a scale of its own (its largest magnitude is 127),
    which is folded into the products. With dtype `BITS` they are bfloat16, kept as the integers of their bits.
    """

    k_BKHS: jax.Array
    v_BKSH: jax.Array
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None

    @classmethod
    def empty(cls, batch: int, heads: int, head_size: int, slots: int, dtype: DTypeLike) -> "Store":
        k, v = jnp.zeros((batch, heads, head_size, slots), dtype), jnp.zeros((batch, heads, slots, head_size), dtype)
        if dtype != jnp.int8:
            return cls(k, v)
        return cls(k, v, jnp.zeros((batch, heads, slots), jnp.float32), jnp.zeros((batch, heads, slots), jnp.float32))

    @classmethod
    def of(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, dtype: DTypeLike) -> "Store":
        """New keys and values, token t in slot t."""
        k, k_scale_BTK = stored(k_BTKH, dtype)
        v, v_scale_BTK = stored(v_BTKH, dtype)
        scales = [None if scale_BTK is None else scale_BTK.transpose(0, 2, 1) for scale_BTK in (k_scale_BTK, v_scale_BTK)]
        return cls(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), *scales)

    @property
    def slots(self) -> int:
        return self.v_BKSH.shape[2]

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8 or `BITS`."""
        return self.v_BKSH.dtype

    def wide(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[B, S, K, H]` as numbers of a dtype."""

        def numbers(x_BSKH: jax.Array, scale_BKS: jax.Array | None) -> jax.Array:
            if scale_BKS is not None:
                return (x_BSKH.astype(jnp.float32) * scale_BKS.transpose(0, 2, 1)[..., None]).astype(dtype)
            return (x_BSKH.view(jnp.bfloat16) if x_BSKH.dtype == BITS else x_BSKH).astype(dtype)

        keys_BSKH, values_BSKH = self.k_BKHS.transpose(0, 3, 1, 2), self.v_BKSH.swapaxes(1, 2)
        return numbers(keys_BSKH, self.k_scale_BKS), numbers(values_BSKH, self.v_scale_BKS)

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BTK: jax.Array) -> "Store":
        """Each new key and value in its slot (the K axis may be 1); a slot outside the store is dropped."""
        B, K = self.v_BKSH.shape[:2]
        rows, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None, :]
        k, k_scale_BTK = stored(k_BTKH, self.dtype)
        v, v_scale_BTK = stored(v_BTKH, self.dtype)
        keys = self.k_BKHS.at[rows, heads, :, slots_BTK].set(k, mode="drop")
        values = self.v_BKSH.at[rows, heads, slots_BTK].set(v, mode="drop")
        if self.k_scale_BKS is None or self.v_scale_BKS is None:
            return Store(keys, values)
        return Store(
            keys,
            values,
            self.k_scale_BKS.at[rows, heads, slots_BTK].set(k_scale_BTK, mode="drop"),
            self.v_scale_BKS.at[rows, heads, slots_BTK].set(v_scale_BTK, mode="drop"),
        )

    def join(self, other: "Store") -> "Store":
        """The slots of both, these first."""
        return self._by_slots(lambda axis, a, b: jnp.concatenate([a, b], axis=axis), other)

    def take(self, index_BKS: jax.Array) -> "Store":
        """The slots named by `index_BKS` (the K axis may be 1), in that order."""

        def taken(axis: int, leaf: jax.Array) -> jax.Array:
            index = index_BKS if leaf.ndim == 3 else jnp.expand_dims(index_BKS, 2 if axis == 3 else 3)
            return jnp.take_along_axis(leaf, index, axis=axis)

        return self._by_slots(taken)

    def where(self, chosen_BKS: jax.Array, other: "Store") -> "Store":
        """These slots where `chosen_BKS` (the K axis may be 1), else the other's."""

        def picked(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(chosen_BKS if a.ndim == 3 else jnp.expand_dims(chosen_BKS, 2 if axis == 3 else 3), a, b)

        return self._by_slots(picked, other)

    def _by_slots(self, function: Callable[..., jax.Array], *others: "Store") -> "Store":
        """`function(slot axis, leaf, …)` of every leaf."""
        axes = Store(3, 2, *(() if self.k_scale_BKS is None else (2, 2)))  # type: ignore[arg-type]
        return jax.tree.map(function, axes, self, *others)


def stored(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Vectors `[..., H]` as they are kept, and in int8 their scales `[...]`."""
    if dtype != jnp.int8:
        return x.astype(jnp.bfloat16).view(BITS) if dtype == BITS else x.astype(dtype), None
    return rounded(x.astype(jnp.float32))


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 vectors `[..., H]` in int8, symmetric, and the scale of each `[...]`: its largest magnitude becomes 127."""
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale

"""Storage of cached keys and values (or latents) in slots, as float32, bfloat16 or int8."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BITS = jnp.dtype(jnp.uint16)  # of bfloat16, where a platform likes it so
LEAST_PART, MOST_PARTS = 128, 4


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
    def empty(cls, batch: int, heads: int, sizes: tuple[int, int], slots: int, dtype: DTypeLike) -> Self:
        """Zeros; `sizes`: numbers in the key and in the value of a slot."""
        k, v = jnp.zeros((batch, heads, sizes[0], slots), dtype), jnp.zeros((batch, heads, slots, sizes[1]), dtype)
        if dtype != jnp.int8:
            return cls(k, v)
        return cls(k, v, jnp.zeros((batch, heads, slots), jnp.float32), jnp.zeros((batch, heads, slots), jnp.float32))

    @classmethod
    def of(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, dtype: DTypeLike) -> Self:
        """New keys and values, token t in slot t."""
        k, k_scale_BTK = stored(cls._key(k_BTKH, v_BTKH), dtype)
        v, v_scale_BTK = stored(v_BTKH, dtype)
        scales = [None if scale_BTK is None else scale_BTK.transpose(0, 2, 1) for scale_BTK in (k_scale_BTK, v_scale_BTK)]
        return cls(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), *scales)

    @staticmethod
    def _key(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        """The part of a key that is stored besides the value."""
        return k_BTKH

    @property
    def slots(self) -> int:
        return self.v_BKSH.shape[2]

    @property
    def heads(self) -> int:
        return self.v_BKSH.shape[1]

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the two vectors in a slot of a head."""
        return self.k_BKHS.shape[2], self.v_BKSH.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8 or `BITS`."""
        return self.v_BKSH.dtype

    def wide(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[B, S, K, H]` as numbers of a dtype."""
        keys_BSKH, values_BSKH = self.k_BKHS.transpose(0, 3, 1, 2), self.v_BKSH.swapaxes(1, 2)
        return numbers(keys_BSKH, self.k_scale_BKS, dtype), numbers(values_BSKH, self.v_scale_BKS, dtype)

    def scores(self, q_BKMH: jax.Array) -> jax.Array:
        """Scaled scores `[B, K, M, S]`, float32."""
        scores_BKMS = _product(q_BKMH, self.k_BKHS, jnp.float32) * q_BKMH.shape[-1] ** -0.5
        return scores_BKMS if self.k_scale_BKS is None else scores_BKMS * self.k_scale_BKS[:, :, None]

    def average(self, weights_BKMS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Values `[B, K, M, H]` by their weights."""
        if self.v_scale_BKS is not None:
            weights_BKMS = weights_BKMS * self.v_scale_BKS[:, :, None]
        return _product(weights_BKMS.astype(dtype), self.v_BKSH, dtype)

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BTK: jax.Array) -> Self:
        """Each new key and value in its slot (the K axis may be 1); a slot outside the store is dropped."""
        B, K = self.v_BKSH.shape[:2]
        rows, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None, :]
        k, k_scale_BTK = stored(self._key(k_BTKH, v_BTKH), self.dtype)
        v, v_scale_BTK = stored(v_BTKH, self.dtype)
        keys = self.k_BKHS.at[rows, heads, :, slots_BTK].set(k, mode="drop")
        values = self.v_BKSH.at[rows, heads, slots_BTK].set(v, mode="drop")
        if self.k_scale_BKS is None or self.v_scale_BKS is None:
            return type(self)(keys, values)
        return type(self)(
            keys,
            values,
            self.k_scale_BKS.at[rows, heads, slots_BTK].set(k_scale_BTK, mode="drop"),
            self.v_scale_BKS.at[rows, heads, slots_BTK].set(v_scale_BTK, mode="drop"),
        )

    def join(self, other: Self) -> Self:
        """The slots of both, these first."""
        return self._by_slots(lambda axis, a, b: jnp.concatenate([a, b], axis=axis), other)

    def take(self, index_BKS: jax.Array) -> Self:
        """The slots named by `index_BKS` (the K axis may be 1), in that order."""

        def taken(axis: int, leaf: jax.Array) -> jax.Array:
            index = index_BKS if leaf.ndim == 3 else jnp.expand_dims(index_BKS, 2 if axis == 3 else 3)
            return jnp.take_along_axis(leaf, index, axis=axis)

        return self._by_slots(taken)

    def where(self, chosen_BKS: jax.Array, other: Self) -> Self:
        """These slots where `chosen_BKS` (the K axis may be 1), else the other's."""

        def picked(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(chosen_BKS if a.ndim == 3 else jnp.expand_dims(chosen_BKS, 2 if axis == 3 else 3), a, b)

        return self._by_slots(picked, other)

    def _by_slots(self, function: Callable[..., jax.Array], *others: Self) -> Self:
        """`function(slot axis, leaf, …)` of every leaf."""
        axes = type(self)(3, 2, *(() if self.k_scale_BKS is None else (2, 2)))  # type: ignore[arg-type]
        return jax.tree.map(function, axes, self, *others)


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"], meta_fields=[])
@dataclass(frozen=True)
class LatentStore(Store):
    """Latents of S slots as the values, and as the keys the rotated part that follows the latent in every key.

    A latent and its rotated part are the one key of all query heads, and the latent alone is their value: the axis K is 1. In
    int8 the latent and the rotated part have a scale of their own.
    """

    @staticmethod
    def _key(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        return k_BTKH[..., v_BTKH.shape[-1] :]

    def wide(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Keys `[B, S, 1, R + P]` and values `[B, S, 1, R]` as numbers of a dtype."""
        rotated, latent = super().wide(dtype)
        return jnp.concatenate([latent, rotated], axis=-1), latent

    def scores(self, q_BKMC: jax.Array) -> jax.Array:
        """Scaled scores `[B, 1, M, S]`, float32."""
        rank = self.v_BKSH.shape[3]
        latent = _product(q_BKMC[..., :rank], self.v_BKSH, jnp.float32, transposed=True)
        rotated = _product(q_BKMC[..., rank:], self.k_BKHS, jnp.float32)
        if self.k_scale_BKS is not None and self.v_scale_BKS is not None:
            latent, rotated = latent * self.v_scale_BKS[:, :, None], rotated * self.k_scale_BKS[:, :, None]
        return (latent + rotated) * q_BKMC.shape[-1] ** -0.5


class StorePrefix(NamedTuple):
    """The first parts of a `SegmentedStore` store, as one."""

    parts: tuple[Store, ...]

    @property
    def ends(self) -> list[int]:
        """The slots up to each part's end."""
        return [*accumulate(part.slots for part in self.parts)]

    def scores(self, q_BKMH: jax.Array) -> jax.Array:
        """Scaled scores `[B, K, M, S]`, float32."""
        return jnp.concatenate([part.scores(q_BKMH) for part in self.parts], axis=-1)

    def average(self, weights_BKMS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Values `[B, K, M, H]` by their weights."""
        weights = jnp.split(weights_BKMS, self.ends[:-1], axis=-1)
        pairs = zip(self.parts, weights, strict=True)
        total: jax.Array = sum(part.average(weights_BKMS, dtype).astype(jnp.float32) for part, weights_BKMS in pairs)  # type: ignore[assignment]
        return total.astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["parts", "used_B"], meta_fields=[])
@dataclass(frozen=True)
class SegmentedStore:
    """A store in parts, of which a CPU reads those that any text has got to: slot s of them all holds position s.

    What is computed of a row is bit for bit the same however far the other rows have got: the parts are the same, sums are
    made part by part, and those behind its own text add zeros. For a `Full` cache alone.

    Attributes:
      used_B: the slots of each row up to the newest one that was written with the last `write`; 0 for a row that wrote nothing.
    """

    parts: tuple[Store, ...]
    used_B: jax.Array

    @classmethod
    def empty(cls, batch: int, slots: int, part: Callable[[int], Store]) -> "SegmentedStore":
        """Parts made by `part(slots)`: a half, a quarter and two eighths of all, none shorter than `LEAST_PART`."""
        ends = [slots]
        while len(ends) < MOST_PARTS and ends[0] // 2 >= LEAST_PART:
            ends.insert(0, ends[0] // 2)
        sizes = [end - first for first, end in zip([0, *ends], ends, strict=False)]
        return cls(tuple(map(part, sizes)), jnp.zeros(batch, jnp.int32))

    @property
    def slots(self) -> int:
        return sum(part.slots for part in self.parts)

    @property
    def heads(self) -> int:
        return self.parts[0].heads

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the two vectors in a slot of a head."""
        return self.parts[0].sizes

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8 or `BITS`."""
        return self.parts[0].dtype

    @property
    def _firsts(self) -> list[int]:
        return [sum(part.slots for part in self.parts[:number]) for number in range(len(self.parts))]

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BT1: jax.Array) -> "SegmentedStore":
        """Each new key and value in its slot; a slot outside the store is dropped."""

        def written(first: int, part: Store) -> Store:
            inside = (slots_BT1 >= first) & (slots_BT1 < first + part.slots)
            return part.write(k_BTKH, v_BTKH, jnp.where(inside, slots_BT1 - first, part.slots))

        used_B = jnp.max(jnp.where(slots_BT1 < self.slots, slots_BT1 + 1, 0), axis=(1, 2))
        return SegmentedStore(tuple(map(written, self._firsts, self.parts)), used_B)

    def in_use(self, function: Callable[[StorePrefix], Any]) -> Any:
        """The function of those parts that some row has got to; its outcome has the same shape for any of them."""
        number = jnp.sum(jnp.max(self.used_B) > jnp.asarray(self._firsts[1:], jnp.int32))
        fronts = [StorePrefix(self.parts[: count + 1]) for count in range(len(self.parts))]
        return jax.lax.switch(number, [partial(function, front) for front in fronts])


AnyStore = Store | SegmentedStore
OneStore = Store | StorePrefix  # whose scores are those of all its slots


def numbers(x_BSKH: jax.Array, scale_BKS: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """What is kept, as numbers of a dtype."""
    if scale_BKS is not None:
        return (x_BSKH.astype(jnp.float32) * scale_BKS.transpose(0, 2, 1)[..., None]).astype(dtype)
    return (x_BSKH.view(jnp.bfloat16) if x_BSKH.dtype == BITS else x_BSKH).astype(dtype)


def _product(x_BKMI: jax.Array, w_BKIO: jax.Array, out_dtype: DTypeLike, transposed: bool = False) -> jax.Array:
    """x · w for every row and head, w in whatever it is stored in; `transposed`: x · wᵀ of `w_BKOI`."""
    at_once, head_by_head = (partial(way, out_dtype=out_dtype, transposed=transposed) for way in (_at_once, _head_by_head))
    if w_BKIO.dtype == x_BKMI.dtype:
        return at_once(x_BKMI, w_BKIO)
    if w_BKIO.dtype == BITS:
        return head_by_head(x_BKMI, w_BKIO)
    return jax.lax.platform_dependent(x_BKMI, w_BKIO, cpu=head_by_head, default=at_once)


def _at_once(x_BKMI: jax.Array, w_BKIO: jax.Array, out_dtype: DTypeLike, transposed: bool) -> jax.Array:
    axes = "BKMI,BKOI->BKMO" if transposed else "BKMI,BKIO->BKMO"
    return jnp.einsum(axes, x_BKMI, w_BKIO.astype(x_BKMI.dtype), preferred_element_type=out_dtype)


def _head_by_head(x_BKMI: jax.Array, w_BKIO: jax.Array, out_dtype: DTypeLike, transposed: bool) -> jax.Array:
    """On a CPU the conversion then stays in the cores' caches: at once, it would make a wide copy of the whole layer.

    The barrier keeps XLA from moving it out of the loop to the same end.
    """
    B, K = w_BKIO.shape[:2]
    flat = x_BKMI.reshape(B * K, *x_BKMI.shape[2:]), w_BKIO.reshape(B * K, *w_BKIO.shape[2:])

    def head(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        w_IO = _wide(jax.lax.optimization_barrier(pair[1]))
        return pair[0].astype(jnp.float32) @ (w_IO.T if transposed else w_IO)

    out = jax.lax.map(head, flat)
    return out.reshape(B, K, *out.shape[1:]).astype(out_dtype)


def _wide(w: jax.Array) -> jax.Array:
    """int8, or bfloat16 by its bits, as float32."""
    return (w.astype(jnp.uint32) << 16).view(jnp.float32) if w.dtype == BITS else w.astype(jnp.float32)


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

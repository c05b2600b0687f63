"""Storage of cached keys and values (or latents) in slots, as float32, bfloat16, int8 or int4."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

BITS = jnp.dtype(jnp.uint16)  # of bfloat16, where a platform likes it so
PACKED = jnp.dtype(jnp.uint8)  # two int4 numbers in a byte
GROUP = 32  # numbers of an int4 vector that share a scale, at most
LEAST_PART, MOST_PARTS = 128, 4


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"], meta_fields=[])
@dataclass(frozen=True)
class Store:
    """Keys and values of S slots.

    Keys lie with their slots side by side, `[B, K, H, S]`: scores are then a plain product q · k, which a CPU does in less than
    two thirds of the time of q · kᵀ. In int8 every key and every value has a scale of its own (its largest magnitude is 127),
    which is folded into the products. With dtype `BITS` they are bfloat16, kept as the integers of their bits.

    With dtype `PACKED` they are int4: byte h of a vector holds number h in its lower and number H/2 + h in its upper four bits.
    `group_size` consecutive numbers share a scale and a minimum, bfloat16 kept as their bits. Those of keys are
    `[B, K, 2 H/32, S]`, those of values `[B, K, S, 2 H/32]`: the scales of all groups, then their minima.
    """

    k_BKHS: jax.Array
    v_BKSH: jax.Array
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None

    @classmethod
    def empty(cls, batch: int, heads: int, sizes: tuple[int, int], slots: int, dtype: DTypeLike) -> Self:
        """Zeros; `sizes`: numbers in the key and in the value of a slot."""
        packed = 2 if dtype == PACKED else 1
        k = jnp.zeros((batch, heads, sizes[0] // packed, slots), dtype)
        v = jnp.zeros((batch, heads, slots, sizes[1] // packed), dtype)
        if dtype == PACKED:
            k_groups, v_groups = (2 * size // group_size(size) for size in sizes)
            return cls(k, v, jnp.zeros((batch, heads, k_groups, slots), BITS), jnp.zeros((batch, heads, slots, v_groups), BITS))
        if dtype != jnp.int8:
            return cls(k, v)
        return cls(k, v, jnp.zeros((batch, heads, slots), jnp.float32), jnp.zeros((batch, heads, slots), jnp.float32))

    @classmethod
    def of(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, dtype: DTypeLike) -> Self:
        """New keys and values, token t in slot t."""
        k, k_scale_BTK = stored(cls._key(k_BTKH, v_BTKH), dtype)
        v, v_scale_BTK = stored(v_BTKH, dtype)
        keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        if k_scale_BTK is None or v_scale_BTK is None:
            return cls(keys, values)
        if dtype == PACKED:
            return cls(keys, values, k_scale_BTK.transpose(0, 2, 3, 1), v_scale_BTK.transpose(0, 2, 1, 3))
        return cls(keys, values, k_scale_BTK.transpose(0, 2, 1), v_scale_BTK.transpose(0, 2, 1))

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
        """Numbers in the two vectors in a slot of a head."""
        packed = 2 if self.dtype == PACKED else 1
        return packed * self.k_BKHS.shape[2], packed * self.v_BKSH.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8, `BITS` or `PACKED`."""
        return self.v_BKSH.dtype

    @property
    def payload_bytes(self) -> int:
        """Bytes of the keys and values, without their scales."""
        return self.k_BKHS.nbytes + self.v_BKSH.nbytes

    def wide(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[B, S, K, H]` as numbers of a dtype."""
        keys_BKHS = _wide(self.k_BKHS, self.k_scale_BKS, -2).astype(dtype)
        values_BKSH = _wide(self.v_BKSH, self.v_scale_BKS, -1).astype(dtype)
        return keys_BKHS.transpose(0, 3, 1, 2), values_BKSH.swapaxes(1, 2)

    def scores(self, q_BKMH: jax.Array) -> jax.Array:
        """Scaled scores `[B, K, M, S]`, float32."""
        return _product(q_BKMH, self.k_BKHS, self.k_scale_BKS, jnp.float32, slots=-1) * q_BKMH.shape[-1] ** -0.5

    def average(self, weights_BKMS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Values `[B, K, M, H]` by their weights."""
        return _product(weights_BKMS, self.v_BKSH, self.v_scale_BKS, dtype, slots=-2)

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BTK: jax.Array, row: jax.Array | None = None) -> Self:
        """Each new key and value in its slot (the K axis may be 1); a slot outside the store is dropped.

        With `row`, those of a single text are written into this row of the store.
        """
        B, K = self.v_BKSH.shape[:2]
        rows, heads = (jnp.arange(B) if row is None else row[None])[:, None, None], jnp.arange(K)[None, None, :]
        k, k_scale_BTK = stored(self._key(k_BTKH, v_BTKH), self.dtype)
        v, v_scale_BTK = stored(v_BTKH, self.dtype)
        keys = self.k_BKHS.at[rows, heads, :, slots_BTK].set(k, mode="drop")
        values = self.v_BKSH.at[rows, heads, slots_BTK].set(v, mode="drop")
        if self.k_scale_BKS is None or self.v_scale_BKS is None:
            return type(self)(keys, values)
        of_keys = (rows, heads, slice(None), slots_BTK) if self.dtype == PACKED else (rows, heads, slots_BTK)
        return type(self)(
            keys,
            values,
            self.k_scale_BKS.at[of_keys].set(k_scale_BTK, mode="drop"),
            self.v_scale_BKS.at[rows, heads, slots_BTK].set(v_scale_BTK, mode="drop"),
        )

    def of_row(self, row: jax.Array) -> Self:
        """One row of the store as a store of one row."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), self)

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
        scales = () if self.k_scale_BKS is None else (self.k_scale_BKS.ndim - 1, 2)
        axes = type(self)(3, 2, *scales)  # type: ignore[arg-type]
        return jax.tree.map(function, axes, self, *others)


@partial(jax.tree_util.register_dataclass, data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"], meta_fields=[])
@dataclass(frozen=True)
class LatentStore(Store):
    """Latents of S slots as the values, and as the keys the rotated part that follows the latent in every key.

    A latent and its rotated part are the one key of all query heads, and the latent alone is their value: the axis K is 1. In
    int8 and int4 the latent and the rotated part have scales of their own.
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
        rank = self.sizes[1]
        latent = _product(q_BKMC[..., :rank], self.v_BKSH, self.v_scale_BKS, jnp.float32, slots=-2, transposed=True)
        rotated = _product(q_BKMC[..., rank:], self.k_BKHS, self.k_scale_BKS, jnp.float32, slots=-1)
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


@partial(jax.tree_util.register_dataclass, data_fields=["parts", "used_B", "row"], meta_fields=[])
@dataclass(frozen=True)
class SegmentedStore:
    """A store in parts, of which a CPU reads those that any text has got to: slot s of them all holds position s.

    What is computed of a row is bit for bit the same however far the other rows have got: the parts are the same, sums are
    made part by part, and those behind its own text add zeros. For a `Full` cache alone.

    Attributes:
      used_B: the slots of each row up to the newest one that was written with the last `write`; 0 for a row that wrote nothing.
      row: the only row that is read, see `of_row`.
    """

    parts: tuple[Store, ...]
    used_B: jax.Array
    row: jax.Array | None = None

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
        """Numbers in the two vectors in a slot of a head."""
        return self.parts[0].sizes

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8, `BITS` or `PACKED`."""
        return self.parts[0].dtype

    @property
    def payload_bytes(self) -> int:
        """Bytes of the keys and values, without their scales."""
        return sum(part.payload_bytes for part in self.parts)

    @property
    def _firsts(self) -> list[int]:
        return [sum(part.slots for part in self.parts[:number]) for number in range(len(self.parts))]

    def of_row(self, row: jax.Array) -> "SegmentedStore":
        """One row as a store of one row, to be read: a part is copied when it is used."""
        return replace(self, row=row)

    def write(
        self, k_BTKH: jax.Array, v_BTKH: jax.Array, slots_BT1: jax.Array, row: jax.Array | None = None
    ) -> "SegmentedStore":
        """Each new key and value in its slot, as of `Store`."""

        def written(first: int, part: Store) -> Store:
            inside = (slots_BT1 >= first) & (slots_BT1 < first + part.slots)
            return part.write(k_BTKH, v_BTKH, jnp.where(inside, slots_BT1 - first, part.slots), row)

        used_B = jnp.max(jnp.where(slots_BT1 < self.slots, slots_BT1 + 1, 0), axis=(1, 2))
        used_B = used_B if row is None else self.used_B.at[row].set(used_B[0])
        return SegmentedStore(tuple(map(written, self._firsts, self.parts)), used_B)

    def in_use(self, function: Callable[[StorePrefix], Any]) -> Any:
        """The function of those parts that some row has got to; its outcome has the same shape for any of them."""
        used = jnp.max(self.used_B) if self.row is None else self.used_B[self.row]

        def front(count: int) -> Any:
            parts, row = self.parts[:count], self.row
            return function(StorePrefix(parts if row is None else tuple(part.of_row(row) for part in parts)))

        number = jnp.sum(used > jnp.asarray(self._firsts[1:], jnp.int32))
        return jax.lax.switch(number, [partial(front, count + 1) for count in range(len(self.parts))])


AnyStore = Store | SegmentedStore
OneStore = Store | StorePrefix  # whose scores are those of all its slots


def _product(
    x_BKMI: jax.Array,
    w_BKIO: jax.Array,
    scale: jax.Array | None,
    out_dtype: DTypeLike,
    *,
    slots: int,
    transposed: bool = False,
) -> jax.Array:
    """x · w for every row and head, w in whatever it is stored in; `transposed`: x · wᵀ of `w_BKOI`.

    Args:
      x_BKMI: queries, or weights of the slots.
      scale: the scales of w, one per slot in int8, and one per group of numbers in int4.
      out_dtype: of the result; weights of slots are rounded to it first.
      slots: the axis of the slots in w.
    """
    summed = (slots == -2) != transposed  # whether the sum is over slots
    if scale is not None and w_BKIO.dtype == jnp.int8 and summed:
        x_BKMI = x_BKMI * scale[:, :, None]
    x_BKMI = x_BKMI.astype(out_dtype) if summed else x_BKMI
    groups = scale if w_BKIO.dtype == PACKED else None
    at_once, head_by_head = (
        partial(way, out_dtype=out_dtype, axis=-3 - slots, transposed=transposed) for way in (_at_once, _head_by_head)
    )
    if w_BKIO.dtype == x_BKMI.dtype:
        out = at_once(x_BKMI, w_BKIO, groups)
    elif w_BKIO.dtype == BITS:
        out = head_by_head(x_BKMI, w_BKIO, groups)
    else:
        out = jax.lax.platform_dependent(x_BKMI, w_BKIO, groups, cpu=head_by_head, default=at_once)
    return out * scale[:, :, None] if scale is not None and w_BKIO.dtype == jnp.int8 and not summed else out


def _at_once(
    x_BKMI: jax.Array, w_BKIO: jax.Array, groups: jax.Array | None, out_dtype: DTypeLike, axis: int, transposed: bool
) -> jax.Array:
    axes = "BKMI,BKOI->BKMO" if transposed else "BKMI,BKIO->BKMO"
    w = w_BKIO.astype(x_BKMI.dtype) if groups is None else _wide(w_BKIO, groups, axis).astype(x_BKMI.dtype)
    return jnp.einsum(axes, x_BKMI, w, preferred_element_type=out_dtype)


def _head_by_head(
    x_BKMI: jax.Array, w_BKIO: jax.Array, groups: jax.Array | None, out_dtype: DTypeLike, axis: int, transposed: bool
) -> jax.Array:
    """On a CPU the conversion then stays in the cores' caches: at once, it would make a wide copy of the whole layer.

    The barrier keeps XLA from moving it out of the loop to the same end.
    """
    B, K = w_BKIO.shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(B * K, *leaf.shape[2:]), (x_BKMI, w_BKIO, groups))

    def head(parts: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        x_MI, stored_IO, scales = parts
        stored_IO, scales = jax.lax.optimization_barrier((stored_IO, scales))
        w_IO = _wide(stored_IO, scales, axis)
        return x_MI.astype(jnp.float32) @ (w_IO.T if transposed else w_IO)

    out = jax.lax.map(head, flat)
    return out.reshape(B, K, *out.shape[1:]).astype(out_dtype)


def _wide(w: jax.Array, scale: jax.Array | None, axis: int) -> jax.Array:
    """What is stored as float32; `axis`: of the numbers of a vector, which int8 scales do not have."""
    if w.dtype == PACKED:
        both = jnp.concatenate([w & 15, w >> 4], axis=axis).astype(jnp.float32)
        assert scale is not None
        spread = jnp.repeat(_wide(scale, None, axis), 2 * both.shape[axis] // scale.shape[axis], axis=axis)
        step, least = jnp.split(spread, 2, axis=axis)
        return both * step + least
    wide = (w.astype(jnp.uint32) << 16).view(jnp.float32) if w.dtype == BITS else w.astype(jnp.float32)
    return wide if scale is None else wide * jnp.expand_dims(scale, axis)


def stored(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Vectors `[..., H]` as they are kept, and their scales: `[...]` in int8, `[..., 2 H / group_size]` with `PACKED`."""
    if dtype == PACKED:
        return packed(x.astype(jnp.float32))
    if dtype != jnp.int8:
        return x.astype(jnp.bfloat16).view(BITS) if dtype == BITS else x.astype(dtype), None
    return rounded(x.astype(jnp.float32))


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 vectors `[..., H]` in int8, symmetric, and the scale of each `[...]`: its largest magnitude becomes 127."""
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def group_size(size: int) -> int:
    """How many numbers of an int4 vector of so many share a scale: 32, or the largest power of two that divides it.

    Raises:
      ValueError: the size is odd.
    """
    if size % 2:
        raise ValueError(f"int4 needs vectors with an even number of numbers, got {size}")
    return math.gcd(size, GROUP)


def packed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 vectors `[..., H]` in int4 as bytes `[..., H/2]`, and the bits of the groups' scales and minima `[..., 2 H/32]`.

    The least number of a group becomes 0 and the largest 15, up to the rounding of scale and minimum to bfloat16. But for that
    rounding no number is off by more than half a scale. See `Store` for the order of the numbers.
    """
    H = x.shape[-1]
    groups = x.reshape(*x.shape[:-1], -1, group_size(H))
    least, width = jnp.min(groups, axis=-1), jnp.ptp(groups, axis=-1)
    bits = stored(jnp.concatenate([jnp.where(width > 0, width, 1.0) / 15, least], axis=-1), BITS)[0]
    step, least = jnp.split(_wide(bits, None, -1)[..., None], 2, axis=-2)
    steps = jnp.clip(jnp.round((groups - least) / step), 0, 15).reshape(x.shape)
    low, high = jnp.split(steps.astype(PACKED), 2, axis=-1)
    return low | (high << 4), bits

"""Storage of cached keys and values (or latents) in slots, as float32, bfloat16, int8, int4 or
int2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# The dtype of bfloat16 numbers stored as integers of the same bits (see
# `Platform.bfloat16_cache_as_bits`).
BFLOAT16_BITS = jnp.dtype(jnp.uint16)
INT4_PACKED = jnp.dtype(jnp.uint8)  # two int4 numbers per byte
INT2_PACKED = jnp.dtype(jnp.uint32)  # sixteen int2 numbers per word
PACKED_BITS = {INT4_PACKED: 4, INT2_PACKED: 2}  # the bits of a number in each packed dtype
# The dtype in which numbers of another dtype are packed.
PACKED_DTYPES = {"int4": INT4_PACKED, "int2": INT2_PACKED}
MAX_GROUP_SIZE = 32  # largest number of elements of an int4 or int2 vector that share a scale
MIN_SEGMENT = 128
# Segments begin at multiples of this number of slots, so that no block of the prefix cache crosses
# the border between two.
SEGMENT_UNIT = 64


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Store:
    """Keys and values of S slots.

    Keys are stored as `[B, K, H, S]`, with the slots in the last axis, so that the scores q · k
    need no transpose. On a CPU, this product takes less than two thirds of the time of q · kᵀ.

    The dtype is one of:

    * float32 or bfloat16.
    * `BFLOAT16_BITS`: bfloat16, stored as integers of the same bits.
    * int8: every key and every value has a scale, which maps its largest magnitude to 127. The
      scales are applied to the operands or the results of the matrix multiplications.
    * `INT4_PACKED`: int4. Byte h of a vector holds number h in its lower four bits and number H/2 +
      h in its upper four bits.
    * `INT2_PACKED`: int2. Word h of a vector holds the sixteen numbers h, H/16 + h, 2 H/16 + h, …,
      the first one in its lowest two bits.

    In a packed dtype, `group_size` consecutive numbers share a scale and a minimum, both stored as
    bfloat16 bits. They share one array: first the scales of all groups, then their minima. Its
    shape is `[B, K, 2 H/32, S]` for keys and `[B, K, S, 2 H/32]` for values.
    """

    k_BKHS: jax.Array
    v_BKSH: jax.Array
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None

    @classmethod
    def empty(
        cls, batch: int, heads: int, sizes: tuple[int, int], slots: int, dtype: DTypeLike
    ) -> Self:
        """Returns a store of zeros; `sizes` are the sizes of a key and of a value."""
        numbers = numbers_per_element(dtype)
        k = jnp.zeros((batch, heads, sizes[0] // numbers, slots), dtype)
        v = jnp.zeros((batch, heads, slots, sizes[1] // numbers), dtype)
        if is_packed(dtype):
            k_groups, v_groups = (2 * size // group_size(size) for size in sizes)
            k_scales = jnp.zeros((batch, heads, k_groups, slots), BFLOAT16_BITS)
            return cls(k, v, k_scales, jnp.zeros((batch, heads, slots, v_groups), BFLOAT16_BITS))
        if dtype != jnp.int8:
            return cls(k, v)
        return cls(
            k,
            v,
            jnp.zeros((batch, heads, slots), jnp.float32),
            jnp.zeros((batch, heads, slots), jnp.float32),
        )

    @classmethod
    def from_kv(cls, k_BTKH: jax.Array, v_BTKH: jax.Array, dtype: DTypeLike) -> Self:
        """Returns a store that holds the key and value of token t in slot t."""
        k, k_scale_BTK = quantize(cls._key(k_BTKH, v_BTKH), dtype)
        v, v_scale_BTK = quantize(v_BTKH, dtype)
        keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        if k_scale_BTK is None or v_scale_BTK is None:
            return cls(keys, values)
        if is_packed(dtype):
            return cls(
                keys, values, k_scale_BTK.transpose(0, 2, 3, 1), v_scale_BTK.transpose(0, 2, 1, 3)
            )
        return cls(keys, values, k_scale_BTK.transpose(0, 2, 1), v_scale_BTK.transpose(0, 2, 1))

    @staticmethod
    def _key(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        """Returns the part of the keys that is stored in `k_BKHS`."""
        return k_BTKH

    @property
    def slots(self) -> int:
        return self.v_BKSH.shape[2]

    @property
    def heads(self) -> int:
        return self.v_BKSH.shape[1]

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the stored key and value of a slot and head."""
        numbers = numbers_per_element(self.dtype)
        return numbers * self.k_BKHS.shape[2], numbers * self.v_BKSH.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8, `BFLOAT16_BITS`, `INT4_PACKED` or `INT2_PACKED`."""
        return self.v_BKSH.dtype

    @property
    def payload_bytes(self) -> int:
        """Bytes of the keys and values, without their scales."""
        return self.k_BKHS.nbytes + self.v_BKSH.nbytes

    def dequantize(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values `[B, S, K, H]` in a floating-point dtype."""
        keys_BKHS = _dequantize(self.k_BKHS, self.k_scale_BKS, -2).astype(dtype)
        values_BKSH = _dequantize(self.v_BKSH, self.v_scale_BKS, -1).astype(dtype)
        return keys_BKHS.transpose(0, 3, 1, 2), values_BKSH.swapaxes(1, 2)

    def scores(self, q_BKMH: jax.Array) -> jax.Array:
        """Returns the scaled scores `[B, K, M, S]`, float32."""
        return (
            _matmul(q_BKMH, self.k_BKHS, self.k_scale_BKS, jnp.float32, slots=-1)
            * q_BKMH.shape[-1] ** -0.5
        )

    def weighted_values(self, weights_BKMS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the weighted sums of the values, `[B, K, M, H]`."""
        return _matmul(weights_BKMS, self.v_BKSH, self.v_scale_BKS, dtype, slots=-2)

    def write(
        self,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        slots_BTK: jax.Array,
        row: jax.Array | None = None,
    ) -> Self:
        """Writes each new key and value to its slot in `slots_BTK` (the K axis may be 1), unless
        the slot is out of range.

        With `row`, the inputs are one sequence, which is written to this row of the store.
        """
        B, K = self.v_BKSH.shape[:2]
        rows = (jnp.arange(B) if row is None else row[None])[:, None, None]
        heads = jnp.arange(K)[None, None, :]
        k, k_scale_BTK = quantize(self._key(k_BTKH, v_BTKH), self.dtype)
        v, v_scale_BTK = quantize(v_BTKH, self.dtype)
        keys = self.k_BKHS.at[rows, heads, :, slots_BTK].set(k, mode="drop")
        values = self.v_BKSH.at[rows, heads, slots_BTK].set(v, mode="drop")
        if self.k_scale_BKS is None or self.v_scale_BKS is None:
            return type(self)(keys, values)
        k_scale_index = (
            (rows, heads, slice(None), slots_BTK)
            if is_packed(self.dtype)
            else (rows, heads, slots_BTK)
        )
        return type(self)(
            keys,
            values,
            self.k_scale_BKS.at[k_scale_index].set(k_scale_BTK, mode="drop"),
            self.v_scale_BKS.at[rows, heads, slots_BTK].set(v_scale_BTK, mode="drop"),
        )

    def select_row(self, row: jax.Array) -> Self:
        """Returns one row as a store with a batch of one."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), self)

    def read_block(self, row: jax.Array | None, start: jax.Array, count: int) -> Self:
        """Returns `count` slots from `start` on, as a store; with `row`, those of this row only."""

        def read_leaf(axis: int, leaf: jax.Array) -> jax.Array:
            sizes = [leaf.shape[0] if row is None else 1, *leaf.shape[1:]]
            sizes[axis] = count
            return jax.lax.dynamic_slice(leaf, _corner(leaf, axis, row, start), sizes)

        return self.map_slots(read_leaf)

    def join(self, other: Self) -> Self:
        """Returns a store with the slots of this store, followed by the slots of the other
        store.
        """
        return self.map_slots(lambda axis, a, b: jnp.concatenate([a, b], axis=axis), other)

    def gather_slots(self, index_BKS: jax.Array) -> Self:
        """Returns the slots at `index_BKS` (the K axis may be 1), in that order."""

        def take_leaf(axis: int, leaf: jax.Array) -> jax.Array:
            return jnp.take_along_axis(leaf, _expand_slots(index_BKS, leaf, axis), axis=axis)

        return self.map_slots(take_leaf)

    def select_slots(self, chosen_BKS: jax.Array, other: Self) -> Self:
        """Returns a store with the slots of this store where `chosen_BKS` is true (the K axis may
        be 1), else of the other.
        """

        def select_leaf(axis: int, a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(_expand_slots(chosen_BKS, a, axis), a, b)

        return self.map_slots(select_leaf, other)

    def copy_slots(
        self, row: Any, slot: Any, source: Self, source_row: Any, source_slot: Any, count: int
    ) -> Self:
        """Returns the store with `count` slots of a row, from `slot` on, replaced by those of a row
        of another store.
        """

        def write_leaf(axis: int, leaf: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(leaf, part, _corner(leaf, axis, row, slot))

        return self.map_slots(write_leaf, source.read_block(source_row, source_slot, count))

    def map_slots(self, function: Callable[..., jax.Array], *others: Self) -> Self:
        """Applies `function(slot axis, leaf, …)` to every leaf."""
        scales = () if self.k_scale_BKS is None else (self.k_scale_BKS.ndim - 1, 2)
        axes = type(self)(3, 2, *scales)  # type: ignore[arg-type] # the slot axis of each leaf
        return jax.tree.map(function, axes, self, *others)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["k_BKHS", "v_BKSH", "k_scale_BKS", "v_scale_BKS"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LatentStore(Store):
    """Latents of S slots, for multi-head latent attention.

    All query heads share one key and one value, so the K axis is 1. The value is the latent, which
    is stored in `v_BKSH`. The key is the latent followed by a rotated part, and only the rotated
    part is stored in `k_BKHS`. With scales, the latent and the rotated part have separate ones.
    """

    @staticmethod
    def _key(k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        return k_BTKH[..., v_BTKH.shape[-1] :]

    def dequantize(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Returns keys `[B, S, 1, R + P]` and values `[B, S, 1, R]` in a floating-point dtype."""
        rotated, latent = super().dequantize(dtype)
        return jnp.concatenate([latent, rotated], axis=-1), latent

    def scores(self, q_BKMC: jax.Array) -> jax.Array:
        """Returns the scaled scores `[B, 1, M, S]`, float32."""
        rank = self.sizes[1]
        latent = _matmul(
            q_BKMC[..., :rank],
            self.v_BKSH,
            self.v_scale_BKS,
            jnp.float32,
            slots=-2,
            transposed=True,
        )
        rotated = _matmul(q_BKMC[..., rank:], self.k_BKHS, self.k_scale_BKS, jnp.float32, slots=-1)
        return (latent + rotated) * q_BKMC.shape[-1] ** -0.5


def _expand_slots(x_BKS: jax.Array, leaf: jax.Array, axis: int) -> jax.Array:
    """Returns x with an axis of length 1 for the head dimension of a leaf, if the leaf has one.

    Args:
      axis: the axis of the slots in the leaf.
    """
    if leaf.ndim == 3:
        return x_BKS
    return jnp.expand_dims(x_BKS, 2 if axis == 3 else 3)


def _corner(leaf: jax.Array, axis: int, row: Any, slot: Any) -> list[Any]:
    """Returns the index of the first element of a slot, which `axis` counts, in a row; None: in the
    first row.
    """
    corner: list[Any] = [0] * leaf.ndim
    corner[axis] = slot
    if row is not None:
        corner[0] = row
    return corner


class StorePrefix(NamedTuple):
    """The first segments of a `SegmentedStore`, read as one store."""

    segments: tuple[Store, ...]

    @property
    def ends(self) -> list[int]:
        """The index of the first slot after each segment."""
        return [*accumulate(segment.slots for segment in self.segments)]

    def scores(self, q_BKMH: jax.Array) -> jax.Array:
        """Returns the scaled scores `[B, K, M, S]`, float32."""
        return jnp.concatenate([segment.scores(q_BKMH) for segment in self.segments], axis=-1)

    def weighted_values(self, weights_BKMS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the weighted sums of the values, `[B, K, M, H]`."""
        weights = jnp.split(weights_BKMS, self.ends[:-1], axis=-1)
        sums = (
            segment.weighted_values(segment_weights, dtype).astype(jnp.float32)
            for segment, segment_weights in zip(self.segments, weights, strict=True)
        )
        total: jax.Array = sum(sums)  # type: ignore[assignment]
        return total.astype(dtype)


def segment_ends(slots: int) -> list[int]:
    """Returns the index of the first slot after each segment of a `SegmentedStore`.

    From `16 · MIN_SEGMENT` slots on, the segments end after about 1/64, 1/8, 1/2 and all of the
    slots, but the first has at least `MIN_SEGMENT` slots: most sequences are much shorter than a
    long context. Otherwise they end after 1/8, 1/4, 1/2 and all, without the ends before
    `MIN_SEGMENT`. All segments but the first begin at a multiple of `SEGMENT_UNIT`.

    Attention is compiled once for each number of segments that it may read, so more segments would
    take longer to compile.
    """
    if slots >= 16 * MIN_SEGMENT:
        ends = [max(MIN_SEGMENT, slots // 64), slots // 8, slots // 2]
    else:
        ends = [slots // part for part in (8, 4, 2) if slots // part >= MIN_SEGMENT]
    return [*(end // SEGMENT_UNIT * SEGMENT_UNIT for end in ends), slots]


@partial(
    jax.tree_util.register_dataclass, data_fields=["segments", "used_B", "row"], meta_fields=[]
)
@dataclass(frozen=True)
class SegmentedStore:
    """A store that is split into segments along the slots; attention on a CPU skips segments that
    no row has reached.

    Slot s of the whole store holds position s. The length of other rows does not change a single
    bit of the result of a row: sums are computed segment by segment, and segments after the end of
    the row add zeros. Only `FullLayer` uses this store.

    Attributes:
      used_B: for each row, the number of slots up to the newest slot of the last `write`; 0 if it
        wrote nothing to the row.
      row: the only row to read, see `select_row`; None: all rows.
    """

    segments: tuple[Store, ...]
    used_B: jax.Array
    row: jax.Array | None = None

    @classmethod
    def empty(cls, batch: int, slots: int, segment: Callable[[int], Store]) -> "SegmentedStore":
        """Returns an empty store; `segment(slots)` creates a segment, and `segment_ends` returns
        where each one ends.
        """
        ends = segment_ends(slots)
        sizes = [end - first for first, end in zip([0, *ends], ends, strict=False)]
        return cls(tuple(map(segment, sizes)), jnp.zeros(batch, jnp.int32))

    @property
    def slots(self) -> int:
        return sum(segment.slots for segment in self.segments)

    @property
    def heads(self) -> int:
        return self.segments[0].heads

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the stored key and value of a slot and head."""
        return self.segments[0].sizes

    @property
    def dtype(self) -> jnp.dtype:
        """float32, bfloat16, int8, `BFLOAT16_BITS`, `INT4_PACKED` or `INT2_PACKED`."""
        return self.segments[0].dtype

    @property
    def payload_bytes(self) -> int:
        """Bytes of the keys and values, without their scales."""
        return sum(segment.payload_bytes for segment in self.segments)

    @property
    def segments_by_start(self) -> list[tuple[int, Store]]:
        """The segments, each with the number of its first slot."""
        return [*zip(self._starts, self.segments, strict=True)]

    @property
    def _starts(self) -> list[int]:
        return [
            sum(segment.slots for segment in self.segments[:number])
            for number in range(len(self.segments))
        ]

    def select_row(self, row: jax.Array) -> "SegmentedStore":
        """Returns one row as a read-only store with a batch of one; a segment of the row is copied
        only when it is read.
        """
        return replace(self, row=row)

    def write(
        self,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        slots_BT1: jax.Array,
        row: jax.Array | None = None,
    ) -> "SegmentedStore":
        """Writes each new key and value to its slot, as `Store.write` does."""

        def write_segment(first: int, segment: Store) -> Store:
            inside = (slots_BT1 >= first) & (slots_BT1 < first + segment.slots)
            return segment.write(
                k_BTKH, v_BTKH, jnp.where(inside, slots_BT1 - first, segment.slots), row
            )

        used_B = jnp.max(jnp.where(slots_BT1 < self.slots, slots_BT1 + 1, 0), axis=(1, 2))
        used_B = used_B if row is None else self.used_B.at[row].set(used_B[0])
        return SegmentedStore(tuple(map(write_segment, self._starts, self.segments)), used_B)

    @property
    def used(self) -> jax.Array:
        """The number of slots up to the newest slot of the last `write`, of the longest row or of
        `row`.
        """
        return jnp.max(self.used_B) if self.row is None else self.used_B[self.row]

    def apply_to_used(self, function: Callable[[StorePrefix], Any]) -> Any:
        """Applies a function to the segments that some row has reached.

        The shape of its result must not depend on the number of segments.
        """

        def apply_to_prefix(count: int) -> Any:
            segments = self.segments[:count]
            row = self.row
            return function(
                StorePrefix(
                    segments
                    if row is None
                    else tuple(segment.select_row(row) for segment in segments)
                )
            )

        number = jnp.sum(self.used > jnp.asarray(self._starts[1:], jnp.int32))
        return jax.lax.switch(
            number, [partial(apply_to_prefix, count + 1) for count in range(len(self.segments))]
        )


AnyStore = Store | SegmentedStore
ContiguousStore = Store | StorePrefix  # stores whose scores cover all of their slots


def _matmul(
    x_BKMI: jax.Array,
    w_BKIO: jax.Array,
    scale: jax.Array | None,
    out_dtype: DTypeLike,
    *,
    slots: int,
    transposed: bool = False,
) -> jax.Array:
    """Multiplies x by w for every row and head; w may have any storage dtype.

    Args:
      x_BKMI: queries or attention weights.
      w_BKIO: keys or values; `[B, K, O, I]` if `transposed`.
      scale: the scales of w: one per slot in int8, one per group of numbers in int4 and int2.
      out_dtype: the dtype of the result; attention weights are cast to it before the
        multiplication.
      slots: the axis of the slots in w, −1 or −2.
      transposed: compute x · wᵀ.
    """
    sums_slots = (slots == -2) != transposed  # whether the matrix multiplication sums over slots
    element_axis = -3 - slots  # the other one of the last two axes, that of a key's elements
    if scale is not None and w_BKIO.dtype == jnp.int8 and sums_slots:
        x_BKMI = x_BKMI * scale[:, :, None]
    x_BKMI = x_BKMI.astype(out_dtype) if sums_slots else x_BKMI
    group_scales = scale if is_packed(w_BKIO.dtype) else None
    batched = partial(
        _batched_matmul, out_dtype=out_dtype, axis=element_axis, transposed=transposed
    )
    per_head = partial(
        _matmul_per_head, out_dtype=out_dtype, axis=element_axis, transposed=transposed
    )
    if w_BKIO.dtype == x_BKMI.dtype:
        out = batched(x_BKMI, w_BKIO, group_scales)
    elif w_BKIO.dtype == BFLOAT16_BITS:
        out = per_head(x_BKMI, w_BKIO, group_scales)
    else:
        out = jax.lax.platform_dependent(
            x_BKMI, w_BKIO, group_scales, cpu=per_head, default=batched
        )
    if scale is not None and w_BKIO.dtype == jnp.int8 and not sums_slots:
        out = out * scale[:, :, None]
    return out


def _batched_matmul(
    x_BKMI: jax.Array,
    w_BKIO: jax.Array,
    group_scales: jax.Array | None,
    out_dtype: DTypeLike,
    axis: int,
    transposed: bool,
) -> jax.Array:
    axes = "BKMI,BKOI->BKMO" if transposed else "BKMI,BKIO->BKMO"
    w = (w_BKIO if group_scales is None else _dequantize(w_BKIO, group_scales, axis)).astype(
        x_BKMI.dtype
    )
    return jnp.einsum(axes, x_BKMI, w, preferred_element_type=out_dtype)


def _matmul_per_head(
    x_BKMI: jax.Array,
    w_BKIO: jax.Array,
    group_scales: jax.Array | None,
    out_dtype: DTypeLike,
    axis: int,
    transposed: bool,
) -> jax.Array:
    """Multiplies head by head, so that the converted keys or values of a head fit into the cache of
    a CPU core.

    A batched multiplication would write a float32 copy of the whole layer. Without the barrier, XLA
    would hoist the conversion out of the loop and write this copy too.
    """
    B, K = w_BKIO.shape[:2]
    flat = jax.tree.map(
        lambda leaf: leaf.reshape(B * K, *leaf.shape[2:]), (x_BKMI, w_BKIO, group_scales)
    )

    def multiply_head(operands: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        x_MI, stored_IO, scales = operands
        stored_IO, scales = jax.lax.optimization_barrier((stored_IO, scales))
        w_IO = _dequantize(stored_IO, scales, axis)
        return x_MI.astype(jnp.float32) @ (w_IO.T if transposed else w_IO)

    out = jax.lax.map(multiply_head, flat)
    return out.reshape(B, K, *out.shape[1:]).astype(out_dtype)


def _dequantize(w: jax.Array, scale: jax.Array | None, axis: int) -> jax.Array:
    """Converts stored vectors to float32; `axis` is the axis of the vector elements, which int8
    scales do not have.
    """
    if w.dtype == BFLOAT16_BITS:
        return _bits_to_float32(w)
    if scale is None:
        return w.astype(jnp.float32)
    if not is_packed(w.dtype):
        return w.astype(jnp.float32) * jnp.expand_dims(scale, axis)
    numbers = unpack(w, axis).astype(jnp.float32)
    # One array holds the scales of all groups and then their minima. Each is repeated for the
    # elements of its group.
    repeats = 2 * numbers.shape[axis] // scale.shape[axis]
    step, minimum = jnp.split(jnp.repeat(_bits_to_float32(scale), repeats, axis=axis), 2, axis=axis)
    return numbers * step + minimum


def _bits_to_float32(bits: jax.Array) -> jax.Array:
    """Converts the bits of bfloat16 numbers to float32."""
    return (bits.astype(jnp.uint32) << 16).view(jnp.float32)


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Converts vectors `[..., H]` to a storage dtype and returns them with their scales.

    The scales are `[...]` in int8, `[..., 2 H / group_size]` in a packed dtype, and None otherwise.
    """
    if is_packed(dtype):
        return quantize_groups(x.astype(jnp.float32), dtype)
    if dtype != jnp.int8:
        return (
            x.astype(jnp.bfloat16).view(BFLOAT16_BITS)
            if dtype == BFLOAT16_BITS
            else x.astype(dtype)
        ), None
    return quantize_int8(x.astype(jnp.float32))


def quantize_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes float32 vectors `[..., H]` to symmetric int8; the scales `[...]` map the largest
    magnitude to 127.
    """
    largest = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def is_packed(dtype: DTypeLike) -> bool:
    """Returns whether an element of this dtype holds several numbers."""
    return jnp.dtype(dtype) in PACKED_BITS


def numbers_per_element(dtype: DTypeLike) -> int:
    """Returns how many numbers an element holds: 2 with `INT4_PACKED`, 16 with `INT2_PACKED`,
    otherwise 1.
    """
    dtype = jnp.dtype(dtype)
    return 8 * dtype.itemsize // PACKED_BITS[dtype] if dtype in PACKED_BITS else 1


def group_size(size: int) -> int:
    """Returns how many elements of a packed vector of this size share a scale.

    This is 32, or the largest power of two that divides the size if that is smaller.
    """
    return math.gcd(size, MAX_GROUP_SIZE)


def pack(numbers: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Packs integers `[..., H]` in [0, 2^bits) into elements of a packed dtype; `Store` documents
    their order.

    Raises:
      ValueError: H is not a multiple of the numbers per element.
    """
    dtype = jnp.dtype(dtype)
    count = numbers_per_element(dtype)
    if numbers.shape[-1] % count:
        raise ValueError(
            f"vectors of {numbers.shape[-1]} numbers cannot be packed {count} to an element"
        )
    parts = jnp.split(numbers.astype(dtype), count, axis=-1)
    packed = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        packed |= part << number * PACKED_BITS[dtype]
    return packed


def unpack(elements: jax.Array, axis: int) -> jax.Array:
    """Returns the integers of packed vectors, in the dtype of the elements; `axis` is the axis of
    the vector elements.
    """
    bits = PACKED_BITS[elements.dtype]
    count = numbers_per_element(elements.dtype)
    mask = (1 << bits) - 1
    middle = (elements >> number * bits & mask for number in range(1, count - 1))
    return jnp.concatenate([elements & mask, *middle, elements >> (count - 1) * bits], axis=axis)


def quantize_groups(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Quantizes float32 vectors `[..., H]` to a packed dtype.

    Returns the packed vectors, and the bfloat16 bits of scales and minima
    `[..., 2 H / group_size]`. The minimum of a group becomes 0 and its maximum the largest number:
    15 in int4, 3 in int2. The error of an element is at most half the scale, apart from the
    rounding of scale and minimum to bfloat16.
    """
    largest = (1 << PACKED_BITS[jnp.dtype(dtype)]) - 1
    groups = x.reshape(*x.shape[:-1], -1, group_size(x.shape[-1]))
    minimum, extent = jnp.min(groups, axis=-1), jnp.ptp(groups, axis=-1)
    scales = jnp.where(extent > 0, extent, 1.0) / largest
    bits = quantize(jnp.concatenate([scales, minimum], axis=-1), BFLOAT16_BITS)[0]
    step, minimum = jnp.split(_bits_to_float32(bits)[..., None], 2, axis=-2)  # as they will be read
    steps = jnp.clip(jnp.round((groups - minimum) / step), 0, largest).reshape(x.shape)
    return pack(steps, dtype), bits

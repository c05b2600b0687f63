"""The block formats of packed weights, those of GGUF files, and their conversion to float32 in JAX.

The block layouts are those of ggml (github.com/ggml-org/ggml, `src/ggml-common.h`). A row of
weights consists of whole blocks and is stored as uint8. `unpack` gives the same bits as
`dantinox.interop.gguf.ggml_types.dequantize`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Format(NamedTuple):
    """A block format.

    Attributes:
      number: the number of the format in the native kernel.
      values: the number of weights in a block.
      bytes: the size of a block.
      decode: converts blocks `[..., bytes]` of uint8 to float32 weights `[..., values]`.
    """

    number: int
    values: int
    bytes: int
    decode: Callable[[jax.Array], jax.Array]

    def row_bytes(self, size: int) -> int:
        """Returns the bytes of a row with `size` weights.

        Raises:
          ValueError: the row does not consist of whole blocks.
        """
        if size % self.values:
            raise ValueError(f"a row of {size} weights does not consist of blocks of {self.values}")
        return size // self.values * self.bytes


def unpack(kind: str, raw: jax.Array) -> jax.Array:
    """Converts packed rows to float32.

    Args:
      kind: a key of `FORMATS`.
      raw: rows of whole blocks, uint8 `[..., bytes]`.

    Returns:
      The weights `[..., values]`.
    """
    form = FORMATS[kind]
    blocks = raw.reshape(*raw.shape[:-1], -1, form.bytes)
    return form.decode(blocks).reshape(*raw.shape[:-1], -1)


def _float16(pair: jax.Array) -> jax.Array:
    """Converts the two bytes of a float16, `[..., 2]`, to float32 `[..., 1]`."""
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[..., None]


def _fields(packed: jax.Array, width: int) -> jax.Array:
    """Unpacks fields of `width` bits, the lowest first: `[..., n]` bytes →
    `[..., 8 / width, n]`.
    """
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None]
    return packed[..., None, :] >> shifts & jnp.uint8((1 << width) - 1)


def _groups(packed: jax.Array, size: int, width: int) -> jax.Array:
    """Splits bytes into groups of `size` and unpacks each group: `[..., n]` →
    `[..., fields, size]`, groups first.
    """
    fields = _fields(packed.reshape(*packed.shape[:-1], -1, size), width)
    return fields.reshape(*packed.shape[:-1], -1, size)


def _nibbles(packed: jax.Array) -> jax.Array:
    """Returns all low halves of the bytes, then all high halves: `[..., n]` → `[..., 2 n]`."""
    return _fields(packed, 4).reshape(*packed.shape[:-1], -1)


def _bits(packed: jax.Array) -> jax.Array:
    """Returns the bits of each byte in turn: `[..., n]` → `[..., 8 n]`."""
    return _fields(packed, 1).swapaxes(-1, -2).reshape(*packed.shape[:-1], -1)


def _subtract(values: jax.Array, offset: int) -> jax.Array:
    """Returns unsigned values minus an offset, in float32."""
    return (values.astype(jnp.int32) - offset).astype(jnp.float32)


def _five_bits(qs: jax.Array, qh: jax.Array) -> jax.Array:
    """Joins the lower four bits of values, two per byte, with their fifth bits, eight per byte."""
    return _nibbles(qs) | _bits(qh) << jnp.uint8(4)


def _q4_0(b: jax.Array) -> jax.Array:
    return _float16(b[..., :2]) * _subtract(_nibbles(b[..., 2:]), 8)


def _q4_1(b: jax.Array) -> jax.Array:
    return _float16(b[..., :2]) * _nibbles(b[..., 4:]) + _float16(b[..., 2:4])


def _q5_0(b: jax.Array) -> jax.Array:
    return _float16(b[..., :2]) * _subtract(_five_bits(b[..., 6:], b[..., 2:6]), 16)


def _q5_1(b: jax.Array) -> jax.Array:
    return _float16(b[..., :2]) * _five_bits(b[..., 8:], b[..., 4:8]) + _float16(b[..., 2:4])


def _q8_0(b: jax.Array) -> jax.Array:
    return _float16(b[..., :2]) * jax.lax.bitcast_convert_type(b[..., 2:], jnp.int8)


def _scales_and_minima(b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the scales and minima of the eight groups of a Q4_K or Q5_K block, each
    `[..., 8, 1]`.
    """
    # Groups 0 to 3 have their 6 bits in one byte. Groups 4 to 7 have the lower 4 bits in `rest`,
    # and the upper 2 bits above the 6 bits of another group.
    low, high, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    lowest_6_bits = jnp.uint8(63)
    lowest_4_bits = jnp.uint8(15)
    by_6, by_4 = jnp.uint8(6), jnp.uint8(4)  # shifts
    scales = jnp.concatenate([low & lowest_6_bits, rest & lowest_4_bits | low >> by_6 << by_4], -1)
    minima = jnp.concatenate([high & lowest_6_bits, rest >> by_4 | high >> by_6 << by_4], -1)
    return (_float16(b[..., :2]) * scales)[..., None], (_float16(b[..., 2:4]) * minima)[..., None]


def _q4_k(b: jax.Array) -> jax.Array:
    scales, minima = _scales_and_minima(b)
    return scales * _groups(b[..., 16:], 32, 4) - minima


def _q5_k(b: jax.Array) -> jax.Array:
    scales, minima = _scales_and_minima(b)
    return (
        scales * (_groups(b[..., 48:], 32, 4) | _fields(b[..., 16:48], 1) << jnp.uint8(4)) - minima
    )


def _q6_k(b: jax.Array) -> jax.Array:
    lead = b.shape[:-1]
    low = _groups(b[..., :128], 64, 4).reshape(*lead, 16, 16)
    high = _groups(b[..., 128:192], 32, 2).reshape(*lead, 16, 16)
    scales = _float16(b[..., 208:]) * jax.lax.bitcast_convert_type(b[..., 192:208], jnp.int8)
    return scales[..., None] * _subtract(low | high << jnp.uint8(4), 32)


def _tq1_0(b: jax.Array) -> jax.Array:
    """A byte is a fraction of 256. Multiplication by 3 moves the next digit in base 3 in front of
    the point.
    """

    def digits(part: jax.Array, count: int) -> jax.Array:
        powers = jnp.array([1, 3, 9, 27, 81][:count], jnp.uint8)[:, None]
        fractions = (part[..., None, :] * powers).astype(jnp.uint16)
        return (fractions * jnp.uint16(3) >> jnp.uint16(8)).reshape(*part.shape[:-1], -1)

    parts = digits(b[..., :32], 5), digits(b[..., 32:48], 5), digits(b[..., 48:52], 4)
    return _float16(b[..., 52:]) * _subtract(jnp.concatenate(parts, -1), 1)


def _tq2_0(b: jax.Array) -> jax.Array:
    return _float16(b[..., 64:]) * _subtract(
        _groups(b[..., :64], 32, 2).reshape(*b.shape[:-1], -1), 1
    )


FORMATS = {
    "Q8_0": Format(3, 32, 34, _q8_0),
    "Q4_0": Format(4, 32, 18, _q4_0),
    "Q4_1": Format(5, 32, 20, _q4_1),
    "Q5_0": Format(6, 32, 22, _q5_0),
    "Q5_1": Format(7, 32, 24, _q5_1),
    "Q4_K": Format(8, 256, 144, _q4_k),
    "Q5_K": Format(9, 256, 176, _q5_k),
    "Q6_K": Format(10, 256, 210, _q6_k),
    "TQ1_0": Format(12, 256, 54, _tq1_0),
    "TQ2_0": Format(13, 256, 66, _tq2_0),
    "INT4": Format(11, 64, 36, _q4_1),  # not a type of ggml: Q4_1 with 64 values per block
}

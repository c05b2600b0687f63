"""Positions: rotary angles, sinusoidal embeddings."""

import jax
import jax.numpy as jnp


def rotary_angles(positions_BT: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[B, T, H/2]` of position · theta^(−2i/H) (Su et al. 2021, eq. 15)."""
    frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (x_i, x_{i+H/2}) of every head: the half-split layout of Hugging Face checkpoints.

    `x_BTNH` may have any number of head axes between T and H.
    """
    extra = tuple(range(2, x_BTNH.ndim - 1))
    cos, sin = (jnp.expand_dims(part, extra).astype(jnp.float32) for part in angles)
    x = x_BTNH.astype(jnp.float32)
    # The two halves change places by a roll: cheaper than to split and join them, in the backward pass too.
    swapped = jnp.roll(x, x.shape[-1] // 2, axis=-1)
    rotated = x * jnp.concatenate([cos, cos], axis=-1) + swapped * jnp.concatenate([-sin, sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def sinusoidal(positions_BT: jax.Array, dim: int) -> jax.Array:
    """Embeddings `[B, T, D]`: sines in the even places, cosines in the odd (Vaswani et al. 2017, section 3.5)."""
    cos, sin = rotary_angles(positions_BT, dim, 10000.0)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions_BT.shape, dim)

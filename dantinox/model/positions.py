"""Position embeddings: rotary with its scaling rules, learned and sinusoidal."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config import ModelConfig, RopeScaling


def rotary_angles(
    positions_BT: jax.Array, head_size: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines `[B, T, H/2]` of the angles position · theta^(−2i/H) (Su et al.
    2021, eq. 15).

    With `scaling`, the frequencies and a gain come from `scaled_frequencies`.
    """
    if scaling is None:
        frequencies = theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
        angles = positions_BT[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)
    numbers, gain = scaled_frequencies(head_size, theta, scaling)
    angles = positions_BT[..., None].astype(jnp.float32) * numbers.astype(np.float32)
    return gain * jnp.cos(angles), gain * jnp.sin(angles)


def scaled_frequencies(
    head_size: int, theta: float, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """Returns the rotary frequencies `[H/2]` in float64 for a context `scaling.factor` times as
    long, and a gain.

    Cosines and sines are multiplied by the gain, so the scores are multiplied by its square. The
    scaling rules divide frequencies by `scaling.factor`:

    * `linear`: all frequencies (Chen et al. 2023).
    * `llama3`: frequencies with a wavelength above (original context) / `low_freq_factor`. It keeps
      frequencies with a wavelength below (original context) / `high_freq_factor`, and interpolates
      between the two wavelengths (Llama 3.1).
    * `yarn`: frequencies with fewer than `beta_slow` turns in the original context. It keeps
      frequencies with more than `beta_fast` turns, and interpolates linearly in the index between
      the two (Peng et al. 2023, sections 3.2 to 3.4). With `mscale` and `mscale_all_dim` the gain
      is the quotient of the gains for these two weights (DeepSeek-V2).
    * `longrope`: each frequency, but by a separate factor, with a gain similar to that of `yarn`
      (Ding et al. 2024, section 3.2).
    * `proportional`: the first frequencies, a fraction `share` of all. It sets the other
      frequencies to 0 (Gemma 4).
    """
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    slow = frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    if scaling.kind == "linear":
        return slow, 1.0
    if scaling.kind == "proportional":
        return (
            np.where(np.arange(head_size // 2) < int(scaling.share * head_size // 2), slow, 0.0),
            1.0,
        )
    if scaling.kind == "longrope":
        gain = scaling.attention_factor
        if gain is None:
            gain = math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))
        return frequencies / np.array(scaling.factors), gain
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unscaled_share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - unscaled_share) * slow + unscaled_share * frequencies, 1.0

    def index(turns: float) -> float:
        """Returns the real-valued index of the frequency that makes this number of turns in the
        original context.
        """
        return (
            head_size
            * math.log(scaling.original_context / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    unscaled_share = 1 - np.clip(
        (np.arange(head_size // 2) - first) / max(last - first, 1e-3), 0, 1
    )
    if scaling.attention_factor is not None:
        gain = scaling.attention_factor
    elif scaling.mscale and scaling.mscale_all_dim:
        gain = yarn_gain(scaling, scaling.mscale) / yarn_gain(scaling, scaling.mscale_all_dim)
    else:
        gain = yarn_gain(scaling)
    return (1 - unscaled_share) * slow + unscaled_share * frequencies, gain


def yarn_gain(scaling: RopeScaling, weight: float = 1.0) -> float:
    """Returns 0.1 · weight · ln factor + 1 (Peng et al. 2023, equation 22; DeepSeek-V2 adds the
    weight).
    """
    return 0.1 * weight * math.log(scaling.factor) + 1


def zigzag_chunks(devices: int) -> np.ndarray:
    """Returns the two chunks of a sequence of 2 n chunks that each of n devices holds, `[n, 2]`: d
    and 2 n - 1 - d.

    With a causal mask, all devices then have equally many pairs of a query and a key.
    """
    device_n = np.arange(devices)
    return np.stack([device_n, 2 * devices - 1 - device_n], axis=1)


def zigzag_positions(device: jax.Array | int, devices: int, length: int) -> jax.Array:
    """Returns the positions of the `length` tokens on one of n devices, int32, ascending: its
    `zigzag_chunks`.

    On a single device these are all positions in order; on several devices `length` must be even.
    """
    if devices == 1:
        return jnp.arange(length)
    chunks_2 = jnp.asarray(zigzag_chunks(devices), jnp.int32)[device]
    return (chunks_2[:, None] * (length // 2) + jnp.arange(length // 2)).reshape(length)


def packed_positions(config: ModelConfig, segments_BT: jax.Array, parallelism: Any) -> jax.Array:
    """Returns the positions of the tokens of packed documents, int32 `[B, T]`: 0, 1, 2 … in each
    segment, −1 for padding.

    If the model uses only differences of positions, the positions in the row, `[1, T]`, have the
    same effect at less cost.

    Args:
      segments_BT: segment numbers of consecutive tokens, less than the length of the row; −1 marks
        padding.
      parallelism: the `Parallelism` of the model. The tokens of a row may be spread over a ring of
        devices.
    """
    B, T = segments_BT.shape
    positions_1T = parallelism.local_positions(T)[None].astype(jnp.int32)
    absolute = config.position in ("learned", "sinusoidal") or config.query_scaling_beta
    if not absolute and config.experts is None:  # the load of experts excludes padding
        return positions_1T
    rows_B1 = jnp.arange(B)[:, None]
    S = T * parallelism.ring
    index_BT = jnp.where(segments_BT < 0, S, segments_BT)
    starts_BS = jnp.full((B, S + 1), S, jnp.int32).at[rows_B1, index_BT].min(positions_1T)
    received_BS = starts_BS
    for _ in range(parallelism.ring - 1):
        received_BS = parallelism.ring_shift(received_BS)
        starts_BS = jnp.minimum(starts_BS, received_BS)
    return jnp.where(segments_BT < 0, -1, positions_1T - starts_BS[rows_B1, index_BT])


def query_scaling(positions_BT: jax.Array, beta: float, context: int) -> jax.Array:
    """Returns 1 + β ln(1 + ⌊position / context⌋), float32 `[B, T]`, the factor of the queries
    (Llama 4).
    """
    return 1 + beta * jnp.log1p((jnp.clip(positions_BT, 0) // context).astype(jnp.float32))


def rotate(x_BTNH: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (x_i, x_{i+R/2}) of the first R elements of every head by angles
    `[B, T, R/2]`; usually R equals H.

    This is the half-split layout of Hugging Face checkpoints. `x_BTNH` may have any number of head
    axes between T and H.
    """
    R = 2 * angles[0].shape[-1]
    if x_BTNH.shape[-1] > R:
        return jnp.concatenate([rotate(x_BTNH[..., :R], angles), x_BTNH[..., R:]], axis=-1)
    extra = tuple(range(2, x_BTNH.ndim - 1))
    cos, sin = (jnp.expand_dims(part, extra).astype(jnp.float32) for part in angles)
    x = x_BTNH.astype(jnp.float32)
    # A roll swaps the two halves. It is cheaper than split and concatenate, also in the backward
    # pass.
    swapped = jnp.roll(x, x.shape[-1] // 2, axis=-1)
    rotated = x * jnp.concatenate([cos, cos], axis=-1) + swapped * jnp.concatenate(
        [-sin, sin], axis=-1
    )
    return rotated.astype(x_BTNH.dtype)


def sinusoidal(positions_BT: jax.Array, dim: int) -> jax.Array:
    """Returns embeddings `[B, T, D]`: sines at even indices, cosines at odd ones (Vaswani et al.
    2017, section 3.5).
    """
    cos, sin = rotary_angles(positions_BT, dim, 10000.0)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions_BT.shape, dim)

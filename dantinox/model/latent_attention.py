"""Multi-head latent attention (DeepSeek-AI 2024, section 2.1).

A cache stores only the latents. There are two forms of the computation. In a prefill or in
training, the keys and values of all heads are computed from the latents, as in the figures of the
paper. With a cache, the "absorbed" form applies the up-projection of the keys to the queries, and
the up-projection of the values to the output of attention. All heads then attend to the latents
themselves.

Shapes: B batch, T time, D model, N heads. Sizes: R latent, P rotated part of a key, H unrotated
part of a key, V value.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dantinox.config import ModelConfig
from dantinox.model.attention import Angles, Probe
from dantinox.model.layers import Linear, RMSNorm, Softmax, cast_tensordot
from dantinox.model.parallelism import Parallelism
from dantinox.model.positions import rotate, yarn_gain


class UpProjection(nnx.Module):
    """Computes the keys and values of every head from a latent; `kernel` is `[R, N, H + V]`."""

    def __init__(
        self,
        rank: int,
        heads: int,
        key_size: int,
        value_size: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.key_size = key_size
        self.dtype = dtype
        shape = rank, heads, key_size + value_size
        self.kernel = nnx.Param(rank**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, latent_BTR: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys `[B, T, N, H]` and values `[B, T, N, V]`."""
        both = cast_tensordot(latent_BTR, self.kernel[...], 1, self.dtype, self.dtype)
        return both[..., : self.key_size], both[..., self.key_size :]

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Maps queries to `[B, T, N, R]`.

        The dot product of a mapped query with a latent equals that of the query with the unrotated
        part of the key.
        """
        return self._by_head("BTNH,RNH->BTNR", q_BTNH, self.kernel[..., : self.key_size])

    def values(self, latent_BTNR: jax.Array) -> jax.Array:
        """Computes the weighted values `[B, T, N, V]` from the weighted latents."""
        return self._by_head("BTNR,RNV->BTNV", latent_BTNR, self.kernel[..., self.key_size :])

    def _by_head(self, axes: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.einsum(
            axes, x.astype(self.dtype), w.astype(self.dtype), preferred_element_type=jnp.float32
        )
        return y.astype(self.dtype)


class LatentAttention(nnx.Module):
    """Multi-head latent attention.

    `kv_a [D, R + P]` computes the latent and the rotated part of the key, which all heads share.
    `kv_b` computes the unrotated part of the keys, and the values. `q [D, N, H + P]` computes the
    queries from the input, or from a latent.

    Scores are divided by √(H + P). With `mscale_all_dim` they are also multiplied by
    `yarn_gain(scaling, mscale_all_dim)` squared (DeepSeek-V2).
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, dtype: DTypeLike, rngs: nnx.Rngs, out_gain: float
    ):
        latent = config.latent
        assert latent is not None
        D, N, H = config.dim, config.n_heads, config.head_size
        R, P, V, Q = latent.rank, latent.rotated_size, latent.value_size, latent.query_rank
        self.rank = R
        self.head_size = H
        self.rotated_size = P
        self.window = config.windows[layer]
        self.kv_a = Linear((D,), (R + P,), dtype=dtype, rngs=rngs)
        norm = partial(
            RMSNorm, epsilon=latent.norm_epsilon, zero_centered=config.norm_zero_centered
        )
        self.kv_norm = norm(R)
        self.kv_b = UpProjection(R, N, H, V, dtype=dtype, rngs=rngs)
        self.q_a = None if Q is None else Linear((D,), (Q,), dtype=dtype, rngs=rngs)
        self.q_norm = None if Q is None else norm(Q)
        self.q = Linear((Q or D,), (N, H + P), dtype=dtype, rngs=rngs)
        self.out = Linear((N, V), (D,), dtype=dtype, rngs=rngs, gain=out_gain)
        self.gate = Linear((D,), (N, V), dtype=dtype, rngs=rngs) if config.no_sink else None
        scaling = config.rope_scaling
        self.query_gain = (
            yarn_gain(scaling, scaling.mscale_all_dim) ** 2
            if scaling and scaling.mscale_all_dim
            else 1.0
        )
        self.cap = config.softcap
        self.sinks = nnx.Param(jnp.zeros(N, jnp.float32)) if config.sink_logits else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        angles: Angles,
        layer_cache: Any,
        probe: Probe | None,
        parallelism: Parallelism,
    ):
        assert angles is not None
        query_input = (
            x_BTD if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x_BTD))
        )
        q_BTNQ = self.q(parallelism.copy_to_tp(query_input))
        if self.query_gain != 1:
            q_BTNQ = (q_BTNQ * self.query_gain).astype(q_BTNQ.dtype)
        query_parts = q_BTNQ[..., : self.head_size], rotate(q_BTNQ[..., self.head_size :], angles)
        kv_BTC = self.kv_a(x_BTD)
        latent_BT1R = parallelism.copy_to_tp(self.kv_norm(kv_BTC[..., : self.rank])[:, :, None])
        shared_BT1P = parallelism.copy_to_tp(rotate(kv_BTC[:, :, None, self.rank :], angles))
        attend = self._plain if layer_cache.is_prefill else self._absorbed
        a_BTNV, layer_cache, probed = attend(
            *query_parts, latent_BT1R, shared_BT1P, positions_BT, layer_cache, probe
        )
        if self.gate is not None:
            a_BTNV = a_BTNV * jax.nn.sigmoid(self.gate(parallelism.copy_to_tp(x_BTD)))
        return self.out(a_BTNV, parallelism.reduce_from_tp), layer_cache, probed

    def _plain(
        self, q_BTNH, rotated_BTNP, latent_BT1R, shared_BT1P, positions_BT, layer_cache, probe
    ):
        """Attends with separate keys and values for every head."""
        # Rounded as in the cache, so that later calls, which read it, see the same keys and values.
        stored_kv = layer_cache.round_trip(
            jnp.concatenate([latent_BT1R, shared_BT1P], axis=-1), latent_BT1R
        )
        k_BT1C, v_BT1R = stored_kv
        k_BTNH, v_BTNV = self.kv_b(v_BT1R[:, :, 0])
        shared_BTNP = jnp.broadcast_to(k_BT1C[..., self.rank :], rotated_BTNP.shape)
        q_BTN1Q = jnp.concatenate([q_BTNH, rotated_BTNP], axis=-1)[:, :, :, None]
        k_BTNQ = jnp.concatenate([k_BTNH, shared_BTNP], axis=-1)
        softmax = self._softmax((-1, 1))  # N key heads of one query head
        inputs = q_BTN1Q, k_BTNQ, v_BTNV, positions_BT
        out, layer_cache, probed = layer_cache.attend(
            *inputs, self.window, probe, softmax, stored_kv
        )
        return out[:, :, :, 0], layer_cache, probed

    def _absorbed(
        self, q_BTNH, rotated_BTNP, latent_BT1R, shared_BT1P, positions_BT, layer_cache, probe
    ):
        """Attends with one key (latent and rotated part) and one value (latent) for all heads.

        The queries are rescaled, because `attend` divides by √(R + P) instead of √(H + P).
        """
        scale = ((self.rank + self.rotated_size) / (self.head_size + self.rotated_size)) ** 0.5
        q_BT1NC = (jnp.concatenate([self.kv_b.queries(q_BTNH), rotated_BTNP], axis=-1) * scale)[
            :, :, None
        ]
        k_BT1C = jnp.concatenate([latent_BT1R, shared_BT1P], axis=-1)
        softmax = self._softmax((1, -1))  # one key head of N query heads
        out, layer_cache, probed = layer_cache.attend(
            q_BT1NC, k_BT1C, latent_BT1R, positions_BT, self.window, probe, softmax
        )
        return self.kv_b.values(out[:, :, 0]), layer_cache, probed

    def _softmax(self, shape: tuple[int, int]) -> Softmax:
        """Returns the options of the softmax, with the sinks in the shape `[K, G]`."""
        return Softmax(self.cap, None if self.sinks is None else self.sinks[...].reshape(shape))

"""What training minimises: the cross-entropy of the next token, and a penalty that keeps the log-normaliser near zero."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.model import Transformer
from dantinox.model.moe import Routing
from dantinox.platform import platform_of

# Logits held at a time: 64 MiB in float32. More than that goes in chunks.
CHUNK_LOGITS = 1 << 24


class Sums(NamedTuple):
    """Float32 sums over the counted targets of a batch, or of a device's part of it; sums of parts add up to that of the whole.

    `nats`: −log p(target). `penalty`: squared log-normalisers (the z-loss of Chowdhery et al. 2022, section 5).
    `targets`: how many targets count. `routing`: where there are experts, the balance and z of the layers' mean, times the
    targets, and the rows of each expert of each layer `[L, E]`.
    """

    nats: jax.Array
    penalty: jax.Array
    targets: jax.Array
    routing: Routing | None = None


def sums(model: Transformer, batch: Any, *, rngs: nnx.Rngs | None = None, chunk_logits: int = CHUNK_LOGITS) -> Sums:
    """Runs the model over a batch and sums its losses.

    Args:
      batch: has `tokens_BT`, `targets_BT`, `segments_BT` (int32) and `mask_BT` (float32, 1 where a target counts).
      rngs: with a `dropout` stream, dropout is on.
      chunk_logits: a batch with more logits than this is scored in chunks of tokens, whose logits are computed again in
        the backward pass, so that `[B, T, V]` never exists. A chunk has at least the platform's `loss_tokens`.
    """
    B, T = batch.tokens_BT.shape
    # All rows stand at the same positions: one row of them is enough, and rotary angles are computed once.
    positions_1T = jnp.arange(T)[None]
    x_BTD, _, aux = model.hidden(batch.tokens_BT, positions_1T, segments_BT=batch.segments_BT, rngs=rngs)
    own = model.sharing.own  # of the tokens that several devices have
    x_ND, targets_N, mask_N = own(x_BTD.reshape(B * T, -1)), own(batch.targets_BT.reshape(-1)), own(batch.mask_BT.reshape(-1))
    size = max(platform_of(model.config.platform).loss_tokens, chunk_logits // model.config.vocab_size)
    if size >= len(x_ND):
        nats, penalty = _token_losses(model, None, x_ND, targets_N, mask_N)
    else:
        nats, penalty = _in_chunks(model, x_ND, targets_N, mask_N, size)
    targets, routing = jnp.sum(mask_N), aux.get("routing")
    if routing is not None:
        balance, z = (targets * model.sharing.enter(jnp.mean(part)) for part in (routing.balance, routing.z))
        routing = Routing(balance, z, routing.counts_E)
    return Sums(nats, penalty, targets, routing)


def _token_losses(
    model: Transformer, rounded_DV: jax.Array | None, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_NV = model.logits(x_ND, rounded_DV)
    normaliser_N = jax.nn.logsumexp(logits_NV, axis=-1)
    if platform_of(model.config.platform).name == "cpu":
        target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    else:  # the derivative of that is a scatter, for which the derivatives of all logits would be written once more, in float32
        target_N = jnp.sum(jnp.where(jnp.arange(logits_NV.shape[-1]) == targets_N[:, None], logits_NV, 0), axis=-1)
    return jnp.sum(mask_N * (normaliser_N - target_N)), jnp.sum(mask_N * jnp.square(normaliser_N))


def _in_chunks(
    model: Transformer, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """`_token_losses` over chunks of `size` tokens; the last chunk is filled up with tokens that do not count."""
    missing = -x_ND.shape[0] % size
    parts = tuple(
        jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, size, *a.shape[1:]) for a in (x_ND, targets_N, mask_N)
    )

    rounded_DV = None
    if platform_of(model.config.platform).name != "cpu":  # which multiplies in float32 what it then need not round
        rounded_DV = jax.lax.stop_gradient(model.output_weights().astype(model.dtype))  # once, not chunk by chunk

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, _token_losses(model, rounded_DV, *part)), None

    zero = jnp.zeros((), jnp.float32)
    total, _ = jax.lax.scan(add, (zero, zero), parts)
    return total

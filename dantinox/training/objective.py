"""Training objectives: next-token cross-entropy with z-loss, and direct preference optimization."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.model import Transformer
from dantinox.model.moe import Routing
from dantinox.platform import get_platform
from dantinox.text import Preferences

# Logits held at a time: 64 MiB in float32. More than that goes in chunks.
CHUNK_LOGITS = 1 << 24


class LossSums(NamedTuple):
    """Float32 sums over the counted targets of a batch, or of a device's part of it; sums of parts add up to that of the whole.

    `nats`: −log p(target). `penalty`: squared log-normalisers (the z-loss of Chowdhery et al. 2022, section 5).
    `targets`: how many targets count. `routing`: where there are experts, the balance and z, the mean of the layers with
    experts, times the targets, and the rows of each expert of each layer `[L, E]`.

    Of preferences `nats` are the losses of pairs and `targets` the pairs; `rewards` [2]: beta times by how much the preferred
    answer gained more than the other, and in how many pairs that is more than nothing.
    """

    nats: jax.Array
    penalty: jax.Array
    targets: jax.Array
    routing: Routing | None = None
    rewards: jax.Array | None = None


def count_targets(batch: Any) -> jax.Array:
    """What a mean loss is divided by: the targets of a batch that count, or the pairs that have some."""
    return jnp.sum(_pair_mask(batch)) if isinstance(batch, Preferences) else jnp.sum(batch.mask_BT)


def batch_losses(model: Transformer, batch: Any, beta: float, *, rngs: nnx.Rngs | None = None) -> LossSums:
    """`dpo_losses` of pairs, else `next_token_losses`."""
    return (
        dpo_losses(model, batch, beta, rngs=rngs)
        if isinstance(batch, Preferences)
        else next_token_losses(model, batch, rngs=rngs)
    )


def next_token_losses(
    model: Transformer, batch: Any, *, rngs: nnx.Rngs | None = None, chunk_logits: int = CHUNK_LOGITS
) -> LossSums:
    """Runs the model over a batch and sums its losses.

    Args:
      batch: has `tokens_BT`, `targets_BT`, `segments_BT` (int32) and `mask_BT` (float32, 1 where a target counts).
      rngs: with a `dropout` stream, dropout is on.
      chunk_logits: a batch with more logits than this is scored in chunks of tokens, whose logits are computed again in
        the backward pass, so that `[B, T, V]` never exists. A chunk has at least the platform's `min_loss_chunk_tokens`.
    """
    nats_N, squares_N, mask_N, aux = _per_token_losses(model, batch, rngs, chunk_logits)
    targets = jnp.sum(mask_N)
    return LossSums(jnp.sum(nats_N), jnp.sum(squares_N), targets, _routing(model, aux, targets))


def dpo_losses(model: Transformer, pairs: Preferences, beta: float, *, rngs: nnx.Rngs | None = None) -> LossSums:
    """−log σ(β (Δ_chosen − Δ_rejected)) summed over pairs, where Δ is by how much the log-probability of an answer is larger
    than under the model that training started from (Rafailov et al. 2023, "Direct Preference Optimization", equation 7).

    A pair without a counted target is none.
    """
    logp_P2, aux = _pair_logprobs_and_aux(model, pairs, rngs)
    pair_P = _pair_mask(pairs)
    gain_P2 = logp_P2 - pairs.reference_P2
    margin_P = beta * (gain_P2[:, 0] - gain_P2[:, 1])
    rewards = jnp.stack([jnp.sum(pair_P * margin_P), jnp.sum(pair_P * (margin_P > 0))])
    count = jnp.sum(pair_P)
    batch_losses = jnp.sum(pair_P * jax.nn.softplus(-margin_P))
    return LossSums(batch_losses, jnp.zeros(()), count, _routing(model, aux, count), rewards)


def _pair_mask(pairs: Preferences) -> jax.Array:
    """1 where there is a pair."""
    return jnp.any(pairs.mask_P2T > 0, axis=(1, 2)).astype(jnp.float32)


def pair_logprobs(model: Transformer, pairs: Preferences) -> jax.Array:
    """ln p of the counted targets of both answers of P pairs, summed: float32 [P, 2]; see `dpo_losses`."""
    return _pair_logprobs_and_aux(model, pairs, None)[0]


def _pair_logprobs_and_aux(model: Transformer, pairs: Preferences, rngs: nnx.Rngs | None) -> tuple[jax.Array, dict]:
    nats_N, _, _, aux = _per_token_losses(model, pairs.rows(), rngs, CHUNK_LOGITS)
    return -jnp.sum(nats_N.reshape(pairs.tokens_P2T.shape), axis=-1), aux


def _per_token_losses(
    model: Transformer, batch: Any, rngs: nnx.Rngs | None, chunk_logits: int
) -> tuple[jax.Array, jax.Array, jax.Array, dict]:
    """Of each token, or a device's own: −ln p of its target, the squared log-normaliser, both 0 where it does not count; the
    mask; and what the model says besides."""
    B, T = batch.tokens_BT.shape
    # All rows stand at the same positions: one row of them is enough, and rotary angles are computed once.
    positions_1T = jnp.arange(T)[None]
    x_BTD, _, aux = model.hidden(batch.tokens_BT, positions_1T, segments_BT=batch.segments_BT, rngs=rngs)
    own = model.parallelism.local_shard  # of the tokens that several devices have
    x_ND, targets_N, mask_N = own(x_BTD.reshape(B * T, -1)), own(batch.targets_BT.reshape(-1)), own(batch.mask_BT.reshape(-1))
    size = max(get_platform(model.config.platform).min_loss_chunk_tokens, chunk_logits // model.config.vocab_size)
    in_parts = _token_losses if size >= len(x_ND) else partial(_chunked_token_losses, size=size)
    nats_N, squares_N = in_parts(model, None, x_ND, targets_N, mask_N)
    return nats_N, squares_N, mask_N, aux


def _routing(model: Transformer, aux: dict, targets: jax.Array) -> Routing | None:
    routing: Routing | None = aux.get("routing")
    if routing is None:
        return None
    L, experts = model.config.num_blocks, model.config.experts
    routed = L - (len(experts.dense_layers) if experts else 0)  # of the others balance and z are zero
    balance, z = (targets * model.parallelism.copy_to_tp(jnp.sum(part) / routed) for part in (routing.balance, routing.z))
    return Routing(balance, z, routing.counts_E)


def _token_losses(
    model: Transformer, rounded_DV: jax.Array | None, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits_NV = model.logits(x_ND, rounded_DV)
    normaliser_N = jax.nn.logsumexp(logits_NV, axis=-1)
    if get_platform(model.config.platform).name == "cpu":
        target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    else:  # the derivative of that is a scatter, for which the derivatives of all logits would be written once more, in float32
        target_N = jnp.sum(jnp.where(jnp.arange(logits_NV.shape[-1]) == targets_N[:, None], logits_NV, 0), axis=-1)
    return mask_N * (normaliser_N - target_N), mask_N * jnp.square(normaliser_N)


def _chunked_token_losses(
    model: Transformer, _: None, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array, *, size: int
) -> tuple[jax.Array, jax.Array]:
    """`_token_losses` over chunks of `size` tokens; the last chunk is filled up with tokens that do not count."""
    missing = -x_ND.shape[0] % size
    parts = tuple(
        jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, size, *a.shape[1:]) for a in (x_ND, targets_N, mask_N)
    )

    rounded_DV = None
    if get_platform(model.config.platform).name != "cpu":  # which multiplies in float32 what it then need not round
        rounded_DV = jax.lax.stop_gradient(model.output_weights().astype(model.dtype))  # once, not chunk by chunk

    @jax.checkpoint
    def of_part(_, part):
        return None, _token_losses(model, rounded_DV, *part)

    _, (nats, squares) = jax.lax.scan(of_part, None, parts)
    return nats.reshape(-1)[: len(x_ND)], squares.reshape(-1)[: len(x_ND)]

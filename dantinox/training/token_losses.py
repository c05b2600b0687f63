"""Sums of losses over the target tokens of a batch: next-token cross-entropy with z-loss."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.model import Transformer
from dantinox.model.moe import Routing
from dantinox.model.positions import packed_positions
from dantinox.platform import get_platform

# Logits in memory at one time: 64 MiB in float32. Larger batches are scored in chunks.
MAX_CHUNK_LOGITS = 1 << 24
Logits = Callable[[jax.Array], jax.Array]  # from hidden states [N, D] to logits [N, V]


class LossSums(NamedTuple):
    """Float32 sums over the counted targets of a batch, or of a device's part of it. The sums of
    parts add up to the total.

    Attributes:
      nats: the loss before penalties: −log p(target), or the losses of the pairs in preference
        training.
      penalty: squared log-normalizers (the z-loss of Chowdhery et al. 2022, section 5).
      num_targets: number of counted targets or pairs, by which the sums are divided; see
        `Objective.divisor`.
      routing: for models with experts: balance loss and z-loss, each averaged over the layers with
        experts and multiplied by `num_targets`, and the number of tokens of each expert of each
        layer, `[L, E]`.
      metrics: the sums of `Objective.metrics`, in their order; None if the objective has none.
    """

    nats: jax.Array
    penalty: jax.Array
    num_targets: jax.Array
    routing: Routing | None = None
    metrics: jax.Array | None = None


def next_token_losses(
    model: Transformer,
    batch: Any,
    *,
    rngs: nnx.Rngs | None = None,
    chunk_logits: int = MAX_CHUNK_LOGITS,
) -> LossSums:
    """Runs the model over a batch and sums its losses.

    Args:
      batch: has `tokens_BT`, `targets_BT`, `segments_BT` (int32) and `mask_BT` (float32, 1 for
        counted targets).
      rngs: enables dropout if it has a `dropout` stream.
      chunk_logits: a batch with more logits than this is scored in chunks of tokens; see
        `map_chunks`.
    """
    nats_N, squares_N, mask_N, aux = per_token_losses(model, batch, rngs, chunk_logits)
    num_targets = jnp.sum(mask_N)
    return LossSums(
        jnp.sum(nats_N), jnp.sum(squares_N), num_targets, sum_routing(model, aux, num_targets)
    )


def per_token_losses(
    model: Transformer, batch: Any, rngs: nnx.Rngs | None, chunk_logits: int
) -> tuple[jax.Array, jax.Array, jax.Array, dict]:
    """Returns per-token losses of the batch, or of this device's tokens if devices share them.

    Returns:
      −ln p of the targets and squared log-normalizers, both 0 for uncounted targets; the mask; the
      model's auxiliary outputs.
    """
    x_ND, targets_N, mask_N, aux = hidden_states(model, batch, rngs)

    def losses(
        logits: Logits, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return token_losses(logits(x_ND), targets_N, mask_N, model.config.platform)

    nats_N, squares_N = map_chunks(losses, [model], chunk_logits, x_ND, targets_N, mask_N)
    return nats_N, squares_N, mask_N, aux


def hidden_states(
    model: Transformer, batch: Any, rngs: nnx.Rngs | None
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, Any]]:
    """Returns hidden states `[N, D]`, targets and mask of the N = B · T tokens, and the model's
    auxiliary outputs.

    If devices share the tokens, N is the number of this device's tokens.
    """
    B, T = batch.tokens_BT.shape
    positions_BT = packed_positions(model.config, batch.segments_BT, model.parallelism)
    x_BTD, _, aux = model.hidden(
        batch.tokens_BT, positions_BT, segments_BT=batch.segments_BT, rngs=rngs
    )
    # Selects this device's part of the tokens that several devices share.
    shard = model.parallelism.local_shard
    x_ND, targets_N, mask_N = (
        shard(x)
        for x in (x_BTD.reshape(B * T, -1), batch.targets_BT.reshape(-1), batch.mask_BT.reshape(-1))
    )
    return x_ND, targets_N, mask_N, aux


def sum_routing(model: Transformer, aux: dict, num_targets: jax.Array) -> Routing | None:
    """Returns `LossSums.routing` from the auxiliary outputs of the model."""
    routing: Routing | None = aux.get("routing")
    if routing is None:
        return None
    experts = model.config.experts
    dense = len(experts.dense_layers) if experts else 0
    routed = model.config.num_blocks - dense  # balance loss and z-loss of dense layers are zero
    balance, z = (
        num_targets * model.parallelism.copy_to_tp(jnp.sum(part) / routed)
        for part in (routing.balance, routing.z)
    )
    return Routing(balance, z, routing.counts_E)


def token_losses(
    logits_NV: jax.Array, targets_N: jax.Array, mask_N: jax.Array, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Returns −ln p of the targets and squared log-normalizers, both multiplied by the mask: `[N]`
    each.
    """
    normalizer_N = jax.nn.logsumexp(logits_NV, axis=-1)
    if get_platform(platform).name == "cpu":
        target_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    # The gradient of a gather is a scatter, which would write the gradients of all logits again in
    # float32.
    else:
        target_N = jnp.sum(
            jnp.where(jnp.arange(logits_NV.shape[-1]) == targets_N[:, None], logits_NV, 0), axis=-1
        )
    return mask_N * (normalizer_N - target_N), mask_N * jnp.square(normalizer_N)


def map_chunks(
    losses: Callable[..., tuple[jax.Array, ...]],
    models: Sequence[Transformer],
    chunk_logits: int,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns the losses of N tokens, computed in chunks if their logits are more than
    `chunk_logits`.

    The backward pass recomputes the logits of each chunk, so that they never exist all at once. A
    chunk has at least `min_loss_chunk_tokens` tokens, a number that depends on the platform. If the
    platform does not multiply in float32, the weights of the output layer are rounded once for all
    chunks.

    Args:
      losses: receives a function for each model, from hidden states to logits, and the `arrays`.
        Returns arrays with one number per token.
      models: the models whose logits the losses need. Their platform is that of the first.
      arrays: arrays with a leading axis of tokens. The last chunk is padded with zeros.
    """
    N = len(arrays[0])
    platform = get_platform(models[0].config.platform)
    size = max(
        platform.min_loss_chunk_tokens,
        chunk_logits // sum(model.config.vocab_size for model in models),
    )
    if size >= N:
        return losses(*(model.logits for model in models), *arrays)
    rounded = [
        (
            None
            if platform.name == "cpu"
            else jax.lax.stop_gradient(model.output_weights().astype(model.dtype))
        )
        for model in models
    ]
    logits = [
        partial(model.logits, cast_weights_DV=weights_DV)
        for model, weights_DV in zip(models, rounded, strict=True)
    ]
    parts = tuple(
        jnp.pad(a, [(0, -N % size)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, size, *a.shape[1:])
        for a in arrays
    )
    _, results = jax.lax.scan(
        jax.checkpoint(lambda _, part: (None, losses(*logits, *part))), None, parts
    )
    return tuple(result.reshape(-1)[:N] for result in results)

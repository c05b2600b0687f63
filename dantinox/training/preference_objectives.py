"""Losses of preference training: direct preference optimization."""

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.model import Transformer
from dantinox.text import Preferences
from dantinox.training.token_losses import MAX_CHUNK_LOGITS, LossSums, per_token_losses, sum_routing


def dpo_losses(model: Transformer, pairs: Preferences, beta: float, *, rngs: nnx.Rngs | None = None) -> LossSums:
    """Returns −log σ(β (Δ_chosen − Δ_rejected)) summed over pairs (Rafailov et al. 2023, DPO, equation 7).

    Δ is the log-probability of an answer minus its log-probability under the model that training started from. Pairs without a
    counted target are ignored. The metrics are the reward margin β (Δ_chosen − Δ_rejected) and whether it is positive.
    """
    logp_P2, aux = _pair_logprobs_and_aux(model, pairs, rngs)
    pair_P = pair_mask(pairs)
    gain_P2 = logp_P2 - pairs.reference_P2
    margin_P = beta * (gain_P2[:, 0] - gain_P2[:, 1])
    metrics = jnp.stack([jnp.sum(pair_P * margin_P), jnp.sum(pair_P * (margin_P > 0))])
    count = jnp.sum(pair_P)
    nats = jnp.sum(pair_P * jax.nn.softplus(-margin_P))
    return LossSums(nats, jnp.zeros(()), count, sum_routing(model, aux, count), metrics)


def pair_mask(pairs: Preferences) -> jax.Array:
    """Returns 1 for pairs with a counted target, else 0."""
    return jnp.any(pairs.mask_P2T > 0, axis=(1, 2)).astype(jnp.float32)


def pair_logprobs(model: Transformer, pairs: Preferences) -> jax.Array:
    """Returns ln p of both answers of P pairs, each summed over its counted targets: float32 `[P, 2]`; see `dpo_losses`."""
    return _pair_logprobs_and_aux(model, pairs, None)[0]


def _pair_logprobs_and_aux(model: Transformer, pairs: Preferences, rngs: nnx.Rngs | None) -> tuple[jax.Array, dict]:
    nats_N, _, _, aux = per_token_losses(model, pairs.rows(), rngs, MAX_CHUNK_LOGITS)
    return -jnp.sum(nats_N.reshape(pairs.tokens_P2T.shape), axis=-1), aux

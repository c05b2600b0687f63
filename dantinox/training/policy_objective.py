"""The objective `grpo`: the policy loss of sampled answers under a model."""

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import Config
from dantinox.model import Transformer
from dantinox.training.policy_loss import policy_sums
from dantinox.training.rollout_batch import Rollout, count_answers
from dantinox.training.token_losses import MAX_CHUNK_LOGITS, LossSums, per_token_losses, sum_routing


def grpo_losses(model: Transformer, rollout: Rollout, config: Config, *, rngs: nnx.Rngs | None = None) -> LossSums:
    nats_N, _, _, aux = per_token_losses(model, rollout.rows(), rngs, MAX_CHUNK_LOGITS)
    grpo, count = config.grpo, count_answers(rollout)
    sums = policy_sums(-nats_N.reshape(rollout.mask_RT.shape), rollout, grpo.options, grpo.kl_weight)
    metrics = jnp.stack([sums.kl, sums.clip_fraction, sums.ratio])
    return LossSums(sums.loss, jnp.zeros(()), count, sum_routing(model, aux, count), metrics)


def answer_logprobs(model: Transformer, rollout: Rollout, config: Config) -> jax.Array:
    """Returns ln p of the targets, float32 `[R, T]`; 0 where there is no target in the loss."""
    nats_N, _, _, _ = per_token_losses(model, rollout.rows(), None, MAX_CHUNK_LOGITS)
    return -nats_N.reshape(rollout.mask_RT.shape)

"""The objective `grpo`: the policy loss of sampled answers under a model."""

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import Config
from dantinox.model import Transformer
from dantinox.training.policy_loss import policy_sums
from dantinox.training.rollout import Rollout, count_answers
from dantinox.training.token_losses import (
    MAX_CHUNK_LOGITS,
    Logits,
    LossSums,
    hidden_states,
    map_chunks,
    sum_routing,
    token_losses,
)

POLICY_METRICS = ("kl", "clip_fraction", "ratio", "entropy")


def grpo_losses(
    model: Transformer, rollout: Rollout, config: Config, *, rngs: nnx.Rngs | None = None
) -> LossSums:
    """Returns the policy loss summed over answers, with the metrics `POLICY_METRICS`; see
    `policy_sums`.

    The policy is the softmax of the logits divided by `generation.temperature`. Filters such as
    top-p are not part of it. The entropy of an answer is the mean entropy of the policy at its
    tokens, in nats.
    """
    grpo = config.grpo
    count = count_answers(rollout)
    logp_RT, entropy_RT, aux = _policy(model, rollout, config.generation.temperature, rngs)
    sums = policy_sums(logp_RT, rollout, grpo.options, grpo.kl_weight)
    lengths_R = jnp.maximum(jnp.sum(rollout.mask_RT, axis=1), 1)
    entropy = jnp.sum(jnp.sum(entropy_RT, axis=1) / lengths_R)
    metrics = jnp.stack([sums.kl, sums.clip_fraction, sums.ratio, entropy])
    return LossSums(sums.loss, jnp.zeros(()), count, sum_routing(model, aux, count), metrics)


def answer_logprobs(model: Transformer, rollout: Rollout, config: Config) -> jax.Array:
    """Returns ln p of the targets under the policy of `grpo_losses`, float32 `[R, T]`; 0 outside of
    the answers.
    """
    return _policy(model, rollout, config.generation.temperature, None)[0]


def _policy(
    model: Transformer, rollout: Rollout, temperature: float, rngs: nnx.Rngs | None
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns ln p of the targets and the entropies of the policy, both `[R, T]` and 0 outside of
    the answers.

    The third value is the model's auxiliary outputs.
    """
    x_ND, targets_N, mask_N, aux = hidden_states(model, rollout.rows(), rngs)

    def scores(
        logits: Logits, x_ND: jax.Array, targets_N: jax.Array, mask_N: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits_NV = logits(x_ND) / temperature
        nats_N, _ = token_losses(logits_NV, targets_N, mask_N, model.config.platform)
        logits_NV = jax.lax.stop_gradient(logits_NV)
        entropy_N = jax.nn.logsumexp(logits_NV, axis=-1) - jnp.sum(
            jax.nn.softmax(logits_NV) * logits_NV, axis=-1
        )
        return -nats_N, mask_N * entropy_N

    logp_N, entropy_N = map_chunks(scores, [model], MAX_CHUNK_LOGITS, x_ND, targets_N, mask_N)
    shape = rollout.mask_RT.shape
    return logp_N.reshape(shape), entropy_N.reshape(shape), aux

"""Advantages of groups of answers, and losses of policy optimization as functions of
log-probabilities: REINFORCE, GRPO, Dr. GRPO, DAPO and GSPO.

The policy is the softmax of the logits divided by the sampling temperature. Filters such as top-p
are not part of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config.grpo_settings import Advantage, PolicyLoss
from dantinox.training.rollout import Rollout

STD_EPSILON = 1e-4  # added to the standard deviation of a group


class PolicySums(NamedTuple):
    """Float32 sums over the answers of a batch or of a part of it. The sums of parts add up to the
    total.

    Attributes:
      loss: Σ weight · loss over tokens; divided by `count_answers` of the batch, it is the loss.
      kl, clip_fraction, ratio: the sum over answers of the mean over tokens: of the KL divergence
        from the reference, of whether the ratio was clipped, and of the probability ratio.
    """

    loss: jax.Array
    kl: jax.Array
    clip_fraction: jax.Array
    ratio: jax.Array


def group_advantages(rewards_GN: np.ndarray, kind: Advantage) -> np.ndarray:
    """Returns the advantages of the N answers to each of G prompts, float32 `[G, N]`, computed in
    float64.

    mean: the reward minus the mean of its group (Liu et al. 2025, Dr. GRPO). std: that difference
    divided by the group's standard deviation (with N − 1) plus 1e-4 (Shao et al. 2024,
    DeepSeekMath, section 4.1.2). A group of equal rewards has advantages of exactly 0.
    """
    rewards_GN = np.asarray(rewards_GN, np.float64)
    advantages_GN = rewards_GN - rewards_GN.mean(axis=1, keepdims=True)
    # The rounded mean may differ from equal rewards.
    advantages_GN[rewards_GN.max(axis=1) == rewards_GN.min(axis=1)] = 0.0
    if kind == "std":
        advantages_GN /= rewards_GN.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON
    return advantages_GN.astype(np.float32)


def policy_sums(
    logp_RT: jax.Array, rollout: Rollout, options: PolicyLoss, kl_weight: float
) -> PolicySums:
    """Returns the policy loss of a batch, or of a part of its rows, and its metrics.

    With the ratio ρ = exp(logp − old) and the advantage A, the loss of a token is

        −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) + kl_weight · k3

    (DeepSeekMath, equation 21). For `ratio: sequence`, ρ is the geometric mean over the tokens of
    the answer (Zheng et al. 2025, GSPO, equations 5 and 7). k3 = exp(r) − r − 1 with r = reference
    − logp estimates the KL divergence from the reference (Schulman 2020; DeepSeekMath, equation 4).

    Args:
      logp_RT: ln p of the targets.
      options: ratio and clip range; `advantage` and `normalization` are already part of the batch.
      kl_weight: weight of k3. If it is 0, the metric `kl` is 0.
    """
    mask_RT = rollout.mask_RT
    # The weights of the mean over an answer.
    mean_RT = mask_RT / jnp.maximum(jnp.sum(mask_RT, axis=1, keepdims=True), 1)
    old_RT = jax.lax.stop_gradient(logp_RT) if rollout.old_RT is None else rollout.old_RT
    log_ratio_RT = (logp_RT - old_RT) * mask_RT
    if options.ratio == "sequence":
        log_ratio_RT = jnp.broadcast_to(
            jnp.sum(mean_RT * log_ratio_RT, axis=1, keepdims=True), mask_RT.shape
        )
    ratio_RT = jnp.exp(log_ratio_RT)
    advantage_R1 = rollout.advantages_R[:, None]
    low = 1 - options.clip_low if options.clip_low else 0.0
    high = 1 + options.clip_high if options.clip_high else jnp.inf
    clipped_RT = jnp.clip(ratio_RT, low, high)
    gain_RT, clipped_gain_RT = ratio_RT * advantage_R1, clipped_RT * advantage_R1
    loss_RT = -jnp.minimum(gain_RT, clipped_gain_RT)
    kl = jnp.zeros(())
    if kl_weight:
        difference_RT = (rollout.reference_RT - logp_RT) * mask_RT
        k3_RT = jnp.expm1(difference_RT) - difference_RT
        loss_RT = loss_RT + kl_weight * k3_RT
        kl = jnp.sum(mean_RT * k3_RT)
    return PolicySums(
        jnp.sum(rollout.weights_RT * loss_RT),
        kl,
        jnp.sum(mean_RT * (clipped_gain_RT < gain_RT)),
        jnp.sum(mean_RT * ratio_RT),
    )

"""Losses of preference training: DPO, IPO, ORPO and SimPO on pairs of answers, KTO on answers with
a label.

Symbols: x is a prompt, y_w the chosen (winning) and y_l the rejected (losing) answer, |y| the
number of tokens of an answer, π(y|x) its probability under the model, π_ref(y|x) under the model
that training started from, σ the logistic function. The sums ignore examples without a counted
target.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import Config
from dantinox.config.preference_defaults import USUAL_BETAS
from dantinox.model import Transformer
from dantinox.text import Batch, LabeledCompletions, Preferences
from dantinox.training.token_losses import MAX_CHUNK_LOGITS, LossSums, per_token_losses, sum_routing

PAIR_METRICS = ("reward_margin", "reward_accuracy")
KTO_METRICS = (
    "reward_desirable",
    "reward_undesirable",
    "share_desirable",
    "share_undesirable",
    "kl",
)
# The mean reward of desirable answers is their sum divided by the number of desirable answers.
KTO_METRIC_WEIGHTS = {
    "reward_desirable": "share_desirable",
    "reward_undesirable": "share_undesirable",
}
# The mean log-probability of a token is at most this, so that the odds of an answer stay finite: 1
# − p is exact to float32.
MAX_MEAN_LOGPROB = -(2.0**-23)

# Maps ln π of the chosen and the rejected answers `[P, 2]`, the pairs and the settings to losses
# and reward margins `[P]`.
PairLoss = Callable[[jax.Array, Preferences, Config], tuple[jax.Array, jax.Array]]


def dpo(logp_P2: jax.Array, pairs: Preferences, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns the losses −ln σ(m) and the margins m = β (Δ_w − Δ_l), where Δ = ln π(y|x) − ln
    π_ref(y|x).

    With label smoothing ε the loss is −(1 − ε) ln σ(m) − ε ln σ(−m). Sources: Rafailov et al. 2023,
    DPO, equation 7; Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO".
    """
    smoothing = config.training.label_smoothing
    margin_P = preference_beta(config) * _difference(logp_P2 - pairs.reference_P2)
    return (1 - smoothing) * jax.nn.softplus(-margin_P) + smoothing * jax.nn.softplus(
        margin_P
    ), margin_P


def ipo(logp_P2: jax.Array, pairs: Preferences, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns the losses (h − 1 / (2 τ))² and the margins τ h. h = Δ_w − Δ_l, where Δ = ln π(y|x) −
    ln π_ref(y|x).

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human
    Preferences", equation 17.
    """
    tau = preference_beta(config)
    h_P = _difference(logp_P2 - pairs.reference_P2)
    return jnp.square(h_P - 1 / (2 * tau)), tau * h_P


def orpo(logp_P2: jax.Array, pairs: Preferences, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns the losses −ln P_w − λ ln σ(m), and m = ln(P_w / (1 − P_w)) − ln(P_l / (1 − P_l)),
    where P = π(y|x)^(1/|y|).

    The first term is supervised fine-tuning on the chosen answer. Source: Hong et al. 2024, "ORPO:
    Monolithic Preference Optimization without Reference Model", equations 3, 4, 6 and 7.
    """
    mean_P2 = jnp.minimum(_mean_logprobs(logp_P2, pairs), MAX_MEAN_LOGPROB)
    margin_P = _difference(mean_P2 - jnp.log(-jnp.expm1(mean_P2)))
    return -mean_P2[:, 0] + preference_beta(config) * jax.nn.softplus(-margin_P), margin_P


def simpo(logp_P2: jax.Array, pairs: Preferences, config: Config) -> tuple[jax.Array, jax.Array]:
    """Returns the losses −ln σ(m − γ) and the margins m = r_w − r_l of the rewards r = β / |y| · ln
    π(y|x).

    Source: Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    equation 6.
    """
    margin_P = preference_beta(config) * _difference(_mean_logprobs(logp_P2, pairs))
    return jax.nn.softplus(config.training.simpo_margin - margin_P), margin_P


def pair_losses(
    loss: PairLoss,
    model: Transformer,
    pairs: Preferences,
    config: Config,
    rngs: nnx.Rngs | None = None,
) -> LossSums:
    """Sums the losses of pairs. The metrics are the sums of `PAIR_METRICS`: of the margins, and of
    the positive margins.
    """
    logp_P2, aux = _pair_logprobs_and_aux(model, pairs, rngs)
    loss_P, margin_P = loss(logp_P2, pairs, config)
    pair_P = pair_mask(pairs)
    count = jnp.sum(pair_P)
    metrics = jnp.stack([jnp.sum(pair_P * margin_P), jnp.sum(pair_P * (margin_P > 0))])
    return LossSums(
        jnp.sum(pair_P * loss_P), jnp.zeros(()), count, sum_routing(model, aux, count), metrics
    )


def kto_losses(
    model: Transformer, examples: LabeledCompletions, config: Config, rngs: nnx.Rngs | None = None
) -> LossSums:
    """Sums λ_D (1 − σ(β (r − z))) of desirable answers and λ_U (1 − σ(β (z − r))) of undesirable
    ones.

    r = ln π(y|x) − ln π_ref(y|x), and z = `kl_P`, which has no gradient; see `kl_sums`. The metrics
    are the sums of `KTO_METRICS`; a reward is β r. Source: Ethayarajh et al. 2024, "KTO: Model
    Alignment as Prospect Theoretic Optimization", section 4.1 (the loss λ_y − v).
    """
    t = config.training
    beta = preference_beta(config)
    logp_P, aux = _row_logprobs_and_aux(model, _conversation(examples, 0), rngs)
    reward_P = beta * (logp_P - examples.reference_P2[:, 0])
    example_P = example_mask(examples)
    desirable_P = examples.desirable_P.astype(jnp.float32)
    weight_P = jnp.where(examples.desirable_P, t.kto_desirable_weight, t.kto_undesirable_weight)
    sign_P = 2 * desirable_P - 1
    loss_P = weight_P * jax.nn.sigmoid(sign_P * (beta * examples.kl_P - reward_P))
    count = jnp.sum(example_P)
    sums = (
        desirable_P * reward_P,
        (1 - desirable_P) * reward_P,
        desirable_P,
        1 - desirable_P,
        examples.kl_P,
    )
    metrics = jnp.stack([jnp.sum(example_P * values_P) for values_P in sums])
    return LossSums(
        jnp.sum(example_P * loss_P), jnp.zeros(()), count, sum_routing(model, aux, count), metrics
    )


def kl_sums(model: Transformer, examples: LabeledCompletions) -> jax.Array:
    """Returns `[2]`: the sum of ln π(y'|x) − ln π_ref(y'|x), and the number of its terms.

    x is the prompt of an example and y' an answer to another prompt. The mean over a batch, or 0 if
    it is negative, estimates the KL divergence of the model from the reference model (Ethayarajh et
    al. 2024, section 4.1).
    """
    rows = _conversation(examples, 1)
    counted_P = example_mask(examples) * jnp.any(rows.mask_BT > 0, axis=1)
    logp_P, _ = _row_logprobs_and_aux(model, rows, None)
    return jnp.stack(
        [jnp.sum(counted_P * (logp_P - examples.reference_P2[:, 1])), jnp.sum(counted_P)]
    )


def pair_mask(pairs: Preferences) -> jax.Array:
    """Returns 1 for pairs with a counted target, else 0."""
    return jnp.any(pairs.mask_P2T > 0, axis=(1, 2)).astype(jnp.float32)


def example_mask(examples: LabeledCompletions) -> jax.Array:
    """Returns 1 for labeled completions with a counted target, else 0."""
    return jnp.any(examples.mask_P2T[:, 0] > 0, axis=1).astype(jnp.float32)


def pair_logprobs(model: Transformer, pairs: Preferences | LabeledCompletions) -> jax.Array:
    """Returns ln p of both conversations of P examples, each summed over its counted targets:
    float32 `[P, 2]`.
    """
    return _pair_logprobs_and_aux(model, pairs, None)[0]


def preference_beta(config: Config) -> float:
    """Returns `training.preference_beta`, or the usual value of the objective if that is null."""
    beta = config.training.preference_beta
    return USUAL_BETAS[config.training.objective] if beta is None else beta


def _difference(values_P2: jax.Array) -> jax.Array:
    return values_P2[:, 0] - values_P2[:, 1]


def _mean_logprobs(logp_P2: jax.Array, pairs: Preferences) -> jax.Array:
    """Returns the mean log-probability of the counted targets of each answer."""
    return logp_P2 / jnp.maximum(jnp.sum(pairs.mask_P2T, axis=-1), 1.0)


def _conversation(examples: LabeledCompletions, index: int) -> Batch:
    """Returns the first or second conversation of every example."""
    arrays = examples.tokens_P2T, examples.targets_P2T, examples.segments_P2T, examples.mask_P2T
    return Batch(*(array_P2T[:, index] for array_P2T in arrays))


def _pair_logprobs_and_aux(
    model: Transformer, pairs: Preferences | LabeledCompletions, rngs: nnx.Rngs | None
) -> tuple[jax.Array, dict]:
    logp_B, aux = _row_logprobs_and_aux(model, pairs.rows(), rngs)
    return logp_B.reshape(-1, 2), aux


def _row_logprobs_and_aux(
    model: Transformer, batch: Batch, rngs: nnx.Rngs | None
) -> tuple[jax.Array, dict]:
    """Returns ln p of the counted targets of each row, summed, float32 `[B]`, and the auxiliary
    outputs of the model.
    """
    nats_N, _, _, aux = per_token_losses(model, batch, rngs, MAX_CHUNK_LOGITS)
    return -jnp.sum(nats_N.reshape(batch.tokens_BT.shape), axis=-1), aux

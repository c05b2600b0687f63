"""The objective `distill`: the divergence between the token distributions of a frozen teacher and
of the trained model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config.distill_settings import DistillSection
from dantinox.model import Transformer
from dantinox.training.token_losses import (
    MAX_CHUNK_LOGITS,
    Logits,
    LossSums,
    hidden_states,
    map_chunks,
    sum_routing,
    token_losses,
)


class BatchWithTeacher(NamedTuple):
    """A batch with its teacher, inside a program.

    Attributes:
      batch: the tokens, as for `next_token_losses`.
      teacher: the teacher. Its vocabulary is that of the trained model, but may have another
        padding.
    """

    batch: Any
    teacher: Transformer


def distill_losses(
    model: Transformer,
    batch_with_teacher: BatchWithTeacher,
    settings: DistillSection,
    *,
    rngs: nnx.Rngs | None = None,
    chunk_logits: int = MAX_CHUNK_LOGITS,
) -> LossSums:
    """Sums (1 − w) · divergence + w · next-token loss over the counted targets of a batch, where w
    is `data_weight`.

    Neither all logits of the model nor all logits of the teacher exist at once: both are computed
    in chunks of tokens from the hidden states, and the backward pass computes them again. No
    gradient reaches the teacher, and it has no dropout.

    Args:
      rngs: as for `next_token_losses`.
      chunk_logits: a batch with more logits than this, of both models together, is scored in
        chunks.

    Returns:
      The sums. `metrics` are the sums of the divergences, see `token_divergence`, and of the
      next-token losses.
    """
    batch, teacher = batch_with_teacher
    x_ND, targets_N, mask_N, aux = hidden_states(model, batch, rngs)
    teacher_ND = jax.lax.stop_gradient(hidden_states(teacher, batch, None)[0])

    def losses(
        student_logits: Logits,
        teacher_logits: Logits,
        x_ND: jax.Array,
        teacher_ND: jax.Array,
        targets_N: jax.Array,
        mask_N: jax.Array,
    ) -> tuple[jax.Array, ...]:
        student_NV = student_logits(x_ND)
        teacher_NV = jax.lax.stop_gradient(teacher_logits(teacher_ND))
        divergence_N = mask_N * token_divergence(student_NV, teacher_NV, settings)
        return divergence_N, *token_losses(student_NV, targets_N, mask_N, model.config.platform)

    arrays = map_chunks(losses, [model, teacher], chunk_logits, x_ND, teacher_ND, targets_N, mask_N)
    divergence, nats, squares = (jnp.sum(array_N) for array_N in arrays)
    count = jnp.sum(mask_N)
    w = settings.data_weight
    metrics = jnp.stack([divergence, nats])
    return LossSums(
        (1 - w) * divergence + w * nats, squares, count, sum_routing(model, aux, count), metrics
    )


def token_divergence(
    student_NV: jax.Array, teacher_NV: jax.Array, settings: DistillSection
) -> jax.Array:
    """Returns τ² times the Kullback–Leibler divergence between the distributions of teacher and
    student, per token: `[N]`.

    With p = softmax(teacher / τ) and q = softmax(student / τ), the forward divergence is Σ p ln(p /
    q) and the reverse divergence Σ q ln(q / p). The factor τ² keeps the size of the gradients when
    the temperature τ changes (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network",
    section 2).

    With `top_k` the sums have k + 1 terms: the k most probable tokens of the teacher, and one for
    all other tokens, with the masses p_rest = Σ p and q_rest = Σ q of those tokens. This is the
    divergence of the distributions of a coarser variable, so it is not negative, at most the full
    divergence (data processing inequality), and 0 if the k + 1 masses are equal.

    Args:
      student_NV, teacher_NV: float32 logits. Padding that only one of the vocabularies has is
        ignored.
    """
    V = min(student_NV.shape[-1], teacher_NV.shape[-1])
    tau = settings.temperature
    student_NV, teacher_NV = student_NV[:, :V], teacher_NV[:, :V]
    log_q, log_p = jax.nn.log_softmax(student_NV / tau), jax.nn.log_softmax(teacher_NV / tau)
    if settings.top_k is not None and settings.top_k < V:
        log_q, log_p = _merge_rest(log_q, log_p, settings.top_k)
    if settings.divergence == "reverse_kl":
        log_q, log_p = log_p, log_q
    return tau**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def _merge_rest(log_q_NV: jax.Array, log_p_NV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities `[N, k + 1]` of the k tokens with the largest p, and of all other
    tokens together.

    The mass of the others is summed over them: 1 − Σ of the k largest would lose all digits of a
    small mass.
    """
    N = len(log_p_NV)
    _, top_NK = jax.lax.top_k(log_p_NV, k)
    rows_N1 = jnp.arange(N)[:, None]
    is_top_NV = jnp.zeros(log_p_NV.shape, bool).at[rows_N1, top_NK].set(True)

    def merge(log_NV: jax.Array) -> jax.Array:
        rest_N1 = jax.nn.logsumexp(jnp.where(is_top_NV, -jnp.inf, log_NV), axis=-1, keepdims=True)
        return jnp.concatenate([jnp.take_along_axis(log_NV, top_NK, axis=-1), rest_N1], axis=-1)

    return merge(log_q_NV), merge(log_p_NV)

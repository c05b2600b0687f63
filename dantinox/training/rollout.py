"""`Rollout`: the batch of policy optimization, sampled answers as rows of tokens.

Its fields for advantages and log-probabilities are filled by `rollout_batches`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.config.grpo_settings import Normalization
from dantinox.text import PADDING, Batch


class Rollout(NamedTuple):
    """R sequences of T tokens, each a prompt and one sampled answer. The N answers to a prompt are
    consecutive rows.

    Attributes:
      tokens_RT: int32 inputs.
      targets_RT: int32, the token after each input.
      segments_RT: int32 segments of attention, as in `Batch`.
      mask_RT: float32, 1 where the target is a token of the answer, else 0. A row of zeros is
        padding.
      weights_RT: float32 weight of each token in the loss; see `token_weights`.
      advantages_R: float32; see `dantinox.training.policy_loss.group_advantages`.
      reference_RT: float32 log-probabilities of the targets under the starting weights; zeros if
        `grpo.kl_weight` is 0.
      old_RT: float32 log-probabilities of the targets under the weights that sampled the answers.
        None: these are the current weights.
    """

    tokens_RT: jax.Array | np.ndarray
    targets_RT: jax.Array | np.ndarray
    segments_RT: jax.Array | np.ndarray
    mask_RT: jax.Array | np.ndarray
    weights_RT: jax.Array | np.ndarray
    advantages_R: jax.Array | np.ndarray
    reference_RT: jax.Array | np.ndarray
    old_RT: jax.Array | np.ndarray | None = None

    def rows(self) -> Batch:
        """Returns the sequences as a batch of next-token prediction."""
        return Batch(self.tokens_RT, self.targets_RT, self.segments_RT, self.mask_RT)  # type: ignore[arg-type]


def abstract_rollout(rows: int, length: int) -> Rollout:
    """Returns the shapes of a `Rollout` of `rows` sequences of `length` tokens, without
    `old_RT`.
    """
    int_RT: Any = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    float_RT: Any = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    float_R: Any = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return Rollout(
        tokens_RT=int_RT,
        targets_RT=int_RT,
        segments_RT=int_RT,
        mask_RT=float_RT,
        weights_RT=float_RT,
        advantages_R=float_R,
        reference_RT=float_RT,
    )


def count_answers(rollout: Rollout) -> jax.Array:
    """Returns the number of rows with an answer, which is the divisor of the loss."""
    return jnp.sum(jnp.any(rollout.mask_RT > 0, axis=1).astype(jnp.float32))


def answer_rows(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], length: int, pad_id: int = 0
) -> Batch:
    """Returns rows of `length` tokens for pairs of the tokens of a prompt and of its answer.

    All tokens of an answer are targets, including the token that ended it.
    """
    shape = len(pairs), length
    tokens_RT = np.full(shape, pad_id, np.int32)
    targets_RT = np.full(shape, pad_id, np.int32)
    segments_RT = np.full(shape, PADDING, np.int32)
    mask_RT = np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(pairs):
        ids = (*prompt, *answer)
        end = len(ids) - 1
        tokens_RT[row, :end] = ids[:-1]
        targets_RT[row, :end] = ids[1:]
        segments_RT[row, :end] = 0
        mask_RT[row, len(prompt) - 1 : end] = 1
    return Batch(tokens_RT, targets_RT, segments_RT, mask_RT)


def token_weights(
    mask_RT: np.ndarray, normalization: Normalization, max_new_tokens: int
) -> np.ndarray:
    """Returns float32 weights `[R, T]` with which the weighted sum over tokens, divided by the
    number of answers, is the loss.

    The number of answers A is the number of rows with a token. |o| is the length of an answer, Σ|o|
    that of all answers:

    - sequence: 1 / |o|; the loss is the mean over answers of the mean over tokens (DeepSeekMath,
      equation 21);
    - token: A / Σ|o|; the loss is the mean over all tokens of the batch (DAPO, equation 8);
    - constant: 1 / max_new_tokens; the loss is the mean over answers of the sum over tokens divided
      by a constant (Dr. GRPO).

    The weights are those of the whole batch. Sums over parts of it, such as accumulation steps or
    devices, are therefore exact.

    Args:
      mask_RT: 1 for tokens of the answers, else 0.
      max_new_tokens: maximum length of an answer, at least 1.
    """
    length_R1 = mask_RT.sum(axis=1, keepdims=True, dtype=np.float64)
    if normalization == "sequence":
        weight = 1 / np.maximum(length_R1, 1)
    elif normalization == "token":
        weight = np.count_nonzero(length_R1) / max(length_R1.sum(), 1)
    else:
        weight = 1 / max_new_tokens
    return (mask_RT * weight).astype(np.float32)

"""Draft tokens for speculative decoding: n-gram lookup in the text so far, caches for a draft model, and the decision when
drafts pay off.

A verification step runs the model on the newest token of a row and its draft tokens together. A draft token is accepted if it
equals the token that the sampler of the row draws at its position, so drafts never change the text (Leviathan et al. 2023,
with a deterministic draw; prompt lookup: Saxena 2023).
"""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.config import Config, ModelConfig
from dantinox.generation.cache_plan import CachePlan
from dantinox.generation.quantized_weights import MAX_MATVEC_ROWS, LowPrecisionExperts, LowPrecisionLinear
from dantinox.kernels import MAX_NATIVE_ROWS
from dantinox.model import CacheReport, KVCache, Transformer
from dantinox.model.packed import PackedParts, parameter_count
from dantinox.platform import get_platform

# The expected number of accepted draft tokens of a new row, and the weight of each new observation in its moving average.
FIRST_GAIN, GAIN_WEIGHT = 2.0, 0.4
# The cost of a row in a matrix multiplication on a CPU, and of a multiplication of a single row, in the time that it takes to
# read the weights for several rows; measured with SmolLM2-135M on two cores.
ROW_COST, SINGLE_ROW_COST = 0.058, 0.75
ACCELERATOR_COST, EXPERT_ROW_COST = 1.1, 0.7  # estimates
MAX_VERIFIED_ROWS = 1 << 16
MAX_BACKOFF = 63  # the most tokens that a row whose drafts fail decodes without a draft


class DraftPlan(NamedTuple):
    """The static arguments of a program with drafts.

    Attributes:
      draft_tokens: the number of draft tokens that one step can verify.
      ngram_size: the number of newest tokens that are searched in the text; None: a draft model generates the drafts.
      cost: the duration of a verification step, drafts included, in decode steps.
      cache: with a draft model, the plan of its cache.
    """

    draft_tokens: int
    ngram_size: int | None
    cost: float
    cache: CachePlan | None = None

    @property
    def width(self) -> int:
        """The tokens of a row in a verification step: the newest token and its drafts."""
        return self.draft_tokens + 1


def plan_drafts(
    config: Config, model: Transformer, rows: int, slots: int, draft_model: Transformer | None = None
) -> DraftPlan | None:
    """Returns the plan of a program for `rows` rows, or None if the settings or the model do not allow drafts.

    Args:
      slots: the length of the cache.
      draft_model: the model that generates the drafts, with `generation.speculation: draft`.
    """
    section = config.generation
    if section.speculation == "off" or not section.use_cache or config.kv.compresses:
        return None
    draft_tokens = min(section.draft_tokens, max_rows(model, rows) // rows - 1)
    if draft_tokens < 1:
        warnings.warn(
            f"generation.speculation is off: with {rows} rows and these weights, verifying several tokens saves no time",
            stacklevel=4,
        )
        return None
    cost = verification_cost(model.config, rows, draft_tokens)
    if draft_model is None:
        return DraftPlan(draft_tokens, section.ngram_size, cost)
    cost += (draft_tokens + 1) * parameter_count(draft_model) / parameter_count(model)
    cache = CachePlan(slots, jnp.dtype(draft_model.dtype).name, extra=draft_tokens)
    return DraftPlan(draft_tokens, None, cost, cache)


def max_rows(model: Transformer, rows: int) -> int:
    """Returns the largest number of rows that the projections multiply together and in the precision of a decode step.

    A decode step has `rows` rows. Low-precision projections multiply a few rows by native kernels together, or by XLA one by
    one, and more rows with bfloat16 activations.
    """
    limits = [MAX_VERIFIED_ROWS]
    for _, node in nnx.iter_graph(model):
        if isinstance(node, PackedParts) and node.bfloat16 and rows <= MAX_NATIVE_ROWS:
            limits.append(MAX_NATIVE_ROWS)
        if isinstance(node, LowPrecisionLinear | LowPrecisionExperts):
            smallest = node.min_bfloat16_rows
            if node.native and rows <= MAX_NATIVE_ROWS:
                limits.append(MAX_NATIVE_ROWS)
            elif rows <= MAX_MATVEC_ROWS if smallest is None else rows < smallest:
                limits.append(rows)
    return min(limits)


def verification_cost(config: ModelConfig, rows: int, draft_tokens: int) -> float:
    """Returns the estimated duration of a verification step in decode steps.

    On an accelerator, reading the weights takes much longer than multiplying a few rows. On a CPU, every row adds to the time.
    The rows of a mixture of experts mostly read different experts.
    """
    if config.experts is not None:
        return 1 + EXPERT_ROW_COST * draft_tokens
    if get_platform(config.platform).name != "cpu":
        return ACCELERATOR_COST
    decode_cost = 1 + ROW_COST * rows if rows > 1 else SINGLE_ROW_COST
    return (1 + ROW_COST * rows * (draft_tokens + 1)) / decode_cost


class DraftCounts(NamedTuple):
    """The number of draft tokens that were verified, and of those that were accepted."""

    drafted: int
    accepted: int


NO_DRAFTS = DraftCounts(0, 0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["limit_B", "gain_B", "backoff_B", "wait_B", "drafted_B", "accepted_B", "cached_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DraftState:
    """The drafts of each row so far.

    Attributes:
      limit_B: the most draft tokens per step; 0 for a row without drafts.
      gain_B: a moving average of the accepted draft tokens per verification.
      backoff_B: the tokens to wait after the last failure; `wait_B` of them remain.
      drafted_B, accepted_B: the draft tokens that were verified, and those that were accepted.
      cached_B: the tokens of the text in the cache of the draft model.
    """

    limit_B: jax.Array
    gain_B: jax.Array
    backoff_B: jax.Array
    wait_B: jax.Array
    drafted_B: jax.Array
    accepted_B: jax.Array
    cached_B: jax.Array


@partial(jax.jit, inline=True)
def init_drafts(limit_B: jax.Array, prefilled_B: jax.Array) -> DraftState:
    """Returns the state of new rows, of which the draft model has prefilled this number of tokens."""
    zero_B, gain_B = jnp.zeros_like(limit_B), jnp.full(limit_B.shape, FIRST_GAIN, jnp.float32)
    return DraftState(limit_B, gain_B, zero_B, zero_B, zero_B, zero_B, prefilled_B)


@partial(jax.tree_util.register_dataclass, data_fields=["target", "draft"], meta_fields=[])
@dataclass(frozen=True)
class PairedCache:
    """The cache of a model and the cache of its draft model, which hold the same rows."""

    target: KVCache
    draft: KVCache

    def report(self) -> CacheReport:
        """Returns the size of the cache of the model, as `KVCache.report` does."""
        return self.target.report()


def ngram_drafts(sequence_BS: jax.Array, position_B: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Searches the newest `size` tokens of each row in its earlier text; the tokens after the most recent match are the draft.

    If the match is closer than `count` tokens, the text between them is repeated.

    Args:
      sequence_BS: the tokens of each row; `position_B` is the position of the newest one.

    Returns:
      The drafts `[B, count]`, and the rows `[B]` with a match.
    """
    B, S = sequence_BS.shape
    index_S, rows_B1, position_B1 = jnp.arange(S), jnp.arange(B)[:, None], position_B[:, None]
    matches_BS = (index_S >= size - 1) & (index_S < position_B1)
    for back in range(size):
        newest_B1 = sequence_BS[rows_B1, jnp.maximum(position_B1 - back, 0)]
        matches_BS &= jnp.pad(sequence_BS[:, : S - back], ((0, 0), (back, 0))) == newest_B1
    end_B1 = jnp.max(jnp.where(matches_BS, index_S, -1), axis=1, keepdims=True)
    offset_Bk = jnp.arange(count) % jnp.maximum(position_B1 - end_B1, 1)
    return sequence_BS[rows_B1, end_B1 + 1 + offset_Bk], end_B1[:, 0] >= 0


def draft_lengths(drafts: DraftState, found_B: jax.Array, remaining_B: jax.Array, done_B: jax.Array) -> jax.Array:
    """Returns the draft tokens of each row to verify, 0 for rows without a draft; the last token of a row needs no draft."""
    length_B = jnp.minimum(drafts.limit_B, remaining_B - 1)
    return jnp.where(found_B & ~done_B & (drafts.wait_B == 0), jnp.maximum(length_B, 0), 0)


def pays_off(plan: DraftPlan, drafts: DraftState, length_B: jax.Array, done_B: jax.Array) -> jax.Array:
    """Returns whether verification is expected to decode more tokens per second of the whole batch than a decode step.

    A row that has waited after failures counts as if its draft just paid for itself in a batch of one.
    """
    gain_B = jnp.maximum(drafts.gain_B, plan.cost - 1)
    gain = jnp.sum(jnp.where(length_B > 0, jnp.minimum(gain_B, length_B), 0))
    return (length_B > 0).any() & (gain >= (plan.cost - 1) * jnp.sum(~done_B))


def record(plan: DraftPlan, drafts: DraftState, length_B: jax.Array, new_B: jax.Array) -> DraftState:
    """Returns the state after a step in which `length_B` draft tokens were verified and `new_B` tokens were generated.

    If the drafts of a row do not pay for their verification, it waits for twice as many tokens as after the last failure.
    """
    tried_B, accepted_B = length_B > 0, jnp.maximum(new_B - 1, 0)
    gain_B = jnp.where(tried_B, drafts.gain_B + GAIN_WEIGHT * (accepted_B - drafts.gain_B), drafts.gain_B)
    longer_B = jnp.minimum(2 * drafts.backoff_B + 1, MAX_BACKOFF)
    backoff_B = jnp.where(tried_B, jnp.where(gain_B < plan.cost - 1, longer_B, 0), drafts.backoff_B)
    return replace(
        drafts,
        gain_B=gain_B,
        backoff_B=backoff_B,
        wait_B=jnp.where(tried_B, backoff_B, jnp.maximum(drafts.wait_B - new_B, 0)),
        drafted_B=drafts.drafted_B + length_B,
        accepted_B=drafts.accepted_B + jnp.where(tried_B, accepted_B, 0),
    )

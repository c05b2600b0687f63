"""Speculative decoding: draft tokens from the text or a draft model, their verification, and the
decision when they pay off.

A verification step runs the model on the newest token of a row and its draft tokens together. A
draft token is accepted if it equals the token that the sampler of the row draws at its position, so
drafts never change the text (Leviathan et al. 2023, with a deterministic draw; prompt lookup:
Saxena 2023).
"""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import Config, ModelConfig
from dantinox.generation.decode.cache_plan import CachePlan, Caches
from dantinox.generation.decode.features import (
    Constants,
    Feature,
    Features,
    RowTokens,
    attach,
    find,
    with_feature,
)
from dantinox.generation.decode.generate_toks import (
    DecodeState,
    Emitted,
    StepLogits,
    Stepper,
    abstract_logits,
    emitted_buffers,
    forward_step,
    make_probe,
    prefill_prompts,
    sample_step,
)
from dantinox.generation.decode.low_precision_layers import (
    MAX_MATVEC_ROWS,
    LowPrecisionExperts,
    LowPrecisionLinear,
)
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.generation.decode.split_model import SplitModel
from dantinox.kernels import MAX_NATIVE_ROWS
from dantinox.model import KVCache, Transformer
from dantinox.model.packed import PackedParts, parameter_count
from dantinox.platform import get_platform
from dantinox.sampling import SamplingParams
from dantinox.sampling.entropy_router import combine_layers

FIRST_GAIN = 2.0  # the expected number of accepted draft tokens of a new row
GAIN_WEIGHT = 0.4  # of each new observation in the moving average of this number
# Matrix multiplications on a CPU, measured with SmolLM2-135M on two cores; 1 is the time for
# reading the weights.
ROW_COST = 0.058  # of each of several rows, in addition
SINGLE_ROW_COST = 0.75  # of one row in all
ACCELERATOR_COST = 1.1  # estimate: a verification step, in decode steps
EXPERT_ROW_COST = 0.7  # estimate: each draft token of a mixture of experts, in decode steps
MAX_VERIFIED_ROWS = 1 << 16  # bounds the memory of the logits
MAX_BACKOFF = 63  # the most tokens that a row whose drafts fail decodes without a draft


def plan_drafts(
    config: Config,
    model: Transformer,
    rows: int,
    slots: int,
    draft_model: Transformer | None = None,
) -> "DraftStepper | None":
    """Returns the stepper of a program for `rows` rows, or None if the settings or the model do not
    allow drafts.

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
            f"generation.speculation is off: with {rows} rows and these weights, verifying several"
            " tokens saves no time",
            stacklevel=4,
        )
        return None
    cost = verification_cost(model.config, rows, draft_tokens)
    if draft_model is None:
        return DraftStepper(draft_tokens, section.ngram_size, cost)
    # The draft model reads the newest tokens in one pass, and runs once per draft token.
    cost += (draft_tokens + 1) * parameter_count(draft_model) / parameter_count(model)
    cache = CachePlan(slots, jnp.dtype(draft_model.dtype).name, extra=draft_tokens)
    return DraftStepper(draft_tokens, None, cost, cache)


def max_rows(model: Transformer, rows: int) -> int:
    """Returns the most rows for which every projection reads its weights once and rounds as in a
    decode step of `rows` rows.

    Low-precision projections multiply a few rows together in native kernels, or one by one in XLA;
    they convert the activations of more rows to bfloat16.
    """
    limits = [MAX_VERIFIED_ROWS]
    for _, node in nnx.iter_graph(model):
        if isinstance(node, PackedParts) and node.bfloat16 and rows <= MAX_NATIVE_ROWS:
            limits.append(MAX_NATIVE_ROWS)
        if isinstance(node, LowPrecisionLinear | LowPrecisionExperts):
            smallest = node.min_bfloat16_rows
            most_one_by_one = MAX_MATVEC_ROWS if smallest is None else smallest - 1
            if node.native and rows <= MAX_NATIVE_ROWS:
                limits.append(MAX_NATIVE_ROWS)
            elif rows <= most_one_by_one:  # more rows save no time
                limits.append(rows)
    return min(limits)


def verification_cost(config: ModelConfig, rows: int, draft_tokens: int) -> float:
    """Returns the estimated duration of a verification step in decode steps.

    On an accelerator, reading the weights takes much longer than multiplying a few rows. On a CPU,
    every row adds to the time. The rows of a mixture of experts mostly read different experts.
    """
    if config.experts is not None:
        return 1 + EXPERT_ROW_COST * draft_tokens
    if get_platform(config.platform).name != "cpu":
        return ACCELERATOR_COST
    decode_cost = 1 + ROW_COST * rows if rows > 1 else SINGLE_ROW_COST
    return (1 + ROW_COST * rows * (draft_tokens + 1)) / decode_cost


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["limit_B", "gain_B", "backoff_B", "wait_B", "drafted_B", "accepted_B", "cached_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DraftState(Feature):
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

    def started(
        self, tokens_1S: jax.Array, length: jax.Array, generated: jax.Array
    ) -> "DraftState":
        # The draft model has read the prompt without its last token. It reads generated tokens
        # again.
        read_1 = jnp.asarray(length - generated - 1)[None]
        started: DraftState = init_drafts(self.limit_B, read_1)
        return started

    @property
    def counts(self) -> dict[str, jax.Array]:
        return {"draft_tokens": self.drafted_B, "accepted_draft_tokens": self.accepted_B}


@partial(jax.jit, inline=True)
def init_drafts(limit_B: jax.Array, prefilled_B: jax.Array) -> DraftState:
    """Returns the state of new rows, of which the draft model has prefilled this number of
    tokens.
    """
    zero_B = jnp.zeros_like(limit_B)
    return DraftState(
        limit_B=limit_B,
        gain_B=jnp.full(limit_B.shape, FIRST_GAIN, jnp.float32),
        backoff_B=zero_B,
        wait_B=zero_B,
        drafted_B=zero_B,
        accepted_B=zero_B,
        cached_B=prefilled_B,
    )


def ngram_drafts(
    sequence_BS: jax.Array, position_B: jax.Array, size: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Searches the newest `size` tokens of each row in its earlier text; the tokens after the most
    recent match are the draft.

    If the match is closer than `count` tokens, the text between them is repeated.

    Args:
      sequence_BS: the tokens of each row; `position_B` is the position of the newest one.

    Returns:
      The drafts `[B, count]`, and the rows `[B]` with a match.
    """
    B, S = sequence_BS.shape
    index_S = jnp.arange(S)
    rows_B1 = jnp.arange(B)[:, None]
    position_B1 = position_B[:, None]
    # Where the `size` tokens that end at a position equal the newest ones. The padding shifts the
    # text to the right by `back`.
    matches_BS = (index_S >= size - 1) & (index_S < position_B1)
    for back in range(size):
        newest_B1 = sequence_BS[rows_B1, jnp.maximum(position_B1 - back, 0)]
        matches_BS &= jnp.pad(sequence_BS[:, : S - back], ((0, 0), (back, 0))) == newest_B1
    end_B1 = jnp.max(jnp.where(matches_BS, index_S, -1), axis=1, keepdims=True)
    offset_Bk = jnp.arange(count) % jnp.maximum(position_B1 - end_B1, 1)
    return sequence_BS[rows_B1, end_B1 + 1 + offset_Bk], end_B1[:, 0] >= 0


def draft_lengths(
    drafts: DraftState, found_B: jax.Array, remaining_B: jax.Array, done_B: jax.Array
) -> jax.Array:
    """Returns how many draft tokens of each row to verify: 0 without a draft, and none for the last
    token of a row.
    """
    length_B = jnp.minimum(drafts.limit_B, remaining_B - 1)
    return jnp.where(found_B & ~done_B & (drafts.wait_B == 0), jnp.maximum(length_B, 0), 0)


def pays_off(cost: float, drafts: DraftState, length_B: jax.Array, done_B: jax.Array) -> jax.Array:
    """Returns whether verification is expected to decode more tokens per second of the whole batch
    than a decode step.

    A verification takes `cost` decode steps and gives 1 + gain tokens per row, so the gains of all
    rows must add up to cost − 1 per active row. After failures, a row gets another try: its gain
    counts as at least cost − 1. `cost` is that of the `DraftStepper`.
    """
    gain_B = jnp.maximum(drafts.gain_B, cost - 1)
    gain = jnp.sum(jnp.where(length_B > 0, jnp.minimum(gain_B, length_B), 0))
    return (length_B > 0).any() & (gain >= (cost - 1) * jnp.sum(~done_B))


def record(cost: float, drafts: DraftState, length_B: jax.Array, new_B: jax.Array) -> DraftState:
    """Returns the state after a step in which `length_B` draft tokens were verified and `new_B`
    tokens were generated.

    If the drafts of a row do not pay for their verification, it waits for twice as many tokens as
    after the last failure.
    """
    tried_B = length_B > 0
    accepted_B = jnp.maximum(new_B - 1, 0)
    gain_B = jnp.where(
        tried_B, drafts.gain_B + GAIN_WEIGHT * (accepted_B - drafts.gain_B), drafts.gain_B
    )
    longer_B = jnp.minimum(2 * drafts.backoff_B + 1, MAX_BACKOFF)
    backoff_B = jnp.where(tried_B, jnp.where(gain_B < cost - 1, longer_B, 0), drafts.backoff_B)
    return replace(
        drafts,
        gain_B=gain_B,
        backoff_B=backoff_B,
        wait_B=jnp.where(tried_B, backoff_B, jnp.maximum(drafts.wait_B - new_B, 0)),
        drafted_B=drafts.drafted_B + length_B,
        accepted_B=drafts.accepted_B + jnp.where(tried_B, accepted_B, 0),
    )


@dataclass(frozen=True)
class DraftStepper(Stepper):
    """Decodes up to `width` tokens of each row per step.

    Each step verifies the drafts of all rows, or decodes one token per row. Both kinds of steps
    share one loop over the positions for sampling, so equal logits give equal tokens. The constant
    `draft_model` is the model that generates the drafts, if there is one.

    Attributes:
      draft_tokens: the number of draft tokens that one step can verify.
      ngram_size: the number of newest tokens that are searched in the text; None: a draft model
        generates the drafts.
      cost: the duration of a verification step, drafts included, in decode steps.
      cache: with a draft model, the plan of its cache.
    """

    draft_tokens: int
    ngram_size: int | None
    cost: float
    cache: CachePlan | None = None

    @property
    def width(self) -> int:
        return self.draft_tokens + 1

    def features(
        self, tokens_BS: np.ndarray, length_B: np.ndarray, width_B: np.ndarray
    ) -> Features:
        # The prefill reads the prompt without its last token.
        return RowTokens(tokens_BS), init_drafts(
            np.asarray(width_B - 1, np.int32), np.asarray(length_B - 1, np.int32)
        )

    def models(self, constants: Constants) -> tuple[SplitModel, ...]:
        return () if self.cache is None else (constants["draft_model"],)

    def cache_plans(self, constants: Constants) -> list[tuple[ModelConfig, CachePlan]]:
        return [
            (split.merge(split.leaves).config, self.cache)
            for split in self.models(constants)
            if self.cache is not None
        ]

    def prefill(
        self,
        model: Transformer,
        prompt: tuple[jax.Array, jax.Array],
        plan: CachePlan,
        features: Features,
        constants: Constants,
        *,
        echo: bool,
    ) -> tuple[jax.Array | None, Caches]:
        x_PTD, caches = super().prefill(model, prompt, plan, features, constants, echo=echo)
        for split in self.models(constants):
            _, draft_cache = prefill_prompts(
                dequantize(split.merge(split.leaves)), prompt, self.cache
            )
            assert draft_cache is not None
            caches = (*caches, draft_cache)
        return x_PTD, caches

    def decode(
        self,
        model: Transformer,
        caches: Caches,
        state: DecodeState,
        params: SamplingParams,
        steps: jax.Array,
        constants: Constants,
        chunk: int,
    ) -> tuple[Caches, DecodeState, Emitted]:
        B = state.token_B.shape[0]
        model = attach(state.features, self.weights(model, B), constants)
        draft_model = next(
            (self.weights(split.merge(split.leaves), B) for split in self.models(constants)), None
        )
        loop = _DraftLoop(self, model, draft_model, params)
        logits = jax.tree.map(
            lambda x: jnp.zeros((self.width * B, *x.shape[1:]), x.dtype),
            abstract_logits(model.config.vocab_size, params),
        )
        buffers = emitted_buffers(model, state, params, chunk * self.width)
        first = _Carry(jnp.int32(0), caches, state, buffers, jnp.zeros(B, jnp.int32), logits)
        last = jax.lax.while_loop(
            lambda carry: (carry.step < steps) & ~carry.state.done_B.all(), loop.step, first
        )
        return last.caches, last.state, last.buffers


class _Carry(NamedTuple):
    """What the loop over the steps carries.

    `buffers` has `count_B` tokens of each row. `logits` is space for the logits of a step,
    `[W · B, …]`.
    """

    step: jax.Array
    caches: Caches
    state: DecodeState
    buffers: Emitted
    count_B: jax.Array
    logits: StepLogits


class _Sampled(NamedTuple):
    """What the loop over the positions of a step carries; `active_B` are the rows whose drafts were
    right so far.
    """

    position: jax.Array
    state: DecodeState
    buffers: Emitted
    count_B: jax.Array
    active_B: jax.Array


class _DraftLoop(NamedTuple):
    """The functions of a decode loop with drafts, while it is traced."""

    stepper: DraftStepper
    model: Transformer
    draft_model: Transformer | None
    params: SamplingParams

    def step(self, carry: _Carry) -> _Carry:
        """Runs a step."""
        stepper = self.stepper
        state = carry.state
        drafts = find(state.features, DraftState)
        cache, *draft_caches = carry.caches
        found_B = jnp.ones(state.token_B.shape, bool)  # a draft model always generates a draft
        cached_B = drafts.cached_B
        if stepper.ngram_size is not None:
            tokens_BS = find(state.features, RowTokens).tokens_BS
            drafts_Bk, found_B = ngram_drafts(
                tokens_BS, state.position_B, stepper.ngram_size, stepper.draft_tokens
            )
        length_B = draft_lengths(drafts, found_B, state.remaining_B, state.done_B)
        verifies = pays_off(stepper.cost, drafts, length_B, state.done_B)
        length_B = jnp.where(verifies, length_B, 0)
        if self.draft_model is not None:  # then `ngram_size` is None
            draft_cache, cached_B, drafts_Bk = self._draft(
                self.draft_model, draft_caches[0], state, length_B > 0
            )
            draft_caches = [draft_cache]
        tokens_BW = jnp.concatenate([state.token_B[:, None], drafts_Bk], axis=1)
        index_W = jnp.arange(stepper.width)
        is_token_BW = (index_W <= length_B[:, None]) & ~state.done_B[:, None]
        positions_BW = jnp.where(is_token_BW, state.position_B[:, None] + index_W, -1)
        logits, cache = self._forward(carry.logits, cache, state, verifies, tokens_BW, positions_BW)
        sampled = jax.lax.while_loop(
            lambda sampled: sampled.active_B.any(),
            lambda sampled: self._sample(sampled, logits, tokens_BW, length_B),
            _Sampled(jnp.int32(0), state, carry.buffers, carry.count_B, ~state.done_B),
        )
        # Of the draft tokens in the cache of the draft model, the accepted ones are part of the
        # text.
        drafts = replace(drafts, cached_B=jnp.minimum(cached_B, sampled.state.position_B))
        drafts = record(stepper.cost, drafts, length_B, sampled.count_B - carry.count_B)
        state = replace(sampled.state, features=with_feature(sampled.state.features, drafts))
        return _Carry(
            carry.step + 1, (cache, *draft_caches), state, sampled.buffers, sampled.count_B, logits
        )

    def _forward(
        self,
        logits: StepLogits,
        cache: KVCache,
        state: DecodeState,
        verifies: jax.Array,
        tokens_BW: jax.Array,
        positions_BW: jax.Array,
    ) -> tuple[StepLogits, KVCache]:
        """Writes the logits after each token, or after the newest token only, to the buffers
        `[W · B, V]`.
        """

        def decode(_: jax.Array, carry: tuple[StepLogits, KVCache]) -> tuple[StepLogits, KVCache]:
            buffers, cache = carry
            step_logits, cache = forward_step(self.model, cache, state, self.params)
            write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
            return jax.tree.map(write, buffers, step_logits), cache

        def verify(_: jax.Array, carry: tuple[StepLogits, KVCache]) -> tuple[StepLogits, KVCache]:
            return forward_drafts(self.model, carry[1], tokens_BW, positions_BW, self.params)

        # Loops with zero or one iteration update the cache in place, unlike `lax.cond`, which would
        # copy it.
        carry = jax.lax.fori_loop(0, jnp.where(verifies, 0, 1), decode, (logits, cache))
        updated: tuple[StepLogits, KVCache] = jax.lax.fori_loop(
            0, jnp.where(verifies, 1, 0), verify, carry
        )
        return updated

    def _sample(
        self, sampled: _Sampled, logits: StepLogits, tokens_BW: jax.Array, length_B: jax.Array
    ) -> _Sampled:
        """Draws the token after one position of each active row, which stays active if it equals
        the next draft token.
        """
        j, state, buffers, count_B, active_B = sampled
        B = len(count_B)
        size = buffers.tokens.shape[1]
        # The step advances only rows that are not done.
        new_state, emitted = sample_step(
            jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, j * B, B), logits),
            replace(state, done_B=~active_B),
            self.params,
        )
        slot_B = jnp.where(active_B, count_B, size)
        buffers = jax.tree.map(
            lambda buffer, x_B: buffer.at[jnp.arange(B), slot_B].set(x_B, mode="drop"),
            buffers,
            emitted,
        )
        state = replace(new_state, done_B=state.done_B | (active_B & new_state.done_B))
        matches_B = (j < length_B) & (
            emitted.tokens == tokens_BW[:, jnp.minimum(j + 1, self.stepper.width - 1)]
        )
        return _Sampled(
            j + 1, state, buffers, count_B + active_B, active_B & matches_B & ~state.done_B
        )

    def _draft(
        self, model: Transformer, cache: KVCache, state: DecodeState, chosen_B: jax.Array
    ) -> tuple[KVCache, jax.Array, jax.Array]:
        """Generates drafts for the rows `chosen_B`, after the draft model has read the tokens that
        are not in its cache.

        The sampler of each row draws the drafts with the random keys of their positions, so similar
        models draw the same tokens.

        Returns:
          The cache of the draft model, the number of tokens in it `[B]`, and the drafts
          `[B, draft_tokens]`.
        """
        count = self.stepper.draft_tokens
        width = self.stepper.width
        params = replace(self.params, report=None)
        drafts = find(state.features, DraftState)
        tokens_BS = find(state.features, RowTokens).tokens_BS
        end_B = jnp.where(chosen_B, state.position_B, 0)

        def read(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
            cache, cached_B = carry
            index_BW = cached_B[:, None] + jnp.arange(width)
            positions_BW = jnp.where(index_BW < end_B[:, None], index_BW, -1)
            tokens_BW = jnp.take_along_axis(tokens_BS, jnp.maximum(positions_BW, 0), axis=1)
            _, updated, _ = model.hidden(tokens_BW, positions_BW, cache=cache)
            assert updated is not None
            return updated, jnp.where(
                cached_B < end_B, jnp.minimum(cached_B + width, end_B), cached_B
            )

        def step(
            j: jax.Array, carry: tuple[KVCache, DecodeState, jax.Array]
        ) -> tuple[KVCache, DecodeState, jax.Array]:
            cache, state, drafts_Bk = carry
            step_logits, cache = forward_step(model, cache, state, params)
            state, emitted = sample_step(step_logits, state, params)
            return cache, state, drafts_Bk.at[:, j].set(emitted.tokens)

        cache, cached_B = jax.lax.while_loop(
            lambda carry: (carry[1] < end_B).any(), read, (cache, drafts.cached_B)
        )
        first = cache, replace(state, done_B=~chosen_B), jnp.zeros((len(end_B), count), jnp.int32)
        cache, _, drafts_Bk = jax.lax.fori_loop(0, jnp.where(chosen_B.any(), count, 0), step, first)
        return cache, jnp.where(chosen_B, state.position_B + count, cached_B), drafts_Bk


def forward_drafts(
    model: Transformer,
    cache: KVCache,
    tokens_BW: jax.Array,
    positions_BW: jax.Array,
    params: SamplingParams,
) -> tuple[StepLogits, KVCache]:
    """Returns the logits after each of several tokens, `[W · B, V]`, and the cache updated with all
    of them.
    """
    x_BWD, updated, aux = model.hidden(
        tokens_BW,
        positions_BW,
        cache=cache.for_verification(),
        probe=make_probe(params.uses_attention),
    )
    assert updated is not None
    attention = None
    if params.uses_attention:
        # The probe of this cache has a leading axis of tokens.
        metrics_WB = jax.vmap(jax.vmap(combine_layers))(aux["probe"])
        attention = jax.tree.map(lambda x_WB: x_WB.reshape(-1), metrics_WB)
    x_RD = x_BWD.swapaxes(0, 1).reshape(-1, x_BWD.shape[-1])
    return StepLogits(model.logits(x_RD), attention), updated.without_wrappers()

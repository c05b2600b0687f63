"""`_generate_toks`, the compiled program for prefill and decoding. A batch calls it once per chunk of tokens.

Decoding is a `fori_loop` with a KV cache. The whole state of a row (token, position, limit, EOS tokens, random key, sampling
parameters) is in arrays with a batch axis, so rows of different lengths and settings share one compiled program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from dantinox.generation.cache_plan import CachePlan
from dantinox.generation.drafts import (
    DraftPlan,
    DraftState,
    PairedCache,
    draft_lengths,
    init_drafts,
    ngram_drafts,
    pays_off,
    record,
)
from dantinox.generation.guidance import RowPairs, guide_logits
from dantinox.generation.quantized_weights import MAX_MATVEC_ROWS, SplitModel, dequantize
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.model.attention import Probe
from dantinox.model.row_adapters import RowAdapters, Stacks, attach_adapters
from dantinox.model.scoring import token_logprobs
from dantinox.programs import shared_trace
from dantinox.sampling import SamplerState, SamplingParams, StepInfo, init_state, sample
from dantinox.sampling.entropy_router import AttentionMetrics, LayerAttention, combine_layers, layer_attention
from dantinox.sampling.loops import in_loop

DECODE_CHUNK = 32  # tokens
COMPRESSED_PREFILL_CHUNK = 2048  # longest part of a prompt that a compressed cache processes at a time
# The most prompt tokens in one forward pass over several prompts. It bounds the memory for activations.
PREFILL_BATCH_TOKENS = 1 << 14


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "token_B", "position_B", "remaining_B", "done_B", "eos_BE", "sampler", "sequence_BS", "drafts", "adapter_B", "pairs",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclass(frozen=True)
class DecodeState:
    """The state of a batch between two tokens.

    Attributes:
      token_B: the newest token of each row, which the model has not processed yet; `position_B` is its position.
      remaining_B: the most tokens that each row may still generate.
      done_B: whether the row is finished; a finished row emits padding and does not write to the cache.
      eos_BE: the ids that end a row, padded with −1.
      sequence_BS: all tokens so far; only for decoding without a cache or with drafts.
      drafts: the state of speculative decoding; None without it.
      adapter_B: the number of the adapter of each row, 0: none; None for a batch without adapters.
      pairs: the pairs of main rows and guide rows; None for a batch without guidance.
    """

    token_B: jax.Array
    position_B: jax.Array
    remaining_B: jax.Array
    done_B: jax.Array
    eos_BE: jax.Array
    sampler: SamplerState
    sequence_BS: jax.Array | None
    drafts: DraftState | None = None
    adapter_B: jax.Array | None = None
    pairs: RowPairs | None = None


class Emitted(NamedTuple):
    """The tokens of one step `[B]`, or of a chunk `[B, N]`.

    `active` is false for padding, which follows the tokens of a row. `recurrent` is `SamplerState.recurrent` after each token.
    """

    tokens: jax.Array
    active: jax.Array
    info: StepInfo | None
    recurrent: dict[str, jax.Array]


# With `graph_updates=True` the model would be an output of the program, and every call would copy all weights.
# With `graph=False` nnx treats the arguments as plain trees and traverses them once instead of several times.
_jit: Any = partial(
    nnx.jit,
    static_argnames=("use_cache", "report", "echo", "chunk", "group", "plan", "samples", "draft_plan"),
    donate_argnames=("cache",),
    graph_updates=False,
    graph=False,
)


@_jit  # type: ignore[untyped-decorator]
def _generate_toks(
    model: Transformer | SplitModel,
    cache: KVCache | PairedCache | None,
    state: DecodeState,
    params: SamplingParams,
    steps: jax.Array,
    prompt: tuple[jax.Array, jax.Array] | None = None,
    draft_model: SplitModel | None = None,
    adapters: Stacks | None = None,
    *,
    use_cache: bool,
    report: int | None,
    echo: bool = False,
    chunk: int = DECODE_CHUNK,
    group: int | None = None,
    plan: CachePlan | None = None,
    samples: int = 1,
    draft_plan: DraftPlan | None = None,
) -> tuple[KVCache | PairedCache | None, DecodeState, Emitted, jax.Array | None]:
    """Generates up to `chunk` tokens per row, or more with drafts.

    With `prompt`, it prefills the prompts and generates the first token of each row. Otherwise it generates the next `steps`
    tokens. With a `draft_plan`, each of these steps generates at least one token and at most `draft_plan.width`.

    Args:
      model: a `SplitModel` reduces the host overhead of a call considerably.
      cache: keys and values of the tokens before `state`; donated. None with a prompt (the program creates the cache) and
        without `use_cache`.
      steps: the number of tokens to decode, at most `chunk`. It is a traced value, so short chunks use the same program.
      prompt: (tokens `[P, T]` right-padded, lengths `[P]`). The batch then has `P · samples` rows.
      draft_model: the model that generates the drafts; the cache is then a `PairedCache`.
      adapters: the matrices of the adapters, from which each row takes those of `state.adapter_B`; None: no adapters.
      report: the number of alternatives to report per token; None: report nothing.
      echo: report the log-probabilities of the prompt tokens.
      group: the steps of a loop of fixed length (`Platform.decode_group`); only without drafts.
      plan: the plan of the cache to create.
      draft_plan: verify draft tokens; None: one token per step.

    Returns:
      Cache, state, the tokens `[B, chunk]` (`[B, 1]` after a prompt, `[B, chunk · width]` with drafts), and with `echo` the
      log-probabilities `[P, T]` of the prompt tokens, 0 for the first one.
    """
    model = model.merge(model.leaves) if isinstance(model, SplitModel) else model
    rows = state.token_B.shape[0]
    if prompt is not None:
        model = dequantize(model)
        row_adapters = None if adapters is None else _row_adapters(adapters, state, samples)
        step_logits, x_PTD, target_cache = _prefill(model, params, prompt, plan if use_cache else None, row_adapters, echo)
        cache = target_cache
        echo_PT = None if x_PTD is None else prompt_logprobs(model, x_PTD, prompt[0])
        if draft_model is not None and draft_plan is not None:
            draft = dequantize(draft_model.merge(draft_model.leaves))
            _, _, draft_cache = _prefill(draft, replace(params, uses_attention=False), prompt, draft_plan.cache)
            assert target_cache is not None and draft_cache is not None
            cache = PairedCache(target_cache, draft_cache)
        if samples > 1:
            cache, step_logits = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), (cache, step_logits))
        state, emitted = sample_step(step_logits, state, params, report)
        return cache, state, jax.tree.map(lambda x_B: x_B[:, None], emitted), echo_PT
    model = model if use_cache and rows <= MAX_MATVEC_ROWS else dequantize(model)
    model = attach_adapters(model, None if adapters is None else _row_adapters(adapters, state))

    if draft_plan is not None:
        assert cache is not None
        drafter = None if draft_model is None else draft_model.merge(draft_model.leaves)
        if drafter is not None and rows > MAX_MATVEC_ROWS:
            drafter = dequantize(drafter)
        steps = jnp.minimum(steps, chunk)
        return *_decode_with_drafts(model, drafter, cache, state, params, steps, draft_plan, report, chunk), None
    assert not isinstance(cache, PairedCache)

    def step(cache: KVCache | None, state: DecodeState) -> tuple[KVCache | None, DecodeState, Emitted]:
        step_logits, cache = forward_step(model, cache, state, params, use_cache)
        return cache, *sample_step(step_logits, state, params, report)

    def body(i: jax.Array, carry: Any) -> Any:
        cache, state, buffers = carry
        cache, state, emitted = step(cache, state)
        return cache, state, jax.tree.map(lambda buffer, x_B: buffer.at[:, i].set(x_B), buffers, emitted)

    buffers = _emitted_buffers(model, state, params, report, chunk)
    max_remaining = jnp.max(jnp.where(state.done_B, 0, state.remaining_B))
    steps = jnp.minimum(jnp.minimum(steps, chunk), max_remaining)
    cache, state, emitted = _run_steps(group, steps, body, (cache, state, buffers))
    return cache, state, emitted, None


def _run_steps(group: int | None, steps: jax.Array, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Returns `carry` after `steps` iterations of `body`: first in groups of a fixed length, then one by one."""
    grouped: jax.Array | int = 0
    if group is not None:
        grouped = steps // group * group

        def run_group(i: jax.Array, carry: Any) -> Any:
            return jax.lax.fori_loop(0, group, lambda j, carry: body(group * i + j, carry), carry)

        carry = jax.lax.fori_loop(0, steps // group, run_group, carry)
    return jax.lax.fori_loop(grouped, steps, body, carry)


def _row_adapters(stacks: Stacks, state: DecodeState, samples: int = 1) -> RowAdapters:
    """Returns the adapters of the rows, or of the prompts if each prompt has `samples` rows."""
    assert state.adapter_B is not None
    return RowAdapters(stacks, state.adapter_B[::samples])


def _emitted_buffers(model: Transformer, state: DecodeState, params: SamplingParams, report: int | None, size: int) -> Emitted:
    """Returns empty buffers for `size` tokens per row."""
    # The call has the same form as in a decode step, so that both share a trace.
    shapes = jax.eval_shape(lambda *inputs: sample_step(*inputs, params, report), abstract_logits(model, params), state)[1]
    buffers: Emitted = jax.tree.map(lambda x: jnp.zeros((x.shape[0], size, *x.shape[1:]), x.dtype), shapes)
    return buffers


def _draft_tokens(
    model: Transformer, cache: KVCache, state: DecodeState, params: SamplingParams, plan: DraftPlan, drafts_B: jax.Array
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Generates drafts for the rows `drafts_B` with a draft model, after it has read the tokens that are not in its cache.

    The sampler of each row draws the drafts with the random keys of their positions, so similar models draw the same tokens.

    Returns:
      The cache of the draft model, the number of tokens in it `[B]`, and the drafts `[B, draft_tokens]`.
    """
    assert state.drafts is not None and state.sequence_BS is not None
    sequence_BS, end_B = state.sequence_BS, jnp.where(drafts_B, state.position_B, 0)

    def read(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        cache, cached_B = carry
        index_BW = cached_B[:, None] + jnp.arange(plan.width)
        positions_BW = jnp.where(index_BW < end_B[:, None], index_BW, -1)
        tokens_BW = jnp.take_along_axis(sequence_BS, jnp.maximum(positions_BW, 0), axis=1)
        _, updated, _ = model.hidden(tokens_BW, positions_BW, cache=cache)
        assert updated is not None
        return updated, jnp.where(cached_B < end_B, jnp.minimum(cached_B + plan.width, end_B), cached_B)

    def step(j: jax.Array, carry: tuple[KVCache, DecodeState, jax.Array]) -> tuple[KVCache | None, DecodeState, jax.Array]:
        step_logits, cache = forward_step(model, carry[0], carry[1], params, True)
        state, emitted = sample_step(step_logits, carry[1], params, None)
        return cache, state, carry[2].at[:, j].set(emitted.tokens)

    cache, cached_B = jax.lax.while_loop(lambda carry: (carry[1] < end_B).any(), read, (cache, state.drafts.cached_B))
    first = cache, replace(state, done_B=~drafts_B), jnp.zeros((len(end_B), plan.draft_tokens), jnp.int32)
    cache, _, drafts_Bk = jax.lax.fori_loop(0, jnp.where(drafts_B.any(), plan.draft_tokens, 0), step, first)
    return cache, jnp.where(drafts_B, state.position_B + plan.draft_tokens, cached_B), drafts_Bk


def _decode_with_drafts(
    model: Transformer,
    draft_model: Transformer | None,
    cache: KVCache | PairedCache,
    state: DecodeState,
    params: SamplingParams,
    steps: jax.Array,
    plan: DraftPlan,
    report: int | None,
    chunk: int,
) -> tuple[KVCache | PairedCache, DecodeState, Emitted]:
    """Runs up to `steps` steps, of which each verifies the drafts of all rows or, without drafts, decodes one token per row.

    Both kinds of steps share one loop over the positions for sampling, so equal logits give equal tokens.
    """
    B, width = state.token_B.shape[0], plan.width
    rows_B, index_W = jnp.arange(B), jnp.arange(width)
    size = chunk * width

    def forward(
        logits: StepLogits,
        cache: KVCache,
        state: DecodeState,
        verifies: jax.Array,
        tokens_BW: jax.Array,
        positions_BW: jax.Array,
    ) -> tuple[StepLogits, KVCache]:
        """Writes the logits after each token, or after the newest token only, to the buffers `[W · B, V]`."""

        def decode(_: jax.Array, carry: tuple[StepLogits, KVCache | None]) -> tuple[StepLogits, KVCache | None]:
            buffers, cache = carry
            step_logits, cache = forward_step(model, cache, state, params, True)
            write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=0, axis=0)
            return jax.tree.map(write, buffers, step_logits), cache

        def verify(_: jax.Array, carry: tuple[StepLogits, KVCache]) -> tuple[StepLogits, KVCache]:
            return forward_drafts(model, carry[1], tokens_BW, positions_BW, params)

        # Loops with zero or one iteration update the cache in place, unlike `lax.cond`, which would copy it.
        carry = jax.lax.fori_loop(0, jnp.where(verifies, 0, 1), decode, (logits, cache))
        updated: tuple[StepLogits, KVCache] = jax.lax.fori_loop(0, jnp.where(verifies, 1, 0), verify, carry)
        return updated

    def sample_position(carry: Any, step_logits: StepLogits, tokens_BW: jax.Array, length_B: jax.Array) -> Any:
        j, state, buffers, count_B, active_B = carry
        new_state, emitted = sample_step(
            jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, j * B, B), step_logits),
            replace(state, done_B=~active_B),
            params,
            report,
        )
        slot_B = jnp.where(active_B, count_B, size)
        buffers = jax.tree.map(lambda buffer, x_B: buffer.at[rows_B, slot_B].set(x_B, mode="drop"), buffers, emitted)
        state = replace(new_state, done_B=state.done_B | (active_B & new_state.done_B))
        matches_B = (j < length_B) & (emitted.tokens == tokens_BW[:, jnp.minimum(j + 1, width - 1)])
        return j + 1, state, buffers, count_B + active_B, active_B & matches_B & ~state.done_B

    def step(carry: Any) -> Any:
        i, cache, draft_cache, state, buffers, count_B, logits = carry
        found_B, cached_B = jnp.ones(B, bool), state.drafts.cached_B
        if plan.ngram_size is not None:
            drafts_Bk, found_B = ngram_drafts(state.sequence_BS, state.position_B, plan.ngram_size, plan.draft_tokens)
        length_B = draft_lengths(state.drafts, found_B, state.remaining_B, state.done_B)
        verifies = pays_off(plan, state.drafts, length_B, state.done_B)
        length_B = jnp.where(verifies, length_B, 0)
        if draft_model is not None:
            draft_cache, cached_B, drafts_Bk = _draft_tokens(draft_model, draft_cache, state, params, plan, length_B > 0)
        tokens_BW = jnp.concatenate([state.token_B[:, None], drafts_Bk], axis=1)
        is_token_BW = (index_W <= length_B[:, None]) & ~state.done_B[:, None]
        positions_BW = jnp.where(is_token_BW, state.position_B[:, None] + index_W, -1)
        logits, cache = forward(logits, cache, state, verifies, tokens_BW, positions_BW)
        before, first = state, (jnp.int32(0), state, buffers, count_B, ~state.done_B)
        _, state, buffers, new_count_B, _ = jax.lax.while_loop(
            lambda carry: carry[-1].any(), lambda carry: sample_position(carry, logits, tokens_BW, length_B), first
        )
        new_B = new_count_B - count_B
        # Of the draft tokens in the cache of the draft model, the accepted ones are part of the text.
        drafts = replace(before.drafts, cached_B=jnp.minimum(cached_B, state.position_B))
        state = replace(state, drafts=record(plan, drafts, length_B, new_B))
        return i + 1, cache, draft_cache, state, buffers, new_count_B, logits

    buffers = _emitted_buffers(model, state, params, report, size)
    logits = jax.tree.map(lambda x: jnp.zeros((width * B, *x.shape[1:]), x.dtype), abstract_logits(model, params))
    caches = (cache.target, cache.draft) if isinstance(cache, PairedCache) else (cache, None)
    first = jnp.int32(0), *caches, state, buffers, jnp.zeros(B, jnp.int32), logits
    _, target, draft_cache, state, buffers, *_ = jax.lax.while_loop(
        lambda carry: (carry[0] < steps) & ~carry[3].done_B.all(), step, first
    )
    return target if draft_cache is None else PairedCache(target, draft_cache), state, buffers


def init_row(
    params: SamplingParams,
    tokens_1S: jax.Array,
    length: jax.Array,
    generated: jax.Array,
    limit: jax.Array,
    end_ids_1E: jax.Array,
    max_drafts: jax.Array | None,
    recurrent: Mapping[str, jax.Array],
    number_1: jax.Array | None,
    *,
    vocab_size: int,
    keeps_sequence: bool,
    pairs: RowPairs | None = None,
) -> DecodeState:
    """Returns the decode state of one row from its tokens, whose keys are in the cache except that of the newest token.

    Args:
      tokens_1S: the prompt and the generated tokens, padded; `length` of them are valid, the last `generated` are generated.
      limit: the most further tokens.
      end_ids_1E: the ids that end the row, padded with −1.
      max_drafts: the most draft tokens per step; None for a program without drafts.
      recurrent: as in `init_state`.
      number_1: the adapter of the row; None for a program without adapters.
      pairs: the row in its pair; None for a program without guidance.
      keeps_sequence: whether decoding reads the tokens, because it uses drafts or no cache.
    """
    S = tokens_1S.shape[1]
    valid_1S = (jnp.arange(S) < length)[None]
    sampler = init_state(
        params, tokens_1S, valid_1S, vocab_size, S, generated_B=jnp.asarray(generated)[None], recurrent=recurrent
    )
    # The draft model has read the prompt without its last token. It reads generated tokens again.
    drafted = jnp.asarray(length - generated - 1)[None]
    return DecodeState(
        token_B=jax.lax.dynamic_slice_in_dim(tokens_1S[0], length - 1, 1),
        position_B=jnp.asarray(length - 1)[None],
        remaining_B=jnp.asarray(limit)[None],
        done_B=jnp.zeros(1, bool),
        eos_BE=end_ids_1E,
        sampler=sampler,
        sequence_BS=jnp.asarray(tokens_1S) if keeps_sequence else None,
        drafts=None if max_drafts is None else init_drafts(jnp.asarray(max_drafts)[None], drafted),
        adapter_B=None if number_1 is None else jnp.asarray(number_1),
        pairs=jax.tree.map(jnp.asarray, pairs),
    )


def write_row(rows: Any, row: Any, slot: jax.Array) -> Any:
    """Replaces one row in every array of a batch."""
    return jax.tree.map(lambda x, x_row: jax.lax.dynamic_update_slice_in_dim(x, x_row, slot, 0), rows, row)


class StepLogits(NamedTuple):
    """The output of the model for the newest token of each row: logits `[B, V]`, and attention metrics `[B]` if used."""

    logits: jax.Array
    attention: AttentionMetrics | None


def abstract_logits(model: Transformer, params: SamplingParams) -> StepLogits:
    """Returns the shapes of the result of `forward_step` without tracing the model."""
    row_B = jax.ShapeDtypeStruct((params.batch,), jnp.float32)
    logits_BV = jax.ShapeDtypeStruct((params.batch, model.config.vocab_size), jnp.float32)
    metrics_B: list[Any] = [row_B] * len(AttentionMetrics._fields)
    return StepLogits(cast(Any, logits_BV), AttentionMetrics(*metrics_B) if params.uses_attention else None)


def make_probe(params: SamplingParams) -> Probe | None:
    """Returns the probe that measures the attention of each layer; None if the router does not use attention."""
    return jax.vmap(layer_attention) if params.uses_attention else None


def attention_metrics(params: SamplingParams, aux: Mapping[str, Sequence[LayerAttention]]) -> AttentionMetrics | None:
    """Combines the results of the probe in all layers into metrics `[B]`; None without a probe."""
    return jax.vmap(combine_layers)(aux["probe"]) if params.uses_attention else None


def _prefill(
    model: Transformer,
    params: SamplingParams,
    prompt: tuple[jax.Array, jax.Array],
    plan: CachePlan | None,
    adapters: RowAdapters | None = None,
    keep_states: bool = False,
) -> tuple[StepLogits, jax.Array | None, KVCache | None]:
    """Returns the logits after each prompt, with `keep_states` the final hidden states `[P, T, D]`, and the new cache.

    A batch with more than `PREFILL_BATCH_TOKENS` tokens is processed in several passes, each over some of the prompts.
    """
    tokens_PT, lengths_P = prompt
    P, T = tokens_PT.shape
    index_T = jnp.arange(T)
    positions_PT = jnp.where(index_T < lengths_P[:, None], index_T, -1)

    def prefill(prompts: tuple[Any, ...]) -> Any:
        rows_RT, positions_RT, last_R, number_R = prompts
        cache = None if plan is None else make_cache(model.config, rows_RT.shape[0], *plan)
        adapted = attach_adapters(model, None if adapters is None else replace(adapters, number_B=number_R))
        x_RTD, cache, attention = _prefill_rows(adapted, params, rows_RT, positions_RT, cache)
        return x_RTD[jnp.arange(len(last_R)), last_R], x_RTD if keep_states else None, cache, attention

    rows = max(rows for rows in range(1, P + 1) if P % rows == 0 and (rows == 1 or rows * T <= PREFILL_BATCH_TOKENS))
    prompts = tokens_PT, positions_PT, lengths_P - 1, None if adapters is None else adapters.number_B
    if rows == P:
        x_PD, x_PTD, cache, attention = prefill(prompts)
    else:
        results = jax.lax.map(prefill, jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), prompts))
        x_PD, x_PTD, cache, attention = jax.tree.map(lambda x: x.reshape(P, *x.shape[2:]), results)
    return StepLogits(model.logits(x_PD), attention), x_PTD, cache


def prefill_hidden(
    model: Transformer, tokens_BT: jax.Array, positions_BT: jax.Array, cache: KVCache | None, probe: Probe | None = None
) -> tuple[jax.Array, KVCache | None, dict[str, Any]]:
    """Runs `Transformer.hidden` on a prompt or a part of a prompt, with any cache.

    If the cache needs two passes, the tokens are repeated at the positions that follow them, so that attention reads them as a
    repetition (Kim et al. 2025). The outputs of the repetition are dropped.
    """
    if cache is None or not cache.needs_two_passes or tokens_BT.shape[1] == 1:
        return model.hidden(tokens_BT, positions_BT, cache=cache, probe=probe)
    count_B1 = jnp.sum(positions_BT >= 0, axis=1, keepdims=True)
    positions_BU = jnp.concatenate([positions_BT, jnp.where(positions_BT >= 0, positions_BT + count_B1, -1)], axis=1)
    x_BTD, cache, aux = model.hidden(jnp.tile(tokens_BT, (1, 2)), positions_BU, cache=cache.for_two_passes(), probe=probe)
    return x_BTD[:, : tokens_BT.shape[1]], cache, aux


def prompt_logprobs(model: Transformer, x_PTD: jax.Array, tokens_PT: jax.Array) -> jax.Array:
    """Returns ln p `[P, T]` of the tokens of each prompt given the tokens before them; 0 for the first."""
    return jnp.pad(token_logprobs(model, x_PTD[:, :-1], tokens_PT[:, 1:]), ((0, 0), (1, 0)))


def _prefill_rows(
    model: Transformer, params: SamplingParams, tokens_PT: jax.Array, positions_PT: jax.Array, cache: KVCache | None
) -> tuple[jax.Array, KVCache | None, AttentionMetrics | None]:
    """Returns the final hidden states `[P, T, D]`, the cache after the prompts, and the attention metrics of their last tokens.

    With a compressed cache, long prompts are processed in parts of at most `COMPRESSED_PREFILL_CHUNK` tokens, and the cache
    evicts tokens after each part.
    """
    P, T = tokens_PT.shape
    parts = -(-T // COMPRESSED_PREFILL_CHUNK) if cache is not None and cache.compressed else 1
    if parts == 1:
        two_passes = cache is not None and cache.needs_two_passes
        initial_cache = cache if cache is None or two_passes else cache.for_prefill(model.config, model.parallelism)
        x_PTD, cache, aux = prefill_hidden(model, tokens_PT, positions_PT, initial_cache, make_probe(params))
        return x_PTD, cache, attention_metrics(params, aux)
    size = -(-T // parts)
    padding = ((0, 0), (0, parts * size - T))
    padded = jnp.pad(tokens_PT, padding), jnp.pad(positions_PT, padding, constant_values=-1)

    def prefill_part(cache: KVCache | None, part: tuple[jax.Array, ...]) -> Any:
        x_PtD, cache, aux = prefill_hidden(model, part[0], part[1], cache, make_probe(params))
        return cache, (x_PtD, attention_metrics(params, aux))

    split = [x.reshape(P, parts, size).transpose(1, 0, 2) for x in padded]
    cache, (x_NPtD, attention_NP) = jax.lax.scan(prefill_part, cache, tuple(split))
    last_P = jnp.max(positions_PT, axis=1) // size
    attention = jax.tree.map(lambda metric_NP: metric_NP[last_P, jnp.arange(P)], attention_NP)
    return x_NPtD.transpose(1, 0, 2, 3).reshape(P, parts * size, -1)[:, :T], cache, attention


def forward_step(
    model: Transformer, cache: KVCache | None, state: DecodeState, params: SamplingParams, use_cache: bool
) -> tuple[StepLogits, KVCache | None]:
    """Returns the logits after the newest token of every row, and the cache updated with this token."""
    if use_cache:
        positions_B1 = jnp.where(state.done_B, -1, state.position_B)[:, None]
        x_B1D, cache, aux = model.hidden(state.token_B[:, None], positions_B1, cache=cache, probe=make_probe(params))
        return StepLogits(model.logits(x_B1D[:, 0]), attention_metrics(params, aux)), cache
    assert state.sequence_BS is not None  # decoding without a cache reads the whole sequence
    B, S = state.sequence_BS.shape
    index_S = jnp.arange(S)
    positions_BS = jnp.where(index_S <= state.position_B[:, None], index_S, -1)
    x_BSD, _, aux = model.hidden(state.sequence_BS, positions_BS, probe=make_probe(params))
    return StepLogits(model.logits(x_BSD[jnp.arange(B), state.position_B]), attention_metrics(params, aux)), cache


def forward_drafts(
    model: Transformer, cache: KVCache, tokens_BW: jax.Array, positions_BW: jax.Array, params: SamplingParams
) -> tuple[StepLogits, KVCache]:
    """Returns the logits after each of several tokens, `[W · B, V]`, and the cache updated with all of them."""
    x_BWD, updated, aux = model.hidden(tokens_BW, positions_BW, cache=cache.for_verification(), probe=make_probe(params))
    assert updated is not None
    attention = None
    if params.uses_attention:
        attention = jax.tree.map(lambda x_WB: x_WB.reshape(-1), jax.vmap(jax.vmap(combine_layers))(aux["probe"]))
    x_RD = x_BWD.swapaxes(0, 1).reshape(-1, x_BWD.shape[-1])
    return StepLogits(model.logits(x_RD), attention), updated.without_wrappers()


@shared_trace("report")  # one trace serves prefill and decoding
def sample_step(
    step_logits: StepLogits, state: DecodeState, params: SamplingParams, report: int | None
) -> tuple[DecodeState, Emitted]:
    """Draws the next token of every active row and updates the state of the rows."""
    active_B, pairs = ~state.done_B, state.pairs
    logits_BV = step_logits.logits if pairs is None else guide_logits(step_logits.logits, pairs)
    token_B, sampler, drawn = sample(
        logits_BV, params, state.sampler, attention=step_logits.attention, active_B=active_B, report=report
    )
    token_B = token_B if pairs is None else token_B[pairs.main_B]
    position_B = state.position_B + active_B
    remaining_B = state.remaining_B - active_B
    ended_B = (token_B[:, None] == state.eos_BE).any(1) | (remaining_B <= 0)
    if params.loops is not None:
        assert sampler.loop_runs is not None
        ended_B |= params.loops.stops & in_loop(sampler.loop_runs, params.loops)
    ended_B = ended_B if pairs is None else ended_B[pairs.main_B]
    sequence_BS = state.sequence_BS
    if sequence_BS is not None:
        index_B = jnp.where(active_B, position_B, sequence_BS.shape[1])
        sequence_BS = sequence_BS.at[jnp.arange(token_B.shape[0]), index_B].set(token_B, mode="drop")
    state = replace(
        state,
        token_B=jnp.where(active_B, token_B, state.token_B),
        position_B=position_B,
        remaining_B=remaining_B,
        done_B=state.done_B | ended_B,
        sampler=sampler,
        sequence_BS=sequence_BS,
    )
    return state, Emitted(token_B, active_B, drawn.token, sampler.recurrent)

"""The programs of a `SlotBatch`. Each is compiled once, for all slots; the number of a slot is an argument."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.generation.block_pool import caches_of
from dantinox.generation.decode import DecodeState, Emitted, _generate_toks, init_row, prefill_hidden, write_row
from dantinox.generation.drafts import DraftPlan, PairedCache
from dantinox.generation.quantized_weights import SplitModel, dequantize
from dantinox.model import KVCache, Transformer
from dantinox.model.row_adapters import RowAdapters, Stacks, attach_adapters
from dantinox.model.scoring import map_positions
from dantinox.sampling import SamplingParams, StepInfo
from dantinox.sampling.report import step_info


def int32(value: int) -> np.ndarray:
    return np.asarray(value, np.int32)  # jnp.int32 would run a separate operation, which takes a third of a millisecond


@partial(jax.jit, static_argnames=("report", "draft_plan"), donate_argnames=("cache",))
def decode_slots(
    model: SplitModel,
    cache: KVCache | PairedCache,
    state: DecodeState,
    params: SamplingParams,
    steps: jax.Array,
    draft_model: SplitModel | None,
    adapters: Stacks | None,
    *,
    report: int,
    draft_plan: DraftPlan | None,
) -> tuple[KVCache | PairedCache, DecodeState, Emitted]:
    cache, state, emitted, _ = _generate_toks(
        model, cache, state, params, steps, None, draft_model, adapters, use_cache=True, report=report, draft_plan=draft_plan
    )
    return cache, state, emitted


@partial(jax.jit, static_argnames=("report",), donate_argnames=("cache",))
def prefill_part(
    model: SplitModel,
    cache: KVCache | PairedCache,
    slot_R: jax.Array,
    tokens_RT: jax.Array,
    first_R: jax.Array,
    count_R: jax.Array,
    next_RT: jax.Array,
    draft_model: SplitModel | None = None,
    adapters: Stacks | None = None,
    number_R: jax.Array | None = None,
    *,
    report: int | None,
) -> tuple[KVCache | PairedCache, StepInfo | None]:
    """Prefills R chunks: `count_R` tokens of the sequences in the slots `slot_R`, from the positions `first_R` on.

    Consecutive chunks of a sequence may be in one call, in their order. A count of 0 marks an unused row.

    Args:
      next_RT: the token after each of `tokens_RT`.
      number_R: the numbers of the adapters.
      report: the number of alternatives in the reports; None: no reports.

    Returns:
      The cache, and reports on the tokens `next_RT` of the first row.
    """
    index_T = jnp.arange(tokens_RT.shape[1])
    positions_RT = jnp.where(index_T < count_R[:, None], first_R[:, None] + index_T, -1)

    def read(model: SplitModel, cache: KVCache, adapters: RowAdapters | None = None) -> tuple[Transformer, jax.Array, KVCache]:
        transformer = dequantize(model.merge(model.leaves))
        adapted = attach_adapters(transformer, adapters)
        x_RTD, updated, _ = prefill_hidden(adapted, tokens_RT, positions_RT, cache.at_slots(slot_R))
        assert updated is not None
        return transformer, x_RTD, updated.without_wrappers()

    target, *draft = caches_of(cache)
    row_adapters = None if adapters is None or number_R is None else RowAdapters(adapters, number_R)
    transformer, x_RTD, cache = read(model, target, row_adapters)
    if draft_model is not None and draft:
        cache = PairedCache(cache, read(draft_model, draft[0])[2])
    if report is None:
        return cache, None

    def report_of(x_D: jax.Array, token: jax.Array) -> StepInfo:
        logits_V = transformer.logits(x_D)
        return step_info(report, logits_V, logits_V, token, jnp.asarray(False))

    info = map_positions(report_of, transformer.config.vocab_size, x_RTD[:1], next_RT[:1])
    return cache, jax.tree.map(lambda x_1T: x_1T[0], info)


@partial(jax.jit, donate_argnames=("leaf",))
def copy_slot(leaf: jax.Array, source: jax.Array, to: jax.Array) -> jax.Array:
    """Copies slot `source` of one array of the cache to slot `to`."""
    return jax.lax.dynamic_update_slice_in_dim(leaf, jax.lax.dynamic_slice_in_dim(leaf, source, 1), to, 0)


@jax.jit
def slot_checksums(cache: KVCache | PairedCache) -> jax.Array:
    """Returns a checksum of the keys and values of each slot, uint32 `[leaves, B]`."""

    def checksum(leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        flat_BN = bits.reshape(bits.shape[0], -1)
        weights_N = 2 * jax.lax.iota(jnp.uint32, flat_BN.shape[1]) * jnp.uint32(2654435761) + 1  # odd
        return jnp.sum(flat_BN * weights_N, axis=1, dtype=jnp.uint32)

    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(cache) if leaf.ndim > 1])


write_cache_row = jax.jit(write_row, donate_argnums=0)  # donates the cache
insert_row = jax.jit(write_row)
init_slot_row = jax.jit(init_row, static_argnames=("vocab_size", "keeps_sequence"))

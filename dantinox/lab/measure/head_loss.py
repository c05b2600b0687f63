"""The loss of a model when a head attends to only some of its keys, for the KV calibration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.generation.decode.cache_budgets import SLOT_UNIT
from dantinox.generation.decode.prepared_model import dequantize
from dantinox.lab.measure.texts import map_batches, padded_positions
from dantinox.model import KVCache, Transformer
from dantinox.model.attention import attention, causal_mask
from dantinox.model.cache import uncompressed_slots
from dantinox.model.cache_store import Store
from dantinox.model.layers import PLAIN_SOFTMAX
from dantinox.report.console import Progress
from dantinox.sampling.selection import ordered_keys, threshold_key

SINKS = 4  # first tokens that every head keeps
MIN_KEPT = 24  # smallest number of keys of a head with the default settings
ROWS = 32  # sequences per batch; fewer for long sequences or a large vocabulary
MAX_ELEMENTS = 1 << 27  # logits or attention weights in memory at one time
CONTINUATIONS = 4  # sampled for each sequence


@partial(jax.tree_util.register_dataclass, data_fields=["kept_K", "from_B"], meta_fields=["best"])
@dataclass(frozen=True)
class LimitedKeys:
    """The keys of one attention call, of which queries from a given position on see only some.

    It is as if a cache had evicted the other keys. The keys that a query sees do not depend on
    earlier queries, so one call reads a whole sequence.

    Attributes:
      kept_K: number of keys per key/value head.
      from_B: position of the first limited query of each row; earlier queries see every key.
      best: keep the keys with the largest attention weights. This is an oracle: a cache cannot
        choose better, since it evicts before it knows the query. Otherwise keep the first `SINKS`
        keys and the most recent ones.
    """

    kept_K: jax.Array
    from_B: jax.Array
    best: bool

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        keys_B1S = positions_BT[:, None]
        store = Store.from_kv(k_BTKH, v_BTKH, q_BTKGH.dtype)
        valid_BKTS = causal_mask(positions_BT, keys_B1S, window)
        if self.best:
            weights_BKGTS = attention(q_BTKGH, store, valid_BKTS, softmax).weights_BKGTS
            mean_BKTS = jnp.where(valid_BKTS, jnp.mean(weights_BKGTS, axis=2), 0)
            largest = jax.vmap(jax.vmap(jax.vmap(_top_mask, (0, None))), (0, None))
            kept_BKTS = largest(mean_BKTS, jnp.minimum(self.kept_K, store.slots))
        else:
            oldest_BKT = positions_BT[:, None] - (self.kept_K - SINKS)[None, :, None]
            kept_BKTS = (keys_B1S < SINKS)[:, :, None] | (
                keys_B1S[:, :, None] > oldest_BKT[..., None]
            )
        whole_B1T1 = (positions_BT < self.from_B[:, None])[:, None, :, None]
        attended = attention(q_BTKGH, store, valid_BKTS & (whole_B1T1 | kept_BKTS), softmax)
        return attended.out_BTKGH, self, None


def _top_mask(weights_S: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the mask of the `count` largest numbers, including all numbers equal to the smallest
    of them.
    """
    keys_S = ordered_keys(weights_S.astype(jnp.float32))
    return keys_S >= threshold_key(
        keys_S, jnp.ones_like(weights_S, jnp.float32), lambda larger: larger >= count
    )


@nnx.jit(static_argnames=("start", "best"), graph_updates=False)
def limited_logprobs(
    model: Transformer,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    kept_LK: jax.Array,
    from_B: jax.Array,
    *,
    start: int,
    best: bool,
) -> jax.Array:
    """Returns next-token log-probabilities `[B, T − start + 1, V]` at the positions from
    `start − 1` on.

    One forward pass reads the right-padded `tokens_BT` without a cache, whatever the model's
    windows are. Queries from position `from_B` on see `kept_LK` keys of each key/value head; see
    `LimitedKeys`.
    """
    model = dequantize(model)
    layers = tuple(LimitedKeys(kept_K, from_B, best) for kept_K in kept_LK)
    cache = KVCache(layers, uncompressed_slots(model.config, tokens_BT.shape[1]))  # type: ignore[arg-type]
    x_BTD, _, _ = model.hidden(tokens_BT, padded_positions(tokens_BT, lengths_B), cache=cache)
    return jax.nn.log_softmax(model.logits(x_BTD[:, start - 1 :]).astype(jnp.float32))


def rows_per_batch(config: ModelConfig, tokens: int) -> int:
    """Returns how many sequences of `tokens` tokens fit in one batch."""
    return int(
        np.clip(MAX_ELEMENTS // (tokens * max(config.vocab_size, config.n_heads * tokens)), 1, ROWS)
    )


@jax.jit
def mean_kl(ours_BSV: jax.Array, full_BSV: jax.Array, counted_BS: jax.Array) -> jax.Array:
    """Returns the mean KL(full ‖ ours) in nats over the counted positions of each row, `[B]`, from
    log-probabilities.
    """
    return jnp.mean(
        jnp.sum(jnp.exp(full_BSV) * (full_BSV - ours_BSV), axis=2), axis=1, where=counted_BS
    )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["offset_BTKGH", "from_B", "changes_CBTKGH"],
    meta_fields=["sizes"],
)
@dataclass(frozen=True)
class OffsetOutput:
    """The keys of one attention call, all visible, with an offset added to the output of attention.

    Attributes:
      offset_BTKGH: added to the output of each query head.
      from_B: for each row, the position of the first query that a limit would affect.
      sizes: numbers of keys to compare, as in `LimitedKeys.kept_K`.
      changes_CBTKGH: set by a call: the change of each head's output under each size, without
        gradient.
    """

    offset_BTKGH: jax.Array
    from_B: jax.Array
    sizes: tuple[int, ...]
    changes_CBTKGH: jax.Array | None = None

    def attend(
        self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX
    ):
        def attend_limited(kept: int) -> jax.Array:
            limited = LimitedKeys(jnp.full(k_BTKH.shape[2], kept), self.from_B, False)
            return limited.attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, None, softmax)[0]

        whole_BTKGH = attend_limited(k_BTKH.shape[1] + SINKS)
        changes_CBTKGH = jnp.stack([attend_limited(kept) - whole_BTKGH for kept in self.sizes])
        after = replace(self, changes_CBTKGH=jax.lax.stop_gradient(changes_CBTKGH))
        return whole_BTKGH + self.offset_BTKGH.astype(whole_BTKGH.dtype), after, None


@nnx.jit(static_argnames=("sizes", "start"), graph_updates=False)
def _loss_rises_batch(
    model: Transformer,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    from_B: jax.Array,
    keys_M: jax.Array,
    *,
    sizes: tuple[int, ...],
    start: int,
) -> jax.Array:
    """Returns estimated loss rises summed over the counted tokens of each row, `[B, L, K, C]`; see
    `estimate_loss_rises`.
    """
    model = dequantize(model)
    config = model.config
    B, T = tokens_BT.shape
    shape = B, T, config.kv_heads, config.n_heads // config.kv_heads, config.head_size
    counted_BS = (jnp.arange(start, T) >= from_B[:, None]) & (
        jnp.arange(start, T) < lengths_B[:, None]
    )

    def read(offsets_LBTKGH: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        layers = tuple(OffsetOutput(offset, from_B, sizes) for offset in offsets_LBTKGH)
        cache = KVCache(layers, uncompressed_slots(config, T))  # type: ignore[arg-type]
        x_BTD, after, _ = model.hidden(
            tokens_BT, padded_positions(tokens_BT, lengths_B), cache=cache
        )
        return x_BTD[:, start:], tuple(layer.changes_CBTKGH for layer in after.layers)  # type: ignore[union-attr]

    x_BSD, hidden_vjp, changes = jax.vjp(
        read, (jnp.zeros(shape, model.dtype),) * config.num_blocks, has_aux=True
    )
    logits_BSV, logits_vjp = jax.vjp(lambda x: model.logits(x).astype(jnp.float32), x_BSD)

    def output_changes(key: jax.Array) -> jax.Array:
        sampled_BS = jax.random.categorical(key, logits_BSV)
        score_BSV = jax.nn.one_hot(sampled_BS, logits_BSV.shape[-1]) - jax.nn.softmax(logits_BSV)
        (gradients,) = hidden_vjp(*logits_vjp(score_BSV * counted_BS[..., None]))
        pairs = zip(gradients, changes, strict=True)
        return jnp.stack(
            [
                jnp.einsum("btkgh,cbtkgh->bkc", *pair, preferred_element_type=jnp.float32)
                for pair in pairs
            ],
            1,
        )

    return jnp.mean(jnp.square(jax.lax.map(output_changes, keys_M)), axis=0) / 2


def estimate_loss_rises(
    model: Transformer,
    tokens_BT: np.ndarray,
    lengths_B: np.ndarray,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[np.ndarray, list[int]]:
    """Estimates how much the loss rises if a single key/value head sees fewer keys, for the signal
    `loss`.

    The limited head sees only the first and the most recent keys, 24, 48, 96 … in total (8, 16, 32
    … if no sequence has more than 48 tokens). All other heads see every key. The rise is KL(whole ‖
    limited), the expectation over continuations sampled from the model. The estimate is of second
    order in the change δ of the head's output: KL ≈ ½ δᵀFδ = ½ E (δ · ∇ ln p(y))², where y is
    sampled from the model and F is the Fisher information (Kullback 1959, §2.6). `CONTINUATIONS`
    continuations are sampled for each sequence. One backward pass computes the gradients of all
    heads, so the time hardly grows with the number of heads and sizes.

    Args:
      tokens_BT, lengths_B: right-padded sequences and their lengths; the second half of each
        sequence is counted.
      progress: called with a line at the start and then every few seconds.

    Returns:
      The rises `[L, K, C]` in nats per token, and the C sizes. The last size is the longest
      sequence, whose rise is 0.
    """
    config = model.config
    B, T = tokens_BT.shape
    from_B = lengths_B // 2
    least = MIN_KEPT if T > 2 * MIN_KEPT else SLOT_UNIT
    sizes = [least << i for i in range(T.bit_length()) if least << i < T] + [T]
    elements_per_row = (
        config.num_blocks * config.n_heads * T * (len(sizes) * config.head_size + 4 * T)
        + T * config.vocab_size
    )
    done = Progress(progress, "measuring what eviction costs each head", B, "sequences")

    def read(rows: np.ndarray) -> jax.Array:
        keys = jax.random.split(jax.random.key(int(rows[0])), CONTINUATIONS)
        tokens, lengths, starts = (jnp.asarray(x[rows]) for x in (tokens_BT, lengths_B, from_B))
        return _loss_rises_batch(
            model, tokens, lengths, starts, keys, sizes=tuple(sizes[:-1]), start=int(from_B.min())
        )

    rises_BLKC = map_batches(
        B, int(np.clip(MAX_ELEMENTS // elements_per_row, 1, ROWS)), read, done.advance
    )
    rises_LKC = rises_BLKC.sum(axis=0, dtype=np.float64) / (lengths_B - from_B).sum()
    return np.pad(rises_LKC, [(0, 0), (0, 0), (0, 1)]), sizes

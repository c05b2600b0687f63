"""The loss of a model when one head sees only some of its keys; used by the KV calibration."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.generation.cache_budgets import UNIT
from dantinox.generation.quantized_weights import widen
from dantinox.measure.texts import in_batches, positions_of
from dantinox.model import KVCache, Transformer
from dantinox.model.attention import attention, causal_mask
from dantinox.model.cache import uncompressed_slots
from dantinox.model.cache_store import Store
from dantinox.model.layers import PLAIN_SOFTMAX
from dantinox.report.console import Progress
from dantinox.sampling.selection import crossing_key, ordered_keys

SINKS, LEAST_KEPT = 4, 24  # the second is what a head has at least with the usual settings
ROWS = 32  # read together, fewer of a long text or with a large vocabulary
NUMBERS = 1 << 27  # logits or attention weights held at once
DRAWS = 4  # continuations drawn for each sequence


@partial(jax.tree_util.register_dataclass, data_fields=["kept_K", "from_B"], meta_fields=["best"])
@dataclass(frozen=True)
class Limited:
    """The keys of one call, of which the queries of a text's later part see only some, as if a cache had dropped the others.

    What a query sees does not depend on the queries before it, so a whole text is read at once.

    Attributes:
      kept_K: for each key head how many keys.
      from_B: the position from which each row's queries are limited; those before see everything.
      best: those it attends to most, which is an oracle: no cache can choose better than with the query at hand. Else the
        first `SINKS` and the newest.
    """

    kept_K: jax.Array
    from_B: jax.Array
    best: bool

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        keys_B1S = positions_BT[:, None]
        store = Store.of(k_BTKH, v_BTKH, q_BTKGH.dtype)
        valid_BKTS = causal_mask(positions_BT, keys_B1S, window)
        if self.best:
            weights_BKGTS = attention(q_BTKGH, store, valid_BKTS, softmax).weights_BKGTS
            mean_BKTS = jnp.where(valid_BKTS, jnp.mean(weights_BKGTS, axis=2), 0)
            largest = jax.vmap(jax.vmap(jax.vmap(_largest, (0, None))), (0, None))
            kept_BKTS = largest(mean_BKTS, jnp.minimum(self.kept_K, store.slots))
        else:
            oldest_BKT = positions_BT[:, None] - (self.kept_K - SINKS)[None, :, None]
            kept_BKTS = (keys_B1S < SINKS)[:, :, None] | (keys_B1S[:, :, None] > oldest_BKT[..., None])
        whole_B1T1 = (positions_BT < self.from_B[:, None])[:, None, :, None]
        seen = attention(q_BTKGH, store, valid_BKTS & (whole_B1T1 | kept_BKTS), softmax)
        return seen.out_BTKGH, self, None


def _largest(weights_S: jax.Array, count: jax.Array) -> jax.Array:
    """Which numbers are the `count` largest, equal ones of the last place included."""
    keys_S = ordered_keys(weights_S.astype(jnp.float32))
    return keys_S >= crossing_key(keys_S, jnp.ones_like(weights_S, jnp.float32), lambda larger: larger >= count)


@nnx.jit(static_argnames=("start", "best"), graph_updates=False)
def read_limited(
    model: Transformer,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    kept_LK: jax.Array,
    from_B: jax.Array,
    *,
    start: int,
    best: bool,
) -> jax.Array:
    """Log-probabilities `[B, T − start + 1, V]` of what follows each token from `start − 1` on, of right-padded `tokens_BT`.

    From the position `from_B` on each key head shows `kept_LK` keys, see `Limited`. There is no cache, whatever the model's
    windows: all is read at once.
    """
    model = widen(model)
    layers = tuple(Limited(kept_K, from_B, best) for kept_K in kept_LK)
    seen = KVCache(layers, uncompressed_slots(model.config, tokens_BT.shape[1]))  # type: ignore[arg-type]
    x_BTD, _, _ = model.hidden(tokens_BT, positions_of(tokens_BT, lengths_B), cache=seen)
    return jax.nn.log_softmax(model.logits(x_BTD[:, start - 1 :]).astype(jnp.float32))


def rows_at_once(config: ModelConfig, tokens: int) -> int:
    """How many texts of so many tokens are read together."""
    return int(np.clip(NUMBERS // (tokens * max(config.vocab_size, config.n_heads * tokens)), 1, ROWS))


@jax.jit
def divergence(ours_BSV: jax.Array, full_BSV: jax.Array, counted_BS: jax.Array) -> jax.Array:
    """The mean of KL(full ‖ ours) in nats over the counted steps of each row `[B]`, of log-probabilities."""
    return jnp.mean(jnp.sum(jnp.exp(full_BSV) * (full_BSV - ours_BSV), axis=2), axis=1, where=counted_BS)


@partial(jax.tree_util.register_dataclass, data_fields=["offset_BTKGH", "from_B", "changes_CBTKGH"], meta_fields=["sizes"])
@dataclass(frozen=True)
class Offset:
    """The keys of one call, all visible, with an offset added to what attention returns.

    Attributes:
      offset_BTKGH: added to the output of each query head.
      from_B: the position from which each row's queries would be limited.
      sizes: numbers of keys, `Limited.kept_K`.
      changes_CBTKGH: after a call, by how much the output of each head would change with each size; constants to a gradient.
    """

    offset_BTKGH: jax.Array
    from_B: jax.Array
    sizes: tuple[int, ...]
    changes_CBTKGH: jax.Array | None = None

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=PLAIN_SOFTMAX):
        def through(kept: int) -> jax.Array:
            kept_K = jnp.full(k_BTKH.shape[2], kept)
            return Limited(kept_K, self.from_B, False).attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, None, softmax)[0]

        whole_BTKGH = through(k_BTKH.shape[1] + SINKS)
        changes_CBTKGH = jnp.stack([through(kept) - whole_BTKGH for kept in self.sizes])
        after = replace(self, changes_CBTKGH=jax.lax.stop_gradient(changes_CBTKGH))
        return whole_BTKGH + self.offset_BTKGH.astype(whole_BTKGH.dtype), after, None


@nnx.jit(static_argnames=("sizes", "start"), graph_updates=False)
def _rises(
    model: Transformer,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    from_B: jax.Array,
    keys_M: jax.Array,
    *,
    sizes: tuple[int, ...],
    start: int,
) -> jax.Array:
    """Estimated rises of the loss, summed over the counted tokens of each row: `[B, L, K, C]`; see `loss_rises`."""
    model = widen(model)
    config, (B, T) = model.config, tokens_BT.shape
    shape = B, T, config.kv_heads, config.n_heads // config.kv_heads, config.head_size
    counted_BS = (jnp.arange(start, T) >= from_B[:, None]) & (jnp.arange(start, T) < lengths_B[:, None])

    def read(offsets_LBTKGH: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        layers = tuple(Offset(offset, from_B, sizes) for offset in offsets_LBTKGH)
        seen = KVCache(layers, uncompressed_slots(config, T))  # type: ignore[arg-type]
        x_BTD, after, _ = model.hidden(tokens_BT, positions_of(tokens_BT, lengths_B), cache=seen)
        return x_BTD[:, start:], tuple(layer.changes_CBTKGH for layer in after.layers)  # type: ignore[union-attr]

    x_BSD, pull, changes = jax.vjp(read, (jnp.zeros(shape, model.dtype),) * config.num_blocks, has_aux=True)
    logits_BSV, pull_logits = jax.vjp(lambda x: model.logits(x).astype(jnp.float32), x_BSD)

    def of_sample(key: jax.Array) -> jax.Array:
        drawn_BS = jax.random.categorical(key, logits_BSV)
        score_BSV = jax.nn.one_hot(drawn_BS, logits_BSV.shape[-1]) - jax.nn.softmax(logits_BSV)
        (gradients,) = pull(*pull_logits(score_BSV * counted_BS[..., None]))
        pairs = zip(gradients, changes, strict=True)
        return jnp.stack([jnp.einsum("btkgh,cbtkgh->bkc", *pair, preferred_element_type=jnp.float32) for pair in pairs], 1)

    return jnp.mean(jnp.square(jax.lax.map(of_sample, keys_M)), axis=0) / 2


def loss_rises(
    model: Transformer, tokens_BT: np.ndarray, lengths_B: np.ndarray, progress: Callable[[str], None] = lambda _: None
) -> tuple[np.ndarray, list[int]]:
    """Estimates by how much the loss would rise if one key head alone saw fewer keys, for the signal `loss`.

    The limited head sees no keys but the first and the newest, 24, 48, 96 … in all (8, 16, 32 … if no sequence has more than
    48); all others see everything. The rise is KL(whole ‖ limited), the mean over all continuations that the model expects. It
    is estimated to second order in the change δ of the head's output: KL ≈ ½ δᵀFδ = ½ E (δ · ∇ ln p(y))², where the model draws
    y and F is the Fisher information (Kullback 1959, §2.6). `DRAWS` continuations are drawn for each sequence. One backward
    pass gives the gradients of all heads, so that the time hardly grows with the number of heads and sizes.

    Args:
      tokens_BT, lengths_B: sequences; the second half of each counts.
      progress: called with a line at the start, and every few seconds.

    Returns:
      The rises `[L, K, C]` in nats per token, and the C sizes; the last is the whole longest sequence, and costs nothing.
    """
    config, (B, T) = model.config, tokens_BT.shape
    from_B = lengths_B // 2
    least = LEAST_KEPT if T > 2 * LEAST_KEPT else UNIT
    sizes = [least << i for i in range(T.bit_length()) if least << i < T] + [T]
    numbers = config.num_blocks * config.n_heads * T * (len(sizes) * config.head_size + 4 * T) + T * config.vocab_size
    done = Progress(progress, "measuring what eviction costs each head", B, "sequences")

    def read(rows: np.ndarray) -> jax.Array:
        keys = jax.random.split(jax.random.key(int(rows[0])), DRAWS)
        tokens, lengths, starts = (jnp.asarray(x[rows]) for x in (tokens_BT, lengths_B, from_B))
        return _rises(model, tokens, lengths, starts, keys, sizes=tuple(sizes[:-1]), start=int(from_B.min()))

    rises_BLKC = in_batches(B, int(np.clip(NUMBERS // numbers, 1, ROWS)), read, done.advance)
    rises_LKC = rises_BLKC.sum(axis=0, dtype=np.float64) / (lengths_B - from_B).sum()
    return np.pad(rises_LKC, [(0, 0), (0, 0), (0, 1)]), sizes

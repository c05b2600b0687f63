"""The loss of a model when one head sees only some of its keys; used by the KV calibration."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.generation.cache_budgets import UNIT
from dantinox.generation.quantized_weights import widen
from dantinox.measure.texts import batches, positions_of
from dantinox.model import KVCache, Transformer
from dantinox.model.attention import attention, visible
from dantinox.model.cache import spans
from dantinox.model.cache_store import Store
from dantinox.model.layers import SOFTMAX
from dantinox.report.console import Progress
from dantinox.sampling.selection import crossing_key, ordered_keys

SINKS, LEAST_KEPT = 4, 24  # the second is what a head has at least with the usual settings
ROWS = 32  # read together, fewer of a long text or with a large vocabulary
NUMBERS = 1 << 27  # logits or attention weights held at once


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

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None, softmax=SOFTMAX):
        keys_B1S = positions_BT[:, None]
        store = Store.of(k_BTKH, v_BTKH, q_BTKGH.dtype)
        valid_BKTS = visible(positions_BT, keys_B1S, window)
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
    seen = KVCache(layers, spans(model.config, tokens_BT.shape[1]))  # type: ignore[arg-type]
    x_BTD, _, _ = model.hidden(tokens_BT, positions_of(tokens_BT, lengths_B), cache=seen)
    return jax.nn.log_softmax(model.logits(x_BTD[:, start - 1 :]).astype(jnp.float32))


def rows_at_once(config: ModelConfig, tokens: int) -> int:
    """How many texts of so many tokens are read together."""
    return int(np.clip(NUMBERS // (tokens * max(config.vocab_size, config.n_heads * tokens)), 1, ROWS))


@jax.jit
def divergence(ours_BSV: jax.Array, full_BSV: jax.Array, counted_BS: jax.Array) -> jax.Array:
    """The mean of KL(full ‖ ours) in nats over the counted steps of each row `[B]`, of log-probabilities."""
    return jnp.mean(jnp.sum(jnp.exp(full_BSV) * (full_BSV - ours_BSV), axis=2), axis=1, where=counted_BS)


def loss_rises(
    model: Transformer, tokens_BT: np.ndarray, lengths_B: np.ndarray, progress: Callable[[str], None] = lambda _: None
) -> tuple[np.ndarray, list[int]]:
    """What eviction costs each key head, for the signal `loss`.

    Each head alone is made to see no keys but the first and the newest, 24, 48, 96 … in all (8, 16, 32 … if no sequence has
    more than 48), while all others see everything. What is measured is by how much the loss would rise if tokens came as the
    whole model expects them, KL(whole ‖ limited): the mean over all continuations, where the rise on a single text is noisy
    and may be negative.

    Args:
      tokens_BT, lengths_B: sequences; the second half of each counts.
      progress: called with a line at the start, and every few seconds.

    Returns:
      The rises `[L, K, C]` in nats per token, and the C sizes; the last is the whole longest sequence, and costs nothing.
    """
    L, K = model.config.num_blocks, model.config.kv_heads
    B, T = tokens_BT.shape
    from_B = lengths_B // 2
    start = int(from_B.min())
    least = LEAST_KEPT if T > 2 * LEAST_KEPT else UNIT
    sizes = [least << i for i in range(T.bit_length()) if least << i < T] + [T]
    whole_LK, rises_LKC = np.full((L, K), T), np.zeros((L, K, len(sizes)))
    read, at_once = 0, rows_at_once(model.config, T)
    done = Progress(
        progress, "measuring what eviction costs each head", -(-B // at_once) * L * K * (len(sizes) - 1), "readings"
    )
    for at in batches(B, at_once):
        new_B = np.arange(read, read + len(at)) < B  # the others were read already
        counted_BS = (np.arange(start, T) >= from_B[at, None]) & (np.arange(start, T) < lengths_B[at, None])
        share_B = new_B * counted_BS.sum(1) / (lengths_B - from_B).sum()
        inputs = jnp.asarray(tokens_BT[at]), jnp.asarray(lengths_B[at])
        limited = partial(read_limited, model, *inputs, from_B=jnp.asarray(from_B[at]), start=start, best=False)
        whole_BSV = limited(kept_LK=jnp.asarray(whole_LK))[:, : T - start]
        for layer in range(L):
            for head, c in itertools.product(range(K), range(len(sizes) - 1)):
                kept_LK = whole_LK.copy()
                kept_LK[layer, head] = sizes[c]
                kl_B = divergence(limited(kept_LK=jnp.asarray(kept_LK))[:, : T - start], whole_BSV, counted_BS)
                rises_LKC[layer, head, c] += np.asarray(kl_B, np.float64) @ share_B
                done.advance()
        read += len(at)
    return rises_LKC, sizes

"""What a compressed cache does to a model: a text read through it and through the full one, token by token."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.config import ModelConfig
from dantinox.generation.budgets import UNIT
from dantinox.generation.decode import CachePlan
from dantinox.generation.prepare import widen
from dantinox.model import KVCache, Transformer, make_cache
from dantinox.model.attention import attention, visible
from dantinox.model.cache import spans
from dantinox.model.store import Store

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

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        keys_B1S = positions_BT[:, None]
        store = Store.of(k_BTKH, v_BTKH, q_BTKGH.dtype)
        valid_BKTS = visible(positions_BT, keys_B1S, window)
        if self.best:
            weights_BKGTS = attention(q_BTKGH, store, valid_BKTS).weights_BKGTS
            mean_BKTS = jnp.where(valid_BKTS, jnp.mean(weights_BKGTS, axis=2), 0)
            kept_BKTS = mean_BKTS >= _kth_largest(mean_BKTS, jnp.minimum(self.kept_K, store.slots)[:, None, None])
        else:
            oldest_BKT = positions_BT[:, None] - (self.kept_K - SINKS)[None, :, None]
            kept_BKTS = (keys_B1S < SINKS)[:, :, None] | (keys_B1S[:, :, None] > oldest_BKT[..., None])
        whole_B1T1 = (positions_BT < self.from_B[:, None])[:, None, :, None]
        seen = attention(q_BTKGH, store, valid_BKTS & (whole_B1T1 | kept_BKTS))
        return seen.out_BTKGH, self, None


def _kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest along the last axis, which is kept, of numbers that are not negative; several times faster than sorting.

    The bits of such floats, read as integers, have their order: the result is found bit by bit from the highest on.
    """
    bits = x.astype(jnp.float32).view(jnp.int32)

    def with_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        higher = found | (1 << (30 - i))
        return jnp.where(jnp.sum(bits >= higher, axis=-1, keepdims=True) >= k, higher, found)

    return jax.lax.fori_loop(0, 31, with_bit, jnp.zeros((*x.shape[:-1], 1), jnp.int32)).view(jnp.float32)


def kept_by(plan: CachePlan) -> np.ndarray:
    """The slots of every key head `[L, K]` that a plan gives."""
    assert plan.compression is not None
    return np.array([[slots for heads, slots in groups for _ in range(heads)] for groups in plan.compression.groups])


_compiled: Any = partial(nnx.jit, graph_updates=False)


@partial(_compiled, static_argnames=("plan", "start"))
def read_through(model: Transformer, tokens_BT: jax.Array, lengths_B: jax.Array, *, plan: CachePlan, start: int) -> jax.Array:
    """Log-probabilities `[B, T − start + 1, V]` of what follows each token from `start − 1` on, through a cache.

    The first `start` tokens are read as a prompt, the others one by one, as decoding does.

    Args:
      tokens_BT: right-padded; what stands behind a row's length is not read.
    """
    B = len(tokens_BT)
    model = widen(model)
    positions_BT = positions_of(tokens_BT, lengths_B)
    empty = make_cache(model.config, B, plan.slots, plan.dtype, plan.compression)
    x_BtD, cache, _ = model.hidden(tokens_BT[:, :start], positions_BT[:, :start], cache=empty)
    last_B = jnp.minimum(lengths_B, start) - 1
    first_BV = model.logits(x_BtD[jnp.arange(B), last_B])

    def step(cache: KVCache | None, column: tuple[jax.Array, jax.Array]) -> tuple[KVCache | None, jax.Array]:
        token_B, position_B = column
        x_B1D, cache, _ = model.hidden(token_B[:, None], position_B[:, None], cache=cache)
        return cache, model.logits(x_B1D[:, 0])

    _, rest_SBV = jax.lax.scan(step, cache, (tokens_BT[:, start:].T, positions_BT[:, start:].T))
    logits_BSV = jnp.concatenate([first_BV[:, None], rest_SBV.transpose(1, 0, 2)], axis=1)
    return jax.nn.log_softmax(logits_BSV.astype(jnp.float32))


@partial(_compiled, static_argnames=("start", "best"))
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
    """Log-probabilities as of `read_through`, if from the position `from_B` on each key head shows `kept_LK` keys (`Limited`).

    There is no cache, whatever the model's windows: all is read at once.
    """
    model = widen(model)
    layers = tuple(Limited(kept_K, from_B, best) for kept_K in kept_LK)
    seen = KVCache(layers, spans(model.config, tokens_BT.shape[1]))  # type: ignore[arg-type]
    x_BTD, _, _ = model.hidden(tokens_BT, positions_of(tokens_BT, lengths_B), cache=seen)
    return jax.nn.log_softmax(model.logits(x_BTD[:, start - 1 :]).astype(jnp.float32))


def positions_of(tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """The position of each token of right-padded texts, −1 behind their ends."""
    places_T = jnp.arange(tokens_BT.shape[1])
    return jnp.where(places_T < lengths_B[:, None], places_T, -1)


def rows_at_once(config: ModelConfig, tokens: int) -> int:
    """How many texts of so many tokens are read together."""
    return int(np.clip(NUMBERS // (tokens * max(config.vocab_size, config.n_heads * tokens)), 1, ROWS))


def evenly(count: int, most: int) -> int:
    """The size of batches of at most `most` that hold `count` things with the fewest empty places."""
    return -(-count // -(-count // most))


class Damage(NamedTuple):
    """Per sequence: mean loss (nats per token), mean KL(full ‖ compressed) in nats, share of steps with the same best token."""

    loss_B: np.ndarray
    kl_B: np.ndarray
    top1_B: np.ndarray


def damage(logprobs_BSV: jax.Array, full_BSV: jax.Array, tokens_BT: np.ndarray, lengths_B: np.ndarray, start: int) -> Damage:
    """What `logprobs` (of `read_through`) says beside the full cache's, over the tokens behind the prompt."""
    ours, full = (x[:, : tokens_BT.shape[1] - start] for x in (logprobs_BSV, full_BSV))
    counted_BS = _counted(tokens_BT, lengths_B, start)
    said_B = _said(ours, jnp.asarray(tokens_BT[:, start:]), counted_BS)
    kl_B, same_B = _compared(ours, full, counted_BS)
    return Damage(*(np.asarray(x_B, np.float64) for x_B in (-said_B, kl_B, same_B)))


def _counted(tokens_BT: np.ndarray, lengths_B: np.ndarray, start: int) -> np.ndarray:
    return np.arange(start, tokens_BT.shape[1]) < lengths_B[:, None]


@jax.jit
def _said(logprobs_BSV, next_BS, counted_BS):
    said_BS = jnp.take_along_axis(logprobs_BSV, next_BS[:, :, None], axis=2)[..., 0]
    return jnp.mean(said_BS, axis=1, where=counted_BS)


@jax.jit
def _compared(ours, full, counted_BS):
    kl_BS = jnp.sum(jnp.exp(full) * (full - ours), axis=2)
    same_BS = jnp.argmax(ours, axis=2) == jnp.argmax(full, axis=2)
    return tuple(jnp.mean(x_BS, axis=1, where=counted_BS) for x_BS in (kl_BS, same_BS))


def loss_rises(
    model: Transformer, tokens_BT: np.ndarray, lengths_B: np.ndarray, progress: Callable[[str], None] = lambda _: None
) -> tuple[np.ndarray, list[int]]:
    """What eviction costs each key head, for the signal `loss`.

    Each head alone is made to see no keys but the first and the newest, 24, 48, 96 … in all (8, 16, 32 … if no sequence has
    more than 48), while all others see everything. What is measured is by how much the loss would rise if tokens came as the
    whole model expects them, KL(whole ‖ limited): the mean over all continuations, where the rise on a single text is noisy
    and may be negative.

    Args:
      tokens_BT, lengths_B: sequences; what is said of each one's second half counts.
      progress: called with a line before every layer.

    Returns:
      The rises `[L, K, C]` in nats per token, and the C sizes; the last is the whole longest sequence, and costs nothing.
    """
    L, K = model.config.num_blocks, model.config.kv_heads
    B, T = tokens_BT.shape
    from_B = lengths_B // 2
    start, rows = int(from_B.min()), evenly(B, rows_at_once(model.config, T))
    least = LEAST_KEPT if T > 2 * LEAST_KEPT else UNIT
    sizes = [least << i for i in range(T.bit_length()) if least << i < T] + [T]
    whole_LK, rises_LKC = np.full((L, K), T), np.zeros((L, K, len(sizes)))
    for first in range(0, B, rows):
        at = np.arange(first, first + rows) % B
        ids_BT, ends_B, halves_B = tokens_BT[at], lengths_B[at], from_B[at]
        counted_BS = _counted(ids_BT, ends_B, start) & (np.arange(start, T) >= halves_B[:, None])
        share_B = np.where(np.arange(first, first + rows) < B, ends_B - halves_B, 0) / (lengths_B - from_B).sum()
        inputs = jnp.asarray(ids_BT), jnp.asarray(ends_B)
        read = partial(read_limited, model, *inputs, from_B=jnp.asarray(halves_B), start=start, best=False)
        whole_BSV = read(jnp.asarray(whole_LK))[:, : T - start]
        for layer in range(L):
            progress(
                f"measuring what eviction costs, sequences {first + 1} to {min(first + rows, B)}, layer {layer + 1} of {L}"
            )
            for head, c in itertools.product(range(K), range(len(sizes) - 1)):
                kept_LK = whole_LK.copy()
                kept_LK[layer, head] = sizes[c]
                kl_B, _ = _compared(read(jnp.asarray(kept_LK))[:, : T - start], whole_BSV, counted_BS)
                rises_LKC[layer, head, c] += np.asarray(kl_B, np.float64) @ share_B
    return rises_LKC, sizes

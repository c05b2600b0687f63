"""What a compressed cache does to a model: a text read through it and through the full one, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dantinox.generation.engine import CachePlan
from dantinox.generation.prepare import widen
from dantinox.model import Transformer, make_cache
from dantinox.model.cache import Full, KVCache
from dantinox.model.store import Store, attention, probed, visible

SINKS, LEAST_KEPT = 4, 32
LOSS_SHARE = 0.2  # of all slots: the budget whose greedy division is the signal `loss`


@partial(jax.tree_util.register_dataclass, data_fields=["full", "kept_K"], meta_fields=["best"])
@dataclass(frozen=True)
class Limited:
    """A full layer that keeps everything, of which every later query sees only some keys.

    Attributes:
      kept_K: for each key head how many.
      best: those it attends to most, which is an oracle: no cache can choose better than with the query at hand. Else the
        first `SINKS` and the newest.
    """

    full: Full
    kept_K: jax.Array
    best: bool = True

    def attend(self, q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe=None):
        out_BTKGH, full, told = self.full.attend(q_BTKGH, k_BTKH, v_BTKH, positions_BT, window, probe)
        if positions_BT.shape[1] > 1:  # a prompt is read whole by every cache
            return out_BTKGH, replace(self, full=full), told
        store = full.store
        places_S = jnp.arange(store.slots)
        valid_BKTS = visible(positions_BT, places_S[None, None], window)
        if self.best:
            weights_BKGTS = attention(q_BTKGH, store, valid_BKTS).weights_BKGTS
            mean_BKTS = jnp.where(valid_BKTS, jnp.mean(weights_BKGTS, axis=2), -1)
            last_1K11 = (jnp.minimum(self.kept_K, store.slots) - 1)[None, :, None, None]
            least_BKT1 = jnp.take_along_axis(-jnp.sort(-mean_BKTS, axis=3), last_1K11, axis=3)
            valid_BKTS &= mean_BKTS >= least_BKT1
        else:
            oldest_BK11 = positions_BT[:, :, None, None] - (self.kept_K - SINKS)[None, :, None, None]
            valid_BKTS &= (places_S < SINKS) | (places_S > oldest_BK11)
        seen = attention(q_BTKGH, store, valid_BKTS)
        return seen.out_BTKGH, replace(self, full=full), probed(probe, seen, valid_BKTS, positions_BT)


def kept_by(plan: CachePlan) -> np.ndarray:
    """The slots of every key head `[L, K]` that a plan gives."""
    assert plan.compression is not None
    return np.array([[slots for heads, slots in groups for _ in range(heads)] for groups in plan.compression.groups])


def limited_cache(model: Transformer, batch: int, plan: CachePlan, kept_LK: jax.Array, best: bool = True) -> KVCache:
    """An empty cache of `Limited` layers, whatever the model's windows."""
    cache = make_cache(model.config, batch, plan.slots, plan.dtype)
    K, H = model.config.kv_heads, model.config.head_size
    layers = [Limited(Full(Store.empty(batch, K, H, plan.slots, jnp.dtype(plan.dtype))), kept_K, best) for kept_K in kept_LK]
    return replace(cache, layers=tuple(layers))  # type: ignore[arg-type]


_compiled: Any = partial(nnx.jit, static_argnames=("plan", "start", "best"), graph_updates=False)


@_compiled
def read_through(
    model: Transformer,
    tokens_BT: jax.Array,
    lengths_B: jax.Array,
    kept_LK: Any = None,
    *,
    plan: CachePlan,
    start: int,
    best: bool = True,
) -> jax.Array:
    """Log-probabilities `[B, T − start + 1, V]` of what follows each token from `start − 1` on, through a cache.

    The first `start` tokens are read as a prompt, the others one by one, as decoding does.

    Args:
      tokens_BT: right-padded; what stands behind a row's length is not read.
      kept_LK: keep all and show each key head so many keys, the `best` or the newest; the plan's compression is not used.
    """
    B, T = tokens_BT.shape
    model = widen(model)
    if kept_LK is None:
        empty = make_cache(model.config, B, plan.slots, plan.dtype, plan.compression)
    else:
        empty = limited_cache(model, B, plan, kept_LK, best)
    places_T = jnp.arange(T)
    positions_BT = jnp.where(places_T < lengths_B[:, None], places_T, -1)
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


class Damage(NamedTuple):
    """Per sequence: mean loss (nats per token), mean KL(full ‖ compressed) in nats, share of steps with the same best token."""

    loss_B: np.ndarray
    kl_B: np.ndarray
    top1_B: np.ndarray


def damage(logprobs_BSV: jax.Array, full_BSV: jax.Array, tokens_BT: np.ndarray, lengths_B: np.ndarray, start: int) -> Damage:
    """What `logprobs` (of `read_through`) says beside the full cache's, over the tokens behind the prompt."""
    next_BS = jnp.asarray(tokens_BT[:, start:])
    counted_BS = start + jnp.arange(next_BS.shape[1]) < jnp.asarray(lengths_B)[:, None]
    return Damage(*(np.asarray(x, np.float64) for x in _damage(logprobs_BSV, full_BSV, next_BS, counted_BS)))


@jax.jit
def _damage(logprobs_BSV, full_BSV, next_BS, counted_BS):
    ours, full = (x[:, : next_BS.shape[1]] for x in (logprobs_BSV, full_BSV))
    said = jnp.take_along_axis(ours, next_BS[:, :, None], axis=2)[..., 0]
    kl = jnp.sum(jnp.exp(full) * (full - ours), axis=2)
    same = jnp.argmax(ours, axis=2) == jnp.argmax(full, axis=2)
    steps_B = jnp.sum(counted_BS, axis=1)
    return tuple(jnp.sum(jnp.where(counted_BS, x, 0), axis=1) / steps_B for x in (-said, kl, same))


def loss_signal(
    model: Transformer,
    tokens_BT: np.ndarray,
    lengths_B: np.ndarray,
    slots: int,
    progress: Callable[[str], None] = lambda _: None,
) -> np.ndarray:
    """The signal `loss` `[L, K]`: how many slots each key head gets where every slot goes to the head it helps most.

    For each head alone, the rise of the loss is measured when a query sees through it only the first tokens and the newest, 32,
    64, 128 … in all, and through all other heads everything. Then `LOSS_SHARE` of all slots is given away by the largest fall
    of the loss per slot.

    Args:
      tokens_BT, lengths_B: sequences; the second half of the longest is decoded token by token.
      slots: of an uncompressed cache.
    """
    L, K = model.config.num_blocks, model.config.kv_heads
    start = int(lengths_B.max()) // 2
    sizes = [LEAST_KEPT << i for i in range(slots.bit_length()) if LEAST_KEPT << i < slots] + [slots]
    plan = CachePlan(slots, jnp.dtype(model.dtype).name)
    inputs = model, jnp.asarray(tokens_BT), jnp.asarray(lengths_B)
    rows = lengths_B > start
    full = read_through(*inputs, np.full((L, K), slots), plan=plan, start=start, best=False)

    def loss(kept_LK: np.ndarray) -> float:
        read = read_through(*inputs, kept_LK, plan=plan, start=start, best=False)
        return float(np.mean(damage(read, full, tokens_BT, lengths_B, start).loss_B[rows]))

    base = loss(np.full((L, K), slots))
    rises_LKC = np.zeros((L, K, len(sizes)))
    for layer in range(L):
        for head in range(K):
            for c, size in enumerate(sizes[:-1]):
                kept_LK = np.full((L, K), slots)
                kept_LK[layer, head] = size
                rises_LKC[layer, head, c] = loss(kept_LK) - base
        progress(f"layer {layer + 1} of {L}")
    return divided(rises_LKC.reshape(L * K, -1), sizes, LOSS_SHARE).reshape(L, K)


def divided(rises_NC: np.ndarray, sizes: Sequence[int], share: float) -> np.ndarray:
    """Slots `[N]` of heads whose loss rises by `rises_NC` at `sizes` slots: each next step to the one it helps most per slot.

    All begin with the least size; a step may be as long as makes it worth most; what no head has a use for is shared equally.
    """
    N = len(rises_NC)
    at_N, left = np.zeros(N, int), share * N * sizes[-1] - N * sizes[0]
    while True:
        best = (0.0, -1, 0)
        for n, at in enumerate(at_N):
            for to in range(at + 1, len(sizes)):
                price = sizes[to] - sizes[at]
                worth = (rises_NC[n, at] - rises_NC[n, to]) / price
                if price <= left and worth > best[0]:
                    best = (worth, n, to)
        if best[1] < 0:
            return np.array([sizes[at] for at in at_N]) + max(left, 0) / N
        _, n, to = best
        left -= sizes[to] - sizes[at_N[n]]
        at_N[n] = to

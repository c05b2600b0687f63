"""Budgets of a compressed cache: how many slots each key head gets.

All of it happens before anything is compiled: the numbers here are the shapes of the buffers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

UNIT = 8
PRIOR = 3e-4  # nats per token each time a head's slots are cut in half, in `allocate_by_loss`
PARTS = 4  # of a doubling
SHARES = 4096  # that `allocate_by_loss` counts all slots in

GROUPINGS: dict[str, Callable[..., np.ndarray]] = {"max": np.max, "mean": np.mean, "min": np.min}

Groups = tuple[tuple[int, int], ...]
Layer = list[tuple[int, int]]  # the same while it is being worked on


class Allocation(NamedTuple):
    """The slots of every key head.

    Attributes:
      order: per layer its key heads, those with more slots first.
      groups: per layer one or two groups `(heads, slots)`, the one with more slots first: the first group's heads stand
        first in `order`.
    """

    order: tuple[tuple[int, ...], ...]
    groups: tuple[Groups, ...]


def reduce_query_heads(signal_LN: np.ndarray, kv_heads: int, grouping: str) -> np.ndarray:
    """The signal of each key head `[L, K]` from those of its query heads, which stand next to each other.

    Args:
      grouping: "max", "mean" or "min" of the query heads.
    """
    signal_LKG = np.asarray(signal_LN, np.float64).reshape(len(signal_LN), kv_heads, -1)
    return GROUPINGS[grouping](signal_LKG, axis=-1)


def head_weights(signal_LK: np.ndarray, scale_min: float, scale_max: float) -> np.ndarray:
    """What a head's share goes by `[L, K]`: its signal over the mean of all heads, within [scale_min, scale_max]."""
    signal_LK = np.asarray(signal_LK, np.float64)
    mean = signal_LK.mean()
    return np.clip(signal_LK / mean, scale_min, scale_max) if mean > 0 else np.ones_like(signal_LK)


def allocate_by_loss(rises_LKC: np.ndarray, slots_C: Sequence[int], share: float, floor: int) -> np.ndarray:
    """Slots of each key head `[L, K]` with which the loss rises least, for a share of all slots and two sizes in a layer.

    Rises are summed over heads. Between the measured sizes they are taken to be linear in log₂ of the slots, and each time the
    slots are cut in half `PRIOR` is added: heads that lose their slots together cost more than each alone, and other texts look
    further back. A dynamic programme over the layers (multiple-choice knapsack, Kellerer, Pferschy and Pisinger 2004, ch. 11)
    then finds the best of all pairs of sizes, `PARTS` to a doubling, and of heads that get the larger one. It counts slots in
    `SHARES` parts of the whole, each layer's rounded up, so that a few may be left.

    Args:
      rises_LKC: by how many nats per token the loss is higher if a head has C sizes alone.
      slots_C: the sizes, growing; the last one is everything.
      share: of L · K · `slots_C[-1]` slots.
      floor: no head has fewer, nor fewer than `slots_C[0]`, whatever the share.
    """
    L, K, _ = rises_LKC.shape
    size_S, curves_LKS = _curves(rises_LKC, slots_C, floor)
    S = len(size_S)
    # All ways to divide a layer: h heads have the larger size, those that gain most by it.
    large_X, small_X, heads_X = (x.ravel() for x in np.indices((S, S, K)))
    slots_X = heads_X * size_S[large_X] + (K - heads_X) * size_S[small_X]
    steps_X = np.ceil(slots_X * SHARES / max(share * L * K * size_S[-1], L * K * size_S[0]) - 1e-9).astype(np.int64)
    least_W, taken = np.zeros(SHARES + 1), []  # the least rise of the layers so far for up to W steps, and by which way
    for curve_KS in curves_LKS:
        gain_SSK = -np.sort(curve_KS.T[:, None] - curve_KS.T, axis=-1)
        gain_SSK = np.cumsum(np.concatenate([np.zeros((S, S, 1)), gain_SSK[..., :-1]], axis=-1), axis=-1)
        rise_X = curve_KS.sum(axis=0)[small_X] - gain_SSK.ravel()
        before_W, least_W, way_W = least_W, np.full(SHARES + 1, np.inf), np.full(SHARES + 1, -1)
        for x in _undominated(steps_X, rise_X):
            rise_W = before_W[: SHARES + 1 - steps_X[x]] + rise_X[x]
            better_W = rise_W < least_W[steps_X[x] :]
            least_W[steps_X[x] :][better_W] = rise_W[better_W]
            way_W[steps_X[x] :][better_W] = x
        taken.append(way_W)
    slots_LK, left = np.zeros((L, K)), SHARES
    for layer in reversed(range(L)):
        x = taken[layer][left]
        gain_K = curves_LKS[layer, :, small_X[x]] - curves_LKS[layer, :, large_X[x]]
        slots_LK[layer] = size_S[small_X[x]]
        slots_LK[layer, np.argsort(-gain_K, kind="stable")[: heads_X[x]]] = size_S[large_X[x]]
        left -= steps_X[x]
    return slots_LK


def _curves(rises_LKC: np.ndarray, slots_C: Sequence[int], floor: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes from the floor on, and what each costs every head `[L, K, S]`, never more than a smaller one."""
    C = len(slots_C)
    log_C = np.log2(np.asarray(slots_C, np.float64))
    log_S = np.interp(np.linspace(0, C - 1, PARTS * (C - 1) + 1), np.arange(C), log_C)
    log_S = np.unique(np.clip(log_S, min(np.log2(floor), log_C[-1]), None))
    curves_LKS = np.apply_along_axis(lambda rises_C: np.interp(log_S, log_C, rises_C), 2, rises_LKC)
    return 2**log_S, np.minimum.accumulate(curves_LKS + PRIOR * (log_C[-1] - log_S), axis=2)


def _undominated(cost_X: np.ndarray, value_X: np.ndarray) -> np.ndarray:
    """Those of which no other costs as little and has a lower value, within `SHARES`."""
    order_X = np.lexsort((value_X, cost_X))
    lowest_X = np.minimum.accumulate(value_X[order_X])
    better_X = np.concatenate([[True], lowest_X[1:] < lowest_X[:-1]])
    return order_X[better_X & (cost_X[order_X] <= SHARES)]


def min_total(caps_L: Sequence[int], kv_heads: int, floor: int) -> int:
    """The fewest slots that give every head of every layer its floor."""
    return kv_heads * int(_floors(np.asarray(caps_L), floor).sum())


def allocate_by_weight(weights_LK: np.ndarray, caps_L: Sequence[int], total: int, floor: int) -> Allocation:
    """Slots by weight that sum to `total`, short of it by less than `UNIT`, or all the caps where these are fewer.

    Water-filling: a head wishes for level · weight slots, no less than its floor and no more than its layer's cap, in whole
    units. The level is the highest at which the wishes fit, counting for every head of a group what its first one wishes.

    Args:
      weights_LK: positive numbers.
      caps_L: the most slots a head of the layer can use. A cap may be reached exactly; other capacities are whole units.
      floor: the fewest slots of a head, rounded up to whole units, or the cap where this is lower.

    Returns:
      In a layer a larger weight never has fewer slots than a smaller one. The order is that of the weights, the total does
      not matter.

    Raises:
      ValueError: `total` is below `min_total`.
    """
    weights_LK = np.asarray(weights_LK, np.float64)
    L, K = weights_LK.shape
    if total < (least := min_total(caps_L, K, floor)):
        raise ValueError(f"total must be at least {least}, got {total}")
    caps_L1 = np.asarray(caps_L)[:, None]
    floors_L1 = _floors(caps_L1, floor)
    order_LK = np.argsort(-weights_LK, axis=1, kind="stable")
    weights_LK = np.take_along_axis(weights_LK, order_LK, axis=1)
    shares_LK = np.clip(_level(weights_LK, floors_L1, caps_L1, total) * weights_LK, floors_L1, caps_L1)
    layers = [_cut(wishes_K) for wishes_K in _in_units(shares_LK, floors_L1, caps_L1)]
    _give_rest(layers, shares_LK, floors_L1[:, 0].tolist(), caps_L1[:, 0].tolist(), total)
    return Allocation(tuple(map(tuple, order_LK.tolist())), tuple(_merged(layer) for layer in layers))


def _floors(caps: np.ndarray, floor: int) -> np.ndarray:
    floors: np.ndarray = np.minimum(-(-floor // UNIT) * UNIT, caps)
    return floors


def _in_units(shares_LK: np.ndarray, floors_L1: np.ndarray, caps_L1: np.ndarray) -> np.ndarray:
    """The nearest whole units, but a cap exactly where it is reached."""
    units_LK = np.floor(shares_LK / UNIT + 0.5).astype(np.int64) * UNIT
    exact_LK: np.ndarray = np.where(shares_LK >= caps_L1, caps_L1, np.clip(units_LK, floors_L1, caps_L1))
    return exact_LK


def _totals(wishes_LK: np.ndarray) -> np.ndarray:
    """The padded total of a layer for every way to cut it, `[L, K]`: h heads in the first group, or all in one for h = 0."""
    K = wishes_LK.shape[-1]
    heads_K = np.arange(K)
    totals_LK: np.ndarray = heads_K * wishes_LK[..., :1] + (K - heads_K) * wishes_LK
    return totals_LK


def _cut(wishes_K: np.ndarray) -> Layer:
    """The cut with the least padded total."""
    heads = int(_totals(wishes_K).argmin())
    rest = (len(wishes_K) - heads, int(wishes_K[heads]))
    return [(heads, int(wishes_K[0])), rest] if heads else [rest]


def _level(weights_LK: np.ndarray, floors_L1: np.ndarray, caps_L1: np.ndarray, total: int) -> float:
    """The highest level whose padded wishes fit, to the last bit."""
    low, high = 0.0, 2 * float((caps_L1 / weights_LK).max())
    while low < (middle := (low + high) / 2) < high:
        wishes_LK = _in_units(np.clip(middle * weights_LK, floors_L1, caps_L1), floors_L1, caps_L1)
        if _totals(wishes_LK).min(axis=1).sum() <= total:
            low = middle
        else:
            high = middle
    return low


def _slots(layer: Layer) -> np.ndarray:
    return np.repeat([slots for _, slots in layer], [heads for heads, _ in layer])


def _lack(shares_K: np.ndarray, slots_XK: np.ndarray) -> np.ndarray:
    """How much slots fall short of the shares; too many do no harm."""
    lack_X: np.ndarray = (np.maximum(shares_K - slots_XK, 0) ** 2).sum(axis=-1)
    return lack_X


def _give_rest(layers: list[Layer], shares_LK: np.ndarray, floors_L: list[int], caps_L: list[int], total: int) -> None:
    """Gives away what the level left, at first a unit to whole groups, those that lack most for their share first.

    At the next level no head wishes for more than one unit more and the total is exceeded, so one unit to every group is
    more than there is. What is left then is less than a unit for a group passed over, and its layer can take it when it is cut
    anew; of all layers that can, the one that is served best gets it.
    """
    left = total - sum(int(_slots(layer).sum()) for layer in layers)
    places = [(number, i) for number, layer in enumerate(layers) for i in range(len(layer))]
    # A group's first head has the largest share in it.
    surplus = {(number, i): layers[number][i][1] - shares_LK[number, layers[number][0][0] * i] for number, i in places}
    for number, i in sorted(places, key=lambda place: surplus[place]):
        heads, slots = layers[number][i]
        step = min(UNIT, caps_L[number] - slots)
        if heads * step <= left:
            layers[number][i] = (heads, slots + step)
            left -= heads * step
    if left < UNIT:
        return
    found = [
        (*cut, number)
        for number, layer in enumerate(layers)
        if (cut := _recut(layer, shares_LK[number], floors_L[number], caps_L[number], left))
    ]
    if found:
        _, layer, number = min(found, key=lambda cut: cut[0])
        layers[number] = layer


def _recut(layer: Layer, shares_K: np.ndarray, floor: int, cap: int, left: int) -> tuple[float, Layer] | None:
    """The layer cut in two with `left` slots more, short of them by less than a unit, so that little is lacking.

    Returns:
      By how much more or less is lacking than before, and the groups; None where the cap leaves no room. There is a way
      wherever there is room: heads that go one by one from one size to the next make steps of a unit or less.
    """
    K, slots_K = len(shares_K), _slots(layer)
    total = int(slots_K.sum()) + left
    if total >= K * cap:
        return None
    heads_H1 = np.arange(1, K)[:, None]
    # Both groups equally far from their mean shares. Sizes of the second that leave the first whole units recur within K.
    first_H1 = np.cumsum(shares_K)[:-1, None]
    middle_H1 = (shares_K.sum() - first_H1) / (K - heads_H1) + (total - shares_K.sum()) / K
    middle_H1 = np.clip(middle_H1, np.maximum(floor, (total - heads_H1 * cap) / (K - heads_H1)), total / K)
    small_HS = (middle_H1 // UNIT + np.arange(-K, K + 1)).astype(np.int64) * UNIT
    left_HS = total - (K - heads_H1) * small_HS
    large_HS = np.minimum(left_HS // heads_H1, cap) // UNIT * UNIT
    large_HS = np.where(left_HS - heads_H1 * large_HS < UNIT, large_HS, cap)
    spare_HS = left_HS - heads_H1 * large_HS
    allowed_HS = (floor <= small_HS) & (small_HS <= large_HS) & (small_HS < cap) & (spare_HS >= 0) & (spare_HS < UNIT)
    if not allowed_HS.any():
        return None
    heads_X, small_X, large_X = np.nonzero(allowed_HS)[0] + 1, small_HS[allowed_HS], large_HS[allowed_HS]
    slots_XK = np.where(np.arange(K) < heads_X[:, None], large_X[:, None], small_X[:, None])
    lack_X = _lack(shares_K, slots_XK)
    x = np.lexsort((((slots_XK - shares_K) ** 2).sum(axis=1), lack_X))[0]
    heads = int(heads_X[x])
    return float(lack_X[x] - _lack(shares_K, slots_K)), [(heads, int(large_X[x])), (K - heads, int(small_X[x]))]


def _merged(layer: Layer) -> Groups:
    """Two groups of the same capacity are one."""
    if len(layer) == 2 and layer[0][1] == layer[1][1]:
        return ((layer[0][0] + layer[1][0], layer[0][1]),)
    return tuple(layer)

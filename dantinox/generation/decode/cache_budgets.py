"""Budgets of a compressed cache: how many slots each key head gets.

The budgets are computed before compilation, because they set the shapes of the buffers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SLOT_UNIT = 8  # slots are allocated in multiples of `SLOT_UNIT`
# The nats per token for each halving of the slots of a head, in `allocate_by_loss`.
HALVING_PENALTY = 3e-4
SIZES_PER_DOUBLING = 4  # candidate sizes between one slot count and its double
KNAPSACK_STEPS = 4096  # resolution of the knapsack in `allocate_by_loss`

GROUPINGS: dict[str, Callable[..., np.ndarray]] = {"max": np.max, "mean": np.mean, "min": np.min}

Groups = tuple[tuple[int, int], ...]
Layer = list[tuple[int, int]]  # the groups `(heads, slots)` of one layer, mutable


class Allocation(NamedTuple):
    """The slots of every key head.

    Attributes:
      order: the indices of the key heads of each layer, sorted by descending slots.
      groups: one or two groups `(heads, slots)` per layer, in the order of `order`: the group with
        more slots is first.
    """

    order: tuple[tuple[int, ...], ...]
    groups: tuple[Groups, ...]


def reduce_query_heads(signal_LN: np.ndarray, kv_heads: int, grouping: str) -> np.ndarray:
    """Reduces the signal of query heads to one value per key head, `[L, K]`; the query heads of a
    key head are adjacent.

    Args:
      grouping: "max", "mean" or "min" over the query heads.
    """
    signal_LKG = np.asarray(signal_LN, np.float64).reshape(len(signal_LN), kv_heads, -1)
    return GROUPINGS[grouping](signal_LKG, axis=-1)


def head_weights(signal_LK: np.ndarray, scale_min: float, scale_max: float) -> np.ndarray:
    """Returns the relative share of each head `[L, K]`: its signal divided by the mean signal,
    clipped to [scale_min, scale_max].
    """
    signal_LK = np.asarray(signal_LK, np.float64)
    mean = signal_LK.mean()
    return np.clip(signal_LK / mean, scale_min, scale_max) if mean > 0 else np.ones_like(signal_LK)


def allocate_by_loss(
    rises_LKC: np.ndarray, slots_C: Sequence[int], share: float, floor: int
) -> np.ndarray:
    """Returns the slots of each key head `[L, K]` that minimize the estimated loss, with at most
    two sizes per layer.

    The estimate adds up the loss increases of the heads. Each increase is interpolated linearly in
    log₂ of the slots between the measured sizes. `HALVING_PENALTY` is added for each halving of the
    slots, for two reasons: heads that lose slots together cost more than the sum of their separate
    increases, and other texts may attend further back. A dynamic program over the layers
    (multiple-choice knapsack, Kellerer, Pferschy and Pisinger 2004, ch. 11) then finds the best
    pair of sizes of each layer, and the heads that get the larger size. It divides the total into
    `KNAPSACK_STEPS` steps and rounds the slots of each layer up to whole steps, so a few slots may
    stay unused.

    Args:
      rises_LKC: the loss increase, in nats per token, if only this head is reduced to the c-th size
        of `slots_C`.
      slots_C: the measured sizes, ascending; the last size is that of an uncompressed head.
      share: the fraction of L · K · `slots_C[-1]` slots to use.
      floor: the minimum per head. Every head gets at least this and at least `slots_C[0]`, even if
        the share is exceeded.
    """
    L, K, _ = rises_LKC.shape
    size_S, curves_LKS = _loss_curves(rises_LKC, slots_C, floor)
    S = len(size_S)
    # All splits of a layer into two sizes: the h heads that gain most get the larger size.
    large_X, small_X, heads_X = (x.ravel() for x in np.indices((S, S, K)))
    slots_X = heads_X * size_S[large_X] + (K - heads_X) * size_S[small_X]
    total = max(share * L * K * size_S[-1], L * K * size_S[0])
    # 1e-9: a quotient that rounding has raised above a whole number takes no further step.
    steps_X = np.ceil(slots_X * KNAPSACK_STEPS / total - 1e-9).astype(np.int64)
    # For each number of steps: the smallest increase over the layers so far, and the split of this
    # layer that achieves it.
    min_rise_W = np.zeros(KNAPSACK_STEPS + 1)
    choices = []
    for curve_KS in curves_LKS:
        # [larger size, smaller size, heads]: what the heads gain with the larger size, the most
        # first, and what the first 0…K − 1 of them gain together.
        gain_SSK = -np.sort(curve_KS.T[:, None] - curve_KS.T, axis=-1)
        gain_SSK = np.cumsum(
            np.concatenate([np.zeros((S, S, 1)), gain_SSK[..., :-1]], axis=-1), axis=-1
        )
        rise_X = curve_KS.sum(axis=0)[small_X] - gain_SSK.ravel()
        before_W = min_rise_W
        min_rise_W = np.full(KNAPSACK_STEPS + 1, np.inf)
        choice_W = np.full(KNAPSACK_STEPS + 1, -1)
        for x in _pareto_optimal(steps_X, rise_X):
            rise_W = before_W[: KNAPSACK_STEPS + 1 - steps_X[x]] + rise_X[x]
            better_W = rise_W < min_rise_W[steps_X[x] :]
            min_rise_W[steps_X[x] :][better_W] = rise_W[better_W]
            choice_W[steps_X[x] :][better_W] = x
        choices.append(choice_W)
    slots_LK = np.zeros((L, K))
    remaining = KNAPSACK_STEPS
    # The choice of a layer is for the steps that it takes with the layers before it.
    for layer in reversed(range(L)):
        x = choices[layer][remaining]
        gain_K = curves_LKS[layer, :, small_X[x]] - curves_LKS[layer, :, large_X[x]]
        slots_LK[layer] = size_S[small_X[x]]
        slots_LK[layer, np.argsort(-gain_K, kind="stable")[: heads_X[x]]] = size_S[large_X[x]]
        remaining -= steps_X[x]
    return slots_LK


def _loss_curves(
    rises_LKC: np.ndarray, slots_C: Sequence[int], floor: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sizes that are at least the floor, and the cost of each size for every head
    `[L, K, S]`.

    The cost does not increase with the size.
    """
    C = len(slots_C)
    log_C = np.log2(np.asarray(slots_C, np.float64))
    log_S = np.interp(np.linspace(0, C - 1, SIZES_PER_DOUBLING * (C - 1) + 1), np.arange(C), log_C)
    log_S = np.unique(np.clip(log_S, min(np.log2(floor), log_C[-1]), None))
    curves_LKS = np.apply_along_axis(lambda rises_C: np.interp(log_S, log_C, rises_C), 2, rises_LKC)
    return 2**log_S, np.minimum.accumulate(
        curves_LKS + HALVING_PENALTY * (log_C[-1] - log_S), axis=2
    )


def _pareto_optimal(cost_X: np.ndarray, value_X: np.ndarray) -> np.ndarray:
    """Returns the Pareto-optimal choices (lower cost and lower value are better) that cost at most
    `KNAPSACK_STEPS`.
    """
    order_X = np.lexsort((value_X, cost_X))
    lowest_X = np.minimum.accumulate(value_X[order_X])
    better_X = np.concatenate([[True], lowest_X[1:] < lowest_X[:-1]])
    optimal: np.ndarray = order_X[better_X & (cost_X[order_X] <= KNAPSACK_STEPS)]
    return optimal


def min_total(caps_L: Sequence[int], kv_heads: int, floor: int) -> int:
    """Returns the smallest total that gives every head of every layer its floor."""
    return kv_heads * int(_floors(np.asarray(caps_L), floor).sum())


def allocate_by_weight(
    weights_LK: np.ndarray, caps_L: Sequence[int], total: int, floor: int
) -> Allocation:
    """Allocates slots in proportion to the weights.

    The slots add up to `total`, less a remainder smaller than `SLOT_UNIT`, or to the sum of the
    caps if that sum is smaller.

    Water-filling: each head requests level · weight slots, clipped to [floor, cap of its layer] and
    rounded to whole units. The level is the highest value at which all requests fit. Every head of
    a group gets the request of its first head.

    Args:
      weights_LK: positive numbers.
      caps_L: the largest useful number of slots per head of each layer. A cap need not be a
        multiple of `SLOT_UNIT`.
      floor: the fewest slots of a head, rounded up to whole units. In a layer with a lower cap, the
        cap is the minimum.

    Returns:
      An allocation in which, within a layer, a head with a larger weight has at least as many
      slots. The order of the heads depends on the weights only, not on the total.

    Raises:
      ValueError: `total` is below `min_total`.
    """
    weights_LK = np.asarray(weights_LK, np.float64)
    L, K = weights_LK.shape
    if total < (minimum := min_total(caps_L, K, floor)):
        raise ValueError(f"total must be at least {minimum}, got {total}")
    caps_L1 = np.asarray(caps_L)[:, None]
    floors_L1 = _floors(caps_L1, floor)
    order_LK = np.argsort(-weights_LK, axis=1, kind="stable")
    weights_LK = np.take_along_axis(weights_LK, order_LK, axis=1)
    shares_LK = np.clip(
        _water_level(weights_LK, floors_L1, caps_L1, total) * weights_LK, floors_L1, caps_L1
    )
    layers = [
        _split_heads(requests_K) for requests_K in _round_to_units(shares_LK, floors_L1, caps_L1)
    ]
    _distribute_remainder(
        layers, shares_LK, floors_L1[:, 0].tolist(), caps_L1[:, 0].tolist(), total
    )
    return Allocation(
        tuple(map(tuple, order_LK.tolist())), tuple(_merge_equal(layer) for layer in layers)
    )


def _floors(caps: np.ndarray, floor: int) -> np.ndarray:
    floors: np.ndarray = np.minimum(-(-floor // SLOT_UNIT) * SLOT_UNIT, caps)
    return floors


def _round_to_units(
    shares_LK: np.ndarray, floors_L1: np.ndarray, caps_L1: np.ndarray
) -> np.ndarray:
    """Rounds to the nearest whole unit; a share at the cap stays at the cap."""
    units_LK = np.floor(shares_LK / SLOT_UNIT + 0.5).astype(np.int64) * SLOT_UNIT
    exact_LK: np.ndarray = np.where(
        shares_LK >= caps_L1, caps_L1, np.clip(units_LK, floors_L1, caps_L1)
    )
    return exact_LK


def _padded_totals(requests_LK: np.ndarray) -> np.ndarray:
    """Returns the total slots of each layer for every split into two groups, `[L, K]`.

    Every head of a group gets the request of its first head. Split h has h heads in the first
    group; split 0 has only one.
    """
    K = requests_LK.shape[-1]
    heads_K = np.arange(K)
    totals_LK: np.ndarray = heads_K * requests_LK[..., :1] + (K - heads_K) * requests_LK
    return totals_LK


def _split_heads(requests_K: np.ndarray) -> Layer:
    """Returns the groups of the split with the smallest total."""
    heads = int(_padded_totals(requests_K).argmin())
    rest = (len(requests_K) - heads, int(requests_K[heads]))
    return [(heads, int(requests_K[0])), rest] if heads else [rest]


def _water_level(
    weights_LK: np.ndarray, floors_L1: np.ndarray, caps_L1: np.ndarray, total: int
) -> float:
    """Returns the highest level at which the padded requests fit, by bisection to the last bit."""
    low = 0.0
    high = 2 * float((caps_L1 / weights_LK).max())
    while low < (middle := (low + high) / 2) < high:
        requests_LK = _round_to_units(
            np.clip(middle * weights_LK, floors_L1, caps_L1), floors_L1, caps_L1
        )
        if _padded_totals(requests_LK).min(axis=1).sum() <= total:
            low = middle
        else:
            high = middle
    return low


def _slots_per_head(layer: Layer) -> np.ndarray:
    return np.repeat([slots for _, slots in layer], [heads for heads, _ in layer])


def _shortfall(shares_K: np.ndarray, slots_XK: np.ndarray) -> np.ndarray:
    """Returns how much the slots fall short of the shares; a surplus does not count."""
    shortfall_X: np.ndarray = (np.maximum(shares_K - slots_XK, 0) ** 2).sum(axis=-1)
    return shortfall_X


def _distribute_remainder(
    layers: list[Layer], shares_LK: np.ndarray, floors_L: list[int], caps_L: list[int], total: int
) -> None:
    """Distributes the slots that remain after water-filling.

    First, each group gets one more unit per head if that fits, in descending order of the
    shortfall. One more unit per head never fits for all groups: at the next higher level each head
    requests at most one unit more, and these requests exceed the total. So at least one group is
    skipped, and the remainder is then smaller than one unit per head of that group. This remainder
    goes to a single layer: the one whose new split into two groups reduces the shortfall most.
    """
    remaining = total - sum(int(_slots_per_head(layer).sum()) for layer in layers)
    group_keys = [(number, i) for number, layer in enumerate(layers) for i in range(len(layer))]
    # The first head of a group has the largest share in it.
    surplus = {
        (number, i): layers[number][i][1] - shares_LK[number, layers[number][0][0] * i]
        for number, i in group_keys
    }
    for number, i in sorted(group_keys, key=lambda group: surplus[group]):
        heads, slots = layers[number][i]
        step = min(SLOT_UNIT, caps_L[number] - slots)
        if heads * step <= remaining:
            layers[number][i] = (heads, slots + step)
            remaining -= heads * step
    if remaining < SLOT_UNIT:
        return
    candidates = [
        (*split, number)
        for number, layer in enumerate(layers)
        if (
            split := _resplit(layer, shares_LK[number], floors_L[number], caps_L[number], remaining)
        )
    ]
    if candidates:
        _, layer, number = min(candidates, key=lambda candidate: candidate[0])
        layers[number] = layer


def _resplit(
    layer: Layer, shares_K: np.ndarray, floor: int, cap: int, remaining: int
) -> tuple[float, Layer] | None:
    """Splits a layer into two groups that use up to `remaining` more slots, so that the shortfall
    is small.

    Fewer than `SLOT_UNIT` of these slots stay unused.

    Returns:
      The change of the shortfall, and the groups; None if the heads would reach the cap. Otherwise
      a split always exists: moving one head from one size to the next adds at most a unit.
    """
    K = len(shares_K)
    slots_K = _slots_per_head(layer)
    total = int(slots_K.sum()) + remaining
    if total >= K * cap:
        return None
    heads_H1 = np.arange(1, K)[:, None]
    # Search around the point at which the sizes of both groups differ by the same amount from the
    # mean shares of the groups. K units to either side suffice: the second sizes that leave whole
    # units for the first group repeat with a period of at most K units.
    first_H1 = np.cumsum(shares_K)[:-1, None]
    middle_H1 = (shares_K.sum() - first_H1) / (K - heads_H1) + (total - shares_K.sum()) / K
    middle_H1 = np.clip(
        middle_H1, np.maximum(floor, (total - heads_H1 * cap) / (K - heads_H1)), total / K
    )
    small_HS = (middle_H1 // SLOT_UNIT + np.arange(-K, K + 1)).astype(np.int64) * SLOT_UNIT
    left_HS = total - (K - heads_H1) * small_HS
    large_HS = np.minimum(left_HS // heads_H1, cap) // SLOT_UNIT * SLOT_UNIT
    # Where whole units leave a unit or more unused: the cap, which need not be whole units.
    large_HS = np.where(left_HS - heads_H1 * large_HS < SLOT_UNIT, large_HS, cap)
    spare_HS = left_HS - heads_H1 * large_HS
    allowed_HS = (
        (floor <= small_HS)
        & (small_HS <= large_HS)
        & (small_HS < cap)
        & (spare_HS >= 0)
        & (spare_HS < SLOT_UNIT)
    )
    if not allowed_HS.any():
        return None
    heads_X = np.nonzero(allowed_HS)[0] + 1
    small_X = small_HS[allowed_HS]
    large_X = large_HS[allowed_HS]
    slots_XK = np.where(np.arange(K) < heads_X[:, None], large_X[:, None], small_X[:, None])
    shortfall_X = _shortfall(shares_K, slots_XK)
    x = np.lexsort((((slots_XK - shares_K) ** 2).sum(axis=1), shortfall_X))[0]
    heads = int(heads_X[x])
    return float(shortfall_X[x] - _shortfall(shares_K, slots_K)), [
        (heads, int(large_X[x])),
        (K - heads, int(small_X[x])),
    ]


def _merge_equal(layer: Layer) -> Groups:
    """Merges two groups of the same size into one."""
    if len(layer) == 2 and layer[0][1] == layer[1][1]:
        return ((layer[0][0] + layer[1][0], layer[0][1]),)
    return tuple(layer)

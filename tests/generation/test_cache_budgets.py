"""Slots per head: totals and bounds hold, larger weights get more slots, and a layer has at most
two different numbers.
"""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from dantinox.generation.decode import cache_budgets as budgets
from dantinox.generation.decode.cache_budgets import (
    HALVING_PENALTY,
    KNAPSACK_STEPS,
    SIZES_PER_DOUBLING,
    SLOT_UNIT,
    allocate_by_loss,
    allocate_by_weight,
    head_weights,
    min_total,
    reduce_query_heads,
)
from tests.error_texts import ERRORS

laws = settings(max_examples=40, deadline=None, derandomize=True)
# Weights are drawn as bytes, which is fast; clipped weights are often equal.
TABLE = np.clip(np.random.default_rng(0).gamma(1, 1, 256), 0.3, 2.5)


@st.composite
def requests(draw, uniform=False):
    L, K = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    caps = (
        [1 + cap for cap in draw(st.binary(min_size=L, max_size=L))]
        if draw(st.booleans())
        else [draw(st.integers(1, 256))] * L
    )
    floor = draw(st.integers(1, 40))
    weights = (
        np.ones(L * K) if uniform else TABLE[list(draw(st.binary(min_size=L * K, max_size=L * K)))]
    )
    total = draw(st.integers(min_total(caps, K, floor), K * sum(caps) + 10))
    return weights.reshape(L, K), caps, total, floor


def slots_of(allocation):
    """Returns the slots of every head `[L, K]`, in the original order of heads."""
    out = []
    for order, groups in zip(allocation.order, allocation.groups, strict=True):
        slots = [slots for heads, slots in groups for _ in range(heads)]
        assert sorted(order) == list(range(len(slots)))
        out.append([slots[order.index(head)] for head in range(len(order))])
    return np.array(out)


@laws
@given(requests())
def test_the_total_is_met(request):
    weights_LK, caps, total, floor = request
    most = weights_LK.shape[1] * sum(caps)
    spent = slots_of(allocate_by_weight(weights_LK, caps, total, floor)).sum()
    if total >= most:
        assert spent == most
    else:
        assert 0 <= total - spent < SLOT_UNIT


@laws
@given(requests())
def test_every_head_is_within_bounds_and_in_whole_units(request):
    weights_LK, caps, total, floor = request
    for slots_K, cap in zip(
        slots_of(allocate_by_weight(weights_LK, caps, total, floor)), caps, strict=True
    ):
        assert all(min(floor, cap) <= slots <= cap for slots in slots_K)
        assert all(slots % SLOT_UNIT == 0 or slots == cap for slots in slots_K)


@laws
@given(requests())
def test_groups(request):
    """A layer has at most two groups, first that with more slots. Numbers are plain integers, for
    shapes and hashing.
    """
    weights_LK, caps, total, floor = request
    allocation = allocate_by_weight(weights_LK, caps, total, floor)
    for groups in allocation.groups:
        assert len(groups) in (1, 2) and all(heads > 0 for heads, _ in groups)
        assert sum(heads for heads, _ in groups) == weights_LK.shape[1]
        assert len(groups) == 1 or groups[0][1] > groups[1][1]
        assert all(type(number) is int for group in groups for number in group)
    hash(allocation)
    assert all(type(head) is int for order in allocation.order for head in order)


@laws
@given(requests())
def test_a_larger_weight_never_has_fewer_slots(request):
    weights_LK, caps, total, floor = request
    slots_LK = slots_of(allocate_by_weight(weights_LK, caps, total, floor))
    for slots_K, weights_K in zip(slots_LK, weights_LK, strict=True):
        for a, b in itertools.permutations(range(len(slots_K)), 2):
            assert slots_K[a] >= slots_K[b] or weights_K[a] <= weights_K[b]


@laws
@given(requests(), st.data())
def test_the_order_is_that_of_the_weights_whatever_the_total(request, data):
    weights_LK, caps, total, floor = request
    K = weights_LK.shape[1]
    allocation = allocate_by_weight(weights_LK, caps, total, floor)
    for order, weights_K in zip(allocation.order, weights_LK, strict=True):
        assert list(order) == sorted(range(K), key=lambda head: (-weights_K[head], head))
    other = data.draw(st.integers(min_total(caps, K, floor), K * sum(caps)))
    assert allocate_by_weight(weights_LK, caps, other, floor).order == allocation.order


@laws
@given(requests(uniform=True))
def test_equal_weights_differ_by_at_most_a_unit(request):
    """A head below its cap has at most one unit of slots fewer than the largest head."""
    weights_LK, caps, total, floor = request
    slots_LK = slots_of(allocate_by_weight(weights_LK, caps, total, floor))
    below = slots_LK[slots_LK < np.array(caps)[:, None]]
    assert below.size == 0 or slots_LK.max() - below.min() <= SLOT_UNIT


@laws
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_no_split_in_two_is_smaller(wishes):
    """Compares with all ways to put heads into two groups, whether or not the groups are contiguous
    in sorted order.
    """
    wishes = sorted(wishes, reverse=True)
    least = min(
        sum(len(part) * max(part) for part in (first, second) if part)
        for inside in itertools.product([False, True], repeat=len(wishes))
        for first, second in [
            (
                [w for w, i in zip(wishes, inside, strict=True) if i == side]
                for side in (False, True)
            )
        ]
    )
    layer = budgets._split_heads(np.array(wishes))
    assert (
        sum(heads * slots for heads, slots in layer)
        == least
        == budgets._padded_totals(np.array(wishes)).min()
    )
    assert all(
        slots >= wish for slots, wish in zip(budgets._slots_per_head(layer), wishes, strict=True)
    )


def requests_at(level, weights_LK, caps, floor):
    """Returns level · weight for each head, rounded to whole units (half a unit is rounded up) and
    limited to the bounds.
    """
    out = []
    for weights_K, cap in zip(weights_LK, caps, strict=True):
        least = min((floor + SLOT_UNIT - 1) // SLOT_UNIT * SLOT_UNIT, cap)
        shares = [level * weight for weight in weights_K]
        units = [int(share / SLOT_UNIT + 0.5) * SLOT_UNIT for share in shares]
        out.append(
            [
                cap if share >= cap else max(least, min(unit, cap))
                for share, unit in zip(shares, units, strict=True)
            ]
        )
    return out


def padded(requests_LK):
    total = 0
    for wishes in map(sorted, requests_LK):
        total += min(
            heads * wishes[heads - 1] + (len(wishes) - heads) * wishes[-1]
            for heads in range(1, len(wishes) + 1)
        )
    return total


@laws
@given(requests())
def test_the_level_is_the_highest_that_fits(request):
    """Requests never shrink as the level rises. At the next larger level they exceed the total,
    unless all are caps.
    """
    weights_LK, caps, total, floor = request
    caps_L1 = np.array(caps)[:, None]
    level = budgets._water_level(
        np.sort(weights_LK)[:, ::-1], budgets._floors(caps_L1, floor), caps_L1, total
    )
    assert padded(requests_at(level, weights_LK, caps, floor)) <= total
    more = requests_at(np.nextafter(level, np.inf), weights_LK, caps, floor)
    assert padded(more) > total or more == [[cap] * weights_LK.shape[1] for cap in caps]


@laws
@given(requests(), st.data())
def test_a_new_split_uses_the_remaining_slots(request, data):
    weights_LK, caps, _, floor = request
    K, cap = weights_LK.shape[1], caps[0]
    floor = int(budgets._floors(np.array(cap), floor))
    shares_K = np.sort(np.clip(data.draw(st.floats(0, 100)) * weights_LK[0], floor, cap))[::-1]
    layer = budgets._split_heads(budgets._round_to_units(shares_K, np.array(floor), np.array(cap)))
    before, left = budgets._slots_per_head(layer), data.draw(st.integers(SLOT_UNIT, K * SLOT_UNIT))
    found = budgets._resplit(layer, shares_K, floor, cap, left)
    if K == 1 or before.sum() + left >= K * cap:
        assert found is None
    else:
        more, new = found
        slots = budgets._slots_per_head(new)
        assert 0 <= before.sum() + left - slots.sum() < SLOT_UNIT
        assert more == pytest.approx(
            sum(
                max(s - x, 0) ** 2 - max(s - y, 0) ** 2
                for s, x, y in zip(shares_K, slots, before, strict=True)
            )
        )


@pytest.mark.parametrize(("L", "K"), [(12, 2), (12, 4), (12, 8), (24, 16)])
def test_meeting_the_total_costs_no_head_more_than_a_unit(L, K):
    random = np.random.default_rng(0)
    for ratio in (0.1, 0.2, 0.3, 0.5) * 5:
        weights_LK = head_weights(random.gamma(1, 1, (L, K)), 0.3, 2.5)
        total = int(ratio * L * K * 512)
        slots_LK = slots_of(allocate_by_weight(weights_LK, [512] * L, total, floor=20))
        bounds = budgets._floors(np.array([[512]] * L), 20), np.array([[512]] * L)
        level = budgets._water_level(-np.sort(-weights_LK), *bounds, total)
        assert (np.clip(level * weights_LK, *bounds) - slots_LK).max() <= SLOT_UNIT


def test_min_total():
    assert min_total([256, 17, 24], kv_heads=2, floor=20) == 2 * (24 + 17 + 24)
    with pytest.raises(ValueError, match=ERRORS["total_must_be_at_least"]):
        allocate_by_weight(np.ones((3, 2)), [256, 17, 24], total=129, floor=20)
    assert slots_of(allocate_by_weight(np.ones((3, 2)), [256, 17, 24], 130, 20)).tolist() == [
        [24, 24],
        [17, 17],
        [24, 24],
    ]


@pytest.mark.parametrize(
    ("weights", "caps", "total", "order", "groups"),
    [
        ([[1, 1, 1, 1]], [100], 200, (0, 1, 2, 3), [((1, 56), (3, 48))]),
        ([[1, 1], [1, 1]], [256, 256], 256, (0, 1), [((2, 64),), ((2, 64),)]),
        ([[1, 3, 3, 1]], [512], 512, (1, 2, 0, 3), [((2, 192), (2, 64))]),
        ([[4, 4, 1, 1]], [100], 280, (0, 1, 2, 3), [((2, 100), (2, 40))]),
        ([[1, 1], [3, 3]], [64, 20], 120, (0, 1), [((2, 40),), ((2, 20),)]),
        ([[8, 1, 1, 1]], [1000], 88, (0, 1, 2, 3), [((1, 64), (3, 8))]),
    ],
)
def test_by_hand(weights, caps, total, order, groups):
    allocation = allocate_by_weight(np.array(weights, float), caps, total, floor=8)
    assert allocation.order[0] == order and list(allocation.groups) == groups


def test_a_window_is_a_cap_and_other_layers_get_the_rest():
    slots_LK = slots_of(
        allocate_by_weight(np.ones((3, 2)), [1024, 128, 1024], total=6 * 512, floor=20)
    )
    assert slots_LK.tolist() == [[704, 704], [128, 128], [704, 704]]


def test_weights():
    signal_LK = np.array([[1.0, 2.0], [4.0, 13.0]])
    np.testing.assert_allclose(head_weights(signal_LK, 0.3, 2.5), [[0.3, 0.4], [0.8, 2.5]])
    np.testing.assert_array_equal(head_weights(np.zeros((2, 3)), 0.3, 2.5), np.ones((2, 3)))


def test_query_heads_of_a_key_head_are_adjacent():
    signal_LN = np.array([[1.0, 2.0, 3.0, 7.0], [0.0, 8.0, 4.0, 1.0]])
    assert reduce_query_heads(signal_LN, 2, "max").tolist() == [[2, 7], [8, 4]]
    assert reduce_query_heads(signal_LN, 2, "mean").tolist() == [[1.5, 5], [4, 2.5]]
    assert reduce_query_heads(signal_LN, 2, "min").tolist() == [[1, 3], [0, 1]]
    assert reduce_query_heads(signal_LN, 4, "min").tolist() == signal_LN.tolist()


def test_allocation_of_a_large_model_is_fast():
    L, K, N = 80, 64, 131_072
    weights_LK = head_weights(np.random.default_rng(0).gamma(1, 1, (L, K)), 0.3, 2.5)
    for weights in (weights_LK, np.ones((L, K))):
        total, start = int(0.2 * L * K * N) + 1000, time.process_time()
        spent = slots_of(allocate_by_weight(weights, [N] * L, total, floor=20)).sum()
        assert time.process_time() - start < 1
        assert 0 <= total - spent < SLOT_UNIT


# Allocation by the cost of eviction


def curves(rises, slots, floor):
    """Returns the allowed sizes, which interpolate between the measured sizes, and the cost of each
    head at each size.
    """
    log = [np.log2(slots[0])]
    for a, b in itertools.pairwise(np.log2(slots)):
        log += [
            a + (b - a) * part / SIZES_PER_DOUBLING for part in range(1, SIZES_PER_DOUBLING + 1)
        ]
    log = [*(x for x in log if 2**x > floor + 1e-9)] if floor > slots[0] else log
    log = [np.log2(floor), *log] if floor > slots[0] else log
    cost = [
        np.interp(log, np.log2(slots), row) + HALVING_PENALTY * (log[-1] - np.array(log))
        for row in rises
    ]
    return 2 ** np.array(log), np.minimum.accumulate(cost, axis=1)


def min_cost(size, cost, layers, heads, total):
    """Returns the minimum cost by integer programming. Each layer has a pair of sizes, and each of
    its heads one of the two.
    """
    S = len(size)
    pairs = list(itertools.combinations_with_replacement(range(S), 2))
    P = len(pairs)
    use = (
        layers * P
    )  # these variables choose the pair of each layer; the others choose a size per head and pair
    count = use + layers * heads * P * 2
    objective, slots = np.zeros(count), np.zeros(count)
    rows, right = [], []
    for layer in range(layers):
        row = np.zeros(count)
        row[layer * P : (layer + 1) * P] = 1
        rows.append(row)
        right.append(1)
        for head, (p, pair) in itertools.product(range(heads), enumerate(pairs)):
            at = use + ((layer * heads + head) * P + p) * 2
            objective[at : at + 2] = cost[layer * heads + head, list(pair)]
            slots[at : at + 2] = size[list(pair)]
            row = np.zeros(count)
            row[at : at + 2], row[layer * P + p] = 1, -1
            rows.append(row)
            right.append(0)
    met = [
        optimize.LinearConstraint(np.array(rows), right, right),
        optimize.LinearConstraint(slots[None], -np.inf, total),
    ]
    found = optimize.milp(
        objective,
        constraints=met,
        integrality=np.ones(count),
        bounds=(0, 1),
        options={"mip_rel_gap": 0},
    )
    return found.fun


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16, 24]),
    st.floats(0.02, 1),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_no_allocation_costs_less(layers, heads, sizes, floor, share, seed):
    """Integer programming finds no lower cost, apart from what the slots that rounding leaves
    unused could save.
    """
    slots = [16 << i for i in range(sizes)]
    rises = np.random.default_rng(seed).normal(0, 0.01, (layers * heads, sizes)) + np.linspace(
        0.02, 0, sizes
    )
    found = allocate_by_loss(rises.reshape(layers, heads, sizes), slots, share, floor)
    x, y = curves(rises, slots, min(floor, slots[-1]))
    total = max(share * layers * heads * slots[-1], layers * heads * x[0]) * (1 + 1e-9)
    assert found.sum() <= total and all(len(set(row)) <= 2 for row in found.tolist())
    sizes_of_heads = np.abs(found.ravel()[:, None] - x).argmin(axis=1)
    assert x[sizes_of_heads] == pytest.approx(found.ravel())
    cost = y[np.arange(layers * heads), sizes_of_heads].sum()
    assert cost >= min_cost(x, y, layers, heads, total) - 1e-9
    assert (
        cost
        <= min_cost(
            x, y, layers, heads, max(total * (1 - layers / KNAPSACK_STEPS), layers * heads * x[0])
        )
        + 1e-9
    )


def test_slots_go_where_they_lower_the_loss_most():
    needs = np.array(
        [[[0.9, 0.9, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0]], [[0.0] * 4, [0.0, 0.0, 0.01, 0.0]]]
    )
    found = allocate_by_loss(needs, [32, 64, 128, 256], 0.25, 24)
    assert found == pytest.approx(np.array([[128, 64], [32, 32]]))
    alike = allocate_by_loss(np.zeros((1, 3, 4)), [32, 64, 128, 256], 0.5, 24)
    assert np.median(alike) == pytest.approx(128) and 384 * 0.9 < alike.sum() <= 384
    assert allocate_by_loss(needs, [32, 64, 128, 256], 0.01, 24) == pytest.approx(
        np.full((2, 2), 32)
    )
    assert allocate_by_loss(needs, [32, 64, 128, 256], 0.01, 40) == pytest.approx(
        np.full((2, 2), 40)
    )
    assert allocate_by_loss(needs, [32, 64, 128, 256], 1, 300) == pytest.approx(
        np.full((2, 2), 256)
    )


def test_allocation_by_loss_of_a_large_model_takes_seconds():
    rises = np.random.default_rng(0).gamma(0.1, 0.001, (80, 16, 13)).cumsum(axis=2)[:, :, ::-1]
    found = allocate_by_loss(rises - rises[:, :, -1:], [24 << i for i in range(13)], 0.2, 24)
    assert 0.19 < found.mean() / (24 << 12) <= 0.2

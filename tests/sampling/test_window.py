"""Compares windows with whole rows: equal masks and numbers, also if other rows fall back to whole
rows.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.sampling import SamplingParams, init_state, process_logits, sample, trace
from dantinox.sampling.chain import _apply_step, _keys, _shared_order
from dantinox.sampling.window import (
    WINDOW,
    Context,
    LogitRows,
    run_all_rows,
    run_chain,
    run_failed_rows,
    run_in_windows,
    run_rows,
    take_window,
)

V = 4200  # larger than `SMALL_VOCABULARY`, so that steps run in windows


def language(seed, spread=1.6):
    """A row like that of a language model: log-probabilities that fall with the logarithm of the
    rank, in random order.
    """
    rng = np.random.default_rng(seed)
    return np.float32(rng.permutation(-spread * np.log(np.arange(V) + 2.0)) + rng.normal(0, 0.3, V))


@jax.jit
def started(params):
    """The state after a short text, in one program."""
    tokens = jnp.broadcast_to(jnp.asarray([5, 9, 5, 30]), (params.batch, 4))
    return init_state(params, tokens, jnp.ones(tokens.shape, bool), V, 64)


@jax.jit
def final(logits_BV, params, state):
    """The final logits, computed in windows where possible."""
    context = Context(params, state, _keys(params, state))
    return run_chain(
        _apply_step,
        _shared_order(params, params.plan),
        logits_BV,
        context,
        jnp.ones(params.batch, bool),
    ).logits


@jax.jit
def whole(logits_BV, params, state):
    """The final logits, computed without windows."""
    return trace(logits_BV, params, state)[0][-1][1]


@jax.jit
def flags(logits_BV, params, state):
    """Rows that no step truncated, and rows that do not fit into the window."""
    context = Context(params, state, _keys(params, state))
    return run_in_windows(_apply_step, _shared_order(params, params.plan), logits_BV, context)[1:]


CLOSES = {
    "top_k": [{"top_k": 3}, {"top_k": WINDOW - 1}],
    "top_p": [{"top_p": 0.0}, {"top_p": 0.5}],
    "min_p": [{"min_p": 0.05}, {"min_p": 1.0}],
    "top_a": [{"top_a": 0.5}, {"top_a": 5.0}],
    "typical": [{"typical": 0.2}, {"typical": 0.5}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.002}, {"epsilon_cutoff": 0.3}],
    "eta_cutoff": [{"eta_cutoff": 0.01}, {"eta_cutoff": 0.3}],
    "top_n_sigma": [{"top_n_sigma": 0.3}, {"top_n_sigma": 3.0}],
    "min_k": [{"min_k": 0.0}, {"min_k": 3.0}],
    "p_less": [{"p_less": "plain"}] * 2,
    "p_less_norm": [{"p_less": "norm"}] * 2,
    "top_h": [{"top_h": 0.3}, {"top_h": 0.5}],
    "mirostat_v1": [{"mirostat": 1, "mirostat_tau": 1.0}, {"mirostat": 1, "mirostat_tau": 2.5}],
    "mirostat_v2": [{"mirostat": 2, "mirostat_tau": 1.0}, {"mirostat": 2, "mirostat_tau": 3.0}],
}
TOO_WIDE = {
    "top_k": {"top_k": WINDOW + 1},
    "top_p": {"top_p": 0.9999},
    "min_p": {"min_p": 1e-6},
    "top_a": {"top_a": 1e-6},
    "typical": {"typical": 0.9999},
    "epsilon_cutoff": {"epsilon_cutoff": 1e-7},
    "eta_cutoff": {"eta_cutoff": 1e-9},
    "top_n_sigma": {"top_n_sigma": 50.0},
    "min_k": {"min_k": 30000.0},
    "top_h": {"top_h": 0.999},
    "mirostat_v1": {"mirostat": 1, "mirostat_tau": 12.0},
    "mirostat_v2": {"mirostat": 2, "mirostat_tau": 12.0},
}
# Other filters read the sums outside the window as one of these does.
QUICK = [
    name for name in CLOSES if name not in ("min_p", "epsilon_cutoff", "p_less_norm", "mirostat_v2")
]
ROWS = [
    {
        "top_k": 40,
        "top_p": 0.9,
        "tail_free": 0.9,
        "typical": 0.95,
        "temperature": 0.8,
        "repetition_penalty": 1.2,
    },
    {"top_p": 0.6, "top_a": 0.1, "temperature": 1.5},
    {
        "top_k": 200,
        "repetition_penalty": 1.4,
        "repetition_range": 3,
        "repetition_slope": 1.0,
        "tail_free": 0.5,
    },
    {"typical": 0.4, "temperature": 0.3, "top_k": 5000},
]


@partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
def in_windows_or_whole(logits_BV, params, state, is_whole):
    """The final logits, in windows where possible or over whole rows, and the flags of the rows, in
    one program.
    """
    context, order = (
        Context(params, state, _keys(params, state)),
        _shared_order(params, params.plan),
    )
    before, truncations = order.split()
    rows = run_rows(_apply_step, before, LogitRows(logits_BV, jnp.zeros(params.batch)), context)
    windowed = run_in_windows(_apply_step, truncations, rows.logits, context)
    flags = windowed.open, windowed.failed
    windowed = windowed._replace(failed=windowed.failed | is_whole)
    return run_failed_rows(_apply_step, truncations, rows, context, windowed).logits, *flags


def both_ways(logits_BV, params, state):
    """Returns the logits in windows, those of whole rows, and the flags."""
    whole_BV = in_windows_or_whole(logits_BV, params, state, True)[0]
    got_BV, open_B, failed_B = in_windows_or_whole(logits_BV, params, state, False)
    return map(np.asarray, (got_BV, whole_BV, open_B, failed_B))


@pytest.fixture(scope="module")
def all_filters():
    """Every filter in three rows (two that fit into the window and one that does not), chains, and
    a row without steps.
    """
    filters = [
        (name, row)
        for name in QUICK
        for row in (*CLOSES[name], TOO_WIDE.get(name, CLOSES[name][0]))
    ]
    params = SamplingParams.build(
        [row | {"seed": 1} for row in (*(row for _, row in filters), *ROWS, {})]
    )
    # p-less has no number: its window is too small only in a flat row.
    flat = [name not in TOO_WIDE and i % 3 == 2 for i, (name, _) in enumerate(filters)]
    scale_B1 = np.float32([[0.02 if is_flat else 1] for is_flat in (*flat, *[False] * 5)])
    return (
        {name: slice(3 * i, 3 * i + 3) for i, name in enumerate(QUICK)},
        scale_B1,
        params,
        started(params),
    )


@pytest.mark.parametrize("seed, spread", [(1, 2.5), (2, 1.2)])
def test_filters_and_chains_in_windows_equal_those_of_whole_rows(all_filters, seed, spread):
    """Masks and numbers of single filters bitwise, numbers after chains, which depend on sums, to
    rounding.
    """
    places, scale_B1, params, state = all_filters
    logits_BV = scale_B1 * language(seed, spread)
    got_BV, whole_BV, open_B, failed_B = both_ways(logits_BV, params, state)
    for name, place in places.items():
        np.testing.assert_array_equal(got_BV[place], whole_BV[place], err_msg=name)
        assert (np.isfinite(whole_BV[place][:2]).sum(axis=1) < WINDOW).all(), name
        if seed == 1:
            assert open_B[place].tolist() == [False, False, True], name
            assert failed_B[place].tolist() == [False, False, True], name
    np.testing.assert_array_equal(got_BV[-1], logits_BV[-1])
    np.testing.assert_array_equal(whole_BV[-1], logits_BV[-1])
    assert open_B[-1] and not failed_B[-1]
    np.testing.assert_array_equal(got_BV[-5:-1] > -np.inf, whole_BV[-5:-1] > -np.inf)
    np.testing.assert_allclose(got_BV[-5:-1], whole_BV[-5:-1], rtol=1e-6)
    assert (np.isfinite(whole_BV[-5:-1]).sum(axis=1) < V).all()


def test_sums_of_very_different_logits_are_finite(all_filters):
    places, scale_B1, params, state = all_filters
    x_V = np.where(np.arange(V) % 2, -3e38, 3e38).astype(np.float32)
    got_BV, whole_BV, *_ = both_ways(np.stack([x_V] * params.batch), params, state)
    np.testing.assert_array_equal(got_BV, whole_BV)
    for name in ("top_n_sigma", "eta_cutoff"):
        assert np.isfinite(whole_BV[places[name].start]).sum() == V // 2, name


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSES)
def test_a_filter_in_the_window_equals_the_filter_of_the_whole_row(name):
    rows = [*CLOSES[name], TOO_WIDE.get(name, CLOSES[name][0]), {}]
    # p-less has no number: its window is too small only in a flat row.
    scale_B1 = np.float32([[1], [1], [1 if name in TOO_WIDE else 0.02], [1]])
    params = SamplingParams.build([row | {"seed": 1} for row in rows])
    assert {*params.plan} == {"temperature", name}
    for seed, spread in ((0, 1.6), (1, 2.5), (2, 1.2)):
        logits_BV = scale_B1 * language(seed, spread)
        whole_BV = whole(logits_BV, params, started(params))
        np.testing.assert_array_equal(final(logits_BV, params, started(params)), whole_BV)
        np.testing.assert_array_equal(whole_BV[3], logits_BV[3])
        assert (np.isfinite(whole_BV[:2]).sum(axis=1) < WINDOW).all()
    open_B, failed_B = flags(scale_B1 * language(1, 2.5), params, started(params))
    assert (open_B.tolist(), failed_B.tolist()) == (
        [False, False, True, True],
        [False, False, True, False],
    )


def test_ties_across_the_edge_of_the_window():
    """More equal logits than the window holds: the first ids stay, or all."""
    x_V = tied_row()
    for ties, kept in (("first", 200), ("all", len(x_V[::7]))):
        params = SamplingParams.build([{"top_k": 200, "ties": ties, "seed": 0}])
        y_V = np.asarray(final(x_V[None], params, started(params)))[0]
        np.testing.assert_array_equal(
            np.flatnonzero(y_V > -np.inf), np.flatnonzero(x_V == 1.0)[:kept]
        )


def tied_row():
    x_V = np.full(V, -9.0, np.float32)
    x_V[::7] = 1.0
    return x_V


@pytest.mark.slow
def test_ties_across_the_edge_of_the_window_in_a_chain():
    x_V = tied_row()
    params = SamplingParams.build(
        [{"top_k": WINDOW - 6, "min_p": 0.5, "temperature": 3e38, "seed": 0, "preset": "llamacpp"}]
    )
    y_V = np.asarray(final(x_V[None], params, started(params)))[0]
    np.testing.assert_array_equal(
        np.flatnonzero(y_V > -np.inf), np.flatnonzero(x_V == 1.0)[: WINDOW - 6]
    )


def test_zeros_of_both_signs_at_the_edge_of_the_window_are_equal():
    """`lax.top_k` orders 0 before -0, which would keep the wrong ids among equal zeros."""
    x_V = np.full(V, -9.0, np.float32)
    x_V[:600] = np.where(np.arange(600) % 3, 0.0, -0.0)
    params = SamplingParams.build([{"top_k": 100, "seed": 0}])
    y_V = np.asarray(final(x_V[None], params, started(params)))[0]
    np.testing.assert_array_equal(np.flatnonzero(y_V > -np.inf), np.arange(100))
    np.testing.assert_array_equal(y_V[:100].view(np.uint32), x_V[:100].view(np.uint32))


ORDERS = [{}, {"preset": "kobold"}, {"preset": "kobold", "sampler_order": [0, 6, 5, 2, 3, 4, 1]}]
PARAMETER = {
    "top_k": "k",
    "top_p": "p",
    "top_a": "a",
    "tail_free": "z",
    "typical": "p",
    "temperature": "t",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_chains_in_windows_match_single_steps(order):
    """Compared with named steps: numbers that depend on a sum to rounding, masks exactly."""
    params = SamplingParams.build([row | order | {"seed": 1} for row in ROWS])
    logits_BV = np.stack([language(seed, 2.0) for seed in range(len(ROWS))])
    got_BV = np.asarray(final(logits_BV, params, started(params)))
    for b, row in enumerate(ROWS):
        pipeline = [
            {"name": name, PARAMETER[name]: row[name]}
            for name in params.plan
            if name in row and name in PARAMETER
        ]
        if "repetition_penalty" in row:
            penalty = {
                "penalty": row["repetition_penalty"],
                "range": row.get("repetition_range", 0),
            }
            place = [name for name in params.plan if name in row].index("repetition_penalty")
            pipeline.insert(
                place,
                {"name": "repetition_penalty", "slope": row.get("repetition_slope", 0.0)} | penalty,
            )
        expected_V = np.asarray(process_logits(logits_BV[b : b + 1], pipeline, [[5, 9, 5, 30]]))[0]
        np.testing.assert_array_equal(got_BV[b] > -np.inf, expected_V > -np.inf)
        np.testing.assert_allclose(got_BV[b], expected_V, rtol=1e-6)


@partial(jax.jit, static_argnames="report")
def step(logits_BV, params, state, report=0):
    return sample(logits_BV, replace(params, report=report), state)


@pytest.mark.slow
def test_a_row_outside_its_window_does_not_change_other_rows():
    """All steps that depend on sums, drawn 40 times: tokens and log-probabilities are equal in both
    branches.
    """
    mine = {
        "top_k": 60, "top_p": 0.9, "min_p": 0.001, "typical": 0.95, "tail_free": 0.97,
        "xtc_probability": 0.5, "xtc_threshold": 0.05, "mirostat": 2, "mirostat_tau": 3.0,
        "seed": 7,
    }  # fmt: skip
    narrow, wide = {"top_k": 5, "seed": 1}, {"top_k": 3000, "top_p": 0.999, "seed": 1}
    logits_BV = np.stack([language(3), language(4)])
    outcomes = []
    for neighbor in (narrow, wide):
        params = SamplingParams.build([mine, neighbor])
        state, tokens = started(params), []
        assert bool(flags(logits_BV, params, state)[1].any()) == (neighbor is wide)
        for _ in range(40):
            token_B, state, info = step(logits_BV, params, state)
            tokens.append(
                [
                    int(token_B[0]),
                    *np.float32([info.token.logprob_sampled[0], state.mu[0]])
                    .view(np.uint32)
                    .tolist(),
                ]
            )
        outcomes.append(tokens)
    assert outcomes[0] == outcomes[1] and len({tokens[0] for tokens in outcomes[0]}) > 3


def test_whole_rows_one_by_one_equal_whole_rows_in_a_batch():
    """The branches for both kinds of platforms; sums of one row and of several may differ in the
    last bit.
    """
    rows = [{"top_k": 5}, {"top_k": 3000}, {}, {"mirostat": 2, "mirostat_tau": 12.0}]
    params = SamplingParams.build([row | {"seed": 1} for row in rows])
    logits_BV = np.stack([language(seed) for seed in range(4)])

    @jax.jit
    def both(logits_BV, params, state):
        context = Context(params, state, _keys(params, state))
        order, rows = (
            _shared_order(params, params.plan),
            LogitRows(logits_BV, jnp.zeros(params.batch)),
        )
        short = run_in_windows(_apply_step, order, logits_BV, context)
        return short.failed, *(
            way(_apply_step, order, rows, context, short) for way in (run_failed_rows, run_all_rows)
        )

    failed_B, (one_BV, mass_B), (all_BV, all_mass_B) = both(logits_BV, params, started(params))
    assert failed_B.tolist() == [False, True, False, True]
    np.testing.assert_array_equal(one_BV, all_BV)
    np.testing.assert_allclose(mass_B[3], all_mass_B[3], rtol=1e-6)


def test_the_window_contains_the_largest_logits_and_sums_of_the_others():
    x_BV = np.stack([language(8), language(9)])
    x_BV[0, ::2] = -np.inf
    take = jax.jit(take_window)
    values_BK, ids_BK, rest = take(x_BV)
    for b in range(2):
        order = np.lexsort((np.arange(V), -x_BV[b]))
        np.testing.assert_array_equal(ids_BK[b], np.sort(order[:WINDOW]))
        np.testing.assert_array_equal(values_BK[b], x_BV[b][ids_BK[b]])
        # A difference of sums of 4,200 numbers, which have an error of some epsilons (6e-8) of the
        # sum of all, about 3.
        others = x_BV[b].astype(np.float64)[order[WINDOW:]] - x_BV[b].max()
        others = others[others > -np.inf]
        weights = np.exp(others)
        sums = weights.sum(), (others * weights).sum(), (weights**2).sum()
        sums += len(others), others.sum(), (others**2).sum(), others.min()
        np.testing.assert_allclose([part[b] for part in rest], sums, rtol=1e-5, atol=5e-6)
    few = np.full((2, V), -np.inf, np.float32)
    few[:, 3:9] = 1.0
    assert [float(part[0]) for part in take(few)[2]] == [0.0] * 7


@pytest.mark.slow
def test_the_selection_does_not_sort_the_row(optimized):
    check_selection(
        optimized(jax.jit(take_window).lower(jax.ShapeDtypeStruct((1, V), jnp.float32))).as_text()
    )


@pytest.mark.slow
def test_no_step_sorts_the_row(optimized):
    params = SamplingParams.build({"top_p": 0.9, "seed": 0})
    row = jax.ShapeDtypeStruct((1, V), jnp.float32)
    check_selection(optimized(final.lower(row, params, started(params))).as_text())


def check_selection(text):
    assert "TopK" in text and f"[1,{V}]{{1,0}} sort" not in text and f"[{V}]{{0}} sort" not in text

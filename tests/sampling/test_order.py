"""Orders of steps as an array: one program for all orders gives the same results as a program for
each order.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.config.generation_settings import PRESETS, kobold_order
from dantinox.config.sampling_steps import EDIT_STEPS
from dantinox.sampling import SamplingParams, init_state, process_logits, sample
from dantinox.sampling import order as module
from dantinox.sampling.chain import _apply_step, _keys, _shared_order
from dantinox.sampling.order import ORDERABLE, RowOrders, SharedOrder, order_array
from dantinox.sampling.window import Context, run_chain
from tests.error_texts import ERRORS

V, TEXT = 5000, [5, 9, 5, 30]  # large enough for windows
MOVED = [0, 6, 5, 2, 3, 4, 1]  # a KoboldAI order that starts with a truncation
NAMED = ["min_p", "temperature", "top_p", "repetition_penalty", "tail_free", "top_k", "mirostat"]
ORDERS = [
    {},
    {"preset": "kobold", "sampler_order": MOVED},
    {"preset": "llamacpp"},
    {"sampler_order": NAMED},
]
NAMES = [PRESETS["default"], kobold_order(MOVED), PRESETS["llamacpp"], NAMED]
VALUES = [
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.6, "top_p": 0.999},
    {"greedy": True, "repetition_penalty": 2.0},
    {"temperature": 0.5},
    {"temperature": 1.2, "top_k": 700, "top_p": 0.95, "ties": "all"},
]
PARAMETER = {"top_k": "k", "top_p": "p", "temperature": "t", "repetition_penalty": "penalty"}
ROWS = [(values, order) for values in range(len(VALUES)) for order in range(len(ORDERS))]


def logits(seed):
    rng = np.random.default_rng(seed)
    return np.float32(
        rng.permutation(-1.7 * np.log(np.arange(V) + 2.0)) + rng.normal(0, 0.3, V)
    ) / (1 + seed % 3)


def build(rows, **kind):
    settings = [
        VALUES[values] | ORDERS[order] | {"seed": 7 * values + order} for values, order in rows
    ]
    params = SamplingParams.build(settings, vocab_size=V, **kind)
    tokens = jnp.broadcast_to(jnp.asarray(TEXT), (params.batch, len(TEXT)))
    state = init_state(params, tokens, jnp.ones(tokens.shape, bool), V, 16)
    return jnp.asarray(np.stack([logits(values) for values, _ in rows])), params, state


@jax.jit
def chain(logits_BV, params, state):
    active_B = jnp.ones(params.batch, bool)
    order = _shared_order(params, [name for name in params.plan if name not in EDIT_STEPS])
    if params.order is not None:
        order = RowOrders.build(params.order, params.enabled, active_B)
    return run_chain(
        _apply_step, order, logits_BV, Context(params, state, _keys(params, state)), active_B
    )


@pytest.fixture(scope="module")
def found():
    """(values, order) -> the logits of the row after the steps, from batches of eight with all
    orders.
    """
    rows = [ROWS[i % len(ROWS)] for i in np.random.default_rng(0).permutation(24)]
    batches = [rows[i : i + 8] for i in range(0, 24, 8)]
    outcomes = [np.asarray(chain(*build(batch, dynamic_order=True)).logits) for batch in batches]
    assert chain._cache_size() == 1, "no order, word or value compiles anything"
    return {
        row: outcome[i]
        for batch, outcome in zip(batches, outcomes, strict=True)
        for i, row in enumerate(batch)
    }


@pytest.mark.slow
def test_every_row_runs_its_steps_in_its_own_order(found):
    """Compared with named steps: masks exactly, numbers to rounding."""
    for (values, order), got_V in found.items():
        settings = VALUES[values]
        temperature = {} if settings.get("greedy") else {"temperature": settings["temperature"]}
        on = {
            name: settings[name] for name in PARAMETER if name in settings and name != "temperature"
        } | temperature
        ties = {"ties": settings["ties"]} if "ties" in settings else {}
        pipeline = [
            {"name": name, PARAMETER[name]: on[name]} | (ties if name in ("top_k", "top_p") else {})
            for name in NAMES[order]
            if name in on
        ]
        expected_V = np.asarray(process_logits(logits(values)[None], pipeline, [TEXT]))[0]
        np.testing.assert_array_equal(got_V > -np.inf, expected_V > -np.inf)
        np.testing.assert_allclose(got_V, expected_V, rtol=1e-6)
    different = [found[4, 0], found[4, 2]]
    assert (np.isfinite(different[0]) != np.isfinite(different[1])).any(), "the order matters here"


@pytest.mark.slow
def test_an_order_array_is_bit_for_bit_the_static_program(found):
    rows = [(values, 1) for values in range(len(VALUES)) if "ties" not in VALUES[values]]
    static_BV = np.asarray(chain(*build(rows * 2, extra_steps=(*EDIT_STEPS, *NAMES[1]))).logits)
    for row, static_V in zip(rows, static_BV, strict=False):
        np.testing.assert_array_equal(found[row].view(np.uint32), static_V.view(np.uint32))


@pytest.mark.slow
def test_other_rows_and_idle_rows_change_nothing(found):
    rng = np.random.default_rng(1)
    for _ in range(3):
        rows = [ROWS[i] for i in rng.permutation(len(ROWS))[:8]]
        logits_BV, params, state = build(rows, dynamic_order=True)
        idle_B = jnp.arange(8) % 3 == 0
        params = replace(
            params, enabled={name: on_B & ~idle_B for name, on_B in params.enabled.items()}
        )
        got_BV = np.asarray(chain(logits_BV, params, state).logits)
        for row, got_V, idle in zip(rows, got_BV, idle_B.tolist(), strict=True):
            expected_V = logits(row[0]) if idle else found[row]
            np.testing.assert_array_equal(got_V.view(np.uint32), expected_V.view(np.uint32))


@pytest.mark.slow
def test_tokens_and_states_equal_those_of_the_static_program():
    """In a small vocabulary, with mirostat, whose state depends on the mass before its filter, and
    a penalty after filters.
    """
    rows = [
        {"mirostat": 2, "mirostat_tau": 2.0, "min_p": 0.01, "seed": 1},
        {"greedy": True, "repetition_penalty": 3.0, "top_k": 1, "watermark_keys": [1]},
        {
            "top_k": 9,
            "watermark_keys": [6, 5],
            "watermark_ngram": 2,
            "repetition_penalty": 1.5,
            "repetition_range": 2,
            "seed": 3,
        },
    ]
    order = {"sampler_order": ["top_k", "min_p", "temperature", "repetition_penalty", "mirostat"]}
    start = jax.random.normal(jax.random.key(0), (3, 40)) * 3

    @jax.jit
    def decode(params, state):
        def step(state, i):
            token_B, state, info = sample(start * (1 + i / 9), replace(params, report=0), state)
            return state, (token_B, info.token.logprob_sampled)

        return jax.lax.scan(step, state, jnp.arange(12.0))

    outcomes = []
    for kind in ({"dynamic_order": True}, {}):
        params = SamplingParams.build([row | order for row in rows], vocab_size=40, **kind)
        state = init_state(params, jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), bool), 40, 32)
        final, outputs = decode(params, state)
        outcomes.append(
            [*map(np.asarray, outputs), np.asarray(final.mu)[:1], np.asarray(final.last_seen)]
        )
    for dynamic, static in zip(*outcomes, strict=True):
        np.testing.assert_allclose(dynamic, static, rtol=1e-6)


@pytest.mark.slow
def test_every_choice_of_a_rule_is_read_from_the_array():
    """Rows with ties and with an entropy between the two rules, in one program, equal named steps
    with the same choice.
    """
    x_V = np.float32(np.round(logits(0)))
    choices = [
        {"top_k": 30},
        {"top_k": 30, "ties": "all"},
        {"top_p": 0.5},
        {"top_p": 0.5, "top_p_rule": "exclusive"},
        {"top_h": 0.5},
        {"top_h": 0.5, "top_h_rule": "cumulative"},
    ]
    rows = [choice | {"seed": 1} for choice in choices]
    params = SamplingParams.build([*rows, *rows[:2]], vocab_size=V, dynamic_order=True)
    tokens = jnp.broadcast_to(jnp.asarray(TEXT), (8, len(TEXT)))
    state = init_state(params, tokens, jnp.ones(tokens.shape, bool), V, 16)
    found_BV = np.asarray(chain(jnp.asarray(np.stack([x_V] * 8)), params, state).logits)
    names = {"top_k": "k", "top_p": "p", "top_h": "alpha"}
    for choice, found_V in zip(choices, found_BV, strict=False):
        (name, value), *rule = choice.items()
        step = {"name": name, names[name]: value} | {
            key.removeprefix(f"{name}_"): word for key, word in rule
        }
        np.testing.assert_array_equal(found_V, np.asarray(process_logits(x_V[None], [step]))[0])
    counts = np.isfinite(found_BV).sum(axis=1)
    assert counts[0] < counts[1] and counts[3] < counts[2] and counts[4] != counts[5]


def test_the_router_has_a_fixed_order():
    with pytest.raises(UserError, match=ERRORS["generation_strategy_entropy"]):
        SamplingParams.build({"strategy": "entropy", "seed": 1}, dynamic_order=True)


def test_orders_of_any_functions():
    """Every row applies the functions of its enabled steps in its own order; an idle row and unused
    entries do nothing.
    """
    rng, N = np.random.default_rng(0), len(ORDERABLE)
    orders = [rng.permutation(N)[: rng.integers(0, N + 1)] for _ in range(7)]
    steps_BN = np.stack([order_array([ORDERABLE[i] for i in order]) for order in orders])
    on = {name: rng.random(7) < 0.7 for name in ORDERABLE}
    active_B = np.arange(7) != 3

    def append(name, on_B, digits_B):
        """Appends the number of the step to a number with the base 31."""
        return jnp.where(on_B, digits_B * 31 % 1_000_003 + ORDERABLE.index(name), digits_B)

    @jax.jit
    def run(steps_BN, on, active_B):
        rows = RowOrders.build(steps_BN, on, active_B)
        before, after = rows.split()
        parts = [part.run(append, jnp.zeros(7, jnp.int32)) for part in (rows, before, after)]
        return parts, [part.any_enabled() for part in (rows, before, after)]

    def expected(order, b, part):
        first = next((i for i, step in enumerate(order) if module.IS_TRUNCATION[step]), len(order))
        digits = 0
        for step in {"all": order, "before": order[:first], "after": order[first:]}[part]:
            if on[ORDERABLE[step]][b] and active_B[b]:
                digits = digits * 31 % 1_000_003 + int(step)
        return digits

    found, some = run(steps_BN, on, active_B)
    for part, found_B in zip(("all", "before", "after"), found, strict=True):
        assert found_B.tolist() == [expected(order, b, part) for b, order in enumerate(orders)], (
            part
        )
    assert some == [True] * 3
    _, none = run(steps_BN, on, np.zeros(7, bool))
    assert none == [False] * 3


@pytest.mark.parametrize("skip", [True, False])
def test_a_shared_order(skip):
    names = ("repetition_penalty", "temperature", "top_k", "min_p")
    on = {name: np.array([i == 0, i == 1]) for i, name in enumerate(names)}
    order = SharedOrder(on, names, skip)

    def append(name, on_B, digits_B):
        return digits_B * 10 + jnp.where(on_B, names.index(name) + 1, 9)

    @jax.jit
    def run(on):
        given = replace(order, on=on)
        return given.run(append, jnp.zeros(2, jnp.int32)), given.any_enabled()

    digits_B, some = run(on)
    # A step that no row enables runs, with all rows off, unless it is skipped.
    assert digits_B.tolist() == ([19, 92] if skip else [1999, 9299]) and some
    off = {name: np.zeros(2, bool) for name in names}
    digits_B, some = run(off)
    assert digits_B.tolist() == ([0, 0] if skip else [9999, 9999]) and bool(some) is not skip
    assert SharedOrder({}, (), skip).any_enabled() is False
    before, after = order.split()
    assert (before.names, after.names, after.skip) == (names[:2], names[2:], skip)
    assert replace(order, names=names[:2]).split()[1].names == ()


@pytest.fixture
def few_steps(monkeypatch):
    """Programs with an order array contain only these steps, which compile faster than all of
    them.
    """
    from dantinox.sampling import params

    names = ("repetition_penalty", "temperature", "top_k", "top_p", "top_h")
    monkeypatch.setattr(params, "ORDERABLE", names)
    monkeypatch.setattr(params, "LAST_STEPS", ())
    monkeypatch.setattr(params, "EDIT_STEPS", ())
    monkeypatch.setattr(module, "ORDERABLE", names)
    monkeypatch.setattr(module, "IS_TRUNCATION", np.array([False, False, True, True, True]))


def test_rows_with_other_orders_and_choices_equal_named_steps(few_steps):
    """Rows with ties and with an entropy between the two rules, in one program."""
    small = np.float32(np.round(logits(0)[:120]))
    own = {"top_k": 30, "top_p": 0.9, "temperature": 0.5, "repetition_penalty": 1.5}
    chains = [
        (own, ["top_k", "temperature", "top_p", "repetition_penalty"]),
        (own, ["repetition_penalty", "top_p", "temperature", "top_k"]),
        ({"top_k": 30}, ["top_k"]),
        ({"top_k": 30, "ties": "all"}, ["top_p", "top_k"]),
        ({"top_p": 0.5}, ["top_p"]),
        ({"top_p": 0.5, "top_p_rule": "exclusive"}, ["top_p"]),
        ({"top_h": 0.5}, ["top_h"]),
        ({"top_h": 0.5, "top_h_rule": "cumulative"}, ["top_h"]),
    ]
    params = SamplingParams.build(
        [row | {"sampler_order": order, "seed": 1} for row, order in chains], dynamic_order=True
    )

    @jax.jit
    def run(logits_BV, params):
        tokens = jnp.broadcast_to(jnp.asarray(TEXT), (params.batch, len(TEXT)))
        state = init_state(params, tokens, jnp.ones(tokens.shape, bool), 120, 16)
        active_B = jnp.ones(params.batch, bool)
        order = RowOrders.build(params.order, params.enabled, active_B)
        return run_chain(
            _apply_step, order, logits_BV, Context(params, state, _keys(params, state)), active_B
        ).logits

    found_BV = np.asarray(run(np.stack([small] * len(chains)), params))
    keys = PARAMETER | {"top_h": "alpha"}
    for (row, order), found_V in zip(chains, found_BV, strict=True):
        words = {
            "top_k": {"ties": row.get("ties", "first")},
            "top_h": {"rule": row.get("top_h_rule", "renormalized")},
        }
        words["top_p"] = {
            "rule": row.get("top_p_rule", "inclusive"),
            "ties": row.get("ties", "first"),
        }
        pipeline = [
            {"name": name, keys[name]: row[name]} | words.get(name, {})
            for name in order
            if name in row
        ]
        expected_V = np.asarray(process_logits(small[None], pipeline, [TEXT]))[0]
        np.testing.assert_array_equal(found_V > -np.inf, expected_V > -np.inf, err_msg=str(row))
        np.testing.assert_allclose(found_V, expected_V, rtol=1e-6, err_msg=str(row))
    counts = np.isfinite(found_BV).sum(axis=1)
    assert (
        counts[0] != counts[1]
        and counts[2] < counts[3]
        and counts[5] < counts[4]
        and counts[6] != counts[7]
    )

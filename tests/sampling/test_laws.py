"""Properties of all steps for random rows and numbers: monotonicity, survival, disabled steps,
shifts and permutations.

Hypothesis draws a row as bytes that index a table of logits. It is fast, shrinks well, and yields
many ties and removed tokens.
"""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.sampling import process_logits, steps

V = 40


def law(**strategies):
    """Tests a property with a few examples, and with 100 in the slow tests."""

    def decorate(check):
        @pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
        def test(count):
            settings(max_examples=count, deadline=None, derandomize=True)(
                given(**strategies)(check)
            )()

        test.__doc__ = check.__doc__
        return test

    return decorate


# Every filter with a number that loosens it as a goes from 0 to 1.
TRUNCATIONS = {
    "top_k": (steps.top_k, lambda a: 1 + int(a * V)),
    "top_k all": (partial(steps.top_k, ties="all"), lambda a: 1 + int(a * V)),
    "top_p": (steps.top_p, lambda a: a),
    "top_p all": (partial(steps.top_p, ties="all"), lambda a: a),
    "top_p exclusive": (partial(steps.top_p, rule="exclusive"), lambda a: a),
    "top_p exclusive all": (partial(steps.top_p, rule="exclusive", ties="all"), lambda a: a),
    "typical": (steps.typical, lambda a: a),
    "typical all": (partial(steps.typical, ties="all"), lambda a: a),
    "tail_free": (steps.tail_free, lambda a: a),
    "min_p": (steps.min_p, lambda a: (1 - a) ** 4),
    "top_a": (steps.top_a, lambda a: 9 * (1 - a) ** 4),
    "epsilon_cutoff": (steps.epsilon_cutoff, lambda a: (1 - a) ** 4),
    "eta_cutoff": (steps.eta_cutoff, lambda a: (1 - a) ** 4),
    "top_n_sigma": (steps.top_n_sigma, lambda a: 1e-3 + 4 * a),
    "min_k": (steps.min_k, lambda a: 60 * a**3),
    "top_h": (steps.top_h, lambda a: a),
    "top_h cumulative": (partial(steps.top_h, rule="cumulative"), lambda a: a),
    "p_less": (lambda x_V, _: steps.p_less(x_V), lambda a: a),
    "p_less_norm": (lambda x_V, _: steps.p_less_norm(x_V), lambda a: a),
    "mirostat_v1": (steps.mirostat_v1, lambda a: 9 * a - 1),
    "mirostat_v2": (steps.mirostat_v2, lambda a: 9 * a - 1),
    "xtc": (lambda x_V, threshold: steps.xtc(x_V, threshold, 1.0, 0.5), lambda a: a / 2),
}
NUMBERS = {name: number for name, (_, number) in TRUNCATIONS.items()}


@partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
def truncations(rows, numbers):
    """Applies every filter to three rows, in one program; `rows` and `numbers` map names to rows
    and to a number per row.
    """
    return {
        name: jax.vmap(step)(rows[name], numbers[name]) for name, (step, _) in TRUNCATIONS.items()
    }


LOSE_THE_FIRST = ("typical", "xtc")  # the others never remove the most likely token


def truncate(rows, shares):
    """Applies every filter to its three rows, each with the number for its share; returns the rows
    by name.
    """
    numbers = {
        name: np.array(
            [number(float(a)) for a in shares[name]],
            np.int32 if name.startswith("top_k") else np.float32,
        )
        for name, number in NUMBERS.items()
    }
    return {name: np.asarray(y_NV) for name, y_NV in truncations(rows, numbers).items()}


def truncate_equally(rows, shares):
    """Applies every filter to the same three rows with the same shares."""
    return truncate(dict.fromkeys(TRUNCATIONS, np.stack(rows)), dict.fromkeys(TRUNCATIONS, shares))


def table(values, strange):
    """256 logits, of which about one in eight is a special value."""
    return np.float32(
        [
            strange[i // 8 % len(strange)] if i % 8 == 7 else values[i % len(values)]
            for i in range(256)
        ]
    )


GRID = table(
    np.roll(np.arange(-36, 13), 13) / 4, [-np.inf]
)  # multiples of 1/4, so that sums are exact
WILD = table(
    np.random.default_rng(0).normal(0, 4, 150).round(3),
    [
        -np.inf,
        0.0,
        -0.0,
        1.0,
        3.4028235e38,
        -np.inf,
        -3.4028235e38,
        1e-45,
        -1e-40,
        100.0,
        -np.inf,
        1e30,
        -104.0,
    ],
)


def distinct_row(steps_V, seed):
    """A row without ties in random order, with some tokens removed."""
    x_V = np.where(steps_V < 32, -np.inf, np.cumsum(1 + steps_V % 4) / 8).astype(np.float32)
    return np.random.default_rng(seed).permutation(x_V)


def indices(min_size):
    """V bytes; shorter lists are repeated."""
    return st.binary(min_size=min_size, max_size=V if min_size == V else 3).map(
        lambda b: np.resize(np.frombuffer(b, np.uint8), V)
    )


wild = st.one_of(indices(V), indices(1)).map(
    WILD.take
)  # the second has few values, so that whole rows tie
grid = indices(V).map(GRID.take)
distinct = st.builds(distinct_row, indices(V), st.integers(0, 999))
share = st.floats(0, 1, width=32)
sixty_fourths = st.integers(0, 64).map(lambda n: n / 64)


def alive(x_NV):
    return x_NV > -np.inf


@law(x_V=wild, shares=st.tuples(share, share, share).map(sorted))
def test_looser_filters_keep_more_tokens_and_never_empty_a_row(x_V, shares):
    first = np.argmax(
        np.where(np.abs(x_V) < np.finfo(np.float32).tiny, 0, x_V)
    )  # XLA flushes denormals to 0
    for name, y_NV in truncate_equally([x_V] * 3, shares).items():
        kept_NV = alive(y_NV)
        assert (kept_NV[0] <= kept_NV[1]).all() and (kept_NV[1] <= kept_NV[2]).all(), name
        assert (kept_NV.any(1) == alive(x_V).any()).all(), name
        assert kept_NV[:, first].all() or name.startswith(LOSE_THE_FIRST) or not alive(x_V).any(), (
            name
        )
        bits_NV = np.where(kept_NV, x_V, np.float32(-np.inf)).view(np.uint32)
        np.testing.assert_array_equal(y_NV.view(np.uint32), bits_NV, err_msg=name)


@law(
    x_V=wild,
    names=st.lists(st.sampled_from(sorted(TRUNCATIONS)), min_size=2, max_size=6),
    shares=st.tuples(share, share, share),
)
def test_no_chain_of_filters_empties_a_row(x_V, names, shares):
    y_NV = np.stack([x_V] * 3)
    for name in names:
        y_NV = truncate_equally(y_NV, shares)[name]
    np.testing.assert_array_equal(alive(y_NV).any(1), alive(x_V).any())
    assert not np.isnan(y_NV).any()


@law(x_V=grid, shifts=st.tuples(*[st.integers(-250, 250)] * 2), a=sixty_fourths)
def test_a_common_shift_changes_no_filter(x_V, shifts, a):
    """All sums with a shift are exact here, and no (n/64)⁴ is within 1e-5 of a power of e^¼."""
    rows = [x_V, *(x_V + np.float32(shift / 4) for shift in shifts)]
    for name, y_NV in truncate_equally(rows, [a] * 3).items():
        plain_V, *shifted = alive(y_NV)
        for kept_V in shifted:
            np.testing.assert_array_equal(kept_V, plain_V, err_msg=name)


@law(tied_V=grid, distinct_V=distinct, seed=st.integers(0, 999), a=share)
def test_a_permutation_permutes_every_filter(tied_V, distinct_V, seed, a):
    """Sums in another order differ in the last bits, so the permuted result must be between those
    of two very close numbers.

    Steps that break ties by id get rows without ties. Steps that may fall back to the first token
    get rows with a unique maximum.
    """
    order = np.random.default_rng(seed).permutation(V)
    peaked_V = np.where(np.arange(V) == np.argmax(tied_V), tied_V + np.float32(0.25), tied_V)
    rows, shares = {}, {}
    for name in TRUNCATIONS:
        by_id = name in ("top_k", "top_p", "top_p exclusive", "typical", "tail_free", "mirostat_v1",
                         "xtc", "min_k", "top_h",
                         "top_h cumulative")  # fmt: skip
        falls_back = name in ("top_a", "epsilon_cutoff", "eta_cutoff", "mirostat_v2")
        x_V = distinct_V if by_id else peaked_V if falls_back else tied_V
        hair = 0 if name.startswith("top_k") else 3e-5
        rows[name], shares[name] = (
            np.stack([x_V, x_V[order], x_V]),
            [
                max(a - hair, 0),
                a,
                min(a + hair, 1),
            ],
        )
    for name, y_NV in truncate(rows, shares).items():
        tight_V, permuted_V, loose_V = alive(y_NV)
        assert (tight_V[order] <= permuted_V).all() and (permuted_V <= loose_V[order]).all(), name


OFF = [
    {"name": "logit_bias", "ids": [0, 3], "values": [0, -0.0]},
    {"name": "banned_tokens", "ids": []},
    {"name": "bad_words", "sequences": []},
    {"name": "no_repeat_ngram", "n": 0},
    {"name": "min_tokens", "n": 0, "stop_ids": [1]},
    {"name": "repetition_penalty", "penalty": 1, "range": 3, "slope": 2},
    {"name": "presence_frequency_penalty"},
    {"name": "dry", "multiplier": 0, "allowed_length": 1},
    {"name": "temperature", "t": 1},
    {"name": "dynamic_temperature", "low": 1, "high": 1, "exponent": 2},
    {"name": "smoothing", "factor": 0, "curve": 2},
    {"name": "top_k", "k": 0},
    {"name": "top_k", "k": V},
    {"name": "top_p", "p": 1},
    {"name": "top_p", "p": 1, "rule": "exclusive", "ties": "all"},
    {"name": "min_p", "p": 0},
    {"name": "top_a", "a": 0},
    {"name": "tail_free", "z": 1},
    {"name": "typical", "p": 1},
    {"name": "epsilon_cutoff", "eps": 0},
    {"name": "eta_cutoff", "eps": 0},
    {"name": "top_n_sigma", "n": 0},
    {"name": "xtc", "threshold": 0.0, "probability": 0, "u": 0},
    {"name": "min_k", "tau": -1},
    {"name": "top_h", "alpha": 1},
    {"name": "top_h", "alpha": 1, "rule": "cumulative"},
    {"name": "skew", "skew": 0},
    {"name": "adaptive_p", "target": -0.5, "average": 0.5},
    {"name": "synthid", "layer_keys": []},
    {"name": "encoder_repetition_penalty", "penalty": 1},
]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(x_V=wild, seed=st.integers(0, 999))
def test_disabled_steps_return_the_row_bit_for_bit(x_V, seed):
    """As named steps; `test_step_functions.py` tests the functions."""
    rng = np.random.default_rng(seed)
    pipeline = [OFF[i] for i in rng.permutation(len(OFF))]
    text = rng.integers(0, 4, (2, 1, 12))
    y_V = np.asarray(process_logits(x_V[None], pipeline, *text))[0]
    np.testing.assert_array_equal(y_V.view(np.uint32), x_V.view(np.uint32))


# Steps that change logits depend only on differences of logits (except the repetition penalty,
# which depends on signs).
MOVES = {
    "temperature": [{"name": "temperature", "t": 0.7}],
    "dynamic_temperature": [
        {"name": "dynamic_temperature", "low": 0.5, "high": 2, "exponent": 1.5}
    ],
    "smoothing": [{"name": "smoothing", "factor": 0.3, "curve": 2}],
    "skew": [{"name": "skew", "skew": 1.2}],
    "adaptive_p": [{"name": "adaptive_p", "target": 0.3, "average": 0.2}],
    "synthid": [{"name": "synthid", "layer_keys": [3, 1, 2**31 - 1], "ngram": 3}],
    "penalties": [
        {"name": "logit_bias", "ids": [0, 7, 9], "values": [2.5, None, -1]},
        {"name": "presence_frequency_penalty", "presence": 0.5, "frequency": 0.25},
        {"name": "dry", "multiplier": 0.8, "base": 1.75, "allowed_length": 1},
    ],
}


def probabilities(x_V):
    weights_V = np.exp(np.float64(x_V) - np.max(x_V, initial=-1e30))
    return weights_V / max(weights_V.sum(), 1e-300)


@pytest.mark.parametrize("name", MOVES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(x_V=grid, shift=st.integers(-40, 40), seed=st.integers(0, 999))
def test_a_common_shift_does_not_change_probabilities(name, x_V, shift, seed):
    text = [[np.random.default_rng(seed).integers(0, 4, 9).tolist()] * 2] * 2
    y_BV = process_logits(np.stack([x_V, x_V + np.float32(shift / 4)]), MOVES[name], *text)
    np.testing.assert_allclose(probabilities(y_BV[1]), probabilities(y_BV[0]), rtol=2e-4, atol=1e-9)


@law(x_V=grid, temperatures=st.tuples(st.integers(1, 64), st.integers(1, 64)).map(sorted))
def test_a_lower_temperature_never_lowers_the_largest_probability(x_V, temperatures):
    chains = [[{"name": "temperature", "t": number / 16}] for number in temperatures]
    low, high = (probabilities(process_logits(x_V[None], chain)[0]).max() for chain in chains)
    assert low >= high * (1 - 1e-5)


@law(x_V=grid, text=st.lists(st.integers(0, 5), max_size=24), seed=st.integers(0, 999))
def test_permuted_token_ids_permute_the_result(x_V, text, seed):
    """Ids are only names: a permuted history and row give the same logits, permuted."""
    new_V = np.random.default_rng(seed).permutation(V)
    x_V = np.where(
        np.arange(V) == 11, 50, x_V
    )  # no step removes all tokens; otherwise the lowest id would decide

    def run(x_V, name_V):
        pipeline = [
            {"name": "banned_tokens", "ids": [int(name_V[6])]},
            {
                "name": "bad_words",
                "sequences": [
                    [int(name_V[i]) for i in words] for words in ([7], [1, 2], [0, 1, 3])
                ],
            },
            {"name": "no_repeat_ngram", "n": 4},
            {"name": "min_tokens", "n": 6, "stop_ids": [int(name_V[8])]},
            {"name": "repetition_penalty", "penalty": 1.3, "range": 9, "slope": 1.5},
            {"name": "presence_frequency_penalty", "presence": 0.5, "frequency": 0.25},
            {"name": "dry", "multiplier": 0.8, "allowed_length": 1, "breakers": [int(name_V[5])]},
        ]
        said = [int(name_V[token]) for token in text]
        return np.asarray(process_logits(x_V[None], pipeline, [said[:10]], [said[10:]]))[0]

    renamed_V = np.empty(V, np.float32)
    renamed_V[new_V] = x_V
    np.testing.assert_array_equal(run(renamed_V, new_V)[new_V], run(x_V, np.arange(V)))

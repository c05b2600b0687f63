"""Invalid rows and requests: the result is defined or a one-sentence error, never NaN or another
exception.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.sampling import kobold_order, process_logits
from tests.error_texts import ERRORS

pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("error::numpy.exceptions.ComplexWarning"),
]
INF, NAN = math.inf, math.nan
LARGEST = float(np.finfo(np.float32).max)

# Every step by name, enabled, with ids that also exist in a vocabulary of one token.
EVERY = {
    "logit_bias": {"ids": [0], "values": [0.5]},
    "allowed_tokens": {"ids": [0]},
    "banned_tokens": {"ids": [0]},
    "bad_words": {"sequences": [[0], [0, 0]]},
    "no_repeat_ngram": {"n": 2},
    "min_tokens": {"n": 9, "stop_ids": [0]},
    "repetition_penalty": {"penalty": 1.5, "range": 3, "slope": 2.0},
    "presence_frequency_penalty": {"presence": 0.5, "frequency": -0.25},
    "dry": {"multiplier": 1.0, "allowed_length": 1, "breakers": []},
    "temperature": {"t": 0.5},
    "dynamic_temperature": {"low": 0.5, "high": 2.0, "exponent": 2.0},
    "smoothing": {"factor": 0.5, "curve": 2.0},
    "top_k": {"k": 1},
    "top_p": {"p": 0.0},
    "min_p": {"p": 1.0},
    "top_a": {"a": 9.0},
    "tail_free": {"z": 0.0},
    "typical": {"p": 0.0},
    "epsilon_cutoff": {"eps": 1.0},
    "eta_cutoff": {"eps": 1.0},
    "top_n_sigma": {"n": 0.1},
    "xtc": {"threshold": 0.0, "probability": 1.0, "u": 0.0, "protected_ids": []},
    "mirostat_v1": {"mu": -5.0},
    "mirostat_v2": {"mu": -5.0},
    "encoder_repetition_penalty": {"penalty": 1.5},
    "min_k": {"tau": 0.0},
    "p_less": {},
    "p_less_norm": {},
    "top_h": {"alpha": 0.0},
    "skew": {"skew": 10.0},
    "adaptive_p": {"target": 1.0, "average": 0.0},
    "synthid": {"layer_keys": [1, 2**31 - 1], "ngram": 2},
}
MOVES = {
    "logit_bias",
    "repetition_penalty",
    "presence_frequency_penalty",
    "dry",
    "temperature",
    "encoder_repetition_penalty",
}
MOVES |= {"skew", "adaptive_p", "synthid"}


def process(rows, *pipeline, prompt=None, output=None):
    return np.asarray(process_logits(rows, list(pipeline), prompt, output))


def one(row, *pipeline, **text):
    return process(np.float32([row]), *pipeline, **text)[0].tolist()


@pytest.mark.parametrize("name", EVERY)
def test_every_step_keeps_empty_rows_and_the_only_token(name):
    step = {"name": name} | EVERY[name]
    empty_BV = np.float32([[-INF] * 5, [NAN] * 5, [NAN, -INF, NAN, -INF, -INF]])
    y_BV = process(empty_BV, step, prompt=[[0, 1, 0]] * 3, output=[[0]] * 3)
    assert y_BV.shape == (3, 5) and (y_BV == -INF).all()
    single = process(
        [[2.0], [-3.0], [0.0], [INF], [NAN]], step, prompt=[[0, 0]] * 5, output=[[0]] * 5
    )
    assert np.isfinite(single[:4]).all() and single[4] == -INF
    if name not in MOVES:
        np.testing.assert_array_equal(single[:4], [[2.0], [-3.0], [0.0], [0.0]])


def test_extreme_penalties_on_repeated_tokens_stay_finite():
    said = [[0, 1, 2, 0, 1]]
    rows = np.float32([[LARGEST, 1.0, -LARGEST, -INF]])
    for multiplier in (-0.0, 1e-37, LARGEST):
        dry = {"name": "dry", "multiplier": multiplier, "base": LARGEST, "allowed_length": 1}
        for step in (dry, dry | {"range": 2}, dry | {"allowed_length": 2**31, "breakers": [1]}):
            y_BV = process(rows, step, prompt=said)
            assert np.isfinite(y_BV[0, :3]).all() and y_BV[0, 3] == -INF and y_BV[0, 1] == 1.0


@pytest.mark.parametrize(
    ("row", "repaired"),
    [
        ([NAN, 1.0, 0.0], [-INF, 1.0, 0.0]),
        ([INF, 1.0, INF], [0.0, -INF, 0.0]),
        ([NAN, INF, -INF], [-INF, 0.0, -INF]),
        ([NAN, NAN, NAN], [-INF, -INF, -INF]),
        ([-INF, INF, INF], [-INF, 0.0, 0.0]),
    ],
)
def test_nan_and_inf_are_repaired_at_the_start(row, repaired):
    assert one(row) == repaired
    assert one(row, {"name": "banned_tokens", "ids": []}) == repaired
    neighbors = process(np.float32([[1.0, 2.0, 3.0], row, [0.0, -1.0, -2.0]]))
    np.testing.assert_array_equal(neighbors, [[1.0, 2.0, 3.0], repaired, [0.0, -1.0, -2.0]])


def test_other_dtypes_of_logits():
    assert process(np.zeros((0, 4)), {"name": "top_k", "k": 1}).shape == (0, 4)
    assert process([[1, 2], [3, -4]]).tolist() == [[1.0, 2.0], [3.0, -4.0]]
    assert process(np.array([[1e300, 1.0], [-1e300, 1.0]])).tolist() == [
        [0.0, -INF],
        [-INF, 1.0],
    ]  # beyond float32
    for dtype in (jnp.bfloat16, jnp.float16):
        assert process(jnp.array([[0.5, -2.0]], dtype)).dtype == np.float32


@pytest.mark.parametrize(
    ("pipeline", "left"),
    [
        ([{"name": "allowed_tokens", "ids": [3]}, {"name": "banned_tokens", "ids": [3]}], {3}),
        ([{"name": "banned_tokens", "ids": [3]}, {"name": "allowed_tokens", "ids": [3]}], {1}),
        (
            [
                {"name": "allowed_tokens", "ids": [3]},
                {"name": "min_tokens", "n": 5, "stop_ids": [3]},
            ],
            {3},
        ),
        ([{"name": "banned_tokens", "ids": [0, 1, 2, 3]}], {1}),
        ([{"name": "banned_tokens", "ids": [1, 2]}, {"name": "banned_tokens", "ids": [0, 3]}], {0}),
        ([{"name": "banned_tokens", "ids": [1, 1, 1]}], {0, 2, 3}),
        ([{"name": "bad_words", "sequences": [[0], [1], [2], [3]]}], {1}),
        ([{"name": "bad_words", "sequences": [[], [1, 0], [1, 0, 1, 2, 3, 0]]}], {0, 1, 2, 3}),
        ([{"name": "bad_words", "sequences": [[0, 1, 2, 3, 0], [3, 1], [2, 3, 2]]}], {3}),
        ([{"name": "min_tokens", "n": 1, "stop_ids": [0, 1, 2, 3]}], {0, 1, 2, 3}),
        ([{"name": "min_tokens", "n": 5, "stop_ids": [0, 1, 2, 3]}], {1}),
        ([{"name": "no_repeat_ngram", "n": 1}], {1}),
        ([{"name": "no_repeat_ngram", "n": 2**70}], {0, 1, 2, 3}),
        ([{"name": "no_repeat_ngram", "n": -1}], {0, 1, 2, 3}),
        ([{"name": "logit_bias", "ids": [0, 1, 2, 3], "values": [None, -INF, None, None]}], {1}),
        ([{"name": "logit_bias", "ids": [1, 1, 1], "values": [3e38, 3e38, None]}], {0, 2, 3}),
        ([{"name": "logit_bias", "ids": [1, 1], "values": [-3e38, -3e38]}], {0, 1, 2, 3}),
        ([{"name": "top_k", "k": 5}], {0, 1, 2, 3}),
        ([{"name": "top_k", "k": 2**70}], {0, 1, 2, 3}),
        ([{"name": "top_k", "k": -(2**70)}], {0, 1, 2, 3}),
        ([{"name": "mirostat_v1", "mu": 100.0, "m": 2**40}], {0, 1, 2, 3}),
        ([{"name": "banned_tokens", "ids": np.array([0, 3])}], {1, 2}),
        ([{"name": "allowed_tokens", "ids": range(2)}], {0, 1}),
    ],
    ids=str,
)
def test_contradictory_settings_and_small_rows_have_defined_results(pipeline, left):
    row = one([3.0, 5.0, 5.0, 1.0], *pipeline, prompt=[[0, 1]], output=[[2, 3]])
    assert {i for i, x in enumerate(row) if x > -INF} == left and not any(map(math.isnan, row))


WRONG_STEPS = {
    "unknown": ({"name": "topp", "p": 1}, "unknown sampling step 'topp'"),
    "capitals": ({"name": "Top_K", "k": 1}, "unknown sampling step 'Top_K'"),
    "no name": ({}, "unknown sampling step null"),
    "list as name": ({"name": ["top_k"], "k": 1}, r"unknown sampling step \['top_k'\]"),
    "number as name": ({"name": 3}, "unknown sampling step 3"),
    "unknown parameter": (
        {"name": "top_k", "k": 1, 3: 4},
        r"top_k\.3 is not a parameter of this step",
    ),
    "missing": (
        {"name": "xtc", "threshold": 0.1, "probability": 1},
        r"xtc\.u is a required parameter",
    ),
    "None": ({"name": "top_p", "p": None}, r"top_p\.p is a required parameter"),
    "text": ({"name": "top_p", "p": "0.5"}, r"top_p\.p must be"),
    "bool": ({"name": "top_p", "p": True}, r"top_p\.p must be"),
    "NaN": ({"name": "top_p", "p": NAN}, r"top_p\.p must be"),
    "list": ({"name": "top_p", "p": [0.5]}, r"top_p\.p must be"),
    "array": ({"name": "top_p", "p": np.array([0.5, 0.6])}, r"top_p\.p must be"),
    "complex": ({"name": "top_p", "p": np.complex64(0.5)}, r"top_p\.p must be"),
    "above": ({"name": "top_p", "p": 1.0000001}, r"top_p\.p must be"),
    "below": ({"name": "temperature", "t": -1e-9}, r"temperature\.t must be"),
    "infinite": ({"name": "temperature", "t": INF}, r"temperature\.t must be"),
    "beyond float32": ({"name": "temperature", "t": 1e39}, r"temperature\.t must be"),
    "beyond float64": ({"name": "temperature", "t": 10**400}, r"temperature\.t must be"),
    "beyond below": ({"name": "mirostat_v2", "mu": -1e39}, r"mirostat_v2\.mu must be"),
    "fraction": ({"name": "top_k", "k": 2.0}, r"top_k\.k must be"),
    "bool for an integer": ({"name": "top_k", "k": True}, r"top_k\.k must be"),
    "NaN for an integer": ({"name": "top_k", "k": NAN}, r"top_k\.k must be"),
    "integer below": (
        {"name": "dry", "multiplier": 1, "allowed_length": 0},
        r"dry\.allowed_length must be",
    ),
    "wrong word": ({"name": "top_k", "k": 1, "ties": "some"}, r"top_k\.ties must be"),
    "number for a word": ({"name": "top_k", "k": 1, "ties": 1}, r"top_k\.ties must be"),
    "array for a word": (
        {"name": "top_k", "k": 1, "ties": np.array(["first", "all"])},
        r"top_k\.ties must be",
    ),
    "low above high": ({"name": "dynamic_temperature", "low": 2, "high": 1}, "low must be"),
    "nothing allowed": (
        {"name": "allowed_tokens", "ids": []},
        "allowed_tokens.ids must hold at least one token id",
    ),
    "no array allowed": (
        {"name": "allowed_tokens", "ids": np.array([], int)},
        "must hold at least one token id",
    ),
    "text for ids": ({"name": "banned_tokens", "ids": "12"}, r"banned_tokens\.ids must be"),
    "bytes for ids": ({"name": "banned_tokens", "ids": b"\x01"}, r"banned_tokens\.ids must be"),
    "set for ids": ({"name": "banned_tokens", "ids": {1}}, r"banned_tokens\.ids must be"),
    "number for ids": (
        {"name": "banned_tokens", "ids": np.array(1)},
        r"banned_tokens\.ids must be",
    ),
    "text in ids": ({"name": "banned_tokens", "ids": ["1"]}, r"banned_tokens\.ids\.0 must be"),
    "fraction in ids": ({"name": "banned_tokens", "ids": [1.0]}, r"banned_tokens\.ids\.0 must be"),
    "fractions in ids": (
        {"name": "banned_tokens", "ids": np.array([1.0])},
        r"banned_tokens\.ids\.0 must be",
    ),
    "bool in ids": ({"name": "banned_tokens", "ids": [True]}, r"banned_tokens\.ids\.0 must be"),
    "None in ids": (
        {"name": "allowed_tokens", "ids": [0, None]},
        r"allowed_tokens\.ids\.1 must be",
    ),
    "list in ids": (
        {"name": "min_tokens", "n": 1, "stop_ids": [[1]]},
        r"min_tokens\.stop_ids\.0 must be",
    ),
    "table of ids": (
        {"name": "banned_tokens", "ids": np.array([[1, 2]])},
        r"banned_tokens\.ids\.0 must be",
    ),
    "negative id": (
        {"name": "min_tokens", "n": 1, "stop_ids": [-1]},
        r"min_tokens\.stop_ids\.0 must be",
    ),
    "id beyond": ({"name": "banned_tokens", "ids": [1, 4, 2]}, r"banned_tokens\.ids\.1 must be"),
    "huge id": ({"name": "allowed_tokens", "ids": [2**70]}, r"allowed_tokens\.ids\.0 must be"),
    "protected": (
        {"name": "xtc", "threshold": 0.1, "probability": 1, "u": 0, "protected_ids": [4]},
        r"xtc\.protected_ids\.0 must be",
    ),
    "breaker": ({"name": "dry", "multiplier": 1, "breakers": [9]}, r"dry\.breakers\.0 must be"),
    "text as breaker": (
        {"name": "dry", "multiplier": 1, "breakers": ["\n"]},
        r"dry\.breakers\.0 must be",
    ),
    "flat bad words": (
        {"name": "bad_words", "sequences": [1, 2]},
        r"bad_words\.sequences\.0 must be",
    ),
    "text as bad words": (
        {"name": "bad_words", "sequences": [[1], "ab"]},
        r"bad_words\.sequences\.1 must be",
    ),
    "texts in bad words": (
        {"name": "bad_words", "sequences": [["a"]]},
        r"bad_words\.sequences\.0\.0 must be",
    ),
    "bad word beyond": (
        {"name": "bad_words", "sequences": [[2**40]]},
        r"bad_words\.sequences\.0\.0 must be",
    ),
    "one for two": (
        {"name": "logit_bias", "ids": [1, 2], "values": [1.0]},
        "logit_bias needs one value for each of its 2 entries, got 1 values",
    ),
    "text as value": (
        {"name": "logit_bias", "ids": [1], "values": ["1"]},
        r"logit_bias\.values\.0 must be",
    ),
    "bool as value": (
        {"name": "logit_bias", "ids": [1], "values": [True]},
        r"logit_bias\.values\.0 must be",
    ),
    "NaN as value": (
        {"name": "logit_bias", "ids": [1, 2], "values": [1, NAN]},
        r"logit_bias\.values\.1 must be",
    ),
    "+inf as value": (
        {"name": "logit_bias", "ids": [1], "values": [INF]},
        r"logit_bias\.values\.0 must be",
    ),
    "list as value": (
        {"name": "logit_bias", "ids": [1], "values": [[1]]},
        r"logit_bias\.values\.0 must be",
    ),
    "huge value": (
        {"name": "logit_bias", "ids": [1], "values": [1e300]},
        r"logit_bias\.values\.0 must be",
    ),
    "number for values": (
        {"name": "logit_bias", "ids": [1], "values": 1.0},
        r"logit_bias\.values must be",
    ),
    "text as step": ("top_k", "a sampling step must be"),
    "None as step": (None, "a sampling step must be"),
    "pair as step": (("top_k", 1), "a sampling step must be"),
}


def sentence(error):
    text = str(error.value)
    assert "\n" not in text and 20 < len(text) < 500
    return True


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_an_invalid_step_raises_one_sentence(case):
    step, words = WRONG_STEPS[case]
    with pytest.raises(UserError, match=words) as error:
        process_logits(np.zeros((1, 4)), [{"name": "top_k", "k": 0}, step], [[1, 2, 1]])
    assert sentence(error)


WRONG_CALLS = {
    "one row as a list": ((np.zeros(4), []), r"logits must be"),
    "a number": ((1.0, []), r"logits must be"),
    "three axes": ((np.zeros((1, 1, 4)), []), r"logits must be"),
    "no vocabulary": ((np.zeros((1, 0)), []), r"logits must be"),
    "ragged": (([[1.0, 2.0], [1.0]], []), r"logits must be"),
    "texts": (([["1", "2"]], []), r"logits must be"),
    "None": ((None, []), r"logits must be"),
    "None inside": (([[1.0, None]], []), r"logits must be"),
    "complex": ((np.zeros((1, 4), complex), []), r"logits must be"),
    "bools": ((np.zeros((1, 4), bool), []), r"logits must be"),
    "huge integers": (([[10**400, 1]], []), r"logits must be"),
    "no steps": ((np.zeros((1, 4)), None), "steps must be"),
    "a step alone": ((np.zeros((1, 4)), {"name": "top_k", "k": 1}), "steps must be"),
    "text as steps": ((np.zeros((1, 4)), "top_k"), "steps must be"),
    "few prompts": ((np.zeros((2, 4)), [], [[1]]), "prompt must be"),
    "many prompts": ((np.zeros((2, 4)), [], [[1]] * 3), "prompt must be"),
    "few outputs": ((np.zeros((2, 4)), [], None, [[1]]), "output must be"),
    "flat prompt": ((np.zeros((1, 4)), [], [1]), r"prompt\.0 must be"),
    "number as prompt": ((np.zeros((1, 4)), [], 3), "prompt must be"),
    "text as prompt": ((np.zeros((1, 4)), [], ["12"]), r"prompt\.0 must be"),
    "None as a row": ((np.zeros((2, 4)), [], [[1], None]), r"prompt\.1 must be"),
    "fraction": ((np.zeros((1, 4)), [], [[1, 1.5]]), r"prompt\.0\.1 must be"),
    "NaN": ((np.zeros((1, 4)), [], [[NAN]]), r"prompt\.0\.0 must be"),
    "bool": ((np.zeros((1, 4)), [], None, [[True]]), r"output\.0\.0 must be"),
    "nested": ((np.zeros((1, 4)), [], [[[1]]]), r"prompt\.0\.0 must be"),
    "beyond": ((np.zeros((2, 4)), [], [[0], [3, 4]]), r"prompt\.1\.1 must be"),
    "negative": ((np.zeros((1, 4)), [], None, [[-1]]), r"output\.0\.0 must be"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_an_invalid_call_raises_one_sentence(case):
    arguments, words = WRONG_CALLS[case]
    with pytest.raises(UserError, match=words) as error:
        process_logits(*arguments)
    assert sentence(error)


def test_token_histories_can_be_arrays():
    step = {"name": "repetition_penalty", "penalty": 2.0}
    for kind in (np.array, jnp.array, tuple):
        assert one([1.0, 1.0, -1.0], step, prompt=kind([[0, 2]]), output=kind([[0]])) == [
            0.5,
            1.0,
            -2.0,
        ]


@pytest.mark.parametrize(
    "codes",
    [
        "0123456",
        [0, "1", 2],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [False, True, 2, 3, 4, 5],
        [[0], [1]],
        {0, 1},
    ],
    ids=str,
)
def test_a_wrong_kobold_order_is_a_value_error(codes):
    with pytest.raises(ValueError, match=ERRORS["must_be_a_permutation"]):
        kobold_order(codes)

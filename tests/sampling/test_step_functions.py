"""Every function of a step with extreme and with disabled numbers, for extreme rows, in one
program.
"""

import math
from functools import partial

import jax
import numpy as np
import pytest

from dantinox.sampling import history, steps, watermark

INF = math.inf
LARGEST = np.finfo(np.float32).max
SAID = np.int32([0, 3, 0, 3, 0, 3, -1, -1])  # six tokens


def no_repeat_ngram(x_V, history_S, length, n):
    return history.no_repeat_ngram(
        x_V, history_S, length, history.repeat_lengths(history_S, length), n
    )


FUNCTIONS = {
    "ban": history.ban,
    "allowed_tokens": steps.allowed_tokens,
    "min_tokens": history.min_tokens,
    "logit_bias": steps.logit_bias,
    "repetition_penalty": history.repetition_penalty,
    "presence_frequency_penalty": history.presence_frequency_penalty,
    "no_repeat_ngram": no_repeat_ngram,
    "bad_words": history.bad_words,
    "dry": history.dry,
    "encoder_repetition_penalty": history.encoder_repetition_penalty,
    "temperature": steps.temperature,
    "dynamic_temperature": steps.dynamic_temperature,
    "smoothing": steps.smoothing,
    "top_k": steps.top_k,
    "top_k all": lambda x_V, k: steps.top_k(x_V, k, "all"),
    "top_p": steps.top_p,
    "top_p exclusive all": lambda x_V, p: steps.top_p(x_V, p, "exclusive", "all"),
    "min_p": steps.min_p,
    "top_a": steps.top_a,
    "tail_free": steps.tail_free,
    "typical": steps.typical,
    "epsilon_cutoff": steps.epsilon_cutoff,
    "eta_cutoff": steps.eta_cutoff,
    "top_n_sigma": steps.top_n_sigma,
    "xtc": steps.xtc,
    "mirostat_v1": steps.mirostat_v1,
    "mirostat_v2": steps.mirostat_v2,
    "min_k": steps.min_k,
    "p_less": lambda x_V, _: steps.p_less(x_V),
    "p_less_norm": lambda x_V, _: steps.p_less_norm(x_V),
    "top_h": steps.top_h,
    "top_h cumulative": lambda x_V, alpha: steps.top_h(x_V, alpha, "cumulative"),
    "skew": steps.skew,
    "adaptive_p": steps.adaptive_p,
    "synthid": watermark.synthid,
}
MOVES = {
    "logit_bias",
    "repetition_penalty",
    "presence_frequency_penalty",
    "dry",
    "encoder_repetition_penalty",
    "dynamic_temperature",
    "smoothing",
    "skew",
    "adaptive_p",
    "synthid",
}


def cases(V):
    """Returns the arguments of each function by case; a case `off…` disables the step."""
    ids, none, all_ids = (
        np.int32([0, V, -1, 2**31 - 1]),
        np.full(4, -1, np.int32),
        np.full(4, -1, np.int32),
    )
    all_ids[:V] = np.arange(V)
    said, counts, zeros, fifty = (
        np.minimum(SAID, V - 1),
        np.arange(V) % 3,
        np.zeros(V, np.int32),
        np.full(V, 50),
    )
    prefixes = np.int32([[-1, -1], [0, V - 1], [7, 7]])
    nearly_one = np.nextafter(np.float32(1), np.float32(0))
    return {
        "ban": {"some": (ids,), "all": (all_ids,), "off": (none,)},
        "allowed_tokens": {"some": (ids,), "nothing": (none,)},
        "min_tokens": {"on": (3, ids, 2), "off": (0, all_ids, 0), "off, enough": (3, all_ids, 3)},
        "logit_bias": (
            {str(value): (np.full(V, value, np.float32),) for value in (-INF, LARGEST, -LARGEST)}
            | {"off": (np.zeros(V, np.float32),)}
        ),
        "repetition_penalty": {
            "largest": (counts - 1, LARGEST, 2, 3.0),
            "small": (counts, 1.2e-38, 0, 0.0),
            "off": (zeros, 1.0, 3, 2.0),
        },
        "presence_frequency_penalty": {
            "largest": (counts, LARGEST, LARGEST),
            "back": (counts, LARGEST, -LARGEST),
            "off": (counts, 0.0, 0.0),
        },
        "no_repeat_ngram": {
            "two": (said, 6, 2),
            "longer than the text": (said, 6, 2**31 - 1),
            "without a text": (said, 0, 1),
            "off": (np.zeros(8, np.int32), 8, 0),
        },
        "bad_words": {
            "some": (said, 6, prefixes, np.int32([0, V - 1, -1])),
            "without a text": (
                said,
                0,
                np.int32([[-1, 0], [-1, -1], [-1, -1]]),
                np.int32([0, -1, -1]),
            ),
            "off": (said, 6, prefixes, np.full(3, -1, np.int32)),
        },
        "dry": {
            "largest": (fifty, LARGEST, LARGEST, 1),
            "smallest": (fifty, 1.2e-38, 1.0, 1),
            "off": (fifty, 0.0, 2.0, 1),
        },
        "encoder_repetition_penalty": {
            "largest": (counts > 0, LARGEST),
            "small": (counts > 0, 1.2e-38),
            "off": (counts >= 0, 1.0),
        },
        "temperature": {"greedy": (0.0,), "cold": (1e-5,), "hot": (LARGEST,), "off": (1.0,)},
        "dynamic_temperature": {
            "low": (0.0, 2.0, 0.0),
            "extreme": (0.0, LARGEST, LARGEST),
            "off": (1.0, 1.0, 2.0),
        },
        "smoothing": {"largest": (LARGEST, 3.0), "off": (0.0, 2.0)},
        "top_k": {"one": (1,), "off": (0,), "off, all": (V,)},
        "top_k all": {"most": (max(V - 1, 1),), "off": (0,), "off, all": (V,)},
        "top_p": {"none": (0.0,), "nearly off": (nearly_one,), "off": (1.0,)},
        "top_p exclusive all": {"none": (0.0,), "off": (1.0,)},
        "min_p": {"most": (1.0,), "smallest": (1e-45,), "off": (0.0,)},
        "top_a": {"largest": (LARGEST,), "off": (0.0,)},
        "tail_free": {"none": (0.0,), "off": (1.0,)},
        "typical": {"none": (0.0,), "off": (1.0,)},
        "epsilon_cutoff": {"most": (1.0,), "off": (0.0,)},
        "eta_cutoff": {"most": (1.0,), "off": (0.0,)},
        "top_n_sigma": {"small": (1e-30,), "largest": (LARGEST,), "off": (0.0,)},
        "xtc": {
            "on": (0.0, 1.0, 0.0, counts < 0),
            "all protected": (0.0, 1.0, 0.0, counts >= 0),
            "off": (0.1, 0.0, 0.0, counts < 0),
        },
        "mirostat_v1": {"least": (-LARGEST,), "most": (LARGEST,)},
        "mirostat_v2": {"least": (-LARGEST,)},
        "min_k": {"none": (0.0,), "largest": (LARGEST,), "off": (-1.0,)},
        "p_less": {"on": (0.0,)},
        "p_less_norm": {"on": (0.0,)},
        "top_h": {"none": (0.0,), "off": (1.0,)},
        "top_h cumulative": {"most": (0.999,), "off": (1.0,)},
        "skew": {"on": (10.0,), "back": (-10.0,), "off": (0.0,)},
        "adaptive_p": {"on": (1.0, 0.0), "far": (0.0, 1.0), "off": (-1.0, 0.5)},
        "synthid": {
            "on": (said, 6, 6, ids, 2),
            "without a text": (said, 0, 0, np.int32([5, 6, -1, -1]), 16),
            "off": (said, 6, 6, none, 3),
        },
    }


def results(x_BV, names):
    """Returns the rows after every case of the functions, in one program with one `vmap` over rows
    and cases.
    """
    B, by_name = len(x_BV), {name: cases(x_BV.shape[1])[name] for name in names}
    arguments = {}
    for name, by_case in by_name.items():
        columns = [
            np.stack([np.asarray(x) for x in column])
            for column in zip(*by_case.values(), strict=True)
        ]
        arguments[name] = [
            np.tile(x_BV, (len(by_case), 1)),
            *(np.repeat(column, B, axis=0) for column in columns),
        ]

    @partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
    def run(arguments):
        return {name: jax.vmap(FUNCTIONS[name])(*columns) for name, columns in arguments.items()}

    found = {
        name: np.asarray(y_NV).reshape(-1, *x_BV.shape) for name, y_NV in run(arguments).items()
    }
    return {
        (name, case): found[name][i]
        for name, by_case in by_name.items()
        for i, case in enumerate(by_case)
    }


def check(rows, names=FUNCTIONS):
    """Checks that rows have no NaN, are not empty, keep removed tokens removed, and the bits of
    logits that do not move.
    """
    x_BV = np.float32(rows)
    for (name, case), y_BV in results(x_BV, names).items():
        where = f"{name}, {case}"
        if case.startswith("off"):
            np.testing.assert_array_equal(y_BV.view(np.uint32), x_BV.view(np.uint32), err_msg=where)
        assert not np.isnan(y_BV).any() and not (y_BV == INF).any(), where
        np.testing.assert_array_equal((y_BV > -INF).any(1), (x_BV > -INF).any(1), err_msg=where)
        assert ((y_BV == -INF) | (x_BV > -INF)).all(), where
        if name not in MOVES and (name, case) not in (
            ("temperature", "cold"),
            ("temperature", "hot"),
        ):
            np.testing.assert_array_equal(
                y_BV.view(np.uint32)[y_BV > -INF], x_BV.view(np.uint32)[y_BV > -INF], err_msg=where
            )


FOUR = [
    [-INF] * 4,
    [-INF, -INF, -LARGEST, -INF],
    [LARGEST] * 4,
    [-LARGEST] * 4,
    [LARGEST, -LARGEST, -INF, 0.0],
    [1e-45, -1e-45, 0.0, -0.0],
    [LARGEST, LARGEST, 1.0, -INF],
    [3.0, 2.0, 1.0, 0.0],
    [0.0, 1e-40, -1e-40, 1.0],
    [-0.3, -INF, 2.5, -0.0],
]
ONE = [[-INF], [0.0], [-0.0], [1e-45], [LARGEST], [-LARGEST]]


def test_extreme_and_disabled_numbers():
    check(FOUR)


def test_a_vocabulary_of_one_token():
    """For the functions that look at ranks or at the size of the vocabulary."""
    check(ONE, ("tail_free", "mirostat_v1", "min_k", "p_less_norm", "skew", "xtc"))


@pytest.mark.slow
def test_all_functions_with_a_vocabulary_of_one_token():
    check(ONE)

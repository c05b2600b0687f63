"""All cases of the golden file: 128 pipelines that were computed in float64 by other code."""

import json
from pathlib import Path

import numpy as np
import pytest

from dantinox.sampling import kobold_order, process_logits, steps
from tests.error_texts import ERRORS

GOLDEN = json.loads(Path(__file__).with_name("samplers.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["id"])
def test_pipeline(case):
    x_V = np.float32([-np.inf if x is None else x for x in case["logits"]])
    y_V = np.asarray(
        process_logits(
            x_V[None], case["pipeline"], [case.get("prompt", [])], [case.get("output", [])]
        )
    )[0]
    ids = np.flatnonzero(np.asarray(y_V) > -np.inf)
    assert ids.tolist() == case["kept_ids"]
    np.testing.assert_allclose(y_V[ids], case["kept_logits"], rtol=2e-5, atol=2e-5)
    weights = np.exp(y_V[ids] - y_V.max())
    np.testing.assert_allclose(weights / weights.sum(), case["kept_probs"], atol=2e-5)
    assert int(np.argmax(y_V)) == case["kept_first"]


@pytest.mark.parametrize("case", GOLDEN["aux"]["kobold_order"], ids=lambda case: str(case["codes"]))
def test_kobold_order(case):
    if case["expected"] is None:
        with pytest.raises(ValueError, match=ERRORS["permutation_2"]):
            kobold_order(case["codes"])
    else:
        assert list(kobold_order(case["codes"])) == case["expected"]


@pytest.mark.parametrize("case", GOLDEN["aux"]["mirostat_update"], ids=lambda case: str(case["mu"]))
def test_mirostat_update(case):
    numbers = {key: value for key, value in case.items() if key != "expected"}
    np.testing.assert_allclose(steps.mirostat_update(**numbers), case["expected"], rtol=1e-6)


def test_rows_have_separate_histories():
    y_BV = process_logits(
        np.ones((2, 4)), [{"name": "repetition_penalty", "penalty": 2.0}], [[1], [2]], [[], [3]]
    )
    np.testing.assert_array_equal(y_BV, [[1, 0.5, 1, 1], [1, 1, 0.5, 0.5]])

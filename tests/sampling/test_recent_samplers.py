"""The samplers of 2025 and 2026: cases computed in float64 from the papers, and results of other programs."""

import json
from pathlib import Path

import numpy as np
import pytest
import recent_references as references

from dantinox.sampling import process_logits

CASES = json.loads(Path(__file__).with_name("recent_samplers.json").read_text(encoding="utf-8"))
NAMES = sorted({case["step"]["name"] for case in CASES})


def probabilities(x_V):
    weights_V = np.exp(np.float64(x_V) - np.max(x_V))
    return weights_V / weights_V.sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_of_a_sampler(name):
    """Filters keep the expected ids with their bits; the probabilities after other steps agree to 1e-6."""
    cases = [case for case in CASES if case["step"]["name"] == name]
    assert len(cases) > 45
    for case in cases:
        x_V = np.float32([-np.inf if x is None else x for x in case["logits"]])
        y_V = np.asarray(process_logits(x_V[None], [case["step"]], [case.get("prompt", [])]))[0]
        if "kept" in case:
            assert np.flatnonzero(y_V > -np.inf).tolist() == case["kept"], case
            np.testing.assert_array_equal(y_V[case["kept"]].view(np.uint32), x_V[case["kept"]].view(np.uint32))
        else:
            np.testing.assert_array_equal(y_V > -np.inf, x_V > -np.inf)
            np.testing.assert_allclose(probabilities(y_V), case["probabilities"], atol=1e-6, err_msg=str(case))

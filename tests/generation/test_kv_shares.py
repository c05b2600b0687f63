"""Heads get shares of the cache according to a measured signal; without a measurement there is a
warning.
"""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dantinox.config import Config, GenerationSection, UserError
from dantinox.generation import LoadedModel, generate, model_bundle
from dantinox.generation.decode.cache_plan import plan_cache
from dantinox.run import KVCalibration
from tests.error_texts import ERRORS

from . import builder

CONFIG = builder.config(max_context=512)
ENTROPY = np.array([[4.0, 4.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]])
RISES = np.array([[[0.01, 0.0], [0.3, 0.0]], [[0.01, 0.0], [0.01, 0.0]]])
LOSS = {"loss_LKC": RISES, "loss_slots": (16, 256)}


def groups(calibration, **kv):
    """Returns the groups of slots that a run with this calibration gets for 256 tokens, and the
    warnings.
    """
    run = LoadedModel(
        Config(), SimpleNamespace(config=CONFIG), None, kv_calibration=lambda path: calibration
    )
    with warnings.catch_warnings(record=True) as warning:
        warnings.simplefilter("always")
        settings, found = run.kv(Config(kv={"budget": 0.5, **kv}))
        plan = plan_cache(CONFIG, settings, 256, found)
    return plan.compression.groups, [str(warning.message) for warning in warning]


def test_slots_follow_the_loss_by_default():
    (first, second), warning = groups(KVCalibration(ENTROPY, **LOSS))
    assert (
        first[0] == (1, 248)
        and max(slots for _, slots in (*first[1:], *second)) < 160
        and not warning
    )
    (first, second), warning = groups(KVCalibration(ENTROPY, **LOSS), signal="entropy")
    assert first[1][1] < second[0][1] <= first[0][1] and not warning


@pytest.mark.parametrize(
    ("calibration", "why"),
    [
        (None, "kv.signal loss was not measured on this model (run `dantinox"),
        (KVCalibration(ENTROPY), "the calibration kv_entropy.json holds no loss: run"),
    ],
)
def test_without_a_measurement_heads_are_equal_with_a_warning(calibration, why):
    found, (warning,) = groups(calibration)
    assert found == (((2, 128),), ((2, 128),)) and warning.startswith(
        f"all heads get the same share of the cache: {why}"
    )
    assert groups(calibration, signal="uniform") == (found, [])


def test_entropy_decay_without_entropies():
    with pytest.raises(UserError, match=ERRORS["kv_decay_entropy_needs_the"]):
        groups(None, signal="uniform", decay="entropy")
    assert groups(KVCalibration(ENTROPY), signal="uniform", decay="entropy")[1] == []


def test_token_ids_without_a_run_need_a_calibration_file():
    model = builder.model(CONFIG)
    with pytest.warns(UserWarning, match=ERRORS["same_share_set_kv_calibration_to"]):
        generate(model, [[1, 2, 3]], 0, kv_budget=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, [[1, 2, 3]], 0, kv_budget=0.5, kv_signal="uniform")
        generate(model, [[1, 2, 3]], 0, kv_budget=1.0)


def test_prepared_models_are_cached_by_head_order(monkeypatch):
    made = []
    monkeypatch.setattr(model_bundle, "permute_heads", lambda model, order: order)
    monkeypatch.setattr(
        model_bundle, "prepare", lambda model, *precision: made.append(model) or model
    )
    run = LoadedModel(Config(), SimpleNamespace(config=CONFIG), None)
    for order in (1, 2, 1, 3, 4, 5, 1, 2):
        assert run.prepared(GenerationSection(), order) == order
    assert made == [1, 2, 3, 4, 5, 2]  # 2 is the least recently used

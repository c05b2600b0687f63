"""The settings of the entropy router, its presets, and the resulting numbers."""

import json
import math
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from dantinox.config import UserError
from dantinox.config.router_settings import (
    CALIBRATED_THRESHOLDS,
    KEEP_ALL,
    RouterSection,
    router_conflicts,
    with_request_bases,
)
from dantinox.sampling.entropy_router import AttentionMetrics, Metrics, RouterConfig, route
from tests.error_texts import ERRORS

PRESET = json.loads(Path(__file__).with_name("entropy_router.json").read_text())["preset"]
MEDIAN = {name: 0.5 + number / 4 for number, name in enumerate(CALIBRATED_THRESHOLDS)}
ROUTE = jax.jit(route)
CALIBRATED = RouterConfig.build(RouterSection(router_preset="calibrated"), MEDIAN)


def test_the_guide_preset_equals_the_guide():
    names = {
        "T": "base_temperature", "top_p": "base_top_p", "top_k": "base_top_k",
        "ada_min_p": "base_min_p", "n": "candidates", "low_H": "low_entropy",
        "low_V": "low_varentropy", "helv_H": "clarify_entropy", "high_H": "high_entropy",
        "high_V": "high_varentropy",
    }  # fmt: skip
    assert {key: np.float32(value) for key, value in PRESET.items() if key in names} == {
        key: getattr(RouterConfig.build(), name) for key, name in names.items()
    }
    assert PRESET["min_p"] == ROUTE(Metrics(6.0, 6.0), RouterConfig()).min_p == 0
    assert set(PRESET) - set(names) == {"min_p"}


def test_settings_and_numbers_have_the_same_names():
    names = set(RouterSection.model_fields) - {"router_preset", "use_attention", "clarify_text"}
    assert names == {field.name for field in fields(RouterConfig)}
    own = {
        name: 7
        for name in names - {"base_top_p", "base_min_p"}
        if not name.endswith(("_p_min", "_p_max"))
    }
    own |= {name: 0.7 for name in names - set(own)}
    config = RouterConfig.build(RouterSection.model_validate(own))
    assert {name: float(getattr(config, name)) for name in names} == {
        name: float(np.float32(x)) for name, x in own.items()
    }


def test_numbers_beyond_float32_become_its_largest():
    config = RouterConfig.build(
        RouterSection(high_entropy=1e300, temperature_min=1e300, base_temperature=1e300)
    )
    assert (
        config.high_entropy
        == config.temperature_min
        == config.base_temperature
        == np.finfo(np.float32).max
    )
    assert config.temperature_max == np.inf
    for metrics in (Metrics(1.0, 1.0), Metrics(1.0, 6.0), Metrics(4.0, 0.0)):
        assert np.isfinite(ROUTE(metrics, config).temperature)


def test_the_calibrated_preset_uses_measured_thresholds():
    for name in CALIBRATED_THRESHOLDS:
        assert getattr(CALIBRATED, name) == np.float32(MEDIAN[name])
    section = RouterSection(router_preset="calibrated", high_entropy=4.0, temperature_max=3.0)
    config = RouterConfig.build(section, MEDIAN)
    assert (config.high_entropy, config.temperature_max, config.temperature_min) == (
        4.0,
        3.0,
        np.float32(0.1),
    )
    with pytest.raises(UserError, match=ERRORS["dantinox_calibrate_or_set_router"]):
        RouterConfig.build(section)
    with pytest.raises(UserError, match=ERRORS["set_router_low_entropy"]):
        RouterConfig.build(
            section, {name: 1.0 for name in CALIBRATED_THRESHOLDS if name != "low_entropy"}
        )
    assert RouterConfig.build(RouterSection(), MEDIAN).low_entropy == np.float32(
        0.1
    )  # the guide preset ignores measurements


def test_a_request_sets_the_base_values_of_the_router():
    numbers = RouterSection(base_top_k=30).numbers()
    base = ("base_temperature", "base_top_p", "base_top_k", "base_min_p")
    assert [with_request_bases(numbers)[name] for name in base] == [0.666, 0.9, 30, 0.03]
    given = with_request_bases(numbers, temperature=0.4, top_p=1.0, top_k=5, min_p=0.2)
    assert [given[name] for name in base] == [0.4, 1.0, 5, 0.2]
    assert with_request_bases(numbers, temperature=1.4)["base_temperature"] == 1.4
    for top_k in (0, -1, 2**31 - 1):
        config = RouterConfig.build(None, top_k=top_k)
        assert ROUTE(Metrics(4.0, 0.0), config).top_k == KEEP_ALL  # clarify: no filter
        assert ROUTE(Metrics(1.0, 1.0), config).top_k == 100  # adaptive: the upper bound
        assert ROUTE(Metrics(1.0, 6.0), config).top_k == KEEP_ALL  # explore
    wide = RouterConfig.build(RouterSection(explore_top_k_disagreement=1000.0), top_k=0)
    apart = AttentionMetrics(1.0, 0.5, 0.1, 0.9, 0.1, 1.0)
    assert ROUTE(Metrics(1.0, 6.0, apart), wide).top_k == KEEP_ALL  # stays in the integer range


def test_the_clarify_token_is_an_id_or_none():
    assert RouterConfig.build().clarify_token == -1
    for given in (0, 2564, "2564"):
        assert RouterConfig.build(RouterSection(clarify_token=given)).clarify_token == int(given)
    with pytest.raises(UserError, match=ERRORS["router_clarify_token_must_be_a_token"]):
        RouterConfig.build(RouterSection(clarify_token=" ?"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"high_entropy": -1.0}, {"entropy_scale": 0.0}, {"candidates": 0},
        {"adaptive_top_k_max": 257}, {"base_top_p": 1.1}, {"clarify_token": ""},
        {"clarify_token": -1}, {"router_preset": "entropix"},
        {"explore_temperature_factor": math.nan}, {"resample_top_p_attn_entropy": math.inf},
        {"low_H": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        RouterSection.model_validate(wrong)


def test_crossed_bounds_are_refused():
    def broken(**own):
        return [*router_conflicts(RouterSection(**own))]

    assert (
        broken()
        == broken(router_preset="calibrated")
        == broken(temperature_min=1.0, temperature_max=1.0)
        == []
    )
    assert broken(adaptive_top_k_min=101) == [
        ("router.adaptive_top_k_min", "must be at most router.adaptive_top_k_max, got 101 and 100")
    ]
    assert (
        len(broken(adaptive_min_p_max=0.001, adaptive_top_p_min=1.0, adaptive_top_p_max=0.5)) == 2
    )
    assert broken(router_preset="calibrated", temperature_min=2.5) == [
        ("router.temperature_min", "must be at most router.temperature_max, got 2.5 and 2")
    ]

"""The table of steps: it matches the functions and their inputs, the docs contain it, and some
steps are tested here.
"""

import inspect
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from traced import traced

from dantinox.config.generation_settings import PRESETS, GenerationSection, step_order
from dantinox.config.sampling_steps import NUMBER_BOUNDS, SETTINGS, STEPS
from dantinox.sampling import SamplingParams, chain, init_state, process_logits

DOCS = Path(__file__).parents[2] / "docs" / "sampling_steps.md"
BAN = -np.inf


@pytest.mark.parametrize("name", STEPS)
def test_each_step_matches_its_function(name):
    step = STEPS[name]
    function = chain.FUNCTIONS[name]
    assert function.__name__ == step.function or function.__name__ == name
    _, *parameters = inspect.signature(function).parameters
    optional = {"on"} | {parameter for parameter in step.parameters if parameter not in step.reads}
    assert (
        {*step.arguments, *step.reads} <= {*parameters} <= {*step.arguments, *step.reads, *optional}
    )
    assert {*step.reads} <= {*chain.STEP_INPUTS}
    assert {*step.on} <= {*step.settings}
    assert not any(on(SETTINGS[key].default) for key, on in step.on.items()), "off by default"


def off(step):
    """The defaults of the settings that enable a step."""
    defaults = [GenerationSection.model_fields[key].default for key in step.on]
    special = {None: "null", (): "[]"}
    values = [() if value == {} else value for value in defaults]
    return ", ".join(
        special.get(value) or (value if isinstance(value, str) else f"{value:g}")
        for value in values
    )


def table():
    """The rows of the docs' table."""
    for name, step in STEPS.items():
        others = [key for key in step.settings if key not in step.on]
        kind = "" if step.group == "other" else step.group
        cells = f"`{name}`", listed(step.on), off(step), listed(others), kind
        yield re.sub(" +", " ", f"| {' | '.join(cells)} |")


def listed(keys):
    return ", ".join(f"`{key}`" for key in keys)


def test_the_docs_contain_the_table_and_a_section_for_every_step():
    text = DOCS.read_text(encoding="utf-8")
    assert "\n".join(table()) in text
    headings = "".join(re.findall(r"^### .*$", text, re.MULTILINE))
    for name, step in STEPS.items():
        assert all(f"`{key}`" in headings for key in step.on), name
    for preset in (*PRESETS, "kobold", "koboldcpp"):
        order = dict.fromkeys(
            re.sub(r"_(v\d|norm)$", "", name) for name in step_order(preset, None)
        )
        assert f"| `{preset}` | {', '.join(order)} |" in text, preset


def test_the_temperature_is_always_part_of_a_program_that_draws():
    def program(**row):
        return jax.tree.structure(SamplingParams.build({"seed": 1, **row}, batch=2))

    assert program() == program(temperature=0.8) == program(temperature=2.0, seed=5)
    assert program(top_k=5) == program(temperature=0.3, top_k=9) != program()
    assert "temperature" not in SamplingParams.build({"dynatemp_high": 2.0, "seed": 1}).plan
    assert SamplingParams.build({"greedy": True}).plan == ()


SAID = {"prompt": [[5, 1, 2]], "output": [[3, 4]]}


def reference_bias(x_V, text, pairs):
    x_V = np.float64(x_V)
    for words, bias in pairs:
        if words[:-1] == text[len(text) - len(words) + 1 :]:
            x_V[words[-1]] += bias
    return x_V


@pytest.mark.parametrize(
    "pairs",
    [
        [([3], 2.0)],
        [([3, 4, 1], -1.5), ([4, 1], -0.25), ([1], 4.0)],
        [([2, 4, 1], 9.0), ([4, 3, 4, 0], 9.0)],
        [([1, 2, 3, 4, 6], 1.0), ([5, 1, 2, 3, 4, 6], 2.0), ([0, 5, 1, 2, 3, 4, 6], 4.0)],
        [([4, 2], BAN), ([2], 8.0), ([3], BAN)],
        [([6], 3e38), ([6], 3e38)],
    ],
)
def test_a_sequence_bias_applies_to_its_last_token(pairs):
    x_V = np.float32([0.5, -1, 2, 0, 3, -2, 1])
    step = {
        "name": "sequence_bias",
        "sequences": [words for words, _ in pairs],
        "values": [bias for _, bias in pairs],
    }
    got_V = np.asarray(process_logits([x_V], [step], **SAID))[0]
    expected_V = np.minimum(reference_bias(x_V, [5, 1, 2, 3, 4], pairs), np.finfo(np.float32).max)
    np.testing.assert_allclose(got_V, expected_V, rtol=1e-6)


def test_sequence_biases_are_per_row():
    rows = [
        {"sequence_bias": [[[3, 4, 1], -1.5], [[0], None]], "seed": 1},
        {"seed": 2},
        {"sequence_bias": {}, "greedy": True},
    ]
    params = SamplingParams.build(rows, vocab_size=7)
    assert params.plan == ("sequence_bias", "temperature")
    prompt_BT = np.array([[5, 1, 2, 3, 4]] * 3)
    state = jax.jit(partial(init_state, vocab_size=7, capacity=8))(
        params, prompt_BT, np.ones((3, 5), bool)
    )
    x_BV = np.float32([[0.5, -1, 2, 0, 3, -2, 1]] * 3)
    found = jax.tree.map(np.asarray, traced(x_BV, params, state))
    before_BV, after_BV = found["model"], found["sequence_bias"]
    np.testing.assert_array_equal(after_BV[1:], before_BV[1:])
    np.testing.assert_array_equal(after_BV[0], np.float32([BAN, -2.5, 2, 0, 3, -2, 1]))


@pytest.mark.parametrize(("threshold", "left"), [(0.5, 1), (0.5000001, 2), (0.9, 2), (1.0, 2)])
def test_xtc_above_a_half_is_off(threshold, left):
    step = {"name": "xtc", "threshold": threshold, "probability": 1.0, "u": 0.0}
    row = np.asarray(process_logits([[1.0, 1.0, BAN]], [step]))[0]
    assert (row > BAN).sum() == left
    assert (
        SamplingParams.build({"xtc_probability": 1.0, "xtc_threshold": threshold, "seed": 1}).plan[
            -1
        ]
        == "xtc"
    )


def test_the_koboldcpp_order_places_presence_and_sigma():
    order = step_order("koboldcpp", None)
    assert order[:3] == ("dry", "repetition_penalty", "presence_frequency_penalty")
    heat = order.index("dynamic_temperature")
    assert order[heat : heat + 4] == (
        "dynamic_temperature",
        "temperature",
        "smoothing",
        "top_n_sigma",
    )
    moved = step_order("koboldcpp", (5, 0, 1, 3, 4, 2, 6))
    assert moved[1:5] == order[heat : heat + 4] and moved[-6:-4] == (
        "repetition_penalty",
        "presence_frequency_penalty",
    )


def test_ranges_of_named_steps_equal_those_of_the_settings():
    assert (NUMBER_BOUNDS["top_p"], NUMBER_BOUNDS["top_k"].integer) == ((0, 1, False), True)
    assert NUMBER_BOUNDS["repetition_penalty"].low == float(np.finfo(np.float32).tiny)
    assert (
        NUMBER_BOUNDS["smoothing_curve"][:2] == (1, 3)
        and "mirostat" not in NUMBER_BOUNDS
        and "ties" not in NUMBER_BOUNDS
    )

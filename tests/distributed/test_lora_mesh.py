"""Adapters on meshes of eight simulated devices give the numbers of one device."""

from functools import cache

import jax
import numpy as np
import pytest

from dantinox.model.frozen_weights import to_frozen_dtype
from dantinox.model.lora import frozen_parameters
from dantinox.model.parameters import abstract_model, stack_layers
from dantinox.training.eval_step import make_eval_step
from dantinox.training.step import TrainStep

from .mesh import V, layout_of, rows, settings, store_of

DEVICES = 8
LORA = {
    "training__init_from": "x",
    "lora__rank": 2,
    "training__optimizer": "sgd",
    "training__lr": 0.1,
}


@cache
def trained(mesh="", evaluated=True, **changes):
    """Trains three steps; returns the losses, the adapters, and the evaluation loss."""
    config = settings("dense", mesh, **LORA | changes)
    model, layout, t = config.trained_architecture(V), layout_of(config), config.training
    random, one = (
        np.random.default_rng(0),
        settings("dense", **LORA | changes | {"model__scan_layers": False}),
    )
    shapes, base = abstract_model(one.trained_architecture(V))[1], {}
    for name, leaf in abstract_model(one.architecture(V))[1].items():
        wide = 0.2 * random.standard_normal(leaf.shape) if leaf.ndim > 1 else np.ones(leaf.shape)
        base |= to_frozen_dtype(name, wide.astype(np.float32), shapes)
    base = layout.put_parameters(stack_layers(base, model) if model.scan_layers else base)
    assert base.keys() == frozen_parameters(layout.shapes, model).keys()
    training = TrainStep(config, model, t.steps, layout)
    step, state = training.program, training.initial_state(frozen=base)
    losses = []
    for number in range(3):
        state, metrics = step(
            state, rows(layout, store_of(config).batch(number), t.grad_accum), base
        )
        losses.append([float(metrics.loss), float(metrics.grad_norm)])
    adapters, evaluation = {name: np.asarray(array) for name, array in state.weights.items()}, 0.0
    if evaluated:
        batch = rows(layout, next(store_of(config).validation(8)))
        counted = make_eval_step(model, layout)(state.weights, batch, base)
        evaluation = float(counted.nats / counted.num_targets)
    return np.array(losses), adapters, evaluation


SLOW = [
    ("fsdp=4 tensor=2", {"model__scan_layers": True, "model__qk_norm": True}),
    ("fsdp=8", {"model__activation": "gelu", "lora__base_weights": "bfloat16"}),
    (
        "data=2 fsdp=4",
        {"model__scan_layers": True, "lora__base_weights": "nf4", "model__weight_tying": False},
    ),
    ("fsdp=4 tensor=2", {"lora__dora": True, "model__num_blocks": 1}),
]


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        (
            "data=2 fsdp=2 tensor=2",
            {"lora__base_weights": "int8", "model__num_blocks": 1, "evaluated": False},
        ),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_a_mesh_trains_adapters_as_one_device_does(mesh, changes):
    got, expected = trained(mesh, **changes), trained(**changes)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(got[2], expected[2], atol=1e-5)
    for name, array in expected[1].items():
        np.testing.assert_allclose(got[1][name], array, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_dropout_on_a_mesh_is_deterministic():
    """Each device draws numbers for its rows, the same in every run."""
    losses = [trained.__wrapped__("fsdp=4 tensor=2", lora__dropout=0.5)[0] for _ in range(2)]
    np.testing.assert_array_equal(*losses)
    assert np.all(np.isfinite(losses[0])) and jax.device_count() == 8

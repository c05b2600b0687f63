"""Distillation on meshes of eight simulated devices gives the numbers of one device; the teacher is
sharded too.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training.small import random_weights

from dantinox.model.parameters import abstract_model, stack_layers
from dantinox.run import RunDirectory
from dantinox.training.eval_step import make_eval_step
from dantinox.training.step import TrainStep
from dantinox.training.teacher import Teacher

from .mesh import V, layout_of, rows, settings, store_of

DEVICES = 8
LOSS = {
    "training__objective": "distill", "distill__teacher": "x", "distill__divergence": "reverse_kl",
    "distill__top_k": 9, "distill__data_weight": 0.3, "training__batch_size": 16,
    "training__optimizer": "sgd", "training__lr": 0.1,
}  # fmt: skip


@cache
def trained(mesh="", teacher_kind="dense", evaluated=True, **changes):
    """Trains two steps with a random teacher; returns losses and metrics, also of an evaluation,
    and the weights.
    """
    config = settings("dense", mesh, **LOSS | changes)
    model, layout, t = config.architecture(V), layout_of(config), config.training
    sizes = {"model__dim": 48, "model__n_heads": 6, "model__num_blocks": model.num_blocks}
    wider = settings(teacher_kind, **sizes if teacher_kind == "dense" else {})
    teacher = Teacher(
        RunDirectory("x"),
        replace(layout, model=replace(wider.architecture(V), scan_layers=model.scan_layers)),
    )
    random, weights = np.random.default_rng(0), {}
    for name, leaf in abstract_model(replace(teacher.model, scan_layers=False))[1].items():
        wide = 0.2 * random.standard_normal(leaf.shape) if leaf.ndim > 1 else np.ones(leaf.shape)
        weights[name] = wide.astype(np.float32)
    teacher_weights = teacher.layout.put_parameters(
        stack_layers(weights, teacher.model) if model.scan_layers else weights
    )
    training = TrainStep(config, model, t.steps, layout, teacher=teacher)
    student = random_weights(replace(model, scan_layers=False), size=0.2)
    state, found = (
        training.initial_state(stack_layers(student, model) if model.scan_layers else student),
        [],
    )
    for number in range(2):
        batch = rows(layout, store_of(config).batch(number), t.grad_accum)
        state, metrics = training.program(state, batch, {}, teacher_weights)
        found += [float(metrics.loss), float(metrics.grad_norm), *np.asarray(metrics.metrics)]
    if evaluated:
        batch = rows(layout, next(store_of(config).validation(8)))
        sums = make_eval_step(model, layout, config, teacher)(
            state.weights, batch, {}, teacher_weights
        )
        found += [float(sums.nats / sums.num_targets), *np.asarray(sums.metrics / sums.num_targets)]
    return (
        np.array(found),
        {name: np.asarray(array) for name, array in state.weights.items()},
        teacher_weights,
    )


@pytest.mark.parametrize(
    ("mesh", "teacher_kind", "changes"),
    [
        ("data=2 fsdp=2 tensor=2", "dense", {"model__num_blocks": 1, "evaluated": False}),
        pytest.param("data=2 fsdp=2 tensor=2", "dense", {}, marks=pytest.mark.slow),
        pytest.param("fsdp=8", "moe", {"training__grad_accum": 2}, marks=pytest.mark.slow),
        pytest.param(
            "fsdp=4 tensor=2", "dense", {"model__scan_layers": True}, marks=pytest.mark.slow
        ),
        pytest.param("fsdp=4 sequence=2", "dense", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_distills_as_one_device_does(mesh, teacher_kind, changes):
    got, expected = trained(mesh, teacher_kind, **changes), trained("", teacher_kind, **changes)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-4)
    for name, array in expected[1].items():
        np.testing.assert_allclose(got[1][name], array, atol=1e-4, err_msg=name)
    shares = [array.addressable_shards[0].data.size / array.size for array in got[2].values()]
    assert min(shares) <= 1 / 4 and sum(array.size for array in got[2].values()) > 0

"""Trainings on meshes of eight simulated devices: equal numbers, an eighth of the work each, little
communication.
"""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from training.small import random_weights

from dantinox.config import UserError
from dantinox.distributed import AXES, BATCH
from dantinox.lab.measure.plan import Collectives, make_plan
from dantinox.lab.measure.plan_view import plan_lines
from dantinox.lab.measure.topology import Topology, find_topology
from dantinox.model.parameters import abstract_model
from dantinox.text import LabeledCompletions, Preferences
from dantinox.training.eval_step import make_eval_step, make_reference_step
from dantinox.training.step import TrainStep, select_rows
from tests.error_texts import ERRORS

from .mesh import KINDS, V, layout_of, program, same, settings, trained

DEVICES = 8
DENSE, SPARSE = (
    ("fsdp=4 tensor=2", "fsdp=8", "data=2 fsdp=2 tensor=2"),
    ("expert=2", "data=2 expert=4", "expert=2 fsdp=2 tensor=2"),
)
# Kind, optimizer, mesh and layers.
QUICK = [("biases", "sgd", DENSE[0], 1)]
EACH = [
    (kind, optimizer, mesh, {"moe": 1, "mla": 1, "uneven": 4}.get(kind, 2))
    for kind in KINDS
    for optimizer, mesh in itertools.product(("sgd", "muon"), DENSE + SPARSE * (kind == "moe"))
]
TOGETHER = {
    "training__optimizer": "sgd", "training__lr": 0.1, "training__grad_accum": 8,
    "training__batch_size": 32, "chunks": 16, "model__scan_layers": True,
    "model__gradient_checkpointing": True, "training__ema": 0.9,
}  # fmt: skip
LARGE = {
    "model__dim": 128,
    "model__max_context": 128,
    "model__num_blocks": 4,
    "training__batch_size": 32,
}


@pytest.mark.parametrize(
    ("kind", "optimizer", "mesh", "layers"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EACH if case not in QUICK)],
)
def test_a_mesh_trains_as_one_device_does(kind, optimizer, mesh, layers):
    changes = {
        "training__optimizer": optimizer,
        "model__num_blocks": layers,
        "evaluated": layers > 1,
    }
    same(trained(kind, mesh, **changes), trained(kind, **changes))


def test_accumulation_chunks_rolled_layers_and_ema_combined():
    """No loop runs over an axis of rows that is sharded, or every device would do the work of
    all.
    """
    mesh = "data=2 fsdp=2 tensor=2"
    same(
        trained("dense", mesh, evaluated=True, **TOGETHER),
        trained("dense", evaluated=True, **TOGETHER),
    )
    got, alone = program("dense", mesh, **TOGETHER), program("dense", **TOGETHER)
    assert got.work.flops <= 1.1 / 8 * alone.work.flops
    assert got.arguments < 0.3 * got.state  # a quarter, except norms, and the batch
    check_collectives(
        got,
        settings("dense", mesh, **{name: v for name, v in TOGETHER.items() if name != "chunks"}),
    )


@pytest.mark.slow
def test_normalized_muon_matches_one_device():
    """The second moments of neurons whose weights are sharded over fan-in, fan-out and experts."""
    changes = {
        "training__optimizer": "muon",
        "training__muon_normalize": True,
        "training__muon_steps": 5,
        "model__num_blocks": 1,
    }
    # Five polynomials multiply the smallest singular values, and their rounding errors of 1e-6, by
    # up to 1,000.
    same(
        trained("moe", "expert=2 fsdp=2 tensor=2", **changes),
        trained("moe", **changes),
        of_state=1e-3,
    )


@pytest.mark.parametrize(
    "objective", ["kto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "orpo"))]
)
def test_preferences_train_as_on_one_device(objective):
    rng, found = np.random.default_rng(0), []
    tokens, targets = rng.integers(0, V, (2, 8, 2, 16)).astype(np.int32)
    mask, reference = (
        (rng.random(tokens.shape) < 0.5).astype(np.float32),
        rng.normal(-40, 2, (8, 2)).astype(np.float32),
    )
    pairs = Preferences(tokens, targets, np.zeros_like(tokens), mask, reference)
    if objective == "kto":  # the divergence is that of the rows of all devices
        pairs = LabeledCompletions(*pairs, rng.random(8) < 0.5, np.zeros(8, np.float32))
    for mesh in ("", "data=2 fsdp=4"):
        changes = {"training__init_from": "x", "training__batch_size": 8, "model__num_blocks": 1}
        changes |= {"training__optimizer": "sgd", "training__lr": 0.1}
        config = settings("dense", mesh, training__objective=objective, **changes)
        model, layout = config.architecture(V), layout_of(config)
        training = TrainStep(config, model, 10, layout)
        step, state = training.program, training.initial_state(random_weights(model, size=0.2))
        for _ in range(2):
            state, metrics = step(state, layout.put_batch(partial(select_rows, pairs), 8))
        placed = layout.put_batch(partial(select_rows, pairs), 8)
        logp = make_reference_step(model, layout)(state.parameters, placed, {})
        found.append([float(metrics.loss), *np.asarray(metrics.metrics), *np.asarray(logp).ravel()])
        if objective != "kto":
            sums = make_eval_step(model, layout, config)(state.parameters, placed, {})
            found[-1] += [float(sums.nats), *np.asarray(sums.metrics)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=ERRORS["distributed_tensor_must_be_1"]):
        layout_of(settings("dense", "tensor=2", training__objective="dpo", training__init_from="x"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DENSE[0], "data=2 fsdp=4", "data=8"])
@pytest.mark.parametrize(
    "changes",
    [
        {"training__grad_accum": 8, "training__batch_size": 64},
        {"chunks": 16},
        {"model__scan_layers": True},
        {"model__scan_layers": True, "training__optimizer": "muon"},
        {
            "model__scan_layers": True,
            "training__optimizer": "muon",
            "training__muon_normalize": True,
        },
        {
            "training__optimizer": "muon",
            "training__muon_steps": 5,
            "training__cautious_decay": True,
        },
        {"model__gradient_checkpointing": True, "model__remat_policy": "full"},
        {"model__gradient_checkpointing": True, "model__remat_policy": "dots"},
        {"training__ema": 0.9},
        {"training__optimizer": "adafactor"},
        {"training__optimizer": "sgd"},
        {"training__z_loss": 0.01, "training__grad_clip": 0.1},
        {"training__nan_policy": "skip", "bad_step": 1},
        {"attention__sink_logits": True, "attention__no_sink": True, "model__qk_norm": True},
    ],
    ids=str,
)
def test_every_training_option_matches_one_device(mesh, changes):
    changes = changes | {"evaluated": True}
    if "training__grad_accum" in changes and "fsdp=4" not in mesh:
        changes = changes | {"training__grad_accum": 4}
    same(trained("dense", mesh, **changes), trained("dense", **changes))


@pytest.mark.slow
def test_lion_matches_one_device():
    """The tolerance is that of signs of numbers close to zero."""
    got, expected = (
        trained("dense", mesh, training__optimizer="lion", training__lr=1e-3)
        for mesh in (DENSE[0], "")
    )
    np.testing.assert_allclose(got.losses, expected.losses, rtol=0, atol=1e-4)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_bfloat16_differs_only_by_rounding(kind):
    got, expected = (
        trained(kind, mesh, model__dtype="bfloat16") for mesh in ("fsdp=4 tensor=2", "")
    )
    np.testing.assert_allclose(got.losses, expected.losses, rtol=0, atol=0.01)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=0.05)


@pytest.mark.slow
def test_dropout_is_deterministic():
    changes = {"model__dropout_rate": 0.5}
    first, again = (trained.__wrapped__("dense", DENSE[0], **changes) for _ in range(2))
    same(first, again, tolerance=0)
    assert np.max(np.abs(first.losses - trained("dense", DENSE[0]).losses)) > 1e-3


def test_random_numbers_differ_between_batch_shards():
    """Devices with the same rows draw the same numbers, or heads and features would not match."""
    layout = layout_of(settings("dense", "data=2 fsdp=2 tensor=2"))

    def draw(key):
        return jax.random.uniform(layout.device_key(key), (1, 4))

    drawn = jax.jit(layout.shard_map(draw, PartitionSpec(), PartitionSpec(AXES)))(
        jax.random.key(0, impl="rbg")
    )
    same_rows = np.asarray(drawn).reshape(4, 2, 4)
    np.testing.assert_array_equal(same_rows[:, 0], same_rows[:, 1])
    assert len(np.unique(same_rows[:, 0])) == 16


@pytest.mark.parametrize("parts", [1, 4])
def test_accumulated_parts_have_the_same_rows_as_on_one_device(parts):
    layout = layout_of(settings("dense", "data=2 fsdp=2 tensor=2"))
    numbers = np.arange(32)
    on_devices = layout.put_batch(lambda select_rows=slice(None): numbers[select_rows], 32, parts)
    split = jax.jit(
        layout.shard_map(
            lambda x: x.reshape(parts, -1), PartitionSpec(BATCH), PartitionSpec(None, BATCH)
        )
    )
    assert [sorted(part) for part in np.asarray(split(on_devices)).tolist()] == numbers.reshape(
        parts, -1
    ).tolist()


def check_cost(kind: str, optimizer: str, mesh: str, chunks: int = 1, **changes) -> None:
    """Compares FLOPs, collectives and bytes of a step with those of one device, of AdamW, and of
    the state.
    """
    given = LARGE | changes
    alone, adamw, got = (
        program(kind, m, chunks, training__optimizer=o, **given)
        for m, o in (("", optimizer), (mesh, "adamw"), (mesh, optimizer))
    )
    config = settings(kind, mesh, training__optimizer=optimizer, **given)
    assert got.work.flops <= 1.1 / 8 * alone.work.flops
    assert got.work.bytes <= 1.5 * adamw.work.bytes
    assert (
        got.arguments <= 1.05 * got.state * config.distributed.data / 8
    )  # data-parallel devices have copies
    if kind == "moe":
        assert got.work.count["all-gather"] <= all_gathers(config)
    else:
        check_collectives(got, config)


def check_collectives(got, config) -> None:
    """Checks that a step gathers each weight once per pass, and sends nothing from all devices to
    all.
    """
    assert got.work.count["all-gather"] <= all_gathers(config)
    assert got.work.count["all-to-all"] == 0
    assert got.work.unknown_loops == 0


def all_gathers(config) -> int:
    """Returns the largest number of all-gathers of a step."""
    shapes = abstract_model(config.architecture(V))[1]
    layers = {
        name: shape.shape[0] if name.startswith("rolled/") else 1 for name, shape in shapes.items()
    }
    weights = sum(
        layers[name]
        for name, shape in shapes.items()
        if len(shape.shape) - name.startswith("rolled/") > 1
    )
    # Forward and backward, for each accumulated part; Muon also gathers the roots of the matrices
    # of each shape.
    roots = (
        len({shape.shape for shape in shapes.values()})
        if config.training.optimizer == "muon"
        else 0
    )
    return 2 * config.training.grad_accum * weights + roots


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_of_eight_devices_does_an_eighth_of_the_work(optimizer):
    check_cost("dense", optimizer, DENSE[0], model__scan_layers=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    ["fsdp=4 tensor=2", "fsdp=8", "data=2 fsdp=4", "data=2 fsdp=2 tensor=2", "data=2 tensor=4"],
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("changes", [{}, {"training__grad_accum": 2, "chunks": 16}], ids=str)
def test_work_is_divided_on_every_mesh(optimizer, mesh, changes):
    check_cost(
        "dense",
        optimizer,
        mesh,
        model__kv_heads=None,
        model__scan_layers="grad_accum" in str(changes),
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh"), [("mla", "fsdp=4 tensor=2"), ("mla", "fsdp=8"), ("moe", "data=2 expert=4")]
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_work_is_divided_for_other_models(kind, optimizer, mesh):
    """Expert matmuls loop over their rows: one iteration is counted here, the rows in the next
    test.
    """
    check_cost(kind, optimizer, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPARSE)
def test_every_expert_row_is_multiplied_once(mesh):
    config, counts_LE = settings("moe", mesh), trained("moe", mesh).counts_LE
    tokens = config.training.batch_size * config.model.max_context
    np.testing.assert_array_equal(counts_LE.sum(axis=1), tokens * config.moe.top_k_mlp)


def test_a_plan_counts_one_device_of_a_mesh(monkeypatch):
    """The program is traced, not compiled: the communication is read from HLO text."""
    text = """HloModule passes, num_partitions=8
ENTRY %main (p: f32[8,4]) -> f32[64,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %all = f32[64,4]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
    bytes_ = dict.fromkeys(
        (f"{kind}_size_in_bytes" for kind in ("argument", "temp", "output", "alias")), 100
    )
    compiled = SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(**bytes_), as_text=lambda: text
    )
    monkeypatch.setattr(Topology, "compile", lambda *_: compiled)
    config = settings(
        "dense", "fsdp=8", training__grad_accum=1, generation__seed=1, model__num_blocks=1
    )
    meshes = [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}]
    alone = replace(find_topology("cpu"), devices=jax.devices()[:1])
    one = make_plan(alone, config, V, TrainStep, meshes=[{"fsdp": 1}]).programs
    found = make_plan(find_topology("cpu"), config, V, TrainStep, meshes=meshes)
    wide, divided, *others = found.programs
    assert found.chips == 8 and [p.name for p in others] == [
        "evaluation",
        "evaluation",
        "prefill",
        "decode",
    ]
    assert (wide.mesh, divided.mesh, others[-1].mesh) == (
        "fsdp 8",
        "fsdp 4 × tensor 2",
        "one device",
    )
    assert wide.flops == divided.flops == one[0].flops // 8
    assert wide.collectives == {"all-gather": Collectives(1, 7 * 128)}
    # An eighth of weights and moments, except norms, and received data; of the batch, the local
    # rows.
    own, norms = 7 * 128, 3 * 32 * 4
    assert wide.traffic - own <= (one[0].traffic - own) / 8 + 6 * norms
    assert any("fsdp 4 × tensor 2" in line for line in plan_lines(found))
    with pytest.raises(UserError, match=ERRORS["fsdp_3_expert_1_tensor"]):
        make_plan(find_topology("cpu"), config, V, TrainStep, meshes=[{"fsdp": 3}])

"""Full trainings on eight simulated devices, and their checkpoints on other devices."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.conftest import workshop
from training.small import VOCABULARY, random_weights, small_config, small_store
from training.test_resume import Stumbles, outcome

from dantinox.distributed import make_layout
from dantinox.model.parameters import abstract_model
from dantinox.report import read_csv, read_jsonl
from dantinox.run import load_weights
from dantinox.text import TokenStore
from dantinox.training import loop
from dantinox.training.checkpoint_store import Checkpoints
from dantinox.training.step import TrainStep

__all__ = ["workshop"]
DEVICES = 8
MESH = {"distributed__fsdp": 4, "distributed__tensor": 2}


def on_first(monkeypatch, devices):
    """Limits trainings to the first `devices` devices."""
    monkeypatch.setattr(loop, "make_layout", partial(make_layout, devices=jax.devices()[:devices]))


@pytest.mark.slow
def test_a_run_writes_the_same_files_as_on_one_device(workshop, monkeypatch):
    """Log rows, best weights, and text samples are equal."""
    said = {}

    def sample(model, to):
        tokens_1T = jnp.arange(8)[None] % VOCABULARY
        to.append(np.asarray(model(tokens_1T, jnp.arange(8)[None])[0]))
        return "a text"

    given = {
        "model__dropout_rate": 0.0,
        "training__steps": 12,
        "training__sample_every": 6,
        "logging__log_every": 6,
    }
    rows, weights = {}, {}
    for devices, changes in ((8, MESH | given), (1, given)):
        on_first(monkeypatch, devices)
        config, said[devices] = small_config(**changes), []
        run = workshop.train(str(devices), config, sample=partial(sample, to=said[devices]))
        rows[devices] = (
            read_csv(run.log(config)),
            [row for row in read_jsonl(run.metrics) if row["kind"] == "interval"],
        )
        weights[devices] = load_weights(
            run.weights, abstract_model(config.architecture(VOCABULARY))[1]
        )
        assert sorted(path.name for path in run.samples.iterdir()) == ["step_12.txt", "step_6.txt"]
        words = (
            "data 1 × fsdp 4 × expert 1 × sequence 1 × tensor 2" if devices == 8 else "one device"
        )
        summary = json.loads(run.summary(config).read_text())
        assert (summary["best_step"], summary["devices"]) == (12, words)
    assert (
        json.loads((workshop.path / "8" / "model_summary.json").read_text())["devices"]
        == "data 1 × fsdp 4 × expert 1 × sequence 1 × tensor 2"
    )
    for mesh, one in zip(rows[8], rows[1], strict=True):
        assert [row["step"] for row in mesh] == [row["step"] for row in one] == [6, 12]
        for name in {"train_loss", "val_loss", "bits_per_byte"} & mesh[0].keys():
            np.testing.assert_allclose(
                [row[name] for row in mesh], [row[name] for row in one], rtol=0, atol=1e-5
            )
    np.testing.assert_allclose(said[8], said[1], rtol=0, atol=1e-4)
    for name, array in weights[1].items():
        np.testing.assert_allclose(weights[8][name], array, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(workshop):
    config = small_config(**MESH)
    run = workshop.train("whole", config)
    store = small_store(config, Stumbles)
    store.at = 15
    with pytest.raises(KeyError):
        workshop.train("cut", config, store=store)
    assert outcome(workshop.train("cut", config, resume=True), config) == outcome(run, config)
    assert "another order" not in workshop.notes.getvalue()


@pytest.mark.parametrize("kind", ["sgd", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_checkpoint_restores_equally_on_other_devices(workshop, kind):
    config = small_config(
        **MESH, training__optimizer=kind, training__eval_every=12, model__dropout_rate=0.0
    )
    run = workshop.train("run", config)
    model = config.architecture(VOCABULARY)

    def state_on(count, **axes):
        sections = config.model_copy(
            update={"distributed": config.distributed.model_copy(update={"tensor": 1} | axes)}
        )
        layout = make_layout(sections, model, jax.devices()[:count])
        restored = checkpoints.restore(layout.place_shapes(TrainStep(config, model, 24).shapes))
        assert restored.step == 24
        fresh = TrainStep(config, model, 24, layout=layout).initial_state(random_weights(model))
        assert [a.sharding for a in jax.tree.leaves(restored.state)] == [
            a.sharding for a in jax.tree.leaves(fresh)
        ]
        return restored.state

    checkpoints = Checkpoints(run.checkpoints, 3)
    here = state_on(8, fsdp=4, tensor=2)
    for devices, axes in (
        (4, {"fsdp": 2, "tensor": 2}),
        (4, {"fsdp": 1, "data": 2, "sequence": 2}),
        (1, {"fsdp": 1}),
    ):
        there = state_on(devices, **axes)
        jax.tree.map(np.testing.assert_array_equal, there, here)
        assert len(there.parameters["embed"].sharding.device_set) == devices
    checkpoints.close()


@pytest.mark.slow
def test_resuming_on_other_devices_prints_a_note(workshop, monkeypatch):
    """From eight devices to four, which split the positions, and to one; losses are equal up to the
    order of sums.
    """
    given = {"model__dropout_rate": 0.0, "training__eval_every": 4, "training__optimizer": "adamw"}
    workshop.train("moved", small_config(training__steps=12, **MESH, **given))
    for steps, devices, changes in (
        (16, 4, {"distributed__sequence": 2, "distributed__tensor": 2}),
        (20, 1, {}),
    ):
        on_first(monkeypatch, devices)
        run = workshop.train(
            "moved", small_config(training__steps=steps, **changes, **given), resume=True
        )
    notes = workshop.notes.getvalue().replace("\n", " ")
    words = [
        f"data 1 × fsdp {fsdp} × expert 1 × sequence {sequence} × tensor 2"
        for fsdp, sequence in ((4, 1), (1, 2))
    ]
    assert (
        f"the run was trained on {words[0]} and continues on {words[1]}, where sums have another"
        " order" in notes
    )
    assert (
        f"the run was trained on {words[1]} and continues on one device, where sums have another"
        " order" in notes
    )
    rows = read_csv(run.log(small_config()))
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20] and rows[-1]["val_loss"] < rows[0][
        "val_loss"
    ]


class Poisoned(TokenStore):
    """The loss of step 9, counted from 0, is NaN."""

    def batch(self, step, *rows):
        batch = super().batch(step, *rows)
        return batch._replace(mask_BT=batch.mask_BT * np.float32("nan" if step == 9 else 1))


@pytest.mark.slow
def test_a_rewind_and_initial_weights_match_one_device(workshop, monkeypatch):
    given = {
        "model__dropout_rate": 0.0,
        "training__optimizer": "adamw",
        "training__nan_policy": "rewind",
    }
    losses = {}
    for devices, changes in ((8, MESH | given), (1, given)):
        on_first(monkeypatch, devices)
        config = small_config(**changes)
        run = workshop.train(str(devices), config, store=small_store(config, Poisoned))
        after = small_config(
            **changes,
            training__steps=6,
            training__warmup_steps=0,
            training__init_from=str(run.path),
        )
        losses[devices] = [
            row["val_loss"]
            for r in (run, workshop.train(f"after {devices}", after))
            for row in read_csv(r.log(config))
        ]
    assert (
        workshop.notes.getvalue().count("back to step 6, the batches of steps 7 to 10 are skipped")
        == 2
    )
    assert len(losses[8]) == 5
    np.testing.assert_allclose(losses[8], losses[1], rtol=0, atol=1e-5)

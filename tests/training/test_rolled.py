"""Training with stacked layers (`scan_layers`): equal numbers, and the same files as without
stacking.
"""

from functools import cache

import jax
import numpy as np
import pytest

from dantinox.generation.api.loaded_model import load_model
from dantinox.model.parameters import abstract_model, init_parameters, stack_layers, unstack_layers
from dantinox.training.step import TrainStep, router_bias_moves
from tests.error_texts import ERRORS

from .small import VOCABULARY, random_weights, small_config, small_store

# Layers 0 and 2 are of one kind, layers 1 and 3 of another.
SETTINGS = {
    "model__num_blocks": 4,
    "attention__sliding_window": True,
    "attention__context_window": 2,
    "attention__layer_types": ["sliding", "full"],
    "attention__rope_local_theta": 100.0,
    "attention__rope_layers": [False, True],
    "attention__sink_logits": True,
    "moe__use_moe": True,
    "moe__bias_update_rate": 0.01,
    "moe__dense_layers": [0, 2],
    "moe__dense_hidden_dim": 24,
    "training__grad_accum": 2,
}


@cache
def trained(scan_layers, optimizer="adamw", **changes):
    """Returns the losses of three steps, the tokens of the experts, and the unstacked weights after
    the steps.
    """
    config = small_config(
        **SETTINGS, **changes, model__scan_layers=scan_layers, training__optimizer=optimizer
    )
    model, store, losses = config.architecture(VOCABULARY), small_store(config), []
    state, step = TrainStep(config, model, 9).initial_state(), TrainStep(config, model, 9).program
    for i in range(3):
        state, metrics = step(state, store.batch(i))
        losses.append(float(metrics.loss))
    counts = np.asarray(metrics.expert_counts)
    return (
        losses,
        counts,
        {name: np.asarray(x) for name, x in unstack_layers(state.parameters).items()},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, changes",
    [
        ("adamw", {"model__gradient_checkpointing": True}),
        ("muon", {}),
        ("adafactor", {}),
        (
            "adafactor",
            {
                "model__per_layer_dim": 4,
                "model__layer_scalar": True,
                "attention__global_head_size": 8,
                "attention__k_eq_v": True,
            },
        ),
    ],
)
def test_stacked_layers_have_the_losses_and_weights_of_separate_ones(optimizer, changes):
    (ours, counts, rolled_up), (theirs, others, apart) = (
        trained(scan, optimizer, **changes) for scan in (True, False)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(counts, others)
    assert (
        counts[1::2].sum() == counts.sum() == 2 * 4 * 8 * 2
    )  # layers with experts × rows × tokens × experts per token
    assert rolled_up.keys() == apart.keys()
    # Adam divides small gradients by their own size, so a few weights may differ by a full step.
    assert np.mean([np.abs(rolled_up[name] - apart[name]).mean() for name in apart]) < 1e-5


def test_stacking_and_unstacking_layers_is_the_identity():
    model, other = (
        small_config(**SETTINGS, model__scan_layers=s).architecture(VOCABULARY)
        for s in (True, False)
    )
    assert model.period == 2
    apart = init_parameters(other, 1)
    stacked = stack_layers(apart, model)
    assert {name: x.shape for name, x in abstract_model(model)[1].items()} == {
        name: x.shape for name, x in stacked.items()
    }
    jax.tree.map(np.testing.assert_array_equal, stacked, init_parameters(model, 1))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), apart)
    np.testing.assert_array_equal(
        stacked["rolled/1/attention/qkv/kernel"][1], apart["blocks/3/attention/qkv/kernel"]
    )


@pytest.mark.parametrize("layers, kinds, period", [(6, 3, 3), (6, 1, 1), (5, 2, 5), (8, 4, 4)])
def test_the_period_divides_the_depth(layers, kinds, period):
    only = {
        "attention__rope_layers": [True],
        "moe__dense_layers": [],
        "moe__dense_hidden_dim": None,
    }
    types = only | {"attention__layer_types": ["full"] * (kinds - 1) + ["sliding"]}
    settings = SETTINGS | types | {"model__num_blocks": layers}
    assert small_config(**settings).architecture(VOCABULARY).period == period


@pytest.mark.slow
def test_run_with_stacked_layers_trains_resumes_and_samples(workshop):
    """The exported file of the run and the model for its samples have unstacked layers. The run can
    be resumed.
    """
    config = small_config(
        **SETTINGS,
        model__scan_layers=True,
        training__steps=4,
        training__eval_every=2,
        training__sample_every=2,
    )
    seen = []
    run = workshop.train(
        "rolled", config, sample=lambda model: seen.append(len(model.blocks)) or "text"
    )
    assert seen == [4, 4] and len(load_model(config, VOCABULARY, run).blocks) == 4
    longer = small_config(
        **SETTINGS, model__scan_layers=True, training__steps=6, training__eval_every=2
    )
    workshop.train("rolled", longer, resume=True)
    assert "resumed from step 4" in workshop.notes.getvalue()


@pytest.mark.parametrize("what", ["cache", "probe"])
def test_model_with_stacked_layers_does_not_decode(what):
    model = small_config(**SETTINGS, model__scan_layers=True).architecture(VOCABULARY)
    built, _ = abstract_model(model)
    with pytest.raises(ValueError, match=ERRORS["supports_neither_a_cache_nor"]):
        built(random_weights(model)).hidden(
            np.zeros((1, 2), np.int32), np.arange(2)[None], **{what: object()}
        )


def test_bias_rises_for_experts_with_few_tokens():
    counts_LE = np.array([[1, 5, 3], [3, 3, 3], [9, 0, 0], [0, 0, 9]])
    apart = {f"blocks/{i}/ffn/router/bias": np.zeros(3, np.float32) for i in range(4)} | {
        "embed": np.ones(2)
    }
    moves = router_bias_moves(apart, counts_LE, 0.1, kinds=4)
    wanted = 0.1 * np.array([[1, -1, 0], [0, 0, 0], [-1, 1, 1], [1, 1, -1]])
    for i in range(4):
        np.testing.assert_allclose(moves[f"blocks/{i}/ffn/router/bias"], wanted[i])
    stacks = router_bias_moves(
        {f"rolled/{i}/ffn/router/bias": np.zeros((2, 3), np.float32) for i in range(2)},
        counts_LE,
        0.1,
        kinds=2,
    )
    np.testing.assert_allclose(stacks["rolled/1/ffn/router/bias"], wanted[1::2])
    assert "embed" not in moves

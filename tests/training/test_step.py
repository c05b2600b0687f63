from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.training.eval_step import make_eval_step
from dantinox.training.memory import MemoryPlan, check_memory, plan_memory
from dantinox.training.objective import abstract_windows
from dantinox.training.step import EVAL_TOKENS_PER_CALL, TrainStep
from tests.error_texts import ERRORS

from .small import VOCABULARY, random_weights, small_config, small_store


@cache
def train_step(**changes):
    config = small_config(**{"training__optimizer": "sgd"} | changes)
    return TrainStep(config, config.architecture(VOCABULARY), 24)


@cache
def initial_weights():
    return random_weights(train_step().model, size=0.1)


def after(steps, **changes):
    training = train_step(**changes)
    state, store, metrics = (
        training.initial_state(initial_weights()),
        small_store(training.config),
        [],
    )
    for number in range(steps):
        state, seen = training.program(state, store.batch(number))
        metrics.append(jax.device_get(seen))
    return state, metrics


SUMS = {"model__dropout_rate": 0.0, "training__z_loss": 1.0, "training__lr": 0.05}


def test_accumulated_parts_equal_the_whole():
    """Gradient descent shows an error of a gradient as an error of the weights."""
    (whole, a), (parts, b) = (after(3, training__grad_accum=n, **SUMS) for n in (1, 4))
    for name in whole.parameters:
        np.testing.assert_allclose(
            whole.parameters[name], parts.parameters[name], atol=1e-6, err_msg=name
        )
    np.testing.assert_allclose([m.loss for m in a], [m.loss for m in b], rtol=1e-5)
    np.testing.assert_allclose([m.grad_norm for m in a], [m.grad_norm for m in b], rtol=1e-5)


def test_accumulation_weighs_tokens_not_parts():
    batch = small_store(train_step().config).batch(0)
    mask = np.zeros_like(batch.mask_BT)
    mask[0, :1], mask[3] = 1, 1
    losses = []
    for parts in (1, 4):
        training = train_step(training__grad_accum=parts, **SUMS)
        _, seen = training.program(
            training.initial_state(initial_weights()), batch._replace(mask_BT=mask)
        )
        losses.append(seen)
    np.testing.assert_allclose(losses[0].loss, losses[1].loss, rtol=1e-6)
    np.testing.assert_allclose(losses[0].grad_norm, losses[1].grad_norm, rtol=1e-5)


def test_an_evaluation_has_no_more_rows_than_the_validation_text():
    step = train_step()
    rows = [step.traced(count)["evaluation"].rows for count in (None, 3, 10**6)]
    assert rows == [EVAL_TOKENS_PER_CALL // step.length, 3, rows[0]]


def test_moving_average_covers_the_router_biases_after_the_step():
    """The biases are moved after the update of the optimizer."""
    training = train_step(
        moe__use_moe=True, moe__choice_bias=True, moe__bias_update_rate=0.01, training__ema=0.9
    )
    name = "blocks/0/ffn/router/bias"
    state, store = (
        training.initial_state(random_weights(training.model)),
        small_store(training.config),
    )
    expected = np.float64(state.parameters[name])
    for number in range(3):
        before = np.array(state.parameters[name])
        state, _ = training.program(state, store.batch(number))
        moved = np.array(state.parameters[name])
        assert np.any(moved != before)
        expected += (1 - min(0.9, (1 + number) / (10 + number))) * (moved - expected)
    np.testing.assert_allclose(state.weights[name], expected, rtol=1e-6)


def test_z_loss_reduces_the_normalizer_and_is_not_reported():
    (free, plain), (pulled, changed) = (
        after(20, **SUMS | {"training__z_loss": z}) for z in (0.0, 1.0)
    )
    assert plain[0].loss == pytest.approx(changed[0].loss, rel=1e-6)
    evaluate, batch = make_eval_step(train_step().model), small_store(train_step().config).batch(0)
    penalty = [float(evaluate(state.parameters, batch).penalty) for state in (free, pulled)]
    assert penalty[1] < 0.5 * penalty[0]


def test_steps_are_reproducible():
    (one, a), (two, b) = after(3), after(3)
    assert [m.loss for m in a] == [m.loss for m in b]
    assert all(np.array_equal(one.parameters[n], two.parameters[n]) for n in one.parameters)


def test_dropout_differs_by_step_and_seed():
    batch = small_store(train_step().config).batch(0)

    def loss(step, **changes):
        training = train_step(**changes)
        state = training.initial_state(initial_weights())._replace(step=np.int32(step))
        return float(training.program(state, batch)[1].loss)

    assert len({loss(0), loss(1), loss(0, training__seed=7)}) == 3


def test_weights_and_moments_stay_float32_under_bfloat16():
    state, metrics = after(2, model__dtype="bfloat16")
    kinds = {
        leaf.dtype for leaf in jax.tree.leaves((state.parameters, state.optimizer)) if leaf.ndim
    }
    assert kinds == {jnp.dtype("float32")} and np.isfinite(metrics[-1].loss)


def test_running_sums_add_losses_since_their_reset():
    state, metrics = after(3)
    np.testing.assert_allclose(state.loss_since_eval, [sum(m.loss for m in metrics), 3], rtol=1e-6)


def test_evaluation_has_no_dropout():
    batch, (model, plain) = (
        small_store(train_step().config).batch(0),
        (train_step(model__dropout_rate=p).model for p in (0.9, 0)),
    )
    nats = [float(make_eval_step(one)(initial_weights(), batch).nats) for one in (model, plain)]
    assert nats[0] == nats[1]


def test_step_donates_its_state_and_plans_its_memory():
    training = train_step()
    compiled = training.program.lower(training.shapes, abstract_windows(4, 8)).compile()
    plan = plan_memory(compiled, training.shapes)
    state = training.initial_state(initial_weights())
    assert plan.parameters == sum(p.nbytes for p in state.parameters.values())
    assert plan.optimizer == sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert plan.peak > plan.parameters + plan.optimizer
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= plan.parameters + plan.optimizer
    assert jax.tree.structure(training.shapes) == jax.tree.structure(state)


def test_memory_error_names_the_settings_to_lower():
    with pytest.raises(UserError, match=ERRORS["needs_about_2_00_gb"]):
        check_memory(MemoryPlan(1, 1, 2_000_000_000, 1_000_000_000), small_config())
    check_memory(MemoryPlan(1, 1, 2_000_000_000, None), small_config())

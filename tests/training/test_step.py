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

from .small import VOCABULARY, small_config, small_store


def after(steps, **changes):
    config = small_config(**changes)
    model, store = config.architecture(VOCABULARY), small_store(config)
    state, step = TrainStep(config, model, 24).initial_state(), TrainStep(config, model, 24).program
    metrics = []
    for number in range(steps):
        state, seen = step(state, store.batch(number))
        metrics.append(jax.device_get(seen))
    return state, metrics


def test_accumulated_parts_equal_the_whole():
    (whole, a), (parts, b) = (
        after(3, model__dropout_rate=0.0, training__grad_accum=n, training__optimizer="adamw", training__z_loss=1e-3)
        for n in (1, 4)
    )
    for name in whole.parameters:
        np.testing.assert_allclose(whole.parameters[name], parts.parameters[name], atol=2e-5)
    np.testing.assert_allclose([m.loss for m in a], [m.loss for m in b], rtol=1e-5)
    np.testing.assert_allclose([m.grad_norm for m in a], [m.grad_norm for m in b], rtol=1e-4)


def test_accumulation_weighs_tokens_not_parts():
    config = small_config(model__dropout_rate=0.0)
    model = config.architecture(VOCABULARY)
    batch = small_store(config).batch(0)
    mask = np.zeros_like(batch.mask_BT)
    mask[0, :1], mask[3] = 1, 1
    losses = []
    for parts in (1, 2):
        config = small_config(model__dropout_rate=0.0, training__grad_accum=parts)
        training = TrainStep(config, model, 24)
        _, seen = training.program(training.initial_state(), batch._replace(mask_BT=mask))
        losses.append(seen)
    np.testing.assert_allclose(losses[0].loss, losses[1].loss, rtol=1e-6)
    np.testing.assert_allclose(losses[0].grad_norm, losses[1].grad_norm, rtol=1e-5)


def test_an_evaluation_has_no_more_rows_than_the_validation_text():
    config = small_config()
    step = TrainStep(config, config.architecture(VOCABULARY), 24)
    rows = [step.traced(count)["evaluation"].rows for count in (None, 3, 10**6)]
    assert rows == [EVAL_TOKENS_PER_CALL // config.model.max_context, 3, rows[0]]


def test_z_loss_reduces_the_normalizer_and_is_not_reported():
    (_, plain), (_, pulled) = (after(20, training__z_loss=z, model__dropout_rate=0.0) for z in (0.0, 1.0))
    assert plain[0].loss == pulled[0].loss
    config = small_config()
    model = config.architecture(VOCABULARY)
    penalty = [
        float(make_eval_step(model)(after(20, training__z_loss=z)[0].parameters, small_store(config).batch(0)).penalty)
        for z in (0.0, 1.0)
    ]
    assert penalty[1] < 0.5 * penalty[0]


def test_steps_are_reproducible_and_dropout_differs_by_step_and_seed():
    (one, a), (two, b), (_, other) = after(3), after(3), after(3, training__seed=7)
    assert [m.loss for m in a] == [m.loss for m in b] != [m.loss for m in other]
    assert all(np.array_equal(one.parameters[n], two.parameters[n]) for n in one.parameters)


def test_weights_and_moments_stay_float32_under_bfloat16():
    state, metrics = after(2, model__dtype="bfloat16")
    kinds = {leaf.dtype for leaf in jax.tree.leaves((state.parameters, state.optimizer)) if leaf.ndim}
    assert kinds == {jnp.dtype("float32")} and np.isfinite(metrics[-1].loss)


def test_running_sums_add_losses_since_their_reset():
    state, metrics = after(3)
    np.testing.assert_allclose(state.loss_since_eval, [sum(m.loss for m in metrics), 3], rtol=1e-6)


def test_evaluation_has_no_dropout():
    config = small_config(model__dropout_rate=0.9)
    model, batch = config.architecture(VOCABULARY), small_store(config).batch(0)
    parameters = TrainStep(config, model, 24).initial_state().parameters
    plain = make_eval_step(small_config(model__dropout_rate=0.0).architecture(VOCABULARY))(parameters, batch)
    assert float(make_eval_step(model)(parameters, batch).nats) == float(plain.nats)


def test_step_donates_its_state_and_plans_its_memory(optimized):
    config = small_config()
    model = config.architecture(VOCABULARY)
    abstract = TrainStep(config, model, 24).shapes
    compiled = optimized(TrainStep(config, model, 24).program.lower(abstract, abstract_windows(4, 8)))
    plan = plan_memory(compiled, abstract)
    state = TrainStep(config, model, 24).initial_state()
    assert plan.parameters == sum(p.nbytes for p in state.parameters.values())
    assert plan.optimizer == sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer))
    assert plan.peak > plan.parameters + plan.optimizer
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= plan.parameters + plan.optimizer
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


def test_memory_error_names_the_settings_to_lower():
    with pytest.raises(UserError, match=ERRORS["needs_about_2_00_gb"]):
        check_memory(MemoryPlan(1, 1, 2_000_000_000, 1_000_000_000), small_config())
    check_memory(MemoryPlan(1, 1, 2_000_000_000, None), small_config())

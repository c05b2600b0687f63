import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dantinox.model.parameters import abstract_model, init_parameters
from dantinox.report import read_csv, read_jsonl
from dantinox.training.muon import MOMENTUM
from dantinox.training.optimizer import optimizer, schedule
from dantinox.training.orthogonalize import matrix_shape, orthogonalize

from .small import VOCABULARY, small_config


def shapes(**changes):
    return {name: leaf.shape for name, leaf in abstract_model(small_config(**changes).architecture(VOCABULARY))[1].items()}


def factors(name, steps=101, warmup=10, low=0.1, **more):
    changes = {f"training__{key}": value for key, value in more.items()}
    config = small_config(
        training__steps=steps, training__schedule=name, training__warmup_steps=warmup, training__min_lr_ratio=low, **changes
    )
    return np.array(jax.vmap(schedule(config.training, steps))(jnp.arange(steps)))


def test_warmup_rises_linearly_and_does_not_start_at_zero():
    np.testing.assert_allclose(factors("constant")[:12], [*(np.arange(1, 12) / 11), 1], rtol=1e-6)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (101, 10), (5000, 100)])
def test_default_warmup_is_a_tenth_of_the_steps_and_at_most_100(steps, warmup):
    np.testing.assert_array_equal(factors("linear", steps, warmup=None), factors("linear", steps, warmup=warmup))


def test_cosine_has_its_closed_form():
    done = (np.arange(10, 101) - 10) / 90
    np.testing.assert_allclose(factors("cosine")[10:], 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2, atol=1e-6)


def test_linear_has_its_closed_form():
    np.testing.assert_allclose(factors("linear")[10:], np.linspace(1, 0.1, 91), atol=1e-6)


def test_wsd_is_flat_and_then_falls_to_the_last_step():
    got = factors("wsd", decay_fraction=0.2)
    np.testing.assert_allclose(got[10:81], 1)
    np.testing.assert_allclose(got[80:], np.linspace(1, 0.1, 21), atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_schedules_end_at_the_ratio_even_when_short(name):
    assert factors(name, steps=5, warmup=0)[-1] == pytest.approx(0.1)
    assert np.isfinite(factors(name, steps=1, warmup=1)).all()


def test_muon_trains_hidden_matrices_but_no_tables():
    found = {
        name for name, shape in shapes(attention__no_sink=True, model__weight_tying=False).items() if matrix_shape(name, shape)
    }
    kernels = ("attention/qkv", "attention/out", "attention/gate", "ffn/gate_up", "ffn/down")
    assert found == {f"blocks/0/{kernel}/kernel" for kernel in kernels}


def test_matrices_have_the_fans_of_their_projection():
    sizes = {
        name: matrix_shape(name, shape)
        for name, shape in shapes(model__kv_heads=1, model__head_size=6, model__hidden_dim=20).items()
    }
    assert sizes["blocks/0/attention/qkv/kernel"] == (16, 1 * 4 * 6)
    assert sizes["blocks/0/attention/out/kernel"] == (12, 16)
    assert sizes["blocks/0/ffn/gate_up/kernel"] == (16, 2 * 20)
    assert sizes["blocks/0/ffn/down/kernel"] == (20, 16)


def test_orthogonalized_singular_values_are_near_one():
    rng = np.random.default_rng(0)
    gradients = {}
    for i, (fan_in, fan_out) in enumerate([(16, 40), (16, 16), (40, 16), (24, 16)]):
        u, v = (np.linalg.qr(rng.normal(size=(size, 16)))[0] for size in (fan_in, fan_out))
        spectrum = 10.0 ** (-6 + i) * np.geomspace(1, 0.03, 16)
        gradients[f"blocks/{i}/ffn/down/kernel"] = jnp.array(u * spectrum @ v.T, jnp.float32)
    for name, result in orthogonalize(gradients).items():
        u, s, vt = np.linalg.svd(np.asarray(gradients[name], np.float64), full_matrices=False)
        fan_in, fan_out = gradients[name].shape
        inside = u.T @ np.asarray(result, np.float64) @ vt.T / math.sqrt(max(1, fan_out / fan_in))
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 2e-3
        assert np.diag(inside).min() > 0.7 and np.diag(inside).max() < 1.3
    assert all(np.isfinite(x).all() for x in orthogonalize({"blocks/0/ffn/down/kernel": jnp.zeros((3, 4))}).values())


def test_muon_directions_agree_with_optax():
    config = small_config(
        training__weight_decay=0.0, training__grad_clip=0.0, training__schedule="constant", training__warmup_steps=0
    )
    parameters = init_parameters(config.architecture(VOCABULARY), 0)
    inside = {name: p for name, p in parameters.items() if matrix_shape(name, p.shape)}
    gradients = {name: jax.random.normal(jax.random.key(i), p.shape) for i, (name, p) in enumerate(inside.items())}
    flat = {name: g.reshape(matrix_shape(name, g.shape)) for name, g in gradients.items()}
    rest = {name: jnp.zeros_like(p) for name, p in parameters.items() if name not in inside}
    ours = optimizer(config.training, 24)
    updates, _ = ours.update(gradients | rest, ours.init(parameters), parameters)
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=dict.fromkeys(flat, optax.contrib.MuonDimensionNumbers()))
    direction, _ = theirs.update(flat, theirs.init(flat))
    for name, expected in direction.items():
        got = np.asarray(updates[name]).reshape(expected.shape)
        scale = config.training.muon_lr * math.sqrt(max(1, expected.shape[1] / expected.shape[0]))
        cosine = -np.vdot(got, expected) / np.linalg.norm(got) / np.linalg.norm(expected)
        assert cosine > 0.95  # both bring singular values near one, with different polynomials
        assert np.linalg.norm(got) == pytest.approx(scale * math.sqrt(min(expected.shape)), rel=0.2)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion", "adafactor", "sgd"])
def test_weight_decay_acts_on_matrices_only(kind):
    config = small_config(
        training__optimizer=kind, training__weight_decay=0.5, training__warmup_steps=0, model__norm="layernorm"
    )
    parameters = {n: p + 1.0 for n, p in init_parameters(config.architecture(VOCABULARY), 0).items()}
    rule = optimizer(config.training, 24)
    updates, _ = rule.update(jax.tree.map(jnp.zeros_like, parameters), rule.init(parameters), parameters)
    for name, p in parameters.items():
        rate = config.training.muon_lr if kind == "muon" and matrix_shape(name, p.shape) else config.training.lr
        expected = -rate * 0.5 * p if p.ndim >= 2 else jnp.zeros_like(p)
        np.testing.assert_allclose(updates[name], expected, rtol=1e-5, atol=1e-9)
        assert (p.ndim < 2) == ("norm" in name)


def adamw(t, g, m, v, step):
    m, v = t.beta1 * m + (1 - t.beta1) * g, t.beta2 * v + (1 - t.beta2) * g**2
    return m / (1 - t.beta1**step) / (np.sqrt(v / (1 - t.beta2**step)) + 1e-8), m, v


def lion(t, g, m, v, step):
    return np.sign(t.beta1 * m + (1 - t.beta1) * g), t.beta2 * m + (1 - t.beta2) * g, v


def sgd(t, g, m, v, step):
    m = g + t.beta1 * m
    return g + t.beta1 * m, m, v


def adafactor(t, g, m, v, step):
    decay = 1 - step**-0.8
    rows, columns = decay * v[:, :1] + (1 - decay) * (g**2).mean(1, keepdims=True), (g**2).mean(0, keepdims=True)
    m = decay * m + (1 - decay) * columns  # the column means; v has the row means
    direction = g / np.sqrt(rows * m / rows.mean())
    return direction / max(1, np.sqrt((direction**2).mean())), m, np.broadcast_to(rows, g.shape)


@pytest.mark.parametrize(("rule", "shape"), [(adamw, (3, 4)), (lion, (3, 4)), (sgd, (3, 4)), (adafactor, (130, 140))])
def test_rules_match_their_definition(rule, shape):
    config = small_config(training__optimizer=rule.__name__, training__grad_clip=0.0, training__weight_decay=0.2)
    t, rng = config.training, np.random.default_rng(1)
    ours, factor = optimizer(t, 24), schedule(t, 24)
    weights = rng.normal(size=shape)
    parameters = {"embed": jnp.array(weights, jnp.float32)}
    state, m, v = ours.init(parameters), np.zeros(shape), np.zeros(shape)
    for step in range(1, 6):
        gradient = rng.normal(size=shape)
        updates, state = ours.update({"embed": jnp.array(gradient, jnp.float32)}, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        direction, m, v = rule(t, gradient, m, v, step)
        weights = weights - t.lr * float(factor(step - 1)) * (direction + t.weight_decay * weights)
    np.testing.assert_allclose(parameters["embed"], weights, rtol=2e-5, atol=2e-6)


def test_adafactor_keeps_a_row_and_a_column_of_a_hidden_matrix():
    config = small_config(training__optimizer="adafactor", model__dim=128, model__n_heads=8)
    kernel = {"blocks/0/attention/qkv/kernel": jax.ShapeDtypeStruct((128, 8, 3, 16), jnp.float32)}
    state = jax.eval_shape(optimizer(config.training, 24).init, kernel)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes[-2:] == [128, 8 * 3 * 16] and sum(sizes[:-2]) < 8
    table = {"per_layer/embed": jax.ShapeDtypeStruct((150, 2, 70), jnp.float32)}  # each row belongs to one token
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(optimizer(config.training, 24).init, table)))
    assert sizes[-2:] == [2 * 70, 150] and sum(sizes[:-2]) < 8


def test_moving_average_follows_the_weights_and_changes_no_update():
    t = small_config(training__ema=0.5, training__optimizer="sgd").training
    plain, averaged = (optimizer(t.model_copy(update={"ema": ema}), 24) for ema in (0.0, 0.5))
    parameters = {"embed": jnp.arange(6.0).reshape(2, 3)}
    state, other = averaged.init(parameters), plain.init(parameters)
    expected = np.arange(6.0).reshape(2, 3)
    for step in range(12):
        gradients = {"embed": jnp.full((2, 3), 0.1 * step)}
        (updates, state), (same, other) = (r.update(gradients, s, parameters) for r, s in ((averaged, state), (plain, other)))
        assert np.array_equal(updates["embed"], same["embed"])
        parameters = optax.apply_updates(parameters, updates)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * np.asarray(parameters["embed"], np.float64)
    np.testing.assert_allclose(state.average["embed"], expected, rtol=1e-6)


def test_clipping_limits_the_norm_and_zero_disables_it():
    gradients = {"embed": jnp.full((2, 2), 50.0)}

    def moment(clip):
        rule = optimizer(small_config(training__optimizer="adamw", training__grad_clip=clip).training, 24)
        _, state = rule.update(gradients, rule.init(gradients), gradients)
        return next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 2))

    np.testing.assert_allclose(moment(1.0), 0.1 * 0.5, rtol=1e-5)
    np.testing.assert_allclose(moment(0.0), 0.1 * 50, rtol=1e-5)
    np.testing.assert_allclose(moment(1000.0), 0.1 * 50, rtol=1e-5)


@pytest.mark.parametrize("step", [0, 3, 17])
def test_logged_rates_are_those_of_the_update(step):
    """Recovers the rates of Muon's matrices and AdamW's embeddings from the sizes of the updates."""
    t = small_config(training__weight_decay=0.0, training__grad_clip=0.0, training__lr=0.01, training__muon_lr=0.5).training
    ours = optimizer(t, 24)
    rng = np.random.default_rng(1)
    names = {"blocks/0/ffn/down/kernel": (16, 16), "embed": (11, 16)}
    parameters = {name: jnp.zeros(shape) for name, shape in names.items()}
    gradients = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in names.items()}
    state = jax.tree.map(lambda leaf: leaf + step if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf, ours.init(parameters))
    updates, _ = ours.update(gradients, state, parameters)
    kernel = gradients["blocks/0/ffn/down/kernel"]
    direction = orthogonalize({"blocks/0/ffn/down/kernel": (1 - MOMENTUM**2) * kernel})["blocks/0/ffn/down/kernel"]
    applied = -np.vdot(updates["blocks/0/ffn/down/kernel"], direction) / np.vdot(direction, direction)
    rates = ours.rates(step)
    assert applied == pytest.approx(float(rates["muon_lr"]), rel=1e-5)
    first, second = ((1 - beta) / (1 - beta ** (step + 1)) for beta in (t.beta1, t.beta2))  # bias corrections of Adam's moments
    adam = first * gradients["embed"] / (np.sqrt(second) * np.abs(gradients["embed"]) + 1e-8)
    np.testing.assert_allclose(-updates["embed"] / adam, np.full((11, 16), rates["lr"]), rtol=1e-4)
    assert rates["muon_lr"] / rates["lr"] == pytest.approx(50)


def test_log_has_the_rates_of_both_rules(workshop):
    config = small_config(training__steps=6, training__lr=0.01, training__muon_lr=0.02, training__warmup_steps=0)
    run = workshop.train("run", config)
    rows = [row for row in read_jsonl(run.metrics) if row["kind"] == "interval"] + read_csv(run.log(config))
    assert all(row["muon_lr"] == pytest.approx(2 * row["lr"]) for row in rows) and len(rows) > 1
    assert f"muon_lr {rows[0]['muon_lr']:.4g}" in workshop.notes.getvalue()


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (3, 3), (3, 10), (1, 100)])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_rates_are_positive_if_warmup_is_as_long_as_the_training(name, steps, warmup):
    t = small_config().training.model_copy(update={"steps": steps, "warmup_steps": warmup, "schedule": name})
    rates = np.array([schedule(t, steps)(step) for step in range(steps)])
    assert (rates > 0).all() and (rates <= 1).all()

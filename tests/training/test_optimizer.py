import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dantinox.model.parameters import abstract_model
from dantinox.training.muon import MOMENTUM
from dantinox.training.optimizer import optimizer, schedule, update_if
from dantinox.training.orthogonalize import matrix_shape, orthogonalize

from .small import VOCABULARY, random_weights, small_config


def shapes(**changes):
    return {
        name: leaf.shape
        for name, leaf in abstract_model(small_config(**changes).architecture(VOCABULARY))[
            1
        ].items()
    }


def factors(name, steps=101, warmup=10, low=0.1, **more):
    changes = {f"training__{key}": value for key, value in more.items()}
    config = small_config(
        training__steps=steps,
        training__schedule=name,
        training__warmup_steps=warmup,
        training__min_lr_ratio=low,
        **changes,
    )
    return rates(config.training, steps)


def rates(training, steps):
    """Returns the factor of every step. All schedules are evaluated on arrays of one shape, with
    the same programs.
    """
    return np.asarray(schedule(training, steps)(np.arange(5000)))[:steps]


def updates_of(rule, gradients, parameters):
    """Returns the first updates of a rule."""
    return jax.jit(lambda g, p: rule.update(g, rule.init(p), p)[0])(gradients, parameters)


def test_warmup_rises_linearly_and_does_not_start_at_zero():
    np.testing.assert_allclose(factors("constant")[:12], [*(np.arange(1, 12) / 11), 1], rtol=1e-6)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (101, 10), (5000, 100)])
def test_default_warmup_is_a_tenth_of_the_steps_and_at_most_100(steps, warmup):
    np.testing.assert_array_equal(
        factors("linear", steps, warmup=None), factors("linear", steps, warmup=warmup)
    )


def test_cosine_has_its_closed_form():
    done = (np.arange(10, 101) - 10) / 90
    np.testing.assert_allclose(
        factors("cosine")[10:], 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2, atol=1e-6
    )


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


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize(
    ("warmup", "ends"), [(8, (1, 0.1)), (9, (0.9, 1)), (10, (9 / 11, 10 / 11))]
)
def test_warmup_as_long_as_the_run_leaves_no_decay(name, warmup, ends):
    np.testing.assert_allclose(factors(name, steps=10, warmup=warmup)[-2:], ends, rtol=1e-6)


def test_factors_of_overlapping_warmup_and_decay_multiply():
    decay = np.array([1.0] * 5 + [1, 0.775, 0.55, 0.325, 0.1])
    rise = np.minimum(1, np.arange(1, 11) / 8)
    np.testing.assert_allclose(
        factors("wsd", steps=10, warmup=7, decay_fraction=0.4), rise * decay, rtol=1e-6
    )


RULES = ("adamw", "muon", "normuon", "lion", "adafactor", "sgd")


@pytest.mark.parametrize("name", RULES)
def test_skipped_step_changes_nothing_but_the_step_of_the_schedule(name):
    """The next update is that of a run without the skipped step, at the learning rate of the next
    step.
    """
    given = (
        {"training__optimizer": "muon", "training__muon_normalize": True}
        if name == "normuon"
        else {"training__optimizer": name}
    )
    config = small_config(
        **given, training__ema=0.9, training__weight_decay=0.0, training__schedule="linear",
        training__warmup_steps=0, training__min_lr_ratio=0.5, training__steps=3,
    )  # fmt: skip
    rule = optimizer(config.training, 3)
    parameters = {"blocks/0/ffn/down/kernel": jnp.ones((2, 3)), "norm/scale": jnp.ones(4)}
    gradients = jax.tree.map(lambda p: jnp.arange(1.0, p.size + 1).reshape(p.shape), parameters)
    start = rule.init(parameters)
    _, bad = rule.update(jax.tree.map(lambda g: g * jnp.nan, gradients), start, parameters)
    got, got_state = rule.update(gradients, update_if(jnp.array(False), bad, start), parameters)
    expected, state = rule.update(gradients, start, parameters)
    for parameter, wanted in expected.items():  # the factors of steps 1 and 0 are 0.75 and 1
        np.testing.assert_allclose(got[parameter], 0.75 * wanted, rtol=1e-6)
    assert got_state.steps == state.steps == 1
    taken, expected_state = update_if(jnp.array(True), state, start), state
    jax.tree.map(np.testing.assert_array_equal, taken, expected_state)


def test_muon_trains_hidden_matrices_but_no_tables():
    found = {
        name
        for name, shape in shapes(attention__no_sink=True, model__weight_tying=False).items()
        if matrix_shape(name, shape)
    }
    kernels = ("attention/qkv", "attention/out", "attention/gate", "ffn/gate_up", "ffn/down")
    assert found == {f"blocks/0/{kernel}/kernel" for kernel in kernels}


def test_matrices_have_the_fans_of_their_projection():
    sizes = {
        name: matrix_shape(name, shape)
        for name, shape in shapes(
            model__kv_heads=1, model__head_size=6, model__hidden_dim=20
        ).items()
    }
    assert sizes["blocks/0/attention/qkv/kernel"] == (16, 1 * 4 * 6)
    assert sizes["blocks/0/attention/out/kernel"] == (12, 16)
    assert sizes["blocks/0/ffn/gate_up/kernel"] == (16, 2 * 20)
    assert sizes["blocks/0/ffn/down/kernel"] == (20, 16)


def test_orthogonalized_singular_values_are_near_one():
    rng = np.random.default_rng(0)
    gradients = {"blocks/9/ffn/down/kernel": np.zeros((3, 4), np.float32)}
    for i, (fan_in, fan_out) in enumerate([(16, 40), (16, 16), (40, 16), (24, 16)]):
        u, v = (np.linalg.qr(rng.normal(size=(size, 16)))[0] for size in (fan_in, fan_out))
        spectrum = 10.0 ** (-6 + i) * np.geomspace(1, 0.03, 16)
        gradients[f"blocks/{i}/ffn/down/kernel"] = np.float32(u * spectrum @ v.T)
    found = jax.jit(orthogonalize)(gradients)
    assert np.isfinite(found.pop("blocks/9/ffn/down/kernel")).all()
    for name, result in found.items():
        u, s, vt = np.linalg.svd(np.asarray(gradients[name], np.float64), full_matrices=False)
        fan_in, fan_out = gradients[name].shape
        inside = u.T @ np.asarray(result, np.float64) @ vt.T / math.sqrt(max(1, fan_out / fan_in))
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 2e-3
        assert np.diag(inside).min() > 0.7 and np.diag(inside).max() < 1.3


def test_muon_directions_agree_with_optax():
    config = small_config(
        training__weight_decay=0.0,
        training__grad_clip=0.0,
        training__schedule="constant",
        training__warmup_steps=0,
    )
    parameters = random_weights(config.architecture(VOCABULARY))
    inside, rng = (
        {name for name, p in parameters.items() if matrix_shape(name, p.shape)},
        np.random.default_rng(0),
    )
    gradients = {name: np.float32(rng.normal(size=parameters[name].shape)) for name in inside}
    flat = {name: g.reshape(matrix_shape(name, g.shape)) for name, g in gradients.items()}
    rest = {name: np.zeros_like(p) for name, p in parameters.items() if name not in inside}
    updates = updates_of(optimizer(config.training, 24), gradients | rest, parameters)
    dimensions = dict.fromkeys(flat, optax.contrib.MuonDimensionNumbers())
    theirs = optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions)
    for name, direction in updates_of(theirs, flat, flat).items():
        expected = np.asarray(direction)
        got = np.asarray(updates[name]).reshape(expected.shape)
        scale = config.training.muon_lr * math.sqrt(max(1, expected.shape[1] / expected.shape[0]))
        cosine = -np.vdot(got, expected) / np.linalg.norm(got) / np.linalg.norm(expected)
        assert cosine > 0.9  # both bring singular values near one, with different polynomials
        assert np.linalg.norm(got) == pytest.approx(scale * math.sqrt(min(expected.shape)), rel=0.2)


def test_weight_decay_acts_on_matrices_only():
    kinds = "adamw", "muon", "lion", "adafactor", "sgd"
    changes = {
        "training__weight_decay": 0.5,
        "training__warmup_steps": 0,
        "model__norm": "layernorm",
    }
    configs = {kind: small_config(training__optimizer=kind, **changes) for kind in kinds}
    parameters = random_weights(configs["adamw"].architecture(VOCABULARY))
    zeros = {name: np.zeros_like(p) for name, p in parameters.items()}

    @jax.jit
    def updates(gradients, parameters):
        rules = {kind: optimizer(config.training, 24) for kind, config in configs.items()}
        return {
            kind: rule.update(gradients, rule.init(parameters), parameters)[0]
            for kind, rule in rules.items()
        }

    for kind, found in updates(zeros, parameters).items():
        t = configs[kind].training
        for name, p in parameters.items():
            rate = t.muon_lr if kind == "muon" and matrix_shape(name, p.shape) else t.lr
            expected = -rate * 0.5 * p if p.ndim >= 2 else np.zeros_like(p)
            np.testing.assert_allclose(
                found[name], expected, rtol=1e-5, atol=1e-9, err_msg=f"{kind} {name}"
            )
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
    rows, columns = (
        decay * v[:, :1] + (1 - decay) * (g**2).mean(1, keepdims=True),
        (g**2).mean(0, keepdims=True),
    )
    m = decay * m + (1 - decay) * columns  # the column means; v has the row means
    direction = g / np.sqrt(rows * m / rows.mean())
    return direction / max(1, np.sqrt((direction**2).mean())), m, np.broadcast_to(rows, g.shape)


@pytest.mark.parametrize(
    ("rule", "shape"), [(adamw, (3, 4)), (lion, (3, 4)), (sgd, (3, 4)), (adafactor, (130, 140))]
)
def test_rules_match_their_definition(rule, shape):
    config = small_config(
        training__optimizer=rule.__name__, training__grad_clip=0.0, training__weight_decay=0.2
    )
    t, rng = config.training, np.random.default_rng(1)
    ours = optimizer(t, 24)
    weights = rng.normal(size=shape)
    parameters, m, v = {"embed": np.float32(weights)}, np.zeros(shape), np.zeros(shape)
    update, state, factors = jax.jit(ours.update), jax.jit(ours.init)(parameters), rates(t, 24)
    for step in range(1, 6):
        gradient = rng.normal(size=shape)
        updates, state = update({"embed": np.float32(gradient)}, state, parameters)
        parameters = {"embed": parameters["embed"] + np.asarray(updates["embed"])}
        direction, m, v = rule(t, gradient, m, v, step)
        weights = weights - t.lr * factors[step - 1] * (direction + t.weight_decay * weights)
    np.testing.assert_allclose(parameters["embed"], weights, rtol=2e-5, atol=2e-6)


def test_adafactor_keeps_a_row_and_a_column_of_a_hidden_matrix():
    config = small_config(training__optimizer="adafactor", model__dim=128, model__n_heads=8)
    kernel = {"blocks/0/attention/qkv/kernel": jax.ShapeDtypeStruct((128, 8, 3, 16), jnp.float32)}
    state = jax.eval_shape(optimizer(config.training, 24).init, kernel)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes[-2:] == [128, 8 * 3 * 16] and sum(sizes[:-2]) < 8
    table = {
        "per_layer/embed": jax.ShapeDtypeStruct((150, 2, 70), jnp.float32)
    }  # each row belongs to one token
    sizes = sorted(
        leaf.size
        for leaf in jax.tree.leaves(jax.eval_shape(optimizer(config.training, 24).init, table))
    )
    assert sizes[-2:] == [2 * 70, 150] and sum(sizes[:-2]) < 8


def test_moving_average_follows_the_weights_and_changes_no_update():
    t = small_config(training__ema=0.5, training__optimizer="sgd").training
    plain, averaged = (optimizer(t.model_copy(update={"ema": ema}), 24) for ema in (0.0, 0.5))
    parameters = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3)}
    state, other = jax.jit(lambda p: (averaged.init(p), plain.init(p)))(parameters)
    update = jax.jit(lambda g, s, o, p: (averaged.update(g, s, p), plain.update(g, o, p)))
    expected = np.arange(6.0).reshape(2, 3)
    for step in range(12):
        gradients = {"embed": np.full((2, 3), 0.1 * step, np.float32)}
        (updates, state), (same, other) = update(gradients, state, other, parameters)
        assert np.array_equal(updates["embed"], same["embed"])
        parameters = {"embed": parameters["embed"] + np.asarray(updates["embed"])}
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * np.asarray(parameters["embed"], np.float64)
    np.testing.assert_allclose(state.average["embed"], expected, rtol=1e-6)


def test_clipping_limits_the_norm_and_zero_disables_it():
    gradients = {"embed": np.full((2, 2), 50, np.float32)}

    @jax.jit
    def states(gradients):
        configs = (
            small_config(training__optimizer="adamw", training__grad_clip=clip)
            for clip in (1.0, 0.0, 1000.0)
        )
        rules = [optimizer(config.training, 24) for config in configs]
        return [rule.update(gradients, rule.init(gradients), gradients)[1] for rule in rules]

    moments = [
        next(np.asarray(x) for x in jax.tree.leaves(state) if x.shape == (2, 2))
        for state in states(gradients)
    ]
    for moment, clipped in zip(moments, (0.5, 50, 50), strict=True):
        np.testing.assert_allclose(moment, np.full((2, 2), 0.1 * clipped), rtol=1e-5)


def test_logged_rates_are_those_of_the_update():
    """Recovers the rates of Muon's matrices and AdamW's embeddings from the sizes of the
    updates.
    """
    t = small_config(
        training__weight_decay=0.0,
        training__grad_clip=0.0,
        training__lr=0.01,
        training__muon_lr=0.5,
    ).training
    ours, matrix = optimizer(t, 24), "blocks/0/ffn/down/kernel"
    rng = np.random.default_rng(1)
    names = {matrix: (16, 16), "embed": (11, 16)}
    parameters = {name: np.zeros(shape, np.float32) for name, shape in names.items()}
    gradients = {name: rng.normal(size=shape).astype(np.float32) for name, shape in names.items()}
    initial = jax.device_get(jax.jit(ours.init)(parameters))

    @jax.jit
    def apply(gradients, state, step):
        directions = orthogonalize({matrix: (1 - MOMENTUM**2) * gradients[matrix]})
        return ours.update(gradients, state, parameters)[0], directions[matrix], ours.rates(step)

    for step in (0, 3, 17):
        state = jax.tree.map(
            lambda x, step=step: x + np.int32(step) if x.dtype == np.int32 else x, initial
        )
        updates, direction, found = jax.device_get(apply(gradients, state, step))
        applied = -np.vdot(updates[matrix], direction) / np.vdot(direction, direction)
        assert applied == pytest.approx(float(found["muon_lr"]), rel=1e-5)
        # Bias corrections of Adam's moments.
        first, second = ((1 - beta) / (1 - beta ** (step + 1)) for beta in (t.beta1, t.beta2))
        adam = first * gradients["embed"] / (np.sqrt(second) * np.abs(gradients["embed"]) + 1e-8)
        np.testing.assert_allclose(
            -updates["embed"] / adam, np.full((11, 16), found["lr"]), rtol=1e-4
        )
        assert found["muon_lr"] / found["lr"] == pytest.approx(50)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (3, 3), (3, 10), (1, 100)])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_rates_are_positive_if_warmup_is_as_long_as_the_training(name, steps, warmup):
    t = small_config().training.model_copy(
        update={"steps": steps, "warmup_steps": warmup, "schedule": name}
    )
    found = rates(t, steps)
    assert (found > 0).all() and (found <= 1).all()

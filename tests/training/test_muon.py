"""Muon's options, cautious weight decay and the polynomials against definitions in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.training.muon import MOMENTUM, SQUARES_DECAY, NorMuonState
from dantinox.training.optimizer import optimizer, schedule
from dantinox.training.orthogonalize import POLAR_STEPS, orthogonalize

from .small import small_config

# Hidden matrices and stacks with the number of axes of the stack, of the inputs and of the outputs.
MATRICES = {
    "blocks/0/attention/qkv/kernel": ((6, 2, 3, 2), 0, 1),
    "blocks/0/attention/out/kernel": ((2, 2, 3, 6), 0, 3),
    "blocks/0/ffn/experts/down/kernel": ((3, 7, 5), 1, 1),
    "rolled/0/ffn/experts/up/kernel": ((2, 3, 5, 7), 2, 1),
    "blocks/1/ffn/down/kernel": ((8, 4), 0, 1),
}


def polar(x, polynomials):
    """Evaluates the odd polynomials on X itself, in float64."""
    x = x / math.sqrt(np.linalg.norm(x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x))
    for a, b, c in POLAR_STEPS[polynomials]:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def muon_step(t, factor, gradient, weights, state):
    """One step of the matrix `weights` (fan in, fan out)."""
    state["m"] = MOMENTUM * state["m"] + (1 - MOMENTUM) * gradient
    ahead = MOMENTUM * state["m"] + (1 - MOMENTUM) * gradient
    fan_in, fan_out = weights.shape
    direction = math.sqrt(max(1, fan_out / fan_in)) * polar(ahead, t.muon_steps)
    if t.muon_normalize:
        state["v"] = SQUARES_DECAY * state["v"] + (1 - SQUARES_DECAY) * (direction**2).mean(
            axis=int(fan_in > fan_out), keepdims=True
        )
        scaled = direction / np.sqrt(state["v"])
        direction = scaled * np.linalg.norm(direction) / np.linalg.norm(scaled)
    decays = direction * weights > 0 if t.cautious_decay else 1.0
    return weights - t.muon_lr * factor * (direction + t.weight_decay * decays * weights)


OPTIONS = {"muon_normalize": True, "muon_steps": 5, "cautious_decay": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(pytest.param({key: value}, marks=pytest.mark.slow) for key, value in OPTIONS.items()),
        OPTIONS,
    ],
    ids=str,
)
def test_three_steps_match_the_definition(changes):
    config = small_config(training__grad_clip=0.0, training__weight_decay=0.5)
    t, rng = config.training.model_copy(update=changes), np.random.default_rng(3)
    ours, factors = optimizer(t, 24), np.asarray(schedule(t, 24)(np.arange(24)))
    weights = {name: rng.normal(size=shape) for name, (shape, *_) in MATRICES.items()}
    parameters = {name: np.float32(w) for name, w in weights.items()}
    state, theirs, update = jax.jit(ours.init)(parameters), {}, jax.jit(ours.update)
    for step in range(3):
        gradients = {name: rng.normal(size=w.shape) for name, w in weights.items()}
        updates, state = update(
            {name: np.float32(g) for name, g in gradients.items()}, state, parameters
        )
        parameters = {name: p + np.asarray(updates[name]) for name, p in parameters.items()}
        for name, (shape, stack, inputs) in MATRICES.items():
            fan_in = math.prod(shape[stack : stack + inputs])
            flat = (math.prod(shape[:stack]), fan_in, -1)
            apart = zip(gradients[name].reshape(flat), weights[name].reshape(flat), strict=True)
            weights[name] = np.stack([
                muon_step(t, factors[step], g, w, theirs.setdefault((name, i), {"m": 0.0,
                    "v": 0.0}))
                for i, (g, w) in enumerate(apart)
            ]).reshape(shape)  # fmt: skip
    for name, expected in weights.items():
        np.testing.assert_allclose(parameters[name], expected, atol=1e-5, err_msg=name)


def test_normalized_updates_keep_the_norm_and_equalize_the_neurons():
    """After equal gradients, all neurons of a matrix have the same root mean square."""
    t = small_config(
        training__grad_clip=0.0, training__weight_decay=0.0, training__schedule="constant"
    ).training
    kernel = np.random.default_rng(0).normal(size=(4, 9)) * np.geomspace(1, 30, 9)
    gradients, found = {"blocks/0/ffn/down/kernel": np.float32(kernel)}, {}
    for normalize in (False, True):
        ours = optimizer(t.model_copy(update={"muon_normalize": normalize, "warmup_steps": 0}), 24)
        state, update = jax.jit(ours.init)(gradients), jax.jit(ours.update)
        for _ in range(3):
            updates, state = update(gradients, state, gradients)
        found[normalize] = np.asarray(updates["blocks/0/ffn/down/kernel"], np.float64)
    assert np.linalg.norm(found[True]) == pytest.approx(np.linalg.norm(found[False]), rel=1e-5)
    neurons = {normalize: np.sqrt((x**2).mean(axis=0)) for normalize, x in found.items()}
    np.testing.assert_allclose(neurons[True], neurons[True].mean(), rtol=1e-4)
    assert neurons[False].max() > 3 * neurons[False].min()


def test_the_second_moments_have_one_number_per_vector_of_the_longer_side():
    config = small_config(training__muon_normalize=True)
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, *_) in MATRICES.items()
    }
    state = jax.eval_shape(optimizer(config.training, 24).init, shapes)
    (found,) = (
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, NorMuonState))
        if isinstance(x, NorMuonState)
    )
    assert {name: x.shape for name, x in found.squares.items()} == {
        "blocks/0/attention/qkv/kernel": (1, 2, 3, 2),
        "blocks/0/attention/out/kernel": (2, 2, 3, 1),
        "blocks/0/ffn/experts/down/kernel": (3, 7, 1),
        "rolled/0/ffn/experts/up/kernel": (2, 3, 1, 7),
        "blocks/1/ffn/down/kernel": (8, 1),
    }


def first_updates(training, gradients, parameters):
    """Returns the first updates; called inside a program."""
    rule = optimizer(training, 24)
    return rule.update(gradients, rule.init(parameters), parameters)[0]


def test_zero_gradients_change_nothing():
    t = small_config(training__muon_normalize=True, training__weight_decay=0.0).training
    kernel = {"blocks/0/ffn/experts/down/kernel": np.ones((2, 3, 4), np.float32)}
    zero = {"blocks/0/ffn/experts/down/kernel": np.zeros((2, 3, 4), np.float32)}
    updates = jax.jit(lambda g, p: first_updates(t, g, p))(zero, kernel)
    assert not np.any(updates["blocks/0/ffn/experts/down/kernel"])


def test_cautious_decay_shrinks_only_weights_that_the_update_shrinks():
    rng, kinds = np.random.default_rng(2), ("adamw", "lion", "sgd", "adafactor")
    settings = {
        kind: (
            small_config(
                training__optimizer=kind, training__weight_decay=0.5, training__warmup_steps=0
            ).training
        )
        for kind in kinds
    }
    parameters = {
        name: rng.normal(size=(5, 4)).astype(np.float32)
        for name in ("embed", "blocks/0/norm1/scale")
    }
    gradients = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in parameters}
    variants = {"none": {"weight_decay": 0.0}, "all": {}, "cautious": {"cautious_decay": True}}

    @jax.jit
    def updates(g, p):
        return {
            kind: {
                name: first_updates(t.model_copy(update=changes), g, p)
                for name, changes in variants.items()
            }
            for kind, t in settings.items()
        }

    for kind, step in jax.device_get(updates(gradients, parameters)).items():
        free, weights = (
            step["none"]["embed"].astype(np.float64),
            parameters["embed"].astype(np.float64),
        )
        decay = -settings[kind].lr * 0.5 * weights
        np.testing.assert_allclose(step["all"]["embed"], free + decay, atol=1e-7, err_msg=kind)
        expected = free + decay * (free * weights < 0)
        np.testing.assert_allclose(step["cautious"]["embed"], expected, atol=1e-7, err_msg=kind)
        assert 0 < np.sum(free * weights < 0) < 20
        cautious, none = (step[name]["blocks/0/norm1/scale"] for name in ("cautious", "none"))
        np.testing.assert_array_equal(cautious, none, err_msg=kind)


def minimax_quintic(low, high):
    """Returns the odd quintic that is nearest to 1 on [low, high], by Remez' exchange of its four
    extrema.
    """
    inside = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(60):
        x = np.array([low, *inside, high])
        a, b, c, _ = np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4))
        inside = np.sqrt((-3 * b + np.array([-1, 1]) * math.sqrt(9 * b**2 - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


@pytest.mark.parametrize(
    ("polynomials", "smallest", "fitted"), [(3, 0.01, 0.0), (5, 0.001, 0.02407327424182761)]
)
def test_the_polynomials_are_minimax_and_bound_the_singular_values(polynomials, smallest, fitted):
    """`fitted`: lower end of the fitted interval, as a fraction of its upper end, if it is above
    the smallest value.
    """
    low, high, x = smallest, 1.0, np.geomspace(smallest, 1, 100_001)
    for coefficients in POLAR_STEPS[polynomials]:
        expected = minimax_quintic(max(low, fitted * high), high)
        ends = [np.dot(expected, [end, end**3, end**5]) for end in (low, high)]
        expected *= 2 / sum(ends)  # 1 is in the middle of the values at both ends
        np.testing.assert_allclose(coefficients, expected, atol=6e-5 if polynomials == 3 else 6e-7)
        low = np.dot(expected, [low, low**3, low**5])
        high = 2 - low
        a, b, c = coefficients
        x = a * x + b * x**3 + c * x**5
    error = {3: 0.271, 5: 0.13}[polynomials]
    assert 1 - error < x.min() and x.max() < 1 + error


def test_five_polynomials_are_nearer_to_the_polar_factor():
    matrices, shapes, name = {}, ((48, 20), (20, 48)), "blocks/0/ffn/down/kernel"
    for shape in shapes:
        rng = np.random.default_rng(1)
        u, v = (np.linalg.qr(rng.normal(size=(size, 20)))[0] for size in shape)
        for polynomials, smallest in ((3, 0.03), (5, 0.003)):
            matrices[shape, polynomials] = u * np.geomspace(1, smallest, 20) @ v.T
    given = {case: {name: np.float32(matrix)} for case, matrix in matrices.items()}
    found = jax.jit(
        lambda given: {case: orthogonalize(matrix, case[1])[name] for case, matrix in given.items()}
    )(given)
    for (shape, polynomials), matrix in matrices.items():
        left, _, right = np.linalg.svd(matrix, full_matrices=False)
        scale = math.sqrt(max(1, shape[1] / shape[0]))
        distance = np.asarray(found[shape, polynomials], np.float64) / scale - left @ right
        # The largest error of a singular value.
        assert np.linalg.norm(distance, 2) < {3: 0.27, 5: 0.13}[polynomials], (shape, polynomials)

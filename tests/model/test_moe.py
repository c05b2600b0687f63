"""Experts: grouped matrix multiplications and their gradients, routing, and the balancing
losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import ExpertsConfig
from dantinox.generation.decode.low_precision_layers import LowPrecisionExperts
from dantinox.model import moe
from dantinox.model.moe import (
    ExpertLinear,
    ExpertRows,
    MixtureOfExperts,
    grouped_matmul,
    tiled_matmul,
)
from dantinox.model.parallelism import SINGLE_DEVICE

from .builder import config, shaken

SIZES = {
    "some and none": (3, 0, 30, 9, 0),
    "one takes all": (0, 42, 0, 0, 0),
    "tiles to the brim": (8, 16, 0, 10, 8),
}


def drawn(make):
    """Returns a split module with random weights, without running its initializers."""
    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, shaken(state, seed=0)


def grouped_matmul_float64(x_MI, w_EIO, sizes_E):
    expert_M = np.repeat(np.arange(len(sizes_E)), sizes_E)
    return (
        np.array([x.astype(np.float64) @ w_EIO[e] for x, e in zip(x_MI, expert_M, strict=True)]),
        expert_M,
    )


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_tiled_matmul_and_its_gradients(monkeypatch, sizes):
    """d x is d y · wᵀ of the expert of the row, d w the sum of x d yᵀ over the rows of an
    expert.
    """
    monkeypatch.setattr(moe, "TILE_TOKENS", 8)
    random = np.random.default_rng(0)
    x, w, d_y = (
        random.standard_normal(shape).astype(np.float32) for shape in ((42, 6), (5, 6, 7), (42, 7))
    )

    @jax.jit
    def run(x, w, d_y):
        y, back = jax.vjp(lambda x, w: tiled_matmul(x, w, jnp.asarray(sizes)), x, w)
        return y, *back(d_y)

    y, d_x, d_w = run(x, w, d_y)
    wanted, expert_M = grouped_matmul_float64(x, w, sizes)
    # Sums of up to 42 products of normal numbers: the error is some epsilons (6e-8) of a sum of
    # magnitudes of about 30.
    np.testing.assert_allclose(y, wanted, atol=2e-5)
    np.testing.assert_allclose(
        d_x, [w[e] @ d for d, e in zip(d_y, expert_M, strict=True)], atol=2e-5
    )
    for e in range(5):
        np.testing.assert_allclose(
            d_w[e], x[expert_M == e].T.astype(np.float64) @ d_y[expert_M == e], atol=2e-5
        )


@pytest.mark.parametrize("platform, rows", [("cpu", 4), ("cpu", 9), ("cpu", 90), ("gpu", 42)])
def test_all_forms_of_grouped_matmul_agree(platform, rows):
    random = np.random.default_rng(1)
    sizes = np.bincount(random.integers(0, 5, rows), minlength=5)
    x, w = (
        random.standard_normal((rows, 6)).astype(np.float32),
        random.standard_normal((5, 6, 7)).astype(np.float32),
    )
    wanted, expert_M = grouped_matmul_float64(x, w, sizes)
    run = jax.jit(lambda x, w, *rows: grouped_matmul(x, w, ExpertRows(*rows), platform))
    np.testing.assert_allclose(run(x, w, expert_M, sizes), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "dtype, rows, from_rows",
    [("int8", 7, None), ("bfloat16", 7, None), ("int8", 20, 8), ("bfloat16", 20, 8)],
)
def test_low_precision_experts_equal_their_dequantized_form(dtype, rows, from_rows):
    graph, state = drawn(
        lambda: ExpertLinear(3, 6, (2, 4), dtype=jnp.float32, platform="cpu", rngs=nnx.Rngs(0))
    )
    random = np.random.default_rng(0)
    expert_M = np.sort(random.integers(0, 3, rows))
    x, groups = (
        random.standard_normal((rows, 6)).astype(np.float32),
        ExpertRows(expert_M, np.bincount(expert_M, minlength=3)),
    )

    @jax.jit
    def run(state, x, groups):
        narrow = LowPrecisionExperts(nnx.merge(graph, state), dtype, from_rows)
        return narrow(x, groups), narrow.dequantize().kernel[...]

    found, same = map(np.asarray, run(state, x, groups))
    wanted = np.array(
        [
            np.tensordot(row, same[e], 1)
            for row, e in zip(x.astype(np.float64), expert_M, strict=True)
        ]
    )
    np.testing.assert_allclose(found, wanted, atol=2e-6 if from_rows is None else 0.03)
    kernel = np.asarray(state["kernel"][...])
    assert np.abs(same - kernel).max() < 0.01 * np.abs(kernel).max()


def test_router_and_its_losses():
    """Scores, choice with a bias, balance (Fedus et al. 2022, eq. 4) and z (Zoph et al. 2022, eq.
    5) in NumPy.
    """
    model_config = config(experts=ExpertsConfig(5, 2, bias=True))
    layer = nnx.merge(
        *drawn(
            lambda: MixtureOfExperts(
                model_config, dtype=jnp.float32, rngs=nnx.Rngs(0), out_gain=1.0
            )
        )
    )
    x_ND = np.random.default_rng(0).standard_normal((30, 12)).astype(np.float32)
    layer.router.bias[...] = jnp.asarray(np.float32([0.0, 0.3, -0.3, 0.0, 0.1]))
    experts_NK, weights_NK, routing = jax.jit(lambda router, x_ND: router(x_ND, SINGLE_DEVICE))(
        layer.router, x_ND
    )
    logits_NE = x_ND.astype(np.float64) @ np.asarray(layer.router.kernel[...], np.float64)
    scores_NE = np.exp(logits_NE) / np.exp(logits_NE).sum(axis=1, keepdims=True)
    order_NE = np.argsort(-(scores_NE + np.asarray(layer.router.bias[...])), axis=1)
    np.testing.assert_array_equal(experts_NK, order_NE[:, :2])
    taken_NK = np.take_along_axis(scores_NE, order_NE[:, :2], axis=1)
    np.testing.assert_allclose(
        weights_NK, taken_NK / taken_NK.sum(axis=1, keepdims=True), atol=5e-6
    )
    counts_E = np.bincount(order_NE[:, :2].ravel(), minlength=5)
    np.testing.assert_array_equal(routing.counts_E, counts_E)
    np.testing.assert_allclose(
        routing.balance, 5 * np.sum(counts_E / 60 * scores_NE.mean(axis=0)), rtol=1e-5
    )
    np.testing.assert_allclose(
        routing.z, np.mean(np.log(np.exp(logits_NE).sum(axis=1)) ** 2), rtol=1e-5
    )


def test_router_whose_sigmoid_scores_are_all_zero_has_finite_results_and_gradients():
    """The logistic function of −200 is 0 in float32."""
    model_config = config(experts=ExpertsConfig(5, 2, score="sigmoid", normalize=True))
    graph, state = drawn(lambda: moe.Router(model_config, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda kernel: jnp.full_like(kernel, -200 / 12), state)

    def total(state):
        _, weights_NK, routing = nnx.merge(graph, state)(
            np.ones((3, 12), np.float32), SINGLE_DEVICE
        )
        return jnp.sum(weights_NK) + routing.balance, weights_NK

    (balance, weights_NK), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(state)
    assert balance == 0 and not np.any(weights_NK)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_gradients_equal_those_of_a_dense_sum():
    """A sum over every expert with zero weights for unused ones. The bias and experts without
    tokens get no gradient.
    """
    model_config = config(experts=ExpertsConfig(6, 2, bias=True))
    layer = nnx.merge(
        *drawn(
            lambda: MixtureOfExperts(
                model_config, dtype=jnp.float32, rngs=nnx.Rngs(1), out_gain=1.0
            )
        )
    )
    x_BTD = np.random.default_rng(0).standard_normal((1, 12, 12)).astype(np.float32)
    # The last expert is never chosen.
    layer.router.bias[...] = jnp.asarray(np.float32([0, 0, 0, 0, 0, -9]))
    graph, state = nnx.split(layer)

    def loss(state):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x_BTD, SINGLE_DEVICE)[0]))

    def dense(state):
        router, experts = state["router"], state["experts"]
        scores_NE = jax.nn.softmax(x_BTD[0] @ router["kernel"][...])
        taken_NE = jnp.argsort(jnp.argsort(-(scores_NE + router["bias"][...]))) < 2
        weights_NE = jnp.where(taken_NE, scores_NE, 0) / jnp.sum(
            jnp.where(taken_NE, scores_NE, 0), axis=1, keepdims=True
        )
        both = jnp.einsum("nd,edgf->negf", x_BTD[0], experts["gate_up"]["kernel"][...])
        y_NED = jnp.einsum(
            "nef,efd->ned",
            jax.nn.silu(both[:, :, 0]) * both[:, :, 1],
            experts["down"]["kernel"][...],
        )
        return jnp.sum(jnp.sin(jnp.einsum("ned,ne->nd", y_NED, weights_NE)))

    (ours, mine), (theirs, wanted) = (jax.jit(jax.value_and_grad(f))(state) for f in (loss, dense))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max())),
        mine,
        wanted,
    )
    mine = jax.tree.map(np.asarray, nnx.to_pure_dict(mine))
    assert not np.any(mine["router"]["bias"]) and not np.any(mine["experts"]["down"]["kernel"][5])

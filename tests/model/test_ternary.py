"""Ternary projections: rounding, scales, the straight-through gradient, weights that no longer
change.

`test_forward.py` compares the logits of whole models with the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import ExpertsConfig
from dantinox.generation.decode.low_precision_layers import LowPrecisionLinear, TernaryIntegers
from dantinox.generation.decode.prepared_model import permute_heads, prepare
from dantinox.kernels import load_kernels
from dantinox.model.layers import FixedTernaryLinear, TernaryLinear
from dantinox.model.moe import ExpertRows, FixedTernaryExperts, TernaryExpertLinear
from dantinox.model.ternary import (
    magnitude_with_scale,
    quantize_inputs,
    quantize_weights,
    ternary_matrix,
    weight_scales,
)

from .builder import PLACES, TOKENS, build, config, quick

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return np.float32(RANDOM.standard_normal(shape))


def rounded(x: np.ndarray) -> np.ndarray:
    """Returns inputs `[N, I]` as multiples of max |x| / 127, in float64."""
    step = np.abs(np.float64(x)).max(-1, keepdims=True) / 127
    return np.rint(x / step) * step


def ternary(w: np.ndarray) -> np.ndarray:
    """Returns one matrix as −1, 0 or 1 times its mean absolute value, in float64."""
    scale = np.abs(np.float64(w)).mean()
    return np.clip(np.rint(w / scale), -1, 1) * scale


def run_backward(linear: nnx.Module, x: np.ndarray, d_y: np.ndarray, *rows: ExpertRows):
    """Returns the output of a projection, and the gradients of its kernel and input; `d_y` is the
    gradient of the output.
    """
    graph, state = nnx.split(linear)

    @quick
    def run(state, x, d_y):
        y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, *rows), state, x)
        d_state, d_x = backward(d_y)
        return y, d_state.kernel[...], d_x

    return run(state, x, d_y)


def test_inputs_are_rounded_to_even_integers_per_token():
    x = np.float32(
        [[127, 0.5, 1.5, 2.5, -0.5, -126.5], [0, 0, 0, 0, 0, 0], [0, -1e-6, 1e-5, 5e-6, 0, 0]]
    )
    q, factor = quantize_inputs(x)
    # The factor of the last two rows is 127 / 1e-5, because their largest values are at most 1e-5.
    np.testing.assert_array_equal(q, [[127, 0, 2, 2, 0, -126], [0] * 6, [0, -13, 127, 64, 0, 0]])
    np.testing.assert_allclose(factor, [1, 127e5, 127e5], rtol=1e-6)
    q, factor = quantize_inputs(np.float32([[[1, 2], [-4, 127]]]), axes=2)  # a token is a matrix
    np.testing.assert_array_equal(q, [[[1, 2], [-4, 127]]])
    np.testing.assert_array_equal(factor, [1])


def test_weights_are_rounded_to_even_per_matrix():
    # The middles 0.5 and −0.5 become 0; 1.5 and 2 are limited to 1.
    w = np.float32([[0.5, 1.5, 2.0, 0.0], [-0.5, -1.5, -0.25, -1.75]])
    np.testing.assert_array_equal(weight_scales(w), [[1]])
    np.testing.assert_array_equal(
        quantize_weights(w, weight_scales(w)), [[0, 1, 1, 0], [0, -1, 0, -1]]
    )
    np.testing.assert_array_equal(weight_scales(np.zeros((3, 2), np.float32)), np.float32([[1e-5]]))


def test_every_part_has_its_own_scale():
    w = normal(6, 2, 5, 4)  # [inputs, key heads, 3 queries and the key and the value, head size]
    expected = [np.abs(np.float64(part)).mean() for part in (w[:, :, :3], w[:, :, 3], w[:, :, 4])]
    found = weight_scales(w, (3, 1, 1))
    assert found.shape == (1, 1, 5, 1)
    np.testing.assert_allclose(found[0, 0, :, 0], np.repeat(expected, (3, 1, 1)), rtol=1e-6)


def test_queries_alone_are_one_matrix():
    """A layer that reads the keys and values of another layer has only queries."""
    w = normal(6, 2, 3, 4)
    np.testing.assert_allclose(
        weight_scales(w, (3,))[0, 0, :, 0], [np.abs(np.float64(w)).mean()] * 3, rtol=1e-6
    )


def test_scale_of_weights_of_one_magnitude_is_exact():
    """This is how packed weights are imported: their mean must be their scale, to the last bits of
    float32.
    """
    integers = RANDOM.choice([-1, 0, 1], (300, 500))
    magnitude = magnitude_with_scale(0.1717, np.count_nonzero(integers), integers.size)
    assert (
        magnitude == np.float32(0.1717 / np.mean(integers != 0))
        and magnitude_with_scale(0.1717, 0, 6) == 0
    )
    found = float(jax.jit(weight_scales)(magnitude * np.float32(integers)).item())
    assert abs(found / 0.1717 - 1) < 3 * 2**-24


def test_ternary_matrix_is_the_integers_times_the_scale():
    w = normal(6, 8)
    np.testing.assert_allclose(
        ternary_matrix(w), ternary(w), rtol=48 * 2**-24
    )  # the float32 sum of 48 values


@pytest.mark.parametrize("parts", [(), (2, 1, 1)])
def test_output_and_gradients(parts):
    """y = x_q W_q, d_x = d_y W_qᵀ and d_W = x_qᵀ d_y, with the rounded inputs x_q and the ternary
    weights W_q.
    """
    x, d_y, kernel = normal(5, 7), normal(5, 4, 3), normal(7, 4, 3)
    linear = TernaryLinear((7,), (4, 3), parts=parts, dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.kernel = nnx.Param(jnp.asarray(kernel))
    y, d_w, d_x = run_backward(linear, x, d_y)
    matrices = np.split(kernel, np.cumsum(parts)[:-1], axis=1) if parts else [kernel]
    w = np.concatenate([ternary(matrix) for matrix in matrices], axis=1)
    np.testing.assert_allclose(y, np.einsum("NI,IAB->NAB", rounded(x), w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_x, np.einsum("NAB,IAB->NI", d_y, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_w, np.einsum("NI,NAB->IAB", rounded(x), d_y), rtol=1e-5, atol=1e-5)


def test_gradients_of_experts():
    x, d_y, kernel = normal(6, 7), normal(6, 2, 3), normal(2, 7, 2, 3)
    experts = np.array([0, 0, 0, 0, 1, 1])
    linear = TernaryExpertLinear(2, 7, (2, 3), dtype=jnp.float32, platform="cpu", rngs=nnx.Rngs(0))
    linear.kernel = nnx.Param(jnp.asarray(kernel))
    rows = ExpertRows(jnp.asarray(experts), jnp.asarray([4, 2]))
    y, d_w, d_x = run_backward(linear, x, d_y, rows)
    w = np.array(
        [np.stack([ternary(matrix[:, 0]), ternary(matrix[:, 1])], 1) for matrix in kernel]
    )[experts]
    np.testing.assert_allclose(y, np.einsum("NI,NIAB->NAB", rounded(x), w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_x, np.einsum("NAB,NIAB->NI", d_y, w), rtol=1e-5, atol=1e-5)
    expected = np.einsum("NE,NI,NAB->EIAB", np.eye(2)[experts], rounded(x), d_y)
    np.testing.assert_allclose(d_w, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(FixedTernaryExperts(linear)(x, rows), linear(x, rows))


def test_every_dtype_of_fixed_weights_gives_the_same_products():
    """The sums over integers are exact, and int8 weights have a scale of 1/127, which is not."""
    x = normal(3, 64)
    linear = TernaryLinear(
        (64,), (2, 8), parts=(1, 1), dtype=jnp.float32, bias=True, rngs=nnx.Rngs(1)
    )
    linear.bias = nnx.Param(jnp.asarray(normal(2, 8)))
    expected = linear(x)
    for dtype in ("float32", "bfloat16", "int8"):
        fixed = FixedTernaryLinear(linear)
        np.testing.assert_array_equal(fixed(x), expected)
        fixed.integers = LowPrecisionLinear(fixed.integers, dtype)
        np.testing.assert_allclose(
            fixed(x), expected, rtol=1e-5 if dtype == "int8" else 0, atol=1e-6 * (dtype == "int8")
        )


def test_weights_of_two_bits_give_the_same_products():
    """The sums of both are exact, so the results are equal to the last bit."""
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)
    built = build(config(projections="ternary", qkv_bias=True))
    model = prepare(built.model(), matmul_kernel="native")
    exact = prepare(built.model(), "float32", matmul_kernel="xla")
    x = normal(2, 7, built.model().config.dim)
    for order in (((0, 1), (0, 1)), ((1, 0), (1, 0))):
        pairs = [permute_heads(one, order).blocks[0].attention for one in (model, exact)]
        packed, plain = (attention.qkv for attention in pairs)
        assert isinstance(packed.integers, TernaryIntegers) and not isinstance(
            plain.integers, TernaryIntegers
        )
        np.testing.assert_array_equal(packed(x), plain(x))
        inputs = normal(2, 7, *plain.shape_out[:1], plain.shape_out[1] - 2, plain.shape_out[2])
        np.testing.assert_array_equal(pairs[0].out(inputs), pairs[1].out(inputs))


@pytest.mark.parametrize("changes", [{"sub_norms": True}, {"experts": ExpertsConfig(3, 2)}])
def test_prepared_models_compute_the_same(changes):
    built = build(config(projections="ternary", qkv_bias=True, **changes))
    expected, _ = built.run(built.state, TOKENS, PLACES)
    prepared = prepare(built.model(), "float32")
    assert not any(
        isinstance(node, TernaryLinear | TernaryExpertLinear)
        for _, node in nnx.iter_graph(prepared)
    )
    for model in (prepared, permute_heads(prepared, ((1, 0), (1, 0)))):
        logits = quick(lambda model, *inputs: model(*inputs)[0])(model, TOKENS, PLACES)
        np.testing.assert_allclose(logits, expected, atol=2e-5)

"""Products with ternary weights: integer products against NumPy's, and the conversion of float32
rows to integers.
"""

import jax
import numpy as np
import pytest

from dantinox.interop.gguf.ggml_quantize import quantize
from dantinox.kernels import matmul, pack_ternary, ternary_matmul, unpack_ternary

from .test_packed_matmul import needs_kernels

SHAPES = (  # rows, outputs, inputs
    (1, 1, 1),
    (1, 5, 256),
    (2, 50, 300),
    (3, 33, 768),
    (4, 24, 2048),
    (5, 3, 31),
    (6, 97, 512),
    (7, 26, 1024),
    (8, 61, 2304),
    (37, 49, 640),
    (0, 3, 64),
    (3, 0, 64),
)


def packed(weights):
    """Returns the layout of packed weights, computed bit by bit."""
    outputs, inputs = weights.shape
    raw = np.zeros((outputs, -(-inputs // 256) * 64), np.uint8)
    codes = np.full((outputs, raw.shape[1] * 4), 1)
    codes[:, :inputs] += weights
    for i in range(codes.shape[1]):
        half, rest = divmod(i, 128)
        raw[:, 32 * half + rest % 32] |= (codes[:, i] << 2 * (rest // 32)).astype(np.uint8)
    return raw


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(0)
    found = []
    for rows, outputs, inputs in SHAPES:
        weights = rng.integers(-1, 2, (outputs, inputs)).astype(np.int8)
        found.append((rng.integers(-128, 128, (rows, inputs)).astype(np.int8), weights))
    # The largest sums: 4,096 products of 128.
    found.append(
        (
            np.full((9, 4096), -128, np.int8),
            np.repeat(np.array([[1], [-1], [0]], np.int8), 4096, axis=1),
        )
    )
    return found


def test_the_layout_of_packed_weights(cases):
    weights = [w for _, w in cases if w.size]
    raws = jax.jit(lambda weights: [pack_ternary(w) for w in weights])(weights)
    back = jax.jit(
        lambda raws: [unpack_ternary(raw, w.shape[1]) for raw, w in zip(raws, weights, strict=True)]
    )(raws)
    for raw, again, w in zip(raws, back, weights, strict=True):
        np.testing.assert_array_equal(raw, packed(w))
        np.testing.assert_array_equal(again, w)


@pytest.mark.parametrize("native", [True, False], ids=["native", "XLA"])
def test_integer_products_are_exact(native, cases):
    if native:
        needs_kernels()
    chosen = cases if native else [cases[i] for i in (3, 5, -1)]
    pairs = [(x, packed(w)) for x, w in chosen]
    for y, (x, w) in zip(
        jax.jit(lambda pairs: [ternary_matmul(*pair, native=native) for pair in pairs])(pairs),
        chosen,
        strict=True,
    ):
        assert y.dtype == np.int32
        np.testing.assert_array_equal(y, x.astype(np.int64) @ w.astype(np.int64).T)


def test_batched_integer_products_are_one_call(cases):
    needs_kernels()
    x, w = cases[3]
    run = jax.jit(jax.vmap(lambda x, raw: ternary_matmul(x, raw, native=True), in_axes=(0, None)))
    batch = np.stack([x, -x, x[::-1]])
    assert run.lower(batch, packed(w)).as_text().count("stablehlo.custom_call") == 1
    np.testing.assert_array_equal(
        run(batch, packed(w)), batch.astype(np.int64) @ w.T.astype(np.int64)
    )


@pytest.mark.parametrize(
    ("x", "raw", "message"),
    [
        (np.zeros((2, 8), np.float32), np.zeros((3, 64), np.uint8), "rows in int8"),
        (np.zeros((2, 257), np.int8), np.zeros((3, 64), np.uint8), "rows of 257 inputs"),
        (np.zeros((2, 256), np.int8), np.zeros((3, 66), np.uint8), "66 bytes"),
    ],
)
def test_operands_that_do_not_fit_are_errors(x, raw, message):
    with pytest.raises(ValueError, match=message):
        ternary_matmul(x, raw)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_float32_rows_are_rounded_to_multiples_of_a_power_of_two(kind):
    """In the native kernel. Integers below 2²² are such multiples, so their products are exact as
    long as float32 holds them.
    """
    needs_kernels()
    rng = np.random.default_rng(1)
    weights = rng.integers(-1, 2, (30, 768)) * 0.25
    weights[:, ::256] = 0.25  # every block has a value, so that its scale is 0.25
    raw = quantize(kind, weights.astype(np.float32).reshape(-1)).reshape(30, -1)
    whole = rng.integers(-1000, 1001, (9, 768)).astype(np.float32)
    whole[4] *= np.float32(2.0**-90)
    whole[5] *= np.float32(2.0**90)
    # The second input is below half of 2⁻²² · 2, the unit of its block.
    small = np.zeros((1, 768), np.float32)
    small[0, :2], small[0, 256:258] = (1, 2.0**-23), (1, 2.0**-21)
    broken = np.ones((4, 768), np.float32)
    broken[1, 3], broken[2, 700] = np.nan, np.inf
    y, y_small, y_broken = jax.jit(
        lambda rows, raw: [matmul(x, raw, kind, native=True) for x in rows]
    )((whole, small, broken), raw)
    np.testing.assert_array_equal(y, (whole.astype(np.float64) @ weights.T).astype(np.float32))
    kept = small.astype(np.float64)
    kept[0, 1] = 0
    np.testing.assert_array_equal(y_small, (kept @ weights.T).astype(np.float32))
    assert np.isfinite(y_broken).all(axis=1).tolist() == [True, False, False, True]
    assert np.isnan(y_broken[1:3]).all()

"""nf4 against bitsandbytes, against NumPy, and the error and bytes of a matrix."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.model.frozen_weights import frozen_tensordot
from dantinox.model.nf4 import NF4_VALUES, dequantize_nf4, nf4_shapes, quantize_nf4, zero_nf4

PEER = np.load(Path(__file__).with_name("nf4.npz"))  # `make_nf4.py`
dequantize = jax.jit(dequantize_nf4, static_argnames="shape_in")


def reference_codes(w_IO):
    """The index of the nearest value of every weight, by its distance to all 16, and the magnitudes
    of the blocks.
    """
    blocks = [w_IO[start : start + 64].astype(np.float32) for start in range(0, len(w_IO), 64)]
    magnitudes = np.array([np.abs(block).max(axis=0) for block in blocks])
    normalized = np.concatenate(
        [b / np.where(m > 0, m, 1) for b, m in zip(blocks, magnitudes, strict=True)]
    )
    distance = np.abs(
        normalized[..., None].astype(np.float64) - np.float32(NF4_VALUES).astype(np.float64)
    )
    return distance.argmin(axis=-1), magnitudes


def unpacked(codes, inputs):
    """The codes of the weights in order, from the bytes of `quantize_nf4`."""
    ordered = np.concatenate([codes & 15, codes >> 4], axis=1)
    return ordered.reshape(-1, *codes.shape[2:])[:inputs]


def dequantized_magnitudes(parts):
    steps = np.repeat(parts["scale_step"], 256)[: parts["scale"].size].reshape(parts["scale"].shape)
    return parts["scale"].astype(np.float32) * steps + parts["scale_mean"]


def test_values_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(np.float32(NF4_VALUES), PEER["values"])


def test_codes_and_magnitudes_equal_those_of_bitsandbytes():
    w_IO = PEER["w_OI"].T
    parts = quantize_nf4(w_IO, 1)
    pairs = PEER["packed"].reshape(5, -1)
    peer_OI = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(5, 192)
    np.testing.assert_array_equal(unpacked(parts["codes"], 192), peer_OI.T)
    magnitudes = PEER["magnitudes"].reshape(5, 3).T
    step = parts["scale_step"][0]
    assert np.abs(dequantized_magnitudes(parts) - magnitudes).max() <= step / 2 * 1.00001
    without = {
        "scale": parts["scale"] * 0,
        "scale_step": parts["scale_step"] * 0,
        "scale_mean": np.float32(1),
    }
    values = np.asarray(dequantize(parts["codes"], **without, shape_in=(192,)))
    np.testing.assert_array_equal(
        values * np.repeat(magnitudes, 64, axis=0), PEER["dequantized_OI"].T
    )


@pytest.mark.parametrize(
    ("shape_in", "shape_out"),
    [((128,), (2, 3, 7)), ((3, 50), (300,)), ((5,), (2,))],
    ids=["blocks", "padded", "small"],
)
def test_codes_and_values_equal_those_of_numpy(shape_in, shape_out):
    inputs, outputs = int(np.prod(shape_in)), int(np.prod(shape_out))
    w = np.random.default_rng(0).standard_normal((*shape_in, *shape_out)).astype(np.float32)
    parts = quantize_nf4(w, len(shape_in))
    assert {name: (a.shape, a.dtype) for name, a in parts.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in nf4_shapes(inputs, shape_out).items()
    }
    codes, magnitudes = reference_codes(w.reshape(inputs, outputs))
    np.testing.assert_array_equal(unpacked(parts["codes"].reshape(-1, 32, outputs), inputs), codes)
    flat, rounded = magnitudes.reshape(-1), []
    mean = np.float32(flat.astype(np.float64).mean())
    for start in range(0, len(flat), 256):  # groups of 256 magnitudes
        group = flat[start : start + 256] - mean
        step = np.abs(group).max() / np.float32(127)
        rounded.append(np.round(group / step).astype(np.float32) * step + mean)
    rounded = np.concatenate(rounded).reshape(magnitudes.shape)
    np.testing.assert_array_equal(dequantized_magnitudes(parts).reshape(magnitudes.shape), rounded)
    expected = np.float32(NF4_VALUES)[codes] * np.repeat(rounded, 64, axis=0)[:inputs]
    fused = dequantize(**parts, shape_in=shape_in)  # rounds a product less
    assert fused.shape == w.shape and fused.dtype == jnp.float32
    np.testing.assert_allclose(fused, expected.reshape(w.shape), rtol=1e-6, atol=1e-6)
    if w.size == 10:  # every operation without jit is a program
        found = dequantize_nf4(
            **{name: jnp.asarray(a) for name, a in parts.items()}, shape_in=shape_in
        )
        np.testing.assert_array_equal(found.reshape(inputs, outputs), expected)


def test_error_and_size_of_a_normal_matrix():
    """The error of a weight is at most half the largest gap of the values, plus that of the
    magnitudes.
    """
    w = np.random.default_rng(1).standard_normal((1024, 768)).astype(np.float32)
    parts = quantize_nf4(w, 1)
    found = np.asarray(dequantize(**parts, shape_in=(1024,)))
    magnitudes = np.repeat(np.abs(w.reshape(16, 64, 768)).max(axis=1), 64, axis=0)
    bound = magnitudes * np.diff(NF4_VALUES).max() / 2 + parts["scale_step"].max() / 2
    assert np.all(np.abs(found - w) <= bound * 1.00001)
    relative = np.sqrt(np.mean((found - w) ** 2) / np.mean(w**2))
    assert 0.08 < relative < 0.1, relative  # .091
    assert sum(a.nbytes for a in parts.values()) / w.nbytes == pytest.approx(
        (4 + 8 / 64 + 32 / (64 * 256)) / 32, rel=1e-4
    )


def test_zeros_stay_zero():
    w = np.zeros((64, 3), np.float32)
    w[:, 1] = 0.5
    for parts in (
        quantize_nf4(w, 1),
        {name: np.asarray(a) for name, a in zero_nf4(64, (3,)).items()},
    ):
        assert not np.any(np.asarray(dequantize(**parts, shape_in=(64,)))[:, ::2])


def test_product_and_its_derivative_use_the_dequantized_matrix_which_no_pass_keeps():
    random = np.random.default_rng(2)
    w, x, d_y = (
        random.standard_normal(s).astype(np.float32) for s in ((2, 96, 4, 5), (3, 2, 96), (3, 4, 5))
    )
    parts = quantize_nf4(w, 2)
    wide = np.asarray(dequantize(**parts, shape_in=(2, 96)), np.float64)

    def product(x, parts):
        return frozen_tensordot(x, parts, (2, 96), jnp.float32)

    @jax.jit
    def run(x, parts, d_y):
        y, back = jax.vjp(lambda x: product(x, parts), x)
        return y, back(d_y)[0]

    y, d_x = run(x, parts, d_y)
    np.testing.assert_allclose(y, np.tensordot(x, wide, 2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(d_x, np.tensordot(d_y, wide, ((1, 2), (2, 3))), rtol=1e-5, atol=1e-4)
    kept = jax.tree.leaves(jax.eval_shape(lambda x, parts: jax.vjp(product, x, parts)[1], x, parts))
    assert all(leaf.size * leaf.dtype.itemsize < w.nbytes / 4 for leaf in kept), kept

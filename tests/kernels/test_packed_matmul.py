"""The native kernels against float64 products of the same weights."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.interop.ggml_types import TYPES, dequantize
from dantinox.kernels import FORMATS, load_kernels, matmul, unpack

KINDS = ("float32", "bfloat16", "int8", *FORMATS)
GGML = [kind for kind in FORMATS if kind in TYPES]


def needs_kernels():
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)


def random_blocks(rng, kind, rows, blocks):
    """Returns random packed rows with finite scales."""
    layout = TYPES[kind].block if kind in TYPES else np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 32)])
    raw = rng.integers(0, 256, (rows * blocks, FORMATS[kind].bytes), dtype=np.uint8).view(layout).reshape(-1)
    for field in [name for name in ("d", "m", "dmin") if name in layout.names]:
        raw[field] = rng.standard_normal(len(raw)) * 0.1
    return raw.view(np.uint8).reshape(rows, -1)


def random_weights(rng, kind, outputs, inputs):
    """Returns weights for the kernel, their exact values in float64, and the `kind` argument of `matmul`."""
    if kind in FORMATS:
        raw = random_blocks(rng, kind, outputs, inputs // FORMATS[kind].values)
        return raw, np.asarray(unpack(kind, raw), np.float64), kind
    values = rng.integers(-128, 128, (outputs, inputs)) if kind == "int8" else rng.standard_normal((outputs, inputs))
    weights = np.asarray(jnp.asarray(values, kind))
    return weights, weights.astype(np.float64), None


def relative_error(y, x, weights):
    """Returns the largest error relative to the sum of the absolute products."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x) @ np.abs(weights).T
    return float(np.max(np.abs(np.asarray(y, np.float64) - x @ weights.T) / np.where(scale == 0, 1, scale), initial=0))


@pytest.mark.parametrize("kind", GGML)
def test_unpack_equals_the_decoder_of_files(kind):
    raw = random_blocks(np.random.default_rng(0), kind, 5, 3)
    np.testing.assert_array_equal(unpack(kind, raw), dequantize(kind, raw.reshape(-1)).reshape(5, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_float64(kind):
    needs_kernels()
    rng = np.random.default_rng(1)
    step = FORMATS[kind].values if kind in FORMATS else 1
    for rows, outputs, inputs in (
        (1, 1, 256),
        (2, 5, 1280),
        (3, 97, 512),
        (7, 24, 768),
        (8, 50, 1024),
        (16, 31, 256),
        (37, 61, 1536),
    ):
        inputs = inputs if step > 1 else inputs + rows  # odd sizes
        weights, exact, name = random_weights(rng, kind, outputs, inputs)
        x = rng.standard_normal((rows, inputs)).astype(np.float32)
        assert relative_error(matmul(x, weights, name, native=True), x, exact) < 1e-6, (rows, outputs, inputs)
        assert relative_error(matmul(x, weights, name), x, exact) < 1e-6, (rows, outputs, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_other_rows(kind):
    needs_kernels()
    rng = np.random.default_rng(2)
    weights, _, name = random_weights(rng, kind, 67, 2304)
    x = rng.standard_normal((43, 2304)).astype(np.float32)
    together = np.asarray(matmul(x, weights, name, native=True))
    for start, size in ((0, 1), (3, 1), (1, 2), (5, 3), (2, 4), (9, 5), (11, 8), (13, 15), (20, 16)):
        alone = np.asarray(matmul(x[start : start + size], weights, name, native=True))
        np.testing.assert_array_equal(alone, together[start : start + size])


@pytest.mark.parametrize("kind", [None, *FORMATS])
def test_bfloat16_rows(kind):
    needs_kernels()
    if not load_kernels().multiplies_bfloat16:
        pytest.skip("this CPU has no bfloat16 products")
    rng = np.random.default_rng(3)
    for rows, outputs, inputs in ((1, 7, 256), (5, 26, 512), (40, 49, 768)):
        weights, exact, name = random_weights(rng, kind or "bfloat16", outputs, inputs)
        x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.bfloat16)
        rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
        assert relative_error(matmul(x, weights, name, native=True), x, rounded) < 1e-6, (rows, outputs, inputs)


@pytest.mark.parametrize("shape", [(0, 3, 64), (3, 0, 64), (3, 5, 0), (1, 1, 1), (2, 3, 33)])
def test_empty_and_small_operands(shape):
    needs_kernels()
    R, O, I = shape  # noqa: E741
    x, w = np.full((R, I), 0.5, np.float32), np.full((O, I), 2, np.float32)
    np.testing.assert_array_equal(matmul(x, w, native=True), np.full((R, O), float(I), np.float32))


def test_nan_and_infinity_stay_in_their_rows():
    needs_kernels()
    x, w = np.ones((9, 70), np.float32), np.ones((30, 70), np.float32)
    x[2, 69], x[4, 3], w[5, 69] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        expected = x @ w.T
    np.testing.assert_array_equal(matmul(x, w, native=True), expected)


def test_slices_that_are_not_aligned():
    """XLA may pass any address; an operand inside a program is a view of a larger buffer."""
    needs_kernels()
    rng = np.random.default_rng(4)
    raw = random_blocks(rng, "Q4_0", 9, 5)

    @jax.jit
    def products(x, raw):
        return [matmul(x[:, o : o + 64], raw[o:, 18 * 2 : 18 * 4], "Q4_0", native=True) for o in range(3)]

    x = rng.standard_normal((3, 70)).astype(np.float32)
    exact = np.asarray(unpack("Q4_0", raw), np.float64)[:, 64:128]
    for o, y in enumerate(products(x, raw)):
        assert relative_error(y, x[:, o : o + 64], exact[o:]) < 1e-6


@pytest.mark.parametrize(
    ("x", "w", "kind"),
    [((2, 33), (4, 18), "Q4_0"), ((2, 64), (4, 18), "Q4_0"), ((2, 64), (4, 37), "Q4_0"), ((2, 256), (4, 145), "Q4_K")],
)
def test_wrong_sizes_are_errors(x, w, kind):
    needs_kernels()
    with pytest.raises(Exception, match="wrong size"):
        jax.block_until_ready(matmul(np.zeros(x, np.float32), np.zeros(w, np.uint8), kind, native=True))


def test_results_do_not_depend_on_the_number_of_threads(tmp_path):
    needs_kernels()
    code = f"""
import sys
import numpy as np
from dantinox.kernels import load_kernels, matmul
from tests.kernels.test_packed_matmul import random_weights
load_kernels()
rng = np.random.default_rng(5)
results = []
for kind in {KINDS}:
    weights, _, name = random_weights(rng, kind, 301, 768)
    x = rng.standard_normal((11, 768)).astype(np.float32)
    results += [np.asarray(matmul(x[:rows], weights, name, native=True)) for rows in (1, 11)]
np.save(sys.argv[1], np.concatenate(results))
"""
    outputs = []
    for threads in (1, 2, 4):
        path = tmp_path / f"{threads}.npy"
        environment = os.environ | {"NPROC": str(threads)}
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=environment)
        outputs.append(path.read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_native_products_can_be_batched(axes):
    needs_kernels()
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((4, 3, 40)).astype(np.float32), rng.standard_normal((4, 7, 40)).astype(np.float32)
    x, w = (a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True))
    found = jax.vmap(lambda x, w: matmul(x, w, native=True), in_axes=axes)(x, w)
    np.testing.assert_allclose(found, x @ np.swapaxes(w, -1, -2), rtol=1e-5, atol=1e-5)

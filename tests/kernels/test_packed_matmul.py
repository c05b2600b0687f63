"""The native kernels against float64 products of the same weights.

A program multiplies all shapes of all formats, because a program for each would take longer to
compile than to run.
"""

import os
import subprocess
import sys
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from dantinox.interop.gguf.ggml_types import TYPES, dequantize
from dantinox.kernels import FORMATS, load_kernels, matmul, native_unpack, unpack

KINDS = ("float32", "bfloat16", "int8", *FORMATS)
SHAPES = (  # rows, outputs, inputs
    (1, 1, 256),
    (2, 5, 1280),
    (3, 97, 512),
    (7, 24, 768),
    (8, 50, 1024),
    (16, 31, 256),
    (37, 61, 1536),
)
# Sums of at most 2,304 products in float32: the error is within some epsilons (6e-8) of the sum of
# the absolute products, because products are added in at least four lanes and their errors have
# random signs.
TOLERANCE = 1e-6


def needs_kernels():
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)


def needs_float16():
    """XLA cannot compile a conversion of float16 for a CPU without F16C, such as one with SSE4.2
    only.
    """
    try:
        jax.block_until_ready(jax.jit(lambda x: x.astype(np.float32))(np.ones(5, np.float16)))
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


def random_blocks(rng, kind, rows, blocks):
    """Returns random packed rows with finite scales."""
    layout = (
        TYPES[kind].block
        if kind in TYPES
        else np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 32)])
    )
    raw = (
        rng.integers(0, 256, (rows * blocks, FORMATS[kind].bytes), dtype=np.uint8)
        .view(layout)
        .reshape(-1)
    )
    for field in [name for name in ("d", "m", "dmin") if name in layout.names]:
        raw[field] = rng.standard_normal(len(raw)) * 0.1
    return raw.view(np.uint8).reshape(rows, -1)


def decoded(kind, raw):
    """Returns the float32 weights of packed rows, from the decoder of files; INT4 is Q4_1 with 64
    weights in a block.
    """
    if kind in TYPES:
        return dequantize(kind, raw.reshape(-1)).reshape(len(raw), -1)
    blocks = raw.reshape(-1, FORMATS[kind].bytes)
    scale, minimum = (
        np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32).T[:, :, None]
    )
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * codes + minimum).reshape(len(raw), -1)


def random_weights(rng, kind, outputs, inputs):
    """Returns weights for the kernel, their exact values in float64, and the `kind` argument of
    `matmul`.
    """
    if kind in FORMATS:
        raw = random_blocks(rng, kind, outputs, inputs // FORMATS[kind].values)
        return raw, decoded(kind, raw).astype(np.float64), kind
    values = (
        rng.integers(-128, 128, (outputs, inputs))
        if kind == "int8"
        else rng.standard_normal((outputs, inputs))
    )
    weights = values.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return weights, weights.astype(np.float64), None


def products(cases, native=True):
    """Returns rows · weightsᵀ of each `(rows, weights, kind)`, in one program."""
    kinds = [kind for _, _, kind in cases]
    run = jax.jit(
        lambda pairs: [
            matmul(*pair, kind, native=native) for pair, kind in zip(pairs, kinds, strict=True)
        ]
    )
    return [np.asarray(y) for y in run([(x, weights) for x, weights, _ in cases])]


def check_error(y, x, weights, name):
    """Compares products in float64, relative to the sum of the absolute products."""
    x = x.astype(np.float64)
    scale = np.abs(x) @ np.abs(weights).T
    worst = np.max(np.abs(y - x @ weights.T) / np.where(scale == 0, 1, scale), initial=0)
    assert worst < TOLERANCE, f"{name}: {worst}"


@pytest.mark.parametrize("native", [True, False], ids=["native", "XLA"])
def test_unpack_equals_the_decoder_of_files(native):
    """Bitwise, also where a compiler adds without rounding the product: the products are exact if
    an addition follows.
    """
    needs_kernels() if native else needs_float16()
    # 1,400 blocks of the largest format are enough for several threads.
    shapes = [(1, 1), (5, 3), (56, 25)] if native else [(5, 3)]
    rng = np.random.default_rng(0)
    raws = [(kind, random_blocks(rng, kind, *shape)) for kind in FORMATS for shape in shapes]

    def convert(kind, raw):
        return native_unpack(kind, raw, np.float32(0)) if native else unpack(kind, raw)

    kinds = [kind for kind, _ in raws]
    run = jax.jit(lambda arrays: list(map(convert, kinds, arrays)))
    for (kind, raw), found in zip(raws, run([raw for _, raw in raws]), strict=True):
        np.testing.assert_array_equal(found, decoded(kind, raw), err_msg=f"{kind}, {raw.shape}")


def test_vectorized_unpack():
    """Under `vmap`, the weights are converted once, or for each element if they differ."""
    needs_kernels()
    raw = random_blocks(np.random.default_rng(0), "Q4_K", 6, 1)
    numbers = np.zeros(3, np.float32)
    shared = jax.vmap(lambda after: native_unpack("Q4_K", raw, after))(numbers)
    separate = jax.vmap(partial(native_unpack, "Q4_K"))(raw.reshape(3, 2, -1), numbers)
    expected = decoded("Q4_K", raw)
    np.testing.assert_array_equal(shared, np.stack([expected] * 3))
    np.testing.assert_array_equal(separate, expected.reshape(3, 2, -1))


@pytest.mark.parametrize("native", [True, False], ids=["native", "XLA"])
def test_products_equal_float64(native):
    needs_kernels() if native else needs_float16()
    rng, cases, exact, names = np.random.default_rng(1), [], [], []
    for kind in KINDS:
        for rows, outputs, inputs in SHAPES if native else SHAPES[2:3]:
            inputs = inputs if kind in FORMATS else inputs + rows  # odd sizes
            weights, values, name = random_weights(rng, kind, outputs, inputs)
            cases.append((rng.standard_normal((rows, inputs)).astype(np.float32), weights, name))
            exact.append(values)
            names.append(f"{kind}, {rows} × {inputs} · {outputs}")
    for case, y, values, name in zip(cases, products(cases, native), exact, names, strict=True):
        check_error(y, case[0], values, name)


def test_rows_do_not_depend_on_other_rows():
    needs_kernels()
    rng, x = (
        np.random.default_rng(2),
        np.random.default_rng(3).standard_normal((43, 2304)).astype(np.float32),
    )
    for kind in KINDS:
        weights, _, name = random_weights(rng, kind, 67, 2304)
        parts = [
            (0, 43),
            (0, 1),
            (3, 1),
            (1, 2),
            (5, 3),
            (2, 4),
            (9, 5),
            (11, 8),
            (13, 15),
            (20, 16),
        ]
        together, *alone = products(
            [(x[start : start + size], weights, name) for start, size in parts]
        )
        for (start, size), found in zip(parts[1:], alone, strict=True):
            np.testing.assert_array_equal(
                found, together[start : start + size], err_msg=f"{kind}, {size} rows"
            )


def test_bfloat16_rows():
    needs_kernels()
    if not load_kernels().multiplies_bfloat16:
        pytest.skip("this CPU has no bfloat16 products")
    rng, cases, exact = np.random.default_rng(3), [], []
    for kind in ("bfloat16", *FORMATS):
        for rows, outputs, inputs in ((1, 7, 256), (5, 26, 512), (40, 49, 768)):
            weights, values, name = random_weights(rng, kind, outputs, inputs)
            cases.append(
                (rng.standard_normal((rows, inputs)).astype(ml_dtypes.bfloat16), weights, name)
            )
            exact.append(values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64))
    for (x, _, kind), y, values in zip(cases, products(cases), exact, strict=True):
        check_error(y, x, values, f"{kind}, {len(x)} rows")


def test_empty_and_small_operands():
    needs_kernels()
    shapes = [(0, 3, 64), (3, 0, 64), (3, 5, 0), (1, 1, 1), (2, 3, 33)]
    cases = [
        (np.full((rows, inputs), 0.5, np.float32), np.full((outputs, inputs), 2, np.float32), None)
        for rows, outputs, inputs in shapes
    ]
    for (rows, outputs, inputs), y in zip(shapes, products(cases), strict=True):
        np.testing.assert_array_equal(y, np.full((rows, outputs), float(inputs), np.float32))
    nothing = np.zeros((0, 2 * FORMATS["Q8_0"].bytes), np.uint8)
    assert native_unpack("Q8_0", nothing, np.float32(0)).shape == (0, 64)


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
    def run(x, raw):
        return [
            matmul(x[:, o : o + 64], raw[o:, 18 * 2 : 18 * 4], "Q4_0", native=True)
            for o in range(3)
        ]

    x = rng.standard_normal((3, 70)).astype(np.float32)
    exact = decoded("Q4_0", raw).astype(np.float64)[:, 64:128]
    for o, y in enumerate(run(x, raw)):
        check_error(y, x[:, o : o + 64], exact[o:], f"offset {o}")


@pytest.mark.parametrize(
    ("x", "w", "kind"),
    [
        ((2, 33), (4, 18), "Q4_0"),
        ((2, 64), (4, 18), "Q4_0"),
        ((2, 64), (4, 37), "Q4_0"),
        ((2, 256), (4, 145), "Q4_K"),
    ],
)
def test_wrong_sizes_are_errors(x, w, kind):
    needs_kernels()
    with pytest.raises(Exception, match="wrong size"):
        jax.block_until_ready(
            matmul(np.zeros(x, np.float32), np.zeros(w, np.uint8), kind, native=True)
        )


def products_of_all_formats():
    """Returns the bytes of products that are large enough for several threads."""
    rng, cases = np.random.default_rng(5), []
    for kind in KINDS:
        weights, _, name = random_weights(rng, kind, 301, 768)
        x = rng.standard_normal((11, 768)).astype(np.float32)
        cases += [(x[:rows], weights, name) for rows in (1, 11)]
    return np.concatenate(products(cases)).tobytes()


def products_with_threads(threads, path):
    code = """
import sys
from pathlib import Path
from dantinox.kernels import load_kernels
from tests.kernels.test_packed_matmul import products_of_all_formats
load_kernels()
Path(sys.argv[1]).write_bytes(products_of_all_formats())
"""
    environment = os.environ | {"NPROC": str(threads)}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=environment)
    return path.read_bytes()


def test_results_do_not_depend_on_the_number_of_threads(tmp_path):
    """Compared with one thread more than this process has."""
    needs_kernels()
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1) + 1
    assert products_with_threads(threads, tmp_path / "y") == products_of_all_formats()


@pytest.mark.slow
def test_one_two_and_four_threads_give_equal_results(tmp_path):
    needs_kernels()
    assert len({products_with_threads(threads, tmp_path / "y") for threads in (1, 2, 4)}) == 1


def test_native_products_can_be_batched():
    needs_kernels()
    rng = np.random.default_rng(6)
    x, w = (
        rng.standard_normal((4, 3, 40)).astype(np.float32),
        rng.standard_normal((4, 7, 40)).astype(np.float32),
    )
    all_axes = [(0, None), (None, 0), (0, 0)]
    operands = [
        tuple(a if axis == 0 else a[0] for a, axis in zip((x, w), axes, strict=True))
        for axes in all_axes
    ]

    @jax.jit
    def run(operands):
        return [
            jax.vmap(lambda x, w: matmul(x, w, native=True), in_axes=axes)(*pair)
            for axes, pair in zip(all_axes, operands, strict=True)
        ]

    for axes, pair, found in zip(all_axes, operands, run(operands), strict=True):
        expected = pair[0].astype(np.float64) @ np.swapaxes(pair[1], -1, -2)
        # 40 products of normal numbers.
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=str(axes))

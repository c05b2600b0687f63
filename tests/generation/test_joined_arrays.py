"""Packed arrays equal the arrays from which they were packed, bit for bit."""

import jax
import numpy as np
import pytest

from dantinox.generation.decode.joined_arrays import Layout, PackedParams, pack, unpack
from dantinox.sampling import SamplingParams


def test_unpacked_arrays_equal_the_packed_ones():
    random = np.random.default_rng(0)
    floats_B23 = np.frombuffer(random.bytes(3 * 2 * 3 * 4), np.float32).reshape(
        3, 2, 3
    )  # any bits, with NaN and infinities
    tree = {
        "floats": floats_B23,
        "flags": np.array([True, False, True]),
        "nested": (
            np.array([-1, 0, 2**31 - 1], np.int32),
            np.array([[0], [1], [2**32 - 1]], np.uint32),
            None,
        ),
        "empty": np.zeros((3, 0), np.float32),
    }
    layout = Layout.of(tree)
    words_BN = pack(tree)
    assert words_BN.shape == (3, layout.words) == (3, 6 + 1 + 1 + 1)
    found = jax.jit(unpack, static_argnums=1)(words_BN, layout)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for array, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert array.dtype == expected.dtype and array.shape == expected.shape
        assert np.asarray(array).tobytes() == expected.tobytes()


def test_rows_of_packed_parameters_are_those_of_the_parameters():
    rows = [
        {"temperature": 0.5, "top_k": 3, "seed": 7},
        {"greedy": True, "repetition_penalty": 1.25},
    ]
    params = jax.device_get(SamplingParams.build(rows, dynamic_order=True, vocab_size=40))
    found = jax.jit(PackedParams.unpack)(PackedParams.of(params))
    for name in ("numbers", "enabled", "seed", "order"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(params, name))
    assert found.plan == params.plan


@pytest.mark.parametrize("dtype", ["float16", "int64", "complex64"])
def test_other_dtypes_are_an_error(dtype):
    with pytest.raises(TypeError, match=f"array of {dtype} cannot be packed"):
        pack(np.zeros((1, 2), dtype))

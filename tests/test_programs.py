"""Compiled programs: shared traces, memory analysis and sizes of trees, compared with closed
forms.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dantinox.programs import (
    MemoryUsage,
    compile_program,
    memory_usage,
    separate_traces,
    shared_trace,
    tree_bytes,
)

TRACED = []


@shared_trace("power")
def scaled_power(x, power):
    TRACED.append(power)
    return 2 * x**power


def test_equal_arguments_share_one_trace():
    x = jnp.arange(5.0)
    TRACED.clear()
    result = jax.jit(
        lambda x: scaled_power(x, power=2) + scaled_power(x, power=2) + scaled_power(x, power=3)
    )(x)
    np.testing.assert_allclose(result, 4 * np.arange(5.0) ** 2 + 2 * np.arange(5.0) ** 3)
    assert TRACED == [2, 3]
    with separate_traces():
        TRACED.clear()
        jax.make_jaxpr(lambda x: scaled_power(x, power=2) + scaled_power(x, power=2))(x)
        assert TRACED == [2, 2]


def test_memory_usage_counts_donated_arguments_once():
    shape = jax.ShapeDtypeStruct((1000, 7), jnp.float32)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(shape).compile()
    used = memory_usage(program)
    assert used.arguments == used.output == used.alias == tree_bytes(shape) == 28_000
    assert used.peak == 28_000 + used.temp
    assert MemoryUsage(arguments=5, temp=3, output=4, alias=2).peak == 10


def test_tree_bytes_sums_arrays_and_shapes():
    tree = {
        "a": np.zeros((2, 3), np.int8),
        "b": [jax.ShapeDtypeStruct((4,), jnp.bfloat16), np.float64(1)],
    }
    assert tree_bytes(tree) == 6 + 8 + 8


def test_unknown_compiler_options_are_left_out():
    lowered = jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((2,), jnp.float32))
    program = compile_program(lowered, {"xla_cpu_no_such_option": "1"})
    np.testing.assert_allclose(program(jnp.ones(2)), [3, 3])

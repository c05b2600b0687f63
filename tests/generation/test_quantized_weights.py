"""Models with int8 and bfloat16 weights equal a model whose float weights NumPy has rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox import platform
from dantinox.config import UserError
from dantinox.generation import generate, prepare
from dantinox.generation import quantized_weights as weights_module
from dantinox.generation.decode import _generate_toks
from dantinox.generation.quantized_weights import LowPrecisionLinear, dequantize, quantize_int4, weight_bytes
from dantinox.generation.static_batch import StaticBatch
from dantinox.kernels import Kernels, load_kernels, unpack
from dantinox.model import Transformer, make_cache
from dantinox.model.layers import Linear
from dantinox.sampling import SamplingParams
from tests.error_texts import ERRORS

from . import builder

pytestmark = pytest.mark.slow

PROMPTS = builder.prompts(5, 9, 2, 7, 3, 8)
ROWS = [1, 4, 6]  # one row; the most rows that use matrix-vector loops in float32; more rows, with dequantized weights
TIED = builder.config(no_sink=True)
UNTIED = builder.config(weight_tying=False, activation="gelu", kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True)


def rounded(kernel, shape_in, weights):
    """Rounds in float64 NumPy: symmetric int8 with one scale per output, or bfloat16 by rounding half to even."""
    flat_IO = np.asarray(kernel, np.float64).reshape(int(np.prod(shape_in)), -1)
    if weights == "int8":
        scale_O = np.abs(flat_IO).max(axis=0) / 127
        flat_IO = np.round(flat_IO / scale_O) * scale_O
    else:
        bits = flat_IO.astype(np.float32).view(np.uint32)
        flat_IO = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return flat_IO.astype(np.float32).reshape(kernel.shape)


def rounded_model(model, weights):
    """Returns the same model with rounded projections; a tied table becomes a separate output layer."""
    copy = prepare(model, "float32")
    for _, node in list(nnx.iter_graph(copy)):
        if isinstance(node, Linear):
            node.kernel = nnx.Param(jnp.asarray(rounded(np.asarray(node.kernel[...]), node.shape_in, weights)))
    return copy


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        pytest.param(TIED, "int8", id="tied, int8"),
        pytest.param(UNTIED, "bfloat16", id="untied, bfloat16"),
        pytest.param(TIED, "bfloat16", id="tied, bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(UNTIED, "int8", id="untied, int8", marks=pytest.mark.exhaustive),
    ],
)
def test_low_precision_weights_equal_rounded_ones(config, weights):
    """Tests one row, four rows, and more rows than matrix-vector loops handle."""
    model = builder.model(config)
    low_precision, expected = prepare(model, weights, "float32"), rounded_model(model, weights)
    tokens, lengths = builder.padded(PROMPTS)
    reference, details = generate(expected, tokens, 12, greedy=True, prompt_lengths=lengths, logprobs=3, return_info=True)
    plain = np.asarray(jax.nn.log_softmax(builder.all_logits(model, PROMPTS[0])[-1]))
    assert np.abs(np.sort(plain)[::-1][:3] - details["info"].top_logprobs[0, 0]).max() > 5e-3, "rounding is expected to show"
    for rows in ROWS if config is TIED and weights == "int8" else ROWS[:1]:
        out, info = generate(
            low_precision, tokens[:rows], 12, greedy=True, prompt_lengths=lengths[:rows], logprobs=3, return_info=True
        )
        assert out.tolist() == reference[:rows].tolist()
        np.testing.assert_allclose(info["info"].top_logprobs, details["info"].top_logprobs[:rows], rtol=0, atol=5e-4)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_bfloat16_matmul_equals_rounded_operands(weights):
    """Compares with float64 NumPy: for few rows (matrix-vector loops, which keep the rows in float32) and for more rows."""
    linear = Linear((3, 8), (5, 2), dtype=jnp.float32, rngs=nnx.Rngs(3))
    model = builder.model(TIED)
    few = LowPrecisionLinear(linear, weights, 4)
    x = np.asarray(jax.random.normal(jax.random.key(1), (6, 3, 8)), np.float32)
    kernel = rounded(np.asarray(linear.kernel[...]), (3, 8), weights).astype(np.float64).reshape(24, 10)
    for rows, operand in ((3, x), (6, np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32))):
        expected = operand[:rows].reshape(rows, 24).astype(np.float64) @ kernel
        np.testing.assert_allclose(np.asarray(few(jnp.asarray(x[:rows]))).reshape(rows, 10), expected, atol=3e-6)
    head = dequantize(prepare(model, weights, "bfloat16")).head
    assert few.min_bfloat16_rows == 4 and head.kernel[...].dtype == jnp.dtype(weights)


def test_int8_weights_are_not_dequantized_for_bfloat16_matmul():
    """Prefill and decoding of many rows never create a float array as large as an int8 kernel."""
    model = prepare(builder.model(TIED), "int8", "bfloat16")
    assert dequantize(model) is model
    dequantized = dequantize(prepare(builder.model(TIED), "int8", "float32"))
    matrices = [leaf for leaf in jax.tree.leaves(nnx.state(dequantized)) if leaf.ndim > 1]
    assert {leaf.dtype.name for leaf in matrices} == {"float32"}


@pytest.mark.parametrize(("gain", "first"), [(0.1, None), (2.5, 9)])
def test_the_measured_gain_decides_on_a_cpu(monkeypatch, gain, first):
    monkeypatch.setattr(weights_module, "bfloat16_gain", lambda: gain)
    heads = {on: prepare(builder.model(TIED), "int8", on).head.min_bfloat16_rows for on in ("auto", "float32", "bfloat16")}
    assert heads == {"auto": first, "float32": None, "bfloat16": 9}
    accelerated = builder.model(builder.config(platform="gpu"))
    assert prepare(accelerated, "int8").head.min_bfloat16_rows == 1


def test_the_measurement_is_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "_measure_gain", lambda: 1.75)
    platform.bfloat16_gain.cache_clear()
    assert platform.bfloat16_gain() == 1.75
    monkeypatch.setattr(platform, "_measure_gain", lambda: 9.0)
    platform.bfloat16_gain.cache_clear()
    assert platform.bfloat16_gain() == 1.75
    (tmp_path / "dantinox" / "products.json").write_text("{")
    platform.bfloat16_gain.cache_clear()
    assert platform.bfloat16_gain() == 9.0
    platform.bfloat16_gain.cache_clear()


def test_measuring_works_inside_eval_shape(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    platform.bfloat16_gain.cache_clear()
    nnx.eval_shape(lambda: prepare(builder.model(TIED), "int8"))
    assert platform.bfloat16_gain() > 0
    platform.bfloat16_gain.cache_clear()


def decoding(model, params, use_cache=True):
    """Returns the decode program of one row, lowered."""
    session = StaticBatch(
        model, np.ones((1, 5), np.int32), np.array([5]), params,
        limits_B=np.array([20]), eos_ids=[[]], use_cache=use_cache,
    )  # fmt: skip
    cache = make_cache(model.config, 1, 32, model.dtype) if use_cache else None
    return _generate_toks.lower(model, cache, session.state, params, jnp.int32(32), use_cache=use_cache, report=None)


def test_without_a_cache_one_matmul_covers_the_sequence():
    """Matrix-vector loops are for few rows. For a whole sequence, they would make a program as long as the sequence."""
    params = SamplingParams.build({"greedy": True})
    products = [
        decoding(prepare(builder.model(TIED), weights, "float32"), params, use_cache=False).as_text().count("dot_general")
        for weights in ("float32", "int8")
    ]
    assert products[0] == products[1]


@pytest.mark.parametrize("weights", ["auto", "float32", "bfloat16", "int8"])
def test_the_original_model_is_unchanged(weights):
    model = builder.model(TIED)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    graph = nnx.split(model)[0]
    prepared = prepare(model, weights)
    after = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))
    assert nnx.split(model)[0] == graph and model.head is None and prepared is not model
    assert np.asarray(prepared.embed[...]).dtype == np.float32, "norms and embeddings keep their precision"


def test_weight_bytes():
    """A projected weight has one or two bytes; a scale, any other weight, and the parameter `one` of a projection have four."""
    model = builder.model(TIED)
    kernels = [node.kernel for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]
    outputs = sum(int(np.prod(k.shape)) for k in kernels)
    all_numbers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    V, D = builder.V, TIED.dim
    assert weight_bytes(model) == 4 * all_numbers
    assert weight_bytes(prepare(model, "float32")) == 4 * (all_numbers + V * D), "a tied table is copied"
    ones = len(kernels) + 1
    assert weight_bytes(prepare(model, "bfloat16")) == 4 * (all_numbers - outputs + ones) + 2 * (outputs + V * D)
    linears = [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]
    rows = sum(int(np.prod(linear.shape_out)) for linear in linears) + V
    assert weight_bytes(prepare(model, "int8")) == 4 * (all_numbers - outputs + ones) + (outputs + V * D) + 4 * rows


def test_unchanged_arrays_are_shared():
    model = builder.model(UNTIED)
    for weights in ("auto", "float32"):
        prepared = prepare(model, weights)
        assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(prepared)), strict=True))


def test_unknown_precision():
    with pytest.raises(UserError, match=ERRORS["generation_weights_must_be_one"]):
        prepare(builder.model(), "int3")


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "inputs", [4095, 4096, 6011, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (4097, 8192, 11008))]
)
def test_long_inputs_write_no_float32_weights(weights, inputs):
    """With 4096 or more inputs, XLA does not fuse the conversion into a matmul, which then costs ten times as much.

    The second call depends on the first one, as in a decoding loop.
    """
    linear = Linear((inputs,), (64,), dtype=jnp.float32, rngs=nnx.Rngs(0))
    low_precision = LowPrecisionLinear(linear, weights)
    x = np.random.default_rng(0).standard_normal((2, inputs)).astype(np.float32)
    graph, state = nnx.split(low_precision)

    def call(i, carry):
        state, x, y = carry
        return state, x, y + nnx.merge(graph, state)(x + 0 * y.sum())

    steps, zero = jnp.int32(2), jnp.zeros((2, 64))
    run = jax.jit(lambda *carry: jax.lax.fori_loop(0, carry[0], call, carry[1:])[2]).lower(steps, state, x, zero).compile()
    expected = 2 * x.astype(np.float64) @ np.asarray(low_precision.dequantize().kernel[...], np.float64)
    np.testing.assert_allclose(run(steps, state, x, zero), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert run.memory_analysis().temp_size_in_bytes < 64 * inputs


def test_a_row_of_zeros_stays_zero():
    model = builder.model(UNTIED, seed=1)
    model.head.kernel = nnx.Param(model.head.kernel[...].at[:, 3].set(0.0))
    low_precision = prepare(model, "int8").head
    assert np.isfinite(np.asarray(low_precision.scale[...])).all() and not np.asarray(low_precision.kernel[3]).any()


def test_decoding_writes_no_float32_copy_of_low_precision_weights(optimized):
    """Temporaries of a decode program are far smaller than the low-precision weights would be in float32."""
    config = builder.config(dim=256, hidden_dim=768, head_size=32, n_heads=8, vocab_size=1031)
    model = builder.model(config)
    low_precision = prepare(model, "int8")
    program = optimized(decoding(low_precision, SamplingParams.build({"greedy": True})))
    largest = max(node.kernel[...].nbytes for _, node in nnx.iter_graph(model) if isinstance(node, Linear))
    assert program.memory_analysis().temp_size_in_bytes < largest / 4


def test_the_table_of_a_bfloat16_model_is_looked_up_in_bfloat16():
    """The embedding is rounded to bfloat16 after the lookup anyway, but with learned positions only after they are added."""
    tokens_BT, positions_BT = jnp.asarray([PROMPTS[1]]), jnp.arange(len(PROMPTS[1]))[None]
    for position, kept in (("rope", "bfloat16"), ("learned", "float32")):
        model = builder.model(builder.config(dtype="bfloat16", position=position))
        prepared = prepare(model)
        assert prepared.embed[...].dtype == jnp.dtype(kept)
        np.testing.assert_array_equal(prepared.hidden(tokens_BT, positions_BT)[0], model.hidden(tokens_BT, positions_BT)[0])


def test_int4_blocks_are_close_to_the_weights():
    """The error of a uniform quantizer with 15 steps is at most half a step, plus the float16 rounding of scale and minimum."""
    weights = np.random.default_rng(0).standard_normal((6, 192)).astype(np.float32)
    for group, kind in ((64, "INT4"), (32, "Q4_1")):
        found = np.asarray(unpack(kind, quantize_int4(jnp.asarray(weights), group))).reshape(6, -1, group)
        blocks = weights.reshape(6, -1, group)
        span = blocks.max(-1) - blocks.min(-1)
        low, step = blocks.min(-1)[..., None], (span / 15)[..., None]
        plain = np.square(blocks - np.round((blocks - low) / step) * step - low).sum(-1)
        assert np.all(np.abs(found - blocks) <= 0.11 * span[..., None])
        assert np.all(np.square(found - blocks).sum(-1) <= plain * 1.01 + 1e-4)


def test_int4_blocks_of_equal_weights():
    for value in (0.0, 0.5, -2.0):
        assert np.all(np.asarray(unpack("INT4", quantize_int4(jnp.full((2, 64), value), 64))) == value)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 16, 17, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (3, 70))])
def test_native_kernels_multiply_the_same_weights(weights, rows):
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)
    linear = Linear((3, 64), (2, 25), dtype=jnp.float32, rngs=nnx.Rngs(0), bias=True)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 3, 64)), jnp.float32)
    native = LowPrecisionLinear(linear, weights, native=True)
    exact = np.asarray(native.dequantize().kernel[...], np.float64).reshape(192, 50)
    expected = np.asarray(x, np.float64).reshape(rows, 192) @ exact + np.asarray(linear.bias[...]).reshape(-1)
    np.testing.assert_allclose(np.asarray(native(x)).reshape(rows, 50), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(native(x), LowPrecisionLinear(linear, weights)(x), rtol=1e-5, atol=1e-5)


def test_matmul_kernel_native_needs_kernels(monkeypatch):
    model = Transformer(UNTIED, rngs=nnx.Rngs(0))
    assert not prepare(model, "int8").head.native  # a tiny model gains nothing
    monkeypatch.setattr("dantinox.generation.quantized_weights.load_kernels", lambda: Kernels(None, "no C++ compiler"))
    with pytest.raises(UserError, match=r"generation.matmul_kernel: no C\+\+ compiler"):
        prepare(model, "int8", matmul_kernel="native")

"""Models with int8 and bfloat16 weights equal a model whose float weights NumPy has rounded."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox import platform
from dantinox.config import UserError
from dantinox.generation import generate, prepare
from dantinox.generation.decode import prepared_model
from dantinox.generation.decode.generate_toks import Stepper, _generate_toks
from dantinox.generation.decode.low_precision_layers import LowPrecisionLinear, quantize_int4
from dantinox.generation.decode.prepared_model import dequantize, weight_bytes
from dantinox.generation.decode.uncached import UncachedStepper
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.kernels import Kernels, load_kernels, unpack
from dantinox.model import make_cache
from dantinox.model.layers import Linear
from dantinox.sampling import SamplingParams
from tests.error_texts import ERRORS

from . import builder

PROMPTS = builder.prompts(5, 9, 2, 7, 3, 8)
ROWS = [
    1,
    4,
    6,
]  # one row, the most rows of matrix-vector loops in float32, more rows
TIED = builder.config(no_sink=True)
UNTIED = builder.config(
    weight_tying=False, activation="gelu", kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True
)


def rounded(kernel, shape_in, weights):
    """Rounds in float64 NumPy: symmetric int8 with one scale per output, or bfloat16 by rounding
    half to even.
    """
    flat_IO = np.asarray(kernel, np.float64).reshape(int(np.prod(shape_in)), -1)
    if weights == "int8":
        scale_O = np.abs(flat_IO).max(axis=0) / 127
        flat_IO = np.round(flat_IO / scale_O) * scale_O
    else:
        bits = flat_IO.astype(np.float32).view(np.uint32)
        flat_IO = (
            ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        )
    return flat_IO.astype(np.float32).reshape(kernel.shape)


def rounded_model(model, weights):
    """Returns the same model with rounded projections; a tied table becomes a separate output
    layer.
    """
    copy = prepare(model, "float32")
    for _, node in list(nnx.iter_graph(copy)):
        if isinstance(node, Linear):
            node.kernel = nnx.Param(
                jnp.asarray(rounded(np.asarray(node.kernel[...]), node.shape_in, weights))
            )
    return copy


COMBINATIONS = [(TIED, "int8"), (UNTIED, "bfloat16"), (TIED, "bfloat16"), (UNTIED, "int8")]
IDS = ["tied, int8", "untied, bfloat16", "tied, bfloat16", "untied, int8"]


@pytest.mark.parametrize(("config", "weights"), COMBINATIONS[:2], ids=IDS[:2])
def test_logits_with_low_precision_weights_equal_those_with_rounded_ones(config, weights):
    """Tests one row, four rows, and more rows than matrix-vector loops handle, of one token each as
    in a decode step.
    """
    config = replace(config, windows=(None,), num_blocks=1)
    graph, state = nnx.split(builder.model(config))
    tokens_R1, places_R1 = np.array([[3], [9], [4], [60], [0], [31]]), np.zeros((6, 1), np.int32)

    @jax.jit
    def compute(state):
        model = prepare(nnx.merge(graph, state), weights, "float32")
        return [model(tokens_R1[:rows], places_R1[:rows])[0] for rows in ROWS], dequantize(model)(
            tokens_R1, places_R1
        )[0]

    found, dequantized = compute(state)
    run = jax.jit(lambda model: model(tokens_R1, places_R1)[0])
    expected, plain = run(rounded_model(builder.model(config), weights)), run(builder.model(config))
    assert np.abs(np.asarray(expected) - plain).max() > 5e-3, "rounding is expected to show"
    for rows, logits in zip((*ROWS, 6), (*found, dequantized), strict=True):
        np.testing.assert_allclose(logits, expected[:rows], rtol=0, atol=builder.LOGPROB_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "weights"), COMBINATIONS, ids=IDS)
def test_low_precision_weights_equal_rounded_ones(config, weights):
    """Tests one row, four rows, and more rows than matrix-vector loops handle."""
    model = builder.model(config)
    low_precision, expected = prepare(model, weights, "float32"), rounded_model(model, weights)
    tokens, lengths = builder.padded(PROMPTS)
    reference, details = generate(
        expected, tokens, 12, greedy=True, prompt_lengths=lengths, logprobs=3, return_info=True
    )
    plain = np.asarray(jax.nn.log_softmax(builder.all_logits(model, PROMPTS[0])[-1]))
    assert np.abs(np.sort(plain)[::-1][:3] - details["info"].top_logprobs[0, 0]).max() > 5e-3, (
        "rounding is expected to show"
    )
    for rows in ROWS if config is TIED and weights == "int8" else ROWS[:1]:
        out, info = generate(
            low_precision,
            tokens[:rows],
            12,
            greedy=True,
            prompt_lengths=lengths[:rows],
            logprobs=3,
            return_info=True,
        )
        assert out.tolist() == reference[:rows].tolist()
        np.testing.assert_allclose(
            info["info"].top_logprobs, details["info"].top_logprobs[:rows], rtol=0, atol=5e-4
        )


def linear(shape_in, shape_out, seed=0, **options):
    """Returns a projection with random weights, for which nothing is compiled."""
    made = nnx.eval_shape(
        lambda: Linear(shape_in, shape_out, dtype=jnp.float32, rngs=nnx.Rngs(0), **options)
    )
    random = np.random.default_rng(seed)
    graph, state = nnx.split(made)
    scale = np.prod(shape_in) ** -0.5
    return nnx.merge(
        graph,
        jax.tree.map(lambda x: (scale * random.standard_normal(x.shape)).astype(np.float32), state),
    )


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_bfloat16_matmul_equals_rounded_operands(weights):
    """Compares with float64 NumPy: for few rows (matrix-vector loops, which keep the rows in
    float32) and for more rows.
    """
    projection = linear((3, 8), (5, 2), 3)
    x = np.random.default_rng(1).standard_normal((6, 3, 8)).astype(np.float32)

    @jax.jit
    def compute(x):
        few = LowPrecisionLinear(projection, weights, 4)
        return few(x[:3]), few(x), jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)

    *found, rounded_x = map(np.asarray, compute(x))
    kernel = (
        rounded(np.asarray(projection.kernel[...]), (3, 8), weights)
        .astype(np.float64)
        .reshape(24, 10)
    )
    for outputs, operand in zip(found, (x[:3], rounded_x), strict=True):
        expected = operand.reshape(-1, 24).astype(np.float64) @ kernel
        # 24 products and their sum, of numbers up to 4; the scale of an output rounds once more.
        np.testing.assert_allclose(outputs.reshape(-1, 10), expected, rtol=0, atol=26 * 2**-24 * 4)
    head = shapes_of(weights, "bfloat16", lambda model: dequantize(model)).head
    assert head.kernel.get_value().dtype == jnp.dtype(weights)


def shapes_of(weights, matmul_dtype="auto", change=lambda model: model, config=TIED):
    """Returns a model with prepared weights, whose arrays are shapes."""
    model = builder.model(config)
    return nnx.eval_shape(lambda: change(prepare(model, weights, matmul_dtype)))


def test_int8_weights_are_not_dequantized_for_bfloat16_matmul():
    """Prefill and decoding of many rows never create a float array as large as an int8 kernel."""
    same = []
    shapes_of("int8", "bfloat16", lambda model: same.append(dequantize(model) is model) or model)
    assert same == [True]
    dequantized = shapes_of("int8", "float32", dequantize)
    matrices = [leaf for leaf in jax.tree.leaves(nnx.state(dequantized)) if leaf.ndim > 1]
    assert {leaf.dtype.name for leaf in matrices} == {"float32"}


@pytest.mark.parametrize(("gain", "first"), [(0.1, None), (2.5, 9)])
def test_the_measured_gain_decides_on_a_cpu(monkeypatch, gain, first):
    monkeypatch.setattr(prepared_model, "bfloat16_gain", lambda: gain)
    heads = {
        on: shapes_of("int8", on).head.min_bfloat16_rows for on in ("auto", "float32", "bfloat16")
    }
    assert heads == {"auto": first, "float32": None, "bfloat16": 9}
    assert shapes_of("int8", config=builder.config(platform="gpu")).head.min_bfloat16_rows == 1


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
    shapes_of("int8")
    assert platform.bfloat16_gain() > 0
    platform.bfloat16_gain.cache_clear()


def decoding(model, params, use_cache=True):
    """Returns the decode program of one row, lowered."""
    session = StaticBatch(
        model, np.ones((1, 5), np.int32), np.array([5]), params,
        limits_B=np.array([20]), eos_ids=[[]],
        options=StaticOptions(stepper=Stepper() if use_cache else UncachedStepper()),
    )  # fmt: skip
    caches = (
        (jax.eval_shape(lambda: make_cache(model.config, 1, 32, model.dtype)),) if use_cache else ()
    )
    return _generate_toks.lower(
        model, caches, session.state, params, np.int32(32), **session._options
    )


def test_without_a_cache_one_matmul_covers_the_sequence():
    """Matrix-vector loops are for few rows. For a whole sequence, they would make a program as long
    as the sequence.
    """
    params, model = SamplingParams.build({"greedy": True}), builder.model(builder.ONE_LAYER)
    products = [
        decoding(
            builder.changed(partial(prepare, weights=weights, matmul_dtype="float32"), model),
            params,
            use_cache=False,
        )
        .as_text()
        .count("dot_general")
        for weights in ("float32", "int8")
    ]
    assert products[0] == products[1]


@pytest.mark.parametrize("weights", ["auto", "float32", "bfloat16", "int8"])
def test_the_original_model_is_unchanged(weights):
    model = builder.model(TIED)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    graph = nnx.split(model)[0]
    prepared = shapes_of(weights)
    after = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert nnx.split(model)[0] == graph and model.head is None and prepared is not model
    assert prepared.embed.get_value().dtype == np.float32, (
        "norms and embeddings keep their precision"
    )


def test_weight_bytes():
    """A projected weight has one or two bytes; a scale, any other weight, and the parameter `one`
    of a projection have four.
    """
    model = builder.model(TIED)
    kernels = [node.kernel for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]
    outputs = sum(int(np.prod(k.shape)) for k in kernels)
    all_numbers = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    V, D = builder.V, TIED.dim
    assert weight_bytes(model) == 4 * all_numbers
    assert weight_bytes(prepare(model, "float32")) == 4 * (all_numbers + V * D), (
        "a tied table is copied"
    )
    ones = len(kernels) + 1
    low = {
        name: builder.changed(lambda model, name=name: prepare(model, name), model)
        for name in ("bfloat16", "int8")
    }
    assert weight_bytes(low["bfloat16"]) == 4 * (all_numbers - outputs + ones) + 2 * (
        outputs + V * D
    )
    linears = [node for _, node in nnx.iter_graph(model) if isinstance(node, Linear)]
    rows = sum(int(np.prod(linear.shape_out)) for linear in linears) + V
    assert (
        weight_bytes(low["int8"])
        == 4 * (all_numbers - outputs + ones) + (outputs + V * D) + 4 * rows
    )


def test_unchanged_arrays_are_shared():
    model = builder.model(UNTIED)
    for weights in ("auto", "float32"):
        prepared = prepare(model, weights)
        assert all(
            a is b
            for a, b in zip(
                jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(prepared)), strict=True
            )
        )


def test_unknown_precision():
    with pytest.raises(UserError, match=ERRORS["generation_weights_must_be_one"]):
        prepare(builder.model(), "int3")


LONG = [(4095, "int8"), (4096, "int8"), (6011, "bfloat16")]
MORE_LONG = [
    (4095, "bfloat16"),
    (4096, "bfloat16"),
    (6011, "int8"),
    *itertools.product((4097, 8192, 11008), ("bfloat16", "int8")),
]


@pytest.mark.parametrize(
    ("inputs", "weights"),
    [*LONG, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_LONG)],
)
def test_long_inputs_write_no_float32_weights(inputs, weights):
    """With 4096 or more inputs, XLA does not fuse the conversion into a matmul, which then costs
    ten times as much.

    The second call depends on the first one, as in a decoding loop.
    """
    low_precision = builder.changed(
        lambda linear: LowPrecisionLinear(linear, weights), linear((inputs,), (64,))
    )
    x = np.random.default_rng(0).standard_normal((2, inputs)).astype(np.float32)
    graph, state = nnx.split(low_precision)

    def call(i, carry):
        state, x, y = carry
        return state, x, y + nnx.merge(graph, state)(x + 0 * y.sum())

    steps, zero = np.int32(2), np.zeros((2, 64), np.float32)
    run = (
        jax.jit(lambda *carry: jax.lax.fori_loop(0, carry[0], call, carry[1:])[2])
        .lower(steps, state, x, zero)
        .compile()
    )
    weights_OI = np.asarray(low_precision.kernel[...]).astype(np.float64)
    scale_O = (
        1
        if low_precision.scale is None
        else np.asarray(low_precision.scale[...], np.float64)[:, None]
    )
    expected = 2 * x.astype(np.float64) @ (weights_OI * scale_O).T
    # Both calls sum as many products as there are inputs; rounding errors grow with its square
    # root.
    tolerance = 4 * inputs**0.5 * 2**-24 * np.abs(expected).max()
    np.testing.assert_allclose(run(steps, state, x, zero), expected, rtol=0, atol=tolerance)
    assert run.memory_analysis().temp_size_in_bytes < 64 * inputs


def test_a_row_of_zeros_stays_zero():
    projection = linear((32,), (builder.V,))
    projection.kernel[...][:, 3] = 0.0
    low_precision = builder.changed(lambda linear: LowPrecisionLinear(linear, "int8"), projection)
    assert (
        np.isfinite(np.asarray(low_precision.scale[...])).all()
        and not np.asarray(low_precision.kernel[...])[3].any()
    )


@pytest.mark.slow
def test_decoding_writes_no_float32_copy_of_low_precision_weights(optimized):
    """Temporaries of a decode program are far smaller than the low-precision weights would be in
    float32.
    """
    config = builder.config(dim=256, hidden_dim=768, head_size=32, n_heads=8, vocab_size=1031)
    model = builder.model(config)
    low_precision = builder.changed(lambda model: prepare(model, "int8"), model)
    program = optimized(decoding(low_precision, SamplingParams.build({"greedy": True})))
    largest = max(
        node.kernel[...].nbytes for _, node in nnx.iter_graph(model) if isinstance(node, Linear)
    )
    assert program.memory_analysis().temp_size_in_bytes < largest / 4


def test_the_table_of_a_bfloat16_model_is_looked_up_in_bfloat16():
    """The embedding is rounded to bfloat16 after the lookup anyway, but with learned positions only
    after they are added.
    """
    tokens_BT, positions_BT = np.array([PROMPTS[1]]), np.arange(len(PROMPTS[1]))[None]
    for position, kept in (("rope", "bfloat16"), ("learned", "float32")):
        graph, state = nnx.split(
            builder.model(builder.config(dtype="bfloat16", position=position, windows=(None,)))
        )

        @jax.jit
        def compute(state, graph=graph):
            model = nnx.merge(graph, state)
            prepared = prepare(model)
            return prepared.embed[...], *(
                one.hidden(tokens_BT, positions_BT)[0] for one in (prepared, model)
            )

        embed, found, expected = map(np.asarray, compute(state))
        assert embed.dtype == jnp.dtype(kept)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("float16")
def test_int4_blocks_are_close_to_the_weights():
    """The error of a uniform quantizer with 15 steps is at most half a step, plus the float16
    rounding of scale and minimum.
    """
    weights = np.random.default_rng(0).standard_normal((6, 192)).astype(np.float32)
    equal = np.repeat(np.float32([0, 0.5, -2]), 128).reshape(6, 64)

    @partial(jax.jit, static_argnums=(1, 2))
    def round_trip(weights, kind, group):
        return unpack(kind, quantize_int4(weights, group))

    for group, kind in ((64, "INT4"), (32, "Q4_1")):
        found = np.asarray(round_trip(weights, kind, group)).reshape(6, -1, group)
        blocks = weights.reshape(6, -1, group)
        span = blocks.max(-1) - blocks.min(-1)
        low, step = blocks.min(-1)[..., None], (span / 15)[..., None]
        plain = np.square(blocks - np.round((blocks - low) / step) * step - low).sum(-1)
        assert np.all(np.abs(found - blocks) <= 0.11 * span[..., None])
        assert np.all(np.square(found - blocks).sum(-1) <= plain * 1.01 + 1e-4)
    np.testing.assert_array_equal(round_trip(equal, "INT4", 64), equal)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_native_kernels_multiply_the_same_weights(weights):
    if load_kernels().instructions is None:
        pytest.skip(load_kernels().note)
    projection, counts = linear((3, 64), (2, 25), bias=True), (1, 3, 16, 17, 70)
    x = np.random.default_rng(1).standard_normal((70, 3, 64)).astype(np.float32)

    @jax.jit
    def compute(x):
        native, plain = (
            LowPrecisionLinear(projection, weights, native=True),
            LowPrecisionLinear(projection, weights),
        )
        return [native(x[:rows]) for rows in counts], plain(x[:3]), native.dequantize().kernel[...]

    found, plain, kernel = compute(x)
    exact = np.asarray(kernel, np.float64).reshape(192, 50)
    expected = x.astype(np.float64).reshape(70, 192) @ exact + np.asarray(
        projection.bias[...]
    ).reshape(-1)
    atol = 4 * 192**0.5 * 2**-24 * 5  # 192 products and their sums, of numbers up to 5
    for rows, outputs in zip((*counts, 3), (*found, plain), strict=True):
        np.testing.assert_allclose(
            np.asarray(outputs).reshape(rows, 50), expected[:rows], rtol=0, atol=atol
        )


def test_matmul_kernel_native_needs_kernels(monkeypatch):
    assert not shapes_of("int8").head.native  # a tiny model gains nothing
    monkeypatch.setattr(
        "dantinox.generation.decode.prepared_model.load_kernels",
        lambda: Kernels(None, "no C++ compiler"),
    )
    with pytest.raises(UserError, match=r"generation.matmul_kernel: no C\+\+ compiler"):
        prepare(builder.model(TIED), "int8", matmul_kernel="native")


@pytest.mark.parametrize(("gain", "native"), [(1.3, True), (0.85, True), (0.7, False)])
def test_native_kernels_are_used_unless_they_are_clearly_slower(monkeypatch, gain, native):
    """A measurement beside other work may give 0.85 for kernels that are as fast as XLA."""
    monkeypatch.setattr(prepared_model, "MIN_NATIVE_BYTES", 0)
    monkeypatch.setattr(prepared_model, "load_kernels", lambda: Kernels("avx2", ""))
    monkeypatch.setattr(prepared_model, "native_gain", lambda _: gain)
    assert shapes_of("int8").head.native is native

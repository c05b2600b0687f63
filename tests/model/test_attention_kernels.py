"""Attention kernels: the same output and gradients as plain attention, and the choice between
them.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dantinox.config import UserError
from dantinox.model import chunked_attention as chunked
from dantinox.model.attention_kernels import KERNELS, kernel_for
from dantinox.model.chunked_attention import chunked_attention
from dantinox.model.layers import PLAIN_SOFTMAX, Softmax, cast_tensordot
from tests.error_texts import ERRORS

B, K, G, H = 2, 2, 3, 8
# A score is a sum of 8 products, up to 10, with an error of about 1e-6. The error of an output is
# that of its weights times values up to 4. A gradient is a sum of up to 60 such numbers.
CLOSE, GRADIENTS_CLOSE = 1e-5, 5e-5


def attention_float64(q_BTKGH, k_BTKH, v_BTKH, segments_BT, window, cap=None, sinks_KG=None):
    """Computes attention query by query."""
    out = np.zeros(q_BTKGH.shape)
    for b, t, k in np.ndindex(B, q_BTKGH.shape[1], K):
        first = 0 if window is None else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segments_BT[b, s] == segments_BT[b, t]]
        scores = (
            q_BTKGH[b, t, k].astype(np.float64) @ k_BTKH[b, seen, k].T.astype(np.float64) / H**0.5
        )
        weights = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
        sinks = 0 if sinks_KG is None else np.exp(sinks_KG[k].astype(np.float64))[:, None]
        out[b, t, k] = weights / (weights.sum(axis=1, keepdims=True) + sinks) @ v_BTKH[b, seen, k]
    return out


def gradients_float64(q, k, v, segments, window, d_out, cap=None, sinks_KG=None):
    """Computes its gradients by hand: the derivative of softmax is weight · (d weight − Σ weight ·
    d weight).
    """
    d_q, d_k, d_v, d_sinks = (
        np.zeros(q.shape),
        np.zeros(k.shape),
        np.zeros(v.shape),
        np.zeros((K, G)),
    )
    for b, t, j in np.ndindex(B, q.shape[1], K):
        first = 0 if window is None else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
        keys, values = k[b, seen, j].astype(np.float64), v[b, seen, j].astype(np.float64)
        scores = q[b, t, j] @ keys.T / H**0.5
        bent = scores if cap is None else cap * np.tanh(scores / cap)
        sink = (
            np.zeros((G, 1))
            if sinks_KG is None
            else np.exp(sinks_KG[j].astype(np.float64))[:, None]
        )
        weights = np.exp(bent)
        whole = weights.sum(axis=1, keepdims=True) + sink
        weights, sink = weights / whole, sink / whole
        d_weights = d_out[b, t, j] @ values.T
        mean = (weights * d_weights).sum(axis=1, keepdims=True)
        d_scores = (
            weights * (d_weights - mean) / H**0.5 * (1 if cap is None else 1 - (bent / cap) ** 2)
        )
        d_sinks[j] -= (sink * mean)[:, 0]
        d_q[b, t, j] = d_scores @ keys
        for place, s in enumerate(seen):
            d_k[b, s, j] += d_scores[:, place] @ q[b, t, j]
            d_v[b, s, j] += weights[:, place] @ d_out[b, t, j]
    return d_q, d_k, d_v, d_sinks


def drawn(T, seed=0):
    r = np.random.default_rng(seed)
    q, k, v = (
        r.standard_normal(shape).astype(np.float32)
        for shape in ((B, T, K, G, H), (B, T, K, H), (B, T, K, H))
    )
    segments = np.sort(r.integers(0, 3, (B, T)), axis=1).astype(np.int32)
    return q, k, v, segments


def small_blocks(monkeypatch, queries, keys, *, scores=1 << 23, unrolled=0):
    """Sets the sizes of the blocks, the most scores held at a time, and the number of scores that
    need a loop.
    """
    sizes = {
        "QUERY_BLOCK": queries,
        "MAX_QUERY_BLOCK": queries,
        "MAX_KEY_BLOCK": keys,
        "KEY_BLOCKS": 1,
    }
    for name, value in (sizes | {"MAX_SCORES": scores, "UNROLLED_SCORES": unrolled}).items():
        monkeypatch.setattr(chunked, name, value)


# (length, window, queries and keys per block, scores held at a time, scores that need a loop):
# whole and partial blocks, one or several blocks of queries per block of keys, heads in parts, no
# loop.
SHAPES = [
    (20, None, 128, 128, 1 << 23, 0),
    (20, 7, 8, 8, 1 << 23, 0),
    (29, None, 8, 16, 1 << 23, 0),
    (21, 5, 4, 16, 400, 0),
    (29, 7, 8, 8, 1 << 23, 1 << 24),
]


@pytest.mark.parametrize("T, window, queries, keys, scores, unrolled", SHAPES)
def test_chunked_attention_equals_attention(
    monkeypatch, T, window, queries, keys, scores, unrolled
):
    small_blocks(monkeypatch, queries, keys, scores=scores, unrolled=unrolled)
    q, k, v, segments = drawn(T)
    d_out = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)

    @jax.jit
    def run(q, k, v):
        out, back = jax.vjp(
            lambda *x: chunked_attention(*x, jnp.asarray(segments), window), q, k, v
        )
        return out, back(jnp.asarray(d_out))

    out, found = run(q, k, v)
    np.testing.assert_allclose(out, attention_float64(q, k, v, segments, window), atol=CLOSE)
    for mine, theirs in zip(
        found, gradients_float64(q, k, v, segments, window, d_out)[:3], strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=GRADIENTS_CLOSE)


def test_chunked_attention_of_one_document_per_row():
    q, k, v, _ = drawn(20)
    out = jax.jit(lambda *x: chunked_attention(*x, None, None))(q, k, v)
    np.testing.assert_allclose(out, attention_float64(q, k, v, np.zeros((B, 20)), None), atol=CLOSE)


@pytest.mark.parametrize(
    "cap, with_sinks",
    [
        pytest.param(0.7, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
        (0.7, True),
    ],
)
def test_chunked_attention_with_capped_scores_and_sinks(monkeypatch, cap, with_sinks):
    small_blocks(monkeypatch, 8, 16)
    q, k, v, segments = drawn(29)
    sinks = (
        np.random.default_rng(2).standard_normal((K, G)).astype(np.float32) if with_sinks else None
    )

    def out_of(q, k, v, sinks):
        return chunked_attention(q, k, v, jnp.asarray(segments), 9, Softmax(cap, sinks))

    d_out = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    out, mine = jax.jit(
        lambda d_out, *x: (lambda out, back: (out, back(d_out)))(*jax.vjp(out_of, *x))
    )(d_out, q, k, v, sinks)
    np.testing.assert_allclose(out, attention_float64(q, k, v, segments, 9, cap, sinks), atol=CLOSE)
    theirs = gradients_float64(q, k, v, segments, 9, d_out, cap, sinks)
    for a, b in zip(mine, theirs, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, atol=GRADIENTS_CLOSE)


def test_values_of_another_size_than_keys():
    """Values of two concatenated halves give the concatenated outputs."""
    q, k, v, segments = drawn(40)

    @jax.jit
    def run(q, k, v, d_out):
        out, back = jax.vjp(lambda *x: chunked_attention(*x, jnp.asarray(segments), 7), q, k, v)
        return out, back(d_out)

    values = np.concatenate([v, 2 * v[..., :5]], axis=-1)
    d_out = np.random.default_rng(1).standard_normal((*q.shape[:-1], H + 5)).astype(np.float32)
    parts = [run(q, k, values[..., some], d_out[..., some]) for some in (np.s_[:H], np.s_[H:])]
    out, both = run(q, k, values, d_out)
    np.testing.assert_allclose(out, np.concatenate([out for out, _ in parts], axis=-1), atol=CLOSE)
    for mine, first, second in zip(both[:2], *(d[:2] for _, d in parts), strict=True):
        np.testing.assert_allclose(mine, first + second, atol=GRADIENTS_CLOSE)


def test_memory_of_chunked_attention_is_not_quadratic(monkeypatch):
    small_blocks(monkeypatch, 16, 32)
    T = 16 * 8
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((1, T, 4, 1, 16), (1, T, 4, 16), (1, T, 4, 16))
    ]

    def loss(q, k, v):
        return jnp.sum(chunked_attention(q, k, v, None, None))

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile().as_text()
    assert f"{T},{T}]" not in text


def test_layers_do_not_allocate_their_sums_together(monkeypatch):
    small_blocks(monkeypatch, 16, 32)
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((1, 256, 4, 1, 64), (1, 256, 4, 64), (1, 256, 4, 64))
    ]

    def temporary_bytes(layers):
        def run(q, k, v):
            for _ in range(layers):
                q = chunked_attention(jnp.sin(q), k, v, None, None)
            return q

        return jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    one_sum = 4 * 256 * 4 * 64
    assert temporary_bytes(6) < temporary_bytes(2) + 2 * one_sum


def test_a_longer_sequence_does_not_change_the_size_of_the_program():
    def operations(T):
        shapes = [
            jax.ShapeDtypeStruct(s, jnp.float32)
            for s in ((1, T, 4, 2, 16), (1, T, 4, 16), (1, T, 4, 16))
        ]
        gradient = jax.grad(
            lambda q, k, v: jnp.sum(chunked_attention(q, k, v, None, None)), (0, 1, 2)
        )
        return jax.jit(gradient).lower(*shapes).as_text().count(" = ")

    assert operations(3000) == operations(9000)


def test_choice_of_the_kernel():
    def kernel_of(name, platform, T=256, size=64, dtype=jnp.bfloat16, softmax=PLAIN_SOFTMAX):
        kernel = kernel_for(name, platform, (1, T, 2, 2, size), dtype, softmax)
        kernel = getattr(kernel, "func", kernel)
        return next((name for name, known in KERNELS.items() if known is kernel), "xla")

    assert [kernel_of("auto", on) for on in ("cpu", "gpu", "tpu")] == ["chunked", "cudnn", "splash"]
    assert [kernel_of("auto", on, T=64) for on in ("cpu", "gpu", "tpu")] == ["xla"] * 3
    unsupported = (
        kernel_of("auto", "gpu", dtype=jnp.float32),
        kernel_of("auto", "gpu", size=256),
        kernel_of("auto", "tpu", T=200),
    )
    assert unsupported == ("chunked",) * 3
    assert kernel_of("xla", "tpu") == "xla" and kernel_of("chunked", "gpu", T=8) == "chunked"
    cap, sinks = Softmax(30.0), Softmax(None, jnp.zeros((2, 2)))
    assert [kernel_of("auto", on, softmax=cap) for on in ("gpu", "tpu")] == ["chunked", "splash"]
    assert [kernel_of("auto", on, softmax=sinks) for on in ("gpu", "tpu")] == ["chunked"] * 2
    with pytest.raises(UserError, match=ERRORS["attention_kernel_splash_needs_keys"]):
        kernel_for("splash", "tpu", (1, 256, 2, 2, 64), jnp.bfloat16, value_size=32)
    for name, on, softmax in (
        ("cudnn", "gpu", cap),
        ("cudnn", "gpu", sinks),
        ("splash", "tpu", sinks),
    ):
        with pytest.raises(UserError, match=rf"attention\.kernel {name} does not support "):
            kernel_of(name, on, softmax=softmax)
    with pytest.raises(UserError, match=ERRORS["attention_kernel_splash_needs_lengths"]):
        kernel_of("splash", "tpu", T=200)
    with pytest.raises(UserError, match=ERRORS["attention_kernel_cudnn_needs_bfloat16"]):
        kernel_of("cudnn", "gpu", dtype=jnp.float32)
    with pytest.raises(UserError, match=ERRORS["attention_kernel_cudnn_needs_a"]):
        kernel_of("cudnn", "cpu")


@pytest.mark.parametrize("dtype, tolerance", [("float32", 4e-6), ("bfloat16", 8e-3)])
def test_cast_tensordot_and_its_gradients(dtype, tolerance):
    r = np.random.default_rng(0)
    x, w, d_y = (
        r.standard_normal(shape).astype(np.float32)
        for shape in ((5, 3, 4), (3, 4, 6, 2), (5, 6, 2))
    )

    @jax.jit
    def run(x, w, d_y):
        y, back = jax.vjp(
            partial(cast_tensordot, axes=2, dtype=jnp.dtype(dtype), out_dtype=jnp.float32), x, w
        )
        return y, *back(d_y)

    y, d_x, d_w = run(x, w, d_y)
    wide = x.astype(np.float64), w.astype(np.float64), d_y.astype(np.float64)
    for mine, axes, operands in (
        (y, "bij,ijkl->bkl", wide[:2]), (d_x, "bkl,ijkl->bij", wide[:0:-1]),
        (d_w, "bij,bkl->ijkl", wide[::2]),
    ):  # fmt: skip
        theirs = np.einsum(axes, *operands)
        np.testing.assert_allclose(mine, theirs, atol=tolerance * np.abs(theirs).max())
        assert mine.dtype == jnp.float32


@pytest.mark.parametrize("shape", [(30, 7, 12), (256, 128, 65)])
def test_bfloat16_gradients_of_tied_weights(shape):
    """XLA may merge the transpose of a gradient with its matrix multiplication, which a CPU cannot
    do in bfloat16.
    """
    N, I, O = shape  # noqa: E741
    r = np.random.default_rng(0)
    x, w, d_y = (r.standard_normal(size).astype(jnp.bfloat16) for size in ((N, I), (O, I), (N, O)))

    @jax.jit
    def gradients(x, w, d_y):
        return jax.vjp(lambda x, w: cast_tensordot(x, w.T, 1, jnp.bfloat16, jnp.float32), x, w)[1](
            d_y
        )

    d_x, d_w = gradients(x, w.astype(np.float32), d_y.astype(np.float32))
    x, w, d_y = (np.asarray(array, np.float64) for array in (x, w, d_y))
    np.testing.assert_allclose(np.asarray(d_x, np.float64), d_y @ w, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(d_w, d_y.T @ x, rtol=1e-5, atol=1e-5 * np.abs(d_y.T @ x).max())


@pytest.mark.slow
def test_masks_are_not_saved_by_a_loop_over_layers(monkeypatch):
    """The masks depend only on the documents, which are the same for all layers: JAX could compute
    them once and keep them.
    """
    small_blocks(monkeypatch, 8, 16)
    T = 32
    q, k, v, segments = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*drawn(T)[:3], drawn(T)[3])
    )

    def loss(q, k, v, segments):
        @jax.checkpoint
        def layer(q, k, v):
            return chunked_attention(q, k, v, segments, None)

        return jnp.sum(jax.lax.scan(lambda q, _: (layer(q, k, v), None), q, length=2)[0])

    text = str(jax.make_jaxpr(jax.grad(loss))(q, k, v, segments))
    sizes = [
        math.prod(map(int, shape.split(","))) for shape in re.findall(r"bool\[([\d,]+)\]", text)
    ]
    assert max(sizes) == B * K * G * 8 * 16

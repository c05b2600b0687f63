"""Ring attention, and training with positions split over devices, on meshes of eight simulated
devices.
"""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dantinox.config import UserError
from dantinox.lab.measure.program_cost import Work, count_work
from dantinox.model import ring_attention as ring
from dantinox.model.layers import Softmax
from dantinox.model.positions import packed_positions
from tests.error_texts import ERRORS

from .mesh import layout_of, program, same, settings, trained

DEVICES = 8
B, T, K, G, H, V = 2, 32, 2, 3, 4, 6
SHARDED = PartitionSpec(None, "sequence")


def layout(n: int):
    return layout_of(settings("dense", f"sequence={n}", model__max_context=T))


def order_of(n: int) -> np.ndarray:
    """The positions in the order of the devices: chunks 0, 2n - 1, 1, 2n - 2, …"""
    chunks = np.arange(T).reshape(2 * n, -1)
    return np.concatenate([chunks[chunk] for d in range(n) for chunk in (d, 2 * n - 1 - d)])


def inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, v, the gradient of the output, float32, and documents of a few tokens."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, K, G, H), (B, T, K, H), (B, T, K, V), (B, T, K, G, V)
    segments = np.cumsum(rng.random((B, T)) < 0.1, axis=1).astype(np.int32)
    return *(rng.normal(size=shape).astype(np.float32) for shape in shapes), segments


def reference(q, k, v, d_out, segments, window=None, cap=None, sinks=None) -> list[np.ndarray]:
    """The output, and the gradients of q, k, v and sinks, from the full matrix of scores in
    float64.
    """
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    distance = np.arange(T)[:, None] - np.arange(T)
    mask_BTS = (
        (distance >= 0) & (distance < (window or T)) & (segments[:, :, None] == segments[:, None])
    )
    raw = np.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(H)
    scores = raw if cap is None else cap * np.tanh(raw / cap)
    powers = np.where(mask_BTS[:, None, None], np.exp(scores), 0)
    sink_powers = 0 if sinks is None else np.exp(sinks.astype(np.float64))[None, :, :, None, None]
    mass = powers.sum(-1, keepdims=True) + sink_powers
    weights = powers / mass
    d_weights = np.einsum("btkgv,bskv->bkgts", d_out, v)
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = (
        weights
        * (d_weights - mean)
        / np.sqrt(H)
        * (1 if cap is None else 1 - np.tanh(raw / cap) ** 2)
    )
    found = [
        np.einsum("bkgts,bskv->btkgv", weights, v),
        np.einsum("bkgts,bskh->btkgh", d_scores, k),
        np.einsum("bkgts,btkgh->bskh", d_scores, q),
        np.einsum("bkgts,btkgv->bskv", weights, d_out),
    ]
    return found if sinks is None else [*found, -(sink_powers / mass * mean).sum((0, 3, 4))]


def lowered(
    n: int, window: int | None = None, cap: float | None = None, sinks: np.ndarray | None = None
):
    """The output of ring attention on n devices and its gradients, as a program of arrays in the
    order of the devices.
    """
    mesh = layout(n)

    def local(q, k, v, d_out, segments, sinks):
        def attend(q, k, v, sinks):
            return ring.ring_attention(
                mesh.parallelism, q, k, v, segments, window, Softmax(cap, sinks)
            )

        out, transpose = jax.vjp(attend, q, k, v, sinks)
        *d_qkv, d_sinks = transpose(d_out)
        return out, *d_qkv, None if d_sinks is None else jax.lax.psum(d_sinks, "sequence")

    outputs = (*(SHARDED,) * 4, PartitionSpec())
    specs = (*(SHARDED,) * 5, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs()]
    return jax.jit(mesh.shard_map(local, specs, outputs)).lower(*shapes, sinks)


CASES = {
    "documents": (2, {}),
    "window": (8, {"window": 5}),
    "all options": (
        4,
        {"window": 9, "cap": 1.5, "sinks": np.array([[0.5, -1, 2], [1, 0, -0.5]], np.float32)},
    ),
}


SLOW = {
    "documents": pytest.mark.slow,
    "window": pytest.mark.slow,
}  # the last case has documents and a window


@pytest.mark.parametrize(
    ("n", "options"),
    [pytest.param(*case, marks=SLOW.get(name, ()), id=name) for name, case in CASES.items()],
)
def test_ring_attention_and_its_gradients_equal_a_full_softmax(n, options, monkeypatch):
    """Chunks of several blocks of queries; heads are computed one by one."""
    monkeypatch.setattr(ring, "QUERY_BLOCK", 3)
    monkeypatch.setattr(ring, "MAX_SCORES", 40)
    given, order = inputs(), order_of(n)
    found = lowered(n, **options).compile()(*(x[:, order] for x in given), options.get("sinks"))
    for got, expected in zip(
        (x for x in found if x is not None), reference(*given, **options), strict=True
    ):
        got = np.asarray(got)
        got = got[:, np.argsort(order)] if got.ndim > 2 else got
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_ring_attention_computes_half_of_the_products(n):
    """(2 n + 1) / 4 n of all products of chunks, with two matrix multiplications forward and five
    backward.
    """
    work: Work = count_work(lowered(n).compile().as_text())
    C = T // (2 * n)
    per_product = 2 * B * K * G * C * C * ((H + V) + (2 * V + 3 * H))
    assert work.flops == (2 * n + 1) * per_product
    keys = B * K * 2 * C
    kv, d_kv, documents = (4 * keys * size for size in (H + V, H + V, 1))
    # The first permutation of the backward pass equals that of the forward pass. Some versions of
    # XLA remove it.
    permutations = (work.sent["collective-permute"] - n * d_kv) / (kv + documents)
    assert permutations in (2 * (n - 1) - 1, 2 * (n - 1))
    assert set(work.count) == {"collective-permute"} and work.unknown_loops == 0


def test_masks_are_not_saved_by_a_loop_over_layers(monkeypatch):
    """The masks depend only on the documents, which are the same for all layers: JAX could compute
    them once and keep them.
    """
    monkeypatch.setattr(ring, "QUERY_BLOCK", 2)
    mesh, (q, k, v, _, segments) = layout(4), inputs()

    def gradient(q, k, v, segments):
        @jax.checkpoint
        def layer(q):
            return ring.ring_attention(mesh.parallelism, q, k, v, segments, None)

        return jax.grad(
            lambda q: jnp.sum(jax.lax.scan(lambda q, _: (layer(q), None), q, length=2)[0])
        )(q)

    traced = jax.make_jaxpr(mesh.shard_map(gradient, (SHARDED,) * 4, SHARDED))(
        q, k, v[..., :H], segments
    )
    sizes = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"bool\[([\d,]+)\]", str(traced))
    ]
    assert max(sizes) == B * K * G * 2 * (T // 8)  # one block of queries with one chunk of keys


@pytest.mark.parametrize("n", [2, 8])
def test_positions_of_segments_on_several_devices_start_at_zero(n):
    mesh, segments = (
        layout(n),
        np.array([[0] * 3 + [1] * 20 + [2] * 7 + [-1] * 2, [0] * 31 + [1]], np.int32),
    )
    wanted = np.array([[*range(3), *range(20), *range(7), -1, -1], [*range(31), 0]])
    model = settings(
        "dense",
        attention__use_rotary_pos=False,
        attention__trainable_pos=True,
        model__max_context=T,
    )
    local = partial(packed_positions, model.architecture(V), parallelism=mesh.parallelism)
    found = jax.jit(mesh.shard_map(local, (SHARDED,), SHARDED))(segments[:, order_of(n)])
    np.testing.assert_array_equal(np.asarray(found)[:, np.argsort(order_of(n))], wanted)


def test_each_device_gets_two_chunks_at_their_positions():
    mesh = layout_of(settings("dense", "data=2 sequence=4", model__max_context=T))
    numbers = np.arange(8 * T).reshape(8, T)
    placed = mesh.put_batch(lambda rows=slice(None): numbers[rows], 8, accumulated=2)
    place = jax.jit(
        mesh.shard_map(
            lambda x: x * 0 + mesh.parallelism.local_positions(T // 4),
            mesh.batch_spec,
            mesh.batch_spec,
        )
    )
    np.testing.assert_array_equal(np.asarray(place(placed)), np.tile(order_of(4), (8, 1)))
    # Each part of the accumulation has rows of both devices of the axis `data`.
    np.testing.assert_array_equal(
        np.asarray(placed), numbers[[0, 1, 4, 5, 2, 3, 6, 7]][:, order_of(4)]
    )


SGD = {"training__optimizer": "sgd", "training__lr": 0.1}
QUICK = "dense", "fsdp=4 sequence=2", SGD | {"model__scan_layers": True}
MORE = [
    ("uneven", "sequence=4 tensor=2", {"model__num_blocks": 4}),
    ("dense", "sequence=2", SGD),
    ("dense", "sequence=4", SGD),
    (
        "dense",
        "sequence=8",
        SGD | {"model__scan_layers": True, "model__gradient_checkpointing": True},
    ),
    ("dense", "fsdp=2 sequence=4", SGD | {"training__grad_accum": 2, "training__z_loss": 0.01}),
    ("dense", "data=2 sequence=2 tensor=2", SGD | {"chunks": 4}),
    ("dense", "sequence=4 tensor=2", {"training__optimizer": "muon"}),
    ("learned", "data=2 sequence=4", SGD),
    ("biases", "fsdp=2 sequence=4", SGD),
    (
        "dense",
        "sequence=8",
        SGD | {"attention__sink_logits": True, "attention__no_sink": True, "model__qk_norm": True},
    ),
    ("moe", "fsdp=2 expert=2 sequence=2", SGD | {"model__num_blocks": 1}),
    ("mla", "sequence=4 tensor=2", SGD | {"model__num_blocks": 1}),
]


@pytest.mark.parametrize(
    ("kind", "mesh", "changes"),
    [
        QUICK,
        pytest.param(*MORE[0], marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE[1:]),
    ],
    ids=str,
)
def test_a_sequence_axis_trains_as_one_device_does(kind, mesh, changes):
    """Losses within 1e-5, also with packed documents; SGD shows an error of a gradient as an error
    of the weights.
    """
    same(trained(kind, mesh, evaluated=True, **changes), trained(kind, evaluated=True, **changes))


@cache
def long_program(n: int):
    """A step with one row, whose activations need more memory than its weights."""
    given = {
        "model__max_context": 2048,
        "training__batch_size": 1,
        "model__scan_layers": True,
        "model__num_blocks": 2,
    }
    return program(
        "dense", f"sequence={n}" if n > 1 else "", model__gradient_checkpointing=True, **given
    )


@pytest.mark.slow
def test_memory_of_activations_is_divided():
    one, eight = long_program(1), long_program(8)
    assert (
        eight.temp < one.temp / 4
    )  # one device computes attention in blocks, eight hold the scores of half a chunk
    assert eight.arguments < one.arguments / 7


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ("sequence=8", {"model__max_context": 24}, "sequence_context"),
        (
            "sequence=2",
            {"training__objective": "dpo", "training__init_from": "x"},
            "sequence_objective",
        ),
        ("sequence=2", {"attention__kernel": "xla"}, "sequence_kernel"),
    ],
)
def test_settings_that_exclude_a_sequence_axis(mesh, changes, message):
    with pytest.raises(UserError, match=ERRORS[message]):
        layout_of(settings("dense", mesh, **changes))

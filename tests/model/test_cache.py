"""Reading through a cache gives the logits of the whole sequence at once, whatever the order of the
calls.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dantinox.config import ExpertsConfig, LatentConfig
from dantinox.model import KVCache, make_cache
from dantinox.model import cache_store as stores
from dantinox.model.cache import (
    FullLayer,
    NoCache,
    RingLayer,
    SlotLayer,
    SlotRowsLayer,
    TwoPassLayer,
    VerificationLayer,
)

from . import reference
from .builder import Built, build, config, places, texts

ROWS, LENGTH, CHUNK = 3, 24, 6

# Covers every pair of (position, windows), (position, heads) and (windows, heads). Windows cover
# none, one key, a ring shorter than a chunk, a ring longer than one, one longer than the sequence,
# and layers that differ. MIXED has one slot less than the sequence.
POSITIONS = ["rope", "learned", "sinusoidal", "none"]
WINDOWS = [(None,), (1,), (4, 64), (9, None, 1)]
HEADS = [(4, 4), (4, 2), (4, 1)]
CONFIGS = [
    config(
        position=position,
        windows=windows,
        n_heads=n,
        kv_heads=k,
        no_sink=w % 2 == 0,
        qk_norm=p % 2 == 0,
    )
    for p, position in enumerate(POSITIONS)
    for w, windows in enumerate(WINDOWS)
    for n, k in [HEADS[(p + w) % 3]]
]
CONFIGS.append(config(windows=(4, None), sink_logits=True, softcap=1.5, final_softcap=2.0))
CONFIGS.append(config(windows=(4, None), experts=ExpertsConfig(4, 2, shared_dim=16)))
LATENT = config(
    windows=(4, None),
    kv_heads=4,
    latent=LatentConfig(6, 2, 3),
    sink_logits=True,
    softcap=1.5,
    no_sink=True,
)
CONFIGS.append(LATENT)
SHARED = config(
    windows=(4, None, 4, None, 4), kv_shared_layers=2, global_head_size=6, global_kv_heads=1,
    k_eq_v=True, v_norm=True, per_layer_dim=3, layer_scalar=True, double_wide_mlp=True,
    qk_norm=True, norm_placement="both",
)  # fmt: skip
CONFIGS.append(SHARED)
# Learned positions, and everything else that a layer reads or writes. MIXED below has rotary
# positions and all kinds of windows.
QUICK = [
    config(position="learned", windows=(1,), kv_heads=1),
    config(
        windows=(4, None),
        sink_logits=True,
        softcap=1.5,
        final_softcap=2.0,
        experts=ExpertsConfig(4, 2, shared_dim=16),
    ),
    LATENT,
    replace(SHARED, windows=(4, None, 4, None), num_blocks=4),
]
MIXED = config(windows=(1, 23, None), head_size=6)

# A schedule is a list of calls; a call gives the number of tokens that each row reads next.
ONE = (1, 1, 1)
SCHEDULES = {
    "prefill, then token by token": [(6, 6, 6)] + [ONE] * 18,
    "token by token": [ONE] * 24,
    "ragged prompts": [(6, 3, 1)] + [ONE] * 18,
    "chunks": [(6, 6, 6)] * 4,
    "ragged chunks": [(6, 5, 1), (2, 6, 6), (6, 1, 3), ONE, (5, 6, 2), ONE, (3, 4, 6)],
    "idle rows": [
        (6, 0, 4),
        (1, 0, 1),
        (0, 6, 0),
        (1, 0, 0),
        (0, 1, 6),
        (3, 6, 0),
        (0, 0, 0),
        ONE,
        (1, 1, 0),
        (6, 2, 6),
        ONE,
    ],
}


@functools.cache
def whole(built: Built) -> np.ndarray:
    """Returns the NumPy logits `[B, T, V]` of the whole sequence."""
    weights = built.weights
    return np.array(
        [reference.forward(built.config, weights, row)[0] for row in texts((ROWS, LENGTH))]
    )


def call(tokens_BT: np.ndarray, read: np.ndarray, counts) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next `counts` tokens of each row with their positions, padded on the right to one
    token or a chunk.
    """
    length = 1 if max(counts) <= 1 else CHUNK
    tokens, positions = np.full((ROWS, length), 7, np.int32), np.full((ROWS, length), -1, np.int32)
    for row, count in enumerate(counts):
        tokens[row, :count] = tokens_BT[row, read[row] : read[row] + count]
        positions[row, :count] = np.arange(read[row], read[row] + count)
    return tokens, positions


def follow(built: Built, schedule, cache: KVCache, tolerance: float | None = None) -> KVCache:
    """Reads the sequence in the calls of a schedule and compares the logits of every token with
    `whole`.

    With shared keys, five layers with normalized outputs amplify the rounding of single tokens:
    over six schedules and four epsilons the median difference is 3e-7 of the largest logit, the
    maximum 1.6e-5.
    """
    tolerance = tolerance or (5e-5 if built.config.kv_shared_layers else 1e-5)
    tokens_BT, expected = texts((ROWS, LENGTH)), whole(built)
    read = np.zeros(ROWS, int)
    for counts in schedule:
        tokens, positions = call(tokens_BT, read, counts)
        logits, cache = built.run(built.state, tokens, positions, cache)
        for row, count in enumerate(counts):
            wanted = expected[row, read[row] : read[row] + count]
            difference = np.abs(np.asarray(logits)[row, :count] - wanted).max(initial=0)
            assert difference <= tolerance * np.abs(expected).max(), (
                row,
                read[row],
                count,
                difference,
            )
        read += counts
    return cache


# One program creates all arrays of a cache.
make_empty = jax.jit(make_cache, static_argnums=(0, 1, 2, 3), static_argnames="segmented")


def empty(built: Built, dtype=jnp.float32) -> KVCache:
    return make_empty(built.config, ROWS, LENGTH, dtype)


def name_of(c) -> str:
    return f"{c.position}-{c.windows}-{c.n_heads}:{c.kv_heads}"


@pytest.mark.parametrize("model_config", QUICK, ids=name_of)
def test_cached_logits_equal_uncached_ones(model_config):
    built = build(model_config)
    for schedule in SCHEDULES.values():
        follow(built, schedule, empty(built))


@pytest.mark.slow
@pytest.mark.parametrize("model_config", [c for c in CONFIGS if c not in QUICK], ids=name_of)
def test_cached_logits_of_all_pairs_of_settings_equal_uncached_ones(model_config):
    test_cached_logits_equal_uncached_ones(model_config)


@pytest.mark.parametrize(
    "model_config",
    [
        config(windows=(None,), n_heads=4, kv_heads=2, sink_logits=True),
        config(
            windows=(None,),
            kv_heads=4,
            latent=LatentConfig(6, 2, 3),
            sink_logits=True,
            softcap=1.5,
            no_sink=True,
        ),
        pytest.param(replace(SHARED, windows=(4, None, None, None, None)), marks=pytest.mark.slow),
    ],
    ids=["heads", "latents", "shared"],
)
def test_segments_of_a_cache_act_as_one_store(model_config, monkeypatch):
    """The shortest segment has six slots here: rows use one, two or three segments, and some are
    idle.
    """
    monkeypatch.setattr(stores, "MIN_SEGMENT", 6)
    monkeypatch.setattr(stores, "SEGMENT_UNIT", 1)
    built = build(model_config)
    cache = jax.jit(lambda: make_cache(built.config, ROWS, LENGTH, jnp.float32, segmented=True))()
    segmented = cache.layers[1 if len(built.config.windows) > 1 else 0]
    assert [part.slots for part in segmented.store.segments] == [6, 6, 12]
    for schedule in SCHEDULES.values():
        follow(built, schedule, cache)


@pytest.mark.parametrize(
    ("slots", "ends"),
    [
        (200, [200]),
        (512, [128, 256, 512]),
        (1024, [128, 256, 512, 1024]),
        (2048, [128, 256, 1024, 2048]),
        (8192, [128, 1024, 4096, 8192]),
        (131_072, [2048, 16_384, 65_536, 131_072]),
    ],
)
def test_ends_of_segments(slots, ends):
    assert stores.segment_ends(slots) == ends


def test_segments_are_few_and_begin_at_whole_units():
    for slots in [*range(1, 5000, 7), 2**20 - 1]:
        ends = stores.segment_ends(slots)
        assert ends == sorted({*ends}) and ends[-1] == slots and len(ends) <= 4
        assert all(end % stores.SEGMENT_UNIT == 0 for end in ends[:-1])
        assert ends[0] == slots or ends[0] >= stores.MIN_SEGMENT // 2


@st.composite
def schedules(draw):
    """Draws random calls until every row has read between one token and all."""
    left, calls = np.array([LENGTH] * ROWS), []
    for _ in range(draw(st.integers(1, 10))):
        most = draw(st.sampled_from([1, CHUNK]))
        counts = tuple(draw(st.integers(0, min(most, int(n)))) for n in left)
        left -= counts
        calls.append(counts)
    return calls


@settings(max_examples=20, deadline=None, derandomize=True)
@given(schedules())
def test_any_schedule(schedule):
    built = build(MIXED)
    follow(built, schedule, empty(built))


def test_earlier_contents_of_a_row_have_no_effect():
    """A row may be reused without clearing: the cache of a finished sequence, or random numbers,
    change no bit.
    """
    built = build(MIXED)
    dirty = jax.tree.map(
        lambda leaf: np.float32(1e4 * np.cos(np.arange(leaf.size))).reshape(leaf.shape),
        empty(built),
    )
    for name in ("ragged prompts", "idle rows"):
        clean_logits, dirty_logits = [], []
        for logits, start in ((clean_logits, empty(built)), (dirty_logits, dirty)):
            cache = start
            read = np.zeros(ROWS, int)
            for counts in SCHEDULES[name]:
                tokens, positions = call(texts((ROWS, LENGTH)), read, counts)
                out, cache = built.run(built.state, tokens, positions, cache)
                logits.append(np.where(positions[..., None] >= 0, out, 0))
                read += counts
        for a, b in zip(clean_logits, dirty_logits, strict=True):
            np.testing.assert_array_equal(a, b)


def rows_of(cache: KVCache, rows: list[int]) -> list[np.ndarray]:
    return [np.asarray(leaf)[rows] for leaf in jax.tree.leaves(cache)]


@pytest.mark.parametrize("count", [1, CHUNK])
def test_an_idle_row_writes_nothing_and_affects_no_other_row(count):
    built = build(MIXED)
    tokens_BT, read = texts((ROWS, LENGTH)), np.array([11, 6, 7])
    before = follow(built, [(6, 6, 6), (5, 0, 1)], empty(built))
    tokens, positions = call(tokens_BT, read, (count, count, count))
    busy_logits, busy = built.run(built.state, tokens, positions, before)
    idle_logits, idle = built.run(built.state, *call(tokens_BT, read, (count, 0, count)), before)
    for now, then in zip(rows_of(idle, [1]), rows_of(before, [1]), strict=True):
        np.testing.assert_array_equal(now, then)
    for now, then in zip(rows_of(idle, [0, 2]), rows_of(busy, [0, 2]), strict=True):
        np.testing.assert_array_equal(now, then)
    np.testing.assert_array_equal(np.asarray(idle_logits)[[0, 2]], np.asarray(busy_logits)[[0, 2]])
    assert np.isfinite(idle_logits).all()


def test_a_row_is_bitwise_equal_alone_and_in_a_batch():
    built = build(MIXED)
    together = [(6, 3, 1), (1, 1, 1), (6, 2, 0), (1, 1, 1), (0, 6, 5), (1, 1, 1)]
    for row in range(ROWS):
        read, caches = np.zeros(ROWS, int), [empty(built), empty(built)]
        for counts in together:
            alone = tuple(count if r == row else 0 for r, count in enumerate(counts))
            tokens, positions = call(texts((ROWS, LENGTH)), read, counts)
            # A single row runs the same program: the call has the same shape as for several rows.
            solo = np.where(np.array(alone)[:, None] > 0, positions, -1)
            outs = []
            for i, place in enumerate((positions, solo)):
                logits, caches[i] = built.run(built.state, tokens, place, caches[i])
                outs.append(np.asarray(logits)[row, : counts[row]])
            np.testing.assert_array_equal(*outs)
            read += counts


def test_padding_tokens_have_no_effect():
    built = build(MIXED)
    tokens, positions = call(texts((ROWS, LENGTH)), np.zeros(ROWS, int), (6, 3, 1))
    others = np.where(positions < 0, 3, tokens)
    assert (others != tokens).any()
    first, cache = built.run(built.state, tokens, positions, empty(built))
    second, other = built.run(built.state, others, positions, empty(built))
    jax.tree.map(np.testing.assert_array_equal, cache, other)
    np.testing.assert_array_equal(
        np.asarray(first)[positions >= 0], np.asarray(second)[positions >= 0]
    )


def test_padding_without_a_cache():
    """Right-padded rows without a cache give the logits of the rows without padding."""
    built = build(MIXED)
    positions = np.where(
        np.arange(LENGTH) < np.array([24, 9, 1])[:, None], np.arange(LENGTH), -1
    ).astype(np.int32)
    logits, _ = built.run(built.state, texts((ROWS, LENGTH)), positions)
    unpadded, _ = built.run(built.state, texts((ROWS, LENGTH)), places(ROWS, LENGTH))
    np.testing.assert_array_equal(
        np.asarray(logits)[positions >= 0], np.asarray(unpadded)[positions >= 0]
    )
    np.testing.assert_allclose(unpadded, whole(built), atol=1e-5 * np.abs(whole(built)).max())
    assert np.isfinite(logits).all()


def test_positions_in_slots():
    """Slot p of a full layer and slot p mod W of a ring hold the keys of position p; only the last
    W remain.
    """
    built = build(MIXED)
    schedule = [(6, 3, 1), (1, 1, 1), (6, 2, 0), (1, 1, 1), (0, 6, 5), (1, 1, 1)]
    cache, fresh = (
        follow(built, schedule, empty(built)),
        follow(built, [ONE] * 24, make_empty(all_full(built), ROWS, 24, "float32")),
    )
    cache, fresh = (jax.tree.map(np.asarray, each) for each in (cache, fresh))
    for layer, everything in zip(cache.layers, fresh.layers, strict=True):
        slots = layer.store.v_BKSH.shape[2]
        for row, length in enumerate(np.sum(schedule, axis=0)):
            expected = (
                np.zeros(layer.store.v_BKSH.shape[1:], np.float32),
                np.zeros(layer.store.v_BKSH.shape[1:], np.float32),
            )
            for position in range(length):
                for side, store in zip(
                    expected,
                    (everything.store.k_BKHS.swapaxes(2, 3), everything.store.v_BKSH),
                    strict=True,
                ):
                    side[:, position % slots] = store[row, :, position]
            np.testing.assert_allclose(
                layer.store.k_BKHS[row].swapaxes(1, 2), expected[0], atol=2e-5
            )
            np.testing.assert_allclose(layer.store.v_BKSH[row], expected[1], atol=2e-5)


def all_full(built: Built):
    """Returns the configuration of a cache that drops nothing; the windows of the model still
    apply.
    """
    return config(
        windows=(None,) * built.config.num_blocks,
        kv_heads=built.config.kv_heads,
        head_size=built.config.head_size,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_report(dtype):
    """The bytes equal those of the arrays, and a ring has exactly the slots of the window."""
    architecture = config(windows=(None, 1, 4, 23, 24, 100), kv_heads=2, head_size=10, n_heads=4)
    cache = make_empty(architecture, 5, 24, dtype)
    report = cache.report()
    slots = [24, 1, 4, 23, 24, 24]
    assert report["slots"] == [[[2, size]] for size in slots]
    assert [type(layer) for layer in cache.layers] == [
        FullLayer,
        RingLayer,
        RingLayer,
        RingLayer,
        FullLayer,
        FullLayer,
    ]
    assert report["bytes"] == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(cache))
    assert report["bytes"] == 2 * 5 * 2 * sum(slots) * 10 * jnp.dtype(dtype).itemsize
    assert report["dtype"] == jnp.dtype(dtype).name


def test_a_bfloat16_cache_is_close_to_float32():
    """bfloat16 keys and values with float32 arithmetic: 8 bits of mantissa, so about 1 % in the
    logits.
    """
    built = build(config(windows=(4, None), head_size=6))
    for name in ("chunks", "idle rows"):
        cache = follow(built, SCHEDULES[name], empty(built, jnp.bfloat16), tolerance=0.03)
        assert cache.report()["dtype"] == "bfloat16" and {
            leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)
        } == {2}


@pytest.mark.parametrize(
    "architecture",
    [
        config(windows=(4, None), head_size=32),
        pytest.param(replace(SHARED, head_size=32, global_head_size=64), marks=pytest.mark.slow),
    ],
    ids=["own keys", "shared keys"],
)
def test_a_donated_cache_is_written_in_place(optimized, architecture):
    """A decode step must not copy the cache: the output aliases all of it, and temporaries are
    small in comparison.
    """
    built = build(architecture)
    cache = make_empty(built.config, ROWS, 4096, jnp.float32)
    step = jax.jit(built.run.__wrapped__, donate_argnums=(3,))
    memory = optimized(
        step.lower(built.state, texts((ROWS, 1)), places(ROWS, 1), cache)
    ).memory_analysis()
    assert memory.alias_size_in_bytes == cache.report()["bytes"]
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 10_000
    assert memory.temp_size_in_bytes < cache.report()["bytes"] / 10


def test_bytes_of_layers_with_other_or_shared_heads():
    """Layers 0 and 2 have rings of 4 slots with 2 heads of 4 numbers, layer 1 has 24 slots with 1
    head of 6.
    """
    cache = make_empty(SHARED, 5, 24, jnp.bfloat16)
    report, wanted = cache.report(), 5 * 2 * 2 * (4 * 2 * 4 + 24 * 6 + 4 * 2 * 4)
    assert cache.layers[3:] == (None, None) and report["slots"] == [
        [[2, 4]],
        [[1, 24]],
        [[2, 4]],
        [],
        [],
    ]
    assert report["bytes"] == report["full_bytes"] == report["full_bytes_bfloat16"] == wanted


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.int8,
        *(
            pytest.param(dtype, marks=pytest.mark.slow)
            for dtype in (jnp.float32, jnp.bfloat16, jnp.int4)
        ),
    ],
)
def test_shared_keys_are_read_as_stored(dtype):
    """Decoding token by token equals one call, because the queries of a prompt also read the
    rounded keys.
    """
    shared = replace(SHARED, windows=(4, None, 4), num_blocks=3, kv_shared_layers=1)
    built, tokens_BT = build(shared), texts((ROWS, LENGTH))
    whole_BTV, _ = built.run(
        built.state, tokens_BT, places(ROWS, LENGTH), empty(built, dtype).for_prefill(shared)
    )
    whole_BTV, differences = np.asarray(whole_BTV), []
    prompt = np.where(np.arange(LENGTH) < 6, places(ROWS, LENGTH), -1)
    _, cache = built.run(built.state, tokens_BT, prompt, empty(built, dtype).for_prefill(shared))
    for t in range(6, LENGTH):
        logits_B1V, cache = built.run(
            built.state, tokens_BT[:, t : t + 1], places(ROWS, 1, t), cache
        )
        differences.append(
            np.abs(np.asarray(logits_B1V)[:, 0] - whole_BTV[:, t]) / np.abs(whole_BTV).max()
        )
    # Two programs may round a number near the middle of two steps differently. This changes the
    # tokens after it in that row.
    assert np.median(differences) < 1e-5 and np.max(differences) < (
        1e-4 if dtype == jnp.float32 else 0.05
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4])
def test_bytes_of_latents(dtype):
    """R + P elements per slot and layer; two scales in int8; in int4 two per pair, because 2
    divides 10 and 6.
    """
    architecture = config(windows=(None, 4), kv_heads=4, latent=LatentConfig(10, 6, 8))
    report = make_empty(architecture, 5, 24, dtype).report()
    slot = (
        8 + 2 * 2 * 8
        if dtype == jnp.int4
        else (10 + 6) * jnp.dtype(dtype).itemsize + 8 * (dtype == jnp.int8)
    )
    wanted = 5 * (24 + 4) * slot
    assert report["bytes"] == report["full_bytes"] == wanted and report["slots"] == [
        [[1, 24]],
        [[1, 4]],
    ]
    assert report["full_bytes_bfloat16"] == 5 * 28 * 16 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, tolerance",
    [
        pytest.param(jnp.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 0.03, marks=pytest.mark.slow),
        pytest.param(jnp.int8, 0.05, marks=pytest.mark.slow),
        (jnp.int4, 0.3),
    ],
)
def test_prefill_expands_latents_and_decoding_does_not(dtype, tolerance):
    built = build(LATENT)
    follow(built, [(6, 6, 6)] + [ONE] * 12, empty(built, dtype).for_prefill(LATENT), tolerance)


@functools.partial(jax.jit, static_argnames=("dtype", "kind"))
def packed_results(k_BTKH, v_BTKH, q_BKMH, weights_BKMS, *, dtype, kind=stores.Store):
    """Returns a store that is written at once and one that is written token by token, and what
    attention reads.
    """
    B, T, K, R = v_BTKH.shape
    H = k_BTKH.shape[-1]
    store = kind.from_kv(k_BTKH, v_BTKH, dtype)
    one_by_one = kind.empty(B, K, (H if kind is stores.Store else H - R, R), T, dtype)
    for t in range(T):
        new = (x_BTKH[:, t : t + 1] for x_BTKH in (k_BTKH, v_BTKH))
        one_by_one = one_by_one.write(*new, jnp.full((B, 1, 1), t))
    read = store.scores(q_BKMH), store.weighted_values(weights_BKMS, jnp.float32)
    return store, one_by_one, store.dequantize(jnp.float32), read


def check_reads(held, q_BKMH, weights_BKMS, found_scores, found):
    """Compares what attention reads from a store with float64 sums over the dequantized keys and
    values.

    float32 sums of H and of S products: an error of some epsilons of the sum of the absolute
    products.
    """
    keys_BSKH, values_BSKH = (np.asarray(side, np.float64) for side in held)
    scale = keys_BSKH.shape[-1] ** -0.5
    for axes, x, y, got, factor in (
        ("bkmh,bskh->bkms", q_BKMH, keys_BSKH, found_scores, scale),
        ("bkms,bskh->bkmh", weights_BKMS, values_BSKH, found, 1),
    ):
        sums = factor * np.einsum(axes, np.abs(x), np.abs(y))
        assert (np.abs(got - factor * np.einsum(axes, np.float64(x), y)) <= 1e-5 * sums).all()


@pytest.mark.parametrize(
    ("dtype", "bits", "size", "group"),
    [
        (stores.INT4_PACKED, 4, 64, 32),
        (stores.INT2_PACKED, 2, 64, 32),
        pytest.param(stores.INT4_PACKED, 4, 6, 2, marks=pytest.mark.slow),
        pytest.param(stores.INT2_PACKED, 2, 48, 16, marks=pytest.mark.slow),
    ],
)
def test_packed_numbers_are_within_half_a_scale(dtype, bits, size, group):
    """Every element of keys and values, written at once or one by one; matrix multiplications use
    the stored values.
    """
    random = np.random.default_rng(0)
    x_BTKH = random.standard_normal((2, 5, 3, size)) * 10.0 ** random.integers(-4, 4, (2, 5, 3, 1))
    x_BTKH[0, 0, 0] = 0
    q_BKMH, weights_BKMS = random.standard_normal((2, 3, 4, size)), random.random((2, 3, 4, 5))
    inputs = [np.float32(x) for x in (x_BTKH, -x_BTKH[..., ::-1], q_BKMH, weights_BKMS)]
    store, one_by_one, held, read = packed_results(*inputs, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, store, one_by_one)
    row_bytes = size * bits // 8 + 2 * 2 * size // group
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(store)) == 2 * 2 * 5 * 3 * row_bytes
    for side_BSKH, wanted in zip(held, inputs, strict=False):
        groups = wanted.astype(np.float64).reshape(2, 5, 3, -1, group)
        # Half a scale, and the rounding of the minimum and of the largest multiple of the scale to
        # bfloat16.
        extent, largest = np.ptp(groups, axis=-1), np.abs(groups).max(axis=-1)
        bound = extent / (2**bits - 1) / 2 + 2**-9 * (1 + 2**-8) * (largest + extent)
        assert (
            np.abs(np.asarray(side_BSKH, np.float64) - wanted)
            <= np.repeat(bound, group, axis=-1) + 1e-12
        ).all()
    check_reads(held, *inputs[2:], *read)


def test_latents_are_read_as_packed():
    random = np.random.default_rng(1)
    latent, rotated = random.standard_normal((2, 5, 1, 48)), random.standard_normal((2, 5, 1, 16))
    k_BTKH = np.concatenate([latent, rotated], axis=-1)
    inputs = [
        np.float32(x)
        for x in (
            k_BTKH,
            latent,
            random.standard_normal((2, 1, 4, 64)),
            random.random((2, 1, 4, 5)),
        )
    ]
    store, one_by_one, held, read = packed_results(
        *inputs, dtype=stores.INT2_PACKED, kind=stores.LatentStore
    )
    jax.tree.map(np.testing.assert_array_equal, store, one_by_one)
    assert store.sizes == (16, 48) and sum(
        leaf.nbytes for leaf in jax.tree.leaves(store)
    ) == 2 * 5 * 8 * (1 + 3)
    for side, wanted, group in ((held[1], latent, 16), (held[0][..., 48:], rotated, 16)):
        groups = wanted.reshape(2, 5, 1, -1, group)
        bound = np.ptp(groups, axis=-1) / 6 + 2**-8 * (
            np.abs(groups).max(axis=-1) + np.ptp(groups, axis=-1)
        )
        assert (
            np.abs(np.asarray(side, np.float64) - wanted) <= np.repeat(bound, group, axis=-1)
        ).all()
    check_reads(held, *inputs[2:], *read)


@pytest.mark.parametrize(("dtype", "bits"), [(stores.INT4_PACKED, 4), (stores.INT2_PACKED, 2)])
def test_order_of_packed_numbers(dtype, bits):
    """Element e holds number e + i · H / n in its i-th lowest bits; unpacking restores the numbers,
    on either axis.
    """
    H, n = 32, 8 * dtype.itemsize // bits
    numbers = np.random.default_rng(0).integers(0, 2**bits, (3, H))
    wanted = [
        [sum(int(row[e + i * H // n]) << bits * i for i in range(n)) for e in range(H // n)]
        for row in numbers
    ]
    packed = stores.pack(jnp.asarray(numbers, jnp.float32), dtype)
    np.testing.assert_array_equal(packed, np.array(wanted, dtype), strict=True)
    np.testing.assert_array_equal(stores.unpack(packed, -1), numbers)
    np.testing.assert_array_equal(stores.unpack(packed.T, -2), numbers.T)


def test_groups_of_packed_numbers():
    sizes = {64: 32, 96: 32, 24: 8, 6: 2, 10: 2, 12: 4, 80: 16}
    assert {size: stores.group_size(size) for size in sizes} == sizes
    with pytest.raises(ValueError, match="vectors of 7 numbers cannot be packed 2 to an element"):
        stores.pack(jnp.zeros((1, 7)), stores.INT4_PACKED)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_over_an_int2_cache_is_that_over_its_rounded_keys(window):
    """A prompt, then three decoded tokens: softmax attention in float64 over the rounded keys and
    values.

    The queries of the prompt attend to the keys before rounding, so only the decoded tokens are
    compared.
    """
    random = np.random.default_rng(0)
    B, T, K, G, H, last = 2, 9, 2, 3, 32, 3
    q, k, v = (
        np.float32(random.standard_normal((B, T, K, *size))) for size in ((G, H), (H,), (H,))
    )
    store = stores.Store.empty(B, K, (H, H), T if window is None else window, stores.INT2_PACKED)
    layer = FullLayer(store) if window is None else RingLayer(store)

    @jax.jit
    def run(q, k, v, positions_BT):
        split = T - last
        _, after, _ = layer.attend(
            q[:, :split], k[:, :split], v[:, :split], positions_BT[:, :split], window
        )
        outs = []
        for t in range(split, T):
            out, after, _ = after.attend(
                *(x[:, t : t + 1] for x in (q, k, v, positions_BT)), window
            )
            outs.append(out)
        return jnp.concatenate(outs, axis=1), stores.Store.from_kv(
            k, v, stores.INT2_PACKED
        ).dequantize(jnp.float32)

    found, (keys, values) = jax.device_get(run(q, k, v, places(B, T)))
    for t in range(T - last, T):
        first = 0 if window is None else max(0, t + 1 - window)
        scores = (
            np.einsum("bkgh,bskh->bkgs", q[:, t].astype(np.float64), keys[:, first : t + 1])
            * H**-0.5
        )
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        wanted = np.einsum("bkgs,bskh->bkgh", weights, values[:, first : t + 1].astype(np.float64))
        np.testing.assert_allclose(found[:, t - (T - last)], wanted, atol=2e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_a_two_pass_layer_keeps_the_first_half(window):
    """A full layer without slots for the second half, and a ring: all tokens attend as in one
    sequence.
    """
    random = np.random.default_rng(0)
    B, T, K, H = 2, 7, 2, 4
    q, k, v = (
        np.float32(random.standard_normal((B, 2 * T, K, *size))) for size in ((3, H), (H,), (H,))
    )
    store = stores.Store.empty(B, K, (H, H), T if window is None else window, jnp.float32)
    layer = FullLayer(store) if window is None else RingLayer(store)

    @jax.jit
    def run(q, k, v, positions_BT):
        out, after, _ = TwoPassLayer(layer).attend(q, k, v, positions_BT, window)
        wanted, _, _ = NoCache().attend(q, k, v, positions_BT, window)
        _, kept, _ = layer.attend(q[:, :T], k[:, :T], v[:, :T], positions_BT[:, :T], window)
        return out, wanted, after, kept

    out, wanted, after, kept = run(q, k, v, places(B, 2 * T))
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, after, kept)


@pytest.mark.parametrize("window", [None, 5])
def test_calls_for_some_rows_equal_a_call_for_all_rows(window):
    """Row by row, in rows of any order, in consecutive parts of one row, and token by token."""
    B, T, K, H = 3, 4, 2, 4
    random = np.random.default_rng(0)
    sizes = (3, H), (H,), (H,)
    before, new = (
        [np.float32(random.standard_normal((B, T, K, *size))) for size in sizes] for _ in range(2)
    )
    first, then = places(B, T), places(B, T, T)
    order = np.array([2, 0, 1])

    @jax.jit
    def run(before, new):
        store = stores.Store.empty(B, K, (H, H), 2 * T if window is None else window, jnp.float32)
        layer = FullLayer(store) if window is None else RingLayer(store)
        _, layer, _ = layer.attend(*before, first, window)
        wanted = layer.attend(*new, then, window)[:2]
        one, outs = layer, []
        for row in range(B):
            single = [x[row : row + 1] for x in (*new, jnp.asarray(then))]
            out, wrapped, _ = SlotLayer(one, jnp.int32(row)).attend(*single, window)
            one = wrapped.layer
            outs.append(out)
        mixed = [x[order] for x in (*new, jnp.asarray(then))]
        out, wrapped, _ = SlotRowsLayer(layer, jnp.asarray(order)).attend(*mixed, window)
        halves = [x[1].reshape(2, T // 2, *x.shape[2:]) for x in (*new, jnp.asarray(then))]
        out_of_parts, parts, _ = SlotRowsLayer(layer, jnp.array([1, 1])).attend(*halves, window)
        verified_out, verified, _ = VerificationLayer(layer).attend(*new, then, window)
        all_rows = {
            "row by row": (jnp.concatenate(outs), one),
            "another order": (out[np.argsort(order)], wrapped.layer),
            "token by token": (verified_out, verified.layer),
        }
        return wanted, all_rows, (out_of_parts.reshape(1, T, K, 3, H), parts.layer), layer

    (wanted_out, wanted), all_rows, (out_of_parts, parts), layer = jax.tree.map(
        np.asarray, run(before, new)
    )
    for name, (out, updated) in all_rows.items():
        np.testing.assert_allclose(out, wanted_out, atol=1e-5, err_msg=name)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, name), updated, wanted)  # noqa: B023
    np.testing.assert_allclose(out_of_parts, wanted_out[1:2], atol=1e-5)
    for leaf, written, untouched in zip(*map(jax.tree.leaves, (parts, wanted, layer)), strict=True):
        np.testing.assert_array_equal(leaf[1], written[1])
        np.testing.assert_array_equal(leaf[[0, 2]], untouched[[0, 2]])


def test_segments_begin_at_whole_units():
    """Otherwise a block of the prefix cache could cross the border between two segments."""

    def segment(slots):
        return stores.Store.empty(1, 1, (2, 2), slots, jnp.float32)

    for slots in (256, 320, 1000, 2000, 2048, 8704):
        store = jax.eval_shape(functools.partial(stores.SegmentedStore.empty, 1, slots, segment))
        starts = [start for start, _ in store.segments_by_start]
        assert store.slots == slots and len(starts) == min(4, 1 + int(np.log2(slots / 128)))
        assert all(start % 64 == 0 for start in starts)

"""Compressed caches in the engine: memory is saved, the right tokens are kept, and nothing else
changes.
"""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import Config, LatentConfig, UserError
from dantinox.config.kv_settings import AVERAGE_POLICIES, KVSection
from dantinox.generation import generate, prepare
from dantinox.generation.api.generate_ids import _IdsModel
from dantinox.generation.decode import generate_toks as decode
from dantinox.generation.decode.cache_plan import CachePlan, head_order, plan_cache
from dantinox.generation.decode.generate_toks import _generate_toks, _prefill_toks
from dantinox.generation.decode.prepared_model import permute_heads
from dantinox.generation.static_batch import StaticBatch, StaticOptions
from dantinox.model import attention, attention_kernels, make_cache
from dantinox.model.compressed_cache import CompressedLayer
from dantinox.run import KVCalibration
from dantinox.sampling import SamplingParams
from tests.error_texts import ERRORS

from . import builder

CONFIG = builder.config(max_context=512, kv_heads=2)
PROMPT, NEW, SLOTS = 70, 58, 128
POLICIES = ["snapkv+ema", "expected_attention", "kvzip", "streaming", "tova", "h2o", "random"]


def plan_of(slots=SLOTS, config=CONFIG, calibration=None, **kv: Any) -> CachePlan:
    return plan_cache(config, KVSection.model_validate(kv), slots, calibration)


def make_calibration(entropy_LN, **more: Any) -> KVCalibration:
    return KVCalibration(np.asarray(entropy_LN, float), more.get("coverage"), path="here")


def session(model, prompts, new, plan=None, report=None, **settings: Any) -> StaticBatch:
    rows = len(prompts)
    tokens, lengths = builder.padded(prompts)
    params = SamplingParams.build({"greedy": True} | settings, batch=rows)
    return StaticBatch(
        model,
        tokens,
        lengths,
        params,
        limits_B=np.full(rows, new),
        eos_ids=[[]] * rows,
        options=StaticOptions(plan=plan, report=report),
    )


def create_cache(*arguments):
    """Returns a cache with NumPy arrays, for which nothing is compiled."""
    return jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(partial(make_cache, *arguments))
    )


def groups_of(cache) -> list:
    return [
        group
        for layer in cache.layers
        if isinstance(layer, CompressedLayer)
        for group in layer.groups
    ]


# Budgets


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.2, 0.1])
@pytest.mark.parametrize("signal", ["uniform", "entropy"])
def test_the_slots_sum_to_the_request_and_the_bytes_fall_with_it(ratio, signal):
    config = builder.config(windows=(None,) * 6, kv_heads=4, head_size=64)
    random = np.random.default_rng(0)
    calibration = make_calibration(random.uniform(0.1, 4, (6, 4)))
    for slots in (4096, 512):
        cached = plan_of(slots, config, calibration, budget=ratio, signal=signal)
        report = jax.eval_shape(
            partial(make_cache, config, 2, slots, jnp.float32, cached.compression)
        )
        total = sum(heads * kept for groups in cached.compression.groups for heads, kept in groups)
        assert 0 <= int(ratio * 6 * 4 * slots) - total < 8
        assert all(slots not in leaf.shape for leaf in jax.tree.leaves(report))
    # Two scales of 4 bytes per 128 elements in int8; two numbers of 2 bytes per 32 in int4 and
    # int2. Positions and importances are no larger.
    dtypes = (
        (jnp.float32, 1, None),
        (jnp.bfloat16, 1, None),
        (jnp.int8, 1, 0.58),
        (jnp.int4, 1.1, 0.32),
        ("int2", 1.2, 0.21),
    )
    for dtype, of_full, of_bfloat16 in dtypes:
        report, full = (
            create_cache(config, 2, 512, dtype, cached.compression).report(),
            create_cache(config, 2, 512, dtype).report(),
        )
        assert report["full_bytes"] == full["bytes"]
        assert (
            report["full_bytes_bfloat16"]
            == create_cache(config, 2, 512, jnp.bfloat16).report()["bytes"]
        )
        assert report["bytes"] <= of_full * (ratio + 0.05) * full["bytes"]
        assert (
            of_bfloat16 is None
            or report["bytes"] <= of_bfloat16 * (ratio + 0.05) * report["full_bytes_bfloat16"]
        )
        assert (
            report["requested_ratio"] == ratio
            and report["ratio"] == report["bytes"] / full["bytes"]
        )


def test_entropy_of_a_head_changes_its_slots():
    def slots(entropy_LN):
        kv, calibration = KVSection(budget=0.5, signal="entropy"), make_calibration(entropy_LN)
        groups, order_LK = (
            plan_cache(CONFIG, kv, SLOTS, calibration).compression.groups,
            head_order(CONFIG, kv, calibration),
        )
        sizes = [[kept for heads, kept in layer for _ in range(heads)] for layer in groups]
        return [
            dict(zip(order, row, strict=True)) for order, row in zip(order_LK, sizes, strict=True)
        ]

    low = slots([[1, 1, 1, 1], [1, 1, 1, 1]])
    high = slots(
        [[1, 1, 1, 1], [1, 1, 3, 1]]
    )  # the third query head belongs to the second key head
    assert low == [{0: 64, 1: 64}] * 2
    assert high[1][1] > high[1][0] and high[0][0] < 64


def test_a_windowed_layer_counts_its_window():
    config = builder.config(windows=(None, 32, 100, 400))
    groups = plan_of(256, config, budget=0.5).compression.groups
    total = sum(heads * kept for layer in groups for heads, kept in layer)
    assert 0 <= int(0.5 * 2 * (256 + 32 + 100 + 256)) - total < 8
    assert all(
        kept <= cap
        for layer, cap in zip(groups, (256, 32, 100, 256), strict=True)
        for _, kept in layer
    )


def head_slots(plan) -> list[list[int]]:
    """Returns the slots of every head of each layer, in the order of `head_order`."""
    return [
        [slots for heads, slots in groups for _ in range(heads)]
        for groups in plan.compression.groups
    ]


@pytest.mark.parametrize(
    ("ratios", "kv", "windows", "wanted"),
    [
        pytest.param(
            (1, 1, 2, 4), {"budget": 0.25}, (None,) * 4, (64, 64, 128, 256), id="in proportion"
        ),
        pytest.param(
            (3, 3, 6, 12), {"budget": 0.25}, (None,) * 4, (64, 64, 128, 256), id="only relative"
        ),
        # 528 slots per head of all layers: 24 are the least, and 504 are divided by 1, 2 and 4.
        pytest.param(
            (0.01, 1, 2, 4), {"budget_tokens": 132}, (None,) * 4, (24, 72, 144, 288), id="floor"
        ),
        # 456 of 912 slots: 96 for the window, which asks for more, and the other 360 by 1, 2 and 6.
        pytest.param(
            (9, 1, 2, 6), {"budget": 0.2802}, (96, None, None, None), (96, 40, 80, 240), id="window"
        ),
    ],
)
def test_layers_have_slots_in_proportion_to_their_ratios(ratios, kv, windows, wanted):
    config = builder.config(max_context=512, windows=windows)
    plan = plan_of(512, config, signal="uniform", layer_ratios=ratios, **kv)
    assert head_slots(plan) == [[slots] * 2 for slots in wanted]


def test_layer_ratios_multiply_the_shares_of_the_heads():
    """Entropies over their mean are 0.5, 1.5 | 1, 1, and the layers have 0.5 and 1.5: shares of 1,
    3 | 6, 6 of 16.
    """
    entropy, kv = (
        make_calibration([[3, 1, 9, 9], [6, 2, 6, 6]]),
        {
            "budget": 0.25,
            "layer_ratios": (1, 3),
        },
    )
    plan = plan_of(512, CONFIG, entropy, signal="entropy", **kv)
    assert head_slots(plan) == [[96, 32], [192, 192]]
    assert head_order(CONFIG, KVSection(signal="entropy", **kv), entropy) == ((1, 0), (0, 1))
    # With the signal `loss` they multiply the slots that it requests: here 64 for every head,
    # because fewer cost much.
    rises_LKC = np.broadcast_to([0.1, 0.0, 0.0], (2, 2, 3))
    loss = KVCalibration(np.ones((2, 4)), loss_LKC=rises_LKC, loss_slots=(16, 64, 512), path="here")
    for ratios, wanted in ((None, (64, 64)), ((1, 3), (32, 96))):
        assert head_slots(plan_of(512, CONFIG, loss, budget=0.125, layer_ratios=ratios)) == [
            [slots] * 2 for slots in wanted
        ]


def test_layer_ratios_of_another_number_of_layers_are_rejected():
    for check in (plan_of, lambda **kv: head_order(CONFIG, KVSection(**kv))):
        with pytest.raises(
            UserError,
            match=r"^kv.layer_ratios must have one number for each of the 2 layers, got 3$",
        ):
            check(budget=0.5, layer_ratios=(1, 1, 2))


@pytest.mark.parametrize(
    ("dtype", "config", "said"),
    [
        (
            "int4",
            builder.config(head_size=7),
            "kv.dtype int4 needs heads with sizes that are multiples of 2, got 7",
        ),
        ("int2", CONFIG, "kv.dtype int2 needs heads with sizes that are multiples of 16, got 8"),
        (
            "int2",
            builder.config(latent=LatentConfig(16, 4, 6), kv_heads=4),
            (
                "kv.dtype int2 needs latents and their rotated parts with"
                " sizes that are multiples of 16, got 4"
            ),
        ),
    ],
)
def test_sizes_that_cannot_be_packed_are_rejected(dtype, config, said):
    with pytest.raises(UserError, match=f"^{said}$"):
        plan_of(64, config, dtype=dtype)


@pytest.mark.parametrize("budget", [{}, {"budget_tokens": 40, "signal": "uniform"}])
def test_bytes_of_an_int2_cache(budget):
    """Per slot and key head 2 · (48 / 4 + 2 · 2 · 3) bytes, and 8 for the position and the
    importance if tokens are evicted.
    """
    config = builder.config(max_context=128, head_size=48, windows=(None, 32))
    running = session(
        builder.model(config), [prompt()], 40, plan_of(128, config, dtype="int2", **budget)
    )
    chunks = [running.start(), running.advance()]
    report, slots = running.caches[0].report(), 40 + 32 if budget else 128 + 32
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(running.caches[0])) == report["bytes"]
    assert report["dtype"] == "int2" and report["payload_bytes"] == 2 * slots * 2 * 12
    assert report["bytes"] == 2 * slots * 2 * (12 + 12) + (2 * 40 * 8 if budget else 0)
    assert report["full_bytes_bfloat16"] == 2 * (128 + 32) * 2 * 48 * 2
    assert np.isin(
        np.concatenate([chunk.tokens for chunk in chunks], axis=1), np.arange(builder.V)
    ).all()


def test_budget_tokens_are_slots_per_head():
    by_tokens, by_ratio = plan_of(budget_tokens=32), plan_of(budget=0.25)
    assert by_tokens.compression.groups == by_ratio.compression.groups == (((2, 32),), ((2, 32),))


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        (
            {"budget": 0.1},
            (
                "kv.budget 0.1 leaves 12 slots per head for a sequence of"
                " 128 tokens, but each head needs 24"
            ),
        ),
        (
            {"budget_tokens": 20},
            (
                "kv.budget_tokens 20 leaves 20 slots .* but each head"
                " needs 24 .* set it to at least 24$"
            ),
        ),
        ({"budget": 0.3, "sinks": 40}, "each head needs 56 .* set it to at least 0.438$"),
    ],
)
def test_budgets_below_the_minimum_are_rejected(kv, said):
    with pytest.raises(UserError, match=said) as error:
        plan_of(**kv)
    if "budget" in kv:
        plan_of(**kv | {"budget": float(str(error.value).split()[-1])})


# In the engine


@cache
def prompt() -> list[int]:
    return builder.prompts(PROMPT, seed=3)[0]


@pytest.mark.parametrize(
    ("slots", "kv"), [(SLOTS, {"budget": 1.0}), (16, {"budget": 0.2}), (16, {"budget_tokens": 64})]
)
def test_a_sequence_that_fits_has_the_full_cache(slots, kv):
    compressed, full = (
        create_cache(CONFIG, 1, slots, jnp.float32, plan_of(slots, **own).compression)
        for own in (kv, {})
    )
    assert jax.tree.structure(compressed.layers) == jax.tree.structure(
        full.layers
    ) and not groups_of(compressed)
    report = compressed.report()
    assert (
        report["bytes"] == report["full_bytes"] == full.report()["bytes"] and report["ratio"] == 1
    )


@pytest.mark.slow
def test_ratio_one_is_bitwise_the_full_cache():
    model = builder.model(CONFIG)
    full, one = (
        generate(model, [prompt()], NEW, greedy=True, logprobs=0, return_info=True, **kv)
        for kv in ({}, {"kv_budget": 1.0})
    )
    np.testing.assert_array_equal(full[0], one[0])
    np.testing.assert_array_equal(full[1]["info"].logprob, one[1]["info"].logprob)


@pytest.mark.slow
def test_a_sequence_that_fits_is_exact_and_reported_so():
    model = builder.model(CONFIG)
    expected = generate(model, [[1, 2, 3]], 12, greedy=True)
    for kv in ({"budget": 0.2}, {"budget_tokens": 64}):
        plan = plan_of(16, **kv)
        running = session(model, [[1, 2, 3]], 12, plan)
        tokens = np.concatenate([running.start().tokens, running.advance().tokens], axis=1)
        report = running.caches[0].report()
        np.testing.assert_array_equal(tokens[0], expected[0, 3:15])
        assert (
            report["bytes"] == report["full_bytes"]
            and report["ratio"] == 1
            and not groups_of(running.caches[0])
        )


def long_session(policy):
    """Returns a session of two rows with 40 slots per head, of which the second prompt fills only
    20.
    """
    config = builder.config(max_context=512, windows=(None, 60))
    plan = plan_of(512, config, budget_tokens=40, policy=policy)
    return session(builder.model(config), builder.prompts(70, 20, seed=4), 420, plan)


# tests/model/test_compressed.py tests each policy without the engine.
@pytest.mark.parametrize(
    "policy", [POLICIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in POLICIES[1:])]
)
def test_ten_times_the_capacity_keeps_shapes_sinks_and_the_newest(policy):
    running = long_session(policy)
    running.start()
    shapes = [leaf.shape for leaf in jax.tree.leaves(running.caches[0])]
    done = False
    while not done:
        done = bool(running.advance().done.all())
        assert [leaf.shape for leaf in jax.tree.leaves(running.caches[0])] == shapes
    assert len(groups_of(running.caches[0])) == 2
    for index, layer in enumerate(running.caches[0].layers):
        (group,) = layer.groups
        for row, last in enumerate((488, 438)):  # the last drawn token was never processed
            for kept in np.asarray(group.position_BKS[row]):
                assert len(set(kept.tolist())) == 40 and kept.max() == last and kept.min() >= 0
                assert set(range(last - 15, last + 1)) <= set(kept.tolist())
                assert index == 1 or {0, 1, 2, 3} <= set(kept.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.5, pytest.param(0.3, marks=pytest.mark.slow)])
def test_decoding_holds_nothing_of_the_sequence_length(ratio, optimized):
    """No array of the cache or of the compiled program has an axis of length N. Temporaries are
    small; no cache is copied.
    """
    config = builder.config(
        vocab_size=61, max_context=4096, head_size=32, kv_heads=4, windows=(None,) * 2
    )
    model = builder.model(config)
    running = session(model, [[1] * 5] * 2, 9)
    plan = plan_of(
        2048,
        config,
        make_calibration(np.linspace(0.5, 3, 8).reshape(2, 4)),
        budget=ratio,
        signal="entropy",
    )
    cache = create_cache(config, 2, 2048, jnp.float32, plan.compression)
    program = optimized(
        _generate_toks.lower(
            model, (cache,), running.state, running.params, np.int32(32), **running._options
        )
    )
    sizes = {
        int(size)
        for shape in re.findall(r"\[([\d,]+)\]", program.as_text())
        for size in shape.split(",")
    }
    assert 2048 not in sizes | {size for leaf in jax.tree.leaves(cache) for size in leaf.shape}
    assert {kept for layer in plan.compression.groups for _, kept in layer} <= sizes
    memory, held = program.memory_analysis(), cache.report()["bytes"]
    assert memory.temp_size_in_bytes < 0.1 * held
    assert memory.alias_size_in_bytes >= held
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", "int2"])
def test_quantized_keys_are_never_dequantized_all_together(dtype, optimized):
    config = builder.config(
        vocab_size=61, max_context=4096, head_size=32, kv_heads=4, windows=(None,) * 4
    )
    model = builder.model(config)
    running = session(model, [[1] * 5] * 2, 9)
    cache = create_cache(config, 2, 2048, jnp.dtype(dtype))
    program = optimized(
        _generate_toks.lower(
            model, (cache,), running.state, running.params, np.int32(32), **running._options
        )
    )
    held = cache.report()["bytes"]
    assert held < 0.6 * create_cache(config, 2, 2048, jnp.float32).report()["bytes"]
    # In each of four layers, at most two of the eight heads at a time.
    assert (
        program.memory_analysis().temp_size_in_bytes
        < 0.1 * held * {"bfloat16": 1, "int8": 2, "int4": 3, "int2": 6}[dtype]
    )
    assert program.memory_analysis().alias_size_in_bytes >= held


def test_only_filled_slots_are_read():
    running = long_session(POLICIES[0])
    running.start()
    group = running.caches[0].layers[0].groups[0]
    empty_BKS = np.asarray(group.position_BKS) < 0
    assert empty_BKS[1].sum() == 2 * 20 and not empty_BKS[0].any()
    model = builder.model(builder.config(max_context=512, windows=(None, 60)))
    read = jax.jit(
        lambda cache: model(np.array([[5], [5]]), np.array([[70], [20]]), cache=cache)[0]
    )

    def next_logits(changed_BKS):
        def poisoned(leaf):
            if leaf.shape == group.store.v_BKSH.shape:
                return np.where(changed_BKS[..., None], np.float32(1e30), leaf)
            return (
                np.where(changed_BKS[:, :, None], np.float32(1e30), leaf)
                if leaf.shape == group.store.k_BKHS.shape
                else leaf
            )

        return np.asarray(read(jax.tree.map(poisoned, jax.device_get(running.caches[0]))))

    plain = next_logits(np.zeros_like(empty_BKS))
    kept_BKS = np.zeros_like(empty_BKS)
    kept_BKS[1, 0, np.argmin(empty_BKS[1, 0])] = True
    np.testing.assert_array_equal(next_logits(empty_BKS), plain)
    assert (next_logits(kept_BKS)[1] != plain[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "windows", "lengths"),
    [
        pytest.param({"budget": 0.4, "dtype": "int8"}, (None,), (40, 33), id="int8"),
        pytest.param(
            {"budget": 0.4},
            (None, 48),
            (40, 9, 33),
            id="float32 and a window",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"budget": 0.4, "dtype": "int8"},
            (None, 48),
            (40, 9, 33),
            id="int8 and a window",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_row_is_equal_alone_and_in_a_batch(kv, windows, lengths):
    """In a batch of rows with different lengths, each row has the same tokens and cached positions
    as alone.
    """
    config = builder.config(max_context=512, windows=windows)
    model, plan = builder.model(config), plan_of(128, config, **kv)
    prompts = builder.prompts(*lengths, seed=5)

    def decoded(prompts):
        running = session(model, prompts, 50, plan)
        chunks = [running.start(), running.advance(), running.advance()]
        return np.concatenate([chunk.tokens for chunk in chunks], axis=1), groups_of(
            running.caches[0]
        )

    tokens, groups = decoded(prompts)
    for row, text in enumerate(prompts):
        (own_tokens,), own_groups = decoded([text])
        np.testing.assert_array_equal(own_tokens, tokens[row])
        for ours, solo in zip(groups, own_groups, strict=True):
            np.testing.assert_array_equal(
                np.asarray(ours.position_BKS)[row], np.asarray(solo.position_BKS)[0]
            )


LONG_CONFIG = builder.config(max_context=512, windows=(None,))
TEXTS = builder.prompts(300, 130, seed=6)
ROUTER = {"strategy": "entropy", "greedy": False, "seed": 1, "report": 0}


def read_with(monkeypatch, plan, model, dense=False, settings=None, **limits):
    """Returns a session of two long prompts and its first chunk, with other limits on the work per
    pass.
    """
    for name, value in limits.items():
        monkeypatch.setattr(decode, name, value)
    for module in (attention, attention_kernels):
        monkeypatch.setattr(module, "QUERY_BLOCK", 1024 if dense else 128)
    _prefill_toks.jitted_fn.clear_cache()
    running = session(model, TEXTS, 3, plan, **settings or {})
    return running, running.start()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_long_prompts_are_read_in_blocks_and_row_by_row(monkeypatch, dtype):
    """The cache, the token and the attention metrics equal those without blocks."""
    model = builder.model(builder.config(max_context=512, windows=(None, 48, 200)))
    plan = CachePlan(512, dtype)
    wanted, chunk = read_with(monkeypatch, plan, model, dense=True, settings=ROUTER)
    for limits in ({}, {"PREFILL_BATCH_TOKENS": 512}):
        got, same = read_with(monkeypatch, plan, model, settings=ROUTER, **limits)
        # With int8, a key that differs by a rounding error may be stored as another integer.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1 if a.dtype == np.int8 else 1e-4),
            wanted.caches,
            got.caches,
        )
        np.testing.assert_array_equal(chunk.tokens, same.tokens)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            chunk.info,
            same.info,
        )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", pytest.param("snapkv+ema", marks=pytest.mark.slow)])
def test_importances_of_a_prompt_in_blocks(monkeypatch, policy):
    plan, model = (
        plan_of(512, LONG_CONFIG, budget_tokens=48, policy=policy, decay=0.5),
        builder.model(LONG_CONFIG),
    )
    (wanted, _), (got, _) = (
        read_with(monkeypatch, plan, model, dense=dense) for dense in (True, False)
    )
    for dense, blocks in zip(groups_of(wanted.caches[0]), groups_of(got.caches[0]), strict=True):
        np.testing.assert_array_equal(dense.position_BKS, blocks.position_BKS)
        # Sums of up to 300 attention weights of queries, in another order.
        np.testing.assert_allclose(
            dense.importance_BKS, blocks.importance_BKS, rtol=1e-4, atol=1e-6
        )


def test_long_prompts_are_read_in_parts(monkeypatch):
    """A compressed cache keeps its size, its sinks and the newest tokens."""
    plan = plan_of(512, LONG_CONFIG, budget_tokens=48)
    compressed, _ = read_with(
        monkeypatch, plan, builder.model(LONG_CONFIG), COMPRESSED_PREFILL_CHUNK=100
    )
    for group in groups_of(compressed.caches[0]):
        for row, length in enumerate((300, 130)):
            for kept in np.asarray(group.position_BKS)[row]:
                assert len(set(kept.tolist())) == 48
                assert {*range(4), *range(length - 16, length)} <= set(kept.tolist())


@pytest.mark.slow
def test_important_tokens_are_not_just_the_recent_ones():
    model = builder.model(CONFIG)
    kept = {}
    for policy in POLICIES:
        more = (
            {"decay": 0.5} if policy in AVERAGE_POLICIES else {}
        )  # otherwise the recency term exceeds the attention of this model
        running = session(model, [prompt()], NEW, plan_of(budget_tokens=40, policy=policy, **more))
        running.start()
        kept[policy] = [
            set(row.tolist())
            for group in groups_of(running.caches[0])
            for row in np.asarray(group.position_BKS[0])
        ]
    newest = {*range(4), *range(PROMPT - 36, PROMPT)}
    assert kept["streaming"] == [newest] * 4
    for policy in POLICIES:
        assert all({*range(4), *range(PROMPT - 16, PROMPT)} <= row for row in kept[policy])
        assert policy == "streaming" or all(row != newest for row in kept[policy])
    assert len({str(kept[policy]) for policy in POLICIES}) == len(POLICIES)


@pytest.mark.slow
def test_the_router_reads_the_compressed_cache():
    """The router's attention metrics equal metrics over the cached keys alone, even if groups have
    different sizes.
    """
    model = builder.model(CONFIG)
    calibration = make_calibration([[1, 1, 4, 4], [1, 1, 2, 2]])
    kv = KVSection(budget=0.35, signal="entropy")
    model = permute_heads(model, head_order(CONFIG, kv, calibration))
    running = session(model, [prompt()], NEW, plan_cache(CONFIG, kv, SLOTS, calibration))
    running.start()
    assert sorted(group.position_BKS.shape[2] for group in running.caches[0].layers[0].groups) == [
        24,
        88,
    ]
    probe = jax.jit(
        lambda cache: model(
            jnp.asarray([[5]]), jnp.asarray([[PROMPT]]), cache=cache, probe=lambda s, v: (s, v)
        )[2]
    )
    scores_BNS, valid_BNS = probe(running.caches[0])["probe"][0]
    assert scores_BNS.shape == valid_BNS.shape == (1, 4, 88)
    np.testing.assert_array_equal(np.sum(valid_BNS[0], axis=1), [PROMPT + 1] * 2 + [24] * 2)
    from dantinox.sampling.entropy_router import layer_attention

    found = layer_attention(scores_BNS[0], valid_BNS[0])
    for head in range(4):
        scores = np.asarray(scores_BNS[0, head], np.float64)[np.asarray(valid_BNS[0, head])]
        a = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        np.testing.assert_allclose(found.entropy_H[head], -(a * np.log2(a)).sum(), rtol=1e-4)


@pytest.mark.parametrize(
    "weights",
    ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "bfloat16"))],
)
def test_permuted_heads_compute_the_same_function(weights):
    config = builder.config(
        windows=(None,),
        kv_heads=4,
        n_heads=8,
        no_sink=True,
        qk_norm=True,
        qk_norm_scope="layer",
        qkv_bias=True,
    )
    graph, state = nnx.split(builder.model(config))
    order = ((2, 0, 3, 1),)
    tokens, places = np.array([[3, 9, 4, 1, 7]]), np.arange(5)[None]

    @jax.jit
    def compute(state):
        model = nnx.merge(graph, state)
        models = prepare(model, weights), prepare(permute_heads(model, order), weights)
        models = *models, permute_heads(prepare(model, weights), order)
        return [
            (model(tokens, places)[0], model.blocks[0].attention.qkv.kernel[...])
            for model in models
        ]

    (plain, kernel), *others = jax.device_get(compute(state))
    for found, other_kernel in others:
        np.testing.assert_allclose(found, plain, rtol=0, atol=builder.LOGPROB_TOLERANCE)
        assert not np.array_equal(other_kernel, kernel)


def test_settings_of_generate(tmp_path):
    model = builder.model(CONFIG)
    for kv, said in [
        ({"kv_budget": 0}, r"kv.budget must be a number in \(0, 1\]"),
        ({"kv_budget": 1.5}, "kv.budget must be"),
        ({"kv_budget_tokens": 20}, "each head needs 24"),
        ({"kv_budget": 0.5, "use_cache": False}, "use_cache"),
        ({"kv_budget": 0.5, "kv_signal": "entropy"}, "kv_calibration"),
        ({"kv_budgets": 0.5}, "kv_budget"),
    ]:
        with pytest.raises(UserError, match=said):
            generate(model, [prompt()], NEW, greedy=True, **kv)


def test_evicted_keys_are_counted():
    """Every head keeps 40 tokens. The newest token is not in the cache yet."""
    run = _IdsModel(Config(), builder.model(CONFIG), [], None, False)
    settings = {
        "max_new_tokens": NEW,
        "greedy": True,
        "kv_signal": "uniform",
        "kv_budget_tokens": 40,
    }
    (batch,) = run.start([run.request(prompt(), settings)])
    for _ in batch.parts():
        pass
    (result,) = batch.results
    heads, tokens = CONFIG.num_blocks * CONFIG.kv_heads, len(prompt()) + len(result.tokens) - 1
    assert result.stats["cache"]["evicted"] == heads * (tokens - 40) > 0
    assert f"{heads * (tokens - 40):,} keys evicted" in batch.summary()


def test_a_budget_too_small_for_a_short_sequence_is_rounded_up():
    run = _IdsModel(Config(), builder.model(CONFIG), [], None, False)

    def plan(**kv):
        (batch,) = run.start(
            [run.request(prompt(), {"max_new_tokens": NEW, "kv_signal": "uniform", **kv})]
        )
        return batch.batch._prefill_options["plan"]

    with pytest.warns(UserWarning, match=ERRORS["kv_budget_0_1_is"]):
        rounded = plan(kv_budget=0.1)
    assert (
        rounded.compression.groups
        == plan(kv_budget_tokens=24).compression.groups
        == (((2, 24),), ((2, 24),))
    )

"""Adapters per request: each row computes what its merged model computes, and rows without an
adapter stay as they are.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dantinox.config import ExpertsConfig, LatentConfig, UserError
from dantinox.generation import LoadedModel
from dantinox.generation.decode.adapter_slots import AdapterSlots
from dantinox.generation.decode.prepared_model import dequantize, permute_heads, prepare
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.engine import Engine
from dantinox.generation.request import GenerationRequest
from dantinox.interop.gguf.ggml_quantize import quantize
from dantinox.kernels import load_kernels
from dantinox.model.layers import Linear
from dantinox.model.lora import Projection
from dantinox.model.packed import (
    pack_modules,
    packable_layouts,
    packed_name,
    unpack_modules,
    use_native_kernels,
)
from dantinox.model.row_adapters import AdapterStack, RowAdaptedLinear, RowAdapters, attach_adapters

from . import builder
from .builder import BYTES
from .lora_builder import adapter, merged

TOKENS = np.random.default_rng(3).integers(0, builder.V, (1, 9))
NAMES = [f"a{i}" for i in range(8)]


def eight_adapters(config):
    """Returns adapters of the ranks 1 to 8; the second one has only some targets."""
    some = {1: ("v_proj", "down_proj", "up_proj")}
    return {
        name: adapter(config, seed, seed + 1, some.get(seed)) for seed, name in enumerate(NAMES)
    }


@jax.jit
def _forward(model, tokens_BT, adapters):
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return attach_adapters(model, adapters)(tokens_BT, positions_BT)[0]


def forward(model, rows=1, adapters=None):
    return np.asarray(_forward(model, np.repeat(TOKENS, rows, axis=0), adapters))


def in_one_batch(model, adapters, order=None):
    """Returns the logits of equal rows in one batch: without an adapter, and with each adapter."""
    slots = AdapterSlots(model.config, adapters, order)
    numbers_B = jnp.asarray([0, *(slots.get(name).number for name in adapters)], jnp.int32)
    return forward(model, len(numbers_B), RowAdapters(slots.stacks, numbers_B))


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=builder.LOGPROB_TOLERANCE)


# --- one forward pass


def test_a_projection_adds_the_matrices_of_each_row():
    random, numbers = np.random.default_rng(0), [2, 0, 1, 2]
    parts = {
        "v_proj": Projection("attention/qkv", (-1, None)),
        "k_proj": Projection("attention/qkv", (-2, -1)),
    }
    linear = Linear((6,), (2, 5, 3), dtype=jnp.float32, rngs=nnx.Rngs(0), bias=True)
    a_NIR, b_NRO = (
        random.standard_normal((3, 6, 4)),
        {name: random.standard_normal((3, 2, 6)) for name in parts},
    )
    a_NIR[0], x_BTI = 0, random.standard_normal((4, 3, 6))
    stack = jax.tree.map(np.float32, AdapterStack(a_NIR, b_NRO))
    adapted = RowAdaptedLinear(
        linear, jax.tree.map(jnp.asarray, stack), parts, jnp.asarray(numbers)
    )
    found, base = map(np.asarray, jax.jit(lambda x: (adapted(x), linear(x)))(np.float32(x_BTI)))
    expected = base.astype(np.float64)
    for row, n in enumerate(numbers):  # A holds the columns of k_proj, then those of v_proj
        for columns, name, index in ((slice(0, 2), "k_proj", 3), (slice(2, 4), "v_proj", 4)):
            expected[row, :, :, index] += (
                x_BTI[row] @ a_NIR[n][:, columns] @ b_NRO[name][n]
            ).reshape(3, 2, 3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=builder.LOGPROB_TOLERANCE)
    np.testing.assert_array_equal(found[:, :, :, :3], base[:, :, :, :3])
    np.testing.assert_array_equal(found[1], base[1])


CONFIGS = {
    "gated": builder.BASE,
    "plain": builder.config(activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True),
    "shared keys": builder.config(
        windows=(4, None, 4, None, None),
        kv_shared_layers=2,
        global_head_size=12,
        global_kv_heads=1,
        k_eq_v=True,
    ),
    "experts": builder.config(experts=ExpertsConfig(4, 2, shared_dim=16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_row_equals_its_merged_model(config):
    model, adapters = builder.model(config), eight_adapters(config)
    found = in_one_batch(model, adapters)
    np.testing.assert_array_equal(found[0], forward(model, 9)[0])
    for row, one in zip(found[1:], adapters.values(), strict=True):
        expected = forward(merged(model, one))[0]
        assert np.abs(expected - found[0]).max() > 0.05, "the adapter changes nothing"
        assert_close(row, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights",
    ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4", "bfloat16"))],
)
def test_low_precision_weights(weights):
    model = builder.model(replace(builder.ONE_LAYER, hidden_dim=64))
    low = builder.changed(lambda model: prepare(model, weights, "float32", "xla"), model)
    adapters = {"a": adapter(low.config, 1)}
    wide = builder.changed(dequantize, low)
    found = in_one_batch(low, adapters)
    assert_close(found[0], forward(wide)[0])
    assert_close(found[1], forward(merged(wide, adapters["a"]))[0])


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize("native", [False, True])
def test_packed_weights(native):
    if native and load_kernels().instructions is None:
        pytest.skip(load_kernels().note)
    model = nnx.clone(builder.model(replace(builder.ONE_LAYER, hidden_dim=64)))
    parts = {}
    for name, layout in packable_layouts(model).items():
        node = model
        for key in name.split("/"):
            node = node[int(key)] if key.isdigit() else getattr(node, key)
        rows = np.moveaxis(
            np.asarray(node[...]).reshape(*layout.lead, layout.row, *layout.shape_out),
            len(layout.lead),
            -1,
        )
        parts[packed_name(name, 0, "Q8_0")] = jnp.asarray(
            quantize("Q8_0", rows).view(np.uint8).reshape(*rows.shape[:-1], -1)
        )
    pack_modules(model, parts)
    use_native_kernels(model, native, False)
    one = {"a": adapter(model.config, 1)}

    def unpacked(model):
        unpack_modules(model)
        return model

    wide, found = builder.changed(unpacked, model), in_one_batch(model, one)
    assert_close(found[0], forward(wide)[0])
    assert_close(found[1], forward(merged(wide, one["a"]))[0])


def test_reordered_key_heads():
    model, one = builder.model(), {"a": adapter(builder.BASE, 1)}
    order = ((1, 0), (0, 1))
    assert_close(in_one_batch(permute_heads(model, order), one, order), in_one_batch(model, one))


def test_errors_of_the_stacks():
    one = adapter(builder.BASE, 1, rank=4)
    slots = AdapterSlots(builder.BASE, {"a": one}, capacity=2, rank=4)
    for name, message in (
        ("a", "the adapter a is already loaded"),
        ("x:y", "the name of an adapter must be"),
        ("", "1 to 64"),
        ("-x", "the first a letter or digit, got '-x'"),
    ):
        with pytest.raises(UserError, match=message):
            slots.free_number(name)
    with pytest.raises(UserError, match="no adapter has the name 'b': loaded are a"):
        slots.get("b")
    with pytest.raises(UserError, match="rank 5, but the largest rank allowed is 4"):
        slots.arrays("b", adapter(builder.BASE, 1, rank=5))
    with pytest.raises(UserError, match="running requests use adapters that were unloaded"):
        slots.free_number("b", busy={1, 2})
    slots.insert("b", slots.free_number("b"), b"b", slots.arrays("b", one))
    with pytest.raises(UserError, match="2 adapters are loaded, the most"):
        slots.free_number("c")
    with pytest.raises(UserError, match="2 adapters are given, but at most 1"):
        AdapterSlots(builder.BASE, {"a": one, "b": one}, capacity=1)
    for sizes in ({"capacity": 1024, "rank": 1 << 30}, {"capacity": 1, "rows": 1 << 30}):
        with pytest.raises(UserError, match="over a quarter of the"):
            AdapterSlots(builder.BASE, {}, **sizes)
    with pytest.raises(UserError, match="multi-head latent attention"):
        AdapterSlots(builder.config(kv_heads=4, latent=LatentConfig(12, 4, 6)), {}, capacity=1)
    with pytest.raises(UserError, match="no adapters: ternary projections"):
        AdapterSlots(builder.config(projections="ternary"), {}, capacity=1)
    with pytest.raises(UserError, match=r"^1 adapter is given, but at most 0"):
        AdapterSlots(builder.BASE, {"a": one}, capacity=0)


# --- offline batches


def bundle():
    return builder.loaded_model(BYTES, 192, windows=(None,))


@pytest.fixture(scope="module")
def run():
    run = bundle()
    run.loras |= eight_adapters(run.model.config)
    return run


def merged_run(run, name):
    return LoadedModel(run.config, merged(run.model, run.loras[name]), BYTES)


GREEDY = {"greedy": True, "max_new_tokens": 10}


def merged_results(run, names, texts):
    """Returns the result of each text with its merged model. One pair of programs serves all short
    texts.
    """
    return [
        merged_run(run, name).generate(text, logprobs=1, **GREEDY)
        for name, text in zip(names, texts, strict=False)
    ]


@pytest.mark.slow
def test_offline_requests_with_different_adapters_share_a_batch(run):
    prompts = ["once upon", "a time there", "was"]
    requests = [
        run.request(prompts[i % 3], GREEDY, logprobs=1, lora=name)
        for i, name in enumerate([None, *NAMES[:3]])
    ]
    (started,) = run.start(requests)
    for _ in started.parts():
        pass
    for i, result in enumerate(started.results):
        alone = run if i == 0 else merged_run(run, NAMES[i - 1])
        expected = alone.generate(prompts[i % 3], logprobs=1, **GREEDY)
        assert result.tokens == expected.tokens
        np.testing.assert_allclose(
            result.steps.logprob, expected.steps.logprob, rtol=0, atol=builder.LOGPROB_TOLERANCE
        )
    sampled = {"n": 2, "seed": 5, "temperature": 0.9, "max_new_tokens": 6}
    texts = [one.tokens for one in run.generate("was", lora=NAMES[0], **sampled)]
    assert texts == [one.tokens for one in merged_run(run, NAMES[0]).generate("was", **sampled)]
    assert (
        "".join(run.stream("was", lora=NAMES[0], seed=5))
        == run.generate("was", lora=NAMES[0], seed=5).text
    )
    uncached = run.generate("was", lora=NAMES[0], use_cache=False, **GREEDY)
    assert uncached.tokens == run.generate("was", lora=NAMES[0], **GREEDY).tokens


@pytest.mark.slow
def test_drafts_with_an_adapter(run):
    drafts = {"speculation": "ngram", "draft_tokens": 3, "ngram_size": 2}
    expected = run.generate("abcabcabc", lora=NAMES[4], **GREEDY)
    assert run.generate("abcabcabc", lora=NAMES[4], **GREEDY, **drafts).tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"guidance_scale": 2.0, "negative_prompt": "xyz", "greedy": True}, {"num_beams": 3, "n": 2}],
)
def test_guidance_and_beams_with_an_adapter(run, settings):
    requests = [
        run.request("once upon", {"max_new_tokens": 8} | settings, lora=name) for name in NAMES[:2]
    ]
    found = run.complete(requests)
    n = settings.get("n", 1)
    for i, name in enumerate(NAMES[:2]):
        alone = merged_run(run, name)
        expected = alone.complete([alone.request("once upon", {"max_new_tokens": 8} | settings)])
        assert [one.tokens for one in found[i * n : (i + 1) * n]] == [
            one.tokens for one in expected
        ]


def test_long_prompts_are_prefilled_in_groups(run, monkeypatch):
    monkeypatch.setattr("dantinox.generation.decode.generate_toks.PREFILL_BATCH_TOKENS", 32)
    texts = ["once", "upon a", "time"]
    requests = [
        run.request(text, GREEDY, lora=name) for text, name in zip(texts, NAMES, strict=False)
    ]
    found = [result.tokens for result in run.complete(requests)]
    assert found == [result.tokens for result in merged_results(run, NAMES, texts)]


def test_an_unknown_adapter_is_an_error(run):
    with pytest.raises(UserError, match="no adapter has the name 'nobody': loaded are a0, a1"):
        run.generate("x", lora="nobody")
    with pytest.raises(UserError, match="no adapter has the name 'a': none is loaded"):
        bundle().generate("x", lora="a")
    with pytest.raises(UserError, match="the name of an adapter must be"):
        run.load_lora("no name", "somewhere")


# --- a running batch

LONG = "x" + "once upon a time there was a fox that said " * 3


@pytest.fixture(scope="module")
def engine(run):
    slots = builder.make_slots(run, 9, 192, max_loras=9, max_lora_rank=8)
    with builder.few_steps():
        slots.compile(run.config)
    return Engine(run, slots, queue=16)


def request(engine, prompt, lora=None, logprobs=1, **settings):
    config = engine.model.settings({"greedy": True, "max_new_tokens": 10, "seed": 1} | settings)
    return GenerationRequest(tuple(engine.model.prompt_ids(prompt)), config, logprobs, lora=lora)


def finish(engine, jobs, outputs=()):
    """Runs the engine until all requests have ended; returns their tokens and the log-probabilities
    of the tokens.
    """
    tokens, logprobs, outputs = {job: [] for job in jobs}, {job: [] for job in jobs}, [*outputs]
    while engine.busy:
        outputs += engine.step()
    for output in outputs:
        assert output.error is None
        tokens[output.job] += output.ids
        logprobs[output.job] += [] if output.steps is None else output.steps.logprob.tolist()
    return [(tokens[job], logprobs[job]) for job in jobs]


def generate(engine, *requests):
    return finish(engine, [engine.add(one) for one in requests])


def test_eight_adapters_and_the_base_in_one_running_batch(engine, run, programs):
    prompts = [LONG, *(f"text {i}" for i in range(8))]
    alone = generate(engine, request(engine, LONG))[0]
    programs()
    names = [None, *NAMES]
    found = generate(
        engine, *(request(engine, text, name) for text, name in zip(prompts, names, strict=True))
    )
    assert programs() == 0
    assert found[0] == alone, "a request without an adapter changes with its neighbours"
    for (tokens, logprobs), expected in zip(
        found[1:], merged_results(run, NAMES, prompts[1:]), strict=True
    ):
        assert tokens == expected.tokens
        np.testing.assert_allclose(
            logprobs, expected.steps.logprob, rtol=0, atol=builder.LOGPROB_TOLERANCE
        )


def test_the_prefix_cache_separates_adapters(engine):
    slots, ids = engine.batch, tuple(engine.model.prompt_ids(LONG))
    expected = [
        generate(engine, request(engine, LONG, name))[0] for name in (None, NAMES[0], NAMES[1])
    ]
    for _ in range(2):
        jobs = [engine.add(request(engine, LONG, name)) for name in (None, NAMES[0], NAMES[1])]
        assert finish(engine, jobs) == expected
    assert [job.stats.reused_tokens for job in jobs] == [
        slots.prefill_chunk * ((len(ids) - 1) // slots.prefill_chunk)
    ] * 3
    assert slots.assign_sequence(
        0, ids, slots.scopes.resolve(PromptScope("", NAMES[7]))
    )  # the keys of other adapters do not count
    assert not slots.assign_sequence(
        0, ids, slots.scopes.resolve(PromptScope("", NAMES[0]))
    ) and not slots.assign_sequence(0, ids)


def test_adapters_are_loaded_and_unloaded_while_requests_run(engine, run, programs):
    config = run.model.config
    new, other = adapter(config, 41), adapter(config, 42, rank=2)
    expected = {
        name: (
            LoadedModel(run.config, merged(run.model, one), BYTES)
            .generate("text", logprobs=1, **GREEDY)
            .tokens
        )
        for name, one in (("new", new), ("other", other))
    }
    base = generate(engine, request(engine, "text"))[0]
    programs()
    loading = engine.changes.load_adapter("new", new)
    running = engine.add(request(engine, "text"))
    with pytest.raises(UserError, match="no adapter has the name 'new'"):
        engine.add(request(engine, "text", "new"))
    outputs = engine.step()
    assert loading.result(0) is None
    jobs = [running, engine.add(request(engine, "text", "new"))]
    outputs += engine.step()
    engine.changes.unload_adapter("new")
    with pytest.raises(UserError, match="no adapter has the name 'new'"):
        engine.add(request(engine, "text", "new"))
    refused = engine.changes.load_adapter("other", other)
    outputs += engine.step()
    with pytest.raises(UserError, match="running requests use adapters that were unloaded"):
        refused.result(0)
    (tokens, _), (adapted, _) = finish(engine, jobs, outputs)
    assert (tokens, adapted) == (base[0], expected["new"])
    loaded = engine.changes.load_adapter("other", other)
    engine.step()
    assert loaded.result(0) is None
    assert generate(engine, request(engine, "text", "other"))[0][0] == expected["other"]
    assert generate(engine, request(engine, "text"))[0] == base
    engine.changes.unload_adapter("other")
    with pytest.raises(UserError, match="no adapter has the name 'other'"):
        engine.changes.unload_adapter("other")
    assert programs() == 0


def test_a_batch_without_adapters_has_the_programs_of_the_base(run):
    plain = bundle()
    slots = builder.make_slots(plain, 2, 64)
    assert slots.scopes.adapters is None
    with pytest.raises(UserError, match="none is loaded"):
        Engine(plain, slots).reserve(GenerationRequest((1, 2), plain.config, lora="a"))

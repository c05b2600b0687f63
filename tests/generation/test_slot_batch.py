"""Requests enter and leave a running batch. In any mixed batch, each request has the same tokens as
alone.
"""

from contextlib import nullcontext
from dataclasses import replace

import jax
import numpy as np
import pytest

from dantinox.config import UserError, build_config
from dantinox.generation import LoadedModel, slot_batch, slot_plan
from dantinox.generation.decode.prompt_scope import PromptScope
from dantinox.generation.engine import Engine
from dantinox.generation.request import GenerationRequest
from dantinox.sampling import process_logits
from tests.error_texts import ERRORS

from . import builder
from .builder import BYTES

CONTEXT = 320  # two chunks on a CPU
LONG = "x" + "once upon a time there was a fox that said " * 3
NEIGHBOURS = (
    {"greedy": True},
    {"dry_multiplier": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"xtc_probability": 0.5, "top_k": 5, "logit_bias": {"97": 3.0}, "bad_words": ["fox"]},
    {"typical": 0.7, "min_p": 0.1, "tail_free": 0.9, "no_repeat_ngram": 3},
    {
        "adaptive_target": 0.3,
        "min_p": 0.05,
        "watermark_keys": [7, 8, 9],
        "watermark_ngram": 4,
        "encoder_repetition_penalty": 1.2,
    },
    {
        "top_h": 0.7,
        "top_h_rule": "cumulative",
        "skew": 0.5,
        "top_p_rule": "exclusive",
        "top_p": 0.9,
    },
)


def make(context=CONTEXT, settings=None, **changes):
    changes = {"vocab_size": BYTES.vocab_size, "max_context": context} | changes
    run = LoadedModel(
        build_config({"model": {"max_context": context}} | (settings or {})),
        builder.model(builder.config(**changes)),
        BYTES,
    )
    return run, builder.make_slots(run, 4, context)


DRAWN = {"temperature": 1.2, "top_p": 0.95}
FEW_NEIGHBOURS = (
    {"greedy": True},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {"97": 3.0}},
    {"temperature": 1.5, "top_k": 5, "allowed_tokens": [*range(97, 123)]},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 4.0},
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((builder.few_steps, FEW_NEIGHBOURS), id="few steps"),
        pytest.param((nullcontext, NEIGHBOURS), id="all steps", marks=pytest.mark.slow),
    ],
)
def served(request):
    steps, neighbours = request.param
    run, slots = make(windows=(None,))
    if steps is builder.few_steps:
        builder.compile_few_steps(slots, echo=True)
    else:
        slots.compile(run.config, echo=True)
    return run, slots, neighbours, steps


def put(run, slots, slot, prompt, limit=24, report=False, echo=False, salt="", **settings):
    """Assigns a prompt to a slot and starts to decode it; returns the number of tokens from the
    prefix cache.
    """
    config, ids = (
        run.settings({"seed": 3, "max_new_tokens": limit} | settings),
        run.prompt_ids(prompt),
    )
    slots.assign_prompt(slot, ids, echo, PromptScope(salt))
    while slots.prefill(slot):
        pass
    slots.start_decoding(slot, slots.row_params(config), limit=limit, report=report)
    return slots.reused_tokens(slot)


def decode(slots, steps=8):
    """Decodes all slots to the end: tokens and reports by slot."""
    tokens, infos, busy = {}, {}, True
    while busy:
        gained = slots.collect(slots.dispatch(steps))
        for one in gained:
            tokens.setdefault(one.slot, []).extend(one.tokens.tolist())
            infos.setdefault(one.slot, []).append(one.steps)
        busy = any(not one.done for one in gained)
    return tokens, infos


def reference(run, prompt, limit, **settings):
    """Returns the tokens that the reference draws with the seed of `put`."""
    return builder.slowly(
        run.model, run.prompt_ids(prompt), limit, seed=3, eos_ids=run.tokenizer.stop_ids, **settings
    )


def test_a_request_equals_the_reference(served):
    run, slots, neighbours, _ = served
    for settings in (DRAWN, *neighbours):
        if "bad_words" not in settings:  # these are texts, which the reference does not know
            put(run, slots, 1, "hello world", **settings)
            assert decode(slots)[0][1] == reference(run, "hello world", 24, **settings), settings


def test_requests_with_any_settings_share_a_program():
    """The lists in their settings are padded to one shape."""
    run, slots = make(context=64)
    layouts = set()
    for settings in ({}, *NEIGHBOURS, *FEW_NEIGHBOURS):
        row = slots.row_params(run.settings({"seed": 3, **settings}))
        layouts.add(
            (
                row.program,
                jax.tree.structure(row.params),
                *((x.shape, x.dtype) for x in jax.tree.leaves(row.params)),
            )
        )
    assert len(layouts) == 1


def test_a_request_is_equal_in_every_slot_and_batch(served, programs):
    run, slots, neighbours, _ = served
    put(run, slots, 0, LONG, **DRAWN)
    alone = decode(slots)[0][0]
    programs()
    for slot in range(4):
        for steps in (1, 32):
            others = [other for other in range(4) if other != slot]
            for other, settings in zip(others, neighbours[slot:] + neighbours[:slot], strict=False):
                prompt = "something else " * (
                    1 + 11 * (other == 3)
                )  # reaches into the second chunk
                put(run, slots, other, prompt, limit=5 + 3 * other, report=other == 2, **settings)
            slots.dispatch(3)
            put(run, slots, slot, LONG, **DRAWN)
            assert decode(slots, steps)[0][slot] == alone
    assert programs() == 0


def test_each_chunk_runs_the_smallest_program(served, monkeypatch):
    """A batch changes to the program for all steps while a row needs it. The other rows keep their
    tokens.
    """
    run, slots, neighbours, _ = served
    put(run, slots, 0, LONG, **DRAWN)
    alone, subsets, reduce_state = decode(slots)[0][0], [], slot_batch.reduce_state

    def reduce(subset, state):
        subsets.append(subset)
        return reduce_state(subset, state)

    monkeypatch.setattr(slot_batch, "reduce_state", reduce)
    put(run, slots, 1, "one", limit=16, greedy=True)
    decode(slots)
    assert subsets == [0, 0]
    subsets.clear()
    put(run, slots, 0, LONG, **DRAWN)
    put(run, slots, 1, "one", limit=8, **neighbours[1])
    tokens = decode(slots)[0]
    assert subsets == [3, 2, 2] and tokens[0] == alone
    subsets.clear()
    put(run, slots, 0, LONG, limit=8, report=True, **DRAWN)
    assert decode(slots)[0][0] == alone[:8] and subsets == [3]


def test_samples_share_one_prefill(served):
    run, slots, *_ = served
    config, ids = run.settings({"seed": 3, "max_new_tokens": 12} | DRAWN), run.prompt_ids(LONG)
    slots.assign_prompt(0, ids)
    while slots.prefill(0):
        pass
    for sample, slot in enumerate((0, 3, 1)):
        if slot:
            slots.copy_prompt(0, slot)
        slots.start_decoding(slot, slots.row_params(config), limit=12, sample_index=sample)
    tokens = decode(slots)[0]
    expected = [reference(run, LONG, 12, sample=sample, **DRAWN) for sample in range(3)]
    assert [tokens[slot] for slot in (0, 3, 1)] == expected


@pytest.mark.slow
def test_pairs_of_rows(served):
    """A request with guidance has bitwise the same answer alone, from the prefix cache and in a
    mixed batch, by the formula.
    """
    run, slots, *_ = served
    engine, negative = Engine(run, slots), "x" * 70
    settings = {"seed": 4, "max_new_tokens": 6}
    config = run.settings(settings | {"guidance_scale": 1.8, "negative_prompt": negative})
    guided = run.request("a fox", config, logprobs=0)
    plain = run.request("a fox", settings, logprobs=0)

    def answers(*requests):
        jobs = [engine.add(one) for one in requests]
        found = [([], []) for _ in jobs]
        while engine.busy:
            for output in engine.step():
                if output.ids:
                    tokens, logprobs = found[jobs.index(output.job)]
                    tokens += output.ids
                    logprobs += output.steps.logprob.tolist()
        return found

    alone = *answers(guided), *answers(plain)
    assert answers(plain, guided, plain) == [alone[1], alone[0], alone[1]]
    assert answers(guided, guided) == [alone[0]] * 2
    ids = [*guided.ids], run.prompt_ids(negative)
    tokens, logprobs = builder.guided_text(run.model, *ids, 1.8, 6, 4)
    assert alone[0][0] == tokens
    np.testing.assert_allclose(alone[0][1], logprobs, rtol=1e-5, atol=3e-5)


def test_reports_of_tokens_and_of_the_prompt(served):
    """Reports equal a softmax in float64 over the logits of one pass without a cache."""
    run, slots, *_ = served
    ids = run.prompt_ids(LONG)
    put(run, slots, 2, LONG, limit=20, report=True, echo=True, **DRAWN)
    prompt_steps = slots.prompt_steps(2)
    put(run, slots, 0, "nobody asks", **DRAWN)
    tokens, infos = decode(slots)
    assert tokens[2] == reference(run, LONG, 20, **DRAWN) and infos[0][0] is None
    text, start = [*ids, *tokens[2]], len(ids) - 1
    logits_TV = builder.all_logits(run.model, text)[:-1]
    lnp_TV, places = np.stack([*map(builder.log_softmax, logits_TV)]), np.arange(len(text) - 1)
    chosen_T, tolerance = (
        lnp_TV[places, text[1:]],
        {
            "rtol": 1e-4,
            "atol": builder.LOGPROB_TOLERANCE,
        },
    )
    np.testing.assert_allclose(prompt_steps.logprob, chosen_T[:start], **tolerance)
    found = jax.tree.map(lambda *parts: np.concatenate(parts), *infos[2])
    np.testing.assert_allclose(found.logprob, chosen_T[start:], **tolerance)
    p_NV, bits_NV = np.exp(lnp_TV[start:]), -lnp_TV[start:] / np.log(2)
    entropy_N = (p_NV * bits_NV).sum(axis=1)
    np.testing.assert_allclose(found.entropy, entropy_N, **tolerance)
    np.testing.assert_allclose(
        found.varentropy, (p_NV * (bits_NV - entropy_N[:, None]) ** 2).sum(axis=1), **tolerance
    )
    cuts = [
        {"name": "temperature", "t": DRAWN["temperature"]},
        {"name": "top_p", "p": DRAWN["top_p"]},
    ]
    kept_NV = np.asarray(process_logits(logits_TV[start:], cuts))
    sampled = [
        builder.log_softmax(row_V)[token] for row_V, token in zip(kept_NV, tokens[2], strict=True)
    ]
    np.testing.assert_allclose(found.logprob_sampled, sampled, **tolerance)
    np.testing.assert_array_equal(found.survivors, (kept_NV > -np.inf).sum(axis=1))
    np.testing.assert_array_equal(
        found.top_ids, np.argsort(-logits_TV[start:], axis=1, kind="stable")[:, :20]
    )


def test_a_stopped_request_has_no_output(served):
    run, slots, *_ = served
    put(run, slots, 0, "a", **DRAWN)
    put(run, slots, 1, "b", **DRAWN)
    flight = slots.dispatch(4)
    slots.stop(0)
    assert [one.slot for one in slots.collect(flight)] == [1]
    put(run, slots, 0, "c", limit=3)
    assert len(decode(slots)[0][0]) == 3


def test_a_slot_is_refilled_while_its_last_token_is_computed(served):
    run, slots, *_ = served
    first, second = (reference(run, prompt, 6, **DRAWN) for prompt in ("a slot", LONG))
    put(run, slots, 1, "a slot", limit=6, **DRAWN)
    assert slots.remaining() == {1: 6}
    ending = slots.dispatch(6)
    assert slots.remaining() == {}
    put(run, slots, 1, LONG, limit=6, **DRAWN)
    following = slots.dispatch(2)
    (end,) = slots.collect(ending)
    assert end.tokens.tolist() == first and end.done
    (begin,) = slots.collect(following)
    assert not begin.done and slots.remaining() == {1: 4}
    assert [*begin.tokens, *decode(slots)[0][1]] == second


def test_settings_that_a_server_rejects(served):
    run, slots, *_ = served
    for settings, message in (
        ({"weights": "int8"}, "generation.weights is 'auto' in this server, got 'int8'"),
        ({"kv_budget": 0.5}, "kv.budget is null in this server, got 0.5"),
    ):
        with pytest.raises(UserError, match=message):
            slots.program_key(run.settings(settings))
    config = run.settings({"banned_tokens": [*range(200)] * 3})
    with pytest.raises(UserError, match=ERRORS["generation_banned_tokens_must_have_at"]):
        slots.row_params(config)
    with pytest.raises(UserError, match=ERRORS["context_must_be_in_2"]):
        builder.make_slots(run, 4, 321)


@pytest.mark.slow
def test_the_router(served):
    """A request with the router needs another program. Both programs decode their rows of the same
    batch.
    """
    run, slots, _, steps = served
    settings = {"strategy": "entropy", "use_attention": steps is nullcontext}
    config = run.settings(settings)
    program = slots.program_key(config)
    assert not slots.ready(program)
    with steps():
        slots.compile(config)
    assert slots.ready(program)
    put(run, slots, 3, "abc", report=True, **settings)
    alone = decode(slots)[0][3]
    put(run, slots, 3, "abc", report=True, **settings)
    put(run, slots, 1, "abc", **DRAWN)
    tokens, infos = decode(slots)
    assert tokens[3] == alone and tokens[1] == reference(run, "abc", 24, **DRAWN)
    logits_TV = builder.all_logits(run.model, [*run.prompt_ids("abc"), *alone])[2:-1]
    expected = [
        builder.log_softmax(row_V)[token] for row_V, token in zip(logits_TV, alone, strict=True)
    ]
    found = np.concatenate([info.logprob for info in infos[3]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=builder.LOGPROB_TOLERANCE)
    if steps is nullcontext:
        assert alone == run.generate("abc", seed=3, max_new_tokens=24, **settings).tokens
    assert infos[3][0].routed is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"windows": (16, None)}, {}),
        ({}, {"kv": {"budget": 0.5, "signal": "uniform"}}),
        ({}, {"kv": {"dtype": "int8"}}),
    ],
)
def test_other_caches(changes, settings):
    run, slots = make(64, settings, **changes)
    slots.compile(run.config)
    prompt = LONG[:40]
    put(run, slots, 0, prompt, **DRAWN)
    alone = decode(slots)[0][0]
    put(run, slots, 2, prompt, limit=8, **DRAWN)
    put(run, slots, 1, "b" * 20, **DRAWN)
    slots.dispatch(5)
    put(run, slots, 0, prompt, **DRAWN)
    assert decode(slots)[0][0] == alone
    if not run.config.kv.compresses:
        assert alone == run.generate(prompt, seed=3, max_new_tokens=24, **DRAWN).tokens


def test_token_mask_of_one_slot(served):
    run, slots, *_ = served
    put(run, slots, 2, "hello", **DRAWN)
    put(run, slots, 3, "hello", **DRAWN)
    bits_W = np.zeros(-(-BYTES.vocab_size // 32), np.uint32)
    for token in b"xyz":
        bits_W[token // 32] |= np.uint32(1 << token % 32)
    slots.set_token_mask(3, bits_W)
    tokens = decode(slots)[0]
    assert set(tokens[3]) <= set(b"xyz")
    assert tokens[2] == reference(run, "hello", 24, **DRAWN)


def test_a_long_prompt_neither_stalls_streams_nor_short_prompts(served, monkeypatch):
    """Between two chunks of decoding at most one chunk is prefilled, and a short prompt does not
    wait for a long one.
    """
    run, slots, *_ = served
    slots.reset()
    engine, prefilled, prefill = Engine(run, slots), [], slots.prefill
    monkeypatch.setattr(slots, "prefill", lambda slot: prefilled.append(slot) or prefill(slot))

    def add(prompt, new):
        config = run.settings({**DRAWN, "seed": 1, "max_new_tokens": new, "ignore_eos": True})
        return engine.add(GenerationRequest(tuple(run.prompt_ids(prompt)), config))

    streams = [add(prompt, 200) for prompt in ("one", "two")]
    while any(stream.stats.new_tokens < 2 for stream in streams):
        engine.step()
    long, short = add("x" * 300, 4), add("y" * 40, 4)
    events = []
    while long.stats.new_tokens == 0:
        prefilled.clear()
        outputs = engine.step()
        assert len(prefilled) <= 1
        assert {output.job for output in outputs} >= set(streams), "no stream pauses"
        events.append(
            (short.stats.new_tokens > 0, slots.prefill_left(engine._scheduler.slots_of(long)[0]))
        )
    left_when_short_began = next(left for began, left in events if began)
    assert left_when_short_began >= 100
    while engine.busy:
        engine.step()
    assert short.stats.new_tokens == long.stats.new_tokens == 4


def test_a_request_cannot_change_the_watermark_of_the_server():
    run, slots = make(context=64, settings={"generation": {"watermark_keys": [31, 41]}})
    assert slots.program_key(run.config) == slots.program_key(
        run.settings({"top_k": 3, "watermark_keys": [31, 41]})
    )
    for settings in ({"watermark_keys": []}, {"watermark_keys": [31]}, {"watermark_ngram": 4}):
        key = next(iter(settings))
        with pytest.raises(
            UserError, match=f"^generation.{key} is set by this server and cannot be changed$"
        ) as error:
            slots.program_key(run.settings(settings))
        assert error.value.key == f"generation.{key}"


def test_slots_that_do_not_fit_into_memory_are_one_sentence(monkeypatch):
    """A slot of 32 positions takes 32 · 2 · 2 · 8 numbers of 4 bytes; seven programs and the
    compiler take more.
    """
    model, slot = builder.circle(), 4 * 32 * 2 * 2 * 8
    programs = 7 * model.model.config.num_blocks + 5
    monkeypatch.setattr(slot_plan, "COMPILER_BYTES", 5 * slot)
    monkeypatch.setattr(slot_plan, "PROGRAM_BYTES_PER_LAYER", slot)
    monkeypatch.setattr(slot_plan, "free_bytes", lambda memory: (20 + programs) * slot)
    assert builder.make_slots(model, 20, 32).count == 20
    with pytest.raises(
        UserError,
        match=(
            r"^the caches of 21 requests of 32 tokens take 0\.0 GB, but the programs leave only"
            r" 0\.0 GB"
        ),
    ):
        builder.make_slots(model, 21, 32)
    assert (
        builder.make_slots(model, None, 32).count == 8
    )  # half of the usable memory, and at most 8


def test_the_programs_of_an_accelerator_are_in_the_memory_of_the_host():
    architecture = builder.circle().model.config
    free = 1 << 40
    kept = (
        slot_plan.COMPILER_BYTES + 7 * architecture.num_blocks * slot_plan.PROGRAM_BYTES_PER_LAYER
    )
    assert slot_plan._without_programs(free, architecture) == free - kept
    assert slot_plan._without_programs(free, replace(architecture, platform="gpu")) == free

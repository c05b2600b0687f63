"""Counts which programs are compiled and how often, and reads their memory use from the compiled
programs.
"""

import re
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from dantinox.generation import generate
from dantinox.generation.decode.generate_toks import Stepper, _generate_toks, _prefill_toks
from dantinox.generation.decode.slot_programs import prefill_part
from dantinox.generation.decode.split_model import split_model
from dantinox.generation.run_timer import RunTimer
from dantinox.generation.static_batch import StaticBatch, StaticOptions, padded_length
from dantinox.model import make_cache, scoring
from dantinox.platform import get_platform
from dantinox.programs import tree_bytes
from dantinox.sampling import SamplingParams

from . import builder


@pytest.fixture(scope="module")
def wide():
    """Returns a model with a long context, whose cache is much larger than the arrays of one
    step.
    """
    return builder.model(builder.config(**WIDE, windows=(None,) * 2))


WIDE = {"vocab_size": 1031, "head_size": 32, "kv_heads": 4, "max_context": 4096}


def test_padded_lengths():
    """Powers of two from 16, and above 512 also 1.5 times a power of two."""
    lengths = [1, 15, 16, 17, 32, 33, 129, 255, 256, 257, 512, 513, 1000, 4096]
    assert [padded_length(length) for length in lengths] == [
        16,
        16,
        16,
        32,
        32,
        64,
        256,
        256,
        256,
        512,
        512,
        768,
        1024,
        4096,
    ]
    classes = sorted({padded_length(length) for length in range(1, 8193)})
    assert classes == [16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert all(
        padded_length(length) == next(size for size in classes if size >= length)
        for length in range(1, 8193)
    )


def test_compilation_is_counted_once_and_the_times_add_up():
    """The trace of a function within a function takes part of the time of the outer trace."""
    with RunTimer() as timer:
        time.sleep(0.06)
        for seconds in (0.01, 0.05):  # the inner trace ends first
            jax.monitoring.record_event_duration_secs(
                "/jax/core/compile/jaxpr_trace_duration", seconds
            )
        timer.mark_first()
        time.sleep(0.01)
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/backend_compile_duration", 0.005
        )
    assert timer.times.compiling_first == pytest.approx(0.05, abs=0.005)
    assert timer.times.compiling == pytest.approx(0.055, abs=0.005)
    total, *parts = map(float, re.findall(r"([\d.]+) s", timer.times.describe(3.0)))
    assert len(parts) == 3 and sum(parts) == pytest.approx(total, abs=0.02)


def test_values_of_settings_compile_nothing(programs):
    """Regression: DantinoX 0 compiled again for every temperature, and divided by zero at a
    temperature of zero.
    """
    model, prompt = builder.model(builder.ONE_LAYER), list(range(5))
    settings = {"temperature": 1.5, "top_k": 9, "repetition_penalty": 1.1, "seed": 1}
    generate(model, [prompt], 40, eos_ids=[7], **settings)
    assert programs() > 0, "nothing was counted"
    values = [
        ("top_k", 3),
        ("repetition_penalty", 1.7),
        ("seed", 99),
        *(("temperature", t) for t in (0.71, 1.3, 50.0, 1e-4)),
    ]
    for name, value in values:
        generate(model, [prompt], 40, eos_ids=[7], **settings | {name: value})
        assert programs() == 0, name
    for other in ([9] * 5, list(range(5, 16)), [1] * 16):
        generate(model, [other], 40, eos_ids=[7], **settings)
        assert programs() == 0, f"a prompt of {len(other)} tokens"
    for count in (30, 41, 46):
        generate(model, [prompt], count, eos_ids=[8], **settings)
        assert programs() == 0, f"{count} new tokens"
    cold = generate(model, [prompt], 40, temperature=0)[0, 5:].tolist()
    assert cold == builder.slowly(model, prompt, 40, greedy=True)


def test_short_chunks_use_the_same_program(programs):
    params = SamplingParams.build({"greedy": True})
    session = StaticBatch(
        builder.model(builder.ONE_LAYER),
        np.ones((1, 5), np.int32),
        np.array([5]),
        params,
        limits_B=np.array([50]),
        eos_ids=[[]],
    )
    session.start()
    session.advance(1)
    programs()
    for steps in (1, 2, 7, 32):
        session.advance(steps)
    assert session.advance(32).counts.sum() == 50 - 44
    assert programs() == 0


def test_compiler_options_of_a_gpu_change_no_token():
    """A CPU accepts the options, and ignores them."""
    assert get_platform("gpu").decoding_options
    model = builder.model(replace(builder.ONE_LAYER, platform="gpu"))
    found = generate(model, [[1] * 5], 12, greedy=True)[0, 5:].tolist()
    assert found == builder.slowly(builder.model(builder.ONE_LAYER), [1] * 5, 12, greedy=True)


@pytest.mark.parametrize("dispatch_ahead", [False, True])
def test_dispatch_ahead_changes_no_token(dispatch_ahead):
    """Rows end with a token id, at their limit, or because the caller stops them between two
    chunks; tokens are as alone.
    """
    model, prompts, limits = (
        builder.model(builder.ONE_LAYER),
        np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32),
        np.array([58, 33, 50]),
    )
    free = generate(model, prompts, 58, greedy=True)[:, 3:]
    end = int(free[2, 40])
    ends = int(np.argmax(free[2] == end)) + 1
    session = StaticBatch(
        model,
        prompts,
        np.full(3, 3),
        SamplingParams.build({"greedy": True}, batch=3),
        limits_B=limits,
        eos_ids=[[], [], [end]],
    )
    texts = [[], [], []]
    for chunk in session.run(8, dispatch_ahead=dispatch_ahead):
        for text, tokens, count in zip(texts, chunk.tokens, chunk.counts, strict=True):
            text += tokens[:count].tolist()
        if len(texts[0]) > 20:
            session.finish(np.array([True, False, False]))
    assert [len(text) for text in texts] == [25, 33, min(ends, 50)]
    for text, wanted in zip(texts, free, strict=True):
        assert text == wanted[: len(text)].tolist()


def test_another_step_compiles_sampling_and_decoding_only():
    """A step that is added to the plan is not part of the prefill, and its value is part of no
    program.
    """
    model, prompt = builder.model(builder.ONE_LAYER), [[1, 2, 3]]

    def compiled():
        return [
            program._cache_size() for program in (_prefill_toks.jitted_fn, _generate_toks.jitted_fn)
        ]

    generate(model, prompt, 40, greedy=True)
    prefill, decode = compiled()
    generate(model, prompt, 40, greedy=True, repetition_penalty=1.2)
    assert compiled() == [prefill, decode + 1]
    generate(model, prompt, 40, greedy=True, repetition_penalty=1.4)
    assert compiled() == [prefill, decode + 1]


def decode_program(model, settings, rows=2, slots=2048):
    """Returns the decode program of a batch with this many slots, and its cache."""
    params = SamplingParams.build(settings, batch=rows)
    limits, lengths = np.full(rows, 9), np.full(rows, 5)
    session = StaticBatch(
        model, np.ones((rows, 5), np.int32), lengths, params, limits_B=limits, eos_ids=[[]] * rows
    )
    cache = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda: make_cache(model.config, rows, slots, model.dtype)),
    )
    return (
        _generate_toks.lower(
            model, (cache,), session.state, params, np.int32(32), **session._options
        ),
        cache,
    )


FILTERS = {"seed": 1, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1, "temperature": 0.8}


@pytest.mark.parametrize(
    "settings", [{"greedy": True}, pytest.param(FILTERS, marks=pytest.mark.slow)]
)
def test_decoding_copies_neither_cache_nor_weights(wide, settings, optimized):
    program, cache = decode_program(wide, settings)
    report, memory = cache.report(), optimized(program).memory_analysis()
    assert report["slots"] == [[[4, 2048]]] * 2
    assert memory.temp_size_in_bytes < 0.1 * report["bytes"]
    assert memory.alias_size_in_bytes >= report["bytes"]
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 20


def prompt_session(model, length, **report):
    params = SamplingParams.build({"greedy": True})
    return StaticBatch(
        model, np.ones((1, length), np.int32), np.array([length]), params,
        limits_B=np.array([20]), eos_ids=[[]], options=StaticOptions(**report),
    )  # fmt: skip


def prefill_program(model, length, **report):
    session = prompt_session(model, length, **report)
    return _prefill_toks.lower(
        model, session._prompt, session.state.features, **session._prefill_options
    )


def shapes_of(text, element):
    """Returns the shapes in the text of a program: `f32[2,3]` after compilation, `tensor<2x3xf32>`
    before.
    """
    before = [shape.split("x") for shape in re.findall(rf"tensor<([\dx]+)x{element}>", text)]
    after = [shape.split(",") for shape in re.findall(rf"{element}\[([\d,]+)\]", text)]
    return [[int(size) for size in shape] for shape in before + after]


def positions_with_logits(program):
    """Returns the largest number of rows of logits, which are the arrays with a vocabulary axis
    except the weights.
    """
    V, D = 1031, 32
    shapes = shapes_of(program.as_text(), "f32")
    rows = [
        int(np.prod(shape)) // V for shape in shapes if V in shape and sorted(shape)[-2:] != [D, V]
    ]
    return max(rows, default=0)


def test_prefill_computes_no_logits(wide):
    """The first decode step computes those after the prompt, even if the logits of new tokens are
    reported.
    """
    assert positions_with_logits(prefill_program(wide, 500, report=3)) == 0


@pytest.mark.slow
def test_logits_of_prompt_tokens_are_computed_in_parts(wide, monkeypatch, optimized):
    """The logits of 511 positions × 1,031 tokens are never in memory together, and the results
    equal those of a single pass.
    """
    V, found = wide.config.vocab_size, {}
    for limit in (V * 512, V * 100):
        monkeypatch.setitem(scoring.map_logits.__kwdefaults__, "max_logits", limit)
        _prefill_toks.jitted_fn.clear_cache()
        assert positions_with_logits(
            optimized(prefill_program(wide, 500, report=0, echo=True))
        ) == min(limit // V, 511)
        session = prompt_session(wide, 500, report=0, echo=True)
        session.start()
        found[limit] = session.echo
    np.testing.assert_allclose(*found.values(), rtol=0, atol=1e-5)
    _prefill_toks.jitted_fn.clear_cache()


def test_prefill_processes_the_padded_prompt_only(wide):
    """Regression: for a prompt of ten tokens, DantinoX 0 processed all of `max_context`."""
    programs = [prefill_program(wide, length) for length in (10, 500)]
    sizes = {
        size
        for element in ("f32", "i32", "i1")
        for shape in shapes_of(programs[0].as_text(), element)
        for size in shape
    }
    assert 16 in sizes and 4096 not in sizes
    short, long = (program.cost_analysis()["flops"] for program in programs)
    assert short * 15 < long


def test_cost_of_a_decode_step(wide):
    """The program depends on the size of the request's cache, not on `max_context`."""
    program, _ = decode_program(wide, {"greedy": True}, slots=32)
    same = builder.model(builder.config(**WIDE | {"max_context": 64}, windows=(None,) * 2))
    assert program.as_text() == decode_program(same, {"greedy": True}, slots=32)[0].as_text()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_prefill_into_a_slot_copies_no_whole_row(rows):
    """The used segments of a row are copied layer by layer, and the cache is updated in place."""
    model = builder.model(builder.config(**WIDE, windows=(None,) * 3))
    cache = jax.eval_shape(lambda: make_cache(model.config, 4, 4096, "float32", segmented=True))
    tokens_RT, zero_R = np.zeros((rows, 16), np.int32), np.zeros(rows, np.int32)
    compiled = prefill_part.lower(
        split_model(model),
        (cache,),
        zero_R,
        tokens_RT,
        zero_R,
        zero_R,
        tokens_RT,
        (),
        {},
        stepper=Stepper(),
        echo=None,
    ).compile()
    memory, row = compiled.memory_analysis(), tree_bytes(cache) // 4
    assert memory.temp_size_in_bytes < row // 2, "one and a half of three layers"
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 10

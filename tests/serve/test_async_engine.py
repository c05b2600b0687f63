"""Tests the engine: results in mixed batches, the queue, cancellation, faults and shutdown."""

import asyncio
import contextlib
import itertools
import threading
import time
from dataclasses import replace

import pytest

from dantinox.config import UserError
from dantinox.generation.engine import MAX_FAILURES
from dantinox.generation.engine_jobs import RequestFailed
from dantinox.generation.guides.constraints import Constraint, Matcher
from dantinox.generation.request import GenerationRequest
from dantinox.generation.sample_text import SampleText
from dantinox.serve.async_engine import _Responder
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.response_stream import ResponseStream
from tests.error_texts import ERRORS
from tests.generation import builder

from . import engines
from .engines import (
    CONTEXT,
    DRAWN,
    SLOTS,
    generate,
    make_request,
    reference,
    reference_tokens,
    start_engine,
    story,
    text_of,
)

QUEUE = 4
STORY = "x" + "once upon a time there was a fox that generate " * 3


@pytest.fixture(scope="module")
def run():
    return engines.small_model()


@pytest.fixture(scope="module")
def engine():
    engine = start_engine(QUEUE)
    yield engine
    engine.close()


async def wait_until_idle(engine):
    """Waits until no request is running and every stream has its end."""
    while engine.status().busy or engine._responders:
        assert engine.status().state == "ready"
        await asyncio.sleep(0.005)


def test_a_seeded_request_gives_the_same_text_in_a_mixed_batch_and_alone(engine):
    others = (
        {"greedy": True},
        {"top_k": 5, "repetition_penalty": 1.4},
        {"mirostat": 2, "min_p": 0.1},
    )

    async def both():
        alone = await generate(engine, STORY, **DRAWN)
        assert alone == [story(STORY)]
        for number in range(12):
            neighbors = [
                ("a" * (1 + 40 * n), {"n": 1 + (n == 1), **others[(number + n) % 3]})
                for n in range(number % 4)
            ]
            tasks = [
                asyncio.create_task(generate(engine, prompt, **settings))
                for prompt, settings in neighbors
            ]
            await asyncio.sleep(0.01 * (number % 3))
            assert await generate(engine, STORY, **DRAWN) == alone
            await asyncio.gather(*tasks)
        assert "compilations" not in engine.status().counters

    asyncio.run(both())


def test_repeated_settings_are_cached(engine):
    """Another seed, length, sample count or stop string adds no cache entry. The text equals that
    of the reference.
    """
    made = engine._batch._settings._cached_row_params.cache_info().misses

    async def read():
        for seed, size in ((1, 9), (2, 20), (1, 9)):
            settings = {"temperature": 1.1, "top_k": 7, "seed": seed, "max_new_tokens": size}
            assert await generate(engine, "hello", **settings) == [reference("hello", **settings)]
        await generate(engine, "hello", temperature=1.1, top_k=8, seed=1)
        return engine.submit(
            make_request(engine, "hello", temperature=1.1, top_k=7, stop=["a"], seed=None)
        )

    asyncio.run(read())
    assert engine._batch._settings._cached_row_params.cache_info().misses == made + 2
    assert [engine.settings({"top_k": 7, "seed": seed}).generation.seed for seed in (5, 6)] == [
        5,
        6,
    ]
    assert engine.settings({"stop": ["a" * 5000], "seed": 5}).generation.stop == ("a" * 5000,)
    with pytest.raises(UserError, match=ERRORS["seed"]):
        engine.settings({"top_k": 7, "seed": 2**32})


def test_deltas_have_tokens_and_a_finish_reason(engine, run):
    def logprobs_of(ids):
        return [
            builder.log_softmax(row_V)[token]
            for row_V, token in zip(builder.all_logits(run.model, ids), ids[1:], strict=False)
        ]

    async def read():
        stream = engine.submit(make_request(engine, "hello", logprobs=2, echo=True, n=2, **DRAWN))
        deltas = [delta async for delta in stream]
        for sample in range(2):
            expected = reference_tokens("hello", sample=sample, **DRAWN)
            own = [delta for delta in deltas if delta.sample == sample]
            tokens = [token for delta in own for token in delta.tokens]
            reason = "eos" if expected[-1] in run.tokenizer.stop_ids else "length"
            assert [delta.finish_reason for delta in own if delta.finish_reason] == [reason]
            assert "".join(delta.text for delta in own) == reference(
                "hello", sample=sample, **DRAWN
            )
            assert [token["id"] for token in tokens] == expected
            assert [len(token["alternatives"]) for token in tokens] == [2] * len(tokens)
            logprobs = logprobs_of([*b"hello", *expected])[4:]
            assert [token["logprob"] for token in tokens] == pytest.approx(
                logprobs, abs=builder.LOGPROB_TOLERANCE
            )
        assert [token["id"] for token in stream.prompt] == list(b"hello")
        logprobs = [token["logprob"] for token in stream.prompt[1:]]
        assert logprobs == pytest.approx(logprobs_of([*b"hello"]), abs=builder.LOGPROB_TOLERANCE)
        assert stream.stats.new_tokens == sum(len(delta.tokens) for delta in deltas)
        assert (
            0
            <= stream.stats.queued_seconds
            <= stream.stats.first_token_seconds
            <= stream.stats.seconds
        )

    asyncio.run(read())


def test_stop_strings_and_zero_new_tokens(engine):
    async def read():
        whole = (await generate(engine, "hello", **DRAWN))[0]
        stop = whole[4:6]
        deltas = [
            delta
            async for delta in engine.submit(make_request(engine, "hello", stop=[stop], **DRAWN))
        ]
        assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
        assert deltas[-1].finish_reason == "stop"
        (only,) = [
            delta async for delta in engine.submit(make_request(engine, "hello", max_new_tokens=0))
        ]
        assert only == (0, "", [], "length", None)
        full = "a" * (CONTEXT - 5)
        (stream,) = await generate(engine, full, ignore_eos=True, max_new_tokens=50, **DRAWN)
        assert stream == reference(full, max_new_tokens=5, ignore_eos=True, **DRAWN), (
            "up to the end of the context"
        )

    asyncio.run(read())


def test_a_repeated_prompt_reuses_its_prefix(engine):
    async def read():
        first = await generate(engine, STORY + "!", **DRAWN)
        again = engine.submit(make_request(engine, STORY + "!", **DRAWN))
        assert await text_of(again) == first
        assert again.stats.reused_tokens == 128 and again.stats.prompt_tokens == len(STORY) + 1

    asyncio.run(read())


def test_requests_can_be_cancelled_in_every_state(engine):
    async def read():
        long = {"max_new_tokens": CONTEXT, "ignore_eos": True}
        streams = [engine.submit(make_request(engine, "abc", **long)) for _ in range(SLOTS + QUEUE)]
        with pytest.raises(Busy) as busy:
            engine.submit(make_request(engine, "abc"))
        assert 1 <= busy.value.retry_after <= 60
        assert (
            engine.status().busy == SLOTS
            or engine.status().queued == SLOTS + QUEUE - engine.status().busy
        )
        await anext(streams[0])
        for stream in streams:
            stream.cancel()
        begun = time.monotonic()
        for stream in streams:
            reasons = [delta.finish_reason async for delta in stream if delta.finish_reason]
            assert reasons in (["cancelled"], ["length"])
        assert time.monotonic() - begun < 30
        await wait_until_idle(engine)
        streams[0].cancel()
        assert await generate(engine, "abc", **DRAWN) == await generate(engine, "abc", **DRAWN)

    asyncio.run(read())


def test_invalid_requests_are_refused(engine):
    async def refused():
        config = engine.settings({})
        for wrong, message in (
            (
                GenerationRequest((1,) * CONTEXT, config),
                f"must leave room in the context of {CONTEXT}",
            ),
            (GenerationRequest((), config), "the prompt has 0 tokens"),
            (
                GenerationRequest((999,), config),
                r"tokens of the prompt must be in \[0, 259\), got 999",
            ),
            (
                GenerationRequest((1,), engine.settings({"n": 4})),
                r"generation.n must be in \[1, 3\] in this server, got 4",
            ),
            (
                GenerationRequest((1,), config, logprobs=21),
                r"logprobs must be in \[0, 20\] in this server, got 21",
            ),
            (GenerationRequest((1,), config, echo=True), "set logprobs too"),
        ):
            with pytest.raises(UserError, match=message):
                engine.submit(wrong)
        with pytest.raises(UserError, match=ERRORS["kv_budget_is_null_in"]):
            engine.settings({"kv_budget": 0.5})

    asyncio.run(refused())


def test_a_program_is_compiled_while_other_requests_are_served(engine, monkeypatch):
    """A compilation that waits stands for that of another program; then the compiled programs stand
    for the new ones.
    """
    batch, compiling, finish = engine._batch, threading.Event(), threading.Event()
    program_key, known = batch.program_key, batch.program_key(engine.settings({}))

    def other_key(config):
        return program_key(config)._replace(
            choices=(("ties", "all"),) if config.generation.top_k == 33 else ()
        )

    def compile(config, echo, subset):
        compiling.set()
        assert finish.wait(20)
        key = other_key(config)
        batch._states[key] = batch._idle_rows(config)
        known_keys = [one for one in [*batch._programs] if known in one]
        batch._programs |= {
            tuple(key if part == known else part for part in one): batch._programs[one]
            for one in known_keys
        }

    monkeypatch.setattr(batch._settings, "program_key", other_key)
    monkeypatch.setattr(batch, "program_key", other_key)
    monkeypatch.setattr(batch, "compile", compile)

    async def read():
        before = engine.status().counters.get("compilations", 0)
        waiting = [
            engine.submit(make_request(engine, "hello", top_k=33, temperature=1.0, seed=3))
            for _ in range(2)
        ]
        quick = [await generate(engine, "hello", **DRAWN) for _ in range(2)]
        assert compiling.is_set() and quick[0] == quick[1]
        assert engine.status().counters["compilations"] == before + 1
        finish.set()
        for stream in waiting:
            assert await text_of(stream) == [reference("hello", top_k=33, seed=3)]

    asyncio.run(read())


@pytest.mark.slow
def test_the_router_is_compiled_while_other_requests_are_served(run):
    async def read():
        engine = start_engine(QUEUE)
        other = engine.submit(make_request(engine, "hello", strategy="entropy", seed=3))
        quick = [await generate(engine, "hello", **DRAWN) for _ in range(2)]
        assert engine.status().counters["compilations"] == 1 and quick[0] == quick[1]
        assert await text_of(other) == [
            run.generate("hello", max_new_tokens=16, strategy="entropy", seed=3).text
        ]
        engine.close()

    asyncio.run(read())


@pytest.mark.slow
def test_streams_mark_the_tokens_of_a_clarify_text(run):
    """Where every token selects clarify, the text comes first, and again after the cooldown; the
    stream is the whole text.
    """
    always = {
        "strategy": "entropy",
        "use_attention": False,
        "low_entropy": 0.0,
        "clarify_entropy": 0.0,
        "low_varentropy": 1e6,
    }
    always |= {"clarify_text": "Why? ", "clarify_cooldown": 4, "seed": 3, "ignore_eos": True}

    async def read():
        engine = start_engine(QUEUE)
        texts = {}
        for logprobs in (None, 0):
            deltas = [
                delta
                async for delta in engine.submit(make_request(engine, "hello", logprobs, **always))
            ]
            texts[logprobs] = "".join(delta.text for delta in deltas)
            records = [record for delta in deltas for record in delta.tokens]
        engine.close()
        return texts, records

    texts, records = asyncio.run(read())
    whole = run.generate("hello", max_new_tokens=16, logprobs=0, **always)
    assert texts == {None: whole.text, 0: whole.text} and whole.text.startswith("Why? ")
    marks = ([True] * 5 + [False] * 4) * 2
    assert [record["forced"] for record in records] == whole.info["forced"] == marks[:16]
    assert bytes(record["id"] for record in records[9:14]) == b"Why? "


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[a-c]{3}x|yes!{1,4}|fox( fox){0,5}"),
        ("json_schema", '{"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 4}'),
        ("regex", "a{3}"),
        ("regex", ""),
    ],
)
def test_constrained_texts_equal_those_of_the_reference_in_a_mixed_batch(engine, run, kind, source):
    pytest.importorskip("llguidance")
    constraint = Constraint(kind, source)

    async def both():
        for settings in (
            DRAWN | {"temperature": 3.0},
            {"greedy": True},
            {"seed": 4, "temperature": 1.0, "ignore_eos": True},
            {"seed": 5, "temperature": 1.0, "stop": ["x"]},
        ):
            held = replace(
                make_request(engine, "hello", n=2, max_new_tokens=64, **settings),
                constraint=constraint,
            )
            free = asyncio.create_task(generate(engine, STORY, **DRAWN))
            await asyncio.sleep(0.005)
            deltas = [delta async for delta in engine.submit(held)]
            for sample in range(2):
                matcher = run.grammars.matcher(kind, source)
                text = reference(
                    "hello", sample=sample, max_new_tokens=64, matcher=matcher, **settings
                )
                own = [delta for delta in deltas if delta.sample == sample]
                stopped = "x" in text and "stop" in settings
                assert "".join(delta.text for delta in own) == (
                    text[: text.index("x")] if stopped else text
                )
                assert [delta.finish_reason for delta in own if delta.finish_reason] == [
                    "stop" if stopped else "eos"
                ]
            assert await free == [story(STORY)]

    asyncio.run(both())


def test_an_impossible_constraint_ends_only_its_own_request(engine):
    pytest.importorskip("llguidance")
    slow = Constraint("lark", 'start: "b" a\na: "c" a')

    async def both():
        with pytest.raises(UserError, match=ERRORS["unclosed_group"]):
            await text_of(
                engine.submit(
                    replace(make_request(engine, "hello"), constraint=Constraint("regex", "(a"))
                )
            )
        free = asyncio.create_task(generate(engine, STORY, **DRAWN))
        with pytest.raises(UserError, match=ERRORS["takes_too_long_to_evaluate_2"]):
            await text_of(
                engine.submit(
                    replace(
                        make_request(engine, "hello", n=2, max_new_tokens=150, **DRAWN),
                        constraint=slow,
                    )
                )
            )
        assert len(await free) == 1 and len(await generate(engine, "a", n=SLOTS, **DRAWN)) == SLOTS

    asyncio.run(both())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_draining_and_failing(monkeypatch):
    async def end():
        engine = start_engine(QUEUE)
        stream = engine.submit(make_request(engine, "hello", **DRAWN))
        task = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=ERRORS["draining"]):
            engine.submit(make_request(engine, "hello"))
        assert len(await text_of(stream)) == 1
        await task
        assert engine.status().state == "draining" and engine.status().busy == 0

        broken, failed = start_engine(QUEUE), []
        broken.on_failure = lambda: failed.append(broken.status().state)
        monkeypatch.setattr(broken._batch, "collect", lambda pending: 1 / 0)
        for _ in range(MAX_FAILURES):
            with pytest.raises(RequestFailed, match=ERRORS["zerodivisionerror"]):
                await text_of(broken.submit(make_request(broken, "hello")))
        with pytest.raises(Unavailable, match=ERRORS["failed_zerodivisionerror"]):
            await text_of(broken.submit(make_request(broken, "hello")))
        with pytest.raises(Unavailable, match=ERRORS["failed"]):
            broken.submit(make_request(broken, "hello"))
        assert failed == ["failed"]

    asyncio.run(end())


VICTIM = "the victim of a fault"
# Calls on the engine's threads in which a fault is injected: (object, method, whether the call
# belongs to a single request).
CALLS = [
    *(("batch", name, True) for name in ("row_params", "assign_prompt", "prefill")),
    *(
        ("batch", name, True)
        for name in ("prompt_steps", "copy_prompt", "start_decoding", "set_token_mask")
    ),
    *(("batch", name, False) for name in ("ready", "remaining", "stop", "dispatch", "collect")),
    *(
        ("scheduler", name, False)
        for name in ("admit", "finish_prefill", "release", "slots_of", "remove")
    ),
    *(("engine", name, True) for name in ("_sample_texts", "_start_rows", "_add_tokens")),
    *(
        ("engine", name, False)
        for name in ("_admit", "_prefill_prompts", "_end", "_dispatch", "_collect")
    ),
    ("matcher", "mask", True),
    ("matcher", "consume", True),
    ("text", "add_tokens", True),
    ("responder", "push_output", True),
    ("stream", "push", True),
    ("compile", "compile", True),
]


@pytest.mark.parametrize(("where", "name", "own"), CALLS, ids=lambda value: str(value))
def test_a_fault_in_one_request_ends_only_that_request(engine, run, monkeypatch, where, name, own):
    """The server continues after any exception on its threads. A fault in one request does not end
    another request.
    """
    victim_ids, faults = tuple(run.prompt_ids(VICTIM)), []
    owner = {
        "batch": engine._batch, "scheduler": engine._engine._scheduler, "engine": engine._engine,
        "matcher": Matcher, "text": SampleText, "responder": _Responder, "stream": ResponseStream,
        "compile": engine._batch,
    }[where]  # fmt: skip
    real = getattr(owner, name)

    def of_victim(args):
        """Returns whether the arguments of a call belong to the victim."""
        for value in args:
            value = getattr(value, "job", value)
            ids = getattr(getattr(value, "request", None), "ids", getattr(value, "ids", value))
            takes_slot = name in (
                "prefill",
                "prompt_steps",
                "copy_prompt",
                "start_decoding",
                "set_token_mask",
            )
            if isinstance(value, int) and takes_slot:
                ids = engine._batch._rows[value].ids
            if isinstance(ids, tuple) and ids == victim_ids:
                return True
        return (
            where in ("matcher", "compile")
            or name == "row_params"
            or (where == "text" and args[0].guides)
        )

    def faulty(*args, **kwargs):
        on_loop = threading.current_thread() is threading.main_thread()
        if armed and not faults and not on_loop and (of_victim(args) or not own):
            faults.append(args)
            raise ZeroDivisionError("injected")
        return real(*args, **kwargs)

    armed = []

    async def read():
        expected = story(STORY)
        bystander = asyncio.create_task(generate(engine, STORY, **DRAWN))
        while not engine.status().busy and not bystander.done():
            await asyncio.sleep(0.001)
        settings = {"strategy": "entropy", "use_attention": False} if where == "compile" else {}
        request = make_request(
            engine,
            VICTIM,
            logprobs=0,
            echo=name == "prompt_steps",
            n=2,
            max_new_tokens=40,
            seed=9,
            **settings,
        )
        request = replace(request, constraint=Constraint("regex", "[a-z]{30,40}"))
        monkeypatch.setattr(owner, name, faulty)
        armed.append(True)
        with contextlib.suppress(RequestFailed, UserError):
            await text_of(engine.submit(request))
        armed.clear()
        monkeypatch.setattr(owner, name, real)
        try:
            assert await bystander == [expected]
        except RequestFailed:
            assert not own
        assert engine.status().state == "ready"
        assert await generate(engine, STORY, **DRAWN) == [expected]
        await wait_until_idle(engine)
        assert engine.status().queued == 0 and not engine._responders

    pytest.importorskip("llguidance")
    asyncio.run(read())
    assert faults, "the fault was not injected"


def test_a_constraint_whose_only_token_is_a_stop_token_is_refused(engine):
    """Regression: `guided_regex: "a"` with `stop_token_ids: [id of "a"]` ended the process."""
    pytest.importorskip("llguidance")

    async def read():
        request = replace(
            make_request(engine, "x", stop_token_ids=[97]), constraint=Constraint("regex", "a")
        )
        with pytest.raises(UserError, match=ERRORS["regex"]):
            await text_of(engine.submit(request))
        assert engine.status().state == "ready" and len(await generate(engine, "x", **DRAWN)) == 1

    asyncio.run(read())


def test_any_order_of_steps_runs_in_the_program_of_the_warm_up(engine):
    """None of 24 orders compiles a program, and each gives the text of the reference in that
    order.
    """
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "temperature")
    orders = [list(order) for order in itertools.permutations(names)][::5]
    settings = {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.5, "min_p": 0.02, **DRAWN}

    async def read():
        before = engine.status().counters.get("compilations", 0)
        for number in range(0, len(orders), SLOTS):
            some = orders[number : number + SLOTS]
            texts = await asyncio.gather(
                *(generate(engine, "hello", sampler_order=order, **settings) for order in some)
            )
            if number % 9 == 0:
                assert texts[0] == [reference("hello", order=tuple(some[0]), **settings)]
        assert engine.status().counters.get("compilations", 0) == before
        assert sum(thread.name.startswith("compile") for thread in threading.enumerate()) <= 1

    asyncio.run(read())


def test_the_prefix_cache_is_saved_and_restored(tmp_path):
    async def read():
        engine = start_engine(QUEUE, cache_dir=tmp_path)
        first = await generate(engine, STORY, **DRAWN)
        blocks = await engine.save_prefixes()
        assert blocks == engine.status().prefixes.used >= len(STORY) // 16
        longer = await generate(engine, STORY + " and a bear", **DRAWN)
        await engine.drain(10)
        with pytest.raises(Unavailable, match="draining"):
            await engine.save_prefixes()
        restored = start_engine(QUEUE, cache_dir=tmp_path)
        assert restored.status().prefixes.used > blocks
        for prompt, text in ((STORY, first), (STORY + " and a bear", longer)):
            stream = restored.submit(make_request(restored, prompt, **DRAWN))
            assert await text_of(stream) == text and stream.stats.reused_tokens >= 128
        restored.close()

    asyncio.run(read())


def test_a_prefix_cache_without_a_folder_is_not_saved(engine):
    with pytest.raises(UserError, match="start it with --cache_dir"):
        asyncio.run(engine.save_prefixes())


def test_an_abandoned_save_of_the_prefix_cache_does_not_end_the_engine(tmp_path, monkeypatch):
    """A client that disconnects during the save cancels it; the engine and the saves of other
    clients go on.
    """
    engine = start_engine(QUEUE, cache_dir=tmp_path)

    async def read():
        copying, go_on = threading.Event(), threading.Event()
        write = engine._batch.prefix_writer

        def slow_writer():
            copying.set()
            assert go_on.wait(30)
            return write()

        monkeypatch.setattr(engine._batch, "prefix_writer", slow_writer)
        first = asyncio.create_task(engine.save_prefixes())
        assert await asyncio.to_thread(copying.wait, 30)
        waiting = asyncio.create_task(engine.save_prefixes())
        await asyncio.sleep(0.05)
        for abandoned in (first, waiting):
            abandoned.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        go_on.set()
        assert await asyncio.wait_for(engine.save_prefixes(), 30) == engine.status().prefixes.used
        assert await generate(engine, STORY, **DRAWN) == [story(STORY)]

    asyncio.run(read())
    assert engine.status().state == "ready"
    engine.close()


def test_one_copy_of_the_prefix_cache_exists_at_a_time(tmp_path, monkeypatch):
    """Each save copies the cache, so many requests for it must not multiply its memory."""
    engine = start_engine(QUEUE, cache_dir=tmp_path)
    copies = []

    def writer():
        copies.append(1)

        def write():
            copies.append(-1)
            return 7

        return write

    async def read():
        monkeypatch.setattr(engine._batch, "prefix_writer", writer)
        assert await asyncio.gather(*(engine.save_prefixes() for _ in range(5))) == [7] * 5

    asyncio.run(read())
    assert max(itertools.accumulate(copies)) == 1 and copies.count(1) == 5
    monkeypatch.undo()
    engine.close()


def test_a_request_is_prepared_before_the_engine_can_close(engine, monkeypatch):
    """`close` takes the lock before it stops the thread `prepare`, which then accepts no more
    work.
    """
    queued, submit = [], engine._preparer.submit

    def recorded(*args):
        queued.append(engine._lock.locked())
        return submit(*args)

    monkeypatch.setattr(engine._preparer, "submit", recorded)
    asyncio.run(generate(engine, "hello", **DRAWN))
    assert queued == [True]


def test_requests_with_different_salts_share_no_prefix(engine):
    async def read():
        counts = []
        for salt in ("", "a", "b", "a"):
            stream = engine.submit(
                replace(make_request(engine, STORY + "?" * 40, **DRAWN), salt=salt)
            )
            await text_of(stream)
            counts.append(stream.stats.reused_tokens)
        assert counts[1:3] == [0, 0] and counts[3] >= 128

    asyncio.run(read())

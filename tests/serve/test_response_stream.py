"""Tests that a stream passes deltas from the engine's thread to a reader, in order, and ends."""

import asyncio
import threading

import pytest

from dantinox.config import UserError
from dantinox.generation.request import Delta, GenerationRequest, RequestStats
from dantinox.serve.response_stream import ResponseStream

from .fakes import SAYS, FakeEngine, fake_run


def ask(engine, prompt="a", **settings):
    return GenerationRequest(
        tuple(engine.run.prompt_ids(prompt)), engine.settings({"max_new_tokens": 12, **settings})
    )


def test_deltas_arrive_in_order_from_another_thread():
    async def read():
        cancelled = []
        stream = ResponseStream(
            GenerationRequest((1,), fake_run().config), RequestStats(1), lambda: cancelled.append(1)
        )
        deltas = [Delta(0, str(n), []) for n in range(50)]

        def engine():
            for delta in deltas:
                stream.push(delta)
            stream.end()

        threading.Thread(target=engine).start()
        assert [delta async for delta in stream] == deltas
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        stream.cancel()
        assert cancelled == [1]

    asyncio.run(read())


def test_an_error_ends_a_stream():
    async def read():
        stream = ResponseStream(
            GenerationRequest((1,), fake_run().config), RequestStats(1), lambda: None
        )
        stream.push(Delta(0, "a", []))
        stream.end(UserError("no"))
        assert (await anext(stream)).text == "a"
        with pytest.raises(UserError):
            await anext(stream)

    asyncio.run(read())


def test_the_fake_engine_streams_its_text():
    async def read():
        engine = FakeEngine()
        return [delta async for delta in engine.submit(ask(engine))]

    deltas = asyncio.run(read())
    assert (
        "".join(delta.text for delta in deltas) == SAYS[:12]
        and deltas[-1].finish_reason == "length"
    )

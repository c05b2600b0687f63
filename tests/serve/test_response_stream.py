"""An answer brings pieces from the engine's thread to a reader, in order, and ends."""

import asyncio
import threading

import pytest

from dantinox.config import UserError
from dantinox.generation.request import Delta, GenerationRequest, RequestStats
from dantinox.serve.response_stream import ResponseStream

from .fakes import SAYS, FakeEngine, fake_run


def ask(engine, prompt="a", **settings):
    return GenerationRequest(tuple(engine.run.prompt_ids(prompt)), engine.settings({"max_new_tokens": 12, **settings}))


def test_pieces_come_in_order_from_another_thread():
    async def read():
        cancelled = []
        answer = ResponseStream(GenerationRequest((1,), fake_run().config), RequestStats(1), lambda: cancelled.append(1))
        pieces = [Delta(0, str(n), []) for n in range(50)]

        def engine():
            for piece in pieces:
                answer.push(piece)
            answer.end()

        threading.Thread(target=engine).start()
        assert [piece async for piece in answer] == pieces
        with pytest.raises(StopAsyncIteration):
            await anext(answer)
        answer.cancel()
        assert cancelled == [1]

    asyncio.run(read())


def test_an_error_ends_an_answer():
    async def read():
        answer = ResponseStream(GenerationRequest((1,), fake_run().config), RequestStats(1), lambda: None)
        answer.push(Delta(0, "a", []))
        answer.end(UserError("no"))
        assert (await anext(answer)).text == "a"
        with pytest.raises(UserError):
            await anext(answer)

    asyncio.run(read())


def test_the_fake_engine_speaks():
    async def read():
        engine = FakeEngine()
        return [piece async for piece in engine.submit(ask(engine))]

    pieces = asyncio.run(read())
    assert "".join(piece.text for piece in pieces) == SAYS[:12] and pieces[-1].finish_reason == "length"

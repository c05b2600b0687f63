"""Tests the reload of weights into a running engine: which request uses which weights, caches, and
errors.
"""

import asyncio
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

import dantinox
from dantinox.config import UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.request import GenerationRequest
from dantinox.serve.async_engine import AsyncEngine
from dantinox.serve.errors import Unavailable
from dantinox.serve.pool import weight_reload
from dantinox.serve.pool.weight_reload import weight_reloader
from tests.conftest import CIRCLE
from tests.error_texts import ERRORS
from tests.generation import builder

from .engines import make_request, start, start_engine

PROMPT = CIRCLE * 6  # 78 tokens: more than one chunk of the prefix cache


@pytest.fixture(scope="module")
def path(run_dir, tmp_path_factory):
    return shutil.copytree(run_dir, tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def engine(path):
    engine = AsyncEngine(
        dantinox.load(path),
        EngineOptions(slots=2, context=128, queue=8),
        overrides={"greedy": True},
    )
    yield start(engine)
    engine.close()


def replace_weights(path, source):
    """Replaces the weights as training does: by a rename, together with the manifest."""
    for name in ("model_weights.msgpack", "manifest.txt"):
        if (source / name).exists():
            shutil.copy(source / name, path / f"{name}.new")
            (path / f"{name}.new").replace(path / name)


def submit(engine, prompt=PROMPT, tokens=20):
    config = engine.settings({"max_new_tokens": tokens})
    return engine.submit(GenerationRequest(tuple(engine.run.prompt_ids(prompt)), config))


async def text_of(stream):
    return "".join([delta.text async for delta in stream])


def text_of_run(run, prompt=PROMPT, tokens=20):
    ends = run.tokenizer.stop_ids
    ids = builder.slowly(run.model, run.prompt_ids(prompt), tokens, greedy=True, eos_ids=ends)
    return run.tokenizer.decode([token for token in ids if token not in ends])


def expected(path, **options):
    return text_of_run(dantinox.load(path), **options)


def gated_steps(engine, monkeypatch):
    """Returns a semaphore of which every step of the engine takes a permit."""
    permits, step = threading.Semaphore(0), engine._engine.step

    def gated():
        permits.acquire()
        return step()

    monkeypatch.setattr(engine._engine, "step", gated)
    return permits


def test_new_requests_use_the_new_weights_after_running_ones(
    engine, path, run_dir, ending_run_dir, monkeypatch
):
    async def check():
        reload, programs = weight_reloader(engine, path), dict(engine._batch._programs)
        assert await reload() is False  # the file has not changed
        assert await text_of(submit(engine)) == expected(run_dir)
        warm = submit(engine)
        assert await text_of(warm) == expected(run_dir) and warm.stats.reused_tokens == 64
        permits = gated_steps(engine, monkeypatch)
        running = submit(engine, tokens=40)
        while not running.stats.new_tokens:
            permits.release()
            await asyncio.sleep(0.02)
        assert running.stats.new_tokens < 30
        replace_weights(path, ending_run_dir)
        reloading = asyncio.create_task(reload())
        while not engine._engine.changes.has_weights:
            assert not reloading.done()
            await asyncio.sleep(0.001)
        waiting = submit(engine)
        permits.release(10_000)
        assert await text_of(running) == expected(run_dir, tokens=40)  # the old weights to its end
        assert await reloading is True
        assert await text_of(waiting) == expected(ending_run_dir) != expected(run_dir)
        assert waiting.stats.reused_tokens == 0  # the cached prefix belongs to the old weights
        again = submit(engine)
        assert await text_of(again) == expected(ending_run_dir) and again.stats.reused_tokens == 64
        assert text_of_run(engine.run) == expected(ending_run_dir)
        assert (
            engine._batch._programs == programs and "compilations" not in engine.status().counters
        )
        assert await reload() is False

    asyncio.run(check())


def test_an_idle_engine_reloads_at_once(engine, path, run_dir):
    async def check():
        reload = weight_reloader(engine, path)
        replace_weights(path, run_dir)
        assert await asyncio.wait_for(reload(), 30) is True
        assert await text_of(submit(engine)) == expected(run_dir)

    asyncio.run(check())


def test_errors_keep_the_old_weights(engine, path, run_dir, monkeypatch):
    async def check():
        reload = weight_reloader(engine, path)
        before = expected(path)
        weights = (path / "model_weights.msgpack").read_bytes()
        (path / "model_weights.msgpack").write_bytes(weights[:-100])
        with pytest.raises(UserError):
            await reload()
        assert await text_of(submit(engine)) == before
        (path / "model_weights.msgpack").write_bytes(weights)
        monkeypatch.setattr(weight_reload, "available_bytes", lambda device: 1000)
        with pytest.raises(UserError, match=ERRORS["the_new_weights_need"]):
            await reload()
        monkeypatch.undo()
        shorter = replace(engine.run.model.config, max_context=96)
        with pytest.raises(UserError, match=ERRORS["another_architecture"]):
            await engine.replace_weights(SimpleNamespace(model=SimpleNamespace(config=shorter)))
        assert await reload() is True
        assert await text_of(submit(engine)) == before

    asyncio.run(check())


def test_weights_for_an_engine_that_has_ended_are_refused(monkeypatch):
    """Nothing installs them any more, so waiting for it would block this reload and all later
    ones.
    """

    async def check():
        ending = start_engine()
        permits = gated_steps(ending, monkeypatch)
        running = ending.submit(make_request(ending, "once", max_new_tokens=90))
        while not running.stats.new_tokens:
            permits.release()
            await asyncio.sleep(0.02)
        replacing = asyncio.create_task(ending.replace_weights(ending.run))
        while not ending._engine.changes.has_weights:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(asyncio.to_thread(ending.close))
        while not ending._closing:
            await asyncio.sleep(0.001)
        permits.release()
        with pytest.raises(Unavailable, match="is draining"):
            await asyncio.wait_for(replacing, 30)
        with pytest.raises(Unavailable, match="is draining"):
            await asyncio.wait_for(ending.replace_weights(ending.run), 30)
        await closing

    asyncio.run(check())

"""Tests a server with several models: loads, unloads and their bounds, errors, and the choice of
the model.
"""

import asyncio
import contextlib
import gc
import json
import random
import re
import shutil
import threading
import time
import weakref
from pathlib import Path

import httpx
import pytest
from flax import nnx

from dantinox.cli import main
from dantinox.config import UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.serve.operations.api_keys import ApiKeys, single_key
from dantinox.serve.operations.rate_limits import ApiKey
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.options import Options
from dantinox.serve.pool import model_pool
from dantinox.serve.pool.model_loading import OpenModel, open_model
from dantinox.serve.pool.model_pool import ModelPool
from dantinox.serve.pool.model_specs import ModelSpec, check_model_name, check_names, read_models
from dantinox.serve.pool.pool_app import make_pool_app
from dantinox.serve.protocols.keep_alive import keep_seconds
from tests.conftest import CIRCLE

from .fakes import FakeEngine, fake_run

SIZES = {"a": 4, "b": 5, "c": 6}


class PoolEngine(FakeEngine):
    """An engine of the pool, whose text names its model."""

    def __init__(self, name, size, loras):
        super().__init__(fake_run(), f"{name} says it again; ")
        self.name, self.memory_bytes, self.state = name, size, "loading"
        self.loras, self.lora_paths = dict(loras), dict(loras)
        self.closed = 0

    def start(self):
        self.state = "ready"

    def close(self):
        self.state, self.closed = "draining", self.closed + 1

    async def drain(self, seconds):
        self.state = "draining"
        while self.tasks:
            await asyncio.sleep(0.001)

    async def load_lora(self, name, path):
        await super().load_lora(name, path)
        self.lora_paths[name] = path


class Opener:
    """Opens engines without models.

    Attributes:
      sizes: bytes of each model.
      sizes_unknown: whether they are known only when a model is loaded.
      opened: the names of the loaded models, in their order.
      gates: events that a load of a model waits for.
      errors: an error of the load of a model.
      engines: the newest engine of each model.
    """

    def __init__(self, sizes=SIZES, sizes_unknown=False):
        self.sizes_unknown = sizes_unknown
        self.sizes, self.opened, self.gates, self.errors, self.engines = sizes, [], {}, {}, {}
        self.changed = {}
        self.pause = 0.0

    def __call__(self, spec, loras, memory):
        if spec.name in self.gates:
            assert self.gates[spec.name].wait(30)
        if spec.name in self.errors:
            raise self.errors[spec.name]
        self.opened.append(spec.name)
        self.engines[spec.name] = engine = PoolEngine(spec.name, self.sizes[spec.name], loras)
        engine.pause = self.pause

        async def reload():
            found = self.changed.get(spec.name, False)
            if isinstance(found, Exception):
                raise found
            return found

        return OpenModel(engine, None, reload)


def make_pool(opener, options=None, **more):
    """Returns a pool of the models of an opener, and its application."""
    specs = [
        ModelSpec(name, Path(name), loras={"poems": Path("p")} if name == "b" else {})
        for name in opener.sizes
    ]
    sizes = None if opener.sizes_unknown else opener.sizes
    pool = ModelPool(specs, opener, **{"memory": 10, "sizes": sizes, **more})
    return pool, make_pool_app(pool, options or Options())


@contextlib.asynccontextmanager
async def running(pool, app, **headers):
    """Starts a pool and yields a client of its application."""
    pool.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers, timeout=60
    ) as client:
        while pool.status().state == "loading":
            await asyncio.sleep(0.001)
        yield client
    await asyncio.to_thread(pool.close)


def body(model=None, tokens=8):
    return {"prompt": "x", "max_tokens": tokens} | ({} if model is None else {"model": model})


async def ask(client, model=None, tokens=8):
    return await client.post("/v1/completions", json=body(model, tokens))


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def message(answer):
    return answer.json()["error"]["message"]


async def until(condition):
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition does not hold")


@pytest.fixture(autouse=True)
def quick_unloads(request, monkeypatch):
    """A garbage collection takes long in a process with many objects."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(model_pool, "_free_memory", lambda: None)


# --- loads and unloads


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_random_requests_to_more_models_than_fit(seed, monkeypatch):
    """Every request gets the answer of its model, and the loaded bytes never exceed the bound."""
    draw, opener = random.Random(seed), Opener()
    monkeypatch.setattr(model_pool, "_free_memory", lambda: time.sleep(draw.random() / 500))
    pool, app = make_pool(opener, memory=10)
    sizes = []

    async def one(client, number):
        await asyncio.sleep(draw.random() / 5)
        name, tokens = draw.choice("abc"), draw.randint(1, 12)
        answer = await ask(client, name, tokens)
        assert (
            text(answer) == (f"{name} says it again; " * 2)[:tokens]
            and answer.json()["model"] == name
        )
        loaded = [member for member in pool.members.values() if member.state == "loaded"]
        sizes.append(sum(SIZES[member.name] for member in loaded))

    async def check():
        async with running(pool, app) as client:
            await asyncio.gather(*(one(client, number) for number in range(80)))
            assert pool.used_bytes <= 10 and pool.peak <= 10 and max(sizes) <= 10
            asked = sum(member.past["requests"] for member in pool.members.values())
            assert asked == 0  # engines without a model count nothing
            assert all(member.users == member.waiting == 0 for member in pool.members.values())
            assert len(opener.opened) == sum(member.loads for member in pool.members.values()) >= 3
            assert all(
                member.loads - member.unloads == (member.state == "loaded")
                for member in pool.members.values()
            )

    asyncio.run(check())


def test_a_loaded_model_is_not_unloaded_before_its_requests_run():
    opener = Opener()
    pool, app = make_pool(opener, max_models=1, memory=None)

    async def check():
        async with running(pool, app) as client:
            for answer in await asyncio.gather(*(ask(client, name) for name in "cba" * 10)):
                text(answer)
            assert opener.opened == ["a", "c", "b"]

    asyncio.run(check())


def test_the_least_recently_used_model_is_unloaded():
    opener = Opener()
    pool, app = make_pool(opener, max_models=2, memory=None)

    async def check():
        async with running(pool, app) as client:
            for name, loaded in (
                ("a", "a"),
                ("b", "ab"),
                ("a", "ab"),
                ("c", "ac"),
                ("b", "bc"),
                ("c", "bc"),
                ("a", "ac"),
            ):
                text(await ask(client, name))
                assert (
                    "".join(one.name for one in pool.members.values() if one.state == "loaded")
                    == loaded
                )
        assert all(engine.closed for engine in opener.engines.values())

    asyncio.run(check())


def test_a_load_does_not_delay_other_models():
    opener = Opener()
    opener.gates["b"] = threading.Event()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            loading = [asyncio.create_task(ask(client, "b")) for _ in range(3)]
            await until(
                lambda: pool.members["b"].state == "loading" and pool.members["b"].waiting == 3
            )
            assert text(await ask(client, "a")).startswith("a says")
            listed = (await client.get("/v1/models")).json()["data"]
            assert [entry["status"]["value"] for entry in listed] == [
                "loaded",
                "loading",
                "loading",
                "unloaded",
            ]
            opener.gates["b"].set()
            assert {text(answer) for answer in await asyncio.gather(*loading)} == {"b says i"}
            assert opener.opened == ["a", "b"]

    asyncio.run(check())


@pytest.mark.parametrize("sizes_unknown", [False, True])
def test_a_request_waits_for_room_and_is_refused_in_time(sizes_unknown):
    opener = Opener(sizes_unknown=sizes_unknown)
    pool, app = make_pool(opener, memory=6, wait=0.4, queue=1)

    async def check():
        async with running(pool, app) as client:
            opener.engines["a"].pause = 0.02
            long = asyncio.create_task(ask(client, "a", 40))
            await until(lambda: opener.engines["a"].tasks)
            waits = asyncio.create_task(ask(client, "b"))
            await until(lambda: pool.members["b"].waiting)
            refused = await ask(client, "b")
            assert (
                refused.status_code == 503
                and "too many requests wait for the model b" in message(refused)
            )
            refused = await waits
            assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
            assert "all loaded models are in use" in message(refused)
            assert len(text(await long)) == 40  # it was not cut
            assert text(await ask(client, "b")) == "b says i"
            assert opener.opened == ["a", *"b" * (1 + sizes_unknown)] and pool.peak <= 6

    asyncio.run(check())


def test_a_slow_unload_does_not_refuse_the_request_that_waits_for_the_room():
    """An engine that closes waits for its running compilation, which can take a minute."""
    opener = Opener()
    pool, app = make_pool(opener, memory=6, wait=0.1)

    async def check():
        async with running(pool, app) as client:
            engine = opener.engines["a"]
            closes = engine.close
            engine.close = lambda: (time.sleep(0.4), closes())
            assert text(await ask(client, "b")) == "b says i"
            engine.close = closes

    asyncio.run(check())


def test_a_load_that_fails_leaves_other_models_alone(monkeypatch):
    monkeypatch.setattr(model_pool, "LOAD_RETRY_SECONDS", 0.2)
    opener = Opener()
    opener.errors["b"] = UserError("/secret/path is damaged")
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            for _ in range(2):  # the second one does not try again
                answer = await ask(client, "b")
                assert answer.status_code == 503 and answer.headers["retry-after"]
                assert message(answer) == "the model b cannot be loaded: see the server's log"
            assert pool.members["b"].failures == 1 and pool.used_bytes == 4
            assert text(await ask(client, "a")).startswith("a says")
            opener.errors["b"] = MemoryError()
            await asyncio.sleep(0.25)
            assert (await ask(client, "b")).status_code == 503 and pool.members["b"].failures == 2
            del opener.errors["b"]
            await asyncio.sleep(0.25)
            assert text(await ask(client, "b")) == "b says i"

    asyncio.run(check())


def test_models_that_never_fit():
    with pytest.raises(
        UserError, match=r"the model b needs 12 GB, but --model_memory allows 10 GB"
    ):
        ModelPool(
            [ModelSpec("a", Path("a")), ModelSpec("b", Path("b"))],
            Opener(),
            sizes={"b": 12 * 10**9},
            memory=10**10,
        )
    with pytest.raises(UserError, match=r"the model a needs .*: set fewer --slots"):
        make_pool(Opener({"a": 11}, sizes_unknown=True))
    pool, app = make_pool(Opener({"a": 4, "b": 11}, sizes_unknown=True))

    async def check():
        async with running(pool, app) as client:
            answer = await ask(client, "b")
            assert (
                answer.status_code == 503
                and "the model b needs 1.1e-08 GB, but --model_memory allows" in message(answer)
            )
            assert text(await ask(client, "a")) and pool.peak <= 10

    asyncio.run(check())


def test_a_cancelled_request_does_not_cancel_the_load():
    opener = Opener()
    opener.gates["b"] = threading.Event()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            gone = asyncio.create_task(ask(client, "b"))
            await until(lambda: pool.members["b"].state == "loading")
            gone.cancel()
            await asyncio.wait([gone])
            assert pool.members["b"].waiting == 0
            opener.gates["b"].set()
            await until(lambda: pool.members["b"].state == "loaded")
            assert text(await ask(client, "b")) == "b says i" and opener.opened == ["a", "b"]
            # A load that has not begun is given up with its last request.
            opener.engines["a"].pause = opener.engines["b"].pause = 0.01
            long = [asyncio.create_task(ask(client, name, 30)) for name in "ab"]
            await until(lambda: pool.members["a"].users and pool.members["b"].users)
            gone = asyncio.create_task(ask(client, "c"))
            await until(lambda: pool.members["c"].waiting)
            gone.cancel()
            for answer in await asyncio.gather(*long):
                text(answer)
            assert opener.opened == ["a", "b"]

    asyncio.run(check())


def test_a_failed_engine_is_loaded_again():
    opener = Opener()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            text(await ask(client, "b"))
            opener.engines["b"].state = "failed"
            opener.engines["b"].on_failure()
            await until(lambda: pool.members["b"].state == "failed")
            assert (await client.get("/health")).status_code == 200
            assert text(await ask(client, "b")) == "b says i" and opener.opened == ["a", "b", "b"]

    asyncio.run(check())


def test_clients_of_a_failed_model_do_not_delay_other_models(monkeypatch):
    """One client never reads the end of its response. Until it leaves, the failed model keeps its
    memory, and a request for it waits for a bounded time.
    """
    opener = Opener(dict.fromkeys("abc", 3))
    pool, app = make_pool(opener, wait=0.2)

    async def check():
        async with running(pool, app) as client:
            left = asyncio.Event()

            async def read_slowly():
                async with pool.use("b"):
                    await left.wait()

            slow = asyncio.create_task(read_slowly())
            await until(lambda: pool.members["b"].users)
            opener.engines["b"].state = "failed"
            opener.engines["b"].on_failure()
            await until(lambda: pool.members["b"].state == "failed")
            again = asyncio.create_task(ask(client, "b"))
            await until(lambda: pool.members["b"].waiting)
            assert text(await asyncio.wait_for(ask(client, "c"), 5)) == "c says i"
            refused = await again
            assert refused.status_code == 503
            assert message(refused) == (
                "the model b has failed, and requests that used it have not ended"
            )
            again = asyncio.create_task(ask(client, "b"))
            await until(lambda: pool.members["b"].waiting)
            left.set()
            assert text(await again) == "b says i" and opener.opened == ["a", "b", "c", "b"]
            await slow

    asyncio.run(check())


def test_shutdown_completes_responses_and_ends_waiting_requests():
    opener = Opener()
    opener.gates["b"] = threading.Event()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            opener.engines["a"].pause = 0.005
            long = asyncio.create_task(ask(client, "a", 30))
            waits = asyncio.create_task(ask(client, "b"))
            await until(lambda: opener.engines["a"].tasks and pool.members["b"].state == "loading")
            draining = asyncio.create_task(pool.drain(10))
            assert (await waits).status_code == 503
            assert (await ask(client, "a")).status_code == 503 and (
                await client.get("/health")
            ).status_code == 503
            assert len(text(await long)) == 30
            await draining
            opener.gates["b"].set()
            await until(lambda: pool.members["b"].state == "unloaded")
            assert opener.engines["b"].closed

    asyncio.run(check())


def test_a_pool_whose_first_model_cannot_start():
    opener, failed = Opener(), []
    pool, app = make_pool(opener)
    opener.engines["a"].start = lambda: setattr(opener.engines["a"], "state", "failed")
    pool.on_failure = lambda: failed.append(True)

    async def check():
        async with running(pool, app) as client:
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "failed" and failed

    asyncio.run(check())


# --- the choice of the model


def test_lengths_of_names():
    assert check_model_name("n" * 200, "alias") == "n" * 200
    for name in ("n" * 201, " ", "a\nb"):
        with pytest.raises(
            UserError, match="alias must be a printable name of at most 200 characters"
        ):
            check_model_name(name, "alias")


def test_names_aliases_and_adapters():
    opener, options = Opener(), Options(aliases={"nice": "b:poems", "big": "c"})
    pool, app = make_pool(opener, options, memory=None)

    async def check():
        async with running(pool, app) as client:
            for name, model, adapter in (
                (None, "a", None), ("b", "b", None), ("b:poems", "b", "poems"),
                ("nice", "b", "poems"), ("big", "c", None),
            ):  # fmt: skip
                assert text(await ask(client, name)).startswith(f"{model} says")
                assert opener.engines[model].asked[-1].lora == adapter
            for name in ("nope", "a:poems", "b:other"):
                answer = await ask(client, name)
                assert (
                    answer.status_code == 404
                    and answer.json()["error"]["code"] == "model_not_found"
                )
                assert "only 'a', 'b', 'b:poems', 'c', 'nice'" in message(answer)
            listed = (await client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["a", "b", "b:poems", "c", "nice", "big"]
            assert [entry.get("parent") for entry in listed] == [None, None, "b", None, "b", None]
            assert (await client.get("/v1/models/nice")).json()["root"] == "b:poems"
            assert (await client.get("/v1/models/nope")).status_code == 404
            # Other protocols, and requests without a body.
            answer = await client.post(
                "/api/chat", json={"model": "c:latest", "messages": [], "stream": False}
            )
            assert answer.status_code in (200, 400)
            answer = await client.post(
                "/api/generate", json={"model": "c:latest", "prompt": "x", "stream": False}
            )
            assert answer.json()["model"] == "c:latest" and answer.json()["response"].startswith(
                "c says"
            )
            assert (await client.get("/props?model=b")).json()["model_alias"] == "b"
            assert (await client.get("/props?model=nope")).status_code == 404
            assert (await client.get("/api/v1/model")).json() == {"result": "a"}
            answer = await client.post(
                "/api/v1/generate?model=c",
                json={"prompt": "x", "max_length": 4, "model": "koboldcpp"},
            )
            assert answer.json()["results"][0]["text"] == "c sa"
            answer = await client.post("/v1/embeddings", json={"model": "b", "input": "x"})
            assert answer.json()["model"] == "b"
            # Errors of bodies are those of a server with one model.
            for content, status in (
                (b"{", 400),
                (b"[]", 400),
                (b'{"model": 3, "prompt": "x"}', 400),
            ):
                headers = {"content-type": "application/json"}
                assert (
                    await client.post("/v1/completions", content=content, headers=headers)
                ).status_code == status
            assert (await client.post("/v1/completions", content=b"x")).status_code == 415
            body = b'{"model": "b", "prompt": "x", "options": {"num_predict": 4}}'
            answer = await client.post("/api/generate", content=body)
            assert answer.status_code == 200, "Ollama accepts JSON without a media type"
            assert (await client.get("/v1/completions")).status_code == 405
            assert (await client.get("/no/path")).status_code == 404
            assert (await client.get("/")).status_code == 200

    asyncio.run(check())


def test_the_tag_of_ollama_in_aliases_and_adapters():
    opener, options = Opener(), Options(aliases={"chat:latest": "c", "nice": "b:poems"})
    pool, app = make_pool(opener, options, memory=None)

    async def check():
        async with running(pool, app) as client:
            await client.post("/v1/completions", json=body("b"))
            await opener.engines["b"].load_lora("latest", Path("p"))
            for name, model, adapter in (
                ("chat:latest", "c", None), ("chat", "c", None), ("nice:latest", "b", "poems"),
                ("b", "b", None), ("b:latest", "b", "latest"), ("b:poems:latest", "b", "poems"),
                ("a:latest", "a", None),
            ):  # fmt: skip
                content = {"model": name, "prompt": "x", "stream": False}
                answer = await client.post("/api/generate", json=content)
                assert answer.status_code == 200, answer.text
                assert answer.json()["response"].startswith(f"{model} says")
                assert opener.engines[model].asked[-1].lora == adapter
            answer = await client.post("/api/generate", json={"model": "none:latest"})
            assert answer.status_code == 404

    asyncio.run(check())


@pytest.mark.parametrize("aliases", [{"x": "d"}, {"b": "a"}])
def test_wrong_aliases(aliases):
    with pytest.raises(UserError, match="the alias"):
        make_pool(Opener(), Options(aliases=aliases))


def test_keys_choose_among_their_models_and_load_no_others():
    keys = ApiKeys(
        [
            ApiKey("only-b", single_key("secret-b").digest, models=("b",)),
            single_key("secret-all", "all"),
        ]
    )
    opener = Opener()
    pool, app = make_pool(opener, Options(keys=keys))

    async def check():
        async with running(pool, app, authorization="Bearer secret-b") as client:
            answer = await ask(client, "c")
            assert (
                answer.status_code == 404
                and message(answer) == "the key only-b may not use the model 'c'"
            )
            assert "only 'b'" in message(await ask(client, "nope"))
            assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["b"]
            assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == [
                "b:latest"
            ]
            assert opener.opened == ["a"]
            assert text(await ask(client)) == "b says i"  # the first model that the key may use
            assert keys.usage["only-b"].counts["requests"] == 3
            assert (await ask(client, "b:poems")).status_code == 404
            client.headers["authorization"] = "Bearer nothing"
            assert (await ask(client, "b")).status_code == 401

    asyncio.run(check())


def test_adapters_of_clients_survive_an_unload(tmp_path):
    (tmp_path / "verse").mkdir()
    opener = Opener()
    pool, app = make_pool(opener, Options(lora_dir=tmp_path))

    async def check():
        async with running(pool, app) as client:
            load = {"lora_name": "verse", "lora_path": "verse", "model": "c"}
            answer = await client.post("/v1/load_lora_adapter", json=load)
            assert answer.json() == {"id": "c:verse", "object": "model", "loaded": True}
            text(await ask(client, "b"))
            assert pool.members["c"].state == "unloaded"
            assert "c:verse" in [
                one["id"] for one in (await client.get("/v1/models")).json()["data"]
            ]
            text(await ask(client, "c:verse"))
            assert opener.engines["c"].asked[-1].lora == "verse" and opener.engines[
                "c"
            ].lora_paths == {"verse": tmp_path / "verse"}
            answer = await client.post(
                "/v1/unload_lora_adapter", json={"lora_name": "verse", "model": "a"}
            )
            assert answer.status_code == 404

    asyncio.run(check())


def test_metrics_health_and_reload_of_several_models():
    opener, keys = Opener(), ApiKeys([ApiKey("root", single_key("secret-root").digest, admin=True)])
    pool, app = make_pool(opener, memory=None)
    reloader = Reloader(keys, pool.reload_weights)
    pool, app = make_pool(opener, Options(keys=keys, reloader=reloader), memory=None)
    reloader._reload_weights = pool.reload_weights

    async def check():
        async with running(pool, app, authorization="Bearer secret-root") as client:
            text(await ask(client, "b"))
            assert (await client.get("/health")).json()["models"] == {
                "loaded": 2,
                "loading": 0,
                "unloaded": 1,
            }
            found = (await client.get("/metrics")).text
            for line in (
                'dantinox_model_loaded{model="b"} 1.0', 'dantinox_model_bytes{model="c"} 0.0',
                "dantinox_ready 1.0", 'dantinox_request_seconds_count{model="b"} 1.0',
                'dantinox_slots{model="a"} 8.0',
                'dantinox_model_loads_total{model="a",result="success"} 1.0',
            ):  # fmt: skip
                assert line in found
            assert (await client.post("/admin/reload")).json() == {"keys": 1, "new_weights": False}
            opener.changed = {"b": True, "c": True}
            assert (await client.post("/admin/reload")).json()["new_weights"] is True
            opener.changed = {"a": UserError("a is damaged"), "b": True}
            answer = await client.post("/admin/reload")
            assert answer.status_code == 409 and "a: a is damaged" in message(answer)
            assert all(member.users == 0 for member in pool.members.values())

    asyncio.run(check())


def test_a_reload_leaves_out_a_model_that_is_being_unloaded():
    """The reload reaches it while its engine is being closed; new weights would then never be
    installed.
    """
    opener = Opener()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            text(await ask(client, "b"))
            at_a, at_b, go_on = asyncio.Event(), [], asyncio.Event()
            opened = {name: pool.members[name].opened for name in "ab"}

            async def reload_a():
                at_a.set()
                await go_on.wait()
                return True

            async def reload_b():
                at_b.append(1)
                return True

            for name, reload in (("a", reload_a), ("b", reload_b)):
                pool.members[name].opened = opened[name]._replace(reload_weights=reload)
            reloading = asyncio.create_task(pool.reload_weights())
            await at_a.wait()
            closing, close = threading.Event(), opener.engines["b"].close
            opener.engines["b"].close = lambda: (closing.wait(30), close())
            pool.keep(pool.members["b"], 0)
            while pool.members["b"].state != "unloading":
                await asyncio.sleep(0.001)
            go_on.set()
            assert await asyncio.wait_for(reloading, 30) is True and not at_b
            closing.set()

    asyncio.run(check())


def test_keep_alive_of_a_request_whose_client_disconnects():
    """The time of the request before it no longer applies, so the model would otherwise stay loaded
    for ever.
    """
    opener = Opener()
    opener.pause = 0.01
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:
            body = {"model": "b", "prompt": "x", "options": {"num_predict": 200}, "keep_alive": 0}
            request = asyncio.create_task(client.post("/api/generate", json=body))
            while not pool.members["b"].users:
                await asyncio.sleep(0.001)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            async with asyncio.timeout(10):
                while pool.members["b"].state != "unloaded":
                    await asyncio.sleep(0.01)

    asyncio.run(check())


def test_keep_alive():
    opener = Opener()
    pool, app = make_pool(opener)

    async def check():
        async with running(pool, app) as client:

            async def generate(**more):
                return await client.post(
                    "/api/generate", json={"model": "b", "prompt": "x", "stream": False, **more}
                )

            assert (await generate(keep_alive="5m")).status_code == 200
            _, shown = (await client.get("/api/ps")).json()["models"]
            assert shown["name"] == "b:latest" and not shown["expires_at"].startswith("9999")
            await generate()
            assert (
                (await client.get("/api/ps")).json()["models"][1]["expires_at"].startswith("9999")
            )
            await generate(keep_alive=0)
            await until(lambda: pool.members["b"].state == "unloaded")
            assert len((await client.get("/api/tags")).json()["models"]) == 3
            answer = await generate(keep_alive="soon")
            assert (
                answer.status_code == 400
                and "keep_alive must be a number of seconds" in answer.json()["error"]
            )
            assert pool.members["b"].state == "unloaded"

    asyncio.run(check())
    values = {
        "5m": 300.0,
        "1h30m": 5400.0,
        "90": 90.0,
        2.5: 2.5,
        "1.5s": 1.5,
        "250ms": 0.25,
        "0": 0.0,
        -1: None,
        "-1m": None,
    }
    for value, seconds in values.items():
        assert keep_seconds(value).seconds == pytest.approx(seconds)
    assert keep_seconds(None) is None


# --- real models


@pytest.mark.slow
def test_real_models_with_room_for_two(run_dir, ending_run_dir, tmp_path):
    """Answers equal those of each model alone, and an unload frees the weights."""
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    paths, settings = (
        {"circle": run_dir, "ending": ending_run_dir, "copy": copy},
        {
            "greedy": True,
            "max_new_tokens": 25,
        },
    )
    around = CIRCLE[1:] + CIRCLE  # the text after "a", of 25 bytes
    expected = {"circle": around, "ending": CIRCLE[1:], "copy": around}
    options = EngineOptions(slots=2, context=64, queue=8, prefix_cache=0)
    specs = [
        ModelSpec(name, path, settings=settings, options=options) for name, path in paths.items()
    ]
    most = open_model(specs[0]).engine.memory_bytes  # they have equal shapes
    pool = ModelPool(specs, open_model, memory=2 * most)
    app, arrays = make_pool_app(pool, Options()), []

    async def check():
        async with running(pool, app) as client:
            leaf = nnx.state(pool.members["circle"].opened.engine.run.model)["embed"]
            arrays.append(weakref.ref(leaf[...] if hasattr(leaf, "__getitem__") else leaf))
            del leaf
            order = ["ending", "copy", "circle"]
            for name in order:
                answer = await client.post("/v1/completions", json={"prompt": "a", "model": name})
                assert text(answer) == expected[name]
                if name == "copy":
                    assert pool.members["circle"].state == "unloaded"
            assert pool.peak <= 2 * most
            gc.collect()
            assert arrays[0]() is None
            # The engine counts the requests of all loads.
            assert sum(status.counters["requests"] for status in pool.statuses().values()) == len(
                order
            )

    asyncio.run(check())


# --- flags and files


def test_the_file_of_models(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(
        "models:\n  b: runs/b\n  c:\n    run_dir: runs/c\n    lora: {poems: runs/p}\n    slots: 2\n"
        "    settings: {temperature: 0.5}\n"
    )
    assert read_models(path) == {
        "b": {"run_dir": Path("runs/b")},
        "c": {
            "run_dir": Path("runs/c"),
            "lora": {"poems": Path("runs/p")},
            "slots": 2,
            "settings": {"temperature": 0.5},
        },
    }
    for entry, sentence in (
        (3, "must be the path of a run directory"),
        ({"slots": 2}, "or an object with run_dir"),
        ({"run_dir": "x", "slot": 2}, "unknown field slot"),
        (
            {"run_dir": "x", "slots": 0},
            r"slots of b in .* must be an integer in \[1, 1024\], got 0",
        ),
        ({"run_dir": "x", "lora": ["p"]}, "must be an object that maps names to paths"),
        ({"run_dir": "x", "lora": {"p": 1}}, "must map names to paths"),
        ({"run_dir": "x", "settings": 1}, "must be an object of settings"),
        ({"run_dir": "x", "chat_template": 1}, "must be a name or a path"),
    ):
        path.write_text(json.dumps({"models": {"b": entry}}))
        with pytest.raises(UserError, match=sentence):
            read_models(path)
    path.write_text("others: {}")
    with pytest.raises(UserError, match="must have one object, models"):
        read_models(path)


def test_names_of_models_are_distinct():
    check_names(["a", "b:8b", "b2"])
    for names, sentence in (
        (["a", "a"], "two models have the name 'a'"),
        (["a", "a:b"], "could also mean an adapter of 'a'"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_names(names)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--model", "b"], "--model must be NAME=PATH, got 'b'"),
        (["--model", "b=/no/run"], "no run directory|does not exist|no run"),
        (["--max_models", "2"], "need several models"),
        (["--model_memory", "12"], "must be a number of MB or GB above 0, such as 12GB, got '12'"),
        (["--model_memory", "0GB"], "above 0"),
        (["--models", "/no/file"], "/no/file"),
    ],
)
def test_wrong_flags(flags, sentence, run_dir, capsys):
    with contextlib.suppress(SystemExit):
        assert main(["serve", str(run_dir), *flags]) != 0
    assert re.search(sentence, capsys.readouterr().err)

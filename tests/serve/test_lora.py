"""Tests adapters in the server: their files, their selection in every protocol, and their change
while it runs.
"""

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import dantinox
from dantinox.cli import main
from dantinox.config import UserError
from dantinox.config.engine_options import EngineOptions
from dantinox.generation.request import GenerationRequest
from dantinox.run import open_run
from dantinox.run.peft_folder import load_lora
from dantinox.serve.app import make_app
from dantinox.serve.async_engine import AsyncEngine
from dantinox.serve.errors import RequestError, Unavailable
from dantinox.serve.options import Options
from dantinox.serve.protocols.lora_routes import path_below
from dantinox.text import ChatTemplate
from tests.generation import builder

from .engines import start
from .fakes import FakeEngine
from .lora_runs import make_lora_run, make_peft_folder
from .test_openai import refusal

GREEDY = {"greedy": True, "max_new_tokens": 8}
BODY = {"prompt": "hello", "max_tokens": 3}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_dir):
    """A directory with the runs `one` and `two`, and the PEFT folder `peft`."""
    folder = tmp_path_factory.mktemp("loras")
    make_lora_run(folder / "one", run_dir, 1)
    make_lora_run(folder / "two", run_dir, 2, rank=3, targets=["q_proj", "down_proj"])
    make_peft_folder(folder / "peft", folder / "one")
    return folder


# --- files


def tokens_of(path):
    """Returns the tokens of a run, whose adapters are merged, from the reference."""
    run = dantinox.load(path)
    return builder.slowly(
        run.model, run.prompt_ids("hello"), 8, greedy=True, eos_ids=run.tokenizer.stop_ids
    )


def test_load_reads_runs_and_peft_folders(run_dir, folder):
    """Four rows of one batch have no adapter, and those of two runs and of a PEFT folder."""
    model = dantinox.load(
        run_dir, loras={"one": folder / "one", "two": folder / "two", "peft": folder / "peft"}
    )
    names = (None, "one", "two", "peft")
    results = model.complete([model.request("hello", GREEDY, lora=name) for name in names])
    expected = {
        name: tokens_of(path)
        for name, path in zip(names, (run_dir, folder / "one", folder / "two"), strict=False)
    }
    assert len({*map(tuple, expected.values())}) == 3
    assert [result.tokens for result in results] == [*expected.values(), expected["one"]]
    assert model.loras["peft"].digest == model.loras["one"].digest != model.loras["two"].digest


def test_errors_of_adapter_files(run_dir, folder, tmp_path, ending_run_dir):
    base, model = open_run(run_dir), dantinox.load(run_dir).model.config
    for path, message in (
        (
            tmp_path / "nothing",
            "no adapter at .*nothing: it must be a run with adapters or a PEFT folder",
        ),
        (run_dir, "is a run without adapters"),
        (
            make_lora_run(tmp_path / "other", run_dir, 1, digest="0" * 64),
            "were trained on the weights 000000000000…",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load_lora(path, base, model)
    damaged = make_lora_run(tmp_path / "damaged", run_dir, 1)
    (damaged / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 99}'
    )
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        load_lora(damaged, base, model)
    with pytest.raises(UserError, match="use the base that they were trained on"):
        load_lora(folder / "one", open_run(ending_run_dir), model)
    with pytest.raises(UserError, match="an adapter of rank 3, but the largest rank allowed is 2"):
        load_lora(folder / "two", base, model, 2)
    smaller = dantinox.load_config(
        "quickstart", {"model.num_blocks": 1, "model.dim": 32}
    ).architecture(259)
    with pytest.raises(UserError, match="but this model has 1 layers"):
        load_lora(folder / "peft", None, smaller)


def test_flags(run_dir, folder, capsys):
    for flags, message in (
        (["--lora", "one"], "--lora must be NAME=PATH, got 'one'"),
        (["--lora", f"a={folder}/one", f"a={folder}/two"], "--lora has the name 'a' twice"),
        (["--lora", f"a:b={folder}/one"], "the name of an adapter must be"),
        (["--lora_dir", str(folder / "one" / "config.yaml")], "--lora_dir: no directory at"),
        (
            ["--lora_dir", str(folder), "--no_auth", "--host", "0.0.0.0"],
            "give it a key instead of --no_auth",
        ),
        (
            ["--lora", f"a={folder}/one", f"b={folder}/two", "--max_loras", "1"],
            "at most 1 can be loaded",
        ),
        (
            ["--lora", f"a={folder}/two", "--max_lora_rank", "2"],
            "the adapter a has rank 3, but the largest rank allowed is 2",
        ),
    ):
        assert (
            main(["serve", "--run_dir", str(run_dir), "--port", "0", "--slots", "1", *flags]) != 0
        ), flags
        assert message in capsys.readouterr().err


def test_paths_of_requests_stay_below_the_directory(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "one")
    (tmp_path / "inside").mkdir()
    assert (
        path_below(tmp_path, "inside")
        == path_below(tmp_path, f"{tmp_path}/./inside")
        == (tmp_path / "inside").resolve()
    )
    for given in (
        "",
        ".",
        "..",
        "../x",
        "inside/../..",
        "/etc",
        "link",
        "a\0b",
        "x" * 5000 + "/..",
        str(folder / "one"),
    ):
        with pytest.raises(RequestError, match="lora_path must be a folder below"):
            path_below(tmp_path, given)


# --- protocols, with an engine that has no model


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.loras = {"one": None, "two": None}
    return engine


def client_of(engine, **options):
    options.setdefault("template", ChatTemplate.from_name("plain", engine.run.tokenizer))
    return TestClient(
        make_app(engine, Options(**options)),
        base_url="http://localhost",
        raise_server_exceptions=False,
    )


HELLO = [{"role": "user", "content": "hello"}]
PATHS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/api/v1/generate": {"prompt": "hello", "max_length": 3},
    "/api/dantinox/generate": {"prompt": "hello", "settings": {"max_new_tokens": 3}},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_request_selects_an_adapter(engine, path):
    client = client_of(engine)
    for fields in (
        {"model": "fake:two"},
        {"lora": "two"},
        {"model": "fake", "lora": "two"},
        {"model": "fake:two", "lora": "two"},
    ):
        answer = client.post(path, json=PATHS[path] | fields)
        assert answer.status_code == 200, answer.text
        if path.startswith("/v1"):
            assert answer.json()["model"] == "fake:two"
    assert [request.lora for request in engine.asked] == ["two"] * 4
    assert (
        client.post(path, json=PATHS[path]).status_code
        == client.post(path, json=PATHS[path] | {"model": "fake"}).status_code
    )
    assert [request.lora for request in engine.asked[4:]] == [None, None]
    for fields, status, message in (
        (
            {"model": "fake:three"},
            404,
            "no model 'fake:three', only 'fake', 'fake:one', 'fake:two'",
        ),
        ({"lora": "three"}, 404, "no adapter 'three', only 'one', 'two'"),
        ({"model": "fake:one", "lora": "two"}, 400, "model selects the adapter one, and lora two"),
        ({"lora": 3}, 400, "lora must be"),
    ):
        answer = client.post(path, json=PATHS[path] | fields)
        assert answer.status_code == status and message in answer.text, answer.text
    assert len(engine.asked) == 6


def test_models_lists_the_adapters(engine):
    client = client_of(engine)
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        ("fake", None),
        ("fake:one", "fake"),
        ("fake:two", "fake"),
    ]
    assert client.get("/v1/models/fake:two").json() == models[2]
    assert "no model 'fake:x'" in refusal(client.get("/v1/models/fake:x"), 404, "model")
    assert client.get("/api/dantinox/about").json()["loras"] == ["one", "two"]


def test_routes_that_change_adapters(engine, tmp_path):
    refused = client_of(engine)
    for path in (LOAD, UNLOAD):
        assert "start it with --lora_dir" in refusal(
            refused.post(path, json={"lora_name": "one", "lora_path": "x"}), 403
        )
    (tmp_path / "new").mkdir()
    client = client_of(engine, lora_dir=tmp_path)
    answer = client.post(LOAD, json={"lora_name": "new", "lora_path": "new"})
    assert (answer.status_code, answer.json()["id"]) == (200, "fake:new")
    assert engine.loras["new"] == (tmp_path / "new").resolve()
    assert "already loaded" in refusal(
        client.post(LOAD, json={"lora_name": "new", "lora_path": "new"}), 400
    )
    assert "below" in refusal(
        client.post(LOAD, json={"lora_name": "b", "lora_path": "../x"}), 400, "lora_path"
    )
    assert "is missing" in refusal(client.post(LOAD, json={"lora_name": "b"}), 400, "lora_path")
    inplace = {"lora_name": "b", "lora_path": "new", "load_inplace": True}
    assert "not supported" in refusal(client.post(LOAD, json=inplace), 400, "load_inplace")
    assert client.post(UNLOAD, json={"lora_name": "new"}).json()["deleted"] is True
    assert "no adapter 'new'" in refusal(
        client.post(UNLOAD, json={"lora_name": "new"}), 404, "lora_name"
    )
    locked = client_of(engine, lora_dir=tmp_path, key="secret-key")
    assert locked.post(LOAD, json={"lora_name": "b", "lora_path": "new"}).status_code == 401


# --- a real engine


def test_adapters_are_loaded_and_unloaded_in_a_running_server(run_dir, folder):
    run = dantinox.load(run_dir, loras={"one": folder / "one"})
    engine = AsyncEngine(run, EngineOptions(slots=3, context=64, max_loras=2, max_lora_rank=3))
    paths = {"one": folder / "one", "two": folder / "two", None: run_dir}
    expected = {name: run.tokenizer.decode(tokens_of(path)) for name, path in paths.items()}

    async def text(lora):
        config = engine.settings(GREEDY)
        stream = engine.submit(GenerationRequest(tuple(run.prompt_ids("hello")), config, lora=lora))
        return "".join([delta.text async for delta in stream])

    async def use():
        with pytest.raises(Unavailable, match="the server is loading"):
            await engine.load_lora("two", folder / "two")
        await asyncio.to_thread(start, engine)
        assert await asyncio.gather(text(None), text("one")) == [expected[None], expected["one"]]
        assert engine.loras == ("one",)
        answers = await asyncio.gather(
            text(None), text("one"), engine.load_lora("two", folder / "two"),
            engine.load_lora("two", folder / "two"),
            return_exceptions=True,
        )  # fmt: skip
        assert answers[:3] == [expected[None], expected["one"], None]
        assert "the adapter two is already loaded" in str(answers[3])
        assert await asyncio.gather(text("two"), text("one"), text(None)) == [
            expected[n] for n in ("two", "one", None)
        ]
        for name, path, message in (
            ("three", folder / "one", "2 adapters are loaded, the most"),
            ("a:b", folder / "one", "the name of an adapter"),
            ("three", Path("/nowhere"), "no adapter at /nowhere"),
        ):
            with pytest.raises(UserError, match=message):
                await engine.load_lora(name, path)
        engine.unload_lora("one")
        with pytest.raises(UserError, match="no adapter has the name 'one': loaded are two"):
            await text("one")
        await engine.load_lora("uno", folder / "peft")
        assert await asyncio.gather(text("uno"), text("two")) == [expected["one"], expected["two"]]
        assert "compilations" not in engine.status().counters

    try:
        asyncio.run(use())
    finally:
        engine.close()
    with pytest.raises(Unavailable):
        asyncio.run(engine.load_lora("x", folder / "one"))


def test_a_load_ends_with_the_engine(run_dir, folder):
    engine = AsyncEngine(dantinox.load(run_dir), EngineOptions(slots=1, context=64, max_loras=1))
    engine._state = "ready"  # its thread never starts

    async def use():
        with pytest.raises(Unavailable):
            await asyncio.wait_for(engine.load_lora("one", folder / "one"), 30)

    asyncio.run(use())
    assert engine.loras == ()

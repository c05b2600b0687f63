"""Tests `/v1/embeddings` and `/v1/rerank`: bodies, errors, and the engine's queue of texts with a
real model.
"""

import asyncio
import base64
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

from dantinox.cli import command_parser
from dantinox.config import UserError
from dantinox.config.engine_options import BACKGROUND, EngineOptions
from dantinox.generation.api.embedder import POOLINGS, Embedder
from dantinox.generation.engine_jobs import RequestFailed
from dantinox.serve.app import make_app
from dantinox.serve.async_engine import AsyncEngine
from dantinox.serve.embedding_queue import EmbeddingQueue
from dantinox.serve.errors import Busy, Unavailable
from dantinox.serve.options import Options
from tests.error_texts import ERRORS

from .engines import CONTEXT, generate, make_request, small_model, start_engine, text_of
from .fakes import BYTES, FakeEngine

PATH, RANK = "/v1/embeddings", "/v1/rerank"


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    app = make_app(engine, Options(pooling="last"))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def vector(text, dimensions=8):
    """The vector of the fake engine, computed again."""
    counts = np.array(
        [1 + sum(byte % 8 == d for byte in text.encode()) for d in range(8)], np.float64
    )[:dimensions]
    return counts / np.sqrt((counts**2).sum())


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
def test_every_form_of_input(client, engine, given, texts):
    answer = client.post(PATH, json={"input": given, "model": "fake"}).json()
    assert answer.keys() == {"object", "data", "model", "usage"} and (
        answer["object"],
        answer["model"],
    ) == ("list", "fake")
    assert [(row["object"], row["index"]) for row in answer["data"]] == [
        ("embedding", i) for i in range(len(texts))
    ]
    np.testing.assert_allclose(
        [row["embedding"] for row in answer["data"]], [*map(vector, texts)], atol=1e-6
    )
    tokens = len("".join(texts))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert engine.embedded[0][1] == "last"


def test_base64_and_dimensions(client):
    body = {"input": ["hello", "x"], "encoding_format": "base64", "dimensions": 3}
    rows = [row["embedding"] for row in client.post(PATH, json=body).json()["data"]]
    found = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    np.testing.assert_allclose(found, [vector("hello", 3), vector("x", 3)], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": []}, "input", "none of them empty"),
        ({"input": ["a", []]}, "input", "none of them empty"),
        ({"input": [1, "a"]}, "input", "none of them empty"),
        ({"input": [True]}, "input", "none of them empty"),
        ({"input": ["a"] * 2049}, "input", "at most 2,048 texts"),
        ({"input": ""}, None, None),
        ({"input": [259]}, "input", "token ids in [0, 259), got 259"),
        (
            {"input": "a" * 257},
            "input",
            "maximum context length is 256 tokens, and the prompt has 257",
        ),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions must be in [1, 8], got 9"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "model": "gpt-4"}, "model", "only 'fake'"),
    ],
)
def test_errors_of_embeddings(client, body, param, message):
    answer = client.post(PATH, json=body)
    if message is None:  # the byte tokenizer has a BOS token, which stands for an empty text
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (
        answer.status_code in (400, 404) and error["param"] == param and message in error["message"]
    ), error


def test_a_text_may_fill_the_context(client):
    assert client.post(PATH, json={"input": "a" * 256}).status_code == 200


@pytest.mark.parametrize("path", [RANK, "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_cosine_similarity(client, path):
    documents = ["zzzz", "abc", {"text": "abcd"}, "hello"]
    texts = ["zzzz", "abc", "abcd", "hello"]
    scores = [vector("abc") @ vector(text) for text in texts]
    order = sorted(range(4), key=lambda i: -scores[i])
    body = {"query": "abc", "documents": documents}
    answer = client.post(path, json=body).json()
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] == len(
        "abc" + "".join(texts)
    )
    assert [row["index"] for row in answer["results"]] == order and order[0] == 1
    assert [row["relevance_score"] for row in answer["results"]] == pytest.approx(
        [scores[i] for i in order], abs=1e-6
    )
    assert all("document" not in row for row in answer["results"])
    answer = client.post(path, json=body | {"top_n": 2, "return_documents": True}).json()
    assert [row["document"]["text"] for row in answer["results"]] == [texts[i] for i in order[:2]]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"query": None}, "query", "query is missing"),
        ({"documents": []}, "documents", "at least 1 item"),
        ({"documents": [3]}, "documents.0", "valid string"),
        ({"documents": [{"title": "a"}]}, "documents.0", "valid string"),
        ({"top_n": 0}, "top_n", "greater than or equal to 1"),
        ({"documents": ["a" * 300]}, "documents", "maximum context length"),
    ],
)
def test_errors_of_rerank(client, change, param, message):
    answer = client.post(RANK, json={"query": "a", "documents": ["b"]} | change)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], (
        error
    )


def test_a_full_queue_and_a_state(client, engine):
    engine.full = True
    answer = client.post(PATH, json={"input": "a"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "2"
    engine.state = "draining"
    assert client.post(PATH, json={"input": "a"}).status_code == 503


# --- the queue of the engine

TEXTS = ["a", "once upon a time", "z" * CONTEXT, "there was a fox; " * 5]


@pytest.fixture(scope="module")
def run():
    return small_model()


@pytest.fixture(scope="module")
def real():
    engine = start_engine(2)
    yield engine
    engine.close()


def test_the_engine_embeds_while_it_decodes(real, run):
    """Embeddings equal those of the Python API, and the texts of other requests stay the same."""
    ids = [run.prompt_ids(text) for text in TEXTS]
    settings = {"temperature": 1.1, "seed": 5, "max_new_tokens": 60}

    async def both():
        alone = await generate(real, "hello", **settings)
        before = real.status().counters
        stream = real.submit(make_request(real, "hello", **settings))
        calls = [asyncio.ensure_future(real.embed(ids, pooling)) for pooling in ("mean", "last")]
        text = await text_of(stream)
        found = await asyncio.gather(*calls)
        assert text == alone
        after = real.status().counters
        assert after["embedded_texts"] - before["embedded_texts"] == 2 * len(TEXTS)
        assert after["embedded_tokens"] - before["embedded_tokens"] == 2 * sum(map(len, ids))
        return found

    for pooling, found in zip(("mean", "last"), asyncio.run(both()), strict=True):
        np.testing.assert_allclose(found, run.embed(TEXTS, pooling=pooling), rtol=0, atol=2e-6)


def test_one_chunk_is_computed_between_two_steps(real, run):
    """A long text does not delay other requests by more than a chunk: the engine steps between any
    two chunks.
    """
    order, step, chunk = [], real._engine.step, Embedder.step

    def record_step():
        order.append("step")
        return step()

    def record_chunk(embedder):
        order.append("chunk")
        return chunk(embedder)

    async def embed():
        real._engine.step, Embedder.step = record_step, record_chunk
        try:
            await real.embed([run.prompt_ids("z" * CONTEXT)], "mean")
        finally:
            real._engine.step, Embedder.step = step, chunk

    asyncio.run(embed())
    assert order.count("chunk") == CONTEXT // 64
    assert "chunk chunk" not in " ".join(order)


def test_requests_take_turns(real, run):
    """A short request does not wait for the many texts of an earlier one."""

    async def both():
        long = asyncio.ensure_future(real.embed([run.prompt_ids("z" * CONTEXT)] * 100, "mean"))
        await asyncio.sleep(0.02)
        found = await real.embed([[97], [98]], "mean")
        assert not long.done() and found.shape == (2, 32)
        assert (await long).shape == (100, 32)

    asyncio.run(both())


def test_a_cancelled_call_computes_no_more(real, run):
    async def cancel():
        before = real.status().counters["embedded_texts"]
        call = asyncio.ensure_future(real.embed([run.prompt_ids("z" * CONTEXT)] * 50, "mean"))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.sleep(0.05)
        assert (await real.embed([[97]], "last")).shape == (1, 32)
        assert real.status().counters["embedded_texts"] - before < 50
        assert len(real._embeddings) == 0

    asyncio.run(cancel())


def test_invalid_sequences_and_a_full_queue(real, run):
    async def check():
        for ids, pooling, key in (
            ([[]], "mean", "embed_length_of_a_server"),
            ([[0] * (CONTEXT + 1)], "mean", "embed_length_of_a_server"),
            ([[BYTES.vocab_size]], "mean", "tokens_of_the_prompt"),
            ([[1]], "max", "embed_pooling"),
        ):
            with pytest.raises(UserError, match=ERRORS[key]):
                await real.embed(ids, pooling)
        calls = [asyncio.ensure_future(real.embed([[97] * CONTEXT] * 20, "mean")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await real.embed([[97]], "mean")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert len(real._embeddings) == 0

    asyncio.run(check())


def test_a_failed_chunk_ends_only_its_request(real, run):
    chunk = Embedder.step

    def fail(embedder):
        raise RuntimeError("injected")

    async def check():
        expected = await real.embed([[97, 98]], "mean")
        Embedder.step = fail
        try:
            with pytest.raises(RequestFailed, match="RuntimeError: injected"):
                await real.embed([[97]], "mean")
        finally:
            Embedder.step = chunk
        np.testing.assert_array_equal(await real.embed([[97, 98]], "mean"), expected)

    asyncio.run(check())


def test_closing_ends_waiting_calls():
    engine = start_engine(2)

    async def check():
        call = asyncio.ensure_future(engine.embed([[97] * CONTEXT] * 200, "mean"))
        await asyncio.sleep(0.01)
        await engine.drain(0)
        with pytest.raises(Unavailable):
            await call
        with pytest.raises(Unavailable):
            await engine.embed([[97]], "mean")

    asyncio.run(check())


def test_a_call_that_arrives_as_the_compilation_fails_ends():
    """Its thread may have read before that the programs have not failed."""

    def broken():
        raise ValueError("no memory")

    queue = EmbeddingQueue(broken)
    waiting = queue.add([[1]], "mean")
    queue.compile()
    with pytest.raises(RequestFailed, match="no memory"):
        waiting.result(5)
    with pytest.raises(RequestFailed, match="could not be compiled"):
        queue.add([[1]], "mean")
    assert len(queue) == 0


def test_the_flags_have_the_names_of_the_engine():
    actions = {action.dest: action for action in command_parser("serve")._actions}
    assert (actions["warm_up"].choices, actions["pooling"].choices) == (BACKGROUND, POOLINGS)


@pytest.mark.slow
def test_programs_are_compiled_in_the_background(run):
    """The first request for prompt log-probabilities, the router or embeddings then compiles
    nothing.
    """
    engine = AsyncEngine(run, EngineOptions(slots=2, queue=2, background=BACKGROUND))
    engine.start()
    while engine.status().state == "loading":
        time.sleep(0.01)
    router = engine._batch.program_key(engine.settings({"strategy": "entropy"}))
    while not (engine._embeddings.ready and engine._batch.ready(router)):
        assert engine.status().state == "ready"
        time.sleep(0.01)
    counted = engine.status().counters["compilations"]
    assert counted == len(BACKGROUND)

    async def use():
        stream = engine.submit(make_request(engine, "hello", logprobs=1, echo=True))
        await text_of(stream)
        assert len(stream.prompt) == 5
        await generate(engine, "hello", strategy="entropy", seed=1)
        await engine.embed([[97]], "mean")

    asyncio.run(use())
    assert engine.status().counters["compilations"] == counted
    engine.close()

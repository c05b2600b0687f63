"""Tests `/health`, `/metrics` and the errors of unknown paths."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dantinox.generation.prefix.prefix_cache import PrefixStatus
from dantinox.generation.request import RequestStats
from dantinox.serve.app import make_app
from dantinox.serve.operations.metrics import Metrics

from .fakes import FakeEngine


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    with TestClient(
        make_app(engine), base_url="http://localhost", raise_server_exceptions=False
    ) as found:
        yield found


def test_health_follows_the_engine(client, engine):
    assert client.get("/health").json()["status"] == "ready"
    for state in ("loading", "draining", "failed"):
        engine.state = state
        response = client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, state)
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and state in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]


def samples(client):
    """Returns the values of `/metrics` by name and labels."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {
        (one.name, *sorted(one.labels.items())): one.value
        for family in families
        for one in family.samples
    }


def test_metrics(client, engine):
    engine.counters.update(new_tokens=7, compilations=2, reused_tokens=3)
    for _ in range(2):
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "n": 2})
    client.post("/v1/completions", json={"prompt": "a", "n": 99})
    client.get("/no/such/path")
    found = samples(client)
    path = ("path", "/v1/completions")
    assert found["dantinox_responses_total", path, ("status", "200")] == 2
    assert found["dantinox_responses_total", path, ("status", "400")] == 1
    assert found["dantinox_responses_total", ("path", "other"), ("status", "404")] == 1
    assert found["dantinox_new_tokens_total",] == 7
    assert (
        found["dantinox_compilations_total",] == 2 and found["dantinox_reused_tokens_total",] == 3
    )
    assert (
        found["dantinox_slots",] == 8
        and found["dantinox_busy",] == 0
        and found["dantinox_ready",] == 1
    )
    assert (
        found["dantinox_first_token_seconds_count",] == 2
        and found["dantinox_token_seconds_count",] == 2
    )
    assert 0 < found["dantinox_first_token_seconds_sum",] < 5
    engine.state = "draining"
    assert samples(client)["dantinox_ready",] == 0


def test_metrics_of_the_prefix_cache_and_saving_it(client, engine):
    refused = client.post("/api/dantinox/save_prefix_cache")
    assert refused.status_code == 400 and "--cache_dir" in refused.text
    engine.prefixes = PrefixStatus(used=5, capacity=9, evictions=2, size=16)
    assert client.post("/api/dantinox/save_prefix_cache").json() == {"blocks": 5}
    found = samples(client)
    names = "prefix_blocks_used", "prefix_blocks_capacity", "prefix_block_evictions_total"
    assert [found[f"dantinox_{name}",] for name in names] == [5, 9, 2]


def test_the_time_between_tokens_is_per_sample(engine):
    """The samples of a prompt are decoded in parallel."""

    async def observe():
        metrics = Metrics(engine)
        stats = RequestStats(1, new_tokens=10, first_token_seconds=1.0, seconds=3.0)
        metrics.observe(stats, samples=2)
        return metrics

    text = asyncio.run(observe()).text().decode()
    assert (
        "dantinox_token_seconds_sum 0.5\n" in text
        and "dantinox_first_token_seconds_sum 1.0\n" in text
    )


def test_two_servers_in_one_process_have_separate_counters():
    one, other = FakeEngine(), FakeEngine()
    with (
        TestClient(make_app(one), base_url="http://localhost") as a,
        TestClient(make_app(other), base_url="http://localhost") as b,
    ):
        a.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert ("dantinox_first_token_seconds_count",) in samples(b)
        assert samples(a)["dantinox_first_token_seconds_count",] == 1
        assert samples(b)["dantinox_first_token_seconds_count",] == 0


def test_errors_of_all_paths_are_json(client):
    for path in (
        "/",
        "/v1",
        "/x",
        "/metrics/",
        "/tokenize/x",
        "/%00",
        "/..%2f..%2fetc/passwd",
        "/page/",
        "/page/x",
    ):
        answer = client.delete(path) if path == "/" else client.get(path)
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]
    assert client.post("/health").status_code == 405

"""What every server tells of itself."""

import pytest
from starlette.testclient import TestClient

from dantinox.serve.app import make_app

from .fakes import FakeEngine


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(engine):
    with TestClient(make_app(engine), base_url="http://localhost", raise_server_exceptions=False) as found:
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

"""Tests API keys: their file, the headers that carry them, token buckets, limits, metrics and
reloads, with a fake clock.
"""

import asyncio
import hashlib
import json
from fractions import Fraction

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dantinox.config import UserError
from dantinox.serve.app import make_app
from dantinox.serve.operations.api_keys import ApiKeys, read_keys, single_key
from dantinox.serve.operations.rate_limits import (
    NANOSECONDS,
    ApiKey,
    KeyUsage,
    RateLimited,
    TokenBucket,
    format_duration,
)
from dantinox.serve.operations.reload import Reloader
from dantinox.serve.operations.request_record import RequestRecord
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import FakeEngine

ALICE, BOB = "alice-secret", "bob-secret-1"
RESPONSES = "/v1/responses"
ASK = {"prompt": "abc", "max_tokens": 5}
FILE = f"""
# The keys of two clients.
keys:
  - name: alice
    key: {ALICE}
    requests_per_minute: 3   # one every 20 seconds
    admin: true
  - name: bob
    sha256: {hashlib.sha256(BOB.encode()).hexdigest()}
    tokens_per_minute: 60
    concurrent_requests: 1
"""


class Clock:
    """A clock that a test sets, in seconds."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return round(self.seconds * NANOSECONDS)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return file


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def client(path, clock, engine):
    keys = ApiKeys(read_keys(path), path, clock)
    app = make_app(engine, Options(keys=keys, reloader=Reloader(keys)))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def ask(client, secret, **body):
    return client.post("/v1/completions", json=ASK | body, headers=bearer(secret))


# --- the file


def test_the_file_in_yaml_and_json(path, tmp_path):
    found = read_keys(path)
    assert found[0] == ApiKey(
        "alice", hashlib.sha256(ALICE.encode()).digest(), requests_per_minute=3, admin=True
    )
    assert found[1] == ApiKey(
        "bob", hashlib.sha256(BOB.encode()).digest(), tokens_per_minute=60, concurrent_requests=1
    )
    same = {"keys": [{"name": "alice", "key": ALICE, "requests_per_minute": 3, "admin": True}]}
    (tmp_path / "keys.json").write_text(json.dumps(same))
    assert read_keys(tmp_path / "keys.json") == found[:1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("[]", "must hold sections"),
        ("keys: []", "1 to 1000 entries"),
        ("keys: [{name: a, key: 12-34-56-78}]\nmore: 1", "one list, keys"),
        ("keys: [3]", "keys[0] of"),
        ("keys: [{key: 12-34-56-78}]", "name of keys[0]"),
        ("keys: [{name: a b, key: 12-34-56-78}]", "name of keys[0]"),
        ("keys: [{name: a}]", "either key or sha256"),
        ("keys: [{name: a, key: 12-34-56-78, sha256: '12'}]", "either key or sha256"),
        ("keys: [{name: a, key: 12345678}]", "must be a string of 8 to 1024"),
        ("keys: [{name: a, key: short}]", "8 to 1024"),
        ("keys: [{name: a, sha256: abc}]", "64 hexadecimal digits"),
        ("keys: [{name: a, key: 12-34-56-78, limit: 3}]", "unknown field limit"),
        (
            "keys: [{name: a, key: 12-34-56-78, requests_per_minute: 0}]",
            "requests_per_minute of keys[0]",
        ),
        (
            "keys: [{name: a, key: 12-34-56-78, tokens_per_minute: true}]",
            "tokens_per_minute of keys[0]",
        ),
        (
            "keys: [{name: a, key: 12-34-56-78, concurrent_requests: 1.5}]",
            "concurrent_requests of keys[0]",
        ),
        ("keys: [{name: a, key: 12-34-56-78, admin: 1}]", "true or false"),
        ("keys: [{name: a, key: 12-34-56-78, models: base}]", "a list of names"),
        ("keys: [{name: a, key: 12-34-56-78, models: []}]", "a list of names"),
        ("keys: [{name: a, key: 12-34-56-78}, {name: a, key: 12-34-56-79}]", "keys[1]"),
        (
            "keys: [{name: a, key: 12-34-56-78}, {name: b, key: 12-34-56-78}]",
            "the same key as keys[0]",
        ),
        ("keys: [{name: a, key: !!python/name:os.system x}]", "tag"),
        ("keys: [", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence_without_a_key(tmp_path, text, words):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError) as caught:
        read_keys(tmp_path / "keys")
    message = str(caught.value)
    assert words in message and str(tmp_path / "keys") in message and "\n" not in message
    assert "12-34" not in message


# --- the headers


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (bearer(ALICE), 200),
        (bearer(BOB), 200),
        ({"x-api-key": BOB}, 200),
        ({"x-api-key": BOB, "authorization": "Bearer none"}, 200),
        ({"x-api-key": "other-secret"}, 401),
        ({"x-api-key": ""}, 401),
        (bearer(ALICE + "x"), 401),
        ({"authorization": f"Basic {ALICE}"}, 401),
        ({}, 401),
    ],
)
def test_a_key_in_either_header(client, headers, expected):
    answer = client.get("/v1/models", headers=headers)
    assert answer.status_code == expected
    if expected == 401:
        assert (
            "x-api-key" in answer.json()["error"]["message"]
            and answer.json()["error"]["code"] == "invalid_api_key"
        )


def test_every_key_is_compared(monkeypatch):
    """The time of a search does not depend on the position of the key."""
    keys, compared = (
        ApiKeys(
            [ApiKey(str(n), bytes([n]) * 32) for n in range(5)] + [single_key("secret-of-one")]
        ),
        [],
    )
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    assert keys.find([b"secret-of-one"]).name == "default" and len(compared) == 6
    assert keys.find([b"another"]) is None and len(compared) == 12


# --- token buckets


def test_a_bucket_is_exact():
    """The bucket equals a calculation with fractions over a thousand steps."""
    bucket, level, now = TokenBucket(7, 0), Fraction(7), 0
    for step in range(1000):
        later = now + (step * 7919) % 9_000_000_007
        level, now = min(Fraction(7), level + Fraction(later - now, 60 * NANOSECONDS) * 7), later
        wanted = step % 4
        wait = bucket.take(wanted, now)
        missing = max(Fraction(0), (wanted - level) * 60 * NANOSECONDS / 7)
        assert wait == -(-missing.numerator // missing.denominator)
        level -= 0 if wait else wanted
        assert bucket.remaining(now) == int(level)


def test_the_wait_of_a_bucket_is_the_shortest():
    bucket = TokenBucket(7, 0)
    assert bucket.take(7, 0) == 0
    wait = bucket.take(3, 0)
    assert bucket.take(3, wait - 1) == 1 and bucket.take(3, wait) == 0


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(0, "0ms"), (1, "1ms"), (20_000_000, "20ms"), (8_640_000_000, "8.64s"), (60 * 10**9, "1m0s")],
)
def test_durations(nanoseconds, text):
    assert format_duration(nanoseconds) == text


# --- limits


def test_requests_per_minute(client, clock):
    for left in (2, 1, 0):
        answer = ask(client, ALICE)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    assert (
        answer.headers["x-ratelimit-reset-requests"] == "1m0s"
        and "x-ratelimit-limit-tokens" not in answer.headers
    )
    refused = ask(client, ALICE)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("20", "20000")
    assert "alice" in refused.json()["error"]["message"] and ALICE not in refused.text
    assert (
        client.get("/v1/models", headers=bearer(ALICE)).status_code == 200
    )  # GET requests do not count
    assert ask(client, BOB).status_code == 200  # another key
    clock.seconds += 19.5
    assert ask(client, ALICE).headers["retry-after"] == "1"
    clock.seconds += 0.5
    assert ask(client, ALICE).status_code == 200 and ask(client, ALICE).status_code == 429


def test_a_refused_request_of_kobold_has_its_format(client):
    body = {"prompt": "a", "max_length": 1}
    statuses = [
        client.post("/api/v1/generate", json=body, headers=bearer(ALICE)).status_code
        for _ in range(4)
    ]
    assert statuses == [200, 200, 200, 503]
    for path in ("/api/extra/generate/check", "/api/extra/abort"):  # clients poll them
        assert client.post(path, json={}, headers=bearer(ALICE)).status_code == 200


def test_tokens_per_minute(client, clock):
    """A request reserves its prompt and max_tokens; at its end, the tokens that it has used
    count.
    """
    answer = ask(client, BOB)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(60 - 3 - 5)
    assert ask(client, BOB, max_tokens=30, stop="u").headers["x-ratelimit-remaining-tokens"] == str(
        52 - 3 - 6
    )  # "once u"
    refused = ask(client, BOB, max_tokens=41)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "43"
    clock.seconds += 1
    assert ask(client, BOB, max_tokens=41).status_code == 200
    assert ask(client, BOB).headers["retry-after"] == "8"
    too_many = ask(client, BOB, max_tokens=58)
    assert too_many.status_code == 400 and too_many.json()["error"]["code"] == "too_many_tokens"


def test_a_failed_request_uses_no_tokens(client, engine):
    engine.full = True
    assert ask(client, BOB, max_tokens=50).status_code == 429
    engine.full = False
    assert ask(client, BOB, max_tokens=57).status_code == 200


def test_embeddings_use_the_tokens_of_a_key(client):
    answer = client.post(
        "/v1/embeddings", json={"input": ["a" * 20, "b" * 10]}, headers=bearer(BOB)
    )
    assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "30"
    for path, body in (
        ("/v1/embeddings", {"input": "a" * 40}),
        ("/v1/rerank", {"query": "a", "documents": ["a" * 39]}),
    ):
        answer = client.post(path, json=body, headers=bearer(BOB))
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 10
    answer = client.post(
        "/v1/rerank", json={"query": "a" * 5, "documents": ["a" * 5, "b" * 5]}, headers=bearer(BOB)
    )
    assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-tokens"] == "15"


def test_tokens_without_a_generation_count(clock):
    """Such as those of embeddings."""
    key = ApiKey("one", b"", tokens_per_minute=100)
    usage = ApiKeys([key], clock=clock).usage["one"]
    record = RequestRecord("id", key=key, usage=usage)
    with record.tokens(70):
        record.processed_tokens += 60
        assert usage.headers()["x-ratelimit-remaining-tokens"] == "30"
    assert (
        usage.headers()["x-ratelimit-remaining-tokens"] == "40"
        and usage.counts["prompt_tokens"] == 60
    )
    with pytest.raises(RateLimited), record.tokens(41):
        pass
    with pytest.raises(KeyError), record.tokens(40):
        raise KeyError
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "40"


def test_concurrent_requests():
    engine, key = (
        FakeEngine(pause=0.02),
        ApiKey("one", hashlib.sha256(b"secret-one").digest(), concurrent_requests=2),
    )
    keys = ApiKeys([key])
    app = make_app(engine, Options(keys=keys))

    async def ask_together():
        import httpx

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers={"x-api-key": "secret-one"}
        ) as http:
            body = ASK | {"stream": True}
            found = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            statuses = [(await one).status_code for one in found]
            return statuses, (await http.post("/v1/completions", json=ASK)).status_code

    statuses, later = asyncio.run(ask_together())
    assert sorted(statuses) == [200, 200, 429] and later == 200
    assert keys.usage["one"].running == 0 and keys.usage["one"].counts["refused_concurrent"] == 1


# --- models


@pytest.mark.parametrize(
    ("models", "expected"),
    [(None, 200), (["fake"], 200), (["gpt-4o"], 200), (["other", "fake"], 200), (["other"], 404)],
)
def test_models_of_a_key(engine, tmp_path, models, expected):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "alice", "key": ALICE, "models": models}]}))
    app = make_app(engine, Options(keys=ApiKeys(read_keys(path)), aliases={"gpt-4o": "fake"}))
    with TestClient(app, base_url="http://localhost", headers=bearer(ALICE)) as http:
        for body in (
            ASK,
            ASK | {"model": "fake"},
            ASK | {"model": "gpt-4o"},
            ASK | {"stream": True},
        ):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == expected
        assert (
            http.post("/api/v1/generate", json={"prompt": "a", "max_length": 2}).status_code
            == expected
        )
        assert http.post("/api/dantinox/generate", json={"prompt": "a"}).status_code == expected
        names = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert names == ([] if expected == 404 else ["fake", "gpt-4o"])
        assert http.get("/v1/models/fake").status_code == expected
    if expected == 404:
        assert answer.json()["error"]["message"] == "the key alice may not use the model 'fake'"


# --- responses that are kept


def test_a_kept_response_belongs_to_its_key(path, engine):
    """For another key it does not exist, with the same error as an id that never existed."""
    template = ChatTemplate("{{ messages[-1]['content'] }}", engine.run.tokenizer)
    options = Options(keys=ApiKeys(read_keys(path)), stored_responses=2, template=template)
    with TestClient(make_app(engine, options), base_url="http://localhost") as http:
        alice, bob = bearer(ALICE), bearer(BOB)
        body = {"input": "abc", "max_output_tokens": 5}
        kept = http.post(RESPONSES, json=body, headers=alice).json()
        one = f"{RESPONSES}/{kept['id']}"
        unknown = http.get(f"{RESPONSES}/resp_0", headers=bob)
        for method in ("GET", "DELETE"):
            other = http.request(method, one, headers=bob)
            assert other.status_code == unknown.status_code == 404
            assert other.text == unknown.text.replace("resp_0", kept["id"])
        body |= {"previous_response_id": kept["id"]}
        assert http.post(RESPONSES, json=body, headers=bob).status_code == 404
        assert http.get(one, headers=alice).json() == kept
        assert http.post(RESPONSES, json=body, headers=alice).status_code == 200
        assert http.delete(one, headers=alice).json()["deleted"] is True


# --- metrics


def samples(client, secret=ALICE):
    families = text_string_to_metric_families(client.get("/metrics", headers=bearer(secret)).text)
    return {
        (one.name, *one.labels.values()): one.value for family in families for one in family.samples
    }


def test_metrics_of_each_key(client, path):
    for _ in range(4):
        ask(client, ALICE)
    ask(client, BOB)
    found = samples(client)
    assert (
        found["dantinox_key_requests_total", "alice"] == 3
        and found["dantinox_key_requests_total", "bob"] == 1
    )
    assert found["dantinox_key_refused_total", "alice", "requests"] == 1
    assert found["dantinox_key_tokens_total", "alice", "prompt"] == 9
    assert found["dantinox_key_tokens_total", "bob", "new"] == 5
    assert found["dantinox_key_running", "bob"] == 0
    path.write_text(FILE.replace("name: bob", "name: robert"))
    assert client.post("/admin/reload", headers=bearer(ALICE)).status_code == 200
    assert ("dantinox_key_requests_total", "bob") not in samples(
        client
    )  # the number of labels stays bounded


# --- reloads


def test_a_reload_replaces_keys_and_keeps_usage(client, path):
    for _ in range(3):
        ask(client, ALICE)
    assert client.post("/admin/reload", headers=bearer(BOB)).status_code == 403
    path.write_text(
        FILE.replace("requests_per_minute: 3", "requests_per_minute: 4").replace(
            ALICE, "alice-new-secret"
        )
    )
    answer = client.post("/admin/reload", headers=bearer(ALICE))
    assert answer.json() == {"keys": 2, "new_weights": False}
    assert ask(client, ALICE).status_code == 401
    last = ask(client, "alice-new-secret")
    assert last.status_code == 200 and last.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_wrong_file_keeps_the_old_keys(client, path, caplog):
    path.write_text("keys: 3")
    answer = client.post("/admin/reload", headers=bearer(ALICE))
    assert answer.status_code == 409 and "continues as before" in answer.json()["error"]["message"]
    assert len([line for line in caplog.messages if "continues as before" in line]) == 1
    assert ask(client, BOB).status_code == 200
    found = samples(client)
    assert (
        found["dantinox_reloads_total", "failure"] == 1
        and found["dantinox_reloads_total", "success"] == 0
    )


def test_a_lost_connection_does_not_stop_a_reload(path):
    """Two reloads run one after the other, and the first one continues although its caller is
    cancelled.
    """
    keys, order = ApiKeys(read_keys(path), path), []

    async def reload_weights():
        order.append("begin")
        await asyncio.sleep(0.05)
        order.append("end")
        return True

    async def check():
        reloader = Reloader(keys, reload_weights)
        first, second = (asyncio.create_task(reloader.run()) for _ in range(2))
        await asyncio.sleep(0.02)
        first.cancel()
        assert await second == {"keys": 2, "new_weights": True}
        assert order == ["begin", "end"] * 2 and reloader.counts == {"success": 2}

    asyncio.run(check())


def test_an_unexpected_error_of_a_reload_is_logged(path, caplog):
    async def reload_weights():
        raise ZeroDivisionError

    async def check():
        reloader = Reloader(ApiKeys(read_keys(path), path), reload_weights)
        await reloader.run_after_signal()
        assert reloader.counts == {"failure": 1}

    asyncio.run(check())
    assert "continues as before" in caplog.text and "ZeroDivisionError" in caplog.text


def test_only_a_file_has_admin_keys():
    for options, headers in ((Options(), {}), (Options(key=ALICE), bearer(ALICE))):
        with TestClient(make_app(FakeEngine(), options), base_url="http://localhost") as http:
            assert http.post("/admin/reload", headers=headers).status_code == 403


def test_a_limit_that_begins_during_a_request_counts_its_tokens():
    """The request has reserved nothing, so nothing of a reservation is given back."""
    usage = KeyUsage(ApiKey("a", b""), lambda: 0)
    record = RequestRecord("1", usage=usage)
    with record.tokens(50):
        usage.change_limits(ApiKey("a", b"", tokens_per_minute=100))
        record.processed_tokens += 30
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "70"

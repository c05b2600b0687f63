"""Tests OpenTelemetry traces with the in-memory exporter of its SDK: spans, times, attributes,
parents and sampling.
"""

import sys

import pytest
from starlette.testclient import TestClient

from dantinox import cli
from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from dantinox.text import ChatTemplate

from .fakes import BYTES, FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = {"prompt": "abc", "max_tokens": 5, "temperature": 0.5, "seed": 7}


def test_otel_without_its_packages_is_one_sentence(monkeypatch, capfd, run_dir):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert cli.main(["serve", "--run_dir", str(run_dir), "--otel"]) == 2
    assert (
        capfd.readouterr().err
        == "error: --otel needs packages that are not installed: in a checkout of DantinoX, pip"
        " install -e '.[otel]'\n"
    )


@pytest.fixture
def exporter():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    return memory.InMemorySpanExporter()


@pytest.fixture
def traced(exporter):
    """Returns a function that returns a client of an application whose spans go to `exporter`."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from dantinox.serve.operations.spans import trace_exporter

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def client(engine, **options):
        template = ChatTemplate.from_name("plain", BYTES)
        app = make_app(engine, Options(template, export_trace=trace_exporter(provider), **options))
        return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    return client


class TimedEngine(FakeEngine):
    """Reports the times of a real engine: half a second in the queue, a second to the first token,
    two seconds in all.
    """

    def submit(self, ask):
        stream = super().submit(ask)
        stream.stats.queued_seconds, stream.stats.first_token_seconds = 0.5, 1.0
        original = stream.end

        def end(error=None):
            stream.stats.seconds, stream.stats.reused_tokens = 2.0, 2
            original(error)

        stream.end = end
        return stream


def test_the_spans_of_a_completion(traced, exporter):
    with traced(TimedEngine(), key="secret-of-one") as http:
        headers = {
            "x-api-key": "secret-of-one",
            "x-request-id": "id-1",
            "traceparent": f"00-{TRACE}-{PARENT}-01",
        }
        http.post("/v1/completions", json=ASK, headers=headers)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {
        "POST /v1/completions",
        "text_completion fake",
        "queue",
        "prefill",
        "decode",
    }
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    request, prompt = spans["POST /v1/completions"], spans["text_completion fake"]
    assert f"{request.parent.span_id:016x}" == PARENT and request.kind.name == "SERVER"
    assert prompt.parent.span_id == request.context.span_id
    assert {spans[name].parent.span_id for name in ("queue", "prefill", "decode")} == {
        prompt.context.span_id
    }
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert seconds["queue"] == seconds["prefill"] == 0.5 and seconds["decode"] == 1.0
    assert seconds["text_completion fake"] == 2.0
    assert spans["queue"].start_time == prompt.start_time >= request.start_time
    assert (
        spans["queue"].end_time == spans["prefill"].start_time
        and spans["prefill"].end_time == spans["decode"].start_time
    )
    assert dict(request.attributes) == {
        "http.request.method": "POST", "url.path": "/v1/completions",
        "http.route": "/v1/completions", "http.response.status_code": 200,
        "dantinox.request.id": "id-1", "dantinox.key.name": "default",
    }  # fmt: skip
    assert dict(prompt.attributes) == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "dantinox",
        "gen_ai.request.model": "fake", "gen_ai.response.model": "fake",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2, "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 1, "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
    }  # fmt: skip


def test_each_prompt_has_its_spans(traced, exporter):
    with traced(FakeEngine()) as http:
        http.post("/v1/completions", json=ASK | {"prompt": ["abc", "de"]})
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("text_completion fake") == 2 and names.count("decode") == 2
    assert names.count("POST /v1/completions") == 1


def test_a_chat(traced, exporter):
    with traced(FakeEngine()) as http:
        http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "private"}], "max_tokens": 2},
        )
    spans = exporter.get_finished_spans()
    assert "chat fake" in [span.name for span in spans]
    assert not any("private" in str(span.attributes) for span in spans)


def test_errors(traced, exporter):
    engine = FakeEngine()
    engine.state = "draining"
    with traced(engine) as http:
        http.post("/v1/completions", json=ASK)
        http.get("/no/such/path")
        http.get("/health")
    unavailable, missing = exporter.get_finished_spans()
    assert (
        unavailable.status.status_code.name == "ERROR"
        and unavailable.attributes["error.type"] == "503"
    )
    assert missing.name == "GET" and missing.attributes["http.response.status_code"] == 404
    assert missing.status.status_code.name == "UNSET"  # an error of the client


def test_a_cancelled_prompt_has_the_phases_that_it_reached():
    pytest.importorskip("opentelemetry.sdk")
    from types import SimpleNamespace

    from dantinox.generation.request import RequestStats
    from dantinox.serve.operations.request_record import Generation
    from dantinox.serve.operations.spans import _times

    def times(**stats):
        found = _times(Generation(SimpleNamespace(), RequestStats(3, **stats), 10**9), 4 * 10**9)
        return [(time - 10**9) / 1e9 for time in found]

    assert times() == [0, 3]
    assert times(queued_seconds=1.0) == [0, 1, 3]
    assert times(queued_seconds=1.0, first_token_seconds=2.0, new_tokens=1) == [0, 1, 2, 3]
    assert times(queued_seconds=1.0, first_token_seconds=2.0, new_tokens=9, seconds=2.5) == [
        0,
        1,
        2,
        2.5,
    ]


def test_a_trace_that_the_client_does_not_sample_is_not_recorded(traced, exporter):
    with traced(FakeEngine()) as http:
        http.post("/v1/completions", json=ASK, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("given", ["", "x", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01"])
def test_an_invalid_parent_is_ignored(traced, exporter, given):
    with traced(FakeEngine()) as http:
        assert http.get("/v1/models", headers={"traceparent": given}).status_code == 200
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and f"{span.context.trace_id:032x}" != TRACE

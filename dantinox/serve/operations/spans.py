"""OpenTelemetry traces: the spans of each request, with the attributes of the semantic conventions
for generative AI.

A request is a span of kind server. Each of its prompts is a child span `chat MODEL` or
`text_completion MODEL`, with three children: `queue` until the prompt has a slot, `prefill` until
its first token, and `decode` until its end. The spans are created when the request is complete,
from the times of its record, so tracing costs nothing while tokens are generated.

Source of the names: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dantinox import __version__
from dantinox.files import require_extra
from dantinox.serve.operations.request_log import MAX_PATH, QUIET_PATHS
from dantinox.serve.operations.request_record import CLIENT_CLOSED, Generation, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_SECONDS = 3.0  # time at the end of the server to send the last spans
# Settings of the section `generation` → attributes.
SETTINGS = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}


def make_provider() -> "TracerProvider":
    """Returns a provider that sends spans to a collector with OTLP over HTTP.

    The environment variables of OpenTelemetry configure it: `OTEL_EXPORTER_OTLP_ENDPOINT`,
    `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` and others.

    Raises:
      UserError: OpenTelemetry is not installed.
    """
    with require_extra("otel", "--otel needs packages that are not installed"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    own = Resource({"service.name": "dantinox", "service.version": __version__})
    provider = TracerProvider(
        resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def close_provider(provider: "TracerProvider") -> None:
    """Sends the remaining spans, for at most `FLUSH_SECONDS`: a collector that does not answer must
    not delay the end.
    """
    thread = threading.Thread(target=provider.shutdown, daemon=True)
    thread.start()
    thread.join(FLUSH_SECONDS)


def trace_exporter(provider: "TracerProvider") -> Callable[[RequestRecord], str | None]:
    """Returns a function that creates the spans of a complete request and returns the id of their
    trace.

    The client's `traceparent` is the parent, and decides whether the trace is sampled. Probes
    (`/health`, `/metrics`) have no spans.
    """
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = provider.get_tracer("dantinox.serve")
    propagator = TraceContextTextMapPropagator()

    def export(record: RequestRecord) -> str | None:
        if record.path in QUIET_PATHS:
            return None
        end = record.started + round(record.seconds * 1e9)

        def span(
            name: str,
            start: int,
            end: int,
            parent: Any,
            attributes: Mapping[str, Any],
            kind: Any = None,
        ) -> Any:
            """Creates a span and returns its context, the parent of further spans."""
            made = tracer.start_span(
                name, parent, kind or trace.SpanKind.INTERNAL, attributes, start_time=start
            )
            if attributes.get("error.type"):
                made.set_status(trace.StatusCode.ERROR)
            made.end(end)
            return trace.set_span_in_context(made)

        context = propagator.extract(record.trace_headers)
        request = span(
            f"{record.method} {record.route or ''}".rstrip(),
            record.started,
            end,
            context,
            _http_attributes(record),
            trace.SpanKind.SERVER,
        )
        for generation in record.generations:
            times = _times(generation, end)
            name = f"{record.operation} {record.model}"
            parent = span(
                name, times[0], times[-1], request, generation_attributes(record, generation)
            )
            for phase, start, stop in zip(
                ("queue", "prefill", "decode"), times, times[1:], strict=False
            ):
                span(phase, start, stop, parent, {})
        trace_id: str = trace.format_trace_id(
            trace.get_current_span(request).get_span_context().trace_id
        )
        return trace_id

    return export


def _http_attributes(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path[:MAX_PATH],
        "http.response.status_code": record.status,
        "dantinox.request.id": record.id,
    }
    if record.route is not None:
        attributes["http.route"] = record.route
    if record.key is not None:
        attributes["dantinox.key.name"] = record.key.name
    if record.status >= 500 or record.status == CLIENT_CLOSED:
        attributes["error.type"] = str(record.status)
    return attributes


def generation_attributes(record: RequestRecord, generation: Generation) -> dict[str, Any]:
    """Returns the attributes of one prompt: model, settings, tokens and finish reasons; no prompt
    and no generated text.
    """
    section = generation.request.config.generation
    stats = generation.stats
    settings = {name: getattr(section, key) for key, name in SETTINGS.items()}
    if section.greedy:
        settings["gen_ai.request.temperature"] = 0.0
    return {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "dantinox",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.reused_tokens,
        "gen_ai.response.finish_reasons": [
            reason for _, reason in sorted(generation.finish_reasons.items())
        ],
        **{name: value for name, value in settings.items() if value is not None},
    }


def _times(generation: Generation, end: int) -> list[int]:
    """Returns when a prompt arrived, got its slot and had its first token, as far as it came, and
    then when it ended.

    All are nanoseconds since the epoch, in increasing order; `end` is the end of the whole request.
    """

    stats = generation.stats
    reached = [0.0]  # seconds since the arrival
    if stats.queued_seconds or stats.new_tokens:
        reached.append(stats.queued_seconds)
    if stats.new_tokens:
        reached.append(max(stats.queued_seconds, stats.first_token_seconds))
    stop = generation.submitted + round(stats.seconds * 1e9) if stats.seconds else end
    return [*(min(stop, generation.submitted + round(seconds * 1e9)) for seconds in reached), stop]

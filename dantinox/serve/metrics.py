"""Prometheus metrics: `/metrics`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dantinox.generation.request import RequestStats
from dantinox.serve.response_stream import EngineProtocol

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
COUNTED = {
    "requests": "prompts that were taken",
    "finished": "prompts that were answered to the end",
    "cancelled": "prompts whose reader left",
    "refused": "prompts that found the queue full",
    "prompt_tokens": "tokens of prompts",
    "reused_tokens": "tokens of prompts that were not read again: the prefix was there",
    "new_tokens": "tokens that were generated",
    "compilations": "programs compiled behind the warm-up",
}


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
      registry: what `/metrics` shows.
    """

    def __init__(self, engine: EngineProtocol):
        self._engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.responses = Counter(
            "dantinox_responses", "answers of HTTP by path and status", ("path", "status"), registry=self.registry
        )
        self._first = Histogram(
            "dantinox_first_token_seconds", "from a prompt until its first token", buckets=FIRST, registry=self.registry
        )
        self._between = Histogram(
            "dantinox_token_seconds", "between two tokens of a text, on average", buckets=BETWEEN, registry=self.registry
        )
        self._queued = Histogram(
            "dantinox_queued_seconds", "from a prompt until a slot was free", buckets=FIRST, registry=self.registry
        )

    def collect(self) -> Iterator[Metric]:
        """What the engine says of itself at this moment."""
        status = self._engine.status()
        for name in ("slots", "busy", "queued", "queue", "context"):
            yield GaugeMetricFamily(f"dantinox_{name}", f"{name} of the engine", getattr(status, name))
        yield GaugeMetricFamily("dantinox_ready", "1 where prompts are taken", float(status.state == "ready"))
        for name, text in COUNTED.items():
            yield CounterMetricFamily(f"dantinox_{name}", text, status.counters.get(name, 0))

    def observe(self, stats: RequestStats, samples: int) -> None:
        """Records a response that has been read to its end."""
        self._queued.observe(stats.queued_seconds)
        if stats.new_tokens:
            self._first.observe(stats.first_token_seconds)
        steps = stats.new_tokens / samples - 1
        if steps > 0:
            self._between.observe((stats.seconds - stats.first_token_seconds) / steps)

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)

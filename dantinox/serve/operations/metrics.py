"""Prometheus metrics of the server, for `/metrics`."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dantinox.generation.request import RequestStats
from dantinox.serve.options import Options
from dantinox.serve.response_stream import HasStatus, Status

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
GAUGES = {
    "slots": "maximum number of requests decoded together",
    "busy": "slots in use",
    "queued": "prompts in the queue",
    "queue": "maximum number of prompts in the queue",
    "context": "maximum number of tokens of a prompt and its continuation together",
}
PREFIX_GAUGES = {
    "used": "blocks in use in the prefix cache",
    "capacity": "blocks in the prefix cache",
}
COUNTERS = {
    "requests": "prompts accepted",
    "finished": "prompts whose response is complete",
    "cancelled": "prompts cancelled because their client disconnected",
    "refused": "prompts refused because the queue was full",
    "prompt_tokens": "tokens of accepted prompts",
    "reused_tokens": "prompt tokens that were found in the prefix cache",
    "new_tokens": "generated tokens",
    "draft_tokens": "draft tokens that were verified",
    "accepted_draft_tokens": "draft tokens that were accepted",
    "embedded_texts": "texts embedded",
    "embedded_tokens": "tokens of embedded texts",
    "compilations": "programs compiled after the warm-up",
}
# Counters of each key: metric → help, additional label, and the label's value → name in
# `KeyUsage.counts`.
KEY_COUNTERS: dict[str, tuple[str, str | None, dict[str, str]]] = {
    "key_requests": ("requests of each key", None, {"": "requests"}),
    "key_tokens": (
        "tokens of each key: prompt, new",
        "kind",
        {"prompt": "prompt_tokens", "new": "new_tokens"},
    ),
    "key_refused": (
        "requests of each key that exceeded its limit: requests, tokens, concurrent",
        "limit",
        {
            "requests": "refused_requests",
            "tokens": "refused_tokens",
            "concurrent": "refused_concurrent",
        },
    ),
}


class Metrics:
    """Counters, gauges and histograms of one server, in a separate registry.

    With several models, the metrics of an engine have the label `model`.

    Attributes:
      registry: the registry that `/metrics` returns.
      responses: counter of HTTP responses by path and status.
    """

    def __init__(
        self,
        engine: HasStatus,
        options: Options | None = None,
        models: Callable[[], Mapping[str, Status]] | None = None,
    ):
        """Initializes the metrics.

        Args:
          engine: the engine, or the pool of several models.
          models: returns the state of each of several models by name; None: the server has one
            model.
        """
        self._engine = engine
        self._options = options or Options()
        self._models = models
        labels = () if models is None else ("model",)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.responses = Counter(
            "dantinox_responses",
            "HTTP responses by path and status",
            ("path", "status"),
            registry=self.registry,
        )
        self._first = Histogram(
            "dantinox_first_token_seconds",
            "seconds from the arrival of a prompt to its first token",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._between = Histogram(
            "dantinox_token_seconds",
            "mean seconds between two tokens of a sample",
            labels,
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._queued = Histogram(
            "dantinox_queued_seconds",
            "seconds from the arrival of a prompt until it gets a slot",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "dantinox_request_seconds",
            "seconds from the arrival of a prompt to the end of its response",
            labels,
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """Yields the current state of the engine, or of each model."""
        status = self._engine.status()
        label: tuple[str, ...] = ()
        found: dict[tuple[str, ...], Status] = {(): status}  # by the values of the labels
        if self._models is not None:
            label = ("model",)
            found = {(name,): one for name, one in self._models().items()}
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"dantinox_{name}", text, labels=label)
            for values, one in found.items():
                gauge.add_metric(values, getattr(one, name))
            yield gauge
        for name, text in PREFIX_GAUGES.items():
            gauge = GaugeMetricFamily(f"dantinox_prefix_blocks_{name}", text, labels=label)
            for values, one in found.items():
                gauge.add_metric(values, getattr(one.prefixes, name))
            yield gauge
        evicted = CounterMetricFamily(
            "dantinox_prefix_block_evictions",
            "blocks of the prefix cache that were replaced by others",
            labels=label,
        )
        for values, one in found.items():
            evicted.add_metric(values, one.prefixes.evictions)
        yield evicted
        yield GaugeMetricFamily(
            "dantinox_ready", "1 if requests are accepted, else 0", float(status.state == "ready")
        )
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"dantinox_{name}", text, labels=label)
            for values, one in found.items():
                counter.add_metric(values, one.counters.get(name, 0))
            yield counter
        reloads = CounterMetricFamily(
            "dantinox_reloads", "reloads of keys and weights: success, failure", labels=("result",)
        )
        for result in ("success", "failure"):
            reloads.add_metric((result,), self._options.reloader.counts[result])
        yield reloads
        yield from self._collect_keys()

    def _collect_keys(self) -> Iterator[Metric]:
        """Yields the metrics of each key. The label has only names of current keys, so `MAX_KEYS`
        bounds their number.
        """
        usage = self._options.keys.usage
        running = GaugeMetricFamily(
            "dantinox_key_running", "requests of each key that are being answered", labels=("key",)
        )
        for name, one in usage.items():
            running.add_metric((name,), one.running)
        yield running
        for metric, (text, label, names) in KEY_COUNTERS.items():
            labels = ("key",) if label is None else ("key", label)
            family = CounterMetricFamily(f"dantinox_{metric}", text, labels=labels)
            for name, one in usage.items():
                for value, counter in names.items():
                    family.add_metric((name, value)[: len(labels)], one.counts[counter])
            yield family

    def observe(self, stats: RequestStats, samples: int, model: str = "") -> None:
        """Records a response that the client has read completely."""

        def record(histogram: Histogram, seconds: float) -> None:
            (histogram if self._models is None else histogram.labels(model)).observe(seconds)

        record(self._queued, stats.queued_seconds)
        record(self._seconds, stats.seconds)
        if stats.new_tokens:
            record(self._first, stats.first_token_seconds)
        steps = stats.new_tokens / samples - 1
        if steps > 0:
            record(self._between, (stats.seconds - stats.first_token_seconds) / steps)

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

"""Prometheus metrics. Labels are routes, methods, status and error codes: never an id, a path, a
key or any other text of a caller."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import GpuscoreError
from gpuscore.types.record import LEFT_CODE, PROGRESS, STAGES, RequestRecord

LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# From 1 ms, for a cached classifier prompt, to 120 s, the default --request-timeout.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITEMS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
ERROR_CODES = sorted({kind.code for kind in GpuscoreError.__subclasses__()})
BYTES = tuple(4**n for n in range(4, 13))  # 256 to 16 MiB
_STAGES = {
    "tokenize": "Text to ids, checks and factoring, with the wait for a thread",
    "queue": "From the engine's admission until the first batch was chosen",
    "batch": "From choosing the first batch until it was laid out and launched",
    "device": "From launching the first batch until the last result was collected",
    "respond": "Making and encoding the answer, with the wait for a thread",
}
# Counters of scored requests, by the attribute of a record that they add up.
_TOTALS = {
    "items": "Items scored",
    "prompt_tokens": "Prompt tokens of scored requests",
    "cached_tokens": "Prompt tokens that no forward pass computed",
    "label_tokens": "Tokens of labels of several tokens that were computed after prompts, beside "
    "those",
}


class Metrics:
    """The metrics: counts of finished requests, and a state that is read at each scrape.

    Args:
        state: collects the metrics of this process and of the engines.
        models: the served names.
    """

    def __init__(self, state: Collector, models: Sequence[str]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge for each counter
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(state)
        self._requests = Counter(
            "gpuscore_requests",
            "Requests answered or given up; code is the error's, empty without an error; model is "
            "empty if the request has reached none",
            ("route", "method", "status", "code", "model"),
            registry=self.registry,
        )
        self._duration = Histogram(
            "gpuscore_request_duration_seconds",
            "Time from a request's head to the end of its answer; no pages and probes",
            ("route", "model"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stages = {
            name: self._sizes(f"{name}_duration_seconds", _STAGES[name], SECONDS) for name in STAGES
        }
        self._body = self._sizes("request_body_bytes", "Body of a score request, as read", BYTES)
        self._answer = self._sizes("response_body_bytes", "Body of a score request's answer", BYTES)
        self._items = self._sizes("request_items", "Items of a scored request", ITEMS)
        self._rejected = self._counters(
            "rejected",
            "Score requests refused before the engine admitted them; reason is the error code",
            reason=ERROR_CODES,
        )
        self._cancelled = self._counters(
            "cancelled",
            "Requests whose client left before the answer, by the stage that they had reached",
            stage=PROGRESS,
        )
        self._lag = self._sizes(
            "event_loop_lag_seconds",
            "Delay of a timer of the server's event loop, measured ten times a second",
            LAG_SECONDS,
        )
        self._totals = {
            name: self._counters(name, what, model=models) for name, what in _TOTALS.items()
        }

    def finished(self, record: RequestRecord) -> None:
        self._requests.labels(
            record.route, record.method, str(record.status), record.code, record.model
        ).inc()
        if record.code == LEFT_CODE:
            self._cancelled.labels(record.progress).inc()
        elif record.code and record.route in DIALECT_OF and not record.accepted:
            self._rejected.labels(record.code).inc()
        if record.route in DIALECT_OF:
            self._duration.labels(record.route, record.model).observe(record.seconds)
            self._body.observe(record.bytes_in)
            self._answer.observe(record.bytes_out)
        for name, (_, seconds) in record.stages.items():
            self._stages[name].observe(seconds)
        if record.status == 200 and record.items is not None:
            self._items.observe(record.items)
            for name, counter in self._totals.items():
                counter.labels(record.model).inc(getattr(record, name) or 0)

    def loop_was_late(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format that the scraper accepts, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _sizes(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"gpuscore_{name}", what, buckets=buckets, registry=self.registry)

    def _counters(self, name: str, what: str, **labels: Iterable[str]) -> Counter:
        """Return a counter with one label, and a series for each of the label's values.

        All series exist from the start: Prometheus cannot see the increase from none to 1.
        """
        ((label, values),) = labels.items()
        counter = Counter(f"gpuscore_{name}", what, (label,), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

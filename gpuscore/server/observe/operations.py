"""The observation of every request from its head to its end: its id, record, metrics, log line and
trace.

Labels of metrics are routes, methods, status and error codes: never an id, a path, a key or any
other text of a caller.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gpuscore import __version__
from gpuscore.dialects.paths import PROBE_PATHS
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import GpuscoreError
from gpuscore.server.observe.engine_metrics import engine_metrics
from gpuscore.server.service import ScoringService
from gpuscore.system.log import LogFormat, LogWriter, clock_time, timestamp
from gpuscore.types.record import (
    CLIENT_LEFT,
    CLIENT_LEFT_CODE,
    PROGRESS,
    STAGES,
    Headers,
    RequestRecord,
)

LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
# From 1 ms, for a cached classifier prompt, to 120 s, the default --request-timeout.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ITEMS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10000)
ERROR_CODES = sorted({kind.code for kind in GpuscoreError.__subclasses__()})
BYTES = tuple(4**n for n in range(4, 13))  # 256 to 16 MiB
LOOP_PERIOD = 0.1  # seconds between two measurements of the event loop's delay
SHOWN = ("code", "items", "prompt_tokens", "cached_tokens", "total_ms")  # on a terminal
SHOWN_TENANT = 8  # hex digits of the key's hash
_STAGES = {
    "tokenize": "Text to ids, checks and the split of prompts, with the wait for a thread",
    "queue": "From the arrival in the engine until the first batch was chosen",
    "batch": "From choosing the first batch until it was laid out and launched",
    "device": "From launching the first batch until the last result was collected",
    "respond": "Making and encoding the answer, with the wait for a thread",
}
# Counters of scored requests, by the attribute of a record that they add up.
_TOTALS = {
    "items": "Items scored",
    "prompt_tokens": "Prompt tokens of scored requests",
    "cached_tokens": "Prompt tokens that no forward pass computed",
    "label_tokens": "Tokens of labels with several tokens, computed in addition to the prompts",
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
        requests = Counter(
            "gpuscore_requests",
            "Requests answered or given up; code is the error's, empty without an error; model is "
            "empty if the request has reached none",
            ("route", "method", "status", "code", "model"),
            registry=self.registry,
        )
        duration = Histogram(
            "gpuscore_request_duration_seconds",
            "Time from a request's head to the end of its answer, without pages and probes",
            ("route", "model"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._requests = cache(requests.labels)
        self._duration = cache(duration.labels)
        self._stages = {
            name: self._sizes(f"{name}_duration_seconds", _STAGES[name], SECONDS) for name in STAGES
        }
        self._body = self._sizes("request_body_bytes", "Body of a score request, as read", BYTES)
        self._answer = self._sizes("response_body_bytes", "Body of a score request's answer", BYTES)
        self._items = self._sizes("request_items", "Items of a scored request", ITEMS)
        self._rejected = self._counters(
            "rejected",
            "Score requests refused before the engine got them; reason is the error code",
            reason=ERROR_CODES,
        )
        self._cancelled = self._counters(
            "cancelled",
            "Requests whose client left before the answer, by the stage that they had reached",
            stage=PROGRESS,
        )
        self.lag = self._sizes(
            "event_loop_lag_seconds",
            "Delay of a timer of the server's event loop, measured ten times a second",
            LAG_SECONDS,
        )
        self._totals = {
            name: self._counters(name, what, model=models) for name, what in _TOTALS.items()
        }

    def finished(self, record: RequestRecord) -> None:
        # The values are in the labels' order; keywords would cost a microsecond more.
        self._requests(record.route, record.method, record.status, record.code, record.model).inc()
        if record.code == CLIENT_LEFT_CODE:
            self._cancelled(record.progress).inc()
        elif record.code and record.route in DIALECT_OF and not record.accepted:
            self._rejected(record.code).inc()
        if record.route in DIALECT_OF:
            self._duration(record.route, record.model).observe(record.seconds)
            if record.bytes_in:  # otherwise it was refused at its head
                self._body.observe(record.bytes_in)
            self._answer.observe(record.bytes_out)
        for name, (_, seconds) in record.stages.items():
            self._stages[name].observe(seconds)
        if record.status == 200 and record.items is not None:
            self._items.observe(record.items)
            for name, labelled in self._totals.items():
                labelled(record.model).inc(getattr(record, name) or 0)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format that the scraper accepts, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _sizes(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"gpuscore_{name}", what, buckets=buckets, registry=self.registry)

    def _counters(self, name: str, what: str, **labels: Iterable[str]) -> Callable[..., Counter]:
        """Return the series of a counter with one label, by the label's value.

        All series exist from the start: Prometheus cannot see the increase from none to 1.
        """
        ((label, values),) = labels.items()
        counter = Counter(f"gpuscore_{name}", what, (label,), registry=self.registry)
        for value in values:
            counter.labels(value)
        return cache(counter.labels)


if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer


def request_line(record: RequestRecord, style: LogFormat = "json") -> bytes:
    """Return a finished request as one line, with its line end."""
    fields = _fields(record)
    if style == "json":
        return msgspec.json.encode(fields) + b"\n"
    names = (*SHOWN, "request_id") if record.status >= 400 else SHOWN
    parts = [f"{name}={fields[name]}" for name in names if fields[name] is not None]
    request = f"{clock_time()} {record.method} {record.route} {record.status}"
    return " ".join([request, *parts]).encode() + b"\n"


def _fields(record: RequestRecord) -> dict[str, str | float | None]:
    tenant = record.tenant[:SHOWN_TENANT] if record.tenant else None
    fields: dict[str, str | float | None] = {
        "time": timestamp(),
        "level": "error" if record.status >= 500 else "info",
        "event": "request",
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "code": record.code or None,
        "tenant": tenant,
        "model": record.model or None,
        "items": record.items,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
    }
    for name in STAGES:
        stage = record.stages.get(name)
        fields[f"{name}_ms"] = None if stage is None else round(1000 * stage[1], 3)
    fields["total_ms"] = round(1000 * record.seconds, 3)
    fields["bytes_in"] = record.bytes_in
    fields["bytes_out"] = record.bytes_out
    return fields


class Operations(Collector):
    """The metrics of one server, and its log and traces if they are configured."""

    def __init__(
        self,
        service: ScoringService,
        log: LogWriter | None = None,
        tracer: "SpanTracer | None" = None,
        log_requests: bool = True,
    ) -> None:
        self.service = service
        self.log = log
        self.tracer = tracer
        self.log_requests = log_requests
        self.running = 0
        self.connections_refused = 0  # over the limit
        self.metrics = Metrics(self, service.models.names)

    def finish(self, record: RequestRecord, headers: Headers = ()) -> None:
        """Count, trace and log a request that is over."""
        record.seconds = monotonic() - record.started
        record.refuse(CLIENT_LEFT, CLIENT_LEFT_CODE)  # unless something was answered
        self.metrics.finished(record)
        if self.tracer is not None:
            record.trace_id = self.tracer.finished(record, headers)
        # Probes come every few seconds; what makes a server unhealthy has a line of its own.
        if self.log is not None and self.log_requests and record.route not in PROBE_PATHS:
            self.log.write(request_line(record, self.log.style))

    async def watch_loop(self) -> None:
        """Measure the delay of the running event loop until cancelled."""
        while True:
            due = monotonic() + LOOP_PERIOD
            await asyncio.sleep(LOOP_PERIOD)
            self.metrics.lag.observe(max(0.0, monotonic() - due))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a server's state, at the time of a scrape."""
        yield _gauge("requests_running", "HTTP requests in progress", self.running)
        dropped = 0 if self.log is None else self.log.dropped
        yield CounterMetricFamily("gpuscore_log_lines_dropped", "Log lines not written", dropped)
        yield CounterMetricFamily(
            "gpuscore_connections_refused", "Connections over the limit", self.connections_refused
        )
        yield InfoMetricFamily("gpuscore_build", "Version", {"version": __version__})
        healthy = self.service.healthy
        yield _gauge("up", "1 while the process and its engine are alive", healthy)
        yield _gauge("ready", "1 while requests can be scored", self.service.ready)
        yield from engine_metrics(self.service.models.states())


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gpuscore_{name}", what, value)

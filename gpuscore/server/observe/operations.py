"""The observation of every request from its head to its end: its id, record, metrics, log line
and trace."""

import asyncio
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuscore import __version__
from gpuscore.dialects.paths import PROBE_PATHS
from gpuscore.server.observe.engine_metrics import engine_metrics
from gpuscore.server.observe.metrics import Metrics
from gpuscore.server.service import ScoringService
from gpuscore.system.log import LogFormat, LogWriter, clock_time, timestamp
from gpuscore.types.record import CLIENT_LEFT, LEFT_CODE, STAGES, Headers, RequestRecord

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

SHOWN_TENANT = 8  # hex digits of the key's hash


def request_line(record: RequestRecord, style: LogFormat = "json") -> bytes:
    """Return a finished request as one line, with its line end."""
    return _text(record) if style == "text" else _json(record)


def _text(record: RequestRecord) -> bytes:
    """Return the time of day, route, status, milliseconds, and the known sizes and errors.

    The id is left out of answers that succeeded: people read these lines as they pass.
    """
    parts = [f"{clock_time()} {record.method} {record.route} {record.status}"]
    parts += [record.code] if record.code else []
    parts.append(f"{1000 * record.seconds:.1f} ms")
    if record.items is not None:
        parts.append(_number(record.items, "item"))
    if record.prompt_tokens is not None:
        cached = f", {record.cached_tokens:,} of them cached" if record.cached_tokens else ""
        parts.append(_number(record.prompt_tokens, "token") + cached)
    if record.status >= 400:
        parts.append(f"id {record.request_id}")
    return "  ".join(parts).encode() + b"\n"


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _json(record: RequestRecord) -> bytes:
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
    fields["bytes_in"], fields["bytes_out"] = record.bytes_in, record.bytes_out
    return msgspec.json.encode(fields) + b"\n"


LOOP_PERIOD = 0.1  # seconds between two measurements of the event loop's delay


class Operations(Collector):
    """The metrics of one server, and its log and traces if they are configured."""

    def __init__(
        self,
        service: ScoringService,
        log: LogWriter | None = None,
        tracer: "SpanTracer | None" = None,
        log_requests: bool = True,
        log_format: LogFormat = "json",
    ) -> None:
        self.service, self.log, self.tracer = service, log, tracer
        self.log_requests, self.log_format = log_requests, log_format
        self.running = 0
        self.connections_refused = 0  # over the limit
        self.metrics = Metrics(self, service.models.names)

    def finish(self, record: RequestRecord, headers: Headers = ()) -> None:
        """Count, trace and log a request that is over."""
        record.seconds = monotonic() - record.started
        record.refuse(CLIENT_LEFT, LEFT_CODE)  # unless something was answered
        self.metrics.finished(record)
        if self.tracer is not None:
            record.trace_id = self.tracer.finished(record, headers)
        # Probes come every few seconds; what makes a server unhealthy has a line of its own.
        if self.log is not None and self.log_requests and record.route not in PROBE_PATHS:
            self.log.write(request_line(record, self.log_format))

    async def watch_loop(self) -> None:
        """Measure the delay of the running event loop until cancelled."""
        while True:
            due = monotonic() + LOOP_PERIOD
            await asyncio.sleep(LOOP_PERIOD)
            self.metrics.loop_was_late(max(0.0, monotonic() - due))

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


def server_timing(record: RequestRecord) -> str:
    """Return the milliseconds of each stage so far, and since the head (W3C Server Timing)."""
    parts = {name: seconds for name, (_, seconds) in record.stages.items()}
    parts["total"] = monotonic() - record.started
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in parts.items())

"""OpenTelemetry spans of finished requests. Imported only if traces are configured."""

import time

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gpuscore import __version__
from gpuscore.dialects.paths import COMPLETIONS_PATH
from gpuscore.types.record import Headers, RequestRecord

_CONTEXT_HEADERS = ("traceparent", "tracestate")


class SpanTracer:
    """A maker of one server span per request, with a child span for each stage."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("gpuscore", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def finished(self, record: RequestRecord, headers: Headers) -> str:
        """Make the spans of a request that has just ended; return the trace's id."""
        end = time.time_ns()
        begin = end - _nanoseconds(record.seconds)
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._propagator.extract(_carrier(headers)),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=begin,
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            inside = set_span_in_context(span)
            for name, (start, seconds) in record.stages.items():
                at = begin + _nanoseconds(start - record.started)
                child = self._tracer.start_span(name, inside, start_time=at)
                child.end(at + _nanoseconds(seconds))
        span.end(end)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _carrier(headers: Headers) -> dict[str, str]:
    """Return the trace headers. Repeated fields are joined, which makes a traceparent invalid."""
    carrier: dict[str, str] = {}
    for header in _CONTEXT_HEADERS:
        values = [value for name, value in headers if name == header.encode()]
        if values:
            carrier[header] = b",".join(values).decode("latin-1")
    return carrier


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    """Return a span's attributes. If OpenTelemetry's conventions for HTTP and generative AI have a
    name, it is used.

    "score" is our own operation, because the conventions have none that only reads prompts. A
    request that scores nothing has no operation. No output tokens are given, as none are generated.
    """
    model = record.model or None
    scores = model is not None and record.items is not None
    operation = "text_completion" if record.route == COMPLETIONS_PATH else "score"
    known: dict[str, str | int | None] = {
        "http.request.method": record.method.upper() if record.method != "other" else "_OTHER",
        "http.route": record.route,
        "http.response.status_code": record.status,
        "error.type": record.code or None,
        "gen_ai.operation.name": operation if scores else None,
        "gen_ai.provider.name": "gpuscore" if scores else None,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model if record.status == 200 else None,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gpuscore.request_id": record.request_id,
        "gpuscore.items": record.items,
    }
    return {name: value for name, value in known.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

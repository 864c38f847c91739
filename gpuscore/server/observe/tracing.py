"""The set-up of OpenTelemetry traces, if its variables ask for them (gpuscore[otel])."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpuscore import __version__
from gpuscore.errors import ConfigError
from gpuscore.system.extras import install

if TYPE_CHECKING:
    from gpuscore.server.observe.spans import SpanTracer

# OpenTelemetry's own variables. The exporter reads its address and all its options from them.
_ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def read_tracer(environment: Mapping[str, str]) -> "SpanTracer | None":
    """Return the tracer that OTEL_* variables ask for, or None.

    Raises:
        ConfigError: the protocol is not http/protobuf, or the extra gpuscore[otel] is missing.
    """
    variable = _address_variable(environment)
    if variable is None:
        return None
    for name in _PROTOCOLS:
        if environment.get(name, _PROTOCOL) != _PROTOCOL:
            raise ConfigError(f"{name} must be {_PROTOCOL}, the only one that is supported")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"{variable} asks for traces, which need OpenTelemetry: {install('otel')}, or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from gpuscore.server.observe.spans import SpanTracer

    ours = Resource.create({"service.name": "gpuscore", "service.version": __version__})
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override these names.
    provider = TracerProvider(
        resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return SpanTracer(provider)


def _address_variable(environment: Mapping[str, str]) -> str | None:
    """Return the name of the variable that asks for traces, or None."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "").strip() == "none":
        return None
    return next((name for name in _ADDRESSES if environment.get(name, "").strip()), None)

"""Promise: traces show the stages of a request, to callers who asked for them."""

import os
import subprocess
import sys
from uuid import uuid4

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

from gpuscore.errors import ConfigError
from gpuscore.server.observe.operations import Operations
from gpuscore.server.observe.spans import SpanTracer
from gpuscore.server.observe.tracing import read_tracer
from gpuscore.types.record import STAGES, RequestRecord
from support.serving import wait_until
from support.stub_service import ask, stub_service
from support.watched_server import BODY

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class TestTraces:
    @staticmethod
    def spans(*headers, body=BODY, url="/v1/score"):
        """Return the finished spans of one request."""
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        service = stub_service()
        operations = Operations(service, tracer=SpanTracer(provider))
        request = {"method": "POST", "url": url, "json": body, "headers": list(headers)}
        ask(service, request, operations=operations)
        return exporter.get_finished_spans()

    def test_a_span_and_its_stages_in_the_callers_trace(self):
        *stages, span = self.spans(
            ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("X-Request-Id", "r")
        )
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.name == "POST /v1/score"
        assert span.attributes["gpuscore.request_id"] == "r"
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["gpuscore.items"] == 3
        assert [stage.name for stage in stages] == list(STAGES)
        for stage in stages:
            assert stage.parent.span_id == span.context.span_id
            assert span.start_time <= stage.start_time <= stage.end_time
        starts = [stage.start_time for stage in stages]
        assert starts == sorted(starts)

    def test_attributes_of_the_conventions(self):
        """Compare with the names in OpenTelemetry's own package."""
        *_, span = self.spans()
        attributes = {
            name: value for name, value in span.attributes.items() if name.startswith("gen_ai")
        }
        tokens = attributes.pop(names.GEN_AI_USAGE_INPUT_TOKENS)
        cached = attributes.pop(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS)
        assert tokens > cached > 0
        assert attributes == {
            names.GEN_AI_OPERATION_NAME: "score",
            names.GEN_AI_PROVIDER_NAME: "gpuscore",
            names.GEN_AI_REQUEST_MODEL: "tiny",
            names.GEN_AI_RESPONSE_MODEL: "tiny",
        }

    def test_what_scores_nothing_is_no_operation(self):
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        SpanTracer(provider).finished(RequestRecord("r", route="/tokenize", model="tiny"), ())
        (span,) = exporter.get_finished_spans()
        assert span.attributes[names.GEN_AI_REQUEST_MODEL] == "tiny"
        assert names.GEN_AI_OPERATION_NAME not in span.attributes

    def test_an_error(self):
        (span,) = self.spans(body={"items": 1})
        assert span.attributes["error.type"] == "invalid_request"
        assert "gpuscore.items" not in span.attributes
        assert not [name for name in span.attributes if name.startswith("gen_ai")]

    @pytest.mark.parametrize(
        "values",
        [
            [],
            [""],
            [f"00-{TRACE}-{PARENT}"],
            [f"00-{'0' * 32}-{PARENT}-01"],
            [f"ff-{TRACE}-{PARENT}-01"],
            [f"00-{TRACE[:-1]}-{PARENT}-01"],
            [f"00-{TRACE}-{PARENT}-01-x"],
            [f"00-{TRACE}-{PARENT}-01"] * 2,
        ],
    )
    def test_anything_else_begins_a_trace(self, values):
        *_, span = self.spans(*(("traceparent", value) for value in values))
        assert span.parent is None
        assert f"{span.context.trace_id:032x}" != TRACE

    def test_a_trace_that_is_not_sampled(self):
        assert not self.spans(("traceparent", f"00-{TRACE}-{PARENT}-00"))

    def test_spans_reach_a_collector(self, watched):
        name = uuid4().hex
        headers = {"X-Request-Id": name, "traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert watched.client.post("/v1/score", json=BODY, headers=headers).status_code == 200
        assert watched.line(name)["trace_id"] == TRACE
        wait_until(lambda: any(span.trace_id.hex() == TRACE for span in watched.spans()), 5)
        mine = [span.name for span in watched.spans() if span.trace_id.hex() == TRACE]
        assert sorted(mine) == sorted([*STAGES, "POST /v1/score"])

    ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

    def test_an_unsupported_protocol_is_refused(self):
        with pytest.raises(ConfigError, match="must be http/protobuf"):
            read_tracer(self.ASKED | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})

    def test_traces_are_sent_if_the_variables_ask_for_them(self):
        assert read_tracer({}) is None
        assert read_tracer(self.ASKED | {"OTEL_TRACES_EXPORTER": "none"}) is None
        assert read_tracer(self.ASKED | {"OTEL_SDK_DISABLED": "true"}) is None
        tracer = read_tracer(self.ASKED)
        assert tracer is not None
        tracer.close()

    def test_without_the_extra(self):
        """Without the extra the modules import, but a start with traces is refused."""
        code = (
            "import sys; sys.modules['opentelemetry.sdk'] = None\n"
            "import gpuscore.server.run, gpuscore.server.api.app\n"
            "from gpuscore.commands.cli import main\n"
            "sys.exit(main(['serve']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | self.ASKED,
        )
        assert done.returncode == 78, done.stderr
        assert done.stderr.startswith("gpuscore: OTEL_EXPORTER_OTLP_ENDPOINT asks for traces")
        assert "pip install 'opentelemetry-exporter-otlp-proto-http>=" in done.stderr
        assert done.stderr.count("\n") == 1

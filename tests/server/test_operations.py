"""Promise: an operator sees what the server does, and never what its callers say."""

import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gpuscore.config import ServerConfig
from gpuscore.engine.child import BEAT as HEARTBEAT
from gpuscore.errors import ConfigError
from gpuscore.server.log import JsonFormatter, LogWriter, request_line
from gpuscore.server.operations import Operations
from gpuscore.server.record import STAGES, RequestRecord
from gpuscore.server.service import ScoringService, cache_salt
from gpuscore.server.spans import SpanTracer
from gpuscore.server.tracing import read_tracer
from support.serving import serving, wait_until
from support.stub import STATS, ask, stub_service
from support.wire import Connection, Reply, check_error, connected, large_request, post, score

CANARY = "canary-Of-The-Caller"  # stands for a caller's text
ALICE, BOB = "key-that-alice-has", "key-that-bob-has"
BODY = {"query": [5, 6], "items": [[7], [8, 9], [10]], "label_token_ids": [3, 17]}
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")
TIMEOUT = "X-Request-Timeout-Ms"


@dataclass
class Watched:
    """A server, its log, and the collector of its traces."""

    url: str
    client: httpx.Client
    log: Path
    traces: list[bytes]

    def line(self, request_id):
        """The log's one line about a request."""
        wait_until(lambda: request_id in self.log.read_text(encoding="utf-8"), 5)
        lines = [line for line in self.lines() if line.get("request_id") == request_id]
        assert len(lines) == 1
        return lines[0]

    def lines(self):
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def samples(self):
        """{(name, labels as a sorted tuple): value} of /metrics."""
        text = self.client.get("/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def spans(self):
        batches = [ExportTraceServiceRequest.FromString(body) for body in self.traces]
        return [
            span
            for batch in batches
            for resource in batch.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collector():
    """An HTTP server that keeps what is posted to it."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


@pytest.fixture(scope="module")
def watched(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("watched")
    keys, log = directory / "keys", directory / "log"
    keys.write_text(f"{ALICE}\n{BOB}\n", encoding="utf-8")
    flags = {
        "--threads": 1,
        "--served-model-name": "tiny",
        "--api-key-file": keys,
        "--max-body-bytes": 2**20,
        "--max-headers": 20,
        "--max-header-bytes": 2048,
        "--header-timeout": 0.3,
        "--body-timeout": 0.3,
        "--request-timeout": 20,
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    with (
        collector() as (endpoint, traces),
        serving(
            model[0],
            *arguments,
            "--timing-headers",
            "--otlp-endpoint",
            endpoint,
            environment={"OTEL_BSP_SCHEDULE_DELAY": "200"},
            log=log,
        ) as server,
        connected(server, ALICE) as client,
    ):
        yield Watched(server.url, client, log, traces)


class TestRequestId:
    """Every answer has one; the caller's own if it is one."""

    @pytest.mark.parametrize(
        "given", ["a", "A.b_c-9", "x" * 128, "..", "0bc3df5a93d744aaac339cc3d5f3c96b"]
    )
    def test_a_good_one_is_echoed(self, client, given):
        for path in ("/health", "/nowhere", "/v1/models"):
            assert (
                client.get(path, headers={"X-Request-Id": given}).headers["x-request-id"] == given
            )

    def test_without_one_each_request_gets_its_own(self, client):
        ids = {client.get("/health").headers["x-request-id"] for _ in range(9)}
        assert len(ids) == 9
        assert all(len(one) == 32 and int(one, 16) for one in ids)

    @pytest.mark.parametrize(
        "given",
        [[""], ["x" * 129], ["a b"], ["a/b"], ["a;b"], ["ä"], ["a\tb"], ["a", "a"]],
    )
    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
    def test_a_bad_one_is_refused_by_name(self, client, path, given):
        with Connection(client) as connection:
            connection.request("GET", path, *(f"X-Request-Id: {one}" for one in given))
            reply = connection.reply()
            message = check_error(reply, 400, "invalid_request", "X-Request-Id")
            assert "1 to 128" in message
            assert int(reply.headers["x-request-id"], 16), "one of the server's own"
            connection.request("GET", "/health")
            assert connection.reply().status == 200, "the connection lives on"


def by_post(content=None, **headers):
    content = json.dumps(BODY).encode() if content is None else content
    return lambda watched, name: post(watched.client, content, X_Request_Id=name, **headers)


def by_get(path, method="GET"):
    return lambda watched, name: watched.client.request(
        method, path, headers={"X-Request-Id": name}
    )


def raw(*parts, key=True, path="/v1/score"):
    """Send a head with these fields, then the rest as it is."""
    fields = [part for part in parts if isinstance(part, str)]
    rest = b"".join(part for part in parts if isinstance(part, bytes))

    def send(watched, name) -> Reply:
        with Connection(watched.client) as connection:
            head = connection.head("POST", path, f"X-Request-Id: {name}", *fields, key=key)
            connection.send(head + rest)
            return connection.reply()

    return send


def bare(sent):
    def send(watched, _) -> Reply:
        with Connection(watched.client) as connection:
            connection.send(sent)
            return connection.reply()

    return send


# id -> request, status, code, route of the log, whether the head was read (and with it the id)
SCORE, NO_ROUTE = "/v1/score", "unmatched"
KINDS = {
    "not JSON": (by_post(b"{"), 400, "invalid_request", SCORE, True),
    "unknown field": (by_post(b'{"zzz":1}'), 400, "invalid_request", SCORE, True),
    "no labels": (by_post(b'{"items":["a"]}'), 400, "missing_labels", SCORE, True),
    "timeout": (by_post(X_Request_Timeout_Ms="0"), 400, "invalid_request", SCORE, True),
    "no key": (raw(key=False), 401, "invalid_api_key", SCORE, True),
    "no key, no route": (raw(key=False, path="/x"), 401, "invalid_api_key", NO_ROUTE, True),
    "no such path": (by_get("/nowhere"), 404, "not_found", NO_ROUTE, True),
    "no such model": (
        by_post(json.dumps(BODY | {"model": "x"}).encode()),
        404,
        "model_not_found",
        SCORE,
        True,
    ),
    "wrong method": (by_get("/v1/score"), 405, "method_not_allowed", SCORE, True),
    "made-up method": (by_get("/health", CANARY), 405, "method_not_allowed", "/health", True),
    "slow head": (bare(b"GET /hea"), 408, "request_timeout", NO_ROUTE, False),
    "slow body": (
        raw("Content-Type: application/json", "Content-Length: 9"),
        408,
        "request_timeout",
        SCORE,
        True,
    ),
    "large body": (by_post(b" " * (2**20 + 1)), 413, "body_too_large", SCORE, True),
    "text": (by_post(content_type="text/plain"), 415, "unsupported_media_type", SCORE, True),
    "many fields": (raw(*["X: 1"] * 21), 431, "header_too_large", SCORE, True),
    "endless head": (bare(b"GET /" + b"y" * 4096), 431, "header_too_large", NO_ROUTE, False),
    "no HTTP": (bare(b"\x16\x03\r\n\r\n"), 400, "invalid_request", NO_ROUTE, False),
    "broken chunk": (raw(*CHUNKED, b"zz\r\n\r\n"), 400, "invalid_request", SCORE, True),
    "both lengths": (
        raw(*CHUNKED, "Content-Length: 0"),
        400,
        "invalid_request",
        SCORE,
        True,
    ),
    "too late": (
        by_post(large_request(200_000, apply_softmax=True), X_Request_Timeout_Ms="30"),
        504,
        "deadline_exceeded",
        SCORE,
        True,
    ),
}


@pytest.mark.parametrize(("send", "status", "code", "route", "read"), KINDS.values(), ids=KINDS)
def test_every_error_has_an_id_a_line_and_a_count(watched, send, status, code, route, read):
    before = watched.samples()
    name = f"id-{uuid4().hex}"
    reply = send(watched, name)
    check_error(reply, status, code)
    request_id = reply.headers["x-request-id"]
    assert (request_id == name) == read
    line = watched.line(request_id)
    assert (line["status"], line["code"], line["route"]) == (status, code, route)
    assert line["level"] == ("error" if status >= 500 else "info")
    after = watched.samples()
    labels = (("code", code), ("method", line["method"]), ("route", route), ("status", str(status)))
    key = ("gpuscore_requests_total", labels)
    assert after[key] - before.get(key, 0) == 1


def test_a_client_that_leaves_is_noted(watched):
    name = uuid4().hex
    with Connection(watched.client) as connection:
        body = large_request(300_000, apply_softmax=True)
        connection.request("POST", "/v1/score", f"X-Request-Id: {name}", body=body)
        wait_until(lambda: watched.samples()["gpuscore_requests_waiting", ()] == 1)
    assert (watched.line(name)["status"], watched.line(name)["code"]) == (499, "client_left")


class TestLog:
    def test_the_line_of_a_scored_request(self, watched):
        name, body = uuid4().hex, json.dumps(BODY).encode()
        start = time.monotonic()
        reply = post(watched.client, body, X_Request_Id=name)
        seconds = time.monotonic() - start
        usage = reply.json()["usage"]
        line = watched.line(name)
        stages = [line.pop(f"{stage}_ms") for stage in STAGES]
        assert all(stage >= 0 for stage in stages)
        assert 0 < sum(stages) <= line["total_ms"] <= 1000 * seconds
        assert line.pop("time").endswith("Z")
        assert int(line.pop("trace_id"), 16)
        assert line.pop("total_ms")
        assert line == {
            "level": "info",
            "event": "request",
            "request_id": name,
            "method": "POST",
            "route": "/v1/score",
            "status": 200,
            "code": None,
            "tenant": hashlib.sha256(ALICE.encode()).hexdigest()[:8],
            "items": 3,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "bytes_in": len(body),
            "bytes_out": len(reply.content),
        }

    def test_the_longest_line_is_short(self):
        record = RequestRecord("x" * 128, method="CONNECT", route="/v1/score", code="x" * 30)
        record.tenant, record.trace_id, record.status = "f" * 16, "f" * 32, 503
        record.items = record.prompt_tokens = record.cached_tokens = record.bytes_in = 2**40
        record.stages = dict.fromkeys(STAGES, (0.0, 1e5 / 3))
        assert len(request_line(record)) < 1024

    def test_an_exception_is_shown_without_its_message(self):
        stream = io.StringIO()
        logger = logging.Logger("test")
        logger.addHandler(logging.StreamHandler(stream))
        logger.handlers[0].setFormatter(JsonFormatter())
        try:
            raise KeyError(CANARY)
        except KeyError:
            logger.exception("failed after %d items", 3)
        logger.error("x" * 10**6)
        first, second = map(json.loads, stream.getvalue().splitlines())
        assert (first["message"], first["exception"]) == ("failed after 3 items", "KeyError")
        assert "test_operations.py" in first["traceback"]
        assert CANARY.lower() not in json.dumps(first).lower()
        assert len(json.dumps(second)) < 2500

    def test_a_reader_that_has_stopped_stops_nobody(self):
        reading, writing = os.pipe()
        writer = LogWriter(writing, capacity=1000)
        start = time.monotonic()
        for number in range(20_000):
            writer.write(b"%063d\n" % number)
            if number == 1000:
                time.sleep(0.2)  # the thread is stuck in a full pipe from now on
        writer.close(0.2)
        assert time.monotonic() - start < 3
        assert writer.dropped > 15_000
        got = os.read(reading, 2**16)
        assert got.startswith(b"0" * 63 + b"\n")
        os.close(reading)

    def test_what_was_written_is_there_after_close(self, tmp_path):
        with (tmp_path / "log").open("wb") as file, LogWriter(file.fileno()) as writer:
            for number in range(500):
                writer.write(b"%d\n" % number)
        assert (tmp_path / "log").read_text().split() == [str(n) for n in range(500)]


class TestCanary:
    """Nothing that a caller says is in the log, in metrics or in spans."""

    REQUESTS = {
        "text": {"json": {"query": CANARY, "items": [CANARY], "label_token_ids": [3]}},
        "labels": {"json": {"items": [f"{CANARY} a"], "labels": [CANARY]}},
        "model": {"json": BODY | {"model": CANARY}},
        "salt": {"json": BODY | {"cache_salt": CANARY}},
        "bad salt": {"json": BODY | {"cache_salt": f"{CANARY} {CANARY}"}},
        "unknown field": {"json": BODY | {CANARY.replace("-", "_"): 1}},
        "unknown field, bad": {"json": BODY | {f"<{CANARY}>": CANARY}},
        "no JSON": {"content": CANARY.encode(), "headers": {"content-type": "application/json"}},
        "content type": {"content": b"{}", "headers": {"content-type": f"text/{CANARY}"}},
        "bad id": {"json": BODY, "headers": {"X-Request-Id": f"{CANARY}!"}},
        "timeout": {"json": BODY, "headers": {TIMEOUT: CANARY}},
        "trace": {"json": BODY, "headers": {"traceparent": CANARY, "tracestate": f"a={CANARY}"}},
        "other fields": {"json": BODY, "headers": {"User-Agent": CANARY, f"X-{CANARY}": CANARY}},
        "key": {"json": BODY, "headers": {"Authorization": f"Bearer {CANARY}"}},
        "path": {"method": "GET", "url": f"/{CANARY}"},
        "query string": {"json": BODY, "url": f"/v1/score?{CANARY}={CANARY}"},
        "method": {"method": CANARY},
        "host": {"json": BODY, "headers": {"Host": CANARY}},
        "not finite": {"json": {"items": [CANARY * 1000], "label_token_ids": [3]}},
    }

    def test_it_is_nowhere(self, watched):
        for request in self.REQUESTS.values():
            reply = watched.client.request(**({"method": "POST", "url": "/v1/score"} | request))
            watched.line(reply.headers["x-request-id"])
        for sent in (CANARY, f"GET /{CANARY}\r\n\r\n", f"GET / HTTP/1.1\r\n{CANARY} : x\r\n\r\n"):
            bare(sent.encode())(watched, "")
        last = by_get("/health")(watched, f"last-{uuid4().hex}").headers["x-request-id"]
        watched.line(last)
        wait_until(lambda: last.encode() in b"".join(watched.traces), 5)
        metrics = watched.client.get("/metrics").text
        everything = watched.log.read_bytes() + b"".join(watched.traces) + metrics.encode()
        everything = everything.lower()
        for secret in (CANARY, CANARY.replace("-", "_"), ALICE, BOB):
            assert secret.lower().encode() not in everything

    def test_labels_are_few(self, watched):
        """A made-up method, path or id makes no series of its own."""
        for number in range(3):
            watched.client.request(f"METHOD{number}", f"/path/{number}")
        before = set(watched.samples())
        for number in range(3, 30):
            watched.client.request(f"METHOD{number}", f"/path/{number}")
        assert set(watched.samples()) == before


class TestMetrics:
    def test_counters_add_up(self, watched):
        sizes = [(1, 9), (4, 7), (30, 2)]
        time.sleep(2 * HEARTBEAT)  # the engine's process reports now and then
        before = watched.samples()
        read = sent = 0
        for items, query in sizes:
            body = {"query": [5] * query, "items": [[6]] * items, "label_token_ids": [3]}
            content = json.dumps(body).encode()
            read, sent = read + len(content), sent + len(post(watched.client, content).content)
        for content in (b"{", b'{"zzz":1}'):
            read, sent = read + len(content), sent + len(post(watched.client, content).content)
        time.sleep(2 * HEARTBEAT)
        after = watched.samples()

        def grown(name, **labels):
            key = (f"gpuscore_{name}", tuple(sorted(labels.items())))
            return after[key] - before.get(key, 0)

        ok = {"route": "/v1/score", "method": "POST", "status": "200", "code": ""}
        bad = ok | {"status": "400", "code": "invalid_request"}
        tokens = sum(items * (query + 1) for items, query in sizes)
        assert grown("requests_total", **ok) == len(sizes)
        assert grown("requests_total", **bad) == 2
        assert grown("request_duration_seconds_count", route="/v1/score") == len(sizes) + 2
        assert grown("items_total") == grown("request_items_sum") == 35
        assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") == tokens
        assert grown("computed_tokens_total") == tokens - grown("cached_tokens_total")
        assert grown("batches_total") >= len(sizes)
        assert grown("request_body_bytes_sum") == read
        assert grown("response_body_bytes_sum") == sent
        for stage in STAGES:
            assert grown(f"{stage}_duration_seconds_count") == len(sizes)
            assert 0 <= grown(f"{stage}_duration_seconds_sum") < 20
            assert grown(f"{stage}_duration_seconds_bucket", le="+Inf") == len(sizes)
        assert after["gpuscore_requests_running", ()] == 1, "the scrape itself"
        assert after["gpuscore_requests_waiting", ()] == after["gpuscore_tokens_waiting", ()] == 0
        assert after["gpuscore_up", ()] == after["gpuscore_ready", ()] == 1
        assert after["gpuscore_log_lines_dropped_total", ()] == 0

    def test_the_engine_is_asked_when_somebody_scrapes(self):
        (reply,) = ask(stub_service(), {"method": "GET", "url": "/metrics"})
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
            if "state" not in sample.labels
        }
        assert values["gpuscore_requests_waiting"] == STATS.requests
        assert values["gpuscore_tokens_waiting"] == STATS.tokens
        assert values["gpuscore_kv_usage_ratio"] == 0.1
        assert values["gpuscore_batches_total"] == STATS.batches
        assert values["gpuscore_computed_tokens_total"] == STATS.computed_tokens
        assert values["gpuscore_prefix_cache_tokens_total"] == STATS.cached_tokens
        assert values["gpuscore_retried_batches_total"] == STATS.retried_batches
        assert values["gpuscore_tokens_per_second"] == STATS.tokens_per_second
        for state in ("free", "cached", "used"):
            count = getattr(STATS, f"pages_{state}")
            assert f'gpuscore_kv_pages{{state="{state}"}} {count}.0' in reply.text

    def test_before_the_model_is_there_and_after_its_engine_has_died(self):
        dead = stub_service()
        dead.model.engine.close()
        for service, up in ((ScoringService(("m",), 1), 1), (dead, 0)):
            (reply,) = ask(service, {"method": "GET", "url": "/metrics"})
            assert reply.status_code == 200
            assert f"gpuscore_up {up}.0" in reply.text
            assert "gpuscore_ready 0.0" in reply.text
            assert "gpuscore_build_info{version=" in reply.text
            assert "gpuscore_kv_pages" not in reply.text

    def test_openmetrics(self, watched):
        reply = watched.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(reply.text)}
        assert {"gpuscore_requests", "gpuscore_queue_duration_seconds"} <= names
        assert all(name.startswith("gpuscore_") for name in names)

    def test_a_key_is_needed(self, watched):
        with connected(watched) as stranger:
            check_error(stranger.get("/metrics"), 401, "invalid_api_key")


class TestTimingHeaders:
    def test_the_stages_of_a_request(self, watched):
        header = score(watched.client, **BODY).headers["server-timing"]
        parts = dict(part.split(";dur=") for part in header.split(", "))
        assert list(parts) == [*STAGES, "total"]
        values = [float(value) for value in parts.values()]
        assert 0 < sum(values[:-1]) <= values[-1] + 0.01

    def test_only_when_asked(self, client):
        assert "server-timing" not in score(client, **BODY).headers


class TestDeadline:
    @pytest.mark.parametrize(
        "given", ["0", "-1", "+5", "1.5", "1e3", "", "x", "20001", "9" * 5000, "٧", "5,5"]
    )
    def test_a_header_that_is_none_is_refused_by_name(self, watched, given):
        sent = [(TIMEOUT, given[:1500].encode()), ("Content-Type", "application/json")]
        reply = watched.client.post("/v1/score", content=json.dumps(BODY), headers=sent)
        message = check_error(reply, 400, "invalid_request", TIMEOUT)
        assert "from 1 to 20000" in message

    def test_given_twice(self, watched):
        reply = watched.client.post(
            "/v1/score", json=BODY, headers=[(TIMEOUT, "9"), (TIMEOUT, "9")]
        )
        check_error(reply, 400, "invalid_request", TIMEOUT)

    @pytest.mark.parametrize("given", ["20000", "5000", "007000"])
    def test_enough_time(self, watched, given):
        reply = watched.client.post("/v1/score", json=BODY, headers={TIMEOUT: given})
        assert reply.status_code == 200

    @pytest.mark.parametrize(("headers", "seconds"), [({}, 120), ({TIMEOUT: "500"}, 0.5)])
    def test_the_engine_is_told(self, headers, seconds):
        service = stub_service()
        start = time.monotonic()
        request = {"method": "POST", "url": "/v1/score", "json": BODY, "headers": headers}
        assert ask(service, request)[0].status_code == 200
        (got,) = service.model.engine.requests
        assert start + seconds <= got.deadline <= time.monotonic() + seconds


class TestSalt:
    """Prefixes are shared within an API key only, and within a salt of it."""

    def test_the_engine_is_told(self):
        service = stub_service()
        bodies = [BODY, BODY | {"cache_salt": "s"}]
        requests = [
            {"method": "POST", "url": "/v1/score", "json": body, "headers": {"Authorization": key}}
            for key in (f"Bearer {ALICE}", f"Bearer {BOB}")
            for body in (*bodies, *bodies)
        ]
        replies = ask(service, *requests, keys=[ALICE.encode(), BOB.encode()])
        assert {reply.status_code for reply in replies} == {200}
        salts = [request.salt for request in service.model.engine.requests]
        assert salts[0:2] == salts[2:4]
        assert salts[4:6] == salts[6:8]
        assert len(set(salts)) == 4

    def test_no_pair_looks_like_another(self):
        pairs = [("a", None), ("a", "b"), ("ab", None), ("b", "a"), ("no-key", None)]
        assert len({cache_salt(*pair) for pair in pairs}) == len(pairs)
        assert "b" * 20 not in cache_salt("a", "b" * 20)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class TestTraces:
    @staticmethod
    def spans(*headers, body=BODY):
        """Finished spans of one score request."""
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        service = stub_service()
        operations = Operations(service, tracer=SpanTracer(provider))
        request = {"method": "POST", "url": "/v1/score", "json": body, "headers": list(headers)}
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

    def test_an_error(self):
        (span,) = self.spans(body={"items": 1})
        assert span.attributes["error.type"] == "invalid_request"
        assert "gpuscore.items" not in span.attributes

    @pytest.mark.parametrize(
        "given",
        [
            [],
            [""],
            [f"00-{TRACE}-{PARENT}"],
            [f"00-{'0' * 32}-{PARENT}-01"],
            [f"00-{TRACE}-{'0' * 16}-01"],
            [f"ff-{TRACE}-{PARENT}-01"],
            [f"00-{TRACE[:-1]}-{PARENT}-01"],
            [f"00-{TRACE[:-1]}z-{PARENT}-01"],
            [f"00-{TRACE}-{PARENT}-01-x"],
            [f"00-{TRACE}-{PARENT}-01"] * 2,
        ],
    )
    def test_anything_else_begins_a_trace(self, given):
        *_, span = self.spans(*(("traceparent", one) for one in given))
        assert span.parent is None
        assert f"{span.context.trace_id:032x}" != TRACE

    def test_a_trace_that_is_not_sampled(self):
        assert not self.spans(("traceparent", f"00-{TRACE}-{PARENT}-00"))

    def test_they_reach_a_collector(self, watched):
        name = uuid4().hex
        headers = {"X-Request-Id": name, "traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert watched.client.post("/v1/score", json=BODY, headers=headers).status_code == 200
        assert watched.line(name)["trace_id"] == TRACE
        wait_until(lambda: any(span.trace_id.hex() == TRACE for span in watched.spans()), 5)
        mine = [span.name for span in watched.spans() if span.trace_id.hex() == TRACE]
        assert sorted(mine) == sorted([*STAGES, "POST /v1/score"])

    @pytest.mark.parametrize(
        ("endpoint", "environment", "want"),
        [
            ("collector:4318", {}, "must begin with http:// or https://"),
            ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, endpoint, environment, want):
        with pytest.raises(ConfigError, match=want):
            read_tracer(ServerConfig(otlp_endpoint=endpoint), environment)

    ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}

    def test_who_asks_for_traces(self):
        assert read_tracer(ServerConfig(), {}) is None
        assert read_tracer(ServerConfig(), self.ASKED | {"OTEL_TRACES_EXPORTER": "none"}) is None
        off = self.ASKED | {"OTEL_SDK_DISABLED": "true"}
        assert read_tracer(ServerConfig(otlp_endpoint="http://c"), off) is None
        tracer = read_tracer(ServerConfig(), self.ASKED)
        assert tracer is not None
        tracer.close()

    @pytest.mark.parametrize(
        ("flags", "asked"),
        [
            ([], "OTEL_EXPORTER_OTLP_ENDPOINT"),
            (["--otlp-endpoint", "http://127.0.0.1:9"], "--otlp-endpoint"),
        ],
    )
    def test_without_the_extra(self, flags, asked):
        """It works, and says what is missing where traces are asked for."""
        code = (
            "import sys; sys.modules['opentelemetry.sdk'] = None\n"
            "import gpuscore.server.run, gpuscore.server.app\n"
            "from gpuscore.cli import main\n"
            "sys.exit(main(['serve', *sys.argv[1:]]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *flags],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | (self.ASKED if not flags else {}),
        )
        assert done.returncode == 78, done.stderr
        assert done.stderr.startswith(f"gpuscore: {asked} asks for traces")
        assert "pip install 'gpuscore[otel]'" in done.stderr
        assert done.stderr.count("\n") == 1

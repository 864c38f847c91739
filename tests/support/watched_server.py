"""A server whose log, traces and metrics are checked, and functions that send it any request."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from support.connections import Connection, Reply, post
from support.serving import wait_until

CANARY = "canary-Of-The-Caller"  # stands for a caller's text
ALICE, BOB = "key-that-alice-has", "key-that-bob-has"
BODY = {"query": [5, 6], "items": [[7], [8, 9], [10]], "label_token_ids": [3, 17]}
CHUNKED = ("Content-Type: application/json", "Transfer-Encoding: chunked")
TIMEOUT = "X-Request-Timeout-Ms"


def samples_of(client, only=None):
    """Return {(name, labels as a sorted tuple): value} of /metrics, of the given types only.

    The label of the first replica, which may be the only one, is left out, and the samples of all
    models are added up.
    """
    samples = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples if only is None or family.type in only else ():
            kept = {k: v for k, v in sample.labels.items() if (k, v) != ("replica", "0")}
            kept.pop("model", None)
            samples[sample.name, tuple(sorted(kept.items()))] += sample.value
    return dict(samples)


@dataclass
class Watched:
    """A server, its log, and the collector of its traces."""

    url: str
    client: httpx.Client
    log: Path
    traces: list[bytes]

    def line(self, request_id):
        """Return the log's only line about a request."""
        wait_until(lambda: request_id in self.log.read_text(encoding="utf-8"), 5)
        lines = [line for line in self.lines() if line.get("request_id") == request_id]
        assert len(lines) == 1
        return lines[0]

    def lines(self):
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def samples(self):
        return samples_of(self.client)

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
    """Run an HTTP server that keeps everything posted to it."""
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


def by_post(content=None, **headers):
    content = json.dumps(BODY).encode() if content is None else content
    return lambda watched, name: post(watched.client, content, X_Request_Id=name, **headers)


def by_get(path, method="GET"):
    return lambda watched, name: watched.client.request(
        method, path, headers={"X-Request-Id": name}
    )


def raw(*parts, key=True, path="/v1/score"):
    """Send a head with the text parts as fields, then the bytes parts as they are."""
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

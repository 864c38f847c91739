"""Promise: `gpuscore eval URL` ends with one line and exit code 2 if the server gives no scores; 1
says that a loss is not ruled out."""

import json
import socket
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from gpuscore.measure.evaluation.command import DEMO
from support import programs
from support.serving import QUICK, serving


def evaluated(tmp_path, url, **environment):
    rows = DEMO.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_text("".join(rows[:3]), encoding="utf-8")
    words = ["--data", tmp_path / "data.jsonl", "--output", tmp_path / "out", "--margin", "0.1"]
    return programs.run("eval", url, *words, **environment)


def check(done, url, message):
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpuscore: {url}: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert done.stderr.rstrip("\n").isprintable()


@contextmanager
def closed_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def answering(status, body):
    """Serve an answer that is the same for every request; a name of no status hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if status is not None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_is_not_there(tmp_path):
    with closed_port() as url:
        check(evaluated(tmp_path, url), url, "refused")


@pytest.mark.parametrize(
    "url", ["http://no-such-host.invalid", "http://", "http://[::1", "http://a:b"]
)
def test_an_address_that_leads_nowhere(tmp_path, url):
    check(evaluated(tmp_path, url), url, "")


ANSWERS = {
    "hangs up": (None, b"", "disconnected"),
    "another server's 404": (404, b"<html>\n\x1b[31mno\n", "404"),
    "a model that is not there": (
        404,
        json.dumps({"error": {"code": "model_not_found", "message": "no model\nx"}}).encode(),
        "404 model_not_found: no model\\nx",
    ),
    "no JSON": (200, b"\x1b[31mhello\n", ""),
    "other JSON": (200, b"{}", ""),
    "another one's error": (502, b"bad\ngateway", "502"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answers_without_scores(tmp_path, case):
    status, body, message = ANSWERS[case]
    with answering(status, body) as url:
        check(evaluated(tmp_path, url), url, message)


def test_a_wrong_key(tmp_path):
    with serving("demo", *QUICK, environment={"GPUSCORE_API_KEY": "right"}) as server:
        done = evaluated(tmp_path, server.url, GPUSCORE_API_KEY="wrong")
        check(done, server.url, "401 invalid_api_key")

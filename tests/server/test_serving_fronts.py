"""Promise: `gpuscore serve --http-workers` starts, refuses and stops as with one process."""

import re
import shutil
import signal
import socket

import httpx
import pytest

from support.programs import run
from support.serving import QUICK, RunningServer, serving
from support.tape_servers import engine_of, fronts_of

BODY = {
    "query": "query: a blue chair\nitem: ",
    "items": ["A chair.", "A lamp."],
    "labels": ["yes", "no"],
}


def anew(server: RunningServer, method: str, path: str, **options: object) -> httpx.Response:
    """Send a request over a new connection, which any front may get."""
    return httpx.request(method, f"{server.url}{path}", timeout=60, **options)


def test_text_is_scored_by_all_fronts():
    with serving("demo", *QUICK, "--http-workers", "3", "--no-log-requests") as server:
        assert len(fronts_of(server)) == 3
        assert engine_of(server)
        replies = [
            anew(server, "POST", "/v1/score", json=BODY) for _ in range(40)
        ]  # 3 in 10 million miss one
        assert {reply.status_code for reply in replies} == {200}
        assert len({reply.headers["x-request-id"][:20] for reply in replies}) == 3
        (first, *others) = (reply.json()["scores"] for reply in replies)
        assert all(scores == [pytest.approx(row, rel=1e-4) for row in first] for scores in others)
        models = {anew(server, "GET", "/v1/models").text for _ in range(6)}
        assert len(models) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
        assert "ready on" not in server.process.stdout.read(), "said once, before"


@pytest.mark.slow
def test_refused_starts(tiny_model, tmp_path):
    """Each is refused at another time: before, while and after the fronts start."""
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_model("llama")[0], directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, reason in (
            (("demo", "--port", port), f"cannot bind --host 127.0.0.1 --port {port}: .* in use"),
            ((directory, "--port", "0"), "cannot be read as safetensors"),
            (("demo", "--port", "0", "--otlp-endpoint", "ftp://x"), "must begin with http"),
            (("demo", "--port", "0", "--http-workers", "65"), "from 1 to 64"),
        ):
            done = run("serve", "--http-workers", "2", *arguments, *QUICK)
            assert done.returncode == 78, done
            assert done.stderr.startswith("gpuscore: ")
            assert done.stderr.count("\n") == 1, "one sentence, no traceback"
            assert re.search(reason, done.stderr), done.stderr

"""Promise: a start says what is served and how to use it, the printed request works, and a stop
says what it waits for."""

import json
import os
import re
import signal
import subprocess
import threading

import httpx
import pytest

from support.connections import connected, large_request, metric, post
from support.families import qwen_like
from support.models import make_model
from support.serving import SMALL, serving, wait_until
from support.slow import slow
from support.terminal import on_terminal

KEY = "key-of-alice"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rest(server) -> str:
    """Return what is printed from the address to the line to try, and run that line."""
    printed = []
    for line in server.process.stdout:
        printed.append(line)
        if line.startswith("curl "):
            break
    return "".join(printed)


def answer_of(command: str, **environment: str) -> dict:
    done = subprocess.run(
        command, shell=True, env=os.environ | environment, capture_output=True, timeout=60
    )
    return json.loads(done.stdout)


def demo(directory):
    return "demo"


def plain(directory):
    make_model(directory)
    return directory


def without_text(directory):
    make_model(directory)
    (directory / "tokenizer.json").unlink()
    return directory


def classes(directory):
    make_model(directory, "qwen3_classes")
    return directory


def like_qwen(directory):
    make_model(directory)
    qwen_like().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.mark.parametrize(
    ("make", "flags", "path", "field", "family"),
    [
        (demo, (), "/v1/rerank", "results", "demo"),
        *slow(
            (plain, (), "/v1/score", "scores", "none known, so no /rerank"),
            (plain, ("--max-model-len", "9"), "/v1/score", "scores", "none known"),
            (like_qwen, ("--family", "zerank"), "/v1/rerank", "results", "zerank"),
            (without_text, (), "/v1/score", "scores", "none known"),
            (classes, (), "/v1/classify", "data", "none known"),
            (like_qwen, ("--family", "qwen3guard-gen"), "/v1/classify", "data", "qwen3guard-gen"),
        ),
    ],
)
def test_the_printed_request_works(tmp_path, make, flags, path, field, family):
    with serving(make(tmp_path / "a model"), *SMALL, *flags) as server:
        shown = rest(server)
        rows = dict(re.findall(r"^  (.{9}) (.*)$", shown, re.MULTILINE))
        assert rows["family   "].startswith(family)
        assert path in rows["routes   "]
        assert ("no tokenizer.json" in rows.get("warning  ", "")) == (make is without_text)
        assert rows["runs on  "] == "float32 on cpu"
        assert rows["key      "] == "none"
        assert rows["to try   "] == f"{server.url}/"
        assert rows["API docs "] == f"{server.url}/docs"
        assert f"kill {server.process.pid};" in rows["to stop  "]
        assert re.fullmatch(r"[\d,]+ pages of 16, [\d,]+ tokens", rows["KV cache "])
        command = shown.splitlines()[-1]
        assert f"{server.url}{path} " in command
        assert field in answer_of(command), command


def test_a_start_and_a_stop_on_a_terminal():
    """Shows, with an API key, the log's text, a request, and what a stop waits for."""
    words = ("serve", "demo", "--port", "0", *SMALL)
    with on_terminal(*words, GPUSCORE_API_KEY=KEY) as (process, screen):
        wait_until(lambda: "\ncurl " in screen.text, 60)
        command = re.search(r"^curl .*$", screen.text, re.MULTILINE)[0]
        assert "results" in answer_of(command, GPUSCORE_API_KEY=KEY)
        assert answer_of(command, GPUSCORE_API_KEY="x")["error"]["code"] == "invalid_api_key"
        wait_until(lambda: "invalid_api_key" in screen.text)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        wait_until(lambda: "gpuscore: stopped" in screen.text)
    assert "key       required" in screen.text
    assert '{"time"' not in screen.text, "no JSON on a terminal"
    assert re.search(r"\d\d:\d\d:\d\d info: memory: weights", screen.text)
    line = r"\d\d:\d\d:\d\d POST /v1/rerank 200 items=3 prompt_tokens=\d+ .*total_ms=[\d.]+\s"
    assert re.search(line, screen.text)
    line = r"POST /v1/rerank 401 code=invalid_api_key total_ms=[\d.]+ request_id=\w+"
    assert re.search(line, screen.text)
    assert "gpuscore: stopping; no request is in flight" in screen.text


def test_a_stop_says_what_it_waits_for():
    flags = ("--no-log-requests", "--request-timeout", "55", "--compile", "off")  # slow
    with (
        serving("demo", *SMALL, *flags) as server,
        connected(server) as client,
    ):
        body = large_request(6_000, apply_softmax=True)
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(post(client, body)))
        thread.start()
        with connected(server) as other:
            wait_until(lambda: metric(other, "requests_waiting") >= 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=90) == 0
        thread.join()
        assert replies[0].status_code == 200
        shown = server.process.stdout.read()
    waiting = r"stopping; waiting for 1 request in flight, for at most (\d+) s; a second"
    assert 50 <= int(re.search(waiting, shown)[1]) <= 60
    assert shown.count("gpuscore: stopped\n") == 1

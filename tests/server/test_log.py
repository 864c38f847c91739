"""Promise: the log says what the server does, in short lines, and never blocks it."""

import hashlib
import json
import logging
import os
import re
import time
from uuid import uuid4

import pytest

from gpuscore.dialects.paths import PROBE_PATHS
from gpuscore.server.observe.operations import request_line
from gpuscore.system.log import LogWriter, log_line, logging_to
from gpuscore.types.record import STAGES, RequestRecord
from support.connections import post
from support.watched_server import ALICE, BODY, CANARY


class TestLog:
    def test_the_numbers_of_the_memory(self, watched):
        """The engine's process logs them when it has measured them."""
        lines = [line for line in watched.lines() if line["event"] == "log"]
        (line,) = (line for line in lines if line["message"].startswith("memory: "))
        assert line["level"] == "info"
        assert re.match(
            r"memory: weights [\d.]+ MiB, largest batch .* KV cache 16.0 MiB", line["message"]
        )

    def test_the_line_of_a_scored_request(self, watched):
        name, body = uuid4().hex, json.dumps(BODY).encode()
        start = time.monotonic()
        reply = post(watched.client, body, X_Request_Id=name)
        usage = reply.json()["usage"]
        line = watched.line(name)
        seconds = time.monotonic() - start  # the request may end after its answer is read
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
            "model": "tiny",
            "items": 3,
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "bytes_in": len(body),
            "bytes_out": len(reply.content),
        }

    def test_the_longest_line_is_short(self):
        record = RequestRecord("x" * 128, method="CONNECT", route="/v1/score", code="x" * 30)
        record.tenant, record.trace_id, record.status = "f" * 16, "f" * 32, 503
        record.model = "m" * 128
        record.items = record.prompt_tokens = record.cached_tokens = record.bytes_in = 2**40
        record.stages = dict.fromkeys(STAGES, (0.0, 1e5 / 3))
        assert len(request_line(record)) < 1024

    def test_probes_write_no_line(self, watched):
        assert {watched.client.get(path).status_code for path in PROBE_PATHS} == {200}
        post(watched.client, json.dumps(BODY).encode(), X_Request_Id="after-the-probes")
        assert watched.line("after-the-probes")["status"] == 200
        assert not {line.get("route") for line in watched.lines()} & {*PROBE_PATHS}

    def test_a_request_as_text(self):
        record = RequestRecord("a-request", method="POST", route="/v1/score", status=200)
        record.items, record.prompt_tokens, record.cached_tokens = 1, 1234, 1000
        record.seconds = 0.0123
        line = request_line(record, "text").decode()
        expected = "items=1 prompt_tokens=1234 cached_tokens=1000 total_ms=12.3"
        assert line[8:] == f" POST /v1/score 200 {expected}\n"
        record.status, record.code = 429, "overloaded"
        line = request_line(record, "text").decode()
        assert line.endswith(f" 429 code=overloaded {expected} request_id=a-request\n")

    @pytest.mark.parametrize("style", ["json", "text"])
    def test_an_exception_is_shown_without_its_message_in_either_format(self, style, tmp_path):
        path = tmp_path / "log"
        with path.open("wb") as file, LogWriter(file.fileno()) as writer:
            writer.style = style
            with logging_to(writer):
                try:
                    raise KeyError(CANARY)
                except KeyError:
                    logging.getLogger("test").exception("failed after %d items", 3)
        text = path.read_text()
        assert "KeyError" in text
        assert "test_log.py" in text
        assert "failed after 3 items" in text
        assert CANARY.lower() not in text.lower()
        assert text.startswith("{") == (style == "json")

    def test_a_long_message_is_cut(self):
        record = logging.makeLogRecord({"msg": "x" * 10**6, "levelno": logging.ERROR})
        assert len(log_line(record)) < 2500

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

    @pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX; the child only writes
    def test_lines_of_several_processes_do_not_mix(self):
        """Four processes write to the same pipe, which is often full."""
        reading, writing = os.pipe()
        pids = []
        for number in range(4):
            if (pid := os.fork()) == 0:
                writer = LogWriter(writing, capacity=2000)
                for count in range(2000):
                    writer.write(b"%d" % number * (50 + 7 * count % 300) + b"\n")
                writer.close(20)
                os._exit(0)
            pids.append(pid)
        os.close(writing)
        time.sleep(0.3)  # until the pipe is full and all of them wait for it
        with open(reading, "rb") as reader:
            lines = reader.read().splitlines()
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
        assert len(lines) == 8000
        assert all(len(set(line)) == 1 for line in lines)

"""Promise: the server takes the descriptors that its connections need, says at start if it may have
fewer, and one that has none left goes on: it logs this once a second and accepts again later."""

import json
import re
import resource
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from support.programs import COMMAND
from support.serving import QUICK, children, wait_until

CONNECTIONS, FEW = 300, 128


@contextmanager
def serving_with(soft, hard, log, *flags):
    """Start a server with limits of descriptors; yield its URL and its process."""
    limits = f"ulimit -Sn {soft} && ulimit -Hn {hard}"
    command = " ".join([COMMAND, "serve", "demo", "--port", "0", *QUICK, *flags])
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            ["sh", "-c", f"{limits} && exec {command}"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            ready = next(line for line in process.stdout if "ready on" in line)
            yield re.search(r"http://\S+", ready)[0], process
        finally:
            process.kill()


def soft_limit(pid):
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def lines(log):
    """Return the lines of the log, without those that only inform."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in entries if line["level"] != "info"]


def test_none_left(tmp_path):
    log = tmp_path / "log"
    with serving_with(FEW // 2, FEW, log) as (url, process), ExitStack() as opened:
        assert soft_limit(process.pid) == FEW
        (warning,) = lines(log)
        assert warning["level"] == "warning"
        assert re.findall(r"\d+", warning["message"]) == ["4096", "4224", str(FEW)]
        host, port = url.removeprefix("http://").split(":")
        began = time.monotonic()
        for _ in range(CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(port))))
        wait_until(lambda: len(lines(log)) > 2)
        opened.close()
        passed = time.monotonic() - began
        said = lines(log)[1:]
        assert len(said) <= passed + 1, "more than once a second"
        assert {line["level"] for line in said} == {"error"}
        assert f"{FEW} descriptors" in said[0]["message"]
        assert "traceback" not in said[0]
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200


@pytest.mark.slow
def test_the_limit_is_raised_as_far_as_needed(tmp_path):
    log = tmp_path / "log"
    with serving_with(100, 5000, log) as (_, process):
        limits = {soft_limit(pid) for pid in [process.pid, *children(process.pid)]}
        assert limits == {4096 + 128}
    assert lines(log) == []

"""Promise: the server takes the descriptors that its connections need, and with fewer it takes
fewer connections, so that some are always left."""

import re
import resource
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager

import httpx

from support.programs import COMMAND
from support.serving import QUICK

CONNECTIONS, FEW, TAKEN = 400, 576, 288


@contextmanager
def serving_with(soft, hard, log):
    """Start a server with limits of descriptors; yield its URL and its process."""
    limits = f"ulimit -Sn {soft} && ulimit -Hn {hard}"
    command = " ".join([COMMAND, "serve", "demo", "--port", "0", *QUICK])
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


def closed(sock):
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_fewer_than_its_connections_need(tmp_path):
    with serving_with(FEW // 2, FEW, tmp_path / "log") as (url, process), ExitStack() as opened:
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == FEW
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        socks = [socket.create_connection(address) for _ in range(CONNECTIONS)]
        for sock in socks:
            opened.enter_context(sock)
        time.sleep(1)
        assert sum(not closed(sock) for sock in socks) == TAKEN
        opened.close()
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert "traceback" not in (tmp_path / "log").read_text()


def test_the_limit_is_raised_as_far_as_needed(tmp_path):
    with serving_with(100, 5000, tmp_path / "log") as (_, process):
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == 4096 + 512

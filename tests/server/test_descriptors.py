"""Promise: the server takes the descriptors that its connections need, and with fewer it takes
fewer connections, so that some are always left."""

import re
import resource
import select
import socket
import subprocess
import time
from contextlib import ExitStack

import httpx
import pytest

from support.programs import start
from support.serving import SMALL

CONNECTIONS = 400


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "taken"),
    [(288, 576, 576, 288), (100, 5000, 4096 + 512, CONNECTIONS)],
    ids=["fewer than its connections need", "as many as needed"],
)
def test_descriptors(tmp_path, soft, hard, limit, taken):
    words = [str(soft), str(hard), "serve", "demo", "--port", "0", *SMALL]
    log = tmp_path / "log"
    with ExitStack() as opened:
        errors = opened.enter_context(log.open("wb"))
        process = start("support.limited", words, stdout=subprocess.PIPE, stderr=errors)
        opened.enter_context(process.stdout)
        opened.callback(process.wait)
        opened.callback(process.kill)
        ready = next(line for line in process.stdout if "ready on" in line)
        url = re.search(r"http://\S+", ready)[0]
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == limit
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        socks = [
            opened.enter_context(socket.create_connection(address)) for _ in range(CONNECTIONS)
        ]
        time.sleep(0.5)
        closed, _, _ = select.select(socks, [], [], 0)  # nothing else makes them readable
        assert len(socks) - len(closed) == taken
        for sock in socks:
            sock.close()
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert "traceback" not in log.read_text()

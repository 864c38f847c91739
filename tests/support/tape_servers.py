"""A real server over the tape, whose engine's process starts quickly."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from support import programs
from support.connections import Connection, connected, under_way
from support.programs import ENGINES
from support.serving import RunningServer, children, wait_until
from support.tape_engine import HELD, MARK, STUCK

# It restarts late enough for a test to see the loss, and gives up soon enough to wait for.
PATIENCE = {"delay": 0.7, "stopped": 2.5}


@contextmanager
def tape_server(
    patience=PATIENCE,
    server=None,
    engine=None,
    factory="prepare",
    fork=True,
    engines=1,
    environment=None,
):
    """Start a server and yield it with a client; with `fork` it is a fork of the fork server, and
    so are its first `engines`, otherwise a new interpreter."""
    quiet = {"log_requests": False} | (server or {})
    texts = [json.dumps(options or {}) for options in (patience, quiet, engine)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    start = programs.start if fork else programs.start_anew
    process = start(
        "support.tape_server",
        [f"support.tape_engine:{factory}", *texts],
        env=os.environ | {"PYTHONPATH": path, ENGINES: str(engines)} | (environment or {}),
        **streams,
    )
    try:
        line = process.stdout.readline()
        assert "ready on" in line, process.stderr.read()
        running_server = RunningServer(line.split("ready on ")[1].split(" ")[0], process)
        with connected(running_server) as client:
            yield running_server, client
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def engines_of(server):
    """Return the process ids of the server's engines."""
    return sorted(pid for pid in children(server.process.pid) if not children(pid))


def engine_of(server):
    """Return the process id of the server's engine."""
    (pid,) = engines_of(server)
    return pid


def body_of(*tokens):
    return json.dumps({"items": [[*tokens]], "label_token_ids": [3]}).encode()


JSON = {"content-type": "application/json"}


@contextmanager
def in_flight(client, *tokens):
    """Yield a connection whose request is in flight; with HELD or STUCK, once the engine computes
    it."""
    waits = not {HELD, STUCK}.isdisjoint(tokens)
    before = under_way(client)
    if waits:
        MARK.unlink(missing_ok=True)  # a killed child may have left it
    with Connection(client) as connection:
        connection.request(body=body_of(*tokens))
        wait_until(MARK.exists if waits else lambda: under_way(client) > before)
        try:
            yield connection
        finally:
            if waits:
                MARK.unlink(missing_ok=True)


def let_go(connection):
    """Release a held request and return its answer."""
    MARK.unlink()
    return connection.reply()

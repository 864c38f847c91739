"""A real server over the tape, whose engine's process starts at once."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from support.serving import RunningServer, children, wait_until
from support.tape_child import HELD, MARK, STUCK
from support.wire import Connection, connected, under_way

# Restarts late enough to be seen, gives up soon enough to wait for.
PATIENCE = {"first_delay": 0.7, "max_delay": 0.7, "stopped": 2.5}


@contextmanager
def tape_server(patience=PATIENCE, server=None, engine=None, factory="prepare"):
    quiet = {"log_requests": False} | (server or {})
    texts = [json.dumps(options or {}) for options in (patience, quiet, engine)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "support.tape_server",
            f"support.tape_child:{factory}",
            *texts,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )
    try:
        line = process.stdout.readline()
        assert "ready on" in line, process.communicate()
        running_server = RunningServer(line.split("ready on ")[1].split(" ")[0], process)
        with connected(running_server) as client:
            yield running_server, client
    finally:
        process.kill()
        process.communicate()


def engine_of(server):
    """The process id of the server's child."""
    (pid,) = children(server.process.pid)
    return pid


def body_of(*tokens):
    return json.dumps({"items": [[*tokens]], "label_token_ids": [3]}).encode()


JSON = {"content-type": "application/json"}


@contextmanager
def in_flight(client, *tokens):
    """A connection whose request was let in; with HELD or STUCK in it, the engine is at it."""
    waits = not {HELD, STUCK}.isdisjoint(tokens)
    before = under_way(client)
    if waits:
        MARK.unlink(missing_ok=True)  # a child that was killed may have left it
    with Connection(client) as connection:
        connection.request(body=body_of(*tokens))
        wait_until(MARK.exists if waits else lambda: under_way(client) > before)
        try:
            yield connection
        finally:
            if waits:
                MARK.unlink(missing_ok=True)


def let_go(connection):
    """The answer to a request that is held."""
    MARK.unlink()
    return connection.reply()

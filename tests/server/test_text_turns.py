"""Promise: a short text is answered before another key's long ones are done."""

import json

from support.connections import Connection, connected
from support.serving import RunningServer
from support.watched_server import ALICE, BOB

LONG = "The quick brown fox jumps over lazy dogs. " * 6_000  # four pieces of text work


def test_another_keys_short_text_goes_first(watched):
    server = RunningServer(watched.url, None)
    with connected(server, ALICE) as alice, connected(server, BOB) as bob:
        assert bob.post("/tokenize", json={"prompt": "warm"}).status_code == 200
        body = json.dumps({"prompt": LONG}).encode()
        connections = [Connection(alice) for _ in range(6)]
        for connection in connections:
            connection.request("POST", "/tokenize", body=body)
        assert bob.post("/tokenize", json={"prompt": "A lamp."}).json()["count"] > 0
        unanswered = sum(connection.silent for connection in connections)
        assert unanswered >= 4, "it waited for their ends"
        wanted = alice.post("/tokenize", json={"prompt": LONG}).content
        for connection in connections:
            reply = connection.reply()
            assert (reply.status, reply.body) == (200, wanted)
            connection.close()

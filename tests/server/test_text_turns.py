"""Promise: a short text is answered before another key's long ones are done."""

import json

from support.watching import ALICE, BOB
from support.wire import Connection, connected

LONG = "The quick brown fox jumps over lazy dogs. " * 24_000  # a second of work


class Server:
    def __init__(self, url):
        self.url = url


def test_another_keys_short_text_goes_first(watched):
    server = Server(watched.url)
    with connected(server, ALICE) as alice, connected(server, BOB) as bob:
        bob.post("/tokenize", json={"prompt": "warm"})
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

"""Promise: a request is the same however its bytes arrive, and nothing hides between two requests.

`test_corpus` sends malformed requests to a real server; this file feeds one connection, whose
application keeps what it gets.
"""

import asyncio
import random
from functools import partial

import httptools
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.server.http.protocol import MANY, SLICES, ScoreProtocol
from gpuscore.server.pacer import Pacer

HOST = b"Host: a\r\n"
POST = b"POST /v1/score HTTP/1.1\r\n" + HOST
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Behind: 1\r\n\r\n"


class Application:
    """A gate that admits every request and keeps [method, target, fields, body] of each."""

    def __init__(self, config):
        self.config = config
        self.requests, self.refused_errors = [], []
        self.at_once = self.most = 0

    def refusal(self, scope):
        return None

    def refused(self, scope, error):
        self.refused_errors.append(error)
        return error.status, [(b"content-length", b"0")], b""

    async def __call__(self, scope, receive, send):
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)  # as work that takes a while
        body, more = b"", True
        while more:
            message = await receive()
            if "broken" in scope["state"]:
                self.refused_errors.append(scope["state"]["broken"])
                break
            body, more = body + message["body"], message["more_body"]
        target = scope["raw_path"] + (b"?" + scope["query_string"]).rstrip(b"?")
        self.at_once -= 1
        self.requests.append([scope["method"].encode(), target, list(scope["headers"]), body])
        fields = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b""})


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.paused, self.closed = b"", False, False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = write_eof = close

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def get_write_buffer_size(self):
        return 0


def exchanged(*pieces, slow=True, **limits):
    """Return the application and the transport after these bytes have arrived."""

    async def run():
        app, wire = Application(ServerConfig(**limits)), Wire()
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        protocol = ScoreProtocol(
            config=config,
            server_state=ServerState(),
            app_state={},
            gate=app,
            turns=Pacer(partial(int, SLICES)),
            most=1,
        )
        protocol.connection_made(wire)
        for piece in pieces:
            for start in range(0, len(piece), 2**16):
                part = piece[start : start + 2**16]
                while wire.paused and not wire.closed:  # as a socket would wait
                    await asyncio.sleep(0)
                if wire.closed:
                    break
                protocol.get_buffer(-1)[: len(part)] = part
                protocol.buffer_updated(len(part))
                if slow:
                    await asyncio.sleep(0)
        for _ in range(300):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return app, wire

    return asyncio.run(run())


def requests_of(*pieces, **limits):
    app, _ = exchanged(*pieces, **limits)
    assert app.most <= 1, "one request at a time"
    return app.requests


def in_bytes(sent):
    return (sent[i : i + 1] for i in range(len(sent)))


STREAM = (
    POST
    + b"Content-Length: 5\r\nX-Odd:  \t a b \t \r\n\r\nabcde"
    + (POST + CHUNKS)
    + (b"\r\nGET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n")
    + (POST + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
    + b"GET /hidden HTTP/1.1\r\n\r\n"
)


def test_however_it_is_cut():
    whole = requests_of(STREAM)
    assert [r[0] for r in whole] == [b"POST", b"POST", b"GET", b"POST"]
    assert [r[3] for r in whole] == [b"abcde", b"abcde", b"", b"{}"]
    assert (b"x-odd", b"a b") in whole[0][2]
    assert all(name != b"x-behind" for request in whole for name, _ in request[2])
    assert requests_of(*in_bytes(STREAM)) == whole
    rng = random.Random(7)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(STREAM)), 5))
        pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert requests_of(*pieces, slow=rng.random() < 0.5) == whole


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_ignored_and_its_body_read(protocol):
    """Java's HttpClient asks for HTTP/2 like this with its first request."""
    fields = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAM\r\n" % protocol
    )
    sent = POST + fields + b"Content-Length: 5\r\n\r\nGET /" + POST + b"Content-Length: 0\r\n\r\n"
    for pieces in ([sent], in_bytes(sent)):
        assert [request[3] for request in requests_of(*pieces)] == [b"GET /", b""]
    assert [request[3] for request in requests_of(POST + fields + CHUNKS)] == [b"abcde"]


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\x16\x03\x01 /", b"\xc3\xa4 / HTTP/1.1\r\n", b"A" * 65 + b" / HTTP/1.1\r\n", b"( / "),
        b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"GET / RTSP/1.0\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        POST + b"Host: b\r\n\r\n",
        *(POST + b"X: a%sb: c\r\n\r\n" % end for end in (b"\r\n ", b"\n", b"\r", b"\0")),
        POST + b"X : a\r\n\r\n",
        *(POST + b"Content-Length: 2\r\nContent-Length: %d\r\n\r\n{}" % n for n in (2, 3)),
        *(POST + b"Content-Length: %s\r\n\r\n" % n for n in (b"+2", b"-2", b"2, 2", b"", b"0x2")),
        POST + b"Content-Length: 2\r\n" + CHUNKS,
        POST + CHUNKS.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n", 1),
        *(POST + CHUNKS.replace(b"chunked", n) for n in (b"gzip, chunked", b"chunked, x", b"x")),
        POST.replace(b"1.1", b"1.0") + CHUNKS,
        *(POST + CHUNKS.replace(b"3;", n + b";") for n in (b"0x3", b"-3", b"f" * 17)),
        POST + CHUNKS.replace(b"abc\r\n", b"abcd"),
        POST + CHUNKS.replace(b"abc\r\n", b"abc\n"),
        POST + CHUNKS.replace(b"0\r\n", b"0\n"),
    ],
)
def test_refused(sent):
    for pieces in ([sent], in_bytes(sent)):
        app, wire = exchanged(*pieces)
        assert [error.status for error in app.refused_errors] == [400]
        assert wire.closed


def test_a_head_at_the_limit():
    head = POST + b"X: " + b"y" * 300 + b"\r\nContent-Length: 9000\r\n\r\n"
    body = b"z" * 9000
    assert [request[3] for request in requests_of(head + body, max_header_bytes=len(head))] == [
        body
    ]
    for pieces in ([head], in_bytes(head), [head[:-9]]):
        app, wire = exchanged(*pieces, max_header_bytes=len(head) - 10)
        assert [error.status for error in app.refused_errors] == [431]
        assert wire.closed


@pytest.mark.parametrize("first", [b"0\r\nX: ", b"0\r\n", b"1;", b""])
@pytest.mark.parametrize(
    "unit", [b"a" * 50, b"X: a\r\n", b"1;b=cc\r\na\r\n", b"000000001\r\na\r\n"]
)
def test_bytes_around_chunks_are_counted(first, unit):
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n" + first + unit * 300
    app, wire = exchanged(sent, max_header_bytes=1000)
    assert [error.status for error in app.refused_errors] in ([400], [431])
    assert wire.closed


def test_a_turn_has_a_bound():
    """One read holds 13,000 chunks; other connections are served while they are parsed."""
    chunks = b"1\r\na\r\n" * 13_000
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert requests_of(head + chunks + b"0\r\n\r\n")[0][3] == b"a" * 13_000
    calls = []

    class Counting(httptools.HttpRequestParser):
        def feed_data(self, data):
            calls.append(data.count(b"\n"))
            super().feed_data(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httptools, "HttpRequestParser", Counting)
        requests_of(head + chunks + b"0\r\n\r\n")
    assert max(calls) < 2_000


@pytest.mark.parametrize("extra", range(8))
def test_an_end_where_a_part_is_cut(extra):
    """The part of a body with many chunks has a limit of bytes, which may fall into its end."""
    chunks = b"1;y%s\r\na\r\n" % (b"x" * extra) + b"1\r\na\r\n" * ((MANY - 9 - extra) // 6)
    sent = POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    sent += b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n"
    first, second = requests_of(sent)
    assert first[3] == b"a" * chunks.count(b"a")
    assert second[1] == b"/second"


class Whole:
    """The requests that llhttp alone finds in a stream it gets at once: [method, target, fields,
    body]."""

    def __init__(self, sent):
        self.requests, self.in_head = [], True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(sent)

    def on_message_begin(self):
        self.requests.append([b"", b"", [], b""])
        self.in_head = True

    def on_url(self, url):
        self.requests[-1][1] += url

    def on_header(self, name, value):
        if self.in_head:
            self.requests[-1][2].append((name.lower(), value))

    def on_headers_complete(self):
        self.in_head = False
        self.requests[-1][0] = self.parser.get_method()

    def on_body(self, body):
        self.requests[-1][3] += body


@st.composite
def a_request(draw):
    body = draw(st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n\r\n" * 3, b"0\r\n\r\n"])))
    head = b"%s /%s HTTP/1.1\r\nHost: a\r\n" % (
        draw(st.sampled_from([b"GET", b"POST", b"PUT"])),
        draw(st.sampled_from([b"", b"x?y", b"z" * 50])),
    )
    head += b"X: y\r\n" * draw(st.integers(0, 3))
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    parts = draw(st.lists(st.sampled_from([b"a", b"bcdefghijkl", b"\r\n\r\n", b"\r"]), max_size=6))
    chunks = b"".join(
        b"%x%s\r\n%s\r\n" % (len(part), draw(st.sampled_from([b"", b";a=b"])), part)
        for part in parts
    )
    trailers = draw(st.sampled_from([b"", b"X-Sum: 1\r\n"]))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(a_request(), min_size=1, max_size=4), st.lists(st.integers(0, 500), max_size=8))
def test_the_same_requests_as_llhttp_alone(requests, cuts):
    sent = b"".join(requests)
    cuts = sorted(min(cut, len(sent)) for cut in cuts)
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    assert requests_of(*pieces) == Whole(sent).requests

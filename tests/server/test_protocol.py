"""Promise: a request is the same however its bytes arrive, another parser sees no other requests,
and nothing hides between two requests.

One connection is fed, whose application keeps what it gets. The other parser is h11.
"""

import asyncio
from functools import partial

import h11
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gpuscore.config import ServerConfig
from gpuscore.server.http import protocol as served
from gpuscore.server.http.gate import SLICES
from gpuscore.server.http.protocol import ScoreProtocol
from gpuscore.server.service import Pacer
from support.floods import TELLING, UPGRADE

HOST = b"Host: a\r\n"
POST = b"POST /v1/score HTTP/1.1\r\n" + HOST
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Behind: 1\r\n\r\n"


class Application:
    """A gate that admits every request and keeps [method, target, fields, body] of each."""

    def __init__(self, config):
        self.config, self.turns = config, Pacer(partial(int, SLICES))
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
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        target = scope["raw_path"] + (b"?" + scope["query_string"]).rstrip(b"?")
        self.at_once -= 1
        if not more:
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


def exchanged(*pieces, **limits):
    """Return the application and the transport after these bytes have arrived."""

    async def run():
        app, wire = Application(ServerConfig(**limits)), Wire()
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
        protocol = ScoreProtocol(
            config=config,
            server_state=ServerState(),
            app_state={},
            gate=app,
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
                await asyncio.sleep(0)
        while wire.paused and not wire.closed:
            await asyncio.sleep(0)
        for _ in range(30):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return app, wire

    return asyncio.run(run())


def requests_of(*pieces, **limits):
    app, _ = exchanged(*pieces, **limits)
    assert app.most <= 1, "one request at a time"
    return app.requests


def in_bytes(sent):
    return [sent[i : i + 1] for i in range(len(sent))]


def as_h11_reads(sent):
    """Return the complete requests that h11 finds in a stream, up to what it refuses."""
    peer, requests = h11.Connection(h11.SERVER), []
    peer.receive_data(sent)
    try:
        while (event := peer.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                request = [event.method, event.target, list(event.headers), b""]
            elif isinstance(event, h11.Data):
                request[3] += event.data
            elif isinstance(event, h11.EndOfMessage):
                requests.append(request)
                peer.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                peer.send(h11.EndOfMessage())
                if peer.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                    break  # the connection ends here
                peer.start_next_cycle()
    except h11.RemoteProtocolError:
        pass
    return requests


def alike(requests):
    """Return requests without what the parsers write differently."""
    renamed = [
        [method, target, [(name.replace(b"-ignored", b""), value) for name, value in fields], body]
        for method, target, fields, body in requests
    ]
    return [[*request[:2], sorted(request[2]), request[3]] for request in renamed]


@st.composite
def a_request(draw):
    body = draw(st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n\r\n" * 3, b"0\r\n\r\n"])))
    head = b"%s /%s HTTP/1.1\r\nHost: a\r\n" % (
        draw(st.sampled_from([b"GET", b"POST", b"PUT"])),
        draw(st.sampled_from([b"", b"x?y", b"z" * 50])),
    )
    head += b"X-Odd:  \t a b \t \r\n" * draw(st.integers(0, 2))
    head += draw(st.sampled_from([b"", b"", UPGRADE, UPGRADE.replace(b"h2c", b"websocket")]))
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    parts = draw(st.lists(st.sampled_from([b"a", b"bcdefghijkl", b"\r\n\r\n", b"\r"]), max_size=6))
    chunks = b"".join(
        b"%x%s\r\n%s\r\n" % (len(part), draw(st.sampled_from([b"", b";a=b"])), part)
        for part in parts
    )
    trailers = draw(st.sampled_from([b"", b"X-Sum: 1\r\n"]))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


STREAMS = st.lists(a_request(), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 500), max_size=8)
CHANGES = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 2, 8, 40]), st.sampled_from(TELLING)),
    min_size=1,
    max_size=3,
)


def cut(sent, cuts):
    cuts = sorted(min(cut, len(sent)) for cut in cuts)
    return [sent[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]


@pytest.fixture(scope="class")
def short_parts():
    """Bodies with many lines are parsed in parts, as if requests were a hundred times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "MANY", 40)
        patch.setattr(served, "LINES", 3)
        yield


@pytest.mark.usefixtures("short_parts")
@settings(max_examples=60, deadline=None)
@given(STREAMS, CUTS)
def test_another_parser_sees_the_same_requests(requests, cuts):
    sent = b"".join(requests)
    found = requests_of(*cut(sent, cuts))
    assert len(found) == len(requests)
    assert alike(found) == alike(as_h11_reads(sent))
    assert all(name != b"x-sum" for request in found for name, _ in request[2])


@pytest.mark.usefixtures("short_parts")
@settings(max_examples=100, deadline=None)
@given(STREAMS, CHANGES, CUTS)
def test_nor_other_ones_in_a_stream_that_was_changed(requests, changes, cuts):
    sent = b"".join(requests)
    for start, length, piece in changes:
        start %= len(sent) + 1
        sent = sent[:start] + piece + sent[start + length :]
    whole, _ = exchanged(sent)
    other, _ = exchanged(*cut(sent, cuts))
    assert other.requests == whole.requests
    assert [e.status for e in other.refused_errors] == [e.status for e in whole.refused_errors]
    # h11 refuses more, such as empty lines before a request: then it reads nothing else, either.
    for ours, theirs in zip(alike(whole.requests), alike(as_h11_reads(sent)), strict=False):
        assert ours == theirs


HIDDEN = b"GET /hidden HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\x16\x03\x01 /", b"GET / RTSP/1.0\r\n" + HOST + b"\r\n", b"GET / HTTP/1.1\r\n\r\n"),
        POST + b"Host: b\r\n\r\n",
        POST.replace(b": a", b": a, b") + b"\r\n",
        *(POST + b"X: a%sb: c\r\n\r\n" % end for end in (b"\r\n ", b"\n", b"\r", b"\0")),
        POST + b"X : a\r\n\r\n",
        *(POST + b"Content-Length: 2\r\nContent-Length: %d\r\n\r\n{}" % n for n in (2, 3)),
        *(POST + b"Content-Length: %s\r\n\r\n" % n for n in (b"+2", b"-2", b"2, 2", b"", b"0x2")),
        POST + b"Content-Length: 2\r\n" + CHUNKS,
        POST + CHUNKS.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n", 1),
        POST + UPGRADE + b"Content-Length: 2\r\n" + CHUNKS,
        *(POST + CHUNKS.replace(b"chunked", n) for n in (b"gzip, chunked", b"chunked, x", b"x")),
        POST.replace(b"1.1", b"1.0") + CHUNKS,
        *(POST + CHUNKS.replace(b"3;", n + b";") for n in (b"0x3", b"-3", b"3_", b"f" * 17)),
        *(POST + CHUNKS.replace(b"abc\r\n", end) for end in (b"abcd", b"abc\n")),
        *(POST + CHUNKS.replace(b"0\r\n", end) for end in (b"0\n", b"0\r\nContent-Length: 9\r\n")),
        POST + CHUNKS.replace(b"a=b", b"a\nb"),
    ],
)
def test_refused(sent):
    """The connection ends, so that nothing behind it is a request."""
    for pieces in ([sent + HIDDEN], in_bytes(sent + HIDDEN)):
        app, wire = exchanged(*pieces)
        assert [error.status for error in app.refused_errors] == [400]
        assert app.requests == []
        assert wire.closed


def test_a_head_at_the_limit():
    head = POST + b"X: " + b"y" * 300 + b"\r\nContent-Length: 9000\r\n\r\n"
    body = b"z" * 9000
    found = requests_of(head + body, max_header_bytes=len(head))
    assert [request[3] for request in found] == [body]
    for pieces in ([head], in_bytes(head), [head[:-9]], [b"\r\n" * 400]):
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

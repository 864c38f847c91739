"""Promise: a request is the same however its bytes arrive, and nothing hides between two requests.

`test_wrong_requests.TestProtocol` sends malformed requests to a real server; this file tests the
rules alone.
"""

import random

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscore.errors import BodyTooLarge, GpuscoreError, HeaderTooLarge, InvalidRequest
from gpuscore.server.http import framing
from gpuscore.server.http.parser import RequestParser

HOST = b"Host: a\r\n"
POST = b"POST /v1/score HTTP/1.1\r\n" + HOST
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nX-Behind: 1\r\n\r\n"


class Owner:
    """An owner of a parser that keeps [method, target, fields, keep_alive, body, complete] per
    request."""

    def __init__(self):
        self.requests = []

    def on_head(self, head):
        request = [head.method, head.target, head.fields, head.keep_alive, b"", False]
        self.requests.append(request)

    def on_part(self, data):
        self.requests[-1][4] += data

    def on_end(self):
        self.requests[-1][5] = True


def parse(*pieces, max_head=2048):
    owner = Owner()
    parser = RequestParser(owner, max_head)
    for piece in pieces:
        feed(parser, piece)
    return owner.requests


def feed(parser, data):
    """Parse as much as possible."""
    parser.feed(data)
    while parser.step():
        pass


def bodies(*pieces):
    return [(request[4], request[5]) for request in parse(*pieces)]


STREAM = (
    POST
    + b"Content-Length: 5\r\nX-Odd:  \t a b \t \r\n\r\nabcde"
    + (POST + CHUNKS)
    + (b"\r\nGET /a?b=c HTTP/1.1\r\n" + HOST + b"\r\n")
    + (POST + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
    + b"GET /hidden HTTP/1.1\r\n\r\n"
)


def test_however_it_is_cut():
    whole = parse(STREAM)
    assert [r[0] for r in whole] == [b"POST", b"POST", b"GET", b"POST"]
    assert [r[3] for r in whole] == [True, True, True, False]
    assert [r[4] for r in whole] == [b"abcde", b"abcde", b"", b"{}"]
    assert all(r[5] for r in whole)
    assert (b"x-odd", b"a b") in whole[0][2]
    assert all(name != b"x-behind" for request in whole for name, _ in request[2])
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == whole
    rng = random.Random(7)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(STREAM)), 5))
        pieces = [STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        assert parse(*pieces) == whole


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_ignored_and_its_body_read(protocol):
    """Java's HttpClient asks for HTTP/2 like this with its first request."""
    fields = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAM\r\n" % protocol
    )
    sent = POST + fields + b"Content-Length: 5\r\n\r\nGET /" + POST + b"Content-Length: 0\r\n\r\n"
    expected = [(b"GET /", True), (b"", True)]
    assert bodies(sent) == expected
    assert bodies(*(sent[i : i + 1] for i in range(len(sent)))) == expected
    assert bodies(POST + fields + CHUNKS) == [(b"abcde", True)]


def test_methods_of_the_callers_own():
    for method in (b"BREW", b"post", b"X-Y", b"DESCRIBED"):
        sent = method + b" /x HTTP/1.1\r\n" + HOST + b"\r\n"
        assert parse(sent + sent[:0])[0][:2] == [method, b"/x"]
    assert [r[0] for r in parse(b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n" + POST + b"\r\n")] == [
        b"BREW",
        b"POST",
    ]


@pytest.mark.parametrize(
    "sent",
    [
        *(b"\x16\x03\x01 /", b"\xc3\xa4 / HTTP/1.1\r\n", b"A" * 65 + b" / HTTP/1.1\r\n", b"( / "),
        b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n" + HOST * 2 + b"\r\n",
        POST + b"Host: b\r\n\r\n",
        POST + b"X: a\r\n b\r\n\r\n",
        POST + b"X: a\n\r\n",
        POST + b"X: a\rb\r\n\r\n",
        POST + b"X : a\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        *(POST + b"Content-Length: %s\r\n\r\n" % n for n in (b"+2", b"-2", b"2, 2", b"", b"0x2")),
        POST + b"Content-Length: 2\r\n" + CHUNKS,
        POST + CHUNKS.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n", 1),
        *(POST + CHUNKS.replace(b"chunked", n) for n in (b"gzip, chunked", b"chunked, x", b"x")),
        *(POST + CHUNKS.replace(b"chunked", n) for n in (b"identity", b"chunked, chunked")),
        POST + b"Transfer-Encoding: identity\r\n" + CHUNKS,
        *(POST + CHUNKS.replace(b"3;", n + b";") for n in (b"0x3", b"-3", b"3 ", b"f" * 17)),
        POST + CHUNKS.replace(b"abc\r\n", b"abcd"),
        POST + CHUNKS.replace(b"abc\r\n", b"abc\n"),
    ],
)
def test_refused(sent):
    with pytest.raises(InvalidRequest):
        parse(sent)
    with pytest.raises(InvalidRequest):
        parse(*(sent[i : i + 1] for i in range(len(sent))))


def test_http_1_0_ends_with_its_answer():
    (only,) = parse(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n")
    assert only[3] is False


@pytest.mark.parametrize("step", [1, 7, 99, 5000])
@pytest.mark.parametrize("before", [b"", POST + b"Content-Length: 3\r\n\r\nabc"])
def test_a_head_without_end(step, before):
    sent = before + b"GET / HTTP/1.1\r\nX: " + b"y" * 5000
    parser, fed = RequestParser(Owner(), 200), 0

    def feed_all():
        nonlocal fed
        for start in range(0, len(sent), step):
            fed += step
            feed(parser, sent[start : start + step])

    with pytest.raises(HeaderTooLarge):
        feed_all()
    assert fed <= len(before) + 2 * 200 + step


def test_a_head_at_the_limit():
    head = POST + b"X: " + b"y" * 100 + b"\r\nContent-Length: 9000\r\n\r\n"
    body = b"z" * 9000
    assert bodies_of(head + body, len(head)) == [(body, True)]
    with pytest.raises(HeaderTooLarge):
        bodies_of(head + body, len(head) - 1)


def bodies_of(sent, max_head):
    return [(request[4], request[5]) for request in parse(sent, max_head=max_head)]


def test_an_error_of_the_owner_comes_out():
    class Unwilling(Owner):
        def on_head(self, head):
            raise GpuscoreError("no")

    with pytest.raises(GpuscoreError, match="no"):
        feed(RequestParser(Unwilling(), 2048), POST + b"\r\n")


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
    body = draw(st.binary(max_size=40))
    head = b"%s /%s HTTP/1.1\r\nHost: a\r\n" % (
        draw(st.sampled_from([b"GET", b"POST", b"PUT"])),
        draw(st.sampled_from([b"", b"x?y", b"z" * 50])),
    )
    head += b"X: y\r\n" * draw(st.integers(0, 3))
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    sizes = draw(st.lists(st.integers(1, 9), max_size=6))
    chunks = b"".join(
        b"%x%s\r\n%s\r\n" % (n, draw(st.sampled_from([b"", b";a=b"])), bytes(range(65, 65 + n)))
        for n in sizes
    )
    trailers = draw(st.sampled_from([b"", b"X-Sum: 1\r\n"]))
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(a_request(), min_size=1, max_size=4), st.lists(st.integers(0, 500), max_size=8))
def test_the_same_requests_as_llhttp_alone(requests, cuts):
    sent = b"".join(requests)
    cuts = sorted(min(cut, len(sent)) for cut in cuts)
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    parsed = parse(*pieces)
    assert [[r[0], r[1], r[2], r[4]] for r in parsed] == Whole(sent).requests
    assert all(request[5] for request in parsed)


def test_nothing_behind_a_request_is_parsed_with_it():
    parser = RequestParser(owner := Owner(), 2048)
    parser.feed(STREAM)
    steps = []
    while parser.step():
        steps.append(sum(request[5] for request in owner.requests))
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) == 1


def test_one_step_has_a_bound():
    """A step handles a bounded number of chunks; this one read holds 60,000."""
    parser = RequestParser(owner := Owner(), 2048)
    parser.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 60_000)
    assert parser.step()
    assert parser.step()
    assert 0 < len(owner.requests[0][4]) <= framing.CHUNKS


@pytest.mark.parametrize("behind", [b"0\r\nX: ", b"1;", b"00000000000000000"])
def test_bytes_around_chunks_without_end(behind):
    parser = RequestParser(Owner(), 200)
    feed(parser, POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(200 - len(POST) - 40):
        feed(parser, behind)
        behind = behind[-1:]
    with pytest.raises((HeaderTooLarge, InvalidRequest)):
        feed(parser, behind * 40)


def test_a_length_of_many_digits():
    with pytest.raises(BodyTooLarge):
        parse(POST + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 30))

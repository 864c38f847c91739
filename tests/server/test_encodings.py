"""Promise: bodies in gzip are read as if they were plain, on every route; limits count
unpacked bytes, a bomb is refused before it is unpacked, and other bytes are an error."""

import gzip
import json
import tracemalloc

import pytest

from gpuscore.config import RequestLimits, ServerConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.dialects.table import DIALECT_OF
from gpuscore.errors import InvalidRequest, Overloaded, UnsupportedMediaType
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.api.bodies import PIECE, unpacker
from gpuscore.server.http.admission import Admission, AdmittedRequest
from gpuscore.server.service import ScoringService
from gpuscore.text.joining import PromptBuilder
from support.connections import Connection, check_error, post
from support.stub_service import StubEngine

PACKED = {"content_encoding": "gzip"}
SCORED = {"query": [5] * 300, "items": [[7], [8]], "label_token_ids": [3, 4], "apply_softmax": True}
BODY = json.dumps(SCORED).encode()
LONG = bytes(range(256)) * 4 * (PIECE // 256) + b"end"


def unpacked(data, step):
    reader = unpacker(["gzip"])
    parts = []
    for start in range(0, len(data), step):
        parts += reader.pieces(data[start : start + step])
    reader.check_ended()
    assert max(map(len, parts), default=0) <= PIECE
    return b"".join(parts)


@pytest.mark.parametrize("step", [1, 63, 10**9])
@pytest.mark.parametrize("content", [b"", b"x", BODY, LONG], ids=["none", "one", "body", "long"])
def test_pieces_make_the_whole(step, content):
    packed = gzip.compress(content)
    if len(packed) / step < 10_000:
        assert unpacked(packed, step) == content


def test_what_is_not_the_encoding():
    whole = gzip.compress(BODY)
    wrongs = [b"{}", b"\0" * 40, whole[:9], whole[:-8] + bytes(4) + whole[-4:]]
    for wrong in wrongs:
        with pytest.raises(InvalidRequest):
            unpacked(wrong, 10**9)
    with pytest.raises(InvalidRequest, match="goes on after the end"):
        unpacked(whole + whole, 7)
    with pytest.raises(InvalidRequest, match="ends before"):
        unpacked(whole[:-1], 7)


# 280 bytes of gzip: zlib has taken them all when it has made PIECE bytes, and then finds a block of
# an unknown kind in the bits that it holds.
WRONG_BITS = bytes.fromhex("1f8b080000000000020302b00707040000000042fabfba2328") + bytes(254) + b">"


@pytest.mark.parametrize("step", [1, 63, 10**9])
def test_an_invalid_block_where_a_piece_is_full(step):
    with pytest.raises(InvalidRequest, match="not valid gzip"):
        unpacked(WRONG_BITS, step)


def test_a_bomb_takes_no_more_than_a_piece():
    bomb = gzip.compress(bytes(16 * 2**20))
    reader = unpacker(["gzip"])
    tracemalloc.start()
    try:
        assert len(next(reader.pieces(bomb))) == PIECE
        assert tracemalloc.get_traced_memory()[1] < 4 * PIECE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "fields", [["br"], ["deflate"], ["zstd"], ["gzip", "gzip"], ["gzip,gzip"], [""], ["*"]]
)
def test_other_encodings(fields):
    with pytest.raises(UnsupportedMediaType, match="identity or gzip"):
        unpacker(fields)


def test_names_are_read_in_any_case():
    assert unpacker([]) is unpacker([" Identity"]) is None
    assert unpacker(["GZIP"])
    assert unpacker(["identity, gzip "])


@pytest.mark.parametrize("path", sorted(DIALECT_OF))
def test_every_route_reads_them(demo, path):
    plain = json.dumps(DIALECT_OF[path].example).encode()
    expected = demo.post(path, content=plain, headers={"content-type": "application/json"})
    reply = demo.post(
        path,
        content=gzip.compress(plain),
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )
    assert reply.status_code == expected.status_code, reply.text
    bodies = [answer.json() for answer in (reply, expected)]
    keys, others = ((body[0] if isinstance(body, list) else body).keys() for body in bodies)
    assert keys == others


def test_over_http(limited, unharmed):
    limit = 2**20
    good = post(limited, gzip.compress(BODY), **PACKED)
    assert good.status_code == 200, good.text
    (first, _), (expected, _) = (
        response.json()["scores"] for response in (good, post(limited, BODY))
    )
    assert first == pytest.approx(expected, abs=1e-5)
    filled = BODY[:-1] + b" " * (limit - len(BODY)) + b"}"
    assert post(limited, gzip.compress(filled), **PACKED).status_code == 200
    for size in (limit + 1, 8 * limit):
        bomb = gzip.compress(filled + b" " * (size - limit))
        assert len(bomb) < limit // 4
        message = check_error(post(limited, bomb, **PACKED), 413, "body_too_large", None)
        assert message == f"the unpacked body is over {limit} bytes"
    for wrong in (BODY, gzip.compress(BODY)[:-1], b"", WRONG_BITS):
        check_error(post(limited, wrong, **PACKED), 400, "invalid_request", None)
    check_error(post(limited, BODY, content_encoding="br"), 415, "unsupported_media_type")


def test_unpacked_bytes_count_until_the_request_ends():
    model = ServedModel("m")
    engine = StubEngine()
    prompts = ModelPrompts(PromptBuilder(None, engine.limits, RequestLimits()))
    model.loaded = LoadedModel(engine, prompts)
    config = ServerConfig(max_queued_bytes=1000)
    admission = Admission(ScoringService([model]), config)
    first, other = AdmittedRequest("a"), AdmittedRequest("a")
    admission.add(first, 10)
    admission.add(first, 600)
    assert (admission.bytes, first.size) == (610, 610)
    admission.add(other, 10)
    with pytest.raises(Overloaded, match="bodies and answers of 610 bytes"):
        admission.add(other, 400)
    admission.leave(first)
    admission.add(other, 400)
    admission.leave(other)
    assert admission.bytes == 0


def test_a_bomb_is_refused_before_its_end(limited, unharmed):
    """The rest of the body is never sent."""
    start = gzip.compress(bytes(2**25), 1)[: 2**16 + 1]
    with Connection(limited) as connection:
        head = connection.head("POST", "/v1/score", "Content-Encoding: gzip", length=10**6)
        connection.send(head + start)
        check_error(connection.reply(), 413, "body_too_large", None)

"""Promise: both clients return what the server answers, as its structs; they ask again after 429
and 503, not before Retry-After and not after the deadline; a server that misbehaves costs a caller
neither memory nor time nor its terminal."""

import asyncio
import gzip
import json
import threading
import time
from itertools import chain, repeat

import httpx
import numpy as np
import pytest

from gpuscore.client import SHOWN, AsyncClient, BadAnswer, Client, ConnectionFailed, StatusError
from gpuscore.dialects import answers
from support.raw_server import NAME, answering, slowly
from support.serving import QUICK, serving

KEY = "schlüssel"
QUERY = "query: a blue lamp\nitem: "
ITEMS = [f"{colour} {thing}" for colour in ("blue", "red", "grün") for thing in ("lamp", "rug", "")]
LABELS = ["yes", "no"]
MB = 2**20


@pytest.fixture(scope="session")
def url():
    """A deterministic server, so that answers can be compared bit for bit."""
    key = {"GPUSCORE_API_KEY": KEY}
    with serving("demo", *QUICK, "--deterministic", environment=key) as running:
        yield running.url


def _wait_for(url, method, *arguments, key=KEY, options=None, **fields):
    with Client(url, key, **(options or {})) as client:
        return getattr(client, method)(*arguments, **fields)


def _run(url, method, *arguments, key=KEY, options=None, **fields):
    async def run():
        async with AsyncClient(url, key, **(options or {})) as client:
            return await getattr(client, method)(*arguments, **fields)

    return asyncio.run(run())


@pytest.fixture(params=[_wait_for, _run], ids=["sync", "async"])
def call(request):
    """call(url, method, *arguments, options={...}, **fields) asks by the sync or async client."""
    return request.param


PAIRS = [("lamp", item) for item in ITEMS]
PROMPTS = {"prompt": ITEMS[:2], "max_tokens": 0, "echo": True, "logprobs": 0}
BODIES = {
    "score": ("/v1/score", {"query": QUERY, "items": ITEMS}, (QUERY, ITEMS)),
    "rerank": ("/v1/rerank", {"query": "lamp", "documents": ITEMS}, ("lamp", ITEMS)),
    "score_pairs": ("/v1/score", {"queries": ["lamp"] * 9, "documents": ITEMS}, (PAIRS,)),
    "classify": ("/v1/classify", {"input": ITEMS[:2]}, (ITEMS[:2],)),
    "completions": ("/v1/completions", PROMPTS, (ITEMS[:2],)),
}
FIELDS = {
    "score": {"labels": LABELS, "return_label_logprobs": True, "return_label_mass": True},
    "rerank": {"top_n": 4, "raw_scores": True},
    "score_pairs": {"max_tokens_per_doc": 1},
    "classify": {"labels": LABELS},
    "completions": {"logprobs": 1, "max_tokens": 1},
}


@pytest.mark.parametrize("method", BODIES)
def test_a_method_returns_its_routes_answer(url, call, method):
    path, body, arguments = BODIES[method]
    key = {"Authorization": f"Bearer {KEY}".encode()}
    told = httpx.post(url + path, json=body | FIELDS[method], headers=key).json()
    answer = call(url, method, *arguments, **FIELDS[method])
    assert type(answer).__module__ == answers.__name__
    read = json.loads(answers.msgspec.json.encode(answer))
    for name in {"scores", "label_mass", "results", "data", "choices", "labels"} & set(told):
        assert read[name] == told[name]


SETS = [" a blue lamp.\n a red rug.\n", " it.\n"]
READ = {
    "score": ((QUERY, SETS), {"labels": LABELS, "score_extraction_token": ".\n"}),
    "completions": (
        ([[5, 6, 7, 8]],),
        {"max_tokens": 0, "echo": True, "prompt_logprob_token_ids": [[3, 9], [], [4]]},
    ),
}


@pytest.mark.parametrize("method", READ)
def test_several_rows_of_a_text(url, call, method):
    path, body, _ = BODIES[method]
    arguments, fields = READ[method]
    names = {"score": ("query", "items"), "completions": ("prompt",)}[method]
    body = dict(zip(names, arguments, strict=True)) | fields
    key = {"Authorization": f"Bearer {KEY}".encode()}
    told = httpx.post(url + path, json=body, headers=key).json()
    answer = call(url, method, *arguments, **fields)
    if method == "score":
        assert [*map(len, answer.scores)] == [2, 1]
        assert answer.scores == told["scores"]
    else:
        (choice,) = answer.choices
        assert [*map(len, choice.prompt_token_id_logprobs)] == [2, 0, 1]
        assert choice.prompt_token_id_logprobs == told["choices"][0]["prompt_token_id_logprobs"]


def test_arrays_are_lists(url, call):
    query, items = np.arange(9), [np.array([5, 6, 7]), [8], [np.int64(9), 9], np.int32([3])]
    plain = call(url, "score", [*range(9)], [[5, 6, 7], [8], [9, 9], [3]], label_token_ids=[1, 2])
    answer = call(url, "score", query, items, label_token_ids=np.array([1, 2]))
    assert answer.scores == plain.scores


@pytest.mark.parametrize("value", [b"a", {"a"}, float("nan"), "\ud800"])
def test_what_is_no_json(call, value):
    with pytest.raises((TypeError, ValueError)):
        call("http://127.0.0.1:9", "score", "q", [value])


def test_models(url, call):
    assert call(url, "models") == ["demo"]


def test_errors_say_what_and_which(url, call):
    with pytest.raises(StatusError, match="400 invalid_request: .*the same as labels") as caught:
        call(url, "classify", ["a"], labels=["yes", "yes"])
    assert (caught.value.code, caught.value.param) == ("invalid_request", "labels[1]")
    assert caught.value.request_id in str(caught.value)
    with pytest.raises(StatusError) as caught:
        call(url, "models", key="another")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    with pytest.raises(ConnectionFailed, match="ConnectError"):
        call("http://127.0.0.1:9", "models")


def test_threads_and_event_loops_share_a_client(url):
    """The client runs in a thread of its own, so a program with an event loop may use it."""
    before = {thread.name for thread in threading.enumerate()}
    found = []

    async def ask():
        found.append(client.score(QUERY, ITEMS, labels=LABELS).scores)

    with Client(url, KEY) as client:
        threads = [threading.Thread(target=asyncio.run, args=[ask()]) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    client.close()  # again
    assert found == found[:1] * 5
    assert {thread.name for thread in threading.enumerate()} <= before


def whole(content, *fields, status="200 OK"):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return head(f"Content-Length: {len(raw)}", *fields, status=status) + raw


def head(*fields, status="200 OK"):
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()


GOOD = whole({"data": [{"id": "m"}]})


def refusal(status, *fields):
    return whole({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}, *fields,
                 status=f"{status} No")  # fmt: skip


@pytest.mark.parametrize("status", [429, 503])
def test_it_is_asked_again_when_the_server_said(call, status):
    for fields, seconds in ((["Retry-After: 0"], 0), (["Retry-After: 1"], 1), ([], 1)):
        replies = iter([refusal(status, *fields), GOOD])
        with answering(lambda replies=replies: [next(replies)]) as server:
            start = time.monotonic()
            assert call(server.url, "models") == ["m"]
            assert seconds <= time.monotonic() - start < seconds + 0.9
        assert server.requests == 2


def test_no_wait_beyond_the_deadline(call):
    for when in ("60", "9" * 400):
        with answering(lambda when=when: [refusal(429, f"Retry-After: {when}")]) as server:
            start = time.monotonic()
            with pytest.raises(StatusError) as caught:
                call(server.url, "models", options={"deadline": 30})
            assert time.monotonic() - start < 5
            assert (caught.value.status, server.requests) == (429, 1)


@pytest.mark.parametrize("status", [302, 400, 401, 408, 413, 500, 502, 504])
def test_other_errors_are_raised_at_once(call, status):
    with answering(lambda: [refusal(status, "Retry-After: 0")]) as server:
        with pytest.raises(StatusError) as caught:
            call(server.url, "models")
        assert (caught.value.status, caught.value.code, server.requests) == (status, "c", 1)


TRICKLES = {
    "body": lambda: chain([head("Content-Length: 1000000")], slowly(repeat(b" "))),
    "head": lambda: chain([b"HTTP/1.1 200 OK\r\nX: "], slowly(repeat(b"a"))),
    "status": lambda: slowly(repeat(head(status="100 Continue"))),
    "retries": lambda: slowly([whole(b"", "Retry-After: 0", status="503 No")]),
}


@pytest.mark.parametrize("kind", TRICKLES)
def test_the_deadline_holds(call, kind):
    """Every read gets a byte in time, so only a limit on the whole call ends it."""
    before = {thread.name for thread in threading.enumerate()}
    with answering(TRICKLES[kind]) as server:
        start = time.monotonic()
        with pytest.raises((ConnectionFailed, StatusError)):
            call(server.url, "models", options={"deadline": 0.6})
        assert time.monotonic() - start < 10  # a machine may be busy
    assert {thread.name for thread in threading.enumerate()} <= before | {NAME}


def test_a_server_that_reads_slowly(call):
    with answering(list, read=False) as server, pytest.raises(ConnectionFailed, match="Timeout"):
        call(server.url, "score", "q", ["a" * 24 * MB], options={"deadline": 0.6})


ENDLESS = {
    "chunks": lambda: chain(
        [head("Transfer-Encoding: chunked")], repeat(b"400\r\n" + b" " * 1024 + b"\r\n")
    ),
    "until the end": lambda: chain([head()], repeat(bytes(2**16))),
    "an error": lambda: chain([head(status="429 No")], repeat(bytes(2**16))),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_endless_answers(call, kind):
    with answering(ENDLESS[kind]) as server:
        with pytest.raises(BadAnswer, match=f"over {MB} bytes .max_answer_bytes"):
            call(server.url, "models", options={"max_answer_bytes": MB})
        assert server.sent < 64 * MB  # what the machine holds between the two
    with answering(lambda: [GOOD]) as server:
        size = len(GOOD.partition(b"\r\n\r\n")[2])
        assert call(server.url, "models", options={"max_answer_bytes": size})
        with pytest.raises(BadAnswer):
            call(server.url, "models", options={"max_answer_bytes": size - 1})


EVIL = "\x1b[31mred\x1b[0m\r\n\x07\u202e\x9b"
NO_ANSWERS = [b"[" * 10**6, b"\xff", b"", b"{}", {"data": [{"id": 7}]}, {"data": [{EVIL: 1}]}]
PACKED = gzip.compress(b'{"data": []}')  # is not unpacked


@pytest.mark.parametrize("content", [*NO_ANSWERS, PACKED], ids=range(7))
def test_what_is_no_answer(call, content):
    packed = ["Content-Encoding: gzip"] if content is PACKED else []
    answer, raises = whole(content, *packed), pytest.raises(BadAnswer, match="not a _Models")
    with answering(lambda: [answer]) as server, raises as caught:
        call(server.url, "models")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("size", [1, 10**4])
def test_errors_hold_plain_text(call, size):
    text = EVIL * size
    error = {"message": text, "code": text, "param": text, "type": "t"}
    for content in ({"error": error}, text):
        raises, answer = pytest.raises(StatusError), whole(content, status="400 -")
        with answering(lambda answer=answer: [answer]) as server, raises as caught:
            call(server.url, "models")
        for shown in (caught.value.message, caught.value.param or "", str(caught.value)):
            assert shown.isprintable()
            assert len(shown) < SHOWN + 100

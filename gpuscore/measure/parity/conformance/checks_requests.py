"""C13 to C16 and C19 of the suite: edge cases and bad requests, which the server must survive."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpuscore.measure.parity.conformance.checks import Check, check
from gpuscore.measure.parity.conformance.server import (
    CANARY,
    CheckedServer,
    RequestRefused,
    ServerReply,
    Skipped,
)

REFUSALS = (400, 413, 415, 422)
FAR_TOO_LONG = 2**20 + 1  # tokens; longer than any known context

# Fields that make a valid request invalid, from the contract's table of edge cases.
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "items-null": {"items": None},
    "items-number": {"items": 42},
    "items-numbers": {"items": [42]},
    "labels-text": {"label_token_ids": "bad"},
    "label-fraction": {"label_token_ids": [1.5]},
    "label-boolean": {"label_token_ids": [True]},
    "mixed-types": {"query": "text", "items": [[5, 6]]},
    "softmax-number": {"apply_softmax": 7},
    "no-tokens": {"query": [], "items": [[]]},
}
BAD_BODIES = {
    "cut-short": b'{"query": [5], "items": [[6]',
    "list": b"[]",
    "empty": b"",
    "invalid-utf8": b'{"query": "\xff", "items": ["a"]}',
}


SURVIVES = "refused with a message, and the server keeps working"


def _refused(id: str, promise: str, content: bytes | None = None, **fields: Any) -> Check:
    """Return the check that a request is refused with a message and the server answers as before.

    Args:
        id: of the check.
        promise: of the check.
        content: of the request; without it, a valid body with other `fields`.
        fields: values, or functions of an id that the weights do not have.
    """

    def find(server: CheckedServer) -> str | None:
        beyond = server.vocab if server.vocab_known else 2**31 - 1
        made = {name: value(beyond) if callable(value) else value for name, value in fields.items()}
        body = server.body(server.ids(5), server.items(2, 3)) | made
        sent = json.dumps(body).encode() if content is None else content
        return _not_refused(server.client.send("POST", "/v1/score", sent)) or _harmed(server)

    return Check(id, promise, find)


def _not_refused(reply: ServerReply) -> str | None:
    if reply.status not in REFUSALS:
        return f"not refused, {reply}"
    return None if reply.message else f"refused without a message, {reply}"


def _harmed(server: CheckedServer) -> str | None:
    """Send a plain request after a bad one; return the fault that it shows, or None."""
    try:
        scores = server.ask(*CANARY)
    except RequestRefused as reason:
        return f"afterwards a plain request fails: {reason}"
    wrong = None if server.canary is None else server.differ(server.canary, scores)
    return f"before and after, a plain request's scores {wrong}" if wrong else None


@check("C13.no-items", "a request without items gets empty scores")
def no_items(server: CheckedServer) -> str | None:
    reply = server.send(server.ids(5), [])
    body = reply.body if isinstance(reply.body, dict) else {}
    return None if reply.status == 200 and body.get("scores") == [] else str(reply)


@check("C13.empty-item", "an empty item scores the query alone")
def empty_item(server: CheckedServer) -> str | None:
    query, item = server.ids(12), server.ids(4)
    expected = np.concatenate([server.ask(query[:-1], [query[-1:]]), server.ask(query, [item])])
    return server.differ(expected, server.ask(query, [[], item]))


@check("C13.empty-query", "an empty query scores the items alone")
def empty_query(server: CheckedServer) -> str | None:
    item = server.ids(12)
    return server.differ(server.ask(item[:5], [item[5:]]), server.ask([], [item]))


empty_labels = _refused(
    "C13.empty-labels", "an empty list of labels is refused", label_token_ids=[]
)


@check("C14.labels-null", "labels of null are refused, or stand for the model's own labels")
def null_labels(server: CheckedServer) -> str | None:
    """Check labels of null; a server of a ranking model may use the model's own labels then."""
    body = server.body(server.ids(5), server.items(2, 3)) | {"label_token_ids": None}
    reply = server.client.score(body)
    if reply.status != 200:
        return _not_refused(reply) or _harmed(server)
    scores = server.table(reply, len(body["items"]))
    if np.abs(scores.sum(axis=1) - 1).max() > server.tolerance:
        return f"rows of the model's own labels do not add up to 1: {scores.sum(axis=1)}"
    del body["label_token_ids"]
    left_out = server.table(server.client.score(body), len(body["items"]))
    if scores.shape != left_out.shape:
        return f"{scores.shape[1]} labels for null, {left_out.shape[1]} if labels are left out"
    wrong = server.differ(scores, left_out)
    return f"null labels and none {wrong}" if wrong else _harmed(server)


negative_label = _refused("C15.negative-label", "a label under 0 is refused", label_token_ids=[-1])
negative_token = _refused("C15.negative-token", "a token under 0 is refused", query=[5, -1])
label_beyond = _refused(
    "C15.label-beyond",
    "a label that the weights do not have is refused",
    label_token_ids=lambda beyond: [beyond],
)
token_beyond = _refused(
    "C15.token-beyond",
    "a token that the weights do not have is refused",
    items=lambda beyond: [[beyond]],
)


@check("C15.first-and-last", "the first and the last id are valid labels and tokens")
def first_and_last(server: CheckedServer) -> str | None:
    if not server.vocab_known:
        raise Skipped("needs --vocab-size")
    last = server.vocab - 1
    server.ask([0, last], [[0], [last]], [0, last])
    return None


@check("C16.counts", "1, 15, 128 and 512 items score the same")
def item_counts(server: CheckedServer) -> str | None:
    return server.first_ones(server.ids(20), server.items(*[4] * 512), (1, 15, 128), "of 512 items")


@check("C16.large", "500 items of 20 tokens on a query of 2,000, or as long as the context allows")
def large(server: CheckedServer) -> str | None:
    query, items = server.ids(server.query_len), server.items(*[20] * 500)
    expected = server.ask(query, items)
    some = [0, 137, 499]
    return server.differ(
        expected[some], np.concatenate([server.ask(query, [items[i]]) for i in some])
    )


@check("C16.long-item", "an item as long as a long query scores right")
def long_item(server: CheckedServer) -> str | None:
    query, items = server.ids(6), server.items(server.query_len, 3)
    swapped = server.ask([*query, *items[0][:-1]], [items[0][-1:]])
    return server.differ(swapped, server.ask(query, items)[:1])


@check("C16.too-long", "a prompt over the context is refused with the limit")
def too_long(server: CheckedServer) -> str | None:
    reply = server.send([5] * FAR_TOO_LONG, server.items(2))
    if wrong := _not_refused(reply):
        return wrong
    if not re.search(r"\d{2}", reply.message or ""):
        return f"the message has no limit in it: {reply}"
    return _harmed(server)


@check("C19.malformed", "a bad request beside good ones fails alone")
def malformed(server: CheckedServer) -> str | None:
    good = [server.body(server.ids(20), server.items(3, 5)) for _ in range(6)]
    expected = [server.scores(body) for body in good]
    bad = [good[0] | {"items": 42}, good[1] | {"label_token_ids": "bad"}]
    *replies, first, second = server.at_once([*good, *bad])
    for reply in (first, second):
        if wrong := _not_refused(reply):
            return wrong
    for scores, reply in zip(expected, replies, strict=True):
        if reply.status != 200:
            return f"a good request beside bad ones gets {reply}"
        if wrong := server.differ(scores, np.array(reply.body["scores"])):
            return f"good requests beside bad ones {wrong}"
    return None


@check("C19.health", "GET /health answers under load")
def health(server: CheckedServer) -> str | None:
    bodies = [server.body(server.ids(50), server.items(*[10] * 50)) for _ in range(8)]
    with ThreadPoolExecutor(max_workers=len(bodies)) as threads:
        under_way = [threads.submit(server.client.score, body) for body in bodies]
        reply = server.client.send("GET", "/health")
        lost = [answer for work in under_way if (answer := work.result()).status != 200]
    if reply.status != 200:
        return str(reply)
    return str(lost[0]) if lost else None


CHECKS = (
    *(value for value in list(vars().values()) if isinstance(value, Check)),
    *(_refused(f"C14.{name}", SURVIVES, **fields) for name, fields in BAD_FIELDS.items()),
    *(_refused(f"C14.{name}", SURVIVES, content) for name, content in BAD_BODIES.items()),
)

"""C1 to C12, C17, C18 and C20 of the suite: the scores of valid requests."""

from functools import partial

import numpy as np

from gpuscore.measure.parity.conformance.checks import Check, check
from gpuscore.measure.parity.conformance.server import CheckedServer, RequestRefused, Skipped
from gpuscore.types.batch import Float64Array

# SGLang #10979, with its spelling; reproducible to two digits, as the numbers in #18381 show.
CALIFORNIA = (
    "What is the capital of California? Answer Yes or No for each of the following options:",
    ["Scaramento", "San Jose", "San Francisco"],
    [9454, 2753],
    [[4.261e-06, 1.233e-05], [7.450e-05, 3.287e-04], [1.2306e-04, 3.1425e-04]],
)
# The two prompt pairs of SGLang's test_score_engine.py: query, items, item_first.
UPSTREAM = (
    ("I pledge allegiance", ["", " to"], False),
    (" is a city", ["Tokyo", "Japan"], True),
)
UPSTREAM_LABELS = (" to", " the")
HF_TOLERANCE = 0.01
TEXT_QUERY = "query: a quite blue wooden chair for the gar"


@check("C1.envelope", "the answer has scores, object and the requested model")
def envelope(server: CheckedServer) -> str | None:
    reply = server.send(server.ids(5), server.items(3, 2))
    body = reply.body
    if reply.status != 200 or not isinstance(body, dict) or "scores" not in body:
        return str(reply)
    if body.get("object") != "scoring":
        return f"object is {body.get('object')!r}"
    if body.get("model") != server.model:
        return f"model is {body.get('model')!r}, not {server.model!r}"
    return None


@check("C1.usage", "usage counts the tokens of all prompts and 0 completion tokens")
def usage(server: CheckedServer) -> str | None:
    query, items = server.ids(7), server.items(3, 2)
    counts = server.send(query, items).body.get("usage")
    if not isinstance(counts, dict):
        return f"usage is {counts!r}"
    tokens = sum(len(query) + len(item) for item in items)
    if (counts.get("prompt_tokens"), counts.get("completion_tokens")) != (tokens, 0):
        return f"usage is {counts}, the prompts have {tokens} tokens"
    return None


@check("C2.items", "rows are in the order of the items")
def rows_in_order(server: CheckedServer) -> str | None:
    query, items = server.ids(9), server.items(2, 5, 3, 7, 1)
    order = [3, 0, 4, 2, 1]
    expected = server.ask(query, items)
    return server.differ(expected[order], server.ask(query, [items[i] for i in order]))


@check("C2.labels", "columns are in the order of the labels")
def columns_in_order(server: CheckedServer) -> str | None:
    query, items, labels = server.ids(9), server.items(2, 5), server.labels
    expected = server.ask(query, items)
    return server.differ(expected[:, ::-1], server.ask(query, items, labels[::-1]))


@check("C3.sum", "softmax rows are probabilities that sum to 1")
def softmax_rows(server: CheckedServer) -> str | None:
    scores = server.ask(server.ids(9), server.items(1, 4, 8))
    wrong = np.abs(scores.sum(axis=1) - 1).max()
    if wrong > 1e-6 or scores.min() < 0 or scores.max() > 1:
        return f"sums are off by {wrong:.1e}, scores from {scores.min():g} to {scores.max():g}"
    return None


@check("C4.default", "softmax is off by default")
def softmax_is_off(server: CheckedServer) -> str | None:
    body = server.body(server.ids(9), server.items(1, 4))
    expected = server.scores(body | {"apply_softmax": False})
    del body["apply_softmax"]
    return server.differ(expected, server.scores(body))


@check("C4.range", "without softmax, a row's probabilities sum to at most 1")
def vocabulary_rows(server: CheckedServer) -> str | None:
    scores = server.ask(server.ids(9), server.items(1, 4, 8), apply_softmax=False)
    most = scores.sum(axis=1).max()
    if scores.min() < 0 or most > 1 + 1e-6:
        return f"the smallest score is {scores.min():g}, the largest sum of a row {most:g}"
    return None


@check("C4.renormalised", "softmax scores are the plain probabilities divided by their sum")
def renormalised(server: CheckedServer) -> str | None:
    query, items = server.ids(9), server.items(1, 4, 8)
    plain = server.ask(query, items, apply_softmax=False)
    total = plain.sum(axis=1, keepdims=True)
    if not total.all():
        raise Skipped("the labels' probabilities are 0")
    return server.differ(plain / total, server.ask(query, items))


@check("C5.subset", "a label's probability does not depend on the other labels")
def label_subset(server: CheckedServer) -> str | None:
    query, items = server.ids(9), server.items(1, 4)
    expected = server.ask(query, items, apply_softmax=False)
    got = server.ask(query, items, server.labels[1:2], apply_softmax=False)
    return _relative(expected[:, 1:2], got)


@check("C5.duplicates", "a label that is listed twice gets two equal columns")
def duplicate_labels(server: CheckedServer) -> str | None:
    a, b = server.labels[:2]
    scores = server.ask(server.ids(9), server.items(1, 4), [a, b, a], apply_softmax=False)
    same = np.array_equal(scores[:, 0], scores[:, 2])
    return None if same else "the two columns differ"


@check("C5.counts", "1, 2, 4, 8 and 50 labels get the same probabilities")
def label_counts(server: CheckedServer) -> str | None:
    query, items = server.ids(9), server.items(3, 4)
    labels = [int(id) for id in server.rng.choice(server.vocab, 50, replace=False)]
    expected = server.ask(query, items, labels, apply_softmax=False)
    for count in (1, 2, 4, 8):
        got = server.ask(query, items, labels[:count], apply_softmax=False)
        if wrong := _relative(expected[:, :count], got):
            return f"{count} labels: {wrong}"
    return None


@check("C6.text", "SGLang's two pairs of prompts score as in transformers")
def upstream_prompts(server: CheckedServer) -> str | None:
    encode = server.encoder()
    labels = [encode(text, add_special_tokens=False).ids for text in UPSTREAM_LABELS]
    if any(len(ids) != 1 for ids in labels):
        raise Skipped(f"{UPSTREAM_LABELS} are not one token each")
    columns = [ids[0] for ids in labels]
    for query, items, item_first in UPSTREAM:
        texts = [item + query if item_first else query + item for item in items]
        expected = server.exact([encode(text).ids for text in texts], columns)
        got = server.ask(query, items, columns, item_first=item_first)
        if (wrong := np.abs(expected - got).max()) > HF_TOLERANCE:
            return f"{query!r}: off by {wrong:.1e}"
    return None


@check("C6.ids", "token ids score as in transformers in float32")
def as_transformers(server: CheckedServer) -> str | None:
    query, items = server.ids(40), server.items(1, 4, 20, 9)
    expected = server.exact([query + item for item in items], server.labels)
    wrong = np.abs(expected - server.ask(query, items)).max()
    return None if wrong <= HF_TOLERANCE else f"off by {wrong:.1e}, at most {HF_TOLERANCE}"


@check("C7.item_first", "item_first swaps query and item, for several items too")
def item_first(server: CheckedServer) -> str | None:
    query, items = server.ids(11), server.items(4, 6, 3)
    expected = np.concatenate([server.ask(item, [query]) for item in items])
    return server.differ(expected, server.ask(query, items, item_first=True))


@check("C8.text", "text is scored as the ids of the joined string")
def text_is_its_ids(server: CheckedServer) -> str | None:
    encode = server.encoder()
    items = ["den", "den item: The chair", "ém ☃"]
    prompts = [encode(TEXT_QUERY + item).ids for item in items]
    expected = np.concatenate([server.ask(ids[:-1], [ids[-1:]]) for ids in prompts])
    return server.differ(expected, server.ask(TEXT_QUERY, items))


@check("C9.ids", "an item scores the same alone, with one other and with 32")
def alone_or_not(server: CheckedServer) -> str | None:
    items = server.items(*(1 + n % 9 for n in range(33)))
    return server.first_ones(server.ids(40), items, (1, 2), "items and 33")


@check("C9.text", "a text item scores the same alone, with one other and with 32")
def alone_or_not_text(server: CheckedServer) -> str | None:
    if not server.texts:
        raise Skipped("the server takes no text")
    items = [f"{n} item: chair {n * n}" for n in range(33)]
    return server.first_ones(TEXT_QUERY, items, (1, 2), "items and 33")


def _mutate(length: int, server: CheckedServer) -> str | None:
    """Change one item and compare the others; rounding is allowed, because shapes may change."""
    query, items = server.ids(40), server.items(*[6] * 12)
    before = server.ask(query, items)
    after = server.ask(query, [*items[:5], server.ids(length), *items[6:]])
    if np.array_equal(before[5], after[5]):
        raise RequestRefused("the item that was changed has the same scores")
    others = np.arange(12) != 5
    return server.differ(before[others], after[others])


isolation = Check(
    "C10.same-length", "other tokens in one item change no other item", partial(_mutate, 6)
)
isolation_of_lengths = Check(
    "C10.other-length", "another length of one item changes no other item", partial(_mutate, 19)
)


@check("C11.distinct", "distinct items have distinct scores")
def distinct(server: CheckedServer) -> str | None:
    scores = server.ask(server.ids(20), server.items(*[8] * 15))
    count = len(np.unique(scores, axis=0))
    return None if count == 15 else f"15 random items have {count} different rows"


@check("C11.identical", "identical items have equal scores")
def identical(server: CheckedServer) -> str | None:
    a, b = server.items(6, 6)
    scores = server.ask(server.ids(20), [a, b, a, a])
    return server.differ(scores[[0, 0]], scores[[2, 3]])


@check("C12.sizes", "the first 1, 3 and 8 of 64 items score the same without the others")
def sizes(server: CheckedServer) -> str | None:
    return server.first_ones(server.ids(20), server.items(*[5] * 64), (1, 3, 8), "of 64 items")


@check("C12.concurrent", "concurrent requests score as they do one after the other")
def concurrent(server: CheckedServer) -> str | None:
    bodies = [server.body(server.ids(8 + n), server.items(3, 1 + n)) for n in range(12)]
    expected = [server.scores(body) for body in bodies]
    strangers = [server.body(server.ids(30), server.items(*[4] * 16)) for _ in range(4)]
    replies = server.at_once([*bodies, *strangers])
    for scores, reply in zip(expected, replies, strict=False):
        if reply.status != 200:
            return str(reply)
        if wrong := server.differ(scores, np.array(reply.body["scores"])):
            return wrong
    return None


@check("C17.repeat", "a repeated request gets the same bits")
def repeated(server: CheckedServer) -> str | None:
    body = server.body(server.ids(40), server.items(5, 9, 2), apply_softmax=False)
    server.scores(body)  # fills the prefix cache, if there is one
    first, *others = (server.scores(body) for _ in range(5))
    worst = max(np.abs(first - other).max() for other in others)
    return None if worst == 0 else f"five repetitions differ by up to {worst:.1e}"


@check("C18.warm", "a cached prefix changes no score")
def warm(server: CheckedServer) -> str | None:
    query, items = server.ids(min(300, server.query_len)), server.items(5, 9)
    cold = server.ask(query, items)
    return server.differ(cold, server.ask(query, items))


@check("C18.changed", "another query is not answered from the first one's cache")
def changed(server: CheckedServer) -> str | None:
    query, items = server.ids(min(300, server.query_len)), server.items(5, 9)
    before = server.ask(query, items)
    other = server.ids(8) + query[8:]
    after = server.ask(other, items)
    if np.array_equal(before, after):
        return "a query with another beginning has the same scores"
    # The same prompts, but cut after one token, so that no cached prefix is used.
    return server.differ(server.ask(other[:1], [other[1:] + item for item in items]), after)


@check("C20.california", "SGLang's example for Qwen3-0.6B is reproduced within 5 %")
def known_answer(server: CheckedServer) -> str | None:
    if "qwen3-0.6b" not in server.model.lower() or not server.texts:
        raise Skipped("the served model's name does not contain Qwen3-0.6B")
    query, items, labels, expected = CALIFORNIA
    return _relative(np.array(expected), server.ask(query, items, labels, apply_softmax=False))


def _relative(expected: Float64Array, got: Float64Array) -> str | None:
    """Compare relatively, because probabilities over a whole vocabulary are very small."""
    wrong = np.abs(got / np.maximum(expected, 1e-300) - 1).max()
    return None if wrong <= 0.05 else f"off by {wrong:.1%}"


CHECKS = tuple(value for value in list(vars().values()) if isinstance(value, Check))

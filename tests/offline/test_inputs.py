"""Promise: one rule says what is a list, a text and token ids, for every method in this process:
any ordered iterable gives the scores of the plain list bit for bit, and everything else is refused
by name and place."""

from collections import deque
from copy import copy

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.errors import InvalidRequest
from gpuscore.ray import ScoreBatches

QUERY = "query: a blue lamp\nitem: "
TEXTS = ["A red lamp.", "A blue lamp of steel.", "", "A green rug."]
IDS = [[5, 6, 7], [8, 9, 10], [6, 6, 6]]
LABELS = ["yes", "no"]
SETTINGS = {"threads": 1, "deterministic": True, "compile": "on", "max_batch_tokens": 512}


class Series:
    """A list that is indexed by labels of its own, like a Series of pandas."""

    def __init__(self, values):
        self._values = {7 * len(values) - 7 * n: value for n, value in enumerate(values)}

    def __iter__(self):
        return iter(self._values.values())

    def __len__(self):
        return len(self._values)

    def __getitem__(self, label):
        return self._values[label]


def objects(values):
    made = np.empty(len(values), dtype=object)
    made[:] = list(values)
    return made


LISTS = {
    "tuple": tuple,
    "generator": lambda values: (value for value in values),
    "map": lambda values: map(copy, values),
    "iterator": iter,
    "deque": deque,
    "values of a dict": lambda values: dict(enumerate(values)).values(),
    "objects": objects,
    "labelled": Series,
}
OF_TEXTS = LISTS | {"array": np.array}
OF_IDS = LISTS | {
    "array [n, m]": np.array,
    "array of int32": lambda rows: np.array(rows, dtype=np.int32),
    "arrays": lambda rows: [np.array(row, dtype=np.uint16) for row in rows],
    "tuples": lambda rows: [tuple(row) for row in rows],
    "NumPy's integers": lambda rows: [[np.int64(number) for number in row] for row in rows],
    "generator of arrays": lambda rows: (np.array(row) for row in rows),
}


@pytest.fixture(scope="session")
def scorer():
    with Scorer("demo", **SETTINGS) as opened:
        yield opened


def same(got, expected):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", OF_TEXTS)
def test_lists_of_texts(scorer, kind):
    made = OF_TEXTS[kind]
    expected = scorer.score(QUERY, TEXTS, labels=LABELS)
    assert expected.scores.shape == (4, 2)
    answer = scorer.score(QUERY, made(TEXTS), labels=made(LABELS))
    same(answer.scores, expected.scores)
    assert answer.labels == expected.labels
    answer, wanted = scorer.rerank("lamp", made(TEXTS)), scorer.rerank("lamp", TEXTS)
    same(answer.scores, wanted.scores)
    assert answer.indices.tolist() == wanted.indices.tolist()
    assert answer.documents == wanted.documents
    prompts = [QUERY + text for text in TEXTS]
    answer = scorer.classify(made(prompts), labels=made(LABELS))
    same(answer.probabilities, scorer.classify(prompts, labels=LABELS).probabilities)
    assert answer.classes == ("yes", "no")


@pytest.mark.parametrize("kind", OF_IDS)
def test_lists_of_ids(scorer, kind):
    made = OF_IDS[kind]
    expected = scorer.score([1, 2], IDS, label_token_ids=[3, 4]).scores
    assert expected.shape == (3, 2)
    same(
        scorer.score(np.array([1, 2]), made(IDS), label_token_ids=np.array([3, 4])).scores, expected
    )
    expected = scorer.score([1, 2], IDS, label_token_ids=IDS).scores
    same(scorer.score((1, 2), made(IDS), label_token_ids=made(IDS)).scores, expected)
    expected = scorer.score([1, 2], IDS, label_sequences=IDS[:2])
    answer = scorer.score(range(1, 3), made(IDS), label_sequences=made(IDS[:2]))
    same(answer.scores, expected.scores)
    assert answer.labels == expected.labels


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_pairs(scorer, kind):
    made = LISTS[kind]
    pairs = [("a lamp", text) for text in TEXTS]
    # Pairs of one query are cut elsewhere on a server, so bits may differ.
    scores = scorer.score_pairs(made(pairs)).scores
    np.testing.assert_allclose(scores, scorer.score_pairs(pairs).scores, atol=1e-5)


def test_columns_of_a_pipeline(scorer):
    """The step for Ray Data refuses binary columns, by the row."""
    items, queries = np.array([*TEXTS, *TEXTS]), np.array(["a", "b"] * 4)
    for labels in (LABELS, None):
        step = ScoreBatches("demo", labels=labels, **SETTINGS)
        scores = step({"query": queries, "item": items})["scores"]
        if labels:
            alone = scorer.score("b", TEXTS[1::2], labels=labels).scores
            same(scores[[1, 3]], alone)
        for name, columns in (("item", (queries, objects([*TEXTS * 2][:7] + [b"a"]))),
                              ("query", (objects([b"a"] * 8), items))):  # fmt: skip
            place = 7 if name == "item" else 0
            with pytest.raises(InvalidRequest, match=rf"^{name}\[{place}\] is of type bytes"):
                step(dict(zip(("query", "item"), columns, strict=True)))


@pytest.mark.parametrize("labels", [LABELS, None])
def test_bad_rows_of_a_pipeline(scorer, labels):
    """Each says why, and all others have the scores that they have alone."""
    long = "word " * 9000
    rows = [
        *(("a", "x", ""), ("b", "", ""), ("a", long, "prompt_too_long: the row gives a prompt of")),
        *(("a", None, "invalid_request: item is null"), (7, "x", "invalid_request: query is of")),
        *((long, "x", "prompt_too_long: "), ("b", "y\ud800", "invalid_request: item holds")),
        *((long, "y", "prompt_too_long: "), ("a", "y", "")),
    ]
    queries, items, reasons = map(objects, zip(*rows, strict=True))
    step = ScoreBatches("demo", labels=labels, on_error="null", **SETTINGS)
    result = step({"n": np.arange(len(rows)), "query": queries, "item": items})
    assert list(result) == ["n", "query", "item", "scores", "error"]
    for reason, shown, scores in zip(reasons, result["error"], result["scores"], strict=True):
        assert shown.startswith(reason), shown
        assert bool(shown) == bool(reason)
        assert np.all(np.isnan(scores)) if reason else np.all(np.isfinite(scores))
    good = [row[:2] for row in rows if not row[2]]
    alone = (
        scorer.score_pairs(good).scores
        if labels is None
        else np.concatenate(
            [scorer.score(query, [item], labels=labels).scores for query, item in good]
        )
    )
    same(result["scores"][[not reason for reason in reasons]], alone)


def test_a_pipeline_refuses_what_all_rows_share():
    score = ScoreBatches("demo", labels=["yes", b"no"], on_error="null", **SETTINGS)
    columns = {name: objects(["a"]) for name in ("query", "item", "scores")}
    with pytest.raises(InvalidRequest, match="the rows already have a column scores"):
        score(columns)
    columns["error"] = columns.pop("scores")
    with pytest.raises(InvalidRequest, match="the rows already have a column error"):
        score(columns)
    del columns["error"]
    with pytest.raises(InvalidRequest, match=r"labels\[1\] is of type bytes"):
        score(columns)


def test_one_text_is_one_item(scorer):
    expected = scorer.score(QUERY, TEXTS[:1], labels=LABELS).scores
    same(scorer.score(QUERY, TEXTS[0], labels=LABELS).scores, expected)
    assert len(scorer.classify(QUERY, labels=LABELS).best) == 1
    assert scorer.score(QUERY, [], labels=LABELS).scores.shape == (0, 0)


def shown(value):
    """Return an id that is the same in every worker: without an address."""
    return type(value).__name__ if " at 0x" in repr(value) else repr(value)


NO_TEXTS = [b"lamp", bytearray(b"lamp"), memoryview(b"lamp"), 7, float("nan"), True, {"text": "a"}]
NO_IDS = [[True], [1, False], [1.0], np.array([1.5]), np.array([True]), np.array([[1]]), ["1"]]
NO_IDS += [[None], [1, b"2"], np.array(5), {1: 2}, {1, 2}, iter([1])]
NO_IDS += [np.array(["2020"], "datetime64[ns]")]
NO_LISTS = [b"ab", bytearray(b"ab"), memoryview(b"ab"), None, 7, {"a": 1}, {"a"}, frozenset("a")]
NO_LISTS += [np.array("a"), np.array(5), True]


def refused(place, method, *arguments, **more):
    with pytest.raises(InvalidRequest, match=place) as caught:
        method(*arguments, **more)
    assert caught.value.param


@pytest.mark.parametrize("value", [*NO_TEXTS, ["a"]], ids=shown)
def test_what_is_no_text(scorer, value):
    more = {"labels": LABELS}
    if not isinstance(value, list):
        refused(r"^items\[1\]", scorer.score, QUERY, ["a", value], **more)
        refused("^query", scorer.score, value, ["a"], **more)
    refused(r"^labels\[1\]", scorer.score, QUERY, ["a"], labels=["yes", value])
    refused("^query", scorer.rerank, value, ["a"])
    refused("^instruction", scorer.rerank, "lamp", ["a"], instruction=value)
    refused(r"^documents\[1\]", scorer.rerank, "lamp", ["a", value])
    refused(r"^pairs\[1\]", scorer.score_pairs, [("a", "b"), ("a", value)])
    refused(r"^pairs\[0\]", scorer.score_pairs, [(value, "b")])
    refused(r"^texts\[1\]", scorer.classify, ["a", value], **more)
    refused("^query", scorer.classify, ["a"], query=value, **more)
    refused(r"^labels\[0\]", scorer.classify, ["a"], labels=[value, "no"])


@pytest.mark.parametrize("value", NO_IDS, ids=shown)
def test_what_is_no_ids(scorer, value):
    more = {"label_token_ids": [3]}
    refused(r"^items\[1\]", scorer.score, [1], [[1], value], **more)
    refused("^query", scorer.score, value, [[1]], **more)
    refused(r"^label_sequences\[1\]", scorer.score, [1], [[1]], label_sequences=[[2], value])
    refused(r"^label_token_ids", scorer.score, [1], [[1], [2]], label_token_ids=[[2], value])


@pytest.mark.parametrize("value", NO_LISTS, ids=shown)
def test_what_is_no_list(scorer, value):
    refused("^items", scorer.score, QUERY, value, labels=LABELS)
    refused("^documents", scorer.rerank, "lamp", value)
    refused("^pairs", scorer.score_pairs, value)
    refused("^texts", scorer.classify, value, labels=LABELS)
    refused("^label_sequences", scorer.score, [1], [[1]], label_sequences=value or 0)
    refused("^label_token_ids", scorer.score, [1], [[1]], label_token_ids=value or 0)


def test_options_that_do_not_exist(scorer):
    calls = {"score": ("q", ["a"]), "classify": (["a"],), "rerank": ("q", ["a"])}
    for method, arguments in (calls | {"score_pairs": ([("q", "a")],)}).items():
        with pytest.raises(TypeError, match="'lables'; known are .*, on_error|'lables'.* labels, "):
            getattr(scorer, method)(*arguments, lables=["yes"])


def test_a_text_is_no_list(scorer):
    refused("^labels", scorer.score, QUERY, ["a"], labels="yes")
    refused("^documents", scorer.rerank, "lamp", "a lamp")
    refused("^pairs", scorer.score_pairs, "ab")


@pytest.mark.parametrize("value", NO_TEXTS, ids=shown)
def test_a_bad_item_alone(scorer, value):
    """With `on_error="null"` it gets no score, also in a generator."""
    alone = scorer.score(QUERY, ["a", "b"], labels=LABELS).scores
    result = scorer.score(QUERY, iter(["a", value, "b"]), labels=LABELS, on_error="null")
    same(result.scores[[0, 2]], alone)
    assert [error.index for error in result.errors] == [1]
    result = scorer.score([1], [[1], [2, True], [3]], label_token_ids=[4], on_error="null")
    assert [error.message for error in result.errors] == [
        "items[1][1] is of type bool; it must be an integer"
    ]

"""Promise: equal items of a request are computed once, get the same bits and keep their order."""

import numpy as np
import pytest

from gpuscore import Scorer
from gpuscore.engine.engine import Engine
from gpuscore.errors import NonfiniteScore
from gpuscore.types.request import LabelTrie, ScoreRequest
from support.models import make_model, random_ids
from support.tape_backend import TapeBackend, tape_logit, tape_lse

QUERY = (1, 2, 3)
ITEMS = ([7, 8], [9], [7, 8], [5, 6, 4], [9], [7, 8], [5, 6])


def request_of(items=ITEMS, labels=None, **more):
    ids = tuple(np.array(item, np.int32) for item in items)
    labels = labels or tuple(np.array([11, 12], np.int32) for _ in ids)
    return ScoreRequest(np.array(QUERY, np.int32), ids, labels, **{"need_lse": True} | more)


def answer(request, backend=None, progress=None):
    backend = backend or TapeBackend()
    engine = Engine(backend)
    try:
        return engine.score(request, progress).result(30)
    finally:
        engine.close()


def test_equal_items_are_computed_once():
    done = []
    result = answer(request_of(), progress=done.append)
    assert result.computed_tokens == len(QUERY) + 2 + 1 + 3 + 2
    for item, row, lse in zip(ITEMS, result.label_logits, result.lse, strict=True):
        assert row.tolist() == [tape_logit([*QUERY, *item], label) for label in (11, 12)]
        assert lse == tape_lse([*QUERY, *item])
    assert done[-1] == len(ITEMS)


def test_equal_items_with_other_labels_are_not_equal():
    labels = tuple(np.array([11 + i % 2], np.int32) for i in range(4))
    result = answer(request_of([[7]] * 4, labels))
    expected = [tape_logit([*QUERY, 7], int(ids[0])) for ids in labels]
    assert [float(row[0]) for row in result.label_logits] == expected


def test_labels_of_several_tokens_below_equal_items_are_computed_once():
    trie = LabelTrie(((12, 7), (9,), (12, 8, 3)))
    alone, every = (
        answer(request_of(items, (trie.first_ids,) * len(items), trie=trie))
        for items in ([[7, 8], [9]], [[7, 8], [9], [9], [7, 8]])
    )
    assert every.computed_tokens == alone.computed_tokens
    rows = [row.tolist() for row in alone.label_logits]
    assert [row.tolist() for row in every.label_logits] == [rows[0], rows[1], rows[1], rows[0]]


def test_an_error_names_the_callers_item():
    class Nan(TapeBackend):
        def collect(self, pending):
            scores = super().collect(pending)
            bad = np.repeat(scores.lse == tape_lse([*QUERY, 5, 6, 4]), 2)
            scores.label_logits[bad] = np.nan
            return scores

    with pytest.raises(NonfiniteScore, match=r"items\[3\]"):
        answer(request_of(), Nan())


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_equal_documents_have_the_same_bits_in_every_batch(tmp_path, backend):
    """A document stands at other places and beside other rows in each batch of 64 tokens."""
    make_model(tmp_path)
    rng = np.random.default_rng(3)
    documents = [random_ids(rng, length) for length in rng.integers(1, 40, 12)]
    chosen = rng.integers(0, len(documents), 60).tolist()
    items = [documents[number] for number in chosen]
    query = random_ids(rng, 9)
    with Scorer(str(tmp_path), backend=backend, dtype="float32", max_batch_tokens=64) as scorer:
        result = scorer.score(query, items, label_token_ids=[1, 2], logprobs=True)
        rows = zip(chosen, result.logprobs, strict=True)
        assert len({(number, row.tobytes()) for number, row in rows}) == len(set(chosen))
    assert result.prompt_tokens == sum(len(query) + len(item) for item in items)
    once = len(query) + sum(len(documents[number]) for number in set(chosen))
    assert result.prompt_tokens - result.cached_tokens <= once


def test_equal_documents_keep_the_order_of_the_request():
    rng = np.random.default_rng(4)
    words = ["a", "blue", "wooden", "chair", "for", "the", "garden", "red", "steel", "glass"]
    documents = [" ".join(rng.choice(words, size)) for size in rng.integers(2, 30, 12)]
    repeated = [documents[number] for number in rng.integers(0, 12, 163)]
    with Scorer("demo", backend="jax", max_batch_tokens=128) as scorer:
        ranking = scorer.rerank("a wooden chair", repeated)
    places = ranking.indices.tolist()
    scores = dict(zip(places, ranking.scores.tolist(), strict=True))
    for document in documents:
        equal = [place for place in places if repeated[place] == document]
        assert equal == sorted(equal)
        assert len({scores[place] for place in equal}) <= 1

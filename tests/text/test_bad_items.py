"""Promise: a request whose bad items are left out is the request without them, to the last
array; each of them has the error that it would be alone."""

import gc
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    DeadlineExceeded,
    EmptyLabels,
    GpuscoreError,
    InvalidRequest,
    MissingLabels,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyItems,
    TooManyTokens,
)
from gpuscore.prompts import registry
from gpuscore.prompts.documents import FamilyPrompts
from gpuscore.prompts.rerank_input import RerankInput
from gpuscore.text.boundaries import PIECE_CHARS
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from gpuscore.types.item_errors import ItemError, ItemErrors, renumbered
from gpuscore.types.results import spread
from support.counted_turns import Turned
from support.families import qwen_like
from support.models import VOCAB, make_tokenizer

LIMITS = BackendLimits(64, 16, 100, 40, VOCAB)
LONG = "x " * PIECE_CHARS  # refused before it is encoded to its end
ID_ITEMS = [[7], [8, 9], [], [1] * 12, [VOCAB - 1]]
BAD_ID_ITEMS = [[1] * 41, [VOCAB], [-1], [2**70], [1] * 5000]
TEXT_ITEMS = ["wooden chair", "", " a", "é☃", "<|end|>"]
BAD_TEXT_ITEMS = ["chair " * 60, LONG, "half \ud800"]


def builder(chunk=0, **limits):
    backend = replace(LIMITS, deterministic_chunk=chunk)
    return PromptBuilder(TextEncoder(make_tokenizer(bos=False)), backend, RequestLimits(**limits))


@pytest.fixture(scope="module", params=[0, 16], ids=["", "deterministic"])
def made(request):
    return builder(request.param)


def check_same(built, wanted):
    if wanted is None:
        assert built is None
        return
    for field in structs.fields(wanted):
        value, wanted_value = getattr(built, field.name), getattr(wanted, field.name)
        if isinstance(wanted_value, tuple):
            assert len(value) == len(wanted_value)
            assert all(np.array_equal(a, b) for a, b in zip(value, wanted_value, strict=True)), (
                field.name
            )
        else:
            assert np.array_equal(value, wanted_value), field.name


def check_errors(errors, bad, alone):
    """Check that exactly the bad items have errors, each the one that `alone(index)` raises."""
    listed = errors.listed()
    assert [error.index for error in listed] == bad
    for error in listed:
        with pytest.raises(GpuscoreError) as raised:
            alone(error.index)
        assert error.code == raised.value.code
        assert error.message == raised.value.message.replace("[0]", f"[{error.index}]")


@pytest.mark.parametrize("kind", ["ids", "text"])
@pytest.mark.parametrize("item_first", [False, True])
def test_what_is_left_is_the_request_without_them(made, kind, item_first):
    rng = random.Random(f"{kind}{item_first}")
    good, bad = (ID_ITEMS, BAD_ID_ITEMS) if kind == "ids" else (TEXT_ITEMS, BAD_TEXT_ITEMS)
    queries = [[5, 6], [5], []] if kind == "ids" else ["query: a wood", "a"]
    for _ in range(25):
        picked = [(rng.random() < 0.4) for _ in range(rng.randint(1, 6))]
        query = rng.choice(queries)
        items = [rng.choice(bad if wrong else good) for wrong in picked]
        wrong = [wrong or not (query or item) for wrong, item in zip(picked, items, strict=True)]
        own = [[1 + index, 2] for index in range(len(items))]
        labels = rng.choice([[1], own])

        def score_input(indices, query=query, items=items, labels=labels, own=own):
            ids = [own[index] for index in indices] if labels is own else labels
            chosen = [items[index] for index in indices]
            return ScoreInput(query, chosen, label_token_ids=ids, item_first=item_first)

        errors = ItemErrors()
        built = made.build(score_input(range(len(items))), errors)
        left = [index for index, is_wrong in enumerate(wrong) if not is_wrong]
        check_same(built, made.build(score_input(left)) if left else None)
        expected = [index for index, is_wrong in enumerate(wrong) if is_wrong]
        if "half \ud800" in items:  # only named by its item's place in `build_rest`
            assert [error.index for error in errors.listed()] == expected
        else:
            check_errors(
                errors, expected, lambda i, score_input=score_input: made.build(score_input([i]))
            )


def test_errors_of_the_whole_request(made):
    def ask(query, items, **options):
        options = {"label_token_ids": [1]} | options
        return made.build(ScoreInput(query, items, **options), ItemErrors())

    for query in ([1] * 41, "chair " * 60, LONG):
        items = [[1], [2]] if isinstance(query, list) else ["a", "b"]
        for item_first in (False, True):
            with pytest.raises(PromptTooLong, match="query alone gives a prompt of") as raised:
                ask(query, items, item_first=item_first)
            assert raised.value.param == "query"
    with pytest.raises(PromptTooLong, match="query alone"):
        ask(LONG, ["a"])
    with pytest.raises(TokenIdOutOfRange, match="query holds"):
        ask([VOCAB], [[1], [1] * 99])
    with pytest.raises(InvalidRequest, match="query holds a lone surrogate"):
        ask("\ud800", ["a"])
    with pytest.raises(MissingLabels):
        ask([1], [[VOCAB]], label_token_ids=None)
    with pytest.raises(TokenIdOutOfRange, match=r"label_token_ids\[1\]"):
        ask([1], [[VOCAB], [2]], label_token_ids=[[1], [VOCAB]])
    with pytest.raises(EmptyLabels):
        ask([1], [[VOCAB], [2]], label_token_ids=[[], [1]])
    with pytest.raises(TooManyItems):
        builder(max_items=1).build(
            ScoreInput([1], [[2], [VOCAB]], label_token_ids=[1]), ItemErrors()
        )
    # Tokens of items that are left out count for nothing.
    few = builder(max_request_tokens=10)
    inputs = ScoreInput("a", ["b", "chair " * 50, "c"], label_token_ids=[1])
    assert len(few.build(inputs, ItemErrors()).item_ids) == 2
    with pytest.raises(TooManyTokens):
        few.build(replace(inputs, items=["chair " * 60, "chair " * 30]), ItemErrors())
    with pytest.raises(DeadlineExceeded), Turned(0):
        made.build(inputs, ItemErrors())
    # A query that fills the context leaves room for an empty item only.
    errors = ItemErrors()
    request = made.build(ScoreInput([1] * 40, [[], [2]], label_token_ids=[1]), errors)
    assert (len(request.item_ids), [e.index for e in errors.listed()]) == (1, [1])


@pytest.mark.parametrize("item_first", [False, True])
def test_a_query_is_read_once_beside_long_items(item_first):
    """Every item that is refused before its end makes the encoder begin again with the next one."""
    backend = replace(LIMITS, max_model_len=65_000)
    made = PromptBuilder(TextEncoder(make_tokenizer(bos=False)), backend, RequestLimits())
    query, items = "chair " * 10_000, ["x " * 40_000] * 6
    errors = ItemErrors()
    inputs = ScoreInput(query, items, label_token_ids=[1], item_first=item_first)
    with Turned() as counted:
        assert made.build(inputs, errors) is None
    assert len(errors.listed()) == 6
    assert sum(counted.asked) < sum(map(len, items)) + 4 * len(query)


def test_a_long_query_is_not_read_again_for_every_item():
    """A long query costs as many turns as reading it once."""
    inputs = ScoreInput("chair " * 200_000, ["a"] * 1000, label_token_ids=[1])
    with pytest.raises(PromptTooLong, match="query alone"), Turned() as counted:
        builder().build(inputs, ItemErrors())
    assert sum(counted.asked) < 10 * PIECE_CHARS


@pytest.fixture(scope="module")
def family():
    backend = BackendLimits(512, 16, 400, 120, 2000)
    builder = PromptBuilder(TextEncoder(qwen_like()), backend, RequestLimits())
    return FamilyPrompts(registry.DEMO, builder)


@pytest.mark.parametrize("shared", [True, False], ids=["query", "pairs"])
@pytest.mark.parametrize("most", [None, 5])
def test_documents_that_are_left(family, shared, most):
    rng = random.Random(7)
    for _ in range(25):
        picked = [rng.random() < 0.4 for _ in range(rng.randint(1, 6))]
        texts = ["half \ud800"] if most else ["abc " * 200, LONG, "half \ud800"]
        documents = [rng.choice(texts if wrong else ["a b c d e f g", "b", ""]) for wrong in picked]
        queries = [rng.choice(["q", "q r", "abc"]) for _ in documents]
        for index, wrong in enumerate(picked):
            if wrong and not shared and rng.random() < 0.5:  # the query is what is wrong
                queries[index], documents[index] = rng.choice(["abc " * 200, LONG]), "good"

        def rerank_input(indices, queries=queries, documents=documents):
            query = "q" if shared else [queries[index] for index in indices]
            return RerankInput(query, [documents[index] for index in indices], most_tokens=most)

        errors = ItemErrors()
        built = family.build(rerank_input(range(len(documents))), errors)
        left = [index for index, wrong in enumerate(picked) if not wrong]
        wanted = family.build(rerank_input(left)) if left else None
        check_same(built and built.request, wanted and wanted.request)
        if wanted is not None:
            assert built.truncated == tuple(left[index] for index in wanted.truncated)
        assert [error.index for error in errors.listed()] == [
            index for index, wrong in enumerate(picked) if wrong
        ]


@pytest.mark.parametrize("query", ["abc " * 200, LONG])
@pytest.mark.parametrize("fit", [False, True])
def test_a_query_of_all_documents_that_is_too_long(family, query, fit):
    with pytest.raises(PromptTooLong) as raised:
        family.build(RerankInput(query, ["a", "\ud800"], fit=fit), ItemErrors())
    assert raised.value.param == "query"


def test_errors_keep_no_text_in_memory():
    class Text:
        pass

    def refuse(errors):
        text = Text()
        try:
            raise InvalidRequest("bad", param="items[0]")
        except InvalidRequest as error:
            errors.add(0, error)
        return weakref.ref(text)

    gc.disable()
    try:
        errors = ItemErrors()
        assert refuse(errors)() is None
    finally:
        gc.enable()
    assert errors.listed() == (ItemError(0, "invalid_request", "bad"),)


def test_places():
    errors = [ItemError(0, "a", ""), ItemError(3, "b", "")]
    assert list(spread([1, 2], errors, 4)) == [None, 1, 2, None]
    error = renumbered(InvalidRequest("items[1] is bad", param="items[1]"), range(4, 9))
    assert (error.message, error.param) == ("items[5] is bad", "items[5]")
    whole = InvalidRequest("query is bad", param="query")
    assert renumbered(whole, range(4, 9)) is whole

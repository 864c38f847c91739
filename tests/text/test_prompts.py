"""Promise: a request has the ids of the joined strings, is cut as designed, and every invalid input
is an error."""

import numpy as np
import pytest

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    DeadlineExceeded,
    EmptyLabels,
    EmptyPrompt,
    InternalError,
    InvalidRequest,
    MissingLabels,
    MixedInputTypes,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyItems,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.boundaries import PIECE_CHARS
from gpuscore.text.joining import PromptBuilder, factor
from gpuscore.text.score_input import ScoreInput
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from support.counted_turns import Turned
from support.models import VOCAB, make_tokenizer

BACKEND = BackendLimits(64, 16, 100, 40, VOCAB)


def builder(limits=None, *, bos=False, encoder=True):
    text = TextEncoder(make_tokenizer(bos=bos)) if encoder else None
    return PromptBuilder(text, BACKEND, limits or RequestLimits())


def arrays(*lists):
    return [np.array(ids, dtype=np.int32) for ids in lists]


def build(query, items, limits=None, **options):
    options = {"label_token_ids": [1]} | options
    return builder(limits).build(ScoreInput(query, items, **options))


def prompts_of(request):
    return [[*request.query_ids.tolist(), *item.tolist()] for item in request.item_ids]


@pytest.mark.parametrize(
    ("prompts", "query_len", "cut"),
    [
        ([[1, 2, 3, 4], [1, 2, 5]], 99, 2),
        ([[1, 2, 3], [1, 2, 3]], 99, 2),  # identical: the last token stays with the item
        ([[1, 2], [1, 2, 3]], 99, 1),  # one is the beginning of the other
        ([[1], [2]], 99, 0),
        ([[1], [1, 2]], 99, 0),
        ([[1, 2, 3, 4]], 2, 2),  # a single prompt: at most the query's own length
        ([[1, 2, 3, 4]], 4, 3),
        ([[1, 2, 3, 4]], 0, 0),
        ([[7]], 1, 0),
    ],
)
def test_the_cut(prompts, query_len, cut):
    query, items = factor(arrays(*prompts), query_len)
    assert query.tolist() == prompts[0][:cut]
    assert [item.tolist() for item in items] == [prompt[cut:] for prompt in prompts]
    assert all(len(item) for item in items), "every scored row is computed"


def test_random_prompts_survive_factoring():
    rng = np.random.default_rng(0)
    for _ in range(300):
        shared = rng.integers(0, 3, int(rng.integers(0, 6)))
        prompts = [
            np.append(shared, rng.integers(0, 3, int(rng.integers(1, 5)))).astype(np.int32)
            for _ in range(int(rng.integers(1, 6)))
        ]
        query, items = factor(prompts, 99)
        assert len(query) <= min(map(len, prompts)) - 1
        for prompt, item in zip(prompts, items, strict=True):
            assert [*query, *item] == prompt.tolist()


def test_ids_are_concatenated():
    request = build([5, 6], [[7], [], [8, 9]])
    assert prompts_of(request) == [[5, 6, 7], [5, 6], [5, 6, 8, 9]]
    flipped = build([5, 6], [[7], [], [8, 9]], item_first=True)
    assert prompts_of(flipped) == [[7, 5, 6], [5, 6], [8, 9, 5, 6]]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
def test_text_is_tokenised_as_a_whole(bos, item_first):
    """Merges cross the boundary exactly as in the joined string."""
    query, items = "query: a wood", ["en chair", "", " chair", "é☃", "<|end|>", "wood"]
    made = builder(bos=bos)
    inputs = ScoreInput(query, items, label_token_ids=[1], item_first=item_first)
    tokenizer = make_tokenizer(bos=bos)
    expected = [
        tokenizer.encode(item + query if item_first else query + item).ids for item in items
    ]
    assert prompts_of(made.build(inputs)) == expected
    alone = [
        made.build(ScoreInput(query, [i], label_token_ids=[1], item_first=item_first))
        for i in items
    ]
    assert [prompts_of(request)[0] for request in alone] == expected
    if not item_first:
        apart = tokenizer.encode(query).ids + tokenizer.encode(items[0]).ids
        assert apart != expected[0], "the case would prove nothing"


def test_many_and_long_texts_go_in_pieces():
    texts = ["wood " * 5, "x" * (PIECE_CHARS + 10), "", *(["chair"] * 3000), "y" * PIECE_CHARS]
    tokenizer = make_tokenizer(bos=True)
    got = TextEncoder(make_tokenizer(bos=True)).prompts(texts)
    assert [ids.tolist() for ids in got] == [e.ids for e in tokenizer.encode_batch(texts)]


def test_truncation_and_padding_of_the_tokenizer_are_off():
    tokenizer = make_tokenizer(bos=False)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=30)
    ids = [*TextEncoder(tokenizer).prompts(["query: a blue wooden chair", "a"])]
    assert len(ids[0]) > 3
    assert len(ids[1]) == 1


def test_a_tokenizer_panic_is_an_error_of_its_own():
    class Panic(BaseException):
        pass

    class Broken:
        def encode_batch_fast(self, texts, add_special_tokens):
            raise Panic

    text = TextEncoder(make_tokenizer(bos=False))
    text.tokenizer = Broken()
    with pytest.raises(InternalError):
        list(text.prompts(["a"]))
    with pytest.raises(InternalError):
        list(text.joined("a query that can be cut", lambda _: ["a"], False)(0))


@pytest.mark.parametrize(
    ("error", "query", "items", "options", "message"),
    [
        (MixedInputTypes, "a", [[1]], {}, "all text or all token ids"),
        (MixedInputTypes, [1], ["a"], {}, "all text or all token ids"),
        (MixedInputTypes, "", ["a", [1]], {}, "all text or all token ids"),
        (EmptyPrompt, "", [""], {}, r"items\[0\]"),
        (EmptyPrompt, [], [[1], []], {}, r"items\[1\]"),
        (PromptTooLong, [1] * 30, [[1], [1] * 11], {}, r"items\[1\] .* 41 tokens.* 40"),
        (TokenIdOutOfRange, [VOCAB], [[1]], {}, f"query holds token id {VOCAB}"),
        (TokenIdOutOfRange, [1], [[1], [2, -1]], {}, r"items\[1\] holds token id -1"),
        (TokenIdOutOfRange, [1], [[1]], {"label_token_ids": [0, VOCAB]}, "label_token_ids holds"),
        (InvalidRequest, [2**63], [[1]], {}, "at most 64 bits"),
        (InvalidRequest, [1], [[10**400]], {}, "at most 64 bits"),
        (InvalidRequest, [1.5], [[1]], {}, "must hold integers"),
        (InvalidRequest, [True], [[1]], {}, "must hold integers"),
        (EmptyLabels, [1], [[1]], {"label_token_ids": []}, "at least one label"),
        (EmptyLabels, [1], [[1]], {"label_token_ids": [[]]}, "at least one label"),
        (MissingLabels, [1], [[1]], {"label_token_ids": None}, "is required"),
        (
            InvalidRequest,
            [1],
            [[1]],
            {"labels": ["yes"]},
            "send only one of labels and label_token_ids",
        ),
        (InvalidRequest, [1], [[1]], {"label_token_ids": [[1], [2]]}, "2 lists for 1 items"),
        (
            InvalidRequest,
            [1],
            [[1]],
            {"label_token_ids": [1, [2]]},
            "one list of integers per item",
        ),
    ],
)
def test_what_is_wrong_is_named(error, query, items, options, message):
    with pytest.raises(error, match=message):
        build(query, items, **options)


def test_limits_are_inclusive_and_named():
    limits = RequestLimits(max_items=2, max_labels=2, max_request_tokens=7)
    assert build([1, 2, 3], [[4, 5], [6, 7]], limits, label_token_ids=[1, 2])
    with pytest.raises(TooManyItems, match="3 items, the limit is 2"):
        build([1], [[1]] * 3, limits)
    with pytest.raises(TooManyLabels, match="3 labels, the limit is 2"):
        build([1], [[1]], limits, label_token_ids=[1, 2, 3])
    with pytest.raises(TooManyTokens, match="8 tokens, the limit is 7"):
        build([1, 2, 3], [[4, 5], [6, 7, 8]], limits)


def test_no_items_is_no_request():
    assert build("a", []) is None
    assert build([1], [], label_token_ids=[1]) is None


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        builder(encoder=False).build(ScoreInput("a", ["b"], label_token_ids=[1]))


def test_a_tokenizer_that_knows_more_than_the_weights():
    made = PromptBuilder(
        TextEncoder(make_tokenizer(bos=False)), BackendLimits(64, 16, 100, 40, 50), RequestLimits()
    )
    with pytest.raises(TokenIdOutOfRange):
        made.build(ScoreInput("query: a chair", ["b"], label_token_ids=[1]))


def test_classes_need_no_tokenizer():
    limits = BackendLimits(64, 16, 100, 40, VOCAB, classes=("no", "yes"))
    made = PromptBuilder(None, limits, RequestLimits())
    inputs = ScoreInput([1, VOCAB - 1], [[2], [VOCAB - 1]], labels=["yes", "no"])
    assert [ids.tolist() for ids in made.build(inputs).label_ids] == [[1, 0]] * 2
    with pytest.raises(InvalidRequest, match=r"labels\[0\] names none of the model's 2"):
        made.build(ScoreInput([1], [[2]], labels=["maybe"]))
    for ids in ([2], [*range(2)] * 20 + [2]):
        with pytest.raises(TokenIdOutOfRange, match="holds class 2, valid are 0 to 1"):
            made.build(ScoreInput([1], [[2]], label_token_ids=ids))


def test_work_stops_at_the_first_prompt_that_is_too_long():
    """Strings are joined lazily: ten thousand long queries must be neither built nor encoded."""

    class Counting:
        taken = 0

    def texts():
        for _ in range(10_000):
            Counting.taken += 1
            yield "query " * 50_000

    made = builder()
    with pytest.raises(PromptTooLong):
        list(made.checks.checked(lambda _: made.encoder.prompts(texts())))
    assert Counting.taken <= 2


def test_giving_up():
    made = builder()

    with pytest.raises(DeadlineExceeded), Turned(0):
        made.build(ScoreInput("a", ["b", "c"], label_token_ids=[1]))

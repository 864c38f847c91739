"""Promise: labels of one token make the request that they always made, and whatever is wrong with
labels of several tokens is named with its numbers."""

from dataclasses import replace

import pytest

from gpuscore.config import RequestLimits
from gpuscore.errors import (
    EmptyLabels,
    InvalidRequest,
    PromptTooLong,
    TokenIdOutOfRange,
    TooManyLabels,
    TooManyTokens,
)
from gpuscore.text.boundaries import PIECE_CHARS
from gpuscore.text.joining import PromptBuilder
from gpuscore.text.score_input import ScoreInput
from gpuscore.text.tokenizer import TextEncoder
from gpuscore.types.batch import BackendLimits
from gpuscore.types.item_errors import ItemErrors
from support.models import VOCAB, make_tokenizer
from text.test_bad_items import check_same

BACKEND = BackendLimits(64, 16, 100, 40, VOCAB)


def build(query=(1, 2), items=([3], [4, 5]), *, chunk=0, limits=None, errors=None, **labels):
    query = query if isinstance(query, str) else list(query)
    backend = replace(BACKEND, deterministic_chunk=chunk)
    made = PromptBuilder(TextEncoder(make_tokenizer(bos=True)), backend, limits or RequestLimits())
    score = ScoreInput(query, list(items), **{"need_lse": False} | labels)
    return made.build(score, errors)


def test_single_tokens_make_the_same_request_however_they_are_given():
    tokenizer = make_tokenizer(bos=False)
    ids = [tokenizer.token_to_id(text) for text in ("yes", "no", "yes")]
    expected = build(label_token_ids=ids)
    for labels in ({"labels": ["yes", "no", "yes"]}, {"label_sequences": [[id] for id in ids]}):
        made = build(**labels)
        assert made.trie is None
        assert made.num_tokens == expected.num_tokens
        check_same(made, expected)


def test_texts_are_tokenised_on_their_own_and_without_special_tokens():
    texts = ["yes", "yes and no", "no", "\u2603"]
    encode = make_tokenizer(bos=True).encode
    expected = [tuple(encode(text, add_special_tokens=False).ids) for text in texts]
    made = build("query: ", ["a", "yes"], labels=texts)
    assert made.trie.sequences == tuple(expected)
    assert made.need_lse
    assert made.num_label_tokens == 2 * (len(expected[1]) - 1 + len(expected[3]) - 1)
    assert made.num_prompt_tokens == sum(len(encode("query: " + item).ids) for item in ["a", "yes"])
    assert [ids.tolist() for ids in made.label_ids] == [[ids[0] for ids in expected]] * 2


LIMITS = RequestLimits(max_labels=3, max_label_tokens=4, max_request_tokens=60)


@pytest.mark.parametrize(
    ("error", "labels", "message"),
    [
        (EmptyLabels, {"label_sequences": []}, "label_sequences must hold at least one label"),
        (EmptyLabels, {"label_sequences": [[1], []]}, r"label_sequences\[1\] must hold at least"),
        (EmptyLabels, {"labels": ["yes", ""]}, r"labels\[1\] is 0 tokens"),
        (TokenIdOutOfRange, {"label_sequences": [[1], [1, VOCAB]]}, r"\[1\] holds token id"),
        (TokenIdOutOfRange, {"label_sequences": [[-1, 2]]}, r"\[0\] holds token id -1, valid are"),
        (InvalidRequest, {"label_sequences": [[2**63]]}, "at most 64 bits"),
        (InvalidRequest, {"label_sequences": [[1], 2]}, "must be lists of integers"),
        (InvalidRequest, {"label_sequences": [[True]]}, "must hold integers"),
        (
            TooManyTokens,
            {"label_sequences": [[1] * 4, [1] * 5]},
            r"\[1\] is 5 tokens, the limit is 4",
        ),
        (
            TooManyTokens,
            {"labels": ["a chair of wood and"]},
            r"\[0\] is \d+ tokens, the limit is 4",
        ),
        (
            TooManyTokens,
            {"labels": ["z" * 2 * PIECE_CHARS]},
            r"is at least \d+ tokens, the limit is 4",
        ),
        (TooManyLabels, {"label_sequences": [[1]] * 4}, "4 labels, the limit is 3"),
        (TooManyLabels, {"labels": ["yes"] * 4}, "4 labels, the limit is 3"),
        (InvalidRequest, {"labels": ["a"], "label_sequences": [[1]]}, "labels and label_sequences"),
        (InvalidRequest, {"label_token_ids": [1], "label_sequences": [[1]]}, "send only one of"),
    ],
)
def test_an_error_in_labels_is_named(error, labels, message):
    with pytest.raises(error, match=message) as caught:
        build(limits=LIMITS, **labels)
    assert caught.value.param.startswith(("labels", "label_sequences"))


def test_the_tokens_of_labels_count_in_the_limit_of_a_request():
    items = [[n] * 4 for n in range(3, 8)]
    labels = {"label_sequences": [[1, 2, 3, 4], [1, 2, 9], [5, 6, 7]]}  # 5 nodes of each item
    assert build(items=items, limits=LIMITS, **labels).num_tokens == 2 + 20 + 25
    with pytest.raises(TooManyTokens, match="65 tokens, the limit is 60"):
        build(items=[*items, [8] * 4, [9] * 4], limits=LIMITS, **labels)
    with pytest.raises(TooManyTokens, match="the limit is 60"):  # nodes are whole prompts
        build(items=items, limits=LIMITS, chunk=16, **labels)


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("item_first", [False, True])
def test_prompt_and_label_less_one_token_fit_the_context(chunk, item_first):
    options = {"chunk": chunk, "item_first": item_first, "label_sequences": [[1], [1, 2, 3]]}
    assert build([1] * 30, [[2], [3] * 8], **options)
    message = r"items\[1\] gives a prompt of 39 tokens, the limit is 40, less 2 for the labels"
    with pytest.raises(PromptTooLong, match=message):
        build([1] * 30, [[2], [3] * 9], **options)
    errors = ItemErrors()
    made = build([1] * 30, [[2], [3] * 9], errors=errors, **options)
    assert [error.index for error in errors.listed()] == [1]
    assert len(made.item_ids) == 1
    with pytest.raises(PromptTooLong, match="query alone gives a prompt of 39 tokens"):
        build([1] * 39, [[2]], errors=ItemErrors(), **options)
    text = {"labels": ["yes and no"], "item_first": item_first}
    with pytest.raises(PromptTooLong, match="the limit is 40, less 2 for the labels"):
        build("a " * 38, ["a"], **text)
    with pytest.raises(PromptTooLong, match="at least .* less 2 for the labels"):
        build("a " * PIECE_CHARS, ["a"], **text)


def test_classes_are_labels_of_one_number():
    backend = replace(BACKEND, classes=("no", "yes", "perhaps"))
    made = PromptBuilder(None, backend, RequestLimits())
    request = made.build(ScoreInput([1], [[2]], label_sequences=[[2], [0]]))
    assert request.label_ids[0].tolist() == [2, 0]
    with pytest.raises(InvalidRequest, match=r"label_sequences\[1\] has 2 numbers"):
        made.build(ScoreInput([1], [[2]], label_sequences=[[2], [0, 1]]))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        PromptBuilder(None, BACKEND, RequestLimits()).build(ScoreInput([1], [[2]], labels=["a"]))

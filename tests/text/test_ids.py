"""Promise: checking all token ids at once gives the same results and errors as prompt by prompt."""

import random
from unittest import mock

import numpy as np
import pytest

from gpuscore.config import RequestLimits
from gpuscore.errors import GpuscoreError
from gpuscore.text.joining import PromptBuilder, factor_ids
from gpuscore.text.score_input import ScoreInput
from gpuscore.types.batch import BackendLimits

VOCAB = 5
BUILDER = PromptBuilder(
    None,
    BackendLimits(max_tokens=64, page_size=4, num_pages=64, max_model_len=9, vocab_rows=VOCAB),
    RequestLimits(max_request_tokens=21),
)


def outcome(query, items, at_once):
    factor = factor_ids if at_once else (lambda *args, **kwargs: None)
    with mock.patch("gpuscore.text.joining.factor_ids", factor):
        try:
            request = BUILDER.build(ScoreInput(query, items, label_token_ids=[1]))
        except GpuscoreError as error:
            return type(error).__name__, error.message, error.param
    arrays = (request.query_ids, *request.item_ids)
    assert all(a.dtype == np.int32 for a in arrays)
    return [a.tolist() for a in arrays]


def test_random_requests_agree_with_the_long_way():
    rng = random.Random(5)
    at_once = refused = 0
    for _ in range(1500):
        top = VOCAB if rng.random() < 0.9 else VOCAB + 1
        query = [rng.randrange(top) for _ in range(rng.randrange(5))]
        items = [
            [rng.randrange(top) for _ in range(rng.randrange(0 if rng.random() < 0.1 else 1, 6))]
            for _ in range(rng.randrange(1, 6))
        ]
        expected = outcome(query, items, at_once=False)
        assert outcome(query, items, at_once=True) == expected, (query, items)
        refused += isinstance(expected, tuple)
        at_once += factor_ids(query, items, vocab_rows=VOCAB, max_len=9) is not None
    assert at_once > 400
    assert refused > 80


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63, -(2**63) - 1, 1.0, True, "1", None])
@pytest.mark.parametrize("place", ["query", "item"])
def test_invalid_ids_are_left_to_the_reading_prompt_by_prompt(bad, place):
    query, items = [1, 2], [[3, 4], [0, 1]]
    (query if place == "query" else items[1]).append(bad)
    assert factor_ids(query, items, vocab_rows=VOCAB, max_len=9) is None


def test_the_longest_prompt_and_the_last_id():
    ids = [VOCAB - 1] * 4
    factored = factor_ids(ids, [[0] * 5, ids], vocab_rows=VOCAB, max_len=9)
    assert [a.tolist() for a in (factored[0], *factored[1])] == [ids, [0] * 5, ids]
    assert factor_ids(ids, [[0] * 6, ids], vocab_rows=VOCAB, max_len=9) is None

"""Promise: a large body of /v1/score is decoded in parts, to what one decoding would make of it."""

import json
import random

import msgspec
import pytest

from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.score import decode_score
from gpuscore.dialects.score_body import ScoreBody, decode_in_parts
from gpuscore.errors import InvalidRequest
from gpuscore.types.record import RequestRecord

LISTS = [[i % 500] * (1 + i % 200) for i in range(2000)]
IDS = {"items": LISTS, "label_token_ids": [*range(99)]}
GOOD = {
    "lists": {"items": [[1]] * 2000, "label_token_ids": LISTS, "query": [1, 2]},
    "ids": IDS,
    "texts": {"items": ['a], "[b] é \\ ' * 20] * 3000 + [None], "query": "q", "labels": ["a"]},
    "nothing": {"items": [], "label_token_ids": None, "priority": 3},
    "no fields": {},
}


@pytest.mark.parametrize("name", GOOD)
def test_parts_are_the_whole(name):
    for indent in (None, 1):
        body = json.dumps(GOOD[name], indent=indent).encode()
        assert decode_in_parts(body) == msgspec.json.decode(body, type=ScoreBody)


def wrong(random_place):
    body = json.dumps(IDS).encode()
    place = random_place.randrange(len(body))
    return (
        body[:place]
        + random_place.choice([b"", b"x", b"[", b"]", b'"', b"1.5"])
        + body[place + 1 :]
    )


def test_a_wrong_body_gets_the_error_of_the_whole():
    rng, told = random.Random(3), set()
    for _ in range(40):
        body = wrong(rng)
        assert len(body) > LARGE
        try:
            msgspec.json.decode(body, type=ScoreBody)
        except msgspec.MsgspecError as error:
            with pytest.raises(InvalidRequest) as caught:
                decode_score(body, RequestRecord("id"))
            place = str(error).partition("$.")[2].rstrip("`")
            assert place in str(caught.value.message)
            told.add(caught.value.message)
    assert len(told) > 3

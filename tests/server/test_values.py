"""Promise: a body with more values than the limits allow is refused before any value is made."""

import json
import random

import pytest

from gpuscore.config import RequestLimits
from gpuscore.dialects import values
from gpuscore.dialects.values import check_values
from gpuscore.errors import TooManyItems

ODD = ['"', "\\", "\\\\", '\\"', ",", "[", "{", "]", "é", "\n", ""]


def some(rng, depth=0):
    """Return a random JSON value with texts of quotes, backslashes and brackets."""
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 2:
        return "".join(rng.choice(ODD) for _ in range(rng.randrange(9)))
    if kind == 2:
        return rng.choice([None, True, -1.5, 7])
    if kind == 3:
        return {f"{key}{rng.choice(ODD)}": some(rng, depth + 1) for key in range(rng.randrange(4))}
    return [some(rng, depth + 1) for _ in range(rng.randrange(6))]


def begun(value):
    """Return the commas and opening brackets of a value's JSON."""
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, list):
        return 0
    return 1 + max(0, len(value) - 1) + sum(map(begun, value))


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 2**16])
def test_values_are_counted_outside_of_texts(monkeypatch, piece):
    monkeypatch.setattr(values, "PIECE", piece)
    monkeypatch.setattr(values, "SPARE", 0)
    rng = random.Random(11)
    for number in range(300):
        value = [some(rng) for _ in range(3)]
        body = json.dumps(
            value, ensure_ascii=number % 2 == 0, indent=rng.choice([None, 1])
        ).encode()
        count = begun(value)
        check_values(body, RequestLimits(max_request_tokens=count - 2, max_items=1, max_labels=1))
        with pytest.raises(TooManyItems, match=f"over {count - 1} values"):
            check_values(
                body, RequestLimits(max_request_tokens=count - 3, max_items=1, max_labels=1)
            )


@pytest.mark.parametrize(
    "body", [b"", b'"', b"\\", b'"\\', b"\\" * 99, b'["' + b"\\" * 98, b"\xff"]
)
def test_what_is_no_json_is_counted_too(monkeypatch, body):
    monkeypatch.setattr(values, "PIECE", 8)
    check_values(body, RequestLimits())


def test_texts_of_commas_and_all_that_the_limits_allow_pass():
    limits = RequestLimits()
    check_values(b'{"items":["' + b"," * 2**24 + b'"]}', limits)
    labels = b"[" + b",".join([b"1"] * limits.max_labels) + b"]"
    lists = b"[" + b",".join([labels] * limits.max_items) + b"]"
    tokens = b",".join([b"1"] * limits.max_request_tokens)
    check_values(b'{"items":[' + tokens + b'],"label_token_ids":' + lists + b"}", limits)

"""Promise: a large body is decoded in short parts to what one decoding would make of it; one with
more values than the limits allow is refused before they are made."""

import json
import random
from itertools import product

import msgspec
import pytest

from gpuscore.config import RequestLimits
from gpuscore.dialects import parts
from gpuscore.dialects.classify import ClassifyBody
from gpuscore.dialects.completions import CompletionBody
from gpuscore.dialects.pairs import PairsBody
from gpuscore.dialects.parts import SPARE, PartsDecoder
from gpuscore.dialects.rerank import RerankBody
from gpuscore.dialects.score import ScoreBody
from gpuscore.errors import TooManyItems

LIMITS = RequestLimits()
LISTS = [[i % 500] * (1 + i % 200) for i in range(600)]
ODD = ['"', "\\", "\\\\", '\\"', ",", "[", "{", "]", "}", "é", "\n", ""]
TEXT = 'a], "[b] é \\ \\" ' * 20
GOOD = {
    "lists": (ScoreBody, {"items": [[1]] * 2000, "label_token_ids": LISTS, "query": [1, 2]}),
    "texts": (ScoreBody, {"items": [TEXT] * 3000 + [None], "query": "q", "labels": ["a"]}),
    "one item": (ScoreBody, {"items": [[*range(60_000)], [1]], "query": [*range(60_000)]}),
    "no fields": (ScoreBody, {}),
    "pairs": (PairsBody, {"queries": TEXT * 300, "documents": [TEXT] * 300}),
    "documents": (RerankBody, {"query": "q", "documents": [{"a": [TEXT] * 9, "b": 1}, None] * 400}),
    "classes": (ClassifyBody, {"input": [TEXT] * 300, "labels": None}),
    "prompts": (CompletionBody, {"prompt": LISTS, "stream_options": {"a": LISTS}}),
}


def random_value(rng, depth=0):
    """Return a random JSON value with texts of quotes, backslashes and brackets."""
    kind = rng.randrange(6 if depth < 4 else 3)
    if kind < 2:
        return "".join(rng.choice(ODD) for _ in range(rng.randrange(9)))
    if kind == 2:
        return rng.choice([None, True, -1.5, 7])
    if kind == 3:
        names = [f"{key}{rng.choice(ODD)}" for key in range(rng.randrange(4))]
        return {name: random_value(rng, depth + 1) for name in names}
    return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]


def result(decode):
    """Return what `decode` returns, or the text of its error."""
    try:
        return decode()
    except msgspec.ValidationError as error:
        return str(error)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", GOOD)
def test_parts_are_the_whole(name, indent):
    kind, fields = GOOD[name]
    body = json.dumps(fields, indent=indent).encode()
    assert PartsDecoder(kind).decode(body, LIMITS) == msgspec.json.decode(body, type=kind)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_any_value_and_the_place_of_any_error(monkeypatch, size):
    monkeypatch.setattr(parts, "PART", size)

    class Body(msgspec.Struct, forbid_unknown_fields=True):
        any: object
        texts: list[str | None] = []
        lists: list[list[int] | str] | None = None

    rng, decoder = random.Random(11), PartsDecoder(Body)
    for number in range(60):
        value = [random_value(rng) for _ in range(9)]
        fields = {"any": value}
        if number % 3 == 0:
            fields["texts"] = [entry for entry in value if isinstance(entry, str | None)]
        if number % 3 == 1:
            fields["texts"] = [""] * 9 + value
        if number % 3 == 2:
            fields["lists"] = [[1, 2]] * 9 + value
        indent = rng.choice([None, 1])
        body = json.dumps(fields, ensure_ascii=number % 2 == 0, indent=indent).encode()
        whole = result(lambda body=body: msgspec.json.decode(body, type=Body))
        assert result(lambda body=body: decoder.decode(body, LIMITS)) == whole


def test_parts_are_short():
    for fields in ([[1]] * 10**5, ["],[" * 9] * 10**4, [*range(10**5)], [{"a": {}}] * 10**4):
        body = msgspec.json.encode(fields)
        sizes = [len(part) for part in parts.parts_of(memoryview(body), "a", LIMITS)]
        assert len(sizes) > 2
        assert max(sizes) < 2 * parts.PART


def test_all_that_the_limits_allow_is_decoded():
    limits = RequestLimits(max_items=1000, max_labels=200, max_request_tokens=5 * 10**5)
    one = [1] * limits.max_request_tokens
    for fields in (
        {"items": [one[:500]] * 1000, "label_token_ids": [[*range(200)]] * 1000},
        {"items": [one], "label_token_ids": [1]},
        {"query": one, "items": ["," * 2**12] * 1000, "label_sequences": [[1]] * 200},
    ):
        body = json.dumps(fields).encode()
        decoded = PartsDecoder(ScoreBody).decode(body, limits)
        assert {name: getattr(decoded, name) for name in fields} == fields


VALUES = [1, -1.5, None, "", [], {}, [1], {"a": ""}]


@pytest.mark.parametrize(
    ("place", "value"),
    [*(("list", value) for value in VALUES), *product(["entry", "object"], [1, None, "", [1]])],
    ids=json.dumps,
)
def test_more_is_refused_before_it_is_made(place, value):
    class Body(msgspec.Struct):
        a: object

    decoder = PartsDecoder(Body)
    limits = RequestLimits(max_items=500, max_labels=5, max_request_tokens=30_000)
    is_number = isinstance(value, int | float) or (value is None and place != "list")
    most = SPARE + (30_000 if is_number else 505)
    few = most if place == "list" else most // 4  # an entry of such a list has up to four values

    def body(count):
        values = [value] * count
        fields = {"list": values, "entry": [values], "object": {"b": values}}[place]
        return json.dumps({"a": fields}).encode()

    assert decoder.decode(body(few), limits) == msgspec.json.decode(body(few), type=Body)
    with pytest.raises(TooManyItems, match=f"a has over {most} values") as caught:
        decoder.decode(body(2 * most), limits)
    assert caught.value.param == "a"


def test_the_numbers_of_all_entries_are_counted():
    limits = RequestLimits(max_items=500, max_labels=5, max_request_tokens=900)
    decoder, entry = PartsDecoder(ScoreBody), [1] * 1000
    decoder.decode(json.dumps({"items": [entry] * 66}).encode(), limits)
    with pytest.raises(TooManyItems, match=f"items has over {SPARE + 2500} values"):
        decoder.decode(json.dumps({"items": [entry] * 69}).encode(), limits)


def test_a_field_that_comes_again_and_again():
    """Of 4 MB of it one call of msgspec's would take a tenth of a second."""

    class Body(msgspec.Struct):
        a: object

    def body(count, value="1"):
        return b"{%b}" % ",".join(['"a":' + value] * count).encode()

    decoder, marks = PartsDecoder(Body), ":," * SPARE
    assert decoder.decode(body(SPARE), LIMITS) == Body(1)
    assert decoder.decode(body(2, f'"{marks}"'), LIMITS) == Body(marks)
    with pytest.raises(TooManyItems, match=f"over {SPARE} fields"):
        decoder.decode(body(SPARE + 2), LIMITS)

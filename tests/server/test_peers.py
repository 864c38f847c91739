"""Promise: each request field that other servers document is accepted, accepted at the values that
change nothing, or refused by its own name with the reason; their documents' requests are answered.

fields.toml and examples.toml say where each field and request is documented.
"""

import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest

from gpuscore.dialects.decoding import others_of
from gpuscore.dialects.table import DIALECT_OF
from support.connections import connected, same_answer
from support.models import make_model
from support.serving import QUICK, serving

HERE = Path(__file__).parent
ROUTES = tomllib.loads((HERE / "fields.toml").read_text(encoding="utf-8"))["route"]
EXAMPLES = tomllib.loads((HERE / "examples.toml").read_text(encoding="utf-8"))["example"]
PATHS = [(route, path) for route in ROUTES for path in route["paths"]]
SENT = ("documents", "text_2", "texts", "input")
UNLISTED = {"overlap_tokens"}  # of no peer of the table


def ids(pairs):
    return [f"{route['peer']} {path} {'-'.join(route['body'])}" for route, path in pairs]


def fields_of(route):
    """Return {field: "accepted", "neutral" or "refused"}, as it counts."""
    kinds = {}
    for kind in ("refused", "accepted", "neutral"):
        kinds |= dict.fromkeys(route.get(kind, ()), kind)
    return kinds


def refusal(answer):
    """Return the place and the message of a 400, in the shape that the caller's client reads."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if isinstance(error, str):  # TEI's
        return error.split()[0], error
    return error["param"], error["message"]


@pytest.fixture(scope="module")
def instructed():
    """A client of a server whose family of rerankers takes an instruction."""
    flags = ("--family", "qwen3-reranker", *QUICK)
    with serving("demo", *flags) as running, connected(running) as opened:
        yield opened


@pytest.mark.parametrize(("route", "path"), PATHS, ids=ids(PATHS))
def test_fields_are_answered_as_the_table_says(instructed, route, path):
    def post(**fields):
        return instructed.post(path, json=route["body"] | fields)

    plain = post()
    assert plain.status_code == 200, plain.text
    null = post(**dict.fromkeys(fields_of(route).keys() - set(route.get("needed", ()))))
    assert null.status_code == 200, null.text
    neutral = route.get("neutral", {})
    assert neutral.keys() <= route.get("refused", {}).keys(), "a neutral value needs another"
    same_answer(post(**dict.fromkeys(neutral)).json(), plain.json())
    for values in zip_longest(*neutral.values()):
        fields = {field: v for field, v in zip(neutral, values, strict=True) if v is not None}
        same_answer(post(**fields).json(), plain.json())
    if path != (first := route["paths"][0]) and DIALECT_OF[path] is DIALECT_OF[first]:
        return  # the first path's test sends the others
    for field, value in route.get("accepted", {}).items():
        answer = post(**{field: value})
        assert answer.status_code == 200, (field, answer.text)
    for field, value in route.get("refused", {}).items():
        param, message = refusal(post(**{field: value}))
        assert param == field
        assert "unknown field" not in message
        assert len(message.removeprefix(field).split()) >= 4, f"{message} gives no reason"


def test_large_values_of_fields_without_a_meaning(instructed):
    body = {"input": "a lamp", "labels": ["yes", "no"]}
    many = ["x" * 50] * 4000
    param, message = refusal(instructed.post("/classify", json=body | {"messages": many}))
    assert (param, len(message) < 200) == ("messages", True)
    for value in ("x" * 200_000, many):
        assert instructed.post("/classify", json=body | {"user": value}).status_code == 200


def test_fields_without_a_meaning_are_of_some_peer():
    listed = {(path, field) for route, path in PATHS for field in fields_of(route)}
    missing = {
        (path, field)
        for path in {path for _, path in PATHS}
        for body in DIALECT_OF[path].bodies
        for field in others_of(body).keys() - UNLISTED
        if not any((same, field) in listed for same in DIALECT_OF[path].paths)
    }
    assert not missing


def test_every_peer_has_all_its_routes():
    routes = {}
    for route, path in PATHS:
        routes.setdefault(route["peer"].split()[0], set()).add(path)
    assert routes["vLLM"] == {
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify"),
        *("/v1/completions", "/tokenize", "/detokenize"),
    }
    assert routes["SGLang"] == {
        *("/v1/score", "/v1/rerank", "/v1/classify", "/classify", "/v1/completions"),
        *("/tokenize", "/detokenize"),
    }
    assert routes.keys() == {"vLLM", "SGLang", "TEI", "Cohere", "Jina", "Infinity"}


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classes")
    make_model(directory, "qwen3_classes", num_labels=2)
    with serving(f"classes={directory}", *QUICK) as running, connected(running) as opened:
        yield opened


@pytest.mark.parametrize("example", EXAMPLES, ids=[example["source"] for example in EXAMPLES])
def test_requests_of_their_documents_are_answered(instructed, classes, example):
    client, name = (classes, "classes") if example["path"] == "/classify" else (instructed, "demo")
    answer = client.post(example["path"], json=example["body"] | {"model": name})
    if "refused" in example:
        assert refusal(answer)[0] == example["refused"]
        return
    assert answer.status_code == 200, answer.text
    body = answer.json()
    rows = body if isinstance(body, list) else body.get("results", body.get("data"))
    asked = next(example["body"][name] for name in SENT if name in example["body"])
    assert len(rows) == (1 if isinstance(asked, str) else len(asked))
    assert isinstance(body, list) or body["model"] == name

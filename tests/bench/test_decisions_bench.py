"""Promise: the bench of decisions asks questions of the length that it says, divides them as vLLM
needs it, and refuses answers that are none."""

import json
import sys
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import decision_servers
import decisions
from tokenizers import Tokenizer


@pytest.fixture
def words():
    return decisions.Words(decisions.DEMO)


def test_texts_are_as_long_as_they_should_be(words):
    tokenizer = Tokenizer.from_file(str(decisions.DEMO / "tokenizer.json"))
    state, questions = words.state(), words.questions(3)
    assert len(tokenizer.encode(" " + state).ids) == decisions.STATE
    for question in questions.values():
        asked = f' {question["instructions"]}\nAnswer only "yes" or "no".'
        assert abs(len(tokenizer.encode(asked).ids) - decisions.QUESTION) <= 1
    assert len({words.state() for _ in range(5)} | {state}) == 6


def server(answer, most=64):
    bodies = []

    def handle(request):
        body = json.loads(request.content)
        bodies.append(body)
        return answer(body)

    client = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://127.0.0.1")
    return decision_servers.Server("it", client, "m", most), bodies


def good(body):
    answers = {name: {"noul": 0.5} for name in body["questions"]}
    return httpx.Response(200, json={"answers": answers, "usage": {"input_tokens": 7}})


def test_questions_are_divided(words):
    one, bodies = server(good)
    assert one.ask("x", words.questions(800)) == 13 * 7
    assert sorted(len(body["questions"]) for body in bodies) == [32, *[64] * 12]
    assert len({name for body in bodies for name in body["questions"]}) == 800
    assert {body["state"] for body in bodies} == {"x"}


@pytest.mark.parametrize(
    "wrong",
    [
        httpx.Response(400, json={}),
        httpx.Response(200, json={"answers": {}, "usage": {"input_tokens": 7}}),
        httpx.Response(200, json={"answers": {"q0": {"noul": 2.0}}, "usage": {"input_tokens": 7}}),
    ],
)
def test_wrong_answers_are_no_measurement(words, wrong):
    one, _ = server(lambda body: wrong)
    with pytest.raises(RuntimeError, match="it"):
        one.ask("x", words.questions(1))

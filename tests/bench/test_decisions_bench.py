"""Promise: the bench of decisions asks questions of the length that it says, divides them as vLLM
needs it, and refuses answers that are none."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import decision_servers
import decisions
from tokenizers import Tokenizer

from support.scripted_server import Step, scripted


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


def test_a_server_gets_all_questions_in_requests_that_it_takes(words):
    with decision_servers.gpuscore_server(decisions.DEMO, threads=1) as server:
        state, questions = words.state(), words.questions(130)
        together = server.ask(state, questions)
        apart = replace(server, most=64).ask(state, questions)
        asked = server.client.get("/metrics").text
    # Each prompt is counted as if it were read alone, however many are in a request.
    assert together == apart > 130 * (decisions.STATE + decisions.QUESTION)
    (count,) = re.findall(r'^gpuscore_requests_total\{.*"/v1/systemone".* (\S+)$', asked, re.M)
    assert float(count) == 1 + 3


@pytest.mark.parametrize(
    "wrong",
    [
        Step(400, {}),
        Step(200, {"answers": {}, "usage": {"input_tokens": 7}}),
        Step(200, {"answers": {"q0": {"noul": 2.0}}, "usage": {"input_tokens": 7}}),
    ],
)
def test_wrong_answers_are_no_measurement(words, wrong):
    with scripted([wrong]) as server, httpx.Client(base_url=server.url) as client:
        one = decision_servers.Server("it", client, "m", 64)
        with pytest.raises(RuntimeError, match="it"):
            one.ask("x", words.questions(1))

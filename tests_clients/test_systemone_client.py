"""Promise: systemone-client gets System One's answers and errors, with and without asyncio."""

import asyncio

import pytest
from systemone import AsyncClient, Choice, Client, Noul, Score, SystemOneError

from asked import DOCUMENTS

STATE = {"documents": list(DOCUMENTS)}
QUESTIONS = {
    "blue": Noul("Is there something blue?", {"true": "any shade"}),
    "what": Choice("What is first?", {"lamp": None, "chair": "to sit on"}),
    "how": Score("How many?", ["none", "some", "all"]),
}


def check(server, answer):
    asked = {name: question.to_dict() for name, question in QUESTIONS.items()}
    expected = server.post("/v1/systemone", {"state": STATE, "questions": asked})["answers"]
    assert answer.nouls["blue"].noul == pytest.approx(expected["blue"]["noul"], abs=1e-5)
    assert answer.choices["what"].choice == expected["what"]["choice"]
    assert answer.choices["what"].probabilities == pytest.approx(
        expected["what"]["probabilities"], abs=1e-4
    )
    assert answer.scores["how"].score == pytest.approx(expected["how"]["score"], abs=1e-4)
    assert answer.scores["how"].legend == {"0": "none", "1": "some", "2": "all"}
    assert answer.usage.input_tokens > 100


def test_answers(server):
    """The client sends its key in two fields."""
    with Client(server.url, server.key) as client:
        check(server, client.system_one(STATE, QUESTIONS, model="demo"))
        check(server, client.system_one(STATE, QUESTIONS))


def test_asyncio(server):
    async def ask():
        async with AsyncClient(server.url, server.key) as client:
            return await client.system_one(STATE, QUESTIONS)

    check(server, asyncio.run(ask()))


def test_errors(server):
    with Client(server.url, server.key) as client:
        for model, questions, status, words in (
            ("another", QUESTIONS, 404, "demo"),
            (None, {"a": Noul("x", "y")}, 400, "criteria"),
            (None, {"a": {"type": "box"}}, 400, "box"),
        ):
            with pytest.raises(SystemOneError) as caught:
                client.system_one("x", questions, model=model)
            assert caught.value.status == status
            assert words in caught.value.detail
    with Client(server.url, "wrong") as stranger, pytest.raises(SystemOneError) as caught:
        stranger.system_one("x", QUESTIONS)
    assert caught.value.status == 401

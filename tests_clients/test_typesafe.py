"""Promise: TypeSafe's client gets System One's answers, models and errors, plain and compressed,
with and without asyncio; each answer is the one that a plain POST gets."""

import asyncio
import math

import pytest
from typesafe_sdk import (
    AsyncTypeSafeClient,
    Box,
    Choice,
    Image,
    Noul,
    RetryPolicy,
    Score,
    TypeSafeAPIError,
    TypeSafeAuthenticationError,
    TypeSafeBadRequestError,
    TypeSafeClient,
    TypeSafeNotFoundError,
)

from asked import DOCUMENTS

STATE = {"documents": list(DOCUMENTS), "number": 3}
LONG = {"documents": list(DOCUMENTS) * 20}  # the client compresses what is over 1,024 bytes
QUESTIONS = {
    "blue": Noul(instructions="Is there something blue?"),
    "described": Noul(criteria={"true": "a chair", "false": None}),
    "what": Choice(instructions="What is first?", criteria={"lamp": None, "chair": {"to": "sit"}}),
    "many": Choice(criteria={f"thing {i}": None for i in range(255)}),
    "how": Score(instructions="How many?", criteria=["none", "some", {"all": "of them"}]),
    "fine": Score(criteria=[f"level {i}" for i in range(26)]),
}
PLAIN = {
    "blue": {"type": "noul", "instructions": "Is there something blue?"},
    "how": {
        "type": "score",
        "instructions": "How many?",
        "criteria": ["none", "some", {"all": "of them"}],
    },
}


@pytest.fixture(scope="module")
def client(server):
    with TypeSafeClient(base_url=server.url, api_key=server.key, model="demo") as opened:
        yield opened


def check(server, answer):
    assert answer.model == "demo"
    assert list(answer.answers) == list(QUESTIONS)
    assert set(answer.nouls) == {"blue", "described"}
    assert all(0 < noul.noul < 1 for noul in answer.nouls.values())
    for choice in answer.choices.values():
        assert choice.choice == max(choice.probabilities, key=choice.probabilities.get)
        assert math.isclose(sum(choice.probabilities.values()), 1, abs_tol=1e-6)
    assert len(answer.choices["many"].probabilities) == 255
    for score in answer.scores.values():
        assert score.score == pytest.approx(
            sum(n * share for n, share in score.probabilities.items())
        )
        assert list(score.legend) == list(score.probabilities) == list(range(len(score.legend)))
    assert answer.scores["how"].legend[2] == {"all": "of them"}
    assert answer.usage.input_tokens > 100
    assert answer.usage.output_tokens == 0
    assert answer.request_id


def same_as_plain(server, state, answer):
    expected = server.post("/v1/systemone", {"state": state, "questions": PLAIN})["answers"]
    assert answer.nouls["blue"].noul == pytest.approx(expected["blue"]["noul"], abs=1e-5)
    assert answer.scores["how"].score == pytest.approx(expected["how"]["score"], abs=1e-4)


@pytest.mark.parametrize(
    ("compression", "encoding"), [(False, None), ("zstd", "zstd"), (None, "zstd")]
)
def test_all_questions(server, compression, encoding):
    with TypeSafeClient(
        base_url=server.url, api_key=server.key, model="demo", compression=compression
    ) as client:
        answer = client.system_one(LONG, QUESTIONS)
        check(server, answer)
        same_as_plain(server, LONG, answer)
        assert answer.raw_http_response.request.headers.get("content-encoding") == encoding


def test_asyncio(server):
    async def ask():
        async with AsyncTypeSafeClient(base_url=server.url, api_key=server.key) as client:
            asked = [client.system_one(state, QUESTIONS, model="demo") for state in (STATE, LONG)]
            models = await client.models.list()
            return await asked[0], await asked[1], models

    short, long, models = asyncio.run(ask())
    for state, answer in ((STATE, short), (LONG, long)):
        check(server, answer)
        same_as_plain(server, state, answer)
    assert "demo" in [model.name for model in models.models]


def test_the_default_model_is_an_alias(server):
    with TypeSafeClient(base_url=server.url, api_key=server.key) as client:
        assert client.system_one("a lamp", {"q": QUESTIONS["blue"]}).model == "jev-latest"
        named = {model.name: model for model in client.models.list().models}
    assert set(named) == {"demo", "jev-latest"}
    assert named["jev-latest"].description == "Alias of demo."
    assert named["demo"].release_date == "1970-01-01"


def test_extra_fields(client):
    more = {"instructions": "query: red", "cache_salt": "a"}
    changed = client.system_one("a lamp", {"q": QUESTIONS["blue"]}, extra_body=more)
    assert (
        changed.nouls["q"].noul
        != client.system_one("a lamp", {"q": QUESTIONS["blue"]}).nouls["q"].noul
    )


def test_errors(server, client):
    asked = {"q": QUESTIONS["blue"]}
    with pytest.raises(TypeSafeNotFoundError, match="demo") as caught:
        client.system_one("x", asked, model="another")
    assert caught.value.body["error"]["code"] == "model_not_found"
    assert caught.value.request_id
    with (
        TypeSafeClient(base_url=server.url, api_key="wrong") as stranger,
        pytest.raises(TypeSafeAuthenticationError),
    ):
        stranger.system_one("x", asked)
    with pytest.raises(TypeSafeBadRequestError, match="box asks for a place in an image"):
        client.system_one("x", {"q": Box(instructions="Where?")})
    with pytest.raises(TypeSafeBadRequestError, match="256 criteria"):
        client.system_one("x", {"q": Choice(criteria=dict.fromkeys(map(str, range(256))))})
    with pytest.raises(TypeSafeAPIError, match="assets") as caught:
        client.system_one(["x", Image(b"\x89PNG\r\n\x1a\n" + bytes(64))], asked)
    assert caught.value.status == 415


def test_retry_after_is_honoured(server, full_at_first, client):
    retry = RetryPolicy(max_retries=2)
    client.system_one("x", {"q": QUESTIONS["blue"]}, retry=retry)
    assert 1.0 <= full_at_first.seconds < 8

"""Promise: POST /v1/systemone answers every type of question as transformers would, alone and in a
crowd, cold and cached; and its body, answer and errors are those that System One's clients know."""

import json
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest

from gpuscore import Choice, Scorer
from gpuscore.prompts import decision_reads as reads
from gpuscore.prompts.decision_reads import ReadAnswer
from gpuscore.prompts.decisions import DecisionPrompts
from support.connections import check_error
from support.system_one_oracle import QUESTIONS, STATES, Oracle, labels_of

CLOSE = 1e-4  # log-probability, float32
CROWD = {f"n{i}": {"type": "noul", "instructions": f"There are {i} lamps."} for i in range(40)}


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def ask(demo, state, questions, **more):
    reply = demo.post("/v1/systemone", json={"state": state, "questions": questions} | more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def shares_of(question, answer) -> list[float]:
    if question["type"] == "noul":
        return [answer["noul"], 1 - answer["noul"]]
    return list(answer["probabilities"].values())


def check(oracle, state, question, answer, told):
    """Assert that an answer is the oracle's: shares, mass, choice, mean and confidence."""
    expected = oracle.logprobs(state, question)
    mass = np.exp(expected).sum()
    shares = np.exp(expected - np.log(mass))
    got = np.array(shares_of(question, answer))
    np.testing.assert_allclose(np.log(got), np.log(shares), atol=2 * CLOSE, rtol=0)
    np.testing.assert_allclose(np.log(told["label_mass"]), np.log(mass), atol=CLOSE, rtol=0)
    best = int(shares.argmax())
    assert answer["confidence"] == pytest.approx(shares[best] * mass, rel=3 * CLOSE)
    if question["type"] == "choice":
        assert answer["choice"] == list(question["criteria"])[best]
        assert list(answer["probabilities"]) == list(question["criteria"])
    if question["type"] == "score":
        assert answer["score"] == pytest.approx(shares @ np.arange(len(shares)), abs=1e-3)
        assert answer["legend"] == {
            str(i): criterion for i, criterion in enumerate(question["criteria"])
        }
        assert list(answer["probabilities"]) == [str(i) for i in range(len(shares))]


@pytest.mark.parametrize("kind", list(STATES))
def test_every_type_alone_in_a_crowd_cold_and_cached(demo, oracle, kind):
    state = STATES[kind]
    together = ask(demo, state, CROWD | QUESTIONS, cache_salt=f"crowd-{kind}")
    again = ask(demo, state, CROWD | QUESTIONS, cache_salt=f"crowd-{kind}")
    assert again["usage"]["input_tokens"] == together["usage"]["input_tokens"]
    cached = [
        answer["usage"]["input_tokens_details"]["cached_tokens"] for answer in (together, again)
    ]
    assert cached[1] > cached[0] > 0
    for name, question in QUESTIONS.items():
        alone = ask(demo, state, {name: question}, cache_salt=f"{kind}-{name.replace(' ', '')}")
        for told in (together, again, alone):
            check(oracle, state, question, told["answers"][name], told["diagnostics"][name])


def test_the_most_probable_text_is_said_to_be_a_label_or_not(demo, oracle):
    state = STATES["text"]
    told = ask(demo, state, QUESTIONS)["diagnostics"]
    expected = {
        name: oracle.greedy_is_label(state, question) for name, question in QUESTIONS.items()
    }
    assert {name: diagnostics["argmax_is_label"] for name, diagnostics in told.items()} == expected
    assert len(set(expected.values())) == 2, "the demo model says yes or no, but no letters"


def test_255_options_and_usage(demo, oracle):
    question = {"type": "choice", "criteria": dict.fromkeys(f"thing {i}" for i in range(255))}
    told = ask(demo, "a red lamp", {"q": question}, cache_salt="many")
    answer = told["answers"]["q"]
    assert sum(answer["probabilities"].values()) == pytest.approx(1)
    assert told["usage"]["output_tokens"] == 0
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == 0
    prompt = "a red lamp\n\nWhich of these fits best?\n" + "\n".join(
        f"{label}. thing {i}" for i, label in enumerate(labels_of(question))
    )
    prompt += "\nAnswer only with the two letters of one of these.\n\nAnswer:\n"
    assert told["usage"]["input_tokens"] == len(oracle.ids(prompt))
    expected = oracle.after(prompt, labels_of(question)[:3])
    got = np.log([answer["probabilities"][f"thing {i}"] for i in range(3)])
    np.testing.assert_allclose(got - got[0], expected - expected[0], atol=2 * CLOSE)


def swapped(self, result):
    return [
        reads.ReadAnswer(read.shares[::-1], read.label_mass, read.argmax_is_label)
        for read in SOUND(self, result)
    ]


SOUND, BUILD = reads.DecisionReads.answers, DecisionPrompts.build


def neighbours(self, decisions, turns=None):
    return BUILD(self, replace(decisions, input=decisions.input.replace("red", "green")))


@pytest.mark.parametrize(
    ("owner", "method", "wrong"),
    [(reads.DecisionReads, "answers", swapped), (DecisionPrompts, "build", neighbours)],
    ids=["options swapped", "the state of the neighbour"],
)
def test_planted_defects_are_seen(oracle, monkeypatch, owner, method, wrong):
    state, question = STATES["text"], QUESTIONS["few"]

    def difference():
        with Scorer("demo", threads=1, max_batch_tokens=512) as scorer:
            options = {k: v if isinstance(v, str) else None for k, v in criteria.items()}
            answers = scorer.system_one(state, {"q": Choice(question["instructions"], options)})
        expected = oracle.logprobs(state, question | {"criteria": options})
        shares = np.log(list(answers["q"].probabilities.values()))
        return np.abs(shares - expected + np.log(np.exp(expected).sum())).max()

    criteria = question["criteria"] | {"other": "none"}
    assert difference() < 2 * CLOSE
    monkeypatch.setattr(owner, method, wrong)
    assert difference() > 100 * CLOSE


@pytest.mark.parametrize(
    ("share", "mass", "expected"),
    [(1.0, 1.0, 1.0), (0.25, 1.0, 0.25), (1.0, 0.0, 0.0), (0.5, 0.8, 0.4)],
)
def test_confidence_at_certain_and_at_uniform(share, mass, expected):
    assert ReadAnswer(np.array([share]), mass, None).confidence == expected


def test_the_shape_of_the_answer(demo):
    reply = demo.post(
        "/v1/systemone", json={"state": "a red lamp", "questions": QUESTIONS, "model": "demo"}
    )
    body = reply.json()
    assert set(body) == {
        *("id", "object", "created", "model", "answers", "usage", "diagnostics"),
    }
    assert (body["object"], body["model"]) == ("structured_decision", "demo")
    assert reply.headers["x-typesafe-request-id"] == reply.headers["x-request-id"] == body["id"]
    assert list(body["answers"]) == list(body["diagnostics"]) == list(QUESTIONS)
    fields = {
        "noul": {"type", "noul", "confidence"},
        "choice": {"type", "choice", "probabilities", "confidence"},
        "score": {"type", "score", "legend", "probabilities", "confidence"},
    }
    for name, answer in body["answers"].items():
        assert set(answer) == fields[answer["type"]]
        assert answer["type"] == QUESTIONS[name]["type"]


def test_instructions_come_first(demo, oracle):
    question, state = {"q": QUESTIONS["yes"]}, "a lamp"
    noul = ask(demo, state, question, instructions="query: red")["answers"]["q"]["noul"]
    expected = oracle.logprobs(f"query: red\n\n{state}", QUESTIONS["yes"])
    assert noul == pytest.approx(np.exp(expected[0]) / np.exp(expected).sum(), abs=CLOSE)
    assert noul != pytest.approx(ask(demo, state, question)["answers"]["q"]["noul"], abs=CLOSE)


NOUL, SCORE = {"type": "noul", "instructions": "?"}, {"type": "score", "criteria": ["a"]}


TOO_MANY = dict.fromkeys(map(str, range(256)))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"questions": {}}, "questions", "0 questions; supported: 1 to 1024"),
        ({"questions": {str(i): NOUL for i in range(1025)}}, "questions", "1025 questions"),
        ({"questions": {"a": NOUL, "b": {"type": "noul"}}}, "questions[1]", "neither"),
        (
            {"questions": {"a": {"type": "noul", "criteria": {"true": None}}}},
            "questions[0]",
            "neither",
        ),
        ({"questions": {"a": {"type": "noul", "criteria": {"maybe": "x"}}}}, ANY, "unknown"),
        ({"questions": {"a": {"type": "choice"}}}, ANY, "criteria"),
        (
            {"questions": {"a": {"type": "choice", "criteria": {}}}},
            "questions[0].criteria",
            "0 criteria; this server supports 1 to 255",
        ),
        (
            {
                "questions": {
                    "a": {"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}
                }
            },
            "questions[0].criteria",
            "256 criteria",
        ),
        (
            {"questions": {"a": SCORE | {"criteria": ["x"] * 27}}},
            "questions[0].criteria",
            "27 criteria; this server supports 1 to 26",
        ),
        ({"questions": {"a": SCORE | {"criteria": []}}}, "questions[0].criteria", "0 criteria"),
        ({"questions": {"a": SCORE | {"criteria": [None]}}}, ANY, "criteria"),
        ({"questions": {"a": NOUL, "b": {"type": "box"}}}, "questions[1]", "box asks for a place"),
        ({"questions": {"a": {"type": "essay"}}}, ANY, "essay"),
        ({"assets": {"x": {"type": "image"}}}, "assets", "reads no images"),
        ({"state": None}, "state", "null"),
        ({"cache_salt": "a b"}, ANY, "cache_salt"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "no chat template"),
        ({"samples": 3}, "samples", "unknown field samples"),
    ],
)
def test_refused_bodies(demo, body, param, words):
    reply = demo.post("/v1/systemone", json={"state": "x", "questions": {"a": NOUL}} | body)
    assert words in check_error(reply, 400, "invalid_request", param)
    assert reply.json()["detail"] == reply.json()["error"]["message"]


def test_multipart_is_refused_by_name(demo):
    reply = demo.post("/v1/systemone", files={"request": b"{}"})
    assert "assets" in check_error(reply, 415, "unsupported_media_type")


def test_unknown_model_names_the_served_one(demo):
    body = {"state": "x", "questions": {"a": NOUL}, "model": "jev-latest"}
    message = check_error(demo.post("/v1/systemone", json=body), 404, "model_not_found", "model")
    assert "demo" in message


def test_models_have_both_shapes(demo):
    models = demo.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["demo"]
    (card,) = models["models"]
    assert card == {
        "name": "demo",
        "description": "A scored language model.",
        "release_date": "1970-01-01",
    }
    assert json.loads(demo.get("/info").text)["gpuscore"]["decision_order"] == "fixed"

"""Promise: OpenAI's client and its tool runner get decisions, and errors for impossible ones."""

import math

import openai
import pytest
from openai.lib.decisions_tool_runner import DecisionsToolRunner

from asked import DOCUMENTS

QUESTIONS = (
    {"type": "predicate", "name": "blue", "instructions": "It is blue."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "What is it?"}],
        "choices": [{"value": "chair", "description": "to sit on"}, {"value": "lamp"}],
    },
    {"type": "choice", "instructions": "Is it?", "choices": [{"value": True}, {"value": False}]},
    {
        "type": "score",
        "name": "size",
        "instructions": "How large is it?",
        "levels": [
            {"label": "small", "description": "fits a hand"},
            {"label": "m"},
            {"label": "l"},
        ],
    },
)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=server.key) as opened:
        yield opened


def decide(client, *questions, about=DOCUMENTS[1]):
    return client.decisions.create(model="demo", input=about, questions=questions)


def test_decisions(client):
    decision = decide(client, *QUESTIONS)
    blue, what, whether, size = decision.answers
    assert [a.type for a in decision.answers] == ["predicate", "choice", "choice", "score"]
    assert [a.name for a in decision.answers] == ["blue", None, None, "size"]
    assert 0 < blue.probability < 1
    for answer, values in ((what, ["chair", "lamp"]), (whether, [True, False])):
        assert [p.value for p in answer.probabilities] == values
        assert all(
            type(p.value) is type(v) for p, v in zip(answer.probabilities, values, strict=True)
        )
        best = max(answer.probabilities, key=lambda entry: entry.probability)
        assert answer.choice == best.value
    assert [(p.label, p.value) for p in size.probabilities] == [("small", 0), ("m", 1), ("l", 2)]
    assert size.score == pytest.approx(sum(p.value * p.probability for p in size.probabilities))
    for answer in (what, whether, size):
        assert math.isclose(sum(p.probability for p in answer.probabilities), 1, abs_tol=1e-6)
        assert 0 <= answer.confidence <= 1
    usage = decision.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 20
    assert decision.model


def test_as_many_choices_and_levels_as_openai_allows(client):
    choices = [{"value": f"thing {i}"} for i in range(255)]
    levels = [{"label": f"level {i}"} for i in range(26)]
    what, size = decide(
        client,
        {"type": "choice", "instructions": "What is it?", "choices": choices},
        {"type": "score", "instructions": "How large is it?", "levels": levels},
    ).answers
    assert [entry.value for entry in what.probabilities] == [choice["value"] for choice in choices]
    assert [entry.value for entry in size.probabilities] == list(range(26))
    for answer in (what, size):
        assert math.isclose(sum(p.probability for p in answer.probabilities), 1, abs_tol=1e-6)
    with pytest.raises(openai.BadRequestError, match="256 choices"):
        decide(
            client,
            {"type": "choice", "instructions": "?", "choices": [*choices, {"value": "more"}]},
        )


def test_questions_do_not_see_each_other(client):
    together = decide(client, *QUESTIONS).answers
    for question, answer in zip(QUESTIONS, together, strict=True):
        (alone,) = decide(client, question).answers
        if question["type"] == "predicate":
            assert answer.probability == pytest.approx(alone.probability, abs=1e-5)
        else:
            assert [p.probability for p in answer.probabilities] == pytest.approx(
                [p.probability for p in alone.probabilities], abs=1e-5
            )


def test_decisions_about_messages(client):
    messages = [
        {"role": "system", "content": "You know chairs."},
        {"role": "user", "content": [{"type": "input_text", "text": DOCUMENTS[1]}]},
        {"role": "assistant", "content": "A chair."},
    ]
    (answer,) = decide(client, QUESTIONS[0], about=messages).answers
    assert 0 < answer.probability < 1


def test_decisions_that_cannot_be_made(client):
    image = [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]
    with pytest.raises(openai.BadRequestError) as caught:
        decide(client, QUESTIONS[0], about=[{"role": "user", "content": image}])
    assert caught.value.param.startswith("input")
    with pytest.raises(openai.BadRequestError):
        decide(client)


def test_openais_tool_runner(client):
    """The runner checks every field of an answer before it acts."""
    sat = []
    sit = {"id": "sit", "description": "sit on the chair", "execute": lambda: sat.append(1)}
    stop = {"id": "stop", "description": "nothing is left to do", "done": True}
    runner = DecisionsToolRunner(
        observe=lambda: "somebody sits" if sat else "nobody sits",
        candidates=lambda seen: [stop] if sat else [sit, stop],
    )
    result = runner.run(client, {"model": "demo", "input": "Sit down."})
    assert result["status"] == "unverified"  # the runner is done, and nobody asked it to verify
    (decision,) = result["decisions"]
    assert (decision.answers[0].choice == "sit") == bool(sat)

"""Promise: OpenAI's client gets log-probabilities, model names and errors; nothing is generated."""

import openai
import pytest

from asked import QUERY

PROMPTS = [[40, 50, 60, 70, 80], [7], [40, 50, 61]]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=server.key) as opened:
        yield opened


def logprobs_by_score(server, ids):
    """Return each id's log-probability after the ids before it, from one /v1/score item per
    position."""
    items = [ids[:position] for position in range(1, len(ids))]
    labels = [[ids[position]] for position in range(1, len(ids))]
    if not items:
        return []
    body = {"items": items, "label_token_ids": labels, "return_label_logprobs": True}
    return [row[0] for row in server.post("/v1/score", body)["label_logprobs"]]


@pytest.mark.parametrize("tokens", [0, 1])
def test_echo(server, client, tokens):
    asked = {"model": "demo", "prompt": PROMPTS, "echo": True, "logprobs": 1}
    answer = client.completions.create(**asked, max_tokens=tokens, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, ids in zip(answer.choices, PROMPTS, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) + tokens
        assert logprobs.token_logprobs[0] is None
        wanted = logprobs_by_score(server, ids)
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
        for value, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert value <= max(top.values())
        if tokens:
            assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
    assert answer.usage.prompt_tokens == 9


def test_echo_of_text(server, client):
    asked = {"model": "demo", "prompt": f"query: {QUERY}", "echo": True, "logprobs": 1}
    answer = client.completions.create(**asked, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "".join(choice.logprobs.tokens) == f"query: {QUERY}"
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])


def test_no_decoding(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a lamp", max_tokens=20)
    assert caught.value.param == "max_tokens"
    assert caught.value.request_id


def test_models(client):
    assert "demo" in [model.id for model in client.models.list()]


def test_errors(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="another", prompt="x", max_tokens=1)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()


def test_retry_after_is_honoured(server, full_at_first, client):
    client.completions.create(model="demo", prompt=[40, 50], max_tokens=1)
    assert 1.0 <= full_at_first.seconds < 5

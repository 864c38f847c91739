"""Promise: /v1/completions gives transformers' log-probabilities in the form that lm-eval and
OpenAI's clients read, and refuses every request for generated text."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpuscore.dialects.completion_answer import TokenTexts
from gpuscore.types.batch import NO_TOKENS
from support.connections import MARKER, check_error
from support.models import random_ids
from support.stub_service import StubEngine, ask, loaded, stub_service

TOLERANCE = 1e-4
IDS = [5, 300, 7, 7, 61, 390, 12]
LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


def complete(client, prompt, **fields):
    answer = client.post("/v1/completions", json={"prompt": prompt} | LM_EVAL | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client, **fields):
    return client.post("/v1/completions", json={"prompt": IDS} | LM_EVAL | fields)


@pytest.fixture(scope="module")
def logprobs(model):
    """A function that returns transformers' log-probabilities [tokens, V] after each token of a
    prompt."""

    def of(ids):
        with torch.no_grad():
            return torch.log_softmax(model[1](torch.tensor([ids])).logits[0].double(), -1).numpy()

    return of


def check_logprobs(logprobs, ids, expected, names=None):
    """Check an answer that echoes a prompt and adds the most probable next token."""
    assert [*map(len, logprobs.values())] == [len(ids) + 1] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    best = expected.argmax(axis=1)
    told = [*ids, int(best[-1])]
    for place, (value, top) in enumerate(
        zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    ):
        row, token = expected[place], told[place + 1]
        np.testing.assert_allclose(value, row[token], atol=TOLERANCE)
        np.testing.assert_allclose(max(top.values()), row.max(), atol=TOLERANCE)
        is_best = token == best[place]
        assert len(top) == (1 if is_best else 2)
        assert (value == max(top.values())) == is_best, "greedy as lm-eval finds it"
        assert top[logprobs["tokens"][place + 1]] == value
        if names is not None and not is_best:
            assert set(top) - {logprobs["tokens"][place + 1]} <= {names(int(best[place]))} | {
                f"token_id:{best[place]}"
            }
    lengths = np.cumsum([0, *map(len, logprobs["tokens"])])
    assert logprobs["text_offset"] == lengths[:-1].tolist()


def test_as_lm_eval_asks(client, logprobs):
    """Prompts are ids of many odd lengths, answered in order; two are equal, computed once."""
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, n) for n in (1, 2, 17, 63, 111, 400, 7, 512)]
    prompts.append(prompts[4])
    body = complete(client, prompts)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert [choice["index"] for choice in body["choices"]] == list(range(9))
    for choice, ids in zip(body["choices"], prompts, strict=True):
        assert choice["finish_reason"] == "length"
        check_logprobs(choice["logprobs"], ids, logprobs(ids))
    total = sum(map(len, prompts))
    assert body["usage"] == {
        "prompt_tokens": total,
        "total_tokens": total + 9,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 111},
    }


def test_packed_is_alone(client):
    rng = np.random.default_rng(1)
    prompts = [random_ids(rng, n) for n in (3, 90, 31)]
    packed = complete(client, prompts)["choices"]
    for choice, ids in zip(packed, prompts, strict=True):
        (alone,) = complete(client, ids)["choices"]
        assert alone["text"] == choice["text"]
        got, expected = (c["logprobs"]["token_logprobs"][1:] for c in (choice, alone))
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_text_begins_as_the_tokenizer_wants(client, encode, logprobs):
    texts = ["query: a blue chair", "Ein Satz über Bäume ☃", ""]
    body = complete(client, texts)
    for choice, text in zip(body["choices"], texts, strict=True):
        ids = encode(text)
        assert ids[0] == 0, "<s>"
        told = choice["logprobs"]
        check_logprobs(told, ids, logprobs(ids))
        assert told["tokens"][0] == "<s>"
        assert choice["text"] == text + told["tokens"][-1]
    (bare,) = complete(client, texts[0], add_special_tokens=False)["choices"]
    ids = encode(texts[0])[1:]
    check_logprobs(bare["logprobs"], ids, logprobs(ids))
    assert "".join(bare["logprobs"]["tokens"][:-1]) == texts[0]
    error = client.post(
        "/v1/completions", json=LM_EVAL | {"prompt": "", "add_special_tokens": False}
    )
    check_error(error, 400, "empty_prompt", "prompt[0]")


def test_without_a_next_token(client, logprobs):
    (choice,) = complete(client, IDS, max_tokens=0, temperature=None)["choices"]
    (longer,) = complete(client, IDS)["choices"]
    for name, values in choice["logprobs"].items():
        assert values == longer["logprobs"][name][:-1]
    (single,) = complete(client, [9], max_tokens=0)["choices"]
    assert single["logprobs"]["token_logprobs"] == single["logprobs"]["top_logprobs"] == [None]
    (bare,) = complete(client, IDS, logprobs=0)["choices"]
    assert bare["logprobs"] == longer["logprobs"] | {"top_logprobs": None}


def test_the_next_token_alone_is_served_from_the_cache(client, logprobs):
    ids = [3, *random_ids(np.random.default_rng(2), 80)]
    best = int(logprobs(ids)[-1].argmax())
    for cached in (0, 80):  # whole pages before the last token
        body = complete(client, ids, echo=False, cache_salt="next", logprobs=cached and 1 or None)
        (choice,) = body["choices"]
        assert (
            choice["text"] == client.post("/detokenize", json={"tokens": [best]}).json()["prompt"]
        )
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert body["usage"]["completion_tokens"] == 1
    told = choice["logprobs"]
    np.testing.assert_allclose(told["token_logprobs"], logprobs(ids)[-1:, best], atol=TOLERANCE)
    assert told["top_logprobs"] == [{choice["text"]: told["token_logprobs"][0]}]
    assert told["text_offset"] == [0]


def test_echo_alone(client):
    for max_tokens in (0, 1):
        (choice,) = complete(client, "a red lamp", max_tokens=max_tokens, logprobs=None)["choices"]
        assert choice["logprobs"] is None
        assert choice["text"].startswith("a red lamp")
        assert (choice["text"] == "a red lamp") == (max_tokens == 0)


def test_tokens_that_say_the_same():
    say = TokenTexts(None)
    assert not any(say.add(np.array([3, 9, 3], np.int32), NO_TOKENS))
    assert say.values(3, -1.0, [9], [-0.5]) == {"token_id:3": -1.0, "token_id:9": -0.5}

    class Mute:
        def token_texts(self, ids):
            return ["�" if id else "" for id in ids]

    say = TokenTexts(Mute())  # type: ignore[arg-type]
    assert not any(say.add(np.array([[0, 3], [9, 4]], np.int32)))
    assert say(0) == "token_id:0"
    assert say.values(3, -1.0, [9], [-0.5]) == {"�": -1.0, "token_id:9": -0.5}
    assert say.values(3, -0.5, [3], [-0.5]) == {"�": -0.5}
    values = say.values(0, -3.0, [9, 0, 4], [-0.5, -3.0, -4.0])
    assert [*values.items()] == [("token_id:0", -3.0), ("�", -0.5), ("token_id:4", -4.0)]


@pytest.mark.parametrize("count", [2, 20])
def test_several_of_the_most_probable_tokens(client, logprobs, count):
    """The best tokens' values stand by text, with the prompt's own token if it is not among
    them."""
    ids = random_ids(np.random.default_rng(3), 30)
    (choice,) = complete(client, ids, logprobs=count)["choices"]
    told, expected = choice["logprobs"], logprobs(ids)
    for place, top in enumerate(told["top_logprobs"][1:]):
        best = np.sort(expected[place])[::-1][:count]
        own = told["token_logprobs"][place + 1]
        values = sorted(top.values(), reverse=True)
        np.testing.assert_allclose(values[:count], best, atol=TOLERANCE)
        assert top[told["tokens"][place + 1]] == own
        assert len(top) == count + (own < values[count - 1])
    (once,) = complete(client, ids)["choices"]
    assert once["logprobs"]["tokens"] == told["tokens"]
    np.testing.assert_allclose(
        once["logprobs"]["token_logprobs"][1:], told["token_logprobs"][1:], atol=2e-5
    )
    (next_only,) = complete(client, ids, logprobs=count, echo=False)["choices"]
    assert len(next_only["logprobs"]["top_logprobs"][0]) == count


def test_kept_rows_with_fewer_of_the_best_tokens_are_computed_again(client):
    ids = random_ids(np.random.default_rng(4), 200)
    cached = []
    for count in (1, 5, 3, 0, 6):
        body = complete(client, ids, logprobs=count, cache_salt="tops")
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        tops = body["choices"][0]["logprobs"]["top_logprobs"] or []
        assert all(len(top) in (count, count + 1) for top in tops[1:])
    assert cached == [0, 0, 192, 192, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 0.9), ("temperature", 1), *(("max_tokens", count) for count in (None, 16, -1))],
)
def test_generation_is_refused_by_name(client, field, value):
    message = check_error(refused(client, **{field: value}), 400, "invalid_request", field)
    assert "scores only and generates nothing" in message


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"logprobs": -1}, "invalid_request", "logprobs"),
        ({"max_tokens": 0, "echo": False}, "invalid_request", "max_tokens"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": ["a", [1]]}, "mixed_input_types", "prompt"),
        ({"prompt": [1, "a"]}, "mixed_input_types", "prompt"),
        ({"prompt": [[1], []]}, "empty_prompt", "prompt[1]"),
        ({"prompt": [[1], [400]]}, "token_id_out_of_range", "prompt[1]"),
        ({"prompt": [-1]}, "token_id_out_of_range", "prompt[0]"),
        ({"prompt": [2**70]}, "invalid_request", "prompt[0]"),
        ({"prompt": [[1] * 513]}, "prompt_too_long", "prompt[0]"),
        ({"prompt": [[1]] * 10_001}, "too_many_items", "prompt"),
        ({"prompt": [[1] * 512] * 513}, "too_many_tokens", "prompt"),
        ({"prompt": [[1] * 512] * 49, "logprobs": 20}, "too_many_tokens", "prompt"),
        ({MARKER: 1}, "invalid_request", None),
        ({"prompt": MARKER, "echo": MARKER}, "invalid_request", "echo"),
    ],
)
def test_errors(client, unharmed, fields, code, param):
    check_error(refused(client, **fields), 400, code, param)


def test_a_row_that_is_not_finite(limited):
    """The row is not finite because the best token's logit is infinite."""
    check_error(refused(limited), 500, "nonfinite_score")


def test_a_model_with_classes_has_no_next_tokens():
    service = stub_service()
    loaded(service).engine.limits = replace(StubEngine.limits, classes=("good", "bad"))
    body = {"method": "POST", "url": "/v1/completions", "json": {"prompt": IDS} | LM_EVAL}
    (reply,) = ask(service, body)
    assert "classes, not tokens" in check_error(reply, 400, "invalid_request")


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "embeddings"])
def test_routes_that_generate(client, path):
    error = client.post(f"/v1/{path}", json={"messages": [{"role": "user", "content": MARKER}]})
    message = check_error(error, 400, "invalid_request")
    assert "scores only and generates nothing" in message

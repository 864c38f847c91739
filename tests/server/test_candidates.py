"""Promise: /v1/completions returns the log-probabilities of given tokens at given rows of prompts,
ragged and aligned with the request, as transformers computes them."""

import numpy as np
import pytest
import torch

from support.models import random_ids

CANDIDATES = [5, 399, 17, 17]


def complete(client, prompt, ids, **fields):
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "prompt_logprob_token_ids": ids}
    return client.post("/v1/completions", json=body | fields)


def answered(client, prompt, ids, **fields):
    reply = complete(client, prompt, ids, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def expected_of(model, prompt):
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def near(got, expected):
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("start", "fields"),
    [(0, {}), (1, {"logprobs": 2}), (64, {"max_tokens": 1}), (109, {"logprobs": 2}), (64, {})],
    ids=str,
)
def test_the_same_tokens_in_every_row(client, model, start, fields):
    """Two prompts share their beginning, one is another's, and pages are cached the second time."""
    rng = np.random.default_rng(start)
    first = random_ids(rng, 111)
    prompts = [first, first[:110] + random_ids(rng, 40), random_ids(rng, 130), list(first)]
    plain = {"prompt": prompts, "max_tokens": 0, "echo": True} | fields
    known = client.post("/v1/completions", json=plain).json()["choices"]
    for _ in range(2):
        choices = answered(client, prompts, CANDIDATES, prompt_logprob_start=start, **fields)
        for prompt, choice, other in zip(prompts, choices, known, strict=True):
            rows = choice.pop("prompt_token_id_logprobs")
            assert [*map(len, rows)] == [4] * (len(prompt) - 1 - start)
            near(rows, expected_of(model[1], prompt)[start:-1][:, CANDIDATES])
            assert choice["text"] == other["text"]
            assert (choice["logprobs"] is None) == (other["logprobs"] is None)
            if other["logprobs"] is not None:
                near(
                    choice["logprobs"]["token_logprobs"][1:],
                    other["logprobs"]["token_logprobs"][1:],
                )
                assert choice["logprobs"]["tokens"] == other["logprobs"]["tokens"]


@pytest.mark.parametrize("start", [0, 70])
def test_a_list_of_its_own_for_each_row(client, model, start):
    rng = np.random.default_rng(3)
    prompt = random_ids(rng, 400)
    lists = [random_ids(rng, int(n)) for n in rng.integers(0, 9, 399 - start)]
    lists[3], lists[7] = random_ids(rng, 256), []
    expected = expected_of(model[1], prompt)
    for more in ({}, {}, {"logprobs": 0}, {"max_tokens": 1}):
        (choice,) = answered(client, prompt, lists, prompt_logprob_start=start, **more)
        rows = choice["prompt_token_id_logprobs"]
        for row, (got, ids) in enumerate(zip(rows, lists, strict=True), start):
            near(got, expected[row, ids])


def test_other_candidates_do_not_get_kept_rows(client, model):
    """The rows of cached pages are kept for the tokens that were asked for."""
    prompt = random_ids(np.random.default_rng(8), 200)
    expected = expected_of(model[1], prompt)
    for ids in ([3, 9], [3, 10], [9], [3, 9]):
        (choice,) = answered(client, prompt, ids)
        near(choice["prompt_token_id_logprobs"], expected[:-1][:, ids])


WRONG = {
    "no echo": ({"echo": False, "max_tokens": 1}, "ids", "needs echo"),
    "start alone": (
        {"prompt_logprob_token_ids": None, "prompt_logprob_start": 1},
        "start",
        "needs",
    ),
    "start": ({"prompt_logprob_start": 4}, "start", "prompt[0] of 5 tokens has the rows 0 to 3"),
    "negative": ({"prompt_logprob_start": -1}, "start", "is -1"),
    "one token": ({"prompt": [[5], [6, 7]]}, "start", "prompt[0] of 1 tokens has the rows 0 to -1"),
    "id": ({"prompt_logprob_token_ids": [3, 400]}, "ids", "token id 400, valid are 0 to 399"),
    "lists": ({"prompt_logprob_token_ids": [[3]] * 3}, "ids", "3 lists for 4 rows"),
    "several": ({"prompt": [[5, 6], [7, 8]], "prompt_logprob_token_ids": [[3]]}, "ids", "1 lists"),
    "mixed": ({"prompt_logprob_token_ids": [3, [3]]}, "ids", "or a list of them per row"),
    "many": ({"prompt_logprob_token_ids": [3] * 257}, "ids", "257 candidates, the limit is 256"),
    "a row": ({"prompt_logprob_token_ids": [[], [3], [-1], []]}, "ids[2]", "token id -1"),
    "in all": (
        {"prompt": [[5] * 400] * 50, "prompt_logprob_token_ids": [3] * 256},
        "ids",
        "5107200",
    ),
}


@pytest.mark.parametrize(("fields", "place", "message"), WRONG.values(), ids=WRONG)
def test_what_is_refused(client, fields, place, message):
    body = {"prompt": [5, 6, 7, 8, 9], "ids": [3]} | fields
    reply = complete(client, body.pop("prompt"), body.pop("ids"), **body)
    assert reply.status_code == 400
    name, _, index = place.partition("[")
    names = {"ids": "prompt_logprob_token_ids", "start": "prompt_logprob_start"}
    assert reply.json()["error"]["param"] == names[name] + ("[" + index if index else "")
    assert message in reply.json()["error"]["message"]

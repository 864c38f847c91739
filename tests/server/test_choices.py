"""Promise: prompts that continue one context share its rows, in one request or in many, and their
log-likelihoods are transformers'."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from gpuscore.dialects.completions import alike
from support.connections import connected
from support.models import make_model, random_ids
from support.serving import QUICK, serving

CONTEXT = 400
CHOICES = (3, 17, 1, 9)
LM_EVAL = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("choices")
    return directory, make_model(directory, "qwen3")


@pytest.fixture(scope="module")
def client(model):
    with serving(model[0], *QUICK) as running, connected(running) as opened:
        yield opened


@pytest.fixture(scope="module")
def deterministic(model):
    with serving(model[0], *QUICK, "--deterministic") as running, connected(running) as opened:
        yield opened


def task(seed, count=1):
    """Return the prompts of a task's documents, each a context with every choice."""
    rng = np.random.default_rng(seed)
    contexts = [random_ids(rng, CONTEXT) for _ in range(count)]
    return [context + random_ids(rng, n) for context in contexts for n in CHOICES]


def wanted(model, prompts):
    """Return lm-eval's numbers from transformers: the sum over each choice, and if it is greedy."""
    choices = []
    for prompt in prompts:
        with torch.no_grad():
            logits = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
        rows, tokens = logits[CONTEXT - 1 : -1], torch.tensor(prompt[CONTEXT:])
        values = rows.gather(1, tokens[:, None]).sum()
        choices.append((float(values), bool((rows.argmax(1) == tokens).all())))
    return choices


def ask(client: httpx.Client, prompts, salt):
    """Return lm-eval's numbers and the usage of one request."""
    body = {"prompt": prompts, "cache_salt": salt} | LM_EVAL
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = []
    for choice in answer.json()["choices"]:
        values = choice["logprobs"]["token_logprobs"][CONTEXT:-1]
        tops = choice["logprobs"]["top_logprobs"][CONTEXT:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        choices.append((sum(values), greedy))
    return choices, answer.json()["usage"]


def computed(*usages):
    return sum(u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usages)


def counters(client):
    """Return the tokens of prompts, and those that were cached, from the metrics."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = {s.name: s.value for f in families for s in f.samples if "replica" not in s.labels}
    return [samples[f"gpuscore_{name}_tokens_total"] for name in ("prompt", "cached")]


def close_to(choices, expected):
    np.testing.assert_allclose(
        [f[0] for f in choices], [w[0] for w in expected], atol=1e-4 * max(CHOICES)
    )
    assert [f[1] for f in choices] == [w[1] for w in expected]


def test_a_list_of_choices_computes_at_most_a_third_of_its_tokens(client, model):
    prompts, before = task(0), counters(client)
    expected, total = wanted(model[1], prompts), sum(map(len, task(0)))
    choices, usage = ask(client, prompts, "cold")
    close_to(choices, expected)
    assert usage["prompt_tokens"] == total
    assert computed(usage) <= total / 3
    again, cached = ask(client, prompts, "cold")
    close_to(again, expected)
    assert computed(cached) <= total / 9
    alone, usages = zip(
        *(ask(client, [p], f"alone-{n}") for n, p in enumerate(prompts)), strict=True
    )
    assert computed(*usages) == total, "nothing is shared across salts"
    close_to([numbers for (numbers,) in alone], expected)
    prompt, hits = (b - a for a, b in zip(before, counters(client), strict=True))
    assert prompt - hits == computed(usage, cached, *usages)


def test_choices_in_requests_of_their_own_compute_at_most_a_third(client, model):
    """The harness sends them so by default, one after the other or several at a time."""
    for seed, threads in ((1, 1), (2, 4)):
        prompts = task(seed)
        with ThreadPoolExecutor(threads) as pool:
            answers = [*pool.map(lambda p, salt=f"s{seed}": ask(client, [p], salt), prompts)]
        close_to([choice for (choice,), _ in answers], wanted(model[1], prompts))
        usages = [usage for _, usage in answers]
        assert computed(*usages) <= sum(map(len, prompts)) / 3


@pytest.mark.parametrize("name", ["client", "deterministic"])
def test_lists_of_several_documents_share_each_context(request, name, model):
    """Prompts come in any order, and choices of one document in two lists."""
    client = request.getfixturevalue(name)
    prompts = task(3, count=3)
    order = np.random.default_rng(0).permutation(len(prompts)).tolist()
    usages = []
    for part in (order[:6], order[6:]):
        some = [prompts[i] for i in part]
        choices, usage = ask(client, some, "documents")
        close_to(choices, wanted(model[1], some))
        assert usage["prompt_tokens"] == sum(map(len, some))
        usages.append(usage)
    assert computed(*usages) <= sum(map(len, prompts)) / 2.5


def test_prompts_that_begin_alike_are_a_group():
    rng = np.random.default_rng(0)
    context, other = (rng.integers(0, 999, 40).astype(np.int32) for _ in range(2))
    short = context[:20]  # the beginning of others, which are not its choices
    prompts = [
        *(np.append(context, np.int32(n)) for n in range(2)),
        *(np.append(other, np.int32(n)) for n in range(2)),
        np.append(short, rng.integers(0, 999, 30).astype(np.int32)),
        context[:35],
    ]
    assert alike([prompts[i] for i in (0, 2, 4, 1, 5, 3)], 16) == [[0, 3, 4], [1, 5], [2]]
    assert alike(prompts, 2) == [[0, 1, 2, 3, 4, 5]]
    assert alike(prompts[:1], 1) == [[0]]

"""Promise: LiteLLM gets the ranking and the errors through each of its providers."""

import litellm
import pytest

from asked import DOCUMENTS, QUERY

ASKED = {"query": QUERY, "documents": list(DOCUMENTS)}

# provider -> path of the base URL
PROVIDERS = {
    "cohere": "",
    "hosted_vllm": "",
    "hosted_vllm with /v1": "/v1",
    "hosted_vllm with a whole path": "/v1/rerank",
    "jina_ai": "/v1/rerank",
    "infinity": "",
    "huggingface": "",
}


def rerank(url, key, provider, **options):
    return litellm.rerank(
        model=f"{provider.split()[0]}/demo", api_base=url, api_key=key, **ASKED | options
    )


def pairs(answer):
    return [(result["index"], result["relevance_score"]) for result in answer.results]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rerank(server, ranking, is_same, provider):
    url = server.url + PROVIDERS[provider]
    if provider == "infinity":
        url = server.url + "/infinity"  # /infinity returns documents as text
    answer = rerank(url, server.key, provider)
    assert is_same(pairs(answer), ranking)
    best = rerank(url, server.key, provider, top_n=2, return_documents=True)
    assert is_same(pairs(best), ranking[:2])
    assert best.results[0]["document"]["text"] == DOCUMENTS[ranking[0][0]]


@pytest.mark.parametrize("provider", ["cohere", "hosted_vllm", "huggingface"])
def test_wrong_key(server, provider):
    with pytest.raises(litellm.AuthenticationError):
        rerank(server.url, "wrong", provider)


@pytest.mark.parametrize("provider", ["cohere", "hosted_vllm"])
def test_no_room_is_a_rate_limit(server, full, provider):
    with pytest.raises(litellm.RateLimitError):
        rerank(server.url, server.key, provider, max_retries=0)


def test_text_completion(server):
    ids = [40, 50, 60]
    answer = litellm.text_completion(
        model="text-completion-openai/demo",
        api_base=server.url + "/v1",
        api_key=server.key,
        prompt=[ids],
        echo=True,
        logprobs=1,
        max_tokens=1,
    )
    (choice,) = answer.choices
    body = {"items": [ids[:2]], "label_token_ids": [ids[2]], "return_label_logprobs": True}
    wanted = server.post("/v1/score", body)["label_logprobs"][0][0]
    assert choice.logprobs.token_logprobs[2] == pytest.approx(wanted, abs=1e-4)
    assert len(choice.logprobs.token_logprobs) == 4

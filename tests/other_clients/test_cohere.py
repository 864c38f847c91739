"""Promise: Cohere's clients get the ranking and the errors, and honour Retry-After."""

import asyncio

import cohere
import pytest
from cohere.errors import BadRequestError, UnauthorizedError

from asked import DOCUMENTS, QUERY

ASKED = {"model": "demo", "query": QUERY, "documents": list(DOCUMENTS)}


def pairs(answer):
    return [(result.index, result.relevance_score) for result in answer.results]


def test_v2(server, ranking, is_same):
    client = cohere.ClientV2(api_key=server.key, base_url=server.url)
    answer = client.rerank(**ASKED)
    assert is_same(pairs(answer), ranking)
    assert answer.id
    assert answer.meta.api_version.version == "2"
    assert answer.meta.billed_units.search_units == 1
    assert is_same(pairs(client.rerank(**ASKED, top_n=2, max_tokens_per_doc=4096)), ranking[:2])


def test_v2_async(server, ranking, is_same):
    async def ask():
        client = cohere.AsyncClientV2(api_key=server.key, base_url=server.url)
        return await client.rerank(**ASKED)

    assert is_same(pairs(asyncio.run(ask())), ranking)


def test_v1(server, ranking, is_same):
    client = cohere.Client(api_key=server.key, base_url=server.url)
    answer = client.rerank(**ASKED, return_documents=True)
    assert is_same(pairs(answer), ranking)
    assert [r.document.text for r in answer.results] == [DOCUMENTS[i] for i, _ in ranking]


def test_v1_documents_that_are_objects(server, ranking, is_same):
    client = cohere.Client(api_key=server.key, base_url=server.url)
    objects = [{"text": text, "number": str(i)} for i, text in enumerate(DOCUMENTS)]
    asked = ASKED | {"documents": objects}
    assert is_same(pairs(client.rerank(**asked)), ranking)
    named = client.rerank(**asked, rank_fields=["text"], top_n=3, return_documents=True)
    assert is_same(pairs(named), ranking[:3])
    assert named.results[0].document.text == DOCUMENTS[ranking[0][0]]


@pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
def test_wrong_key(server, kind):
    with pytest.raises(UnauthorizedError) as caught:
        kind(api_key="wrong", base_url=server.url).rerank(**ASKED)
    assert "API key" in caught.value.body["error"]["message"]


def test_errors_have_the_servers_words(server):
    client = cohere.ClientV2(api_key=server.key, base_url=server.url)
    with pytest.raises(BadRequestError) as caught:
        client.rerank(**ASKED | {"documents": []})
    assert "documents" in caught.value.body["error"]["message"]
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(**ASKED | {"model": "another"})


def test_retry_after_is_honoured(server, full_at_first, ranking, is_same):
    client = cohere.ClientV2(api_key=server.key, base_url=server.url)
    assert is_same(pairs(client.rerank(**ASKED)), ranking)
    assert 1.0 <= full_at_first.seconds < 5

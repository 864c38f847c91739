"""Promise: Infinity's client gets the ranking, with documents as text."""

from infinity_client import AuthenticatedClient, Client
from infinity_client.api.default import rerank
from infinity_client.models import RerankInput
from infinity_client.types import Unset

from asked import DOCUMENTS, QUERY


def asked(**options):
    return RerankInput(query=QUERY, documents=list(DOCUMENTS), model="demo", **options)


def pairs(answer):
    return [(result.index, result.relevance_score) for result in answer.results]


def test_rerank(server, ranking, is_same):
    client = AuthenticatedClient(base_url=server.url, token=server.key)
    answer = rerank.sync(client=client, body=asked())
    assert is_same(pairs(answer), ranking)
    assert answer.model == "demo"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
    assert all(
        not result.document or isinstance(result.document, Unset) for result in answer.results
    )
    assert is_same(pairs(rerank.sync(client=client, body=asked(top_n=2))), ranking[:2])


def test_documents_are_text(server, ranking):
    client = AuthenticatedClient(base_url=server.url + "/infinity", token=server.key)
    answer = rerank.sync(client=client, body=asked(return_documents=True))
    assert [result.document for result in answer.results] == [DOCUMENTS[i] for i, _ in ranking]


def test_raw_scores(server, ranking):
    client = AuthenticatedClient(base_url=server.url, token=server.key)
    numbered = pairs(rerank.sync(client=client, body=asked(raw_scores=True)))
    assert [index for index, _ in numbered] == [index for index, _ in ranking]
    assert numbered[0][1] > 1 > 0 > numbered[-1][1]


def test_without_a_key(server):
    client = Client(base_url=server.url)
    answer = rerank.sync_detailed(client=client, body=asked())
    assert (answer.status_code, answer.parsed) == (401, None)

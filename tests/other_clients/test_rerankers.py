"""Promise: the rerankers library gets the ranking through each of its API providers."""

import pytest
from rerankers.models.api_rankers import APIRanker

from asked import DOCUMENTS, QUERY

PATHS = {"cohere": "/v1/rerank", "jina": "/v1/rerank", "text-embeddings-inference": "/rerank"}


@pytest.mark.parametrize("provider", PATHS)
def test_rank(server, ranking, is_same, provider):
    url = server.url + PATHS[provider]
    ranker = APIRanker("demo", server.key, provider, url=url)
    ranked = ranker.rank(QUERY, list(DOCUMENTS), doc_ids=list(range(5)))
    assert is_same([(result.doc_id, result.score) for result in ranked.results], ranking)
    assert [result.text for result in ranked.results] == [DOCUMENTS[i] for i, _ in ranking]


def test_wrong_key(server):
    ranker = APIRanker("demo", "wrong", "cohere", url=server.url + "/v1/rerank")
    with pytest.raises(KeyError, match="results"):  # the client looks at nothing else
        ranker.rank(QUERY, list(DOCUMENTS))

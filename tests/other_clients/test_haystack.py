"""Promise: Haystack's ranker for Cohere gets the ranking, and an error for a wrong key."""

import pytest
from cohere.errors import UnauthorizedError
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker

from asked import DOCUMENTS, QUERY
from page import installed, printed_and_shown


def ranked(server, key, **options):
    ranker = CohereRanker(
        model="demo", api_key=Secret.from_token(key), api_base_url=server.url, **options
    )
    ranker.warm_up()
    documents = [Document(content=text, meta={"number": i}) for i, text in enumerate(DOCUMENTS)]
    ranked_documents = ranker.run(query=QUERY, documents=documents)["documents"]
    return [(document.meta["number"], document.score) for document in ranked_documents]


def test_ranker(server, ranking, is_same):
    assert is_same(ranked(server, server.key), ranking)
    assert is_same(ranked(server, server.key, top_k=2), ranking[:2])


def test_wrong_key(server):
    with pytest.raises(UnauthorizedError):
        ranked(server, "wrong")


def test_the_program_of_the_page(server):
    assert installed("Haystack", "cohere")
    printed, shown = printed_and_shown("Haystack", server.url, server.key)
    assert printed == shown

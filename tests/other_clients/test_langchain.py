"""Promise: LangChain's compressors for Cohere, Jina and Infinity get the ranking and the errors."""

import pytest
from infinity_client import Client
from langchain_cohere import CohereRerank
from langchain_community.document_compressors import InfinityRerank, JinaRerank
from langchain_community.document_compressors import jina_rerank as jina_module
from langchain_core.documents import Document

from asked import DOCUMENTS, QUERY
from page import installed, printed_and_shown

TEXTS = [Document(text, metadata={"number": i}) for i, text in enumerate(DOCUMENTS)]


def pairs(results):
    return [(result["index"], result["relevance_score"]) for result in results]


def compressed(compressor):
    compressed_documents = compressor.compress_documents(TEXTS, QUERY)
    return [
        (document.metadata["number"], document.metadata["relevance_score"])
        for document in compressed_documents
    ]


def test_cohere(server, ranking, is_same):
    asked = {"model": "demo", "cohere_api_key": server.key, "base_url": server.url}
    compressor = CohereRerank(**asked, top_n=5)
    assert is_same(compressed(compressor), ranking)
    assert is_same(pairs(compressor.rerank(TEXTS, QUERY, top_n=2)), ranking[:2])
    everything = compressor.rerank(list(DOCUMENTS), QUERY, top_n=None)  # sends null
    assert is_same(pairs(everything), ranking)


def test_jina(server, ranking, is_same, monkeypatch):
    monkeypatch.setattr(jina_module, "JINA_API_URL", server.url + "/v1/rerank")
    compressor = JinaRerank(model="demo", jina_api_key=server.key, top_n=4)
    assert is_same(compressed(compressor), ranking[:4])
    wrong = JinaRerank(model="demo", jina_api_key="wrong")
    with pytest.raises(RuntimeError, match="invalid_api_key"):  # the client reads `detail`
        wrong.rerank(TEXTS, QUERY)


def test_infinity(server, ranking, is_same):
    client = Client(base_url=server.url, headers={"Authorization": f"Bearer {server.key}"})
    compressor = InfinityRerank(client=client, model="demo", top_n=3)
    assert is_same(compressed(compressor), ranking[:3])


def test_the_program_of_the_page(server):
    assert installed("LangChain", "langchain")
    printed, shown = printed_and_shown("LangChain", server.url, server.key)
    assert printed == shown

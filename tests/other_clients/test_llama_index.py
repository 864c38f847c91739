"""Promise: LlamaIndex's rerankers for Cohere, Jina and TEI get the ranking and the errors."""

import pytest
from cohere.errors import UnauthorizedError
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

from asked import DOCUMENTS, QUERY
from page import installed, printed_and_shown


def ranked(postprocessor):
    nodes = [
        NodeWithScore(node=TextNode(text=text, id_=str(i)), score=0.0)
        for i, text in enumerate(DOCUMENTS)
    ]
    ranked_nodes = postprocessor.postprocess_nodes(nodes, query_str=QUERY)
    return [(int(node.node.node_id), node.score) for node in ranked_nodes]


def test_cohere(server, ranking, is_same):
    asked = {"model": "demo", "base_url": server.url}
    assert is_same(ranked(CohereRerank(api_key=server.key, top_n=3, **asked)), ranking[:3])
    with pytest.raises(UnauthorizedError):
        ranked(CohereRerank(api_key="wrong", **asked))


def test_jina(server, ranking, is_same):
    asked = {"model": "demo", "base_url": server.url + "/v1"}
    assert is_same(ranked(JinaRerank(api_key=server.key, top_n=4, **asked)), ranking[:4])
    with pytest.raises(RuntimeError, match="invalid_api_key"):  # the client reads `detail`
        ranked(JinaRerank(api_key="wrong", **asked))


def test_tei(server, ranking, is_same):
    for token in (server.key, f"Bearer {server.key}"):  # the client sends the token unchanged
        postprocessor = TextEmbeddingInference(base_url=server.url, top_n=5, auth_token=token)
        assert is_same(ranked(postprocessor), ranking)
    with pytest.raises(AssertionError):  # the client checks only the number of results
        ranked(TextEmbeddingInference(base_url=server.url, auth_token="wrong"))


def test_the_program_of_the_page(server):
    assert installed("LlamaIndex", "llama_index")
    printed, shown = printed_and_shown("LlamaIndex", server.url, server.key)
    assert printed == shown

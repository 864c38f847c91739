"""Promise: LangChain's client of NVIDIA's NIM for rerankers gets the ranking and the errors."""

import math

import pytest
from langchain_core.documents import Document
from langchain_nvidia_ai_endpoints import NVIDIARerank

from asked import DOCUMENTS, QUERY

TEXTS = [Document(page_content=text, metadata={"number": i}) for i, text in enumerate(DOCUMENTS)]


def ranker(server, **more):
    return NVIDIARerank(
        base_url=f"{server.url}/v1", model="demo", api_key=server.key, top_n=5, **more
    )


def compressed(documents):
    """Return numbers and relevances: the demo's is the logistic function of its raw score."""
    return [
        (document.metadata["number"], 1 / (1 + math.exp(-document.metadata["relevance_score"])))
        for document in documents
    ]


@pytest.mark.parametrize("more", [{}, {"truncate": "END"}, {"max_batch_size": 2}], ids=str)
def test_the_ranking(server, ranking, is_same, more):
    documents = ranker(server, **more).compress_documents(TEXTS, QUERY)
    assert is_same(compressed(documents), ranking)


def test_the_served_models_are_listed(server):
    assert "demo" in [model.id for model in ranker(server).available_models]


def test_an_image_is_refused(server):
    image = "data:image/png;base64,AAAA"
    pictured = [Document(page_content="a chair", metadata={"image": image})]
    with pytest.raises(Exception, match="reads no images"):
        ranker(server).compress_documents(pictured, QUERY)


def test_a_wrong_key(server):
    wrong = NVIDIARerank(base_url=f"{server.url}/v1", model="demo", api_key="wrong")
    with pytest.raises(Exception, match="401"):
        wrong.compress_documents(TEXTS, QUERY)

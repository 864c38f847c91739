"""Promise: tritonclient, which speaks the Open Inference Protocol, finds the model and gets its
scores, with texts as JSON and as binary tensors."""

from urllib.parse import urlsplit

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from asked import DOCUMENTS, QUERY


@pytest.fixture
def client(server):
    with InferenceServerClient(urlsplit(server.url).netloc) as opened:
        yield opened


@pytest.fixture
def key(server):
    return {"Authorization": f"Bearer {server.key}"}


def tensor(name, texts, binary):
    made = InferInput(name, [len(texts)], "BYTES")
    made.set_data_from_numpy(np.array([t.encode() for t in texts], object), binary_data=binary)
    return made


def test_the_server_and_the_model_are_found(client, key):
    assert client.is_server_live()  # probes need no key
    assert client.is_server_ready()
    assert client.is_model_ready("demo")
    assert client.get_server_metadata(headers=key)["name"] == "gpuscore"
    told = client.get_model_metadata("demo", headers=key)
    assert {"name": "documents", "datatype": "BYTES", "shape": [-1]} in told["inputs"]


def test_another_model_is_not_ready(client, key):
    assert not client.is_model_ready("other", headers=key)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("named", [True, False], ids=["output named", "all outputs"])
def test_documents_get_their_scores(client, key, ranking, is_same, binary, named):
    inputs = [tensor("query", [QUERY], binary), tensor("documents", DOCUMENTS, binary)]
    outputs = [InferRequestedOutput("scores", binary_data=binary)] if named else None
    result = client.infer("demo", inputs, outputs=outputs, headers=key)
    scores = result.as_numpy("scores")
    assert (scores.shape, scores.dtype) == ((len(DOCUMENTS),), np.float64)
    ranked = sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])
    assert is_same(ranked, ranking)


def test_items_get_a_row_of_labels(client, key, server):
    query, items, labels = "query: x\nitem: ", ["a lamp", "a chair é 中"], ["yes", "no"]
    body = {"query": query, "items": items, "labels": labels, "apply_softmax": True}
    inputs = [tensor("query", [query], True), tensor("items", items, True)]
    inputs.append(tensor("labels", labels, False))
    result = client.infer("demo", inputs, parameters={"apply_softmax": True}, headers=key)
    wanted = server.post("/v1/score", body)["scores"]
    np.testing.assert_allclose(result.as_numpy("scores"), wanted, atol=1e-4)


def test_errors_come_as_text(client, key):
    inputs = [tensor("query", [QUERY, QUERY], True), tensor("documents", DOCUMENTS, True)]
    with pytest.raises(InferenceServerException, match="query is one text, not 2") as refused:
        client.infer("demo", inputs, headers=key)
    assert refused.value.status() == "400"


def test_a_wrong_key_is_refused(client):
    with pytest.raises(InferenceServerException) as refused:
        client.infer("demo", [tensor("items", ["a"], True)], headers={"Authorization": "Bearer x"})
    assert refused.value.status() == "401"

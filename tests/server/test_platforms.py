"""Promise: routes of managed platforms answer with the bodies of our own, within the same limits,
and are there only if they are asked for."""

import json
import random
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import gpuscore
from gpuscore.config.platforms import IMPLIED
from gpuscore.config.sources import read_settings
from gpuscore.dialects.platforms import platform_routes
from gpuscore.errors import ConfigError
from support.connections import check_error, connected, same_answer
from support.hostile_requests import entries, faults, names, sent
from support.serving import QUICK, serving

SCORE = {"query": "item: ", "items": ["a", "b c"], "labels": ["yes", "no"], "apply_softmax": True}
RERANK = {"query": "a blue chair", "documents": ["A red lamp.", "A chair in blue.", "A scarf."]}
CLASSIFY = {"input": ["a lamp"], "labels": ["yes", "no"]}
BODIES = {"/v1/score": SCORE, "/rerank": RERANK, "/v1/classify": CLASSIFY}
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
INFER, LENGTH = "/v2/models/demo/infer", "Inference-Header-Content-Length"
PATHS = {"AIP_HTTP_PORT": "8080", "AIP_PREDICT_ROUTE": "/v1/m:predict", "AIP_HEALTH_ROUTE": "/well"}
ALL = ("--routes", "sagemaker,vertex,kserve", "--host", "127.0.0.1")
GETS = ("/ping", "/well", "/v2/health/ready", "/v2/health/live", "/v2/models/demo/ready")


@pytest.fixture(scope="module")
def server():
    flags = ("--max-items", "500", "--max-body-bytes", "1048576", "--allowed-hosts", "*")
    with serving("demo", *QUICK, *ALL, *flags, environment=PATHS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with connected(server) as opened:
        yield opened


def told(reply: httpx.Response):
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_tensor(name, texts, **more):
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts} | more


def inference(body, **more):
    tensors = [
        text_tensor(name, [value] if isinstance(value, str) else value)
        for name, value in body.items()
        if name in ("query", "items", "documents", "labels")
    ]
    return {"inputs": tensors} | more


@pytest.mark.parametrize("path", GETS)
def test_probes(client, path):
    assert client.get(path).status_code == 200


@pytest.mark.parametrize("path", [*GETS, "/v2", "/v2/models/demo"])
def test_without_the_setting_there_is_no_such_route(demo, path):
    check_error(demo.get(path), 404, "not_found")
    check_error(demo.post("/invocations", json=SCORE), 404, "not_found")
    check_error(demo.post(INFER, json=inference(SCORE)), 404, "not_found")


@pytest.mark.parametrize("path", BODIES)
def test_sagemaker_takes_our_bodies(client, path):
    """Send each as one request, and as a line of a file that batch transform splits."""
    wanted = told(client.post(path, json=BODIES[path]))
    same_answer(told(client.post("/invocations", json=BODIES[path])), wanted)
    named = client.post("/invocations", json=BODIES[path], headers={ATTRIBUTES: path})
    same_answer(told(named), wanted)
    line = json.dumps(BODIES[path]).encode() + b"\n"
    kind = {"Content-Type": "application/json"}
    same_answer(told(client.post("/invocations", content=line, headers=kind)), wanted)


def test_sagemakers_attributes_choose_the_route(client):
    body = {"prompt": "a lamp"}
    reply = client.post("/invocations", json=body, headers={ATTRIBUTES: "/tokenize"})
    assert reply.json()["count"] == len(reply.json()["tokens"])
    for wrong in ("/v1/chat/completions", "/metrics", "x"):
        reply = client.post("/invocations", json=SCORE, headers={ATTRIBUTES: wrong})
        message = check_error(reply, 400, "invalid_request")
        assert message.startswith("CustomAttributes must be one of /v1/score, ")


def test_vertex_answers_every_instance(client):
    alone = [told(client.post(path, json=body)) for path, body in BODIES.items()]
    reply = client.post("/v1/m:predict", json={"instances": [*BODIES.values()]})
    same_answer(told(reply)["predictions"], alone)
    assert client.post("/v1/m:predict", json={"instances": []}).json() == {"predictions": []}


def test_vertex_parameters_are_fields_of_all_instances(client):
    common, instances = {"labels": ["yes", "no"], "apply_softmax": True}, [{"items": ["a"]}] * 2
    instances.append({"items": ["a"], "apply_softmax": False})
    body = {"instances": instances, "parameters": common}
    answer = client.post("/v1/m:predict", json=body).json()
    scores = [prediction["scores"][0] for prediction in answer["predictions"]]
    assert scores[0] == scores[1]
    assert sum(scores[0]) == pytest.approx(1)
    assert sum(scores[2]) < 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_request", None),
        ({"instances": [SCORE, {"items": 3}]}, "invalid_request", "instances[1].items"),
        ({"instances": [SCORE, {"itms": []}]}, "invalid_request", "instances[1].itms"),
        ({"instances": [SCORE] * 129}, "too_many_items", "instances"),
        ({"instances": [SCORE | {"items": ["a"] * 300}] * 2}, "too_many_items", None),
        ({"instances": [SCORE, SCORE | {"model": "demo"}]}, "invalid_request", "model"),
        ({"instances": [SCORE, SCORE | {"cache_salt": "x"}]}, "invalid_request", "cache_salt"),
        ({"instances": [SCORE], "other": 1}, "invalid_request", "other"),
        ({"instances": [SCORE | {"model": "x"}]}, "model_not_found", "model"),
        ({"instances": [{"items": ["a"], "labels": []}]}, "empty_labels", "instances[0].labels"),
    ],
)
def test_vertex_refuses_what_is_wrong(client, body, code, param):
    status = 404 if code == "model_not_found" else 400
    reply = client.post("/v1/m:predict", json=body)
    check_error(reply, status, code)
    assert param in (None, reply.json()["error"]["param"])


def test_tensors_get_the_scores(client):
    ranked = client.post("/rerank", json=RERANK).json()["results"]
    wanted = [
        entry["relevance_score"] for entry in sorted(ranked, key=lambda entry: entry["index"])
    ]
    answer = client.post(INFER, json=inference(RERANK)).json()
    (tensor,) = answer["outputs"]
    expected = {"name": "scores", "shape": [3], "datatype": "FP64", "data": wanted}
    same_answer(tensor, expected)
    assert answer["model_name"] == "demo"
    body = inference(SCORE, parameters={"apply_softmax": True}, outputs=[{"name": "scores"}])
    (tensor,) = client.post(INFER, json=body).json()["outputs"]
    assert tensor["shape"] == [2, 2]
    same_answer(tensor["data"], client.post("/v1/score", json=SCORE).json()["scores"])


def packed(texts):
    data = [text.encode() for text in texts]
    return b"".join(len(text).to_bytes(4, "little") + text for text in data)


def post_packed(client, body, tail, length=None):
    head = json.dumps(body).encode()
    fields = {LENGTH: str(len(head) if length is None else length)}
    return client.post(INFER, content=head + tail, headers=fields)


def test_binary_tensors_are_the_same_texts(client):
    tails, tensors = b"", []
    for name in ("query", "documents"):
        texts = [RERANK[name]] if name == "query" else RERANK[name]
        tail = packed(texts)
        tensors.append(
            text_tensor(name, texts, data=None, parameters={"binary_data_size": len(tail)})
        )
        tails += tail
    reply = post_packed(client, {"inputs": tensors}, tails)
    assert reply.status_code == 200, reply.text
    wanted = client.post(INFER, json=inference(RERANK)).json()["outputs"]
    same_answer(reply.json()["outputs"], wanted)


def binary(size, shape=(1,), **more):
    return {
        "inputs": [
            text_tensor("items", [], shape=[*shape], data=None)
            | {"parameters": {"binary_data_size": size}}
            | more
        ]
    }


@pytest.mark.parametrize(
    ("body", "tail", "length"),
    [
        (binary(5), b"\1\0\0\0a", 10**6),
        (binary(6), b"\1\0\0\0a", None),
        (binary(5), b"\1\0\0\0ab", None),
        (binary(5), b"\2\0\0\0a", None),
        (binary(5), b"\1\0\0\0\xff", None),
        (binary(5), b"\xff\xff\xff\xffa", None),
        (binary(5, [2]), b"\1\0\0\0a", None),
        (binary(5, [-1]), b"\1\0\0\0a", None),
        (binary(5, [-1, -1]), b"\1\0\0\0a", None),
        (binary(5, [2**62] * 40_000), b"\1\0\0\0a", None),
        (binary(True), b"\1\0\0\0a", None),
        (binary(-1), b"", None),
        (binary(5, datatype="FP32"), b"\1\0\0\0a", None),
        (binary(5, data=["a"]), b"\1\0\0\0a", None),
        (binary(5, name="other"), b"\1\0\0\0a", None),
    ],
)
def test_broken_tensors_are_refused_by_a_text(client, body, tail, length):
    reply = post_packed(client, body, tail, length)
    assert reply.status_code == 400, reply.text
    assert isinstance(reply.json()["error"], str)
    assert client.post(INFER, json=inference(RERANK)).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": {"top_n": 1}},
        {"parameters": {"model": "other"}},
        {"parameters": {"on_error": "null"}},
        {"outputs": [{"name": "other"}]},
        {"inputs": inference(RERANK)["inputs"] * 2},
        {"inputs": []},
        {"more": 1},
    ],
    ids=str,
)
def test_fields_that_a_tensor_cannot_answer_are_refused(client, change):
    reply = client.post(INFER, json=inference(RERANK) | change)
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("name", names())
def test_the_hostile_corpus(server, client, name):
    """The same bytes, to a platform's route."""
    quick = [entry for entry in entries(name) if not entry.slow and not entry.fails]
    for entry in quick:
        steps = tuple(
            step.replace(b"/v1/score ", b"/invocations ") if isinstance(step, bytes) else step
            for step in entry.steps
        )
        moved = replace(entry, steps=steps)
        assert list(faults(moved, sent(moved, server.address))) == [], entry.name
    assert client.post("/invocations", json=SCORE).status_code == 200


ODD = [None, [], {}, "", "x" * 300, -1, 0, 2**70, 1.5, True, [None], [[]], "\ud800", {"a": {}}]


def changed(value, rng):
    """Return a value with one part of it replaced by something odd."""
    inside = isinstance(value, dict | list) and [*value]
    if not inside or rng.random() < 0.2:
        return rng.choice(ODD)
    place = rng.choice(inside if isinstance(value, dict) else range(len(value)))
    copy = value.copy()
    copy[place] = changed(value[place], rng)
    return copy


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", SCORE),
        ("/invocations", RERANK),
        ("/v1/m:predict", {"instances": [SCORE, RERANK], "parameters": {"priority": 1}}),
        (INFER, inference(RERANK, parameters={"truncate": True})),
        (INFER, inference(SCORE, outputs=[{"name": "scores"}])),
        ("/v1/ranking", {"query": {"text": "a"}, "passages": [{"text": "b"}], "truncate": "END"}),
    ],
)
def test_changed_bodies_are_answered_or_refused(client, path, body):
    rng = random.Random(7)
    seen = set()
    for _ in range(150):
        data = json.dumps(changed(body, rng)).encode()
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
        reply = client.post(path, content=data, headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400, 404), (data, reply.text)
        seen.add(reply.status_code)
    assert 400 in seen
    assert client.post("/v1/score", json=SCORE).status_code == 200


def test_limits_and_types_hold_as_elsewhere(client):
    for path in ("/invocations", "/v1/m:predict", INFER):
        reply = client.post(path, json={"items": "x" * 2**20})
        assert reply.status_code == 413
        reply = client.post(path, content=b"{}", headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415
    assert client.post(INFER, content=b"{}").status_code == 400  # a client of Triton sends no type
    assert client.post("/invocations", content=b"{}").status_code == 415


def test_keys_hold_and_probes_are_open():
    variables = PATHS | {"GPUSCORE_API_KEY": "k"}
    with serving("demo", *QUICK, *ALL, environment=variables) as running:
        with connected(running) as stranger:
            for path in ("/invocations", "/v1/m:predict", INFER):
                assert stranger.post(path, json=SCORE).status_code == 401
            assert stranger.get("/v2/models/demo").status_code == 401
            assert {stranger.get(path).status_code for path in GETS} == {200}
        with connected(running, "k") as owner:
            assert owner.post("/invocations", json=SCORE).status_code == 200


def test_a_platform_implies_where_things_are():
    made = read_settings({}, {"GPUSCORE_ROUTES": "sagemaker"})
    assert made.chosen["model"].value == "/opt/ml/model"
    assert made.chosen["port"].value == 8080
    assert made.chosen["port"].source == "--routes sagemaker"
    environment = {"GPUSCORE_ROUTES": "sagemaker", "SAGEMAKER_BIND_TO_PORT": "9000"}
    assert read_settings({}, environment).chosen["port"].value == 9000
    assert read_settings({"port": 7}, environment).chosen["port"].value == 7
    assert read_settings({"models": "a=b"}, environment).chosen["model"].value == "demo"
    vertex = read_settings({}, {"AIP_HTTP_PORT": "8081"})
    assert vertex.chosen["routes"].value == "vertex"
    assert (vertex.chosen["host"].value, vertex.chosen["port"].value) == ("0.0.0.0", 8081)
    kserve = read_settings({"routes": "kserve"}, {})
    assert kserve.chosen["insecure"].value is False
    assert kserve.chosen["model"].value == "/mnt/models"
    with pytest.raises(ConfigError, match="GPUSCORE_MODEL"):
        read_settings({}, {"AIP_HTTP_PORT": "1", "AIP_STORAGE_URI": "gs://b"})
    with pytest.raises(ConfigError, match="AIP_HTTP_PORT must be a port, got x"):
        read_settings({}, {"AIP_HTTP_PORT": "x"})
    assert set(IMPLIED) == {"sagemaker", "vertex", "huggingface", "kserve"}


@pytest.mark.parametrize(("name", "path"), [("PREDICT", "/v1/score"), ("HEALTH", "x")])
def test_a_path_with_another_meaning_is_refused(name, path):
    with pytest.raises(ConfigError, match="AIP_PREDICT_ROUTE"):
        platform_routes("vertex", ["demo"], {f"AIP_{name}_ROUTE": path})


def test_an_unknown_platform_is_refused_at_start(tmp_path):
    with serving("demo", "--routes", "azure", wait=False, log=tmp_path / "log") as started:
        assert started.process.wait(timeout=60) == 78
    said = (tmp_path / "log").read_text()
    assert "--routes azure; supported: sagemaker, vertex, huggingface, kserve" in said


def test_sagemakers_container_starts_with_its_own_command(tmp_path):
    """`docker run IMAGE serve`, with the model where SageMaker puts it."""
    model = tmp_path / "model"
    model.symlink_to(Path(gpuscore.__file__).parent / "demo")
    variables = {
        "GPUSCORE_ROUTES": "sagemaker",
        "GPUSCORE_MODEL": str(model),
        "GPUSCORE_HOST": "127.0.0.1",
        "SAGEMAKER_BIND_TO_PORT": "0",
        "GPUSCORE_SERVED_MODEL_NAME": "demo",  # which tells the family
    }
    started = serving(model, *QUICK, port=(), environment=variables)
    with started as running, connected(running) as opened:
        assert opened.get("/ping").status_code == 200
        assert opened.post("/invocations", json=RERANK).json()["model"] == "demo"

"""Promise: several models in one server answer as each does alone, whatever befalls the others."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from gpuscore.config import RequestLimits, ServerConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.errors import Overloaded
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.http.admission import Admission
from gpuscore.server.service import ScoringService
from gpuscore.text.joining import PromptBuilder
from server.test_backlog import request
from support.connections import check_error
from support.serving import wait_until
from support.stub_service import StubEngine
from support.tape_backend import tape_logit, tape_lse
from support.tape_engine import OTHER_LSE, OTHER_VOCAB
from support.tape_servers import engines_of, tape_server

A, B = "a", "b"
PATIENCE = {"delay": 0.7}


@pytest.fixture(scope="module")
def running():
    named = {"TAPE_MODELS": f"{A},{B}"}
    with tape_server(PATIENCE, factory="by_directory", environment=named) as started:
        yield started


@pytest.fixture(scope="module")
def client(running):
    return running[1]


def body(model, *tokens, **fields):
    named = {"return_label_logprobs": True} | ({} if model is None else {"model": model})
    return {"query": [5, 6], "items": [list(tokens)], "label_token_ids": [3]} | named | fields


def expected(model, *tokens):
    """Return the logarithm of the score, since the scores themselves are near 0."""
    prompt = [5, 6, *tokens]
    lse = tape_lse(prompt) + np.float32(OTHER_LSE if model == B else 0)
    return pytest.approx(float(tape_logit(prompt, 3) - lse), abs=1e-3)


def logprob(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["label_logprobs"][0][0]


def score(client, model, *tokens, **fields):
    return client.post("/v1/score", json=body(model, *tokens, **fields), timeout=60)


def test_answers_in_parallel_are_those_of_the_model_that_was_asked(client):
    def ask(number):
        model = (A, B)[number % 2]
        with httpx.Client(base_url=client.base_url) as own:
            return model, number, score(own, model, 7, number)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(64)))
    for model, number, reply in answers:
        assert logprob(reply) == expected(model, 7, number)
        assert reply.json()["model"] == model


def test_ids_are_checked_against_the_vocabulary_of_the_model(client):
    assert score(client, A, OTHER_VOCAB).status_code == 200
    check_error(score(client, B, OTHER_VOCAB), 400, "token_id_out_of_range", "items[0]")


def test_a_cached_query_of_one_model_is_not_the_others(client):
    query = {"query": [9] * 64, "cache_salt": "once"}
    cached = [
        score(client, model, 7, **query).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for model in (A, B, A, B)
    ]
    assert cached == [0, 0, 64, 64]


@pytest.mark.parametrize("path", ["/v1/score", "/tokenize", "/v1/completions", "/v1/classify"])
def test_an_unknown_name_and_none(client, path):
    bodies = {
        "/v1/score": body(None, 7),
        "/tokenize": {"prompt": "x"},
        "/v1/completions": {"prompt": [5], "max_tokens": 1, "logprobs": 1},
        "/v1/classify": {"input": "x"},
    }
    unknown = client.post(path, json=bodies[path] | {"model": "c"})
    message = check_error(unknown, 404, "model_not_found", "model")
    assert message == "this server has the models a, b"
    for none in ({}, {"model": "default"}, {"model": None}):
        reply = client.post(path, json=bodies[path] | none)
        assert check_error(reply, 400, "invalid_request", "model") == (
            "model is required: one of a, b"
        )


def test_all_models_are_listed(client):
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [A, B]
    assert [card["max_model_len"] for card in cards] == [4096, 4096]


def test_info_and_probes_of_one_model(client):
    assert client.get("/info", params={"model": B}).json()["gpuscore"]["valid_token_ids"] == 950
    check_error(client.get("/info"), 400, "invalid_request", "model")
    check_error(client.get("/ready?model=c"), 404, "model_not_found", "model")
    for path in ("/health", "/ready", "/ready?model=b"):
        assert client.get(path).json()["models"] == {A: "ready", B: "ready"}


def test_metrics_tell_the_models_apart(client):
    for model in (A, B, A):
        assert score(client, model, 7).status_code == 200
    text = client.get("/metrics").text
    for model in (A, B):
        assert f'gpuscore_replica_up{{model="{model}",replica="0"}} 1.0' in text
        assert f'gpuscore_kv_pages{{model="{model}",replica="0",state="free"}}' in text
        assert f'gpuscore_items_total{{model="{model}"}}' in text
        assert f'gpuscore_request_duration_seconds_count{{model="{model}"' in text


def test_a_busy_model_does_not_have_requests_for_another_refused_unread():
    """The gate does not know yet whose request it is; `ScoringService.run` will."""
    engines = [StubEngine(), StubEngine()]
    models = [ServedModel(A), ServedModel(B)]
    for model, engine in zip(models, engines, strict=True):
        prompts = ModelPrompts(PromptBuilder(None, engine.limits, RequestLimits()))
        model.loaded = LoadedModel(engine, prompts)
    config = ServerConfig(max_queue_seconds=0.1)
    admission = Admission(ScoringService(models), config)
    admission.check("", 4000)
    models[0].loaded.backlog.admit(request(5000))
    admission.check("", 4000)
    models[1].loaded.backlog.admit(request(4000))
    with pytest.raises(Overloaded, match="1 requests with 5000 tokens are in flight"):
        admission.check("", 4000)
    engines[0].alive = False
    with pytest.raises(Overloaded, match="1 requests with 4000 tokens are in flight"):
        admission.check("", 4000)


def engine_of_model(server, client, model):
    """Return the process without which a model does not answer."""
    for pid in engines_of(server):
        os.kill(pid, signal.SIGSTOP)
        try:
            with httpx.Client(base_url=client.base_url, timeout=0.5) as hasty:
                hasty.post("/v1/score", json=body(model, 9))
        except httpx.ReadTimeout:
            return pid
        finally:
            os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"no engine of {model}")


def test_a_lost_engine_takes_no_other_model_down(running):
    server, client = running
    assert len(engines_of(server)) == 2
    before = engines_of(server)
    victim = engine_of_model(server, client, B)
    os.kill(victim, signal.SIGKILL)
    seen = set()
    while victim in engines_of(server) or len(engines_of(server)) < 2:
        assert logprob(score(client, A, 7)) == expected(A, 7)
        health, ready = client.get("/health"), client.get("/ready?model=b")
        assert health.status_code == client.get("/ready").status_code == 200
        seen.add((health.json()["models"][B], ready.status_code))
        if ready.status_code == 503:
            assert "not ready to score: b" in ready.text
    assert ("lost", 503) in seen
    wait_until(lambda: score(client, B, 7).status_code == 200)
    assert logprob(score(client, B, 7)) == expected(B, 7)
    assert set(before) - {victim} < set(engines_of(server)), "the other engine went on"

"""Promise: through Ray, every dialect gives the answers of `gpuscore serve` and `Scorer`, errors
included; a query goes where its beginning is cached, and other queries elsewhere."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import pytest
from ray import serve

from applications import ARGUMENTS, Server, wait_until
from gpuscore import Scorer
from gpuscore.processes.worker.wire import Failure, Result, Score, decoder, encode
from gpuscore.ray.engine import Facts
from gpuscore.types.request import ScoreRequest
from support.connections import same_answer
from support.wire import ANSWERED, REFUSED

LABELS = ["yes", "no"]
MAX_BODY = ARGUMENTS["max_body_bytes"]
ITEMS = ["Paris is a city.", "A cat is an animal.", "Rome is a city, too."]
LONG = "Is this text about a city? " * 12  # several pages


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A server without Ray, with the same settings."""
    command = [sys.executable, "-P", "-m", "gpuscore", "serve", "demo", "--device", "cpu"]
    command += ["--threads", "1", "--max-batch-tokens", "512", "--port", "0", "--no-log-requests"]
    command += ["--max-items", str(ARGUMENTS["max_items"]), "--max-body-bytes", str(MAX_BODY)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if "ready on" in line)
        yield Server(ready.split("ready on ")[1].split(" ")[0])
    finally:
        process.kill()
        process.communicate()


TOO_LARGE = ("/v1/score", {"query": "a" * MAX_BODY, "items": ["b"], "labels": LABELS})
CASES = [*ANSWERED.values(), *REFUSED.values(), TOO_LARGE]
VOLATILE = {"id", "created", "usage"}  # usage: what is cached depends on earlier requests


@pytest.mark.parametrize(("path", "body"), CASES, ids=lambda case: str(case)[:40])
def test_an_answer_is_that_of_gpuscore_serve(
    server: Server, plain: Server, path: str, body: Any
) -> None:
    got, wanted = server.post(path, body), plain.post(path, body)
    assert got.status_code == wanted.status_code
    same_answer(got.json(), wanted.json(), 1e-6, VOLATILE)
    assert got.headers["content-type"] == wanted.headers["content-type"]
    assert len(got.headers.get_list("x-request-id")) == 1


def test_scores_are_those_of_scorer(server: Server) -> None:
    with Scorer("demo", device="cpu", threads=1, max_batch_tokens=512) as scorer:
        wanted = scorer.score(LONG, ITEMS, labels=LABELS).scores
    got = server.score(LONG, ITEMS).json()["scores"]
    assert [list(map(float, row)) for row in got] == [
        pytest.approx(list(map(float, row)), abs=1e-6) for row in wanted
    ]


def test_pages_and_probes_are_there(server: Server, plain: Server) -> None:
    for path in ("/health", "/ready", "/livez", "/v1/models", "/info", "/openapi.json"):
        got, wanted = (httpx.get(address.url + path, timeout=60) for address in (server, plain))
        assert (got.status_code, got.json()) == (wanted.status_code, wanted.json()), path


def test_a_request_that_has_no_time_left_gets_504(server: Server) -> None:
    body = {"query": LONG, "items": ITEMS, "labels": LABELS}
    answer = server.post("/v1/score", body, headers={"X-Request-Timeout-Ms": "1"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def test_a_query_is_found_in_the_cache_and_queries_are_spread(server: Server) -> None:
    def cached(query: str, item: str) -> int:
        usage = server.score(query, [item]).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    before = server.metric("gpuscore_computed_tokens_total")
    queries = [f"Query {number}. {LONG}" for number in range(12)]
    assert [cached(query, "first") for query in queries] == [0] * 12
    again = [cached(query, item) for item in ("second", "third") for query in queries]
    assert min(again) > 0
    after = server.metric("gpuscore_computed_tokens_total")
    assert len(after) == 2
    assert all(after[replica] > before[replica] for replica in after)


def test_bodies_and_requests_over_a_limit_are_refused(server: Server) -> None:
    def too_long() -> Iterator[bytes]:  # without a length in its head
        yield b"{"
        for _ in range(20):
            yield b" " * (MAX_BODY // 10)

    answer = httpx.post(
        f"{server.url}/v1/score",
        content=too_long(),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_an_engine_drops_the_request_of_a_client_that_leaves(server: Server) -> None:
    """A request that takes minutes, and a client that leaves once an engine has it."""
    wait_until(lambda: not waiting(server), "an idle engine")
    before = computed(server)
    items = [f"{number} " + "a cat " * 28 for number in range(9000)]  # over 50 tokens each
    body = json.dumps({"query": LONG, "items": items, "labels": LABELS})
    client = HTTPConnection(server.url.removeprefix("http://"))
    client.request("POST", "/v1/score", body, {"Content-Type": "application/json"})
    wait_until(lambda: computed(server) > before, "a batch")
    client.close()
    wait_until(lambda: not waiting(server), "an idle engine")
    assert computed(server) - before < 9000 * 50 / 2


def computed(server: Server) -> float:
    return sum(server.metric("gpuscore_computed_tokens_total").values())


def waiting(server: Server) -> float:
    return sum(server.metric("gpuscore_requests_waiting").values())


def test_a_request_made_for_another_model_is_not_computed(server: Server) -> None:
    ids, labels = np.array([5], np.int32), np.array([7], np.int32)
    frame = encode(Score(0, ScoreRequest(ids, (ids,), (labels,), False, deadline=60.0)))
    handle = serve.get_deployment_handle("engine", "default")
    handle._init(_run_router_in_separate_loop=True)  # this process has no loop of its own
    facts: Facts = decoder(Facts)(handle.facts.remote().result())
    decode: Callable[[bytes], Result | Failure] = decoder(Result | Failure)
    outcomes = [
        decode(handle.score.remote(frame, model, replica=facts.state.replica).result())
        for model in (str(facts.limits.model), "another")
    ]
    assert isinstance(outcomes[0], Result)
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].message == "the engines are switching to another model"

"""A service whose engine answers without a model, for tests of the server alone."""

import asyncio
from concurrent.futures import Future

import httpx
import numpy as np

from gpuscore.config import RequestLimits, ServerConfig
from gpuscore.dialects.served import LoadedModel, ServedModel
from gpuscore.prompts.model import ModelPrompts
from gpuscore.server.api.app import create_app
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.service import ScoringService
from gpuscore.text.joining import PromptBuilder
from gpuscore.types.batch import BackendLimits
from gpuscore.types.request import ScoreResult, Timings
from gpuscore.types.stats import EngineCounters, EngineStats, ReplicaState

STATS = EngineStats(
    requests=3,
    tokens=500,
    pages_free=70,
    pages_cached=20,
    pages_used=10,
    tokens_per_second=1234.5,
    capacity=4321.5,
    counters=EngineCounters(
        batches=6,
        computed_tokens=7000,
        cached_tokens=800,
        evicted_pages=9,
        oom_retried=4,
        oom_failed=2,
        nonfinite_rows=11,
        batch_items=2,
    ),
    restarts=5,
    heartbeat_age=0.125,
)


class StubEngine:
    """An engine that answers every label with a logit of 0 and keeps its requests."""

    limits = BackendLimits(
        max_tokens=64, page_size=16, num_pages=9, max_model_len=512, vocab_rows=400
    )
    alive = True

    def __init__(self):
        self.requests = []
        self.rate = STATS.capacity

    def states(self):
        return [ReplicaState("0", "cpu", self.alive, STATS)]

    def score_all(self, requests):
        return [self._score(request) for request in requests]

    def _score(self, request):
        self.requests.append(request)
        future = Future()
        logits = tuple(np.zeros(len(ids), np.float32) for ids in request.label_ids)
        lse = np.ones(len(logits), np.float32)
        timings = Timings(1e-6, 2e-6, 3e-6)
        future.set_result(ScoreResult(logits, lse, None, None, request.num_tokens, timings))
        return future

    def close(self):
        self.alive = False


def stub_service():
    served = ServedModel("tiny")
    engine = StubEngine()
    served.loaded = LoadedModel(
        engine, ModelPrompts(PromptBuilder(None, engine.limits, RequestLimits()))
    )
    return ScoringService([served])


def loaded(service):
    """Return the only model of a service."""
    return service.models.only.loaded


def ask(service, *requests, keys=(), config=None, operations=None):
    """Return the replies of an application in this process; requests are arguments of
    httpx.AsyncClient."""
    app = create_app(service, config or ServerConfig(), ApiKeys(keys), operations)

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(**request) for request in requests]

    return asyncio.run(send())

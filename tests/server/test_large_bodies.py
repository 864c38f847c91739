"""Promise: large bodies leave the event loop to everything else, and tenants take turns.

tests/hostile/test_tenants.py measures over HTTP how fast small requests are meanwhile.
"""

import asyncio
import json
import time
from threading import Event, Semaphore

import httpx
import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import ServedModel
from gpuscore.server.api.app import create_app
from gpuscore.server.http.headers import ApiKeys
from gpuscore.server.service import ScoringService
from gpuscore.server.text_work import REST, TextScheduler

WORK = 0.05  # seconds of a turn


@pytest.fixture
def work():
    scheduler = TextScheduler(permits=3)
    yield scheduler
    scheduler.close()


def submit(
    work: TextScheduler, tenant: str, seen: list[tuple[str, float, float]], ended: Semaphore
):
    def decode() -> None:
        begin = time.monotonic()
        time.sleep(WORK)
        seen.append((tenant, begin, time.monotonic()))

    return work.submit(tenant, decode, lambda *_: ended.release(), large=True)


def test_one_at_a_time_with_a_rest_and_in_rounds_of_tenants(work):
    seen: list[tuple[str, float, float]] = []
    ended = Semaphore(0)
    for tenant in "aaaabbc":
        submit(work, tenant, seen, ended)
    small = Semaphore(0)
    work.submit("a", lambda: None, lambda *_: small.release())
    assert small.acquire(timeout=WORK), "work that is not large does not wait"
    assert all(ended.acquire(timeout=10) for _ in range(7))
    order = "".join(tenant for tenant, _, _ in seen)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:5]) == ["a", "b"]
    for (_, begin, end), (_, next_begin, _) in zip(seen, seen[1:], strict=False):
        assert next_begin - end >= REST * (end - begin) - 0.002


def test_a_request_that_is_given_up_passes_its_turn_on(work):
    seen: list[tuple[str, float, float]] = []
    ended = Semaphore(0)
    _, second, _ = (submit(work, tenant, seen, ended) for tenant in "abc")
    work.give_up(second)
    assert all(ended.acquire(timeout=10) for _ in range(3))
    assert [tenant for tenant, _, _ in seen] == ["a", "c"]


def test_an_error_ends_the_turn(work):
    seen: list[tuple[str, float, float]] = []
    ended = Semaphore(0)
    work.submit("a", lambda: 1 / 0, lambda *_: ended.release(), large=True)
    submit(work, "a", seen, ended)
    assert all(ended.acquire(timeout=10) for _ in range(2))
    assert seen


def test_a_large_body_is_decoded_in_its_turn_and_a_small_one_at_once():
    service = ScoringService([ServedModel("tiny")])  # without a model: 503 after decoding
    app = create_app(service, ServerConfig(), ApiKeys([]))

    async def status(client: httpx.AsyncClient, items: list[str]) -> int:
        content = json.dumps({"items": items, "labels": ["a"]})
        head = {"X-Request-Timeout-Ms": "500", "Content-Type": "application/json"}
        return (await client.post("/v1/score", content=content, headers=head)).status_code

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert await status(client, ["a"]) == 503
            go_on = Event()
            another = asyncio.create_task(service.in_thread("b", go_on.wait, large=True))
            await asyncio.sleep(0)
            assert await status(client, ["a" * LARGE]) == 504, "another has the turn"
            go_on.set()
            await another
            await asyncio.sleep(REST)
            assert await status(client, ["a" * LARGE]) == 503

    asyncio.run(main())

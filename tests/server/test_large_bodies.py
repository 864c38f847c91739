"""Promise: large bodies leave the event loop to everything else, and tenants take turns.

tests/hostile/test_text_floods.py measures over HTTP how fast small requests are meanwhile.
"""

import asyncio
import json
import time

import httpx
import pytest

from gpuscore.config import ServerConfig
from gpuscore.dialects.dialect import LARGE
from gpuscore.dialects.served import ServedModel
from gpuscore.server.api.app import create_app
from gpuscore.server.http.auth import ApiKeys
from gpuscore.server.service import ScoringService
from gpuscore.server.text_work import REST, LargeBodies

WORK = 0.02  # seconds of a turn


async def decode(turns: LargeBodies, tenant: str, seen: list[tuple[str, float, float]]) -> None:
    async with turns.turn(tenant):
        begin = time.monotonic()
        time.sleep(WORK)  # like decoding, it blocks the loop
        seen.append((tenant, begin, time.monotonic()))


def test_one_at_a_time_with_a_rest_and_in_rounds_of_tenants():
    seen: list[tuple[str, float, float]] = []

    async def main() -> None:
        turns = LargeBodies()
        await asyncio.gather(*(decode(turns, tenant, seen) for tenant in "aaaabbc"))

    asyncio.run(main())
    assert "".join(tenant for tenant, _, _ in seen) == "aabcaba"
    for (_, begin, end), (_, next_begin, _) in zip(seen, seen[1:], strict=False):
        # The event loop's clock may be a tick early.
        assert next_begin - end >= REST * (end - begin) - 0.002


@pytest.mark.parametrize("when", ["while it waits", "when it gets its turn"])
def test_a_request_that_is_given_up_passes_its_turn_on(when):
    seen: list[tuple[str, float, float]] = []

    async def main() -> None:
        turns = LargeBodies()
        await turns._wait("a")
        second, third = (asyncio.create_task(decode(turns, t, seen)) for t in "bc")
        await asyncio.sleep(0)  # both wait now
        if when == "when it gets its turn":
            turns._next()
        second.cancel()
        if when == "while it waits":
            await asyncio.sleep(WORK)
            assert not seen, "the first turn has not ended"
            turns._next()
        await asyncio.wait_for(third, 10)
        assert second.cancelled()

    asyncio.run(main())
    assert [tenant for tenant, _, _ in seen] == ["c"]


def test_an_error_ends_the_turn():
    async def main() -> None:
        turns = LargeBodies()
        with pytest.raises(ValueError, match="broken"):
            async with turns.turn("a"):
                raise ValueError("broken")
        await asyncio.wait_for(decode(turns, "a", []), 10)

    asyncio.run(main())


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
            await service.large_bodies._wait("another")
            assert await status(client, ["a"]) == 503
            assert await status(client, ["a" * LARGE]) == 504, "another has the turn"
            service.large_bodies._next()
            assert await status(client, ["a" * LARGE]) == 503

    asyncio.run(main())

"""Turns of large bodies on the event loop.

To decode a body of 16 MiB takes the event loop some 50 ms, and a text request needs the loop four
times until it is answered. If large bodies were decoded one behind the other, each of these times
would wait for one of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

# The event loop is free for everything else that many times as long as the last turn took.
REST = 2


class LargeBodies:
    """The turns of large bodies: one at a time, with a rest after each, in rounds of tenants."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first
        self._free = True

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn; it lasts until the end of the block, which should not wait."""
        await self._wait(tenant)
        began = monotonic()
        try:
            yield
        finally:
            rest = REST * (monotonic() - began)
            asyncio.get_running_loop().call_later(rest, self._next)

    async def _wait(self, tenant: str) -> None:
        if self._free:
            self._free = False
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn
                self._next()
            raise

    def _next(self) -> None:
        """Give the turn to the next tenant's oldest request that still waits."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free = True

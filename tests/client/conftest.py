import asyncio

import pytest

from gpuscore.client import AsyncClient, Client


def _wait_for(url, method, *arguments, client=None, **options):
    with Client(url, **(client or {})) as opened:
        return getattr(opened, method)(*arguments, **options)


def _run(url, method, *arguments, client=None, **options):
    async def run():
        async with AsyncClient(url, **(client or {})) as opened:
            return await getattr(opened, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture(params=[_wait_for, _run], ids=["sync", "async"])
def call(request):
    """call(url, method, *arguments, client={...}, **options) calls the sync or the async client."""
    return request.param

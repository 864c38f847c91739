import asyncio
import ssl

import httpx
import pytest

from gpuscore import Scorer
from gpuscore.client import AsyncClient, Client
from support.serving import QUICK, serving

KEY = "schlüssel"
WITH_KEY = {"api_key": KEY}
# The fields that every route's answer has.
USAGE = {
    **{"prompt_tokens": 2, "total_tokens": 2, "completion_tokens": 0},
    "prompt_tokens_details": {"cached_tokens": 0},
}
WHOLE = {"id": "r", "object": "list", "created": 1, "meta": {}, "model": "m"}
WHOLE |= {"usage": USAGE}


@pytest.fixture(scope="session")
def url():
    """A deterministic server, so that answers can be compared bit for bit."""
    flags = (*QUICK, "--deterministic")
    with serving("demo", *flags, environment={"GPUSCORE_API_KEY": KEY}) as running:
        yield running.url


@pytest.fixture(scope="session")
def scorer():
    with Scorer("demo", threads=1, deterministic=True, max_batch_tokens=512) as opened:
        yield opened


TLS = ssl.create_default_context()  # once: it takes 40 ms, and every httpx client makes its own


def _wait_for(url, method, *arguments, client=None, **options):
    with httpx.Client(verify=TLS) as http, Client(url, http=http, **(client or {})) as opened:
        return getattr(opened, method)(*arguments, **options)


def _run(url, method, *arguments, client=None, **options):
    async def run():
        async with (
            httpx.AsyncClient(verify=TLS) as http,
            AsyncClient(url, http=http, **(client or {})) as opened,
        ):
            return await getattr(opened, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture(params=[_wait_for, _run], ids=["sync", "async"])
def call(request):
    """call(url, method, *arguments, client={...}, **options) calls the sync or the async client."""
    return request.param

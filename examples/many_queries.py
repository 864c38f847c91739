"""Rank for many queries, a few requests at a time: many_queries.py URL [API_KEY]."""

import asyncio
import sys

from gpuscore.client import AsyncClient
from gpuscore.dialects.answers import RerankAnswer

COLOURS, THINGS = ("red", "blue", "green"), ("lamp", "chair", "scarf")
QUERIES = [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS]
DOCUMENTS = [f"A {colour} {thing}." for thing in THINGS for colour in COLOURS]
IN_FLIGHT = 4


async def rank_all(url: str, api_key: str | None) -> list[RerankAnswer]:
    """Return one ranking per query, in the order of the queries."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def rank(query: str) -> RerankAnswer:
        async with room:
            return await client.rerank(query, DOCUMENTS, top_n=1)

    async with AsyncClient(url, api_key) as client:
        return await asyncio.gather(*(rank(query) for query in QUERIES))


def main(url: str, api_key: str | None = None) -> None:
    for query, ranking in zip(QUERIES, asyncio.run(rank_all(url, api_key)), strict=True):
        print(f"{query}: {DOCUMENTS[ranking.results[0].index]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Rank documents with the Python client: rerank.py URL [API_KEY]."""

import sys

from gpuscore.client import Client

QUERY = "a blue wooden chair for the garden"
DOCUMENTS = ["A red steel lamp.", "A wooden garden chair in blue.", "A blue wool scarf."]


def main(url: str, api_key: str | None = None) -> None:
    with Client(url, api_key) as client:
        ranking = client.rerank(QUERY, DOCUMENTS, top_n=2)
    for result in ranking.results:
        print(f"{result.relevance_score:.4f}  {DOCUMENTS[result.index]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

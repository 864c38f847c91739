"""Judge a reranker by documents of known relevance: evaluate.py URL [API_KEY].

Needs ir_measures (pip install ir-measures), whose numbers are trec_eval's.
"""

import sys

import httpx
import ir_measures
from ir_measures import MRR, P, nDCG

# By query, the documents with their relevance, as in a file of qrels.
JUDGED = {
    "a red lamp": {"A red steel lamp.": 2, "A red rug.": 1, "A blue lamp.": 1, "A wool scarf.": 0},
    "a blue wooden chair": {"An oak chair in navy.": 2, "A red chair.": 1, "A steel lamp.": 0},
    "not expensive, for a child": {"A cheap doll for children.": 2, "A premium doll.": 1},
}


def main(url: str, api_key: str | None = None) -> None:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    run = {}
    for query, judged in JUDGED.items():
        body = {"query": query, "documents": list(judged)}
        answer = httpx.post(f"{url}/v1/rerank", json=body, headers=headers, timeout=60)
        answer.raise_for_status()
        results = answer.json()["results"]
        run[query] = {list(judged)[r["index"]]: r["relevance_score"] for r in results}
    found = ir_measures.calc_aggregate([nDCG @ 3, MRR @ 3, P(rel=2) @ 1], JUDGED, run)
    for measure in sorted(found, key=str):
        print(f"{measure} {found[measure]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

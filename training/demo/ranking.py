"""Writes the data of `gpuscore eval --data demo`: held-out ranking tasks of the demo's world.

PYTHONPATH=training .venv/bin/python -P -m demo.ranking > gpuscore/demo/ranking.jsonl
"""

import json
import re
from collections.abc import Iterator

from demo.synthetic import RankingTask, draw_ranking_tasks

SEED, QUERIES, CANDIDATES = 24, 40, 20


def rows() -> Iterator[dict[str, object]]:
    """Yield a row per query; its first stage is the share of the query's words in a document."""
    for number, task in enumerate(draw_ranking_tasks(SEED, QUERIES, CANDIDATES), start=1):
        yield {
            "id": f"q{number}",
            "query": task.query_text,
            "documents": list(task.item_texts),
            "grades": list(task.relevance),
            "first_stage": _overlaps(task),
        }


def _overlaps(task: RankingTask) -> list[float]:
    asked = _words(task.query_text)
    return [round(len(asked & _words(text)) / len(asked), 4) for text in task.item_texts]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row, ensure_ascii=False))

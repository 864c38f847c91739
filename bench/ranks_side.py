"""gpuscore as a peer of `bench/ranks.py`: a process of its own, so that its threads are its own."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from peer_side import Score, answer_jobs

from gpuscore import Scorer


def load(settings: dict[str, Any]) -> tuple[Score, Callable[[], None]]:
    scorer = Scorer(
        settings["model"],
        device="cpu",
        dtype="float32",
        threads=settings["threads"],
        tensor_parallel=settings["ranks"],
        max_model_len=settings["longest"],
    )

    def score(requests: list[Any], way: str) -> list[list[list[float]]]:
        return [rows(query, items) for query, items in requests]

    def rows(query: list[int], items: list[list[int]]) -> list[list[float]]:
        result = scorer.score(query, items, label_token_ids=settings["labels"], logprobs=True)
        if result.logprobs is None:
            raise RuntimeError("no log-probabilities")
        found: list[list[float]] = result.logprobs.tolist()
        return found

    return score, lambda: None


if __name__ == "__main__":
    answer_jobs(load)

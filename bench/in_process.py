"""Many queries in this process: `Scorer.score_many`, a loop over `score`, and one query's items.

    make bench-in-process    # the demo; a minute
    make bench-in-process ARGS='--shape qwen3-0.6b-4-layers --count 200 --repeat 3'

All prompts are equally long and their tokens random; every text is another one in every round. What
counts is the time per computed token, because one query is computed once for all its items. With a
shape, the model is random and has the demo's tokenizer. The
scores of `score_many` are compared with those of `score` first.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, table
from scenarios import SHAPES, make_model

import gpuscore
from gpuscore import Scorer
from gpuscore.types.results import Scores

QUERY_WORDS, ITEM_WORDS = 12, 6
LABELS = [3, 5]
DEMO = Path(gpuscore.__file__).parent / "demo"
SCRATCH = Path(__file__).parents[1] / "scratch"


def texts(rng: np.random.Generator, count: int, words: int) -> list[str]:
    """Return texts of numbers, which every tokenizer divides alike enough."""
    return [" ".join(map(str, rng.integers(100, 1000, words))) + " " for _ in range(count)]


def computed(results: list[Scores]) -> int:
    return sum(one.prompt_tokens - one.cached_tokens for one in results)


def timed(run: Callable[[], list[Scores]]) -> tuple[float, float, list[Scores]]:
    """Return microseconds of wall and of CPU per computed token, and the results."""
    wall, cpu = time.perf_counter(), time.process_time()
    results = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = computed(results)
    return 1e6 * wall / tokens, 1e6 * cpu / tokens, results


def measure(scorer: Scorer, count: int, repeat: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"label_token_ids": LABELS, "apply_softmax": True}
    check(scorer, rng, options)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeat):
        for name, run in ways(scorer, rng, count, options).items():
            found.setdefault(name, []).append(timed(run)[:2])
    base = statistics.median(wall for wall, _ in found["one query, all items"])
    return [
        {
            "way": name,
            "us per computed token": round(statistics.median(wall for wall, _ in times), 1),
            "CPU us per token": round(statistics.median(cpu for _, cpu in times), 1),
            "times one query's": round(statistics.median(wall for wall, _ in times) / base, 2),
        }
        for name, times in found.items()
    ]


def ways(
    scorer: Scorer, rng: np.random.Generator, count: int, options: dict[str, Any]
) -> dict[str, Callable[[], list[Scores]]]:
    """Return the three ways to score `count` prompts, all of new texts."""
    queries, others = texts(rng, count, QUERY_WORDS), texts(rng, count, QUERY_WORDS)
    items = texts(rng, count, ITEM_WORDS)
    requests = [(query, [item]) for query, item in zip(queries, items, strict=True)]
    alone = list(zip(others, items, strict=True))[: count // 10]
    return {
        "one query, all items": lambda: [scorer.score(others[-1], items, **options)],
        "score_many": lambda: list(scorer.score_many(requests, **options)),
        "a loop over score": lambda: [scorer.score(q, [item], **options) for q, item in alone],
    }


def check(scorer: Scorer, rng: np.random.Generator, options: dict[str, Any]) -> None:
    pairs = list(zip(texts(rng, 40, QUERY_WORDS), texts(rng, 40, ITEM_WORDS), strict=True))
    many = scorer.score_many(((q, [i]) for q, i in pairs), **options)
    for (query, item), scores in zip(pairs, many, strict=True):
        alone = scorer.score(query, [item], **options)
        np.testing.assert_allclose(scores.scores, alone.scores, atol=1e-5)


def model(shape: str | None) -> str:
    if shape is None:
        return "demo"
    directory = make_model(shape, "bfloat16", SCRATCH)
    shutil.copy(DEMO / "tokenizer.json", directory)
    return str(directory)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="queries, and items of one query")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of a random model; not: the demo")
    options = parser.parse_args()
    with Scorer(model(options.shape)) as scorer:
        scorer.warmup()
        rows = measure(scorer, options.count, options.repeat)
    print(f"\n{table(rows)}\n")
    keep("in-process", {"bench": "in-process", "options": vars(options), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""CPU-seconds of a request whose items share prefixes, with and without computing these once.

.venv/bin/python -P bench/shared_prefixes.py [--shape qwen3-0.6b-4-layers] [--heads 1,4,8,16,64]

The items are a grid: each of FIRSTS beginnings of --heads tokens with each of LASTS endings, in a
random order, after a query. Both ways score the same prompts in turn, in one process, and their
log-probabilities are compared. "distinct" is the number of tokens in the prompts' radix tree.
"""

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from scenarios import SHAPES, make_model
from spent import cpu_seconds

from gpuscore.backends import create_backend, plan_backend
from gpuscore.config import EngineConfig, ModelConfig
from gpuscore.engine import trees
from gpuscore.engine.engine import Engine
from gpuscore.types.request import ScoreRequest, ScoreResult

FIRSTS, LASTS = 20, 20
QUERY, TAIL = 100, 12  # tokens
SCRATCH = Path(__file__).parents[1] / "scratch"


def main() -> None:
    options = _options()
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    config = ModelConfig(str(directory), dtype=options.dtype)
    engine = Engine(create_backend(plan_backend(directory, config)), EngineConfig())
    rng = np.random.default_rng()
    rows = []
    _seconds(engine, _grid(rng, 4), share=True)  # warm
    for head in options.heads:
        found: dict[bool, list[float]] = {True: [], False: []}
        tokens = {}
        for _ in range(options.repeat):
            request, results = _grid(rng, head), {}
            for share in found:
                spent, results[share] = _seconds(engine, request, share=share)
                found[share].append(spent)
                tokens[share] = results[share].computed_tokens
            _compare(results[True], results[False])
        shared, alone = statistics.median(found[True]), statistics.median(found[False])
        distinct = QUERY + FIRSTS * (head + LASTS * TAIL)
        rows.append(
            {
                "head": head,
                "tokens": tokens[False],
                "shared": tokens[True],
                "of distinct": round(tokens[True] / distinct, 3),
                "CPU-s alone": round(alone, 2),
                "CPU-s shared": round(shared, 2),
                "ratio": round(shared / alone, 3),
            }
        )
    engine.close()
    print(f"\n{options.shape}, {options.dtype}; {machine()}\n\n{table(rows)}\n")
    keep("shared-prefixes", {"bench": "shared-prefixes", "rows": rows} | vars(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b-4-layers")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument(
        "--heads",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 2, 4, 8, 16, 64],
    )
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def _grid(rng: np.random.Generator, head: int) -> ScoreRequest:
    query, labels = _ids(rng, QUERY), np.array([3, 17], np.int32)
    firsts = [_ids(rng, head) for _ in range(FIRSTS)]
    lasts = [_ids(rng, TAIL) for _ in range(LASTS)]
    items = [np.concatenate((first, last)) for first in firsts for last in lasts]
    shuffled = tuple(items[n] for n in rng.permutation(len(items)))
    return ScoreRequest(query, shuffled, (labels,) * len(items), need_lse=True)


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 4096, count).astype(np.int32)


def _seconds(engine: Engine, request: ScoreRequest, *, share: bool) -> tuple[float, ScoreResult]:
    """Score a request with an empty prefix cache; all prefixes are shared, or none."""
    trees.LEAST, trees.SAVED = (1, 0) if share else (10**9, 10**9)
    engine._runner.scheduler.pages.evict(10**9)
    before = cpu_seconds()
    result = engine.score(request).result()
    return cpu_seconds() - before, result


def _compare(one: ScoreResult, other: ScoreResult) -> None:
    logits = [np.stack(result.label_logits) for result in (one, other)]
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-3)


if __name__ == "__main__":
    main()

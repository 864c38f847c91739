"""CPU-seconds of labels of several tokens, beside those of one token and of whole prompts.

.venv/bin/python -P bench/label_tokens.py [--shape qwen3-0.6b-4-layers] [--query 1000] [--items 100]

The same items get two labels of one, two or three tokens, first with the query in the prefix cache,
then without. "whole prompts" scores the beginnings of labels of two tokens as items of their own,
without sharing what they begin with.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
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
from gpuscore.types.label_trie import LabelTrie
from gpuscore.types.request import ScoreRequest

LABELS = ((5, 6, 8), (9, 7, 3))
ITEM = 20  # tokens
SCRATCH = Path(__file__).parents[1] / "scratch"


def main() -> None:
    options = _options()
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    config = ModelConfig(str(directory), dtype=options.dtype)
    engine = Engine(create_backend(plan_backend(directory, config)), EngineConfig())
    rng = np.random.default_rng(0)
    query, items = _ids(rng, options.query), [_ids(rng, ITEM) for _ in range(options.items)]
    ways: dict[str, Callable[[], ScoreRequest]] = {
        f"{length} token{'s' * (length > 1)}": lambda length=length: _labels(query, items, length)  # type: ignore[misc]
        for length in (1, 2, 3)
    }
    ways["2 tokens, whole prompts"] = lambda: _whole(query, items)
    for way in ways.values():
        engine.score(way()).result()  # warm
    found: dict[tuple[str, bool], list[float]] = {(n, c): [] for n in ways for c in (True, False)}
    trees.SAVED = 10**9  # nothing is shared but the query
    for _ in range(options.repeat):
        for name, cached in found:
            request = ways[name]()
            if not cached:
                engine._runner.scheduler.pages.evict(10**9)
            before = cpu_seconds()
            engine.score(request).result()
            found[name, cached].append(cpu_seconds() - before)
    engine.close()
    rows = [
        {
            "labels": name,
            "tokens": way().num_tokens - options.query,
            "CPU-s, query cached": round(statistics.median(found[name, True]), 3),
            "CPU-s, not cached": round(statistics.median(found[name, False]), 3),
        }
        for name, way in ways.items()
    ]
    print(f"\n{options.shape}, {options.dtype}; {machine()}\n\n{table(rows)}\n")
    keep("label-tokens", {"bench": "label-tokens", "rows": rows} | vars(options))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b-4-layers")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--query", type=int, default=1000, help="tokens")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 4096, count).astype(np.int32)


def _labels(query: np.ndarray, items: list[np.ndarray], length: int) -> ScoreRequest:
    trie = LabelTrie(tuple(label[:length] for label in LABELS))
    used = trie if trie.num_nodes else None
    labels = (trie.first_ids,) * len(items)
    return ScoreRequest(query, tuple(items), labels, need_lse=True, trie=used)


def _whole(query: np.ndarray, items: list[np.ndarray]) -> ScoreRequest:
    prompts, labels = [], []
    for item in items:
        for first, second, _ in LABELS:
            prompts += [item, np.append(item, np.int32(first))]
            labels += [np.array([first], np.int32), np.array([second], np.int32)]
    return ScoreRequest(query, tuple(prompts), tuple(labels), need_lse=True)


if __name__ == "__main__":
    main()

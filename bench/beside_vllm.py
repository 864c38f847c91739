"""gpuscore beside vLLM's CPU build: each in a process, the same token ids, in turn.

    .venv/bin/python -P bench/beside_vllm.py --vllm VENV/bin/python

README.md here says how to make VENV. vLLM runs as its guide says: blocks of 32, a thread
on each core, libiomp5 and tcmalloc preloaded if they are below VENV or /usr/lib. It has no packed
scoring: each query + item is a prompt of one token, with its prefix cache; the query goes first, or
all prompts at once. Nothing is timed before the labels' log-probabilities agree. Every round has
fresh random tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

BLOCK, LONGEST = 32, 4096
LABELS = [11, 23]
WAYS = ("query first", "all at once")
ALLOWED = 0.1, 0.5  # median and maximum of |d log p|, for both round to bfloat16

Requests: TypeAlias = Sequence[tuple[list[int], list[list[int]]]]  # query, items
Logprobs: TypeAlias = Sequence[Sequence[float]]  # of the labels, for each item
Score: TypeAlias = Callable[[Requests], Logprobs]


def work(model: str) -> None:
    """Answer lines of (way, requests) with log-probabilities; runs in vLLM's environment."""
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to both
    sizes = {"block_size": BLOCK, "max_model_len": LONGEST}
    llm = LLM(model, dtype="bfloat16", skip_tokenizer_init=True, max_logprobs=-1, **sizes)
    one = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    params = SamplingParams(logprob_token_ids=LABELS, **one)

    def generate(prompts: list[list[int]]) -> list[list[float]]:
        some: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        rows = [out.outputs[0].logprobs[0] for out in llm.generate(some, params, use_tqdm=False)]
        return [[row[label].logprob for label in LABELS] for row in rows]

    for line in sys.stdin:
        way, requests = json.loads(line)
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM has not dropped its prefix cache")
        found = []
        for query, items in requests:
            if way == WAYS[0]:
                generate([query])
            found += generate([query + item for item in items])
        print(json.dumps(found), file=answers, flush=True)


def started(python: Path, model: str) -> "subprocess.Popen[str]":
    """Start vLLM with a model; as a context, it ends afterwards."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    folders = python.absolute().parents[1] / "lib", Path("/usr/lib")
    names = "libiomp5.so", "libtcmalloc_minimal.so.4"
    found = [next((p for f in folders for p in f.rglob(name)), None) for name in names]
    print(f"vLLM: cores {cores}; preloaded: {', '.join(map(str, found))}", flush=True)
    chosen = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
    chosen |= {"LD_PRELOAD": ":".join(str(path) for path in found if path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [str(python), "-P", __file__, "--work", model]
    return subprocess.Popen(command, env=os.environ | chosen, **pipes)


def busy_seconds() -> float:
    """Return the CPU-seconds of all processes of this machine so far: user, nice and system."""
    ticks = Path("/proc/stat").read_text().split()[1:4]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def compare(scorers: Mapping[str, Score], workload: Any, vocab: int, rounds: int) -> list[Any]:
    """Time all scorers in turn, and return the rows of a table."""
    taken: dict[str, list[tuple[float, float, float]]] = {who: [] for who in scorers}
    count = workload.num_items * workload.requests
    for turn in range(rounds):
        requests = replace(workload, seed=100 + turn).draw_all(vocab)
        for who, score in scorers.items():
            busy = busy_seconds()
            used = spent(partial(score, requests))
            others = busy_seconds() - busy - used.cpu
            taken[who].append((used.wall, used.cpu, others))
            print(
                f"  {who}: {used.wall:.2f} s, CPU {used.cpu:.2f}, others {others:.2f}", flush=True
            )
    rows, (first, *_) = [], taken.values()
    for who, times in taken.items():
        wall, cpu, others = map(statistics.median, zip(*times, strict=True))
        ratios = [[t[i] / own[i] for t, own in zip(times, first, strict=True)] for i in (0, 1)]
        rows.append({"workload": str(workload), "scorer": who, "items/s": round(count / wall, 2)})
        rows[-1] |= {"CPU s": round(cpu, 2), "others' CPU s": round(others, 2)}
        time, both = (round(statistics.median(ratio), 2) for ratio in ratios)
        rows[-1] |= {"time / gpuscore's": time, "CPU / gpuscore's": both}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="python of its environment")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    options = parser.parse_args()
    model = str(make_model(options.shape, "bfloat16", Path(__file__).parents[1] / "scratch"))
    vocab = SHAPES[options.shape]["vocab_size"]
    workloads = [WORKLOADS["hundred"], replace(WORKLOADS["separate"], requests=4)]
    settings = {"dtype": "bfloat16", "max_model_len": LONGEST}
    with started(options.vllm, model) as vllm, Scorer(model, **settings) as scorer:

        def ours(requests: Requests) -> Logprobs:
            asked: dict[str, Any] = {"label_token_ids": LABELS, "logprobs": True}
            return [row for r in requests for row in scorer.score(*r, **asked).logprobs]

        def theirs(way: str, requests: Requests) -> Logprobs:
            print(json.dumps([way, requests]), file=vllm.stdin, flush=True)
            return json.loads(vllm.stdout.readline())

        scorers = {"gpuscore": ours, **{f"vLLM, {way}": partial(theirs, way) for way in WAYS}}
        for workload in workloads:
            some = replace(workload, requests=1, seed=1).draw_all(vocab)
            own, *others = (np.array(score(some)) for score in scorers.values())
            for other in others:
                off = np.abs(own - other)
                print(f"{workload}: |d log p| median {np.median(off):.3f}, max {off.max():.3f}")
                if np.median(off) > ALLOWED[0] or off.max() > ALLOWED[1]:
                    raise SystemExit("the scores differ: nothing is timed")
        rows = [row for w in workloads for row in compare(scorers, w, vocab, options.repeat)]
    print(f"\n{options.shape}, bfloat16, 2 labels, medians of {options.repeat}; {machine()}\n")
    print(table(rows))
    keep("beside_vllm", {"bench": "beside vLLM", "shape": options.shape, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2])
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        import numpy as np
        from random_models import SHAPES, make_model
        from report import keep, machine, table
        from scenarios import WORKLOADS
        from spent import spent

        from gpuscore import Scorer

        main()

"""The cost of giving large freed blocks back, as glibc does, and of keeping them.

    make bench-heap                               # in one arena, as the engine's process
    make bench-heap ARGS=--own-arenas             # as a program that uses Scorer
    make bench-heap ARGS='--dtype bfloat16 --query 2000'

One process scores requests of one kind, on fresh random tokens, with its heap in turn as it comes
and as the CPU backend sets it (`gpuscore.heap.keep_freed_blocks`). A turn is one request that does
not count and `--repeat` that do. Prints medians over the turns.

"As it comes" is where glibc's own thresholds end up, 32 MiB for blocks and 64 MiB for the end of
the heap: it raises them until then, and cannot be made to do so again in the same process.
"""

import argparse
import dataclasses
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from scenarios import SHAPES, Workload, make_model

from gpuscore import Scorer, heap
from gpuscore.backends.common.memory import HostMemory

SCRATCH = Path(__file__).parents[1] / "scratch"
LONGEST = 4096  # tokens of a prompt
LABELS = [11, 23]
# Requests of other sizes, which could leave the heap in pieces.
MIXED = [Workload(97, 150, 3), Workload(359, 99, 25), Workload(1014, 31, 80), Workload(3, 1, 900)]


def main() -> None:
    options = arguments()
    if not options.own_arenas:
        heap.use_one_arena()
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    measured: list[int] = []

    class Noting(HostMemory):
        def _peak(self, run: Callable[[], object]) -> int | None:
            peak = super()._peak(run)
            measured.append(peak or 0)
            return peak

    with mock.patch("gpuscore.backends.torch.backend.memory_of", return_value=Noting()):
        scorer = Scorer(
            str(directory),
            dtype=options.dtype,
            compile=options.compile,
            max_model_len=LONGEST,
            kv_cache_size=page_bytes(options),
        )
    with scorer:
        for pages in (side for pair in scorer._backend.launcher.pool.layers for side in pair):
            pages.zero_()  # so that they are in memory, and do not count as growth later
        found = measure(scorer, options)
    workload = f"{options.query} + {options.items} x {options.length}"
    rows = [row(way, turns) for way, turns in found.items()]
    print(f"\n{options.shape}, {options.dtype}, {workload}; {machine()}\n\n{table(rows)}\n")
    about = {"largest batch MiB": sum(measured) // 2**20}
    keep("heap", {"bench": "heap", "rows": rows} | about | vars(options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b-4-layers")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--query", type=int, default=500)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--length", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4, help="of each way")
    parser.add_argument("--repeat", type=int, default=2, help="timed requests of a turn")
    parser.add_argument(
        "--own-arenas", action="store_true", help="threads have arenas of their own"
    )
    return parser.parse_args()


def as_it_comes() -> None:
    heap._set_option(heap.M_MMAP_THRESHOLD, 32 << 20)
    heap._set_option(heap.M_TRIM_THRESHOLD, 64 << 20)


def measure(scorer: Scorer, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    ways = {"as it comes": as_it_comes, "kept": heap.keep_freed_blocks}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    seed = 0
    for _ in range(options.turns):
        for way, set_heap in ways.items():
            set_heap()
            heap.collect_and_trim()
            found[way].append(turn(scorer, options, seed))
            print(f"  {way}: {found[way][-1]}", flush=True)
            seed += 100
    return found


def turn(scorer: Scorer, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Score requests and return what one took, and the process's growth in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    rest = status("VmRSS")
    vocab = SHAPES[options.shape]["vocab_size"]

    def score(size: Workload, seed: int) -> None:
        query, items = dataclasses.replace(size, seed=seed).draw(vocab)
        scorer.score(query, items, label_token_ids=LABELS)

    workload = Workload(options.query, options.items, options.length)
    score(workload, seed)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for number in range(options.repeat):
        score(workload, seed + 1 + number)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    peak, busy = status("VmHWM"), status("VmRSS")
    if seed < 200:  # once for each way
        for number, size in enumerate(MIXED):
            score(size, seed + 50 + number)
    mixed = status("VmHWM")
    heap.collect_and_trim()
    user, system = (getattr(after, f) - getattr(before, f) for f in ("ru_utime", "ru_stime"))
    return {
        "wall s": wall / options.repeat,
        "CPU s": (user + system) / options.repeat,
        "system s": system / options.repeat,
        "page faults": (after.ru_minflt - before.ru_minflt) / options.repeat,
        "peak MiB": (peak - rest) / 2**20,
        "peak of other sizes MiB": (mixed - rest) / 2**20,
        "after work MiB": (busy - rest) / 2**20,
        "idle MiB": (status("VmRSS") - rest) / 2**20,
    }


def page_bytes(options: argparse.Namespace) -> int:
    """Return the size of the KV pages of one prompt of full length, and some more."""
    shape, size = SHAPES[options.shape], 2 if options.dtype == "bfloat16" else 4
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    return 2 * shape["num_hidden_layers"] * heads * size * (LONGEST + 256)


def status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def row(way: str, turns: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"large blocks": way}
    for name in turns[0]:
        taken = max if name == "peak of other sizes MiB" else statistics.median
        value = taken(turn[name] for turn in turns)
        found[name] = round(value) if value >= 100 else round(value, 2)
    return found


if __name__ == "__main__":
    main()

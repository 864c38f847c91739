"""Time of one request on a CPU: one process with one thread, two ranks with one thread each, and
one process with two threads, in turn.

    .venv/bin/python -P bench/ranks.py                        # 500 + 100 x 20, 4 layers as wide as
                                                              # those of Qwen3-0.6B
    .venv/bin/python -P bench/ranks.py --shape tiny --repeat 1

Nothing is timed unless all agree within 1e-4 in log p. Medians are printed, of wall time (and its
least), of CPU-seconds, of both ranks together, and of the rounds' ratios. Ranks on a CPU talk over
gloo on loopback, so this shows what the division itself costs, not what NVLink would take.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from peer import Peer
from report import keep, machine, table
from scenarios import SHAPES, WORKLOADS, Request, Workload, make_model
from spent import Spent

SCRATCH = Path(__file__).parents[1] / "scratch"
SIDE = "ranks_side.py"
TOLERANCE = 1e-4
CHECKED = Workload(120, 10, 9, seed=1)
FIRST = "one process, 1 thread"
# Ranks and threads; those of `--threads` are shared out among the ranks.
SCORERS = {FIRST: (1, 1), "2 ranks, 1 thread each": (2, 2), "one process, 2 threads": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b-4-layers")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="hundred")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    shape, workload = SHAPES[options.shape], WORKLOADS[options.workload]
    directory = make_model(options.shape, "float32", SCRATCH)
    longest = max(one.query_len + one.item_len for one in (CHECKED, workload))
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(started(directory, ranks, threads, longest))
            for name, (ranks, threads) in SCORERS.items()
        }
        off = check(peers, CHECKED.draw_all(shape["vocab_size"]))
        rounds = [timed(peers, workload, shape, turn) for turn in range(options.repeat)]
    count = workload.num_items * workload.requests
    rows = [row(name, rounds, count) for name in SCORERS]
    about = f"{options.shape}, float32, {workload}; medians of {options.repeat}"
    print(f"\n{about}; max |d log p| {off:.1e}; {machine()}\n\n{table(rows)}\n")
    named = {"bench": "ranks", "shape": options.shape, "workload": str(workload)}
    keep("ranks", named | {"repeat": options.repeat, "max d log p": off, "rows": rows})


def started(directory: Path, ranks: int, threads: int, longest: int) -> Peer:
    """Start a process that scores."""
    settings: dict[str, Any] = {"model": str(directory), "longest": longest}
    settings |= {"ranks": ranks, "threads": threads}
    return Peer(SIDE, Path(sys.executable), settings, {"scores": "scores"})


def check(peers: Mapping[str, Peer], requests: Sequence[Request]) -> float:
    """Return the largest difference from the first one; the program ends if it is too large."""
    want, _ = peers[FIRST].score(requests)
    rows = [
        np.abs(got - right).max()  # NaN, if there is one
        for peer in peers.values()
        for got, right in zip(peer.score(requests)[0], want, strict=True)
    ]
    off = float(np.max(rows))
    if not off <= TOLERANCE:
        raise SystemExit(f"the scores differ by {off:.1e} in log p: nothing is timed")
    return off


def timed(
    peers: Mapping[str, Peer], workload: Workload, shape: Mapping[str, Any], turn: int
) -> dict[str, Spent]:
    """Time each once, on the same fresh tokens."""
    requests = replace(workload, seed=100 + turn).draw_all(shape["vocab_size"])
    found = {name: peer.score(requests)[1] for name, peer in peers.items()}
    said = (f"{name}: {one.wall:.2f} s, CPU {one.cpu:.2f} s" for name, one in found.items())
    print("; ".join(said), flush=True)
    return found


def row(name: str, rounds: Sequence[Mapping[str, Spent]], count: int) -> dict[str, Any]:
    """Return medians, and medians of the ratios to the first one's of the same round."""
    own, first = [one[name] for one in rounds], [one[FIRST] for one in rounds]
    pairs = [*zip(own, first, strict=True)]
    wall = statistics.median(one.wall for one in own)
    return {
        "scorer": name,
        "wall s": round(wall, 2),
        "least": round(min(one.wall for one in own), 2),
        "CPU s": round(statistics.median(one.cpu for one in own), 2),
        "items/s": round(count / wall, 1),
        "speed-up": round(statistics.median(f.wall / o.wall for o, f in pairs), 2),
        "CPU / first's": round(statistics.median(o.cpu / f.cpu for o, f in pairs), 2),
    }


if __name__ == "__main__":
    main()

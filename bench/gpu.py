"""Times on a CUDA card: the goals' workloads against the ceilings of the same run, every result
compared with the reference first.

    make bench-gpu                        # needs a CUDA device; under 8 minutes, no network
    make bench-gpu SERVE=1                # also over HTTP; needs the server's dependencies
    make bench-gpu ARGS='--output DIR'    # results there, not in bench/results
    make bench-gpu ARGS='--device cpu --shape tiny --quick'   # the same script in seconds

Torch, Triton, transformers (and what they bring) of PYTHON are enough, FlashInfer is used where it
is. Random weights of Qwen3-0.6B's shape are made once in scratch/ (1.2 GB).

The run consists of sections in processes of their own: one that fails, hangs or takes the device
down with it loses its own figures only. All is written to gpu-<date>.json as it comes. Ends with 1
if a row was wrong or a section failed; sections for which no time was left are named, and are no
failure.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from gpu_state import State
from report import RESULTS, commit, now

SCRATCH = Path(__file__).parents[1] / "scratch"
WORKER = Path(__file__).with_name("gpu_worker.py")
# Exit codes of a worker: all sections are through; there is no such device; the device failed, and
# another process may be able to use it.
DONE, NOTHING, BROKEN = 0, 78, 75
MARGIN = 15.0  # seconds at the end for what remains to be said


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="gpuscore-bench-") as work:
        folder = options.output or (RESULTS if options.device == "cuda" else Path(work))
        state = start(folder, Path(work), options)
        if run_all(state.path) == NOTHING:
            state.path.unlink()
            return 1
        state = State.read(state.path)
        state.close()
        print(f"\n{state.summary()}\n")
        for complaint in state.complaints:
            print(f"FAILED  {complaint}")
        if folder != Path(work):
            print(f"written to {state.path}")
        return int(bool(state.complaints))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="qwen3-0.6b", help="qwen3-0.6b, small or tiny")
    parser.add_argument("--quick", action="store_true", help="small workloads, few repeats")
    parser.add_argument("--serve", action="store_true", help="also over HTTP")
    parser.add_argument("--minutes", type=float, default=7.8, help="that the run may take")
    parser.add_argument(
        "--sections", default=None, metavar="A;B", help="only those that begin with A or B"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="DIR",
        help="for results; default: bench/results on CUDA, none are kept on a CPU",
    )
    parser.add_argument("--scratch", type=Path, default=SCRATCH, metavar="DIR", help="for weights")
    return parser.parse_args(argv)


def start(folder: Path, work: Path, options: argparse.Namespace) -> State:
    """An empty state, in a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    date = now()
    state = State(
        folder.resolve() / f"gpu-{date.replace(':', '')}.json",
        {
            "bench": "gpu",
            "date": date,
            "commit": commit(),
            "options": {
                "device": options.device,
                "shape": options.shape,
                "quick": options.quick,
                "serve": options.serve,
                "sections": options.sections.split(";") if options.sections else None,
            },
            "scratch": str(options.scratch.resolve()),
            "work": str(work),
            "deadline": time.time() + 60 * options.minutes - MARGIN,
            "planned": [],
            "sections": {},
            "rows": [],
        },
    )
    state.save()
    return state


def run_all(path: Path) -> int:
    """Workers until all sections are through; each goes on after the section that ended the last.

    A worker that dies outside of any section would do so again, and is the last.
    """
    while True:
        code = run_worker(path)
        state = State.read(path)
        if code in (DONE, NOTHING):
            return code
        if not state.died(code) and code != BROKEN:
            state.end("start", "failed", f"the process ended with {code}, see what it printed")
            return code
        if state.time_is_up:
            state.skip_the_rest()
            return DONE


def run_worker(path: Path) -> int:
    """In a process group of its own, of which nothing outlives it."""
    process = subprocess.Popen([sys.executable, "-P", WORKER, path], start_new_session=True)
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())

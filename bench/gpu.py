"""Times on a CUDA card: the goals' workloads against ceilings measured in the same run. Every
result is first compared with the reference.

    make bench-gpu                        # needs a CUDA device; under 8 minutes, no network
    make bench-gpu SERVE=1                # also over HTTP; needs the server's dependencies
    make bench-gpu ARGS='--output DIR'    # writes results there, not to bench/results
    make bench-gpu ARGS='--device cpu --shape tiny --quick'   # the same script in seconds

PYTHON needs Torch, Triton and transformers with their dependencies; FlashInfer is used if it is
installed. Random weights of Qwen3-0.6B's shape are made once in scratch/ (1.2 GB).

The run consists of sections. If one fails, hangs or breaks the device, only its figures are lost; a
new process continues with the next one where needed. Figures are written to gpu-<date>.json as they
come. The exit code is 1 if a row was wrong or a section failed. Sections skipped for lack of time
are listed and do not count as failures.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from gpu_state import State
from group import run_group
from report import RESULTS, commit, now

SCRATCH = Path(__file__).parents[1] / "scratch"
WORKER = Path(__file__).with_name("gpu_worker.py")
# Exit codes of a worker: all sections were run; there is no such device; the device failed, but
# another process may be able to use it.
DONE, NOTHING, BROKEN = 0, 78, 75
MARGIN = 15.0  # seconds kept for the summary at the end


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
    parser.add_argument("--minutes", type=float, default=7.8, help="time limit")
    parser.add_argument(
        "--sections",
        default=None,
        metavar="A;B",
        help="only those whose names begin with A or B",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="DIR",
        help="for results; default: bench/results on CUDA; on a CPU none are kept",
    )
    parser.add_argument("--scratch", type=Path, default=SCRATCH, metavar="DIR", help="for weights")
    return parser.parse_args(argv)


def start(folder: Path, work: Path, options: argparse.Namespace) -> State:
    """Create an empty state in a new file."""
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
    """Start workers until all sections were run; each continues after the section that ended the
    worker before it.

    If a worker dies outside of any section, another one would die too, so none is started.
    """
    while True:
        code = run_group([sys.executable, "-P", WORKER, path])
        state = State.read(path)
        if code in (DONE, NOTHING):
            return code
        if not state.died(code) and code != BROKEN:
            state.end("start", "failed", f"the process ended with {code}, see what it printed")
            return code
        if state.time_is_up:
            state.skip_the_rest()
            return DONE


if __name__ == "__main__":
    sys.exit(main())

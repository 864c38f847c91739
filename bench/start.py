"""Seconds until a model is ready on this CPU, and where they go.

    make bench-start                            # a random model of Qwen3-0.6B's shape
    make bench-start ARGS='--shape small --compile on --repeat 1'

Each start is a process of its own, as the engine's process loads a model: imports, weights (beside
which functions in C are compiled), set-up (small batches), the measurement of memory with the
largest batches, and the final warm-up. A warm start finds the model's files in memory; for a cold
one they come from the disk. CPU-seconds are those of all threads and of the compiler.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from scenarios import SHAPES, make_model
from spent import cpu_seconds

SCRATCH = Path(__file__).parents[1] / "scratch"
STARTED = time.perf_counter()
Stages = dict[str, tuple[float, float]]  # wall and CPU seconds


def main() -> None:
    options = arguments()
    directory = make_model(options.shape, "bfloat16", SCRATCH)
    found: dict[str, list[Stages]] = {"cold": [], "warm": []}
    for _ in range(options.repeat):
        for kind, runs in found.items():
            if kind == "cold":
                drop_from_memory(directory)
            runs.append(start(directory, options))
            print(f"  {kind}: {runs[-1]['ready'][0]:.1f} s", flush=True)
    rows = [row(name, found) for name in found["warm"][0]]
    print(f"\n{options.shape}, {options.dtype}; {machine()}\n\n{table(rows)}\n")
    keep("start", {"bench": "start", "rows": rows} | vars(options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def drop_from_memory(directory: Path) -> None:
    """Have the system forget a directory's files, which then come from the disk."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def start(directory: Path, options: argparse.Namespace) -> Stages:
    """Start once, in a process of its own."""
    settings = {"model": str(directory), "dtype": options.dtype, "compile": options.compile}
    done = subprocess.run(
        [sys.executable, "-P", __file__, "--child", json.dumps(settings)],
        stdout=subprocess.PIPE,
        check=True,
    )
    stages: Stages = json.loads(done.stdout.splitlines()[-1])
    return stages


def child(settings: dict[str, Any]) -> None:
    """Load as the engine's process does, and print what each stage took."""
    from gpuscore.backends import prepare
    from gpuscore.backends.base import unreported
    from gpuscore.backends.torch import backend
    from gpuscore.config import ModelConfig

    stages: Stages = {"imports": (time.perf_counter() - STARTED, cpu_seconds())}

    def timed(owner: Any, function: str, stage: str) -> None:
        before: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(before)
        def run(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), cpu_seconds()
            result = before(*arguments, **options)
            taken = time.perf_counter() - wall, cpu_seconds() - cpu
            spent = stages.get(stage, (0.0, 0.0))
            stages[stage] = spent[0] + taken[0], spent[1] + taken[1]
            return result

        setattr(owner, function, run)

    timed(backend.TorchBackend, "_load", "weights, and compilation")
    timed(backend.TorchBackend, "_set_up", "small batches")
    timed(backend, "measure", "largest batches")
    prepare(Path(settings["model"]), ModelConfig(**settings)).load(unreported).warmup()
    stages["ready"] = time.perf_counter() - STARTED, cpu_seconds()
    print(json.dumps(stages), flush=True)
    os._exit(0)


def row(stage: str, found: dict[str, list[Stages]]) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": stage}
    for kind, runs in found.items():
        for number, what in enumerate(("s", "CPU s")):
            values[f"{kind}, {what}"] = round(statistics.median(r[stage][number] for r in runs), 2)
    return values


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    main()

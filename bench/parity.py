"""Items per second of --backend jax against --backend torch, in one process and run.

    make bench-parity                                  # 2,000 + 500 x 20, a small shape, this CPU
    make bench-parity ARGS='--workload short'          # 300 + 16 x 32
    make bench-parity ARGS='--dtype bfloat16'
    make bench-parity ARGS='--backends torch@cpu,jax@tpu'     # each on a device of its own
    make bench-parity ARGS='--trace DIRECTORY'         # also JAX's profile of a round

The backends are timed only if they agree: in float32 within 1e-4 in log p on the whole workload; in
bfloat16, jax's error against float32 is at most twice torch's. Then they take turns, `--repeat`
times, on fresh random tokens; medians are printed, and ratios are taken round by round. Two plots
are written beside the JSON line: the differences of jax's log-probabilities from torch's, and one
against the other.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from report import keep, machine, table
from scenarios import SHAPES, WORKLOADS, Workload, make_model

from gpuscore import Scorer
from gpuscore.config import ModelConfig
from gpuscore.measure.plots import histogram, scatter

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(__file__).parents[1] / "scratch"
LABELS = [11, 23]
BACKENDS = ("torch", "jax")
DEVICES = ("cpu", "cuda", "tpu")


def main() -> None:
    options = arguments()
    directory = make_model(options.shape, "float32", SCRATCH)
    workload = WORKLOADS[options.workload]
    config = ModelConfig(
        str(directory),
        dtype=options.dtype,
        # JAX writes all pages at start, so more of them would only take time.
        max_model_len=4096,
        max_batch_tokens=options.max_batch_tokens,
    )
    scorers, starts = {}, {}
    for name in BACKENDS:
        start = time.perf_counter()
        scorers[name] = Scorer(
            dataclasses.replace(config, backend=name, device=options.backends[name])
        )
        run(scorers[name], workload, options.shape)  # compiles
        starts[name] = time.perf_counter() - start
    draw(check(scorers, directory, options, workload))
    rows = measure(scorers, options, workload)
    if options.trace:
        trace(scorers["jax"], options, workload)
    for row in rows:
        row["device"] = options.backends[row["backend"]]
        row["first answer after s"] = round(starts[row["backend"]], 1)
    for scorer in scorers.values():
        scorer.close()
    found = {
        "bench": "parity",
        "shape": options.shape,
        "dtype": options.dtype,
        "devices": options.backends,
        "workload": str(workload),
        "repeat": options.repeat,
        "jax": jax_version(),
        "rows": rows,
    }
    print(f"\n{options.shape}, {options.dtype}, {workload}, 2 labels; {machine()}\n")
    print(table(rows))
    print()
    keep("parity", found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="reports")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument(
        "--backends",
        type=devices,
        default="torch@cpu,jax@cpu",
        metavar="torch@DEVICE,jax@DEVICE",
        help=f"device of each backend: {', '.join(DEVICES)} (default: torch@cpu,jax@cpu)",
    )
    parser.add_argument("--max-batch-tokens", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--trace", type=Path, default=None, metavar="DIRECTORY")
    return parser.parse_args()


def devices(text: str) -> dict[str, str]:
    """Parse the device of each backend; raise ArgumentTypeError if the text has another form."""
    parts = [part.partition("@") for part in text.split(",")]
    found = {name: device for name, _, device in parts}
    if len(parts) != len(found) or set(found) != set(BACKENDS):
        raise argparse.ArgumentTypeError(f"{text!r} does not name {' and '.join(BACKENDS)} once")
    for name, device in found.items():
        if device not in DEVICES or (name, device) == ("torch", "tpu"):
            raise argparse.ArgumentTypeError(f"{name!r} cannot run on {device!r}")
    return found


def run(scorer: Scorer, workload: Workload, shape: str) -> np.ndarray:
    query, items = workload.draw(SHAPES[shape]["vocab_size"])
    result = scorer.score(query, items, label_token_ids=LABELS, logprobs=True)
    if result.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return result.logprobs


def check(
    scorers: dict[str, Scorer], directory: Path, options: argparse.Namespace, workload: Workload
) -> dict[str, np.ndarray]:
    """Return log-probabilities of both backends; ends the bench if they do not agree."""
    found = {name: run(scorer, workload, options.shape) for name, scorer in scorers.items()}
    difference = np.abs(found["jax"] - found["torch"])
    print(f"|d log p| between them: median {np.median(difference):.1e}, max {difference.max():.1e}")
    if options.dtype == "float32":
        if difference.max() > 1e-4:
            raise SystemExit("jax does not agree with torch: nothing is timed")
        return found
    with Scorer(
        str(directory), dtype="float32", device=options.backends["torch"], max_model_len=4096
    ) as one:
        exact = run(one, workload, options.shape)
    torchs, jaxs = (np.abs(found[name] - exact) for name in BACKENDS)
    print(f"from float32: torch max {torchs.max():.1e}, jax max {jaxs.max():.1e}")
    if jaxs.max() > 2 * torchs.max() or np.median(jaxs) > 2 * np.median(torchs):
        raise SystemExit("jax is outside the bound: nothing is timed")
    return found


def draw(found: dict[str, np.ndarray]) -> None:
    torchs, jaxs = (found[name].ravel() for name in BACKENDS)
    plots = {
        "errors": histogram(jaxs - torchs, "jax against torch"),
        "scores": scatter(torchs, jaxs, "jax against torch"),
    }
    for name, plot in plots.items():
        (RESULTS / f"parity-{name}.svg").write_text(plot + "\n")


def measure(
    scorers: dict[str, Scorer], options: argparse.Namespace, workload: Workload
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in scorers}
    cpu: dict[str, list[float]] = {name: [] for name in scorers}
    for turn in range(options.repeat):
        fresh = dataclasses.replace(workload, seed=100 + turn)
        for name, scorer in scorers.items():
            start, before = time.perf_counter(), time.process_time()
            run(scorer, fresh, options.shape)
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - before)
            print(f"  {name}: {seconds[name][-1]:.2f} s, {cpu[name][-1]:.2f} s of CPU", flush=True)
    return [
        {
            "backend": name,
            "items/s": round(workload.num_items / statistics.median(seconds[name]), 1),
            "time / torch's": _ratio(seconds[name], seconds["torch"]),
            "CPU time / torch's": _ratio(cpu[name], cpu["torch"]),
        }
        for name in scorers
    ]


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)


def trace(scorer: Scorer, options: argparse.Namespace, workload: Workload) -> None:
    import jax

    with jax.profiler.trace(str(options.trace)):
        run(scorer, dataclasses.replace(workload, seed=99), options.shape)
    print(f"profile in {options.trace}, for XProf or Perfetto")


def jax_version() -> str:
    import jax

    return str(jax.__version__)


if __name__ == "__main__":
    main()

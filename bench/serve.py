"""Requests per second and latencies of the whole server; every score is checked.

    make bench-serve                                  # fake backend and a tiny model; many minutes
    make bench-serve ARGS='--quick'                   # under a minute, few requests
    make bench-serve ARGS='--backend fake'            # the host side only
    make bench-serve ARGS='--backend fake --stages ladder --ladder 64 --requests 20000'
    make bench-serve ARGS='--backend fake --token-us 3'   # a simulated device: 3 us per token
    make bench-serve ARGS='--backend fake --token-us 3 --devices cpu,cpu'    # two such replicas
    make bench-serve ARGS='--backend fake --stages ladder --ladder 64,1024 --http-workers 1,2'

Stages: `ladder` keeps 1 to 1,024 requests in flight, cache cold and warm; `poisson` sends 50, 80,
100 and 150 % of the ladder's best rate. Latency counts from the scheduled arrival.
With several numbers of HTTP workers, their servers take turns. The client shares the machine with
the server. The exit code is 1 if a score was wrong, a request
was lost, or an answer had an unexpected status.
"""

import argparse
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import fake
from launch import Target, fake_server, real_server, serving
from load import ClosedLoop, OpenLoop, Run
from report import keep, table
from traffic import LABELS, Oracle, Shape, Traffic, make, poisson, summary

SCRATCH = Path(__file__).parents[1] / "scratch"
LADDER = Shape(120, 10, 18)
STAGES = ("ladder", "poisson")
POOL = 32  # queries of a warm cache
WARMUP = 2.0  # seconds of an open loop that do not count
SHOWN = [
    *("workers", "load", "cache", "requests", "req/s", "in flight", "p50 ms", "p90 ms", "p99 ms"),
    *(
        "server us",
        "http us",
        "refused",
        "refused p99 ms",
        "5xx",
        "other",
        "lost",
        "wrong",
        "hit rate",
    ),
]


@dataclass
class Plan:
    """Stages and their sizes."""

    ladder: list[int]
    per_client: int  # requests of a closed loop, times its clients ...
    at_least: int  # ... but not fewer
    seconds: float  # time limit of a closed loop, length of an open one
    warm_ladder: list[int]
    loads: list[int]  # percent of the peak
    stages: list[str]


@dataclass
class Bench:
    """A server under load, and the rows measured so far."""

    target: Target
    oracle: Oracle
    vocab: int
    tolerance: float
    plan: Plan
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng())
    rows: list[dict[str, Any]] = field(default_factory=list)
    workers: int = 1  # HTTP processes of the server

    def closed(self, stage: str, clients: int, shape: Shape, warm: bool, measured: int) -> None:
        count = measured + 2 * clients  # the first and the last answers are not measured
        traffic = self._traffic(shape, count, warm)
        run = ClosedLoop(self.target.address, traffic.wires, self.plan.seconds, clients)
        self._execute(stage, f"{clients} in flight", traffic, run, warm, {"clients": clients})

    def poisson(self, stage: str, name: str, rate: float, shape: Shape, warm: bool) -> None:
        offsets = poisson(rate, self.plan.seconds + WARMUP, self.rng)
        traffic = self._traffic(shape, len(offsets), warm)
        run = OpenLoop(self.target.address, traffic.wires, offsets, WARMUP)
        self._execute(stage, name, traffic, run, warm, {"offered": round(rate, 1)})

    def peak(self) -> float:
        """Return the best rate of the cold ladder so far."""
        rates = [r["req/s"] for r in self.rows if r["stage"] == "ladder" and r["cache"] == "cold"]
        return max(rates)

    def _traffic(self, shape: Shape, count: int, warm: bool) -> Traffic:
        return make(
            shape,
            count,
            self.vocab,
            self.oracle,
            self.rng,
            tolerance=self.tolerance,
            pool=POOL if warm else 0,
        )

    def _execute(
        self, stage: str, name: str, traffic: Traffic, run: Run, warm: bool, more: dict[str, Any]
    ) -> None:
        load, before = os.getloadavg()[0], self.target.cpu_by_kind()
        record = run.execute()
        after = self.target.cpu_by_kind()
        cpu = {kind: after[kind] - before[kind] for kind in after}
        answers = max(1, len(record.order))
        row = {
            "stage": stage,
            "workers": self.workers,
            "load": name,
            "cache": "warm" if warm else "cold",
            "shape": str(traffic.shape),
            **more,
            **summary(traffic, record),
            "server us": round(sum(cpu.values()) / answers * 1e6),
            "http us": round(cpu["http"] / answers * 1e6),
            "client us": round(record.client_cpu / answers * 1e6),
            "server MiB": round(self.target.memory_mib()),
            "load before": round(load, 2),
        }
        self.rows.append(row)
        print("  ".join(f"{key} {row[key]}" for key in SHOWN if row[key]), flush=True)


def main() -> int:
    options = arguments()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    failed = False
    for backend in ("fake", "model") if options.backend == "both" else (options.backend,):
        plan = plan_of(options, backend)
        print(f"\n{backend}:", flush=True)
        numbers = [int(number) for number in options.http_workers.split(",")]
        rows = [row for number in numbers for row in rows_of(backend, options, plan, number)]
        print(f"\n{table([{key: row[key] for key in SHOWN} for row in rows])}\n")
        found = {"bench": "serve", "backend": backend, "options": vars(options)}
        keep("serve", found | {"rows": rows})
        failed |= any(r["wrong"] or r["lost"] or r["5xx"] or r["other"] for r in rows)
    return int(failed)


def rows_of(
    backend: str, options: argparse.Namespace, plan: Plan, workers: int
) -> list[dict[str, Any]]:
    """Return the rows of all stages with a server of so many HTTP workers."""
    with bench_of(backend, options, plan, workers) as bench:
        for stage in plan.stages:
            run_stage(bench, stage)
    return bench.rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("fake", "model", "both"), default="both")
    parser.add_argument("--quick", action="store_true", help="few requests")
    parser.add_argument("--stages", default=None, metavar="A,B", help="of the two above")
    parser.add_argument("--ladder", default=None, metavar="C,C", help="requests in flight")
    parser.add_argument("--requests", type=int, default=None, help="of each closed loop, at least")
    parser.add_argument("--seconds", type=float, default=None, help="of each open loop")
    parser.add_argument("--max-batch-tokens", type=int, default=16_384, help="fake backend")
    parser.add_argument("--batch-us", type=float, default=0.0, help="fake device time per batch")
    parser.add_argument("--token-us", type=float, default=0.0, help="fake device time per token")
    parser.add_argument(
        "--http-workers", default="1", metavar="N,N", help="processes of the server for HTTP"
    )
    parser.add_argument("--max-queued-requests", type=int, default=1024, help="of the server")
    parser.add_argument("--devices", default=None, help="one replica on each, such as cpu,cpu")
    return parser.parse_args()


def plan_of(options: argparse.Namespace, backend: str) -> Plan:
    ladder = [1, 8, 64, 128, 256, 512, 768, 1024]
    plan = Plan(ladder, 10, 1000, 30.0, ladder, [50, 80, 100, 150], list(STAGES))
    if options.quick:
        plan = Plan([1, 64, 512], 3, 200, 3.0, [64], [80, 150], list(STAGES))
    if backend == "model":
        plan.ladder = plan.warm_ladder = [1, 8, 64] if not options.quick else [8]
        plan.at_least = 200 if not options.quick else 100
    plan.stages = options.stages.split(",") if options.stages else plan.stages
    if options.ladder:
        plan.ladder = [int(c) for c in options.ladder.split(",")]
        plan.warm_ladder = [c for c in plan.warm_ladder if c in plan.ladder]
    plan.at_least = options.requests or plan.at_least
    plan.seconds = options.seconds or plan.seconds
    return plan


@contextmanager
def bench_of(
    backend: str, options: argparse.Namespace, plan: Plan, workers: int
) -> Iterator[Bench]:
    # All load uses one key, and the limit per key would hide the engine's limit.
    inflight = 2 * options.max_queued_requests * workers
    if backend == "fake":
        command = fake_server(
            server={"max_inflight_per_key": inflight, "http_workers": workers},
            engine={
                "max_queued_requests": options.max_queued_requests,
                "devices": options.devices,
            },
            fake={
                "max_tokens": options.max_batch_tokens,
                "batch_us": options.batch_us,
                "token_us": options.token_us,
            },
        )
        with serving(command) as target:
            yield Bench(target, fake.oracle, fake.VOCAB, 0.0, plan, workers=workers)
        return
    with tiny_model() as (directory, vocab, oracle):
        flags = ["--threads", "1", "--max-inflight-per-key", str(inflight)]
        flags += ["--max-queued-requests", str(options.max_queued_requests)]
        flags += ["--devices", options.devices] if options.devices else []
        flags += ["--http-workers", str(workers)]
        with serving(real_server(directory, *flags)) as target:
            yield Bench(target, oracle, vocab, 1e-4, plan, workers=workers)


@contextmanager
def tiny_model() -> Iterator[tuple[Path, int, Oracle]]:
    """A random float32 model, and a Scorer as its oracle, which is used before the timing."""
    import torch
    from scenarios import SHAPES, make_model

    from gpuscore import Scorer

    torch.set_num_threads(1)
    directory = make_model("tiny", "float32", SCRATCH)
    with Scorer(str(directory), threads=1) as scorer:

        def oracle(queries: np.ndarray, items: np.ndarray, labels: Any) -> np.ndarray:
            pairs = zip(queries.tolist(), items.tolist(), strict=True)
            return np.array([scorer.score(q, i, label_token_ids=LABELS).scores for q, i in pairs])

        yield directory, SHAPES["tiny"]["vocab_size"], oracle


def run_stage(bench: Bench, stage: str) -> None:
    plan = bench.plan
    print(f"{stage}:", flush=True)
    if stage == "ladder":
        for warm, ladder in ((False, plan.ladder), (True, plan.warm_ladder)):
            for clients in ladder:
                measured = max(plan.at_least, plan.per_client * clients)
                bench.closed(stage, clients, LADDER, warm, measured)
    elif stage == "poisson":
        for percent in plan.loads:
            rate = bench.peak() * percent / 100
            bench.poisson(stage, f"{percent} % of peak", rate, LADDER, warm=False)
    else:
        raise SystemExit(f"unknown stage {stage}; stages: {', '.join(STAGES)}")


if __name__ == "__main__":
    sys.exit(main())

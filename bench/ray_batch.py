"""The cost of Ray for `gpuscore batch --ray`: the same job without Ray and on local clusters of
some nodes, with an engine of one thread on each.

    .venv-ray/bin/python -P bench/ray_batch.py
    .venv-ray/bin/python -P bench/ray_batch.py --rows 20000 --nodes 2

Each job is the whole command with the embedded demo model, and first a tenth of its rows: the
difference of both is what the further rows take, without any start. CPU-seconds are of the command,
its engines and all processes of Ray, looked at twice a second; the driver is the command's process.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from batch import make_rows
from report import keep, machine, table
from spent import family

NODE = {"num_cpus": 1, "object_store_memory": 200 * 2**20, "include_dashboard": False}
FLAGS = ["--query-column", "query", "--labels", "yes,no", "--threads", "1"]
LOOK = 0.5  # seconds


@dataclass(frozen=True)
class Job:
    """Seconds of a job: wall time, CPU time of all processes, and of the driver."""

    wall: float
    cpu: float
    driver: float


def main() -> None:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="gs-"))
    rows = make_rows(options, 0, "shuffled", "ray")
    for name, some in (("all", rows), ("tenth", rows[: len(rows) // 10])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    shown = [measured("2 engines without Ray", options, folder, ["--devices", "cpu,cpu"])]
    for count in options.nodes:
        shown.append(on_nodes(count, options, folder))
        print(shown[-1], flush=True)
    shutil.rmtree(folder)
    shape = f"{options.rows} rows, {options.queries} queries, demo model, one thread an engine"
    print(f"\n{shape}; {machine()}\n\n{table(shown)}\n")
    keep("ray_batch", {"bench": "ray_batch", "shape": shape, "rows": shown})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--query", type=int, default=150, help="words of a query")
    parser.add_argument("--item", type=int, default=12, help="words of an item")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 2])
    return parser.parse_args()


def on_nodes(count: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the job on a cluster of so many nodes, beside a head without an engine."""
    own = tempfile.mkdtemp(prefix="gs-")
    os.environ.update(
        RAY_TMPDIR=own, RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0"
    )
    # Imported late: ray reads these variables when it is imported.
    from ray.cluster_utils import Cluster

    Path(own, "ray").mkdir()
    head = {**NODE, "num_cpus": 0, "temp_dir": f"{own}/ray"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            cluster.add_node(**NODE)
        return measured(f"Ray, nodes: {count}", options, folder, ["--ray", cluster.address])
    finally:
        cluster.shutdown()
        shutil.rmtree(own)


def measured(
    name: str, options: argparse.Namespace, folder: Path, more: list[str]
) -> dict[str, Any]:
    tenth, whole = (run(folder / f"{part}.jsonl", name, more) for part in ("tenth", "all"))
    further = options.rows - options.rows // 10
    return {
        "engines": name,
        "seconds": round(whole.wall, 1),
        "CPU-seconds": round(whole.cpu, 1),
        "CPU us a further row": round(1e6 * (whole.cpu - tenth.cpu) / further),
        "driver CPU-seconds": round(whole.driver, 1),
        "driver CPU ms per 1,000 further rows": round(
            1e6 * (whole.driver - tenth.driver) / further, 1
        ),
    }


def run(source: Path, name: str, more: list[str]) -> Job:
    output = source.with_name(f"{name.replace(' ', '-')}-{source.name}")
    command = [sys.executable, "-P", "-m", "gpuscore", "batch", "demo", *FLAGS, *more]
    before, last, begin = cpu_seconds(), {}, time.perf_counter()
    files = ["--input", str(source), "--output", str(output)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, *files], stdout=quiet, stderr=quiet)
    while process.poll() is None:
        last |= cpu_seconds()
        time.sleep(LOOK)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in last.items()}
    return Job(time.perf_counter() - begin, sum(used.values()), used[process.pid])


def cpu_seconds() -> dict[int, float]:
    """Return the CPU-seconds of each descendant of this process, alone."""
    times = {pid: user + system for pid, (user, system, *_) in family().items()}
    del times[os.getpid()]
    return times


if __name__ == "__main__":
    main()

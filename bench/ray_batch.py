"""The cost of Ray for `gpuscore batch --ray`: the same job by two engines of this machine, and by
the engines of two actors on two local nodes.

    .venv-ray/bin/python -P bench/ray_batch.py
    .venv-ray/bin/python -P bench/ray_batch.py --rows 5000 --repeat 5

Both have the embedded demo model, loaded once, with one thread for each engine; jobs of both follow
each other in every round. In a first round their scores are compared. Wall time and CPU-seconds of
this process, the engines and all processes of Ray, whose idle use is shown, too: it goes on while
the other job is measured.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from batch import compare, make_rows, measure
from report import keep, machine, table
from spent import Spent, spent

from gpuscore.config import EngineConfig, ModelConfig, RequestLimits
from gpuscore.dialects.served import LoadedModel
from gpuscore.models.hub import model_directory
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.serving import load_model, read_files

PLACES = ("here", "ray")
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
IDLE = 10.0  # seconds
MODEL = ModelConfig("demo", device="auto", threads=1)


def main() -> None:
    options = arguments()
    runs: dict[str, list[Spent]] = {place: [] for place in PLACES}
    with engines() as models, tempfile.TemporaryDirectory() as folder:
        for number in range(-1, options.repeat):  # the first round is compared, not counted
            scores = {}
            for place in PLACES if number % 2 else reversed(PLACES):
                rows = make_rows(options, number, "shuffled", "both" if number < 0 else place)
                used, _, scores[place] = measure(Path(folder), rows, models[place])
                if number >= 0:
                    runs[place].append(used)
            if number < 0:
                compare({"grouped": scores["here"], "shuffled": scores["ray"]})
        idle = spent(partial(time.sleep, IDLE))
    shape = f"{options.rows} rows, {options.queries} queries, two engines of one thread"
    rows = [summary(place, runs[place], options.rows) for place in PLACES]
    pairs = list(zip(runs["here"], runs["ray"], strict=True))
    more = statistics.median((two.cpu - local.cpu) / options.rows for local, two in pairs)
    shown = {
        "CPU-seconds, ray / here": round(statistics.median(b.cpu / a.cpu for a, b in pairs), 3),
        "wall, ray / here": round(statistics.median(b.wall / a.wall for a, b in pairs), 3),
        "more CPU us a row": round(1e6 * more),
        "idle CPU-seconds a second": round(idle.cpu / idle.wall, 3),
    }
    print(f"\n{shape}, {options.repeat} rounds; {machine()}\n")
    print(table(rows))
    print(f"\nmedian of the rounds: {shown}\n")
    keep("ray_batch", {"bench": "ray_batch", "shape": shape, "rows": rows, **shown})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--query", type=int, default=150, help="words of a query")
    parser.add_argument("--item", type=int, default=12, help="words of an item")
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


@contextmanager
def engines() -> Iterator[dict[str, LoadedModel]]:
    """Load the model in both places."""
    folder = tempfile.mkdtemp(prefix="gs-")
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
    # Imported late: ray reads these variables when it is imported.
    from ray.cluster_utils import Cluster

    from gpuscore.ray.bulk.pool import ray_replicas

    Path(folder, "ray").mkdir()
    head = {**NODE, "temp_dir": f"{folder}/ray"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**NODE)
        directory = model_directory(MODEL.model, None)
        there = ray_replicas(cluster.address, None, directory, MODEL, EngineConfig())
        with (
            closing(start_replicas(directory, MODEL, EngineConfig(devices="cpu,cpu"))) as here,
            there as (actors, _),
        ):
            yield {"here": loaded(directory, here), "ray": loaded(directory, actors)}
    finally:
        cluster.shutdown()
        shutil.rmtree(folder)


def loaded(directory: Path, replicas: Replicas) -> LoadedModel:
    return load_model(read_files(directory, "none", (MODEL.model,)), RequestLimits(), replicas)


def summary(place: str, used: list[Spent], rows: int) -> dict[str, object]:
    return {
        "engines": place,
        "rows/s": round(statistics.median(rows / run.wall for run in used)),
        "CPU-seconds": round(statistics.median(run.cpu for run in used), 2),
        "CPU us a row": round(1e6 * statistics.median(run.cpu / rows for run in used)),
    }


if __name__ == "__main__":
    main()

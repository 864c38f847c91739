"""A job on a cluster; this process only schedules.

    plan -> read -> bring each group's rows together -> score -> finish

Everything that a step leaves is whole or counts as missing, so a run that is killed at any moment,
or loses what Ray cannot replace, is continued by the next run with the groups that are left.
"""

import logging
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError, RayTaskError

from gpuscore.commands.bulk.cluster.groups import GROUP, Plan, new_plan, read_rows
from gpuscore.commands.bulk.cluster.scorer import (
    ClusterJob,
    GroupScorer,
    digests,
    done_groups,
    total,
)
from gpuscore.commands.bulk.cluster.storage import Output, find_files, located
from gpuscore.commands.bulk.job import Progress, refuse_other_settings
from gpuscore.commands.bulk.options import JSON_LINES
from gpuscore.commands.bulk.work import WrittenState
from gpuscore.config import ModelConfig
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError
from gpuscore.models.hub import DEMO
from gpuscore.processes.replicas.placement import share_of_cpu

PLAN = ".work/plan.json"
MOST_TASKS = 1000  # that read files
INIT_DEATHS = 10  # of actors in a row, while they start
TCP_SECONDS = 5.0
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})")


def run_on_cluster(given: ClusterJob, progress: Progress) -> WrittenState:
    """Run a job to its end, or go on with it.

    Raises:
        ConfigError: the input, an option, the cluster or a node cannot be used, or another run is
            at work.
        InvalidRequest: the labels are not valid for the model; or a row is bad, and the job is
            strict.
        EngineFailed: an engine, or what Ray cannot replace, was lost. The groups done are kept.
    """
    model, place = given.model.unmeasured(), given.output
    if model.model != DEMO and Path(model.model).is_dir():  # nodes have other working directories
        model = replace(model, model=str(Path(model.model).absolute()))
    if "://" not in place:
        place = str(Path(place).absolute())
    given = replace(given, model=model, output=place, digests=digests(model))
    output, options = Output(place), given.job.options
    with _connected(given.address), _causes():
        held = _claim(place)
        asks, model, count = place_for(ray.nodes(), model)
        plan = _planned(given, output, max(1, count))
        done = done_groups(output, options.output.suffix)
        left = [group for group, name in enumerate(plan.names) if name not in done]
        room = f"room for {count} engines" if count else f"no room for an engine ({asks}): waiting"
        told = f"{len(left)} of {plan.groups} groups are left; Ray at {given.address} has {room}"
        print(f"gpuscore: {told}", file=sys.stderr)
        given = replace(given, model=model, cpus=int(asks["num_cpus"]))
        with progress.counting("scoring") as advance:
            for rows in _scored(given, plan, left, asks, count) if left else ():
                progress.rows += rows
                advance(rows)
        scored, failed, bad = ray.get(ray.remote(total).remote(output))
        output.write("/_SUCCESS", b"")
        output.remove(".work")
        ray.kill(held)
        return WrittenState(scored, failed, bad, "", "")


def _scored(
    given: ClusterJob, plan: Plan, left: list[int], asks: dict[str, float], count: int
) -> Iterator[int]:
    """Score groups and write them; yield the rows of each one. There are two executions: first all
    CPUs read, then the engines take them."""
    (system, _), options = located(given.input), given.job.options

    def read(batch: dict[str, Any]) -> Iterator[pa.Table]:
        yield from read_rows(system, int(batch["item"][0]), plan, options, left)

    tasks = min(len(plan.files), MOST_TASKS)
    files = ray.data.from_items(list(range(len(plan.files))), override_num_blocks=tasks)
    rows = files.map_batches(read, batch_size=1).repartition(len(left), keys=[GROUP]).materialize()
    wanted, first = rows.count(), min(max(1, count), len(left), given.actors or len(left))
    scored = rows.map_batches(
        GroupScorer,
        fn_constructor_args=[given, plan],
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, initial_size=first, max_size=given.actors),
        **asks,
    )
    for row in scored.iter_rows():
        wanted -= row["rows"]
        yield int(row["rows"])
    if wanted:
        raise EngineFailed(f"{wanted} rows of {given.input} got no score")


def _planned(given: ClusterJob, output: Output, engines: int) -> Plan:
    """Return the plan of the run that this one continues, or a new one."""
    options, files = given.job.options, find_files(given.input)
    settings = {**given.job.settings, "the model's files": given.digests}
    if options.requests and files[0].format != JSON_LINES:
        raise ConfigError(f"--input {given.input}: requests are JSON lines")
    if files[0].format == JSON_LINES != options.output_format:
        raise ConfigError("--ray writes the rows of JSON lines as JSON lines, not as Parquet")
    if output.has(PLAN):
        remedy = f"remove {output.place}.work and {output.place} to begin anew"
        try:
            plan = msgspec.json.decode(output.read(PLAN), type=Plan)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{output.place}{PLAN} is damaged: {error}; {remedy}") from error
        refuse_other_settings(plan.settings, settings, remedy)
        if plan.files != files:
            raise ConfigError(f"the files of --input {given.input} changed; {remedy}")
        return plan
    for name in filter(output.has, ("", ".work", ".bad.jsonl")):
        there = output.place + name
        raise ConfigError(f"{there} exists already; remove it or choose another --output")
    call = ray.remote(new_plan).remote(located(given.input)[0], files, options, engines, settings)
    made: Plan = ray.get(call)
    output.write(PLAN, msgspec.json.encode(made))
    return made


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster; raise ConfigError if none answers at the address."""
    if address != "auto":  # Ray itself tries for minutes, and then ends the process
        if not (found := _ADDRESS.fullmatch(address)):
            raise ConfigError(f"--ray {address}: the address is not auto or HOST:PORT")
        try:
            place = found[1].strip("[]"), int(found[2])
            socket.create_connection(place, TCP_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--ray {address}: nothing answers there: {error}") from None
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, OSError) as error:
        raise ConfigError(f"--ray {address}: Ray cannot connect: {error}") from error
    signal.signal(signal.SIGTERM, before)  # Ray's own gives another exit code
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its lines go to its log files
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.raise_original_map_exception = True
    context.max_consecutive_actor_init_deaths = INIT_DEATHS
    context.execution_no_progress_timeout_s = -1  # a job without nodes waits for some
    try:
        yield
    finally:
        ray.shutdown()


def _claim(output: str) -> Any:
    """Return an actor whose name says that this driver writes an output, and which ends with it;
    raise ConfigError if another driver has one."""
    claim = ray.remote(num_cpus=0)(type("Claim", (), {}))
    try:
        return claim.options(name=output, namespace="gpuscore batch").remote()
    except ValueError:
        raise ConfigError(f"--output {output}: another run is writing it") from None


@contextmanager
def _causes() -> Iterator[None]:
    """Raise an error of a task as what the task raised, and losses as EngineFailed."""
    try:
        yield
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, ConfigError | EngineFailed | GpuscoreError):
            raise type(cause)(str(cause).splitlines()[0]) from None  # Ray adds lines
        if not isinstance(cause, RayError):
            raise cause from error
        told = str(error).splitlines()[0]
        raise EngineFailed(f"{told}; the same command goes on") from error


def place_for(
    nodes: Sequence[Mapping[str, Any]], model: ModelConfig
) -> tuple[dict[str, float], ModelConfig, int]:
    """Return what an engine asks Ray for, its settings there, and how many have room: each gets a
    GPU, or `--tensor-parallel` of them; on CPUs `--threads`, or those of the smallest node.

    Args:
        nodes: as from `ray.nodes()`.

    Raises:
        ConfigError: Ray has no such device.
    """
    if model.device == "tpu":
        raise ConfigError("--device tpu is not supported with --ray; supported: auto, cpu, cuda")
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cpus, gpus = ([int(one.get(kind, 0)) for one in alive] for kind in ("CPU", "GPU"))
    if model.device == "cuda" or (model.device == "auto" and any(gpus)):
        ranks = model.tensor_parallel
        count = sum(number // ranks for number in gpus)
        return {"num_cpus": 1, "num_gpus": ranks}, replace(model, device="cuda"), count
    own = model.threads or min(filter(None, cpus), default=1)
    together = max([1, *(number // own for number in cpus)])  # they share their node's memory
    here = share_of_cpu(model, together) if together > 1 else replace(model, device="cpu")
    return {"num_cpus": own}, here, sum(number // own for number in cpus)

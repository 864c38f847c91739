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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import ray
import ray.data
from ray.exceptions import RayError, RayTaskError

from gpuscore import __version__
from gpuscore.commands.bulk.cluster.groups import GROUP, LEAST_BYTES, Plan, columns_of, read_rows
from gpuscore.commands.bulk.cluster.scorer import NOTES, ClusterJob, GroupScorer, total
from gpuscore.commands.bulk.cluster.storage import InputFile, Output, find_files, located, on_disk
from gpuscore.commands.bulk.inputs import InputFiles
from gpuscore.commands.bulk.job import Progress, refuse_other_settings
from gpuscore.commands.bulk.options import JSON_LINES
from gpuscore.commands.bulk.parquet import check_writable, schema_bytes, schema_of_bytes, unified
from gpuscore.commands.bulk.work import WrittenState
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError
from gpuscore.models.hub import DEMO, model_digests
from gpuscore.processes.replicas.placement import place_on_nodes

PLAN = ".work/plan.json"
GROUP_BYTES = 32 * 2**20  # of the input, for a group
FEWEST = 8  # groups for each engine, so that all end together
# The environment in which Ray's shuffle maps run: the reading tasks share their processes.
SHUFFLE_MAPS = {"env_vars": {"RAY_DATA_SHUFFLE_MAP_WORKER": "1"}}
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:/\s]+):(\d{1,5})")


def run_on_cluster(work: ClusterJob, progress: Progress) -> WrittenState:
    """Run a job to its end, or go on with it.

    Raises:
        ConfigError, InvalidRequest: as `run_job`, and of the cluster and its nodes.
        EngineFailed: an engine, or what Ray cannot replace, was lost. The groups done are kept.
    """
    place = work.output if "://" in work.output else str(Path(work.output).absolute())
    model = work.model.unmeasured()
    if model.model != DEMO and Path(model.model).is_dir():  # nodes have other working directories
        model = replace(model, model=str(Path(model.model).absolute()))
    own = model_digests(model.model, model.revision) | {"gpuscore": __version__}
    work = replace(work, model=model, output=place, digests=own)
    output, options = Output(place), work.job.options
    with _connected(work.address), _causes():
        held = _claim(place)
        asks, model, count = place_on_nodes(ray.nodes(), model)
        plan = _planned(work, output, max(1, count))
        done, parts, suffix = output.names(NOTES), output.names(""), options.output.suffix
        left = [i for i, n in enumerate(plan.names) if n not in done or n + suffix not in parts]
        room = f"room for {count} engines" if count else f"no room for an engine ({asks}): waiting"
        told = f"{len(left)} of {plan.groups} groups are left; Ray at {work.address} has {room}"
        print(f"gpuscore: {told}", file=sys.stderr)
        work = replace(work, model=model, cpus=int(asks["num_cpus"]))
        with progress.counting("scoring") as advance:
            for rows in _scored(work, plan, left, asks, count) if left else ():
                progress.rows += rows
                advance(rows)
        scored, failed, bad = total(output)
        output.write("/_SUCCESS", b"")
        output.remove(".work")
        ray.kill(held)
        return WrittenState(scored, failed, bad, "", "")


def _scored(
    work: ClusterJob, plan: Plan, left: list[int], asks: dict[str, float], count: int
) -> Iterator[int]:
    """Score groups and write them; yield the rows of each one. There are two executions: first all
    CPUs read, then the engines take them."""

    def read(batch: dict[str, Any]) -> Iterator[pa.Table]:
        yield from read_rows(work.input, int(batch["item"][0]), plan, work.job.options, left)

    tasks = len(plan.files)
    files = ray.data.from_items(list(range(tasks)), override_num_blocks=tasks)
    read_all = files.map_batches(read, batch_size=1, runtime_env=SHUFFLE_MAPS)
    rows = read_all.repartition(len(left), keys=[GROUP]).materialize()
    wanted, first = rows.count(), min(max(1, count), len(left), work.actors or len(left))
    scored = rows.map_batches(
        GroupScorer,
        fn_constructor_args=[work, plan],
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, initial_size=first, max_size=work.actors),
        **asks,
    )
    for row in scored.iter_rows():
        wanted -= row["rows"]
        yield int(row["rows"])
    if wanted:
        raise EngineFailed(f"{wanted} rows of {work.input} got no score")


def _planned(work: ClusterJob, output: Output, engines: int) -> Plan:
    """Return the plan of the run that this one continues, or a new one."""
    options, files = work.job.options, find_files(work.input)
    settings = {**work.job.settings, "the model's files": work.digests}
    if options.requests and files[0].format != JSON_LINES:
        raise ConfigError(f"--input {work.input}: requests are JSON lines")
    if output.has(PLAN):
        remedy = f"remove {output.place}.work and {output.place} to begin anew"
        try:
            plan = msgspec.json.decode(output.read(PLAN), type=Plan)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{output.place}{PLAN} is damaged: {error}; {remedy}") from error
        refuse_other_settings(plan.settings, settings, remedy)
        if plan.files != files:
            raise ConfigError(f"the files of --input {work.input} changed; {remedy}")
        return plan
    for name in filter(output.has, ("", ".work", ".bad.jsonl")):
        raise ConfigError(f"{output.place}{name} exists already; remove it or choose another")
    size = sum(file.size for file in files)
    groups = max(1, min(max(size // GROUP_BYTES, FEWEST * engines), size // LEAST_BYTES))
    plan = Plan(settings, files, groups, _schema(work, files))
    output.write(PLAN, msgspec.json.encode(plan))
    return plan


def _schema(work: ClusterJob, files: list[InputFile]) -> bytes:
    """Return the schema of the input's columns, as `Plan` has it."""
    options = work.job.options

    def columns(file: InputFile) -> bytes:
        with on_disk(located(work.input)[0], file) as path:
            return columns_of(InputFiles(file.format, (path,)), options)

    if files[0].format != JSON_LINES or options.output_format == JSON_LINES:
        return columns(files[0])
    schemas = ray.get([ray.remote(columns).remote(file) for file in files])
    whole = unified(list(map(schema_of_bytes, schemas)), f"--input {work.input}")
    check_writable(whole, options.scores_column)
    return schema_bytes(whole)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect this process to a cluster; raise ConfigError if none answers at the address."""
    if address != "auto":  # Ray itself tries for minutes, and then ends the process
        if not (matched := _ADDRESS.fullmatch(address)):
            raise ConfigError(f"--ray {address}: the address is not auto or HOST:PORT")
        try:
            socket.create_connection((matched[1].strip("[]"), int(matched[2])), timeout=5.0).close()
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
    context.max_consecutive_actor_init_deaths = 10
    context.execution_no_progress_timeout_s = -1  # a job without nodes waits for some
    try:
        yield
    finally:
        ray.shutdown()


def _claim(output: str) -> Any:
    """Return an actor whose name says who writes an output; raise ConfigError if one is there."""
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
        first = str(cause).splitlines()[0]  # Ray adds lines
        if isinstance(cause, RayError):
            raise EngineFailed(f"{first}; the same command goes on") from error
        if isinstance(cause, ConfigError | EngineFailed | GpuscoreError):
            raise type(cause)(first) from None
        raise cause from error

"""The composition of `gpuscore batch`: a job, and the engine that scores it."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from gpuscore import __version__
from gpuscore.commands.bulk.job import BatchJob, Progress, run_job
from gpuscore.commands.bulk.options import BatchOptions, read_options
from gpuscore.commands.bulk.work import WrittenState
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import check_single
from gpuscore.config.sources import Settings
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_directory, model_name
from gpuscore.processes.announcement import LoadingBar
from gpuscore.processes.replicas.replicas import Replicas
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.serving import asking, load_model, read_files
from gpuscore.system.extras import install

EXIT_OK, EXIT_FAILED = 0, 1
MODEL_FILES = (".json", ".safetensors", ".jinja")

# The replicas, and what says where they are once they are ready.
Started: TypeAlias = tuple[Replicas, Callable[[], str]]


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: as `run_job`.
    """
    check_single(settings)
    options = read_options(values)
    model, limits = settings.make(ModelConfig), settings.make(RequestLimits)
    engine = settings.make(EngineConfig)
    started = _engines(values, engine)
    server = settings.make(ServerConfig)
    family, asked = server.family, asking(server)
    directory = model_directory(model.model, model.revision)
    names = tuple(dict.fromkeys((model_name(model.model), model.model)))

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        # A run that goes on, or another node, might measure something else.
        with started(directory, model.unmeasured(), engine) as (replicas, places):
            files = read_files(directory, family, names[::-1], asked)
            with closing(LoadingBar(replicas.engines)):
                loaded = load_model(files, limits, replicas)
            if told := places():
                print(told, file=sys.stderr)
            yield loaded

    job = BatchJob(
        options,
        {
            "gpuscore": __version__,
            **_settings_of(model),
            **_settings_of(limits),
            "--family": family,
            "--decision-order": asked.order,
            "--calibration": None if asked.calibration is None else asked.calibration.as_json(),
            **options.identity(),
            "the model's files": _state_of(directory),
        },
        names,
        engine.prefix_cache,
    )
    begin, progress = time.monotonic(), Progress()
    try:
        outcome = run_job(job, loading, progress)
    except OSError as error:
        if error.filename is None:  # such as a full disk, which `__main__` reports
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    print(_summary(outcome, options, progress.rows, time.monotonic() - begin))
    if not outcome.too_bad(options.max_bad):
        return EXIT_OK
    bad = f"{outcome.bad + outcome.failed} of {outcome.rows} rows are bad"
    print(f"gpuscore: {bad}; --max-bad is {options.max_bad:g}", file=sys.stderr)
    return EXIT_FAILED


def _engines(
    values: argparse.Namespace, engine: EngineConfig
) -> Callable[[Path, ModelConfig, EngineConfig], AbstractContextManager[Started]]:
    """Return a function that starts a job's engines; they end with the context that it returns. A
    run may continue the job of a run on another machine.

    Raises:
        ConfigError: options that do not fit together.
    """
    if values.ray is None:
        if values.ray_actors is not None:
            raise ConfigError("--ray-actors needs --ray")
        return _here
    if find_spec("ray") is None:
        raise ConfigError(f"--ray needs Ray: {install('ray')}")
    if engine.devices is not None:
        raise ConfigError(
            f"--ray excludes --devices {engine.devices}: Ray chooses nodes and their devices"
        )

    def on_cluster(*given: Any) -> AbstractContextManager[Started]:
        from gpuscore.ray.bulk.pool import ray_replicas

        return ray_replicas(values.ray, values.ray_actors, *given)

    return on_cluster


@contextmanager
def _here(directory: Path, model: ModelConfig, engine: EngineConfig) -> Iterator[Started]:
    with closing(start_replicas(directory, model, engine, log_format="text")) as replicas:
        yield replicas, lambda: ""


def _settings_of(config: Any) -> dict[str, Any]:
    return {
        f"--{item.name.replace('_', '-')}" if item.name != "model" else "MODEL": getattr(
            config, item.name
        )
        for item in fields(config)
    }


def _state_of(directory: Path) -> str:
    """Return names, sizes and times of the files that a score depends on, as text."""
    paths = sorted(path for path in directory.iterdir() if path.suffix in MODEL_FILES)
    found = ((path.name, path.stat()) for path in paths)
    return ", ".join(f"{name} ({stat.st_size} bytes, {stat.st_mtime_ns})" for name, stat in found)


def _summary(outcome: WrittenState, options: BatchOptions, rows: int, seconds: float) -> str:
    """Name the written files, and say how many rows this run has taken in how many seconds."""
    lines = [f"{_counted(outcome.scored, 'row')} in {options.output}"]
    if outcome.failed:
        lines.append(f"{outcome.failed} of them answered with an error")
    where = f" in {options.bad_rows}" if outcome.bad else ""
    lines.append(f"{_counted(outcome.bad, 'bad row')}{where}")
    who = "" if rows == outcome.rows else " by this run"
    lines.append(f"{_counted(rows, 'row')}{who} in {seconds:.1f} s, {rows / seconds:.1f} rows/s")
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

"""The composition of `gpuscore batch`: a job, and the engine that scores it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpuscore import __version__
from gpuscore.bulk.engines import read_engines
from gpuscore.bulk.job import BatchJob, run_job
from gpuscore.bulk.options import read_options
from gpuscore.bulk.progress import Progress
from gpuscore.bulk.writing import BatchOutcome
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import check_single
from gpuscore.config.sources import Settings
from gpuscore.errors import ConfigError
from gpuscore.hub import model_directory, model_name
from gpuscore.loading_bar import LoadingBar
from gpuscore.server.served import LoadedModel
from gpuscore.serving import asking, load_model, read_files

MODEL_FILES = (".json", ".safetensors", ".jinja")


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: as `run_job`.
    """
    check_single(settings)
    options = read_options(values)
    model, limits = settings.make(ModelConfig), settings.make(RequestLimits)
    engine = settings.make(EngineConfig)
    engines = read_engines(values, engine)
    server = settings.make(ServerConfig)
    family, asked = server.family, asking(server)
    directory = model_directory(model.model, model.revision)
    names = tuple(dict.fromkeys((model_name(model.model), model.model)))

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        with engines.started(directory, model, engine) as (replicas, places):
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
    try:
        outcome = run_job(job, loading, Progress())
    except OSError as error:
        if error.filename is None:  # such as a full disk, which `__main__` reports
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    print(_summary(outcome, options.output, options.bad_rows))
    return 0


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


def _summary(outcome: BatchOutcome, output: Path, bad_rows: Path) -> str:
    lines = [f"{_counted(outcome.scored, 'row')} in {output}"]
    if outcome.failed:
        lines.append(f"{outcome.failed} of them answered with an error")
    if outcome.bad:
        lines.append(f"{_counted(outcome.bad, 'bad row')} in {bad_rows}")
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

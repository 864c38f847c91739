"""The composition of `gpuscore batch`: a job, and the engine that scores it."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpuscore import __version__
from gpuscore.commands.bulk.job import BatchJob, Progress, run_job
from gpuscore.commands.bulk.options import BatchOptions, read_options
from gpuscore.commands.bulk.work import WrittenState
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.served import check_single
from gpuscore.config.sources import Settings
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError
from gpuscore.models.hub import MODEL_FILES, model_directory, model_name
from gpuscore.processes.announcement import LoadingBar
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.serving import load_model, read_files

EXIT_OK, EXIT_FAILED = 0, 1


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: as `run_job`.
    """
    check_single(settings)
    options = read_options(values)
    begin, progress = time.monotonic(), Progress()
    try:
        outcome = _run(values, settings, options, progress)
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


def _run(
    values: argparse.Namespace, settings: Settings, options: BatchOptions, progress: Progress
) -> WrittenState:
    """Run a job with engines on this machine."""
    model, limits = settings.make(ModelConfig), settings.make(RequestLimits)
    engine, server = settings.make(EngineConfig), settings.make(ServerConfig)
    family = server.family
    names = tuple(dict.fromkeys((model_name(model.model), model.model)))
    known = {
        "gpuscore": __version__,
        **_settings_of(model),
        **_settings_of(limits),
        "--family": family,
        **options.identity(),
    }
    directory = model_directory(model.model, model.revision)
    known["the model's files"] = _state_of(directory)
    job = BatchJob(options, known, names, engine.prefix_cache)

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        # A run that goes on might measure something else.
        started = start_replicas(directory, model.unmeasured(), engine, log_format="text")
        with closing(started) as replicas:
            files = read_files(directory, family, names[::-1])
            with closing(LoadingBar(replicas.engines)):
                loaded = load_model(files, limits, replicas)
            yield loaded

    return run_job(job, loading, progress)


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
    states = ((path.name, path.stat()) for path in paths)
    return ", ".join(f"{name} ({stat.st_size} bytes, {stat.st_mtime_ns})" for name, stat in states)


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

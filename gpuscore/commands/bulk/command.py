"""The composition of `gpuscore batch`: a job, and the engine that scores it."""

import argparse
import signal
import sys
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
from gpuscore.processes.replicas.replicas import start_replicas
from gpuscore.processes.serving import load_model, read_files

EXIT_OK, EXIT_FAILED, EXIT_SIGNAL = 0, 1, 128  # plus the signal's number
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The end of a run by a signal."""

    def __init__(self, number: int) -> None:
        self.number = number


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: as `run_job`.
    """
    check_single(settings)
    options = read_options(values)
    progress = Progress()
    try:
        with _stoppable():
            outcome = _run(settings, options, progress)
    except Stopped as stopped:
        progress.say(f"stopped at {progress.done} of {progress.rows or 'all'} rows, run again")
        return EXIT_SIGNAL + stopped.number
    except OSError as error:
        if error.filename is None:  # such as a full disk, which `__main__` reports
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    print(_summary(outcome, options, progress))
    if not outcome.too_bad(options.max_bad):
        return EXIT_OK
    bad = f"{outcome.bad + outcome.failed} of {outcome.rows} rows are bad"
    print(f"gpuscore: {bad}; --max-bad is {options.max_bad:g}", file=sys.stderr)
    return EXIT_FAILED


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise Stopped at the first signal that ends the process; one that is ignored stays so."""
    before = {number: signal.getsignal(number) for number in STOPS}

    def stop(number: int, _: Any) -> None:
        signal.signal(number, before[signal.Signals(number)])
        raise Stopped(number)

    for number in STOPS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number in STOPS:
            signal.signal(number, before[number])


def _run(settings: Settings, options: BatchOptions, progress: Progress) -> WrittenState:
    """Run a job with engines on this machine."""
    model, limits = settings.make(ModelConfig), settings.make(RequestLimits)
    engine, family = settings.make(EngineConfig), settings.make(ServerConfig).family
    names = tuple(dict.fromkeys((model_name(model.model), model.model)))
    directory = model_directory(model.model, model.revision)
    known = {
        "gpuscore": __version__,
        **_settings_of(model),
        **_settings_of(limits),
        "--family": family,
        **options.identity(),
        "the model's files": _state_of(directory),
    }

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        # A run that goes on might measure something else.
        started = start_replicas(directory, model.unmeasured(), engine)
        with closing(started) as replicas:
            files = read_files(directory, family, names[::-1])
            yield load_model(files, limits, replicas)

    return run_job(BatchJob(options, known, names), loading, progress)


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


def _summary(outcome: WrittenState, options: BatchOptions, progress: Progress) -> str:
    """Name the written files, and say how fast this run has scored how many rows."""
    lines = [f"{_counted(outcome.scored, 'row')} in {options.output}"]
    if outcome.failed:
        lines.append(f"{outcome.failed} of them answered with an error")
    where = f" in {options.bad_rows}" if outcome.bad else ""
    lines.append(f"{_counted(outcome.bad, 'bad row')}{where}")
    if progress.scored:
        rows, seconds = progress.scored, progress.scoring
        who = "" if rows == outcome.rows else " by this run"
        lines.append(f"model loaded in {progress.loading:.1f} s")
        speed = f"{seconds:.1f} s, {rows / seconds:.1f} rows/s"
        lines.append(f"{_counted(rows, 'row')} scored{who} in {speed}")
    return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

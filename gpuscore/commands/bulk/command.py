"""The composition of `gpuscore batch`: a job, and the engine that scores it."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from gpuscore import __version__
from gpuscore.commands.bulk.job import Progress, run_job
from gpuscore.commands.bulk.options import BatchOptions, read_options
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import options as known_options
from gpuscore.config.served import ServedConfig
from gpuscore.config.sources import Settings
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError
from gpuscore.models.hub import MODEL_FILES, model_directory, model_name
from gpuscore.processes.replicas.replicas import start_models
from gpuscore.processes.serving import load_model, read_files

EXIT_OK, EXIT_FAILED, EXIT_SIGNAL = 0, 1, 128  # plus the signal's number
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The end of a run by a signal, whose number is the argument."""


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: as `run_job`.
    """
    options = read_options(values)
    progress = Progress()
    try:
        with _stoppable():
            _run(settings, options, progress)
    except Stopped as stopped:
        progress.say(f"stopped at {progress.done} of {progress.rows or 'all'} rows, run again")
        return EXIT_SIGNAL + int(stopped.args[0])
    except OSError as error:
        if error.filename is None:  # such as a full disk, which `__main__` reports
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return _report(options, progress)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise Stopped at the first signal that ends the process; one that is ignored stays so."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    before = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, _: Any) -> None:
        restore()
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


def _run(settings: Settings, options: BatchOptions, progress: Progress) -> None:
    """Run a job with engines on this machine."""
    model, limits = settings.make(ModelConfig), settings.make(RequestLimits)
    engine, family = settings.make(EngineConfig), settings.make(ServerConfig).family
    names = tuple(dict.fromkeys((model_name(model.model), model.model)))
    directory = model_directory(model.model, model.revision, model.adapter)
    same = {
        item.flag: settings.chosen[item.name].value
        for item in known_options(ModelConfig, RequestLimits)
    }
    files = sorted(path for path in directory.iterdir() if path.suffix in MODEL_FILES)
    states = ((path.name, path.stat()) for path in files)
    about = ", ".join(f"{name} ({stat.st_size} bytes, {stat.st_mtime_ns})" for name, stat in states)
    same |= {"gpuscore": __version__, "--family": family, "the model's files": about}

    @contextmanager
    def loading() -> Iterator[LoadedModel]:
        # A run that goes on might measure something else.
        served = ServedConfig(names[0], model, directory=directory)
        (started,) = start_models([served], engine)
        with closing(started) as replicas:
            files = read_files(directory, family, names[::-1])
            yield load_model(files, limits, replicas)

    run_job(options, same | options.identity(), names, loading, progress)


def _report(options: BatchOptions, progress: Progress) -> int:
    """Name the written files, and say how fast this run has scored how many rows; return the exit
    code."""
    bad, rows = progress.bad + progress.failed, progress.rows
    print(f"{_counted(rows - progress.bad)} in {options.output}")
    if progress.failed:
        print(f"{progress.failed} of them answered with an error")
    print(f"{_counted(progress.bad, 'bad row')}{f' in {options.bad_rows}' if progress.bad else ''}")
    if progress.scored:
        seconds, who = progress.scoring, "" if progress.scored == rows else " by this run"
        print(f"model loaded in {progress.loading:.1f} s")
        speed = f"{seconds:.1f} s, {progress.scored / seconds:.1f} rows/s"
        print(f"{_counted(progress.scored)} scored{who} in {speed}")
    if not bad or bad < rows and bad <= options.max_bad * rows:
        return EXIT_OK
    what = f"{bad} of {rows} rows are bad; --max-bad is {options.max_bad:g}"
    print(f"gpuscore: {what}", file=sys.stderr)
    return EXIT_FAILED


def _counted(number: int, noun: str = "row") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

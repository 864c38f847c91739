"""`gpuscore batch`: runs a job, or resumes it where an earlier run ended.

    read -> score -> write -> publish

The input is divided into parts of consecutive rows. The results of a part are saved in the job's
folder, so that the next run need not score them again. At the end they become the output.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from datetime import timedelta
from typing import Any

from gpuscore import __version__
from gpuscore.commands.bulk.inputs import find_input
from gpuscore.commands.bulk.options import BatchOptions, read_options
from gpuscore.commands.bulk.scoring import RequestTask, Scoring, TableTask
from gpuscore.commands.bulk.work import JOB, locked, publish, refuse_existing, write_output
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits, ServerConfig
from gpuscore.config.options import options as known_options
from gpuscore.config.served import ServedConfig
from gpuscore.config.sources import Settings
from gpuscore.dialects.served import ServedModel
from gpuscore.errors import ConfigError
from gpuscore.exits import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL, STOPS
from gpuscore.models.hub import MODEL_FILES, model_name
from gpuscore.processes.replicas.replicas import start_models
from gpuscore.processes.serving import load_model, read_files

REPORT_EVERY = 30.0  # seconds of scoring between reports


class Progress:
    """The progress of one run, reported on standard error.

    Attributes:
        rows: rows of the input; 0 until they are counted.
        done: rows that have a result from this run or an earlier one.
        scored: rows that this run has scored or found bad.
        loading, scoring: seconds that this run took to load the model, and to score.
        bad, failed: bad rows, and requests answered with an error; set at the end.
    """

    def __init__(self) -> None:
        self.rows = self.done = self.scored = self.bad = self.failed = 0
        self.loading = self.scoring = 0.0

    def begin(self, rows: int, done: int) -> None:
        """Note the number of rows, and how many of them have a result already."""
        self.rows = rows
        self.done = done
        if done:
            self.say(f"resuming at {done} of {rows} rows")
        self._began = time.monotonic()

    def loaded(self) -> None:
        now = time.monotonic()
        self.loading = now - self._began
        self._began = self._reported = now

    def add(self, rows: int) -> None:
        """Count rows that got a result; report after every REPORT_EVERY seconds."""
        self.done += rows
        self.scored += rows
        now = time.monotonic()
        self.scoring = now - self._began
        if now - self._reported >= REPORT_EVERY:
            self._reported = now
            rate = self.scored / self.scoring
            left = timedelta(seconds=round((self.rows - self.done) / rate))
            self.say(f"{self.done} of {self.rows} rows, {rate:.1f} rows/s, {left} left")

    def say(self, line: str) -> None:
        print(f"gpuscore: {line}", file=sys.stderr, flush=True)

    def report(self, options: BatchOptions) -> int:
        """Print the written files, the numbers of rows and the speed; return the exit code."""
        bad = self.bad + self.failed
        print(f"rows in {options.output}: {self.rows - self.bad}")
        if self.failed:
            print(f"answers with an error: {self.failed}")
        if self.bad:
            print(f"bad rows in {options.bad_rows}: {self.bad}")
        if self.scored:
            print(f"model loaded in {self.loading:.1f} s")
            rate = self.scored / self.scoring
            print(f"rows scored in {self.scoring:.1f} s: {self.scored}, {rate:.1f} rows/s")
        if bad <= options.max_bad * self.rows and not 0 < bad == self.rows:
            return EXIT_OK
        self.say(f"{bad} of {self.rows} rows are bad; --max-bad is {options.max_bad:g}")
        return EXIT_FAILED


class Stopped(BaseException):
    """A signal ended the run; its number is the argument."""


def batch(values: argparse.Namespace, settings: Settings) -> int:
    """Run or continue the job of the command line; return the exit code.

    Raises:
        ConfigError, GpuscoreError, EngineFailed: those of `run_job`.
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
    return progress.report(options)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise Stopped at the first signal of STOPS. Ignored signals stay ignored."""
    with ExitStack() as handlers:

        def stop(number: int, _: Any) -> None:
            handlers.close()  # a second signal then ends the process
            raise Stopped(number)

        for number in STOPS:
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                handlers.callback(signal.signal, number, handler)
                signal.signal(number, stop)
        yield


def _run(settings: Settings, options: BatchOptions, progress: Progress) -> None:
    """Run a job with engines on this machine."""
    model = settings.make(ModelConfig)
    engine = settings.make(EngineConfig)
    limits = settings.make(RequestLimits)
    family = settings.make(ServerConfig).family
    chosen = ServedConfig(model_name(model.model), model, (model.model,)).located()
    same = {
        item.flag: settings.chosen[item.name].value
        for item in known_options(ModelConfig, RequestLimits)
    }
    files = sorted(path for path in chosen.directory.iterdir() if path.suffix in MODEL_FILES)
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    same |= {"gpuscore": __version__, "--family": family, "the model's files": str(states)}

    @contextmanager
    def loading() -> Iterator[ServedModel]:
        (started,) = start_models([chosen], engine)
        with closing(started) as replicas:
            files = read_files(chosen.directory, family, chosen.sources)
            served = ServedModel(chosen.name, chosen.others)
            served.loaded = load_model(files, limits, replicas)
            yield served

    run_job(options, same | options.identity(), loading, progress)


def run_job(
    options: BatchOptions,
    settings: dict[str, Any],
    loading: Callable[[], AbstractContextManager[ServedModel]],
    progress: Progress,
) -> None:
    """Run a job to its end.

    Args:
        settings: the values that must be equal in all runs of the job.
        loading: starts the model; not called if all rows are scored already.

    Raises:
        ConfigError: the input or an option cannot be used, or differs from those of the job's
            first run; or another process runs the job.
        GpuscoreError: the labels are not valid for the model.
        EngineFailed: the engine cannot be kept running. The job's folder is kept.
    """
    source = find_input(options)
    with locked(options.target) as folder:
        known = settings | source.digest()
        first = folder.settings()
        if first is None:
            for path in (options.target, options.bad_rows):
                refuse_existing(path)
        folder.refuse_changed(first or known, known)
        counts = [len(block.rows) for block in source.blocks()]
        if first is None:
            folder.save(JOB, known)
        left = sum(folder.results(*part).count(None) for part in enumerate(counts))
        progress.begin(sum(counts), sum(counts) - left)
        if left or not counts:  # without rows the labels are still checked
            with loading() as served:
                progress.loaded()
                task = RequestTask if options.requests else TableTask
                Scoring(task(options, served), folder, progress.add).run(source)
        folder.refuse_changed(known, settings | source.digest())
        progress.bad, progress.failed = write_output(source, options, folder)
        publish(options, folder, progress.bad > 0)

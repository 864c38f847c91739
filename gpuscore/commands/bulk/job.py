"""A batch job from start to end, or from where an earlier run of it was ended.

    read -> score -> write -> publish

The input's rows are divided into parts, in their order. While a part is scored its results are kept
in the work folder, from where the next run takes them; in the end they become the output.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gpuscore.commands.bulk.feeding import Feeder, grouped
from gpuscore.commands.bulk.inputs import InputFiles, find_inputs, refuse_changed, state_of
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.tasks import RequestTask, TableTask, Task, TextRow
from gpuscore.commands.bulk.work import (
    Answer,
    JobState,
    Result,
    WorkFolder,
    WrittenState,
    locked,
)
from gpuscore.commands.bulk.writing import plan_output, publish, refuse_existing, write_output
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError, InvalidRequest

KEPT_EVERY, TOLD_EVERY = 10.0, 30.0  # seconds of scoring


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job.

    Attributes:
        settings: by name, all settings that a continuing run must have in common with the first
            run.
        names: the names by which requests may call the model.
    """

    options: BatchOptions
    settings: dict[str, Any]
    names: tuple[str, ...]


class Progress:
    """The progress of one run, told in lines on standard error.

    Attributes:
        rows: of the input; 0 until they are counted.
        done: rows that have a result, of this run or an earlier one.
        scored: rows that this run has scored or found bad.
        loading, scoring: seconds that this run took to load the model, and to score.
    """

    def __init__(self) -> None:
        self.rows = self.done = self.scored = 0
        self.loading = self.scoring = 0.0
        self._began = self._told = time.monotonic()

    def begin(self, rows: int, done: int) -> None:
        """Note what there is to do, and begin to load the model."""
        self.rows, self.done = rows, done
        if done:
            self.say(f"resuming at {done} of {rows} rows")
        self._began = time.monotonic()

    def loaded(self) -> None:
        now = time.monotonic()
        self.loading, self._began, self._told = now - self._began, now, now

    def add(self, rows: int) -> None:
        """Count rows that have a result now; tell of them once in a while."""
        self.done, self.scored = self.done + rows, self.scored + rows
        now = time.monotonic()
        self.scoring = now - self._began
        if now - self._told >= TOLD_EVERY:
            self._told = now
            rate = self.scored / self.scoring
            left = timedelta(seconds=round((self.rows - self.done) / rate))
            self.say(f"{self.done} of {self.rows} rows, {rate:.1f} rows/s, {left} left")

    def say(self, line: str) -> None:
        print(f"gpuscore: {line}", file=sys.stderr, flush=True)


Loading = Callable[[], AbstractContextManager[LoadedModel]]


def run_job(job: BatchJob, loading: Loading, progress: Progress) -> WrittenState:
    """Run a job to its end.

    Args:
        loading: starts the model; not called if all rows are scored already.

    Raises:
        ConfigError: the input or an option cannot be used, or differs from the input or option of
            the run that this run would continue; or another run is at work.
        InvalidRequest: the labels are not valid for the model; or a row is bad, and the job is
            strict.
        EngineFailed: the engine cannot be kept running. The work folder is kept.
    """
    options = job.options
    inputs = find_inputs(options)
    with locked(options.output) as work:
        written, state = work.read(WrittenState), work.read(JobState)
        if state is not None:
            _refuse_other(job, inputs, work, state)
        if written is None:
            for path in (options.output, options.bad_rows):
                refuse_existing(path)
            if state is None:
                work.clear()
                known = {path.name: state_of(path) for path in inputs.paths}
                state = JobState(job.settings, known, *plan_output(inputs, options))
                work.write(state)
            done = sum(
                result is not None
                for number, count in enumerate(state.parts)
                for result in work.results(number, count)
            )
            progress.begin(sum(state.parts), done)
            if done < progress.rows or not done or options.strict:
                with loading() as model:
                    progress.loaded()
                    _Scoring(job, inputs, work, model, progress).run()
            refuse_changed(inputs, state.inputs, read_all=True)  # it is read once more now
            written = write_output(inputs, options, state, work)
        publish(options, work, written)
        return written


def _refuse_other(job: BatchJob, inputs: InputFiles, work: WorkFolder, known: JobState) -> None:
    """Raise ConfigError if a setting or the input is not what it was when the job began."""
    remedy = f"remove {work.path} to begin anew"
    for name in {**known.settings, **job.settings}:
        was, now = known.settings.get(name), job.settings.get(name)
        if was != now:
            was, now = ("not set" if value is None else value for value in (was, now))
            raise ConfigError(f"{name} was {was} when this job began and is {now}; {remedy}")
    try:
        refuse_changed(inputs, known.inputs)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from None


@dataclass(slots=True)
class _Part:
    """A block of rows that is being scored."""

    block: Any
    results: list[Result]
    missing: int
    changed: bool = False  # since its results were kept


class _Scoring:
    """The scoring of all rows that have no result yet."""

    def __init__(
        self,
        job: BatchJob,
        inputs: InputFiles,
        work: WorkFolder,
        model: LoadedModel,
        progress: Progress,
    ) -> None:
        self._inputs, self._work, self._progress = inputs, work, progress
        self._model, self._strict = model, job.options.strict
        self._task: Task
        if job.options.requests:
            self._task = RequestTask(model, job.names)
        else:
            self._task = TableTask(job.options, model)
        self._parts: dict[int, _Part] = {}
        self._kept = time.monotonic()

    def run(self) -> None:
        """Score; whatever ends it, results that are there are kept."""
        try:
            Feeder(self._model, self._task, self._settle).run(self._groups())
        finally:
            self._keep()

    def _groups(self) -> Iterator[list[TextRow]]:
        """Yield the rows that go into one request each."""
        for number, block in enumerate(self._inputs.blocks()):
            results = self._work.results(number, block.count)
            missing = results.count(None)
            if not missing and not self._strict:
                continue
            for place, result in enumerate(results):
                self._refuse(block, place, result)
            if missing:
                self._parts[number] = _Part(block, results, missing)
                yield from grouped(self._rows(number, block, results), self._model)

    def _rows(self, number: int, block: Any, results: Sequence[Result]) -> list[TextRow]:
        """Return the rows of a part to score; settle those that are bad."""
        rows, bad = [], []
        for place, texts in enumerate(self._task.texts(block)):
            if results[place] is None and isinstance(texts, str):
                bad.append((TextRow("", "", number, place), texts))
            elif results[place] is None:
                first, rest = ("", *texts)[-2:]
                rows.append(TextRow(first, rest, number, place))
        if bad:
            self._settle(*zip(*bad, strict=True))
        return rows

    def _settle(self, rows: Sequence[TextRow], results: Sequence[Result]) -> None:
        number = rows[0].part
        part = self._parts[number]
        for row, result in zip(rows, results, strict=True):
            # Before it is kept, so that another run tries it again.
            self._refuse(part.block, row.place, result)
            part.results[row.place] = result
        part.missing, part.changed = part.missing - len(rows), True
        self._progress.add(len(rows))
        if not part.missing:
            self._work.keep(number, self._parts.pop(number).results)
        if time.monotonic() - self._kept >= KEPT_EVERY:
            self._keep()

    def _refuse(self, block: Any, place: int, result: Result) -> None:
        """Raise InvalidRequest for a bad row of a strict job."""
        bad = isinstance(result, str) or (isinstance(result, Answer) and result.failed)
        if self._strict and bad:
            about = block.about(place)
            what = result.line.decode() if isinstance(result, Answer) else result
            raise InvalidRequest(f"{about['file']}, row {about['row']}: {what}")

    def _keep(self) -> None:
        for number, part in self._parts.items():
            if part.changed:
                self._work.keep(number, part.results)
                part.changed = False
        self._kept = time.monotonic()

"""A batch job from start to end, or from where an earlier run of it was ended.

    read -> score -> write -> publish

The input's rows are divided into parts, in their order. While a part is scored its results are kept
in the work folder, from where the next run takes them; in the end they become the output.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

from gpuscore.commands.bulk.feeding import Feeder, grouped
from gpuscore.commands.bulk.inputs import InputFiles, find_inputs
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.tasks import RequestTask, TableTask, Task, TextRow
from gpuscore.commands.bulk.work import (
    JOB,
    Result,
    WorkFolder,
    locked,
    publish,
    refuse_existing,
    write_output,
)
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError

KEPT_EVERY, TOLD_EVERY = 10.0, 30.0  # seconds of scoring


class Progress:
    """The progress of one run, told in lines on standard error.

    Attributes:
        rows: of the input; 0 until they are counted.
        done: rows that have a result, of this run or an earlier one.
        scored: rows that this run has scored or found bad.
        loading, scoring: seconds that this run took to load the model, and to score.
        bad, failed: rows that are bad, and requests answered with an error; known in the end.
    """

    def __init__(self) -> None:
        self.rows = self.done = self.scored = self.bad = self.failed = 0
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


Loading: TypeAlias = Callable[[], AbstractContextManager[LoadedModel]]


def run_job(
    options: BatchOptions,
    settings: dict[str, Any],
    names: tuple[str, ...],
    loading: Loading,
    progress: Progress,
) -> None:
    """Run a job to its end.

    Args:
        settings: by name, what a run that goes on must have in common with the first run.
        names: the names by which requests may call the model.
        loading: starts the model; not called if all rows are scored already.

    Raises:
        ConfigError: the input or an option cannot be used, or differs from the input or option of
            the run that this run would continue; or another run is at work.
        GpuscoreError: the labels are not valid for the model.
        EngineFailed: the engine cannot be kept running. The work folder is kept.
    """
    inputs = find_inputs(options)
    with locked(options.target) as work:
        known, first = settings | inputs.digests(), work.settings()
        if first is None:
            for path in (options.target, options.bad_rows):
                refuse_existing(path)
        _refuse_changed(work, first or known, known)
        counts = [len(block.rows) for block in inputs.blocks()]
        if first is None:
            work.save(JOB, known)
        left = sum(work.results(*part).count(None) for part in enumerate(counts))
        progress.begin(sum(counts), sum(counts) - left)
        if left or not counts:  # labels are checked without rows, too
            with loading() as model:
                progress.loaded()
                task = RequestTask if options.requests else TableTask
                _Scoring(task(options, model, names), inputs, work, progress).run()
        _refuse_changed(work, known, settings | inputs.digests())
        progress.bad, progress.failed = write_output(inputs, options, work)
        publish(options, work, progress.bad > 0)


def _refuse_changed(work: WorkFolder, first: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise ConfigError if a setting or the input is not what it was when the job began."""
    for name in {**first, **known}:
        was, now = first.get(name), known.get(name)
        if was != now:
            was, now = ("not set" if value is None else value for value in (was, now))
            changed = f"{name} was {was} when this job began and is {now}"
            raise ConfigError(f"{changed}; remove {work.path} to begin anew")


@dataclass(slots=True)
class _Scoring:
    """The scoring of all rows that have no result yet."""

    task: Task
    inputs: InputFiles
    work: WorkFolder
    progress: Progress
    parts: dict[int, list[Result]] = field(default_factory=dict)  # that are being scored
    missing: Counter[int] = field(default_factory=Counter)  # their rows without results
    kept: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Score; whatever ends it, results that are there are kept."""
        try:
            Feeder(self.task, self._settle).run(self._groups())
        finally:
            self._keep()

    def _groups(self) -> Iterator[Sequence[TextRow]]:
        """Yield the rows that go into one request each; settle those that are bad."""
        for number, block in enumerate(self.inputs.blocks()):
            results = self.work.results(number, len(block.rows))
            left = [place for place, result in enumerate(results) if result is None]
            if not left:
                continue
            self.parts[number], self.missing[number] = results, len(left)
            texts, rows = self.task.texts(block), []
            for place in left:
                if isinstance(text := texts[place], str):
                    self._settle([TextRow("", "", number, place)], [text])
                else:
                    rows.append(TextRow(*text, number, place))
            yield from grouped(rows, self.task)

    def _settle(self, rows: Sequence[TextRow], results: Sequence[Result]) -> None:
        number = rows[0].part
        for row, result in zip(rows, results, strict=True):
            self.parts[number][row.place] = result
        self.missing[number] -= len(rows)
        self.progress.add(len(rows))
        if not self.missing[number]:
            self.work.save(f"{number}.part", self.parts.pop(number))
        if time.monotonic() - self.kept >= KEPT_EVERY:
            self._keep()

    def _keep(self) -> None:
        for number, results in self.parts.items():
            self.work.save(f"{number}.part", results)
        self.kept = time.monotonic()

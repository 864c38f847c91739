"""A batch job from start to end, or from where an earlier run of it was ended.

    read -> sort -> score -> write -> publish

Every file that a step leaves in the work folder is whole or counts as missing, so a run that is
killed at any moment is continued by the next run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpuscore.commands.bulk.feeding import CountedRows, Feeder
from gpuscore.commands.bulk.inputs import (
    InputFiles,
    check_inputs,
    find_inputs,
    identify,
    refuse_changed,
)
from gpuscore.commands.bulk.options import BatchOptions
from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, Settled, TextRow
from gpuscore.commands.bulk.steps import (
    check_written,
    make_plan,
    publish,
    refuse_existing,
    write_output,
)
from gpuscore.commands.bulk.store import (
    BAD,
    FAILED,
    GROUP_ROWS,
    MEMORY,
    ResultStore,
    grouped,
    merged,
)
from gpuscore.commands.bulk.tasks import make_task
from gpuscore.commands.bulk.work import (
    RESULTS,
    SORTED,
    JobState,
    PlanState,
    ScoredState,
    WorkFolder,
    WrittenState,
    locked,
)
from gpuscore.dialects.served import LoadedModel
from gpuscore.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job.

    Attributes:
        settings: by name, all settings that a continuing run must have in common with the first
            run.
        names: the names by which requests may call the model.
        prefix_cache: True if the engine keeps the prefixes that prompts share.
        memory: bytes of rows that are sorted in memory.
    """

    options: BatchOptions
    settings: dict[str, Any]
    names: tuple[str, ...]
    prefix_cache: bool = True
    memory: int = MEMORY


class Progress:
    """The progress bars of one run, on standard error if that is a terminal.

    Attributes:
        prompt_tokens: of all prompts scored by this run, each counted as a whole.
        computed_tokens: the prompt tokens that were computed; the others were shared or cached.
        rows: rows that this run has scored or found bad.
    """

    def __init__(self, shown: bool = True) -> None:
        self.rows = 0
        self.prompt_tokens = self.computed_tokens = 0
        self._disable = None if shown else True  # None: unless it is no terminal

    @property
    def cache_share(self) -> float:
        """Share of the prompts' tokens that were not computed again."""
        if not self.prompt_tokens:
            return 0.0
        return max(0.0, 1 - self.computed_tokens / self.prompt_tokens)

    @contextmanager
    def counting(self, name: str, rows: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show how many rows are done, of `rows` if given; yield a function that adds some."""
        with self._bar(name, rows) as bar:
            yield lambda rows: bar.update(rows) and None

    @contextmanager
    def scoring(self, rows: int, done: int) -> Iterator[Callable[[CountedRows], None]]:
        """Show rows, rate, time left and the share of tokens that were not computed again."""
        with self._bar("scoring", rows, done) as bar:

            def report(counted: CountedRows) -> None:
                self.prompt_tokens += counted.prompt_tokens
                self.computed_tokens += counted.computed_tokens
                bar.set_postfix_str(f"cached {self.cache_share:.0%}", refresh=False)
                bar.update(counted.rows)

            yield report

    def _bar(self, name: str, rows: int | None, done: int = 0) -> "tqdm[None]":
        return tqdm(total=rows, initial=done, desc=name, unit="row", disable=self._disable)


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
    check_inputs(inputs, options)
    with locked(options.output) as work:
        known = work.read(JobState)
        if work.read(WrittenState) is None:
            for path in (options.output, options.bad_rows):
                refuse_existing(path)
            _begin(job, inputs, work, known)
            if work.read(ScoredState) is None:
                with loading() as model:
                    _score(job, inputs, work, model, progress)
            _write(job, inputs, work, progress)
        else:
            if known is not None:  # it is removed before the note that all is written
                _refuse_other(job, inputs, work, known)
            check_written(options, work)
        return publish(options, work)


def _begin(job: BatchJob, inputs: InputFiles, work: WorkFolder, known: JobState | None) -> None:
    """Continue an earlier run whose plan was made, or else begin anew."""
    if known is not None and work.read(PlanState) is not None:
        _refuse_other(job, inputs, work, known)
        return
    work.clear()
    work.write(JobState(job.settings, identify(inputs)))


def _refuse_other(job: BatchJob, inputs: InputFiles, work: WorkFolder, known: JobState) -> None:
    remedy = f"remove {work.path} to begin anew"
    _refuse_other_settings(known.settings, job.settings, remedy)
    try:
        refuse_changed(inputs, known.inputs)
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from None


def _refuse_other_settings(known: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    """Raise ConfigError if a setting is not what it was when the job began."""
    for name in {**known, **now}:
        if known.get(name) != now.get(name):
            values = [
                "not set" if value is None else value for value in (known.get(name), now.get(name))
            ]
            raise ConfigError(
                f"{name} was {values[0]} when this job began and is {values[1]}; {remedy}"
            )


def _score(
    job: BatchJob,
    inputs: InputFiles,
    work: WorkFolder,
    model: LoadedModel,
    progress: Progress,
) -> None:
    task = make_task(job.options, model, job.names)
    with closing(ResultStore(work.path, task.width)) as store:
        resumed = work.read(PlanState) is not None
        if not resumed:
            with progress.counting("reading") as advance:
                make_plan(inputs, job.options, work, store, advance, job.memory)
        plan = work.need(PlanState)
        rows = merged(_sorted_files(work, plan))
        if resumed:
            rows = (row for row in rows if not store.kind(row.number))
            if job.options.strict:
                _refuse_bad(store, plan.rows)
        done = sum(kind > 0 for kind in store.kinds(plan.rows))
        progress.rows = plan.rows - (done if resumed else 0)
        with progress.scoring(plan.rows, done) as report:

            def settle(counted: CountedRows) -> None:
                if job.options.strict:  # before it is noted, so that another run tries it again
                    _refuse_settled(counted.settled)
                store.put(counted.settled)
                report(counted)

            Feeder(model, task, settle).run(_requests_of(rows, model, job.prefix_cache))
        store.sync()
    work.write(ScoredState(task.width))


def _requests_of(
    rows: Iterable[TextRow], model: LoadedModel, prefix_cache: bool
) -> Iterator[Sequence[TextRow]]:
    """Yield the sorted rows that go into one request each."""
    most = min(GROUP_ROWS, model.prompts.builder.limits.max_items)
    # With a fixed cut, a row's bits depend on the text that its request shares, which must not
    # depend on the rows that are left.
    free_cut = not model.prompts.builder.backend.deterministic_chunk
    return grouped(rows, most, free_cut, prefix_cache)


def _sorted_files(work: WorkFolder, plan: PlanState) -> list[Path]:
    paths = [work.path / SORTED / name for name in plan.sorted]
    for path in paths:
        if not path.exists():
            raise work.damaged(f"{SORTED}/{path.name} is missing")
    return paths


def _refuse_bad(store: ResultStore, rows: int) -> None:
    """Raise InvalidRequest for a bad row of an earlier run, which was not strict."""
    for number, kind in enumerate(store.kinds(rows)):
        if kind in (BAD, FAILED):
            raise InvalidRequest(f"row {number + 1} of all: {store.text(number).decode()}")


def _refuse_settled(settled: Settled) -> None:
    """Raise InvalidRequest for a bad row, or a request that failed."""
    match settled:
        case BadTextRow(number, reason):
            raise InvalidRequest(f"row {number + 1} of all: {reason}")
        case AnswerLine(number, line, True):
            raise InvalidRequest(f"row {number + 1} of all: {line.decode()}")


def _write(job: BatchJob, inputs: InputFiles, work: WorkFolder, progress: Progress) -> None:
    known, plan = work.need(JobState), work.need(PlanState)
    refuse_changed(inputs, known.inputs, read_all=True)  # it is read a second time now
    width = work.need(ScoredState).width
    with (
        closing(ResultStore(work.path, width)) as store,
        progress.counting("writing", plan.rows) as advance,
    ):
        if not store.holds(plan.rows):
            raise work.damaged(f"{RESULTS} is not of {plan.rows} rows with {width} scores each")
        write_output(inputs, job.options, plan, store, work, advance)

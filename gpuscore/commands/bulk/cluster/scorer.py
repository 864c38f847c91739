"""The actors of a job's pool: each has an engine of its own, tokenises and scores whole groups of
rows with it, and writes them."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import ray
from pyarrow import parquet

from gpuscore import __version__
from gpuscore.commands.bulk.cluster.groups import GroupRows, Plan, groups_of
from gpuscore.commands.bulk.cluster.storage import Output
from gpuscore.commands.bulk.feeding import CountedRows, Feeder
from gpuscore.commands.bulk.job import BatchJob, requests_of
from gpuscore.commands.bulk.options import JSON_LINES
from gpuscore.commands.bulk.parquet import SCORES_TYPE, schema_of_bytes
from gpuscore.commands.bulk.rows import AnswerLine, BadTextRow, Problem, RowScoring
from gpuscore.commands.bulk.steps import text_row, texts_of
from gpuscore.commands.bulk.tasks import make_task
from gpuscore.config import EngineConfig, ModelConfig, RequestLimits
from gpuscore.errors import ConfigError, EngineFailed, GpuscoreError, InvalidRequest
from gpuscore.models.hub import model_digests, model_directory
from gpuscore.processes.replicas.start import start_replicas
from gpuscore.processes.serving import load_model, read_files

NOTES = ".work/groups"
# Of a group that is done: rows scored, and of them failed; number and line of each bad row.
Note: TypeAlias = tuple[int, int, list[tuple[int, msgspec.Raw]]]


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job and its place. `actors` is the most engines, None for as many as there is room for;
    `cpus` are what Ray counts for an engine; `digests` are the driver's, of model and gpuscore."""

    address: str
    actors: int | None
    input: str
    output: str
    job: BatchJob
    model: ModelConfig
    limits: RequestLimits
    engine: EngineConfig
    family: str
    cpus: int = 1
    digests: dict[str, str] = field(default_factory=dict)


class GroupScorer:
    """A callable class for `map_batches`. Errors of its start are raised by its first call: Ray
    would make an actor that cannot start again and again."""

    def __init__(self, work: ClusterJob, plan: Plan) -> None:
        self._work, self._plan, self._options = work, plan, work.job.options
        self._output = Output(work.output)
        self._failure: Exception | None = None
        try:
            self._start()
        except (ConfigError, GpuscoreError, EngineFailed) as error:
            self._failure = type(error)(f"node {ray.util.get_node_ip_address()}: {error}")

    def _start(self) -> None:
        work, model = self._work, self._work.model
        here = model_digests(model.model, model.revision) | {"gpuscore": __version__}
        if differ := sorted(dict(work.digests.items() ^ here.items())):
            raise ConfigError(
                f"{differ[0]} of {model.model} is another one than on the driver's machine, or is "
                "missing; install the same gpuscore and the same model on every node"
            )
        if model.device == "cpu" and model.threads is None and work.cpus < (os.cpu_count() or 1):
            model = replace(model, threads=work.cpus)
        directory = model_directory(model.model, model.revision)
        files = read_files(directory, work.family, work.job.names[::-1])
        replicas = start_replicas(directory, model, work.engine, log_format="text")
        self._model = load_model(files, work.limits, replicas)
        task = make_task(self._options, self._model, work.job.names)
        self._feeder = Feeder(self._model, task, self._take)

    def __call__(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """Yield the number of rows of each group, once it is written."""
        if self._failure is not None:
            raise self._failure
        for name, rows in groups_of(table, self._plan):
            self._score(rows)
            yield {"rows": [self._write(name, rows)]}

    def _score(self, rows: GroupRows) -> None:
        self._scores: dict[int, list[float]] = {}  # by number, as what follows
        self._answers: dict[int, bytes] = {}
        self._reasons: dict[int, str] = {}
        self._failed, texts = 0, []
        for number, text in zip(rows.numbers, texts_of(rows.block, self._options), strict=True):
            if isinstance(text, Problem):
                self._reasons[number] = text.reason
            else:
                texts.append(text_row(text, number))
        requests = requests_of(sorted(texts), self._model, self._work.job.prefix_cache)
        self._feeder.run(requests)

    def _take(self, counted: CountedRows) -> None:
        match counted.settled:
            case RowScoring(numbers, scores):
                self._scores.update(zip(numbers, scores.tolist(), strict=True))
            case BadTextRow(number, reason):
                self._reasons[number] = reason
            case AnswerLine(number, line, failed):
                self._answers[number] = line
                self._failed += failed
                if failed and self._options.strict:
                    self._reasons[number] = line.decode()

    def _write(self, name: str, rows: GroupRows) -> int:
        """Write the group's rows, then its note; return how many rows have an outcome."""
        bad = []
        for index, number in enumerate(rows.numbers):
            if number in self._reasons:
                line = {"reason": self._reasons[number], **rows.about(index)}
                if self._options.strict:
                    raise InvalidRequest(f"{line['file']}, row {line['row']}: {line['reason']}")
                bad.append((number, msgspec.Raw(msgspec.json.encode(line))))
        done = len(self._scores) + len(self._answers)
        note: Note = (done, self._failed, bad)
        self._output.write(f"/{name}{self._options.output.suffix}", self._content(rows))
        self._output.write(f"{NOTES}/{name}", msgspec.json.encode(note))
        return done + len(bad)

    def _content(self, rows: GroupRows) -> bytes:
        name, index = self._options.scores_column, self._options.index_column or ""
        if self._options.requests:
            return _lines(sorted(self._answers.items()), index)
        keep = [index for index, number in enumerate(rows.numbers) if number in self._scores]
        numbers = [rows.numbers[index] for index in keep]
        scores = [self._scores[number] for number in numbers]
        if self._options.output_format == JSON_LINES:
            lines = rows.block.lines(keep, np.array(scores), name)
            return _lines(zip(numbers, lines, strict=True), index)
        table, sink = rows.block.table(keep, schema_of_bytes(self._plan.schema)), BytesIO()
        table = table.append_column(index, pa.array(numbers, pa.int64()))
        parquet.write_table(table.append_column(name, pa.array(scores, SCORES_TYPE)), sink)
        return sink.getvalue()


def _lines(rows: Iterable[tuple[int, bytes]], index: str) -> bytes:
    """Return lines of JSON, each with its row's number."""
    name = index.encode()
    return b"".join(b'%b,"%b":%d}\n' % (line[:-1], name, number) for number, line in rows)


def total(output: Output) -> tuple[int, int, int]:
    """Write the bad rows of all groups; return how many rows are scored, failed and bad."""
    names = output.names(NOTES)
    notes = [msgspec.json.decode(output.read(f"{NOTES}/{name}"), type=Note) for name in names]
    bad = sorted((number, bytes(line)) for *_, lines in notes for number, line in lines)
    if bad:
        output.write(".bad.jsonl", b"".join(line + b"\n" for _, line in bad))
    return sum(scored for scored, *_ in notes), sum(failed for _, failed, _ in notes), len(bad)

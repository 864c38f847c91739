"""The tables of an evaluation: on standard output, as HTML, as JSON and as CSV by query."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.measure.evaluation.data import Labelled, Ranked
from gpuscore.measure.evaluation.measures import (
    RESAMPLES,
    ComparedRuns,
    Measured,
    holds_margin,
    verdict,
)
from gpuscore.measure.plots import intervals, sorted_changes
from gpuscore.measure.reports import aligned, text_table, write, write_html

MOST_ROWS = 50  # queries in the page; the CSV has all
ABOUT = (
    "Intervals are percentiles of {resamples} bootstrap samples of the queries; p comes from "
    "a two-sided permutation test of the paired differences, not corrected for the number of "
    "comparisons. Equal scores are ordered by a digest of the documents' ids. Documents without a "
    "score rank last."
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that is reported.

    Attributes:
        data: the data.
        runs: the evaluated one first.
        comparisons: the evaluated run against each other one.
        facts: for the head of the page.
        price: of an hour, or None.
        margin: by which the first measure may fall, or None.
    """

    data: Ranked | Labelled
    runs: Sequence[Measured]
    comparisons: Sequence[ComparedRuns]
    facts: Mapping[str, str]
    price: float | None
    margin: float | None

    @property
    def first(self) -> str:
        """The measure of the verdicts."""
        return next(iter(self.runs[0].values))

    @property
    def verdicts(self) -> list[str]:
        return [verdict(pair, self.first, self.margin) for pair in self.comparisons]

    @property
    def holds(self) -> bool:
        """False if there is a margin, and a larger loss against another run is not ruled out."""
        first, margin = self.first, self.margin
        if margin is None:
            return True
        return all(holds_margin(pair.differences[first], margin) for pair in self.comparisons)


def as_text(evaluation: Evaluation) -> str:
    parts = [aligned(*_means(evaluation)), aligned(*_speed(evaluation)), *evaluation.verdicts]
    return "\n\n".join(parts)


def write_json(path: Path, evaluation: Evaluation) -> None:
    """Write one object with means, differences and speed; NaN is null."""
    runs = {
        run.name: {
            "measures": {name: asdict(value) for name, value in run.means.items()},
            "not_scored": run.not_scored,
            "seconds": None if run.scored is None else run.scored.seconds,
            "prompt_tokens": None if run.scored is None else run.scored.tokens,
        }
        for run in evaluation.runs
    }
    against = {
        pair.theirs.name: {name: asdict(value) for name, value in pair.differences.items()}
        for pair in evaluation.comparisons
    }
    made = {"facts": dict(evaluation.facts), "runs": runs, "against": against}
    text = json.dumps(_plain(made | {"verdicts": evaluation.verdicts}), indent=2)
    write(path, text + "\n", "--output")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def write_page(path: Path, evaluation: Evaluation) -> None:
    """Write a self-contained page; raise ConfigError if it cannot be written."""
    first = evaluation.first
    plots = [intervals(first, [(run.name, run.means[first]) for run in evaluation.runs])]
    plots += [
        sorted_changes(
            f"{first}: {pair.ours.name} less {pair.theirs.name}",
            pair.ours.values[first] - pair.theirs.values[first],
        )
        for pair in evaluation.comparisons
    ]
    changed = ["<h2>Differences</h2>", text_table(*_differences(evaluation))]
    head, rows = _per_query(evaluation)
    shown = _largest(evaluation, rows)
    write_html(
        path,
        f"Evaluation of {evaluation.runs[0].name} on {evaluation.data.name}",
        [
            text_table((), list(evaluation.facts.items()), "words"),
            *(f"<p><strong>{escape(text)}</strong></p>" for text in evaluation.verdicts),
            "<h2>Measures</h2>",
            text_table(*_means(evaluation)),
            *(changed if evaluation.comparisons else []),
            *plots,
            "<h2>Speed</h2>",
            text_table(*_speed(evaluation)),
            f"<p>{escape(ABOUT.format(resamples=f'{RESAMPLES:,}'))}</p>",
            f"<h2>Queries</h2><p>{len(shown)} of {len(rows)}, the largest changes first; "
            "queries.csv has all.</p>",
            text_table(head, shown),
        ],
        "--output",
    )


def write_queries(path: Path, evaluation: Evaluation) -> None:
    """Write a CSV with a line per query; raise ConfigError if it cannot be written."""
    head, rows = _per_query(evaluation)
    made = io.StringIO(newline="")
    csv.writer(made).writerows([head, *rows])
    write(path, made.getvalue(), "--output")


Lines = tuple[Sequence[str], list[Sequence[str]]]


def _means(evaluation: Evaluation) -> Lines:
    names = list(evaluation.runs[0].means)
    rows = [[run.name, *(f"{run.means[name]:.4f}" for name in names)] for run in evaluation.runs]
    return ["run", *names], list(rows)


def _differences(evaluation: Evaluation) -> Lines:
    head = ["against", "measure", "difference", "95 %", "p", "better", "worse"]
    rows = [
        [
            pair.theirs.name,
            name,
            f"{change.mean.value:+.4f}",
            f"{change.mean.low:+.4f} to {change.mean.high:+.4f}",
            f"{change.p:.4f}",
            str(change.better),
            str(change.worse),
        ]
        for pair in evaluation.comparisons
        for name, change in pair.differences.items()
    ]
    return head, list(rows)


def _speed(evaluation: Evaluation) -> Lines:
    """Return queries and documents per second; for classification a query is a text."""
    ranks = isinstance(evaluation.data, Ranked)
    units = ["queries/s", "documents/s"] if ranks else ["texts/s"]
    head = ["run", "seconds", *units, "tokens/s", "not scored"]
    head += (
        [f"price of 1,000 {'queries' if ranks else 'texts'}"]
        if evaluation.price is not None
        else []
    )
    rows = []
    for run in evaluation.runs:
        if run.scored is None:
            continue
        seconds = max(run.scored.seconds, 1e-9)
        count = len(evaluation.data.queries) if isinstance(evaluation.data, Ranked) else run.pairs
        rates = [count / seconds, *([run.pairs / seconds] if ranks else [])]
        cells = [run.name, f"{seconds:.1f}", *(f"{rate:,.1f}" for rate in rates)]
        cells += [f"{run.scored.tokens / seconds:,.0f}", str(run.not_scored)]
        if evaluation.price is not None:
            cells.append(f"{1000 * seconds / count * evaluation.price / 3600:.4f}")
        rows.append(cells)
    return head, list(rows)


def _per_query(evaluation: Evaluation) -> Lines:
    names = list(evaluation.runs[0].values)
    head = ["id", "text", *(f"{name}, {run.name}" for name in names for run in evaluation.runs)]
    texts = _texts(evaluation.data)
    values = [run.values[name] for name in names for run in evaluation.runs]
    rows = [
        [id, text, *("" if np.isnan(v[i]) else f"{v[i]:.4f}" for v in values)]
        for i, (id, text) in enumerate(texts)
    ]
    return head, list(rows)


def _texts(data: Ranked | Labelled) -> list[tuple[str, str]]:
    if isinstance(data, Ranked):
        return [(query.id, query.text) for query in data.queries]
    every = [text for unit in data.units for text in unit.texts]
    return [(str(number), text) for number, text in enumerate(every, start=1)]


def _largest(evaluation: Evaluation, rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the queries that changed most; without a comparison, those with the least value."""
    ours = evaluation.runs[0].values[evaluation.first]
    key = ours
    if evaluation.comparisons:
        key = -np.abs(ours - evaluation.comparisons[0].theirs.values[evaluation.first])
    order = np.argsort(key, kind="stable")[:MOST_ROWS]
    return [[*rows[i][:1], rows[i][1][:200], *rows[i][2:]] for i in order.tolist()]

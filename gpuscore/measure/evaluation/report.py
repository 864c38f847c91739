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
        return [verdict(one, self.first, self.margin) for one in self.comparisons]

    @property
    def holds(self) -> bool:
        """False if there is a margin, and a larger loss against another run is not ruled out."""
        first, margin = self.first, self.margin
        if margin is None:
            return True
        return all(holds_margin(one.differences[first], margin) for one in self.comparisons)


def as_text(found: Evaluation) -> str:
    parts = [aligned(*_means(found)), aligned(*_speed(found)), *found.verdicts]
    return "\n\n".join(parts)


def write_json(path: Path, found: Evaluation) -> None:
    """Write one object with means, differences and speed; NaN is null."""
    runs = {
        one.name: {
            "measures": {name: asdict(value) for name, value in one.means.items()},
            "not_scored": one.not_scored,
            "seconds": None if one.scored is None else one.scored.seconds,
            "prompt_tokens": None if one.scored is None else one.scored.tokens,
        }
        for one in found.runs
    }
    against = {
        one.theirs.name: {name: asdict(value) for name, value in one.differences.items()}
        for one in found.comparisons
    }
    made = {"facts": dict(found.facts), "runs": runs, "against": against}
    text = json.dumps(_plain(made | {"verdicts": found.verdicts}), indent=2)
    write(path, text + "\n", "--output")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def write_page(path: Path, found: Evaluation) -> None:
    """Write a self-contained page; raise ConfigError if it cannot be written."""
    first = found.first
    plots = [intervals(first, [(one.name, one.means[first]) for one in found.runs])]
    plots += [
        sorted_changes(
            f"{first}: {one.ours.name} less {one.theirs.name}",
            one.ours.values[first] - one.theirs.values[first],
        )
        for one in found.comparisons
    ]
    changed = ["<h2>Differences</h2>", text_table(*_differences(found))]
    head, rows = _per_query(found)
    shown = _largest(found, rows)
    write_html(
        path,
        f"Evaluation of {found.runs[0].name} on {found.data.name}",
        [
            text_table((), list(found.facts.items()), "words"),
            *(f"<p><strong>{escape(text)}</strong></p>" for text in found.verdicts),
            "<h2>Measures</h2>",
            text_table(*_means(found)),
            *(changed if found.comparisons else []),
            *plots,
            "<h2>Speed</h2>",
            text_table(*_speed(found)),
            f"<p>{escape(ABOUT.format(resamples=f'{RESAMPLES:,}'))}</p>",
            f"<h2>Queries</h2><p>{len(shown)} of {len(rows)}, the largest changes first; "
            "queries.csv has all.</p>",
            text_table(head, shown),
        ],
        "--output",
    )


def write_queries(path: Path, found: Evaluation) -> None:
    """Write a CSV with a line per query; raise ConfigError if it cannot be written."""
    head, rows = _per_query(found)
    made = io.StringIO(newline="")
    csv.writer(made).writerows([head, *rows])
    write(path, made.getvalue(), "--output")


Lines = tuple[Sequence[str], list[Sequence[str]]]


def _means(found: Evaluation) -> Lines:
    names = list(found.runs[0].means)
    rows = [[one.name, *(f"{one.means[name]:.4f}" for name in names)] for one in found.runs]
    return ["run", *names], list(rows)


def _differences(found: Evaluation) -> Lines:
    head = ["against", "measure", "difference", "95 %", "p", "better", "worse"]
    rows = [
        [
            one.theirs.name,
            name,
            f"{change.mean.value:+.4f}",
            f"{change.mean.low:+.4f} to {change.mean.high:+.4f}",
            f"{change.p:.4f}",
            str(change.better),
            str(change.worse),
        ]
        for one in found.comparisons
        for name, change in one.differences.items()
    ]
    return head, list(rows)


def _speed(found: Evaluation) -> Lines:
    """Return queries and documents per second; for classification a query is a text."""
    ranks = isinstance(found.data, Ranked)
    units = ["queries/s", "documents/s"] if ranks else ["texts/s"]
    head = ["run", "seconds", *units, "tokens/s", "not scored"]
    head += [f"price of 1,000 {'queries' if ranks else 'texts'}"] if found.price is not None else []
    rows = []
    for one in found.runs:
        if one.scored is None:
            continue
        seconds = max(one.scored.seconds, 1e-9)
        count = len(found.data.queries) if isinstance(found.data, Ranked) else one.pairs
        rates = [count / seconds, *([one.pairs / seconds] if ranks else [])]
        cells = [one.name, f"{seconds:.1f}", *(f"{rate:,.1f}" for rate in rates)]
        cells += [f"{one.scored.tokens / seconds:,.0f}", str(one.not_scored)]
        if found.price is not None:
            cells.append(f"{1000 * seconds / count * found.price / 3600:.4f}")
        rows.append(cells)
    return head, list(rows)


def _per_query(found: Evaluation) -> Lines:
    names = list(found.runs[0].values)
    head = ["id", "text", *(f"{name}, {run.name}" for name in names for run in found.runs)]
    texts = _texts(found.data)
    values = [run.values[name] for name in names for run in found.runs]
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


def _largest(found: Evaluation, rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the queries that changed most; without a comparison, those with the least value."""
    ours = found.runs[0].values[found.first]
    key = ours
    if found.comparisons:
        key = -np.abs(ours - found.comparisons[0].theirs.values[found.first])
    order = np.argsort(key, kind="stable")[:MOST_ROWS]
    return [[*rows[i][:1], rows[i][1][:200], *rows[i][2:]] for i in order.tolist()]

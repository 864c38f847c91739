"""The HTML report: the tables of standard output, with plots."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.measure.parity.gates import Comparison, Verdict
from gpuscore.measure.parity.measures import by_length
from gpuscore.measure.parity.metrics import errors
from gpuscore.measure.parity.runs import Run
from gpuscore.measure.parity.svg import histogram, scatter
from gpuscore.measure.parity.table import ABOUT_RANKS, HEAD, measured, row
from gpuscore.measure.parity.workload import Workload
from gpuscore.measure.reports import table, write_html
from gpuscore.types.arrays import Float64Array

STATES = {True: "passed", False: '<span class="failed">failed</span>', None: "skipped"}


def write_report(
    path: Path,
    title: str,
    facts: Mapping[str, str],
    workload: Workload,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    reference: str,
) -> None:
    """Write a self-contained HTML file; raise ConfigError if it cannot be written."""
    plots = [_plots(workload, found) for found in comparisons]
    write_html(
        path,
        title,
        [
            table((), [(escape(name), escape(value)) for name, value in facts.items()], "words"),
            "<h2>Differences</h2>",
            table(HEAD, [tuple(map(escape, row(found))) for found in comparisons]),
            f"<p>{escape(ABOUT_RANKS)}</p>",
            _measured(workload, comparisons),
            f"<h2>Gates</h2><p>{escape(reference)}</p>",
            table(("gate", "of", "verdict", "found"), list(map(_verdict, verdicts)), "words"),
            *plots,
        ],
    )


def _plots(workload: Workload, found: Comparison) -> str:
    lengths = by_length(workload, found.want, found.got)
    return (
        f"<h2>{escape(found.got.name)} against {escape(found.want.name)}</h2>"
        + histogram(lengths.log_p, "Errors")
        + scatter(_values(workload, found.want), _values(workload, found.got), "Score by score")
        + _by_tokens("tokens of the prompt", lengths.prompt, lengths.log_p)
        + _by_tokens("tokens of the item", lengths.item, lengths.log_p)
    )


def _by_tokens(what: str, tokens: Float64Array, differences: Float64Array) -> str:
    """Return a table of differences by the number of tokens, in powers of two."""
    rows = []
    known = ~np.isnan(tokens)
    upper = np.ceil(np.log2(np.maximum(1, tokens[known]))).astype(int)
    for power in np.unique(upper).tolist():
        part = differences[known][upper == power]
        found = errors(part)
        numbers = (part.mean(), found.median, found.p99, found.maximum)
        rows.append((f"up to {2**power}", str(len(part)), *(f"{one:.1e}" for one in numbers)))
    return table((what, "scores", "bias", "median |d log p|", "p99", "max"), rows)


def _measured(workload: Workload, comparisons: Sequence[Comparison]) -> str:
    head, rows, note = measured(workload, comparisons)
    return (
        table(tuple(map(escape, head)), [tuple(map(escape, cells)) for cells in rows])
        + f"<p>{escape(note)}</p>"
    )


def _verdict(verdict: Verdict) -> tuple[str, ...]:
    return verdict.gate, escape(verdict.subject), STATES[verdict.passed], escape(verdict.detail)


def _values(workload: Workload, run: Run) -> Float64Array:
    return np.concatenate([run.results[case.name].values.ravel() for case in workload.cases])

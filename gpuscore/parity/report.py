"""The HTML report: the tables of standard output, with plots."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.arrays import Float64Array
from gpuscore.parity.gates import Comparison, Verdict, differences
from gpuscore.parity.runs import Run
from gpuscore.parity.svg import histogram, scatter
from gpuscore.parity.table import ABOUT_RANKS, HEAD, row
from gpuscore.parity.workload import Workload
from gpuscore.reports import table, write_html


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
    plots = [
        f"<h2>{escape(found.got.name)} against {escape(found.want.name)}</h2>"
        + histogram(differences(workload, found.want, found.got)[0], "Errors")
        + scatter(_values(workload, found.want), _values(workload, found.got), "Score by score")
        for found in comparisons
    ]
    write_html(
        path,
        title,
        [
            table((), [(escape(name), escape(value)) for name, value in facts.items()], "words"),
            "<h2>Differences</h2>",
            table(HEAD, [tuple(map(escape, row(found))) for found in comparisons]),
            f"<p>{escape(ABOUT_RANKS)}</p>",
            f"<h2>Gates</h2><p>{escape(reference)}</p>",
            table(("gate", "of", "verdict", "found"), list(map(_verdict, verdicts)), "words"),
            *plots,
        ],
    )


def _verdict(verdict: Verdict) -> tuple[str, ...]:
    word = "passed" if verdict.passed else '<span class="failed">failed</span>'
    return verdict.gate, escape(verdict.subject), word, escape(verdict.detail)


def _values(workload: Workload, run: Run) -> Float64Array:
    return np.concatenate([run.results[case.name].values.ravel() for case in workload.cases])

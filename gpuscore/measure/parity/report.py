"""Output of the commands that compare: tables and verdicts as text, and as an HTML page."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import numpy as np

from gpuscore.measure.parity.gates import Comparison, Verdict
from gpuscore.measure.parity.measures import by_length, by_query
from gpuscore.measure.parity.metrics import errors
from gpuscore.measure.parity.results import Run
from gpuscore.measure.parity.workload import Workload
from gpuscore.measure.plots import histogram, scatter
from gpuscore.measure.reports import aligned, table, text_table, write_html
from gpuscore.types.batch import Float64Array

EXIT_OK, EXIT_FAILED = 0, 1
HEAD = (
    "scores",
    "against",
    "max |d log p|",
    "p99",
    "mean",
    "max |d p|",
    "tau-b",
    "top-10",
    "inversions",
    "alone",
    "items/s",
)
UNKNOWN = "-"
ABOUT_RANKS = (
    "(tau-b and top-10 are the smallest of all rankings; each ranking has a limit of its own)"
)
ABOUT_INTERVALS = (
    "(95 % intervals by bootstrap over {queries} queries; a threshold lies in the middle of each "
    "ranking)"
)
WORDS = {True: "ok  ", False: "FAIL", None: "skip"}
STATES = {True: "passed", False: '<span class="failed">failed</span>', None: "skipped"}  # HTML


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def listed(settings: object) -> str:
    """Return names and versions as text."""
    parts = settings if isinstance(settings, dict) else {}
    return ", ".join(f"{name} {number}" for name, number in parts.items()) or "unknown"


def conclude(
    title: str,
    facts: Mapping[str, str],
    workload: Workload,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    report: str | None,
    reference: str,
) -> int:
    """Print tables and verdicts, and write the report; return the exit code.

    Raises:
        ConfigError: the report cannot be written.
    """
    columns = _scores_table(comparisons)
    head, measures, note = _measured(workload, comparisons)
    print(f"\n{aligned(*columns)}\n{ABOUT_RANKS}\n\n{aligned(head, measures)}\n{note}\n")
    print(f"Gates, {reference}:")
    for verdict in verdicts:
        print(verdict_line(verdict))
    if report is not None:
        cells = [(v.gate, escape(v.subject), STATES[v.passed], escape(v.detail)) for v in verdicts]
        parts = [
            text_table((), list(facts.items()), "words"),
            "<h2>Differences</h2>",
            text_table(*columns),
            f"<p>{escape(ABOUT_RANKS)}</p>",
            text_table(head, measures),
            f"<p>{escape(note)}</p><h2>Gates</h2><p>{escape(reference)}</p>",
            table(("gate", "of", "verdict", "found"), cells, "words"),
        ]
        parts += [_with_lengths(workload, comparison) for comparison in comparisons]
        write_html(Path(report), title, parts)
    return EXIT_FAILED if any(verdict.failed for verdict in verdicts) else EXIT_OK


def _scores_table(
    comparisons: Sequence[Comparison],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return head and rows of the table of scores, without columns that are empty in all rows."""
    every = list(zip(HEAD, *map(_row, comparisons), strict=True))
    head, *rows = zip(*(column for column in every if set(column[1:]) != {UNKNOWN}), strict=True)
    return head, rows


def _row(comparison: Comparison) -> tuple[str, ...]:
    """Return one row of the table, with the columns of `HEAD`."""
    ranking, run = comparison.ranking, comparison.got
    return (
        run.name,
        comparison.reference.name,
        f"{comparison.log_p.maximum:.1e}",
        f"{comparison.log_p.p99:.1e}",
        f"{comparison.log_p.mean:.1e}",
        f"{comparison.p.maximum:.1e}",
        UNKNOWN if ranking.tau is None else f"{ranking.tau:.4f}",
        UNKNOWN if ranking.top is None else f"{ranking.top:.2f}",
        f"{ranking.inversions} of {ranking.clear_pairs}",
        UNKNOWN if run.alone is None else f"{run.alone.maximum:.1e}",
        UNKNOWN if run.items_per_second is None else f"{run.items_per_second:.0f}",
    )


def speed(run: Run) -> str:
    """Return a run's items per second as text."""
    return UNKNOWN if run.items_per_second is None else f"{run.items_per_second:.0f} items/s"


def _measured(
    workload: Workload, comparisons: Sequence[Comparison]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Return head, rows and a note of the table of measures, with a column for each comparison."""
    measured = [
        by_query(workload, comparison.reference, comparison.got) for comparison in comparisons
    ]
    names = measured[0][1] if measured else {}
    rows = []
    for name in names:
        digits = ".4f" if name.endswith("tau-b") else ".2g"  # near 1 they are after the point
        rows.append((name, *(f"{intervals[name]:{digits}}" for _, intervals in measured)))
    head = ("by query", *(comparison.got.name for comparison in comparisons))
    return head, rows, ABOUT_INTERVALS.format(queries=measured[0][0] if measured else 0)


def verdict_line(verdict: Verdict) -> str:
    return f"{WORDS[verdict.passed]}  {verdict.subject}, {verdict.gate}: {verdict.detail}"


def _error_plots(workload: Workload, comparison: Comparison, log_p: Float64Array) -> str:
    """Return plots of the differences in log p [scores], and of one run against the other."""
    reference, got = (
        np.concatenate([run.results[case.name].values.ravel() for case in workload.cases])
        for run in (comparison.reference, comparison.got)
    )
    return histogram(log_p, "Errors") + scatter(reference, got, "Score by score")


def _with_lengths(workload: Workload, comparison: Comparison) -> str:
    lengths = by_length(workload, comparison.reference, comparison.got)
    heading = f"{escape(comparison.got.name)} against {escape(comparison.reference.name)}"
    return (
        f"<h2>{heading}</h2>"
        + _error_plots(workload, comparison, lengths.log_p)
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
        measured = errors(part)
        numbers = (part.mean(), measured.median, measured.p99, measured.maximum)
        rows.append((f"up to {2**power}", str(len(part)), *(f"{number:.1e}" for number in numbers)))
    return table((what, "scores", "bias", "median |d log p|", "p99", "max"), rows)

"""Comparisons and verdicts as plain text."""

from collections.abc import Sequence

from gpuscore.measure.parity.gates import Comparison, Verdict
from gpuscore.measure.parity.measures import by_query
from gpuscore.measure.parity.workload import Workload

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

ABOUT_RANKS = (
    "(tau-b and top-10 are the smallest of all rankings, each of which has a limit of its own)"
)
ABOUT_INTERVALS = (
    "(95 % intervals by bootstrap over {queries} queries; a threshold lies in the middle of each "
    "ranking)"
)
WORDS = {True: "ok  ", False: "FAIL", None: "skip"}


def row(found: Comparison) -> tuple[str, ...]:
    """Return one row of the table, with the columns of `HEAD`."""
    ranking, run = found.ranking, found.got
    return (
        run.name,
        found.want.name,
        f"{found.log_p.maximum:.1e}",
        f"{found.log_p.p99:.1e}",
        f"{found.log_p.mean:.1e}",
        f"{found.p.maximum:.1e}",
        "-" if ranking.tau is None else f"{ranking.tau:.4f}",
        "-" if ranking.top is None else f"{ranking.top:.2f}",
        f"{ranking.inversions} of {ranking.clear_pairs}",
        "-" if run.alone is None else f"{run.alone.maximum:.1e}",
        "-" if run.items_per_second is None else f"{run.items_per_second:.0f}",
    )


def measured(
    workload: Workload, comparisons: Sequence[Comparison]
) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Return head, rows and a note of the table of measures, with a column for each comparison."""
    found = [by_query(workload, one.want, one.got) for one in comparisons]
    names = found[0][1] if found else {}
    rows = [
        (name, *(f"{intervals[name]:{_format(name)}}" for _, intervals in found)) for name in names
    ]
    head = ("by query", *(one.got.name for one in comparisons))
    return head, rows, ABOUT_INTERVALS.format(queries=found[0][0] if found else 0)


def _format(measure: str) -> str:
    """Return the format of a measure's numbers; those near 1 need digits after the point."""
    return ".4f" if measure.endswith("tau-b") else ".2g"


def verdict_line(verdict: Verdict) -> str:
    word = WORDS[verdict.passed]
    return f"{word}  {verdict.subject}, {verdict.gate}: {verdict.detail}"

"""Comparisons and verdicts as plain text."""

from gpuscore.parity.gates import Comparison, Verdict

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
    "(tau-b and top-10 are the worst of all rankings; the gates leave out rankings of near ties)"
)


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


def verdict_line(verdict: Verdict) -> str:
    word = "ok  " if verdict.passed else "FAIL"
    return f"{word}  {verdict.subject}, {verdict.gate}: {verdict.detail}"

"""The report of all commands that measure or compare: tables, verdicts and machines, as text
and as an HTML page."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from gpuscore.measure.agreement import Agreement
from gpuscore.measure.gates import Verdict
from gpuscore.measure.pages import ResultTable, filled, write_page
from gpuscore.measure.results import Measured

EXIT_OK, EXIT_FAILED = 0, 1
HEAD = ("scores", "against", "max |d log p|", "p99", "mean", "max |d p|", "tau-b", "inversions")
ABOUT = (
    "(in brackets the 95 % interval by bootstrap over queries; tau-b is the smallest of all "
    "rankings; mass is the largest distance from the labels' sum)"
)
WORDS = {True: "ok", False: "FAIL", None: "skip"}


def conclude(
    path: str | None,
    title: str,
    times: Sequence[ResultTable],
    judged: tuple[Sequence[Agreement], Sequence[Verdict]],
    facts: Mapping[str, Mapping[str, object]],
) -> int:
    """Print tables and verdicts, and write the page if `path` names one; return the exit code.

    Args:
        path: of the page.
        title: of the page.
        times: tables.
        judged: agreement of scores, one row each, and the verdicts on them.
        facts: for people, by what they are about.

    Raises:
        ConfigError: the page cannot be written.
    """
    found, verdicts = judged
    tables = [*times, *([_agreement(found)] if found else [])]
    parts = [table.as_text() for table in tables]
    parts += ["\n".join(map(_line, verdicts))] if verdicts else []
    print("\n\n".join(parts))
    if path is not None:
        cells = [(WORDS[v.passed], v.gate, v.subject, v.detail) for v in verdicts]
        gates = [ResultTable("Gates", ("verdict", "gate", "of", "found"), cells, words=True)]
        about = [
            ResultTable(name, (), [(k, _said(value)) for k, value in some.items()], words=True)
            for name, some in facts.items()
        ]
        write_page(Path(path), title, [*tables, *(gates if cells else []), *about])
        print(f"wrote {path}")
    return EXIT_FAILED if any(verdict.failed for verdict in verdicts) else EXIT_OK


def _agreement(found: Sequence[Agreement]) -> ResultTable:
    rows = [
        (
            *(one.got.name, one.reference.name),
            *(f"{one.log_p.maximum:.1e}", f"{one.log_p.p99:.1e}", f"{one.mean:.1e}"),
            *(f"{one.p:.1e}", "-" if one.tau is None else f"{one.tau:.4f}"),
            f"{one.inversions} of {one.clear_pairs}",
            "-" if one.mass is None else f"{one.mass:.1e}",
            "-" if one.got.alone is None else f"{one.got.alone:.1e}",
        )
        for one in found
    ]
    return filled("Scores", (*HEAD, "mass", "alone"), rows, [ABOUT])


def _line(verdict: Verdict) -> str:
    return f"{WORDS[verdict.passed]:<4}  {verdict.subject}, {verdict.gate}: {verdict.detail}"


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items()) or "defaults"
    return str(value)


def facts_of(server: Measured) -> dict[str, object]:
    """Return what is known of a server, for people."""
    return {**server.facts, "model": server.model, "dtype": server.dtype}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

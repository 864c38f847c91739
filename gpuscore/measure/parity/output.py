"""Output of the commands that compare: facts, tables, verdicts, report."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuscore.measure.parity.gates import Comparison, Verdict
from gpuscore.measure.parity.table import ABOUT_RANKS, HEAD, measured, row, verdict_line
from gpuscore.measure.parity.workload import Workload
from gpuscore.measure.reports import aligned

EXIT_OK, EXIT_FAILED = 0, 1


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def listed(found: object) -> str:
    """Return names and versions as text."""
    parts = found if isinstance(found, dict) else {}
    return ", ".join(f"{name} {number}" for name, number in parts.items()) or "unknown"


def hardware_of(about: Mapping[str, Any]) -> str:
    """Return a bundle's description of its hardware, which is only shown."""
    found = about.get("hardware")
    parts = found if isinstance(found, dict) else {}
    return (
        ", ".join(str(parts[name]) for name in ("tpu", "gpu", "cpu") if name in parts) or "unknown"
    )


def conclude(
    title: str,
    facts: Mapping[str, str],
    workload: Workload,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    report: str | None,
    reference: str,
) -> int:
    """Print tables and verdicts, and write the report; return the exit code."""
    print(f"\n{aligned(HEAD, map(row, comparisons))}\n{ABOUT_RANKS}\n")
    head, rows, note = measured(workload, comparisons)
    print(f"{aligned(head, rows)}\n{note}\n")
    print(f"Gates, {reference}:")
    for verdict in verdicts:
        print(verdict_line(verdict))
    if report is not None:
        from gpuscore.measure.parity.report import write_report

        write_report(Path(report), title, facts, workload, comparisons, verdicts, reference)
    return EXIT_FAILED if any(verdict.failed for verdict in verdicts) else EXIT_OK

"""The soak's result as one HTML file: verdicts, counts, and measurements over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from soak_vitals import MIB, Process, Sample

from gpuscore.measure.reports import table, write_html

SHOWN = 60  # samples of the page; verdicts are made from all
MEASURED = (
    *("minute", "server MiB, files, threads", "engine MiB, files, threads", "answers", "p50 ms"),
    *("p99 ms", "prefix cache", "faults since the row before"),
)


@dataclass(frozen=True)
class Verdict:
    gate: str
    passed: bool
    detail: str


def write_page(
    path: Path,
    title: str,
    facts: dict[str, str],
    verdicts: Sequence[Verdict],
    counts: dict[str, int],
    samples: Sequence[Sample],
    faults: Sequence[tuple[float, str]],
    errors: Sequence[str],
) -> None:
    rows = [
        (escape(v.gate), "passed" if v.passed else '<span class="failed">failed</span>',
         escape(v.detail)) for v in verdicts
    ]  # fmt: skip
    write_html(
        path,
        title,
        [
            table(("", ""), [(name, escape(value)) for name, value in facts.items()]),
            table(("gate", "verdict", "what was found"), rows),
            table(MEASURED, list(_measured(samples, faults))),
            table(("requests and answers", ""), [(k, str(n)) for k, n in sorted(counts.items())]),
            *(f"<pre>{escape(error)}</pre>" for error in errors),
        ],
    )


def _measured(
    samples: Sequence[Sample], faults: Sequence[tuple[float, str]]
) -> Iterator[tuple[str, ...]]:
    """Yield the cells of up to `SHOWN` samples; latencies belong to the sample's period."""
    before = 0.0
    for sample in samples[:: -(-len(samples) // SHOWN) or 1]:
        yield (
            f"{sample.time / 60:.1f}",
            _of(sample.server),
            _of(sample.engine),
            str(sample.requests),
            f"{1e3 * sample.p50:.1f}",
            f"{1e3 * sample.p99:.1f}",
            f"{sample.hit_rate:.0%}",
            ", ".join(escape(name) for at, name in faults if before < at <= sample.time),
        )
        before = sample.time


def _of(process: Process | None) -> str:
    if process is None:
        return "is started"
    return f"{process.rss / MIB:.1f}, {process.descriptors}, {process.threads}"

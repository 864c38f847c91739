"""The soak's result as one HTML file: verdicts, counts, and measurements over time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from soak_vitals import MIB, Sample

from gpuscore.measure.reports import table, write_html

WIDTH, HEIGHT, LEFT, FOOT = 920, 170, 60, 24
COLOURS = ("#4477aa", "#cc6677")
Points = Sequence[tuple[float, float]]  # minutes, value


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
    marks = [(at / 60, name) for at, name in faults]
    write_html(
        path,
        title,
        [
            table(("", ""), [(name, escape(value)) for name, value in facts.items()]),
            table(("gate", "verdict", "what was found"), rows),
            *(plot(name, series, marks, log=log) for name, series, log in _plots(samples)),
            "<p>Vertical lines: an engine was killed or stopped. Gaps in the engine's line: the "
            "engine was being started.</p>",
            table(("requests and answers", ""), [(k, str(n)) for k, n in sorted(counts.items())]),
            *(f"<pre>{escape(error)}</pre>" for error in errors),
        ],
    )


def _plots(samples: Sequence[Sample]) -> list[tuple[str, dict[str, Points], bool]]:
    def both(read: str, unit: float = 1.0) -> dict[str, Points]:
        return {
            which: [
                (s.time / 60, getattr(process, read) / unit)
                for s in samples
                if (process := getattr(s, which)) is not None
            ]
            for which in ("server", "engine")
        }

    def one(name: str, unit: float = 1.0) -> Points:
        found = [(s.time / 60, getattr(s, name) * unit) for s in samples]
        return [point for point in found if math.isfinite(point[1])]

    return [
        ("resident memory, MiB", both("rss", MIB), False),
        ("open descriptors", both("descriptors"), False),
        ("threads", both("threads"), False),
        ("latency of the period, ms", {"p50": one("p50", 1e3), "p99": one("p99", 1e3)}, True),
        ("share of prompt tokens from the prefix cache", {"hit rate": one("hit_rate")}, False),
        ("answers in the period", {"answers": one("requests")}, False),
    ]


def plot(
    title: str, series: dict[str, Points], marks: Sequence[tuple[float, str]], log: bool = False
) -> str:
    """Draw lines over minutes as SVG; marks are vertical lines."""
    values = [y for points in series.values() for _, y in points] or [0.0]
    low, high = (min(values), max(values)) if log else (0.0, max(values))
    scale = math.log10 if log else float
    low, high = scale(max(low, 1e-3) if log else low), scale(high or 1.0)
    end = max([x for points in series.values() for x, _ in points] or [1.0]) or 1.0

    def place(x: float, y: float) -> str:
        share = (scale(y) - low) / ((high - low) or 1.0)
        return f"{_across(x, end):.1f},{HEIGHT - FOOT - share * (HEIGHT - 2 * FOOT):.2f}"

    lines = [
        f'<path d="M{_across(at, end):.1f},{FOOT} V{HEIGHT - FOOT}" stroke="#bbb">'
        f"<title>{escape(name)}</title></path>"
        for at, name in marks
    ]
    names = []
    for (name, points), colour in zip(series.items(), COLOURS, strict=False):
        path = " ".join(place(x, y) for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        names.append(f'<tspan fill="{colour}">{escape(name)}</tspan>')
    shown = (10**low, 10**high) if log else (low, high)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" '
        f'font-family="sans-serif" font-size="11"><text x="{LEFT}" y="14">{escape(title)}: '
        f"{', '.join(names)}</text>"
        f'<text x="{LEFT - 4}" y="{FOOT + 8}" text-anchor="end">{shown[1]:.4g}</text>'
        f'<text x="{LEFT - 4}" y="{HEIGHT - FOOT}" text-anchor="end">{shown[0]:.4g}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 8}" text-anchor="end">{end:.1f} minutes</text>'
        f'<rect x="{LEFT}" y="{FOOT}" width="{WIDTH - LEFT - 10}" height="{HEIGHT - 2 * FOOT}" '
        f'fill="none" stroke="#888"/>{"".join(lines)}</svg>'
    )


def _across(x: float, end: float) -> float:
    return LEFT + x / end * (WIDTH - LEFT - 10)

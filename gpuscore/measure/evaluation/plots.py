"""Plots of an evaluation as SVG, drawn without a plotting library."""

from collections.abc import Sequence
from html import escape

import numpy as np

from gpuscore.measure.reports import Interval
from gpuscore.types.arrays import Float64Array

WIDTH, MARGIN, ROW = 620, 24, 26
NAMES = 220  # of the width
MOST_BARS = 400


def intervals(title: str, rows: Sequence[tuple[str, Interval]]) -> str:
    """Plot means with their 95 % intervals, one below the other."""
    known = [value for _, one in rows for value in (one.low, one.high, one.value)]
    known = [value for value in known if not np.isnan(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    space = 0.1 * (high - low) or 0.05
    low, high = low - space, high + space

    def at(value: float) -> float:
        return NAMES + (value - low) / (high - low) * (WIDTH - NAMES - MARGIN)

    parts = []
    for number, (name, one) in enumerate(rows):
        y = 40 + ROW * number
        parts.append(f'<text x="{NAMES - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        if not np.isnan(one.low):
            parts.append(
                f'<path d="M{at(one.low):.1f},{y} H{at(one.high):.1f}" stroke="#4477aa" '
                'stroke-width="3" fill="none"/>'
            )
        parts.append(
            f'<circle cx="{at(one.value):.1f}" cy="{y}" r="5" fill="#4477aa">'
            f"<title>{one.value:.4f}</title></circle>"
        )
    foot = 40 + ROW * len(rows)
    parts += [
        f'<text x="{at(value):.1f}" y="{foot}" text-anchor="middle">{value:.3f}</text>'
        for value in np.linspace(low + space, high - space, 3).tolist()
    ]
    return _svg(title, foot + 12, "".join(parts))


def sorted_changes(title: str, changes: Float64Array) -> str:
    """Plot the change of each query, largest first, with no change as a line."""
    values = np.sort(changes[~np.isnan(changes)])[::-1]
    if values.size > MOST_BARS:  # as many as there is room for, evenly chosen
        values = values[np.linspace(0, values.size - 1, MOST_BARS).round().astype(int)]
    height = 200
    most = max(1e-9, float(np.abs(values).max(initial=0.0)))
    wide = (WIDTH - 2 * MARGIN) / max(1, values.size)
    middle = height / 2 + 14
    bars = []
    for index, value in enumerate(values.tolist()):
        tall = abs(value) / most * (height / 2 - 24)
        top = middle - tall if value > 0 else middle
        colour = "#4477aa" if value > 0 else "#cc6677"
        bars.append(
            f'<rect x="{MARGIN + index * wide:.1f}" y="{top:.1f}" '
            f'width="{max(0.5, wide - 0.5):.1f}" height="{tall:.1f}" fill="{colour}">'
            f"<title>{value:+.4f}</title></rect>"
        )
    line = f'<path d="M{MARGIN},{middle} H{WIDTH - MARGIN}" stroke="#888" fill="none"/>'
    said = f'<text x="{MARGIN}" y="{height + 4}">up to {most:.3f}; a bar is a query</text>'
    return _svg(title, height + 12, "".join(bars) + line + said)


def _svg(title: str, height: float, inner: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" font-family="sans-serif" font-size="12" '
        f'fill="currentColor"><text x="{MARGIN}" y="16" font-weight="bold">{escape(title)}</text>'
        f"{inner}</svg>"
    )
